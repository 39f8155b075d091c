/*
 * context.h - what a rank is: its number, its kept error, its accounts.
 *
 * There is no process-global state. Everything hangs off a context, and each
 * thread has a current one; a thread that never set one gets a private
 * context (rank 0 of 1) on first use, freed when the thread ends. So N ranks
 * can run as N threads of one process, and an application can hold several.
 * A context is used by one thread at a time.
 */
#ifndef FSDP_CONTEXT_H
#define FSDP_CONTEXT_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

FSDP_EXTERN_C_BEGIN

typedef struct fsdp_context fsdp_context;

/* X(enumerator, name): what bytes are for. */
#define FSDP_PURPOSE_LIST(X)                                                   \
    X(FSDP_PARAMETERS, "parameters")                                           \
    X(FSDP_GRADIENTS, "gradients")                                             \
    X(FSDP_OPTIMIZER, "optimizer")                                             \
    X(FSDP_UNSHARDED, "unsharded")                                             \
    X(FSDP_ACTIVATIONS, "activations")                                         \
    X(FSDP_COMMUNICATION, "communication")                                     \
    X(FSDP_OTHER, "other")

typedef enum fsdp_purpose {
#define FSDP__X(e, name) e,
    FSDP_PURPOSE_LIST(FSDP__X)
#undef FSDP__X
        FSDP_PURPOSE_COUNT
} fsdp_purpose;

FSDP_API const char *fsdp_purpose_name(fsdp_purpose p);

/* Makes a context and does not make it current. NULL if out of memory.
 * The caller frees it, after everything that was made in it. */
FSDP_API fsdp_context *fsdp_context_create(int rank, int world_size);
FSDP_API void fsdp_context_free(fsdp_context *ctx); /* NULL: nothing */

/* The calling thread's context; never NULL except when out of memory. */
FSDP_API fsdp_context *fsdp_context_current(void);
/* Makes ctx the calling thread's; returns the one before (NULL if none). */
FSDP_API fsdp_context *fsdp_context_set(fsdp_context *ctx);

FSDP_API int fsdp_rank(void);
FSDP_API int fsdp_world_size(void);

/* Compute threads of this rank's kernels, at least 1. */
FSDP_API int fsdp_threads(void);
FSDP_API fsdp_status fsdp_set_threads(int n);

/* Level 0 error, 1 warning, 2 info, 3 debug. line ends without a newline and
 * is valid during the call. Without a callback nothing is ever written. */
typedef void (*fsdp_log_fn)(void *arg, int level, const char *line);
FSDP_API void fsdp_log_set(fsdp_log_fn fn, void *arg, int max_level);

/* ---- accounts of memory ------------------------------------------------- */

/* Bytes as requested, exact, of one rank. peak_by is the split at the moment
 * of the total's peak. */
typedef struct fsdp_memory_stats {
    int64_t live[FSDP_PURPOSE_COUNT];    /* now */
    int64_t peak[FSDP_PURPOSE_COUNT];    /* each purpose's own maximum */
    int64_t peak_by[FSDP_PURPOSE_COUNT]; /* split when live_total peaked */
    int64_t live_total;
    int64_t peak_total;
    int64_t reserved;          /* cached, rounded or padded, not live */
    int64_t reserved_at_peak;  /* reserved when live_total peaked */
    int64_t limit;             /* memory.limit; 0: none */
    int64_t allocations;       /* count since the start */
    /* What lies in files (fsdp_offload_policy) is in none of the numbers above
     * and not under the limit. window: how much of it is in memory. */
    int64_t offloaded[FSDP_PURPOSE_COUNT]; /* now */
    int64_t offloaded_total, offloaded_peak;
    int64_t window, window_peak;
} fsdp_memory_stats;

FSDP_API void fsdp_memory_get(fsdp_memory_stats *out);
/* Peaks start again from the bytes that are live now. */
FSDP_API void fsdp_memory_reset_peak(void);
/* An allocation that would lift live_total over limit fails with
 * FSDP_NO_MEMORY and a table of purposes. 0: no limit. */
FSDP_API fsdp_status fsdp_memory_set_limit(int64_t limit);
/* The table of purposes as text, for people. The caller frees it with free.
 * NULL if out of memory. */
FSDP_API char *fsdp_memory_table(void);

FSDP_EXTERN_C_END
#endif
