/*
 * op_view.c - ops that move or re-label elements: reshape, transpose, slice,
 * cat, cast, clone.
 */
#include <string.h>

#include "base/error.h"
#include "tensor/kernels.h"
#include "tensor/op.h"

static void copy_all(const fsdp_tensor *src, fsdp_tensor *dst)
{
    fsdp__k_copy(src->ndim, src->size, fsdp_data(src), src->dtype, src->stride, fsdp_data(dst),
                 dst->dtype, dst->stride, 0);
}

/* Strides of a view of x with new sizes, if there is one: each run of old dims
 * that is contiguous in itself may be cut anew. */
static bool view_strides(const fsdp_tensor *x, int ndim, const int64_t *sizes, int64_t *strides)
{
    if (fsdp_numel(x) == 0 || fsdp__tensor_dense(x)) {
        fsdp__contiguous_strides(ndim, sizes, strides);
        return true;
    }
    int old = x->ndim - 1, new = ndim - 1;
    while (old >= 0) {
        int64_t run = x->size[old], step = x->stride[old];
        /* A dim of size 1 joins any run, and its stride says nothing. */
        while (old > 0 && (x->size[old - 1] == 1 || x->stride[old - 1] == step * run))
            run *= x->size[--old];
        old--;
        int64_t done = 1;
        while (new >= 0 && done < run) {
            strides[new] = step * done;
            done *= sizes[new --];
        }
        if (done != run) return false;
    }
    while (new >= 0) /* what is left has size 1 */
        strides[new --] = 1;
    return true;
}

/* sizes, one of which may be -1, for n elements; false if there are none such. */
static bool fill_sizes(int64_t n, int ndim, int64_t *sizes)
{
    int64_t known = 1;
    int open = -1;
    for (int i = 0; i < ndim; i++) {
        if (sizes[i] < -1 || (sizes[i] == -1 && open >= 0)) return false;
        if (sizes[i] == -1)
            open = i;
        else if (__builtin_mul_overflow(known, sizes[i], &known))
            return false;
    }
    if (open < 0) return known == n;
    if (known == 0) return false; /* any size would do */
    sizes[open] = n / known;
    return sizes[open] * known == n;
}

/* i[0] ndim, i[1..8] sizes, one of which may be -1. */
fsdp_status fsdp__shape_reshape(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    int ndim = (int)c->i[0];
    int64_t sizes[FSDP_MAX_DIMS], n = fsdp_numel(x);
    memcpy(sizes, c->i + 1, sizeof sizes);
    if (!fill_sizes(n, ndim, sizes)) {
        fsdp__str a = {0}, b = {0};
        fsdp__shape_text(x->ndim, x->size, &a);
        fsdp__shape_text(ndim, c->i + 1, &b);
        fsdp__fail(FSDP_INVALID_SHAPE, "reshape: %s has %lld elements and cannot become %s",
                   fsdp__str_get(&a), (long long)n, fsdp__str_get(&b));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    int64_t strides[FSDP_MAX_DIMS];
    if (view_strides(x, ndim, sizes, strides))
        return fsdp__op_view(c, ndim, sizes, strides, x->offset);
    return fsdp__op_out(c, 0, x->dtype, ndim, sizes);
}

fsdp_status fsdp__run_reshape(fsdp__opcall *c)
{
    fsdp_tensor *x = c->in[0];
    int64_t strides[FSDP_MAX_DIMS];
    fsdp__contiguous_strides(x->ndim, x->size, strides);
    fsdp__k_copy(x->ndim, x->size, fsdp_data(x), x->dtype, x->stride, fsdp_data(c->out[0]),
                 x->dtype, strides, 0);
    return FSDP_OK;
}

static fsdp_status need_dim(const fsdp__opcall *c, const fsdp_tensor *x, int64_t dim, int *out)
{
    *out = fsdp__dim(x, (int)dim);
    if (*out >= 0) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: dim %lld of a tensor of %d dims",
                      fsdp__op_name(c->op), (long long)dim, x->ndim);
}

/* i[0], i[1]: the dims to swap. */
fsdp_status fsdp__shape_transpose(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    int a, b;
    FSDP_TRY(need_dim(c, x, c->i[0], &a));
    FSDP_TRY(need_dim(c, x, c->i[1], &b));
    int64_t sizes[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];
    memcpy(sizes, x->size, sizeof sizes);
    memcpy(strides, x->stride, sizeof strides);
    sizes[a] = x->size[b], sizes[b] = x->size[a];
    strides[a] = x->stride[b], strides[b] = x->stride[a];
    return fsdp__op_view(c, x->ndim, sizes, strides, x->offset);
}

fsdp_status fsdp__run_transpose(fsdp__opcall *c)
{
    (void)c;
    return FSDP_OK;
}

/* i[0] dim, i[1] start, i[2] end; normalised here for backward. */
fsdp_status fsdp__shape_slice(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    int d;
    FSDP_TRY(need_dim(c, x, c->i[0], &d));
    int64_t n = x->size[d], start = c->i[1], end = c->i[2];
    if (start < 0) start += n;
    if (end < 0) end += n;
    if (start < 0 || end > n || start > end)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "slice: [%lld, %lld) of dim %d with %lld elements",
                          (long long)c->i[1], (long long)c->i[2], d, (long long)n);
    c->i[0] = d, c->i[1] = start, c->i[2] = end;
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, x->size, sizeof sizes);
    sizes[d] = end - start;
    int64_t at = start < end ? start * x->stride[d] : 0;
    return fsdp__op_view(c, x->ndim, sizes, x->stride, x->offset + at);
}

fsdp_status fsdp__run_slice(fsdp__opcall *c)
{
    (void)c;
    return FSDP_OK;
}

/* i[0] dim; inputs 0..n_in-1. */
fsdp_status fsdp__shape_cat(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    int d;
    FSDP_TRY(need_dim(c, x, c->i[0], &d));
    c->i[0] = d;
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, x->size, sizeof sizes);
    for (int k = 1; k < c->n_in; k++) {
        const fsdp_tensor *y = c->in[k];
        bool fits = y->ndim == x->ndim && y->dtype == x->dtype;
        for (int i = 0; fits && i < x->ndim; i++)
            fits = i == d || y->size[i] == x->size[i];
        if (!fits) {
            fsdp__str a = {0}, b = {0};
            fsdp__describe(x, &a);
            fsdp__describe(y, &b);
            fsdp__fail(FSDP_INVALID_SHAPE,
                       "cat along dim %d: input 0 is %s, input %d is %s; other sizes and the dtype "
                       "must be equal",
                       d, fsdp__str_get(&a), k, fsdp__str_get(&b));
            fsdp__str_free(&a);
            fsdp__str_free(&b);
            return fsdp_error();
        }
        sizes[d] += y->size[d];
    }
    return fsdp__op_out(c, 0, x->dtype, x->ndim, sizes);
}

fsdp_status fsdp__run_cat(fsdp__opcall *c)
{
    fsdp_tensor *y = c->out[0];
    int d = (int)c->i[0];
    int64_t at = 0;
    for (int k = 0; k < c->n_in; k++) {
        fsdp_tensor *x = c->in[k];
        char *dst = (char *)fsdp_data(y) + (size_t)(at * y->stride[d]) * fsdp_dtype_size(y->dtype);
        fsdp__k_copy(x->ndim, x->size, fsdp_data(x), x->dtype, x->stride, dst, y->dtype, y->stride,
                     0);
        at += x->size[d];
    }
    return FSDP_OK;
}

/* i[0]: the dtype. */
fsdp_status fsdp__shape_cast(fsdp__opcall *c)
{
    return fsdp__op_out(c, 0, (fsdp_dtype)c->i[0], c->in[0]->ndim, c->in[0]->size);
}

fsdp_status fsdp__run_cast(fsdp__opcall *c)
{
    copy_all(c->in[0], c->out[0]);
    return FSDP_OK;
}

fsdp_status fsdp__shape_clone(fsdp__opcall *c)
{
    return fsdp__op_out(c, 0, c->in[0]->dtype, c->in[0]->ndim, c->in[0]->size);
}

fsdp_status fsdp__run_clone(fsdp__opcall *c)
{
    copy_all(c->in[0], c->out[0]);
    return FSDP_OK;
}
