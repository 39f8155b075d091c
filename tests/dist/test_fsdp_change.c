/*
 * test_fsdp_change.c - what changes after fully_shard: dtypes, parameters,
 * buffers; methods besides forward; order mistakes and their fixes.
 */
#include "sharded_net.h"

#include "nn/module.h"

/* ---- another dtype ------------------------------------------------------------------- */

static fsdp_status to_f64(net_run *r, net *n, fsdp_shard_options *o)
{
    for (int i = 0; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, o) == FSDP_OK);
    EXPECT(fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 42) == FSDP_OK);
    if (r->micro == 0) { /* a step in f32 first: gradients are cast too */
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x, *y;
        EXPECT(net_batch(r, 0, 0, 2, &x, &y) == FSDP_OK);
        EXPECT(fsdp_backward(fsdp_call2(&n->base, x, y)) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    EXPECT(fsdp_module_to_dtype(&n->base, FSDP_F64) == FSDP_OK);
    fsdp_param_list l;
    EXPECT(fsdp_module_params(&n->base, &l) == FSDP_OK);
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *t = fsdp__param_kept(l.items[i].param), *g = fsdp_grad(t);
        EXPECT(fsdp_tensor_dtype(t) == FSDP_F64 && fsdp_is_dtensor(t));
        EXPECT(r->micro || (g && fsdp_tensor_dtype(g) == FSDP_F64 && fsdp_is_dtensor(g)));
    }
    fsdp_param_list_free(&l);
    return fsdp_zero_grad(&n->base);
}

/* The batch is f32, the model f64. */
static fsdp_status cast_input(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)arg;
    (void)m;
    return (in->t[0] = fsdp_cast(in->t[0], FSDP_F64)) ? FSDP_OK : fsdp_error();
}

static fsdp_status add_cast(net_run *r, net *n)
{
    (void)r;
    return fsdp_register_forward_pre_hook(&n->base, cast_input, NULL, 1) < 0 ? fsdp_error()
                                                                             : FSDP_OK;
}

static void test_dtype(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        for (int private = 0; private < 2; private ++) {
            net_run a = {.ranks = ranks,
                         .blocks = 2,
                         .rows = 12,
                         .steps = 3,
                         .private_gather = private,
                         .shard = to_f64,
                         .prepare = add_cast};
            net_run b = a;
            b.micro = 1;
            net_go(&a);
            net_go(&b);
            net_same(&a, &b, "cast before and after a step");
            /* f64 reductions in rank order: the numbers of one rank but for the last bits of f64,
             * which f32 would not have. */
            net_run one = b;
            one.ranks = 1;
            one.params = one.grads = NULL;
            net_go(&one);
            net_close(&b, &one, 1e-7, "f64 on several ranks");
            double d = net_distance(b.grads, one.grads, b.numel);
            if (!(d <= (ranks == 3 ? 1e-7 : 1e-12))) /* sums are scaled by an f32 third */
                fail_msg("%d ranks: gradients differ by %g", ranks, d);
            net_free(&a);
            net_free(&b);
            net_free(&one);
        }
}

static fsdp_status dtype_refused(void *arg)
{
    (void)arg;
    net *n = net_create(1);
    EXPECT(n && fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_optimizer *o = fsdp_adamw(&n->base, NULL);
    EXPECT(o);
    fsdp_module_to_dtype(&n->base, FSDP_BF16);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "before the optimizer is made"));
    fsdp_optimizer_free(o);
    EXPECT(fsdp_set_requires_gradient_sync(&n->base, 0, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    net_run r = {.ranks = 1, .rows = 4};
    fsdp_tensor *x, *y;
    EXPECT(net_batch(&r, 0, 0, 4, &x, &y) == FSDP_OK);
    EXPECT(fsdp_backward(fsdp_call2(&n->base, x, y)) == FSDP_OK);
    fsdp_scope_end(scope);
    fsdp_module_to_dtype(&n->base, FSDP_BF16);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "not reduced yet"));
    EXPECT(fsdp_tensor_dtype(fsdp__param_kept(fsdp_module_param(n->in, "weight"))) == FSDP_F32);
    EXPECT(fsdp_reset_iteration(&n->base) == FSDP_OK);
    EXPECT(fsdp_module_to_dtype(&n->base, FSDP_BF16) == FSDP_OK);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_dtype_refused(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, dtype_refused, NULL));
}

/* ---- another parameter ------------------------------------------------------------------- */

static int last_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)name;
    return *(int *)arg ? fsdp_param_ndim(p) - 1 : 0;
}

static fsdp_status set_param(void *arg)
{
    int which = *(int *)arg; /* bits: meta, cut along the last dim */
    if (which & 1) EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    fsdp_module *m = fsdp_linear_create(5, 7, 1);
    if (which & 1) fsdp_device_pop();
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    int last = which >> 1;
    o.placement_fn = last_dim;
    o.placement_arg = &last;
    EXPECT(m && fsdp_fully_shard(m, &o) == FSDP_OK);
    fsdp_init_rule zero = {FSDP_INIT_ZEROS, 0, 0};
    fsdp_param *w = fsdp_param_create(FSDP_F32, 2, SIZES(7, 5), zero);
    fsdp_param *b = fsdp_param_create(FSDP_F32, 1, SIZES(7), zero);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *values = fsdp_randn(FSDP_F32, 2, SIZES(7, 5), 3, "w");
    fsdp_param *kept = fsdp_module_param(m, "bias");
    EXPECT(w && b && fsdp_copy_(fsdp_param_tensor(w), values) == FSDP_OK);
    EXPECT(fsdp_fill_(fsdp_param_tensor(b), 0.5) == FSDP_OK);
    EXPECT(fsdp_module_set_param(m, "weight", w) == FSDP_OK);
    EXPECT(fsdp_module_set_param(m, "bias", b) == FSDP_OK);
    EXPECT(fsdp_module_param(m, "bias") == kept && fsdp_is_dtensor(fsdp_param_tensor(kept)));
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(2, 5), 1, "x");
    fsdp_tensor *bias = fsdp_full(FSDP_F32, 1, SIZES(7), 0.5);
    fsdp_tensor *y = fsdp_call(m, x), *expected = fsdp_add(fsdp_linear(x, values), bias);
    EXPECT(y && expected);
    for (int64_t i = 0; i < 14; i++)
        EXPECT(fabs(fsdp_at(y, SIZES(i / 7, i % 7)) - fsdp_at(expected, SIZES(i / 7, i % 7))) <
               1e-5);
    EXPECT(fsdp_backward(fsdp_sum(y)) == FSDP_OK);
    EXPECT(fsdp_grad(fsdp_param_tensor(kept)) && fsdp_is_dtensor(fsdp_param_tensor(kept)));
    if (fsdp_world_size() == 1) {
        fsdp_module_set_param(m, "bias", fsdp_param_create(FSDP_F32, 1, SIZES(7), zero));
        FSDP_TRY(check_failed(FSDP_INVALID_STATE, "replaced after the first forward"));
        fsdp_module_set_param(m, "bias", fsdp_param_create(FSDP_F32, 1, SIZES(8), zero));
        FSDP_TRY(check_failed(FSDP_INVALID_SHAPE, "(7); its replacement is (8)"));
        fsdp_module_set_param(m, "gain", fsdp_param_create(FSDP_F32, 1, SIZES(8), zero));
        FSDP_TRY(check_failed(FSDP_NOT_FOUND, "gain"));
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    int64_t live = check_live();
    return live ? fsdp__fail(FSDP_INTERNAL, "%lld bytes are left", (long long)live) : FSDP_OK;
}

static void test_set_param(void **state)
{
    (void)state;
    for (int which = 0; which < 4; which++)
        for (int ranks = 1; ranks <= 8; ranks = ranks < 4 ? ranks + 1 : ranks * 2)
            check_ok(fsdp_run_threads(ranks, set_param, &which));
}

/* ---- methods besides forward ------------------------------------------------------------- */

static fsdp_status twice(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(self, "weight"));
    out->n = 1;
    out->t[0] = fsdp_scale(fsdp_linear(in->t[0], w), 2.0);
    return fsdp_error();
}

static fsdp_status method(void *arg)
{
    (void)arg;
    fsdp_module *root = fsdp_sequential_create();
    fsdp_module *lin = fsdp_module_add(root, "lin", fsdp_linear_create(5, 7, 0));
    fsdp_module_add(root, "end", fsdp_linear_create(7, 2, 0));
    EXPECT(lin && fsdp_module_add_method(lin, "twice", twice) == FSDP_OK);
    EXPECT(fsdp_register_fsdp_forward_method(lin, "twice") == FSDP_OK); /* not sharded: nothing */
    EXPECT(fsdp_fully_shard(lin, NULL) == FSDP_OK && fsdp_fully_shard(root, NULL) == FSDP_OK);
    EXPECT(fsdp_register_fsdp_forward_method(lin, "twice") == FSDP_OK);
    EXPECT(fsdp_reset_parameters(root, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(3, 5), 1, "x");
    fsdp_tensor *w = fsdp_dtensor_full(fsdp__param_kept(fsdp_module_param(lin, "weight")));
    EXPECT(fsdp_requires_grad_(w, 1) == FSDP_OK);
    EXPECT(fsdp_call(root, x)); /* the root first */
    fsdp_values in = {1, {x}}, out;
    EXPECT(fsdp_module_call_method(lin, "twice", &in, &out) == FSDP_OK && out.n == 1);
    EXPECT(fsdp_is_dtensor(fsdp_param_tensor(fsdp_module_param(lin, "weight")))); /* freed */
    fsdp_tensor *expected = fsdp_scale(fsdp_linear(x, w), 2.0);
    EXPECT(check_same_bits(out.t[0], expected));
    EXPECT(fsdp_backward(fsdp_sum(fsdp_mul(out.t[0], out.t[0]))) == FSDP_OK);
    EXPECT(fsdp_backward(fsdp_sum(fsdp_mul(expected, expected))) == FSDP_OK);
    fsdp_tensor *g = fsdp_grad(fsdp__param_kept(fsdp_module_param(lin, "weight")));
    EXPECT(g);
    double *a = check_values(fsdp_dtensor_full(g)), *b = check_values(fsdp_grad(w));
    double d = a && b ? net_distance(a, b, 35) : 1;
    free(a);
    free(b);
    EXPECT(d < 1e-6);
    if (fsdp_world_size() == 1) {
        fsdp_register_fsdp_forward_method(lin, "thrice");
        FSDP_TRY(check_failed(FSDP_NOT_FOUND, "\"lin\" has no method \"thrice\""));
        fsdp_module_call_method(lin, "thrice", &in, &out);
        FSDP_TRY(check_failed(FSDP_NOT_FOUND, "no method \"thrice\""));
    }
    fsdp_scope_end(scope);
    fsdp_module_free(root);
    return FSDP_OK;
}

static void test_method(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks++)
        check_ok(fsdp_run_threads(ranks, method, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dtype),
        cmocka_unit_test(test_dtype_refused),
        cmocka_unit_test(test_set_param),
        cmocka_unit_test(test_method),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
