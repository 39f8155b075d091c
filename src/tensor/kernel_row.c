/*
 * kernel_row.c - row-wise kernels: cutting by rows, sums over rows, gathers.
 *
 * Gradients of weights are sums over rows. Their order is fixed by R alone:
 * the rows are cut into at most ROW_BLOCKS blocks, each block sums its rows in
 * order, and the blocks' sums are added in order. The sums stand in scratch;
 * where that would be large, or there is no memory, the same additions are made
 * a few columns at a time on the stack, slower and with the same bits.
 */
#include "tensor/kernel_set.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/error.h"
#include "base/thread.h"
#include "tensor/kernel_scratch.h"

enum {
    ROW_BLOCKS = 32,        /* of a sum over rows, at most */
    ROW_LEAST = 8,          /* rows of such a block, at least */
    PANEL = 256,            /* columns of a part that adds up columns */
    ROWS_AHEAD = 4,         /* of a gather: fetched while this one is copied */
    FETCH_MOST = 4096,      /* bytes of a row fetched ahead */
    STREAM_LEAST = 4 << 20, /* bytes of an output that is written past the caches */
    SUMS_MOST = 4 << 20,    /* bytes of scratch for the blocks' sums */
};

static int64_t rows_of_part(int64_t C)
{
    return C < FSDP__PART ? FSDP__PART / (C > 0 ? C : 1) : 1;
}

typedef struct row_args {
    const fsdp__kernel_set *set;
    const void *x, *w, *b, *mean_in, *rstd_in, *dy;
    void *y, *mean, *rstd; /* y: also dx */
    fsdp_dtype t, dt, stat;
    int64_t R, C, rows; /* rows of one part */
    double eps;
    int add;
    char *sums; /* (blocks, 2, C) stat: dw and db of each block; NULL: not wanted */
    int want_w, want_b;
} row_args;

/* First row of a part; *n its rows. */
static int64_t part_rows(const row_args *u, int64_t part, int64_t *n)
{
    int64_t first = part * u->rows;
    *n = u->R - first < u->rows ? u->R - first : u->rows;
    return first;
}

static void run_parts(row_args *u, void (*fn)(void *, int64_t))
{
    if (u->R == 0 || u->C == 0) return;
    if (u->rows == 0) u->rows = rows_of_part(u->C);
    fsdp__parallel((u->R + u->rows - 1) / u->rows, fn, u);
}

/* ---- norms ------------------------------------------------------------------------ */

static void rms_part(void *arg, int64_t part)
{
    const row_args *u = arg;
    int64_t n, r = part_rows(u, part, &n);
    u->set->rms_norm(fsdp__cat(u->x, u->t, r * u->C), u->w, u->t, n, u->C, u->eps,
                     fsdp__at(u->y, u->t, r * u->C), fsdp__at(u->rstd, u->stat, r));
}

void fsdp__k_rms_norm(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C, double eps,
                      void *y, void *rstd)
{
    row_args u = {.set = fsdp__kernel_set_for(t, t),
                  .x = x,
                  .w = w,
                  .y = y,
                  .rstd = rstd,
                  .t = t,
                  .stat = fsdp__stat_dtype(t),
                  .R = R,
                  .C = C,
                  .eps = eps};
    run_parts(&u, rms_part);
}

static void layer_part(void *arg, int64_t part)
{
    const row_args *u = arg;
    int64_t n, r = part_rows(u, part, &n);
    u->set->layer_norm(fsdp__cat(u->x, u->t, r * u->C), u->w, u->b, u->t, n, u->C, u->eps,
                       fsdp__at(u->y, u->t, r * u->C), fsdp__at(u->mean, u->stat, r),
                       fsdp__at(u->rstd, u->stat, r));
}

void fsdp__k_layer_norm(const void *x, const void *w, const void *b, fsdp_dtype t, int64_t R,
                        int64_t C, double eps, void *y, void *mean, void *rstd)
{
    row_args u = {.set = fsdp__kernel_set_for(t, t),
                  .x = x,
                  .w = w,
                  .b = b,
                  .y = y,
                  .mean = mean,
                  .rstd = rstd,
                  .t = t,
                  .stat = fsdp__stat_dtype(t),
                  .R = R,
                  .C = C,
                  .eps = eps};
    run_parts(&u, layer_part);
}

/* Rows r..r+n of a norm's backward; dw_acc and db_acc collect, dx may be NULL. */
static void norm_rows(const row_args *u, int64_t r, int64_t n, void *dx, void *dw_acc, void *db_acc)
{
    const void *x = fsdp__cat(u->x, u->t, r * u->C), *dy = fsdp__cat(u->dy, u->t, r * u->C);
    const void *rstd = fsdp__cat(u->rstd_in, u->stat, r);
    dx = fsdp__at(dx, u->dt, r * u->C);
    if (u->mean_in)
        u->set->layer_norm_backward(x, u->w, u->t, n, u->C, fsdp__cat(u->mean_in, u->stat, r), rstd,
                                    dy, dx, u->dt, u->add, dw_acc, db_acc);
    else
        u->set->rms_norm_backward(x, u->w, u->t, n, u->C, rstd, dy, dx, u->dt, u->add, dw_acc);
}

static void norm_backward_part(void *arg, int64_t part)
{
    const row_args *u = arg;
    int64_t n, r = part_rows(u, part, &n);
    void *dw = NULL, *db = NULL;
    if (u->sums) {
        int64_t at = part * 2 * u->C;
        dw = u->want_w ? fsdp__at(u->sums, u->stat, at) : NULL;
        db = u->want_b ? fsdp__at(u->sums, u->stat, at + u->C) : NULL;
        memset(fsdp__at(u->sums, u->stat, at), 0, (size_t)(2 * u->C) * fsdp_dtype_size(u->stat));
    }
    norm_rows(u, r, n, u->y, dw, db);
}

typedef struct reduce_args {
    row_args *rows;
    int64_t blocks;
    void *out[2]; /* dw, db; NULL: not wanted */
    fsdp_dtype dt[2];
    int add[2];
} reduce_args;

/* total (n) += sums (n), both stat. */
static void add_stat(void *total, const void *sums, fsdp_dtype stat, int64_t n)
{
    if (stat == FSDP_F64)
        for (int64_t i = 0; i < n; i++)
            ((double *)total)[i] += ((const double *)sums)[i];
    else
        for (int64_t i = 0; i < n; i++)
            ((float *)total)[i] += ((const float *)sums)[i];
}

/* out[c..c+n] (+)= total. */
static void put_stat(void *out, fsdp_dtype dt, int64_t c, int64_t n, const void *total,
                     fsdp_dtype stat, int add)
{
    for (int64_t i = 0; i < n; i++) {
        if (stat == FSDP_F64)
            fsdp__put_f64(out, dt, c + i, ((const double *)total)[i], add);
        else
            fsdp__put_f32(out, dt, c + i, ((const float *)total)[i], add);
    }
}

/* The sums of block b for columns c..c+n, made from the rows themselves. */
static void block_columns(const row_args *u, int64_t b, int64_t c, int64_t n, void *dw, void *db)
{
    int64_t count, first = part_rows(u, b, &count);
    row_args one = *u;
    one.w = NULL; /* only the row's own sums look at it, and nobody at those */
    one.C = n;
    for (int64_t r = first; r < first + count; r++) {
        one.x = fsdp__cat(u->x, u->t, r * u->C + c);
        one.dy = fsdp__cat(u->dy, u->t, r * u->C + c);
        one.rstd_in = fsdp__cat(u->rstd_in, u->stat, r);
        one.mean_in = fsdp__cat(u->mean_in, u->stat, r);
        norm_rows(&one, 0, 1, NULL, dw, db);
    }
}

/* Adds up the blocks for one panel of columns. */
static void reduce_part(void *arg, int64_t part)
{
    const reduce_args *v = arg;
    const row_args *u = v->rows;
    int64_t c = part * PANEL, n = u->C - c < PANEL ? u->C - c : PANEL;
    double total[2][PANEL] = {{0}}, block[2][PANEL]; /* as floats where stat is f32 */
    for (int64_t b = 0; b < v->blocks; b++) {
        const void *sums[2] = {block[0], block[1]};
        if (u->sums) {
            for (int k = 0; k < 2; k++)
                sums[k] = fsdp__cat(u->sums, u->stat, (2 * b + k) * u->C + c);
        } else {
            memset(block, 0, sizeof block);
            block_columns(u, b, c, n, block[0], block[1]);
        }
        for (int k = 0; k < 2; k++)
            if (v->out[k]) add_stat(total[k], sums[k], u->stat, n);
    }
    for (int k = 0; k < 2; k++)
        if (v->out[k]) put_stat(v->out[k], v->dt[k], c, n, total[k], u->stat, v->add[k]);
}

static void norm_backward(row_args *u, reduce_args *v)
{
    u->want_w = v->out[0] != NULL;
    u->want_b = v->out[1] != NULL;
    int sums = u->want_w || u->want_b;
    if (sums) {
        u->rows = (u->R + ROW_BLOCKS - 1) / ROW_BLOCKS;
        if (u->rows < ROW_LEAST) u->rows = ROW_LEAST;
        v->blocks = (u->R + u->rows - 1) / u->rows;
        size_t bytes = (size_t)(v->blocks * 2 * u->C) * fsdp_dtype_size(u->stat);
        if (bytes <= SUMS_MOST) u->sums = fsdp__scratch(FSDP__SCRATCH_ROWS, bytes);
    }
    if (u->y || u->sums) run_parts(u, norm_backward_part);
    if (!sums) return;
    v->rows = u;
    fsdp__parallel((u->C + PANEL - 1) / PANEL, reduce_part, v);
}

void fsdp__k_rms_norm_backward(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C,
                               const void *rstd, const void *dy, void *dx, fsdp_dtype dt_x,
                               int add_x, void *dw, fsdp_dtype dt_w, int add_w)
{
    row_args u = {.set = fsdp__kernel_set_for(t, dt_x),
                  .x = x,
                  .w = w,
                  .rstd_in = rstd,
                  .dy = dy,
                  .y = dx,
                  .t = t,
                  .dt = dt_x,
                  .stat = fsdp__stat_dtype(t),
                  .R = R,
                  .C = C,
                  .add = add_x};
    reduce_args v = {.out = {dw, NULL}, .dt = {dt_w, dt_w}, .add = {add_w, 0}};
    norm_backward(&u, &v);
}

void fsdp__k_layer_norm_backward(const void *x, const void *w, fsdp_dtype t, int64_t R, int64_t C,
                                 const void *mean, const void *rstd, const void *dy, void *dx,
                                 fsdp_dtype dt_x, int add_x, void *dw, fsdp_dtype dt_w, int add_w,
                                 void *db, fsdp_dtype dt_b, int add_b)
{
    row_args u = {.set = fsdp__kernel_set_for(t, dt_x),
                  .x = x,
                  .w = w,
                  .mean_in = mean,
                  .rstd_in = rstd,
                  .dy = dy,
                  .y = dx,
                  .t = t,
                  .dt = dt_x,
                  .stat = fsdp__stat_dtype(t),
                  .R = R,
                  .C = C,
                  .add = add_x};
    reduce_args v = {.out = {dw, db}, .dt = {dt_w, dt_b}, .add = {add_w, add_b}};
    norm_backward(&u, &v);
}

/* ---- softmax ------------------------------------------------------------------------- */

static void softmax_part(void *arg, int64_t part)
{
    const row_args *u = arg;
    int64_t n, r = part_rows(u, part, &n);
    u->set->softmax(fsdp__cat(u->x, u->t, r * u->C), u->t, n, u->C, fsdp__at(u->y, u->t, r * u->C));
}

void fsdp__k_softmax(const void *x, fsdp_dtype t, int64_t R, int64_t C, void *y)
{
    row_args u = {.set = fsdp__kernel_set_for(t, t), .x = x, .y = y, .t = t, .R = R, .C = C};
    run_parts(&u, softmax_part);
}

static void softmax_backward_part(void *arg, int64_t part)
{
    const row_args *u = arg;
    int64_t n, r = part_rows(u, part, &n), i = r * u->C;
    u->set->softmax_backward(fsdp__cat(u->x, u->t, i), u->t, n, u->C, fsdp__cat(u->dy, u->t, i),
                             fsdp__at(u->y, u->dt, i), u->dt, u->add);
}

void fsdp__k_softmax_backward(const void *y, fsdp_dtype t, int64_t R, int64_t C, const void *dy,
                              void *dx, fsdp_dtype dt, int add)
{
    row_args u = {.set = fsdp__kernel_set_for(t, dt),
                  .x = y,
                  .dy = dy,
                  .y = dx,
                  .t = t,
                  .dt = dt,
                  .R = R,
                  .C = C,
                  .add = add};
    run_parts(&u, softmax_backward_part);
}

/* ---- embedding ------------------------------------------------------------------------- */

typedef struct embed_args {
    const char *w;
    char *out;
    const int64_t *ids;
    size_t row_bytes;
    int64_t R, rows;
    int stream;
} embed_args;

/* A row that comes next lies anywhere: no core can guess it. */
static void fetch_row(const char *row, size_t bytes)
{
    for (size_t i = 0; i < bytes && i < FETCH_MOST; i += 64)
        __builtin_prefetch(row + i);
}

static void copy_row(char *to, const char *from, size_t bytes, int stream)
{
    size_t i = 0;
#if defined(__x86_64__)
    if (stream && (uintptr_t)to % 16 == 0)
        for (; i + 64 <= bytes; i += 64)
            for (int k = 0; k < 64; k += 16)
                _mm_stream_si128((__m128i *)(to + i + k),
                                 _mm_loadu_si128((const __m128i *)(from + i + k)));
#else
    (void)stream;
#endif
    memcpy(to + i, from + i, bytes - i);
}

static void embed_part(void *arg, int64_t part)
{
    const embed_args *u = arg;
    int64_t last = (part + 1) * u->rows < u->R ? (part + 1) * u->rows : u->R;
    for (int64_t r = part * u->rows; r < last; r++) {
        if (r + ROWS_AHEAD < u->R)
            fetch_row(u->w + (size_t)u->ids[r + ROWS_AHEAD] * u->row_bytes, u->row_bytes);
        copy_row(u->out + (size_t)r * u->row_bytes, u->w + (size_t)u->ids[r] * u->row_bytes,
                 u->row_bytes, u->stream);
    }
#if defined(__x86_64__)
    if (u->stream) _mm_sfence();
#endif
}

fsdp_status fsdp__k_embedding(const void *w, fsdp_dtype t, int64_t V, int64_t C, const int64_t *ids,
                              int64_t R, void *out)
{
    for (int64_t r = 0; r < R; r++)
        if (ids[r] < 0 || ids[r] >= V)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "embedding: id %lld at index %lld; the table has %lld rows, so ids "
                              "lie in [0, %lld): check that the tokenizer belongs to the model",
                              (long long)ids[r], (long long)r, (long long)V, (long long)V);
    embed_args u = {.w = w,
                    .out = out,
                    .ids = ids,
                    .row_bytes = (size_t)C * fsdp_dtype_size(t),
                    .R = R,
                    .rows = rows_of_part(C)};
    u.stream = R * (int64_t)u.row_bytes >= STREAM_LEAST;
    if (C > 0) fsdp__parallel((R + u.rows - 1) / u.rows, embed_part, &u);
    return FSDP_OK;
}

typedef struct embed_grad_args {
    const fsdp__kernel_set *set, *put; /* put: from sums to dw; NULL: element by element */
    const void *dy;
    fsdp_dtype t, dt, stat;
    const int64_t *ids;
    const int64_t *start; /* (V + 1): where the rows of an id begin in order */
    const int64_t *order; /* (R): rows sorted by id, those of one id as they came */
    void *dw;
    int64_t R, V, C;
    int64_t rows; /* of dw in one part */
    int add;
} embed_grad_args;

/* acc (n, stat) += row r's columns c..c+n. */
static void add_row(const embed_grad_args *u, int64_t r, int64_t c, int64_t n, void *acc)
{
    u->set->column_add(n, fsdp__cat(u->dy, u->t, r * u->C + c), u->t, acc);
}

/* dw[id] (+)= the sum of its rows, which are order[0..count), or, with order NULL, all those from
 * `first` on that have the id. */
static void embed_grad_row(const embed_grad_args *u, int64_t id, const int64_t *order,
                           int64_t count, int64_t first)
{
    double room[PANEL]; /* as floats where stat is f32 */
    for (int64_t c = 0; c < u->C; c += PANEL) {
        int64_t n = u->C - c < PANEL ? u->C - c : PANEL;
        void *out = fsdp__at(u->dw, u->dt, id * u->C + c);
        /* Where dw has the sums' dtype and nothing in it, the sum is made there. */
        int direct = u->dt == u->stat && !u->add;
        void *sum = direct ? out : room;
        memset(sum, 0, (size_t)n * fsdp_dtype_size(u->stat));
        for (int64_t k = 0; order && k < count; k++)
            add_row(u, order[k], c, n, sum);
        for (int64_t r = first; !order && r < u->R; r++)
            if (u->ids[r] == id) add_row(u, r, c, n, sum);
        if (direct) continue;
        if (u->put)
            u->put->copy(n, room, u->stat, out, u->dt, u->add);
        else
            put_stat(u->dw, u->dt, id * u->C + c, n, room, u->stat, u->add);
    }
}

/* Whether row r is the first of its id. */
static int is_first(const embed_grad_args *u, int64_t r)
{
    for (int64_t k = 0; k < r; k++)
        if (u->ids[k] == u->ids[r]) return 0;
    return 1;
}

/* Some rows of dw, in order, so that each is written once. */
static void embed_grad_part(void *arg, int64_t part)
{
    const embed_grad_args *u = arg;
    int64_t first = part * u->rows, last = first + u->rows < u->V ? first + u->rows : u->V;
    size_t row = (size_t)u->C * fsdp_dtype_size(u->dt);
    if (!u->start) {
        if (!u->add) memset((char *)u->dw + (size_t)first * row, 0, (size_t)(last - first) * row);
        for (int64_t r = 0; r < u->R; r++)
            if (u->ids[r] >= first && u->ids[r] < last && is_first(u, r))
                embed_grad_row(u, u->ids[r], NULL, 0, r);
        return;
    }
    size_t from = (size_t)u->C * fsdp_dtype_size(u->t);
    for (int64_t id = first; id < last; id++) {
        int64_t k = u->start[id], count = u->start[id + 1] - k;
        if (k + count < u->R)
            fetch_row((const char *)u->dy + (size_t)u->order[k + count] * from, from);
        if (count > 0)
            embed_grad_row(u, id, u->order + k, count, 0);
        else if (!u->add)
            memset((char *)u->dw + (size_t)id * row, 0, row);
    }
}

/* Each id's rows are summed in f32 (f64) and rounded once, so that a narrow dw does not lose the
 * small ones. They are found by counting; without memory for it they are searched. */
void fsdp__k_embedding_backward(const void *dy, fsdp_dtype t, const int64_t *ids, int64_t R,
                                int64_t V, int64_t C, void *dw, fsdp_dtype dt, int add)
{
    if (V == 0 || C == 0) return;
    embed_grad_args u = {.set = fsdp__kernel_set_for(t, t),
                         .dy = dy,
                         .t = t,
                         .dt = dt,
                         .stat = fsdp__stat_dtype(t),
                         .ids = ids,
                         .dw = dw,
                         .R = R,
                         .V = V,
                         .C = C,
                         .rows = rows_of_part(C),
                         .add = add};
    const fsdp__kernel_set *put = fsdp__kernel_set_for(u.stat, dt);
    if (put != fsdp__kernel_set_plain(u.stat)) u.put = put;
    int64_t *start = fsdp__scratch(FSDP__SCRATCH_ROWS, (size_t)(V + 2 + R) * sizeof *start);
    if (start) {
        /* start[id + 2] counts; summed up, start[id + 1] is where the next row of id goes. */
        int64_t *order = start + V + 2;
        memset(start, 0, (size_t)(V + 2) * sizeof *start);
        for (int64_t r = 0; r < R; r++)
            start[ids[r] + 2]++;
        for (int64_t id = 0; id < V; id++)
            start[id + 2] += start[id + 1];
        for (int64_t r = 0; r < R; r++)
            order[start[ids[r] + 1]++] = r;
        u.start = start;
        u.order = order;
    }
    fsdp__parallel((V + u.rows - 1) / u.rows, embed_grad_part, &u);
}

/* ---- rotary positions ----------------------------------------------------------------- */

typedef struct rotary_args {
    const fsdp__kernel_set *set;
    const fsdp__rotary *r;
    const void *x;
    const float *cosine, *sine;
    void *y;
    int64_t rows; /* (b, t) positions of one part */
} rotary_args;

static void rotary_part(void *arg, int64_t part)
{
    const rotary_args *u = arg;
    const fsdp__rotary *r = u->r;
    int64_t last = (part + 1) * u->rows < r->B * r->T ? (part + 1) * u->rows : r->B * r->T;
    for (int64_t k = part * u->rows; k < last; k++) {
        int64_t b = k / r->T, t = k % r->T, half = r->D / 2;
        int64_t table = b * r->table_b_stride + t * half;
        u->set->rotary(fsdp__cat(u->x, r->t, b * r->x_stride[0] + t * r->x_stride[1]),
                       r->x_stride[2], u->cosine + table, u->sine + table, r->t, r->H, half,
                       fsdp__at(u->y, r->dt, b * r->y_stride[0] + t * r->y_stride[1]),
                       r->y_stride[2], r->dt, r->inverse, r->add);
    }
}

void fsdp__k_rotary(const fsdp__rotary *r, const void *x, const float *cos, const float *sin,
                    void *y)
{
    if (r->B == 0 || r->T == 0 || r->H == 0 || r->D < 2) return;
    rotary_args u = {.set = fsdp__kernel_set_for(r->t, r->dt),
                     .r = r,
                     .x = x,
                     .cosine = cos,
                     .sine = sin,
                     .y = y,
                     .rows = rows_of_part(r->H * r->D)};
    fsdp__parallel((r->B * r->T + u.rows - 1) / u.rows, rotary_part, &u);
}
