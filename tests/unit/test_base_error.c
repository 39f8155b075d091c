/*
 * test_base_error.c - the first error of a context is kept, whatever follows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <errno.h>
#include <pthread.h>
#include <string.h>

#include "base/error.h"
#include "fsdp/context.h"

static int clear(void **state)
{
    (void)state;
    fsdp__error_set_hook(NULL, NULL);
    fsdp_error_clear();
    return 0;
}

static void first_error_wins(void **state)
{
    (void)state;
    assert_int_equal(fsdp_error(), FSDP_OK);
    assert_string_equal(fsdp_error_text(), "");
    assert_int_equal(fsdp__fail(FSDP_INVALID_SHAPE, "a %d x %s", 3, "b"), FSDP_INVALID_SHAPE);
    assert_int_equal(fsdp__fail(FSDP_IO_ERROR, "later"), FSDP_INVALID_SHAPE);
    assert_int_equal(fsdp_error(), FSDP_INVALID_SHAPE);
    assert_string_equal(fsdp_error_text(), "a 3 x b");
    fsdp_error_clear();
    assert_int_equal(fsdp_error(), FSDP_OK);
    assert_string_equal(fsdp_error_text(), "");
    assert_int_equal(fsdp__fail(FSDP_IO_ERROR, "again"), FSDP_IO_ERROR);
}

static void ok_is_no_failure(void **state)
{
    (void)state;
    assert_int_equal(fsdp__fail(FSDP_OK, "x"), FSDP_INTERNAL);
}

static void places_stand_in_front(void **state)
{
    (void)state;
    assert_int_equal(fsdp__error_place("nowhere"), FSDP_OK);
    assert_string_equal(fsdp_error_text(), "");
    fsdp__fail(FSDP_INVALID_DATA, "bad header");
    assert_int_equal(fsdp__error_place("%s.safetensors", "model"), FSDP_INVALID_DATA);
    fsdp__error_place("folder");
    assert_string_equal(fsdp_error_text(), "folder: model.safetensors: bad header");
}

static void errno_text_is_added(void **state)
{
    (void)state;
    errno = ENOENT;
    assert_int_equal(fsdp__fail_errno(FSDP_NOT_FOUND, "cannot open %s", "x"), FSDP_NOT_FOUND);
    assert_int_equal(errno, ENOENT);
    assert_string_equal(fsdp_error_text(), "cannot open x: No such file or directory");
}

static void memory_failures_name_what_asked(void **state)
{
    (void)state;
    assert_int_equal(fsdp__fail_memory("a table", 12345), FSDP_NO_MEMORY);
    assert_non_null(strstr(fsdp_error_text(), "a table"));
    assert_non_null(strstr(fsdp_error_text(), "12345"));
}

typedef struct seen {
    int calls;
    fsdp_status code;
    char text[64];
} seen;

static void hook(void *arg, fsdp_status code, const char *text)
{
    seen *s = arg;
    s->calls++;
    s->code = code;
    strncpy(s->text, text, sizeof s->text - 1);
    /* A hook that fails itself changes nothing. */
    fsdp__fail(FSDP_INTERNAL, "in the hook");
}

static void hook_runs_once_an_error(void **state)
{
    (void)state;
    seen s = {0};
    fsdp__error_set_hook(hook, &s);
    fsdp__fail(FSDP_TIMEOUT, "slow");
    fsdp__fail(FSDP_TIMEOUT, "slower");
    assert_int_equal(s.calls, 1);
    assert_int_equal(s.code, FSDP_TIMEOUT);
    assert_string_equal(s.text, "slow");
    assert_string_equal(fsdp_error_text(), "slow");
}

static void *other_thread(void *arg)
{
    (void)arg;
    fsdp__fail(FSDP_IO_ERROR, "there");
    return fsdp_error() == FSDP_IO_ERROR ? NULL : (void *)1;
}

static void threads_have_errors_of_their_own(void **state)
{
    (void)state;
    pthread_t t;
    void *result;
    assert_int_equal(pthread_create(&t, NULL, other_thread, NULL), 0);
    pthread_join(t, &result);
    assert_null(result);
    assert_int_equal(fsdp_error(), FSDP_OK);
}

static fsdp_status tries(fsdp_status given)
{
    FSDP_TRY(given);
    return FSDP_INTERRUPTED;
}

static void try_returns_early(void **state)
{
    (void)state;
    assert_int_equal(tries(FSDP_TIMEOUT), FSDP_TIMEOUT);
    assert_int_equal(tries(FSDP_OK), FSDP_INTERRUPTED);
}

static void statuses_have_names(void **state)
{
    (void)state;
    assert_string_equal(fsdp_status_name(FSDP_OK), "ok");
    assert_string_equal(fsdp_status_name(FSDP_INTERNAL), "internal error");
    assert_string_equal(fsdp_status_name((fsdp_status)999), "unknown status");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, clear, clear)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(first_error_wins),
        TEST(ok_is_no_failure),
        TEST(places_stand_in_front),
        TEST(errno_text_is_added),
        TEST(memory_failures_name_what_asked),
        TEST(hook_runs_once_an_error),
        TEST(threads_have_errors_of_their_own),
        TEST(try_returns_early),
        TEST(statuses_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
