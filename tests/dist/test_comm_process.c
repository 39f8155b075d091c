/*
 * test_comm_process.c - ranks as processes: the test starts itself again with a memfd, as the
 * launcher does, and each rank's exit code says what it saw.
 */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/thread.h"
#include "comm/comm.h"

enum { MOST = 8 };

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition))                                                                   \
            return fsdp__fail(FSDP_INTERNAL, "rank %d, line %d: %s", fsdp_rank(), __LINE__, \
                              #condition);                                                  \
    } while (0)

/* ---- what a rank does ------------------------------------------------------------------ */

static float *own_memory(int64_t n)
{
    fsdp__allocator *a = fsdp__comm_allocator(fsdp_group_world());
    return a->alloc(a, (size_t)n * sizeof(float), "test");
}

/* Gathers, shared and private, and reductions, over and over in the same memory. */
static fsdp_status all_lists(void)
{
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g), me = fsdp_group_rank(g);
    const int64_t dim = 10, inner = 7, chunk = (dim + n - 1) / n;
    float *shard = own_memory(chunk * inner), *full = own_memory(dim * inner);
    float *grad = own_memory(dim * inner);
    EXPECT(shard && full && grad);
    for (int step = 0; step < 50; step++) {
        int64_t begin = me * chunk < dim ? me * chunk : dim;
        int64_t rows = (begin + chunk < dim ? begin + chunk : dim) - begin;
        for (int64_t i = 0; i < rows * inner; i++)
            shard[i] = (float)(step * 1000 + (int)(begin * inner + i));
        fsdp_shared copy;
        FSDP_TRY(fsdp_shared_take(g, dim * inner * 2, "copy", &copy));
        fsdp_list_entry e = {1, dim, inner, chunk, shard, FSDP_F32, copy.rw, FSDP_BF16, 1};
        fsdp_work *a, *b;
        FSDP_TRY(fsdp_all_gather_list(g, FSDP_LANE_GATHER, "block", &e, 1, &copy, &a));
        e.full = full;
        e.full_dtype = FSDP_F32;
        FSDP_TRY(fsdp_all_gather_list(g, FSDP_LANE_GATHER, "whole", &e, 1, NULL, &b));
        FSDP_TRY(fsdp_work_wait(a));
        FSDP_TRY(fsdp_work_wait(b));
        for (int64_t i = 0; i < dim * inner; i++) {
            float want = (float)(step * 1000 + (int)i);
            EXPECT(full[i] == want);
            EXPECT(((const uint16_t *)copy.ro)[i] == fsdp__f32_to_bf16(want));
            grad[i] = (float)(me + 1) * (float)i;
        }
        fsdp_shared_give(g, &copy);
        e.full = grad;
        FSDP_TRY(fsdp_reduce_scatter_list(g, FSDP_LANE_REDUCE, "block", &e, 1, 0.5f, 0, &a));
        FSDP_TRY(fsdp_work_wait_buffers(a));
        FSDP_TRY(fsdp_work_wait(a));
        for (int64_t i = 0; i < rows * inner; i++)
            EXPECT(shard[i] == 0.5f * (float)(n * (n + 1) / 2) * (float)(begin * inner + i));
    }
    return FSDP_OK;
}

static fsdp_status sums(int rounds)
{
    for (int i = 0; i < rounds; i++) {
        int64_t x = i + fsdp_rank(), n = fsdp_world_size();
        FSDP_TRY(fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, &x, 1, FSDP_I64, FSDP_SUM,
                                 NULL));
        EXPECT(x == i * n + n * (n - 1) / 2);
    }
    return FSDP_OK;
}

static fsdp_status scenario(const char *what)
{
    fsdp_group *g = fsdp_group_world();
    int me = fsdp_rank();
    if (!strcmp(what, "lists")) {
        FSDP_TRY(all_lists());
        return sums(200);
    }
    if (!strcmp(what, "again")) {
        /* init after finalize works, and finds nothing of the world before */
        for (int i = 0; i < 3; i++) {
            FSDP_TRY(all_lists());
            if (fsdp_finalize()) return fsdp_error();
            EXPECT(fsdp_world_size() == 1);
            FSDP_TRY(fsdp_init(NULL, NULL));
        }
        return all_lists();
    }
    if (!strcmp(what, "kill")) {
        FSDP_TRY(sums(20));
        if (me == 1) kill(getpid(), SIGKILL);
        return sums(1000);
    }
    if (!strcmp(what, "mismatch")) {
        FSDP_TRY(sums(3));
        double x = 1;
        if (me == 1) return fsdp_all_reduce(g, FSDP_LANE_CONTROL, &x, 1, FSDP_F64, FSDP_MAX, NULL);
        return fsdp_all_reduce(g, FSDP_LANE_CONTROL, &x, 1, FSDP_F64, FSDP_SUM, NULL);
    }
    if (!strcmp(what, "error")) {
        FSDP_TRY(sums(3));
        if (me == 1) return fsdp__fail(FSDP_NO_MEMORY, "no room for block 3");
        return sums(1000);
    }
    if (!strcmp(what, "missing")) {
        fsdp_group_set_timeout(g, 0.3);
        FSDP_TRY(sums(2));
        /* Rank 1 does something else, until its peers give up. */
        if (me != 1) return fsdp_barrier(g, FSDP_LANE_REDUCE);
        fsdp_group_set_timeout(g, 60);
        return fsdp_barrier(g, FSDP_LANE_GATHER);
    }
    return fsdp__fail(FSDP_INTERNAL, "unknown scenario %s", what);
}

static int rank_main(const char *what)
{
    (void)fsdp_init(NULL, NULL);
    (void)(fsdp_error() == FSDP_OK && scenario(what));
    const char *file = getenv("TEST_TEXT");
    FILE *f = file ? fopen(file, "w") : NULL;
    if (f) {
        fprintf(f, "%s", fsdp_error_text());
        fclose(f);
    }
    fsdp_status s = fsdp_error();
    if (fsdp_finalize() && s == FSDP_OK) return 99;
    return (int)s;
}

/* ---- starting ranks --------------------------------------------------------------------- */

typedef struct result {
    int status[MOST]; /* as waitpid gives it */
    char text[MOST][2048];
    double seconds;
} result;

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

/* with_fd 0: as torchrun would start it, without shared memory. */
static void start(int n, const char *what, int with_fd, result *out)
{
    pid_t pids[MOST];
    char files[MOST][64];
    int fd = memfd_create("fsdp", 0);
    assert_true(fd >= 0);
    double begin = fsdp__now();
    for (int r = 0; r < n; r++) {
        strcpy(files[r], "/tmp/fsdp_test_XXXXXX");
        int f = mkstemp(files[r]);
        assert_true(f >= 0);
        close(f);
        pids[r] = fork();
        if (pids[r] == 0) {
            set_number("RANK", r);
            set_number("LOCAL_RANK", r);
            set_number("WORLD_SIZE", n);
            if (with_fd) set_number("FSDP_SHM_FD", fd);
            setenv("TEST_TEXT", files[r], 1);
            execl("/proc/self/exe", "rank", what, (char *)NULL);
            _exit(127);
        }
        assert_true(pids[r] > 0);
    }
    for (int r = 0; r < n; r++) {
        assert_int_equal(waitpid(pids[r], &out->status[r], 0), pids[r]);
        FILE *f = fopen(files[r], "r");
        assert_non_null(f);
        size_t got = fread(out->text[r], 1, sizeof out->text[r] - 1, f);
        out->text[r][got] = 0;
        fclose(f);
        unlink(files[r]);
    }
    out->seconds = fsdp__now() - begin;
    close(fd);
}

static void expect_exit(const result *r, int rank, fsdp_status s, const char *words)
{
    if (!WIFEXITED(r->status[rank]) || WEXITSTATUS(r->status[rank]) != (int)s ||
        !strstr(r->text[rank], words))
        fail_msg("rank %d: status %#x, expected exit %d: %s", rank, (unsigned)r->status[rank],
                 (int)s, r->text[rank]);
}

static void test_lists(void **state)
{
    (void)state;
    result r;
    static const int sizes[] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) {
        start(sizes[i], "lists", 1, &r);
        for (int k = 0; k < sizes[i]; k++)
            expect_exit(&r, k, FSDP_OK, "");
    }
}

static void test_again(void **state)
{
    (void)state;
    result r;
    start(2, "again", 1, &r);
    expect_exit(&r, 0, FSDP_OK, "");
    expect_exit(&r, 1, FSDP_OK, "");
}

static void test_kill(void **state)
{
    (void)state;
    result r;
    for (int n = 2; n <= 4; n += 2) {
        start(n, "kill", 1, &r);
        assert_true(WIFSIGNALED(r.status[1]));
        for (int k = 0; k < n; k++)
            if (k != 1) expect_exit(&r, k, FSDP_PEER_DIED, "rank 1 ");
        assert_true(r.seconds < 60); /* and not the 300 s of a timeout */
    }
}

static void test_mismatch(void **state)
{
    (void)state;
    result r;
    start(4, "mismatch", 1, &r);
    for (int k = 0; k < 4; k++)
        expect_exit(&r, k, FSDP_MISMATCH, "reduce operation");
    for (int k = 0; k < 4; k++) {
        assert_non_null(strstr(r.text[k], "rank 1 has"));
        assert_non_null(strstr(r.text[k], "all_reduce"));
    }
}

static void test_error(void **state)
{
    (void)state;
    result r;
    start(4, "error", 1, &r);
    expect_exit(&r, 1, FSDP_NO_MEMORY, "no room for block 3");
    for (int k = 0; k < 4; k++)
        if (k != 1) expect_exit(&r, k, FSDP_PEER_FAILED, "rank 1 reported: no room for block 3");
}

static void test_missing(void **state)
{
    (void)state;
    result r;
    start(2, "missing", 1, &r);
    expect_exit(&r, 0, FSDP_TIMEOUT, "rank 1 (host ");
    assert_non_null(strstr(r.text[0], "barrier"));
    assert_non_null(strstr(r.text[0], "lane gather"));
    expect_exit(&r, 1, FSDP_TIMEOUT, "rank 0 reported");
}

static void test_no_segment(void **state)
{
    (void)state;
    result r;
    unsetenv("FSDP_SHM_FD");
    start(2, "lists", 0, &r);
    expect_exit(&r, 0, FSDP_INVALID_CONFIG, "fsdp run -n 2");
    expect_exit(&r, 1, FSDP_INVALID_CONFIG, "fsdp run -n 2");
}

int main(int argc, char **argv)
{
    if (argc > 1) return rank_main(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),      cmocka_unit_test(test_again),
        cmocka_unit_test(test_kill),       cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_error),      cmocka_unit_test(test_missing),
        cmocka_unit_test(test_no_segment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
