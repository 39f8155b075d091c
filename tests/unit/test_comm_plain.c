/*
 * test_comm_plain.c - plain collectives, messages, groups and counters, ranks as threads.
 */
#include <math.h>
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

#define EXPECT(condition)                                                                   \
    do {                                                                                    \
        if (!(condition))                                                                   \
            return fsdp__fail(FSDP_INTERNAL, "rank %d, line %d: %s", fsdp_rank(), __LINE__, \
                              #condition);                                                  \
    } while (0)

static void run(fsdp_status (*fn)(void *arg), void *arg)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        if (fsdp_run_threads(ranks[i], fn, arg) != FSDP_OK)
            fail_msg("%d ranks: %s", ranks[i], fsdp_error_text());
    }
}

static uint8_t byte_of(int from, int to, int64_t i)
{
    return (uint8_t)(from * 31 + to * 7 + i * 3 + i / 251);
}

/* Empty, short, exactly a window, and several windows long. */
static const int64_t sizes[] = {0, 1, 1000, 65536, 200001};
enum { N_SIZES = sizeof sizes / sizeof *sizes };

static fsdp_status bytes_rank(void *arg)
{
    (void)arg;
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g), me = fsdp_group_rank(g);
    uint8_t *send = malloc((size_t)n * 200001), *recv = malloc((size_t)n * 200001);
    fsdp_status st = FSDP_OK;
    for (int k = 0; k < N_SIZES && st == FSDP_OK; k++) {
        int64_t m = sizes[k];
        int wrong = 0;
        for (int64_t i = 0; i < m; i++)
            send[i] = byte_of(me, 0, i);
        st = fsdp_all_gather(g, FSDP_LANE_CONTROL, send, recv, m, NULL);
        for (int r = 0; r < n; r++)
            for (int64_t i = 0; i < m; i++)
                wrong += recv[r * m + i] != byte_of(r, 0, i);
        for (int r = 0; r < n; r++)
            for (int64_t i = 0; i < m; i++)
                send[r * m + i] = byte_of(me, r, i);
        if (st == FSDP_OK) st = fsdp_all_to_all(g, FSDP_LANE_REDUCE, send, recv, m, NULL);
        for (int r = 0; r < n; r++)
            for (int64_t i = 0; i < m; i++)
                wrong += recv[r * m + i] != byte_of(r, me, i);
        for (int root = 0; root < n && st == FSDP_OK; root++) {
            for (int64_t i = 0; i < m; i++)
                recv[i] = me == root ? byte_of(root, 9, i) : 0;
            st = fsdp_broadcast(g, FSDP_LANE_CONTROL, recv, m, root, NULL);
            for (int64_t i = 0; i < m; i++)
                wrong += recv[i] != byte_of(root, 9, i);
        }
        if (st == FSDP_OK && wrong)
            st = fsdp__fail(FSDP_INTERNAL, "rank %d: %d wrong bytes of %lld", me, wrong,
                            (long long)m);
    }
    free(send);
    free(recv);
    return st;
}

static void test_bytes(void **state)
{
    (void)state;
    run(bytes_rank, NULL);
}

static fsdp_status reduce_rank(void *arg)
{
    (void)arg;
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g), me = fsdp_group_rank(g);
    /* Sums that depend on the order: all ranks must have the bits of the tree. */
    enum { N = 40001 };
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    const void *sources[8];
    float *all = malloc((size_t)n * N * sizeof *all);
    for (int r = 0; r < n; r++) {
        uint64_t key = fsdp__rng_mix(fsdp__rng_key(1), (uint64_t)r);
        sources[r] = all + (size_t)r * N;
        for (int i = 0; i < N; i++)
            all[r * N + i] = fsdp__rng_uniform(key, (uint64_t)i) * ldexpf(1, i % 20);
    }
    fsdp__sum_tree(y, FSDP_F32, sources, FSDP_F32, n, N, 1.0f, 0);
    memcpy(x, sources[me], N * sizeof *x);
    fsdp_work *w = NULL;
    fsdp_status st = fsdp_all_reduce(g, FSDP_LANE_REDUCE, x, N, FSDP_F32, FSDP_SUM, &w);
    while (st == FSDP_OK && fsdp_work_test(w) == 0)
        fsdp__sleep(1e-5);
    if (st == FSDP_OK) st = fsdp_work_wait(w);
    int same = memcmp(x, y, N * sizeof *x) == 0;
    /* reduce_scatter gives each rank its part of the same bits */
    int64_t part = N / n;
    if (st == FSDP_OK)
        st = fsdp_reduce_scatter(g, FSDP_LANE_REDUCE, sources[me], x, part, FSDP_F32, NULL);
    int64_t own = me * part;
    same &= memcmp(x, y + own, (size_t)part * sizeof *x) == 0;
    free(x);
    free(y);
    free(all);
    FSDP_TRY(st);
    EXPECT(same);

    int64_t big[2] = {(INT64_C(1) << 60) + me, -me};
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, big, 2, FSDP_I64, FSDP_MAX, NULL));
    EXPECT(big[0] == (INT64_C(1) << 60) + n - 1 && big[1] == 0);
    int64_t odd = (INT64_C(1) << 53) + 1;
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, &odd, 1, FSDP_I64, FSDP_SUM, NULL));
    EXPECT(odd == n * ((INT64_C(1) << 53) + 1)); /* exact beyond what a double holds */
    uint8_t small = (uint8_t)(200 + me);
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, &small, 1, FSDP_U8, FSDP_MIN, NULL));
    EXPECT(small == 200);
    double nan = me == n - 1 ? (double)NAN : me;
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, &nan, 1, FSDP_F64, FSDP_MAX, NULL));
    EXPECT(isnan(nan));
    uint16_t half = fsdp__f32_to_bf16((float)(me - 1));
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, &half, 1, FSDP_BF16, FSDP_MIN, NULL));
    EXPECT(fsdp__bf16_to_f32(half) == -1.0f);
    uint8_t flag = me == n / 2;
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, &flag, 1, FSDP_BOOL, FSDP_MAX, NULL));
    EXPECT(flag == 1);
    return fsdp_barrier(g, FSDP_LANE_CONTROL);
}

static void test_reduce(void **state)
{
    (void)state;
    run(reduce_rank, NULL);
}

/* Around a ring, several messages under way, and both directions of a pair at once. */
static fsdp_status message_rank(void *arg)
{
    (void)arg;
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g), me = fsdp_group_rank(g);
    if (n == 1) return FSDP_OK;
    int next = (me + 1) % n, last = (me + n - 1) % n;
    enum { M = 4 };
    static const int64_t lengths[M] = {3, 0, 150000, 65536};
    uint8_t *out[M], *in[M];
    fsdp_work *sends[M], *recvs[M];
    for (int k = 0; k < M; k++) {
        out[k] = malloc((size_t)lengths[k] + 1);
        in[k] = calloc(1, (size_t)lengths[k] + 1);
        for (int64_t i = 0; i < lengths[k]; i++)
            out[k][i] = byte_of(me, k, i);
        FSDP_TRY(fsdp_recv(g, in[k], lengths[k], last, &recvs[k]));
        FSDP_TRY(fsdp_send(g, out[k], lengths[k], next, &sends[k]));
    }
    int wrong = 0;
    for (int k = 0; k < M; k++) {
        FSDP_TRY(fsdp_work_wait(recvs[k]));
        FSDP_TRY(fsdp_work_wait(sends[k]));
        for (int64_t i = 0; i < lengths[k]; i++)
            wrong += in[k][i] != byte_of(last, k, i);
    }
    for (int k = 0; k < M; k++) {
        free(out[k]);
        free(in[k]);
    }
    EXPECT(wrong == 0);
    EXPECT(fsdp_comm_count_get(g, FSDP_LANE_CONTROL, FSDP_RECV).calls == M);
    return fsdp_barrier(g, FSDP_LANE_CONTROL);
}

static void test_messages(void **state)
{
    (void)state;
    run(message_rank, NULL);
}

/* A mesh of 2 x n/2: rows and columns are groups, each with copies and lanes of its own. */
static fsdp_status group_rank(void *arg)
{
    (void)arg;
    fsdp_group *world = fsdp_group_world(), *row, *column, *twin;
    int n = fsdp_group_size(world), me = fsdp_group_rank(world);
    int width = n / 2, list[8];
    for (int i = 0; i < width; i++)
        list[i] = me / width * width + i;
    FSDP_TRY(fsdp_group_create(world, list, width, "shard", &row));
    list[0] = me % width;
    list[1] = me % width + width;
    FSDP_TRY(fsdp_group_create(world, list, 2, "replicate", &column));
    for (int i = 0; i < n; i++)
        list[i] = i;
    FSDP_TRY(fsdp_group_create(world, list, n, "twin", &twin));
    EXPECT(fsdp_group_size(row) == width && fsdp_group_rank(row) == me % width);
    EXPECT(fsdp_group_size(column) == 2 && fsdp_group_rank(column) == me / width);
    EXPECT(fsdp_group_world_rank(row, 0) == me / width * width);
    EXPECT(!strcmp(fsdp_group_name(column), "replicate"));
    EXPECT(!strcmp(fsdp_group_backend(row), width == 1 ? "self" : "shm"));

    fsdp_group *groups[4] = {world, row, column, twin};
    fsdp_shared copies[4];
    for (int k = 0; k < 4; k++) {
        int size = fsdp_group_size(groups[k]);
        FSDP_TRY(fsdp_shared_take(groups[k], size * 4, "copy", &copies[k]));
        int32_t *shard =
            fsdp__comm_allocator(groups[k])->alloc(fsdp__comm_allocator(groups[k]), 4, "s");
        EXPECT(shard);
        *shard = me * 10 + k;
        fsdp_list_entry e = {1, size, 1, 1, shard, FSDP_I32, copies[k].rw, FSDP_I32, 1};
        FSDP_TRY(fsdp_all_gather_list(groups[k], FSDP_LANE_GATHER, "x", &e, 1, &copies[k], NULL));
        int32_t sum = me;
        FSDP_TRY(fsdp_all_reduce(groups[k], FSDP_LANE_CONTROL, &sum, 1, FSDP_I32, FSDP_SUM, NULL));
        int32_t want = 0;
        for (int r = 0; r < size; r++)
            want += fsdp_group_world_rank(groups[k], r);
        EXPECT(sum == want);
    }
    /* All four copies are there at once: none lies on another. */
    for (int k = 0; k < 4; k++)
        for (int r = 0; r < fsdp_group_size(groups[k]); r++)
            EXPECT(((const int32_t *)copies[k].ro)[r] ==
                   fsdp_group_world_rank(groups[k], r) * 10 + k);
    FSDP_TRY(fsdp_barrier(world, FSDP_LANE_CONTROL));
    for (int k = 0; k < 4; k++)
        fsdp_shared_give(groups[k], &copies[k]);
    return FSDP_OK;
}

static void test_groups(void **state)
{
    (void)state;
    for (int n = 2; n <= 8; n *= 2)
        if (fsdp_run_threads(n, group_rank, NULL) != FSDP_OK) fail_msg("%s", fsdp_error_text());
}

/* Counters say what the claims count, and one rank counts nothing. */
static fsdp_status count_rank(void *arg)
{
    (void)arg;
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g);
    float x[8] = {0};
    FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_REPLICATE, x, 8, FSDP_F32, FSDP_SUM, NULL));
    FSDP_TRY(fsdp_all_gather(g, FSDP_LANE_CONTROL, x, x, 0, NULL));
    fsdp_comm_count c = fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE);
    EXPECT(c.calls == (n > 1) && c.elements == 2 * (n - 1) * 8 / n && c.bytes_wire == 0);
    EXPECT(fsdp_comm_count_total(FSDP_LANE_CONTROL, FSDP_ALL_GATHER).calls == (n > 1));
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    EXPECT(m.live[FSDP_COMMUNICATION] == (n > 1 ? 2 * 2 * 65536 : 0)); /* windows of two lanes */
    fsdp_comm_count_reset();
    EXPECT(fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).elements == 0);
    return fsdp_barrier(g, FSDP_LANE_CONTROL);
}

static void test_counts(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n *= 2)
        if (fsdp_run_threads(n, count_rank, NULL) != FSDP_OK) fail_msg("%s", fsdp_error_text());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),    cmocka_unit_test(test_reduce),
        cmocka_unit_test(test_messages), cmocka_unit_test(test_groups),
        cmocka_unit_test(test_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
