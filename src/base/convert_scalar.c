/*
 * convert_scalar.c - one number at a time: these define the bits.
 *
 * bf16 is the upper half of an f32; f16 is IEEE 754 binary16. Rounding is to
 * nearest, ties to even. A NaN keeps its sign and the upper bits of its
 * payload and becomes quiet, as the processor's own conversions do.
 */
#include <string.h>

#include "base/convert.h"

float fsdp__bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

uint16_t fsdp__f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40);
    /* Just below half, plus one when the kept part is odd: ties go to even. */
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float fsdp__f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t e = h >> 10 & 31, m = h & 0x3ff;
    uint32_t u;
    if (e == 31) {
        u = sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0);
    } else if (e != 0) {
        u = sign | (e + 112) << 23 | m << 13;
    } else {
        /* A denormal or zero is m * 2^-24, which f32 holds exactly. */
        float f = (float)m * 0x1p-24f;
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/*
 * Rounds |x| = mant * 2^exp (mant below 2^63, 0 only for zero) to a float of
 * `mbits` stored mantissa bits and `ebits` exponent bits.
 */
static uint16_t round_to(uint64_t mant, int exp, int mbits, int ebits)
{
    if (mant == 0) return 0;
    int bias = (1 << (ebits - 1)) - 1;
    int top = 63 - __builtin_clzll(mant);
    /* The exponent of the last place kept: of a normal, or the denormals'. */
    int last = top + exp - mbits;
    if (last < 1 - bias - mbits) last = 1 - bias - mbits;
    int shift = last - exp;
    uint64_t kept;
    if (shift <= 0) {
        kept = mant << -shift;
    } else if (shift > 63) {
        kept = 0; /* below a quarter of the smallest denormal */
    } else {
        uint64_t half = (uint64_t)1 << (shift - 1);
        kept = mant >> shift;
        uint64_t rest = mant & (2 * half - 1);
        kept += rest > half || (rest == half && (kept & 1));
    }
    /* A normal's leading bit adds one to the exponent field, and a carry out of
     * the mantissa does the same, so both encode themselves. */
    int field = last - (1 - bias - mbits);
    uint64_t bits = ((uint64_t)field << mbits) + kept;
    uint64_t infinity = (uint64_t)((1 << ebits) - 1) << mbits;
    return (uint16_t)(bits < infinity ? bits : infinity);
}

uint16_t fsdp__f32_to_f16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    uint32_t m = u & 0x7fffff;
    int e = (int)(u >> 23 & 255);
    if (e == 255) return (uint16_t)(sign | 0x7c00 | (m ? 0x200 | m >> 13 : 0));
    if (e == 0) return sign; /* below 2^-126: rounds to zero */
    return sign | round_to(m | 0x800000, e - 150, 10, 5);
}

/* The parts of a double: sign in bit 15, mantissa, exponent; 1 if not finite. */
static int split(double d, uint16_t *sign, uint64_t *mant, int *exp)
{
    uint64_t u;
    memcpy(&u, &d, 8);
    *sign = (uint16_t)(u >> 48 & 0x8000);
    *mant = u & 0xfffffffffffffu;
    int e = (int)(u >> 52 & 2047);
    *exp = (e ? e : 1) - 1075;
    if (e == 2047) return 1;
    if (e) *mant |= (uint64_t)1 << 52;
    return 0;
}

uint16_t fsdp__f64_to_bf16(double d)
{
    uint16_t sign;
    uint64_t m;
    int e;
    if (split(d, &sign, &m, &e)) return (uint16_t)(sign | 0x7f80 | (m ? 0x40 | m >> 45 : 0));
    return sign | round_to(m, e, 7, 8);
}

uint16_t fsdp__f64_to_f16(double d)
{
    uint16_t sign;
    uint64_t m;
    int e;
    if (split(d, &sign, &m, &e)) return (uint16_t)(sign | 0x7c00 | (m ? 0x200 | m >> 42 : 0));
    return sign | round_to(m, e, 10, 5);
}
