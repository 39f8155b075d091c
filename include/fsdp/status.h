/*
 * status.h - results and errors.
 *
 * Functions that make an object return it, or NULL; everything else returns
 * fsdp_status and gives results through out-parameters. Either way the first
 * error is kept in the thread's context (context.h) until it is cleared:
 * while it is kept, whatever changes state refuses with that same error, and
 * an op given NULL returns NULL and leaves the first error in place. So an
 * expression is checked once, at its end.
 *
 * The library never prints an error, never exits and never aborts on one.
 */
#ifndef FSDP_STATUS_H
#define FSDP_STATUS_H

#ifdef __cplusplus
#define FSDP_EXTERN_C_BEGIN extern "C" {
#define FSDP_EXTERN_C_END }
#else
#define FSDP_EXTERN_C_BEGIN
#define FSDP_EXTERN_C_END
#endif

#if defined(__GNUC__)
#define FSDP_API __attribute__((visibility("default")))
#define FSDP_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define FSDP_API
#define FSDP_PRINTF(fmt, args)
#endif

FSDP_EXTERN_C_BEGIN

/* X(enumerator, short name, what it means): the one list of statuses. */
#define FSDP_STATUS_LIST(X)                                                    \
    X(FSDP_OK, "ok", "no error")                                               \
    X(FSDP_INVALID_ARGUMENT, "invalid argument", "a caller's mistake")         \
    X(FSDP_INVALID_SHAPE, "invalid shape", "sizes that do not go together")    \
    X(FSDP_INVALID_DTYPE, "invalid dtype", "dtypes that do not go together")   \
    X(FSDP_INVALID_STATE, "invalid state", "a call at the wrong time")         \
    X(FSDP_INVALID_CONFIG, "invalid configuration", "an option's value")       \
    X(FSDP_INVALID_DATA, "invalid data", "a file whose content is wrong")      \
    X(FSDP_UNSUPPORTED, "unsupported", "known, and not available here")        \
    X(FSDP_NOT_FOUND, "not found", "a missing file, key or name")              \
    X(FSDP_NO_MEMORY, "out of memory", "no memory, or over memory.limit")      \
    X(FSDP_IO_ERROR, "input/output error", "the system refused a file")        \
    X(FSDP_MISMATCH, "ranks disagree", "ranks called different things")        \
    X(FSDP_PEER_FAILED, "peer failed", "another rank reported an error")       \
    X(FSDP_PEER_DIED, "peer died", "another rank is gone")                     \
    X(FSDP_TIMEOUT, "timeout", "another rank did not come")                    \
    X(FSDP_INTERRUPTED, "interrupted", "asked to stop")                        \
    X(FSDP_NON_FINITE, "non-finite value", "a NaN or an infinity")             \
    X(FSDP_INTERNAL, "internal error", "a fault of the library itself")

typedef enum fsdp_status {
#define FSDP__X(e, name, text) e,
    FSDP_STATUS_LIST(FSDP__X)
#undef FSDP__X
} fsdp_status;

/* The short name of a status ("out of memory"). Never NULL. */
FSDP_API const char *fsdp_status_name(fsdp_status s);

/* The error kept in this thread's context, FSDP_OK if there is none. */
FSDP_API fsdp_status fsdp_error(void);

/* Its whole text: what was found, what was expected, where, and the fix.
 * "" if there is none. Owned by the context; valid until the error is
 * cleared or the context freed. */
FSDP_API const char *fsdp_error_text(void);

/* Forgets the kept error (this rank only; see fsdp_reset_iteration for the
 * collective form that also puts sharded modules back in order). */
FSDP_API void fsdp_error_clear(void);

FSDP_EXTERN_C_END
#endif
