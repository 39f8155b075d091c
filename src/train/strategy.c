/*
 * strategy.c - how the model of a run is cut. See strategy.h.
 */
#include "train/strategy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/str.h"
#include "fsdp/shard_hooks.h"
#include "train/offload.h"
#include "train/units.h"
#include "train/update.h"

/* ---- fsdp_reshard_after_forward ---------------------------------------------------------- */

static bool is(const char *a, const char *b)
{
    return !strcmp(a, b);
}

/* FSDP2 itself takes True, False or a number. */
static fsdp_status parse(const char *text, fsdp_reshard_policy *policy, int64_t *part)
{
    char *end;
    *part = 0;
    *policy = FSDP_RESHARD_ALWAYS;
    if (is(text, "default")) *policy = FSDP_RESHARD_AUTO;
    if (is(text, "never") || is(text, "false")) *policy = FSDP_RESHARD_NEVER;
    if (is(text, "always") || is(text, "true") || *policy != FSDP_RESHARD_ALWAYS) return FSDP_OK;
    errno = 0;
    *part = strtoll(text, &end, 10);
    if (*text && !*end && !errno && *part >= 1 && *part <= 65536) {
        *policy = *part == 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AUTO;
        if (*part == 1) *part = 0;
        return FSDP_OK;
    }
    *part = 0;
    return fsdp__fail(FSDP_INVALID_CONFIG,
                      "parallelism.fsdp_reshard_after_forward is '%s'; expected default, always, "
                      "never, or a number of ranks that divides data_parallel_shard_degree",
                      text);
}

static fsdp_reshard_policy policy_of(const fsdp__train_config *c)
{
    fsdp_reshard_policy p;
    int64_t part;
    return parse(c->parallelism.fsdp_reshard_after_forward, &p, &part) == FSDP_OK
               ? p
               : FSDP_RESHARD_AUTO;
}

int64_t fsdp__strategy_part(const fsdp__train_config *c)
{
    fsdp_reshard_policy p;
    int64_t part, shards = c->parallelism.data_parallel_shard_degree;
    if (parse(c->parallelism.fsdp_reshard_after_forward, &p, &part) != FSDP_OK) return 0;
    return part < shards ? part : 0; /* among all of them is what always is */
}

bool fsdp__strategy_keeps(const fsdp__train_config *c)
{
    return policy_of(c) == FSDP_RESHARD_NEVER;
}

fsdp_status fsdp__strategy_check(const fsdp__train_config *c)
{
    fsdp_reshard_policy p;
    int64_t part, shards = c->parallelism.data_parallel_shard_degree;
    const char *text = c->parallelism.fsdp_reshard_after_forward;
    if (!text || !c->parallelism.fsdp_units || !*c->parallelism.fsdp_units)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "parallelism.%s is empty; leave it out, or give it a word",
                          text ? "fsdp_units" : "fsdp_reshard_after_forward");
    FSDP_TRY(parse(text, &p, &part));
    if (part == 0 || (part <= shards && shards % part == 0)) return FSDP_OK;
    fsdp__str list = {0};
    for (int64_t k = 1; k <= shards; k++)
        if (shards % k == 0) fsdp__str_addf(&list, "%s%lld", list.len ? ", " : "", (long long)k);
    fsdp_status s = fsdp__fail(FSDP_INVALID_CONFIG,
                               "parallelism.fsdp_reshard_after_forward is %lld, which does not "
                               "divide data_parallel_shard_degree %lld; valid: %s",
                               (long long)part, (long long)shards, fsdp__str_get(&list));
    fsdp__str_free(&list);
    return s;
}

/* ---- names --------------------------------------------------------------------------------- */

const char *fsdp__strategy_name(const fsdp__train_config *c)
{
    bool keeps = fsdp__strategy_keeps(c);
    if (c->parallelism.data_parallel_shard_degree == 1) return "NO_SHARD";
    if (c->parallelism.data_parallel_replicate_degree == 1)
        return keeps ? "SHARD_GRAD_OP" : "FULL_SHARD";
    return keeps ? "hybrid ZeRO-2" : "HYBRID_SHARD";
}

/* What becomes of gathered parameters after forward. */
static void add_rest(const fsdp__train_config *c, fsdp__str *out)
{
    int64_t part = fsdp__strategy_part(c);
    if (c->parallelism.data_parallel_shard_degree == 1)
        fsdp__str_add(out, "every rank holds everything");
    else if (fsdp__strategy_keeps(c))
        fsdp__str_add(out, "gathered parameters stay for backward");
    else if (part)
        fsdp__str_addf(out, "after forward gathered parameters are cut over %lld ranks",
                       (long long)part);
    else
        fsdp__str_addf(out, "gathered parameters are freed after forward%s",
                       policy_of(c) == FSDP_RESHARD_AUTO ? " but for the root's" : "");
}

static void say_strategy(const fsdp__train_config *c, fsdp__metrics *m)
{
    static const char *const dtypes[] = {"float32", "bfloat16", "float16"};
    int64_t r = c->parallelism.data_parallel_replicate_degree,
            s = c->parallelism.data_parallel_shard_degree;
    fsdp__str rest = {0};
    add_rest(c, &rest);
    if (r * s == 1)
        fsdp__say(m, "strategy: one rank, nothing is cut; computes in %s, units: %s\n",
                  dtypes[c->training.mixed_precision_param], c->parallelism.fsdp_units);
    else
        fsdp__say(m,
                  "strategy: %s, %lld replica%s of %lld shard%s; %s; computes in %s, gradients "
                  "travel in %s, units: %s\n",
                  fsdp__strategy_name(c), (long long)r, r == 1 ? "" : "s", (long long)s,
                  s == 1 ? "" : "s", fsdp__str_get(&rest),
                  dtypes[c->training.mixed_precision_param],
                  dtypes[c->training.mixed_precision_reduce], c->parallelism.fsdp_units);
    fsdp__str_free(&rest);
}

/* ---- making -----------------------------------------------------------------------------------
 */

fsdp_status fsdp__strategy_mesh(const fsdp__train_config *c, fsdp__metrics *m, fsdp_mesh **out)
{
    int sizes[2] = {(int)c->parallelism.data_parallel_replicate_degree,
                    (int)c->parallelism.data_parallel_shard_degree};
    const char *names[2] = {"replicate", "shard"};
    int skip = sizes[0] == 1; /* one replica needs no axis */
    *out = fsdp_mesh_create(FSDP_CPU, 2 - skip, sizes + skip, names + skip);
    char *text = *out ? fsdp_mesh_print(*out) : NULL;
    if (!text) return fsdp_error();
    fsdp__say(m, "mesh %s", text);
    free(text);
    say_strategy(c, m);
    return FSDP_OK;
}

fsdp_status fsdp__strategy_shard(const fsdp__train_config *c, fsdp_mesh *mesh, fsdp_module *model)
{
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = policy_of(c);
    o.reshard_ranks = (int)fsdp__strategy_part(c);
    o.mp_policy.param_dtype = fsdp__train_dtype_of(c->training.mixed_precision_param);
    o.mp_policy.reduce_dtype = fsdp__train_dtype_of(c->training.mixed_precision_reduce);
    o.prefetch_limit = (int)c->prefetch.limit;
    o.private_gather = !c->memory.shared_gather;
    o.offload = fsdp__train_offload_policy(c);
    fsdp__unit_modules u;
    FSDP_TRY(fsdp__units_find(c->parallelism.fsdp_units, model, &u));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < u.count && s == FSDP_OK; i++)
        s = fsdp_fully_shard(u.items[i], &o);
    fsdp__units_free(&u);
    FSDP_TRY(s);
    FSDP_TRY(fsdp_fully_shard(model, &o));
    if (c->parallelism.gather_dtype) FSDP_TRY(fsdp_set_int8_gather(model, 1, 1));
    FSDP_TRY(fsdp_set_reproducible(model, c->training.reproducible));
    /* The loss is divided by the step's tokens, so gradients are sums over the ranks. */
    return fsdp_set_gradient_divide_factor(model, 1.0, 1);
}
