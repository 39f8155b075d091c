/*
 * test_claims_c13.c - C13: NO_SHARD, SHARD_GRAD_OP and FULL_SHARD train alike,
 * to the bit, for 50 steps, in fp32 and with bf16 parameters reduced in fp32;
 * so do HYBRID_SHARD and hybrid ZeRO-2 where the numbers of ranks are powers of
 * two, and elsewhere within 1e-5.
 */
#include "sharded_net.h"

static void same(int ranks, fsdp_dtype param)
{
    net_run r[3];
    for (int k = 0; k < 3; k++) {
        r[k] =
            (net_run){.ranks = ranks, .blocks = 4, .rows = 24, .steps = NET_STEPS, .prefetch = 1};
        r[k].mesh = k == 0 ? NET_REPLICATE : NET_SHARD;
        r[k].policy = k == 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
        r[k].param_dtype = param;
        net_go(&r[k]);
    }
    net_same(&r[1], &r[0], "SHARD_GRAD_OP beside NO_SHARD");
    net_same(&r[2], &r[0], "FULL_SHARD beside NO_SHARD");
    assert_true(r[0].loss[NET_STEPS - 1] < 0.5 * r[0].loss[0]); /* and it learns */
    for (int k = 0; k < 3; k++)
        net_free(&r[k]);
}

/* HYBRID_SHARD and hybrid ZeRO-2 beside FULL_SHARD. */
static void hybrid(int replicas, int shards, fsdp_dtype param)
{
    int exact = (replicas & (replicas - 1)) == 0 && (shards & (shards - 1)) == 0;
    net_run full = {.ranks = replicas * shards,
                    .blocks = 4,
                    .rows = 24,
                    .steps = NET_STEPS,
                    .prefetch = 1,
                    .policy = FSDP_RESHARD_ALWAYS,
                    .param_dtype = param};
    net_run one = full, two = full;
    one.mesh = two.mesh = NET_HYBRID;
    one.replicas = two.replicas = replicas;
    two.policy = FSDP_RESHARD_NEVER;
    net_go(&full);
    net_go(&one);
    net_go(&two);
    net_same(&two, &one, "hybrid ZeRO-2 beside HYBRID_SHARD");
    if (exact)
        net_same(&one, &full, "HYBRID_SHARD beside FULL_SHARD");
    else
        for (int s = 0; s < NET_STEPS; s++)
            if (!(fabs(one.loss[s] / full.loss[s] - 1.0) <= 1e-5))
                fail_msg("%d x %d, step %d: loss %.9g and %.9g", replicas, shards, s, one.loss[s],
                         full.loss[s]);
    net_free(&full);
    net_free(&one);
    net_free(&two);
}

static void test_c13_hybrid(void **state)
{
    (void)state;
    static const int sizes[][2] = {{2, 2}, {2, 4}, {4, 2}, {2, 3}, {3, 2}};
    for (int i = 0; i < 5; i++) {
        hybrid(sizes[i][0], sizes[i][1], FSDP_F32);
        if (i < 2) hybrid(sizes[i][0], sizes[i][1], FSDP_BF16);
    }
}

static void test_c13(void **state)
{
    (void)state;
    const int ranks[] = {2, 3, 4};
    for (int i = 0; i < 3; i++) {
        same(ranks[i], FSDP_F32);
        same(ranks[i], FSDP_BF16);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c13),
                                       cmocka_unit_test(test_c13_hybrid)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
