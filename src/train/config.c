/*
 * config.c - the option tables of a training run, and what follows from one option for another.
 *
 * An option that does nothing is a lie, so a field of torchtitan's that has no effect here is not
 * accepted and ignored: it stands in `unavailable` with the reason.
 */
#include "train/config.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "format/yaml.h"
#include "train/recompute.h"
#include "train/adapters.h"
#include "train/groups.h"
#include "train/nonfinite.h"
#include "train/offload.h"
#include "train/strategy.h"

#define BIG 1e18 /* no upper bound */
#define ROW(sec, field, type, initial, lo, hi, choices, help)                                      \
    {                                                                                              \
#field, type, offsetof(fsdp__train_config, sec.field) - offsetof(fsdp__train_config, sec), \
            initial, lo, hi, choices, help                                                         \
    }
#define BOOL_(s, f, i, h) ROW(s, f, FSDP__OPT_BOOL, i, 1, 0, NULL, h)
#define INT_(s, f, i, lo, hi, h) ROW(s, f, FSDP__OPT_INT, i, lo, hi, NULL, h)
#define FLOAT_(s, f, i, lo, hi, h) ROW(s, f, FSDP__OPT_FLOAT, i, lo, hi, NULL, h)
#define TEXT_(s, f, i, h) ROW(s, f, FSDP__OPT_STRING, i, 1, 0, NULL, h)
#define ENUM_(s, f, i, c, h) ROW(s, f, FSDP__OPT_ENUM, i, 1, 0, c, h)
#define BYTES_(s, f, i, h) ROW(s, f, FSDP__OPT_BYTES, i, 0, BIG, NULL, h)
#define END                                             \
    {                                                   \
        NULL, FSDP__OPT_BOOL, 0, NULL, 1, 0, NULL, NULL \
    }

static const fsdp__option job_rows[] = {
    TEXT_(job, dump_folder, "./outputs",
          "Folder of the run: everything that it writes stands in it. A run that is started again "
          "with the same folder goes on where its last checkpoint ends, or says that it is "
          "finished."),
    TEXT_(job, description, "a training run", "Free text, printed at the start."),
    BOOL_(job, print_config, "true", "Print the resolved configuration at the start."), END};

static const fsdp__option model_rows[] = {
    ENUM_(model, name, "llama", "llama|mistral|qwen2|qwen3|gpt2",
          "Model family. With hf_assets_path the config.json there decides."),
    ENUM_(model, flavor, "auto", "auto|custom|demo|tiny|small|135m|1b",
          "Size within the family; an option below that is not 0 replaces the flavor's size. auto: "
          "the config.json of hf_assets_path, or custom without one. custom: dim, n_layers, "
          "n_heads and ffn_dim must be given."),
    TEXT_(model, hf_assets_path, NULL,
          "Hugging Face folder with config.json and tokenizer.json, and, with "
          "checkpoint.initial_load_in_hf, the weights to start from."),
    INT_(model, dim, "0", 0, BIG, "Width of the residual stream; 0: the flavor's."),
    INT_(model, n_layers, "0", 0, FSDP_MODEL_MAX_LAYERS,
         "Number of transformer blocks; 0: the flavor's."),
    INT_(model, n_heads, "0", 0, BIG, "Attention heads; 0: the flavor's."),
    INT_(model, n_kv_heads, "0", 0, BIG,
         "Heads of keys and values, a divisor of n_heads; 0: the flavor's, or n_heads."),
    INT_(model, head_dim, "0", 0, BIG, "Width of a head; 0: dim / n_heads."),
    INT_(model, ffn_dim, "0", 0, BIG, "Width of the feed-forward part; 0: the flavor's."),
    INT_(model, vocab_size, "0", 0, BIG,
         "Rows of the embedding; 0: the tokenizer's vocabulary. It may be larger than that, not "
         "smaller."),
    INT_(model, max_seq_len, "0", 0, BIG,
         "Longest sequence that the model is made for; 0: training.seq_len."),
    FLOAT_(model, rope_theta, "10000", 1e-3, BIG, "Base of the rotary frequencies."),
    FLOAT_(model, norm_eps, "1e-05", 0, 1, "Added to the mean square in norms."),
    FLOAT_(model, init_std, "0.02", 0, BIG,
           "Standard deviation of new weights; those of a folder's config.json follow its "
           "initializer_range."),
    ENUM_(model, tied, "flavor", "flavor|true|false",
          "Whether the head shares the embedding's weight; flavor: as the flavor says (custom: "
          "false)."),
    BOOL_(model, print_after_conversion, "false",
          "Print the module tree after sharding: each parameter's global and local shape, "
          "placement, dtype and unit."),
    END};

static const fsdp__option optimizer_rows[] = {
    ENUM_(optimizer, name, "AdamW", "AdamW|SGD", "The optimizer."),
    FLOAT_(optimizer, lr, "8e-4", 0, 1e30, "Peak learning rate."),
    FLOAT_(optimizer, beta1, "0.9", 0, 0.999999999, "Decay of the first moment (AdamW)."),
    FLOAT_(optimizer, beta2, "0.95", 0, 0.999999999, "Decay of the second moment (AdamW)."),
    FLOAT_(optimizer, eps, "1e-8", 0, BIG, "Added to the root of the second moment (AdamW)."),
    FLOAT_(optimizer, weight_decay, "0.1", 0, BIG,
           "Applied to all parameters alike, but for those of param_groups."),
    FLOAT_(optimizer, momentum, "0", 0, BIG, "Momentum (SGD)."),
    ROW(optimizer, param_groups, FSDP__OPT_MAPS, "[]", 1, 0,
        "pattern|lr|lr_factor|weight_decay|beta1|beta2|eps|momentum",
        "Other settings for the parameters whose whole name a pattern takes: * any characters, ? "
        "one, a|b either of two. A parameter belongs to the first group that takes it; lr_factor "
        "is times lr, and the schedule moves both alike. A pattern that takes nothing is an "
        "error."),
    ENUM_(optimizer, offload, "none", "none|cpu|file",
          "Where the optimizer's state lies. cpu: in the host's memory, which on the CPU is where "
          "it is anyway. file: in a file in memory.offload_folder."),
    BOOL_(optimizer, early_step_in_backward, "false",
          "Update each unit's weights during backward, when its gradients are summed, and free "
          "these: gradients of few units exist at a time. Not with training.max_norm, float16, "
          "training.nonfinite skip or training.sync_each_microbatch."),
    END};

static const fsdp__option lr_rows[] = {
    INT_(lr_scheduler, warmup_steps, "200", 0, BIG,
         "Steps of linear warm-up, from 1 / warmup_steps of the peak."),
    INT_(lr_scheduler, total_steps, "0", 0, BIG,
         "Length of the schedule in steps; 0: training.steps."),
    FLOAT_(lr_scheduler, decay_ratio, "-1", -1, 1,
           "Share of the schedule that decays at its end, with a stable part before it; -1: decay "
           "starts right after the warm-up."),
    ENUM_(lr_scheduler, decay_type, "linear", "linear|sqrt|cosine",
          "Form of the decay; sqrt is 1 - sqrt(x)."),
    FLOAT_(lr_scheduler, min_lr_factor, "0", 0, 1, "Where the decay ends, as a share of lr."),
    BOOL_(lr_scheduler, allow_change, "false",
          "Go on from a checkpoint with another schedule than it was saved with (total_steps "
          "follows training.steps), though the rate jumps there; false: that is an error."),
    END};

static const fsdp__option training_rows[] = {
    INT_(training, local_batch_size, "8", 1, BIG,
         "Sequences of a rank in one forward and backward."),
    INT_(training, global_batch_size, "-1", -1, BIG,
         "Sequences of a step over all ranks; -1: local_batch_size times the ranks. A rank whose "
         "share is more than local_batch_size accumulates gradients over several microbatches."),
    INT_(training, seq_len, "2048", 1, BIG, "Tokens of a sequence."),
    INT_(training, steps, "10000", 0, BIG, "Optimizer steps of the run."),
    FLOAT_(training, max_norm, "1", 0, BIG,
           "Limit of the norm of all gradients; a longer gradient is scaled down to it. 0: the "
           "norm is measured and nothing is scaled."),
    ENUM_(training, dtype, "float32", "float32|bfloat16",
          "In which parameters, gradients and optimizer state are kept."),
    ENUM_(training, mixed_precision_param, "bfloat16", "float32|bfloat16|float16",
          "In which parameters are gathered and layers compute. With float16 the loss is scaled "
          "(loss_scale)."),
    ENUM_(training, mixed_precision_reduce, "float32", "float32|bfloat16",
          "In which gradients travel; they are always summed in float32."),
    FLOAT_(training, loss_scale, "65536", 1e-30, 1e30,
           "With mixed_precision_param float16: what the loss is multiplied by at first. It is "
           "halved when a gradient overflows, and that step is left out."),
    INT_(training, loss_scale_interval, "2000", 1, BIG,
         "Steps without an overflow after which the loss scale is doubled."),
    BOOL_(training, enable_cpu_offload, "false",
          "Parameters, gradients and optimizer state in the host's memory: memory.offload cpu and "
          "optimizer.offload cpu."),
    BOOL_(training, sync_each_microbatch, "false",
          "Sum gradients over the ranks after each microbatch instead of once a step: a rank then "
          "holds whole gradients of one or two units at a time, not of the model, and sends as "
          "often as there are microbatches. Over replicas they are summed once a step."),
    BOOL_(
        training, reproducible, "false",
        "Losses, gradient norms and weights are the same to the bit on 1, 2, 4, 8, ... ranks, flat "
        "or hybrid, at the same local_batch_size and global_batch_size: microbatches and ranks are "
        "summed as one tree. Costs log2 of a rank's microbatches whole gradients instead of one, "
        "and ranks may wait where the microbatches do not divide."),
    FLOAT_(training, ema_decay, "0", 0, 0.999999999,
           "Decay of a moving average of the weights, in float32, a rank's own part; 0: none. It "
           "is saved in checkpoints; validation.ema and checkpoint.export_ema use it."),
    ENUM_(training, nonfinite, "stop", "stop|skip",
          "When the loss or the gradients of a step are not finite on some rank: stop with a "
          "report of rank, layer, microbatch and samples, or report, leave the step out and go on "
          "with the next samples. No weight changes either way."),
    INT_(training, nonfinite_max_skips, "10", 0, BIG,
         "Steps in a row that may be left out, overflows of float16 among them; one more stops "
         "the run."),
    END};

static const fsdp__option parallelism_rows[] = {
    INT_(parallelism, data_parallel_replicate_degree, "1", 1, 65536,
         "Copies of the sharded model. With data_parallel_shard_degree 1 nothing is sharded "
         "(NO_SHARD)."),
    INT_(parallelism, data_parallel_shard_degree, "-1", -1, 65536,
         "Ranks over which parameters, gradients and optimizer state are cut; -1: the ranks that "
         "data_parallel_replicate_degree leaves."),
    TEXT_(parallelism, fsdp_reshard_after_forward, "default",
          "Whether gathered parameters are freed after forward and gathered again for backward. "
          "default: all but the root's (FULL_SHARD); always: all; never: none (SHARD_GRAD_OP). A "
          "number k, a divisor of data_parallel_shard_degree: after forward they are cut over "
          "groups of k ranks, which gather them again. docs/strategies.md has all names."),
    TEXT_(parallelism, fsdp_units, "block",
          "What is gathered at once. block: each transformer block, and the rest; linear: each "
          "linear layer; model: everything; else a pattern of whole module names (*.mlp|*.self_attn"
          "): * any characters, ? one, a|b either of two."),
    ENUM_(
        parallelism, gather_dtype, "param", "param|int8",
        "In which matrices travel when they are gathered. param: mixed_precision_param; int8: with "
        "a float32 scale a row, about half the bytes of bfloat16; forward and backward compute "
        "with "
        "the rounded weights, on one rank too, and the shards stay in training.dtype."),
    END};

static const fsdp__option recompute_rows[] = {
    ENUM_(activation_checkpoint, mode, "none", "none|full|selective|memory_budget",
          "Which activations of the transformer blocks are not held from forward to backward but "
          "computed again there. No number changes. full: all but the blocks' inputs; selective: "
          "see selective_ac_option; memory_budget: as few as the budget allows, chosen from what "
          "the first microbatch measures."),
    TEXT_(activation_checkpoint, selective_ac_option, "2",
          "A number k: every k-th block is recomputed. op: all blocks, but the outputs of "
          "attention and of every second matrix product are held."),
    FLOAT_(activation_checkpoint, memory_budget, "0.5", 0.01, 0.99,
           "Peak of activations as a share of that of mode none (mode memory_budget)."),
    BOOL_(activation_checkpoint, early_stop, "true",
          "A block's recomputation ends when all that its backward needs is there; false: it runs "
          "to the block's end."),
    END};

static const fsdp__option checkpoint_rows[] = {
    BOOL_(checkpoint, enable, "false",
          "Save checkpoints, at the end as well, and go on from the newest at the start."),
    TEXT_(checkpoint, folder, "checkpoint",
          "Folder of checkpoints (step-N), under job.dump_folder."),
    INT_(checkpoint, interval, "500", 1, BIG, "Steps from one checkpoint to the next."),
    INT_(checkpoint, keep_latest_k, "10", 0, 1e6,
         "How many checkpoints are kept, at least 2; 0: all."),
    INT_(checkpoint, load_step, "-1", -1, BIG,
         "Step of the checkpoint to go on from; -1: the newest."),
    BOOL_(checkpoint, initial_load_in_hf, "true",
          "Start from the weights of model.hf_assets_path, where that is set; false: from random "
          "ones."),
    BOOL_(checkpoint, last_save_in_hf, "false",
          "At the end, write the model as a Hugging Face folder, job.dump_folder/hf."),
    ENUM_(checkpoint, export_dtype, "float32", "float32|bfloat16|float16",
          "Of the weights in that folder."),
    BOOL_(checkpoint, export_ema, "false",
          "With last_save_in_hf: write the moving average of the weights as well, to "
          "job.dump_folder/hf-ema."),
    END};

static const fsdp__option metrics_rows[] = {
    INT_(metrics, log_freq, "10", 1, BIG, "Steps from one line on the screen to the next."), END};

static const fsdp__option comm_rows[] = {
    FLOAT_(comm, init_timeout_seconds, "300", 0.1, BIG,
           "How long a collective waits for a rank until the first step is done."),
    FLOAT_(comm, train_timeout_seconds, "100", 0.1, BIG, "The same for later steps."), END};

static const fsdp__option validation_rows[] = {
    BOOL_(validation, enable, "false",
          "Measure the loss over data.dir/validation.tokens, at the end as well."),
    INT_(validation, local_batch_size, "0", 0, BIG,
         "Sequences of a rank in one forward; 0: training.local_batch_size."),
    INT_(validation, seq_len, "0", 0, BIG, "Tokens of a sequence; 0: training.seq_len."),
    INT_(validation, freq, "10", 1, BIG, "Training steps from one validation to the next."),
    INT_(validation, steps, "-1", -1, BIG, "Batches of a validation; -1: the whole set."),
    BOOL_(validation, ema, "false",
          "Measure with the moving average of the weights in their place (training.ema_decay)."),
    END};

static const fsdp__option debug_rows[] = {
    INT_(debug, seed, "0", 0, BIG,
         "Of new weights, of the order of the rows and of dropout. Runs of one seed are the same "
         "to the bit."),
    TEXT_(debug, inject_nonfinite, NULL,
          "Rehearsal: a NaN at one place, as forward:RANK:STEP:MICROBATCH:MODULE (its output) or "
          "backward:... (the gradient of its output); backward:3:2:1:model.layers.2 is rank 3, "
          "step 2, the second microbatch."),
    INT_(debug, check_replicas, "100", 0, BIG,
         "With replicas: steps from one comparison of their weights to the next, by a hash of each "
         "rank's shards; 0: none. Replicas that differ stop the run, which names parameter and "
         "rank."),
    END};

static const fsdp__option data_rows[] = {
    TEXT_(data, dir, NULL,
          "Folder that `fsdp prepare` made: train.tokens, validation.tokens and the tokenizer."),
    BOOL_(data, shuffle, "true", "A new order of the rows in each epoch; false: as in the file."),
    END};

static const fsdp__option memory_rows[] = {
    BYTES_(memory, limit, "0",
           "Bytes that a rank may hold in tensors and buffers, as a device's memory would bound "
           "it; 0: no limit."),
    BOOL_(memory, shared_gather, "true",
          "The ranks of a host share one copy of gathered parameters; false: each has its own."),
    ENUM_(memory, offload, "none", "none|cpu|file",
          "Where each rank's parameters and gradients lie. cpu: in the host's memory, which on the "
          "CPU is where they are anyway. file: in a file in memory.offload_folder, read ahead of "
          "its use and written back after it; the numbers stay the same."),
    TEXT_(memory, offload_folder, NULL,
          "Folder on a fast disk for what is offloaded to files. The files have no names: nothing "
          "stays behind."),
    BYTES_(memory, offload_window, "0",
           "How much of its file a rank keeps in memory, beyond what it uses at one time; it is "
           "not under memory.limit. 0: 256 MiB."),
    END};

static const fsdp__option prefetch_rows[] = {
    INT_(prefetch, limit, "1", -1, 1000,
         "Units that are gathered ahead of the one that computes, in the order of the step before; "
         "0: as FSDP2, none in forward and one in backward; -1: none."),
    END};

static const fsdp__option lora_rows[] = {
    BOOL_(lora, enable, "false",
          "Train adapters beside the layers of a frozen model. They are written to "
          "job.dump_folder/adapter with each checkpoint and at the end, in peft's form."),
    INT_(lora, rank, "8", 1, 1e6, "Rows of A and columns of B."),
    FLOAT_(lora, alpha, "16", -BIG, BIG, "The product of B and A counts alpha / rank times."),
    FLOAT_(lora, dropout, "0", 0, 0.999999999, "Of what A is given, in training."),
    BOOL_(lora, rslora, "false", "alpha / sqrt(rank) instead."),
    ROW(lora, target_modules, FSDP__OPT_STRINGS, NULL, 1, 0, NULL,
        "Which layers, by name or the end of it ([q_proj, v_proj]); none, or all-linear: every "
        "linear layer of the blocks."),
    TEXT_(lora, target_pattern, NULL,
          "Instead, an extended regular expression that whole names must match."),
    TEXT_(lora, adapter_path, NULL,
          "Folder of adapters to start from, peft's or of an earlier run; its adapter_config.json "
          "replaces the options above."),
    BOOL_(lora, merge, "false",
          "At the end, add the adapters to the model that checkpoint.last_save_in_hf writes."),
    END};

static const fsdp__unavailable unavailable[] = {
    {"job.config_file", "the file is the first word behind `fsdp train`"},
    {"job.save_config_file", "the resolved configuration is always written to "
                             "job.dump_folder/config.yaml"},
    {"job.custom_config_module", "options are compiled in"},
    {"profiling.*", "traces are not recorded yet"},
    {"metrics.enable_tensorboard", "the numbers are in job.dump_folder/metrics.jsonl"},
    {"metrics.save_tb_folder", "the numbers are in job.dump_folder/metrics.jsonl"},
    {"metrics.enable_wandb", "the numbers are in job.dump_folder/metrics.jsonl"},
    {"metrics.disable_color_printing", "nothing is printed in colour"},
    {"metrics.save_for_all_ranks", "losses and norms are the same on all ranks"},
    {"model.tokenizer_path", "use data.dir, or model.hf_assets_path"},
    {"model.converters", "there are none yet"},
    {"optimizer.implementation", "it is always fused"},
    {"training.dataset", "use data.dir with what `fsdp prepare` makes"},
    {"training.dataset_path", "use data.dir with what `fsdp prepare` makes"},
    {"training.gc_freq", "there is no garbage collector"},
    {"training.gc_debug", "there is no garbage collector"},
    {"training.dataloader*", "token files are mapped into memory; there are no loader processes"},
    {"validation.dataset", "use data.dir with what `fsdp prepare` makes"},
    {"validation.dataset_path", "use data.dir with what `fsdp prepare` makes"},
    {"validation.dataloader*", "token files are mapped into memory"},
    {"parallelism.tensor_parallel_degree", "tensor parallelism is not there yet"},
    {"parallelism.disable_loss_parallel", "tensor parallelism is not there yet"},
    {"parallelism.enable_async_tensor_parallel", "tensor parallelism is not there yet"},
    {"parallelism.pipeline_parallel_*", "pipelines are not there yet"},
    {"parallelism.module_fqns_per_model_part", "pipelines are not there yet"},
    {"parallelism.context_parallel_*", "context parallelism is not there yet"},
    {"parallelism.expert_*", "there are no models with experts yet"},
    {"checkpoint.initial_load_path", "a run goes on from its own folder; start from weights with "
                                     "model.hf_assets_path"},
    {"checkpoint.initial_load_model_only", "start from weights with model.hf_assets_path"},
    {"checkpoint.initial_load_in_hf_quantized", "quantised weights are not read yet"},
    {"checkpoint.last_save_model_only", "the last checkpoint is whole, so that a run can be made "
                                        "longer; checkpoint.last_save_in_hf writes the model"},
    {"checkpoint.async_mode", "checkpoints are written between steps"},
    {"checkpoint.exclude_from_loading", "checkpoints are loaded whole"},
    {"checkpoint.enable_first_step_checkpoint", "set checkpoint.interval"},
    {"checkpoint.create_seed_checkpoint", "initial weights do not depend on the ranks"},
    {"checkpoint.load_only", "set checkpoint.interval beyond training.steps"},
    {"checkpoint.enable_ft_dataloader_checkpoints", "there are no replica groups that come and go"},
    {"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns",
     "there are no models with experts yet; selective_ac_option: op names what is held"},
    {"activation_checkpoint.preserve_rng_state", "dropout is always replayed exactly"},
    {"activation_checkpoint.determinism_check", "recomputed tensors are always compared"},
    {"activation_checkpoint.visualize_memory_budget_pareto",
     "what a budget costs is printed behind the first microbatch"},
    {"activation_checkpoint.debug", "an error names the op that differs"},
    {"compile.*", "there is no compiler"},
    {"quantize.*", "there are no quantised layers yet"},
    {"comm.trace_buf_size", "calls are not recorded yet"},
    {"comm.save_traces_*", "calls are not recorded yet"},
    {"comm.mode", "dry runs are not there yet"},
    {"memory_estimation.*", "the planned bytes are printed at the start of each run"},
    {"fault_tolerance.*", "there are no replica groups that come and go"},
    {"experimental.*", "options are compiled in"},
    {"debug.deterministic*", "every run is deterministic"},
    {"debug.moe_force_load_balance", "there are no models with experts yet"},
    {NULL, NULL}};

/* ---- the struct ------------------------------------------------------------------- */

fsdp_status fsdp__train_config_init(fsdp__train_config *c)
{
    const fsdp__section sections[] = {
        {"job", "The run as a whole.", job_rows, &c->job},
        {"model", "What is trained.", model_rows, &c->model},
        {"data", "What it is trained on.", data_rows, &c->data},
        {"training", "Batches, steps and number formats.", training_rows, &c->training},
        {"optimizer", "How weights change.", optimizer_rows, &c->optimizer},
        {"lr_scheduler", "The learning rate as a function of the step.", lr_rows, &c->lr_scheduler},
        {"parallelism", "How the model is cut over the ranks. The degrees multiply to the ranks.",
         parallelism_rows, &c->parallelism},
        {"activation_checkpoint", "What is computed again in backward instead of held.",
         recompute_rows, &c->activation_checkpoint},
        {"prefetch", "Gathering ahead.", prefetch_rows, &c->prefetch},
        {"memory", "What a rank may hold.", memory_rows, &c->memory},
        {"lora", "Adapters instead of all weights.", lora_rows, &c->lora},
        {"validation", "The loss on text that is not trained on.", validation_rows, &c->validation},
        {"checkpoint", "What is saved, and what is started from.", checkpoint_rows, &c->checkpoint},
        {"metrics", "What is printed.", metrics_rows, &c->metrics},
        {"comm", "Waiting for other ranks.", comm_rows, &c->comm},
        {"debug", "Reproducing a run.", debug_rows, &c->debug},
        {NULL, NULL, NULL, NULL}};
    memset(c, 0, sizeof *c);
    memcpy(c->sections, sections, sizeof sections);
    c->options = (fsdp__options){c->sections, unavailable};
    return fsdp__options_defaults(&c->options);
}

void fsdp__train_config_free(fsdp__train_config *c)
{
    if (c->options.sections) fsdp__options_free(&c->options);
    for (int64_t i = 0; i < c->given.count; i++)
        free(c->given.items[i]);
    free(c->given.items);
    memset(c, 0, sizeof *c);
}

/* ---- where values come from -------------------------------------------------------- */

/* The option was set by hand. */
static fsdp_status note_given(fsdp__train_config *c, const char *name)
{
    fsdp__strings *g = &c->given;
    for (int64_t i = 0; i < g->count; i++)
        if (!strcmp(g->items[i], name)) return FSDP_OK;
    char **items = fsdp__realloc(g->items, (size_t)(g->count + 1) * sizeof *items, "options");
    char *copy = items ? fsdp__strdup(name) : NULL;
    if (items) g->items = items;
    if (!copy) return fsdp_error();
    g->items[g->count++] = copy;
    return FSDP_OK;
}

static fsdp_status take_yaml(void *arg, const fsdp__yaml_value *v)
{
    fsdp__train_config *c = arg;
    fsdp__str name = {0};
    fsdp__str_addf(&name, "%s.%s", v->section, v->name);
    fsdp_status s;
    if (name.failed)
        s = fsdp__fail_memory("the name of an option", 0);
    else if (!v->text && v->maps)
        s = fsdp__options_set_maps(&c->options, name.p, v->items, v->n, v->place);
    else if (!v->text)
        s = fsdp__options_set_list(&c->options, name.p, v->items, v->n, v->place);
    else
        s = fsdp__options_set(&c->options, name.p, strcmp(v->text, "null") ? v->text : NULL,
                              v->place);
    if (s == FSDP_OK) s = note_given(c, name.p);
    fsdp__str_free(&name);
    return s;
}

fsdp_status fsdp__train_config_load(fsdp__train_config *c, const char *path)
{
    return fsdp__yaml_load(path, take_yaml, c);
}

/* The row of "section.name"; NULL if there is none. */
static const fsdp__option *find_row(const fsdp__train_config *c, const char *name)
{
    for (const fsdp__section *s = c->sections; s->name; s++) {
        size_t n = strlen(s->name);
        if (strncmp(name, s->name, n) != 0 || name[n] != '.') continue;
        for (const fsdp__option *row = s->rows; row->name; row++)
            if (strcmp(name + n + 1, row->name) == 0) return row;
    }
    return NULL;
}

fsdp_status fsdp__train_config_words(fsdp__train_config *c, int n, char *const *words)
{
    for (int i = 0; i < n; i++) {
        const char *word = words[i];
        if (strncmp(word, "--", 2) != 0 || !word[2])
            return fsdp__fail(FSDP_INVALID_CONFIG,
                              "unexpected '%s'; expected one file, and options as --section.name "
                              "VALUE",
                              word);
        const char *equals = strchr(word, '=');
        char *place = fsdp__strndup(word, equals ? (size_t)(equals - word) : strlen(word));
        if (!place) return fsdp_error();
        const char *name = place + 2, *value = equals ? equals + 1 : NULL;
        fsdp_status s = FSDP_OK;
        bool next = i + 1 < n && strncmp(words[i + 1], "--", 2) != 0;
        const fsdp__option *row = find_row(c, name);
        if (!value && next)
            value = words[++i];
        else if (!value && row && row->type == FSDP__OPT_BOOL)
            value = "true"; /* a switch may stand alone */
        else if (!value && row)
            s = fsdp__fail(FSDP_INVALID_CONFIG, "%s wants a value behind it", place);
        else if (!value)
            value = ""; /* there is no such option: the next call says so */
        if (s == FSDP_OK)
            s = fsdp__options_set(&c->options, name, strcmp(value, "null") ? value : NULL, place);
        if (s == FSDP_OK) s = note_given(c, name);
        free(place);
        if (s != FSDP_OK) return s;
    }
    return FSDP_OK;
}

/* ---- what follows ------------------------------------------------------------------- */

/* "2 x 4, 4 x 2, ...": the pairs that multiply to ranks. */
static void list_degrees(int ranks, fsdp__str *out)
{
    for (int r = 1; r <= ranks; r++)
        if (ranks % r == 0) fsdp__str_addf(out, "%s%d x %d", out->len ? ", " : "", r, ranks / r);
}

static fsdp_status resolve_degrees(fsdp__train_config *c, int ranks)
{
    int64_t r = c->parallelism.data_parallel_replicate_degree;
    int64_t *s = &c->parallelism.data_parallel_shard_degree;
    if (*s == -1 && ranks % r == 0) *s = ranks / r;
    if (*s > 0 && r * *s == ranks) return FSDP_OK;
    fsdp__str choices = {0};
    list_degrees(ranks, &choices);
    fsdp_status st = fsdp__fail(
        FSDP_INVALID_CONFIG,
        "parallelism: data_parallel_replicate_degree %lld x data_parallel_shard_degree %lld is not "
        "the %d rank%s of this run; valid choices (replicate x shard): %s",
        (long long)r, (long long)*s, ranks, ranks == 1 ? "" : "s", fsdp__str_get(&choices));
    fsdp__str_free(&choices);
    return st;
}

static fsdp_status resolve_model(fsdp__train_config *c)
{
    bool custom = c->model.flavor == FSDP__FLAVOR_CUSTOM ||
                  (c->model.flavor == FSDP__FLAVOR_AUTO && !c->model.hf_assets_path);
    bool sizes = c->model.dim || c->model.n_layers || c->model.n_heads || c->model.n_kv_heads ||
                 c->model.head_dim || c->model.ffn_dim || c->model.vocab_size ||
                 c->model.max_seq_len;
    if (c->model.hf_assets_path && (c->model.flavor != FSDP__FLAVOR_AUTO || sizes))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "model: hf_assets_path is set, so the sizes are those of its "
                          "config.json; leave out flavor, dim, n_layers, n_heads, n_kv_heads, "
                          "head_dim, ffn_dim, vocab_size and max_seq_len, or hf_assets_path");
    if (custom && !(c->model.dim && c->model.n_layers && c->model.n_heads && c->model.ffn_dim))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "model: no model is chosen; set model.flavor (demo, tiny, small, 135m, "
                          "1b), or model.hf_assets_path, or model.dim, n_layers, n_heads and "
                          "ffn_dim");
    if (custom) c->model.flavor = FSDP__FLAVOR_CUSTOM;
    return FSDP_OK;
}

/* An option that would have no effect is a mistake. */
static fsdp_status resolve_ema(const fsdp__train_config *c)
{
    const char *asks = c->validation.ema          ? "validation.ema"
                       : c->checkpoint.export_ema ? "checkpoint.export_ema"
                                                  : NULL;
    if (asks && c->training.ema_decay == 0)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "%s is set and training.ema_decay is 0, so there is no moving average; "
                          "set training.ema_decay, such as 0.999",
                          asks);
    if (c->checkpoint.export_ema && c->lora.enable)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "checkpoint.export_ema with lora.enable: the averages are those of the "
                          "adapters, and what is merged is the adapters themselves; leave one of "
                          "the two out");
    if (c->checkpoint.export_ema && !c->checkpoint.last_save_in_hf)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "checkpoint.export_ema is set without checkpoint.last_save_in_hf; set "
                          "both");
    return FSDP_OK;
}

static fsdp_status resolve_reproducible(const fsdp__train_config *c, int ranks)
{
    if (!c->training.reproducible) return FSDP_OK;
    if ((ranks & (ranks - 1)) != 0)
        return fsdp__fail(
            FSDP_INVALID_CONFIG,
            "training.reproducible with %d ranks; microbatches and ranks are one tree "
            "of sums where the ranks are a power of two",
            ranks);
    if (c->training.mixed_precision_reduce != FSDP__TRAIN_F32 ||
        c->training.dtype != FSDP__TRAIN_F32)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "training.reproducible with gradients below float32, which round where "
                          "ranks meet; set training.mixed_precision_reduce and training.dtype to "
                          "float32");
    if (c->training.sync_each_microbatch)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "training.reproducible and training.sync_each_microbatch at once: the "
                          "first sums a step's microbatches in one tree, the second one by one");
    return FSDP_OK;
}

fsdp_status fsdp__train_config_resolve(fsdp__train_config *c, int ranks)
{
    FSDP_TRY(resolve_degrees(c, ranks));
    FSDP_TRY(resolve_model(c));
    FSDP_TRY(resolve_reproducible(c, ranks));
    FSDP_TRY(fsdp__train_recompute_check(c));
    FSDP_TRY(fsdp__adapters_resolve(c));
    FSDP_TRY(fsdp__strategy_check(c));
    if (!c->job.dump_folder || !*c->job.dump_folder)
        return fsdp__fail(FSDP_INVALID_CONFIG, "job.dump_folder is empty; expected a folder");
    if (!c->data.dir)
        return fsdp__fail(
            FSDP_INVALID_CONFIG,
            "data.dir is not set; expected the folder that `fsdp prepare --out` made");
    FSDP_TRY(fsdp__train_groups_check(c));
    FSDP_TRY(resolve_ema(c));
    if (c->debug.inject_nonfinite)
        FSDP_TRY(fsdp__injection_check(c->debug.inject_nonfinite, ranks, c->training.steps, 0));
    if (!c->checkpoint.folder || !*c->checkpoint.folder || strchr(c->checkpoint.folder, '/'))
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "checkpoint.folder is '%s'; expected the name of a folder, without /",
                          c->checkpoint.folder ? c->checkpoint.folder : "");
    if (c->checkpoint.keep_latest_k == 1)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "checkpoint.keep_latest_k is 1; expected 0 (all) or at least 2: while "
                          "the next one is written there would be none");
    if (c->training.global_batch_size == -1)
        c->training.global_batch_size = c->training.local_batch_size * ranks;
    if (c->training.global_batch_size < 1)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "training.global_batch_size is %lld; expected at least 1, or -1",
                          (long long)c->training.global_batch_size);
    FSDP_TRY(fsdp__train_offload_check(c));
    if (c->lr_scheduler.decay_ratio < 0) c->lr_scheduler.decay_ratio = -1;
    if (!c->lr_scheduler.total_steps) c->lr_scheduler.total_steps = c->training.steps;
    if (!c->validation.enable) return FSDP_OK;
    if (!c->validation.seq_len) c->validation.seq_len = c->training.seq_len;
    if (!c->validation.local_batch_size)
        c->validation.local_batch_size = c->training.local_batch_size;
    return FSDP_OK;
}

/* ---- as text --------------------------------------------------------------------------- */

void fsdp__train_config_text(const fsdp__train_config *c, fsdp__str *out)
{
    fsdp__options_yaml(&c->options, out, false);
}

uint64_t fsdp__train_config_hash(const char *text)
{
    return fsdp__rng_mix_str(fsdp__rng_key(0), text);
}

/* The next line of *p (advanced), without its end. */
static size_t next_line(const char **p, const char **line)
{
    *line = *p;
    size_t n = strcspn(*p, "\n");
    *p += n + ((*p)[n] != 0);
    return n;
}

void fsdp__train_config_differences(const char *a, const char *b, fsdp__str *out)
{
    char section[64] = "";
    while (*a || *b) {
        const char *x, *y;
        size_t n = next_line(&a, &x), m = next_line(&b, &y);
        if (n > 0 && x[0] != ' ' && n < sizeof section) {
            memcpy(section, x, n);
            section[n - (x[n - 1] == ':')] = 0;
        }
        if (n == m && memcmp(x, y, n) == 0) continue;
        size_t skip = strspn(x, " "), colon = strcspn(x, ":");
        /* Both texts are of one table, so a line has the same name in both. */
        const char *other = memchr(y, ':', m);
        if (colon >= n || !other) {
            fsdp__str_add(out, "  they list different options\n");
            return;
        }
        size_t from = colon + 2 < n ? colon + 2 : n;
        fsdp__str_addf(out, "  %s.%.*s: %.*s and %.*s\n", section, (int)(colon - skip), x + skip,
                       (int)(n - from), x + from, (int)(m - (size_t)(other - y) - 2), other + 2);
    }
}
