/*
 * test_nn_recompute.c - a module whose forward is a checkpoint: the same bits, dropout included,
 * and the same names.
 */
#include "tensor_check.h"

enum { ROWS = 6, C = 5, H = 9 };

static fsdp_module *net(void)
{
    fsdp_module *m = fsdp_sequential_create();
    for (int k = 0; k < 3; k++) {
        char name[16];
        snprintf(name, sizeof name, "%d", k);
        fsdp_module *b = fsdp_module_add(m, name, fsdp_sequential_create());
        fsdp_module_add(b, "up", fsdp_linear_create(C, H, 1));
        fsdp_module_add(b, "drop", fsdp_dropout_create(0.4));
        fsdp_module_add(b, "norm", fsdp_rms_norm_create(H, 1e-5));
        fsdp_module_add(b, "down", fsdp_linear_create(H, C, 0));
    }
    check_ok(fsdp_reset_parameters(m, 5));
    return m;
}

/* Gradients of all parameters after two calls of one module, one after the other. */
static double *module_grads(int on, int whole, int64_t *n)
{
    fsdp_module *m = net();
    check_ok(fsdp_random_set(3, 1, NULL, 0));
    for (int k = 0; k < 3 && on; k++)
        check_ok(fsdp_checkpoint_module(fsdp_module_child(m, k), NULL));
    if (on && whole) check_ok(fsdp_checkpoint_module(m, NULL));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, fsdp_randn(FSDP_F32, 2, SIZES(ROWS, C), 2, "x"));
    y = fsdp_call(m, y);
    check_ok(fsdp_backward(fsdp_sum(fsdp_mul(y, y))));
    fsdp_scope_end(scope);
    fsdp_param_list l;
    check_ok(fsdp_module_params(m, &l));
    double *all = calloc((size_t)fsdp_module_numel(m), sizeof *all);
    *n = 0;
    for (int64_t i = 0; i < l.count; i++) {
        assert_null(strstr(l.items[i].name, "checkpoint"));
        fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(l.items[i].param));
        check_ok(fsdp_to_doubles(g, all + *n));
        *n += fsdp_numel(g);
    }
    assert_string_equal(l.items[0].name, "0.up.weight");
    assert_int_equal(fsdp_is_checkpointed(fsdp_module_child(m, 0)), on);
    fsdp_param_list_free(&l);
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
    return all;
}

static void test_modules(void **state)
{
    (void)state;
    int64_t n, k;
    double *plain = module_grads(0, 0, &n);
    for (int whole = 0; whole < 2; whole++) {
        double *g = module_grads(1, whole, &k);
        assert_true(n == k && memcmp(g, plain, (size_t)n * sizeof *g) == 0);
        free(g);
    }
    free(plain);
    assert_int_not_equal(fsdp_checkpoint_module(NULL, NULL), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "the module is NULL");
    fsdp_module *list = fsdp_module_list_create();
    assert_int_not_equal(fsdp_checkpoint_module(list, NULL), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "has no forward");
    fsdp_module_free(list);
}

/* Running statistics move once a forward, not again when it is recomputed. */
static void test_batch_norm(void **state)
{
    (void)state;
    double mean[2], count[2];
    fsdp_tensor *grad[2];
    fsdp_module *m[2];
    for (int on = 0; on < 2; on++) {
        m[on] = fsdp_sequential_create();
        fsdp_module_add(m[on], "up", fsdp_linear_create(C, H, 1));
        fsdp_module *norm = fsdp_module_add(m[on], "norm", fsdp_batch_norm_create(H, 1e-5, 0.1));
        check_ok(fsdp_reset_parameters(m[on], 5));
        if (on) check_ok(fsdp_checkpoint_module(m[on], NULL));
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *y = fsdp_call(m[on], fsdp_randn(FSDP_F32, 2, SIZES(ROWS, C), 2, "x"));
        check_ok(fsdp_backward(fsdp_sum(fsdp_mul(y, fsdp_gelu(y)))));
        mean[on] = fsdp_at(fsdp_module_buffer(norm, "running_mean"), SIZES(2));
        count[on] = (double)*(int64_t *)fsdp_data(fsdp_module_buffer(norm, "num_batches_tracked"));
        grad[on] =
            fsdp_grad(fsdp_param_tensor(fsdp_module_param(fsdp_module_child(m[on], 0), "weight")));
        fsdp_scope_end(scope);
    }
    assert_true(mean[0] == mean[1] && mean[0] != 0 && count[0] == 1 && count[1] == 1);
    assert_true(check_same_bits(grad[0], grad[1]));
    fsdp_module_free(m[0]);
    fsdp_module_free(m[1]);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_modules),
                                       cmocka_unit_test(test_batch_norm)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
