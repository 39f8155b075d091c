/*
 * optimizer.c - AdamW and SGD over whatever part of each parameter is here.
 *
 * State tensors have the shape of the local part and are made, as zeros, at
 * the first step that needs them. Both rules are elementwise, so the cut
 * changes no bit.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "dtensor/dtensor.h"
#include "nn/module.h"
#include "optim/optim_internal.h"
#include "tensor/kernels.h"

fsdp_adamw_options fsdp_adamw_defaults(void)
{
    return (fsdp_adamw_options){1e-3, 0.9, 0.999, 1e-8, 1e-2};
}

fsdp_sgd_options fsdp_sgd_defaults(void)
{
    return (fsdp_sgd_options){1e-3, 0.0, 0.0, 0};
}

static fsdp_optimizer *create(fsdp_module *m)
{
    if (fsdp_error()) return NULL;
    if (!m) {
        fsdp__fail_null("an optimizer", "the module");
        return NULL;
    }
    fsdp_optimizer *o = fsdp__calloc(1, sizeof *o, "an optimizer");
    fsdp_param_list l = {0};
    if (!o || fsdp__module_name_params(m) != FSDP_OK || fsdp_module_params(m, &l) != FSDP_OK)
        goto fail;
    o->slots = fsdp__calloc((size_t)l.count + 1, sizeof *o->slots, "an optimizer");
    if (!o->slots) goto fail;
    for (int64_t i = 0; i < l.count; i++)
        if (l.items[i].param->requires_grad) {
            o->slots[o->n++] = (fsdp__opt_slot){
                .param = fsdp_param_retain(l.items[i].param), .group = -1, .optimizer = o};
            l.items[i].param->optimizers++;
        }
    fsdp_param_list_free(&l);
    if (o->n == 0) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "an optimizer for a module without trainable parameters");
        fsdp_optimizer_free(o);
        return NULL;
    }
    return o;
fail:
    fsdp_param_list_free(&l);
    fsdp_optimizer_free(o);
    return NULL;
}

fsdp_optimizer *fsdp_adamw(fsdp_module *m, const fsdp_adamw_options *opt)
{
    fsdp_adamw_options a = opt ? *opt : fsdp_adamw_defaults();
    if (!(a.lr >= 0 && a.eps >= 0 && a.weight_decay >= 0 && a.beta1 >= 0 && a.beta1 < 1 &&
          a.beta2 >= 0 && a.beta2 < 1)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "adamw: lr %g, betas %g %g, eps %g, weight decay %g; expected lr, eps and decay "
                   ">= 0 and betas in [0, 1)",
                   a.lr, a.beta1, a.beta2, a.eps, a.weight_decay);
        return NULL;
    }
    fsdp_optimizer *o = create(m);
    if (!o) return NULL;
    o->adamw = true;
    o->a = a;
    o->lr = a.lr;
    return o;
}

fsdp_optimizer *fsdp_sgd(fsdp_module *m, const fsdp_sgd_options *opt)
{
    fsdp_sgd_options s = opt ? *opt : fsdp_sgd_defaults();
    if (!(s.lr >= 0 && s.momentum >= 0 && s.weight_decay >= 0) || (s.nesterov && s.momentum == 0)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "sgd: lr %g, momentum %g, weight decay %g, nesterov %d; expected all >= 0, and "
                   "a momentum for nesterov",
                   s.lr, s.momentum, s.weight_decay, s.nesterov);
        return NULL;
    }
    fsdp_optimizer *o = create(m);
    if (!o) return NULL;
    o->s = s;
    o->lr = s.lr;
    return o;
}

void fsdp_optimizer_free(fsdp_optimizer *o)
{
    if (!o) return;
    fsdp__opt_in_backward_end(o);
    for (int64_t i = 0; i < o->n; i++) {
        for (int k = 0; k < FSDP__MAX_STATES; k++)
            fsdp_release(o->slots[i].state[k]);
        o->slots[i].param->optimizers--;
        fsdp_param_release(o->slots[i].param);
    }
    fsdp__opt_offload_close(o);
    fsdp__opt_groups_free(o);
    free(o->slots);
    free(o);
}

/* ---- state ------------------------------------------------------------------------- */

int fsdp_optimizer_state_count(const fsdp_optimizer *o)
{
    if (!o) return 0;
    return o->adamw ? 2 : o->s.momentum != 0.0 ? 1 : 0;
}

const char *fsdp_optimizer_state_name(const fsdp_optimizer *o, int k)
{
    if (!o || k < 0 || k >= fsdp_optimizer_state_count(o)) return "";
    return !o->adamw ? "momentum_buffer" : k == 0 ? "exp_avg" : "exp_avg_sq";
}

static fsdp_tensor *make_state(const fsdp_optimizer *o, fsdp__opt_slot *s, int k)
{
    if (s->state[k]) return s->state[k];
    fsdp_tensor *t = fsdp__param_kept(s->param);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = scope ? fsdp__tensor_alloc(t->dtype, t->ndim, t->size, FSDP_OPTIMIZER, o->file,
                                                s->param->name ? s->param->name : "state")
                           : NULL;
    if (x) { /* in a file it is zeros already */
        if (!fsdp__storage_in_file(x->st)) fsdp__k_fill(fsdp_data(x), x->dtype, fsdp_numel(x), 0.0);
        fsdp__layout_share(x, t);
        s->state[k] = fsdp_retain(x);
    }
    fsdp_scope_end(scope);
    return s->state[k];
}

fsdp_tensor *fsdp_optimizer_state(fsdp_optimizer *o, fsdp_param *p, int k)
{
    if (!o) return NULL;
    if (k < 0 || k >= fsdp_optimizer_state_count(o)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "the optimizer has %d states a parameter, no number %d",
                   fsdp_optimizer_state_count(o), k);
        return NULL;
    }
    for (int64_t i = 0; i < o->n; i++)
        if (o->slots[i].param == p) return make_state(o, &o->slots[i], k);
    fsdp__fail(FSDP_NOT_FOUND, "the optimizer holds no parameter \"%s\"",
               p && p->name ? p->name : "");
    return NULL;
}

/* ---- the step ------------------------------------------------------------------------ */

fsdp_status fsdp__opt_check(const fsdp__opt_slot *s)
{
    const fsdp_tensor *t = fsdp__param_kept(s->param);
    FSDP_TRY(fsdp__tensor_has_values(t, "optimizer step"));
    if (s->param->averaged)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "an optimizer step while a moving average has the place of %s; call "
                          "fsdp_ema_swap_out first",
                          s->param->name);
    for (int k = 0; k < FSDP__MAX_STATES; k++)
        if (s->state[k] && !fsdp__same_sizes(s->state[k], t))
            return fsdp__fail(FSDP_INVALID_STATE,
                              "the optimizer was made before %s was sharded; make it after "
                              "fsdp_fully_shard",
                              s->param->name);
    return FSDP_OK;
}

fsdp_status fsdp__opt_update(fsdp_optimizer *o, fsdp__opt_slot *s, int64_t step)
{
    fsdp_tensor *p = fsdp__param_kept(s->param), *g = fsdp_grad(p), *state[FSDP__MAX_STATES] = {0};
    for (int k = 0; k < fsdp_optimizer_state_count(o); k++)
        if (!(state[k] = make_state(o, s, k))) return fsdp_error();
    FSDP_TRY(fsdp__opt_hold(s));
    fsdp_group_options set = fsdp__opt_settings(o, s);
    double lr = o->lr * set.lr_factor;
    if (o->adamw) {
        fsdp__adamw a = {lr, set.beta1, set.beta2, set.eps, set.weight_decay, 1.0, step};
        fsdp__k_adamw(&a, fsdp_data(p), fsdp_data(state[0]), fsdp_data(state[1]), p->dtype,
                      fsdp_data(g), g->dtype, fsdp_numel(p));
    } else {
        fsdp__sgd r = {lr, set.momentum, set.weight_decay, 1.0, o->s.nesterov, step};
        fsdp__k_sgd(&r, fsdp_data(p), fsdp_data(state[0]), p->dtype, fsdp_data(g), g->dtype,
                    fsdp_numel(p));
    }
    fsdp__opt_let(s, true);
    return FSDP_OK;
}

fsdp_status fsdp__opt_refuse_unreduced(const fsdp_param *p, const char *what)
{
    if (!fsdp__param_unreduced(p)) return FSDP_OK;
    return fsdp__fail(
        FSDP_INVALID_STATE,
        "%s finds no gradient, and that of %s was not summed over the ranks yet: turn "
        "fsdp_set_requires_gradient_sync (and fsdp_set_requires_all_reduce) on for "
        "the last backward of a step",
        what, p->name);
}

/* A step without any gradient is one, unless they only wait for a reduction. */
static fsdp_status check_reduced(const fsdp_optimizer *o)
{
    for (int64_t i = 0; i < o->n; i++)
        if (o->slots[i].stepped || fsdp_grad(fsdp__param_kept(o->slots[i].param))) return FSDP_OK;
    for (int64_t i = 0; i < o->n; i++)
        FSDP_TRY(fsdp__opt_refuse_unreduced(o->slots[i].param, "fsdp_optimizer_step"));
    return FSDP_OK;
}

fsdp_status fsdp_optimizer_step(fsdp_optimizer *o)
{
    if (fsdp_error()) return fsdp_error();
    if (!o) return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_optimizer_step: no optimizer");
    for (int64_t i = 0; i < o->n; i++)
        FSDP_TRY(fsdp__opt_check(&o->slots[i]));
    FSDP_TRY(check_reduced(o));
    /* All memory first: a step that fails for want of it changes nothing. */
    for (int64_t i = 0; i < o->n; i++)
        for (int k = 0; k < fsdp_optimizer_state_count(o); k++)
            if (fsdp_grad(fsdp__param_kept(o->slots[i].param)) && !make_state(o, &o->slots[i], k))
                return fsdp_error();
    o->steps++;
    for (int64_t i = 0; i < o->n; i++) {
        fsdp_tensor *p = fsdp__param_kept(o->slots[i].param);
        fsdp__opt_ahead(o, i);
        if (fsdp_grad(p)) FSDP_TRY(fsdp__opt_update(o, &o->slots[i], o->steps));
        o->slots[i].stepped = false;
        /* Stale for all ranks alike, whether this one had a gradient or not. */
        fsdp_touch(p);
    }
    return FSDP_OK;
}

void fsdp_optimizer_set_lr(fsdp_optimizer *o, double lr)
{
    if (!o) return;
    if (isfinite(lr) && lr >= 0)
        o->lr = lr;
    else
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "fsdp_optimizer_set_lr: the rate is %g; expected a number from 0", lr);
}

double fsdp_optimizer_lr(const fsdp_optimizer *o)
{
    return o ? o->lr : 0.0;
}

int64_t fsdp_optimizer_step_count(const fsdp_optimizer *o)
{
    return o ? o->steps : 0;
}

void fsdp_optimizer_set_step_count(fsdp_optimizer *o, int64_t n)
{
    if (o) o->steps = n;
}
