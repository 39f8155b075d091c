/*
 * test_autograd_storage.c - storages that empty and fill in place, memory of the
 * caller's, purposes and accounts.
 */
#include "tensor_check.h"

#include "tensor/tensor.h"

static int64_t live(fsdp_purpose p)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    return m.live[p];
}

static void test_in_place(void **state)
{
    (void)state;
    fsdp__storage *st = fsdp__storage_create(FSDP_CPU, 120, FSDP_UNSHARDED);
    assert_non_null(st);
    fsdp_tensor *t = fsdp__tensor_view(st, FSDP_F32, 2, SIZES(5, 6), NULL, 0);
    fsdp_tensor *v = fsdp_transpose(t, 0, 1); /* nothing to read: refused */
    assert_null(v);
    check_error(FSDP_INVALID_STATE, "is freed");
    assert_null(fsdp_data(t));
    assert_int_equal(live(FSDP_UNSHARDED), 0);
    check_ok(fsdp__storage_fill(st, NULL, "a test"));
    check_ok(fsdp__storage_fill(st, NULL, "a test")); /* filled already */
    assert_int_equal(live(FSDP_UNSHARDED), 120);
    check_ok(fsdp_fill_(t, 3));
    v = fsdp_transpose(t, 0, 1);
    uint32_t version = st->version;
    fsdp__storage_empty(st);
    fsdp__storage_empty(st);
    assert_true(!fsdp_data(t) && !fsdp_data(v) && !fsdp__storage_filled(st));
    assert_int_equal(live(FSDP_UNSHARDED), 0);
    assert_int_not_equal(fsdp_fill_(t, 1), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "freed");
    check_ok(fsdp__storage_fill(st, NULL, "a test"));
    assert_int_equal(st->version, version); /* filling is no mutation */
    check_ok(fsdp_fill_(t, 4));
    assert_true(fsdp_at(v, SIZES(5, 4)) == 4); /* the view came back with it */
    fsdp__storage_set_purpose(st, FSDP_GRADIENTS);
    assert_int_equal(live(FSDP_UNSHARDED), 0);
    assert_int_equal(live(FSDP_GRADIENTS), 120);
    fsdp__storage_empty(st);
    /* Lent bytes are charged like one's own and not freed. */
    float lent[30] = {7};
    check_ok(fsdp__storage_attach(st, lent, "a test"));
    assert_int_equal(live(FSDP_GRADIENTS), 120);
    assert_true(fsdp_at(t, SIZES(0, 0)) == 7);
    st->read_only = true;
    assert_int_not_equal(fsdp_fill_(t, 1), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "cannot be written");
    assert_int_equal(fsdp__storage_attach(st, lent, "a test"), FSDP_INTERNAL);
    fsdp_error_clear();
    fsdp_release(v);
    fsdp_release(t);
    fsdp__storage_release(st);
    assert_int_equal(check_live(), 0);
}

static int freed;

static void free_it(void *data, void *arg)
{
    freed++;
    assert_ptr_equal(arg, &freed);
    free(data);
}

static void test_from_memory(void **state)
{
    (void)state;
    float *data = malloc(24 * sizeof *data);
    assert_non_null(data);
    for (int i = 0; i < 24; i++)
        data[i] = (float)i;
    fsdp_tensor *t =
        fsdp_tensor_from_memory(data, FSDP_F32, 2, SIZES(3, 5), SIZES(8, 1), free_it, &freed);
    check_tensor(t);
    assert_ptr_equal(fsdp_data(t), data); /* no copy */
    assert_int_equal(check_live(), 0);
    assert_false(fsdp_is_contiguous(t));
    assert_true(fsdp_at(t, SIZES(2, 4)) == 20);
    data[20] = -1;
    assert_true(fsdp_at(t, SIZES(2, 4)) == -1);
    fsdp_tensor *v = fsdp_slice(t, 0, 1, 3), *c = fsdp_contiguous(v);
    assert_true(fsdp_at(c, SIZES(1, 4)) == -1);
    fsdp_release(c);
    fsdp_release(t);
    assert_int_equal(freed, 0); /* the view uses it */
    fsdp_release(v);
    assert_int_equal(freed, 1);
    /* Refused. */
    assert_null(fsdp_tensor_from_memory(NULL, FSDP_F32, 1, SIZES(3), NULL, NULL, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    float one = 1;
    assert_null(fsdp_tensor_from_memory(&one, FSDP_F32, 1, SIZES(3), SIZES(-1), NULL, NULL));
    check_error(FSDP_INVALID_SHAPE, "-1");
    assert_null(fsdp_tensor_from_memory(&one, FSDP_F32, 9, SIZES(1, 1, 1, 1, 1, 1, 1, 1, 1), NULL,
                                        NULL, NULL));
    check_error(FSDP_INVALID_SHAPE, "9 dims");
    assert_null(fsdp_empty(FSDP_F32, 1, SIZES(-2)));
    check_error(FSDP_INVALID_SHAPE, "-2");
    assert_null(fsdp_empty(FSDP_F32, 3, SIZES(INT64_MAX, 2, 2)));
    check_error(FSDP_INVALID_SHAPE, "2^63");
    assert_null(fsdp_empty((fsdp_dtype)77, 0, NULL));
    check_error(FSDP_INVALID_DTYPE, "77");
    /* No elements, no dims. */
    t = fsdp_zeros(FSDP_F32, 2, SIZES(3, 0));
    assert_true(fsdp_numel(t) == 0 && fsdp_is_contiguous(t));
    check_ok(fsdp_fill_(t, 1));
    fsdp_release(t);
    t = fsdp_scalar(FSDP_BF16, 1.5);
    assert_true(fsdp_item(t) == 1.5 && fsdp_ndim(t) == 0);
    fsdp_release(t);
    assert_int_equal(check_live(), 0);
}

static void test_writing(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *a = fsdp_zeros(FSDP_F32, 2, SIZES(3, 4)),
                *b = fsdp_full(FSDP_I64, 2, SIZES(4, 3), 7);
    fsdp_tensor *t = fsdp_transpose(a, 0, 1);
    check_ok(fsdp_copy_(t, b)); /* converted, through strides */
    check_ok(fsdp_accumulate_(fsdp_slice(a, 1, 1, 2), fsdp_full(FSDP_BF16, 2, SIZES(3, 1), 0.5)));
    assert_true(fsdp_at(a, SIZES(2, 0)) == 7 && fsdp_at(a, SIZES(2, 1)) == 7.5);
    check_ok(fsdp_fill_(fsdp_slice(t, 0, 3, 4), -2));
    double v[12];
    check_ok(fsdp_to_doubles(t, v)); /* in t's own order */
    assert_true(v[0] == 7 && v[3] == 7.5 && v[9] == -2 && v[11] == -2);
    assert_int_not_equal(fsdp_copy_(a, b), FSDP_OK);
    check_error(FSDP_INVALID_SHAPE, "(4, 3)");
    assert_true(isnan(fsdp_item(a)));
    check_error(FSDP_INVALID_SHAPE, "(3, 4)");
    char *text = fsdp_tensor_describe(t);
    assert_string_equal(text, "f32 (4, 3) cpu");
    free(text);
    /* Accessors accept NULL. */
    assert_true(fsdp_ndim(NULL) == 0 && fsdp_size(NULL, 0) == 0 && !fsdp_data(NULL) &&
                fsdp_numel(NULL) == 0 && !fsdp_sizes(NULL) && !fsdp_requires_grad(NULL) &&
                !fsdp_grad(NULL) && fsdp_size(a, -1) == 4 && fsdp_size(a, 2) == 0);
    fsdp_release(NULL);
    assert_null(fsdp_retain(NULL));
    fsdp_scope_end(scope);
}

/* Random numbers are a function of seed, name and place. */
static void test_random(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *a = fsdp_randn(FSDP_F32, 2, SIZES(37, 41), 1, "w");
    assert_true(check_same_bits(a, fsdp_randn(FSDP_F32, 2, SIZES(37, 41), 1, "w")));
    assert_false(check_same_bits(a, fsdp_randn(FSDP_F32, 2, SIZES(37, 41), 2, "w")));
    assert_false(check_same_bits(a, fsdp_randn(FSDP_F32, 2, SIZES(37, 41), 1, "v")));
    fsdp_tensor *more = fsdp_randn(FSDP_F32, 1, SIZES(2000), 1, "w");
    assert_memory_equal(fsdp_data(a), fsdp_data(more), 37 * 41 * 4);
    double mean = fsdp_item(fsdp_mean(a)), square = fsdp_item(fsdp_mean(fsdp_mul(a, a)));
    assert_true(fabs(mean) < 0.1 && fabs(square - 1) < 0.15);
    fsdp_tensor *u = fsdp_rand(FSDP_F64, 1, SIZES(1000), 1, "u");
    double *v = fsdp_data(u);
    for (int i = 0; i < 1000; i++)
        assert_true(v[i] >= 0 && v[i] < 1);
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_in_place),
        cmocka_unit_test(test_from_memory),
        cmocka_unit_test(test_writing),
        cmocka_unit_test(test_random),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
