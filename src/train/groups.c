/*
 * groups.c - optimizer.param_groups. Each map goes through an option table of its own, so that its
 * mistakes read as those of any other option.
 */
#include "train/groups.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "format/yaml.h"

typedef struct group {
    char *pattern;
    double lr, lr_factor, weight_decay, beta1, beta2, eps, momentum; /* NAN: not given */
} group;

#define NUMBER(field, hi)                                                        \
    {                                                                            \
#field, FSDP__OPT_FLOAT, offsetof(group, field), NULL, 0, hi, NULL, NULL \
    }
static const fsdp__option rows[] = {
    {"pattern", FSDP__OPT_STRING, offsetof(group, pattern), NULL, 1, 0, NULL, NULL},
    NUMBER(lr, 1e30),
    NUMBER(lr_factor, 1e30),
    NUMBER(weight_decay, 1e18),
    NUMBER(beta1, 0.999999999),
    NUMBER(beta2, 0.999999999),
    NUMBER(eps, 1e18),
    NUMBER(momentum, 1e18),
    {NULL, FSDP__OPT_BOOL, 0, NULL, 1, 0, NULL, NULL}};

/* One map on its way. */
typedef struct reading {
    const fsdp__options *options;
    char place[48]; /* "optimizer.param_groups[1]" */
} reading;

static fsdp_status take(void *arg, const fsdp__yaml_value *v)
{
    const reading *r = arg;
    char name[64];
    int row = 0;
    while (rows[row].name && strcmp(rows[row].name, v->name) != 0)
        row++;
    if (!rows[row].name)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: '%s' is nothing that a group sets; expected pattern, lr, lr_factor, "
                          "weight_decay, beta1, beta2, eps or momentum",
                          r->place, v->name);
    snprintf(name, sizeof name, "group.%s", v->name);
    if (!v->text)
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s: %s is a list; expected a single value",
                          r->place, v->name);
    return fsdp__options_set(r->options, name, v->text, r->place);
}

static fsdp_status to_options(const fsdp__train_config *c, const group *g, const char *place,
                              fsdp_group_options *out)
{
    *out = fsdp_group_defaults();
    if (!g->pattern || !*g->pattern)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: no pattern; expected {pattern: \"*norm*\", ...}", place);
    if (!isnan(g->lr) && !isnan(g->lr_factor))
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s: both lr and lr_factor; expected one of them",
                          place);
    if (!isnan(g->lr) && c->optimizer.lr == 0)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s: lr is %g where optimizer.lr is 0; expected optimizer.lr above 0, "
                          "since the schedule scales all rates by it",
                          place, g->lr);
    if (!isnan(g->lr)) out->lr_factor = g->lr / c->optimizer.lr;
    if (!isnan(g->lr_factor)) out->lr_factor = g->lr_factor;
    out->weight_decay = g->weight_decay;
    out->beta1 = g->beta1;
    out->beta2 = g->beta2;
    out->eps = g->eps;
    out->momentum = g->momentum;
    return FSDP_OK;
}

/* Map i as a group; fn gets it, with a pattern that lives during the call. */
static fsdp_status with_group(const fsdp__train_config *c, int64_t i,
                              fsdp_status (*fn)(void *arg, const fsdp_group_options *g), void *arg)
{
    group g = {0};
    const fsdp__section sections[] = {{"group", NULL, rows, &g}, {NULL, NULL, NULL, NULL}};
    const fsdp__options options = {sections, NULL};
    reading r = {.options = &options};
    fsdp__str text = {0};
    fsdp_group_options out;
    fsdp_status s = fsdp__options_defaults(&options);
    g.lr = g.lr_factor = g.weight_decay = g.beta1 = g.beta2 = g.eps = g.momentum = NAN;
    snprintf(r.place, sizeof r.place, "optimizer.param_groups[%lld]", (long long)i);
    fsdp__str_addf(&text, "group: %s\n", c->optimizer.param_groups.items[i]);
    if (s == FSDP_OK) s = fsdp__yaml_parse(fsdp__str_get(&text), text.len, r.place, take, &r);
    if (s == FSDP_OK) s = to_options(c, &g, r.place, &out);
    if (s == FSDP_OK) {
        out.pattern = g.pattern;
        s = fn(arg, &out);
    }
    fsdp__str_free(&text);
    fsdp__options_free(&options);
    return s;
}

static fsdp_status nothing(void *arg, const fsdp_group_options *g)
{
    (void)arg;
    (void)g;
    return FSDP_OK;
}

fsdp_status fsdp__train_groups_check(const fsdp__train_config *c)
{
    for (int64_t i = 0; i < c->optimizer.param_groups.count; i++)
        FSDP_TRY(with_group(c, i, nothing, NULL));
    return FSDP_OK;
}

static fsdp_status add(void *opt, const fsdp_group_options *g)
{
    return fsdp_optimizer_add_group(opt, g);
}

fsdp_status fsdp__train_groups_add(const fsdp__train_config *c, fsdp_optimizer *opt,
                                   fsdp__metrics *m)
{
    int64_t n = c->optimizer.param_groups.count;
    for (int64_t i = 0; i < n; i++)
        FSDP_TRY(with_group(c, i, add, opt));
    if (n == 0) return FSDP_OK;
    char *text = fsdp_optimizer_print_groups(opt);
    if (!text) return fsdp__fail_memory("the table of parameter groups", 0);
    fsdp__say(m, "%s", text);
    free(text);
    return FSDP_OK;
}
