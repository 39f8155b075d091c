/*
 * test_tensor_loss.c - cross entropy, and head with cross entropy in one,
 * against computations in f64.
 */
#include "unit/kernel_check.h"

#include "fsdp/status.h"
#include "tensor/kernels.h"

enum { IGNORE = -100 };

static int64_t *make_targets(int64_t R, int64_t V)
{
    int64_t *target = malloc((size_t)R * sizeof *target + 1);
    assert_non_null(target);
    for (int64_t r = 0; r < R; r++)
        target[r] = r % 5 == 3 ? IGNORE : (r * 7 + 2) % V;
    if (R > 1) target[R - 1] = V - 1;
    return target;
}

/* Loss of logits (R,V), and gradient times scale in g. */
static double judge(const double *x, int64_t R, int64_t V, const int64_t *target, double scale,
                    double *g, double *lse, int64_t *count)
{
    double loss = 0;
    *count = 0;
    for (int64_t r = 0; r < R; r++) {
        double max = -INFINITY, sum = 0;
        lse[r] = 0;
        for (int64_t v = 0; v < V; v++)
            g[r * V + v] = 0;
        if (target[r] == IGNORE) continue;
        for (int64_t v = 0; v < V; v++)
            max = fmax(max, x[r * V + v]);
        for (int64_t v = 0; v < V; v++)
            sum += exp(x[r * V + v] - max);
        lse[r] = max + log(sum);
        for (int64_t v = 0; v < V; v++)
            g[r * V + v] = scale * exp(x[r * V + v] - lse[r]);
        g[r * V + target[r]] -= scale;
        loss += lse[r] - x[r * V + target[r]];
        ++*count;
    }
    return loss;
}

/* got against want (n) within bound of the largest, after rounding to t; where
 * `old` is given, it was added to. */
static void compare(const char *what, const void *got, fsdp_dtype t, const double *want,
                    const void *old, int64_t n, double bound)
{
    double largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < n; i++) {
        double w = want[i] + (old ? check_get(old, t, i) : 0);
        double allowed = bound * largest + check_ulp(t) * 1.01 * fabs(w) + 1e-7 * (t == FSDP_F16);
        if (!(fabs(check_get(got, t, i) - w) <= allowed))
            fail_msg("%s, %s: element %ld is %.9g, want %.9g", what, fsdp_dtype_name(t), (long)i,
                     check_get(got, t, i), w);
    }
}

static fsdp_dtype stat_of(fsdp_dtype t)
{
    return t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

static double precision(fsdp_dtype t)
{
    return t == FSDP_F64 ? 1e-13 : 2e-6;
}

static const fsdp_dtype pairs[][2] = {
    {FSDP_F32, FSDP_F32},  {FSDP_F64, FSDP_F64},  {FSDP_F16, FSDP_F16}, {FSDP_BF16, FSDP_BF16},
    {FSDP_BF16, FSDP_F32}, {FSDP_F32, FSDP_BF16}, {FSDP_F32, FSDP_F64}};
enum { PAIRS = sizeof pairs / sizeof *pairs };

static void run_rows(int64_t R, int64_t V, fsdp_dtype t, fsdp_dtype dt, int add)
{
    void *x = check_array(t, R * V, 1, 6), *before = check_array(dt, R * V, 2, 0.1);
    void *dx[2], *stat[2];
    double loss[2], *g = calloc((size_t)(R * V) + 1, sizeof *g), *lse = calloc((size_t)R + 1, 8);
    int64_t count[2], want_count, *target = make_targets(R, V);
    double *wide = check_wide(x, t, R * V), scale = 0.37;
    double want = judge(wide, R, V, target, scale, g, lse, &want_count);
    for (int i = 0; i < 2; i++) {
        fsdp_set_threads(i + 1);
        dx[i] = check_copy(before, dt, R * V);
        stat[i] = check_array(stat_of(t), R, 3, 1);
        assert_int_equal(
            fsdp__k_cross_entropy(x, t, R, V, target, IGNORE, stat[i], &loss[i], &count[i]),
            FSDP_OK);
        fsdp__k_cross_entropy_backward(x, t, R, V, target, IGNORE, stat[i], scale, dx[i], dt, add);
    }
    assert_true(count[0] == want_count && count[1] == want_count);
    assert_true(loss[0] == loss[1]);
    assert_true(fabs(loss[0] - want) <= 1e-6 * fabs(want));
    assert_memory_equal(dx[0], dx[1], (size_t)(R * V) * fsdp_dtype_size(dt));
    compare("stat", stat[0], stat_of(t), lse, NULL, R, precision(t));
    compare("dx", dx[0], dt, g, add ? before : NULL, R * V, precision(t));
    for (int64_t r = 0; r < R; r++)
        for (int64_t v = 0; target[r] == IGNORE && v < V; v++)
            assert_true(check_get(dx[0], dt, r * V + v) ==
                        (add ? check_get(before, dt, r * V + v) : 0));
    for (int i = 0; i < 2; i++)
        free(dx[i]), free(stat[i]);
    free(x), free(before), free(g), free(lse), free(target), free(wide);
}

static void test_cross_entropy(void **state)
{
    static const int64_t sizes[][2] = {{0, 5},   {1, 1},     {3, 7},   {9, 8},
                                       {17, 33}, {21, 1025}, {4, 3000}};
    (void)state;
    for (int d = 0; d < PAIRS; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int add = 0; add < 2; add++)
                run_rows(sizes[i][0], sizes[i][1], pairs[d][0], pairs[d][1], add);
}

/* Logits far apart, and minus infinity among them. */
static void test_extremes(void **state)
{
    (void)state;
    float x[2][11] = {{1e4f, -1e4f, 0, 3, 4, 5, 6, 7, 8, 9, -INFINITY},
                      {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY,
                       -INFINITY, -INFINITY, 2, 2}};
    int64_t target[2] = {0, 9}, count;
    float stat[2], dx[2][11];
    double loss;
    assert_int_equal(fsdp__k_cross_entropy(x, FSDP_F32, 2, 11, target, IGNORE, stat, &loss, &count),
                     FSDP_OK);
    assert_true(fabs(loss - log(2)) < 1e-6);
    fsdp__k_cross_entropy_backward(x, FSDP_F32, 2, 11, target, IGNORE, stat, 1, dx, FSDP_F32, 0);
    for (int i = 0; i < 11; i++)
        assert_true(fabsf(dx[0][i]) < 1e-6f);
    for (int i = 0; i < 9; i++)
        assert_true(dx[1][i] == 0);
    assert_true(fabsf(dx[1][9] + 0.5f) < 1e-6f && fabsf(dx[1][10] - 0.5f) < 1e-6f);
}

static void test_targets_out_of_range(void **state)
{
    (void)state;
    float x[12] = {0}, w[12] = {0}, stat[3];
    double loss;
    int64_t count;
    static const int64_t bad[] = {4, -1, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int64_t target[3] = {0, IGNORE, bad[i]};
        assert_int_equal(
            fsdp__k_cross_entropy(x, FSDP_F32, 3, 4, target, IGNORE, stat, &loss, &count),
            FSDP_INVALID_DATA);
        assert_non_null(strstr(fsdp_error_text(), "row 2"));
        fsdp_error_clear();
        assert_int_equal(
            fsdp__k_head_loss(x, w, NULL, FSDP_F32, 3, 3, 4, target, IGNORE, stat, &loss, &count),
            FSDP_INVALID_DATA);
        assert_non_null(strstr(fsdp_error_text(), "row 2"));
        fsdp_error_clear();
    }
}

/* ---- head and loss ----------------------------------------------------------- */

typedef struct head {
    int64_t R, C, V;
    int bias, add;
    fsdp_dtype t, dx, dw, db;
} head;

/* Gradients (as in judge) of x, w and b from the logits' g. */
static void head_gradients(const head *h, const double *x, const double *w, const double *g,
                           double *dx, double *dw, double *db)
{
    for (int64_t r = 0; r < h->R; r++)
        for (int64_t v = 0; v < h->V; v++) {
            double s = g[r * h->V + v];
            db[v] += s;
            for (int64_t c = 0; c < h->C; c++) {
                dx[r * h->C + c] += s * w[v * h->C + c];
                dw[v * h->C + c] += s * x[r * h->C + c];
            }
        }
}

static void run_head(const head *h)
{
    int64_t R = h->R, C = h->C, V = h->V;
    void *in[3] = {check_array(h->t, R * C, 1, 1), check_array(h->t, V * C, 2, 1),
                   check_array(h->t, V, 3, 1)};
    double *wide[3] = {check_wide(in[0], h->t, R * C), check_wide(in[1], h->t, V * C),
                       check_wide(in[2], h->t, V)};
    int64_t n[3] = {R * C, V * C, V}, *target = make_targets(R, V), count[2], want_count;
    fsdp_dtype dt[3] = {h->dx, h->dw, h->db};
    double *logits = calloc((size_t)(R * V) + 1, 8), *g = calloc((size_t)(R * V) + 1, 8);
    double *lse = calloc((size_t)R + 1, 8), *want[3], loss[2], scale = 0.8;
    void *before[3], *got[2][3], *stat[2];
    for (int64_t r = 0; r < R; r++)
        for (int64_t v = 0; v < V; v++) {
            logits[r * V + v] = h->bias ? wide[2][v] : 0;
            for (int64_t c = 0; c < C; c++)
                logits[r * V + v] += wide[0][r * C + c] * wide[1][v * C + c];
        }
    double want_loss = judge(logits, R, V, target, scale, g, lse, &want_count);
    for (int i = 0; i < 3; i++) {
        want[i] = calloc((size_t)n[i] + 1, 8);
        before[i] = check_array(dt[i], n[i], 10 + (uint64_t)i, 0.1);
    }
    head_gradients(h, wide[0], wide[1], g, want[0], want[1], want[2]);
    const void *b = h->bias ? in[2] : NULL;
    for (int k = 0; k < 2; k++) {
        fsdp_set_threads(k + 1);
        stat[k] = check_array(stat_of(h->t), R, 3, 1);
        for (int i = 0; i < 3; i++)
            got[k][i] = check_copy(before[i], dt[i], n[i]);
        assert_int_equal(fsdp__k_head_loss(in[0], in[1], b, h->t, R, C, V, target, IGNORE, stat[k],
                                           &loss[k], &count[k]),
                         FSDP_OK);
        assert_int_equal(fsdp__k_head_loss_backward(in[0], in[1], b, h->t, R, C, V, target, IGNORE,
                                                    stat[k], scale, got[k][0], h->dx, h->add,
                                                    got[k][1], h->dw, h->add, got[k][2], h->db,
                                                    h->add),
                         FSDP_OK);
    }
    assert_true(loss[0] == loss[1] && count[0] == want_count && count[1] == want_count);
    assert_true(fabs(loss[0] - want_loss) <= 1e-6 * fabs(want_loss));
    compare("stat", stat[0], stat_of(h->t), lse, NULL, R, precision(h->t));
    for (int i = 0; i < 3; i++) {
        static const char *const names[] = {"dx", "dw", "db"};
        int by_bf16 = h->t == FSDP_BF16 && fsdp__cpu_isa() >= FSDP__ISA_AVX512_BF16 && i < 2;
        compare(names[i], got[0][i], dt[i], want[i], h->add ? before[i] : NULL, n[i],
                by_bf16 ? 4e-3 : 5 * precision(h->t));
        assert_memory_equal(got[0][i], got[1][i], (size_t)n[i] * fsdp_dtype_size(dt[i]));
    }
    for (int64_t i = 0; i < R * C; i++)
        if (target[i / C] == IGNORE)
            assert_true(check_get(got[0][0], dt[0], i) ==
                        (h->add ? check_get(before[0], dt[0], i) : 0));
    for (int i = 0; i < 3; i++) {
        free(in[i]), free(wide[i]), free(want[i]), free(before[i]);
        free(got[0][i]), free(got[1][i]);
    }
    free(stat[0]), free(stat[1]), free(logits), free(g), free(lse), free(target);
}

static void test_head_dtypes(void **state)
{
    static const int64_t sizes[][3] = {{1, 1, 1}, {5, 7, 9}, {70, 24, 130}, {0, 4, 6}, {3, 0, 5}};
    (void)state;
    for (int d = 0; d < PAIRS; d++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int add = 0; add < 2; add++) {
                fsdp_dtype t = pairs[d][0], dt = pairs[d][1];
                int64_t R = sizes[i][0], C = sizes[i][1], V = sizes[i][2];
                run_head(&(head){R, C, V, 1, add, t, dt, dt, dt});
                run_head(&(head){R, C, V, 0, add, t, t, dt, dt});
                run_head(&(head){R, C, V, 1, add, t, dt, t, t});
            }
}

/* More than a tile in each direction, each order of the tiles. */
static void test_head_tiles(void **state)
{
    static const fsdp_dtype grads[][2] = {
        {FSDP_F32, FSDP_F32}, {FSDP_BF16, FSDP_F32}, {FSDP_F32, FSDP_BF16}, {FSDP_BF16, FSDP_BF16}};
    (void)state;
    assert_int_equal(fsdp__k_head_slice(10000, 50000), 512);
    assert_int_equal(fsdp__k_head_slice(7, 50000), 7);
    for (int i = 0; i < 4; i++)
        for (int tall = 0; tall < 2; tall++)
            run_head(&(head){tall ? 2060 : 520, 3, tall ? 1000 : 2100, 1, i & 1, FSDP_F32,
                             grads[i][0], grads[i][1], FSDP_F32});
    run_head(&(head){520, 2, 2100, 1, 1, FSDP_F64, FSDP_F64, FSDP_F64, FSDP_F64});
    run_head(&(head){520, 2, 2100, 1, 1, FSDP_BF16, FSDP_BF16, FSDP_BF16, FSDP_BF16});
}

/* Gradients not asked for, and a batch that is masked whole. */
static void test_head_parts(void **state)
{
    enum { R = 20, C = 6, V = 40 };
    (void)state;
    float *x = check_array(FSDP_F32, R * C, 1, 1), *w = check_array(FSDP_F32, V * C, 2, 1);
    float stat[R], dx[R * C], dw[V * C], db[V], one[V * C];
    int64_t *target = make_targets(R, V), count;
    double loss;
    assert_int_equal(
        fsdp__k_head_loss(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, &loss, &count),
        FSDP_OK);
    fsdp__k_head_loss_backward(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, 1, dx, FSDP_F32,
                               0, dw, FSDP_F32, 0, db, FSDP_F32, 0);
    fsdp__k_head_loss_backward(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, 1, one,
                               FSDP_F32, 0, NULL, FSDP_F32, 0, NULL, FSDP_F32, 0);
    assert_memory_equal(one, dx, sizeof dx);
    fsdp__k_head_loss_backward(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, 1, NULL,
                               FSDP_F32, 0, one, FSDP_F32, 0, NULL, FSDP_F32, 0);
    assert_memory_equal(one, dw, sizeof dw);
    fsdp__k_head_loss_backward(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, 1, NULL,
                               FSDP_F32, 0, NULL, FSDP_F32, 0, one, FSDP_F32, 0);
    assert_memory_equal(one, db, sizeof db);

    for (int r = 0; r < R; r++)
        target[r] = IGNORE;
    assert_int_equal(
        fsdp__k_head_loss(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, &loss, &count),
        FSDP_OK);
    assert_true(loss == 0 && count == 0);
    fsdp__k_head_loss_backward(x, w, NULL, FSDP_F32, R, C, V, target, IGNORE, stat, 1, dx, FSDP_F32,
                               0, dw, FSDP_F32, 0, db, FSDP_F32, 0);
    for (int i = 0; i < R * C; i++)
        assert_true(dx[i] == 0);
    for (int i = 0; i < V * C; i++)
        assert_true(dw[i] == 0);
    for (int i = 0; i < V; i++)
        assert_true(db[i] == 0);
    free(x), free(w), free(target);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cross_entropy),        cmocka_unit_test(test_extremes),
        cmocka_unit_test(test_targets_out_of_range), cmocka_unit_test(test_head_dtypes),
        cmocka_unit_test(test_head_tiles),           cmocka_unit_test(test_head_parts),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
