/*
 * meshes.c - parameters of one module on several meshes.
 *
 * A unit gathers and reduces over one mesh. Where a module's parameters are given others, those of
 * each further mesh become a unit without a module, whose host is the module's: it stands among the
 * host's tied units (tied.c), is gathered before the host's modules run, freed with it and reduced
 * after it, over groups of its own. The host keeps the options' mesh; where no parameter is on that
 * one, the mesh of its first.
 *
 * Invariant: the meshes of a host and its units have different ranks pairwise.
 */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "fsdp/unit.h"

fsdp_mesh *fsdp__unit_mesh_of(const fsdp__unit *u, const fsdp_param *p)
{
    if (!u->opt.mesh_fn) return u->opt.mesh;
    const char *name = p->name ? p->name : "";
    fsdp_mesh *m = u->opt.mesh_fn(u->opt.mesh_arg, name, p);
    if (fsdp_error()) return NULL;
    if (!m) return u->opt.mesh;
    int n = fsdp_mesh_ndim(m);
    if (n == 1 || n == 2) return m;
    fsdp__fail(FSDP_INVALID_ARGUMENT,
               "the mesh function puts %s on a mesh of %d axes; expected one (shard) or two "
               "(replicate, then shard)",
               name, n);
    return NULL;
}

void fsdp__unit_use_groups(fsdp__unit *u)
{
    int n = fsdp_mesh_ndim(u->opt.mesh);
    u->shard = fsdp_mesh_group(u->opt.mesh, n - 1);
    u->replicate = n == 2 ? fsdp_mesh_group(u->opt.mesh, 0) : NULL;
    u->S = fsdp_group_size(u->shard);
    u->R = u->replicate ? fsdp_group_size(u->replicate) : 1;
}

void fsdp__mesh_text(const fsdp_mesh *m, fsdp__str *out)
{
    for (int a = 0; a < fsdp_mesh_ndim(m); a++)
        fsdp__str_addf(out, "%s%s %d", a ? " x " : "", fsdp_mesh_axis_name(m, a),
                       fsdp_mesh_size(m, a));
}

/* ---- whose mesh is which ------------------------------------------------------------- */

static bool same_ranks(const fsdp_group *a, const fsdp_group *b)
{
    if (a == b) return true;
    if (fsdp_group_size(a) != fsdp_group_size(b)) return false;
    for (int r = 0; r < fsdp_group_size(a); r++)
        if (fsdp_group_world_rank(a, r) != fsdp_group_world_rank(b, r)) return false;
    return true;
}

/* Two objects with the same ranks along each axis. */
static bool is_twin(const fsdp_mesh *a, const fsdp_mesh *b)
{
    if (a == b || fsdp_mesh_ndim(a) != fsdp_mesh_ndim(b)) return false;
    for (int k = 0; k < fsdp_mesh_ndim(a); k++)
        if (!same_ranks(fsdp_mesh_group(a, k), fsdp_mesh_group(b, k))) return false;
    return true;
}

static const char *name_of(const fsdp__fparam *p)
{
    return p->param->name ? p->param->name : "a parameter";
}

static fsdp_status ask_all(const fsdp__unit *u, fsdp_mesh **mesh)
{
    for (int i = 0; i < u->n_params; i++) {
        if (!(mesh[i] = fsdp__unit_mesh_of(u, u->params[i].param))) return fsdp_error();
        for (int k = 0; k < i; k++)
            if (is_twin(mesh[i], mesh[k]))
                return fsdp__fail(FSDP_INVALID_ARGUMENT,
                                  "fsdp_fully_shard: %s and %s are on two meshes of the same "
                                  "ranks; give both the same mesh object (NULL of the mesh "
                                  "function is the options' mesh)",
                                  name_of(&u->params[k]), name_of(&u->params[i]));
    }
    return FSDP_OK;
}

/* ---- parting ----------------------------------------------------------------------------- */

/* A unit over mesh m for n parameters of u, among u's tied ones. */
static fsdp__unit *add_unit(fsdp__unit *u, fsdp_mesh *m, int n)
{
    size_t room = (size_t)u->n_tied + 1;
    fsdp__unit **tied = fsdp__realloc(u->tied, room * sizeof(fsdp__unit *), "a unit's meshes");
    if (!tied) return NULL;
    u->tied = tied;
    fsdp__unit *t = fsdp__unit_new(&u->opt, 1);
    if (!t) return NULL;
    fsdp__str name = {0};
    fsdp__str_addf(&name, "%s%sover ", u->name, *u->name ? " " : "");
    fsdp__mesh_text(m, &name);
    t->name = fsdp__str_take(&name);
    t->users = fsdp__calloc(1, sizeof(fsdp__unit *), "a unit's meshes");
    t->params = fsdp__calloc((size_t)n, sizeof *t->params, "a unit's parameters");
    if (!t->name || !t->users || !t->params) {
        fsdp__unit_free(t);
        return NULL;
    }
    t->opt.mesh = m;
    fsdp__unit_use_groups(t);
    t->file = u->file;
    t->host = t->users[t->n_users++] = u;
    u->tied[u->n_tied++] = t;
    return t;
}

/* The parameters that are on mesh m go from u to a unit of theirs. */
static fsdp_status move_out(fsdp__unit *u, fsdp_mesh **mesh, fsdp_mesh *m)
{
    int n = 0, kept = 0;
    for (int i = 0; i < u->n_params; i++)
        n += mesh[i] == m;
    fsdp__unit *t = add_unit(u, m, n);
    if (!t) return fsdp_error();
    for (int i = 0; i < u->n_params; i++) {
        if (mesh[i] == m) {
            t->params[t->n_params] = u->params[i];
            t->params[t->n_params++].unit = t;
            continue;
        }
        u->params[kept] = u->params[i];
        mesh[kept++] = mesh[i];
    }
    u->n_params = kept;
    return FSDP_OK;
}

static fsdp_status part(fsdp__unit *u, fsdp_mesh **mesh)
{
    FSDP_TRY(ask_all(u, mesh));
    bool own = u->n_params == 0;
    for (int i = 0; i < u->n_params; i++)
        own = own || mesh[i] == u->opt.mesh;
    if (!own) {
        u->opt.mesh = mesh[0];
        fsdp__unit_use_groups(u);
    }
    for (int i = 0; i < u->n_params;)
        if (mesh[i] == u->opt.mesh)
            i++;
        else
            FSDP_TRY(move_out(u, mesh, mesh[i]));
    return FSDP_OK;
}

fsdp_status fsdp__unit_part_by_mesh(fsdp__unit *u)
{
    if (!u->opt.mesh_fn) return FSDP_OK;
    fsdp_mesh **mesh = fsdp__calloc((size_t)u->n_params + 1, sizeof(fsdp_mesh *), "meshes");
    fsdp_status s = mesh ? part(u, mesh) : fsdp_error();
    free(mesh);
    return s;
}

fsdp_status fsdp__unit_one_mesh(const fsdp__unit *u, const char *what)
{
    int n = 1;
    for (int k = 0; k < u->n_tied; k++)
        n += u->tied[k]->host == u;
    if (n == 1) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT,
                      "%s: unit \"%s\" has parameters on %d meshes, and which of them is meant is "
                      "not said; give its parameters one mesh, or shard the modules of each mesh "
                      "by themselves",
                      what, u->name, n);
}
