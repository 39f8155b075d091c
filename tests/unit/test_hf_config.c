/*
 * test_hf_config.c - config.json: both versions of transformers give the same model, defaults of
 * the classes, what is refused, what is warned of, and that what is written reads back the same.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/file.h"
#include "format/json.h"
#include "fsdp/context.h"
#include "hf/config.h"

static char warnings[4096];

static void listen(void *arg, int level, const char *line)
{
    (void)arg;
    if (level > 1) return;
    size_t n = strlen(warnings);
    snprintf(warnings + n, sizeof warnings - n, "%s\n", line);
}

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    warnings[0] = 0;
    fsdp_log_set(listen, NULL, 1);
    return 0;
}

static fsdp_model_config parse(const char *text)
{
    fsdp_model_config c;
    if (fsdp__hf_config_parse(text, strlen(text), "c.json", &c) != FSDP_OK)
        fail_msg("%s", fsdp_error_text());
    return c;
}

static void refuse(const char *text, fsdp_status code, const char *words)
{
    fsdp_model_config c;
    fsdp_status s = fsdp__hf_config_parse(text, strlen(text), "c.json", &c);
    if (s != code || !strstr(fsdp_error_text(), words))
        fail_msg("%s\n-> %d %s\nexpected %d '%s'", text, (int)s, fsdp_error_text(), (int)code,
                 words);
    fsdp_error_clear();
}

static fsdp_model_config load(const char *folder, const char *name)
{
    char path[512];
    fsdp_model_config c;
    snprintf(path, sizeof path, "%s/%s/%s/config.json", FSDP_TEST_DATA, folder, name);
    if (fsdp__hf_config_load(path, &c) != FSDP_OK) fail_msg("%s", fsdp_error_text());
    return c;
}

static void expect_same(const fsdp_model_config *a, const fsdp_model_config *b)
{
    fsdp__str x = {0}, y = {0};
    assert_int_equal(fsdp__hf_config_text(a, &x), FSDP_OK);
    assert_int_equal(fsdp__hf_config_text(b, &y), FSDP_OK);
    assert_string_equal(fsdp__str_get(&x), fsdp__str_get(&y));
    fsdp__str_free(&x);
    fsdp__str_free(&y);
    /* what the text does not say of every family */
    assert_int_equal(a->attention_out_bias, b->attention_out_bias);
    assert_int_equal(a->qk_norm, b->qk_norm);
    assert_int_equal(a->sliding_window, b->sliding_window);
    assert_memory_equal(a->windowed, b->windowed, sizeof a->windowed);
}

/* ---- files that transformers wrote ------------------------------------------------------ */

static const char *const names[] = {"llama",         "llama-tied", "llama3-rope",
                                    "llama-headdim", "mistral",    "mistral-window",
                                    "qwen2",         "qwen3",      "gpt2"};

static void test_both_versions(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        fsdp_model_config five = load("models", names[i]), four = load("models-v4", names[i]);
        expect_same(&five, &four);
        assert_int_equal(five.vocab_size, 257);
        assert_int_equal(five.num_layers, 3);
        assert_int_equal(five.dtype, FSDP_F32);
        assert_string_equal(warnings, "");
    }
}

/* Every key that transformers 4 wrote is written with the same value. */
static void test_written_as_version_4(void **state)
{
    (void)state;
    static const char *const left_out[] = {
        "transformers_version",  "pretraining_tp",         "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj",      "add_cross_attention",    "reorder_and_upcast_attn"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char path[512];
        const char *key;
        json_t *v;
        fsdp__str text = {0};
        fsdp_model_config c = load("models", names[i]);
        snprintf(path, sizeof path, "%s/models-v4/%s/config.json", FSDP_TEST_DATA, names[i]);
        json_t *theirs = fsdp__json_load(path);
        assert_int_equal(fsdp__hf_config_text(&c, &text), FSDP_OK);
        json_t *ours = fsdp__json_parse(fsdp__str_get(&text), text.len, "ours");
        assert_non_null(theirs);
        assert_non_null(ours);
        json_object_foreach(theirs, key, v)
        {
            bool skip = false;
            for (size_t k = 0; k < sizeof left_out / sizeof left_out[0]; k++)
                skip |= !strcmp(key, left_out[k]);
            json_t *o = json_object_get(ours, key);
            if (skip) continue;
            if (!o) fail_msg("%s: no %s", names[i], key);
            if (json_is_number(v) ? json_number_value(v) != json_number_value(o)
                                  : !json_equal(v, o))
                fail_msg("%s: another %s", names[i], key);
        }
        json_decref(ours);
        json_decref(theirs);
        fsdp__str_free(&text);
    }
}

static void test_values(void **state)
{
    (void)state;
    fsdp_model_config c = load("models", "llama3-rope");
    assert_int_equal(c.family, FSDP_LLAMA);
    assert_int_equal(c.rope.type, FSDP_ROPE_LLAMA3);
    assert_true(c.rope.theta == 500000 && c.rope.factor == 8);
    assert_true(c.rope.low_freq_factor == 1 && c.rope.high_freq_factor == 4);
    assert_int_equal(c.rope.original_max_position, 64);
    assert_int_equal(c.num_kv_heads, 2);
    assert_int_equal(c.head_dim, 8);
    assert_true(c.norm_eps == 1e-5);
    c = load("models", "llama-headdim");
    assert_int_equal(c.head_dim, 12);
    assert_true(c.attention_bias && c.attention_out_bias && c.mlp_bias);
    assert_false(c.tie_word_embeddings);
    c = load("models", "llama-tied");
    assert_true(c.tie_word_embeddings);
    c = load("models", "mistral-window");
    assert_int_equal(c.sliding_window, 12);
    for (int i = 0; i < 3; i++)
        assert_int_equal(fsdp__model_window(&c, i), 12);
    c = load("models", "mistral");
    assert_int_equal(fsdp__model_window(&c, 0), 0);
    c = load("models", "qwen2");
    assert_true(c.attention_bias && !c.attention_out_bias && !c.qk_norm);
    assert_int_equal(fsdp__model_window(&c, 2), 0);
    c = load("models", "qwen3");
    assert_true(!c.attention_bias && c.qk_norm);
    assert_int_equal(c.head_dim, 16);
    c = load("models", "gpt2");
    assert_int_equal(c.hidden_size, 64);
    assert_int_equal(c.intermediate_size, 256);
    assert_int_equal(c.max_position_embeddings, 256);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.hidden_act, FSDP_ACT_GELU_TANH);
    assert_true(c.attention_dropout == 0 && c.resid_dropout == 0 && c.embd_dropout == 0);
    assert_true(fsdp__model_attention_scale(&c, 2) == 0.25);
    assert_int_equal(c.bos_token_id, 1);
    assert_int_equal(c.num_eos, 1);
    assert_int_equal(c.eos_token_ids[0], 2);
    assert_int_equal(c.pad_token_id, -1);
}

/* ---- defaults ---------------------------------------------------------------------------------
 */

static void test_defaults(void **state)
{
    (void)state;
    fsdp_model_config c = load("models", "llama-defaults");
    assert_int_equal(c.family, FSDP_LLAMA);
    assert_int_equal(c.num_kv_heads, 4); /* as many as heads, not the class's 32 */
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.max_position_embeddings, 2048);
    assert_true(c.norm_eps == 1e-6 && c.rope.theta == 10000 && c.initializer_range == 0.02);
    assert_int_equal(c.dtype, FSDP_DTYPE_NONE);
    assert_false(c.tie_word_embeddings);
    assert_int_equal(c.bos_token_id, 1);
    assert_int_equal(c.eos_token_ids[0], 2);
    static const struct {
        const char *text;
        int64_t v, d, f, l, h, k, hd, t;
    } table[] = {
        {"{\"model_type\": \"llama\"}", 32000, 4096, 11008, 32, 32, 32, 128, 2048},
        {"{\"model_type\": \"mistral\"}", 32000, 4096, 14336, 32, 32, 8, 128, 131072},
        {"{\"model_type\": \"qwen2\"}", 151936, 4096, 22016, 32, 32, 32, 128, 32768},
        {"{\"model_type\": \"qwen3\"}", 151936, 4096, 22016, 32, 32, 32, 128, 32768},
        {"{\"model_type\": \"gpt2\"}", 50257, 768, 3072, 12, 12, 12, 64, 1024},
    };
    for (int i = 0; i < 5; i++) {
        c = parse(table[i].text);
        assert_int_equal(c.family, i);
        assert_int_equal(c.vocab_size, table[i].v);
        assert_int_equal(c.hidden_size, table[i].d);
        assert_int_equal(c.intermediate_size, table[i].f);
        assert_int_equal(c.num_layers, table[i].l);
        assert_int_equal(c.num_heads, table[i].h);
        assert_int_equal(c.num_kv_heads, table[i].k);
        assert_int_equal(c.head_dim, table[i].hd);
        assert_int_equal(c.max_position_embeddings, table[i].t);
        assert_int_equal(c.tie_word_embeddings, i == FSDP_GPT2);
        assert_int_equal(fsdp__model_window(&c, 5), i == FSDP_MISTRAL ? 4096 : 0);
    }
    c = parse("{\"model_type\": \"gpt2\"}");
    assert_true(c.attention_dropout == 0.1 && c.resid_dropout == 0.1 && c.embd_dropout == 0.1);
    assert_int_equal(c.bos_token_id, 50256);
    assert_int_equal(c.eos_token_ids[0], 50256);
    c = parse("{\"model_type\": \"qwen2\"}");
    assert_int_equal(c.bos_token_id, -1);
    assert_int_equal(c.num_eos, 0);
}

/* Null is not the same as absent. */
static void test_nulls(void **state)
{
    (void)state;
    fsdp_model_config c =
        parse("{\"architectures\": [\"MistralForCausalLM\"], \"num_key_value_heads\": null,"
              " \"sliding_window\": null, \"head_dim\": null, \"bos_token_id\": null,"
              " \"eos_token_id\": null, \"rope_scaling\": null}");
    assert_int_equal(c.num_kv_heads, 32);
    assert_int_equal(c.sliding_window, 0);
    assert_int_equal(fsdp__model_window(&c, 0), 0);
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(c.bos_token_id, -1);
    assert_int_equal(c.num_eos, 0);
    refuse("{\"model_type\": \"llama\", \"hidden_size\": null}", FSDP_INVALID_DATA,
           "c.json: hidden_size: found null");
}

/* ---- forms --------------------------------------------------------------------------------------
 */

static void test_rope_forms(void **state)
{
    (void)state;
    fsdp_model_config c =
        parse("{\"model_type\": \"llama\", \"rope_theta\": 5e5, \"rope_scaling\":"
              " {\"type\": \"llama3\", \"factor\": 32, \"low_freq_factor\": 1,"
              " \"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 8192}}");
    assert_int_equal(c.rope.type, FSDP_ROPE_LLAMA3);
    assert_true(c.rope.theta == 500000 && c.rope.factor == 32);
    /* the old key, where it says something, before the new one, as transformers 5 does */
    c = parse("{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"default\"},"
              " \"rope_parameters\": {\"rope_theta\": 7.0}}");
    assert_true(c.rope.theta == 10000);
    c = parse("{\"model_type\": \"llama\", \"rope_scaling\": {}, \"rope_parameters\": "
              "{\"rope_theta\": 7.0}}");
    assert_true(c.rope.theta == 7);
    c = parse("{\"model_type\": \"llama\", \"rope_theta\": 9, \"rope_parameters\": {\"rope_type\": "
              "\"llama3\","
              " \"factor\": 2.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 2.0}}");
    assert_true(c.rope.theta == 9);
    assert_int_equal(c.rope.original_max_position, 2048);
    assert_string_equal(warnings, "");
    refuse(
        "{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2.0}}",
        FSDP_UNSUPPORTED,
        "c.json: rope_scaling.rope_type: found \"yarn\", expected default or llama3");
    refuse(
        "{\"model_type\": \"qwen2\", \"rope_parameters\": {\"type\": \"linear\", \"factor\": 2.0}}",
        FSDP_UNSUPPORTED, "rope_parameters.type: found \"linear\"");
    refuse("{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": "
           "2.0}}",
           FSDP_INVALID_DATA, "rope_scaling.low_freq_factor: found nothing");
    refuse(
        "{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 0.5,"
        " \"low_freq_factor\": 1, \"high_freq_factor\": 4}}",
        FSDP_INVALID_CONFIG, "factor: found 0.5");
    refuse(
        "{\"model_type\": \"llama\", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 2,"
        " \"low_freq_factor\": 4, \"high_freq_factor\": 4}}",
        FSDP_INVALID_CONFIG, "0 < low < high");
    refuse("{\"model_type\": \"llama\", \"rope_scaling\": 2}", FSDP_INVALID_DATA,
           "rope_scaling: found 2");
    refuse("{\"model_type\": \"llama\", \"rope_parameters\": {\"full_attention\": {}}}",
           FSDP_UNSUPPORTED, "rope_parameters.full_attention");
    refuse("{\"model_type\": \"llama\", \"rope_parameters\": {\"partial_rotary_factor\": 0.5}}",
           FSDP_UNSUPPORTED, "partial_rotary_factor: found 0.5");
    refuse("{\"model_type\": \"llama\", \"rope_theta\": 0}", FSDP_INVALID_CONFIG, "rope_theta");
}

static void test_windows(void **state)
{
    (void)state;
    fsdp_model_config c =
        parse("{\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 7,"
              " \"max_window_layers\": 3, \"num_hidden_layers\": 5}");
    for (int i = 0; i < 5; i++)
        assert_int_equal(fsdp__model_window(&c, i), i >= 3 ? 7 : 0);
    /* the list decides where it is there */
    c = parse(
        "{\"model_type\": \"qwen3\", \"use_sliding_window\": true, \"sliding_window\": 7,"
        " \"max_window_layers\": 3, \"num_hidden_layers\": 3,"
        " \"layer_types\": [\"sliding_attention\", \"full_attention\", \"sliding_attention\"]}");
    assert_int_equal(fsdp__model_window(&c, 0), 7);
    assert_int_equal(fsdp__model_window(&c, 1), 0);
    assert_int_equal(fsdp__model_window(&c, 2), 7);
    fsdp__str text = {0};
    assert_int_equal(fsdp__hf_config_text(&c, &text), FSDP_OK);
    fsdp_model_config again = parse(fsdp__str_get(&text));
    expect_same(&c, &again);
    fsdp__str_free(&text);
    refuse("{\"model_type\": \"qwen2\", \"num_hidden_layers\": 2, \"layer_types\": "
           "[\"full_attention\"]}",
           FSDP_INVALID_DATA, "layer_types: found a list of 1 values");
    refuse("{\"model_type\": \"qwen2\", \"num_hidden_layers\": 1, \"layer_types\": "
           "[\"chunked_attention\"]}",
           FSDP_UNSUPPORTED, "found chunked_attention");
    refuse("{\"model_type\": \"qwen2\", \"num_hidden_layers\": 1, \"layer_types\": "
           "[\"sliding_attention\"]}",
           FSDP_INVALID_DATA, "use_sliding_window");
    refuse("{\"model_type\": \"mistral\", \"num_hidden_layers\": 1, \"layer_types\": "
           "[\"full_attention\"]}",
           FSDP_UNSUPPORTED, "as sliding_window says");
    refuse("{\"model_type\": \"mistral\", \"sliding_window\": 0}", FSDP_INVALID_DATA,
           "sliding_window: found 0");
    refuse("{\"model_type\": \"mistral\", \"sliding_window\": -1}", FSDP_INVALID_DATA,
           "sliding_window: found -1");
}

static void test_names_of_gpt2(void **state)
{
    (void)state;
    fsdp_model_config c =
        parse("{\"model_type\": \"gpt2\", \"hidden_size\": 24, \"num_hidden_layers\": 2,"
              " \"num_attention_heads\": 3, \"max_position_embeddings\": 9, \"n_inner\": 50,"
              " \"activation_function\": \"relu\", \"scale_attn_by_inverse_layer_idx\": true,"
              " \"scale_attn_weights\": false, \"n_ctx\": 9}");
    assert_int_equal(c.hidden_size, 24);
    assert_int_equal(c.head_dim, 8);
    assert_int_equal(c.intermediate_size, 50);
    assert_int_equal(c.hidden_act, FSDP_ACT_RELU);
    assert_true(fsdp__model_attention_scale(&c, 3) == 0.25);
    assert_string_equal(warnings, "");
    fsdp__str text = {0};
    assert_int_equal(fsdp__hf_config_text(&c, &text), FSDP_OK);
    assert_non_null(strstr(fsdp__str_get(&text), "\"n_embd\": 24"));
    assert_null(strstr(fsdp__str_get(&text), "hidden_size"));
    fsdp_model_config again = parse(fsdp__str_get(&text));
    expect_same(&c, &again);
    fsdp__str_free(&text);
}

static void test_ids(void **state)
{
    (void)state;
    fsdp_model_config c =
        parse("{\"model_type\": \"llama\", \"eos_token_id\": [128001, 128008, 128009],"
              " \"pad_token_id\": -1}");
    assert_int_equal(c.num_eos, 3);
    assert_int_equal(c.eos_token_ids[2], 128009);
    assert_int_equal(c.pad_token_id, -1);
    refuse("{\"model_type\": \"llama\", \"eos_token_id\": [1, \"2\"]}", FSDP_INVALID_DATA,
           "eos_token_id");
    refuse("{\"model_type\": \"llama\", \"eos_token_id\": -5}", FSDP_INVALID_DATA,
           "eos_token_id: found -5");
    refuse("{\"model_type\": \"llama\", \"bos_token_id\": \"x\"}", FSDP_INVALID_DATA,
           "bos_token_id");
    refuse("{\"model_type\": \"llama\", \"bos_token_id\": -2}", FSDP_INVALID_DATA,
           "bos_token_id: found -2");
}

/* ---- what is refused ----------------------------------------------------------------------------
 */

static void test_refused(void **state)
{
    (void)state;
    refuse("{}", FSDP_INVALID_DATA, "c.json: model_type: found nothing");
    refuse("[]", FSDP_INVALID_DATA, "expected an object");
    refuse("{\"model_type\": \"bert\"}", FSDP_UNSUPPORTED, "model_type: found \"bert\"");
    refuse("{\"architectures\": [\"MixtralForCausalLM\"]}", FSDP_UNSUPPORTED,
           "architectures: found MixtralForCausalLM, expected LlamaForCausalLM");
    refuse("{\"architectures\": [\"LlamaModel\"], \"model_type\": \"llama\"}", FSDP_UNSUPPORTED,
           "LlamaModel");
    refuse("{\"architectures\": [7]}", FSDP_UNSUPPORTED, "architectures");
    refuse("{\"architectures\": \"LlamaForCausalLM\"}", FSDP_INVALID_DATA, "a list of names");
    refuse("{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"qwen2\"}",
           FSDP_INVALID_DATA, "model_type: found \"qwen2\", expected \"llama\"");
    refuse("{\"model_type\": \"llama\", \"hidden_act\": \"gelu\"}", FSDP_UNSUPPORTED,
           "hidden_act: found \"gelu\"");
    refuse("{\"model_type\": \"gpt2\", \"activation_function\": \"mish\"}", FSDP_UNSUPPORTED,
           "activation_function: found \"mish\"");
    refuse("{\"model_type\": \"gpt2\", \"reorder_and_upcast_attn\": true}", FSDP_UNSUPPORTED,
           "reorder_and_upcast_attn: found true");
    refuse("{\"model_type\": \"gpt2\", \"add_cross_attention\": true}", FSDP_UNSUPPORTED,
           "add_cross_attention");
    refuse("{\"model_type\": \"llama\", \"quantization_config\": {\"bits\": 4}}", FSDP_UNSUPPORTED,
           "quantization_config: found an object of 1 names");
    refuse("{\"model_type\": \"llama\", \"rope_interleaved\": true}", FSDP_UNSUPPORTED,
           "rope_interleaved");
    refuse("{\"model_type\": \"llama\", \"partial_rotary_factor\": 0.5}", FSDP_UNSUPPORTED,
           "partial_rotary_factor");
    refuse("{\"model_type\": \"llama\", \"torch_dtype\": \"int8\"}", FSDP_UNSUPPORTED,
           "torch_dtype: found \"int8\"");
    refuse("{\"model_type\": \"llama\", \"dtype\": \"float8_e4m3fn\"}", FSDP_UNSUPPORTED, "dtype");
    refuse("{\"model_type\": \"llama\", \"vocab_size\": \"many\"}", FSDP_INVALID_DATA,
           "vocab_size: found \"many\"");
    refuse("{\"model_type\": \"llama\", \"vocab_size\": 1.5}", FSDP_INVALID_DATA, "a whole number");
    refuse("{\"model_type\": \"llama\", \"vocab_size\": 0}", FSDP_INVALID_CONFIG,
           "vocab_size: found 0");
    refuse("{\"model_type\": \"llama\", \"num_hidden_layers\": 5000}", FSDP_INVALID_CONFIG,
           "num_hidden_layers");
    refuse("{\"model_type\": \"qwen2\", \"num_hidden_layers\": 5000}", FSDP_INVALID_CONFIG,
           "num_hidden_layers");
    refuse("{\"model_type\": \"gpt2\", \"n_layer\": 0}", FSDP_INVALID_CONFIG, "n_layer: found 0");
    refuse("{\"model_type\": \"llama\", \"num_attention_heads\": 0}", FSDP_INVALID_CONFIG,
           "num_attention_heads: found 0");
    refuse("{\"model_type\": \"llama\", \"num_attention_heads\": 33}", FSDP_INVALID_DATA,
           "hidden_size: found 4096");
    refuse("{\"model_type\": \"gpt2\", \"n_head\": 5}", FSDP_INVALID_DATA, "n_embd");
    refuse("{\"model_type\": \"llama\", \"num_key_value_heads\": 5}", FSDP_INVALID_CONFIG,
           "num_key_value_heads: found 5, expected a divisor");
    refuse("{\"model_type\": \"llama\", \"head_dim\": 7}", FSDP_INVALID_CONFIG,
           "head_dim: found 7, expected an even");
    refuse("{\"model_type\": \"llama\", \"rms_norm_eps\": 0}", FSDP_INVALID_CONFIG, "rms_norm_eps");
    refuse("{\"model_type\": \"llama\", \"attention_dropout\": 1}", FSDP_INVALID_CONFIG,
           "attention_dropout: found 1");
    refuse("{\"model_type\": \"gpt2\", \"attn_pdrop\": -0.1}", FSDP_INVALID_CONFIG, "attn_pdrop");
    refuse("{\"model_type\": \"llama\", \"tie_word_embeddings\": 1}", FSDP_INVALID_DATA,
           "true or false");
    refuse("{\"model_type\": \"llama\",", FSDP_INVALID_DATA, "c.json:1:");
    fsdp_model_config c;
    assert_int_equal(fsdp__hf_config_load("/nowhere/config.json", &c), FSDP_NOT_FOUND);
}

static void test_warnings(void **state)
{
    (void)state;
    parse(
        "{\"model_type\": \"llama\", \"hiden_size\": 3, \"temperature\": 1.0, \"use_cache\": false,"
        " \"quantization_config\": null, \"rope_interleaved\": false, \"pruned_heads\": {}}");
    assert_string_equal(warnings,
                        "c.json: the key 'hiden_size' is not known for llama and is ignored; "
                        "did you mean 'hidden_size'?\n");
    warnings[0] = 0;
    parse("{\"model_type\": \"qwen2\", \"wholly_other\": 3, \"rope_scaling\": {\"rope_type\": "
          "\"default\", \"zzz\": 1}}");
    assert_string_equal(warnings,
                        "c.json: the key 'wholly_other' is not known for qwen2 and is ignored\n"
                        "c.json: the key 'zzz' in rope_scaling is not known and is ignored\n");
}

/* ---- writing
 * --------------------------------------------------------------------------------------- */

static void test_save(void **state)
{
    (void)state;
    char folder[] = "/tmp/fsdp-test-hf-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/config.json", folder);
    for (int f = 0; f < FSDP_MODEL_FAMILY_COUNT; f++) {
        fsdp_model_config c = fsdp__model_config_default((fsdp_model_family)f), again;
        fsdp__model_config_windows(&c);
        c.dtype = FSDP_BF16;
        c.num_eos = 2;
        c.eos_token_ids[0] = 5;
        c.eos_token_ids[1] = 6;
        assert_int_equal(fsdp__hf_config_save(&c, path), FSDP_OK);
        assert_int_equal(fsdp__hf_config_load(path, &again), FSDP_OK);
        if (f == FSDP_QWEN2 || f == FSDP_QWEN3) c.sliding_window = 0; /* its switch is off */
        expect_same(&c, &again);
        assert_string_equal(warnings, "");
    }
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA), again = c;
    c.num_kv_heads = 5;
    assert_int_equal(fsdp__hf_config_save(&c, path), FSDP_INVALID_CONFIG);
    fsdp_error_clear();
    /* generation_config.json: may list more ids */
    snprintf(path, sizeof path, "%s/generation_config.json", folder);
    assert_int_equal(fsdp__hf_generation_load(path, &again), FSDP_OK);
    assert_int_equal(again.num_eos, 1);
    c.num_eos = 2;
    c.eos_token_ids[1] = 77;
    assert_int_equal(fsdp__hf_generation_save(&c, path), FSDP_OK);
    assert_int_equal(fsdp__hf_generation_load(path, &again), FSDP_OK);
    assert_int_equal(again.num_eos, 2);
    assert_int_equal(again.eos_token_ids[1], 77);
    assert_int_equal(fsdp__dir_remove(folder), FSDP_OK);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup(f, start)
    const struct CMUnitTest tests[] = {
        TEST(test_both_versions), TEST(test_written_as_version_4),
        TEST(test_values),        TEST(test_defaults),
        TEST(test_nulls),         TEST(test_rope_forms),
        TEST(test_windows),       TEST(test_names_of_gpt2),
        TEST(test_ids),           TEST(test_refused),
        TEST(test_warnings),      TEST(test_save),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
