/*
 * test_fsdp_ahead.c - gathers that are asked for: handles, a post-optimizer
 * event, units that stay whole after backward or are not gathered for it, and
 * forwards and backwards of parts of a model.
 */
#include "sharded_net.h"

#include "nn/module.h"

/* ---- handles ----------------------------------------------------------------------- */

/* A root without parameters of its own. */
static fsdp_tensor *pass_forward(fsdp_module *self, fsdp_tensor *x)
{
    return fsdp_call(fsdp_module_child(self, 0), x);
}

static fsdp_status handles(void *arg)
{
    int private_gather = *(int *)arg;
    fsdp_module *root = fsdp_module_create(sizeof *root, "Root");
    EXPECT(root);
    root->forward1 = pass_forward;
    fsdp_module *lin = fsdp_module_add(root, "lin", fsdp_linear_create(5, 7, 1));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.private_gather = private_gather;
    EXPECT(lin && fsdp_fully_shard(lin, &o) == FSDP_OK && fsdp_fully_shard(root, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(root, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_param *w = fsdp_module_param(lin, "weight");
    fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(w));
    /* Before any forward, and on a module without parameters. */
    fsdp_unshard_handle *h[2];
    EXPECT(fsdp_unshard_async(lin, &h[0]) == FSDP_OK && fsdp_unshard_async(root, &h[1]) == FSDP_OK);
    EXPECT(fsdp_is_dtensor(fsdp_param_tensor(w))); /* not yet */
    EXPECT(fsdp_unshard_wait(h[0]) == FSDP_OK && fsdp_unshard_wait(h[1]) == FSDP_OK);
    EXPECT(!fsdp_is_dtensor(fsdp_param_tensor(w)));
    EXPECT(check_same_bits(fsdp_param_tensor(w), full));
    EXPECT(fsdp_reshard(lin) == FSDP_OK);
    /* A forward comes before the wait: it waits itself. */
    EXPECT(fsdp_unshard_async(lin, &h[0]) == FSDP_OK);
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(2, 5), 1.0), *y = fsdp_call(root, x);
    EXPECT(y && fsdp_unshard_wait(h[0]) == FSDP_OK);
    /* Two at a time; the second finds nothing to do. Never waited for by hand. */
    int64_t before = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    EXPECT(fsdp_unshard_async(lin, &h[0]) == FSDP_OK && fsdp_unshard_async(lin, &h[1]) == FSDP_OK);
    fsdp_tensor *z = fsdp_call(root, x);
    EXPECT(z && check_same_bits(z, y));
    EXPECT(fsdp_unshard_wait(h[1]) == FSDP_OK && fsdp_unshard_wait(h[0]) == FSDP_OK);
    int64_t calls = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls - before;
    EXPECT(calls == (fsdp_world_size() > 1));
    /* Gathered by hand, then written: the forward gathers anew. */
    EXPECT(fsdp_unshard(lin) == FSDP_OK);
    EXPECT(fsdp_fill_(fsdp__param_kept(w), 1.0) == FSDP_OK && fsdp_mark_changed(root) == FSDP_OK);
    z = fsdp_call(root, x);
    EXPECT(z && fabs(fsdp_at(z, SIZES(1, 6)) - fsdp_at(z, SIZES(0, 6))) < 1e-6);
    fsdp_tensor *bias = fsdp_dtensor_full(fsdp__param_kept(fsdp_module_param(lin, "bias")));
    EXPECT(bias && fabs(fsdp_at(z, SIZES(0, 6)) - 5.0 - fsdp_at(bias, SIZES(6))) < 1e-5);
    if (fsdp_world_size() == 1) { /* with more ranks the peers would be told */
        fsdp_unshard_async(lin, NULL);
        FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "handle"));
        fsdp_unshard_wait(NULL);
        FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "handle"));
    }
    fsdp_scope_end(scope);
    /* The handle outlives the module. */
    EXPECT(fsdp_unshard_async(lin, &h[0]) == FSDP_OK);
    fsdp_module_free(root);
    EXPECT(fsdp_unshard_wait(h[0]) == FSDP_OK);
    int64_t live = check_live();
    return live ? fsdp__fail(FSDP_INTERNAL, "%lld bytes are left", (long long)live) : FSDP_OK;
}

static void test_handles(void **state)
{
    (void)state;
    for (int private = 0; private < 2; private ++)
        for (int ranks = 1; ranks <= 8; ranks = ranks < 4 ? ranks + 1 : ranks * 2)
            check_ok(fsdp_run_threads(ranks, handles, &private));
}

/* ---- explicit lists: numbers, and what is refused ------------------------------------------ */

static fsdp_status deep_lists(net_run *r, net *n)
{
    (void)r;
    for (int i = 0; i < n->n_blocks; i++) {
        fsdp_module *next[2], *before[2];
        int a = 0, b = 0;
        for (int d = 1; d <= 2; d++) {
            if (i + d < n->n_blocks) next[a++] = n->block[i + d];
            if (i - d >= 0) before[b++] = n->block[i - d];
        }
        EXPECT(fsdp_set_modules_to_forward_prefetch(n->block[i], next, a) == FSDP_OK);
        EXPECT(fsdp_set_modules_to_backward_prefetch(n->block[i], before, b) == FSDP_OK);
    }
    if (fsdp_rank() == 0 && fsdp_world_size() == 1) {
        fsdp_set_modules_to_forward_prefetch(n->block[0], &n->norm, 1);
        FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "\"norm\" is no sharded module"));
        fsdp_set_modules_to_backward_prefetch(n->norm, n->block, 1);
        FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "\"norm\" is no sharded module"));
    }
    return FSDP_OK;
}

static void test_explicit(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int policy = 0; policy < 3; policy++) {
            net_run r = {.ranks = ranks, .blocks = 8, .rows = 16, .steps = 3, .prefetch = policy};
            r.policy = (fsdp_reshard_policy)policy;
            net_run lists = r;
            lists.prepare = deep_lists;
            net_go(&r);
            net_go(&lists);
            net_same(&lists, &r, "explicit lists");
            net_free(&r);
            net_free(&lists);
        }
}

/* ---- whole after backward; not gathered for it --------------------------------------------- */

static fsdp_status keep_whole(net_run *r, net *n)
{
    (void)r;
    return fsdp_set_reshard_after_backward(&n->base, 0, 1);
}

/* Backward reads no weight of the first linear: its input needs no gradient. */
static fsdp_status skip_first(net_run *r, net *n)
{
    (void)r;
    return fsdp_set_unshard_in_backward(n->in, 0);
}

static fsdp_status first_apart(net_run *r, net *n, fsdp_shard_options *o)
{
    (void)r;
    EXPECT(fsdp_fully_shard(n->in, o) == FSDP_OK);
    for (int i = 0; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], o) == FSDP_OK);
    return fsdp_fully_shard(&n->base, o);
}

/* Gathers of a step. */
static fsdp_status count(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    int64_t calls = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    if (fsdp_rank() == 0) *(int64_t *)r->arg = calls;
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static int64_t gathers(int ranks, int micro, fsdp_status (*prepare)(net_run *r, net *n),
                       const net_run *same)
{
    int64_t calls = 0;
    net_run r = {.ranks = ranks,
                 .blocks = 3,
                 .rows = 24,
                 .steps = 4,
                 .micro = micro,
                 .shard = first_apart,
                 .policy = FSDP_RESHARD_ALWAYS,
                 .prepare = prepare,
                 .look = count,
                 .arg = &calls};
    net_go(&r);
    if (same) net_same(&r, same, "units that stay whole");
    net_free(&r);
    return calls;
}

static void test_after_backward(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 4; ranks++)
        for (int micro = 1; micro <= 2; micro++) {
            net_run plain = {.ranks = ranks,
                             .blocks = 3,
                             .rows = 24,
                             .steps = 4,
                             .micro = micro,
                             .shard = first_apart};
            net_go(&plain);
            /* The last microbatch: 5 units forward, 5 backward; nothing to gather forward for what
             * is whole still, unless a step came between. */
            assert_int_equal(gathers(ranks, micro, NULL, &plain), 10);
            assert_int_equal(gathers(ranks, micro, keep_whole, &plain), micro > 1 ? 5 : 10);
            assert_int_equal(gathers(ranks, micro, skip_first, &plain), 9);
            net_free(&plain);
        }
}

/* ---- a post-optimizer event ----------------------------------------------------------------- */

/* An optimizer's step that is still under way: it ends at the n-th poll. */
typedef struct slow_step {
    net *n;
    fsdp_optimizer *o;
    int left;
} slow_step;

static int poll_step(void *arg)
{
    slow_step *s = arg;
    if (s->left-- > 0) return 0;
    return fsdp_optimizer_step(s->o) == FSDP_OK && fsdp_zero_grad(&s->n->base) == FSDP_OK ? 1 : -1;
}

typedef struct event_run {
    int slow;
    double loss[4];
} event_run;

static fsdp_status event_rank(void *arg)
{
    event_run *r = arg;
    net_run batch = {.ranks = fsdp_world_size(), .rows = 8};
    net *n = net_create(2);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    for (int i = 0; i < 2; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK && fsdp_reset_parameters(&n->base, 1) == 0);
    fsdp_sgd_options sgd = {0.1, 0, 0, 0};
    fsdp_optimizer *opt = fsdp_sgd(&n->base, &sgd);
    fsdp_stream *stream = fsdp_stream_create("optimizer");
    fsdp_event *e = fsdp_event_create();
    EXPECT(opt && stream && e);
    slow_step s = {n, opt, 0};
    for (int step = 0; step < 4; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x, *y;
        EXPECT(net_batch(&batch, step, 0, 4, &x, &y) == FSDP_OK);
        fsdp_tensor *loss = fsdp_call2(&n->base, x, y);
        EXPECT(fsdp_backward(loss) == FSDP_OK);
        if (fsdp_rank() == 0) r->loss[step] = fsdp_item(loss);
        s.left = r->slow ? 3 + fsdp_rank() : 0;
        EXPECT(fsdp_stream_submit(stream, poll_step, &s) == FSDP_OK);
        EXPECT(fsdp_event_record(e, stream) == FSDP_OK);
        EXPECT(!r->slow || fsdp_event_query(e) == 0);
        EXPECT(fsdp_set_post_optim_event(&n->base, e) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_stream_free(stream);
    fsdp_event_free(e);
    fsdp_optimizer_free(opt);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_event(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        event_run a = {0}, b = {.slow = 1};
        check_ok(fsdp_run_threads(ranks, event_rank, &a));
        check_ok(fsdp_run_threads(ranks, event_rank, &b));
        assert_memory_equal(a.loss, b.loss, sizeof a.loss);
        assert_true(a.loss[1] != a.loss[0]);
    }
}

/* ---- a part alone, after the whole ------------------------------------------------------------
 */

typedef struct part_run {
    int sharded, prefetch;
    double grads[NET_C * NET_H * 2 + NET_C + NET_H];
} part_run;

static fsdp_status part_rank(void *arg)
{
    part_run *r = arg;
    net_run batch = {.ranks = 1, .rows = 8};
    net *n = net_create(2);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = r->prefetch;
    for (int i = 0; i < 2 && r->sharded; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    if (r->sharded) EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0};
    fsdp_optimizer *opt = fsdp_adamw(&n->base, &a);
    EXPECT(opt);
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x, *y;
        EXPECT(net_batch(&batch, step, 0, 8, &x, &y) == FSDP_OK);
        EXPECT(fsdp_backward(fsdp_call2(&n->base, x, y)) == FSDP_OK);
        EXPECT(fsdp_optimizer_step(opt) == FSDP_OK && fsdp_zero_grad(&n->base) == FSDP_OK);
        fsdp_tensor *h = fsdp_randn(FSDP_F32, 2, SIZES(4, NET_C), (uint64_t)step, "h");
        fsdp_tensor *z = fsdp_call(n->block[1], h);
        EXPECT(fsdp_backward(fsdp_mean(fsdp_mul(z, z))) == FSDP_OK);
        EXPECT(!fsdp_grad(fsdp__param_kept(fsdp_module_param(n->in, "weight"))));
        fsdp_param_list l;
        EXPECT(fsdp_module_params(n->block[1], &l) == FSDP_OK);
        int64_t at = 0;
        for (int64_t i = 0; i < l.count; i++) {
            fsdp_tensor *g = fsdp_grad(fsdp__param_kept(l.items[i].param));
            fsdp_tensor *full = g ? fsdp_dtensor_full(g) : NULL;
            double *v = check_values(full);
            for (int64_t k = 0; v && k < fsdp_numel(full) && fsdp_rank() == 0; k++)
                r->grads[at++] = v[k];
            free(v);
            EXPECT(full);
        }
        fsdp_param_list_free(&l);
        EXPECT(fsdp_optimizer_step(opt) == FSDP_OK && fsdp_zero_grad(&n->base) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_optimizer_free(opt);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_part(void **state)
{
    (void)state;
    part_run plain = {0};
    check_ok(fsdp_run_threads(1, part_rank, &plain));
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int prefetch = -1; prefetch < 2; prefetch++) {
            part_run r = {.sharded = 1, .prefetch = prefetch};
            check_ok(fsdp_run_threads(ranks, part_rank, &r));
            int64_t n = (int64_t)(sizeof r.grads / sizeof *r.grads);
            assert_true(net_distance(r.grads, plain.grads, n) < 1e-4);
        }
}

/* ---- one forward, several backwards ------------------------------------------------------------
 */

typedef struct two_run {
    int sharded, private_gather, lists, prefetch,
        last; /* last: both backwards are called the last */
    double weights[3 * 30];
} two_run;

/* lin0 feeds lin1 and lin2. */
static fsdp_status two_outputs(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    fsdp_tensor *h = fsdp_tanh(fsdp_call(fsdp_module_child(self, 0), in->t[0]));
    out->n = 2;
    for (int k = 0; k < 2; k++)
        out->t[k] = fsdp_call(fsdp_module_child(self, k + 1), h);
    return fsdp_error();
}

static fsdp_status two_shard(fsdp_module *m, const two_run *r)
{
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.private_gather = r->private_gather;
    o.prefetch_limit = r->prefetch;
    for (int i = 0; i < 3; i++)
        EXPECT(fsdp_fully_shard(fsdp_module_child(m, i), &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK);
    for (int i = 0; i < 3 && r->lists; i++) { /* each the two others, needed or not */
        fsdp_module *list[] = {fsdp_module_child(m, (i + 1) % 3),
                               fsdp_module_child(m, (i + 2) % 3)};
        EXPECT(fsdp_set_modules_to_backward_prefetch(fsdp_module_child(m, i), list, 2) == FSDP_OK);
    }
    return FSDP_OK;
}

static fsdp_status two_rank(void *arg)
{
    two_run *r = arg;
    const char *names[] = {"0", "1", "2"};
    fsdp_module *m = fsdp_module_create(sizeof *m, "Two");
    EXPECT(m);
    m->forward = two_outputs;
    for (int i = 0; i < 3; i++)
        EXPECT(fsdp_module_add(m, names[i], fsdp_linear_create(5, 5, 1)));
    if (r->sharded) EXPECT(two_shard(m, r) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_sgd_options sgd = {0.5, 0.9, 0, 0};
    fsdp_optimizer *o = fsdp_sgd(m, &sgd);
    EXPECT(o);
    for (int step = 0; step < 4; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_values in = {1, {fsdp_randn(FSDP_F32, 2, SIZES(3, 5), (uint64_t)step, "x")}}, out;
        EXPECT(fsdp_module_call(m, &in, &out) == FSDP_OK);
        fsdp_tensor *one = fsdp_full(FSDP_F32, 2, SIZES(3, 5), 0.1);
        for (int k = 1; k >= 0; k--) {
            if (r->sharded && !r->last) EXPECT(fsdp_set_is_last_backward(m, k == 0) == FSDP_OK);
            EXPECT(fsdp_backward_from(out.t[k], one, k) == FSDP_OK);
        }
        EXPECT(fsdp_optimizer_step(o) == FSDP_OK && fsdp_zero_grad(m) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_param_list l;
    EXPECT(fsdp_module_params(m, &l) == FSDP_OK && l.count == 6);
    int64_t at = 0;
    fsdp_scope *last = fsdp_scope_begin();
    for (int64_t i = 0; i < l.count; i++) {
        double *v = check_values(fsdp_dtensor_full(fsdp__param_kept(l.items[i].param)));
        for (int64_t k = 0; v && k < (i % 2 ? 5 : 25); k++, at++)
            if (fsdp_rank() == 0) r->weights[at] = v[k];
        free(v);
    }
    fsdp_scope_end(last);
    fsdp_param_list_free(&l);
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    return fsdp_error();
}

static void test_two_backwards(void **state)
{
    (void)state;
    two_run plain = {0};
    check_ok(fsdp_run_threads(1, two_rank, &plain));
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int how = 0; how < 8; how++)
            for (int prefetch = 0; prefetch < 2; prefetch++) {
                two_run r = {1, how & 1, how >> 1 & 1, prefetch, how >> 2 & 1, {0}};
                check_ok(fsdp_run_threads(ranks, two_rank, &r));
                double d = net_distance(r.weights, plain.weights, 90);
                if (!(d < 1e-6)) fail_msg("%d ranks, way %d: weights differ by %g", ranks, how, d);
            }
}

/* ---- several roots that share one queue -------------------------------------------------------
 */

typedef struct stages {
    int share, sharded;
    int64_t gradients; /* peak bytes in backward */
    double grads[3 * 64 * 64];
} stages;

/* Three roots after each other, as stages of a pipeline; one backward through all of them. */
static fsdp_status stage_rank(void *arg)
{
    stages *r = arg;
    enum { D = 64 };
    fsdp_module *m[3];
    for (int i = 0; i < 3; i++) {
        m[i] = fsdp_linear_create(D, D, 0);
        EXPECT(m[i] && (!r->sharded || fsdp_fully_shard(m[i], NULL) == FSDP_OK));
        EXPECT(fsdp_reset_parameters(m[i], (uint64_t)i) == FSDP_OK);
    }
    if (r->share) EXPECT(fsdp_share_comm_ctx(m, 3) == FSDP_OK);
    EXPECT(fsdp_share_comm_ctx(NULL, 0) == FSDP_OK);
    for (int step = 0; step < 2; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *h = fsdp_randn(FSDP_F32, 2, SIZES(2, D), 1, "x");
        for (int i = 0; i < 3; i++) {
            EXPECT(fsdp_zero_grad(m[i]) == FSDP_OK);
            h = fsdp_call(m[i], h);
        }
        fsdp_memory_reset_peak();
        EXPECT(fsdp_backward(fsdp_mean(fsdp_mul(h, h))) == FSDP_OK);
        fsdp_memory_stats stats;
        fsdp_memory_get(&stats);
        for (int i = 0; i < 3; i++) {
            fsdp_tensor *g = fsdp_grad(fsdp__param_kept(fsdp_module_param(m[i], "weight")));
            EXPECT(g);
            double *v = check_values(fsdp_dtensor_full(g));
            if (v && fsdp_rank() == 0) memcpy(r->grads + i * D * D, v, D * D * sizeof *v);
            free(v);
        }
        if (fsdp_rank() == 0) r->gradients = stats.peak[FSDP_GRADIENTS];
        fsdp_scope_end(scope);
    }
    for (int i = 0; i < 3; i++)
        fsdp_module_free(m[i]);
    return FSDP_OK;
}

static void test_share(void **state)
{
    (void)state;
    static stages plain, alone, shared;
    plain = (stages){0};
    check_ok(fsdp_run_threads(1, stage_rank, &plain));
    for (int ranks = 2; ranks <= 4; ranks *= 2) {
        alone = (stages){.sharded = 1};
        shared = (stages){.sharded = 1, .share = 1};
        check_ok(fsdp_run_threads(ranks, stage_rank, &alone));
        check_ok(fsdp_run_threads(ranks, stage_rank, &shared));
        assert_memory_equal(alone.grads, shared.grads, sizeof alone.grads);
        assert_true(net_distance(shared.grads, plain.grads, 3 * 64 * 64) < 1e-6);
        /* Of their own, all three may hold a whole gradient that is being reduced; as one tree, one
         * does beside the one that is computed. */
        int64_t whole = 64 * 64 * 4,
                shards = 2 * whole / ranks; /* the last is made after the peak */
        assert_int_equal(alone.gradients, 3 * whole + shards);
        assert_int_equal(shared.gradients, 2 * whole + shards);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_handles),        cmocka_unit_test(test_explicit),
        cmocka_unit_test(test_after_backward), cmocka_unit_test(test_event),
        cmocka_unit_test(test_part),           cmocka_unit_test(test_share),
        cmocka_unit_test(test_two_backwards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
