/*
 * safetensors.c - opening a safetensors file and reading ranges of it.
 *
 * Invariants: a reader exists only for a file whose whole header is valid and whose ranges tile the
 * data exactly; so every offset and size that it hands out lies within the file as it was opened.
 * Data is read with pread and never mapped: a file that shrinks is then an error, not a signal, and
 * large sequential reads stay fast on network storage.
 */
#include "format/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "format/file.h"
#include "format/safetensors_internal.h"

struct fsdp__st {
    char *path;
    int fd;
    fsdp__st_header header;
    int64_t bytes_read;
};

/* ---- dtypes ------------------------------------------------------------------------ */

static const fsdp__st_dtype dtypes[] = {
    {"BOOL", 8, FSDP_BOOL},
    {"F4", 4, FSDP_DTYPE_NONE},
    {"F6_E2M3", 6, FSDP_DTYPE_NONE},
    {"F6_E3M2", 6, FSDP_DTYPE_NONE},
    {"U8", 8, FSDP_U8},
    {"I8", 8, FSDP_I8},
    {"F8_E5M2", 8, FSDP_DTYPE_NONE},
    {"F8_E4M3", 8, FSDP_DTYPE_NONE},
    {"F8_E8M0", 8, FSDP_DTYPE_NONE},
    {"F8_E4M3FNUZ", 8, FSDP_DTYPE_NONE},
    {"F8_E5M2FNUZ", 8, FSDP_DTYPE_NONE},
    {"I16", 16, FSDP_I16},
    {"U16", 16, FSDP_U16},
    {"F16", 16, FSDP_F16},
    {"BF16", 16, FSDP_BF16},
    {"I32", 32, FSDP_I32},
    {"U32", 32, FSDP_U32},
    {"F32", 32, FSDP_F32},
    {"C64", 64, FSDP_DTYPE_NONE},
    {"F64", 64, FSDP_F64},
    {"I64", 64, FSDP_I64},
    {"U64", 64, FSDP_U64},
};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

const fsdp__st_dtype *fsdp__st_dtype_find(const char *name)
{
    for (int i = 0; i < N_DTYPES; i++)
        if (!strcmp(dtypes[i].name, name)) return &dtypes[i];
    return NULL;
}

int fsdp__st_dtype_rank(fsdp_dtype t)
{
    for (int i = 0; i < N_DTYPES; i++)
        if (dtypes[i].dtype == t) return i;
    return -1;
}

/* ---- opening ------------------------------------------------------------------------- */

/* Reads N and the header's text; all limits before the allocation. */
static fsdp_status read_header(fsdp__st *st, int64_t file_size, size_t *n_out)
{
    unsigned char raw[8];
    uint64_t n = 0;
    if (file_size < 8)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: found a file of %lld bytes, expected at least 8 (the length of the "
                          "header): it is truncated or no safetensors file",
                          st->path, (long long)file_size);
    FSDP_TRY(fsdp__file_pread(st->fd, raw, 8, 0, st->path));
    for (int i = 7; i >= 0; i--)
        n = n << 8 | raw[i];
    if (n > FSDP__ST_HEADER_LIMIT)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: found a header of %llu bytes, expected at most %d: this is probably "
                          "no safetensors file",
                          st->path, (unsigned long long)n, FSDP__ST_HEADER_LIMIT);
    if (n > (uint64_t)file_size - 8)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: found a header of %llu bytes in a file of %lld bytes, expected at "
                          "most %lld: the file is truncated; get it again",
                          st->path, (unsigned long long)n, (long long)file_size,
                          (long long)file_size - 8);
    st->header.text = fsdp__realloc(NULL, (size_t)n + 1, "header of a safetensors file");
    if (!st->header.text) return FSDP_NO_MEMORY;
    FSDP_TRY(fsdp__file_pread(st->fd, st->header.text, (size_t)n, 8, st->path));
    st->header.text[n] = 0;
    st->bytes_read = 8 + (int64_t)n;
    *n_out = (size_t)n;
    return FSDP_OK;
}

/* The order of the checks is the reference reader's, so both name the same fault first. */
static fsdp_status open_and_check(fsdp__st *st)
{
    struct stat info;
    size_t n = 0;
    do {
        st->fd = open(st->path, O_RDONLY | O_CLOEXEC);
    } while (st->fd < 0 && errno == EINTR);
    if (st->fd < 0)
        return fsdp__fail_errno(errno == ENOENT || errno == ENOTDIR ? FSDP_NOT_FOUND
                                                                    : FSDP_IO_ERROR,
                                "cannot open the safetensors file %s", st->path);
    if (fstat(st->fd, &info)) return fsdp__fail_errno(FSDP_IO_ERROR, "cannot stat %s", st->path);
    if (!S_ISREG(info.st_mode))
        return fsdp__fail(FSDP_INVALID_DATA, "%s: found %s, expected a safetensors file", st->path,
                          S_ISDIR(info.st_mode) ? "a folder" : "something that is no regular file");
    FSDP_TRY(read_header(st, (int64_t)info.st_size, &n));
    FSDP_TRY(fsdp__st_header_parse(&st->header, n, st->path));
    return fsdp__st_header_check(&st->header, n, (int64_t)info.st_size, st->path);
}

fsdp__st *fsdp__st_open(const char *path)
{
    fsdp__st *st = fsdp__calloc(1, sizeof *st, "safetensors reader");
    if (!st) return NULL;
    st->fd = -1;
    st->path = fsdp__strdup(path);
    if (!st->path || open_and_check(st) != FSDP_OK) {
        fsdp__st_close(st);
        return NULL;
    }
    return st;
}

void fsdp__st_close(fsdp__st *st)
{
    if (!st) return;
    fsdp__st_header_free(&st->header);
    if (st->fd >= 0) close(st->fd);
    free(st->path);
    free(st);
}

/* ---- looking ---------------------------------------------------------------------------- */

const char *fsdp__st_path(const fsdp__st *st)
{
    return st->path;
}

int64_t fsdp__st_count(const fsdp__st *st)
{
    return st->header.n;
}

const fsdp__st_tensor *fsdp__st_at(const fsdp__st *st, int64_t i)
{
    return &st->header.sorted[i]->t;
}

/* A name with a NUL inside is reached by fsdp__st_at alone. */
const fsdp__st_tensor *fsdp__st_find(const fsdp__st *st, const char *name)
{
    const fsdp__value *v = fsdp__map_gets(st->header.by_name, name);
    return v ? &st->header.items[v->i].t : NULL;
}

int64_t fsdp__st_meta_count(const fsdp__st *st)
{
    return st->header.n_meta;
}

const char *fsdp__st_meta_key(const fsdp__st *st, int64_t i)
{
    return st->header.meta[i].key;
}

const char *fsdp__st_meta_value(const fsdp__st *st, int64_t i)
{
    return st->header.meta[i].value;
}

/* A few pairs: a walk is as good as a map. */
const char *fsdp__st_meta(const fsdp__st *st, const char *key)
{
    for (int64_t i = 0; i < st->header.n_meta; i++)
        if (!strcmp(st->header.meta[i].key, key)) return st->header.meta[i].value;
    return NULL;
}

/* ---- reading ------------------------------------------------------------------------------- */

fsdp_status fsdp__st_read(fsdp__st *st, const fsdp__st_tensor *t, int64_t offset, int64_t bytes,
                          void *dst)
{
    if (t->dtype == FSDP_DTYPE_NONE)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "%s: tensor '%s': found the dtype %s, expected one that this library "
                          "computes with (F32, BF16, F16, F64, integers, BOOL): convert the file",
                          st->path, fsdp__show(t->name, t->name_len).text, t->dtype_name);
    if (offset < 0 || bytes < 0 || offset > t->bytes || bytes > t->bytes - offset)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s: tensor '%s': asked for %lld bytes from byte %lld on, expected a "
                          "range within its %lld bytes",
                          st->path, fsdp__show(t->name, t->name_len).text, (long long)bytes,
                          (long long)offset, (long long)t->bytes);
    FSDP_TRY(fsdp__file_pread(st->fd, dst, (size_t)bytes, t->offset + offset, st->path));
    st->bytes_read += bytes;
    return FSDP_OK;
}

int64_t fsdp__st_bytes_read(const fsdp__st *st)
{
    return st->bytes_read;
}
