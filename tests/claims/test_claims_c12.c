/*
 * test_claims_c12.c - C12: the same weights on any number of ranks, however
 * they are cut, and as on one rank without sharding.
 */
#include "sharded_net.h"

static void test_c12(void **state)
{
    (void)state;
    net_run one = {.ranks = 1, .blocks = 3, .rows = 24, .mesh = NET_PLAIN};
    net_go(&one);
    assert_true(one.numel > 0);
    const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++)
        for (int way = 0; way < 4; way++) {
            net_run r = {.ranks = ranks[i], .blocks = 3, .rows = 24};
            r.dim1 = way == 1;
            r.mesh = way == 2 ? NET_REPLICATE : NET_SHARD;
            r.whole = way == 3;
            net_go(&r);
            assert_int_equal(r.numel, one.numel);
            assert_memory_equal(r.params, one.params, (size_t)r.numel * sizeof *r.params);
            net_free(&r);
        }
    net_free(&one);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c12)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
