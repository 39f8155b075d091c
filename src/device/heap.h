/*
 * heap.h - best fit over one contiguous range of address space.
 *
 * The range is given (anonymous, or part of a shared segment); its pages are
 * touched by use only. Metadata lie outside the range. Freed neighbours are
 * joined; among equal fits the lowest address wins, so the same sequence of
 * calls gives the same offsets on every rank: shared copies rely on it.
 * Invariants: blocks tile [0, top); no two free blocks touch; every block's
 * offset and size are multiples of 64 (blocks of 64 KiB and more: of 4096).
 */
#ifndef FSDP_DEVICE_HEAP_H
#define FSDP_DEVICE_HEAP_H

#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__heap fsdp__heap;

fsdp__heap *fsdp__heap_create(int64_t size); /* size of the range; NULL: error kept */
void fsdp__heap_free(fsdp__heap *h);

/* Offset of a block of at least bytes, -1 with FSDP_NO_MEMORY kept. *clock (may be NULL): the
 * largest clock given when any part of the block was freed, 0 if never used before. */
int64_t fsdp__heap_take(fsdp__heap *h, int64_t bytes, uint64_t *clock, const char *what);
/* clock: what a later taker of these bytes must wait for (see shared copies). */
void fsdp__heap_give(fsdp__heap *h, int64_t offset, uint64_t clock);

int64_t fsdp__heap_live(const fsdp__heap *h);    /* bytes in taken blocks, rounded */
int64_t fsdp__heap_touched(const fsdp__heap *h); /* bytes ever taken and not trimmed */
/* Gives whole free pages back: calls unmap(arg, offset, bytes) for each free
 * run; afterwards touched == live up to page rounding. */
void fsdp__heap_trim(fsdp__heap *h, void (*unmap)(void *arg, int64_t offset, int64_t bytes),
                     void *arg);
/* 0 if every invariant holds (tests). */
int fsdp__heap_check(const fsdp__heap *h);

#endif
