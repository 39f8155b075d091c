/*
 * block.h - the part of a whole tensor that a rank or a file holds: a box of it.
 */
#ifndef FSDP_CKPT_BLOCK_H
#define FSDP_CKPT_BLOCK_H

#include <stdbool.h>

#include "format/safetensors.h"
#include "fsdp/nn.h"

typedef struct fsdp__block {
    int ndim;
    int64_t whole[FSDP_MAX_DIMS]; /* shape of the tensor */
    int64_t at[FSDP_MAX_DIMS];    /* first index of the box */
    int64_t size[FSDP_MAX_DIMS];  /* its extent */
} fsdp__block;

/* What this rank holds of p, by its shard's layout. */
fsdp__block fsdp__block_of(const fsdp_param *p);
int64_t fsdp__block_numel(const fsdp__block *b);
/* The box that both hold; false if there is none. */
bool fsdp__block_common(const fsdp__block *a, const fsdp__block *b, fsdp__block *out);
/* Copies `common`, which lies in both, from the file's tensor t, which is the box `from`, to the
 * memory at dst, which is the box `to` in row-major order with elements of dst_type. */
fsdp_status fsdp__block_read(fsdp__st *st, const fsdp__st_tensor *t, const fsdp__block *from,
                             const fsdp__block *to, const fsdp__block *common, void *dst,
                             fsdp_dtype dst_type);

#endif
