/*
 * public.c - what programs see of the room: fsdp/hf.h over config.h and folder.h.
 */
#include "fsdp/hf.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "format/file.h"
#include "hf/config.h"
#include "hf/folder.h"

fsdp_status fsdp__hf_folder_config(const char *folder, fsdp_model_config *out)
{
    char *config = fsdp__path_join(folder, "config.json");
    char *generation = config ? fsdp__path_join(folder, "generation_config.json") : NULL;
    fsdp_status s = generation ? fsdp__hf_config_load(config, out) : fsdp_error();
    if (s == FSDP_OK) s = fsdp__hf_generation_load(generation, out);
    free(config);
    free(generation);
    return s;
}

fsdp_model_config *fsdp_model_config_load(const char *folder)
{
    if (fsdp_error()) return NULL;
    if (!folder) {
        fsdp__fail_null("fsdp_model_config_load", "the folder");
        return NULL;
    }
    fsdp_model_config *c = fsdp__calloc(1, sizeof *c, "a model's configuration");
    if (c && fsdp__hf_folder_config(folder, c) == FSDP_OK) return c;
    free(c);
    return NULL;
}

void fsdp_model_config_free(fsdp_model_config *c)
{
    free(c);
}

fsdp_status fsdp_model_load_weights(fsdp_module *model, const char *folder)
{
    if (fsdp_error()) return fsdp_error();
    if (!model || !folder)
        return fsdp__fail_null("fsdp_model_load_weights", model ? "the folder" : "the model");
    return fsdp__hf_load_weights(model, folder);
}

fsdp_status fsdp_model_save(fsdp_module *model, const fsdp_model_config *c, const char *folder,
                            fsdp_dtype t, const char *tokenizer)
{
    if (fsdp_error()) return fsdp_error();
    if (!model || !c || !folder)
        return fsdp__fail_null("fsdp_model_save", !model ? "the model"
                                                  : !c   ? "the configuration"
                                                         : "the folder");
    fsdp__hf_save_options o = {t, tokenizer, 0};
    return fsdp__hf_save_folder(model, c, folder, &o);
}
