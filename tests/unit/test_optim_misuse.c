/*
 * test_optim_misuse.c - calls that a program gets wrong: lists of a wrong length, NULL, functions
 * of the user's that fail without a word, modules freed before their graphs, rates that are none.
 * Each is an error that is kept, and nothing is changed by it.
 */
#include "tensor_check.h"

/* ---- lists of tensors ----------------------------------------------------------------- */

static int made_up = FSDP_VALUES_MAX + 1;

static fsdp_status count_wrong(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    (void)self;
    out->t[0] = in->t[0];
    out->n = made_up;
    return FSDP_OK;
}

static fsdp_status pre_wrong(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)arg;
    (void)m;
    in->n = made_up;
    return FSDP_OK;
}

static fsdp_status post_wrong(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)in;
    return pre_wrong(arg, m, out);
}

static void test_null(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_linear_create(2, 3, 0);
    fsdp_values in = {1, {NULL}}, out;
    check_ok(fsdp_module_add_method(m, "wrong", count_wrong));
    assert_int_equal(fsdp_module_call(m, NULL, &out), FSDP_INVALID_ARGUMENT);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call");
    assert_int_equal(fsdp_module_call(m, &in, NULL), FSDP_INVALID_ARGUMENT);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call");
    fsdp_module_call(NULL, NULL, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    fsdp_module_call_method(m, "wrong", NULL, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call_method");
    fsdp_module_call_method(m, "wrong", &in, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call_method");
    fsdp_module_free(m);
}

static void check_count(fsdp_status s, const char *what)
{
    char text[128];
    assert_int_equal(s, FSDP_INVALID_ARGUMENT);
    snprintf(text, sizeof text, "%s of Linear: %d tensors; expected 0 to 8", what, made_up);
    check_error(FSDP_INVALID_ARGUMENT, text);
}

static void check_counts(int n)
{
    made_up = n;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = fsdp_linear_create(2, 3, 0);
    check_ok(fsdp_reset_parameters(m, 1));
    check_ok(fsdp_module_add_method(m, "wrong", count_wrong));
    fsdp_values in = {1, {fsdp_randn(FSDP_F32, 2, SIZES(4, 2), 1, "x")}}, out, bad = in;
    bad.n = n;
    check_count(fsdp_module_call(m, &bad, &out), "the inputs");
    check_count(fsdp_module_call_method(m, "wrong", &bad, &out), "the inputs");
    check_count(fsdp_module_call_method(m, "wrong", &in, &out), "the outputs");
    assert_int_equal(out.n, 0);
    int hook = fsdp_register_forward_pre_hook(m, pre_wrong, NULL, 0);
    check_count(fsdp_module_call(m, &in, &out), "the inputs behind a hook");
    check_ok(fsdp_remove_hook(m, hook));
    hook = fsdp_register_forward_hook(m, post_wrong, NULL, 0);
    check_count(fsdp_module_call(m, &in, &out), "the outputs behind a hook");
    check_ok(fsdp_remove_hook(m, hook));
    check_ok(fsdp_module_call(m, &in, &out)); /* nothing is left of all that */
    m->forward = count_wrong;
    check_count(fsdp_module_call(m, &in, &out), "the outputs");
    check_ok(fsdp_checkpoint_module(m, NULL));
    check_count(fsdp_module_call(m, &in, &out), "the outputs");
    fsdp_scope_end(scope);
    fsdp_module_free(m);
}

static void test_counts(void **state)
{
    (void)state;
    check_counts(FSDP_VALUES_MAX + 1);
    check_counts(1 << 20);
    check_counts(-1);
}

/* ---- who fails without a word ----------------------------------------------------------- */

static fsdp_status fails(void *arg)
{
    (void)arg;
    return FSDP_IO_ERROR;
}

static fsdp_tensor *queues(void *arg, fsdp_tensor *grad)
{
    (void)grad;
    fsdp_queue_callback(fails, arg);
    return NULL;
}

static fsdp_status fails_at(void *arg, fsdp_tensor *leaf)
{
    (void)leaf;
    return fails(arg);
}

static void test_silent(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(3), 1.0);
    check_ok(fsdp_requires_grad_(x, 1));
    fsdp_tensor *y = fsdp_sum(fsdp_mul(x, x));
    check_ok(fsdp_register_hook(y, queues, NULL));
    assert_int_equal(fsdp_backward(y), FSDP_IO_ERROR);
    check_error(FSDP_IO_ERROR, "fsdp_queue_callback");
    y = fsdp_sum(fsdp_mul(x, x));
    check_ok(fsdp_register_post_accumulate_hook(x, fails_at, NULL));
    assert_int_equal(fsdp_backward(y), FSDP_IO_ERROR);
    check_error(FSDP_IO_ERROR, "fsdp_register_post_accumulate_hook");
    fsdp_scope_end(scope);
}

/* ---- a module that is gone ---------------------------------------------------------------- */

static void check_freed(int checkpointed)
{
    int64_t live = check_live();
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module *l = fsdp_module_add(m, "l", fsdp_linear_create(2, 3, 1));
    check_tensor(l);
    if (checkpointed) check_ok(fsdp_checkpoint_module(l, NULL));
    check_ok(fsdp_reset_parameters(m, 1));
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(4, 2), 1, "x");
    check_ok(fsdp_requires_grad_(x, 1));
    fsdp_tensor *y = fsdp_call(m, x);
    fsdp_tensor *loss = fsdp_sum(fsdp_mul(y, y)), *again = fsdp_sum(y);
    check_tensor(loss);
    fsdp_module_free(m);
    if (checkpointed) {
        assert_int_equal(fsdp_backward(loss), FSDP_INVALID_STATE);
        check_error(FSDP_INVALID_STATE, "checkpointed module that was freed");
    } else {
        check_ok(fsdp_backward(loss));
        check_tensor(fsdp_grad(x));
    }
    (void)again; /* one graph that is never run */
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), live);
}

static void test_freed(void **state)
{
    (void)state;
    check_freed(0);
    check_freed(1);
}

/* ---- optimizers ---------------------------------------------------------------------------- */

static void test_optimizer(void **state)
{
    (void)state;
    assert_null(fsdp_adamw(NULL, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    assert_null(fsdp_sgd(NULL, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    fsdp_module *m = fsdp_linear_create(2, 3, 0);
    check_ok(fsdp_reset_parameters(m, 1));
    fsdp_optimizer *o = fsdp_adamw(m, NULL);
    check_tensor(o);
    const double rates[] = {NAN, -1, INFINITY, -INFINITY};
    for (int i = 0; i < 4; i++) {
        fsdp_optimizer_set_lr(o, rates[i]);
        check_error(FSDP_INVALID_ARGUMENT, "fsdp_optimizer_set_lr");
        assert_true(fsdp_optimizer_lr(o) == fsdp_adamw_defaults().lr);
    }
    fsdp_optimizer_set_lr(o, 0);
    assert_true(fsdp_optimizer_lr(o) == 0);
    fsdp_param *p = fsdp_module_param(m, "weight");
    assert_null(fsdp_optimizer_state(o, p, 7));
    check_error(FSDP_INVALID_ARGUMENT, "2 states");
    assert_null(fsdp_optimizer_state(o, p, -1));
    check_error(FSDP_INVALID_ARGUMENT, "2 states");
    check_tensor(fsdp_optimizer_state(o, p, 1));
    assert_int_equal(fsdp_grad_norm(m, 2, NULL), FSDP_INVALID_ARGUMENT);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_grad_norm");
    double norm;
    fsdp_grad_norm(NULL, 2, &norm);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_grad_norm");
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
}

/* ---- NULL, and numbers that mean nothing -------------------------------------------------------
 */

static void test_tensors(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_full(FSDP_F32, 2, SIZES(2, 3), 1.0);
    assert_null(fsdp_randn(FSDP_F32, 2, SIZES(2, 3), 1, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the name");
    assert_null(fsdp_rand(FSDP_F32, 2, SIZES(2, 3), 1, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the name");
    fsdp_set(NULL, t);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_set");
    assert_true(isnan(fsdp_at(t, NULL)));
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_at");
    assert_true(fsdp_at(fsdp_scalar(FSDP_F32, 2), NULL) == 2); /* no dims, no numbers */
    fsdp_to_doubles(t, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_to_doubles");
    fsdp_random_set(1, 1, NULL, 3);
    check_error(FSDP_INVALID_ARGUMENT, "3 sample ids at NULL");
    fsdp_random_set(1, 1, NULL, -3);
    check_error(FSDP_INVALID_ARGUMENT, "-3 sample ids");
    check_ok(fsdp_random_set(1, 1, NULL, 0));
    fsdp_scope_end(scope);
}

static fsdp_status hand_through(fsdp_function_context *c, fsdp_tensor **in, int n_in,
                                fsdp_tensor **out, int n_out)
{
    (void)c;
    (void)n_in;
    (void)n_out;
    out[0] = in[0];
    return FSDP_OK;
}

static int dropped;

static void count_drop(void *arg)
{
    (void)arg;
    dropped++;
}

static fsdp_status run(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out, int n_out)
{
    (void)arg;
    return hand_through(NULL, in, n_in, out, n_out);
}

static void test_functions(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *in[FSDP_CUSTOM_MAX] = {fsdp_full(FSDP_F32, 1, SIZES(2), 1.0)}, *out[1] = {NULL};
    fsdp_function f = {"f", hand_through, hand_through, count_drop}, half = f;
    dropped = 0;
    out[0] = in[0]; /* one place, whatever is said of it: nothing is written */
    fsdp_function_apply(&f, NULL, in, 99, out, 99);
    check_error(FSDP_INVALID_ARGUMENT, "f: 99 inputs and 99 outputs; at most 8 each");
    assert_ptr_equal(out[0], in[0]);
    fsdp_function_apply(&f, NULL, in, -1, out, 1);
    check_error(FSDP_INVALID_ARGUMENT, "f: -1 inputs");
    fsdp_function_apply(&f, NULL, NULL, 1, out, 1);
    check_error(FSDP_INVALID_ARGUMENT, "the inputs");
    fsdp_function_apply(&f, NULL, in, 1, NULL, 1);
    check_error(FSDP_INVALID_ARGUMENT, "the place for outputs");
    half.forward = NULL;
    fsdp_function_apply(&half, NULL, in, 1, out, 1);
    check_error(FSDP_INVALID_ARGUMENT, "its forward");
    half = f;
    half.backward = NULL;
    fsdp_function_apply(&half, NULL, in, 1, out, 1);
    check_error(FSDP_INVALID_ARGUMENT, "its backward");
    assert_int_equal(dropped, 6); /* each argument's life has ended */
    fsdp_function_apply(NULL, NULL, in, 1, out, 1);
    check_error(FSDP_INVALID_ARGUMENT, "the function");
    fsdp_function_save(NULL, in[0]);
    check_error(FSDP_INVALID_ARGUMENT, "the context");
    assert_null(fsdp_function_saved(NULL, 0));
    assert_null(fsdp_function_arg(NULL));
    assert_int_equal(fsdp_function_wants(NULL, 0), 0);
    f.name = NULL;
    check_ok(fsdp_function_apply(&f, NULL, in, 1, out, 1));
    fsdp_checkpoint(run, NULL, count_drop, in, 99, out, 99, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "99 inputs");
    assert_ptr_equal(out[0], in[0]);
    fsdp_checkpoint(run, NULL, count_drop, NULL, 1, out, 1, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_checkpoint");
    fsdp_checkpoint(run, NULL, count_drop, in, 1, NULL, 1, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_checkpoint");
    assert_int_equal(dropped, 10);
    fsdp_scope_end(scope);
}

static void test_tree(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module *child = fsdp_module_add(m, "a", fsdp_sequential_create());
    fsdp_module *leaf = fsdp_module_add(child, "b", fsdp_linear_create(2, 3, 0));
    check_tensor(leaf);
    fsdp_module *holders[] = {m, child, leaf};
    for (int i = 0; i < 3; i++) {
        assert_null(fsdp_module_add(holders[i], "cycle", m));
        check_error(FSDP_INVALID_ARGUMENT, "a module cannot hold itself");
    }
    assert_int_equal(fsdp_module_numel(m), 6);
    assert_null(fsdp_module_find(m, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_find");
    fsdp_module_params(m, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_params");
    fsdp_param_list_free(NULL);
    fsdp_init_rule rule = {(fsdp_init_kind)9, 0, 0};
    fsdp_module_set_init(m, rule);
    check_error(FSDP_INVALID_ARGUMENT, "rule of kind 9");
    assert_null(fsdp_param_create(FSDP_F32, 1, SIZES(2), rule));
    check_error(FSDP_INVALID_ARGUMENT, "rule of kind 9");
    check_ok(fsdp_reset_parameters(m, 1));
    const double eps[] = {-1, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        assert_null(fsdp_rms_norm_create(4, eps[i]));
        check_error(FSDP_INVALID_ARGUMENT, "fsdp_rms_norm_create: eps");
        assert_null(fsdp_layer_norm_create(4, eps[i]));
        check_error(FSDP_INVALID_ARGUMENT, "fsdp_layer_norm_create: eps");
    }
    assert_true(isnan(fsdp_schedule_factor(NULL, 1)));
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_schedule_factor");
    fsdp_module_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_null),      cmocka_unit_test(test_counts),
        cmocka_unit_test(test_silent),    cmocka_unit_test(test_freed),
        cmocka_unit_test(test_optimizer), cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_functions), cmocka_unit_test(test_tree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
