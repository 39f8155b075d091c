/*
 * kernel_scratch.h - workspace of the kernels: one block a thread and use,
 * grown on demand, freed when its thread ends.
 *
 * A kernel that needs room for tiles asks here instead of malloc, since fresh
 * pages at each call would cost more than the tiles save. The blocks are a few
 * MiB a thread, sized by the tiles; larger only where a backward of attention
 * keeps dq of one group of heads in f32, and in the plain form. They are nobody's
 * tensor, and so stand outside the accounts of memory.
 */
#ifndef FSDP_TENSOR_KERNEL_SCRATCH_H
#define FSDP_TENSOR_KERNEL_SCRATCH_H

#include <stddef.h>

/* Who holds a block: kernels that call each other use different ones. */
typedef enum fsdp__scratch_use {
    FSDP__SCRATCH_GEMM,
    FSDP__SCRATCH_ATTENTION,
    FSDP__SCRATCH_LOSS,
    FSDP__SCRATCH_ROWS,
    FSDP__SCRATCH_COUNT
} fsdp__scratch_use;

/* The calling thread's block of that use with room for `bytes`, aligned to 64;
 * its content is lost when it grows. NULL when out of memory: no error is kept,
 * since the caller may be a worker without a context. */
void *fsdp__scratch(fsdp__scratch_use use, size_t bytes);

#endif
