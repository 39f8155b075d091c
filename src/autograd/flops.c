/*
 * flops.c - floating-point operations of an op's forward: two a product and sum, of matrix products
 * and attention. Other ops count as none, as is the custom for model FLOPs.
 */
#include "autograd/node.h"

/* Keys that a query sees on average: all, the causal half, or a window of them. */
static double keys_seen(const fsdp__opcall *c)
{
    double T = (double)c->in[0]->size[1], S = (double)c->in[1]->size[1], w = (double)c->i[1];
    if (!c->i[0]) return S;
    double seen = S - T / 2.0;
    return w > 0.0 && w < S ? (S == T ? w - w * w / (2.0 * T) : w) : seen;
}

double fsdp__op_flops(const fsdp__opcall *c)
{
    const fsdp_tensor *a = c->in[0], *b = c->in[1];
    switch (c->op) {
    case FSDP__OP_linear:
        return 2.0 * (double)fsdp__rows(a) * (double)fsdp_numel(b);
    case FSDP__OP_matmul:
        return 2.0 * (double)fsdp_numel(a) * (double)b->size[b->ndim - 1];
    case FSDP__OP_attention:
        return 4.0 * (double)fsdp_numel(a) * keys_seen(c);
    case FSDP__OP_head_cross_entropy:
        return 2.0 * (double)fsdp__rows(a) * (double)fsdp_numel(b);
    default:
        return 0.0;
    }
}
