/*
 * call.c - calling a module: hooks around its forward, which may be a checkpoint, and a scope of
 * its own whose outputs go to the caller's.
 */
#include <string.h>

#include "autograd/node.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "nn/module.h"

/* Random ops inside draw by the module's path and how often it ran in this microbatch. */
static fsdp_status enter_random(fsdp_module *m, fsdp__random *r)
{
    struct fsdp__module *in = m->in;
    if (!in->path) {
        fsdp__str s = {0};
        fsdp__module_path(m, &s);
        in->path = fsdp__rng_mix_str(fsdp__rng_key(1), fsdp__str_get(&s));
        fsdp__str_free(&s);
    }
    if (in->round != r->round) {
        in->round = r->round;
        in->calls = 0;
    }
    uint64_t path = fsdp__rng_mix(in->path, in->calls);
    FSDP_TRY(fsdp__random_enter(r, &path));
    in->calls += !fsdp_recomputing(); /* a forward that runs again is no further call */
    r->path = path;
    r->calls = 0;
    return FSDP_OK;
}

/* A number of tensors that somebody else wrote. */
static fsdp_status fits(const fsdp_module *m, const fsdp_values *v, const char *what)
{
    if (v->n >= 0 && v->n <= FSDP_VALUES_MAX) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT, "the %s of %s: %d tensors; expected 0 to %d", what,
                      m->type, v->n, FSDP_VALUES_MAX);
}

static fsdp_status run_forward(fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    if (m->forward) {
        out->n = 0;
        memset(out->t, 0, sizeof out->t);
        FSDP_TRY(m->forward(m, in, out));
        FSDP_TRY(fits(m, out, "outputs"));
        return fsdp_error();
    }
    int takes = m->forward1 ? 1 : 2;
    if (in->n != takes)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s takes %d inputs and was given %d", m->type,
                          takes, in->n);
    out->n = 1;
    out->t[0] = takes == 1 ? m->forward1(m, in->t[0]) : m->forward2(m, in->t[0], in->t[1]);
    if (!out->t[0] && !fsdp_error())
        return fsdp__fail(FSDP_INVALID_STATE, "the forward of %s returned NULL without an error",
                          m->type);
    return fsdp_error();
}

/* The module's own forward again, inside its hooks: what these did to the inputs stands in them. */
static fsdp_status forward_again(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out,
                                 int n_out)
{
    (void)out;
    (void)n_out;
    const fsdp__life *life = arg;
    if (!life->of)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "backward through a checkpointed module that was freed after its "
                          "forward; free modules when no loss of theirs is left to go backward "
                          "from");
    fsdp_values given = {n_in, {NULL}}, unused;
    memcpy(given.t, in, sizeof *in * (size_t)n_in);
    return run_forward(life->of, &given, &unused);
}

static fsdp_status run_checkpointed(fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    fsdp__frame *f = fsdp__recompute_begin(forward_again, fsdp__life_retain(m->in->life),
                                           fsdp__life_release, in->t, in->n, &m->in->checkpoint);
    if (!f) return fsdp_error();
    return fsdp__recompute_end(f, run_forward(m, in, out));
}

static fsdp_status run(fsdp_module *m, fsdp_values *in, fsdp_values *out)
{
    struct fsdp__module *mi = m->in;
    for (int64_t i = 0; i < mi->n_hooks; i++) {
        if (!mi->hooks[i].pre) continue;
        FSDP_TRY(mi->hooks[i].pre(mi->hooks[i].arg, m, in));
        FSDP_TRY(fits(m, in, "inputs behind a hook"));
    }
    FSDP_TRY(mi->checkpointed && fsdp_grad_enabled() ? run_checkpointed(m, in, out)
                                                     : run_forward(m, in, out));
    for (int64_t i = 0; i < mi->n_hooks; i++) {
        if (!mi->hooks[i].post) continue;
        FSDP_TRY(mi->hooks[i].post(mi->hooks[i].arg, m, in, out));
        FSDP_TRY(fits(m, out, "outputs behind a hook"));
    }
    return FSDP_OK;
}

static fsdp_status run_method(fsdp_module *m, const fsdp__method_entry *e, fsdp_values *in,
                              fsdp_values *out)
{
    fsdp__method_entry now = *e; /* the method may add others */
    if (now.pre) FSDP_TRY(now.pre(now.arg, m, in));
    FSDP_TRY(now.fn(m, in, out));
    FSDP_TRY(fsdp_error());
    FSDP_TRY(fits(m, out, "outputs"));
    return now.post ? now.post(now.arg, m, in, out) : FSDP_OK;
}

/* Calls m, or the method e of it, in a scope of its own. */
static fsdp_status call(fsdp_module *m, const fsdp__method_entry *e, const fsdp_values *in,
                        fsdp_values *out)
{
    fsdp__random *r = fsdp__random_get();
    FSDP_TRY(fits(m, in, "inputs"));
    fsdp_scope *scope = r ? fsdp_scope_begin() : NULL;
    if (!scope) return fsdp_error();
    uint64_t path = r->path, calls = r->calls;
    fsdp_values given = *in;
    fsdp_status s = enter_random(m, r);
    if (s == FSDP_OK) s = e ? run_method(m, e, &given, out) : run(m, &given, out);
    r->path = path;
    r->calls = calls;
    for (int k = 0; k < out->n && s == FSDP_OK; k++)
        if (out->t[k] && out->t[k]->scope == scope) fsdp_scope_keep(out->t[k]);
    fsdp_scope_end(scope);
    if (s != FSDP_OK) {
        *out = (fsdp_values){0};
        if (!fsdp_error()) /* a user's forward that returned a status and said nothing */
            fsdp__fail(s, "the %s of %s failed: %s", e ? "method" : "forward", m->type,
                       fsdp_status_name(s));
    }
    return s;
}

fsdp_status fsdp_module_call(fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    if (out) *out = (fsdp_values){0};
    if (fsdp_error()) return fsdp_error();
    if (!m || !in || !out)
        return fsdp__fail_null("fsdp_module_call", !m ? "the module" : "what it takes or returns");
    if (!fsdp__module_has_forward(m))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s is a container and has no forward; call its children", m->type);
    return call(m, NULL, in, out);
}

fsdp_status fsdp_module_call_method(fsdp_module *m, const char *name, const fsdp_values *in,
                                    fsdp_values *out)
{
    if (out) *out = (fsdp_values){0};
    if (fsdp_error()) return fsdp_error();
    if (!m || !name) return fsdp__fail_null("fsdp_module_call_method", "module or name");
    if (!in || !out) return fsdp__fail_null("fsdp_module_call_method", "what it takes or returns");
    const fsdp__method_entry *e = fsdp__module_method(m, name);
    if (!e) return fsdp__fail(FSDP_NOT_FOUND, "%s has no method \"%s\"", m->type, name);
    return call(m, e, in, out);
}

fsdp_tensor *fsdp_call(fsdp_module *m, fsdp_tensor *x)
{
    fsdp_values in = {1, {x}}, out;
    if (!x && fsdp_error()) return NULL;
    return fsdp_module_call(m, &in, &out) == FSDP_OK ? out.t[0] : NULL;
}

fsdp_tensor *fsdp_call2(fsdp_module *m, fsdp_tensor *x, fsdp_tensor *y)
{
    fsdp_values in = {2, {x, y}}, out;
    if ((!x || !y) && fsdp_error()) return NULL;
    return fsdp_module_call(m, &in, &out) == FSDP_OK ? out.t[0] : NULL;
}

/* ---- checkpoints -------------------------------------------------------------- */

/* The first module of m's tree, or above it, whose parameters are sharded; NULL: none. */
static const fsdp_module *sharded_below(const fsdp_module *m)
{
    if (m->in->shard) return m;
    for (int64_t i = 0; i < m->in->n_params; i++)
        if (m->in->params[i].param->shard) return m;
    const fsdp_module *found = NULL;
    for (int64_t i = 0; i < m->in->n_children && !found; i++)
        found = sharded_below(m->in->children[i]);
    return found;
}

fsdp_status fsdp_checkpoint_module(fsdp_module *m, const fsdp_checkpoint_options *o)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_checkpoint_module", "the module");
    if (!fsdp__module_has_forward(m))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_checkpoint_module of a %s, which has no forward; checkpoint its "
                          "children",
                          m->type);
    const fsdp_module *sharded = sharded_below(m);
    for (const fsdp_module *up = m->in->parent; up && !sharded; up = up->in->parent)
        if (up->in->shard) sharded = up;
    if (sharded) {
        fsdp__str a = {0}, b = {0};
        fsdp__module_path(m, &a);
        fsdp__module_path(sharded, &b);
        fsdp__fail(FSDP_INVALID_STATE,
                   "fsdp_checkpoint_module of %s \"%s\": %s \"%s\" is sharded already; call "
                   "fsdp_checkpoint_module before fsdp_fully_shard",
                   m->type, fsdp__str_get(&a), sharded->type, fsdp__str_get(&b));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    if (!m->in->life && !(m->in->life = fsdp__life_create(m))) return fsdp_error();
    m->in->checkpointed = true;
    m->in->checkpoint = o ? *o : (fsdp_checkpoint_options){0};
    return FSDP_OK;
}

int fsdp_is_checkpointed(const fsdp_module *m)
{
    return m && m->in->checkpointed;
}

/* ---- hooks -------------------------------------------------------------------- */

static int add_hook(fsdp_module *m, fsdp__hook_entry e, int first)
{
    struct fsdp__module *in = m->in;
    if (FSDP__GROW(in->hooks, in->cap_hooks, in->n_hooks + 1, "hooks") != FSDP_OK) return -1;
    int64_t at = first ? 0 : in->n_hooks;
    memmove(in->hooks + at + 1, in->hooks + at, sizeof *in->hooks * (size_t)(in->n_hooks - at));
    e.number = in->next_hook++;
    in->hooks[at] = e;
    in->n_hooks++;
    return e.number;
}

static int no_hook(const char *function)
{
    fsdp__fail_null(function, "module or function");
    return -1;
}

int fsdp_register_forward_pre_hook(fsdp_module *m, fsdp_forward_pre_hook fn, void *arg, int first)
{
    if (!m || !fn) return no_hook("fsdp_register_forward_pre_hook");
    return add_hook(m, (fsdp__hook_entry){.pre = fn, .arg = arg}, first);
}

int fsdp_register_forward_hook(fsdp_module *m, fsdp_forward_hook fn, void *arg, int first)
{
    if (!m || !fn) return no_hook("fsdp_register_forward_hook");
    return add_hook(m, (fsdp__hook_entry){.post = fn, .arg = arg}, first);
}

fsdp_status fsdp_remove_hook(fsdp_module *m, int number)
{
    struct fsdp__module *in = m ? m->in : NULL;
    for (int64_t i = 0; in && i < in->n_hooks; i++) {
        if (in->hooks[i].number != number) continue;
        in->n_hooks--;
        memmove(in->hooks + i, in->hooks + i + 1, sizeof *in->hooks * (size_t)(in->n_hooks - i));
        return FSDP_OK;
    }
    return fsdp__fail(FSDP_NOT_FOUND, "no hook number %d", number);
}
