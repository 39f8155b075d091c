/*
 * test_claims_c03.c - C03: activation checkpointing adds no gather: three blocks take 3 + 3 with it
 * and without, inside the units and around them.
 */
#include "sharded_net.h"

enum { BLOCKS = 3, RANKS = 2 };
enum { NONE, INSIDE, AROUND };

typedef struct counts {
    int how;
    int64_t forward[RANKS], backward[RANKS];
    double loss[RANKS];
} counts;

/* A unit, called by way of a checkpoint or not. */
typedef struct holder {
    fsdp_module base;
    fsdp_module *block;
} holder;

static fsdp_tensor *holder_forward(fsdp_module *self, fsdp_tensor *x)
{
    return fsdp_call(((holder *)self)->block, x);
}

static int64_t gathers(void)
{
    int64_t n = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    fsdp_comm_count_reset();
    return n;
}

static fsdp_status rank_main(void *arg)
{
    counts *c = arg;
    int r = fsdp_rank();
    fsdp_module *m = fsdp_sequential_create();
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    for (int i = 0; i < BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        holder *h = (holder *)fsdp_module_create(sizeof *h, "Holder");
        EXPECT(h);
        h->base.forward1 = holder_forward;
        h->block = fsdp_module_add(&h->base, "block", net_block_create());
        EXPECT(fsdp_module_add(m, name, &h->base));
        if (c->how == INSIDE) EXPECT(fsdp_checkpoint_module(h->block, NULL) == FSDP_OK);
        if (c->how == AROUND) EXPECT(fsdp_checkpoint_module(&h->base, NULL) == FSDP_OK);
        EXPECT(fsdp_fully_shard(h->block, &o) == FSDP_OK);
    }
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK); /* a root with no parameter of its own */
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    for (int step = 0; step < 3; step++) { /* the order recorded, then gathered ahead by it */
        fsdp_comm_count_reset();
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *y = fsdp_call(m, fsdp_randn(FSDP_F32, 2, SIZES(3, NET_C), 1, "x"));
        fsdp_tensor *loss = fsdp_sum(fsdp_mul(y, y));
        EXPECT(loss);
        c->loss[r] = fsdp_item(loss);
        c->forward[r] = gathers();
        EXPECT(fsdp_backward(loss) == FSDP_OK);
        c->backward[r] = gathers();
        fsdp_scope_end(scope);
        /* A gather ahead may fall into the forward: only the sum is fixed then. */
        EXPECT(c->forward[r] + c->backward[r] == 2 * BLOCKS);
        EXPECT(step > 0 || c->forward[r] == BLOCKS);
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_c03(void **state)
{
    (void)state;
    counts c[3] = {{.how = NONE}, {.how = INSIDE}, {.how = AROUND}};
    for (int k = 0; k < 3; k++) {
        check_ok(fsdp_run_threads(RANKS, rank_main, &c[k]));
        assert_memory_equal(c[k].loss, c[0].loss, sizeof c[k].loss);
        assert_memory_equal(c[k].forward, c[0].forward, sizeof c[k].forward);
        assert_memory_equal(c[k].backward, c[0].backward, sizeof c[k].backward);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c03)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
