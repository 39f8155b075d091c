/*
 * hf.h - models of Hugging Face folders (config.json, safetensors): Llama,
 * Mistral, Qwen2, Qwen3 and GPT-2, in and out.
 *
 * A model that no rank ever holds whole: fsdp_model_config_load; with
 * FSDP_META pushed fsdp_model_create; fsdp_fully_shard of its blocks and then
 * of it; fsdp_to_empty; fsdp_model_load_weights.
 */
#ifndef FSDP_HF_H
#define FSDP_HF_H

#include "models.h"

FSDP_EXTERN_C_BEGIN

/* What config.json (and generation_config.json, if it is there) of folder
 * says, as transformers 4 or 5 write it. A known key with a value that is not
 * done here is an error that names it. NULL: error kept. The caller frees it,
 * any time after the model is made. */
FSDP_API fsdp_model_config *fsdp_model_config_load(const char *folder);
FSDP_API void fsdp_model_config_free(fsdp_model_config *c); /* NULL: nothing */

/* Fills the parameters below model, sharded or not, from model.safetensors, or
 * the files of model.safetensors.index.json, converted to each parameter's
 * dtype. A rank reads the slices that it holds and no more. Every rank calls
 * it; none waits for another. Missing, extra and misshaped weights are one
 * error with three lists, and then nothing has been changed. */
FSDP_API fsdp_status fsdp_model_load_weights(fsdp_module *model,
                                             const char *folder);

/* Writes folder: config.json, generation_config.json, the weights in dtype t
 * (NONE: f32), and a copy of the file tokenizer (NULL: none). It appears under
 * its name when it is complete, and takes the place of an earlier save; one
 * that holds other files as well is refused. Collective over the world. */
FSDP_API fsdp_status fsdp_model_save(fsdp_module *model,
                                     const fsdp_model_config *c,
                                     const char *folder, fsdp_dtype t,
                                     const char *tokenizer);

FSDP_EXTERN_C_END
#endif
