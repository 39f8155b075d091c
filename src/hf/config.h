/*
 * config.h - config.json of a Hugging Face folder, to and from fsdp_model_config.
 *
 * Read as transformers 4 writes it (rope_theta, rope_scaling, torch_dtype) and as 5 does
 * (rope_parameters, dtype); written with the keys of 4, which both read. A missing key has the
 * default of transformers' class. A known key with a value that is not done here is an error that
 * names it; a key that nobody knows is a warning in the log.
 */
#ifndef FSDP_HF_CONFIG_H
#define FSDP_HF_CONFIG_H

#include <stddef.h>

#include "base/str.h"
#include "models/config.h"

/* path is the file itself. */
fsdp_status fsdp__hf_config_load(const char *path, fsdp_model_config *out);
/* The same from memory; name stands for the path in messages. */
fsdp_status fsdp__hf_config_parse(const char *text, size_t n, const char *name,
                                  fsdp_model_config *out);

/* The text of a config.json, names sorted, two blanks a level. */
fsdp_status fsdp__hf_config_text(const fsdp_model_config *c, fsdp__str *out);
/* That text as a file, all or nothing. */
fsdp_status fsdp__hf_config_save(const fsdp_model_config *c, const char *path);

/* Replaces the eos ids by those of a generation_config.json, which may list more of them than
 * config.json. Without the file, or without the key in it, nothing changes. */
fsdp_status fsdp__hf_generation_load(const char *path, fsdp_model_config *c);
fsdp_status fsdp__hf_generation_save(const fsdp_model_config *c, const char *path);

/* Both files of a folder; the second may be missing. */
fsdp_status fsdp__hf_folder_config(const char *folder, fsdp_model_config *out);

#endif
