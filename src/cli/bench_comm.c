/*
 * bench_comm.c - `fsdp bench comm`: the collectives of training against memcpy
 * of the same bytes by all ranks at once, in turn.
 *
 * Sizes are bytes S of one rank's shard; a whole is N * S. "Same bytes" are
 * those that a rank has to read and write: S and S for a gather into the copy
 * that the host shares, N * S for one into private copies; N * S read and S
 * written by a reduce-scatter, which is held against a sum of N arrays of its
 * own too; an all-reduce of S is held against memcpy(S). "aim" is a ratio that
 * measurements of such loops on one host found to be within reach.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/convert.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "comm/comm.h"

enum { MOST_RANKS = 64, BARRIERS = 200 };

static const int64_t sizes[] = {64 << 10, 1 << 20, 16 << 20, 64 << 20};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

typedef struct env {
    int N;
    int64_t bytes;        /* S */
    float *shard, *whole; /* S and N * S, in memory that peers may read */
    char *own;            /* private: N * S to copy and to sum from, N * S to write */
    int repeat;           /* of one timed run */
} env;

static fsdp_list_entry entry_of(const env *e, void *shard, void *full)
{
    int64_t n = e->bytes / 4;
    return (fsdp_list_entry){.outer = 1,
                             .dim = n * e->N,
                             .inner = 1,
                             .chunk = n,
                             .shard = shard,
                             .shard_dtype = FSDP_F32,
                             .full = full,
                             .full_dtype = FSDP_F32,
                             .present = 1};
}

/* ---- what is measured --------------------------------------------------------------- */

static fsdp_status gather_shared(void *arg)
{
    env *e = arg;
    for (int i = 0; i < e->repeat; i++) {
        fsdp_shared range;
        fsdp_work *w = NULL;
        FSDP_TRY(fsdp_shared_take(fsdp_group_world(), e->bytes * e->N, "gathered copy", &range));
        fsdp_list_entry x = entry_of(e, e->shard, range.rw);
        fsdp_status s =
            fsdp_all_gather_list(fsdp_group_world(), FSDP_LANE_GATHER, "bench", &x, 1, &range, &w);
        if (s == FSDP_OK) s = fsdp_work_wait(w);
        fsdp_shared_give(fsdp_group_world(), &range);
        if (s != FSDP_OK) return s;
    }
    return FSDP_OK;
}

static fsdp_status gather_private(void *arg)
{
    env *e = arg;
    for (int i = 0; i < e->repeat; i++) {
        fsdp_work *w = NULL;
        fsdp_list_entry x = entry_of(e, e->shard, e->own);
        FSDP_TRY(
            fsdp_all_gather_list(fsdp_group_world(), FSDP_LANE_GATHER, "bench", &x, 1, NULL, &w));
        FSDP_TRY(fsdp_work_wait(w));
    }
    return FSDP_OK;
}

static fsdp_status reduce_scatter(void *arg)
{
    env *e = arg;
    for (int i = 0; i < e->repeat; i++) {
        fsdp_work *w = NULL;
        fsdp_list_entry x = entry_of(e, e->shard, e->whole);
        FSDP_TRY(fsdp_reduce_scatter_list(fsdp_group_world(), FSDP_LANE_REDUCE, "bench", &x, 1,
                                          1.0f, 0, &w));
        FSDP_TRY(fsdp_work_wait(w));
    }
    return FSDP_OK;
}

/* Of S bytes in place, cut over the ranks. */
static fsdp_status all_reduce(void *arg)
{
    env *e = arg;
    for (int i = 0; i < e->repeat; i++) {
        fsdp_work *w = NULL;
        int64_t n = e->bytes / 4;
        fsdp_list_entry x = entry_of(e, NULL, e->whole);
        x.dim = n;
        x.chunk = (n + e->N - 1) / e->N;
        FSDP_TRY(fsdp_all_reduce_list(fsdp_group_world(), FSDP_LANE_REPLICATE, "bench", &x, 1, 1.0f,
                                      &w));
        FSDP_TRY(fsdp_work_wait(w));
    }
    return FSDP_OK;
}

static fsdp_status barriers(void *arg)
{
    (void)arg;
    for (int i = 0; i < BARRIERS; i++)
        FSDP_TRY(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL));
    return FSDP_OK;
}

typedef struct reference {
    env *e;
    double bytes; /* to copy: half of those read plus written */
} reference;

static fsdp_status copy_same(void *arg)
{
    const reference *r = arg;
    const env *e = r->e;
    fsdp__bench_copy c = {e->own + e->bytes * e->N, e->own, (size_t)r->bytes};
    for (int i = 0; i < e->repeat; i++)
        FSDP_TRY(fsdp__bench_copy_run(&c));
    return FSDP_OK;
}

static fsdp_status sum_own(void *arg)
{
    const env *e = ((const reference *)arg)->e;
    const void *from[MOST_RANKS];
    for (int r = 0; r < e->N; r++)
        from[r] = e->own + e->bytes * r;
    for (int i = 0; i < e->repeat; i++)
        fsdp__sum_tree(e->own + e->bytes * e->N, FSDP_F32, from, FSDP_F32, e->N,
                       (size_t)e->bytes / 4, 1.0f, 0);
    return FSDP_OK;
}

/* ---- the table ------------------------------------------------------------------------- */

typedef struct collective {
    const char *name;
    fsdp_status (*run)(void *env);
    bool sums; /* aim is against sum_own, not copy_same */
    double aim[SIZES];
} collective;

static const collective collectives[] = {
    {"all_gather shared", gather_shared, false, {0.65, 0.85, 0.90, 0.90}},
    {"all_gather private", gather_private, false, {0.65, 0.85, 0.90, 0.90}},
    {"reduce_scatter", reduce_scatter, true, {0.40, 0.70, 0.85, 0.85}},
    {"all_reduce", all_reduce, false, {0.25, 0.50, 0.75, 0.75}},
};

static fsdp_status measure(const collective *c, env *e, int size, int repeats)
{
    double S = (double)e->bytes;
    bool shared = c->run == gather_shared, one = c->run == all_reduce;
    reference r = {e, c->sums ? S * (e->N + 1) / 2 : shared || one ? S : S * e->N};
    fsdp__bench_work w[3] = {{c->run, e, {0, 0}}, {copy_same, &r, {0, 0}}, {sum_own, &r, {0, 0}}};
    FSDP_TRY(fsdp__bench_turns(repeats, c->sums ? 3 : 2, w));
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(fsdp__bench_max(&w[i].time.median));
        w[i].time.median /= e->repeat;
    }
    if (fsdp_rank() != 0) return FSDP_OK;
    double t = w[0].time.median, copy = w[1].time.median / t, sum = w[2].time.median / t;
    printf("%-19s %7.2f MiB %10.1f %8.2f %8.2f ", c->name, S / (1 << 20), 1e6 * t,
           2e-9 * r.bytes / t, copy);
    if (c->sums)
        printf("%8.2f", sum);
    else
        printf("%8s", "-");
    double reached = c->sums ? sum : copy;
    printf(" %6.2f  %s\n", c->aim[size], reached >= c->aim[size] ? "reached" : "below");
    fflush(stdout);
    return FSDP_OK;
}

static fsdp_status measure_barrier(int repeats)
{
    int N = fsdp_world_size();
    fsdp__bench_time t;
    FSDP_TRY(fsdp__bench_run(repeats, barriers, NULL, &t));
    FSDP_TRY(fsdp__bench_max(&t.median));
    if (fsdp_rank() != 0) return FSDP_OK;
    double us = 1e6 * t.median / BARRIERS, aim = N <= 2 ? 1 : N <= 4 ? 5 : 20;
    printf("%-19s %11s %10.2f %8s %8s %8s %6.0f  %s\n", "barrier", "", us, "", "", "", aim,
           N > 8       ? "no aim"
           : us <= aim ? "reached"
                       : "below");
    return FSDP_OK;
}

/* ---- the run ------------------------------------------------------------------------------ */

static fsdp_status take(env *e)
{
    fsdp__allocator *a = fsdp__comm_allocator(fsdp_group_world());
    size_t S = (size_t)e->bytes, whole = S * (size_t)e->N;
    e->shard = a->alloc(a, S, "bench shard");
    e->whole = a->alloc(a, whole, "bench whole");
    e->own = fsdp__calloc(2, whole, "bench arrays");
    if (!e->shard || !e->whole || !e->own) return fsdp_error();
    memset(e->shard, 0, S);
    memset(e->whole, 0, whole);
    memset(e->own, 1, 2 * whole);
    return FSDP_OK;
}

static void give(env *e)
{
    fsdp__allocator *a = fsdp__comm_allocator(fsdp_group_world());
    size_t S = (size_t)e->bytes, whole = S * (size_t)e->N;
    if (e->shard) a->free(a, e->shard, S);
    if (e->whole) a->free(a, e->whole, whole);
    free(e->own);
    e->shard = e->whole = NULL;
    e->own = NULL;
}

/* Whether the arrays of all ranks fit what the machine has, with room to spare. All ranks must
 * answer alike. */
static bool fits(int64_t bytes, int N)
{
    double pages = (double)sysconf(_SC_AVPHYS_PAGES), page = (double)sysconf(_SC_PAGESIZE);
    double lacks = 2.0 * (double)bytes * N * (3 * N + 2) > pages * page;
    return fsdp__bench_max(&lacks) == FSDP_OK && lacks == 0;
}

static fsdp_status run(int repeats)
{
    env e = {.N = fsdp_world_size()};
    if (e.N > MOST_RANKS)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%d ranks; bench comm goes up to %d", e.N,
                          MOST_RANKS);
    if (fsdp_rank() == 0) {
        printf("machine: %s, %s, %d rank(s) of %d thread(s); medians of %d turns\n",
               fsdp__cpu_model(), fsdp__cpu_isa_name(fsdp__cpu_isa()), e.N, fsdp_threads(),
               repeats);
        printf("%-19s %11s %10s %8s %8s %8s %6s\n", "collective", "S", "us", "GB/s", "x memcpy",
               "x sum", "aim");
    }
    fsdp_status s = measure_barrier(repeats);
    for (int i = 0; i < SIZES && s == FSDP_OK; i++) {
        e.bytes = sizes[i];
        e.repeat = sizes[i] < 1 << 20 ? 16 : 1;
        if (!fits(e.bytes, e.N)) {
            if (fsdp_rank() == 0)
                printf("%lld MiB: left out, memory for %d ranks is short\n",
                       (long long)(e.bytes >> 20), e.N);
            continue;
        }
        s = take(&e);
        for (size_t k = 0; k < sizeof collectives / sizeof collectives[0] && s == FSDP_OK; k++)
            s = measure(&collectives[k], &e, i, repeats);
        give(&e);
    }
    return s;
}

int fsdp__bench_comm(int argc, char **argv)
{
    int repeats = atoi(fsdp__bench_option(argc, argv, "repeats", "15"));
    if (repeats < 1) return fsdp__cli_usage("bench", "--repeats is 1 or more");
    if (fsdp_init(NULL, NULL) == FSDP_OK) run(repeats);
    int code = fsdp__cli_report("bench");
    fsdp_finalize();
    return code;
}
