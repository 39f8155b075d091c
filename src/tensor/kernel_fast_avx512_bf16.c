/*
 * kernel_fast_avx512_bf16.c - the table for AVX-512 with its bf16 instructions,
 * which round to bf16 (and take what is denormal in f32 as zero).
 */
#if defined(__x86_64__)
#define V_LANES 16
#define V_BF16 1
#define V_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma"
#define V_NAME "avx512_bf16"
#define V_SET fsdp__kernel_set_avx512_bf16
#include "tensor/kernel_vec.inc"
#include "tensor/kernel_fast_elem.inc"
#include "tensor/kernel_fast_loss.inc"
#include "tensor/kernel_fast_row.inc"
#else
typedef int fsdp__no_avx512_bf16; /* a file must hold something */
#endif
