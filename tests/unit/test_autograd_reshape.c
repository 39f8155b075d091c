/*
 * test_autograd_reshape.c - reshapes of views: what stays a view has the right elements, also where
 * dims of size 1 stand between others.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fsdp/ops.h"

static fsdp_tensor *counted(int ndim, const int64_t *sizes)
{
    fsdp_tensor *t = fsdp_empty(FSDP_F32, ndim, sizes);
    float *p = fsdp_data(t);
    for (int64_t i = 0; i < fsdp_numel(t); i++)
        p[i] = (float)i;
    fsdp_touch(t);
    return t;
}

/* Columns [4, 8) of (B, T, 12), as heads of 2: (B, T, 2, 2). */
static void heads_of_a_slice(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{2, 3}, {2, 1}, {1, 3}, {1, 1}, {3, 2}};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        int64_t B = shapes[k][0], T = shapes[k][1], sizes[3] = {B, T, 12};
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_slice(counted(3, sizes), 2, 4, 8);
        int64_t heads[4] = {B, T, 2, 2};
        fsdp_tensor *y = fsdp_reshape(x, 4, heads);
        assert_non_null(y);
        for (int64_t i = 0; i < fsdp_numel(y); i++) {
            int64_t at[4] = {i / 4 / T, i / 4 % T, i / 2 % 2, i % 2};
            assert_true(fsdp_at(y, at) == (double)(i / 4 * 12 + 4 + i % 4));
        }
        fsdp_scope_end(scope);
    }
}

/* Transposed, then flattened: a copy; with ones in between still right. */
static void flattened_transpose(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{2, 3, 4}, {2, 1, 4}, {1, 3, 4}, {2, 3, 1}, {1, 1, 4}};
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
        const int64_t *n = shapes[k];
        int64_t flat = n[0] * n[1] * n[2];
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *y = fsdp_reshape(fsdp_transpose(counted(3, n), 0, 2), 1, &flat);
        assert_non_null(y);
        for (int64_t i = 0; i < flat; i++) {
            int64_t a = i / (n[1] * n[0]), b = i / n[0] % n[1], c = i % n[0];
            assert_true(fsdp_at(y, &i) == (double)((c * n[1] + b) * n[2] + a));
        }
        fsdp_scope_end(scope);
    }
}

/* At most one size is open, and it must be one size. */
static void refused_sizes(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {
        {-1, -1}, {-2, 6}, {-1, 5}, {0, -1}, {4, 4}, {INT64_MAX, INT64_MAX}, {-6, -2}};
    for (int64_t n = 0; n <= 12; n += 12)
        for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
            fsdp_scope *scope = fsdp_scope_begin();
            fsdp_tensor *y = fsdp_reshape(counted(1, &n), 2, shapes[k]);
            if (n == 0 && k == 2) {
                assert_true(y && fsdp_size(y, 0) == 0 && fsdp_size(y, 1) == 5);
            } else {
                assert_null(y);
                assert_int_equal(fsdp_error(), FSDP_INVALID_SHAPE);
                fsdp_error_clear();
            }
            fsdp_scope_end(scope);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_of_a_slice),
        cmocka_unit_test(flattened_transpose),
        cmocka_unit_test(refused_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
