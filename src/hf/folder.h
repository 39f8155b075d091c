/*
 * folder.h - a model into and out of a Hugging Face folder.
 *
 * Weights meet parameters by name here. A rank reads the slices that it holds and no more; a save
 * passes through rank 0 in pieces of a few MiB, so neither needs memory for a whole parameter.
 */
#ifndef FSDP_HF_FOLDER_H
#define FSDP_HF_FOLDER_H

#include "fsdp/nn.h"
#include "models/config.h"

/* Fills the parameters below model, sharded (after fsdp_to_empty) or not, from the weights of the
 * folder, converted to each parameter's dtype. Every rank calls it; none waits for another.
 * Missing, extra and misshaped weights are one error with three lists, and then nothing has been
 * changed. */
fsdp_status fsdp__hf_load_weights(fsdp_module *model, const char *folder);
/* The same; *bytes becomes what this rank has read from the files, headers included. */
fsdp_status fsdp__hf_load_weights_counted(fsdp_module *model, const char *folder, int64_t *bytes);

typedef struct fsdp__hf_save_options {
    fsdp_dtype dtype;      /* of the weights in the file; FSDP_DTYPE_NONE: f32 */
    const char *tokenizer; /* a tokenizer.json to copy; NULL: none */
    int64_t shard_limit;   /* bytes of data a weight file; 0: FSDP__HF_SHARD_LIMIT */
} fsdp__hf_save_options;

/* Whether a save to the folder would be allowed: an error if something else is in the way, if it
 * could not be made, or if it holds other files than a save's. For this rank; changes nothing. */
fsdp_status fsdp__hf_check_replaceable(const char *folder);

/* The same for fsdp_lora_save. */
fsdp_status fsdp__hf_check_adapter_replaceable(const char *folder);

/* Which base model has: the same for any cut, any number of ranks, and in f32 or bf16. 0: it has no
 * values yet. Collective over the world. */
fsdp_status fsdp__hf_fingerprint(fsdp_module *model, uint64_t *out);

/* Writes config.json, generation_config.json, tokenizer.json and the weights. The folder appears
 * under its name when it is complete, and takes the place of an earlier save; one that holds other
 * files as well is refused. Collective: all ranks return after the folder is there, or with the
 * error. o NULL: the defaults. */
fsdp_status fsdp__hf_save_folder(fsdp_module *model, const fsdp_model_config *c, const char *folder,
                                 const fsdp__hf_save_options *o);

#endif
