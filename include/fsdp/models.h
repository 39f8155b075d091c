/*
 * models.h - the model families, as modules.
 *
 * A model takes (tokens, positions, targets) and returns the logits (B,T,V),
 * or with targets the sum of the losses of those that are not -100, as a 0-dim
 * f32 tensor: head and loss are one op inside the root's forward, so whole
 * logits never exist in training. Parameters have Hugging Face's names.
 */
#ifndef FSDP_MODELS_H
#define FSDP_MODELS_H

#include "nn.h"

FSDP_EXTERN_C_BEGIN

/* Sizes and choices of a model: fsdp_model_config_load (hf.h) reads one. */
typedef struct fsdp_model_config fsdp_model_config;

/* On the current device (push FSDP_META for shapes alone), parameters in f32,
 * rules of initialisation set by c's initializer_range. NULL: error kept. */
FSDP_API fsdp_module *fsdp_model_create(const fsdp_model_config *c);

/* tokens i64 (B,T). positions i64 (B,T), or NULL: 0..T-1 (behind what the
 * cache holds). targets i64 (B,T), or NULL: logits are returned. */
FSDP_API fsdp_tensor *fsdp_model_forward(fsdp_module *model,
                                         fsdp_tensor *tokens,
                                         fsdp_tensor *positions,
                                         fsdp_tensor *targets);

/* The transformer blocks, for wrapping: block i of fsdp_model_block_count. */
FSDP_API int64_t fsdp_model_block_count(const fsdp_module *model);
FSDP_API fsdp_module *fsdp_model_block(fsdp_module *model, int64_t i);

/* Floating-point operations of forward and backward a token at sequence
 * length T: 6 a weight that multiplies, 12 L H h T for attention (6 when the
 * causal half alone is counted: here), no recompute. */
FSDP_API double fsdp_model_flops_per_token(const fsdp_model_config *c,
                                           int64_t seq_len);

/* Keys and values of earlier tokens, for generation: (B,S,K,h) a layer. While
 * a cache is set, forward (without gradients) appends to it and attends to it.
 * NULL takes it off. The cache outlives its use; room for max_len tokens. */
typedef struct fsdp_kv_cache fsdp_kv_cache;
FSDP_API fsdp_kv_cache *fsdp_kv_cache_create(const fsdp_model_config *c,
                                             int64_t batch, int64_t max_len,
                                             fsdp_dtype t);
FSDP_API void fsdp_kv_cache_free(fsdp_kv_cache *kv);
FSDP_API int64_t fsdp_kv_cache_length(const fsdp_kv_cache *kv);
FSDP_API fsdp_status fsdp_model_set_cache(fsdp_module *model,
                                          fsdp_kv_cache *kv);

FSDP_EXTERN_C_END
#endif
