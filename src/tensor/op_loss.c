/*
 * op_loss.c - attention and the losses.
 */
#include "tensor/op_attention.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "tensor/op.h"

/* ---- attention: q (B,T,H,D), k and v (B,S,KV,D), in[3] keys of dropout or NULL ------- */

fsdp_status fsdp__shape_attention(fsdp__opcall *c)
{
    const fsdp_tensor *q = c->in[0], *k = c->in[1], *v = c->in[2];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 3));
    bool fits = q->ndim == 4 && k->ndim == 4 && fsdp__same_sizes(k, v) &&
                q->size[0] == k->size[0] && q->size[3] == k->size[3] && k->size[2] > 0 &&
                q->size[2] % k->size[2] == 0;
    if (!fits) {
        fsdp__str s = {0};
        fsdp__str_add(&s, "attention: q is ");
        fsdp__describe(q, &s);
        fsdp__str_add(&s, ", k is ");
        fsdp__describe(k, &s);
        fsdp__str_add(&s, ", v is ");
        fsdp__describe(v, &s);
        fsdp__fail(FSDP_INVALID_SHAPE,
                   "%s; expected (B,T,H,D), (B,S,KV,D) and (B,S,KV,D) with H a "
                   "multiple of KV",
                   fsdp__str_get(&s));
        fsdp__str_free(&s);
        return fsdp_error();
    }
    if (c->i[0] && k->size[1] < q->size[1])
        return fsdp__fail(FSDP_INVALID_SHAPE,
                          "attention: %lld keys for %lld queries; causal attention needs a key "
                          "at each query's position",
                          (long long)k->size[1], (long long)q->size[1]);
    for (int n = 0; n < 3; n++)
        if (c->in[n]->size[3] > 1 && c->in[n]->stride[3] != 1)
            return fsdp__fail(FSDP_INVALID_SHAPE,
                              "attention: the last dim of input %d has stride %lld; expected 1: "
                              "use fsdp_contiguous",
                              n, (long long)c->in[n]->stride[3]);
    FSDP_TRY(fsdp__op_out(c, 0, q->dtype, 4, q->size));
    int64_t lse[3] = {q->size[0], q->size[2], q->size[1]};
    return fsdp__op_out(c, 1, fsdp__stat_dtype(q->dtype), 3, lse);
}

void fsdp__attention_args(const fsdp_tensor *q, const fsdp_tensor *k, const fsdp_tensor *v,
                          const fsdp_tensor *out, const fsdp_tensor *keys, const int64_t *i,
                          const double *f, fsdp__attention *a)
{
    memset(a, 0, sizeof *a);
    a->t = q->dtype;
    a->B = q->size[0], a->T = q->size[1], a->H = q->size[2], a->D = q->size[3];
    a->S = k->size[1], a->KV = k->size[2];
    memcpy(a->q_stride, q->stride, sizeof a->q_stride);
    memcpy(a->k_stride, k->stride, sizeof a->k_stride);
    memcpy(a->v_stride, v->stride, sizeof a->v_stride);
    memcpy(a->o_stride, out->stride, sizeof a->o_stride);
    a->scale = (float)(f[0] != 0 ? f[0] : 1.0 / sqrt((double)(a->D > 0 ? a->D : 1)));
    a->causal = i[0] != 0;
    a->window = i[1];
    a->drop_p = (float)f[1];
    a->keys = keys ? fsdp_data(keys) : NULL;
}

fsdp_status fsdp__run_attention(fsdp__opcall *c)
{
    fsdp__attention a;
    fsdp__attention_args(c->in[0], c->in[1], c->in[2], c->out[0], c->in[3], c->i, c->f, &a);
    return fsdp__k_attention(&a, fsdp_data(c->in[0]), fsdp_data(c->in[1]), fsdp_data(c->in[2]),
                             fsdp_data(c->out[0]), fsdp_data(c->out[1]));
}

/* ---- losses; i[0] ignore index, i[1] reduction, i[2] rows counted (an output) -------- */

static fsdp_status check_targets(const fsdp__opcall *c, const fsdp_tensor *x,
                                 const fsdp_tensor *target)
{
    if (x->ndim >= 1 && target->dtype == FSDP_I64 && fsdp_numel(target) == fsdp__rows(x))
        return FSDP_OK;
    fsdp__str a = {0}, b = {0};
    fsdp__describe(x, &a);
    fsdp__describe(target, &b);
    fsdp__fail(FSDP_INVALID_SHAPE, "%s: x is %s, targets are %s; expected one i64 target a row",
               fsdp__op_name(c->op), fsdp__str_get(&a), fsdp__str_get(&b));
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    return fsdp_error();
}

static void put_loss(fsdp__opcall *c, double loss, int64_t count)
{
    c->i[2] = count;
    if (c->i[1] == 0) loss = count ? loss / (double)count : NAN;
    fsdp__k_fill(fsdp_data(c->out[0]), c->out[0]->dtype, 1, loss);
}

fsdp_status fsdp__shape_cross_entropy(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 1));
    FSDP_TRY(check_targets(c, x, c->in[1]));
    int64_t rows = fsdp__rows(x);
    FSDP_TRY(fsdp__op_out(c, 0, fsdp__stat_dtype(x->dtype), 0, NULL));
    return fsdp__op_out(c, 1, fsdp__stat_dtype(x->dtype), 1, &rows);
}

fsdp_status fsdp__run_cross_entropy(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *target = fsdp__dense(c->in[1]);
    if (!x || !target) return fsdp_error();
    double loss;
    int64_t count;
    FSDP_TRY(fsdp__k_cross_entropy(fsdp_data(x), x->dtype, fsdp__rows(x), x->size[x->ndim - 1],
                                   fsdp_data(target), c->i[0], fsdp_data(c->out[1]), &loss,
                                   &count));
    put_loss(c, loss, count);
    return FSDP_OK;
}

/* in: x (..., C), w (V, C), bias (V) or NULL, targets. */
fsdp_status fsdp__shape_head_cross_entropy(fsdp__opcall *c)
{
    const fsdp_tensor *x = c->in[0], *w = c->in[1], *b = c->in[2];
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 3));
    bool fits = w->ndim == 2 && x->ndim >= 1 && x->size[x->ndim - 1] == w->size[1] &&
                (!b || (b->ndim == 1 && b->size[0] == w->size[0]));
    if (!fits) {
        fsdp__str s = {0}, t = {0};
        fsdp__describe(x, &s);
        fsdp__describe(w, &t);
        fsdp__fail(FSDP_INVALID_SHAPE,
                   "head_cross_entropy: x is %s, the weight is %s; expected (..., C), (V, C) and "
                   "a bias of V elements or none",
                   fsdp__str_get(&s), fsdp__str_get(&t));
        fsdp__str_free(&s);
        fsdp__str_free(&t);
        return fsdp_error();
    }
    FSDP_TRY(check_targets(c, x, c->in[3]));
    int64_t rows = fsdp__rows(x);
    FSDP_TRY(fsdp__op_out(c, 0, fsdp__stat_dtype(x->dtype), 0, NULL));
    return fsdp__op_out(c, 1, fsdp__stat_dtype(x->dtype), 1, &rows);
}

fsdp_status fsdp__run_head_cross_entropy(fsdp__opcall *c)
{
    fsdp_tensor *x = fsdp__dense(c->in[0]), *w = fsdp__dense(c->in[1]);
    fsdp_tensor *b = c->in[2], *target = fsdp__dense(c->in[3]);
    if (!x || !w || !target || (b && !(b = fsdp__dense(b)))) return fsdp_error();
    double loss;
    int64_t count;
    FSDP_TRY(fsdp__k_head_loss(fsdp_data(x), fsdp_data(w), fsdp_data(b), x->dtype, fsdp__rows(x),
                               w->size[1], w->size[0], fsdp_data(target), c->i[0],
                               fsdp_data(c->out[1]), &loss, &count));
    put_loss(c, loss, count);
    return FSDP_OK;
}

/* i[1]: reduction. */
fsdp_status fsdp__shape_mse_loss(fsdp__opcall *c)
{
    FSDP_TRY(fsdp__op_same_dtype(c, 0, 2));
    if (!fsdp__same_sizes(c->in[0], c->in[1])) {
        fsdp__str a = {0}, b = {0};
        fsdp__describe(c->in[0], &a);
        fsdp__describe(c->in[1], &b);
        fsdp__fail(FSDP_INVALID_SHAPE, "mse_loss: x is %s, the target is %s; expected equal sizes",
                   fsdp__str_get(&a), fsdp__str_get(&b));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    return fsdp__op_out(c, 0, fsdp__stat_dtype(c->in[0]->dtype), 0, NULL);
}

fsdp_status fsdp__run_mse_loss(fsdp__opcall *c)
{
    fsdp_tensor *a = fsdp__dense(c->in[0]), *b = fsdp__dense(c->in[1]);
    if (!a || !b) return fsdp_error();
    int64_t n = fsdp_numel(a), stride = 1;
    fsdp_dtype stat = fsdp__stat_dtype(a->dtype);
    fsdp_tensor *d = fsdp__tensor_create(stat, 1, &n, FSDP_CPU);
    if (!d) return fsdp_error();
    fsdp__k_binary(FSDP__BINARY_SUB, 1, &n, fsdp_data(a), &stride, fsdp_data(b), &stride, a->dtype,
                   fsdp_data(d), stat, 0);
    fsdp__k_binary(FSDP__BINARY_MUL, 1, &n, fsdp_data(d), &stride, fsdp_data(d), &stride, stat,
                   fsdp_data(d), stat, 0);
    int64_t one = 1;
    double scale = c->i[1] == 0 ? 1.0 / (double)n : 1.0;
    fsdp__k_sum(1, &n, fsdp_data(d), &stride, stat, &one, scale, fsdp_data(c->out[0]), stat, 0);
    return FSDP_OK;
}
