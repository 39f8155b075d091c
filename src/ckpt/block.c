/*
 * block.c - boxes of tensors: who holds what, and reading the overlap of two.
 *
 * An overlap is read in runs: the longest stretches that lie one after the other both in the file
 * and in memory. Where dim 0 is cut that is one read.
 */
#include "ckpt/block.h"

#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "dtensor/dtensor.h"
#include "nn/module.h"

fsdp__block fsdp__block_of(const fsdp_param *p)
{
    const fsdp_tensor *t = fsdp__param_kept(p);
    fsdp__block b = {.ndim = p->ndim};
    memcpy(b.whole, p->size, sizeof b.whole);
    memcpy(b.size, t->size, sizeof b.size);
    const fsdp__layout *l = fsdp__layout_of(t);
    int axis = l ? fsdp__layout_shard_axis(l) : -1;
    if (axis >= 0) {
        int dim = l->place[axis].dim;
        fsdp__cut cut = fsdp__cut_of(p->ndim, p->size, dim, fsdp_mesh_size(l->mesh, axis));
        fsdp__cut_rows(&cut, fsdp_mesh_coordinate(l->mesh, axis), &b.at[dim]);
    }
    return b;
}

int64_t fsdp__block_numel(const fsdp__block *b)
{
    int64_t n = 1;
    for (int d = 0; d < b->ndim; d++)
        n *= b->size[d];
    return n;
}

bool fsdp__block_common(const fsdp__block *a, const fsdp__block *b, fsdp__block *out)
{
    *out = *a;
    for (int d = 0; d < a->ndim; d++) {
        int64_t end = a->at[d] + a->size[d], other = b->at[d] + b->size[d];
        if (b->at[d] > out->at[d]) out->at[d] = b->at[d];
        out->size[d] = (end < other ? end : other) - out->at[d];
        if (out->size[d] <= 0) return false;
    }
    return true;
}

/* The element of box b (row-major) at which the index `at` of the whole tensor stands. */
static int64_t place_in(const fsdp__block *b, const int64_t *at)
{
    int64_t i = 0;
    for (int d = 0; d < b->ndim; d++)
        i = i * b->size[d] + (at[d] - b->at[d]);
    return i;
}

/* Reads n elements from element `from` of t to element `to` of dst. scratch holds n elements of the
 * file, or is not used. */
static fsdp_status read_run(fsdp__st *st, const fsdp__st_tensor *t, int64_t from, int64_t n,
                            char *dst, int64_t to, fsdp_dtype dst_type, void *scratch)
{
    int64_t width = (int64_t)fsdp_dtype_size(t->dtype);
    void *out = dst + to * (int64_t)fsdp_dtype_size(dst_type);
    if (t->dtype == dst_type) return fsdp__st_read(st, t, from * width, n * width, out);
    FSDP_TRY(fsdp__st_read(st, t, from * width, n * width, scratch));
    fsdp__convert(out, dst_type, scratch, t->dtype, (size_t)n);
    return FSDP_OK;
}

fsdp_status fsdp__block_read(fsdp__st *st, const fsdp__st_tensor *t, const fsdp__block *from,
                             const fsdp__block *to, const fsdp__block *common, void *dst,
                             fsdp_dtype dst_type)
{
    enum { PIECE = 1 << 20 }; /* elements read at once, which bounds the scratch */
    /* Dims behind `cut` are whole in both boxes; the run covers them and the extent of `cut`. */
    int cut = common->ndim - 1;
    int64_t run = cut >= 0 ? common->size[cut] : 1;
    while (cut > 0 && common->size[cut] == from->size[cut] && common->size[cut] == to->size[cut])
        run *= common->size[--cut];
    int64_t runs = fsdp__block_numel(common) / run, piece = run < PIECE ? run : PIECE;
    void *scratch = NULL;
    if (t->dtype != dst_type) {
        scratch = fsdp__calloc((size_t)piece, fsdp_dtype_size(t->dtype), "reading a checkpoint");
        if (!scratch) return fsdp_error();
    }
    int64_t at[FSDP_MAX_DIMS] = {0};
    memcpy(at, common->at, sizeof at);
    fsdp_status s = FSDP_OK;
    for (int64_t r = 0; r < runs && s == FSDP_OK; r++) {
        int64_t a = place_in(from, at), b = place_in(to, at);
        for (int64_t i = 0; i < run && s == FSDP_OK; i += piece) {
            int64_t n = run - i < piece ? run - i : piece;
            s = read_run(st, t, a + i, n, dst, b + i, dst_type, scratch);
        }
        for (int d = cut - 1; d >= 0; d--) { /* the next index of the dims before the run */
            if (++at[d] < common->at[d] + common->size[d]) break;
            at[d] = common->at[d];
        }
    }
    free(scratch);
    return s;
}
