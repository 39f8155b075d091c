/*
 * ops.h - the ops: differentiable functions of tensors.
 *
 * An op given NULL returns NULL and leaves the first error in place. Inputs of
 * one op share one floating dtype, which its output has (losses are f32, f64
 * for f64); f16 and bf16 compute in fp32 and round once. Shapes are written in
 * row-major order. Meta tensors give meta tensors.
 */
#ifndef FSDP_OPS_H
#define FSDP_OPS_H

#include "autograd.h"

FSDP_EXTERN_C_BEGIN

/* ---- shape -------------------------------------------------------------- */

/* A view where strides allow it, else a copy. One size may be -1. */
FSDP_API fsdp_tensor *fsdp_reshape(fsdp_tensor *x, int ndim,
                                   const int64_t *sizes);
FSDP_API fsdp_tensor *fsdp_transpose(fsdp_tensor *x, int a, int b); /* a view */
/* A view of [start, end) along dim; negative positions count from the end. */
FSDP_API fsdp_tensor *fsdp_slice(fsdp_tensor *x, int dim, int64_t start,
                                 int64_t end);
FSDP_API fsdp_tensor *fsdp_cat(fsdp_tensor **x, int n, int dim); /* n <= 8 */
FSDP_API fsdp_tensor *fsdp_cast(fsdp_tensor *x, fsdp_dtype t);
FSDP_API fsdp_tensor *fsdp_contiguous(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_clone(fsdp_tensor *x);

/* ---- arithmetic, with broadcasting -------------------------------------- */

FSDP_API fsdp_tensor *fsdp_add(fsdp_tensor *a, fsdp_tensor *b);
FSDP_API fsdp_tensor *fsdp_sub(fsdp_tensor *a, fsdp_tensor *b);
FSDP_API fsdp_tensor *fsdp_mul(fsdp_tensor *a, fsdp_tensor *b);
FSDP_API fsdp_tensor *fsdp_div(fsdp_tensor *a, fsdp_tensor *b);
FSDP_API fsdp_tensor *fsdp_scale(fsdp_tensor *x, double factor);
FSDP_API fsdp_tensor *fsdp_shift(fsdp_tensor *x, double summand);
FSDP_API fsdp_tensor *fsdp_exp(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_log(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_sqrt(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_pow(fsdp_tensor *x, double exponent);
FSDP_API fsdp_tensor *fsdp_sum(fsdp_tensor *x);  /* 0-dim */
FSDP_API fsdp_tensor *fsdp_mean(fsdp_tensor *x); /* 0-dim; NaN for none */
FSDP_API fsdp_tensor *fsdp_sum_dim(fsdp_tensor *x, int dim, int keepdim);
FSDP_API fsdp_tensor *fsdp_mean_dim(fsdp_tensor *x, int dim, int keepdim);

/* ---- activations -------------------------------------------------------- */

FSDP_API fsdp_tensor *fsdp_silu(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_gelu(fsdp_tensor *x);      /* with erf */
FSDP_API fsdp_tensor *fsdp_gelu_tanh(fsdp_tensor *x); /* "gelu_new" */
FSDP_API fsdp_tensor *fsdp_relu(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_tanh(fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_sigmoid(fsdp_tensor *x);
/* silu(a) * b */
FSDP_API fsdp_tensor *fsdp_swiglu(fsdp_tensor *a, fsdp_tensor *b);
FSDP_API fsdp_tensor *fsdp_softmax(fsdp_tensor *x); /* over the last dim */
/* Keeps each element with probability 1 - p, scaled by 1 / (1 - p). Which are
 * kept is a function of seed, step, sample, module and element (context of
 * random numbers: fsdp_random_*), never of the rank. p 0: x itself. */
FSDP_API fsdp_tensor *fsdp_dropout(fsdp_tensor *x, double p);

/* ---- layers ------------------------------------------------------------- */

/* x (..., K), w (N, K), bias (N) or absent (have_bias 0) -> (..., N). */
FSDP_API fsdp_tensor *fsdp_linear(fsdp_tensor *x, fsdp_tensor *w);
FSDP_API fsdp_tensor *fsdp_linear_bias(fsdp_tensor *x, fsdp_tensor *w,
                                       fsdp_tensor *bias);
/* The same with w (K, N), as GPT-2 stores it. */
FSDP_API fsdp_tensor *fsdp_linear_in_out(fsdp_tensor *x, fsdp_tensor *w,
                                         fsdp_tensor *bias);
/* a (..., M, K) * b (..., K, N): equal leading sizes, or b 2-dim. */
FSDP_API fsdp_tensor *fsdp_matmul(fsdp_tensor *a, fsdp_tensor *b);
/* w (V, C), ids i64 of any shape -> (ids..., C). */
FSDP_API fsdp_tensor *fsdp_embedding(fsdp_tensor *w, fsdp_tensor *ids);
/* Over the last dim; w (C). */
FSDP_API fsdp_tensor *fsdp_rms_norm(fsdp_tensor *x, fsdp_tensor *w, double eps);
FSDP_API fsdp_tensor *fsdp_layer_norm(fsdp_tensor *x, fsdp_tensor *w,
                                      fsdp_tensor *b, double eps);
/* As torch.nn.functional.batch_norm: x (N, C) or (N, C, ...), weight and bias
 * (C) or NULL. training != 0: normalises by the batch's mean and biased
 * variance over all but C (more than one value a channel) and moves the
 * running ones in place: running = (1 - momentum) * running + momentum *
 * (mean, unbiased variance). Else normalises by the running ones. These are
 * (C), of any floating dtype, without a gradient, and in training may be NULL:
 * then none are kept. */
FSDP_API fsdp_tensor *fsdp_batch_norm(fsdp_tensor *x, fsdp_tensor *weight,
                                      fsdp_tensor *bias,
                                      fsdp_tensor *running_mean,
                                      fsdp_tensor *running_var, int training,
                                      double momentum, double eps);
/* x (B,T,H,D), cos and sin f32 (T, D/2) or (B, T, D/2); halves rotated. */
FSDP_API fsdp_tensor *fsdp_rotary(fsdp_tensor *x, fsdp_tensor *cos,
                                  fsdp_tensor *sin);
/* Causal attention: q (B,T,H,D), k and v (B,S,KV,D) with H a multiple of KV,
 * -> (B,T,H,D). Any strides with D contiguous. scale 0: 1/sqrt(D). window 0:
 * all earlier keys. dropout_p acts on the weights. */
typedef struct fsdp_attention_options {
    double scale;
    int not_causal;
    int64_t window;
    double dropout_p;
} fsdp_attention_options;
FSDP_API fsdp_tensor *fsdp_attention(fsdp_tensor *q, fsdp_tensor *k,
                                     fsdp_tensor *v,
                                     const fsdp_attention_options *o);

/* ---- losses ------------------------------------------------------------- */

typedef enum fsdp_reduction {
    FSDP_REDUCE_MEAN,
    FSDP_REDUCE_SUM
} fsdp_reduction;

/* x (..., V), target i64 (...); rows whose target is ignore_index do not
 * count. Mean over none is NaN. 0-dim result. */
FSDP_API fsdp_tensor *fsdp_cross_entropy(fsdp_tensor *x, fsdp_tensor *target,
                                         int64_t ignore_index,
                                         fsdp_reduction r);
/* Head and loss in one: logits x (..., C) * w (V, C)^T (+ bias (V)) exist for
 * one slice of rows at a time only. bias may be absent: pass NULL. */
FSDP_API fsdp_tensor *fsdp_head_cross_entropy(fsdp_tensor *x, fsdp_tensor *w,
                                              fsdp_tensor *bias,
                                              fsdp_tensor *target,
                                              int64_t ignore_index,
                                              fsdp_reduction r);
FSDP_API fsdp_tensor *fsdp_mse_loss(fsdp_tensor *x, fsdp_tensor *target,
                                    fsdp_reduction r);

FSDP_EXTERN_C_END
#endif
