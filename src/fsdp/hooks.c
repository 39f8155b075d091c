/*
 * hooks.c - what drives the units: forward hooks on the modules, a gradient
 * hook on each output, and one node a module through which its inputs pass.
 *
 *     forward   pre-forward   gathers, waits, gathers ahead
 *               post-forward  frees, unless the unit is kept
 *     backward  pre-backward  first gradient of an output: gathers, waits
 *               post-backward the input nodes run when the modules' own
 *                             backward is complete: frees, reduces
 *     end       the final callback does post-backward for units whose inputs
 *               needed no gradient, and finishes the last reduction
 *
 * A pass goes from the first module of a unit that is entered to the last that
 * has run; of one module these are the same. What a pass left open the forward
 * root closes: the first module entered, whose unit's pass it closes too, so a
 * module of a list may be called alone. A recomputed forward, inside backward,
 * only gathers and casts.
 */
#include "fsdp/unit.h"

#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"

static fsdp_status end_backward(void *tree);

/* ---- what is needed now ------------------------------------------------------------ */

static fsdp_status make_whole(fsdp__unit *u)
{
    fsdp__tree *t = u->tree;
    if (u->state == FSDP__WHOLE && fsdp__unit_stale(u)) FSDP_TRY(fsdp__unit_reshard(u));
    if (u->state == FSDP__WHOLE) return FSDP_OK;
    if (u->n_params == 0) { /* all that it has are tied weights */
        if (u->n_tied > 0) u->state = FSDP__WHOLE;
        return FSDP_OK;
    }
    FSDP_TRY(fsdp__order_need(t, u));
    if (u->state == FSDP__GATHERING && u->prefetched) {
        bool told = u->told;
        u->prefetched = u->told = false;
        t->ahead--;
        if (!told) fsdp__event(u, FSDP_EVENT_UNSHARD);
    }
    FSDP_TRY(fsdp__unit_unshard(u, false));
    return fsdp__unit_wait(u);
}

static fsdp_status need(fsdp__unit *u)
{
    FSDP_TRY(make_whole(u));
    for (int i = 0; i < u->n_tied; i++)
        FSDP_TRY(make_whole(u->tied[i]));
    return FSDP_OK;
}

/* ---- backward ------------------------------------------------------------------- */

fsdp_status fsdp__tree_await_end(fsdp__tree *t)
{
    if (t->callback_queued) return FSDP_OK;
    FSDP_TRY(fsdp_queue_callback(end_backward, t));
    t->callback_queued = true;
    return FSDP_OK;
}

/* The unit of a graph that may have outlived it. */
static fsdp__unit *living(const fsdp__life *l)
{
    if (!l->of)
        fsdp__fail(FSDP_INVALID_STATE,
                   "backward through a sharded module that was freed after its forward; free "
                   "modules when no loss of theirs is left to go backward from");
    return l->of;
}

static fsdp_tensor *pre_backward(void *arg, fsdp_tensor *grad)
{
    (void)grad;
    fsdp__unit *u = living(arg);
    if (!u) return NULL;
    fsdp__tree *t = u->tree;
    if (fsdp__tree_await_end(t) != FSDP_OK) return NULL;
    if (u->pre_backward && !u->post_backward) return NULL; /* another output of the same use */
    fsdp__event(u, FSDP_EVENT_PRE_BACKWARD);
    u->pre_backward = true;
    u->post_backward = false;
    fsdp__tied_pre_backward(u);
    if (u->unshard_backward && need(u) != FSDP_OK) return NULL;
    fsdp__order_prefetch(t, u, FSDP__BACKWARD);
    return NULL;
}

/* u's part in this backward is over, as far as is known. */
static fsdp_status post_backward(fsdp__unit *u)
{
    bool ran = u->pre_backward;
    if (u->n_users > 0) return fsdp__tied_reduce(u);
    FSDP_TRY(fsdp__unit_post_backward(u));
    return ran ? fsdp__tied_post_backward(u) : FSDP_OK;
}

void fsdp__use_release(fsdp__use *use)
{
    if (!use || --use->refs > 0) return;
    fsdp__life_release(use->unit);
    free(use);
}

static void release_use(void *use)
{
    fsdp__use_release(use);
}

static fsdp_status input_node_backward(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp__use *use = n->extra;
    fsdp__unit *u = living(use->unit);
    if (!u) return fsdp_error();
    for (int k = 0; k < n->n_in; k++)
        if (gout[k] && fsdp__grad_wanted(n, k)) FSDP_TRY(fsdp__grad_give(n, k, gout[k]));
    if (use->backward != u->tree->backward) {
        use->backward = u->tree->backward;
        use->done = 0;
    }
    if (++use->done < use->nodes || use->at_end) return FSDP_OK;
    if (!u->pre_backward || u->post_backward) return FSDP_OK;
    return post_backward(u);
}

static fsdp_status end_backward(void *arg)
{
    fsdp__tree *t = arg;
    fsdp_status s = FSDP_OK;
    for (int tied = 0; tied < 2; tied++) /* tied weights after all that use them */
        for (int i = 0; i < t->n_units && s == FSDP_OK; i++)
            if (!t->units[i]->post_backward && (t->units[i]->n_users > 0) == (tied > 0))
                s = post_backward(t->units[i]);
    for (int i = 0; i < t->n_units && s == FSDP_OK; i++)
        s = fsdp__leaf_end(t->units[i]);
    if (s == FSDP_OK && t->last_backward) s = fsdp__tree_finish_reduce(t);
    for (int i = 0; i < t->n_units; i++)
        t->units[i]->pre_backward = t->units[i]->post_backward = false;
    t->callback_queued = false;
    t->backward++;
    if (t->last_backward && s == FSDP_OK) {
        fsdp__order_forget_posts(t);
        s = fsdp__order_end(t);
    }
    if (s == FSDP_OK && t->n_units > 0) fsdp__event(t->units[0], FSDP_EVENT_ROOT_POST_BACKWARD);
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

/* The use of the open pass, made with its first node. */
static fsdp__use *use_of(fsdp__unit *u)
{
    if (u->use) return u->use;
    u->use = fsdp__calloc(1, sizeof *u->use, "a use of a unit");
    if (!u->use) return NULL;
    u->use->unit = fsdp__life_retain(u->life);
    u->use->refs = 1;
    return u->use;
}

/* All inputs that need a gradient pass through one node. */
static fsdp_status pass_inputs(fsdp__unit *u, fsdp_values *in)
{
    bool any = false;
    for (int k = 0; k < in->n; k++)
        any = any || fsdp_requires_grad(in->t[k]);
    if (!fsdp_grad_enabled()) return FSDP_OK;
    fsdp__use *use = use_of(u);
    if (!use) return fsdp_error();
    use->at_end = use->at_end || !any;
    if (!any) return FSDP_OK;
    fsdp__node *n = fsdp__node_create("fully_shard inputs", input_node_backward);
    if (!n) return fsdp_error();
    n->extra = use;
    n->extra_free = release_use;
    n->runs_always = true;
    use->refs++;
    use->nodes++;
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

/* The first module of all that is entered: once a forward. */
static fsdp_status root_pre_forward(fsdp__tree *t, fsdp__unit *u)
{
    t->forward_root = u;
    fsdp__event(u, FSDP_EVENT_ROOT_PRE_FORWARD);
    fsdp__order_begin(t, fsdp_grad_enabled() != 0);
    fsdp__buffers_note(t);
    fsdp_event *e = t->optim_event;
    t->optim_event = NULL;
    return e ? fsdp_event_wait(e, NULL) : FSDP_OK;
}

fsdp_status fsdp__pre_forward(void *arg, fsdp_module *m, fsdp_values *in)
{
    fsdp__unit *u = arg;
    if (u->summoned) return fsdp__summoned_forward(u);
    if (!u->tree) FSDP_TRY(fsdp__tree_init(m));
    fsdp__tree *t = u->tree;
    const fsdp_mixed_precision_policy *mp = &u->opt.mp_policy;
    fsdp_dtype cast = mp->cast_forward_inputs ? mp->param_dtype : FSDP_DTYPE_NONE;
    if (fsdp_in_backward()) { /* recompute */
        FSDP_TRY(need(u));
        return cast_all(in, cast);
    }
    if (!t->forward_root) FSDP_TRY(root_pre_forward(t, u));
    FSDP_TRY(fsdp_comm_progress());
    bool first = !u->open;
    u->open = true;
    if (first) fsdp__event(u, FSDP_EVENT_PRE_FORWARD);
    FSDP_TRY(need(u));
    if (first) FSDP_TRY(fsdp__order_prefetch(t, u, FSDP__FORWARD));
    FSDP_TRY(cast_all(in, cast));
    return pass_inputs(u, in);
}

/* The open pass of u is over. */
static fsdp_status end_pass(fsdp__unit *u, bool grad)
{
    u->open = false;
    memset(u->ran, 0, (size_t)u->n_modules * sizeof *u->ran);
    fsdp__use_release(u->use);
    u->use = NULL;
    /* Without a backward to come even the root is freed, unless it was asked to stay. */
    bool stays = u->keep && (grad || u->opt.reshard_after_forward == FSDP_RESHARD_NEVER);
    if (!stays) FSDP_TRY(grad ? fsdp__unit_reshard_to_parts(u) : fsdp__unit_reshard(u));
    fsdp__event(u, FSDP_EVENT_POST_FORWARD);
    if (!grad) return FSDP_OK;
    fsdp__tied_forward(u);
    return fsdp__order_post(u->tree, u);
}

/* The forward ends: passes in which some module of a list did not run end too, inner ones first. */
static fsdp_status close_all(fsdp__tree *t, bool grad)
{
    for (int i = t->n_units - 1; i >= 0; i--) {
        if (!t->units[i]->open || t->units[i] == t->forward_root) continue;
        fsdp__event(t->units[i], FSDP_EVENT_FORCE_COMPLETE);
        FSDP_TRY(end_pass(t->units[i], grad));
    }
    return FSDP_OK;
}

fsdp_status fsdp__post_forward(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)in;
    fsdp__unit *u = arg;
    fsdp__tree *t = u->tree;
    bool grad = fsdp_grad_enabled() != 0, all = true;
    if (u->summoned || fsdp_in_backward()) return cast_all(out, u->opt.mp_policy.output_dtype);
    for (int k = 0; k < u->n_modules; k++) {
        u->ran[k] = u->ran[k] || u->modules[k] == m;
        all = all && u->ran[k];
    }
    bool root = t->forward_root == u;
    if (root) FSDP_TRY(close_all(t, grad));
    if (all || root) FSDP_TRY(end_pass(u, grad));
    for (int k = 0; k < out->n && grad; k++)
        if (fsdp_requires_grad(out->t[k]))
            FSDP_TRY(fsdp__register_hook_owned(out->t[k], pre_backward, fsdp__life_retain(u->life),
                                               fsdp__life_release));
    if (root) {
        t->forward_root = NULL;
        if (grad) FSDP_TRY(fsdp__buffers_follow_rules(t));
        if (!grad) FSDP_TRY(fsdp__order_end(t));
    }
    return cast_all(out, u->opt.mp_policy.output_dtype);
}

static void remove_hooks(fsdp_module *m, const fsdp__unit *u)
{
    for (int64_t i = m->in->n_hooks - 1; i >= 0; i--)
        if (m->in->hooks[i].arg == u) fsdp_remove_hook(m, m->in->hooks[i].number);
}

fsdp_status fsdp__hooks_install(fsdp__unit *u)
{
    for (int k = 0; k < u->n_modules; k++) {
        fsdp_module *m = u->modules[k];
        if (fsdp_register_forward_pre_hook(m, fsdp__pre_forward, u, 1) >= 0 &&
            fsdp_register_forward_hook(m, fsdp__post_forward, u, 0) >= 0)
            continue;
        for (; k >= 0; k--)
            remove_hooks(u->modules[k], u);
        return fsdp_error();
    }
    return FSDP_OK;
}
