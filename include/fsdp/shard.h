/*
 * shard.h - fully_shard: parameters, gradients and optimizer state cut over
 * the ranks, whole only while a unit computes.
 *
 * Call it on the blocks first and on the root last; each call makes one unit
 * of what earlier calls left over. Names follow PyTorch's FSDP2.
 */
#ifndef FSDP_SHARD_H
#define FSDP_SHARD_H

#include "dtensor.h"
#include "nn.h"

FSDP_EXTERN_C_BEGIN

/* FSDP_DTYPE_NONE: as it is. */
typedef struct fsdp_mixed_precision_policy {
    fsdp_dtype param_dtype;  /* of gathers, so of compute */
    fsdp_dtype reduce_dtype; /* of gradients on their way; NONE: param_dtype */
    fsdp_dtype output_dtype; /* floating outputs of forward */
    int cast_forward_inputs; /* floating inputs to param_dtype */
} fsdp_mixed_precision_policy;

/* After forward: free the gathered parameters (ALWAYS), keep them for backward
 * (NEVER), or AUTO: ALWAYS, but NEVER for the root. */
typedef enum fsdp_reshard_policy {
    FSDP_RESHARD_AUTO,
    FSDP_RESHARD_ALWAYS,
    FSDP_RESHARD_NEVER
} fsdp_reshard_policy;

/* Along which dim to cut a parameter (any dim, any size). */
typedef int (*fsdp_shard_placement_fn)(void *arg, const char *name,
                                       const fsdp_param *p);

/* The mesh of a parameter; NULL: the options'. Pure: it may be called more than
 * once, and answers alike on all ranks. */
typedef fsdp_mesh *(*fsdp_shard_mesh_fn)(void *arg, const char *name,
                                         const fsdp_param *p);

typedef struct fsdp_shard_options {
    fsdp_mesh *mesh; /* one axis: shard; two: replicate, then shard */
    fsdp_reshard_policy reshard_after_forward;
    /* FSDP2's integer reshard_after_forward, 0: none. k, a divisor of the
     * shards: after forward each rank keeps 1/k of the gathered parameters
     * instead of 1/shards, and backward gathers within groups of k consecutive
     * ranks. k = shards is ALWAYS; 1 is NEVER, with a warning. */
    int reshard_ranks;
    fsdp_mixed_precision_policy mp_policy;
    fsdp_shard_placement_fn placement_fn; /* NULL: dim 0 */
    void *placement_arg;
    /* NULL: all parameters on `mesh`. Those of another mesh are gathered,
     * reduced and freed apart, at the times of the module's others; their
     * gradients are divided by the ranks of their own mesh. For a parameter
     * that is cut over fewer ranks than others: (replicate, shard). */
    fsdp_shard_mesh_fn mesh_fn;
    void *mesh_arg;
    /* Units gathered ahead. n > 0: the next n in the order of the step before.
     * 0: as FSDP2 does by default, none in forward, and in backward the one
     * that ended its forward before. -1: none at all. */
    int prefetch_limit;
    /* Left alone: neither cut nor gathered nor reduced, also by later calls
     * that are given them. Read during the call only. */
    fsdp_param *const *ignored_params;
    int n_ignored;
    /* Each rank its own gathered copy, read straight from the peers' shards: a
     * shard may be written after backward, after a forward without gradients
     * and after fsdp_unshard, but not between forward and backward. */
    int private_gather;
    /* Where shards and their gradients lie (FSDP2: offload_policy). In a file:
     * shards are read ahead in the order of the step before, and gradients are
     * written back as soon as they are reduced. Gathered parameters and whole
     * gradients are in memory. The optimizer's state has its own policy. */
    fsdp_offload_policy offload;
} fsdp_shard_options;

/* mesh NULL: one axis over the world, made on the first call. Defaults: AUTO,
 * no mixed precision, inputs cast, dim 0, prefetch 1, no offload. */
FSDP_API fsdp_shard_options fsdp_shard_defaults(fsdp_mesh *mesh);

/* In place. o NULL: the defaults. Refused: a container without forward, a
 * second call on a module, 0-dim parameters, a dim that the parameter lacks, a
 * mesh of more than two axes, two meshes of the same ranks, the root before
 * its blocks, parameters that fsdp_to_empty gave memory or that an optimizer
 * holds already. A weight that another unit has already becomes a unit of its
 * own that both use: gathered while either runs, its gradients summed, reduced
 * once. FSDP_IO_ERROR: the folder of the offload policy is missing, not
 * writable or full. */
FSDP_API fsdp_status fsdp_fully_shard(fsdp_module *m,
                                      const fsdp_shard_options *o);
/* The same for n modules as one unit: gathered when the first of them is
 * entered, freed when the last has run, or else at the end of the root's
 * forward. Modules below others of the list are dropped. Such a unit cannot be
 * the root. Its name is its modules' names, joined by ", ". */
FSDP_API fsdp_status fsdp_fully_shard_list(fsdp_module *const *m, int n,
                                           const fsdp_shard_options *o);
FSDP_API int fsdp_is_sharded_module(const fsdp_module *m);

/* Gathers m's own unit now and waits; no-op if it is whole. */
FSDP_API fsdp_status fsdp_unshard(fsdp_module *m);
/* The same without waiting; fsdp_unshard_wait makes the parameters usable and
 * frees the handle (also on failure). Works before any forward and on modules
 * without parameters; a forward of m may come before the wait, and waits. */
typedef struct fsdp_unshard_handle fsdp_unshard_handle;
FSDP_API fsdp_status fsdp_unshard_async(fsdp_module *m,
                                        fsdp_unshard_handle **out);
FSDP_API fsdp_status fsdp_unshard_wait(fsdp_unshard_handle *h);
/* Frees the gathered parameters of m's own unit, whatever the policy. */
FSDP_API fsdp_status fsdp_reshard(fsdp_module *m);

/* off: backward reduces nothing; gradients stay whole and accumulate. Sets
 * whether replicas are reduced too (below), to the same. */
FSDP_API fsdp_status fsdp_set_requires_gradient_sync(fsdp_module *m, int on,
                                                     int recurse);
/* Hybrid sharding; off: backward reduces inside the shard group only, and the
 * sums, 1/S a rank and in fp32, accumulate; the next backward with it on takes
 * them over the replicas. The set of parameters may change between. Without
 * shards (S 1) gradients stay whole meanwhile; without replicas no effect. */
FSDP_API fsdp_status fsdp_set_requires_all_reduce(fsdp_module *m, int on,
                                                  int recurse);
/* Gradients are divided by f instead of by the number of ranks; 0: default. */
FSDP_API fsdp_status fsdp_set_gradient_divide_factor(fsdp_module *m, double f,
                                                     int recurse);
/* on: m's own unit divides outside of its collectives, which only sum
 * (fsdp_comm_count.scaled stays 0). */
FSDP_API fsdp_status fsdp_set_force_sum_reduction_for_comms(fsdp_module *m,
                                                            int on);
/* on: parameters that get no gradient on any rank get one of zeros. Off (the
 * default): they get none, and optimizers skip them. Ranks that disagree which
 * parameters got one need neither: absent on some is zeros there. */
FSDP_API fsdp_status fsdp_set_reduce_scatter_unused_params(fsdp_module *m,
                                                           int on, int recurse);
/* How many units may hold whole gradients that are being reduced, while later
 * ones compute; 1 at first. The largest of a tree counts. An error below 1. */
FSDP_API fsdp_status fsdp_set_reduce_scatter_max_input_buffers(fsdp_module *m,
                                                               int n,
                                                               int recurse);
/* on: the sum of a step's gradients is one tree over its microbatches, by
 * their global index, whoever computes them, so 1, 2, 4 or 8 ranks give the
 * same bits, flat or hybrid. For that: microbatches of one shape; rank r of N
 * computes microbatches r * p .. r * p + p - 1 of the step, p a power of two
 * (the last may have fewer, or masked ones); only the last backward of a step
 * is synced; the loss is scaled alike on all layouts, and not by the number
 * of ranks unless that is a power of two. Costs log2 of the microbatches whole
 * gradients instead of one. Refused: shards or replicas that are no power of
 * two, gradients below fp32; when it happens: a second reduction in a step. */
FSDP_API fsdp_status fsdp_set_reproducible(fsdp_module *m, int on);
FSDP_API fsdp_status fsdp_set_reshard_after_forward(fsdp_module *m, int on,
                                                    int recurse);
/* off: a unit stays whole after its backward, so the next microbatch need not
 * gather it. An update of the weights is seen nonetheless: it is stale then. */
FSDP_API fsdp_status fsdp_set_reshard_after_backward(fsdp_module *m, int on,
                                                     int recurse);
/* off: m's own unit is not gathered for backward, for modules whose backward
 * does not read their weights (an embedding). */
FSDP_API fsdp_status fsdp_set_unshard_in_backward(fsdp_module *m, int on);
/* While m runs (after its own gather), or its backward begins, these are
 * gathered ahead, in this order. Replaces the list of before; n 0: none, and
 * m's prefetch is the default again. With a list anywhere in a tree nothing is
 * gathered by the recorded order. An error if one is no sharded module. */
FSDP_API fsdp_status fsdp_set_modules_to_forward_prefetch(
    fsdp_module *m, fsdp_module *const *list, int n);
FSDP_API fsdp_status fsdp_set_modules_to_backward_prefetch(
    fsdp_module *m, fsdp_module *const *list, int n);
/* The gathers of the next forward of the root m wait for e, once: for an
 * optimizer's step that is still under way. e must live until then. NULL: they
 * wait for nothing. Below the root: an error before the first forward. */
FSDP_API fsdp_status fsdp_set_post_optim_event(fsdp_module *m, fsdp_event *e);
/* The roots of the list (pipeline stages, say) reduce as if they were one tree:
 * no more reductions are unfinished than in one, and their gathers, over one
 * mesh, are in the order of the program anyway. n 0: nothing. Makes each of
 * them a root now, so parameters must have memory. */
FSDP_API fsdp_status fsdp_share_comm_ctx(fsdp_module *const *list, int n);
/* off: more backwards follow, and what this one left unfinished may stay so. */
FSDP_API fsdp_status fsdp_set_is_last_backward(fsdp_module *m, int on);

/* Whole parameters for a scope, between iterations (summon_full_params of
 * FSDP-1): of m's unit, with recurse also of those below, as private copies in
 * the parameters' own dtype. Until the end modules see them; a forward under
 * no_grad computes with them and runs no collective, one with gradients is
 * refused. begin is collective over the ranks that shard m. */
typedef struct fsdp_summon_options {
    int recurse;        /* 1 */
    int writeback;      /* 1: what each rank wrote into its own rows is kept */
    int rank0_only;     /* 0; 1: the others keep shards; not with writeback */
    int offload_to_cpu; /* 0; 1: the copies count as `other`, not as unsharded:
                           on the CPU they are where they would go to */
} fsdp_summon_options;
FSDP_API fsdp_summon_options fsdp_summon_defaults(void);
typedef struct fsdp_summon fsdp_summon;
/* o NULL: the defaults. */
FSDP_API fsdp_status fsdp_summon_full_params_begin(fsdp_module *m,
                                                   const fsdp_summon_options *o,
                                                   fsdp_summon **out);
/* Ends the scope, also while an error is kept (nothing is written back then),
 * or when it returns one. NULL: nothing. */
FSDP_API fsdp_status fsdp_summon_full_params_end(fsdp_summon *s);

/* m's method (fsdp_module_add_method) gathers, casts, frees and reduces as its
 * forward does. Nothing where m is no sharded module; FSDP_NOT_FOUND where it
 * has no such method. */
FSDP_API fsdp_status fsdp_register_fsdp_forward_method(fsdp_module *m,
                                                       const char *name);
/* Values of world rank src for all: of buffers, of parameters that are not
 * sharded, and over replicas of sharded ones (a shard that stands on one rank
 * only is nobody else's). Collective over the world, between iterations. The
 * first forward compares buffers. FSDP-1: sync_module_states. */
FSDP_API fsdp_status fsdp_sync_module_states(fsdp_module *m, int src);

/* Whether ranks that hold the same shard hold the same bits: MISMATCH names the
 * first parameter that differs and the ranks whose values are not those of most
 * others. Reads each shard once and sends eight bytes; replicas of a trained
 * model never differ unless a sum was left out or memory failed. Collective. */
FSDP_API fsdp_status fsdp_check_replicas(fsdp_module *m);

/* Says that shards were written by hand: gathered copies are stale on all
 * ranks. Every rank must call it. Optimizers and loads do so themselves. */
FSDP_API fsdp_status fsdp_mark_changed(fsdp_module *m);

/* After an error on any rank: collective; clears the error, reshards every
 * unit, drops unfinished gradients. */
FSDP_API fsdp_status fsdp_reset_iteration(fsdp_module *m);

/* ---- what happened ------------------------------------------------------ */

/* X(enumerator, text) */
#define FSDP_EVENT_LIST(X)                                                     \
    X(FSDP_EVENT_UNSHARD, "unshard")                                           \
    X(FSDP_EVENT_RESHARD, "reshard")                                           \
    X(FSDP_EVENT_POST_BACKWARD, "post_backward")                               \
    X(FSDP_EVENT_REDUCE, "reduce")                                             \
    X(FSDP_EVENT_PREFETCH, "prefetch")                                         \
    X(FSDP_EVENT_ROOT_PRE_FORWARD, "root_pre_forward")                         \
    X(FSDP_EVENT_PRE_FORWARD, "pre_forward")                                   \
    X(FSDP_EVENT_POST_FORWARD, "post_forward")                                 \
    X(FSDP_EVENT_FORCE_COMPLETE, "force_complete_post_forward")                \
    X(FSDP_EVENT_PRE_BACKWARD, "pre_backward")                                 \
    X(FSDP_EVENT_ROOT_POST_BACKWARD, "root_post_backward")
typedef enum fsdp_event_kind {
#define FSDP__X(e, text) e,
    FSDP_EVENT_LIST(FSDP__X)
#undef FSDP__X
} fsdp_event_kind;
/* Called for each event of each unit below the root m. UNSHARD to PREFETCH are
 * real work only: an unshard of a whole unit is no event. What is gathered
 * ahead by the recorded order is told as PREFETCH, and as UNSHARD when it comes
 * to be used; what is gathered ahead by an explicit list or by FSDP2's default
 * (prefetch_limit 0) is told as UNSHARD at once. The others, and
 * POST_BACKWARD, are the lines of FSDP2's debug log, which go to the log
 * callback too (level 3): "FSDP::pre_forward (layers.0)". A unit without
 * parameters has only the events of a root. */
typedef void (*fsdp_event_fn)(void *arg, fsdp_event_kind k, const char *unit);
FSDP_API fsdp_status fsdp_set_event_hook(fsdp_module *m, fsdp_event_fn fn,
                                         void *arg);

FSDP_EXTERN_C_END
#endif
