/*
 * test_optim_ema.c - the moving average of sharded weights: by its definition, the same on any
 * number of ranks, through checkpoints to the bit, and in the weights' place and back.
 */
#include "tensor_check.h"

#include <unistd.h>

#include "ckpt/checkpoint.h"
#include "format/file.h"

enum { VOCAB = 257, WIDTH = 6, STEPS = 20, HALF = 10 };

typedef struct net {
    fsdp_module base;
    fsdp_module *table, *mid, *one;
} net;

/* ids (R) -> the mean of squares of (R, 1). */
static fsdp_tensor *net_forward(fsdp_module *self, fsdp_tensor *ids)
{
    net *n = (net *)self;
    fsdp_tensor *h = fsdp_tanh(fsdp_call(n->mid, fsdp_call(n->table, ids)));
    h = fsdp_cast(fsdp_call(n->one, h), FSDP_F32);
    return fsdp_mean(fsdp_mul(h, h));
}

static net *net_create(void)
{
    net *n = (net *)fsdp_module_create(sizeof *n, "Net");
    if (!n) return NULL;
    n->base.forward1 = net_forward;
    n->table = fsdp_module_add(&n->base, "table", fsdp_embedding_create(VOCAB, WIDTH));
    n->mid = fsdp_module_add(&n->base, "mid", fsdp_linear_create(WIDTH, 5, 1));
    n->one = fsdp_module_add(&n->base, "one", fsdp_linear_create(5, 1, 1));
    return n;
}

typedef struct run {
    const char *folder;
    int half; /* save after HALF steps and stop; or begin from there */
    int load;
    fsdp_dtype dtype;
    double decay;
    /* results of rank 0: the weights and averages, whole, one after the other */
    double *values;
    int64_t n;
} run;

static fsdp_status step(net *n, fsdp_optimizer *o, fsdp_ema *e, int k)
{
    int64_t ids[8];
    for (int i = 0; i < 8; i++)
        ids[i] = (k * 37 + i * 64 + i) % VOCAB; /* the last rows too */
    fsdp_scope *scope = fsdp_scope_begin();
    /* All ranks see the same rows, so that their mean is exact. */
    fsdp_backward(
        fsdp_call(&n->base, fsdp_tensor_from_memory(ids, FSDP_I64, 1, SIZES(8), NULL, NULL, NULL)));
    fsdp_optimizer_step(o);
    fsdp_zero_grad(&n->base);
    fsdp_ema_update(e);
    fsdp_scope_end(scope);
    return fsdp_error();
}

/* Appends the whole of t to the results. */
static fsdp_status collect(run *r, fsdp_tensor *t)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *whole = fsdp_dtensor_full(t);
    if (whole && fsdp_rank() == 0) {
        r->values = realloc(r->values, (size_t)(r->n + fsdp_numel(whole)) * sizeof *r->values);
        fsdp_to_doubles(whole, r->values + r->n);
        r->n += fsdp_numel(whole);
    }
    fsdp_scope_end(scope);
    return fsdp_error();
}

static fsdp_status collect_all(run *r, net *n, fsdp_ema *e)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(&n->base, &l));
    for (int64_t i = 0; i < l.count; i++) {
        collect(r, fsdp_param_tensor(l.items[i].param));
        collect(r, fsdp_ema_average(e, l.items[i].param));
    }
    fsdp_param_list_free(&l);
    return fsdp_error();
}

/* In the weights' place: forward computes with the averages; and back, to the bit. */
static fsdp_status check_swap(net *n, fsdp_ema *e)
{
    run before = {0}, during = {0}, after = {0};
    EXPECT(collect_all(&before, n, e) == FSDP_OK);
    EXPECT(fsdp_ema_swap_in(e) == FSDP_OK && fsdp_ema_swapped(e));
    EXPECT(collect_all(&during, n, e) == FSDP_OK);
    int64_t id = 256;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    /* The gathered copies are the averages too. */
    fsdp_tensor *ids = fsdp_tensor_from_memory(&id, FSDP_I64, 1, SIZES(1), NULL, NULL, NULL);
    double with = fsdp_item(fsdp_call(&n->base, ids));
    EXPECT(fsdp_ema_swap_out(e) == FSDP_OK && !fsdp_ema_swapped(e));
    double without = fsdp_item(fsdp_call(&n->base, ids));
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    EXPECT(with != without);
    EXPECT(collect_all(&after, n, e) == FSDP_OK);
    EXPECT(before.n == after.n && (before.n == 0 || !memcmp(before.values, after.values,
                                                            (size_t)before.n * sizeof(double))));
    int64_t at = 0; /* table: weights, then their averages */
    for (int64_t i = 0; i < VOCAB * WIDTH && during.n > 0; i++) {
        double average = before.values[VOCAB * WIDTH + i], x = during.values[at + i];
        double bound =
            fsdp_tensor_dtype(fsdp_param_tensor(fsdp_module_param(n->table, "weight"))) == FSDP_F32
                ? 0
                : fabs(average) / 128;
        EXPECT(fabs(x - average) <= bound);
    }
    free(before.values);
    free(during.values);
    free(after.values);
    return FSDP_OK;
}

static fsdp_status rank_main(void *arg)
{
    run *r = arg;
    net *n = net_create();
    EXPECT(n && (r->dtype == FSDP_F32 || fsdp_module_to_dtype(&n->base, r->dtype) == FSDP_OK));
    EXPECT(fsdp_fully_shard(n->mid, NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 11) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *o = fsdp_adamw(&n->base, &a);
    fsdp_ema *e = fsdp_ema_create(&n->base, r->decay);
    EXPECT(o && e);
    fsdp__ckpt_state s = {.step = HALF, .ema = e};
    if (r->load) {
        EXPECT(fsdp__ckpt_load(&n->base, o, r->folder, HALF, &s) == FSDP_OK);
        EXPECT(fsdp_mark_changed(&n->base) == FSDP_OK && fsdp_ema_updates(e) == HALF);
    }
    for (int k = r->load ? HALF : 0; k < (r->half ? HALF : STEPS); k++)
        EXPECT(step(n, o, e, k) == FSDP_OK);
    if (r->half) {
        EXPECT(fsdp__ckpt_save(&n->base, o, r->folder, &s) == FSDP_OK);
    } else {
        EXPECT(collect_all(r, n, e) == FSDP_OK);
        EXPECT(check_swap(n, e) == FSDP_OK);
        EXPECT(step(n, o, e, STEPS) == FSDP_OK); /* training goes on */
    }
    fsdp_ema_free(e);
    fsdp_optimizer_free(o);
    fsdp_module_free(&n->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void go(int ranks, run *r)
{
    if (r->dtype == FSDP_DTYPE_NONE) r->dtype = FSDP_F32;
    if (r->decay == 0) r->decay = 0.9;
    if (fsdp_run_threads(ranks, rank_main, r) != FSDP_OK) {
        char text[1024];
        snprintf(text, sizeof text, "%s", fsdp_error_text());
        fsdp_error_clear();
        fail_msg("%d ranks: %s", ranks, text);
    }
}

static void same(const run *a, const run *b, const char *what)
{
    assert_int_equal(a->n, b->n);
    for (int64_t i = 0; i < a->n; i++)
        if (memcmp(&a->values[i], &b->values[i], sizeof(double)))
            fail_msg("%s: number %lld: %.9g and %.9g", what, (long long)i, a->values[i],
                     b->values[i]);
}

static void test_any_ranks(void **state)
{
    (void)state;
    run one = {0};
    go(1, &one);
    static const int ranks[] = {2, 4, 8};
    for (int i = 0; i < 3; i++) {
        run r = {0};
        go(ranks[i], &r);
        same(&r, &one, "ranks");
        free(r.values);
    }
    free(one.values);
}

/* 257 rows over 4 ranks, saved half-way and loaded by as many and by others. */
static void test_resume(void **state)
{
    (void)state;
    char folder[] = "/tmp/fsdp-test-ema-XXXXXX";
    assert_non_null(mkdtemp(folder));
    run whole = {0}, half = {.folder = folder, .half = 1};
    go(4, &whole);
    go(4, &half);
    static const int ranks[] = {4, 2, 1};
    for (int i = 0; i < 3; i++) {
        run r = {.folder = folder, .load = 1};
        go(ranks[i], &r);
        same(&r, &whole, "resumed");
        free(r.values);
    }
    free(whole.values);
    (void)fsdp__dir_remove(folder);
}

/* Weights of two bytes keep their bits over an exchange; the average has more digits. */
static void test_narrow_weights(void **state)
{
    (void)state;
    run r = {.dtype = FSDP_BF16, .decay = 0.3}; /* and the other end of lerp */
    go(2, &r);
    free(r.values);
}

/* Against the definition, on one rank: average = decay * average + (1 - decay) * weight. */
static void test_definition(void **state)
{
    (void)state;
    net *n = net_create();
    check_tensor(n);
    check_ok(fsdp_reset_parameters(&n->base, 11));
    fsdp_param *p = fsdp_module_param(n->mid, "weight");
    fsdp_ema *e = fsdp_ema_create(&n->base, 0.9);
    check_tensor(e);
    double expected = 0;
    for (int k = 0; k < 5; k++) {
        check_ok(fsdp_fill_(fsdp_param_tensor(p), k * k + 1.0));
        check_ok(fsdp_ema_update(e));
        expected = k == 0 ? 1.0 : 0.9 * expected + 0.1 * (k * k + 1.0);
        double got = fsdp_at(fsdp_ema_average(e, p), SIZES(2, 3));
        if (!(fabs(got / expected - 1) < 1e-6)) fail_msg("%g and %g", got, expected);
    }
    assert_int_equal(fsdp_ema_updates(e), 5);
    check_ok(fsdp_ema_swap_in(e));
    fsdp_ema_update(e);
    check_error(FSDP_INVALID_STATE, "fsdp_ema_update while the average has the weights' place");
    fsdp_optimizer *o = fsdp_sgd(&n->base, NULL);
    fsdp_optimizer_step(o);
    check_error(FSDP_INVALID_STATE, "call fsdp_ema_swap_out first");
    assert_int_equal(fsdp_optimizer_step_count(o), 0);
    fsdp_ema *second = fsdp_ema_create(&n->base, 0.5);
    fsdp_ema_swap_in(second);
    check_error(FSDP_INVALID_STATE, "another moving average has the place of");
    fsdp_ema_free(second);
    fsdp__ckpt_state s = {.ema = e};
    fsdp__ckpt_save(&n->base, NULL, "/nowhere", &s);
    check_error(FSDP_INVALID_STATE, "call fsdp_ema_swap_out first");
    check_ok(fsdp_ema_swap_out(e));
    fsdp_ema_swap_out(e);
    check_error(FSDP_INVALID_STATE, "does not have the weights' place");
    check_ok(fsdp_optimizer_step(o));
    fsdp_optimizer_free(o);
    fsdp_ema_free(e);
    assert_null(fsdp_ema_create(&n->base, 1.0));
    check_error(FSDP_INVALID_ARGUMENT, "expected a module and at least 0 and below 1");
    fsdp_param_requires_grad_(p, 0);
    e = fsdp_ema_create(&n->base, 0.9);
    assert_null(fsdp_ema_average(e, p)); /* what does not change has none */
    fsdp_ema_free(e);
    fsdp_module_free(&n->base);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definition),
        cmocka_unit_test(test_any_ranks),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_narrow_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
