/*
 * test_claims_c28.c - C28: a world of one rank makes no collective at all, and
 * the same numbers as plain training, to the bit.
 */
#include "sharded_net.h"

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    int64_t *calls = r->arg;
    for (int l = 0; l < FSDP_LANE_COUNT; l++)
        for (int c = 0; c < FSDP_COLLECTIVE_COUNT; c++)
            *calls += fsdp_comm_count_total((fsdp_lane)l, (fsdp_collective)c).calls;
    fsdp_comm_count_reset(); /* what the test itself gathers afterwards is no matter */
    return FSDP_OK;
}

static fsdp_status prepare(net_run *r, net *n)
{
    return look(r, n, 0);
}

static void test_c28(void **state)
{
    (void)state;
    int64_t calls = 0;
    net_run plain = {
        .ranks = 1, .blocks = 3, .rows = 8, .steps = 1, .mesh = NET_PLAIN, .no_clip = 1};
    for (int steps = 1; steps <= 20; steps += 19)
        for (int way = 0; way < 3; way++) {
            plain.steps = steps;
            net_go(&plain);
            net_run r = plain;
            r.mesh = way == 2 ? NET_REPLICATE : NET_SHARD;
            r.policy = way ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_AUTO;
            r.prefetch = way;
            r.look = steps == 1 ? look : NULL; /* one step: nothing of the test is between */
            r.prepare = prepare;
            r.arg = &calls;
            net_go(&r);
            net_same(&r, &plain, "one rank");
            assert_int_equal(calls, 0);
            net_free(&r);
            net_free(&plain);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c28)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
