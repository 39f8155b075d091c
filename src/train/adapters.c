/*
 * adapters.c - the lora section of a run. See adapters.h.
 */
#include "train/adapters.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "format/file.h"
#include "fsdp/comm.h"
#include "fsdp/hf.h"
#include "fsdp/lora.h"
#include "hf/folder.h"
#include "lora/lora.h"
#include "nn/module.h"

fsdp_status fsdp__adapters_resolve(const fsdp__train_config *c)
{
    if (!c->lora.enable) return FSDP_OK;
    if (c->lora.target_pattern && *c->lora.target_pattern && c->lora.target_modules.count)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "lora: target_modules and target_pattern are both set; leave one out");
    if (c->lora.merge != c->checkpoint.last_save_in_hf)
        return fsdp__fail(
            FSDP_INVALID_CONFIG, "%s",
            c->lora.merge
                ? "lora.merge is on and checkpoint.last_save_in_hf is off, so the merged model "
                  "would be written nowhere; switch it on, or lora.merge off"
                : "checkpoint.last_save_in_hf is on and lora.merge is off: a folder of a model "
                  "does not hold adapters; switch lora.merge on, or leave the folder out (the "
                  "adapters are always written to job.dump_folder/adapter)");
    return FSDP_OK;
}

/* ---- the model -------------------------------------------------------------------------- */

static int64_t trainable(const fsdp_param_list *l)
{
    int64_t n = 0;
    for (int64_t i = 0; i < l->count; i++)
        if (fsdp_param_requires_grad(l->items[i].param))
            n += fsdp__numel_of(l->items[i].param->ndim, l->items[i].param->size);
    return n;
}

static fsdp_status say_what(const fsdp__train_config *c, fsdp_module *model, fsdp__metrics *m)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(model, &l));
    int64_t some = trainable(&l), all = fsdp_module_numel(model);
    fsdp_param_list_free(&l);
    fsdp__say(m, "adapters%s%s beside %lld layers: %lld of %lld parameters are trained (%.3g %%)\n",
              c->lora.adapter_path ? " of " : "", c->lora.adapter_path ? c->lora.adapter_path : "",
              (long long)fsdp_lora_count(model), (long long)some, (long long)all,
              100.0 * (double)some / (double)all);
    return FSDP_OK;
}

static fsdp_status apply(const fsdp__train_config *c, fsdp_module *model)
{
    if (c->lora.adapter_path) return fsdp_lora_apply_folder(model, c->lora.adapter_path);
    const fsdp__strings *names = &c->lora.target_modules;
    fsdp_lora_options o = {.rank = c->lora.rank,
                           .alpha = c->lora.alpha,
                           .dropout = c->lora.dropout,
                           .rslora = c->lora.rslora,
                           .target_pattern = c->lora.target_pattern};
    if (names->count != 1 || strcmp(names->items[0], "all-linear")) {
        o.target_modules = (const char *const *)names->items;
        o.n_target_modules = (int)names->count;
    }
    return fsdp_lora_apply(model, &o);
}

fsdp_status fsdp__adapters_apply(const fsdp__train_config *c, fsdp_module *model, fsdp__metrics *m)
{
    if (!c->lora.enable) return FSDP_OK;
    FSDP_TRY(apply(c, model));
    return say_what(c, model, m);
}

static fsdp_status check_files(const fsdp__train_config *c)
{
    static const char *const names[] = {"adapter_config.json", "adapter_model.safetensors"};
    if (!c->lora.adapter_path) return FSDP_OK;
    for (int i = 0; i < 2; i++) {
        char *path = fsdp__path_join(c->lora.adapter_path, names[i]);
        if (!path) return fsdp_error();
        bool there = fsdp__file_exists(path);
        free(path);
        if (!there)
            return fsdp__fail(FSDP_NOT_FOUND, "lora.adapter_path: %s has no %s",
                              c->lora.adapter_path, names[i]);
    }
    return FSDP_OK;
}

fsdp_status fsdp__adapters_check(const fsdp__train_config *c, fsdp_module *model)
{
    if (!c->lora.enable) return FSDP_OK;
    FSDP_TRY(check_files(c));
    return apply(c, model);
}

fsdp_status fsdp__adapters_fill(const fsdp__train_config *c, fsdp_module *model)
{
    if (!c->lora.enable) return FSDP_OK;
    if (c->lora.adapter_path) return fsdp_lora_load(model, c->lora.adapter_path);
    return fsdp_lora_reset(model, (uint64_t)c->debug.seed);
}

fsdp_status fsdp__adapters_base(const fsdp__train_config *c, fsdp_module *model, uint64_t *base)
{
    *base = 0;
    if (!c->lora.enable || !c->model.hf_assets_path || !c->checkpoint.initial_load_in_hf)
        return FSDP_OK;
    return fsdp__hf_fingerprint(model, base);
}

double fsdp__adapters_flops(const fsdp__train_config *c, fsdp_module *model, double whole,
                            double weights)
{
    fsdp_param_list l;
    if (!c->lora.enable || fsdp_module_params(model, &l) != FSDP_OK) return whole;
    double own = 6.0 * (double)trainable(&l);
    fsdp_param_list_free(&l);
    return whole - weights / 3.0 + own;
}

fsdp_status fsdp__adapters_text(const fsdp__train_config *c, fsdp_module *model, char **out)
{
    fsdp__lora_list l = {0};
    *out = NULL;
    if (!c->lora.enable) return FSDP_OK;
    FSDP_TRY(fsdp__lora_list_of(model, &l));
    fsdp__str s = {0};
    if (l.count)
        fsdp__str_addf(&s, "rank %lld, alpha %g, rslora %s", (long long)l.items[0]->rank,
                       l.items[0]->alpha, l.items[0]->rslora ? "true" : "false");
    free(l.items);
    *out = fsdp__str_take(&s);
    return *out ? FSDP_OK : fsdp__fail_memory("the words for adapters", 0);
}

/* ---- whether they learn -------------------------------------------------------------------- */

static bool any_nonzero(const fsdp_tensor *g)
{
    const char *p = fsdp_data(g);
    size_t n = (size_t)fsdp_numel(g) * fsdp_dtype_size(fsdp_tensor_dtype(g));
    bool any = false;
    for (size_t i = 0; i < n && !any; i++)
        any = (p[i] & 0x7f) != 0; /* the sign of a zero is none */
    return any;
}

static fsdp_status say_seen(const fsdp_param_list *l, const float *seen, bool first,
                            fsdp__metrics *m)
{
    int64_t with = 0, all = 0, shown = 0;
    fsdp__str zero = {0};
    for (int64_t i = 0; i < l->count; i++) {
        if (!fsdp_param_requires_grad(l->items[i].param)) continue;
        all++;
        with += seen[i] > 0;
        if (seen[i] > 0 || ++shown > 8) continue;
        fsdp__str_addf(&zero, "%s%s", shown > 1 ? ", " : "", l->items[i].name);
    }
    fsdp__say(m, "adapters: %lld of %lld matrices have a gradient that is not zero%s%s\n",
              (long long)with, (long long)all,
              with == all ? ""
              : first     ? " in the first step (a new B is zero, and so A's gradient is)"
                          : "; these do not learn: ",
              with == all || first ? "" : fsdp__str_get(&zero));
    fsdp__str_free(&zero);
    return FSDP_OK;
}

fsdp_status fsdp__adapters_report(const fsdp__train_config *c, fsdp_module *model, int *seen,
                                  fsdp__metrics *m)
{
    if (!c->lora.enable || *seen >= 2) return FSDP_OK;
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(model, &l));
    float *any = fsdp__calloc((size_t)l.count, sizeof *any, "gradients of adapters");
    fsdp_status s = any ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        const fsdp_tensor *g = fsdp_grad(fsdp__param_kept(l.items[i].param));
        any[i] = g && any_nonzero(g);
    }
    if (s == FSDP_OK)
        s = fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, any, l.count, FSDP_F32, FSDP_MAX,
                            NULL);
    if (s == FSDP_OK) s = say_seen(&l, any, *seen == 0, m);
    ++*seen;
    free(any);
    fsdp_param_list_free(&l);
    return s;
}

/* ---- saving ---------------------------------------------------------------------------------- */

fsdp_status fsdp__adapters_save(const fsdp__train_config *c, fsdp_module *model, const char *folder,
                                fsdp__metrics *m)
{
    if (!c->lora.enable) return FSDP_OK;
    FSDP_TRY(fsdp_lora_save(model, folder, c->model.hf_assets_path));
    fsdp__say(m, "adapters saved as %s\n", folder);
    return FSDP_OK;
}

fsdp_status fsdp__adapters_merge(const fsdp__train_config *c, fsdp_module *model, fsdp__metrics *m)
{
    if (!c->lora.enable || !c->lora.merge) return FSDP_OK;
    FSDP_TRY(fsdp_lora_merge(model));
    fsdp__say(m, "adapters merged into the base\n");
    return FSDP_OK;
}
