/*
 * config_write.c - writing config.json with the keys of transformers 4, which 5 reads as well, and
 * the table that reading follows too.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "format/json.h"
#include "hf/config.h"
#include "hf/config_internal.h"

/* ---- tables ---- */

#define AT(field) offsetof(fsdp_model_config, field)

const fsdp__config_row fsdp__config_rows[FSDP__CONFIG_ROWS] = {
    {"vocab_size", EVERY, INT, AT(vocab_size), false},
    {"hidden_size", ROTARY, INT, AT(hidden_size), false},
    {"intermediate_size", ROTARY, INT, AT(intermediate_size), false},
    {"num_hidden_layers", ROTARY, INT, AT(num_layers), false},
    {"num_attention_heads", ROTARY, INT, AT(num_heads), false},
    {"max_position_embeddings", ROTARY, INT, AT(max_position_embeddings), false},
    {"rms_norm_eps", ROTARY, REAL, AT(norm_eps), false},
    {"attention_dropout", ROTARY, REAL, AT(attention_dropout), false},
    {"attention_bias", LLAMA | QWEN3, FLAG, AT(attention_bias), false},
    {"mlp_bias", LLAMA, FLAG, AT(mlp_bias), false},
    {"use_sliding_window", QWEN, FLAG, AT(use_sliding_window), false},
    {"max_window_layers", QWEN, INT, AT(max_window_layers), false},
    {"initializer_range", EVERY, REAL, AT(initializer_range), false},
    {"tie_word_embeddings", EVERY, FLAG, AT(tie_word_embeddings), false},
    {"hidden_size", GPT2, INT, AT(hidden_size), true},
    {"num_hidden_layers", GPT2, INT, AT(num_layers), true},
    {"num_attention_heads", GPT2, INT, AT(num_heads), true},
    {"max_position_embeddings", GPT2, INT, AT(max_position_embeddings), true},
    {"n_embd", GPT2, INT, AT(hidden_size), false},
    {"n_layer", GPT2, INT, AT(num_layers), false},
    {"n_head", GPT2, INT, AT(num_heads), false},
    {"n_positions", GPT2, INT, AT(max_position_embeddings), false},
    {"layer_norm_epsilon", GPT2, REAL, AT(norm_eps), false},
    {"attn_pdrop", GPT2, REAL, AT(attention_dropout), false},
    {"resid_pdrop", GPT2, REAL, AT(resid_dropout), false},
    {"embd_pdrop", GPT2, REAL, AT(embd_dropout), false},
    {"scale_attn_weights", GPT2, FLAG, AT(scale_attn_weights), false},
    {"scale_attn_by_inverse_layer_idx", GPT2, FLAG, AT(scale_attn_by_inverse_layer_idx), false},
};

/* The first name of each that is not read only is written. */
const fsdp__config_act fsdp__config_acts[FSDP__CONFIG_ACTS] = {
    {"silu", FSDP_ACT_SILU, false},
    {"swish", FSDP_ACT_SILU, true},
    {"gelu", FSDP_ACT_GELU, false},
    {"gelu_new", FSDP_ACT_GELU_TANH, false},
    {"gelu_pytorch_tanh", FSDP_ACT_GELU_TANH, true},
    {"relu", FSDP_ACT_RELU, false},
    {"tanh", FSDP_ACT_TANH, false},
};

/* ---- writing ---- */

/* Values that could not be made show as NULL, which json_object_set_new refuses. */
typedef struct writer {
    json_t *json;
    bool failed;
} writer;

static void set(writer *w, const char *key, json_t *value)
{
    if (json_object_set_new(w->json, key, value)) w->failed = true;
}

static json_t *id_or_null(int64_t id)
{
    return id < 0 ? json_null() : json_integer(id);
}

static json_t *eos_value(const fsdp_model_config *c)
{
    if (c->num_eos == 0) return json_null();
    if (c->num_eos == 1) return json_integer(c->eos_token_ids[0]);
    json_t *list = json_array();
    for (int i = 0; i < c->num_eos; i++)
        if (json_array_append_new(list, json_integer(c->eos_token_ids[i]))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

static json_t *rope_value(const fsdp_rope *r)
{
    if (r->type == FSDP_ROPE_DEFAULT) return json_null();
    return json_pack("{s:f, s:f, s:f, s:I, s:s}", "factor", r->factor, "high_freq_factor",
                     r->high_freq_factor, "low_freq_factor", r->low_freq_factor,
                     "original_max_position_embeddings", (json_int_t)r->original_max_position,
                     "rope_type", "llama3");
}

/* Only where the family's rule does not give the same: older readers do not know the key. */
static bool needs_layer_types(const fsdp_model_config *c)
{
    fsdp_model_config rule = *c;
    fsdp__model_config_windows(&rule);
    return memcmp(rule.windowed, c->windowed, sizeof c->windowed) != 0;
}

static json_t *layer_types(const fsdp_model_config *c)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < c->num_layers; i++)
        if (json_array_append_new(
                list, json_string(c->windowed[i] ? "sliding_attention" : "full_attention"))) {
            json_decref(list);
            return NULL;
        }
    return list;
}

/* Every key is written, defaults too: a file should not change its meaning when a default does. */
static void write_rows(writer *w, const fsdp_model_config *c)
{
    for (int i = 0; i < FSDP__CONFIG_ROWS; i++) {
        const fsdp__config_row *r = &fsdp__config_rows[i];
        const void *field = (const char *)c + r->offset;
        if (!(r->families & 1 << c->family) || r->read_only) continue;
        if (r->kind == INT) set(w, r->key, json_integer(*(const int64_t *)field));
        if (r->kind == REAL) set(w, r->key, json_real(*(const double *)field));
        if (r->kind == FLAG) set(w, r->key, json_boolean(*(const bool *)field));
    }
}

/* rope_theta and rope_scaling, not rope_parameters: version 4 would not see the latter. */
static void write_rotary(writer *w, const fsdp_model_config *c)
{
    set(w, "head_dim", json_integer(c->head_dim));
    set(w, "num_key_value_heads", json_integer(c->num_kv_heads));
    set(w, "rope_theta", json_real(c->rope.theta));
    set(w, "rope_scaling", rope_value(&c->rope));
    if (c->family == FSDP_LLAMA) return;
    set(w, "sliding_window", c->sliding_window ? json_integer(c->sliding_window) : json_null());
    if (needs_layer_types(c)) set(w, "layer_types", layer_types(c));
}

static void write_all(writer *w, const fsdp_model_config *c)
{
    static const char *const dtypes[] = {[FSDP_F32] = "float32",
                                         [FSDP_F64] = "float64",
                                         [FSDP_F16] = "float16",
                                         [FSDP_BF16] = "bfloat16"};
    bool gpt2 = c->family == FSDP_GPT2;
    set(w, "architectures", json_pack("[s]", fsdp__model_architecture(c->family)));
    set(w, "model_type", json_string(fsdp__model_type(c->family)));
    write_rows(w, c);
    for (int i = 0; i < FSDP__CONFIG_ACTS; i++)
        if (fsdp__config_acts[i].act == c->hidden_act && !fsdp__config_acts[i].read_only)
            set(w, gpt2 ? "activation_function" : "hidden_act",
                json_string(fsdp__config_acts[i].name));
    if (gpt2)
        set(w, "n_inner",
            c->intermediate_size == 4 * c->hidden_size ? json_null()
                                                       : json_integer(c->intermediate_size));
    else
        write_rotary(w, c);
    set(w, "bos_token_id", id_or_null(c->bos_token_id));
    set(w, "eos_token_id", eos_value(c));
    set(w, "pad_token_id", id_or_null(c->pad_token_id));
    set(w, "use_cache", json_true());
    if (c->dtype >= 0 && fsdp_dtype_is_floating(c->dtype))
        set(w, "torch_dtype", json_string(dtypes[c->dtype]));
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* More than any family writes. */
enum { MAX_KEYS = 64 };

/* The same object with its names sorted, as transformers writes them. NULL if out of memory. */
static json_t *sorted(json_t *json)
{
    const char *keys[MAX_KEYS], *key;
    size_t n = 0;
    json_t *v, *out = json_object();
    json_object_foreach(json, key, v) if (n < MAX_KEYS) keys[n++] = key;
    qsort(keys, n, sizeof keys[0], by_name);
    for (size_t i = 0; i < n; i++)
        if (json_object_set(out, keys[i], json_object_get(json, keys[i]))) {
            json_decref(out);
            return NULL;
        }
    return out;
}

/* The config as an object; NULL with the error kept. */
static json_t *config_object(const fsdp_model_config *c, const char *where)
{
    writer w = {json_object(), false};
    json_t *out = NULL;
    if (fsdp__model_config_check(c, where) == FSDP_OK) {
        write_all(&w, c);
        out = w.failed ? NULL : sorted(w.json);
        if (!out) fsdp__fail_memory("config.json", sizeof *c);
    }
    json_decref(w.json);
    return out;
}

fsdp_status fsdp__hf_config_text(const fsdp_model_config *c, fsdp__str *out)
{
    json_t *json = config_object(c, "config");
    if (!json) return fsdp_error();
    fsdp_status s = fsdp__json_format(json, 2, out);
    json_decref(json);
    return s;
}

fsdp_status fsdp__hf_config_save(const fsdp_model_config *c, const char *path)
{
    json_t *json = config_object(c, path);
    if (!json) return fsdp_error();
    fsdp_status s = fsdp__json_dump(json, 2, path);
    json_decref(json);
    return s;
}

/* ---- generation_config.json ---- */

fsdp_status fsdp__hf_generation_save(const fsdp_model_config *c, const char *path)
{
    writer w = {json_object(), false};
    set(&w, "_from_model_config", json_true());
    if (c->bos_token_id >= 0) set(&w, "bos_token_id", json_integer(c->bos_token_id));
    if (c->num_eos) set(&w, "eos_token_id", eos_value(c));
    if (c->pad_token_id >= 0) set(&w, "pad_token_id", json_integer(c->pad_token_id));
    fsdp_status s = w.failed ? fsdp__fail_memory("generation_config.json", sizeof *c)
                             : fsdp__json_dump(w.json, 2, path);
    json_decref(w.json);
    return s;
}
