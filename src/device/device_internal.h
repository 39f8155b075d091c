/*
 * device_internal.h - what the room's files share: the state that hangs off a context.
 */
#ifndef FSDP_DEVICE_INTERNAL_H
#define FSDP_DEVICE_INTERNAL_H

#include "device/allocator.h"

typedef struct fsdp__cpu_memory fsdp__cpu_memory; /* cpu.c */

typedef struct fsdp__file_memory fsdp__file_memory; /* file.c */

typedef struct fsdp__kept {
    void *p;
    void (*free_fn)(void *);
} fsdp__kept;

typedef struct fsdp__device_state {
    fsdp__kept *kept; /* freed with the context, the last first */
    int64_t n_kept, kept_cap;
    fsdp_device *stack; /* devices pushed, the last in force */
    int64_t depth, cap;
    fsdp__cpu_memory *cpu;    /* NULL until first asked for */
    struct fsdp__range *ranges; /* a list: every allocator over mapped addresses */
    fsdp__file_memory *files; /* a list: one a folder */
    fsdp_offload_stats offload;
    bool said_same; /* that offload to the CPU changes nothing */
} fsdp__device_state;

/* The current context's; made on first use. NULL: error kept. */
fsdp__device_state *fsdp__device_state_get(void);

void fsdp__cpu_memory_free(fsdp__cpu_memory *m);
void fsdp__file_memory_free(fsdp__file_memory *list);

#endif
