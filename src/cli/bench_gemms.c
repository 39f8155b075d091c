/*
 * bench_gemms.c - `fsdp bench gemm`: the matrix products of a training step, a
 * line a distinct shape, by the library's path and by oneDNN's sgemm alone, in
 * turn and with all ranks at once.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <oneapi/dnnl/dnnl.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "tensor/kernels.h"

enum { SHAPES = 32 };

typedef struct product {
    const fsdp__bench_gemm *g;
    void *a, *b, *c;     /* of dtype t */
    float *fa, *fb, *fc; /* the same in f32 */
    int repeat;
} product;

static fsdp_status by_library(void *arg)
{
    const product *p = arg;
    const fsdp__bench_gemm *g = p->g;
    for (int i = 0; i < p->repeat; i++)
        FSDP_TRY(fsdp__k_gemm(g->trans_a, g->trans_b, g->M, g->N, g->K, p->a,
                              g->trans_a ? g->M : g->K, p->b, g->trans_b ? g->K : g->N, g->t, p->c,
                              g->N, g->t, 0));
    return FSDP_OK;
}

/* Always in f32: on machines without bf16 instructions it is what bf16 could reach, too. */
static fsdp_status by_dnnl(void *arg)
{
    const product *p = arg;
    const fsdp__bench_gemm *g = p->g;
    for (int i = 0; i < p->repeat; i++)
        if (dnnl_sgemm(g->trans_a ? 'T' : 'N', g->trans_b ? 'T' : 'N', g->M, g->N, g->K, 1.0f,
                       p->fa, g->trans_a ? g->M : g->K, p->fb, g->trans_b ? g->K : g->N, 0.0f,
                       p->fc, g->N) != dnnl_success)
            return fsdp__fail(FSDP_INTERNAL, "oneDNN refused a product of %lld x %lld x %lld",
                              (long long)g->M, (long long)g->N, (long long)g->K);
    return FSDP_OK;
}

static fsdp_status measure(const fsdp__bench_gemm *g, int repeats, double rate[2][2])
{
    size_t w = fsdp_dtype_size(g->t),
           sizes[] = {(size_t)(g->M * g->K), (size_t)(g->K * g->N), (size_t)(g->M * g->N)};
    void *p[6];
    for (int i = 0; i < 6; i++)
        p[i] = fsdp__calloc(sizes[i % 3], i < 3 ? w : sizeof(float), "a matrix");
    product u = {g, p[0], p[1], p[2], p[3], p[4], p[5], 1};
    double flops = 2.0 * (double)g->M * (double)g->N * (double)g->K;
    if (flops < 4e7) u.repeat = (int)(4e7 / flops) + 1; /* long enough for the clock */
    fsdp__bench_work work[2] = {{by_library, &u, {1, 1}}, {by_dnnl, &u, {1, 1}}};
    fsdp_status s = FSDP_OK;
    for (int i = 0; i < 6; i++)
        if (!p[i]) s = fsdp_error();
    for (int i = 0; i < 6 && s == FSDP_OK; i++)
        fsdp__k_fill(p[i], i < 3 ? g->t : FSDP_F32, (int64_t)sizes[i % 3], 0.5);
    if (s == FSDP_OK) s = fsdp__bench_turns(repeats, 2, work);
    for (int i = 0; i < 2 && s == FSDP_OK; i++) {
        s = fsdp__bench_max(&work[i].time.best);
        if (s == FSDP_OK) s = fsdp__bench_max(&work[i].time.median);
        rate[i][0] = 1e-9 * flops * u.repeat / work[i].time.median;
        rate[i][1] = 1e-9 * flops * u.repeat / work[i].time.best;
    }
    for (int i = 0; i < 6; i++)
        free(p[i]);
    return s;
}

static bool same(const fsdp__bench_gemm *a, const fsdp__bench_gemm *b)
{
    return a->trans_a == b->trans_a && a->trans_b == b->trans_b && a->M == b->M && a->N == b->N &&
           a->K == b->K && a->t == b->t;
}

/* Joins equal shapes; returns how many are left. */
static int distinct(fsdp__bench_gemm *g, int n)
{
    int kept = 0;
    for (int i = 0; i < n; i++) {
        int k = 0;
        while (k < kept && !same(&g[k], &g[i]))
            k++;
        if (k < kept)
            g[k].count += g[i].count;
        else
            g[kept++] = g[i];
    }
    return kept;
}

static fsdp_status run(const char *model, fsdp_dtype t, int64_t batch, int64_t seq, int repeats)
{
    fsdp_model_config c;
    fsdp__bench_gemm g[SHAPES];
    double rate[SHAPES][2][2], top = 0;
    FSDP_TRY(fsdp__bench_model(model, seq, &c));
    int n = distinct(g, fsdp__bench_step_products(&c, batch, seq, t, g, SHAPES));
    for (int i = 0; i < n; i++) {
        FSDP_TRY(measure(&g[i], repeats, rate[i]));
        for (int k = 0; k < 4; k++)
            top = rate[i][k / 2][k % 2] > top ? rate[i][k / 2][k % 2] : top;
    }
    if (fsdp_rank() != 0) return FSDP_OK;
    printf("machine: %s, %s, %d rank(s) of %d thread(s); GFLOP/s a rank, medians of %d turns; "
           "model %s, batch %lld, seq %lld\n",
           fsdp__cpu_model(), fsdp__cpu_isa_name(fsdp__cpu_isa()), fsdp_world_size(),
           fsdp_threads(), repeats, model, (long long)batch, (long long)seq);
    printf("%-3s %-5s %7s %7s %7s %8s %9s %9s %9s %8s %8s\n", "op", "dtype", "M", "N", "K",
           "a step", "library", "best", "oneDNN", "of dnnl", "of top");
    for (int i = 0; i < n; i++)
        printf("%c%c  %-5s %7lld %7lld %7lld %8.0f %9.1f %9.1f %9.1f %8.2f %8.2f\n",
               g[i].trans_a ? 'T' : 'N', g[i].trans_b ? 'T' : 'N', fsdp_dtype_name(g[i].t),
               (long long)g[i].M, (long long)g[i].N, (long long)g[i].K, g[i].count, rate[i][0][0],
               rate[i][0][1], rate[i][1][0], rate[i][0][0] / rate[i][1][0], rate[i][0][0] / top);
    printf("top: %.1f GFLOP/s, the best rate seen; oneDNN: its sgemm, in f32 for either dtype\n",
           top);
    return FSDP_OK;
}

int fsdp__bench_gemms(int argc, char **argv)
{
    const char *model = fsdp__bench_option(argc, argv, "model", "small");
    fsdp_dtype t = fsdp_dtype_parse(fsdp__bench_option(argc, argv, "dtype", "f32"));
    int64_t batch = atoll(fsdp__bench_option(argc, argv, "batch", "2"));
    int64_t seq = atoll(fsdp__bench_option(argc, argv, "seq", "512"));
    int repeats = atoi(fsdp__bench_option(argc, argv, "repeats", "7"));
    if (t != FSDP_F32 && t != FSDP_BF16)
        return fsdp__cli_usage("bench", "--dtype: expected f32 or bf16");
    if (batch < 1 || seq < 1 || repeats < 1)
        return fsdp__cli_usage("bench", "--batch, --seq and --repeats are 1 or more");
    /* The library sets oneDNN's limit only where it uses it; here both must keep to one. */
    static const char *const limits[] = {"SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16",
                                         "AVX512_CORE_AMX"};
    setenv("DNNL_MAX_CPU_ISA", limits[fsdp__cpu_isa()], 1);
#if defined(_OPENMP)
    omp_set_num_threads(fsdp_threads());
#endif
    if (fsdp_init(NULL, NULL) == FSDP_OK) run(model, t, batch, seq, repeats);
    int code = fsdp__cli_report("bench");
    fsdp_finalize();
    return code;
}
