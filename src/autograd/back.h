/*
 * back.h - what the backwards of ops share (this room only).
 */
#ifndef FSDP_AUTOGRAD_BACK_H
#define FSDP_AUTOGRAD_BACK_H

#include "autograd/node.h"
#include "base/error.h"
#include "tensor/kernels.h"

/* Declares x as what was saved under k; returns on failure. */
#define FSDP__SAVED(x, k)                                                                          \
    fsdp_tensor *x = fsdp__node_saved(n, (k));                                                     \
    if (!x) return fsdp__lost_saved(n)
/* The same, contiguous. */
#define FSDP__SAVED_DENSE(x, k)                                                                    \
    FSDP__SAVED(x##_raw, k);                                                                       \
    fsdp_tensor *x = fsdp__dense(x##_raw);                                                         \
    if (!x) return fsdp_error()
/* Declares the place of input k's gradient; returns on failure. */
#define FSDP__PLACE(g, add, k)                                                                     \
    int add = 0;                                                                                   \
    fsdp_tensor *g = fsdp__grad_out(n, (k), &add);                                                 \
    if (!g) return fsdp_error()

/* The places of inputs 0..count-1 for a kernel that fills several in no promised order; NULL where
 * not wanted. An input given twice has one place: the second time comes by way of a temporary,
 * which fsdp__places_end adds. */
enum { FSDP__PLACES = 3 };
typedef struct fsdp__places {
    fsdp_tensor *d[FSDP__PLACES], *home[FSDP__PLACES];
    fsdp_dtype t[FSDP__PLACES]; /* of d, or of the input */
    int add[FSDP__PLACES];
} fsdp__places;
fsdp_status fsdp__places_begin(fsdp__node *n, int count, fsdp__places *p);
fsdp_status fsdp__places_end(const fsdp__places *p);

fsdp_status fsdp__lost_saved(const fsdp__node *n); /* the kept error, or one that names the node */

#endif
