/*
 * test_claims_c24.c - C24: prefetch hides communication.
 *
 * Shown without a clock: the gather of the next unit is under way before the
 * running unit's computation ends, in forward and in backward, for each of
 * eight blocks; with nothing ahead (limit -1) it never is. Beside it the step's
 * time is printed with each collective as late as a unit computes, against the
 * sum of both; it decides nothing.
 */
#include <unistd.h>

#include "sharded_net.h"

#include "base/thread.h"
#include "comm/comm.h"
#include "fsdp/unit.h"

enum { BLOCKS = 8, STEPS = 4, COMPUTE_US = 1000 };

typedef struct watch {
    net *n;
    int backward; /* 0: ends of forwards are looked at */
    int ahead[2], ends[2];
} watch;

/* Whether the gather of block i was issued. */
static int under_way(const watch *w, int i)
{
    return i >= 0 && i < BLOCKS && fsdp__unit_of(w->n->block[i])->state != FSDP__SHARDED;
}

static int block_of(const watch *w, const fsdp_module *m)
{
    for (int i = 0; i < BLOCKS; i++)
        if (w->n->block[i] == m) return i;
    return -1;
}

/* A block's forward computes, and its end: before anything of it is freed. */
static fsdp_status end_of_forward(void *arg, fsdp_module *m, const fsdp_values *in,
                                  fsdp_values *out)
{
    (void)in;
    (void)out;
    watch *w = arg;
    int i = block_of(w, m);
    usleep(COMPUTE_US);
    if (i + 1 == BLOCKS) return FSDP_OK;
    w->ends[0]++;
    w->ahead[0] += under_way(w, i + 1);
    return FSDP_OK;
}

/* The end of a block's backward: its norm's weight, which is the first thing of it in forward, has
 * its gradient. */
static fsdp_tensor *end_of_backward(void *arg, fsdp_tensor *g)
{
    (void)g;
    watch *w = arg;
    usleep(COMPUTE_US);
    for (int i = BLOCKS - 1; i > 0; i--) {
        const fsdp__unit *u = fsdp__unit_of(w->n->block[i]);
        if (!u->pre_backward || u->post_backward) continue;
        w->ends[1]++;
        w->ahead[1] += under_way(w, i - 1);
    }
    return NULL;
}

/* On each block's input as its own ops see it. */
static fsdp_status hook_input(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)m;
    return fsdp_requires_grad(in->t[0]) ? fsdp_register_hook(in->t[0], end_of_backward, arg)
                                        : FSDP_OK;
}

/* Each gather is as late on one rank as a unit computes. */
static void late(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    (void)arg;
    (void)c;
    (void)label;
    if (lane == FSDP_LANE_GATHER && fsdp_rank() == 1) usleep(COMPUTE_US);
}

typedef struct run {
    int limit;
    int ahead[2], ends[2];
    double seconds; /* of the last step */
} run;

static fsdp_status rank_main(void *arg)
{
    run *c = arg;
    net *n = net_create(BLOCKS);
    EXPECT(n);
    watch w = {.n = n};
    net_run r = {.ranks = fsdp_world_size(), .policy = FSDP_RESHARD_ALWAYS, .prefetch = c->limit};
    EXPECT(net_shard(&r, n) == FSDP_OK && fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    for (int i = 0; i < BLOCKS; i++) {
        EXPECT(fsdp_register_forward_pre_hook(n->block[i], hook_input, &w, 0) >= 0);
        EXPECT(fsdp_register_forward_hook(n->block[i], end_of_forward, &w, 1) >= 0);
    }
    fsdp__comm_set_disturb(late, NULL);
    double seconds = 0;
    for (int step = 0; step < STEPS; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        net_run b = {.ranks = 1, .rows = 4};
        fsdp_tensor *x, *y;
        EXPECT(net_batch(&b, step, 0, 4, &x, &y) == FSDP_OK);
        memset(w.ahead, 0, sizeof w.ahead);
        memset(w.ends, 0, sizeof w.ends);
        double start = fsdp__now();
        EXPECT(fsdp_backward(fsdp_call2(&n->base, x, y)) == FSDP_OK);
        seconds = fsdp__now() - start;
        EXPECT(fsdp_zero_grad(&n->base) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp__comm_set_disturb(NULL, NULL);
    if (fsdp_rank() == 0) {
        memcpy(c->ahead, w.ahead, sizeof w.ahead);
        memcpy(c->ends, w.ends, sizeof w.ends);
        c->seconds = seconds;
    }
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_c24(void **state)
{
    (void)state;
    run none = {.limit = -1}, one = {.limit = 1}, two = {.limit = 2};
    check_ok(fsdp_run_threads(4, rank_main, &none));
    check_ok(fsdp_run_threads(4, rank_main, &one));
    check_ok(fsdp_run_threads(4, rank_main, &two));
    const run *all[] = {&none, &one, &two};
    for (int k = 0; k < 3; k++)
        for (int way = 0; way < 2; way++) {
            assert_int_equal(all[k]->ends[way], BLOCKS - 1);
            assert_int_equal(all[k]->ahead[way], k ? BLOCKS - 1 : 0);
        }
    printf(
        "step: %.1f ms with nothing ahead, %.1f with one unit, %.1f with two; computing %.1f and "
        "late gathers %.1f make %.1f one after the other\n",
        1e3 * none.seconds, 1e3 * one.seconds, 1e3 * two.seconds, 2e-3 * BLOCKS * COMPUTE_US,
        2e-3 * (BLOCKS + 1) * COMPUTE_US, 2e-3 * (2 * BLOCKS + 1) * COMPUTE_US);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c24)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
