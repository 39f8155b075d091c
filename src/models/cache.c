/*
 * cache.c - keys and values of earlier tokens, layer by layer.
 *
 * length counts whole forwards: a layer writes at [length, length + T), and the root moves length
 * after the last layer, so a forward that failed half way is as if it had not been.
 */
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "models/models_internal.h"

static fsdp_tensor *make(const int64_t *sizes, fsdp_dtype t)
{
    fsdp_purpose before = fsdp__purpose_set(FSDP_OTHER);
    fsdp_tensor *x = fsdp__tensor_own(fsdp__tensor_create(t, 4, sizes, fsdp_device_current()));
    fsdp__purpose_set(before);
    return x;
}

fsdp_kv_cache *fsdp_kv_cache_create(const fsdp_model_config *c, int64_t batch, int64_t max_len,
                                    fsdp_dtype t)
{
    if (!c) {
        fsdp__fail_null("fsdp_kv_cache_create", "the config");
        return NULL;
    }
    if (batch < 1 || max_len < 1 || !fsdp_dtype_is_floating(t)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "a key-value cache for %lld sequences of %lld tokens in %s; expected 1 or more "
                   "of each and a floating dtype",
                   (long long)batch, (long long)max_len, fsdp_dtype_name(t));
        return NULL;
    }
    fsdp_kv_cache *kv = fsdp__calloc(1, sizeof *kv, "a key-value cache");
    if (!kv) return NULL;
    size_t layers = (size_t)c->num_layers;
    kv->layers = c->num_layers;
    kv->batch = batch;
    kv->max_len = max_len;
    kv->k = fsdp__calloc(layers, sizeof *kv->k, "a key-value cache");
    kv->v = fsdp__calloc(layers, sizeof *kv->v, "a key-value cache");
    int64_t sizes[4] = {batch, max_len, c->num_kv_heads, c->head_dim};
    for (size_t i = 0; i < layers && kv->k && kv->v; i++) {
        kv->k[i] = make(sizes, t);
        kv->v[i] = kv->k[i] ? make(sizes, t) : NULL;
        if (!kv->v[i]) break;
    }
    if (kv->k && kv->v && (layers == 0 || kv->v[layers - 1])) return kv;
    fsdp_kv_cache_free(kv);
    return NULL;
}

void fsdp_kv_cache_free(fsdp_kv_cache *kv)
{
    if (!kv) return;
    for (int64_t i = 0; i < kv->layers; i++) {
        if (kv->k) fsdp_release(kv->k[i]);
        if (kv->v) fsdp_release(kv->v[i]);
    }
    free(kv->k);
    free(kv->v);
    free(kv);
}

int64_t fsdp_kv_cache_length(const fsdp_kv_cache *kv)
{
    return kv ? kv->length : 0;
}

static fsdp_status check_fit(const fsdp_kv_cache *kv, const fsdp_tensor *k)
{
    const fsdp_tensor *at = kv->k[0];
    if (kv->length + k->size[1] > kv->max_len)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "the key-value cache holds %lld tokens and %lld more do not fit its %lld; "
            "create it with a larger max_len",
            (long long)kv->length, (long long)k->size[1], (long long)kv->max_len);
    if (k->dtype == at->dtype && k->size[0] == at->size[0] && k->size[2] == at->size[2] &&
        k->size[3] == at->size[3])
        return FSDP_OK;
    fsdp__str a = {0}, b = {0};
    fsdp__describe(at, &a);
    fsdp__describe(k, &b);
    fsdp__fail(FSDP_INVALID_SHAPE,
               "the key-value cache is %s (sequences, tokens, heads, head size) a layer and the "
               "model's keys are %s; create the cache for this batch, model and dtype",
               fsdp__str_get(&a), fsdp__str_get(&b));
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    return fsdp_error();
}

static fsdp_status put(fsdp_tensor *all, int64_t length, fsdp_tensor **x)
{
    int64_t end = length + (*x)->size[1];
    fsdp_tensor *place = fsdp_slice(all, 1, length, end);
    if (!place) return fsdp_error();
    if (all->st->device != FSDP_META) FSDP_TRY(fsdp_copy_(place, *x));
    *x = fsdp_slice(all, 1, 0, end);
    return *x ? FSDP_OK : fsdp_error();
}

fsdp_status fsdp__kv_cache_put(fsdp_kv_cache *kv, int64_t layer, fsdp_tensor **k, fsdp_tensor **v)
{
    if (!*k || !*v) return fsdp_error();
    if (fsdp_grad_enabled())
        return fsdp__fail(FSDP_INVALID_STATE,
                          "a forward with a key-value cache builds no graph; put it between "
                          "fsdp_no_grad_begin and fsdp_no_grad_end");
    FSDP_TRY(check_fit(kv, *k));
    FSDP_TRY(put(kv->k[layer], kv->length, k));
    return put(kv->v[layer], kv->length, v);
}
