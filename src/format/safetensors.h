/*
 * safetensors.h - reading and writing .safetensors files: bytes, no tensors.
 *
 * A file is 8 bytes N (little-endian), a JSON header of N bytes, then the data: for each tensor a
 * dense row-major range of bytes. Format: github.com/huggingface/safetensors (README, "Format").
 *
 * The reader checks the whole header before it hands anything out and keeps only the header in
 * memory; data is read by byte ranges with pread, so a rank reads just its slices. The writer
 * writes under a temporary name and renames, so a file of the final name is always complete.
 * A reader or writer is used by one thread at a time. Offsets are 64-bit everywhere. Names may
 * hold any text; `name` ends with a NUL that name_len does not count.
 */
#ifndef FSDP_FORMAT_SAFETENSORS_H
#define FSDP_FORMAT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/dtype.h"

#define FSDP__ST_HEADER_LIMIT 100000000 /* largest N that any reader accepts */

/* ---- reading ---------------------------------------------------------------- */

typedef struct fsdp__st_tensor {
    const char *name;
    size_t name_len;
    const char *dtype_name; /* as in the file, "BF16" */
    fsdp_dtype dtype; /* FSDP_DTYPE_NONE: a dtype of the format that is not computed with here */
    int ndim;         /* 0: a single element */
    const int64_t *shape; /* (ndim) */
    int64_t numel;
    int64_t offset; /* of its first byte from the start of the file */
    int64_t bytes;  /* all of its data */
} fsdp__st_tensor;

typedef struct fsdp__st fsdp__st;

/* Opens and checks the whole header against the file's size. NULL with the error kept, which names
 * the file, the tensor, what was found and what was expected. */
fsdp__st *fsdp__st_open(const char *path);
void fsdp__st_close(fsdp__st *st); /* NULL: nothing */

const char *fsdp__st_path(const fsdp__st *st);
int64_t fsdp__st_count(const fsdp__st *st);
/* The i-th tensor in the order of its data in the file. Valid until close. */
const fsdp__st_tensor *fsdp__st_at(const fsdp__st *st, int64_t i);
/* NULL if the file has no tensor of that name; no error is kept. */
const fsdp__st_tensor *fsdp__st_find(const fsdp__st *st, const char *name);

/* The strings of __metadata__, in the order of the file. */
int64_t fsdp__st_meta_count(const fsdp__st *st);
const char *fsdp__st_meta_key(const fsdp__st *st, int64_t i);
const char *fsdp__st_meta_value(const fsdp__st *st, int64_t i);
const char *fsdp__st_meta(const fsdp__st *st, const char *key); /* NULL if absent */

/* Bytes [offset, offset + bytes) of the tensor's data to dst. An error for a dtype that is not
 * computed with here and for a range outside of the tensor. */
fsdp_status fsdp__st_read(fsdp__st *st, const fsdp__st_tensor *t, int64_t offset, int64_t bytes,
                          void *dst);
/* Bytes read from the file so far, the header included. */
int64_t fsdp__st_bytes_read(const fsdp__st *st);

/* ---- writing: declare everything, begin, write ranges in any order, finish ---- */

typedef struct fsdp__st_writer fsdp__st_writer;

/* Nothing is written before begin. NULL if out of memory. */
fsdp__st_writer *fsdp__st_writer_create(const char *path);
/* One string of __metadata__. Without a "format" of the caller's, format=pt is written, since other
 * programs refuse a file that has metadata without it. A key twice is an error. */
fsdp_status fsdp__st_writer_meta(fsdp__st_writer *w, const char *key, const char *value);
/* Declares a tensor; shape (ndim) is copied. A name twice is an error. */
fsdp_status fsdp__st_writer_add(fsdp__st_writer *w, const char *name, fsdp_dtype dtype, int ndim,
                                const int64_t *shape);
/* Lays the tensors out (wide types first, then by name, as other writers do), makes the temporary
 * file, reserves its whole size on the disk and writes the header. */
fsdp_status fsdp__st_writer_begin(fsdp__st_writer *w);
/* Bytes [offset, offset + bytes) of a declared tensor. Each byte is written once, in any order. */
fsdp_status fsdp__st_writer_write(fsdp__st_writer *w, const char *name, int64_t offset,
                                  int64_t bytes, const void *src);
/* An error that names the tensor if bytes of one have not been written. Changes nothing. */
fsdp_status fsdp__st_writer_check(const fsdp__st_writer *w);
/* An error unless every byte has been written. Then the file has its name and is on the disk. */
fsdp_status fsdp__st_writer_finish(fsdp__st_writer *w);
/* Without a successful finish: removes the temporary file. NULL: nothing. */
void fsdp__st_writer_free(fsdp__st_writer *w);

/* ---- writing at once ------------------------------------------------------------ */

typedef struct fsdp__st_entry {
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    const int64_t *shape; /* (ndim) */
    const void *data;     /* the whole data, or NULL: fill is asked */
} fsdp__st_entry;

typedef struct fsdp__st_pair {
    const char *key, *value;
} fsdp__st_pair;

/* Puts bytes [offset, offset + bytes) of entries[index] into buf. Called in the order of the file,
 * a few MiB at a time. */
typedef fsdp_status (*fsdp__st_fill)(void *arg, int64_t index, int64_t offset, int64_t bytes,
                                     void *buf);

/* fill may be NULL when every entry has data. On an error nothing of the file is left. */
fsdp_status fsdp__st_write(const char *path, const fsdp__st_entry *entries, int64_t n,
                           const fsdp__st_pair *meta, int64_t n_meta, fsdp__st_fill fill,
                           void *arg);

#endif
