/*
 * kernel_attention_internal.h - what the plain and the tiled attention share:
 * which keys a query sees, where a row lies, and the instruction sets' tiles.
 */
#ifndef FSDP_TENSOR_KERNEL_ATTENTION_INTERNAL_H
#define FSDP_TENSOR_KERNEL_ATTENTION_INTERNAL_H

#include <stdint.h>

#include "tensor/kernels.h"

/* Query t sees the keys lo .. hi - 1; none when hi <= lo. */
static inline void fsdp__attention_span(const fsdp__attention *a, int64_t t, int64_t *lo,
                                        int64_t *hi)
{
    int64_t at = t + (a->S - a->T);
    *lo = 0;
    *hi = a->S;
    if (!a->causal) return;
    if (at + 1 < *hi) *hi = at + 1;
    if (a->window > 0 && at + 1 - a->window > 0) *lo = at + 1 - a->window;
    if (*hi < *lo) *hi = *lo;
}

/* Element (b,t,h,0) of an array with strides for b, t, h. */
static inline int64_t fsdp__attention_at(const int64_t stride[3], int64_t b, int64_t t, int64_t h)
{
    return b * stride[0] + t * stride[1] + h * stride[2];
}

/*
 * One instruction set's inner loops, all in f32. Sizes are multiples of mr
 * rows and nr columns; arrays are padded up to them.
 */
typedef struct fsdp__attention_tile {
    int mr, nr;
    /* Of a tile of scores: a multiple of mr, and one of mr and nr; in dk and dv as many keys
     * (a multiple of mr) share their first query. By the first cache. */
    int queries, keys, keys_part;
    /* c (m,n) (+)= a (m,k) * b (k,n); a(i,k) is a[i * ai + k * ak]. */
    void (*multiply)(int64_t m, int64_t n, int64_t k, const float *a, int64_t ai, int64_t ak,
                     const float *b, int64_t ldb, float *c, int64_t ldc, int add);
    /* y = n elements of x, of f32, bf16 or f16. */
    void (*widen)(const void *x, fsdp_dtype t, int64_t n, float *y);
    /* x (rows,ld) to y (columns,ldy), times scale; both multiples of 8. */
    void (*transpose)(const float *x, int64_t ld, int64_t rows, int64_t columns, float scale,
                      float *y, int64_t ldy);
    /* Of each of at most mr rows: s[i] becomes 2^(s[i] - new maximum), n a multiple of nr. max is
     * lifted to the new maximum, sum is brought to it and added to; factor is what brings older
     * results to it. */
    void (*softmax)(float *s, int64_t ld, int64_t rows, int64_t n, float *max, float *sum,
                    float *factor);
    /* x[i] *= by. */
    void (*scale)(float *x, int64_t n, float by);
    /* From scores s and dp (both n): ds = p * (dp * keep - delta) * scale in
     * dp's place and p * keep in s's, with p = 2^(s - lse). keep NULL: ones. */
    void (*gradient)(float *s, float *dp, int64_t n, float lse, float delta, float scale,
                     const float *keep);
    /* Sum of x[i] * y[i]. */
    float (*dot)(const float *x, const float *y, int64_t n);
} fsdp__attention_tile;

/* NULL where the machine (or FSDP_ISA) has plain C only. */
const fsdp__attention_tile *fsdp__attention_tile_get(void);

#endif
