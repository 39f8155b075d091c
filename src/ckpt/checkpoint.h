/*
 * checkpoint.h - a run's state in a folder, saved by all ranks and loaded by any number of them.
 *
 *     checkpoint/step-500/checkpoint.json             step, samples, files (index.c)
 *     checkpoint/step-500/rank-00000-of-00004.safetensors ...
 *
 * Each rank writes what it holds: its part of every parameter under the parameter's own name and
 * the optimizer's state under "optimizer.<state>.<parameter>", a moving average of the weights
 * under "ema.<parameter>". __metadata__ has "fsdp.blocks", a JSON object that gives each tensor's
 * global shape and the place of the part in it. Replicas share the work: of R copies of a part, one
 * is written.
 *
 * A checkpoint is written as step-N.tmp and renamed when every rank's file is on the disk, so a
 * folder step-N is always whole.
 */
#ifndef FSDP_CKPT_CHECKPOINT_H
#define FSDP_CKPT_CHECKPOINT_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/optim.h"

typedef struct fsdp__ckpt_state {
    int64_t step;                    /* optimizer steps that are done */
    int64_t samples;                 /* consumed: the sampler's cursor */
    int64_t skipped, skipped_in_row; /* steps whose gradients were not finite; the last of them */
    fsdp_schedule schedule; /* of the learning rate; a load gives that of the run that saved */
    bool has_schedule;      /* false: a checkpoint without one */
    /* A fingerprint of the parameters that need no gradient, where they are kept elsewhere: a save
     * leaves them out and notes it; a load of such a save wants them loaded, and the same number.
     * 0: they are saved, and loaded, with the rest. */
    uint64_t base;
    /* What decides, beside the shapes, what adapters mean ("rank 8, alpha 16, rslora false"); NULL:
     * there are none. A load wants the same. */
    const char *adapters;
    /* What else the run has, saved and loaded with the rest; NULL: none. Not owned. */
    fsdp_ema *ema;
    fsdp_grad_scaler *scaler;
} fsdp__ckpt_state;

/* Writes folder/step-N, N = s->step; one that is there already is replaced. Collective. On an error
 * nothing of it is left. */
fsdp_status fsdp__ckpt_save(fsdp_module *model, fsdp_optimizer *opt, const char *folder,
                            const fsdp__ckpt_state *s);

/* The newest whole checkpoint of the folder in *step, -1 if there is none (or no folder). */
fsdp_status fsdp__ckpt_newest(const char *folder, int64_t *step);

/* Fills model, opt and what *s points to from folder/step-N, written by any number of ranks. Every
 * rank calls it; none waits for another. Missing, extra and misshaped tensors are one error with
 * three lists, and then nothing has been changed. */
fsdp_status fsdp__ckpt_load(fsdp_module *model, fsdp_optimizer *opt, const char *folder,
                            int64_t step, fsdp__ckpt_state *s);

/* Removes all but the newest `keep` checkpoints (0: none), and what unfinished saves left. One rank
 * calls it. */
fsdp_status fsdp__ckpt_prune(const char *folder, int64_t keep);

#endif
