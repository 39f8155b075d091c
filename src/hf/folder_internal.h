/*
 * folder_internal.h - names of parameters, tied ones under each of theirs; reading a parameter; and
 * folders that appear when they are complete.
 */
#ifndef FSDP_HF_FOLDER_INTERNAL_H
#define FSDP_HF_FOLDER_INTERNAL_H

#include "format/safetensors.h"
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

enum { FSDP__HF_BUFFER = 4 << 20 };
/* This rank's part of p from the tensor w of a file, which has p's shape; buffer holds
 * FSDP__HF_BUFFER bytes. name is for messages. */
fsdp_status fsdp__hf_read_param(fsdp__st *st, const fsdp__st_tensor *w, const char *name,
                                fsdp_param *p, char *buffer);

/* The path with an ending, without slashes between. The caller frees it. */
char *fsdp__hf_beside(const char *folder, const char *ending);
/* An error if something in the folder is not of an earlier save, as `ours` says, or if the folder
 * could not be made. */
fsdp_status fsdp__hf_check_files(const char *folder, bool (*ours)(const char *name));

#endif
