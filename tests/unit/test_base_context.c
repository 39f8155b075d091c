/*
 * test_base_context.c - contexts, their slots, accounts, threads and log.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"

/* Each test runs in a fresh context. */
static int enter(void **state)
{
    *state = fsdp_context_create(2, 4);
    fsdp_context_set(*state);
    return *state ? 0 : -1;
}

static int leave(void **state)
{
    fsdp_context_free(*state);
    return 0;
}

static void rank_is_the_contexts(void **state)
{
    assert_ptr_equal(fsdp_context_current(), *state);
    assert_int_equal(fsdp_rank(), 2);
    assert_int_equal(fsdp_world_size(), 4);
    fsdp__context_set_rank(*state, 1, 8);
    assert_int_equal(fsdp_rank(), 1);
    assert_int_equal(fsdp_world_size(), 8);

    fsdp_context *other = fsdp_context_create(5, 6);
    assert_ptr_equal(fsdp_context_set(other), *state);
    assert_int_equal(fsdp_rank(), 5);
    fsdp_context_free(other);
    /* What was freed is not current; the default of the thread is. */
    assert_int_equal(fsdp_rank(), 0);
    assert_int_equal(fsdp_world_size(), 1);
    fsdp_context *own = fsdp_context_current();
    assert_ptr_equal(fsdp_context_set(*state), own);
    /* The default may be freed by hand, and is made anew. */
    fsdp_context_free(own);
    assert_ptr_equal(fsdp_context_set(NULL), *state);
    assert_int_equal(fsdp_world_size(), 1);
    fsdp_context_free(NULL);
}

static int freed[FSDP__SLOT_COUNT], freed_count;
static int64_t live_at_free;

static void free_slot(void *p)
{
    freed[freed_count++] = (int)(intptr_t)p;
    /* The context that goes is current: accounts still work. */
    fsdp__account_give(FSDP_OTHER, 10);
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    live_at_free = m.live_total;
}

static void slots_are_freed_from_the_top(void **state)
{
    (void)state;
    fsdp_context *ctx = fsdp_context_create(0, 1);
    fsdp_context *before = fsdp_context_set(ctx);
    assert_null(fsdp__slot_get(FSDP__SLOT_TENSOR));
    fsdp__slot_set(FSDP__SLOT_TENSOR, (void *)3, free_slot);
    fsdp__slot_set(FSDP__SLOT_TRACE, (void *)1, free_slot);
    fsdp__slot_set(FSDP__SLOT_COMM, (void *)6, free_slot);
    fsdp__slot_set(FSDP__SLOT_NN, (void *)5, NULL);
    assert_ptr_equal(fsdp__slot_get(FSDP__SLOT_TENSOR), (void *)3);
    assert_int_equal(fsdp__account_take(FSDP_OTHER, 30, "three slots"), FSDP_OK);
    fsdp_context_set(before);
    freed_count = 0;
    fsdp_context_free(ctx);
    assert_int_equal(freed_count, 3);
    assert_int_equal(freed[0], 6);
    assert_int_equal(freed[1], 3);
    assert_int_equal(freed[2], 1);
    assert_int_equal(live_at_free, 0);
    assert_ptr_equal(fsdp_context_current(), before);
}

static void *thread_with_slot(void *arg)
{
    (void)arg;
    fsdp__account_take(FSDP_OTHER, 10, "a slot");
    fsdp__slot_set(FSDP__SLOT_FSDP, (void *)7, free_slot);
    return NULL;
}

static void default_goes_with_its_thread(void **state)
{
    (void)state;
    pthread_t t;
    freed_count = 0;
    assert_int_equal(pthread_create(&t, NULL, thread_with_slot, NULL), 0);
    pthread_join(t, NULL);
    assert_int_equal(freed_count, 1);
    assert_int_equal(freed[0], 7);
}

/* ---- accounts ---------------------------------------------------------- */

static void accounts_are_exact(void **state)
{
    (void)state;
    fsdp_memory_stats m;
    assert_int_equal(fsdp__account_take(FSDP_PARAMETERS, 1000, "p"), FSDP_OK);
    assert_int_equal(fsdp__account_take(FSDP_ACTIVATIONS, 500, "a"), FSDP_OK);
    fsdp__account_reserve(64);
    assert_int_equal(fsdp__account_take(FSDP_ACTIVATIONS, 0, "nothing"), FSDP_OK);
    fsdp__account_give(FSDP_ACTIVATIONS, 400);
    assert_int_equal(fsdp__account_take(FSDP_GRADIENTS, 300, "g"), FSDP_OK);
    fsdp_memory_get(&m);
    assert_int_equal(m.live[FSDP_PARAMETERS], 1000);
    assert_int_equal(m.live[FSDP_ACTIVATIONS], 100);
    assert_int_equal(m.live_total, 1400);
    assert_int_equal(m.peak_total, 1500);
    assert_int_equal(m.peak_by[FSDP_ACTIVATIONS], 500);
    assert_int_equal(m.peak_by[FSDP_GRADIENTS], 0);
    assert_int_equal(m.peak[FSDP_GRADIENTS], 300);
    assert_int_equal(m.reserved, 64);
    assert_int_equal(m.reserved_at_peak, 0);
    assert_int_equal(m.allocations, 4);

    fsdp__account_move(FSDP_GRADIENTS, FSDP_OPTIMIZER, 300);
    fsdp_memory_get(&m);
    assert_int_equal(m.live[FSDP_GRADIENTS], 0);
    assert_int_equal(m.peak[FSDP_OPTIMIZER], 300);
    assert_int_equal(m.live_total, 1400);

    fsdp_memory_reset_peak();
    fsdp_memory_get(&m);
    assert_int_equal(m.peak_total, 1400);
    assert_int_equal(m.peak[FSDP_GRADIENTS], 0);
    assert_int_equal(m.peak_by[FSDP_OPTIMIZER], 300);
    assert_int_equal(m.reserved_at_peak, 64);
    fsdp__account_reserve(-64);
}

static void limit_refuses_with_the_table(void **state)
{
    (void)state;
    fsdp_memory_stats m;
    assert_int_equal(fsdp_memory_set_limit(1 << 20), FSDP_OK);
    assert_int_equal(fsdp__account_take(FSDP_PARAMETERS, 1 << 19, "half"), FSDP_OK);
    assert_int_equal(fsdp__account_take(FSDP_UNSHARDED, (1 << 19) + 1, "layers.3.weight"),
                     FSDP_NO_MEMORY);
    const char *text = fsdp_error_text();
    assert_non_null(strstr(text, "layers.3.weight"));
    assert_non_null(strstr(text, "524289 bytes"));
    assert_non_null(strstr(text, "unsharded"));
    assert_non_null(strstr(text, "512.00 KiB"));
    assert_non_null(strstr(text, "1.00 MiB"));
    assert_non_null(strstr(text, "memory.limit"));
    fsdp_memory_get(&m);
    assert_int_equal(m.live_total, 1 << 19);
    assert_int_equal(m.peak_total, 1 << 19);
    assert_int_equal(m.limit, 1 << 20);
    fsdp_error_clear();
    /* To the byte. */
    assert_int_equal(fsdp__account_take(FSDP_UNSHARDED, 1 << 19, "fits"), FSDP_OK);
    assert_int_equal(fsdp__account_take(FSDP_UNSHARDED, 1, "one more"), FSDP_NO_MEMORY);
    fsdp_error_clear();
    assert_int_equal(fsdp__account_take(FSDP_OTHER, INT64_MAX, "no overflow"), FSDP_NO_MEMORY);
    fsdp_error_clear();
    assert_int_equal(fsdp_memory_set_limit(0), FSDP_OK);
    assert_int_equal(fsdp__account_take(FSDP_UNSHARDED, 1, "no limit"), FSDP_OK);
    assert_int_equal(fsdp_memory_set_limit(-1), FSDP_INVALID_ARGUMENT);
}

static void test_switch_fails_the_nth(void **state)
{
    (void)state;
    fsdp__account_fail_nth(2);
    assert_int_equal(fsdp__account_take(FSDP_OTHER, 1, "first"), FSDP_OK);
    assert_int_equal(fsdp__account_take(FSDP_OTHER, 1, "second"), FSDP_NO_MEMORY);
    fsdp_error_clear();
    assert_int_equal(fsdp__account_take(FSDP_OTHER, 1, "third"), FSDP_OK);
    fsdp__account_fail_nth(1);
    fsdp__account_fail_nth(0);
    assert_int_equal(fsdp__account_take(FSDP_OTHER, 1, "off"), FSDP_OK);
}

static void table_names_every_purpose(void **state)
{
    (void)state;
    char *table = fsdp_memory_table();
    assert_non_null(table);
    for (int p = 0; p < FSDP_PURPOSE_COUNT; p++)
        assert_non_null(strstr(table, fsdp_purpose_name((fsdp_purpose)p)));
    assert_string_equal(fsdp_purpose_name((fsdp_purpose)99), "unknown purpose");
    free(table);
}

/* ---- threads and log ------------------------------------------------------ */

static void threads_are_at_least_one(void **state)
{
    (void)state;
    assert_true(fsdp_threads() >= 1);
    assert_int_equal(fsdp_set_threads(3), FSDP_OK);
    assert_int_equal(fsdp_threads(), 3);
    assert_int_equal(fsdp_set_threads(0), FSDP_INVALID_ARGUMENT);
    /* While an error is kept nothing changes. */
    assert_int_equal(fsdp_set_threads(2), FSDP_INVALID_ARGUMENT);
    assert_int_equal(fsdp_threads(), 3);
}

static void threads_follow_the_environment(void **state)
{
    (void)state;
    setenv("OMP_NUM_THREADS", "5,2", 1);
    assert_int_equal(fsdp_threads(), 5);
    unsetenv("OMP_NUM_THREADS");
    /* Asked once. */
    assert_int_equal(fsdp_threads(), 5);
}

static char logged[128];
static int logged_level, logged_count;

static void log_line(void *arg, int level, const char *line)
{
    assert_ptr_equal(arg, logged);
    logged_level = level;
    logged_count++;
    strncpy(logged, line, sizeof logged - 1);
}

static void log_goes_to_the_callback(void **state)
{
    (void)state;
    assert_false(fsdp__log_enabled(FSDP__LOG_ERROR));
    fsdp__log(FSDP__LOG_ERROR, "nobody hears");
    fsdp_log_set(log_line, logged, 1);
    logged_count = 0;
    fsdp__log(FSDP__LOG_INFO, "too low");
    assert_int_equal(logged_count, 0);
    fsdp__log(FSDP__LOG_WARNING, "rank %d", 3);
    assert_int_equal(logged_count, 1);
    assert_int_equal(logged_level, FSDP__LOG_WARNING);
    assert_string_equal(logged, "rank 3");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, enter, leave)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(rank_is_the_contexts),           TEST(slots_are_freed_from_the_top),
        TEST(default_goes_with_its_thread),   TEST(accounts_are_exact),
        TEST(limit_refuses_with_the_table),   TEST(test_switch_fails_the_nth),
        TEST(table_names_every_purpose),      TEST(threads_are_at_least_one),
        TEST(threads_follow_the_environment), TEST(log_goes_to_the_callback),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
