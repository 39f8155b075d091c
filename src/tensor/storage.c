/*
 * storage.c - bytes with an owner, that can be emptied and filled in place.
 *
 * Invariant: a CPU storage whose data we did not get from the caller is in the
 * accounts of its purpose exactly while data != NULL.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "tensor/tensor.h"

/* Storages of zero bytes still need an address that says "filled". */
static char empty_bytes[64];

fsdp__storage *fsdp__storage_create(fsdp_device d, int64_t bytes, fsdp_purpose p)
{
    fsdp__storage *s = fsdp__calloc(1, sizeof *s, "a storage");
    if (!s) return NULL;
    s->refs = 1;
    s->device = d;
    s->bytes = bytes;
    s->purpose = p;
    return s;
}

void fsdp__storage_retain(fsdp__storage *s)
{
    s->refs++;
}

void fsdp__storage_empty(fsdp__storage *s)
{
    if (!s->data) return;
    if (s->charged) fsdp__account_give(s->purpose, s->bytes);
    if (s->alloc && s->data != (void *)empty_bytes)
        s->alloc->free(s->alloc, s->data, (size_t)s->bytes);
    else if (s->free_fn)
        s->free_fn(s->data, s->free_arg);
    s->data = NULL;
    s->alloc = NULL;
    s->charged = false;
    s->free_fn = NULL;
}

void fsdp__storage_release(fsdp__storage *s)
{
    if (!s || --s->refs > 0) return;
    fsdp__storage_empty(s);
    free(s);
}

fsdp_status fsdp__storage_fill(fsdp__storage *s, fsdp__allocator *alloc, const char *what)
{
    if (s->data || s->device == FSDP_META) return FSDP_OK;
    if (s->bytes == 0) {
        s->data = empty_bytes;
        return FSDP_OK;
    }
    if (!alloc) alloc = s->home ? s->home : fsdp__allocator_cpu();
    if (!alloc) return fsdp_error();
    FSDP_TRY(fsdp__account_take(s->purpose, s->bytes, what));
    s->data = alloc->alloc(alloc, (size_t)s->bytes, what);
    if (!s->data) {
        fsdp__account_give(s->purpose, s->bytes);
        return fsdp_error();
    }
    s->alloc = alloc;
    s->charged = true;
    return FSDP_OK;
}

fsdp_status fsdp__storage_attach(fsdp__storage *s, void *data, const char *what)
{
    if (s->data) return fsdp__fail(FSDP_INTERNAL, "%s: storage is filled already", what);
    FSDP_TRY(fsdp__account_take(s->purpose, s->bytes, what));
    s->data = s->bytes ? data : empty_bytes;
    s->charged = true;
    return FSDP_OK;
}

void fsdp__storage_set_purpose(fsdp__storage *s, fsdp_purpose p)
{
    if (s->charged && s->purpose != p) fsdp__account_move(s->purpose, p, s->bytes);
    s->purpose = p;
}

bool fsdp__storage_filled(const fsdp__storage *s)
{
    return s->data != NULL;
}
