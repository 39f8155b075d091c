/*
 * test_comm_lists.c - collectives on lists, ranks as threads, against plain loops.
 *
 * Values are a hash of (rank, entry, element), so that every rank can compute what every other rank
 * has, and a wrong row, rank or element shows.
 */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/rng.h"
#include "base/thread.h"
#include "comm/comm.h"

enum { MOST = 8 };

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition))                                                                   \
            return fsdp__fail(FSDP_INTERNAL, "rank %d, line %d: %s", fsdp_rank(), __LINE__, \
                              #condition);                                                  \
    } while (0)

typedef struct shape {
    int64_t outer, dim, inner;
} shape;

/* Uneven, fewer rows than ranks, none at all, cut along a later dim, long enough for vectors. */
static const shape shapes[] = {{1, 10, 3},   {1, 1, 5},  {1, 0, 4}, {1, 8, 1},
                               {3, 5, 2},    {4, 7, 1},  {1, 3, 0}, {2, 1, 9},
                               {1, 131, 33}, {5, 64, 3}, {1, 2, 1}, {0, 4, 4}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct plan {
    fsdp_dtype shard_dtype, full_dtype;
    int absent; /* this rank has no gradient for entries k with k % 3 == 1; -1: nobody absent */
    int add;
    float scale;
    int delays; /* the disturber sleeps at random */
} plan;

static void disturb(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    uint64_t *key = arg;
    (void)lane;
    (void)c;
    (void)label;
    *key = fsdp__rng_mix(*key, 1);
    uint32_t x = fsdp__rng_u32(*key, 0);
    if (x % 4 == 0) fsdp__sleep((double)(x % 97) * 1e-6);
}

/* A seeded scheduler: at each step of the protocol a rank may give way to the others. */
static void schedule(void *arg)
{
    uint64_t *key = arg;
    *key = fsdp__rng_mix(*key, 2);
    uint32_t x = fsdp__rng_u32(*key, 0);
    if (x % 3 == 0) sched_yield();
    if (x % 16 == 1) fsdp__sleep((double)(x % 31) * 1e-6);
}

static double value(int rank, int entry, int64_t i)
{
    uint64_t key = fsdp__rng_mix(fsdp__rng_mix(fsdp__rng_key(7), (uint64_t)rank), (uint64_t)entry);
    return (double)(int32_t)fsdp__rng_u32(key, (uint64_t)i) / (double)(1 << 28);
}

static void put(void *p, fsdp_dtype t, int64_t i, double x)
{
    fsdp__convert((char *)p + (size_t)i * fsdp_dtype_size(t), t, &x, FSDP_F64, 1);
}

static fsdp_list_entry entry_of(int k, const plan *p)
{
    int n = fsdp_world_size();
    fsdp_list_entry e = {.outer = shapes[k].outer, .dim = shapes[k].dim, .inner = shapes[k].inner};
    e.chunk = (e.dim + n - 1) / n;
    e.shard_dtype = p->shard_dtype;
    e.full_dtype = p->full_dtype;
    e.present = 1;
    return e;
}

static int64_t begin_of(const fsdp_list_entry *e, int r)
{
    return r * e->chunk < e->dim ? r * e->chunk : e->dim;
}

static int64_t rows_of(const fsdp_list_entry *e, int r)
{
    return begin_of(e, r + 1) - begin_of(e, r);
}

static size_t full_bytes(const fsdp_list_entry *e)
{
    return (size_t)(e->outer * e->dim * e->inner) * fsdp_dtype_size(e->full_dtype);
}

/* Element (o, d, i) of the whole belongs to one rank's shard, at this place. */
static int64_t shard_index(const fsdp_list_entry *e, int64_t o, int64_t d, int64_t i, int *owner)
{
    *owner = (int)(d / e->chunk);
    return (o * rows_of(e, *owner) + d - begin_of(e, *owner)) * e->inner + i;
}

static fsdp_status alloc_list(fsdp_list_entry *e, const plan *p, int with_full)
{
    fsdp__allocator *a = fsdp__comm_allocator(fsdp_group_world());
    for (int k = 0; k < N_SHAPES; k++) {
        e[k] = entry_of(k, p);
        e[k].shard = a->alloc(a, full_bytes(&e[k]) * 4 + 64, "a shard");
        EXPECT(e[k].shard);
        if (!with_full) continue;
        e[k].full = a->alloc(a, full_bytes(&e[k]) + 64, "a full");
        EXPECT(e[k].full);
    }
    return FSDP_OK;
}

static void free_list(fsdp_list_entry *e, int with_full)
{
    fsdp__allocator *a = fsdp__comm_allocator(fsdp_group_world());
    for (int k = N_SHAPES - 1; k >= 0; k--) {
        if (with_full) a->free(a, e[k].full, full_bytes(&e[k]) + 64);
        a->free(a, e[k].shard, full_bytes(&e[k]) * 4 + 64);
    }
}

static fsdp_status check_gathered(const fsdp_list_entry *e, int k, const void *full)
{
    for (int64_t o = 0; o < e->outer; o++)
        for (int64_t d = 0; d < e->dim; d++)
            for (int64_t i = 0; i < e->inner; i++) {
                int owner;
                char shard[8] = {0}, want[8] = {0};
                int64_t at = shard_index(e, o, d, i, &owner);
                put(shard, e->shard_dtype, 0, value(owner, k, at));
                fsdp__convert(want, e->full_dtype, shard, e->shard_dtype, 1);
                size_t size = fsdp_dtype_size(e->full_dtype);
                const char *have =
                    (const char *)full + (size_t)((o * e->dim + d) * e->inner + i) * size;
                EXPECT(memcmp(have, want, size) == 0);
            }
    return FSDP_OK;
}

/* ---- gathers ------------------------------------------------------------------------ */

static fsdp_status gather_rank(void *arg)
{
    const plan *p = arg;
    fsdp_group *g = fsdp_group_world();
    uint64_t key = fsdp__rng_mix(fsdp__rng_key(3), (uint64_t)fsdp_rank());
    if (p->delays) fsdp__comm_set_disturb(disturb, &key);
    fsdp__comm_set_schedule(schedule, &key);
    fsdp_list_entry e[N_SHAPES], s[N_SHAPES];
    FSDP_TRY(alloc_list(e, p, 1));
    int64_t bytes = 0, elements = 0;
    for (int k = 0; k < N_SHAPES; k++) {
        int64_t own = e[k].outer * rows_of(&e[k], fsdp_rank()) * e[k].inner;
        for (int64_t i = 0; i < own; i++)
            put(e[k].shard, e[k].shard_dtype, i, value(fsdp_rank(), k, i));
        elements += e[k].outer * e[k].dim * e[k].inner - own;
        bytes += ((int64_t)full_bytes(&e[k]) + 63) / 64 * 64;
    }
    /* Twelve copies come and go, two at a time, so every byte is written over many times. */
    fsdp_shared held[2] = {{0}, {0}};
    for (int round = 0; round < 12; round++) {
        fsdp_shared *copy = &held[round % 2];
        if (copy->rw) fsdp_shared_give(g, copy);
        FSDP_TRY(fsdp_shared_take(g, bytes, "a copy", copy));
        char *at = copy->rw;
        for (int k = 0; k < N_SHAPES; k++) {
            s[k] = e[k];
            s[k].full = at;
            at += (full_bytes(&e[k]) + 63) / 64 * 64;
        }
        fsdp_work *a, *b;
        FSDP_TRY(fsdp_all_gather_list(g, FSDP_LANE_GATHER, "shared", s, N_SHAPES, copy, &a));
        FSDP_TRY(fsdp_all_gather_list(g, FSDP_LANE_GATHER, "private", e, N_SHAPES, NULL, &b));
        if (round % 3 == 0) FSDP_TRY(fsdp_comm_progress());
        FSDP_TRY(fsdp_work_wait(a));
        FSDP_TRY(fsdp_work_wait(b));
        for (int k = 0; k < N_SHAPES; k++) {
            const char *ro = (const char *)copy->ro + ((char *)s[k].full - (char *)copy->rw);
            if (round % 6 == 0) FSDP_TRY(check_gathered(&e[k], k, ro));
            EXPECT(full_bytes(&e[k]) == 0 || memcmp(ro, e[k].full, full_bytes(&e[k])) == 0);
        }
    }
    for (int i = 0; i < 2; i++)
        fsdp_shared_give(g, &held[i]);
    fsdp_comm_count n = fsdp_comm_count_get(g, FSDP_LANE_GATHER, FSDP_ALL_GATHER);
    int alone = fsdp_world_size() == 1;
    EXPECT(n.calls == (alone ? 0 : 24) && n.elements == (alone ? 0 : 24 * elements));
    FSDP_TRY(fsdp_barrier(g, FSDP_LANE_GATHER));
    free_list(e, 1);
    return FSDP_OK;
}

static void run(fsdp_status (*fn)(void *arg), plan *p)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        if (fsdp_run_threads(ranks[i], fn, p) != FSDP_OK)
            fail_msg("%d ranks: %s", ranks[i], fsdp_error_text());
    }
}

static void test_gather(void **state)
{
    (void)state;
    const fsdp_dtype pairs[][2] = {
        {FSDP_F32, FSDP_BF16}, {FSDP_F32, FSDP_F32}, {FSDP_BF16, FSDP_BF16}, {FSDP_F64, FSDP_F64}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        plan p = {pairs[i][0], pairs[i][1], -1, 0, 1.0f, i % 2 == 0};
        run(gather_rank, &p);
    }
}

/* ---- reductions ---------------------------------------------------------------------- */

/* The tree of sums over ranks, as its definition says it. */
static double tree(const double *x, int n, int wide)
{
    if (n == 1) return x[0];
    int half = 1;
    while (half * 2 < n)
        half *= 2;
    double a = tree(x, half, wide), b = tree(x + half, n - half, wide);
    return wide ? a + b : (double)((float)a + (float)b);
}

static int is_absent(const plan *p, int rank, int k)
{
    return (p->absent >= 0 && k % 3 == 1 && rank % (p->absent + 1) == 0) || k == 4;
}

/* What element (o, d, i) sums to, in the dtype given; has: any rank is present. */
static void want_sum(const fsdp_list_entry *e, const plan *p, int k, int64_t at, fsdp_dtype to,
                     const void *before, void *out)
{
    double x[MOST], sum;
    int wide = e->full_dtype == FSDP_F64;
    for (int r = 0; r < fsdp_world_size(); r++) {
        char raw[8] = {0};
        put(raw, e->full_dtype, 0, is_absent(p, r, k) ? 0.0 : value(r, k, at));
        fsdp__convert(&x[r], FSDP_F64, raw, e->full_dtype, 1);
    }
    sum = tree(x, fsdp_world_size(), wide);
    if (p->scale != 1.0f) sum = wide ? sum * (double)p->scale : (double)((float)sum * p->scale);
    if (before) {
        double old;
        fsdp__convert(&old, FSDP_F64, before, to, 1);
        sum = wide ? sum + old : (double)((float)sum + (float)old);
    }
    if (wide) {
        fsdp__convert(out, to, &sum, FSDP_F64, 1);
    } else {
        float f = (float)sum;
        fsdp__convert(out, to, &f, FSDP_F32, 1);
    }
}

static int any_present(const plan *p, int k)
{
    for (int r = 0; r < fsdp_world_size(); r++)
        if (!is_absent(p, r, k)) return 1;
    return 0;
}

static void fill_fulls(fsdp_list_entry *e, const plan *p)
{
    for (int k = 0; k < N_SHAPES; k++) {
        e[k].present = !is_absent(p, fsdp_rank(), k);
        for (int64_t i = 0; i < e[k].outer * e[k].dim * e[k].inner; i++)
            put(e[k].full, e[k].full_dtype, i, e[k].present ? value(fsdp_rank(), k, i) : 77.0);
    }
}

static fsdp_status check_shards(const fsdp_list_entry *e, const plan *p)
{
    size_t size = fsdp_dtype_size(p->shard_dtype);
    for (int k = 0; k < N_SHAPES; k++) {
        int has = any_present(p, k);
        EXPECT(e[k].present == has);
        for (int64_t o = 0; o < e[k].outer; o++)
            for (int64_t d = 0; d < e[k].dim; d++)
                for (int64_t i = 0; i < e[k].inner; i++) {
                    int owner;
                    char want[8], before[8];
                    int64_t at = shard_index(&e[k], o, d, i, &owner);
                    if (owner != fsdp_rank()) continue;
                    put(before, p->shard_dtype, 0, 3.0);
                    memcpy(want, before, 8);
                    if (has)
                        want_sum(&e[k], p, k, (o * e[k].dim + d) * e[k].inner + i, p->shard_dtype,
                                 p->add ? before : NULL, want);
                    EXPECT(memcmp((char *)e[k].shard + (size_t)at * size, want, size) == 0);
                }
    }
    return FSDP_OK;
}

static fsdp_status reduce_rank(void *arg)
{
    const plan *p = arg;
    fsdp_group *g = fsdp_group_world();
    uint64_t key = fsdp__rng_mix(fsdp__rng_key(5), (uint64_t)fsdp_rank());
    if (p->delays) fsdp__comm_set_disturb(disturb, &key);
    fsdp__comm_set_schedule(schedule, &key);
    fsdp_list_entry e[N_SHAPES];
    FSDP_TRY(alloc_list(e, p, 1));
    for (int round = 0; round < 3; round++) {
        fill_fulls(e, p);
        for (int k = 0; k < N_SHAPES; k++)
            for (int64_t i = 0; i < e[k].outer * rows_of(&e[k], fsdp_rank()) * e[k].inner; i++)
                put(e[k].shard, e[k].shard_dtype, i, 3.0);
        fsdp_work *w;
        FSDP_TRY(fsdp_reduce_scatter_list(g, FSDP_LANE_REDUCE, "grads", e, N_SHAPES, p->scale,
                                          p->add, &w));
        FSDP_TRY(fsdp_work_wait_buffers(w));
        FSDP_TRY(fsdp_work_wait(w));
        FSDP_TRY(check_shards(e, p));
    }
    FSDP_TRY(fsdp_barrier(g, FSDP_LANE_REDUCE));
    free_list(e, 1);
    return FSDP_OK;
}

static fsdp_status all_reduce_rank(void *arg)
{
    const plan *p = arg;
    fsdp_group *g = fsdp_group_world();
    fsdp_list_entry e[N_SHAPES];
    FSDP_TRY(alloc_list(e, p, 1));
    size_t size = fsdp_dtype_size(p->full_dtype);
    for (int round = 0; round < 2; round++) {
        fill_fulls(e, p);
        fsdp_work *w;
        FSDP_TRY(fsdp_all_reduce_list(g, FSDP_LANE_REPLICATE, "grads", e, N_SHAPES, p->scale, &w));
        while (round % 2 && fsdp_work_test(w) == 0)
            fsdp__sleep(1e-5);
        FSDP_TRY(fsdp_work_wait(w));
        for (int k = 0; k < N_SHAPES; k++) {
            EXPECT(e[k].present == any_present(p, k));
            for (int64_t i = 0; e[k].present && i < e[k].outer * e[k].dim * e[k].inner; i++) {
                char want[8];
                want_sum(&e[k], p, k, i, p->full_dtype, NULL, want);
                EXPECT(memcmp((char *)e[k].full + (size_t)i * size, want, size) == 0);
            }
        }
    }
    FSDP_TRY(fsdp_barrier(g, FSDP_LANE_REPLICATE));
    free_list(e, 1);
    return FSDP_OK;
}

static void test_reduce(void **state)
{
    (void)state;
    const fsdp_dtype pairs[][2] = {
        {FSDP_F32, FSDP_F32}, {FSDP_F32, FSDP_BF16}, {FSDP_BF16, FSDP_BF16}, {FSDP_F64, FSDP_F64}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        plan p = {pairs[i][0], pairs[i][1],          i == 1 ? -1 : (int)i % 3,
                  (int)i % 2,  i % 2 ? 0.25f : 1.0f, i % 2 == 1};
        run(reduce_rank, &p);
        run(all_reduce_rank, &p);
    }
}

/* Shards may change once a later call of the lane is over: nobody reads them for the earlier one.
 */
static fsdp_status later_rank(void *arg)
{
    (void)arg;
    enum { ROWS = 3000 };
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g), me = fsdp_group_rank(g);
    uint64_t key = fsdp__rng_mix(fsdp__rng_key(9), (uint64_t)me);
    fsdp__comm_set_schedule(schedule, &key);
    fsdp__allocator *a = fsdp__comm_allocator(g);
    size_t bytes = ROWS * sizeof(float);
    float *shard = a->alloc(a, bytes, "shard"), *full = a->alloc(a, bytes * (size_t)n, "full");
    float *sum = a->alloc(a, bytes, "sum"), *grad = a->alloc(a, bytes * (size_t)n, "grad");
    EXPECT(shard && full && sum && grad);
    memset(grad, 0, bytes * (size_t)n);
    fsdp_list_entry e = {1, (int64_t)ROWS * n, 1, ROWS, shard, FSDP_F32, full, FSDP_F32, 1};
    fsdp_list_entry r = {1, (int64_t)ROWS * n, 1, ROWS, sum, FSDP_F32, grad, FSDP_F32, 1};
    for (int round = 0; round < 60; round++) {
        fsdp_work *w, *later;
        for (int i = 0; i < ROWS; i++)
            shard[i] = (float)(round * 8 + me);
        FSDP_TRY(fsdp_all_gather_list(g, FSDP_LANE_GATHER, "first", &e, 1, NULL, &w));
        FSDP_TRY(fsdp_reduce_scatter_list(g, FSDP_LANE_GATHER, "later", &r, 1, 1, 0, &later));
        FSDP_TRY(fsdp_work_wait(later));
        memset(shard, 0x7f, bytes);
        FSDP_TRY(fsdp_work_wait(w));
        for (int64_t i = 0; i < (int64_t)ROWS * n; i++)
            EXPECT(full[i] == (float)(round * 8 + (int)(i / ROWS)));
        FSDP_TRY(fsdp_barrier(g, FSDP_LANE_CONTROL));
    }
    return FSDP_OK;
}

static void test_later(void **state)
{
    (void)state;
    run(later_rank, NULL);
}

/* ---- what is refused ------------------------------------------------------------------ */

static fsdp_status refuse_rank(void *arg)
{
    int which = *(int *)arg;
    char somewhere[64] = {0};
    fsdp_group *g = fsdp_group_world();
    fsdp_list_entry e = {1, 8, 1, 4, somewhere, FSDP_F32, somewhere, FSDP_F32, 1};
    fsdp_shared s;
    switch (which) {
    case 0: /* a shard that peers cannot read */
        return fsdp_all_gather_list(g, FSDP_LANE_GATHER, "x", &e, 1, NULL, NULL);
    case 1: /* a full outside of the shared copy */
        FSDP_TRY(fsdp_shared_take(g, 64, "copy", &s));
        return fsdp_all_gather_list(g, FSDP_LANE_GATHER, "x", &e, 1, &s, NULL);
    case 2: /* rows that nobody owns */
        e.chunk = 3;
        return fsdp_reduce_scatter_list(g, FSDP_LANE_REDUCE, "x", &e, 1, 1, 0, NULL);
    case 3: /* a gradient that peers cannot read */
        return fsdp_reduce_scatter_list(g, FSDP_LANE_REDUCE, "x", &e, 1, 1, 0, NULL);
    case 4:
        e.full_dtype = FSDP_DTYPE_NONE;
        return fsdp_all_reduce_list(g, FSDP_LANE_REDUCE, "x", &e, 1, 1, NULL);
    case 5:
        e.full = NULL;
        return fsdp_all_reduce_list(g, FSDP_LANE_REDUCE, "x", &e, 1, 1, NULL);
    default:
        return fsdp_all_gather_list(g, (fsdp_lane)9, "x", &e, 1, NULL, NULL);
    }
}

static void test_refuse(void **state)
{
    (void)state;
    static const char *const words[] = {"fsdp_comm_alloc", "shared copy", "8 rows",
                                        "fsdp_comm_alloc", "none",        "no full",
                                        "no lane"};
    for (int i = 0; i < 7; i++) {
        fsdp_status s = fsdp_run_threads(2, refuse_rank, &i);
        assert_int_not_equal(s, FSDP_OK);
        if (!strstr(fsdp_error_text(), words[i])) fail_msg("case %d: %s", i, fsdp_error_text());
        fsdp_error_clear();
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather),
        cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_later),
        cmocka_unit_test(test_refuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
