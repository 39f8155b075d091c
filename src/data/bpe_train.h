/*
 * bpe_train.h - making a byte-level BPE tokenizer from text.
 *
 * Texts are cut by GPT-2's expression; the 256 bytes are the first tokens
 * (after the special ones) and the most frequent pair is merged until the
 * vocabulary is full, the pair of lower ids first among equals. The result
 * depends on the texts alone, not on their order.
 */
#ifndef FSDP_DATA_BPE_TRAIN_H
#define FSDP_DATA_BPE_TRAIN_H

#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__bpe_trainer fsdp__bpe_trainer;

fsdp__bpe_trainer *fsdp__bpe_trainer_create(void);
void fsdp__bpe_trainer_free(fsdp__bpe_trainer *t); /* NULL: nothing */
/* Counts the words of one text (n bytes; what is no UTF-8 counts as U+FFFD). */
fsdp_status fsdp__bpe_trainer_add(fsdp__bpe_trainer *t, const char *text, size_t n);
/* Writes dir/tokenizer.json with exactly vocab_size tokens, and dir/tokenizer_config.json, where
 * the last special token begins and ends texts. special (count) come first and take the ids from
 * 0. An error if the texts have too few pairs. To be called once. */
fsdp_status fsdp__bpe_trainer_write(fsdp__bpe_trainer *t, int64_t vocab_size,
                                    const char *const *special, int64_t count, const char *dir);

#endif
