/* Options of ranks, this program as ranks, signals as a flag. As a rank it is its own program: it
 * prints what it was given (main, below). */
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
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/signals.h"
#include "launch/launch.h"

/* Splits a line at its blanks into argv. */
static int split(char *line, char **argv)
{
    int n = 0;
    for (char *p = strtok(line, " "); p; p = strtok(NULL, " "))
        argv[n++] = p;
    argv[n] = NULL;
    return n;
}

/* Takes the options out of the line; kept is what is left. */
static int take(const char *line, bool stop, fsdp__cli_ranks *r, char *kept)
{
    char copy[256], *argv[32];
    snprintf(copy, sizeof copy, "%s", line);
    int n = split(copy, argv), code = fsdp__cli_take_ranks(&n, argv, stop, r);
    kept[0] = 0;
    for (int i = 0; code == 0 && argv[i]; i++) {
        if (i) strcat(kept, " ");
        strcat(kept, argv[i]);
    }
    /* Not on this stack any more; presence is what the tests look at. */
    static char given[] = "given";
    r->log_dir = r->log_dir ? given : NULL;
    return code;
}

static void test_options(void **state)
{
    (void)state;
    char kept[256];
    fsdp__cli_ranks r;
    assert_int_equal(take("train -n 4 a.yaml --training.steps 3", false, &r, kept), 0);
    assert_string_equal(kept, "train a.yaml --training.steps 3");
    assert_int_equal(r.n, 4);
    assert_int_equal(r.threads, 0);
    assert_true(r.grace == 5);
    assert_null(r.log_dir);
    assert_int_equal(take("train a -n2 b --threads=3 --log-dir d --grace=0.5", false, &r, kept), 0);
    assert_string_equal(kept, "train a b");
    assert_int_equal(r.n, 2);
    assert_int_equal(r.threads, 3);
    assert_true(r.grace == 0.5);
    assert_non_null(r.log_dir);
    /* What only begins like ours is not ours. */
    assert_int_equal(take("train --threads_x 3 -no --name", false, &r, kept), 0);
    assert_string_equal(kept, "train --threads_x 3 -no --name");
    assert_int_equal(r.n, 0);
    assert_int_equal(take("run -n 2 prog -n 3 --grace", true, &r, kept), 0);
    assert_string_equal(kept, "run prog -n 3 --grace");
    assert_int_equal(r.n, 2);
    assert_int_equal(take("run -n 2 -- -n 3", true, &r, kept), 0);
    assert_string_equal(kept, "run -n 3");
    assert_int_equal(take("train -- -n 3", false, &r, kept), 0);
    assert_string_equal(kept, "train -- -n 3");
    assert_int_equal(take("train", false, &r, kept), 0);
    assert_string_equal(kept, "train");
}

static void test_wrong_values(void **state)
{
    (void)state;
    const char *lines[] = {"t -n",          "t -n 0",         "t -n 257",        "t -n 2x",
                           "t -n=",         "t --threads 0",  "t --threads 1e9", "t --grace -1",
                           "t --grace nan", "t --grace soon", "t --log-dir",     "t --log-dir="};
    char kept[256];
    fsdp__cli_ranks r;
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        assert_int_equal(take(lines[i], false, &r, kept), 2);
}

static void test_exit_codes(void **state)
{
    (void)state;
    assert_int_equal(fsdp__cli_exit_code(FSDP_OK), 0);
    assert_int_equal(fsdp__cli_exit_code(FSDP_PEER_DIED), FSDP__EXIT_PEER);
    assert_int_equal(fsdp__cli_exit_code(FSDP_PEER_FAILED), FSDP__EXIT_PEER);
    assert_int_equal(fsdp__cli_exit_code(FSDP_INTERRUPTED), 130);
    assert_int_equal(fsdp__cli_exit_code(FSDP_NO_MEMORY), 1);
    assert_int_equal(fsdp__cli_report("test"), 0);
    fsdp__fail(FSDP_PEER_DIED, "rank 1 is gone");
    assert_int_equal(fsdp__cli_report("test"), FSDP__EXIT_PEER);
    fsdp_error_clear();
}

/* Launches this program with the words and gives what its ranks printed. */
static int relaunch(const char *line, int n, bool *launched, char *text, size_t size)
{
    char copy[256], *argv[32];
    fsdp__cli_ranks r = {.n = n, .threads = 1, .grace = 5};
    FILE *f = tmpfile();
    int old = dup(1), code = -1;
    snprintf(copy, sizeof copy, "%s", line);
    int argc = split(copy, argv);
    assert_non_null(f);
    fflush(stdout);
    dup2(fileno(f), 1);
    *launched = fsdp__cli_relaunch(argc, argv, &r, &code);
    dup2(old, 1);
    close(old);
    rewind(f);
    text[fread(text, 1, size - 1, f)] = 0;
    fclose(f);
    return code;
}

static void test_relaunch(void **state)
{
    (void)state;
    bool launched;
    char text[4096];
    assert_int_equal(relaunch("train a --b", 2, &launched, text, sizeof text), 0);
    assert_true(launched);
    /* Rank 0 has no prefix. */
    assert_true(strncmp(text, "0 of 2: fsdp train a --b\n", 25) == 0 ||
                strstr(text, "\n0 of 2: fsdp train a --b\n"));
    assert_non_null(strstr(text, "[1] 1 of 2: fsdp train a --b\n"));
    assert_int_equal(relaunch("train fail", 3, &launched, text, sizeof text), 9);
    assert_true(launched);
    relaunch("train a", 1, &launched, text, sizeof text);
    assert_false(launched);
    relaunch("train a", 0, &launched, text, sizeof text);
    assert_false(launched);
    setenv("RANK", "0", 1);
    setenv("WORLD_SIZE", "4", 1);
    relaunch("train a", 4, &launched, text, sizeof text);
    assert_false(launched);
    relaunch("train a", 0, &launched, text, sizeof text);
    assert_false(launched);
    /* -n 2 in a job of 4 is a mistake. */
    assert_int_equal(relaunch("train a", 2, &launched, text, sizeof text), 2);
    assert_true(launched);
    unsetenv("WORLD_SIZE");
    unsetenv("RANK");
}

static void test_threads(void **state)
{
    (void)state;
    fsdp__cli_ranks r = {.threads = 3};
    assert_int_equal(fsdp__cli_threads(&r), 3);
    r.threads = 0;
    unsetenv("OMP_NUM_THREADS");
    assert_int_equal(fsdp__cli_threads(&r), fsdp__launch_cores());
    setenv("OMP_NUM_THREADS", "2", 1);
    assert_int_equal(fsdp__cli_threads(&r), 0);
    unsetenv("OMP_NUM_THREADS");
}

static void test_signals(void **state)
{
    (void)state;
    const int signals[] = {SIGINT, SIGTERM};
    for (int i = 0; i < 2; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            fsdp__signals_install();
            if (fsdp__signals_stop() != 0) _exit(1);
            raise(signals[i]);
            if (fsdp__signals_stop() != signals[i]) _exit(2);
            raise(SIGTERM); /* asked twice: this ends it */
            _exit(3);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status));
        assert_int_equal(WTERMSIG(status), SIGTERM);
    }
    assert_int_equal(fsdp__signals_stop(), 0);
}

int main(int argc, char **argv)
{
    const char *rank = getenv("RANK");
    if (rank && argc > 1 && strcmp(argv[1], "train") == 0) {
        printf("%s of %s:", rank, getenv("WORLD_SIZE"));
        for (int i = 0; i < argc; i++)
            printf(" %s", argv[i]);
        printf("\n");
        return strcmp(argv[argc - 1], "fail") == 0 ? 9 : 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),    cmocka_unit_test(test_wrong_values),
        cmocka_unit_test(test_exit_codes), cmocka_unit_test(test_relaunch),
        cmocka_unit_test(test_threads),    cmocka_unit_test(test_signals),
    };
    unsetenv("RANK");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
