/*
 * context.h - the inside of fsdp_context, for the rooms above.
 *
 * A room that hangs state off a context owns one slot: a pointer and the
 * function that frees it when the context goes. Slots are freed in reverse
 * order of their enumerators, so a room may rely on the rooms below it.
 */
#ifndef FSDP_BASE_CONTEXT_H
#define FSDP_BASE_CONTEXT_H

#include <stdbool.h>

#include "fsdp/context.h"

typedef enum fsdp__slot {
    FSDP__SLOT_TRACE,
    FSDP__SLOT_DEVICE,   /* heaps, current device, streams */
    FSDP__SLOT_TENSOR,   /* scopes */
    FSDP__SLOT_AUTOGRAD, /* grad mode, sequence numbers */
    FSDP__SLOT_NN,
    FSDP__SLOT_COMM,     /* world group */
    FSDP__SLOT_MESH,
    FSDP__SLOT_FSDP,
    FSDP__SLOT_COUNT
} fsdp__slot;

/* NULL until set. */
void *fsdp__slot_get(fsdp__slot slot);
void fsdp__slot_set(fsdp__slot slot, void *p, void (*free_fn)(void *));

/* Rank and world after the start (comm's init sets them from the launcher). */
void fsdp__context_set_rank(fsdp_context *ctx, int rank, int world_size);

/* ---- accounts: compute thread only ------------------------------------- */

/* Charges bytes to the current context. Over the limit, or when the test
 * switch says so: FSDP_NO_MEMORY with the table; nothing charged. */
fsdp_status fsdp__account_take(fsdp_purpose p, int64_t bytes, const char *what);
void fsdp__account_give(fsdp_purpose p, int64_t bytes);
void fsdp__account_move(fsdp_purpose from, fsdp_purpose to, int64_t bytes);
/* Reserved bytes change by delta (may be negative). */
void fsdp__account_reserve(int64_t delta);

/* The same for bytes that lie in a file: no limit holds for them. */
fsdp_status fsdp__account_offload_take(fsdp_purpose p, int64_t bytes, const char *what);
void fsdp__account_offload_give(fsdp_purpose p, int64_t bytes);
void fsdp__account_offload_move(fsdp_purpose from, fsdp_purpose to, int64_t bytes);
/* How much of a file is in memory changes by delta. */
void fsdp__account_window(int64_t delta);

/* Test switch: the n-th charged allocation from now fails (0: off). */
void fsdp__account_fail_nth(int64_t n);

/* ---- log ----------------------------------------------------------------- */
enum { FSDP__LOG_ERROR, FSDP__LOG_WARNING, FSDP__LOG_INFO, FSDP__LOG_DEBUG };
void fsdp__log(int level, const char *fmt, ...) FSDP_PRINTF(2, 3);
bool fsdp__log_enabled(int level);

#endif
