/*
 * convert_internal.h - the block kernels under convert.h: one table an
 * instruction set, and the same bits from each. Sources need no alignment.
 */
#ifndef FSDP_BASE_CONVERT_INTERNAL_H
#define FSDP_BASE_CONVERT_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "base/cpu.h"

enum { FSDP__BLOCK = 512 };

/* Elements of callers' arrays, which need no alignment. */
typedef float fsdp__f32u __attribute__((aligned(1), may_alias));
typedef uint16_t fsdp__u16u __attribute__((aligned(1), may_alias));

typedef struct fsdp__block_kernels {
    void (*bf16_to_f32)(float *y, const fsdp__u16u *x, size_t n);
    void (*f32_to_bf16)(uint16_t *y, const fsdp__f32u *x, size_t n);
    void (*f16_to_f32)(float *y, const fsdp__u16u *x, size_t n);
    void (*f32_to_f16)(uint16_t *y, const fsdp__f32u *x, size_t n);
    /* y = a + b; y may be a or b. */
    void (*add_f32)(float *y, const fsdp__f32u *a, const fsdp__f32u *b, size_t n);
    void (*add_bf16)(float *y, const fsdp__u16u *a, const fsdp__u16u *b, size_t n);
    void (*scale_f32)(float *y, float s, size_t n);
    /* lane[j] += x[i]^2 for i % 8 == j. */
    void (*squares_f32)(double lane[8], const fsdp__f32u *x, size_t n);
} fsdp__block_kernels;

/* Those of isa, or of the best one below it. */
const fsdp__block_kernels *fsdp__block_kernels_of(fsdp__isa isa);

#endif
