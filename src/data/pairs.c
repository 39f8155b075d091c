/*
 * pairs.c - growing the table of pairs. It is at most half full, so a probe
 * looks at two slots on average and always ends.
 */
#include "data/pairs.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"

fsdp_status fsdp__pairs_reserve(fsdp__pairs *t, size_t count)
{
    size_t cap = t->cap ? t->cap : 16;
    while (cap < 2 * count)
        cap *= 2;
    if (cap == t->cap) return FSDP_OK;
    fsdp__pair_slot *slots = fsdp__calloc(cap, sizeof *slots, "table of pairs");
    if (!slots) return fsdp_error();
    for (size_t i = 0; i < cap; i++)
        slots[i].key = FSDP__PAIR_FREE;
    for (size_t i = 0; i < t->cap; i++) {
        if (t->slots[i].key == FSDP__PAIR_FREE) continue;
        size_t j = fsdp__pair_hash(t->slots[i].key) & (cap - 1);
        while (slots[j].key != FSDP__PAIR_FREE)
            j = (j + 1) & (cap - 1);
        slots[j] = t->slots[i];
    }
    free(t->slots);
    t->slots = slots;
    t->cap = cap;
    return FSDP_OK;
}

int64_t *fsdp__pairs_add(fsdp__pairs *t, uint64_t key)
{
    if (fsdp__pairs_reserve(t, t->count + 1) != FSDP_OK) return NULL;
    size_t i = fsdp__pair_hash(key) & (t->cap - 1);
    while (t->slots[i].key != key && t->slots[i].key != FSDP__PAIR_FREE)
        i = (i + 1) & (t->cap - 1);
    if (t->slots[i].key == FSDP__PAIR_FREE) {
        t->slots[i].key = key;
        t->slots[i].value = 0;
        t->count++;
    }
    return &t->slots[i].value;
}

void fsdp__pairs_free(fsdp__pairs *t)
{
    free(t->slots);
    *t = (fsdp__pairs){0};
}
