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

/* Updates each parameter that has a gradient, in place of its shard. Refuses
 * while an error is kept: nothing is modified. */
FSDP_API fsdp_status fsdp_optimizer_step(fsdp_optimizer *o);
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

/* ---- schedules: pure functions of the step ------------------------------ */

typedef enum fsdp_decay {
    FSDP_DECAY_LINEAR,
    FSDP_DECAY_SQRT,
    FSDP_DECAY_COSINE
} fsdp_decay;
typedef struct fsdp_schedule {
    int64_t warmup_steps; /* linear from 1 / warmup; at most total_steps */
    int64_t total_steps;
    double decay_ratio;   /* below 0: decay starts right after warm-up */
    fsdp_decay decay;
    double min_lr_factor;
} fsdp_schedule;
/* Factor of the peak learning rate in 0-based step. */
FSDP_API double fsdp_schedule_factor(const fsdp_schedule *s, int64_t step);

FSDP_EXTERN_C_END
#endif
