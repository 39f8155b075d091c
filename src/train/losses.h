/*
 * losses.h - the sum of a step's losses over microbatches and ranks, in an order that does not
 * depend on the ranks.
 */
#ifndef FSDP_TRAIN_LOSSES_H
#define FSDP_TRAIN_LOSSES_H

#include <stdbool.h>

#include "data/sampler.h"
#include "fsdp/comm.h"

typedef struct fsdp__losses {
    double *mine; /* (cap) this rank's loss of each call, then its flag */
    double *all;  /* (ranks * cap) those of all ranks */
    int64_t cap;
    int ranks;
} fsdp__losses;

/* What the ranks' losses say together; the same on all ranks. */
typedef struct fsdp__loss_sum {
    double sum;      /* of the losses, which are sums over tokens themselves */
    bool flag;       /* a rank raised its own */
    int bad_rank;    /* whose loss is the first that is not finite, by rank and call; -1: none */
    int64_t bad_call;
} fsdp__loss_sum;

/* Room for a step of `calls` forward calls. */
fsdp_status fsdp__losses_reserve(fsdp__losses *l, int ranks, int64_t calls);
void fsdp__losses_free(fsdp__losses *l);
/* l->mine[0 .. plan->calls - 1] are this rank's. The microbatches that have rows, in the order of
 * the rows, are the leaves of one tree. Collective over world. */
fsdp_status fsdp__losses_sum(fsdp__losses *l, fsdp_group *world, const fsdp__sampler_step *plan,
                             bool flag, fsdp__loss_sum *out);

#endif
