/*
 * generate.c - sampling, and the loop that feeds a model its own tokens.
 *
 * The prompt goes through the model once; from then on each call has one token, and earlier keys
 * and values come from the cache. The i-th new token is drawn by a number that is a function of
 * (seed, i), so a longer generation begins as a shorter one.
 */
#include "generate/generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"

fsdp__generate_options fsdp__generate_defaults(void)
{
    return (fsdp__generate_options){.tokens = 100, .temperature = 0, .top_k = 0, .top_p = 1};
}

/* ---- sampling ---------------------------------------------------------------------------- */

typedef struct candidate {
    float logit;
    int64_t id;
} candidate;

static int by_logit(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static int64_t likeliest(const float *logits, int64_t n)
{
    int64_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!isnan(logits[i]) && (best < 0 || logits[i] > logits[best])) best = i;
    return best >= 0 && isfinite(logits[best]) ? best : -1;
}

/* Of c (n), likeliest first: draws one after the cut by top_p. */
static int64_t draw_from(const candidate *c, int64_t n, const fsdp__generate_options *o,
                         double draw)
{
    double sum = 0.0, kept = 0.0, at = 0.0;
    int64_t m = 0;
    for (int64_t i = 0; i < n; i++)
        sum += exp((double)(c[i].logit - c[0].logit) / o->temperature);
    do /* the likeliest one always stays */
        kept += exp((double)(c[m].logit - c[0].logit) / o->temperature);
    while (++m < n && kept < o->top_p * sum);
    for (int64_t i = 0; i < m; i++) {
        at += exp((double)(c[i].logit - c[0].logit) / o->temperature);
        if (draw * kept < at) return c[i].id;
    }
    return c[m - 1].id; /* rounding */
}

int64_t fsdp__sample(const float *logits, int64_t n, const fsdp__generate_options *o, double draw)
{
    int64_t best = likeliest(logits, n), count = 0;
    if (best < 0) {
        fsdp__fail(FSDP_NON_FINITE, "generate: none of the %lld logits is a finite number",
                   (long long)n);
        return -1;
    }
    if (o->temperature <= 0) return best;
    candidate *c = fsdp__calloc((size_t)n, sizeof *c, "candidates of a token");
    if (!c) return -1;
    for (int64_t i = 0; i < n; i++)
        if (!isnan(logits[i])) c[count++] = (candidate){logits[i], i};
    qsort(c, (size_t)count, sizeof *c, by_logit);
    if (o->top_k > 0 && o->top_k < count) count = o->top_k;
    int64_t id = draw_from(c, count, o, draw);
    free(c);
    return id;
}

/* ---- the loop ------------------------------------------------------------------------------ */

/* Tokens ids (n) through the model; the last position's logits into out (V). */
static fsdp_status last_logits(fsdp_module *model, int64_t *ids, int64_t n, float *out, int64_t V)
{
    const int64_t sizes[2] = {1, n};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *tokens = fsdp_tensor_from_memory(ids, FSDP_I64, 2, sizes, NULL, NULL, NULL);
    fsdp_tensor *logits = fsdp_model_forward(model, tokens, NULL, NULL); /* (1,T,V) */
    fsdp_status s = FSDP_OK;
    if (logits && (fsdp_size(logits, -1) != V || fsdp_size(logits, 1) < 1))
        s = fsdp__fail(FSDP_INTERNAL, "generate: %lld logits a token; expected %lld",
                       (long long)fsdp_size(logits, -1), (long long)V);
    if (logits && s == FSDP_OK) {
        fsdp_tensor *row = fsdp_contiguous(fsdp_slice(logits, 1, -1, fsdp_size(logits, 1)));
        if (row) fsdp__convert(out, FSDP_F32, fsdp_data(row), fsdp_tensor_dtype(row), (size_t)V);
    }
    fsdp_scope_end(scope);
    return fsdp_error() ? fsdp_error() : s;
}

static int is_end(const fsdp_model_config *c, int64_t id)
{
    for (int i = 0; i < c->num_eos; i++)
        if (c->eos_token_ids[i] == id) return 1;
    return 0;
}

static fsdp_status run(fsdp_module *model, const fsdp_model_config *c, int64_t *ids, int64_t n,
                       float *logits, const fsdp__generate_options *o, fsdp__generate_fn fn,
                       void *arg)
{
    uint64_t key = fsdp__rng_mix_str(fsdp__rng_key(o->seed), "generate");
    for (int64_t i = 0; i < o->tokens; i++) {
        FSDP_TRY(last_logits(model, ids, n, logits, c->vocab_size));
        double draw = ldexp((double)fsdp__rng_u32(key, (uint64_t)i), -32);
        int64_t id = fsdp__sample(logits, c->vocab_size, o, draw);
        if (id < 0) return fsdp_error();
        if (is_end(c, id) || fn(arg, id) != 0) return FSDP_OK;
        ids[0] = id;
        n = 1;
    }
    return FSDP_OK;
}

fsdp_status fsdp__generate(fsdp_module *model, const fsdp_model_config *c, const int32_t *prompt,
                           int64_t n, const fsdp__generate_options *o, fsdp__generate_fn fn,
                           void *arg)
{
    if (fsdp_error()) return fsdp_error();
    if (n < 1 || o->tokens < 0 || !(o->temperature >= 0) || o->top_k < 0 ||
        !(o->top_p > 0 && o->top_p <= 1))
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "generate: %lld prompt tokens, %lld new ones, temperature %g, top_k "
            "%lld, top_p %g; expected a prompt of at least 1, none below 0, and top_p "
            "above 0 up to 1",
            (long long)n, (long long)o->tokens, o->temperature, (long long)o->top_k, o->top_p);
    if (n + o->tokens > c->max_position_embeddings)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "generate: %lld prompt tokens and %lld new ones are more than the "
                          "model's longest sequence, %lld; shorten the prompt or ask for fewer",
                          (long long)n, (long long)o->tokens,
                          (long long)c->max_position_embeddings);
    for (int64_t i = 0; i < n; i++)
        if (prompt[i] < 0 || prompt[i] >= c->vocab_size)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "generate: token %lld of the prompt has id %d; the model's "
                              "vocabulary is %lld",
                              (long long)i, prompt[i], (long long)c->vocab_size);
    fsdp_kv_cache *cache = fsdp_kv_cache_create(c, 1, n + o->tokens, FSDP_F32);
    int64_t *ids = fsdp__calloc((size_t)n, sizeof *ids, "a prompt");
    float *logits = fsdp__calloc((size_t)c->vocab_size, sizeof *logits, "logits");
    fsdp_status s = cache && ids && logits ? fsdp_model_set_cache(model, cache) : fsdp_error();
    for (int64_t i = 0; ids && i < n; i++)
        ids[i] = prompt[i];
    int training = fsdp_module_training(model);
    fsdp_module_train(model, 0);
    fsdp_no_grad_begin();
    if (s == FSDP_OK) s = run(model, c, ids, n, logits, o, fn, arg);
    fsdp_no_grad_end();
    fsdp_module_train(model, training);
    fsdp_status off = fsdp_model_set_cache(model, NULL);
    fsdp_kv_cache_free(cache);
    free(ids);
    free(logits);
    return s != FSDP_OK ? s : off;
}
