/*
 * units.c - which modules become units. See units.h.
 */
#include "train/units.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/match.h"
#include "base/memory.h"
#include "fsdp/models.h"
#include "lora/lora.h"
#include "nn/module.h"
#include "train/strategy.h"

/* ---- finding ---------------------------------------------------------------------------- */

static fsdp_status take(fsdp__unit_modules *u, fsdp_module *m)
{
    FSDP_TRY(FSDP__GROW(u->items, u->cap, u->count + 1, "units"));
    u->items[u->count++] = m;
    return FSDP_OK;
}

/* pattern NULL: linear layers. Adapters belong to their layer. */
static fsdp_status walk(const char *pattern, fsdp_module *m, fsdp__str *name,
                        fsdp__unit_modules *out)
{
    fsdp__linear_info info;
    size_t base = name->len;
    for (int i = 0; i < fsdp_module_child_count(m); i++) {
        fsdp_module *child = fsdp_module_child(m, i);
        if (fsdp__lora_is_adapter(child)) continue;
        fsdp__str_addf(name, "%s%s", base ? "." : "", fsdp_module_name(child));
        FSDP_TRY(walk(pattern, child, name, out));
        name->len = base;
        if (name->p) name->p[base] = '\0';
    }
    const char *text = fsdp__str_get(name);
    if (!*text || !fsdp__module_has_forward(m)) return FSDP_OK; /* the root, a container */
    if (!(pattern ? fsdp__match(pattern, text) : fsdp__linear_info_of(m, &info))) return FSDP_OK;
    if (!strcmp(text, "lm_head"))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "parallelism.fsdp_units: '%s' takes lm_head, which is computed with its "
                          "loss inside the root's forward and stays in the root's unit; write a "
                          "pattern that leaves it out",
                          pattern);
    return take(out, m);
}

static fsdp_status find_by_pattern(const char *text, fsdp_module *model, fsdp__unit_modules *out)
{
    fsdp__str name = {0};
    bool linear = !strcmp(text, "linear");
    fsdp_status s = walk(linear ? NULL : text, model, &name, out);
    if (name.failed && s == FSDP_OK) s = fsdp__fail_memory("names of modules", name.len);
    fsdp__str_free(&name);
    if (s != FSDP_OK || out->count) return s;
    fsdp_module *first = fsdp_model_block(model, 0);
    fsdp__module_path(first, &name);
    s = fsdp__fail(FSDP_INVALID_CONFIG,
                   "parallelism.fsdp_units: no module's name fits '%s'; expected block, linear, "
                   "model, or a pattern of whole names: * any characters, ? one, a|b either of two "
                   "('%s' is the first block)",
                   text, fsdp__str_get(&name));
    fsdp__str_free(&name);
    return s;
}

fsdp_status fsdp__units_find(const char *text, fsdp_module *model, fsdp__unit_modules *out)
{
    *out = (fsdp__unit_modules){0};
    fsdp_status s = FSDP_OK;
    if (!strcmp(text, "block"))
        for (int64_t i = 0; i < fsdp_model_block_count(model) && s == FSDP_OK; i++)
            s = take(out, fsdp_model_block(model, i));
    else if (strcmp(text, "model"))
        s = find_by_pattern(text, model, out);
    if (s != FSDP_OK) fsdp__units_free(out);
    return s;
}

void fsdp__units_free(fsdp__unit_modules *u)
{
    free(u->items);
    *u = (fsdp__unit_modules){0};
}

/* ---- whether the grain fits ---------------------------------------------------------------- */

/* Below this a gather mostly waits for the other ranks: two meetings of ranks cost what moving some
 * tens of KiB costs. */
enum { FEW_BYTES = 64 << 10 };
/* Models below this fit however they are cut. */
enum { SMALL_MODEL = 64 << 20 };

static fsdp_status measure(const fsdp__train_config *c, fsdp_module *model, const char *units,
                           fsdp__grain *out)
{
    fsdp__unit_modules u;
    FSDP_TRY(fsdp__units_find(units, model, &u));
    fsdp_status s = fsdp__grain_make(c, model, u.items, u.count, out);
    fsdp__units_free(&u);
    return s;
}

static void say_coarse(const char *units, const fsdp__grain *is, const char *other,
                       const fsdp__grain *would, fsdp__str *out)
{
    fsdp__str_addf(out, "parallelism.fsdp_units %s is coarse: of the model's ", units);
    fsdp__str_add_bytes(out, (double)is->all);
    fsdp__str_addf(out, " %.0f %% are whole at once, with %s it would be %.0f %% (",
                   100.0 * (double)is->peak / (double)is->all, other,
                   100.0 * (double)would->peak / (double)is->all);
    fsdp__str_add_bytes(out, (double)is->peak);
    fsdp__str_add(out, " and ");
    fsdp__str_add_bytes(out, (double)would->peak);
    fsdp__str_add(out, " a rank)\n");
}

static void say_fine(const char *units, const fsdp__grain *is, const char *other,
                     const fsdp__grain *would, fsdp__str *out)
{
    fsdp__str_addf(out, "parallelism.fsdp_units %s is fine: %lld gathers a forward of ", units,
                   (long long)is->gathers);
    fsdp__str_add_bytes(out, (double)(is->all / is->gathers));
    fsdp__str_add(out, " on average, and one below ");
    fsdp__str_add_bytes(out, FEW_BYTES);
    fsdp__str_addf(out, " mostly waits for the other ranks; with %s it would be %lld of ", other,
                   (long long)would->gathers);
    fsdp__str_add_bytes(out, (double)(would->all / would->gathers));
    fsdp__str_add(out, "\n");
}

fsdp_status fsdp__units_report(const fsdp__train_config *c, fsdp_module *model, fsdp__str *out)
{
    const char *units = c->parallelism.fsdp_units;
    bool block = !strcmp(units, "block"), one = !strcmp(units, "model");
    fsdp__grain is, would;
    if (c->parallelism.data_parallel_shard_degree == 1) return FSDP_OK;
    FSDP_TRY(measure(c, model, units, &is));
    const char *finer = block ? "linear" : "block", *coarser = block ? "model" : "block";
    bool large = !block || is.all > SMALL_MODEL;
    if (!fsdp__strategy_keeps(c) && large && 4 * is.peak >= 3 * is.all) {
        FSDP_TRY(measure(c, model, finer, &would));
        if (2 * would.peak <= is.peak) say_coarse(units, &is, finer, &would, out);
    }
    if (!one && is.all / is.gathers < FEW_BYTES && (!block || is.all <= SMALL_MODEL)) {
        FSDP_TRY(measure(c, model, coarser, &would));
        if (would.gathers < is.gathers) say_fine(units, &is, coarser, &would, out);
    }
    return FSDP_OK;
}
