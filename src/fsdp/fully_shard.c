/*
 * fully_shard.c - making a unit of a module.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "fsdp/unit.h"
#include "tensor/kernels.h"

fsdp_shard_options fsdp_shard_defaults(fsdp_mesh *mesh)
{
    return (fsdp_shard_options){.mesh = mesh,
                                .reshard_after_forward = FSDP_RESHARD_AUTO,
                                .mp_policy = {FSDP_DTYPE_NONE, FSDP_DTYPE_NONE, FSDP_DTYPE_NONE, 1},
                                .prefetch_limit = 1};
}

/* ---- what the unit manages -------------------------------------------------------- */

static bool has_param(const fsdp__unit *u, const fsdp_param *p)
{
    for (int i = 0; i < u->n_params; i++)
        if (u->params[i].param == p) return true;
    return false;
}

static bool ignored(const fsdp_shard_options *o, const fsdp_param *p)
{
    for (int i = 0; o && i < o->n_ignored; i++)
        if (o->ignored_params[i] == p) return true;
    return false;
}

static fsdp_status check_param(const fsdp_module *m, const char *name, const fsdp_param *p)
{
    if (p->ndim == 0)
        return fsdp__fail(FSDP_INVALID_SHAPE, "%s.%s has no dims and cannot be cut; make it 1-dim",
                          m->type, name);
    if (p->optimizers > 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "an optimizer holds %s whole already, and would keep state for the whole "
                          "of it; make the optimizer after fsdp_fully_shard",
                          p->name);
    if (p->emptied)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_to_empty gave the whole of %s memory before fsdp_fully_shard, on "
                          "every rank; call fsdp_fully_shard while it is on the meta device, and "
                          "fsdp_to_empty after it",
                          p->name);
    return FSDP_OK;
}

/* Depth first, not entering modules that are units already. */
static fsdp_status gather_params(fsdp__unit *u, fsdp_module *m, const fsdp_shard_options *o,
                                 int64_t *cap)
{
    for (int64_t i = 0; i < m->in->n_params; i++) {
        fsdp_param *p = m->in->params[i].param;
        if (has_param(u, p) || ignored(o, p)) continue;
        if (p->shard) {
            FSDP_TRY(fsdp__tied_prepare(u, p, m));
            continue;
        }
        FSDP_TRY(check_param(m, m->in->params[i].name, p));
        FSDP_TRY(FSDP__GROW(u->params, *cap, u->n_params + 1, "a unit's parameters"));
        u->params[u->n_params] =
            (fsdp__fparam){.param = fsdp_param_retain(p), .unit = u, .holder = m, .holder_at = i};
        u->n_params++;
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        if (!fsdp__unit_of(m->in->children[i]))
            FSDP_TRY(gather_params(u, m->in->children[i], o, cap));
    return FSDP_OK;
}

static fsdp_status shard_dim(fsdp__unit *u, const fsdp__fparam *p, int *dim)
{
    *dim = 0;
    if (!u->opt.placement_fn) return FSDP_OK;
    const char *name = p->param->name ? p->param->name : "";
    int d = u->opt.placement_fn(u->opt.placement_arg, name, p->param);
    int n = p->param->ndim;
    *dim = d < 0 ? d + n : d;
    if (*dim >= 0 && *dim < n) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT,
                      "the placement function cuts %s along dim %d; it has %d dims", name, d, n);
}

/* This rank's rows of a tensor with values; NULL: a meta one's shape alone. */
static fsdp_tensor *make_shard(fsdp__unit *u, fsdp__fparam *p, int dim)
{
    fsdp_param *q = p->param;
    int64_t sizes[FSDP_MAX_DIMS], row0;
    memcpy(sizes, q->size, sizeof sizes);
    int64_t rows = fsdp__cut_rows(&p->cut, fsdp_group_rank(u->shard), &row0);
    sizes[dim] = rows;
    fsdp_device d = q->t->st->device;
    fsdp_purpose before = fsdp__purpose_set(FSDP_PARAMETERS);
    /* Peers read shards only when each rank gathers its own copy. */
    fsdp__allocator *home =
        u->S > 1 && u->opt.private_gather ? fsdp__comm_allocator(u->shard) : NULL;
    if (u->file) home = u->file; /* and a private gather reads a copy */
    fsdp_tensor *t = d == FSDP_META ? fsdp__tensor_create(q->dtype, q->ndim, sizes, d)
                                    : fsdp__tensor_alloc(q->dtype, q->ndim, sizes, FSDP_PARAMETERS,
                                                         home, q->name ? q->name : "a shard");
    fsdp__purpose_set(before);
    if (!t) return NULL;
    t->st->home = home;
    if (q->t->st->data) {
        const char *src = fsdp_data(q->t);
        int64_t at = row0 * q->t->stride[dim];
        fsdp__k_copy(q->ndim, sizes, src + (size_t)at * fsdp_dtype_size(q->dtype), q->dtype,
                     q->t->stride, fsdp_data(t), q->dtype, t->stride, 0);
        t->st->poisoned = q->t->st->poisoned;
    }
    return t;
}

static fsdp_status attach_layout(fsdp__unit *u, fsdp__fparam *p, int dim)
{
    fsdp_placement place[2] = {{FSDP_REPLICATE, 0}, {FSDP_REPLICATE, 0}};
    place[u->replicate ? 1 : 0] = (fsdp_placement){FSDP_SHARD, dim};
    fsdp__layout *l = fsdp__layout_create(u->opt.mesh, place, p->param->ndim, p->param->size);
    if (!l) return fsdp_error();
    fsdp__layout_attach(p->sharded, l);
    return FSDP_OK;
}

/* A tensor of p's whole shape over an empty storage. */
static fsdp_tensor *empty_whole(fsdp__fparam *p, fsdp_dtype t, fsdp_purpose purpose)
{
    int64_t n = fsdp__numel_of(p->param->ndim, p->param->size);
    fsdp__storage *st = fsdp__storage_create(FSDP_CPU, n * (int64_t)fsdp_dtype_size(t), purpose);
    if (!st) return NULL;
    fsdp_tensor *x =
        fsdp__tensor_own(fsdp__tensor_view(st, t, p->param->ndim, p->param->size, NULL, 0));
    fsdp__storage_release(st);
    return x;
}

static fsdp_status shard_param(fsdp__unit *u, fsdp__fparam *p)
{
    const fsdp_mixed_precision_policy *mp = &u->opt.mp_policy;
    bool floating = fsdp_dtype_is_floating(p->param->dtype);
    fsdp_dtype compute =
        mp->param_dtype != FSDP_DTYPE_NONE && floating ? mp->param_dtype : p->param->dtype;
    fsdp_dtype reduce = mp->reduce_dtype != FSDP_DTYPE_NONE ? mp->reduce_dtype : compute;
    int dim;
    FSDP_TRY(shard_dim(u, p, &dim));
    p->cut = fsdp__cut_of(p->param->ndim, p->param->size, dim, u->S);
    FSDP_TRY(fsdp__offload_promise(u, p));
    p->sharded = fsdp__tensor_own(make_shard(u, p, dim));
    if (!p->sharded) return fsdp_error();
    FSDP_TRY(attach_layout(u, p, dim));
    FSDP_TRY(fsdp_requires_grad_(p->sharded, p->param->requires_grad));
    p->whole = empty_whole(p, compute, FSDP_UNSHARDED);
    p->grad = p->whole ? empty_whole(p, reduce, FSDP_GRADIENTS) : NULL;
    if (!p->grad) return fsdp_error();
    if (u->S * u->R > 1)
        p->grad->st->home = fsdp__comm_allocator(u->S > 1 ? u->shard : u->replicate);
    fsdp__autograd *ag = fsdp__autograd_of(p->whole);
    if (!ag) return fsdp_error();
    ag->provide = fsdp__grad_place;
    ag->provide_arg = p;
    return FSDP_OK;
}

/* ---- making a unit --------------------------------------------------------------------- */

static fsdp_status check_module(const fsdp_module *m)
{
    if (!m) return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_fully_shard: the module is NULL");
    if (!fsdp__module_has_forward(m))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_fully_shard of a %s, which has no forward; shard its children, or "
                          "give it one",
                          m->type);
    if (fsdp__unit_of(m))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_fully_shard was called on this %s (\"%s\") before; once a module",
                          m->type, fsdp_module_name(m));
    return FSDP_OK;
}

static fsdp_status check_dtype(const char *field, fsdp_dtype t)
{
    if (t == FSDP_DTYPE_NONE || ((int)t >= 0 && t < FSDP_DTYPE_COUNT && fsdp_dtype_is_floating(t)))
        return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DTYPE,
                      "fsdp_fully_shard: mp_policy.%s is %s; expected a floating dtype, or "
                      "FSDP_DTYPE_NONE",
                      field, (int)t >= 0 && t < FSDP_DTYPE_COUNT ? fsdp_dtype_name(t) : "no dtype");
}

static fsdp_status check_options(const fsdp_shard_options *o)
{
    if (o->n_ignored < 0 || (o->n_ignored > 0 && !o->ignored_params))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_fully_shard: %d ignored parameters at NULL",
                          o->n_ignored);
    for (int i = 0; i < o->n_ignored; i++)
        if (!o->ignored_params[i])
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "fsdp_fully_shard: ignored parameter %d is NULL", i);
    if (o->prefetch_limit < -1)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_fully_shard: prefetch_limit %d; expected -1 (nothing ahead), 0 (as "
                          "FSDP2) or the number of units",
                          o->prefetch_limit);
    if (o->reshard_after_forward != FSDP_RESHARD_AUTO &&
        o->reshard_after_forward != FSDP_RESHARD_ALWAYS &&
        o->reshard_after_forward != FSDP_RESHARD_NEVER)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_fully_shard: reshard_after_forward is %d; expected "
                          "FSDP_RESHARD_AUTO, FSDP_RESHARD_ALWAYS or FSDP_RESHARD_NEVER",
                          (int)o->reshard_after_forward);
    FSDP_TRY(check_dtype("param_dtype", o->mp_policy.param_dtype));
    FSDP_TRY(check_dtype("reduce_dtype", o->mp_policy.reduce_dtype));
    return check_dtype("output_dtype", o->mp_policy.output_dtype);
}

/* Below another of the list, or there twice. */
static bool superfluous(fsdp_module *const *m, int n, int i)
{
    for (int k = 0; k < n; k++) {
        if (k < i && m[k] == m[i]) return true;
        for (const fsdp_module *up = m[i]->in->parent; up; up = up->in->parent)
            if (up == m[k]) return true;
    }
    return false;
}

/* The last parts of the modules' names, until the tree gives the whole ones. */
static char *first_name(fsdp_module *const *m, int n)
{
    if (n == 1 && !*fsdp_module_name(m[0])) return fsdp__strdup("");
    fsdp__str s = {0};
    for (int i = 0; i < n; i++)
        fsdp__str_addf(&s, "%s%s", i ? ", " : "", fsdp_module_name(m[i]));
    return fsdp__str_take(&s);
}

static fsdp_status use_mesh(fsdp__unit *u)
{
    if (!u->opt.mesh) {
        const char *name = "shard";
        int size = fsdp_world_size();
        u->opt.mesh = fsdp__slot_get(FSDP__SLOT_FSDP);
        if (!u->opt.mesh) {
            u->opt.mesh = fsdp_mesh_create(FSDP_CPU, 1, &size, &name);
            if (!u->opt.mesh) return fsdp_error();
            fsdp__slot_set(FSDP__SLOT_FSDP, u->opt.mesh, NULL); /* the mesh room owns it */
        }
    }
    int n = fsdp_mesh_ndim(u->opt.mesh);
    if (n < 1 || n > 2)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_fully_shard over a mesh of %d axes; expected one (shard) or two "
                          "(replicate, then shard)",
                          n);
    fsdp__unit_use_groups(u);
    return FSDP_OK;
}

/* The lists and numbers that depend on how many parameters there are. */
static fsdp_status make_lists(fsdp__unit *u)
{
    size_t n = (size_t)u->n_params + 1;
    u->gather_entries = fsdp__calloc(n, sizeof *u->gather_entries, "a unit");
    u->reduce_entries = fsdp__calloc(n, sizeof *u->reduce_entries, "a unit");
    u->reduce_params = fsdp__calloc(n, sizeof *u->reduce_params, "a unit");
    return u->gather_entries && u->reduce_entries && u->reduce_params ? FSDP_OK : fsdp_error();
}

static fsdp_status cut_params(fsdp__unit *u)
{
    FSDP_TRY(fsdp__parts_prepare(u));
    FSDP_TRY(make_lists(u));
    for (int i = 0; i < u->n_params; i++)
        FSDP_TRY(shard_param(u, &u->params[i]));
    return FSDP_OK;
}

static fsdp_status build(fsdp__unit *u, const fsdp_shard_options *o)
{
    int64_t cap = 0;
    if (!(u->name = first_name(u->modules, u->n_modules))) return fsdp_error();
    FSDP_TRY(use_mesh(u));
    FSDP_TRY(fsdp__offload_open(u));
    for (int k = 0; k < u->n_modules; k++) /* the placement function and messages name them */
        FSDP_TRY(fsdp__module_name_new(u->modules[k]));
    for (int k = 0; k < u->n_modules; k++)
        FSDP_TRY(gather_params(u, u->modules[k], o, &cap));
    FSDP_TRY(fsdp__unit_part_by_mesh(u));
    FSDP_TRY(cut_params(u));
    for (int k = 0; k < u->n_tied; k++)
        if (u->tied[k]->host) {
            FSDP_TRY(cut_params(u->tied[k]));
        } else if (!u->tied[k]->gather_entries) {
            u->tied[k]->n_params = 1;
            fsdp_status s = make_lists(u->tied[k]);
            u->tied[k]->n_params = 0;
            FSDP_TRY(s);
        }
    return fsdp__hooks_install(u);
}

static void commit_params(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        p->param->shard = p;
        p->param->shard_ops = &fsdp__shard_ops_of_units;
        p->param->kept = p->sharded;
        fsdp__param_set(p->param, p->sharded);
        p->param->unit = u->name;
    }
    fsdp__unit_name_storages(u);
}

/* From here on nothing fails: the shards take the place of the parameters. */
static void commit(fsdp__unit *u)
{
    commit_params(u);
    for (int k = 0; k < u->n_tied; k++)
        if (u->tied[k]->host == u) commit_params(u->tied[k]);
    fsdp__tied_commit(u);
    for (int k = 0; k < u->n_modules; k++) {
        u->modules[k]->in->shard = u;
        u->modules[k]->in->shard_free = fsdp__unit_free;
    }
}

fsdp_status fsdp_fully_shard_list(fsdp_module *const *m, int n, const fsdp_shard_options *o)
{
    if (fsdp_error()) return fsdp_error();
    if (!m || n < 1)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_fully_shard_list: %d modules; expected one or more", m ? n : 0);
    for (int i = 0; i < n; i++)
        FSDP_TRY(check_module(m[i]));
    fsdp_shard_options opt = o ? *o : fsdp_shard_defaults(NULL);
    FSDP_TRY(check_options(&opt));
    fsdp__unit *u = fsdp__unit_new(&opt, n);
    if (!u) return fsdp_error();
    for (int i = 0; i < n; i++)
        if (!superfluous(m, n, i)) u->modules[u->n_modules++] = m[i];
    u->module = u->modules[0];
    u->refs = u->n_modules;
    fsdp_status s = build(u, &opt);
    if (s == FSDP_OK) {
        commit(u);
        for (int i = 0; i < opt.n_ignored; i++)
            opt.ignored_params[i]->ignored = true;
    } else {
        u->refs = 1;
        fsdp__unit_free(u);
    }
    return s;
}

fsdp_status fsdp_fully_shard(fsdp_module *m, const fsdp_shard_options *o)
{
    return fsdp_fully_shard_list(&m, 1, o);
}
