/*
 * parity_internal.h - the model of a comparison, its batches, and comparing its parts.
 */
#ifndef FSDP_TRAIN_PARITY_INTERNAL_H
#define FSDP_TRAIN_PARITY_INTERNAL_H

#include "format/safetensors.h"
#include "fsdp/nn.h"
#include "fsdp/optim.h"
#include "models/config.h"
#include "train/parity.h"

/* ---- the model (parity_model.c) ---------------------------------------------------- */

typedef struct fsdp__parity_run {
    const fsdp__parity_options *o;
    fsdp__parity_report *report;
    fsdp_model_config config;
    fsdp_module *model;
} fsdp__parity_run;

/* Loads the model of a folder onto all ranks, sharded as asked, in so many replicas (they divide
 * the ranks). bf16: gathers in bf16, reductions in f32. */
fsdp_status fsdp__parity_make_model(fsdp__parity_run *r, const char *folder, int64_t replicas,
                                    bool bf16);

/* This rank's rows of a global batch of `rows` sequences; a rank that has none runs row 0 masked. */
typedef struct fsdp__parity_batch {
    fsdp_tensor *tokens, *targets; /* i64 (rows here, T); belong to the innermost scope */
    int64_t row0, rows;            /* rows 0: masked */
} fsdp__parity_batch;
/* Row i has its T tokens at tokens + i * stride, its targets likewise. */
fsdp_status fsdp__parity_deal(const int64_t *tokens, const int64_t *targets, int64_t stride,
                              int64_t rows, int64_t T, fsdp__parity_batch *out);

/* Forward and backward of one microbatch; *sum += the loss, summed over this rank's rows. Gradients
 * are those of the loss times scale; they are reduced if this is the last of the step. */
fsdp_status fsdp__parity_backward(fsdp__parity_run *r, const fsdp__parity_batch *b, double scale,
                                  bool last, double *sum);
/* x summed over all ranks. */
fsdp_status fsdp__parity_sum(double *x, int64_t n);

/* ---- comparing (parity_compare.c) ---------------------------------------------------- */

/* A tensor of a file, whole, as i64 or f64. The caller frees it; NULL with the error kept. */
void *fsdp__parity_read(fsdp__st *st, const char *name, fsdp_dtype t, int ndim, int64_t *sizes);
/* A scalar of a file. */
fsdp_status fsdp__parity_read_scalar(fsdp__st *st, const char *name, double *out);

/* A new line of the report. */
fsdp__parity_check *fsdp__parity_add(fsdp__parity_run *r, const char *what, const char *measure,
                                     double bound);
/* Notes one error; the largest stays, and a NaN is the largest of all. */
void fsdp__parity_note(fsdp__parity_check *c, double error, const char *fmt, ...)
    FSDP_PRINTF(3, 4);

/* Each parameter (or, gradients, its gradient) against <prefix><name> of the file: largest
 * difference / largest value, or with frobenius, norm of the difference / norm. */
fsdp_status fsdp__parity_params(fsdp__parity_run *r, fsdp__st *st, const char *prefix,
                                bool gradients, bool frobenius, fsdp__parity_check *c);

#endif
