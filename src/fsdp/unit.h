/*
 * unit.h - units and the tree that they form.
 */
#ifndef FSDP_FSDP_UNIT_H
#define FSDP_FSDP_UNIT_H

#include <stdbool.h>

#include "autograd/node.h"
#include "comm/comm.h"
#include "dtensor/dtensor.h"
#include "fsdp/shard.h"
#include "nn/module.h"

typedef struct fsdp__unit fsdp__unit;
typedef struct fsdp__tree fsdp__tree;

/* One parameter of a unit. */
typedef struct fsdp__fparam {
    fsdp_param *param; /* own reference */
    fsdp__unit *unit;
    fsdp_tensor *sharded;   /* this rank's part: a DTensor; own reference */
    fsdp_tensor *whole;     /* gathered: one tensor and storage for life; own reference */
    fsdp_tensor *grad;      /* whole gradient in the reduce dtype: filled by the first backward */
    fsdp__cut cut;          /* over the shard group */
    int64_t slot_offset;    /* bytes, in the unit's shared copy */
    uint32_t version;       /* of the shard that `whole` was filled from */
    bool got_grad;          /* grad holds something since the last reduction */
    int64_t sum_at;         /* elements, in the unit's sums */
    bool has_sum, summed;   /* it has a place in the unit's sums; and they hold something there */
    bool fresh_shard_grad;  /* the shard's gradient was made for the running reduction */
} fsdp__fparam;

/* Where a unit's reduction is (reduce.c). */
typedef enum fsdp__reduce_stage {
    FSDP__REDUCE_NONE,
    FSDP__REDUCE_SCATTER, /* inside the shard group; peers read the whole gradients */
    FSDP__REDUCE_REPLICAS /* across replicas */
} fsdp__reduce_stage;

typedef enum fsdp__unit_state { FSDP__SHARDED, FSDP__GATHERING, FSDP__WHOLE } fsdp__unit_state;

struct fsdp__unit {
    char *name; /* dotted; "" for the root */
    fsdp_module *module;
    fsdp__tree *tree; /* NULL until the root's first forward */
    fsdp_shard_options opt;
    fsdp_group *shard, *replicate; /* replicate NULL: one replica */
    int S, R;
    fsdp__fparam *params;
    int n_params;
    fsdp__unit_state state;
    fsdp_shared slot;
    bool has_slot;
    int64_t slot_bytes; /* 0: no shared copy is used */
    fsdp_work *gather;
    fsdp_list_entry *gather_entries, *reduce_entries; /* (n_params) each */
    int n_reduce;
    int *reduce_params; /* which parameter an entry of the reduction is */
    fsdp_work *reduce;
    fsdp__reduce_stage stage;
    fsdp__unit *reduce_next; /* in the tree's queue of unfinished reductions */
    fsdp_tensor *sums;       /* this rank's rows, summed in the shard group (replicas.c) */
    bool sums_due;           /* they wait for a backward that goes over the replicas */
    bool across;             /* the running reduction does */
    bool prefetched;    /* gathered ahead and not used yet */
    bool keep;          /* not freed after forward */
    bool sync;          /* requires_gradient_sync */
    bool all_reduce;    /* requires_all_reduce */
    double divide;      /* 0: number of ranks */
    bool force_sum;     /* no division inside a collective */
    bool reduce_unused; /* parameters without a gradient are reduced as zeros */
    int max_reductions; /* unfinished ones whose whole gradients are held; the tree's largest counts */
    bool pre_backward;  /* an output hook fired in this backward */
    bool post_backward; /* done in this backward */
    int index;          /* in the tree's pre-order */
};

/* Which units were gathered, in order, in a forward (and backward). */
typedef struct fsdp__order {
    int *items;
    int64_t count, cap;
    int64_t at;     /* next expected */
    bool known;     /* recorded whole: prefetch by it */
    bool recording;
} fsdp__order;

struct fsdp__tree {
    fsdp_module *root;
    fsdp__unit **units; /* pre-order; units[0] may be a non-root when the root has no unit */
    int n_units;
    fsdp__order train, eval;
    fsdp__order *order; /* in force */
    fsdp__unit *forward_root; /* first unit entered; NULL outside a forward */
    fsdp__unit *reducing;     /* unfinished reductions, the oldest first */
    int ahead;                /* units prefetched and not used yet */
    bool callback_queued, last_backward;
    fsdp_event_fn event;
    void *event_arg;
};

/* ---- unit.c: states ------------------------------------------------------------- */
fsdp_status fsdp__unit_unshard(fsdp__unit *u, bool ahead);
fsdp_status fsdp__unit_wait(fsdp__unit *u);
fsdp_status fsdp__unit_reshard(fsdp__unit *u);
/* Storages say whose they are in messages: by the parameters' present names. */
void fsdp__unit_name_storages(fsdp__unit *u);
/* The shards changed since u was gathered. */
bool fsdp__unit_stale(const fsdp__unit *u);
void fsdp__unit_free(void *u);
void fsdp__event(fsdp__unit *u, fsdp_event_kind k);

/* ---- reduce.c: gradients ---------------------------------------------------------- */
/* Where backward puts the whole gradient of a parameter (a leaf's provide). */
fsdp_tensor *fsdp__grad_place(void *fparam, int *add);
fsdp_status fsdp__unit_post_backward(fsdp__unit *u);
fsdp_status fsdp__tree_finish_reduce(fsdp__tree *t);
/* The shard's gradient, made if there is none; NULL: error kept. */
fsdp_tensor *fsdp__shard_grad(fsdp__fparam *p);
/* Gives up whatever reduction is under way, and all gradients that are not the shards' yet. */
void fsdp__unit_drop_grads(fsdp__unit *u);

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
/* Gathers ahead what comes next, up to the limit of u. */
fsdp_status fsdp__order_prefetch(fsdp__tree *t, fsdp__unit *u);
fsdp_status fsdp__order_end(fsdp__tree *t);
/* Private copies are read straight from the peers' shards: returns when no rank of the group reads
 * this rank's any more, so that it may be written. */
fsdp_status fsdp__unit_let_go(fsdp__unit *u);
void fsdp__order_free(fsdp__order *o);

/* ---- tree.c ----------------------------------------------------------------------------- */
/* Makes the tree of which m is the root, once; checks it against the other ranks. */
fsdp_status fsdp__tree_init(fsdp_module *root);
fsdp__unit *fsdp__unit_of(const fsdp_module *m);

/* ---- steer.c ------------------------------------------------------------------------------- */
/* The unit of m; an error for a module without one. */
fsdp_status fsdp__unit_need(fsdp_module *m, const char *what, fsdp__unit **u);
/* Calls fn on m's unit and, if asked, on those below. */
void fsdp__unit_each(fsdp_module *m, int recurse, void (*fn)(fsdp__unit *u, double v), double v);

/* ---- hooks.c ------------------------------------------------------------------------------ */
fsdp_status fsdp__hooks_install(fsdp__unit *u);
/* The running backward ends with the reductions that are due. */
fsdp_status fsdp__tree_await_end(fsdp__tree *t);

#endif
