/* fsdp__launch from within a process: what it refuses, and that it leaves nothing behind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "launch/launch.h"

static int open_files(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* Runs words on n ranks with the output of both kinds in text. */
static fsdp_status run(int n, char *const *words, char *text, size_t size, int *code)
{
    fsdp__launch_options o = fsdp__launch_defaults();
    FILE *f = tmpfile();
    assert_non_null(f);
    o.ranks = n;
    o.argv = words;
    o.quiet = true;
    o.out_fd = o.err_fd = fileno(f);
    *code = -1;
    fsdp_status s = fsdp__launch(&o, code);
    rewind(f);
    text[fread(text, 1, size - 1, f)] = 0;
    fclose(f);
    return s;
}

static char sh[] = "sh", dash_c[] = "-c";

static void test_runs_and_leaves_nothing(void **state)
{
    (void)state;
    char text[4096], script[] = "echo rank $RANK", bad[] = "echo bye >&2; exit 5";
    char *words[] = {sh, dash_c, script, NULL}, *bad_words[] = {sh, dash_c, bad, NULL};
    sigset_t before, after;
    struct sigaction pipe_before, pipe_after;
    int code, files = open_files();
    sigprocmask(SIG_SETMASK, NULL, &before);
    sigaction(SIGPIPE, NULL, &pipe_before);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(run(1, words, text, sizeof text, &code), FSDP_OK);
        assert_int_equal(code, 0);
        assert_string_equal(text, "[0] rank 0\n");
        assert_int_equal(run(2, bad_words, text, sizeof text, &code), FSDP_OK);
        assert_int_equal(code, 5);
        assert_non_null(strstr(text, "failed first: ended with exit code 5"));
        assert_non_null(strstr(text, "  | bye\n"));
    }
    sigprocmask(SIG_SETMASK, NULL, &after);
    sigaction(SIGPIPE, NULL, &pipe_after);
    for (int sig = 1; sig < 32; sig++)
        assert_int_equal(sigismember(&before, sig), sigismember(&after, sig));
    assert_true(pipe_before.sa_handler == pipe_after.sa_handler);
    assert_int_equal(open_files(), files);
    /* No child is left, not even a zombie. */
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

static void test_ignored_child_signal(void **state)
{
    (void)state;
    char text[1024], script[] = "exit 6", *words[] = {sh, dash_c, script, NULL};
    int code;
    signal(SIGCHLD, SIG_IGN);
    assert_int_equal(run(2, words, text, sizeof text, &code), FSDP_OK);
    assert_int_equal(code, 6);
    signal(SIGCHLD, SIG_DFL);
}

static void test_many_ranks(void **state)
{
    (void)state;
    char text[65536], script[] = "echo $WORLD_SIZE", *words[] = {sh, dash_c, script, NULL};
    int code, lines = 0;
    assert_int_equal(run(37, words, text, sizeof text, &code), FSDP_OK);
    assert_int_equal(code, 0);
    for (char *p = text; (p = strstr(p, "] 37\n")); p++)
        lines++;
    assert_int_equal(lines, 37);
}

static void refused(const fsdp__launch_options *o, fsdp_status status, const char *words)
{
    int code = -1, files = open_files();
    assert_int_equal(fsdp__launch(o, &code), status);
    assert_int_equal(fsdp_error(), status);
    if (!strstr(fsdp_error_text(), words)) fail_msg("'%s' lacks '%s'", fsdp_error_text(), words);
    assert_int_equal(code, -1);
    assert_int_equal(open_files(), files);
    fsdp_error_clear();
}

static void test_refusals(void **state)
{
    (void)state;
    char name[] = "true", missing[] = "/no/such/program", folder[] = "/tmp", empty[] = "";
    char *words[] = {name, NULL}, *none[] = {NULL}, *lost[] = {missing, NULL};
    char *dir[] = {folder, NULL}, *nothing[] = {empty, NULL};
    fsdp__launch_options o = fsdp__launch_defaults();
    o.quiet = true;
    o.argv = words;
    const int ranks[] = {0, -3, FSDP__LAUNCH_MAX_RANKS + 1};
    for (size_t i = 0; i < 3; i++) {
        o.ranks = ranks[i];
        refused(&o, FSDP_INVALID_ARGUMENT, "expected 1 to 256");
    }
    o.ranks = 2;
    o.threads = -1;
    refused(&o, FSDP_INVALID_ARGUMENT, "threads a rank");
    o.threads = 0;
    o.grace = -1;
    refused(&o, FSDP_INVALID_ARGUMENT, "grace");
    o.grace = 1;
    o.argv = none;
    refused(&o, FSDP_INVALID_ARGUMENT, "no program");
    o.argv = nothing;
    refused(&o, FSDP_NOT_FOUND, "no program ''");
    o.argv = lost;
    refused(&o, FSDP_NOT_FOUND, "No such file");
    o.argv = dir;
    refused(&o, FSDP_NOT_FOUND, "is a folder");
    o.argv = words;
    o.log_dir = "/dev/null/logs";
    refused(&o, FSDP_IO_ERROR, "cannot make the log folder");
    o.log_dir = "/dev/null";
    refused(&o, FSDP_IO_ERROR, "is not a folder");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs_and_leaves_nothing),
        cmocka_unit_test(test_ignored_child_signal),
        cmocka_unit_test(test_many_ranks),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
