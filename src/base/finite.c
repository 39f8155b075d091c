/*
 * finite.c - looking for a NaN or an infinity: numbers whose exponent is all ones. Blocks are
 * judged whole, in loops that the compiler makes wide; only the one that has it is searched.
 */
#include "base/finite.h"

#include <string.h>

enum { BLOCK = 4096 };

/* The largest magnitude as bits, which order as the magnitudes do. */
static uint16_t most_16(const void *x, int64_t n)
{
    const uint16_t *p = x;
    uint16_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint16_t b = (uint16_t)(p[i] & 0x7fffu);
        most = b > most ? b : most;
    }
    return most;
}

static uint32_t most_32(const void *x, int64_t n)
{
    const uint32_t *p = x;
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t b = p[i] & 0x7fffffffu;
        most = b > most ? b : most;
    }
    return most;
}

static uint64_t most_64(const void *x, int64_t n)
{
    const uint64_t *p = x;
    uint64_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t b = p[i] & 0x7fffffffffffffffu;
        most = b > most ? b : most;
    }
    return most;
}

/* Whether n numbers have one. */
static int has(const void *x, fsdp_dtype t, int64_t n)
{
    switch (t) {
    case FSDP_F16:
        return most_16(x, n) >= 0x7c00u;
    case FSDP_BF16:
        return most_16(x, n) >= 0x7f80u;
    case FSDP_F32:
        return most_32(x, n) >= 0x7f800000u;
    case FSDP_F64:
        return most_64(x, n) >= 0x7ff0000000000000u;
    default:
        return 0;
    }
}

int64_t fsdp__find_non_finite(const void *x, fsdp_dtype t, int64_t n)
{
    size_t width = fsdp_dtype_size(t);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t m = n - i < BLOCK ? n - i : BLOCK;
        const char *p = (const char *)x + (size_t)i * width;
        if (!has(p, t, m)) continue;
        for (int64_t k = 0; k < m; k++)
            if (has(p + (size_t)k * width, t, 1)) return i + k;
    }
    return -1;
}
