/*
 * finite.h - looking for a NaN or an infinity among many numbers.
 */
#ifndef FSDP_BASE_FINITE_H
#define FSDP_BASE_FINITE_H

#include <stdint.h>

#include "fsdp/dtype.h"

/* Index of the first of n numbers of floating dtype t that is not finite; -1: all are, or t is no
 * floating dtype. */
int64_t fsdp__find_non_finite(const void *x, fsdp_dtype t, int64_t n);

#endif
