/*
 * nonfinite.h - where a NaN or an infinity came from: the step is computed once more, with every
 * module and every gradient looked at, until the first is found.
 */
#ifndef FSDP_TRAIN_NONFINITE_H
#define FSDP_TRAIN_NONFINITE_H

#include "base/str.h"
#include "data/sampler.h"
#include "fsdp/nn.h"

/* A step that can be computed again. Nothing here changes a weight; gradients are dropped. */
typedef struct fsdp__probe {
    fsdp_module *model; /* sharded */
    const fsdp__sampler *sampler;
    const fsdp__sampler_step *plan;
    /* Forward of microbatch `call` as in training: its loss, as backward begins from it, in the
     * innermost scope; NULL with the error kept. */
    fsdp_tensor *(*loss)(void *arg, int64_t call);
    void *arg;
} fsdp__probe;

/* Appends what is known of a loss that was not finite: "the loss of rank 3, microbatch 1 (samples
 * 26, 27) is nan: first in the output of model.layers.2". Collective; the same text on all ranks. */
fsdp_status fsdp__nonfinite_loss(const fsdp__probe *p, int rank, int64_t call, double loss,
                                 fsdp__str *out);
/* The same of gradients: which rank's, in which microbatch, of which parameter first. */
fsdp_status fsdp__nonfinite_gradient(const fsdp__probe *p, double norm, fsdp__str *out);

/* ---- rehearsal: debug.inject_nonfinite ------------------------------------------- */

/* "forward:RANK:STEP:MICROBATCH:MODULE" or "backward:...": from 0, but for the step, from 1. */
typedef struct fsdp__injection {
    bool backward;
    int rank;
    int64_t step, call;
    const char *module;         /* in the text that was parsed; NULL: there is none */
    int64_t now_step, now_call; /* set by the trainer */
    bool seen, done;            /* the module was called there and then; the NaN is in */
} fsdp__injection;

fsdp_status fsdp__injection_parse(const char *text, fsdp__injection *out);
/* An error where the run has no such rank, step or microbatch. calls: a step's; 0: not known. */
fsdp_status fsdp__injection_check(const char *text, int ranks, int64_t steps, int64_t calls);
/* That module's output, or the gradient of it, becomes NaN there and then. x must outlive m. */
fsdp_status fsdp__injection_install(fsdp__injection *x, fsdp_module *m);
/* After the backward of a step, before its update: an error on the rank meant if this was the step
 * and nothing was injected. */
fsdp_status fsdp__injection_settle(const fsdp__injection *x);

#endif
