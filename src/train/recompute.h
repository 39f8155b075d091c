/*
 * recompute.h - the activation_checkpoint section of a run: which blocks of the model are
 * checkpoints, and what of them is kept.
 */
#ifndef FSDP_TRAIN_RECOMPUTE_H
#define FSDP_TRAIN_RECOMPUTE_H

#include "fsdp/nn.h"
#include "train/config.h"
#include "train/metrics.h"

/* An op of a block that may be kept, as the first forward saw it. */
typedef struct fsdp__block_op {
    char label[64]; /* "self_attn.q_proj", or the op's name */
    int64_t index, bytes;
    double flops;
    bool keep;
} fsdp__block_op;

typedef struct fsdp__block_plan {
    const struct fsdp__train_recompute *all;
    fsdp_module *block;
    bool on; /* a checkpoint */
    fsdp_checkpoint_report report;
    fsdp__block_op *ops;
    int64_t n_ops, cap_ops;
} fsdp__block_plan;

/* Owned by the trainer; must not move once applied. */
typedef struct fsdp__train_recompute {
    int mode;    /* enum fsdp__recompute_mode */
    int64_t every; /* selective: every k-th block; 0: by op */
    double budget;
    fsdp__block_plan *blocks;
    int64_t n_blocks;
    bool measured;
    int64_t peak_none, peak_full, peak_planned; /* budget: bytes of activations, expected */
} fsdp__train_recompute;

/* The section's values. */
fsdp_status fsdp__train_recompute_check(const fsdp__train_config *c);
/* Before sharding: makes checkpoints of the blocks. model lives longer than r's use. */
fsdp_status fsdp__train_recompute_apply(const fsdp__train_config *c, fsdp_module *model,
                                        fsdp__train_recompute *r);
/* Before the first microbatch and between its forward and backward: peaks are measured from here. */
void fsdp__train_recompute_begin(const fsdp__train_recompute *r, fsdp__metrics *m);
void fsdp__train_recompute_turn(fsdp__train_recompute *r, fsdp__metrics *m);
/* Behind its backward: chooses what a budget allows, and says what is kept and what is computed
 * again beside the model's `flops` of that microbatch. Later calls do nothing. */
fsdp_status fsdp__train_recompute_settle(fsdp__train_recompute *r, double flops, fsdp__metrics *m);
/* Floating-point operations that one microbatch's backward runs again, by the plan. */
double fsdp__train_recompute_flops(const fsdp__train_recompute *r);
void fsdp__train_recompute_free(fsdp__train_recompute *r);

#endif
