/*
 * test_golden_optim.c - AdamW, SGD and clipping through the public interface
 * against PyTorch's numbers (tests/data/optim). Bound: 1e-6 of the largest
 * value.
 */
#include "golden.h"

static fsdp_tensor *identity(fsdp_module *self, fsdp_tensor *x)
{
    (void)self;
    return x;
}

static void add_param(fsdp_module *m, const char *name, const fsdp_tensor *value)
{
    fsdp_init_rule zero = {FSDP_INIT_ZEROS, 0, 0};
    fsdp_param *p = fsdp_param_create(FSDP_F32, fsdp_ndim(value), fsdp_sizes(value), zero);
    check_tensor(fsdp_module_add_param(m, name, p));
    check_ok(fsdp_copy_(fsdp_param_tensor(p), value));
}

static fsdp_module *make_module(void)
{
    fsdp_module *m = fsdp_module_create(sizeof *m, "Holder");
    check_tensor(m);
    m->forward1 = identity;
    return m;
}

static void near(const char *what, const fsdp_tensor *got, const fsdp_tensor *expected)
{
    double d = check_distance(got, expected);
    if (!(d <= 1e-6)) fail_msg("%s: %g of the largest value", what, d);
}

static void five_steps(const char *file, fsdp_optimizer *(*make)(fsdp_module *m))
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__st *st = golden_open("optim", file);
    fsdp_module *m = make_module();
    add_param(m, "p", golden_need(st, "p0"));
    fsdp_tensor *p = fsdp_param_tensor(fsdp_module_param(m, "p"));
    fsdp_optimizer *o = make(m);
    check_tensor(o);
    for (int k = 1; k <= 5; k++) {
        char name[16], what[64];
        snprintf(name, sizeof name, "g%d", k);
        check_ok(fsdp_set_grad(p, golden_need(st, name)));
        check_ok(fsdp_optimizer_step(o));
        check_ok(fsdp_zero_grad(m));
        assert_int_equal(fsdp_optimizer_step_count(o), k);
        snprintf(name, sizeof name, "p%d", k);
        snprintf(what, sizeof what, "%s, %s", file, name);
        near(what, p, golden_need(st, name));
    }
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    fsdp__st_close(st);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

static fsdp_optimizer *adamw(fsdp_module *m)
{
    fsdp_adamw_options o = {2e-2, 0.9, 0.95, 1e-8, 0.1};
    return fsdp_adamw(m, &o);
}

static fsdp_optimizer *adamw_wd0(fsdp_module *m)
{
    fsdp_adamw_options o = fsdp_adamw_defaults();
    o.weight_decay = 0;
    return fsdp_adamw(m, &o);
}

static fsdp_optimizer *sgd(fsdp_module *m)
{
    fsdp_sgd_options o = {1e-2, 0.9, 0.01, 0};
    return fsdp_sgd(m, &o);
}

static void test_steps(void **state)
{
    (void)state;
    five_steps("adamw", adamw);
    five_steps("adamw_amsgrad_off_wd0", adamw_wd0);
    five_steps("sgd_momentum", sgd);
}

static void test_clip(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__st *st = golden_open("optim", "clip_grad_norm");
    fsdp_module *m = make_module();
    char name[32];
    for (int k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "g%d", k);
        fsdp_tensor *g = golden_need(st, name);
        add_param(m, name, g);
        check_ok(fsdp_set_grad(fsdp_param_tensor(fsdp_module_param(m, name)), g));
    }
    const double p[] = {1, 2, 3, INFINITY};
    for (int i = 0; i < 4; i++) {
        double norm = 0;
        check_ok(fsdp_grad_norm(m, p[i], &norm));
        snprintf(name, sizeof name, "norm%g", p[i]);
        double expected = fsdp_item(golden_need(st, name));
        if (!(fabs(norm / expected - 1) <= 1e-6)) fail_msg("%s: %g and %g", name, norm, expected);
    }
    /* A bound above the norm leaves the gradients as they are. */
    double norm = 0;
    check_ok(fsdp_clip_grad_norm(m, 1e6, &norm));
    near("not clipped", fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "g0"))),
         golden_need(st, "g0"));
    check_ok(fsdp_clip_grad_norm(m, 0.5, &norm));
    for (int k = 0; k < 3; k++) {
        snprintf(name, sizeof name, "g%d", k);
        fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, name)));
        snprintf(name, sizeof name, "clipped2.%d", k);
        near(name, g, golden_need(st, name));
    }
    /* A NaN clips nothing and is an error. */
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "g0")));
    ((float *)fsdp_data(g))[1] = NAN;
    float before = ((float *)fsdp_data(g))[0];
    assert_int_equal(fsdp_clip_grad_norm(m, 1e-3, &norm), FSDP_NON_FINITE);
    assert_true(isnan(norm));
    assert_true(((float *)fsdp_data(g))[0] == before);
    check_error(FSDP_NON_FINITE, "nan");
    check_ok(fsdp_grad_norm(m, INFINITY, &norm));
    assert_true(isnan(norm));
    fsdp_module_free(m);
    fsdp__st_close(st);
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_clip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
