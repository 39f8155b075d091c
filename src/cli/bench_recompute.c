/*
 * bench_recompute.c - `fsdp bench recompute`: what activation checkpointing costs and what it
 * saves: whole training steps of one model in each mode, taken in turn.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/rng.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "train/recompute.h"

typedef struct side {
    const char *name;
    int mode;
    const char *option;
    /* of this rank */
    fsdp_model_config config;
    int64_t batch, seq, steps;
    fsdp_module *net;
    fsdp_optimizer *adamw;
    fsdp__train_recompute plan;
    int64_t peak; /* of activations, largest of a step */
    double loss;
} side;

static const side sides[FSDP__BENCH_WORKS] = {
    {.name = "none", .mode = FSDP__RECOMPUTE_NONE},
    {.name = "selective 2", .mode = FSDP__RECOMPUTE_SELECTIVE, .option = "2"},
    {.name = "selective op", .mode = FSDP__RECOMPUTE_SELECTIVE, .option = "op"},
    {.name = "full", .mode = FSDP__RECOMPUTE_FULL},
};

static fsdp_status apply(side *s)
{
    fsdp__train_config c;
    fsdp_status status = fsdp__train_config_init(&c);
    c.activation_checkpoint.mode = s->mode;
    if (status == FSDP_OK && s->option)
        status = fsdp__options_set(&c.options, "activation_checkpoint.selective_ac_option",
                                   s->option, "fsdp bench recompute");
    if (status == FSDP_OK) status = fsdp__train_recompute_apply(&c, s->net, &s->plan);
    fsdp__train_config_free(&c);
    return status;
}

static fsdp_status build(side *s, fsdp_dtype dtype)
{
    FSDP_TRY(fsdp_device_push(FSDP_META));
    s->net = fsdp_model_create(&s->config);
    FSDP_TRY(fsdp_device_pop());
    FSDP_TRY(apply(s));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    if (dtype == FSDP_BF16) o.mp_policy.param_dtype = FSDP_BF16;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int64_t i = 0; i < fsdp_model_block_count(s->net); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(s->net, i), &o));
    FSDP_TRY(fsdp_fully_shard(s->net, &o));
    FSDP_TRY(fsdp_to_empty(s->net, FSDP_CPU));
    FSDP_TRY(fsdp_reset_parameters(s->net, 0));
    s->adamw = fsdp_adamw(s->net, NULL);
    return fsdp_error();
}

static fsdp_status train(side *s)
{
    uint64_t key = fsdp__rng_mix(fsdp__rng_key(77), (uint64_t)(s->steps++));
    const int64_t sizes[] = {s->batch, s->seq};
    fsdp_tensor *x = fsdp_empty(FSDP_I64, 2, sizes);
    if (!x) return fsdp_error();
    int64_t first = fsdp_rank() * s->batch * s->seq, vocab = s->config.vocab_size;
    for (int64_t i = 0; i < s->batch * s->seq; i++)
        ((int64_t *)fsdp_data(x))[i] =
            (int64_t)(fsdp__rng_u32(key, (uint64_t)(first + i)) % (uint64_t)vocab);
    double mean = 1.0 / (double)(s->batch * s->seq);
    fsdp_tensor *loss = fsdp_scale(fsdp_model_forward(s->net, x, NULL, x), mean);
    if (!loss) return fsdp_error();
    s->loss = fsdp_item(loss);
    FSDP_TRY(fsdp_backward(loss));
    FSDP_TRY(fsdp_clip_grad_norm(s->net, 1.0, NULL));
    FSDP_TRY(fsdp_optimizer_step(s->adamw));
    return fsdp_zero_grad(s->net);
}

static fsdp_status step(void *arg)
{
    side *s = arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_memory_reset_peak();
    fsdp_status status = train(s);
    fsdp_scope_end(scope);
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    if (m.peak[FSDP_ACTIVATIONS] > s->peak) s->peak = m.peak[FSDP_ACTIVATIONS];
    return status;
}

/* Of all microbatches so far: what was run again for what the model has. */
static double share(const side *s)
{
    double again = 0.0;
    for (int64_t i = 0; i < s->plan.n_blocks; i++)
        again += s->plan.blocks[i].report.recomputed_flops;
    double tokens = (double)(s->steps * s->batch * s->seq);
    return again / (tokens * fsdp_model_flops_per_token(&s->config, s->seq));
}

static void print_table(const side *s, const fsdp__bench_work *w, double parameters)
{
    printf("%.2f million parameters, %d rank%s, %d thread%s each, (%lld, %lld) tokens a rank\n",
           parameters / 1e6, fsdp_world_size(), fsdp_world_size() == 1 ? "" : "s", fsdp_threads(),
           fsdp_threads() == 1 ? "" : "s", (long long)s->batch, (long long)s->seq);
    printf("%-14s%12s%10s%10s%18s%10s%18s\n", "mode", "step, ms", "of none", "best",
           "activations, KiB", "of none", "FLOPs run again");
    for (int k = 0; k < FSDP__BENCH_WORKS; k++)
        printf("%-14s%12.2f%9.2fx%9.2fx%18.1f%9.1f%%%17.1f%%\n", s[k].name, 1e3 * w[k].time.median,
               w[k].time.median / w[0].time.median, w[k].time.best / w[0].time.best,
               (double)s[k].peak / 1024.0, 100.0 * (double)s[k].peak / (double)s[0].peak,
               100.0 * share(&s[k]));
}

static fsdp_status run(side *s, const char *model, fsdp_dtype dtype, int rounds)
{
    fsdp__bench_work w[FSDP__BENCH_WORKS] = {{0}};
    for (int k = 0; k < FSDP__BENCH_WORKS; k++) {
        FSDP_TRY(fsdp__bench_model(model, s[k].seq, &s[k].config));
        FSDP_TRY(build(&s[k], dtype));
        w[k] = (fsdp__bench_work){.fn = step, .arg = &s[k]};
    }
    FSDP_TRY(fsdp__bench_turns(rounds, FSDP__BENCH_WORKS, w));
    for (int k = 0; k < FSDP__BENCH_WORKS; k++) {
        FSDP_TRY(fsdp__bench_max(&w[k].time.median));
        FSDP_TRY(fsdp__bench_max(&w[k].time.best));
        if (s[k].loss != s[0].loss)
            return fsdp__fail(FSDP_INTERNAL, "mode %s has loss %.17g and mode none %.17g",
                              s[k].name, s[k].loss, s[0].loss);
    }
    if (fsdp_rank() == 0) print_table(s, w, (double)fsdp_module_numel(s[0].net));
    return FSDP_OK;
}

int fsdp__bench_recompute(int argc, char **argv)
{
    const char *model = fsdp__bench_option(argc, argv, "model", "tiny");
    fsdp_dtype dtype = fsdp_dtype_parse(fsdp__bench_option(argc, argv, "dtype", "f32"));
    int64_t batch = atoll(fsdp__bench_option(argc, argv, "batch", "4"));
    int64_t seq = atoll(fsdp__bench_option(argc, argv, "seq", "128"));
    int64_t steps = atoll(fsdp__bench_option(argc, argv, "steps", "10"));
    if (dtype != FSDP_F32 && dtype != FSDP_BF16)
        return fsdp__cli_usage("bench", "--dtype: expected f32 or bf16");
    if (batch < 1 || seq < 1 || steps < 1 || steps > 64)
        return fsdp__cli_usage("bench", "--batch, --seq and --steps are 1 or more, --steps at most "
                                        "64");
    side s[FSDP__BENCH_WORKS];
    for (int k = 0; k < FSDP__BENCH_WORKS; k++) {
        s[k] = sides[k];
        s[k].batch = batch;
        s[k].seq = seq;
    }
    if (fsdp_init(NULL, NULL) == FSDP_OK) run(s, model, dtype, (int)steps);
    for (int k = 0; k < FSDP__BENCH_WORKS; k++) {
        fsdp_optimizer_free(s[k].adamw);
        fsdp_module_free(s[k].net);
        fsdp__train_recompute_free(&s[k].plan);
    }
    int code = fsdp__cli_report("bench");
    fsdp_finalize();
    return code;
}
