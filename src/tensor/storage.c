/*
 * storage.c - bytes with an owner, that can be emptied and filled in place.
 *
 * Invariant: a CPU storage whose data we did not get from the caller is in the
 * accounts of its purpose exactly while data != NULL: in those of memory, or, where
 * its allocator's bytes lie in a file, in those of offloaded bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/file.h"
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

static fsdp_status take(const fsdp__allocator *a, fsdp_purpose p, int64_t bytes, const char *what)
{
    return a && a->in_file ? fsdp__account_offload_take(p, bytes, what)
                           : fsdp__account_take(p, bytes, what);
}

static void give(const fsdp__allocator *a, fsdp_purpose p, int64_t bytes)
{
    if (a && a->in_file)
        fsdp__account_offload_give(p, bytes);
    else
        fsdp__account_give(p, bytes);
}

void fsdp__storage_empty(fsdp__storage *s)
{
    if (!s->data) return;
    if (s->charged) give(s->alloc, s->purpose, s->bytes);
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
    FSDP_TRY(take(alloc, s->purpose, s->bytes, what));
    s->data = alloc->alloc(alloc, (size_t)s->bytes, what);
    if (!s->data) {
        give(alloc, s->purpose, s->bytes);
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
    if (s->charged && s->purpose != p) {
        if (s->alloc && s->alloc->in_file)
            fsdp__account_offload_move(s->purpose, p, s->bytes);
        else
            fsdp__account_move(s->purpose, p, s->bytes);
    }
    s->purpose = p;
}

/* ---- storages in a file ------------------------------------------------------ */

bool fsdp__storage_in_file(const fsdp__storage *s)
{
    return s->alloc && s->alloc->in_file && s->data && s->bytes > 0;
}

bool fsdp__storage_ahead(const fsdp__storage *s)
{
    return !fsdp__storage_in_file(s) || fsdp__file_ahead(s->alloc, s->data);
}

fsdp_status fsdp__storage_use(const fsdp__storage *s)
{
    return fsdp__storage_in_file(s) ? fsdp__file_use(s->alloc, s->data) : FSDP_OK;
}

void fsdp__storage_done(const fsdp__storage *s, bool written)
{
    if (fsdp__storage_in_file(s)) fsdp__file_done(s->alloc, s->data, written);
}

bool fsdp__storage_filled(const fsdp__storage *s)
{
    return s->data != NULL;
}
