/*
 * parity.h - a folder of numbers that another program computed, computed again.
 *
 * Two kinds of folder. A model's: config.json, model.safetensors, and what stands there of
 * expected.safetensors (input_ids, labels, logits, loss, grad.<name>), and of training.json with
 * train_tokens.safetensors and after20.safetensors. A run's, with the model's folder given beside:
 * run.json, tokens.safetensors, full.safetensors (model.<name>).
 */
#ifndef FSDP_TRAIN_PARITY_H
#define FSDP_TRAIN_PARITY_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef enum fsdp__parity_strategy {
    FSDP__PARITY_FULL,    /* FULL_SHARD */
    FSDP__PARITY_GRAD_OP, /* SHARD_GRAD_OP: kept after forward */
    FSDP__PARITY_NONE     /* replicas */
} fsdp__parity_strategy;

typedef struct fsdp__parity_options {
    const char *model; /* the model's folder, for a run's; NULL: dir is a model's */
    double tolerance;  /* multiplies all bounds */
    fsdp__parity_strategy strategy;
} fsdp__parity_options;

/* One line of the report: the largest error of many numbers. */
typedef struct fsdp__parity_check {
    const char *what;    /* "logits" */
    const char *measure; /* how errors are measured */
    double error, bound;
    char at[120]; /* where the largest is: a parameter, "step 7", or "" */
    int64_t count; /* numbers compared */
} fsdp__parity_check;

enum { FSDP__PARITY_MAX = 8 };

typedef struct fsdp__parity_report {
    char title[200]; /* what was compared, on what */
    fsdp__parity_check check[FSDP__PARITY_MAX];
    int count;
} fsdp__parity_report;

/* Collective over the world; every rank gets the same report. Nothing to compare is an error. */
fsdp_status fsdp__parity(const char *dir, const fsdp__parity_options *o, fsdp__parity_report *out);
/* Every error within its bound. */
bool fsdp__parity_passed(const fsdp__parity_report *r);

#endif
