/*
 * test_tensor_gemm.c - matrix products and biases against sums in f64.
 *
 * Bounds are those of any order of summation: K roundings of the sum of the
 * products' sizes, and one of the result in its own dtype.
 */
#include "unit/kernel_check.h"

#include "tensor/kernels.h"

/* One product; leading dimensions are wider than the rows by `gap`. */
typedef struct shape {
    int trans_a, trans_b, add;
    int64_t M, N, K, gap;
    fsdp_dtype t, tc;
} shape;

static const double untouched = 77.0; /* exact in every dtype */

static void check_product(const shape *s, const void *a, const void *b, const void *before,
                          const void *c)
{
    int64_t lda = (s->trans_a ? s->M : s->K) + s->gap, ldb = (s->trans_b ? s->K : s->N) + s->gap;
    int64_t ldc = s->N + s->gap;
    double *x = check_wide(a, s->t, (s->trans_a ? s->K : s->M) * lda);
    double *y = check_wide(b, s->t, (s->trans_b ? s->N : s->K) * ldb);
    int64_t xi = s->trans_a ? 1 : lda, xk = s->trans_a ? lda : 1;
    int64_t yj = s->trans_b ? ldb : 1, yk = s->trans_b ? 1 : ldb;
    for (int64_t i = 0; i < s->M; i++)
        for (int64_t j = 0; j < ldc; j++) {
            double got = check_get(c, s->tc, i * ldc + j);
            if (j >= s->N) {
                assert_true(got == untouched);
                continue;
            }
            double old = s->add ? check_get(before, s->tc, i * ldc + j) : 0;
            double want = old, size = fabs(old);
            for (int64_t k = 0; k < s->K; k++) {
                double term = x[i * xi + k * xk] * y[j * yj + k * yk];
                want += term;
                size += fabs(term);
            }
            double ulp = s->t == FSDP_F64 ? 0x1p-53 : 0x1p-24;
            double bound = (double)(s->K + 4) * ulp * size;
            bound += check_ulp(s->tc) * 1.01 * (fabs(want) + bound) + 1e-7 * (s->tc == FSDP_F16);
            if (!(fabs(got - want) <= bound))
                fail_msg(
                    "%s to %s, trans %d %d, add %d, (%ld,%ld,%ld) at (%ld,%ld): %.9g, want %.9g",
                    fsdp_dtype_name(s->t), fsdp_dtype_name(s->tc), s->trans_a, s->trans_b, s->add,
                    (long)s->M, (long)s->N, (long)s->K, (long)i, (long)j, got, want);
        }
    free(x), free(y);
}

static void run_shape(const shape *s)
{
    int64_t rows_a = s->trans_a ? s->K : s->M, cols_a = s->trans_a ? s->M : s->K;
    int64_t rows_b = s->trans_b ? s->N : s->K, cols_b = s->trans_b ? s->K : s->N;
    int64_t lda = cols_a + s->gap, ldb = cols_b + s->gap, ldc = s->N + s->gap;
    size_t c_bytes = (size_t)(s->M * ldc) * fsdp_dtype_size(s->tc);
    void *a = check_array(s->t, rows_a * lda, 1, 1), *b = check_array(s->t, rows_b * ldb, 2, 1);
    void *before = check_array(s->tc, s->M * ldc, 3, 4);
    for (int64_t i = 0; i < s->M; i++)
        for (int64_t j = s->N; j < ldc; j++)
            check_set(before, s->tc, i * ldc + j, untouched);
    void *one = check_copy(before, s->tc, s->M * ldc), *two = check_copy(before, s->tc, s->M * ldc);
    void *plain = check_copy(before, s->tc, s->M * ldc);

    fsdp_set_threads(1);
    assert_int_equal(fsdp__k_gemm(s->trans_a, s->trans_b, s->M, s->N, s->K, a, lda, b, ldb, s->t,
                                  one, ldc, s->tc, s->add),
                     FSDP_OK);
    fsdp_set_threads(2);
    assert_int_equal(fsdp__k_gemm(s->trans_a, s->trans_b, s->M, s->N, s->K, a, lda, b, ldb, s->t,
                                  two, ldc, s->tc, s->add),
                     FSDP_OK);
    fsdp__k_gemm_plain(s->trans_a, s->trans_b, s->M, s->N, s->K, a, lda, b, ldb, s->t, plain, ldc,
                       s->tc, s->add);
    assert_memory_equal(one, two, c_bytes);
    check_product(s, a, b, before, one);
    check_product(s, a, b, before, plain);
    free(a), free(b), free(before), free(one), free(two), free(plain);
}

static const fsdp_dtype pairs[][2] = {{FSDP_F32, FSDP_F32},   {FSDP_F64, FSDP_F64},
                                      {FSDP_F16, FSDP_F16},   {FSDP_F16, FSDP_F32},
                                      {FSDP_BF16, FSDP_BF16}, {FSDP_BF16, FSDP_F32}};

/* Every dtype, form and edge of the tile, with and without add. */
static void test_forms(void **state)
{
    static const int64_t sizes[][3] = {{1, 1, 1},    {3, 5, 7},     {6, 16, 8},  {7, 17, 9},
                                       {2, 33, 20},  {4, 9, 31},    {64, 48, 1}, {65, 70, 40},
                                       {5, 130, 33}, {149, 66, 23}, {12, 8, 300}};
    (void)state;
    for (size_t d = 0; d < sizeof pairs / sizeof *pairs; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int form = 0; form < 8; form++)
                for (int64_t gap = 0; gap <= 3; gap += 3) {
                    shape s = {form & 1,    form >> 1 & 1, form >> 2 & 1, sizes[i][0], sizes[i][1],
                               sizes[i][2], gap,           pairs[d][0],   pairs[d][1]};
                    run_shape(&s);
                }
}

/* Beyond each block of the packed product: rows, columns and depth. */
static void test_blocks(void **state)
{
    static const int64_t sizes[][3] = {{150, 20, 530}, {7, 1100, 12}, {4200, 5, 2}};
    (void)state;
    for (size_t d = 0; d < sizeof pairs / sizeof *pairs; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int form = 0; form < 4; form++) {
                shape s = {form & 1,    form >> 1, form == 3,   sizes[i][0], sizes[i][1],
                           sizes[i][2], 0,         pairs[d][0], pairs[d][1]};
                run_shape(&s);
            }
}

static void test_empty(void **state)
{
    (void)state;
    for (size_t d = 0; d < sizeof pairs / sizeof *pairs; d++)
        for (int add = 0; add < 2; add++) {
            run_shape(&(shape){0, 1, add, 5, 4, 0, 2, pairs[d][0], pairs[d][1]});
            run_shape(&(shape){0, 1, add, 0, 4, 3, 0, pairs[d][0], pairs[d][1]});
            run_shape(&(shape){0, 0, add, 5, 0, 3, 0, pairs[d][0], pairs[d][1]});
        }
}

/* A row's result is the same wherever it stands among rows of one product. */
static void test_place(void **state)
{
    enum { M = 150, N = 90, K = 70 };
    (void)state;
    float *a = check_array(FSDP_F32, M * K, 1, 1), *b = check_array(FSDP_F32, N * K, 2, 1);
    float *c = check_array(FSDP_F32, M * N, 3, 1), *d = check_array(FSDP_F32, M * N, 3, 1);
    assert_int_equal(fsdp__k_gemm(0, 1, M, N, K, a, K, b, K, FSDP_F32, c, N, FSDP_F32, 0), FSDP_OK);
    float *moved = check_array(FSDP_F32, M * K, 1, 1);
    for (int i = 0; i < M; i++)
        memcpy(moved + (i + 13) % M * K, a + i * K, sizeof(float) * K);
    assert_int_equal(fsdp__k_gemm(0, 1, M, N, K, moved, K, b, K, FSDP_F32, d, N, FSDP_F32, 0),
                     FSDP_OK);
    for (int i = 0; i < M; i++)
        assert_memory_equal(c + i * N, d + (i + 13) % M * N, sizeof(float) * N);
    free(a), free(b), free(c), free(d), free(moved);
}

static void test_batched(void **state)
{
    enum { B = 5, M = 9, N = 11, K = 13 };
    (void)state;
    for (size_t d = 0; d < sizeof pairs / sizeof *pairs; d++)
        for (int64_t batch = 0; batch <= B; batch++)
            for (int shared = 0; shared < 2; shared++) {
                fsdp_dtype t = pairs[d][0], tc = pairs[d][1];
                void *a = check_array(t, B * M * K, 1, 1), *b = check_array(t, B * K * N, 2, 1);
                void *before = check_array(tc, B * M * N, 3, 1);
                void *c = check_copy(before, tc, B * M * N);
                assert_int_equal(fsdp__k_gemm_batched(batch, 0, 0, M, N, K, a, K, M * K, b, N,
                                                      shared ? 0 : K * N, t, c, N, M * N, tc, 1),
                                 FSDP_OK);
                size_t ts = fsdp_dtype_size(t), tcs = fsdp_dtype_size(tc);
                for (int64_t i = 0; i < B; i++) {
                    char *ci = (char *)c + (size_t)(i * M * N) * tcs;
                    const char *old = (const char *)before + (size_t)(i * M * N) * tcs;
                    if (i >= batch) {
                        assert_memory_equal(ci, old, (size_t)(M * N) * tcs);
                        continue;
                    }
                    shape s = {0, 0, 1, M, N, K, 0, t, tc};
                    check_product(&s, (char *)a + (size_t)(i * M * K) * ts,
                                  (char *)b + (shared ? 0 : (size_t)(i * K * N) * ts), old, ci);
                }
                free(a), free(b), free(before), free(c);
            }
}

static void test_column_sum(void **state)
{
    static const int64_t sizes[][2] = {{0, 5}, {1, 1}, {3, 0}, {65, 7}, {200, 300}, {300, 513}};
    static const fsdp_dtype types[][2] = {{FSDP_F32, FSDP_F32},  {FSDP_F64, FSDP_F64},
                                          {FSDP_F16, FSDP_F16},  {FSDP_BF16, FSDP_BF16},
                                          {FSDP_BF16, FSDP_F32}, {FSDP_F32, FSDP_F64}};
    (void)state;
    for (size_t d = 0; d < sizeof types / sizeof *types; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int add = 0; add < 2; add++) {
                int64_t R = sizes[i][0], C = sizes[i][1];
                fsdp_dtype t = types[d][0], dt = types[d][1];
                void *x = check_array(t, R * C, 1, 1), *before = check_array(dt, C, 2, 1);
                void *one = check_copy(before, dt, C), *two = check_copy(before, dt, C);
                fsdp_set_threads(1);
                fsdp__k_column_sum(x, t, R, C, one, dt, add);
                fsdp_set_threads(2);
                fsdp__k_column_sum(x, t, R, C, two, dt, add);
                assert_memory_equal(one, two, (size_t)C * fsdp_dtype_size(dt));
                for (int64_t c = 0; c < C; c++) {
                    double want = add ? check_get(before, dt, c) : 0, size = fabs(want);
                    for (int64_t r = 0; r < R; r++) {
                        want += check_get(x, t, r * C + c);
                        size += fabs(check_get(x, t, r * C + c));
                    }
                    double bound = 80 * (t == FSDP_F64 ? 0x1p-53 : 0x1p-24) * size;
                    bound += check_ulp(dt) * 1.01 * (fabs(want) + bound);
                    assert_true(fabs(check_get(one, dt, c) - want) <= bound);
                }
                free(x), free(before), free(one), free(two);
            }
}

static void test_add_bias(void **state)
{
    static const int64_t sizes[][2] = {{0, 5}, {1, 1}, {3, 0}, {65, 7}, {130, 513}};
    static const fsdp_dtype types[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};
    (void)state;
    for (size_t d = 0; d < sizeof types / sizeof *types; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            int64_t R = sizes[i][0], C = sizes[i][1];
            fsdp_dtype t = types[d];
            void *b = check_array(t, C, 1, 1), *before = check_array(t, R * C, 2, 1);
            void *y = check_copy(before, t, R * C);
            fsdp__k_add_bias(y, b, t, R, C);
            for (int64_t r = 0; r < R; r++)
                for (int64_t c = 0; c < C; c++) {
                    double want = check_get(before, t, r * C + c) + check_get(b, t, c);
                    assert_true(fabs(check_get(y, t, r * C + c) - want) <=
                                check_ulp(t) * 1.001 * fabs(want));
                }
            free(b), free(before), free(y);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),    cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_empty),    cmocka_unit_test(test_place),
        cmocka_unit_test(test_batched),  cmocka_unit_test(test_column_sum),
        cmocka_unit_test(test_add_bias),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
