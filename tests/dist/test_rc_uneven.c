/*
 * test_rc_uneven.c - RC-10: dims 1, 5, 6, 7 and 257 on 2, 4 and 8 ranks, so that some hold less and
 * some nothing: 20 steps with a moving average, one of them with an infinity on one rank, equal
 * those of one rank; saved after 10 and loaded, the rest is the same to the bit.
 */
#include "sharded_net.h"

#include <unistd.h>

#include "ckpt/checkpoint.h"
#include "format/file.h"

enum { ROWS = 16, STEPS = 20, SAVED = 10, INF = 14, A = 257, B = 7, C = 6 };

typedef struct odd {
    fsdp_module base;
    fsdp_module *a, *b, *c, *norm, *head;
} odd;

/* x (rows, 5), y (rows, 1) -> the loss */
static fsdp_tensor *odd_forward(fsdp_module *self, fsdp_tensor *x, fsdp_tensor *y)
{
    odd *o = (odd *)self;
    fsdp_tensor *h = fsdp_gelu(fsdp_call(o->a, x));
    h = fsdp_gelu(fsdp_call(o->b, h));
    h = fsdp_call(o->norm, fsdp_call(o->c, h));
    return fsdp_mse_loss(fsdp_call(o->head, h), y, FSDP_REDUCE_MEAN);
}

static odd *odd_create(void)
{
    odd *o = (odd *)fsdp_module_create(sizeof *o, "Odd");
    if (!o) return NULL;
    o->base.forward2 = odd_forward;
    o->a = fsdp_module_add(&o->base, "a", fsdp_linear_create(NET_IN, A, 1));
    o->b = fsdp_module_add(&o->base, "b", fsdp_linear_create(A, B, 1));
    o->c = fsdp_module_add(&o->base, "c", fsdp_linear_create(B, C, 0));
    o->norm = fsdp_module_add(&o->base, "norm", fsdp_rms_norm_create(C, 1e-5));
    o->head = fsdp_module_add(&o->base, "head", fsdp_linear_create(C, 1, 1));
    return o;
}

typedef struct run {
    int ranks, plain;
    char folder[128]; /* "": nothing is saved */
    int resume;       /* starts from step SAVED of the folder */
    /* results, of rank 0 */
    double loss[STEPS], norm[STEPS];
    int skipped;
    double *params, *average; /* whole; freed by the test */
    int64_t numel;
} run;

/* Everything that a run holds. */
typedef struct parts {
    odd *m;
    fsdp_optimizer *opt;
    fsdp_ema *ema;
    fsdp_grad_scaler *scaler;
} parts;

static fsdp_status make(const run *r, parts *p)
{
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    p->m = odd_create();
    fsdp_device_pop();
    EXPECT(p->m);
    if (!r->plain) {
        fsdp_shard_options o = fsdp_shard_defaults(NULL);
        o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
        FSDP_TRY(fsdp_fully_shard(p->m->a, &o));
        FSDP_TRY(fsdp_fully_shard(p->m->b, &o));
        FSDP_TRY(fsdp_fully_shard(&p->m->base, &o));
    }
    FSDP_TRY(fsdp_to_empty(&p->m->base, FSDP_CPU));
    FSDP_TRY(fsdp_reset_parameters(&p->m->base, 3));
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_scaler_options s = fsdp_scaler_defaults();
    s.init_scale = 8; /* a power of two: changes no bit */
    p->opt = fsdp_adamw(&p->m->base, &a);
    p->ema = fsdp_ema_create(&p->m->base, 0.9);
    p->scaler = fsdp_grad_scaler_create(&s);
    EXPECT(p->opt && p->ema && p->scaler);
    return FSDP_OK;
}

static void drop(parts *p)
{
    fsdp_grad_scaler_free(p->scaler);
    fsdp_ema_free(p->ema);
    fsdp_optimizer_free(p->opt);
    if (p->m) fsdp_module_free(&p->m->base);
}

/* Rank 0 alone holds the one row of the head's weight. */
static void put_infinity(parts *p)
{
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(p->m->head, "weight")));
    if (fsdp_rank() == 0) ((float *)fsdp_data(g))[1] = INFINITY;
}

static fsdp_status step(run *r, parts *p, int i)
{
    char name[32];
    int each = ROWS / r->ranks, first = fsdp_rank() * each, found = 0, stepped = 0;
    double norm = 0, loss, all[8] = {0}, mean = 0;
    snprintf(name, sizeof name, "step %d", i);
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(ROWS, NET_IN), 5, name);
    x = fsdp_contiguous(fsdp_slice(x, 0, first, first + each));
    fsdp_tensor *y = fsdp_sum_dim(fsdp_sigmoid(x), 1, 1);
    fsdp_tensor *l = fsdp_call2(&p->m->base, x, y);
    EXPECT(l);
    loss = fsdp_item(l);
    FSDP_TRY(fsdp_backward(fsdp_grad_scaler_scale(p->scaler, l)));
    if (i == INF) put_infinity(p);
    FSDP_TRY(fsdp_grad_scaler_unscale(p->scaler, p->opt, &found));
    EXPECT(found == (i == INF)); /* on every rank, also on those that hold nothing */
    if (!found) FSDP_TRY(fsdp_clip_grad_norm(&p->m->base, 0.5, &norm));
    FSDP_TRY(fsdp_grad_scaler_step(p->scaler, p->opt, &stepped));
    FSDP_TRY(fsdp_grad_scaler_update(p->scaler));
    if (stepped) FSDP_TRY(fsdp_ema_update(p->ema));
    FSDP_TRY(fsdp_zero_grad(&p->m->base));
    FSDP_TRY(fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, &loss, all, sizeof loss, NULL));
    for (int k = 0; k < r->ranks; k++)
        mean += all[k] / r->ranks;
    if (fsdp_rank() == 0) {
        r->loss[i] = mean;
        r->norm[i] = norm;
        r->skipped += !stepped;
    }
    return FSDP_OK;
}

/* All parameters as one array. */
static double *collect(odd *m, int64_t *numel)
{
    fsdp_param_list l;
    *numel = fsdp_module_numel(&m->base);
    double *all = calloc((size_t)*numel, sizeof *all);
    int64_t at = 0;
    if (!all || fsdp_module_params(&m->base, &l) != FSDP_OK) return all;
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        if (full) (void)fsdp_to_doubles(full, all + at);
        at += fsdp_numel(full);
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    return all;
}

static fsdp_status keep_results(run *r, parts *p)
{
    int64_t numel; /* each rank's own: they share r */
    double *params = collect(p->m, &numel);
    FSDP_TRY(fsdp_ema_swap_in(p->ema));
    double *average = collect(p->m, &numel);
    FSDP_TRY(fsdp_ema_swap_out(p->ema));
    if (fsdp_rank() == 0) {
        r->numel = numel;
        r->params = params;
        r->average = average;
    } else {
        free(params);
        free(average);
    }
    return fsdp_error();
}

static fsdp_status train(run *r, parts *p)
{
    FSDP_TRY(make(r, p));
    fsdp__ckpt_state s = {.ema = p->ema};
    int first = r->resume ? SAVED : 0;
    if (r->resume) {
        FSDP_TRY(fsdp__ckpt_load(&p->m->base, p->opt, r->folder, SAVED, &s));
        FSDP_TRY(fsdp_mark_changed(&p->m->base));
        EXPECT(s.step == SAVED && s.samples == SAVED * ROWS);
    }
    for (int i = first; i < STEPS; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status e = step(r, p, i);
        fsdp_scope_end(scope);
        FSDP_TRY(e);
        if (i + 1 != SAVED || !*r->folder) continue;
        s.step = SAVED;
        s.samples = SAVED * ROWS;
        FSDP_TRY(fsdp__ckpt_save(&p->m->base, p->opt, r->folder, &s));
    }
    return keep_results(r, p);
}

static fsdp_status run_rank(void *arg)
{
    run *r = arg;
    parts p = {0};
    fsdp_status s = train(r, &p);
    drop(&p);
    if (s == FSDP_OK) EXPECT(check_live() == 0);
    return s;
}

static void go(run *r)
{
    check_ok(fsdp_run_threads(r->ranks, run_rank, r));
    assert_int_equal(r->skipped, 1);
}

static void run_free(run *r)
{
    free(r->params);
    free(r->average);
}

static void test_rc10(void **state)
{
    (void)state;
    char dir[] = "/tmp/fsdp-rc10-XXXXXX";
    assert_non_null(mkdtemp(dir));
    run one = {.ranks = 1, .plain = 1};
    go(&one);
    assert_true(one.loss[STEPS - 1] < 0.5 * one.loss[0]);
    for (int n = 2; n <= 8; n *= 2) {
        run whole = {.ranks = n}, rest = {.ranks = n, .resume = 1};
        snprintf(whole.folder, sizeof whole.folder, "%s/%d", dir, n);
        snprintf(rest.folder, sizeof rest.folder, "%s/%d", dir, n);
        go(&whole);
        for (int i = 0; i < STEPS; i++)
            if (!(fabs(whole.loss[i] - one.loss[i]) <= 2e-5 * one.loss[i]))
                fail_msg("%d ranks, step %d: loss %.9g and %.9g", n, i, whole.loss[i], one.loss[i]);
        assert_true(net_distance(whole.params, one.params, one.numel) < 5e-4);
        assert_true(net_distance(whole.average, one.average, one.numel) < 5e-4);
        assert_true(net_distance(whole.average, whole.params, one.numel) > 1e-3);
        go(&rest);
        for (int i = SAVED; i < STEPS; i++)
            if (rest.loss[i] != whole.loss[i] || rest.norm[i] != whole.norm[i])
                fail_msg("%d ranks, resumed step %d: loss %.17g and %.17g", n, i, rest.loss[i],
                         whole.loss[i]);
        assert_memory_equal(rest.params, whole.params, (size_t)one.numel * sizeof(double));
        assert_memory_equal(rest.average, whole.average, (size_t)one.numel * sizeof(double));
        run_free(&whole);
        run_free(&rest);
    }
    run_free(&one);
    check_ok(fsdp__dir_remove(dir));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rc10)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
