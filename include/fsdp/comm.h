/*
 * comm.h - process groups: asynchronous collectives over bytes.
 *
 * Work is queued in lanes. Inside a lane the order of calls is kept and must
 * be the same on every rank of the group; lanes are independent. A collective
 * returns a work handle; waiting for it is the only thing that blocks. No
 * wait lasts for ever: it ends with FSDP_PEER_FAILED (another rank posted an
 * error: its text), FSDP_PEER_DIED, FSDP_MISMATCH (ranks called different
 * things) or FSDP_TIMEOUT, naming the rank, the collective and its label.
 *
 * Backends: self (one rank), shm (ranks as processes of one host, or as
 * threads of one process). Sums over ranks accumulate in fp32 (fp64 for f64)
 * as one binary tree in rank order, whatever the dtype on the wire.
 */
#ifndef FSDP_COMM_H
#define FSDP_COMM_H

#include "context.h"
#include "dtype.h"

FSDP_EXTERN_C_BEGIN

typedef struct fsdp_group fsdp_group;
typedef struct fsdp_work fsdp_work;

/* X(enumerator, name) */
#define FSDP_LANE_LIST(X)                                                      \
    X(FSDP_LANE_GATHER, "gather")       /* parameters */                       \
    X(FSDP_LANE_REDUCE, "reduce")       /* gradients into shards */            \
    X(FSDP_LANE_REPLICATE, "replicate") /* gradients across replicas */        \
    X(FSDP_LANE_CONTROL, "control")     /* scalars, agreement, checkpoints */
typedef enum fsdp_lane {
#define FSDP__X(e, name) e,
    FSDP_LANE_LIST(FSDP__X)
#undef FSDP__X
        FSDP_LANE_COUNT
} fsdp_lane;

/* X(enumerator, name) */
#define FSDP_COLLECTIVE_LIST(X)                                                \
    X(FSDP_ALL_GATHER, "all_gather")                                           \
    X(FSDP_REDUCE_SCATTER, "reduce_scatter")                                   \
    X(FSDP_ALL_REDUCE, "all_reduce")                                           \
    X(FSDP_BROADCAST, "broadcast")                                             \
    X(FSDP_ALL_TO_ALL, "all_to_all")                                           \
    X(FSDP_SEND, "send")                                                       \
    X(FSDP_RECV, "recv")                                                       \
    X(FSDP_BARRIER, "barrier")
typedef enum fsdp_collective {
#define FSDP__X(e, name) e,
    FSDP_COLLECTIVE_LIST(FSDP__X)
#undef FSDP__X
        FSDP_COLLECTIVE_COUNT
} fsdp_collective;

typedef enum fsdp_reduce_op { FSDP_SUM, FSDP_MIN, FSDP_MAX } fsdp_reduce_op;

/* ---- start and end ------------------------------------------------------ */

/* Reads RANK, WORLD_SIZE, LOCAL_RANK as torchrun and `fsdp run` set them,
 * makes the current context that rank and joins the world group. Without them:
 * one rank. argc and argv may be NULL; they are not changed. Init after
 * finalize works. */
FSDP_API fsdp_status fsdp_init(int *argc, char ***argv);
/* Leaves the world group. Returns 0, or 1 if an error is kept. */
FSDP_API int fsdp_finalize(void);

/* Runs fn(arg) on n threads, each rank r of n with a context of its own, over
 * one world group. Returns the first failing rank's status (by rank order)
 * with its text kept in the caller's context. */
FSDP_API fsdp_status fsdp_run_threads(int n, fsdp_status (*fn)(void *arg),
                                      void *arg);

/* ---- groups ------------------------------------------------------------- */

/* The current context's world; a group of one before fsdp_init. Not owned. */
FSDP_API fsdp_group *fsdp_group_world(void);
/* Collective over parent: the group of parent's ranks[0..n-1] (ascending).
 * Every rank of parent calls it with the list that it is in; *out belongs to
 * the context and lives as long as it. A list of all of parent's ranks gives a
 * new group too: separate lanes and counters. Gathered copies are shared in
 * groups made from the world: others have no part of their memory, since
 * parents without a common rank would deal the same one. */
FSDP_API fsdp_status fsdp_group_create(fsdp_group *parent, const int *ranks,
                                       int n, const char *name,
                                       fsdp_group **out);
FSDP_API int fsdp_group_rank(const fsdp_group *g);
FSDP_API int fsdp_group_size(const fsdp_group *g);
FSDP_API const char *fsdp_group_name(const fsdp_group *g);
/* World rank of the group's rank r. */
FSDP_API int fsdp_group_world_rank(const fsdp_group *g, int r);
FSDP_API const char *fsdp_group_backend(const fsdp_group *g);
/* Seconds a wait may last; 0: the default of 300. Applies to later waits. */
FSDP_API void fsdp_group_set_timeout(fsdp_group *g, double seconds);

/* ---- memory ------------------------------------------------------------- */

/* A range of which every rank of the group (all on this host) sees the same
 * bytes: a gathered copy. All ranks take and give in the same program order;
 * a rank writes only its own part, through rw, and reads through ro. */
typedef struct fsdp_shared {
    const void *ro;
    void *rw;
    int64_t bytes;
    int64_t offset; /* in the segment, the same on all ranks */
    uint64_t clock; /* releases that must have happened before it is written */
} fsdp_shared;

FSDP_API fsdp_status fsdp_shared_take(fsdp_group *g, int64_t bytes,
                                      const char *what, fsdp_shared *out);
FSDP_API void fsdp_shared_give(fsdp_group *g, const fsdp_shared *s);

/* Memory of this rank that the group's peers may read: what a list collective
 * reads must lie in it. Charged to communication, its contents undefined. NULL:
 * error kept. To be given back before fsdp_finalize, with the same size. */
FSDP_API void *fsdp_comm_alloc(fsdp_group *g, int64_t bytes);
FSDP_API void fsdp_comm_free(fsdp_group *g, void *p, int64_t bytes);

/* ---- collectives on lists ----------------------------------------------- */

/*
 * One parameter: the whole tensor is (outer, dim, inner) in row-major order,
 * and rank r of N owns rows [r * chunk, min((r + 1) * chunk, dim)) of dim,
 * maybe none. shard is this rank's (outer, own rows, inner), contiguous.
 * Elements are converted between the two dtypes on the way.
 */
typedef struct fsdp_list_entry {
    int64_t outer, dim, inner, chunk;
    void *shard;
    fsdp_dtype shard_dtype;
    void *full;
    fsdp_dtype full_dtype;
    int present; /* reduce: in, this rank has a gradient; out, any rank had */
} fsdp_list_entry;

/* Every rank's shard into every full. With `shared`, all fulls lie inside
 * that range (pointers based on its rw): each rank writes its own rows once,
 * after every rank has released what lies beneath. Without, fulls are
 * private and shards must lie in memory of fsdp_comm_alloc. The entries are
 * copied; shards must not change until the work is done on all ranks
 * (which a wait on any later collective of the lane implies). */
FSDP_API fsdp_status fsdp_all_gather_list(fsdp_group *g, fsdp_lane lane,
                                          const char *label,
                                          const fsdp_list_entry *e, int n,
                                          const fsdp_shared *shared,
                                          fsdp_work **out);

/* shard (+)= scale * sum over ranks of full's own rows; add != 0 adds to what
 * is there. fulls lie in memory of fsdp_comm_alloc; a rank whose entry
 * is not present counts as zeros, and an entry that no rank has is left
 * untouched with present = 0 in e after the wait (e must stay valid).
 * fulls may be written again when the work's buffers are free
 * (fsdp_work_wait_buffers). */
FSDP_API fsdp_status fsdp_reduce_scatter_list(fsdp_group *g, fsdp_lane lane,
                                              const char *label,
                                              fsdp_list_entry *e, int n,
                                              float scale, int add,
                                              fsdp_work **out);

/* In place on full: full = scale * sum over ranks; shard is not used, chunk is
 * how the sum is dealt over the ranks. Presence as above. */
FSDP_API fsdp_status fsdp_all_reduce_list(fsdp_group *g, fsdp_lane lane,
                                          const char *label,
                                          fsdp_list_entry *e, int n,
                                          float scale, fsdp_work **out);

/* ---- plain collectives -------------------------------------------------- */

/* Any memory; small messages are staged, which is charged to communication.
 * work NULL: waits. Private buffers must stay valid until the wait. */
FSDP_API fsdp_status fsdp_all_reduce(fsdp_group *g, fsdp_lane lane, void *data,
                                     int64_t n, fsdp_dtype t,
                                     fsdp_reduce_op op, fsdp_work **work);
/* recv is (size, bytes). */
FSDP_API fsdp_status fsdp_all_gather(fsdp_group *g, fsdp_lane lane,
                                     const void *send, void *recv,
                                     int64_t bytes, fsdp_work **work);
/* send is (size, n), recv is n elements. */
FSDP_API fsdp_status fsdp_reduce_scatter(fsdp_group *g, fsdp_lane lane,
                                         const void *send, void *recv,
                                         int64_t n, fsdp_dtype t,
                                         fsdp_work **work);
FSDP_API fsdp_status fsdp_broadcast(fsdp_group *g, fsdp_lane lane, void *data,
                                    int64_t bytes, int root, fsdp_work **work);
/* send and recv are (size, bytes): block r goes to rank r. */
FSDP_API fsdp_status fsdp_all_to_all(fsdp_group *g, fsdp_lane lane,
                                     const void *send, void *recv,
                                     int64_t bytes, fsdp_work **work);
/* A pair's messages keep their order; tags do not exist. */
FSDP_API fsdp_status fsdp_send(fsdp_group *g, const void *data, int64_t bytes,
                               int to, fsdp_work **work);
FSDP_API fsdp_status fsdp_recv(fsdp_group *g, void *data, int64_t bytes,
                               int from, fsdp_work **work);
FSDP_API fsdp_status fsdp_barrier(fsdp_group *g, fsdp_lane lane);

/* ---- work --------------------------------------------------------------- */

/* Blocks until done; frees the handle, also on failure. NULL: FSDP_OK. */
FSDP_API fsdp_status fsdp_work_wait(fsdp_work *w);
/* 1 done, 0 not yet, -1 failed with the error kept. Makes progress. */
FSDP_API int fsdp_work_test(fsdp_work *w);
/* Reductions: blocks until every peer has read this rank's fulls. Does not
 * free the handle; to be called before the wait that does. */
FSDP_API fsdp_status fsdp_work_wait_buffers(fsdp_work *w);
/* Lets queued work of all lanes go on without blocking. */
FSDP_API fsdp_status fsdp_comm_progress(void);

/* Posts this rank's kept error to all peers, once. Called by the error hook;
 * peers' waits end with FSDP_PEER_FAILED and this text. */
FSDP_API void fsdp_comm_abort(fsdp_status code, const char *text);

/* ---- counters ----------------------------------------------------------- */

/* What one rank sent through one lane of one group by one collective:
 * elements as C01 counts them: those of the logical tensors that this rank
 * receives from others ((N-1)/N of a gather, the same of a reduce-scatter,
 * twice that for an all-reduce), bytes_copied on this host, bytes_wire across
 * hosts. Plain collectives of CONTROL are counted like the rest. */
typedef struct fsdp_comm_count {
    int64_t calls, elements, bytes_copied, bytes_wire;
    int64_t scaled; /* calls whose sum was multiplied by something but 1 */
} fsdp_comm_count;

FSDP_API fsdp_comm_count fsdp_comm_count_get(const fsdp_group *g, fsdp_lane l,
                                             fsdp_collective c);
/* Sum over all groups of the context. */
FSDP_API fsdp_comm_count fsdp_comm_count_total(fsdp_lane l, fsdp_collective c);
FSDP_API void fsdp_comm_count_reset(void);

FSDP_EXTERN_C_END
#endif
