/*
 * memory.c - small bookkeeping memory with errors that name what asked.
 */
#include "base/memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"

void *fsdp__calloc(size_t count, size_t size, const char *what)
{
    /* calloc(0) may return NULL, which callers take for a failure. */
    void *p = count && size ? calloc(count, size) : calloc(1, 1);
    if (!p) {
        size_t bytes;
        if (__builtin_mul_overflow(count, size, &bytes)) bytes = SIZE_MAX;
        fsdp__fail_memory(what, bytes);
    }
    return p;
}

void *fsdp__realloc(void *p, size_t bytes, const char *what)
{
    void *q = realloc(p, bytes ? bytes : 1);
    if (!q) fsdp__fail_memory(what, bytes);
    return q;
}

char *fsdp__strdup(const char *s)
{
    return fsdp__strndup(s, strlen(s));
}

char *fsdp__strndup(const char *s, size_t n)
{
    n = strnlen(s, n);
    char *p = malloc(n + 1);
    if (!p) {
        fsdp__fail_memory("a string", n + 1);
        return NULL;
    }
    memcpy(p, s, n);
    p[n] = 0;
    return p;
}

fsdp_status fsdp__grow(void **items, size_t size, int64_t *cap, int64_t n, const char *what)
{
    if (n <= *cap) return FSDP_OK;
    /* Doubling keeps the copying linear in what is added. */
    int64_t wanted = *cap < 8 ? 8 : *cap > INT64_MAX / 2 ? n : *cap * 2;
    if (wanted < n) wanted = n;
    size_t bytes;
    if (__builtin_mul_overflow((uint64_t)wanted, size, &bytes))
        return fsdp__fail_memory(what, SIZE_MAX);
    void *p = realloc(*items, bytes);
    if (!p) return fsdp__fail_memory(what, bytes);
    *items = p;
    *cap = wanted;
    return FSDP_OK;
}

fsdp__life *fsdp__life_create(void *of)
{
    fsdp__life *l = fsdp__calloc(1, sizeof *l, "a life");
    if (l) *l = (fsdp__life){1, of};
    return l;
}

fsdp__life *fsdp__life_retain(fsdp__life *l)
{
    if (l) l->refs++;
    return l;
}

void fsdp__life_release(void *life)
{
    fsdp__life *l = life;
    if (l && --l->refs == 0) free(l);
}

void fsdp__life_end(fsdp__life *l)
{
    if (l) l->of = NULL;
    fsdp__life_release(l);
}
