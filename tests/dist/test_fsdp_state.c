/*
 * test_fsdp_state.c - what is refused, what an error leaves behind, tied and
 * unused parameters, and reading and writing shards by hand.
 */
#include "sharded_net.h"

#include "base/context.h"
#include "dtensor/dtensor.h"
#include "nn/module.h"

static void on(int ranks, fsdp_status (*fn)(void *arg), void *arg)
{
    check_ok(fsdp_run_threads(ranks, fn, arg));
}

/* ---- refusals --------------------------------------------------------------- */

static int bad_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    return fsdp_param_ndim(p) + 1;
}

static fsdp_status refused(void *arg)
{
    (void)arg;
    net *n = net_create(2);
    EXPECT(n);
    fsdp_fully_shard(n->layers, NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "ModuleList"));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.placement_fn = bad_dim;
    fsdp_fully_shard(n->block[0], &o);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "dim"));
    EXPECT(!fsdp_is_sharded_module(n->block[0]));
    EXPECT(fsdp_fully_shard(n->block[0], NULL) == FSDP_OK);
    EXPECT(fsdp_is_sharded_module(n->block[0]));
    fsdp_fully_shard(n->block[0], NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "once"));
    EXPECT(fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    fsdp_fully_shard(n->block[1], NULL); /* its parameters are the root's by now */
    FSDP_TRY(check_failed(FSDP_UNSUPPORTED, "root last"));
    fsdp_unshard(n->norm);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "fsdp_fully_shard"));
    /* No values yet. */
    fsdp_tensor *x = fsdp_zeros(FSDP_F32, 2, SIZES(2, 5)),
                *y = fsdp_zeros(FSDP_F32, 2, SIZES(2, 1));
    EXPECT(!fsdp_call2(&n->base, x, y));
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "fsdp_reset_parameters"));
    fsdp_release(x);
    fsdp_release(y);
    fsdp_module_free(&n->base);
    const char *names[] = {"a", "b", "c"};
    int sizes[] = {1, 1, 1};
    fsdp_module *m = fsdp_linear_create(3, 3, 0);
    o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 3, sizes, names));
    fsdp_fully_shard(m, &o);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "3 axes"));
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status on_meta(void *arg)
{
    (void)arg;
    fsdp_device_push(FSDP_META);
    net *n = net_create(1);
    fsdp_device_pop();
    EXPECT(n && fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    fsdp_reset_parameters(&n->base, 1);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "fsdp_to_empty"));
    fsdp_tensor *x = fsdp_zeros(FSDP_F32, 2, SIZES(2, 5)),
                *y = fsdp_zeros(FSDP_F32, 2, SIZES(2, 1));
    EXPECT(!fsdp_call2(&n->base, x, y));
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "meta"));
    fsdp_release(x);
    fsdp_release(y);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_refusals(void **state)
{
    (void)state;
    on(1, refused, NULL);
    on(1, on_meta, NULL);
}

/* What rank 1 has otherwise than the others. */
enum { ONE_BLOCK_MORE, ANOTHER_SIZE, ANOTHER_DTYPE, ANOTHER_ORDER, ANOTHER_NAME, A_BLOCK_LESS_RUN };

static void add_ones(net *n, const char *name, fsdp_dtype t, int64_t size)
{
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    fsdp_module_add_param(&n->base, name, fsdp_param_create(t, 1, SIZES(size), one));
}

static fsdp_status other_model(void *arg)
{
    int which = *(int *)arg, other = fsdp_rank() == 1;
    net *n = net_create(which == ONE_BLOCK_MORE && other ? 2 : which == A_BLOCK_LESS_RUN ? 3 : 1);
    EXPECT(n);
    if (which == ANOTHER_SIZE) add_ones(n, "extra", FSDP_F32, 3 + fsdp_rank());
    if (which == ANOTHER_DTYPE) add_ones(n, "extra", other ? FSDP_BF16 : FSDP_F32, 6);
    if (which == ANOTHER_ORDER) {
        add_ones(n, other ? "b" : "a", FSDP_F32, 6);
        add_ones(n, other ? "a" : "b", FSDP_F32, 6);
    }
    if (which == ANOTHER_NAME) add_ones(n, other ? "scale" : "gain", FSDP_F32, 6);
    for (int i = 0; which == A_BLOCK_LESS_RUN && i < 3; i++)
        EXPECT(fsdp_fully_shard(n->block[i], NULL) == FSDP_OK);
    fsdp_status s = fsdp_fully_shard(&n->base, NULL);
    if (s == FSDP_OK) s = fsdp_reset_parameters(&n->base, 1);
    if (which == A_BLOCK_LESS_RUN && other) n->n_blocks = 2;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = fsdp_call2(&n->base, fsdp_zeros(FSDP_F32, 2, SIZES(2, 5)),
                                   fsdp_zeros(FSDP_F32, 2, SIZES(2, 1)));
    if (s == FSDP_OK && which == A_BLOCK_LESS_RUN) fsdp_backward(loss);
    if (s == FSDP_OK && !fsdp_error()) s = fsdp__fail(FSDP_INTERNAL, "it ran");
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    return fsdp_error();
}

/* Refused before any number is mixed, on all ranks, with the parameter or unit and both ranks'
 * words. */
static void test_other_models(void **state)
{
    (void)state;
    static const struct {
        int which;
        const char *word;
    } cases[] = {
        {ONE_BLOCK_MORE, "layers.1."},
        {ANOTHER_SIZE, "extra (4) f32"}, /* padded shards of 3, 4 and 5 over 3 ranks nearly match */
        {ANOTHER_DTYPE, "extra (6) bf16"},
        {ANOTHER_ORDER, "rank 1 has b (6) f32"},
        {ANOTHER_NAME, "rank 1 has scale (6) f32"},
        {A_BLOCK_LESS_RUN, "layers.2"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int which = cases[i].which;
        fsdp_run_threads(3, other_model, &which);
        check_error(FSDP_MISMATCH, cases[i].word);
    }
}

/* ---- an error in one rank's forward ---------------------------------------------- */

typedef struct crash {
    int backward; /* in the hook of a gradient instead */
    int recover;
    char text[4][1024];
    double change[4];
    int clean;      /* no error at all */
    double loss[4]; /* recover: of the third step after the error */
} crash;

static fsdp_tensor *fail_in_backward(void *arg, fsdp_tensor *g)
{
    (void)g;
    if (fsdp_rank() == *(int *)arg) fsdp__fail(FSDP_INVALID_DATA, "a hook of rank 1 gave up");
    return NULL;
}

static fsdp_status shards(net *n, double *sum)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(&n->base, &l));
    *sum = 0;
    for (int64_t i = 0; i < l.count; i++) {
        double *v = check_values(fsdp__param_kept(l.items[i].param));
        for (int64_t k = 0; v && k < fsdp_numel(fsdp__param_kept(l.items[i].param)); k++)
            *sum += v[k] * (double)(k + 1);
        free(v);
    }
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static fsdp_status step(net *n, fsdp_optimizer *o, int fail_hook, double *loss)
{
    net_run r = {.ranks = fsdp_world_size(), .rows = 8};
    fsdp_tensor *x, *y;
    FSDP_TRY(net_batch(&r, 0, 2 * fsdp_rank(), 2, &x, &y));
    fsdp_tensor *l = fsdp_call2(&n->base, x, y);
    int one = 1;
    if (l && fail_hook) fsdp_register_hook(l, fail_in_backward, &one);
    FSDP_TRY(fsdp_backward(l));
    if (loss) *loss = fsdp_item(l);
    FSDP_TRY(fsdp_optimizer_step(o));
    return fsdp_zero_grad(&n->base);
}

static fsdp_status crash_rank(void *arg)
{
    crash *c = arg;
    int r = fsdp_rank();
    net *n = net_create(3);
    EXPECT(n);
    fsdp_shard_options opt = fsdp_shard_defaults(NULL);
    for (int i = 0; i < 3; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &opt) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, &opt) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_optimizer *o = fsdp_adamw(&n->base, NULL);
    EXPECT(o);
    double before, after;
    for (int k = 0; k < 3; k++) { /* the last with prefetching */
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status s = step(n, o, 0, NULL);
        fsdp_scope_end(scope);
        EXPECT(s == FSDP_OK);
    }
    EXPECT(shards(n, &before) == FSDP_OK);
    n->fail_rank = c->backward || c->clean ? -1 : 1;
    n->fail_block = 1;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = c->clean ? FSDP_INTERNAL : step(n, o, c->backward, NULL);
    snprintf(c->text[r], sizeof c->text[r], "%s", fsdp_error_text());
    fsdp_scope_end(scope);
    /* Refused while the error is kept. */
    if (!c->clean &&
        (s == FSDP_OK || fsdp_optimizer_step(o) == FSDP_OK || fsdp_zero_grad(&n->base) == FSDP_OK))
        s = FSDP_INTERNAL;
    fsdp_status kept = fsdp_error();
    if (!c->recover)
        fsdp_error_clear();
    else if (fsdp_reset_iteration(&n->base) != FSDP_OK)
        s = FSDP_INTERNAL;
    shards(n, &after);
    c->change[r] = after - before;
    n->fail_rank = -1;
    for (int k = 0; c->recover && k < 3; k++) { /* on as if nothing had been */
        scope = fsdp_scope_begin();
        fsdp_status again = fsdp_zero_grad(&n->base);
        if (again == FSDP_OK) again = step(n, o, 0, &c->loss[r]);
        fsdp_scope_end(scope);
        if (again != FSDP_OK) break;
    }
    if (c->recover && fsdp_error()) s = FSDP_OK;
    if (c->recover && !fsdp_error()) s = FSDP_INTERRUPTED;
    if (c->recover) {
        fsdp_optimizer_free(o);
        fsdp_module_free(&n->base);
        return s == FSDP_INTERRUPTED ? FSDP_OK : fsdp_error();
    }
    fsdp_optimizer_free(o);
    fsdp_module_free(&n->base);
    fsdp_error_clear();
    return s == FSDP_INTERNAL ? fsdp__fail(s, "the step passed")
                              : fsdp__fail(kept, "%s", c->text[r]);
}

static void test_error_in_forward(void **state)
{
    (void)state;
    for (int backward = 0; backward < 2; backward++) {
        crash c = {.backward = backward};
        fsdp_run_threads(4, crash_rank, &c);
        const char *words = backward ? "a hook of rank 1 gave up" : "reshape: (2, 17)";
        check_error(FSDP_PEER_FAILED, words);
        for (int r = 0; r < 4; r++) {
            if (!strstr(c.text[r], words)) fail_msg("rank %d: %s", r, c.text[r]);
            assert_true(c.change[r] == 0);
        }
    }
}

/* After the collective reset training goes on from the same weights. */
static void test_reset(void **state)
{
    (void)state;
    crash clean = {.recover = 1, .clean = 1};
    on(4, crash_rank, &clean);
    for (int backward = 0; backward < 2; backward++) {
        crash c = {.recover = 1, .backward = backward};
        on(4, crash_rank, &c);
        for (int r = 0; r < 4; r++) {
            assert_true(c.change[r] == 0);
            assert_true(c.loss[r] == clean.loss[r]);
        }
    }
}

/* ---- tied weights in one unit ------------------------------------------------------- */

typedef struct tied {
    fsdp_module base;
    fsdp_module *a, *b, *mid;
} tied;

static fsdp_tensor *tied_forward(fsdp_module *self, fsdp_tensor *x)
{
    tied *t = (tied *)self;
    fsdp_tensor *h = fsdp_tanh(fsdp_call(t->mid, fsdp_call(t->a, x)));
    return fsdp_mean(fsdp_mul(fsdp_call(t->b, h), fsdp_call(t->a, x)));
}

static fsdp_tensor *holder_forward(fsdp_module *self, fsdp_tensor *x)
{
    return fsdp_linear(x, fsdp_param_tensor(fsdp_module_param(self, "weight")));
}

/* b has a's weight. */
static tied *tied_create(void)
{
    tied *t = (tied *)fsdp_module_create(sizeof *t, "Tied");
    fsdp_module *b = fsdp_module_create(sizeof *b, "Holder");
    if (!t || !b) return NULL;
    t->base.forward1 = tied_forward;
    b->forward1 = holder_forward;
    t->a = fsdp_module_add(&t->base, "a", fsdp_linear_create(7, 7, 0));
    t->mid = fsdp_module_add(&t->base, "mid", fsdp_linear_create(7, 7, 1));
    t->b = fsdp_module_add(&t->base, "b", b);
    fsdp_module_add_param(b, "weight", fsdp_param_retain(fsdp_module_param(t->a, "weight")));
    return t;
}

typedef struct tied_run {
    int sharded;
    double weights[64 * 4];
    int64_t count;
} tied_run;

static fsdp_status tied_rank(void *arg)
{
    tied_run *r = arg;
    tied *t = tied_create();
    EXPECT(t);
    fsdp_param_list l;
    EXPECT(fsdp_module_params(&t->base, &l) == FSDP_OK);
    EXPECT(l.count == 3); /* a.weight, mid.weight, mid.bias */
    if (r->sharded) {
        EXPECT(fsdp_fully_shard(t->mid, NULL) == FSDP_OK);
        EXPECT(fsdp_fully_shard(&t->base, NULL) == FSDP_OK);
    }
    EXPECT(fsdp_reset_parameters(&t->base, 3) == FSDP_OK);
    fsdp_sgd_options s = {0.5, 0.9, 0, 0};
    fsdp_optimizer *o = fsdp_sgd(&t->base, &s);
    EXPECT(o);
    for (int k = 0; k < 5; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(3, 7), (uint64_t)k, "x");
        fsdp_status st = fsdp_backward(fsdp_call(&t->base, x));
        if (st == FSDP_OK) st = fsdp_optimizer_step(o);
        if (st == FSDP_OK) st = fsdp_zero_grad(&t->base);
        fsdp_scope_end(scope);
        EXPECT(st == FSDP_OK);
    }
    fsdp_scope *scope = fsdp_scope_begin();
    int64_t at = 0;
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        EXPECT(full);
        if (fsdp_rank() == 0) fsdp_to_doubles(full, r->weights + at);
        at += fsdp_numel(full);
    }
    if (fsdp_rank() == 0) r->count = at;
    fsdp_scope_end(scope);
    fsdp_param_list_free(&l);
    fsdp_optimizer_free(o);
    fsdp_module_free(&t->base);
    return FSDP_OK;
}

static void test_tied(void **state)
{
    (void)state;
    tied_run one = {0}, r = {.sharded = 1};
    on(1, tied_rank, &one);
    for (int n = 1; n < 5; n++) { /* every rank has the same rows: the mean is that of one */
        on(n, tied_rank, &r);
        assert_int_equal(r.count, one.count);
        assert_true(net_distance(r.weights, one.weights, one.count) <= 1e-6);
    }
}

/* ---- parameters without a gradient, on some ranks or all ------------------------------ */

static fsdp_status reduced(void *arg, fsdp_tensor *shard)
{
    /* Called with the gradient of all ranks in place. */
    double *v = check_values(fsdp_grad(shard));
    for (int64_t i = 0; v && i < fsdp_numel(shard); i++)
        if (v[i] != v[0]) fsdp__fail(FSDP_INTERNAL, "%g and %g", v[i], v[0]);
    free(v);
    ++*(int *)arg;
    return fsdp_error();
}

typedef struct pick {
    fsdp_module base;
    fsdp_module *part[3];
    int use[8]; /* bits: the parts that rank r runs */
} pick;

static fsdp_tensor *pick_forward(fsdp_module *self, fsdp_tensor *x)
{
    pick *p = (pick *)self;
    fsdp_tensor *y = NULL;
    for (int k = 0; k < 3; k++)
        if (p->use[fsdp_rank()] >> k & 1) {
            fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(p->part[k], "weight"));
            fsdp_tensor *z = fsdp_linear(x, w);
            y = y ? fsdp_add(y, z) : z;
        }
    return fsdp_sum(y);
}

static fsdp_status pick_rank(void *arg)
{
    (void)arg;
    pick *p = (pick *)fsdp_module_create(sizeof *p, "Pick");
    EXPECT(p);
    p->base.forward1 = pick_forward;
    const int use[8] = {3, 1, 3, 1, 1, 1, 1, 1}; /* part 0 on all, 1 on some, 2 on none */
    memcpy(p->use, use, sizeof use);
    for (int k = 0; k < 3; k++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", k);
        p->part[k] = fsdp_module_add(&p->base, name, fsdp_linear_create(3, 5, 0));
    }
    EXPECT(fsdp_fully_shard(&p->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&p->base, 1) == FSDP_OK);
    int N = fsdp_world_size(), hooks[3] = {0, 0, 0};
    for (int k = 0; k < 3; k++)
        EXPECT(fsdp_register_post_accumulate_hook(
                   fsdp_param_tensor(fsdp_module_param(p->part[k], "weight")), reduced,
                   &hooks[k]) == FSDP_OK);
    for (int k = 0; k < 2; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1.0);
        EXPECT(fsdp_backward(fsdp_call(&p->base, x)) == FSDP_OK);
        EXPECT(hooks[0] == k + 1 && hooks[1] == k + 1 && hooks[2] == 0);
        int with = N > 2 ? 2 : 1;
        for (int j = 0; j < 3; j++) {
            fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(p->part[j], "weight")));
            if (j == 2) {
                EXPECT(!g);
                continue;
            }
            EXPECT(g);
            double expected = j == 0 ? 1.0 : (double)with / N;
            double *v = check_values(g);
            for (int64_t i = 0; i < fsdp_numel(g); i++)
                EXPECT(fabs(v[i] - (k + 1) * expected) < 1e-6); /* the second adds to the first */
            free(v);
        }
        fsdp_scope_end(scope);
    }
    fsdp_module_free(&p->base);
    return FSDP_OK;
}

static void test_absent(void **state)
{
    (void)state;
    for (int n = 1; n <= 8; n = n < 4 ? n + 1 : n * 2)
        on(n, pick_rank, NULL);
}

/* ---- shards by hand ------------------------------------------------------------------- */

static fsdp_status by_hand(void *arg)
{
    int private = *(int *)arg;
    fsdp_module *m = fsdp_linear_create(3, 5, 1);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.private_gather = private;
    EXPECT(m && fsdp_fully_shard(m, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_param *w = fsdp_module_param(m, "weight");
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *shard = fsdp_param_tensor(w);
    int N = fsdp_world_size(), r = fsdp_rank();
    int64_t chunk = (5 + N - 1) / N, rows = 5 - r * chunk;
    rows = rows < 0 ? 0 : rows > chunk ? chunk : rows;
    EXPECT(fsdp_is_dtensor(shard) && fsdp_size(shard, 0) == rows && fsdp_size(shard, 1) == 3);
    EXPECT(fsdp_dtensor_sizes(shard)[0] == 5 && fsdp_dtensor_ndim(shard) == 2);
    EXPECT(fsdp_dtensor_placement(shard, 0).kind == FSDP_SHARD);
    if (N == 1) { /* an op on a shard is refused; with more ranks the peers would be told */
        EXPECT(!fsdp_is_sharded_module(NULL));
        fsdp_scale(shard, 2);
        FSDP_TRY(check_failed(FSDP_UNSUPPORTED, "unshard"));
    }
    fsdp_tensor *full = fsdp_dtensor_full(shard);
    EXPECT(full);
    EXPECT(fsdp_unshard(m) == FSDP_OK);
    EXPECT(fsdp_unshard(m) == FSDP_OK); /* whole already */
    fsdp_tensor *whole = fsdp_param_tensor(w);
    EXPECT(whole != shard && !fsdp_is_dtensor(whole) && check_same_bits(whole, full));
    EXPECT(fsdp_reshard(m) == FSDP_OK);
    EXPECT(fsdp_param_tensor(w) == shard && !fsdp_data(whole));
    if (N == 1) { /* kept in spite of the header: refused by name */
        fsdp_scale(whole, 2);
        FSDP_TRY(check_failed(FSDP_INVALID_STATE, "weight"));
    }
    /* Written by hand: the next gather sees it, on a module that is whole as well. */
    EXPECT(fsdp_unshard(m) == FSDP_OK);
    EXPECT(fsdp_fill_(shard, 2.0) == FSDP_OK);
    EXPECT(fsdp_mark_changed(m) == FSDP_OK);
    fsdp_tensor *y = fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1.0));
    fsdp_tensor *bias = fsdp_dtensor_full(fsdp_param_tensor(fsdp_module_param(m, "bias")));
    EXPECT(y && bias);
    for (int64_t i = 0; i < 5; i++)
        EXPECT(fabs(fsdp_at(y, SIZES(0, i)) - 6.0 - fsdp_at(bias, SIZES(i))) < 1e-6);
    /* Changed between forward and backward: named. The root is kept by default. */
    EXPECT(fsdp_mark_changed(m) == FSDP_OK);
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1.0);
    EXPECT(fsdp_requires_grad_(x, 1) == FSDP_OK);
    y = fsdp_sum(fsdp_call(m, x));
    /* Without a backward nothing says that peers have read this shard. */
    EXPECT(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL) == FSDP_OK);
    EXPECT(fsdp_fill_(shard, 3.0) == FSDP_OK);
    EXPECT(fsdp_mark_changed(m) == FSDP_OK);
    if (N == 1) {
        fsdp_backward(y);
        FSDP_TRY(check_failed(FSDP_INVALID_STATE, "weight was updated since the forward"));
    }
    FSDP_TRY(fsdp_reset_iteration(m));
    /* A gathered copy that all ranks share cannot be written to. */
    if (N > 1 && !private) {
        EXPECT(fsdp_unshard(m) == FSDP_OK);
        EXPECT(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL) == FSDP_OK);
        fsdp_fill_(whole, 0);
        if (!strstr(fsdp_error_text(), "weight")) return fsdp__fail(FSDP_INTERNAL, "no name");
        FSDP_TRY(fsdp_reset_iteration(m));
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    fsdp_error_clear();
    return FSDP_OK;
}

static void test_by_hand(void **state)
{
    (void)state;
    for (int private = 0; private < 2; private ++)
        for (int n = 1; n <= 8; n *= 2)
            on(n, by_hand, &private);
}

/* The default mesh is that of the world at hand: one that ended is forgotten. */
static fsdp_status two_worlds(void *arg)
{
    (void)arg;
    for (int k = 0; k < 2; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_module *m = fsdp_linear_create(3, 5, 1);
        EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK);
        EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
        EXPECT(fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(2, 3), 1)));
        EXPECT(fsdp_size(fsdp_param_tensor(fsdp_module_param(m, "weight")), 0) == 5);
        fsdp_scope_end(scope);
        fsdp_module_free(m);
        if (k == 0) EXPECT(fsdp_finalize() == 0);
    }
    return FSDP_OK;
}

static void test_two_worlds(void **state)
{
    (void)state;
    on(2, two_worlds, NULL); /* of two ranks, then each alone */
    check_ok(fsdp_init(NULL, NULL));
    check_ok(two_worlds(NULL));
    fsdp_finalize();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_other_models),
        cmocka_unit_test(test_error_in_forward),
        cmocka_unit_test(test_reset),
        cmocka_unit_test(test_tied),
        cmocka_unit_test(test_absent),
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_two_worlds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
