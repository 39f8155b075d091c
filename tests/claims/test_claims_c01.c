/*
 * test_claims_c01.c - C01: a step moves 2P elements a rank with replicas and
 * with kept parameters, 3P with parameters that are freed, times (N-1)/N.
 *
 * Counted by lane, each exactly: gathers (N-1)/N of P each, reduce-scatters
 * the same, the all-reduce of replicas twice that. P is that of the blocks and
 * of the root apart, since the root's parameters go by their own rule. Where a
 * dim does not divide by N, elements are those really received.
 */
#include "sharded_net.h"

typedef struct counts {
    int64_t gather, reduce, replicate; /* of one step, elements */
    int64_t numel;
} counts;

static fsdp_status look(net_run *r, net *n, int step)
{
    counts *c = (counts *)r->arg + fsdp_rank();
    c->gather = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).elements;
    c->reduce = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).elements;
    c->replicate = fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).elements;
    c->numel = fsdp_module_numel(&n->base);
    (void)step;
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static void measure(int ranks, net_mesh mesh, fsdp_reshard_policy policy, counts *sum)
{
    counts c[8] = {{0, 0, 0, 0}};
    net_run r = {.ranks = ranks,
                 .blocks = 3,
                 .rows = 8,
                 .steps = 3,
                 .mesh = mesh,
                 .policy = policy,
                 .prefetch = 1,
                 .look = look,
                 .arg = c};
    net_go(&r);
    net_free(&r);
    *sum = (counts){0, 0, 0, c[0].numel};
    for (int k = 0; k < ranks; k++) {
        sum->gather += c[k].gather;
        sum->reduce += c[k].reduce;
        sum->replicate += c[k].replicate;
    }
}

/* Over all ranks a gather brings each element to the N - 1 ranks that lack it. */
static void test_c01(void **state)
{
    (void)state;
    for (int n = 2; n <= 4; n += 2) {
        counts c;
        measure(n, NET_SHARD, FSDP_RESHARD_ALWAYS, &c);
        assert_int_equal(c.gather, 2 * c.numel * (n - 1));
        assert_int_equal(c.reduce, c.numel * (n - 1));
        assert_int_equal(c.replicate, 0);
        measure(n, NET_SHARD, FSDP_RESHARD_NEVER, &c);
        assert_int_equal(c.gather, c.numel * (n - 1));
        assert_int_equal(c.reduce, c.numel * (n - 1));
        assert_int_equal(c.replicate, 0);
        measure(n, NET_REPLICATE, FSDP_RESHARD_ALWAYS, &c);
        assert_int_equal(c.gather, 0);
        assert_int_equal(c.reduce, 0);
        assert_int_equal(c.replicate, 2 * c.numel * (n - 1));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c01)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
