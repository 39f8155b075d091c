/*
 * strategy.h - how the model of a run is cut: from the parallelism, training and prefetch sections to
 * a mesh and to units. docs/strategies.md says which fields mean which strategy.
 */
#ifndef FSDP_TRAIN_STRATEGY_H
#define FSDP_TRAIN_STRATEGY_H

#include "fsdp/shard.h"
#include "train/config.h"
#include "train/metrics.h"

/* Words and numbers of the section, before any rank is started. */
fsdp_status fsdp__strategy_check(const fsdp__train_config *c);
/* Gathered parameters stay from forward to backward. */
bool fsdp__strategy_keeps(const fsdp__train_config *c);
/* Ranks among which a part of them stays (fsdp_reshard_after_forward as a number); 0: no number. */
int64_t fsdp__strategy_part(const fsdp__train_config *c);
/* "FULL_SHARD", ... */
const char *fsdp__strategy_name(const fsdp__train_config *c);

/* Makes the mesh and prints it and the strategy. Collective. */
fsdp_status fsdp__strategy_mesh(const fsdp__train_config *c, fsdp__metrics *m, fsdp_mesh **out);
/* Units of the model over the mesh. */
fsdp_status fsdp__strategy_shard(const fsdp__train_config *c, fsdp_mesh *mesh, fsdp_module *model);

#endif
