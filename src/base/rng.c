/*
 * rng.c - Philox 4x32-10 and what is made of its words.
 *
 * Element i of a stream uses words of block i / 4: word i % 4 for integers and
 * uniforms; for normals words 2 j and 2 j + 1, j = (i % 4) / 2, give two
 * neighbours. Nothing depends on where a fill starts.
 */
#include "base/rng.h"

#include <math.h>
#include <string.h>

#include "base/thread.h"

enum { PART = 1 << 16 }; /* elements of one part of a fill, a multiple of 4 */

/* ---- Philox -------------------------------------------------------------- */

void fsdp__philox(uint64_t key, uint64_t block, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = 0, c3 = 0;
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0;
        uint64_t p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* ---- keys ------------------------------------------------------------------ */

/* A bijection of 64 bits in which every bit changes every other (the finish of
 * SplitMix64; Steele, Lea, Flood 2014). */
static uint64_t mix64(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

uint64_t fsdp__rng_key(uint64_t seed)
{
    return mix64(seed + 0x9e3779b97f4a7c15u);
}

uint64_t fsdp__rng_mix(uint64_t key, uint64_t word)
{
    /* The key is turned so that mixing (a, b) and (b, a) differ. */
    return mix64((key << 23 | key >> 41) ^ mix64(word + 0x9e3779b97f4a7c15u));
}

uint64_t fsdp__rng_mix_str(uint64_t key, const char *text)
{
    size_t n = strlen(text);
    key = fsdp__rng_mix(key, n);
    while (n > 0) {
        /* Eight bytes at a time, by value, so byte order does not matter. */
        uint64_t word = 0;
        size_t take = n < 8 ? n : 8;
        for (size_t i = 0; i < take; i++)
            word |= (uint64_t)(unsigned char)text[i] << (8 * i);
        key = fsdp__rng_mix(key, word);
        text += take;
        n -= take;
    }
    return key;
}

uint64_t fsdp__rng_mix_bytes(uint64_t key, const void *p, size_t n)
{
    /* Four chains, since one waits for each of its products. */
    uint64_t lane[4], word[4];
    const char *x = p;
    size_t i = 0;
    for (uint64_t k = 0; k < 4; k++)
        lane[k] = fsdp__rng_mix(key, k);
    for (; i + sizeof word <= n; i += sizeof word) {
        memcpy(word, x + i, sizeof word);
        for (int k = 0; k < 4; k++)
            lane[k] = fsdp__rng_mix(lane[k], word[k]);
    }
    memset(word, 0, sizeof word);
    if (i < n) memcpy(word, x + i, n - i);
    key = fsdp__rng_mix(key, n);
    for (int k = 0; k < 4; k++)
        key = fsdp__rng_mix(key, fsdp__rng_mix(lane[k], word[k]));
    return key;
}

/* ---- single elements ---------------------------------------------------------- */

uint32_t fsdp__rng_u32(uint64_t key, uint64_t i)
{
    uint32_t w[4];
    fsdp__philox(key, i / 4, w);
    return w[i % 4];
}

static float uniform_of(uint32_t word)
{
    return (float)(word >> 8) * 0x1p-24f;
}

float fsdp__rng_uniform(uint64_t key, uint64_t i)
{
    return uniform_of(fsdp__rng_u32(key, i));
}

/* Two normals of two words. The first uniform is in (0, 1], so its logarithm
 * is finite. */
static void normal_pair(const uint32_t w[2], float out[2])
{
    double u = ((double)w[0] + 1.0) * 0x1p-32;
    double angle = 6.283185307179586476925 * ((double)w[1] * 0x1p-32);
    double r = sqrt(-2.0 * log(u));
    out[0] = (float)(r * cos(angle));
    out[1] = (float)(r * sin(angle));
}

float fsdp__rng_normal(uint64_t key, uint64_t i)
{
    uint32_t w[4];
    float pair[2];
    fsdp__philox(key, i / 4, w);
    normal_pair(w + i % 4 / 2 * 2, pair);
    return pair[i % 2];
}

/* ---- fills ------------------------------------------------------------------------ */

typedef struct fill {
    uint64_t key, first;
    float *out;
    size_t n;
    int normal;
} fill;

/* The four elements of one block. */
static void block_of(const fill *f, uint64_t block, float v[4])
{
    uint32_t w[4];
    fsdp__philox(f->key, block, w);
    if (f->normal) {
        normal_pair(w, v);
        normal_pair(w + 2, v + 2);
    } else {
        for (int j = 0; j < 4; j++)
            v[j] = uniform_of(w[j]);
    }
}

static void fill_part(void *arg, int64_t part)
{
    const fill *f = arg;
    size_t begin = (size_t)part * PART;
    size_t end = f->n - begin < PART ? f->n : begin + PART;
    for (size_t i = begin; i < end;) {
        uint64_t at = f->first + i;
        float v[4];
        block_of(f, at / 4, v);
        for (size_t j = at % 4; j < 4 && i < end; j++)
            f->out[i++] = v[j];
    }
}

static void run_fill(fill f)
{
    fsdp__parallel((int64_t)(f.n / PART + (f.n % PART != 0)), fill_part, &f);
}

void fsdp__rng_uniform_fill(uint64_t key, uint64_t first, float *out, size_t n)
{
    run_fill((fill){key, first, out, n, 0});
}

void fsdp__rng_normal_fill(uint64_t key, uint64_t first, float *out, size_t n)
{
    run_fill((fill){key, first, out, n, 1});
}

/* ---- permutation ------------------------------------------------------------------ */

uint64_t fsdp__rng_permute(uint64_t key, uint64_t i, uint64_t n)
{
    if (n <= 1) return 0;
    /* Halves of `half` bits each: the smallest square domain that holds n, at
     * most four times as large, so walking a cycle until it is back below n
     * takes four rounds on average at worst. */
    int half = 1;
    while (half < 32 && (n - 1) >> (2 * half))
        half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint64_t round = 0; round < 8; round++) {
            uint64_t next = left ^ (fsdp__rng_mix(key + round, right) & mask);
            left = right;
            right = next;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}
