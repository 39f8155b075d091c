/*
 * clip.c - the global norm of the gradients, and clipping by it.
 *
 * Each row of dim 0 of each parameter gives one number; a rank knows those of
 * its own rows. One all-reduce of the vector of all rows (zeros elsewhere, so
 * the sum is exact) tells every rank all of them (one for each group that cuts
 * parameters), and the vector is summed as one binary tree in row order. So the norm depends
 * neither on the number of ranks nor on the strategy. Rows that are cut (along other dims) give
 * partial numbers, which the all-reduce sums in rank order.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm.h"
#include "dtensor/dtensor.h"
#include "fsdp/optim.h"
#include "nn/module.h"
#include "optim/optim_internal.h"
#include "tensor/kernels.h"

/* The largest of n numbers that are not negative; NaN if any is. */
static double largest(const double *x, int64_t n)
{
    double most = 0.0;
    for (int64_t i = 0; i < n; i++)
        most = isnan(x[i]) || isnan(most) ? NAN : fmax(most, x[i]);
    return most;
}

/* Sum of |x|^p of one run, or its largest |x|. */
static double run_power(const void *x, fsdp_dtype t, int64_t n, double p)
{
    if (p == 2.0) return fsdp__sum_squares(x, t, (size_t)n);
    double s = 0.0, part[256];
    size_t width = fsdp_dtype_size(t);
    for (int64_t i = 0; i < n; i += 256) {
        int64_t m = n - i < 256 ? n - i : 256;
        fsdp__convert(part, FSDP_F64, (const char *)x + (size_t)i * width, t, (size_t)m);
        for (int64_t k = 0; k < m; k++) {
            double a = fabs(part[k]);
            if (isinf(p))
                s = isnan(a) || isnan(s) ? NAN : fmax(s, a);
            else
                s += p == 1.0 ? a : pow(a, p);
        }
    }
    return s;
}

/* Puts the rows that this rank has of one gradient at their place. */
static void put_rows(const fsdp_param *p, const fsdp_tensor *t, const fsdp_tensor *g, double pw,
                     double *row)
{
    int64_t outer = 1, dim = p->size[0], inner = fsdp__numel_of(p->ndim - 1, p->size + 1), row0 = 0,
            rows = dim;
    if (t->dist) t->dist->ops->block(t->dist, &outer, &dim, &inner, &row0, &rows);
    const char *x = fsdp_data(g);
    size_t width = fsdp_dtype_size(g->dtype);
    if (dim == p->size[0] && outer == 1) { /* cut along dim 0, or not at all */
        for (int64_t r = 0; r < rows; r++)
            row[row0 + r] = run_power(x + (size_t)(r * inner) * width, g->dtype, inner, pw);
        return;
    }
    int64_t d0 = p->size[0], len = d0 ? fsdp_numel(g) / d0 : 0;
    for (int64_t r = 0; r < d0; r++)
        row[r] = run_power(x + (size_t)(r * len) * width, g->dtype, len, pw);
}

static fsdp_group *shard_group(const fsdp_tensor *t)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    int a = l ? fsdp__layout_shard_axis(l) : -1;
    fsdp_group *g = a < 0 ? NULL : fsdp_mesh_group(l->mesh, a);
    return g && fsdp_group_size(g) > 1 ? g : NULL;
}

/* Gradients in a file: reads those of the next few parameters. */
static void read_ahead(const fsdp_param_list *l, int64_t i)
{
    enum { FEW = 8 };
    for (int64_t k = i + 1; k < l->count && k <= i + FEW; k++) {
        const fsdp_tensor *g = fsdp_grad(fsdp__param_kept(l->items[k].param));
        if (g && !fsdp__storage_ahead(g->st)) return;
    }
}

/* The groups that cut parameters of the list, in its order, so the same ones on all ranks. */
typedef struct cuts {
    fsdp_group *g[16];
    int n;
} cuts;

static fsdp_status find_cuts(const fsdp_param_list *l, cuts *c)
{
    const int most = sizeof c->g / sizeof *c->g;
    c->n = 0;
    for (int64_t i = 0; i < l->count; i++) {
        fsdp_group *own = shard_group(fsdp__param_kept(l->items[i].param));
        bool known = !own;
        for (int k = 0; k < c->n; k++)
            known = known || c->g[k] == own;
        if (known) continue;
        if (c->n == most)
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "gradient norm over more than %d shard groups (%s is cut over %s); "
                              "give units that are cut alike one mesh",
                              most, l->items[i].name, fsdp_group_name(own));
        c->g[c->n++] = own;
    }
    return FSDP_OK;
}

static int64_t rows_of(const fsdp_param *p)
{
    return p->ndim ? p->size[0] : 1;
}

/* The rows of the parameters that group k cuts are summed over it; those that nothing cuts go with
 * the first. room: as many numbers as row. */
static fsdp_status sum_rows(const fsdp_param_list *l, const cuts *c, int k, fsdp_reduce_op op,
                            double *row, double *room)
{
    for (int back = 0; back < 2; back++) {
        int64_t at = 0, n = 0;
        for (int64_t i = 0; i < l->count; i++) {
            int64_t rows = rows_of(l->items[i].param);
            fsdp_group *own = shard_group(fsdp__param_kept(l->items[i].param));
            if (own == c->g[k] || (!own && k == 0)) {
                memcpy(back ? row + at : room + n, back ? room + n : row + at,
                       (size_t)rows * sizeof *row);
                n += rows;
            }
            at += rows;
        }
        if (!back)
            FSDP_TRY(fsdp_all_reduce(c->g[k], FSDP_LANE_CONTROL, room, n, FSDP_F64, op, NULL));
    }
    return FSDP_OK;
}

fsdp_status fsdp_grad_norm(fsdp_module *m, double p, double *norm)
{
    if (fsdp_error()) return fsdp_error();
    if (!m || !norm)
        return fsdp__fail_null("fsdp_grad_norm", m ? "the place for the norm" : "the module");
    if (!(p > 0.0)) return fsdp__fail(FSDP_INVALID_ARGUMENT, "norm %g; expected above 0", p);
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    int64_t total = 0, at = 0, found = 0;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++)
        s = fsdp__opt_refuse_early(l.items[i].param, "the norm of all gradients");
    for (int64_t i = 0; i < l.count; i++)
        found += fsdp_grad(fsdp__param_kept(l.items[i].param)) != NULL;
    for (int64_t i = 0; i < l.count && s == FSDP_OK && found == 0; i++)
        s = fsdp__opt_refuse_unreduced(l.items[i].param, "fsdp_grad_norm");
    for (int64_t i = 0; i < l.count; i++)
        total += rows_of(l.items[i].param);
    double *row = fsdp__calloc(2 * (size_t)total + 1, sizeof *row, "the norm's rows");
    cuts c = {0};
    if (s == FSDP_OK) s = row ? find_cuts(&l, &c) : fsdp_error();
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        const fsdp_param *q = l.items[i].param;
        fsdp_tensor *t = fsdp__param_kept(q), *g = fsdp_grad(t);
        read_ahead(&l, i);
        if (g && (s = fsdp__storage_use(g->st)) != FSDP_OK) break;
        if (g && q->ndim) put_rows(q, t, g, p, row + at);
        if (g && !q->ndim) row[at] = run_power(fsdp_data(g), g->dtype, 1, p);
        if (g) fsdp__storage_done(g->st, false);
        /* What is not cut is known to all ranks of the group: one of them says it. */
        int64_t n = rows_of(q);
        if (c.n > 0 && fsdp_group_rank(c.g[0]) != 0 && !isinf(p) && !shard_group(t))
            memset(row + at, 0, (size_t)n * sizeof *row);
        at += n;
    }
    for (int k = 0; k < c.n && s == FSDP_OK; k++)
        s = sum_rows(&l, &c, k, isinf(p) ? FSDP_MAX : FSDP_SUM, row, row + total);
    if (s == FSDP_OK) {
        double sum = isinf(p) ? largest(row, total) : fsdp__tree_sum(row, total);
        *norm = isinf(p) ? sum : p == 2.0 ? sqrt(sum) : p == 1.0 ? sum : pow(sum, 1.0 / p);
    }
    free(row);
    fsdp_param_list_free(&l);
    return s;
}

fsdp_status fsdp_clip_grads_with_norm(fsdp_module *m, double max_norm, double norm)
{
    if (fsdp_error()) return fsdp_error();
    if (!(max_norm >= 0.0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "clipping at %g; expected 0 or more", max_norm);
    if (!isfinite(norm))
        return fsdp__fail(FSDP_NON_FINITE,
                          "the gradient norm is %g; no gradient was scaled and no weight changed",
                          norm);
    double f = max_norm / (norm + 1e-6);
    if (f >= 1.0) return FSDP_OK;
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp_tensor *g = fsdp_grad(fsdp__param_kept(l.items[i].param));
        read_ahead(&l, i);
        if (!g || (s = fsdp__storage_use(g->st)) != FSDP_OK) continue;
        fsdp__k_unary(FSDP__UNARY_scale, fsdp_data(g), g->dtype, fsdp_numel(g), f, fsdp_data(g));
        fsdp_touch(g);
        fsdp__storage_done(g->st, true);
    }
    fsdp_param_list_free(&l);
    return s;
}

fsdp_status fsdp_clip_grad_norm(fsdp_module *m, double max_norm, double *norm)
{
    double n = 0.0;
    if (!(max_norm >= 0.0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "clipping at %g; expected 0 or more", max_norm);
    FSDP_TRY(fsdp_grad_norm(m, 2.0, &n));
    if (norm) *norm = n;
    return fsdp_clip_grads_with_norm(m, max_norm, n);
}
