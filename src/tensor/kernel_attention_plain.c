/*
 * kernel_attention_plain.c - attention in plain C: the judge of the tiled one,
 * and what runs for f64 and on machines without AVX2.
 *
 * It keeps one row of scores (S) a thread, never T x S; its backward sums dk
 * and dv of one key-value head in the statistics' type and rounds once.
 */
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/rng.h"
#include "base/thread.h"
#include "tensor/kernel_attention_internal.h"
#include "tensor/kernel_scratch.h"

typedef struct plain_job {
    const fsdp__attention *a;
    const fsdp__attention_grad *g;
    const void *q, *k, *v, *dout;
    void *out, *lse; /* read only in the backward */
    void *dq, *dk, *dv;
    atomic_int failed; /* a part had no memory */
} plain_job;

/* x (n) of type t into, or added to, n elements of y from `at` on. */
static void plain_store(void *y, int64_t at, fsdp_dtype dt, const void *x, fsdp_dtype t, int64_t n,
                        int add)
{
    if (!y) return;
    for (int64_t i = 0; i < n; i++) {
        double v = t == FSDP_F64 ? ((const double *)x)[i] : (double)((const float *)x)[i];
        char *p = (char *)y + (size_t)(at + i) * fsdp_dtype_size(dt);
        switch (dt) {
        case FSDP_F64:
            *(double *)(void *)p = add ? *(double *)(void *)p + v : v;
            break;
        case FSDP_F32: {
            float f = (float)v;
            *(float *)(void *)p = add ? *(float *)(void *)p + f : f;
            break;
        }
        case FSDP_F16: {
            float old = add ? fsdp__f16_to_f32(*(uint16_t *)(void *)p) : 0.0f;
            *(uint16_t *)(void *)p = fsdp__f32_to_f16(old + (float)v);
            break;
        }
        default: {
            float old = add ? fsdp__bf16_to_f32(*(uint16_t *)(void *)p) : 0.0f;
            *(uint16_t *)(void *)p = fsdp__f32_to_bf16(old + (float)v);
            break;
        }
        }
    }
}

#define PLAIN_SAME(x) (x)

#define PLAIN(name) plain_f32_##name
#define PLAIN_T float
#define PLAIN_SUM float
#define PLAIN_STAT FSDP_F32
#define PLAIN_LOAD PLAIN_SAME
#define PLAIN_ROUND PLAIN_SAME
#define PLAIN_EXP expf
#define PLAIN_LOG logf
#include "tensor/kernel_attention_plain.inc"

#define PLAIN(name) plain_f64_##name
#define PLAIN_T double
#define PLAIN_SUM double
#define PLAIN_STAT FSDP_F64
#define PLAIN_LOAD PLAIN_SAME
#define PLAIN_ROUND PLAIN_SAME
#define PLAIN_EXP exp
#define PLAIN_LOG log
#include "tensor/kernel_attention_plain.inc"

#define PLAIN(name) plain_f16_##name
#define PLAIN_T uint16_t
#define PLAIN_SUM float
#define PLAIN_STAT FSDP_F32
#define PLAIN_LOAD fsdp__f16_to_f32
#define PLAIN_ROUND fsdp__f32_to_f16
#define PLAIN_EXP expf
#define PLAIN_LOG logf
#include "tensor/kernel_attention_plain.inc"

#define PLAIN(name) plain_bf16_##name
#define PLAIN_T uint16_t
#define PLAIN_SUM float
#define PLAIN_STAT FSDP_F32
#define PLAIN_LOAD fsdp__bf16_to_f32
#define PLAIN_ROUND fsdp__f32_to_bf16
#define PLAIN_EXP expf
#define PLAIN_LOG logf
#include "tensor/kernel_attention_plain.inc"

static fsdp_status plain_run(plain_job *j, int64_t parts, void (*const fn[4])(void *, int64_t))
{
    int i = j->a->t == FSDP_F32 ? 0 : j->a->t == FSDP_F64 ? 1 : j->a->t == FSDP_F16 ? 2 : 3;
    fsdp__parallel(parts, fn[i], j);
    if (j->failed)
        return fsdp__fail_memory("scratch of attention", (size_t)(j->a->S + j->a->D) * 8);
    return FSDP_OK;
}

fsdp_status fsdp__k_attention_plain(const fsdp__attention *a, const void *q, const void *k,
                                    const void *v, void *out, void *lse)
{
    static void (*const fn[])(void *, int64_t) = {plain_f32_forward, plain_f64_forward,
                                                  plain_f16_forward, plain_bf16_forward};
    plain_job j = {.a = a, .q = q, .k = k, .v = v, .out = out, .lse = lse};
    return plain_run(&j, a->B * a->H, fn);
}

fsdp_status fsdp__k_attention_backward_plain(const fsdp__attention *a,
                                             const fsdp__attention_grad *g, const void *q,
                                             const void *k, const void *v, const void *out,
                                             const void *dout, const void *lse, void *dq, void *dk,
                                             void *dv)
{
    static void (*const fn[])(void *, int64_t) = {plain_f32_backward, plain_f64_backward,
                                                  plain_f16_backward, plain_bf16_backward};
    plain_job j = {.a = a,
                   .g = g,
                   .q = q,
                   .k = k,
                   .v = v,
                   .dout = dout,
                   .out = (void *)(uintptr_t)out,
                   .lse = (void *)(uintptr_t)lse,
                   .dq = dq,
                   .dk = dk,
                   .dv = dv};
    return plain_run(&j, a->B * a->KV, fn);
}
