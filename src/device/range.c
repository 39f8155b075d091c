/*
 * range.c - an allocator over a mapped range of addresses: a heap and its accounting.
 *
 * Using a page backs it, and freed blocks are used again before new pages are, so a steady state
 * touches none. What is backed and was not asked for (freed blocks, rounding) is reported as
 * reserved bytes, exactly, after every call.
 *
 * Under the address sanitizer freed blocks can be poisoned, so a stale pointer into a freed storage
 * is found as one into freed malloc memory would be.
 */
#include <stdlib.h>

#include "base/context.h"
#include "base/memory.h"
#include "device/allocator.h"
#include "device/heap.h"
#include "device/poison.h"

typedef struct range {
    fsdp__allocator allocator; /* first: the allocator is this object */
    fsdp__heap *heap;
    char *base;
    int64_t requested; /* bytes that callers asked for and have not freed */
    int64_t reserved;  /* as last reported */
    int poison;
} range;

static void report_reserved(range *m)
{
    int64_t now = fsdp__heap_touched(m->heap) - m->requested;
    if (now != m->reserved) fsdp__account_reserve(now - m->reserved);
    m->reserved = now;
}

static void *range_alloc(fsdp__allocator *a, size_t bytes, const char *what)
{
    range *m = (range *)a;
    int64_t want = bytes > (size_t)INT64_MAX ? INT64_MAX : (int64_t)bytes;
    int64_t offset = fsdp__heap_take(m->heap, want, NULL, what);
    if (offset < 0) return NULL;
    m->requested += want;
    report_reserved(m);
    if (m->poison) fsdp__unpoison(m->base + offset, bytes);
    return m->base + offset;
}

static void range_free(fsdp__allocator *a, void *p, size_t bytes)
{
    range *m = (range *)a;
    if (!p) return;
    if (m->poison) fsdp__poison(p, bytes);
    fsdp__heap_give(m->heap, (char *)p - m->base, 0);
    m->requested -= (int64_t)bytes;
    report_reserved(m);
}

fsdp__allocator *fsdp__allocator_over(const char *name, void *base, int64_t size, int poison)
{
    range *m = fsdp__calloc(1, sizeof *m, "the memory of a rank");
    if (!m) return NULL;
    m->allocator = (fsdp__allocator){name, range_alloc, range_free, false};
    m->base = base;
    m->poison = poison;
    m->heap = fsdp__heap_create(size);
    if (m->heap) return &m->allocator;
    free(m);
    return NULL;
}

void fsdp__allocator_over_free(fsdp__allocator *a)
{
    range *m = (range *)a;
    if (!m) return;
    fsdp__account_reserve(-m->reserved);
    /* The addresses may be mapped for something else later: leave no poison behind. */
    if (m->poison) fsdp__unpoison(m->base, (size_t)fsdp__heap_touched(m->heap));
    fsdp__heap_free(m->heap);
    free(m);
}
