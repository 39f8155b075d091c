/*
 * allocator.h - who gives and takes back the bytes of a storage.
 *
 * Bytes live are charged by the storage (accounts by purpose); an allocator
 * only says what it holds beyond them, as reserved bytes. Allocators are used
 * on the rank's compute thread only.
 */
#ifndef FSDP_DEVICE_ALLOCATOR_H
#define FSDP_DEVICE_ALLOCATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/device.h"

typedef struct fsdp__allocator fsdp__allocator;
struct fsdp__allocator {
    const char *name;
    /* bytes > 0, result 64-byte aligned, contents undefined; NULL with the error kept. */
    void *(*alloc)(fsdp__allocator *a, size_t bytes, const char *what);
    void (*free)(fsdp__allocator *a, void *p, size_t bytes);
    bool in_file; /* an allocator of file.h: zeroed, and charged as offloaded bytes */
};

/* The current context's private memory of the CPU: a heap (heap.h) over
 * reserved address space, so that a steady state touches no new pages. */
fsdp__allocator *fsdp__allocator_cpu(void);

/* An allocator over bytes [base, base + size) that the caller has mapped: what is touched and not
 * asked for is reported as the current context's reserved bytes. poison: freed blocks are forbidden
 * to the address sanitizer (not for memory that peers may still read while this rank gives up).
 * NULL: error kept. */
fsdp__allocator *fsdp__allocator_over(const char *name, void *base, int64_t size, int poison);
/* Keeps p until the context is freed, after all rooms above have gone: memory in which tensors may
 * still lie. The last kept is freed first. On failure p stays the caller's. */
fsdp_status fsdp__allocator_keep(void *p, void (*free_fn)(void *));
/* Forgets the bookkeeping and the reserved bytes; the caller unmaps the range. NULL: nothing. */
void fsdp__allocator_over_free(fsdp__allocator *a);

#endif
