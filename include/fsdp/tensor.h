/*
 * tensor.h - arrays of numbers with a shape, and who owns them.
 *
 * Ownership. Tensors are reference-counted. A tensor that a function here or
 * an op returns belongs to the innermost open scope and dies with it; without
 * an open scope it belongs to the caller, who releases it. fsdp_retain adds an
 * owner. fsdp_set(&x, y) drops the old value of x at once, so that a loop over
 * layers holds one activation, not all. Calling a module opens a scope around
 * its forward and hands its outputs to the caller's.
 *
 * Every function accepts NULL tensors: constructors and ops then return NULL,
 * accessors 0 or NULL. All tensors of a context are used by its thread only.
 */
#ifndef FSDP_TENSOR_H
#define FSDP_TENSOR_H

#include <stddef.h>
#include <stdint.h>

#include "context.h"
#include "device.h"
#include "dtype.h"

FSDP_EXTERN_C_BEGIN

#define FSDP_MAX_DIMS 8

typedef struct fsdp_tensor fsdp_tensor;
typedef struct fsdp_scope fsdp_scope;

/* ---- making ------------------------------------------------------------- */

/* On the current device, contiguous, contents undefined (meta: no bytes).
 * ndim 0..FSDP_MAX_DIMS; sizes may be 0. */
FSDP_API fsdp_tensor *fsdp_empty(fsdp_dtype t, int ndim, const int64_t *sizes);
FSDP_API fsdp_tensor *fsdp_zeros(fsdp_dtype t, int ndim, const int64_t *sizes);
FSDP_API fsdp_tensor *fsdp_full(fsdp_dtype t, int ndim, const int64_t *sizes,
                                double value);
FSDP_API fsdp_tensor *fsdp_scalar(fsdp_dtype t, double value); /* 0-dim */
/* A tensor over the caller's bytes, without a copy. strides in elements; NULL:
 * contiguous. free_fn(data, arg), if given, is called when the last user is
 * gone; the bytes are not in the accounts. */
FSDP_API fsdp_tensor *
fsdp_tensor_from_memory(void *data, fsdp_dtype t, int ndim,
                        const int64_t *sizes, const int64_t *strides,
                        void (*free_fn)(void *data, void *arg), void *arg);
/* Standard normal and uniform [0,1) numbers: a function of (seed, name,
 * index). */
FSDP_API fsdp_tensor *fsdp_randn(fsdp_dtype t, int ndim, const int64_t *sizes,
                                 uint64_t seed, const char *name);
FSDP_API fsdp_tensor *fsdp_rand(fsdp_dtype t, int ndim, const int64_t *sizes,
                                uint64_t seed, const char *name);
/* The same numbers with no gradient history: shares the storage. */
FSDP_API fsdp_tensor *fsdp_detach(fsdp_tensor *t);

/* ---- owning ------------------------------------------------------------- */

FSDP_API fsdp_tensor *fsdp_retain(fsdp_tensor *t); /* returns t */
FSDP_API void fsdp_release(fsdp_tensor *t);
/* *x = y. The old *x, if it is not y, is dropped now where it belongs to the
 * innermost scope (or to the caller, when none is open); what belongs to others
 * - a module's arguments, parameters - is left to them. */
FSDP_API void fsdp_set(fsdp_tensor **x, fsdp_tensor *y);

FSDP_API fsdp_scope *fsdp_scope_begin(void); /* NULL: error kept */
/* Ends s and every scope opened inside it. NULL: nothing. */
FSDP_API void fsdp_scope_end(fsdp_scope *s);
/* Moves t from its scope to the one around it (to the caller if none). */
FSDP_API void fsdp_scope_keep(fsdp_tensor *t);

/* ---- looking ------------------------------------------------------------ */

FSDP_API int fsdp_ndim(const fsdp_tensor *t);
/* i may be negative: -1 is the last. */
FSDP_API int64_t fsdp_size(const fsdp_tensor *t, int i);
FSDP_API int64_t fsdp_stride(const fsdp_tensor *t, int i); /* elements */
FSDP_API const int64_t *fsdp_sizes(const fsdp_tensor *t);
FSDP_API int64_t fsdp_numel(const fsdp_tensor *t);
FSDP_API fsdp_dtype fsdp_tensor_dtype(const fsdp_tensor *t);
FSDP_API fsdp_device fsdp_tensor_device(const fsdp_tensor *t);
FSDP_API int fsdp_is_contiguous(const fsdp_tensor *t);
/* Address of the first element; NULL for meta tensors and while the storage is
 * freed. Writing through it counts as a mutation only after fsdp_touch. */
FSDP_API void *fsdp_data(const fsdp_tensor *t);
FSDP_API void fsdp_touch(fsdp_tensor *t);
/* The value of a one-element tensor; NaN (and the error kept) otherwise. */
FSDP_API double fsdp_item(const fsdp_tensor *t);
/* Element by index (ndim numbers). */
FSDP_API double fsdp_at(const fsdp_tensor *t, const int64_t *index);
/* Copies all elements, in order, into out as doubles (numel of them). */
FSDP_API fsdp_status fsdp_to_doubles(const fsdp_tensor *t, double *out);
/* "f32 (2, 3) cpu", for messages. The caller frees it with free. */
FSDP_API char *fsdp_tensor_describe(const fsdp_tensor *t);

/* ---- writing, outside autograd ------------------------------------------ */

/* dst = src, converted; same sizes. Counts as a mutation of dst. */
FSDP_API fsdp_status fsdp_copy_(fsdp_tensor *dst, const fsdp_tensor *src);
FSDP_API fsdp_status fsdp_fill_(fsdp_tensor *t, double value);
/* dst += src, converted; same sizes. */
FSDP_API fsdp_status fsdp_accumulate_(fsdp_tensor *dst, const fsdp_tensor *src);

/* ---- random numbers of ops ---------------------------------------------- */

/* What dropout draws from: seed and step, and the global ids of the samples of
 * this microbatch (copied). n 0: rank * rows + row stands in. To be called
 * before each microbatch: modules count their calls from here. */
FSDP_API fsdp_status fsdp_random_set(uint64_t seed, uint64_t step,
                                     const uint64_t *sample_ids, int64_t n);

FSDP_EXTERN_C_END
#endif
