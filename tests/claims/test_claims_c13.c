/*
 * test_claims_c13.c - C13: NO_SHARD, SHARD_GRAD_OP and FULL_SHARD train alike,
 * to the bit, for 50 steps, in fp32 and with bf16 parameters reduced in fp32.
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
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c13)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
