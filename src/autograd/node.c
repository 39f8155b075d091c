/*
 * node.c - making and freeing the graph.
 */
#include "autograd/node.h"

#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"

static void free_grad_state(void *p)
{
    fsdp__grad_state *s = p;
    free(s->callbacks);
    free(s);
}

fsdp__grad_state *fsdp__grad_state_get(void)
{
    fsdp__grad_state *s = fsdp__slot_get(FSDP__SLOT_AUTOGRAD);
    if (s) return s;
    s = fsdp__calloc(1, sizeof *s, "autograd's state");
    if (s) fsdp__slot_set(FSDP__SLOT_AUTOGRAD, s, free_grad_state);
    return s;
}

static void free_autograd(fsdp__autograd *ag)
{
    fsdp_release(ag->grad);
    if (ag->node) {
        if (ag->is_leaf) ag->node->leaf = NULL;
        fsdp__node_release(ag->node);
    }
    free(ag->post);
    free(ag);
}

fsdp__autograd *fsdp__autograd_of(fsdp_tensor *t)
{
    if (t->ag) return t->ag;
    t->ag = fsdp__calloc(1, sizeof *t->ag, "a tensor's gradient state");
    if (!t->ag) return NULL;
    t->ag->is_leaf = true;
    t->ag_free = free_autograd;
    return t->ag;
}

fsdp__node *fsdp__node_create(const char *name, fsdp__backward_fn fn)
{
    fsdp__grad_state *s = fsdp__grad_state_get();
    fsdp__node *n = s ? fsdp__calloc(1, sizeof *n, "a node of the graph") : NULL;
    if (!n) return NULL;
    n->refs = 1;
    n->seq = ++s->seq;
    n->name = name;
    n->backward = fn;
    return n;
}

fsdp__node *fsdp__node_retain(fsdp__node *n)
{
    if (n) n->refs++;
    return n;
}

void fsdp__node_drop_saved(fsdp__node *n)
{
    for (int k = 0; k < FSDP__SAVED_MAX; k++)
        fsdp__saved_drop(&n->saved[k]);
}

void fsdp__node_rest_saved(fsdp__node *n)
{
    for (int k = 0; k < FSDP__SAVED_MAX; k++)
        fsdp__saved_rest(&n->saved[k]);
}

static void free_node(fsdp__node *n)
{
    fsdp__node_drop_saved(n);
    for (size_t k = 0; k < sizeof n->slot / sizeof n->slot[0]; k++)
        fsdp_release(n->slot[k].g);
    if (n->extra && n->extra_free) n->extra_free(n->extra);
    for (int64_t i = 0; i < n->n_hooks; i++)
        if (n->hooks[i].drop) n->hooks[i].drop(n->hooks[i].arg);
    free(n->hooks);
    free(n);
}

/* A chain of a million nodes must not recurse: dead nodes wait in a list that
 * runs through `next_dead`, so freeing needs no memory. */
void fsdp__node_release(fsdp__node *n)
{
    if (!n || --n->refs > 0) return;
    n->next_dead = NULL;
    for (fsdp__node *dead = n; dead;) {
        fsdp__node *d = dead;
        dead = d->next_dead;
        for (int k = 0; k < d->n_in; k++) {
            fsdp__node *up = d->in[k].node;
            if (!up || --up->refs > 0) continue;
            up->next_dead = dead;
            dead = up;
        }
        free_node(d);
    }
}

/* A leaf's node is made on first use, so that it is one for all graphs. */
fsdp__node *fsdp__node_of(fsdp_tensor *t)
{
    fsdp__autograd *ag = t->ag;
    if (ag->node) return ag->node;
    fsdp__node *n = fsdp__node_create("accumulate", NULL);
    if (!n) return NULL;
    n->seq = UINT64_MAX;
    n->is_leaf = true;
    n->leaf = t;
    n->n_out = 1;
    ag->node = n;
    return n;
}

fsdp_status fsdp__node_input(fsdp__node *n, int k, fsdp_tensor *t)
{
    if (k >= n->n_in) n->n_in = k + 1;
    if (!t) return FSDP_OK;
    fsdp__edge *e = &n->in[k];
    e->meta.dtype = t->dtype;
    e->meta.ndim = t->ndim;
    memcpy(e->meta.size, t->size, sizeof e->meta.size);
    if (!fsdp_requires_grad(t)) return FSDP_OK;
    fsdp__node *from = fsdp__node_of(t);
    if (!from) return fsdp_error();
    e->node = fsdp__node_retain(from);
    e->index = t->ag->index;
    return FSDP_OK;
}

fsdp_status fsdp__node_output(fsdp__node *n, int k, fsdp_tensor *t)
{
    fsdp__autograd *ag = fsdp__autograd_of(t);
    if (!ag) return fsdp_error();
    if (k >= n->n_out) n->n_out = k + 1;
    ag->is_leaf = false;
    ag->requires_grad = true;
    ag->node = fsdp__node_retain(n);
    ag->index = k;
    return FSDP_OK;
}

/* ---- saved tensors ------------------------------------------------------------ */

void fsdp__saved_drop(fsdp__saved *s)
{
    if (s->packed && s->hooks.drop) s->hooks.drop(s->hooks.arg, s->packed);
    fsdp_release(s->t);
    memset(s, 0, sizeof *s);
}

void fsdp__saved_rest(fsdp__saved *s)
{
    if (!s->packed) return;
    fsdp_release(s->t);
    s->t = NULL;
}

fsdp_status fsdp__save(fsdp__saved *s, const char *name, fsdp_tensor *t)
{
    if (!t) return FSDP_OK;
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (!g) return fsdp_error();
    s->version = t->st->version;
    s->shard_version = t->st->shard_version;
    if (g->n_saved_hooks > 0) {
        s->hooks = g->saved_hooks[g->n_saved_hooks - 1];
        /* Without history: what a hook keeps must not hold the graph that holds it. */
        fsdp_tensor *twin = fsdp_detach(t);
        g->saving = name;
        s->packed = twin ? s->hooks.pack(s->hooks.arg, twin) : NULL;
        if (s->packed) return FSDP_OK;
        memset(s, 0, sizeof *s);
        return fsdp_error() ? fsdp_error()
                            : fsdp__fail(FSDP_INVALID_STATE,
                                         "%s: a saved-tensor hook packed "
                                         "nothing (NULL)",
                                         name);
    }
    /* A twin without history: saving an output itself would make a cycle. */
    s->t = fsdp__tensor_own(fsdp_detach(t));
    return s->t ? FSDP_OK : fsdp_error();
}

/* Once for each run of the node, however often the tensor is asked for. */
static fsdp_tensor *unpack(fsdp__saved *s, const char *name)
{
    if (s->t) return s->t;
    fsdp_tensor *t = s->hooks.unpack(s->hooks.arg, s->packed);
    if (!t && !fsdp_error())
        fsdp__fail(FSDP_INVALID_STATE, "%s: a saved-tensor hook unpacked nothing (NULL)", name);
    return s->t = fsdp_retain(t);
}

fsdp_tensor *fsdp__saved_get(fsdp__saved *s, const char *name)
{
    if (s->packed) return unpack(s, name);
    fsdp_tensor *t = s->t;
    if (!t) return NULL;
    const char *owner = t->st->owner ? t->st->owner : "a tensor";
    if (fsdp__tensor_readable(t, name) != FSDP_OK) return NULL;
    if (t->st->shard_version != s->shard_version) {
        fsdp__fail(FSDP_INVALID_STATE,
                   "backward of %s: %s was updated since the forward that used it (version %llu, "
                   "now %llu); run backward before the optimizer's step",
                   name, owner, (unsigned long long)s->shard_version,
                   (unsigned long long)t->st->shard_version);
        return NULL;
    }
    if (t->st->version != s->version) {
        fsdp__fail(FSDP_INVALID_STATE,
                   "backward of %s: %s was changed in place since the forward that used it "
                   "(version %u, now %u); write to a copy",
                   name, owner, s->version, t->st->version);
        return NULL;
    }
    return t;
}

fsdp_status fsdp__node_save(fsdp__node *n, int k, fsdp_tensor *t)
{
    return fsdp__save(&n->saved[k], n->name, t);
}

fsdp_tensor *fsdp__node_saved(fsdp__node *n, int k)
{
    return fsdp__saved_get(&n->saved[k], n->name);
}

fsdp_status fsdp_saved_hooks_push(const fsdp_saved_hooks *h)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (!g) return fsdp_error();
    if (!h || !h->pack || !h->unpack)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "saved-tensor hooks need both pack and unpack");
    if (g->n_saved_hooks == 16)
        return fsdp__fail(FSDP_INVALID_STATE, "saved-tensor hooks nested deeper than 16");
    g->saved_hooks[g->n_saved_hooks++] = *h;
    return FSDP_OK;
}

fsdp_status fsdp_saved_hooks_pop(void)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (!g) return fsdp_error();
    if (g->n_saved_hooks == 0)
        return fsdp__fail(FSDP_INVALID_STATE, "fsdp_saved_hooks_pop without a push");
    g->n_saved_hooks--;
    return FSDP_OK;
}
