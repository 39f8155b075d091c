/*
 * config.c - the families' defaults and which sizes go together.
 *
 * Defaults are those of transformers' config classes (configuration_llama.py, _mistral.py,
 * _qwen2.py, _qwen3.py, _gpt2.py): a config.json leaves out what equals them.
 */
#include "models/config.h"

#include <stddef.h>
#include <string.h>

#include "base/error.h"

static const struct {
    const char *type, *architecture;
} families[] = {
#define FSDP__X(e, type, arch) {type, arch},
    FSDP_MODEL_FAMILY_LIST(FSDP__X)
#undef FSDP__X
};

const char *fsdp__model_type(fsdp_model_family f)
{
    return families[f].type;
}

const char *fsdp__model_architecture(fsdp_model_family f)
{
    return families[f].architecture;
}

/* ---- defaults ------------------------------------------------------------------------ */

/* GPT-2 has biases everywhere, tied embeddings and dropout by default. */
static fsdp_model_config gpt2(fsdp_model_config c)
{
    c.vocab_size = 50257;
    c.hidden_size = 768;
    c.intermediate_size = 4 * 768;
    c.num_layers = 12;
    c.num_heads = c.num_kv_heads = 12;
    c.head_dim = 64;
    c.max_position_embeddings = 1024;
    c.hidden_act = FSDP_ACT_GELU_TANH;
    c.norm_eps = 1e-5;
    c.tie_word_embeddings = true;
    c.attention_bias = c.attention_out_bias = c.mlp_bias = true;
    c.attention_dropout = c.resid_dropout = c.embd_dropout = 0.1;
    c.bos_token_id = 50256;
    c.eos_token_ids[0] = 50256;
    c.num_eos = 1;
    return c;
}

/* memset also clears padding, so two configs can be compared as bytes. */
fsdp_model_config fsdp__model_config_default(fsdp_model_family f)
{
    fsdp_model_config c;
    memset(&c, 0, sizeof c);
    c.family = f;
    c.scale_attn_weights = true;
    c.initializer_range = 0.02;
    c.bos_token_id = c.pad_token_id = -1;
    c.dtype = FSDP_DTYPE_NONE;
    if (f == FSDP_GPT2) return gpt2(c);
    c.vocab_size = 32000;
    c.hidden_size = 4096;
    c.intermediate_size = 11008;
    c.num_layers = 32;
    c.num_heads = c.num_kv_heads = 32;
    c.head_dim = 128;
    c.max_position_embeddings = 2048;
    c.hidden_act = FSDP_ACT_SILU;
    c.norm_eps = 1e-6;
    c.rope.theta = 10000;
    if (f == FSDP_LLAMA || f == FSDP_MISTRAL) {
        c.bos_token_id = 1;
        c.eos_token_ids[0] = 2;
        c.num_eos = 1;
    }
    if (f == FSDP_MISTRAL) {
        c.intermediate_size = 14336;
        c.num_kv_heads = 8;
        c.max_position_embeddings = 131072;
        c.sliding_window = 4096;
    }
    if (f == FSDP_QWEN2 || f == FSDP_QWEN3) {
        c.vocab_size = 151936;
        c.intermediate_size = 22016;
        c.max_position_embeddings = 32768;
        c.sliding_window = 4096;
        c.max_window_layers = 28;
    }
    c.attention_bias = f == FSDP_QWEN2;
    c.qk_norm = f == FSDP_QWEN3;
    return c;
}

void fsdp__model_config_windows(fsdp_model_config *c)
{
    int64_t from = FSDP_MODEL_MAX_LAYERS;
    if (c->family == FSDP_MISTRAL) from = 0;
    if ((c->family == FSDP_QWEN2 || c->family == FSDP_QWEN3) && c->use_sliding_window)
        from = c->max_window_layers;
    for (int64_t i = 0; i < FSDP_MODEL_MAX_LAYERS; i++)
        c->windowed[i] = c->sliding_window > 0 && i >= from && i < c->num_layers;
}

/* ---- checks ---------------------------------------------------------------------------- */

/* A size and its names: the families', then GPT-2's. */
typedef struct size_row {
    size_t offset;
    const char *name, *gpt2;
    int64_t max;
} size_row;

#define ROW(f, gpt2, max)                             \
    {                                                 \
        offsetof(fsdp_model_config, f), #f, gpt2, max \
    }

static const size_row size_rows[] = {
    ROW(vocab_size, "vocab_size", INT32_MAX),
    ROW(hidden_size, "n_embd", INT32_MAX),
    ROW(intermediate_size, "n_inner", INT32_MAX),
    {offsetof(fsdp_model_config, num_layers), "num_hidden_layers", "n_layer",
     FSDP_MODEL_MAX_LAYERS},
    {offsetof(fsdp_model_config, num_heads), "num_attention_heads", "n_head", INT32_MAX},
    {offsetof(fsdp_model_config, num_kv_heads), "num_key_value_heads", "n_head", INT32_MAX},
    ROW(head_dim, "n_embd / n_head", INT32_MAX),
    ROW(max_position_embeddings, "n_positions", INT32_MAX),
};

/* Names in messages are those of the file that a person can edit. */
static fsdp_status check_sizes(const fsdp_model_config *c, const char *where)
{
    for (size_t i = 0; i < sizeof size_rows / sizeof size_rows[0]; i++) {
        const size_row *r = &size_rows[i];
        int64_t v = *(const int64_t *)((const char *)c + r->offset);
        if (v < 1 || v > r->max)
            return fsdp__fail(FSDP_INVALID_CONFIG, "%s: %s: found %lld, expected 1 to %lld", where,
                              c->family == FSDP_GPT2 ? r->gpt2 : r->name, (long long)v,
                              (long long)r->max);
    }
    return FSDP_OK;
}

/* Query heads share key and value heads in equal groups. */
static fsdp_status check_heads(const fsdp_model_config *c, const char *where)
{
    if (c->family == FSDP_GPT2) {
        if (c->num_heads * c->head_dim != c->hidden_size)
            return fsdp__fail(FSDP_INVALID_CONFIG,
                              "%s: n_embd: found %lld, expected a multiple of n_head, %lld", where,
                              (long long)c->hidden_size, (long long)c->num_heads);
        return FSDP_OK;
    }
    if (c->num_heads % c->num_kv_heads)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: num_key_value_heads: found %lld, expected a divisor of "
                          "num_attention_heads, %lld",
                          where, (long long)c->num_kv_heads, (long long)c->num_heads);
    if (c->head_dim % 2)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: head_dim: found %lld, expected an even number, as rotary positions "
                          "turn pairs",
                          where, (long long)c->head_dim);
    return FSDP_OK;
}

static fsdp_status check_rope(const fsdp_model_config *c, const char *where)
{
    const fsdp_rope *r = &c->rope;
    if (c->family == FSDP_GPT2) return FSDP_OK;
    if (!(r->theta > 0) || !isfinite(r->theta))
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s: rope_theta: found %g, expected more than 0",
                          where, r->theta);
    if (r->type != FSDP_ROPE_LLAMA3) return FSDP_OK;
    if (!(r->factor >= 1) || !isfinite(r->factor))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: rope_scaling.factor: found %g, expected 1 or more", where,
                          r->factor);
    if (!(r->low_freq_factor > 0) || !(r->high_freq_factor > r->low_freq_factor) ||
        !isfinite(r->high_freq_factor))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: rope_scaling: found low_freq_factor %g and high_freq_factor %g, "
                          "expected 0 < low < high",
                          where, r->low_freq_factor, r->high_freq_factor);
    if (r->original_max_position < 1)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: rope_scaling.original_max_position_embeddings: found %lld, expected "
                          "1 or more",
                          where, (long long)r->original_max_position);
    return FSDP_OK;
}

static fsdp_status check_rate(const char *where, const char *name, double v)
{
    if (v >= 0 && v < 1) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_CONFIG, "%s: %s: found %g, expected 0 <= rate < 1", where, name,
                      v);
}

fsdp_status fsdp__model_config_check(const fsdp_model_config *c, const char *where)
{
    bool g = c->family == FSDP_GPT2;
    FSDP_TRY(check_sizes(c, where));
    FSDP_TRY(check_heads(c, where));
    FSDP_TRY(check_rope(c, where));
    FSDP_TRY(check_rate(where, g ? "attn_pdrop" : "attention_dropout", c->attention_dropout));
    FSDP_TRY(check_rate(where, "resid_pdrop", c->resid_dropout));
    FSDP_TRY(check_rate(where, "embd_pdrop", c->embd_dropout));
    if (!(c->norm_eps > 0) || !isfinite(c->norm_eps))
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s: %s: found %g, expected more than 0", where,
                          g ? "layer_norm_epsilon" : "rms_norm_eps", c->norm_eps);
    if (!(c->initializer_range >= 0) || !isfinite(c->initializer_range))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: initializer_range: found %g, expected 0 or more", where,
                          c->initializer_range);
    if (c->sliding_window < 0)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: sliding_window: found %lld, expected 1 or more, or null", where,
                          (long long)c->sliding_window);
    if (g ? c->hidden_act > FSDP_ACT_TANH : c->hidden_act != FSDP_ACT_SILU)
        return fsdp__fail(FSDP_UNSUPPORTED, "%s: hidden_act: expected silu for %s", where,
                          fsdp__model_type(c->family));
    return FSDP_OK;
}
