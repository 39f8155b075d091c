/*
 * inputs.c - opening token files, tokenizer and model description. See inputs.h.
 */
#include "train/inputs.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "format/file.h"
#include "fsdp/data.h"
#include "fsdp/models.h"
#include "train/adapters.h"
#include "train/units.h"

/* One token file, with enough in it for a row. */
static fsdp_status open_tokens(const fsdp__train_config *c, const char *name, int64_t seq_len,
                               const char *option, fsdp__tokens **out)
{
    if (!fsdp__dir_exists(c->data.dir))
        return fsdp__fail(FSDP_NOT_FOUND,
                          "data.dir: there is no folder '%s'; make it with `fsdp prepare --out %s "
                          "...`",
                          c->data.dir, c->data.dir);
    char *path = fsdp__path_join(c->data.dir, name);
    if (!path) return fsdp_error();
    if (!fsdp__file_exists(path)) {
        fsdp_status s = fsdp__fail(FSDP_NOT_FOUND,
                                   "data.dir: there is no file %s; make it with `fsdp prepare`%s",
                                   path, strcmp(name, "train.tokens") ? " --validation" : "");
        free(path);
        return s;
    }
    *out = fsdp__tokens_open(path);
    free(path);
    if (!*out) return fsdp_error();
    if ((*out)->count > seq_len) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: %lld tokens; one row of %s %lld needs %lld: add text or shorten the "
                      "sequence",
                      (*out)->path, (long long)(*out)->count, option, (long long)seq_len,
                      (long long)seq_len + 1);
}

static fsdp_status same_vocabulary(const char *a, int64_t na, const char *b, int64_t nb)
{
    if (na == nb) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s has a vocabulary of %lld and %s one of %lld: they are not of one "
                      "tokenizer; prepare the data with the tokenizer of the model",
                      a, (long long)na, b, (long long)nb);
}

static fsdp_status read_tokenizers(const fsdp__train_config *c, fsdp__train_inputs *in)
{
    fsdp_tokenizer *t = fsdp_tokenizer_load(in->tokenizer), *own = NULL;
    if (!t) return fsdp_error();
    int64_t n = fsdp_tokenizer_vocab_size(t);
    fsdp_status s = same_vocabulary(in->train->path, in->train->vocab_size, in->tokenizer, n);
    if (s == FSDP_OK && in->validation)
        s = same_vocabulary(in->validation->path, in->validation->vocab_size, in->tokenizer, n);
    char *path =
        c->model.hf_assets_path ? fsdp__path_join(c->model.hf_assets_path, "tokenizer.json") : NULL;
    if (s == FSDP_OK && path && fsdp__file_exists(path)) {
        own = fsdp_tokenizer_load(path);
        s = own ? same_vocabulary(path, fsdp_tokenizer_vocab_size(own), in->tokenizer, n)
                : fsdp_error();
    }
    if (s == FSDP_OK && !c->model.hf_assets_path && fsdp_tokenizer_eos(t) >= 0) {
        in->model.eos_token_ids[0] = fsdp_tokenizer_eos(t);
        in->model.num_eos = 1;
    }
    free(path);
    fsdp_tokenizer_free(t);
    fsdp_tokenizer_free(own);
    return s;
}

/* With weights to start from, they must be there before any rank is started. */
static fsdp_status check_weights(const fsdp__train_config *c)
{
    if (!c->model.hf_assets_path || !c->checkpoint.initial_load_in_hf) return FSDP_OK;
    static const char *const names[] = {"model.safetensors", "model.safetensors.index.json"};
    for (int i = 0; i < 2; i++) {
        char *path = fsdp__path_join(c->model.hf_assets_path, names[i]);
        if (!path) return fsdp_error();
        bool there = fsdp__file_exists(path);
        free(path);
        if (there) return FSDP_OK;
    }
    return fsdp__fail(FSDP_NOT_FOUND,
                      "model.hf_assets_path: %s has neither model.safetensors nor "
                      "model.safetensors.index.json; to start from random weights set "
                      "checkpoint.initial_load_in_hf to false",
                      c->model.hf_assets_path);
}

/* Names of layers and of units, on a model that takes no bytes. */
static fsdp_status check_names(const fsdp__train_config *c, const fsdp_model_config *model)
{
    fsdp__unit_modules u = {0};
    FSDP_TRY(fsdp_device_push(FSDP_META));
    fsdp_module *m = fsdp_model_create(model);
    (void)fsdp_device_pop();
    fsdp_status s = m ? fsdp__adapters_check(c, m) : fsdp_error();
    if (s == FSDP_OK) s = fsdp__units_find(c->parallelism.fsdp_units, m, &u);
    fsdp__units_free(&u);
    fsdp_module_free(m);
    return s;
}

fsdp_status fsdp__train_inputs_open(const fsdp__train_config *c, bool with_tokenizer,
                                    fsdp__train_inputs *out)
{
    memset(out, 0, sizeof *out);
    fsdp_status s;
    FSDP_GO(open_tokens(c, "train.tokens", c->training.seq_len, "training.seq_len", &out->train));
    if (c->validation.enable)
        FSDP_GO(open_tokens(c, "validation.tokens", c->validation.seq_len, "validation.seq_len",
                            &out->validation));
    out->tokenizer = fsdp__path_join(c->data.dir, "tokenizer.json");
    if (!out->tokenizer) FSDP_GO(fsdp_error());
    FSDP_GO(fsdp__train_model_config(c, out->train->vocab_size, &out->model));
    FSDP_GO(check_weights(c));
    if (with_tokenizer) {
        FSDP_GO(read_tokenizers(c, out));
        FSDP_GO(check_names(c, &out->model));
    }
done:
    if (s != FSDP_OK) fsdp__train_inputs_close(out);
    return s;
}

void fsdp__train_inputs_close(fsdp__train_inputs *in)
{
    fsdp__tokens_close(in->train);
    fsdp__tokens_close(in->validation);
    free(in->tokenizer);
    memset(in, 0, sizeof *in);
}
