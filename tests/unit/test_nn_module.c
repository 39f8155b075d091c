/*
 * test_nn_module.c - the tree of modules: names, parameters, hooks, calling,
 * printing, and who owns what.
 */
#include "tensor_check.h"

#include "nn/module.h"

static fsdp_module *small_net(void)
{
    fsdp_module *m = fsdp_sequential_create();
    check_tensor(fsdp_module_add(m, "in", fsdp_linear_create(5, 7, 1)));
    check_tensor(fsdp_module_add(m, "act", fsdp_dropout_create(0)));
    check_tensor(fsdp_module_add(m, "norm", fsdp_layer_norm_create(7, 1e-5)));
    return m;
}

static void test_names(void **state)
{
    (void)state;
    fsdp_module *m = small_net(), *inner = fsdp_sequential_create();
    check_tensor(fsdp_module_add(inner, "0", fsdp_linear_create(7, 2, 0)));
    check_tensor(fsdp_module_add(m, "inner", inner));
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    check_tensor(fsdp_module_add_param(m, "own", fsdp_param_create(FSDP_F32, 1, SIZES(3), one)));
    fsdp_param *tied = fsdp_module_param(fsdp_module_find(m, "in"), "weight");
    check_tensor(fsdp_module_add_param(inner, "again", fsdp_param_retain(tied)));
    fsdp_param_list l;
    check_ok(fsdp_module_params(m, &l));
    const char *names[] = {"own",         "in.weight", "in.bias",
                           "norm.weight", "norm.bias", "inner.0.weight"};
    assert_int_equal(l.count, 6); /* own first, then child by child; the tied one once */
    for (int i = 0; i < 6; i++)
        assert_string_equal(l.items[i].name, names[i]);
    assert_ptr_equal(l.items[1].param, tied);
    assert_ptr_equal(l.items[1].owner, fsdp_module_find(m, "in"));
    fsdp_param_list_free(&l);
    assert_int_equal(fsdp_module_numel(m), 3 + 35 + 7 + 14 + 14);
    /* A part of the tree has names of its own; inside, parameters are named from the top. */
    check_ok(fsdp_module_params(inner, &l));
    assert_int_equal(l.count, 2);
    assert_string_equal(l.items[0].name, "again");
    assert_string_equal(l.items[1].name, "0.weight");
    fsdp_param *deep = l.items[1].param;
    fsdp_param_list_free(&l);
    check_ok(fsdp__module_name_params(inner));
    assert_string_equal(deep->name, "inner.0.weight");
    /* What is added later is named when it is asked for, below and above. */
    check_ok(fsdp__module_name_new(m));
    fsdp_module *late = fsdp_module_add(inner, "late", fsdp_layer_norm_create(2, 1e-5));
    check_ok(fsdp__module_name_new(late));
    assert_string_equal(fsdp_module_param(late, "bias")->name, "inner.late.bias");
    fsdp_param *more = fsdp_param_create(FSDP_F32, 1, SIZES(1), one);
    check_tensor(fsdp_module_add_param(late, "more", more));
    check_ok(fsdp__module_name_new(inner));
    assert_string_equal(more->name, "inner.late.more");
    assert_ptr_equal(fsdp_module_find(m, ""), m);
    assert_ptr_equal(fsdp_module_find(m, "inner.0"), fsdp_module_child(inner, 0));
    assert_string_equal(fsdp_module_name(inner), "inner");
    assert_int_equal(fsdp_module_child_count(m), 4);
    assert_null(fsdp_module_child(m, 4));
    assert_null(fsdp_module_find(m, "inner.1"));
    check_error(FSDP_NOT_FOUND, "has no child \"1\"");
    /* Refused; the child or the parameter is freed all the same. */
    assert_null(fsdp_module_add(m, "in", fsdp_linear_create(1, 1, 0)));
    check_error(FSDP_INVALID_ARGUMENT, "already");
    assert_null(fsdp_module_add(m, "a.b", fsdp_linear_create(1, 1, 0)));
    check_error(FSDP_INVALID_ARGUMENT, "without dots");
    assert_null(fsdp_module_add(m, "x", inner));
    check_error(FSDP_INVALID_ARGUMENT, "already a child");
    assert_null(fsdp_module_add_param(m, "own", fsdp_param_create(FSDP_F32, 0, NULL, one)));
    check_error(FSDP_INVALID_ARGUMENT, "own");
    assert_null(fsdp_module_create(3, "Small"));
    check_error(FSDP_INVALID_ARGUMENT, "first member");
    assert_null(fsdp_module_add(m, "none", NULL));
    fsdp_error_clear();
    fsdp_module_free(m);
    fsdp_module_free(NULL);
    assert_int_equal(check_live(), 0);
}

/* ---- hooks ----------------------------------------------------------------------- */

static char calls[64];

static fsdp_status pre(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)m;
    strcat(calls, arg);
    if (!strcmp(arg, "x")) in->t[0] = fsdp_scale(in->t[0], 10);
    return !strcmp(arg, "!") ? fsdp__fail(FSDP_INVALID_DATA, "a hook says no") : FSDP_OK;
}

static fsdp_status post(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)m;
    strcat(calls, arg);
    assert_int_equal(in->n, 1);
    if (!strcmp(arg, "y")) out->t[0] = fsdp_shift(out->t[0], 1);
    return FSDP_OK;
}

static fsdp_tensor *triple(fsdp_module *self, fsdp_tensor *x)
{
    (void)self;
    strcat(calls, "f");
    return fsdp_scale(x, 3);
}

static void test_hooks(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_module_create(sizeof *m, "Triple");
    m->forward1 = triple;
    int a = fsdp_register_forward_pre_hook(m, pre, "a", 0);
    int b = fsdp_register_forward_pre_hook(m, pre, "x", 0);
    int c = fsdp_register_forward_pre_hook(m, pre, "0", 1);
    int d = fsdp_register_forward_hook(m, post, "y", 0),
        e = fsdp_register_forward_hook(m, post, "z", 0);
    int g = fsdp_register_forward_hook(m, post, "1", 1);
    assert_true(a >= 0 && b >= 0 && c >= 0 && d >= 0 && e >= 0 && g >= 0);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(1), 2), *y = fsdp_call(m, x);
    check_tensor(y);
    assert_string_equal(calls, "0axf1yz");
    assert_true(fsdp_item(y) == 61 && fsdp_item(x) == 2);
    assert_int_equal(check_live(), 8); /* what was between ended with the call */
    check_ok(fsdp_remove_hook(m, b));
    check_ok(fsdp_remove_hook(m, d));
    assert_int_not_equal(fsdp_remove_hook(m, b), FSDP_OK);
    check_error(FSDP_NOT_FOUND, "no hook");
    calls[0] = 0;
    assert_true(fsdp_item(fsdp_call(m, x)) == 6);
    assert_string_equal(calls, "0af1z");
    fsdp_register_forward_pre_hook(m, pre, "!", 0);
    calls[0] = 0;
    assert_null(fsdp_call(m, x));
    assert_string_equal(calls, "0a!"); /* forward was not called */
    check_error(FSDP_INVALID_DATA, "says no");
    fsdp_scope_end(scope);
    fsdp_module_free(m);
}

/* ---- calling ----------------------------------------------------------------------- */

static fsdp_status several(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    (void)self;
    out->n = 3;
    out->t[0] = in->t[1];
    out->t[1] = NULL;
    out->t[2] = fsdp_add(in->t[0], in->t[1]);
    return FSDP_OK;
}

static fsdp_status silent(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    (void)self;
    (void)in;
    (void)out;
    return FSDP_INVALID_DATA;
}

static fsdp_tensor *nothing(fsdp_module *self, fsdp_tensor *x)
{
    (void)self;
    (void)x;
    return NULL;
}

static void test_calls(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = fsdp_module_create(sizeof *m, "Several"), *list = fsdp_module_list_create();
    fsdp_tensor *a = fsdp_full(FSDP_F32, 1, SIZES(1), 2), *b = fsdp_full(FSDP_F32, 1, SIZES(1), 3);
    m->forward = several;
    fsdp_values in = {2, {a, b}}, out;
    check_ok(fsdp_module_call(m, &in, &out));
    assert_true(out.n == 3 && out.t[0] == b && !out.t[1] && fsdp_item(out.t[2]) == 5);
    assert_true(fsdp_item(b) == 3); /* an input handed through stays the caller's */
    m->forward = silent;
    assert_int_equal(fsdp_module_call(m, &in, &out), FSDP_INVALID_DATA);
    assert_int_equal(out.n, 0);
    check_error(FSDP_INVALID_DATA, "Several");
    m->forward = NULL;
    m->forward1 = nothing;
    assert_null(fsdp_call(m, a));
    check_error(FSDP_INVALID_STATE, "returned NULL");
    assert_null(fsdp_call2(m, a, b));
    check_error(FSDP_INVALID_ARGUMENT, "takes 1 inputs and was given 2");
    assert_null(fsdp_call(list, a));
    check_error(FSDP_INVALID_ARGUMENT, "ModuleList is a container");
    assert_null(fsdp_call(NULL, a));
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    fsdp_module_free(m);
    fsdp_module_free(list);
    /* A sequence gives up what is between, and never what it was given. */
    m = fsdp_sequential_create();
    check_tensor(fsdp_module_add(m, "0", fsdp_dropout_create(0.5)));
    check_tensor(fsdp_module_add(m, "1", fsdp_rms_norm_create(1, 1e-5)));
    check_tensor(fsdp_module_add(m, "2", fsdp_rms_norm_create(1, 1e-5)));
    check_ok(fsdp_reset_parameters(m, 1));
    fsdp_module_train(m, 0);
    fsdp_no_grad_begin();
    int64_t live = check_live();
    fsdp_tensor *y = fsdp_call(m, a);
    fsdp_no_grad_end();
    check_tensor(y);
    assert_int_equal(check_live(), live + 4);
    assert_true(fsdp_item(a) == 2);
    fsdp_module_free(m);
    m = fsdp_sequential_create(); /* of nothing: the identity */
    assert_ptr_equal(fsdp_call(m, a), a);
    fsdp_module_free(m);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

static int destroyed;

static void destroy(fsdp_module *self)
{
    (void)self;
    destroyed++;
}

static void test_print(void **state)
{
    (void)state;
    fsdp_module *m = small_net(), *own = fsdp_module_create(sizeof *own, "Own");
    own->destroy = destroy;
    check_tensor(fsdp_module_add(m, "own", own));
    fsdp_tensor *t = fsdp_zeros(FSDP_I64, 1, SIZES(4));
    check_ok(fsdp_module_add_buffer(own, "table", t));
    fsdp_release(t);
    assert_ptr_equal(fsdp_module_buffer(own, "table"), t);
    assert_null(fsdp_module_buffer(own, "chair"));
    assert_int_not_equal(fsdp_module_add_buffer(own, "table", t), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "table");
    check_ok(fsdp_param_requires_grad_(fsdp_module_param(fsdp_module_find(m, "in"), "bias"), 0));
    char *text = fsdp_module_print(m);
    assert_string_equal(text, "Sequential()\n"
                              "  in: Linear(5 -> 7, bias)\n"
                              "    weight: (7, 5) f32\n"
                              "    bias: (7) f32, frozen\n"
                              "  act: Dropout(0)\n"
                              "  norm: LayerNorm(1e-05)\n"
                              "    weight: (7) f32\n"
                              "    bias: (7) f32\n"
                              "  own: Own()\n"
                              "    table: buffer i64 (4) cpu\n");
    free(text);
    assert_int_equal(fsdp_module_training(own), 1);
    fsdp_module_train(m, 0);
    assert_int_equal(fsdp_module_training(own), 0);
    fsdp_module_free(m);
    assert_int_equal(destroyed, 1);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_hooks),
        cmocka_unit_test(test_calls),
        cmocka_unit_test(test_print),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
