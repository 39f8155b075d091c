/*
 * bench_floor.c - the limits of the machine: rates of matrix products and of
 * copying, with all ranks at once.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "cli/bench.h"
#include "tensor/kernels.h"
#include "train/config.h"

const char *fsdp__bench_option(int argc, char **argv, const char *name, const char *otherwise)
{
    size_t n = strlen(name);
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) || strncmp(argv[i] + 2, name, n)) continue;
        if (argv[i][2 + n] == '=') return argv[i] + 3 + n;
        if (!argv[i][2 + n] && i + 1 < argc) return argv[i + 1];
    }
    return otherwise;
}

fsdp_status fsdp__bench_max(double *x)
{
    return fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, x, 1, FSDP_F64, FSDP_MAX, NULL);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

fsdp_status fsdp__bench_turns(int times, int n, fsdp__bench_work *w)
{
    enum { MOST = 64 };
    double t[FSDP__BENCH_WORKS][MOST];
    if (times > MOST) times = MOST;
    for (int i = -1; i < times; i++)
        for (int k = 0; k < n; k++) {
            FSDP_TRY(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL));
            double start = fsdp__now();
            FSDP_TRY(w[k].fn(w[k].arg));
            if (i >= 0) t[k][i] = fsdp__now() - start;
        }
    for (int k = 0; k < n; k++) {
        qsort(t[k], (size_t)times, sizeof t[k][0], by_value);
        w[k].time.best = t[k][0];
        w[k].time.median = t[k][times / 2];
    }
    return FSDP_OK;
}

fsdp_status fsdp__bench_run(int times, fsdp_status (*fn)(void *arg), void *arg,
                            fsdp__bench_time *out)
{
    fsdp__bench_work w = {fn, arg, {0, 0}};
    fsdp_status s = fsdp__bench_turns(times, 1, &w);
    *out = w.time;
    return s;
}

/* ---- copying ------------------------------------------------------------------- */

fsdp_status fsdp__bench_copy_rate(double *rate)
{
    enum { BYTES = 64 << 20 };
    fsdp__bench_copy c;
    fsdp__bench_time t = {1, 1};
    fsdp_status s = fsdp__bench_copy_init(&c, BYTES);
    if (s == FSDP_OK) s = fsdp__bench_run(9, fsdp__bench_copy_run, &c, &t);
    fsdp__bench_copy_free(&c);
    double seconds = t.median;
    if (s == FSDP_OK) s = fsdp__bench_max(&seconds);
    *rate = 2.0 * BYTES / seconds;
    return s;
}

/* ---- matrix products ---------------------------------------------------------------- */

typedef struct product {
    const fsdp__bench_gemm *g;
    void *a, *b, *c;
    int repeat;
} product;

static fsdp_status run_product(void *arg)
{
    const product *p = arg;
    const fsdp__bench_gemm *g = p->g;
    for (int i = 0; i < p->repeat; i++)
        FSDP_TRY(fsdp__k_gemm(g->trans_a, g->trans_b, g->M, g->N, g->K, p->a,
                              g->trans_a ? g->M : g->K, p->b, g->trans_b ? g->K : g->N, g->t, p->c,
                              g->N, g->t, 0));
    return FSDP_OK;
}

fsdp_status fsdp__bench_gemm_time(const fsdp__bench_gemm *g, fsdp__bench_time *out)
{
    size_t w = fsdp_dtype_size(g->t);
    product p = {g, fsdp__calloc((size_t)(g->M * g->K), w, "a matrix"),
                 fsdp__calloc((size_t)(g->K * g->N), w, "a matrix"),
                 fsdp__calloc((size_t)(g->M * g->N), w, "a matrix"), 1};
    double flops = 2.0 * (double)g->M * (double)g->N * (double)g->K;
    if (flops < 4e7) p.repeat = (int)(4e7 / flops) + 1; /* long enough for the clock */
    fsdp_status s = p.a && p.b && p.c ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK) {
        fsdp__k_fill(p.a, g->t, g->M * g->K, 0.5);
        fsdp__k_fill(p.b, g->t, g->K * g->N, 0.25);
        s = fsdp__bench_run(7, run_product, &p, out);
    }
    out->best /= p.repeat;
    out->median /= p.repeat;
    free(p.a);
    free(p.b);
    free(p.c);
    return s;
}

/* Adds the three products of a linear layer: y = x w^T, dx = dy w, dw = dy^T x. */
static int add_linear(fsdp__bench_gemm *out, int n, int cap, int64_t rows, int64_t in, int64_t to,
                      fsdp_dtype t, double count)
{
    const fsdp__bench_gemm three[3] = {{0, 1, rows, to, in, t, count},
                                       {0, 0, rows, in, to, t, count},
                                       {1, 0, to, in, rows, t, count}};
    for (int k = 0; k < 3 && n < cap; k++)
        out[n++] = three[k];
    return n;
}

int fsdp__bench_step_products(const fsdp_model_config *c, int64_t batch, int64_t seq, fsdp_dtype t,
                              fsdp__bench_gemm *out, int cap)
{
    int64_t rows = batch * seq, D = c->hidden_size, h = c->head_dim, half = (seq + 1) / 2;
    double L = (double)c->num_layers, heads = L * (double)(batch * c->num_heads);
    int n = 0;
    n = add_linear(out, n, cap, rows, D, c->num_heads * h, t, L);
    n = add_linear(out, n, cap, rows, D, c->num_kv_heads * h, t, 2 * L);
    n = add_linear(out, n, cap, rows, c->num_heads * h, D, t, L);
    n = add_linear(out, n, cap, rows, D, c->intermediate_size, t, 2 * L);
    n = add_linear(out, n, cap, rows, c->intermediate_size, D, t, L);
    n = add_linear(out, n, cap, rows, D, c->vocab_size, t, 1);
    /* Attention, the causal half: scores and dP; out, dV, dQ and dK. In f32, as they are done. */
    if (n + 2 > cap) return n;
    out[n++] = (fsdp__bench_gemm){0, 1, seq, half, h, FSDP_F32, 2 * heads};
    out[n++] = (fsdp__bench_gemm){0, 0, seq, h, half, FSDP_F32, 4 * heads};
    return n;
}

fsdp_status fsdp__bench_model(const char *name, int64_t seq, fsdp_model_config *out)
{
    static const char *const sizes[][2] = {
        {"tiny", "1024"}, {"small", "8192"}, {"135m", "49152"}, {"1b", "32000"}};
    fsdp__train_config c;
    FSDP_TRY(fsdp__train_config_init(&c));
    fsdp_status s = FSDP_INVALID_ARGUMENT;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (strcmp(name, sizes[i][0])) continue;
        char length[24];
        snprintf(length, sizeof length, "%lld", (long long)seq);
        char *words[] = {"--model.flavor",     (char *)(uintptr_t)name,
                         "--model.vocab_size", (char *)(uintptr_t)sizes[i][1],
                         "--training.seq_len", length};
        s = fsdp__train_config_words(&c, 6, words);
        if (s == FSDP_OK) s = fsdp__train_model_config(&c, 0, out);
    }
    if (s == FSDP_INVALID_ARGUMENT && !fsdp_error())
        s = fsdp__fail(s, "model \"%s\"; expected tiny, small, 135m or 1b", name);
    fsdp__train_config_free(&c);
    return s;
}
