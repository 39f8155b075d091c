/*
 * reduce.c - gradients: where they are born, and how they reach the shards.
 *
 * Backward writes a parameter's whole gradient, in the reduce dtype, into
 * memory that peers can read; post-backward sums the ranks' gradients straight
 * into each owner's shard gradient, or into sums that go over the replicas
 * next (replicas.c). A unit's reduction has two stages, SCATTER and REPLICAS,
 * and either may stay unfinished while later units compute:
 *
 *     SCATTER    peers read the whole gradients; at most max_reductions of a
 *                tree are in it (1 unless told otherwise)
 *     REPLICAS   at most one of a tree; a unit without shards is here from the
 *                start, with its whole gradients, and counts as the former too
 *
 * Invariants: a whole gradient has bytes exactly from its first write to the
 * end of the stage that reads it, and is not written while it is read; units
 * leave the queue in the order in which they came.
 */
#include "fsdp/unit.h"

#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/convert.h"

static fsdp_status finish_up_to(fsdp__unit *u);

/* Peers read u's whole gradients. */
static bool holds_whole(const fsdp__unit *u)
{
    return u->stage == FSDP__REDUCE_SCATTER || (u->stage == FSDP__REDUCE_REPLICAS && !u->sums);
}

fsdp_tensor *fsdp__grad_place(void *arg, int *add)
{
    fsdp__fparam *p = arg;
    fsdp__unit *u = p->unit;
    if (u->n_users > 0 && !u->host)
        u->post_backward = false; /* a use of a tied weight that was not foreseen */
    if (u->post_backward && u->sync) {
        fsdp__fail(FSDP_INVALID_STATE,
                   "%s gets a gradient after the gradients of its unit \"%s\" were reduced: it is "
                   "used outside its module's forward; shard the modules that share it as one unit",
                   p->param->name, u->name);
        return NULL;
    }
    if (!u->tree) {
        fsdp__fail(
            FSDP_INVALID_STATE,
            "%s gets a gradient and no forward of its unit \"%s\" has run yet: call the root "
            "module first, and use parameters inside their module's forward",
            p->param->name, u->name);
        return NULL;
    }
    /* Used by hand, outside of any forward: nothing else sees to its reduction. */
    if (fsdp__tree_await_end(u->tree) != FSDP_OK) return NULL;
    /* A unit that runs twice in one graph, or a second backward: peers may still read what the
     * first left here. */
    if (holds_whole(u) && finish_up_to(u) != FSDP_OK) return NULL;
    *add = fsdp__storage_filled(p->grad->st);
    if (fsdp__storage_fill(p->grad->st, NULL, p->param->name) != FSDP_OK) return NULL;
    p->got_grad = true;
    return p->grad;
}

/* The shard's gradient, made if there is none. */
fsdp_tensor *fsdp__shard_grad(fsdp__fparam *p)
{
    fsdp_tensor *g = fsdp_grad(p->sharded);
    p->fresh_shard_grad = !g;
    if (g) return fsdp__offload_hold_grad(p) == FSDP_OK ? g : NULL;
    fsdp_scope *scope = fsdp_scope_begin();
    g = fsdp__tensor_alloc(p->sharded->dtype, p->sharded->ndim, p->sharded->size, FSDP_GRADIENTS,
                           p->unit->file, p->param->name);
    if (g) fsdp__layout_share(g, p->sharded);
    if (g && fsdp_set_grad(p->sharded, g) != FSDP_OK) g = NULL;
    fsdp_scope_end(scope);
    if (g && fsdp__offload_hold_grad(p) != FSDP_OK) g = NULL;
    return g ? fsdp_grad(p->sharded) : NULL;
}

static void drop_whole(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        if (u->params[i].grad) fsdp__storage_empty(u->params[i].grad->st);
        u->params[i].got_grad = false;
    }
}

/* ---- the queue of unfinished reductions -------------------------------------------- */

static void enqueue(fsdp__unit *u, fsdp__reduce_stage stage)
{
    fsdp__unit **end = &u->tree->queue->first;
    while (*end)
        end = &(*end)->reduce_next;
    *end = u;
    u->reduce_next = NULL;
    u->stage = stage;
}

static void dequeue(fsdp__unit *u)
{
    fsdp__unit **at = u->tree ? &u->tree->queue->first : NULL;
    while (at && *at && *at != u)
        at = &(*at)->reduce_next;
    if (at && *at) *at = u->reduce_next;
    u->reduce_next = NULL;
    u->stage = FSDP__REDUCE_NONE;
}

void fsdp__unit_drop_grads(fsdp__unit *u)
{
    fsdp_work *w = u->reduce;
    u->reduce = NULL;
    if (w) fsdp_work_wait(w);
    fsdp__custom_drop(u);
    for (int i = 0; i < u->n_params; i++)
        fsdp__offload_let_grad(&u->params[i]);
    for (int i = 0; i < u->n_params && u->stage != FSDP__REDUCE_NONE; i++)
        if (u->params[i].fresh_shard_grad) fsdp_set_grad(u->params[i].sharded, NULL);
    dequeue(u);
    drop_whole(u);
    fsdp__leaves_drop(u);
    fsdp__sums_drop(u);
    for (int i = 0; i < u->n_params; i++)
        u->params[i].fresh_shard_grad = false;
}

/* ---- issuing --------------------------------------------------------------------- */

static bool listed(const fsdp__unit *u, const fsdp__fparam *p)
{
    return p->param->requires_grad || (u->sums && p->summed); /* frozen after it got a part */
}

/* Entry e of p: where its gradient lies, and where the sum of this rank's rows goes. *add: there
 * is something already. */
static fsdp_status make_entry(fsdp__unit *u, fsdp__fparam *p, fsdp_list_entry *e, bool *add)
{
    *e = (fsdp_list_entry){.outer = p->cut.outer,
                           .dim = p->cut.dim,
                           .inner = p->cut.inner,
                           .chunk = p->cut.chunk,
                           .full = p->grad->st->data,
                           .full_dtype = p->grad->dtype,
                           .present = p->got_grad};
    if (u->sums) {
        e->shard = fsdp__sums_at(u, p);
        e->shard_dtype = u->sums->dtype;
        *add = *add || p->summed;
    } else if (u->S > 1) {
        fsdp_tensor *g = fsdp__shard_grad(p);
        if (!g) return fsdp_error();
        *add = *add || !p->fresh_shard_grad;
        e->shard = fsdp_data(g);
        e->shard_dtype = g->dtype;
    } else { /* replicas: summed in place, the ranks of the group share the work */
        FSDP_TRY(fsdp__storage_fill(p->grad->st, NULL, p->param->name));
        e->full = p->grad->st->data;
        e->chunk = (e->dim + u->R - 1) / u->R;
    }
    return FSDP_OK;
}

/* Parameters without a gradient take part as zeros. */
static fsdp_status fill_unused(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (p->got_grad || !p->param->requires_grad) continue;
        FSDP_TRY(fsdp__storage_fill(p->grad->st, NULL, p->param->name));
        memset(p->grad->st->data, 0, (size_t)p->grad->st->bytes);
        p->got_grad = true;
    }
    return FSDP_OK;
}

static fsdp_status make_list(fsdp__unit *u, bool *add)
{
    int n = 0;
    *add = false;
    if (u->reduce_unused) FSDP_TRY(fill_unused(u));
    if (fsdp__unit_uses_sums(u)) FSDP_TRY(fsdp__sums_make(u));
    for (int i = 0; i < u->n_params; i++) {
        if (!listed(u, &u->params[i])) continue;
        FSDP_TRY(make_entry(u, &u->params[i], &u->reduce_entries[n], add));
        u->reduce_params[n++] = i;
    }
    u->n_reduce = n;
    /* Sums that are new in a list that adds start from zero. */
    for (int k = 0; k < n && *add; k++) {
        fsdp__fparam *p = &u->params[u->reduce_params[k]];
        const fsdp_list_entry *e = &u->reduce_entries[k];
        if (u->sums ? !p->summed : p->fresh_shard_grad)
            memset(e->shard, 0, (size_t)fsdp_numel(p->sharded) * fsdp_dtype_size(e->shard_dtype));
    }
    return FSDP_OK;
}

/* How much of the division the sum inside the shard group does. */
static float scatter_scale(const fsdp__unit *u)
{
    fsdp__division d = fsdp__unit_division(u);
    return (float)(1.0 / (u->R > 1 ? d.before : d.before * d.inside));
}

static fsdp_status issue(fsdp__unit *u)
{
    bool add;
    u->across = u->all_reduce;
    FSDP_TRY(make_list(u, &add));
    if (u->n_reduce == 0) return FSDP_OK;
    fsdp__event(u, FSDP_EVENT_REDUCE);
    if (u->S == 1 && !u->sums) {
        fsdp__division d = fsdp__unit_division(u);
        enqueue(u, FSDP__REDUCE_REPLICAS);
        return fsdp_all_reduce_list(u->replicate, FSDP_LANE_REPLICATE, u->name, u->reduce_entries,
                                    u->n_reduce, (float)(1.0 / (d.before * d.inside * d.after)),
                                    &u->reduce);
    }
    enqueue(u, FSDP__REDUCE_SCATTER);
    if (fsdp__custom_reduces(u)) return fsdp__custom_reduce_begin(u);
    return fsdp_reduce_scatter_list(u->shard, FSDP_LANE_REDUCE, u->name, u->reduce_entries,
                                    u->n_reduce, scatter_scale(u), add, &u->reduce);
}

/* ---- finishing ---------------------------------------------------------------------- */

fsdp_status fsdp__grad_renew(fsdp__fparam *p)
{
    fsdp_tensor *old = p->grad, *next = NULL;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__storage *st = fsdp__storage_create(FSDP_CPU, old->st->bytes, FSDP_GRADIENTS);
    if (st && scope) {
        st->home = old->st->home;
        st->owner = old->st->owner;
        next = fsdp__tensor_own(fsdp__tensor_view(st, old->dtype, old->ndim, old->size, NULL, 0));
    }
    fsdp__storage_release(st);
    fsdp_scope_end(scope);
    if (!next) return fsdp_error();
    p->grad = next;
    fsdp_release(old);
    return FSDP_OK;
}

/* A replica's summed gradient is the shard's gradient: handed over whole where
 * dtype and memory fit, else converted and added. */
static fsdp_status adopt_whole(fsdp__fparam *p)
{
    fsdp_tensor *g = fsdp_grad(p->sharded);
    if (!g && p->grad->dtype == p->sharded->dtype && !p->unit->file) {
        fsdp__layout_share(p->grad, p->sharded);
        FSDP_TRY(fsdp_set_grad(p->sharded, p->grad));
        return fsdp__grad_renew(p);
    }
    g = fsdp__shard_grad(p);
    if (!g) return fsdp_error();
    return p->fresh_shard_grad ? fsdp_copy_(g, p->grad) : fsdp_accumulate_(g, p->grad);
}

/* One rank: the whole gradient becomes the shard's, or is added to it. */
static fsdp_status reduce_alone(fsdp__unit *u)
{
    fsdp__division d = fsdp__unit_division(u);
    float f = (float)(1.0 / (d.before * d.inside * d.after)); /* as a sum over ranks is scaled */
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (!p->got_grad) continue;
        const void *source = fsdp_data(p->grad);
        if (f != 1.0f && fsdp_numel(p->grad) > 0)
            fsdp__sum_tree(fsdp_data(p->grad), p->grad->dtype, &source, p->grad->dtype, 1,
                           (size_t)fsdp_numel(p->grad), f, 0);
        FSDP_TRY(adopt_whole(p));
        fsdp__offload_let_grad(p);
        FSDP_TRY(fsdp__run_accumulate_hooks(p->sharded));
    }
    drop_whole(u);
    return FSDP_OK;
}

/* The shards' gradients are complete, without sums between. */
static fsdp_status settle(fsdp__unit *u)
{
    fsdp_status s = FSDP_OK;
    for (int k = 0; k < u->n_reduce && s == FSDP_OK; k++) {
        fsdp__fparam *p = &u->params[u->reduce_params[k]];
        bool fresh = p->fresh_shard_grad;
        p->fresh_shard_grad = false;
        if (!u->reduce_entries[k].present) { /* absent on all ranks: no gradient */
            fsdp__offload_let_grad(p);
            if (u->S > 1 && fresh) s = fsdp_set_grad(p->sharded, NULL);
            continue;
        }
        if (u->S == 1)
            s = adopt_whole(p);
        else
            fsdp_touch(fsdp_grad(p->sharded));
        fsdp__offload_let_grad(p);
        if (s == FSDP_OK) s = fsdp__run_accumulate_hooks(p->sharded);
    }
    return s;
}

static fsdp_status end_replicas(fsdp__unit *u)
{
    fsdp_work *w = u->reduce;
    u->reduce = NULL;
    FSDP_TRY(fsdp_work_wait(w));
    if (u->R > 1 && u->sums) FSDP_TRY(fsdp__hook_begin(u));
    if (u->sums) FSDP_TRY(fsdp__hook_end(u));
    bool sums = u->sums != NULL; /* the whole gradients are gone already, or new ones */
    fsdp_status s = sums ? fsdp__sums_settle(u) : settle(u);
    if (s == FSDP_OK && !sums) drop_whole(u);
    dequeue(u);
    return s;
}

/* The sums go over the replicas, as soon as those of the unit before are over. */
static fsdp_status begin_replicas(fsdp__unit *u)
{
    while (u->tree->queue->first != u)
        FSDP_TRY(end_replicas(u->tree->queue->first));
    FSDP_TRY(fsdp__sums_begin(u, &u->reduce));
    u->stage = FSDP__REDUCE_REPLICAS;
    if (u->R == 1) FSDP_TRY(fsdp__hook_begin(u));
    return u->reduce || u->hook_stream ? FSDP_OK : end_replicas(u);
}

/* The sum inside the shard group is there: the whole gradients go. */
static fsdp_status end_scatter(fsdp__unit *u)
{
    fsdp_work *w = u->reduce;
    u->reduce = NULL;
    fsdp_status s = fsdp_work_wait_buffers(w);
    if (s == FSDP_OK)
        s = fsdp_work_wait(w);
    else
        fsdp_work_wait(w);
    FSDP_TRY(s);
    if (fsdp__custom_reduces(u)) FSDP_TRY(fsdp__custom_reduce_end(u));
    for (int k = 0; k < u->n_reduce && u->sums; k++)
        if (u->reduce_entries[k].present) u->params[u->reduce_params[k]].summed = true;
    drop_whole(u);
    if (u->sums && (u->across || u->R == 1)) return begin_replicas(u);
    if (!u->sums) s = settle(u);
    u->sums_due = u->sums != NULL;
    dequeue(u);
    return s;
}

/* Until at most `most` units of the tree hold whole gradients that peers read. */
static fsdp_status make_room(fsdp__tree *t, int most)
{
    for (;;) {
        fsdp__unit *oldest = NULL;
        int n = 0;
        for (fsdp__unit *u = t->queue->first; u; u = u->reduce_next)
            if (holds_whole(u) && n++ == 0) oldest = u;
        if (n <= most) return FSDP_OK;
        FSDP_TRY(oldest->stage == FSDP__REDUCE_SCATTER ? end_scatter(oldest)
                                                       : end_replicas(oldest));
    }
}

/* One stage further with the oldest. */
static fsdp_status go_on(fsdp__unit *u)
{
    return u->stage == FSDP__REDUCE_SCATTER ? end_scatter(u) : end_replicas(u);
}

static fsdp_status finish_up_to(fsdp__unit *u)
{
    while (u->stage != FSDP__REDUCE_NONE)
        FSDP_TRY(go_on(u->tree->queue->first));
    return FSDP_OK;
}

fsdp_status fsdp__tree_finish_reduce(fsdp__tree *t)
{
    FSDP_TRY(make_room(t, 0)); /* every unit's first stage, before the last of any is waited for */
    while (t->queue->first)
        FSDP_TRY(go_on(t->queue->first));
    return FSDP_OK;
}

/* ---- when a unit's backward is over ---------------------------------------------------- */

static int max_reductions(const fsdp__tree *t)
{
    int most = 1;
    for (int i = 0; i < t->n_units; i++)
        if (t->units[i]->max_reductions > most) most = t->units[i]->max_reductions;
    return most;
}

static fsdp_status reduce(fsdp__unit *u, bool any)
{
    bool due = u->sums_due && u->all_reduce;
    bool ran = any || u->pre_backward || u->reduce_unused || u->leaves > 0;
    if (!u->sync || !(ran || due)) return FSDP_OK;
    FSDP_TRY(fsdp__leaves_sum(u));
    if (u->S * u->R == 1 && !fsdp__unit_uses_sums(u)) {
        if (u->reduce_unused) FSDP_TRY(fill_unused(u));
        return reduce_alone(u);
    }
    /* Without shards there is nothing to do inside the group: the whole gradients wait. */
    if (u->S == 1 && !u->all_reduce && !fsdp__unit_uses_sums(u)) return FSDP_OK;
    FSDP_TRY(finish_up_to(u)); /* its lists are in use */
    FSDP_TRY(make_room(u->tree, max_reductions(u->tree) - 1));
    if (ran) return issue(u);
    FSDP_TRY(make_room(u->tree, 0)); /* units leave the queue in order */
    enqueue(u, FSDP__REDUCE_SCATTER);
    return begin_replicas(u);
}

fsdp_status fsdp__unit_post_backward(fsdp__unit *u)
{
    bool any = false;
    for (int i = 0; i < u->n_params; i++)
        any = any || u->params[i].got_grad;
    u->post_backward = true;
    FSDP_TRY(fsdp__unit_after_backward(u));
    FSDP_TRY(reduce(u, any));
    fsdp__event(u, FSDP_EVENT_POST_BACKWARD);
    return FSDP_OK;
}
