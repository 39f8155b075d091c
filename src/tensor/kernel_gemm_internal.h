/*
 * kernel_gemm_internal.h - the parts of the matrix product: the packed product
 * (kernel_gemm_tile.c) and oneDNN's (kernel_gemm_dnnl.c), one panel at a time.
 *
 * kernel_gemm.c cuts a product into panels and gives each to one thread; what
 * stands here runs on that thread alone.
 */
#ifndef FSDP_TENSOR_KERNEL_GEMM_INTERNAL_H
#define FSDP_TENSOR_KERNEL_GEMM_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/dtype.h"
#include "fsdp/status.h"

/* C (M,N) (+)= op(A) (M,K) * op(B) (K,N), as fsdp__k_gemm says, except that A
 * (ta) and B (tb) may be of any two dtypes but f64, which stays by itself. */
typedef struct fsdp__product {
    int trans_a, trans_b, add;
    int64_t M, N, K;
    const void *a, *b;
    void *c;
    int64_t lda, ldb, ldc;
    fsdp_dtype ta, tb, tc;
} fsdp__product;

/* The whole product, cut into panels: fsdp__k_gemm for mixed dtypes. */
fsdp_status fsdp__product_run(const fsdp__product *p);

/* Any dtypes, any machine. False: no memory for its scratch. */
bool fsdp__product_tile(const fsdp__product *p);

/* True when oneDNN is the better way for this product on this machine. */
bool fsdp__product_dnnl_wanted(const fsdp__product *p);
/* False: oneDNN has no fast way for it, or no memory; C is untouched. */
bool fsdp__product_dnnl(const fsdp__product *p);

#endif
