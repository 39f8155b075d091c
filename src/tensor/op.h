/*
 * op.h - one call of an op: inputs, attributes, outputs.
 *
 * The op's shape rule checks inputs and makes outputs with fsdp__op_out or
 * fsdp__op_view; its run fills them. The meaning of i[] and f[] stands beside
 * each op's shape rule. Inputs that an op may lack (a bias) are NULL.
 * `extra` outputs (statistics) follow the n_out real ones: they are saved for
 * backward and never returned.
 */
#ifndef FSDP_TENSOR_OP_H
#define FSDP_TENSOR_OP_H

#include "tensor/tensor.h"

typedef enum fsdp__op {
#define FSDP__OP(name) FSDP__OP_##name,
#include "tensor/ops.def"
#undef FSDP__OP
    FSDP__OP_COUNT
} fsdp__op;

#define FSDP__OP_MAX_IN 8
#define FSDP__OP_MAX_OUT 4

typedef struct fsdp__opcall {
    fsdp__op op;
    int n_in, n_out;
    fsdp_tensor *in[FSDP__OP_MAX_IN];
    fsdp_tensor *out[FSDP__OP_MAX_OUT];
    int64_t i[12];
    double f[4];
    unsigned optional; /* bit k: input k may be NULL */
    bool is_view; /* out[0] shares the storage of in[0]; run is not called */
    fsdp_tensor **kept; /* the outputs of an earlier run, which stand in for this one; NULL: none */
    bool grad;    /* a graph is being built: statistics are wanted */
} fsdp__opcall;

typedef fsdp_status (*fsdp__op_fn)(fsdp__opcall *c);

#define FSDP__OP(name)                                                                             \
    fsdp_status fsdp__shape_##name(fsdp__opcall *c);                                               \
    fsdp_status fsdp__run_##name(fsdp__opcall *c);
#include "tensor/ops.def"
#undef FSDP__OP

const char *fsdp__op_name(fsdp__op op);
extern const fsdp__op_fn fsdp__op_shapes[FSDP__OP_COUNT];
extern const fsdp__op_fn fsdp__op_runs[FSDP__OP_COUNT];

/* Makes output k on the device of the first input. */
fsdp_status fsdp__op_out(fsdp__opcall *c, int k, fsdp_dtype t, int ndim, const int64_t *sizes);
/* Makes output 0 a view of input 0. */
fsdp_status fsdp__op_view(fsdp__opcall *c, int ndim, const int64_t *sizes, const int64_t *strides,
                          int64_t offset);
/* Checks: present floating inputs share one dtype (those from `first` on). */
fsdp_status fsdp__op_same_dtype(const fsdp__opcall *c, int first, int count);
fsdp_dtype fsdp__stat_dtype(fsdp_dtype t); /* f32; f64 for f64 */
/* Broadcast sizes of inputs 0 and 1; error naming both shapes. */
fsdp_status fsdp__op_broadcast(const fsdp__opcall *c, int *ndim, int64_t *sizes);
/* Strides of t spread over ndim sizes: 0 where it is broadcast. */
void fsdp__spread_strides(const fsdp_tensor *t, int ndim, const int64_t *sizes, int64_t *strides);
/* A contiguous form of t: t itself or a new tensor of the current scope. */
fsdp_tensor *fsdp__dense(fsdp_tensor *t);
/* Rows of a tensor whose last dim is C: numel / C. */
int64_t fsdp__rows(const fsdp_tensor *t);

#endif
