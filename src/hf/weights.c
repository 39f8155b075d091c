/*
 * weights.c - reading the weight files of a Hugging Face folder.
 *
 * Invariants: every entry names a tensor that exists in an open, checked file; names are unique
 * over all files. The index comes from elsewhere and is not trusted: a file name in it that leaves
 * the folder is refused before anything is opened.
 */
#include "hf/weights.h"

#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"
#include "format/file.h"
#include "format/json.h"

typedef struct entry {
    const fsdp__st_tensor *t;
    fsdp__st *st;
} entry;

struct fsdp__hf_weights {
    char *folder;
    fsdp__st **files; /* in the order of their names */
    int64_t n_files, cap_files;
    entry *entries;
    int64_t n, cap;
    fsdp__map *by_name; /* to an index of entries */
};

/* ---- files ---- */

/* A file name that stays in the folder: one plain name with the right ending. */
static fsdp_status check_name(const char *index, const char *tensor, const char *name)
{
    const char *why = NULL;
    if (!name || !name[0])
        why = "the name of a file";
    else if (strchr(name, '/') || strchr(name, '\\') || strchr(name, ':'))
        why = "the name of a file in the same folder, without a path";
    else if (name[0] == '.' || !fsdp__ends_with(name, ".safetensors"))
        why = "a name that ends in .safetensors";
    if (!why) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA, "%s: weight_map.%s: found '%s', expected %s", index,
                      tensor, name ? name : "no text", why);
}

/* Files stay open for as long as the weights: slices are read when a rank needs them. */
static fsdp_status open_file(fsdp__hf_weights *w, const char *name, fsdp__st **out)
{
    char *path = fsdp__path_join(w->folder, name);
    if (!path) return FSDP_NO_MEMORY;
    fsdp__st *st = fsdp__st_open(path);
    free(path);
    if (!st) return fsdp_error();
    fsdp_status s = FSDP__GROW(w->files, w->cap_files, w->n_files + 1, "weight files");
    if (s != FSDP_OK) {
        fsdp__st_close(st);
        return s;
    }
    w->files[w->n_files++] = st;
    *out = st;
    return FSDP_OK;
}

static fsdp_status add_entry(fsdp__hf_weights *w, fsdp__st *st, const fsdp__st_tensor *t)
{
    FSDP_TRY(FSDP__GROW(w->entries, w->cap, w->n + 1, "weights of a folder"));
    FSDP_TRY(fsdp__map_set(w->by_name, t->name, t->name_len, (fsdp__value){.i = w->n}));
    w->entries[w->n++] = (entry){t, st};
    return FSDP_OK;
}

static fsdp_status open_single(fsdp__hf_weights *w)
{
    fsdp__st *st = NULL;
    FSDP_TRY(open_file(w, "model.safetensors", &st));
    for (int64_t i = 0; i < fsdp__st_count(st); i++)
        FSDP_TRY(add_entry(w, st, fsdp__st_at(st, i)));
    return FSDP_OK;
}

/* ---- the index ---- */

/* The tensors of one file that the index gives to it. The others are told of, since a load without
 * them may be what a person did not want. */
static fsdp_status take_file(fsdp__hf_weights *w, const char *index, const json_t *map,
                             const char *name)
{
    fsdp__st *st = NULL;
    int64_t extra = 0;
    const char *first = NULL;
    FSDP_TRY(open_file(w, name, &st));
    for (int64_t i = 0; i < fsdp__st_count(st); i++) {
        const fsdp__st_tensor *t = fsdp__st_at(st, i);
        const char *where = json_string_value(json_object_get(map, t->name));
        if (where && !strcmp(where, name)) {
            FSDP_TRY(add_entry(w, st, t));
        } else if (!extra++) {
            first = t->name;
        }
    }
    if (extra)
        fsdp__log(FSDP__LOG_WARNING,
                  "%s: %s holds %lld tensors that the index does not give to it ('%s' first); they "
                  "are left out",
                  index, name, (long long)extra, first);
    return FSDP_OK;
}

/* Each tensor of the index must have been found in its file; all that lack are counted, a few
 * named. */
static fsdp_status check_missing(const fsdp__hf_weights *w, const char *index, json_t *map)
{
    enum { SHOWN = 5 };
    int64_t missing = 0;
    const char *key;
    json_t *v;
    fsdp__str names = {0};
    json_object_foreach(map, key, v)
    {
        if (fsdp__map_gets(w->by_name, key)) continue;
        if (missing++ < SHOWN)
            fsdp__str_addf(&names, "%s'%s' (%s)", missing > 1 ? ", " : "", key,
                           json_string_value(v));
    }
    fsdp_status s = FSDP_OK;
    if (missing)
        s = fsdp__fail(FSDP_INVALID_DATA,
                       "%s: found %lld tensors that are not in the file named for them: %s%s; get "
                       "the folder again",
                       index, (long long)missing, fsdp__str_get(&names),
                       missing > SHOWN ? ", ..." : "");
    fsdp__str_free(&names);
    return s;
}

static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Opens the files of a weight_map, each once, in the order of their names. */
static fsdp_status open_map(fsdp__hf_weights *w, const char *index, json_t *map)
{
    const char *key, **names = NULL;
    json_t *v;
    size_t n = 0;
    fsdp_status s = FSDP_OK;
    names = fsdp__calloc(json_object_size(map), sizeof *names, "files of an index");
    if (!names) return FSDP_NO_MEMORY;
    json_object_foreach(map, key, v)
    {
        FSDP_GO(check_name(index, key, json_string_value(v)));
        names[n++] = json_string_value(v);
    }
    if (n) qsort(names, n, sizeof *names, by_bytes);
    for (size_t i = 0; i < n; i++)
        if (!i || strcmp(names[i], names[i - 1])) FSDP_GO(take_file(w, index, map, names[i]));
    s = check_missing(w, index, map);
done:
    free(names);
    return s;
}

static fsdp_status open_index(fsdp__hf_weights *w, const char *index)
{
    fsdp__json_at at, map;
    json_t *json = fsdp__json_load(index);
    if (!json) return fsdp_error();
    fsdp_status s = fsdp__json_root(json, index, &at);
    if (s == FSDP_OK) s = fsdp__json_object(&at, "weight_map", &map);
    if (s == FSDP_OK) s = open_map(w, index, json_object_get(json, "weight_map"));
    json_decref(json);
    return s;
}

/* ---- the folder ---- */

/* Neither file is there: what a person may have meant. */
static fsdp_status nothing_found(const fsdp__hf_weights *w)
{
    char *bin = fsdp__path_join(w->folder, "pytorch_model.bin");
    bool pickled = bin && fsdp__file_exists(bin);
    free(bin);
    if (!fsdp__dir_exists(w->folder))
        return fsdp__fail(FSDP_NOT_FOUND,
                          "%s: found no folder of that name, expected one with "
                          "config.json and model.safetensors",
                          w->folder);
    return fsdp__fail(
        FSDP_NOT_FOUND, "%s: found neither model.safetensors.index.json nor model.safetensors%s",
        w->folder, pickled ? ", only pytorch_model.bin: convert it to safetensors" : "");
}

/* The index comes first: a folder may hold both after an interrupted save by others. */
static fsdp_status open_all(fsdp__hf_weights *w)
{
    char *index = fsdp__path_join(w->folder, "model.safetensors.index.json");
    char *single = fsdp__path_join(w->folder, "model.safetensors");
    fsdp_status s = index && single ? FSDP_OK : FSDP_NO_MEMORY;
    if (s == FSDP_OK)
        s = fsdp__file_exists(index)    ? open_index(w, index)
            : fsdp__file_exists(single) ? open_single(w)
                                        : nothing_found(w);
    free(single);
    free(index);
    return s;
}

fsdp__hf_weights *fsdp__hf_weights_open(const char *folder)
{
    fsdp__hf_weights *w = fsdp__calloc(1, sizeof *w, "weights of a folder");
    if (!w) return NULL;
    w->folder = fsdp__strdup(folder);
    w->by_name = fsdp__map_create();
    if (!w->folder || !w->by_name || open_all(w) != FSDP_OK) {
        fsdp__hf_weights_close(w);
        return NULL;
    }
    return w;
}

void fsdp__hf_weights_close(fsdp__hf_weights *w)
{
    if (!w) return;
    fsdp__map_free(w->by_name);
    free(w->entries);
    for (int64_t i = 0; i < w->n_files; i++)
        fsdp__st_close(w->files[i]);
    free(w->files);
    free(w->folder);
    free(w);
}

/* ---- looking ---- */

int64_t fsdp__hf_weights_count(const fsdp__hf_weights *w)
{
    return w->n;
}

const fsdp__st_tensor *fsdp__hf_weights_at(const fsdp__hf_weights *w, int64_t i, fsdp__st **st)
{
    if (st) *st = w->entries[i].st;
    return w->entries[i].t;
}

const fsdp__st_tensor *fsdp__hf_weights_find(const fsdp__hf_weights *w, const char *name,
                                             fsdp__st **st)
{
    const fsdp__value *v = fsdp__map_gets(w->by_name, name);
    return v ? fsdp__hf_weights_at(w, v->i, st) : NULL;
}

int64_t fsdp__hf_weights_bytes_read(const fsdp__hf_weights *w)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < w->n_files; i++)
        sum += fsdp__st_bytes_read(w->files[i]);
    return sum;
}
