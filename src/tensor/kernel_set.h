/*
 * kernel_set.h - the inner loops of the row-wise, elementwise and optimizer
 * kernels, as tables of functions: one table a dtype in plain C, and one an
 * instruction set for f32 and bf16.
 *
 * The public kernels (kernels.h) cut the work into parts that the shape fixes
 * and call the same table for each part, so a table's functions are serial.
 * The fast tables take f32 and bf16 in any mix of input and output; whatever
 * holds another dtype goes to the plain table of the input's dtype.
 *
 * Sums inside a row run in FSDP__LANES lanes (element j in lane j mod 16),
 * folded in halves, so a plain sum has the same bits in each table; those of
 * the RMS norm and of the losses run in two vectors of the instruction set. The
 * table for AVX-512 with bf16 instructions takes f32's denormals as zeros where
 * it rounds to bf16.
 */
#ifndef FSDP_TENSOR_KERNEL_SET_H
#define FSDP_TENSOR_KERNEL_SET_H

#include "base/convert.h"
#include "tensor/kernels.h"

#define FSDP__LANES 16

/* Side of a transposed tile, in elements: of four bytes, half of the first cache. */
#define FSDP__TILE 64
#define FSDP__TILE_16 128 /* of two bytes */

/* Elements of one part of an elementwise kernel: 128 KiB of f32, large against
 * the cost of handing out a part, small enough to share evenly. */
#define FSDP__PART 32768

/* Running reference (near the maximum) and sum of the exponentials of one row's
 * elements, relative to it. */
typedef struct fsdp__row_sum {
    double max, sum;
} fsdp__row_sum;

typedef struct fsdp__kernel_set {
    const char *name;
    void (*unary)(fsdp__unary op, const void *x, fsdp_dtype t, int64_t n, double p, void *y);
    void (*unary_backward)(fsdp__unary op, const void *x, const void *y, fsdp_dtype t,
                           const void *dy, int64_t n, double p, void *dx, fsdp_dtype dt, int add);
    /* a_step and b_step are 0 or 1. */
    void (*binary)(fsdp__binary op, int64_t n, const void *a, int64_t a_step, const void *b,
                   int64_t b_step, fsdp_dtype t, void *y, fsdp_dtype dt, int add);
    void (*swiglu)(const void *a, const void *b, fsdp_dtype t, int64_t n, void *y);
    void (*swiglu_backward)(const void *a, const void *b, fsdp_dtype t, const void *dy, int64_t n,
                            void *da, fsdp_dtype dt_a, int add_a, void *db, fsdp_dtype dt_b,
                            int add_b);
    /* y = u >= p ? x * scale : 0 for the uniform numbers u (n). */
    void (*dropout)(const void *x, fsdp_dtype t, int64_t n, const float *u, float p, double scale,
                    void *y, fsdp_dtype dt, int add);
    /* dst (+)= src (n), of floating dtypes. */
    void (*copy)(int64_t n, const void *src, fsdp_dtype t, void *dst, fsdp_dtype dt, int add);
    /* The sum of x (n), in lanes. */
    double (*sum)(int64_t n, const void *x, fsdp_dtype t);
    /* acc (n) += x (n); acc is stat. */
    void (*column_add)(int64_t n, const void *x, fsdp_dtype t, void *acc);

    /* Rows: as the kernels of the same name, over R rows. The sums over rows
     * are added to dw_acc and db_acc (C, stat); each output may be NULL. */
    void (*rms_norm)(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C, double eps,
                     void *y, void *rstd);
    void (*rms_norm_backward)(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C,
                              const void *rstd, const void *dy, void *dx, fsdp_dtype dt, int add,
                              void *dw_acc);
    void (*layer_norm)(const void *x, const void *w, const void *b, fsdp_dtype t, int64_t R,
                       int64_t C, double eps, void *y, void *mean, void *rstd);
    void (*layer_norm_backward)(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C,
                                const void *mean, const void *rstd, const void *dy, void *dx,
                                fsdp_dtype dt, int add, void *dw_acc, void *db_acc);
    void (*softmax)(const void *x, fsdp_dtype t, int64_t R, int64_t C, void *y);
    void (*softmax_backward)(const void *y, fsdp_dtype t, int64_t R, int64_t C, const void *dy,
                             void *dx, fsdp_dtype dt, int add);
    /* Takes n more elements of a row into *s, which begins as {-INFINITY, 0}. */
    void (*loss_sum)(int64_t n, const void *x, fsdp_dtype t, fsdp__row_sum *s);
    /* y (+)= scale * (e^(x - lse) - onehot), the one at `target` (or outside). y may be x. */
    void (*loss_gradient)(int64_t n, const void *x, fsdp_dtype t, double lse, double scale,
                          int64_t target, void *y, fsdp_dtype dt, int add);
    /* One position: x and y (heads, 2 * half) with x_step and y_step elements
     * between heads, cosines and sines (half). */
    void (*rotary)(const void *x, int64_t x_step, const float *cosine, const float *sine,
                   fsdp_dtype t, int64_t heads, int64_t half, void *y, int64_t y_step,
                   fsdp_dtype dt, int inverse, int add);

    void (*adamw)(const fsdp__adamw *o, void *p, void *m, void *v, fsdp_dtype pt, const void *g,
                  fsdp_dtype gt, int64_t n);
    void (*sgd)(const fsdp__sgd *o, void *p, void *buf, fsdp_dtype pt, const void *g, fsdp_dtype gt,
                int64_t n);

    /* A tile of FSDP__TILE (FSDP__TILE_16) squared elements of four (two) bytes:
     * dst[j, i] = src[i * step + j], dst's rows being as long. NULL in the plain
     * tables: kernel_copy.c has loops for any size. */
    void (*transpose_32)(void *dst, const void *src, int64_t step);
    void (*transpose_16)(void *dst, const void *src, int64_t step);
} fsdp__kernel_set;

/* The plain table of a floating dtype. */
const fsdp__kernel_set *fsdp__kernel_set_plain(fsdp_dtype t);
/* The table in force for input dtype t and output dtype dt. */
const fsdp__kernel_set *fsdp__kernel_set_for(fsdp_dtype t, fsdp_dtype dt);

#if defined(__x86_64__)
extern const fsdp__kernel_set fsdp__kernel_set_avx2;
extern const fsdp__kernel_set fsdp__kernel_set_avx512;
extern const fsdp__kernel_set fsdp__kernel_set_avx512_bf16;
#endif

/* p + i elements; NULL stays NULL. */
static inline void *fsdp__at(void *p, fsdp_dtype t, int64_t i)
{
    return p ? (char *)p + i * (int64_t)fsdp_dtype_size(t) : NULL;
}
static inline const void *fsdp__cat(const void *p, fsdp_dtype t, int64_t i)
{
    return p ? (const char *)p + i * (int64_t)fsdp_dtype_size(t) : NULL;
}
/* The dtype of statistics beside values of dtype t. */
static inline fsdp_dtype fsdp__stat_dtype(fsdp_dtype t)
{
    return t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

/* Element i of an array of a floating dtype. */
static inline double fsdp__get_f64(const void *p, fsdp_dtype t, int64_t i)
{
    switch (t) {
    case FSDP_F64:
        return ((const double *)p)[i];
    case FSDP_F16:
        return fsdp__f16_to_f32(((const uint16_t *)p)[i]);
    case FSDP_BF16:
        return fsdp__bf16_to_f32(((const uint16_t *)p)[i]);
    default:
        return ((const float *)p)[i];
    }
}
static inline float fsdp__get_f32(const void *p, fsdp_dtype t, int64_t i)
{
    return (float)fsdp__get_f64(p, t, i);
}

/* p[i] (+)= v, rounded once to dtype t. */
static inline void fsdp__put_f64(void *p, fsdp_dtype t, int64_t i, double v, int add)
{
    if (add) v = fsdp__get_f64(p, t, i) + v;
    switch (t) {
    case FSDP_F64:
        ((double *)p)[i] = v;
        break;
    case FSDP_F16:
        ((uint16_t *)p)[i] = fsdp__f64_to_f16(v);
        break;
    case FSDP_BF16:
        ((uint16_t *)p)[i] = fsdp__f64_to_bf16(v);
        break;
    default:
        ((float *)p)[i] = (float)v;
        break;
    }
}
static inline void fsdp__put_f32(void *p, fsdp_dtype t, int64_t i, float v, int add)
{
    if (t == FSDP_F64) {
        fsdp__put_f64(p, t, i, v, add);
        return;
    }
    if (add) v = fsdp__get_f32(p, t, i) + v;
    switch (t) {
    case FSDP_F16:
        ((uint16_t *)p)[i] = fsdp__f32_to_f16(v);
        break;
    case FSDP_BF16:
        ((uint16_t *)p)[i] = fsdp__f32_to_bf16(v);
        break;
    default:
        ((float *)p)[i] = v;
        break;
    }
}

#endif
