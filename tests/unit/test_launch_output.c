/* Lines from pipes to sinks, and the last lines that are kept. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/launch_internal.h"

typedef struct fixture {
    int from[2]; /* the rank's pipe */
    int to[2];   /* the sink's */
    fsdp__sink sink;
    fsdp__tail tail;
    fsdp__stream stream;
} fixture;

static void begin(fixture *f, const char *prefix)
{
    memset(f, 0, sizeof *f);
    assert_int_equal(pipe2(f->from, O_NONBLOCK), 0);
    assert_int_equal(pipe2(f->to, O_NONBLOCK), 0);
    f->sink.fd = f->to[1];
    f->stream.fd = f->from[0];
    f->stream.sink = &f->sink;
    f->stream.tail = &f->tail;
    strcpy(f->stream.prefix, prefix);
}

static void end(fixture *f)
{
    if (f->stream.fd >= 0) fsdp__stream_finish(&f->stream);
    fsdp__sink_free(&f->sink);
    if (f->from[1] >= 0) close(f->from[1]);
    if (f->to[0] >= 0) close(f->to[0]);
    close(f->to[1]);
}

static void feed(fixture *f, const char *text)
{
    assert_int_equal(write(f->from[1], text, strlen(text)), strlen(text));
    fsdp__stream_read(&f->stream);
}

static void expect(fixture *f, const char *text)
{
    char got[4096];
    ssize_t n = read(f->to[0], got, sizeof got - 1);
    got[n > 0 ? n : 0] = 0;
    assert_string_equal(got, text);
}

static void test_lines(void **state)
{
    (void)state;
    fixture f;
    begin(&f, "[3] ");
    feed(&f, "one\ntw");
    expect(&f, "[3] one\n");
    feed(&f, "o");
    expect(&f, "");
    feed(&f, "\n\nthree");
    expect(&f, "[3] two\n[3] \n");
    close(f.from[1]);
    f.from[1] = -1;
    fsdp__stream_read(&f.stream);
    expect(&f, "[3] three\n");
    assert_int_equal(f.stream.fd, -1);
    end(&f);
}

static void test_plain_and_finish(void **state)
{
    (void)state;
    fixture f;
    begin(&f, "");
    assert_int_equal(write(f.from[1], "a\nb", 3), 3);
    /* The other end is still open, as a child of the rank may hold it. */
    fsdp__stream_finish(&f.stream);
    expect(&f, "a\nb\n");
    assert_int_equal(f.stream.fd, -1);
    end(&f);
}

static void test_reader_that_does_not_read(void **state)
{
    (void)state;
    fixture f;
    char block[8192];
    size_t sent = 0, got = 0;
    begin(&f, "");
    memset(block, 'x', sizeof block);
    for (size_t i = 63; i < sizeof block; i += 64)
        block[i] = '\n';
    /* Never blocks; becomes full in the end, after which ranks would be left waiting. */
    while (!fsdp__sink_full(&f.sink)) {
        assert_int_equal(write(f.from[1], block, sizeof block), sizeof block);
        fsdp__stream_read(&f.stream);
        sent += sizeof block;
        assert_true(sent < 64u << 20);
    }
    while (got < sent) {
        ssize_t n = read(f.to[0], block, sizeof block);
        assert_true(n > 0);
        for (ssize_t i = 0; i < n; i++)
            assert_true((block[i] == '\n') == ((got + (size_t)i) % 64 == 63));
        got += (size_t)n;
        fsdp__sink_write(&f.sink);
    }
    assert_false(fsdp__sink_busy(&f.sink));
    end(&f);
}

static void test_reader_that_is_gone(void **state)
{
    (void)state;
    fixture f;
    signal(SIGPIPE, SIG_IGN);
    begin(&f, "[0] ");
    close(f.to[0]);
    f.to[0] = -1;
    feed(&f, "lost\n");
    feed(&f, "lost too\n");
    assert_true(f.sink.error != 0);
    assert_false(fsdp__sink_busy(&f.sink));
    /* The last lines are still known. */
    assert_int_equal(f.tail.count, 2);
    end(&f);
}

static void test_tail(void **state)
{
    (void)state;
    fixture f;
    char line[1024];
    begin(&f, "");
    for (int i = 0; i < 25; i++) {
        snprintf(line, sizeof line, "line %d\n", i);
        feed(&f, line);
    }
    memset(line, 'w', sizeof line);
    line[sizeof line - 1] = 0;
    feed(&f, line);
    feed(&f, "\n 10%\r 50%\r100%\r\n");
    assert_int_equal(read(f.to[0], line, sizeof line) > 0, 1);
    while (read(f.to[0], line, sizeof line) > 0)
        continue;
    fsdp__tail_print(&f.tail, &f.sink, "> ");
    char got[8192];
    ssize_t n = read(f.to[0], got, sizeof got - 1);
    assert_true(n > 0);
    got[n] = 0;
    /* Ten in all: eight numbered ones, the long one cut, the bar as it was seen last. */
    assert_non_null(strstr(got, "> line 17\n"));
    assert_null(strstr(got, "> line 16\n"));
    assert_non_null(strstr(got, "\n> 100%\n"));
    char *wide = strstr(got, "> www");
    assert_non_null(wide);
    assert_int_equal(strcspn(wide, "\n"), 2 + FSDP__TAIL_WIDTH - 1);
    end(&f);
}

static void test_tail_of_file(void **state)
{
    (void)state;
    char path[] = "/tmp/fsdp-tail-XXXXXX";
    int fd = mkstemp(path);
    fsdp__tail tail = {.count = 0};
    assert_true(fd >= 0);
    fsdp__tail_read(&tail, path);
    assert_int_equal(tail.count, 0);
    FILE *file = fdopen(fd, "w");
    for (int i = 0; i < 5000; i++)
        fprintf(file, "number %d\n", i);
    fprintf(file, "unfinished");
    fclose(file);
    fsdp__tail_read(&tail, path);
    assert_string_equal(tail.lines[(tail.count - 1) % FSDP__TAIL_LINES], "unfinished");
    assert_string_equal(tail.lines[(tail.count - 2) % FSDP__TAIL_LINES], "number 4999");
    unlink(path);
    fsdp__tail_read(&tail, path); /* not there: what was known stays */
    assert_true(tail.count > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lines),
        cmocka_unit_test(test_plain_and_finish),
        cmocka_unit_test(test_reader_that_does_not_read),
        cmocka_unit_test(test_reader_that_is_gone),
        cmocka_unit_test(test_tail),
        cmocka_unit_test(test_tail_of_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
