/*
 * op_elem.c - elementwise ops, with broadcasting where there are two inputs,
 * and sums.
 */
#include <string.h>

#include "base/error.h"
#include "tensor/kernels.h"
#include "tensor/op.h"

/* ---- two inputs ------------------------------------------------------------ */

static fsdp_status binary_shape(fsdp__opcall *c)
{
    int ndim;
    int64_t sizes[FSDP_MAX_DIMS];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 2));
    FSDP_TRY(fsdp__op_broadcast(c, &ndim, sizes));
    return fsdp__op_out(c, 0, c->in[0]->dtype, ndim, sizes);
}

static fsdp_status binary_run(fsdp__opcall *c, fsdp__binary op)
{
    fsdp_tensor *a = c->in[0], *b = c->in[1], *y = c->out[0];
    int64_t sa[FSDP_MAX_DIMS], sb[FSDP_MAX_DIMS];
    fsdp__spread_strides(a, y->ndim, y->size, sa);
    fsdp__spread_strides(b, y->ndim, y->size, sb);
    fsdp__k_binary(op, y->ndim, y->size, fsdp_data(a), sa, fsdp_data(b), sb, a->dtype, fsdp_data(y),
                   y->dtype, 0);
    return FSDP_OK;
}

#define BINARY(name, NAME)                          \
    fsdp_status fsdp__shape_##name(fsdp__opcall *c) \
    {                                               \
        return binary_shape(c);                     \
    }                                               \
    fsdp_status fsdp__run_##name(fsdp__opcall *c)   \
    {                                               \
        return binary_run(c, FSDP__BINARY_##NAME);  \
    }
BINARY(add, ADD)
BINARY(sub, SUB)
BINARY(mul, MUL)
BINARY(div, DIV)
#undef BINARY

/* ---- one input --------------------------------------------------------------- */

static fsdp_status unary_shape(fsdp__opcall *c)
{
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    return fsdp__op_out(c, 0, c->in[0]->dtype, c->in[0]->ndim, c->in[0]->size);
}

/* f[0]: the parameter of scale, shift and pow. */
static fsdp_status unary_run(fsdp__opcall *c, fsdp__unary op)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]);
    if (!x) return fsdp_error();
    fsdp__k_unary(op, fsdp_data(x), x->dtype, fsdp_numel(x), c->f[0], fsdp_data(c->out[0]));
    return FSDP_OK;
}

#define UNARY(name)                                 \
    fsdp_status fsdp__shape_##name(fsdp__opcall *c) \
    {                                               \
        return unary_shape(c);                      \
    }                                               \
    fsdp_status fsdp__run_##name(fsdp__opcall *c)   \
    {                                               \
        return unary_run(c, FSDP__UNARY_##name);    \
    }
UNARY(scale)
UNARY(shift)
UNARY(exp)
UNARY(log)
UNARY(sqrt)
UNARY(pow)
UNARY(silu)
UNARY(gelu)
UNARY(gelu_tanh)
UNARY(relu)
UNARY(tanh)
UNARY(sigmoid)
#undef UNARY

fsdp_status fsdp__shape_swiglu(fsdp__opcall *c)
{
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 2));
    if (!fsdp__same_sizes(c->in[0], c->in[1])) {
        fsdp__str a = {0}, b = {0};
        fsdp__describe(c->in[0], &a);
        fsdp__describe(c->in[1], &b);
        fsdp__fail(FSDP_INVALID_SHAPE, "swiglu: gate is %s, value is %s; expected equal sizes",
                   fsdp__str_get(&a), fsdp__str_get(&b));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    return fsdp__op_out(c, 0, c->in[0]->dtype, c->in[0]->ndim, c->in[0]->size);
}

fsdp_status fsdp__run_swiglu(fsdp__opcall *c)
{
    fsdp_tensor *a = fsdp__dense(c->in[0]), *b = fsdp__dense(c->in[1]);
    if (!a || !b) return fsdp_error();
    fsdp__k_swiglu(fsdp_data(a), fsdp_data(b), a->dtype, fsdp_numel(a), fsdp_data(c->out[0]));
    return FSDP_OK;
}

/* in[1]: keys (rows of dim 0) as U64; f[0]: p. */
fsdp_status fsdp__shape_dropout(fsdp__opcall *c)
{
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    if (c->in[0]->ndim < 1)
        return fsdp__fail(FSDP_INVALID_SHAPE, "dropout: x has no dims; expected rows of samples");
    return fsdp__op_out(c, 0, c->in[0]->dtype, c->in[0]->ndim, c->in[0]->size);
}

fsdp_status fsdp__run_dropout(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *y = c->out[0];
    if (!x) return fsdp_error();
    int64_t rows = x->size[0], per = rows ? fsdp_numel(x) / rows : 0;
    fsdp__k_dropout(fsdp_data(x), x->dtype, rows, per, fsdp_data(c->in[1]), c->f[0], fsdp_data(y),
                    y->dtype, 0);
    return FSDP_OK;
}

/* ---- sums ------------------------------------------------------------------------ */

/* i[0] dim or -1 for all, i[1] keepdim, i[2] mean. f[1] becomes the factor. */
fsdp_status fsdp__shape_sum(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    int64_t sizes[FSDP_MAX_DIMS], summed = fsdp_numel(x);
    int ndim = 0, dim = (int)c->i[0];
    if (dim >= x->ndim)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "sum: dim %d of a tensor of %d dims", dim,
                          x->ndim);
    if (dim >= 0) {
        summed = x->size[dim];
        for (int i = 0; i < x->ndim; i++) {
            if (i == dim && !c->i[1]) continue;
            sizes[ndim++] = i == dim ? 1 : x->size[i];
        }
    }
    c->f[1] = c->i[2] ? 1.0 / (double)summed : 1.0;
    return fsdp__op_out(c, 0, x->dtype, ndim, sizes);
}

fsdp_status fsdp__run_sum(fsdp__opcall *c)
{
    fsdp_tensor *x = c->in[0], *y = c->out[0];
    int64_t o_sizes[FSDP_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++)
        o_sizes[i] = c->i[0] < 0 || i == (int)c->i[0] ? 1 : x->size[i];
    /* The mean of nothing is 0 * (1/0): NaN, as everywhere. */
    double scale = c->f[1];
    if (fsdp_numel(x) == 0 && c->i[2]) {
        fsdp__k_fill(fsdp_data(y), y->dtype, fsdp_numel(y), 0.0 * scale);
        return FSDP_OK;
    }
    fsdp__k_sum(x->ndim, x->size, fsdp_data(x), x->stride, x->dtype, o_sizes, scale, fsdp_data(y),
                y->dtype, 0);
    return FSDP_OK;
}
