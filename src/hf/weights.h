/*
 * weights.h - the weight files of a Hugging Face folder: one model.safetensors, or shards with an
 * index. Bytes and names only; which tensor of a model a name is for is decided elsewhere.
 */
#ifndef FSDP_HF_WEIGHTS_H
#define FSDP_HF_WEIGHTS_H

#include <stdint.h>

#include "format/safetensors.h"

/* ---- reading ------------------------------------------------------------------ */

typedef struct fsdp__hf_weights fsdp__hf_weights;

/* Opens and checks the headers of all weight files of the folder: those of
 * model.safetensors.index.json where it is there, else model.safetensors. A tensor that the index
 * names and its file lacks is an error; one that a file holds and the index does not name is left
 * out with a warning. NULL with the error kept. */
fsdp__hf_weights *fsdp__hf_weights_open(const char *folder);
void fsdp__hf_weights_close(fsdp__hf_weights *w); /* NULL: nothing */

int64_t fsdp__hf_weights_count(const fsdp__hf_weights *w);
/* The i-th tensor, file after file in the order of the data; *st (may be NULL) is the file that
 * fsdp__st_read takes. Valid until close. */
const fsdp__st_tensor *fsdp__hf_weights_at(const fsdp__hf_weights *w, int64_t i, fsdp__st **st);
/* NULL if there is none of that name; no error is kept. */
const fsdp__st_tensor *fsdp__hf_weights_find(const fsdp__hf_weights *w, const char *name,
                                             fsdp__st **st);
/* Bytes read from all files so far, headers included. */
int64_t fsdp__hf_weights_bytes_read(const fsdp__hf_weights *w);

/* ---- writing ------------------------------------------------------------------- */

#define FSDP__HF_SHARD_LIMIT INT64_C(5000000000) /* what other writers use */

typedef struct fsdp__hf_writer fsdp__hf_writer;

/* For the folder, which exists; nothing is written before begin. shard_limit: bytes of data a file,
 * 0: FSDP__HF_SHARD_LIMIT; a tensor above it has a file of its own. NULL with the error kept. */
fsdp__hf_writer *fsdp__hf_writer_create(const char *folder, int64_t shard_limit);
/* Declares a tensor. The order of these calls decides the cut into files. */
fsdp_status fsdp__hf_writer_add(fsdp__hf_writer *w, const char *name, fsdp_dtype dtype, int ndim,
                                const int64_t *shape);
/* Reserves all files on the disk under temporary names. */
fsdp_status fsdp__hf_writer_begin(fsdp__hf_writer *w);
/* Bytes [offset, offset + bytes) of a tensor, each once, in any order. */
fsdp_status fsdp__hf_writer_write(fsdp__hf_writer *w, const char *name, int64_t offset,
                                  int64_t bytes, const void *src);
/* Gives the files their names, writes the index where there are several, and removes weight files
 * of an earlier save that are not among them. */
fsdp_status fsdp__hf_writer_finish(fsdp__hf_writer *w);
/* Without a successful finish nothing of the new files is left. NULL: nothing. */
void fsdp__hf_writer_free(fsdp__hf_writer *w);

#endif
