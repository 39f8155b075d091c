/*
 * config.h - what a training run is told: one struct a section, and the option tables over them.
 *
 * Sections and names are those of torchtitan's TOML generation, where it has them; job, model,
 * optimizer, lr_scheduler, training, parallelism, checkpoint, metrics, comm, validation and debug
 * are its own, data, memory and prefetch are ours. Only what acts stands in a table.
 */
#ifndef FSDP_TRAIN_CONFIG_H
#define FSDP_TRAIN_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/option.h"
#include "models/config.h"

enum fsdp__flavor {
    FSDP__FLAVOR_AUTO,
    FSDP__FLAVOR_CUSTOM,
    FSDP__FLAVOR_DEMO,
    FSDP__FLAVOR_TINY,
    FSDP__FLAVOR_SMALL,
    FSDP__FLAVOR_135M,
    FSDP__FLAVOR_1B
};
enum fsdp__train_dtype { FSDP__TRAIN_F32, FSDP__TRAIN_BF16, FSDP__TRAIN_F16 };
enum fsdp__recompute_mode {
    FSDP__RECOMPUTE_NONE,
    FSDP__RECOMPUTE_FULL,
    FSDP__RECOMPUTE_SELECTIVE,
    FSDP__RECOMPUTE_BUDGET
};

typedef struct fsdp__train_config {
    struct {
        char *dump_folder, *description;
        bool print_config;
    } job;
    struct {
        int name, flavor; /* fsdp_model_family, enum fsdp__flavor */
        char *hf_assets_path;
        int64_t dim, n_layers, n_heads, n_kv_heads, head_dim, ffn_dim, vocab_size, max_seq_len;
        double rope_theta, norm_eps, init_std;
        int tied; /* 0 the flavor's, 1 true, 2 false */
        bool print_after_conversion;
    } model;
    struct {
        int name; /* 0 AdamW, 1 SGD */
        double lr, beta1, beta2, eps, weight_decay, momentum;
        fsdp__strings param_groups; /* maps */
        int offload; /* fsdp_offload_kind */
        bool early_step_in_backward;
    } optimizer;
    struct {
        int64_t warmup_steps, total_steps;
        double decay_ratio;
        int decay_type; /* fsdp_decay */
        double min_lr_factor;
        bool allow_change;
    } lr_scheduler;
    struct {
        int64_t local_batch_size, global_batch_size, seq_len, steps;
        double max_norm;
        int dtype, mixed_precision_param, mixed_precision_reduce; /* enum fsdp__train_dtype */
        double loss_scale;
        int64_t loss_scale_interval;
        bool sync_each_microbatch, reproducible;
        double ema_decay;
        bool enable_cpu_offload;
        int nonfinite; /* 0 stop, 1 skip */
        int64_t nonfinite_max_skips;
    } training;
    struct {
        int64_t data_parallel_replicate_degree, data_parallel_shard_degree;
        char *fsdp_reshard_after_forward, *fsdp_units; /* strategy.h and units.h read them */
        int gather_dtype;               /* 0 that of compute, 1 int8 */
    } parallelism;
    struct {
        int mode; /* enum fsdp__recompute_mode */
        char *selective_ac_option;
        double memory_budget;
        bool early_stop;
    } activation_checkpoint;
    struct {
        bool enable;
        char *folder;
        int64_t interval, keep_latest_k, load_step;
        bool initial_load_in_hf, last_save_in_hf;
        int export_dtype; /* 0 float32, 1 bfloat16, 2 float16 */
        bool export_ema;
    } checkpoint;
    struct {
        int64_t log_freq;
    } metrics;
    struct {
        double init_timeout_seconds, train_timeout_seconds;
    } comm;
    struct {
        bool enable;
        int64_t local_batch_size, seq_len, freq, steps;
        bool ema;
    } validation;
    struct {
        int64_t seed;
        char *inject_nonfinite;
        int64_t check_replicas;
    } debug;
    struct {
        char *dir;
        bool shuffle;
    } data;
    struct {
        int64_t limit;
        bool shared_gather;
        int offload; /* fsdp_offload_kind */
        char *offload_folder;
        int64_t offload_window;
    } memory;
    struct {
        int64_t limit;
    } prefetch;
    struct {
        bool enable;
        int64_t rank;
        double alpha, dropout;
        bool rslora;
        fsdp__strings target_modules;
        char *target_pattern, *adapter_path;
        bool merge;
    } lora;

    fsdp__section sections[32]; /* whose targets are the structs above: do not copy or move */
    fsdp__options options;
    fsdp__strings given; /* "section.name" of each option that a file or a word has set, once */
} fsdp__train_config;

/* Defaults. c may be freed afterwards, also after a failure. */
fsdp_status fsdp__train_config_init(fsdp__train_config *c);
void fsdp__train_config_free(fsdp__train_config *c);

/* Reads a YAML file over what c holds. */
fsdp_status fsdp__train_config_load(fsdp__train_config *c, const char *path);
/* Words "--section.name value", "--section.name=value"; a switch may stand alone. A word that is no
 * such option is an error. */
fsdp_status fsdp__train_config_words(fsdp__train_config *c, int n, char *const *words);
/* Checks values against each other and replaces what follows from them (degree -1, batch -1,
 * sequence lengths of 0, ...) for a run of `ranks` ranks. Reads no file. */
fsdp_status fsdp__train_config_resolve(fsdp__train_config *c, int ranks);

/* The resolved values as YAML. */
void fsdp__train_config_text(const fsdp__train_config *c, fsdp__str *out);
/* 64 bits of that text. */
uint64_t fsdp__train_config_hash(const char *text);
/* The lines in which two such texts differ, as "training.steps: 10 and 20", one a line. */
void fsdp__train_config_differences(const char *a, const char *b, fsdp__str *out);

/* The model that c asks for, by its flavor and sizes or by the config.json of hf_assets_path.
 * vocab_size is the tokenizer's; it is taken where c names none. Errors name the options. */
fsdp_status fsdp__train_model_config(const fsdp__train_config *c, int64_t vocab_size,
                                     fsdp_model_config *out);

#endif
