/*
 * divide.c - by what gradients are divided, and when: the rule of FSDP2.
 *
 *     reduce dtype    factor   force sum   before   inside the sum   after
 *     f32, bf16, f64  any      no          -        F                -
 *     f32, bf16, f64  any      yes         -        -                F
 *     f16             any      any         p        -                F / p
 *
 * F is the factor, or the number of ranks (shards times replicas). p halves the range that f16 has
 * to span: it starts at 1 and doubles while F mod p = 0 and F / p > p.
 *
 * Our own collectives sum in fp32 and divide that sum before it is stored, so nothing overflows in
 * them and `before` is a factor of the sum too; a collective of the user's gets inputs that are
 * divided already. With force sum our collectives do not scale at all. One rank divides exactly
 * once, by F.
 */
#include <math.h>

#include "fsdp/unit.h"

fsdp__division fsdp__divide_rule(fsdp_dtype reduce, int ranks, double factor, bool force_sum)
{
    double f = factor != 0.0 ? factor : (double)ranks, p = 1.0;
    if (reduce != FSDP_F16)
        return force_sum ? (fsdp__division){1.0, f, 1.0} : (fsdp__division){1.0, 1.0, f};
    while (fmod(f, p) == 0.0 && f / p > p)
        p *= 2.0;
    return (fsdp__division){p, f / p, 1.0};
}

fsdp__division fsdp__unit_division(const fsdp__unit *u)
{
    fsdp_dtype t = FSDP_F32;
    for (int i = u->n_params - 1; i >= 0; i--)
        if (u->params[i].param->requires_grad) t = u->params[i].grad->dtype;
    fsdp__division d = fsdp__divide_rule(t, u->S * u->R, u->divide, u->force_sum);
    if (u->force_sum) return (fsdp__division){1.0, d.before * d.after, d.inside};
    return d;
}
