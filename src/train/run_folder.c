/*
 * run_folder.c - where a run stands, and whether its ranks mean the same. See run_folder.h.
 */
#include "train/run_folder.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "ckpt/checkpoint.h"
#include "format/file.h"
#include "format/json.h"
#include "fsdp/comm.h"
#include "hf/folder.h"

/* ---- agreement ------------------------------------------------------------------------ */

fsdp_status fsdp__config_agree(const char *text)
{
    fsdp_group *world = fsdp_group_world();
    int n = fsdp_group_size(world);
    uint64_t mine = fsdp__train_config_hash(text);
    uint64_t *all = fsdp__calloc((size_t)n, sizeof *all, "the hashes of the configuration");
    char *first = NULL;
    fsdp_status s;
    if (!all) FSDP_GO(fsdp_error());
    FSDP_GO(fsdp_all_gather(world, FSDP_LANE_CONTROL, &mine, all, sizeof mine, NULL));
    bool same = true;
    for (int r = 0; r < n; r++)
        same = same && all[r] == all[0];
    if (same) goto done;
    /* Rank 0's text goes round, so that the others can say what differs. */
    int64_t len = (int64_t)strlen(text);
    FSDP_GO(fsdp_broadcast(world, FSDP_LANE_CONTROL, &len, sizeof len, 0, NULL));
    first = fsdp__calloc((size_t)len + 1, 1, "a configuration");
    if (!first) FSDP_GO(fsdp_error());
    if (fsdp_rank() == 0) memcpy(first, text, (size_t)len);
    FSDP_GO(fsdp_broadcast(world, FSDP_LANE_CONTROL, first, len, 0, NULL));
    if (mine != all[0]) {
        fsdp__str lines = {0};
        fsdp__train_config_differences(text, first, &lines);
        s = fsdp__fail(FSDP_INVALID_CONFIG,
                       "the configuration of rank %d is not that of rank 0; start all ranks with "
                       "the same file and options (this rank's value, rank 0's):\n%s",
                       fsdp_rank(), fsdp__str_get(&lines));
        fsdp__str_free(&lines);
        goto done;
    }
    s = fsdp_barrier(world, FSDP_LANE_CONTROL); /* ends with the other rank's error */
done:
    free(first);
    free(all);
    return s;
}

fsdp_status fsdp__fail_alike(fsdp_status code, const char *fmt, ...)
{
    if (fsdp_rank() != 0) {
        fsdp_status s = fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
        return s != FSDP_OK ? s : fsdp__fail(code, "rank 0 did not say why it failed");
    }
    char line[2048];
    va_list args;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    return fsdp__fail(code, "%s", line);
}

/* ---- the folder -------------------------------------------------------------------------- */

/* How long a run waits for one that is ending: ranks die right after their launcher. */
#define LOCK_SECONDS 2.0

typedef struct run_state {
    bool there, finished;
    int64_t steps;
} run_state;

static fsdp_status read_state(const char *folder, run_state *out)
{
    char *path = fsdp__path_join(folder, "run.json");
    json_t *root = NULL;
    fsdp__json_at at;
    const char *state = "";
    fsdp_status s = FSDP_OK;
    *out = (run_state){0};
    if (!path) FSDP_GO(fsdp_error());
    if (!fsdp__file_exists(path)) goto done;
    root = fsdp__json_load(path);
    if (!root) FSDP_GO(fsdp_error());
    FSDP_GO(fsdp__json_root(root, path, &at));
    FSDP_GO(fsdp__json_need(&at, "state"));
    FSDP_GO(fsdp__json_string(&at, "state", &state));
    FSDP_GO(fsdp__json_int(&at, "steps", &out->steps));
    out->there = true;
    out->finished = strcmp(state, "finished") == 0;
done:
    json_decref(root);
    free(path);
    return s;
}

static fsdp_status write_state(const char *folder, json_t *root)
{
    char *path = root ? fsdp__path_join(folder, "run.json") : NULL;
    fsdp_status s = !root  ? fsdp__fail_memory("run.json", 0)
                    : path ? fsdp__json_dump(root, 1, path)
                           : fsdp_error();
    json_decref(root);
    free(path);
    return s;
}

static fsdp_status write_config(const char *folder, const char *text)
{
    char *path = fsdp__path_join(folder, "config.yaml");
    fsdp_status s = path ? fsdp__file_write(path, text, strlen(text)) : fsdp_error();
    free(path);
    return s;
}

/* Says in what the configuration of the last start was another one. */
static fsdp_status say_changes(const char *folder, const char *text, fsdp__metrics *m)
{
    char *path = fsdp__path_join(folder, "config.yaml"), *before = NULL;
    size_t len;
    fsdp_status s = path ? FSDP_OK : fsdp_error();
    if (path && fsdp__file_exists(path)) s = fsdp__file_read(path, &before, &len);
    if (before && strcmp(before, text) != 0) {
        fsdp__str lines = {0};
        fsdp__train_config_differences(before, text, &lines);
        fsdp__say(m, "options that are not as at the last start (then, now):\n%s",
                  fsdp__str_get(&lines));
        fsdp__str_free(&lines);
    }
    free(before);
    free(path);
    return s;
}

/* Which checkpoint to go on from, -1: none. */
static fsdp_status choose_checkpoint(const fsdp__train_config *c, const fsdp__run_folder *f,
                                     int64_t *step)
{
    *step = -1;
    if (!c->checkpoint.enable) return FSDP_OK;
    FSDP_TRY(fsdp__ckpt_newest(f->checkpoints, step));
    if (c->checkpoint.load_step < 0) return FSDP_OK;
    fsdp__str dir = {0};
    fsdp__str_addf(&dir, "%s/step-%lld", f->checkpoints, (long long)c->checkpoint.load_step);
    bool there = fsdp__dir_exists(fsdp__str_get(&dir));
    fsdp_status s = FSDP_OK;
    if (!there)
        s = fsdp__fail(FSDP_NOT_FOUND,
                       "checkpoint.load_step: there is no %s; the newest checkpoint is of step "
                       "%lld (-1: none)",
                       fsdp__str_get(&dir), (long long)*step);
    *step = c->checkpoint.load_step;
    fsdp__str_free(&dir);
    return s;
}

static fsdp_status decide(const fsdp__train_config *c, const char *text, fsdp__metrics *m,
                          fsdp__run_folder *f)
{
    const char *folder = c->job.dump_folder;
    run_state before;
    FSDP_TRY(read_state(folder, &before));
    if (before.finished && before.steps >= c->training.steps) {
        fsdp__say(m,
                  "the run in %s is finished: %lld steps; raise training.steps to go on, or choose "
                  "another job.dump_folder\n",
                  folder, (long long)before.steps);
        f->finished = true;
        return FSDP_OK;
    }
    FSDP_TRY(choose_checkpoint(c, f, &f->load_step));
    if (before.finished && f->load_step < 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "the run in %s is finished after %lld steps and left no checkpoint to go "
                          "on from; choose another job.dump_folder, with checkpoint.enable if it "
                          "shall be made longer later",
                          folder, (long long)before.steps);
    if (before.there) FSDP_TRY(say_changes(folder, text, m));
    if (f->load_step >= 0)
        fsdp__say(m, "going on from %s/step-%lld\n", f->checkpoints, (long long)f->load_step);
    else if (before.there)
        fsdp__say(m, "%s: the run was not finished and has no checkpoint: starting over\n", folder);
    return FSDP_OK;
}

/* What would be in the way at the end of the run is said before its first step. */
static fsdp_status check_places(const fsdp__train_config *c, const fsdp__run_folder *f)
{
    FSDP_TRY(fsdp__dir_can_make(c->job.dump_folder));
    if (c->checkpoint.enable) FSDP_TRY(fsdp__dir_can_make(f->checkpoints));
    if (c->lora.enable) FSDP_TRY(fsdp__hf_check_adapter_replaceable(f->adapter));
    if (c->checkpoint.last_save_in_hf) FSDP_TRY(fsdp__hf_check_replaceable(f->hf));
    return c->checkpoint.export_ema ? fsdp__hf_check_replaceable(f->hf_ema) : FSDP_OK;
}

fsdp_status fsdp__run_folder_open(const fsdp__train_config *c, const char *text, fsdp__metrics *m,
                                  fsdp__run_folder *out)
{
    *out = (fsdp__run_folder){.load_step = -1, .lock = -1};
    out->checkpoints = fsdp__path_join(c->job.dump_folder, c->checkpoint.folder);
    out->hf = fsdp__path_join(c->job.dump_folder, "hf");
    out->adapter = fsdp__path_join(c->job.dump_folder, "adapter");
    out->hf_ema = fsdp__path_join(c->job.dump_folder, "hf-ema");
    out->metrics = fsdp__path_join(c->job.dump_folder, "metrics.jsonl");
    if (!out->checkpoints || !out->hf || !out->hf_ema || !out->adapter || !out->metrics)
        return fsdp_error();
    int64_t told[2] = {0, -1};
    if (fsdp_rank() == 0) {
        const char *folder = c->job.dump_folder;
        if (fsdp__dir_exists(folder)) FSDP_TRY(fsdp__dir_lock(folder, LOCK_SECONDS, &out->lock));
        FSDP_TRY(decide(c, text, m, out));
        if (!out->finished) FSDP_TRY(check_places(c, out));
        told[0] = out->finished;
        told[1] = out->load_step;
    }
    FSDP_TRY(fsdp_broadcast(fsdp_group_world(), FSDP_LANE_CONTROL, told, sizeof told, 0, NULL));
    out->finished = told[0] != 0;
    out->load_step = told[1];
    return FSDP_OK;
}

static fsdp_status begin(const fsdp__train_config *c, const char *text, fsdp__run_folder *f)
{
    const char *folder = c->job.dump_folder;
    if (f->lock < 0) FSDP_TRY(fsdp__dir_lock(folder, LOCK_SECONDS, &f->lock));
    if (c->checkpoint.enable) FSDP_TRY(fsdp__ckpt_prune(f->checkpoints, 0));
    FSDP_TRY(write_config(folder, text));
    return write_state(folder, json_pack("{s:s, s:I}", "state", "running", "steps",
                                         (json_int_t)(f->load_step < 0 ? 0 : f->load_step)));
}

fsdp_status fsdp__run_folder_begin(const fsdp__train_config *c, const char *text,
                                   fsdp__run_folder *f)
{
    const char *folder = c->job.dump_folder;
    if (fsdp_rank() == 0) {
        bool mine = !fsdp__dir_exists(folder);
        FSDP_TRY(fsdp__dir_make(folder));
        fsdp_status s = begin(c, text, f);
        /* Without a lock it is another run's by now. */
        if (s != FSDP_OK && mine && f->lock >= 0) (void)fsdp__dir_remove(folder);
        if (s != FSDP_OK) return s;
    }
    return fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
}

void fsdp__run_folder_free(fsdp__run_folder *f)
{
    free(f->checkpoints);
    free(f->hf);
    free(f->adapter);
    free(f->hf_ema);
    free(f->metrics);
    if (f->lock >= 0) close(f->lock);
    *f = (fsdp__run_folder){.load_step = -1, .lock = -1};
}

fsdp_status fsdp__run_folder_finish(const fsdp__train_config *c, int64_t steps, double loss,
                                    double validation, double bigram)
{
    if (fsdp_rank() != 0) return FSDP_OK;
    json_t *root = json_pack("{s:s, s:I}", "state", "finished", "steps", (json_int_t)steps);
    if (root && isfinite(loss)) json_object_set_new(root, "loss", json_real(loss));
    if (root && isfinite(validation))
        json_object_set_new(root, "validation_loss", json_real(validation));
    if (root && isfinite(bigram)) json_object_set_new(root, "bigram_loss", json_real(bigram));
    return write_state(c->job.dump_folder, root);
}
