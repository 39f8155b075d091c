/*
 * cpu.c - the private memory of a rank: a range of reserved address space, backed by use only.
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "device/device_internal.h"

struct fsdp__cpu_memory {
    fsdp__allocator *allocator;
    void *base;
    int64_t size;
};

/* Four times the machine's memory, so that holes between blocks never exhaust it. The thread
 * sanitizer leaves a program little address space, which all ranks of a test share. */
static int64_t range_size(void)
{
#if defined(__SANITIZE_THREAD__)
    return (int64_t)32 << 30;
#else
    int64_t huge = 1 << 21, pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    int64_t physical = pages > 0 && page > 0 ? pages * page : (int64_t)16 << 30;
    return (4 * physical + huge - 1) / huge * huge;
#endif
}

static fsdp__cpu_memory *cpu_create(void)
{
    fsdp__cpu_memory *m = fsdp__calloc(1, sizeof *m, "the memory of a rank");
    if (!m) return NULL;
    /* A limit on address space or strict overcommit may refuse the whole: the range only bounds
     * what can be allocated, so half of it serves as well. */
    for (m->size = range_size();; m->size /= 2) {
        m->base = mmap(NULL, (size_t)m->size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (m->base != MAP_FAILED) break;
        if (m->size < (int64_t)64 << 20) {
            fsdp__fail_errno(FSDP_NO_MEMORY,
                             "cannot reserve %lld bytes of address space for a rank's memory; "
                             "raise the limit on virtual memory (ulimit -v)",
                             (long long)m->size);
            free(m);
            return NULL;
        }
    }
    /* Huge pages where the system offers them: fewer faults and table walks. Advice only. */
    (void)madvise(m->base, (size_t)m->size, MADV_HUGEPAGE);
    m->allocator = fsdp__allocator_over("cpu", m->base, m->size, 1);
    if (m->allocator) return m;
    fsdp__cpu_memory_free(m);
    return NULL;
}

void fsdp__cpu_memory_free(fsdp__cpu_memory *m)
{
    if (!m) return;
    fsdp__allocator_over_free(m->allocator);
    munmap(m->base, (size_t)m->size);
    free(m);
}

fsdp__allocator *fsdp__allocator_cpu(void)
{
    fsdp__device_state *s = fsdp__device_state_get();
    if (!s) return NULL;
    if (!s->cpu) s->cpu = cpu_create();
    return s->cpu ? s->cpu->allocator : NULL;
}
