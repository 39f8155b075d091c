/*
 * test_claims_c04.c - C04: four units, each a weight and a bias, take four
 * gathers in forward.
 */
#include "sharded_net.h"

static fsdp_status rank_main(void *arg)
{
    int64_t *gathers = arg;
    fsdp_module *m = fsdp_sequential_create();
    for (int i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        fsdp_module *l = fsdp_module_add(m, name, fsdp_linear_create(7, 7, 1));
        EXPECT(l && fsdp_fully_shard(l, NULL) == FSDP_OK);
    }
    EXPECT(fsdp_fully_shard(m, NULL) == FSDP_OK); /* a root with no parameter of its own */
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_comm_count_reset();
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(3, 7), 1)));
    gathers[fsdp_rank()] = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_c04(void **state)
{
    (void)state;
    int64_t gathers[4] = {0};
    check_ok(fsdp_run_threads(4, rank_main, gathers));
    for (int r = 0; r < 4; r++)
        assert_int_equal(gathers[r], 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c04)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
