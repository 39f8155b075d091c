/*
 * kernel_optim.c - optimizer steps, fused: each reads a parameter, its moments
 * and its gradient once and writes them once.
 *
 * The formulas (kernel_plain.inc) name every multiplication, addition, division
 * and root in torch's order and fuse none, so that a step has the same bits in
 * every table, under any cut and on any number of threads.
 */
#include "tensor/kernel_set.h"

#include "base/thread.h"

typedef struct optim_args {
    const fsdp__kernel_set *set;
    const fsdp__adamw *adamw;
    const fsdp__sgd *sgd;
    void *p, *m, *v; /* SGD: m is its buffer, or NULL */
    const void *g;
    fsdp_dtype pt, gt;
    int64_t n;
} optim_args;

static void optim_part(void *arg, int64_t part)
{
    const optim_args *u = arg;
    int64_t i = part * FSDP__PART, n = u->n - i < FSDP__PART ? u->n - i : FSDP__PART;
    void *p = fsdp__at(u->p, u->pt, i), *m = fsdp__at(u->m, u->pt, i);
    const void *g = fsdp__cat(u->g, u->gt, i);
    if (u->adamw)
        u->set->adamw(u->adamw, p, m, fsdp__at(u->v, u->pt, i), u->pt, g, u->gt, n);
    else
        u->set->sgd(u->sgd, p, m, u->pt, g, u->gt, n);
}

void fsdp__k_adamw(const fsdp__adamw *o, void *p, void *m, void *v, fsdp_dtype pt, const void *g,
                   fsdp_dtype gt, int64_t n)
{
    optim_args u = {.set = fsdp__kernel_set_for(pt, gt),
                    .adamw = o,
                    .p = p,
                    .m = m,
                    .v = v,
                    .g = g,
                    .pt = pt,
                    .gt = gt,
                    .n = n};
    fsdp__parallel((n + FSDP__PART - 1) / FSDP__PART, optim_part, &u);
}

void fsdp__k_sgd(const fsdp__sgd *o, void *p, void *buf, fsdp_dtype pt, const void *g,
                 fsdp_dtype gt, int64_t n)
{
    optim_args u = {.set = fsdp__kernel_set_for(pt, gt),
                    .sgd = o,
                    .p = p,
                    .m = buf,
                    .g = g,
                    .pt = pt,
                    .gt = gt,
                    .n = n};
    fsdp__parallel((n + FSDP__PART - 1) / FSDP__PART, optim_part, &u);
}
