/*
 * kernel_attention_tile.c - the inner loops of attention for AVX2 and AVX-512,
 * made from one source (kernel_attention_tile.inc).
 */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "base/convert.h"
#include "base/cpu.h"
#include "tensor/kernel_attention_internal.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))

/* A head's row is short: a call for each row must cost little. */
AVX2 static void widen_avx2(const void *x, fsdp_dtype t, int64_t n, float *y)
{
    const uint16_t *h = x;
    int64_t i = 0;
    if (t == FSDP_F32) {
        memcpy(y, x, (size_t)n * 4);
        return;
    }
    for (; i + 8 <= n; i += 8) {
        __m128i v = _mm_loadu_si128((const __m128i *)(h + i));
        __m256 f = t == FSDP_F16
                       ? _mm256_cvtph_ps(v)
                       : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
        _mm256_storeu_ps(y + i, f);
    }
    for (; i < n; i++)
        y[i] = t == FSDP_F16 ? fsdp__f16_to_f32(h[i]) : fsdp__bf16_to_f32(h[i]);
}

/* 8 by 8 in registers; both instruction sets use it. */
AVX2 static void transpose_avx2(const float *x, int64_t ld, int64_t rows, int64_t columns,
                                float scale, float *y, int64_t ldy)
{
    __m256 f = _mm256_set1_ps(scale);
    for (int64_t i = 0; i < rows; i += 8)
        for (int64_t j = 0; j < columns; j += 8) {
            __m256 r[8], t[8];
            const float *p = x + i * ld + j;
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++)
                r[n] = _mm256_mul_ps(_mm256_loadu_ps(p + n * ld), f);
#pragma GCC unroll 4
            for (int n = 0; n < 8; n += 2) {
                t[n] = _mm256_unpacklo_ps(r[n], r[n + 1]);
                t[n + 1] = _mm256_unpackhi_ps(r[n], r[n + 1]);
            }
#pragma GCC unroll 2
            for (int n = 0; n < 8; n += 4) {
                r[n] = _mm256_shuffle_ps(t[n], t[n + 2], 0x44);
                r[n + 1] = _mm256_shuffle_ps(t[n], t[n + 2], 0xee);
                r[n + 2] = _mm256_shuffle_ps(t[n + 1], t[n + 3], 0x44);
                r[n + 3] = _mm256_shuffle_ps(t[n + 1], t[n + 3], 0xee);
            }
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                float *q = y + (j + n) * ldy + i;
                _mm256_storeu_ps(q, _mm256_permute2f128_ps(r[n], r[n + 4], 0x20));
                _mm256_storeu_ps(q + 4 * ldy, _mm256_permute2f128_ps(r[n], r[n + 4], 0x31));
            }
        }
}

AVX2 static inline float sum_avx2(__m256 x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

AVX2 static inline float max_avx2(__m256 x)
{
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

#define TILE(name) avx2_##name
#define TILE_TARGET AVX2
#define TILE_VEC __m256
#define TILE_VL 8
#define TILE_LOAD _mm256_loadu_ps
#define TILE_STORE _mm256_storeu_ps
#define TILE_SET1 _mm256_set1_ps
#define TILE_FIRST _mm256_cvtss_f32
#define TILE_ADD _mm256_add_ps
#define TILE_SUB _mm256_sub_ps
#define TILE_MUL _mm256_mul_ps
#define TILE_FMA _mm256_fmadd_ps
#define TILE_MAX _mm256_max_ps
#define TILE_ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define TILE_POW2(n)     \
    _mm256_castsi256_ps( \
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
#define TILE_SUM sum_avx2
#define TILE_TOP max_avx2
#define TILE_ZERO _mm256_setzero_ps()
#define TILE_MR 6
#define TILE_QUERIES 48
#define TILE_KEYS 96
#define TILE_PART 24
#define TILE_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#include "tensor/kernel_attention_tile.inc"

#define TILE(name) avx512_##name
#define TILE_TARGET AVX512
#define TILE_VEC __m512
#define TILE_VL 16
#define TILE_LOAD _mm512_loadu_ps
#define TILE_STORE _mm512_storeu_ps
#define TILE_SET1 _mm512_set1_ps
#define TILE_FIRST _mm512_cvtss_f32
#define TILE_ADD _mm512_add_ps
#define TILE_SUB _mm512_sub_ps
#define TILE_MUL _mm512_mul_ps
#define TILE_FMA _mm512_fmadd_ps
#define TILE_MAX _mm512_max_ps
#define TILE_REDUCE(x) _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)
#define TILE_SCALE _mm512_scalef_ps
#define TILE_SUM _mm512_reduce_add_ps
#define TILE_TOP _mm512_reduce_max_ps
#define TILE_ZERO _mm512_setzero_ps()
#define TILE_MR 8
#define TILE_QUERIES 48
#define TILE_KEYS 96
#define TILE_PART 24
#define TILE_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#include "tensor/kernel_attention_tile.inc"

const fsdp__attention_tile *fsdp__attention_tile_get(void)
{
    if (fsdp__cpu_isa() >= FSDP__ISA_AVX512) return &avx512_table;
    return fsdp__cpu_isa() >= FSDP__ISA_AVX2 ? &avx2_table : NULL;
}

#else

const fsdp__attention_tile *fsdp__attention_tile_get(void)
{
    return NULL;
}

#endif
