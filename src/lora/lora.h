/*
 * lora.h - adapted layers, for the rooms above.
 */
#ifndef FSDP_LORA_LORA_H
#define FSDP_LORA_LORA_H

#include <stdbool.h>

#include "fsdp/lora.h"
#include "nn/module.h"

/* An adapted layer. */
typedef struct fsdp__lora {
    fsdp_module *linear, *a, *b; /* a and b are children of linear */
    fsdp__linear_info info;
    int64_t rank;
    double alpha, dropout, scale;
    bool rslora, merged;
} fsdp__lora;

/* NULL if m is no adapted layer. */
fsdp__lora *fsdp__lora_of(const fsdp_module *m);
/* Whether m is the A or the B of one: its parameters are not the base's. */
bool fsdp__lora_is_adapter(const fsdp_module *m);

/* All adapted layers below m, in the order of the tree; the caller frees *items. */
typedef struct fsdp__lora_list {
    fsdp__lora **items;
    int64_t count, cap;
} fsdp__lora_list;
fsdp_status fsdp__lora_list_of(fsdp_module *m, fsdp__lora_list *out);

/* ---- match.c ------------------------------------------------------------------- */

/* The modules below m that o means, in the order of the tree: linear layers all. The caller frees
 * *items. */
typedef struct fsdp__lora_targets {
    fsdp_module **items;
    int64_t count, cap;
} fsdp__lora_targets;
fsdp_status fsdp__lora_find(fsdp_module *m, const fsdp_lora_options *o, fsdp__lora_targets *out);
/* How many modules of any kind below m the list of o means; keeps no error. */
int64_t fsdp__lora_hits(fsdp_module *m, const fsdp_lora_options *o);
/* Whether `word` of a list means the module of that dotted name. */
bool fsdp__lora_word_fits(const char *word, const char *name);

#endif
