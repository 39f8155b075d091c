/*
 * test_misuse.c - what a program that uses the library may do wrong: each mistake is an error that
 * names it, kept until it is looked at, and nothing is written through NULL or into freed memory.
 */
#include "sharded_net.h"

static fsdp_tensor *ones(void)
{
    return fsdp_shift(fsdp_zeros(FSDP_F32, 2, SIZES(2, 3)), 1.0);
}

/* ---- a graph that outlives its module ------------------------------------------------------- */

enum { SHARDED = 1, CHECKPOINTED = 2 };

static fsdp_status outlived(void *arg)
{
    int kind = *(int *)arg;
    fsdp_module *m = fsdp_linear_create(3, 4, 1);
    EXPECT(m);
    if (kind & CHECKPOINTED) EXPECT(fsdp_checkpoint_module(m, NULL) == FSDP_OK);
    if (kind & SHARDED) EXPECT(fsdp_fully_shard(m, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = ones();
    EXPECT(fsdp_requires_grad_(x, 1) == FSDP_OK);
    fsdp_tensor *loss = fsdp_sum(fsdp_call(m, x));
    EXPECT(loss);
    fsdp_module_free(m);
    (void)fsdp_backward(loss);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "module that was freed after its forward"));
    fsdp_scope_end(scope);
    return FSDP_OK;
}

static void test_outlived(void **state)
{
    (void)state;
    for (int kind = SHARDED; kind <= (SHARDED | CHECKPOINTED); kind++) {
        check_ok(fsdp_run_threads(1, outlived, &kind));
        if (kind & SHARDED) check_ok(fsdp_run_threads(2, outlived, &kind));
    }
}

/* ---- what comes after sharding ----------------------------------------------------------------
 */

static void test_late(void **state)
{
    (void)state;
    fsdp_init_rule rule = {FSDP_INIT_ONES, 0, 0};
    net *n = net_create(2);
    fsdp_param *left = fsdp_module_param(fsdp_module_find(n->block[0], "up"), "weight");
    check_tensor(left);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.ignored_params = &left;
    o.n_ignored = 1;
    check_ok(fsdp_fully_shard(n->block[0], &o));
    check_ok(fsdp_fully_shard(&n->base, &o));
    assert_null(fsdp_module_add(&n->base, "late", fsdp_linear_create(8, 8, 0)));
    check_error(FSDP_INVALID_STATE, "late.weight is added below a");
    assert_null(
        fsdp_module_add_param(n->block[0], "gain", fsdp_param_create(FSDP_F32, 1, SIZES(4), rule)));
    check_error(FSDP_INVALID_STATE, "add it before fsdp_fully_shard");
    /* What somebody sees to already may be held once more. */
    check_tensor(fsdp_module_add_param(&n->base, "again", fsdp_param_retain(left)));
    fsdp_module_free(&n->base);
    assert_int_equal(check_live(), 0);
}

/* ---- NULL and numbers of tensors ----------------------------------------------------------------
 */

static int many;

static fsdp_status too_many(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    (void)self;
    *out = *in;
    out->n = many;
    return FSDP_OK;
}

static fsdp_status hook_too_many(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)m;
    in->n = *(int *)arg;
    return FSDP_OK;
}

static void test_values(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = fsdp_module_create(sizeof *m, "Any");
    m->forward = too_many;
    check_ok(fsdp_module_add_method(m, "other", too_many));
    fsdp_values in = {1, {ones()}}, out;
    fsdp_module_call(m, NULL, &out);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call");
    fsdp_module_call(m, &in, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call");
    fsdp_module_call_method(m, "other", NULL, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_call_method");
    for (many = -1; many <= FSDP_VALUES_MAX + 1; many += FSDP_VALUES_MAX + 2) {
        fsdp_module_call(m, &in, &out);
        check_error(FSDP_INVALID_ARGUMENT, "the outputs of Any: ");
        fsdp_module_call_method(m, "other", &in, &out);
        check_error(FSDP_INVALID_ARGUMENT, "the outputs of Any: ");
        fsdp_values bad = {many, {NULL}};
        fsdp_module_call(m, &bad, &out);
        check_error(FSDP_INVALID_ARGUMENT, "the inputs of Any: ");
    }
    many = FSDP_VALUES_MAX + 1;
    assert_true(fsdp_register_forward_pre_hook(m, hook_too_many, &many, 0) >= 0);
    fsdp_module_call(m, &in, &out);
    check_error(FSDP_INVALID_ARGUMENT, "the inputs behind a hook of Any: 9 tensors");
    fsdp_module_free(m);
    fsdp_scope_end(scope);
}

static void test_null(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_linear_create(3, 4, 0), *none = NULL;
    check_ok(fsdp_fully_shard(m, NULL));
    check_ok(fsdp_reset_parameters(m, 1));
    fsdp_grad_norm(m, 2, NULL);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_grad_norm: the place for the norm is NULL");
    fsdp_unshard(NULL);
    check_error(FSDP_INVALID_ARGUMENT, "the module is NULL");
    fsdp_set_modules_to_forward_prefetch(m, &none, 1);
    check_error(FSDP_INVALID_ARGUMENT, "module 0 of the list is NULL");
    assert_null(fsdp_adamw(NULL, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the module is NULL");
    assert_null(fsdp_sgd(NULL, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the module is NULL");
    fsdp_optimizer *o = fsdp_adamw(m, NULL);
    check_tensor(o);
    const double rates[] = {-1.0, NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        fsdp_optimizer_set_lr(o, rates[i]);
        check_error(FSDP_INVALID_ARGUMENT, "expected a number from 0");
    }
    assert_true(fsdp_optimizer_lr(o) == fsdp_adamw_defaults().lr);
    assert_null(fsdp_optimizer_state(o, fsdp_module_param(m, "weight"), 7));
    check_error(FSDP_INVALID_ARGUMENT, "2 states a parameter, no number 7");
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
}

/* ---- options of fully_shard -------------------------------------------------------------------
 */

static void refuse(const fsdp_shard_options *o, fsdp_status code, const char *text)
{
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    fsdp_fully_shard(m, o);
    check_error(code, text);
    assert_false(fsdp_is_sharded_module(m));
    fsdp_module_free(m);
}

static void test_options(void **state)
{
    (void)state;
    fsdp_param *none = NULL;
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = (fsdp_reshard_policy)77;
    refuse(&o, FSDP_INVALID_ARGUMENT, "reshard_after_forward is 77; expected");
    o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = FSDP_I64;
    refuse(&o, FSDP_INVALID_DTYPE, "mp_policy.param_dtype is i64; expected a floating dtype");
    o.mp_policy.param_dtype = (fsdp_dtype)99;
    refuse(&o, FSDP_INVALID_DTYPE, "mp_policy.param_dtype is no dtype");
    o = fsdp_shard_defaults(NULL);
    o.mp_policy.reduce_dtype = FSDP_U8;
    refuse(&o, FSDP_INVALID_DTYPE, "mp_policy.reduce_dtype is u8");
    o = fsdp_shard_defaults(NULL);
    o.mp_policy.output_dtype = FSDP_I64;
    refuse(&o, FSDP_INVALID_DTYPE, "mp_policy.output_dtype is i64");
    o = fsdp_shard_defaults(NULL);
    o.ignored_params = &none;
    o.n_ignored = 1;
    refuse(&o, FSDP_INVALID_ARGUMENT, "ignored parameter 0 is NULL");
}

/* What belongs to the root is not taken by a unit inside it, which would become a root then. */
static void test_root(void **state)
{
    (void)state;
    net *n = net_create(2);
    check_ok(fsdp_fully_shard(n->block[0], NULL));
    check_ok(fsdp_fully_shard(&n->base, NULL));
    check_ok(fsdp_reset_parameters(&n->base, 1));
    fsdp_set_post_optim_event(n->block[0], NULL);
    check_error(FSDP_INVALID_ARGUMENT, "call it on the root");
    check_ok(fsdp_set_post_optim_event(&n->base, NULL));
    fsdp_module_free(&n->base);
}

/* ---- gradients that were never reduced ---------------------------------------------------------
 */

static fsdp_status backward(fsdp_module *m)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = fsdp_backward(fsdp_sum(fsdp_call(m, ones())));
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status unreduced(void *arg)
{
    const int *kind = arg; /* {replicas, reproducible, the all-reduce alone is off} */
    int replicas = kind[0], sizes[2] = {replicas, fsdp_world_size() / replicas};
    const char *axes[] = {"replicate", "shard"};
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 2, sizes, axes));
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    double fresh, norm;
    EXPECT(m && fsdp_fully_shard(m, &o) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    EXPECT(!kind[1] || fsdp_set_reproducible(m, 1) == FSDP_OK);
    fsdp_optimizer *opt = fsdp_sgd(m, NULL);
    EXPECT(opt && backward(m) == FSDP_OK && fsdp_grad_norm(m, 2, &fresh) == FSDP_OK && fresh > 0);
    EXPECT(fsdp_zero_grad(m) == FSDP_OK);
    EXPECT((kind[2] ? fsdp_set_requires_all_reduce : fsdp_set_requires_gradient_sync)(m, 0, 1) ==
           FSDP_OK);
    EXPECT(backward(m) == FSDP_OK);
    EXPECT(fsdp_zero_grad(m) == FSDP_OK);
    EXPECT(fsdp_optimizer_step(opt) == FSDP_OK); /* nothing waits */
    EXPECT(fsdp_set_requires_gradient_sync(m, 1, 1) == FSDP_OK);
    EXPECT(fsdp_set_requires_all_reduce(m, 1, 1) == FSDP_OK);
    EXPECT(backward(m) == FSDP_OK && fsdp_grad_norm(m, 2, &norm) == FSDP_OK);
    EXPECT(norm == fresh);
    for (int step = 0; step < 2; step++) {
        EXPECT(fsdp_zero_grad(m) == FSDP_OK);
        EXPECT(fsdp_set_requires_gradient_sync(m, 0, 1) == FSDP_OK && backward(m) == FSDP_OK);
        EXPECT(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL) == FSDP_OK);
        (void)(step ? fsdp_optimizer_step(opt) : fsdp_grad_norm(m, 2, &norm));
        bool told =
            strstr(fsdp_error_text(), "was not summed over the ranks yet: turn fsdp_set_req");
        FSDP_TRY(fsdp_reset_iteration(m));
        EXPECT(told);
    }
    EXPECT(fsdp_optimizer_step_count(opt) == 1);
    fsdp_optimizer_free(opt);
    fsdp_module_free(m);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_unreduced(void **state)
{
    (void)state;
    static const struct {
        int ranks, kind[3];
    } runs[] = {{1, {1, 0, 0}}, {2, {1, 0, 0}}, {2, {2, 0, 0}}, {4, {2, 0, 0}},
                {4, {2, 0, 1}}, {2, {1, 1, 0}}, {1, {1, 1, 0}}};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        check_ok(fsdp_run_threads(runs[i].ranks, unreduced, (void *)(uintptr_t)runs[i].kind));
}

/* ---- what a list names and frees --------------------------------------------------------------
 */

static fsdp_status freed_list(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(3, 4, 0), *other = fsdp_linear_create(3, 4, 0);
    EXPECT(fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_fully_shard(other, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 1) == FSDP_OK);
    EXPECT(fsdp_set_modules_to_forward_prefetch(m, &other, 1) == FSDP_OK);
    fsdp_module_free(other);
    EXPECT(backward(m) == FSDP_OK);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_lifetimes(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(2, freed_list, NULL));
    net *n = net_create(1);
    fsdp_module_free(n->block[0]);
    check_error(FSDP_INVALID_ARGUMENT, "fsdp_module_free of \"0\", which belongs to a ModuleList");
    fsdp_module_free(&n->base);
    assert_int_equal(check_live(), 0);
}

static void test_null_lists(void **state)
{
    (void)state;
    fsdp_init_rule rule = {FSDP_INIT_ONES, 0, 0};
    const char *none = NULL;
    assert_null(fsdp_mesh_create(FSDP_CPU, 1, NULL, NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the list of sizes is NULL");
    assert_null(fsdp_mesh_create(FSDP_META, 1, (int[]){1}, (const char *[]){"shard"}));
    check_error(FSDP_INVALID_ARGUMENT, "expected FSDP_CPU");
    assert_null(fsdp_param_create(FSDP_F32, 2, NULL, rule));
    check_error(FSDP_INVALID_ARGUMENT, "the list of sizes is NULL");
    fsdp_lora_options o = fsdp_lora_defaults();
    o.n_target_modules = 1;
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    fsdp_lora_apply(m, &o);
    check_error(FSDP_INVALID_ARGUMENT, "1 target_modules at NULL");
    o.target_modules = &none;
    fsdp_lora_apply(m, &o);
    check_error(FSDP_INVALID_ARGUMENT, "target_modules[0] is NULL");
    assert_null(fsdp_module_add(m, NULL, fsdp_linear_create(3, 4, 0)));
    check_error(FSDP_INVALID_ARGUMENT, "named NULL; expected");
    fsdp_module_free(m);
}

/* ---- functions of the user's that fail and say nothing -----------------------------------------
 */

static fsdp_status silent_collective(void *arg, fsdp_tensor *output, fsdp_tensor *input,
                                     fsdp_group *g, fsdp_work **work)
{
    (void)arg, (void)output, (void)input, (void)g, (void)work;
    return FSDP_IO_ERROR;
}

static fsdp_status silent_pre(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    (void)i;
    *out = (fsdp_values){.n = 1, .t = {shard}};
    return *(int *)arg == 2 ? FSDP_INVALID_DATA : FSDP_OK;
}

static fsdp_status silent_post(void *arg, fsdp_gather_info *i, const fsdp_values *got,
                               fsdp_tensor *out)
{
    (void)arg, (void)i, (void)got, (void)out;
    return FSDP_INVALID_DATA;
}

static fsdp_status silent_hook(void *arg, fsdp_tensor *leaf)
{
    (void)arg, (void)leaf;
    return FSDP_IO_ERROR;
}

static fsdp_status silent(void *arg)
{
    int kind = *(int *)arg;
    static const char *const texts[] = {
        "the custom all-gather of unit \"\" returned", "the custom reduce-scatter of unit \"\"",
        "the gather extension's pre of weight returned", "the gather extension's post of weight",
        "a hook of weight (fsdp_register_post_accumulate_hook) returned"};
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_custom_all_gather g = {NULL, silent_collective, NULL};
    fsdp_custom_reduce_scatter r = {NULL, silent_collective, NULL};
    fsdp_gather_extension e = {silent_pre, silent_post, arg};
    if (kind == 0) EXPECT(fsdp_set_custom_all_gather(m, &g) == FSDP_OK);
    if (kind == 1) EXPECT(fsdp_set_custom_reduce_scatter(m, &r) == FSDP_OK);
    if (kind == 2 || kind == 3) EXPECT(fsdp_set_all_gather_extension(m, "*", &e) == FSDP_OK);
    if (kind == 4)
        EXPECT(fsdp_register_post_accumulate_hook(fsdp_param_shard(fsdp_module_param(m, "weight")),
                                                  silent_hook, NULL) == FSDP_OK);
    fsdp_optimizer *o = fsdp_adamw(m, NULL);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, ones());
    if (y) (void)fsdp_backward(fsdp_sum(y));
    fsdp_status code = kind == 2 || kind == 3 ? FSDP_INVALID_DATA : FSDP_IO_ERROR;
    fsdp_status found = fsdp_optimizer_step(o); /* refuses, by the error that is kept */
    bool named = strstr(fsdp_error_text(), texts[kind]) != NULL;
    fsdp_scope_end(scope);
    FSDP_TRY(fsdp_reset_iteration(m));
    EXPECT(found == code || found == FSDP_PEER_FAILED);
    EXPECT(named && fsdp_optimizer_step_count(o) == 0);
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_silent(void **state)
{
    (void)state;
    for (int kind = 0; kind < 5; kind++)
        check_ok(fsdp_run_threads(2, silent, &kind));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_outlived),  cmocka_unit_test(test_late),
        cmocka_unit_test(test_values),    cmocka_unit_test(test_null),
        cmocka_unit_test(test_options),   cmocka_unit_test(test_root),
        cmocka_unit_test(test_silent),    cmocka_unit_test(test_unreduced),
        cmocka_unit_test(test_lifetimes), cmocka_unit_test(test_null_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
