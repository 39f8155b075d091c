/*
 * models_internal.h - what the families share: the root, its rotary tables, its cache.
 *
 * A model is a root with two children: a body ("model" or "transformer": embedding, blocks, last
 * norm) and lm_head. A block takes (x, positions) and returns x; positions stay integers, so a
 * policy that casts floating inputs never touches the angles, and a block that is run again in
 * backward finds its tables again.
 */
#ifndef FSDP_MODELS_INTERNAL_H
#define FSDP_MODELS_INTERNAL_H

#include "fsdp/models.h"
#include "models/config.h"
#include "nn/module.h"

/* ---- rotary tables (rope.c) -------------------------------------------------- */

/* cos and sin of one set of positions, f32, half = head_dim / 2 wide. */
typedef struct fsdp__rope_table {
    fsdp_tensor *cos, *sin; /* (T, half) or (B, T, half); own references */
} fsdp__rope_table;

typedef struct fsdp__rope {
    fsdp_rope c;
    int64_t head_dim;
    fsdp__rope_table run; /* positions 0, 1, ...: as many rows as were ever needed */
    fsdp__rope_table own; /* those of `positions` */
    fsdp_tensor *positions; /* whose own is; own reference, so the storage cannot be another's */
    uint32_t version;
} fsdp__rope;

/* The tables of x (B, T, ...) for positions i64 (B, T), or NULL: start, start + 1, ... cos and sin
 * belong to the innermost scope or to r. */
fsdp_status fsdp__rope_get(fsdp__rope *r, const fsdp_tensor *x, fsdp_tensor *positions,
                           int64_t start, fsdp_tensor **cos, fsdp_tensor **sin);
void fsdp__rope_free(fsdp__rope *r);
/* inv (head_dim / 2): the frequency of each pair of dims, in f32 arithmetic as transformers. */
void fsdp__rope_frequencies(const fsdp_rope *c, int64_t head_dim, float *inv);

/* ---- the cache (cache.c) --------------------------------------------------------- */

struct fsdp_kv_cache {
    int64_t layers, batch, max_len, length;
    fsdp_tensor **k, **v; /* (layers) of (batch, max_len, K, h); own references */
};

/* Writes the new k and v (B,T,K,h) of a layer behind what is there and gives views of all. */
fsdp_status fsdp__kv_cache_put(fsdp_kv_cache *kv, int64_t layer, fsdp_tensor **k, fsdp_tensor **v);

/* ---- the root (model.c) -------------------------------------------------------------- */

typedef struct fsdp__model fsdp__model;

struct fsdp__model {
    fsdp_module base;
    fsdp_model_config c;
    fsdp_module *body;   /* takes (tokens, positions), returns (B,T,D) */
    fsdp_module *blocks; /* the list */
    fsdp_param *head;    /* (V,D); owned by lm_head */
    fsdp__rope rope;
    fsdp_kv_cache *cache; /* not owned; NULL: none */
};

/* Earlier tokens that the cache in force holds. */
int64_t fsdp__model_past(const fsdp__model *m);
/* x through all blocks; takes x over: the innermost scope holds one activation at a time. */
fsdp_tensor *fsdp__model_run_blocks(fsdp__model *m, fsdp_tensor *x, fsdp_tensor *positions);
/* Scores, softmax and sum over v of one layer: k and v by way of the cache, window and dropout by
 * the config. q (B,T,H,h), k and v (B,T,K,h) -> (B,T,H*h). */
fsdp_tensor *fsdp__model_attend(fsdp__model *m, fsdp_module *self, int64_t layer, fsdp_tensor *q,
                                fsdp_tensor *k, fsdp_tensor *v);
/* x (B,T,H*h) -> (B,T,H,h): a view, H from x. */
fsdp_tensor *fsdp__model_split_heads(const fsdp__model *m, fsdp_tensor *x);
/* The activation of the config. */
fsdp_tensor *fsdp__model_activation(fsdp_activation a, fsdp_tensor *x);
/* Biases of new models are zero, weights of 2 dims normal with the config's deviation. */
void fsdp__model_set_init(fsdp_module *m, double deviation);

/* ---- families ---------------------------------------------------------------------------- */

/* Build m->body and m->blocks as children of m; false with the error kept. */
bool fsdp__decoder_build(fsdp__model *m); /* Llama, Mistral, Qwen2, Qwen3 */
bool fsdp__gpt2_build(fsdp__model *m);
/* The embedding that lm_head shares when they are tied. */
fsdp_param *fsdp__decoder_embedding(const fsdp__model *m);
fsdp_param *fsdp__gpt2_embedding(const fsdp__model *m);

#endif
