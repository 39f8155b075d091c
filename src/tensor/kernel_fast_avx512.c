/*
 * kernel_fast_avx512.c - the table for AVX-512 (F, BW, DQ, VL): sixteen lanes.
 */
#if defined(__x86_64__)
#define V_LANES 16
#define V_BF16 0
#define V_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"
#define V_NAME "avx512"
#define V_SET fsdp__kernel_set_avx512
#include "tensor/kernel_vec.inc"
#include "tensor/kernel_fast_elem.inc"
#include "tensor/kernel_fast_loss.inc"
#include "tensor/kernel_fast_row.inc"
#else
typedef int fsdp__no_avx512; /* a file must hold something */
#endif
