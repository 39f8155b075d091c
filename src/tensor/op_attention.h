/*
 * op_attention.h - from a call of the attention op to its kernel's arguments,
 * shared with the backward.
 */
#ifndef FSDP_TENSOR_OP_ATTENTION_H
#define FSDP_TENSOR_OP_ATTENTION_H

#include "tensor/kernels.h"
#include "tensor/tensor.h"

/* i[0] causal, i[1] window; f[0] scale (0: 1/sqrt(D)), f[1] dropout p. keys may be NULL. */
void fsdp__attention_args(const fsdp_tensor *q, const fsdp_tensor *k, const fsdp_tensor *v,
                          const fsdp_tensor *out, const fsdp_tensor *keys, const int64_t *i,
                          const double *f, fsdp__attention *a);

#endif
