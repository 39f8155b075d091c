/*
 * ops.c - the public op functions: arguments into a call, the call to apply.
 */
#include "fsdp/ops.h"

#include <string.h>

#include "autograd/node.h"
#include "base/error.h"

#define CALL1(op_, a)                                             \
    {                                                             \
        .op = FSDP__OP_##op_, .n_in = 1, .n_out = 1, .in = {(a) } \
    }
#define CALL2(op_, a, b)                                               \
    {                                                                  \
        .op = FSDP__OP_##op_, .n_in = 2, .n_out = 1, .in = {(a), (b) } \
    }

#define UNARY(name)                          \
    fsdp_tensor *fsdp_##name(fsdp_tensor *x) \
    {                                        \
        fsdp__opcall c = CALL1(name, x);     \
        return fsdp__apply(&c);              \
    }
#define UNARY_P(name)                                  \
    fsdp_tensor *fsdp_##name(fsdp_tensor *x, double p) \
    {                                                  \
        fsdp__opcall c = CALL1(name, x);               \
        c.f[0] = p;                                    \
        return fsdp__apply(&c);                        \
    }
#define BINARY(name)                                         \
    fsdp_tensor *fsdp_##name(fsdp_tensor *a, fsdp_tensor *b) \
    {                                                        \
        fsdp__opcall c = CALL2(name, a, b);                  \
        return fsdp__apply(&c);                              \
    }

UNARY(exp)
UNARY(log)
UNARY(sqrt)
UNARY(silu)
UNARY(gelu)
UNARY(gelu_tanh)
UNARY(relu)
UNARY(tanh)
UNARY(sigmoid)
UNARY(softmax)
UNARY(clone)
UNARY_P(scale)
UNARY_P(shift)
UNARY_P(pow)
BINARY(add)
BINARY(sub)
BINARY(mul)
BINARY(div)
BINARY(swiglu)
BINARY(matmul)
BINARY(embedding)

fsdp_tensor *fsdp_reshape(fsdp_tensor *x, int ndim, const int64_t *sizes)
{
    if (ndim < 0 || ndim > FSDP_MAX_DIMS) {
        fsdp__fail(FSDP_INVALID_SHAPE, "reshape: to %d dims; at most %d", ndim, FSDP_MAX_DIMS);
        return NULL;
    }
    fsdp__opcall c = CALL1(reshape, x);
    c.i[0] = ndim;
    for (int i = 0; i < ndim; i++)
        c.i[1 + i] = sizes[i];
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_transpose(fsdp_tensor *x, int a, int b)
{
    fsdp__opcall c = CALL1(transpose, x);
    c.i[0] = a;
    c.i[1] = b;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_slice(fsdp_tensor *x, int dim, int64_t start, int64_t end)
{
    fsdp__opcall c = CALL1(slice, x);
    c.i[0] = dim;
    c.i[1] = start;
    c.i[2] = end;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_cat(fsdp_tensor **x, int n, int dim)
{
    if (n < 1 || n > FSDP__OP_MAX_IN) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "cat of %d tensors; expected 1 to %d", n,
                   FSDP__OP_MAX_IN);
        return NULL;
    }
    fsdp__opcall c = {.op = FSDP__OP_cat, .n_in = n, .n_out = 1};
    memcpy(c.in, x, sizeof *x * (size_t)n);
    c.i[0] = dim;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_cast(fsdp_tensor *x, fsdp_dtype t)
{
    if (x && x->dtype == t && !fsdp_error()) return x;
    if (t < 0 || t >= FSDP_DTYPE_COUNT) {
        fsdp__fail(FSDP_INVALID_DTYPE, "cast to dtype %d; expected one of fsdp_dtype", (int)t);
        return NULL;
    }
    fsdp__opcall c = CALL1(cast, x);
    c.i[0] = t;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_contiguous(fsdp_tensor *x)
{
    if (x && fsdp__tensor_dense(x) && !fsdp_error()) return x;
    return fsdp_clone(x);
}

static fsdp_tensor *sum_call(fsdp_tensor *x, int dim, int keepdim, int mean)
{
    if (x && dim < 0) dim += x->ndim;
    fsdp__opcall c = CALL1(sum, x);
    c.i[0] = dim;
    c.i[1] = keepdim;
    c.i[2] = mean;
    if (x && (dim < 0 || dim >= x->ndim)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "sum: no such dim in a tensor of %d dims", x->ndim);
        return NULL;
    }
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_sum_dim(fsdp_tensor *x, int dim, int keepdim)
{
    return sum_call(x, dim, keepdim, 0);
}

fsdp_tensor *fsdp_mean_dim(fsdp_tensor *x, int dim, int keepdim)
{
    return sum_call(x, dim, keepdim, 1);
}

fsdp_tensor *fsdp_sum(fsdp_tensor *x)
{
    fsdp__opcall c = CALL1(sum, x);
    c.i[0] = -1;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_mean(fsdp_tensor *x)
{
    fsdp__opcall c = CALL1(sum, x);
    c.i[0] = -1;
    c.i[2] = 1;
    return fsdp__apply(&c);
}

static bool bad_probability(const char *what, double p)
{
    if (p >= 0.0 && p < 1.0) return false;
    fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: probability %g; expected 0 <= p < 1", what, p);
    return true;
}

fsdp_tensor *fsdp_dropout(fsdp_tensor *x, double p)
{
    if (bad_probability("dropout", p)) return NULL;
    if (p == 0.0 || !x || fsdp_error()) return fsdp_error() ? NULL : x;
    fsdp_tensor *keys = fsdp__random_keys(x->ndim ? x->size[0] : 0, "dropout");
    fsdp__opcall c = CALL2(dropout, x, keys);
    c.f[0] = p;
    return fsdp__apply(&c);
}

static fsdp_tensor *linear_call(fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *b, bool bias,
                                bool in_out)
{
    fsdp__opcall c = {.op = FSDP__OP_linear, .n_in = 3, .n_out = 1, .in = {x, w, b}};
    c.optional = bias ? 0 : 4;
    c.i[0] = in_out;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_linear(fsdp_tensor *x, fsdp_tensor *w)
{
    return linear_call(x, w, NULL, false, false);
}

fsdp_tensor *fsdp_linear_bias(fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *bias)
{
    return linear_call(x, w, bias, true, false);
}

fsdp_tensor *fsdp_linear_in_out(fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *bias)
{
    return linear_call(x, w, bias, bias != NULL, true);
}

fsdp_tensor *fsdp_rms_norm(fsdp_tensor *x, fsdp_tensor *w, double eps)
{
    fsdp__opcall c = CALL2(rms_norm, x, w);
    c.f[0] = eps;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_layer_norm(fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *b, double eps)
{
    fsdp__opcall c = {.op = FSDP__OP_layer_norm, .n_in = 3, .n_out = 1, .in = {x, w, b}};
    c.f[0] = eps;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_batch_norm(fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *b,
                             fsdp_tensor *running_mean, fsdp_tensor *running_var, int training,
                             double momentum, double eps)
{
    /* A forward that runs again in backward has moved the statistics the first time, and in
     * training its output does not depend on them. */
    if (training && fsdp_recomputing()) running_mean = running_var = NULL;
    fsdp__opcall c = {.op = FSDP__OP_batch_norm,
                      .n_in = 5,
                      .n_out = 1,
                      .in = {x, w, b, running_mean, running_var}};
    c.optional = 2 | 4 | 8 | 16;
    c.i[0] = training != 0;
    c.f[0] = eps;
    c.f[1] = momentum;
    if (fsdp_requires_grad(running_mean) || fsdp_requires_grad(running_var)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "batch_norm: running statistics carry no gradient; detach them");
        return NULL;
    }
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_rotary(fsdp_tensor *x, fsdp_tensor *cos, fsdp_tensor *sin)
{
    fsdp__opcall c = {.op = FSDP__OP_rotary, .n_in = 3, .n_out = 1, .in = {x, cos, sin}};
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_attention(fsdp_tensor *q, fsdp_tensor *k, fsdp_tensor *v,
                            const fsdp_attention_options *o)
{
    fsdp__opcall c = {.op = FSDP__OP_attention, .n_in = 4, .n_out = 1, .in = {q, k, v, NULL}};
    c.optional = 8;
    c.i[0] = !(o && o->not_causal);
    c.i[1] = o ? o->window : 0;
    c.f[0] = o ? o->scale : 0.0;
    c.f[1] = o ? o->dropout_p : 0.0;
    if (bad_probability("attention", c.f[1])) return NULL;
    if (c.i[1] < 0) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "attention: window %lld; expected 0 (all) or more",
                   (long long)c.i[1]);
        return NULL;
    }
    if (c.f[1] > 0.0 && q && !(c.in[3] = fsdp__random_keys(q->size[0], "attention"))) return NULL;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_cross_entropy(fsdp_tensor *x, fsdp_tensor *target, int64_t ignore_index,
                                fsdp_reduction r)
{
    fsdp__opcall c = CALL2(cross_entropy, x, target);
    c.i[0] = ignore_index;
    c.i[1] = r;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_head_cross_entropy(fsdp_tensor *x, fsdp_tensor *w, fsdp_tensor *bias,
                                     fsdp_tensor *target, int64_t ignore_index, fsdp_reduction r)
{
    fsdp__opcall c = {
        .op = FSDP__OP_head_cross_entropy, .n_in = 4, .n_out = 1, .in = {x, w, bias, target}};
    c.optional = 4;
    c.i[0] = ignore_index;
    c.i[1] = r;
    return fsdp__apply(&c);
}

fsdp_tensor *fsdp_mse_loss(fsdp_tensor *x, fsdp_tensor *target, fsdp_reduction r)
{
    fsdp__opcall c = CALL2(mse_loss, x, target);
    c.i[1] = r;
    return fsdp__apply(&c);
}
