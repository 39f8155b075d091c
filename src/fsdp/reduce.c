/*
 * reduce.c - gradients: where they are born, and how they reach the shards.
 *
 * Backward writes a parameter's whole gradient, in the reduce dtype, into
 * memory that peers can read; post-backward sums the ranks' gradients straight
 * into each owner's shard gradient. Invariants: a whole gradient has bytes
 * exactly from its first write to the end of its reduction, and is not written
 * while it is reduced; one reduction of a tree is unfinished at most, so no more
 * than two units hold whole gradients.
 */
#include "fsdp/unit.h"

#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "tensor/kernels.h"

fsdp_tensor *fsdp__grad_place(void *arg, int *add)
{
    fsdp__fparam *p = arg;
    fsdp__unit *u = p->unit;
    if (u->post_backward && u->sync && !p->got_grad) {
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
    if (u->tree->reducing == u && fsdp__tree_finish_reduce(u->tree) != FSDP_OK) return NULL;
    *add = fsdp__storage_filled(p->grad->st);
    if (fsdp__storage_fill(p->grad->st, NULL, p->param->name) != FSDP_OK) return NULL;
    p->got_grad = true;
    return p->grad;
}

void fsdp__unit_drop_grads(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        if (u->params[i].grad) fsdp__storage_empty(u->params[i].grad->st);
        u->params[i].got_grad = false;
        u->params[i].fresh_shard_grad = false;
        fsdp_release(u->params[i].earlier);
        u->params[i].earlier = NULL;
    }
}

/* The shard's gradient, made if there is none. */
static fsdp_tensor *shard_grad(fsdp__unit *u, fsdp__fparam *p)
{
    fsdp_tensor *g = fsdp_grad(p->sharded);
    p->fresh_shard_grad = !g;
    if (g) return g;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp__allocator *home = u->R > 1 ? fsdp__comm_allocator(u->replicate) : NULL;
    g = fsdp__tensor_alloc(p->sharded->dtype, p->sharded->ndim, p->sharded->size, FSDP_GRADIENTS,
                           home, p->param->name);
    if (g) fsdp__layout_share(g, p->sharded);
    if (g && fsdp_set_grad(p->sharded, g) != FSDP_OK) g = NULL;
    fsdp_scope_end(scope);
    return g ? fsdp_grad(p->sharded) : NULL;
}

static double divisor(const fsdp__unit *u)
{
    return u->divide != 0.0 ? u->divide : (double)(u->S * u->R);
}

/* ---- issuing --------------------------------------------------------------------- */

static bool trainable(const fsdp__fparam *p)
{
    return p->param->requires_grad;
}

static fsdp_status issue(fsdp__unit *u)
{
    int n = 0;
    float scale = (float)(1.0 / divisor(u));
    bool accumulate = false;
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (!trainable(p)) continue;
        fsdp_list_entry *e = &u->reduce_entries[n];
        *e = (fsdp_list_entry){.outer = p->cut.outer,
                               .dim = p->cut.dim,
                               .inner = p->cut.inner,
                               .chunk = p->cut.chunk,
                               .full = p->grad->st->data,
                               .full_dtype = p->grad->dtype,
                               .present = p->got_grad};
        if (u->S > 1) {
            if (u->R > 1 && (p->earlier = fsdp_retain(fsdp_grad(p->sharded))))
                FSDP_TRY(fsdp_set_grad(p->sharded, NULL)); /* summed over replicas already */
            fsdp_tensor *g = shard_grad(u, p);
            if (!g) return fsdp_error();
            accumulate = accumulate || !p->fresh_shard_grad;
            e->shard = fsdp_data(g);
            e->shard_dtype = g->dtype;
        } else { /* replicas: summed in place, the ranks of the group share the work */
            e->chunk = (e->dim + u->R - 1) / u->R;
        }
        u->reduce_params[n++] = i;
    }
    u->n_reduce = n;
    if (n == 0) return FSDP_OK;
    /* Gradients that are new in a list that adds start from zero. */
    for (int k = 0; k < n && accumulate; k++) {
        fsdp__fparam *p = &u->params[u->reduce_params[k]];
        if (p->fresh_shard_grad) FSDP_TRY(fsdp_fill_(fsdp_grad(p->sharded), 0.0));
    }
    fsdp__event(u, FSDP_EVENT_REDUCE);
    u->tree->reducing = u;
    if (u->S == 1)
        return fsdp_all_reduce_list(u->replicate, FSDP_LANE_REPLICATE, u->name, u->reduce_entries,
                                    n, scale, &u->reduce);
    return fsdp_reduce_scatter_list(u->shard, FSDP_LANE_REDUCE, u->name, u->reduce_entries, n,
                                    u->R > 1 ? 1.0f : scale, accumulate, &u->reduce);
}

/* ---- finishing ---------------------------------------------------------------------- */

/* Across replicas, after the sum inside the shard group. */
static fsdp_status reduce_replicas(fsdp__unit *u)
{
    float scale = (float)(1.0 / divisor(u));
    fsdp_work *w = NULL;
    for (int k = 0; k < u->n_reduce; k++) {
        fsdp_list_entry *e = &u->reduce_entries[k];
        fsdp__fparam *p = &u->params[u->reduce_params[k]];
        int64_t rows = fsdp__cut_rows(&p->cut, fsdp_group_rank(u->shard), NULL);
        *e = (fsdp_list_entry){.outer = 1,
                               .dim = p->cut.outer * rows,
                               .inner = p->cut.inner,
                               .full = e->shard,
                               .full_dtype = e->shard_dtype,
                               .present = e->present};
        e->chunk = (e->dim + u->R - 1) / u->R;
    }
    FSDP_TRY(fsdp_all_reduce_list(u->replicate, FSDP_LANE_REPLICATE, u->name, u->reduce_entries,
                                  u->n_reduce, scale, &w));
    return fsdp_work_wait(w);
}

/* A replica's summed gradient is the shard's gradient: handed over whole where
 * dtype and memory fit, else converted and added. */
static fsdp_status adopt_whole(fsdp__unit *u, fsdp__fparam *p)
{
    fsdp_tensor *g = fsdp_grad(p->sharded);
    if (!g && p->grad->dtype == p->sharded->dtype) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *whole = p->grad;
        fsdp__layout_share(whole, p->sharded);
        fsdp_status s = scope ? fsdp_set_grad(p->sharded, whole) : fsdp_error();
        /* A new empty storage for the next backward. */
        fsdp__storage *st = fsdp__storage_create(FSDP_CPU, whole->st->bytes, FSDP_GRADIENTS);
        fsdp_tensor *next = NULL;
        if (s == FSDP_OK && st) {
            st->home = whole->st->home;
            st->owner = whole->st->owner;
            next = fsdp__tensor_own(
                fsdp__tensor_view(st, whole->dtype, whole->ndim, whole->size, NULL, 0));
        }
        fsdp__storage_release(st);
        if (next) {
            fsdp_release(p->grad);
            p->grad = next;
        } else if (s == FSDP_OK) {
            s = fsdp_error();
        }
        fsdp_scope_end(scope);
        return s;
    }
    g = shard_grad(u, p);
    if (!g) return fsdp_error();
    return p->fresh_shard_grad ? fsdp_copy_(g, p->grad) : fsdp_accumulate_(g, p->grad);
}

/* One rank: the whole gradient becomes the shard's, or is added to it. */
static fsdp_status reduce_alone(fsdp__unit *u)
{
    double f = 1.0 / divisor(u);
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (!p->got_grad) continue;
        if (f != 1.0)
            fsdp__k_unary(FSDP__UNARY_scale, fsdp_data(p->grad), p->grad->dtype,
                          fsdp_numel(p->grad), f, fsdp_data(p->grad));
        FSDP_TRY(adopt_whole(u, p));
        FSDP_TRY(fsdp__run_accumulate_hooks(p->sharded));
    }
    fsdp__unit_drop_grads(u);
    return FSDP_OK;
}

/* Hybrid: what was set aside comes back, with the new sum added. */
static fsdp_status add_earlier(fsdp__fparam *p)
{
    fsdp_tensor *g = fsdp_grad(p->sharded);
    fsdp_status s = g ? fsdp_accumulate_(p->earlier, g) : FSDP_OK;
    if (s == FSDP_OK) s = fsdp_set_grad(p->sharded, p->earlier);
    fsdp_release(p->earlier);
    p->earlier = NULL;
    return s;
}

fsdp_status fsdp__tree_finish_reduce(fsdp__tree *t)
{
    fsdp__unit *u = t->reducing;
    if (!u) return FSDP_OK;
    t->reducing = NULL;
    fsdp_work *w = u->reduce;
    u->reduce = NULL;
    fsdp_status s = fsdp_work_wait_buffers(w);
    if (s == FSDP_OK)
        s = fsdp_work_wait(w);
    else
        fsdp_work_wait(w);
    if (s == FSDP_OK && u->S > 1 && u->R > 1) s = reduce_replicas(u);
    for (int k = 0; k < u->n_reduce && s == FSDP_OK; k++) {
        fsdp__fparam *p = &u->params[u->reduce_params[k]];
        if (!u->reduce_entries[k].present) { /* absent on all ranks: no gradient */
            if (u->S > 1 && p->fresh_shard_grad) s = fsdp_set_grad(p->sharded, NULL);
        } else if (u->S == 1) {
            s = adopt_whole(u, p);
        } else {
            fsdp_touch(fsdp_grad(p->sharded));
        }
        if (p->earlier && s == FSDP_OK) s = add_earlier(p);
        if (s == FSDP_OK && u->reduce_entries[k].present)
            s = fsdp__run_accumulate_hooks(p->sharded);
    }
    fsdp__unit_drop_grads(u);
    return s;
}

fsdp_status fsdp__unit_post_backward(fsdp__unit *u)
{
    bool any = false;
    for (int i = 0; i < u->n_params; i++)
        any = any || u->params[i].got_grad;
    u->post_backward = true;
    FSDP_TRY(fsdp__unit_reshard(u));
    if (u->sync && (any || u->pre_backward)) {
        if (u->S * u->R > 1) FSDP_TRY(fsdp__tree_finish_reduce(u->tree));
        FSDP_TRY(u->S * u->R == 1 ? reduce_alone(u) : issue(u));
    }
    fsdp__event(u, FSDP_EVENT_POST_BACKWARD);
    return FSDP_OK;
}
