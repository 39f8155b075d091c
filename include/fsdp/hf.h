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

#include "lora.h"
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

/* ---- adapters, as peft keeps them -------------------------------------- */

/* fsdp_lora_apply with what adapter_config.json of folder says. Forms of LoRA
 * that are not done here (DoRA, ranks by pattern, ...) are errors that name
 * the key. */
FSDP_API fsdp_status fsdp_lora_apply_folder(fsdp_module *model,
                                            const char *folder);

/* Fills the adapters of model, sharded or not, from folder's
 * adapter_model.safetensors; the base is left as it is. A rank reads the
 * slices that it holds. Another scale than the model's, and missing, extra or
 * misshaped tensors, are errors, and then nothing has been changed. Behind the
 * base's weights: adapters that fsdp_lora_save wrote beside another base are
 * told by a warning. Collective over the world. */
FSDP_API fsdp_status fsdp_lora_load(fsdp_module *model, const char *folder);

/* Writes folder: adapter_config.json and adapter_model.safetensors, which peft
 * loads. base is the name of the base model that the first tells (NULL: none);
 * the second holds a fingerprint of its weights.
 * As fsdp_model_save it appears when complete, takes the place of an earlier
 * save and refuses others' files. Collective over the world. */
FSDP_API fsdp_status fsdp_lora_save(fsdp_module *model, const char *folder,
                                    const char *base);

FSDP_EXTERN_C_END
#endif
