/*
 * data.h - text to token ids and back.
 *
 * A tokenizer is read from the tokenizer.json of Hugging Face's tokenizers:
 * byte-level BPE as GPT-2, Llama 3, Qwen and SmolLM write it, and
 * SentencePiece's BPE with byte fallback as Llama 2 does. Ids and texts are
 * those of that library. What a file asks for and ours does not do is an
 * error that names it.
 */
#ifndef FSDP_DATA_H
#define FSDP_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

FSDP_EXTERN_C_BEGIN

/* One thread at a time: it keeps a cache of words. */
typedef struct fsdp_tokenizer fsdp_tokenizer;

/* Reads path, a tokenizer.json or a folder that holds one. The names of the
 * begin and end tokens come from tokenizer_config.json beside it, where there
 * is one. The file's truncation and padding are not applied. NULL with the
 * error kept on failure. The caller frees it. */
FSDP_API fsdp_tokenizer *fsdp_tokenizer_load(const char *path);
FSDP_API void fsdp_tokenizer_free(fsdp_tokenizer *t); /* NULL: nothing */

/* Ids of text (len bytes, any bytes). Special tokens in the text are found;
 * add_special also adds those of the file's template (a begin token). Bytes
 * that are no UTF-8 count as U+FFFD, one for each longest wrong part, as a
 * lossy conversion in Rust or Python's errors="replace" gives. *ids (n) is
 * freed by the caller with free; never NULL on success. */
FSDP_API fsdp_status fsdp_tokenizer_encode(fsdp_tokenizer *t, const char *text,
                                           size_t len, int add_special,
                                           int32_t **ids, int64_t *n);

/* The text of ids (n) as UTF-8, NUL-terminated, its length in *len (may be
 * NULL). skip_special leaves special tokens out. Ids that name no token give
 * no text, negative ones included; bytes that form no character give U+FFFD.
 * The caller frees it with free. NULL with the error kept on failure. */
FSDP_API char *fsdp_tokenizer_decode(fsdp_tokenizer *t, const int32_t *ids,
                                     int64_t n, int skip_special, size_t *len);

/* The largest id plus one: what a model's embedding must hold. NULL: 0. */
FSDP_API int64_t fsdp_tokenizer_vocab_size(const fsdp_tokenizer *t);
/* -1 if there is no such token. */
FSDP_API int32_t fsdp_tokenizer_token_id(const fsdp_tokenizer *t,
                                         const char *token);
/* As the file writes it ("Ġthe"; an added token that is marked normalized: as
 * the normalizer makes it), its bytes in *len (may be NULL; a token can hold
 * NULs). NULL if the id names none. Owned by the tokenizer. */
FSDP_API const char *fsdp_tokenizer_token(const fsdp_tokenizer *t, int32_t id,
                                          size_t *len);
/* 1 for an added token that is marked special. */
FSDP_API int fsdp_tokenizer_is_special(const fsdp_tokenizer *t, int32_t id);
/* Begin and end of text by tokenizer_config.json; -1 if it names none. */
FSDP_API int32_t fsdp_tokenizer_bos(const fsdp_tokenizer *t);
FSDP_API int32_t fsdp_tokenizer_eos(const fsdp_tokenizer *t);

FSDP_EXTERN_C_END
#endif
