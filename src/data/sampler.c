/*
 * sampler.c - dealing the rows of a token file to steps and ranks.
 *
 * Everything is computed from (seed, cursor, rank, ranks); nothing is kept
 * between steps, so a run resumed on another number of ranks goes on with the
 * next sample.
 */
#include "data/sampler.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

fsdp_status fsdp__sampler_init(fsdp__sampler *s, const fsdp__tokens *tokens, int64_t vocab_size,
                               int64_t seq_len, int64_t global_batch, uint64_t seed, bool shuffle)
{
    if (seq_len < 1 || global_batch < 1)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "sampler: sequence length %lld and global batch %lld; both must be at "
                          "least 1",
                          (long long)seq_len, (long long)global_batch);
    if (tokens->count <= seq_len)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: the dataset has %lld tokens, one row of sequence length %lld needs "
                          "%lld; add text or shorten the sequence",
                          tokens->path, (long long)tokens->count, (long long)seq_len,
                          (long long)seq_len + 1);
    *s = (fsdp__sampler){.tokens = tokens,
                         .vocab_size = vocab_size,
                         .rows = (tokens->count - 1) / seq_len,
                         .seq_len = seq_len,
                         .global_batch = global_batch,
                         .key = fsdp__rng_mix_str(fsdp__rng_key(seed), "sampler"),
                         .shuffle = shuffle};
    return FSDP_OK;
}

int64_t fsdp__sampler_steps_per_epoch(const fsdp__sampler *s)
{
    return ceil_div(s->rows, s->global_batch);
}

int64_t fsdp__sampler_row(const fsdp__sampler *s, int64_t sample)
{
    int64_t epoch = sample / s->rows, place = sample % s->rows;
    if (!s->shuffle) return place;
    uint64_t key = fsdp__rng_mix(s->key, (uint64_t)epoch);
    return (int64_t)fsdp__rng_permute(key, (uint64_t)place, (uint64_t)s->rows);
}

fsdp_status fsdp__sampler_plan(const fsdp__sampler *s, int64_t cursor, int rank, int ranks,
                               int64_t microbatch, fsdp__sampler_step *out)
{
    if (cursor < 0 || microbatch < 1 || ranks < 1 || rank < 0 || rank >= ranks)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "sampler: cursor %lld, rank %d of %d, microbatch %lld; expected a cursor "
                          "of at least 0, a rank below the ranks and a microbatch of at least 1",
                          (long long)cursor, rank, ranks, (long long)microbatch);
    int64_t n = min(s->global_batch, s->rows - cursor % s->rows);
    int64_t block = ceil_div(n, ranks);
    if (s->aligned)
        for (block = microbatch; block * ranks < n;)
            block *= 2;
    int64_t own = min(rank * block, n);
    *out = (fsdp__sampler_step){.first = cursor,
                                .rows = n,
                                .epoch = cursor / s->rows,
                                .valid_tokens = n * s->seq_len,
                                .rank = rank,
                                .block = block,
                                .own_first = own,
                                .own_rows = min(block, n - own),
                                .microbatch = microbatch,
                                .calls = ceil_div(min(block, n), microbatch)};
    return FSDP_OK;
}

void fsdp__sampler_samples(const fsdp__sampler_step *step, int64_t call, int64_t *first, int64_t *n)
{
    int64_t start = call * step->microbatch, left = step->own_rows - start;
    *n = left < 0 ? 0 : min(step->microbatch, left);
    *first = step->first + step->own_first + start;
}

static fsdp_status reserve(fsdp__microbatch *mb, int64_t rows, int64_t seq_len)
{
    int64_t n = rows * seq_len;
    if (n > mb->cap) {
        /* Both arrays grow together, so one capacity serves them. */
        int64_t *inputs = fsdp__calloc((size_t)n, sizeof *inputs, "a microbatch");
        int64_t *targets = fsdp__calloc((size_t)n, sizeof *targets, "a microbatch");
        if (!inputs || !targets) {
            free(inputs);
            free(targets);
            return fsdp_error();
        }
        free(mb->inputs);
        free(mb->targets);
        mb->inputs = inputs;
        mb->targets = targets;
        mb->cap = n;
    }
    FSDP_TRY(FSDP__GROW(mb->samples, mb->row_cap, rows, "a microbatch"));
    mb->seq_len = seq_len;
    return FSDP_OK;
}

/* A row of the first token, of which no target counts. */
static void fill_masked(fsdp__microbatch *mb)
{
    mb->rows = 1;
    mb->masked = true;
    mb->valid_tokens = 0;
    mb->samples[0] = FSDP__NO_SAMPLE;
    for (int64_t t = 0; t < mb->seq_len; t++) {
        mb->inputs[t] = 0;
        mb->targets[t] = FSDP__IGNORED;
    }
}

fsdp_status fsdp__sampler_fill(const fsdp__sampler *s, const fsdp__sampler_step *step, int64_t call,
                               fsdp__microbatch *mb)
{
    int64_t seq_len = s->seq_len;
    if (call < 0 || call >= step->calls)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "sampler: call %lld of a step with %lld",
                          (long long)call, (long long)step->calls);
    int64_t first, rows;
    fsdp__sampler_samples(step, call, &first, &rows);
    FSDP_TRY(reserve(mb, rows > 0 ? rows : 1, seq_len));
    if (rows <= 0) {
        mb->index = -1;
        fill_masked(mb);
        return FSDP_OK;
    }
    mb->rows = rows;
    mb->masked = false;
    mb->valid_tokens = rows * seq_len;
    /* A rank that has rows comes after ranks with full blocks, of `calls` microbatches each. */
    mb->index = step->rank * step->calls + call;
    for (int64_t r = 0; r < rows; r++) {
        int64_t sample = first + r;
        int64_t at = fsdp__sampler_row(s, sample) * seq_len;
        int64_t *in = mb->inputs + r * seq_len, *to = mb->targets + r * seq_len;
        FSDP_TRY(fsdp__tokens_read(s->tokens, at, seq_len, s->vocab_size, in));
        FSDP_TRY(fsdp__tokens_read(s->tokens, at + 1, seq_len, s->vocab_size, to));
        mb->samples[r] = (uint64_t)sample;
    }
    return FSDP_OK;
}

void fsdp__microbatch_free(fsdp__microbatch *mb)
{
    free(mb->inputs);
    free(mb->targets);
    free(mb->samples);
    *mb = (fsdp__microbatch){0};
}
