/*
 * pairs.h - hash table from 64-bit keys (two token ids, mostly) to 64-bit
 * values. Open addressing with linear probing; entries are never removed.
 */
#ifndef FSDP_DATA_PAIRS_H
#define FSDP_DATA_PAIRS_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__pair_slot {
    uint64_t key; /* UINT64_MAX: free */
    int64_t value;
} fsdp__pair_slot;

typedef struct fsdp__pairs {
    fsdp__pair_slot *slots; /* cap of them, a power of two; NULL when empty */
    size_t cap, count;
} fsdp__pairs;

#define FSDP__PAIR_FREE UINT64_MAX

/* No pair of ids below 2^32 - 1 gives the mark of a free slot. */
static inline uint64_t fsdp__pair_key(uint32_t a, uint32_t b)
{
    return (uint64_t)a << 32 | b;
}

static inline size_t fsdp__pair_hash(uint64_t key)
{
    key ^= key >> 32;
    key *= 0x9e3779b97f4a7c15u;
    return (size_t)(key ^ key >> 29);
}

/* NULL if absent; valid until the next add. */
static inline int64_t *fsdp__pairs_get(const fsdp__pairs *t, uint64_t key)
{
    if (t->cap == 0) return NULL;
    for (size_t i = fsdp__pair_hash(key) & (t->cap - 1);; i = (i + 1) & (t->cap - 1)) {
        if (t->slots[i].key == key) return &t->slots[i].value;
        if (t->slots[i].key == FSDP__PAIR_FREE) return NULL;
    }
}

/* The value of key, a new one being 0; NULL with FSDP_NO_MEMORY kept. */
int64_t *fsdp__pairs_add(fsdp__pairs *t, uint64_t key);
fsdp_status fsdp__pairs_reserve(fsdp__pairs *t, size_t count);
void fsdp__pairs_free(fsdp__pairs *t);

#endif
