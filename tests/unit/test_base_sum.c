/*
 * test_base_sum.c - sums over sources against the tree written down plainly;
 * sums of squares; the search for what is not finite.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/rng.h"
#include "fsdp/context.h"

enum { MOST = 19 };

static float tree_f32(const float *x, int n)
{
    if (n == 1) return x[0];
    int left = 1;
    while (left * 2 < n)
        left *= 2;
    return tree_f32(x, left) + tree_f32(x + left, n - left);
}

static double tree_f64(const double *x, int n)
{
    if (n == 1) return x[0];
    int left = 1;
    while (left * 2 < n)
        left *= 2;
    return tree_f64(x, left) + tree_f64(x + left, n - left);
}

static float get_f32(const void *x, fsdp_dtype t, size_t i)
{
    uint16_t h;
    float f;
    if (t == FSDP_F32) {
        memcpy(&f, (const char *)x + 4 * i, 4);
        return f;
    }
    memcpy(&h, (const char *)x + 2 * i, 2);
    return t == FSDP_BF16 ? fsdp__bf16_to_f32(h) : fsdp__f16_to_f32(h);
}

/* Sources of k times n numbers of mixed sizes in dtype t, one allocation each. */
static void make(void **src, int k, fsdp_dtype t, size_t n)
{
    float *x = malloc(n * sizeof *x + 1);
    for (int j = 0; j < k; j++) {
        fsdp__rng_uniform_fill(100 + (uint64_t)j, 0, x, n);
        for (size_t i = 0; i < n; i++)
            x[i] = (x[i] - 0.5f) * (i % 17 == 0 ? 1e6f : 1.0f);
        src[j] = malloc(n * 8 + 1);
        fsdp__convert(src[j], t, x, FSDP_F32, n);
    }
    free(x);
}

static void free_all(void **src, int k)
{
    for (int j = 0; j < k; j++)
        free(src[j]);
}

static void check_sum(fsdp_dtype src_t, fsdp_dtype dst_t, int k, size_t n, float scale, int add)
{
    void *src[MOST], *old[1];
    make(src, k, src_t, n);
    make(old, 1, dst_t, n);
    size_t size = fsdp_dtype_size(dst_t);
    char *dst = malloc(n * size + 1);
    memcpy(dst, old[0], n * size);
    dst[n * size] = 77;
    fsdp__sum_tree(dst, dst_t, (const void *const *)src, src_t, k, n, scale, add);
    assert_int_equal(dst[n * size], 77);
    for (size_t i = 0; i < n; i++) {
        float leaf[MOST];
        for (int j = 0; j < k; j++)
            leaf[j] = get_f32(src[j], src_t, i);
        float sum = tree_f32(leaf, k);
        if (scale != 1.0f) sum *= scale;
        if (add) sum = get_f32(old[0], dst_t, i) + sum;
        float expected = sum;
        if (dst_t == FSDP_BF16) expected = fsdp__bf16_to_f32(fsdp__f32_to_bf16(sum));
        if (dst_t == FSDP_F16) expected = fsdp__f16_to_f32(fsdp__f32_to_f16(sum));
        float got = get_f32(dst, dst_t, i);
        if (memcmp(&got, &expected, 4) != 0)
            fail_msg("k %d n %zu element %zu: %.9g, not %.9g", k, n, i, (double)got,
                     (double)expected);
    }
    free(dst);
    free_all(src, k);
    free_all(old, 1);
}

static void sums_are_the_tree(void **state)
{
    (void)state;
    static const fsdp_dtype types[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
    static const size_t sizes[] = {0, 1, 7, 33, 512, 513, 1200};
    for (int s = 0; s < 3; s++)
        for (int d = 0; d < 3; d++)
            for (int k = 1; k <= MOST; k += k < 9 ? 1 : 5)
                for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++)
                    check_sum(types[s], types[d], k, sizes[z], k % 2 ? 1.0f : 0.3f, k % 3 == 0);
}

static void large_sums_do_not_depend_on_threads(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 3; threads += 2) {
        fsdp_set_threads(threads);
        check_sum(FSDP_BF16, FSDP_F32, 3, ((size_t)5 << 20) / 4 + 5, 0.5f, 0);
        check_sum(FSDP_F32, FSDP_F32, 2, 140001, 1.0f, 1);
    }
}

static void f64_sums_in_f64(void **state)
{
    (void)state;
    enum { N = 1030, K = 7 };
    double *src[K], dst[N], old[N];
    for (int j = 0; j < K; j++) {
        src[j] = malloc(N * sizeof(double));
        for (size_t i = 0; i < N; i++)
            src[j][i] = fsdp__rng_normal(5, i) + 1e-9 * fsdp__rng_normal(6 + (uint64_t)j, i);
    }
    for (size_t i = 0; i < N; i++)
        dst[i] = old[i] = 0.1 * (double)i;
    fsdp__sum_tree(dst, FSDP_F64, (const void *const *)src, FSDP_F64, K, N, 0.25f, 1);
    for (size_t i = 0; i < N; i++) {
        double leaf[K];
        for (int j = 0; j < K; j++)
            leaf[j] = src[j][i];
        assert_true(dst[i] == old[i] + tree_f64(leaf, K) * 0.25);
    }
    for (int j = 0; j < K; j++)
        free(src[j]);
}

static void integer_sums_are_exact(void **state)
{
    (void)state;
    int64_t a[] = {((int64_t)1 << 60) + 1, -5, 0}, b[] = {2, -6, 0}, c[] = {4, 1, 0},
            dst[3] = {1, 1, 1};
    const void *src[] = {a, b, c};
    fsdp__sum_tree(dst, FSDP_I64, src, FSDP_I64, 3, 3, 1.0f, 0);
    assert_true(dst[0] == ((int64_t)1 << 60) + 7 && dst[1] == -10 && dst[2] == 0);
    fsdp__sum_tree(dst, FSDP_I64, src, FSDP_I64, 3, 3, 1.0f, 1);
    assert_true(dst[1] == -20);
    uint8_t p[] = {200, 1}, q[] = {100, 2}, r[2];
    const void *small[] = {p, q};
    fsdp__sum_tree(r, FSDP_U8, small, FSDP_U8, 2, 2, 1.0f, 0);
    assert_int_equal(r[0], 44);
    assert_int_equal(r[1], 3);
    float mean[2];
    fsdp__sum_tree(mean, FSDP_F32, small, FSDP_U8, 2, 2, 0.5f, 0);
    assert_true(mean[0] == 150 && mean[1] == 1.5f);
}

static void a_sum_may_stand_on_a_source(void **state)
{
    (void)state;
    enum { N = 700 };
    float a[N], b[N], expected[N];
    fsdp__rng_normal_fill(1, 0, a, N);
    fsdp__rng_normal_fill(2, 0, b, N);
    for (int i = 0; i < N; i++)
        expected[i] = a[i] + b[i];
    const void *src[] = {a, b};
    fsdp__sum_tree(a, FSDP_F32, src, FSDP_F32, 2, N, 1.0f, 0);
    assert_memory_equal(a, expected, sizeof a);
}

static void squares(void **state)
{
    (void)state;
    assert_true(fsdp__sum_squares(NULL, FSDP_F32, 0) == 0);
    static const size_t sizes[] = {1, 7, 8, 9, 511, 513, 65536, 65537, 300001};
    for (size_t z = 0; z < sizeof sizes / sizeof *sizes; z++) {
        size_t n = sizes[z];
        char *bytes = malloc(8 * n + 1);
        float *x = malloc(4 * n);
        long double exact = 0;
        fsdp__rng_normal_fill(9, 0, x, n);
        for (size_t i = 0; i < n; i++)
            exact += (long double)x[i] * x[i];
        fsdp_set_threads(1);
        double one = fsdp__sum_squares(x, FSDP_F32, n);
        assert_true(fabsl(one - exact) <= 1e-13L * exact);
        fsdp_set_threads(3);
        assert_true(fsdp__sum_squares(x, FSDP_F32, n) == one);
        memcpy(bytes + 1, x, 4 * n);
        assert_true(fsdp__sum_squares(bytes + 1, FSDP_F32, n) == one);
        /* The order is of n alone: the same values in f64 sum the same way. */
        fsdp__convert(bytes, FSDP_F64, x, FSDP_F32, n);
        assert_true(fsdp__sum_squares(bytes, FSDP_F64, n) == one);
        x[n / 2] = NAN;
        assert_true(isnan(fsdp__sum_squares(x, FSDP_F32, n)));
        free(bytes);
        free(x);
    }
    int32_t whole[] = {3, -4};
    assert_true(fsdp__sum_squares(whole, FSDP_I32, 2) == 25);
}

static void numbers_are_summed_as_the_tree(void **state)
{
    (void)state;
    const double x[7] = {1e16, 1.0, -1e16, 3.0, 0.1, 0.2, 0.3};
    assert_true(fsdp__tree_sum(x, 0) == 0.0);
    assert_true(fsdp__tree_sum(x, 1) == x[0]);
    assert_true(fsdp__tree_sum(x, 3) == (x[0] + x[1]) + x[2]);
    assert_true(fsdp__tree_sum(x, 5) == ((x[0] + x[1]) + (x[2] + x[3])) + x[4]);
    assert_true(fsdp__tree_sum(x, 7) == ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + x[6]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_the_tree),
        cmocka_unit_test(large_sums_do_not_depend_on_threads),
        cmocka_unit_test(f64_sums_in_f64),
        cmocka_unit_test(integer_sums_are_exact),
        cmocka_unit_test(a_sum_may_stand_on_a_source),
        cmocka_unit_test(squares),
        cmocka_unit_test(numbers_are_summed_as_the_tree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
