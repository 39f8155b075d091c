/*
 * back_view.c - gradients of the ops that move elements: they move back.
 */
#include <string.h>

#include "autograd/back.h"

fsdp_status fsdp__lost_saved(const fsdp__node *n)
{
    if (fsdp_error()) return fsdp_error();
    return fsdp__fail(FSDP_INTERNAL, "backward of %s: a tensor that it reads was not saved",
                      n->name);
}

fsdp_status fsdp__back_reshape(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = fsdp__dense(gout[0]);
    if (!g) return fsdp_error();
    const fsdp__meta *m = &n->in[0].meta;
    return fsdp__grad_give(n, 0,
                           fsdp__tensor_view(g->st, g->dtype, m->ndim, m->size, NULL, g->offset));
}

fsdp_status fsdp__back_transpose(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = gout[0];
    int a = fsdp__dim(g, (int)n->i[0]), b = fsdp__dim(g, (int)n->i[1]);
    int64_t sizes[FSDP_MAX_DIMS], strides[FSDP_MAX_DIMS];
    memcpy(sizes, g->size, sizeof sizes);
    memcpy(strides, g->stride, sizeof strides);
    sizes[a] = g->size[b], sizes[b] = g->size[a];
    strides[a] = g->stride[b], strides[b] = g->stride[a];
    return fsdp__grad_give(n, 0,
                           fsdp__tensor_view(g->st, g->dtype, g->ndim, sizes, strides, g->offset));
}

fsdp_status fsdp__back_slice(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__PLACE(dx, add, 0);
    int d = (int)n->i[0];
    int64_t start = n->i[1];
    if (!add) fsdp__k_fill(fsdp_data(dx), dx->dtype, fsdp_numel(dx), 0.0);
    if (fsdp_numel(gout[0]) == 0) return FSDP_OK;
    char *dst =
        (char *)fsdp_data(dx) + (size_t)(start * dx->stride[d]) * fsdp_dtype_size(dx->dtype);
    fsdp__k_copy(gout[0]->ndim, gout[0]->size, fsdp_data(gout[0]), gout[0]->dtype, gout[0]->stride,
                 dst, dx->dtype, dx->stride, 1);
    return FSDP_OK;
}

fsdp_status fsdp__back_cat(fsdp__node *n, fsdp_tensor **gout)
{
    fsdp_tensor *g = gout[0];
    int d = (int)n->i[0];
    int64_t at = 0;
    for (int k = 0; k < n->n_in; k++) {
        const fsdp__meta *m = &n->in[k].meta;
        if (fsdp__grad_wanted(n, k))
            FSDP_TRY(fsdp__grad_give(n, k,
                                     fsdp__tensor_view(g->st, g->dtype, m->ndim, m->size, g->stride,
                                                       g->offset + at * g->stride[d])));
        at += m->size[d];
    }
    return FSDP_OK;
}

fsdp_status fsdp__back_cast(fsdp__node *n, fsdp_tensor **gout)
{
    FSDP__PLACE(dx, add, 0);
    fsdp__k_copy(dx->ndim, dx->size, fsdp_data(gout[0]), gout[0]->dtype, gout[0]->stride,
                 fsdp_data(dx), dx->dtype, dx->stride, add);
    return FSDP_OK;
}

fsdp_status fsdp__back_clone(fsdp__node *n, fsdp_tensor **gout)
{
    return fsdp__grad_give(n, 0, gout[0]);
}
