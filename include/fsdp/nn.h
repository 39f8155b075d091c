/*
 * nn.h - modules: trees of parameters with a forward.
 *
 * A module of your own embeds fsdp_module as its first member:
 *
 *     typedef struct { fsdp_module base; fsdp_module *up, *down; } mlp;
 *     static fsdp_tensor *mlp_forward(fsdp_module *self, fsdp_tensor *x) ...
 *     mlp *m = (mlp *)fsdp_module_create(sizeof *m, "MLP");
 *     m->base.forward1 = mlp_forward;
 *     m->up = fsdp_module_add(&m->base, "up", fsdp_linear_create(8, 32, 1));
 *
 * A module owns its children and shares its parameters (two modules may hold
 * the same one: tied weights). Parameters are reached through fsdp_param, whose
 * tensor changes between sharded and whole; do not keep the tensor.
 */
#ifndef FSDP_NN_H
#define FSDP_NN_H

#include "ops.h"

FSDP_EXTERN_C_BEGIN

#define FSDP_VALUES_MAX 8

/* What modules take and return. t[k] may be NULL where a model says so. */
typedef struct fsdp_values {
    int n;
    fsdp_tensor *t[FSDP_VALUES_MAX];
} fsdp_values;

typedef struct fsdp_module fsdp_module;
typedef struct fsdp_param fsdp_param;

struct fsdp_module {
    const char *type; /* "Linear": static text */
    /* One of the three, by the number of inputs; none: a container. */
    fsdp_tensor *(*forward1)(fsdp_module *self, fsdp_tensor *x);
    fsdp_tensor *(*forward2)(fsdp_module *self, fsdp_tensor *x, fsdp_tensor *y);
    fsdp_status (*forward)(fsdp_module *self, const fsdp_values *in,
                           fsdp_values *out);
    /* Frees what the struct holds besides children and parameters; may be
     * NULL. */
    void (*destroy)(fsdp_module *self);
    /* Details for printing ("8 -> 32, bias"), into text (n bytes); or NULL. */
    void (*describe)(const fsdp_module *self, char *text, size_t n);
    struct fsdp__module *in; /* the library's part */
};

/* size bytes, zeroed, of which the first are fsdp_module. NULL: error kept. */
FSDP_API fsdp_module *fsdp_module_create(size_t size, const char *type);
/* Frees m and its children; NULL: nothing. With a parent, which owns it: an
 * error is kept and nothing is freed. A backward that goes through it later is
 * an error, of a module that is sharded or checkpointed. */
FSDP_API void fsdp_module_free(fsdp_module *m);
/* m owns child from here on, also when this fails (but not what m is a part
 * of, which is refused and stays). Returns child, or NULL.
 * Below a module that is sharded already, child's parameters must be sharded
 * too or have been among its ignored_params (fsdp_module_add_param alike). */
FSDP_API fsdp_module *fsdp_module_add(fsdp_module *m, const char *name,
                                      fsdp_module *child);
FSDP_API int fsdp_module_child_count(const fsdp_module *m);
FSDP_API fsdp_module *fsdp_module_child(const fsdp_module *m, int i);
/* By dotted name ("layers.0.mlp"); "" is m itself. NULL with an error kept. */
FSDP_API fsdp_module *fsdp_module_find(fsdp_module *m, const char *name);
FSDP_API const char *fsdp_module_name(const fsdp_module *m); /* last part */

/* ---- calling ------------------------------------------------------------ */

/* in->n, and what forward and hooks leave, is 0 to FSDP_VALUES_MAX. Neither in
 * nor out may be NULL. */
FSDP_API fsdp_status fsdp_module_call(fsdp_module *m, const fsdp_values *in,
                                      fsdp_values *out);
FSDP_API fsdp_tensor *fsdp_call(fsdp_module *m, fsdp_tensor *x);
FSDP_API fsdp_tensor *fsdp_call2(fsdp_module *m, fsdp_tensor *x,
                                 fsdp_tensor *y);

/* Before forward: may replace what stands in `in`. */
typedef fsdp_status (*fsdp_forward_pre_hook)(void *arg, fsdp_module *m,
                                             fsdp_values *in);
/* After forward: may replace what stands in `out`. */
typedef fsdp_status (*fsdp_forward_hook)(void *arg, fsdp_module *m,
                                         const fsdp_values *in,
                                         fsdp_values *out);
/* Return a number for fsdp_remove_hook, or -1. first != 0 puts the hook before
 * those that are there. */
FSDP_API int fsdp_register_forward_pre_hook(fsdp_module *m,
                                            fsdp_forward_pre_hook fn, void *arg,
                                            int first);
FSDP_API int fsdp_register_forward_hook(fsdp_module *m, fsdp_forward_hook fn,
                                        void *arg, int first);
FSDP_API fsdp_status fsdp_remove_hook(fsdp_module *m, int number);

/* A method of m besides its forward, by name; calling it opens a scope as
 * calling m does and runs no hooks, except where fully_shard was told of it
 * (fsdp_register_fsdp_forward_method). The same name again replaces it. */
typedef fsdp_status (*fsdp_method)(fsdp_module *self, const fsdp_values *in,
                                   fsdp_values *out);
FSDP_API fsdp_status fsdp_module_add_method(fsdp_module *m, const char *name,
                                            fsdp_method fn);
FSDP_API fsdp_status fsdp_module_call_method(fsdp_module *m, const char *name,
                                             const fsdp_values *in,
                                             fsdp_values *out);

/* m's forward becomes a checkpoint (autograd.h): what it saves is made again in
 * backward. Its hooks stay outside, so of a module that is sharded later the
 * gather, the casts and the reduction stand around the checkpoint and happen
 * once. Names of parameters do not change. Before fsdp_fully_shard of m, of
 * what is below and what is above it: else FSDP_INVALID_STATE. A second call
 * replaces the options. PyTorch: checkpoint_wrapper. */
FSDP_API fsdp_status fsdp_checkpoint_module(fsdp_module *m,
                                            const fsdp_checkpoint_options *o);
FSDP_API int fsdp_is_checkpointed(const fsdp_module *m);

/* Training (on, the first state) or evaluation, for m and all below. */
FSDP_API void fsdp_module_train(fsdp_module *m, int on);
FSDP_API int fsdp_module_training(const fsdp_module *m);

/* ---- parameters and buffers --------------------------------------------- */

typedef enum fsdp_init_kind {
    FSDP_INIT_ZEROS,
    FSDP_INIT_ONES,
    FSDP_INIT_NORMAL, /* a mean, b standard deviation */
    FSDP_INIT_UNIFORM /* [a, b) */
} fsdp_init_kind;
typedef struct fsdp_init_rule {
    fsdp_init_kind kind;
    double a, b;
} fsdp_init_rule;

/* On the current device, requiring a gradient; without values until
 * fsdp_reset_parameters, a load, or a write (reading it is an error). One
 * reference, which fsdp_module_add_param takes over. */
FSDP_API fsdp_param *fsdp_param_create(fsdp_dtype t, int ndim,
                                       const int64_t *sizes,
                                       fsdp_init_rule init);
FSDP_API fsdp_param *fsdp_param_retain(fsdp_param *p);
FSDP_API void fsdp_param_release(fsdp_param *p);
/* Takes over the reference, also on failure. Returns p or NULL. */
FSDP_API fsdp_param *fsdp_module_add_param(fsdp_module *m, const char *name,
                                           fsdp_param *p);
/* The tensor registered now: sharded outside computation, whole inside.
 * Borrowed; NULL gives NULL. */
FSDP_API fsdp_tensor *fsdp_param_tensor(const fsdp_param *p);
/* What a state dict holds of p, whatever is registered now: its shard, a
 * DTensor over live memory that keeps the gradient and the optimizer's state;
 * the tensor itself where p is not sharded. The list of named parameters with
 * these is the state dict; a load writes into them (fsdp_copy_, rows of this
 * rank) and calls fsdp_mark_changed. Borrowed; NULL gives NULL. */
FSDP_API fsdp_tensor *fsdp_param_shard(const fsdp_param *p);
FSDP_API fsdp_param *fsdp_module_param(const fsdp_module *m, const char *name);
FSDP_API fsdp_status fsdp_param_requires_grad_(fsdp_param *p, int on);
FSDP_API int fsdp_param_requires_grad(const fsdp_param *p);
/* Global sizes, whether it is sharded or not. */
FSDP_API int fsdp_param_ndim(const fsdp_param *p);
FSDP_API const int64_t *fsdp_param_sizes(const fsdp_param *p);

/* The parameter `name` of m gets what p is: dtype, values, rule, requires_grad;
 * sizes must be equal. The fsdp_param object stays, since layers and other
 * modules hold it; the reference to p is taken over and dropped, also on
 * failure. A sharded one is cut at once, before the model's first forward;
 * after that, or once an optimizer holds it: FSDP_INVALID_STATE. */
FSDP_API fsdp_status fsdp_module_set_param(fsdp_module *m, const char *name,
                                           fsdp_param *p);

/* What becomes of a buffer that forwards in training change, where ranks see
 * different rows. EQUAL (at first): it does not change, and ranks must have
 * the same; a change is an error. After each forward of a sharded root in
 * training: BROADCAST gives all ranks the first's, MEAN the mean of all (in
 * f64), LOCAL leaves each rank its own. */
typedef enum fsdp_buffer_rule {
    FSDP_BUFFER_EQUAL,
    FSDP_BUFFER_BROADCAST,
    FSDP_BUFFER_MEAN,
    FSDP_BUFFER_LOCAL
} fsdp_buffer_rule;
/* name NULL: all buffers of m and below. */
FSDP_API fsdp_status fsdp_module_set_buffer_rule(fsdp_module *m,
                                                 const char *name,
                                                 fsdp_buffer_rule rule);
/* m keeps a reference to t. */
FSDP_API fsdp_status fsdp_module_add_buffer(fsdp_module *m, const char *name,
                                            fsdp_tensor *t);
FSDP_API fsdp_tensor *fsdp_module_buffer(const fsdp_module *m,
                                         const char *name);

/* All below m, m's own first, then child by child; each parameter once, under
 * the first name that it has. */
typedef struct fsdp_named_param {
    char *name; /* "layers.0.mlp.up.weight" */
    fsdp_param *param;
    fsdp_module *owner;
} fsdp_named_param;
typedef struct fsdp_param_list {
    fsdp_named_param *items;
    int64_t count;
} fsdp_param_list;
FSDP_API fsdp_status fsdp_module_params(fsdp_module *m, fsdp_param_list *out);
FSDP_API void fsdp_param_list_free(fsdp_param_list *l);
/* Elements of all parameters, whole. */
FSDP_API int64_t fsdp_module_numel(fsdp_module *m);

/* Gives meta parameters (their shard, once sharded) and buffers memory; no
 * values yet. */
FSDP_API fsdp_status fsdp_to_empty(fsdp_module *m, fsdp_device d);
/* Values by each parameter's rule: a function of (seed, name, element), so the
 * same on any number of ranks and under any cut. The library's own layers reset
 * their buffers as well. */
FSDP_API fsdp_status fsdp_reset_parameters(fsdp_module *m, uint64_t seed);
/* Drops the gradients, also those that wait for a reduction. */
FSDP_API fsdp_status fsdp_zero_grad(fsdp_module *m);
/* The tree as text: each parameter's global and local shape, placement, dtype
 * and unit. The caller frees it with free. */
FSDP_API char *fsdp_module_print(fsdp_module *m);

/* ---- layers ------------------------------------------------------------- */

/* dtype f32 until fsdp_module_to_dtype; weights named as PyTorch's. */
FSDP_API fsdp_module *fsdp_linear_create(int64_t in, int64_t out, int bias);
FSDP_API fsdp_module *fsdp_linear_in_out_create(int64_t in, int64_t out,
                                                int bias);
FSDP_API fsdp_module *fsdp_embedding_create(int64_t rows, int64_t dim);
FSDP_API fsdp_module *fsdp_rms_norm_create(int64_t dim, double eps);
FSDP_API fsdp_module *fsdp_layer_norm_create(int64_t dim, double eps);
/* As torch.nn.BatchNorm1d and 2d on (N, dim) and (N, dim, ...): buffers
 * running_mean and running_var (f32 whatever the weights' dtype; 0 and 1 at
 * first) and num_batches_tracked (i64), moved by each forward in training and
 * read in evaluation. Their rules: MEAN, and BROADCAST for the number.
 * PyTorch's defaults: eps 1e-5, momentum 0.1. */
FSDP_API fsdp_module *fsdp_batch_norm_create(int64_t dim, double eps,
                                             double momentum);
FSDP_API fsdp_module *fsdp_dropout_create(double p);
/* Calls its children one after the other. */
FSDP_API fsdp_module *fsdp_sequential_create(void);
/* Holds children and has no forward. */
FSDP_API fsdp_module *fsdp_module_list_create(void);
/* The rule of all parameters named "weight" below m with 2 dims or more. */
FSDP_API void fsdp_module_set_init(fsdp_module *m, fsdp_init_rule rule);
/* Floating parameters below m become t, and sharded ones' gradients; values are
 * cast. After fully_shard the dtypes of gather and reduction follow, where the
 * policy names none; refused while an optimizer holds the parameter, inside a
 * forward, and with gradients that are not reduced yet. */
FSDP_API fsdp_status fsdp_module_to_dtype(fsdp_module *m, fsdp_dtype t);

FSDP_EXTERN_C_END
#endif
