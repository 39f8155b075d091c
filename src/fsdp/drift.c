/*
 * drift.c - are the replicas still the same?
 *
 * Replicas begin with the same weights and add the same sums, so they stay equal to the bit. What
 * breaks that - a reduction that was left out, a bit that flipped in one machine's memory - shows
 * in no loss at first. Each rank hashes its shards; ranks that hold the same shard compare eight
 * bytes, and only where those differ the hashes of all parameters.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "base/str.h"
#include "fsdp/unit.h"

/* The parameters that one replicate group shares. */
typedef struct copies {
    fsdp_group *group;
    fsdp_param_list params;
    uint64_t *hash; /* (params.count) 0 for those of other groups */
} copies;

/* The axis along which t is repeated, as a group of more than one rank; NULL: none. */
static fsdp_group *group_of(const fsdp_tensor *t)
{
    const fsdp__layout *l = fsdp__layout_of(t);
    for (int a = 0; l && a < fsdp_mesh_ndim(l->mesh); a++)
        if (l->place[a].kind == FSDP_REPLICATE && fsdp_mesh_size(l->mesh, a) > 1)
            return fsdp_mesh_group(l->mesh, a);
    return NULL;
}

static uint64_t hash_of(const fsdp_tensor *t)
{
    return fsdp__rng_mix_bytes(fsdp__rng_key(13), fsdp_data(t),
                               (size_t)fsdp_numel(t) * fsdp_dtype_size(t->dtype));
}

/* How many ranks of the n have the value of rank r. */
static int votes(const uint64_t *all, int n, int r)
{
    int same = 0;
    for (int k = 0; k < n; k++)
        same += all[k] == all[r];
    return same;
}

/* The ranks whose value is not that of most of the others; both of two that differ. */
static void name_odd(const fsdp_group *g, const uint64_t *all, fsdp__str *out)
{
    int n = fsdp_group_size(g), best = 0;
    for (int r = 1; r < n; r++)
        if (votes(all, n, r) > votes(all, n, best)) best = r;
    bool tie = 2 * votes(all, n, best) <= n;
    for (int r = 0, first = 1; r < n; r++) {
        if (!tie && all[r] == all[best]) continue;
        fsdp__str_addf(out, "%s%d", first ? "" : ", ", fsdp_group_world_rank(g, r));
        first = 0;
    }
    fsdp__str_add(out, tie ? ", and it does not show which is right" : " is not as the others'");
}

/* They differ somewhere: in which parameter first? */
static fsdp_status name_param(const copies *c)
{
    int n = fsdp_group_size(c->group);
    int64_t count = c->params.count;
    uint64_t *all = fsdp__calloc((size_t)(n * count), sizeof *all, "hashes of replicas");
    uint64_t *one = fsdp__calloc((size_t)n, sizeof *one, "hashes of replicas");
    fsdp__str ranks = {0};
    fsdp_status s = all && one ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK)
        s = fsdp_all_gather(c->group, FSDP_LANE_CONTROL, c->hash, all, count * (int64_t)sizeof *all,
                            NULL);
    for (int64_t i = 0; i < count && s == FSDP_OK; i++) {
        for (int r = 0; r < n; r++)
            one[r] = all[r * count + i];
        if (votes(one, n, 0) == n) continue;
        name_odd(c->group, one, &ranks);
        s = fsdp__fail(
            FSDP_MISMATCH,
            "replicas have drifted apart: the shard of %s of rank %s; load a checkpoint, "
            "and look at that machine's memory and at reductions that were left out",
            c->params.items[i].name, fsdp__str_get(&ranks));
    }
    fsdp__str_free(&ranks);
    free(all);
    free(one);
    return s;
}

static fsdp_status check_group(copies *c)
{
    int n = fsdp_group_size(c->group);
    uint64_t mine = fsdp__rng_key(17), *all = NULL;
    for (int64_t i = 0; i < c->params.count; i++) {
        const fsdp_tensor *t = fsdp__param_kept(c->params.items[i].param);
        c->hash[i] = group_of(t) == c->group ? hash_of(t) : 0;
        mine = fsdp__rng_mix(mine, c->hash[i]);
    }
    all = fsdp__calloc((size_t)n, sizeof *all, "hashes of replicas");
    if (!all) return fsdp_error();
    fsdp_status s = fsdp_all_gather(c->group, FSDP_LANE_CONTROL, &mine, all, sizeof mine, NULL);
    bool same = s != FSDP_OK || votes(all, n, 0) == n;
    free(all);
    return same ? s : name_param(c);
}

fsdp_status fsdp_check_replicas(fsdp_module *m)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_check_replicas", "the module");
    enum { MOST = 8 };
    fsdp_group *seen[MOST];
    int n = 0;
    copies c = {0};
    FSDP_TRY(fsdp_module_params(m, &c.params));
    c.hash = fsdp__calloc((size_t)c.params.count + 1, sizeof *c.hash, "hashes of replicas");
    fsdp_status s = c.hash ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < c.params.count && s == FSDP_OK; i++) {
        fsdp_tensor *t = fsdp__param_kept(c.params.items[i].param);
        s = fsdp__tensor_readable(t, "comparing replicas");
        c.group = group_of(t);
        bool known = !c.group || n == MOST;
        for (int k = 0; k < n; k++)
            known = known || seen[k] == c.group;
        if (known || s != FSDP_OK) continue;
        seen[n++] = c.group;
        s = check_group(&c);
    }
    free(c.hash);
    fsdp_param_list_free(&c.params);
    return s;
}
