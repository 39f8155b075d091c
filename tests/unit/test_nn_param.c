/*
 * test_nn_param.c - values of parameters, devices and dtypes, and dropout's
 * independence of ranks.
 */
#include "tensor_check.h"

#include "base/context.h"

static fsdp_tensor *weight(fsdp_module *m)
{
    return fsdp_param_tensor(fsdp_module_param(m, "weight"));
}

static void test_values(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module *a = fsdp_module_add(m, "a", fsdp_linear_create(16, 33, 1));
    fsdp_module *b = fsdp_module_add(m, "b", fsdp_linear_create(16, 33, 1));
    fsdp_module *e = fsdp_module_add(m, "e", fsdp_embedding_create(50, 40));
    fsdp_module *n = fsdp_module_add(m, "n", fsdp_layer_norm_create(5, 1e-5));
    check_tensor(n);
    fsdp_scope *scope = fsdp_scope_begin();
    assert_true(isnan(fsdp_at(weight(a), SIZES(0, 0)))); /* nothing was written yet */
    check_error(FSDP_INVALID_STATE, "fsdp_reset_parameters");
    check_ok(fsdp_reset_parameters(m, 7));
    fsdp_no_grad_begin();
    fsdp_tensor *first = fsdp_clone(weight(a)), *other = fsdp_clone(weight(b));
    assert_false(check_same_bits(first, other)); /* the name matters */
    check_ok(fsdp_reset_parameters(m, 8));
    assert_false(check_same_bits(first, weight(a)));
    check_ok(fsdp_reset_parameters(b, 7)); /* a part: the same numbers as with the whole */
    check_ok(fsdp_reset_parameters(a, 7));
    assert_true(check_same_bits(first, weight(a)) && check_same_bits(other, weight(b)));
    double *v = check_values(weight(a)), most = 0;
    for (int i = 0; i < 16 * 33; i++)
        most = fmax(most, fabs(v[i]));
    free(v);
    assert_true(most <= 0.25 && most > 0.24); /* uniform in +-1/sqrt(16) */
    double square = fsdp_item(fsdp_mean(fsdp_mul(weight(e), weight(e))));
    assert_true(fabs(square - 1) < 0.15);
    assert_true(fsdp_item(fsdp_sum(weight(n))) == 5);
    fsdp_module_set_init(m, (fsdp_init_rule){FSDP_INIT_NORMAL, 0, 0.02});
    check_ok(fsdp_reset_parameters(m, 7));
    square = fsdp_item(fsdp_mean(fsdp_mul(weight(a), weight(a))));
    assert_true(fabs(sqrt(square) - 0.02) < 0.005);
    assert_true(fsdp_item(fsdp_sum(weight(n))) == 5); /* one dim: its own rule */
    fsdp_no_grad_end();
    /* zero_grad drops gradients. */
    check_ok(fsdp_backward(fsdp_sum(fsdp_call(a, fsdp_full(FSDP_F32, 2, SIZES(2, 16), 1)))));
    assert_true(fsdp_grad(weight(a)) && !fsdp_grad(weight(b)));
    check_ok(fsdp_zero_grad(m));
    assert_null(fsdp_grad(weight(a)));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
}

static void test_devices(void **state)
{
    (void)state;
    check_ok(fsdp_device_push(FSDP_META));
    fsdp_module *m = fsdp_linear_create(3, 5, 1);
    check_ok(fsdp_device_pop());
    check_tensor(m);
    assert_int_equal(check_live(), 0);
    assert_int_not_equal(fsdp_reset_parameters(m, 1), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "weight is on the meta device");
    char *text = fsdp_module_print(m);
    assert_non_null(strstr(text, "weight: (5, 3) f32, on meta"));
    free(text);
    check_ok(fsdp_to_empty(m, FSDP_CPU));
    assert_int_equal(check_live(), 80);
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    assert_int_equal(s.live[FSDP_PARAMETERS], 80);
    assert_null(fsdp_call(m, weight(m)));
    check_error(FSDP_INVALID_STATE, "nothing was written");
    check_ok(fsdp_reset_parameters(m, 1));
    assert_int_not_equal(fsdp_to_empty(m, FSDP_META), FSDP_OK);
    check_error(FSDP_UNSUPPORTED, "meta");
    check_ok(fsdp_to_empty(m, FSDP_CPU)); /* there already: values stay */
    float was = ((float *)fsdp_data(weight(m)))[1];
    check_ok(fsdp_module_to_dtype(m, FSDP_BF16));
    assert_int_equal(fsdp_tensor_dtype(weight(m)), FSDP_BF16);
    assert_int_equal(check_live(), 40);
    assert_true(fsdp_requires_grad(weight(m)));
    assert_true(fabs(fsdp_at(weight(m), SIZES(0, 1)) - was) <= fabs(was) / 256);
    assert_int_not_equal(fsdp_module_to_dtype(m, FSDP_I32), FSDP_OK);
    check_error(FSDP_INVALID_DTYPE, "i32");
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
}

/* ---- dropout ------------------------------------------------------------------------- */

/* Two dropouts and a reuse of the first, over `rows` rows of 40. */
static fsdp_tensor *masks(fsdp_module *m, const uint64_t *ids, int64_t n, uint64_t step)
{
    check_ok(fsdp_random_set(3, step, ids, n));
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(2 * n, 40), 1), *y[3];
    y[0] = fsdp_call(fsdp_module_child(m, 0), x);
    y[1] = fsdp_call(fsdp_module_child(m, 1), x);
    y[2] = fsdp_call(fsdp_module_child(m, 0), x);
    return fsdp_cat(y, 3, 1); /* (2 n, 120) */
}

static void test_dropout(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_module_list_create();
    check_tensor(fsdp_module_add(m, "0", fsdp_dropout_create(0.25)));
    check_tensor(fsdp_module_add(m, "1", fsdp_dropout_create(0.25)));
    fsdp_scope *scope = fsdp_scope_begin();
    const uint64_t all[] = {10, 11, 12, 13};
    fsdp_tensor *whole = masks(m, all, 4, 5);
    check_tensor(whole);
    /* Which rows a rank or a microbatch has changes none of its masks. */
    for (int part = 0; part < 4; part++) {
        fsdp_context *rank = fsdp_context_create(part, 4), *before;
        fsdp_tensor *row = masks(m, all + part, 1, 5);
        assert_true(
            check_same_bits(row, fsdp_contiguous(fsdp_slice(whole, 0, 2 * part, 2 * part + 2))));
        before = fsdp_context_set(rank);
        fsdp_scope *own = fsdp_scope_begin();
        fsdp_module *twin = fsdp_module_list_create();
        check_tensor(fsdp_module_add(twin, "0", fsdp_dropout_create(0.25)));
        check_tensor(fsdp_module_add(twin, "1", fsdp_dropout_create(0.25)));
        fsdp_tensor *other = masks(twin, all + part, 1, 5);
        assert_memory_equal(fsdp_data(other), fsdp_data(row), 2 * 120 * 4);
        fsdp_scope_end(own);
        fsdp_module_free(twin);
        fsdp_context_set(before);
        fsdp_context_free(rank);
    }
    /* Another step, module, call, sample or row: another mask. */
    assert_false(check_same_bits(whole, masks(m, all, 4, 6)));
    fsdp_tensor *part[3];
    for (int k = 0; k < 3; k++)
        part[k] = fsdp_contiguous(fsdp_slice(whole, 1, 40 * k, 40 * k + 40));
    assert_false(check_same_bits(part[0], part[1]));
    assert_false(check_same_bits(part[0], part[2]));
    for (int r = 1; r < 8; r++)
        assert_false(
            check_same_bits(fsdp_slice(part[0], 0, 0, 1), fsdp_slice(part[0], 0, r, r + 1)));
    double mean = fsdp_item(fsdp_mean(whole));
    assert_true(fabs(mean - 1) < 0.06);
    /* Rows that are no multiple of the samples. */
    check_ok(fsdp_random_set(3, 5, all, 4));
    assert_null(fsdp_dropout(fsdp_full(FSDP_F32, 2, SIZES(6, 3), 1), 0.5));
    check_error(FSDP_INVALID_SHAPE, "6 rows for 4 samples");
    check_ok(fsdp_random_set(3, 5, NULL, 0));
    check_tensor(fsdp_dropout(fsdp_full(FSDP_F32, 2, SIZES(6, 3), 1), 0.5));
    /* Evaluation: the input itself. */
    fsdp_module_train(m, 0);
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(3, 3), 1);
    assert_ptr_equal(fsdp_call(fsdp_module_child(m, 0), x), x);
    assert_null(fsdp_dropout_create(1));
    check_error(FSDP_INVALID_ARGUMENT, "probability 1");
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_dropout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
