/*
 * test_claims_c02.c - C02 and C04: a step of B blocks and a root takes B + 1
 * gathers forward and as many backward, none backward when parameters are
 * kept, B with the root's default, and B + 1 reductions; one gather a unit,
 * however many parameters it has.
 */
#include "sharded_net.h"

typedef struct calls {
    int64_t forward, backward, reduce;
} calls;

static fsdp_status hook(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)m;
    (void)in;
    (void)out;
    ((calls *)arg)->forward = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    return FSDP_OK;
}

static fsdp_status prepare(net_run *r, net *n)
{
    calls *c = (calls *)r->arg + fsdp_rank();
    return fsdp_register_forward_hook(&n->base, hook, c, 0) < 0 ? fsdp_error() : FSDP_OK;
}

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    calls *c = (calls *)r->arg + fsdp_rank();
    c->backward = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls - c->forward;
    c->reduce = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).calls;
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static void expect(int blocks, fsdp_reshard_policy policy, int forward, int backward)
{
    for (int steps = 1; steps < 4; steps++) { /* prefetching starts in the second */
        calls c[4] = {{0, 0, 0}};
        net_run r = {.ranks = 4,
                     .blocks = blocks,
                     .rows = 8,
                     .steps = steps,
                     .policy = policy,
                     .prefetch = 0,
                     .prepare = prepare,
                     .look = look,
                     .arg = c};
        net_go(&r);
        net_free(&r);
        for (int k = 0; k < 4; k++) {
            assert_int_equal(c[k].forward, forward);
            assert_int_equal(c[k].backward, backward);
            assert_int_equal(c[k].reduce, blocks + 1);
        }
        /* Gathered ahead, a forward may have started the backward's first: the sum stays. */
        r.prefetch = 2;
        net_go(&r);
        net_free(&r);
        for (int k = 0; k < 4; k++) {
            assert_int_equal(c[k].forward + c[k].backward, forward + backward);
            assert_int_equal(c[k].reduce, blocks + 1);
        }
    }
}

static void test_c02(void **state)
{
    (void)state;
    for (int blocks = 3; blocks <= 8; blocks += 5) {
        expect(blocks, FSDP_RESHARD_ALWAYS, blocks + 1, blocks + 1);
        expect(blocks, FSDP_RESHARD_NEVER, blocks + 1, 0);
        expect(blocks, FSDP_RESHARD_AUTO, blocks + 1, blocks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c02)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
