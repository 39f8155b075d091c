/*
 * segment.c - the memory that ranks of one host share.
 *
 *     [ control | heap of rank 0 | heap of rank 1 | ... | gather area ]
 *
 * One sparse segment whose layout is a function of the number of ranks and the machine's memory
 * alone, so every rank computes the same offsets; only pages that are used exist. As processes it
 * is a memfd that the launcher made and the ranks inherit: each maps the whole for reading, and for
 * writing only control, its own heap and the gather area. As threads it is one anonymous mapping.
 * A segment begins as zeros, and zeros are its valid first state: nobody has to come first.
 *
 * Each world (init to finalize) has a number; what an earlier world of the same processes left in
 * the control area is not touched again, because states and slots carry that number.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

#define MAGIC                                                                          \
    UINT64_C(0x3130637064736601) /* changes with every change of the published structs \
                                  */
#define GIB ((int64_t)1 << 30)

static int64_t round_up(int64_t x, int64_t align)
{
    return (x + align - 1) / align * align;
}

/* ---- layout ----------------------------------------------------------------------- */

fsdp_status fsdp__layout_make(int n, fsdp__layout *out)
{
    if (n < 1 || n > FSDP__MAX_RANKS)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "a world of %d ranks: expected 1 to %d", n,
                          (int)FSDP__MAX_RANKS);
    int64_t page = 4096, huge = 2 << 20;
    int64_t pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    int64_t physical = pages > 0 && bytes > 0 ? round_up(pages * bytes, GIB) : 16 * GIB;
#if defined(__SANITIZE_THREAD__)
    /* The thread sanitizer leaves a program little address space. */
    physical = 4 * GIB;
#endif
    fsdp__layout l = {0};
    l.member =
        round_up((int64_t)sizeof(fsdp__member_page) + (int64_t)sizeof(fsdp__pair_page) * n, 64);
    l.control = (int64_t)sizeof(fsdp__segment_head) + (int64_t)sizeof(fsdp__rank_page) * n +
                l.member * n * FSDP__MAX_SLOTS;
    l.control = round_up(l.control, huge);
    /* All ranks together cannot use more than the machine has; four times a rank's part leaves
     * room for ranks that differ. */
    l.heap = n <= 4 ? physical : round_up(4 * physical / n, page);
    if (l.heap < GIB) l.heap = GIB;
    l.part = physical;
    l.gather = 32 * physical < 16384 * GIB ? 32 * physical : 16384 * GIB;
    if (l.gather < 4 * physical) l.gather = 4 * physical;
    l.total = l.control + l.heap * n + l.gather;
    *out = l;
    return FSDP_OK;
}

fsdp__segment_head *fsdp__head(const fsdp__world *w)
{
    return (fsdp__segment_head *)w->seg.control;
}

fsdp__rank_page *fsdp__rank_page_of(const fsdp__world *w, int rank)
{
    return (fsdp__rank_page *)(w->seg.control + sizeof(fsdp__segment_head)) + rank;
}

fsdp__member_page *fsdp__member_page_of(const fsdp__world *w, int64_t slot, int rank)
{
    char *first =
        w->seg.control + sizeof(fsdp__segment_head) + sizeof(fsdp__rank_page) * (size_t)w->size;
    return (fsdp__member_page *)(first + (slot * w->size + rank) * w->seg.layout.member);
}

/* The page in which owner (a rank of the group) writes about its talk with peer. */
fsdp__pair_page *fsdp__pair_page_of(const fsdp_group *g, int owner, int peer)
{
    return (fsdp__pair_page *)(g->members[owner] + 1) + g->ranks[peer];
}

int64_t fsdp__offset_of(const fsdp__world *w, const void *p, int64_t bytes)
{
    const fsdp__layout *l = &w->seg.layout;
    uintptr_t at = (uintptr_t)p, heap = (uintptr_t)w->seg.heap;
    if (at < heap || at - heap > (uintptr_t)l->heap || bytes > l->heap - (int64_t)(at - heap))
        return -1;
    return l->control + l->heap * w->rank + (int64_t)(at - heap);
}

/* ---- mapping ---------------------------------------------------------------------- */

static void *map(int64_t bytes, int protection, int flags, int fd, int64_t offset)
{
    void *p = mmap(NULL, (size_t)bytes, protection, MAP_SHARED | MAP_NORESERVE | flags, fd, offset);
    if (p != MAP_FAILED) return p;
    fsdp__fail_errno(FSDP_NO_MEMORY,
                     "cannot map %lld bytes of address space for the memory that ranks share; "
                     "raise the limit on virtual memory (ulimit -v)",
                     (long long)bytes);
    return NULL;
}

fsdp_status fsdp__segment_map_threads(int world_size, fsdp__segment *out)
{
    fsdp__segment s = {.world_size = world_size, .threads = true};
    FSDP_TRY(fsdp__layout_make(world_size, &s.layout));
    char *p = map(s.layout.total, PROT_READ | PROT_WRITE, MAP_ANONYMOUS, -1, 0);
    if (!p) return fsdp_error();
    s.ro = p;
    fsdp__segment_view(&s, 0, out);
    return FSDP_OK;
}

/* The segment as rank sees it, where all ranks see one mapping. */
void fsdp__segment_view(const fsdp__segment *whole, int rank, fsdp__segment *out)
{
    char *base = (char *)(uintptr_t)whole->ro;
    *out = *whole;
    out->control = base;
    out->heap = base + out->layout.control + out->layout.heap * rank;
    out->gather = base + out->layout.control + out->layout.heap * out->world_size;
}

/* Sets a word of the head that all ranks must agree on. */
static fsdp_status agree(_Atomic uint64_t *word, uint64_t mine, const char *what)
{
    uint64_t found = 0;
    if (atomic_compare_exchange_strong(word, &found, mine) || found == mine) return FSDP_OK;
    return fsdp__fail(FSDP_MISMATCH,
                      "the segment of FSDP_SHM_FD has %s %llu, this rank expects %llu; start all "
                      "ranks from one launcher, with one version of the program",
                      what, (unsigned long long)found, (unsigned long long)mine);
}

fsdp_status fsdp__segment_map_fd(int fd, int rank, int world_size, fsdp__segment *out)
{
    fsdp__segment s = {.world_size = world_size};
    FSDP_TRY(fsdp__layout_make(world_size, &s.layout));
    const fsdp__layout *l = &s.layout;
    struct stat st;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode))
        return fsdp__fail(
            FSDP_INVALID_CONFIG,
            "FSDP_SHM_FD=%d is no open file of shared memory; it is set by `fsdp run`, "
            "so do not set it by hand and do not close descriptors that were inherited",
            fd);
    /* Every rank may do this: the same size changes nothing. */
    if (st.st_size < l->total && ftruncate(fd, l->total))
        return fsdp__fail_errno(
            FSDP_NO_MEMORY,
            "cannot set the size of the shared segment to %lld bytes (only used "
            "pages take memory); raise the limit on file sizes (ulimit -f)",
            (long long)l->total);
    s.ro = map(l->total, PROT_READ, 0, fd, 0);
    s.control = s.ro ? map(l->control, PROT_READ | PROT_WRITE, 0, fd, 0) : NULL;
    s.heap =
        s.control ? map(l->heap, PROT_READ | PROT_WRITE, 0, fd, l->control + l->heap * rank) : NULL;
    s.gather =
        s.heap ? map(l->gather, PROT_READ | PROT_WRITE, 0, fd, l->control + l->heap * world_size)
               : NULL;
    fsdp__segment_head *h = (fsdp__segment_head *)s.control;
    if (!s.gather || agree(&h->magic, MAGIC, "the mark") != FSDP_OK ||
        agree(&h->world_size, (uint64_t)world_size, "a WORLD_SIZE of") != FSDP_OK ||
        agree(&h->total, (uint64_t)l->total, "a size of") != FSDP_OK) {
        fsdp__segment_unmap(&s);
        return fsdp_error();
    }
    *out = s;
    return FSDP_OK;
}

void fsdp__segment_unmap(fsdp__segment *s)
{
    const fsdp__layout *l = &s->layout;
    if (!s->threads) {
        if (s->gather) munmap(s->gather, (size_t)l->gather);
        if (s->heap) munmap(s->heap, (size_t)l->heap);
        if (s->control) munmap(s->control, (size_t)l->control);
    }
    if (s->ro) munmap((void *)(uintptr_t)s->ro, (size_t)l->total);
    memset(s, 0, sizeof *s);
}

/* ---- who lives -------------------------------------------------------------------- */

/* State and start time of a process; 0 if there is none. The name in parentheses may hold
 * anything, so fields are counted from the last parenthesis. */
static char process_state(uint64_t pid, uint64_t *start)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    FILE *f = fopen(path, "re");
    if (!f) return errno == ENOENT ? 0 : '?';
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    char *p = strrchr(text, ')');
    if (!p || p[1] != ' ') return 0; /* it went while we read */
    char state = p[2];
    p += 2;
    for (int field = 3; field < 22 && p; field++)
        p = strchr(p + 1, ' ');
    *start = p ? strtoull(p, NULL, 10) : 0;
    return state;
}

/* True if the process that had this pid and start time is over. A zombie is; if /proc cannot be
 * read, nothing is known and the timeout has to tell. */
bool fsdp__process_dead(uint64_t pid, uint64_t start)
{
    uint64_t now = 0;
    char state = process_state(pid, &now);
    if (state == '?') return false;
    return state == 0 || state == 'Z' || state == 'X' || now != start;
}

void fsdp__text_set(fsdp__text *t, const char *s)
{
    uint64_t words[FSDP__LABEL / 8] = {0};
    size_t n = strlen(s);
    memcpy(words, s, n < FSDP__LABEL - 1 ? n : FSDP__LABEL - 1);
    for (int i = 0; i < FSDP__LABEL / 8; i++)
        atomic_store_explicit(&t->words[i], words[i], memory_order_relaxed);
}

void fsdp__text_get(const fsdp__text *t, char out[FSDP__LABEL])
{
    for (int i = 0; i < FSDP__LABEL / 8; i++) {
        uint64_t word = atomic_load_explicit(&t->words[i], memory_order_relaxed);
        memcpy(out + i * 8, &word, 8);
    }
    out[FSDP__LABEL - 1] = 0;
}

/* ---- worlds ----------------------------------------------------------------------- */

/* Takes over s on success; on failure it stays the caller's. */
fsdp__world *fsdp__world_join(const fsdp__segment *s, int rank)
{
    fsdp__world *w = fsdp__calloc(1, sizeof *w, "a world of ranks");
    if (!w) return NULL;
    w->seg = *s;
    w->rank = rank;
    w->size = s->world_size;
    fsdp__rank_page *me = fsdp__rank_page_of(w, rank);
    uint64_t state = atomic_load(&me->state), pid = (uint64_t)getpid(), start = 0;
    w->number = state ? (int)(state / 4) + 1 : 0;
    if (state % 4 == FSDP__JOINED) {
        fsdp__fail(
            FSDP_INVALID_STATE,
            "rank %d was already taken in this world by process %llu; each rank starts once, "
            "and a rank that ended is started again together with all others",
            rank, (unsigned long long)atomic_load(&me->pid));
    } else if (w->number >= FSDP__MAX_WORLDS) {
        fsdp__fail(FSDP_UNSUPPORTED, "fsdp_init was called more than %d times by one process",
                   (int)FSDP__MAX_WORLDS);
    } else {
        w->allocator = fsdp__allocator_over("shm", w->seg.heap, w->seg.layout.heap, 0);
    }
    if (!w->allocator) {
        free(w);
        return NULL;
    }
    w->next_slot = atomic_load(&me->next_slot);
    if (w->next_slot < FSDP__MAX_WORLDS) w->next_slot = FSDP__MAX_WORLDS;
    (void)process_state(pid, &start);
    atomic_store(&me->pid, pid);
    atomic_store(&me->start, start);
    atomic_store(&me->last, 0);
    atomic_store(&me->resets, 0);
    atomic_store(&me->state, (uint64_t)w->number * 4 + FSDP__JOINED);
    return w;
}

void fsdp__world_leave(fsdp__world *w)
{
    fsdp__rank_page *me = fsdp__rank_page_of(w, w->rank);
    atomic_store(&me->next_slot, w->next_slot);
    atomic_store(&me->state, (uint64_t)w->number * 4 + FSDP__LEFT);
    for (int r = 0; r < w->size; r++)
        if (r != w->rank) fsdp__ring(w, r);
}

void fsdp__world_free(fsdp__world *w)
{
    if (!w) return;
    fsdp__allocator_over_free(w->allocator);
    if (!w->seg.threads) fsdp__segment_unmap(&w->seg);
    free(w);
}
