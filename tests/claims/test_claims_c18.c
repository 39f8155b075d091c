/*
 * test_claims_c18.c - C18: with activation checkpointing the peak of activations is at most 45 % of
 * the peak without, for 8 blocks; losses are equal to the bit.
 */
#include "models/config.h"
#include "tensor_check.h"

enum { RANKS = 2, BLOCKS = 8, STEPS = 2, B = 2, T = 32, VOCAB = 64, WIDTH = 64 };

typedef struct run {
    int on;
    fsdp_dtype dtype;
    int64_t peak[RANKS];
    double loss[RANKS][STEPS];
} run;

static fsdp_status make(const run *r, fsdp_module **out)
{
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.hidden_size = WIDTH, c.num_layers = BLOCKS, c.num_heads = 4, c.num_kv_heads = 2;
    c.head_dim = WIDTH / 4, c.intermediate_size = 3 * WIDTH, c.vocab_size = VOCAB;
    fsdp_module *m = *out = fsdp_model_create(&c);
    EXPECT(m && fsdp_reset_parameters(m, 7) == FSDP_OK);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = r->dtype;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int i = 0; i < BLOCKS; i++) {
        if (r->on) FSDP_TRY(fsdp_checkpoint_module(fsdp_model_block(m, i), NULL));
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), &o));
    }
    return fsdp_fully_shard(m, &o);
}

static fsdp_status rank_main(void *arg)
{
    run *r = arg;
    fsdp_module *m = NULL;
    FSDP_TRY(make(r, &m));
    fsdp_optimizer *adamw = fsdp_adamw(m, NULL);
    EXPECT(adamw);
    fsdp_memory_reset_peak();
    for (int s = 0; s < STEPS; s++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_empty(FSDP_I64, 2, SIZES(B, T));
        for (int i = 0; i < B * T; i++)
            ((int64_t *)fsdp_data(x))[i] = (i * 7 + s * 3 + fsdp_rank()) % VOCAB;
        fsdp_tensor *loss = fsdp_scale(fsdp_model_forward(m, x, NULL, x), 1.0 / (B * T));
        EXPECT(loss);
        r->loss[fsdp_rank()][s] = fsdp_item(loss);
        EXPECT(fsdp_backward(loss) == FSDP_OK && fsdp_optimizer_step(adamw) == FSDP_OK &&
               fsdp_zero_grad(m) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_memory_stats stats;
    fsdp_memory_get(&stats);
    r->peak[fsdp_rank()] = stats.peak[FSDP_ACTIVATIONS];
    fsdp_optimizer_free(adamw);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_c18(void **state)
{
    (void)state;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        run none = {.dtype = bf16 ? FSDP_BF16 : FSDP_F32}, full = none;
        full.on = 1;
        check_ok(fsdp_run_threads(RANKS, rank_main, &none));
        check_ok(fsdp_run_threads(RANKS, rank_main, &full));
        assert_memory_equal(none.loss, full.loss, sizeof none.loss);
        assert_true(none.loss[0][0] != none.loss[0][1]);
        for (int k = 0; k < RANKS; k++) {
            print_message("rank %d, %s: activation peak %lld bytes without, %lld with (%.1f %%)\n",
                          k, fsdp_dtype_name(none.dtype), (long long)none.peak[k],
                          (long long)full.peak[k],
                          100.0 * (double)full.peak[k] / (double)none.peak[k]);
            assert_true((double)full.peak[k] <= 0.45 * (double)none.peak[k]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c18)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
