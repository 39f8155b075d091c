/*
 * test_golden_ops.c - ops and their gradients against PyTorch's numbers, in
 * fp32 (tests/data/ops) and on bf16 inputs (tests/data/ops-bf16, whose results
 * were computed in fp64 from those inputs).
 *
 * Bounds: fp32, largest difference 1e-5 of the largest value. bf16, 1 ulp of
 * bf16 at the fp64 value, or at 1/256 of the largest value where sums cancel;
 * softmax 2 ulp; attention 1e-2 of the largest value.
 */
#include "golden.h"

typedef struct inputs {
    fsdp_tensor *x[3];
    fsdp_tensor *ids;
} inputs;

typedef struct op_case {
    const char *file;
    const char *in[4]; /* names of the inputs, which `grad.` is asked of */
    fsdp_tensor *(*run)(const inputs *in);
    int f32, bf16; /* in which folder the file is */
    double ulp;    /* of bf16; 0: 1e-2 of the largest value */
} op_case;

#define RUN(name, expression)                        \
    static fsdp_tensor *run_##name(const inputs *in) \
    {                                                \
        return expression;                           \
    }

RUN(add, fsdp_add(in->x[0], in->x[1]))
RUN(mul, fsdp_mul(in->x[0], in->x[1]))
RUN(ce_mean, fsdp_cross_entropy(in->x[0], in->ids, -100, FSDP_REDUCE_MEAN))
RUN(ce_sum, fsdp_cross_entropy(in->x[0], in->ids, -100, FSDP_REDUCE_SUM))
RUN(embedding, fsdp_embedding(in->x[0], in->ids))
RUN(gelu, fsdp_gelu(in->x[0]))
RUN(gelu_tanh, fsdp_gelu_tanh(in->x[0]))
RUN(layer_norm, fsdp_layer_norm(in->x[0], in->x[1], in->x[2], 1e-5))
RUN(linear, fsdp_linear_bias(in->x[0], in->x[1], in->x[2]))
RUN(linear_wide, fsdp_linear(in->x[0], in->x[1]))
RUN(matmul, fsdp_matmul(in->x[0], in->x[1]))
RUN(rms_norm, fsdp_rms_norm(in->x[0], in->x[1], 1e-5))
RUN(silu, fsdp_silu(in->x[0]))
RUN(softmax, fsdp_softmax(in->x[0]))
RUN(swiglu, fsdp_swiglu(in->x[0], in->x[1]))
RUN(transpose_reshape, fsdp_reshape(fsdp_transpose(in->x[0], 1, 2), 2, SIZES(2, 12)))

/* The files hold (B, H, T, D); ours is (B, T, H, D). */
static fsdp_tensor *run_sdpa(const inputs *in)
{
    fsdp_tensor *t[3];
    for (int k = 0; k < 3; k++)
        t[k] = fsdp_transpose(in->x[k], 1, 2);
    return fsdp_transpose(fsdp_attention(t[0], t[1], t[2], NULL), 1, 2);
}

static fsdp_tensor *run_rope(const inputs *in)
{
    int64_t T = fsdp_size(in->x[0], 2), half = fsdp_size(in->x[0], 3) / 2;
    fsdp_tensor *c = fsdp_empty(FSDP_F32, 2, SIZES(T, half));
    fsdp_tensor *s = fsdp_empty(FSDP_F32, 2, SIZES(T, half));
    float *pc = fsdp_data(c), *ps = fsdp_data(s);
    for (int64_t p = 0; p < T; p++)
        for (int64_t i = 0; i < half; i++) {
            double a = (double)p * pow(10000.0, -(double)i / (double)half);
            pc[p * half + i] = (float)cos(a);
            ps[p * half + i] = (float)sin(a);
        }
    return fsdp_transpose(fsdp_rotary(fsdp_transpose(in->x[0], 1, 2), c, s), 1, 2);
}

static const op_case cases[] = {
    {"add_broadcast", {"a", "b"}, run_add, 1, 0, 1},
    {"cross_entropy_mean", {"x"}, run_ce_mean, 1, 1, 1},
    {"cross_entropy_sum", {"x"}, run_ce_sum, 1, 0, 1},
    {"embedding", {"w"}, run_embedding, 1, 1, 1},
    {"gelu", {"x"}, run_gelu, 1, 1, 1},
    {"gelu_tanh", {"x"}, run_gelu_tanh, 1, 1, 1},
    {"layer_norm", {"x", "w", "b"}, run_layer_norm, 1, 1, 1},
    {"linear", {"x", "w", "b"}, run_linear, 1, 1, 1},
    {"linear_wide", {"x", "w"}, run_linear_wide, 0, 1, 1},
    {"matmul", {"a", "b"}, run_matmul, 1, 1, 1},
    {"mul_broadcast", {"a", "b"}, run_mul, 1, 0, 1},
    {"rms_norm", {"x", "w"}, run_rms_norm, 1, 1, 1},
    {"rope_half", {"q"}, run_rope, 1, 1, 1},
    {"sdpa_causal", {"q", "k", "v"}, run_sdpa, 1, 0, 0},
    {"sdpa_causal_gqa", {"q", "k", "v"}, run_sdpa, 1, 1, 0},
    {"silu", {"x"}, run_silu, 1, 1, 1},
    {"softmax", {"x"}, run_softmax, 1, 1, 2},
    {"swiglu", {"a", "b"}, run_swiglu, 1, 1, 1},
    {"transpose_reshape", {"x"}, run_transpose_reshape, 1, 0, 1},
};

static void close_f32(const op_case *c, const char *what, const fsdp_tensor *got,
                      const fsdp_tensor *expected)
{
    double d = check_distance(got, expected);
    if (!(d <= 1e-5)) fail_msg("%s, %s: %g of the largest value", c->file, what, d);
}

/* One unit in the last place of bf16 at v. */
static double ulp_at(double v)
{
    return v == 0 ? 0 : ldexp(1.0, ilogb(v) - 7);
}

static void close_bf16(const op_case *c, const char *what, const fsdp_tensor *got,
                       const fsdp_tensor *expected)
{
    if (c->ulp == 0) {
        double d = check_distance(got, expected);
        if (!(d <= 1e-2)) fail_msg("%s, %s: %g of the largest value", c->file, what, d);
        return;
    }
    double *x = check_values(got), *y = check_values(expected), most = 0;
    check_tensor(x);
    check_tensor(y);
    assert_int_equal(fsdp_numel(got), fsdp_numel(expected));
    for (int64_t i = 0; i < fsdp_numel(got); i++)
        most = fmax(most, fabs(y[i]));
    for (int64_t i = 0; i < fsdp_numel(got); i++) {
        double bound = c->ulp * ulp_at(fmax(fabs(y[i]), most / 256));
        if (!(fabs(x[i] - y[i]) <= bound))
            fail_msg("%s, %s, element %lld: %.9g; expected %.9g within %g", c->file, what,
                     (long long)i, x[i], y[i], bound);
    }
    free(x);
    free(y);
}

typedef void (*judge)(const op_case *c, const char *what, const fsdp_tensor *got,
                      const fsdp_tensor *expected);

static void run_case(const op_case *c, const char *folder, judge close)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__st *st = golden_open(folder, c->file);
    inputs in = {{NULL, NULL, NULL}, NULL};
    char name[32];
    for (int k = 0; c->in[k]; k++) {
        snprintf(name, sizeof name, "in.%s", c->in[k]);
        in.x[k] = golden_need(st, name);
        check_ok(fsdp_requires_grad_(in.x[k], 1));
    }
    in.ids = golden_get(st, "in.labels");
    if (!in.ids) in.ids = golden_get(st, "in.ids");
    fsdp_tensor *y = c->run(&in), *dout = golden_get(st, "dout");
    check_tensor(y);
    close(c, "out", y, golden_need(st, "out"));
    check_ok(dout ? fsdp_backward_from(y, dout, 0) : fsdp_backward(y));
    for (int k = 0; c->in[k]; k++) {
        snprintf(name, sizeof name, "grad.%s", c->in[k]);
        assert_non_null(fsdp_grad(in.x[k]));
        assert_int_equal(fsdp_tensor_dtype(fsdp_grad(in.x[k])), fsdp_tensor_dtype(in.x[k]));
        close(c, name, fsdp_grad(in.x[k]), golden_need(st, name));
    }
    fsdp__st_close(st);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

static void test_f32(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (cases[i].f32) run_case(&cases[i], "ops", close_f32);
}

static void test_bf16(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (cases[i].bf16) run_case(&cases[i], "ops-bf16", close_bf16);
}

/* Head and loss as one op is linear and cross entropy: the files of both serve. */
static void test_head(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    for (int bf16 = 0; bf16 < 2; bf16++) {
        fsdp_tensor *x[2], *w[2], *b[2], *loss[2];
        fsdp__st *st = golden_open(bf16 ? "ops-bf16" : "ops", "linear");
        fsdp_tensor *t = fsdp_empty(FSDP_I64, 2, SIZES(3, 5));
        for (int64_t i = 0; i < 15; i++)
            ((int64_t *)fsdp_data(t))[i] = i == 4 ? -100 : i * 7 % 11;
        for (int k = 0; k < 2; k++) {
            x[k] = golden_need(st, "in.x");
            w[k] = golden_need(st, "in.w");
            b[k] = golden_need(st, "in.b");
            check_ok(fsdp_requires_grad_(x[k], 1));
            check_ok(fsdp_requires_grad_(w[k], 1));
            check_ok(fsdp_requires_grad_(b[k], 1));
        }
        fsdp__st_close(st);
        loss[0] = fsdp_head_cross_entropy(x[0], w[0], b[0], t, -100, FSDP_REDUCE_MEAN);
        /* The judge keeps logits in fp32. */
        fsdp_tensor *f[3] = {fsdp_cast(x[1], FSDP_F32), fsdp_cast(w[1], FSDP_F32),
                             fsdp_cast(b[1], FSDP_F32)};
        loss[1] = fsdp_cross_entropy(fsdp_linear_bias(f[0], f[1], f[2]), t, -100, FSDP_REDUCE_MEAN);
        check_ok(fsdp_backward(loss[0]));
        check_ok(fsdp_backward(loss[1]));
        double bound = bf16 ? 1e-2 : 1e-5;
        assert_true(fabs(fsdp_item(loss[0]) / fsdp_item(loss[1]) - 1) <= (bf16 ? 1e-4 : 1e-6));
        assert_true(check_distance(fsdp_grad(x[0]), fsdp_grad(x[1])) <= bound);
        assert_true(check_distance(fsdp_grad(w[0]), fsdp_grad(w[1])) <= bound);
        assert_true(check_distance(fsdp_grad(b[0]), fsdp_grad(b[1])) <= bound);
    }
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_head),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
