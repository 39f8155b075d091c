/*
 * test_claims_c27.c - C27: with an integer reshard_after_forward of 2 on 4 ranks, forward gathers
 * over all of them, and backward only within groups of 2.
 */
#include "sharded_net.h"

typedef struct counts {
    int64_t all, calls;       /* elements and calls over all ranks */
    int64_t total, all_calls; /* over whichever group */
    int64_t numel;
} counts;

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)step;
    counts *c = (counts *)r->arg + fsdp_rank();
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(n->head, "weight"));
    fsdp_comm_count a = fsdp_comm_count_get(fsdp_mesh_group(fsdp_dtensor_mesh(t), 0),
                                            FSDP_LANE_GATHER, FSDP_ALL_GATHER);
    fsdp_comm_count b = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER);
    *c = (counts){a.elements, a.calls, b.elements, b.calls, fsdp_module_numel(&n->base)};
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static void test_c27(void **state)
{
    (void)state;
    for (int private = 0; private < 2; private ++) {
        counts c[4] = {{0, 0, 0, 0, 0}};
        net_run r = {.ranks = 4,
                     .blocks = 3,
                     .rows = 8,
                     .steps = 3,
                     .reshard_ranks = 2,
                     .private_gather = private,
                     .prefetch = 1,
                     .look = look,
                     .arg = c};
        net_go(&r);
        net_free(&r);
        int64_t all = 0, total = 0;
        for (int k = 0; k < 4; k++) {
            assert_int_equal(c[k].calls, r.blocks + 1);
            assert_int_equal(c[k].all_calls, 2 * (r.blocks + 1));
            all += c[k].all;
            total += c[k].total;
        }
        assert_int_equal(all, 3 * c[0].numel);
        assert_int_equal(total - all, 2 * c[0].numel); /* two groups, each of which moves it once */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c27)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
