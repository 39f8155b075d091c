/*
 * test_fsdp_tied.c - one weight in two or three units: the numbers of a run
 * without sharding, one gradient, one reduction, one state, one line in print.
 *
 * Net: in (7 -> 7, weight W), mid (7 -> 7), out and again: modules of their own
 * that hold W too, each with a scale of its own or with nothing else.
 */
#include "sharded_net.h"

#include "fsdp/unit.h"

enum { C = 7, STEPS = 4, MAX = 4 * C * C };

typedef struct tied {
    fsdp_module base;
    fsdp_module *in, *mid, *out, *again;
} tied;

/* x W^T, by the scale if there is one. */
static fsdp_tensor *holder_forward(fsdp_module *self, fsdp_tensor *x)
{
    fsdp_tensor *y = fsdp_linear(x, fsdp_param_tensor(fsdp_module_param(self, "weight")));
    fsdp_param *s = fsdp_module_param(self, "scale");
    return s ? fsdp_mul(y, fsdp_param_tensor(s)) : y;
}

static fsdp_module *holder_create(fsdp_param *w, int scale)
{
    fsdp_module *m = fsdp_module_create(sizeof *m, "Holder");
    if (!m) return NULL;
    m->forward1 = holder_forward;
    fsdp_module_add_param(m, "weight", fsdp_param_retain(w));
    fsdp_init_rule ones = {FSDP_INIT_ONES, 0, 0};
    if (scale) fsdp_module_add_param(m, "scale", fsdp_param_create(FSDP_F32, 1, SIZES(C), ones));
    return m;
}

static fsdp_tensor *tied_forward(fsdp_module *self, fsdp_tensor *x)
{
    tied *t = (tied *)self;
    fsdp_tensor *h = fsdp_tanh(fsdp_call(t->mid, fsdp_call(t->in, x)));
    h = fsdp_tanh(fsdp_call(t->again, h));
    return fsdp_mean(fsdp_mul(fsdp_call(t->out, h), fsdp_call(t->in, x)));
}

static tied *tied_create(void)
{
    tied *t = (tied *)fsdp_module_create(sizeof *t, "Tied");
    if (!t) return NULL;
    t->base.forward1 = tied_forward;
    t->in = fsdp_module_add(&t->base, "in", fsdp_linear_create(C, C, 1));
    fsdp_param *w = fsdp_module_param(t->in, "weight");
    t->mid = fsdp_module_add(&t->base, "mid", fsdp_linear_create(C, C, 1));
    t->again = fsdp_module_add(&t->base, "again", holder_create(w, 1));
    t->out = fsdp_module_add(&t->base, "out", holder_create(w, 0));
    return t;
}

typedef struct tied_run {
    int sharded, replicas, private_gather, micro, sync, two_forwards;
    fsdp_reshard_policy policy;
    int prefetch;
    int frozen; /* mid */
    double norm[STEPS], weights[MAX];
    int64_t count;
    int reductions; /* of the shared weight, in the last step */
} tied_run;

static void count_reductions(void *arg, fsdp_event_kind k, const char *unit)
{
    if (k == FSDP_EVENT_REDUCE && !strcmp(unit, "in.weight")) ++*(int *)arg;
}

static fsdp_status shard(tied *t, const tied_run *r)
{
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {r->replicas, r->replicas ? fsdp_world_size() / r->replicas : 1};
    fsdp_mesh *mesh = r->replicas ? fsdp_mesh_create(FSDP_CPU, 2, sizes, names) : NULL;
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = r->policy;
    o.prefetch_limit = r->prefetch;
    o.private_gather = r->private_gather;
    EXPECT(fsdp_fully_shard(t->in, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(t->out, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(t->mid, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(t->again, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&t->base, &o) == FSDP_OK);
    fsdp_param *w = fsdp_module_param(t->in, "weight");
    fsdp__unit *u = ((fsdp__fparam *)w->shard)->unit;
    EXPECT(u->n_params == 1 && u->n_users == 3 && fsdp_is_dtensor(fsdp_param_tensor(w)));
    return FSDP_OK;
}

static fsdp_status tied_step(tied *t, fsdp_optimizer *o, tied_run *r, int step)
{
    int micro = r->micro ? r->micro : 1;
    for (int k = 0; k < micro; k++) {
        fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(3, C), (uint64_t)(step * 8 + k), "x");
        if (r->sharded)
            EXPECT(fsdp_set_requires_gradient_sync(&t->base, r->sync || k == micro - 1, 1) ==
                   FSDP_OK);
        fsdp_tensor *loss = fsdp_call(&t->base, x);
        if (r->two_forwards) loss = fsdp_add(loss, fsdp_call(&t->base, fsdp_scale(x, 0.5)));
        EXPECT(fsdp_backward(loss) == FSDP_OK);
        fsdp_param *w = fsdp_module_param(t->in, "weight");
        EXPECT(!r->sharded || fsdp_is_dtensor(fsdp_param_tensor(w)));
    }
    EXPECT(fsdp_clip_grad_norm(&t->base, 0.05, &r->norm[step]) == FSDP_OK);
    EXPECT(fsdp_optimizer_step(o) == FSDP_OK);
    return fsdp_zero_grad(&t->base);
}

static fsdp_status tied_rank(void *arg)
{
    tied_run *shared = arg, mine = *shared, *r = &mine;
    tied *t = tied_create();
    EXPECT(t);
    if (r->sharded) EXPECT(shard(t, r) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&t->base, 3) == FSDP_OK);
    if (r->frozen) fsdp_param_requires_grad_(fsdp_module_param(t->mid, "weight"), 0);
    fsdp_sgd_options s = {0.5, 0.9, 0, 0};
    fsdp_optimizer *o = fsdp_sgd(&t->base, &s);
    EXPECT(o);
    int reductions = 0;
    if (r->sharded) EXPECT(fsdp_set_event_hook(&t->base, count_reductions, &reductions) == FSDP_OK);
    for (int k = 0; k < STEPS; k++) {
        reductions = 0;
        fsdp_scope *scope = fsdp_scope_begin();
        EXPECT(tied_step(t, o, r, k) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    r->reductions = reductions;
    fsdp_param_list l;
    EXPECT(fsdp_module_params(&t->base, &l) == FSDP_OK);
    EXPECT(l.count == 5); /* in.weight, in.bias, mid.weight, mid.bias, again.scale */
    r->count = 0;
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        EXPECT(full && fsdp_to_doubles(full, r->weights + r->count) == FSDP_OK);
        r->count += fsdp_numel(full);
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    fsdp_optimizer_free(o);
    fsdp_module_free(&t->base);
    int64_t live = check_live();
    if (live) return fsdp__fail(FSDP_INTERNAL, "%lld bytes are left", (long long)live);
    if (fsdp_rank() == 0) *shared = mine;
    return FSDP_OK;
}

static void compare(int ranks, tied_run r, const tied_run *one)
{
    r.sharded = 1;
    check_ok(fsdp_run_threads(ranks, tied_rank, &r));
    assert_int_equal(r.count, one->count);
    for (int s = 0; s < STEPS; s++)
        if (fabs(r.norm[s] - one->norm[s]) > 1e-5 * one->norm[s])
            fail_msg("%d ranks, policy %d: norm %.9g and %.9g", ranks, (int)r.policy, r.norm[s],
                     one->norm[s]);
    double d = net_distance(r.weights, one->weights, one->count);
    if (!(d <= 2e-6))
        fail_msg("%d ranks, policy %d: weights differ by %g", ranks, (int)r.policy, d);
    /* One reduction a step, or a microbatch; one rank has none. */
    int each = r.sync && r.micro ? r.micro : 1;
    assert_int_equal(r.reductions, ranks > 1 ? each : 0);
}

/* Every rank has the same rows: the mean is that of one. */
static void test_parity(void **state)
{
    (void)state;
    tied_run one = {0};
    check_ok(fsdp_run_threads(1, tied_rank, &one));
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int policy = 0; policy < 3; policy++)
            for (int private = 0; private < 2; private ++)
                for (int prefetch = -1; prefetch < 3; prefetch++)
                    compare(ranks,
                            (tied_run){.policy = (fsdp_reshard_policy)policy,
                                       .private_gather = private,
                                       .prefetch = prefetch},
                            &one);
    for (int replicas = 1; replicas <= 4; replicas *= 2)
        compare(4, (tied_run){.replicas = replicas, .prefetch = 1}, &one);
}

static void test_accumulation(void **state)
{
    (void)state;
    for (int sync = 0; sync < 2; sync++) {
        tied_run one = {.micro = 3};
        check_ok(fsdp_run_threads(1, tied_rank, &one));
        for (int ranks = 1; ranks <= 4; ranks++)
            compare(ranks, (tied_run){.micro = 3, .sync = sync, .prefetch = 1}, &one);
    }
    tied_run two = {.two_forwards = 1};
    check_ok(fsdp_run_threads(1, tied_rank, &two));
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int policy = 0; policy < 3; policy++)
            compare(ranks, (tied_run){.two_forwards = 1, .policy = (fsdp_reshard_policy)policy},
                    &two);
    tied_run frozen = {.frozen = 1};
    check_ok(fsdp_run_threads(1, tied_rank, &frozen));
    for (int ranks = 1; ranks <= 4; ranks++)
        compare(ranks, (tied_run){.frozen = 1, .prefetch = 1}, &frozen);
}

/* ---- what is told of it ----------------------------------------------------------------- */

static int times(const char *text, const char *word)
{
    int n = 0;
    for (const char *at = text; (at = strstr(at, word)); at++)
        n++;
    return n;
}

static fsdp_status printed(void *arg)
{
    (void)arg;
    tied *t = tied_create();
    tied_run r = {0};
    EXPECT(t && shard(t, &r) == FSDP_OK && fsdp_reset_parameters(&t->base, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(fsdp_call(&t->base, fsdp_zeros(FSDP_F32, 2, SIZES(3, C))));
    fsdp_scope_end(scope);
    char *text = fsdp_module_print(&t->base);
    EXPECT(text);
    int whole = times(text, "weight: (7, 7) f32, local"), same = times(text, "weight: in.weight");
    int unit = times(text, "unit \"in.weight\"");
    free(text);
    EXPECT(whole == 2 && same == 2 && unit == 1); /* in's and mid's; again and out point to in's */
    EXPECT(fsdp_module_numel(&t->base) == 2 * C * C + 3 * C);
    fsdp_module_free(&t->base);
    return FSDP_OK;
}

static fsdp_status refused(void *arg)
{
    (void)arg;
    tied *t = tied_create();
    EXPECT(t && fsdp_fully_shard(t->in, NULL) == FSDP_OK);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = FSDP_BF16;
    fsdp_fully_shard(t->out, &o);
    FSDP_TRY(check_failed(FSDP_UNSUPPORTED, "one precision policy"));
    o = fsdp_shard_defaults(NULL);
    o.private_gather = 1;
    fsdp_fully_shard(t->out, &o);
    FSDP_TRY(check_failed(FSDP_UNSUPPORTED, "in.weight is shared by units"));
    EXPECT(!fsdp_is_sharded_module(t->out));
    EXPECT(fsdp_fully_shard(t->out, NULL) == FSDP_OK); /* as if nothing had been */
    EXPECT(fsdp_fully_shard(&t->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&t->base, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(fsdp_call(&t->base, fsdp_zeros(FSDP_F32, 2, SIZES(3, C))));
    fsdp_scope_end(scope);
    fsdp_module_free(&t->base);
    t = tied_create();
    EXPECT(t && fsdp_fully_shard(t->in, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&t->base, 1) == FSDP_OK);
    scope = fsdp_scope_begin();
    EXPECT(fsdp_call(t->in, fsdp_zeros(FSDP_F32, 2, SIZES(3, C))));
    fsdp_scope_end(scope);
    fsdp_fully_shard(t->out, NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "has run already"));
    fsdp_module_free(&t->base);
    t = tied_create();
    EXPECT(t && fsdp_fully_shard(&t->base, NULL) == FSDP_OK);
    fsdp_fully_shard(t->out, NULL);
    FSDP_TRY(check_failed(FSDP_UNSUPPORTED, "root last"));
    fsdp_module_free(&t->base);
    return FSDP_OK;
}

static void test_told(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(2, printed, NULL));
    check_ok(fsdp_run_threads(1, refused, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parity),
        cmocka_unit_test(test_accumulation),
        cmocka_unit_test(test_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
