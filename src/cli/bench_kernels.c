/*
 * bench_kernels.c - `fsdp bench kernels`: the kernels of a training step other
 * than matrix products, each beside its floor.
 *
 * A floor is the larger of two times, both measured in turn with the kernel
 * and on as many threads: that of memcpy for as many bytes read plus written,
 * and that of issuing the vector instructions of the kernel's inner loop
 * (arithmetic and conversions; loads and stores are in the bytes). Arrays are
 * 64 MiB, beyond the caches, but for attention, which is bound by its
 * multiply-adds, and the head with its loss, which is held against its matrix
 * product done alone. What a store reads to own its line, or is spared by
 * writing past the caches, is in no count: a floor may be undercut.
 *
 * The counts of instructions stand in the table below, for eight or sixteen
 * lanes; the comment of a row says where they come from.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "cli/bench.h"
#include "cli/cli.h"
#include "tensor/kernels.h"

enum {
    BYTES = 64 << 20, /* of one array */
    BUFFERS = 5,
    C = 512,       /* columns of a row-wise kernel */
    VOCAB = 32768, /* rows of the table of embeddings */
    WORDS = 8192,  /* columns of a row of logits */
    HEADS = 8,
    KV_HEADS = 4,
    HEAD = 64,
    SEQ = 512,
    BATCH = 2,
    HEAD_ROWS = 512, /* rows of the head with its loss */
};

typedef struct env {
    fsdp_dtype t;
    char *b[BUFFERS];     /* BYTES each */
    int64_t n;            /* elements of an array of dtype t, or of f32 where one takes part */
    int64_t *ids;         /* (BYTES / 2 / C) rows of the table of embeddings */
    int64_t *targets;     /* the same many words */
    float *cosine, *sine; /* (SEQ, HEAD / 2) */
    int ranks;            /* whose gradients sum_tree adds up */
} env;

static int64_t rows(const env *e)
{
    return e->n / C;
}

/* ---- what is measured ------------------------------------------------------------- */

static fsdp_status rms_norm(void *arg)
{
    env *e = arg;
    fsdp__k_rms_norm(e->b[0], e->b[4], e->t, rows(e), C, 1e-5, e->b[1], e->b[3]);
    return FSDP_OK;
}

static fsdp_status rms_norm_backward(void *arg)
{
    env *e = arg;
    fsdp__k_rms_norm_backward(e->b[0], e->b[4], e->t, rows(e), C, e->b[3], e->b[1], e->b[2], e->t,
                              0, e->b[4] + BYTES / 2, FSDP_F32, 0);
    return FSDP_OK;
}

static fsdp_status swiglu(void *arg)
{
    env *e = arg;
    fsdp__k_swiglu(e->b[0], e->b[1], e->t, e->n, e->b[2]);
    return FSDP_OK;
}

static fsdp_status swiglu_backward(void *arg)
{
    env *e = arg;
    fsdp__k_swiglu_backward(e->b[0], e->b[1], e->t, e->b[2], e->n, e->b[3], e->t, 0, e->b[4], e->t,
                            0);
    return FSDP_OK;
}

static fsdp_status rotate(env *e, int inverse)
{
    fsdp__rotary r = {.t = e->t,
                      .dt = e->t,
                      .B = e->n / (SEQ * HEADS * HEAD),
                      .T = SEQ,
                      .H = HEADS,
                      .D = HEAD,
                      .x_stride = {SEQ * HEADS * HEAD, HEADS * HEAD, HEAD},
                      .y_stride = {SEQ * HEADS * HEAD, HEADS * HEAD, HEAD},
                      .inverse = inverse};
    fsdp__k_rotary(&r, e->b[0], e->cosine, e->sine, e->b[1]);
    return FSDP_OK;
}

static fsdp_status rotary(void *arg)
{
    return rotate(arg, 0);
}

static fsdp_status rotary_backward(void *arg)
{
    return rotate(arg, 1);
}

static fsdp_status residual_add(void *arg)
{
    env *e = arg;
    const int64_t one = 1;
    fsdp__k_binary(FSDP__BINARY_ADD, 1, &e->n, e->b[0], &one, e->b[1], &one, e->t, e->b[2], e->t,
                   0);
    return FSDP_OK;
}

static fsdp_status embedding(void *arg)
{
    env *e = arg;
    return fsdp__k_embedding(e->b[0], e->t, VOCAB, C, e->ids, rows(e), e->b[1]);
}

static fsdp_status embedding_backward(void *arg)
{
    env *e = arg;
    fsdp__k_embedding_backward(e->b[0], e->t, e->ids, rows(e), VOCAB, C, e->b[1], FSDP_F32, 0);
    return FSDP_OK;
}

static fsdp_status cross_entropy(void *arg)
{
    env *e = arg;
    double loss;
    int64_t count;
    return fsdp__k_cross_entropy(e->b[0], e->t, e->n / WORDS, WORDS, e->targets, -100, e->b[3],
                                 &loss, &count);
}

static fsdp_status cross_entropy_backward(void *arg)
{
    env *e = arg;
    fsdp__k_cross_entropy_backward(e->b[0], e->t, e->n / WORDS, WORDS, e->targets, -100, e->b[3],
                                   0.1, e->b[1], e->t, 0);
    return FSDP_OK;
}

static fsdp_status head_loss(void *arg)
{
    env *e = arg;
    double loss;
    int64_t count;
    return fsdp__k_head_loss(e->b[0], e->b[1], NULL, e->t, HEAD_ROWS, C, WORDS, e->targets, -100,
                             e->b[3], &loss, &count);
}

static fsdp_status head_loss_backward(void *arg)
{
    env *e = arg;
    return fsdp__k_head_loss_backward(e->b[0], e->b[1], NULL, e->t, HEAD_ROWS, C, WORDS, e->targets,
                                      -100, e->b[3], 0.1, e->b[2], e->t, 0, e->b[4], FSDP_F32, 0,
                                      NULL, FSDP_F32, 0);
}

static fsdp_status attend(env *e, int backward)
{
    const int64_t q = HEADS * HEAD, k = KV_HEADS * HEAD;
    fsdp__attention a = {.t = e->t,
                         .B = BATCH,
                         .T = SEQ,
                         .S = SEQ,
                         .H = HEADS,
                         .KV = KV_HEADS,
                         .D = HEAD,
                         .q_stride = {SEQ * q, q, HEAD},
                         .k_stride = {SEQ * k, k, HEAD},
                         .v_stride = {SEQ * k, k, HEAD},
                         .o_stride = {SEQ * q, q, HEAD},
                         .scale = 0.125f,
                         .causal = 1};
    const int64_t half = BYTES / 2;
    if (!backward) return fsdp__k_attention(&a, e->b[0], e->b[1], e->b[1] + half, e->b[2], e->b[3]);
    fsdp__attention_grad g = {.dt = e->t,
                              .do_stride = {SEQ * q, q, HEAD},
                              .dq_stride = {SEQ * q, q, HEAD},
                              .dk_stride = {SEQ * k, k, HEAD},
                              .dv_stride = {SEQ * k, k, HEAD}};
    return fsdp__k_attention_backward(&a, &g, e->b[0], e->b[1], e->b[1] + half, e->b[2], e->b[4],
                                      e->b[3], e->b[0] + half, e->b[2] + half, e->b[4] + half);
}

static fsdp_status attention(void *arg)
{
    return attend(arg, 0);
}

static fsdp_status attention_backward(void *arg)
{
    return attend(arg, 1);
}

static fsdp_status adamw(void *arg)
{
    env *e = arg;
    fsdp__adamw o = {3e-4, 0.9, 0.95, 1e-8, 0.1, 0.5, 10};
    fsdp__k_adamw(&o, e->b[0], e->b[1], e->b[3], FSDP_F32, e->b[2], FSDP_F32, e->n);
    return FSDP_OK;
}

static fsdp_status to_bf16(void *arg)
{
    env *e = arg;
    fsdp__convert(e->b[1], FSDP_BF16, e->b[0], FSDP_F32, (size_t)e->n);
    return FSDP_OK;
}

static fsdp_status to_f32(void *arg)
{
    env *e = arg;
    fsdp__convert(e->b[1], FSDP_F32, e->b[0], FSDP_BF16, (size_t)e->n);
    return FSDP_OK;
}

/* The rank's slice of the gradients of all ranks, into its shard. */
static fsdp_status sum_tree(void *arg)
{
    env *e = arg;
    const void *from[BUFFERS - 1];
    for (int r = 0; r < e->ranks; r++)
        from[r] = e->b[r];
    fsdp__sum_tree(e->b[BUFFERS - 1], FSDP_F32, from, e->t, e->ranks, (size_t)e->n, 1.0f, 0);
    return FSDP_OK;
}

static fsdp_status sum_squares(void *arg)
{
    env *e = arg;
    volatile double keep = fsdp__sum_squares(e->b[0], FSDP_F32, (size_t)e->n);
    (void)keep;
    return FSDP_OK;
}

/* ---- what each cannot do without ------------------------------------------------------ */

/* Arrays of n elements that are read or written: of dtype t, of f32. Vector
 * instructions for `lanes` elements: with f32 arrays (AVX2 and plain, AVX-512),
 * and with bf16 ones (the same two, and AVX-512 that rounds to bf16 itself). */
typedef struct kernel {
    const char *name;
    fsdp_status (*run)(void *env);
    double of_t, of_f32;
    double f32[2], bf16[3];
    unsigned char with_f32; /* n is so that arrays of f32 fit */
    unsigned char kind;
    int dtypes; /* 1: f32 only, 2: bf16 only, 3: both */
} kernel;

enum { ARRAYS, ATTENTION, HEAD_LOSS, SUM_TREE, EMBEDDING_BACKWARD };

/*
 * In loops over pairs of vectors widening bf16 is 1 instruction, and rounding to it 5.5 (AVX-512
 * 6.5, where the machine does it 1); elsewhere 2, and 10 (9; 1). The logistic function is 23 (19
 * where it ends as bf16). Below zero exp is 14 (13 where it ends as bf16); of AVX-512 12 (11),
 * which counts twice each of two instructions that start half as often as others: what is left of a
 * floor, and scaling by a power of two.
 */
static const kernel kernels[] = {
    /* pass one: 1; pass two: 2. The weight's row stays in the first cache, as the row does. */
    {"rms_norm", rms_norm, 2, 0, {3, 3}, {11.5, 12.5, 7}, 0, ARRAYS, 3},
    {"rms_norm backward", rms_norm_backward, 3, 0, {7, 7}, {22.5, 21.5, 16}, 0, ARRAYS, 3},
    {"swiglu", swiglu, 3, 0, {25, 25}, {28.5, 29.5, 24}, 0, ARRAYS, 3},
    {"swiglu backward", swiglu_backward, 5, 0, {30, 30}, {40, 42, 31}, 0, ARRAYS, 3},
    {"rotary", rotary, 2, 0, {3, 3}, {9.5, 11, 5.5}, 0, ARRAYS, 3},
    {"rotary backward", rotary_backward, 2, 0, {3.5, 3.5}, {9.5, 11, 5.5}, 0, ARRAYS, 3},
    {"residual add", residual_add, 3, 0, {1, 1}, {15, 14, 6}, 0, ARRAYS, 3},
    {"embedding", embedding, 2, 0, {0, 0}, {0, 0, 0}, 1, ARRAYS, 3},
    /* dy once; every row of dw is zeroed, the chosen ones (1 - 1/e of them) read and written. */
    {"embedding backward",
     embedding_backward,
     1,
     2.26,
     {2, 2},
     {4, 4, 4},
     1,
     EMBEDDING_BACKWARD,
     3},
    /* maximum, difference, exp, sum */
    {"cross entropy", cross_entropy, 1, 0, {17, 15}, {18, 16, 16}, 0, ARRAYS, 3},
    /* difference, exp, factor */
    {"cross entropy backward",
     cross_entropy_backward,
     2,
     0,
     {16, 14},
     {21.5, 20.5, 15},
     0,
     ARRAYS,
     3},
    {"head + loss", head_loss, 0, 0, {17, 15}, {17, 15, 15}, 0, HEAD_LOSS, 3},
    {"head + loss backward", head_loss_backward, 0, 0, {16, 14}, {16, 14, 14}, 0, HEAD_LOSS, 3},
    /* Products of the causal half: two, and five. */
    {"attention", attention, 0, 0, {2, 2}, {2, 2, 2}, 0, ATTENTION, 3},
    {"attention backward", attention_backward, 0, 0, {5, 5}, {5, 5, 5}, 0, ATTENTION, 3},
    {"adamw", adamw, 0, 7, {15, 15}, {15, 15, 15}, 1, ARRAYS, 1},
    {"convert f32 to bf16", to_bf16, 0, 1.5, {9, 9}, {9, 9, 9}, 1, ARRAYS, 2},
    {"convert bf16 to f32", to_f32, 0, 1.5, {2, 2}, {2, 2, 2}, 1, ARRAYS, 2},
    {"sum of ranks' slices", sum_tree, 0, 1, {1, 1}, {5, 5, 5}, 1, SUM_TREE, 3},
    /* In f64: two halves, each widened, squared and added. */
    {"sum of squares", sum_squares, 0, 1, {6, 6}, {6, 6, 6}, 1, ARRAYS, 1},
};

typedef struct floors {
    double bytes, instructions;
    bool fma; /* which rate: multiply-adds or the mix */
} floors;

static floors floors_of(const kernel *k, const env *e, int lanes)
{
    bool bf = e->t == FSDP_BF16;
    int wide = fsdp__cpu_isa() >= FSDP__ISA_AVX512,
        rounds = fsdp__cpu_isa() >= FSDP__ISA_AVX512_BF16;
    double n = (double)e->n, per = bf ? k->bf16[wide + rounds] : k->f32[wide];
    double w = (double)fsdp_dtype_size(e->t);
    floors f = {n * (k->of_t * w + k->of_f32 * 4.0), n / lanes * per, false};
    if (k->kind == ATTENTION) {
        f.bytes = 0;
        f.instructions = per * BATCH * HEADS * HEAD * (SEQ * (SEQ + 1) / 2.0) / lanes;
        f.fma = true;
    } else if (k->kind == HEAD_LOSS) {
        f.instructions = (double)HEAD_ROWS * WORDS / lanes * per;
    } else if (k->kind == SUM_TREE) {
        f.bytes = n * (e->ranks * w + 4.0);
        f.instructions =
            n / lanes * (bf ? 4.0 * ((e->ranks + 1) / 2) + e->ranks - 1 : e->ranks - 1);
    }
    return f;
}

/* ---- the run ------------------------------------------------------------------------- */

typedef struct gemm_alone {
    env *e;
    bool backward;
} gemm_alone;

/* The products that head and loss are made of, each over all of the vocabulary. */
static fsdp_status head_products(void *arg)
{
    const gemm_alone *u = arg;
    env *e = u->e;
    FSDP_TRY(fsdp__k_gemm(0, 1, HEAD_ROWS, WORDS, C, e->b[0], C, e->b[1], C, e->t, e->b[2], WORDS,
                          FSDP_F32, 0));
    if (!u->backward) return FSDP_OK;
    FSDP_TRY(fsdp__k_gemm(0, 0, HEAD_ROWS, C, WORDS, e->b[2], WORDS, e->b[1], C, e->t, e->b[4], C,
                          e->t, 0));
    return fsdp__k_gemm(1, 0, WORDS, C, HEAD_ROWS, e->b[2], WORDS, e->b[0], C, e->t, e->b[4], C,
                        FSDP_F32, 0);
}

/* The kernel, copying, issuing and (head + loss) the products alone, in turn. */
static fsdp_status measure(const kernel *k, env *e, int repeats, fsdp__bench_copy *copy)
{
    e->n = BYTES / (k->with_f32 ? 4 : (int64_t)fsdp_dtype_size(e->t));
    fsdp__bench_issue issue = fsdp__bench_issue_init();
    floors f = floors_of(k, e, issue.lanes);
    gemm_alone products = {e, k->run == head_loss_backward};
    fsdp__bench_work w[4] = {
        {k->run, e, {0, 0}},
        {fsdp__bench_copy_run, copy, {0, 0}},
        {f.fma ? fsdp__bench_issue_fma : fsdp__bench_issue_mix, &issue, {0, 0}},
        {head_products, &products, {0, 0}}};
    FSDP_TRY(fsdp__bench_turns(repeats, k->kind == HEAD_LOSS ? 4 : 3, w));
    for (int i = 0; i < 4; i++) {
        FSDP_TRY(fsdp__bench_max(&w[i].time.best));
        FSDP_TRY(fsdp__bench_max(&w[i].time.median));
    }
    if (fsdp_rank() != 0) return FSDP_OK;
    double floor[2], bytes[2], issued[2];
    for (int i = 0; i < 2; i++) {
        bytes[i] = f.bytes / (2.0 * (double)copy->bytes) * (i ? w[1].time.best : w[1].time.median);
        issued[i] = f.instructions / issue.count * (i ? w[2].time.best : w[2].time.median);
        floor[i] = bytes[i] > issued[i] ? bytes[i] : issued[i];
        if (k->kind == HEAD_LOSS) floor[i] += i ? w[3].time.best : w[3].time.median;
    }
    const char *bound = k->kind == HEAD_LOSS   ? "products"
                        : bytes[0] > issued[0] ? "bytes"
                                               : "issue";
    printf("%-23s %-5s %10.3f %10.3f %8.2f %10.3f %8.2f  %s\n", k->name, fsdp_dtype_name(e->t),
           1e3 * w[0].time.median, 1e3 * floor[0], floor[0] / w[0].time.median,
           1e3 * w[0].time.best, floor[1] / w[0].time.best, bound);
    fflush(stdout);
    return FSDP_OK;
}

/* Values around zero, no two arrays alike. */
static void fill(env *e)
{
    uint64_t key = fsdp__rng_key(7);
    for (int b = 0; b < BUFFERS; b++)
        for (int64_t i = 0; i < BYTES / (int64_t)fsdp_dtype_size(e->t); i += 4096) {
            float block[4096];
            fsdp__rng_uniform_fill(key, (uint64_t)(i + b), block, 4096);
            for (int j = 0; j < 4096; j++)
                block[j] = b == 3 ? block[j] + 0.5f : 4.0f * block[j] - 2.0f;
            fsdp__convert(e->b[b] + i * (int64_t)fsdp_dtype_size(e->t), e->t, block, FSDP_F32,
                          4096);
        }
    for (int64_t i = 0; i < BYTES / 2 / C; i++) {
        e->ids[i] = (int64_t)(fsdp__rng_u32(key, (uint64_t)i) % VOCAB);
        e->targets[i] = e->ids[i] % WORDS;
    }
    for (int64_t i = 0; i < SEQ * HEAD / 2; i++) {
        e->cosine[i] = (float)cos((double)i);
        e->sine[i] = (float)sin((double)i);
    }
}

static fsdp_status start(env *e)
{
    for (int b = 0; b < BUFFERS; b++) {
        e->b[b] = aligned_alloc(4096, BYTES); /* as tensors are: to a line, and some to a page */
        if (!e->b[b]) return fsdp__fail_memory("an array", BYTES);
        memset(e->b[b], 0, BYTES);
    }
    e->ids = fsdp__calloc(BYTES / 2 / C, sizeof *e->ids, "ids");
    e->targets = fsdp__calloc(BYTES / 2 / C, sizeof *e->targets, "targets");
    e->cosine = fsdp__calloc(SEQ * HEAD / 2, sizeof *e->cosine, "cosines");
    e->sine = fsdp__calloc(SEQ * HEAD / 2, sizeof *e->sine, "sines");
    if (!e->ids || !e->targets || !e->cosine || !e->sine) return fsdp_error();
    e->ranks = fsdp_world_size() < 2 ? 2 : fsdp_world_size();
    if (e->ranks > BUFFERS - 1) e->ranks = BUFFERS - 1;
    return FSDP_OK;
}

static void stop(env *e)
{
    for (int b = 0; b < BUFFERS; b++)
        free(e->b[b]);
    free(e->ids);
    free(e->targets);
    free(e->cosine);
    free(e->sine);
}

static fsdp_status run(const char *dtype, const char *only, int repeats)
{
    env e = {0};
    fsdp__bench_copy copy = {0};
    fsdp_status s = start(&e);
    if (s == FSDP_OK) s = fsdp__bench_copy_init(&copy, BYTES);
    if (s == FSDP_OK && fsdp_rank() == 0) {
        printf("machine: %s, %s, %d rank(s) of %d thread(s); times in ms of %d turns\n",
               fsdp__cpu_model(), fsdp__cpu_isa_name(fsdp__cpu_isa()), fsdp_world_size(),
               fsdp_threads(), repeats);
        printf("%-23s %-5s %10s %10s %8s %10s %8s  %s\n", "kernel", "dtype", "median", "floor",
               "reached", "best", "reached", "bound by");
    }
    for (int bf = 0; bf < 2 && s == FSDP_OK; bf++) {
        e.t = bf ? FSDP_BF16 : FSDP_F32;
        if (strcmp(dtype, "both") && strcmp(dtype, fsdp_dtype_name(e.t))) continue;
        for (size_t i = 0; i < sizeof kernels / sizeof kernels[0] && s == FSDP_OK; i++) {
            if (!(kernels[i].dtypes & (bf ? 2 : 1)) || !strstr(kernels[i].name, only)) continue;
            fill(&e);
            s = measure(&kernels[i], &e, repeats, &copy);
        }
    }
    fsdp__bench_copy_free(&copy);
    stop(&e);
    return s;
}

int fsdp__bench_kernels(int argc, char **argv)
{
    const char *dtype = fsdp__bench_option(argc, argv, "dtype", "both");
    int repeats = atoi(fsdp__bench_option(argc, argv, "repeats", "9"));
    if (strcmp(dtype, "f32") && strcmp(dtype, "bf16") && strcmp(dtype, "both"))
        return fsdp__cli_usage("bench", "--dtype %s; expected f32 or bf16", dtype);
    if (repeats < 1) return fsdp__cli_usage("bench", "--repeats is 1 or more");
    if (fsdp_init(NULL, NULL) == FSDP_OK)
        run(dtype, fsdp__bench_option(argc, argv, "only", ""), repeats);
    int code = fsdp__cli_report("bench");
    fsdp_finalize();
    return code;
}
