/*
 * generate.h - continuing a sequence of tokens with a model, one token at a time.
 */
#ifndef FSDP_GENERATE_GENERATE_H
#define FSDP_GENERATE_GENERATE_H

#include <stdint.h>

#include "fsdp/models.h"
#include "models/config.h"

typedef struct fsdp__generate_options {
    int64_t tokens;     /* new ones at most */
    double temperature; /* logits are divided by it; 0: always the likeliest token */
    int64_t top_k;      /* only the k likeliest tokens; 0: all */
    double top_p;       /* only the likeliest tokens that have this probability together; 1: all */
    uint64_t seed;
} fsdp__generate_options;

/* 100 tokens, greedy. */
fsdp__generate_options fsdp__generate_defaults(void);

/* The next token for logits (n), as options o say; draw in [0, 1) decides among several. Equally
 * likely tokens count in order of their ids. -1 with the error kept: no memory, no finite logit. */
int64_t fsdp__sample(const float *logits, int64_t n, const fsdp__generate_options *o, double draw);

/* Called with each new token; other than 0 ends the generation. */
typedef int (*fsdp__generate_fn)(void *arg, int64_t token);

/* Continues prompt (n >= 1) until an end token of c, o->tokens tokens, or fn's word. The prompt and
 * the new tokens fit into the model's longest sequence, else an error. The end token is not handed
 * to fn. */
fsdp_status fsdp__generate(fsdp_module *model, const fsdp_model_config *c, const int32_t *prompt,
                           int64_t n, const fsdp__generate_options *o, fsdp__generate_fn fn,
                           void *arg);

#endif
