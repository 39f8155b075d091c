/*
 * test_reproducible.c - with fsdp_set_reproducible losses, norms and weights of 20 steps are the
 * same to the bit on 1, 2, 4 and 8 ranks, flat and hybrid; what it refuses.
 */
#include "base/convert.h"
#include "base/rng.h"
#include "fsdp/models.h"
#include "models/config.h"
#include "sharded_net.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STEPS = 3 };
#else
enum { STEPS = 20 };
#endif
enum { T = 12, VOCAB = 53, WIDTH = 24, LEAVES = 16 };

typedef struct run {
    int ranks, replicas, threads; /* replicas 0: one axis */
    int leaves;                   /* microbatches of a step, of one row each */
    int tied, off;                /* off: not reproducible */
    fsdp_dtype param_dtype;
    fsdp_reshard_policy reshard;
    int private_gather;
    /* results, by rank 0 */
    double loss[STEPS], norm[STEPS];
    double *params;
    int64_t numel;
} run;

static fsdp_status make(const run *r, fsdp_module **out)
{
    const char *axes[] = {"replicate", "shard"};
    int sizes[] = {r->replicas, r->replicas ? r->ranks / r->replicas : r->ranks};
    int skip = r->replicas == 0;
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, 2 - skip, sizes + skip, axes + skip);
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.hidden_size = WIDTH, c.num_layers = 2, c.num_heads = 4, c.num_kv_heads = 2;
    c.head_dim = WIDTH / 4;
    c.intermediate_size = 40, c.vocab_size = VOCAB;
    c.tie_word_embeddings = r->tied;
    FSDP_TRY(fsdp_device_push(FSDP_META));
    fsdp_module *m = *out = fsdp_model_create(&c);
    FSDP_TRY(fsdp_device_pop());
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = r->reshard;
    o.private_gather = r->private_gather;
    o.mp_policy.param_dtype = r->param_dtype;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), &o));
    FSDP_TRY(fsdp_fully_shard(m, &o));
    FSDP_TRY(fsdp_to_empty(m, FSDP_CPU));
    FSDP_TRY(fsdp_set_gradient_divide_factor(m, 1.0, 1));
    FSDP_TRY(fsdp_set_reproducible(m, !r->off));
    return fsdp_reset_parameters(m, 7);
}

/* Microbatch `leaf` of a step; one that is past the last is masked whole. */
static fsdp_status microbatch(const run *r, fsdp_module *m, int step, int leaf, double *loss)
{
    int64_t tokens[T + 1], targets[T];
    uint64_t key = fsdp__rng_mix(fsdp__rng_key((uint64_t)step), (uint64_t)leaf);
    for (int i = 0; i <= T; i++)
        tokens[i] = (int64_t)(fsdp__rng_u32(key, (uint64_t)i) % VOCAB);
    for (int i = 0; i < T; i++)
        targets[i] = leaf < r->leaves ? tokens[i + 1] : -100;
    const int64_t sizes[2] = {1, T};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_tensor_from_memory(tokens, FSDP_I64, 2, sizes, NULL, NULL, NULL);
    fsdp_tensor *y = fsdp_tensor_from_memory(targets, FSDP_I64, 2, sizes, NULL, NULL, NULL);
    fsdp_tensor *l = fsdp_scale(fsdp_model_forward(m, x, NULL, y), 1.0 / (r->leaves * T));
    *loss = l ? fsdp_item(l) : 0.0;
    fsdp_status s = fsdp_backward(l);
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status step(run *r, fsdp_module *m, fsdp_optimizer *opt, int n)
{
    double mine[LEAVES] = {0}, all[LEAVES * 8];
    int p = 1, calls = 0;
    while (p * r->ranks < r->leaves)
        p *= 2;
    calls = p < r->leaves ? p : r->leaves; /* of the first rank, which has most */
    for (int k = 0; k < calls; k++) {
        FSDP_TRY(fsdp_set_requires_gradient_sync(m, k == calls - 1, 1));
        FSDP_TRY(fsdp_set_is_last_backward(m, k == calls - 1));
        FSDP_TRY(microbatch(r, m, n, fsdp_rank() * p + k, &mine[k]));
    }
    double norm = 0.0;
    FSDP_TRY(fsdp_clip_grad_norm(m, 0.5, &norm));
    FSDP_TRY(fsdp_optimizer_step(opt));
    FSDP_TRY(fsdp_zero_grad(m));
    FSDP_TRY(fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, mine, all,
                             calls * (int64_t)sizeof *mine, NULL));
    if (fsdp_rank() == 0) {
        r->loss[n] =
            fsdp__tree_sum(all, r->leaves < calls * r->ranks ? r->leaves : calls * r->ranks);
        r->norm[n] = norm;
    }
    return FSDP_OK;
}

static fsdp_status collect(run *r, fsdp_module *m)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    double *all = calloc((size_t)fsdp_module_numel(m), sizeof *all);
    int64_t at = 0;
    for (int64_t i = 0; i < l.count && all; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        if (full) fsdp_to_doubles(full, all + at);
        at += full ? fsdp_numel(full) : 0;
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    if (fsdp_rank() == 0) {
        r->params = all;
        r->numel = at;
    } else {
        free(all);
    }
    return fsdp_error();
}

static fsdp_status rank_main(void *arg)
{
    run *r = arg;
    fsdp_module *m = NULL;
    FSDP_TRY(fsdp_set_threads(r->threads ? r->threads : 1));
    fsdp_status s = make(r, &m);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *opt = s == FSDP_OK ? fsdp_adamw(m, &a) : NULL;
    if (s == FSDP_OK && !opt) s = fsdp_error();
    for (int n = 0; n < STEPS && s == FSDP_OK; n++)
        s = step(r, m, opt, n);
    if (s == FSDP_OK) s = collect(r, m);
    fsdp_optimizer_free(opt);
    fsdp_module_free(m);
    if (s == FSDP_OK && check_live() != 0) s = fsdp__fail(FSDP_INTERNAL, "bytes are left");
    return s;
}

static int same(const run *a, const run *b)
{
    return !memcmp(a->loss, b->loss, sizeof a->loss) && !memcmp(a->norm, b->norm, sizeof a->norm) &&
           a->numel == b->numel &&
           !memcmp(a->params, b->params, (size_t)a->numel * sizeof *a->params);
}

/* Ranks, replicas, threads. Leaves: 16 divide evenly, 11 and 5 leave ranks with fewer or none. */
static void test_same(void **state)
{
    (void)state;
    static const int layouts[][3] = {{1, 0, 2}, {2, 0, 1}, {2, 2, 1}, {4, 0, 1}, {4, 2, 1},
                                     {4, 4, 1}, {8, 0, 1}, {8, 2, 1}, {8, 4, 1}};
    static const int leaves[] = {16, 11, 5};
    for (int way = 0; way < 3; way++) {
        run one = {.ranks = 1,
                   .leaves = leaves[way],
                   .tied = way == 1,
                   .param_dtype = way == 2 ? FSDP_BF16 : FSDP_F32};
        check_ok(fsdp_run_threads(1, rank_main, &one));
        assert_true(one.loss[0] > 3.0 && one.loss[STEPS - 1] != one.loss[0]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            run r = one;
            r.ranks = layouts[i][0];
            r.replicas = layouts[i][1];
            r.threads = layouts[i][2];
            r.reshard = i % 2 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
            r.private_gather = i % 3 == 0;
            check_ok(fsdp_run_threads(r.ranks, rank_main, &r));
            if (!same(&r, &one))
                fail_msg("%d leaves, %d ranks in %d replicas: loss %.17g and %.17g, norm %.17g and "
                         "%.17g",
                         one.leaves, r.ranks, r.replicas, r.loss[STEPS - 1], one.loss[STEPS - 1],
                         r.norm[STEPS - 1], one.norm[STEPS - 1]);
            free(r.params);
        }
        free(one.params);
    }
}

/* Without it the number of ranks is seen, or this test would show nothing. */
static void test_otherwise(void **state)
{
    (void)state;
    run a = {.ranks = 1, .leaves = 16, .off = 1}, b = a;
    b.ranks = 4;
    check_ok(fsdp_run_threads(1, rank_main, &a));
    check_ok(fsdp_run_threads(4, rank_main, &b));
    assert_false(same(&a, &b));
    free(a.params);
    free(b.params);
}

/* ---- memory and mistakes --------------------------------------------------------------------- */

static fsdp_status backward(net *n, int sync)
{
    net_run r = {.ranks = fsdp_world_size(), .rows = 4};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x, *y;
    fsdp_status s = fsdp_set_requires_gradient_sync(&n->base, sync, 1);
    if (s == FSDP_OK) s = net_batch(&r, 0, 0, 4, &x, &y);
    if (s == FSDP_OK) s = fsdp_backward(fsdp_call2(&n->base, x, y));
    fsdp_scope_end(scope);
    return s;
}

/* After k leaves there are as many whole gradients as k has bits. */
static fsdp_status counted(void *arg)
{
    (void)arg;
    net *n = net_create(2);
    EXPECT(n && fsdp_fully_shard(n->block[0], NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_reproducible(&n->base, 1) == FSDP_OK);
    for (int k = 1; k <= 9; k++) {
        EXPECT(backward(n, 0) == FSDP_OK);
        fsdp_memory_stats s;
        fsdp_memory_get(&s);
        EXPECT(s.live[FSDP_GRADIENTS] ==
               4 * fsdp_module_numel(&n->base) * __builtin_popcount((unsigned)k));
    }
    EXPECT(backward(n, 1) == FSDP_OK);
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    EXPECT(s.live[FSDP_GRADIENTS] <= 4 * fsdp_module_numel(&n->base) / 2 + 4 * 17 * 17);
    EXPECT(fsdp_zero_grad(&n->base) == FSDP_OK);
    EXPECT(backward(n, 0) == FSDP_OK);
    EXPECT(fsdp_reset_iteration(&n->base) == FSDP_OK); /* drops what waits */
    EXPECT(check_live() == s.live[FSDP_PARAMETERS]);
    fsdp_module_free(&n->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_counted(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(2, counted, NULL));
}

static fsdp_status mistake(void *arg)
{
    int kind = *(int *)arg;
    net *n = net_create(1);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    if (kind == 1) o.mp_policy.reduce_dtype = FSDP_BF16;
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_status s = fsdp_set_reproducible(&n->base, 1);
    if (s == FSDP_OK) s = backward(n, 1);
    if (s == FSDP_OK) s = backward(n, 1);
    fsdp_module_free(&n->base);
    return s;
}

static void test_mistakes(void **state)
{
    (void)state;
    int kind = 0;
    assert_int_not_equal(fsdp_run_threads(3, mistake, &kind), FSDP_OK);
    check_error(FSDP_UNSUPPORTED, "has 3 shards in 1 replicas");
    assert_int_not_equal(fsdp_run_threads(2, mistake, &kind), FSDP_OK);
    check_error(FSDP_UNSUPPORTED, "a second time before fsdp_zero_grad");
    kind = 1;
    assert_int_not_equal(fsdp_run_threads(2, mistake, &kind), FSDP_OK);
    check_error(FSDP_UNSUPPORTED, "set mp_policy.reduce_dtype to FSDP_F32");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same),
        cmocka_unit_test(test_otherwise),
        cmocka_unit_test(test_counted),
        cmocka_unit_test(test_mistakes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
