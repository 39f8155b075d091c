/*
 * engine.c - running a graph backwards.
 *
 * Two passes. The first counts for every reachable node how many edges of
 * reachable nodes lead to it. The second keeps the nodes whose count is zero
 * in a heap by sequence number, largest first, leaves before all, and runs
 * them. Invariant: a node's slots are complete when it runs; they are released
 * right after, and so is what it saved.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "tensor/kernels.h"

/* ---- where gradients go ------------------------------------------------------ */

bool fsdp__grad_wanted(const fsdp__node *n, int k)
{
    return k < n->n_in && n->in[k].node && !(n->in[k].node->is_leaf && !n->in[k].node->leaf);
}

/* The leaf's own place. *add: it holds a value. */
static fsdp_tensor *leaf_place(fsdp_tensor *leaf, int *add)
{
    fsdp__autograd *ag = leaf->ag;
    if (ag->provide) return ag->provide(ag->provide_arg, add);
    *add = ag->grad != NULL;
    if (!ag->grad)
        ag->grad = fsdp__tensor_own(fsdp__tensor_alloc(leaf->dtype, leaf->ndim, leaf->size,
                                                       FSDP_GRADIENTS, NULL, "a gradient"));
    return ag->grad;
}

static fsdp_tensor *sum_of(fsdp_tensor *a, fsdp_tensor *b)
{
    fsdp_tensor *y = fsdp__tensor_create(a->dtype, a->ndim, a->size, a->st->device);
    if (!y || fsdp_copy_(y, a) != FSDP_OK || (b && fsdp_accumulate_(y, b) != FSDP_OK)) return NULL;
    return fsdp__tensor_own(y);
}

fsdp_tensor *fsdp__grad_out(fsdp__node *n, int k, int *add)
{
    fsdp__node *to = n->in[k].node;
    if (to->is_leaf && to->n_hooks == 0) {
        to->received = true;
        return leaf_place(to->leaf, add);
    }
    fsdp__grad_slot *slot = &to->slot[n->in[k].index];
    *add = slot->g != NULL;
    if (!slot->g) {
        const fsdp__meta *m = &n->in[k].meta;
        slot->g = fsdp__tensor_own(fsdp__tensor_create(m->dtype, m->ndim, m->size, FSDP_CPU));
        slot->exclusive = true;
    } else if (!slot->exclusive || !fsdp__tensor_dense(slot->g)) {
        fsdp_tensor *copy = sum_of(slot->g, NULL);
        if (!copy) return NULL;
        fsdp_release(slot->g);
        slot->g = copy;
        slot->exclusive = true;
    }
    return slot->g;
}

fsdp_status fsdp__grad_give(fsdp__node *n, int k, fsdp_tensor *g)
{
    fsdp__node *to = n->in[k].node;
    if (!g) return fsdp_error();
    fsdp__grad_slot *slot = &to->slot[n->in[k].index];
    bool leaf = to->is_leaf && to->n_hooks == 0;
    if (!leaf && !slot->g && g->dtype == n->in[k].meta.dtype) {
        slot->g = fsdp_retain(g);
        slot->exclusive = false;
        return FSDP_OK;
    }
    int add;
    fsdp_tensor *place = fsdp__grad_out(n, k, &add);
    if (!place) return fsdp_error();
    return add ? fsdp_accumulate_(place, g) : fsdp_copy_(place, g);
}

/* ---- the heap of ready nodes --------------------------------------------------- */

typedef struct ready_heap {
    fsdp__node **items;
    int64_t count, cap;
} ready_heap;

static fsdp_status heap_push(ready_heap *h, fsdp__node *n)
{
    FSDP_TRY(FSDP__GROW(h->items, h->cap, h->count + 1, "backward's queue"));
    int64_t i = h->count++;
    while (i > 0 && h->items[(i - 1) / 2]->seq < n->seq) {
        h->items[i] = h->items[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->items[i] = n;
    return FSDP_OK;
}

static fsdp__node *heap_pop(ready_heap *h)
{
    fsdp__node *top = h->items[0], *last = h->items[--h->count];
    int64_t i = 0;
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= h->count) break;
        if (child + 1 < h->count && h->items[child + 1]->seq > h->items[child]->seq) child++;
        if (h->items[child]->seq <= last->seq) break;
        h->items[i] = h->items[child];
        i = child;
    }
    if (h->count > 0) h->items[i] = last;
    return top;
}

/* ---- counting ---------------------------------------------------------------------- */

/* Visits every node below root once; `list` holds them all, each retained. */
static fsdp_status count_edges(fsdp__node *root, uint64_t mark, ready_heap *list)
{
    root->mark = mark;
    root->deps = 0;
    FSDP_TRY(FSDP__GROW(list->items, list->cap, 1, "backward's list"));
    list->items[list->count++] = fsdp__node_retain(root);
    for (int64_t i = 0; i < list->count; i++) {
        fsdp__node *n = list->items[i];
        for (int k = 0; k < n->n_in; k++) {
            fsdp__node *up = n->in[k].node;
            if (!up) continue;
            if (up->mark != mark) {
                up->mark = mark;
                up->deps = 0;
                up->received = false;
                FSDP_TRY(FSDP__GROW(list->items, list->cap, list->count + 1, "backward's list"));
                list->items[list->count++] = fsdp__node_retain(up);
            }
            up->deps++;
        }
    }
    return FSDP_OK;
}

/* ---- running -------------------------------------------------------------------------- */

static fsdp_status misfit(const char *name, const fsdp_tensor *g, const fsdp_tensor *was)
{
    fsdp__str a = {0}, b = {0};
    fsdp__describe(g, &a);
    fsdp__describe(was, &b);
    fsdp__fail(fsdp__same_sizes(g, was) ? FSDP_INVALID_DTYPE : FSDP_INVALID_SHAPE,
               "a gradient hook on the output of %s returned %s; expected %s, as the gradient that "
               "it was given",
               name, fsdp__str_get(&a), fsdp__str_get(&b));
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    return fsdp_error();
}

static fsdp_status run_hooks(fsdp__node *n)
{
    for (int64_t i = 0; i < n->n_hooks; i++) {
        fsdp__grad_slot *slot = &n->slot[n->hooks[i].index];
        if (!slot->g) continue;
        fsdp_tensor *g = n->hooks[i].fn(n->hooks[i].arg, slot->g);
        if (fsdp_error()) return fsdp_error();
        if (!g || g == slot->g) continue;
        if (!fsdp__same_sizes(g, slot->g) || g->dtype != slot->g->dtype)
            return misfit(n->name, g, slot->g);
        fsdp_retain(g);
        fsdp_release(slot->g);
        slot->g = g;
        slot->exclusive = false;
    }
    return FSDP_OK;
}

fsdp_status fsdp__run_accumulate_hooks(fsdp_tensor *leaf)
{
    fsdp__autograd *ag = leaf->ag;
    for (int64_t i = 0; ag && i < ag->n_post; i++) {
        fsdp_status s = ag->post[i].fn(ag->post[i].arg, leaf);
        FSDP_TRY(fsdp_error());
        if (s != FSDP_OK)
            return fsdp__fail(s, "a hook of %s (fsdp_register_post_accumulate_hook) returned %s",
                              leaf->st->owner ? leaf->st->owner : "a leaf", fsdp_status_name(s));
    }
    return fsdp_error();
}

static fsdp_status run_leaf(fsdp__node *n)
{
    if (!n->leaf) return FSDP_OK;
    if (n->slot[0].g) { /* the leaf has hooks, or is where backward began */
        FSDP_TRY(run_hooks(n));
        int add;
        fsdp_tensor *place = leaf_place(n->leaf, &add);
        if (!place) return fsdp_error();
        FSDP_TRY(add ? fsdp_accumulate_(place, n->slot[0].g) : fsdp_copy_(place, n->slot[0].g));
        n->received = true;
    }
    return n->received ? fsdp__run_accumulate_hooks(n->leaf) : FSDP_OK;
}

static fsdp_status run_node(fsdp__node *n, bool retain_graph)
{
    if (n->is_leaf) return run_leaf(n);
    FSDP_TRY(run_hooks(n));
    bool any = false;
    fsdp_tensor *gout[sizeof n->slot / sizeof n->slot[0]];
    for (int k = 0; k < n->n_out; k++)
        any = (gout[k] = n->slot[k].g) != NULL || any;
    if (any || n->runs_always) {
        if (n->released)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "backward of %s: its graph was freed by an earlier backward; pass "
                              "retain_graph to that one",
                              n->name);
        FSDP_TRY(n->backward(n, gout));
    }
    if (retain_graph) {
        fsdp__node_rest_saved(n);
    } else {
        fsdp__node_drop_saved(n);
        n->released = true;
    }
    return FSDP_OK;
}

static void drop_slots(fsdp__node *n)
{
    for (size_t k = 0; k < sizeof n->slot / sizeof n->slot[0]; k++) {
        fsdp_release(n->slot[k].g);
        n->slot[k].g = NULL;
    }
}

static fsdp_status run_ready(ready_heap *ready, bool retain_graph)
{
    while (ready->count > 0) {
        fsdp__node *n = heap_pop(ready);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status s = scope ? run_node(n, retain_graph) : fsdp_error();
        drop_slots(n);
        fsdp_scope_end(scope);
        FSDP_TRY(s);
        for (int k = 0; k < n->n_in; k++) {
            fsdp__node *up = n->in[k].node;
            if (up && --up->deps == 0) FSDP_TRY(heap_push(ready, up));
        }
    }
    return FSDP_OK;
}

static fsdp_status run_callbacks(fsdp__grad_state *g, fsdp_status before)
{
    fsdp_status s = before;
    /* A callback may queue others; they run too. On failure the rest is dropped. */
    for (int64_t i = 0; i < g->n_callbacks && s == FSDP_OK; i++)
        s = g->callbacks[i].fn(g->callbacks[i].arg);
    if (s != FSDP_OK && before == FSDP_OK && !fsdp_error())
        fsdp__fail(s, "a callback (fsdp_queue_callback) returned %s", fsdp_status_name(s));
    g->n_callbacks = 0;
    return s;
}

static fsdp_status check_start(const fsdp_tensor *t, const fsdp_tensor *grad, fsdp__grad_state *g)
{
    if (g->running)
        return fsdp__fail(FSDP_INVALID_STATE, "a backward inside a backward: gradients of "
                                              "gradients are not offered");
    if (t->st->device == FSDP_META)
        return fsdp__fail(FSDP_UNSUPPORTED, "backward of a tensor on the meta device: it has a "
                                            "shape and no values; give the model memory with "
                                            "fsdp_to_empty first");
    if (!fsdp_requires_grad(t))
        return fsdp__fail(FSDP_INVALID_STATE, "backward: nothing that this tensor was made from "
                                              "requires a gradient");
    if (!fsdp__same_sizes(t, grad) || grad->dtype != t->dtype) {
        fsdp__str a = {0}, b = {0};
        fsdp__describe(t, &a);
        fsdp__describe(grad, &b);
        fsdp__fail(fsdp__same_sizes(t, grad) ? FSDP_INVALID_DTYPE : FSDP_INVALID_SHAPE,
                   "backward: the gradient is %s, the tensor %s; expected equal sizes and dtype",
                   fsdp__str_get(&b), fsdp__str_get(&a));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    return fsdp__tensor_readable(grad, "backward");
}

fsdp_status fsdp_backward_from(fsdp_tensor *t, fsdp_tensor *grad, int retain_graph)
{
    if (fsdp_error()) return fsdp_error();
    if (!t || !grad) return fsdp__fail(FSDP_INVALID_ARGUMENT, "backward: no tensor or gradient");
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (!g) return fsdp_error();
    FSDP_TRY(check_start(t, grad, g));
    ready_heap ready = {0}, list = {0};
    fsdp__node *root = fsdp__node_of(t);
    if (!root) return fsdp_error();
    g->running = true;
    g->no_grad++;
    fsdp_status s = count_edges(root, ++g->mark, &list);
    if (s == FSDP_OK) {
        root->slot[t->ag->index].g = fsdp_retain(grad);
        root->slot[t->ag->index].exclusive = false;
        s = heap_push(&ready, root);
    }
    if (s == FSDP_OK) s = run_ready(&ready, retain_graph != 0);
    s = run_callbacks(g, s);
    for (int64_t i = 0; i < list.count; i++) {
        drop_slots(list.items[i]);
        fsdp__node_release(list.items[i]);
    }
    fsdp__recompute_settle(g);
    g->no_grad--;
    g->running = false;
    free(ready.items);
    free(list.items);
    if (s != FSDP_OK && !fsdp_error()) /* a user's function that said nothing */
        fsdp__fail(s, "backward failed: %s", fsdp_status_name(s));
    return s;
}

fsdp_status fsdp_backward(fsdp_tensor *loss)
{
    if (!loss)
        return fsdp_error() ? fsdp_error()
                            : fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_backward: loss is NULL");
    if (fsdp_numel(loss) != 1)
        return fsdp__fail(FSDP_INVALID_SHAPE,
                          "fsdp_backward: the loss has %lld elements; expected one (use "
                          "fsdp_backward_from for others)",
                          (long long)fsdp_numel(loss));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *one = fsdp__tensor_create(loss->dtype, loss->ndim, loss->size, FSDP_CPU);
    fsdp_status s = one ? fsdp_fill_(one, 1.0) : fsdp_error();
    if (s == FSDP_OK) s = fsdp_backward_from(loss, one, 0);
    fsdp_scope_end(scope);
    return s;
}

fsdp_status fsdp_queue_callback(fsdp_status (*fn)(void *arg), void *arg)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (!g) return fsdp_error();
    if (!g->running)
        return fsdp__fail(FSDP_INVALID_STATE, "fsdp_queue_callback outside a backward");
    FSDP_TRY(FSDP__GROW(g->callbacks, g->cap_callbacks, g->n_callbacks + 1, "callbacks"));
    g->callbacks[g->n_callbacks].fn = fn;
    g->callbacks[g->n_callbacks++].arg = arg;
    return FSDP_OK;
}

int fsdp_in_backward(void)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    return g && g->running;
}
