/*
 * fingerprint.c - 64 bits that say which base adapters were trained beside.
 *
 * A sum, modulo 2^64, over every 61st element of each parameter that is no adapter's: a hash of the
 * parameter's name, the element's place in the whole, and its value rounded to bf16. Sums do not
 * depend on the cut, and rounding lets a base kept or exported in bf16 be the same base.
 */
#include <stdlib.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "dtensor/dtensor.h"
#include "fsdp/comm.h"
#include "hf/folder.h"
#include "lora/lora.h"

enum { EVERY = 61 };

/* Elements [first, first + n) of the whole at src. */
static uint64_t hash_run(uint64_t key, int64_t first, int64_t n, const char *src, fsdp_dtype t)
{
    uint64_t sum = 0;
    size_t width = fsdp_dtype_size(t);
    for (int64_t g = (first + EVERY - 1) / EVERY * EVERY; g < first + n; g += EVERY) {
        uint16_t bits;
        fsdp__convert(&bits, FSDP_BF16, src + (size_t)(g - first) * width, t, 1);
        sum += fsdp__rng_mix(fsdp__rng_mix(key, (uint64_t)g), bits);
    }
    return sum;
}

/* Of copies of a part, one is counted. */
static bool counts(const fsdp_tensor *t)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    if (!l || fsdp__layout_shard_axis(l) < 0) return fsdp_rank() == 0;
    for (int a = 0; a < fsdp_mesh_ndim(l->mesh); a++)
        if (l->place[a].kind == FSDP_REPLICATE && fsdp_mesh_coordinate(l->mesh, a) != 0)
            return false;
    return true;
}

static uint64_t hash_param(const fsdp_param *p, const char *name)
{
    const fsdp_tensor *t = fsdp__param_kept(p);
    if (!counts(t)) return 0;
    int64_t outer = 1, dim = fsdp_numel(t), inner = 1, row0 = 0, rows = dim;
    if (t->dist) t->dist->ops->block(t->dist, &outer, &dim, &inner, &row0, &rows);
    uint64_t key = fsdp__rng_mix_str(fsdp__rng_key(EVERY), name), sum = 0;
    size_t width = fsdp_dtype_size(t->dtype);
    const char *src = fsdp_data(t);
    for (int64_t o = 0; o < outer && rows; o++)
        sum += hash_run(key, (o * dim + row0) * inner, rows * inner,
                        src + (size_t)(o * rows * inner) * width, t->dtype);
    return sum;
}

static bool has_values(const fsdp_param *p)
{
    const fsdp_tensor *t = fsdp__param_kept(p);
    return fsdp_dtype_is_floating(t->dtype) && t->st->device == FSDP_CPU &&
           (fsdp_numel(t) == 0 || (t->st->data && !t->st->poisoned));
}

fsdp_status fsdp__hf_fingerprint(fsdp_module *model, uint64_t *out)
{
    fsdp_param_list l;
    uint64_t mine[2] = {0, 0}; /* the sum; whether something has no values */
    *out = 0;
    FSDP_TRY(fsdp_module_params(model, &l));
    for (int64_t i = 0; i < l.count; i++) {
        if (fsdp__lora_is_adapter(l.items[i].owner)) continue;
        if (has_values(l.items[i].param))
            mine[0] += hash_param(l.items[i].param, l.items[i].name);
        else
            mine[1] = 1;
    }
    fsdp_param_list_free(&l);
    fsdp_group *world = fsdp_group_world();
    int n = fsdp_group_size(world);
    uint64_t *all = fsdp__calloc((size_t)n, sizeof mine, "fingerprints"), sum = 0, lacks = 0;
    fsdp_status s = all ? fsdp_all_gather(world, FSDP_LANE_CONTROL, mine, all, sizeof mine, NULL)
                        : fsdp_error();
    for (int r = 0; s == FSDP_OK && r < n; r++) {
        sum += all[2 * r];
        lacks += all[2 * r + 1];
    }
    free(all);
    if (s == FSDP_OK && !lacks) *out = sum ? sum : 1;
    return s;
}
