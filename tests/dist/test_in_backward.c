/*
 * test_in_backward.c - updates during backward: the bits of an ordinary step, and what is refused
 * together with them. (The bytes are in test_offload_window.c.)
 */
#include "sharded_net.h"

static net_run base_run(int ranks)
{
    return (net_run){
        .ranks = ranks, .blocks = 4, .rows = 24, .steps = 4, .prefetch = 1, .no_clip = 1};
}

/* Losses and last weights; a step leaves no gradient to compare. */
static void same(net_run r, const char *what)
{
    net_run late = r;
    r.in_backward = 1;
    net_go(&late);
    net_go(&r);
    for (int s = 0; s < r.steps; s++)
        if (r.loss[s] != late.loss[s])
            fail_msg("%s: step %d: loss %.17g and %.17g", what, s, r.loss[s], late.loss[s]);
    for (int64_t i = 0; i < r.numel; i++) {
        if (r.grads[i] != 0) fail_msg("%s: gradient %lld is left", what, (long long)i);
        if (r.params[i] != late.params[i]) fail_msg("%s: weight %lld", what, (long long)i);
    }
    net_free(&late);
    net_free(&r);
}

static void test_bits(void **state)
{
    (void)state;
    const int ranks[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        same(base_run(ranks[i]), "ranks");
    for (int policy = FSDP_RESHARD_AUTO; policy <= FSDP_RESHARD_NEVER; policy++) {
        net_run r = base_run(2);
        r.policy = (fsdp_reshard_policy)policy;
        same(r, "policy");
        r.private_gather = 1;
        same(r, "policy, own copies");
    }
    net_run r = base_run(1);
    r.mesh = NET_PLAIN;
    same(r, "not sharded");
    r = base_run(4);
    r.mesh = NET_HYBRID;
    r.replicas = 2;
    same(r, "hybrid");
    r = base_run(2);
    r.mesh = NET_REPLICATE;
    same(r, "NO_SHARD");
    r = base_run(2);
    r.micro = 3; /* reduced with the last only */
    same(r, "microbatches");
    r.sgd = 1;
    same(r, "SGD");
    r = base_run(2);
    r.frozen = 1;
    same(r, "frozen");
    r = base_run(2);
    r.param_dtype = FSDP_BF16;
    r.reduce_dtype = FSDP_F32;
    same(r, "bf16");
    r.dim1 = 1;
    r.prefetch = 0;
    same(r, "bf16, cut along dim 1");
}

/* ---- refused ------------------------------------------------------------------------------ */

typedef struct parts {
    net *n;
    fsdp_optimizer *o;
    double *before; /* the weights */
    int64_t numel;
} parts;

static fsdp_status make(parts *p)
{
    net_run r = base_run(fsdp_world_size());
    p->n = net_create(2);
    EXPECT(p->n && net_shard(&r, p->n) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&p->n->base, 1) == FSDP_OK);
    p->o = fsdp_adamw(&p->n->base, NULL);
    EXPECT(p->o);
    return fsdp_optimizer_in_backward(p->o, 1);
}

static void drop(parts *p)
{
    free(p->before);
    fsdp_optimizer_free(p->o);
    fsdp_module_free(&p->n->base);
}

static fsdp_tensor *loss_of(net *n)
{
    net_run r = base_run(fsdp_world_size());
    fsdp_tensor *x, *y;
    if (net_batch(&r, 0, fsdp_rank() * 4, 4, &x, &y) != FSDP_OK) return NULL;
    return fsdp_call2(&n->base, x, y);
}

/* The kept error has both words; it is cleared on all ranks. */
static fsdp_status refused(net *n, fsdp_status s, const char *one, const char *other)
{
    const char *text = fsdp_error_text();
    bool ok = s == FSDP_INVALID_STATE && strstr(text, one) && strstr(text, other);
    if (!ok)
        return fsdp_error() ? fsdp_error() : fsdp__fail(FSDP_INTERNAL, "no error with %s", one);
    return fsdp_reset_iteration(&n->base);
}

static fsdp_status check_refused(void *arg)
{
    (void)arg;
    parts p = {0};
    fsdp_scope *scope = fsdp_scope_begin();
    FSDP_TRY(make(&p));
    FSDP_TRY(fsdp_backward(loss_of(p.n)));
    FSDP_TRY(refused(p.n, fsdp_clip_grad_norm(&p.n->base, 1, NULL), "norm of all gradients",
                     "fsdp_optimizer_in_backward"));
    double norm;
    FSDP_TRY(refused(p.n, fsdp_grad_norm(&p.n->base, 2, &norm), "norm of all gradients",
                     "fsdp_optimizer_in_backward"));
    fsdp_grad_scaler *scaler = fsdp_grad_scaler_create(NULL);
    FSDP_TRY(refused(p.n, fsdp_grad_scaler_unscale(scaler, p.o, NULL), "loss scaling",
                     "fsdp_optimizer_in_backward"));
    FSDP_TRY(refused(p.n, fsdp_optimizer_in_backward(p.o, 0), "inside a step",
                     "fsdp_optimizer_in_backward"));
    FSDP_TRY(fsdp_optimizer_step(p.o));
    EXPECT(fsdp_optimizer_step_count(p.o) == 1);

    /* Gradients of a scaled loss are not used. */
    p.before = net_collect(p.n, 0, &p.numel);
    fsdp_tensor *scaled = fsdp_grad_scaler_scale(scaler, loss_of(p.n));
    EXPECT(scaled && p.before);
    FSDP_TRY(refused(p.n, fsdp_backward(scaled), "loss scaling", "fsdp_optimizer_in_backward"));
    fsdp_grad_scaler_free(scaler);
    double *after = net_collect(p.n, 0, &p.numel);
    EXPECT(after && !memcmp(after, p.before, (size_t)p.numel * sizeof *after));
    free(after);

    /* A second backward of a step. */
    FSDP_TRY(fsdp_zero_grad(&p.n->base));
    FSDP_TRY(fsdp_backward(loss_of(p.n)));
    FSDP_TRY(refused(p.n, fsdp_backward(loss_of(p.n)), "second gradient in one step",
                     "fsdp_set_requires_gradient_sync"));
    FSDP_TRY(fsdp_optimizer_step(p.o));

    /* Another optimizer; and off again, as it was. */
    fsdp_optimizer *second = fsdp_sgd(&p.n->base, NULL);
    FSDP_TRY(refused(p.n, fsdp_optimizer_in_backward(second, 1), "another optimizer",
                     "fsdp_optimizer_in_backward"));
    FSDP_TRY(fsdp_optimizer_in_backward(p.o, 0));
    FSDP_TRY(fsdp_optimizer_in_backward(second, 1));
    fsdp_optimizer_free(second); /* takes its hooks along */
    FSDP_TRY(fsdp_zero_grad(&p.n->base));
    FSDP_TRY(fsdp_backward(loss_of(p.n)));
    FSDP_TRY(fsdp_clip_grad_norm(&p.n->base, 1, &norm));
    EXPECT(norm > 0);
    fsdp_scope_end(scope);
    drop(&p);
    return FSDP_OK;
}

static void test_refused(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++)
        check_ok(fsdp_run_threads(ranks, check_refused, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
