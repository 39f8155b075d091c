/*
 * test_fsdp_misuse.c - sharded modules used in ways that must be refused: freed before their
 * graphs, grown after they were sharded, stepped while a moving average is in, given options that
 * mean nothing, set while they are gathered, reduced by a function that fails without a word.
 */
#include "tensor_check.h"

#include "nn/module.h"

typedef struct pair {
    fsdp_module *root, *a, *b;
} pair;

static fsdp_status make(pair *p, int checkpointed)
{
    p->root = fsdp_sequential_create();
    p->a = fsdp_module_add(p->root, "a", fsdp_linear_create(4, 6, 1));
    p->b = fsdp_module_add(p->root, "b", fsdp_linear_create(6, 4, 0));
    EXPECT(p->a && p->b);
    if (checkpointed) EXPECT(fsdp_checkpoint_module(p->a, NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(p->a, NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(p->root, NULL) == FSDP_OK);
    return fsdp_reset_parameters(p->root, 1);
}

static fsdp_tensor *loss_of(fsdp_module *m)
{
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(3, 4), (uint64_t)fsdp_rank() + 1, "x");
    if (!x || fsdp_requires_grad_(x, 1) != FSDP_OK) return NULL;
    fsdp_tensor *y = fsdp_call(m, x);
    return fsdp_sum(fsdp_mul(y, y));
}

/* ---- freed before the graph ----------------------------------------------------------- */

/* arg: 1 a checkpoint, 2 a backward before (and its graph kept), 4 nothing is ever run. */
static fsdp_status freed(void *arg)
{
    int way = *(const int *)arg;
    pair p;
    int64_t live = check_live();
    fsdp_scope *outer = fsdp_scope_begin();
    EXPECT(make(&p, way & 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = loss_of(p.root);
    EXPECT(loss);
    if (way & 2) {
        EXPECT(fsdp_backward_from(loss, fsdp_full(FSDP_F32, 0, NULL, 1.0), 1) == FSDP_OK);
    }
    fsdp_scope_keep(loss);
    fsdp_scope_end(scope);
    fsdp_module_free(p.root);
    if (!(way & 4)) {
        fsdp_status s = fsdp_backward(loss);
        FSDP_TRY(check_failed(FSDP_INVALID_STATE, "sharded module that was freed"));
        EXPECT(s == FSDP_INVALID_STATE);
    }
    fsdp_scope_end(outer);
    EXPECT(check_live() == live);
    return FSDP_OK;
}

enum { GATHER, SUMMON, FORWARD, UNFINISHED, WHOLE_GRADIENTS, OPTIMIZER, EARLY, WAYS };

/* The module goes while something of it is under way; what was begun is ended after it. */
static fsdp_status under_way(void *arg)
{
    int way = *(const int *)arg;
    int64_t live = check_live();
    pair p;
    fsdp_unshard_handle *h = NULL;
    fsdp_summon *s = NULL;
    fsdp_optimizer *o = NULL;
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(make(&p, 0) == FSDP_OK);
    if (way == UNFINISHED) EXPECT(fsdp_set_is_last_backward(p.root, 0) == FSDP_OK);
    if (way == WHOLE_GRADIENTS) EXPECT(fsdp_set_requires_gradient_sync(p.root, 0, 1) == FSDP_OK);
    if (way >= OPTIMIZER) EXPECT((o = fsdp_adamw(p.root, NULL)) != NULL);
    if (way == EARLY) EXPECT(fsdp_optimizer_in_backward(o, 1) == FSDP_OK);
    fsdp_tensor *loss = loss_of(p.root);
    EXPECT(loss);
    if (way != FORWARD) EXPECT(fsdp_backward(loss) == FSDP_OK);
    if (way == GATHER) EXPECT(fsdp_unshard_async(p.a, &h) == FSDP_OK);
    if (way == SUMMON) EXPECT(fsdp_summon_full_params_begin(p.root, NULL, &s) == FSDP_OK);
    fsdp_module_free(p.root);
    if (way == GATHER) EXPECT(fsdp_unshard_wait(h) == FSDP_OK);
    if (way == SUMMON) EXPECT(fsdp_summon_full_params_end(s) == FSDP_OK);
    if (way == OPTIMIZER) EXPECT(fsdp_optimizer_step(o) == FSDP_OK); /* it holds the shards */
    fsdp_optimizer_free(o);
    fsdp_scope_end(scope);
    EXPECT(check_live() == live);
    return FSDP_OK;
}

static void test_under_way(void **state)
{
    (void)state;
    for (int way = 0; way < WAYS; way++)
        for (int ranks = 1; ranks <= 3; ranks++)
            check_ok(fsdp_run_threads(ranks, under_way, &way));
}

static void test_freed(void **state)
{
    (void)state;
    for (int way = 0; way < 8; way++) {
        check_ok(fsdp_run_threads(1, freed, &way));
        if (way & 4) check_ok(fsdp_run_threads(2, freed, &way));
    }
}

/* ---- grown later ------------------------------------------------------------------------ */

static fsdp_status grown(void *arg)
{
    (void)arg;
    pair p;
    EXPECT(make(&p, 0) == FSDP_OK);
    int children = fsdp_module_child_count(p.root);
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    for (int deep = 0; deep < 2; deep++) {
        fsdp_module *late = fsdp_linear_create(4, 4, 0);
        if (deep) {
            fsdp_module *box = fsdp_sequential_create();
            fsdp_module_add(box, "inner", late);
            late = box;
        }
        EXPECT(!fsdp_module_add(p.root, "late", late));
        FSDP_TRY(check_failed(FSDP_INVALID_STATE, "added below a Sequential that is sharded"));
    }
    EXPECT(fsdp_module_child_count(p.root) == children);
    EXPECT(!fsdp_module_add_param(p.a, "late", fsdp_param_create(FSDP_F32, 1, SIZES(2), one)));
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "late is added below a Linear that is sharded"));
    EXPECT(!fsdp_module_param(p.a, "late"));
    /* What has no parameter may come, and what is a unit itself. */
    EXPECT(fsdp_module_add(p.root, "drop", fsdp_dropout_create(0)));
    fsdp_module *unit = fsdp_linear_create(4, 4, 0);
    EXPECT(fsdp_fully_shard(unit, NULL) == FSDP_OK && fsdp_reset_parameters(unit, 2) == FSDP_OK);
    EXPECT(fsdp_module_add(p.root, "unit", unit));
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(fsdp_backward(loss_of(p.root)) == FSDP_OK);
    EXPECT(fsdp_grad(fsdp_param_shard(fsdp_module_param(unit, "weight"))));
    fsdp_scope_end(scope);
    fsdp_module_free(p.root);
    return FSDP_OK;
}

/* One that was named before may come later. */
static fsdp_status ignored(void *arg)
{
    (void)arg;
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    fsdp_module *m = fsdp_linear_create(4, 4, 0);
    fsdp_param *p = fsdp_param_create(FSDP_F32, 1, SIZES(2), one);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.ignored_params = &p;
    o.n_ignored = 1;
    EXPECT(m && p && fsdp_fully_shard(m, &o) == FSDP_OK);
    EXPECT(fsdp_module_add_param(m, "own", p) == p);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_grown(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, grown, NULL));
    check_ok(fsdp_run_threads(2, ignored, NULL));
}

/* ---- a step while the averages are in ----------------------------------------------------- */

static fsdp_status averaged(void *arg)
{
    int early = *(const int *)arg;
    pair p;
    EXPECT(make(&p, 0) == FSDP_OK);
    fsdp_optimizer *o = fsdp_adamw(p.root, NULL);
    fsdp_ema *e = fsdp_ema_create(p.root, 0.5), *second = fsdp_ema_create(p.root, 0.9);
    EXPECT(o && e && second && fsdp_ema_update(e) == FSDP_OK);
    if (early) EXPECT(fsdp_optimizer_in_backward(o, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *w = fsdp_param_shard(fsdp_module_param(p.a, "weight"));
    fsdp_tensor *before = fsdp_dtensor_full(w);
    EXPECT(fsdp_ema_swap_in(e) == FSDP_OK);
    EXPECT(fsdp_ema_swap_in(second) == FSDP_INVALID_STATE);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "another moving average"));
    fsdp_tensor *loss = loss_of(p.root);
    fsdp_status s = fsdp_backward(loss);
    if (!early) s = fsdp_optimizer_step(o);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "call fsdp_ema_swap_out first"));
    EXPECT(s == FSDP_INVALID_STATE && fsdp_optimizer_step_count(o) == 0);
    EXPECT(fsdp_reset_iteration(p.root) == FSDP_OK);
    EXPECT(fsdp_ema_swap_out(e) == FSDP_OK && check_same_bits(fsdp_dtensor_full(w), before));
    EXPECT(fsdp_zero_grad(p.root) == FSDP_OK);
    EXPECT(fsdp_backward(loss_of(p.root)) == FSDP_OK && fsdp_optimizer_step(o) == FSDP_OK);
    EXPECT(!check_same_bits(fsdp_dtensor_full(w), before));
    EXPECT(fsdp_ema_swap_in(e) == FSDP_OK); /* the average that is freed stays in */
    fsdp_ema_free(e);
    fsdp_ema_free(second);
    fsdp_scope_end(scope);
    fsdp_optimizer_free(o);
    fsdp_module_free(p.root);
    return FSDP_OK;
}

static void test_averaged(void **state)
{
    (void)state;
    for (int early = 0; early < 2; early++)
        check_ok(fsdp_run_threads(1, averaged, &early));
}

/* ---- options --------------------------------------------------------------------------------- */

static fsdp_status refused(fsdp_module *m, const fsdp_shard_options *o, fsdp_status code,
                           const char *words)
{
    EXPECT(fsdp_fully_shard(m, o) == code);
    FSDP_TRY(check_failed(code, words));
    EXPECT(!fsdp_is_sharded_module(m));
    return FSDP_OK;
}

static fsdp_status options(void *arg)
{
    (void)arg;
    const fsdp_dtype bad[] = {FSDP_I64, FSDP_U8, FSDP_BOOL, (fsdp_dtype)99, (fsdp_dtype)-7};
    fsdp_module *m = fsdp_linear_create(4, 6, 1);
    fsdp_shard_options o = fsdp_shard_defaults(NULL), good = o;
    for (int i = 0; i < 5; i++) {
        o = good;
        o.mp_policy.param_dtype = bad[i];
        FSDP_TRY(refused(m, &o, FSDP_INVALID_DTYPE, "mp_policy.param_dtype"));
        o = good;
        o.mp_policy.reduce_dtype = bad[i];
        FSDP_TRY(refused(m, &o, FSDP_INVALID_DTYPE, "mp_policy.reduce_dtype"));
        o = good;
        o.mp_policy.output_dtype = bad[i];
        FSDP_TRY(refused(m, &o, FSDP_INVALID_DTYPE, "mp_policy.output_dtype"));
    }
    fsdp_param *list[] = {fsdp_module_param(m, "bias"), NULL};
    o = good;
    o.ignored_params = list;
    o.n_ignored = 2;
    FSDP_TRY(refused(m, &o, FSDP_INVALID_ARGUMENT, "ignored parameter 1 is NULL"));
    o = good;
    o.reshard_after_forward = (fsdp_reshard_policy)77;
    FSDP_TRY(refused(m, &o, FSDP_INVALID_ARGUMENT, "reshard_after_forward is 77"));
    EXPECT(fsdp_fully_shard(m, &good) == FSDP_OK);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_options(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, options, NULL));
}

/* ---- set at the wrong time, or of no module ----------------------------------------------------
 */

static fsdp_status take(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    (void)arg;
    (void)i;
    out->n = 1;
    out->t[0] = shard;
    return FSDP_OK;
}

static fsdp_status silent_post(void *arg, fsdp_gather_info *i, const fsdp_values *got,
                               fsdp_tensor *out)
{
    (void)arg;
    (void)i;
    (void)got;
    (void)out;
    return FSDP_INVALID_DATA;
}

static fsdp_status settings(void *arg)
{
    (void)arg;
    const fsdp_gather_extension e = {take, silent_post, NULL};
    pair p;
    EXPECT(make(&p, 0) == FSDP_OK);
    EXPECT(fsdp_unshard(p.a) == FSDP_OK);
    fsdp_set_int8_gather(p.a, 1, 0);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "is whole now; call fsdp_reshard first"));
    fsdp_set_all_gather_extension(p.a, "*", &e);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "is whole now; call fsdp_reshard first"));
    EXPECT(fsdp_reshard(p.a) == FSDP_OK);
    fsdp_unshard(NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "fsdp_unshard_async: the module is NULL"));
    fsdp_module *list[] = {p.a, NULL};
    fsdp_set_modules_to_forward_prefetch(p.root, list, 2);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "module 1 of the list is NULL"));
    fsdp_set_post_optim_event(p.a, NULL);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "call it on the root"));
    EXPECT(fsdp_set_all_gather_extension(p.root, "a.weight", &e) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(!loss_of(p.root));
    FSDP_TRY(check_failed(FSDP_INVALID_DATA,
                          "the gather extension's post of a.weight returned invalid data"));
    fsdp_scope_end(scope);
    EXPECT(fsdp_reset_iteration(p.root) == FSDP_OK);
    fsdp_module_free(p.root);
    return FSDP_OK;
}

/* A module inside another of the list, in both orders; nothing is modified by it. */
static fsdp_status shared(void *arg)
{
    (void)arg;
    pair p, q;
    EXPECT(make(&p, 0) == FSDP_OK && make(&q, 0) == FSDP_OK);
    fsdp_module *in_front[] = {p.a, p.root}, *behind[] = {p.root, p.a}, *none[] = {q.root, NULL};
    fsdp_module *roots[] = {p.root, q.root};
    fsdp_share_comm_ctx(in_front, 2);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "\"a\" is inside the sharded Sequential"));
    fsdp_share_comm_ctx(behind, 2);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "\"a\" (number 1) is inside the root"));
    fsdp_share_comm_ctx(none, 2);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "NULL"));
    EXPECT(fsdp_share_comm_ctx(roots, 2) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(fsdp_backward(fsdp_add(loss_of(p.root), loss_of(q.root))) == FSDP_OK);
    fsdp_scope_end(scope);
    fsdp_module_free(p.root);
    fsdp_module_free(q.root);
    return FSDP_OK;
}

static void test_settings(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, settings, NULL));
    check_ok(fsdp_run_threads(1, shared, NULL));
}

static void test_models(void **state)
{
    (void)state;
    assert_true(isnan(fsdp_model_flops_per_token(NULL, 1)));
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_model_flops_per_token");
    assert_null(fsdp_kv_cache_create(NULL, 1, 1, FSDP_F32));
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_kv_cache_create");
}

/* ---- collectives that fail without a word
 * -------------------------------------------------------- */

static fsdp_status silent(void *arg, fsdp_tensor *output, fsdp_tensor *input, fsdp_group *g,
                          fsdp_work **work)
{
    (void)arg;
    (void)output;
    (void)input;
    (void)g;
    (void)work;
    return FSDP_IO_ERROR;
}

static fsdp_status collective(void *arg)
{
    int gathers = *(const int *)arg;
    const fsdp_custom_all_gather g = {NULL, silent, NULL};
    const fsdp_custom_reduce_scatter r = {NULL, silent, NULL};
    pair p;
    EXPECT(make(&p, 0) == FSDP_OK);
    EXPECT((gathers ? fsdp_set_custom_all_gather(p.a, &g)
                    : fsdp_set_custom_reduce_scatter(p.a, &r)) == FSDP_OK);
    fsdp_optimizer *o = fsdp_adamw(p.root, NULL);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = loss_of(p.root);
    fsdp_status s = gathers ? fsdp_error() : fsdp_backward(loss);
    int refuses = fsdp_optimizer_step(o) != FSDP_OK; /* a program that looks once, at its end */
    fsdp_scope_end(scope);
    fsdp_optimizer_free(o);
    fsdp_module_free(p.root);
    if (s == FSDP_OK || fsdp_error() == FSDP_OK || !refuses)
        return fsdp__fail(FSDP_INTERNAL, "status %d, kept %d, step %d", s, fsdp_error(), refuses);
    return fsdp_error();
}

static void test_collectives(void **state)
{
    (void)state;
    for (int gathers = 0; gathers < 2; gathers++) {
        assert_int_equal(fsdp_run_threads(2, collective, &gathers), FSDP_IO_ERROR);
        check_error(FSDP_IO_ERROR, gathers ? "the custom all-gather of unit \"a\" returned"
                                           : "the custom reduce-scatter of unit \"a\" returned");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_freed),     cmocka_unit_test(test_grown),
        cmocka_unit_test(test_averaged),  cmocka_unit_test(test_options),
        cmocka_unit_test(test_settings),  cmocka_unit_test(test_models),
        cmocka_unit_test(test_under_way), cmocka_unit_test(test_collectives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
