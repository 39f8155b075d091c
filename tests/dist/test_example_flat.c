/*
 * test_example_flat.c - 10,000 steps of the example hold no more than 100 of them.
 *
 * ctest: slow timeout=300
 *
 * The example's own main is run as it stands, and the accounts are read after it: the largest
 * total, to the byte, and what is left.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

int example_main(int argc, char **argv);
#define main example_main
#include "../../examples/your_own_model.c"
#undef main

/* Fewer where each step is many times slower. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define MANY "1000"
#else
#define MANY "10000"
#endif

/* Peak and rest of the accounts of one run in a context of its own. */
static void train(const char *steps, int64_t *peak, int64_t *left)
{
    fsdp_context *ctx = fsdp_context_create(0, 1), *before = fsdp_context_set(ctx);
    assert_int_equal(fsdp_set_threads(1), FSDP_OK); /* too small a model for two */
    char name[] = "your_own_model", *argv[] = {name, (char *)(uintptr_t)steps, NULL};
    assert_int_equal(example_main(2, argv), 0);
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    *peak = m.peak_total;
    *left = m.live_total;
    fsdp_context_set(before);
    fsdp_context_free(ctx);
}

static void test_flat(void **state)
{
    (void)state;
    int64_t few, many, left_few, left_many;
    train("100", &few, &left_few);
    train(MANY, &many, &left_many);
    assert_true(few > 0);
    assert_int_equal(few, many);
    assert_int_equal(left_few, 0);
    assert_int_equal(left_many, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_flat)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
