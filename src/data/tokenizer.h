/*
 * tokenizer.h - the tokenizer as the rooms above use it, beyond data.h.
 */
#ifndef FSDP_DATA_TOKENIZER_H
#define FSDP_DATA_TOKENIZER_H

#include <stdbool.h>

#include "base/str.h"
#include "fsdp/data.h"

typedef struct fsdp__ids {
    int32_t *items;
    int64_t count, cap;
} fsdp__ids;

fsdp_status fsdp__ids_add(fsdp__ids *ids, const int32_t *items, int64_t n);

/* Appends the ids of text (len) to out. */
fsdp_status fsdp__tokenizer_encode(fsdp_tokenizer *t, const char *text, size_t len,
                                   bool add_special, fsdp__ids *out);
/* Appends the text of ids (n). raw: bytes that form no character stay as they are, so that texts
 * of parts can be put together (what a stream of tokens needs); the result may be no UTF-8. */
fsdp_status fsdp__tokenizer_decode(fsdp_tokenizer *t, const int32_t *ids, int64_t n,
                                   bool skip_special, bool raw, fsdp__str *out);
/* The path it was loaded from (the tokenizer.json itself). */
const char *fsdp__tokenizer_path(const fsdp_tokenizer *t);

#endif
