/*
 * inputs.h - the files that a run reads before it trains, and whether they go together.
 */
#ifndef FSDP_TRAIN_INPUTS_H
#define FSDP_TRAIN_INPUTS_H

#include "data/token_file.h"
#include "train/config.h"

typedef struct fsdp__train_inputs {
    fsdp__tokens *train, *validation; /* validation NULL: none is asked for */
    char *tokenizer;                  /* path of tokenizer.json */
    fsdp_model_config model;
} fsdp__train_inputs;

/* Opens the token files and settles the model. with_tokenizer: reads the tokenizers as well, compares
 * their vocabularies, gives the model the tokenizer's end token, and looks whether names of layers
 * and units mean something in it; one rank does that for all, and the launcher before it starts any.
 */
fsdp_status fsdp__train_inputs_open(const fsdp__train_config *c, bool with_tokenizer,
                                    fsdp__train_inputs *out);
void fsdp__train_inputs_close(fsdp__train_inputs *in);

#endif
