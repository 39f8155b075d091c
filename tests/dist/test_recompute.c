/*
 * test_recompute.c - checkpoints and sharded units: inside a unit, around one, around several; bits
 * and communication stay what they are without.
 */
#include "sharded_net.h"

/* ---- blocks that are units, and the root ------------------------------------------- */

enum { INSIDE = 1, ROOT = 2, KEEPS = 4 };

static int keep_every_second(void *arg, const fsdp_checkpoint_op *op)
{
    (void)arg;
    return op->flops > 0 && op->call % 2 == 0;
}

static fsdp_status build(net_run *r, net *n)
{
    int how = *(const int *)r->arg;
    const fsdp_checkpoint_options o = {.policy = how & KEEPS ? keep_every_second : NULL};
    for (int i = 0; i < n->n_blocks && how & INSIDE; i++)
        FSDP_TRY(fsdp_checkpoint_module(n->block[i], &o));
    return how & ROOT ? fsdp_checkpoint_module(&n->base, &o) : FSDP_OK;
}

/* Bits of losses, norms, gradients and weights: strategies, mixed precision, accumulation. */
static void test_same_bits(void **state)
{
    (void)state;
    const struct {
        int ranks, prefetch, private_gather, micro, sync, frozen;
        net_mesh mesh;
        fsdp_reshard_policy policy;
        fsdp_dtype param_dtype;
    } cases[] = {
        {1, 1, 0, 1, 0, 0, NET_SHARD, FSDP_RESHARD_AUTO, FSDP_F32},
        {2, 1, 0, 1, 0, 0, NET_SHARD, FSDP_RESHARD_ALWAYS, FSDP_BF16},
        {4, 0, 0, 2, 0, 0, NET_SHARD, FSDP_RESHARD_ALWAYS, FSDP_F32},
        {3, 2, 1, 2, 1, 1, NET_SHARD, FSDP_RESHARD_AUTO, FSDP_F32},
        {4, 1, 0, 1, 0, 1, NET_HYBRID, FSDP_RESHARD_NEVER, FSDP_BF16},
        {2, 1, 0, 2, 0, 0, NET_REPLICATE, FSDP_RESHARD_AUTO, FSDP_F32},
        {8, 1, 0, 1, 0, 0, NET_SHARD, FSDP_RESHARD_AUTO, FSDP_BF16},
    };
    size_t n_cases = sizeof cases / sizeof *cases;
#if defined(__SANITIZE_THREAD__)
    n_cases = 4; /* a hundred times slower */
#endif
    for (size_t k = 0; k < n_cases; k++) {
        int how = 0;
        net_run none = {.ranks = cases[k].ranks,
                        .blocks = 3,
                        .rows = 24,
                        .steps = 3,
                        .mesh = cases[k].mesh,
                        .replicas = 2,
                        .policy = cases[k].policy,
                        .prefetch = cases[k].prefetch,
                        .private_gather = cases[k].private_gather,
                        .micro = cases[k].micro,
                        .sync = cases[k].sync,
                        .frozen = cases[k].frozen,
                        .param_dtype = cases[k].param_dtype,
                        .build = build,
                        .arg = &how};
        net_run r = none;
        net_go(&none);
        for (how = 1; how < 8; how++) {
            char what[32];
            snprintf(what, sizeof what, "case %zu, way %d", k, how);
            net_go(&r);
            net_same(&r, &none, what);
            net_free(&r);
        }
        net_free(&none);
    }
}

/* The root's forward runs again in backward and needs blocks whose own backward has not begun: each
 * is gathered once there, found whole later, and nothing stays behind. */
typedef struct counts {
    int64_t gathers[8], unshards, reshards;
} counts;

static void event(void *arg, fsdp_event_kind k, const char *unit)
{
    (void)unit;
    counts *c = arg;
    c->unshards += k == FSDP_EVENT_UNSHARD;
    c->reshards += k == FSDP_EVENT_RESHARD;
}

typedef struct gather_run {
    int how, listens;
    counts c[8];
} gather_run;

static fsdp_status listen(net_run *r, net *n)
{
    gather_run *g = r->arg;
    counts *c = &g->c[fsdp_rank()];
    fsdp_comm_count_reset();
    return fsdp_set_event_hook(&n->base, event, c);
}

static fsdp_status count(net_run *r, net *n, int step)
{
    (void)n;
    gather_run *g = r->arg;
    counts *c = &g->c[fsdp_rank()];
    c->gathers[step] = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static void test_gathers(void **state)
{
    (void)state;
    for (int prefetch = 0; prefetch < 3; prefetch++)
        for (int how = 0; how < 4; how++) {
            gather_run g = {.how = how};
            net_run r = {.ranks = 2,
                         .blocks = 3,
                         .rows = 4,
                         .steps = 4,
                         .no_clip = 1,
                         .policy = FSDP_RESHARD_ALWAYS,
                         .prefetch = prefetch,
                         .build = build,
                         .prepare = listen,
                         .look = count,
                         .arg = &g};
            net_go(&r);
            net_free(&r);
            for (int k = 0; k < 2; k++) {
                for (int s = 0; s < r.steps; s++)
                    if (g.c[k].gathers[s] != 8)
                        fail_msg("way %d, prefetch %d, step %d: %lld gathers; expected 4 + 4", how,
                                 prefetch, s, (long long)g.c[k].gathers[s]);
                assert_int_equal(g.c[k].unshards, 8 * r.steps);
                assert_int_equal(g.c[k].reshards, 8 * r.steps);
            }
        }
}

/* ---- a checkpoint around units ----------------------------------------------------- */

typedef struct pair {
    fsdp_module base;
    fsdp_module *first, *second; /* units; second has a unit inside */
    int around;                  /* checkpoint around both in one */
    int twice;
} pair;

static fsdp_status both(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out, int n_out)
{
    pair *p = arg;
    (void)n_in;
    (void)n_out;
    fsdp_tensor *h = fsdp_dropout(fsdp_call(p->first, in[0]), 0.2);
    out[0] = fsdp_call(p->second, fsdp_gelu(h));
    return fsdp_error();
}

static fsdp_tensor *pair_forward(fsdp_module *self, fsdp_tensor *x)
{
    pair *p = (pair *)self;
    fsdp_tensor *y = x;
    for (int k = 0; k <= p->twice; k++) {
        fsdp_tensor *in = y;
        fsdp_status s = p->around ? fsdp_checkpoint(both, p, NULL, &in, 1, &y, 1, NULL)
                                  : both(p, &in, 1, &y, 1);
        if (s != FSDP_OK) return NULL;
    }
    return fsdp_sum(fsdp_mul(y, y));
}

typedef struct pair_run {
    int around, twice, forwards, bf16;
    double *grads;
    int64_t numel, gathers;
} pair_run;

static fsdp_module *stack(int depth)
{
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module_add(m, "up", fsdp_linear_create(7, 7, 1));
    if (depth > 0) fsdp_module_add(m, "inner", stack(depth - 1));
    fsdp_module_add(m, "down", fsdp_linear_create(7, 7, 0));
    return m;
}

static fsdp_status pair_rank(void *arg)
{
    pair_run *r = arg;
    pair *p = (pair *)fsdp_module_create(sizeof *p, "Pair");
    EXPECT(p);
    p->base.forward1 = pair_forward;
    p->around = r->around;
    p->twice = r->twice;
    p->first = fsdp_module_add(&p->base, "first", stack(0));
    p->second = fsdp_module_add(&p->base, "second", stack(1));
    EXPECT(fsdp_reset_parameters(&p->base, 4) == FSDP_OK);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    if (r->bf16) {
        o.mp_policy.param_dtype = FSDP_BF16;
        o.mp_policy.reduce_dtype = FSDP_F32;
    }
    EXPECT(fsdp_fully_shard(fsdp_module_find(p->second, "inner"), &o) == FSDP_OK);
    if (r->bf16)
        o.mp_policy.output_dtype = FSDP_F32; /* cast behind the inner, and again in backward */
    EXPECT(fsdp_fully_shard(p->first, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(p->second, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&p->base, &o) == FSDP_OK);
    fsdp_comm_count_reset();
    for (int step = 0; step < 3; step++) { /* the third gathers ahead as the second was recorded */
        EXPECT(fsdp_zero_grad(&p->base) == FSDP_OK);
        EXPECT(fsdp_random_set(1, (uint64_t)step, NULL, 0) == FSDP_OK);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *loss = NULL;
        for (int f = 0; f < r->forwards; f++) {
            char name[40];
            snprintf(name, sizeof name, "%d of %d", f, fsdp_rank());
            fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(5, 7), 3, name);
            fsdp_tensor *l = fsdp_call(&p->base, x);
            EXPECT(l);
            loss = loss ? fsdp_add(loss, l) : l;
        }
        EXPECT(fsdp_backward(loss) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    int64_t gathers = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).calls;
    net n = {.base = p->base};
    int64_t numel;
    double *g = net_collect(&n, 1, &numel);
    EXPECT(g);
    if (fsdp_rank() == 0) {
        r->grads = g;
        r->numel = numel;
        r->gathers = gathers;
    } else {
        free(g);
    }
    fsdp_module_free(&p->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_around(void **state)
{
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int forwards = 1; forwards < 3; forwards++)
            for (int twice = 0; twice < 2; twice++) {
                pair_run none = {.twice = twice, .forwards = forwards, .bf16 = bf16}, on = none;
                on.around = 1;
                check_ok(fsdp_run_threads(2, pair_rank, &none));
                check_ok(fsdp_run_threads(2, pair_rank, &on));
                if (memcmp(none.grads, on.grads, (size_t)none.numel * sizeof *none.grads))
                    fail_msg("bf16 %d, forwards %d, twice %d: gradients differ by %g", bf16,
                             forwards, twice, net_distance(on.grads, none.grads, none.numel));
                assert_true(net_distance(none.grads, none.grads, none.numel) == 0);
                if (forwards == 1 && !twice) assert_int_equal(on.gathers, none.gathers);
                free(none.grads);
                free(on.grads);
            }
}

/* ---- order of calls -------------------------------------------------------------------- */

static void test_order(void **state)
{
    (void)state;
    for (int where = 0; where < 3; where++) {
        fsdp_module *m = stack(1), *inner = fsdp_module_find(m, "inner");
        check_ok(fsdp_reset_parameters(m, 4));
        check_ok(fsdp_fully_shard(where == 2 ? m : inner, NULL));
        /* The unit itself, what holds it, what it holds. */
        assert_int_not_equal(fsdp_checkpoint_module(where == 1 ? m : inner, NULL), FSDP_OK);
        check_error(FSDP_INVALID_STATE, "call fsdp_checkpoint_module before fsdp_fully_shard");
        assert_true(!fsdp_is_checkpointed(m) && !fsdp_is_checkpointed(inner));
        fsdp_module_free(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_gathers),
        cmocka_unit_test(test_around),
        cmocka_unit_test(test_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
