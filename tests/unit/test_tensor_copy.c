/*
 * test_tensor_copy.c - strided copies with conversion, and sums over dims,
 * against walks over one element at a time.
 */
#include "kernel_check.h"

#include "tensor/kernel_set.h"

typedef struct layout {
    int ndim;
    int64_t size[8], src[8], dst[8]; /* strides */
} layout;

static const layout layouts[] = {
    {0, {0}, {0}, {0}},
    {1, {0}, {1}, {1}},
    {1, {131}, {1}, {1}},
    {1, {131}, {2}, {1}},
    {1, {700}, {1}, {3}},
    {1, {700}, {5}, {3}},
    {1, {97}, {0}, {1}},         /* one element for all */
    {2, {5, 7}, {1, 5}, {7, 1}}, /* transposes */
    {2, {33, 65}, {1, 33}, {65, 1}},
    {2, {64, 96}, {1, 64}, {96, 1}},
    {2, {64, 96}, {96, 1}, {1, 64}},
    {2, {300, 190}, {1, 300}, {190, 1}},
    {3, {3, 34, 41}, {1394, 1, 34}, {1394, 41, 1}},
    {4, {2, 5, 3, 16}, {240, 48, 16, 1}, {240, 16, 80, 1}}, /* (B,T,H,D) to (B,H,T,D) */
    {4, {2, 5, 3, 16}, {240, 16, 80, 1}, {240, 48, 16, 1}},
    {4, {2, 3, 5, 7}, {1, 2, 6, 30}, {105, 35, 7, 1}},
    {3, {4, 1, 6}, {6, 99, 1}, {9, 7, 1}}, /* rows of a wider array */
    {2, {20, 9}, {0, 1}, {9, 1}},          /* a row for all */
    {2, {20, 9}, {1, 0}, {9, 1}},
    {3, {2, 0, 3}, {3, 3, 1}, {3, 3, 1}},
    {8, {2, 1, 2, 3, 1, 2, 2, 3}, {36, 0, 18, 1, 4, 9, 3, 6}, {72, 0, 36, 12, 5, 6, 3, 1}},
    {2, {3, 40000}, {40000, 1}, {40001, 1}}, /* more than a part */
    {1, {-1}, {0}, {0}},                     /* ends the list */
};

static const fsdp_dtype floats[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};

/* Elements that an array with these strides spans. */
static int64_t span(int ndim, const int64_t *size, const int64_t *stride)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n += size[d] > 0 ? (size[d] - 1) * stride[d] : 0;
    return n;
}

static int64_t offset_of(int ndim, const int64_t *size, const int64_t *stride, int64_t i)
{
    int64_t at = 0;
    for (int d = ndim - 1; d >= 0; d--) {
        at += i % size[d] * stride[d];
        i /= size[d];
    }
    return at;
}

static int64_t count_of(int ndim, const int64_t *size)
{
    int64_t n = 1;
    for (int d = 0; d < ndim; d++)
        n *= size[d];
    return n;
}

/* An array of any dtype; integers are small ones. */
static void *any_array(fsdp_dtype t, int64_t n, uint64_t seed)
{
    if (fsdp_dtype_is_floating(t)) return check_array(t, n, seed, 3);
    char *x = calloc((size_t)n + 1, fsdp_dtype_size(t));
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++) {
        double v = floor(50 * (1 + check_random(seed + (uint64_t)i)));
        if (t == FSDP_BOOL) v = v > 50;
        fsdp__convert(x + i * (int64_t)fsdp_dtype_size(t), t, &v, FSDP_F64, 1);
    }
    return x;
}

static void check_copy_of(const layout *l, fsdp_dtype st, fsdp_dtype dt, int add)
{
    int64_t ns = span(l->ndim, l->size, l->src), nd = span(l->ndim, l->size, l->dst);
    int64_t n = count_of(l->ndim, l->size), ds = (int64_t)fsdp_dtype_size(dt);
    char *src = any_array(st, ns, 1), *dst = any_array(dt, nd, 2);
    char *want = check_copy(dst, dt, nd), *again = check_copy(dst, dt, nd);
    fsdp_set_threads(2);
    fsdp__k_copy(l->ndim, l->size, src, st, l->src, dst, dt, l->dst, add);
    fsdp_set_threads(1);
    fsdp__k_copy(l->ndim, l->size, src, st, l->src, again, dt, l->dst, add);
    for (int64_t i = 0; i < n; i++) {
        const char *s = src + offset_of(l->ndim, l->size, l->src, i) * (int64_t)fsdp_dtype_size(st);
        char *d = want + offset_of(l->ndim, l->size, l->dst, i) * ds;
        if (!add) {
            fsdp__convert(d, dt, s, st, 1);
        } else if (fsdp_dtype_is_floating(st) && fsdp_dtype_is_floating(dt)) {
            fsdp__kernel_set_plain(st)->copy(1, s, st, d, dt, 1);
        } else {
            double a, b;
            fsdp__convert(&a, FSDP_F64, d, dt, 1);
            fsdp__convert(&b, FSDP_F64, s, st, 1);
            a += b;
            fsdp__convert(d, dt, &a, FSDP_F64, 1);
        }
    }
    /* The gaps between the elements too: nothing else was written. */
    assert_memory_equal(dst, want, (size_t)(nd * ds));
    assert_memory_equal(again, want, (size_t)(nd * ds));
    free(src), free(dst), free(want), free(again);
}

static void test_copy(void **state)
{
    (void)state;
    for (int k = 0; layouts[k].size[0] >= 0; k++)
        for (int s = 0; s < 4; s++)
            for (int d = 0; d < 4; d++)
                for (int add = 0; add < 2; add++)
                    check_copy_of(&layouts[k], floats[s], floats[d], add);
}

static void test_copy_integers(void **state)
{
    static const fsdp_dtype pairs[][2] = {
        {FSDP_I64, FSDP_I64}, {FSDP_I64, FSDP_I32},   {FSDP_U8, FSDP_I64},  {FSDP_I64, FSDP_F32},
        {FSDP_F32, FSDP_I64}, {FSDP_BOOL, FSDP_BF16}, {FSDP_I16, FSDP_I16}, {FSDP_BOOL, FSDP_BOOL}};
    (void)state;
    for (int k = 0; layouts[k].size[0] >= 0; k++)
        for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++)
            for (int add = 0; add < (pairs[p][1] == FSDP_BOOL ? 1 : 2); add++)
                check_copy_of(&layouts[k], pairs[p][0], pairs[p][1], add);
}

/* Sums of integers wrap and do not pass through f64. */
static void test_copy_wide_integers(void **state)
{
    (void)state;
    int64_t src[3] = {1, (INT64_C(1) << 53) + 1, -5}, dst[3] = {INT64_MAX, 1, 5}, n = 3, one = 1;
    fsdp__k_copy(1, &n, src, FSDP_I64, &one, dst, FSDP_I64, &one, 1);
    assert_true(dst[0] == INT64_MIN);
    assert_true(dst[1] == (INT64_C(1) << 53) + 2);
    assert_true(dst[2] == 0);
}

/* Destinations that are written past the caches: a transpose, and heads before positions. */
static void test_copy_large(void **state)
{
    static const layout large[] = {
        {2, {1100, 1990}, {1, 1100}, {1990, 1}},
        {4, {1, 16, 2200, 64}, {0, 64, 1024, 1}, {0, 140800, 64, 1}},
        {1, {2200001}, {1}, {1}},
    };
    (void)state;
    for (int k = 0; k < 3; k++)
        for (int d = 0; d < 2; d++) {
            const layout *l = &large[k];
            int64_t n = count_of(l->ndim, l->size), bad = 0;
            void *src = check_array(floats[d], n, 1, 3), *dst = check_copy(src, floats[d], n);
            fsdp_set_threads(2);
            fsdp__k_copy(l->ndim, l->size, src, floats[d], l->src, dst, floats[d], l->dst, 0);
            for (int64_t i = 0; i < n; i++) {
                int64_t from = offset_of(l->ndim, l->size, l->src, i);
                int64_t to = offset_of(l->ndim, l->size, l->dst, i);
                bad += check_get(dst, floats[d], to) != check_get(src, floats[d], from);
            }
            assert_int_equal(bad, 0);
            free(src), free(dst);
        }
}

/* ---- sums ----------------------------------------------------------------------- */

typedef struct sum_case {
    int ndim;
    int64_t size[5], stride[5], out[5];
} sum_case;

static const sum_case sums[] = {
    {0, {0}, {0}, {0}},
    {1, {1000}, {1}, {1}},
    {1, {0}, {1}, {1}},
    {1, {1000}, {3}, {1}},
    {1, {200003}, {1}, {1}},
    {2, {7, 33}, {33, 1}, {7, 1}},
    {2, {7, 33}, {33, 1}, {1, 33}},
    {2, {7, 33}, {33, 1}, {7, 33}},
    {2, {7, 33}, {33, 1}, {1, 1}},
    {2, {7, 33}, {1, 7}, {1, 33}},
    {2, {7, 33}, {1, 7}, {7, 1}},
    {2, {300, 517}, {517, 1}, {1, 517}},
    {2, {3, 5000}, {5000, 1}, {3, 1}},
    {2, {0, 5}, {5, 1}, {1, 5}},
    {2, {5, 0}, {1, 1}, {5, 1}},
    {2, {5, 0}, {1, 1}, {1, 0}},
    {2, {65, 9}, {0, 1}, {1, 9}},
    {3, {4, 5, 6}, {30, 6, 1}, {1, 5, 1}},
    {3, {4, 5, 6}, {30, 6, 1}, {4, 1, 6}},
    {3, {4, 5, 6}, {1, 4, 20}, {4, 1, 6}},
    {3, {4, 1, 6}, {6, 6, 1}, {1, 1, 6}},
    {4, {3, 4, 5, 6}, {120, 30, 6, 1}, {1, 4, 1, 6}},
    {5, {2, 3, 4, 5, 6}, {360, 120, 30, 6, 1}, {2, 1, 4, 1, 6}},
    {5, {2, 3, 4, 5, 6}, {1, 2, 6, 24, 120}, {1, 3, 1, 5, 1}},
};

static void check_sum(const sum_case *s, fsdp_dtype t, fsdp_dtype dt, int add, double scale)
{
    int64_t out_stride[5], no = 1, n = count_of(s->ndim, s->size);
    for (int d = s->ndim - 1; d >= 0; d--) {
        out_stride[d] = s->out[d] == s->size[d] ? no : 0;
        no *= s->out[d];
    }
    void *x = check_array(t, span(s->ndim, s->size, s->stride), 1, 2);
    void *y = check_array(dt, no, 2, 1), *before = check_copy(y, dt, no);
    void *again = check_copy(y, dt, no), *flat = check_copy(y, dt, no),
         *xs = check_array(t, n, 3, 1);
    double *want = calloc((size_t)no + 1, sizeof *want),
           *size = calloc((size_t)no + 1, sizeof *size);
    assert_non_null(want), assert_non_null(size);
    for (int64_t i = 0; i < n; i++) {
        double v = check_get(x, t, offset_of(s->ndim, s->size, s->stride, i));
        int64_t o = offset_of(s->ndim, s->size, out_stride, i);
        check_set(xs, t, i, v);
        want[o] += v * scale;
        size[o] += fabs(v * scale);
    }
    fsdp_set_threads(2);
    fsdp__k_sum(s->ndim, s->size, x, s->stride, t, s->out, scale, y, dt, add);
    fsdp_set_threads(1);
    fsdp__k_sum(s->ndim, s->size, x, s->stride, t, s->out, scale, again, dt, add);
    assert_memory_equal(y, again, (size_t)no * fsdp_dtype_size(dt));
    /* The order follows the sizes: the same numbers side by side give the same bits. */
    int64_t dense[5], next = 1;
    for (int d = s->ndim - 1; d >= 0; d--) {
        dense[d] = next;
        next *= s->size[d];
    }
    fsdp__k_sum(s->ndim, s->size, xs, dense, t, s->out, scale, flat, dt, add);
    assert_memory_equal(y, flat, (size_t)no * fsdp_dtype_size(dt));
    for (int64_t o = 0; o < no; o++) {
        if (add) want[o] += check_get(before, dt, o);
        double unit = t == FSDP_F64 ? 0x1p-53 : 0x1p-24;
        double bound = 30 * unit * (size[o] + fabs(want[o])) + 1e-300;
        bound += check_ulp(dt) * 1.01 * (fabs(want[o]) + bound);
        if (dt == FSDP_F16) bound += 0x1p-24;
        if (!(fabs(check_get(y, dt, o) - want[o]) <= bound)) {
            print_error("sum %lld: %.17g, expected %.17g within %g\n", (long long)o,
                        check_get(y, dt, o), want[o], bound);
            fail();
        }
    }
    free(x), free(xs), free(y), free(before), free(again), free(flat), free(want), free(size);
}

static void test_sum(void **state)
{
    static const fsdp_dtype pairs[][2] = {{FSDP_F32, FSDP_F32},  {FSDP_BF16, FSDP_BF16},
                                          {FSDP_BF16, FSDP_F32}, {FSDP_F16, FSDP_F16},
                                          {FSDP_F64, FSDP_F64},  {FSDP_F32, FSDP_BF16}};
    (void)state;
    for (size_t k = 0; k < sizeof sums / sizeof *sums; k++)
        for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++)
            for (int add = 0; add < 2; add++)
                check_sum(&sums[k], pairs[p][0], pairs[p][1], add, add ? 0.25 : 1);
}

/* A sum without products has the same bits in the plain table. */
static void test_sum_tables(void **state)
{
    (void)state;
    for (int d = 0; d < 2; d++)
        for (int64_t n = 0; n < 70; n++) {
            void *x = check_array(floats[d], n, (uint64_t)n, 1);
            double a = fsdp__kernel_set_for(floats[d], floats[d])->sum(n, x, floats[d]);
            double b = fsdp__kernel_set_plain(floats[d])->sum(n, x, floats[d]);
            assert_memory_equal(&a, &b, sizeof a);
            free(x);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copy),
        cmocka_unit_test(test_copy_integers),
        cmocka_unit_test(test_copy_wide_integers),
        cmocka_unit_test(test_copy_large),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_sum_tables),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
