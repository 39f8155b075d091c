/*
 * hosts.h - how the axes of a mesh lie over hosts: pure functions of sizes and of each rank's host.
 */
#ifndef FSDP_MESH_HOSTS_H
#define FSDP_MESH_HOSTS_H

#include <stdbool.h>

#include "base/str.h"

/* A mesh as mesh.h numbers it: rank r stands at (r / (size[1] * ...) % size[0], ..., r % size of the
 * last axis). */
typedef struct fsdp__host_table {
    int ndim;
    const int *size;          /* (ndim) */
    const char *const *name;  /* (ndim) */
    int world;                /* the product of the sizes */
    const char *const *host;  /* (world): where each rank runs */
} fsdp__host_table;

/* Whether a group along the axis has ranks of more than one host. */
bool fsdp__axis_crosses(const fsdp__host_table *t, int axis);
/* A line an axis: its groups, and the hosts of each. */
void fsdp__axes_text(const fsdp__host_table *t, fsdp__str *out);
/* Where the last axis (shard) crosses hosts and the one before it (replicate) does not: what that
 * costs, and the mesh and the order of ranks that would be right. Else nothing is added, and false.
 */
bool fsdp__mesh_advice(const fsdp__host_table *t, fsdp__str *out);

#endif
