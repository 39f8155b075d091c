/*
 * tied.c - a weight that several units share.
 *
 * It becomes a unit of its own, without a module: gathered while any of its
 * users is whole, freed with the last of them. Its gradient is one place into
 * which all uses write, so it is summed before it is reduced; the reduction
 * comes with the last use in backward, which is known from the passes forward,
 * and at the end of backward where not.
 *
 * Units of parameters that their module has on another mesh (meshes.c) use the same: they have one
 * user, their host, and go where it goes.
 *
 * Invariants: a tied unit has one parameter and at least one user; it is whole
 * whenever one of its users is (it may be gathered ahead before); it stands in
 * its tree behind the first of its users.
 */
#include "fsdp/unit.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

/* ---- making ------------------------------------------------------------------------ */

static bool below(const fsdp_module *m, const fsdp_module *top)
{
    while (m && m != top)
        m = m->in->parent;
    return m != NULL;
}

/* holder lies below a module of u, so u took the parameter too early. */
static bool too_early(const fsdp__unit *u, const fsdp_module *holder)
{
    for (int k = 0; k < u->n_modules; k++)
        if (below(holder, u->modules[k])) return true;
    for (int k = 0; k < u->n_users; k++)
        if (too_early(u->users[k], holder)) return true;
    return false;
}

static const char *dtype_or_same(fsdp_dtype t)
{
    return t == FSDP_DTYPE_NONE ? "as it is" : fsdp_dtype_name(t);
}

static fsdp_status fits(const fsdp__unit *u, const fsdp__unit *of, const fsdp_param *p)
{
    const fsdp_mixed_precision_policy *a = &u->opt.mp_policy, *b = &of->opt.mp_policy;
    const char *name = p->name ? p->name : "a weight";
    if (of->tree)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s is shared with unit \"%s\", which has run already; call "
                          "fsdp_fully_shard on all modules before the first forward",
                          name, of->name);
    fsdp_mesh *mesh = fsdp__unit_mesh_of(u, p);
    if (!mesh) return fsdp_error();
    int n = fsdp_mesh_ndim(mesh);
    if (fsdp_mesh_group(mesh, n - 1) != of->shard ||
        (n == 2 ? fsdp_mesh_group(mesh, 0) : NULL) != of->replicate ||
        u->opt.private_gather != of->opt.private_gather || u->file != of->file)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "%s is shared by units \"%s\" and \"%s\", which have another mesh, "
                          "offload or way to gather; give both the same",
                          name, of->name, u->name);
    if (a->param_dtype != b->param_dtype || a->reduce_dtype != b->reduce_dtype)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "%s is shared by unit \"%s\" (gathered: %s, reduced: %s) and unit \"%s\" "
                          "(%s, %s); give both one precision policy",
                          name, of->name, dtype_or_same(b->param_dtype),
                          dtype_or_same(b->reduce_dtype), u->name, dtype_or_same(a->param_dtype),
                          dtype_or_same(a->reduce_dtype));
    return FSDP_OK;
}

static fsdp_status room(fsdp__unit ***list, int n)
{
    fsdp__unit **more = fsdp__realloc(*list, (size_t)n * sizeof **list, "tied weights");
    if (more) *list = more;
    return more ? FSDP_OK : fsdp_error();
}

/* A unit for p, which `of` has: empty until it is committed. */
static fsdp__unit *make(fsdp__unit *of, fsdp_param *p)
{
    fsdp__unit *t = fsdp__unit_new(&of->opt, 1);
    if (!t) return NULL;
    t->name = fsdp__strdup(p->name ? p->name : "a shared weight");
    t->params = fsdp__calloc(1, sizeof *t->params, "a unit's parameters");
    if (!t->name || !t->params || room(&t->users, 2) != FSDP_OK) {
        fsdp__unit_free(t);
        return NULL;
    }
    t->joining = p;
    t->shard = of->shard;
    t->replicate = of->replicate;
    t->file = of->file;
    t->S = of->S;
    t->R = of->R;
    return t;
}

fsdp_status fsdp__tied_prepare(fsdp__unit *u, fsdp_param *p, const fsdp_module *holder)
{
    fsdp__unit *of = ((fsdp__fparam *)p->shard)->unit, *had = of->host ? of->host : of;
    fsdp__unit *t = of->n_users > 0 && !of->host ? of : NULL;
    if (too_early(of, holder))
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "%s belongs to unit \"%s\" already, which is around it: shard blocks "
                          "first and the root last",
                          p->name ? p->name : "a parameter", of->name);
    FSDP_TRY(fits(u, of, p));
    FSDP_TRY(fsdp__unit_reshard(of));
    for (int k = 0; k < u->n_tied; k++)
        if (u->tied[k] == t || u->tied[k]->joining == p) return FSDP_OK; /* twice in this unit */
    /* All memory first: committing cannot fail. */
    FSDP_TRY(room(&u->tied, u->n_tied + 1));
    FSDP_TRY(t ? room(&t->users, t->n_users + 1) : room(&had->tied, had->n_tied + u->n_tied + 1));
    if (!t && !(t = make(of, p))) return fsdp_error();
    u->tied[u->n_tied++] = t;
    return FSDP_OK;
}

/* The parameters of u were moved in memory: who points to them is told. */
static void point_to(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        p->unit = u;
        p->param->shard = p;
        p->param->unit = u->name;
        p->whole->ag->provide_arg = p;
    }
}

/* p moves from its unit to t. */
static void move(fsdp__unit *t)
{
    fsdp__fparam *p = t->joining->shard;
    fsdp__unit *of = p->unit, *had = of->host ? of->host : of; /* whose passes use it */
    int at = (int)(p - of->params);
    t->joining = NULL;
    t->params[0] = *p;
    t->n_params = 1;
    memmove(p, p + 1, sizeof *p * (size_t)(of->n_params - at - 1));
    of->n_params--;
    point_to(of);
    point_to(t);
    had->tied[had->n_tied++] = t;
    t->users[t->n_users++] = had;
}

void fsdp__tied_commit(fsdp__unit *u)
{
    for (int k = 0; k < u->n_tied; k++) {
        fsdp__unit *t = u->tied[k];
        if (t->host) continue;
        if (t->joining) move(t);
        t->users[t->n_users++] = u;
        t->refs = t->n_users;
    }
}

void fsdp__tied_leave(fsdp__unit *u)
{
    for (int k = 0; k < u->n_tied; k++) {
        fsdp__unit *t = u->tied[k];
        bool mine = t->joining != NULL; /* not committed */
        for (int i = 0; i < t->n_users; i++) {
            if (t->users[i] != u) continue;
            t->users[i--] = t->users[--t->n_users];
            mine = true;
        }
        if (t->host == u) t->host = NULL;
        if (mine) fsdp__unit_free(t);
    }
    free(u->tied);
    free(u->users);
    u->tied = u->users = NULL;
    u->n_tied = u->n_users = 0;
}

/* ---- running -------------------------------------------------------------------------- */

fsdp_status fsdp__tied_release(fsdp__unit *t, bool to_parts)
{
    for (int i = 0; i < t->n_users; i++)
        if (!fsdp__unit_resting(t->users[i])) return FSDP_OK;
    return to_parts && t->host ? fsdp__unit_reshard_to_parts(t) : fsdp__unit_reshard(t);
}

void fsdp__tied_forward(fsdp__unit *u)
{
    for (int i = 0; i < u->n_tied; i++)
        u->tied[i]->uses++;
}

void fsdp__tied_pre_backward(fsdp__unit *u)
{
    for (int i = 0; i < u->n_tied; i++) {
        u->tied[i]->pre_backward = true;
        u->tied[i]->post_backward = false;
    }
}

fsdp_status fsdp__tied_reduce(fsdp__unit *t)
{
    t->sync = true; /* as long as one user keeps gradients whole, they are kept for all */
    t->all_reduce = true;
    for (int i = 0; i < t->n_users; i++) {
        t->sync = t->sync && t->users[i]->sync;
        t->all_reduce = t->all_reduce && t->users[i]->all_reduce;
    }
    const fsdp__unit *first = t->users[0]; /* it had the parameter */
    t->divide = first->divide;
    t->force_sum = first->force_sum;
    t->reduce_unused = first->reduce_unused;
    return fsdp__unit_post_backward(t);
}

fsdp_status fsdp__tied_post_backward(fsdp__unit *u)
{
    for (int i = 0; i < u->n_tied; i++) {
        fsdp__unit *t = u->tied[i];
        /* With a host: when the host is reduced, after each of its passes. */
        if (t->uses > 0 && --t->uses > 0 && !t->host) continue;
        if (t->pre_backward && !t->post_backward) FSDP_TRY(fsdp__tied_reduce(t));
    }
    return FSDP_OK;
}
