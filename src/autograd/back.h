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

fsdp_status fsdp__lost_saved(const fsdp__node *n); /* the kept error, or one that names the node */

#endif
