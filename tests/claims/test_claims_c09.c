/*
 * test_claims_c09.c - C09: with one Linear a unit there are as many gathers as
 * Linears, each small, and the loss is the same to the bit.
 */
#include "sharded_net.h"

/* ---- the count ------------------------------------------------------------------------ */

typedef struct chain {
    int linears, whole;
    int64_t forward, step, elements; /* gathers; elements of all in a step */
} chain;

static fsdp_status chain_rank(void *arg)
{
    chain *c = arg;
    fsdp_module *m = fsdp_sequential_create();
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = 0;
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    for (int i = 0; i < c->linears; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        fsdp_module *lin = fsdp_module_add(m, name, fsdp_linear_create(8, 8, 1));
        EXPECT(lin && (c->whole || fsdp_fully_shard(lin, &o) == FSDP_OK));
    }
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(2, 8), 1, "x");
    fsdp_comm_count_reset();
    fsdp_tensor *y = fsdp_mean(fsdp_call(m, x));
    int64_t forward = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    EXPECT(fsdp_backward(y) == FSDP_OK);
    fsdp_comm_count all = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER);
    if (fsdp_rank() == 0) {
        c->forward = forward;
        c->step = all.calls;
        c->elements = all.elements;
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_count(void **state)
{
    (void)state;
    for (int linears = 3; linears <= 12; linears *= 2) {
        chain each = {.linears = linears}, one = {.linears = linears, .whole = 1};
        check_ok(fsdp_run_threads(4, chain_rank, &each));
        check_ok(fsdp_run_threads(4, chain_rank, &one));
        assert_int_equal(each.forward, linears);
        assert_int_equal(each.step, 2 * linears);
        assert_int_equal(one.forward, 1);
        assert_int_equal(one.step, 2);
        assert_int_equal(each.elements, one.elements); /* many small ones move the same */
    }
}

/* ---- the loss --------------------------------------------------------------------------- */

/* in, each block's up and down, head; the norms and the root's rest are the root's. */
static fsdp_status each_linear(net_run *r, net *n, fsdp_shard_options *o)
{
    (void)r;
    EXPECT(fsdp_fully_shard(n->in, o) == FSDP_OK);
    for (int i = 0; i < n->n_blocks; i++)
        for (int k = 1; k < 3; k++)
            EXPECT(fsdp_fully_shard(fsdp_module_child(n->block[i], k), o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(n->head, o) == FSDP_OK);
    return fsdp_fully_shard(&n->base, o);
}

static void test_loss(void **state)
{
    (void)state;
    for (int prefetch = 0; prefetch < 3; prefetch++) {
        net_run blocks = {.ranks = 4, .blocks = 3, .rows = 16, .steps = 6, .prefetch = prefetch};
        net_run linears = blocks, whole = blocks;
        linears.shard = each_linear;
        whole.whole = 1;
        net_go(&blocks);
        net_go(&linears);
        net_go(&whole);
        net_same(&linears, &blocks, "one Linear a unit");
        net_same(&whole, &blocks, "one unit");
        net_free(&blocks);
        net_free(&linears);
        net_free(&whole);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_count), cmocka_unit_test(test_loss)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
