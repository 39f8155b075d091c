/*
 * op.c - the tables of ops.def and what shape rules share.
 */
#include <string.h>

#include "base/error.h"
#include "tensor/op.h"

static const char *const names[FSDP__OP_COUNT] = {
#define FSDP__OP(name) #name,
#include "tensor/ops.def"
#undef FSDP__OP
};

const fsdp__op_fn fsdp__op_shapes[FSDP__OP_COUNT] = {
#define FSDP__OP(name) fsdp__shape_##name,
#include "tensor/ops.def"
#undef FSDP__OP
};

const fsdp__op_fn fsdp__op_runs[FSDP__OP_COUNT] = {
#define FSDP__OP(name) fsdp__run_##name,
#include "tensor/ops.def"
#undef FSDP__OP
};

const char *fsdp__op_name(fsdp__op op)
{
    return names[op];
}

fsdp_status fsdp__op_out(fsdp__opcall *c, int k, fsdp_dtype t, int ndim, const int64_t *sizes)
{
    fsdp_device d = c->in[0]->st->device;
    fsdp_tensor *kept = c->kept ? c->kept[k] : NULL;
    c->out[k] = kept ? fsdp_detach(kept) : fsdp__tensor_create(t, ndim, sizes, d);
    if (!c->out[k]) return fsdp_error();
    bool fits = !kept || (kept->dtype == t && kept->ndim == ndim);
    for (int i = 0; fits && kept && i < ndim; i++)
        fits = kept->size[i] == sizes[i];
    if (fits) return FSDP_OK;
    fsdp__str was = {0};
    fsdp__describe(kept, &was);
    fsdp__fail(FSDP_INVALID_SHAPE,
               "a recomputation in backward calls %s with other sizes: its kept output is %s; what "
               "is checkpointed must do the same both times",
               names[c->op], fsdp__str_get(&was));
    fsdp__str_free(&was);
    return fsdp_error();
}

fsdp_status fsdp__op_view(fsdp__opcall *c, int ndim, const int64_t *sizes, const int64_t *strides,
                          int64_t offset)
{
    c->is_view = true;
    c->out[0] = fsdp__tensor_view(c->in[0]->st, c->in[0]->dtype, ndim, sizes, strides, offset);
    return c->out[0] ? FSDP_OK : fsdp_error();
}

fsdp_dtype fsdp__stat_dtype(fsdp_dtype t)
{
    return t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

fsdp_status fsdp__op_same_dtype(const fsdp__opcall *c, int first, int count)
{
    const fsdp_tensor *a = c->in[first];
    if (!fsdp_dtype_is_floating(a->dtype))
        return fsdp__fail(FSDP_INVALID_DTYPE, "%s: input %d is %s; expected a floating dtype",
                          names[c->op], first, fsdp_dtype_name(a->dtype));
    for (int k = first + 1; k < first + count; k++)
        if (c->in[k] && c->in[k]->dtype != a->dtype)
            return fsdp__fail(FSDP_INVALID_DTYPE,
                              "%s: input %d is %s and input %d is %s; expected one dtype: use "
                              "fsdp_cast",
                              names[c->op], first, fsdp_dtype_name(a->dtype), k,
                              fsdp_dtype_name(c->in[k]->dtype));
    return FSDP_OK;
}

fsdp_status fsdp__op_broadcast(const fsdp__opcall *c, int *ndim, int64_t *sizes)
{
    const fsdp_tensor *a = c->in[0], *b = c->in[1];
    int n = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int i = 1; i <= n; i++) {
        int64_t x = i <= a->ndim ? a->size[a->ndim - i] : 1;
        int64_t y = i <= b->ndim ? b->size[b->ndim - i] : 1;
        if (x != y && x != 1 && y != 1) {
            fsdp__str s = {0}, t = {0};
            fsdp__shape_text(a->ndim, a->size, &s);
            fsdp__shape_text(b->ndim, b->size, &t);
            fsdp__fail(FSDP_INVALID_SHAPE,
                       "%s: shapes %s and %s do not broadcast: dim %d from the end has %lld and "
                       "%lld",
                       names[c->op], fsdp__str_get(&s), fsdp__str_get(&t), i, (long long)x,
                       (long long)y);
            fsdp__str_free(&s);
            fsdp__str_free(&t);
            return fsdp_error();
        }
        sizes[n - i] = x == 1 ? y : x;
    }
    *ndim = n;
    return FSDP_OK;
}

void fsdp__spread_strides(const fsdp_tensor *t, int ndim, const int64_t *sizes, int64_t *strides)
{
    (void)sizes;
    for (int i = 0; i < ndim; i++) {
        int k = i - (ndim - t->ndim);
        strides[i] = k < 0 || t->size[k] == 1 ? 0 : t->stride[k];
    }
}

fsdp_tensor *fsdp__dense(fsdp_tensor *t)
{
    if (fsdp__tensor_dense(t)) return t;
    fsdp_tensor *x = fsdp__tensor_create(t->dtype, t->ndim, t->size, t->st->device);
    if (!x || fsdp_copy_(x, t) != FSDP_OK) return NULL;
    return x;
}

int64_t fsdp__rows(const fsdp_tensor *t)
{
    return fsdp__numel_of(t->ndim > 0 ? t->ndim - 1 : 0, t->size);
}
