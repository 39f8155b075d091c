/*
 * index.c - settings and counters in checkpoint.json.
 *
 *     "version": 1, "step": 500, "samples": 4000, "optimizer_steps": 499,
 *     "optimizer_states": ["exp_avg", "exp_avg_sq"], "param_groups": [{"pattern": "*norm*", ...}],
 *     "base": "0123456789abcdef" (frozen parameters are elsewhere), "adapters": "rank 8, ...",
 *     "skipped": 1, "skipped_in_row": 0, "ema": {"updates": 499},
 *     "grad_scaler": {"scale": 65536.0, "growth_tracker": 12}
 */
#include "ckpt/index.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/str.h"
#include "format/json.h"

/* ---- writing --------------------------------------------------------------------------- */

static json_t *group_json(const fsdp_group_options *g)
{
    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f}", "pattern", g->pattern ? g->pattern : "",
                     "lr_factor", g->lr_factor, "weight_decay", g->weight_decay, "beta1", g->beta1,
                     "beta2", g->beta2, "eps", g->eps, "momentum", g->momentum);
}

static json_t *groups_json(const fsdp_optimizer *opt)
{
    json_t *list = json_array();
    for (int i = 0; list && i < fsdp_optimizer_group_count(opt); i++) {
        fsdp_group_options g;
        if (fsdp_optimizer_group(opt, i, &g) == FSDP_OK)
            json_array_append_new(list, group_json(&g));
    }
    return list;
}

static json_t *schedule_json(const fsdp_schedule *s)
{
    return json_pack("{s:I, s:I, s:f, s:i, s:f}", "warmup_steps", (json_int_t)s->warmup_steps,
                     "total_steps", (json_int_t)s->total_steps, "decay_ratio", s->decay_ratio,
                     "decay", (int)s->decay, "min_lr_factor", s->min_lr_factor);
}

fsdp_status fsdp__ckpt_index_put(json_t *root, const fsdp_optimizer *opt, const fsdp__ckpt_state *s)
{
    json_t *states = json_array();
    for (int k = 0; k < fsdp_optimizer_state_count(opt); k++)
        json_array_append_new(states, json_string(fsdp_optimizer_state_name(opt, k)));
    int bad = json_object_set_new(root, "version", json_integer(1));
    bad |= json_object_set_new(root, "step", json_integer(s->step));
    bad |= json_object_set_new(root, "samples", json_integer(s->samples));
    bad |=
        json_object_set_new(root, "optimizer_steps", json_integer(fsdp_optimizer_step_count(opt)));
    bad |= json_object_set_new(root, "optimizer_states", states);
    bad |= json_object_set_new(root, "param_groups", groups_json(opt));
    bad |= json_object_set_new(root, "skipped", json_integer(s->skipped));
    bad |= json_object_set_new(root, "skipped_in_row", json_integer(s->skipped_in_row));
    if (s->base) {
        char text[20];
        snprintf(text, sizeof text, "%016" PRIx64, s->base);
        bad |= json_object_set_new(root, "base", json_string(text));
    }
    if (s->adapters) bad |= json_object_set_new(root, "adapters", json_string(s->adapters));
    if (s->has_schedule) bad |= json_object_set_new(root, "schedule", schedule_json(&s->schedule));
    if (s->ema)
        bad |= json_object_set_new(
            root, "ema", json_pack("{s:I}", "updates", (json_int_t)fsdp_ema_updates(s->ema)));
    if (s->scaler)
        bad |= json_object_set_new(
            root, "grad_scaler",
            json_pack("{s:f, s:I}", "scale", fsdp_grad_scaler_get_scale(s->scaler),
                      "growth_tracker", (json_int_t)fsdp_grad_scaler_growth_tracker(s->scaler)));
    return bad ? fsdp__fail_memory("the index of a checkpoint", 0) : FSDP_OK;
}

/* ---- reading ----------------------------------------------------------------------------- */

static fsdp_status take_states(const json_t *root, const char *path, const fsdp_optimizer *opt)
{
    const json_t *states = json_object_get(root, "optimizer_states");
    size_t n = (size_t)fsdp_optimizer_state_count(opt);
    bool same = json_array_size(states) == n;
    for (size_t k = 0; same && k < n; k++) {
        const char *name = json_string_value(json_array_get(states, k));
        same = name && strcmp(name, fsdp_optimizer_state_name(opt, (int)k)) == 0;
    }
    if (same) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: it holds the state of another optimizer; set optimizer.name and "
                      "momentum as they were",
                      path);
}

/* The run's groups hold; that they are others than before is said. */
static fsdp_status compare_groups(const json_t *root, const char *path, const fsdp_optimizer *opt)
{
    const json_t *list = json_object_get(root, "param_groups");
    json_t *own = groups_json(opt);
    if (!own) return fsdp__fail_memory("parameter groups", 0);
    if (list ? !json_equal(list, own) : json_array_size(own) > 0) {
        fsdp__str before = {0}, now = {0};
        fsdp_status s = list ? fsdp__json_format(list, 0, &before) : FSDP_OK;
        if (s == FSDP_OK) s = fsdp__json_format(own, 0, &now);
        if (s == FSDP_OK)
            fsdp__log(1,
                      "%s: the parameter groups are not those of the checkpoint: then %s, now %s",
                      path, list ? fsdp__str_get(&before) : "none", fsdp__str_get(&now));
        fsdp__str_free(&before);
        fsdp__str_free(&now);
    }
    json_decref(own);
    return FSDP_OK;
}

/* "there and wanted" must be the same on both sides. */
static fsdp_status both(const char *path, const char *what, const char *option, bool there,
                        bool wanted)
{
    if (there == wanted) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA, "%s: it holds %s%s, and this run has %s; %s", path,
                      there ? "a " : "no ", what, wanted ? "one" : "none", option);
}

static fsdp_status take_schedule(const fsdp__json_at *at, fsdp__ckpt_index *out)
{
    fsdp__json_at part;
    int64_t decay = 0;
    out->has_schedule = fsdp__json_has(at, "schedule");
    if (!out->has_schedule) return FSDP_OK;
    FSDP_TRY(fsdp__json_object(at, "schedule", &part));
    FSDP_TRY(fsdp__json_int(&part, "warmup_steps", &out->schedule.warmup_steps));
    FSDP_TRY(fsdp__json_int(&part, "total_steps", &out->schedule.total_steps));
    FSDP_TRY(fsdp__json_number(&part, "decay_ratio", &out->schedule.decay_ratio));
    FSDP_TRY(fsdp__json_int(&part, "decay", &decay));
    FSDP_TRY(fsdp__json_number(&part, "min_lr_factor", &out->schedule.min_lr_factor));
    if (decay < FSDP_DECAY_LINEAR || decay > FSDP_DECAY_COSINE)
        return fsdp__json_fail(FSDP_INVALID_DATA, &part, "decay", "0, 1 or 2");
    out->schedule.decay = (fsdp_decay)decay;
    return FSDP_OK;
}

/* The trained parameters mean something beside the base that they were trained beside. */
static fsdp_status take_base(const fsdp__json_at *at, const char *path, const fsdp__ckpt_state *s,
                             fsdp__ckpt_index *out)
{
    const char *text = NULL;
    FSDP_TRY(fsdp__json_string(at, "base", &text));
    if (!text) return FSDP_OK;
    out->base = strtoull(text, NULL, 16);
    if (!out->base) return fsdp__json_fail(FSDP_INVALID_DATA, at, "base", "16 hexadecimal digits");
    if (out->base == s->base) return FSDP_OK;
    if (!s->base)
        return fsdp__fail(
            FSDP_INVALID_DATA,
            "%s: it holds the trained parameters alone, and this run has no base from "
            "elsewhere; set model.hf_assets_path and checkpoint.initial_load_in_hf as "
            "they were",
            path);
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: it was trained beside another base (fingerprint %s) than the one that "
                      "was loaded (%016" PRIx64 "); set model.hf_assets_path as it was, or choose "
                      "another job.dump_folder",
                      path, text, s->base);
}

static fsdp_status compare_adapters(const fsdp__json_at *at, const char *path,
                                    const fsdp__ckpt_state *s)
{
    const char *then = NULL;
    FSDP_TRY(fsdp__json_string(at, "adapters", &then));
    if (then ? s->adapters && !strcmp(then, s->adapters) : !s->adapters) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: adapters: %s; this run: %s. Set the lora section as it was, or choose "
                      "another job.dump_folder",
                      path, then ? then : "none", s->adapters ? s->adapters : "none");
}

static fsdp_status take_parts(const fsdp__json_at *at, const char *path, const fsdp__ckpt_state *s,
                              fsdp__ckpt_index *out)
{
    fsdp__json_at part;
    FSDP_TRY(both(path, "moving average of the weights",
                  "set training.ema_decay as it was, or choose another job.dump_folder",
                  fsdp__json_has(at, "ema"), s->ema != NULL));
    FSDP_TRY(both(path, "loss scale",
                  "set training.mixed_precision_param as it was, or choose another job.dump_folder",
                  fsdp__json_has(at, "grad_scaler"), s->scaler != NULL));
    if (s->ema) {
        FSDP_TRY(fsdp__json_object(at, "ema", &part));
        FSDP_TRY(fsdp__json_need(&part, "updates"));
        FSDP_TRY(fsdp__json_int(&part, "updates", &out->ema_updates));
    }
    if (!s->scaler) return FSDP_OK;
    FSDP_TRY(fsdp__json_object(at, "grad_scaler", &part));
    FSDP_TRY(fsdp__json_need(&part, "scale"));
    FSDP_TRY(fsdp__json_need(&part, "growth_tracker"));
    FSDP_TRY(fsdp__json_number(&part, "scale", &out->loss_scale));
    FSDP_TRY(fsdp__json_int(&part, "growth_tracker", &out->growth_tracker));
    if (!(out->loss_scale > 0) || out->growth_tracker < 0)
        return fsdp__json_fail(FSDP_INVALID_DATA, &part, "scale", "a number above 0");
    return FSDP_OK;
}

fsdp_status fsdp__ckpt_index_take(const json_t *root, const char *path, const fsdp_optimizer *opt,
                                  const fsdp__ckpt_state *s, fsdp__ckpt_index *out)
{
    static const char *const needed[] = {"version",         "step",  "samples",
                                         "optimizer_steps", "files", "optimizer_states"};
    int64_t version = 0;
    fsdp__json_at at;
    *out = (fsdp__ckpt_index){0};
    FSDP_TRY(fsdp__json_root(root, path, &at));
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        FSDP_TRY(fsdp__json_need(&at, needed[i]));
    FSDP_TRY(fsdp__json_int(&at, "version", &version));
    FSDP_TRY(fsdp__json_int(&at, "step", &out->step));
    FSDP_TRY(fsdp__json_int(&at, "samples", &out->samples));
    FSDP_TRY(fsdp__json_int(&at, "optimizer_steps", &out->optimizer_steps));
    FSDP_TRY(fsdp__json_int(&at, "skipped", &out->skipped));
    FSDP_TRY(fsdp__json_int(&at, "skipped_in_row", &out->skipped_in_row));
    if (version != 1) return fsdp__json_fail(FSDP_UNSUPPORTED, &at, "version", "1");
    FSDP_TRY(take_states(root, path, opt));
    FSDP_TRY(compare_groups(root, path, opt));
    FSDP_TRY(compare_adapters(&at, path, s));
    FSDP_TRY(take_base(&at, path, s, out));
    FSDP_TRY(take_schedule(&at, out));
    return take_parts(&at, path, s, out);
}

fsdp_status fsdp__ckpt_index_apply(const fsdp__ckpt_index *x, fsdp_optimizer *opt,
                                   fsdp__ckpt_state *s)
{
    s->step = x->step;
    s->samples = x->samples;
    s->skipped = x->skipped;
    s->skipped_in_row = x->skipped_in_row;
    s->schedule = x->schedule;
    s->has_schedule = x->has_schedule;
    fsdp_optimizer_set_step_count(opt, x->optimizer_steps);
    fsdp_ema_set_updates(s->ema, x->ema_updates);
    return s->scaler ? fsdp_grad_scaler_set_state(s->scaler, x->loss_scale, x->growth_tracker)
                     : FSDP_OK;
}
