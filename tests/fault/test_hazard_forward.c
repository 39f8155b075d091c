/*
 * test_hazard_forward.c - what users of FSDP2 run into on the side of the
 * forward, and cannot here: rows of the design's table of hazards, order
 * mistakes, and statements of common texts that are wrong.
 */
#include "sharded_net.h"

#include "fsdp/unit.h"

static int64_t unsharded(void)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    return s.live[FSDP_UNSHARDED];
}

static fsdp_status shard(net *n, fsdp_reshard_policy policy, int prefetch)
{
    net_run r = {.ranks = fsdp_world_size(), .policy = policy, .prefetch = prefetch};
    return net_shard(&r, n);
}

static fsdp_tensor *forward(net *n, int step)
{
    net_run r = {.ranks = 1, .rows = 4};
    fsdp_tensor *x, *y;
    if (net_batch(&r, step, 0, 4, &x, &y) != FSDP_OK) return NULL;
    return fsdp_call2(&n->base, x, y);
}

/* ---- the root after a forward under no_grad ------------------------------------------------ */

/* FSDP2's root stays whole then, and computes with the old weights after a step. */
static fsdp_status stale(void *arg)
{
    fsdp_reshard_policy policy = *(fsdp_reshard_policy *)arg;
    net *n = net_create(2), *fresh = net_create(2);
    EXPECT(n && fresh && shard(n, policy, 1) == FSDP_OK && shard(fresh, policy, 1) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&fresh->base, 2) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    fsdp_tensor *before = forward(n, 0), *expected = forward(fresh, 0);
    EXPECT(before && expected && fsdp_item(before) != fsdp_item(expected));
    EXPECT(policy == FSDP_RESHARD_NEVER || unsharded() == 0);
    EXPECT(fsdp_reset_parameters(&n->base, 2) == FSDP_OK); /* every shard changes */
    fsdp_tensor *after = forward(n, 0);
    fsdp_no_grad_end();
    EXPECT(after && fsdp_item(after) == fsdp_item(expected));
    fsdp_tensor *train = forward(n, 0);
    EXPECT(train && fsdp_item(train) == fsdp_item(expected));
    EXPECT(fsdp_backward(train) == FSDP_OK);
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    fsdp_module_free(&fresh->base);
    return FSDP_OK;
}

static void test_stale(void **state)
{
    (void)state;
    for (int policy = 0; policy < 3; policy++)
        for (int ranks = 1; ranks <= 4; ranks++) {
            fsdp_reshard_policy p = (fsdp_reshard_policy)policy;
            check_ok(fsdp_run_threads(ranks, stale, &p));
        }
}

/* ---- orders that are noted ------------------------------------------------------------------ */

static void count_ahead(void *arg, fsdp_event_kind k, const char *unit)
{
    (void)unit;
    *(int *)arg += k == FSDP_EVENT_PREFETCH;
}

/* FSDP2's order of ended forwards grows under no_grad; its prefetch by default is no more than that
 * the CPU runs ahead. Here the first step is recorded, and gathered by from then on. */
static fsdp_status orders(void *arg)
{
    (void)arg;
    net *n = net_create(4);
    int ahead = 0;
    EXPECT(n && shard(n, FSDP_RESHARD_ALWAYS, 1) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_event_hook(&n->base, count_ahead, &ahead) == FSDP_OK);
    fsdp__tree *t = fsdp__unit_of(&n->base)->tree;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    for (int k = 0; k < 50; k++) {
        EXPECT(forward(n, k) && t->n_post == 0 && t->eval.count == 5);
        EXPECT(ahead == 4 * k);
    }
    fsdp_no_grad_end();
    for (int k = 0; k < 2000; k++) /* with a backward that never comes: bounded */
        EXPECT(forward(n, 0) && t->n_post <= 4096 + 16 * 5 + 5);
    fsdp_scope_end(scope);
    EXPECT(fsdp_reset_iteration(&n->base) == FSDP_OK && t->n_post == 0);
    for (int k = 0; k < 3; k++) {
        ahead = 0;
        scope = fsdp_scope_begin();
        EXPECT(fsdp_backward(forward(n, k)) == FSDP_OK && t->n_post == 0);
        fsdp_scope_end(scope);
        EXPECT(ahead == (k ? 8 : 0));
    }
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_orders(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(2, orders, NULL));
}

/* ---- any dim, any size, any ranks -------------------------------------------------------------
 */

typedef struct shapes {
    fsdp_module base;
    int ndim;
    int64_t sizes[3];
    int dim, private_gather;
} shapes;

static fsdp_tensor *sum_of(fsdp_module *self, fsdp_tensor *x)
{
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(self, "weight"));
    return fsdp_sum(fsdp_mul(fsdp_mul(w, w), x));
}

static int this_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)name;
    (void)p;
    return ((shapes *)arg)->dim;
}

static fsdp_status cut(void *arg)
{
    shapes s = *(shapes *)arg;
    fsdp_init_rule normal = {FSDP_INIT_NORMAL, 0, 1};
    fsdp_module *m = fsdp_module_create(sizeof *m, "Any"),
                *whole = fsdp_module_create(sizeof *m, "Any");
    EXPECT(m && whole);
    m->forward1 = whole->forward1 = sum_of;
    fsdp_module_add_param(m, "weight", fsdp_param_create(FSDP_F32, s.ndim, s.sizes, normal));
    fsdp_module_add_param(whole, "weight", fsdp_param_create(FSDP_F32, s.ndim, s.sizes, normal));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.placement_fn = this_dim;
    o.placement_arg = &s;
    o.private_gather = s.private_gather;
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(whole, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_full(FSDP_F32, 0, NULL, 0.5);
    fsdp_tensor *a = fsdp_call(m, x), *b = fsdp_call(whole, x);
    EXPECT(a && b && fsdp_item(a) == fsdp_item(b));
    EXPECT(fsdp_backward(a) == FSDP_OK && fsdp_backward(b) == FSDP_OK);
    fsdp_param *p = fsdp_module_param(m, "weight");
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(whole, "weight"));
    EXPECT(check_same_bits(fsdp_dtensor_full(fsdp_param_tensor(p)), w));
    fsdp_tensor *g = fsdp_dtensor_full(fsdp_grad(fsdp_param_tensor(p)));
    double *ga = check_values(g), *gb = check_values(fsdp_grad(w));
    double d = ga && gb ? net_distance(ga, gb, fsdp_numel(w)) : 1;
    free(ga);
    free(gb);
    EXPECT(d < 1e-6);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    fsdp_module_free(whole);
    return FSDP_OK;
}

static void test_cuts(void **state)
{
    (void)state;
    static const int64_t sizes[][3] = {{1, 1, 1}, {5, 3, 2}, {7, 1, 9}, {2, 17, 3}, {16, 8, 4}};
    const int ranks[] = {1, 2, 3, 4, 8};
    for (int k = 0; k < 5; k++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int ndim = 1; ndim <= 3; ndim++)
                for (int dim = 0; dim < ndim; dim++) {
                    shapes s = {.ndim = ndim, .dim = dim, .private_gather = (int)i & 1};
                    memcpy(s.sizes, sizes[i], sizeof s.sizes);
                    check_ok(fsdp_run_threads(ranks[k], cut, &s));
                }
}

/* ---- ranks that differ -------------------------------------------------------------------------
 */

/* What rank 1 has otherwise. */
enum { OTHER_DIM, OTHER_POLICY, OTHER_REDUCE, OTHER_PREFETCH, OTHER_FROZEN, OTHER_BLOCK };

static fsdp_status differ(void *arg)
{
    int which = *(int *)arg, other = fsdp_rank() == 1;
    net *n = net_create(2);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    if (which == OTHER_DIM && other) o.placement_fn = net_dim1;
    if (which == OTHER_POLICY && other) o.reshard_after_forward = FSDP_RESHARD_NEVER;
    if (which == OTHER_REDUCE && other) o.mp_policy.reduce_dtype = FSDP_BF16;
    if (which == OTHER_PREFETCH && other) o.prefetch_limit = 3;
    for (int i = 0; i < 2; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK && fsdp_reset_parameters(&n->base, 1) == 0);
    if (which == OTHER_FROZEN && other) EXPECT(net_freeze(n) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    if (which == OTHER_BLOCK) { /* the second step goes another way on one rank */
        fsdp_backward(forward(n, 0));
        if (other) n->block[1] = n->block[0];
    }
    fsdp_backward(forward(n, 0));
    fsdp_scope_end(scope);
    fsdp_status s = fsdp_error();
    fsdp_module_free(&n->base);
    return s == FSDP_OK ? fsdp__fail(FSDP_INTERNAL, "it ran") : s;
}

static void test_differ(void **state)
{
    (void)state;
    static const struct {
        int which;
        const char *words;
    } rows[] = {
        {OTHER_DIM, "Shard(1)"},           {OTHER_POLICY, "freed after forward never"},
        {OTHER_REDUCE, "reduced as bf16"}, {OTHER_PREFETCH, "prefetch 3"},
        {OTHER_FROZEN, "frozen"},          {OTHER_BLOCK, "layers.1"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int which = rows[i].which;
        fsdp_run_threads(3, differ, &which);
        check_error(FSDP_MISMATCH, rows[i].words);
    }
}

/* ---- a slice of a mesh that leaves data out
 * ------------------------------------------------------ */

static fsdp_status slice(void *arg)
{
    const char *names[] = {(const char *)arg, "shard"};
    const int sizes[] = {2, 2};
    fsdp_mesh *m = fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
    fsdp_module *lin = fsdp_linear_create(3, 5, 0);
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_slice(m, "shard"));
    EXPECT(lin && fsdp_fully_shard(lin, &o) == FSDP_OK && fsdp_reset_parameters(lin, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(lin, fsdp_zeros(FSDP_F32, 2, SIZES(2, 3)));
    fsdp_scope_end(scope);
    fsdp_module_free(lin);
    return y ? FSDP_OK : fsdp_error();
}

static void test_slice(void **state)
{
    (void)state;
    assert_int_not_equal(fsdp_run_threads(4, slice, (void *)"replicate"), FSDP_OK);
    check_error(FSDP_UNSUPPORTED, "give the whole mesh");
    check_ok(fsdp_run_threads(4, slice, (void *)"tp")); /* the same rows along it */
}

/* ---- order mistakes
 * ------------------------------------------------------------------------------ */

static fsdp_status mistakes(void *arg)
{
    (void)arg;
    net *n = net_create(1);
    fsdp_optimizer *o =
        n && fsdp_reset_parameters(&n->base, 1) == FSDP_OK ? fsdp_adamw(&n->base, NULL) : NULL;
    EXPECT(o);
    fsdp_fully_shard(&n->base, NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "make the optimizer after fsdp_fully_shard"));
    EXPECT(!fsdp_is_sharded_module(&n->base));
    fsdp_optimizer_free(o);
    EXPECT(fsdp_fully_shard(&n->base, NULL) == FSDP_OK); /* the fix */
    fsdp_fully_shard(n->block[0], NULL);
    FSDP_TRY(check_failed(FSDP_UNSUPPORTED, "shard blocks first and the root last"));
    fsdp_checkpoint_module(n->block[0], NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "before fsdp_fully_shard"));
    fsdp_module_free(&n->base);

    fsdp_device_push(FSDP_META);
    n = net_create(1);
    fsdp_device_pop();
    EXPECT(n && fsdp_to_empty(n->block[0], FSDP_CPU) == FSDP_OK);
    fsdp_fully_shard(&n->base, NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "fsdp_to_empty after it"));
    fsdp_module_free(&n->base);

    fsdp_device_push(FSDP_META);
    n = net_create(1);
    fsdp_device_pop();
    EXPECT(n && fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(!forward(n, 0)); /* all that is on meta, by name */
    FSDP_TRY(check_failed(FSDP_INVALID_STATE,
                          "in.weight, in.bias, layers.0.norm.weight, layers.0.up.weight, "
                          "layers.0.up.bias, layers.0.down.weight, norm.weight, head.weight and 1 "
                          "more: still on the meta device"));
    EXPECT(fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(!forward(n, 0)); /* the first that is read without values */
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "in.weight"));
    EXPECT(fsdp_reset_iteration(&n->base) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK && forward(n, 0));
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_mistakes(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, mistakes, NULL));
}

/* ---- statements that are wrong
 * ---------------------------------------------------------------------- */

/* "Use what fully_shard returns": it works in place. "SHARD_GRAD_OP keeps parameters whole": only
 * between forward and backward. */
static fsdp_status statements(void *arg)
{
    (void)arg;
    net *n = net_create(3);
    fsdp_module *root = &n->base, *block = n->block[1];
    fsdp_param *w = fsdp_module_param(fsdp_module_child(block, 1), "weight");
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = FSDP_RESHARD_NEVER;
    for (int i = 0; i < 3; i++)
        (void)fsdp_fully_shard(n->block[i], &o);
    (void)fsdp_fully_shard(root, &o);
    EXPECT(n->block[1] == block && fsdp_is_sharded_module(block));
    EXPECT(fsdp_module_param(fsdp_module_child(block, 1), "weight") == w);
    EXPECT(fsdp_is_dtensor(fsdp_param_tensor(w)));
    EXPECT(fsdp_reset_parameters(root, 1) == FSDP_OK);
    int64_t whole = 4 * fsdp_module_numel(root);
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        EXPECT(unsharded() == 0);
        fsdp_tensor *loss = forward(n, step);
        EXPECT(loss && unsharded() == whole && !fsdp_is_dtensor(fsdp_param_tensor(w)));
        EXPECT(fsdp_backward(loss) == FSDP_OK && unsharded() == 0);
        EXPECT(fsdp_is_dtensor(fsdp_param_tensor(w)));
        fsdp_scope_end(scope);
    }
    fsdp_module_free(root);
    return FSDP_OK;
}

static void test_statements(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(4, statements, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stale),      cmocka_unit_test(test_orders),
        cmocka_unit_test(test_cuts),       cmocka_unit_test(test_differ),
        cmocka_unit_test(test_slice),      cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_statements),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
