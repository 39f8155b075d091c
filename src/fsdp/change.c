/*
 * change.c - parameters that change after they were sharded: another dtype, and
 * what another parameter is.
 *
 * Tensor objects stay the same, so whoever holds a shard or its hooks keeps
 * them; they get other storages.
 */
#include "base/context.h"
#include "base/error.h"
#include "fsdp/unit.h"
#include "tensor/kernels.h"

/* Between iterations only: nothing of p's unit is under way. */
static fsdp_status idle(const fsdp__fparam *p, const char *what)
{
    const fsdp__unit *u = p->unit;
    const char *name = p->param->name ? p->param->name : "a parameter";
    if (p->param->optimizers > 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: an optimizer holds %s, with state as it was; call it before the "
                          "optimizer is made",
                          what, name);
    if (fsdp_in_backward() || u->open || (u->tree && u->tree->forward_root))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: %s is in use by a forward or backward; call it between iterations",
                          what, name);
    if (p->got_grad || p->has_sum || u->stage != FSDP__REDUCE_NONE)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: %s has gradients that are not reduced yet; finish the step first, "
                          "or call fsdp_zero_grad",
                          what, name);
    return FSDP_OK;
}

/* ---- dtype -------------------------------------------------------------------------- */

/* An empty storage of t's elements as dtype d, as t's is otherwise. */
static fsdp__storage *storage_like(const fsdp_tensor *t, fsdp_dtype d)
{
    const fsdp__storage *old = t->st;
    fsdp__storage *st = fsdp__storage_create(
        old->device, fsdp_numel(t) * (int64_t)fsdp_dtype_size(d), old->purpose);
    if (!st) return NULL;
    st->home = old->home;
    st->owner = old->owner;
    return st;
}

static void put_storage(fsdp_tensor *t, fsdp__storage *st, fsdp_dtype d)
{
    t->st->owner = NULL;
    fsdp__storage_release(t->st);
    t->st = st;
    t->dtype = d;
    t->offset = 0;
}

/* The shard's values in another dtype; NULL: error kept. */
static fsdp__storage *cast_storage(const fsdp_tensor *t, fsdp_dtype d)
{
    fsdp__storage *st = storage_like(t, d);
    if (!st || t->st->device == FSDP_META) return st;
    if (fsdp__storage_fill(st, NULL, t->st->owner ? t->st->owner : "a shard") != FSDP_OK) {
        fsdp__storage_release(st);
        return NULL;
    }
    int64_t n = fsdp_numel(t), one = 1;
    fsdp__k_copy(1, &n, fsdp_data(t), t->dtype, &one, st->data, d, &one, 0);
    st->poisoned = t->st->poisoned;
    st->version = t->st->version + 1; /* stale for all ranks alike */
    return st;
}

static fsdp_status cast_grad(fsdp_tensor *shard, fsdp_dtype d, fsdp_tensor **out)
{
    fsdp_tensor *g = fsdp_grad(shard);
    *out = NULL;
    if (!g) return FSDP_OK;
    *out = fsdp__tensor_own(
        fsdp__tensor_alloc(d, g->ndim, g->size, FSDP_GRADIENTS, NULL, "a gradient"));
    if (!*out) return fsdp_error();
    fsdp__layout_share(*out, shard);
    return fsdp_copy_(*out, g);
}

static fsdp_status to_dtype(void *shard, fsdp_dtype t, bool only_ask)
{
    fsdp__fparam *p = shard;
    fsdp__unit *u = p->unit;
    if (p->param->dtype == t || !fsdp_dtype_is_floating(p->param->dtype)) return FSDP_OK;
    FSDP_TRY(idle(p, "fsdp_module_to_dtype"));
    if (only_ask) return FSDP_OK;
    FSDP_TRY(fsdp__unit_reshard(u));
    const fsdp_mixed_precision_policy *mp = &u->opt.mp_policy;
    fsdp_dtype compute = mp->param_dtype != FSDP_DTYPE_NONE ? mp->param_dtype : t;
    fsdp_dtype reduce = mp->reduce_dtype != FSDP_DTYPE_NONE ? mp->reduce_dtype : compute;
    fsdp_tensor *grad = NULL;
    fsdp__storage *st = cast_storage(p->sharded, t), *whole = storage_like(p->whole, compute),
                  *full_grad = storage_like(p->grad, reduce);
    fsdp_status s = st && whole && full_grad ? cast_grad(p->sharded, t, &grad) : fsdp_error();
    if (s != FSDP_OK) {
        fsdp__storage_release(st);
        fsdp__storage_release(whole);
        fsdp__storage_release(full_grad);
        fsdp_release(grad);
        return s;
    }
    s = fsdp_set_grad(p->sharded, NULL);
    put_storage(p->sharded, st, t);
    put_storage(p->whole, whole, compute);
    put_storage(p->grad, full_grad, reduce);
    p->param->dtype = t;
    if (s == FSDP_OK && grad) s = fsdp_set_grad(p->sharded, grad);
    fsdp_release(grad);
    return s;
}

/* ---- another parameter ----------------------------------------------------------------- */

void fsdp__param_take_rows(fsdp__fparam *p, const fsdp_tensor *from)
{
    int dim = 0;
    int64_t row0, sizes[FSDP_MAX_DIMS];
    int64_t rows = fsdp__cut_rows(&p->cut, fsdp_group_rank(p->unit->shard), &row0);
    const fsdp__layout *l = fsdp__layout_of(p->sharded);
    dim = l->place[fsdp__layout_shard_axis(l)].dim;
    for (int i = 0; i < from->ndim; i++)
        sizes[i] = i == dim ? rows : from->size[i];
    const char *src = fsdp_data(from);
    src += (size_t)(row0 * from->stride[dim]) * fsdp_dtype_size(from->dtype);
    fsdp__k_copy(from->ndim, sizes, src, from->dtype, from->stride, fsdp_data(p->sharded),
                 p->sharded->dtype, p->sharded->stride, 0);
    fsdp_touch(p->sharded);
}

static fsdp_status replace(void *shard, fsdp_param *by)
{
    fsdp__fparam *p = shard;
    fsdp__unit *u = p->unit;
    const char *name = p->param->name ? p->param->name : "a parameter";
    if (u->tree)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s was replaced after the first forward of its unit \"%s\"; write the "
                          "new values into the shard (fsdp_copy_, then fsdp_mark_changed), or "
                          "replace it before",
                          name, u->name);
    FSDP_TRY(idle(p, "fsdp_module_set_param"));
    FSDP_TRY(fsdp__unit_reshard(u));
    if (by->dtype != p->param->dtype) FSDP_TRY(to_dtype(p, by->dtype, false));
    fsdp__storage *st = p->sharded->st;
    bool real = by->t->st->device != FSDP_META, values = real && !by->t->st->poisoned;
    if (real && st->device == FSDP_META) {
        st->device = FSDP_CPU;
        fsdp_status s = fsdp__storage_fill(st, NULL, name);
        if (s != FSDP_OK) st->device = FSDP_META;
        FSDP_TRY(s);
    }
    FSDP_TRY(fsdp_set_grad(p->sharded, NULL));
    if (values) fsdp__param_take_rows(p, by->t);
    st->poisoned = st->device != FSDP_META && !values;
    return FSDP_OK;
}

/* ---- gradients that are not the shard's yet --------------------------------------------- */

static bool unreduced(const void *shard)
{
    const fsdp__fparam *p = shard;
    if (p->unit->stage != FSDP__REDUCE_NONE) return false; /* on its way */
    return p->got_grad || p->summed || (p->unit->leaves > 0 && p->param->requires_grad);
}

static void drop_unreduced(void *shard)
{
    fsdp__fparam *p = shard;
    fsdp__unit *u = p->unit;
    if (!unreduced(shard)) return;
    fsdp__storage_empty(p->grad->st);
    p->got_grad = p->summed = false;
    fsdp__leaves_drop(u);
    bool any = false;
    for (int i = 0; i < u->n_params; i++)
        any = any || u->params[i].summed;
    if (!any) fsdp__sums_drop(u);
}

const fsdp__shard_ops fsdp__shard_ops_of_units = {to_dtype, replace, unreduced, drop_unreduced};
