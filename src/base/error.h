/*
 * error.h - keeping the first error of a context.
 *
 * A message says what was found, what was expected, where, and the fix:
 *
 *     return fsdp__fail(FSDP_INVALID_SHAPE,
 *                       "linear: x has %d features, weight (%s) expects %d", ...);
 *
 * The first error wins: later calls while one is kept change nothing and
 * return the kept status. fsdp__error_place puts the place in front of a
 * message that a lower room made ("model.safetensors: ...").
 */
#ifndef FSDP_BASE_ERROR_H
#define FSDP_BASE_ERROR_H

#include <stdbool.h>
#include <stddef.h>

#include "fsdp/status.h"

fsdp_status fsdp__fail(fsdp_status code, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* Prefixes the kept error's text by "place: ". Nothing if none is kept. */
fsdp_status fsdp__error_place(const char *fmt, ...) FSDP_PRINTF(1, 2);

/* A call that was given NULL for something it needs: FSDP_INVALID_ARGUMENT. While an error is kept
 * the NULL is taken for its consequence, and nothing is added. */
fsdp_status fsdp__fail_null(const char *function, const char *what);

/* FSDP_NO_MEMORY with the size and what asked. */
fsdp_status fsdp__fail_memory(const char *what, size_t bytes);

/* errno's text added: "cannot open x: Permission denied". */
fsdp_status fsdp__fail_errno(fsdp_status code, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* A stop that is no mistake: while it is kept, ops and calls refuse as after an error, so a forward
 * unwinds; peers are not told and nothing is reported. Nothing if an error is kept. */
void fsdp__error_stop(void);
/* Whether it was a stop that is kept; it is forgotten. */
bool fsdp__error_stop_end(void);

/* Called with the kept error the moment it is first kept; comm sets it to
 * post an abort to the rank's peers. */
typedef void (*fsdp__error_hook)(void *arg, fsdp_status code, const char *text);
void fsdp__error_set_hook(fsdp__error_hook fn, void *arg);

/* Returns from the calling function when e is not FSDP_OK. */
#define FSDP_TRY(e)                                                                                \
    do {                                                                                           \
        fsdp_status fsdp__s = (e);                                                                 \
        if (fsdp__s != FSDP_OK) return fsdp__s;                                                    \
    } while (0)

/* The same, to the label `done` with the status in `s` (declared before). */
#define FSDP_GO(e)                                                                                 \
    do {                                                                                           \
        s = (e);                                                                                   \
        if (s != FSDP_OK) goto done;                                                               \
    } while (0)

#endif
