/*
 * test_memory_flat.c - a thousand steps with units of uneven size and batches of uneven length:
 * live bytes, purpose by purpose, and reserved bytes stay where the first steps brought them.
 *
 * The allocators cache freed blocks by size, and gathered copies, whole gradients and activations
 * of every unit have sizes of their own, so anything that is not found again grows here.
 * ctest: timeout=300
 */
#include "sharded_net.h"

/* A sanitizer makes a step a hundred times slower. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { MANY = 120 };
#else
enum { MANY = 1000 };
#endif
enum { RANKS = 2, UNITS = 5, CYCLE = 7, SETTLED = 12 * CYCLE };

/* A square layer of odd width between two of the stream's: units of 5 quite different sizes. */
typedef struct uneven {
    fsdp_module base;
    fsdp_module *up, *down;
} uneven;

static fsdp_tensor *uneven_forward(fsdp_module *self, fsdp_tensor *x)
{
    uneven *u = (uneven *)self;
    return fsdp_add(x, fsdp_call(u->down, fsdp_dropout(fsdp_gelu(fsdp_call(u->up, x)), 0.1)));
}

static fsdp_module *build(void)
{
    static const int64_t widths[UNITS] = {1, 333, 7, 1021, 64};
    fsdp_module *m = fsdp_sequential_create();
    for (int i = 0; i < UNITS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        uneven *u = (uneven *)fsdp_module_create(sizeof *u, "Uneven");
        if (!u) return NULL;
        u->base.forward1 = uneven_forward;
        u->up = fsdp_module_add(&u->base, "up", fsdp_linear_create(11, widths[i], i % 2));
        u->down = fsdp_module_add(&u->base, "down", fsdp_linear_create(widths[i], 11, 0));
        fsdp_module_add(m, name, &u->base);
    }
    return m;
}

typedef struct setting {
    const char *name;
    fsdp_reshard_policy policy;
    int prefetch, private_gather, recompute;
    fsdp_dtype dtype;
} setting;

typedef struct trace {
    const setting *s;
    int64_t live[CYCLE][FSDP_PURPOSE_COUNT]; /* after the first steps, by place in the cycle */
    int64_t reserved;                        /* the most of the settled steps */
} trace;

static fsdp_status look(trace *t, int step)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    int k = step % CYCLE;
    if (step < SETTLED) {
        memcpy(t->live[k], m.live, sizeof m.live);
        if (m.reserved > t->reserved) t->reserved = m.reserved;
        return FSDP_OK;
    }
    for (int p = 0; p < FSDP_PURPOSE_COUNT; p++)
        if (m.live[p] != t->live[k][p])
            return fsdp__fail(FSDP_INTERNAL,
                              "%s: step %d: %lld bytes of %s; %lld in the first steps", t->s->name,
                              step, (long long)m.live[p], fsdp_purpose_name((fsdp_purpose)p),
                              (long long)t->live[k][p]);
    if (m.reserved > t->reserved)
        return fsdp__fail(FSDP_INTERNAL,
                          "%s: step %d: %lld bytes reserved; %lld in the first steps", t->s->name,
                          step, (long long)m.reserved, (long long)t->reserved);
    return FSDP_OK;
}

static fsdp_status step(fsdp_module *m, fsdp_optimizer *o, int n)
{
    FSDP_TRY(fsdp_random_set(1, (uint64_t)n, NULL, 0));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(1 + 5 * (n % CYCLE), 11), 0.5);
    fsdp_tensor *y = fsdp_cast(fsdp_call(m, x), FSDP_F32);
    fsdp_status s = fsdp_backward(fsdp_mean(fsdp_mul(y, y)));
    if (s == FSDP_OK) s = fsdp_clip_grad_norm(m, 1.0, NULL);
    if (s == FSDP_OK) s = fsdp_optimizer_step(o);
    if (s == FSDP_OK && n % CYCLE % 2) s = fsdp_zero_grad(m); /* the others add up */
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status rank_main(void *arg)
{
    trace t = {.s = arg};
    fsdp_module *m = build();
    EXPECT(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = t.s->policy;
    o.prefetch_limit = t.s->prefetch;
    o.private_gather = t.s->private_gather;
    o.mp_policy.param_dtype = t.s->dtype;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int i = 0; i < UNITS; i++) {
        fsdp_module *u = fsdp_module_child(m, i);
        if (t.s->recompute) EXPECT(fsdp_checkpoint_module(u, NULL) == FSDP_OK);
        EXPECT(fsdp_fully_shard(u, &o) == FSDP_OK);
    }
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK && fsdp_reset_parameters(m, 3) == FSDP_OK);
    fsdp_optimizer *adamw = fsdp_adamw(m, NULL);
    EXPECT(adamw);
    fsdp_status s = FSDP_OK;
    for (int n = 0; n < MANY && s == FSDP_OK; n++) {
        s = step(m, adamw, n);
        if (s == FSDP_OK) s = look(&t, n);
    }
    fsdp_optimizer_free(adamw);
    fsdp_module_free(m);
    FSDP_TRY(s);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_flat(void **state)
{
    (void)state;
    static setting settings[] = {
        {"ahead, recompute, bf16", FSDP_RESHARD_ALWAYS, 2, 0, 1, FSDP_BF16},
        {"own copies", FSDP_RESHARD_AUTO, 1, 1, 0, FSDP_F32},
    };
    for (size_t k = 0; k < sizeof settings / sizeof *settings; k++)
        check_ok(fsdp_run_threads(RANKS, rank_main, &settings[k]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_flat)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
