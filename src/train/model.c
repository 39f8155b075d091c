/*
 * model.c - which model a configuration means: a size by name, sizes one by one, or a folder's
 * config.json.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "format/file.h"
#include "hf/config.h"
#include "train/config.h"

/* Sizes by name; vocab 0: the tokenizer's. tiny to 1b are those that other programs are measured
 * with. */
typedef struct flavor {
    int64_t dim, layers, heads, kv_heads, ffn, vocab;
    bool tied;
} flavor;

static const flavor flavors[] = {
    [FSDP__FLAVOR_DEMO] = {192, 4, 6, 2, 512, 0, true},
    [FSDP__FLAVOR_TINY] = {128, 4, 4, 2, 384, 0, false},
    [FSDP__FLAVOR_SMALL] = {512, 8, 8, 4, 1536, 0, false},
    [FSDP__FLAVOR_135M] = {576, 30, 9, 3, 1536, 0, true},
    [FSDP__FLAVOR_1B] = {2048, 16, 32, 8, 8192, 0, false},
};

static int64_t either(int64_t given, int64_t otherwise)
{
    return given ? given : otherwise;
}

static fsdp_status from_sizes(const fsdp__train_config *c, int64_t vocab_size,
                              fsdp_model_config *out)
{
    flavor f = {0};
    if (c->model.flavor != FSDP__FLAVOR_CUSTOM) f = flavors[c->model.flavor];
    *out = fsdp__model_config_default((fsdp_model_family)c->model.name);
    out->hidden_size = either(c->model.dim, f.dim);
    out->num_layers = either(c->model.n_layers, f.layers);
    out->num_heads = either(c->model.n_heads, f.heads);
    out->num_kv_heads = either(c->model.n_kv_heads, f.kv_heads);
    if (!out->num_kv_heads || out->family == FSDP_GPT2) out->num_kv_heads = out->num_heads;
    if (!c->model.head_dim && out->hidden_size % out->num_heads != 0)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "model: dim %lld is no multiple of n_heads %lld; choose another, or set "
                          "model.head_dim",
                          (long long)out->hidden_size, (long long)out->num_heads);
    out->head_dim = either(c->model.head_dim, out->hidden_size / out->num_heads);
    out->intermediate_size = either(c->model.ffn_dim, f.ffn);
    out->vocab_size = either(c->model.vocab_size, vocab_size);
    out->max_position_embeddings = either(c->model.max_seq_len, c->training.seq_len);
    out->norm_eps = c->model.norm_eps;
    out->rope.theta = c->model.rope_theta;
    out->initializer_range = c->model.init_std;
    out->tie_word_embeddings = c->model.tied ? c->model.tied == 1 : f.tied;
    out->bos_token_id = out->pad_token_id = -1;
    out->num_eos = 0;
    fsdp__model_config_windows(out);
    return fsdp__model_config_check(out, "model");
}

fsdp_status fsdp__train_model_config(const fsdp__train_config *c, int64_t vocab_size,
                                     fsdp_model_config *out)
{
    if (c->model.hf_assets_path)
        FSDP_TRY(fsdp__hf_folder_config(c->model.hf_assets_path, out));
    else
        FSDP_TRY(from_sizes(c, vocab_size, out));
    const char *where = c->model.hf_assets_path ? c->model.hf_assets_path : "model";
    if (vocab_size > out->vocab_size)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: the model's vocabulary is %lld and the tokenizer's %lld, so there "
                          "are ids without a row in the embedding; %s",
                          where, (long long)out->vocab_size, (long long)vocab_size,
                          c->model.hf_assets_path
                              ? "prepare the data with the tokenizer of this folder"
                              : "set model.vocab_size to 0 or at least that");
    int64_t longest = c->training.seq_len > c->validation.seq_len || !c->validation.enable
                          ? c->training.seq_len
                          : c->validation.seq_len;
    if (longest > out->max_position_embeddings)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s.seq_len is %lld, and the model (%s) is made for sequences of at most "
                          "%lld tokens; shorten the sequence%s",
                          longest == c->training.seq_len ? "training" : "validation",
                          (long long)longest, where, (long long)out->max_position_embeddings,
                          c->model.hf_assets_path ? "" : " or raise model.max_seq_len");
    return FSDP_OK;
}
