/*
 * hooks.c - what drives the units: forward hooks on the module, a gradient
 * hook on each output, and one node through which its inputs pass.
 *
 *     forward   pre-forward   gathers, waits, gathers ahead
 *               post-forward  frees, unless the unit is kept
 *     backward  pre-backward  first gradient of an output: gathers, waits
 *               post-backward the input node runs when the module's own
 *                             backward is complete: frees, reduces
 *     end       the final callback does post-backward for units whose inputs
 *               needed no gradient, and finishes the last reduction
 */
#include "fsdp/unit.h"

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"

static fsdp_status end_backward(void *tree);

/* ---- backward ------------------------------------------------------------------- */

static fsdp_status need(fsdp__unit *u)
{
    fsdp__tree *t = u->tree;
    if (u->state == FSDP__WHOLE && fsdp__unit_stale(u)) FSDP_TRY(fsdp__unit_reshard(u));
    if (u->state != FSDP__WHOLE && u->n_params > 0) {
        FSDP_TRY(fsdp__order_need(t, u));
        if (u->state == FSDP__GATHERING && u->prefetched) {
            u->prefetched = false;
            t->ahead--;
            fsdp__event(u, FSDP_EVENT_UNSHARD);
        }
        FSDP_TRY(fsdp__unit_unshard(u, false));
        FSDP_TRY(fsdp__unit_wait(u));
    }
    return fsdp__order_prefetch(t, u);
}

fsdp_status fsdp__tree_await_end(fsdp__tree *t)
{
    if (t->callback_queued) return FSDP_OK;
    FSDP_TRY(fsdp_queue_callback(end_backward, t));
    t->callback_queued = true;
    return FSDP_OK;
}

static fsdp_tensor *pre_backward(void *arg, fsdp_tensor *grad)
{
    (void)grad;
    fsdp__unit *u = arg;
    fsdp__tree *t = u->tree;
    if (fsdp__tree_await_end(t) != FSDP_OK) return NULL;
    if (u->pre_backward && !u->post_backward) return NULL; /* another output of the same use */
    u->pre_backward = true;
    u->post_backward = false;
    need(u);
    return NULL;
}

static fsdp_status input_node_backward(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp__unit *u = n->extra;
    for (int k = 0; k < n->n_in; k++)
        if (gout[k] && fsdp__grad_wanted(n, k)) FSDP_TRY(fsdp__grad_give(n, k, gout[k]));
    if (!u->pre_backward || u->post_backward) return FSDP_OK;
    return fsdp__unit_post_backward(u);
}

static fsdp_status end_backward(void *arg)
{
    fsdp__tree *t = arg;
    fsdp_status s = FSDP_OK;
    for (int i = 0; i < t->n_units && s == FSDP_OK; i++)
        if (!t->units[i]->post_backward) s = fsdp__unit_post_backward(t->units[i]);
    if (s == FSDP_OK && t->last_backward) s = fsdp__tree_finish_reduce(t);
    for (int i = 0; i < t->n_units; i++)
        t->units[i]->pre_backward = t->units[i]->post_backward = false;
    t->callback_queued = false;
    if (t->last_backward && s == FSDP_OK) s = fsdp__order_end(t);
    return s;
}

/* ---- forward ------------------------------------------------------------------------ */

static bool is_floating(const fsdp_tensor *t)
{
    return t && fsdp_dtype_is_floating(t->dtype);
}

static fsdp_status cast_all(fsdp_values *v, fsdp_dtype t)
{
    if (t == FSDP_DTYPE_NONE) return FSDP_OK;
    for (int k = 0; k < v->n; k++)
        if (is_floating(v->t[k]) && !(v->t[k] = fsdp_cast(v->t[k], t))) return fsdp_error();
    return FSDP_OK;
}

_Static_assert(FSDP_VALUES_MAX <= FSDP__OP_MAX_IN && FSDP_VALUES_MAX <= FSDP_CUSTOM_MAX,
               "a node has an edge and a slot for each input of a module");

/* All inputs that need a gradient pass through one node. */
static fsdp_status pass_inputs(fsdp__unit *u, fsdp_values *in)
{
    bool any = false;
    for (int k = 0; k < in->n; k++)
        any = any || fsdp_requires_grad(in->t[k]);
    if (!any || !fsdp_grad_enabled()) return FSDP_OK;
    fsdp__node *n = fsdp__node_create("fully_shard inputs", input_node_backward);
    if (!n) return fsdp_error();
    n->extra = u;
    n->runs_always = true;
    fsdp_status s = FSDP_OK;
    for (int k = 0, j = 0; k < in->n; k++) {
        if (!fsdp_requires_grad(in->t[k])) continue;
        FSDP_GO(fsdp__node_input(n, j, in->t[k]));
        fsdp_tensor *twin = fsdp_detach(in->t[k]);
        FSDP_GO(twin ? fsdp__node_output(n, j, twin) : fsdp_error());
        in->t[k] = twin;
        j++;
    }
done:
    fsdp__node_release(n);
    return s;
}

static fsdp_status pre_forward(void *arg, fsdp_module *m, fsdp_values *in)
{
    fsdp__unit *u = arg;
    if (!u->tree) FSDP_TRY(fsdp__tree_init(m));
    fsdp__tree *t = u->tree;
    if (!t->forward_root && !fsdp_in_backward()) {
        t->forward_root = u;
        fsdp__order_begin(t, fsdp_grad_enabled() != 0);
    }
    FSDP_TRY(fsdp_comm_progress());
    FSDP_TRY(need(u));
    if (u->opt.mp_policy.cast_forward_inputs) FSDP_TRY(cast_all(in, u->opt.mp_policy.param_dtype));
    return pass_inputs(u, in);
}

static fsdp_status post_forward(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)m;
    (void)in;
    fsdp__unit *u = arg;
    fsdp__tree *t = u->tree;
    bool grad = fsdp_grad_enabled() != 0;
    /* Without a backward to come even the root is freed, unless it was asked to stay. */
    bool stays = u->keep && (grad || u->opt.reshard_after_forward == FSDP_RESHARD_NEVER);
    if (!stays && !fsdp_in_backward()) FSDP_TRY(fsdp__unit_reshard(u));
    for (int k = 0; k < out->n && grad; k++)
        if (fsdp_requires_grad(out->t[k])) FSDP_TRY(fsdp_register_hook(out->t[k], pre_backward, u));
    if (t->forward_root == u) {
        t->forward_root = NULL;
        if (!grad) FSDP_TRY(fsdp__order_end(t));
    }
    return cast_all(out, u->opt.mp_policy.output_dtype);
}

fsdp_status fsdp__hooks_install(fsdp__unit *u)
{
    int pre = fsdp_register_forward_pre_hook(u->module, pre_forward, u, 1);
    if (pre < 0) return fsdp_error();
    if (fsdp_register_forward_hook(u->module, post_forward, u, 0) >= 0) return FSDP_OK;
    fsdp_remove_hook(u->module, pre);
    return fsdp_error();
}
