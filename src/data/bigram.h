/*
 * bigram.h - the add-one-smoothed bigram model: what a language model must
 * beat to have learned more than which token follows which.
 */
#ifndef FSDP_DATA_BIGRAM_H
#define FSDP_DATA_BIGRAM_H

#include "data/token_file.h"

/* Counts pairs (a, b) of neighbours in train, so that p(b | a) = (n(a b) + 1) / (n(a) + V) with V
 * the vocabulary and n(a) the pairs that begin with a; *nats is the mean of -ln p(b | a) over the
 * pairs of validation. Every id must be below vocab_size; validation has at least two tokens. */
fsdp_status fsdp__bigram_loss(const fsdp__tokens *train, const fsdp__tokens *validation,
                              int64_t vocab_size, double *nats);

#endif
