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

/* Places of inputs 0..count-1, NULL where not wanted. */
static fsdp_status places(fsdp__node *n, int count, fsdp_tensor **d, int *add)
{
    for (int k = 0; k < count; k++) {
        d[k] = NULL;
        add[k] = 0;
        if (fsdp__grad_wanted(n, k) && !(d[k] = fsdp__grad_out(n, k, &add[k]))) return fsdp_error();
    }
    return FSDP_OK;
}

static fsdp_dtype dtype_of(const fsdp_tensor *t, fsdp_dtype otherwise)
{
    return t ? t->dtype : otherwise;
}

fsdp_status fsdp__back_rms_norm(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(x, 0);
    FSDP__SAVED(rstd, FSDP__SAVED_OUT + 1);
    fsdp_tensor *w = fsdp__node_saved(n, 1), *g = fsdp__dense(gout[0]), *d[2];
    if (!g || fsdp_error()) return fsdp_error();
    int add[2];
    FSDP_TRY(places(n, 2, d, add));
    fsdp__k_rms_norm_backward(fsdp_data(x), fsdp_data(w), x->dtype, fsdp__rows(x),
                              x->size[x->ndim - 1], fsdp_data(rstd), fsdp_data(g), fsdp_data(d[0]),
                              dtype_of(d[0], x->dtype), add[0], fsdp_data(d[1]),
                              dtype_of(d[1], x->dtype), add[1]);
    return FSDP_OK;
}

fsdp_status fsdp__back_layer_norm(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__SAVED_DENSE(x, 0);
    FSDP__SAVED(mean, FSDP__SAVED_OUT + 1);
    FSDP__SAVED(rstd, FSDP__SAVED_OUT + 2);
    fsdp_tensor *w = fsdp__node_saved(n, 1), *g = fsdp__dense(gout[0]), *d[3];
    if (!g || fsdp_error()) return fsdp_error();
    int add[3];
    FSDP_TRY(places(n, 3, d, add));
    fsdp__k_layer_norm_backward(fsdp_data(x), fsdp_data(w), x->dtype, fsdp__rows(x),
                                x->size[x->ndim - 1], fsdp_data(mean), fsdp_data(rstd),
                                fsdp_data(g), fsdp_data(d[0]), dtype_of(d[0], x->dtype), add[0],
                                fsdp_data(d[1]), dtype_of(d[1], x->dtype), add[1], fsdp_data(d[2]),
                                dtype_of(d[2], x->dtype), add[2]);
    return FSDP_OK;
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
