/*
 * kernel_loss.c - cross entropy by rows, and head and cross entropy in one.
 *
 * Letters: R rows, C features, V vocabulary.
 *
 * The head's logits exist one tile of rows and of the vocabulary at a time (at
 * most 4 MiB in f32, 8 in f64): the forward keeps each row's running maximum,
 * sum and target logit across the tiles; the backward computes a tile again,
 * turns it in place into scale * (softmax - onehot), and multiplies it into dx
 * and dw. A tile is wide enough in both directions for its three products.
 *
 * Invariants: tiles are cut by the shape alone and visited in one fixed order;
 * rows whose target is ignored have loss and gradient exactly zero; the loss is
 * summed by row in fp64. For f32 and narrower all is f32 between the products.
 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/thread.h"
#include "tensor/kernel_gemm_internal.h"
#include "tensor/kernel_scratch.h"
#include "tensor/kernel_set.h"

enum {
    CHUNK = 1024,        /* elements of f16 widened at once */
    ROWS_PART = 8,       /* rows of one part of a parallel loop */
    HEAD_ROWS = 512,     /* rows of a tile of logits, unless V is small */
    HEAD_COLUMNS = 2048, /* its columns */
    HEAD_TILE = 1 << 20  /* its elements */
};

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static char *offset(const void *x, fsdp_dtype t, int64_t elements)
{
    return (char *)(uintptr_t)x + elements * (int64_t)fsdp_dtype_size(t);
}

/* Targets must be checked before a kernel reads at them. */
static fsdp_status check_targets(const char *what, const int64_t *target, int64_t ignore, int64_t R,
                                 int64_t V)
{
    for (int64_t r = 0; r < R; r++)
        if (target[r] != ignore && (target[r] < 0 || target[r] >= V))
            return fsdp__fail(
                FSDP_INVALID_DATA,
                "%s: target of row %lld is %lld; expected 0 .. %lld (the vocabulary's "
                "size less one), or %lld for a row to leave out",
                what, (long long)r, (long long)target[r], (long long)(V - 1), (long long)ignore);
    return FSDP_OK;
}

/* ---- pieces of one row, in the row's dtype ------------------------------------- */

/* f16 has no fast loops of its own: it is widened by the chunk. */
static const fsdp__kernel_set *loops_for(fsdp_dtype t, fsdp_dtype dt)
{
    return fsdp__kernel_set_for(t == FSDP_F16 ? FSDP_F32 : t, dt == FSDP_F16 ? FSDP_F32 : dt);
}

/* Takes n elements of x into *s. */
static void row_sum(const void *x, fsdp_dtype t, int64_t n, fsdp__row_sum *s)
{
    const fsdp__kernel_set *loops = loops_for(t, t);
    float wide[CHUNK];
    if (t != FSDP_F16) {
        loops->loss_sum(n, x, t, s);
        return;
    }
    for (int64_t i = 0; i < n; i += CHUNK) {
        int64_t m = min64(CHUNK, n - i);
        fsdp__convert(wide, FSDP_F32, offset(x, t, i), t, (size_t)m);
        loops->loss_sum(m, wide, FSDP_F32, s);
    }
}

static double load_one(const void *x, fsdp_dtype t, int64_t i)
{
    switch (t) {
    case FSDP_F64:
        return ((const double *)x)[i];
    case FSDP_F32:
        return (double)((const float *)x)[i];
    case FSDP_F16:
        return (double)fsdp__f16_to_f32(((const uint16_t *)x)[i]);
    default:
        return (double)fsdp__bf16_to_f32(((const uint16_t *)x)[i]);
    }
}

/* n f32 numbers into, or added to, y of dtype dt. */
static void store_f32(const float *g, int64_t n, void *y, fsdp_dtype dt, int add)
{
    if (add)
        fsdp__kernel_set_for(FSDP_F32, dt)->copy(n, g, FSDP_F32, y, dt, 1);
    else
        fsdp__convert(y, dt, g, FSDP_F32, (size_t)n);
}

/* y (+)= scale * (softmax - onehot) for n elements x of a row whose target is
 * at `target` among them (or outside). */
static void row_gradient(const void *x, fsdp_dtype t, int64_t n, double lse, double scale,
                         int64_t target, void *y, fsdp_dtype dt, int add)
{
    const fsdp__kernel_set *loops = loops_for(t, dt);
    float wide[CHUNK];
    if (t != FSDP_F16 && dt != FSDP_F16) {
        loops->loss_gradient(n, x, t, lse, scale, target, y, dt, add);
        return;
    }
    for (int64_t i = 0; i < n; i += CHUNK) {
        int64_t m = min64(CHUNK, n - i);
        fsdp__convert(wide, FSDP_F32, offset(x, t, i), t, (size_t)m);
        loops->loss_gradient(m, wide, FSDP_F32, lse, scale, target - i, wide, FSDP_F32, 0);
        store_f32(wide, m, offset(y, dt, i), dt, add);
    }
}

static fsdp_dtype stat_type(fsdp_dtype t)
{
    return t == FSDP_F64 ? FSDP_F64 : FSDP_F32;
}

static void stat_set(void *stat, fsdp_dtype t, int64_t r, double lse)
{
    if (t == FSDP_F64)
        ((double *)stat)[r] = lse;
    else
        ((float *)stat)[r] = (float)lse;
}

/* ---- cross entropy ---------------------------------------------------------------- */

typedef struct rows_job {
    const void *x;
    fsdp_dtype t, dt;
    int64_t R, V, ignore;
    const int64_t *target;
    void *stat, *dx;
    double *loss; /* (R) */
    double scale;
    int add;
} rows_job;

static void cross_entropy_part(void *arg, int64_t part)
{
    const rows_job *j = arg;
    for (int64_t r = part * ROWS_PART; r < min64(j->R, (part + 1) * ROWS_PART); r++) {
        j->loss[r] = 0;
        stat_set(j->stat, j->t, r, 0);
        if (j->target[r] == j->ignore) continue;
        fsdp__row_sum s = {-INFINITY, 0};
        const void *x = offset(j->x, j->t, r * j->V);
        row_sum(x, j->t, j->V, &s);
        double lse = s.max + log(s.sum);
        stat_set(j->stat, j->t, r, lse);
        j->loss[r] = lse - load_one(x, j->t, j->target[r]);
    }
}

/* The losses of the rows, in their order. */
static void sum_losses(const double *rows, const int64_t *target, int64_t ignore, int64_t R,
                       double *loss, int64_t *count)
{
    *loss = 0;
    *count = 0;
    for (int64_t r = 0; r < R; r++) {
        if (target[r] == ignore) continue;
        *loss += rows[r];
        ++*count;
    }
}

static int64_t row_parts(int64_t R)
{
    return (R + ROWS_PART - 1) / ROWS_PART;
}

fsdp_status fsdp__k_cross_entropy(const void *x, fsdp_dtype t, int64_t R, int64_t V,
                                  const int64_t *target, int64_t ignore, void *stat, double *loss,
                                  int64_t *count)
{
    FSDP_TRY(check_targets("cross entropy", target, ignore, R, V));
    rows_job j = {.x = x, .t = t, .R = R, .V = V, .ignore = ignore, .target = target, .stat = stat};
    j.loss = fsdp__scratch(FSDP__SCRATCH_LOSS, (size_t)R * sizeof(double));
    if (!j.loss) return fsdp__fail_memory("losses of rows", (size_t)R * sizeof(double));
    fsdp__parallel(row_parts(R), cross_entropy_part, &j);
    sum_losses(j.loss, target, ignore, R, loss, count);
    return FSDP_OK;
}

static void cross_entropy_backward_part(void *arg, int64_t part)
{
    const rows_job *j = arg;
    for (int64_t r = part * ROWS_PART; r < min64(j->R, (part + 1) * ROWS_PART); r++) {
        char *dx = offset(j->dx, j->dt, r * j->V);
        if (j->target[r] != j->ignore)
            row_gradient(offset(j->x, j->t, r * j->V), j->t, j->V,
                         load_one(j->stat, stat_type(j->t), r), j->scale, j->target[r], dx, j->dt,
                         j->add);
        else if (!j->add)
            memset(dx, 0, (size_t)j->V * fsdp_dtype_size(j->dt));
    }
}

void fsdp__k_cross_entropy_backward(const void *x, fsdp_dtype t, int64_t R, int64_t V,
                                    const int64_t *target, int64_t ignore, const void *stat,
                                    double scale, void *dx, fsdp_dtype dt, int add)
{
    rows_job j = {.x = x,
                  .t = t,
                  .dt = dt,
                  .R = R,
                  .V = V,
                  .ignore = ignore,
                  .target = target,
                  .stat = (void *)(uintptr_t)stat,
                  .dx = dx,
                  .scale = scale,
                  .add = add};
    fsdp__parallel(row_parts(R), cross_entropy_backward_part, &j);
}

/* ---- head and loss: one tile of logits ----------------------------------------------- */

int64_t fsdp__k_head_slice(int64_t R, int64_t V)
{
    int64_t columns = V < HEAD_COLUMNS ? (V > 0 ? V : 1) : HEAD_COLUMNS;
    return min64(R, HEAD_TILE / columns);
}

typedef struct head_job {
    const void *x, *w, *b;
    fsdp_dtype t, st; /* of the operands; of logits and sums (f32 or f64) */
    int64_t R, C, V, ignore;
    const int64_t *target;
    void *stat;
    double scale;
    int64_t tile_rows, tile_columns;
    /* The tile at hand: rows r0.., columns v0.., contiguous. */
    char *logits;
    uint16_t *narrow; /* the gradient in bf16, where products take it so */
    int64_t r0, rows, v0, columns;
    /* Forward, by row of the tile. */
    fsdp__row_sum *sums;
    double *picked; /* the target's logit */
} head_job;

static void head_sizes(head_job *j)
{
    j->st = stat_type(j->t);
    j->tile_rows = fsdp__k_head_slice(j->R, j->V);
    j->tile_columns = min64(j->V, HEAD_COLUMNS);
}

/* Moves to the tile at (r0, v0) and computes its logits without the bias. */
static fsdp_status head_logits(head_job *j, int64_t r0, int64_t v0)
{
    j->r0 = r0, j->rows = min64(j->tile_rows, j->R - r0);
    j->v0 = v0, j->columns = min64(j->tile_columns, j->V - v0);
    return fsdp__k_gemm(0, 1, j->rows, j->columns, j->C, offset(j->x, j->t, r0 * j->C), j->C,
                        offset(j->w, j->t, v0 * j->C), j->C, j->t, j->logits, j->columns, j->st, 0);
}

/* Row i of the tile, with the bias added. */
static char *head_row(const head_job *j, int64_t i)
{
    char *row = offset(j->logits, j->st, i * j->columns);
    if (j->b)
        fsdp__kernel_set_for(j->t, j->st)
            ->copy(j->columns, offset(j->b, j->t, j->v0), j->t, row, j->st, 1);
    return row;
}

static void head_forward_part(void *arg, int64_t part)
{
    const head_job *j = arg;
    for (int64_t i = part * ROWS_PART; i < min64(j->rows, (part + 1) * ROWS_PART); i++) {
        int64_t at = j->target[j->r0 + i];
        if (at == j->ignore) continue;
        char *row = head_row(j, i);
        row_sum(row, j->st, j->columns, &j->sums[i]);
        at -= j->v0;
        if (at >= 0 && at < j->columns) j->picked[i] = load_one(row, j->st, at);
    }
}

static void head_backward_part(void *arg, int64_t part)
{
    const head_job *j = arg;
    for (int64_t i = part * ROWS_PART; i < min64(j->rows, (part + 1) * ROWS_PART); i++) {
        char *row = offset(j->logits, j->st, i * j->columns);
        int64_t r = j->r0 + i;
        if (j->target[r] == j->ignore)
            memset(row, 0, (size_t)j->columns * fsdp_dtype_size(j->st));
        else
            row_gradient(head_row(j, i), j->st, j->columns, load_one(j->stat, j->st, r), j->scale,
                         j->target[r] - j->v0, row, j->st, 0);
        if (j->narrow)
            fsdp__convert(j->narrow + i * j->columns, FSDP_BF16, row, FSDP_F32, (size_t)j->columns);
    }
}

fsdp_status fsdp__k_head_loss(const void *x, const void *w, const void *b, fsdp_dtype t, int64_t R,
                              int64_t C, int64_t V, const int64_t *target, int64_t ignore,
                              void *stat, double *loss, int64_t *count)
{
    head_job j = {.x = x, .w = w, .b = b, .t = t, .R = R, .C = C, .V = V};
    FSDP_TRY(check_targets("head and loss", target, ignore, R, V));
    j.target = target, j.ignore = ignore, j.stat = stat;
    head_sizes(&j);
    size_t tile = (size_t)(j.tile_rows * j.tile_columns) * fsdp_dtype_size(j.st);
    size_t by_row = (size_t)j.tile_rows * (sizeof *j.sums + sizeof *j.picked);
    tile = (tile + 63) / 64 * 64;
    size_t bytes = tile + by_row + (size_t)R * sizeof(double);
    j.logits = fsdp__scratch(FSDP__SCRATCH_LOSS, bytes);
    if (!j.logits) return fsdp__fail_memory("a tile of logits", bytes);
    j.sums = (void *)(j.logits + tile);
    j.picked = (double *)(void *)(j.sums + j.tile_rows);
    double *losses = j.picked + j.tile_rows;

    for (int64_t r0 = 0; r0 < R; r0 += j.tile_rows) {
        for (int64_t i = 0; i < j.tile_rows; i++)
            j.sums[i] = (fsdp__row_sum){-INFINITY, 0};
        for (int64_t v0 = 0; v0 < V; v0 += j.tile_columns) {
            FSDP_TRY(head_logits(&j, r0, v0));
            fsdp__parallel(row_parts(j.rows), head_forward_part, &j);
        }
        for (int64_t i = 0; i < min64(j.tile_rows, R - r0); i++) {
            bool counts = target[r0 + i] != ignore;
            double lse = counts ? j.sums[i].max + log(j.sums[i].sum) : 0;
            stat_set(stat, t, r0 + i, lse);
            losses[r0 + i] = counts ? lse - j.picked[i] : 0;
        }
    }
    sum_losses(losses, target, ignore, R, loss, count);
    return FSDP_OK;
}

/* ---- head and loss: backward ------------------------------------------------------------ */

/* Where one gradient (rows,C) is summed over the tiles: in place when its dtype
 * is wide enough, else in f32 until its rows are complete. */
typedef struct sink {
    char *out; /* NULL: not wanted */
    fsdp_dtype dt;
    int add;
    float *sums;  /* NULL: in place */
    int64_t base; /* first row that sums holds */
} sink;

/* The product whose C is n rows of the sink from `row` on. */
static void sink_target(const head_job *j, const sink *s, int64_t row, int first, fsdp__product *p)
{
    p->c = s->sums ? (char *)(s->sums + (row - s->base) * j->C) : offset(s->out, s->dt, row * j->C);
    p->tc = j->st;
    p->add = !first || (s->add && !s->sums);
    p->ldc = j->C;
}

static void sink_flush(const head_job *j, const sink *s, int64_t row, int64_t n)
{
    if (!s->sums) return;
    for (int64_t i = row; i < row + n; i++)
        store_f32(s->sums + (i - s->base) * j->C, j->C, offset(s->out, s->dt, i * j->C), s->dt,
                  s->add);
}

static bool sink_in_place(const head_job *j, const sink *s)
{
    return !s->out || s->dt == j->st;
}

/* Multiplies the tile's gradient into dx and dw. first_x, first_w: nothing has
 * been summed there yet. */
static fsdp_status head_products(const head_job *j, const sink *dx, const sink *dw, int first_x,
                                 int first_w)
{
    fsdp__product p = {.a = j->narrow ? (const void *)j->narrow : j->logits,
                       .ta = j->narrow ? FSDP_BF16 : j->st,
                       .tb = j->t,
                       .lda = j->columns,
                       .ldb = j->C,
                       .N = j->C};
    if (dx->out) {
        p.M = j->rows, p.K = j->columns;
        p.b = offset(j->w, j->t, j->v0 * j->C);
        sink_target(j, dx, j->r0, first_x, &p);
        FSDP_TRY(fsdp__product_run(&p));
    }
    if (dw->out) {
        p.trans_a = 1;
        p.M = j->columns, p.K = j->rows;
        p.b = offset(j->x, j->t, j->r0 * j->C);
        sink_target(j, dw, j->v0, first_w, &p);
        FSDP_TRY(fsdp__product_run(&p));
    }
    return FSDP_OK;
}

/* All tiles: the vocabulary outside when by_columns, else the rows. */
static fsdp_status head_tiles(head_job *j, sink *dx, sink *dw, void *db, bool by_columns)
{
    int64_t nr = (j->R + j->tile_rows - 1) / j->tile_rows;
    int64_t nv = (j->V + j->tile_columns - 1) / j->tile_columns;
    for (int64_t n = 0; n < nr * nv; n++) {
        int64_t ri = by_columns ? n % nr : n / nv, vi = by_columns ? n / nr : n % nv;
        FSDP_TRY(head_logits(j, ri * j->tile_rows, vi * j->tile_columns));
        fsdp__parallel(row_parts(j->rows), head_backward_part, j);
        if (!by_columns) dx->base = j->r0;
        if (by_columns) dw->base = j->v0;
        FSDP_TRY(head_products(j, dx, dw, vi == 0, ri == 0));
        if (db)
            fsdp__k_column_sum(j->logits, j->st, j->rows, j->columns, offset(db, j->st, j->v0),
                               j->st, ri > 0);
        if (vi == nv - 1) sink_flush(j, dx, j->r0, j->rows);
        if (ri == nr - 1) sink_flush(j, dw, j->v0, j->columns);
    }
    return FSDP_OK;
}

/* Without rows (or a vocabulary) the gradients are empty sums. */
static void head_nothing(const head_job *j, const sink *dx, const sink *dw, const sink *db)
{
    if (dx->out && !dx->add) memset(dx->out, 0, (size_t)(j->R * j->C) * fsdp_dtype_size(dx->dt));
    if (dw->out && !dw->add) memset(dw->out, 0, (size_t)(j->V * j->C) * fsdp_dtype_size(dw->dt));
    if (db->out && !db->add) memset(db->out, 0, (size_t)j->V * fsdp_dtype_size(db->dt));
}

static void bias_store(const head_job *j, const sink *db, void *sums)
{
    if (j->st == FSDP_F32) {
        store_f32(sums, j->V, db->out, db->dt, db->add);
        return;
    }
    double *out = (double *)(void *)db->out, *in = sums;
    for (int64_t v = 0; v < j->V; v++)
        out[v] = db->add ? out[v] + in[v] : in[v];
}

fsdp_status fsdp__k_head_loss_backward(const void *x, const void *w, const void *b, fsdp_dtype t,
                                       int64_t R, int64_t C, int64_t V, const int64_t *target,
                                       int64_t ignore, const void *stat, double scale, void *dx,
                                       fsdp_dtype dt_x, int add_x, void *dw, fsdp_dtype dt_w,
                                       int add_w, void *db, fsdp_dtype dt_b, int add_b)
{
    head_job j = {.x = x, .w = w, .b = b, .t = t, .R = R, .C = C, .V = V, .ignore = ignore};
    j.target = target, j.stat = (void *)(uintptr_t)stat, j.scale = scale;
    sink sx = {.out = dx, .dt = dt_x, .add = add_x}, sw = {.out = dw, .dt = dt_w, .add = add_w};
    sink sb = {.out = db, .dt = dt_b, .add = add_b};
    float *held = NULL;
    fsdp_status s = FSDP_OK;
    if (R == 0 || V == 0) {
        head_nothing(&j, &sx, &sw, &sb);
        return FSDP_OK;
    }
    head_sizes(&j);
    bool narrow = t == FSDP_BF16 && fsdp__cpu_isa() >= FSDP__ISA_AVX512_BF16;
    /* The outer direction is summed by tile, the inner one as a whole if it is
     * not summed in place: choose what holds less. */
    bool x_in_place = sink_in_place(&j, &sx), w_in_place = sink_in_place(&j, &sw);
    bool by_columns = !w_in_place && (x_in_place || R < V);
    int64_t hold_x = x_in_place ? 0 : by_columns ? R : j.tile_rows;
    int64_t hold_w = w_in_place ? 0 : by_columns ? j.tile_columns : V;

    size_t elements = (size_t)(j.tile_rows * j.tile_columns), size = fsdp_dtype_size(j.st);
    size_t bytes = elements * (size + (narrow ? 2 : 0)) + 64 + (db ? (size_t)V * size : 0);
    j.logits = fsdp__scratch(FSDP__SCRATCH_LOSS, bytes);
    if (!j.logits) return fsdp__fail_memory("a tile of logits", bytes);
    char *sums_b = j.logits + elements * size;
    if (narrow) j.narrow = (void *)(sums_b + (db ? (size_t)V * size : 0));
    size_t held_bytes = (size_t)((hold_x + hold_w) * C) * sizeof *held;
    if (held_bytes > 0 && !(held = malloc(held_bytes)))
        return fsdp__fail_memory("gradients of head and loss in f32", held_bytes);
    if (!x_in_place) sx.sums = held;
    if (!w_in_place) sw.sums = held + hold_x * C;

    FSDP_GO(head_tiles(&j, &sx, &sw, db ? sums_b : NULL, by_columns));
    if (db) bias_store(&j, &sb, sums_b);
done:
    free(held);
    return s;
}
