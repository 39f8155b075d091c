/*
 * context_internal.h - the fields of fsdp_context, for this room alone.
 */
#ifndef FSDP_BASE_CONTEXT_INTERNAL_H
#define FSDP_BASE_CONTEXT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/context.h"
#include "base/error.h"

typedef struct fsdp__slot_entry {
    void *p;
    void (*free_fn)(void *);
} fsdp__slot_entry;

struct fsdp_context {
    int rank, world_size;
    int threads; /* 0: not asked yet */

    /* The kept error. Workers of fsdp__parallel share the context, so keeping
     * one is guarded; everything else here belongs to the rank's own thread. */
    pthread_mutex_t error_lock;
    atomic_int error; /* fsdp_status */
    char *error_text; /* malloc, or error_small when memory ran out */
    char error_small[256];
    bool stopped; /* the kept error is fsdp__error_stop's */
    fsdp__error_hook hook;
    void *hook_arg;

    fsdp__slot_entry slots[FSDP__SLOT_COUNT];

    fsdp_memory_stats memory;
    int64_t fail_nth;

    fsdp_log_fn log;
    void *log_arg;
    int log_level;
};

/* Frees the kept error's text. */
void fsdp__error_drop(fsdp_context *ctx);

#endif
