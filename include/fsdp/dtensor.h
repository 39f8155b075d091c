/*
 * dtensor.h - one tensor on many ranks: a mesh, a placement for each of its
 * axes, the global shape, and this rank's part.
 *
 * A sharded parameter is an fsdp_tensor whose sizes are those of the local
 * part. Cut along dim d over N ranks, rank r holds the rows [r*c, (r+1)*c) of
 * d, c = ceil(size / N): the last ranks may hold fewer, or none.
 */
#ifndef FSDP_DTENSOR_H
#define FSDP_DTENSOR_H

#include "mesh.h"
#include "tensor.h"

FSDP_EXTERN_C_BEGIN

typedef enum fsdp_placement_kind {
    FSDP_REPLICATE,
    FSDP_SHARD
} fsdp_placement_kind;

typedef struct fsdp_placement {
    fsdp_placement_kind kind;
    int dim; /* FSDP_SHARD: the tensor dim that is cut */
} fsdp_placement;

FSDP_API int fsdp_is_dtensor(const fsdp_tensor *t);
FSDP_API fsdp_mesh *fsdp_dtensor_mesh(const fsdp_tensor *t);
/* Along mesh axis `axis`. */
FSDP_API fsdp_placement fsdp_dtensor_placement(const fsdp_tensor *t, int axis);
FSDP_API int fsdp_dtensor_ndim(const fsdp_tensor *t);
FSDP_API const int64_t *fsdp_dtensor_sizes(const fsdp_tensor *t); /* global */
/* The local part as a plain tensor: a view, no history. */
FSDP_API fsdp_tensor *fsdp_dtensor_local(fsdp_tensor *t);
/* The whole tensor, gathered on every rank. Collective over the mesh. */
FSDP_API fsdp_tensor *fsdp_dtensor_full(fsdp_tensor *t);

FSDP_EXTERN_C_END
#endif
