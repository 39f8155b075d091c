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

/* Test switch: called before and after each word that this rank publishes to its peers, i.e. at
 * each step of the protocol (a seeded scheduler that yields or sleeps there). */
typedef void (*fsdp__comm_schedule)(void *arg);
void fsdp__comm_set_schedule(fsdp__comm_schedule fn, void *arg);

/* Collective over the world, also while an error is kept: clears this rank's error and the abort
 * posted in the world, and gives up all works under way (a wait for one then frees it and returns
 * FSDP_INTERRUPTED, keeping no error). All gathered copies must have been given back. */
fsdp_status fsdp__comm_reset(void);

#endif
