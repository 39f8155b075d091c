/*
 * bench_step.c - `fsdp bench step`: whole training steps on random tokens,
 * beside what they cannot do without.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/thread.h"
#include "cli/bench.h"
#include "cli/cli.h"

typedef struct bench {
    const char *model, *strategy;
    fsdp_dtype dtype;
    int64_t batch, seq, steps;
    bool floor;
    fsdp_model_config config;
    fsdp_module *net;
    fsdp_optimizer *adamw;
    int64_t *tokens;          /* (batch, seq + 1) */
    double *seconds, *losses; /* (steps) */
    double first_step;
} bench;

/* Seconds since this process was started. */
static double process_age(void)
{
    unsigned long long start = 0;
    FILE *f = fopen("/proc/self/stat", "r");
    char line[1024] = "";
    if (f && fgets(line, sizeof line, f)) {
        char *p = strrchr(line, ')'); /* the name may hold blanks */
        for (int field = 2; p && field < 22; field++)
            p = strchr(p + 1, ' ');
        if (p) start = strtoull(p, NULL, 10);
    }
    if (f) fclose(f);
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec -
           (double)start / (double)sysconf(_SC_CLK_TCK);
}

static fsdp_status build(bench *b)
{
    bool none = !strcmp(b->strategy, "none");
    int world = fsdp_world_size();
    const char *axes[] = {"replicate", "shard"};
    int sizes[] = {none ? world : 1, none ? 1 : world};
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, none ? 2 : 1, sizes + !none, axes + !none);
    if (!mesh) return fsdp_error();
    FSDP_TRY(fsdp_device_push(FSDP_META));
    b->net = fsdp_model_create(&b->config);
    fsdp_device_pop();
    if (!b->net) return fsdp_error();
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = !strcmp(b->strategy, "full") ? FSDP_RESHARD_AUTO : FSDP_RESHARD_NEVER;
    if (b->dtype == FSDP_BF16) o.mp_policy.param_dtype = FSDP_BF16;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int64_t i = 0; i < fsdp_model_block_count(b->net); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(b->net, i), &o));
    FSDP_TRY(fsdp_fully_shard(b->net, &o));
    FSDP_TRY(fsdp_to_empty(b->net, FSDP_CPU));
    FSDP_TRY(fsdp_reset_parameters(b->net, 0));
    FSDP_TRY(fsdp_set_gradient_divide_factor(b->net, 1.0, 1));
    fsdp_adamw_options a = {3e-4, 0.9, 0.95, 1e-8, 0.1};
    b->adamw = fsdp_adamw(b->net, &a);
    return fsdp_error();
}

static fsdp_status one_step(bench *b, int64_t step)
{
    uint64_t key = fsdp__rng_mix(fsdp__rng_key(1234), (uint64_t)step);
    int64_t row = b->seq + 1, first = fsdp_rank() * b->batch * row;
    for (int64_t i = 0; i < b->batch * row; i++)
        b->tokens[i] =
            (int64_t)(fsdp__rng_u32(key, (uint64_t)(first + i)) % (uint64_t)b->config.vocab_size);
    fsdp_scope *scope = fsdp_scope_begin();
    double start = fsdp__now();
    const int64_t sizes[] = {b->batch, b->seq}, strides[] = {row, 1};
    fsdp_tensor *in = fsdp_contiguous(
        fsdp_tensor_from_memory(b->tokens, FSDP_I64, 2, sizes, strides, NULL, NULL));
    fsdp_tensor *target = fsdp_contiguous(
        fsdp_tensor_from_memory(b->tokens + 1, FSDP_I64, 2, sizes, strides, NULL, NULL));
    double mean = 1.0 / (double)(b->batch * b->seq * fsdp_world_size());
    fsdp_tensor *loss = fsdp_scale(fsdp_model_forward(b->net, in, NULL, target), mean);
    fsdp_status s = fsdp_backward(loss);
    if (s == FSDP_OK) s = fsdp_clip_grad_norm(b->net, 1.0, NULL);
    if (s == FSDP_OK) s = fsdp_optimizer_step(b->adamw);
    if (s == FSDP_OK) s = fsdp_zero_grad(b->net);
    double value = s == FSDP_OK ? fsdp_item(loss) : 0.0;
    if (s == FSDP_OK)
        s = fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, &value, 1, FSDP_F64, FSDP_SUM,
                            NULL);
    b->seconds[step] = fsdp__now() - start;
    b->losses[step] = value;
    if (step == 0) b->first_step = process_age();
    fsdp_scope_end(scope);
    return s;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(const double *x, int64_t n)
{
    double t[1024];
    if (n > 1024) n = 1024;
    memcpy(t, x, sizeof *t * (size_t)n);
    qsort(t, (size_t)n, sizeof *t, by_value);
    return t[n / 2];
}

/* ---- the floor ------------------------------------------------------------------- */

typedef struct floor_parts {
    double gemm, attention, bytes, copy_rate, moved;
} floor_parts;

/* Bytes of one rank that a step has to read or write beyond its matrix products: shards gathered
 * (read in f32, written in the compute dtype), gradients summed from all ranks, AdamW's one pass
 * over parameter, moments and gradient, and the norm's reading of the gradient. */
static double unavoidable_bytes(const bench *b, double params)
{
    int N = fsdp_world_size();
    bool none = !strcmp(b->strategy, "none"), full = !strcmp(b->strategy, "full");
    double width = (double)fsdp_dtype_size(b->dtype), shard = none ? params : params / N;
    double gathers = N == 1 ? 0.0 : none ? (width == 4 ? 0 : 1) : full ? 2 : 1;
    double reduce = N == 1 ? 0.0 : none ? params / N * (4.0 * N + 4.0) : shard * (4.0 * N + 4.0);
    return gathers * shard * (4.0 + width) + reduce + shard * (4.0 * 7.0) + shard * 4.0;
}

static fsdp_status measure_floor(const bench *b, double params, floor_parts *f)
{
    fsdp__bench_gemm g[32];
    int n = fsdp__bench_step_products(&b->config, b->batch, b->seq, b->dtype, g, 32);
    memset(f, 0, sizeof *f);
    for (int i = 0; i < n; i++) {
        fsdp__bench_time t;
        FSDP_TRY(fsdp__bench_gemm_time(&g[i], &t));
        double *sum = i < n - 2 ? &f->gemm : &f->attention;
        *sum += t.best * g[i].count;
    }
    FSDP_TRY(fsdp__bench_max(&f->gemm));
    FSDP_TRY(fsdp__bench_max(&f->attention));
    FSDP_TRY(fsdp__bench_copy_rate(&f->copy_rate));
    f->moved = unavoidable_bytes(b, params);
    f->bytes = f->moved / f->copy_rate;
    return FSDP_OK;
}

static void print_result(const bench *b, const floor_parts *f, double params, double peak)
{
    int64_t skip = b->steps > 2 ? 2 : 0;
    double med = median(b->seconds + skip, b->steps - skip), min = 1e300;
    for (int64_t i = b->steps > 1 ? 1 : 0; i < b->steps; i++)
        min = b->seconds[i] < min ? b->seconds[i] : min;
    int N = fsdp_world_size();
    printf(
        "{\"peer\": \"fsdp.c %s\", \"strategy\": \"%s\", \"dtype\": \"%s\", \"model\": \"%s\", "
        "\"params\": %.0f, \"ranks\": %d, \"threads\": %d, \"batch\": %lld, \"seq\": %lld, "
        "\"tokens_per_s\": %.1f, \"step_s\": %.4f, \"min_step_s\": %.4f, \"first_step_s\": %.2f, "
        "\"peak_rss_mib\": %.1f, \"losses\": [",
        FSDP_VERSION, b->strategy, fsdp_dtype_name(b->dtype), b->model, params, N, fsdp_threads(),
        (long long)b->batch, (long long)b->seq, (double)(N * b->batch * b->seq) / med, med, min,
        b->first_step, peak);
    for (int64_t i = 0; i < b->steps; i++)
        printf("%s%.6f", i ? ", " : "", b->losses[i]);
    printf("], \"isa\": \"%s\", \"machine\": \"%s\"", fsdp__cpu_isa_name(fsdp__cpu_isa()),
           fsdp__cpu_model());
    if (b->floor) {
        double floor = f->gemm + f->attention + f->bytes;
        printf(", \"floor_s\": %.4f, \"floor_gemm_s\": %.4f, \"floor_attention_s\": %.4f, "
               "\"floor_bytes_s\": %.4f, \"floor_bytes\": %.0f, \"copy_gb_per_s\": %.2f, "
               "\"step_over_floor\": %.3f, \"min_step_over_floor\": %.3f",
               floor, f->gemm, f->attention, f->bytes, f->moved, f->copy_rate / 1e9, med / floor,
               min / floor);
    }
    printf("}\n");
}

static fsdp_status run(bench *b)
{
    floor_parts f = {0};
    FSDP_TRY(fsdp__bench_model(b->model, b->seq, &b->config));
    FSDP_TRY(build(b));
    double params = (double)fsdp_module_numel(b->net);
    for (int64_t i = 0; i < b->steps; i++)
        FSDP_TRY(one_step(b, i));
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    double peak = (double)u.ru_maxrss / 1024.0;
    FSDP_TRY(fsdp__bench_max(&peak));
    if (b->floor) FSDP_TRY(measure_floor(b, params, &f));
    if (fsdp_rank() == 0) print_result(b, &f, params, peak);
    return FSDP_OK;
}

static int64_t number(int argc, char **argv, const char *name, const char *otherwise)
{
    return atoll(fsdp__bench_option(argc, argv, name, otherwise));
}

int fsdp__bench_step(int argc, char **argv)
{
    bench b = {.model = fsdp__bench_option(argc, argv, "model", "small"),
               .strategy = fsdp__bench_option(argc, argv, "strategy", "full"),
               .dtype = fsdp_dtype_parse(fsdp__bench_option(argc, argv, "dtype", "f32")),
               .batch = number(argc, argv, "batch", "2"),
               .seq = number(argc, argv, "seq", "512"),
               .steps = number(argc, argv, "steps", "8"),
               .floor = number(argc, argv, "floor", "1") != 0};
    if (strcmp(b.strategy, "full") && strcmp(b.strategy, "grad_op") && strcmp(b.strategy, "none"))
        return fsdp__cli_usage("bench", "--strategy %s; expected full, grad_op or none",
                               b.strategy);
    if (b.dtype != FSDP_F32 && b.dtype != FSDP_BF16)
        return fsdp__cli_usage("bench", "--dtype: expected f32 or bf16");
    if (b.batch < 1 || b.seq < 1 || b.steps < 1 || b.steps > 1000)
        return fsdp__cli_usage("bench", "--batch, --seq and --steps are 1 or more, --steps at most "
                                        "1000");
    b.tokens = fsdp__calloc((size_t)(b.batch * (b.seq + 1)), sizeof *b.tokens, "tokens");
    b.seconds = fsdp__calloc((size_t)b.steps, sizeof *b.seconds, "times");
    b.losses = fsdp__calloc((size_t)b.steps, sizeof *b.losses, "losses");
    if (b.tokens && b.seconds && b.losses && fsdp_init(NULL, NULL) == FSDP_OK) run(&b);
    fsdp_optimizer_free(b.adamw);
    fsdp_module_free(b.net);
    free(b.tokens);
    free(b.seconds);
    free(b.losses);
    int code = fsdp__cli_report("bench");
    fsdp_finalize();
    return code;
}
