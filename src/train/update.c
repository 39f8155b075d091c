/*
 * update.c - what a step does with its gradients. Every decision here rests on numbers that are the
 * same on all ranks, so all take it alike.
 */
#include "train/update.h"

#include <math.h>

#include "base/error.h"
#include "train/run_folder.h"

fsdp_dtype fsdp__train_dtype_of(int choice)
{
    static const fsdp_dtype dtypes[] = {
        [FSDP__TRAIN_F32] = FSDP_F32, [FSDP__TRAIN_BF16] = FSDP_BF16, [FSDP__TRAIN_F16] = FSDP_F16};
    return dtypes[choice];
}

/* ---- making ----------------------------------------------------------------------------- */

static void say_precision(const fsdp__train_config *c, fsdp__metrics *m)
{
    static const char *const names[] = {"float32", "bfloat16", "float16"};
    fsdp__say(
        m,
        "weights, optimizer state: %s; gathered and computed: %s; gradients on their way: %s, "
        "summed in float32%s\n",
        names[c->training.dtype], names[c->training.mixed_precision_param],
        names[c->training.mixed_precision_reduce],
        c->training.dtype == FSDP__TRAIN_BF16
            ? "; updates below 1/256 of a weight are lost in it: set training.dtype float32 "
              "to keep them"
            : "");
}

fsdp_status fsdp__update_make(fsdp__update *u, const fsdp__train_config *c, fsdp_module *model,
                              fsdp_optimizer *opt, fsdp__metrics *m)
{
    *u = (fsdp__update){.c = c, .model = model, .opt = opt, .grad_norm = NAN};
    if (c->optimizer.early_step_in_backward) u->grad_norm = -1.0;
    say_precision(c, m);
    if (c->training.mixed_precision_param == FSDP__TRAIN_F16) {
        fsdp_scaler_options o = fsdp_scaler_defaults();
        o.init_scale = c->training.loss_scale;
        o.growth_interval = c->training.loss_scale_interval;
        u->scaler = fsdp_grad_scaler_create(&o);
        if (!u->scaler) return fsdp_error();
    }
    if (c->training.ema_decay > 0) {
        u->ema = fsdp_ema_create(model, c->training.ema_decay);
        if (!u->ema) return fsdp_error();
    }
    return FSDP_OK;
}

void fsdp__update_free(fsdp__update *u)
{
    fsdp_ema_free(u->ema);
    fsdp_grad_scaler_free(u->scaler);
    u->ema = NULL;
    u->scaler = NULL;
}

static bool same_schedule(const fsdp_schedule *a, const fsdp_schedule *b)
{
    return a->warmup_steps == b->warmup_steps && a->total_steps == b->total_steps &&
           a->decay_ratio == b->decay_ratio && a->decay == b->decay &&
           a->min_lr_factor == b->min_lr_factor;
}

fsdp_status fsdp__update_schedule(const fsdp__train_config *c, const fsdp__ckpt_state *loaded,
                                  const fsdp_schedule *now, fsdp__metrics *m)
{
    const fsdp_schedule *then = &loaded->schedule;
    if (!loaded->has_schedule || same_schedule(then, now)) return FSDP_OK;
    double before = c->optimizer.lr * fsdp_schedule_factor(then, loaded->step);
    double after = c->optimizer.lr * fsdp_schedule_factor(now, loaded->step);
    if (c->lr_scheduler.allow_change) {
        fsdp__say(m, "another learning rate schedule from here on: %g instead of %g in step %lld\n",
                  after, before, (long long)loaded->step + 1);
        return FSDP_OK;
    }
    return fsdp__fail_alike(
        FSDP_INVALID_CONFIG,
        "lr_scheduler is not as in the checkpoint (warm-up %lld of %lld steps then, %lld of %lld "
        "now): the rate of step %lld would be %g instead of %g. Set lr_scheduler.total_steps %lld "
        "and the other options as they were, or lr_scheduler.allow_change",
        (long long)then->warmup_steps, (long long)then->total_steps, (long long)now->warmup_steps,
        (long long)now->total_steps, (long long)loaded->step + 1, after, before,
        (long long)then->total_steps);
}

/* ---- a step ------------------------------------------------------------------------------ */

double fsdp__update_loss_factor(const fsdp__update *u, int64_t valid_tokens)
{
    return fsdp_grad_scaler_get_scale(u->scaler) / (double)valid_tokens;
}

fsdp_status fsdp__update_look(fsdp__update *u, fsdp__verdict *out)
{
    int overflow = 0;
    *out = FSDP__GRADIENTS_FINE;
    if (u->c->optimizer.early_step_in_backward) return FSDP_OK; /* they are used up */
    if (u->scaler) FSDP_TRY(fsdp_grad_scaler_unscale(u->scaler, u->opt, &overflow));
    if (overflow) {
        *out = FSDP__GRADIENTS_OVERFLOW;
        return FSDP_OK;
    }
    FSDP_TRY(fsdp_grad_norm(u->model, 2.0, &u->grad_norm));
    if (!isfinite(u->grad_norm)) *out = FSDP__GRADIENTS_BAD;
    return FSDP_OK;
}

fsdp_status fsdp__update_apply(fsdp__update *u)
{
    double max_norm = u->c->training.max_norm;
    if (max_norm > 0) FSDP_TRY(fsdp_clip_grads_with_norm(u->model, max_norm, u->grad_norm));
    if (u->scaler) {
        FSDP_TRY(fsdp_grad_scaler_step(u->scaler, u->opt, NULL));
        FSDP_TRY(fsdp_grad_scaler_update(u->scaler));
    } else {
        FSDP_TRY(fsdp_optimizer_step(u->opt));
    }
    u->skipped_in_row = 0;
    return u->ema ? fsdp_ema_update(u->ema) : FSDP_OK;
}

fsdp_status fsdp__update_skip(fsdp__update *u, int64_t step, bool overflow, const char *why,
                              fsdp__metrics *m)
{
    int64_t most = u->c->training.nonfinite_max_skips;
    u->grad_norm = NAN;
    u->skipped++;
    u->skipped_in_row++;
    if (overflow) {
        double before = fsdp_grad_scaler_get_scale(u->scaler);
        FSDP_TRY(fsdp_grad_scaler_update(u->scaler));
        fsdp__say(m, "step %lld left out: fp16 gradients overflowed; loss scale %g -> %g\n",
                  (long long)step, before, fsdp_grad_scaler_get_scale(u->scaler));
    } else {
        fsdp__say(m, "step %lld left out (%lld so far): %s\n", (long long)step,
                  (long long)u->skipped, why);
    }
    if (u->skipped_in_row <= most) return FSDP_OK;
    return fsdp__fail_alike(
        FSDP_NON_FINITE,
        "step %lld is the %lldth in a row whose gradients are not finite; "
        "training.nonfinite_max_skips is %lld. The weights are those of the last "
        "good step%s",
        (long long)step, (long long)u->skipped_in_row, (long long)most,
        overflow ? "; training.mixed_precision_param bfloat16 needs no loss scale" : "");
}
