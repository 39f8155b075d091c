/*
 * test_optim_groups.c - parameter groups: which parameter has which settings, and that a group
 * steps as an optimizer of its settings would.
 */
#include "tensor_check.h"

#include <math.h>

#include "fsdp/nn.h"
#include "fsdp/optim.h"

/* up (3 -> 4, bias), norm (4), down (4 -> 2): one value a parameter, and gradients. */
static fsdp_module *make_model(void)
{
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module_add(m, "up", fsdp_linear_create(3, 4, 1));
    fsdp_module_add(m, "norm", fsdp_rms_norm_create(4, 1e-5));
    fsdp_module_add(m, "down", fsdp_linear_create(4, 2, 0));
    check_ok(fsdp_reset_parameters(m, 3));
    return m;
}

/* The same gradients in every step: of element i of parameter k, 0.1 (k + 1) - 0.01 i. */
static void set_grads(fsdp_module *m, int zero)
{
    fsdp_param_list l;
    check_ok(fsdp_module_params(m, &l));
    for (int64_t k = 0; k < l.count; k++) {
        fsdp_tensor *p = fsdp_param_tensor(l.items[k].param);
        fsdp_tensor *g = fsdp_zeros(FSDP_F32, fsdp_ndim(p), fsdp_sizes(p));
        check_tensor(g);
        float *x = fsdp_data(g);
        for (int64_t i = 0; i < fsdp_numel(g) && !zero; i++)
            x[i] = 0.1f * (float)(k + 1) - 0.01f * (float)i;
        check_ok(fsdp_set_grad(p, g));
    }
    fsdp_param_list_free(&l);
}

static void steps(fsdp_module *m, fsdp_optimizer *o, int n, int zero)
{
    for (int k = 0; k < n; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        set_grads(m, zero);
        check_ok(fsdp_optimizer_step(o));
        check_ok(fsdp_zero_grad(m));
        fsdp_scope_end(scope);
    }
}

static fsdp_tensor *value(fsdp_module *m, const char *module, const char *name)
{
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, module), name));
    check_tensor(t);
    return t;
}

static void same(fsdp_module *a, fsdp_module *b, const char *module, const char *name)
{
    const fsdp_tensor *x = value(a, module, name), *y = value(b, module, name);
    assert_memory_equal(fsdp_data(x), fsdp_data(y), (size_t)fsdp_numel(x) * 4);
}

/* Groups, against an optimizer whose settings are those for all. */
static void against(fsdp_group_options g, fsdp_adamw_options all, fsdp_adamw_options own)
{
    fsdp_module *m = make_model(), *inside = make_model(), *outside = make_model();
    fsdp_optimizer *o = fsdp_adamw(m, &all);
    fsdp_optimizer *in = fsdp_adamw(inside, &own), *out = fsdp_adamw(outside, &all);
    check_ok(fsdp_optimizer_add_group(o, &g));
    steps(m, o, 3, 0);
    steps(inside, in, 3, 0);
    steps(outside, out, 3, 0);
    same(m, inside, "norm", "weight");
    same(m, inside, "up", "bias");
    same(m, outside, "up", "weight");
    same(m, outside, "down", "weight");
    fsdp_optimizer_free(o);
    fsdp_optimizer_free(in);
    fsdp_optimizer_free(out);
    fsdp_module_free(m);
    fsdp_module_free(inside);
    fsdp_module_free(outside);
}

static void test_settings(void **state)
{
    (void)state;
    fsdp_adamw_options all = {1e-2, 0.9, 0.95, 1e-8, 0.1}, own = all;
    fsdp_group_options g = fsdp_group_defaults();
    g.pattern = "*norm*|*.bias";
    against(g, all, all); /* nothing else is set */
    g.weight_decay = own.weight_decay = 0;
    against(g, all, own);
    g.lr_factor = 0.25; /* exact, so that the bits are those of 0.0025 */
    own.lr = 0.25e-2;
    against(g, all, own);
    g.beta1 = own.beta1 = 0.5;
    g.beta2 = own.beta2 = 0.8;
    g.eps = own.eps = 1e-3;
    against(g, all, own);
}

/* A gradient of zero and decay: only matrices shrink, by 1 - lr * decay. */
static void test_decay_only_on_matrices(void **state)
{
    (void)state;
    fsdp_module *m = make_model(), *before = make_model();
    fsdp_adamw_options a = {0.1, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *o = fsdp_adamw(m, &a);
    fsdp_group_options g = fsdp_group_defaults();
    g.pattern = "*norm*|*.bias";
    g.weight_decay = 0;
    check_ok(fsdp_optimizer_add_group(o, &g));
    steps(m, o, 1, 1);
    same(m, before, "norm", "weight");
    same(m, before, "up", "bias");
    const float *w = fsdp_data(value(m, "up", "weight"));
    const float *v = fsdp_data(value(before, "up", "weight"));
    for (int i = 0; i < 12; i++)
        if (!(fabs((double)w[i] / (double)v[i] - 0.99) < 1e-6)) fail_msg("element %d", i);
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    fsdp_module_free(before);
}

static void test_first_group_takes(void **state)
{
    (void)state;
    fsdp_module *m = make_model();
    fsdp_sgd_options s = {1.0, 0, 0, 0};
    fsdp_optimizer *o = fsdp_sgd(m, &s);
    fsdp_group_options g = fsdp_group_defaults();
    g.pattern = "up.*";
    g.lr_factor = 0;
    check_ok(fsdp_optimizer_add_group(o, &g));
    g.pattern = "*.weight"; /* without up's */
    g.lr_factor = 2;
    check_ok(fsdp_optimizer_add_group(o, &g));
    assert_int_equal(fsdp_optimizer_group_count(o), 2);
    char *text = fsdp_optimizer_print_groups(o);
    assert_non_null(strstr(text, "up.*"));
    assert_non_null(strstr(text, "*.weight"));
    assert_null(strstr(text, "all others")); /* nothing is left */
    free(text);
    fsdp_module *before = make_model();
    steps(m, o, 1, 0);
    same(m, before, "up", "weight");
    same(m, before, "up", "bias");
    const float *n = fsdp_data(value(m, "norm", "weight"));
    assert_true(fabs((double)n[0] - (1 - 2 * 0.3)) < 1e-6);
    /* A schedule moves all groups. */
    fsdp_optimizer_set_lr(o, 0.5);
    steps(m, o, 1, 0);
    assert_true(fabs((double)n[0] - (1 - 2 * 0.3 - 0.3)) < 1e-6);
    g.pattern = "norm*";
    assert_int_equal(fsdp_optimizer_add_group(o, &g), FSDP_NOT_FOUND);
    assert_non_null(strstr(fsdp_error_text(), "earlier groups have taken"));
    fsdp_error_clear();
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    fsdp_module_free(before);
}

static void refused(fsdp_optimizer *o, const fsdp_group_options *g, fsdp_status code,
                    const char *text)
{
    assert_int_equal(fsdp_optimizer_add_group(o, g), code);
    if (!strstr(fsdp_error_text(), text)) fail_msg("%s", fsdp_error_text());
    fsdp_error_clear();
    assert_int_equal(fsdp_optimizer_group_count(o), 0);
}

static void test_refused(void **state)
{
    (void)state;
    fsdp_module *m = make_model();
    fsdp_optimizer *o = fsdp_adamw(m, NULL);
    fsdp_group_options g = fsdp_group_defaults();
    refused(o, &g, FSDP_INVALID_ARGUMENT, "fsdp_optimizer_add_group");
    g.pattern = "*nrom*";
    refused(o, &g, FSDP_NOT_FOUND, "there are 4, such as up.weight");
    g.pattern = "*norm*";
    g.momentum = 0.9;
    refused(o, &g, FSDP_INVALID_ARGUMENT, "momentum, which AdamW does not have");
    g.momentum = NAN;
    g.beta1 = 1;
    refused(o, &g, FSDP_INVALID_ARGUMENT, "betas 1 0.999");
    fsdp_optimizer_free(o);
    fsdp_sgd_options s = {1e-3, 0.9, 0, 0};
    o = fsdp_sgd(m, &s);
    refused(o, &g, FSDP_INVALID_ARGUMENT, "beta1, which SGD does not have");
    g.beta1 = NAN;
    g.momentum = 0;
    refused(o, &g, FSDP_INVALID_ARGUMENT, "expected both to be 0 or neither");
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_settings),
        cmocka_unit_test(test_decay_only_on_matrices),
        cmocka_unit_test(test_first_group_takes),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
