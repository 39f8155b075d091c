/*
 * test_recompute_models.c - the shipped models under every mode of activation_checkpoint: losses,
 * norms and weights are those of mode none to the bit, dropout included; and a budget is kept, by
 * the accounts of memory.
 * ctest: timeout=300
 */
#include "base/rng.h"
#include "models/config.h"
#include "tensor_check.h"
#include "train/recompute.h"

enum { STEPS = 3, ROWS = 2, T = 16, MAX_RANKS = 4 };

/* A sanitizer makes this slow, and one family on few ranks is enough for it. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
static const char *const models[] = {"llama"};
static const double budgets[] = {0.5};
enum { MOST_RANKS = 2 };
#else
static const char *const models[] = {"llama", "qwen3", "gpt2"};
static const double budgets[] = {0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 0.99};
enum { MOST_RANKS = MAX_RANKS };
#endif

typedef struct run {
    const char *model; /* folder of tests/data/models; NULL: the sizes below */
    int64_t layers, width, ffn, vocab;
    int ranks, mode, late_stop;
    const char *option;
    double budget, dropout;
    fsdp_dtype dtype;
    /* results */
    double loss[MAX_RANKS][STEPS], norm[STEPS];
    uint64_t weights; /* of rank 0's gathered weights */
    int64_t peak[STEPS], planned, none;
    double planned_flops, flops; /* recomputed: by the plan, of the last step's report */
} run;

static fsdp_status config_of(const run *r, fsdp_model_config *c)
{
    if (r->model) {
        char path[512];
        snprintf(path, sizeof path, "%s/models/%s", FSDP_TEST_DATA, r->model);
        fsdp_model_config *loaded = fsdp_model_config_load(path);
        EXPECT(loaded);
        *c = *loaded;
        fsdp_model_config_free(loaded);
    } else {
        *c = fsdp__model_config_default(FSDP_LLAMA);
        c->hidden_size = r->width, c->num_layers = r->layers, c->num_heads = 4, c->num_kv_heads = 2;
        c->head_dim = r->width / 4, c->intermediate_size = r->ffn, c->vocab_size = r->vocab;
    }
    c->attention_dropout = r->dropout;
    return FSDP_OK;
}

static fsdp_status make(const run *r, fsdp__train_recompute *plan, fsdp_module **out,
                        fsdp_model_config *c)
{
    fsdp__train_config t;
    FSDP_TRY(fsdp__train_config_init(&t));
    t.activation_checkpoint.mode = r->mode;
    t.activation_checkpoint.early_stop = !r->late_stop;
    if (r->budget > 0) t.activation_checkpoint.memory_budget = r->budget;
    char *before = t.activation_checkpoint.selective_ac_option;
    if (r->option) t.activation_checkpoint.selective_ac_option = (char *)(uintptr_t)r->option;
    FSDP_TRY(fsdp__train_recompute_check(&t));
    FSDP_TRY(config_of(r, c));
    FSDP_TRY(fsdp_device_push(FSDP_META));
    fsdp_module *m = *out = fsdp_model_create(c);
    FSDP_TRY(fsdp_device_pop());
    fsdp_status s = fsdp__train_recompute_apply(&t, m, plan);
    t.activation_checkpoint.selective_ac_option = before;
    fsdp__train_config_free(&t);
    FSDP_TRY(s);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = r->dtype;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), &o));
    FSDP_TRY(fsdp_fully_shard(m, &o));
    FSDP_TRY(fsdp_to_empty(m, FSDP_CPU));
    return fsdp_reset_parameters(m, 7);
}

static fsdp_status step(run *r, fsdp_module *m, fsdp_optimizer *adamw, fsdp__train_recompute *plan,
                        fsdp__metrics *metrics, const fsdp_model_config *c, int n)
{
    int64_t tokens[ROWS * (T + 1)];
    uint64_t ids[ROWS], key = fsdp__rng_mix(fsdp__rng_key((uint64_t)n), (uint64_t)fsdp_rank());
    for (int i = 0; i < ROWS * (T + 1); i++)
        tokens[i] = (int64_t)(fsdp__rng_u32(key, (uint64_t)i) % (uint64_t)c->vocab_size);
    for (int i = 0; i < ROWS; i++)
        ids[i] = (uint64_t)(fsdp_rank() * ROWS + i);
    FSDP_TRY(fsdp_random_set(1, (uint64_t)n, ids, ROWS));
    for (int64_t i = 0; i < plan->n_blocks; i++)
        plan->blocks[i].report.recomputed_flops = 0;
    fsdp_memory_reset_peak();
    fsdp__train_recompute_begin(plan, metrics);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_contiguous(
        fsdp_tensor_from_memory(tokens, FSDP_I64, 2, SIZES(ROWS, T), SIZES(T + 1, 1), NULL, NULL));
    fsdp_tensor *y = fsdp_contiguous(fsdp_tensor_from_memory(
        tokens + 1, FSDP_I64, 2, SIZES(ROWS, T), SIZES(T + 1, 1), NULL, NULL));
    fsdp_tensor *loss = fsdp_scale(fsdp_model_forward(m, x, NULL, y), 1.0 / (ROWS * T));
    EXPECT(loss);
    r->loss[fsdp_rank()][n] = fsdp_item(loss);
    fsdp__train_recompute_turn(plan, metrics);
    EXPECT(fsdp_backward(loss) == FSDP_OK);
    fsdp_scope_end(scope);
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    if (fsdp_rank() == 0) r->peak[n] = s.peak[FSDP_ACTIVATIONS];
    FSDP_TRY(fsdp__train_recompute_settle(plan, 1.0, metrics));
    double norm = 0;
    EXPECT(fsdp_clip_grad_norm(m, 1.0, &norm) == FSDP_OK && fsdp_optimizer_step(adamw) == FSDP_OK &&
           fsdp_zero_grad(m) == FSDP_OK);
    if (fsdp_rank() == 0) r->norm[n] = norm;
    return FSDP_OK;
}

static fsdp_status hash_weights(run *r, fsdp_module *m)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    uint64_t hash = 1;
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        const uint32_t *bits = fsdp_data(full);
        for (int64_t k = 0; k < fsdp_numel(full); k++)
            hash = fsdp__rng_mix(hash, bits[k]);
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    if (fsdp_rank() == 0) r->weights = hash;
    return fsdp_error();
}

static fsdp_status rank_main(void *arg)
{
    run *r = arg;
    fsdp_module *m = NULL;
    fsdp_model_config c;
    fsdp__train_recompute plan = {0};
    fsdp__metrics metrics;
    fsdp__metrics_init(&metrics, 1, 1); /* says nothing */
    FSDP_TRY(fsdp_set_threads(1));
    fsdp_status s = make(r, &plan, &m, &c);
    fsdp_optimizer *adamw = s == FSDP_OK ? fsdp_adamw(m, NULL) : NULL;
    for (int n = 0; n < STEPS && s == FSDP_OK; n++)
        s = step(r, m, adamw, &plan, &metrics, &c, n);
    if (s == FSDP_OK) s = hash_weights(r, m);
    if (fsdp_rank() == 0) {
        r->planned = plan.peak_planned;
        r->none = plan.peak_none;
        r->flops = 0;
        r->planned_flops = fsdp__train_recompute_flops(&plan);
        for (int64_t i = 0; i < plan.n_blocks; i++)
            r->flops += plan.blocks[i].report.recomputed_flops;
    }
    fsdp_optimizer_free(adamw);
    fsdp_module_free(m);
    fsdp__train_recompute_free(&plan);
    return s;
}

static void go(run *r)
{
    if (fsdp_run_threads(r->ranks, rank_main, r) == FSDP_OK) return;
    char text[1024];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    fail_msg("%s, mode %d: %s", r->model ? r->model : "sizes", r->mode, text);
}

static void same(const run *a, const run *b)
{
    if (memcmp(a->loss, b->loss, sizeof a->loss) || memcmp(a->norm, b->norm, sizeof a->norm) ||
        a->weights != b->weights)
        fail_msg("%s on %d, mode %d %s: loss %.17g and %.17g, norm %.17g and %.17g",
                 a->model ? a->model : "sizes", a->ranks, a->mode, a->option ? a->option : "",
                 a->loss[0][STEPS - 1], b->loss[0][STEPS - 1], a->norm[STEPS - 1],
                 b->norm[STEPS - 1]);
}

/* ---- the same bits ------------------------------------------------------------------- */

static const run modes[] = {
    {.mode = FSDP__RECOMPUTE_FULL},
    {.mode = FSDP__RECOMPUTE_FULL, .late_stop = 1},
    {.mode = FSDP__RECOMPUTE_SELECTIVE, .option = "2"},
    {.mode = FSDP__RECOMPUTE_SELECTIVE, .option = "op"},
    {.mode = FSDP__RECOMPUTE_BUDGET, .budget = 0.9},
};

static void every_mode(const run *base)
{
    run none = *base;
    go(&none);
    assert_true(none.norm[0] > 0 && none.loss[0][0] != none.loss[0][STEPS - 1]);
    assert_true(none.flops == 0);
    for (size_t k = 0; k < sizeof modes / sizeof *modes; k++) {
        run r = *base;
        r.mode = modes[k].mode;
        r.option = modes[k].option;
        r.late_stop = modes[k].late_stop;
        r.budget = modes[k].budget;
        go(&r);
        same(&r, &none);
        assert_true(r.mode == FSDP__RECOMPUTE_BUDGET || r.flops > 0);
        /* What is said is what is done. */
        assert_true(r.flops == r.planned_flops);
    }
}

static void test_models(void **state)
{
    (void)state;
    for (size_t k = 0; k < sizeof models / sizeof *models; k++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks *= 2)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                run r = {.model = models[k], .ranks = ranks, .dtype = bf16 ? FSDP_BF16 : FSDP_F32};
                every_mode(&r);
            }
}

/* RC-37: dropout 0.1, bf16 compute. */
static void test_dropout(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        run r = {.model = "llama", .ranks = ranks, .dtype = FSDP_BF16, .dropout = 0.1}, dry = r;
        every_mode(&r);
        go(&r);
        dry.dropout = 0;
        go(&dry);
        assert_true(r.loss[0][0] != dry.loss[0][0]); /* there was dropout */
    }
}

/* ---- the budget ---------------------------------------------------------------------- */

static void budgets_of(const run *base)
{
    run none = *base, full = *base;
    go(&none);
    full.mode = FSDP__RECOMPUTE_FULL;
    go(&full);
    double before = full.flops + 1, most = (double)none.peak[2];
    for (size_t k = 0; k < sizeof budgets / sizeof *budgets; k++) {
        if (budgets[k] < (double)full.peak[2] / most + 0.05) continue;
        run r = *base;
        r.mode = FSDP__RECOMPUTE_BUDGET;
        r.budget = budgets[k];
        go(&r);
        same(&r, &none);
        assert_int_equal(r.peak[0], full.peak[0]); /* the step that measures */
        print_message("budget %.2f: peak %lld bytes, %.1f %% of %lld (planned %.1f %% of %lld); "
                      "recomputed %.0f %% of mode full\n",
                      r.budget, (long long)r.peak[2], 100.0 * (double)r.peak[2] / most,
                      (long long)none.peak[2], 100.0 * (double)r.planned / (double)r.none,
                      (long long)r.none, 100.0 * r.flops / full.flops);
        assert_int_equal(r.peak[1], r.peak[2]);
        assert_true((double)r.peak[2] <= r.budget * most);
        assert_true(r.peak[2] <= r.planned);
        assert_true(r.none <= none.peak[2] && (double)r.none >= 0.95 * most);
        /* More room, less work; at the end it is cheap ops that are left, not products. */
        assert_true(r.flops == r.planned_flops && r.flops < before + 0.02 * full.flops);
        before = r.flops;
    }
    /* What no choice can meet is said, with what can be met. */
    run small = *base;
    small.mode = FSDP__RECOMPUTE_BUDGET;
    small.budget = 0.02;
    assert_int_not_equal(fsdp_run_threads(small.ranks, rank_main, &small), FSDP_OK);
    check_error(FSDP_INVALID_CONFIG, "activation_checkpoint.memory_budget is 0.02");
}

/* Deep; with a head that outweighs the blocks; with wide feed-forwards on two ranks, in bf16. */
static void test_budget(void **state)
{
    (void)state;
    const run shapes[] = {
        {.layers = 8, .width = 32, .ffn = 96, .vocab = 64, .ranks = 1, .dtype = FSDP_F32},
        {.layers = 3, .width = 32, .ffn = 32, .vocab = 2000, .ranks = 1, .dtype = FSDP_F32},
        {.layers = 5, .width = 16, .ffn = 256, .vocab = 32, .ranks = 2, .dtype = FSDP_BF16},
    };
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++)
        budgets_of(&shapes[k]);
}

static void test_options(void **state)
{
    (void)state;
    const char *const bad[] = {"", "0", "-1", "2.5", "ops", "2 "};
    fsdp__train_config c;
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        check_ok(fsdp__train_config_init(&c));
        check_ok(fsdp__options_set(&c.options, "activation_checkpoint.selective_ac_option", bad[k],
                                   "test"));
        assert_int_not_equal(fsdp__train_recompute_check(&c), FSDP_OK);
        check_error(FSDP_INVALID_CONFIG, "expected op, or a number k from 1");
        fsdp__train_config_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
