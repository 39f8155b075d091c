/*
 * test_tensor_row.c - row-wise kernels against f64: norms, softmax, embedding,
 * rotary positions; every dtype, odd and empty sizes, each output alone, one
 * and two threads.
 */
#include "kernel_check.h"

#include "tensor/kernel_set.h"

static const fsdp_dtype pairs[][2] = {
    {FSDP_F32, FSDP_F32}, {FSDP_BF16, FSDP_BF16}, {FSDP_BF16, FSDP_F32}, {FSDP_F32, FSDP_BF16},
    {FSDP_F16, FSDP_F16}, {FSDP_F16, FSDP_F32},   {FSDP_F64, FSDP_F64}};
static const int64_t sizes[][2] = {{0, 5},  {3, 1},   {1, 7},    {5, 8},    {4, 17},
                                   {9, 31}, {17, 64}, {33, 100}, {300, 257}};
enum { PAIRS = 7, SIZES = 9 };

static fsdp_dtype stat_of(fsdp_dtype t)
{
    return t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

static size_t bytes_of(fsdp_dtype t, int64_t n)
{
    return (size_t)n * fsdp_dtype_size(t);
}

/* Within `ulps` units of the computing dtype on `size`, and one rounding to dt. */
static void check_near(const void *got_p, int64_t i, double want, double size, double ulps,
                       fsdp_dtype t, fsdp_dtype dt, const char *what)
{
    double got = check_get(got_p, dt, i);
    double bound = ulps * 2 * check_ulp(stat_of(t)) * (fabs(want) + size);
    bound += check_ulp(dt) * 1.01 * (fabs(want) + bound);
    if (dt == FSDP_F16) bound += 0x1p-24;
    if (!(fabs(got - want) <= bound)) {
        print_error("%s [%lld]: %.17g, expected %.17g within %.3g\n", what, (long long)i, got, want,
                    bound);
        fail();
    }
}

/* ---- norms -------------------------------------------------------------------------- */

typedef struct norm {
    fsdp_dtype t, dt, stat;
    int64_t R, C;
    int layer, weights; /* layer: mean and bias too */
    double eps;
    void *x, *w, *b, *dy, *y, *mean, *rstd;
} norm;

static void norm_forward(norm *n)
{
    if (n->layer)
        fsdp__k_layer_norm(n->x, n->w, n->b, n->t, n->R, n->C, n->eps, n->y, n->mean, n->rstd);
    else
        fsdp__k_rms_norm(n->x, n->w, n->t, n->R, n->C, n->eps, n->y, n->rstd);
}

static void norm_backward(norm *n, void *dx, void *dw, void *db, int add)
{
    if (n->layer)
        fsdp__k_layer_norm_backward(n->x, n->w, n->t, n->R, n->C, n->mean, n->rstd, n->dy, dx,
                                    n->dt, add, dw, n->dt, !add, db, n->dt, add);
    else
        fsdp__k_rms_norm_backward(n->x, n->w, n->t, n->R, n->C, n->rstd, n->dy, dx, n->dt, add, dw,
                                  n->dt, !add);
}

static double norm_weight(const norm *n, int64_t c)
{
    return n->w ? check_get(n->w, n->t, c) : 1;
}

/* Mean (0 for RMS) and 1 / sqrt(var + eps) of a row. */
static void norm_stats(const norm *n, int64_t r, double *mean, double *rstd)
{
    double m = 0, q = 0;
    for (int64_t c = 0; c < n->C && n->layer; c++)
        m += check_get(n->x, n->t, r * n->C + c);
    m /= (double)n->C;
    for (int64_t c = 0; c < n->C; c++) {
        double v = check_get(n->x, n->t, r * n->C + c) - m;
        q += v * v;
    }
    *mean = m;
    *rstd = 1 / sqrt(q / (double)n->C + n->eps);
}

static void check_norm_forward(norm *n)
{
    norm_forward(n);
    for (int64_t r = 0; r < n->R; r++) {
        double mean, rstd;
        norm_stats(n, r, &mean, &rstd);
        check_near(n->rstd, r, rstd, 0, 20, n->t, n->stat, "rstd");
        if (n->layer) check_near(n->mean, r, mean, 2, 8, n->t, n->stat, "mean");
        for (int64_t c = 0; c < n->C; c++) {
            double v = check_get(n->x, n->t, r * n->C + c), w = norm_weight(n, c);
            double want = (v - mean) * rstd * w;
            if (n->b) want += check_get(n->b, n->t, c);
            check_near(n->y, r * n->C + c, want, (fabs(v) + fabs(mean)) * rstd * fabs(w) + 1, 24,
                       n->t, n->t, "norm");
        }
    }
}

static void check_norm_backward(norm *n, int add)
{
    fsdp_dtype dt = n->dt;
    int64_t C = n->C, N = n->R * C;
    void *dx = check_array(dt, N, 7, 1), *dx0 = check_copy(dx, dt, N), *dx2 = check_copy(dx, dt, N);
    void *dw = check_array(dt, C, 8, 1), *dw0 = check_copy(dw, dt, C), *dw2 = check_copy(dw, dt, C);
    void *db = check_array(dt, C, 9, 1), *db0 = check_copy(db, dt, C), *db2 = check_copy(db, dt, C);
    double *sum = calloc((size_t)C * 4 + 1, sizeof *sum);
    assert_non_null(sum);
    fsdp_set_threads(2);
    norm_backward(n, dx, dw, n->b ? db : NULL, add);
    fsdp_set_threads(1);
    norm_backward(n, dx2, NULL, NULL, add); /* each output alone */
    norm_backward(n, NULL, dw2, n->b ? db2 : NULL, add);
    assert_memory_equal(dx, dx2, bytes_of(dt, N));
    assert_memory_equal(dw, dw2, bytes_of(dt, C));
    assert_memory_equal(db, db2, bytes_of(dt, C));
    for (int64_t r = 0; r < n->R; r++) {
        double m, s, k1 = 0, k2 = 0, size = 0;
        norm_stats(n, r, &m, &s);
        for (int64_t c = 0; c < C; c++) {
            double d = check_get(n->dy, n->t, r * C + c), g = d * norm_weight(n, c);
            double h = (check_get(n->x, n->t, r * C + c) - m) * s;
            k1 += n->layer ? g / (double)C : 0;
            k2 += g * h / (double)C;
            size += fabs(g * h) / (double)C;
            sum[c] += d * h, sum[C + c] += d;
            sum[2 * C + c] += fabs(d) * (fabs(h) + 1), sum[3 * C + c] += fabs(d);
        }
        for (int64_t c = 0; c < C; c++) {
            int64_t i = r * C + c;
            double g = check_get(n->dy, n->t, i) * norm_weight(n, c);
            double h = (check_get(n->x, n->t, i) - m) * s;
            double want = s * (g - k1 - h * k2) + (add ? check_get(dx0, dt, i) : 0);
            check_near(dx, i, want, s * (fabs(g) + 1 + (fabs(h) + 1) * size) + 1, 40, n->t, dt,
                       "dx");
        }
    }
    for (int64_t c = 0; c < C; c++) {
        double before = add ? 0 : check_get(dw0, dt, c);
        check_near(dw, c, sum[c] + before, sum[2 * C + c] + fabs(before), 40, n->t, dt, "dw");
        before = add ? check_get(db0, dt, c) : 0;
        if (n->b)
            check_near(db, c, sum[C + c] + before, sum[3 * C + c] + fabs(before), 20, n->t, dt,
                       "db");
    }
    free(dx), free(dx0), free(dx2), free(dw), free(dw0), free(dw2), free(db), free(db0), free(db2);
    free(sum);
}

static void check_norm(fsdp_dtype t, fsdp_dtype dt, int64_t R, int64_t C, int layer, int weights)
{
    norm n = {.t = t, .dt = dt, .stat = stat_of(t), .R = R, .C = C, .layer = layer, .eps = 1e-5};
    n.x = check_array(t, R * C, 1, 2), n.dy = check_array(t, R * C, 2, 1);
    n.w = weights ? check_array(t, C, 3, 1) : NULL;
    n.b = weights && layer ? check_array(t, C, 4, 1) : NULL;
    n.y = check_array(t, R * C, 5, 1), n.mean = check_array(n.stat, R, 6, 1);
    n.rstd = check_array(n.stat, R, 6, 1);
    check_norm_forward(&n);
    check_norm_backward(&n, 0);
    check_norm_backward(&n, 1);
    free(n.x), free(n.dy), free(n.w), free(n.b), free(n.y), free(n.mean), free(n.rstd);
}

static void test_norms(void **state)
{
    (void)state;
    for (int p = 0; p < PAIRS; p++)
        for (int s = 0; s < SIZES; s++)
            for (int k = 0; k < 4; k++)
                check_norm(pairs[p][0], pairs[p][1], sizes[s][0], sizes[s][1], k & 1, k >> 1);
}

/* So many columns that the sums of the blocks of rows are not kept: the same bits as those of each
 * column in a narrow array. */
static void test_norm_wide(void **state)
{
    enum { R = 70, C = 30001, AT = 29500, N = 40 };
    (void)state;
    float *x = check_array(FSDP_F32, R * C, 1, 2), *dy = check_array(FSDP_F32, R * C, 2, 1);
    float *rstd = check_array(FSDP_F32, R, 3, 1), *mean = check_array(FSDP_F32, R, 4, 1);
    float *dw = malloc(C * sizeof *dw), *db = malloc(C * sizeof *db), dw2[N], db2[N];
    float *nx = malloc(R * N * sizeof *nx), *ndy = malloc(R * N * sizeof *ndy);
    assert_non_null(dw), assert_non_null(db), assert_non_null(nx), assert_non_null(ndy);
    for (int r = 0; r < R; r++) {
        memcpy(nx + r * N, x + r * C + AT, N * sizeof *nx);
        memcpy(ndy + r * N, dy + r * C + AT, N * sizeof *ndy);
    }
    fsdp_set_threads(2);
    fsdp__k_layer_norm_backward(x, NULL, FSDP_F32, R, C, mean, rstd, dy, NULL, FSDP_F32, 0, dw,
                                FSDP_F32, 0, db, FSDP_F32, 0);
    fsdp__k_layer_norm_backward(nx, NULL, FSDP_F32, R, N, mean, rstd, ndy, NULL, FSDP_F32, 0, dw2,
                                FSDP_F32, 0, db2, FSDP_F32, 0);
    assert_memory_equal(dw + AT, dw2, sizeof dw2);
    assert_memory_equal(db + AT, db2, sizeof db2);
    fsdp__k_rms_norm_backward(x, NULL, FSDP_F32, R, C, rstd, dy, NULL, FSDP_F32, 0, dw, FSDP_F32,
                              0);
    fsdp__k_rms_norm_backward(nx, NULL, FSDP_F32, R, N, rstd, ndy, NULL, FSDP_F32, 0, dw2, FSDP_F32,
                              0);
    assert_memory_equal(dw + AT, dw2, sizeof dw2);
    free(x), free(dy), free(rstd), free(mean), free(dw), free(db), free(nx), free(ndy);
}

/* ---- softmax -------------------------------------------------------------------------- */

static void check_softmax(fsdp_dtype t, fsdp_dtype dt, int64_t R, int64_t C, int add)
{
    int64_t N = R * C;
    void *x = check_array(t, N, 1, 8), *y = check_copy(x, t, N), *dy = check_array(t, N, 2, 1);
    void *dx = check_array(dt, N, 3, 1), *before = check_copy(dx, dt, N);
    /* A masked weight, and values that overflow without the maximum. */
    for (int64_t r = 0; r < R && C > 3; r++)
        check_set(x, t, r * C + r % C, -INFINITY);
    for (int64_t c = 0; c < C && R > 2; c++)
        check_set(x, t, C + c, check_get(x, t, C + c) + (t == FSDP_F16 ? 1000 : 4096));
    fsdp__k_softmax(x, t, R, C, y);
    fsdp__k_softmax_backward(y, t, R, C, dy, dx, dt, add);
    for (int64_t r = 0; r < R; r++) {
        double top = -INFINITY, sum = 0, dot = 0, size = 0;
        for (int64_t c = 0; c < C; c++)
            top = fmax(top, check_get(x, t, r * C + c));
        for (int64_t c = 0; c < C; c++)
            sum += exp(check_get(x, t, r * C + c) - top);
        for (int64_t c = 0; c < C; c++) {
            double g = check_get(y, t, r * C + c) * check_get(dy, t, r * C + c);
            dot += g;
            size += fabs(g);
        }
        for (int64_t c = 0; c < C; c++) {
            int64_t i = r * C + c;
            double want = exp(check_get(x, t, i) - top) / sum, was = check_get(before, dt, i);
            check_near(y, i, want, 0, 24, t, t, "softmax");
            double v = check_get(y, t, i), d = check_get(dy, t, i);
            want = v * (d - dot) + (add ? was : 0);
            check_near(dx, i, want, v * (fabs(d) + size) + fabs(was), 20, t, dt, "softmax dx");
        }
    }
    free(x), free(y), free(dy), free(dx), free(before);
}

static void test_softmax(void **state)
{
    (void)state;
    for (int p = 0; p < PAIRS; p++)
        for (int s = 0; s < SIZES; s++)
            for (int add = 0; add < 2; add++)
                check_softmax(pairs[p][0], pairs[p][1], sizes[s][0], sizes[s][1], add);
}

/* ---- embedding -------------------------------------------------------------------------- */

static void check_embedding(fsdp_dtype t, fsdp_dtype dt, int64_t R, int64_t C, int add)
{
    enum { V = 13 };
    void *w = check_array(t, V * C, 1, 1), *out = check_array(t, R * C, 2, 1);
    void *dy = check_array(t, R * C, 3, 1), *dw = check_array(dt, V * C, 4, 1);
    void *before = check_copy(dw, dt, V * C), *again = check_copy(dw, dt, V * C);
    int64_t *ids = malloc((size_t)R * sizeof *ids + 1);
    double *want = calloc((size_t)(V * C) * 2 + 1, sizeof *want), *size = want + V * C;
    assert_non_null(ids), assert_non_null(want);
    for (int64_t r = 0; r < R; r++)
        ids[r] = r * r % V; /* some rows of w never */
    assert_int_equal(fsdp__k_embedding(w, t, V, C, ids, R, out), FSDP_OK);
    for (int64_t r = 0; r < R; r++)
        assert_memory_equal(fsdp__cat(out, t, r * C), fsdp__cat(w, t, ids[r] * C), bytes_of(t, C));
    fsdp_set_threads(2);
    fsdp__k_embedding_backward(dy, t, ids, R, V, C, dw, dt, add);
    fsdp_set_threads(1);
    fsdp__k_embedding_backward(dy, t, ids, R, V, C, again, dt, add);
    assert_memory_equal(dw, again, bytes_of(dt, V * C));
    for (int64_t i = 0; i < R * C; i++) {
        want[ids[i / C] * C + i % C] += check_get(dy, t, i);
        size[ids[i / C] * C + i % C] += fabs(check_get(dy, t, i));
    }
    for (int64_t i = 0; i < V * C; i++) {
        double was = add ? check_get(before, dt, i) : 0;
        check_near(dw, i, want[i] + was, size[i] + fabs(was), 8, t, dt, "embedding dw");
    }
    free(w), free(out), free(dy), free(dw), free(before), free(again), free(ids), free(want);
}

static void test_embedding(void **state)
{
    (void)state;
    for (int p = 0; p < PAIRS; p++)
        for (int s = 0; s < SIZES; s++)
            for (int add = 0; add < 2; add++)
                check_embedding(pairs[p][0], pairs[p][1], sizes[s][0], sizes[s][1], add);
    check_embedding(FSDP_BF16, FSDP_BF16, 50, 600, 1);
    check_embedding(FSDP_F32, FSDP_F32, 1100, 1021, 0); /* written past the caches, rows astray */
}

static void test_embedding_range(void **state)
{
    static const int64_t bad[] = {-1, 4, INT64_MAX};
    (void)state;
    for (int k = 0; k < 3; k++) {
        float w[8] = {0}, out[6];
        int64_t ids[3] = {0, bad[k], 1};
        assert_int_equal(fsdp__k_embedding(w, FSDP_F32, 4, 2, ids, 3, out), FSDP_INVALID_DATA);
        assert_non_null(strstr(fsdp_error_text(), "index 1"));
        fsdp_error_clear();
    }
}

/* ---- rotary ------------------------------------------------------------------------------ */

static void check_rotary(fsdp_dtype t, fsdp_dtype dt, int64_t B, int64_t T, int64_t H, int64_t D,
                         int add, int by_head)
{
    int64_t N = B * T * H * D, half = D / 2;
    fsdp__rotary r = {.t = t,
                      .dt = dt,
                      .B = B,
                      .T = T,
                      .H = H,
                      .D = D,
                      .x_stride = {T * H * D, H * D, D},
                      .y_stride = {T * H * D, H * D, D},
                      .add = add};
    if (by_head) r.y_stride[1] = D, r.y_stride[2] = T * D;
    if (by_head) r.table_b_stride = T * half;
    int64_t table = T * half * (by_head ? B : 1);
    float *c = malloc((size_t)table * sizeof *c + 1), *s = malloc((size_t)table * sizeof *s + 1);
    void *x = check_array(t, N, 1, 1), *y = check_array(dt, N, 2, 1), *y0 = check_copy(y, dt, N);
    assert_non_null(c), assert_non_null(s);
    for (int64_t i = 0; i < table; i++) {
        c[i] = (float)cos(3 * check_random((uint64_t)i));
        s[i] = (float)sin(3 * check_random((uint64_t)i));
    }
    for (r.inverse = 0; r.inverse < 2; r.inverse++) {
        memcpy(y, y0, bytes_of(dt, N));
        fsdp__k_rotary(&r, x, c, s, y);
        for (int64_t k = 0; k < B * T * H * half; k++) {
            int64_t i = k % half, h = k / half % H, p = k / half / H % T, b = k / half / H / T;
            int64_t at = b * r.x_stride[0] + p * r.x_stride[1] + h * r.x_stride[2] + i;
            int64_t to = b * r.y_stride[0] + p * r.y_stride[1] + h * r.y_stride[2] + i;
            double co = c[b * r.table_b_stride + p * half + i];
            double si = s[b * r.table_b_stride + p * half + i] * (r.inverse ? -1 : 1);
            double u = check_get(x, t, at), v = check_get(x, t, at + half);
            double was1 = add ? check_get(y0, dt, to) : 0;
            double was2 = add ? check_get(y0, dt, to + half) : 0;
            check_near(y, to, u * co - v * si + was1, 2, 2, t, dt, "rotary low");
            check_near(y, to + half, v * co + u * si + was2, 2, 2, t, dt, "rotary high");
        }
    }
    free(c), free(s), free(x), free(y), free(y0);
}

static void test_rotary(void **state)
{
    (void)state;
    for (int p = 0; p < PAIRS; p++)
        for (int k = 0; k < 4; k++) {
            check_rotary(pairs[p][0], pairs[p][1], 2, 5, 3, 16, k & 1, k >> 1);
            check_rotary(pairs[p][0], pairs[p][1], 1, 3, 2, 6, k & 1, k >> 1);
            check_rotary(pairs[p][0], pairs[p][1], 2, 2, 1, 72, k & 1, k >> 1);
            check_rotary(pairs[p][0], pairs[p][1], 2, 0, 1, 8, k & 1, k >> 1);
        }
}

/* In place: x and y one array. */
static void test_rotary_in_place(void **state)
{
    enum { N = 3 * 2 * 20 };
    (void)state;
    fsdp__rotary r = {.t = FSDP_F32,
                      .dt = FSDP_F32,
                      .B = 1,
                      .T = 3,
                      .H = 2,
                      .D = 20,
                      .x_stride = {N, 40, 20},
                      .y_stride = {N, 40, 20}};
    float *c = check_array(FSDP_F32, 30, 1, 1), *s = check_array(FSDP_F32, 30, 2, 1), y[N];
    float *x = check_array(FSDP_F32, N, 3, 1);
    fsdp__k_rotary(&r, x, c, s, y);
    fsdp__k_rotary(&r, x, c, s, x);
    assert_memory_equal(x, y, sizeof y);
    free(c), free(s), free(x);
}

/* ---- an element's bits ---------------------------------------------------------------------- */

/* A row's bits do not depend on the rows beside it nor on its alignment; forward kernels. */
static void test_row_place(void **state)
{
    enum { R = 5, C = 37 };
    (void)state;
    for (int p = 0; p < 2; p++) {
        fsdp_dtype t = pairs[p][0];
        void *x = check_array(t, R * C, 1, 3), *w = check_array(t, C, 2, 1);
        void *y[3];
        for (int k = 0; k < 3; k++)
            y[k] = check_copy(x, t, R * C);
        fsdp__k_rms_norm(x, w, t, R, C, 1e-5, y[0], NULL);
        fsdp__k_layer_norm(x, w, w, t, R, C, 1e-5, y[1], NULL, NULL);
        fsdp__k_softmax(x, t, R, C, y[2]);
        for (int64_t r = 0; r < R; r++) {
            void *one = check_copy(x, t, C);
            const void *row = fsdp__cat(x, t, r * C);
            fsdp__k_rms_norm(row, w, t, 1, C, 1e-5, one, NULL);
            assert_memory_equal(one, fsdp__cat(y[0], t, r * C), bytes_of(t, C));
            fsdp__k_layer_norm(row, w, w, t, 1, C, 1e-5, one, NULL, NULL);
            assert_memory_equal(one, fsdp__cat(y[1], t, r * C), bytes_of(t, C));
            fsdp__k_softmax(row, t, 1, C, one);
            assert_memory_equal(one, fsdp__cat(y[2], t, r * C), bytes_of(t, C));
            free(one);
        }
        for (int k = 0; k < 3; k++)
            free(y[k]);
        free(x), free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_norms),           cmocka_unit_test(test_norm_wide),
        cmocka_unit_test(test_softmax),         cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_embedding_range), cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_rotary_in_place), cmocka_unit_test(test_row_place),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
