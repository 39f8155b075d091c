/*
 * test_nn_batch_norm.c - batch norm against its definition (PyTorch's: biased
 * variance to normalise, unbiased in the running one), in every dtype, and the
 * life of its buffers.
 */
#include "tensor_check.h"

#include "kernel_check.h"

static const int64_t shapes[][4] = {{5, 3, 1, 1}, {4, 70, 1, 1}, {3, 5, 7, 1}, {2, 3, 5, 9}};
static const int dims[] = {2, 2, 3, 4};
static const fsdp_dtype dtypes[] = {FSDP_F64, FSDP_F32, FSDP_F16, FSDP_BF16};

typedef struct batch {
    fsdp_tensor *x, *w, *b, *mean, *var, *g; /* g: the gradient that comes in */
    int64_t N, C, L;
} batch;

static batch make(int shape, fsdp_dtype t)
{
    batch k = {.N = shapes[shape][0], .C = shapes[shape][1]};
    k.L = shapes[shape][2] * shapes[shape][3];
    fsdp_tensor *x = fsdp_shift(fsdp_randn(FSDP_F64, dims[shape], shapes[shape], 1, "x"), 0.7);
    k.x = fsdp_detach(fsdp_cast(x, t));
    k.w = fsdp_detach(fsdp_cast(fsdp_randn(FSDP_F64, 1, &k.C, 2, "w"), t));
    k.b = fsdp_detach(fsdp_cast(fsdp_randn(FSDP_F64, 1, &k.C, 3, "b"), t));
    k.g = fsdp_cast(fsdp_randn(FSDP_F64, dims[shape], shapes[shape], 4, "g"), t);
    k.mean = fsdp_randn(FSDP_F32, 1, &k.C, 5, "mean");
    k.var = fsdp_shift(fsdp_rand(FSDP_F32, 1, &k.C, 6, "var"), 0.5);
    return k;
}

/* Mean and biased variance of channel c, in f64. */
static void definition(const batch *k, const double *x, int64_t c, double *mean, double *var)
{
    double n = (double)(k->N * k->L), m = 0, q = 0;
    for (int64_t s = 0; s < k->N; s++)
        for (int64_t l = 0; l < k->L; l++)
            m += x[(s * k->C + c) * k->L + l] / n;
    for (int64_t s = 0; s < k->N; s++)
        for (int64_t l = 0; l < k->L; l++) {
            double d = x[(s * k->C + c) * k->L + l] - m;
            q += d * d / n;
        }
    *mean = m;
    *var = q;
}

static void check_batch(int shape, fsdp_dtype t, int training)
{
    batch k = make(shape, t);
    double *mean0 = check_values(k.mean), *var0 = check_values(k.var);
    double ulp = check_ulp(t), n = (double)(k.N * k.L);
    fsdp_tensor *y = fsdp_batch_norm(k.x, k.w, k.b, k.mean, k.var, training, 0.1, 1e-5);
    check_tensor(y);
    assert_int_equal(fsdp_tensor_dtype(y), t);
    double *x = check_values(k.x), *w = check_values(k.w), *b = check_values(k.b);
    double *v = check_values(y), *mean1 = check_values(k.mean), *var1 = check_values(k.var);
    for (int64_t c = 0; c < k.C; c++) {
        double m = mean0[c], q = var0[c];
        if (training) {
            definition(&k, x, c, &m, &q);
            assert_true(fabs(mean1[c] - (0.9 * mean0[c] + 0.1 * m)) <= 1e-6);
            assert_true(fabs(var1[c] - (0.9 * var0[c] + 0.1 * q * n / (n - 1))) <= 1e-6 * (1 + q));
        } else {
            assert_true(mean1[c] == mean0[c] && var1[c] == var0[c]);
        }
        for (int64_t s = 0; s < k.N; s++)
            for (int64_t l = 0; l < k.L; l++) {
                int64_t i = (s * k.C + c) * k.L + l;
                double want = (x[i] - m) / sqrt(q + 1e-5) * w[c] + b[c];
                assert_true(fabs(v[i] - want) <= 2 * ulp * fabs(want) + 1e-12 + ulp * 1e-3);
            }
    }
    free(mean0), free(var0), free(x), free(w), free(b), free(v), free(mean1), free(var1);
}

static void test_forward(void **state)
{
    (void)state;
    for (int shape = 0; shape < 4; shape++)
        for (int t = 0; t < 4; t++)
            for (int training = 0; training < 2; training++) {
                fsdp_scope *scope = fsdp_scope_begin();
                check_batch(shape, dtypes[t], training);
                fsdp_scope_end(scope);
            }
}

/* Gradients of x, w and b; in f64 from the same rounded inputs when wide. */
static void gradients(const batch *k, int wide, int training, fsdp_tensor **out)
{
    fsdp_tensor *in[3] = {k->x, k->w, k->b}, *g = wide ? fsdp_cast(k->g, FSDP_F64) : k->g;
    for (int i = 0; i < 3; i++) {
        in[i] = fsdp_detach(wide ? fsdp_cast(in[i], FSDP_F64) : in[i]);
        check_ok(fsdp_requires_grad_(in[i], 1));
    }
    fsdp_tensor *mean = fsdp_clone(k->mean), *var = fsdp_clone(k->var);
    fsdp_tensor *y = fsdp_batch_norm(in[0], in[1], in[2], mean, var, training, 0.1, 1e-5);
    check_tensor(y);
    check_ok(fsdp_backward_from(y, g, 0));
    for (int i = 0; i < 3; i++)
        out[i] = fsdp_grad(in[i]);
}

/* The gradient check judges f64 by differences; the others are judged by f64. */
static void test_backward(void **state)
{
    (void)state;
    for (int shape = 0; shape < 4; shape++)
        for (int t = 1; t < 4; t++)
            for (int training = 0; training < 2; training++) {
                fsdp_scope *scope = fsdp_scope_begin();
                batch k = make(shape, dtypes[t]);
                fsdp_tensor *narrow[3], *wide[3];
                gradients(&k, 0, training, narrow);
                gradients(&k, 1, training, wide);
                for (int i = 0; i < 3; i++)
                    assert_true(check_distance(narrow[i], wide[i]) <= 4 * check_ulp(dtypes[t]));
                fsdp_scope_end(scope);
            }
}

static void test_module(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    check_ok(fsdp_device_push(FSDP_META));
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module *bn = fsdp_module_add(m, "bn", fsdp_batch_norm_create(3, 1e-5, 0.1));
    check_tensor(bn);
    fsdp_tensor *y = fsdp_call(m, fsdp_zeros(FSDP_F32, 2, SIZES(4, 3)));
    check_tensor(y);
    assert_int_equal(fsdp_tensor_device(y), FSDP_META);
    check_ok(fsdp_device_pop());
    check_ok(fsdp_to_empty(m, FSDP_CPU));
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(4, 3), 1, "x");
    assert_null(fsdp_call(m, x)); /* no values yet */
    check_error(FSDP_INVALID_STATE, "bn.weight");
    check_ok(fsdp_reset_parameters(m, 1));
    for (int i = 0; i < 2; i++)
        check_tensor(fsdp_call(m, x));
    assert_true(fsdp_item(fsdp_module_buffer(bn, "num_batches_tracked")) == 2);
    double *var = check_values(fsdp_module_buffer(bn, "running_var"));
    fsdp_module_train(m, 0);
    fsdp_tensor *a = fsdp_call(m, x), *part = fsdp_call(m, fsdp_slice(x, 0, 1, 2));
    check_tensor(part); /* one value a channel is enough now */
    assert_true(check_same_bits(fsdp_clone(fsdp_slice(a, 0, 1, 2)), part));
    double *after = check_values(fsdp_module_buffer(bn, "running_var"));
    assert_memory_equal(var, after, 3 * sizeof *var);
    assert_true(fsdp_item(fsdp_module_buffer(bn, "num_batches_tracked")) == 2);
    check_ok(fsdp_reset_parameters(m, 1));
    assert_true(fsdp_item(fsdp_module_buffer(bn, "num_batches_tracked")) == 0);
    free(var), free(after);
    fsdp_module_free(m);
    fsdp_scope_end(scope);
}

/* Weights in bf16 leave the buffers in f32, and both meet in one forward. */
static void test_buffers_keep_f32(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *bn = fsdp_batch_norm_create(4, 1e-5, 0.1);
    check_ok(fsdp_reset_parameters(bn, 1));
    check_ok(fsdp_module_to_dtype(bn, FSDP_BF16));
    fsdp_tensor *y = fsdp_call(bn, fsdp_randn(FSDP_BF16, 2, SIZES(6, 4), 1, "x"));
    check_tensor(y);
    assert_int_equal(fsdp_tensor_dtype(y), FSDP_BF16);
    assert_int_equal(fsdp_tensor_dtype(fsdp_module_buffer(bn, "running_mean")), FSDP_F32);
    check_ok(fsdp_backward(fsdp_sum(y)));
    fsdp_module_free(bn);
    fsdp_scope_end(scope);
}

static void test_refused(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_zeros(FSDP_F32, 2, SIZES(1, 3)), *c = fsdp_zeros(FSDP_F32, 1, SIZES(3));
    fsdp_tensor *two = fsdp_zeros(FSDP_F32, 2, SIZES(2, 3));
    assert_null(fsdp_batch_norm(x, c, c, c, c, 1, 0.1, 1e-5));
    check_error(FSDP_INVALID_SHAPE, "more than one value");
    assert_null(fsdp_batch_norm(two, c, c, NULL, NULL, 0, 0.1, 1e-5));
    check_error(FSDP_INVALID_ARGUMENT, "evaluation needs them");
    assert_null(fsdp_batch_norm(two, c, c, c, NULL, 1, 0.1, 1e-5));
    check_error(FSDP_INVALID_ARGUMENT, "together");
    assert_null(fsdp_batch_norm(c, c, c, c, c, 1, 0.1, 1e-5));
    check_error(FSDP_INVALID_SHAPE, "(N, C)");
    assert_null(fsdp_batch_norm(two, c, fsdp_slice(c, 0, 0, 2), c, c, 1, 0.1, 1e-5));
    check_error(FSDP_INVALID_SHAPE, "size (C)");
    fsdp_tensor *leaf = fsdp_zeros(FSDP_F32, 1, SIZES(3));
    check_ok(fsdp_requires_grad_(leaf, 1));
    assert_null(fsdp_batch_norm(two, c, c, leaf, c, 1, 0.1, 1e-5));
    check_error(FSDP_INVALID_ARGUMENT, "no gradient");
    assert_null(fsdp_batch_norm_create(3, 1e-5, 1.5));
    check_error(FSDP_INVALID_ARGUMENT, "momentum");
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forward), cmocka_unit_test(test_backward),
        cmocka_unit_test(test_module),  cmocka_unit_test(test_buffers_keep_f32),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
