/*
 * rope.c - cosines and sines of positions.
 *
 * Rotary position embedding: arXiv:2104.09864. Frequencies and angles are computed in f32 in the
 * order in which transformers does, since at long positions the rounding of an angle is far larger
 * than that of its cosine; cosine and sine of the rounded angle are then exact to f32.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "models/models_internal.h"

static const float two_pi = 6.283185307179586F;

/* Llama 3's change of frequencies: long waves are slowed by factor, short ones kept, those between
 * blended linearly by how many of them fit the original context. */
static float llama3_frequency(const fsdp_rope *c, float inv)
{
    float context = (float)c->original_max_position;
    float wave = two_pi / inv;
    float low = (float)c->low_freq_factor, high = (float)c->high_freq_factor;
    if (wave > context / low) return inv / (float)c->factor;
    if (wave < context / high) return inv;
    float smooth = (context / wave - low) / (high - low);
    return (1.0F - smooth) * inv / (float)c->factor + smooth * inv;
}

void fsdp__rope_frequencies(const fsdp_rope *c, int64_t head_dim, float *inv)
{
    for (int64_t i = 0; i < head_dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)head_dim;
        inv[i] = 1.0F / (float)pow(c->theta, (double)exponent);
        if (c->type == FSDP_ROPE_LLAMA3) inv[i] = llama3_frequency(c, inv[i]);
    }
}

/* ---- tables ---- */

static void drop(fsdp__rope_table *t)
{
    fsdp_release(t->cos);
    fsdp_release(t->sin);
    *t = (fsdp__rope_table){0};
}

void fsdp__rope_free(fsdp__rope *r)
{
    drop(&r->run);
    drop(&r->own);
    fsdp_release(r->positions);
    r->positions = NULL;
}

/* rows angles: of positions[i], or of i where positions is NULL. */
static fsdp_status fill(const fsdp__rope *r, int64_t rows, const int64_t *positions,
                        fsdp__rope_table *t)
{
    int64_t half = r->head_dim / 2;
    float *inv = fsdp__calloc((size_t)half, sizeof *inv, "rotary frequencies");
    if (!inv) return fsdp_error();
    fsdp__rope_frequencies(&r->c, r->head_dim, inv);
    float *cs = fsdp_data(t->cos), *sn = fsdp_data(t->sin);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < half; k++) {
            float angle = (float)(positions ? positions[i] : i) * inv[k];
            cs[i * half + k] = (float)cos((double)angle);
            sn[i * half + k] = (float)sin((double)angle);
        }
    free(inv);
    fsdp_touch(t->cos);
    fsdp_touch(t->sin);
    return FSDP_OK;
}

/* Two empty tables of sizes (..., half); meta ones stay without values. */
static fsdp_status make(fsdp__rope_table *t, int ndim, const int64_t *sizes, fsdp_device d)
{
    fsdp_purpose before = fsdp__purpose_set(FSDP_OTHER);
    t->cos = fsdp__tensor_own(fsdp__tensor_create(FSDP_F32, ndim, sizes, d));
    t->sin = t->cos ? fsdp__tensor_own(fsdp__tensor_create(FSDP_F32, ndim, sizes, d)) : NULL;
    fsdp__purpose_set(before);
    return t->sin ? FSDP_OK : fsdp_error();
}

/* Rows [start, start + n) of the running table, which grows to hold them. */
static fsdp_status get_run(fsdp__rope *r, fsdp_device d, int64_t start, int64_t n,
                           fsdp_tensor **cos, fsdp_tensor **sin)
{
    int64_t have = r->run.cos && r->run.cos->st->device == d ? fsdp_size(r->run.cos, 0) : -1;
    if (start + n > have) {
        /* Decoding asks for one row more each time: twice as many then. */
        int64_t rows = have > 0 && start > 0 ? 2 * (start + n) : start + n;
        int64_t sizes[2] = {rows, r->head_dim / 2};
        drop(&r->run);
        FSDP_TRY(make(&r->run, 2, sizes, d));
        if (d != FSDP_META) FSDP_TRY(fill(r, rows, NULL, &r->run));
    }
    *cos = fsdp_slice(r->run.cos, 0, start, start + n);
    *sin = fsdp_slice(r->run.sin, 0, start, start + n);
    return fsdp_error();
}

static bool is_kept(const fsdp__rope *r, const fsdp_tensor *positions)
{
    const fsdp_tensor *p = r->positions;
    return p && p->st == positions->st && p->offset == positions->offset &&
           fsdp__same_sizes(p, positions) && r->version == positions->st->version;
}

static fsdp_status get_own(fsdp__rope *r, const fsdp_tensor *x, fsdp_tensor *positions,
                           fsdp_tensor **cos, fsdp_tensor **sin)
{
    if (positions->ndim != 2 || positions->dtype != FSDP_I64 || x->ndim < 2 ||
        positions->size[0] != x->size[0] || positions->size[1] != x->size[1] ||
        !fsdp__tensor_dense(positions)) {
        fsdp__str a = {0};
        fsdp__describe(positions, &a);
        fsdp__fail(FSDP_INVALID_SHAPE,
                   "positions are %s; expected a contiguous i64 tensor of (%lld, %lld), as tokens",
                   fsdp__str_get(&a), (long long)fsdp_size(x, 0), (long long)fsdp_size(x, 1));
        fsdp__str_free(&a);
        return fsdp_error();
    }
    if (!is_kept(r, positions)) {
        int64_t sizes[3] = {positions->size[0], positions->size[1], r->head_dim / 2};
        drop(&r->own);
        fsdp_release(r->positions);
        r->positions = NULL;
        FSDP_TRY(make(&r->own, 3, sizes, positions->st->device));
        if (positions->st->device != FSDP_META)
            FSDP_TRY(fill(r, fsdp_numel(positions), fsdp_data(positions), &r->own));
        r->positions = fsdp_retain(positions);
        r->version = positions->st->version;
    }
    *cos = r->own.cos;
    *sin = r->own.sin;
    return FSDP_OK;
}

fsdp_status fsdp__rope_get(fsdp__rope *r, const fsdp_tensor *x, fsdp_tensor *positions,
                           int64_t start, fsdp_tensor **cos, fsdp_tensor **sin)
{
    *cos = *sin = NULL;
    if (!x || fsdp_error()) return fsdp__fail_null("rotary positions", "the tensor");
    if (positions) return get_own(r, x, positions, cos, sin);
    return get_run(r, x->st->device, start, fsdp_size(x, 1), cos, sin);
}
