/*
 * device.h - where tensors live and in which order work runs.
 *
 * FSDP_META tensors have shape and dtype and no bytes. A stream is a queue of
 * work that runs in order; an event marks a point in one. On the CPU compute
 * runs on the calling thread, so its stream is always empty, and what is
 * queued elsewhere is polled (comm.progress).
 */
#ifndef FSDP_DEVICE_H
#define FSDP_DEVICE_H

#include "context.h"

FSDP_EXTERN_C_BEGIN

typedef enum fsdp_device { FSDP_CPU, FSDP_META } fsdp_device;

FSDP_API const char *fsdp_device_name(fsdp_device d);

/* Makes d the device of new tensors until the matching pop. Nests. */
FSDP_API fsdp_status fsdp_device_push(fsdp_device d);
FSDP_API fsdp_status fsdp_device_pop(void);
FSDP_API fsdp_device fsdp_device_current(void); /* FSDP_CPU at first */

/* ---- offload: parameters, gradients, optimizer state elsewhere ---------- */

/* CPU: in the host's memory, for a device that has its own; where the device
 * is the CPU that is the same memory, which is said in the log (level info).
 * FILE: in a file of the given folder, mapped into memory, of which only a
 * window is in memory at a time (an NVMe disk; not a RAM disk, which is said
 * as a warning). The numbers are the same in all three. */
typedef enum fsdp_offload_kind {
    FSDP_OFFLOAD_NONE,
    FSDP_OFFLOAD_CPU,
    FSDP_OFFLOAD_FILE
} fsdp_offload_kind;

/* The file has no name: nothing is left behind by a kill. Its bytes are asked
 * of the disk before they are used, so a full disk is an error of the call
 * that makes the shards or the optimizer. window: bytes of the file that stay
 * in memory, per rank and folder; 0: 256 MiB. What is used at one time may be
 * more. All who name one folder share its file and its largest window. */
typedef struct fsdp_offload_policy {
    fsdp_offload_kind kind;
    int pin_memory;     /* CPU: page-locked, for copies that overlap */
    const char *folder; /* FILE; copied */
    int64_t window;     /* FILE */
} fsdp_offload_policy;

/* What went to and from the files of this rank since the start, how long the
 * compute thread waited for it, in seconds, and the most bytes that lay in
 * files and, of these, in memory. */
typedef struct fsdp_offload_stats {
    int64_t read_bytes, written_bytes;
    double read_wait, write_wait;
    int64_t most_in_files, most_in_memory;
} fsdp_offload_stats;
FSDP_API void fsdp_offload_get(fsdp_offload_stats *out);

/* Gives pages of freed memory back to the system: reserved bytes of this rank
 * become few, and the next use of them faults anew. For the end of a phase with
 * another need than the next one's, as torch.cuda.empty_cache. */
FSDP_API void fsdp_memory_trim(void);

/* ---- streams ------------------------------------------------------------ */

typedef struct fsdp_stream fsdp_stream;
typedef struct fsdp_event fsdp_event;

/* A work item: called again and again until it returns 1 (done) or -1 (failed,
 * error kept). It never blocks. */
typedef int (*fsdp_stream_fn)(void *arg);

FSDP_API fsdp_stream *fsdp_stream_create(const char *name);
FSDP_API void fsdp_stream_free(fsdp_stream *s); /* runs what is queued first */
/* Queues fn(arg) behind what is there; tries to run at once. */
FSDP_API fsdp_status fsdp_stream_submit(fsdp_stream *s, fsdp_stream_fn fn,
                                        void *arg);
/* Runs what can run without blocking. *idle (may be NULL): queue is empty. */
FSDP_API fsdp_status fsdp_stream_poll(fsdp_stream *s, int *idle);
/* Blocks the caller until the queue is empty. */
FSDP_API fsdp_status fsdp_stream_sync(fsdp_stream *s);

FSDP_API fsdp_event *fsdp_event_create(void);
FSDP_API void fsdp_event_free(fsdp_event *e);
/* Marks the present end of s (NULL: the compute stream, so already reached). */
FSDP_API fsdp_status fsdp_event_record(fsdp_event *e, fsdp_stream *s);
/* 1 reached or never recorded, 0 not yet, -1 error kept. */
FSDP_API int fsdp_event_query(fsdp_event *e);
/* What is queued on s from now on runs after e; s NULL blocks the caller. */
FSDP_API fsdp_status fsdp_event_wait(fsdp_event *e, fsdp_stream *s);

FSDP_EXTERN_C_END
#endif
