/*
 * autograd.h - gradients by reverse-mode differentiation.
 *
 * Ops (ops.h) on tensors that require a gradient build a graph; fsdp_backward
 * walks it from the last op to the first and frees it. Gradients are born
 * where they are needed: a backward kernel writes, or adds, straight into the
 * gradient of a leaf. No double backward.
 */
#ifndef FSDP_AUTOGRAD_H
#define FSDP_AUTOGRAD_H

#include "tensor.h"

FSDP_EXTERN_C_BEGIN

/* Leaves only (an op's output already has its answer: an error). Floating
 * dtypes only. */
FSDP_API fsdp_status fsdp_requires_grad_(fsdp_tensor *t, int on);
FSDP_API int fsdp_requires_grad(const fsdp_tensor *t);
FSDP_API int fsdp_is_leaf(const fsdp_tensor *t);

/* A leaf's gradient, NULL while there is none. Borrowed. */
FSDP_API fsdp_tensor *fsdp_grad(const fsdp_tensor *t);
/* Replaces it (NULL: drops it). Same sizes; the dtype may be wider. */
FSDP_API fsdp_status fsdp_set_grad(fsdp_tensor *t, fsdp_tensor *g);

/* Runs backward from a one-element tensor with gradient 1. */
FSDP_API fsdp_status fsdp_backward(fsdp_tensor *loss);
/* From any tensor, with the gradient of it given; retain_graph != 0 keeps the
 * graph for another backward. */
FSDP_API fsdp_status fsdp_backward_from(fsdp_tensor *t, fsdp_tensor *grad,
                                        int retain_graph);

/* Between these, ops build no graph. Nest by counting. */
FSDP_API void fsdp_no_grad_begin(void);
FSDP_API void fsdp_no_grad_end(void);
FSDP_API int fsdp_grad_enabled(void);

/* Called with the gradient of t when it is complete. A tensor returned
 * replaces it; NULL leaves it. Hooks run in order of registration. */
typedef fsdp_tensor *(*fsdp_grad_hook)(void *arg, fsdp_tensor *grad);
FSDP_API fsdp_status fsdp_register_hook(fsdp_tensor *t, fsdp_grad_hook fn,
                                        void *arg);
/* Leaves: called after the gradient has been accumulated in one backward; a
 * sharded parameter's when it has been reduced. */
typedef fsdp_status (*fsdp_accumulate_hook)(void *arg, fsdp_tensor *leaf);
FSDP_API fsdp_status fsdp_register_post_accumulate_hook(fsdp_tensor *t,
                                                        fsdp_accumulate_hook fn,
                                                        void *arg);

/* Runs fn(arg) once at the end of the running backward, in order. */
FSDP_API fsdp_status fsdp_queue_callback(fsdp_status (*fn)(void *arg),
                                         void *arg);
FSDP_API int fsdp_in_backward(void);

/* ---- what is saved for backward ----------------------------------------- */

/* While pushed, each tensor that an op saves goes through pack, and what it
 * returned through unpack when backward needs it. pack is given a twin without
 * history, of the innermost scope: it retains or copies what it keeps. What
 * unpack returns stays its maker's or its scope's; the engine only reads it,
 * and asks once for each run of the node that saved it. drop is called once
 * for each packed value at the end of its life. Inputs that are parameters
 * pass through as well. */
typedef struct fsdp_saved_hooks {
    void *(*pack)(void *arg, fsdp_tensor *t);
    fsdp_tensor *(*unpack)(void *arg, void *packed);
    void (*drop)(void *arg, void *packed);
    void *arg;
} fsdp_saved_hooks;
FSDP_API fsdp_status fsdp_saved_hooks_push(const fsdp_saved_hooks *h);
FSDP_API fsdp_status fsdp_saved_hooks_pop(void);

/* ---- recomputation (activation checkpointing) --------------------------- */

/* Fills out[0..n_out-1] from in[0..n_in-1]; in[i] may be NULL. */
typedef fsdp_status (*fsdp_checkpoint_fn)(void *arg, fsdp_tensor **in,
                                          int n_in, fsdp_tensor **out,
                                          int n_out);

/* An op that ran in a checkpoint. */
typedef struct fsdp_checkpoint_op {
    const char *name;   /* "linear" */
    int64_t index;      /* ops before it in this checkpoint */
    int64_t call;       /* ops of this name before it */
    int64_t bytes;      /* of its outputs and statistics */
    double flops;       /* of matrix products and attention; else 0 */
    const char *weight; /* name of the first parameter among its inputs */
} fsdp_checkpoint_op;
/* != 0: the outputs of op are kept, and it does not run again. Asked once for
 * each op of a forward; views are never kept. */
typedef int (*fsdp_checkpoint_policy)(void *arg, const fsdp_checkpoint_op *op);

/* What a checkpoint did, since it was last set to zero. */
typedef struct fsdp_checkpoint_report {
    int64_t forwards, recomputations;
    /* Of the last one, activations, each storage once: */
    int64_t input_bytes; /* inputs, which it holds */
    int64_t kept_bytes;  /* outputs that the policy kept, which it holds */
    int64_t saved_bytes; /* what backward needs: held without a checkpoint */
    int64_t ops;         /* that were run again, or whose outputs were kept */
    /* Peak of activations when its recomputation began and when it ended. */
    int64_t peak_before, peak_after;
    double flops;        /* of all forwards, as fsdp_checkpoint_op's */
    double recomputed_flops;
} fsdp_checkpoint_report;

typedef struct fsdp_checkpoint_options {
    fsdp_checkpoint_policy policy; /* NULL: nothing is kept */
    void *policy_arg;
    int no_early_stop;              /* run to the end also when all is there */
    fsdp_checkpoint_report *report; /* may be NULL; used while the graph is */
} fsdp_checkpoint_options;

/* Calls fn so that what ops save in it is not kept: only `in` is, and what a
 * policy keeps. The first use in backward runs fn again with the random state,
 * the gradient mode and the inputs of the first run, and stops when all that
 * is needed is there (ops then return NULL with FSDP_INTERRUPTED kept, as
 * after an error: a forward that returns on errors needs nothing more). The
 * numbers are the same to the bit. fn must do the same both times; where it
 * saves other tensors, the error names the op. drop (may be NULL) is called
 * once, at the end of arg's life, also on failure. Without gradients fn is
 * just called. o NULL: nothing is kept. Up to FSDP_CUSTOM_MAX inputs. Nests.
 * PyTorch: checkpoint(use_reentrant=False). */
FSDP_API fsdp_status fsdp_checkpoint(fsdp_checkpoint_fn fn, void *arg,
                                     void (*drop)(void *arg), fsdp_tensor **in,
                                     int n_in, fsdp_tensor **out, int n_out,
                                     const fsdp_checkpoint_options *o);
/* Whether a forward runs again in backward: then it must not count, log or
 * update statistics a second time. */
FSDP_API int fsdp_recomputing(void);

/* ---- functions of your own ---------------------------------------------- */

#define FSDP_CUSTOM_MAX 8

/* What a custom function's forward and backward share. */
typedef struct fsdp_function_context fsdp_function_context;
FSDP_API fsdp_status fsdp_function_save(fsdp_function_context *c,
                                        fsdp_tensor *t);
FSDP_API fsdp_tensor *fsdp_function_saved(fsdp_function_context *c, int i);
FSDP_API void *fsdp_function_arg(fsdp_function_context *c);
/* Whether the gradient of input i is wanted (in backward). */
FSDP_API int fsdp_function_wants(fsdp_function_context *c, int i);

typedef struct fsdp_function {
    const char *name;
    /* Fills out[0..n_out-1]; runs without building a graph. */
    fsdp_status (*forward)(fsdp_function_context *c, fsdp_tensor **in, int n_in,
                           fsdp_tensor **out, int n_out);
    /* grad_out[i] may be NULL (zero). Fills grad_in[i] or leaves it NULL. */
    fsdp_status (*backward)(fsdp_function_context *c, fsdp_tensor **grad_out,
                            int n_out, fsdp_tensor **grad_in, int n_in);
    void (*drop)(void *arg); /* end of arg's life; may be NULL */
} fsdp_function;

/* Applies f; in[i] may be NULL. Outputs belong to the innermost scope. On
 * failure every out is NULL and the error is kept. */
FSDP_API fsdp_status fsdp_function_apply(const fsdp_function *f, void *arg,
                                         fsdp_tensor **in, int n_in,
                                         fsdp_tensor **out, int n_out);

FSDP_EXTERN_C_END
#endif
