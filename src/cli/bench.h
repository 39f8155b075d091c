/*
 * bench.h - what the benchmarks share: timing of one thing on all ranks at
 * once, and the two limits of the machine that floors are made of.
 *
 * A floor is what a piece of work cannot do without on this machine: its
 * matrix products at the best rate seen for their shapes, and the bytes that
 * it has to move at the measured copy bandwidth, with all ranks at once.
 */
#ifndef FSDP_CLI_BENCH_H
#define FSDP_CLI_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/fsdp.h"
#include "fsdp/models.h"
#include "models/config.h"

/* Runs fn(arg) `times` times after one warm-up, all ranks starting each together; the seconds of
 * the fastest and of the median run of this rank. */
typedef struct fsdp__bench_time {
    double best, median;
} fsdp__bench_time;
fsdp_status fsdp__bench_run(int times, fsdp_status (*fn)(void *arg), void *arg,
                            fsdp__bench_time *out);

/* Bytes a second (read plus written) of memcpy between buffers beyond the caches, by as many
 * threads as compute, all ranks at once. */
fsdp_status fsdp__bench_copy_rate(double *rate);

/* One form of matrix product: C (M,N) = op(A) (M,K) op(B) (K,N), in f32 or bf16. */
typedef struct fsdp__bench_gemm {
    int trans_a, trans_b;
    int64_t M, N, K;
    fsdp_dtype t;
    double count; /* how often a step does it */
} fsdp__bench_gemm;
/* Seconds of one such product on all ranks at once, by the library's own path. */
fsdp_status fsdp__bench_gemm_time(const fsdp__bench_gemm *g, fsdp__bench_time *out);
/* The products of one training step of one rank; returns how many were put into out (cap). */
int fsdp__bench_step_products(const fsdp_model_config *c, int64_t batch, int64_t seq, fsdp_dtype t,
                              fsdp__bench_gemm *out, int cap);

/* The sub-commands of `fsdp bench`; argv[0] is the sub-command's name. */
int fsdp__bench_step(int argc, char **argv);
int fsdp__bench_gemms(int argc, char **argv);
int fsdp__bench_kernels(int argc, char **argv);
int fsdp__bench_comm(int argc, char **argv);

/* The largest of a number over all ranks. */
fsdp_status fsdp__bench_max(double *x);
const char *fsdp__bench_option(int argc, char **argv, const char *name, const char *otherwise);
/* Sizes by name: tiny, small, 135m, 1b. */
fsdp_status fsdp__bench_model(const char *name, int64_t seq, fsdp_model_config *out);

#endif
