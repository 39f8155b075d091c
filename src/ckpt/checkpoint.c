/*
 * checkpoint.c - saving: every rank its file, one rank the rest. And which checkpoints there are.
 */
#include "ckpt/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "ckpt/ckpt_internal.h"
#include "ckpt/index.h"
#include "dtensor/dtensor.h"
#include "format/file.h"
#include "format/json.h"
#include "fsdp/comm.h"
#include "nn/module.h"

char *fsdp__ckpt_path(const char *folder, int64_t step, const char *suffix)
{
    fsdp__str p = {0};
    fsdp__str_addf(&p, "%s/step-%lld%s", folder, (long long)step, suffix);
    return fsdp__str_take(&p);
}

void fsdp__ckpt_file_name(int rank, int ranks, char *out, size_t n)
{
    snprintf(out, n, "rank-%05d-of-%05d.safetensors", rank, ranks);
}

char *fsdp__ckpt_state_name(const fsdp_optimizer *opt, int k, const char *param)
{
    fsdp__str p = {0};
    fsdp__str_addf(&p, "optimizer.%s.%s", fsdp_optimizer_state_name(opt, k), param);
    return fsdp__str_take(&p);
}

char *fsdp__ckpt_ema_name(const char *param)
{
    fsdp__str p = {0};
    fsdp__str_addf(&p, "ema.%s", param);
    return fsdp__str_take(&p);
}

/* ---- one rank's file ----------------------------------------------------------------- */

typedef struct saver {
    fsdp_param_list params;
    fsdp_optimizer *opt;
    fsdp_ema *ema;   /* NULL: none */
    bool frozen_too; /* parameters that need no gradient are written */
    fsdp__st_writer *writer;
    json_t *blocks;
} saver;

/* Whether this rank is the one of its replicas that writes parameter i. */
static bool is_mine(const fsdp_param *p, int64_t i)
{
    const fsdp__layout *l = fsdp__layout_of(fsdp__param_kept(p));
    int64_t copies = 1, place = 0;
    for (int a = 0; l && a < fsdp_mesh_ndim(l->mesh); a++) {
        if (l->place[a].kind != FSDP_REPLICATE) continue;
        place = place * fsdp_mesh_size(l->mesh, a) + fsdp_mesh_coordinate(l->mesh, a);
        copies *= fsdp_mesh_size(l->mesh, a);
    }
    /* What is not distributed is the same on all ranks of the world. */
    if (!l) {
        copies = fsdp_world_size();
        place = fsdp_rank();
    }
    return i % copies == place;
}

static json_t *numbers(const int64_t *x, int n)
{
    json_t *a = json_array();
    for (int i = 0; a && i < n; i++)
        json_array_append_new(a, json_integer(x[i]));
    return a;
}

static fsdp_status declare(saver *v, const char *name, const fsdp_param *p, fsdp_dtype t)
{
    fsdp__block b = fsdp__block_of(p);
    json_t *box = json_object();
    int failed = json_object_set_new(box, "shape", numbers(b.whole, b.ndim));
    failed |= json_object_set_new(box, "offset", numbers(b.at, b.ndim));
    failed |= json_object_set_new(v->blocks, name, box);
    if (failed) return fsdp__fail_memory("a checkpoint", 0);
    return fsdp__st_writer_add(v->writer, name, t, b.ndim, b.size);
}

static fsdp_status write_tensor(saver *v, const char *name, const fsdp_tensor *t)
{
    int64_t bytes = fsdp_numel(t) * (int64_t)fsdp_dtype_size(t->dtype);
    FSDP_TRY(fsdp__storage_use(t->st));
    fsdp_status s = fsdp__st_writer_write(v->writer, name, 0, bytes, fsdp_data(t));
    fsdp__storage_done(t->st, false);
    return s;
}

/* One tensor beside parameter p; takes key over. */
static fsdp_status one_state(saver *v, bool write, char *key, const fsdp_param *p,
                             const fsdp_tensor *t)
{
    if (!key || !t) {
        free(key);
        return fsdp_error();
    }
    fsdp_status s = write ? write_tensor(v, key, t) : declare(v, key, p, t->dtype);
    free(key);
    return s;
}

/* Declares (or writes) all that this rank writes: parameters, the optimizer's state, averages. */
static fsdp_status each_tensor(saver *v, bool write)
{
    for (int64_t i = 0; i < v->params.count; i++) {
        fsdp_param *p = v->params.items[i].param;
        const char *name = v->params.items[i].name;
        fsdp_tensor *t = fsdp__param_kept(p), *average = fsdp_ema_average(v->ema, p);
        if (!is_mine(p, i) || fsdp_numel(t) == 0) continue;
        if (!p->requires_grad && !v->frozen_too) continue;
        FSDP_TRY(write ? write_tensor(v, name, t) : declare(v, name, p, t->dtype));
        for (int k = 0; p->requires_grad && k < fsdp_optimizer_state_count(v->opt); k++)
            FSDP_TRY(one_state(v, write, fsdp__ckpt_state_name(v->opt, k, name), p,
                               fsdp_optimizer_state(v->opt, p, k)));
        if (average) FSDP_TRY(one_state(v, write, fsdp__ckpt_ema_name(name), p, average));
    }
    return FSDP_OK;
}

static fsdp_status write_file(fsdp_module *model, fsdp_optimizer *opt, const char *path,
                              const fsdp__ckpt_state *state)
{
    saver v = {.opt = opt, .ema = state->ema, .frozen_too = state->base == 0};
    char step[32];
    fsdp__str text = {0};
    fsdp_status s;
    FSDP_GO(fsdp_module_params(model, &v.params));
    v.writer = fsdp__st_writer_create(path);
    v.blocks = json_object();
    if (!v.writer || !v.blocks) FSDP_GO(fsdp__fail_memory("a checkpoint", 0));
    FSDP_GO(each_tensor(&v, false));
    FSDP_GO(fsdp__json_format(v.blocks, 0, &text));
    snprintf(step, sizeof step, "%lld", (long long)state->step);
    FSDP_GO(fsdp__st_writer_meta(v.writer, "fsdp.blocks", fsdp__str_get(&text)));
    FSDP_GO(fsdp__st_writer_meta(v.writer, "step", step));
    FSDP_GO(fsdp__st_writer_begin(v.writer));
    FSDP_GO(each_tensor(&v, true));
    FSDP_GO(fsdp__st_writer_finish(v.writer));
done:
    fsdp__st_writer_free(v.writer);
    json_decref(v.blocks);
    fsdp__str_free(&text);
    fsdp_param_list_free(&v.params);
    return s;
}

/* ---- the folder ------------------------------------------------------------------------ */

static fsdp_status write_index(const char *dir, const fsdp_optimizer *opt,
                               const fsdp__ckpt_state *state)
{
    char *path = fsdp__path_join(dir, "checkpoint.json"), name[64];
    json_t *root = json_object(), *files = json_array();
    fsdp_status s = FSDP_OK;
    if (!path || !root || !files) s = fsdp__fail_memory("a checkpoint", 0);
    int ranks = fsdp_world_size();
    for (int r = 0; s == FSDP_OK && r < ranks; r++) {
        fsdp__ckpt_file_name(r, ranks, name, sizeof name);
        json_array_append_new(files, json_string(name));
    }
    if (s == FSDP_OK) s = fsdp__ckpt_index_put(root, opt, state);
    json_object_set_new(root, "files", files);
    if (s == FSDP_OK) s = fsdp__json_dump(root, 1, path);
    json_decref(root);
    free(path);
    return s;
}

/* Rank 0 alone: index and name. */
static fsdp_status publish(const char *folder, const char *temp, const fsdp_optimizer *opt,
                           const fsdp__ckpt_state *state)
{
    if (fsdp_rank() != 0) return FSDP_OK;
    FSDP_TRY(write_index(temp, opt, state));
    FSDP_TRY(fsdp__dir_sync(temp));
    char *path = fsdp__ckpt_path(folder, state->step, "");
    char *old = fsdp__ckpt_path(folder, state->step, ".old.tmp");
    fsdp_status s = path && old ? fsdp__dir_replace(temp, path, old) : fsdp_error();
    free(path);
    free(old);
    return s;
}

/* An empty file by the name of this rank's: while it is there, no other rank's clearing up after an
 * error takes the folder away from under this one, which would then report that instead. */
static fsdp_status claim(const char *file)
{
    int fd = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return fsdp__fail_errno(FSDP_IO_ERROR, "cannot create %s", file);
    close(fd);
    return FSDP_OK;
}

fsdp_status fsdp__ckpt_save(fsdp_module *model, fsdp_optimizer *opt, const char *folder,
                            const fsdp__ckpt_state *state)
{
    if (fsdp_error()) return fsdp_error();
    if (fsdp_ema_swapped(state->ema))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "a checkpoint while the moving average has the weights' place; call "
                          "fsdp_ema_swap_out first");
    char *temp = fsdp__ckpt_path(folder, state->step, ".tmp");
    char *file = NULL, name[64];
    fsdp_group *world = fsdp_group_world();
    fsdp_status s = FSDP_OK;
    if (!temp) FSDP_GO(fsdp_error());
    fsdp__ckpt_file_name(fsdp_rank(), fsdp_world_size(), name, sizeof name);
    file = fsdp__path_join(temp, name);
    if (!file) FSDP_GO(fsdp_error());
    if (fsdp_rank() == 0) {
        FSDP_GO(fsdp__dir_remove(temp));
        FSDP_GO(fsdp__dir_make(temp));
    }
    FSDP_GO(fsdp_barrier(world, FSDP_LANE_CONTROL));
    FSDP_GO(claim(file));
    FSDP_GO(fsdp_barrier(world, FSDP_LANE_CONTROL));
    FSDP_GO(write_file(model, opt, file, state));
    FSDP_GO(fsdp_barrier(world, FSDP_LANE_CONTROL));
    FSDP_GO(publish(folder, temp, opt, state));
    FSDP_GO(fsdp_barrier(world, FSDP_LANE_CONTROL));
done:
    if (s != FSDP_OK && file) {
        /* Each rank takes its own away; the last one finds the folder empty. */
        (void)fsdp__file_remove(file);
        if (fsdp_rank() == 0) {
            char *index = fsdp__path_join(temp, "checkpoint.json");
            if (index) (void)fsdp__file_remove(index);
            free(index);
        }
        (void)rmdir(temp);
    }
    free(file);
    free(temp);
    return s;
}

/* ---- which there are ---------------------------------------------------------------------- */

/* N of "step-N"; -1 for another name. */
static int64_t step_of(const char *name)
{
    if (strncmp(name, "step-", 5) != 0 || name[5] < '0' || name[5] > '9') return -1;
    char *end;
    long long n = strtoll(name + 5, &end, 10);
    return *end ? -1 : n;
}

static int by_number(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* Steps of the whole checkpoints, ascending; the caller frees *steps. */
static fsdp_status list_steps(const char *folder, int64_t **steps, int64_t *count)
{
    char **names;
    int64_t n;
    *steps = NULL;
    *count = 0;
    if (!fsdp__dir_exists(folder)) return FSDP_OK;
    FSDP_TRY(fsdp__dir_list(folder, &names, &n));
    *steps = fsdp__calloc((size_t)n, sizeof **steps, "the list of checkpoints");
    for (int64_t i = 0; *steps && i < n; i++)
        if (step_of(names[i]) >= 0) (*steps)[(*count)++] = step_of(names[i]);
    if (*steps) qsort(*steps, (size_t)*count, sizeof **steps, by_number);
    fsdp__dir_list_free(names, n);
    return *steps ? FSDP_OK : fsdp_error();
}

fsdp_status fsdp__ckpt_newest(const char *folder, int64_t *step)
{
    int64_t *steps, n;
    FSDP_TRY(list_steps(folder, &steps, &n));
    *step = n > 0 ? steps[n - 1] : -1;
    free(steps);
    return FSDP_OK;
}

/* Removes what saves that were killed have left. */
static fsdp_status remove_unfinished(const char *folder)
{
    char **names;
    int64_t n;
    FSDP_TRY(fsdp__dir_list(folder, &names, &n));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < n && s == FSDP_OK; i++) {
        size_t len = strlen(names[i]);
        if (strncmp(names[i], "step-", 5) != 0 || len < 4 || strcmp(names[i] + len - 4, ".tmp"))
            continue;
        char *path = fsdp__path_join(folder, names[i]);
        s = path ? fsdp__dir_remove(path) : fsdp_error();
        free(path);
    }
    fsdp__dir_list_free(names, n);
    return s;
}

fsdp_status fsdp__ckpt_prune(const char *folder, int64_t keep)
{
    int64_t *steps, n;
    if (!fsdp__dir_exists(folder)) return FSDP_OK;
    FSDP_TRY(remove_unfinished(folder));
    FSDP_TRY(list_steps(folder, &steps, &n));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; keep > 0 && i + keep < n && s == FSDP_OK; i++) {
        /* Under another name first: a removal that is cut short must not look whole. */
        char *path = fsdp__ckpt_path(folder, steps[i], "");
        char *temp = fsdp__ckpt_path(folder, steps[i], ".tmp");
        s = path && temp ? fsdp__file_rename(path, temp) : fsdp_error();
        if (s == FSDP_OK) s = fsdp__dir_remove(temp);
        free(path);
        free(temp);
    }
    free(steps);
    return s;
}
