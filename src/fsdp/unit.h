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
    fsdp_tensor *earlier;   /* hybrid: the shard's gradient of earlier microbatches, set aside */
    bool fresh_shard_grad;  /* the shard's gradient was made for the running reduction */
} fsdp__fparam;

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
    bool prefetched;    /* gathered ahead and not used yet */
    bool keep;          /* not freed after forward */
    bool sync;          /* requires_gradient_sync */
    double divide;      /* 0: number of ranks */
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
    fsdp__unit *reducing;     /* the one unfinished reduction */
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
void fsdp__unit_drop_grads(fsdp__unit *u);

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
