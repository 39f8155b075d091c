/*
 * offload.h - what memory.offload, optimizer.offload and early_step_in_backward ask for.
 */
#ifndef FSDP_TRAIN_OFFLOAD_H
#define FSDP_TRAIN_OFFLOAD_H

#include "fsdp/optim.h"
#include "train/config.h"
#include "train/metrics.h"

/* Replaces what training.enable_cpu_offload means, and refuses what does not go together, naming
 * both options. */
fsdp_status fsdp__train_offload_check(fsdp__train_config *c);
/* Of parameters and gradients; the folder is the configuration's. */
fsdp_offload_policy fsdp__train_offload_policy(const fsdp__train_config *c);
/* Of the optimizer's state; says what was chosen. */
fsdp_status fsdp__train_offload_optimizer(const fsdp__train_config *c, fsdp_optimizer *opt,
                                          fsdp__metrics *m);

/* A parameter that is updated during backward. */
typedef struct fsdp__early_param {
    const fsdp_param *param;
    const int64_t *steps; /* that are done */
} fsdp__early_param;
/* early_step_in_backward: weights are updated during backward, and a gradient that is not finite
 * is an error before anything is made of it. *out: freed by the caller after the model; NULL if the
 * option is off. *steps is read during backward. */
fsdp_status fsdp__train_early_begin(const fsdp__train_config *c, fsdp_module *model,
                                    fsdp_optimizer *opt, const int64_t *steps,
                                    fsdp__early_param **out, fsdp__metrics *m);

/* At the end of a run: what was read and written, and the waiting. Collective. */
fsdp_status fsdp__train_offload_report(const fsdp__train_config *c, fsdp__metrics *m);

#endif
