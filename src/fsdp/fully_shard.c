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

/* Depth first, not entering modules that are units already. */
static fsdp_status gather_params(fsdp__unit *u, fsdp_module *m, int64_t *cap)
{
    for (int64_t i = 0; i < m->in->n_params; i++) {
        fsdp_param *p = m->in->params[i].param;
        if (has_param(u, p)) continue;
        const char *name = m->in->params[i].name;
        if (p->shard)
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "%s.%s belongs to another unit already: shard blocks first and the "
                              "root last, and modules that share a weight as one unit",
                              m->type, name);
        if (p->ndim == 0)
            return fsdp__fail(FSDP_INVALID_SHAPE,
                              "%s.%s has no dims and cannot be cut; make it 1-dim", m->type, name);
        FSDP_TRY(FSDP__GROW(u->params, *cap, u->n_params + 1, "a unit's parameters"));
        u->params[u->n_params] = (fsdp__fparam){.param = fsdp_param_retain(p), .unit = u};
        u->n_params++;
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        if (!fsdp__unit_of(m->in->children[i])) FSDP_TRY(gather_params(u, m->in->children[i], cap));
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
    if (u->S > 1 && !u->opt.private_gather) {
        p->slot_offset = u->slot_bytes;
        u->slot_bytes += (p->whole->st->bytes + 63) / 64 * 64;
    }
    return FSDP_OK;
}

/* ---- making a unit --------------------------------------------------------------------- */

static fsdp_status check_module(const fsdp_module *m)
{
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

/* A slice leaves axes of its mesh out. Where these carry other data, nobody would sum the gradients
 * along them and the replicas would drift apart; axes of one rank, and those along which ranks see
 * the same rows, are no matter. */
static fsdp_status check_slice(const fsdp_mesh *m)
{
    static const char *const same_data[] = {"tp", "cp", "pp", "ep"};
    const fsdp_mesh *parent = fsdp_mesh_parent(m);
    for (int a = 0; a < fsdp_mesh_ndim(parent); a++) {
        const char *name = fsdp_mesh_axis_name(parent, a);
        bool fine = fsdp_mesh_size(parent, a) == 1;
        for (int b = 0; b < fsdp_mesh_ndim(m); b++)
            fine = fine || !strcmp(name, fsdp_mesh_axis_name(m, b));
        for (size_t k = 0; k < sizeof same_data / sizeof *same_data; k++)
            fine = fine || !strcmp(name, same_data[k]);
        if (!fine)
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "fsdp_fully_shard over axis \"%s\" of a mesh that also has \"%s\" "
                              "%d: gradients would not be summed along it; give the whole mesh",
                              fsdp_mesh_axis_name(m, 0), name, fsdp_mesh_size(parent, a));
    }
    return FSDP_OK;
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
    FSDP_TRY(check_slice(u->opt.mesh));
    u->shard = fsdp_mesh_group(u->opt.mesh, n - 1);
    u->replicate = n == 2 ? fsdp_mesh_group(u->opt.mesh, 0) : NULL;
    u->S = fsdp_group_size(u->shard);
    u->R = u->replicate ? fsdp_group_size(u->replicate) : 1;
    return FSDP_OK;
}

fsdp_status fsdp_fully_shard(fsdp_module *m, const fsdp_shard_options *o)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_fully_shard: the module is NULL");
    FSDP_TRY(check_module(m));
    fsdp__unit *u = fsdp__calloc(1, sizeof *u, "a unit");
    if (!u) return fsdp_error();
    u->opt = o ? *o : fsdp_shard_defaults(NULL);
    u->module = m;
    u->sync = u->all_reduce = true;
    u->max_reductions = 1;
    fsdp_status s = FSDP_OK;
    int64_t cap = 0;
    if (!(u->name = fsdp__strdup(fsdp_module_name(m)))) FSDP_GO(fsdp_error());
    FSDP_GO(use_mesh(u));
    FSDP_GO(fsdp__module_name_params(m)); /* the placement function and messages name them */
    FSDP_GO(gather_params(u, m, &cap));
    size_t n = (size_t)u->n_params + 1;
    u->gather_entries = fsdp__calloc(n, sizeof *u->gather_entries, "a unit");
    u->reduce_entries = fsdp__calloc(n, sizeof *u->reduce_entries, "a unit");
    u->reduce_params = fsdp__calloc(n, sizeof *u->reduce_params, "a unit");
    if (!u->gather_entries || !u->reduce_entries || !u->reduce_params) FSDP_GO(fsdp_error());
    for (int i = 0; i < u->n_params; i++)
        FSDP_GO(shard_param(u, &u->params[i]));
    FSDP_GO(fsdp__hooks_install(u));
    /* From here on nothing fails: the shards take the place of the parameters. */
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        p->param->shard = p;
        p->param->kept = p->sharded;
        fsdp__param_set(p->param, p->sharded);
        p->param->unit = u->name;
    }
    fsdp__unit_name_storages(u);
    m->in->shard = u;
    m->in->shard_free = fsdp__unit_free;
done:
    if (s != FSDP_OK) fsdp__unit_free(u);
    return s;
}
