/*
 * sampler.h - which rows a rank computes in a step, and their tokens.
 *
 * A token file is cut into rows: row i is tokens i*T .. i*T + T, both ends
 * included, T = seq_len, so neighbours share one token and each token is a
 * target once. An epoch is a permutation of the rows, a function of (seed,
 * epoch) that is evaluated at one place and never stored.
 *
 * The only state is a cursor: the number of samples that have been consumed
 * since the start. Sample c is place c % rows of epoch c / rows, so a sample's
 * number is also its global id (what dropout is keyed by), on any number of
 * ranks. A step takes global_batch samples, or what is left of the epoch.
 *
 * A step's n rows are dealt in blocks: rank r of N computes rows r * ceil(n/N)
 * and on, maybe none. All ranks make equally many calls; one that has no row
 * for a call gets a row that is masked whole.
 */
#ifndef FSDP_DATA_SAMPLER_H
#define FSDP_DATA_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "data/token_file.h"

/* The target that counts for nothing. */
#define FSDP__IGNORED ((int64_t)-100)
/* The id of a row that is no sample. */
#define FSDP__NO_SAMPLE UINT64_MAX

typedef struct fsdp__sampler {
    const fsdp__tokens *tokens; /* not owned */
    int64_t vocab_size;         /* of the model: ids are checked against it */
    int64_t rows, seq_len, global_batch;
    uint64_t key;
    bool shuffle; /* off: rows in order, the same in each epoch */
    bool aligned; /* see fsdp__sampler_plan; off after init */
} fsdp__sampler;

/* An error if the file does not hold one row (seq_len + 1 tokens). */
fsdp_status fsdp__sampler_init(fsdp__sampler *s, const fsdp__tokens *tokens, int64_t vocab_size,
                               int64_t seq_len, int64_t global_batch, uint64_t seed, bool shuffle);
int64_t fsdp__sampler_steps_per_epoch(const fsdp__sampler *s);
/* The row of the file that is sample `sample`. */
int64_t fsdp__sampler_row(const fsdp__sampler *s, int64_t sample);

/* One step of one rank. */
typedef struct fsdp__sampler_step {
    int64_t first;        /* sample id of the step's first row: the cursor before it */
    int64_t rows;         /* of all ranks together, at least 1 */
    int64_t epoch;        /* that they belong to */
    int64_t valid_tokens; /* targets of all ranks that count */
    int64_t rank;
    int64_t block;               /* rows of a rank that has its full share */
    int64_t own_first, own_rows; /* this rank's rows, counted in the step */
    int64_t microbatch;          /* rows a call at most */
    int64_t calls;               /* forward calls, the same on all ranks, at least 1 */
} fsdp__sampler_step;

/* The step that begins at `cursor`, of rank `rank` of `ranks` with at most `microbatch` rows a
 * call. The cursor after it is first + rows. Aligned: a rank's share is a power of two of whole
 * microbatches, the least that will do, so that the step's microbatches are the same ones on any
 * number of ranks and each rank has a subtree of them; the last ranks may have fewer, or none. */
fsdp_status fsdp__sampler_plan(const fsdp__sampler *s, int64_t cursor, int rank, int ranks,
                               int64_t microbatch, fsdp__sampler_step *out);

/* The samples of call `call` of the step's rank: *n from id *first, none if it has no row then. */
void fsdp__sampler_samples(const fsdp__sampler_step *step, int64_t call, int64_t *first, int64_t *n);

/* What one forward call gets. The buffers are reused from call to call. */
typedef struct fsdp__microbatch {
    int64_t *inputs;   /* (rows, T) */
    int64_t *targets;  /* (rows, T), FSDP__IGNORED where nothing counts */
    uint64_t *samples; /* (rows) global sample ids; FSDP__NO_SAMPLE for a masked row */
    int64_t rows, seq_len;
    int64_t valid_tokens; /* in this microbatch */
    bool masked;          /* one row without a sample */
    int64_t index;        /* among the step's microbatches that have samples, in order of their
                             rows; -1 for a masked one */
    int64_t row_cap, cap;
} fsdp__microbatch;

/* Fills mb with call `call` of the step (0 .. calls - 1). */
fsdp_status fsdp__sampler_fill(const fsdp__sampler *s, const fsdp__sampler_step *step, int64_t call,
                               fsdp__microbatch *mb);
void fsdp__microbatch_free(fsdp__microbatch *mb);

#endif
