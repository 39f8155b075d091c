/*
 * tensor_grad.c - what autograd adds to a tensor: requires_grad, the
 * gradient, hooks; and the mode without gradients.
 */
#include <stdlib.h>

#include "autograd/node.h"
#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"

fsdp_status fsdp_requires_grad_(fsdp_tensor *t, int on)
{
    if (!t) return fsdp__fail_null("fsdp_requires_grad_", "the tensor");
    if (on && !fsdp_dtype_is_floating(t->dtype))
        return fsdp__fail(FSDP_INVALID_DTYPE,
                          "a tensor of dtype %s cannot require a gradient; "
                          "only floating dtypes can",
                          fsdp_dtype_name(t->dtype));
    if (!on && !t->ag) return FSDP_OK;
    fsdp__autograd *ag = fsdp__autograd_of(t);
    if (!ag) return fsdp_error();
    if (!ag->is_leaf)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "requires_grad of the output of %s cannot be set; "
                          "use fsdp_detach",
                          ag->node->name);
    ag->requires_grad = on != 0;
    return FSDP_OK;
}

int fsdp_requires_grad(const fsdp_tensor *t)
{
    return t && t->ag && t->ag->requires_grad;
}

int fsdp_is_leaf(const fsdp_tensor *t)
{
    return t && (!t->ag || t->ag->is_leaf);
}

fsdp_tensor *fsdp_grad(const fsdp_tensor *t)
{
    return t && t->ag ? t->ag->grad : NULL;
}

static fsdp_status differing(const fsdp_tensor *t, const fsdp_tensor *g)
{
    fsdp__str a = {0}, b = {0};
    fsdp__describe(t, &a);
    fsdp__describe(g, &b);
    fsdp__fail(FSDP_INVALID_SHAPE,
               "fsdp_set_grad: the gradient is %s, the tensor %s; sizes must "
               "be equal",
               fsdp__str_get(&b), fsdp__str_get(&a));
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    return fsdp_error();
}

fsdp_status fsdp_set_grad(fsdp_tensor *t, fsdp_tensor *g)
{
    if (!t) return fsdp__fail_null("fsdp_set_grad", "the tensor");
    if (!g && !t->ag) return FSDP_OK;
    if (g && !fsdp__same_sizes(t, g)) return differing(t, g);
    if (g && (!fsdp_dtype_is_floating(g->dtype) || !fsdp__tensor_dense(g)))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_set_grad: the gradient is %s and %scontiguous; expected a floating "
                          "dtype and contiguous elements (fsdp_contiguous): backward adds to it",
                          fsdp_dtype_name(g->dtype), fsdp__tensor_dense(g) ? "" : "not ");
    if (g && g->st->device != t->st->device)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_set_grad: the gradient is on %s and the tensor on %s",
                          fsdp_device_name(g->st->device), fsdp_device_name(t->st->device));
    fsdp__autograd *ag = fsdp__autograd_of(t);
    if (!ag) return fsdp_error();
    if (!ag->is_leaf)
        return fsdp__fail(FSDP_INVALID_STATE, "fsdp_set_grad: only leaves keep a gradient");
    fsdp_retain(g);
    fsdp_release(ag->grad);
    ag->grad = g;
    return FSDP_OK;
}

void fsdp_no_grad_begin(void)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (g) g->no_grad++;
}

void fsdp_no_grad_end(void)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (g && g->no_grad > 0) g->no_grad--;
}

int fsdp_grad_enabled(void)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    return g && g->no_grad == 0;
}

fsdp_status fsdp_register_hook(fsdp_tensor *t, fsdp_grad_hook fn, void *arg)
{
    if (!t || !fn) return fsdp__fail_null("fsdp_register_hook", "tensor or function");
    if (!fsdp_requires_grad(t))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_register_hook: the tensor requires no gradient");
    fsdp__node *n = fsdp__node_of(t);
    if (!n) return fsdp_error();
    FSDP_TRY(FSDP__GROW(n->hooks, n->cap_hooks, n->n_hooks + 1, "gradient hooks"));
    n->hooks[n->n_hooks++] = (fsdp__hook){t->ag->index, fn, arg, NULL};
    return FSDP_OK;
}

fsdp_status fsdp__register_hook_owned(fsdp_tensor *t, fsdp_grad_hook fn, void *arg,
                                      void (*drop)(void *arg))
{
    fsdp_status s = fsdp_register_hook(t, fn, arg);
    if (s != FSDP_OK) {
        drop(arg);
        return s;
    }
    fsdp__node *n = fsdp__node_of(t);
    n->hooks[n->n_hooks - 1].drop = drop;
    return FSDP_OK;
}

fsdp_status fsdp_register_post_accumulate_hook(fsdp_tensor *t, fsdp_accumulate_hook fn, void *arg)
{
    if (!t || !fn)
        return fsdp__fail_null("fsdp_register_post_accumulate_hook", "tensor or function");
    fsdp__autograd *ag = fsdp__autograd_of(t);
    if (!ag) return fsdp_error();
    if (!ag->is_leaf)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_register_post_accumulate_hook: only leaves accumulate");
    FSDP_TRY(FSDP__GROW(ag->post, ag->cap_post, ag->n_post + 1, "accumulate hooks"));
    ag->post[ag->n_post].fn = fn;
    ag->post[ag->n_post++].arg = arg;
    return FSDP_OK;
}

void fsdp__remove_accumulate_hook(fsdp_tensor *t, fsdp_accumulate_hook fn, const void *arg)
{
    fsdp__autograd *ag = t ? t->ag : NULL;
    int64_t kept = 0;
    for (int64_t i = 0; ag && i < ag->n_post; i++)
        if (ag->post[i].fn != fn || ag->post[i].arg != arg) ag->post[kept++] = ag->post[i];
    if (ag) ag->n_post = kept;
}
