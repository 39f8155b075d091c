/*
 * parity_compare.c - numbers of files, and how far the model's are from them.
 *
 * Each rank compares what it holds; maxima and sums over ranks make one error, the same on all.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "dtensor/dtensor.h"
#include "nn/module.h"
#include "train/parity_internal.h"

/* ---- files ------------------------------------------------------------------------ */

static const fsdp__st_tensor *need(fsdp__st *st, const char *name)
{
    const fsdp__st_tensor *t = fsdp__st_find(st, name);
    if (!t)
        fsdp__fail(FSDP_INVALID_DATA, "%s: found no tensor '%s', expected it to compare with",
                   fsdp__st_path(st), name);
    return t;
}

/* Elements [first, first + n) as dtype t. The caller frees them. */
static void *read_part(fsdp__st *st, const fsdp__st_tensor *t, int64_t first, int64_t n,
                       fsdp_dtype as)
{
    int64_t width = (int64_t)fsdp_dtype_size(t->dtype);
    void *out = fsdp__calloc((size_t)n, fsdp_dtype_size(as), t->name);
    void *raw = out ? fsdp__calloc((size_t)n, (size_t)width, t->name) : NULL;
    if (raw && fsdp__st_read(st, t, first * width, n * width, raw) == FSDP_OK) {
        fsdp__convert(out, as, raw, t->dtype, (size_t)n);
        free(raw);
        return out;
    }
    free(raw);
    free(out);
    return NULL;
}

void *fsdp__parity_read(fsdp__st *st, const char *name, fsdp_dtype as, int ndim, int64_t *sizes)
{
    const fsdp__st_tensor *t = need(st, name);
    if (!t) return NULL;
    if (t->ndim != ndim || fsdp_dtype_is_floating(t->dtype) != fsdp_dtype_is_floating(as) ||
        t->numel == 0) {
        fsdp__fail(FSDP_INVALID_DATA,
                   "%s: '%s' is %s with %d dims and %lld elements; expected %s with %d dims, not "
                   "empty",
                   fsdp__st_path(st), name, t->dtype_name, t->ndim, (long long)t->numel,
                   fsdp_dtype_name(as), ndim);
        return NULL;
    }
    memcpy(sizes, t->shape, sizeof *sizes * (size_t)ndim);
    return read_part(st, t, 0, t->numel, as);
}

fsdp_status fsdp__parity_read_scalar(fsdp__st *st, const char *name, double *out)
{
    const fsdp__st_tensor *t = need(st, name);
    if (!t) return fsdp_error();
    if (t->numel != 1)
        return fsdp__fail(FSDP_INVALID_DATA, "%s: '%s' has %lld elements; expected one",
                          fsdp__st_path(st), name, (long long)t->numel);
    double *x = read_part(st, t, 0, 1, FSDP_F64);
    if (!x) return fsdp_error();
    *out = *x;
    free(x);
    return FSDP_OK;
}

/* ---- the report ---------------------------------------------------------------------- */

fsdp__parity_check *fsdp__parity_add(fsdp__parity_run *r, const char *what, const char *measure,
                                     double bound)
{
    fsdp__parity_check *c = &r->report->check[r->report->count++];
    *c = (fsdp__parity_check){.what = what, .measure = measure, .bound = bound * r->o->tolerance};
    return c;
}

void fsdp__parity_note(fsdp__parity_check *c, double error, const char *fmt, ...)
{
    if (isnan(error)) error = INFINITY;
    if (c->count++ && error <= c->error) return;
    c->error = error;
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->at, sizeof c->at, fmt, args);
    va_end(args);
}

/* ---- parameters and gradients ----------------------------------------------------------- */

/* What two arrays say: the largest (or summed squared) difference and value. */
static void compare(const double *a, const double *b, int64_t n, bool frobenius, double *pair)
{
    for (int64_t i = 0; i < n; i++) {
        double d = fabs(a[i] - b[i]), v = fabs(b[i]);
        if (frobenius) {
            pair[0] += d * d;
            pair[1] += v * v;
        } else {
            if (!(d <= pair[0])) pair[0] = isnan(d) ? INFINITY : d;
            if (v > pair[1]) pair[1] = v;
        }
    }
}

/* This rank's part of one tensor against its rows of the file's; x NULL: zeros. */
static fsdp_status compare_part(fsdp__st *st, const char *name, const fsdp_param *p,
                                const fsdp_tensor *x, bool frobenius, double *pair)
{
    const fsdp__st_tensor *w = need(st, name);
    if (!w) return fsdp_error();
    const fsdp_tensor *t = fsdp__param_kept(p);
    if (w->ndim != p->ndim || memcmp(w->shape, p->size, sizeof *w->shape * (size_t)w->ndim))
        return fsdp__fail(FSDP_INVALID_DATA, "%s: '%s' has another shape than the parameter",
                          fsdp__st_path(st), name);
    int64_t outer = 1, dim = fsdp_numel(t), inner = 1, row0 = 0, rows = dim;
    if (t->dist) t->dist->ops->block(t->dist, &outer, &dim, &inner, &row0, &rows);
    int64_t run = rows * inner;
    double *mine = fsdp__calloc((size_t)run, sizeof *mine, name);
    fsdp_status s = mine ? FSDP_OK : fsdp_error();
    for (int64_t o = 0; o < outer && run && s == FSDP_OK; o++) {
        double *theirs = read_part(st, w, (o * dim + row0) * inner, run, FSDP_F64);
        if (!theirs) {
            s = fsdp_error();
            break;
        }
        if (x)
            fsdp__convert(mine, FSDP_F64,
                          (const char *)fsdp_data(x) +
                              (size_t)(o * run) * fsdp_dtype_size(x->dtype),
                          x->dtype, (size_t)run);
        compare(mine, theirs, run, frobenius, pair);
        free(theirs);
    }
    free(mine);
    return s;
}

/* Of ranks that hold the same part, the first adds to a sum. */
static bool counts(const fsdp_param *p)
{
    const fsdp__layout *l = fsdp__layout_of(fsdp__param_kept(p));
    if (!l) return fsdp_rank() == 0;
    int a = fsdp__layout_shard_axis(l);
    for (int k = 0; k < fsdp_mesh_ndim(l->mesh); k++)
        if (k != a && fsdp_mesh_coordinate(l->mesh, k) != 0) return false;
    return a >= 0 || fsdp_rank() == 0;
}

fsdp_status fsdp__parity_params(fsdp__parity_run *r, fsdp__st *st, const char *prefix,
                                bool gradients, bool frobenius, fsdp__parity_check *c)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(r->model, &l));
    double *pair = fsdp__calloc(2 * (size_t)l.count, sizeof *pair, "errors of parameters");
    fsdp_status s = pair ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        const fsdp_param *p = l.items[i].param;
        fsdp_tensor *t = fsdp__param_kept(p);
        fsdp__str name = {0};
        fsdp__str_addf(&name, "%s%s", prefix, l.items[i].name);
        if (!frobenius || counts(p))
            s = compare_part(st, fsdp__str_get(&name), p, gradients ? fsdp_grad(t) : t, frobenius,
                             pair + 2 * i);
        fsdp__str_free(&name);
    }
    if (s == FSDP_OK)
        s = fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, pair, 2 * l.count, FSDP_F64,
                            frobenius ? FSDP_SUM : FSDP_MAX, NULL);
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        double d = pair[2 * i], v = pair[2 * i + 1];
        if (frobenius) d = sqrt(d), v = sqrt(v);
        fsdp__parity_note(c, d == 0.0 ? 0.0 : d / v, "%s", l.items[i].name);
    }
    free(pair);
    fsdp_param_list_free(&l);
    return s;
}
