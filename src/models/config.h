/*
 * config.h - what a language model of one of the five families looks like.
 *
 * One plain struct (no pointers, copied by =) for Llama, Mistral, Qwen2, Qwen3 and GPT-2. Names are
 * Llama's; GPT-2's fields go by the same ones (n_embd is hidden_size). It says nothing of ranks and
 * files. Sizes: V = vocab_size, D = hidden_size, F = intermediate_size, L = num_layers, H =
 * num_heads, K = num_kv_heads, h = head_dim; H * h may differ from D.
 */
#ifndef FSDP_MODELS_CONFIG_H
#define FSDP_MODELS_CONFIG_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "fsdp/dtype.h"

/* X(enumerator, model_type, architecture) */
#define FSDP_MODEL_FAMILY_LIST(X)                    \
    X(FSDP_LLAMA, "llama", "LlamaForCausalLM")       \
    X(FSDP_MISTRAL, "mistral", "MistralForCausalLM") \
    X(FSDP_QWEN2, "qwen2", "Qwen2ForCausalLM")       \
    X(FSDP_QWEN3, "qwen3", "Qwen3ForCausalLM")       \
    X(FSDP_GPT2, "gpt2", "GPT2LMHeadModel")

typedef enum fsdp_model_family {
#define FSDP__X(e, type, arch) e,
    FSDP_MODEL_FAMILY_LIST(FSDP__X)
#undef FSDP__X
        FSDP_MODEL_FAMILY_COUNT
} fsdp_model_family;

/* The activation between the two halves of the feed-forward part. The gated families (all but
 * GPT-2) have SILU: swiglu. GELU is the erf form, GELU_TANH the approximation of GPT-2. */
typedef enum fsdp_activation {
    FSDP_ACT_SILU,
    FSDP_ACT_GELU,
    FSDP_ACT_GELU_TANH,
    FSDP_ACT_RELU,
    FSDP_ACT_TANH
} fsdp_activation;

/* How rotary frequencies are changed for longer contexts. */
typedef enum fsdp_rope_type { FSDP_ROPE_DEFAULT, FSDP_ROPE_LLAMA3 } fsdp_rope_type;

typedef struct fsdp_rope {
    double theta;
    fsdp_rope_type type;
    /* LLAMA3 only: wave lengths beyond original_max_position / low_freq_factor are divided by
     * factor, those below original_max_position / high_freq_factor kept, between them blended. */
    double factor, low_freq_factor, high_freq_factor;
    int64_t original_max_position;
} fsdp_rope;

enum { FSDP_MODEL_MAX_LAYERS = 1024, FSDP_MODEL_MAX_EOS = 16 };

typedef struct fsdp_model_config {
    fsdp_model_family family;
    int64_t vocab_size, hidden_size, intermediate_size, num_layers;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t max_position_embeddings; /* GPT-2: rows of wpe */
    fsdp_activation hidden_act;
    double norm_eps; /* of RMSNorm; GPT-2: of LayerNorm */
    fsdp_rope rope;  /* not GPT-2 */
    bool tie_word_embeddings;
    bool attention_bias;     /* of q, k, v */
    bool attention_out_bias; /* of o */
    bool mlp_bias;
    bool qk_norm; /* RMSNorm over each head of q and k before rotary (Qwen3) */
    /* A windowed layer attends to the last sliding_window positions, its own included. */
    int64_t sliding_window;                        /* 0: no layer has a window */
    unsigned char windowed[FSDP_MODEL_MAX_LAYERS]; /* (num_layers) 1: this layer has it */
    bool use_sliding_window;              /* Qwen's own switch, kept for writing the file again */
    int64_t max_window_layers;            /* likewise */
    double attention_dropout;             /* of attention weights (attn_pdrop in GPT-2) */
    double resid_dropout;                 /* GPT-2: behind both projections of a block */
    double embd_dropout;                  /* GPT-2: behind the sum of embeddings */
    bool scale_attn_weights;              /* GPT-2: scores divided by sqrt(head_dim) */
    bool scale_attn_by_inverse_layer_idx; /* GPT-2: and by layer + 1 */
    double initializer_range;             /* standard deviation of new weights */
    int64_t bos_token_id, pad_token_id;   /* -1: none */
    int64_t eos_token_ids[FSDP_MODEL_MAX_EOS];
    int num_eos;
    fsdp_dtype dtype; /* that the weights are stored in; FSDP_DTYPE_NONE: not said */
} fsdp_model_config;

/* "llama" and "LlamaForCausalLM". */
const char *fsdp__model_type(fsdp_model_family f);
const char *fsdp__model_architecture(fsdp_model_family f);

/* The defaults of transformers' config class of this family; windows of layers are not set yet. */
fsdp_model_config fsdp__model_config_default(fsdp_model_family f);
/* Sets windowed[] by the family's own rule: all layers (Mistral), those from max_window_layers on
 * if use_sliding_window (Qwen), none (others). */
void fsdp__model_config_windows(fsdp_model_config *c);
/* Sizes that do not go together, as an error with the config's own names of fields. where is the
 * file, or whatever the config came from. */
fsdp_status fsdp__model_config_check(const fsdp_model_config *c, const char *where);

/* The window of a layer, 0: none. */
static inline int64_t fsdp__model_window(const fsdp_model_config *c, int64_t layer)
{
    return c->windowed[layer] ? c->sliding_window : 0;
}

/* What attention scores of a layer are multiplied by. */
static inline double fsdp__model_attention_scale(const fsdp_model_config *c, int64_t layer)
{
    double s = c->scale_attn_weights ? 1.0 / sqrt((double)c->head_dim) : 1.0;
    return c->scale_attn_by_inverse_layer_idx ? s / (double)(layer + 1) : s;
}

#endif
