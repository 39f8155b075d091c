/*
 * back_layer.c - gradients of linear, matmul, embedding, norms, softmax and
 * rotary.
 */
#include <string.h>

#include "autograd/back.h"

/* y = x w^T (+ b), or x w with w (K, N) when i[0]. g is dy (M, N). */
fsdp_status fsdp__back_linear(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    const fsdp__meta *mx = &n->in[0].meta;
    int64_t K = mx->size[mx->ndim - 1], N = g->size[g->ndim - 1], M = fsdp__rows(g);
    bool in_out = n->i[0] != 0;
    if (fsdp__grad_wanted(n, 1)) { /* before dx: the peers wait for it */
        FSDP__SAVED_DENSE(x, 0);
        FSDP__PLACE(dw, add, 1);
        FSDP_TRY(in_out ? fsdp__k_gemm(1, 0, K, N, M, fsdp_data(x), K, fsdp_data(g), N, g->dtype,
                                       fsdp_data(dw), N, dw->dtype, add)
                        : fsdp__k_gemm(1, 0, N, K, M, fsdp_data(g), N, fsdp_data(x), K, g->dtype,
                                       fsdp_data(dw), K, dw->dtype, add));
    }
    if (fsdp__grad_wanted(n, 2)) {
        FSDP__PLACE(db, add, 2);
        fsdp__k_column_sum(fsdp_data(g), g->dtype, M, N, fsdp_data(db), db->dtype, add);
    }
    if (fsdp__grad_wanted(n, 0)) {
        FSDP__SAVED_DENSE(w, 1);
        FSDP__PLACE(dx, add, 0);
        FSDP_TRY(fsdp__k_gemm(0, in_out, M, K, N, fsdp_data(g), N, fsdp_data(w), in_out ? N : K,
                              g->dtype, fsdp_data(dx), K, dx->dtype, add));
    }
    return FSDP_OK;
}

fsdp_status fsdp__back_matmul(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    const fsdp__meta *ma = &n->in[0].meta, *mb = &n->in[1].meta;
    int64_t M = g->size[g->ndim - 2], N = g->size[g->ndim - 1], K = ma->size[ma->ndim - 1];
    int64_t batch = fsdp__numel_of(g->ndim - 2, g->size);
    if (mb->ndim == 2) M *= batch, batch = 1;
    if (fsdp__grad_wanted(n, 0)) {
        FSDP__SAVED_DENSE(b, 1);
        FSDP__PLACE(da, add, 0);
        FSDP_TRY(fsdp__k_gemm_batched(batch, 0, 1, M, K, N, fsdp_data(g), N, M * N, fsdp_data(b), N,
                                      K * N, g->dtype, fsdp_data(da), K, M * K, da->dtype, add));
    }
    if (fsdp__grad_wanted(n, 1)) {
        FSDP__SAVED_DENSE(a, 0);
        FSDP__PLACE(db, add, 1);
        FSDP_TRY(fsdp__k_gemm_batched(batch, 1, 0, K, N, M, fsdp_data(a), K, M * K, fsdp_data(g), N,
                                      M * N, g->dtype, fsdp_data(db), N, K * N, db->dtype, add));
    }
    return FSDP_OK;
}

fsdp_status fsdp__back_embedding(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(ids, 1);
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    FSDP__PLACE(dw, add, 0);
    fsdp__k_embedding_backward(fsdp_data(g), g->dtype, fsdp_data(ids), fsdp_numel(ids), dw->size[0],
                               dw->size[1], fsdp_data(dw), dw->dtype, add);
    return FSDP_OK;
}

fsdp_status fsdp__places_begin(fsdp__node *n, int count, fsdp__places *p)
{
    memset(p, 0, sizeof *p);
    for (int k = 0; k < count; k++) {
        p->t[k] = n->in[k].meta.dtype;
        if (!fsdp__grad_wanted(n, k)) continue;
        if (!(p->d[k] = fsdp__grad_out(n, k, &p->add[k]))) return fsdp_error();
        p->t[k] = p->d[k]->dtype;
        for (int j = 0; j < k && !p->home[k]; j++)
            if (p->d[j] == p->d[k]) p->home[k] = p->d[k];
        if (!p->home[k]) continue;
        p->add[k] = 0;
        p->d[k] = fsdp__tensor_create(p->t[k], p->home[k]->ndim, p->home[k]->size, FSDP_CPU);
        if (!p->d[k]) return fsdp_error();
    }
    return FSDP_OK;
}

fsdp_status fsdp__places_end(const fsdp__places *p)
{
    for (int k = 0; k < FSDP__PLACES; k++)
        if (p->home[k]) FSDP_TRY(fsdp_accumulate_(p->home[k], p->d[k]));
    return FSDP_OK;
}

/* What was saved under k, contiguous; NULL without an error if nothing was. */
static fsdp_tensor *saved_dense(fsdp__node *n, int k)
{
    fsdp_tensor *t = fsdp__node_saved(n, k);
    return t ? fsdp__dense(t) : NULL;
}

fsdp_status fsdp__back_rms_norm(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(x, 0);
    FSDP__SAVED(rstd, FSDP__SAVED_OUT + 1);
    fsdp_tensor *w = saved_dense(n, 1), *g = fsdp__dense(gout[0]);
    if (!g || fsdp_error()) return fsdp_error();
    fsdp__places p;
    FSDP_TRY(fsdp__places_begin(n, 2, &p));
    fsdp__k_rms_norm_backward(
        fsdp_data(x), fsdp_data(w), x->dtype, fsdp__rows(x), x->size[x->ndim - 1], fsdp_data(rstd),
        fsdp_data(g), fsdp_data(p.d[0]), p.t[0], p.add[0], fsdp_data(p.d[1]), p.t[1], p.add[1]);
    return fsdp__places_end(&p);
}

fsdp_status fsdp__back_layer_norm(fsdp__node *n, fsdp_tensor **gout)
{
    if (!fsdp__grad_wanted(n, 0) && !fsdp__grad_wanted(n, 1)) { /* the bias alone: x is not kept */
        fsdp_tensor *dy = fsdp__dense(gout[0]);
        if (!dy) return fsdp_error();
        FSDP__PLACE(db, add, 2);
        fsdp__k_column_sum(fsdp_data(dy), dy->dtype, fsdp__rows(dy), dy->size[dy->ndim - 1],
                           fsdp_data(db), db->dtype, add);
        return FSDP_OK;
    }
    FSDP__SAVED_DENSE(x, 0);
    FSDP__SAVED(mean, FSDP__SAVED_OUT + 1);
    FSDP__SAVED(rstd, FSDP__SAVED_OUT + 2);
    fsdp_tensor *w = saved_dense(n, 1), *g = fsdp__dense(gout[0]);
    if (!g || fsdp_error()) return fsdp_error();
    fsdp__places p;
    FSDP_TRY(fsdp__places_begin(n, 3, &p));
    fsdp__k_layer_norm_backward(
        fsdp_data(x), fsdp_data(w), x->dtype, fsdp__rows(x), x->size[x->ndim - 1], fsdp_data(mean),
        fsdp_data(rstd), fsdp_data(g), fsdp_data(p.d[0]), p.t[0], p.add[0], fsdp_data(p.d[1]),
        p.t[1], p.add[1], fsdp_data(p.d[2]), p.t[2], p.add[2]);
    return fsdp__places_end(&p);
}

fsdp_status fsdp__back_batch_norm(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = fsdp__dense(gout[0]), *x = saved_dense(n, 0), *w = saved_dense(n, 1);
    fsdp_tensor *mean = saved_dense(n, FSDP__SAVED_OUT + 1);
    fsdp_tensor *rstd = saved_dense(n, FSDP__SAVED_OUT + 2);
    if (!g || fsdp_error()) return fsdp_error();
    if (!x) { /* the bias alone */
        FSDP__PLACE(db, add, 2);
        int64_t sizes[3] = {g->size[0], g->size[1], fsdp__numel_of(g->ndim - 2, g->size + 2)};
        int64_t strides[3] = {sizes[1] * sizes[2], sizes[2], 1}, out[3] = {1, sizes[1], 1};
        fsdp__k_sum(3, sizes, fsdp_data(g), strides, g->dtype, out, 1.0, fsdp_data(db), db->dtype,
                    add);
        return FSDP_OK;
    }
    fsdp__batch_norm o = {.t = x->dtype,
                          .N = x->size[0],
                          .C = x->size[1],
                          .L = fsdp__numel_of(x->ndim - 2, x->size + 2),
                          .training = n->i[0] != 0};
    fsdp__places p;
    FSDP_TRY(fsdp__places_begin(n, 3, &p));
    fsdp__k_batch_norm_backward(&o, fsdp_data(x), fsdp_data(w), fsdp_data(mean), fsdp_data(rstd),
                                fsdp_data(g), fsdp_data(p.d[0]), p.t[0], p.add[0],
                                fsdp_data(p.d[1]), p.t[1], p.add[1], fsdp_data(p.d[2]), p.t[2],
                                p.add[2]);
    return fsdp__places_end(&p);
}

fsdp_status fsdp__back_softmax(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(y, FSDP__SAVED_OUT);
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    FSDP__PLACE(dx, add, 0);
    fsdp__k_softmax_backward(fsdp_data(y), y->dtype, fsdp__rows(y), y->size[y->ndim - 1],
                             fsdp_data(g), fsdp_data(dx), dx->dtype, add);
    return FSDP_OK;
}

fsdp_status fsdp__back_rotary(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED(cs, 1);
    FSDP__SAVED(sn, 2);
    fsdp_tensor *g = gout[0];
    if (g->stride[3] != 1 && g->size[3] > 1 && !(g = fsdp__dense(g))) return fsdp_error();
    FSDP__PLACE(dx, add, 0);
    fsdp__rotary r = {.t = g->dtype,
                      .dt = dx->dtype,
                      .B = g->size[0],
                      .T = g->size[1],
                      .H = g->size[2],
                      .D = g->size[3],
                      .inverse = 1,
                      .add = add,
                      .table_b_stride = cs->ndim == 3 ? cs->stride[0] : 0};
    memcpy(r.x_stride, g->stride, sizeof r.x_stride);
    memcpy(r.y_stride, dx->stride, sizeof r.y_stride);
    fsdp__k_rotary(&r, fsdp_data(g), fsdp_data(cs), fsdp_data(sn), fsdp_data(dx));
    return FSDP_OK;
}
