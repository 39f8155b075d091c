/*
 * test_claims_c17.c - C17: an evaluation under no_grad gathers each unit once,
 * reduces nothing and keeps no graph; activation bytes are back to zero, and
 * nothing stays gathered.
 */
#include "sharded_net.h"

typedef struct counts {
    int blocks;
    fsdp_reshard_policy policy;
    int prefetch;
} counts;

static int64_t live(fsdp_purpose p)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    return s.live[p];
}

static int64_t peak_activations(void)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    return s.peak[FSDP_ACTIVATIONS];
}

static int64_t reductions(void)
{
    return fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).calls +
           fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).calls;
}

/* A forward, and a backward if asked; *peak: of activations. */
static fsdp_status forward(net *n, int train, int64_t *peak)
{
    net_run r = {.ranks = 1, .rows = 64};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x, *y;
    EXPECT(net_batch(&r, 0, 0, 64, &x, &y) == FSDP_OK);
    int64_t before = live(FSDP_ACTIVATIONS);
    fsdp_memory_reset_peak();
    if (!train) fsdp_no_grad_begin();
    fsdp_tensor *loss = fsdp_call2(&n->base, x, y);
    if (!train) fsdp_no_grad_end();
    EXPECT(loss && fsdp_requires_grad(loss) == train);
    *peak = peak_activations() - before;
    if (train) {
        EXPECT(fsdp_backward(loss) == FSDP_OK && fsdp_zero_grad(&n->base) == FSDP_OK);
    } else { /* nothing but the loss is left */
        EXPECT(live(FSDP_ACTIVATIONS) == before + (int64_t)sizeof(float));
    }
    fsdp_scope_end(scope);
    EXPECT(live(FSDP_ACTIVATIONS) == 0);
    return FSDP_OK;
}

static fsdp_status rank_main(void *arg)
{
    const counts *c = arg;
    net *n = net_create(c->blocks);
    EXPECT(n);
    net_run r = {.ranks = fsdp_world_size(), .policy = c->policy, .prefetch = c->prefetch};
    EXPECT(net_shard(&r, n) == FSDP_OK && fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    int64_t train, eval, units = c->blocks + 1, gathers = 0;
    EXPECT(forward(n, 1, &train) == FSDP_OK);
    for (int k = 0; k < 3; k++) { /* from the second on by the recorded order */
        EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK); /* what was kept is stale */
        fsdp_comm_count_reset();
        EXPECT(forward(n, 0, &eval) == FSDP_OK);
        gathers = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
        EXPECT(gathers == units && reductions() == 0);
        EXPECT(c->policy == FSDP_RESHARD_NEVER || live(FSDP_UNSHARDED) == 0);
        EXPECT(live(FSDP_GRADIENTS) == 0 && eval < train / 2);
    }
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_c17(void **state)
{
    (void)state;
    for (int blocks = 4; blocks <= 8; blocks += 4)
        for (int policy = 0; policy < 3; policy++)
            for (int prefetch = 0; prefetch < 3; prefetch++) {
                counts c = {blocks, (fsdp_reshard_policy)policy, prefetch};
                check_ok(fsdp_run_threads(4, rank_main, &c));
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c17)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
