/*
 * back_elem.c - gradients of elementwise ops and sums. Where an input was
 * broadcast its gradient is summed over the dims that it was spread over.
 */
#include <string.h>

#include "autograd/back.h"

static bool is_spread(const fsdp__meta *m, const fsdp_tensor *g)
{
    return fsdp__numel_of(m->ndim, m->size) != fsdp_numel(g);
}

/* Input k's gradient is factor * g, summed over spread dims. */
static fsdp_status give_sum(fsdp__node *n, int k, fsdp_tensor *g, double factor)
{
    const fsdp__meta *m = &n->in[k].meta;
    if (factor == 1.0 && m->ndim == g->ndim && !is_spread(m, g)) return fsdp__grad_give(n, k, g);
    FSDP__PLACE(dx, add, k);
    int64_t o_sizes[FSDP_MAX_DIMS];
    for (int i = 0; i < g->ndim; i++) {
        int j = i - (g->ndim - m->ndim);
        o_sizes[i] = j < 0 ? 1 : m->size[j];
    }
    fsdp__k_sum(g->ndim, g->size, fsdp_data(g), g->stride, g->dtype, o_sizes, factor, fsdp_data(dx),
                dx->dtype, add);
    return FSDP_OK;
}

fsdp_status fsdp__back_add(fsdp__node *n, fsdp_tensor **gout)
{
    for (int k = 0; k < 2; k++)
        if (fsdp__grad_wanted(n, k)) FSDP_TRY(give_sum(n, k, gout[0], 1.0));
    return FSDP_OK;
}

fsdp_status fsdp__back_sub(fsdp__node *n, fsdp_tensor **gout)
{
    for (int k = 0; k < 2; k++)
        if (fsdp__grad_wanted(n, k)) FSDP_TRY(give_sum(n, k, gout[0], k ? -1.0 : 1.0));
    return FSDP_OK;
}

/* Input k's gradient is a op b, of g's sizes, summed over spread dims. */
static fsdp_status give_binary(fsdp__node *n, int k, fsdp__binary op, const fsdp_tensor *a,
                               const fsdp_tensor *b, const fsdp_tensor *g, double factor)
{
    int64_t sa[FSDP_MAX_DIMS], sb[FSDP_MAX_DIMS];
    fsdp__spread_strides(a, g->ndim, g->size, sa);
    fsdp__spread_strides(b, g->ndim, g->size, sb);
    if (factor == 1.0 && !is_spread(&n->in[k].meta, g)) {
        FSDP__PLACE(dx, add, k);
        fsdp__k_binary(op, g->ndim, g->size, fsdp_data(a), sa, fsdp_data(b), sb, g->dtype,
                       fsdp_data(dx), dx->dtype, add);
        return FSDP_OK;
    }
    /* The product before the sum is kept in the wider dtype of statistics. */
    fsdp_tensor *t =
        fsdp__tensor_create(fsdp__stat_dtype(g->dtype), g->ndim, g->size, g->st->device);
    if (!t) return fsdp_error();
    fsdp__k_binary(op, g->ndim, g->size, fsdp_data(a), sa, fsdp_data(b), sb, g->dtype, fsdp_data(t),
                   t->dtype, 0);
    FSDP__PLACE(dx, add, k);
    int64_t o_sizes[FSDP_MAX_DIMS];
    const fsdp__meta *m = &n->in[k].meta;
    for (int i = 0; i < g->ndim; i++) {
        int j = i - (g->ndim - m->ndim);
        o_sizes[i] = j < 0 ? 1 : m->size[j];
    }
    fsdp__k_sum(t->ndim, t->size, fsdp_data(t), t->stride, t->dtype, o_sizes, factor, fsdp_data(dx),
                dx->dtype, add);
    return FSDP_OK;
}

fsdp_status fsdp__back_mul(fsdp__node *n, fsdp_tensor **gout)
{
    for (int k = 0; k < 2; k++) {
        if (!fsdp__grad_wanted(n, k)) continue;
        FSDP__SAVED(other, 1 - k);
        FSDP_TRY(give_binary(n, k, FSDP__BINARY_MUL, gout[0], other, gout[0], 1.0));
    }
    return FSDP_OK;
}

fsdp_status fsdp__back_div(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED(b, 1);
    if (fsdp__grad_wanted(n, 0))
        FSDP_TRY(give_binary(n, 0, FSDP__BINARY_DIV, gout[0], b, gout[0], 1.0));
    if (!fsdp__grad_wanted(n, 1)) return FSDP_OK;
    FSDP__SAVED(a, 0); /* -(g a / b) / b */
    fsdp_tensor *g = gout[0];
    fsdp_tensor *t = fsdp__tensor_create(g->dtype, g->ndim, g->size, g->st->device);
    if (!t) return fsdp_error();
    int64_t sg[FSDP_MAX_DIMS], sa[FSDP_MAX_DIMS], sb[FSDP_MAX_DIMS];
    fsdp__spread_strides(g, g->ndim, g->size, sg);
    fsdp__spread_strides(a, g->ndim, g->size, sa);
    fsdp__spread_strides(b, g->ndim, g->size, sb);
    fsdp__k_binary(FSDP__BINARY_MUL, g->ndim, g->size, fsdp_data(g), sg, fsdp_data(a), sa, g->dtype,
                   fsdp_data(t), t->dtype, 0);
    fsdp__k_binary(FSDP__BINARY_DIV, g->ndim, g->size, fsdp_data(t), t->stride, fsdp_data(b), sb,
                   g->dtype, fsdp_data(t), t->dtype, 0);
    return give_binary(n, 1, FSDP__BINARY_DIV, t, b, t, -1.0);
}

/* ---- one input ------------------------------------------------------------------- */

static fsdp_status back_unary(fsdp__node *n, fsdp_tensor **gout, fsdp__unary op, bool reads_x,
                              bool reads_y)
{
    fsdp_tensor *g = fsdp__dense(gout[0]), *x = NULL, *y = NULL;
    if (!g) return fsdp_error();
    if (reads_x) {
        FSDP__SAVED_DENSE(saved_x, 0);
        x = saved_x;
    }
    if (reads_y) {
        FSDP__SAVED_DENSE(saved_y, FSDP__SAVED_OUT);
        y = saved_y;
    }
    FSDP__PLACE(dx, add, 0);
    fsdp__k_unary_backward(op, fsdp_data(x), fsdp_data(y), g->dtype, fsdp_data(g), fsdp_numel(g),
                           n->f[0], fsdp_data(dx), dx->dtype, add);
    return FSDP_OK;
}

#define BACK_UNARY(name, x, y)                                       \
    fsdp_status fsdp__back_##name(fsdp__node *n, fsdp_tensor **gout) \
    {                                                                \
        return back_unary(n, gout, FSDP__UNARY_##name, x, y);        \
    }
BACK_UNARY(scale, false, false)
BACK_UNARY(shift, false, false)
BACK_UNARY(exp, false, true)
BACK_UNARY(log, true, false)
BACK_UNARY(sqrt, false, true)
BACK_UNARY(pow, true, false)
BACK_UNARY(silu, true, false)
BACK_UNARY(gelu, true, false)
BACK_UNARY(gelu_tanh, true, false)
BACK_UNARY(relu, true, false)
BACK_UNARY(tanh, false, true)
BACK_UNARY(sigmoid, false, true)
#undef BACK_UNARY

fsdp_status fsdp__back_swiglu(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(a, 0);
    FSDP__SAVED_DENSE(b, 1);
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    fsdp_tensor *d[2] = {NULL, NULL};
    int add[2] = {0, 0};
    for (int k = 0; k < 2; k++)
        if (fsdp__grad_wanted(n, k) && !(d[k] = fsdp__grad_out(n, k, &add[k]))) return fsdp_error();
    /* Both inputs may be one tensor: its second gradient adds to the first. */
    fsdp__k_swiglu_backward(fsdp_data(a), fsdp_data(b), a->dtype, fsdp_data(g), fsdp_numel(g),
                            fsdp_data(d[0]), d[0] ? d[0]->dtype : a->dtype, add[0],
                            d[1] == d[0] ? NULL : fsdp_data(d[1]), d[1] ? d[1]->dtype : a->dtype,
                            add[1]);
    if (d[0] && d[1] == d[0])
        fsdp__k_swiglu_backward(fsdp_data(a), fsdp_data(b), a->dtype, fsdp_data(g), fsdp_numel(g),
                                NULL, a->dtype, 0, fsdp_data(d[1]), d[1]->dtype, 1);
    return FSDP_OK;
}

fsdp_status fsdp__back_dropout(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED(keys, 1);
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    FSDP__PLACE(dx, add, 0);
    int64_t rows = g->size[0], per = rows ? fsdp_numel(g) / rows : 0;
    fsdp__k_dropout(fsdp_data(g), g->dtype, rows, per, fsdp_data(keys), n->f[0], fsdp_data(dx),
                    dx->dtype, add);
    return FSDP_OK;
}

fsdp_status fsdp__back_sum(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    const fsdp__meta *m = &n->in[0].meta;
    fsdp_tensor *scaled = fsdp__tensor_create(g->dtype, g->ndim, g->size, g->st->device);
    if (!scaled) return fsdp_error();
    fsdp__k_unary(FSDP__UNARY_scale, fsdp_data(g), g->dtype, fsdp_numel(g), n->f[1],
                  fsdp_data(scaled));
    int64_t strides[FSDP_MAX_DIMS], step = 1;
    for (int i = m->ndim - 1; i >= 0; i--) { /* 0 where x was summed */
        bool summed = n->i[0] < 0 || i == (int)n->i[0];
        strides[i] = summed ? 0 : step;
        step *= summed ? 1 : m->size[i];
    }
    FSDP__PLACE(dx, add, 0);
    fsdp__k_copy(m->ndim, m->size, fsdp_data(scaled), scaled->dtype, strides, fsdp_data(dx),
                 dx->dtype, dx->stride, add);
    return FSDP_OK;
}
