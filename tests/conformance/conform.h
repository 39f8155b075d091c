/*
 * conform.h - how a conformance test runs: rows by upstream's names, ranks as threads and as
 * processes, and a record of what ran.
 *
 * A test is a function named as upstream's. It calls conf_ranks for each number of ranks and each
 * case; what it shows is checked by the ranks themselves with CHECK, which counts. The row is
 * recorded when its test has ended well and has checked something: a line "file test checks" in the
 * folder that FSDP_CONFORMANCE names, which conformance_table reads.
 *
 * Ranks as processes: the program starts itself again with the row's name and the number of the call;
 * the child runs the same test up to that call, takes part in it as its rank, and ends.
 */
#ifndef FSDP_TESTS_CONFORMANCE_CONFORM_H
#define FSDP_TESTS_CONFORMANCE_CONFORM_H

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "rows.h"
#include "tensor_check.h"

static atomic_long conf_checks; /* of the row that runs */

/* On any rank, inside a function that returns fsdp_status. */
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (fsdp_error()) return fsdp_error();                                                     \
        conf_checks++;                                                                             \
        if (!(condition))                                                                          \
            return fsdp__fail(FSDP_INTERNAL, "rank %d of %d, %s:%d: %s", fsdp_rank(),              \
                              fsdp_world_size(), __FILE__, __LINE__, #condition);                  \
    } while (0)
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        FSDP_TRY(call);                                                                            \
        if (fsdp_error()) return fsdp_error();                                                     \
    } while (0)

/* ---- ranks -------------------------------------------------------------------------- */

typedef fsdp_status (*conf_rank_fn)(void *arg);

static struct {
    const char *row;      /* that runs */
    int call;             /* of conf_ranks in it, counted */
    const char *as_row;   /* in a child: the row and call in which it is a rank */
    int as_call;
    int pids[8];
} conf;

static inline void conf_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

typedef struct conf_call {
    conf_rank_fn fn;
    void *arg;
} conf_call;

/* Ranks share the machine's cores: one compute thread each. */
static inline fsdp_status conf_one_rank(void *arg)
{
    conf_call *c = arg;
    FSDP_TRY(fsdp_set_threads(1));
    return c->fn(c->arg);
}

/* In a child: runs its rank of that call and ends. */
static inline void conf_be_rank(conf_rank_fn fn, void *arg)
{
    conf_call call = {fn, arg};
    if (fsdp_init(NULL, NULL) == FSDP_OK) (void)conf_one_rank(&call);
    int bad = fsdp_error() != FSDP_OK;
    if (bad) fprintf(stderr, "rank %d: %s\n", fsdp_rank(), fsdp_error_text());
    if (fsdp_finalize()) bad = 1;
    exit(bad);
}

static inline void conf_start_processes(int n)
{
    int fd = memfd_create("fsdp", 0);
    assert_true(fd >= 0);
    char call[16];
    snprintf(call, sizeof call, "%d", conf.call);
    for (int r = 0; r < n; r++) {
        conf.pids[r] = fork();
        if (conf.pids[r] == 0) {
            conf_number("RANK", r);
            conf_number("LOCAL_RANK", r);
            conf_number("WORLD_SIZE", n);
            conf_number("FSDP_SHM_FD", fd);
            execl("/proc/self/exe", "rank", conf.row, call, (char *)NULL);
            _exit(127);
        }
        assert_true(conf.pids[r] > 0);
    }
    int bad = 0;
    for (int r = 0; r < n; r++) {
        int status = 0;
        assert_int_equal(waitpid(conf.pids[r], &status, 0), conf.pids[r]);
        if (!WIFEXITED(status) || WEXITSTATUS(status)) bad++;
    }
    close(fd);
    if (bad) fail_msg("%d of %d processes failed", bad, n);
}

/* fn(arg) on n ranks as threads. */
static inline void conf_ranks(int n, conf_rank_fn fn, void *arg)
{
    conf.call++;
    if (conf.as_row) return;
    conf_call call = {fn, arg};
    if (fsdp_run_threads(n, conf_one_rank, &call) == FSDP_OK) return;
    char text[2048];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    fail_msg("%s on %d ranks: %s", conf.row, n, text);
}

/* The same, and then as n processes. */
static inline void conf_processes(int n, conf_rank_fn fn, void *arg)
{
    conf_ranks(n, fn, arg);
    if (!conf.as_row)
        conf_start_processes(n);
    else if (conf.call == conf.as_call)
        conf_be_rank(fn, arg);
}

/* fn(arg) fails on n ranks with that code and those words. */
static inline void conf_refused(int n, conf_rank_fn fn, void *arg, fsdp_status code,
                                const char *words)
{
    conf.call++;
    if (conf.as_row) return;
    conf_call call = {fn, arg};
    fsdp_run_threads(n, conf_one_rank, &call);
    check_error(code, words);
    conf_checks++;
}

/* An error of that code with those words is kept on this rank; clears it. One rank only: peers are
 * told of an error. */
static inline fsdp_status conf_error(fsdp_status code, const char *words)
{
    fsdp_status s = fsdp_error();
    int right = s == code && strstr(fsdp_error_text(), words);
    char text[2048];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    conf_checks++;
    return right ? FSDP_OK
                 : fsdp__fail(FSDP_INTERNAL, "%s: \"%s\"; expected %s with \"%s\"",
                              fsdp_status_name(s), text, fsdp_status_name(code), words);
}

/* ---- rows --------------------------------------------------------------------------- */

typedef struct conf_test {
    const char *name;
    void (*fn)(void);
    const char *file;
} conf_test;

#define CONF_TEST(fn) {#fn, fn, NULL}
#define CONF_TEST_OF(file, fn) {#fn, fn, #file} /* of another file than conf_main's */

static inline void conf_record(const conf_test *t)
{
    const char *folder = getenv("FSDP_CONFORMANCE");
    if (!folder) return;
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.%s", folder, t->file, t->name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "%s %s %ld\n", t->file, t->name, atomic_load(&conf_checks));
    assert_int_equal(fclose(f), 0);
}

static inline void conf_run(void **state)
{
    const conf_test *t = *state;
    int row = conf_find(t->file, t->name);
    if (row < 0) fail_msg("rows.def has no row %s of file %s", t->name, t->file);
    if (!conf_must_run(conf_rows[row].ours))
        fail_msg("rows.def says of %s: %s", t->name, conf_ours_text(conf_rows[row].ours));
    conf.row = t->name;
    conf.call = 0;
    conf_checks = 0;
    t->fn();
    if (conf_checks == 0) fail_msg("%s checked nothing", t->name);
    conf_record(t);
}

enum { CONF_TESTS_MAX = 64 };

/* Runs the n tests of upstream's file `file`: main of a test's program. */
static inline int conf_main(const char *file, conf_test *tests, int n, int argc, char **argv)
{
    struct CMUnitTest list[CONF_TESTS_MAX];
    if (argc > 2) { /* a rank of one call */
        conf.as_row = conf.row = argv[1];
        conf.as_call = atoi(argv[2]);
        for (int i = 0; i < n; i++)
            if (!strcmp(tests[i].name, argv[1])) tests[i].fn();
        fprintf(stderr, "no call %s of %s\n", argv[2], argv[1]);
        return 2;
    }
    for (int i = 0; i < n && i < CONF_TESTS_MAX; i++) {
        if (argc == 2 && strcmp(argv[1], tests[i].name)) continue;
        if (!tests[i].file) tests[i].file = file;
        list[i] = (struct CMUnitTest){tests[i].name, conf_run, NULL, NULL, &tests[i]};
        if (argc == 2) return _cmocka_run_group_tests(tests[i].name, list + i, 1, NULL, NULL);
    }
    return _cmocka_run_group_tests(file, list, (size_t)n, NULL, NULL);
}

#endif
