/*
 * test_tensor_optim.c - AdamW and SGD against five steps of torch.optim's
 * (tests/data/optim), against f64, and the same bits in every table.
 */
#include "kernel_check.h"

#include "tensor/kernel_set.h"

static const fsdp_dtype pairs[][2] = {
    {FSDP_F32, FSDP_F32}, {FSDP_F32, FSDP_BF16}, {FSDP_BF16, FSDP_BF16}, {FSDP_BF16, FSDP_F32},
    {FSDP_F16, FSDP_F16}, {FSDP_F32, FSDP_F16},  {FSDP_F64, FSDP_F64},   {FSDP_F64, FSDP_F32}};
enum { PAIRS = 8 };

/* ---- golden numbers ------------------------------------------------------------ */

typedef struct golden {
    char *bytes;
    size_t size;
} golden;

static golden golden_open(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, FSDP_TEST_DATA "/optim/%s.safetensors", name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    golden g = {.bytes = malloc(1 << 16)};
    assert_non_null(g.bytes);
    g.size = fread(g.bytes, 1, (1 << 16) - 1, f);
    assert_true(g.size > 8 && feof(f));
    fclose(f);
    return g;
}

/* The floats of a tensor and their number. The header is what one library writes: each entry
 * {"dtype":"F32","shape":[..],"data_offsets":[a,b]}, which is all this reads of JSON. */
static float *golden_get(const golden *g, const char *name, int64_t *n)
{
    uint64_t header;
    memcpy(&header, g->bytes, 8);
    assert_true(8 + header < g->size);
    char *text = strndup(g->bytes + 8, header), key[32];
    assert_non_null(text);
    snprintf(key, sizeof key, "\"%s\":{", name);
    char *at = strstr(text, key);
    assert_non_null(at);
    at = strstr(at, "\"data_offsets\":[");
    assert_non_null(at);
    unsigned long first, last;
    assert_int_equal(sscanf(at, "\"data_offsets\":[%lu,%lu]", &first, &last), 2);
    assert_true(first <= last && 8 + header + last <= g->size);
    free(text);
    float *x = malloc(last - first + 1);
    assert_non_null(x);
    memcpy(x, g->bytes + 8 + header + first, last - first);
    *n = (int64_t)(last - first) / 4;
    return x;
}

static void check_golden(const char *name, const fsdp__adamw *adamw, const fsdp__sgd *sgd)
{
    golden g = golden_open(name);
    int64_t n, m;
    float *p = golden_get(&g, "p0", &n);
    float *a = calloc((size_t)n, sizeof *a), *b = calloc((size_t)n, sizeof *b);
    assert_non_null(a), assert_non_null(b);
    for (int step = 1; step <= 5; step++) {
        char key[16];
        snprintf(key, sizeof key, "g%d", step);
        float *grad = golden_get(&g, key, &m);
        assert_true(m == n);
        snprintf(key, sizeof key, "p%d", step);
        float *want = golden_get(&g, key, &m);
        assert_true(m == n);
        if (adamw) {
            fsdp__adamw o = *adamw;
            o.step = step;
            fsdp__k_adamw(&o, p, a, b, FSDP_F32, grad, FSDP_F32, n);
        } else {
            fsdp__sgd o = *sgd;
            o.step = step;
            fsdp__k_sgd(&o, p, a, FSDP_F32, grad, FSDP_F32, n);
        }
        double off = 0, top = 0;
        for (int64_t i = 0; i < n; i++) {
            off = fmax(off, fabs((double)p[i] - (double)want[i]));
            top = fmax(top, fabs((double)want[i]));
        }
        assert_true(off <= 1e-6 * top);
        free(grad), free(want);
    }
    free(p), free(a), free(b), free(g.bytes);
}

static void test_golden(void **state)
{
    (void)state;
    fsdp__adamw adamw = {
        .lr = 2e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .g_scale = 1};
    fsdp__adamw no_decay = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .g_scale = 1};
    fsdp__sgd sgd = {.lr = 1e-2, .momentum = 0.9, .weight_decay = 0.01, .g_scale = 1};
    check_golden("adamw", &adamw, NULL);
    check_golden("adamw_amsgrad_off_wd0", &no_decay, NULL);
    check_golden("sgd_momentum", NULL, &sgd);
}

/* ---- against f64 ------------------------------------------------------------------ */

static void check_close(const void *x, fsdp_dtype t, int64_t i, double want, double size)
{
    double got = check_get(x, t, i), unit = t == FSDP_F64 ? 0x1p-53 : 0x1p-24;
    double bound = 16 * unit * (fabs(want) + size);
    bound += check_ulp(t) * 1.01 * (fabs(want) + bound) + (t == FSDP_F16 ? 0x1p-24 : 0);
    if (!(fabs(got - want) <= bound)) {
        print_error("[%lld] %.17g, expected %.17g within %g\n", (long long)i, got, want, bound);
        fail();
    }
}

static void check_adamw(fsdp_dtype pt, fsdp_dtype gt, int64_t n, int64_t step)
{
    fsdp__adamw o = {.lr = 0.03,
                     .beta1 = 0.9,
                     .beta2 = 0.95,
                     .eps = 1e-3,
                     .weight_decay = 0.1,
                     .g_scale = 0.37,
                     .step = step};
    void *p = check_array(pt, n, 1, 1), *m = check_array(pt, n, 2, 0.1);
    void *v = check_array(pt, n, 3, 0.1), *g = check_array(gt, n, 4, 1);
    for (int64_t i = 0; i < n; i++)
        check_set(v, pt, i, fabs(check_get(v, pt, i)) + 1e-3);
    void *p0 = check_copy(p, pt, n), *m0 = check_copy(m, pt, n), *v0 = check_copy(v, pt, n);
    void *p1 = check_copy(p, pt, n), *m1 = check_copy(m, pt, n), *v1 = check_copy(v, pt, n);
    fsdp__k_adamw(&o, p, m, v, pt, g, gt, n);
    for (int64_t i = 0; i < n; i++) {
        double grad = check_get(g, gt, i) * o.g_scale, w = check_get(p0, pt, i);
        double a = 0.9 * check_get(m0, pt, i) + 0.1 * grad;
        double b = 0.95 * check_get(v0, pt, i) + 0.05 * grad * grad;
        double denom = sqrt(b) / sqrt(1 - pow(0.95, (double)step)) + o.eps;
        w = w * (1 - o.lr * 0.1) - o.lr / (1 - pow(0.9, (double)step)) * a / denom;
        check_close(m, pt, i, a, 1);
        check_close(v, pt, i, b, 1);
        check_close(p, pt, i, w, 1);
    }
    fsdp__kernel_set_plain(pt)->adamw(&o, p1, m1, v1, pt, g, gt, n);
    size_t bytes = (size_t)n * fsdp_dtype_size(pt);
    assert_memory_equal(p, p1, bytes);
    assert_memory_equal(m, m1, bytes);
    assert_memory_equal(v, v1, bytes);
    free(p), free(m), free(v), free(g), free(p0), free(m0), free(v0), free(p1), free(m1), free(v1);
}

static void check_sgd(fsdp_dtype pt, fsdp_dtype gt, int64_t n, int64_t step, int with, int nesterov)
{
    fsdp__sgd o = {.lr = 0.03,
                   .momentum = with ? 0.9 : 0,
                   .weight_decay = step == 2 ? 0 : 0.1,
                   .g_scale = 0.37,
                   .nesterov = nesterov,
                   .step = step};
    void *p = check_array(pt, n, 1, 1), *buf = check_array(pt, n, 2, 1);
    void *g = check_array(gt, n, 4, 1), *p0 = check_copy(p, pt, n), *b0 = check_copy(buf, pt, n);
    void *p1 = check_copy(p, pt, n), *b1 = check_copy(buf, pt, n);
    fsdp__k_sgd(&o, p, with ? buf : NULL, pt, g, gt, n);
    for (int64_t i = 0; i < n; i++) {
        double w = check_get(p0, pt, i), d = check_get(g, gt, i) * o.g_scale + o.weight_decay * w;
        if (with) {
            double b = step == 1 ? d : 0.9 * check_get(b0, pt, i) + d;
            check_close(buf, pt, i, b, 1);
            d = nesterov ? d + 0.9 * b : b;
        }
        check_close(p, pt, i, w - o.lr * d, 1);
    }
    fsdp__kernel_set_plain(pt)->sgd(&o, p1, with ? b1 : NULL, pt, g, gt, n);
    size_t bytes = (size_t)n * fsdp_dtype_size(pt);
    assert_memory_equal(p, p1, bytes);
    assert_memory_equal(buf, b1, bytes);
    free(p), free(buf), free(g), free(p0), free(b0), free(p1), free(b1);
}

static void test_f64(void **state)
{
    static const int64_t counts[] = {0, 1, 7, 16, 33, 1000};
    (void)state;
    for (int k = 0; k < PAIRS * 6; k++) {
        fsdp_dtype pt = pairs[k % PAIRS][0], gt = pairs[k % PAIRS][1];
        int64_t n = counts[k / PAIRS];
        check_adamw(pt, gt, n, 1);
        check_adamw(pt, gt, n, 1000);
        for (int step = 1; step <= 3; step++) {
            check_sgd(pt, gt, n, step, 0, 0);
            check_sgd(pt, gt, n, step, 1, 0);
            check_sgd(pt, gt, n, step, 1, 1);
        }
    }
}

/* A shard's bits do not depend on where it was cut, nor on the threads. */
static void test_cut(void **state)
{
    enum { N = 70001, CUT = 33333 };
    (void)state;
    fsdp__adamw o = {.lr = 0.01,
                     .beta1 = 0.9,
                     .beta2 = 0.999,
                     .eps = 1e-8,
                     .weight_decay = 0.1,
                     .g_scale = 0.5,
                     .step = 3};
    for (int k = 0; k < 3; k++) {
        fsdp_dtype pt = pairs[k][0], gt = pairs[k][1];
        void *x[2][3], *g = check_array(gt, N, 9, 1);
        for (int j = 0; j < 3; j++) {
            x[0][j] = check_array(pt, N, (uint64_t)j, 1);
            for (int64_t i = 0; i < N && j == 2; i++)
                check_set(x[0][j], pt, i, fabs(check_get(x[0][j], pt, i)));
            x[1][j] = check_copy(x[0][j], pt, N);
        }
        fsdp_set_threads(2);
        fsdp__k_adamw(&o, x[0][0], x[0][1], x[0][2], pt, g, gt, N);
        fsdp_set_threads(1);
        fsdp__k_adamw(&o, x[1][0], x[1][1], x[1][2], pt, g, gt, CUT);
        fsdp__k_adamw(&o, fsdp__at(x[1][0], pt, CUT), fsdp__at(x[1][1], pt, CUT),
                      fsdp__at(x[1][2], pt, CUT), pt, fsdp__at(g, gt, CUT), gt, N - CUT);
        for (int j = 0; j < 3; j++) {
            assert_memory_equal(x[0][j], x[1][j], (size_t)N * fsdp_dtype_size(pt));
            free(x[0][j]), free(x[1][j]);
        }
        free(g);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_f64),
        cmocka_unit_test(test_cut),
    };
    return check_all_isas(cmocka_run_group_tests(tests, NULL, NULL));
}
