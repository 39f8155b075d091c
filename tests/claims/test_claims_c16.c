/*
 * test_claims_c16.c - C16: mixed precision. Gathers in bf16 move half the bytes; reductions stay
 * fp32, and so do the weights that are updated: 1.0 and 100 steps of 6e-4 times a gradient of 1
 * give 0.94, where bf16 weights would not move at all. And 512 microbatches accumulate to the fp32
 * sum. (RC-24, RC-25; the rotary tables of RC-24 are in tests/unit/test_models_rope.c.)
 */
#include "sharded_net.h"

/* ---- bytes ---------------------------------------------------------------------------------- */

typedef struct bytes {
    int64_t gather, reduce; /* of the last step, of rank 0 */
    fsdp_dtype master, gradient;
} bytes;

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)step;
    if (fsdp_rank() == 0) {
        bytes *b = r->arg;
        fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(n->head, "weight"));
        b->gather = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).bytes_copied;
        b->reduce = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).bytes_copied;
        b->master = fsdp_tensor_dtype(t);
        b->gradient = fsdp_tensor_dtype(fsdp_grad(t));
    }
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static void test_bytes(void **state)
{
    (void)state;
    for (int private = 0; private < 2; private ++)
        for (int n = 2; n <= 4; n++) {
            bytes full, half;
            net_run r = {.ranks = n,
                         .blocks = 2,
                         .rows = 12,
                         .steps = 2,
                         .look = look,
                         .policy = FSDP_RESHARD_ALWAYS,
                         .private_gather = private,
                         .arg = &full};
            net_go(&r);
            net_free(&r);
            r.param_dtype = FSDP_BF16;
            r.arg = &half;
            net_go(&r);
            net_free(&r);
            assert_true(full.gather > 0);
            assert_int_equal(full.gather, 2 * half.gather);
            assert_int_equal(full.reduce, half.reduce);
            assert_int_equal(half.master, FSDP_F32);
            assert_int_equal(half.gradient, FSDP_F32);
        }
}

/* ---- a weight that moves ------------------------------------------------------------------------
 */

typedef struct one_weight {
    fsdp_dtype master, reduce;
    int micro; /* 0: 100 steps; else so many microbatches, of which one is 1 and the rest 2^-9 */
    int sync;
    double value; /* the weight, or its gradient */
} one_weight;

/* Gradient of the one weight: x, since y = w x. */
static fsdp_status backward(fsdp_module *m, float x)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *in = fsdp_tensor_from_memory(&x, FSDP_F32, 2, SIZES(1, 1), NULL, NULL, NULL);
    fsdp_status s = fsdp_backward(fsdp_sum(fsdp_cast(fsdp_call(m, in), FSDP_F32)));
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status read_first(const one_weight *o, fsdp_tensor *t, double *v)
{
    (void)o;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *full = t ? fsdp_dtensor_full(t) : NULL;
    fsdp_status s = full ? fsdp_to_doubles(full, v) : fsdp_error();
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status weight_rank(void *arg)
{
    one_weight *o = arg;
    fsdp_module *m = fsdp_linear_create(1, 1, 0);
    EXPECT(m);
    if (o->master == FSDP_BF16) EXPECT(fsdp_module_to_dtype(m, FSDP_BF16) == FSDP_OK);
    fsdp_shard_options s = fsdp_shard_defaults(NULL);
    s.mp_policy.param_dtype = FSDP_BF16;
    s.mp_policy.reduce_dtype = o->reduce;
    EXPECT(fsdp_fully_shard(m, &s) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    EXPECT(fsdp_fill_(fsdp_param_tensor(fsdp_module_param(m, "weight")), 1.0) == FSDP_OK);
    EXPECT(fsdp_mark_changed(m) == FSDP_OK);
    fsdp_sgd_options a = {6e-4, 0, 0, 0};
    fsdp_optimizer *sgd = fsdp_sgd(m, &a);
    EXPECT(sgd);
    double v = 0;
    for (int k = 0; k < 100 && !o->micro; k++) {
        EXPECT(backward(m, 1.0f) == FSDP_OK);
        EXPECT(fsdp_optimizer_step(sgd) == FSDP_OK);
        EXPECT(fsdp_zero_grad(m) == FSDP_OK);
    }
    for (int k = 0; k < o->micro; k++) {
        EXPECT(fsdp_set_requires_gradient_sync(m, o->sync || k == o->micro - 1, 1) == FSDP_OK);
        EXPECT(backward(m, k == 0 ? 1.0f : 1.0f / 512) == FSDP_OK);
    }
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(m, "weight"));
    EXPECT(read_first(o, o->micro ? fsdp_grad(t) : t, &v) == FSDP_OK);
    if (fsdp_rank() == 0) o->value = v;
    fsdp_optimizer_free(sgd);
    fsdp_module_free(m);
    return FSDP_OK;
}

static double value_of(int ranks, one_weight o)
{
    check_ok(fsdp_run_threads(ranks, weight_rank, &o));
    return o.value;
}

static void test_master(void **state)
{
    (void)state;
    for (int n = 1; n <= 3; n++) {
        one_weight o = {FSDP_F32, FSDP_F32, 0, 0, 0};
        assert_true(fabs(value_of(n, o) - 0.94) < 5e-6);
        o.master = FSDP_BF16; /* asked for by name: 6e-4 is less than half a step of bf16 */
        assert_true(value_of(n, o) == 1.0);
    }
}

/* 1 + 511 / 512, exactly; in bf16 the small ones would be lost. */
static void test_512(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++)
        for (int sync = 0; sync < 2; sync++) {
            one_weight o = {FSDP_F32, FSDP_F32, 512, sync, 0};
            assert_true(value_of(n, o) == 1.0 + 511.0 / 512);
            if (sync) continue; /* shards are fp32, so reducing each keeps them all the same */
            o.reduce = FSDP_BF16;
            assert_true(value_of(n, o) < 1.5);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_master),
        cmocka_unit_test(test_512),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
