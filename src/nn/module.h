/*
 * module.h - the inside of modules and parameters, for the rooms above.
 */
#ifndef FSDP_NN_MODULE_H
#define FSDP_NN_MODULE_H

#include <stdbool.h>

#include "base/memory.h"
#include "base/str.h"
#include "fsdp/nn.h"
#include "tensor/tensor.h"

/* What fsdp does for a parameter that is sharded; shard is the parameter's own pointer. */
typedef struct fsdp__shard_ops {
    /* only_ask: says whether it may, and changes nothing. */
    fsdp_status (*to_dtype)(void *shard, fsdp_dtype t, bool only_ask);
    fsdp_status (*replace)(void *shard, fsdp_param *by); /* `by` stands for it from here on */
    /* Gradients that wait for a reduction: whether there are any, and the end of them. */
    bool (*unreduced)(const void *shard);
    void (*drop_unreduced)(void *shard);
} fsdp__shard_ops;

struct fsdp_param {
    int refs;
    fsdp_tensor *t;    /* registered now; own reference */
    fsdp_tensor *kept; /* the shard, which keeps gradient and state; NULL: t. Owned by the unit */
    fsdp_dtype dtype;
    int ndim;
    int64_t size[FSDP_MAX_DIMS]; /* global */
    fsdp_init_rule init;
    bool requires_grad;
    char *name;       /* dotted, from the root; set by fsdp__module_name_params */
    char **old_names; /* storages and messages may still point to them */
    int64_t n_old, cap_old;
    const char *unit;  /* the unit that shards it; NULL: none. Owned by the unit */
    void *shard;       /* fsdp's part; not owned */
    const struct fsdp__shard_ops *shard_ops; /* with it */
    int optimizers;    /* that hold it */
    bool emptied;      /* fsdp_to_empty gave it memory while it was whole */
    int64_t listed_at; /* index in the last list of parameters that was made */
    bool averaged;     /* a moving average stands in its place */
    bool ignored;      /* fully_shard was told to leave it */
    bool early_step;   /* an optimizer uses its gradient up during backward */
};

typedef struct fsdp__hook_entry {
    int number;
    fsdp_forward_pre_hook pre; /* one of the two */
    fsdp_forward_hook post;
    void *arg;
} fsdp__hook_entry;

/* A method besides forward. pre and post: what fully_shard runs around it, or NULL. */
typedef struct fsdp__method_entry {
    char *name;
    fsdp_method fn;
    fsdp_forward_pre_hook pre;
    fsdp_forward_hook post;
    void *arg;
} fsdp__method_entry;

struct fsdp__module {
    char *name;
    fsdp_module *parent;
    fsdp_module **children;
    int64_t n_children, cap_children;
    struct fsdp__param_entry {
        char *name;
        fsdp_param *param;
    } * params;
    int64_t n_params, cap_params;
    struct fsdp__buffer_entry {
        char *name;
        fsdp_tensor *t;
        fsdp_buffer_rule rule;
        uint32_t version; /* of t, when the running forward of a sharded root began */
    } * buffers;
    int64_t n_buffers, cap_buffers;
    fsdp__method_entry *methods;
    int64_t n_methods, cap_methods;
    fsdp__hook_entry *hooks;
    int64_t n_hooks, cap_hooks;
    int next_hook;
    bool training;
    bool named; /* of a root: nothing was added below since its parameters were named */
    uint64_t path;  /* key of random numbers, from the dotted name; 0: not yet */
    uint64_t calls; /* in the microbatch `round` */
    uint64_t round;
    fsdp__life *life;  /* of a checkpointed module: what graphs hold */
    bool checkpointed; /* its forward runs again in backward, by `checkpoint` */
    fsdp_checkpoint_options checkpoint;
    fsdp_status (*reset)(fsdp_module *m); /* first values of its own buffers; NULL: none */
    void *shard;                          /* fsdp's state of this module */
    void (*shard_free)(void *shard);
};

/* NULL: no such method. */
fsdp__method_entry *fsdp__module_method(const fsdp_module *m, const char *name);
bool fsdp__module_has_forward(const fsdp_module *m);
/* Appends the dotted name of m below its root. */
void fsdp__module_path(const fsdp_module *m, fsdp__str *out);
/* Writes into each parameter of m's tree its dotted name below the top of that tree, so that names
 * do not depend on which module one asks. */
fsdp_status fsdp__module_name_params(fsdp_module *m);
/* The same, unless nothing was added to the tree since: sharding block by block asks once a block,
 * and each answer would walk the whole tree. */
fsdp_status fsdp__module_name_new(fsdp_module *m);
/* Whether p has gradients that wait for a reduction. */
bool fsdp__param_unreduced(const fsdp_param *p);
/* Registers another tensor for p; takes its own reference. */
void fsdp__param_set(fsdp_param *p, fsdp_tensor *t);
/* What the linear layers of this room are: x (..., in) -> (..., out), their weight stored (out, in),
 * or (in, out). False for every other module, also for one that calls itself "Linear". */
typedef struct fsdp__linear_info {
    int64_t in, out;
    bool in_out;
    fsdp_param *weight; /* not owned */
} fsdp__linear_info;
bool fsdp__linear_info_of(const fsdp_module *m, fsdp__linear_info *out);
/* The tensor that keeps gradient and optimizer state: the shard, or the plain parameter. */
fsdp_tensor *fsdp__param_kept(const fsdp_param *p);
/* Of the context: the gradients to come are those of a loss that was multiplied by a scale, and are
 * not divided by it yet. */
fsdp_status fsdp__loss_scaled_set(bool on);
bool fsdp__loss_scaled(void);
/* Fills the registered tensor by p's rule. */
fsdp_status fsdp__param_reset(fsdp_param *p, uint64_t seed);

#endif
