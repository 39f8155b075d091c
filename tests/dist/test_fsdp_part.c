/*
 * test_fsdp_part.c - an integer reshard_after_forward: the same bits as freeing all, right rows on
 * uneven shapes, a k-th of the bytes, and what is refused.
 */
#include "sharded_net.h"

static const net_run base = {
    .blocks = 3, .rows = 24, .steps = 2, .policy = FSDP_RESHARD_ALWAYS, .prefetch = 1};

/* Ranks, replicas (0: one axis) and k; sizes 17, 7, 5 and 1 are uneven over each. */
static void test_bits(void **state)
{
    (void)state;
    static const int layouts[][3] = {{4, 0, 2}, {6, 0, 2}, {6, 0, 3}, {8, 0, 4}, {8, 0, 2},
                                     {8, 2, 2}, {3, 0, 3}, {4, 2, 2}, {2, 0, 1}, {1, 0, 1}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int way = (int)i % NET_STRIDE; way < 6; way += NET_STRIDE) {
            net_run r = base, other;
            char what[64];
            r.ranks = layouts[i][0];
            r.replicas = layouts[i][1];
            r.mesh = r.replicas ? NET_HYBRID : NET_SHARD;
            r.private_gather = way % 2;
            r.dim1 = way / 2 == 1;
            if (way / 2 == 2) r.param_dtype = FSDP_BF16;
            net_go(&r);
            other = r;
            other.reshard_ranks = layouts[i][2];
            other.prefetch = i % 3;
            net_go(&other);
            snprintf(what, sizeof what, "layout %zu, way %d", i, way);
            net_same(&other, &r, what);
            net_free(&r);
            net_free(&other);
        }
}

/* ---- rows ------------------------------------------------------------------------------------ */

typedef struct seen {
    int k, private_gather, dim1;
} seen;

/* After forward each parameter of the block is the part of the whole that its DTensor says. */
static fsdp_status check_part(fsdp_module *m, const char *name, const double *whole, int k)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(m, name));
    EXPECT(fsdp_is_dtensor(t) && fsdp_mesh_ndim(fsdp_dtensor_mesh(t)) == 2);
    EXPECT(fsdp_mesh_size(fsdp_dtensor_mesh(t), 1) == k);
    fsdp_placement outer = fsdp_dtensor_placement(t, 0), inner = fsdp_dtensor_placement(t, 1);
    EXPECT(outer.kind == FSDP_REPLICATE && inner.kind == FSDP_SHARD);
    const int64_t *sizes = fsdp_dtensor_sizes(t);
    int64_t d = sizes[inner.dim], c = (d + k - 1) / k, j = fsdp_rank() % k;
    int64_t first = j * c < d ? j * c : d, last = (j + 1) * c < d ? (j + 1) * c : d;
    fsdp_tensor *local = fsdp_dtensor_local(t);
    EXPECT(fsdp_size(local, inner.dim) == last - first);
    double mine[256];
    EXPECT(fsdp_numel(local) < 256 && fsdp_to_doubles(local, mine) == FSDP_OK);
    int64_t cols = fsdp_dtensor_ndim(t) > 1 ? sizes[1] : 1, at = 0;
    for (int64_t i = 0; i < sizes[0]; i++)
        for (int64_t n = 0; n < cols; n++) {
            int64_t x = inner.dim == 0 ? i : n;
            if (x < first || x >= last) continue;
            EXPECT(mine[at++] == whole[i * cols + n]);
        }
    fsdp_scope_end(scope);
    return FSDP_OK;
}

static fsdp_status rows_rank(void *arg)
{
    const seen *s = arg;
    net *n = net_create(2);
    EXPECT(n);
    net_run r = {.ranks = fsdp_world_size(),
                 .rows = 8 * fsdp_world_size(),
                 .mesh = NET_SHARD,
                 .reshard_ranks = s->k,
                 .private_gather = s->private_gather,
                 .dim1 = s->dim1};
    EXPECT(net_shard(&r, n) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 3) == FSDP_OK);
    double up[17 * 7], bias[7];
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *shard = fsdp_param_tensor(fsdp_module_param(n->head, "bias"));
    net_block *b = (net_block *)n->block[1];
    EXPECT(fsdp_to_doubles(fsdp_dtensor_full(fsdp_param_tensor(fsdp_module_param(b->up, "weight"))),
                           up) == FSDP_OK);
    EXPECT(fsdp_to_doubles(fsdp_dtensor_full(fsdp_param_tensor(fsdp_module_param(b->up, "bias"))),
                           bias) == FSDP_OK);
    fsdp_tensor *x, *y, *loss;
    EXPECT(net_batch(&r, 0, 0, 8, &x, &y) == FSDP_OK);
    fsdp_memory_stats before, after;
    fsdp_memory_get(&before);
    EXPECT((loss = fsdp_call2(&n->base, x, y)));
    fsdp_memory_get(&after);
    EXPECT(before.live[FSDP_UNSHARDED] == 0);
    EXPECT(check_part(b->up, "weight", up, s->k) == FSDP_OK);
    EXPECT(check_part(b->up, "bias", bias, s->k) == FSDP_OK);
    /* 1/k of the model, up to rows that do not divide. */
    int64_t numel = fsdp_module_numel(&n->base);
    EXPECT(after.live[FSDP_UNSHARDED] <= 4 * (numel / s->k + 17 * 14));
    EXPECT(after.live[FSDP_UNSHARDED] >= 4 * (numel / s->k - 17 * 14));
    /* By hand: the shards again, and backward gathers over all of them. */
    EXPECT(fsdp_reshard(n->block[1]) == FSDP_OK);
    EXPECT(fsdp_mesh_ndim(
               fsdp_dtensor_mesh(fsdp_param_tensor(fsdp_module_param(b->up, "weight")))) == 1);
    EXPECT(fsdp_backward(loss) == FSDP_OK);
    fsdp_memory_get(&after);
    EXPECT(after.live[FSDP_UNSHARDED] == 0);
    /* Without gradients nothing is kept. */
    fsdp_no_grad_begin();
    EXPECT(fsdp_call2(&n->base, x, y));
    fsdp_no_grad_end();
    fsdp_memory_get(&after);
    EXPECT(after.live[FSDP_UNSHARDED] == 0);
    /* Shards that changed since: the parts are stale and not used. */
    EXPECT((loss = fsdp_call2(&n->base, x, y)));
    EXPECT(fsdp_mark_changed(n->block[0]) == FSDP_OK);
    fsdp_comm_count_reset();
    EXPECT(fsdp_unshard(n->block[0]) == FSDP_OK);
    fsdp_group *all = fsdp_mesh_group(fsdp_dtensor_mesh(shard), 0);
    EXPECT(fsdp_comm_count_get(all, FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls == 1);
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_rows(void **state)
{
    (void)state;
    static const int layouts[][2] = {{4, 2}, {6, 3}, {8, 4}, {8, 2}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int way = 0; way < 4; way++) {
            seen s = {layouts[i][1], way % 2, way / 2};
            check_ok(fsdp_run_threads(layouts[i][0], rows_rank, &s));
        }
}

/* ---- what is refused ---------------------------------------------------------------------------
 */

/* Options, and what fully_shard says to them on 4 ranks; whether nothing is left half made. */
typedef struct refusal {
    int ranks;
    fsdp_reshard_policy policy;
} refusal;

static fsdp_status refused_rank(void *arg)
{
    const refusal *r = arg;
    net *n = net_create(1);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_ranks = r->ranks;
    o.reshard_after_forward = r->policy;
    fsdp_status s = fsdp_fully_shard(&n->base, &o);
    if (s == FSDP_OK) return fsdp__fail(FSDP_INTERNAL, "reshard_ranks %d was taken", r->ranks);
    if (fsdp_is_sharded_module(&n->base)) abort();
    fsdp_module_free(&n->base);
    return s;
}

static void test_refused(void **state)
{
    (void)state;
    static const int wrong[] = {-1, 3, 5, 8};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        refusal r = {wrong[i], FSDP_RESHARD_AUTO};
        assert_int_not_equal(fsdp_run_threads(4, refused_rank, &r), FSDP_OK);
        check_error(FSDP_INVALID_ARGUMENT, "a divisor of them (1, 2, 4)");
    }
    refusal r = {2, FSDP_RESHARD_NEVER};
    assert_int_not_equal(fsdp_run_threads(4, refused_rank, &r), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "leave one of them at its default");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
