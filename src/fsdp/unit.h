/*
 * unit.h - units and the tree that they form.
 */
#ifndef FSDP_FSDP_UNIT_H
#define FSDP_FSDP_UNIT_H

#include <stdbool.h>

#include "autograd/node.h"
#include "base/memory.h"
#include "comm/comm.h"
#include "dtensor/dtensor.h"
#include "fsdp/shard_hooks.h"
#include "nn/module.h"

typedef struct fsdp__unit fsdp__unit;
typedef struct fsdp__tree fsdp__tree;

enum { FSDP__LEVELS = 24 }; /* so many times may the microbatches of a step double */

/* One parameter of a unit. */
typedef struct fsdp__fparam {
    fsdp_param *param; /* own reference */
    fsdp__unit *unit;
    fsdp_tensor *sharded;   /* this rank's part: a DTensor; own reference */
    fsdp_tensor *whole;     /* gathered: one tensor and storage for life; own reference */
    fsdp_tensor *grad;      /* whole gradient in the reduce dtype: filled by the first backward */
    fsdp__cut cut;          /* over the shard group */
    fsdp_module *holder;    /* where it stands first, */
    int64_t holder_at;      /* and at which number */
    fsdp_tensor *part;      /* what is kept of `whole` after forward (part.c), or NULL */
    fsdp__cut part_cut;     /* over the part group */
    struct fsdp__extension *ext; /* own; NULL: the shard itself travels (extension.c) */
    int64_t slot_at;        /* bytes, in a slot that it is copied out of */
    uint32_t version;       /* of the shard that `whole` was filled from */
    bool got_grad;          /* grad holds something since the last reduction */
    int64_t sum_at;         /* elements, in the unit's sums */
    bool has_sum, summed;   /* it has a place in the unit's sums; and they hold something there */
    bool fresh_shard_grad;  /* the shard's gradient was made for the running reduction */
    fsdp_tensor *level[FSDP__LEVELS]; /* sums of 2^l microbatches (reproducible.c); own references */
    fsdp__storage *shown;   /* copy of a shard in a file, for peers to read; own reference */
    bool grad_held;         /* the shard's gradient lies in a file and is being written */
} fsdp__fparam;

/* Where a unit's reduction is (reduce.c). */
typedef enum fsdp__reduce_stage {
    FSDP__REDUCE_NONE,
    FSDP__REDUCE_SCATTER, /* inside the shard group; peers read the whole gradients */
    FSDP__REDUCE_REPLICAS /* across replicas */
} fsdp__reduce_stage;

typedef enum fsdp__unit_state {
    FSDP__SHARDED,
    FSDP__GATHERING,
    FSDP__WHOLE,
    FSDP__PART
} fsdp__unit_state;

/* One pass through a unit's modules, from the first entered to the last finished: what backward
 * waits for before it calls the unit's gradients complete. Shared by the pass's input nodes. */
typedef struct fsdp__use {
    fsdp__life *unit; /* own reference: the graph may outlive it */
    int refs;
    int nodes, done;   /* input nodes; those that ran in the backward `backward` */
    bool at_end;       /* a module had no input that needs a gradient: only the end tells */
    uint64_t backward; /* the tree's number of a backward */
} fsdp__use;

struct fsdp__unit {
    char *name; /* dotted; "" for the root; paths of a list joined by ", " */
    int refs;   /* one a module; of a tied weight's: one a user */
    fsdp__life *life; /* what graphs hold */
    fsdp_module *module; /* the first; NULL: a tied weight's unit (tied.c), or one with a host */
    fsdp_module **modules;
    int n_modules, n_seen; /* n_seen: while the tree is put together */
    bool *ran;      /* (n_modules), in the open pass */
    bool open;      /* a pass is on */
    bool summoned;  /* whole copies stand on the modules (summon.c) */
    fsdp__use *use; /* of the open pass; own reference */
    fsdp__tree *tree; /* NULL until the root's first forward */
    fsdp__unit **tied, **users; /* units of weights that this one shares; of a tied weight: of whom */
    fsdp__unit *host; /* it holds the host's parameters of another mesh (meshes.c): stands among the
                         host's tied ones and has that one user; NULL: not */
    int n_tied, n_users;
    int64_t uses; /* tied: passes forward whose backward has not come */
    fsdp_param *joining; /* tied: what it will take over when it is committed */
    fsdp_shard_options opt;
    fsdp_group *shard, *replicate; /* replicate NULL: one replica */
    int S, R;
    fsdp__fparam *params;
    int n_params;
    fsdp__unit_state state;
    fsdp_shared slot;
    bool has_slot;
    fsdp_group *slot_group;
    fsdp_mesh *part_mesh; /* (S / k, k): after forward 1/k is kept; NULL: not */
    fsdp_group *part_group;
    bool parted; /* the parts exist */
    int64_t staged; /* bytes of a slot that is copied out of; charged to communication */
    struct fsdp__custom *custom; /* own; NULL: no collective of the user's (custom_comm.c) */
    fsdp_all_reduce_hook hook;
    void *hook_arg;
    fsdp_stream *hook_stream; /* not owned */
    fsdp_work *gather;
    fsdp_list_entry *gather_entries, *reduce_entries; /* (n_params) each, or more to gather */
    int64_t gather_cap;
    int n_reduce;
    int *reduce_params; /* which parameter an entry of the reduction is */
    fsdp_work *reduce;
    fsdp__reduce_stage stage;
    fsdp__unit *reduce_next; /* in the tree's queue of unfinished reductions */
    fsdp_tensor *sums;       /* this rank's rows, summed in the shard group (replicas.c) */
    bool sums_due;           /* they wait for a backward that goes over the replicas */
    bool across;             /* the running reduction does */
    bool prefetched;    /* gathered ahead and not used yet */
    bool told;          /* its gather ahead was told as an unshard already */
    bool keep;          /* not freed after forward */
    bool reshard_backward; /* freed after backward */
    bool unshard_backward; /* gathered for backward */
    bool sync;          /* requires_gradient_sync */
    bool all_reduce;    /* requires_all_reduce */
    double divide;      /* 0: number of ranks */
    bool reproducible;  /* microbatches and ranks are summed as one tree */
    int64_t leaves;     /* microbatches since the last reduction */
    bool force_sum;     /* no division inside a collective */
    bool reduce_unused; /* parameters without a gradient are reduced as zeros */
    int max_reductions; /* unfinished ones whose whole gradients are held; the tree's largest counts */
    bool pre_backward;  /* an output hook fired in this backward */
    bool post_backward; /* done in this backward */
    int index;          /* in the tree's pre-order */
    fsdp__life **lists[2]; /* explicit prefetch: forward, backward; empty: by the rules of order.c */
    int n_lists[2];
    int64_t *posts; /* its places in the tree's order of finished forwards, the latest last */
    int64_t n_posts, cap_posts;
    fsdp__allocator *file; /* shards and their gradients lie there; NULL: in memory */
    int64_t promised;      /* bytes that were asked of the file */
    bool shards_held;      /* in memory, while they are read */
};

/* Which units were gathered, in order, in a forward (and backward). */
typedef struct fsdp__order {
    int *items;
    int64_t count, cap;
    int64_t at;     /* next expected */
    bool known;     /* recorded whole: prefetch by it */
    bool recording;
} fsdp__order;

/* Unfinished reductions, the oldest first. */
typedef struct fsdp__queue {
    fsdp__unit *first;
    int refs;
} fsdp__queue;

/* A buffer below the root. */
typedef struct fsdp__fbuffer {
    fsdp_module *module;
    int64_t at;
    char *name; /* dotted */
} fsdp__fbuffer;

/* Directions of explicit prefetch lists. */
enum { FSDP__FORWARD, FSDP__BACKWARD };

struct fsdp__tree {
    fsdp_module *root;
    fsdp__unit **units; /* pre-order; units[0] may be a non-root when the root has no unit */
    int n_units;
    fsdp__order train, eval;
    fsdp__order *order; /* in force */
    fsdp__unit *forward_root; /* first unit entered; NULL outside a forward */
    fsdp__queue *queue;       /* shared with other trees by fsdp_share_comm_ctx */
    fsdp__fbuffer *buffers;
    int64_t n_buffers, cap_buffers;
    int ahead;                /* units prefetched and not used yet */
    bool explicit_lists;      /* some unit has an explicit list: nothing is gathered by the record */
    int *post;                /* units in the order in which their forwards ended (2.4 of FSDP2) */
    int64_t n_post, cap_post;
    uint64_t backward; /* number of the running or next backward */
    fsdp_event *optim_event; /* the next root forward's gathers wait for it; not owned */
    bool callback_queued, last_backward;
    fsdp_event_fn event;
    void *event_arg;
};

/* ---- unit.c: states ------------------------------------------------------------- */
fsdp_status fsdp__unit_unshard(fsdp__unit *u, bool ahead);
fsdp_status fsdp__unit_wait(fsdp__unit *u);
fsdp_status fsdp__unit_reshard(fsdp__unit *u);
/* After forward: keeps 1/k where that was asked for, and so do those with it as their host. */
fsdp_status fsdp__unit_reshard_to_parts(fsdp__unit *u);
/* Nothing of it is whole or on its way to be. */
static inline bool fsdp__unit_resting(const fsdp__unit *u)
{
    return u->state == FSDP__SHARDED || u->state == FSDP__PART;
}
/* Storages say whose they are in messages: by the parameters' present names. */
void fsdp__unit_name_storages(fsdp__unit *u);
/* The shards changed since u was gathered. */
bool fsdp__unit_stale(const fsdp__unit *u);
/* Its backward is over: frees it, if nobody needs it still. */
fsdp_status fsdp__unit_after_backward(fsdp__unit *u);
/* With its defaults, and room for n modules; refs n. NULL: error kept. */
fsdp__unit *fsdp__unit_new(const fsdp_shard_options *o, int n);
/* A prefetch list. */
void fsdp__lives_free(fsdp__life **list, int n);
/* Drops one reference; NULL: nothing. */
void fsdp__unit_free(void *u);
void fsdp__event(fsdp__unit *u, fsdp_event_kind k);

/* ---- gather.c: how it becomes whole ------------------------------------------------ */
fsdp_status fsdp__gather_check(fsdp__unit *u);
fsdp_status fsdp__gather_begin(fsdp__unit *u);
fsdp_status fsdp__gather_end(fsdp__unit *u);
/* Empties the whole storages and gives the slot back. */
void fsdp__gather_drop(fsdp__unit *u);

/* ---- extension.c: what travels in a gather ------------------------------------------- */
typedef struct fsdp__extension {
    fsdp_gather_extension fn;
    fsdp_gather_info info;
    int n;
    fsdp_tensor *wire[FSDP_GATHER_MAX]; /* of this rank; own references, while a gather runs */
    fsdp_tensor *got[FSDP_GATHER_MAX];  /* of all ranks; the same */
    int64_t at[FSDP_GATHER_MAX];        /* in the slot */
} fsdp__extension;
fsdp_status fsdp__extension_pre(fsdp__unit *u, fsdp__fparam *p);
/* Fills the whole, whose storage is filled here; drops wire and got. */
fsdp_status fsdp__extension_post(fsdp__unit *u, fsdp__fparam *p);
void fsdp__extension_drop(fsdp__extension *x);
/* For each parameter below m that matches and is fit; *n: how many. */
fsdp_status fsdp__extension_set(fsdp_module *m, int recurse, const char *pattern,
                                bool (*fit)(const fsdp__fparam *p), const fsdp_gather_extension *e,
                                const char *what, int *n);

/* ---- custom_comm.c: collectives of the user's ------------------------------------------ */
/* s of a function of the user's; an error is kept, with these words if it said nothing. */
fsdp_status fsdp__users_status(fsdp_status s, const char *what, const char *name);
bool fsdp__custom_gathers(const fsdp__unit *u);
fsdp_status fsdp__custom_gather_begin(fsdp__unit *u, fsdp_group *g, int n);
fsdp_status fsdp__custom_gather_end(fsdp__unit *u);
bool fsdp__custom_reduces(const fsdp__unit *u);
fsdp_status fsdp__custom_reduce_begin(fsdp__unit *u);
fsdp_status fsdp__custom_reduce_end(fsdp__unit *u);
void fsdp__custom_drop(fsdp__unit *u); /* what runs */
void fsdp__custom_free(fsdp__unit *u);
/* The all-reduce hook on u's sums: begins on its stream, or is done at once; and its end. */
fsdp_status fsdp__hook_begin(fsdp__unit *u);
fsdp_status fsdp__hook_end(fsdp__unit *u);

/* ---- part.c: 1/k of the whole, between forward and backward ------------------------ */
/* reshard_ranks of the options: checks it, makes the mesh. Collective over the world. */
fsdp_status fsdp__parts_prepare(fsdp__unit *u);
fsdp_status fsdp__parts_take(fsdp__unit *u);
void fsdp__parts_drop(fsdp__unit *u);

/* ---- reduce.c: gradients ---------------------------------------------------------- */
/* Where backward puts the whole gradient of a parameter (a leaf's provide). */
fsdp_tensor *fsdp__grad_place(void *fparam, int *add);
fsdp_status fsdp__unit_post_backward(fsdp__unit *u);
fsdp_status fsdp__tree_finish_reduce(fsdp__tree *t);
/* The shard's gradient, made if there is none; NULL: error kept. */
fsdp_tensor *fsdp__shard_grad(fsdp__fparam *p);
/* Gives up whatever reduction is under way, and all gradients that are not the shards' yet. */
void fsdp__unit_drop_grads(fsdp__unit *u);

/* A new empty place for p's whole gradient; the old one stays whose it is. */
fsdp_status fsdp__grad_renew(fsdp__fparam *p);

/* ---- reproducible.c: microbatches as leaves of the ranks' tree ---------------------- */
/* A backward without a reduction is over. */
fsdp_status fsdp__leaf_end(fsdp__unit *u);
/* Before a reduction: all leaves into the whole gradients. */
fsdp_status fsdp__leaves_sum(fsdp__unit *u);
void fsdp__leaves_drop(fsdp__unit *u);

/* ---- replicas.c: sums on their way over the replicas ------------------------------- */
/* Whether u's reductions pass through sums of their own instead of the shards' gradients. */
bool fsdp__unit_uses_sums(const fsdp__unit *u);
/* Makes sure that every parameter of the running list has a place in them. */
fsdp_status fsdp__sums_make(fsdp__unit *u);
void *fsdp__sums_at(const fsdp__unit *u, const fsdp__fparam *p);
/* Issues their all-reduce; *work NULL: there is only one replica. */
fsdp_status fsdp__sums_begin(fsdp__unit *u, fsdp_work **work);
/* They are complete: into the shards' gradients. */
fsdp_status fsdp__sums_settle(fsdp__unit *u);
void fsdp__sums_drop(fsdp__unit *u);

/* ---- divide.c: by what gradients are divided, and when ------------------------------ */
typedef struct fsdp__division {
    double before, after; /* 1: not */
    double inside;        /* in the sum itself */
} fsdp__division;
/* ranks: of shards times replicas; factor 0: ranks. */
fsdp__division fsdp__divide_rule(fsdp_dtype reduce, int ranks, double factor, bool force_sum);
fsdp__division fsdp__unit_division(const fsdp__unit *u);

/* ---- order.c: what comes next -------------------------------------------------------- */
void fsdp__order_begin(fsdp__tree *t, bool train);
/* u is needed now and is not whole: notes it. */
fsdp_status fsdp__order_need(fsdp__tree *t, fsdp__unit *u);
/* Gathers ahead what comes next: u's explicit list, or up to its limit. */
fsdp_status fsdp__order_prefetch(fsdp__tree *t, fsdp__unit *u, int direction);
/* u's forward, of which a backward may come, has ended. */
fsdp_status fsdp__order_post(fsdp__tree *t, fsdp__unit *u);
void fsdp__order_forget_posts(fsdp__tree *t);
fsdp_status fsdp__order_end(fsdp__tree *t);
/* Private copies are read straight from the peers' shards: returns when no rank of the group reads
 * this rank's any more, so that it may be written. */
fsdp_status fsdp__unit_let_go(fsdp__unit *u);
void fsdp__order_free(fsdp__order *o);

/* ---- tied.c: weights that several units share ---------------------------------------- */
/* u, which is being made, holds (in `holder`) the parameter p of another unit too: from the commit
 * on, which is the last step of making u, they share a unit of p. */
fsdp_status fsdp__tied_prepare(fsdp__unit *u, fsdp_param *p, const fsdp_module *holder);
void fsdp__tied_commit(fsdp__unit *u);
/* None of t's users is whole any more: t is freed; to parts: a unit with a host may keep 1/k. */
fsdp_status fsdp__tied_release(fsdp__unit *t, bool to_parts);
void fsdp__tied_forward(fsdp__unit *u);      /* a pass of u, whose backward may come, has ended */
void fsdp__tied_pre_backward(fsdp__unit *u); /* a backward of u begins */
fsdp_status fsdp__tied_post_backward(fsdp__unit *u); /* and has ended */
fsdp_status fsdp__tied_reduce(fsdp__unit *t);
void fsdp__tied_leave(fsdp__unit *u); /* u is freed */

/* ---- meshes.c: parameters of one module on several meshes ------------------------------- */
/* The mesh of p as a parameter of u's; NULL: error kept. */
fsdp_mesh *fsdp__unit_mesh_of(const fsdp__unit *u, const fsdp_param *p);
/* u's groups, by its mesh. */
void fsdp__unit_use_groups(fsdp__unit *u);
/* Parts u's parameters, which are not cut yet, by mesh: those of others than u's own go to units
 * with u as their host. */
fsdp_status fsdp__unit_part_by_mesh(fsdp__unit *u);
/* An error where there are such units: `what` would not say which it means. */
fsdp_status fsdp__unit_one_mesh(const fsdp__unit *u, const char *what);
/* "replicate 2 x shard 2" */
void fsdp__mesh_text(const fsdp_mesh *m, fsdp__str *out);

/* ---- offload.c: shards and gradients in a file ------------------------------------------ */
fsdp_status fsdp__offload_open(fsdp__unit *u);  /* by the unit's options */
void fsdp__offload_close(fsdp__unit *u);
/* Asks the disk for p's shard and its gradient, before they are made. */
fsdp_status fsdp__offload_promise(fsdp__unit *u, const fsdp__fparam *p);
/* From hold to let the shards are in memory. */
fsdp_status fsdp__offload_hold(fsdp__unit *u);
void fsdp__offload_let(fsdp__unit *u);
/* Reads what the order says comes next. */
void fsdp__offload_ahead(fsdp__tree *t);
/* A private gather reads shards where peers can: e's shard becomes a copy of p's, until unshow. */
fsdp_status fsdp__offload_show(const fsdp__unit *u, fsdp__fparam *p, fsdp_list_entry *e);
void fsdp__offload_unshow(fsdp__unit *u);
/* From hold to let p's shard gradient is in memory, being written. */
fsdp_status fsdp__offload_hold_grad(fsdp__fparam *p);
void fsdp__offload_let_grad(fsdp__fparam *p);

/* ---- tree.c ----------------------------------------------------------------------------- */
/* Makes the tree of which m is the root, once; checks it against the other ranks. */
fsdp_status fsdp__tree_init(fsdp_module *root);
void fsdp__queue_release(fsdp__queue *q);
fsdp__unit *fsdp__unit_of(const fsdp_module *m);

/* ---- buffers.c --------------------------------------------------------------------------- */
fsdp_status fsdp__buffers_collect(fsdp__tree *t);
void fsdp__buffers_free(fsdp__tree *t);
/* What ranks must agree in, in words; a number stands for the values. */
fsdp_status fsdp__buffer_line(const fsdp__tree *t, int64_t i, char *line, size_t size);
/* A forward begins: what it changes is seen at its end. */
void fsdp__buffers_note(fsdp__tree *t);
/* A forward in training is over: each buffer's rule. */
fsdp_status fsdp__buffers_follow_rules(fsdp__tree *t);

/* ---- change.c: parameters that change after they were sharded ---------------------------- */
extern const fsdp__shard_ops fsdp__shard_ops_of_units;
/* This rank's rows of `from`, which is whole, into the shard of p. */
void fsdp__param_take_rows(fsdp__fparam *p, const fsdp_tensor *from);

/* ---- summon.c ------------------------------------------------------------------------------- */
/* Whether a forward may run on the summoned copies. */
fsdp_status fsdp__summoned_forward(const fsdp__unit *u);

/* ---- steer.c ------------------------------------------------------------------------------- */
/* The unit of m; an error for a module without one. */
fsdp_status fsdp__unit_need(fsdp_module *m, const char *what, fsdp__unit **u);
/* Calls fn on m's unit and, if asked, on those below. */
void fsdp__unit_each(fsdp_module *m, int recurse, void (*fn)(fsdp__unit *u, double v), double v);

/* ---- hooks.c ------------------------------------------------------------------------------ */
fsdp_status fsdp__hooks_install(fsdp__unit *u);
void fsdp__use_release(fsdp__use *use);
/* What runs around the forward of a module of unit arg: also around other methods. */
fsdp_status fsdp__pre_forward(void *arg, fsdp_module *m, fsdp_values *in);
fsdp_status fsdp__post_forward(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out);
/* The running backward ends with the reductions that are due. */
fsdp_status fsdp__tree_await_end(fsdp__tree *t);

#endif
