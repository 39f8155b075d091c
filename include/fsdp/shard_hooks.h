/*
 * shard_hooks.h - what a user puts into a sharded module's communication:
 * collectives of its own, a hook on reduced gradients, and extensions that
 * say what travels in a gather. Names follow PyTorch's FSDP2.
 *
 * All of them are for units that fully_shard has made, may be set as long as
 * the unit is not whole, and hold until they are set anew; NULL takes them
 * away. They must be the same on all ranks. `arg` stays the caller's.
 */
#ifndef FSDP_SHARD_HOOKS_H
#define FSDP_SHARD_HOOKS_H

#include "shard.h"

FSDP_EXTERN_C_BEGIN

/* ---- collectives of the user's ------------------------------------------ */

/* Makes a buffer of n elements, one dim, owned by the innermost scope; NULL:
 * error kept. The library keeps it until the collective is over. */
typedef fsdp_tensor *(*fsdp_comm_allocate_fn)(void *arg, int64_t n,
                                              fsdp_dtype t);

/* input (n) of this rank to output (size of g, n), rank by rank. *work: what
 * is still to be waited for; leave it NULL when all is done. */
typedef struct fsdp_custom_all_gather {
    fsdp_comm_allocate_fn allocate; /* NULL: the library's */
    fsdp_status (*call)(void *arg, fsdp_tensor *output, fsdp_tensor *input,
                        fsdp_group *g, fsdp_work **work);
    void *arg;
} fsdp_custom_all_gather;

/* output (n) = sum over ranks of row `own rank` of input (size of g, n). A
 * plain sum: divisions are done before and after it. */
typedef struct fsdp_custom_reduce_scatter {
    fsdp_comm_allocate_fn allocate;
    fsdp_status (*call)(void *arg, fsdp_tensor *output, fsdp_tensor *input,
                        fsdp_group *g, fsdp_work **work);
    void *arg;
} fsdp_custom_reduce_scatter;

/* These two and the hook below are errors for a unit whose parameters are on
 * several meshes (mesh_fn): which is meant would not be said. */

/* m's own unit gathers by c. Its parameters travel as one flat array, padded
 * to equal parts, in the dtype of compute (as FSDP_U8 bytes where parameters
 * differ in it, or an extension made something else of them). Its gathered
 * copies are private. Not called with one shard. Gathers among parts after an
 * integer reshard go by c too. */
FSDP_API fsdp_status fsdp_set_custom_all_gather(
    fsdp_module *m, const fsdp_custom_all_gather *c);
/* m's own unit reduces inside the shard group by c, in the reduce dtype, which
 * all its gradients must have. Not called with one shard. */
FSDP_API fsdp_status fsdp_set_custom_reduce_scatter(
    fsdp_module *m, const fsdp_custom_reduce_scatter *c);
/* FSDP2 has a switch between two kinds of memory for buffers of collectives.
 * Here they always are the group's (fsdp_comm_alloc), so on asks for what is
 * so anyway; it is refused while a collective of the user's is set, which
 * allocates by itself. Setting one afterwards is allowed. */
FSDP_API fsdp_status fsdp_set_allocate_memory_from_process_group_for_comm(
    fsdp_module *m, int on);
/* FSDP2 can reduce on a group of its own, so that reductions do not queue
 * behind gathers. Lanes are that here: they never do. Validates m only. */
FSDP_API fsdp_status fsdp_set_separate_reduce_scatter_group(fsdp_module *m,
                                                            int on,
                                                            int recurse);

/* ---- a hook on reduced gradients ---------------------------------------- */

/* sums: this rank's rows of the unit's gradients, one dim, fp32 (fp64 for
 * f64), each parameter's at a multiple of 16 elements, what lies between
 * undefined. May change them in place, but not before other ranks do alike. */
typedef fsdp_status (*fsdp_all_reduce_hook)(void *arg, fsdp_tensor *sums);

/* Runs after the sum inside the shard group, or, of a hybrid, after that over
 * the replicas; before what the divide rule leaves for the end, and before
 * gradients are cast and added to the shards'. Not while the all-reduce of a
 * hybrid is off. stream: the hook runs there, and this rank's later units
 * compute meanwhile; it must live until another hook, or none, is set; NULL: on
 * the calling thread. Refused: a stream without a hook, or with a mesh that has
 * replicas of its own. */
FSDP_API fsdp_status fsdp_set_all_reduce_hook(fsdp_module *m,
                                              fsdp_all_reduce_hook hook,
                                              void *arg, fsdp_stream *stream);

/* ---- extensions: what travels in a gather ------------------------------- */

#define FSDP_GATHER_MAX 4

typedef struct fsdp_gather_info {
    const char *name;     /* of the parameter */
    fsdp_module *module;  /* the unit's, the first of a list */
    fsdp_mesh *mesh;      /* one axis: the shards, also of a hybrid */
    int ndim, dim;        /* of the whole; the dim that is cut */
    const int64_t *sizes; /* (ndim), of the whole */
    const fsdp_mixed_precision_policy *mp_policy;
    fsdp_dtype compute; /* of the gathered parameter */
    void *meta;         /* pre's word to post; NULL before pre */
} fsdp_gather_info;

/*
 * pre: shard (rows, ...) is this rank's part with the cut dim first, maybe of
 * no rows. It gives out 1 to FSDP_GATHER_MAX tensors (rows, ...), row k of
 * each made from row k of the shard; the sizes of a row and the dtype must be
 * the same on all ranks. Nothing is to be padded: uneven parts are gathered
 * as they are.
 * post: gathered holds all rows of each, in order; out is the parameter in
 * the dtype of compute, cut dim first, to be filled whole. Called at every
 * gather, on all ranks alike, with gradients off; what they make belongs to
 * the innermost scope. One shard: called too, so that numbers do not depend
 * on the number of ranks.
 */
typedef struct fsdp_gather_extension {
    fsdp_status (*pre)(void *arg, fsdp_gather_info *i, fsdp_tensor *shard,
                       fsdp_values *out);
    fsdp_status (*post)(void *arg, fsdp_gather_info *i,
                        const fsdp_values *gathered, fsdp_tensor *out);
    void *arg;
} fsdp_gather_extension;

/* For the parameters of m's units, and of those below, whose name matches the
 * pattern (*, ?, [abc], a|b; names as from the root). e is copied; NULL: none.
 * An error if no parameter matches, or only one of pre and post is set. Also
 * before the first forward and after fsdp_to_empty. An integer reshard keeps
 * parts of what post filled, which are gathered without extensions. */
FSDP_API fsdp_status fsdp_set_all_gather_extension(
    fsdp_module *m, const char *pattern, const fsdp_gather_extension *e);

/* Gathers travel as int8 with one fp32 scale a row (the largest magnitude of
 * the row / 127): parameters of 2 or more dims that are f32, bf16 or f16, of
 * m's unit and, if asked, of those below. Others travel as they are. Forward
 * and backward compute with the same rounded weights, gradients are those at
 * them, and the shards keep full precision. */
FSDP_API fsdp_status fsdp_set_int8_gather(fsdp_module *m, int on, int recurse);

FSDP_EXTERN_C_END
#endif
