/*
 * test_fsdp_buffers.c - buffers on several ranks: compared at the first
 * forward, moved in training by their rules, made equal from one rank.
 */
#include "sharded_net.h"

#include "nn/module.h"

/* Adds the rank's number to what it counts, in training. */
typedef struct counter {
    fsdp_module base;
    fsdp_module *lin;
} counter;

static fsdp_tensor *count_forward(fsdp_module *self, fsdp_tensor *x)
{
    counter *c = (counter *)self;
    fsdp_tensor *seen = fsdp_module_buffer(self, "seen");
    if (fsdp_module_training(self)) {
        ((float *)fsdp_data(seen))[0] += (float)(1 + fsdp_rank());
        fsdp_touch(seen);
    }
    return fsdp_call(c->lin, x);
}

static counter *counter_create(int meta)
{
    if (meta) fsdp_device_push(FSDP_META);
    counter *c = (counter *)fsdp_module_create(sizeof *c, "Counter");
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_zeros(FSDP_F32, 1, SIZES(2));
    c->base.forward1 = count_forward;
    c->lin = fsdp_module_add(&c->base, "lin", fsdp_linear_create(3, 5, 0));
    fsdp_status s = fsdp_module_add_buffer(&c->base, "seen", t);
    fsdp_scope_end(scope);
    if (meta) fsdp_device_pop();
    return s == FSDP_OK ? c : NULL;
}

static fsdp_status forward(counter *c)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(&c->base, fsdp_full(FSDP_F32, 2, SIZES(2, 3), 1.0));
    fsdp_scope_end(scope);
    return y ? FSDP_OK : fsdp_error();
}

static fsdp_status rules(void *arg)
{
    fsdp_buffer_rule rule = *(fsdp_buffer_rule *)arg;
    const char *names[] = {"replicate", "shard"};
    int N = fsdp_world_size(), sizes[] = {N % 2 ? 1 : 2, N % 2 ? N : N / 2};
    counter *c = counter_create(0);
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 2, sizes, names));
    EXPECT(c && fsdp_fully_shard(&c->base, &o) == FSDP_OK);
    EXPECT(fsdp_module_set_buffer_rule(&c->base, "seen", rule) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&c->base, 1) == FSDP_OK);
    double mean = 0, expected;
    for (int r = 0; r < N; r++)
        mean += (1.0 + r) / N;
    for (int k = 1; k <= 3; k++) {
        EXPECT(forward(c) == FSDP_OK);
        expected = rule == FSDP_BUFFER_BROADCAST ? k
                   : rule == FSDP_BUFFER_MEAN    ? k * mean
                                                 : k * (1.0 + fsdp_rank());
        EXPECT(fabs(fsdp_at(fsdp_module_buffer(&c->base, "seen"), SIZES(0)) - expected) < 1e-6);
        EXPECT(fsdp_at(fsdp_module_buffer(&c->base, "seen"), SIZES(1)) == 0);
    }
    fsdp_module_train(&c->base, 0);
    EXPECT(forward(c) == FSDP_OK);
    fsdp_module_free(&c->base);
    return FSDP_OK;
}

/* Written outside of a forward, by all ranks alike, is no mistake. */
static fsdp_status between(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(3, 5, 0);
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(m && fsdp_module_add_buffer(m, "table", fsdp_zeros(FSDP_F32, 1, SIZES(2))) == FSDP_OK);
    EXPECT(fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    for (int k = 0; k < 3; k++) {
        EXPECT(fsdp_call(m, fsdp_zeros(FSDP_F32, 2, SIZES(2, 3))));
        EXPECT(fsdp_fill_(fsdp_module_buffer(m, "table"), k) == FSDP_OK);
        EXPECT(fsdp_sync_module_states(m, 0) == FSDP_OK);
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Which mistake. */
enum { NO_RULE, UNEQUAL, UNEQUAL_SYNCED, ON_META, NOT_FILLED };

static fsdp_status mistake(void *arg)
{
    int which = *(int *)arg;
    counter *c = counter_create(which >= ON_META);
    EXPECT(c && fsdp_fully_shard(&c->base, NULL) == FSDP_OK);
    if (which != NO_RULE)
        EXPECT(fsdp_module_set_buffer_rule(&c->base, NULL, FSDP_BUFFER_MEAN) == FSDP_OK);
    if (which == ON_META || which == NOT_FILLED) EXPECT(fsdp_to_empty(c->lin, FSDP_CPU) == FSDP_OK);
    if (which == NOT_FILLED) EXPECT(fsdp_to_empty(&c->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&c->base, 1) == FSDP_OK);
    if (which == UNEQUAL || which == UNEQUAL_SYNCED)
        fsdp_fill_(fsdp_module_buffer(&c->base, "seen"), fsdp_rank());
    if (which == UNEQUAL_SYNCED) EXPECT(fsdp_sync_module_states(&c->base, 1) == FSDP_OK);
    fsdp_status s = forward(c);
    if (s == FSDP_OK && which == UNEQUAL_SYNCED) {
        double got = fsdp_at(fsdp_module_buffer(&c->base, "seen"), SIZES(1));
        if (got != 1.0) s = fsdp__fail(FSDP_INTERNAL, "%g after the sync", got);
    }
    fsdp_module_free(&c->base);
    return s;
}

static void test_rules(void **state)
{
    (void)state;
    for (int rule = FSDP_BUFFER_BROADCAST; rule <= FSDP_BUFFER_LOCAL; rule++)
        for (int ranks = 1; ranks <= 4; ranks++) {
            fsdp_buffer_rule r = (fsdp_buffer_rule)rule;
            check_ok(fsdp_run_threads(ranks, rules, &r));
        }
}

static void test_mistakes(void **state)
{
    (void)state;
    static const struct {
        int which;
        fsdp_status code;
        const char *words;
    } rows[] = {
        {NO_RULE, FSDP_INVALID_STATE, "fsdp_module_set_buffer_rule"},
        {UNEQUAL, FSDP_MISMATCH, "buffer seen (2) f32, rule mean, values of hash"},
        {ON_META, FSDP_INVALID_STATE, "buffer seen has no values: it is on the meta device"},
        {NOT_FILLED, FSDP_INVALID_STATE, "buffer seen has no values; call fsdp_to_empty and fill"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        int which = rows[i].which;
        assert_int_not_equal(fsdp_run_threads(2, mistake, &which), FSDP_OK);
        check_error(rows[i].code, rows[i].words);
    }
    check_ok(fsdp_run_threads(2, between, NULL));
    int which = UNEQUAL_SYNCED;
    check_ok(fsdp_run_threads(3, mistake, &which));
}

/* ---- batch norm: running statistics of all ranks' rows -------------------------------------- */

static fsdp_status norms(void *arg)
{
    double *out = arg;
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module_add(m, "lin", fsdp_linear_create(3, 5, 1));
    fsdp_module *bn = fsdp_module_add(m, "bn", fsdp_batch_norm_create(5, 1e-5, 0.1));
    EXPECT(bn && fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    for (int k = 0; k < 3; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(4, 3), (uint64_t)(k * 8 + fsdp_rank()), "x");
        EXPECT(fsdp_backward(fsdp_sum(fsdp_call(m, x))) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    double *mean = check_values(fsdp_module_buffer(bn, "running_mean"));
    double *var = check_values(fsdp_module_buffer(bn, "running_var"));
    memcpy(out + 10 * fsdp_rank(), mean, 5 * sizeof *mean);
    memcpy(out + 10 * fsdp_rank() + 5, var, 5 * sizeof *var);
    free(mean);
    free(var);
    EXPECT(fsdp_at(fsdp_module_buffer(bn, "num_batches_tracked"), NULL) == 3);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_batch_norm(void **state)
{
    (void)state;
    double all[40];
    check_ok(fsdp_run_threads(4, norms, all));
    for (int r = 1; r < 4; r++)
        assert_memory_equal(all, all + 10 * r, 10 * sizeof *all);
    assert_true(all[0] != 0 && all[5] != 1);
}

/* ---- replicas that begin with other values ----------------------------------------------------
 */

static fsdp_status replicas(void *arg)
{
    int src = *(int *)arg;
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {2, 2};
    fsdp_module *m = fsdp_linear_create(5, 7, 1), *plain = fsdp_linear_create(5, 7, 1);
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 2, sizes, names));
    EXPECT(m && plain && fsdp_fully_shard(m, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, (uint64_t)(1 + fsdp_rank() / 2)) == FSDP_OK); /* a seed each */
    EXPECT(fsdp_reset_parameters(plain, (uint64_t)(1 + fsdp_rank())) == FSDP_OK);
    EXPECT(fsdp_sync_module_states(m, src) == FSDP_OK);
    EXPECT(fsdp_sync_module_states(plain, src) == FSDP_OK);
    fsdp_module *a = fsdp_linear_create(5, 7, 1), *b = fsdp_linear_create(5, 7, 1);
    EXPECT(a && fsdp_reset_parameters(a, (uint64_t)(1 + src / 2)) == FSDP_OK);
    EXPECT(b && fsdp_reset_parameters(b, (uint64_t)(1 + src)) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(fsdp_module_param(m, "weight")));
    EXPECT(check_same_bits(full, fsdp_param_tensor(fsdp_module_param(a, "weight"))));
    EXPECT(check_same_bits(fsdp_param_tensor(fsdp_module_param(plain, "weight")),
                           fsdp_param_tensor(fsdp_module_param(b, "weight"))));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    fsdp_module_free(plain);
    fsdp_module_free(a);
    fsdp_module_free(b);
    return FSDP_OK;
}

static void test_sync(void **state)
{
    (void)state;
    for (int src = 0; src < 4; src++)
        check_ok(fsdp_run_threads(4, replicas, &src));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules),
        cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_batch_norm),
        cmocka_unit_test(test_sync),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
