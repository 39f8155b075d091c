/*
 * test_fsdp_list.c - several modules as one unit, and parameters that are left alone.
 */
#include "sharded_net.h"

#include "nn/module.h"

/* ---- the same numbers --------------------------------------------------------------- */

/* in with the first block (a child of it too, which is dropped), norm with head, and the rest. */
static fsdp_status as_lists(net_run *r, net *n, fsdp_shard_options *o)
{
    (void)r;
    fsdp_module *first[] = {n->in, n->block[0], fsdp_module_child(n->block[0], 1), n->in};
    fsdp_module *last[] = {n->head, n->norm};
    EXPECT(fsdp_fully_shard_list(first, 4, o) == FSDP_OK);
    EXPECT(fsdp_fully_shard_list(last, 2, o) == FSDP_OK);
    for (int i = 1; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], o) == FSDP_OK);
    return fsdp_fully_shard(&n->base, o);
}

static void test_parity(void **state)
{
    (void)state;
    net_run plain = {.ranks = 1, .blocks = 3, .rows = 24, .steps = 4, .mesh = NET_PLAIN};
    net_go(&plain);
    const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++)
        for (int policy = 0; policy < 3; policy++) {
            net_run r = plain;
            r.ranks = ranks[i];
            r.mesh = NET_SHARD;
            r.policy = (fsdp_reshard_policy)policy;
            r.params = r.grads = NULL;
            net_run lists = r;
            net_go(&r);
            lists.shard = as_lists;
            lists.prefetch = policy - 1;
            lists.private_gather = policy == 1;
            net_go(&lists);
            net_same(&lists, &r, "lists and blocks");
            net_close(&lists, &plain, 2e-5, "lists and one rank");
            net_free(&r);
            net_free(&lists);
        }
    net_free(&plain);
}

/* ---- what happens when ------------------------------------------------------------------ */

enum { LOG = 2048 };

static void note(void *arg, fsdp_event_kind k, const char *unit)
{
    char *text = arg;
    size_t n = strlen(text);
    const char *letter = k == FSDP_EVENT_UNSHARD          ? "U"
                         : k == FSDP_EVENT_RESHARD        ? "R"
                         : k == FSDP_EVENT_POST_BACKWARD  ? "P"
                         : k == FSDP_EVENT_REDUCE         ? "S"
                         : k == FSDP_EVENT_FORCE_COMPLETE ? "F"
                                                          : NULL;
    if (k == FSDP_EVENT_FORCE_COMPLETE) unit = "";
    if (letter) snprintf(text + n, LOG - n, "%s%s(%s)", n ? " " : "", letter, unit);
}

static fsdp_status expect(char *log, const char *text)
{
    int same = !strcmp(log, text);
    if (!same) return fsdp__fail(FSDP_INTERNAL, "\"%s\"; expected \"%s\"", log, text);
    *log = 0;
    return FSDP_OK;
}

static fsdp_status events(void *arg)
{
    (void)arg;
    net *n = net_create(1);
    char log[LOG] = "";
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = 0;
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    net_run r = {.ranks = fsdp_world_size(), .rows = 8};
    EXPECT(as_lists(&r, n, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_event_hook(&n->base, note, log) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x, *y;
    EXPECT(net_batch(&r, 0, 0, 4, &x, &y) == FSDP_OK);
    fsdp_tensor *loss = fsdp_call2(&n->base, x, y);
    EXPECT(loss);
    FSDP_TRY(expect(log, "U(in, layers.0) R(in, layers.0) U(norm, head) R(norm, head)"));
    EXPECT(fsdp_backward(loss) == FSDP_OK);
    /* in has no input that needs a gradient: only the end tells that its unit is done. */
    FSDP_TRY(expect(log, "U(norm, head) U(in, layers.0) R(norm, head) S(norm, head) "
                         "P(norm, head) R(in, layers.0) S(in, layers.0) P(in, layers.0)"));
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static fsdp_status no_root(void *arg)
{
    (void)arg;
    net *n = net_create(1);
    fsdp_module *list[] = {n->norm, n->head}, *container[] = {n->norm, n->layers};
    EXPECT(n && fsdp_fully_shard_list(list, 0, NULL) != FSDP_OK);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "one or more"));
    fsdp_fully_shard_list(container, 2, NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "ModuleList"));
    EXPECT(!fsdp_is_sharded_module(n->norm));
    EXPECT(fsdp_fully_shard_list(list, 2, NULL) == FSDP_OK);
    EXPECT(fsdp_is_sharded_module(n->norm) && fsdp_is_sharded_module(n->head));
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(!fsdp_call(n->norm, fsdp_zeros(FSDP_F32, 2, SIZES(2, NET_C))));
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "\"norm, head\" is a list of modules and cannot be"));
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_events(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= 3; ranks++) /* one rank reduces without a collective */
        check_ok(fsdp_run_threads(ranks, events, NULL));
    check_ok(fsdp_run_threads(1, no_root, NULL));
}

/* ---- a module of the list that does not run, and runs alone ----------------------------- */

/* body, then a norm whose result is handed out; the head, of the norm's unit, is called by hand. */
typedef struct split {
    fsdp_module base;
    fsdp_module *body, *norm, *head;
} split;

static fsdp_tensor *split_forward(fsdp_module *self, fsdp_tensor *x)
{
    split *s = (split *)self;
    return fsdp_call(s->norm, fsdp_tanh(fsdp_call(s->body, x)));
}

static split *split_create(void)
{
    split *s = (split *)fsdp_module_create(sizeof *s, "Split");
    if (!s) return NULL;
    s->base.forward1 = split_forward;
    s->body = fsdp_module_add(&s->base, "body", fsdp_linear_create(5, 7, 1));
    s->norm = fsdp_module_add(&s->base, "norm", fsdp_rms_norm_create(7, 1e-5));
    s->head = fsdp_module_add(&s->base, "head", fsdp_linear_create(7, 3, 1));
    return s;
}

enum { SPLIT_NUMEL = 5 * 7 + 7 + 7 + 7 * 3 + 3 };

typedef struct split_run {
    int grouped, keep, sync;
    double grads[SPLIT_NUMEL];
} split_run;

static fsdp_status split_grads(split *s, double *out)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(&s->base, &l));
    int64_t at = 0;
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *g = fsdp_grad(fsdp__param_kept(l.items[i].param));
        fsdp_tensor *full = g ? fsdp_dtensor_full(g) : NULL;
        if (!full || fsdp_to_doubles(full, out + at) != FSDP_OK)
            return fsdp_error() ? fsdp_error()
                                : fsdp__fail(FSDP_INTERNAL, "%s has no gradient", l.items[i].name);
        at += fsdp_numel(full);
    }
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

/* The head's forward and backward by chunks of rows, then the rest's: as a chunked loss does. */
static fsdp_status chunked(split *s, const split_run *r)
{
    enum { ROWS = 6, CHUNKS = 3 };
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(ROWS, 5), 3, "x");
    fsdp_tensor *h = fsdp_call(&s->base, x), *d = fsdp_detach(h);
    EXPECT(h && fsdp_requires_grad_(d, 1) == FSDP_OK);
    for (int k = 0; k < CHUNKS; k++) {
        if (r->sync != 2)
            EXPECT(fsdp_set_requires_gradient_sync(&s->base, r->sync || k == CHUNKS - 1, 1) ==
                   FSDP_OK);
        fsdp_tensor *part = fsdp_slice(d, 0, k * ROWS / CHUNKS, (k + 1) * ROWS / CHUNKS);
        fsdp_tensor *y = fsdp_call(s->head, part);
        EXPECT(fsdp_backward(fsdp_sum(fsdp_mul(y, y))) == FSDP_OK);
    }
    EXPECT(fsdp_set_requires_gradient_sync(&s->base, 1, 1) == FSDP_OK);
    return fsdp_backward_from(h, fsdp_grad(d), 0);
}

static fsdp_status split_rank(void *arg)
{
    split_run *r = arg;
    split *s = split_create();
    EXPECT(s);
    fsdp_module *pair[] = {s->norm, s->head};
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = r->sync - 1;
    if (r->grouped == 2) EXPECT(fsdp_fully_shard_list(pair, 2, &o) == FSDP_OK);
    for (int k = 0; k < 2 && r->grouped == 1; k++)
        EXPECT(fsdp_fully_shard(pair[k], &o) == FSDP_OK);
    if (r->grouped) {
        EXPECT(fsdp_fully_shard(s->body, &o) == FSDP_OK);
        EXPECT(fsdp_fully_shard(&s->base, &o) == FSDP_OK);
    }
    EXPECT(fsdp_reset_parameters(&s->base, 1) == FSDP_OK);
    if (r->keep && r->grouped) {
        EXPECT(fsdp_set_reshard_after_forward(&s->base, 0, 1) == FSDP_OK);
        EXPECT(fsdp_set_reshard_after_backward(&s->base, 0, 1) == FSDP_OK);
    }
    for (int step = 0; step < 2; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        EXPECT(fsdp_zero_grad(&s->base) == FSDP_OK);
        EXPECT(chunked(s, r) == FSDP_OK);
        double grads[SPLIT_NUMEL];
        if (r->keep && r->grouped) { /* whole still; by hand it is freed */
            EXPECT(!fsdp_is_dtensor(fsdp_param_tensor(fsdp_module_param(s->head, "weight"))));
            EXPECT(fsdp_reshard(s->head) == FSDP_OK);
            EXPECT(r->grouped == 1 ||
                   fsdp_is_dtensor(fsdp_param_tensor(fsdp_module_param(s->norm, "weight"))));
        }
        EXPECT(split_grads(s, grads) == FSDP_OK);
        if (fsdp_rank() == 0) memcpy(r->grads, grads, sizeof grads);
        fsdp_scope_end(scope);
    }
    fsdp_module_free(&s->base);
    int64_t live = check_live();
    return live ? fsdp__fail(FSDP_INTERNAL, "%lld bytes are left", (long long)live) : FSDP_OK;
}

static void test_partial(void **state)
{
    (void)state;
    for (int sync = 0; sync < 3; sync++)
        for (int keep = 0; keep < 2; keep++) {
            split_run plain = {.sync = 2};
            check_ok(fsdp_run_threads(1, split_rank, &plain));
            for (int ranks = 1; ranks <= 4; ranks++) {
                split_run apart = {.grouped = 1, .keep = keep, .sync = sync}, list = apart;
                list.grouped = 2;
                check_ok(fsdp_run_threads(ranks, split_rank, &apart));
                check_ok(fsdp_run_threads(ranks, split_rank, &list));
                assert_memory_equal(apart.grads, list.grads, sizeof list.grads);
                assert_true(net_distance(list.grads, plain.grads, SPLIT_NUMEL) < 1e-6);
            }
        }
}

/* ---- left alone ----------------------------------------------------------------------------- */

static fsdp_status leave_alone(net_run *r, net *n, fsdp_shard_options *o)
{
    (void)r;
    fsdp_param *alone[] = {fsdp_module_param(n->in, "bias"),
                           fsdp_module_param(fsdp_module_child(n->block[1], 1), "weight")};
    o->ignored_params = alone;
    o->n_ignored = 2;
    for (int i = 0; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, o) == FSDP_OK);
    for (int k = 0; k < 2; k++)
        EXPECT(!alone[k]->shard && !fsdp_is_dtensor(fsdp_param_tensor(alone[k])));
    return FSDP_OK;
}

/* All ranks have the same rows, so what nobody reduces stays equal. */
static fsdp_status look_alone(net_run *r, net *n, int step)
{
    (void)r;
    (void)step;
    fsdp_param *p = fsdp_module_param(n->in, "bias");
    EXPECT(fsdp_grad(fsdp_param_tensor(p)) && !fsdp_is_dtensor(fsdp_param_tensor(p)));
    return FSDP_OK;
}

static fsdp_status alone_rank(void *arg)
{
    net_run *r = arg, mine = *r;
    mine.ranks = 1; /* each rank takes all rows */
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    net *n = net_create(r->blocks);
    fsdp_device_pop();
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    EXPECT(n && leave_alone(r, n, &o) == FSDP_OK);
    EXPECT(fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 42) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *opt = fsdp_adamw(&n->base, &a);
    EXPECT(opt);
    for (int step = 0; step < r->steps; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x, *y;
        EXPECT(net_batch(&mine, step, 0, r->rows, &x, &y) == FSDP_OK);
        fsdp_tensor *loss = fsdp_call2(&n->base, x, y);
        EXPECT(fsdp_backward(loss) == FSDP_OK && look_alone(r, n, step) == FSDP_OK);
        double norm;
        EXPECT(fsdp_clip_grad_norm(&n->base, 0.5, &norm) == FSDP_OK);
        if (fsdp_rank() == 0) {
            r->loss[step] = fsdp_item(loss);
            r->norm[step] = norm;
        }
        EXPECT(fsdp_optimizer_step(opt) == FSDP_OK && fsdp_zero_grad(&n->base) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_optimizer_free(opt);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_ignored(void **state)
{
    (void)state;
    net_run plain = {.ranks = 1, .blocks = 2, .rows = 8, .steps = 4, .mesh = NET_PLAIN};
    net_go(&plain);
    for (int ranks = 1; ranks <= 4; ranks++) {
        net_run r = {.ranks = ranks, .blocks = 2, .rows = 8, .steps = 4};
        check_ok(fsdp_run_threads(ranks, alone_rank, &r));
        for (int s = 0; s < r.steps; s++) {
            assert_true(fabs(r.loss[s] - plain.loss[s]) <= 1e-5 * fabs(plain.loss[s]));
            assert_true(fabs(r.norm[s] - plain.norm[s]) <= 1e-5 * plain.norm[s]);
        }
    }
    net_free(&plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parity),
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_partial),
        cmocka_unit_test(test_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
