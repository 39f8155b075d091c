/*
 * optim.h - optimizers over (sharded) parameters, clipping, schedules.
 */
#ifndef FSDP_OPTIM_H
#define FSDP_OPTIM_H

#include "nn.h"

FSDP_EXTERN_C_BEGIN

typedef struct fsdp_optimizer fsdp_optimizer;

/* As torch.optim.AdamW; decay on every parameter. */
typedef struct fsdp_adamw_options {
    double lr, beta1, beta2, eps, weight_decay;
} fsdp_adamw_options;
/* 1e-3, 0.9, 0.999, 1e-8, 1e-2 */
FSDP_API fsdp_adamw_options fsdp_adamw_defaults(void);
/* As torch.optim.SGD, dampening 0. */
typedef struct fsdp_sgd_options {
    double lr, momentum, weight_decay;
    int nesterov;
} fsdp_sgd_options;
FSDP_API fsdp_sgd_options fsdp_sgd_defaults(void); /* 1e-3 0 0 */

/* For all parameters below m that require a gradient, after fully_shard (an
 * error before it if m is sharded later). State is made at the first step. o
 * NULL: defaults. m must outlive the optimizer. */
FSDP_API fsdp_optimizer *fsdp_adamw(fsdp_module *m,
                                    const fsdp_adamw_options *o);
FSDP_API fsdp_optimizer *fsdp_sgd(fsdp_module *m, const fsdp_sgd_options *o);
FSDP_API void fsdp_optimizer_free(fsdp_optimizer *o);

/* ---- parameter groups --------------------------------------------------- */

/* Settings of the parameters that a pattern takes; NAN: the optimizer's. The
 * patterns are of whole dotted names ("model.norm.weight"; a tied weight's is
 * its first): * any characters, ? one, [a-f], a|b either of two. */
typedef struct fsdp_group_options {
    const char *pattern;
    double lr_factor; /* times the optimizer's rate, which schedules set */
    double weight_decay;
    double beta1, beta2, eps; /* AdamW */
    double momentum; /* SGD; 0 where the optimizer's is, and only there */
} fsdp_group_options;
/* NULL, 1, and NAN for all others. */
FSDP_API fsdp_group_options fsdp_group_defaults(void);
/* A parameter belongs to the first group that takes it. NOT_FOUND if g takes
 * none that earlier groups have left. The pattern is copied. */
FSDP_API fsdp_status fsdp_optimizer_add_group(fsdp_optimizer *o,
                                              const fsdp_group_options *g);
FSDP_API int fsdp_optimizer_group_count(const fsdp_optimizer *o);
/* The settings in force of group i; -1: of parameters without a group. */
FSDP_API fsdp_status fsdp_optimizer_group(const fsdp_optimizer *o, int i,
                                          fsdp_group_options *out);
/* A table: pattern, parameters, elements and settings of each group. The caller
 * frees it with free. NULL for NULL, or out of memory. */
FSDP_API char *fsdp_optimizer_print_groups(const fsdp_optimizer *o);

/* ---- stepping ----------------------------------------------------------- */

/* Updates each parameter that has a gradient, in place of its shard. Refuses
 * while an error is kept: nothing is modified. */
FSDP_API fsdp_status fsdp_optimizer_step(fsdp_optimizer *o);
/* Each parameter is updated as soon as its gradient is there (reduced, under
 * fully_shard), during backward, and the gradient is freed, so that gradients
 * of few units exist at a time. fsdp_optimizer_step then ends the step: it
 * counts, and updates what still has a gradient. The rate must be set before
 * backward. Same bits as without. INVALID_STATE, naming both: with what needs
 * all gradients at once (fsdp_grad_norm, fsdp_clip_grad_norm, the loss scaler)
 * and at a second gradient of one step: accumulate with
 * fsdp_set_requires_gradient_sync off until the last backward. off: as before
 * (not inside a step). */
FSDP_API fsdp_status fsdp_optimizer_in_backward(fsdp_optimizer *o, int on);
/* Where the state lies (NULL: in memory), before there is any. Its bytes are
 * asked of the disk now: FSDP_IO_ERROR if they are not there. */
FSDP_API fsdp_status fsdp_optimizer_set_offload(fsdp_optimizer *o,
                                                const fsdp_offload_policy *p);
/* A rate that is not finite or below 0 is an error that is kept. */
FSDP_API void fsdp_optimizer_set_lr(fsdp_optimizer *o, double lr);
FSDP_API double fsdp_optimizer_lr(const fsdp_optimizer *o);
/* Steps taken; a load sets it. */
FSDP_API int64_t fsdp_optimizer_step_count(const fsdp_optimizer *o);
FSDP_API void fsdp_optimizer_set_step_count(fsdp_optimizer *o, int64_t n);

/* State tensor k of parameter p ("exp_avg", "exp_avg_sq", "momentum_buffer"),
 * of the shape of p's local part; made (zeros) if it is not there yet. */
FSDP_API int fsdp_optimizer_state_count(const fsdp_optimizer *o);
FSDP_API const char *fsdp_optimizer_state_name(const fsdp_optimizer *o, int k);
FSDP_API fsdp_tensor *fsdp_optimizer_state(fsdp_optimizer *o, fsdp_param *p,
                                           int k);

/* The norm of all gradients below m over all ranks: p = 1, 2, 3, ... or
 * INFINITY. Summed by row, then over rows in tree order, so it does not depend
 * on the cut. Collective. */
FSDP_API fsdp_status fsdp_grad_norm(fsdp_module *m, double p, double *norm);
/* Scales gradients by max_norm / (norm + 1e-6) if that is below 1; gives the
 * norm before. A non-finite norm modifies nothing and is NON_FINITE. norm may
 * be NULL. */
FSDP_API fsdp_status fsdp_clip_grad_norm(fsdp_module *m, double max_norm,
                                         double *norm);

/* The same with a norm that is known already, as torch's clip_grads_with_norm_.
 * Not collective. */
FSDP_API fsdp_status fsdp_clip_grads_with_norm(fsdp_module *m, double max_norm,
                                               double norm);

/* ---- fp16: loss scaling ------------------------------------------------- */

/* As torch.amp.GradScaler:
 *
 *     fsdp_backward(fsdp_grad_scaler_scale(s, loss));
 *     fsdp_grad_scaler_unscale(s, o, NULL);        // to clip or to look
 *     fsdp_clip_grad_norm(m, 1.0, NULL);           // if nothing was found
 *     fsdp_grad_scaler_step(s, o, &stepped);
 *     fsdp_grad_scaler_update(s);
 */
typedef struct fsdp_grad_scaler fsdp_grad_scaler;
typedef struct fsdp_scaler_options {
    double init_scale, growth_factor, backoff_factor;
    int64_t growth_interval; /* good steps until the scale grows */
} fsdp_scaler_options;
FSDP_API fsdp_scaler_options fsdp_scaler_defaults(void); /* 65536 2 0.5 2000 */
/* o NULL: defaults. NULL with the error kept. The caller frees it. */
FSDP_API fsdp_grad_scaler *
fsdp_grad_scaler_create(const fsdp_scaler_options *o);
FSDP_API void fsdp_grad_scaler_free(fsdp_grad_scaler *s);
/* loss * scale */
FSDP_API fsdp_tensor *fsdp_grad_scaler_scale(const fsdp_grad_scaler *s,
                                             fsdp_tensor *loss);
/* Divides the gradients of o's parameters by the scale, once a step. *found_inf
 * (may be NULL): some rank's gradients hold an infinity or a NaN; the same on
 * all ranks, by one small all-reduce a mesh axis. Collective. */
FSDP_API fsdp_status fsdp_grad_scaler_unscale(fsdp_grad_scaler *s,
                                              fsdp_optimizer *o,
                                              int *found_inf);
/* Unscales if that was not done, and steps o unless something was found;
 * *stepped (may be NULL) says whether. Collective. */
FSDP_API fsdp_status fsdp_grad_scaler_step(fsdp_grad_scaler *s,
                                           fsdp_optimizer *o, int *stepped);
/* Ends a step: takes the scale back, or counts towards its growth. */
FSDP_API fsdp_status fsdp_grad_scaler_update(fsdp_grad_scaler *s);
FSDP_API double fsdp_grad_scaler_get_scale(const fsdp_grad_scaler *s);
/* Good steps since the scale last changed. */
FSDP_API int64_t fsdp_grad_scaler_growth_tracker(const fsdp_grad_scaler *s);
FSDP_API fsdp_status fsdp_grad_scaler_set_state(fsdp_grad_scaler *s,
                                                double scale, int64_t tracker);

/* ---- a moving average of the weights ------------------------------------ */

/* average = decay * average + (1 - decay) * weight after each step, in f32, of
 * this rank's part of every trainable parameter; the first update copies. As
 * torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn. */
typedef struct fsdp_ema fsdp_ema;
/* After fsdp_fully_shard and fsdp_to_empty. decay in [0, 1). NULL with the
 * error kept. m must outlive it. */
FSDP_API fsdp_ema *fsdp_ema_create(fsdp_module *m, double decay);
FSDP_API void fsdp_ema_free(fsdp_ema *e);
FSDP_API fsdp_status fsdp_ema_update(fsdp_ema *e);
/* The averages take the weights' place, rounded to their dtype, until swap_out;
 * gathered copies are stale. Every rank must call both. Meanwhile a step, save
 * or update is refused, and fsdp_ema_free leaves the averages where they are.
 * Before the first update the averages are the weights. Weights that are not
 * f32 are put aside, in memory of their size. */
FSDP_API fsdp_status fsdp_ema_swap_in(fsdp_ema *e);
FSDP_API fsdp_status fsdp_ema_swap_out(fsdp_ema *e);
FSDP_API int fsdp_ema_swapped(const fsdp_ema *e);
FSDP_API int64_t fsdp_ema_updates(const fsdp_ema *e);
FSDP_API void fsdp_ema_set_updates(fsdp_ema *e, int64_t n); /* a load does */
/* Of the shape of p's local part; borrowed. NULL if p is not averaged. */
FSDP_API fsdp_tensor *fsdp_ema_average(fsdp_ema *e, const fsdp_param *p);

/* ---- schedules: pure functions of the step ------------------------------ */

typedef enum fsdp_decay {
    FSDP_DECAY_LINEAR,
    FSDP_DECAY_SQRT,
    FSDP_DECAY_COSINE
} fsdp_decay;
typedef struct fsdp_schedule {
    int64_t warmup_steps; /* linear from 1 / warmup; at most total_steps */
    int64_t total_steps;
    double decay_ratio; /* below 0: decay starts right after warm-up */
    fsdp_decay decay;
    double min_lr_factor;
} fsdp_schedule;
/* Factor of the peak learning rate in 0-based step. */
FSDP_API double fsdp_schedule_factor(const fsdp_schedule *s, int64_t step);

FSDP_EXTERN_C_END
#endif
