/*
 * kernel_gemm.c - matrix products: the cut into panels, the batch, the choice
 * of the way, the plain judge, and what biases need.
 *
 * A product is cut along the longer of M and N into two panels by its shape,
 * and each panel is computed by one thread; so one thread or many give the
 * same bits. A batch is cut by its matrices instead.
 */
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/thread.h"
#include "tensor/kernel_gemm_internal.h"
#include "tensor/kernels.h"

enum {
    PANEL_ROUND = 16,      /* a panel's edge is a multiple of it */
    PANEL_MIN = 64,        /* shorter sides are not cut */
    SMALL_WORK = 64 * 1024 /* products too few to wake a thread for */
};

/* ---- plain ------------------------------------------------------------------ */

#define PLAIN_SAME(x) (x)
#define PLAIN_NAME plain_f32
#define PLAIN_T float
#define PLAIN_SUM float
#define PLAIN_LOAD PLAIN_SAME
#define PLAIN_ROUND PLAIN_SAME
#include "tensor/kernel_gemm_plain.inc"

#define PLAIN_NAME plain_f64
#define PLAIN_T double
#define PLAIN_SUM double
#define PLAIN_LOAD PLAIN_SAME
#define PLAIN_ROUND PLAIN_SAME
#include "tensor/kernel_gemm_plain.inc"

#define PLAIN_NAME plain_f16
#define PLAIN_T uint16_t
#define PLAIN_SUM float
#define PLAIN_LOAD fsdp__f16_to_f32
#define PLAIN_ROUND fsdp__f32_to_f16
#include "tensor/kernel_gemm_plain.inc"

#define PLAIN_NAME plain_bf16
#define PLAIN_T uint16_t
#define PLAIN_SUM float
#define PLAIN_LOAD fsdp__bf16_to_f32
#define PLAIN_ROUND fsdp__f32_to_bf16
#include "tensor/kernel_gemm_plain.inc"

void fsdp__k_gemm_plain(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, const void *a,
                        int64_t lda, const void *b, int64_t ldb, fsdp_dtype t, void *c, int64_t ldc,
                        fsdp_dtype tc, int add)
{
    fsdp__product p = {trans_a, trans_b, add, M, N, K, a, b, c, lda, ldb, ldc, t, t, tc};
    switch (t) {
    case FSDP_F32:
        plain_f32(&p, 0);
        break;
    case FSDP_F64:
        plain_f64(&p, 0);
        break;
    case FSDP_F16:
        plain_f16(&p, tc == FSDP_F32);
        break;
    default:
        plain_bf16(&p, tc == FSDP_F32);
        break;
    }
}

/* ---- panels ------------------------------------------------------------------- */

static const char *offset(const void *x, fsdp_dtype t, int64_t elements)
{
    return (const char *)x + elements * (int64_t)fsdp_dtype_size(t);
}

/* Panel `part` of two; the whole product when the longer side is short. */
static fsdp__product panel(const fsdp__product *p, int64_t parts, int64_t part)
{
    fsdp__product q = *p;
    if (parts == 1) return q;
    bool rows = p->M >= p->N;
    int64_t side = rows ? p->M : p->N;
    int64_t half = (side / 2 + PANEL_ROUND - 1) / PANEL_ROUND * PANEL_ROUND;
    int64_t first = part ? half : 0, n = part ? side - half : half;
    if (rows) {
        q.M = n;
        q.a = offset(p->a, p->ta, p->trans_a ? first : first * p->lda);
        q.c = (void *)(uintptr_t)offset(p->c, p->tc, first * p->ldc);
    } else {
        q.N = n;
        q.b = offset(p->b, p->tb, p->trans_b ? first * p->ldb : first);
        q.c = (void *)(uintptr_t)offset(p->c, p->tc, first);
    }
    return q;
}

/* One product on this thread. False: no memory for scratch. */
static bool multiply(const fsdp__product *p)
{
    if (fsdp__product_dnnl_wanted(p) && fsdp__product_dnnl(p)) return true;
    return fsdp__product_tile(p);
}

/* An empty sum: zeros, or nothing to add. */
static void store_zeros(const fsdp__product *p)
{
    size_t size = fsdp_dtype_size(p->tc);
    if (p->add) return;
    for (int64_t i = 0; i < p->M; i++)
        memset((char *)p->c + (size_t)(i * p->ldc) * size, 0, (size_t)p->N * size);
}

typedef struct job {
    fsdp__product p;
    int64_t parts;                        /* panels of one product */
    int64_t stride_a, stride_b, stride_c; /* between the products of a batch */
    int failed[2];                        /* by panel, or by half of the batch */
    int64_t batch;
} job;

static void job_panel(void *arg, int64_t part)
{
    job *j = arg;
    fsdp__product q = panel(&j->p, j->parts, part);
    if (!multiply(&q)) j->failed[part] = 1;
}

static void job_half_batch(void *arg, int64_t part)
{
    job *j = arg;
    int64_t half = (j->batch + 1) / 2;
    int64_t first = part ? half : 0, end = part ? j->batch : half;
    for (int64_t i = first; i < end && !j->failed[part]; i++) {
        fsdp__product q = j->p;
        q.a = offset(j->p.a, q.ta, i * j->stride_a);
        q.b = offset(j->p.b, q.tb, i * j->stride_b);
        q.c = (void *)(uintptr_t)offset(j->p.c, q.tc, i * j->stride_c);
        if (!multiply(&q)) j->failed[part] = 1;
    }
}

/* Both parts, on one thread when there is little to do. */
static fsdp_status run(job *j, int64_t parts, void (*fn)(void *, int64_t), int64_t batch)
{
    const fsdp__product *p = &j->p;
    if ((double)p->M * (double)p->N * (double)p->K * (double)batch < SMALL_WORK)
        for (int64_t i = 0; i < parts; i++)
            fn(j, i);
    else
        fsdp__parallel(parts, fn, j);
    if (j->failed[0] || j->failed[1])
        return fsdp__fail_memory("scratch of a matrix product", (size_t)4 << 20);
    return FSDP_OK;
}

fsdp_status fsdp__product_run(const fsdp__product *p)
{
    job j = {.p = *p};
    if (p->M == 0 || p->N == 0) return FSDP_OK;
    if (p->K == 0) {
        store_zeros(p);
        return FSDP_OK;
    }
    j.parts = (p->M > p->N ? p->M : p->N) < PANEL_MIN ? 1 : 2;
    return run(&j, j.parts, job_panel, 1);
}

fsdp_status fsdp__k_gemm(int trans_a, int trans_b, int64_t M, int64_t N, int64_t K, const void *a,
                         int64_t lda, const void *b, int64_t ldb, fsdp_dtype t, void *c,
                         int64_t ldc, fsdp_dtype tc, int add)
{
    fsdp__product p = {trans_a, trans_b, add, M, N, K, a, b, c, lda, ldb, ldc, t, t, tc};
    return fsdp__product_run(&p);
}

fsdp_status fsdp__k_gemm_batched(int64_t batch, int trans_a, int trans_b, int64_t M, int64_t N,
                                 int64_t K, const void *a, int64_t lda, int64_t stride_a,
                                 const void *b, int64_t ldb, int64_t stride_b, fsdp_dtype t,
                                 void *c, int64_t ldc, int64_t stride_c, fsdp_dtype tc, int add)
{
    if (batch == 1)
        return fsdp__k_gemm(trans_a, trans_b, M, N, K, a, lda, b, ldb, t, c, ldc, tc, add);
    job j = {.p = {trans_a, trans_b, add, M, N, K, a, b, c, lda, ldb, ldc, t, t, tc},
             .parts = 1,
             .stride_a = stride_a,
             .stride_b = stride_b,
             .stride_c = stride_c,
             .batch = batch};
    if (M == 0 || N == 0 || batch == 0) return FSDP_OK;
    if (K > 0) return run(&j, 2, job_half_batch, batch);
    for (int64_t i = 0; i < batch; i++) {
        fsdp__product q = j.p;
        q.c = (void *)(uintptr_t)offset(c, tc, i * stride_c);
        store_zeros(&q);
    }
    return FSDP_OK;
}

/* ---- biases --------------------------------------------------------------------- */

enum {
    BIAS_COLUMNS = 256, /* columns of one part */
    BIAS_ROWS = 64      /* rows summed before they join the total */
};

typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double vec4d __attribute__((vector_size(32), aligned(8), may_alias));

typedef struct bias_job {
    const char *x;
    char *out;
    fsdp_dtype t, dt;
    int64_t R, C;
    int add;
} bias_job;

static void add_row_f32(float *sum, const float *x, int64_t n)
{
    int64_t c = 0;
    for (; c + 8 <= n; c += 8)
        *(vec8 *)(sum + c) += *(const vec8 *)(x + c);
    for (; c < n; c++)
        sum[c] += x[c];
}

static void add_row_f64(double *sum, const double *x, int64_t n)
{
    int64_t c = 0;
    for (; c + 4 <= n; c += 4)
        *(vec4d *)(sum + c) += *(const vec4d *)(x + c);
    for (; c < n; c++)
        sum[c] += x[c];
}

/* total (n) of 256 columns in f32: by blocks of rows, which keeps the rounding
 * of a long sum small. */
static void sum_columns_f32(const bias_job *j, int64_t c0, int64_t n, float *total)
{
    float block[BIAS_COLUMNS], wide[BIAS_COLUMNS];
    for (int64_t r0 = 0; r0 < j->R; r0 += BIAS_ROWS) {
        memset(block, 0, sizeof block);
        for (int64_t r = r0; r < j->R && r < r0 + BIAS_ROWS; r++) {
            const char *x = offset(j->x, j->t, r * j->C + c0);
            if (j->t != FSDP_F32) {
                fsdp__convert(wide, FSDP_F32, x, j->t, (size_t)n);
                x = (const char *)wide;
            }
            add_row_f32(block, (const float *)(const void *)x, n);
        }
        add_row_f32(total, block, n);
    }
}

static void column_sum_part(void *arg, int64_t part)
{
    const bias_job *j = arg;
    int64_t c0 = part * BIAS_COLUMNS, n = j->C - c0 < BIAS_COLUMNS ? j->C - c0 : BIAS_COLUMNS;
    char *out = j->out + c0 * (int64_t)fsdp_dtype_size(j->dt);
    /* An f64 output of narrower rows is added to in f64 as well. */
    double total64[BIAS_COLUMNS] = {0}, old[BIAS_COLUMNS];
    if (j->t == FSDP_F64) {
        for (int64_t r = 0; r < j->R; r++)
            add_row_f64(total64, (const double *)(const void *)j->x + r * j->C + c0, n);
    } else {
        float total[BIAS_COLUMNS] = {0};
        sum_columns_f32(j, c0, n, total);
        if (j->dt != FSDP_F64) {
            float old32[BIAS_COLUMNS];
            if (j->add) {
                fsdp__convert(old32, FSDP_F32, out, j->dt, (size_t)n);
                add_row_f32(total, old32, n);
            }
            fsdp__convert(out, j->dt, total, FSDP_F32, (size_t)n);
            return;
        }
        for (int64_t c = 0; c < n; c++)
            total64[c] = total[c];
    }
    if (j->add) {
        fsdp__convert(old, FSDP_F64, out, j->dt, (size_t)n);
        add_row_f64(total64, old, n);
    }
    fsdp__convert(out, j->dt, total64, FSDP_F64, (size_t)n);
}

void fsdp__k_column_sum(const void *x, fsdp_dtype t, int64_t R, int64_t C, void *out, fsdp_dtype dt,
                        int add)
{
    bias_job j = {.x = x, .out = out, .t = t, .dt = dt, .R = R, .C = C, .add = add};
    int64_t parts = (C + BIAS_COLUMNS - 1) / BIAS_COLUMNS;
    if (R * C < SMALL_WORK)
        for (int64_t i = 0; i < parts; i++)
            column_sum_part(&j, i);
    else
        fsdp__parallel(parts, column_sum_part, &j);
}

static void add_bias_part(void *arg, int64_t part)
{
    const bias_job *j = arg;
    int64_t end = (part + 1) * BIAS_ROWS < j->R ? (part + 1) * BIAS_ROWS : j->R;
    float y32[BIAS_COLUMNS], b32[BIAS_COLUMNS];
    for (int64_t c0 = 0; c0 < j->C; c0 += BIAS_COLUMNS) {
        int64_t n = j->C - c0 < BIAS_COLUMNS ? j->C - c0 : BIAS_COLUMNS;
        const char *b = offset(j->x, j->t, c0);
        if (j->t != FSDP_F64) fsdp__convert(b32, FSDP_F32, b, j->t, (size_t)n);
        for (int64_t r = part * BIAS_ROWS; r < end; r++) {
            char *y = j->out + (r * j->C + c0) * (int64_t)fsdp_dtype_size(j->t);
            if (j->t == FSDP_F64) {
                add_row_f64((double *)(void *)y, (const double *)(const void *)b, n);
            } else if (j->t == FSDP_F32) {
                add_row_f32((float *)(void *)y, b32, n);
            } else {
                fsdp__convert(y32, FSDP_F32, y, j->t, (size_t)n);
                add_row_f32(y32, b32, n);
                fsdp__convert(y, j->t, y32, FSDP_F32, (size_t)n);
            }
        }
    }
}

void fsdp__k_add_bias(void *y, const void *bias, fsdp_dtype t, int64_t R, int64_t C)
{
    bias_job j = {.x = bias, .out = y, .t = t, .R = R, .C = C};
    int64_t parts = (R + BIAS_ROWS - 1) / BIAS_ROWS;
    if (R * C < SMALL_WORK)
        for (int64_t i = 0; i < parts; i++)
            add_bias_part(&j, i);
    else
        fsdp__parallel(parts, add_bias_part, &j);
}
