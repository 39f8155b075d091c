/*
 * kernel_gemm_tile.c - the packed matrix product: for f32 where oneDNN's is
 * slower, for f16 and bf16 where the machine has no instructions for them, and
 * for f64.
 *
 * Operands are copied block by block into scratch, in the order in which the
 * inner tile reads them and widened to f32 on the way (f64 stays f64); so a
 * transposed or a half-width operand costs what a plain one does, and scratch
 * is a few MiB whatever the sizes. The blocking is that of Goto and van de
 * Geijn, "Anatomy of high-performance matrix multiplication" (TOMS 2008): a
 * (KC,NR) strip of B stays in the first cache, an (MC,KC) block of A in the
 * second, a (KC,NC) block of B in the third.
 *
 * Invariants: an element's sum runs over k in order within blocks of K that K
 * alone fixes, then over the blocks; neither its place nor the cut into panels
 * changes a bit of it. A narrow C is summed in an f32 block and rounded once.
 */
#include <string.h>

#include "base/convert.h"
#include "base/cpu.h"
#include "tensor/kernel_gemm_internal.h"
#include "tensor/kernel_scratch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    KC = 256,         /* products summed in registers */
    MC = 144,         /* rows of A packed at once; a multiple of each tile's rows */
    NC = 1024,        /* columns of B packed at once */
    MB = 4096,        /* rows of C in one pass */
    C_BLOCK = 1 << 19 /* elements of the f32 block of a narrow C */
};

/* One instruction set's inner tile and packing. */
typedef struct tile {
    int mr, nr;
    /* C (m <= mr, n <= nr) (+)= the product of two packed strips of kc. */
    void (*multiply)(int64_t kc, const void *ap, const void *bp, void *c, int64_t ldc, int m, int n,
                     int add);
    /* dst[k * width + i] = x(i, k) for i < width, zeros from n on. x(i, k) is
     * x[i * ld + k] when k_contiguous, else x[k * ld + i]. */
    void (*pack)(void *dst, int width, const void *x, fsdp_dtype t, int64_t ld, int k_contiguous,
                 int64_t n, int64_t kc);
} tile;

/* ---- plain ------------------------------------------------------------------ */

static float load_f32(const void *x, fsdp_dtype t, int64_t i)
{
    switch (t) {
    case FSDP_F32:
        return ((const float *)x)[i];
    case FSDP_BF16:
        return fsdp__bf16_to_f32(((const uint16_t *)x)[i]);
    default:
        return fsdp__f16_to_f32(((const uint16_t *)x)[i]);
    }
}

/* Elements k0 .. kc-1 of a strip, one by one. */
static void pack_from(float *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                      int k_contiguous, int64_t n, int64_t k0, int64_t kc)
{
    int64_t step_i = k_contiguous ? ld : 1, step_k = k_contiguous ? 1 : ld;
    for (int64_t k = k0; k < kc; k++)
        for (int64_t i = 0; i < width; i++)
            dst[k * width + i] = i < n ? load_f32(x, t, i * step_i + k * step_k) : 0.0f;
}

static void pack_plain(void *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                       int k_contiguous, int64_t n, int64_t kc)
{
    pack_from(dst, width, x, t, ld, k_contiguous, n, 0, kc);
}

static void pack_f64(void *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                     int k_contiguous, int64_t n, int64_t kc)
{
    (void)t;
    double *d = dst;
    const double *s = x;
    int64_t step_i = k_contiguous ? ld : 1, step_k = k_contiguous ? 1 : ld;
    for (int64_t k = 0; k < kc; k++)
        for (int64_t i = 0; i < width; i++)
            d[k * width + i] = i < n ? s[i * step_i + k * step_k] : 0.0;
}

typedef float plain_vec __attribute__((vector_size(16), aligned(4), may_alias));
typedef double plain_vec64 __attribute__((vector_size(16), aligned(8), may_alias));

#define TILE_NAME multiply_plain
#define TILE_TARGET
#define TILE_REAL float
#define TILE_VEC plain_vec
#define TILE_VL 4
#define TILE_LOAD(p) (*(const plain_vec *)(p))
#define TILE_STORE(p, v) (*(plain_vec *)(p) = (v))
#define TILE_SET1(x) ((plain_vec){(x), (x), (x), (x)})
#define TILE_ADD(a, b) ((a) + (b))
#define TILE_FMA(a, b, c) ((a) * (b) + (c))
#define TILE_ZERO ((plain_vec){0})
#define TILE_MR 4
#define TILE_ROWS(X) X(0) X(1) X(2) X(3)
#include "tensor/kernel_gemm_tile.inc"

#define TILE_NAME multiply_f64
#define TILE_TARGET
#define TILE_REAL double
#define TILE_VEC plain_vec64
#define TILE_VL 2
#define TILE_LOAD(p) (*(const plain_vec64 *)(p))
#define TILE_STORE(p, v) (*(plain_vec64 *)(p) = (v))
#define TILE_SET1(x) ((plain_vec64){(x), (x)})
#define TILE_ADD(a, b) ((a) + (b))
#define TILE_FMA(a, b, c) ((a) * (b) + (c))
#define TILE_ZERO ((plain_vec64){0})
#define TILE_MR 4
#define TILE_ROWS(X) X(0) X(1) X(2) X(3)
#include "tensor/kernel_gemm_tile.inc"

static const tile tile_plain = {4, 8, multiply_plain, pack_plain};
static const tile tile_f64 = {4, 4, multiply_f64, pack_f64};

/* ---- AVX2 and AVX-512 ---------------------------------------------------------- */

#if defined(__x86_64__)

#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) static inline
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))

AVX2_INLINE __m256 load8(const void *x, fsdp_dtype t, int64_t i)
{
    if (t == FSDP_F32) return _mm256_loadu_ps((const float *)x + i);
    __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)x + i));
    if (t == FSDP_F16) return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

AVX2_INLINE void transpose8(__m256 r[8])
{
    __m256 t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* A whole strip whose rows are contiguous in k: 8 by 8 transposed in registers.
 * A width of 6 stores 8 and lets the next k write over the two too many, so
 * the last k of such a strip go one by one. */
AVX2_INLINE void pack_rows(float *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                           int64_t kc)
{
    int64_t k = 0, end = kc - (width % 8 ? 8 : 7);
    for (; k < end; k += 8)
        for (int g = 0; g < width; g += 8) {
            __m256 r[8];
            int rows = width - g < 8 ? width - g : 8;
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                r[i] = load8(x, t, (g + (i < rows ? i : 0)) * ld + k);
            transpose8(r);
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                _mm256_storeu_ps(dst + (k + i) * width + g, r[i]);
        }
    pack_from(dst, width, x, t, ld, 1, width, k, kc);
}

/* A whole strip whose k lie ld apart: copied. A width of 6 reads and stores 8,
 * both within what the next k owns; so its last k goes one by one. */
AVX2_INLINE void pack_columns(float *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                              int64_t kc)
{
    int64_t k = 0, end = kc - (width % 8 ? 1 : 0);
    for (; k < end; k++)
        for (int g = 0; g < width; g += 8)
            _mm256_storeu_ps(dst + k * width + g, load8(x, t, k * ld + g));
    pack_from(dst, width, x, t, ld, 0, width, k, kc);
}

AVX2_INLINE void pack_strip(float *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                            int k_contiguous, int64_t kc)
{
    if (k_contiguous)
        pack_rows(dst, width, x, t, ld, kc);
    else
        pack_columns(dst, width, x, t, ld, kc);
}

/* The constants make a loop of its own for each dtype and width. */
AVX2 static void pack_avx2(void *dst, int width, const void *x, fsdp_dtype t, int64_t ld,
                           int k_contiguous, int64_t n, int64_t kc)
{
    if (n < width) {
        pack_from(dst, width, x, t, ld, k_contiguous, n, 0, kc);
        return;
    }
#define PACK(type)                                          \
    switch (width) {                                        \
    case 6:                                                 \
        pack_strip(dst, 6, x, type, ld, k_contiguous, kc);  \
        break;                                              \
    case 8:                                                 \
        pack_strip(dst, 8, x, type, ld, k_contiguous, kc);  \
        break;                                              \
    case 16:                                                \
        pack_strip(dst, 16, x, type, ld, k_contiguous, kc); \
        break;                                              \
    default:                                                \
        pack_strip(dst, 32, x, type, ld, k_contiguous, kc); \
        break;                                              \
    }
    if (t == FSDP_F32) {
        PACK(FSDP_F32)
    } else if (t == FSDP_BF16) {
        PACK(FSDP_BF16)
    } else {
        PACK(FSDP_F16)
    }
#undef PACK
}

#define TILE_NAME multiply_avx2
#define TILE_TARGET AVX2
#define TILE_REAL float
#define TILE_VEC __m256
#define TILE_VL 8
#define TILE_LOAD _mm256_loadu_ps
#define TILE_STORE _mm256_storeu_ps
#define TILE_SET1 _mm256_set1_ps
#define TILE_ADD _mm256_add_ps
#define TILE_FMA _mm256_fmadd_ps
#define TILE_ZERO _mm256_setzero_ps()
#define TILE_MR 6
#define TILE_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5)
#include "tensor/kernel_gemm_tile.inc"

#define TILE_NAME multiply_avx512
#define TILE_TARGET AVX512
#define TILE_REAL float
#define TILE_VEC __m512
#define TILE_VL 16
#define TILE_LOAD _mm512_loadu_ps
#define TILE_STORE _mm512_storeu_ps
#define TILE_SET1 _mm512_set1_ps
#define TILE_ADD _mm512_add_ps
#define TILE_FMA _mm512_fmadd_ps
#define TILE_ZERO _mm512_setzero_ps()
#define TILE_MR 8
#define TILE_ROWS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#include "tensor/kernel_gemm_tile.inc"

static const tile tile_avx2 = {6, 16, multiply_avx2, pack_avx2};
static const tile tile_avx512 = {8, 32, multiply_avx512, pack_avx2};

#endif

static const tile *tile_choose(fsdp_dtype t)
{
    if (t == FSDP_F64) return &tile_f64;
#if defined(__x86_64__)
    if (fsdp__cpu_isa() >= FSDP__ISA_AVX512) return &tile_avx512;
    if (fsdp__cpu_isa() >= FSDP__ISA_AVX2) return &tile_avx2;
#endif
    return &tile_plain;
}

/* ---- the loops around the tile --------------------------------------------------- */

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* What one pass works on: its product, tile and scratch. */
typedef struct pass {
    const fsdp__product *p;
    const tile *tile;
    size_t es;     /* bytes of a packed element */
    int64_t kc;    /* block of K */
    char *pa, *pb; /* packed block of A (MC,kc) and of B (kc,NC) */
} pass;

/* Packs n of op(A)'s rows, or of op(B)'s columns, from first on, in strips. */
static void pack_block(const pass *s, char *dst, int width, int of_b, int64_t first, int64_t n,
                       int64_t k0, int64_t kc)
{
    const fsdp__product *p = s->p;
    const char *x = of_b ? p->b : p->a;
    int64_t ld = of_b ? p->ldb : p->lda;
    int k_contiguous = of_b ? p->trans_b : !p->trans_a;
    fsdp_dtype t = of_b ? p->tb : p->ta;
    size_t size = fsdp_dtype_size(t);
    for (int64_t i = 0; i < n; i += width) {
        int64_t at = k_contiguous ? (first + i) * ld + k0 : k0 * ld + first + i;
        s->tile->pack(dst + (size_t)(i * kc) * s->es, width, x + (size_t)at * size, t, ld,
                      k_contiguous, min64(width, n - i), kc);
    }
}

/* One block of K into the block of C (m,n) whose first element is (m0,n0). */
static void multiply_block(const pass *s, int64_t m0, int64_t m, int64_t n0, int64_t n, int64_t k0,
                           int64_t kc, char *c, int64_t ldc, int add)
{
    const tile *t = s->tile;
    pack_block(s, s->pb, t->nr, 1, n0, n, k0, kc);
    for (int64_t i0 = 0; i0 < m; i0 += MC) {
        int64_t mc = min64(MC, m - i0);
        pack_block(s, s->pa, t->mr, 0, m0 + i0, mc, k0, kc);
        for (int64_t j = 0; j < n; j += t->nr)
            for (int64_t i = 0; i < mc; i += t->mr)
                t->multiply(kc, s->pa + (size_t)(i * kc) * s->es, s->pb + (size_t)(j * kc) * s->es,
                            c + (size_t)((i0 + i) * ldc + j) * s->es, ldc,
                            (int)min64(t->mr, mc - i), (int)min64(t->nr, n - j), add);
    }
}

/* Rows of the f32 block into the narrow C, added in its dtype when asked. */
static void store_narrow(const fsdp__product *p, float *block, int64_t m0, int64_t m, int64_t n0,
                         int64_t n)
{
    size_t size = fsdp_dtype_size(p->tc);
    for (int64_t i = 0; i < m; i++) {
        char *c = (char *)p->c + (size_t)((m0 + i) * p->ldc + n0) * size;
        float *row = block + i * n;
        if (p->add)
            for (int64_t j = 0; j < n; j++)
                row[j] = load_f32(c, p->tc, j) + row[j];
        fsdp__convert(c, p->tc, row, FSDP_F32, (size_t)n);
    }
}

/* ---- few rows ----------------------------------------------------------------------- */

#if defined(__x86_64__)

enum { FEW_ROWS = 4, FEW_COLUMNS = 4 };

static void store_one(const fsdp__product *p, int64_t i, int64_t j, float x)
{
    int64_t at = i * p->ldc + j;
    if (p->tc == FSDP_F32) {
        float *c = (float *)p->c + at;
        *c = p->add ? *c + x : x;
        return;
    }
    uint16_t *c = (uint16_t *)p->c + at;
    if (p->add) x = load_f32(c, p->tc, 0) + x;
    *c = p->tc == FSDP_BF16 ? fsdp__f32_to_bf16(x) : fsdp__f32_to_f16(x);
}

AVX2_INLINE float sum8(__m256 x)
{
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

/* `rows` rows of f32 a (rows,K) against `columns` rows of op(B)^T from j on. */
AVX2_INLINE void few_block(const fsdp__product *p, const float *a, int rows, int columns,
                           fsdp_dtype t, int64_t j)
{
    const char *b = (const char *)p->b + j * p->ldb * (t == FSDP_F32 ? 4 : 2);
    __m256 sum[FEW_ROWS][FEW_COLUMNS];
    int64_t K = p->K, k = 0;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++)
            sum[r][c] = _mm256_setzero_ps();
    for (; k + 8 <= K; k += 8)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            __m256 w = load8(b, t, c * p->ldb + k);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sum[r][c] = _mm256_fmadd_ps(_mm256_loadu_ps(a + r * K + k), w, sum[r][c]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < columns; c++) {
            float s = sum8(sum[r][c]);
            for (int64_t i = k; i < K; i++)
                s += a[r * K + i] * load_f32(b, t, c * p->ldb + i);
            store_one(p, r, j + c, s);
        }
}

AVX2 static void few_rows(const fsdp__product *p, const float *a)
{
#define FEW(rows, type)                               \
    for (; j + FEW_COLUMNS <= p->N; j += FEW_COLUMNS) \
        few_block(p, a, rows, FEW_COLUMNS, type, j);  \
    for (; j < p->N; j++)                             \
        few_block(p, a, rows, 1, type, j);
#define FEW_ANY(type)       \
    switch (p->M) {         \
    case 1:                 \
        FEW(1, type) break; \
    case 2:                 \
        FEW(2, type) break; \
    case 3:                 \
        FEW(3, type) break; \
    default:                \
        FEW(4, type) break; \
    }
    int64_t j = 0;
    if (p->tb == FSDP_F32) {
        FEW_ANY(FSDP_F32)
    } else if (p->tb == FSDP_BF16) {
        FEW_ANY(FSDP_BF16)
    } else {
        FEW_ANY(FSDP_F16)
    }
#undef FEW_ANY
#undef FEW
}

/* Up to four rows against a transposed B, as when one token is decoded: packing
 * B would cost more than the product, so dot products read it where it is. */
static bool few_rows_try(const fsdp__product *p, bool *ok)
{
    if (p->M > FEW_ROWS || p->trans_a || !p->trans_b || p->ta == FSDP_F64) return false;
    if (fsdp__cpu_isa() < FSDP__ISA_AVX2) return false;
    float *a = fsdp__scratch(FSDP__SCRATCH_GEMM, (size_t)(p->M * p->K) * 4);
    *ok = a != NULL;
    if (!a) return true;
    for (int64_t r = 0; r < p->M; r++)
        fsdp__convert(a + r * p->K, FSDP_F32,
                      (const char *)p->a + (size_t)(r * p->lda) * fsdp_dtype_size(p->ta), p->ta,
                      (size_t)p->K);
    few_rows(p, a);
    return true;
}

#else

static bool few_rows_try(const fsdp__product *p, bool *ok)
{
    (void)p, (void)ok;
    return false;
}

#endif

/* ---- the whole --------------------------------------------------------------------------- */

bool fsdp__product_tile(const fsdp__product *p)
{
    bool ok;
    if (few_rows_try(p, &ok)) return ok;
    bool narrow = p->tc == FSDP_F16 || p->tc == FSDP_BF16;
    pass s = {.p = p, .tile = tile_choose(p->ta)};
    s.es = p->ta == FSDP_F64 ? 8 : 4;
    int64_t blocks = (p->K + KC - 1) / KC;
    s.kc = round_up((p->K + blocks - 1) / blocks, 8);
    int64_t mb = min64(p->M, MB), nc = NC;
    if (narrow && mb * nc > C_BLOCK) nc = round_up(C_BLOCK / mb, 32);
    nc = min64(nc, p->N);
    size_t a_bytes = (size_t)(round_up(min64(MC, mb), s.tile->mr) * s.kc) * s.es;
    size_t b_bytes = (size_t)(round_up(nc, s.tile->nr) * s.kc) * s.es;
    a_bytes = (size_t)round_up((int64_t)a_bytes, 64);
    b_bytes = (size_t)round_up((int64_t)b_bytes, 64);
    size_t c_bytes = narrow ? (size_t)(mb * nc) * 4 : 0;
    s.pa = fsdp__scratch(FSDP__SCRATCH_GEMM, a_bytes + b_bytes + c_bytes);
    if (!s.pa) return false;
    s.pb = s.pa + a_bytes;

    for (int64_t m0 = 0; m0 < p->M; m0 += mb) {
        int64_t m = min64(mb, p->M - m0);
        for (int64_t n0 = 0; n0 < p->N; n0 += nc) {
            int64_t n = min64(nc, p->N - n0);
            char *c = narrow ? s.pb + b_bytes : (char *)p->c + (size_t)(m0 * p->ldc + n0) * s.es;
            int64_t ldc = narrow ? n : p->ldc;
            for (int64_t k0 = 0; k0 < p->K; k0 += s.kc)
                multiply_block(&s, m0, m, n0, n, k0, min64(s.kc, p->K - k0), c, ldc,
                               k0 > 0 || (p->add && !narrow));
            if (narrow) store_narrow(p, (float *)(void *)c, m0, m, n0, n);
        }
    }
    return true;
}
