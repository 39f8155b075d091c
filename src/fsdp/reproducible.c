/*
 * reproducible.c - gradients that do not depend on the number of ranks, to the bit.
 *
 * The microbatches of a step are the leaves of one binary tree, in the order of their global index:
 * n leaves are split at the largest power of two below n. Rank r of N, a power of two, has leaves
 * r * p .. r * p + p - 1, p a power of two (the last ranks may have fewer, or none, which count as
 * zeros). So every rank's leaves are a subtree, and the sum over ranks, which is the same tree over
 * its ranks (comm.h), is the top of it: whoever computes what, the same numbers are added in the
 * same order.
 *
 * A rank adds its leaves as a binary counter does: level l holds the sum of 2^l leaves, or nothing.
 * Each microbatch's gradient is computed by itself into the place of the whole gradient, so
 * backward never adds to an earlier one's, and is then carried: at most log2 k + 1 whole gradients
 * are held instead of one. A missing gradient is zero: its place in the tree stays.
 *
 * What this rests on elsewhere: a microbatch's gradient has the same bits whoever computes it (same
 * shape, any number of threads), gradients are fp32, and the norm is summed by rows.
 */
#include "base/error.h"
#include "fsdp/unit.h"

/* The leaf that this backward made becomes part of the counter. */
static fsdp_status push(fsdp__unit *u, fsdp__fparam *p)
{
    fsdp_tensor *sum = NULL;
    if (p->got_grad) {
        sum = fsdp_retain(p->grad);
        p->got_grad = false;
        fsdp_status s = fsdp__grad_renew(p);
        if (s != FSDP_OK) {
            fsdp_release(sum);
            return s;
        }
    }
    int l = 0;
    for (; u->leaves >> l & 1; l++) {
        fsdp_tensor *left = p->level[l];
        p->level[l] = NULL;
        if (!left) continue;
        fsdp_status s = sum ? fsdp_accumulate_(left, sum) : FSDP_OK;
        fsdp_release(sum);
        sum = left;
        if (s != FSDP_OK) {
            fsdp_release(sum);
            return s;
        }
    }
    p->level[l] = sum;
    return FSDP_OK;
}

fsdp_status fsdp__leaf_end(fsdp__unit *u)
{
    if (!u->reproducible || u->sync) return FSDP_OK;
    if (u->leaves == (INT64_C(1) << FSDP__LEVELS) - 1)
        return fsdp__fail(FSDP_UNSUPPORTED, "more than 2^%d microbatches without a reduction",
                          (int)FSDP__LEVELS);
    for (int i = 0; i < u->n_params; i++)
        FSDP_TRY(push(u, &u->params[i]));
    u->leaves++;
    return FSDP_OK;
}

/* All levels and the last leaf, which is where it was computed, into the whole gradient. */
static fsdp_status add_levels(fsdp__fparam *p)
{
    for (int l = 0; l < FSDP__LEVELS; l++) {
        fsdp_tensor *left = p->level[l];
        if (!left) continue;
        p->level[l] = NULL;
        fsdp_status s = FSDP_OK;
        if (!p->got_grad) s = fsdp__storage_fill(p->grad->st, NULL, p->param->name);
        if (s == FSDP_OK)
            s = p->got_grad ? fsdp_accumulate_(p->grad, left) : fsdp_copy_(p->grad, left);
        p->got_grad = true;
        fsdp_release(left);
        FSDP_TRY(s);
    }
    return FSDP_OK;
}

fsdp_status fsdp__leaves_sum(fsdp__unit *u)
{
    if (!u->reproducible) return FSDP_OK;
    if (!u->all_reduce && u->R > 1)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "unit \"%s\" is reproducible and was to reduce inside its shard group "
                          "only; switch fsdp_set_requires_gradient_sync instead, which does both",
                          u->name);
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(add_levels(p));
        if (p->got_grad && fsdp_grad(p->sharded))
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "%s is reduced a second time before fsdp_zero_grad, and unit \"%s\" "
                              "is reproducible: all of a step's microbatches are summed in one "
                              "tree; reduce with the last one only "
                              "(fsdp_set_requires_gradient_sync), and run a unit once in a forward",
                              p->param->name, u->name);
    }
    u->leaves = 0;
    return FSDP_OK;
}

void fsdp__leaves_drop(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++)
        for (int l = 0; l < FSDP__LEVELS; l++) {
            fsdp_release(u->params[i].level[l]);
            u->params[i].level[l] = NULL;
        }
    u->leaves = 0;
}

/* ---- switching -------------------------------------------------------------------------- */

static bool power_of_two(int n)
{
    return (n & (n - 1)) == 0;
}

static fsdp_status check(const fsdp__unit *u)
{
    if (!power_of_two(u->S) || !power_of_two(u->R))
        return fsdp__fail(
            FSDP_UNSUPPORTED,
            "fsdp_set_reproducible: unit \"%s\" has %d shards in %d replicas; the "
            "sum over microbatches and ranks is one tree where both are powers of two",
            u->name, u->S, u->R);
    for (int i = 0; i < u->n_params; i++) {
        fsdp_dtype t = u->params[i].grad->dtype;
        if (!fsdp_dtype_is_floating(t) || t == FSDP_F32 || t == FSDP_F64) continue;
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "fsdp_set_reproducible: gradients of %s are %s; partial sums would be "
                          "rounded where ranks meet; set mp_policy.reduce_dtype to FSDP_F32",
                          u->params[i].param->name, fsdp_dtype_name(t));
    }
    return FSDP_OK;
}

static fsdp_status check_all(fsdp_module *m)
{
    fsdp__unit *u = fsdp__unit_of(m);
    if (u) FSDP_TRY(check(u));
    for (int k = 0; u && k < u->n_tied; k++)
        FSDP_TRY(check(u->tied[k]));
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(check_all(m->in->children[i]));
    return FSDP_OK;
}

static void set(fsdp__unit *u, double v)
{
    u->reproducible = v != 0.0;
    for (int k = 0; k < u->n_tied; k++)
        u->tied[k]->reproducible = u->reproducible;
}

fsdp_status fsdp_set_reproducible(fsdp_module *m, int on)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_set_reproducible", "the module");
    if (on) FSDP_TRY(check_all(m));
    fsdp__unit_each(m, 1, set, on);
    return FSDP_OK;
}
