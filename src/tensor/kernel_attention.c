/*
 * kernel_attention.c - attention by tiles of queries and keys: the scores of a
 * tile live in the first cache, with each row's running maximum and sum, and no
 * T x S array ever exists. After Milakov and Gimelshein, "Online normalizer
 * calculation for softmax" (2018), and Dao et al., "FlashAttention" (2022).
 *
 * Letters: B batch, T queries, S keys, H query heads, KV key-value heads, G = H
 * / KV query heads that share one; D head size, P = D padded to whole vectors.
 *
 * All tiles are f32: rows of other dtypes are widened as they are loaded, and a
 * tile of keys is loaded once for the G heads that see it. Scores carry the
 * factor scale * log2(e) (in the transposed keys), so that weights are powers
 * of two; lse is turned back to the natural logarithm.
 *
 * Invariants: tiles of keys begin at multiples of their size whatever the row, and a
 * row's sums run over keys in order; so a result depends neither on the cut
 * into parts nor on the row's place. Keys that a row does not see have weight
 * zero; tiles that no row sees are not touched. Padding is zero.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/rng.h"
#include "base/thread.h"
#include "tensor/kernel_attention_internal.h"
#include "tensor/kernel_scratch.h"
#include "tensor/kernel_set.h"

enum {
    QUERIES = 48,         /* rows of a tile, at most: the instruction set says how many */
    KEYS = 96,            /* columns, at most */
    PART_ROWS = 384,      /* query rows, over the group's heads, of a forward part */
    ROWS_AHEAD = 16,      /* whose products with the output's gradient come later */
    LD_PAD = 16,          /* keeps rows of a tile off each other's cache sets */
    STRIPS = QUERIES / 4, /* at most */
    STRIP_MOST = 8        /* rows of a strip */
};

static const float LOG2E = 1.44269504f;
static const double LN2 = 0.69314718055994530942;

typedef struct job {
    const fsdp__attention *a;
    const fsdp__attention_grad *g;
    const fsdp__attention_tile *tile;
    const void *q, *k, *v, *out_read, *dout;
    void *out, *dq, *dk, *dv;
    float *lse;
    int64_t group;         /* G */
    int64_t queries, keys; /* of a tile */
    int64_t lds;           /* keys + LD_PAD */
    int64_t ldd;           /* P + LD_PAD */
    int64_t columns;       /* P */
    int64_t rows, cuts;    /* queries of one forward part, and parts of one (b,kv) */
    atomic_int failed;     /* a part had no memory */
} job;

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Takes n floats of a block, keeping the alignment to 64. */
static float *take(float **at, int64_t n)
{
    float *p = *at;
    *at += round_up(n, 16);
    return p;
}

/* ---- rows in and out --------------------------------------------------------- */

/* n rows (D) of x, stride apart, to y (padded,ldd) in f32; zeros beyond. */
static void load_rows(const job *j, const void *x, int64_t at, int64_t stride, int64_t n,
                      int64_t padded, float *y)
{
    const fsdp__attention *a = j->a;
    size_t size = fsdp_dtype_size(a->t);
    for (int64_t i = 0; i < n; i++) {
        const char *row = (const char *)x + (size_t)(at + i * stride) * size;
        j->tile->widen(row, a->t, a->D, y + i * j->ldd);
        if (j->columns > a->D) memset(y + i * j->ldd + a->D, 0, (size_t)(j->columns - a->D) * 4);
    }
    for (int64_t i = n; i < padded; i++)
        memset(y + i * j->ldd, 0, (size_t)j->columns * 4);
}

/* Memory begins to fetch rows that the next tile loads: they lie too far apart to be guessed. */
static void fetch_rows(const job *j, const void *x, int64_t at, int64_t stride, int64_t n)
{
    const int64_t size = (int64_t)fsdp_dtype_size(j->a->t), bytes = j->a->D * size;
    const char *row = (const char *)x + at * size;
    for (int64_t i = 0; i < n; i++, row += stride * size)
        for (int64_t k = 0; k < bytes; k += 64)
            __builtin_prefetch(row + k, 0, 2);
}

typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));

static void add_to(float *y, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        *(vec8 *)(y + i) += *(const vec8 *)(x + i);
    for (; i < n; i++)
        y[i] += x[i];
}

/* One row x (D) into, or added to, y of dtype dt. */
static void store_row(void *y, int64_t at, fsdp_dtype dt, const float *x, int64_t D, int add)
{
    char *p = (char *)y + (size_t)at * fsdp_dtype_size(dt);
    if (dt == FSDP_F16 && !add)
        fsdp__convert(p, dt, x, FSDP_F32, (size_t)D);
    else
        fsdp__kernel_set_for(FSDP_F32, dt)->copy(D, x, FSDP_F32, p, dt, add);
}

/* ---- one tile: which keys, dropout ----------------------------------------------- */

/* What the rows of one tile of queries see of one tile of keys, in keys of the
 * tile: by row, and by strip of mr rows in whole vectors. */
typedef struct view {
    int64_t lo[QUERIES], hi[QUERIES];
    int64_t strip_lo[STRIPS], strip_hi[STRIPS];
    int64_t rows, strips;
    int64_t min, max; /* over the strips; min >= max: nothing is seen */
    int same;         /* every strip sees the same columns */
} view;

/* Rows t0 .. t0+n-1 against the keys k0 .. k0+nk-1. */
static void view_make(const job *j, int64_t t0, int64_t n, int64_t k0, int64_t nk, view *w)
{
    int mr = j->tile->mr, nr = j->tile->nr;
    w->rows = n;
    w->strips = (n + mr - 1) / mr;
    w->min = KEYS, w->max = 0, w->same = 1;
    for (int64_t s = 0; s < w->strips; s++) {
        int64_t lo = KEYS, hi = 0;
        for (int64_t i = s * mr; i < min64(n, (s + 1) * mr); i++) {
            fsdp__attention_span(j->a, t0 + i, &w->lo[i], &w->hi[i]);
            w->lo[i] = max64(w->lo[i] - k0, 0);
            w->hi[i] = min64(w->hi[i] - k0, nk);
            if (w->hi[i] <= w->lo[i]) {
                w->lo[i] = w->hi[i] = 0;
                continue;
            }
            lo = min64(lo, w->lo[i]), hi = max64(hi, w->hi[i]);
        }
        if (hi <= lo) lo = hi = 0;
        w->strip_lo[s] = lo / nr * nr;
        w->strip_hi[s] = round_up(hi, nr);
        if (hi > lo) {
            w->min = min64(w->min, w->strip_lo[s]);
            w->max = max64(w->max, w->strip_hi[s]);
        }
        if (w->strip_lo[s] != w->strip_lo[0] || w->strip_hi[s] != w->strip_hi[0]) w->same = 0;
    }
}

/* Strips from s on that see the same columns; at least one. */
static int64_t view_run(const view *w, int64_t s)
{
    int64_t e = s + 1;
    while (e < w->strips && w->strip_lo[e] == w->strip_lo[s] && w->strip_hi[e] == w->strip_hi[s])
        e++;
    return e - s;
}

/* Scores of columns that row i does not see: minus infinity. */
static void hide(const view *w, int64_t i, int64_t strip, float *s, float value)
{
    for (int64_t k = w->strip_lo[strip]; k < w->lo[i]; k++)
        s[k] = value;
    for (int64_t k = max64(w->hi[i], w->strip_lo[strip]); k < w->strip_hi[strip]; k++)
        s[k] = value;
}

/* Factors of the weights (b,h,t, k0 + first ..) under dropout. */
static void keep_factors(const fsdp__attention *a, int64_t b, int64_t h, int64_t t, int64_t first,
                         int64_t n, float *keep)
{
    float kept = 1.0f / (1.0f - a->drop_p);
    fsdp__rng_uniform_fill(a->keys[b], (uint64_t)((h * a->T + t) * a->S + first), keep, (size_t)n);
    for (int64_t i = 0; i < n; i++)
        keep[i] = keep[i] >= a->drop_p ? kept : 0.0f;
}

/* ---- forward ------------------------------------------------------------------------ */

/* The scratch of one forward part. Rows of the G heads follow each other,
 * `rows` (padded) a head. */
typedef struct forward {
    float *q, *o;             /* (G * rows, ldd) */
    float *max, *sum;         /* (G * rows) */
    float *keys, *kt, *v, *s; /* (keys,ldd), (P,lds), (keys,ldd), (queries,lds) */
} forward;

static bool forward_take(const job *j, int64_t rows, forward *f)
{
    int64_t all = j->group * rows;
    int64_t total = 2 * round_up(all * j->ldd, 16) + 2 * round_up(all, 16) + 2 * j->keys * j->ldd +
                    j->columns * j->lds + j->queries * j->lds;
    float *at = fsdp__scratch(FSDP__SCRATCH_ATTENTION, (size_t)total * 4);
    if (!at) return false;
    f->q = take(&at, all * j->ldd), f->o = take(&at, all * j->ldd);
    f->max = take(&at, all), f->sum = take(&at, all);
    f->keys = take(&at, j->keys * j->ldd), f->v = take(&at, j->keys * j->ldd);
    f->kt = take(&at, j->columns * j->lds), f->s = take(&at, j->queries * j->lds);
    return true;
}

/* The scores of the strip from row r on become weights, and its older results are brought to the
 * new maxima. */
static void forward_weights(const job *j, const forward *f, const view *w, int64_t b, int64_t h,
                            int64_t t0, int64_t first, int64_t r, int64_t k0)
{
    const fsdp__attention_tile *x = j->tile;
    int64_t strip = r / x->mr, lo = w->strip_lo[strip], width = w->strip_hi[strip] - lo;
    int64_t rows = min64(x->mr, w->rows - r);
    float *s = f->s + r * j->lds, factor[STRIP_MOST], keep[KEYS];
    if (width <= 0) return;
    for (int64_t i = 0; i < rows; i++)
        hide(w, r + i, strip, s + i * j->lds, -INFINITY);
    x->softmax(s + lo, j->lds, rows, width, f->max + first + r, f->sum + first + r, factor);
    for (int64_t i = 0; i < rows; i++) {
        if (factor[i] != 1.0f) x->scale(f->o + (first + r + i) * j->ldd, j->columns, factor[i]);
        if (!(j->a->drop_p > 0)) continue;
        int64_t from = w->lo[r + i], seen = w->hi[r + i] - from;
        keep_factors(j->a, b, h, t0 + r + i, k0 + from, seen, keep);
        for (int64_t k = 0; k < seen; k++)
            s[i * j->lds + from + k] *= keep[k];
    }
}

/* One tile: scores, weights, and their product with the values. first: row of
 * f's arrays where the tile's queries begin. */
static void forward_tile(const job *j, const forward *f, int64_t b, int64_t h, int64_t t0,
                         int64_t first, int64_t n, int64_t k0, int64_t nk)
{
    const fsdp__attention *a = j->a;
    const fsdp__attention_tile *x = j->tile;
    view w;
    view_make(j, t0, n, k0, nk, &w);
    if (w.min >= w.max) return;
    for (int64_t s = 0, run; s < w.strips; s += run) {
        run = view_run(&w, s);
        int64_t lo = w.strip_lo[s], r = s * x->mr;
        x->multiply(run * x->mr, w.strip_hi[s] - lo, a->D, f->q + (first + r) * j->ldd, j->ldd, 1,
                    f->kt + lo, j->lds, f->s + r * j->lds + lo, j->lds, 0);
    }
    for (int64_t r = 0; r < n; r += x->mr)
        forward_weights(j, f, &w, b, h, t0, first, r, k0);
    /* Rows of the last strip beyond n: their sums are not read. */
    for (int64_t i = n; i < w.strips * x->mr; i++)
        memset(f->s + i * j->lds, 0, j->keys * 4);
    for (int64_t s = 0, run; s < w.strips; s += run) {
        run = view_run(&w, s);
        int64_t lo = w.strip_lo[s], r = s * x->mr;
        x->multiply(run * x->mr, j->columns, w.strip_hi[s] - lo, f->s + r * j->lds + lo, j->lds, 1,
                    f->v + lo * j->ldd, j->ldd, f->o + (first + r) * j->ldd, j->ldd, 1);
    }
}

static void forward_store(const job *j, const forward *f, int64_t b, int64_t h, int64_t t,
                          int64_t row)
{
    const fsdp__attention *a = j->a;
    float *o = f->o + row * j->ldd;
    int64_t lo, hi;
    fsdp__attention_span(a, t, &lo, &hi);
    if (hi > lo) j->tile->scale(o, j->columns, 1.0f / f->sum[row]);
    store_row(j->out, fsdp__attention_at(a->o_stride, b, t, h), a->t, o, a->D, 0);
    j->lse[(b * a->H + h) * a->T + t] =
        hi > lo ? (float)((double)f->max[row] * LN2 + log((double)f->sum[row])) : -INFINITY;
}

/* A tile of keys k0 .. k0+nk-1, transposed with the scores' factor. */
static void load_keys(const job *j, int64_t b, int64_t kv, int64_t k0, int64_t nk, float *keys,
                      float *kt)
{
    const fsdp__attention *a = j->a;
    load_rows(j, j->k, fsdp__attention_at(a->k_stride, b, k0, kv), a->k_stride[1], nk, j->keys,
              keys);
    j->tile->transpose(keys, j->ldd, j->keys, j->columns, a->scale * LOG2E, kt, j->lds);
}

/* The tile of keys and values from k0 on, as far as `end`. */
static void fetch_keys(const job *j, int64_t b, int64_t kv, int64_t k0, int64_t end)
{
    const fsdp__attention *a = j->a;
    int64_t n = min64(j->keys, end - k0);
    fetch_rows(j, j->k, fsdp__attention_at(a->k_stride, b, k0, kv), a->k_stride[1], n);
    fetch_rows(j, j->v, fsdp__attention_at(a->v_stride, b, k0, kv), a->v_stride[1], n);
}

/* What a part of the forward works on; the last cuts, which see most, go first. */
typedef struct place {
    int64_t b, kv;
    int64_t t0, n;  /* its queries */
    int64_t lo, hi; /* what they see of the keys */
} place;

static place place_of(const job *j, int64_t part)
{
    const fsdp__attention *a = j->a;
    place p = {.b = part / (a->KV * j->cuts), .kv = part / j->cuts % a->KV};
    int64_t unused;
    p.t0 = (j->cuts - 1 - part % j->cuts) * j->rows;
    p.n = min64(j->rows, a->T - p.t0);
    fsdp__attention_span(a, p.t0, &p.lo, &unused);
    fsdp__attention_span(a, p.t0 + p.n - 1, &unused, &p.hi);
    p.lo = p.lo / j->keys * j->keys;
    return p;
}

/* Queries i .. of head g of the group, as far as a tile reaches. */
static void fetch_queries(const job *j, const place *p, int64_t g, int64_t i)
{
    int64_t at = fsdp__attention_at(j->a->q_stride, p->b, p->t0 + i, p->kv * j->group + g);
    fetch_rows(j, j->q, at, j->a->q_stride[1], min64(j->queries, p->n - i));
}

/* The queries of a part, its results still zero. */
static void forward_begin(const job *j, const forward *f, const place *p, int64_t rows)
{
    const fsdp__attention *a = j->a;
    for (int64_t g = 0; g < j->group; g++) {
        load_rows(j, j->q, fsdp__attention_at(a->q_stride, p->b, p->t0, p->kv * j->group + g),
                  a->q_stride[1], p->n, rows, f->q + g * rows * j->ldd);
        for (int64_t i = 0; i < rows; i++) {
            f->max[g * rows + i] = -INFINITY;
            f->sum[g * rows + i] = 0;
            memset(f->o + (g * rows + i) * j->ldd, 0, (size_t)j->columns * 4);
        }
    }
}

/* One (b, kv, cut of the queries). Meanwhile memory fetches the next tile of keys, and with the
 * first tile the queries of the part that comes next, here or on another thread. */
static void forward_part(void *arg, int64_t part)
{
    job *j = arg;
    const fsdp__attention *a = j->a;
    const place p = place_of(j, part);
    const bool last = part + 1 == a->B * a->KV * j->cuts;
    const place next = last ? (place){0} : place_of(j, part + 1);
    int64_t rows = round_up(p.n, j->queries);
    forward f;
    if (!forward_take(j, rows, &f)) {
        atomic_store(&j->failed, 1);
        return;
    }
    forward_begin(j, &f, &p, rows);
    for (int64_t k0 = p.lo; k0 < p.hi; k0 += j->keys) {
        int64_t nk = min64(j->keys, a->S - k0);
        load_keys(j, p.b, p.kv, k0, nk, f.keys, f.kt);
        load_rows(j, j->v, fsdp__attention_at(a->v_stride, p.b, k0, p.kv), a->v_stride[1], nk,
                  j->keys, f.v);
        fetch_keys(j, p.b, p.kv, k0 + j->keys, p.hi);
        for (int64_t g = 0; g < j->group; g++)
            for (int64_t i = 0; i < p.n; i += j->queries) {
                if (k0 == p.lo && !last) fetch_queries(j, &next, g, i);
                forward_tile(j, &f, p.b, p.kv * j->group + g, p.t0 + i, g * rows + i,
                             min64(j->queries, p.n - i), k0, nk);
            }
    }
    for (int64_t g = 0; g < j->group; g++)
        for (int64_t i = 0; i < p.n; i++)
            forward_store(j, &f, p.b, p.kv * j->group + g, p.t0 + i, g * rows + i);
}

static void job_sizes(job *j)
{
    j->group = j->a->H / j->a->KV;
    j->queries = j->tile->queries;
    j->keys = j->tile->keys;
    j->lds = j->keys + LD_PAD;
    j->columns = round_up(j->a->D, j->tile->nr);
    j->ldd = j->columns + LD_PAD;
    j->rows = max64(PART_ROWS / j->group / j->queries, 1) * j->queries;
    j->cuts = (j->a->T + j->rows - 1) / j->rows;
}

static fsdp_status job_run(job *j, int64_t parts, void (*fn)(void *, int64_t))
{
    fsdp__parallel(parts, fn, j);
    if (!atomic_load(&j->failed)) return FSDP_OK;
    return fsdp__fail_memory("scratch of attention", (size_t)(4 * PART_ROWS * j->ldd));
}

fsdp_status fsdp__k_attention(const fsdp__attention *a, const void *q, const void *k, const void *v,
                              void *out, void *lse)
{
    job j = {.a = a, .tile = fsdp__attention_tile_get(), .q = q, .k = k, .v = v, .out = out};
    if (!j.tile || a->t == FSDP_F64) return fsdp__k_attention_plain(a, q, k, v, out, lse);
    if (a->B == 0 || a->T == 0 || a->H == 0) return FSDP_OK;
    j.lse = lse;
    job_sizes(&j);
    return job_run(&j, a->B * a->KV * j.cuts, forward_part);
}

/* ---- backward --------------------------------------------------------------------------- */

/* The scratch of one (b,kv). */
typedef struct backward {
    float *keys, *kt, *vt; /* (keys,ldd), (P,lds), (P,lds) */
    float *dk, *dv;        /* (keys,ldd) */
    float *q, *dout, *dq;  /* (queries,ldd) */
    float *s, *dp;         /* (queries,lds) */
    float *delta;          /* (G,T) */
    float *sums;           /* (G,T,D): dq in f32, unless dq itself is f32 */
} backward;

static bool backward_take(const job *j, backward *w)
{
    const fsdp__attention *a = j->a;
    bool narrow = j->dq && j->g->dt != FSDP_F32;
    int64_t rows = j->group * a->T;
    int64_t total = 3 * j->keys * j->ldd + 2 * j->columns * j->lds + 3 * j->queries * j->ldd +
                    2 * j->queries * j->lds + round_up(rows, 16) +
                    (narrow ? round_up(rows * a->D, 16) : 0);
    float *at = fsdp__scratch(FSDP__SCRATCH_ATTENTION, (size_t)total * 4);
    if (!at) return false;
    w->keys = take(&at, j->keys * j->ldd);
    w->dk = take(&at, j->keys * j->ldd), w->dv = take(&at, j->keys * j->ldd);
    w->kt = take(&at, j->columns * j->lds), w->vt = take(&at, j->columns * j->lds);
    w->q = take(&at, j->queries * j->ldd), w->dout = take(&at, j->queries * j->ldd);
    w->dq = take(&at, j->queries * j->ldd);
    w->s = take(&at, j->queries * j->lds), w->dp = take(&at, j->queries * j->lds);
    w->delta = take(&at, rows);
    w->sums = narrow ? take(&at, rows * a->D) : NULL;
    if (narrow) memset(w->sums, 0, (size_t)(rows * a->D) * 4);
    return true;
}

/* delta[t] = sum over d of dout * out, for each head of the group; and zeros
 * where dq is summed in place. */
static void backward_begin(const job *j, const backward *w, int64_t b, int64_t kv)
{
    const fsdp__attention *a = j->a;
    for (int64_t g = 0; g < j->group; g++)
        for (int64_t t = 0; t < a->T; t++) {
            int64_t h = kv * j->group + g, ahead = min64(a->T - 1 - t, ROWS_AHEAD);
            fetch_rows(j, j->out_read, fsdp__attention_at(a->o_stride, b, t + ahead, h), 0, 1);
            fetch_rows(j, j->dout, fsdp__attention_at(j->g->do_stride, b, t + ahead, h), 0, 1);
            load_rows(j, j->out_read, fsdp__attention_at(a->o_stride, b, t, h), 0, 1, 1, w->q);
            load_rows(j, j->dout, fsdp__attention_at(j->g->do_stride, b, t, h), 0, 1, 1, w->dout);
            w->delta[g * a->T + t] = j->tile->dot(w->q, w->dout, j->columns);
            if (j->dq && !w->sums && !j->g->add_q)
                memset((float *)j->dq + fsdp__attention_at(j->g->dq_stride, b, t, h), 0,
                       (size_t)a->D * 4);
        }
}

/* dv += p^T dout and dk += ds^T q, for the keys that some row sees; keys near
 * the diagonal begin with the first row that sees them. */
static void backward_keys(const job *j, const backward *w, const view *v)
{
    const fsdp__attention_tile *x = j->tile;
    int64_t step = v->same ? j->keys : j->tile->keys_part;
    for (int64_t k = v->min / j->tile->keys_part * j->tile->keys_part; k < v->max; k += step) {
        int64_t n = min64(step, round_up(v->max - k, j->tile->keys_part)), first = 0, end = v->rows;
        while (first < end && (v->hi[first] <= k || v->lo[first] >= k + n))
            first++;
        while (first < end && (v->hi[end - 1] <= k || v->lo[end - 1] >= k + n))
            end--;
        if (j->dv)
            x->multiply(n, j->columns, end - first, w->s + first * j->lds + k, 1, j->lds,
                        w->dout + first * j->ldd, j->ldd, w->dv + k * j->ldd, j->ldd, 1);
        if (j->dk)
            x->multiply(n, j->columns, end - first, w->dp + first * j->lds + k, 1, j->lds,
                        w->q + first * j->ldd, j->ldd, w->dk + k * j->ldd, j->ldd, 1);
    }
}

/* dq of the tile's rows, added to where they are summed. */
static void backward_queries(const job *j, const backward *w, const view *v, int64_t b, int64_t h,
                             int64_t t0, int64_t first)
{
    const fsdp__attention_tile *x = j->tile;
    const fsdp__attention *a = j->a;
    if (!j->dq) return;
    for (int64_t s = 0, run; s < v->strips; s += run) {
        run = view_run(v, s);
        int64_t lo = v->strip_lo[s], r = s * x->mr;
        if (v->strip_hi[s] <= lo) continue;
        /* Where whole strips of whole vectors lie there, they are added by the product itself. */
        bool direct = a->D == j->columns && r + run * x->mr <= v->rows;
        int64_t step = w->sums ? a->D : j->g->dq_stride[1];
        float *to = w->sums ? w->sums + (first + r) * a->D
                            : (float *)j->dq + fsdp__attention_at(j->g->dq_stride, b, t0 + r, h);
        x->multiply(run * x->mr, j->columns, v->strip_hi[s] - lo, w->dp + r * j->lds + lo, j->lds,
                    1, w->keys + lo * j->ldd, j->ldd, direct ? to : w->dq + r * j->ldd,
                    direct ? step : j->ldd, direct);
        for (int64_t i = r; !direct && i < min64(v->rows, r + run * x->mr); i++)
            add_to(to + (i - r) * step, w->dq + i * j->ldd, a->D);
    }
}

/* Weights and score gradients of row i in s and dp, zero where unseen. */
static void backward_row(const job *j, const backward *w, const view *v, int64_t b, int64_t h,
                         int64_t t, int64_t i, int64_t k0, float delta)
{
    const fsdp__attention *a = j->a;
    int64_t strip = i / j->tile->mr, lo = v->strip_lo[strip], hi = v->strip_hi[strip];
    float *s = w->s + i * j->lds, *dp = w->dp + i * j->lds, keep[KEYS];
    float lse = j->lse[(b * a->H + h) * a->T + t];
    if (hi > lo && v->hi[i] > v->lo[i]) {
        hide(v, i, strip, s, -INFINITY);
        hide(v, i, strip, dp, 0.0f);
        if (a->drop_p > 0) {
            memset(keep, 0, sizeof keep);
            keep_factors(a, b, h, t, k0 + v->lo[i], v->hi[i] - v->lo[i], keep + v->lo[i]);
        }
        j->tile->gradient(s + lo, dp + lo, hi - lo, lse * LOG2E, delta, a->scale,
                          a->drop_p > 0 ? keep + lo : NULL);
    } else {
        lo = hi = 0;
    }
    memset(s, 0, (size_t)lo * 4), memset(dp, 0, (size_t)lo * 4);
    memset(s + hi, 0, (size_t)(j->keys - hi) * 4), memset(dp + hi, 0, (size_t)(j->keys - hi) * 4);
}

/* One tile of queries t0 .. t0+n-1 of head g of the group. */
static void backward_tile(const job *j, const backward *w, int64_t b, int64_t kv, int64_t g,
                          int64_t t0, int64_t n, int64_t k0, int64_t nk)
{
    const fsdp__attention *a = j->a;
    const fsdp__attention_tile *x = j->tile;
    int64_t h = kv * j->group + g;
    view v;
    view_make(j, t0, n, k0, nk, &v);
    if (v.min >= v.max) return;
    load_rows(j, j->q, fsdp__attention_at(a->q_stride, b, t0, h), a->q_stride[1], n, j->queries,
              w->q);
    load_rows(j, j->dout, fsdp__attention_at(j->g->do_stride, b, t0, h), j->g->do_stride[1], n,
              j->queries, w->dout);
    int64_t next = t0 + j->queries, more = min64(j->queries, a->T - next);
    fetch_rows(j, j->q, fsdp__attention_at(a->q_stride, b, next, h), a->q_stride[1], more);
    fetch_rows(j, j->dout, fsdp__attention_at(j->g->do_stride, b, next, h), j->g->do_stride[1],
               more);
    for (int64_t s = 0, run; s < v.strips; s += run) {
        run = view_run(&v, s);
        int64_t lo = v.strip_lo[s], width = v.strip_hi[s] - lo, r = s * x->mr;
        x->multiply(run * x->mr, width, a->D, w->q + r * j->ldd, j->ldd, 1, w->kt + lo, j->lds,
                    w->s + r * j->lds + lo, j->lds, 0);
        x->multiply(run * x->mr, width, a->D, w->dout + r * j->ldd, j->ldd, 1, w->vt + lo, j->lds,
                    w->dp + r * j->lds + lo, j->lds, 0);
    }
    for (int64_t i = 0; i < n; i++)
        backward_row(j, w, &v, b, h, t0 + i, i, k0, w->delta[g * a->T + t0 + i]);
    for (int64_t i = n; i < v.strips * x->mr; i++) {
        memset(w->s + i * j->lds, 0, j->keys * 4);
        memset(w->dp + i * j->lds, 0, j->keys * 4);
    }
    backward_keys(j, w, &v);
    backward_queries(j, w, &v, b, h, t0, g * a->T + t0);
}

/* dk and dv of one tile of keys, complete. */
static void backward_store_keys(const job *j, const backward *w, int64_t b, int64_t kv, int64_t k0,
                                int64_t nk)
{
    const fsdp__attention_grad *g = j->g;
    for (int64_t i = 0; i < nk; i++) {
        if (j->dk)
            store_row(j->dk, fsdp__attention_at(g->dk_stride, b, k0 + i, kv), g->dt,
                      w->dk + i * j->ldd, j->a->D, g->add_k);
        if (j->dv)
            store_row(j->dv, fsdp__attention_at(g->dv_stride, b, k0 + i, kv), g->dt,
                      w->dv + i * j->ldd, j->a->D, g->add_v);
    }
}

/* One (b,kv): by tiles of keys, whose dk and dv are whole at the tile's end. */
static void backward_part(void *arg, int64_t part)
{
    job *j = arg;
    const fsdp__attention *a = j->a;
    int64_t b = part / a->KV, kv = part % a->KV;
    backward w;
    if (!backward_take(j, &w)) {
        atomic_store(&j->failed, 1);
        return;
    }
    backward_begin(j, &w, b, kv);
    for (int64_t k0 = 0; k0 < a->S; k0 += j->keys) {
        int64_t nk = min64(j->keys, a->S - k0);
        load_rows(j, j->v, fsdp__attention_at(a->v_stride, b, k0, kv), a->v_stride[1], nk, j->keys,
                  w.keys);
        j->tile->transpose(w.keys, j->ldd, j->keys, j->columns, 1.0f, w.vt, j->lds);
        load_keys(j, b, kv, k0, nk, w.keys, w.kt);
        fetch_keys(j, b, kv, k0 + j->keys, a->S);
        memset(w.dk, 0, (size_t)(j->keys * j->ldd) * 4);
        memset(w.dv, 0, (size_t)(j->keys * j->ldd) * 4);
        for (int64_t g = 0; g < j->group; g++)
            for (int64_t t0 = 0; t0 < a->T; t0 += j->queries)
                backward_tile(j, &w, b, kv, g, t0, min64(j->queries, a->T - t0), k0, nk);
        backward_store_keys(j, &w, b, kv, k0, nk);
    }
    for (int64_t i = 0; w.sums && i < j->group * a->T; i++)
        store_row(j->dq, fsdp__attention_at(j->g->dq_stride, b, i % a->T, kv * j->group + i / a->T),
                  j->g->dt, w.sums + i * a->D, a->D, j->g->add_q);
}

fsdp_status fsdp__k_attention_backward(const fsdp__attention *a, const fsdp__attention_grad *g,
                                       const void *q, const void *k, const void *v, const void *out,
                                       const void *dout, const void *lse, void *dq, void *dk,
                                       void *dv)
{
    job j = {.a = a,
             .g = g,
             .tile = fsdp__attention_tile_get(),
             .q = q,
             .k = k,
             .v = v,
             .out_read = out,
             .dout = dout,
             .dq = dq,
             .dk = dk,
             .dv = dv,
             .lse = (float *)(uintptr_t)lse};
    if (!j.tile || a->t == FSDP_F64)
        return fsdp__k_attention_backward_plain(a, g, q, k, v, out, dout, lse, dq, dk, dv);
    if (a->B == 0 || a->H == 0) return FSDP_OK;
    job_sizes(&j);
    return job_run(&j, a->B * a->KV, backward_part);
}
