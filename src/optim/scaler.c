/*
 * scaler.c - dynamic loss scaling for fp16.
 *
 * Gradients of fp16 activations underflow, so the loss is multiplied by a scale before backward and
 * the gradients are divided by it before anything looks at them. A step whose gradients hold an
 * infinity or a NaN on any rank is skipped by all, and the scale is taken back; after a number of
 * good steps it grows. Scales that are powers of two change no bit of a gradient that is normal.
 */
#include <math.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/finite.h"
#include "base/memory.h"
#include "comm/comm.h"
#include "dtensor/dtensor.h"
#include "nn/module.h"
#include "optim/optim_internal.h"
#include "tensor/kernels.h"

struct fsdp_grad_scaler {
    fsdp_scaler_options o;
    double scale;
    int64_t good;   /* steps without a bad one, since the scale last changed */
    bool unscaled;  /* in this step */
    bool found_inf; /* on some rank */
};

fsdp_scaler_options fsdp_scaler_defaults(void)
{
    return (fsdp_scaler_options){65536.0, 2.0, 0.5, 2000};
}

fsdp_grad_scaler *fsdp_grad_scaler_create(const fsdp_scaler_options *options)
{
    if (fsdp_error()) return NULL;
    fsdp_scaler_options o = options ? *options : fsdp_scaler_defaults();
    if (!(o.init_scale > 0 && o.growth_factor > 1 && o.backoff_factor > 0 && o.backoff_factor < 1 &&
          o.growth_interval > 0)) {
        fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "loss scale %g, growth %g, backoff %g, interval %lld; expected above 0, above 1, "
            "between 0 and 1, and at least 1",
            o.init_scale, o.growth_factor, o.backoff_factor, (long long)o.growth_interval);
        return NULL;
    }
    fsdp_grad_scaler *s = fsdp__calloc(1, sizeof *s, "a loss scale");
    if (!s) return NULL;
    s->o = o;
    s->scale = o.init_scale;
    return s;
}

void fsdp_grad_scaler_free(fsdp_grad_scaler *s)
{
    if (s) (void)fsdp__loss_scaled_set(false);
    free(s);
}

fsdp_tensor *fsdp_grad_scaler_scale(const fsdp_grad_scaler *s, fsdp_tensor *loss)
{
    /* Who uses gradients up during backward must know. */
    if (s && loss && fsdp__loss_scaled_set(true) != FSDP_OK) return NULL;
    return fsdp_scale(loss, s ? s->scale : 1.0);
}

/* ---- agreeing --------------------------------------------------------------------------- */

/* One small all-reduce for each mesh axis over which the parameters are spread. */
static fsdp_status agree(const fsdp_optimizer *o, double *bad)
{
    enum { MOST = 16 };
    fsdp_group *seen[MOST];
    int n = 0;
    for (int64_t i = 0; i < o->n; i++) {
        const fsdp__layout *l = fsdp__layout_of(fsdp__param_kept(o->slots[i].param));
        for (int a = 0; l && a < fsdp_mesh_ndim(l->mesh); a++) {
            fsdp_group *g = fsdp_mesh_group(l->mesh, a);
            bool known = fsdp_group_size(g) == 1;
            for (int k = 0; k < n; k++)
                known = known || seen[k] == g;
            if (known) continue;
            if (n == MOST)
                return fsdp__fail(FSDP_UNSUPPORTED,
                                  "loss scaling over more than %d mesh axes; give the units one "
                                  "mesh",
                                  (int)MOST);
            seen[n++] = g;
        }
    }
    for (int k = 0; k < n; k++)
        FSDP_TRY(fsdp_all_reduce(seen[k], FSDP_LANE_CONTROL, bad, 1, FSDP_F64, FSDP_MAX, NULL));
    return FSDP_OK;
}

fsdp_status fsdp_grad_scaler_unscale(fsdp_grad_scaler *s, fsdp_optimizer *o, int *found_inf)
{
    if (fsdp_error()) return fsdp_error();
    if (!s || !o) return fsdp__fail_null("fsdp_grad_scaler_unscale", "the scaler or the optimizer");
    if (s->unscaled)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_grad_scaler_unscale was called twice in a step; call "
                          "fsdp_grad_scaler_update after each step");
    double bad = 0.0;
    for (int64_t i = 0; i < o->n; i++)
        FSDP_TRY(fsdp__opt_refuse_early(o->slots[i].param, "loss scaling (fsdp_grad_scaler)"));
    for (int64_t i = 0; i < o->n; i++) {
        fsdp_tensor *g = fsdp_grad(fsdp__param_kept(o->slots[i].param));
        if (!g) continue;
        FSDP_TRY(fsdp__storage_use(g->st));
        fsdp__k_unary(FSDP__UNARY_scale, fsdp_data(g), g->dtype, fsdp_numel(g), 1.0 / s->scale,
                      fsdp_data(g));
        fsdp_touch(g);
        if (fsdp__find_non_finite(fsdp_data(g), g->dtype, fsdp_numel(g)) >= 0) bad = 1.0;
        fsdp__storage_done(g->st, true);
    }
    FSDP_TRY(agree(o, &bad));
    s->unscaled = true;
    s->found_inf = bad != 0.0;
    if (found_inf) *found_inf = s->found_inf;
    return FSDP_OK;
}

/* ---- stepping ---------------------------------------------------------------------------- */

fsdp_status fsdp_grad_scaler_step(fsdp_grad_scaler *s, fsdp_optimizer *o, int *stepped)
{
    if (fsdp_error()) return fsdp_error();
    if (!s || !o) return fsdp__fail_null("fsdp_grad_scaler_step", "the scaler or the optimizer");
    if (!s->unscaled) FSDP_TRY(fsdp_grad_scaler_unscale(s, o, NULL));
    if (!s->found_inf) FSDP_TRY(fsdp_optimizer_step(o));
    if (stepped) *stepped = !s->found_inf;
    return FSDP_OK;
}

fsdp_status fsdp_grad_scaler_update(fsdp_grad_scaler *s)
{
    if (fsdp_error()) return fsdp_error();
    if (!s) return fsdp__fail_null("fsdp_grad_scaler_update", "the scaler");
    if (!s->unscaled)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_grad_scaler_update without fsdp_grad_scaler_step or "
                          "fsdp_grad_scaler_unscale before it: nothing is known of the step");
    if (s->found_inf) {
        s->scale *= s->o.backoff_factor;
        s->good = 0;
    } else if (++s->good == s->o.growth_interval) {
        double grown = s->scale * s->o.growth_factor;
        /* The scale is multiplied into f32 numbers. */
        if (isfinite((float)grown)) s->scale = grown;
        s->good = 0;
    }
    s->unscaled = s->found_inf = false;
    return fsdp__loss_scaled_set(false);
}

double fsdp_grad_scaler_get_scale(const fsdp_grad_scaler *s)
{
    return s ? s->scale : 1.0;
}

int64_t fsdp_grad_scaler_growth_tracker(const fsdp_grad_scaler *s)
{
    return s ? s->good : 0;
}

fsdp_status fsdp_grad_scaler_set_state(fsdp_grad_scaler *s, double scale, int64_t tracker)
{
    if (!s) return fsdp__fail_null("fsdp_grad_scaler_set_state", "the scaler");
    if (!(scale > 0 && isfinite(scale)) || tracker < 0)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "loss scale %g after %lld good steps; expected a number above 0 and at "
                          "least 0 steps",
                          scale, (long long)tracker);
    s->scale = scale;
    s->good = tracker;
    return FSDP_OK;
}
