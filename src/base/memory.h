/*
 * memory.h - small bookkeeping memory (structs, names, tables).
 *
 * These bytes are not in the accounts; tensors' are. On failure: NULL and
 * FSDP_NO_MEMORY kept, naming what asked. Freed with free().
 */
#ifndef FSDP_BASE_MEMORY_H
#define FSDP_BASE_MEMORY_H

#include <stddef.h>

void *fsdp__calloc(size_t count, size_t size, const char *what); /* zeroed; never NULL for 0 */
void *fsdp__realloc(void *p, size_t bytes, const char *what);    /* p stays valid on failure */
char *fsdp__strdup(const char *s);
char *fsdp__strndup(const char *s, size_t n);

/* Stands for something that may be freed before those that point to it. */
typedef struct fsdp__life {
    int refs;
    void *of; /* NULL: it is gone */
} fsdp__life;
fsdp__life *fsdp__life_create(void *of); /* one reference; NULL: error kept */
fsdp__life *fsdp__life_retain(fsdp__life *l);
void fsdp__life_release(void *life); /* NULL: nothing */
void fsdp__life_end(fsdp__life *l);  /* of is gone; releases too */

/* Grows an array so that it holds at least n: items pointer, int or int64_t
 * capacity, element size taken from the pointer. Evaluates to fsdp_status. */
#define FSDP__GROW(items, cap, n, what)                                                            \
    ((n) <= (cap) ? FSDP_OK                                                                        \
                  : fsdp__grow((void **)&(items), sizeof *(items), &(cap), (n), what))
#include "fsdp/status.h"
#include <stdint.h>
fsdp_status fsdp__grow(void **items, size_t size, int64_t *cap, int64_t n, const char *what);

#endif
