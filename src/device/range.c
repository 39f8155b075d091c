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
#include <sys/mman.h>

#include "base/context.h"
#include "base/memory.h"
#include "device/device_internal.h"
#include "device/heap.h"
#include "device/poison.h"

typedef struct fsdp__range {
    fsdp__allocator allocator; /* first: the allocator is this object */
    struct fsdp__range *next;  /* of the context */
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
    fsdp__device_state *s = fsdp__device_state_get();
    m->heap = s ? fsdp__heap_create(size) : NULL;
    if (!m->heap) {
        free(m);
        return NULL;
    }
    m->next = s->ranges;
    s->ranges = m;
    return &m->allocator;
}

/* Of a shared mapping the first call gives the pages back, of a private one the second. */
static void give_pages(void *arg, int64_t offset, int64_t bytes)
{
    char *at = ((range *)arg)->base + offset;
    if (madvise(at, (size_t)bytes, MADV_REMOVE) != 0)
        (void)madvise(at, (size_t)bytes, MADV_DONTNEED);
}

void fsdp_memory_trim(void)
{
    fsdp__device_state *s = fsdp__slot_get(FSDP__SLOT_DEVICE);
    for (range *m = s ? s->ranges : NULL; m; m = m->next) {
        fsdp__heap_trim(m->heap, give_pages, m);
        report_reserved(m);
    }
}

void fsdp__allocator_over_free(fsdp__allocator *a)
{
    range *m = (range *)a;
    if (!m) return;
    fsdp__device_state *s = fsdp__slot_get(FSDP__SLOT_DEVICE);
    for (range **at = s ? &s->ranges : NULL; at && *at; at = &(*at)->next)
        if (*at == m) {
            *at = m->next;
            break;
        }
    fsdp__account_reserve(-m->reserved);
    /* The addresses may be mapped for something else later: leave no poison behind. */
    if (m->poison) fsdp__unpoison(m->base, (size_t)fsdp__heap_touched(m->heap));
    fsdp__heap_free(m->heap);
    free(m);
}
