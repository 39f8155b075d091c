/*
 * test_autograd_gradcheck.c - the gradient of every op against finite
 * differences in f64.
 *
 * Each op of ops.def has a case here (the build fails on a hole). A case is a
 * function of some leaves; the check runs it with leaves stored plainly,
 * transposed and as slices of larger ones, with each leaf alone requiring a
 * gradient and all together, by way of an inner tensor (whose gradient waits
 * in a slot) and twice in one graph (whose second gradient is added).
 */
#include "tensor_check.h"

#include "tensor/op.h"

enum { MOST = 8, PLAIN = 0, TURNED = 1, SLICED = 2, LAYOUTS = 3 };

typedef struct input {
    int ndim;
    int64_t size[5];
    int positive; /* values in [0.5, 1.5) */
    int fixed;    /* layout: always plain */
    int swap;     /* turned: dims swap, swap + 1; 0: the last two */
} input;

typedef fsdp_tensor *(*function)(fsdp_tensor **x, const void *arg);

/* The stored leaf from which `view` makes the input. */
static fsdp_tensor *make_leaf(const input *in, int layout, int k)
{
    char name[16];
    int64_t size[5];
    memcpy(size, in->size, sizeof size);
    int a = in->swap ? in->swap : in->ndim - 2;
    if (layout == TURNED) {
        size[a] = in->size[a + 1];
        size[a + 1] = in->size[a];
    }
    if (layout == SLICED) {
        size[0] += 2;
        size[in->ndim - 1] += 3;
    }
    snprintf(name, sizeof name, "x%d", k);
    if (!in->positive) return fsdp_randn(FSDP_F64, in->ndim, size, 11, name);
    fsdp_tensor *x = fsdp_rand(FSDP_F64, in->ndim, size, 11, name);
    double *v = fsdp_data(x);
    for (int64_t i = 0; x && i < fsdp_numel(x); i++)
        v[i] += 0.5;
    return x;
}

static fsdp_tensor *view(const input *in, int layout, fsdp_tensor *leaf)
{
    int a = in->swap ? in->swap : in->ndim - 2;
    if (layout == TURNED) return fsdp_transpose(leaf, a, a + 1);
    if (layout == PLAIN) return leaf;
    int last = in->ndim - 1;
    fsdp_tensor *x = last > 0 ? fsdp_slice(leaf, 0, 1, 1 + in->size[0]) : leaf;
    return fsdp_slice(x, last, 2, 2 + in->size[last]);
}

static int layout_of(const input *in, int layout)
{
    if (in->fixed || in->ndim == 0) return PLAIN;
    return layout == TURNED && in->ndim < 2 ? PLAIN : layout;
}

enum { ONCE, INNER, TWICE, WAYS };

static fsdp_tensor *run(function f, const void *arg, const input *in, int n, fsdp_tensor **leaf,
                        int layout, int way)
{
    fsdp_tensor *x[MOST];
    for (int k = 0; k < n; k++) {
        x[k] = view(&in[k], layout_of(&in[k], layout), leaf[k]);
        if (way == INNER) x[k] = fsdp_shift(fsdp_scale(x[k], 1.0), 0.0);
    }
    /* Scaled views lose their layout: what is looked at there is the slot. */
    fsdp_tensor *y = f(x, arg);
    return way == TWICE ? fsdp_add(y, f(x, arg)) : y;
}

static double weighted(fsdp_tensor *y, const double *r)
{
    double s = 0, *v = check_values(y);
    check_tensor(v);
    for (int64_t i = 0; i < fsdp_numel(y); i++)
        s += v[i] * r[i];
    free(v);
    return s;
}

/* The derivative of sum(r * f) by element j of leaf k. */
static double difference(function f, const void *arg, const input *in, int n, fsdp_tensor **leaf,
                         int layout, int k, int64_t j, const double *r)
{
    const double e = 1e-5;
    double *at = (double *)fsdp_data(leaf[k]) + j, was = *at, v[2];
    fsdp_no_grad_begin();
    for (int s = 0; s < 2; s++) {
        fsdp_scope *scope = fsdp_scope_begin();
        *at = was + (s ? -e : e);
        v[s] = weighted(run(f, arg, in, n, leaf, layout, ONCE), r);
        fsdp_scope_end(scope);
    }
    fsdp_no_grad_end();
    *at = was;
    return (v[0] - v[1]) / (2 * e);
}

static void compare(const char *name, const fsdp_tensor *g, const double *numeric, int64_t n,
                    double times, int layout, int way, int k)
{
    if (!g && n == 0) return;
    assert_non_null(g);
    double *v = check_values(g), most = 1e-3;
    check_tensor(v);
    for (int64_t j = 0; j < n; j++)
        most = fabs(numeric[j]) > most ? fabs(numeric[j]) : most;
    for (int64_t j = 0; j < n; j++)
        if (!(fabs(v[j] - times * numeric[j]) <= 2e-7 * most * times))
            fail_msg("%s: layout %d, way %d, input %d, element %lld: %.10g; by differences %.10g",
                     name, layout, way, k, (long long)j, v[j], times * numeric[j]);
    free(v);
}

static void backward(function f, const void *arg, const input *in, int n, fsdp_tensor **leaf,
                     int layout, int way, const double *r, unsigned wanted)
{
    for (int k = 0; k < n; k++) {
        check_ok(fsdp_set_grad(leaf[k], NULL));
        check_ok(fsdp_requires_grad_(leaf[k], wanted >> k & 1));
    }
    fsdp_tensor *y = run(f, arg, in, n, leaf, layout, way);
    check_tensor(y);
    fsdp_tensor *g = check_make(FSDP_F64, fsdp_ndim(y), fsdp_sizes(y), r);
    check_ok(fsdp_backward_from(y, g, 0));
}

static void check(const char *name, function f, const void *arg, const input *in, int n)
{
    for (int layout = 0; layout < LAYOUTS; layout++) {
        int differs = layout == PLAIN;
        for (int k = 0; k < n; k++)
            differs = differs || layout_of(&in[k], layout) != PLAIN;
        if (!differs) continue;
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *leaf[MOST];
        double *numeric[MOST];
        for (int k = 0; k < n; k++)
            check_tensor(leaf[k] = make_leaf(&in[k], layout_of(&in[k], layout), k));
        fsdp_tensor *y = run(f, arg, in, n, leaf, layout, ONCE);
        check_tensor(y);
        double *r = calloc((size_t)fsdp_numel(y) + 1, sizeof *r);
        assert_non_null(r);
        for (int64_t i = 0; i < fsdp_numel(y); i++)
            r[i] = sin(1.0 + 1.7 * (double)i) + 0.1;
        for (int k = 0; k < n; k++) {
            int64_t m = fsdp_numel(leaf[k]);
            numeric[k] = calloc((size_t)m + 1, sizeof **numeric);
            assert_non_null(numeric[k]);
            for (int64_t j = 0; j < m; j++)
                numeric[k][j] = difference(f, arg, in, n, leaf, layout, k, j, r);
        }
        for (int way = 0; way < WAYS; way++)
            for (int only = -1; only < (n > 1 && way != TWICE ? n : 0); only++) {
                unsigned wanted = only < 0 ? (1u << n) - 1 : 1u << only;
                backward(f, arg, in, n, leaf, layout, way, r, wanted);
                for (int k = 0; k < n; k++)
                    if (wanted >> k & 1)
                        compare(name, fsdp_grad(leaf[k]), numeric[k], fsdp_numel(leaf[k]),
                                way == TWICE ? 2 : 1, layout, way, k);
                    else
                        assert_null(fsdp_grad(leaf[k]));
            }
        for (int k = 0; k < n; k++)
            free(numeric[k]);
        free(r);
        fsdp_scope_end(scope);
    }
}

#define CHECK(f, arg, ...)                                         \
    do {                                                           \
        const input in_[] = {__VA_ARGS__};                         \
        check(#f, f, arg, in_, (int)(sizeof in_ / sizeof in_[0])); \
    } while (0)

/* ---- shape ----------------------------------------------------------------- */

static fsdp_tensor *f_reshape(fsdp_tensor **x, const void *arg)
{
    const int64_t *a = arg;
    return fsdp_reshape(x[0], (int)a[0], a + 1);
}

static void case_reshape(void **state)
{
    (void)state;
    CHECK(f_reshape, SIZES(2, 3, -1), {3, {3, 5, 2}, 0, 0, 0});
    CHECK(f_reshape, SIZES(1, 30), {3, {3, 5, 2}, 0, 0, 0});
    CHECK(f_reshape, SIZES(4, 3, 1, 5, 2), {3, {3, 5, 2}, 0, 0, 0});
    CHECK(f_reshape, SIZES(0), {2, {1, 1}, 0, 0, 0});
    CHECK(f_reshape, SIZES(2, 7, 0), {2, {0, 5}, 0, 1, 0});
}

static fsdp_tensor *f_transpose(fsdp_tensor **x, const void *arg)
{
    const int64_t *a = arg;
    return fsdp_transpose(x[0], (int)a[0], (int)a[1]);
}

static void case_transpose(void **state)
{
    (void)state;
    CHECK(f_transpose, SIZES(0, 1), {2, {3, 5}, 0, 0, 0});
    CHECK(f_transpose, SIZES(-1, 0), {4, {2, 3, 1, 5}, 0, 0, 0});
    CHECK(f_transpose, SIZES(1, 1), {2, {3, 5}, 0, 0, 0});
}

static fsdp_tensor *f_slice(fsdp_tensor **x, const void *arg)
{
    const int64_t *a = arg;
    return fsdp_slice(x[0], (int)a[0], a[1], a[2]);
}

static fsdp_tensor *f_slices(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_add(fsdp_slice(x[0], 0, 0, 3), fsdp_slice(x[0], 0, 1, 4));
}

static void case_slice(void **state)
{
    (void)state;
    CHECK(f_slice, SIZES(0, 1, 3), {2, {5, 3}, 0, 0, 0});
    CHECK(f_slice, SIZES(-1, -2, 3), {3, {2, 4, 3}, 0, 0, 0});
    CHECK(f_slice, SIZES(1, 2, 2), {2, {5, 3}, 0, 0, 0});
    CHECK(f_slices, NULL, {2, {5, 3}, 0, 0, 0}); /* parts that overlap */
}

static fsdp_tensor *f_cat(fsdp_tensor **x, const void *arg)
{
    return fsdp_cat(x, 3, *(const int *)arg);
}

static fsdp_tensor *f_cat_same(fsdp_tensor **x, const void *arg)
{
    fsdp_tensor *y[] = {x[0], x[0], x[0]};
    return fsdp_cat(y, 3, *(const int *)arg);
}

static void case_cat(void **state)
{
    (void)state;
    int zero = 0, last = -1;
    CHECK(f_cat, &zero, {2, {2, 3}, 0, 0, 0}, {2, {1, 3}, 0, 0, 0}, {2, {4, 3}, 0, 0, 0});
    CHECK(f_cat, &last, {3, {2, 3, 1}, 0, 0, 0}, {3, {2, 3, 5}, 0, 0, 0}, {3, {2, 3, 2}, 0, 0, 0});
    CHECK(f_cat, &zero, {1, {2}, 0, 1, 0}, {1, {0}, 0, 1, 0}, {1, {3}, 0, 1, 0});
    CHECK(f_cat_same, &zero, {2, {2, 3}, 0, 0, 0});
}

static fsdp_tensor *f_cast(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_cast(x[0], FSDP_F64);
}

/* Casts round, so differences say nothing of them: what comes back is looked at. */
static void case_cast(void **state)
{
    (void)state;
    CHECK(f_cast, NULL, {2, {3, 5}, 0, 0, 0});
    fsdp_scope *scope = fsdp_scope_begin();
    const fsdp_dtype to[] = {FSDP_F32, FSDP_BF16, FSDP_F16, FSDP_F64};
    for (int a = 0; a < 4; a++)
        for (int b = 0; b < 4; b++) {
            fsdp_tensor *x = fsdp_cast(fsdp_randn(FSDP_F64, 2, SIZES(3, 5), 1, "x"), to[a]);
            check_ok(fsdp_requires_grad_(x, 1));
            fsdp_tensor *t = fsdp_transpose(x, 0, 1), *y = fsdp_cast(t, to[b]);
            assert_int_equal(fsdp_tensor_dtype(y), to[b]);
            fsdp_tensor *r = fsdp_cast(fsdp_randn(FSDP_F64, 2, SIZES(5, 3), 1, "r"), to[b]);
            check_ok(fsdp_backward_from(y, r, 0));
            fsdp_no_grad_begin();
            fsdp_tensor *expected = fsdp_contiguous(fsdp_transpose(fsdp_cast(r, to[a]), 0, 1));
            fsdp_no_grad_end();
            assert_true(check_same_bits(fsdp_grad(x), expected));
        }
    /* Integers end the graph. */
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 1, SIZES(3), 1, "x");
    check_ok(fsdp_requires_grad_(x, 1));
    assert_false(fsdp_requires_grad(fsdp_cast(x, FSDP_I64)));
    fsdp_scope_end(scope);
}

static fsdp_tensor *f_clone(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_mul(fsdp_clone(x[0]), fsdp_contiguous(x[0]));
}

static void case_clone(void **state)
{
    (void)state;
    CHECK(f_clone, NULL, {3, {3, 1, 5}, 0, 0, 0});
    CHECK(f_clone, NULL, {0, {0}, 0, 0, 0});
}

/* ---- arithmetic -------------------------------------------------------------- */

#define TWO(name)                                                             \
    static fsdp_tensor *f_##name(fsdp_tensor **x, const void *arg)            \
    {                                                                         \
        (void)arg;                                                            \
        return fsdp_##name(x[0], x[1]);                                       \
    }                                                                         \
    static fsdp_tensor *f_##name##_same(fsdp_tensor **x, const void *arg)     \
    {                                                                         \
        (void)arg;                                                            \
        return fsdp_##name(x[0], x[0]);                                       \
    }                                                                         \
    static void case_##name(void **state)                                     \
    {                                                                         \
        (void)state;                                                          \
        CHECK(f_##name, NULL, {2, {3, 5}, 1, 0, 0}, {2, {3, 5}, 1, 0, 0});    \
        CHECK(f_##name, NULL, {3, {3, 1, 5}, 1, 0, 0}, {2, {4, 1}, 1, 0, 0}); \
        CHECK(f_##name, NULL, {1, {5}, 1, 0, 0}, {3, {2, 3, 5}, 1, 0, 0});    \
        CHECK(f_##name, NULL, {0, {0}, 1, 0, 0}, {2, {3, 5}, 1, 0, 0});       \
        CHECK(f_##name, NULL, {2, {3, 5}, 1, 0, 0}, {2, {1, 1}, 1, 0, 0});    \
        CHECK(f_##name, NULL, {2, {0, 5}, 1, 1, 0}, {1, {5}, 1, 0, 0});       \
        CHECK(f_##name##_same, NULL, {2, {3, 5}, 1, 0, 0});                   \
    }
TWO(add)
TWO(sub)
TWO(mul)
TWO(div)

#define ONE(name, expression, positive)                            \
    static fsdp_tensor *f_##name(fsdp_tensor **x, const void *arg) \
    {                                                              \
        (void)arg;                                                 \
        return expression;                                         \
    }                                                              \
    static void case_##name(void **state)                          \
    {                                                              \
        (void)state;                                               \
        CHECK(f_##name, NULL, {2, {3, 7}, positive, 0, 0});        \
        CHECK(f_##name, NULL, {3, {2, 1, 19}, positive, 0, 0});    \
        CHECK(f_##name, NULL, {0, {0}, positive, 0, 0});           \
        CHECK(f_##name, NULL, {2, {0, 3}, positive, 1, 0});        \
    }
ONE(scale, fsdp_scale(x[0], -2.5), 0)
ONE(shift, fsdp_shift(x[0], 3.25), 0)
ONE(exp, fsdp_exp(x[0]), 0)
ONE(log, fsdp_log(x[0]), 1)
ONE(sqrt, fsdp_sqrt(x[0]), 1)
ONE(silu, fsdp_silu(x[0]), 0)
ONE(gelu, fsdp_gelu(x[0]), 0)
ONE(gelu_tanh, fsdp_gelu_tanh(x[0]), 0)
ONE(relu, fsdp_relu(x[0]), 0)
ONE(tanh, fsdp_tanh(x[0]), 0)
ONE(sigmoid, fsdp_sigmoid(x[0]), 0)

static fsdp_tensor *f_pow(fsdp_tensor **x, const void *arg)
{
    return fsdp_pow(x[0], *(const double *)arg);
}

static void case_pow(void **state)
{
    (void)state;
    const double exponents[] = {2, 3, 0.5, -1, -1.5, 1, 0};
    for (size_t i = 0; i < sizeof exponents / sizeof exponents[0]; i++)
        CHECK(f_pow, &exponents[i], {2, {3, 7}, 1, 0, 0});
    CHECK(f_pow, &exponents[0], {1, {5}, 0, 0, 0}); /* negative numbers squared */
    CHECK(f_pow, &exponents[1], {1, {5}, 0, 0, 0});
}

static fsdp_tensor *f_swiglu(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_swiglu(x[0], x[1]);
}

static fsdp_tensor *f_swiglu_same(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_swiglu(x[0], x[0]);
}

static void case_swiglu(void **state)
{
    (void)state;
    CHECK(f_swiglu, NULL, {2, {3, 7}, 0, 0, 0}, {2, {3, 7}, 0, 0, 0});
    CHECK(f_swiglu, NULL, {3, {2, 0, 7}, 0, 1, 0}, {3, {2, 0, 7}, 0, 1, 0});
    CHECK(f_swiglu_same, NULL, {2, {3, 7}, 0, 0, 0});
}

static fsdp_tensor *f_softmax(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_softmax(x[0]);
}

static void case_softmax(void **state)
{
    (void)state;
    CHECK(f_softmax, NULL, {2, {3, 7}, 0, 0, 0});
    CHECK(f_softmax, NULL, {3, {2, 3, 1}, 0, 0, 0});
    CHECK(f_softmax, NULL, {1, {17}, 0, 0, 0});
    CHECK(f_softmax, NULL, {2, {0, 4}, 0, 1, 0});
}

/* The same keys in each run: a new microbatch of the same samples. */
static fsdp_tensor *f_dropout(fsdp_tensor **x, const void *arg)
{
    const uint64_t ids[] = {5, 9};
    if (fsdp_random_set(3, 4, ids, 2) != FSDP_OK) return NULL;
    return fsdp_dropout(x[0], *(const double *)arg);
}

static void case_dropout(void **state)
{
    (void)state;
    const double p[] = {0.0, 0.3, 0.9};
    for (int i = 0; i < 3; i++) {
        CHECK(f_dropout, &p[i], {2, {4, 7}, 0, 0, 0});
        CHECK(f_dropout, &p[i], {3, {2, 3, 5}, 0, 0, 0});
    }
    check_ok(fsdp_random_set(0, 0, NULL, 0));
}

/* ---- sums --------------------------------------------------------------------- */

typedef struct sum_arg {
    int all, dim, keep, mean;
} sum_arg;

static fsdp_tensor *f_sum(fsdp_tensor **x, const void *arg)
{
    const sum_arg *a = arg;
    if (a->all) return a->mean ? fsdp_mean(x[0]) : fsdp_sum(x[0]);
    return a->mean ? fsdp_mean_dim(x[0], a->dim, a->keep) : fsdp_sum_dim(x[0], a->dim, a->keep);
}

static void case_sum(void **state)
{
    (void)state;
    for (int mean = 0; mean < 2; mean++) {
        sum_arg all = {1, 0, 0, mean};
        CHECK(f_sum, &all, {2, {3, 7}, 0, 0, 0});
        CHECK(f_sum, &all, {0, {0}, 0, 0, 0});
        for (int dim = -1; dim < 3; dim++)
            for (int keep = 0; keep < 2; keep++) {
                sum_arg a = {0, dim, keep, mean};
                CHECK(f_sum, &a, {3, {3, 5, 2}, 0, 0, 0});
            }
    }
    sum_arg all = {1, 0, 0, 0}, none = {0, 1, 0, 0};
    CHECK(f_sum, &all, {2, {3, 0}, 0, 1, 0});
    CHECK(f_sum, &none, {2, {3, 0}, 0, 1, 0});
}

/* ---- layers --------------------------------------------------------------------- */

static fsdp_tensor *f_linear(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_linear(x[0], x[1]);
}

static fsdp_tensor *f_linear_bias(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_linear_bias(x[0], x[1], x[2]);
}

static fsdp_tensor *f_linear_in_out(fsdp_tensor **x, const void *arg)
{
    return fsdp_linear_in_out(x[0], x[1], arg ? x[2] : NULL);
}

static fsdp_tensor *f_linear_same(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_linear(x[0], x[0]);
}

static void case_linear(void **state)
{
    (void)state;
    CHECK(f_linear, NULL, {3, {2, 3, 7}, 0, 0, 0}, {2, {5, 7}, 0, 0, 0});
    CHECK(f_linear, NULL, {1, {7}, 0, 0, 0}, {2, {5, 7}, 0, 0, 0});
    CHECK(f_linear, NULL, {2, {0, 7}, 0, 1, 0}, {2, {5, 7}, 0, 0, 0});
    CHECK(f_linear, NULL, {2, {3, 1}, 0, 0, 0}, {2, {1, 1}, 0, 0, 0});
    CHECK(f_linear_bias, NULL, {2, {4, 3}, 0, 0, 0}, {2, {5, 3}, 0, 0, 0}, {1, {5}, 0, 0, 0});
    CHECK(f_linear_in_out, NULL, {2, {4, 3}, 0, 0, 0}, {2, {3, 5}, 0, 0, 0});
    CHECK(f_linear_in_out, "b", {2, {4, 3}, 0, 0, 0}, {2, {3, 5}, 0, 0, 0}, {1, {5}, 0, 0, 0});
    CHECK(f_linear_same, NULL, {2, {3, 4}, 0, 0, 0});
}

static fsdp_tensor *f_matmul(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_matmul(x[0], x[1]);
}

static fsdp_tensor *f_matmul_same(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_matmul(x[0], x[0]);
}

static void case_matmul(void **state)
{
    (void)state;
    CHECK(f_matmul, NULL, {2, {3, 5}, 0, 0, 0}, {2, {5, 2}, 0, 0, 0});
    CHECK(f_matmul, NULL, {4, {2, 3, 1, 5}, 0, 0, 0}, {4, {2, 3, 5, 2}, 0, 0, 0});
    CHECK(f_matmul, NULL, {3, {2, 3, 5}, 0, 0, 0}, {2, {5, 4}, 0, 0, 0});
    CHECK(f_matmul, NULL, {2, {3, 0}, 0, 1, 0}, {2, {0, 4}, 0, 1, 0});
    CHECK(f_matmul, NULL, {3, {0, 3, 2}, 0, 1, 0}, {3, {0, 2, 4}, 0, 1, 0});
    CHECK(f_matmul_same, NULL, {3, {2, 3, 3}, 0, 0, 0});
}

static fsdp_tensor *ids(int ndim, const int64_t *sizes, int64_t most, int64_t step)
{
    fsdp_tensor *t = fsdp_empty(FSDP_I64, ndim, sizes);
    int64_t *p = fsdp_data(t);
    for (int64_t i = 0; t && i < fsdp_numel(t); i++)
        p[i] = (i * step + 1) % most;
    return t;
}

static fsdp_tensor *f_embedding(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_embedding(x[0], ids(2, SIZES(3, 4), 5, 2)); /* rows come more than once */
}

static fsdp_tensor *f_embedding_strided(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_embedding(x[0], fsdp_transpose(ids(2, SIZES(3, 4), 5, 3), 0, 1));
}

static void case_embedding(void **state)
{
    (void)state;
    CHECK(f_embedding, NULL, {2, {5, 3}, 0, 0, 0});
    CHECK(f_embedding_strided, NULL, {2, {5, 1}, 0, 0, 0});
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *w = fsdp_zeros(FSDP_F32, 2, SIZES(5, 3)), *t = fsdp_zeros(FSDP_I64, 1, SIZES(2));
    ((int64_t *)fsdp_data(t))[1] = 5;
    assert_null(fsdp_embedding(w, t));
    check_error(FSDP_INVALID_DATA, "5");
    fsdp_scope_end(scope);
}

static fsdp_tensor *f_rms_norm(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_rms_norm(x[0], x[1], 1e-5);
}

static fsdp_tensor *f_rms_norm_same(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_rms_norm(x[0], x[0], 1e-5);
}

static void case_rms_norm(void **state)
{
    (void)state;
    CHECK(f_rms_norm, NULL, {3, {2, 3, 7}, 0, 0, 0}, {1, {7}, 0, 0, 0});
    CHECK(f_rms_norm, NULL, {2, {5, 1}, 0, 0, 0}, {1, {1}, 0, 0, 0});
    CHECK(f_rms_norm, NULL, {2, {0, 3}, 0, 1, 0}, {1, {3}, 0, 0, 0});
    CHECK(f_rms_norm_same, NULL, {1, {7}, 0, 0, 0});
}

static fsdp_tensor *f_layer_norm(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_layer_norm(x[0], x[1], x[2], 1e-5);
}

static fsdp_tensor *f_layer_norm_same(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_layer_norm(x[0], x[0], x[0], 1e-5);
}

static void case_layer_norm(void **state)
{
    (void)state;
    CHECK(f_layer_norm, NULL, {3, {2, 3, 7}, 0, 0, 0}, {1, {7}, 0, 0, 0}, {1, {7}, 0, 0, 0});
    CHECK(f_layer_norm, NULL, {2, {0, 3}, 0, 1, 0}, {1, {3}, 0, 0, 0}, {1, {3}, 0, 0, 0});
    CHECK(f_layer_norm_same, NULL, {1, {7}, 0, 0, 0});
}

/* arg NULL: training; else by kept statistics. */
static fsdp_tensor *f_batch_norm(fsdp_tensor **x, const void *arg)
{
    static const double kept[2][3] = {{0.3, -0.2, 0.1}, {0.7, 1.5, 1.0}};
    fsdp_tensor *mean = NULL, *var = NULL;
    if (arg) {
        mean = check_make(FSDP_F64, 1, SIZES(3), kept[0]);
        var = check_make(FSDP_F64, 1, SIZES(3), kept[1]);
    }
    return fsdp_batch_norm(x[0], x[1], x[2], mean, var, arg == NULL, 0.1, 1e-5);
}

static fsdp_tensor *f_batch_norm_plain(fsdp_tensor **x, const void *arg)
{
    (void)arg;
    return fsdp_batch_norm(x[0], NULL, NULL, NULL, NULL, 1, 0.1, 1e-5);
}

static void case_batch_norm(void **state)
{
    (void)state;
    const void *args[2] = {NULL, "kept"};
    for (int k = 0; k < 2; k++) {
        CHECK(f_batch_norm, args[k], {2, {5, 3}, 0, 0, 0}, {1, {3}, 0, 0, 0}, {1, {3}, 0, 0, 0});
        CHECK(f_batch_norm, args[k], {4, {2, 3, 4, 5}, 0, 0, 0}, {1, {3}, 0, 0, 0},
              {1, {3}, 0, 0, 0});
    }
    CHECK(f_batch_norm, "kept", {2, {0, 3}, 0, 1, 0}, {1, {3}, 0, 0, 0}, {1, {3}, 0, 0, 0});
    CHECK(f_batch_norm_plain, NULL, {3, {3, 4, 2}, 0, 0, 0});
}

static fsdp_tensor *f_rotary(fsdp_tensor **x, const void *arg)
{
    int batched = *(const int *)arg;
    int64_t T = fsdp_size(x[0], 1), half = fsdp_size(x[0], 3) / 2, B = fsdp_size(x[0], 0);
    int64_t sizes[] = {B, T, half}, *s = sizes + !batched;
    fsdp_tensor *c = fsdp_empty(FSDP_F32, 2 + batched, s),
                *n = fsdp_empty(FSDP_F32, 2 + batched, s);
    float *pc = fsdp_data(c), *pn = fsdp_data(n);
    for (int64_t i = 0; i < fsdp_numel(c); i++) {
        pc[i] = (float)cos(0.3 * (double)i);
        pn[i] = (float)sin(0.3 * (double)i);
    }
    return fsdp_rotary(x[0], c, n);
}

static void case_rotary(void **state)
{
    (void)state;
    for (int batched = 0; batched < 2; batched++) {
        CHECK(f_rotary, &batched, {4, {2, 3, 5, 4}, 0, 0, 1});
        CHECK(f_rotary, &batched, {4, {1, 1, 1, 2}, 0, 0, 1});
        CHECK(f_rotary, &batched, {4, {2, 3, 1, 6}, 0, 0, 1});
    }
}

static fsdp_tensor *f_attention(fsdp_tensor **x, const void *arg)
{
    const uint64_t samples[] = {5, 9};
    if (fsdp_random_set(3, 4, samples, 2) != FSDP_OK) return NULL;
    return fsdp_attention(x[0], x[1], x[2], arg);
}

static fsdp_tensor *f_attention_same(fsdp_tensor **x, const void *arg)
{
    return fsdp_attention(x[0], x[0], x[0], arg);
}

static fsdp_tensor *f_attention_kv(fsdp_tensor **x, const void *arg)
{
    return fsdp_attention(x[0], x[1], x[1], arg);
}

static void case_attention(void **state)
{
    (void)state;
    const fsdp_attention_options o[] = {
        {0, 0, 0, 0},   {0.7, 0, 0, 0}, {0, 1, 0, 0},     {0, 0, 2, 0},
        {0, 0, 1, 0.0}, {0, 0, 0, 0.3}, {0.3, 0, 3, 0.5}, {0, 1, 0, 0.2},
    };
    for (size_t i = 0; i < sizeof o / sizeof o[0]; i++) {
        CHECK(f_attention, &o[i], {4, {2, 5, 4, 3}, 0, 0, 1}, {4, {2, 5, 2, 3}, 0, 0, 1},
              {4, {2, 5, 2, 3}, 0, 0, 1});
        CHECK(f_attention, &o[i], {4, {2, 2, 3, 4}, 0, 0, 1}, {4, {2, 5, 1, 4}, 0, 0, 1},
              {4, {2, 5, 1, 4}, 0, 0, 1}); /* fewer queries than keys */
        if (o[i].dropout_p > 0) continue;
        CHECK(f_attention_same, &o[i], {4, {2, 4, 2, 3}, 0, 0, 1});
        CHECK(f_attention_kv, &o[i], {4, {2, 4, 2, 3}, 0, 0, 1}, {4, {2, 4, 1, 3}, 0, 0, 1});
    }
    check_ok(fsdp_random_set(0, 0, NULL, 0));
}

/* ---- losses ------------------------------------------------------------------------ */

static fsdp_tensor *targets(int ndim, const int64_t *sizes, int64_t most)
{
    fsdp_tensor *t = ids(ndim, sizes, most, 3);
    if (t && fsdp_numel(t) > 1) ((int64_t *)fsdp_data(t))[1] = -100;
    return t;
}

static fsdp_tensor *f_cross_entropy(fsdp_tensor **x, const void *arg)
{
    int nd = fsdp_ndim(x[0]) - 1;
    fsdp_tensor *t = targets(nd, fsdp_sizes(x[0]), fsdp_size(x[0], -1));
    return fsdp_cross_entropy(x[0], t, -100, *(const fsdp_reduction *)arg);
}

static const fsdp_reduction reductions[] = {FSDP_REDUCE_MEAN, FSDP_REDUCE_SUM};

static void case_cross_entropy(void **state)
{
    (void)state;
    for (int r = 0; r < 2; r++) {
        CHECK(f_cross_entropy, &reductions[r], {2, {5, 7}, 0, 0, 0});
        CHECK(f_cross_entropy, &reductions[r], {3, {2, 3, 4}, 0, 0, 0});
        CHECK(f_cross_entropy, &reductions[r], {1, {7}, 0, 0, 0});
    }
}

static fsdp_tensor *f_head(fsdp_tensor **x, const void *arg)
{
    fsdp_tensor *t = targets(fsdp_ndim(x[0]) - 1, fsdp_sizes(x[0]), fsdp_size(x[1], 0));
    return fsdp_head_cross_entropy(x[0], x[1], NULL, t, -100, *(const fsdp_reduction *)arg);
}

static fsdp_tensor *f_head_bias(fsdp_tensor **x, const void *arg)
{
    fsdp_tensor *t = targets(fsdp_ndim(x[0]) - 1, fsdp_sizes(x[0]), fsdp_size(x[1], 0));
    return fsdp_head_cross_entropy(x[0], x[1], x[2], t, -100, *(const fsdp_reduction *)arg);
}

static fsdp_tensor *f_head_same(fsdp_tensor **x, const void *arg)
{
    fsdp_tensor *t = targets(1, fsdp_sizes(x[0]), fsdp_size(x[0], 0));
    return fsdp_head_cross_entropy(x[0], x[0], NULL, t, -100, *(const fsdp_reduction *)arg);
}

static void case_head_cross_entropy(void **state)
{
    (void)state;
    for (int r = 0; r < 2; r++) {
        CHECK(f_head, &reductions[r], {3, {2, 3, 4}, 0, 0, 0}, {2, {7, 4}, 0, 0, 0});
        CHECK(f_head_bias, &reductions[r], {2, {5, 3}, 0, 0, 0}, {2, {7, 3}, 0, 0, 0},
              {1, {7}, 0, 0, 0});
        CHECK(f_head_same, &reductions[r], {2, {5, 3}, 0, 0, 0});
    }
}

static fsdp_tensor *f_mse_loss(fsdp_tensor **x, const void *arg)
{
    return fsdp_mse_loss(x[0], x[1], *(const fsdp_reduction *)arg);
}

static void case_mse_loss(void **state)
{
    (void)state;
    for (int r = 0; r < 2; r++) {
        CHECK(f_mse_loss, &reductions[r], {2, {3, 7}, 0, 0, 0}, {2, {3, 7}, 0, 0, 0});
        CHECK(f_mse_loss, &reductions[r], {0, {0}, 0, 0, 0}, {0, {0}, 0, 0, 0});
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define FSDP__OP(name) cmocka_unit_test(case_##name),
#include "tensor/ops.def"
#undef FSDP__OP
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
