/*
 * kernel_plain.c - the plain table of each floating dtype, from one source
 * (kernel_plain.inc), and the choice of the table in force.
 */
#include "tensor/kernel_set.h"

#include <math.h>
#include <stddef.h>

#include "base/cpu.h"

/* Pastes its first argument to a suffix: expf out of (exp, f). */
#define SUFFIX(name, suffix) name##suffix

#define P(name) plain_f64_##name
#define A double
#define LD(p, i) (((const double *)(p))[i])
#define ST(p, i, v) (((double *)(p))[i] = (v))
#define M(name) name
#define PUT fsdp__put_f64
#define GET fsdp__get_f64
#include "tensor/kernel_plain.inc"

#define P(name) plain_f32_##name
#define A float
#define LD(p, i) (((const float *)(p))[i])
#define ST(p, i, v) (((float *)(p))[i] = (v))
#define M(name) SUFFIX(name, f)
#define PUT fsdp__put_f32
#define GET fsdp__get_f32
#include "tensor/kernel_plain.inc"

#define P(name) plain_f16_##name
#define A float
#define LD(p, i) fsdp__f16_to_f32(((const uint16_t *)(p))[i])
#define ST(p, i, v) (((uint16_t *)(p))[i] = fsdp__f32_to_f16(v))
#define M(name) SUFFIX(name, f)
#define PUT fsdp__put_f32
#define GET fsdp__get_f32
#include "tensor/kernel_plain.inc"

#define P(name) plain_bf16_##name
#define A float
#define LD(p, i) fsdp__bf16_to_f32(((const uint16_t *)(p))[i])
#define ST(p, i, v) (((uint16_t *)(p))[i] = fsdp__f32_to_bf16(v))
#define M(name) SUFFIX(name, f)
#define PUT fsdp__put_f32
#define GET fsdp__get_f32
#include "tensor/kernel_plain.inc"

const fsdp__kernel_set *fsdp__kernel_set_plain(fsdp_dtype t)
{
    switch (t) {
    case FSDP_F64:
        return &plain_f64_set;
    case FSDP_F16:
        return &plain_f16_set;
    case FSDP_BF16:
        return &plain_bf16_set;
    default:
        return &plain_f32_set;
    }
}

const fsdp__kernel_set *fsdp__kernel_set_for(fsdp_dtype t, fsdp_dtype dt)
{
#if defined(__x86_64__)
    int fast = (t == FSDP_F32 || t == FSDP_BF16) && (dt == FSDP_F32 || dt == FSDP_BF16);
    fsdp__isa isa = fsdp__cpu_isa();
    if (fast && isa >= FSDP__ISA_AVX512_BF16) return &fsdp__kernel_set_avx512_bf16;
    if (fast && isa >= FSDP__ISA_AVX512) return &fsdp__kernel_set_avx512;
    if (fast && isa >= FSDP__ISA_AVX2) return &fsdp__kernel_set_avx2;
#else
    (void)dt;
#endif
    return fsdp__kernel_set_plain(t);
}
