/*
 * test_fsdp_custom.c - collectives of the user's in place of the library's, and the hook on reduced
 * gradients: the same training, with replicas made by hand too; who allocates; what is refused.
 */
#include <stdatomic.h>

#include "sharded_net.h"

static const net_run base = {
    .blocks = 2, .rows = 24, .steps = 2, .policy = FSDP_RESHARD_ALWAYS, .prefetch = 1};

typedef struct tally {
    atomic_int allocated, gathers, reductions, hooks, asynchronous;
} tally;

static tally seen;

static fsdp_tensor *allocate(void *arg, int64_t n, fsdp_dtype t)
{
    atomic_fetch_add(&((tally *)arg)->allocated, 1);
    return fsdp_empty(t, 1, &n);
}

static fsdp_status gather(void *arg, fsdp_tensor *output, fsdp_tensor *input, fsdp_group *g,
                          fsdp_work **work)
{
    tally *t = arg;
    int n = atomic_fetch_add(&t->gathers, 1);
    int64_t bytes = fsdp_numel(input) * (int64_t)fsdp_dtype_size(fsdp_tensor_dtype(input));
    (void)n;
    atomic_fetch_add(&t->asynchronous, 1);
    return fsdp_all_gather(g, FSDP_LANE_GATHER, fsdp_data(input), fsdp_data(output), bytes, work);
}

static fsdp_status reduce(void *arg, fsdp_tensor *output, fsdp_tensor *input, fsdp_group *g,
                          fsdp_work **work)
{
    (void)work; /* waited for at once */
    atomic_fetch_add(&((tally *)arg)->reductions, 1);
    return fsdp_reduce_scatter(g, FSDP_LANE_REDUCE, fsdp_data(input), fsdp_data(output),
                               fsdp_numel(output), fsdp_tensor_dtype(output), NULL);
}

static fsdp_status each(net *n, fsdp_status (*set)(fsdp_module *m, void *arg), void *arg)
{
    for (int i = 0; i < n->n_blocks; i++)
        FSDP_TRY(set(n->block[i], arg));
    return set(&n->base, arg);
}

static fsdp_status set_both(fsdp_module *m, void *arg)
{
    int which = *(int *)arg;
    fsdp_custom_all_gather g = {which & 4 ? allocate : NULL, gather, &seen};
    fsdp_custom_reduce_scatter r = {which & 4 ? allocate : NULL, reduce, &seen};
    /* The group's memory, and then a collective of one's own: allowed in this order. */
    EXPECT(fsdp_set_allocate_memory_from_process_group_for_comm(m, 1) == FSDP_OK);
    EXPECT(fsdp_set_separate_reduce_scatter_group(m, 1, 0) == FSDP_OK);
    if (which & 1) EXPECT(fsdp_set_custom_all_gather(m, &g) == FSDP_OK);
    if (which & 2) EXPECT(fsdp_set_custom_reduce_scatter(m, &r) == FSDP_OK);
    return FSDP_OK;
}

static fsdp_status customise(net_run *r, net *n)
{
    return each(n, set_both, r->arg);
}

/* Each of them and both, on every layout; sums in the same tree, so the same bits. */
static void test_collectives(void **state)
{
    (void)state;
    static const int layouts[][3] = {{1, 0, 0}, {3, 0, 0}, {4, 2, 0}, {4, 0, 2}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int way = (int)i % NET_STRIDE; way < 10; way += NET_STRIDE) {
            int which = way % 4 + (way % 2 ? 4 : 0);
            net_run r = base, other;
            char what[64];
            r.ranks = layouts[i][0];
            r.replicas = layouts[i][1];
            r.mesh = r.replicas ? NET_HYBRID : NET_SHARD;
            r.dim1 = way >= 4 && way < 8;
            if (way >= 8) r.param_dtype = FSDP_BF16;
            r.micro = 2;
            r.sync = way % 3 == 0;
            net_go(&r);
            other = r;
            other.reshard_ranks = layouts[i][2];
            other.prepare = customise;
            other.arg = &which;
            memset(&seen, 0, sizeof seen);
            net_go(&other);
            snprintf(what, sizeof what, "layout %zu, way %d", i, way);
            net_same(&other, &r, what);
            net_free(&r);
            net_free(&other);
            int many = layouts[i][0] > 1, units = 3 * r.ranks * r.steps;
            int gathers = 2 * 2 * units, reductions = (r.sync ? 2 : 1) * units;
            assert_int_equal(atomic_load(&seen.gathers), which & 1 && many ? gathers : 0);
            assert_int_equal(atomic_load(&seen.reductions), which & 2 && many ? reductions : 0);
            int buffers = 2 * (atomic_load(&seen.gathers) + atomic_load(&seen.reductions));
            assert_int_equal(atomic_load(&seen.allocated), which & 4 ? buffers : 0);
        }
}

/* fp16: the inputs are divided before, so that a sum in halves would not overflow. */
static fsdp_status check_halves(void *arg, fsdp_tensor *output, fsdp_tensor *input, fsdp_group *g,
                                fsdp_work **work)
{
    if (fsdp_tensor_dtype(input) != FSDP_F16)
        return fsdp__fail(FSDP_INTERNAL, "%s", fsdp_dtype_name(fsdp_tensor_dtype(input)));
    return reduce(arg, output, input, g, work);
}

static fsdp_status halves_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(3, 5, 0);
    EXPECT(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = o.mp_policy.reduce_dtype = FSDP_F16;
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_custom_reduce_scatter r = {NULL, check_halves, &seen};
    EXPECT(fsdp_set_custom_reduce_scatter(m, &r) == FSDP_OK);
    float x[3] = {24000, 24000, 24000}; /* four of them are more than a half holds */
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *in = fsdp_tensor_from_memory(x, FSDP_F32, 2, SIZES(1, 3), NULL, NULL, NULL);
    fsdp_tensor *y = fsdp_call(m, in);
    EXPECT(y && fsdp_backward(fsdp_sum(fsdp_cast(y, FSDP_F32))) == FSDP_OK);
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "weight")));
    double v[15];
    EXPECT(g && fsdp_to_doubles(fsdp_dtensor_full(g), v) == FSDP_OK);
    for (int k = 0; k < 15; k++)
        EXPECT(v[k] == 24000);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_halves(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(2, halves_rank, NULL));
    check_ok(fsdp_run_threads(4, halves_rank, NULL));
}

/* ---- the hook -----------------------------------------------------------------------------------
 */

typedef struct by_hand {
    fsdp_group *group; /* the replicas */
    fsdp_stream *stream;
} by_hand;

static by_hand hands[8];
static fsdp_mesh *shard_axis[8];

/* The mean over the replicas. */
static fsdp_status average(void *arg, fsdp_tensor *sums)
{
    by_hand *h = arg;
    atomic_fetch_add(&seen.hooks, 1);
    int64_t n = fsdp_numel(sums);
    FSDP_TRY(fsdp_all_reduce(h->group, FSDP_LANE_REPLICATE, fsdp_data(sums), n, FSDP_F32, FSDP_SUM,
                             NULL));
    return fsdp_copy_(sums, fsdp_scale(sums, 1.0 / fsdp_group_size(h->group)));
}

static fsdp_status set_hook(fsdp_module *m, void *arg)
{
    by_hand *h = arg;
    return fsdp_set_all_reduce_hook(m, average, h, h->stream);
}

static fsdp_status prepare_hook(net_run *r, net *n)
{
    (void)r;
    return each(n, set_hook, &hands[fsdp_rank()]);
}

static fsdp_status by_hand_rank(void *arg)
{
    net_run *r = arg;
    int me = fsdp_rank();
    const char *axes[] = {"replicate", "shard"};
    fsdp_mesh *mesh =
        fsdp_mesh_create(FSDP_CPU, 2, (int[]){r->replicas, r->ranks / r->replicas}, axes);
    EXPECT(mesh && (shard_axis[me] = fsdp_mesh_slice(mesh, "shard")));
    hands[me].group = fsdp_mesh_group(mesh, 0);
    hands[me].stream = r->frozen ? fsdp_stream_create("hook") : NULL; /* `frozen` says: a stream */
    net *n = net_create(r->blocks);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(shard_axis[me]);
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    for (int i = 0; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 42) == FSDP_OK);
    EXPECT(prepare_hook(r, n) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *opt = fsdp_adamw(&n->base, &a);
    EXPECT(opt);
    for (int step = 0; step < r->steps; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        EXPECT(net_step(r, n, opt, step) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_optimizer_free(opt);
    int64_t numel;
    double *p = net_collect(n, 0, &numel);
    EXPECT(p);
    if (me == 0) {
        r->params = p;
        r->numel = numel;
    } else {
        free(p);
    }
    fsdp_stream_free(hands[me].stream);
    fsdp_module_free(&n->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

/* One axis of a mesh of two and a hook that averages over the other: a hybrid by hand. */
static void test_hook(void **state)
{
    (void)state;
    for (int ranks = 4; ranks <= 8; ranks += 4)
        for (int stream = 0; stream < 2; stream++) {
            net_run native = base, hand;
            native.ranks = ranks;
            native.mesh = NET_HYBRID;
            native.replicas = 2;
            net_go(&native);
            hand = native;
            hand.mesh = NET_SHARD;
            hand.frozen = stream;
            atomic_store(&seen.hooks, 0);
            check_ok(fsdp_run_threads(ranks, by_hand_rank, &hand));
            assert_int_equal(atomic_load(&seen.hooks), 3 * base.steps * ranks);
            net_same(&hand, &native, "replicas by hand");
            net_free(&native);
            net_free(&hand);
        }
}

/* Beside native replicas the hook sees what they have summed; with one rank its gradients. */
static fsdp_status twice(void *arg, fsdp_tensor *sums)
{
    (void)arg;
    atomic_fetch_add(&seen.hooks, 1);
    return fsdp_copy_(sums, fsdp_scale(sums, 2.0));
}

static fsdp_status set_twice(fsdp_module *m, void *arg)
{
    return fsdp_set_all_reduce_hook(m, twice, arg, NULL);
}

static fsdp_status prepare_twice(net_run *r, net *n)
{
    return each(n, set_twice, r->arg);
}

static void test_hook_native(void **state)
{
    (void)state;
    static const int layouts[][2] = {{1, 0}, {2, 0}, {2, 2}, {4, 2}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        net_run r = base, other;
        r.steps = 1;
        r.no_clip = 1;
        r.ranks = layouts[i][0];
        r.replicas = layouts[i][1];
        r.mesh = r.replicas ? NET_HYBRID : NET_SHARD;
        r.micro = 3;
        r.sync = 1;
        r.group_only = r.replicas > 0;
        net_go(&r);
        other = r;
        other.prepare = prepare_twice;
        atomic_store(&seen.hooks, 0);
        net_go(&other);
        /* Where the replicas' turn comes once, so does the hook's. */
        assert_int_equal(atomic_load(&seen.hooks), 3 * r.ranks * (r.group_only ? 1 : 3));
        for (int64_t k = 0; k < r.numel; k++)
            if (!(fabs(other.grads[k] - 2 * r.grads[k]) <= 1e-6 * (1 + fabs(r.grads[k]))))
                fail_msg("layout %zu, element %lld: %g and %g", i, (long long)k, other.grads[k],
                         r.grads[k]);
        net_free(&r);
        net_free(&other);
    }
}

/* ---- what is refused
 * ------------------------------------------------------------------------------ */

static fsdp_status gather_fails(void *arg, fsdp_tensor *output, fsdp_tensor *input, fsdp_group *g,
                                fsdp_work **work)
{
    (void)arg;
    (void)output;
    (void)input;
    (void)g;
    (void)work;
    return fsdp__fail(FSDP_IO_ERROR, "the wire is cut");
}

static fsdp_tensor *allocate_less(void *arg, int64_t n, fsdp_dtype t)
{
    (void)arg;
    n /= 2;
    return fsdp_empty(t, 1, &n);
}

static fsdp_status broken_rank(void *arg)
{
    int kind = *(int *)arg;
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_custom_all_gather g = {kind ? allocate_less : NULL, kind ? gather : gather_fails, &seen};
    EXPECT(fsdp_set_custom_all_gather(m, &g) == FSDP_OK);
    fsdp_status s = fsdp_unshard(m);
    fsdp_module_free(m);
    return s;
}

static void test_refused(void **state)
{
    (void)state;
    int kind = 0;
    assert_int_not_equal(fsdp_run_threads(2, broken_rank, &kind), FSDP_OK);
    check_error(FSDP_IO_ERROR, "the wire is cut");
    kind = 1;
    assert_int_not_equal(fsdp_run_threads(2, broken_rank, &kind), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "its collective gives another tensor");
    net *n = net_create(1);
    assert_non_null(n);
    fsdp_custom_all_gather g = {NULL, gather, &seen};
    fsdp_set_custom_all_gather(&n->base, &g);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_fully_shard on it first");
    const char *axes[] = {"replicate", "shard"};
    fsdp_mesh *two = fsdp_mesh_create(FSDP_CPU, 2, (int[]){1, 1}, axes);
    fsdp_shard_options o = fsdp_shard_defaults(two);
    check_ok(fsdp_fully_shard(n->block[0], &o));
    check_ok(fsdp_fully_shard(&n->base, NULL));
    g.call = NULL;
    fsdp_set_custom_all_gather(&n->base, &g);
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    g.call = gather;
    check_ok(fsdp_set_custom_all_gather(&n->base, &g));
    fsdp_set_allocate_memory_from_process_group_for_comm(&n->base, 1);
    check_error(FSDP_INVALID_STATE, "take it away first");
    check_ok(fsdp_set_allocate_memory_from_process_group_for_comm(&n->base, 0));
    check_ok(fsdp_set_custom_all_gather(&n->base, NULL));
    check_ok(fsdp_set_allocate_memory_from_process_group_for_comm(&n->base, 1));
    fsdp_stream *s = fsdp_stream_create("hook");
    fsdp_set_all_reduce_hook(&n->base, NULL, NULL, s);
    check_error(FSDP_INVALID_ARGUMENT, "a stream without a hook");
    fsdp_set_all_reduce_hook(n->block[0], twice, NULL, s);
    check_error(FSDP_INVALID_ARGUMENT, "replicas of its own");
    check_ok(fsdp_set_all_reduce_hook(&n->base, twice, NULL, s));
    fsdp_stream_free(s);
    fsdp_module_free(&n->base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_collectives), cmocka_unit_test(test_halves),
        cmocka_unit_test(test_hook),        cmocka_unit_test(test_hook_native),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
