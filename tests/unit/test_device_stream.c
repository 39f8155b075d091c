/*
 * test_device_stream.c - devices in force, streams of polled work, events.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "device/allocator.h"

static void test_device(void **state)
{
    (void)state;
    assert_int_equal(fsdp_device_current(), FSDP_CPU);
    assert_int_equal(fsdp_device_push(FSDP_META), FSDP_OK);
    assert_int_equal(fsdp_device_push(FSDP_CPU), FSDP_OK);
    assert_int_equal(fsdp_device_current(), FSDP_CPU);
    assert_int_equal(fsdp_device_pop(), FSDP_OK);
    assert_int_equal(fsdp_device_current(), FSDP_META);
    assert_int_equal(fsdp_device_pop(), FSDP_OK);
    assert_int_equal(fsdp_device_pop(), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp_device_push((fsdp_device)7), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_string_equal(fsdp_device_name(FSDP_META), "meta");
}

typedef struct step {
    int polls;  /* that it needs */
    int *clock; /* counts items that are done */
    int done_at;
    int fails;
} step;

static int run_step(void *arg)
{
    step *s = arg;
    if (s->polls-- > 0) return 0;
    if (s->fails) {
        fsdp__fail(FSDP_IO_ERROR, "broken");
        return -1;
    }
    s->done_at = ++*s->clock;
    return 1;
}

static void test_order(void **state)
{
    (void)state;
    int clock = 0, idle = 0;
    step s[20];
    fsdp_stream *stream = fsdp_stream_create("work");
    for (int i = 0; i < 20; i++) {
        s[i] = (step){i % 3, &clock, 0, 0};
        assert_int_equal(fsdp_stream_submit(stream, run_step, &s[i]), FSDP_OK);
    }
    assert_int_equal(s[0].done_at, 1); /* submit tries at once */
    assert_int_equal(fsdp_stream_poll(stream, &idle), FSDP_OK);
    assert_int_equal(idle, clock == 20);
    assert_int_equal(fsdp_stream_sync(stream), FSDP_OK);
    for (int i = 0; i < 20; i++)
        assert_int_equal(s[i].done_at, i + 1);
    fsdp_stream_free(stream);
}

static void test_events(void **state)
{
    (void)state;
    int clock = 0, idle;
    step slow = {6, &clock, 0, 0}, later = {0, &clock, 0, 0}, other = {0, &clock, 0, 0};
    fsdp_stream *a = fsdp_stream_create("a"), *b = fsdp_stream_create("b");
    fsdp_event *e = fsdp_event_create();
    assert_int_equal(fsdp_event_query(e), 1); /* never recorded */
    fsdp_stream_submit(a, run_step, &slow);
    fsdp_event_record(e, a);
    fsdp_stream_submit(a, run_step, &later);
    assert_int_equal(fsdp_event_wait(e, b), FSDP_OK);
    fsdp_stream_submit(b, run_step, &other);
    assert_int_equal(other.done_at, 0);
    fsdp_stream_poll(b, &idle);
    assert_int_equal(idle, 0);
    assert_int_equal(fsdp_event_wait(e, NULL), FSDP_OK);
    assert_int_equal(slow.done_at, 1);
    assert_int_equal(fsdp_event_query(e), 1);
    assert_int_equal(fsdp_stream_sync(b), FSDP_OK);
    assert_true(other.done_at > slow.done_at);
    /* An event outlives its stream, whose queue runs to its end first. */
    slow = (step){5, &clock, 0, 0};
    fsdp_stream_submit(a, run_step, &slow);
    fsdp_event_record(e, a);
    fsdp_stream_free(a);
    assert_int_equal(fsdp_event_query(e), 1);
    assert_int_equal(fsdp_event_wait(e, b), FSDP_OK);
    fsdp_event_record(e, NULL);
    assert_int_equal(fsdp_event_query(e), 1);
    fsdp_event_free(e);
    fsdp_stream_free(b);
}

static void test_failure(void **state)
{
    (void)state;
    int clock = 0;
    step bad = {2, &clock, 0, 1}, good = {0, &clock, 0, 0};
    fsdp_stream *s = fsdp_stream_create("s");
    fsdp_event *e = fsdp_event_create();
    fsdp_stream_submit(s, run_step, &bad);
    fsdp_stream_submit(s, run_step, &good);
    fsdp_event_record(e, s);
    int r;
    while ((r = fsdp_event_query(e)) == 0)
        ;
    assert_int_equal(r, -1);
    assert_int_equal(fsdp_stream_sync(s), FSDP_IO_ERROR);
    assert_int_equal(fsdp_stream_submit(s, run_step, &good), FSDP_IO_ERROR);
    assert_int_equal(good.done_at, 1); /* those behind it are still called */
    fsdp_error_clear();
    fsdp_event_free(e);
    fsdp_stream_free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_device),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_failure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
