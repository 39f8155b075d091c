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

#include <string.h>

#include "base/error.h"
#include "fsdp/models.h"

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

static fsdp_status add_module(const sums *s, fsdp_module *m, unit_bytes *u)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    for (int64_t i = 0; i < l.count; i++)
        add_param(s, l.items[i].param, u);
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static fsdp_status add_units(const fsdp__train_config *c, fsdp_module *model, sums *s)
{
    FSDP_TRY(add_module(s, model, &s->all));
    s->root = s->all;
    if (c->parallelism.fsdp_units == 1) return FSDP_OK;
    for (int64_t i = 0; i < fsdp_model_block_count(model); i++) {
        unit_bytes u = {0};
        FSDP_TRY(add_module(s, fsdp_model_block(model, i), &u));
        s->root.shard -= u.shard;
        s->root.trained -= u.trained;
        s->root.gathered -= u.gathered;
        s->root.gradient -= u.gradient;
        s->largest.shard = max(s->largest.shard, u.shard);
        s->largest.trained = max(s->largest.trained, u.trained);
        s->largest.gathered = max(s->largest.gathered, u.gathered);
        s->largest.gradient = max(s->largest.gradient, u.gradient);
    }
    return FSDP_OK;
}

static int64_t total(const int64_t *x)
{
    int64_t n = 0;
    for (int p = 0; p < FSDP_PURPOSE_COUNT; p++)
        n += x[p];
    return n;
}

/* The peak of whole gradients and the shards' together. */
static int64_t gradient_bytes(const sums *s, bool accumulate)
{
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

fsdp_status fsdp__byte_plan_make(const fsdp__train_config *c, fsdp_module *model,
                                 int64_t microbatches, fsdp__byte_plan *out)
{
    int64_t blocks = c->parallelism.fsdp_units == 1 ? 0 : fsdp_model_block_count(model);
    int64_t states = c->optimizer.name == 0 ? 2 : c->optimizer.momentum != 0;
    sums s = {.ranks = c->parallelism.data_parallel_shard_degree,
              .kept = width(c->training.dtype),
              .compute = width(c->training.mixed_precision_param),
              .reduce = width(c->training.mixed_precision_reduce)};
    FSDP_TRY(add_units(c, model, &s));
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
    /* Without a recorded order backward gathers one ahead. */
    int64_t at_once = 1 + (c->prefetch.limit ? c->prefetch.limit : 1);
    if (at_once < 1) at_once = 1;
    if (at_once > blocks) at_once = blocks;
    out->rank[FSDP_UNSHARDED] = lent ? 0
                                : c->parallelism.fsdp_reshard_after_forward == FSDP__RESHARD_NEVER
                                    ? s.all.gathered
                                    : s.root.gathered + at_once * s.largest.gathered;
    out->rank[FSDP_GRADIENTS] =
        gradient_bytes(&s, microbatches > 1 && !c->training.sync_each_microbatch);
    out->whole_total = total(out->whole);
    out->rank_total = total(out->rank);
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
}
