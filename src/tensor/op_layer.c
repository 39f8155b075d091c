/*
 * op_layer.c - the ops of layers: linear, matmul, embedding, norms, rotary,
 * softmax.
 */
#include <string.h>

#include "base/error.h"
#include "tensor/kernels.h"
#include "tensor/op.h"

/* "linear: x is f32 (2, 3) cpu and the weight f32 (4, 5) cpu; REST" */
static fsdp_status misfit(const fsdp__opcall *c, const char *rest)
{
    fsdp__str a = {0}, b = {0};
    fsdp__describe(c->in[0], &a);
    fsdp__describe(c->in[1], &b);
    fsdp__fail(FSDP_INVALID_SHAPE, "%s: inputs are %s and %s; %s", fsdp__op_name(c->op),
               fsdp__str_get(&a), fsdp__str_get(&b), rest);
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    return fsdp_error();
}

/* "batch_norm: x is f32 (2, 3) cpu; REST" */
static fsdp_status misfit_one(const fsdp__opcall *c, const char *rest)
{
    fsdp__str a = {0};
    fsdp__describe(c->in[0], &a);
    fsdp__fail(FSDP_INVALID_SHAPE, "%s: x is %s; %s", fsdp__op_name(c->op), fsdp__str_get(&a),
               rest);
    fsdp__str_free(&a);
    return fsdp_error();
}

/* ---- linear: x (..., K), w (N, K) or (K, N), bias (N) or NULL; i[0]: w is (K, N) ---- */

fsdp_status fsdp__shape_linear(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 3));
    int in = c->i[0] ? 0 : 1;
    if (w->ndim != 2 || x->ndim < 1 || x->size[x->ndim - 1] != w->size[in])
        return misfit(c, c->i[0] ? "expected (..., K) and (K, N)" : "expected (..., K) and (N, K)");
    int64_t N = w->size[1 - in];
    if (b && (b->ndim != 1 || b->size[0] != N))
        return fsdp__fail(FSDP_INVALID_SHAPE, "linear: the bias has %lld elements; expected %lld",
                          (long long)fsdp_numel(b), (long long)N);
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, x->size, sizeof sizes);
    sizes[x->ndim - 1] = N;
    return fsdp__op_out(c, 0, x->dtype, x->ndim, sizes);
}

fsdp_status fsdp__run_linear(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *w = fsdp__dense(c->in[1]), *b = c->in[2];
    fsdp_tensor *y = c->out[0];
    if (!x || !w || (b && !(b = fsdp__dense(b)))) return fsdp_error();
    int64_t K = x->size[x->ndim - 1], N = y->size[y->ndim - 1], M = fsdp__rows(x);
    /* Narrow dtypes: the bias stands in y before the product is added, so the sum rounds once. */
    bool narrow = b && fsdp_dtype_size(y->dtype) < 4;
    if (narrow) {
        int64_t sizes[2] = {M, N}, row[2] = {0, 1}, strides[2] = {N, 1};
        fsdp__k_copy(2, sizes, fsdp_data(b), b->dtype, row, fsdp_data(y), y->dtype, strides, 0);
    }
    FSDP_TRY(fsdp__k_gemm(0, !c->i[0], M, N, K, fsdp_data(x), K, fsdp_data(w), c->i[0] ? N : K,
                          x->dtype, fsdp_data(y), N, y->dtype, narrow));
    if (b && !narrow) fsdp__k_add_bias(fsdp_data(y), fsdp_data(b), y->dtype, M, N);
    return FSDP_OK;
}

/* ---- matmul: a (..., M, K), b (..., K, N) or (K, N) ------------------------------ */

fsdp_status fsdp__shape_matmul(fsdp__opcall *c)
{
    const fsdp_tensor *a = c->in[0], *b = c->in[1];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 2));
    bool fits = a->ndim >= 2 && b->ndim >= 2 && (b->ndim == 2 || b->ndim == a->ndim) &&
                a->size[a->ndim - 1] == b->size[b->ndim - 2];
    for (int i = 0; fits && b->ndim > 2 && i < a->ndim - 2; i++)
        fits = a->size[i] == b->size[i];
    if (!fits) return misfit(c, "expected (..., M, K) and (..., K, N) with equal leading sizes");
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, a->size, sizeof sizes);
    sizes[a->ndim - 1] = b->size[b->ndim - 1];
    return fsdp__op_out(c, 0, a->dtype, a->ndim, sizes);
}

fsdp_status fsdp__run_matmul(fsdp__opcall *c)
{
    fsdp_tensor *a = fsdp__dense(c->in[0]), *b = fsdp__dense(c->in[1]), *y = c->out[0];
    if (!a || !b) return fsdp_error();
    int64_t M = a->size[a->ndim - 2], K = a->size[a->ndim - 1], N = b->size[b->ndim - 1];
    int64_t batch = fsdp__numel_of(a->ndim - 2, a->size);
    if (b->ndim == 2) M *= batch, batch = 1;
    return fsdp__k_gemm_batched(batch, 0, 0, M, N, K, fsdp_data(a), K, M * K, fsdp_data(b), N,
                                K * N, a->dtype, fsdp_data(y), N, M * N, y->dtype, 0);
}

/* ---- embedding: w (V, C), ids i64 (...) -------------------------------------------- */

fsdp_status fsdp__shape_embedding(fsdp__opcall *c)
{
    const fsdp_tensor *w = c->in[0], *ids = c->in[1];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    if (w->ndim != 2 || ids->dtype != FSDP_I64 || ids->ndim >= FSDP_MAX_DIMS)
        return misfit(c, "expected a weight (V, C) and ids of dtype i64");
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, ids->size, sizeof sizes);
    sizes[ids->ndim] = w->size[1];
    return fsdp__op_out(c, 0, w->dtype, ids->ndim + 1, sizes);
}

fsdp_status fsdp__run_embedding(fsdp__opcall *c)
{
    fsdp_tensor *w = fsdp__dense(c->in[0]), *ids = fsdp__dense(c->in[1]);
    if (!w || !ids) return fsdp_error();
    return fsdp__k_embedding(fsdp_data(w), w->dtype, w->size[0], w->size[1], fsdp_data(ids),
                             fsdp_numel(ids), fsdp_data(c->out[0]));
}

/* ---- norms over the last dim; f[0]: eps; extra outputs: statistics (rows) ------------ */

static fsdp_status norm_shape(fsdp__opcall *c, int stats)
{
    const fsdp_tensor *x = c->in[0];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, c->n_in));
    for (int k = 1; k < c->n_in; k++)
        if (c->in[k] &&
            (x->ndim < 1 || c->in[k]->ndim != 1 || c->in[k]->size[0] != x->size[x->ndim - 1]))
            return misfit(c, "expected x (..., C) and weights (C)");
    FSDP_TRY(fsdp__op_out(c, 0, x->dtype, x->ndim, x->size));
    int64_t rows = fsdp__rows(x);
    for (int k = 1; k <= stats; k++)
        FSDP_TRY(fsdp__op_out(c, k, fsdp__stat_dtype(x->dtype), 1, &rows));
    return FSDP_OK;
}

fsdp_status fsdp__shape_rms_norm(fsdp__opcall *c)
{
    return norm_shape(c, 1);
}

fsdp_status fsdp__run_rms_norm(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *w = fsdp__dense(c->in[1]);
    if (!x || !w) return fsdp_error();
    fsdp__k_rms_norm(fsdp_data(x), fsdp_data(w), x->dtype, fsdp__rows(x), x->size[x->ndim - 1],
                     c->f[0], fsdp_data(c->out[0]), fsdp_data(c->out[1]));
    return FSDP_OK;
}

fsdp_status fsdp__shape_layer_norm(fsdp__opcall *c)
{
    return norm_shape(c, 2);
}

fsdp_status fsdp__run_layer_norm(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *w = fsdp__dense(c->in[1]), *b = fsdp__dense(c->in[2]);
    if (!x || !w || !b) return fsdp_error();
    fsdp__k_layer_norm(fsdp_data(x), fsdp_data(w), fsdp_data(b), x->dtype, fsdp__rows(x),
                       x->size[x->ndim - 1], c->f[0], fsdp_data(c->out[0]), fsdp_data(c->out[1]),
                       fsdp_data(c->out[2]));
    return FSDP_OK;
}

/* ---- batch norm: x (N, C, ...), w and b (C) or NULL, running mean and variance (C) or NULL;
 * i[0]: training; f[0]: eps, f[1]: momentum; extra outputs: mean and rstd (C) ---------------- */

fsdp_status fsdp__shape_batch_norm(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 3));
    if (x->ndim < 2) return misfit_one(c, "expected (N, C) or (N, C, ...)");
    for (int k = 1; k < c->n_in; k++) {
        const fsdp_tensor *v = c->in[k];
        if (v && (v->ndim != 1 || v->size[0] != x->size[1] || !fsdp_dtype_is_floating(v->dtype) ||
                  (k >= 3 && !fsdp__tensor_dense(v))))
            return misfit_one(c, "expected weight, bias and contiguous running statistics of "
                                 "floating dtypes and size (C)");
    }
    if (!c->in[3] != !c->in[4] || (!c->i[0] && !c->in[3]))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "batch_norm: running mean and variance come together, and evaluation "
                          "needs them");
    if (c->i[0] && fsdp_numel(x) < 2 * x->size[1])
        return misfit_one(c, "training needs more than one value a channel");
    FSDP_TRY(fsdp__op_out(c, 0, x->dtype, x->ndim, x->size));
    for (int k = 1; k <= 2; k++)
        FSDP_TRY(fsdp__op_out(c, k, fsdp__stat_dtype(x->dtype), 1, &x->size[1]));
    return FSDP_OK;
}

fsdp_status fsdp__run_batch_norm(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *w = c->in[1], *b = c->in[2];
    fsdp_tensor *mean = c->in[3], *var = c->in[4];
    if (!x || (w && !(w = fsdp__dense(w))) || (b && !(b = fsdp__dense(b)))) return fsdp_error();
    fsdp__batch_norm o = {.t = x->dtype,
                          .N = x->size[0],
                          .C = x->size[1],
                          .L = fsdp__numel_of(x->ndim - 2, x->size + 2),
                          .eps = c->f[0],
                          .momentum = c->f[1],
                          .training = c->i[0] != 0};
    if (mean) {
        o.running_mean = fsdp_data(mean), o.mean_t = mean->dtype;
        o.running_var = fsdp_data(var), o.var_t = var->dtype;
    }
    if (mean && o.training) {
        FSDP_TRY(fsdp__tensor_writable(mean, "batch_norm"));
        FSDP_TRY(fsdp__tensor_writable(var, "batch_norm"));
    }
    fsdp__k_batch_norm(&o, fsdp_data(x), fsdp_data(w), fsdp_data(b), fsdp_data(c->out[0]),
                       fsdp_data(c->out[1]), fsdp_data(c->out[2]));
    if (mean && o.training) {
        fsdp_touch(mean);
        fsdp_touch(var);
    }
    return FSDP_OK;
}

fsdp_status fsdp__shape_softmax(fsdp__opcall *c)
{
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    if (c->in[0]->ndim < 1)
        return fsdp__fail(FSDP_INVALID_SHAPE, "softmax: x has no dims; expected (..., C)");
    return fsdp__op_out(c, 0, c->in[0]->dtype, c->in[0]->ndim, c->in[0]->size);
}

fsdp_status fsdp__run_softmax(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]);
    if (!x) return fsdp_error();
    fsdp__k_softmax(fsdp_data(x), x->dtype, fsdp__rows(x), x->size[x->ndim - 1],
                    fsdp_data(c->out[0]));
    return FSDP_OK;
}

/* ---- rotary: x (B,T,H,D), cos and sin f32 (T, D/2) or (B, T, D/2) --------------------- */

fsdp_status fsdp__shape_rotary(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0], *cs = c->in[1], *sn = c->in[2];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    bool fits = x->ndim == 4 && x->size[3] % 2 == 0 && cs->dtype == FSDP_F32 &&
                sn->dtype == FSDP_F32 && fsdp__same_sizes(cs, sn) &&
                (cs->ndim == 2 || cs->ndim == 3) && cs->size[cs->ndim - 1] == x->size[3] / 2 &&
                cs->size[cs->ndim - 2] == x->size[1] && fsdp__tensor_dense(cs) &&
                fsdp__tensor_dense(sn) && (cs->ndim == 2 || cs->size[0] == x->size[0]);
    if (!fits) return misfit(c, "expected x (B, T, H, D) and f32 tables (T, D/2) or (B, T, D/2)");
    if (x->stride[3] != 1 && x->size[3] > 1)
        return fsdp__fail(FSDP_INVALID_SHAPE,
                          "rotary: the last dim must be contiguous; its stride "
                          "is %lld: use fsdp_contiguous",
                          (long long)x->stride[3]);
    return fsdp__op_out(c, 0, x->dtype, 4, x->size);
}

fsdp_status fsdp__run_rotary(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0], *cs = c->in[1], *y = c->out[0];
    fsdp__rotary r = {.t = x->dtype,
                      .dt = y->dtype,
                      .B = x->size[0],
                      .T = x->size[1],
                      .H = x->size[2],
                      .D = x->size[3],
                      .table_b_stride = cs->ndim == 3 ? cs->stride[0] : 0};
    memcpy(r.x_stride, x->stride, sizeof r.x_stride);
    memcpy(r.y_stride, y->stride, sizeof r.y_stride);
    fsdp__k_rotary(&r, fsdp_data(x), fsdp_data(cs), fsdp_data(c->in[2]), fsdp_data(y));
    return FSDP_OK;
}
