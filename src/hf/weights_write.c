/*
 * weights_write.c - writing the weight files of a Hugging Face folder.
 *
 * The cut into files is huggingface_hub's: tensors in the order in which they were declared; one
 * that is larger than the limit has a file of its own, while the file that is being filled stays
 * open; else a new file begins where the limit would be passed. Files are numbered as they close.
 *
 * Until finish all files have temporary names. finish first removes the old index, so a crash in
 * the middle never leaves an index that speaks of files of two saves.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"
#include "format/file.h"
#include "format/json.h"
#include "hf/weights.h"

typedef struct item {
    char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t *shape; /* (ndim) */
    int64_t bytes;
    int64_t file; /* -1: in the file that is being filled */
} item;

struct fsdp__hf_writer {
    char *folder;
    int64_t limit;
    item *items;
    int64_t n, cap;
    fsdp__map *by_name;      /* to an index of items */
    fsdp__st_writer **files; /* (n_files) NULL before begin */
    int64_t n_files;
};

static const char index_name[] = "model.safetensors.index.json";

/* ---- declaring ---- */

fsdp__hf_writer *fsdp__hf_writer_create(const char *folder, int64_t shard_limit)
{
    fsdp__hf_writer *w = fsdp__calloc(1, sizeof *w, "weights to write");
    if (!w) return NULL;
    w->limit = shard_limit > 0 ? shard_limit : FSDP__HF_SHARD_LIMIT;
    w->folder = fsdp__strdup(folder);
    w->by_name = fsdp__map_create();
    if (w->folder && w->by_name) return w;
    fsdp__hf_writer_free(w);
    return NULL;
}

void fsdp__hf_writer_free(fsdp__hf_writer *w)
{
    if (!w) return;
    for (int64_t i = 0; i < w->n_files; i++)
        fsdp__st_writer_free(w->files[i]);
    free(w->files);
    for (int64_t i = 0; i < w->n; i++) {
        free(w->items[i].name);
        free(w->items[i].shape);
    }
    free(w->items);
    fsdp__map_free(w->by_name);
    free(w->folder);
    free(w);
}

static fsdp_status not_begun(const fsdp__hf_writer *w)
{
    if (!w->files) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_STATE, "%s: a tensor was declared after the files were begun",
                      w->folder);
}

/* The file of a tensor is chosen at begin, when all sizes are known. */
fsdp_status fsdp__hf_writer_add(fsdp__hf_writer *w, const char *name, fsdp_dtype dtype, int ndim,
                                const int64_t *shape)
{
    FSDP_TRY(not_begun(w));
    if (fsdp__map_gets(w->by_name, name))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: the tensor '%s' was declared twice",
                          w->folder, name);
    FSDP_TRY(FSDP__GROW(w->items, w->cap, w->n + 1, "weights to write"));
    item it = {.name = fsdp__strdup(name), .dtype = dtype, .ndim = ndim, .file = -1};
    it.shape = fsdp__calloc((size_t)ndim, sizeof *it.shape, "shape of a weight");
    it.bytes = (int64_t)fsdp_dtype_size(dtype);
    fsdp_status s = it.name && it.shape ? FSDP_OK : FSDP_NO_MEMORY;
    for (int d = 0; d < ndim && s == FSDP_OK; d++) {
        it.shape[d] = shape[d];
        if (shape[d] < 0 || __builtin_mul_overflow(it.bytes, shape[d], &it.bytes))
            s = fsdp__fail(FSDP_INVALID_SHAPE, "%s: tensor '%s': found %lld as size of dim %d",
                           w->folder, name, (long long)shape[d], d);
    }
    if (s == FSDP_OK) s = fsdp__map_sets(w->by_name, name, (fsdp__value){.i = w->n});
    if (s != FSDP_OK) {
        free(it.shape);
        free(it.name);
        return s;
    }
    w->items[w->n++] = it;
    return FSDP_OK;
}

/* ---- the cut into files ---- */

/* Gives the file that is being filled, items [from, to) without a file yet, the next number. */
static void close_file(fsdp__hf_writer *w, int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i++)
        if (w->items[i].file < 0) w->items[i].file = w->n_files;
    w->n_files++;
}

static void cut(fsdp__hf_writer *w)
{
    int64_t size = 0, from = 0, in_file = 0;
    w->n_files = 0;
    for (int64_t i = 0; i < w->n; i++) {
        item *it = &w->items[i];
        if (it->bytes > w->limit) {
            it->file = w->n_files++;
            continue;
        }
        if (in_file && size + it->bytes > w->limit) {
            close_file(w, from, i);
            from = i;
            size = in_file = 0;
        }
        size += it->bytes;
        in_file++;
    }
    if (in_file || !w->n_files) close_file(w, from, w->n);
}

/* The name of file i of n. The caller frees it. */
static char *shard_name(int64_t i, int64_t n)
{
    fsdp__str s = {0};
    if (n == 1)
        fsdp__str_add(&s, "model.safetensors");
    else
        fsdp__str_addf(&s, "model-%05lld-of-%05lld.safetensors", (long long)i + 1, (long long)n);
    return fsdp__str_take(&s);
}

static fsdp__st_writer *make_file(const fsdp__hf_writer *w, int64_t i, int64_t n)
{
    char *name = shard_name(i, n);
    char *path = name ? fsdp__path_join(w->folder, name) : NULL;
    fsdp__st_writer *f = path ? fsdp__st_writer_create(path) : NULL;
    free(path);
    free(name);
    return f;
}

/* All space is reserved before the first byte is written, so a full disk stops the save here. */
fsdp_status fsdp__hf_writer_begin(fsdp__hf_writer *w)
{
    FSDP_TRY(not_begun(w));
    cut(w);
    int64_t n = w->n_files;
    w->n_files = 0; /* counts those that were made, for free */
    w->files = fsdp__calloc((size_t)n, sizeof *w->files, "weight files to write");
    if (!w->files) return FSDP_NO_MEMORY;
    for (; w->n_files < n; w->n_files++) {
        fsdp__st_writer *f = make_file(w, w->n_files, n);
        if (!f) return FSDP_NO_MEMORY;
        w->files[w->n_files] = f;
    }
    for (int64_t i = 0; i < w->n; i++) {
        const item *it = &w->items[i];
        FSDP_TRY(fsdp__st_writer_add(w->files[it->file], it->name, it->dtype, it->ndim, it->shape));
    }
    for (int64_t i = 0; i < n; i++)
        FSDP_TRY(fsdp__st_writer_begin(w->files[i]));
    return FSDP_OK;
}

fsdp_status fsdp__hf_writer_write(fsdp__hf_writer *w, const char *name, int64_t offset,
                                  int64_t bytes, const void *src)
{
    const fsdp__value *v = fsdp__map_gets(w->by_name, name);
    if (!v || !w->files)
        return fsdp__fail(FSDP_INVALID_STATE, "%s: the tensor '%s' was %s", w->folder, name,
                          v ? "written before the files were begun" : "not declared");
    return fsdp__st_writer_write(w->files[w->items[v->i].file], name, offset, bytes, src);
}

/* ---- finishing ---- */

/* model.safetensors or model-ddddd-of-ddddd.safetensors, perhaps with .index.json behind it. */
static bool is_weight_file(const char *name)
{
    static const char form[] = "-ddddd-of-ddddd";
    if (!fsdp__starts_with(name, "model")) return false;
    name += 5;
    if (*name == '-') {
        for (const char *f = form; *f; f++, name++)
            if (*f == 'd' ? *name < '0' || *name > '9' : *name != *f) return false;
    }
    return !strcmp(name, ".safetensors") || !strcmp(name, ".safetensors.index.json");
}

/* Weight files of an earlier save would be loaded instead of, or beside, the new ones. */
static fsdp_status remove_stale(const fsdp__hf_writer *w)
{
    char **names;
    int64_t n;
    fsdp_status s = FSDP_OK;
    FSDP_TRY(fsdp__dir_list(w->folder, &names, &n));
    for (int64_t i = 0; i < n && s == FSDP_OK; i++) {
        bool ours = w->n_files > 1 && !strcmp(names[i], index_name);
        for (int64_t k = 0; k < w->n_files && !ours; k++) {
            char *name = shard_name(k, w->n_files);
            if (!name) s = FSDP_NO_MEMORY;
            ours = !name || !strcmp(names[i], name);
            free(name);
        }
        if (ours || !is_weight_file(names[i]) || s != FSDP_OK) continue;
        char *path = fsdp__path_join(w->folder, names[i]);
        s = path ? fsdp__file_remove(path) : FSDP_NO_MEMORY;
        free(path);
    }
    fsdp__dir_list_free(names, n);
    return s == FSDP_OK ? fsdp__dir_sync(w->folder) : s;
}

/* {"metadata": {"total_size": ...}, "weight_map": {...}} */
static fsdp_status save_index(const fsdp__hf_writer *w, const char *path)
{
    int64_t total = 0;
    bool bad = false;
    json_t *json = json_object(), *meta = json_object(), *map = json_object();
    for (int64_t i = 0; i < w->n; i++) {
        char *file = shard_name(w->items[i].file, w->n_files);
        total += w->items[i].bytes;
        bad |= !file || json_object_set_new(map, w->items[i].name, json_string(file));
        free(file);
    }
    bad |= json_object_set_new(meta, "total_size", json_integer(total)) != 0;
    bad |= json_object_set_new(json, "metadata", meta) != 0;
    bad |= json_object_set_new(json, "weight_map", map) != 0;
    fsdp_status s = bad ? fsdp__fail_memory("index of weights", 0) : fsdp__json_dump(json, 2, path);
    json_decref(json);
    return s;
}

/* Renames are many and not one step; the order makes a crash visible instead of mixed. */
fsdp_status fsdp__hf_writer_finish(fsdp__hf_writer *w)
{
    fsdp_status s;
    if (!w->files)
        return fsdp__fail(FSDP_INVALID_STATE, "%s: nothing to finish: no files were begun",
                          w->folder);
    char *index = fsdp__path_join(w->folder, index_name);
    if (!index) return FSDP_NO_MEMORY;
    /* Nothing of an earlier save is touched before all of the new one is there. */
    for (int64_t i = 0; i < w->n_files; i++)
        FSDP_GO(fsdp__st_writer_check(w->files[i]));
    FSDP_GO(fsdp__file_remove(index));
    for (int64_t i = 0; i < w->n_files; i++)
        FSDP_GO(fsdp__st_writer_finish(w->files[i]));
    if (w->n_files > 1) FSDP_GO(save_index(w, index));
    s = remove_stale(w);
done:
    free(index);
    return s;
}
