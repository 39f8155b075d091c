/*
 * kernel_walk.h - walking several strided arrays of one shape side by side.
 *
 * fsdp__walk_init drops sizes of 1 and joins neighbouring dims that lie
 * together in every array, so a contiguous tensor of any rank becomes one run.
 * The last dim that is left is the run; a walk steps over the rows before it.
 */
#ifndef FSDP_TENSOR_KERNEL_WALK_H
#define FSDP_TENSOR_KERNEL_WALK_H

#include <stdint.h>

#define FSDP__WALK_DIMS 8
#define FSDP__WALK_ARRAYS 3

typedef struct fsdp__walk {
    int ndim; /* of the rows: without the run */
    int arrays;
    int64_t rows; /* product of the rows' sizes; 0 when anything is empty */
    int64_t run;  /* elements of the run */
    int64_t size[FSDP__WALK_DIMS];
    int64_t stride[FSDP__WALK_ARRAYS][FSDP__WALK_DIMS]; /* elements */
    int64_t step[FSDP__WALK_ARRAYS];                    /* strides of the run */
} fsdp__walk;

typedef struct fsdp__walk_at {
    int64_t index[FSDP__WALK_DIMS];
    int64_t offset[FSDP__WALK_ARRAYS]; /* elements, of the row's first */
} fsdp__walk_at;

static inline void fsdp__walk_init(fsdp__walk *w, int ndim, const int64_t *sizes, int arrays,
                                   const int64_t *const *strides)
{
    int64_t size[FSDP__WALK_DIMS], stride[FSDP__WALK_ARRAYS][FSDP__WALK_DIMS];
    int n = 0;
    for (int d = 0; d < ndim; d++) {
        if (sizes[d] == 1) continue;
        int joins = n > 0;
        for (int k = 0; k < arrays && joins; k++)
            joins = stride[k][n - 1] == strides[k][d] * sizes[d];
        if (!joins) size[n++] = 1;
        size[n - 1] *= sizes[d];
        for (int k = 0; k < arrays; k++)
            stride[k][n - 1] = strides[k][d];
    }
    w->arrays = arrays;
    w->ndim = n > 0 ? n - 1 : 0;
    w->run = n > 0 ? size[n - 1] : 1;
    w->rows = w->run > 0;
    for (int d = 0; d < w->ndim; d++) {
        w->size[d] = size[d];
        w->rows *= size[d];
        for (int k = 0; k < arrays; k++)
            w->stride[k][d] = stride[k][d];
    }
    for (int k = 0; k < arrays; k++)
        w->step[k] = n > 0 ? stride[k][n - 1] : 1;
}

/* To row `row`. */
static inline void fsdp__walk_seek(const fsdp__walk *w, fsdp__walk_at *at, int64_t row)
{
    for (int k = 0; k < w->arrays; k++)
        at->offset[k] = 0;
    for (int d = w->ndim - 1; d >= 0; d--) {
        at->index[d] = row % w->size[d];
        row /= w->size[d];
        for (int k = 0; k < w->arrays; k++)
            at->offset[k] += at->index[d] * w->stride[k][d];
    }
}

/* To the next row; past the last one, to the first. */
static inline void fsdp__walk_next(const fsdp__walk *w, fsdp__walk_at *at)
{
    for (int d = w->ndim - 1; d >= 0; d--) {
        for (int k = 0; k < w->arrays; k++)
            at->offset[k] += w->stride[k][d];
        if (++at->index[d] < w->size[d]) return;
        at->index[d] = 0;
        for (int k = 0; k < w->arrays; k++)
            at->offset[k] -= w->size[d] * w->stride[k][d];
    }
}

#endif
