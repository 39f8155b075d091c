/*
 * test_base_convert.c - dtypes and conversions: every 16-bit pattern, every
 * rounding boundary, every pair of dtypes, every instruction set.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/convert_internal.h"
#include "base/rng.h"
#include "fsdp/context.h"

static uint32_t bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* The value of a small float by its definition. */
static double value_of(uint16_t h, int mbits, int ebits)
{
    int bias = (1 << (ebits - 1)) - 1;
    int e = h >> mbits & ((1 << ebits) - 1), m = h & ((1 << mbits) - 1);
    double v = e ? ldexp(1.0 + ldexp(m, -mbits), e - bias) : ldexp(m, 1 - bias - mbits);
    if (e == (1 << ebits) - 1) v = m ? NAN : INFINITY;
    return h >> 15 ? -v : v;
}

/* ---- single numbers ------------------------------------------------------- */

static void every_pattern_widens_and_comes_back(void **state)
{
    (void)state;
    for (uint32_t h = 0; h <= 0xffff; h++) {
        float a = fsdp__f16_to_f32((uint16_t)h), b = fsdp__bf16_to_f32((uint16_t)h);
        double va = value_of((uint16_t)h, 10, 5), vb = value_of((uint16_t)h, 7, 8);
        if (isnan(va)) {
            assert_true(isnan(a) && (bits(a) & 0x400000));
            assert_int_equal(fsdp__f32_to_f16(a), h | 0x200);
            assert_int_equal(fsdp__f64_to_f16((double)a), h | 0x200);
        } else {
            assert_true(a == va && !signbit(a) == !signbit(va));
            assert_int_equal(fsdp__f32_to_f16(a), h);
            assert_int_equal(fsdp__f64_to_f16(va), h);
        }
        if (isnan(vb)) {
            assert_true(isnan(b));
            assert_int_equal(fsdp__f32_to_bf16(b), h | 0x40);
            assert_int_equal(fsdp__f64_to_bf16((double)b), h | 0x40);
        } else {
            assert_true(b == vb && !signbit(b) == !signbit(vb));
            assert_int_equal(fsdp__f32_to_bf16(b), h);
            assert_int_equal(fsdp__f64_to_bf16(vb), h);
        }
    }
}

/* Between any two neighbours lo and hi = lo + 1 (positive): below the middle
 * goes down, above goes up, the middle goes to the even one. */
static void check_boundary(uint16_t lo, int is_bf16)
{
    double a = value_of(lo, is_bf16 ? 7 : 10, is_bf16 ? 8 : 5);
    /* The step up to infinity is as long as the one before. */
    double before = lo ? value_of((uint16_t)(lo - 1), is_bf16 ? 7 : 10, is_bf16 ? 8 : 5) : 0;
    double b = value_of((uint16_t)(lo + 1), is_bf16 ? 7 : 10, is_bf16 ? 8 : 5);
    if (isinf(b)) b = a + (a - before);
    double middle = a + (b - a) / 2;
    uint16_t hi = (uint16_t)(lo + 1), even = lo & 1 ? hi : lo;
    uint16_t (*from64)(double) = is_bf16 ? fsdp__f64_to_bf16 : fsdp__f64_to_f16;
    uint16_t (*from32)(float) = is_bf16 ? fsdp__f32_to_bf16 : fsdp__f32_to_f16;
    assert_int_equal(from64(nextafter(middle, -INFINITY)), lo);
    assert_int_equal(from64(middle), even);
    assert_int_equal(from64(nextafter(middle, INFINITY)), hi);
    assert_int_equal(from64(-nextafter(middle, INFINITY)), hi | 0x8000);
    assert_int_equal(from64(-middle), even | 0x8000);
    float m = (float)middle;
    if ((double)m != middle) return; /* below f32's own denormals */
    assert_int_equal(from32(nextafterf(m, -INFINITY)), lo);
    assert_int_equal(from32(m), even);
    assert_int_equal(from32(nextafterf(m, INFINITY)), hi);
    assert_int_equal(from32(-m), even | 0x8000);
}

static void rounding_is_to_nearest_even(void **state)
{
    (void)state;
    for (uint16_t h = 0; h < 0x7c00; h++)
        check_boundary(h, 0);
    for (uint16_t h = 0; h < 0x7f80; h++)
        check_boundary(h, 1);
    assert_int_equal(fsdp__f64_to_f16(1e300), 0x7c00);
    assert_int_equal(fsdp__f64_to_bf16(-1e300), 0xff80);
    assert_int_equal(fsdp__f64_to_f16(5e-324), 0);
    assert_int_equal(fsdp__f64_to_bf16(-5e-324), 0x8000);
    assert_int_equal(fsdp__f32_to_f16(1e-45f), 0);
    /* By way of f32 this would round twice, to a tie and down. */
    assert_int_equal(fsdp__f64_to_bf16(1.0 + 0x1p-8 + 0x1p-40), 0x3f81);
    assert_int_equal(fsdp__f64_to_f16(1.0 + 0x1p-11 + 0x1p-40), 0x3c01);
}

/* ---- instruction sets ------------------------------------------------------- */

/* Patterns of all kinds: specials, ties, denormals, random ones. */
static float *patterns(size_t n)
{
    static const uint32_t special[] = {
        0,          0x80000000, 1,          0x007fffff, 0x00800000, 0x7f7fffff,
        0x7f800000, 0xff800000, 0x7f800001, 0xffbfffff, 0x7fc00000, 0xffffffff,
        0x3f808000, 0x3f818000, 0x3f807fff, 0x3f808001, 0x7f7f8000, 0x33000000,
        0x33000001, 0x387fe000, 0x477fefff, 0x477ff000, 0x38001000, 0x33800000,
    };
    enum { SPECIAL = sizeof special / sizeof *special };
    float *x = malloc(n * sizeof *x + 1);
    for (size_t i = 0; i < n; i++)
        x[i] = from_bits(i < SPECIAL ? special[i] : fsdp__rng_u32(11, i));
    return x;
}

static void check_isa(const fsdp__block_kernels *k, const fsdp__block_kernels *p)
{
    enum { N = 5000, MOST = 131 };
    float *x = patterns(N), *z = patterns(N);
    uint16_t h[MOST + 1], g[MOST + 1];
    float y[MOST + 1], w[MOST + 1];
    for (size_t i = 0; i < N; i++)
        z[i] = from_bits(fsdp__rng_u32(12, i));
    /* Starts that are not aligned, lengths that are not whole. */
    for (size_t at = 0, n = 0; at + MOST + 1 < N; at += n + 1, n = (n + 1) % (MOST + 1)) {
        const uint16_t *half = (const uint16_t *)(const void *)(x + at) + at % 2;
        h[n] = g[n] = 7;
        k->f32_to_bf16(h, x + at, n);
        p->f32_to_bf16(g, x + at, n);
        assert_memory_equal(h, g, 2 * (n + 1));
        k->f32_to_f16(h, x + at, n);
        p->f32_to_f16(g, x + at, n);
        assert_memory_equal(h, g, 2 * (n + 1));
        y[n] = w[n] = 7;
        k->bf16_to_f32(y, half, n);
        p->bf16_to_f32(w, half, n);
        assert_memory_equal(y, w, 4 * (n + 1));
        k->f16_to_f32(y, half, n);
        p->f16_to_f32(w, half, n);
        assert_memory_equal(y, w, 4 * (n + 1));
        for (size_t i = 0; i < n; i++)
            h[i] = (uint16_t)fsdp__rng_u32(13, at + i) & 0xbfff;
        k->add_bf16(y, h, h, n);
        p->add_bf16(w, h, h, n);
        assert_memory_equal(y, w, 4 * (n + 1));
        double a[8] = {1, 2}, b[8] = {1, 2};
        for (size_t i = 0; i < n; i++)
            y[i] = from_bits(fsdp__rng_u32(14, at + i) & 0xbfffffff);
        k->squares_f32(a, y, n);
        p->squares_f32(b, y, n);
        assert_memory_equal(a, b, sizeof a);
        k->add_f32(w, y, y, n);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(bits(w[i]), bits(y[i] + y[i]));
        k->scale_f32(w, 0.3f, n);
        for (size_t i = 0; i < n; i++)
            assert_int_equal(bits(w[i]), bits((y[i] + y[i]) * 0.3f));
    }
    free(x);
    free(z);
}

static void instruction_sets_give_the_same_bits(void **state)
{
    (void)state;
    const fsdp__block_kernels *plain = fsdp__block_kernels_of(FSDP__ISA_PLAIN);
    for (int isa = 0; isa <= (int)fsdp__cpu_isa_machine(); isa++)
        check_isa(fsdp__block_kernels_of((fsdp__isa)isa), plain);
}

/* ---- arrays -------------------------------------------------------------------- */

/* One element of any dtype, by the slow way: as a long double, which holds
 * every value of every dtype exactly (where it has 64 bits of mantissa). */
static long double get(const void *x, fsdp_dtype t, size_t i)
{
    switch (t) {
    case FSDP_F32:
        return ((const float *)x)[i];
    case FSDP_F64:
        return ((const double *)x)[i];
    case FSDP_F16:
        return fsdp__f16_to_f32(((const uint16_t *)x)[i]);
    case FSDP_BF16:
        return fsdp__bf16_to_f32(((const uint16_t *)x)[i]);
    case FSDP_I64:
        return ((const int64_t *)x)[i];
    case FSDP_I32:
        return ((const int32_t *)x)[i];
    case FSDP_I16:
        return ((const int16_t *)x)[i];
    case FSDP_I8:
        return ((const int8_t *)x)[i];
    case FSDP_U64:
        return ((const uint64_t *)x)[i];
    case FSDP_U32:
        return ((const uint32_t *)x)[i];
    case FSDP_U16:
        return ((const uint16_t *)x)[i];
    case FSDP_U8:
        return ((const uint8_t *)x)[i];
    case FSDP_BOOL:
        return ((const uint8_t *)x)[i] != 0;
    default:
        return 0;
    }
}

/* Values that every dtype holds survive every pair. */
static void small_values_survive_every_pair(void **state)
{
    (void)state;
    enum { N = 1027 };
    uint64_t a[N], b[N], back[N];
    float ones[N];
    for (size_t i = 0; i < N; i++)
        ones[i] = (float)(fsdp__rng_u32(1, i) % 128);
    for (int s = 0; s < FSDP_BOOL; s++) {
        fsdp__convert(a, (fsdp_dtype)s, ones, FSDP_F32, N);
        for (int d = 0; d < FSDP_DTYPE_COUNT; d++) {
            fsdp__convert(b, (fsdp_dtype)d, a, (fsdp_dtype)s, N);
            for (size_t i = 0; i < N; i++) {
                float expected = d == FSDP_BOOL ? ones[i] != 0 : ones[i];
                assert_true(get(b, (fsdp_dtype)d, i) == (long double)expected);
            }
            fsdp__convert(back, (fsdp_dtype)s, b, (fsdp_dtype)d, N);
            for (size_t i = 0; i < N; i++)
                assert_true(get(back, (fsdp_dtype)s, i) ==
                            (d == FSDP_BOOL ? (long double)(ones[i] != 0) : ones[i]));
        }
    }
    fsdp__convert(b, FSDP_F32, a, FSDP_F64, 0); /* nothing, no fault */
}

static void floats_truncate_and_hold_the_ends(void **state)
{
    (void)state;
    static const double x[] = {-3.7,  3.7,  -0.5,  0.99, 300,      -300,     1e6,
                               -1e12, 1e30, -1e30, NAN,  INFINITY, -INFINITY};
    enum { N = sizeof x / sizeof *x };
    int64_t i64[N];
    int32_t i32[N];
    int8_t i8[N];
    uint64_t u64[N];
    uint8_t u8[N], truth[N];
    fsdp__convert(i64, FSDP_I64, x, FSDP_F64, N);
    fsdp__convert(i32, FSDP_I32, x, FSDP_F64, N);
    fsdp__convert(i8, FSDP_I8, x, FSDP_F64, N);
    fsdp__convert(u64, FSDP_U64, x, FSDP_F64, N);
    fsdp__convert(u8, FSDP_U8, x, FSDP_F64, N);
    fsdp__convert(truth, FSDP_BOOL, x, FSDP_F64, N);
    for (size_t i = 0; i < N; i++) {
        double v = isnan(x[i]) ? 0 : trunc(x[i]);
        assert_true(i64[i] == (v >= 0x1p63 ? INT64_MAX : v < -0x1p63 ? INT64_MIN : (int64_t)v));
        assert_true(i32[i] == fmin(fmax(v, INT32_MIN), INT32_MAX));
        assert_true(i8[i] == fmin(fmax(v, INT8_MIN), INT8_MAX));
        assert_true(u64[i] == (v >= 0x1p64 ? UINT64_MAX : v <= 0 ? 0 : (uint64_t)v));
        assert_true(u8[i] == fmin(fmax(v, 0), UINT8_MAX));
        assert_int_equal(truth[i], 1);
    }
}

static void integers_wrap_and_round_once(void **state)
{
    (void)state;
    int64_t x[] = {-1,
                   256,
                   65537,
                   INT64_MIN,
                   INT64_MAX,
                   ((int64_t)1 << 62) + ((int64_t)1 << 54) + 1,
                   -((int64_t)1 << 62) - ((int64_t)1 << 54) - 1,
                   ((int64_t)1 << 62) + ((int64_t)1 << 54)};
    enum { N = sizeof x / sizeof *x };
    uint8_t u8[N], truth[N];
    int16_t i16[N];
    uint64_t u64[N];
    float f[N];
    double d[N];
    uint16_t h[N];
    fsdp__convert(u8, FSDP_U8, x, FSDP_I64, N);
    fsdp__convert(truth, FSDP_BOOL, x, FSDP_I64, N);
    fsdp__convert(i16, FSDP_I16, x, FSDP_I64, N);
    fsdp__convert(u64, FSDP_U64, x, FSDP_I64, N);
    fsdp__convert(f, FSDP_F32, x, FSDP_I64, N);
    fsdp__convert(d, FSDP_F64, x, FSDP_I64, N);
    fsdp__convert(h, FSDP_BF16, x, FSDP_I64, N);
    for (size_t i = 0; i < N; i++) {
        assert_int_equal(u8[i], (uint8_t)x[i]);
        assert_int_equal(truth[i], 1);
        assert_int_equal(i16[i], (int16_t)(uint16_t)x[i]);
        assert_true(u64[i] == (uint64_t)x[i]);
        assert_true(f[i] == (float)x[i]);
        assert_true(d[i] == (double)x[i]);
    }
    /* Just above a tie goes up, the tie itself to the even one. */
    assert_int_equal(h[5], fsdp__f32_to_bf16(0x1p62f * (1 + 0x1p-7f)));
    assert_int_equal(h[6], fsdp__f32_to_bf16(-0x1p62f * (1 + 0x1p-7f)));
    assert_int_equal(h[7], fsdp__f32_to_bf16(0x1p62f));
    fsdp__convert(h, FSDP_F16, x, FSDP_I64, N);
    assert_int_equal(h[0], 0xbc00);
    assert_int_equal(h[4], 0x7c00);
    assert_int_equal(h[3], 0xfc00);
    uint64_t big = UINT64_MAX;
    fsdp__convert(f, FSDP_F32, &big, FSDP_U64, 1);
    assert_true(f[0] == 0x1p64f);
    int8_t minus = -1;
    fsdp__convert(u64, FSDP_U64, &minus, FSDP_I8, 1);
    assert_true(u64[0] == UINT64_MAX);
}

static void arrays_in_place_and_unaligned(void **state)
{
    (void)state;
    enum { N = 777 };
    float *x = patterns(N);
    uint16_t h[N], g[N];
    fsdp__convert(h, FSDP_BF16, x, FSDP_F32, N);
    for (size_t i = 0; i < N; i++)
        g[i] = fsdp__f32_to_f16(fsdp__bf16_to_f32(h[i]));
    fsdp__convert(h, FSDP_F16, h, FSDP_BF16, N);
    assert_memory_equal(h, g, sizeof h);
    fsdp__convert(h, FSDP_F16, h, FSDP_F16, N);
    assert_memory_equal(h, g, sizeof h);

    char *bytes = malloc(N * 4 + 3), *out = malloc(N * 8 + 1);
    memcpy(bytes + 3, x, N * 4);
    fsdp__convert(out + 1, FSDP_BF16, bytes + 3, FSDP_F32, N);
    for (size_t i = 0; i < N; i++) {
        uint16_t v;
        memcpy(&v, out + 1 + 2 * i, 2);
        assert_int_equal(v, fsdp__f32_to_bf16(x[i]));
    }
    fsdp__convert(out + 1, FSDP_F64, bytes + 3, FSDP_F32, N);
    for (size_t i = 0; i < N; i++) {
        double v;
        memcpy(&v, out + 1 + 8 * i, 8);
        assert_true(v == (double)x[i] || (isnan(v) && isnan(x[i])));
    }
    free(bytes);
    free(out);
    free(x);
}

/* Large ones are cut over threads and written past the caches. */
static void large_arrays(void **state)
{
    (void)state;
    size_t n = ((size_t)5 << 20) / 2 + 321;
    float *x = patterns(n);
    char *out = malloc(8 * n + 2);
    for (int threads = 1; threads <= 3; threads += 2) {
        fsdp_set_threads(threads);
        memset(out, 0, 2 * n + 2);
        out[2 * n + 1] = 77;
        fsdp__convert(out + 1, FSDP_BF16, x, FSDP_F32, n);
        assert_int_equal(out[2 * n + 1], 77);
        for (size_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, out + 1 + 2 * i, 2);
            if (v != fsdp__f32_to_bf16(x[i])) fail_msg("element %zu", i);
        }
        fsdp__convert(out, FSDP_I64, x, FSDP_F32, n);
        for (size_t i = 0; i < n; i += 97) {
            float v = x[i];
            int64_t expected = isnan(v)       ? 0
                               : v >= 0x1p63f ? INT64_MAX
                               : v < -0x1p63f ? INT64_MIN
                                              : (int64_t)v;
            int64_t got;
            memcpy(&got, out + 8 * i, 8);
            assert_true(got == expected);
        }
        fsdp__convert(out, FSDP_F32, x, FSDP_F32, n);
        assert_memory_equal(out, x, 4 * n);
    }
    free(out);
    free(x);
}

static void dtypes_have_names_and_sizes(void **state)
{
    (void)state;
    for (int t = 0; t < FSDP_DTYPE_COUNT; t++)
        assert_int_equal(fsdp_dtype_parse(fsdp_dtype_name((fsdp_dtype)t)), t);
    assert_int_equal(fsdp_dtype_parse("BF16"), FSDP_BF16);
    assert_int_equal(fsdp_dtype_parse("torch.bfloat16"), FSDP_BF16);
    assert_int_equal(fsdp_dtype_parse("float32"), FSDP_F32);
    assert_int_equal(fsdp_dtype_parse("torch.bool"), FSDP_BOOL);
    assert_int_equal(fsdp_dtype_parse("complex64"), FSDP_DTYPE_NONE);
    assert_int_equal(fsdp_dtype_parse(""), FSDP_DTYPE_NONE);
    assert_int_equal(fsdp_dtype_parse(NULL), FSDP_DTYPE_NONE);
    assert_int_equal(fsdp_dtype_size(FSDP_F64), 8);
    assert_int_equal(fsdp_dtype_size(FSDP_BOOL), 1);
    assert_int_equal(fsdp_dtype_size(FSDP_DTYPE_NONE), 0);
    assert_string_equal(fsdp_dtype_name(FSDP_DTYPE_NONE), "none");
    assert_true(fsdp_dtype_is_floating(FSDP_F16));
    assert_false(fsdp_dtype_is_floating(FSDP_I64));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_pattern_widens_and_comes_back),
        cmocka_unit_test(rounding_is_to_nearest_even),
        cmocka_unit_test(instruction_sets_give_the_same_bits),
        cmocka_unit_test(small_values_survive_every_pair),
        cmocka_unit_test(floats_truncate_and_hold_the_ends),
        cmocka_unit_test(integers_wrap_and_round_once),
        cmocka_unit_test(arrays_in_place_and_unaligned),
        cmocka_unit_test(large_arrays),
        cmocka_unit_test(dtypes_have_names_and_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
