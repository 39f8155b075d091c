/*
 * load.c - loading a checkpoint: every file's header is read and compared with the model before the
 * first byte is changed, then each rank reads the overlaps of its parts with those of the files.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"
#include "ckpt/checkpoint.h"
#include "ckpt/ckpt_internal.h"
#include "ckpt/index.h"
#include "format/file.h"
#include "format/json.h"
#include "nn/module.h"
#include "tensor/tensor.h"

/* A part in a file. Parts of one tensor form a list by `next`. */
typedef struct part {
    fsdp__st *st;
    const fsdp__st_tensor *t;
    fsdp__block box;
    int64_t next; /* index of the next part of this tensor; -1: none */
} part;

/* A tensor to fill. */
typedef struct target {
    char *name;
    fsdp_tensor *t;
    fsdp__block box;
} target;

typedef struct loader {
    char *dir;
    fsdp__st **files;
    int64_t n_files;
    part *parts;
    int64_t n_parts, cap_parts;
    fsdp__map *by_name; /* to the first part */
    target *targets;
    int64_t n_targets, cap_targets;
    fsdp__str missing, extra, misshaped;
    int64_t n_missing, n_extra, n_misshaped;
    fsdp__ckpt_index index;
} loader;

static void loader_free(loader *l)
{
    for (int64_t i = 0; i < l->n_files; i++)
        fsdp__st_close(l->files[i]);
    for (int64_t i = 0; i < l->n_targets; i++)
        free(l->targets[i].name);
    free(l->files);
    free(l->parts);
    free(l->targets);
    free(l->dir);
    fsdp__map_free(l->by_name);
    fsdp__str_free(&l->missing);
    fsdp__str_free(&l->extra);
    fsdp__str_free(&l->misshaped);
}

/* ---- what the files hold --------------------------------------------------------------- */

static fsdp_status read_numbers(const json_t *a, const fsdp__st_tensor *t, const char *path,
                                int64_t *out)
{
    if (!json_is_array(a) || (int)json_array_size(a) != t->ndim)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: fsdp.blocks of %s: expected shape and offset of %d numbers each",
                          path, t->name, t->ndim);
    for (int i = 0; i < t->ndim; i++) {
        const json_t *x = json_array_get(a, (size_t)i);
        out[i] = json_is_integer(x) ? (int64_t)json_integer_value(x) : -1;
        if (out[i] < 0)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: fsdp.blocks of %s: expected numbers of at least 0", path,
                              t->name);
    }
    return FSDP_OK;
}

static fsdp_status add_part(loader *l, fsdp__st *st, const fsdp__st_tensor *t, const json_t *box)
{
    part p = {.st = st, .t = t, .box = {.ndim = t->ndim}, .next = -1};
    if (t->ndim > FSDP_MAX_DIMS)
        return fsdp__fail(FSDP_UNSUPPORTED, "%s: %s has %d dims; at most %d are done",
                          fsdp__st_path(st), t->name, t->ndim, FSDP_MAX_DIMS);
    FSDP_TRY(read_numbers(json_object_get(box, "shape"), t, fsdp__st_path(st), p.box.whole));
    FSDP_TRY(read_numbers(json_object_get(box, "offset"), t, fsdp__st_path(st), p.box.at));
    for (int d = 0; d < t->ndim; d++) {
        p.box.size[d] = t->shape[d];
        if (p.box.at[d] > p.box.whole[d] - t->shape[d])
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: %s: %lld rows from %lld of dim %d lie outside of its %lld",
                              fsdp__st_path(st), t->name, (long long)t->shape[d],
                              (long long)p.box.at[d], d, (long long)p.box.whole[d]);
    }
    fsdp__value *first = fsdp__map_get(l->by_name, t->name, t->name_len);
    if (first) {
        p.next = l->parts[first->i].next;
        l->parts[first->i].next = l->n_parts;
    } else {
        FSDP_TRY(fsdp__map_set(l->by_name, t->name, t->name_len, (fsdp__value){.i = l->n_parts}));
    }
    FSDP_TRY(FSDP__GROW(l->parts, l->cap_parts, l->n_parts + 1, "the parts of a checkpoint"));
    l->parts[l->n_parts++] = p;
    return FSDP_OK;
}

static fsdp_status open_file(loader *l, const char *name)
{
    char *path = fsdp__path_join(l->dir, name);
    fsdp__st *st = path ? fsdp__st_open(path) : NULL;
    free(path);
    if (!st) return fsdp_error();
    l->files[l->n_files++] = st;
    const char *text = fsdp__st_meta(st, "fsdp.blocks");
    if (!text)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: __metadata__ has no fsdp.blocks; expected a file of a checkpoint",
                          fsdp__st_path(st));
    json_t *blocks = fsdp__json_parse(text, strlen(text), fsdp__st_path(st));
    if (!blocks) return fsdp_error();
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < fsdp__st_count(st) && s == FSDP_OK; i++) {
        const fsdp__st_tensor *t = fsdp__st_at(st, i);
        s = add_part(l, st, t, json_object_get(blocks, t->name));
    }
    json_decref(blocks);
    return s;
}

static fsdp_status open_files(loader *l, const json_t *files, const char *index)
{
    size_t n = json_array_size(files);
    if (n == 0) return fsdp__fail(FSDP_INVALID_DATA, "%s: files: expected a list of names", index);
    l->files = fsdp__calloc(n, sizeof *l->files, "the files of a checkpoint");
    l->by_name = fsdp__map_create();
    if (!l->files || !l->by_name) return fsdp_error();
    for (size_t i = 0; i < n; i++) {
        const char *name = json_string_value(json_array_get(files, i));
        if (!name || strchr(name, '/'))
            return fsdp__fail(FSDP_INVALID_DATA, "%s: files: expected names of files here", index);
        FSDP_TRY(open_file(l, name));
    }
    return FSDP_OK;
}

static fsdp_status read_index(loader *l, fsdp_optimizer *opt, const fsdp__ckpt_state *state)
{
    char *path = fsdp__path_join(l->dir, "checkpoint.json");
    json_t *root = path ? fsdp__json_load(path) : NULL;
    fsdp_status s = FSDP_OK;
    if (!root) FSDP_GO(fsdp_error());
    FSDP_GO(fsdp__ckpt_index_take(root, path, opt, state, &l->index));
    FSDP_GO(open_files(l, json_object_get(root, "files"), path));
done:
    json_decref(root);
    free(path);
    return s;
}

/* ---- what the model wants ------------------------------------------------------------------ */

static fsdp_status want(loader *l, char *name, fsdp_tensor *t, const fsdp_param *p)
{
    if (!name || !t) {
        free(name);
        return fsdp_error();
    }
    fsdp_status s = FSDP__GROW(l->targets, l->cap_targets, l->n_targets + 1, "a model's tensors");
    if (s != FSDP_OK) {
        free(name);
        return s;
    }
    l->targets[l->n_targets++] = (target){name, t, fsdp__block_of(p)};
    return FSDP_OK;
}

static fsdp_status list_targets(loader *l, fsdp_module *model, fsdp_optimizer *opt, fsdp_ema *ema)
{
    fsdp_param_list params;
    FSDP_TRY(fsdp_module_params(model, &params));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < params.count && s == FSDP_OK; i++) {
        fsdp_param *p = params.items[i].param;
        if (!p->requires_grad && l->index.base) continue; /* it was left out */
        s = want(l, fsdp__strdup(params.items[i].name), fsdp__param_kept(p), p);
        for (int k = 0; p->requires_grad && k < fsdp_optimizer_state_count(opt) && s == FSDP_OK;
             k++)
            s = want(l, fsdp__ckpt_state_name(opt, k, params.items[i].name),
                     fsdp_optimizer_state(opt, p, k), p);
        fsdp_tensor *average = fsdp_ema_average(ema, p);
        if (average && s == FSDP_OK)
            s = want(l, fsdp__ckpt_ema_name(params.items[i].name), average, p);
    }
    fsdp_param_list_free(&params);
    return s;
}

/* Ten names are enough to see what is wrong. */
static void note(fsdp__str *list, int64_t *n, const char *name)
{
    if (++*n <= 10) fsdp__str_addf(list, "%s%s", *n > 1 ? ", " : "", name);
    if (*n == 11) fsdp__str_add(list, ", ...");
}

static void compare(loader *l, const target *t)
{
    const fsdp__value *first = fsdp__map_gets(l->by_name, t->name);
    if (!first) {
        note(&l->missing, &l->n_missing, t->name);
        return;
    }
    int64_t covered = 0;
    for (int64_t i = first->i; i >= 0; i = l->parts[i].next) {
        const fsdp__block *b = &l->parts[i].box;
        fsdp__block common;
        if (b->ndim != t->box.ndim ||
            memcmp(b->whole, t->box.whole, (size_t)b->ndim * sizeof *b->whole) != 0) {
            note(&l->misshaped, &l->n_misshaped, t->name);
            return;
        }
        if (fsdp__block_common(b, &t->box, &common)) covered += fsdp__block_numel(&common);
    }
    /* Parts of one save do not overlap, so the sum says whether all is there. */
    if (covered != fsdp__block_numel(&t->box)) note(&l->missing, &l->n_missing, t->name);
}

static fsdp_status check(loader *l)
{
    fsdp__map *wanted = fsdp__map_create();
    fsdp_status s = wanted ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < l->n_targets && s == FSDP_OK; i++) {
        s = fsdp__map_sets(wanted, l->targets[i].name, (fsdp__value){.i = i});
        compare(l, &l->targets[i]);
    }
    for (int64_t i = 0; i < fsdp__map_count(l->by_name) && s == FSDP_OK; i++) {
        size_t n;
        const char *name = fsdp__map_key(l->by_name, i, &n);
        if (!fsdp__map_get(wanted, name, n)) note(&l->extra, &l->n_extra, name);
    }
    fsdp__map_free(wanted);
    if (s != FSDP_OK || l->n_missing + l->n_extra + l->n_misshaped == 0) return s;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s does not fit the model: %lld missing (%s), %lld not known to it (%s), "
                      "%lld of another shape (%s); use the model options of the run that saved it, "
                      "or another job.dump_folder",
                      l->dir, (long long)l->n_missing, fsdp__str_get(&l->missing),
                      (long long)l->n_extra, fsdp__str_get(&l->extra), (long long)l->n_misshaped,
                      fsdp__str_get(&l->misshaped));
}

static fsdp_status fill(loader *l, const target *t)
{
    const fsdp__value *first = fsdp__map_gets(l->by_name, t->name);
    for (int64_t i = first->i; i >= 0; i = l->parts[i].next) {
        const part *p = &l->parts[i];
        fsdp__block common;
        if (!fsdp__block_common(&p->box, &t->box, &common)) continue;
        FSDP_TRY(
            fsdp__block_read(p->st, p->t, &p->box, &t->box, &common, fsdp_data(t->t), t->t->dtype));
    }
    fsdp_touch(t->t);
    return FSDP_OK;
}

fsdp_status fsdp__ckpt_load(fsdp_module *model, fsdp_optimizer *opt, const char *folder,
                            int64_t step, fsdp__ckpt_state *state)
{
    if (fsdp_error()) return fsdp_error();
    loader l = {0};
    fsdp_status s = FSDP_OK;
    l.dir = fsdp__ckpt_path(folder, step, "");
    if (!l.dir) FSDP_GO(fsdp_error());
    if (!fsdp__dir_exists(l.dir))
        FSDP_GO(fsdp__fail(FSDP_NOT_FOUND, "%s: there is no such checkpoint", l.dir));
    FSDP_GO(read_index(&l, opt, state));
    FSDP_GO(list_targets(&l, model, opt, state->ema));
    FSDP_GO(check(&l));
    for (int64_t i = 0; i < l.n_targets; i++)
        FSDP_GO(fill(&l, &l.targets[i]));
    s = fsdp__ckpt_index_apply(&l.index, opt, state);
done:
    loader_free(&l);
    return s;
}
