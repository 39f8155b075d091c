/*
 * function.c - functions of the user's own, as one node of the graph.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "base/error.h"
#include "base/memory.h"

struct fsdp_function_context {
    fsdp_function f; /* a copy: the caller's may be gone by the backward */
    void *arg;
    fsdp__node *node; /* borrowed: the node owns the context */
    int n_saved;
    bool building; /* a graph is being made: saves are kept */
    int n_in, n_out;
};

static void free_context(void *p)
{
    fsdp_function_context *c = p;
    if (c->f.drop) c->f.drop(c->arg);
    free(c);
}

fsdp_status fsdp_function_save(fsdp_function_context *c, fsdp_tensor *t)
{
    if (!c) return fsdp__fail_null("fsdp_function_save", "the context");
    if (c->n_saved == FSDP__SAVED_MAX)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: saves more than %d tensors", c->node->name,
                          FSDP__SAVED_MAX);
    int k = c->n_saved++;
    return c->building ? fsdp__node_save(c->node, k, t) : FSDP_OK;
}

fsdp_tensor *fsdp_function_saved(fsdp_function_context *c, int i)
{
    return c && i >= 0 && i < FSDP__SAVED_MAX ? fsdp__node_saved(c->node, i) : NULL;
}

void *fsdp_function_arg(fsdp_function_context *c)
{
    return c ? c->arg : NULL;
}

int fsdp_function_wants(fsdp_function_context *c, int i)
{
    return c && i >= 0 && fsdp__grad_wanted(c->node, i);
}

static fsdp_status run_backward(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_function_context *c = n->extra;
    fsdp_tensor *gin[FSDP_CUSTOM_MAX] = {NULL};
    fsdp_status s = c->f.backward(c, gout, c->n_out, gin, c->n_in);
    if (fsdp_error()) return fsdp_error();
    if (s != FSDP_OK)
        return fsdp__fail(s, "%s: its backward failed: %s", n->name, fsdp_status_name(s));
    for (int k = 0; k < c->n_in; k++) {
        if (!gin[k] || !fsdp__grad_wanted(n, k)) continue;
        const fsdp__meta *m = &n->in[k].meta;
        bool fits = gin[k]->ndim == m->ndim;
        for (int i = 0; fits && i < m->ndim; i++)
            fits = gin[k]->size[i] == m->size[i];
        if (!fits)
            return fsdp__fail(FSDP_INVALID_SHAPE,
                              "%s: the gradient of input %d has other sizes than the input",
                              n->name, k);
        FSDP_TRY(fsdp__grad_give(n, k, gin[k]));
    }
    return FSDP_OK;
}

static fsdp_status check_function(const fsdp_function *f, fsdp_tensor **in, int n_in,
                                  fsdp_tensor **out, int n_out)
{
    if (!f || !f->forward || !f->backward)
        return fsdp__fail_null("fsdp_function_apply", !f            ? "the function"
                                                      : !f->forward ? "its forward"
                                                                    : "its backward");
    const char *name = f->name ? f->name : "a custom function";
    if (n_in < 0 || n_out < 0 || n_in > FSDP_CUSTOM_MAX || n_out > FSDP_CUSTOM_MAX)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: %d inputs and %d outputs; at most %d each",
                          name, n_in, n_out, FSDP_CUSTOM_MAX);
    if ((n_in > 0 && !in) || (n_out > 0 && !out))
        return fsdp__fail_null(name, n_in > 0 && !in ? "the inputs" : "the place for outputs");
    return FSDP_OK;
}

fsdp_status fsdp_function_apply(const fsdp_function *f, void *arg, fsdp_tensor **in, int n_in,
                                fsdp_tensor **out, int n_out)
{
    for (int k = 0; out && n_out <= FSDP_CUSTOM_MAX && k < n_out; k++)
        out[k] = NULL;
    if (check_function(f, in, n_in, out, n_out) != FSDP_OK) {
        if (f && f->drop) f->drop(arg);
        return fsdp_error();
    }
    fsdp_function_context *c = fsdp__calloc(1, sizeof *c, "a function's context");
    fsdp__node *n =
        c ? fsdp__node_create(f->name ? f->name : "a custom function", run_backward) : NULL;
    fsdp_status s = FSDP_OK;
    if (!n) {
        if (f->drop) f->drop(arg);
        free(c);
        return fsdp_error();
    }
    *c = (fsdp_function_context){.f = *f, .arg = arg, .node = n, .n_in = n_in, .n_out = n_out};
    n->extra = c;
    n->extra_free = free_context;
    FSDP_GO(fsdp_error());
    for (int k = 0; k < n_in && fsdp_grad_enabled(); k++)
        c->building = c->building || fsdp_requires_grad(in[k]);
    for (int k = 0; k < n_in && c->building; k++)
        FSDP_GO(fsdp__node_input(n, k, in[k]));
    fsdp_no_grad_begin();
    s = f->forward(c, in, n_in, out, n_out);
    fsdp_no_grad_end();
    if (s != FSDP_OK && !fsdp_error())
        fsdp__fail(s, "%s: its forward failed: %s", n->name, fsdp_status_name(s));
    if (s == FSDP_OK) s = fsdp_error();
    for (int k = 0; k < n_out && s == FSDP_OK && c->building; k++) {
        if (!out[k] || !fsdp_dtype_is_floating(out[k]->dtype)) continue;
        bool again = out[k]->ag && out[k]->ag->node;
        for (int j = 0; j < n_in && !again; j++)
            again = out[k] == in[j];
        if (again) /* an input handed through: a twin is the output */
            out[k] = fsdp_detach(out[k]);
        s = out[k] ? fsdp__node_output(n, k, out[k]) : fsdp_error();
    }
done:
    if (s != FSDP_OK)
        for (int k = 0; k < n_out; k++)
            out[k] = NULL;
    fsdp__node_release(n);
    return s;
}
