/*
 * lora.h - LoRA: a frozen model that learns by small matrices beside its
 * linear layers (Hu et al. 2021, arXiv:2106.09685).
 *
 * An adapted layer gives base(x) + scale * B(A(dropout(x))): A (rank, in), B
 * (out, rank), scale = alpha / rank, or alpha / sqrt(rank) with rslora
 * (Kalajdzievski 2023, arXiv:2312.03732). The order:
 *
 *     fsdp_device_push(FSDP_META);
 *     model = fsdp_model_create(config);
 *     fsdp_device_pop();
 *     fsdp_lora_apply(model, &options);     adapters beside layers, base frozen
 *     fsdp_fully_shard(...);                blocks, then the model
 *     fsdp_to_empty(model, FSDP_CPU);
 *     fsdp_model_load_weights(model, ...);  the base
 *     fsdp_lora_reset(model, seed);         or fsdp_lora_load (hf.h)
 *
 * Parameters of the base keep their names; an adapter's are those of its layer
 * with ".lora_A.weight" and ".lora_B.weight" behind, as peft's.
 */
#ifndef FSDP_LORA_H
#define FSDP_LORA_H

#include "nn.h"

FSDP_EXTERN_C_BEGIN

typedef struct fsdp_lora_options {
    int64_t rank; /* 1 or more */
    double alpha;
    double dropout; /* of what A is given, in training: 0 <= p < 1 */
    int rslora;
    /* Layers by name: a whole dotted name or its end behind a dot ("q_proj",
     * "mlp.up_proj"), as peft's lists. n_target_modules 0: every linear layer
     * that stands in a block, as peft's "all-linear": not the head. */
    const char *const *target_modules;
    int n_target_modules;
    /* Instead: an extended regular expression (POSIX, with Python's \d and
     * (?: ) that a whole name must match, as a string of peft's. NULL: none. */
    const char *target_pattern;
} fsdp_lora_options;

/* rank 8, alpha 16, no dropout, no rslora, every linear layer. */
FSDP_API fsdp_lora_options fsdp_lora_defaults(void);

/* Puts adapters beside the linear layers below m that o names, and turns
 * requires_grad off for every other parameter below m. Adapters are f32, on
 * the device of their layer's weight; A's rule is uniform in +-1/sqrt(in)
 * (peft's kaiming_uniform with a = sqrt(5)), B's is zeros, so nothing changes
 * at first. Before fsdp_fully_shard, once a model. A name that fits no linear
 * layer is an error, and after an error nothing has changed. o NULL: the
 * defaults; its texts are needed during the call only. */
FSDP_API fsdp_status fsdp_lora_apply(fsdp_module *m,
                                     const fsdp_lora_options *o);

/* Values of the adapters by their rules, as fsdp_reset_parameters gives them:
 * a function of (seed, name, element). The base is left as it is. */
FSDP_API fsdp_status fsdp_lora_reset(fsdp_module *m, uint64_t seed);

/* Adds scale * B A to each adapted weight, in f32; from then on the layers are
 * the base's alone and the adapters do nothing. m is sharded or not; every
 * rank calls it (collective: adapters are gathered). A second call, or a model
 * without adapters, is an error. */
FSDP_API fsdp_status fsdp_lora_merge(fsdp_module *m);

/* Adapted layers below m. */
FSDP_API int64_t fsdp_lora_count(fsdp_module *m);
/* Whether they were merged. */
FSDP_API int fsdp_lora_merged(fsdp_module *m);

FSDP_EXTERN_C_END
#endif
