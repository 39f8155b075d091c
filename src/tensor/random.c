/*
 * random.c - the keys that dropout draws by.
 *
 * A row's key is a function of (seed, step, global sample, module path and
 * call, element within the sample), so masks are the same on any number of
 * ranks. Dim 0 of the tensor is a multiple of the samples of the microbatch:
 * row r belongs to sample r * samples / rows.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "tensor/state.h"

fsdp__random *fsdp__random_get(void)
{
    fsdp__tensor_state *s = fsdp__tensor_state_get();
    return s ? &s->random : NULL;
}

fsdp_status fsdp_random_set(uint64_t seed, uint64_t step, const uint64_t *sample_ids, int64_t n)
{
    fsdp__random *r = fsdp__random_get();
    if (!r) return fsdp_error();
    if (n < 0 || (n > 0 && !sample_ids))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_random_set: %lld sample ids%s; expected %s",
                          (long long)n, n < 0 ? "" : " at NULL",
                          n < 0 ? "0 (none) or more" : "an array of them");
    uint64_t *ids = NULL;
    if (n > 0) {
        ids = fsdp__calloc((size_t)n, sizeof *ids, "sample ids");
        if (!ids) return fsdp_error();
        memcpy(ids, sample_ids, (size_t)n * sizeof *ids);
    }
    free(r->ids);
    r->ids = ids;
    r->n_ids = n;
    r->seed = seed;
    r->step = step;
    r->calls = 0;
    r->round++;
    return FSDP_OK;
}

fsdp_status fsdp__random_enter(fsdp__random *r, uint64_t *path)
{
    fsdp__random_tape *from = r->tape;
    while (from && !from->plays)
        from = from->outer;
    if (from && from->at == from->count)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "a recomputation in backward calls more than the %lld modules that its "
                          "forward called; what is checkpointed must do the same both times",
                          (long long)from->count);
    if (from) *path = from->keys[from->at++];
    for (fsdp__random_tape *t = r->tape; t != from; t = t->outer) {
        FSDP_TRY(FSDP__GROW(t->keys, t->cap, t->count + 1, "the random state of a checkpoint"));
        t->keys[t->count++] = *path;
    }
    return FSDP_OK;
}

fsdp_tensor *fsdp__random_keys(int64_t rows, const char *what)
{
    fsdp__random *r = fsdp__random_get();
    if (!r) return NULL;
    int64_t samples = r->n_ids ? r->n_ids : rows;
    if (samples && rows % samples != 0) {
        fsdp__fail(FSDP_INVALID_SHAPE,
                   "%s: dim 0 has %lld rows for %lld samples; expected a multiple of the samples "
                   "given to fsdp_random_set",
                   what, (long long)rows, (long long)samples);
        return NULL;
    }
    fsdp_tensor *t = fsdp__tensor_create(FSDP_U64, 1, &rows, FSDP_CPU);
    if (!t) return NULL;
    uint64_t *key = fsdp_data(t);
    uint64_t base = fsdp__rng_mix(fsdp__rng_key(r->seed), r->step);
    base = fsdp__rng_mix(fsdp__rng_mix(base, r->path), r->calls++);
    int64_t per = samples ? rows / samples : 1;
    for (int64_t i = 0; i < rows; i++) {
        uint64_t id = r->n_ids ? r->ids[i / per] : (uint64_t)(fsdp_rank() * rows + i);
        key[i] = fsdp__rng_mix(fsdp__rng_mix(base, id), (uint64_t)(i % per));
    }
    return t;
}
