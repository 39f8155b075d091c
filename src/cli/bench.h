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

/* Several pieces of work in turn, `times` rounds (64 at most) after a warm-up, each started on all
 * ranks together: what disturbs the machine meets them all, so their ratios hold. */
typedef struct fsdp__bench_work {
    fsdp_status (*fn)(void *arg);
    void *arg;
    fsdp__bench_time time;
} fsdp__bench_work;
enum { FSDP__BENCH_WORKS = 4 };
fsdp_status fsdp__bench_turns(int times, int n, fsdp__bench_work *w);

/* memcpy by as many threads as compute, in parts of 1 MiB: a piece of work (bench_rate.c). */
typedef struct fsdp__bench_copy {
    char *from, *to;
    size_t bytes;
} fsdp__bench_copy;
fsdp_status fsdp__bench_copy_init(fsdp__bench_copy *c, size_t bytes); /* touches both buffers */
fsdp_status fsdp__bench_copy_run(void *copy);
void fsdp__bench_copy_free(fsdp__bench_copy *c);

/* Issuing vector instructions on as many threads as compute: floats of one vector (lanes) of the
 * instruction set in force, and two pieces of work of `count` instructions each, all threads
 * together: independent fused multiply-adds (plain C: a product and a sum count as one), and a mix
 * of products, sums, multiply-adds and integer instructions such as a polynomial of exp needs. */
typedef struct fsdp__bench_issue {
    int lanes;
    double count;
} fsdp__bench_issue;
fsdp__bench_issue fsdp__bench_issue_init(void);
fsdp_status fsdp__bench_issue_fma(void *issue);
fsdp_status fsdp__bench_issue_mix(void *issue);

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
int fsdp__bench_recompute(int argc, char **argv);
int fsdp__bench_comm(int argc, char **argv);

/* The largest of a number over all ranks. */
fsdp_status fsdp__bench_max(double *x);
const char *fsdp__bench_option(int argc, char **argv, const char *name, const char *otherwise);
/* Sizes by name: tiny, small, 135m, 1b. */
fsdp_status fsdp__bench_model(const char *name, int64_t seq, fsdp_model_config *out);

#endif
