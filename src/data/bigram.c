/*
 * bigram.c - counts of pairs in a hash table: real text has far fewer than
 * V * V different ones.
 */
#include "data/bigram.h"

#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/pairs.h"

fsdp_status fsdp__bigram_loss(const fsdp__tokens *train, const fsdp__tokens *validation,
                              int64_t vocab_size, double *nats)
{
    fsdp__pairs pairs = {0};
    int64_t *firsts = NULL;
    fsdp_status s = FSDP_OK;
    double sum = 0.0;
    if (validation->count < 2)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: %lld tokens hold no pair to evaluate a bigram model on; give at "
                          "least 2",
                          validation->path, (long long)validation->count);
    FSDP_GO(fsdp__tokens_check(train, vocab_size));
    FSDP_GO(fsdp__tokens_check(validation, vocab_size));
    firsts = fsdp__calloc((size_t)vocab_size, sizeof *firsts, "bigram counts");
    if (!firsts) {
        s = fsdp_error();
        goto done;
    }
    for (int64_t i = 0; i + 1 < train->count; i++) {
        uint32_t a = (uint32_t)fsdp__tokens_get(train, i);
        int64_t *n =
            fsdp__pairs_add(&pairs, fsdp__pair_key(a, (uint32_t)fsdp__tokens_get(train, i + 1)));
        if (!n) {
            s = fsdp_error();
            goto done;
        }
        ++*n;
        firsts[a]++;
    }
    for (int64_t i = 0; i + 1 < validation->count; i++) {
        uint32_t a = (uint32_t)fsdp__tokens_get(validation, i);
        const int64_t *n = fsdp__pairs_get(
            &pairs, fsdp__pair_key(a, (uint32_t)fsdp__tokens_get(validation, i + 1)));
        sum -= log((double)((n ? *n : 0) + 1) / (double)(firsts[a] + vocab_size));
    }
    *nats = sum / (double)(validation->count - 1);
done:
    free(firsts);
    fsdp__pairs_free(&pairs);
    return s;
}
