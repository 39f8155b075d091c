/*
 * test_tensor_attention.c - attention and its backward, tiled and plain, against
 * a computation in f64 that keeps every weight.
 *
 * Bounds: the largest difference over the largest value of the array, 1e-5 for
 * f32 and 1e-2 for bf16 (the result itself is rounded to 8 bits).
 */
#include "unit/kernel_check.h"

#include "base/rng.h"
#include "tensor/kernels.h"

enum { Q, K, V, OUT, DOUT, DQ, DK, DV, ARRAYS };

typedef struct shape {
    int64_t B, T, S, H, KV, D, window;
    int causal, heads_first; /* (B,H,T,D) instead of (B,T,H,D) */
    float drop_p;
    fsdp_dtype t, dt;
    int add;
} shape;

/* Arrays of one case, as stored and in f64; the wanted results in f64. */
typedef struct arrays {
    fsdp__attention a;
    fsdp__attention_grad g;
    int64_t n[ARRAYS];
    int64_t stride[ARRAYS][3];
    void *x[ARRAYS];
    double *w[ARRAYS];
    double *lse;
    uint64_t keys[8];
} arrays;

static int64_t at(const arrays *c, int which, int64_t b, int64_t t, int64_t h)
{
    return b * c->stride[which][0] + t * c->stride[which][1] + h * c->stride[which][2];
}

static fsdp_dtype dtype_of(const shape *s, int which)
{
    return which >= DQ ? s->dt : s->t;
}

static void setup(const shape *s, arrays *c)
{
    memset(c, 0, sizeof *c);
    for (int i = 0; i < ARRAYS; i++) {
        int key = i == K || i == V || i == DK || i == DV;
        int64_t heads = key ? s->KV : s->H, length = key ? s->S : s->T;
        int64_t row = s->D + (i % 3); /* some rows lie apart */
        c->n[i] = s->B * heads * length * row;
        c->stride[i][0] = heads * length * row;
        c->stride[i][1] = s->heads_first ? row : heads * row;
        c->stride[i][2] = s->heads_first ? length * row : row;
        c->x[i] = check_array(dtype_of(s, i), c->n[i], (uint64_t)i + 1, i < V ? 1.5 : 1);
    }
    for (int i = 0; i < 8; i++)
        c->keys[i] = fsdp__rng_mix(7, (uint64_t)i);
    c->a = (fsdp__attention){.t = s->t,
                             .B = s->B,
                             .T = s->T,
                             .S = s->S,
                             .H = s->H,
                             .KV = s->KV,
                             .D = s->D,
                             .scale = 0.7f / sqrtf((float)s->D),
                             .causal = s->causal,
                             .window = s->window,
                             .drop_p = s->drop_p,
                             .keys = s->drop_p > 0 ? c->keys : NULL};
    c->g = (fsdp__attention_grad){.dt = s->dt, .add_q = s->add, .add_k = s->add, .add_v = s->add};
    memcpy(c->a.q_stride, c->stride[Q], sizeof c->a.q_stride);
    memcpy(c->a.k_stride, c->stride[K], sizeof c->a.k_stride);
    memcpy(c->a.v_stride, c->stride[V], sizeof c->a.v_stride);
    memcpy(c->a.o_stride, c->stride[OUT], sizeof c->a.o_stride);
    memcpy(c->g.do_stride, c->stride[DOUT], sizeof c->g.do_stride);
    memcpy(c->g.dq_stride, c->stride[DQ], sizeof c->g.dq_stride);
    memcpy(c->g.dk_stride, c->stride[DK], sizeof c->g.dk_stride);
    memcpy(c->g.dv_stride, c->stride[DV], sizeof c->g.dv_stride);
}

static void teardown(arrays *c)
{
    for (int i = 0; i < ARRAYS; i++)
        free(c->x[i]), free(c->w[i]);
    free(c->lse);
}

/* Weights (S) of one query row, zero where unseen; the row's lse. */
static double weights(const shape *s, const arrays *c, int64_t b, int64_t h, int64_t t, double *p)
{
    int64_t kv = h / (s->H / s->KV), place = t + s->S - s->T;
    double max = -INFINITY, sum = 0;
    for (int64_t k = 0; k < s->S; k++) {
        int seen = !s->causal || (k <= place && (s->window == 0 || place - k < s->window));
        p[k] = -INFINITY;
        if (!seen) continue;
        p[k] = 0;
        for (int64_t d = 0; d < s->D; d++)
            p[k] += c->w[Q][at(c, Q, b, t, h) + d] * c->w[K][at(c, K, b, k, kv) + d];
        p[k] *= (double)c->a.scale;
        max = fmax(max, p[k]);
    }
    for (int64_t k = 0; k < s->S; k++)
        sum += p[k] = max == -INFINITY ? 0 : exp(p[k] - max);
    for (int64_t k = 0; k < s->S; k++)
        p[k] = sum > 0 ? p[k] / sum : 0;
    return max + log(sum);
}

static double factor(const shape *s, const arrays *c, int64_t b, int64_t h, int64_t t, int64_t k)
{
    if (!(s->drop_p > 0)) return 1;
    float u = fsdp__rng_uniform(c->keys[b], (uint64_t)((h * s->T + t) * s->S + k));
    return u >= s->drop_p ? 1 / (1 - (double)s->drop_p) : 0;
}

/* The wanted out, lse and gradients from the stored inputs. */
static void judge(const shape *s, arrays *c)
{
    for (int i = 0; i < ARRAYS; i++)
        c->w[i] = check_wide(c->x[i], dtype_of(s, i), c->n[i]);
    for (int i = DQ; i < ARRAYS && !s->add; i++)
        for (int64_t j = 0; j < c->n[i]; j++)
            c->w[i][j] = 0;
    c->lse = calloc((size_t)(s->B * s->H * s->T) + 1, sizeof *c->lse);
    double *p = calloc((size_t)s->S + 1, sizeof *p);
    for (int64_t row = 0; row < s->B * s->H * s->T; row++) {
        int64_t b = row / (s->H * s->T), h = row / s->T % s->H, t = row % s->T;
        int64_t kv = h / (s->H / s->KV);
        double *out = c->w[OUT] + at(c, OUT, b, t, h), *dout = c->w[DOUT] + at(c, DOUT, b, t, h);
        double delta = 0;
        c->lse[row] = weights(s, c, b, h, t, p);
        for (int64_t d = 0; d < s->D; d++) {
            out[d] = 0;
            for (int64_t k = 0; k < s->S; k++)
                out[d] += p[k] * factor(s, c, b, h, t, k) * c->w[V][at(c, V, b, k, kv) + d];
            delta += out[d] * dout[d];
        }
        for (int64_t k = 0; k < s->S; k++) {
            double f = factor(s, c, b, h, t, k), dp = 0;
            for (int64_t d = 0; d < s->D; d++) {
                dp += dout[d] * c->w[V][at(c, V, b, k, kv) + d];
                c->w[DV][at(c, DV, b, k, kv) + d] += p[k] * f * dout[d];
            }
            double ds = p[k] * (dp * f - delta) * (double)c->a.scale;
            for (int64_t d = 0; d < s->D; d++) {
                c->w[DQ][at(c, DQ, b, t, h) + d] += ds * c->w[K][at(c, K, b, k, kv) + d];
                c->w[DK][at(c, DK, b, k, kv) + d] += ds * c->w[Q][at(c, Q, b, t, h) + d];
            }
        }
    }
    free(p);
}

/* Rows (D) of x against the wanted ones; what lies between rows is untouched. */
static void compare(const shape *s, const arrays *c, int which, const void *x, const char *who)
{
    fsdp_dtype t = dtype_of(s, which);
    int key = which == DK || which == DV;
    int64_t heads = key ? s->KV : s->H, length = key ? s->S : s->T, row = s->D + which % 3;
    double bound = s->t == FSDP_F64 ? 1e-12 : s->t == FSDP_F32 ? 1e-5 : 1e-2, largest = 0;
    for (int64_t i = 0; i < c->n[which]; i++)
        if (i % row < s->D) largest = fmax(largest, fabs(c->w[which][i]));
    for (int64_t i = 0; i < s->B * heads * length * row; i++) {
        double got = check_get(x, t, i), want = c->w[which][i];
        if (i % row >= s->D) {
            assert_true(got == check_get(c->x[which], t, i));
        } else if (!(fabs(got - want) <= bound * fmax(largest, 0.1))) {
            fail_msg("%s, array %d, %s, (B %ld T %ld S %ld H %ld KV %ld D %ld) causal %d window "
                     "%ld drop %g: element %ld is %.9g, want %.9g",
                     who, which, fsdp_dtype_name(s->t), (long)s->B, (long)s->T, (long)s->S,
                     (long)s->H, (long)s->KV, (long)s->D, s->causal, (long)s->window,
                     (double)s->drop_p, (long)i, got, want);
        }
    }
}

static void compare_lse(const shape *s, const arrays *c, const void *lse)
{
    fsdp_dtype stat = s->t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
    for (int64_t i = 0; i < s->B * s->H * s->T; i++) {
        double got = check_get(lse, stat, i);
        if (c->lse[i] == -INFINITY)
            assert_true(got == -INFINITY);
        else
            assert_true(fabs(got - c->lse[i]) <= 2e-6 * fmax(1, fabs(c->lse[i])));
    }
}

/* One way of computing all; results in y (OUT, DQ, DK, DV) and lse. */
static void compute(const shape *s, arrays *c, int plain, int threads, void *y[ARRAYS], void **lse)
{
    fsdp_set_threads(threads);
    for (int i = 0; i < ARRAYS; i++)
        y[i] = i == OUT || i >= DQ ? check_copy(c->x[i], dtype_of(s, i), c->n[i]) : c->x[i];
    *lse = check_array(s->t == FSDP_F64 ? FSDP_F64 : FSDP_F32, s->B * s->H * s->T, 99, 1);
    fsdp_status f = plain ? fsdp__k_attention_plain(&c->a, y[Q], y[K], y[V], y[OUT], *lse)
                          : fsdp__k_attention(&c->a, y[Q], y[K], y[V], y[OUT], *lse);
    assert_int_equal(f, FSDP_OK);
    f = (plain ? fsdp__k_attention_backward_plain : fsdp__k_attention_backward)(
        &c->a, &c->g, y[Q], y[K], y[V], y[OUT], y[DOUT], *lse, y[DQ], y[DK], y[DV]);
    assert_int_equal(f, FSDP_OK);
}

static void release(void *y[ARRAYS], void *lse)
{
    free(y[OUT]), free(y[DQ]), free(y[DK]), free(y[DV]), free(lse);
}

static void run_shape(const shape *s)
{
    arrays c;
    void *one[ARRAYS], *two[ARRAYS], *plain[ARRAYS], *lse[3];
    setup(s, &c);
    judge(s, &c);
    compute(s, &c, 0, 1, one, &lse[0]);
    compute(s, &c, 0, 2, two, &lse[1]);
    compute(s, &c, 1, 2, plain, &lse[2]);
    compare_lse(s, &c, lse[0]);
    compare_lse(s, &c, lse[2]);
    for (int i = 0; i < ARRAYS; i++) {
        if (i != OUT && i < DQ) continue;
        compare(s, &c, i, one[i], "fast");
        compare(s, &c, i, plain[i], "plain");
        assert_memory_equal(one[i], two[i], (size_t)c.n[i] * fsdp_dtype_size(dtype_of(s, i)));
    }
    release(one, lse[0]), release(two, lse[1]), release(plain, lse[2]);
    teardown(&c);
}

static const fsdp_dtype pairs[][2] = {{FSDP_F32, FSDP_F32},  {FSDP_F64, FSDP_F64},
                                      {FSDP_F16, FSDP_F16},  {FSDP_BF16, FSDP_BF16},
                                      {FSDP_BF16, FSDP_F32}, {FSDP_F32, FSDP_F64}};
enum { PAIRS = sizeof pairs / sizeof *pairs };

static void test_dtypes(void **state)
{
    (void)state;
    for (int d = 0; d < PAIRS; d++)
        for (int add = 0; add < 2; add++) {
            run_shape(&(shape){2, 61, 61, 4, 2, 16, 0, 1, 0, 0, pairs[d][0], pairs[d][1], add});
            run_shape(&(shape){1, 10, 117, 3, 1, 20, 0, 1, 1, 0, pairs[d][0], pairs[d][1], add});
        }
}

/* Head sizes that are and are not whole vectors. */
static void test_heads(void **state)
{
    static const int64_t sizes[] = {1, 4, 7, 8, 12, 16, 31, 32, 40, 64, 80, 128};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        run_shape(&(shape){1, 53, 53, 2, 2, sizes[i], 0, 1, 0, 0, FSDP_F32, FSDP_F32, 0});
        run_shape(&(shape){1, 53, 53, 2, 1, sizes[i], 0, 0, 1, 0, FSDP_BF16, FSDP_BF16, 1});
    }
}

/* Lengths around the tiles, more keys than queries, fewer (rows that see no
 * key), windows. */
static void test_lengths(void **state)
{
    static const int64_t sizes[][2] = {{1, 1},     {1, 100},  {2, 3},    {47, 48},
                                       {48, 48},   {49, 49},  {96, 96},  {97, 97},
                                       {193, 200}, {30, 290}, {120, 50}, {250, 250}};
    static const int64_t windows[] = {0, 1, 5, 64, 130, 1000};
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t w = 0; w < sizeof windows / sizeof *windows; w++)
            run_shape(&(shape){1, sizes[i][0], sizes[i][1], 2, 1, 8, windows[w], 1, w & 1, 0,
                               FSDP_F32, FSDP_F32, 0});
        run_shape(
            &(shape){1, sizes[i][0], sizes[i][1], 2, 2, 8, 0, 0, 0, 0, FSDP_F32, FSDP_F32, 0});
    }
}

static void test_groups(void **state)
{
    static const int64_t heads[][2] = {{6, 1}, {6, 2}, {6, 3}, {6, 6}, {16, 1}};
    (void)state;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        for (int layout = 0; layout < 2; layout++)
            run_shape(&(shape){2, 101, 101, heads[i][0], heads[i][1], 8, 0, 1, layout, 0, FSDP_F32,
                               FSDP_F32, 0});
}

static void test_dropout(void **state)
{
    (void)state;
    for (int d = 0; d < PAIRS; d++)
        for (int64_t window = 0; window < 60; window += 50) {
            run_shape(
                &(shape){3, 110, 113, 4, 2, 8, window, 1, 0, 0.3f, pairs[d][0], pairs[d][1], 0});
            run_shape(&(shape){1, 30, 30, 2, 2, 8, 0, 0, 0, 0.9f, pairs[d][0], pairs[d][1], 1});
        }
}

static void test_empty(void **state)
{
    (void)state;
    for (int d = 0; d < PAIRS; d++) {
        run_shape(&(shape){0, 5, 5, 2, 1, 8, 0, 1, 0, 0, pairs[d][0], pairs[d][1], 0});
        run_shape(&(shape){1, 0, 5, 2, 1, 8, 0, 1, 0, 0, pairs[d][0], pairs[d][1], 0});
        run_shape(&(shape){1, 5, 0, 2, 1, 8, 0, 1, 0, 0, pairs[d][0], pairs[d][1], 0});
    }
}

/* Gradients that nobody wants change nothing in the others. */
static void test_some_gradients(void **state)
{
    (void)state;
    for (int d = 0; d < PAIRS; d++) {
        shape s = {1, 70, 70, 4, 2, 16, 0, 1, 0, 0, pairs[d][0], pairs[d][1], 0};
        arrays c;
        void *all[ARRAYS], *some[ARRAYS], *lse[2];
        setup(&s, &c);
        compute(&s, &c, 0, 1, all, &lse[0]);
        for (int skip = DQ; skip <= DV; skip++) {
            compute(&s, &c, 0, 1, some, &lse[1]);
            for (int i = DQ; i <= DV; i++) {
                free(some[i]);
                some[i] = check_copy(c.x[i], s.dt, c.n[i]);
            }
            assert_int_equal(fsdp__k_attention_backward(
                                 &c.a, &c.g, c.x[Q], c.x[K], c.x[V], all[OUT], c.x[DOUT], lse[0],
                                 skip == DQ ? NULL : some[DQ], skip == DK ? NULL : some[DK],
                                 skip == DV ? NULL : some[DV]),
                             FSDP_OK);
            for (int i = DQ; i <= DV; i++)
                assert_memory_equal(some[i], i == skip ? c.x[i] : all[i],
                                    (size_t)c.n[i] * fsdp_dtype_size(s.dt));
            release(some, lse[1]);
        }
        release(all, lse[0]);
        teardown(&c);
    }
}

/* Scores far apart: weights of 0 and 1, no NaN; and a score that is NaN stays
 * in its own row. */
static void test_extremes(void **state)
{
    enum { T = 100, D = 8 };
    (void)state;
    fsdp__attention a = {.t = FSDP_F32,
                         .B = 1,
                         .T = T,
                         .S = T,
                         .H = 1,
                         .KV = 1,
                         .D = D,
                         .q_stride = {T * D, D, D},
                         .k_stride = {T * D, D, D},
                         .v_stride = {T * D, D, D},
                         .o_stride = {T * D, D, D},
                         .scale = 1e4f,
                         .causal = 1};
    float *q = check_array(FSDP_F32, T * D, 1, 10), *k = check_array(FSDP_F32, T * D, 2, 10);
    float *v = check_array(FSDP_F32, T * D, 3, 1), *out = check_array(FSDP_F32, T * D, 4, 1);
    float *again = check_array(FSDP_F32, T * D, 4, 1), lse[T];
    assert_int_equal(fsdp__k_attention(&a, q, k, v, out, lse), FSDP_OK);
    for (int i = 0; i < T * D; i++)
        assert_true(fabsf(out[i]) <= 1);
    q[40 * D] = NAN;
    assert_int_equal(fsdp__k_attention(&a, q, k, v, again, lse), FSDP_OK);
    for (int t = 0; t < T; t++)
        for (int d = 0; d < D; d++)
            assert_true(t == 40 ? isnan(again[t * D + d]) : again[t * D + d] == out[t * D + d]);
    free(q), free(k), free(v), free(out), free(again);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtypes),         cmocka_unit_test(test_heads),
        cmocka_unit_test(test_lengths),        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_dropout),        cmocka_unit_test(test_empty),
        cmocka_unit_test(test_some_gradients), cmocka_unit_test(test_extremes),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
