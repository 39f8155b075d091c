/*
 * nonfinite.c - the first NaN or infinity of a step. See nonfinite.h.
 *
 * All ranks compute along, since gathers and reductions need all; each looks at its own numbers,
 * and they tell each other what they have found, so that all end with the same text.
 */
#include "train/nonfinite.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/finite.h"
#include "base/memory.h"
#include "fsdp/comm.h"
#include "fsdp/shard.h"
#include "fsdp/unit.h"
#include "nn/module.h"
#include "train/run_folder.h"

/* What one rank has found. Sent as it is. */
typedef struct finding {
    int64_t found;  /* 0: nothing */
    int64_t order;  /* of parameters: the larger, the nearer to the loss */
    char name[160]; /* of a module or parameter */
    char how[64];   /* "the output of", ... */
} finding;

/* All ranks' findings, in order of the ranks; the caller frees *all. */
static fsdp_status exchange(const finding *mine, finding **all)
{
    *all = fsdp__calloc((size_t)fsdp_world_size(), sizeof **all, "the ranks' findings");
    if (!*all) return fsdp_error();
    return fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, mine, *all, sizeof *mine, NULL);
}

static void set_name(finding *f, const fsdp_module *m, const char *how)
{
    fsdp__str path = {0};
    fsdp__module_path(m, &path);
    const char *text = fsdp__str_get(&path);
    f->found = 1;
    snprintf(f->name, sizeof f->name, "%s", *text ? text : m->type);
    snprintf(f->how, sizeof f->how, "%s", how);
    fsdp__str_free(&path);
}

static bool is_bad(const fsdp_tensor *t)
{
    if (!t || !fsdp_data(t)) return false;
    if (fsdp_is_contiguous(t))
        return fsdp__find_non_finite(fsdp_data(t), t->dtype, fsdp_numel(t)) >= 0;
    /* A view: contiguous copies are only made when something is wrong already. */
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *c = fsdp_clone(fsdp_detach((fsdp_tensor *)(uintptr_t)t));
    bool bad = c && fsdp__find_non_finite(fsdp_data(c), c->dtype, fsdp_numel(c)) >= 0;
    fsdp_scope_end(scope);
    return bad;
}

static bool any_bad(const fsdp_values *v)
{
    for (int i = 0; i < v->n; i++)
        if (v->t[i] && fsdp_dtype_is_floating(v->t[i]->dtype) && is_bad(v->t[i])) return true;
    return false;
}

/* ---- forward ------------------------------------------------------------------------------ */

/* Modules end from the inside out, so the first bad output is that of the innermost module. */
static fsdp_status look_at_output(void *arg, fsdp_module *m, const fsdp_values *in,
                                  fsdp_values *out)
{
    finding *f = arg;
    if (f->found || !any_bad(out)) return FSDP_OK;
    set_name(f, m, any_bad(in) ? "the input of" : "the output of");
    return FSDP_OK;
}

/* The numbers of the hooks, to take them off again. */
typedef struct hook_list {
    struct {
        fsdp_module *m;
        int number;
    } * items;
    int64_t n, cap;
} hook_list;

static fsdp_status add_hooks(hook_list *l, fsdp_module *m, finding *f)
{
    if (fsdp__module_has_forward(m)) {
        FSDP_TRY(FSDP__GROW(l->items, l->cap, l->n + 1, "hooks"));
        l->items[l->n].m = m;
        l->items[l->n].number = fsdp_register_forward_hook(m, look_at_output, f, 0);
        if (l->items[l->n].number < 0) return fsdp_error();
        l->n++;
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(add_hooks(l, m->in->children[i], f));
    return FSDP_OK;
}

static void remove_hooks(hook_list *l)
{
    for (int64_t i = 0; i < l->n; i++)
        (void)fsdp_remove_hook(l->items[i].m, l->items[i].number);
    free(l->items);
}

/* A weight that is not finite is the cause of all that follows. */
static fsdp_status look_at_weights(const fsdp__probe *p, finding *f)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(p->model, &l));
    for (int64_t i = 0; i < l.count && !f->found; i++) {
        if (!is_bad(fsdp__param_kept(l.items[i].param))) continue;
        f->found = 1;
        snprintf(f->name, sizeof f->name, "%s", l.items[i].name);
        snprintf(f->how, sizeof f->how, "the weight");
    }
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static fsdp_status probe_forward(const fsdp__probe *p, int64_t call, finding *f)
{
    hook_list hooks = {0};
    fsdp_status s = add_hooks(&hooks, p->model, f);
    if (s == FSDP_OK) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_no_grad_begin();
        (void)p->loss(p->arg, call);
        fsdp_no_grad_end();
        fsdp_scope_end(scope);
        s = fsdp_error();
    }
    remove_hooks(&hooks);
    return s;
}

/* ---- text ---------------------------------------------------------------------------------- */

static fsdp_status add_samples(const fsdp__probe *p, int rank, int64_t call, fsdp__str *out)
{
    fsdp__sampler_step theirs;
    int64_t first, n;
    FSDP_TRY(fsdp__sampler_plan(p->sampler, p->plan->first, rank, fsdp_world_size(),
                                p->plan->microbatch, &theirs));
    fsdp__sampler_samples(&theirs, call, &first, &n);
    fsdp__str_addf(out, "rank %d, microbatch %lld (sample%s", rank, (long long)call,
                   n == 1 ? "" : "s");
    for (int64_t i = 0; i < n && i < 8; i++)
        fsdp__str_addf(out, "%s %lld", i ? "," : "", (long long)(first + i));
    fsdp__str_addf(out, "%s)", n > 8 ? ", ..." : n == 0 ? " none" : "");
    return FSDP_OK;
}

/* A NaN's sign says nothing. */
static void add_number(fsdp__str *out, double v)
{
    if (isnan(v))
        fsdp__str_add(out, "nan");
    else
        fsdp__str_addf(out, "%g", v);
}

fsdp_status fsdp__nonfinite_loss(const fsdp__probe *p, int rank, int64_t call, double loss,
                                 fsdp__str *out)
{
    finding weight = {0}, output = {0}, *weights = NULL, *outputs = NULL;
    fsdp__str_add(out, "the loss of ");
    FSDP_TRY(add_samples(p, rank, call, out));
    fsdp__str_add(out, " is ");
    add_number(out, loss);
    FSDP_TRY(look_at_weights(p, &weight));
    fsdp_status s = exchange(&weight, &weights);
    int bad = -1;
    for (int r = 0; s == FSDP_OK && r < fsdp_world_size() && bad < 0; r++)
        if (weights[r].found) bad = r;
    if (s == FSDP_OK && bad >= 0) {
        fsdp__str_addf(out, ": the weight %s is not finite itself (the shard of rank %d)",
                       weights[bad].name, bad);
    } else if (s == FSDP_OK) {
        s = probe_forward(p, call, &output);
        if (s == FSDP_OK) s = exchange(&output, &outputs);
        if (s == FSDP_OK && outputs[rank].found)
            fsdp__str_addf(out, ": first in %s %s", outputs[rank].how, outputs[rank].name);
        else if (s == FSDP_OK)
            fsdp__str_add(out, "; computed a second time it was finite, so a machine may be at "
                               "fault");
    }
    free(weights);
    free(outputs);
    return s;
}

/* ---- backward -------------------------------------------------------------------------------- */

typedef struct backward_look {
    const fsdp__probe *p;
    fsdp_param_list params;
    finding f;
} backward_look;

/* Gradients go from the loss to the first layer, and take a NaN along: of those that have one, the
 * parameter nearest to the loss, the last in the model's order, is where it began. */
static void note_param(backward_look *b, const fsdp_param *p)
{
    for (int64_t i = 0; i < b->params.count; i++) {
        if (b->params.items[i].param != p || (b->f.found && i <= b->f.order)) continue;
        b->f.found = 1;
        b->f.order = i;
        snprintf(b->f.name, sizeof b->f.name, "%s", b->params.items[i].name);
    }
}

/* Before a unit's gradients are summed with those of other ranks. */
static void look_at_unit(void *arg, fsdp_event_kind k, const char *unit)
{
    backward_look *b = arg;
    if (k != FSDP_EVENT_REDUCE) return;
    fsdp__unit *u = fsdp__unit_of(fsdp_module_find(b->p->model, unit));
    for (int i = 0; u && i < u->n_params; i++)
        if (u->params[i].got_grad && is_bad(u->params[i].grad)) note_param(b, u->params[i].param);
}

/* What was not summed, since there is nobody to sum with. */
static void look_at_shards(backward_look *b)
{
    for (int64_t i = 0; i < b->params.count; i++)
        if (is_bad(fsdp_grad(fsdp__param_kept(b->params.items[i].param))))
            note_param(b, b->params.items[i].param);
}

static fsdp_status probe_backward(backward_look *b, int64_t call)
{
    FSDP_TRY(fsdp_set_requires_gradient_sync(b->p->model, 1, 1));
    FSDP_TRY(fsdp_set_is_last_backward(b->p->model, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = fsdp_backward(b->p->loss(b->p->arg, call));
    fsdp_scope_end(scope);
    FSDP_TRY(s);
    if (fsdp_world_size() == 1) look_at_shards(b);
    return fsdp_zero_grad(b->p->model);
}

fsdp_status fsdp__nonfinite_gradient(const fsdp__probe *p, double norm, fsdp__str *out)
{
    backward_look b = {.p = p};
    finding *all = NULL;
    int bad = -1;
    int64_t call = -1;
    fsdp__str_add(out, "the gradient norm is ");
    add_number(out, norm);
    FSDP_TRY(fsdp_zero_grad(p->model));
    FSDP_TRY(fsdp_module_params(p->model, &b.params));
    fsdp_status s = fsdp_set_event_hook(p->model, look_at_unit, &b);
    while (s == FSDP_OK && bad < 0 && ++call < p->plan->calls) {
        b.f = (finding){0};
        s = probe_backward(&b, call);
        free(all);
        if (s == FSDP_OK) s = exchange(&b.f, &all);
        for (int r = 0; s == FSDP_OK && r < fsdp_world_size() && bad < 0; r++)
            if (all[r].found) bad = r;
    }
    (void)fsdp_set_event_hook(p->model, NULL, NULL);
    fsdp_param_list_free(&b.params);
    if (s == FSDP_OK && bad >= 0) {
        fsdp__str_add(out, ": first in ");
        s = add_samples(p, bad, call, out);
        fsdp__str_addf(out, ", in the gradient of %s", all[bad].name);
    } else if (s == FSDP_OK) {
        fsdp__str_add(out, "; each rank's own gradients are finite, so their sum is too large for "
                           "training.mixed_precision_reduce, or a machine is at fault");
    }
    free(all);
    return s;
}

/* ---- rehearsal ---------------------------------------------------------------------------------
 */

fsdp_status fsdp__injection_parse(const char *text, fsdp__injection *out)
{
    char kind[16] = "";
    int at = 0;
    *out = (fsdp__injection){.now_call = -1};
    if (sscanf(text, "%15[^:]:%d:%" SCNd64 ":%" SCNd64 ":%n", kind, &out->rank, &out->step,
               &out->call, &at) == 4 &&
        at > 0 && (strcmp(kind, "forward") == 0 || strcmp(kind, "backward") == 0)) {
        out->backward = kind[0] == 'b';
        out->module = text + at;
        return FSDP_OK;
    }
    return fsdp__fail(FSDP_INVALID_CONFIG,
                      "debug.inject_nonfinite is '%s'; expected forward or backward, then rank, "
                      "step, microbatch and module: forward:3:2:1:model.layers.2",
                      text);
}

static fsdp_status not_in_run(const char *text, const char *what, int64_t value, int64_t from,
                              int64_t to)
{
    return fsdp__fail_alike(FSDP_INVALID_CONFIG,
                            "debug.inject_nonfinite is '%s': there is no %s %lld; expected %lld to "
                            "%lld in this run",
                            text, what, (long long)value, (long long)from, (long long)to);
}

fsdp_status fsdp__injection_check(const char *text, int ranks, int64_t steps, int64_t calls)
{
    fsdp__injection x;
    FSDP_TRY(fsdp__injection_parse(text, &x));
    if (x.rank < 0 || x.rank >= ranks) return not_in_run(text, "rank", x.rank, 0, ranks - 1);
    if (x.step < 1 || x.step > steps) return not_in_run(text, "step", x.step, 1, steps);
    if (x.call < 0 || (calls && x.call >= calls))
        return not_in_run(text, "microbatch", x.call, 0, calls ? calls - 1 : INT64_MAX);
    return FSDP_OK;
}

static fsdp_status pass(fsdp_function_context *c, fsdp_tensor **in, int n_in, fsdp_tensor **out,
                        int n_out)
{
    (void)c, (void)n_in, (void)n_out;
    out[0] = fsdp_clone(in[0]);
    return fsdp_error();
}

static fsdp_status spoil(fsdp_function_context *c, fsdp_tensor **grad_out, int n_out,
                         fsdp_tensor **grad_in, int n_in)
{
    (void)n_out, (void)n_in;
    fsdp__injection *x = fsdp_function_arg(c);
    grad_in[0] = fsdp_shift(grad_out[0], NAN);
    x->done = true;
    return fsdp_error();
}

static fsdp_status inject(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    static const fsdp_function nan_gradient = {"inject_nonfinite", pass, spoil, NULL};
    fsdp__injection *x = arg;
    (void)m, (void)in;
    if (fsdp_rank() != x->rank || x->now_step != x->step || x->now_call != x->call) return FSDP_OK;
    x->seen = true;
    if (!x->backward) {
        out->t[0] = fsdp_shift(out->t[0], NAN);
        x->done = true;
        return fsdp_error();
    }
    fsdp_tensor *spoiled = NULL;
    FSDP_TRY(fsdp_function_apply(&nan_gradient, x, out->t, 1, &spoiled, 1));
    out->t[0] = spoiled;
    return FSDP_OK;
}

fsdp_status fsdp__injection_install(fsdp__injection *x, fsdp_module *m)
{
    fsdp_module *at = fsdp_module_find(m, x->module);
    if (!at) return fsdp_error();
    return fsdp_register_forward_hook(at, inject, x, 0) < 0 ? fsdp_error() : FSDP_OK;
}

fsdp_status fsdp__injection_settle(const fsdp__injection *x)
{
    if (!x->module || x->done || x->now_step != x->step || fsdp_rank() != x->rank) return FSDP_OK;
    return fsdp__fail(
        FSDP_INVALID_CONFIG,
        "debug.inject_nonfinite: in step %lld, microbatch %lld of rank %d %s %s, so no NaN was put "
        "in; name a module that is called and trained, such as model.layers.0",
        (long long)x->step, (long long)x->call, x->rank,
        x->seen ? "no gradient came to the output of"
                : "there was no call of its own of (head and loss are one operation, and a list of "
                  "modules computes nothing)",
        x->module);
}
