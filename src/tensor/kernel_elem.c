/*
 * kernel_elem.c - elementwise kernels: cutting into parts, choice of the table.
 *
 * A part is FSDP__PART elements whatever the number of threads, and every
 * table gives an element the same bits wherever it stands, so the cut shows in
 * no result. The formulas are in kernel_plain.inc and kernel_fast_elem.inc.
 */
#include "tensor/kernel_set.h"

#include <math.h>
#include <string.h>

#include "base/rng.h"
#include "base/thread.h"
#include "tensor/kernel_walk.h"

static int64_t parts_of(int64_t n)
{
    return (n + FSDP__PART - 1) / FSDP__PART;
}

/* First element and count of a part of n. */
static int64_t part_range(int64_t part, int64_t n, int64_t *first)
{
    *first = part * FSDP__PART;
    return n - *first < FSDP__PART ? n - *first : FSDP__PART;
}

/* ---- of one input ------------------------------------------------------------ */

typedef struct unary_args {
    const fsdp__kernel_set *set;
    fsdp__unary op;
    const void *x, *y_in, *dy;
    void *y;
    fsdp_dtype t, dt;
    int64_t n;
    double p;
    int add;
} unary_args;

static void unary_part(void *arg, int64_t part)
{
    const unary_args *u = arg;
    int64_t i, n = part_range(part, u->n, &i);
    u->set->unary(u->op, fsdp__cat(u->x, u->t, i), u->t, n, u->p, fsdp__at(u->y, u->t, i));
}

void fsdp__k_unary(fsdp__unary op, const void *x, fsdp_dtype t, int64_t n, double p, void *y)
{
    unary_args u = {
        .set = fsdp__kernel_set_for(t, t), .op = op, .x = x, .y = y, .t = t, .n = n, .p = p};
    fsdp__parallel(parts_of(n), unary_part, &u);
}

static void unary_backward_part(void *arg, int64_t part)
{
    const unary_args *u = arg;
    int64_t i, n = part_range(part, u->n, &i);
    u->set->unary_backward(u->op, fsdp__cat(u->x, u->t, i), fsdp__cat(u->y_in, u->t, i), u->t,
                           fsdp__cat(u->dy, u->t, i), n, u->p, fsdp__at(u->y, u->dt, i), u->dt,
                           u->add);
}

void fsdp__k_unary_backward(fsdp__unary op, const void *x, const void *y, fsdp_dtype t,
                            const void *dy, int64_t n, double p, void *dx, fsdp_dtype dt, int add)
{
    unary_args u = {.set = fsdp__kernel_set_for(t, dt),
                    .op = op,
                    .x = x,
                    .y_in = y,
                    .dy = dy,
                    .y = dx,
                    .t = t,
                    .dt = dt,
                    .n = n,
                    .p = p,
                    .add = add};
    fsdp__parallel(parts_of(n), unary_backward_part, &u);
}

/* ---- of two inputs ------------------------------------------------------------- */

typedef struct binary_args {
    const fsdp__kernel_set *set;
    fsdp__binary op;
    const void *a, *b;
    void *y;
    fsdp_dtype t, dt;
    int add;
    fsdp__walk walk;       /* arrays: y, a, b */
    int64_t pieces;        /* of a run: FSDP__PART elements each */
    int64_t units;         /* rows * pieces */
    int64_t units_of_part; /* short rows go together */
} binary_args;

/* One run of `n`. An input whose elements lie apart is first brought together, a block at a time.
 */
static void binary_run(const binary_args *u, int64_t n, const void *a, int64_t a_step,
                       const void *b, int64_t b_step, void *y)
{
    if ((a_step == 0 || a_step == 1) && (b_step == 0 || b_step == 1)) {
        u->set->binary(u->op, n, a, a_step, b, b_step, u->t, y, u->dt, u->add);
        return;
    }
    enum { BLOCK = 128 };
    double near_a[BLOCK], near_b[BLOCK]; /* room for the widest dtype */
    size_t size = fsdp_dtype_size(u->t);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t m = n - i < BLOCK ? n - i : BLOCK;
        for (int64_t j = 0; j < m; j++) {
            memcpy((char *)near_a + (size_t)j * size, fsdp__cat(a, u->t, (i + j) * a_step), size);
            memcpy((char *)near_b + (size_t)j * size, fsdp__cat(b, u->t, (i + j) * b_step), size);
        }
        u->set->binary(u->op, m, near_a, 1, near_b, 1, u->t, fsdp__at(y, u->dt, i), u->dt, u->add);
    }
}

static void binary_part(void *arg, int64_t part)
{
    const binary_args *u = arg;
    const fsdp__walk *w = &u->walk;
    int64_t first = part * u->units_of_part, last = first + u->units_of_part;
    if (last > u->units) last = u->units;
    fsdp__walk_at at;
    fsdp__walk_seek(w, &at, first / u->pieces);
    for (int64_t unit = first; unit < last; unit++) {
        int64_t i, n = part_range(unit % u->pieces, w->run, &i);
        binary_run(u, n, fsdp__cat(u->a, u->t, at.offset[1] + i * w->step[1]), w->step[1],
                   fsdp__cat(u->b, u->t, at.offset[2] + i * w->step[2]), w->step[2],
                   fsdp__at(u->y, u->dt, at.offset[0] + i));
        if ((unit + 1) % u->pieces == 0) fsdp__walk_next(w, &at);
    }
}

void fsdp__k_binary(fsdp__binary op, int ndim, const int64_t *sizes, const void *a,
                    const int64_t *a_stride, const void *b, const int64_t *b_stride, fsdp_dtype t,
                    void *y, fsdp_dtype dt, int add)
{
    binary_args u = {.set = fsdp__kernel_set_for(t, dt),
                     .op = op,
                     .a = a,
                     .b = b,
                     .y = y,
                     .t = t,
                     .dt = dt,
                     .add = add};
    int64_t y_stride[FSDP__WALK_DIMS], next = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        y_stride[d] = next;
        next *= sizes[d];
    }
    const int64_t *strides[] = {y_stride, a_stride, b_stride};
    fsdp__walk_init(&u.walk, ndim, sizes, 3, strides);
    u.pieces = parts_of(u.walk.run);
    u.units = u.walk.rows * u.pieces;
    u.units_of_part = u.walk.run > 0 && u.walk.run < FSDP__PART ? FSDP__PART / u.walk.run : 1;
    fsdp__parallel((u.units + u.units_of_part - 1) / u.units_of_part, binary_part, &u);
}

typedef struct swiglu_args {
    const fsdp__kernel_set *set;
    const void *a, *b, *dy;
    void *y, *da, *db;
    fsdp_dtype t, dt_a, dt_b;
    int add_a, add_b;
    int64_t n;
} swiglu_args;

static void swiglu_part(void *arg, int64_t part)
{
    const swiglu_args *u = arg;
    int64_t i, n = part_range(part, u->n, &i);
    u->set->swiglu(fsdp__cat(u->a, u->t, i), fsdp__cat(u->b, u->t, i), u->t, n,
                   fsdp__at(u->y, u->t, i));
}

void fsdp__k_swiglu(const void *a, const void *b, fsdp_dtype t, int64_t n, void *y)
{
    swiglu_args u = {.set = fsdp__kernel_set_for(t, t), .a = a, .b = b, .y = y, .t = t, .n = n};
    fsdp__parallel(parts_of(n), swiglu_part, &u);
}

static void swiglu_backward_part(void *arg, int64_t part)
{
    const swiglu_args *u = arg;
    int64_t i, n = part_range(part, u->n, &i);
    u->set->swiglu_backward(fsdp__cat(u->a, u->t, i), fsdp__cat(u->b, u->t, i), u->t,
                            fsdp__cat(u->dy, u->t, i), n, fsdp__at(u->da, u->dt_a, i), u->dt_a,
                            u->add_a, fsdp__at(u->db, u->dt_b, i), u->dt_b, u->add_b);
}

void fsdp__k_swiglu_backward(const void *a, const void *b, fsdp_dtype t, const void *dy, int64_t n,
                             void *da, fsdp_dtype dt_a, int add_a, void *db, fsdp_dtype dt_b,
                             int add_b)
{
    swiglu_args u = {.set = fsdp__kernel_set_for(t, dt_a),
                     .a = a,
                     .b = b,
                     .dy = dy,
                     .da = da,
                     .db = db,
                     .t = t,
                     .dt_a = dt_a,
                     .dt_b = dt_b,
                     .add_a = add_a,
                     .add_b = add_b,
                     .n = n};
    /* The fast tables need both outputs to be theirs. */
    if (u.set != fsdp__kernel_set_for(t, dt_b)) u.set = fsdp__kernel_set_plain(t);
    fsdp__parallel(parts_of(n), swiglu_backward_part, &u);
}

/* ---- dropout, fill ------------------------------------------------------------- */

typedef struct dropout_args {
    const fsdp__kernel_set *set;
    const void *x;
    const uint64_t *keys;
    void *y;
    fsdp_dtype t, dt;
    int64_t rows, per, pieces;
    int64_t rows_of_part; /* when a row is one piece */
    float p;
    double scale;
    int add;
} dropout_args;

static void dropout_piece(const dropout_args *u, int64_t row, int64_t first, int64_t n)
{
    enum { BLOCK = 1024 };
    float uniform[BLOCK];
    for (int64_t i = first; i < first + n; i += BLOCK) {
        int64_t m = first + n - i < BLOCK ? first + n - i : BLOCK, at = row * u->per + i;
        fsdp__rng_uniform_fill(u->keys[row], (uint64_t)i, uniform, (size_t)m);
        u->set->dropout(fsdp__cat(u->x, u->t, at), u->t, m, uniform, u->p, u->scale,
                        fsdp__at(u->y, u->dt, at), u->dt, u->add);
    }
}

static void dropout_part(void *arg, int64_t part)
{
    const dropout_args *u = arg;
    if (u->pieces > 1) {
        int64_t i, n = part_range(part % u->pieces, u->per, &i);
        dropout_piece(u, part / u->pieces, i, n);
        return;
    }
    int64_t last = (part + 1) * u->rows_of_part;
    if (last > u->rows) last = u->rows;
    for (int64_t r = part * u->rows_of_part; r < last; r++)
        dropout_piece(u, r, 0, u->per);
}

void fsdp__k_dropout(const void *x, fsdp_dtype t, int64_t rows, int64_t per, const uint64_t *keys,
                     double p, void *y, fsdp_dtype dt, int add)
{
    if (rows == 0 || per == 0) return;
    /* Uniform numbers are multiples of 2^-24: the next one at or above p decides alike, and is a
     * float. */
    dropout_args u = {.set = fsdp__kernel_set_for(t, dt),
                      .x = x,
                      .keys = keys,
                      .y = y,
                      .t = t,
                      .dt = dt,
                      .rows = rows,
                      .per = per,
                      .pieces = parts_of(per),
                      .rows_of_part = per < FSDP__PART ? FSDP__PART / per : 1,
                      .p = (float)ldexp(ceil(ldexp(p, 24)), -24),
                      .scale = 1 / (1 - p),
                      .add = add};
    int64_t parts = u.pieces > 1 ? rows * u.pieces : (rows + u.rows_of_part - 1) / u.rows_of_part;
    fsdp__parallel(parts, dropout_part, &u);
}

typedef struct fill_args {
    char *y;
    size_t size;
    int64_t n;
    unsigned char pattern[8];
} fill_args;

static void fill_part(void *arg, int64_t part)
{
    const fill_args *u = arg;
    int64_t i, n = part_range(part, u->n, &i);
    char *y = u->y + (size_t)i * u->size;
    size_t bytes = (size_t)n * u->size, done = u->size;
    int same = 1;
    for (size_t j = 1; j < u->size; j++)
        same &= u->pattern[j] == u->pattern[0];
    if (same) {
        memset(y, u->pattern[0], bytes);
        return;
    }
    memcpy(y, u->pattern, u->size);
    for (; done < bytes && done < 4096; done *= 2)
        memcpy(y + done, y, done < bytes - done ? done : bytes - done);
    for (size_t block = done; done < bytes; done += block)
        memcpy(y + done, y, block < bytes - done ? block : bytes - done);
}

void fsdp__k_fill(void *y, fsdp_dtype t, int64_t n, double value)
{
    fill_args u = {.y = y, .size = fsdp_dtype_size(t), .n = n};
    fsdp__convert(u.pattern, t, &value, FSDP_F64, 1);
    fsdp__parallel(parts_of(n), fill_part, &u);
}
