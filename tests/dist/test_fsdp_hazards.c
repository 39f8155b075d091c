/*
 * test_fsdp_hazards.c - what users of FSDP2 run into on the side of gathers and reductions, and
 * cannot here: rows of the design's table that no other test shows.
 */
#include "comm/comm.h"
#include "sharded_net.h"

/* ---- a gathered unit exists once --------------------------------------------------------------
 */

/* FSDP2 gathers into one buffer and copies out of it. Here a gather takes the unit's bytes, once,
 * in the accounts and in the memory of the host; a reduction nothing but the shards' gradients. */
static fsdp_status once_rank(void *arg)
{
    int private_gather = *(int *)arg;
    fsdp_module *m = fsdp_linear_create(160, 96, 1);
    EXPECT(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.private_gather = private_gather;
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_group *g =
        fsdp_mesh_group(fsdp_dtensor_mesh(fsdp_param_tensor(fsdp_module_param(m, "weight"))), 0);
    for (int k = 0; k < 40; k++) { /* until all descriptions of collectives have their memory */
        EXPECT(fsdp_unshard(m) == FSDP_OK);
        EXPECT(fsdp_reshard(m) == FSDP_OK);
    }
    fsdp_memory_stats before, after;
    fsdp_memory_get(&before);
    fsdp_memory_reset_peak();
    EXPECT(fsdp_unshard(m) == FSDP_OK);
    fsdp_memory_get(&after);
    int64_t unit = 4 * (160 * 96 + 96), live, touched;
    EXPECT(after.live[FSDP_UNSHARDED] == unit);
    EXPECT(after.peak_total - before.live_total == unit);
    fsdp__shared_bytes(g, &live, &touched);
    EXPECT(live == (private_gather ? 0 : unit));
    EXPECT(fsdp_reshard(m) == FSDP_OK);
    fsdp_memory_get(&after);
    EXPECT(after.live_total == before.live_total);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_once(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int private = 0; private < 2; private ++)
            check_ok(fsdp_run_threads(ranks, once_rank, &private));
}

/* ---- a gradient after the unit's turn
 * --------------------------------------------------------------- */

typedef struct user {
    fsdp_module base;
    fsdp_module *block, *other;
    int kind; /* 0: uses the block's weight by hand, before it; 1, 2: which block runs */
} user;

static fsdp_tensor *user_forward(fsdp_module *self, fsdp_tensor *x)
{
    user *u = (user *)self;
    if (u->kind == 1) return fsdp_sum(fsdp_call(u->block, x));
    if (u->kind == 2) return fsdp_sum(fsdp_call(u->other, x));
    if (fsdp_unshard(u->block) != FSDP_OK) return NULL;
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(u->block, "weight")); /* (3,3) */
    return fsdp_sum(fsdp_call(u->block, fsdp_matmul(x, w)));
}

static fsdp_status use(int kind, int synced, fsdp_status *out)
{
    user *u = (user *)fsdp_module_create(sizeof *u, "User");
    EXPECT(u);
    u->base.forward1 = user_forward;
    u->kind = kind;
    u->block = fsdp_module_add(&u->base, "block", fsdp_linear_create(3, 3, 0));
    u->other = fsdp_module_add(&u->base, "other", fsdp_linear_create(3, 4, 0));
    EXPECT(fsdp_fully_shard(u->block, NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(u->other, NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&u->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&u->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_requires_gradient_sync(&u->base, synced, 1) == FSDP_OK);
    float x[3] = {1, 2, 3};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *in = fsdp_tensor_from_memory(x, FSDP_F32, 2, SIZES(1, 3), NULL, NULL, NULL);
    *out = fsdp_backward(fsdp_call(&u->base, in));
    fsdp_scope_end(scope);
    fsdp_module_free(&u->base);
    return *out;
}

static fsdp_status late_rank(void *arg)
{
    fsdp_status s;
    return use(0, *(int *)arg, &s);
}

/* FSDP2 drops it, or gives it to the next step's reduction. */
static void test_late(void **state)
{
    (void)state;
    int synced = 1;
    assert_int_not_equal(fsdp_run_threads(2, late_rank, &synced), FSDP_OK);
    /* Of the rank that comes first, or as its peer passes it on. */
    assert_non_null(strstr(fsdp_error_text(), "after the gradients of its unit \"block\" were"));
    fsdp_error_clear();
    synced = 0; /* nothing was reduced yet: it is in time */
    check_ok(fsdp_run_threads(2, late_rank, &synced));
}

/* ---- ranks that run different units
 * ------------------------------------------------------------------- */

static fsdp_status apart_rank(void *arg)
{
    (void)arg;
    fsdp_status s;
    return use(1 + fsdp_rank(), 1, &s);
}

/* FSDP2 hangs, or adds one unit's bytes to the other's. */
static void test_apart(void **state)
{
    (void)state;
    assert_int_not_equal(fsdp_run_threads(2, apart_rank, NULL), FSDP_OK);
    check_error(FSDP_MISMATCH, "all ranks must make the same calls in the same order");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_once),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
