/*
 * kernels.h - the arithmetic under the ops: pointers, sizes, strides.
 *
 * Each kernel has a plain form for f64, f32, f16 and bf16 made from one source
 * (kernel_plain.inc, included once a dtype), which is the judge of the fast
 * forms for f32 and bf16 beside it. f16 and bf16 compute in fp32 and round
 * once at the end; f64 computes in fp64. Statistics ("stat") are f32, f64 for
 * f64.
 *
 * Results do not depend on the number of threads, on alignment, or on an
 * element's place in an array: work is cut into parts that the shape fixes,
 * sums have one fixed order, tails are masked, and the compiler may not
 * contract (-ffp-contract=off; fused multiply-add only where written).
 *
 * `add` != 0 adds to what the output holds, in the output's dtype, rounding
 * once. Gradient outputs may have a wider dtype than the inputs (dt).
 * Arrays are contiguous unless strides are passed. Sizes may be 0.
 *
 * Letters: M, N, K of a matrix product; R rows and C columns of a row-wise
 * kernel; B batch, T sequence, H heads, KV key-value heads, D head size,
 * V vocabulary.
 */
#ifndef FSDP_TENSOR_KERNELS_H
#define FSDP_TENSOR_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/dtype.h"

/* ---- matrix products (kernel_gemm.c) -------------------------------------- */

/*
 * C (M,N) (+)= op(A) (M,K) * op(B) (K,N), row-major, leading dimensions in
 * elements; op transposes when its flag is set. A and B share dtype t; C has
 * dtype tc (t, or f32 for bf16 and f16). Cut along the longer of M and N into
 * two panels by one rule of the shape, each by one thread. oneDNN's sgemm for
 * f32; bf16 by oneDNN's matmul where the machine has bf16 instructions, else
 * widened into scratch and multiplied in f32. K = 0 gives zeros (or adds none).
 */
fsdp_status fsdp__k_gemm(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, const void *a,
                         int64_t lda, const void *b, int64_t ldb, fsdp_dtype t, void *c,
                         int64_t ldc, fsdp_dtype tc, int add);
/* `batch` products; strides between matrices in elements (0: the same one). */
fsdp_status fsdp__k_gemm_batched(int64_t batch, int trans_a, int trans_b, int64_t M, int64_t N,
                                 int64_t K, const void *a, int64_t lda, int64_t stride_a,
                                 const void *b, int64_t ldb, int64_t stride_b, fsdp_dtype t,
                                 void *c, int64_t ldc, int64_t stride_c, fsdp_dtype tc, int add);
/* The triple loop. */
void fsdp__k_gemm_plain(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, const void *a,
                        int64_t lda, const void *b, int64_t ldb, fsdp_dtype t, void *c,
                        int64_t ldc, fsdp_dtype tc, int add);
/* out[c] (+)= sum over rows of x (R,C): the gradient of a bias. */
void fsdp__k_column_sum(const void *x, fsdp_dtype t, int64_t R, int64_t C, void *out, fsdp_dtype dt,
                        int add);
/* y (R,C) += bias (C), in place. */
void fsdp__k_add_bias(void *y, const void *bias, fsdp_dtype t, int64_t R, int64_t C);

/* ---- attention (kernel_attention.c) ----------------------------------------- */

/*
 * Causal attention with grouped heads: q (B,T,H,D), k and v (B,S,KV,D), out
 * (B,T,H,D); H is a multiple of KV. Strides for b, t and h in elements; D is
 * contiguous. Query t sits at key position t + (S - T) and sees keys at
 * distance 0 .. window-1 behind it (window 0: all). causal 0: sees all keys.
 * Never stores T x S: tiles, with the running maximum and sum.
 * drop_p > 0: each kept weight is scaled by 1/(1-p); whether weight (b,h,t,s)
 * is kept is a function of (keys[b], (h*T + t)*S + s) by fsdp__rng_uniform.
 */
typedef struct fsdp__attention {
    fsdp_dtype t;
    int64_t B, T, S, H, KV, D;
    int64_t q_stride[3], k_stride[3], v_stride[3], o_stride[3]; /* b, t, h */
    float scale;
    int causal;
    int64_t window;
    float drop_p;
    const uint64_t *keys; /* (B); NULL when drop_p is 0 */
} fsdp__attention;

/* lse (B,H,T) stat: log of the sum of exponentials of each row. */
fsdp_status fsdp__k_attention(const fsdp__attention *a, const void *q, const void *k, const void *v,
                              void *out, void *lse);
/* dq, dk, dv have the layouts (strides) of q, k, v unless given otherwise, and
 * dtype dt; NULL: not wanted. */
typedef struct fsdp__attention_grad {
    fsdp_dtype dt;
    int64_t do_stride[3], dq_stride[3], dk_stride[3], dv_stride[3];
    int add_q, add_k, add_v;
} fsdp__attention_grad;
fsdp_status fsdp__k_attention_backward(const fsdp__attention *a, const fsdp__attention_grad *g,
                                       const void *q, const void *k, const void *v, const void *out,
                                       const void *dout, const void *lse, void *dq, void *dk,
                                       void *dv);
fsdp_status fsdp__k_attention_plain(const fsdp__attention *a, const void *q, const void *k,
                                    const void *v, void *out, void *lse);
fsdp_status fsdp__k_attention_backward_plain(const fsdp__attention *a,
                                             const fsdp__attention_grad *g, const void *q,
                                             const void *k, const void *v, const void *out,
                                             const void *dout, const void *lse, void *dq, void *dk,
                                             void *dv);

/* ---- losses (kernel_loss.c) ---------------------------------------------------- */

/* Sum over rows of -log softmax(x)[target], rows with target == ignore left
 * out. x (R,V). *loss is fp64, *count the rows counted; stat (R): max + log of
 * the sum. Sums run in row order in fp64. Targets out of range: INVALID_DATA
 * with row and id. */
fsdp_status fsdp__k_cross_entropy(const void *x, fsdp_dtype t, int64_t R, int64_t V,
                                  const int64_t *target, int64_t ignore, void *stat, double *loss,
                                  int64_t *count);
/* dx (R,V) (+)= scale * (softmax(x) - onehot); zeros for ignored rows. */
void fsdp__k_cross_entropy_backward(const void *x, fsdp_dtype t, int64_t R, int64_t V,
                                    const int64_t *target, int64_t ignore, const void *stat,
                                    double scale, void *dx, fsdp_dtype dt, int add);

/*
 * Head and loss in one, by tiles: logits = x (R,C) * w (V,C)^T + b exist for one
 * tile at a time only, fsdp__k_head_slice rows by at most 2048 of the vocabulary
 * (4 MiB, f64 8). The backward recomputes them from x and w and uses stat. b may
 * be NULL. stat of an ignored row is 0.
 */
int64_t fsdp__k_head_slice(int64_t R, int64_t V);
fsdp_status fsdp__k_head_loss(const void *x, const void *w, const void *b, fsdp_dtype t, int64_t R,
                              int64_t C, int64_t V, const int64_t *target, int64_t ignore,
                              void *stat, double *loss, int64_t *count);
/* Any of dx, dw, db may be NULL. add_* as everywhere; the slices' own sums into
 * dw and db accumulate in f32 (f64) and round once when dt_w is narrower. */
fsdp_status fsdp__k_head_loss_backward(const void *x, const void *w, const void *b, fsdp_dtype t,
                                       int64_t R, int64_t C, int64_t V, const int64_t *target,
                                       int64_t ignore, const void *stat, double scale, void *dx,
                                       fsdp_dtype dt_x, int add_x, void *dw, fsdp_dtype dt_w,
                                       int add_w, void *db, fsdp_dtype dt_b, int add_b);

/* ---- row-wise kernels (kernel_row.c) ------------------------------------------- */

/* y = x / sqrt(mean(x^2) + eps) * w; rstd (R) stat. w may be NULL (ones). Of
 * the backwards' outputs, here and below, any may be NULL: not wanted. */
void fsdp__k_rms_norm(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C, double eps,
                      void *y, void *rstd);
void fsdp__k_rms_norm_backward(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C,
                               const void *rstd, const void *dy, void *dx, fsdp_dtype dt_x,
                               int add_x, void *dw, fsdp_dtype dt_w, int add_w);
/* y = (x - mean) / sqrt(var + eps) * w + b. w and b may be NULL. */
void fsdp__k_layer_norm(const void *x, const void *w, const void *b, fsdp_dtype t, int64_t R,
                        int64_t C, double eps, void *y, void *mean, void *rstd);
void fsdp__k_layer_norm_backward(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C,
                                 const void *mean, const void *rstd, const void *dy, void *dx,
                                 fsdp_dtype dt_x, int add_x, void *dw, fsdp_dtype dt_w, int add_w,
                                 void *db, fsdp_dtype dt_b, int add_b);
/*
 * Batch norm (kernel_batch.c): y = (x - mean) / sqrt(var + eps) * w + b with x
 * (N,C,L) and statistics of each channel over N and L: in training those of the
 * batch (biased variance), of which running = (1 - momentum) * running +
 * momentum * (mean, unbiased variance) is kept; else the running ones. w, b and
 * in training running_* may be NULL. mean and rstd (C) stat: what y was made
 * with. Computes in f64 and rounds once.
 */
typedef struct fsdp__batch_norm {
    fsdp_dtype t;
    int64_t N, C, L;
    double eps, momentum;
    int training;
    void *running_mean, *running_var; /* (C) */
    fsdp_dtype mean_t, var_t;         /* theirs */
} fsdp__batch_norm;
void fsdp__k_batch_norm(const fsdp__batch_norm *o, const void *x, const void *w, const void *b,
                        void *y, void *mean, void *rstd);
/* The backward reads t, N, C, L and training alone. */
void fsdp__k_batch_norm_backward(const fsdp__batch_norm *o, const void *x, const void *w,
                                 const void *mean, const void *rstd, const void *dy, void *dx,
                                 fsdp_dtype dt_x, int add_x, void *dw, fsdp_dtype dt_w, int add_w,
                                 void *db, fsdp_dtype dt_b, int add_b);
void fsdp__k_softmax(const void *x, fsdp_dtype t, int64_t R, int64_t C, void *y);
void fsdp__k_softmax_backward(const void *y, fsdp_dtype t, int64_t R, int64_t C, const void *dy,
                              void *dx, fsdp_dtype dt, int add);
/* out (R,C) = w[ids[r]]; ids outside [0,V): INVALID_DATA with index and id. */
fsdp_status fsdp__k_embedding(const void *w, fsdp_dtype t, int64_t V, int64_t C, const int64_t *ids,
                              int64_t R, void *out);
/* dw (V,C) (+)= rows of dy at ids; rows in order. add 0 zeroes dw first. */
void fsdp__k_embedding_backward(const void *dy, fsdp_dtype t, const int64_t *ids, int64_t R,
                                int64_t V, int64_t C, void *dw, fsdp_dtype dt, int add);
/*
 * Rotary positions, halves rotated: for head row x (D), with angle a_i of
 * position p, y[i] = x[i] cos - x[i + D/2] sin, y[i + D/2] = x[i + D/2] cos +
 * x[i] sin. x (B,T,H,D) with strides for b, t, h; cos and sin (T, D/2) f32 rows
 * for each t (or (B,T,D/2) with table_b_stride). inverse != 0 turns back.
 * y has its own strides; add and dt as everywhere.
 */
typedef struct fsdp__rotary {
    fsdp_dtype t, dt;
    int64_t B, T, H, D;
    int64_t x_stride[3], y_stride[3];
    int64_t table_b_stride; /* elements; 0: one table for all b */
    int inverse, add;
} fsdp__rotary;
void fsdp__k_rotary(const fsdp__rotary *r, const void *x, const float *cos, const float *sin,
                    void *y);

/* ---- elementwise (kernel_elem.c) -------------------------------------------------- */

/* X(name): y = f(x); backward dx (+)= dy * f'(x): tanh, sigmoid, exp and sqrt
 * look at y, scale and shift at neither, the others at x; what an op does not
 * look at may be NULL. The parameter p is the factor of scale, the exponent of
 * pow, the summand of shift. */
#define FSDP__UNARY_LIST(X)                                                                        \
    X(silu) X(gelu) X(gelu_tanh) X(relu) X(tanh) X(sigmoid) X(exp) X(log) X(sqrt) X(pow) X(scale)  \
    X(shift)
typedef enum fsdp__unary {
#define FSDP__X(n) FSDP__UNARY_##n,
    FSDP__UNARY_LIST(FSDP__X)
#undef FSDP__X
        FSDP__UNARY_COUNT
} fsdp__unary;
void fsdp__k_unary(fsdp__unary op, const void *x, fsdp_dtype t, int64_t n, double p, void *y);
void fsdp__k_unary_backward(fsdp__unary op, const void *x, const void *y, fsdp_dtype t,
                            const void *dy, int64_t n, double p, void *dx, fsdp_dtype dt, int add);

typedef enum fsdp__binary {
    FSDP__BINARY_ADD,
    FSDP__BINARY_SUB,
    FSDP__BINARY_MUL,
    FSDP__BINARY_DIV
} fsdp__binary;
/* y (contiguous, `ndim` sizes) (+)= a op b, with strides in elements (0 where
 * broadcast). ndim <= 8. Contiguous and row-broadcast cases are fast. */
void fsdp__k_binary(fsdp__binary op, int ndim, const int64_t *sizes, const void *a,
                    const int64_t *a_stride, const void *b, const int64_t *b_stride, fsdp_dtype t,
                    void *y, fsdp_dtype dt, int add);
/* out (o_size: sizes with 1 where summed, contiguous) (+)= scale * sum of x
 * (sizes, strides). Sums in f32 (f64), in an order fixed by the sizes. */
void fsdp__k_sum(int ndim, const int64_t *sizes, const void *x, const int64_t *x_stride,
                 fsdp_dtype t, const int64_t *o_sizes, double scale, void *out, fsdp_dtype dt,
                 int add);
/* Strided copy with conversion: dst (+)= src, both with `sizes`. The work
 * horse of reshape, transpose, slice, cat, cast and their backwards. ndim <= 8;
 * dst holds no element twice (no stride 0 where the size is over 1). */
void fsdp__k_copy(int ndim, const int64_t *sizes, const void *src, fsdp_dtype src_t,
                  const int64_t *src_stride, void *dst, fsdp_dtype dst_t, const int64_t *dst_stride,
                  int add);
/* y = silu(a) * b, and its backward. */
void fsdp__k_swiglu(const void *a, const void *b, fsdp_dtype t, int64_t n, void *y);
void fsdp__k_swiglu_backward(const void *a, const void *b, fsdp_dtype t, const void *dy, int64_t n,
                             void *da, fsdp_dtype dt_a, int add_a, void *db, fsdp_dtype dt_b,
                             int add_b);
/* y = x / (1-p) where fsdp__rng_uniform(keys[i / per], i % per) >= p, else 0:
 * `rows` rows of `per` elements, one key each. Backward: the same on dy. */
void fsdp__k_dropout(const void *x, fsdp_dtype t, int64_t rows, int64_t per, const uint64_t *keys,
                     double p, void *y, fsdp_dtype dt, int add);
void fsdp__k_fill(void *y, fsdp_dtype t, int64_t n, double value);

/* ---- optimizers (kernel_optim.c) ---------------------------------------------------- */

/* One AdamW step, as torch.optim.AdamW: decoupled decay first, bias
 * corrections from step (1-based). g has dtype gt, p and the moments pt
 * (computed in f32, f64 for f64); g is multiplied by g_scale on the way. */
typedef struct fsdp__adamw {
    double lr, beta1, beta2, eps, weight_decay, g_scale;
    int64_t step;
} fsdp__adamw;
void fsdp__k_adamw(const fsdp__adamw *o, void *p, void *m, void *v, fsdp_dtype pt, const void *g,
                   fsdp_dtype gt, int64_t n);
/* One SGD step, as torch.optim.SGD (decay added to the gradient; dampening 0);
 * buf NULL without momentum; first step: buf = g. */
typedef struct fsdp__sgd {
    double lr, momentum, weight_decay, g_scale;
    int nesterov;
    int64_t step;
} fsdp__sgd;
void fsdp__k_sgd(const fsdp__sgd *o, void *p, void *buf, fsdp_dtype pt, const void *g,
                 fsdp_dtype gt, int64_t n);

#endif
