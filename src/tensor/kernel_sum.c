/*
 * kernel_sum.c - sums over dims.
 *
 * The order of the additions follows from the sizes alone, never from strides
 * or threads. Neighbouring dims that are summed, or kept, count as one; let
 * the last such group be the inner one.
 *
 *   Inner group summed: chunks of CHUNK elements of it are summed in lanes (see
 *   kernel_set.h), and the chunks' sums are added in order in f64.
 *   Inner group kept: each element of it is a column; ROWS rows at a time are
 *   summed in order, and the sums of those blocks are added in order, in f32
 *   (f64 for f64). A sum that is one panel of columns is made in GROUPS groups
 *   of blocks, whose sums are added in order.
 *
 * Elements that do not lie side by side are first brought together on the stack.
 */
#include "tensor/kernel_set.h"

#include <string.h>

#include "base/thread.h"
#include "tensor/kernel_walk.h"

enum {
    CHUNK = 2048,    /* elements of a chunk of the inner group */
    COLUMNS = 1024,  /* columns of a part: a page of f32, so that reading runs on */
    ROWS = 64,       /* rows of a block of a sum by columns */
    PARTS_MOST = 64, /* parts of one long sum */
    GROUPS = 8       /* parts of a sum by columns that has one panel */
};

typedef struct sum_dims {
    int ndim;
    int64_t size[FSDP__WALK_DIMS], stride[FSDP__WALK_DIMS];
    int64_t count; /* product of the sizes */
} sum_dims;

typedef struct sum_args {
    const fsdp__kernel_set *set, *stat_set;
    const void *x;
    fsdp_dtype t, dt, stat;
    double scale;
    void *out;
    int add;
    sum_dims inner, kept, summed; /* kept and summed: the dims before the inner group */
    int inner_summed;
    int64_t panels;                 /* inner kept: parts of the inner group */
    int64_t per_part;               /* inner summed: outputs of a part */
    double partial[PARTS_MOST];     /* one output alone: the parts' sums */
    int64_t chunks, chunks_of_part; /* of that one */
    double (*groups)[COLUMNS];      /* one panel alone: the groups' sums, as stat */
    int64_t group_rows;
} sum_args;

static void dims_add(sum_dims *d, int64_t size, int64_t stride)
{
    d->count *= size;
    if (size == 1) return;
    if (d->ndim > 0 && d->stride[d->ndim - 1] == stride * size) {
        d->size[d->ndim - 1] *= size;
        d->stride[d->ndim - 1] = stride;
        return;
    }
    d->size[d->ndim] = size;
    d->stride[d->ndim++] = stride;
}

/* Offset of the i-th element, in row-major order. */
static int64_t dims_at(const sum_dims *d, int64_t i)
{
    int64_t at = 0;
    for (int k = d->ndim - 1; k >= 0; k--) {
        at += i % d->size[k] * d->stride[k];
        i /= d->size[k];
    }
    return at;
}

/* Elements first..first+n of d side by side: in place, or copied into room. */
static const void *dims_near(const sum_args *u, const sum_dims *d, int64_t base, int64_t first,
                             int64_t n, void *room)
{
    if (d->ndim == 0) return fsdp__cat(u->x, u->t, base);
    if (d->ndim == 1 && d->stride[0] == 1) return fsdp__cat(u->x, u->t, base + first);
    size_t size = fsdp_dtype_size(u->t);
    int last = d->ndim - 1;
    for (int64_t i = 0; i < n;) {
        /* As far as the last dim goes. */
        int64_t at = base + dims_at(d, first + i);
        int64_t run = d->size[last] - (first + i) % d->size[last];
        if (run > n - i) run = n - i;
        for (int64_t k = 0; k < run; k++, i++, at += d->stride[last])
            memcpy((char *)room + (size_t)i * size, fsdp__cat(u->x, u->t, at), size);
    }
    return room;
}

static void put(const sum_args *u, int64_t i, double v)
{
    if (u->stat == FSDP_F64)
        fsdp__put_f64(u->out, u->dt, i, v * u->scale, u->add);
    else
        fsdp__put_f32(u->out, u->dt, i, (float)(v * u->scale), u->add);
}

/* ---- inner group summed --------------------------------------------------------------- */

/* Chunks first..last of all chunks of the output whose elements start at base. */
static double sum_chunks(const sum_args *u, int64_t base, int64_t first, int64_t last)
{
    double total = 0, room[CHUNK];
    int64_t per_row = (u->inner.count + CHUNK - 1) / CHUNK;
    for (int64_t k = first; k < last; k++) {
        int64_t i = k % per_row * CHUNK;
        int64_t n = u->inner.count - i < CHUNK ? u->inner.count - i : CHUNK;
        int64_t row = base + dims_at(&u->summed, k / per_row);
        total += u->set->sum(n, dims_near(u, &u->inner, row, i, n, room), u->t);
    }
    return total;
}

static void sum_outputs_part(void *arg, int64_t part)
{
    const sum_args *u = arg;
    int64_t last = (part + 1) * u->per_part;
    if (last > u->kept.count) last = u->kept.count;
    for (int64_t k = part * u->per_part; k < last; k++) {
        double total = 0;
        int64_t base = dims_at(&u->kept, k);
        /* The same cut as sum_one_part's, so the same bits whichever runs. */
        for (int64_t c = 0; c < u->chunks; c += u->chunks_of_part) {
            int64_t end = c + u->chunks_of_part < u->chunks ? c + u->chunks_of_part : u->chunks;
            total += sum_chunks(u, base, c, end);
        }
        put(u, k, total);
    }
}

static void sum_one_part(void *arg, int64_t part)
{
    sum_args *u = arg;
    int64_t first = part * u->chunks_of_part, last = first + u->chunks_of_part;
    u->partial[part] = sum_chunks(u, 0, first, last < u->chunks ? last : u->chunks);
}

static void sum_inner(sum_args *u)
{
    u->chunks = (u->inner.count + CHUNK - 1) / CHUNK * u->summed.count;
    u->chunks_of_part = (u->chunks + PARTS_MOST - 1) / PARTS_MOST;
    if (u->chunks_of_part < 1) u->chunks_of_part = 1;
    if (u->kept.count == 1) {
        int64_t parts = (u->chunks + u->chunks_of_part - 1) / u->chunks_of_part;
        fsdp__parallel(parts, sum_one_part, u);
        double total = 0;
        for (int64_t k = 0; k < parts; k++)
            total += u->partial[k];
        put(u, 0, total);
        return;
    }
    int64_t each = u->inner.count * u->summed.count;
    u->per_part = each < FSDP__PART ? FSDP__PART / (each > 0 ? each : 1) : 1;
    fsdp__parallel((u->kept.count + u->per_part - 1) / u->per_part, sum_outputs_part, u);
}

/* ---- inner group kept ------------------------------------------------------------------- */

/* total (n) += rows first..last of columns c..c+n, from base on. */
static void sum_rows(const sum_args *u, int64_t base, int64_t c, int64_t n, int64_t first,
                     int64_t last, void *total)
{
    double block[COLUMNS], room[COLUMNS]; /* as floats where stat is f32 */
    for (int64_t r = first; r < last; r += ROWS) {
        int64_t end = r + ROWS < last ? r + ROWS : last;
        memset(block, 0, (size_t)n * sizeof *block);
        for (int64_t i = r; i < end; i++) {
            int64_t row = base + dims_at(&u->summed, i);
            u->set->column_add(n, dims_near(u, &u->inner, row, c, n, room), u->t, block);
        }
        u->stat_set->column_add(n, block, u->stat, total);
    }
}

static void sum_columns_part(void *arg, int64_t part)
{
    const sum_args *u = arg;
    int64_t k = part / u->panels, c = part % u->panels * COLUMNS;
    int64_t n = u->inner.count - c < COLUMNS ? u->inner.count - c : COLUMNS;
    double total[COLUMNS] = {0};
    sum_rows(u, dims_at(&u->kept, k), c, n, 0, u->summed.count, total);
    for (int64_t i = 0; i < n; i++)
        put(u, k * u->inner.count + c + i, fsdp__get_f64(total, u->stat, i));
}

static void sum_group_part(void *arg, int64_t part)
{
    const sum_args *u = arg;
    int64_t first = part * u->group_rows, last = first + u->group_rows;
    if (last > u->summed.count) last = u->summed.count;
    sum_rows(u, 0, 0, u->inner.count, first, last, u->groups[part]);
}

static void sum_one_panel(const sum_args *from)
{
    double groups[GROUPS][COLUMNS] = {{0}};
    sum_args u = *from;
    int64_t blocks = (u.summed.count + ROWS - 1) / ROWS;
    u.group_rows = (blocks + GROUPS - 1) / GROUPS * ROWS;
    u.groups = groups;
    if (blocks > 0)
        fsdp__parallel((u.summed.count + u.group_rows - 1) / u.group_rows, sum_group_part, &u);
    for (int g = 1; g < GROUPS; g++)
        u.stat_set->column_add(u.inner.count, groups[g], u.stat, groups[0]);
    for (int64_t i = 0; i < u.inner.count; i++)
        put(&u, i, fsdp__get_f64(groups[0], u.stat, i));
}

void fsdp__k_sum(int ndim, const int64_t *sizes, const void *x, const int64_t *x_stride,
                 fsdp_dtype t, const int64_t *o_sizes, double scale, void *out, fsdp_dtype dt,
                 int add)
{
    sum_args u = {.set = fsdp__kernel_set_for(t, t),
                  .stat_set = fsdp__kernel_set_plain(fsdp__stat_dtype(t)),
                  .x = x,
                  .t = t,
                  .dt = dt,
                  .stat = fsdp__stat_dtype(t),
                  .scale = scale,
                  .out = out,
                  .add = add,
                  .inner = {.count = 1},
                  .kept = {.count = 1},
                  .summed = {.count = 1}};
    /* The inner group: from the last dim on, as far as the kind is the same. Sizes of 1 are both
     * kinds. */
    int from = ndim, kind = -1;
    for (int d = ndim - 1; d >= 0; d--) {
        if (sizes[d] != 1) {
            int is_summed = o_sizes[d] != sizes[d];
            if (kind >= 0 && is_summed != kind) break;
            kind = is_summed;
        }
        from = d;
    }
    u.inner_summed = kind != 0;
    for (int d = 0; d < ndim; d++) {
        sum_dims *to = d >= from ? &u.inner : o_sizes[d] != sizes[d] ? &u.summed : &u.kept;
        dims_add(to, sizes[d], x_stride[d]);
    }
    if (u.inner_summed) {
        sum_inner(&u);
        return;
    }
    u.panels = (u.inner.count + COLUMNS - 1) / COLUMNS;
    if (u.kept.count * u.panels == 1) {
        sum_one_panel(&u);
        return;
    }
    fsdp__parallel(u.kept.count * u.panels, sum_columns_part, &u);
}
