/*
 * bench_rate.c - the two things that kernels are held against: copying memory,
 * and issuing vector instructions.
 *
 * The instructions are written in assembly, since a compiler would drop what
 * has no use. Those of three operands write registers that nobody reads and so
 * depend on nothing; each multiply-add has ten others beside it, more than its
 * latency times the two that a core starts in a cycle.
 */
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/cpu.h"
#include "base/memory.h"
#include "base/thread.h"
#include "cli/bench.h"

/* ---- copying ---------------------------------------------------------------------- */

enum { COPY_PART = 1 << 20 };

static void copy_part(void *arg, int64_t part)
{
    const fsdp__bench_copy *c = arg;
    size_t at = (size_t)part * COPY_PART;
    memcpy(c->to + at, c->from + at, c->bytes - at < COPY_PART ? c->bytes - at : COPY_PART);
}

fsdp_status fsdp__bench_copy_run(void *copy)
{
    const fsdp__bench_copy *c = copy;
    fsdp__parallel((int64_t)((c->bytes + COPY_PART - 1) / COPY_PART), copy_part, copy);
    return FSDP_OK;
}

fsdp_status fsdp__bench_copy_init(fsdp__bench_copy *c, size_t bytes)
{
    c->bytes = bytes;
    c->from = fsdp__calloc(1, bytes, "a buffer");
    c->to = fsdp__calloc(1, bytes, "a buffer");
    if (!c->from || !c->to) return fsdp_error();
    memset(c->from, 1, bytes); /* pages of its own: untouched ones are all the same page */
    memset(c->to, 2, bytes);
    return FSDP_OK;
}

void fsdp__bench_copy_free(fsdp__bench_copy *c)
{
    free(c->from);
    free(c->to);
    c->from = c->to = NULL;
}

/* ---- issuing ---------------------------------------------------------------------- */

enum {
    ROUNDS = 40000, /* of one thread: about a millisecond */
    FMA_OF_ROUND = 20,
    MIX_OF_ROUND = 24,
};

#if defined(__x86_64__)

/* Ten multiply-adds, twice. `tie` makes the next one wait for nothing. */
#define FMA(k) "vfmadd231ps %[c], %[c], %" #k "\n\t"
#define FMA_TEN FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9)
/* Of twelve: five multiply-adds, two products, two sums, three of integers. */
#define MIX_TWELVE(and_name, a, b, c, d, e)                                 \
    FMA(a)                                                                  \
    "vmulps %[c], %[c], %[t]\n\t" FMA(b) "vpaddd %[c], %[c], %[u]\n\t" FMA( \
        c) "vaddps %[c], %[c], %[t]\n\t" FMA(d) and_name                    \
        " %[c], %[c], %[u]\n\t" FMA(e) "vmulps %[c], %[c], %[t]\n\t"        \
                                       "vpslld $3, %[c], %[u]\n\t"          \
                                       "vaddps %[c], %[c], %[t]\n\t"

#define ISSUE(name, TARGET, VEC, ZERO, SET1, and_name)                                       \
    __attribute__((target(TARGET))) static void fma_##name(void)                             \
    {                                                                                        \
        VEC s[10], one = SET1(0.5f);                                                         \
        for (int k = 0; k < 10; k++)                                                         \
            s[k] = ZERO();                                                                   \
        for (int i = 0; i < ROUNDS; i++)                                                     \
            __asm__ volatile(FMA_TEN FMA_TEN                                                 \
                             : "+v"(s[0]), "+v"(s[1]), "+v"(s[2]), "+v"(s[3]), "+v"(s[4]),   \
                               "+v"(s[5]), "+v"(s[6]), "+v"(s[7]), "+v"(s[8]), "+v"(s[9])    \
                             : [c] "v"(one));                                                \
    }                                                                                        \
    __attribute__((target(TARGET))) static void mix_##name(void)                             \
    {                                                                                        \
        VEC s[10], one = SET1(0.5f), t, u;                                                   \
        for (int k = 0; k < 10; k++)                                                         \
            s[k] = ZERO();                                                                   \
        for (int i = 0; i < ROUNDS; i++)                                                     \
            __asm__ volatile(                                                                \
                MIX_TWELVE(and_name, 0, 1, 2, 3, 4) MIX_TWELVE(and_name, 5, 6, 7, 8, 9)      \
                : "+v"(s[0]), "+v"(s[1]), "+v"(s[2]), "+v"(s[3]), "+v"(s[4]), "+v"(s[5]),    \
                  "+v"(s[6]), "+v"(s[7]), "+v"(s[8]), "+v"(s[9]), [t] "=&v"(t), [u] "=&v"(u) \
                : [c] "v"(one));                                                             \
    }

ISSUE(avx2, "avx2,fma", __m256, _mm256_setzero_ps, _mm256_set1_ps, "vpand")
ISSUE(avx512, "avx512f", __m512, _mm512_setzero_ps, _mm512_set1_ps, "vpandd")
#endif

/* Plain C: four lanes; a product and the sum of it are one of the multiply-adds. */
typedef float lanes4 __attribute__((vector_size(16)));

static void plain_round(int pairs)
{
    lanes4 s[10] = {{0}};
    const lanes4 c = {0.5f, 0.5f, 0.5f, 0.5f};
    for (int i = 0; i < ROUNDS; i++)
        for (int r = 0; r < pairs / 10; r++)
            for (int k = 0; k < 10; k++)
                s[k] = s[k] * c + c;
    volatile float keep = 0;
    for (int k = 0; k < 10; k++)
        keep += s[k][0];
}

static void fma_plain(void)
{
    plain_round(FMA_OF_ROUND);
}

static void mix_plain(void)
{
    plain_round(10);
}

static void run_one(void *arg, int64_t part)
{
    void (*const *fn)(void) = arg;
    (void)part;
    (*fn)();
}

fsdp__bench_issue fsdp__bench_issue_init(void)
{
    fsdp__bench_issue i = {4, 0};
    if (fsdp__cpu_isa() >= FSDP__ISA_AVX512)
        i.lanes = 16;
    else if (fsdp__cpu_isa() >= FSDP__ISA_AVX2)
        i.lanes = 8;
    return i;
}

fsdp_status fsdp__bench_issue_fma(void *issue)
{
    fsdp__bench_issue *u = issue;
    void (*fn)(void) = fma_plain;
#if defined(__x86_64__)
    if (u->lanes == 8) fn = fma_avx2;
    if (u->lanes == 16) fn = fma_avx512;
#endif
    u->count = (double)FMA_OF_ROUND * ROUNDS * fsdp_threads();
    fsdp__parallel(fsdp_threads(), run_one, &fn);
    return FSDP_OK;
}

fsdp_status fsdp__bench_issue_mix(void *issue)
{
    fsdp__bench_issue *u = issue;
    void (*fn)(void) = mix_plain;
    u->count = 20.0 * ROUNDS * fsdp_threads();
#if defined(__x86_64__)
    if (u->lanes == 8) fn = mix_avx2;
    if (u->lanes == 16) fn = mix_avx512;
    if (u->lanes > 4) u->count = (double)MIX_OF_ROUND * ROUNDS * fsdp_threads();
#endif
    fsdp__parallel(fsdp_threads(), run_one, &fn);
    return FSDP_OK;
}
