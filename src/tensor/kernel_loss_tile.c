/*
 * kernel_loss_tile.c - the inner loops of the losses: plain C, which judges the
 * others, and AVX2 and AVX-512 from one source (kernel_loss_tile.inc).
 */
#include "tensor/kernel_loss_internal.h"

#include <math.h>

#include "base/cpu.h"

/* ---- plain ------------------------------------------------------------------ */

static void plain_sum(const float *x, int64_t n, fsdp__row_sum *s)
{
    double max = s->max;
    for (int64_t i = 0; i < n; i++)
        if ((double)x[i] > max) max = (double)x[i];
    float base = max == -INFINITY ? 0.0f : (float)max;
    double total = s->max == -INFINITY ? 0 : s->sum * exp(s->max - max);
    for (int64_t i = 0; i < n; i++)
        total += (double)expf(x[i] - base);
    s->sum = total;
    s->max = max;
}

static void plain_softmax(const float *x, int64_t n, float lse, float scale, float *y)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = scale * expf(x[i] - lse);
}

static void plain_add(const float *x, int64_t n, float *y)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += x[i];
}

static const fsdp__loss_loops plain_table = {plain_sum, plain_softmax, plain_add};

/* ---- AVX2 and AVX-512 ---------------------------------------------------------- */

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))

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

#define LOOP(name) avx2_##name
#define LOOP_TARGET AVX2
#define LOOP_VEC __m256
#define LOOP_VL 8
#define LOOP_LOAD _mm256_loadu_ps
#define LOOP_STORE _mm256_storeu_ps
#define LOOP_SET1 _mm256_set1_ps
#define LOOP_ADD _mm256_add_ps
#define LOOP_SUB _mm256_sub_ps
#define LOOP_MUL _mm256_mul_ps
#define LOOP_FMA _mm256_fmadd_ps
#define LOOP_NFMA _mm256_fnmadd_ps
#define LOOP_MAX _mm256_max_ps
#define LOOP_ROUND(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define LOOP_POW2(n)     \
    _mm256_castsi256_ps( \
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
#define LOOP_SUM sum_avx2
#define LOOP_TOP max_avx2
#define LOOP_ZERO _mm256_setzero_ps()
#include "tensor/kernel_loss_tile.inc"

#define LOOP(name) avx512_##name
#define LOOP_TARGET AVX512
#define LOOP_VEC __m512
#define LOOP_VL 16
#define LOOP_LOAD _mm512_loadu_ps
#define LOOP_STORE _mm512_storeu_ps
#define LOOP_SET1 _mm512_set1_ps
#define LOOP_ADD _mm512_add_ps
#define LOOP_SUB _mm512_sub_ps
#define LOOP_MUL _mm512_mul_ps
#define LOOP_FMA _mm512_fmadd_ps
#define LOOP_NFMA _mm512_fnmadd_ps
#define LOOP_MAX _mm512_max_ps
#define LOOP_ROUND(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define LOOP_POW2(n)     \
    _mm512_castsi512_ps( \
        _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23))
#define LOOP_SUM _mm512_reduce_add_ps
#define LOOP_TOP _mm512_reduce_max_ps
#define LOOP_ZERO _mm512_setzero_ps()
#include "tensor/kernel_loss_tile.inc"

const fsdp__loss_loops *fsdp__loss_loops_get(void)
{
    if (fsdp__cpu_isa() >= FSDP__ISA_AVX512) return &avx512_table;
    return fsdp__cpu_isa() >= FSDP__ISA_AVX2 ? &avx2_table : &plain_table;
}

#else

const fsdp__loss_loops *fsdp__loss_loops_get(void)
{
    return &plain_table;
}

#endif
