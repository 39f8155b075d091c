/*
 * merge.c - adapters into the weights that they stand beside.
 *
 * Each rank adds to the rows that it holds, from whole adapters: these are small. An element of the
 * product is one sum over the rank's dim in order, in f32, so it does not depend on the cut. All
 * gathers come first: when a rank fails in one, no weight has changed.
 *
 * With u (rows, r) and v (r, cols) the update of a weight (rows, cols) is scale * u v: u = B, v = A
 * for a weight (out, in), u = A^T, v = B^T for one (in, out).
 */
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "lora/lora.h"

typedef struct product {
    float *u, *v;       /* (rows, r), (r, cols) */
    int64_t rows, cols; /* of the whole weight */
} product;

/* x (n, m) -> (m, n) */
static void transpose(float *x, int64_t n, int64_t m, float *out)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++)
            out[j * n + i] = x[i * m + j];
}

/* The whole of p, in f32, (n) elements; turned if asked. */
static float *whole(const fsdp_param *p, bool turn)
{
    fsdp_tensor *t = fsdp__param_kept(p);
    size_t n = (size_t)fsdp__numel_of(p->ndim, p->size);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *full = !scope ? NULL : t->dist ? t->dist->ops->full(t) : t;
    if (full && fsdp__tensor_readable(full, "fsdp_lora_merge") != FSDP_OK) full = NULL;
    float *x = full ? fsdp__calloc(n, sizeof *x, "a whole adapter") : NULL;
    float *y = x && turn ? fsdp__calloc(n, sizeof *y, "a whole adapter") : NULL;
    if (x) fsdp__convert(x, FSDP_F32, fsdp_data(full), full->dtype, n);
    fsdp_scope_end(scope);
    if (!turn || !x) return x;
    if (y) transpose(x, p->size[0], p->size[1], y);
    free(x);
    return y;
}

static fsdp_status gather(const fsdp__lora *l, product *out)
{
    const fsdp_param *a = fsdp_module_param(l->a, "weight"), *b = fsdp_module_param(l->b, "weight");
    bool turn = l->info.in_out;
    FSDP_TRY(fsdp__tensor_readable(fsdp__param_kept(l->info.weight), "fsdp_lora_merge"));
    FSDP_TRY(fsdp__tensor_writable(fsdp__param_kept(l->info.weight), "fsdp_lora_merge"));
    out->u = whole(turn ? a : b, turn);
    out->v = out->u ? whole(turn ? b : a, turn) : NULL;
    out->rows = l->info.weight->size[0];
    out->cols = l->info.weight->size[1];
    return out->v ? FSDP_OK : fsdp_error();
}

/* w (n) += scale * the elements [first, first + n) of row `row` of u v; sum and old hold n. */
static void add_run(const fsdp__lora *l, const product *p, int64_t row, int64_t first, int64_t n,
                    char *w, fsdp_dtype t, float *sum, float *old)
{
    memset(sum, 0, (size_t)n * sizeof *sum);
    for (int64_t k = 0; k < l->rank; k++) {
        float u = p->u[row * l->rank + k];
        const float *v = p->v + k * p->cols + first;
        for (int64_t j = 0; j < n; j++)
            sum[j] += u * v[j];
    }
    fsdp__convert(old, FSDP_F32, w, t, (size_t)n);
    for (int64_t j = 0; j < n; j++)
        old[j] += (float)l->scale * sum[j];
    fsdp__convert(w, t, old, FSDP_F32, (size_t)n);
}

/* The part of the weight that this rank holds; scratch (2, cols). */
static void add_product(const fsdp__lora *l, const product *p, float *scratch)
{
    fsdp_tensor *t = fsdp__param_kept(l->info.weight);
    int64_t outer = 1, dim = fsdp_numel(t), inner = 1, row0 = 0, rows = dim;
    if (t->dist) t->dist->ops->block(t->dist, &outer, &dim, &inner, &row0, &rows);
    size_t width = fsdp_dtype_size(t->dtype);
    char *w = fsdp_data(t);
    for (int64_t o = 0; o < outer; o++) {
        /* Elements [at, end) of the whole, in runs inside one of its rows. */
        int64_t at = (o * dim + row0) * inner, end = at + rows * inner;
        while (at < end) {
            int64_t row = at / p->cols, first = at % p->cols, n = p->cols - first;
            if (n > end - at) n = end - at;
            add_run(l, p, row, first, n, w, t->dtype, scratch, scratch + p->cols);
            w += (size_t)n * width;
            at += n;
        }
    }
    fsdp_touch(t); /* gathered copies are stale */
    t->st->shard_version++;
}

static fsdp_status check(const fsdp__lora_list *l)
{
    if (l->count == 0)
        return fsdp__fail(FSDP_INVALID_STATE, "fsdp_lora_merge: the model has no adapters");
    if (l->items[0]->merged)
        return fsdp__fail(FSDP_INVALID_STATE, "fsdp_lora_merge: the adapters are merged already");
    return FSDP_OK;
}

fsdp_status fsdp_lora_merge(fsdp_module *m)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_lora_merge", "the module");
    fsdp__lora_list l;
    product *p = NULL;
    float *scratch = NULL;
    int64_t widest = 0;
    fsdp_status s;
    FSDP_TRY(fsdp__lora_list_of(m, &l));
    FSDP_GO(check(&l));
    p = fsdp__calloc((size_t)l.count, sizeof *p, "adapters to merge");
    if (!p) FSDP_GO(fsdp_error());
    for (int64_t i = 0; i < l.count; i++) {
        FSDP_GO(gather(l.items[i], &p[i]));
        if (p[i].cols > widest) widest = p[i].cols;
    }
    scratch = fsdp__calloc((size_t)(2 * widest), sizeof *scratch, "a row of a weight");
    if (!scratch) FSDP_GO(fsdp_error());
    for (int64_t i = 0; i < l.count; i++) {
        add_product(l.items[i], &p[i], scratch);
        l.items[i]->merged = true;
    }
done:
    for (int64_t i = 0; p && i < l.count; i++) {
        free(p[i].u);
        free(p[i].v);
    }
    free(p);
    free(scratch);
    free(l.items);
    return s;
}
