/*
 * in_backward.c - updates during backward, each parameter's when its gradient is there.
 *
 * A hook on what keeps the gradient (the shard) does the update and frees the gradient, as number
 * steps + 1; fsdp_optimizer_step ends the step. Under fully_shard the hook runs when the unit's
 * gradients are reduced: by then every rank of the group has computed with the unit for the last
 * time in this backward, so no rank can still read the shard.
 *
 * Invariant: a parameter is updated at most once a step, so a second gradient in one is refused
 * before anything is changed by it.
 */
#include "autograd/node.h"
#include "base/error.h"
#include "nn/module.h"
#include "optim/optim_internal.h"

#define SCALING "loss scaling (fsdp_grad_scaler)"

static fsdp_status step_now(void *arg, fsdp_tensor *leaf)
{
    fsdp__opt_slot *s = arg;
    fsdp_optimizer *o = s->optimizer;
    if (!fsdp_grad(leaf)) return FSDP_OK;
    if (s->stepped)
        return fsdp__fail(
            FSDP_INVALID_STATE,
            "%s got a second gradient in one step, and fsdp_optimizer_in_backward has used the "
            "first up: to accumulate gradients, turn fsdp_set_requires_gradient_sync off for all "
            "backwards but the last, or turn fsdp_optimizer_in_backward off; and call "
            "fsdp_optimizer_step after each step",
            s->param->name);
    if (fsdp__loss_scaled()) return fsdp__opt_refuse_early(s->param, SCALING);
    FSDP_TRY(fsdp__opt_check(s));
    FSDP_TRY(fsdp__opt_update(o, s, o->steps + 1));
    s->stepped = true;
    FSDP_TRY(fsdp_set_grad(leaf, NULL));
    fsdp_touch(leaf);
    return FSDP_OK;
}

fsdp_status fsdp__opt_refuse_early(const fsdp_param *p, const char *what)
{
    if (!p->early_step) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_STATE,
                      "%s and fsdp_optimizer_in_backward do not go together: the first needs all "
                      "gradients after backward, and the second uses that of %s up during it; "
                      "leave one of them out",
                      what, p->name);
}

void fsdp__opt_in_backward_end(fsdp_optimizer *o)
{
    if (!o->in_backward) return;
    for (int64_t i = 0; i < o->n; i++) {
        fsdp__opt_slot *s = &o->slots[i];
        fsdp__remove_accumulate_hook(fsdp__param_kept(s->param), step_now, s);
        s->param->early_step = false;
    }
    o->in_backward = false;
}

fsdp_status fsdp_optimizer_in_backward(fsdp_optimizer *o, int on)
{
    if (fsdp_error()) return fsdp_error();
    if (!o) return fsdp__fail_null("fsdp_optimizer_in_backward", "the optimizer");
    for (int64_t i = 0; i < o->n; i++)
        if (o->slots[i].stepped)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "fsdp_optimizer_in_backward inside a step: %s is updated already; "
                              "call fsdp_optimizer_step first",
                              o->slots[i].param->name);
    if (!on) {
        fsdp__opt_in_backward_end(o);
        return FSDP_OK;
    }
    if (o->in_backward) return FSDP_OK;
    for (int64_t i = 0; i < o->n; i++)
        if (o->slots[i].param->early_step)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "fsdp_optimizer_in_backward: another optimizer updates %s during "
                              "backward already",
                              o->slots[i].param->name);
    o->in_backward = true;
    for (int64_t i = 0; i < o->n; i++) {
        fsdp__opt_slot *s = &o->slots[i];
        if (fsdp_register_post_accumulate_hook(fsdp__param_kept(s->param), step_now, s) !=
            FSDP_OK) {
            fsdp__opt_in_backward_end(o);
            return fsdp_error();
        }
        s->param->early_step = true;
    }
    return FSDP_OK;
}
