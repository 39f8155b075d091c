/*
 * scope.c - who owns the tensors that expressions make.
 *
 * A scope holds one reference to each tensor made while it was innermost. A
 * tensor knows its scope and its place there, so leaving one is O(1); the last
 * item moves into the hole.
 */
#include <stdlib.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "tensor/state.h"

static void close_innermost(fsdp__tensor_state *s)
{
    fsdp_scope *scope = s->scope;
    /* Backwards, so that what was made last goes first. Releasing a tensor may free a graph, which
     * may forget others of this scope: read the count anew each time. */
    while (scope->count > 0) {
        fsdp_tensor *t = scope->items[--scope->count];
        t->scope = NULL;
        fsdp_release(t);
    }
    s->scope = scope->outer;
    scope->outer = s->spare;
    s->spare = scope;
}

static void free_state(void *p)
{
    fsdp__tensor_state *s = p;
    while (s->scope) /* left open by a function that failed */
        close_innermost(s);
    while (s->spare) {
        fsdp_scope *next = s->spare->outer;
        free(s->spare->items);
        free(s->spare);
        s->spare = next;
    }
    free(s->random.ids);
    free(s);
}

fsdp__tensor_state *fsdp__tensor_state_get(void)
{
    fsdp__tensor_state *s = fsdp__slot_get(FSDP__SLOT_TENSOR);
    if (s) return s;
    s = fsdp__calloc(1, sizeof *s, "the tensor room's state");
    if (!s) return NULL;
    s->purpose = FSDP_ACTIVATIONS;
    fsdp__slot_set(FSDP__SLOT_TENSOR, s, free_state);
    return s;
}

fsdp_purpose fsdp__purpose_set(fsdp_purpose p)
{
    fsdp__tensor_state *s = fsdp__tensor_state_get();
    if (!s) return FSDP_ACTIVATIONS;
    fsdp_purpose before = s->purpose;
    s->purpose = p;
    return before;
}

static fsdp_status put(fsdp_scope *scope, fsdp_tensor *t)
{
    FSDP_TRY(FSDP__GROW(scope->items, scope->cap, scope->count + 1, "a scope"));
    t->scope = scope;
    t->scope_index = scope->count;
    scope->items[scope->count++] = t;
    return FSDP_OK;
}

fsdp_tensor *fsdp__scope_adopt(fsdp_tensor *t)
{
    fsdp__tensor_state *s = fsdp__tensor_state_get();
    if (s && !s->scope) return t;
    if (!s || put(s->scope, t) != FSDP_OK) {
        fsdp_release(t);
        return NULL;
    }
    return t;
}

void fsdp__scope_forget(fsdp_tensor *t)
{
    fsdp_scope *scope = t->scope;
    if (!scope) return;
    fsdp_tensor *last = scope->items[--scope->count];
    scope->items[t->scope_index] = last;
    last->scope_index = t->scope_index;
    t->scope = NULL;
}

fsdp_scope *fsdp_scope_begin(void)
{
    fsdp__tensor_state *s = fsdp__tensor_state_get();
    if (!s) return NULL;
    fsdp_scope *scope = s->spare;
    if (scope)
        s->spare = scope->outer;
    else if (!(scope = fsdp__calloc(1, sizeof *scope, "a scope")))
        return NULL;
    scope->outer = s->scope;
    s->scope = scope;
    return scope;
}

void fsdp_scope_end(fsdp_scope *scope)
{
    fsdp__tensor_state *s = scope ? fsdp__tensor_state_get() : NULL;
    if (!s) return;
    bool open = false;
    for (fsdp_scope *k = s->scope; k && !open; k = k->outer)
        open = k == scope;
    if (!open) return; /* ended already, with one around it */
    while (s->scope != scope)
        close_innermost(s);
    close_innermost(s);
}

void fsdp_scope_keep(fsdp_tensor *t)
{
    if (!t || !t->scope) return;
    fsdp_scope *outer = t->scope->outer;
    fsdp__scope_forget(t);
    if (outer && put(outer, t) != FSDP_OK) fsdp_release(t);
}

fsdp_tensor *fsdp__tensor_own(fsdp_tensor *t)
{
    if (t && t->scope) fsdp__scope_forget(t);
    return t;
}

void fsdp_set(fsdp_tensor **x, fsdp_tensor *y)
{
    if (!x) {
        fsdp__fail_null("fsdp_set", "the place of the tensor");
        return;
    }
    fsdp_tensor *old = *x;
    *x = y;
    if (!old || old == y) return;
    /* In a forward: what stands in a scope around it, or in none, is an argument or a parameter. */
    const fsdp__tensor_state *s = fsdp__tensor_state_get();
    if (!s || old->scope != s->scope) return;
    fsdp__scope_forget(old);
    fsdp_release(old);
}
