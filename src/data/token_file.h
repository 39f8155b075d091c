/*
 * token_file.h - files of token ids, mapped into memory.
 *
 * Format, all numbers little-endian:
 *
 *     0  8 bytes  "FSDPTOKS"
 *     8  u32      version, 1
 *    12  u32      bytes an id: 2 or 4
 *    16  u64      vocabulary: every id is below it
 *    24  u64      number of ids
 *    32  u64      number of documents, 0 if they are not told apart
 *    40  u64      xxHash64 (seed 0) of the ids' bytes
 *    48  u64      xxHash64 (seed 0) of bytes 0..47
 *    56  u64      0
 *    64           the ids; zeros up to a multiple of 8
 *                 u64 for each document: the index of its first id
 *
 * Nothing follows. The file is written under another name and renamed, so a
 * file that is there is whole; one that was cut short later is refused.
 */
#ifndef FSDP_DATA_TOKEN_FILE_H
#define FSDP_DATA_TOKEN_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

/* ---- reading ---------------------------------------------------------------------- */

typedef struct fsdp__tokens {
    char *path;
    const uint16_t *ids16; /* (count) one of the two, the other is NULL */
    const uint32_t *ids32;
    const uint64_t *documents; /* (document_count) */
    int64_t count, document_count, vocab_size;
    uint64_t hash;
    void *map; /* the whole file, read-only */
    size_t map_bytes;
} fsdp__tokens;

/* Checks the header and the size, not the ids. NULL with the error kept. May be shared by threads
 * of which none closes it. */
fsdp__tokens *fsdp__tokens_open(const char *path);
void fsdp__tokens_close(fsdp__tokens *t); /* NULL: nothing */

static inline int64_t fsdp__tokens_get(const fsdp__tokens *t, int64_t i)
{
    return t->ids16 ? t->ids16[i] : (int64_t)t->ids32[i];
}

/* Ids start .. start + n - 1 into out (n). An id of vocab_size or more is an error with file,
 * offset and id; so is a range that the file does not hold. */
fsdp_status fsdp__tokens_read(const fsdp__tokens *t, int64_t start, int64_t n, int64_t vocab_size,
                              int64_t *out);
/* Looks at every id: the same error as above at the first one. Memory speed. */
fsdp_status fsdp__tokens_check(const fsdp__tokens *t, int64_t vocab_size);
/* Compares the ids with the hash of the header. */
fsdp_status fsdp__tokens_verify(const fsdp__tokens *t);

/* ---- writing ---------------------------------------------------------------------- */

typedef struct fsdp__tokens_writer fsdp__tokens_writer;

/* Ids take 2 bytes where vocab_size is at most 65536, else 4. NULL with the error kept. */
fsdp__tokens_writer *fsdp__tokens_create(const char *path, int64_t vocab_size);
/* What is added from now on is a new document. */
fsdp_status fsdp__tokens_document(fsdp__tokens_writer *w);
/* Appends ids (n); one outside the vocabulary is an error. */
fsdp_status fsdp__tokens_add(fsdp__tokens_writer *w, const int32_t *ids, int64_t n);
/* Completes the file and frees the writer, also on failure. An empty file is an error. */
fsdp_status fsdp__tokens_commit(fsdp__tokens_writer *w);
/* Removes what was written and frees the writer. NULL: nothing. */
void fsdp__tokens_abort(fsdp__tokens_writer *w);

#endif
