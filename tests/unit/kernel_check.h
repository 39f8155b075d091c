/*
 * kernel_check.h - what the tests of kernels share: arrays of any floating
 * dtype, filled from a counter, read back as f64; and running the program again
 * on each lower instruction set.
 */
#ifndef FSDP_TESTS_KERNEL_CHECK_H
#define FSDP_TESTS_KERNEL_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "base/convert.h"
#include "base/cpu.h"
#include "fsdp/context.h"
#include "fsdp/dtype.h"

extern char **environ;

/* Relative size of half a unit in the last place. */
static inline double check_ulp(fsdp_dtype t)
{
    switch (t) {
    case FSDP_F64:
        return 0x1p-53;
    case FSDP_F32:
        return 0x1p-24;
    case FSDP_F16:
        return 0x1p-11;
    default:
        return 0x1p-8;
    }
}

/* A number in [-1, 1) out of a counter, the same on every machine. */
static inline double check_random(uint64_t i)
{
    i = (i + 0x632be59bd9b4e019u) * 0x9e3779b97f4a7c15u;
    i = (i ^ i >> 30) * 0xbf58476d1ce4e5b9u;
    i = (i ^ i >> 27) * 0x94d049bb133111ebu;
    return (double)((i ^ i >> 31) >> 11) * 0x1p-52 - 1.0;
}

static inline double check_get(const void *x, fsdp_dtype t, int64_t i)
{
    switch (t) {
    case FSDP_F64:
        return ((const double *)x)[i];
    case FSDP_F32:
        return (double)((const float *)x)[i];
    case FSDP_F16:
        return (double)fsdp__f16_to_f32(((const uint16_t *)x)[i]);
    default:
        return (double)fsdp__bf16_to_f32(((const uint16_t *)x)[i]);
    }
}

static inline void check_set(void *x, fsdp_dtype t, int64_t i, double v)
{
    switch (t) {
    case FSDP_F64:
        ((double *)x)[i] = v;
        break;
    case FSDP_F32:
        ((float *)x)[i] = (float)v;
        break;
    case FSDP_F16:
        ((uint16_t *)x)[i] = fsdp__f64_to_f16(v);
        break;
    default:
        ((uint16_t *)x)[i] = fsdp__f64_to_bf16(v);
        break;
    }
}

/* n elements of dtype t; exactly so many bytes, so that a sanitizer sees a
 * kernel that reaches beyond. Freed by the caller. */
static inline void *check_array(fsdp_dtype t, int64_t n, uint64_t seed, double scale)
{
    void *x = malloc(n ? (size_t)n * fsdp_dtype_size(t) : 1);
    assert_non_null(x);
    for (int64_t i = 0; i < n; i++)
        check_set(x, t, i, scale * check_random(seed * 1000003u + (uint64_t)i));
    return x;
}

static inline void *check_copy(const void *x, fsdp_dtype t, int64_t n)
{
    size_t bytes = (size_t)n * fsdp_dtype_size(t);
    void *y = malloc(bytes ? bytes : 1);
    assert_non_null(y);
    memcpy(y, x, bytes);
    return y;
}

/* The same numbers as f64. */
static inline double *check_wide(const void *x, fsdp_dtype t, int64_t n)
{
    double *y = malloc(n ? (size_t)n * sizeof *y : 1);
    assert_non_null(y);
    for (int64_t i = 0; i < n; i++)
        y[i] = check_get(x, t, i);
    return y;
}

/* The program's failures, and those of itself run on each lower instruction
 * set than the one in force (the environment is read once a process). */
static inline int check_all_isas(int failures)
{
    if (getenv("FSDP_ISA")) return failures;
    for (int isa = (int)fsdp__cpu_isa_machine() - 1; isa >= 0; isa--) {
        const char *name = fsdp__cpu_isa_name((fsdp__isa)isa);
        char *argv[] = {(char[]){"again"}, NULL};
        pid_t pid;
        int status = 0;
        setenv("FSDP_ISA", name, 1);
        if (posix_spawn(&pid, "/proc/self/exe", NULL, NULL, argv, environ) != 0 ||
            waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "failed with FSDP_ISA=%s\n", name);
            failures++;
        }
    }
    unsetenv("FSDP_ISA");
    return failures;
}

#endif
