/*
 * update.h - from the gradients of a step to new weights: loss scale, norm, clipping, the
 * optimizer, the moving average; and steps that are left out.
 */
#ifndef FSDP_TRAIN_UPDATE_H
#define FSDP_TRAIN_UPDATE_H

#include "ckpt/checkpoint.h"
#include "fsdp/optim.h"
#include "fsdp/shard.h"
#include "train/config.h"
#include "train/metrics.h"

typedef struct fsdp__update {
    const fsdp__train_config *c;
    fsdp_module *model;
    fsdp_optimizer *opt;
    fsdp_ema *ema;            /* NULL: none */
    fsdp_grad_scaler *scaler; /* NULL: the loss is not scaled */
    double grad_norm;         /* of the last step; NAN before the first; below 0: not known */
    int64_t skipped, skipped_in_row;
} fsdp__update;

typedef enum fsdp__verdict {
    FSDP__GRADIENTS_FINE,
    FSDP__GRADIENTS_OVERFLOW, /* of fp16: the loss scale is too large */
    FSDP__GRADIENTS_BAD
} fsdp__verdict;

/* The dtype that a choice of training.dtype and mixed_precision_* names. */
fsdp_dtype fsdp__train_dtype_of(int choice);

/* Makes what the configuration asks for and says in which dtypes the run computes. model and opt
 * stay the caller's. */
fsdp_status fsdp__update_make(fsdp__update *u, const fsdp__train_config *c, fsdp_module *model,
                              fsdp_optimizer *opt, fsdp__metrics *m);
void fsdp__update_free(fsdp__update *u);

/* The schedule of a run that goes on from *loaded must be that of the run before; where another one
 * is allowed, the jump of the rate is said. The same on all ranks. */
fsdp_status fsdp__update_schedule(const fsdp__train_config *c, const fsdp__ckpt_state *loaded,
                                  const fsdp_schedule *now, fsdp__metrics *m);

/* What the loss of a microbatch, a sum over its tokens, is multiplied by before backward. */
double fsdp__update_loss_factor(const fsdp__update *u, int64_t valid_tokens);
/* Takes the loss scale out of the gradients and measures their norm: the same verdict on all ranks.
 * Collective. */
fsdp_status fsdp__update_look(fsdp__update *u, fsdp__verdict *out);
/* Clips, steps and averages. */
fsdp_status fsdp__update_apply(fsdp__update *u);
/* The step is left out, as all ranks have decided; says so, with the reason. An error if too many
 * were left out in a row. */
fsdp_status fsdp__update_skip(fsdp__update *u, int64_t step, bool overflow, const char *why,
                              fsdp__metrics *m);

#endif
