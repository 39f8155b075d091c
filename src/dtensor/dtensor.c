/*
 * dtensor.c - layouts, and the whole tensor back from its parts.
 *
 * At most one mesh axis cuts a tensor; others hold copies.
 */
#include "dtensor/dtensor.h"

#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "tensor/kernels.h"

fsdp__cut fsdp__cut_of(int ndim, const int64_t *sizes, int dim, int n)
{
    fsdp__cut c = {1, ndim ? sizes[dim] : 1, 1, 0};
    for (int i = 0; i < dim; i++)
        c.outer *= sizes[i];
    for (int i = dim + 1; i < ndim; i++)
        c.inner *= sizes[i];
    c.chunk = (c.dim + n - 1) / n;
    return c;
}

int64_t fsdp__cut_rows(const fsdp__cut *c, int r, int64_t *row0)
{
    int64_t first = r * c->chunk, end = first + c->chunk;
    if (first > c->dim) first = c->dim;
    if (end > c->dim) end = c->dim;
    if (row0) *row0 = first;
    return end - first;
}

static void layout_free(fsdp__dist *d)
{
    free(d);
}

static void layout_describe(const fsdp__dist *d, fsdp__str *out)
{
    const fsdp__layout *l = (const fsdp__layout *)d;
    for (int a = 0; a < fsdp_mesh_ndim(l->mesh); a++) {
        if (a) fsdp__str_add(out, ", ");
        if (l->place[a].kind == FSDP_SHARD)
            fsdp__str_addf(out, "Shard(%d)", l->place[a].dim);
        else
            fsdp__str_add(out, "Replicate");
        fsdp__str_addf(out, " on %s", fsdp_mesh_axis_name(l->mesh, a));
    }
}

static void layout_block(const fsdp__dist *d, int64_t *outer, int64_t *dim, int64_t *inner,
                         int64_t *row0, int64_t *rows)
{
    const fsdp__layout *l = (const fsdp__layout *)d;
    int a = fsdp__layout_shard_axis(l);
    fsdp__cut c = fsdp__cut_of(l->ndim, l->size, a < 0 ? 0 : l->place[a].dim,
                               a < 0 ? 1 : fsdp_mesh_size(l->mesh, a));
    *rows = fsdp__cut_rows(&c, a < 0 ? 0 : fsdp_mesh_coordinate(l->mesh, a), row0);
    *outer = c.outer;
    *dim = c.dim;
    *inner = c.inner;
}

static void layout_shape(const fsdp__dist *d, int *ndim, const int64_t **sizes)
{
    const fsdp__layout *l = (const fsdp__layout *)d;
    *ndim = l->ndim;
    *sizes = l->size;
}

static const fsdp__dist_ops layout_ops = {layout_free, layout_describe, layout_block, layout_shape,
                                          fsdp_dtensor_full};

fsdp__layout *fsdp__layout_create(fsdp_mesh *mesh, const fsdp_placement *place, int ndim,
                                  const int64_t *sizes)
{
    fsdp__layout *l = fsdp__calloc(1, sizeof *l, "a layout");
    if (!l) return NULL;
    l->base.ops = &layout_ops;
    l->base.refs = 1;
    l->mesh = mesh;
    memcpy(l->place, place, sizeof *place * (size_t)fsdp_mesh_ndim(mesh));
    l->ndim = ndim;
    memcpy(l->size, sizes, sizeof *sizes * (size_t)ndim);
    return l;
}

void fsdp__layout_attach(fsdp_tensor *t, fsdp__layout *l)
{
    t->dist = &l->base;
}

void fsdp__layout_share(fsdp_tensor *to, const fsdp_tensor *from)
{
    if (!from->dist || to->dist) return;
    from->dist->refs++;
    to->dist = from->dist;
}

const fsdp__layout *fsdp__layout_of(const fsdp_tensor *t)
{
    return t && t->dist && t->dist->ops == &layout_ops ? (const fsdp__layout *)t->dist : NULL;
}

int fsdp__layout_shard_axis(const fsdp__layout *l)
{
    for (int a = 0; a < fsdp_mesh_ndim(l->mesh); a++)
        if (l->place[a].kind == FSDP_SHARD) return a;
    return -1;
}

/* ---- public -------------------------------------------------------------------- */

int fsdp_is_dtensor(const fsdp_tensor *t)
{
    return fsdp__layout_of(t) != NULL;
}

fsdp_mesh *fsdp_dtensor_mesh(const fsdp_tensor *t)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    return l ? l->mesh : NULL;
}

fsdp_placement fsdp_dtensor_placement(const fsdp_tensor *t, int axis)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    if (l && axis >= 0 && axis < fsdp_mesh_ndim(l->mesh)) return l->place[axis];
    return (fsdp_placement){FSDP_REPLICATE, 0};
}

int fsdp_dtensor_ndim(const fsdp_tensor *t)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    return l ? l->ndim : fsdp_ndim(t);
}

const int64_t *fsdp_dtensor_sizes(const fsdp_tensor *t)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    return l ? l->size : fsdp_sizes(t);
}

fsdp_tensor *fsdp_dtensor_local(fsdp_tensor *t)
{
    return fsdp_detach(t);
}

/* Parts are padded to equal blocks for the exchange, and the padding dropped. */
static fsdp_status gather_into(fsdp_tensor *full, const fsdp_tensor *t, const fsdp__cut *c,
                               fsdp_group *g)
{
    int n = fsdp_group_size(g);
    size_t width = fsdp_dtype_size(t->dtype);
    int64_t block = c->outer * c->chunk * c->inner * (int64_t)width;
    FSDP_TRY(fsdp__account_take(FSDP_COMMUNICATION, (n + 1) * block, "a gathered tensor"));
    char *send = fsdp__calloc(1, (size_t)block, "a part of a tensor");
    char *recv = fsdp__calloc((size_t)n, (size_t)block, "a gathered tensor");
    fsdp_status s = send && recv ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK && fsdp_numel(t)) memcpy(send, fsdp_data(t), (size_t)fsdp_numel(t) * width);
    if (s == FSDP_OK) s = fsdp_all_gather(g, FSDP_LANE_CONTROL, send, recv, block, NULL);
    for (int r = 0; r < n && s == FSDP_OK; r++) {
        int64_t row0, rows = fsdp__cut_rows(c, r, &row0);
        size_t run = (size_t)(rows * c->inner) * width;
        for (int64_t o = 0; o < c->outer && run; o++)
            memcpy((char *)fsdp_data(full) + (size_t)((o * c->dim + row0) * c->inner) * width,
                   recv + (size_t)(r * block) + (size_t)o * run, run);
    }
    free(send);
    free(recv);
    fsdp__account_give(FSDP_COMMUNICATION, (n + 1) * block);
    return s;
}

fsdp_tensor *fsdp_dtensor_full(fsdp_tensor *t)
{
    if (!t || fsdp_error()) return NULL;
    const fsdp__layout *l = fsdp__layout_of(t);
    int a = l ? fsdp__layout_shard_axis(l) : -1;
    if (fsdp__tensor_readable(t, "fsdp_dtensor_full") != FSDP_OK) return NULL;
    fsdp_tensor *full =
        fsdp__tensor_create(t->dtype, fsdp_dtensor_ndim(t), fsdp_dtensor_sizes(t), FSDP_CPU);
    if (!full) return NULL;
    if (a < 0) {
        fsdp_tensor *local = fsdp_detach(t);
        return fsdp_copy_(full, local) == FSDP_OK ? full : NULL;
    }
    fsdp__cut c = fsdp__cut_of(l->ndim, l->size, l->place[a].dim, fsdp_mesh_size(l->mesh, a));
    fsdp_status s = gather_into(full, t, &c, fsdp_mesh_group(l->mesh, a));
    return s == FSDP_OK ? full : NULL;
}
