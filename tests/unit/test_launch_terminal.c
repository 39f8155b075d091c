/* A job on a terminal: rank 0 sees it, Ctrl-C ends the job, a rank that reads it gets it. Each test
 * plays the person at a pseudo-terminal whose session is a process that launches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <errno.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/launch.h"

typedef struct session {
    pid_t pid;
    int terminal;
    char seen[16384]; /* all that the terminal showed */
    size_t len;
} session;

static void begin(session *s, const char *script)
{
    memset(s, 0, sizeof *s);
    s->pid = forkpty(&s->terminal, NULL, NULL, NULL);
    assert_true(s->pid >= 0);
    if (s->pid > 0) return;
    char sh[] = "sh", dash_c[] = "-c", *words[] = {sh, dash_c, strdup(script), NULL};
    fsdp__launch_options o = fsdp__launch_defaults();
    int code = 99;
    o.ranks = 2;
    o.argv = words;
    o.rank0_plain = true;
    fsdp_status status = fsdp__launch(&o, &code);
    free(words[2]);
    _exit(status == FSDP_OK ? code : 98);
}

/* Reads the terminal until the text was seen, or nobody is there any more. */
static bool wait_for(session *s, const char *text)
{
    while (!strstr(s->seen, text)) {
        struct pollfd p = {s->terminal, POLLIN, 0};
        if (poll(&p, 1, 60000) <= 0) return false;
        ssize_t n = read(s->terminal, s->seen + s->len, sizeof s->seen - 1 - s->len);
        if (n <= 0) return false;
        s->len += (size_t)n;
    }
    return true;
}

static int end(session *s)
{
    int status = 0;
    (void)wait_for(s, "\001 never shown");
    assert_int_equal(waitpid(s->pid, &status, 0), s->pid);
    close(s->terminal);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void type(session *s, const char *text)
{
    assert_int_equal(write(s->terminal, text, strlen(text)), strlen(text));
}

static void test_rank_0_sees_the_terminal(void **state)
{
    (void)state;
    session s;
    begin(&s, "[ -t 1 ] && echo rank $RANK has one || echo rank $RANK has none");
    assert_int_equal(end(&s), 0);
    assert_non_null(strstr(s.seen, "rank 0 has one"));
    assert_null(strstr(s.seen, "[0]"));
    assert_non_null(strstr(s.seen, "[1] rank 1 has none"));
}

static void test_ctrl_c(void **state)
{
    (void)state;
    session s;
    /* Asked once each: the terminal itself must not reach rank 0 a second time. */
    begin(&s, "trap 'echo rank $RANK asked; exit 0' INT; echo up $RANK; "
              "while :; do sleep 0.05; done");
    assert_true(wait_for(&s, "up 0") && wait_for(&s, "up 1"));
    type(&s, "\003");
    assert_int_equal(end(&s), 130);
    for (int r = 0; r < 2; r++) {
        char line[32];
        snprintf(line, sizeof line, "rank %d asked", r);
        char *first = strstr(s.seen, line);
        assert_non_null(first);
        assert_null(strstr(first + 1, line));
    }
}

static void test_rank_0_reads_the_terminal(void **state)
{
    (void)state;
    session s;
    begin(&s, "echo up $RANK; if read line; then echo \"rank $RANK got <$line>\"; fi");
    assert_true(wait_for(&s, "up 0"));
    type(&s, "hello\n");
    assert_int_equal(end(&s), 0);
    assert_non_null(strstr(s.seen, "rank 0 got <hello>"));
    assert_null(strstr(s.seen, "rank 1 got"));
}

static void test_ctrl_c_while_rank_0_reads(void **state)
{
    (void)state;
    session s;
    begin(&s, "echo up $RANK; if [ $RANK = 0 ]; then read a; echo got $a; exec cat; fi; sleep 600");
    assert_true(wait_for(&s, "up 0") && wait_for(&s, "up 1"));
    type(&s, "one\n");
    assert_true(wait_for(&s, "got one"));
    /* Rank 0 has the terminal now, so that this reaches it and not the launcher. */
    type(&s, "\003");
    assert_int_equal(end(&s), 130);
    assert_null(strstr(s.seen, "failed first"));
}

static void test_terminal_goes_away(void **state)
{
    (void)state;
    session s;
    int status;
    begin(&s, "echo up $RANK; exec sleep 600");
    assert_true(wait_for(&s, "up 0") && wait_for(&s, "up 1"));
    close(s.terminal);
    assert_int_equal(waitpid(s.pid, &status, 0), s.pid);
    assert_int_equal(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 128 + SIGHUP);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rank_0_sees_the_terminal),
        cmocka_unit_test(test_ctrl_c),
        cmocka_unit_test(test_rank_0_reads_the_terminal),
        cmocka_unit_test(test_ctrl_c_while_rank_0_reads),
        cmocka_unit_test(test_terminal_goes_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
