/*
 * folder_internal.h - names of parameters, tied ones under each of theirs.
 */
#ifndef FSDP_HF_FOLDER_INTERNAL_H
#define FSDP_HF_FOLDER_INTERNAL_H

#include "nn/module.h"

typedef struct fsdp__hf_name {
    char *name;
    fsdp_param *param;
    int64_t first; /* the item that names the same parameter first; -1: this one */
} fsdp__hf_name;

typedef struct fsdp__hf_names {
    fsdp__hf_name *items;
    int64_t count, cap;
} fsdp__hf_names;

fsdp_status fsdp__hf_names_of(fsdp_module *m, fsdp__hf_names *out);
void fsdp__hf_names_free(fsdp__hf_names *l);

#endif
