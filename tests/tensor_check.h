/*
 * tensor_check.h - what tests of tensors, modules and ranks share.
 */
#ifndef FSDP_TESTS_TENSOR_CHECK_H
#define FSDP_TESTS_TENSOR_CHECK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "fsdp/fsdp.h"

#define SIZES(...) ((const int64_t[]){__VA_ARGS__})

/* Inside a function that returns fsdp_status, on any rank. */
#define EXPECT(condition)                                                             \
    do {                                                                              \
        if (fsdp_error()) return fsdp_error();                                        \
        if (!(condition))                                                             \
            return fsdp__fail(FSDP_INTERNAL, "rank %d, %s:%d: %s", fsdp_rank(),       \
                              __FILE__, __LINE__, #condition);                        \
    } while (0)

/* In a test: no error is kept, or its text is shown. */
static inline void check_ok_at(int ok, const char *file, int line)
{
    if (ok && !fsdp_error()) return;
    char text[2048];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    fail_msg("%s:%d: %s", file, line, text);
}
#define check_ok(e) check_ok_at((e) == FSDP_OK, __FILE__, __LINE__)
#define check_tensor(t) check_ok_at((t) != NULL, __FILE__, __LINE__)

/* An error of that code is kept whose text holds the words; it is cleared. */
static inline void check_error_at(fsdp_status code, const char *words, const char *file, int line)
{
    char text[2048];
    fsdp_status s = fsdp_error();
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    if (s != code || !strstr(text, words))
        fail_msg("%s:%d: %s: \"%s\"; expected %s with \"%s\"", file, line, fsdp_status_name(s),
                 text, fsdp_status_name(code), words);
}
#define check_error(code, words) check_error_at(code, words, __FILE__, __LINE__)

/* The same on any rank, inside a function that returns fsdp_status. */
static inline fsdp_status check_failed(fsdp_status code, const char *words)
{
    fsdp_status s = fsdp_error();
    char text[1024];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    if (s == code && strstr(text, words)) return FSDP_OK;
    return fsdp__fail(FSDP_INTERNAL, "%s: \"%s\"; expected %s with \"%s\"", fsdp_status_name(s),
                      text, fsdp_status_name(code), words);
}

/* Live bytes of tensors. */
static inline int64_t check_live(void)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    /* What comm stages messages in stays for the next message. */
    return m.live_total - m.live[FSDP_COMMUNICATION];
}

/* All elements as doubles; free it. */
static inline double *check_values(const fsdp_tensor *t)
{
    double *v = calloc((size_t)fsdp_numel(t) + 1, sizeof *v);
    if (!v || fsdp_to_doubles(t, v) != FSDP_OK) {
        free(v);
        return NULL;
    }
    return v;
}

/* Largest |a - b| / largest |b|; infinite for other sizes or a NaN in one. */
static inline double check_distance(const fsdp_tensor *a, const fsdp_tensor *b)
{
    double *x = check_values(a), *y = check_values(b), most = 0, scale = 0;
    int64_t n = fsdp_numel(a);
    int same = x && y && fsdp_ndim(a) == fsdp_ndim(b);
    for (int i = 0; same && i < fsdp_ndim(a); i++)
        same = fsdp_size(a, i) == fsdp_size(b, i);
    for (int64_t i = 0; same && i < n; i++) {
        double d = fabs(x[i] - y[i]);
        if (isnan(d)) same = isnan(x[i]) && isnan(y[i]);
        most = d > most ? d : most;
        scale = fabs(y[i]) > scale ? fabs(y[i]) : scale;
    }
    free(x);
    free(y);
    if (!same) return INFINITY;
    return most == 0 ? 0 : most / scale;
}

/* The same bits? Contiguous tensors. */
static inline int check_same_bits(const fsdp_tensor *a, const fsdp_tensor *b)
{
    return a && b && fsdp_numel(a) == fsdp_numel(b) &&
           fsdp_tensor_dtype(a) == fsdp_tensor_dtype(b) &&
           (fsdp_numel(a) == 0 || !memcmp(fsdp_data(a), fsdp_data(b),
                                          (size_t)fsdp_numel(a) *
                                              fsdp_dtype_size(fsdp_tensor_dtype(a))));
}

/* A tensor of the given numbers. */
static inline fsdp_tensor *check_make(fsdp_dtype t, int ndim, const int64_t *sizes,
                                      const double *values)
{
    fsdp_tensor *x = fsdp_tensor_from_memory((void *)(uintptr_t)values, FSDP_F64, ndim, sizes, NULL,
                                             NULL, NULL);
    return t == FSDP_F64 ? fsdp_clone(x) : fsdp_cast(x, t);
}

#endif
