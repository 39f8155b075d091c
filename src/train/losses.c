/*
 * losses.c - the sum of a step's losses. See losses.h.
 */
#include "train/losses.h"

#include <math.h>
#include <stdlib.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"

fsdp_status fsdp__losses_reserve(fsdp__losses *l, int ranks, int64_t calls)
{
    if (calls + 1 <= l->cap && ranks == l->ranks) return FSDP_OK;
    fsdp__losses_free(l);
    l->mine = fsdp__calloc((size_t)(calls + 1), sizeof *l->mine, "losses");
    l->all = fsdp__calloc((size_t)((calls + 1) * ranks), sizeof *l->all, "losses");
    l->cap = l->mine && l->all ? calls + 1 : 0;
    l->ranks = ranks;
    return l->cap ? FSDP_OK : fsdp_error();
}

void fsdp__losses_free(fsdp__losses *l)
{
    free(l->mine);
    free(l->all);
    *l = (fsdp__losses){0};
}

fsdp_status fsdp__losses_sum(fsdp__losses *l, fsdp_group *world, const fsdp__sampler_step *plan,
                             bool flag, fsdp__loss_sum *out)
{
    int64_t calls = plan->calls, n = 0;
    *out = (fsdp__loss_sum){.bad_rank = -1};
    l->mine[calls] = flag ? 1.0 : 0.0;
    FSDP_TRY(fsdp_all_gather(world, FSDP_LANE_CONTROL, l->mine, l->all,
                             (calls + 1) * (int64_t)sizeof *l->mine, NULL));
    int64_t block = plan->block;
    for (int r = 0; r < l->ranks; r++) {
        const double *theirs = l->all + r * (calls + 1);
        out->flag = out->flag || theirs[calls] != 0.0;
        int64_t rows = plan->rows - r * block;
        if (rows > block) rows = block;
        int64_t full = rows > 0 ? (rows + plan->microbatch - 1) / plan->microbatch : 0;
        for (int64_t i = 0; i < full; i++) {
            if (!isfinite(theirs[i]) && out->bad_rank < 0) {
                out->bad_rank = r;
                out->bad_call = i;
            }
            l->all[n++] = theirs[i]; /* moves towards the front, never over what is still needed */
        }
    }
    out->sum = fsdp__tree_sum(l->all, n);
    return FSDP_OK;
}
