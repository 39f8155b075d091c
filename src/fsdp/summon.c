/*
 * summon.c - whole parameters for a scope, outside of any iteration.
 *
 * Each rank gets private copies in the parameters' own dtype (not that of the
 * gathers), registered on the modules in the place of the shards. A forward
 * inside computes with them and gathers nothing, so it runs no collective; it
 * must not build a graph, since gradients would reach the copies only.
 *
 * Invariant: a unit is summoned exactly while a scope holds copies of it, and
 * in that time SHARDED.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "fsdp/unit.h"

struct fsdp_summon {
    fsdp_summon_options o;
    fsdp__unit **units; /* own references */
    int64_t n, cap;
    fsdp_tensor **copies; /* of all parameters of all units, in order; NULL: not on this rank */
    uint32_t *versions;   /* of the shards, at the begin */
};

fsdp_summon_options fsdp_summon_defaults(void)
{
    return (fsdp_summon_options){.recurse = 1, .writeback = 1};
}

static int64_t count_params(const fsdp_summon *s)
{
    int64_t n = 0;
    for (int64_t i = 0; i < s->n; i++)
        n += s->units[i]->n_params;
    return n;
}

/* ---- which units ------------------------------------------------------------------- */

static fsdp_status check_unit(const fsdp__unit *u)
{
    if (u->summoned)
        return fsdp__fail(
            FSDP_INVALID_STATE,
            "fsdp_summon_full_params_begin: unit \"%s\" is summoned already; end that "
            "scope first",
            u->name);
    if (fsdp_in_backward() || u->open || (u->tree && u->tree->forward_root))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_summon_full_params_begin inside a forward or backward of unit "
                          "\"%s\"; summon between iterations",
                          u->name);
    for (int i = 0; i < u->n_params; i++)
        FSDP_TRY(fsdp__tensor_readable(u->params[i].sharded, "fsdp_summon_full_params_begin"));
    return FSDP_OK;
}

static fsdp_status add(fsdp_summon *s, fsdp__unit *u)
{
    for (int64_t i = 0; i < s->n; i++)
        if (s->units[i] == u) return FSDP_OK; /* a list, or a weight of two units */
    FSDP_TRY(check_unit(u));
    FSDP_TRY(FSDP__GROW(s->units, s->cap, s->n + 1, "summoned units"));
    u->refs++;
    s->units[s->n++] = u;
    for (int k = 0; k < u->n_tied; k++)
        FSDP_TRY(add(s, u->tied[k]));
    return FSDP_OK;
}

static fsdp_status collect(fsdp_summon *s, fsdp_module *m)
{
    fsdp__unit *u = fsdp__unit_of(m);
    if (u) FSDP_TRY(add(s, u));
    for (int64_t i = 0; i < m->in->n_children && s->o.recurse; i++)
        FSDP_TRY(collect(s, m->in->children[i]));
    return FSDP_OK;
}

/* ---- begin ------------------------------------------------------------------------------ */

/* Collective over the shard group. */
static fsdp_status copy_param(fsdp_summon *s, fsdp__fparam *p, int64_t at)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *full = scope ? fsdp_dtensor_full(p->sharded) : NULL;
    s->versions[at] = p->sharded->st->version;
    if (full && (!s->o.rank0_only || fsdp_rank() == 0)) {
        fsdp__storage_set_purpose(full->st, s->o.offload_to_cpu ? FSDP_OTHER : FSDP_UNSHARDED);
        full->st->owner = p->param->name;
        s->copies[at] = fsdp_retain(full);
    }
    fsdp_scope_end(scope);
    return full ? FSDP_OK : fsdp_error();
}

static fsdp_status copy_all(fsdp_summon *s)
{
    for (int64_t i = 0, at = 0; i < s->n; i++) {
        fsdp__unit *u = s->units[i];
        FSDP_TRY(fsdp__unit_reshard(u));
        for (int k = 0; k < u->n_params; k++)
            FSDP_TRY(copy_param(s, &u->params[k], at++));
    }
    return FSDP_OK;
}

static void drop(fsdp_summon *s)
{
    for (int64_t i = 0, at = 0; i < s->n; i++) {
        fsdp__unit *u = s->units[i];
        for (int k = 0; k < u->n_params && s->copies; k++, at++) {
            if (s->copies[at]) {
                fsdp__param_set(u->params[k].param, u->params[k].sharded);
                s->copies[at]->st->owner = NULL;
            }
            fsdp_release(s->copies[at]);
        }
        u->summoned = false;
        fsdp__unit_free(u);
    }
    free(s->units);
    free(s->copies);
    free(s->versions);
    free(s);
}

fsdp_status fsdp_summon_full_params_begin(fsdp_module *m, const fsdp_summon_options *o,
                                          fsdp_summon **out)
{
    if (!m || !out)
        return fsdp__fail_null("fsdp_summon_full_params_begin", m ? "the scope" : "the module");
    *out = NULL;
    if (fsdp_error()) return fsdp_error();
    fsdp_summon_options opt = o ? *o : fsdp_summon_defaults();
    if (opt.writeback && opt.rank0_only)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_summon_full_params_begin: writeback with rank0_only: the other "
                          "ranks would have nothing to write back; set writeback to 0");
    FSDP_TRY(fsdp__module_name_params(m));
    fsdp_summon *s = fsdp__calloc(1, sizeof *s, "a scope of whole parameters");
    if (!s) return fsdp_error();
    s->o = opt;
    fsdp_status st = collect(s, m);
    if (st == FSDP_OK && s->n == 0)
        st = fsdp__fail(FSDP_INVALID_ARGUMENT,
                        "fsdp_summon_full_params_begin: nothing in %s \"%s\" is sharded", m->type,
                        fsdp_module_name(m));
    size_t n = (size_t)count_params(s) + 1;
    if (st == FSDP_OK) {
        s->copies = fsdp__calloc(n, sizeof *s->copies, "summoned parameters");
        s->versions = fsdp__calloc(n, sizeof *s->versions, "summoned parameters");
        st = s->copies && s->versions ? copy_all(s) : fsdp_error();
    }
    if (st != FSDP_OK) {
        drop(s);
        return st;
    }
    for (int64_t i = 0, at = 0; i < s->n; i++) {
        s->units[i]->summoned = true;
        for (int k = 0; k < s->units[i]->n_params; k++, at++)
            if (s->copies[at]) fsdp__param_set(s->units[i]->params[k].param, s->copies[at]);
    }
    *out = s;
    return FSDP_OK;
}

/* ---- inside and end ----------------------------------------------------------------------- */

fsdp_status fsdp__summoned_forward(const fsdp__unit *u)
{
    if (fsdp_grad_enabled())
        return fsdp__fail(FSDP_INVALID_STATE,
                          "a forward with gradients of unit \"%s\" inside fsdp_summon_full_params: "
                          "they would reach the summoned copies only; evaluate under "
                          "fsdp_no_grad_begin, or end the scope first",
                          u->name);
    for (int i = 0; i < u->n_params; i++)
        if (u->params[i].param->t == u->params[i].sharded)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "a forward of unit \"%s\" on rank %d inside fsdp_summon_full_params "
                              "with rank0_only: rank 0 alone has whole parameters",
                              u->name, fsdp_rank());
    return FSDP_OK;
}

static fsdp_status check_versions(const fsdp_summon *s)
{
    for (int64_t i = 0, at = 0; i < s->n; i++)
        for (int k = 0; k < s->units[i]->n_params; k++, at++) {
            const fsdp__fparam *p = &s->units[i]->params[k];
            if (p->sharded->st->version != s->versions[at])
                return fsdp__fail(FSDP_INVALID_STATE,
                                  "fsdp_summon_full_params_end: the shard of %s was written inside "
                                  "the scope (an optimizer's step, a load), and writing the copies "
                                  "back would undo that; nothing was written back",
                                  p->param->name);
        }
    return FSDP_OK;
}

fsdp_status fsdp_summon_full_params_end(fsdp_summon *s)
{
    if (!s) return fsdp_error();
    fsdp_status st = fsdp_error();
    if (st == FSDP_OK && s->o.writeback) st = check_versions(s);
    for (int64_t i = 0, at = 0; i < s->n && st == FSDP_OK && s->o.writeback; i++)
        for (int k = 0; k < s->units[i]->n_params; k++, at++)
            fsdp__param_take_rows(&s->units[i]->params[k], s->copies[at]);
    drop(s);
    return st;
}
