/*
 * rng.h - random numbers as a function of a key, never of a state or a rank.
 *
 * Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
 * 3", SC 2011). A stream is a 64-bit key made by hashing what the numbers
 * belong to (seed, tensor name, step, sample, ...); element i of the stream
 * is the same on any rank, in any order and under any cut.
 */
#ifndef FSDP_BASE_RNG_H
#define FSDP_BASE_RNG_H

#include <stddef.h>
#include <stdint.h>

/* Four words of counter block `block` under `key`. */
void fsdp__philox(uint64_t key, uint64_t block, uint32_t out[4]);

/* Mixes words into a key; start from fsdp__rng_key(seed). */
uint64_t fsdp__rng_key(uint64_t seed);
uint64_t fsdp__rng_mix(uint64_t key, uint64_t word);
uint64_t fsdp__rng_mix_str(uint64_t key, const char *text);
/* The same of n bytes, in the machine's byte order: a hash, to compare numbers by. */
uint64_t fsdp__rng_mix_bytes(uint64_t key, const void *p, size_t n);

uint32_t fsdp__rng_u32(uint64_t key, uint64_t i);
/* [0, 1) with 24 bits. */
float fsdp__rng_uniform(uint64_t key, uint64_t i);
/* Standard normal by Box-Muller in double, rounded to float. */
float fsdp__rng_normal(uint64_t key, uint64_t i);
/* Elements first .. first + n - 1 of the streams above, the fast way. */
void fsdp__rng_uniform_fill(uint64_t key, uint64_t first, float *out, size_t n);
void fsdp__rng_normal_fill(uint64_t key, uint64_t first, float *out, size_t n);
/* A permutation of 0..n-1 evaluated at one index (a keyed Feistel network
 * with cycle walking): no table, any n >= 1. */
uint64_t fsdp__rng_permute(uint64_t key, uint64_t i, uint64_t n);

#endif
