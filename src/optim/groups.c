/*
 * groups.c - parameter groups: which settings hold for which parameter, by name.
 *
 * A group holds what differs from the optimizer's own settings, and the learning rate as a factor
 * of the optimizer's, so that one schedule moves all groups. A parameter belongs to the first group
 * whose pattern takes its name; what none takes keeps the optimizer's settings.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/match.h"
#include "base/memory.h"
#include "base/str.h"
#include "nn/module.h"
#include "optim/optim_internal.h"

fsdp_group_options fsdp_group_defaults(void)
{
    return (fsdp_group_options){NULL, 1.0, NAN, NAN, NAN, NAN, NAN};
}

static fsdp_group_options own_settings(const fsdp_optimizer *o)
{
    if (!o->adamw)
        return (fsdp_group_options){NULL, 1.0, o->s.weight_decay, 0.0, 0.0, 0.0, o->s.momentum};
    return (fsdp_group_options){NULL,     1.0, o->a.weight_decay, o->a.beta1, o->a.beta2,
                                o->a.eps, 0.0};
}

fsdp_group_options fsdp__opt_settings(const fsdp_optimizer *o, const fsdp__opt_slot *s)
{
    return s->group < 0 ? own_settings(o) : o->groups[s->group];
}

void fsdp__opt_groups_free(fsdp_optimizer *o)
{
    for (int i = 0; i < o->n_groups; i++)
        free((char *)(uintptr_t)o->groups[i].pattern);
    free(o->groups);
    o->groups = NULL;
    o->n_groups = 0;
}

/* ---- adding ------------------------------------------------------------------------- */

/* What is not said is the optimizer's; what it does not have is an error. */
static fsdp_status resolve(const fsdp_optimizer *o, fsdp_group_options *g)
{
    fsdp_group_options own = own_settings(o);
    const char *foreign = NULL;
    if (o->adamw && !isnan(g->momentum)) foreign = "momentum";
    if (!o->adamw && !isnan(g->beta1)) foreign = "beta1";
    if (!o->adamw && !isnan(g->beta2)) foreign = "beta2";
    if (!o->adamw && !isnan(g->eps)) foreign = "eps";
    if (foreign)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "parameter group \"%s\" sets %s, which %s does not have", g->pattern,
                          foreign, o->adamw ? "AdamW" : "SGD");
    if (isnan(g->weight_decay)) g->weight_decay = own.weight_decay;
    if (isnan(g->beta1)) g->beta1 = own.beta1;
    if (isnan(g->beta2)) g->beta2 = own.beta2;
    if (isnan(g->eps)) g->eps = own.eps;
    if (isnan(g->momentum)) g->momentum = own.momentum;
    if (!(g->lr_factor >= 0 && g->weight_decay >= 0 && g->eps >= 0 && g->momentum >= 0 &&
          g->beta1 >= 0 && g->beta1 < 1 && g->beta2 >= 0 && g->beta2 < 1))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "parameter group \"%s\": lr factor %g, weight decay %g, betas %g %g, eps "
                          "%g, momentum %g; expected all >= 0 and betas below 1",
                          g->pattern, g->lr_factor, g->weight_decay, g->beta1, g->beta2, g->eps,
                          g->momentum);
    if (!o->adamw && (g->momentum != 0) != (own.momentum != 0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "parameter group \"%s\": momentum %g where the optimizer's is %g; "
                          "expected both to be 0 or neither, since the state is one for all",
                          g->pattern, g->momentum, own.momentum);
    return FSDP_OK;
}

/* Up to five names that are there, for the message. */
static fsdp_status no_match(const fsdp_optimizer *o, const char *pattern, int64_t taken)
{
    if (taken > 0)
        return fsdp__fail(FSDP_NOT_FOUND,
                          "parameter group \"%s\" takes %lld parameters, all of which earlier "
                          "groups have taken; put it before them, or remove it",
                          pattern, (long long)taken);
    fsdp__str names = {0};
    for (int64_t i = 0; i < o->n && i < 5; i++)
        fsdp__str_addf(&names, "%s%s", i ? ", " : "", o->slots[i].param->name);
    fsdp_status s = fsdp__fail(FSDP_NOT_FOUND,
                               "parameter group \"%s\" takes no trainable parameter; there are "
                               "%lld, such as %s (patterns: * any characters, ? one, a|b either)",
                               pattern, (long long)o->n, fsdp__str_get(&names));
    fsdp__str_free(&names);
    return s;
}

fsdp_status fsdp_optimizer_add_group(fsdp_optimizer *o, const fsdp_group_options *options)
{
    if (fsdp_error()) return fsdp_error();
    if (!o || !options || !options->pattern)
        return fsdp__fail_null("fsdp_optimizer_add_group", "the optimizer or the pattern");
    fsdp_group_options g = *options;
    FSDP_TRY(resolve(o, &g));
    int64_t takes = 0, taken = 0, cap = o->n_groups;
    for (int64_t i = 0; i < o->n; i++) {
        bool fits = fsdp__match(g.pattern, o->slots[i].param->name);
        takes += fits && o->slots[i].group < 0;
        taken += fits && o->slots[i].group >= 0;
    }
    if (takes == 0) return no_match(o, g.pattern, taken);
    FSDP_TRY(FSDP__GROW(o->groups, cap, o->n_groups + 1, "parameter groups"));
    if (!(g.pattern = fsdp__strdup(g.pattern))) return fsdp_error();
    for (int64_t i = 0; i < o->n; i++)
        if (o->slots[i].group < 0 && fsdp__match(g.pattern, o->slots[i].param->name))
            o->slots[i].group = o->n_groups;
    o->groups[o->n_groups++] = g;
    return FSDP_OK;
}

/* ---- looking ------------------------------------------------------------------------- */

int fsdp_optimizer_group_count(const fsdp_optimizer *o)
{
    return o ? o->n_groups : 0;
}

fsdp_status fsdp_optimizer_group(const fsdp_optimizer *o, int i, fsdp_group_options *out)
{
    if (!o || !out) return fsdp__fail_null("fsdp_optimizer_group", "the optimizer or the result");
    if (i < -1 || i >= o->n_groups)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "parameter group %d; there are %d", i,
                          o->n_groups);
    *out = i < 0 ? own_settings(o) : o->groups[i];
    return FSDP_OK;
}

static void add_row(const fsdp_optimizer *o, int group, fsdp__str *out)
{
    int64_t params = 0, elements = 0;
    for (int64_t i = 0; i < o->n; i++) {
        const fsdp_param *p = o->slots[i].param;
        if (o->slots[i].group != group) continue;
        params++;
        elements += fsdp__numel_of(p->ndim, p->size);
    }
    if (group < 0 && params == 0) return;
    fsdp_group_options g = group < 0 ? own_settings(o) : o->groups[group];
    fsdp__str_addf(out, "%-28s %10lld %14lld %10g %12g", group < 0 ? "(all others)" : g.pattern,
                   (long long)params, (long long)elements, g.lr_factor, g.weight_decay);
    if (o->adamw)
        fsdp__str_addf(out, " %7g %7g %8g\n", g.beta1, g.beta2, g.eps);
    else
        fsdp__str_addf(out, " %8g\n", g.momentum);
}

char *fsdp_optimizer_print_groups(const fsdp_optimizer *o)
{
    fsdp__str out = {0};
    if (!o) return NULL;
    fsdp__str_addf(&out, "%-28s %10s %14s %10s %12s%s\n", "parameter group", "parameters",
                   "elements", "lr factor", "weight decay",
                   o->adamw ? "   beta1   beta2      eps" : " momentum");
    for (int i = 0; i < o->n_groups; i++)
        add_row(o, i, &out);
    add_row(o, -1, &out);
    return fsdp__str_take(&out);
}
