/*
 * effect.c - options that do nothing. See effect.h.
 *
 * An option that another one switches off gets a rule here, with the words that say why. What could
 * only be a mistake (an export of an average that is not kept) is refused where the configuration
 * is resolved instead.
 */
#include "train/effect.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/match.h"
#include "fsdp/device.h"
#include "train/strategy.h"

typedef const fsdp__train_config config;

/* ---- switches ----------------------------------------------------------------------------- */

static bool sgd(config *c)
{
    return c->optimizer.name == 1;
}

static bool no_file(config *c)
{
    return c->memory.offload != FSDP_OFFLOAD_FILE && c->optimizer.offload != FSDP_OFFLOAD_FILE;
}

static bool shards_on_cpu(config *c)
{
    return c->memory.offload == FSDP_OFFLOAD_CPU;
}

static bool state_on_cpu(config *c)
{
    return c->optimizer.offload == FSDP_OFFLOAD_CPU;
}

static bool adamw(config *c)
{
    return c->optimizer.name == 0;
}

/* The schedule ends before its decay begins, or has none. */
static bool no_decay(config *c)
{
    return c->lr_scheduler.decay_ratio == 0 ||
           c->lr_scheduler.warmup_steps >= c->lr_scheduler.total_steps;
}

static bool not_cut(config *c)
{
    return c->parallelism.data_parallel_shard_degree == 1;
}

static bool one_unit(config *c)
{
    return !strcmp(c->parallelism.fsdp_units, "model");
}

static bool alone(config *c)
{
    return not_cut(c) && c->parallelism.data_parallel_replicate_degree == 1;
}

/* Nothing is gathered, cast or rounded to int8: layers compute with the parameters themselves. */
static bool lent(config *c)
{
    return not_cut(c) && c->training.dtype == c->training.mixed_precision_param &&
           c->parallelism.gather_dtype == 0;
}

static bool no_scale(config *c)
{
    return c->training.mixed_precision_param != FSDP__TRAIN_F16;
}

static bool stops(config *c)
{
    return c->training.nonfinite == 0 && no_scale(c);
}

static bool one_replica(config *c)
{
    return c->parallelism.data_parallel_replicate_degree == 1;
}

static bool one_microbatch(config *c)
{
    int64_t ranks =
        c->parallelism.data_parallel_replicate_degree * c->parallelism.data_parallel_shard_degree;
    return c->training.global_batch_size <= c->training.local_batch_size * ranks;
}

static bool no_checkpoint(config *c)
{
    return !c->checkpoint.enable;
}

static bool no_folder(config *c)
{
    return !c->model.hf_assets_path;
}

static bool folder(config *c)
{
    return c->model.hf_assets_path != NULL;
}

static bool learned_positions(config *c)
{
    return c->model.name == FSDP_GPT2 && !c->model.hf_assets_path;
}

static bool no_export(config *c)
{
    return !c->checkpoint.last_save_in_hf;
}

static bool no_validation(config *c)
{
    return !c->validation.enable;
}

static bool no_lora(config *c)
{
    return !c->lora.enable;
}

static bool given_adapters(config *c)
{
    return c->lora.enable && c->lora.adapter_path;
}

static bool holds_all(config *c)
{
    return c->activation_checkpoint.mode == FSDP__RECOMPUTE_NONE;
}

static bool not_selective(config *c)
{
    return c->activation_checkpoint.mode != FSDP__RECOMPUTE_SELECTIVE;
}

static bool no_budget(config *c)
{
    return c->activation_checkpoint.mode != FSDP__RECOMPUTE_BUDGET;
}

/* ---- the table --------------------------------------------------------------------------------
 */

typedef struct rule {
    const char *options; /* names, with | between */
    bool (*off)(config *c);
    const char *why;
} rule;

static const rule rules[] = {
    {"optimizer.beta1|optimizer.beta2|optimizer.eps", sgd, "optimizer.name is SGD"},
    {"optimizer.momentum", adamw, "optimizer.name is AdamW"},
    {"lr_scheduler.decay_type|lr_scheduler.min_lr_factor", no_decay,
     "the schedule does not decay: decay_ratio is 0, or the warm-up takes all of it"},
    {"memory.offload_folder|memory.offload_window", no_file,
     "neither memory.offload nor optimizer.offload is file"},
    {"memory.offload|training.enable_cpu_offload", shards_on_cpu,
     "the device is the CPU: parameters and gradients are in its memory"},
    {"optimizer.offload", state_on_cpu, "the device is the CPU: the state is in its memory"},
    {"prefetch.limit|memory.shared_gather", not_cut,
     "nothing is gathered: parallelism.data_parallel_shard_degree is 1"},
    {"prefetch.limit", one_unit, "parallelism.fsdp_units is model: there is no next unit"},
    {"parallelism.fsdp_reshard_after_forward|parallelism.fsdp_units", lent,
     "layers compute with the parameters themselves: nothing is gathered or cast"},
    {"training.loss_scale|training.loss_scale_interval", no_scale,
     "training.mixed_precision_param is not float16"},
    {"training.nonfinite_max_skips", stops, "training.nonfinite is stop"},
    {"debug.check_replicas", one_replica, "there is one replica"},
    {"training.sync_each_microbatch", one_microbatch, "a step is one microbatch a rank"},
    {"training.sync_each_microbatch", alone, "there is one rank"},
    {"comm.init_timeout_seconds|comm.train_timeout_seconds", alone,
     "there is one rank, which waits for nobody"},
    {"model.name|model.rope_theta|model.norm_eps|model.init_std|model.tied", folder,
     "the config.json of model.hf_assets_path decides"},
    {"model.rope_theta", learned_positions, "gpt2 has learned positions"},
    {"checkpoint.folder|checkpoint.interval|checkpoint.keep_latest_k|checkpoint.load_step",
     no_checkpoint, "checkpoint.enable is off"},
    {"checkpoint.initial_load_in_hf", no_folder, "model.hf_assets_path is not set"},
    {"checkpoint.export_dtype", no_export, "checkpoint.last_save_in_hf is off"},
    {"validation.local_batch_size|validation.seq_len|validation.freq|validation.steps|"
     "validation.ema",
     no_validation, "validation.enable is off"},
    {"activation_checkpoint.selective_ac_option", not_selective,
     "activation_checkpoint.mode is not selective"},
    {"activation_checkpoint.memory_budget", no_budget,
     "activation_checkpoint.mode is not memory_budget"},
    {"activation_checkpoint.early_stop", holds_all, "activation_checkpoint.mode is none"},
    {"lora.rank|lora.alpha|lora.dropout|lora.rslora|lora.target_modules|lora.target_pattern|"
     "lora.adapter_path|lora.merge",
     no_lora, "lora.enable is off"},
    {"lora.rank|lora.alpha|lora.dropout|lora.rslora|lora.target_modules|lora.target_pattern",
     given_adapters, "the adapter_config.json of lora.adapter_path decides"},
};

const char *fsdp__train_effect_rule(int i)
{
    return i >= 0 && (size_t)i < sizeof rules / sizeof *rules ? rules[i].options : NULL;
}

/* ---- looking
 * -------------------------------------------------------------------------------------- */

static const rule *rule_of(config *c, const char *option)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (fsdp__match(rules[i].options, option) && rules[i].off(c)) return &rules[i];
    return NULL;
}

static bool names_all(config *c)
{
    int64_t n = 0;
    for (const fsdp__section *s = c->sections; s->name; s++)
        for (const fsdp__option *row = s->rows; row->name; row++)
            n++;
    return c->given.count >= n;
}

/* Whether the option has the value that it would have without being named; *s as a status. */
static bool is_default(config *c, const fsdp__train_config *defaults, const char *option,
                       fsdp_status *s)
{
    fsdp__str a = {0}, b = {0};
    *s = fsdp__options_get(&c->options, option, &a);
    if (*s == FSDP_OK) *s = fsdp__options_get(&defaults->options, option, &b);
    bool same = !strcmp(fsdp__str_get(&a), fsdp__str_get(&b));
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    return same;
}

fsdp_status fsdp__train_no_effect(const fsdp__train_config *c, fsdp__str *out)
{
    fsdp__train_config *defaults = calloc(1, sizeof *defaults);
    if (!defaults) return fsdp__fail_memory("default options", sizeof *defaults);
    bool all = names_all(c);
    fsdp_status s = fsdp__train_config_init(defaults);
    for (int64_t i = 0; i < c->given.count && s == FSDP_OK; i++) {
        const char *option = c->given.items[i];
        const rule *r = rule_of(c, option);
        if (!r || (all && is_default(c, defaults, option, &s))) continue;
        fsdp__str_addf(out, "no effect: %s: %s\n", option, r->why);
    }
    fsdp__train_config_free(defaults);
    free(defaults);
    return s;
}
