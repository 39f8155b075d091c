/*
 * back_loss.c - gradients of attention and of the losses.
 */
#include <string.h>

#include "autograd/back.h"
#include "tensor/op_attention.h"

/* The kernel writes all three gradients in one dtype: a place with another one
 * is reached by way of a temporary. */
static fsdp_status attention_place(fsdp__node *n, int k, fsdp_tensor *like, fsdp_tensor **d,
                                   int *add, fsdp_tensor **final, int *final_add)
{
    /* q, k and v may be one tensor, whose gradient is then a sum: the second and third come by way
     * of a temporary, because the kernel writes the three in no promised order. */
    bool again = k > 0 && n->in[k].node &&
                 (n->in[k].node == n->in[0].node || (k > 1 && n->in[k].node == n->in[1].node));
    *d = *final = NULL;
    *add = 0;
    if (!fsdp__grad_wanted(n, k)) return FSDP_OK;
    *d = fsdp__grad_out(n, k, add);
    if (!*d) return fsdp_error();
    if ((*d)->dtype == like->dtype && !again) return FSDP_OK;
    *final = *d;
    *final_add = *add;
    *add = 0;
    *d = fsdp__tensor_create(like->dtype, like->ndim, like->size, FSDP_CPU);
    return *d ? FSDP_OK : fsdp_error();
}

fsdp_status fsdp__back_attention(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED(q, 0);
    FSDP__SAVED(k, 1);
    FSDP__SAVED(v, 2);
    FSDP__SAVED(out, FSDP__SAVED_OUT);
    FSDP__SAVED(lse, FSDP__SAVED_OUT + 1);
    fsdp_tensor *keys = fsdp__node_saved(n, 3), *g = gout[0], *in[3] = {q, k, v};
    if (fsdp_error()) return fsdp_error();
    if (g->stride[3] != 1 && g->size[3] > 1 && !(g = fsdp__dense(g))) return fsdp_error();
    fsdp__attention a;
    fsdp__attention_args(q, k, v, out, keys, n->i, n->f, &a);
    fsdp_tensor *d[3], *final[3];
    int add[3], final_add[3] = {0, 0, 0};
    for (int i = 0; i < 3; i++)
        FSDP_TRY(attention_place(n, i, in[i], &d[i], &add[i], &final[i], &final_add[i]));
    fsdp__attention_grad ag = {.dt = q->dtype, .add_q = add[0], .add_k = add[1], .add_v = add[2]};
    memcpy(ag.do_stride, g->stride, sizeof ag.do_stride);
    int64_t *strides[3] = {ag.dq_stride, ag.dk_stride, ag.dv_stride};
    for (int i = 0; i < 3; i++)
        if (d[i]) memcpy(strides[i], d[i]->stride, 3 * sizeof(int64_t));
    FSDP_TRY(fsdp__k_attention_backward(&a, &ag, fsdp_data(q), fsdp_data(k), fsdp_data(v),
                                        fsdp_data(out), fsdp_data(g), fsdp_data(lse),
                                        fsdp_data(d[0]), fsdp_data(d[1]), fsdp_data(d[2])));
    for (int i = 0; i < 3; i++)
        if (final[i])
            FSDP_TRY(final_add[i] ? fsdp_accumulate_(final[i], d[i]) : fsdp_copy_(final[i], d[i]));
    return FSDP_OK;
}

/* What each row's term is multiplied by: the gradient, over the count for a mean. */
static double row_factor(const fsdp__node *n, const fsdp_tensor *g)
{
    double f = fsdp_item(g);
    return n->i[1] == 0 ? (n->i[2] ? f / (double)n->i[2] : 0.0) : f;
}

fsdp_status fsdp__back_cross_entropy(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(x, 0);
    FSDP__SAVED_DENSE(target, 1);
    FSDP__SAVED(stat, FSDP__SAVED_OUT + 1);
    FSDP__PLACE(dx, add, 0);
    fsdp__k_cross_entropy_backward(fsdp_data(x), x->dtype, fsdp__rows(x), x->size[x->ndim - 1],
                                   fsdp_data(target), n->i[0], fsdp_data(stat),
                                   row_factor(n, gout[0]), fsdp_data(dx), dx->dtype, add);
    return FSDP_OK;
}

fsdp_status fsdp__back_head_cross_entropy(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(x, 0);
    FSDP__SAVED_DENSE(w, 1);
    FSDP__SAVED_DENSE(target, 3);
    FSDP__SAVED(stat, FSDP__SAVED_OUT + 1);
    fsdp_tensor *b = fsdp__node_saved(n, 2);
    if (fsdp_error() || (b && !(b = fsdp__dense(b)))) return fsdp_error();
    fsdp__places p;
    FSDP_TRY(fsdp__places_begin(n, 3, &p));
    FSDP_TRY(fsdp__k_head_loss_backward(fsdp_data(x), fsdp_data(w), fsdp_data(b), x->dtype,
                                        fsdp__rows(x), w->size[1], w->size[0], fsdp_data(target),
                                        n->i[0], fsdp_data(stat), row_factor(n, gout[0]),
                                        fsdp_data(p.d[0]), p.t[0], p.add[0], fsdp_data(p.d[1]),
                                        p.t[1], p.add[1], fsdp_data(p.d[2]), p.t[2], p.add[2]));
    return fsdp__places_end(&p);
}

fsdp_status fsdp__back_mse_loss(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(a, 0);
    FSDP__SAVED_DENSE(b, 1);
    int64_t count = fsdp_numel(a), stride = 1;
    double f = 2.0 * fsdp_item(gout[0]);
    if (n->i[1] == 0) f /= (double)count;
    fsdp_tensor *diff = fsdp__tensor_create(fsdp__stat_dtype(a->dtype), 1, &count, FSDP_CPU);
    if (!diff) return fsdp_error();
    fsdp__k_binary(FSDP__BINARY_SUB, 1, &count, fsdp_data(a), &stride, fsdp_data(b), &stride,
                   a->dtype, fsdp_data(diff), diff->dtype, 0);
    for (int k = 0; k < 2; k++) {
        if (!fsdp__grad_wanted(n, k)) continue;
        FSDP__PLACE(d, add, k);
        fsdp__k_sum(1, &count, fsdp_data(diff), &stride, diff->dtype, &count, k ? -f : f,
                    fsdp_data(d), d->dtype, add);
    }
    return FSDP_OK;
}
