/*
 * kernel_fast_avx2.c - the table for AVX2 with FMA: eight lanes.
 */
#if defined(__x86_64__)
#define V_LANES 8
#define V_BF16 0
#define V_TARGET "avx2,fma"
#define V_NAME "avx2"
#define V_SET fsdp__kernel_set_avx2
#include "tensor/kernel_vec.inc"
#include "tensor/kernel_fast_elem.inc"
#include "tensor/kernel_fast_loss.inc"
#include "tensor/kernel_fast_row.inc"
#else
typedef int fsdp__no_avx2; /* a file must hold something */
#endif
