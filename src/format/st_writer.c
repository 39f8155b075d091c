/*
 * st_writer.c - writing a safetensors file.
 *
 * The bytes are those of the reference writer: dtypes of higher rank first, then names by bytes;
 * no blanks in the header; trailing spaces make its length a multiple of 8. So a file that is read
 * and written again is the same file.
 *
 * Invariants: the declared list does not change after begin; `written` of a tensor counts each byte
 * once; the file has its final name only after finish succeeded.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "format/file.h"
#include "format/json.h"
#include "format/safetensors_internal.h"
#include "format/utf8.h"

typedef struct item {
    char *name;
    size_t name_len;
    fsdp_dtype dtype;
    int rank; /* of the dtype in the format's list */
    int ndim;
    int64_t *shape; /* (ndim) */
    int64_t bytes;
    int64_t offset;  /* relative to the data */
    int64_t written; /* bytes so far */
    int64_t index;   /* order of declaration */
} item;

struct fsdp__st_writer {
    char *path;
    item *items;
    int64_t n, cap;
    item **sorted; /* in the order of the file; NULL before begin */
    fsdp__map *by_name;
    fsdp__str meta; /* ,"key":"value" ... */
    fsdp__map *meta_keys;
    fsdp__temp_file file;
    int64_t data_at; /* 8 + N */
    int64_t total;   /* bytes of the file */
};

/* ---- declaring -------------------------------------------------------------------------- */

fsdp__st_writer *fsdp__st_writer_create(const char *path)
{
    fsdp__st_writer *w = fsdp__calloc(1, sizeof *w, "safetensors writer");
    if (!w) return NULL;
    w->file.fd = -1;
    w->path = fsdp__strdup(path);
    w->by_name = fsdp__map_create();
    w->meta_keys = fsdp__map_create();
    if (w->path && w->by_name && w->meta_keys) return w;
    fsdp__st_writer_free(w);
    return NULL;
}

void fsdp__st_writer_free(fsdp__st_writer *w)
{
    if (!w) return;
    fsdp__temp_abort(&w->file);
    for (int64_t i = 0; i < w->n; i++) {
        free(w->items[i].name);
        free(w->items[i].shape);
    }
    free(w->items);
    free(w->sorted);
    fsdp__map_free(w->by_name);
    fsdp__map_free(w->meta_keys);
    fsdp__str_free(&w->meta);
    free(w->path);
    free(w);
}

/* Declarations stand before begin, and text in a header is UTF-8. */
static fsdp_status check_text(const fsdp__st_writer *w, const char *what, const char *s)
{
    size_t n = strlen(s), good = fsdp__utf8_check(s, n);
    if (w->sorted)
        return fsdp__fail(FSDP_INVALID_STATE, "%s: %s '%s' came after the header was written",
                          w->path, what, fsdp__show(s, good).text);
    if (good != n)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s: %s '%s...': found the byte 0x%02x at %zu, expected UTF-8 text",
                          w->path, what, fsdp__show(s, good).text, (unsigned)(unsigned char)s[good],
                          good);
    return FSDP_OK;
}

/* Metadata is kept as header text from the start; only its keys are remembered, to find doubles. */
static void add_pair(fsdp__str *out, const char *key, const char *value)
{
    if (out->len) fsdp__str_add(out, ",");
    fsdp__json_quote(out, key, strlen(key));
    fsdp__str_add(out, ":");
    fsdp__json_quote(out, value, strlen(value));
}

fsdp_status fsdp__st_writer_meta(fsdp__st_writer *w, const char *key, const char *value)
{
    FSDP_TRY(check_text(w, "the metadata key", key));
    FSDP_TRY(check_text(w, "the metadata value", value));
    if (fsdp__map_gets(w->meta_keys, key))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: the metadata key '%s' was set twice", w->path,
                          fsdp__show(key, strlen(key)).text);
    FSDP_TRY(fsdp__map_sets(w->meta_keys, key, (fsdp__value){.i = 1}));
    add_pair(&w->meta, key, value);
    return FSDP_OK;
}

/* Fills bytes of it; w only for messages. */
static fsdp_status measure(const fsdp__st_writer *w, item *it)
{
    int64_t bytes = (int64_t)fsdp_dtype_size(it->dtype);
    bool empty = false;
    for (int d = 0; d < it->ndim; d++)
        empty |= it->shape[d] == 0;
    for (int d = 0; d < it->ndim; d++) {
        if (it->shape[d] < 0)
            return fsdp__fail(FSDP_INVALID_SHAPE,
                              "%s: tensor '%s': found %lld as size of dim %d, expected 0 or more",
                              w->path, it->name, (long long)it->shape[d], d);
        /* Readers multiply in order, so also a product with a zero behind it has to fit. */
        if (__builtin_mul_overflow(bytes, it->shape[d] ? it->shape[d] : 1, &bytes))
            return fsdp__fail(FSDP_INVALID_SHAPE,
                              "%s: tensor '%s': found a shape of more than 2^63 bytes", w->path,
                              it->name);
    }
    it->bytes = empty ? 0 : bytes;
    return FSDP_OK;
}

/* Nothing is kept of a tensor that is refused. */
fsdp_status fsdp__st_writer_add(fsdp__st_writer *w, const char *name, fsdp_dtype dtype, int ndim,
                                const int64_t *shape)
{
    FSDP_TRY(check_text(w, "the tensor", name));
    int rank = dtype == FSDP_DTYPE_NONE ? -1 : fsdp__st_dtype_rank(dtype);
    if (rank < 0)
        return fsdp__fail(FSDP_INVALID_DTYPE,
                          "%s: tensor '%s': found dtype %s, expected a real one", w->path, name,
                          fsdp_dtype_name(dtype));
    if (!strcmp(name, "__metadata__") || fsdp__map_gets(w->by_name, name))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: the tensor name '%s' is taken", w->path,
                          fsdp__show(name, strlen(name)).text);
    FSDP_TRY(FSDP__GROW(w->items, w->cap, w->n + 1, "tensors to write"));
    item it = {.name = fsdp__strdup(name),
               .name_len = strlen(name),
               .dtype = dtype,
               .rank = rank,
               .ndim = ndim,
               .index = w->n};
    it.shape = fsdp__calloc((size_t)ndim, sizeof *it.shape, "shape of a tensor");
    fsdp_status s = it.name && it.shape ? FSDP_OK : FSDP_NO_MEMORY;
    if (s == FSDP_OK && ndim) memcpy(it.shape, shape, (size_t)ndim * sizeof *shape);
    if (s == FSDP_OK) s = measure(w, &it);
    if (s == FSDP_OK) s = fsdp__map_sets(w->by_name, name, (fsdp__value){.i = w->n});
    if (s != FSDP_OK) {
        free(it.shape);
        free(it.name);
        return s;
    }
    w->items[w->n++] = it;
    return FSDP_OK;
}

/* ---- layout and header ------------------------------------------------------------------- */

/* Wide types first makes every tensor aligned to its element size without padding. */
static int by_layout(const void *a, const void *b)
{
    const item *x = *(item *const *)a, *y = *(item *const *)b;
    if (x->rank != y->rank) return x->rank > y->rank ? -1 : 1;
    return strcmp(x->name, y->name); /* names are unique and hold no NUL */
}

/* Offsets are relative to the data; the header's length is not known yet. */
static fsdp_status lay_out(fsdp__st_writer *w)
{
    w->sorted = fsdp__calloc((size_t)w->n, sizeof *w->sorted, "tensors to write");
    if (!w->sorted) return FSDP_NO_MEMORY;
    for (int64_t i = 0; i < w->n; i++)
        w->sorted[i] = &w->items[i];
    if (w->n) qsort(w->sorted, (size_t)w->n, sizeof *w->sorted, by_layout);
    int64_t at = 0;
    for (int64_t i = 0; i < w->n; i++) {
        w->sorted[i]->offset = at;
        if (__builtin_add_overflow(at, w->sorted[i]->bytes, &at) ||
            at > INT64_MAX - FSDP__ST_HEADER_LIMIT - 16)
            return fsdp__fail(FSDP_INVALID_SHAPE, "%s: found more than 2^63 bytes of tensors",
                              w->path);
    }
    w->total = at;
    return FSDP_OK;
}

static void add_tensor(fsdp__str *out, const item *it)
{
    static const char *const names[] = {
#define FSDP__X(e, name, st, bytes, fp) st,
        FSDP_DTYPE_LIST(FSDP__X)
#undef FSDP__X
    };
    fsdp__json_quote(out, it->name, it->name_len);
    fsdp__str_addf(out, ":{\"dtype\":\"%s\",\"shape\":[", names[it->dtype]);
    for (int d = 0; d < it->ndim; d++)
        fsdp__str_addf(out, "%s%lld", d ? "," : "", (long long)it->shape[d]);
    fsdp__str_addf(out, "],\"data_offsets\":[%lld,%lld]}", (long long)it->offset,
                   (long long)(it->offset + it->bytes));
}

/* 8 bytes of length and the padded header, ready to be written. */
static fsdp_status make_header(fsdp__st_writer *w, char **out, size_t *len)
{
    fsdp__str s = {0}, pad = {0};
    fsdp__str_add_n(&s, "\0\0\0\0\0\0\0\0", 8);
    fsdp__str_add(&s, "{\"__metadata__\":{");
    if (!fsdp__map_gets(w->meta_keys, "format")) {
        add_pair(&pad, "format", "pt");
        fsdp__str_add(&s, fsdp__str_get(&pad));
        if (w->meta.len) fsdp__str_add(&s, ",");
        fsdp__str_free(&pad);
    }
    fsdp__str_add_n(&s, fsdp__str_get(&w->meta), w->meta.len);
    s.failed |= w->meta.failed;
    fsdp__str_add(&s, "}");
    for (int64_t i = 0; i < w->n; i++) {
        fsdp__str_add(&s, ",");
        add_tensor(&s, w->sorted[i]);
    }
    fsdp__str_add(&s, "}");
    while (s.len % 8 && !s.failed)
        fsdp__str_add(&s, " ");
    uint64_t n = s.len - 8;
    *len = s.len;
    *out = fsdp__str_take(&s);
    if (!*out) return FSDP_NO_MEMORY;
    for (int i = 0; i < 8; i++)
        (*out)[i] = (char)(n >> (8 * i) & 0xff);
    if (n > FSDP__ST_HEADER_LIMIT)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "%s: found a header of %llu bytes, expected at most %d, as readers accept "
            "no longer one: write fewer tensors or less metadata a file",
            w->path, (unsigned long long)n, FSDP__ST_HEADER_LIMIT);
    return FSDP_OK;
}

/* A full disk is found before hours of work, not in the middle of the data. */
static fsdp_status reserve(fsdp__st_writer *w)
{
    int e;
    do {
        e = fallocate(w->file.fd, 0, 0, (off_t)w->total) ? errno : 0;
    } while (e == EINTR);
    if (e == EOPNOTSUPP || e == ENOSYS) {
        do {
            e = ftruncate(w->file.fd, (off_t)w->total) ? errno : 0;
        } while (e == EINTR);
    }
    if (!e) return FSDP_OK;
    char *dir = fsdp__path_dir(w->path);
    int64_t room = -1;
    if (!dir) return FSDP_NO_MEMORY;
    fsdp__dir_available(dir, &room);
    free(dir);
    errno = e;
    return fsdp__fail_errno(FSDP_IO_ERROR,
                            "cannot reserve %lld bytes for %s (%lld are free there; free space or "
                            "choose another folder)",
                            (long long)w->total, w->path, (long long)room);
}

fsdp_status fsdp__st_writer_begin(fsdp__st_writer *w)
{
    char *header = NULL;
    size_t len = 0;
    fsdp_status s;
    if (w->sorted)
        return fsdp__fail(FSDP_INVALID_STATE, "%s: the header was written before", w->path);
    FSDP_GO(lay_out(w));
    FSDP_GO(make_header(w, &header, &len));
    w->data_at = (int64_t)len;
    w->total += (int64_t)len;
    FSDP_GO(fsdp__temp_open(&w->file, w->path));
    FSDP_GO(reserve(w));
    FSDP_GO(fsdp__file_pwrite(w->file.fd, header, len, 0, w->path));
done:
    if (s != FSDP_OK) fsdp__temp_abort(&w->file);
    free(header);
    return s;
}

/* ---- data ----------------------------------------------------------------------------------- */

/* Counting bytes finds both a range that was forgotten and one that came twice. */
static fsdp_status write_item(fsdp__st_writer *w, item *it, int64_t offset, int64_t bytes,
                              const void *src)
{
    if (offset < 0 || bytes < 0 || offset > it->bytes || bytes > it->bytes - offset)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s: tensor '%s': given %lld bytes for byte %lld on, expected a range "
                          "within its %lld bytes",
                          w->path, it->name, (long long)bytes, (long long)offset,
                          (long long)it->bytes);
    if (bytes > it->bytes - it->written)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: tensor '%s': given %lld bytes after %lld of %lld were written: a "
                          "range was written twice",
                          w->path, it->name, (long long)bytes, (long long)it->written,
                          (long long)it->bytes);
    if (w->file.fd < 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: no file is open: the header was not written, or writing failed "
                          "before",
                          w->path);
    fsdp_status s = fsdp__file_pwrite(w->file.fd, src, (size_t)bytes,
                                      w->data_at + it->offset + offset, w->path);
    /* Half a file is of no use to anyone, and its bytes may be what the disk lacks. */
    if (s != FSDP_OK)
        fsdp__temp_abort(&w->file);
    else
        it->written += bytes;
    return s;
}

fsdp_status fsdp__st_writer_write(fsdp__st_writer *w, const char *name, int64_t offset,
                                  int64_t bytes, const void *src)
{
    const fsdp__value *v = fsdp__map_gets(w->by_name, name);
    if (!v)
        return fsdp__fail(FSDP_NOT_FOUND, "%s: the tensor '%s' was not declared", w->path,
                          fsdp__show(name, strlen(name)).text);
    return write_item(w, &w->items[v->i], offset, bytes, src);
}

fsdp_status fsdp__st_writer_check(const fsdp__st_writer *w)
{
    if (w->file.fd < 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: nothing to finish: the header was not written, or writing failed "
                          "before",
                          w->path);
    for (int64_t i = 0; i < w->n; i++)
        if (w->items[i].written != w->items[i].bytes)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "%s: tensor '%s': found %lld bytes written, expected %lld", w->path,
                              w->items[i].name, (long long)w->items[i].written,
                              (long long)w->items[i].bytes);
    return FSDP_OK;
}

/* A file that is not complete is removed at once: nobody can use it. */
fsdp_status fsdp__st_writer_finish(fsdp__st_writer *w)
{
    fsdp_status s = fsdp__st_writer_check(w);
    if (s == FSDP_OK) return fsdp__temp_commit(&w->file);
    fsdp__temp_abort(&w->file);
    return s;
}

/* ---- at once ----------------------------------------------------------------------------------
 */

enum { PIECE = 4 << 20 };

/* In the order of the file, so that a disk sees one sequential write. */
static fsdp_status write_entries(fsdp__st_writer *w, const fsdp__st_entry *entries,
                                 fsdp__st_fill fill, void *arg, void **buf)
{
    for (int64_t i = 0; i < w->n; i++) {
        item *it = w->sorted[i];
        const fsdp__st_entry *e = &entries[it->index];
        if (e->data || !it->bytes) {
            FSDP_TRY(write_item(w, it, 0, it->bytes, e->data));
            continue;
        }
        if (!fill)
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "%s: tensor '%s': found neither data nor a function that gives it",
                              w->path, it->name);
        if (!*buf && !(*buf = fsdp__realloc(NULL, PIECE, "a piece of a tensor to write")))
            return FSDP_NO_MEMORY;
        for (int64_t at = 0; at < it->bytes;) {
            int64_t n = it->bytes - at < PIECE ? it->bytes - at : PIECE;
            FSDP_TRY(fill(arg, it->index, at, n, *buf));
            FSDP_TRY(write_item(w, it, at, n, *buf));
            at += n;
        }
    }
    return FSDP_OK;
}

fsdp_status fsdp__st_write(const char *path, const fsdp__st_entry *entries, int64_t n,
                           const fsdp__st_pair *meta, int64_t n_meta, fsdp__st_fill fill, void *arg)
{
    void *buf = NULL;
    fsdp_status s;
    fsdp__st_writer *w = fsdp__st_writer_create(path);
    if (!w) return FSDP_NO_MEMORY;
    for (int64_t i = 0; i < n_meta; i++)
        FSDP_GO(fsdp__st_writer_meta(w, meta[i].key, meta[i].value));
    for (int64_t i = 0; i < n; i++)
        FSDP_GO(fsdp__st_writer_add(w, entries[i].name, entries[i].dtype, entries[i].ndim,
                                    entries[i].shape));
    FSDP_GO(fsdp__st_writer_begin(w));
    FSDP_GO(write_entries(w, entries, fill, arg, &buf));
    s = fsdp__st_writer_finish(w);
done:
    free(buf);
    fsdp__st_writer_free(w);
    return s;
}
