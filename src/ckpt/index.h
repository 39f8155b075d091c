/*
 * index.h - what checkpoint.json says beyond the list of files: settings and counters of a run.
 */
#ifndef FSDP_CKPT_INDEX_H
#define FSDP_CKPT_INDEX_H

#include <jansson.h>

#include "ckpt/checkpoint.h"

/* Writes them into the object. */
fsdp_status fsdp__ckpt_index_put(json_t *root, const fsdp_optimizer *opt,
                                 const fsdp__ckpt_state *s);

/* What was read, until everything else was checked as well. */
typedef struct fsdp__ckpt_index {
    int64_t step, samples, optimizer_steps, skipped, skipped_in_row, ema_updates, growth_tracker;
    double loss_scale;
    fsdp_schedule schedule;
    bool has_schedule;
    uint64_t base; /* 0: frozen parameters are in the files */
} fsdp__ckpt_index;

/* Reads and checks them against what the run has; changes nothing but *out. */
fsdp_status fsdp__ckpt_index_take(const json_t *root, const char *path, const fsdp_optimizer *opt,
                                  const fsdp__ckpt_state *s, fsdp__ckpt_index *out);
/* Puts what was read where it belongs. */
fsdp_status fsdp__ckpt_index_apply(const fsdp__ckpt_index *x, fsdp_optimizer *opt,
                                   fsdp__ckpt_state *s);

#endif
