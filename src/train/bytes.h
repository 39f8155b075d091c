/*
 * bytes.h - the table of bytes by purpose: of the whole model, planned for a rank, measured.
 */
#ifndef FSDP_TRAIN_BYTES_H
#define FSDP_TRAIN_BYTES_H

#include "base/str.h"
#include "fsdp/nn.h"
#include "train/config.h"

/* Bytes of what has a formula; the rest (activations, communication, other) depends on the batch and
 * is measured. */
typedef struct fsdp__byte_plan {
    int64_t whole[FSDP_PURPOSE_COUNT]; /* all on one rank, nothing cut */
    int64_t rank[FSDP_PURPOSE_COUNT];  /* of the rank that holds most */
    int64_t whole_total, rank_total;
    int64_t in_files; /* bytes of a rank in files, which are in none of rank[] */
} fsdp__byte_plan;

/* After fully_shard. microbatches: forward calls of a step; above 1 gradients stay whole until the
 * last. */
fsdp_status fsdp__byte_plan_make(const fsdp__train_config *c, fsdp_module *model,
                                 int64_t microbatches, fsdp__byte_plan *out);
/* The grain of a choice of units (modules, inner ones first, and the root): bytes of parameters in
 * the compute dtype. */
typedef struct fsdp__grain {
    int64_t all;     /* the model's */
    int64_t peak;    /* at once whole: the root's, the running unit's, those gathered ahead */
    int64_t gathers; /* units that have parameters, the root's among them */
} fsdp__grain;
fsdp_status fsdp__grain_make(const fsdp__train_config *c, fsdp_module *model,
                             fsdp_module *const *units, int64_t n, fsdp__grain *out);

/* peak (FSDP_PURPOSE_COUNT) and peak_total of the largest rank; NULL: only what is planned. */
void fsdp__byte_plan_text(const fsdp__byte_plan *p, const int64_t *peak, int64_t peak_total,
                          fsdp__str *out);

#endif
