/*
 * kernel_loss_internal.h - the inner loops of the losses, by instruction set.
 */
#ifndef FSDP_TENSOR_KERNEL_LOSS_INTERNAL_H
#define FSDP_TENSOR_KERNEL_LOSS_INTERNAL_H

#include <stdint.h>

/* Running maximum and sum of exponentials of one row, relative to it. */
typedef struct fsdp__row_sum {
    double max, sum;
} fsdp__row_sum;

typedef struct fsdp__loss_loops {
    /* Takes n more elements of a row into *s. */
    void (*sum)(const float *x, int64_t n, fsdp__row_sum *s);
    /* y = scale * e^(x - lse). y may be x. */
    void (*softmax)(const float *x, int64_t n, float lse, float scale, float *y);
    /* y += x. */
    void (*add)(const float *x, int64_t n, float *y);
} fsdp__loss_loops;

const fsdp__loss_loops *fsdp__loss_loops_get(void);

#endif
