/*
 * offload.c - states that lie in files or in the host's memory, and steps in backward. See
 * offload.h.
 */
#include "train/offload.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/finite.h"
#include "base/memory.h"
#include "fsdp/comm.h"
#include "nn/module.h"
#include "tensor/tensor.h"
#include "train/run_folder.h"

/* ---- what goes together --------------------------------------------------------------- */

static bool in_files(const fsdp__train_config *c)
{
    return c->memory.offload == FSDP_OFFLOAD_FILE || c->optimizer.offload == FSDP_OFFLOAD_FILE;
}

/* What needs all gradients after backward, or to take a step back; NULL: nothing. */
static const char *against_early(const fsdp__train_config *c)
{
    int64_t ranks =
        c->parallelism.data_parallel_replicate_degree * c->parallelism.data_parallel_shard_degree;
    bool several = c->training.global_batch_size > c->training.local_batch_size * ranks;
    if (c->training.max_norm > 0)
        return "training.max_norm, which needs all gradients at once: set it to 0";
    if (c->training.mixed_precision_param == FSDP__TRAIN_F16)
        return "training.mixed_precision_param float16, whose loss scale must be taken out of all "
               "gradients first: use bfloat16";
    if (c->training.nonfinite != 0)
        return "training.nonfinite skip, since a step that has begun cannot be left out: use stop";
    if (several && c->training.sync_each_microbatch)
        return "training.sync_each_microbatch, since gradients of several microbatches add up "
               "before the step: turn it off";
    return NULL;
}

fsdp_status fsdp__train_offload_check(fsdp__train_config *c)
{
    if (c->training.enable_cpu_offload) {
        if (in_files(c))
            return fsdp__fail(FSDP_INVALID_CONFIG,
                              "training.enable_cpu_offload puts all states into the host's memory, "
                              "and memory.offload or optimizer.offload is file; leave one of them "
                              "out");
        c->memory.offload = c->optimizer.offload = FSDP_OFFLOAD_CPU;
    }
    if (in_files(c) && (!c->memory.offload_folder || !*c->memory.offload_folder))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s is file and memory.offload_folder is not set; name a folder on a "
                          "fast disk",
                          c->memory.offload == FSDP_OFFLOAD_FILE ? "memory.offload"
                                                                 : "optimizer.offload");
    const char *other = c->optimizer.early_step_in_backward ? against_early(c) : NULL;
    if (other)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "optimizer.early_step_in_backward does not go together with %s", other);
    return FSDP_OK;
}

/* ---- making ------------------------------------------------------------------------------ */

static fsdp_offload_policy policy(const fsdp__train_config *c, int kind)
{
    fsdp_offload_policy p = {.kind = (fsdp_offload_kind)kind};
    if (kind == FSDP_OFFLOAD_FILE) {
        p.folder = c->memory.offload_folder;
        p.window = c->memory.offload_window;
    }
    return p;
}

fsdp_offload_policy fsdp__train_offload_policy(const fsdp__train_config *c)
{
    return policy(c, c->memory.offload);
}

static void say_place(const char *what, int kind, const fsdp__train_config *c, fsdp__metrics *m)
{
    if (kind == FSDP_OFFLOAD_CPU)
        fsdp__say(m, "offload: %s to the CPU: it is the device, so they stay where they are\n",
                  what);
    if (kind == FSDP_OFFLOAD_FILE)
        fsdp__say(m, "offload: %s in files in %s\n", what, c->memory.offload_folder);
}

fsdp_status fsdp__train_offload_optimizer(const fsdp__train_config *c, fsdp_optimizer *opt,
                                          fsdp__metrics *m)
{
    fsdp_offload_policy p = policy(c, c->optimizer.offload);
    FSDP_TRY(fsdp_optimizer_set_offload(opt, &p));
    say_place("parameters and gradients", c->memory.offload, c, m);
    say_place("optimizer state", c->optimizer.offload, c, m);
    return FSDP_OK;
}

/* ---- steps in backward -------------------------------------------------------------------- */

/* Before the optimizer's hook. Other weights have had this step already, so the run cannot go on:
 * it ends before a checkpoint is made of them. */
static fsdp_status refuse_non_finite(void *arg, fsdp_tensor *leaf)
{
    const fsdp__early_param *e = arg;
    const fsdp_tensor *g = fsdp_grad(leaf);
    if (!g) return FSDP_OK;
    FSDP_TRY(fsdp__storage_use(g->st));
    int64_t at = fsdp__find_non_finite(fsdp_data(g), g->dtype, fsdp_numel(g));
    fsdp__storage_done(g->st, false);
    if (at < 0) return FSDP_OK;
    return fsdp__fail(FSDP_NON_FINITE,
                      "step %lld: the gradient of %s is not finite (in the shard of rank %d) and "
                      "was not used; optimizer.early_step_in_backward has updated weights nearer "
                      "to the loss before it, so nothing of this step is saved. Go on from the "
                      "last checkpoint, with that option off to see which rank and microbatch it "
                      "comes from",
                      (long long)*e->steps + 1, e->param->name, fsdp_rank());
}

fsdp_status fsdp__train_early_begin(const fsdp__train_config *c, fsdp_module *model,
                                    fsdp_optimizer *opt, const int64_t *steps,
                                    fsdp__early_param **out, fsdp__metrics *m)
{
    fsdp_param_list l;
    *out = NULL;
    if (!c->optimizer.early_step_in_backward) return FSDP_OK;
    fsdp__say(m, "weights are updated during backward, each unit's when its gradients are summed; "
                 "the norm of all gradients is not known\n");
    FSDP_TRY(fsdp_module_params(model, &l));
    *out = fsdp__calloc((size_t)l.count + 1, sizeof **out, "the parameters' steps");
    fsdp_status s = *out ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        const fsdp_param *p = l.items[i].param;
        if (!p->requires_grad) continue;
        (*out)[i] = (fsdp__early_param){p, steps};
        s = fsdp_register_post_accumulate_hook(fsdp__param_kept(p), refuse_non_finite, *out + i);
    }
    fsdp_param_list_free(&l);
    return s == FSDP_OK ? fsdp_optimizer_in_backward(opt, 1) : s;
}

/* ---- the end -------------------------------------------------------------------------------- */

fsdp_status fsdp__train_offload_report(const fsdp__train_config *c, fsdp__metrics *m)
{
    enum { N = 6 };
    if (!in_files(c)) return FSDP_OK;
    fsdp_offload_stats io;
    fsdp_offload_get(&io);
    double mine[N] = {(double)io.read_bytes,    io.read_wait,
                      (double)io.written_bytes, io.write_wait,
                      (double)io.most_in_files, (double)io.most_in_memory};
    int ranks = fsdp_world_size();
    double most[N] = {0}, *all = fsdp__calloc((size_t)ranks * N, sizeof *all, "the ranks' waits");
    if (!all) return fsdp_error();
    fsdp_status s = fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, mine, all,
                                    (int64_t)sizeof mine, NULL);
    for (int i = 0; s == FSDP_OK && i < ranks * N; i++)
        if (all[i] > most[i % N]) most[i % N] = all[i];
    free(all);
    FSDP_TRY(s);
    fsdp__say(m,
              "offload: %.2f GB read, waited %.2f s; %.2f GB written, waited %.2f s; %.2f GB in "
              "the file, at most %.3f GB of it in memory (the rank with most)\n",
              most[0] / 1e9, most[1], most[2] / 1e9, most[3], most[4] / 1e9, most[5] / 1e9);
    return FSDP_OK;
}
