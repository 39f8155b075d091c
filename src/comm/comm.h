/*
 * comm.h - what the rooms above need of comm beyond the public header.
 */
#ifndef FSDP_COMM_COMM_H
#define FSDP_COMM_COMM_H

#include "device/allocator.h"
#include "fsdp/comm.h"

/* Memory of this rank that the group's peers may read: gradient buffers,
 * shards. For one rank: the CPU allocator. Owned by the context. */
fsdp__allocator *fsdp__comm_allocator(fsdp_group *g);

/* Bytes in gathered copies of the group: taken now, and backed by memory. They are the host's, and
 * in no rank's reserved bytes; a group of one has them in the CPU allocator. */
void fsdp__shared_bytes(const fsdp_group *g, int64_t *live, int64_t *touched);

/* Test switch: called before each collective is issued (delays, kills). */
typedef void (*fsdp__comm_disturb)(void *arg, fsdp_lane lane, fsdp_collective c, const char *label);
void fsdp__comm_set_disturb(fsdp__comm_disturb fn, void *arg);

#endif
