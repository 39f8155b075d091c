/*
 * optim_internal.h - what the files of an optimizer share.
 */
#ifndef FSDP_OPTIM_OPTIM_INTERNAL_H
#define FSDP_OPTIM_OPTIM_INTERNAL_H

#include <stdbool.h>

#include "fsdp/optim.h"

enum { FSDP__MAX_STATES = 2 };

/* One parameter. */
typedef struct fsdp__opt_slot {
    fsdp_param *param; /* own reference */
    fsdp_tensor *state[FSDP__MAX_STATES];
    int group; /* index of its group; -1: of none */
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
};

/* What holds for a slot: its group's settings, or the optimizer's own. */
fsdp_group_options fsdp__opt_settings(const fsdp_optimizer *o, const fsdp__opt_slot *s);
void fsdp__opt_groups_free(fsdp_optimizer *o);

#endif
