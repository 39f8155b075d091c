/*
 * test_models_forward.c - the families as modules: names, tied weights, loss and logits, cache,
 * windows, dropout, meta, counted operations, memory. Their numbers are compared with another
 * program's in tests/golden.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "models/models_internal.h"

/* A small model of a family with everything that it may have. */
static fsdp_model_config small(fsdp_model_family f)
{
    fsdp_model_config c = fsdp__model_config_default(f);
    c.vocab_size = 37;
    c.hidden_size = 24;
    c.intermediate_size = 40;
    c.num_layers = 2;
    c.num_heads = 4;
    c.num_kv_heads = f == FSDP_GPT2 ? 4 : 2;
    c.head_dim = 6;
    c.max_position_embeddings = 16;
    c.initializer_range = 0.2;
    c.attention_dropout = c.resid_dropout = c.embd_dropout = 0.0;
    return c;
}

static fsdp_module *make(const fsdp_model_config *c)
{
    fsdp_module *m = fsdp_model_create(c);
    assert_non_null(m);
    assert_int_equal(fsdp_reset_parameters(m, 5), FSDP_OK);
    return m;
}

static fsdp_tensor *ids(int64_t B, int64_t T, int64_t first, int64_t step, int64_t below)
{
    int64_t sizes[2] = {B, T};
    fsdp_tensor *t = fsdp_empty(FSDP_I64, 2, sizes);
    int64_t *p = fsdp_data(t);
    for (int64_t i = 0; i < B * T; i++)
        p[i] = (first + i * step) % below;
    fsdp_touch(t);
    return t;
}

static fsdp_tensor *part(fsdp_tensor *t, int64_t start, int64_t end)
{
    return fsdp_contiguous(fsdp_slice(t, 1, start, end));
}

static double difference(fsdp_tensor *a, fsdp_tensor *b)
{
    assert_int_equal(fsdp_numel(a), fsdp_numel(b));
    size_t n = (size_t)fsdp_numel(a);
    double *x = malloc(n * sizeof *x), *y = malloc(n * sizeof *y), worst = 0.0;
    assert_int_equal(fsdp_to_doubles(a, x), FSDP_OK);
    assert_int_equal(fsdp_to_doubles(b, y), FSDP_OK);
    for (size_t i = 0; i < n; i++)
        if (!(fabs(x[i] - y[i]) <= worst)) worst = fabs(x[i] - y[i]);
    free(x);
    free(y);
    return worst;
}

/* ---- names ------------------------------------------------------------------------ */

static void expect_names(fsdp_module *m, const char *const *expected, int64_t n)
{
    fsdp_param_list l;
    assert_int_equal(fsdp_module_params(m, &l), FSDP_OK);
    for (int64_t i = 0; i < n && i < l.count; i++)
        assert_string_equal(l.items[i].name, expected[i]);
    assert_int_equal(l.count, n);
    fsdp_param_list_free(&l);
}

static void names_of_a_decoder(void **state)
{
    (void)state;
    static const char *const expected[] = {
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.k_norm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    };
    fsdp_model_config c = small(FSDP_QWEN3);
    c.num_layers = 1;
    c.attention_bias = true;
    fsdp_module *m = make(&c);
    expect_names(m, expected, sizeof expected / sizeof *expected);
    fsdp_module_free(m);
}

static void names_of_gpt2(void **state)
{
    (void)state;
    static const char *const expected[] = {
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.ln_1.bias",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
        "transformer.h.0.attn.c_proj.weight",
        "transformer.h.0.attn.c_proj.bias",
        "transformer.h.0.ln_2.weight",
        "transformer.h.0.ln_2.bias",
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.h.0.mlp.c_fc.bias",
        "transformer.h.0.mlp.c_proj.weight",
        "transformer.h.0.mlp.c_proj.bias",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    };
    fsdp_model_config c = small(FSDP_GPT2);
    c.num_layers = 1;
    fsdp_module *m = make(&c);
    expect_names(m, expected, sizeof expected / sizeof *expected);
    const int64_t *size = fsdp_param_sizes(
        fsdp_module_param(fsdp_module_find(m, "transformer.h.0.mlp.c_fc"), "weight"));
    assert_int_equal(size[0], 24); /* (in, out) */
    assert_int_equal(size[1], 40);
    fsdp_module_free(m);
}

static void a_tied_head_is_the_embedding(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    c.tie_word_embeddings = true;
    fsdp_module *m = make(&c);
    assert_ptr_equal(fsdp_module_param(fsdp_module_find(m, "lm_head"), "weight"),
                     fsdp_module_param(fsdp_module_find(m, "model.embed_tokens"), "weight"));
    int64_t tied = fsdp_module_numel(m);
    fsdp_module_free(m);
    c.tie_word_embeddings = false;
    m = make(&c);
    assert_int_equal(fsdp_module_numel(m), tied + 37 * 24);
    fsdp_module_free(m);
}

/* ---- forward ------------------------------------------------------------------------ */

static const fsdp_model_family families[] = {FSDP_LLAMA, FSDP_MISTRAL, FSDP_QWEN2, FSDP_QWEN3,
                                             FSDP_GPT2};

static void the_loss_is_that_of_the_logits(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        fsdp_model_config c = small(families[f]);
        fsdp_module *m = make(&c);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *tokens = ids(3, 7, 1, 5, 37), *targets = ids(3, 7, 6, 5, 37);
        ((int64_t *)fsdp_data(targets))[4] = -100;
        fsdp_tensor *logits = fsdp_model_forward(m, tokens, NULL, NULL);
        fsdp_tensor *loss = fsdp_model_forward(m, tokens, NULL, targets);
        fsdp_tensor *same = fsdp_cross_entropy(logits, targets, -100, FSDP_REDUCE_SUM);
        assert_int_equal(fsdp_ndim(logits), 3);
        assert_int_equal(fsdp_size(logits, 2), 37);
        double a = fsdp_item(loss), b = fsdp_item(same);
        assert_true(fabs(a - b) <= 1e-5 * b && b > 0.0);
        assert_int_equal(fsdp_backward(loss), FSDP_OK);
        fsdp_scope_end(scope);
        fsdp_param_list l;
        assert_int_equal(fsdp_module_params(m, &l), FSDP_OK);
        for (int64_t i = 0; i < l.count; i++)
            assert_non_null(fsdp_grad(fsdp_param_tensor(l.items[i].param)));
        fsdp_param_list_free(&l);
        fsdp_module_free(m);
    }
}

static void positions_from_zero_change_no_bit(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        fsdp_model_config c = small(families[f]);
        fsdp_module *m = make(&c);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_no_grad_begin();
        fsdp_tensor *tokens = ids(2, 5, 3, 7, 37), *positions = ids(2, 5, 0, 1, 5);
        fsdp_tensor *a = fsdp_model_forward(m, tokens, NULL, NULL);
        fsdp_tensor *b = fsdp_model_forward(m, tokens, positions, NULL);
        fsdp_tensor *later = fsdp_model_forward(m, tokens, ids(2, 5, 1, 2, 11), NULL);
        assert_true(difference(a, b) == 0.0);
        assert_true(difference(a, later) > 1e-4);
        fsdp_no_grad_end();
        fsdp_scope_end(scope);
        fsdp_module_free(m);
    }
}

static void a_window_hides_what_is_before_it(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_MISTRAL);
    c.num_layers = 1;
    c.sliding_window = 3;
    fsdp__model_config_windows(&c);
    fsdp_module *m = make(&c);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    fsdp_tensor *tokens = ids(1, 8, 3, 7, 37), *other = fsdp_clone(tokens);
    ((int64_t *)fsdp_data(other))[0] = 1;
    fsdp_tensor *a = fsdp_model_forward(m, tokens, NULL, NULL);
    fsdp_tensor *b = fsdp_model_forward(m, other, NULL, NULL);
    /* Position 2 still sees token 0, position 3 does not. */
    assert_true(difference(part(a, 2, 3), part(b, 2, 3)) > 1e-5);
    assert_true(difference(part(a, 3, 8), part(b, 3, 8)) == 0.0);
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    fsdp_module_free(m);
}

/* ---- cache -------------------------------------------------------------------------------- */

static void decoding_with_a_cache(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        fsdp_model_config c = small(families[f]);
        if (families[f] == FSDP_MISTRAL) {
            c.sliding_window = 3;
            fsdp__model_config_windows(&c);
        }
        fsdp_module *m = make(&c);
        fsdp_kv_cache *kv = fsdp_kv_cache_create(&c, 2, 9, FSDP_F32);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_no_grad_begin();
        fsdp_tensor *tokens = ids(2, 9, 3, 7, 37);
        fsdp_tensor *all = fsdp_model_forward(m, tokens, NULL, NULL);
        assert_int_equal(fsdp_model_set_cache(m, kv), FSDP_OK);
        static const int64_t cuts[] = {0, 4, 5, 7, 9};
        for (int i = 0; i < 4; i++) {
            fsdp_tensor *y = fsdp_model_forward(m, part(tokens, cuts[i], cuts[i + 1]), NULL, NULL);
            assert_true(difference(y, part(all, cuts[i], cuts[i + 1])) < 1e-5);
            assert_int_equal(fsdp_kv_cache_length(kv), cuts[i + 1]);
        }
        /* Full now. */
        assert_null(fsdp_model_forward(m, part(tokens, 0, 1), NULL, NULL));
        assert_non_null(strstr(fsdp_error_text(), "do not fit its 9"));
        fsdp_error_clear();
        assert_int_equal(fsdp_kv_cache_length(kv), 9);
        fsdp_no_grad_end();
        assert_null(fsdp_model_forward(m, part(tokens, 0, 1), NULL, NULL));
        assert_non_null(strstr(fsdp_error_text(), "builds no graph"));
        fsdp_error_clear();
        assert_int_equal(fsdp_model_set_cache(m, NULL), FSDP_OK);
        fsdp_scope_end(scope);
        fsdp_kv_cache_free(kv);
        fsdp_module_free(m);
    }
}

static void a_cache_of_another_model_is_refused(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA), d = c;
    fsdp_module *m = make(&c);
    d.num_layers = 3;
    fsdp_kv_cache *kv = fsdp_kv_cache_create(&d, 1, 4, FSDP_F32);
    assert_int_equal(fsdp_model_set_cache(m, kv), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    fsdp_kv_cache_free(kv);
    kv = fsdp_kv_cache_create(&c, 1, 4, FSDP_BF16);
    assert_int_equal(fsdp_model_set_cache(m, kv), FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    assert_null(fsdp_model_forward(m, ids(1, 2, 0, 1, 37), NULL, NULL));
    fsdp_no_grad_end();
    assert_non_null(strstr(fsdp_error_text(), "bf16"));
    fsdp_error_clear();
    fsdp_scope_end(scope);
    fsdp_kv_cache_free(kv);
    fsdp_module_free(m);
    assert_null(fsdp_kv_cache_create(&c, 0, 4, FSDP_F32));
    fsdp_error_clear();
}

/* ---- dropout, meta, memory ------------------------------------------------------------------ */

static void dropout_acts_in_training_alone(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_GPT2);
    fsdp_module *sure = make(&c);
    c.attention_dropout = c.resid_dropout = c.embd_dropout = 0.3;
    fsdp_module *m = make(&c);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    fsdp_tensor *tokens = ids(2, 6, 3, 7, 37);
    assert_int_equal(fsdp_random_set(1, 0, NULL, 0), FSDP_OK);
    fsdp_tensor *a = fsdp_model_forward(m, tokens, NULL, NULL);
    assert_int_equal(fsdp_random_set(1, 1, NULL, 0), FSDP_OK);
    fsdp_tensor *b = fsdp_model_forward(m, tokens, NULL, NULL);
    fsdp_module_train(m, 0);
    fsdp_tensor *calm = fsdp_model_forward(m, tokens, NULL, NULL);
    assert_true(difference(a, b) > 1e-3);
    assert_true(difference(calm, fsdp_model_forward(sure, tokens, NULL, NULL)) == 0.0);
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    fsdp_module_free(sure);
    fsdp_module_free(m);
}

static void meta_gives_shapes(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof families / sizeof *families; f++) {
        fsdp_model_config c = small(families[f]);
        fsdp_memory_stats before, after;
        fsdp_memory_get(&before);
        fsdp_device_push(FSDP_META);
        fsdp_module *m = fsdp_model_create(&c);
        fsdp_scope *scope = fsdp_scope_begin();
        int64_t sizes[2] = {2, 9};
        fsdp_tensor *tokens = fsdp_empty(FSDP_I64, 2, sizes);
        fsdp_tensor *logits = fsdp_model_forward(m, tokens, NULL, NULL);
        fsdp_tensor *loss = fsdp_model_forward(m, tokens, NULL, tokens);
        assert_non_null(loss);
        assert_int_equal(fsdp_size(logits, 1), 9);
        fsdp_memory_get(&after);
        assert_int_equal(after.live_total, before.live_total);
        fsdp_scope_end(scope);
        fsdp_device_pop();
        fsdp_module_free(m);
    }
}

/* Without a graph the peak does not grow with the number of blocks. */
static void blocks_hold_one_activation(void **state)
{
    (void)state;
    int64_t peak[2];
    for (int k = 0; k < 2; k++) {
        fsdp_model_config c = small(FSDP_LLAMA);
        c.num_layers = k ? 9 : 2;
        fsdp_module *m = make(&c);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_no_grad_begin();
        fsdp_tensor *tokens = ids(2, 15, 3, 7, 37);
        assert_non_null(fsdp_model_forward(m, tokens, NULL, tokens)); /* makes the tables */
        fsdp_memory_stats s;
        fsdp_memory_reset_peak();
        fsdp_memory_get(&s);
        int64_t before = s.live_total;
        assert_non_null(fsdp_model_forward(m, tokens, NULL, tokens));
        fsdp_memory_get(&s);
        peak[k] = s.peak_total - before;
        fsdp_no_grad_end();
        fsdp_scope_end(scope);
        fsdp_module_free(m);
    }
    assert_int_equal(peak[0], peak[1]);
}

/* ---- counted operations ------------------------------------------------------------------------
 */

static void operations_a_token(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    double layer = 24.0 * 24 + 2 * 24 * 12 + 24 * 24 + 3 * 24 * 40;
    double expected = 6.0 * (2 * layer + 24 * 37) + 6.0 * 2 * 24 * 10;
    assert_true(fabs(fsdp_model_flops_per_token(&c, 10) - expected) < 1e-6);
    c = small(FSDP_GPT2);
    layer = 4 * 24.0 * 24 + 2 * 24 * 40;
    expected = 6.0 * (2 * layer + 24 * 37) + 6.0 * 2 * 24 * 10;
    assert_true(fabs(fsdp_model_flops_per_token(&c, 10) - expected) < 1e-6);
}

/* ---- mistakes ----------------------------------------------------------------------------------
 */

static void expect_error(fsdp_tensor *t, const char *words)
{
    assert_null(t);
    assert_non_null(strstr(fsdp_error_text(), words));
    fsdp_error_clear();
}

static void mistakes_are_named(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_GPT2);
    fsdp_module *m = make(&c);
    fsdp_scope *scope = fsdp_scope_begin();
    int64_t sizes[2] = {1, 4};
    expect_error(fsdp_model_forward(m, fsdp_zeros(FSDP_F32, 2, sizes), NULL, NULL),
                 "tokens are f32");
    fsdp_tensor *tokens = ids(1, 4, 0, 1, 37);
    expect_error(fsdp_model_forward(m, tokens, NULL, ids(1, 3, 0, 1, 37)), "targets are");
    expect_error(fsdp_model_forward(m, ids(1, 17, 0, 1, 37), NULL, NULL), "16 positions");
    expect_error(fsdp_model_forward(m, ids(1, 4, 35, 1, 40), NULL, NULL), "37");
    expect_error(fsdp_model_forward(fsdp_model_block(m, 0), tokens, NULL, NULL), "is no model");
    assert_null(fsdp_model_block(m, 2));
    fsdp_error_clear();
    assert_int_equal(fsdp_model_block_count(m), 2);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    c.num_heads = 0;
    assert_null(fsdp_model_create(&c));
    fsdp_error_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_of_a_decoder),
        cmocka_unit_test(names_of_gpt2),
        cmocka_unit_test(a_tied_head_is_the_embedding),
        cmocka_unit_test(the_loss_is_that_of_the_logits),
        cmocka_unit_test(positions_from_zero_change_no_bit),
        cmocka_unit_test(a_window_hides_what_is_before_it),
        cmocka_unit_test(decoding_with_a_cache),
        cmocka_unit_test(a_cache_of_another_model_is_refused),
        cmocka_unit_test(dropout_acts_in_training_alone),
        cmocka_unit_test(meta_gives_shapes),
        cmocka_unit_test(blocks_hold_one_activation),
        cmocka_unit_test(operations_a_token),
        cmocka_unit_test(mistakes_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
