/*
 * test_tensor_elem.c - elementwise kernels against the same formulas in f64:
 * values at the ends, every dtype of input and output, odd and empty sizes,
 * and the same bits wherever an element stands and however many threads run.
 */
#include "kernel_check.h"

#include "base/rng.h"
#include "tensor/kernel_set.h"

static const fsdp_dtype types[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
static const fsdp_dtype pairs[][2] = {
    {FSDP_F32, FSDP_F32},  {FSDP_BF16, FSDP_BF16}, {FSDP_BF16, FSDP_F32},
    {FSDP_F32, FSDP_BF16}, {FSDP_F16, FSDP_F16},   {FSDP_F16, FSDP_F32},
    {FSDP_F64, FSDP_F64},  {FSDP_F32, FSDP_F64},   {FSDP_BF16, FSDP_F16}};
static const int64_t counts[] = {0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 100, 1031};
enum { TYPES = 4, PAIRS = 9, COUNTS = 13 };

/* Bytes of n elements, never 0. */
static size_t bytes_of(fsdp_dtype t, int64_t n)
{
    return (size_t)n * fsdp_dtype_size(t);
}

/* The dtype that computes for t. */
static fsdp_dtype stat_of(fsdp_dtype t)
{
    return t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

/* got within `ulps` units of the computing dtype, then one rounding to dt; `size` is what the
 * parts of the formula measure where they cancel. */
static void check_near(double got, double want, double size, double ulps, fsdp_dtype t,
                       fsdp_dtype dt, const char *what)
{
    if (isnan(want) || isinf(want) || got == want) {
        if (!(isnan(want) ? isnan(got) : got == want)) {
            print_error("%s: %.17g, expected %.17g\n", what, got, want);
            fail();
        }
        return;
    }
    double least = dt == FSDP_F16 || t == FSDP_F16 ? 0x1p-24 : 0x1p-148; /* denormals */
    if (t == FSDP_F64 && dt == FSDP_F64) least = 0x1p-1070;
    double bound = ulps * 2 * check_ulp(stat_of(t)) * (fabs(want) + size);
    bound += check_ulp(dt) * 1.01 * (fabs(want) + bound) + least;
    if (!(fabs(got - want) <= bound)) {
        print_error("%s: %.17g, expected %.17g within %.3g\n", what, got, want, bound);
        fail();
    }
}

/* ---- of one input ------------------------------------------------------------ */

static const char *const unary_names[] = {
#define NAME(n) #n,
    FSDP__UNARY_LIST(NAME)
#undef NAME
};

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double unary_want(fsdp__unary op, double x, double p)
{
    double inner = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
    switch (op) {
    case FSDP__UNARY_silu:
        return x * sigmoid(x);
    case FSDP__UNARY_gelu:
        return x * 0.5 * erfc(-x / sqrt(2));
    case FSDP__UNARY_gelu_tanh:
        return x * sigmoid(2 * inner);
    case FSDP__UNARY_relu:
        return x > 0 || isnan(x) ? x : 0;
    case FSDP__UNARY_tanh:
        return tanh(x);
    case FSDP__UNARY_sigmoid:
        return sigmoid(x);
    case FSDP__UNARY_exp:
        return exp(x);
    case FSDP__UNARY_log:
        return log(x);
    case FSDP__UNARY_sqrt:
        return sqrt(x);
    case FSDP__UNARY_pow:
        return pow(x, p);
    case FSDP__UNARY_scale:
        return x * p;
    default:
        return x + p;
    }
}

/* The slope, and in *size what its parts measure before they cancel. */
static double slope_want(fsdp__unary op, double x, double y, double p, double *size)
{
    double s = sigmoid(x), k = sqrt(2 / M_PI), u = sigmoid(2 * k * (x + 0.044715 * x * x * x));
    double a, b;
    *size = 0;
    switch (op) {
    case FSDP__UNARY_silu:
        *size = s * (1 + fabs(x));
        return s * (1 + x * (1 - s));
    case FSDP__UNARY_gelu:
        a = 0.5 * erfc(-x / sqrt(2)), b = x * exp(-x * x / 2) / sqrt(2 * M_PI);
        *size = fabs(a) + fabs(b);
        return a + b;
    case FSDP__UNARY_gelu_tanh:
        b = x * u * (1 - u) * 2 * k * (1 + 3 * 0.044715 * x * x);
        *size = fabs(u) + fabs(b);
        return u + b;
    case FSDP__UNARY_relu:
        return x > 0;
    case FSDP__UNARY_tanh:
        *size = 1;
        return 1 - y * y;
    case FSDP__UNARY_sigmoid:
        *size = fabs(y);
        return y * (1 - y);
    case FSDP__UNARY_exp:
        return y;
    case FSDP__UNARY_log:
        return 1 / x;
    case FSDP__UNARY_sqrt:
        return 0.5 / y;
    case FSDP__UNARY_pow:
        return p * pow(x, p - 1);
    case FSDP__UNARY_scale:
        return p;
    default:
        return 1;
    }
}

/* How many units a form may be off; the tails of gelu magnify those of its argument. */
static double unary_ulps(fsdp__unary op, double x)
{
    if (op == FSDP__UNARY_gelu_tanh) return 6 + 2 * fabs(x * x * x);
    if (op == FSDP__UNARY_gelu) return 8 + x * x;
    return 4;
}

static int needs_positive(fsdp__unary op)
{
    return op == FSDP__UNARY_log || op == FSDP__UNARY_sqrt || op == FSDP__UNARY_pow;
}

static double power_of(fsdp__unary op, int k)
{
    static const double powers[] = {2, 0.5, -1.25, 3};
    return op == FSDP__UNARY_pow ? powers[k % 4] : 0.75;
}

static void test_unary(void **state)
{
    (void)state;
    for (int op = 0; op < FSDP__UNARY_COUNT; op++)
        for (int k = 0; k < TYPES * COUNTS; k++) {
            fsdp_dtype t = types[k % TYPES];
            int64_t n = counts[k / TYPES];
            void *x = check_array(t, n, (uint64_t)k, 9), *y = check_copy(x, t, n);
            double p = (float)power_of((fsdp__unary)op, k / TYPES);
            for (int64_t i = 0; i < n && needs_positive((fsdp__unary)op); i++)
                check_set(x, t, i, fabs(check_get(x, t, i)) + 0.125);
            fsdp__k_unary((fsdp__unary)op, x, t, n, p, y);
            for (int64_t i = 0; i < n; i++) {
                double v = check_get(x, t, i);
                double size = op == FSDP__UNARY_shift ? fabs(v) + fabs(p) : 0;
                if (op == FSDP__UNARY_log) size = 0.1;
                check_near(check_get(y, t, i), unary_want((fsdp__unary)op, v, p), size,
                           unary_ulps((fsdp__unary)op, v), t, t, unary_names[op]);
            }
            free(x), free(y);
        }
}

/* Every 1009th float from -inf to inf, which meets denormals and both overflows. */
static void test_unary_range(void **state)
{
    static const fsdp__unary ops[] = {FSDP__UNARY_exp, FSDP__UNARY_sigmoid, FSDP__UNARY_tanh,
                                      FSDP__UNARY_log, FSDP__UNARY_silu,    FSDP__UNARY_gelu};
    (void)state;
    enum { STEP = 16384, N = 1 << 18 };
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    assert_non_null(x), assert_non_null(y);
    for (uint32_t i = 0; i < N; i++) {
        uint32_t bits = i * STEP + (i * 7919u) % STEP;
        memcpy(&x[i], &bits, sizeof bits);
    }
    for (size_t k = 0; k < sizeof ops / sizeof *ops; k++) {
        fsdp__k_unary(ops[k], x, FSDP_F32, N, 0, y);
        for (int i = 0; i < N; i++) {
            double want = unary_want(ops[k], x[i], 0);
            if (fabs(want) > 3.4028235677973366e38) want = copysign(INFINITY, want);
            if (isinf(x[i]) && x[i] < 0 && ops[k] != FSDP__UNARY_exp) continue; /* below */
            /* x times an exponential that may be 0 where it would be a denormal. */
            double tail = fabs(x[i]) > 12 && fabs(want) < 0x1p-110 ? fabs(x[i]) * 0x1p-125 : 0;
            if (fabs(y[i] - want) > tail || isnan(want) || isnan(y[i]))
                check_near(y[i], want, 0, unary_ulps(ops[k], x[i]), FSDP_F32, FSDP_F32,
                           unary_names[ops[k]]);
        }
    }
    free(x), free(y);
}

static void test_unary_ends(void **state)
{
    static const struct {
        fsdp__unary op;
        double x, y;
    } cases[] = {
        {FSDP__UNARY_exp, INFINITY, INFINITY},
        {FSDP__UNARY_exp, -INFINITY, 0},
        {FSDP__UNARY_exp, NAN, NAN},
        {FSDP__UNARY_exp, 0, 1},
        {FSDP__UNARY_log, 0, -INFINITY},
        {FSDP__UNARY_log, -1, NAN},
        {FSDP__UNARY_log, INFINITY, INFINITY},
        {FSDP__UNARY_log, NAN, NAN},
        {FSDP__UNARY_log, -INFINITY, NAN},
        {FSDP__UNARY_log, 1, 0},
        {FSDP__UNARY_sqrt, -1, NAN},
        {FSDP__UNARY_sqrt, INFINITY, INFINITY},
        {FSDP__UNARY_tanh, INFINITY, 1},
        {FSDP__UNARY_tanh, -INFINITY, -1},
        {FSDP__UNARY_tanh, NAN, NAN},
        {FSDP__UNARY_tanh, -0.0, 0},
        {FSDP__UNARY_sigmoid, INFINITY, 1},
        {FSDP__UNARY_sigmoid, -INFINITY, 0},
        {FSDP__UNARY_sigmoid, NAN, NAN},
        {FSDP__UNARY_relu, NAN, NAN},
        {FSDP__UNARY_relu, -INFINITY, 0},
        {FSDP__UNARY_relu, INFINITY, INFINITY},
        {FSDP__UNARY_silu, INFINITY, INFINITY},
        {FSDP__UNARY_silu, NAN, NAN},
        {FSDP__UNARY_gelu, INFINITY, INFINITY},
        {FSDP__UNARY_gelu, NAN, NAN},
        {FSDP__UNARY_gelu_tanh, INFINITY, INFINITY},
        {FSDP__UNARY_gelu_tanh, NAN, NAN},
    };
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        for (int d = 0; d < TYPES; d++) {
            double x[20], y[20]; /* room for 20 of any dtype: a full vector and a tail */
            for (int i = 0; i < 20; i++)
                check_set(x, types[d], i, cases[k].x);
            fsdp__k_unary(cases[k].op, x, types[d], 20, 1, y);
            for (int i = 0; i < 20; i++)
                check_near(check_get(y, types[d], i), cases[k].y, 0, 0, types[d], types[d],
                           unary_names[cases[k].op]);
        }
}

static void test_unary_backward(void **state)
{
    (void)state;
    for (int op = 0; op < FSDP__UNARY_COUNT; op++)
        for (int k = 0; k < PAIRS * COUNTS * 2; k++) {
            fsdp_dtype t = pairs[k % PAIRS][0], dt = pairs[k % PAIRS][1];
            int64_t n = counts[k / PAIRS % COUNTS];
            int add = k / PAIRS / COUNTS;
            double p = (float)power_of((fsdp__unary)op, k / PAIRS);
            void *x = check_array(t, n, (uint64_t)k, 4), *dy = check_array(t, n, 77, 1);
            void *dx = check_array(dt, n, 78, 1), *before = check_copy(dx, dt, n);
            for (int64_t i = 0; i < n && needs_positive((fsdp__unary)op); i++)
                check_set(x, t, i, fabs(check_get(x, t, i)) + 0.125);
            void *y = check_copy(x, t, n);
            fsdp__k_unary((fsdp__unary)op, x, t, n, p, y);
            fsdp__k_unary_backward((fsdp__unary)op, x, y, t, dy, n, p, dx, dt, add);
            for (int64_t i = 0; i < n; i++) {
                double size, v = check_get(x, t, i), d = check_get(dy, t, i);
                double want = d * slope_want((fsdp__unary)op, v, check_get(y, t, i), p, &size);
                size = size * fabs(d);
                if (add) size += fabs(check_get(before, dt, i));
                if (add) want += check_get(before, dt, i);
                check_near(check_get(dx, dt, i), want, size, unary_ulps((fsdp__unary)op, v) + 4, t,
                           dt, unary_names[op]);
            }
            free(x), free(y), free(dy), free(dx), free(before);
        }
}

/* An element's bits are the same alone, in a tail and in the middle of a vector. */
static void test_place(void **state)
{
    (void)state;
    enum { N = 67 };
    for (int op = 0; op < FSDP__UNARY_COUNT; op++)
        for (int d = 0; d < 2; d++) {
            fsdp_dtype t = types[d];
            void *x = check_array(t, N, 5, 3), *dy = check_array(t, N, 6, 1);
            void *y = check_copy(x, t, N), *dx = check_copy(x, t, N);
            fsdp__k_unary((fsdp__unary)op, x, t, N, 1.5, y);
            fsdp__k_unary_backward((fsdp__unary)op, x, y, t, dy, N, 1.5, dx, t, 0);
            for (int64_t first = 0; first < N; first++)
                for (int64_t n = 1; n <= 18 && first + n <= N; n++) {
                    double one[18], two[18];
                    fsdp__k_unary((fsdp__unary)op, fsdp__cat(x, t, first), t, n, 1.5, one);
                    fsdp__k_unary_backward((fsdp__unary)op, fsdp__cat(x, t, first),
                                           fsdp__cat(y, t, first), t, fsdp__cat(dy, t, first), n,
                                           1.5, two, t, 0);
                    assert_memory_equal(one, fsdp__cat(y, t, first), bytes_of(t, n));
                    assert_memory_equal(two, fsdp__cat(dx, t, first), bytes_of(t, n));
                }
            free(x), free(y), free(dy), free(dx);
        }
}

/* ---- of two inputs ------------------------------------------------------------- */

static double binary_want(int op, double a, double b)
{
    return op == FSDP__BINARY_ADD   ? a + b
           : op == FSDP__BINARY_SUB ? a - b
           : op == FSDP__BINARY_MUL ? a * b
                                    : a / b;
}

typedef struct shape {
    int ndim;
    int64_t size[4], a[4], b[4]; /* strides */
} shape;

static const shape shapes[] = {
    {0, {0}, {0}, {0}},
    {1, {37}, {1}, {1}},
    {1, {0}, {1}, {1}},
    {1, {1000}, {1}, {0}},
    {2, {5, 33}, {33, 1}, {0, 1}}, /* a row for all */
    {2, {33, 5}, {5, 1}, {1, 0}},  /* a column for all */
    {2, {7, 19}, {1, 7}, {19, 1}}, /* a transpose */
    {3, {3, 4, 21}, {84, 21, 1}, {21, 0, 1}},
    {3, {2, 0, 5}, {5, 5, 1}, {5, 5, 1}},
    {4, {2, 3, 4, 5}, {60, 20, 5, 1}, {0, 5, 0, 1}},
    {2, {9, 17}, {40, 2}, {17, 1}},      /* every second one */
    {2, {300, 200}, {200, 1}, {200, 1}}, /* more than a part */
    {2, {3, 40000}, {40000, 1}, {0, 1}},
};

static void check_binary(int op, const shape *s, fsdp_dtype t, fsdp_dtype dt, int add)
{
    int64_t n = 1, na = 1, nb = 1;
    for (int d = 0; d < s->ndim; d++) {
        n *= s->size[d];
        na += (s->size[d] > 0 ? s->size[d] - 1 : 0) * s->a[d];
        nb += (s->size[d] > 0 ? s->size[d] - 1 : 0) * s->b[d];
    }
    void *a = check_array(t, na, 1, 2), *b = check_array(t, nb, 2, 2);
    void *y = check_array(dt, n, 3, 1), *before = check_copy(y, dt, n);
    void *again = check_copy(y, dt, n);
    fsdp_set_threads(2);
    fsdp__k_binary((fsdp__binary)op, s->ndim, s->size, a, s->a, b, s->b, t, y, dt, add);
    fsdp_set_threads(1);
    fsdp__k_binary((fsdp__binary)op, s->ndim, s->size, a, s->a, b, s->b, t, again, dt, add);
    assert_memory_equal(y, again, bytes_of(dt, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t at_a = 0, at_b = 0, rest = i;
        for (int d = s->ndim - 1; d >= 0; d--) {
            at_a += rest % s->size[d] * s->a[d];
            at_b += rest % s->size[d] * s->b[d];
            rest /= s->size[d];
        }
        /* The plain form gives the same bits. */
        double plain = check_get(before, dt, i);
        char one[8];
        memcpy(one, fsdp__cat(before, dt, i), fsdp_dtype_size(dt));
        fsdp__kernel_set_plain(t)->binary((fsdp__binary)op, 1, fsdp__cat(a, t, at_a), 1,
                                          fsdp__cat(b, t, at_b), 1, t, one, dt, add);
        assert_memory_equal(one, fsdp__cat(y, dt, i), fsdp_dtype_size(dt));
        double u = check_get(a, t, at_a), v = check_get(b, t, at_b);
        double want = binary_want(op, u, v) + (add ? plain : 0);
        check_near(check_get(y, dt, i), want, fabs(plain) + fabs(u) + fabs(v), 1, t, dt, "binary");
    }
    free(a), free(b), free(y), free(before), free(again);
}

static void test_binary(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        int big = shapes[k].size[0] * shapes[k].size[1] > 10000 && shapes[k].ndim == 2;
        for (int op = 0; op < 4; op++)
            for (int d = 0; d < (big ? 2 : PAIRS); d++)
                for (int add = 0; add < 2; add++)
                    check_binary(op, &shapes[k], pairs[d][0], pairs[d][1], add);
    }
}

static void check_swiglu(fsdp_dtype t, fsdp_dtype dt, int64_t n, int add)
{
    void *a = check_array(t, n, 1, 6), *b = check_array(t, n, 2, 2), *dy = check_array(t, n, 3, 1);
    void *y = check_copy(a, t, n), *da = check_array(dt, n, 4, 1), *db = check_array(dt, n, 5, 1);
    void *da0 = check_copy(da, dt, n), *db0 = check_copy(db, dt, n);
    fsdp__k_swiglu(a, b, t, n, y);
    fsdp__k_swiglu_backward(a, b, t, dy, n, da, dt, add, db, dt, !add);
    for (int64_t i = 0; i < n; i++) {
        double u = check_get(a, t, i), v = check_get(b, t, i), d = check_get(dy, t, i);
        double s = sigmoid(u), size = fabs(d * v) * s * (1 + fabs(u)), want;
        check_near(check_get(y, t, i), u * s * v, 0, 6, t, t, "swiglu");
        want = d * v * s * (1 + u * (1 - s)) + (add ? check_get(da0, dt, i) : 0);
        check_near(check_get(da, dt, i), want, size + 1, 6, t, dt, "swiglu da");
        want = d * u * s + (add ? 0 : check_get(db0, dt, i));
        check_near(check_get(db, dt, i), want, 1, 6, t, dt, "swiglu db");
    }
    /* One of the two alone. */
    void *alone = check_copy(da0, dt, n);
    fsdp__k_swiglu_backward(a, b, t, dy, n, alone, dt, add, NULL, dt, 0);
    assert_memory_equal(alone, da, bytes_of(dt, n));
    memcpy(alone, db0, bytes_of(dt, n));
    fsdp__k_swiglu_backward(a, b, t, dy, n, NULL, dt, 0, alone, dt, !add);
    assert_memory_equal(alone, db, bytes_of(dt, n));
    free(a), free(b), free(dy), free(y), free(da), free(db), free(da0), free(db0), free(alone);
}

static void test_swiglu(void **state)
{
    (void)state;
    for (int d = 0; d < PAIRS; d++)
        for (int k = 0; k < COUNTS; k++)
            for (int add = 0; add < 2; add++)
                check_swiglu(pairs[d][0], pairs[d][1], counts[k], add);
}

/* ---- dropout, fill, threads ------------------------------------------------------ */

static void check_dropout(fsdp_dtype t, fsdp_dtype dt, int64_t rows, int64_t per, double p, int add)
{
    int64_t n = rows * per;
    void *x = check_array(t, n, 1, 2), *y = check_array(dt, n, 2, 1), *y0 = check_copy(y, dt, n);
    uint64_t keys[5] = {3, 1, 4, 1, 5};
    fsdp__k_dropout(x, t, rows, per, keys, p, y, dt, add);
    for (int64_t i = 0; i < n; i++) {
        int kept = (double)fsdp__rng_uniform(keys[i / per], (uint64_t)(i % per)) >= p;
        double before = add ? check_get(y0, dt, i) : 0;
        double want = before + (kept ? check_get(x, t, i) / (1 - p) : 0);
        check_near(check_get(y, dt, i), want, fabs(before), 2, t, dt, "dropout");
    }
    free(x), free(y), free(y0);
}

static void test_dropout(void **state)
{
    static const double rates[] = {0, 0.1, 0.5, 0.9, 1};
    (void)state;
    for (int d = 0; d < PAIRS; d++)
        for (int k = 0; k < 5; k++)
            for (int add = 0; add < 2; add++) {
                check_dropout(pairs[d][0], pairs[d][1], 3, 41, rates[k], add);
                check_dropout(pairs[d][0], pairs[d][1], 5, 1, rates[k], add);
                check_dropout(pairs[d][0], pairs[d][1], 0, 9, rates[k], add);
                check_dropout(pairs[d][0], pairs[d][1], 4, 0, rates[k], add);
            }
    check_dropout(FSDP_F32, FSDP_F32, 2, 40000, 0.3, 0);
}

static void test_fill(void **state)
{
    static const fsdp_dtype all[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64, FSDP_I64, FSDP_U8};
    static const int64_t sizes[] = {0, 1, 2, 5, 513, 4097, 40001};
    (void)state;
    for (int d = 0; d < 6; d++)
        for (int k = 0; k < 7; k++)
            for (int v = 0; v < 2; v++) {
                size_t size = fsdp_dtype_size(all[d]);
                char *y = malloc((size_t)sizes[k] * size + 1), want[8];
                double value = v ? 3 : 0;
                assert_non_null(y);
                fsdp__convert(want, all[d], &value, FSDP_F64, 1);
                y[(size_t)sizes[k] * size] = 'x';
                fsdp__k_fill(y, all[d], sizes[k], value);
                for (int64_t i = 0; i < sizes[k]; i++)
                    assert_memory_equal(y + (size_t)i * size, want, size);
                assert_int_equal(y[(size_t)sizes[k] * size], 'x');
                free(y);
            }
}

static void test_threads(void **state)
{
    enum { N = 100003 };
    (void)state;
    for (int d = 0; d < 2; d++) {
        fsdp_dtype t = types[d];
        void *x = check_array(t, N, 1, 3), *dy = check_array(t, N, 2, 1);
        void *out[2][4];
        for (int k = 0; k < 2; k++) {
            for (int j = 0; j < 4; j++)
                out[k][j] = check_copy(x, t, N);
            uint64_t keys[1] = {9};
            fsdp_set_threads(k + 1);
            fsdp__k_unary(FSDP__UNARY_gelu, x, t, N, 0, out[k][0]);
            fsdp__k_unary_backward(FSDP__UNARY_gelu, x, x, t, dy, N, 0, out[k][1], t, 1);
            fsdp__k_swiglu(x, dy, t, N, out[k][2]);
            fsdp__k_dropout(x, t, 1, N, keys, 0.25, out[k][3], t, 0);
        }
        for (int j = 0; j < 4; j++) {
            assert_memory_equal(out[0][j], out[1][j], bytes_of(t, N));
            free(out[0][j]), free(out[1][j]);
        }
        free(x), free(dy);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unary),      cmocka_unit_test(test_unary_range),
        cmocka_unit_test(test_unary_ends), cmocka_unit_test(test_unary_backward),
        cmocka_unit_test(test_place),      cmocka_unit_test(test_binary),
        cmocka_unit_test(test_swiglu),     cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_fill),       cmocka_unit_test(test_threads),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
