/*
 * buffers.c - buffers: whole on every rank, the same on all of them.
 *
 * At the first forward ranks compare them. What a forward in training changes
 * follows the buffer's rule when the root's forward is over; a buffer without a
 * rule that changed is an error, since ranks would drift apart unseen.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "fsdp/unit.h"

static struct fsdp__buffer_entry *entry(const fsdp__fbuffer *b)
{
    return &b->module->in->buffers[b->at];
}

static fsdp_status collect(fsdp__tree *t, fsdp_module *m, size_t prefix)
{
    for (int64_t i = 0; i < m->in->n_buffers; i++) {
        FSDP_TRY(FSDP__GROW(t->buffers, t->cap_buffers, t->n_buffers + 1, "buffers"));
        fsdp__str s = {0};
        fsdp__module_path(m, &s);
        const char *path = fsdp__str_get(&s) + prefix;
        if (*path == '.') path++;
        fsdp__str name = {0};
        fsdp__str_addf(&name, "%s%s%s", path, *path ? "." : "", m->in->buffers[i].name);
        fsdp__str_free(&s);
        fsdp__fbuffer b = {m, i, fsdp__str_take(&name)};
        if (!b.name) return fsdp_error();
        t->buffers[t->n_buffers++] = b;
        const fsdp__storage *st = m->in->buffers[i].t->st;
        if (st->device == FSDP_META || st->poisoned)
            return fsdp__fail(
                FSDP_INVALID_STATE,
                "buffer %s has no values%s; call fsdp_to_empty and fill it "
                "(fsdp_reset_parameters, a load, or by hand) before the first forward",
                b.name, st->device == FSDP_META ? ": it is on the meta device" : "");
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(collect(t, m->in->children[i], prefix));
    return FSDP_OK;
}

fsdp_status fsdp__buffers_collect(fsdp__tree *t)
{
    fsdp__str prefix = {0};
    fsdp__module_path(t->root, &prefix);
    fsdp_status s = collect(t, t->root, prefix.len);
    fsdp__str_free(&prefix);
    return s;
}

void fsdp__buffers_note(fsdp__tree *t)
{
    for (int64_t i = 0; i < t->n_buffers; i++)
        entry(&t->buffers[i])->version = entry(&t->buffers[i])->t->st->version;
}

void fsdp__buffers_free(fsdp__tree *t)
{
    for (int64_t i = 0; i < t->n_buffers; i++)
        free(t->buffers[i].name);
    free(t->buffers);
    t->buffers = NULL;
    t->n_buffers = t->cap_buffers = 0;
}

/* ---- the same on all ranks? ------------------------------------------------------------ */

static uint64_t hash_of(const fsdp_tensor *t)
{
    return fsdp__rng_mix_bytes(fsdp__rng_key(11), fsdp_data(t),
                               (size_t)fsdp_numel(t) * fsdp_dtype_size(t->dtype));
}

fsdp_status fsdp__buffer_line(const fsdp__tree *t, int64_t i, char *line, size_t size)
{
    static const char *const rules[] = {"equal", "broadcast", "mean", "local"};
    const fsdp__fbuffer *b = &t->buffers[i];
    const struct fsdp__buffer_entry *e = entry(b);
    if (!fsdp__tensor_dense(e->t))
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "buffer %s is a strided view; register a contiguous one", b->name);
    fsdp__str s = {0};
    fsdp__str_addf(&s, "buffer %s ", b->name);
    fsdp__shape_text(e->t->ndim, e->t->size, &s);
    fsdp__str_addf(&s, " %s, rule %s", fsdp_dtype_name(e->t->dtype), rules[e->rule]);
    if (e->rule != FSDP_BUFFER_LOCAL)
        fsdp__str_addf(&s, ", values of hash %016llx", (unsigned long long)hash_of(e->t));
    snprintf(line, size, "%s", fsdp__str_get(&s));
    fsdp__str_free(&s);
    return FSDP_OK;
}

/* ---- rules ---------------------------------------------------------------------------------- */

static bool moves(const fsdp__fbuffer *b, fsdp_buffer_rule rule)
{
    return entry(b)->rule == rule && b->module->in->training;
}

static fsdp_status check_equal(const fsdp__fbuffer *b)
{
    const struct fsdp__buffer_entry *e = entry(b);
    if (e->rule != FSDP_BUFFER_EQUAL || !b->module->in->training || e->t->st->version == e->version)
        return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_STATE,
                      "buffer %s was changed by a forward in training and has no rule for it, so "
                      "ranks would drift apart; call fsdp_module_set_buffer_rule (broadcast, mean "
                      "or local)",
                      b->name);
}

/* The groups of all ranks that see other rows. */
static int groups_of(const fsdp__tree *t, fsdp_group *out[2])
{
    const fsdp__unit *u = t->units[0];
    int n = 0;
    if (u->S > 1) out[n++] = u->shard;
    if (u->R > 1) out[n++] = u->replicate;
    return n;
}

static fsdp_status take_mean(fsdp__tree *t)
{
    fsdp_group *g[2];
    int n_groups = groups_of(t, g), ranks = t->units[0]->S * t->units[0]->R;
    int64_t n = 0, at = 0;
    for (int64_t i = 0; i < t->n_buffers; i++)
        if (moves(&t->buffers[i], FSDP_BUFFER_MEAN)) n += fsdp_numel(entry(&t->buffers[i])->t);
    if (n == 0) return FSDP_OK;
    double *all = fsdp__calloc((size_t)n, sizeof *all, "means of buffers");
    fsdp_status s = all ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < t->n_buffers && s == FSDP_OK; i++) {
        const fsdp_tensor *x = entry(&t->buffers[i])->t;
        if (!moves(&t->buffers[i], FSDP_BUFFER_MEAN)) continue;
        s = fsdp_to_doubles(x, all + at);
        at += fsdp_numel(x);
    }
    for (int k = 0; k < n_groups && s == FSDP_OK; k++)
        s = fsdp_all_reduce(g[k], FSDP_LANE_CONTROL, all, n, FSDP_F64, FSDP_SUM, NULL);
    at = 0;
    for (int64_t i = 0; i < t->n_buffers && s == FSDP_OK; i++) {
        fsdp_tensor *x = entry(&t->buffers[i])->t;
        if (!moves(&t->buffers[i], FSDP_BUFFER_MEAN)) continue;
        for (int64_t k = 0; k < fsdp_numel(x); k++)
            all[at + k] /= ranks;
        fsdp__convert(fsdp_data(x), x->dtype, all + at, FSDP_F64, (size_t)fsdp_numel(x));
        at += fsdp_numel(x);
        fsdp_touch(x);
    }
    free(all);
    return s;
}

/* Those of the first rank. All in one message. */
static fsdp_status take_first(fsdp__tree *t)
{
    fsdp_group *g[2];
    int n_groups = groups_of(t, g);
    size_t n = 0, at = 0;
    for (int64_t i = 0; i < t->n_buffers; i++)
        if (moves(&t->buffers[i], FSDP_BUFFER_BROADCAST))
            n += (size_t)entry(&t->buffers[i])->t->st->bytes;
    if (n == 0) return FSDP_OK;
    char *all = fsdp__calloc(n, 1, "buffers");
    fsdp_status s = all ? FSDP_OK : fsdp_error();
    for (int back = 0; back < 2 && s == FSDP_OK; back++) {
        for (int64_t i = at = 0; i < t->n_buffers; i++) {
            fsdp_tensor *x = entry(&t->buffers[i])->t;
            size_t bytes = (size_t)fsdp_numel(x) * fsdp_dtype_size(x->dtype);
            if (!moves(&t->buffers[i], FSDP_BUFFER_BROADCAST)) continue;
            memcpy(back ? fsdp_data(x) : all + at, back ? all + at : fsdp_data(x), bytes);
            at += bytes;
            if (back) fsdp_touch(x);
        }
        for (int k = 0; k < n_groups && !back && s == FSDP_OK; k++)
            s = fsdp_broadcast(g[k], FSDP_LANE_CONTROL, all, (int64_t)at, 0, NULL);
    }
    free(all);
    return s;
}

fsdp_status fsdp__buffers_follow_rules(fsdp__tree *t)
{
    if (t->n_buffers == 0 || t->n_units == 0) return FSDP_OK;
    for (int64_t i = 0; i < t->n_buffers; i++)
        FSDP_TRY(check_equal(&t->buffers[i]));
    FSDP_TRY(take_mean(t));
    return take_first(t);
}

/* ---- one rank's values for all ----------------------------------------------------------- */

static fsdp_status share(fsdp_tensor *t, fsdp_group *g, int root, const char *name)
{
    if (fsdp_group_size(g) == 1) return FSDP_OK;
    if (t->st->device == FSDP_META)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_sync_module_states: %s is on the meta device; call fsdp_to_empty "
                          "first",
                          name);
    if (fsdp_group_rank(g) == root) FSDP_TRY(fsdp__tensor_readable(t, "fsdp_sync_module_states"));
    if (!fsdp__tensor_dense(t))
        return fsdp__fail(FSDP_UNSUPPORTED, "fsdp_sync_module_states: %s is a strided view", name);
    int64_t bytes = fsdp_numel(t) * (int64_t)fsdp_dtype_size(t->dtype);
    FSDP_TRY(fsdp_broadcast(g, FSDP_LANE_CONTROL, fsdp_data(t), bytes, root, NULL));
    fsdp_touch(t);
    return FSDP_OK;
}

/* The replica that world rank src belongs to, as a rank of the replicate group: ranks of a mesh are
 * in row-major order, so those of a replicate group are equally far apart. */
static int replica_of(const fsdp_group *replicate, int src)
{
    int n = fsdp_group_size(replicate);
    return src / (fsdp_group_world_rank(replicate, 1) - fsdp_group_world_rank(replicate, 0)) % n;
}

static fsdp_status sync_params(fsdp_module *m, int src)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp__module_name_params(m));
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp_param *p = l.items[i].param;
        fsdp__fparam *fp = p->shard;
        if (!fp)
            s = share(p->t, fsdp_group_world(), src, l.items[i].name);
        else if (fp->unit->R > 1)
            s = share(p->kept, fp->unit->replicate, replica_of(fp->unit->replicate, src),
                      l.items[i].name);
    }
    fsdp_param_list_free(&l);
    return s;
}

static fsdp_status sync_buffers(fsdp_module *m, int src)
{
    for (int64_t i = 0; i < m->in->n_buffers; i++)
        FSDP_TRY(share(m->in->buffers[i].t, fsdp_group_world(), src, m->in->buffers[i].name));
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(sync_buffers(m->in->children[i], src));
    return FSDP_OK;
}

fsdp_status fsdp_sync_module_states(fsdp_module *m, int src)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_sync_module_states", "the module");
    if (src < 0 || src >= fsdp_world_size())
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_sync_module_states from rank %d; there are ranks 0 to %d", src,
                          fsdp_world_size() - 1);
    FSDP_TRY(sync_params(m, src));
    return sync_buffers(m, src);
}
