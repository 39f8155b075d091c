/*
 * mesh.h - ranks by name: a grid of ranks with named axes.
 *
 * Ranks fill the grid in row-major order: on a mesh (replicate 2, shard 4)
 * ranks 0-3 are one shard group, and 0 and 4 one replicate group.
 */
#ifndef FSDP_MESH_H
#define FSDP_MESH_H

#include "comm.h"
#include "device.h"

FSDP_EXTERN_C_BEGIN

typedef struct fsdp_mesh fsdp_mesh;

#define FSDP_MESH_MAX_DIMS 4

/* Collective over the world. The sizes multiply to the world size (an error
 * lists the valid choices); names are distinct. Owned by the context. */
FSDP_API fsdp_mesh *fsdp_mesh_create(fsdp_device d, int ndim, const int *sizes,
                                     const char *const *names);
FSDP_API int fsdp_mesh_ndim(const fsdp_mesh *m);
FSDP_API int fsdp_mesh_size(const fsdp_mesh *m, int axis);
FSDP_API const char *fsdp_mesh_axis_name(const fsdp_mesh *m, int axis);
/* -1 with an error kept, naming the axes that there are. */
FSDP_API int fsdp_mesh_axis(const fsdp_mesh *m, const char *name);
/* This rank's place along an axis. */
FSDP_API int fsdp_mesh_coordinate(const fsdp_mesh *m, int axis);
/* The ranks that differ from this one along that axis only. */
FSDP_API fsdp_group *fsdp_mesh_group(const fsdp_mesh *m, int axis);
/* One axis of m as a mesh of its own. Not collective. */
FSDP_API fsdp_mesh *fsdp_mesh_slice(fsdp_mesh *m, const char *name);
/* The mesh that m was sliced from, or NULL. */
FSDP_API fsdp_mesh *fsdp_mesh_parent(const fsdp_mesh *m);
/* "replicate 2 x shard 4", a line for each rank with its place and host, and
 * the groups of each axis with their hosts. Where the shard axis crosses hosts
 * and the replicate axis does not, also the mesh that would be right.
 * Collective over the world. The caller frees it with free. */
FSDP_API char *fsdp_mesh_print(fsdp_mesh *m);

FSDP_EXTERN_C_END
#endif
