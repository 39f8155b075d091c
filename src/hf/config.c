/*
 * config.c - reading config.json.
 *
 * One table says which key holds which field of which families (config_internal.h); reading and
 * writing both follow it. What does not fit it (null with a meaning, lists, rotary scaling) has a
 * function each. A key is known to a family if a row of one of the three tables says so.
 */
#include "hf/config.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "format/file.h"
#include "format/json.h"
#include "hf/config_internal.h"

/* ---- tables ---- */

/* Keys with a function of their own, and keys that change nothing here. */
static const struct {
    const char *key;
    int families;
} others[] = {
    {"architectures", EVERY},
    {"model_type", EVERY},
    {"num_key_value_heads", ROTARY},
    {"head_dim", ROTARY},
    {"hidden_act", ROTARY},
    {"activation_function", GPT2},
    {"n_inner", GPT2},
    {"sliding_window", MISTRAL | QWEN},
    {"layer_types", MISTRAL | QWEN},
    {"rope_theta", ROTARY},
    {"rope_scaling", ROTARY},
    {"rope_parameters", ROTARY},
    {"partial_rotary_factor", ROTARY},
    {"bos_token_id", EVERY},
    {"eos_token_id", EVERY},
    {"pad_token_id", EVERY},
    {"dtype", EVERY},
    {"torch_dtype", EVERY},
    {"transformers_version", EVERY},
    {"use_cache", EVERY},
    {"pretraining_tp", LLAMA}, /* another order of the same products */
    {"n_ctx", GPT2},
    {"summary_activation", GPT2}, /* of heads that language models do not have */
    {"summary_first_dropout", GPT2},
    {"summary_proj_to_labels", GPT2},
    {"summary_type", GPT2},
    {"summary_use_proj", GPT2},
    {"_name_or_path", EVERY},
    {"_attn_implementation_autoset", EVERY},
    {"attn_implementation", EVERY},
    {"auto_map", EVERY},
    {"bad_words_ids", EVERY},
    {"begin_suppress_tokens", EVERY},
    {"chunk_size_feed_forward", EVERY},
    {"cross_attention_hidden_size", EVERY},
    {"decoder_start_token_id", EVERY},
    {"diversity_penalty", EVERY},
    {"do_sample", EVERY},
    {"early_stopping", EVERY},
    {"encoder_no_repeat_ngram_size", EVERY},
    {"exponential_decay_length_penalty", EVERY},
    {"finetuning_task", EVERY},
    {"forced_bos_token_id", EVERY},
    {"forced_eos_token_id", EVERY},
    {"gradient_checkpointing", EVERY},
    {"id2label", EVERY},
    {"is_decoder", EVERY},
    {"is_llama_config", EVERY},
    {"label2id", EVERY},
    {"length_penalty", EVERY},
    {"max_length", EVERY},
    {"min_length", EVERY},
    {"no_repeat_ngram_size", EVERY},
    {"num_beam_groups", EVERY},
    {"num_beams", EVERY},
    {"num_labels", EVERY},
    {"num_return_sequences", EVERY},
    {"output_attentions", EVERY},
    {"output_hidden_states", EVERY},
    {"output_scores", EVERY},
    {"prefix", EVERY},
    {"problem_type", EVERY},
    {"remove_invalid_values", EVERY},
    {"repetition_penalty", EVERY},
    {"return_dict", EVERY},
    {"return_dict_in_generate", EVERY},
    {"sep_token_id", EVERY},
    {"suppress_tokens", EVERY},
    {"task_specific_params", EVERY},
    {"temperature", EVERY},
    {"tf_legacy_loss", EVERY},
    {"tokenizer_class", EVERY},
    {"top_k", EVERY},
    {"top_p", EVERY},
    {"torchscript", EVERY},
    {"transformers.js_config", EVERY},
    {"typical_p", EVERY},
    {"use_bfloat16", EVERY},
};
enum { N_OTHERS = sizeof others / sizeof others[0] };

/* Keys that only have one value here: false, null, nothing in it, or 1. */
static const struct {
    const char *key;
    int families;
} off[] = {
    {"add_cross_attention", EVERY},    {"is_encoder_decoder", EVERY},
    {"pruned_heads", EVERY},           {"quantization_config", EVERY},
    {"rope_interleaved", ROTARY},      {"tie_encoder_decoder", EVERY},
    {"reorder_and_upcast_attn", GPT2}, {"use_mrope", QWEN},
};
enum { N_OFF = sizeof off / sizeof off[0] };

/* ---- the family ---- */

static fsdp_status family_of(const fsdp__json_at *at, fsdp_model_config *c)
{
    static const char expected[] = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
                                   "Qwen3ForCausalLM or GPT2LMHeadModel";
    const json_t *list = json_object_get(at->json, "architectures");
    const char *type = NULL;
    int family = -1;
    FSDP_TRY(fsdp__json_string(at, "model_type", &type));
    if (list && !json_is_null(list) && !json_is_array(list))
        return fsdp__json_fail(FSDP_INVALID_DATA, at, "architectures", "a list of names");
    const char *name = json_string_value(json_array_get(list, 0));
    if (json_array_size(list) > 0) {
        for (int f = 0; f < FSDP_MODEL_FAMILY_COUNT; f++)
            if (name && !strcmp(name, fsdp__model_architecture((fsdp_model_family)f))) family = f;
        if (family < 0)
            return fsdp__fail(FSDP_UNSUPPORTED, "%s: architectures: found %s, expected %s",
                              at->file, name ? name : "no name", expected);
        if (type && strcmp(type, fsdp__model_type((fsdp_model_family)family)))
            return fsdp__fail(
                FSDP_INVALID_DATA,
                "%s: model_type: found \"%s\", expected \"%s\", as architectures says "
                "%s",
                at->file, type, fsdp__model_type((fsdp_model_family)family), name);
    } else {
        for (int f = 0; f < FSDP_MODEL_FAMILY_COUNT; f++)
            if (type && !strcmp(type, fsdp__model_type((fsdp_model_family)f))) family = f;
        if (family < 0)
            return fsdp__json_fail(type ? FSDP_UNSUPPORTED : FSDP_INVALID_DATA, at, "model_type",
                                   "llama, mistral, qwen2, qwen3 or gpt2, or architectures that "
                                   "names the model");
    }
    *c = fsdp__model_config_default((fsdp_model_family)family);
    return FSDP_OK;
}

/* ---- keys of the tables ---- */

static fsdp_status read_row(const fsdp__json_at *at, const fsdp__config_row *r,
                            fsdp_model_config *c)
{
    void *field = (char *)c + r->offset;
    const json_t *v = json_object_get(at->json, r->key);
    if (!v) return FSDP_OK;
    if (json_is_null(v)) /* transformers would fail later, at the first use */
        return fsdp__json_fail(FSDP_INVALID_DATA, at, r->key,
                               r->kind == FLAG ? "true or false" : "a number");
    if (r->kind == INT) return fsdp__json_int(at, r->key, field);
    if (r->kind == REAL) return fsdp__json_number(at, r->key, field);
    return fsdp__json_bool(at, r->key, field);
}

static bool is_off(const json_t *v)
{
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_object(v) && !json_object_size(v)) || (json_is_array(v) && !json_array_size(v));
}

/* What would change the model and is not done here must be switched off. */
static fsdp_status read_off(const fsdp__json_at *at, int family)
{
    double part = 1;
    for (int i = 0; i < N_OFF; i++)
        if (off[i].families & family && !is_off(json_object_get(at->json, off[i].key)))
            return fsdp__json_fail(FSDP_UNSUPPORTED, at, off[i].key,
                                   "false or null: other values are not supported");
    FSDP_TRY(fsdp__json_number(at, "partial_rotary_factor", &part));
    if (family & ROTARY && part != 1)
        return fsdp__json_fail(FSDP_UNSUPPORTED, at, "partial_rotary_factor",
                               "1: other values are not supported");
    return FSDP_OK;
}

/* The nearest of the known keys so far. */
typedef struct near {
    int distance;
    const char *name;
} near;

static bool same(const char *key, const char *name, near *best)
{
    int d = fsdp__edit_distance(key, name);
    if (d < best->distance) *best = (near){d, name};
    return d == 0;
}

static bool known(const char *key, int family, near *best)
{
    for (int i = 0; i < FSDP__CONFIG_ROWS; i++)
        if (fsdp__config_rows[i].families & family && same(key, fsdp__config_rows[i].key, best))
            return true;
    for (int i = 0; i < N_OTHERS; i++)
        if (others[i].families & family && same(key, others[i].key, best)) return true;
    for (int i = 0; i < N_OFF; i++)
        if (off[i].families & family && same(key, off[i].key, best)) return true;
    return false;
}

/* Later versions add keys all the time, so an unknown one is no error; a typing error should
 * show. */
static void warn_unknown(const fsdp__json_at *at, int family, const char *type)
{
    const char *key;
    json_t *v, *object = (json_t *)at->json; /* jansson's iterator takes no const; nothing is set */
    json_object_foreach(object, key, v)
    {
        near best = {3, NULL};
        if (known(key, family, &best)) continue;
        fsdp__log(FSDP__LOG_WARNING, "%s: the key '%s' is not known for %s and is ignored%s%s%s",
                  at->file, key, type, best.name ? "; did you mean '" : "",
                  best.name ? best.name : "", best.name ? "'?" : "");
    }
}

/* ---- keys with a meaning of their own ---- */

static bool has_null(const fsdp__json_at *at, const char *key)
{
    return json_is_null(json_object_get(at->json, key));
}

/* Absent: the class's default, set before. */
static fsdp_status read_activation(const fsdp__json_at *at, fsdp_model_config *c)
{
    const char *key = c->family == FSDP_GPT2 ? "activation_function" : "hidden_act";
    const char *name = NULL;
    FSDP_TRY(fsdp__json_string(at, key, &name));
    if (!name) return FSDP_OK;
    for (int i = 0; i < FSDP__CONFIG_ACTS; i++)
        if (!strcmp(name, fsdp__config_acts[i].name)) {
            /* The gated families have one fused op for both halves. */
            if (c->family != FSDP_GPT2 && fsdp__config_acts[i].act != FSDP_ACT_SILU) break;
            c->hidden_act = fsdp__config_acts[i].act;
            return FSDP_OK;
        }
    return fsdp__json_fail(FSDP_UNSUPPORTED, at, key,
                           c->family == FSDP_GPT2
                               ? "gelu_new, gelu_pytorch_tanh, gelu, silu, relu or tanh"
                               : "silu (others are not supported for this architecture)");
}

/* Null means "as many as query heads" and "D / H"; absent has the class's default. */
static fsdp_status read_heads(const fsdp__json_at *at, fsdp_model_config *c)
{
    bool divided = true;
    if (c->family == FSDP_GPT2) {
        int64_t n_inner = 0;
        FSDP_TRY(fsdp__json_int(at, "n_inner", &n_inner));
        c->intermediate_size = fsdp__json_has(at, "n_inner") ? n_inner : 4 * c->hidden_size;
        c->num_kv_heads = c->num_heads;
    } else {
        bool said = json_object_get(at->json, "num_key_value_heads") != NULL;
        if (has_null(at, "num_key_value_heads") || (!said && c->family == FSDP_LLAMA))
            c->num_kv_heads = c->num_heads;
        FSDP_TRY(fsdp__json_int(at, "num_key_value_heads", &c->num_kv_heads));
        divided = !fsdp__json_has(at, "head_dim") && c->family != FSDP_QWEN3;
        FSDP_TRY(fsdp__json_int(at, "head_dim", &c->head_dim));
    }
    if (!divided || c->num_heads < 1) return FSDP_OK; /* the check of sizes names a bad one */
    if (c->hidden_size % c->num_heads)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: %s: found %lld, expected a multiple of the number of heads, %lld%s",
                          at->file, c->family == FSDP_GPT2 ? "n_embd" : "hidden_size",
                          (long long)c->hidden_size, (long long)c->num_heads,
                          c->family == FSDP_GPT2 ? "" : ", or a head_dim");
    c->head_dim = c->hidden_size / c->num_heads;
    return FSDP_OK;
}

static fsdp_status read_layer_types(const fsdp__json_at *at, fsdp_model_config *c)
{
    const json_t *list = json_object_get(at->json, "layer_types");
    if (!list || json_is_null(list)) return FSDP_OK;
    if (!json_is_array(list) || (int64_t)json_array_size(list) != c->num_layers)
        return fsdp__json_fail(FSDP_INVALID_DATA, at, "layer_types",
                               "a list with one name a layer (num_hidden_layers)");
    for (int64_t i = 0; i < c->num_layers; i++) {
        const char *name = json_string_value(json_array_get(list, (size_t)i));
        bool sliding = name && !strcmp(name, "sliding_attention");
        if (!sliding && !(name && !strcmp(name, "full_attention")))
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "%s: layer_types: layer %lld: found %s, expected full_attention or "
                              "sliding_attention",
                              at->file, (long long)i, name ? name : "no text");
        /* Mistral's model does not look at this list: another one than its own is no Mistral. */
        if (c->family == FSDP_MISTRAL && sliding != c->windowed[i])
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "%s: layer_types: layer %lld: found %s, expected the same for all "
                              "layers, as sliding_window says",
                              at->file, (long long)i, name);
        if (sliding && !c->sliding_window)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: layer_types: layer %lld: found sliding_attention, expected "
                              "full_attention, as use_sliding_window or sliding_window says none",
                              at->file, (long long)i);
        c->windowed[i] = sliding;
    }
    return FSDP_OK;
}

/* Qwen's window counts only with its switch on, whatever layer_types says of names. */
static fsdp_status read_windows(const fsdp__json_at *at, fsdp_model_config *c)
{
    if (c->family == FSDP_LLAMA || c->family == FSDP_GPT2) return FSDP_OK;
    if (has_null(at, "sliding_window")) c->sliding_window = 0;
    FSDP_TRY(fsdp__json_int(at, "sliding_window", &c->sliding_window));
    if (fsdp__json_has(at, "sliding_window") && c->sliding_window < 1)
        return fsdp__json_fail(FSDP_INVALID_DATA, at, "sliding_window", "1 or more, or null");
    if (c->family != FSDP_MISTRAL && !c->use_sliding_window) c->sliding_window = 0;
    if (c->num_layers < 0 || c->num_layers > FSDP_MODEL_MAX_LAYERS) return FSDP_OK;
    fsdp__model_config_windows(c);
    return read_layer_types(at, c);
}

/* ---- rotary positions ---- */

static fsdp_status read_llama3(const fsdp__json_at *r, fsdp_model_config *c)
{
    static const char *const keys[] = {"factor", "low_freq_factor", "high_freq_factor"};
    double *const fields[] = {&c->rope.factor, &c->rope.low_freq_factor, &c->rope.high_freq_factor};
    c->rope.type = FSDP_ROPE_LLAMA3;
    for (int i = 0; i < 3; i++) {
        FSDP_TRY(fsdp__json_need(r, keys[i]));
        FSDP_TRY(fsdp__json_number(r, keys[i], fields[i]));
    }
    c->rope.original_max_position = c->max_position_embeddings;
    return fsdp__json_int(r, "original_max_position_embeddings", &c->rope.original_max_position);
}

/* One object, of either version: rope_type (once called type), perhaps rope_theta, the factors. */
static fsdp_status read_rope_object(const fsdp__json_at *r, fsdp_model_config *c)
{
    static const char *const keys[] = {"rope_type",
                                       "type",
                                       "rope_theta",
                                       "factor",
                                       "low_freq_factor",
                                       "high_freq_factor",
                                       "original_max_position_embeddings",
                                       "partial_rotary_factor"};
    const char *type = "default", *key, *which = "rope_type";
    double part = 1;
    json_t *v, *object = (json_t *)r->json; /* jansson's iterator takes no const; nothing is set */
    if (!fsdp__json_has(r, "rope_type") && fsdp__json_has(r, "type")) which = "type";
    FSDP_TRY(fsdp__json_string(r, which, &type));
    FSDP_TRY(fsdp__json_number(r, "rope_theta", &c->rope.theta));
    FSDP_TRY(fsdp__json_number(r, "partial_rotary_factor", &part));
    if (part != 1)
        return fsdp__json_fail(FSDP_UNSUPPORTED, r, "partial_rotary_factor",
                               "1: other values are not supported");
    if (strcmp(type, "default") && strcmp(type, "llama3"))
        return fsdp__json_fail(FSDP_UNSUPPORTED, r, which,
                               "default or llama3: others are not supported");
    json_object_foreach(object, key, v)
    {
        bool found = false;
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            found |= !strcmp(key, keys[i]);
        if (!found && json_is_object(v))
            return fsdp__json_fail(FSDP_UNSUPPORTED, r, key,
                                   "one set of values for all layers: sets by layer type are not "
                                   "supported");
        if (!found)
            fsdp__log(FSDP__LOG_WARNING, "%s: the key '%s' in %s is not known and is ignored",
                      r->file, key, r->path);
    }
    return strcmp(type, "llama3") ? FSDP_OK : read_llama3(r, c);
}

static fsdp_status read_rope(const fsdp__json_at *at, fsdp_model_config *c)
{
    fsdp__json_at r;
    const json_t *scaling = json_object_get(at->json, "rope_scaling");
    if (c->family == FSDP_GPT2) return FSDP_OK;
    FSDP_TRY(fsdp__json_number(at, "rope_theta", &c->rope.theta));
    /* transformers 5 prefers the old key where both are there and it says something. */
    bool old = scaling && !json_is_null(scaling) &&
               !(json_is_object(scaling) && !json_object_size(scaling));
    const char *key = old ? "rope_scaling" : "rope_parameters";
    if (!fsdp__json_has(at, key)) return FSDP_OK;
    FSDP_TRY(fsdp__json_object(at, key, &r));
    return read_rope_object(&r, c);
}

/* ---- ids and dtype ---- */

static fsdp_status read_id(const fsdp__json_at *at, const char *key, int64_t *out)
{
    if (has_null(at, key)) *out = -1;
    FSDP_TRY(fsdp__json_int(at, key, out));
    if (*out < -1) return fsdp__json_fail(FSDP_INVALID_DATA, at, key, "a token id, or null");
    return FSDP_OK;
}

/* A number, a list of numbers, or null for none. */
static fsdp_status read_eos(const fsdp__json_at *at, fsdp_model_config *c)
{
    static const char key[] = "eos_token_id";
    const json_t *v = json_object_get(at->json, key);
    if (!v) return FSDP_OK;
    size_t n = json_is_array(v) ? json_array_size(v) : json_is_null(v) ? 0 : 1;
    if (n > FSDP_MODEL_MAX_EOS)
        return fsdp__json_fail(FSDP_UNSUPPORTED, at, key, "at most 16 token ids");
    c->num_eos = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_integer(id) || json_integer_value(id) < 0)
            return fsdp__json_fail(FSDP_INVALID_DATA, at, key,
                                   "token ids (whole numbers), or null");
        c->eos_token_ids[c->num_eos++] = (int64_t)json_integer_value(id);
    }
    return FSDP_OK;
}

static fsdp_status read_dtype(const fsdp__json_at *at, fsdp_model_config *c)
{
    const char *key = fsdp__json_has(at, "dtype") ? "dtype" : "torch_dtype", *name = NULL;
    FSDP_TRY(fsdp__json_string(at, key, &name));
    if (!name) return FSDP_OK;
    c->dtype = fsdp_dtype_parse(name);
    if (c->dtype == FSDP_DTYPE_NONE || !fsdp_dtype_is_floating(c->dtype))
        return fsdp__json_fail(FSDP_UNSUPPORTED, at, key, "float32, bfloat16, float16 or float64");
    return FSDP_OK;
}

/* ---- reading ---- */

/* The order matters: rows first, since heads, windows and rotary values start from them. */
static fsdp_status read_all(const fsdp__json_at *at, fsdp_model_config *c)
{
    FSDP_TRY(family_of(at, c));
    int family = 1 << c->family;
    warn_unknown(at, family, fsdp__model_type(c->family));
    FSDP_TRY(read_off(at, family));
    for (int i = 0; i < FSDP__CONFIG_ROWS; i++)
        if (fsdp__config_rows[i].families & family)
            FSDP_TRY(read_row(at, &fsdp__config_rows[i], c));
    if (c->family == FSDP_LLAMA || c->family == FSDP_QWEN3)
        c->attention_out_bias = c->attention_bias;
    FSDP_TRY(read_activation(at, c));
    FSDP_TRY(read_heads(at, c));
    FSDP_TRY(read_windows(at, c));
    FSDP_TRY(read_rope(at, c));
    FSDP_TRY(read_id(at, "bos_token_id", &c->bos_token_id));
    FSDP_TRY(read_id(at, "pad_token_id", &c->pad_token_id));
    FSDP_TRY(read_eos(at, c));
    FSDP_TRY(read_dtype(at, c));
    return fsdp__model_config_check(c, at->file);
}

fsdp_status fsdp__hf_config_parse(const char *text, size_t n, const char *name,
                                  fsdp_model_config *out)
{
    fsdp__json_at at;
    json_t *json = fsdp__json_parse(text, n, name);
    if (!json) return fsdp_error();
    fsdp_status s = fsdp__json_root(json, name, &at);
    if (s == FSDP_OK) s = read_all(&at, out);
    json_decref(json);
    return s;
}

fsdp_status fsdp__hf_config_load(const char *path, fsdp_model_config *out)
{
    char *text;
    size_t n;
    FSDP_TRY(fsdp__file_read(path, &text, &n));
    fsdp_status s = fsdp__hf_config_parse(text, n, path, out);
    free(text);
    return s;
}

/* ---- generation_config.json ---- */

fsdp_status fsdp__hf_generation_load(const char *path, fsdp_model_config *c)
{
    fsdp__json_at at;
    if (!fsdp__file_exists(path)) return FSDP_OK;
    json_t *json = fsdp__json_load(path);
    if (!json) return fsdp_error();
    fsdp_status s = fsdp__json_root(json, path, &at);
    if (s == FSDP_OK && fsdp__json_has(&at, "eos_token_id")) s = read_eos(&at, c);
    json_decref(json);
    return s;
}
