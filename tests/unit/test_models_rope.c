/*
 * test_models_rope.c - rotary frequencies and tables: against the formulas in fp64, and which
 * tables are made anew.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "models/models_internal.h"

static const double pi = 3.14159265358979323846;

static fsdp__rope plain(int64_t head_dim)
{
    return (fsdp__rope){.c = {.theta = 10000.0, .type = FSDP_ROPE_DEFAULT}, .head_dim = head_dim};
}

static void frequencies_are_powers(void **state)
{
    (void)state;
    float inv[64];
    fsdp__rope r = plain(128);
    fsdp__rope_frequencies(&r.c, 128, inv);
    assert_true(inv[0] == 1.0F);
    for (int i = 0; i < 64; i++) {
        double exact = pow(10000.0, -2.0 * i / 128.0);
        assert_true(fabs((double)inv[i] - exact) <= 3e-7 * exact);
    }
}

/* Llama 3.1's numbers: short waves kept, long ones slowed by 8, a blend between. */
static void llama3_slows_long_waves(void **state)
{
    (void)state;
    fsdp_rope c = {500000.0, FSDP_ROPE_LLAMA3, 8.0, 1.0, 4.0, 8192};
    fsdp_rope base = {500000.0, FSDP_ROPE_DEFAULT, 0, 0, 0, 0};
    float inv[64], was[64];
    int kept = 0, slowed = 0, blended = 0;
    fsdp__rope_frequencies(&c, 128, inv);
    fsdp__rope_frequencies(&base, 128, was);
    for (int i = 0; i < 64; i++) {
        double f = (double)was[i], wave = 2.0 * pi / f, expected = f;
        if (wave > 8192.0) {
            expected = f / 8.0;
            slowed++;
        } else if (wave >= 2048.0) {
            double s = (8192.0 / wave - 1.0) / 3.0;
            expected = (1.0 - s) * f / 8.0 + s * f;
            blended++;
        } else {
            kept++;
        }
        assert_true(fabs((double)inv[i] - expected) <= 1e-6 * expected);
    }
    assert_true(kept > 0 && slowed > 0 && blended > 0);
}

static fsdp_tensor *ids(int64_t B, int64_t T, const int64_t *values)
{
    int64_t sizes[2] = {B, T};
    fsdp_tensor *t = fsdp_empty(FSDP_I64, 2, sizes);
    memcpy(fsdp_data(t), values, (size_t)(B * T) * sizeof *values);
    fsdp_touch(t);
    return t;
}

static fsdp_tensor *input(int64_t B, int64_t T, fsdp_device d)
{
    int64_t sizes[3] = {B, T, 8};
    fsdp_device_push(d);
    fsdp_tensor *x = fsdp_zeros(FSDP_F32, 3, sizes);
    fsdp_device_pop();
    return x;
}

static void tables_hold_cosines(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__rope r = plain(8);
    fsdp_tensor *cs, *sn;
    assert_int_equal(fsdp__rope_get(&r, input(2, 5, FSDP_CPU), NULL, 3, &cs, &sn), FSDP_OK);
    assert_int_equal(fsdp_ndim(cs), 2);
    for (int64_t t = 0; t < 5; t++)
        for (int64_t i = 0; i < 4; i++) {
            double angle = (double)(t + 3) * pow(10000.0, -2.0 * (double)i / 8.0);
            int64_t at[2] = {t, i};
            assert_true(fabs(fsdp_at(cs, at) - cos(angle)) < 1e-6);
            assert_true(fabs(fsdp_at(sn, at) - sin(angle)) < 1e-6);
        }
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
}

/* RC-24: at position 100000 the tables are those of f32 angles, whatever the dtype of the layer: in
 * bf16, whose numbers there are 512 apart, all these positions would be one. */
static void far_positions_keep_their_digits(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__rope r = plain(8);
    const int64_t where[4] = {99999, 100000, 100001, 131071};
    fsdp_tensor *p = ids(1, 4, where), *cs, *sn;
    fsdp_tensor *x = fsdp_cast(input(1, 4, FSDP_CPU), FSDP_BF16);
    assert_int_equal(fsdp__rope_get(&r, x, p, 0, &cs, &sn), FSDP_OK);
    assert_int_equal(fsdp_tensor_dtype(cs), FSDP_F32);
    assert_int_equal(fsdp_tensor_dtype(sn), FSDP_F32);
    float inv[4];
    fsdp__rope_frequencies(&r.c, 8, inv);
    for (int64_t t = 0; t < 4; t++)
        for (int64_t i = 0; i < 4; i++) {
            /* The angle is rounded to f32, the cosine of it is exact. */
            float angle = (float)where[t] * inv[i];
            int64_t at[3] = {0, t, i};
            assert_true(fabs(fsdp_at(cs, at) - cos((double)angle)) < 1e-7);
            assert_true(fabs(fsdp_at(sn, at) - sin((double)angle)) < 1e-7);
            double exact = (double)where[t] * pow(10000.0, -2.0 * (double)i / 8.0);
            assert_true(fabs(fsdp_at(cs, at) - cos(exact)) <
                        0.02); /* angles are 2^-7 apart there */
        }
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
}

static void own_positions_give_the_same_bits(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__rope r = plain(8);
    const int64_t where[6] = {0, 1, 2, 7, 0, 1};
    fsdp_tensor *p = ids(2, 3, where), *x = input(2, 3, FSDP_CPU), *run, *own, *sn;
    assert_int_equal(fsdp__rope_get(&r, input(1, 8, FSDP_CPU), NULL, 0, &run, &sn), FSDP_OK);
    assert_int_equal(fsdp__rope_get(&r, x, p, 0, &own, &sn), FSDP_OK);
    assert_int_equal(fsdp_ndim(own), 3);
    for (int64_t k = 0; k < 6; k++) {
        int64_t a[3] = {k / 3, k % 3, 2}, b[2] = {where[k], 2};
        assert_true(fsdp_at(own, a) == fsdp_at(run, b));
    }
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
}

/* A block that is run again in backward finds its tables; changed positions give new ones. */
static void tables_are_kept_by_storage(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__rope r = plain(8);
    const int64_t where[3] = {4, 5, 6};
    fsdp_tensor *p = ids(1, 3, where), *x = input(1, 3, FSDP_CPU), *a, *b, *c, *sn;
    assert_int_equal(fsdp__rope_get(&r, x, p, 0, &a, &sn), FSDP_OK);
    assert_int_equal(fsdp__rope_get(&r, x, fsdp_detach(p), 0, &b, &sn), FSDP_OK);
    assert_ptr_equal(a, b);
    int64_t first[3] = {0, 0, 0};
    assert_true(fabs(fsdp_at(a, first) - cos(4.0)) < 1e-6);
    ((int64_t *)fsdp_data(p))[0] = 9;
    fsdp_touch(p);
    assert_int_equal(fsdp__rope_get(&r, x, p, 0, &c, &sn), FSDP_OK);
    assert_true(fabs(fsdp_at(c, first) - cos(9.0)) < 1e-6);
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
}

static void meta_tables_have_no_values(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__rope r = plain(8);
    fsdp_tensor *cs, *sn;
    assert_int_equal(fsdp__rope_get(&r, input(2, 5, FSDP_META), NULL, 0, &cs, &sn), FSDP_OK);
    assert_int_equal(fsdp_tensor_device(cs), FSDP_META);
    assert_int_equal(fsdp_size(cs, 0), 5);
    /* The same model with values next. */
    assert_int_equal(fsdp__rope_get(&r, input(2, 4, FSDP_CPU), NULL, 0, &cs, &sn), FSDP_OK);
    assert_int_equal(fsdp_tensor_device(cs), FSDP_CPU);
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
}

static void wrong_positions_are_named(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__rope r = plain(8);
    const int64_t where[3] = {4, 5, 6};
    fsdp_tensor *cs, *sn;
    assert_int_equal(fsdp__rope_get(&r, input(1, 4, FSDP_CPU), ids(1, 3, where), 0, &cs, &sn),
                     FSDP_INVALID_SHAPE);
    assert_non_null(strstr(fsdp_error_text(), "(1, 4)"));
    fsdp_error_clear();
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frequencies_are_powers),
        cmocka_unit_test(llama3_slows_long_waves),
        cmocka_unit_test(tables_hold_cosines),
        cmocka_unit_test(far_positions_keep_their_digits),
        cmocka_unit_test(own_positions_give_the_same_bits),
        cmocka_unit_test(tables_are_kept_by_storage),
        cmocka_unit_test(meta_tables_have_no_values),
        cmocka_unit_test(wrong_positions_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
