/*
 * bytes.c - what a layout needs, by formula, and the table that sets it beside what was measured.
 *
 * Notation: a unit has P parameters' elements. A rank keeps its shard of parameters and gradients
 * and the optimizer's state of the shard. Beside them exist, for a while: gathered parameters in
 * the compute dtype (the root's, those of the running unit and of the units gathered ahead; all
 * where nothing is freed after forward), and whole gradients in the reduce dtype (those of the
 * running unit and of the one whose reduction is not finished; all while microbatches accumulate).
 */
#include "train/bytes.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "train/strategy.h"
#include "train/units.h"

/* Sums over one unit's parameters. */
typedef struct unit_bytes {
    int64_t shard;                /* as kept, of the first rank, which holds most */
    int64_t trained;              /* the part of shard that learns */
    int64_t whole, whole_trained; /* as kept, on one rank */
    int64_t gathered;             /* in the compute dtype */
    int64_t gradient;             /* whole, in the reduce dtype */
} unit_bytes;

typedef struct sums {
    int64_t ranks;                 /* of a shard group */
    int64_t kept, compute, reduce; /* bytes an element */
    unit_bytes root, largest, all;
    int64_t units, gathers; /* units that have parameters; the root's is one of the second */
    int64_t window;         /* gathered: a running unit, those around it, those gathered ahead */
} sums;

static int64_t width(int dtype)
{
    return dtype == FSDP__TRAIN_F32 ? 4 : 2;
}

static void add_param(const sums *s, const fsdp_param *p, unit_bytes *u)
{
    int64_t numel = 1, rows = fsdp_param_sizes(p)[0];
    for (int d = 0; d < fsdp_param_ndim(p); d++)
        numel *= fsdp_param_sizes(p)[d];
    int64_t own = rows ? numel / rows * ((rows + s->ranks - 1) / s->ranks) : 0;
    int64_t kept = (int64_t)fsdp_dtype_size(fsdp_tensor_dtype(fsdp_param_tensor(p)));
    u->shard += own * kept;
    u->whole += numel * kept;
    u->gathered += numel * s->compute;
    if (!fsdp_param_requires_grad(p)) return;
    u->trained += own * kept;
    u->whole_trained += numel * kept;
    u->gradient += numel * s->reduce;
}

static int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

typedef struct walker {
    const sums *s;
    fsdp_module *const *units;
    int64_t n;
    unit_bytes *own; /* (n + 1): of each unit without those inside it; the last is the root's */
    int64_t *around; /* (n) the unit that it stands in; n: the root's */
    int64_t *order;  /* (n) as their forwards begin */
    int64_t begun;
} walker;

static int64_t index_of(const walker *w, const fsdp_module *m, int64_t otherwise)
{
    for (int64_t i = 0; i < w->n; i++)
        if (w->units[i] == m) return i;
    return otherwise;
}

/* The parameters of l stand in the order of the tree, *at is the next: a shared one is in the first
 * module that has it. around: the unit that m stands in. */
static void walk(walker *w, fsdp_module *m, int64_t around, const fsdp_param_list *l, int64_t *at)
{
    int64_t u = index_of(w, m, around);
    if (u != around) {
        w->around[u] = around;
        w->order[w->begun++] = u;
    }
    for (; *at < l->count && l->items[*at].owner == m; ++*at)
        add_param(w->s, l->items[*at].param, &w->own[u]);
    for (int i = 0; i < fsdp_module_child_count(m); i++)
        walk(w, fsdp_module_child(m, i), u, l, at);
}

static void largest_of(unit_bytes *a, const unit_bytes *b)
{
    a->shard = max(a->shard, b->shard);
    a->trained = max(a->trained, b->trained);
    a->gathered = max(a->gathered, b->gathered);
    a->gradient = max(a->gradient, b->gradient);
}

static void add(unit_bytes *a, const unit_bytes *b)
{
    a->shard += b->shard;
    a->trained += b->trained;
    a->whole += b->whole;
    a->whole_trained += b->whole_trained;
    a->gathered += b->gathered;
    a->gradient += b->gradient;
}

/* The most that is gathered while some unit runs, without the root's. */
static int64_t window_of(const walker *w, int64_t ahead)
{
    int64_t most = 0;
    for (int64_t i = 0; i < w->n; i++) {
        int64_t bytes = 0;
        for (int64_t u = w->order[i]; u != w->n; u = w->around[u])
            bytes += w->own[u].gathered;
        for (int64_t k = 1; k <= ahead && i + k < w->n; k++)
            bytes += w->own[w->order[i + k]].gathered;
        most = max(most, bytes);
    }
    return most;
}

static void add_up(const walker *w, int64_t ahead, sums *s)
{
    for (int64_t i = 0; i <= w->n; i++) {
        add(&s->all, &w->own[i]);
        s->gathers += w->own[i].gathered > 0;
        s->units += i < w->n && w->own[i].gathered > 0;
        if (i < w->n) largest_of(&s->largest, &w->own[i]);
    }
    s->root = w->own[w->n];
    s->window = window_of(w, ahead);
}

static fsdp_status add_units(const fsdp__train_config *c, fsdp_module *model,
                             fsdp_module *const *units, int64_t n, sums *s)
{
    fsdp_param_list l;
    int64_t at = 0, ahead = c->prefetch.limit;
    FSDP_TRY(fsdp_module_params(model, &l));
    walker w = {.s = s, .units = units, .n = n};
    w.own = fsdp__calloc((size_t)n + 1, sizeof *w.own, "bytes of units");
    w.around = fsdp__calloc((size_t)n, sizeof *w.around, "bytes of units");
    w.order = fsdp__calloc((size_t)n, sizeof *w.order, "bytes of units");
    fsdp_status e = w.own && w.around && w.order ? FSDP_OK : fsdp_error();
    if (e == FSDP_OK) {
        walk(&w, model, n, &l, &at);
        /* Without a recorded order backward gathers one ahead. */
        add_up(&w, ahead == 0 ? 1 : ahead < 0 ? 0 : ahead, s);
    }
    free(w.own);
    free(w.around);
    free(w.order);
    fsdp_param_list_free(&l);
    return e;
}

static int64_t total(const int64_t *x)
{
    int64_t n = 0;
    for (int p = 0; p < FSDP_PURPOSE_COUNT; p++)
        n += x[p];
    return n;
}

/* The same where shards' gradients lie in files (file) or are used up as soon as they are summed:
 * whole ones of the root, and of two units, of which one is being summed. */
static int64_t passing_gradient_bytes(const sums *s, bool accumulate, bool file)
{
    int64_t shard = file ? 0 : max(s->largest.trained, s->root.trained);
    if (accumulate && s->largest.gradient) return s->all.gradient + shard;
    return s->root.gradient + shard + 2 * s->largest.gradient;
}

/* The peak of whole gradients and the shards' together. */
static int64_t gradient_bytes(const sums *s, bool accumulate, bool each)
{
    /* From the second microbatch on all shards have theirs, beside the root's whole ones and those
     * of two blocks. */
    if (each && s->largest.gradient)
        return s->all.trained + s->root.gradient + 2 * s->largest.gradient;
    /* What is not cut and not cast keeps the whole gradient as its own. */
    if (s->ranks == 1 && s->kept == s->reduce) return s->all.trained;
    if (accumulate && s->largest.gradient)
        return max(s->all.gradient + s->largest.trained, s->all.trained + s->root.gradient);
    /* The root's gradients begin with the head, so they are there all the while. When they are
     * reduced, all shards have theirs; */
    int64_t last = s->all.trained + s->root.gradient;
    /* before, the last block's come beside those of a block whose reduction is not finished. */
    int64_t reduced = s->all.trained - s->root.trained;
    int64_t block = reduced + s->root.gradient + s->largest.gradient;
    int64_t two = reduced - s->largest.trained + s->root.gradient + 2 * s->largest.gradient;
    return s->largest.gradient == 0 ? last : max(last, max(block, two));
}

static sums sums_of(const fsdp__train_config *c)
{
    return (sums){.ranks = c->parallelism.data_parallel_shard_degree,
                  .kept = width(c->training.dtype),
                  .compute = width(c->training.mixed_precision_param),
                  .reduce = width(c->training.mixed_precision_reduce)};
}

/* Gathered parameters that are there at once, where they are freed after forward. */
static int64_t at_once(const fsdp__train_config *c, const sums *s)
{
    int64_t k = fsdp__strategy_part(c), bytes = s->root.gathered + s->window;
    if (!k || !s->units || !s->largest.gathered) return bytes;
    /* Units that wait for their backward keep a part; one keeps it while it is whole. */
    int64_t whole = s->window / s->largest.gathered;
    return bytes + (s->units - whole + 1) * ((s->largest.gathered + k - 1) / k);
}

fsdp_status fsdp__byte_plan_make(const fsdp__train_config *c, fsdp_module *model,
                                 int64_t microbatches, fsdp__byte_plan *out)
{
    int64_t states = c->optimizer.name == 0 ? 2 : c->optimizer.momentum != 0;
    sums s = sums_of(c);
    fsdp__unit_modules u;
    FSDP_TRY(fsdp__units_find(c->parallelism.fsdp_units, model, &u));
    fsdp_status e = add_units(c, model, u.items, u.count, &s);
    fsdp__units_free(&u);
    FSDP_TRY(e);
    memset(out, 0, sizeof *out);

    out->whole[FSDP_PARAMETERS] = s.all.whole;
    out->whole[FSDP_GRADIENTS] = s.all.whole_trained;
    out->whole[FSDP_OPTIMIZER] = states * s.all.whole_trained;

    out->rank[FSDP_PARAMETERS] = s.all.shard;
    out->rank[FSDP_OPTIMIZER] = states * s.all.trained;
    if (c->training.ema_decay > 0) { /* in float32, as the average is kept */
        out->whole[FSDP_OPTIMIZER] += s.all.whole_trained / s.kept * 4;
        out->rank[FSDP_OPTIMIZER] += s.all.trained / s.kept * 4;
    }
    /* One rank that does not cast computes with the shard itself. */
    bool lent = s.ranks == 1 && s.kept == s.compute;
    out->rank[FSDP_UNSHARDED] = lent                      ? 0
                                : fsdp__strategy_keeps(c) ? s.all.gathered
                                                          : at_once(c, &s);
    bool accumulate = microbatches > 1 && !c->training.sync_each_microbatch;
    bool file = c->memory.offload == FSDP_OFFLOAD_FILE;
    bool passing = file || c->optimizer.early_step_in_backward;
    out->rank[FSDP_GRADIENTS] =
        passing
            ? passing_gradient_bytes(&s, accumulate, file)
            : gradient_bytes(&s, accumulate, microbatches > 1 && c->training.sync_each_microbatch);
    if (file) {
        bool early = c->optimizer.early_step_in_backward;
        out->rank[FSDP_PARAMETERS] = 0;
        out->in_files +=
            s.all.shard + (early ? max(s.largest.trained, s.root.trained) : s.all.trained);
    }
    if (c->optimizer.offload == FSDP_OFFLOAD_FILE) {
        out->rank[FSDP_OPTIMIZER] -= states * s.all.trained;
        out->in_files += states * s.all.trained;
    }
    out->whole_total = total(out->whole);
    out->rank_total = total(out->rank);
    return FSDP_OK;
}

fsdp_status fsdp__grain_make(const fsdp__train_config *c, fsdp_module *model,
                             fsdp_module *const *units, int64_t n, fsdp__grain *out)
{
    sums s = sums_of(c);
    FSDP_TRY(add_units(c, model, units, n, &s));
    int64_t peak = at_once(c, &s);
    *out = (fsdp__grain){s.all.gathered, peak < s.all.gathered ? peak : s.all.gathered, s.gathers};
    return FSDP_OK;
}

/* A cell, right-aligned; a purpose without a formula has a dash. */
static void add_cell(fsdp__str *out, int64_t bytes, bool known)
{
    fsdp__str text = {0};
    if (known)
        fsdp__str_add_bytes(&text, (double)bytes);
    else
        fsdp__str_add(&text, "-");
    fsdp__str_addf(out, "%16s", fsdp__str_get(&text));
    fsdp__str_free(&text);
}

void fsdp__byte_plan_text(const fsdp__byte_plan *p, const int64_t *peak, int64_t peak_total,
                          fsdp__str *out)
{
    fsdp__str_addf(out, "%-14s%16s%16s%s\n", "bytes", "whole model", "planned a rank",
                   peak ? "   measured peak" : "");
    for (int i = 0; i < FSDP_PURPOSE_COUNT; i++) {
        bool known = i <= FSDP_UNSHARDED;
        if (!known && !peak) continue;
        fsdp__str_addf(out, "%-14s", fsdp_purpose_name((fsdp_purpose)i));
        add_cell(out, p->whole[i], known);
        add_cell(out, p->rank[i], known);
        if (peak) add_cell(out, peak[i], true);
        fsdp__str_add(out, "\n");
    }
    fsdp__str_addf(out, "%-14s", "total");
    add_cell(out, p->whole_total, true);
    add_cell(out, p->rank_total, true);
    if (peak) add_cell(out, peak_total, true);
    fsdp__str_add(out, "\n");
    if (p->in_files == 0) return;
    fsdp__str_addf(out, "%-14s%16s", "in files", "");
    add_cell(out, p->in_files, true);
    fsdp__str_add(out, "\n");
}
