/*
 * node.h - the graph of autograd.
 *
 * A node is one op's backward. It holds what it saved, an edge for each input
 * to the node that made it (or to the leaf that it is), and while a backward
 * runs, the gradients of its outputs. Nodes are freed iteratively.
 *
 * Where gradients go. A backward asks fsdp__grad_out for the place of input
 * k's gradient: the leaf's own buffer, or the slot of the node that made the
 * input; *add says whether something is there already. So no gradient is
 * computed into a temporary and then added. When a finished tensor is the
 * gradient (reshape, add), fsdp__grad_give passes it on without a copy.
 *
 * Invariants: seq grows with creation; a node runs only when every node that
 * feeds it has run; among the ready the largest seq goes first, and leaves go
 * before all, so the parameters of a module are complete before the node that
 * stands at its inputs runs.
 */
#ifndef FSDP_AUTOGRAD_NODE_H
#define FSDP_AUTOGRAD_NODE_H

#include "fsdp/autograd.h"
#include "tensor/op.h"

typedef struct fsdp__node fsdp__node;

/* Shape and dtype of a tensor that is not kept. */
typedef struct fsdp__meta {
    fsdp_dtype dtype;
    int ndim;
    int64_t size[FSDP_MAX_DIMS];
} fsdp__meta;

typedef struct fsdp__edge {
    fsdp__node *node; /* NULL: this input needs no gradient */
    int index;        /* which output of node */
    fsdp__meta meta;
} fsdp__edge;

typedef struct fsdp__saved {
    fsdp_tensor *t; /* own reference: a detached twin, or what unpack gave for the running node */
    void *packed;
    fsdp_saved_hooks hooks; /* pack NULL: t */
    uint32_t version;
    uint64_t shard_version;
} fsdp__saved;

typedef struct fsdp__hook {
    int index; /* output of the node */
    fsdp_grad_hook fn;
    void *arg;
    void (*drop)(void *arg); /* at the end of the node; NULL: arg is somebody else's */
} fsdp__hook;

/* The gradient of one output while backward runs. */
typedef struct fsdp__grad_slot {
    fsdp_tensor *g;
    bool exclusive; /* nobody else sees g: it may be added to in place */
} fsdp__grad_slot;

#define FSDP__SAVED_OUT FSDP__OP_MAX_IN
#define FSDP__SAVED_MAX (FSDP__OP_MAX_IN + FSDP__OP_MAX_OUT)

typedef fsdp_status (*fsdp__backward_fn)(fsdp__node *n, fsdp_tensor **gout);

struct fsdp__node {
    int refs;
    uint64_t seq;
    const char *name;
    fsdp__backward_fn backward;
    int n_in, n_out;
    fsdp__edge in[FSDP__OP_MAX_IN];
    fsdp__saved saved[FSDP__SAVED_MAX]; /* ops: input k at k, output k at FSDP__SAVED_OUT + k */
    fsdp__grad_slot slot[FSDP__OP_MAX_OUT > FSDP_CUSTOM_MAX ? FSDP__OP_MAX_OUT : FSDP_CUSTOM_MAX];
    int64_t i[12];
    double f[4];
    void *extra; /* custom functions, identity nodes */
    void (*extra_free)(void *extra);
    fsdp__hook *hooks;
    int64_t n_hooks, cap_hooks;
    fsdp_tensor *leaf; /* accumulate nodes: the leaf, not owned; NULL once it is gone */
    bool is_leaf;
    bool runs_always; /* backward is called even if no gradient came (identity nodes) */
    bool received; /* leaf: a gradient came in this backward */
    bool released; /* saved tensors are gone: a second backward is an error */
    fsdp__node *next_dead; /* while being freed */
    /* engine */
    int deps;
    uint64_t mark;
};

/* What a tensor carries once gradients matter to it. */
typedef struct fsdp__autograd {
    bool requires_grad;
    fsdp__node *node;  /* who made it; a leaf: its accumulate node, made on first use */
    int index;
    bool is_leaf;
    fsdp_tensor *grad; /* leaves; own reference */
    /* Leaves: where a backward puts the gradient (fully_shard sets it). Returns a borrowed tensor
     * and whether it holds a value already. */
    fsdp_tensor *(*provide)(void *arg, int *add);
    void *provide_arg;
    struct fsdp__accumulate_hook_entry {
        fsdp_accumulate_hook fn;
        void *arg;
    } *post;
    int64_t n_post, cap_post;
} fsdp__autograd;

/* ---- building ---------------------------------------------------------------- */

fsdp__autograd *fsdp__autograd_of(fsdp_tensor *t); /* made on first use; NULL: error kept */
fsdp__node *fsdp__node_create(const char *name, fsdp__backward_fn fn);
fsdp__node *fsdp__node_retain(fsdp__node *n);
void fsdp__node_release(fsdp__node *n);
/* Who made t, which requires a gradient; a leaf's accumulate node. Borrowed; NULL: error kept. */
fsdp__node *fsdp__node_of(fsdp_tensor *t);
/* Input k is t: the edge to who made it, if it needs a gradient. */
fsdp_status fsdp__node_input(fsdp__node *n, int k, fsdp_tensor *t);
/* Output k of n is t. */
fsdp_status fsdp__node_output(fsdp__node *n, int k, fsdp_tensor *t);
/* Saves t (NULL: nothing) for what `name` says, by way of the saved-tensor hooks in force. */
fsdp_status fsdp__save(fsdp__saved *s, const char *name, fsdp_tensor *t);
/* The saved tensor, checked against later writes; s keeps it until fsdp__saved_rest. NULL with no
 * error kept when nothing was saved. */
fsdp_tensor *fsdp__saved_get(fsdp__saved *s, const char *name);
void fsdp__saved_rest(fsdp__saved *s); /* forgets what unpack gave: the next use unpacks anew */
void fsdp__saved_drop(fsdp__saved *s);
/* The same for number k of a node. */
fsdp_status fsdp__node_save(fsdp__node *n, int k, fsdp_tensor *t);
fsdp_tensor *fsdp__node_saved(fsdp__node *n, int k);
void fsdp__node_rest_saved(fsdp__node *n);
void fsdp__node_drop_saved(fsdp__node *n);

/* A leaf's gradient is complete: of a shard, when it has been reduced. */
fsdp_status fsdp__run_accumulate_hooks(fsdp_tensor *leaf);

/* A hook that owns arg: drop is called once, also on failure. */
fsdp_status fsdp__register_hook_owned(fsdp_tensor *t, fsdp_grad_hook fn, void *arg,
                                      void (*drop)(void *arg));
/* Takes the hook away again; nothing if it is not there. */
void fsdp__remove_accumulate_hook(fsdp_tensor *t, fsdp_accumulate_hook fn, const void *arg);

/* ---- in a backward function ------------------------------------------------------ */

bool fsdp__grad_wanted(const fsdp__node *n, int k);
fsdp_tensor *fsdp__grad_out(fsdp__node *n, int k, int *add);
fsdp_status fsdp__grad_give(fsdp__node *n, int k, fsdp_tensor *g);

/* ---- the rest ----------------------------------------------------------------------- */

/* Runs an op: checks, shape rule, kernel, graph. Returns c->out[0] or NULL. */
fsdp_tensor *fsdp__apply(fsdp__opcall *c);

#define FSDP__OP(name) fsdp_status fsdp__back_##name(fsdp__node *n, fsdp_tensor **gout);
#include "tensor/ops.def"
#undef FSDP__OP
extern const fsdp__backward_fn fsdp__op_backs[FSDP__OP_COUNT];

/* ---- recompute.c ----------------------------------------------------------------------- */

/* One run of what is checkpointed (see recompute.c). */
typedef struct fsdp__frame fsdp__frame;

/* Opens a frame around a forward, with gradients on: what ops save until the end is not kept, and fn
 * makes it again. drop(arg) is called at the end of the frame's life, also when this fails. */
fsdp__frame *fsdp__recompute_begin(fsdp_checkpoint_fn fn, void *arg, void (*drop)(void *arg),
                                   fsdp_tensor *const *in, int n_in,
                                   const fsdp_checkpoint_options *o);
/* Closes it; the status of the forward passes through. */
fsdp_status fsdp__recompute_end(fsdp__frame *f, fsdp_status s);
/* An op in a frame: before its run, which is left out where c->kept is set, and after it. */
fsdp_status fsdp__recompute_before(fsdp__frame *f, fsdp__opcall *c);
fsdp_status fsdp__recompute_after(fsdp__frame *f, fsdp__opcall *c);
double fsdp__op_flops(const fsdp__opcall *c); /* flops.c: of matrix products and attention */

/* Per-context state. */
typedef struct fsdp__grad_state {
    int no_grad;
    uint64_t seq;
    uint64_t mark;
    bool running;
    fsdp__frame *frame;    /* innermost that records or is recomputed */
    fsdp__frame *replayed; /* those recomputed in the running backward */
    const char *saving;    /* the op that saves a tensor now */
    fsdp_saved_hooks saved_hooks[16];
    int n_saved_hooks;
    struct fsdp__callback {
        fsdp_status (*fn)(void *arg);
        void *arg;
    } *callbacks;
    int64_t n_callbacks, cap_callbacks;
} fsdp__grad_state;
fsdp__grad_state *fsdp__grad_state_get(void); /* NULL: error kept */
/* A backward ended: what was recomputed in it and not used goes. */
void fsdp__recompute_settle(fsdp__grad_state *g);

#endif
