/*
 * test_fsdp_parity.c - a sharded net trains as the same net on one rank, on any
 * number of ranks and with every strategy; what must not change a bit does not.
 */
#include "sharded_net.h"

static const net_run base = {
    .ranks = 1, .blocks = 3, .rows = 24, .steps = 10, .policy = FSDP_RESHARD_ALWAYS, .prefetch = 1};

static net_run plain;

static int make_plain(void **state)
{
    (void)state;
    plain = base;
    plain.mesh = NET_PLAIN;
    net_go(&plain);
    return 0;
}

static int free_plain(void **state)
{
    (void)state;
    net_free(&plain);
    return 0;
}

static const int ranks[] = {1, 2, 3, 4, 8};

/* FULL_SHARD, NO_SHARD and SHARD_GRAD_OP on N ranks: the same bits; against one rank, close. */
static void test_strategies(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++) {
        net_run full = base, other = base;
        char what[64];
        full.ranks = other.ranks = ranks[i];
        net_go(&full);
        snprintf(what, sizeof what, "%d ranks beside one", ranks[i]);
        net_close(&full, &plain, 2e-5, what);
        if (ranks[i] == 1) net_same(&full, &plain, what);
        for (int k = 0; k < 3; k++) {
            other = full;
            other.mesh = k == 2 ? NET_REPLICATE : NET_SHARD;
            other.policy = k == 0 ? FSDP_RESHARD_AUTO : FSDP_RESHARD_NEVER;
            net_go(&other);
            snprintf(what, sizeof what, "%d ranks, strategy %d", ranks[i], k);
            net_same(&other, &full, what);
            net_free(&other);
        }
        net_free(&full);
    }
}

static void test_hybrid(void **state)
{
    (void)state;
    net_run full = base, hybrid = base;
    full.ranks = hybrid.ranks = 4;
    hybrid.mesh = NET_HYBRID;
    hybrid.replicas = 2;
    net_go(&full);
    net_go(&hybrid);
    net_same(&hybrid, &full, "2 x 2"); /* powers of two: one tree of sums */
    net_free(&hybrid);
    hybrid.policy = FSDP_RESHARD_NEVER;
    net_go(&hybrid);
    net_same(&hybrid, &full, "2 x 2, kept");
    net_free(&hybrid);
    hybrid.ranks = 6;
    hybrid.replicas = 2;
    net_go(&hybrid);
    net_close(&hybrid, &plain, 2e-5, "2 x 3");
    net_free(&hybrid);
    net_free(&full);
}

/* Prefetching, private copies and where parameters are cut. */
static void test_no_bit(void **state)
{
    (void)state;
    for (int i = 1; i < 5; i++) {
        net_run full = base, other;
        full.ranks = ranks[i];
        full.prefetch = 0;
        full.steps = 4;
        net_go(&full);
        for (int k = 0; k < 5; k++) {
            char what[64];
            other = full;
            if (k < 3) other.prefetch = k + 1;
            if (k >= 3) other.private_gather = 1, other.prefetch = k - 3;
            net_go(&other);
            snprintf(what, sizeof what, "%d ranks, way %d", ranks[i], k);
            net_same(&other, &full, what);
            net_free(&other);
        }
        for (int private = 0; private < 2; private ++) {
            other = full;
            other.dim1 = 1;
            other.private_gather = private;
            other.no_clip = 1; /* rows that are cut are summed in another order */
            net_run rows = full;
            rows.no_clip = 1;
            net_go(&other);
            net_go(&rows);
            net_same(&other, &rows, "cut along dim 1");
            net_free(&other);
            net_free(&rows);
            other.no_clip = 0;
            net_go(&other);
            net_close(&other, &full, 1e-5, "cut along dim 1, clipped");
            net_free(&other);
        }
        net_free(&full);
    }
}

static void test_mixed_precision(void **state)
{
    (void)state;
    for (int i = 0; i < 5; i++) {
        net_run full = base, other;
        full.ranks = ranks[i];
        full.param_dtype = FSDP_BF16;
        full.reduce_dtype = FSDP_F32;
        net_go(&full);
        for (int s = 0; s < full.steps; s++)
            assert_true(fabs(full.loss[s] / plain.loss[s] - 1) < 0.05);
        assert_true(net_distance(full.grads, plain.grads, plain.numel) < 0.05);
        assert_true(net_distance(full.grads, plain.grads, plain.numel) > 1e-5); /* it was bf16 */
        for (int k = 0; k < 3; k++) {
            other = full;
            if (k == 0) other.policy = FSDP_RESHARD_NEVER;
            if (k == 1) other.mesh = NET_REPLICATE;
            if (k == 2) other.private_gather = 1;
            net_go(&other);
            net_same(&other, &full, "bf16");
            net_free(&other);
        }
        other = full;
        other.reduce_dtype = FSDP_DTYPE_NONE; /* reduced in bf16 */
        net_go(&other);
        assert_true(net_distance(other.grads, plain.grads, plain.numel) < 0.05);
        net_free(&other);
        net_free(&full);
    }
}

/* Microbatches: reduced each or once, a step is the same but for rounding. */
static void test_accumulation(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++)
        for (int mesh = 0; mesh < 3; mesh++)
            for (int sync = 0; sync < 2; sync++) {
                net_run r = base;
                char what[64];
                r.ranks = ranks[i];
                r.micro = 2;
                r.sync = sync;
                r.mesh = mesh == 0 ? NET_SHARD : mesh == 1 ? NET_REPLICATE : NET_HYBRID;
                r.replicas = 2;
                if (r.mesh == NET_HYBRID && r.ranks != 4) continue;
                snprintf(what, sizeof what, "%d ranks, mesh %d, sync %d", r.ranks, mesh, sync);
                net_go(&r);
                net_close(&r, &plain, 2e-5, what);
                net_free(&r);
            }
}

static void test_frozen(void **state)
{
    (void)state;
    net_run one = base, r;
    one.mesh = NET_PLAIN;
    one.frozen = 1;
    net_go(&one);
    assert_true(net_distance(one.params, plain.params, plain.numel) > 1e-3);
    for (int i = 0; i < 4; i++)
        for (int mesh = 0; mesh < 2; mesh++) {
            r = base;
            r.ranks = ranks[i];
            r.frozen = 1;
            r.mesh = mesh ? NET_REPLICATE : NET_SHARD;
            net_go(&r);
            net_close(&r, &one, 2e-5, "frozen");
            net_free(&r);
        }
    net_free(&one);
}

/* One unit for the whole model; and no block at all. */
static void test_units(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++) {
        net_run a = base, b = base;
        a.ranks = b.ranks = ranks[i];
        b.whole = 1;
        net_go(&a);
        net_go(&b);
        net_same(&b, &a, "one unit");
        net_free(&a);
        net_free(&b);
        a.blocks = 0;
        net_go(&a);
        net_free(&a);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strategies),   cmocka_unit_test(test_hybrid),
        cmocka_unit_test(test_no_bit),       cmocka_unit_test(test_mixed_precision),
        cmocka_unit_test(test_accumulation), cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_units),
    };
    return cmocka_run_group_tests(tests, make_plain, free_plain);
}
