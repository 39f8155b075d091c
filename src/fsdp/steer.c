/*
 * steer.c - the public calls that steer units: gather and free by hand, flags, and the reset after
 * an error.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "fsdp/unit.h"

int fsdp_is_sharded_module(const fsdp_module *m)
{
    return fsdp__unit_of(m) != NULL;
}

fsdp_status fsdp__unit_need(fsdp_module *m, const char *what, fsdp__unit **u)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null(what, "the module");
    *u = fsdp__unit_of(m);
    if (*u) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT,
                      "%s: \"%s\" is no sharded module; call "
                      "fsdp_fully_shard on it first",
                      what, fsdp_module_name(m));
}

/* ---- gathering and freeing by hand ------------------------------------------------- */

struct fsdp_unshard_handle {
    fsdp__unit *unit; /* own reference */
    bool gathers;     /* something was gathered for it */
};

/* u and the weights that it shares. */
static fsdp_status gather(fsdp__unit *u, bool *gathers)
{
    *gathers = false;
    for (int k = -1; k < u->n_tied; k++) {
        fsdp__unit *x = k < 0 ? u : u->tied[k];
        fsdp__unit_name_storages(x);
        *gathers = *gathers || x->state != FSDP__WHOLE || fsdp__unit_stale(x);
        FSDP_TRY(fsdp__unit_unshard(x, false));
    }
    return FSDP_OK;
}

fsdp_status fsdp_unshard_async(fsdp_module *m, fsdp_unshard_handle **out)
{
    fsdp__unit *u;
    if (!out) return fsdp__fail_null("fsdp_unshard_async", "the place for the handle");
    *out = NULL;
    FSDP_TRY(fsdp__unit_need(m, "fsdp_unshard_async", &u));
    FSDP_TRY(fsdp__module_name_params(m));
    fsdp_unshard_handle *h = fsdp__calloc(1, sizeof *h, "a handle of a gather");
    if (!h) return fsdp_error();
    fsdp_status s = gather(u, &h->gathers);
    if (s != FSDP_OK) {
        free(h);
        return s;
    }
    h->unit = u;
    u->refs++;
    *out = h;
    return FSDP_OK;
}

fsdp_status fsdp_unshard_wait(fsdp_unshard_handle *h)
{
    if (!h) return fsdp_error() ? fsdp_error() : fsdp__fail_null("fsdp_unshard_wait", "the handle");
    fsdp__unit *u = h->unit;
    fsdp_status s = fsdp_error();
    for (int k = -1; k < u->n_tied && s == FSDP_OK; k++)
        s = fsdp__unit_wait(k < 0 ? u : u->tied[k]);
    if (s == FSDP_OK && u->n_params == 0 && u->n_tied > 0) u->state = FSDP__WHOLE;
    for (int k = -1; k < u->n_tied && s == FSDP_OK && h->gathers; k++)
        if (k < 0 || u->tied[k]->host == u) s = fsdp__unit_let_go(k < 0 ? u : u->tied[k]);
    fsdp__unit_free(u);
    free(h);
    return s;
}

fsdp_status fsdp_unshard(fsdp_module *m)
{
    fsdp_unshard_handle *h;
    FSDP_TRY(fsdp_unshard_async(m, &h));
    return fsdp_unshard_wait(h);
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
    for (int k = 0; u && k < u->n_tied; k++)
        fn(u->tied[k], v);
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
    u->part_mesh = NULL;
}

static void set_reshard_backward(fsdp__unit *u, double v)
{
    u->reshard_backward = v != 0.0;
}

/* Gives shared copies back and frees works, so that comm can start anew; works that were given up
 * say nothing when they are waited for. */
static void drop_all(fsdp__unit *u, double v)
{
    (void)v;
    fsdp__unit_drop_grads(u);
    fsdp__unit_reshard(u);
    u->pre_backward = u->post_backward = false;
    u->open = false;
    u->uses = 0;
    u->n_posts = 0;
    memset(u->ran, 0, (size_t)u->n_modules * sizeof *u->ran);
    fsdp__use_release(u->use);
    u->use = NULL;
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

fsdp_status fsdp_set_reshard_after_backward(fsdp_module *m, int on, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_reshard_after_backward", "the module");
    fsdp__unit_each(m, recurse, set_reshard_backward, on != 0);
    return FSDP_OK;
}

fsdp_status fsdp_set_unshard_in_backward(fsdp_module *m, int on)
{
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, "fsdp_set_unshard_in_backward", &u));
    u->unshard_backward = on != 0;
    return FSDP_OK;
}

static fsdp_status set_list(fsdp_module *m, const char *what, fsdp_module *const *list, int n,
                            int direction)
{
    fsdp__unit *u, *each = NULL;
    fsdp__life **units = NULL;
    FSDP_TRY(fsdp__unit_need(m, what, &u));
    if (n < 0 || (n > 0 && !list))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: %d modules at NULL", what, n);
    if (n > 0 && !(units = fsdp__calloc((size_t)n, sizeof *units, "a prefetch list")))
        return fsdp_error();
    for (int i = 0; i < n; i++)
        if ((list[i] ? fsdp__unit_need(list[i], what, &each)
                     : fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: module %d of the list is NULL", what,
                                  i)) == FSDP_OK) {
            units[i] = fsdp__life_retain(each->life);
        } else {
            fsdp__lives_free(units, i);
            return fsdp_error();
        }
    fsdp__lives_free(u->lists[direction], u->n_lists[direction]);
    u->lists[direction] = units;
    u->n_lists[direction] = n;
    fsdp__tree *t = u->tree;
    if (!t) return FSDP_OK;
    t->explicit_lists = false;
    for (int i = 0; i < t->n_units; i++)
        t->explicit_lists =
            t->explicit_lists || t->units[i]->n_lists[0] > 0 || t->units[i]->n_lists[1] > 0;
    return FSDP_OK;
}

fsdp_status fsdp_set_modules_to_forward_prefetch(fsdp_module *m, fsdp_module *const *list, int n)
{
    return set_list(m, "fsdp_set_modules_to_forward_prefetch", list, n, FSDP__FORWARD);
}

fsdp_status fsdp_set_modules_to_backward_prefetch(fsdp_module *m, fsdp_module *const *list, int n)
{
    return set_list(m, "fsdp_set_modules_to_backward_prefetch", list, n, FSDP__BACKWARD);
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
    /* A tree that is made here has m as its root. */
    for (const fsdp_module *up = m->in->parent; up && !u->tree; up = up->in->parent)
        if (fsdp__unit_of(up))
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "%s: \"%s\" is inside the sharded %s \"%s\"; call it on the root",
                              what, fsdp_module_name(m), up->type, fsdp_module_name(up));
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

fsdp_status fsdp_share_comm_ctx(fsdp_module *const *list, int n)
{
    if (fsdp_error()) return fsdp_error();
    if (n < 0 || (n > 0 && !list))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_share_comm_ctx: %d modules at NULL", n);
    fsdp__tree *first = NULL, *t;
    for (int i = 0; i < n; i++) { /* all of them before any changes */
        FSDP_TRY(tree_of(list[i], "fsdp_share_comm_ctx", &t));
        if (t->root != list[i])
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "fsdp_share_comm_ctx: \"%s\" (number %d) is inside the root \"%s\" "
                              "(%s); give roots only",
                              fsdp_module_name(list[i]), i, fsdp_module_name(t->root),
                              t->root->type);
    }
    for (int i = 0; i < n; i++) {
        FSDP_TRY(tree_of(list[i], "fsdp_share_comm_ctx", &t));
        if (!first) first = t;
        if (t->queue == first->queue) continue;
        FSDP_TRY(fsdp__tree_finish_reduce(t));
        fsdp__queue_release(t->queue);
        t->queue = first->queue;
        t->queue->refs++;
    }
    return FSDP_OK;
}

fsdp_status fsdp_set_post_optim_event(fsdp_module *m, fsdp_event *e)
{
    fsdp__tree *t;
    FSDP_TRY(tree_of(m, "fsdp_set_post_optim_event", &t));
    t->optim_event = e;
    return FSDP_OK;
}

fsdp_status fsdp_register_fsdp_forward_method(fsdp_module *m, const char *name)
{
    if (!m || !name) return fsdp__fail_null("fsdp_register_fsdp_forward_method", "module or name");
    fsdp__unit *u = fsdp__unit_of(m);
    if (!u) return FSDP_OK; /* as FSDP2 */
    fsdp__method_entry *e = fsdp__module_method(m, name);
    if (!e)
        return fsdp__fail(FSDP_NOT_FOUND,
                          "fsdp_register_fsdp_forward_method: %s \"%s\" has no method \"%s\"; add "
                          "it with fsdp_module_add_method first",
                          m->type, fsdp_module_name(m), name);
    e->pre = fsdp__pre_forward;
    e->post = fsdp__post_forward;
    e->arg = u;
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
        t->n_post = 0;
        t->backward++;
        t->optim_event = NULL;
        t->order = NULL;
        t->train.known = t->train.recording = t->eval.known = t->eval.recording = false;
    }
    /* Waiting for what the error broke off has kept it again; this forgets it on all ranks. */
    return fsdp__comm_reset();
}
