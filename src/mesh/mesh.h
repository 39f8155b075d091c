/*
 * mesh.h - what the rooms above need of meshes beyond the public header.
 */
#ifndef FSDP_MESH_MESH_H
#define FSDP_MESH_MESH_H

#include "fsdp/mesh.h"

/* The ranks of m's last axis, n of them, as a mesh (replicate n / k, shard k): k consecutive ranks
 * are a shard group. k divides n. Made once for each m and k, by a call that is collective over the
 * world; owned by the context. NULL: error kept. */
fsdp_mesh *fsdp__mesh_regroup(fsdp_mesh *m, int k);

#endif
