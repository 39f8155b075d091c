/*
 * int8_gather.c - gathers that travel as int8 with one scale a row: an extension (extension.c).
 *
 * A row x becomes q = round(x / s), s = largest |x| / 127, and is x' = q * s again on all ranks,
 * the owner included, so all compute with the same weights, in forward and in backward. The error
 * of an element is at most s / 2, a 254th of the row's largest. Bytes: 1 an element and 4 a row,
 * against 2 of bf16. A row of zeros has scale 0; a row with a number that is not finite has a NaN
 * as scale and is NaN again, so that it is seen.
 */
#include <math.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "fsdp/unit.h"

enum { BLOCK = 512 };

/* n elements of x, of any floating dtype, as f32: in place, or into part. */
static const float *as_f32(const char *x, fsdp_dtype t, int64_t at, int64_t n, float *part)
{
    if (t == FSDP_F32) return (const float *)(const void *)x + at;
    fsdp__convert(part, FSDP_F32, x + (size_t)at * fsdp_dtype_size(t), t, (size_t)n);
    return part;
}

/* The largest |x| as bits, which order as the magnitudes do; from INFINITE on: not finite. */
enum { INFINITE = 0x7f800000, MAGNITUDE = 0x7fffffff };

static int32_t largest(const char *x, fsdp_dtype t, int64_t at, int64_t n)
{
    float part[BLOCK];
    int32_t most = 0;
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t m = n - i < BLOCK ? n - i : BLOCK;
        const float *v = as_f32(x, t, at + i, m, part);
        for (int64_t k = 0; k < m; k++) {
            int32_t a;
            memcpy(&a, &v[k], sizeof a);
            a &= MAGNITUDE;
            most = a > most ? a : most;
        }
    }
    return most;
}

/* Adding this rounds to a whole number, to even where halfway, in the low bits of the sum. */
#define TO_WHOLE 12582912.0f /* 1.5 * 2^23 */

static void quantise_row(const char *x, fsdp_dtype t, int64_t at, int64_t n, int8_t *q, float *s)
{
    float part[BLOCK], most;
    int32_t bits = largest(x, t, at, n), whole;
    memcpy(&most, &bits, sizeof most);
    *s = bits >= INFINITE ? NAN : most / 127.0f;
    float inverse = *s > 0.0f ? 127.0f / most : 0.0f;
    if (inverse == 0.0f || isinf(inverse)) { /* zeros, not finite, or too small to tell from zero */
        memset(q, 0, (size_t)n);
        return;
    }
    const float magic = TO_WHOLE;
    memcpy(&whole, &magic, sizeof whole);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t m = n - i < BLOCK ? n - i : BLOCK;
        const float *v = as_f32(x, t, at + i, m, part);
        for (int64_t k = 0; k < m; k++) {
            float sum = v[k] * inverse + TO_WHOLE;
            int32_t b;
            memcpy(&b, &sum, sizeof b);
            q[i + k] = (int8_t)(b - whole);
        }
    }
}

static fsdp_status pre(void *arg, fsdp_gather_info *info, fsdp_tensor *shard, fsdp_values *out)
{
    (void)arg;
    (void)info;
    int64_t rows = shard->size[0], n = fsdp__numel_of(shard->ndim - 1, shard->size + 1);
    fsdp_tensor *q = fsdp__tensor_create(FSDP_I8, shard->ndim, shard->size, FSDP_CPU);
    fsdp_tensor *s = fsdp__tensor_create(FSDP_F32, 1, &rows, FSDP_CPU);
    if (!q || !s) return fsdp_error();
    const char *x = fsdp_data(shard);
    for (int64_t r = 0; r < rows && n > 0; r++)
        quantise_row(x, shard->dtype, r * n, n, (int8_t *)fsdp_data(q) + r * n,
                     (float *)fsdp_data(s) + r);
    *out = (fsdp_values){.n = 2, .t = {q, s}};
    return FSDP_OK;
}

static fsdp_status post(void *arg, fsdp_gather_info *info, const fsdp_values *got, fsdp_tensor *out)
{
    (void)arg;
    (void)info;
    int64_t rows = out->size[0], n = fsdp__numel_of(out->ndim - 1, out->size + 1);
    const int8_t *q = fsdp_data(got->t[0]);
    const float *s = fsdp_data(got->t[1]);
    char *y = fsdp_data(out);
    size_t width = fsdp_dtype_size(out->dtype);
    float part[BLOCK];
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i += BLOCK) {
            int64_t at = r * n + i, m = n - i < BLOCK ? n - i : BLOCK;
            float *to = out->dtype == FSDP_F32 ? (float *)(void *)y + at : part;
            for (int64_t k = 0; k < m; k++)
                to[k] = (float)q[at + k] * s[r];
            if (to == part)
                fsdp__convert(y + (size_t)at * width, out->dtype, part, FSDP_F32, (size_t)m);
        }
    return FSDP_OK;
}

static bool fit(const fsdp__fparam *p)
{
    fsdp_dtype t = p->param->dtype;
    return p->param->ndim >= 2 && (t == FSDP_F32 || t == FSDP_BF16 || t == FSDP_F16);
}

/* What this file set. */
static bool is_ours(const fsdp__fparam *p)
{
    return p->ext && p->ext->fn.pre == pre;
}

fsdp_status fsdp_set_int8_gather(fsdp_module *m, int on, int recurse)
{
    static const fsdp_gather_extension e = {pre, post, NULL};
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_set_int8_gather", "the module");
    int n = 0;
    return fsdp__extension_set(m, recurse, "*", on ? fit : is_ours, on ? &e : NULL,
                               "fsdp_set_int8_gather", &n);
}
