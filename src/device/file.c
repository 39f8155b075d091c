/*
 * file.c - memory in a file without a name: blocks, and which of them are in memory.
 *
 * One file a folder and context, mapped piece by piece into a range of reserved addresses as it
 * grows. A heap deals its pages out (heap.h); a block is known by its offset. Blocks of the window
 * stand in a list, the one that was touched longest ago first: that one goes when room is needed.
 *
 * To go is: unmapped (what was written is then the page cache's), written back, dropped from the
 * page cache. The kernel drops only clean pages that nobody maps, hence the order. A block that
 * will have to go anyway begins to be written back as soon as it is done.
 *
 * A block that is freed is not written back: its range is made zeros again, which costs the disk
 * no more than a note. Where the file system cannot do that the block's bytes are cleared when they
 * are taken again (the heap's clock says that they were used).
 */
#include "device/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "base/thread.h"
#include "device/device_internal.h"
#include "device/heap.h"
#include "device/poison.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

enum { PAGE = 4096, GROW = 1 << 20, TMPFS = 0x01021994 };
/* The kernel reads at most its read-ahead size for one advice: 128 KiB where nobody changed it. */
enum { ADVICE = 128 * 1024 };
#define DEFAULT_WINDOW ((int64_t)256 << 20)

typedef struct block block;
struct block {
    block *prev, *next; /* in the window's list, while not out */
    int64_t offset, size;
    int used;     /* uses without their done */
    bool in;      /* counted into the window */
    bool whole;   /* and all of it is known to be in memory */
    bool ahead;   /* read ahead and not used yet */
    bool written; /* since it came in */
    bool blank;   /* never written: there is nothing to read */
};

struct fsdp__file_memory {
    fsdp__allocator allocator; /* first: the allocator is this object */
    fsdp__file_memory *next;
    char *folder;
    dev_t device; /* with inode: which folder it is */
    ino_t inode;
    int fd;
    char *base;
    int64_t size;     /* of the range of addresses */
    int64_t capacity; /* bytes that the file has and that are mapped */
    int64_t promised; /* bytes that were asked for */
    fsdp__heap *heap;
    block **blocks; /* (n), by offset */
    int64_t n, cap;
    block *first, *last; /* the window, touched longest ago first */
    int64_t window, in;  /* its limit; bytes in it */
    int64_t used;        /* bytes of blocks in use or read ahead */
    bool no_zeroing;     /* the file system has no way to make a range zeros */
};

static fsdp__file_memory *of(fsdp__allocator *a)
{
    return (fsdp__file_memory *)a;
}

int64_t fsdp__file_round(int64_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static fsdp_offload_stats *stats(void)
{
    return &fsdp__device_state_get()->offload;
}

static void note_most(void)
{
    fsdp_offload_stats *o = stats();
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    if (m.offloaded_total > o->most_in_files) o->most_in_files = m.offloaded_total;
    if (m.window > o->most_in_memory) o->most_in_memory = m.window;
}

/* ---- the file -------------------------------------------------------------------- */

static int64_t range_size(const char *folder)
{
#if defined(__SANITIZE_THREAD__)
    (void)folder;
    return (int64_t)8 << 30;
#else
    struct statvfs v;
    int64_t disk = statvfs(folder, &v) == 0 ? (int64_t)v.f_frsize * (int64_t)v.f_blocks : 0;
    int64_t most = (int64_t)1 << 43, least = (int64_t)64 << 30;
    return disk > most / 2 ? most : disk * 2 < least ? least : disk * 2;
#endif
}

/* A file that has no name, or loses it at once. */
static int open_nameless(const char *folder)
{
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return fd;
    fsdp__str path = {0};
    fsdp__str_addf(&path, "%s/fsdp-offload-XXXXXX", folder);
    fd = path.failed ? -1 : mkostemp(path.p, O_CLOEXEC);
    if (fd >= 0) unlink(path.p);
    fsdp__str_free(&path);
    return fd;
}

static void check_kind(const fsdp__file_memory *m)
{
    struct statfs v;
    if (fstatfs(m->fd, &v) == 0 && (uint64_t)v.f_type == (uint64_t)TMPFS)
        fsdp__log(FSDP__LOG_WARNING,
                  "offload: the folder %s is a RAM disk: what is put there stays in memory; choose "
                  "a folder on a disk",
                  m->folder);
}

static fsdp_status no_space(const fsdp__file_memory *m, int64_t want, int error)
{
    struct statvfs v;
    fsdp__str need = {0}, have = {0};
    fsdp__str_add_bytes(&need, (double)want);
    if (fstatvfs(m->fd, &v) == 0)
        fsdp__str_add_bytes(&have, (double)v.f_frsize * (double)v.f_bavail);
    errno = error;
    fsdp_status s = fsdp__fail_errno(
        FSDP_IO_ERROR,
        "offload: the folder %s has no room for %s more (%s are free); choose another folder, or "
        "cut the model over more ranks",
        m->folder, fsdp__str_get(&need), fsdp__str_get(&have));
    fsdp__str_free(&need);
    fsdp__str_free(&have);
    return s;
}

/* Room for `want` bytes in the file, on the disk and in the range of addresses. */
static fsdp_status grow(fsdp__file_memory *m, int64_t want)
{
    if (want <= m->capacity) return FSDP_OK;
    int64_t target = (want + GROW - 1) / GROW * GROW;
    int64_t more = target - m->capacity;
    struct rlimit limit;
    if (target > m->size)
        return fsdp__fail(FSDP_NO_MEMORY,
                          "offload: %lld bytes in the folder %s do not fit into the %lld bytes of "
                          "address space that are reserved for them",
                          (long long)target, m->folder, (long long)m->size);
    /* Beyond it the system would end the process instead of refusing. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        (uint64_t)target > (uint64_t)limit.rlim_cur)
        return fsdp__fail(FSDP_IO_ERROR,
                          "offload: a file of %lld bytes in the folder %s is over the limit of "
                          "file size, %llu bytes; raise it (ulimit -f)",
                          (long long)target, m->folder, (unsigned long long)limit.rlim_cur);
    int error = posix_fallocate(m->fd, m->capacity, more);
    if (error) {
        (void)ftruncate(m->fd, m->capacity);
        return no_space(m, more, error);
    }
    char *at = m->base + m->capacity;
    if (mmap(at, (size_t)more, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->fd,
             m->capacity) == MAP_FAILED) {
        error = errno;
        (void)ftruncate(m->fd, m->capacity);
        errno = error;
        return fsdp__fail_errno(FSDP_NO_MEMORY,
                                "offload: cannot map %lld bytes of a file in the folder %s",
                                (long long)more, m->folder);
    }
    /* What is read is asked for: guesses would fill the memory that the window leaves free. Core
     * dumps leave it out. */
    (void)madvise(at, (size_t)more, MADV_RANDOM);
    (void)madvise(at, (size_t)more, MADV_DONTDUMP);
    m->capacity = target;
    return FSDP_OK;
}

/* Nothing is taken or promised: the disk gets its room back. */
static void shrink(fsdp__file_memory *m)
{
    if (m->n > 0 || m->promised > 0 || m->capacity == 0) return;
    fsdp__unpoison(m->base, (size_t)m->capacity);
    if (mmap(m->base, (size_t)m->capacity, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
        return;
    if (ftruncate(m->fd, 0) != 0) return;
    m->capacity = 0;
    fsdp__heap *fresh = fsdp__heap_create(m->size);
    if (!fresh) return;
    fsdp__heap_free(m->heap);
    m->heap = fresh;
}

/* ---- blocks ------------------------------------------------------------------------ */

/* Index of the first block at or behind offset. */
static int64_t find(const fsdp__file_memory *m, int64_t offset)
{
    int64_t low = 0, high = m->n;
    while (low < high) {
        int64_t mid = (low + high) / 2;
        if (m->blocks[mid]->offset < offset)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static block *block_of(const fsdp__file_memory *m, const void *p)
{
    int64_t offset = (const char *)p - m->base, i = find(m, offset);
    return i < m->n && m->blocks[i]->offset == offset ? m->blocks[i] : NULL;
}

static void unlink_block(fsdp__file_memory *m, block *b)
{
    *(b->prev ? &b->prev->next : &m->first) = b->next;
    *(b->next ? &b->next->prev : &m->last) = b->prev;
    b->prev = b->next = NULL;
}

static void link_last(fsdp__file_memory *m, block *b)
{
    b->prev = m->last;
    b->next = NULL;
    *(m->last ? &m->last->next : &m->first) = b;
    m->last = b;
}

/* b is in the window, touched just now. */
static void enter(fsdp__file_memory *m, block *b)
{
    if (b->in) {
        unlink_block(m, b);
    } else {
        b->in = true;
        m->in += b->size;
        fsdp__account_window(b->size);
        note_most();
    }
    link_last(m, b);
}

static void leave(fsdp__file_memory *m, block *b)
{
    unlink_block(m, b);
    b->in = b->whole = b->written = false;
    m->in -= b->size;
    fsdp__account_window(-b->size);
}

static void set_held(fsdp__file_memory *m, block *b, int used, bool ahead)
{
    bool before = b->used > 0 || b->ahead, after = used > 0 || ahead;
    b->used = used;
    b->ahead = ahead;
    if (before != after) m->used += after ? b->size : -b->size;
}

/* ---- out of memory and into it --------------------------------------------------------- */

/* Forgets the pages of b after writing back what was written. */
static fsdp_status drop(fsdp__file_memory *m, block *b)
{
    double begin = fsdp__now();
    bool written = b->written;
    (void)madvise(m->base + b->offset, (size_t)b->size, MADV_DONTNEED);
    int failed = sync_file_range(m->fd, b->offset, b->size,
                                 SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                     SYNC_FILE_RANGE_WAIT_AFTER);
    if (failed && (errno == EIO || errno == ENOSPC || errno == EDQUOT))
        return fsdp__fail_errno(FSDP_IO_ERROR,
                                "offload: writing %lld bytes to the folder %s; what they held is "
                                "lost",
                                (long long)b->size, m->folder);
    (void)posix_fadvise(m->fd, b->offset, b->size, POSIX_FADV_DONTNEED);
    leave(m, b);
    stats()->write_wait += fsdp__now() - begin;
    if (written) stats()->written_bytes += b->size;
    return FSDP_OK;
}

/* Blocks that nobody holds go until `size` more bytes fit; hard: those read ahead as well. Whether
 * they fit now. */
static bool make_room(fsdp__file_memory *m, int64_t size, const block *keep, bool hard)
{
    for (block *b = m->first, *next; b && m->in + size > m->window; b = next) {
        next = b->next;
        if (b == keep || b->used > 0 || (b->ahead && !hard)) continue;
        if (b->ahead) set_held(m, b, 0, false);
        if (drop(m, b) != FSDP_OK) return false;
    }
    return m->in + size <= m->window;
}

/* Bytes of b that are not in the page cache. */
static int64_t missing(const fsdp__file_memory *m, const block *b)
{
    unsigned char in[1024];
    int64_t n = 0;
    for (int64_t at = 0; at < b->size; at += (int64_t)sizeof in * PAGE) {
        int64_t rest = b->size - at, part = (int64_t)sizeof in * PAGE;
        int64_t bytes = rest < part ? rest : part;
        if (mincore(m->base + b->offset + at, (size_t)bytes, in) != 0) return n + rest;
        for (int64_t i = 0; i < bytes / PAGE; i++)
            n += in[i] & 1 ? 0 : PAGE;
    }
    return n;
}

/* Asks the disk for b and does not wait. */
static void request(fsdp__file_memory *m, const block *b)
{
    double begin = fsdp__now();
    stats()->read_bytes += missing(m, b);
    for (int64_t at = 0; at < b->size; at += ADVICE)
        (void)posix_fadvise(m->fd, b->offset + at, b->size - at < ADVICE ? b->size - at : ADVICE,
                            POSIX_FADV_WILLNEED);
    stats()->read_wait += fsdp__now() - begin;
}

/* Waits until b is in memory and mapped. The call reports what a touch would be killed for. */
static fsdp_status await(fsdp__file_memory *m, block *b)
{
    double begin = fsdp__now();
    char *p = m->base + b->offset;
    int failed = madvise(p, (size_t)b->size, MADV_POPULATE_READ);
    if (failed && errno == EINVAL) { /* an older kernel: read into the page cache, and look at it */
        char page[PAGE];
        failed = 0;
        for (int64_t at = 0; at < b->size && !failed; at += PAGE)
            failed = pread(m->fd, page, PAGE, b->offset + at) != PAGE;
        if (failed && errno == 0) errno = EIO;
    }
    stats()->read_wait += fsdp__now() - begin;
    b->whole = !failed;
    if (!failed) return FSDP_OK;
    return fsdp__fail_errno(FSDP_IO_ERROR, "offload: reading %lld bytes from the folder %s",
                            (long long)b->size, m->folder);
}

bool fsdp__file_ahead(fsdp__allocator *a, const void *p)
{
    fsdp__file_memory *m = of(a);
    block *b = block_of(m, p);
    if (!b || b->used > 0 || b->ahead) return true;
    if (!b->in) {
        if (m->used + b->size > m->window / 2 || !make_room(m, b->size, NULL, false)) return false;
        if (!b->blank) request(m, b);
    } else if (m->used + b->size > m->window / 2) {
        return false;
    }
    enter(m, b);
    set_held(m, b, 0, true);
    return true;
}

fsdp_status fsdp__file_use(fsdp__allocator *a, const void *p)
{
    fsdp__file_memory *m = of(a);
    block *b = block_of(m, p);
    if (!b) return fsdp__fail(FSDP_INTERNAL, "a use of memory that is in no file");
    bool asked = b->ahead;
    if (!b->in) {
        if (!make_room(m, b->size, b, false)) (void)make_room(m, b->size, b, true);
        if (fsdp_error()) return fsdp_error();
    }
    enter(m, b);
    set_held(m, b, b->used + 1, false);
    if (b->blank || b->whole) return FSDP_OK;
    if (!asked) request(m, b);
    if (await(m, b) == FSDP_OK) return FSDP_OK;
    set_held(m, b, b->used - 1, false);
    return fsdp_error();
}

static void mark_written(fsdp__file_memory *m, block *b)
{
    b->written = true;
    b->blank = false;
    /* It will have to go: the disk may begin. */
    if (fsdp__heap_live(m->heap) > m->window)
        (void)sync_file_range(m->fd, b->offset, b->size, SYNC_FILE_RANGE_WRITE);
}

void fsdp__file_done(fsdp__allocator *a, const void *p, bool written)
{
    fsdp__file_memory *m = of(a);
    block *b = block_of(m, p);
    if (!b || b->used == 0) return;
    set_held(m, b, b->used - 1, false);
    if (written) mark_written(m, b);
    if (b->used == 0) (void)make_room(m, 0, NULL, false);
}

void fsdp__file_note(fsdp__allocator *a, const void *p, bool written)
{
    fsdp__file_memory *m = of(a);
    block *b = block_of(m, p);
    if (!b) return;
    if (b->used > 0) return; /* its done says the same */
    if (!written) {          /* it is going to be */
        if (fsdp__file_use(a, p) == FSDP_OK) fsdp__file_done(a, p, false);
        return;
    }
    set_held(m, b, 0, false);
    (void)make_room(m, b->in ? 0 : b->size, b, false);
    enter(m, b);
    mark_written(m, b);
}

/* ---- the allocator -------------------------------------------------------------------- */

fsdp_status fsdp__file_reserve(fsdp__allocator *a, int64_t bytes)
{
    fsdp__file_memory *m = of(a);
    int64_t live = fsdp__heap_live(m->heap), most = m->promised + bytes;
    if (bytes > 0) FSDP_TRY(grow(m, most > live ? most : live));
    m->promised = most;
    shrink(m);
    return FSDP_OK;
}

static void *file_alloc(fsdp__allocator *a, size_t bytes, const char *what)
{
    fsdp__file_memory *m = of(a);
    int64_t size =
        bytes > (size_t)(INT64_MAX - PAGE) ? INT64_MAX - PAGE : fsdp__file_round((int64_t)bytes);
    uint64_t clock = 0;
    if (FSDP__GROW(m->blocks, m->cap, m->n + 1, "the blocks of a file") != FSDP_OK) return NULL;
    block *b = fsdp__calloc(1, sizeof *b, "a block of a file");
    if (!b) return NULL;
    int64_t offset = fsdp__heap_take(m->heap, size, &clock, what);
    if (offset < 0 || grow(m, offset + size) != FSDP_OK) {
        if (offset >= 0) fsdp__heap_give(m->heap, offset, 0);
        free(b);
        return NULL;
    }
    *b = (block){.offset = offset, .size = size, .blank = true};
    int64_t i = find(m, offset);
    memmove(m->blocks + i + 1, m->blocks + i, (size_t)(m->n - i) * sizeof *m->blocks);
    m->blocks[i] = b;
    m->n++;
    note_most();
    fsdp__unpoison(m->base + offset, (size_t)size);
    if (clock != 0) {
        memset(m->base + offset, 0, (size_t)size);
        fsdp__file_note(a, m->base + offset, true);
    }
    return m->base + offset;
}

/* The bytes of a block that nobody wants any more: zeros, on the disk and in memory. Whether that
 * could be done. */
static bool clear(fsdp__file_memory *m, const block *b)
{
    (void)madvise(m->base + b->offset, (size_t)b->size, MADV_DONTNEED);
    if (!m->no_zeroing &&
        fallocate(m->fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, b->offset, b->size) == 0)
        return true;
    m->no_zeroing = true;
    (void)posix_fadvise(m->fd, b->offset, b->size, POSIX_FADV_DONTNEED);
    return false;
}

static void file_free(fsdp__allocator *a, void *p, size_t bytes)
{
    fsdp__file_memory *m = of(a);
    block *b = p ? block_of(m, p) : NULL;
    (void)bytes;
    if (!b) return;
    bool zeros = clear(m, b);
    set_held(m, b, 0, false);
    if (b->in) leave(m, b);
    fsdp__poison(p, (size_t)b->size);
    fsdp__heap_give(m->heap, b->offset, zeros ? 0 : 1);
    int64_t i = find(m, b->offset);
    m->n--;
    memmove(m->blocks + i, m->blocks + i + 1, (size_t)(m->n - i) * sizeof *m->blocks);
    free(b);
    shrink(m);
}

static void memory_free(fsdp__file_memory *m)
{
    for (int64_t i = 0; i < m->n; i++) {
        if (m->blocks[i]->in) leave(m, m->blocks[i]);
        free(m->blocks[i]);
    }
    free(m->blocks);
    if (m->base) {
        fsdp__unpoison(m->base, (size_t)m->capacity);
        munmap(m->base, (size_t)m->size);
    }
    if (m->fd >= 0) close(m->fd);
    fsdp__heap_free(m->heap);
    free(m->folder);
    free(m);
}

void fsdp__file_memory_free(fsdp__file_memory *list)
{
    for (fsdp__file_memory *m = list, *next; m; m = next) {
        next = m->next;
        memory_free(m);
    }
}

static fsdp_status create(fsdp__file_memory *m, const char *folder)
{
    m->fd = -1;
    m->allocator = (fsdp__allocator){"file", file_alloc, file_free, true};
    if (!(m->folder = fsdp__strdup(folder))) return fsdp_error();
    m->fd = open_nameless(folder);
    if (m->fd < 0)
        return fsdp__fail_errno(FSDP_IO_ERROR,
                                "offload: cannot make a file in the folder %s; choose a folder "
                                "that exists and can be written",
                                folder);
    check_kind(m);
    /* As for the heap of a rank (cpu.c): the range only bounds what can be taken. */
    for (m->size = range_size(folder);; m->size /= 2) {
        void *p = mmap(NULL, (size_t)m->size, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) {
            m->base = p;
            break;
        }
        if (m->size < (int64_t)64 << 20)
            return fsdp__fail_errno(FSDP_NO_MEMORY,
                                    "offload: cannot reserve %lld bytes of address space; raise "
                                    "the limit on virtual memory (ulimit -v)",
                                    (long long)m->size);
    }
    m->heap = fsdp__heap_create(m->size);
    return m->heap ? FSDP_OK : fsdp_error();
}

fsdp__allocator *fsdp__allocator_file(const char *folder, int64_t window)
{
    fsdp__device_state *s = fsdp__device_state_get();
    struct stat st;
    if (!s) return NULL;
    if (!folder || !*folder || stat(folder, &st) != 0 || !S_ISDIR(st.st_mode)) {
        fsdp__fail(FSDP_IO_ERROR, "offload: there is no folder '%s'", folder ? folder : "");
        return NULL;
    }
    fsdp__file_memory *m = s->files;
    while (m && (m->device != st.st_dev || m->inode != st.st_ino))
        m = m->next;
    if (!m) {
        m = fsdp__calloc(1, sizeof *m, "the memory in a file");
        if (!m) return NULL;
        m->device = st.st_dev;
        m->inode = st.st_ino;
        if (create(m, folder) != FSDP_OK) {
            memory_free(m);
            return NULL;
        }
        m->next = s->files;
        s->files = m;
    }
    int64_t wanted = window > 0 ? window : DEFAULT_WINDOW;
    if (m->n == 0 && m->promised == 0) m->window = 0; /* nobody uses it any more */
    if (wanted > m->window) m->window = wanted;
    return &m->allocator;
}

fsdp_status fsdp__offload_allocator(const fsdp_offload_policy *p, const char *what,
                                    fsdp__allocator **out)
{
    *out = NULL;
    fsdp__device_state *s = fsdp__device_state_get();
    if (!s) return fsdp_error();
    if (p->kind < FSDP_OFFLOAD_NONE || p->kind > FSDP_OFFLOAD_FILE)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "offload of %s: kind %d; expected FSDP_OFFLOAD_NONE, _CPU or _FILE", what,
                          (int)p->kind);
    if (p->kind != FSDP_OFFLOAD_FILE && (p->folder || p->window != 0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "offload of %s: folder and window go with FSDP_OFFLOAD_FILE, and kind is "
                          "%s; set the kind, or leave them out",
                          what, p->kind == FSDP_OFFLOAD_CPU ? "FSDP_OFFLOAD_CPU" : "_NONE");
    if (p->kind != FSDP_OFFLOAD_CPU && p->pin_memory)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "offload of %s: pin_memory goes with FSDP_OFFLOAD_CPU; leave it out",
                          what);
    if (p->window < 0)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "offload of %s: a window of %lld bytes; expected 0 (256 MiB) or more",
                          what, (long long)p->window);
    if (p->kind == FSDP_OFFLOAD_CPU && !s->said_same) {
        fsdp__log(FSDP__LOG_INFO,
                  "offload of %s to the CPU: the device is the CPU, so they stay where they are%s",
                  what, p->pin_memory ? ", and pin_memory changes nothing" : "");
        s->said_same = true;
    }
    if (p->kind == FSDP_OFFLOAD_FILE) *out = fsdp__allocator_file(p->folder, p->window);
    return p->kind == FSDP_OFFLOAD_FILE && !*out ? fsdp_error() : FSDP_OK;
}

void fsdp_offload_get(fsdp_offload_stats *out)
{
    if (!out) return;
    const fsdp__device_state *s = fsdp__slot_get(FSDP__SLOT_DEVICE);
    *out = s ? s->offload : (fsdp_offload_stats){0};
}
