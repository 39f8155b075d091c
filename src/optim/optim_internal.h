/*
 * optim_internal.h - what the files of an optimizer share.
 */
#ifndef FSDP_OPTIM_OPTIM_INTERNAL_H
#define FSDP_OPTIM_OPTIM_INTERNAL_H

#include <stdbool.h>

#include "device/file.h"
#include "fsdp/optim.h"

enum { FSDP__MAX_STATES = 2 };

/* One parameter. */
typedef struct fsdp__opt_slot {
    fsdp_param *param; /* own reference */
    fsdp_tensor *state[FSDP__MAX_STATES];
    int group;    /* index of its group; -1: of none */
    bool stepped; /* during backward, in this step */
    fsdp_optimizer *optimizer;
} fsdp__opt_slot;

struct fsdp_optimizer {
    bool adamw;
    fsdp_adamw_options a;
    fsdp_sgd_options s;
    double lr;
    int64_t steps;
    fsdp__opt_slot *slots;
    int64_t n;
    fsdp_group_options *groups; /* resolved: no NAN left; patterns owned */
    int n_groups;
    fsdp__allocator *file; /* where state lies; NULL: in memory */
    int64_t promised;      /* bytes that were asked of the file */
    bool in_backward;
};

/* What holds for a slot: its group's settings, or the optimizer's own. */
fsdp_group_options fsdp__opt_settings(const fsdp_optimizer *o, const fsdp__opt_slot *s);
void fsdp__opt_groups_free(fsdp_optimizer *o);

/* ---- optimizer.c ---- */
/* What would stop a step of this slot. */
fsdp_status fsdp__opt_check(const fsdp__opt_slot *s);
/* The slot's parameter by its gradient, as step number `step`; its memory is made before. */
fsdp_status fsdp__opt_update(fsdp_optimizer *o, fsdp__opt_slot *s, int64_t step);

/* Refuses `what`, which found no gradient, where that of p waits for a reduction. */
fsdp_status fsdp__opt_refuse_unreduced(const fsdp_param *p, const char *what);

/* ---- offload.c ---- */
/* From hold to let the slot's parameter, gradient and state are in memory. */
fsdp_status fsdp__opt_hold(const fsdp__opt_slot *s);
void fsdp__opt_let(const fsdp__opt_slot *s, bool written);
/* Reads what the slots behind slot i need. */
void fsdp__opt_ahead(const fsdp_optimizer *o, int64_t i);
void fsdp__opt_offload_close(fsdp_optimizer *o);

/* ---- in_backward.c ---- */
void fsdp__opt_in_backward_end(fsdp_optimizer *o);
/* Refuses `what`, which needs gradients that an optimizer uses up during backward. */
fsdp_status fsdp__opt_refuse_early(const fsdp_param *p, const char *what);

#endif
