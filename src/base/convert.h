/*
 * convert.h - converting and summing arrays of dtypes, at the speed of memory.
 *
 * bf16 and f16 are rounded to nearest even; NaN stays NaN (quiet). Every
 * kernel has a plain C form, and gives the same bits on every instruction
 * set. n counts elements; pointers need no alignment; source and destination
 * may be equal when their element sizes are.
 */
#ifndef FSDP_BASE_CONVERT_H
#define FSDP_BASE_CONVERT_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/dtype.h"

float fsdp__bf16_to_f32(uint16_t h);
uint16_t fsdp__f32_to_bf16(float f);
float fsdp__f16_to_f32(uint16_t h);
uint16_t fsdp__f32_to_f16(float f);
uint16_t fsdp__f64_to_bf16(double d); /* rounded once, not by way of f32 */
uint16_t fsdp__f64_to_f16(double d);

/* dst[i] = (dst type) src[i]. Any pair of dtypes. Floats to integers truncate.
 * Destinations of 4 MiB and more are written past the caches. */
void fsdp__convert(void *dst, fsdp_dtype dst_t, const void *src, fsdp_dtype src_t, size_t n);

/* dst[i] = sum of src[0..k-1][i], k >= 1, accumulated in fp32 (fp64 for f64)
 * as one binary tree in index order: n leaves split at the largest power of
 * two below n. All sources have src_t; scale multiplies the sum (1.0f is
 * exact: no multiply); add != 0 adds the result to dst. */
void fsdp__sum_tree(void *dst, fsdp_dtype dst_t, const void *const *src, fsdp_dtype src_t, int k,
                    size_t n, float scale, int add);

/* Sum of n numbers as the same binary tree, n >= 0: it does not depend on who computed which. */
double fsdp__tree_sum(const double *x, int64_t n);

/* Sum of x[i]^2 in fp64, in an order fixed by n alone. */
double fsdp__sum_squares(const void *x, fsdp_dtype t, size_t n);

#endif
