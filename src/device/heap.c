/*
 * heap.c - best fit over one contiguous range, with the bookkeeping outside of it.
 *
 * Every block, taken or free, is a node of one list in order of address; the list tiles [0, top).
 * Free blocks stand in a treap ordered by (size, offset), so the smallest fit with the lowest
 * address is one descent; taken blocks stand in a hash table by offset. The treap's priorities are
 * a hash of the offset: nothing here depends on chance or on where the nodes lie, so equal calls
 * give equal offsets on every rank.
 *
 * Invariants: two neighbours are never both free; a free block's clock is the largest that was
 * given for any of its bytes; a page's bit in `pages` is set while the page may hold memory.
 */
#include "device/heap.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

enum { SMALL_ALIGN = 64, PAGE = 4096, BIG = 64 * 1024, FIRST_BUCKETS = 256 };

typedef struct block block;
struct block {
    int64_t offset, size;
    uint64_t clock;      /* of a free block */
    block *prev, *next;  /* by address */
    block *left, *right; /* in the treap, while free */
    block *chain;        /* in the hash table, while taken; in the pool of nodes, while unused */
    uint32_t priority;
    int is_free;
};

struct fsdp__heap {
    int64_t size, top, live;
    block *first, *last;
    block *free_root;
    block **buckets; /* (n_buckets), a power of two */
    int64_t n_buckets, n_taken;
    block *pool;     /* unused nodes */
    uint64_t *pages; /* one bit a page of [0, top) */
    int64_t pages_cap;
    int64_t touched_pages;
};

/* ---- the treap of free blocks --------------------------------------------- */

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static int before(const block *a, int64_t size, int64_t offset)
{
    return a->size < size || (a->size == size && a->offset < offset);
}

/* Parts t into blocks before (size, offset) and the others. */
static void split(block *t, int64_t size, int64_t offset, block **low, block **high)
{
    while (t) {
        if (before(t, size, offset)) {
            *low = t;
            low = &t->right;
            t = t->right;
        } else {
            *high = t;
            high = &t->left;
            t = t->left;
        }
    }
    *low = NULL;
    *high = NULL;
}

static void insert_free(fsdp__heap *h, block *b)
{
    b->is_free = 1;
    b->priority = (uint32_t)mix((uint64_t)b->offset);
    block **at = &h->free_root;
    while (*at && (*at)->priority >= b->priority)
        at = before(*at, b->size, b->offset) ? &(*at)->right : &(*at)->left;
    split(*at, b->size, b->offset, &b->left, &b->right);
    *at = b;
}

static void remove_free(fsdp__heap *h, block *b)
{
    block **at = &h->free_root;
    while (*at != b)
        at = before(*at, b->size, b->offset) ? &(*at)->right : &(*at)->left;
    block *low = b->left, *high = b->right;
    while (low && high) {
        if (low->priority >= high->priority) {
            *at = low;
            at = &low->right;
            low = low->right;
        } else {
            *at = high;
            at = &high->left;
            high = high->left;
        }
    }
    *at = low ? low : high;
    b->left = b->right = NULL;
    b->is_free = 0;
}

/* The first free block not before (size, offset), or NULL. */
static block *lower_bound(const fsdp__heap *h, int64_t size, int64_t offset)
{
    block *best = NULL;
    for (block *t = h->free_root; t;) {
        if (before(t, size, offset)) {
            t = t->right;
        } else {
            best = t;
            t = t->left;
        }
    }
    return best;
}

/* ---- nodes, table, pages --------------------------------------------------- */

static int64_t round_up(int64_t x, int64_t align)
{
    return (x + align - 1) / align * align;
}

/* Fills the pool to at least three nodes, the most that one take splits off. */
static fsdp_status reserve_nodes(fsdp__heap *h)
{
    int have = 0;
    for (block *b = h->pool; b && have < 3; b = b->chain)
        have++;
    for (; have < 3; have++) {
        block *b = fsdp__calloc(1, sizeof *b, "a heap's table of blocks");
        if (!b) return fsdp_error();
        b->chain = h->pool;
        h->pool = b;
    }
    return FSDP_OK;
}

static block *node_take(fsdp__heap *h)
{
    block *b = h->pool;
    h->pool = b->chain;
    memset(b, 0, sizeof *b);
    return b;
}

static void node_give(fsdp__heap *h, block *b)
{
    b->chain = h->pool;
    h->pool = b;
}

static block **bucket(const fsdp__heap *h, int64_t offset)
{
    return &h->buckets[mix((uint64_t)offset) & (uint64_t)(h->n_buckets - 1)];
}

static fsdp_status reserve_buckets(fsdp__heap *h)
{
    if (h->buckets && h->n_taken < h->n_buckets) return FSDP_OK;
    fsdp__heap old = *h;
    int64_t n = h->buckets ? h->n_buckets * 2 : FIRST_BUCKETS;
    block **buckets = fsdp__calloc((size_t)n, sizeof *buckets, "a heap's table of offsets");
    if (!buckets) return fsdp_error();
    h->buckets = buckets;
    h->n_buckets = n;
    for (int64_t i = 0; old.buckets && i < old.n_buckets; i++) {
        for (block *b = old.buckets[i], *next; b; b = next) {
            next = b->chain;
            block **at = bucket(h, b->offset);
            b->chain = *at;
            *at = b;
        }
    }
    free(old.buckets);
    return FSDP_OK;
}

static fsdp_status reserve_pages(fsdp__heap *h, int64_t top)
{
    int64_t words = round_up(round_up(top, PAGE) / PAGE, 64) / 64;
    int64_t old = h->pages_cap;
    if (words <= old) return FSDP_OK;
    int64_t cap = old ? old : 64;
    while (cap < words)
        cap *= 2;
    uint64_t *pages =
        fsdp__realloc(h->pages, (size_t)cap * sizeof *pages, "a heap's table of pages");
    if (!pages) return fsdp_error();
    memset(pages + old, 0, (size_t)(cap - old) * sizeof *pages);
    h->pages = pages;
    h->pages_cap = cap;
    return FSDP_OK;
}

/* Marks the pages that [offset, offset + size) lies in. */
static void touch(fsdp__heap *h, int64_t offset, int64_t size)
{
    int64_t page = offset / PAGE, end = round_up(offset + size, PAGE) / PAGE;
    while (page < end) {
        int64_t bit = page % 64, n = end - page < 64 - bit ? end - page : 64 - bit;
        uint64_t mask = (n == 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1) << bit;
        uint64_t *word = &h->pages[page / 64];
        h->touched_pages += __builtin_popcountll(mask & ~*word);
        *word |= mask;
        page += n;
    }
}

/* ---- the interface ----------------------------------------------------------- */

fsdp__heap *fsdp__heap_create(int64_t size)
{
    fsdp__heap *h = fsdp__calloc(1, sizeof *h, "a heap");
    if (h) h->size = size;
    return h;
}

void fsdp__heap_free(fsdp__heap *h)
{
    if (!h) return;
    for (block *b = h->first, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    for (block *b = h->pool, *next; b; b = next) {
        next = b->chain;
        free(b);
    }
    free(h->buckets);
    free(h->pages);
    free(h);
}

/* A free block in which size bytes fit at a multiple of align, and where. */
static block *find_fit(const fsdp__heap *h, int64_t size, int64_t align, int64_t *offset)
{
    for (block *b = lower_bound(h, size, 0); b; b = lower_bound(h, b->size, b->offset + 1)) {
        *offset = round_up(b->offset, align);
        if (*offset + size <= b->offset + b->size) return b;
    }
    return NULL;
}

/* Makes the range longer, so that size bytes fit at its end; gives the block they fit in. */
static block *extend(fsdp__heap *h, int64_t size, int64_t align, int64_t *offset)
{
    block *b = h->last && h->last->is_free ? h->last : NULL;
    *offset = round_up(b ? b->offset : h->top, align);
    if (size > h->size || *offset > h->size - size) return NULL;
    if (reserve_pages(h, *offset + size) != FSDP_OK) return NULL;
    if (b) {
        remove_free(h, b);
        b->size = *offset + size - b->offset;
    } else {
        b = node_take(h);
        b->offset = h->top;
        b->size = *offset + size - h->top;
        b->prev = h->last;
        *(h->last ? &h->last->next : &h->first) = b;
        h->last = b;
    }
    h->top = *offset + size;
    insert_free(h, b);
    return b;
}

/* Cuts b at offset; gives the upper part. Neither is in the treap. */
static block *cut(fsdp__heap *h, block *b, int64_t offset)
{
    block *up = node_take(h);
    up->offset = offset;
    up->size = b->offset + b->size - offset;
    up->clock = b->clock;
    b->size = offset - b->offset;
    up->prev = b;
    up->next = b->next;
    *(b->next ? &b->next->prev : &h->last) = up;
    b->next = up;
    return up;
}

int64_t fsdp__heap_take(fsdp__heap *h, int64_t bytes, uint64_t *clock, const char *what)
{
    int64_t limit = INT64_MAX - 2 * PAGE;
    if (bytes < 0 || bytes > limit) bytes = limit;
    int64_t align = bytes >= BIG ? PAGE : SMALL_ALIGN;
    int64_t size = round_up(bytes > 0 ? bytes : 1, align), offset = 0;
    if (reserve_nodes(h) != FSDP_OK || reserve_buckets(h) != FSDP_OK) return -1;

    block *b = find_fit(h, size, align, &offset);
    if (!b) b = extend(h, size, align, &offset);
    if (!b) {
        fsdp__fail(
            FSDP_NO_MEMORY,
            "%s: %lld bytes do not fit into the heap of %lld bytes, of which %lld are in use", what,
            (long long)bytes, (long long)h->size, (long long)h->live);
        return -1;
    }
    remove_free(h, b);
    if (offset > b->offset) {
        block *front = b;
        b = cut(h, front, offset);
        insert_free(h, front);
    }
    if (b->size > size) insert_free(h, cut(h, b, offset + size));

    block **at = bucket(h, offset);
    b->chain = *at;
    *at = b;
    h->n_taken++;
    h->live += size;
    touch(h, offset, size);
    if (clock) *clock = b->clock;
    return offset;
}

/* Joins b with the block after it; neither is in the treap. */
static void join(fsdp__heap *h, block *b)
{
    block *up = b->next;
    b->size += up->size;
    if (up->clock > b->clock) b->clock = up->clock;
    b->next = up->next;
    *(up->next ? &up->next->prev : &h->last) = b;
    node_give(h, up);
}

void fsdp__heap_give(fsdp__heap *h, int64_t offset, uint64_t clock)
{
    if (!h->buckets) return;
    block **at = bucket(h, offset);
    while (*at && (*at)->offset != offset)
        at = &(*at)->chain;
    block *b = *at;
    if (!b) return; /* never taken */
    *at = b->chain;
    b->chain = NULL;
    h->n_taken--;
    h->live -= b->size;
    b->clock = clock > b->clock ? clock : b->clock;
    if (b->next && b->next->is_free) {
        remove_free(h, b->next);
        join(h, b);
    }
    if (b->prev && b->prev->is_free) {
        b = b->prev;
        remove_free(h, b);
        join(h, b);
    }
    insert_free(h, b);
}

int64_t fsdp__heap_live(const fsdp__heap *h)
{
    return h->live;
}

int64_t fsdp__heap_touched(const fsdp__heap *h)
{
    return h->touched_pages * PAGE;
}

void fsdp__heap_trim(fsdp__heap *h, void (*unmap)(void *arg, int64_t offset, int64_t bytes),
                     void *arg)
{
    for (block *b = h->first; b; b = b->next) {
        if (!b->is_free) continue;
        int64_t page = round_up(b->offset, PAGE) / PAGE;
        /* Nothing lies beyond the top, so a last page that begins in free bytes is free. */
        int64_t end = (b->next ? b->offset + b->size : round_up(h->top, PAGE)) / PAGE;
        int64_t cleared = 0;
        for (int64_t p = page; p < end; p++) {
            uint64_t bit = (uint64_t)1 << (p % 64);
            cleared += (h->pages[p / 64] & bit) != 0;
            h->pages[p / 64] &= ~bit;
        }
        if (cleared) unmap(arg, page * PAGE, (end - page) * PAGE);
        h->touched_pages -= cleared;
    }
}

/* ---- checks for tests --------------------------------------------------------- */

static int64_t count_free(const block *t, int *bad)
{
    if (!t) return 0;
    if (!t->is_free) *bad = 1;
    if (t->left && !before(t->left, t->size, t->offset)) *bad = 1;
    if (t->right && before(t->right, t->size, t->offset)) *bad = 1;
    return 1 + count_free(t->left, bad) + count_free(t->right, bad);
}

int fsdp__heap_check(const fsdp__heap *h)
{
    int64_t at = 0, live = 0, n_free = 0, n_taken = 0, touched = 0;
    int bad = 0;
    const block *prev = NULL;
    for (const block *b = h->first; b; prev = b, b = b->next) {
        if (b->offset != at || b->size <= 0 || b->prev != prev) return 1;
        if (b->offset % SMALL_ALIGN || b->size % SMALL_ALIGN) return 2;
        if (prev && prev->is_free && b->is_free) return 3;
        if (b->is_free) {
            n_free++;
        } else {
            n_taken++;
            live += b->size;
            if (b->size >= BIG && (b->offset % PAGE || b->size % PAGE)) return 4;
            const block *c = *bucket(h, b->offset);
            while (c && c != b)
                c = c->chain;
            if (!c) return 5;
        }
        at += b->size;
    }
    if (h->last != prev || at != h->top || h->top > h->size) return 6;
    if (count_free(h->free_root, &bad) != n_free || bad) return 7;
    if (n_taken != h->n_taken || live != h->live) return 8;
    for (int64_t i = 0; i < h->pages_cap; i++)
        touched += __builtin_popcountll(h->pages[i]);
    return touched == h->touched_pages ? 0 : 9;
}
