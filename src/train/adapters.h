/*
 * adapters.h - the lora section of a run: adapters beside the layers of the model that is trained.
 */
#ifndef FSDP_TRAIN_ADAPTERS_H
#define FSDP_TRAIN_ADAPTERS_H

#include "fsdp/nn.h"
#include "train/config.h"
#include "train/metrics.h"

/* Values of the section against each other and against what is saved. */
fsdp_status fsdp__adapters_resolve(const fsdp__train_config *c);

/* Applies them to a model on meta that is thrown away: whether the folder to start from is there and
 * fits the model, and the names mean layers of it. */
fsdp_status fsdp__adapters_check(const fsdp__train_config *c, fsdp_module *model);

/* All of the following do nothing, and give FSDP_OK, unless lora.enable is on. */
/* What decides what the adapters' numbers mean, for a checkpoint; *out NULL: there are none. The
 * caller frees it. */
fsdp_status fsdp__adapters_text(const fsdp__train_config *c, fsdp_module *model, char **out);

/* Before sharding: adapters as c, or the folder that it names, says. */
fsdp_status fsdp__adapters_apply(const fsdp__train_config *c, fsdp_module *model, fsdp__metrics *m);
/* Behind the base's values: those of the folder, or new ones. */
fsdp_status fsdp__adapters_fill(const fsdp__train_config *c, fsdp_module *model);
/* A fingerprint of the base whose weights stand in model.hf_assets_path, so that checkpoints need not
 * hold them; 0 for any other run. Collective. */
fsdp_status fsdp__adapters_base(const fsdp__train_config *c, fsdp_module *model, uint64_t *base);
/* In the first two steps (*seen counts them), between backward and the optimizer's step: how many
 * adapters' gradients are not zero. In the first those of A are, since B is zero. Collective. */
fsdp_status fsdp__adapters_report(const fsdp__train_config *c, fsdp_module *model, int *seen,
                                  fsdp__metrics *m);
/* The adapters alone into the folder. Collective. */
fsdp_status fsdp__adapters_save(const fsdp__train_config *c, fsdp_module *model, const char *folder,
                                fsdp__metrics *m);
/* Into the base, if c says so. Collective. */
fsdp_status fsdp__adapters_merge(const fsdp__train_config *c, fsdp_module *model, fsdp__metrics *m);

/* Operations a token: weights that do not learn need none for their gradient. */
double fsdp__adapters_flops(const fsdp__train_config *c, fsdp_module *model, double whole,
                            double weights);

#endif
