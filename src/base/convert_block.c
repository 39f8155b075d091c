/*
 * convert_block.c - the block kernels of convert.h for each instruction set,
 * all made from convert_block.inc.
 */
#include <string.h>

#include "base/convert.h"
#include "base/convert_internal.h"

#define NAME(x) plain_##x
#define TARGET
#define SIMD 0
#include "base/convert_block.inc"
#undef NAME
#undef TARGET
#undef SIMD

#if defined(__x86_64__)

#include <immintrin.h>

#define NAME(x) avx2_##x
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define SIMD 1
#include "base/convert_block.inc"
#undef NAME
#undef TARGET
#undef SIMD

#define NAME(x) avx512_##x
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define SIMD 2
#include "base/convert_block.inc"

#endif

const fsdp__block_kernels *fsdp__block_kernels_of(fsdp__isa isa)
{
#if defined(__x86_64__)
    if (isa >= FSDP__ISA_AVX512) return &avx512_table;
    if (isa >= FSDP__ISA_AVX2) return &avx2_table;
#else
    (void)isa;
#endif
    return &plain_table;
}
