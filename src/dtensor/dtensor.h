/*
 * dtensor.h - the layout that a distributed tensor carries.
 */
#ifndef FSDP_DTENSOR_DTENSOR_H
#define FSDP_DTENSOR_DTENSOR_H

#include "fsdp/dtensor.h"
#include "tensor/tensor.h"

typedef struct fsdp__layout {
    fsdp__dist base; /* first: a tensor's dist pointer is this */
    fsdp_mesh *mesh;
    fsdp_placement place[FSDP_MESH_MAX_DIMS];
    int ndim;
    int64_t size[FSDP_MAX_DIMS]; /* global */
} fsdp__layout;

/* The cut of a tensor along one dim over n ranks: the whole is (outer, dim, inner). */
typedef struct fsdp__cut {
    int64_t outer, dim, inner, chunk; /* chunk = ceil(dim / n) */
} fsdp__cut;
fsdp__cut fsdp__cut_of(int ndim, const int64_t *sizes, int dim, int n);
/* Rows [*row0, *row0 + rows) of rank r; returns rows. */
int64_t fsdp__cut_rows(const fsdp__cut *c, int r, int64_t *row0);

/* refs 1. */
fsdp__layout *fsdp__layout_create(fsdp_mesh *mesh, const fsdp_placement *place, int ndim,
                                  const int64_t *sizes);
/* Makes t the local part of a distributed tensor; takes over the reference. */
void fsdp__layout_attach(fsdp_tensor *t, fsdp__layout *l);
/* to becomes a part of a tensor that is cut as `from` is: a gradient, an optimizer's state. */
void fsdp__layout_share(fsdp_tensor *to, const fsdp_tensor *from);
/* NULL if t is not one. */
const fsdp__layout *fsdp__layout_of(const fsdp_tensor *t);
/* The mesh axis that cuts t, or -1. */
int fsdp__layout_shard_axis(const fsdp__layout *l);

#endif
