/*
 * test_claims_c11.c - C11: a model made on the meta device is sharded before it
 * has memory, and no rank ever holds the whole of it.
 */
#include "sharded_net.h"

typedef struct seen {
    int64_t peak, own, whole, rows[4], columns[4];
} seen;

static fsdp_status rank_main(void *arg)
{
    seen *s = (seen *)arg + fsdp_rank();
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    fsdp_memory_reset_peak();
    int64_t before = m.live_total;
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    net *n = net_create(8);
    fsdp_module *eight = fsdp_linear_create(8, 8, 0);
    fsdp_device_pop();
    EXPECT(n && eight);
    EXPECT(fsdp_tensor_device(fsdp_param_tensor(fsdp_module_param(n->head, "weight"))) ==
           FSDP_META);
    fsdp_memory_get(&m);
    EXPECT(m.peak_total == before);
    EXPECT(fsdp_fully_shard(eight, NULL) == FSDP_OK);
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(eight, "weight"));
    s->rows[0] = fsdp_size(w, 0);
    s->columns[0] = fsdp_size(w, 1);
    fsdp_module_free(eight);
    for (int i = 0; i < 8; i++)
        EXPECT(fsdp_fully_shard(n->block[i], NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    EXPECT(fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_memory_get(&m);
    /* What comm stages its messages in is no part of a model. */
    for (int k = 0; k < FSDP_PURPOSE_COUNT; k++)
        s->peak += k == FSDP_COMMUNICATION ? 0 : m.peak[k];
    s->own = m.live[FSDP_PARAMETERS];
    s->whole = 4 * fsdp_module_numel(&n->base);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_c11(void **state)
{
    (void)state;
    seen s[4] = {{0, 0, 0, {0}, {0}}};
    check_ok(fsdp_run_threads(2, rank_main, s));
    for (int r = 0; r < 2; r++) {
        assert_int_equal(s[r].rows[0], 4);
        assert_int_equal(s[r].columns[0], 8);
        assert_int_equal(s[r].peak, s[r].own); /* nothing but the shards */
    }
    assert_int_equal(s[0].own + s[1].own, s[0].whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c11)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
