/*
 * groups.h - optimizer.param_groups: from maps in the configuration to an optimizer's groups.
 */
#ifndef FSDP_TRAIN_GROUPS_H
#define FSDP_TRAIN_GROUPS_H

#include "fsdp/optim.h"
#include "train/config.h"
#include "train/metrics.h"

/* Names, types and ranges of all maps; needs no model. */
fsdp_status fsdp__train_groups_check(const fsdp__train_config *c);
/* Adds them to opt, in their order, and says which parameters they have taken. */
fsdp_status fsdp__train_groups_add(const fsdp__train_config *c, fsdp_optimizer *opt,
                                   fsdp__metrics *m);

#endif
