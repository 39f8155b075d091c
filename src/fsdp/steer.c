/*
 * steer.c - the public calls that steer units: gather and free by hand, flags, and the reset after
 * an error.
 */
#include "base/error.h"
#include "fsdp/unit.h"

int fsdp_is_sharded_module(const fsdp_module *m)
{
    return fsdp__unit_of(m) != NULL;
}

fsdp_status fsdp__unit_need(fsdp_module *m, const char *what, fsdp__unit **u)
{
    if (fsdp_error()) return fsdp_error();
    *u = fsdp__unit_of(m);
    if (*u) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT,
                      "%s: \"%s\" is no sharded module; call "
                      "fsdp_fully_shard on it first",
                      what, m ? fsdp_module_name(m) : "(null)");
}

fsdp_status fsdp_unshard(fsdp_module *m)
{
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, "fsdp_unshard", &u));
    FSDP_TRY(fsdp__module_name_params(m));
    fsdp__unit_name_storages(u);
    bool gathers = u->state != FSDP__WHOLE || fsdp__unit_stale(u);
    FSDP_TRY(fsdp__unit_unshard(u, false));
    FSDP_TRY(fsdp__unit_wait(u));
    return gathers ? fsdp__unit_let_go(u) : FSDP_OK;
}

fsdp_status fsdp_reshard(fsdp_module *m)
{
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, "fsdp_reshard", &u));
    return fsdp__unit_reshard(u);
}

void fsdp__unit_each(fsdp_module *m, int recurse, void (*fn)(fsdp__unit *u, double v), double v)
{
    fsdp__unit *u = fsdp__unit_of(m);
    if (u) fn(u, v);
    for (int64_t i = 0; recurse && i < m->in->n_children; i++)
        fsdp__unit_each(m->in->children[i], recurse, fn, v);
}

static void set_sync(fsdp__unit *u, double v)
{
    u->sync = u->all_reduce = v != 0.0;
}

static void set_keep(fsdp__unit *u, double v)
{
    u->opt.reshard_after_forward = v != 0.0 ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
    u->keep = v == 0.0;
}

/* Gives shared copies back and frees works, so that comm can start anew; works that were given up
 * say nothing when they are waited for. */
static void drop_all(fsdp__unit *u, double v)
{
    (void)v;
    fsdp__unit_drop_grads(u);
    fsdp__unit_reshard(u);
    u->pre_backward = u->post_backward = false;
}

static void mark_changed(fsdp__unit *u, double v)
{
    (void)v;
    for (int i = 0; i < u->n_params; i++)
        fsdp_touch(u->params[i].sharded);
}

fsdp_status fsdp_set_requires_gradient_sync(fsdp_module *m, int on, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_requires_gradient_sync", "the module");
    fsdp__unit_each(m, recurse, set_sync, on);
    return FSDP_OK;
}

fsdp_status fsdp_set_reshard_after_forward(fsdp_module *m, int on, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_reshard_after_forward", "the module");
    fsdp__unit_each(m, recurse, set_keep, on != 0);
    return FSDP_OK;
}

fsdp_status fsdp_mark_changed(fsdp_module *m)
{
    if (!m) return fsdp__fail_null("fsdp_mark_changed", "the module");
    fsdp__unit_each(m, 1, mark_changed, 0.0);
    return FSDP_OK;
}

/* The tree of which m is the root, made if need be. */
static fsdp_status tree_of(fsdp_module *m, const char *what, fsdp__tree **t)
{
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, what, &u));
    if (!u->tree) FSDP_TRY(fsdp__tree_init(m));
    *t = u->tree;
    return FSDP_OK;
}

fsdp_status fsdp_set_is_last_backward(fsdp_module *m, int on)
{
    fsdp__tree *t;
    FSDP_TRY(tree_of(m, "fsdp_set_is_last_backward", &t));
    t->last_backward = on != 0;
    return FSDP_OK;
}

fsdp_status fsdp_set_event_hook(fsdp_module *m, fsdp_event_fn fn, void *arg)
{
    fsdp__tree *t;
    FSDP_TRY(tree_of(m, "fsdp_set_event_hook", &t));
    t->event = fn;
    t->event_arg = arg;
    return FSDP_OK;
}

fsdp_status fsdp_reset_iteration(fsdp_module *m)
{
    if (!m) return fsdp__fail_null("fsdp_reset_iteration", "the module");
    fsdp_error_clear();
    fsdp__unit_each(m, 1, drop_all, 0.0);
    fsdp__unit *u = fsdp__unit_of(m);
    if (u && u->tree) {
        fsdp__tree *t = u->tree;
        t->forward_root = NULL;
        t->callback_queued = false;
        t->ahead = 0;
        t->order = NULL;
        t->train.known = t->train.recording = t->eval.known = t->eval.recording = false;
    }
    /* Waiting for what the error broke off has kept it again; this forgets it on all ranks. */
    return fsdp__comm_reset();
}
