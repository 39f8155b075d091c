/*
 * recompute.c - which blocks are checkpoints and what of them is kept.
 *
 * A budget is met by measuring. The first microbatch runs with all blocks recomputed, and its
 * reports give, by the accounts of memory:
 *
 *     A    the peak of activations until the first recomputation, the part of it behind the forward
 *          alone: all blocks are done and their inputs held
 *     B    the peak of the backward
 *     S(j) what backward of block j needs, I(j) its input, and each op's output and cost
 *
 * Without checkpoints at least A + sum(S - I) is alive where A was measured: `none`; and where the
 * last block's own backward peaks, that peak and the sum over the others. Where outputs
 * of K(j) bytes are kept, and K(j) = S(j) - I(j) for a block that is not recomputed, at most
 * A + sum(K) is alive until backward enters the last block, and from there B + sum(K), less the
 * last block's K if it is not recomputed: its S is part of B already. Both at most budget x none
 * keep the promise whatever else happens. What saves most per byte is kept: whole blocks, the last
 * ones, then single ops. Numbers do not depend on the choice, so ranks need not agree on it; they
 * measure the same all the same.
 */
#include "train/recompute.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "fsdp/models.h"
#include "nn/module.h"

/* What a pass over a byte costs beside a floating-point operation: ops without products are worth
 * keeping too, behind all others. */
static const double FLOPS_OF_A_BYTE = 4.0;

/* ---- the section ------------------------------------------------------------------ */

/* 0: by op; -1: neither. */
static int64_t every_of(const char *option)
{
    if (option && strcmp(option, "op") == 0) return 0;
    char *end = NULL;
    long long k = option ? strtoll(option, &end, 10) : 0;
    return end && end != option && !*end && k > 0 && k <= FSDP_MODEL_MAX_LAYERS ? k : -1;
}

fsdp_status fsdp__train_recompute_check(const fsdp__train_config *c)
{
    const char *option = c->activation_checkpoint.selective_ac_option;
    if (every_of(option) >= 0) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_CONFIG,
                      "activation_checkpoint.selective_ac_option is '%s'; expected op, or a number "
                      "k from 1: every k-th block",
                      option ? option : "");
}

/* ---- ops of a block ------------------------------------------------------------------- */

/* "self_attn.q_proj" of "model.layers.3.self_attn.q_proj.weight" in block "model.layers.3". */
static void label_of(const fsdp__block_plan *b, const fsdp_checkpoint_op *op, fsdp__block_op *out)
{
    snprintf(out->label, sizeof out->label, "%s", op->name);
    if (!op->weight) return;
    fsdp__str path = {0};
    fsdp__module_path(b->block, &path);
    const char *name = op->weight;
    size_t n = path.len;
    if (n && strncmp(name, fsdp__str_get(&path), n) == 0 && name[n] == '.') name += n + 1;
    fsdp__str_free(&path);
    const char *last = strrchr(name, '.');
    snprintf(out->label, sizeof out->label, "%.*s", last ? (int)(last - name) : (int)strlen(name),
             name);
}

static bool by_op(const fsdp_checkpoint_op *op)
{
    if (strcmp(op->name, "attention") == 0) return true;
    return op->call % 2 == 0 &&
           (strcmp(op->name, "linear") == 0 || strcmp(op->name, "matmul") == 0);
}

/* The policy of every checkpoint: notes the ops of the first forward, and answers by the plan. */
static int choose(void *arg, const fsdp_checkpoint_op *op)
{
    fsdp__block_plan *b = arg;
    const fsdp__train_recompute *r = b->all;
    bool ruled = r->mode == FSDP__RECOMPUTE_SELECTIVE && r->every == 0 && by_op(op);
    int64_t k = 0;
    while (k < b->n_ops && b->ops[k].index < op->index)
        k++;
    if (k < b->n_ops) return b->ops[k].index == op->index && (b->ops[k].keep || ruled);
    if (r->measured) return ruled;
    if (FSDP__GROW(b->ops, b->cap_ops, b->n_ops + 1, "the ops of a block") != FSDP_OK) return 0;
    fsdp__block_op *o = &b->ops[b->n_ops++];
    *o =
        (fsdp__block_op){.index = op->index, .bytes = op->bytes, .flops = op->flops, .keep = ruled};
    label_of(b, op, o);
    return ruled;
}

/* ---- making checkpoints ------------------------------------------------------------------ */

fsdp_status fsdp__train_recompute_apply(const fsdp__train_config *c, fsdp_module *model,
                                        fsdp__train_recompute *r)
{
    *r = (fsdp__train_recompute){.mode = c->activation_checkpoint.mode,
                                 .every = every_of(c->activation_checkpoint.selective_ac_option),
                                 .budget = c->activation_checkpoint.memory_budget};
    if (r->mode == FSDP__RECOMPUTE_NONE) return FSDP_OK;
    r->n_blocks = fsdp_model_block_count(model);
    r->blocks = fsdp__calloc((size_t)r->n_blocks + 1, sizeof *r->blocks, "a plan of blocks");
    if (!r->blocks) return fsdp_error();
    for (int64_t i = 0; i < r->n_blocks; i++) {
        fsdp__block_plan *b = &r->blocks[i];
        b->all = r;
        b->block = fsdp_model_block(model, i);
        b->on = r->mode != FSDP__RECOMPUTE_SELECTIVE || r->every == 0 || (i + 1) % r->every == 0;
        const fsdp_checkpoint_options o = {.policy = choose,
                                           .policy_arg = b,
                                           .no_early_stop = !c->activation_checkpoint.early_stop,
                                           .report = &b->report};
        if (b->on) FSDP_TRY(fsdp_checkpoint_module(b->block, &o));
    }
    return FSDP_OK;
}

void fsdp__train_recompute_free(fsdp__train_recompute *r)
{
    for (int64_t i = 0; i < r->n_blocks; i++)
        free(r->blocks[i].ops);
    free(r->blocks);
    *r = (fsdp__train_recompute){0};
}

/* The peak of activations so far is taken, and a new one begun. */
static int64_t take_peak(fsdp__metrics *m)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    (void)fsdp__metrics_peak(m);
    return s.peak[FSDP_ACTIVATIONS];
}

void fsdp__train_recompute_begin(const fsdp__train_recompute *r, fsdp__metrics *m)
{
    if (r->mode == FSDP__RECOMPUTE_BUDGET && !r->measured) (void)take_peak(m);
}

void fsdp__train_recompute_turn(fsdp__train_recompute *r, fsdp__metrics *m)
{
    if (r->mode == FSDP__RECOMPUTE_BUDGET && !r->measured) r->peak_full = take_peak(m);
}

/* ---- the budget --------------------------------------------------------------------------- */

static double cost_of(const fsdp__block_op *o)
{
    return o->flops + FLOPS_OF_A_BYTE * (double)o->bytes;
}

/* Its output would be used in backward's recomputation: what stands behind is never run again. */
static bool counts(const fsdp__block_plan *b, const fsdp__block_op *o)
{
    return o->index < b->report.ops && o->bytes > 0;
}

static double block_cost(const fsdp__block_plan *b)
{
    double cost = 0.0;
    for (int64_t k = 0; k < b->n_ops; k++)
        if (counts(b, &b->ops[k])) cost += cost_of(&b->ops[k]);
    return cost;
}

static int64_t block_extra(const fsdp__block_plan *b)
{
    return b->report.saved_bytes - b->report.input_bytes;
}

/* An op of a block, in the order of what keeping it saves per byte. */
typedef struct item {
    int64_t block, op;
    double worth;
} item;

static int by_worth(const void *a, const void *b)
{
    const item *x = a, *y = b;
    if (x->worth != y->worth) return x->worth > y->worth ? -1 : 1;
    if (x->block != y->block)
        return x->block > y->block ? -1 : 1; /* later blocks are freed first */
    return x->op < y->op ? -1 : 1;
}

/* The ops of the first `upto` blocks. */
static item *list_items(const fsdp__train_recompute *r, int64_t upto, int64_t *n)
{
    int64_t all = 0;
    for (int64_t i = 0; i < upto; i++)
        all += r->blocks[i].n_ops;
    item *items = fsdp__calloc((size_t)all + 1, sizeof *items, "ops to keep");
    *n = 0;
    for (int64_t i = 0; i < upto && items; i++)
        for (int64_t k = 0; k < r->blocks[i].n_ops; k++) {
            const fsdp__block_op *o = &r->blocks[i].ops[k];
            if (counts(&r->blocks[i], o))
                items[(*n)++] = (item){i, k, cost_of(o) / (double)o->bytes};
        }
    if (items) qsort(items, (size_t)*n, sizeof *items, by_worth);
    return items;
}

/* Keeps the last `whole` blocks as they are and of the others the ops that fit into what is left;
 * what that saves, or -1 where it does not fit. marks: sets the plan. */
static double fill(fsdp__train_recompute *r, int64_t whole, int64_t room, bool marks, int64_t *used)
{
    int64_t n, first = r->n_blocks - whole;
    double saved = 0.0;
    *used = 0;
    for (int64_t i = first; i < r->n_blocks; i++) {
        *used += block_extra(&r->blocks[i]);
        saved += block_cost(&r->blocks[i]);
        if (marks) {
            r->blocks[i].on = false;
            r->blocks[i].block->in->checkpointed = false;
        }
    }
    if (*used > room) return -1.0;
    item *items = list_items(r, first, &n);
    if (!items) return -1.0;
    for (int64_t k = 0; k < n; k++) {
        fsdp__block_op *o = &r->blocks[items[k].block].ops[items[k].op];
        if (*used + o->bytes > room) continue;
        *used += o->bytes;
        saved += cost_of(o);
        if (marks) o->keep = true;
    }
    free(items);
    return saved;
}

/* What the first microbatch measured. */
typedef struct peaks {
    int64_t until, after; /* the first recomputation */
    int64_t last;         /* held by the last block when it is not recomputed, beside its input */
} peaks;

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The peak of a plan that keeps `used` bytes, the last `whole` blocks among them. */
static int64_t peak_of(const peaks *p, int64_t whole, int64_t used)
{
    return larger(p->until + used, p->after + used - (whole > 0 ? p->last : 0));
}

/* Sets the peaks of all blocks and of none recomputed. */
static peaks measure(fsdp__train_recompute *r, int64_t backward)
{
    const fsdp__block_plan *last = NULL, *before_last = NULL; /* of those that are recomputed */
    int64_t extra = 0;
    for (int64_t i = 0; i < r->n_blocks; i++) {
        if (r->blocks[i].report.recomputations == 0) continue; /* nothing in it learns */
        extra += block_extra(&r->blocks[i]);
        before_last = last;
        last = &r->blocks[i];
    }
    int64_t first = last ? last->report.peak_before : backward;
    peaks p = {larger(r->peak_full, first), backward, last ? block_extra(last) : 0};
    r->peak_full = larger(p.until, p.after);
    r->peak_none = first + extra;
    if (before_last && before_last->report.peak_before > last->report.peak_after)
        r->peak_none = larger(r->peak_none, before_last->report.peak_before + extra - p.last);
    return p;
}

static fsdp_status impossible(const fsdp__train_recompute *r)
{
    double least = (double)r->peak_full / (double)r->peak_none;
    return fsdp__fail(FSDP_INVALID_CONFIG,
                      "activation_checkpoint.memory_budget is %g: with all blocks recomputed "
                      "activations peak at %.1f %% of the %lld bytes without; raise it to %.2f, or "
                      "use a smaller training.local_batch_size with mode full",
                      r->budget, 100.0 * least, (long long)r->peak_none, least + 0.005);
}

/* backward: the peak of activations in it. */
static fsdp_status plan(fsdp__train_recompute *r, int64_t backward)
{
    peaks p = measure(r, backward);
    int64_t limit = (int64_t)(r->budget * (double)r->peak_none), whole = -1, used = 0;
    double best = -1.0;
    for (int64_t n = 0; n <= r->n_blocks; n++) {
        double saved = fill(r, n, limit - peak_of(&p, n, 0), false, &used);
        if (fsdp_error()) return fsdp_error();
        if (saved > best) best = saved, whole = n;
    }
    r->peak_planned = r->peak_full;
    if (whole < 0)
        return (double)r->peak_full <= 1.05 * r->budget * (double)r->peak_none ? FSDP_OK
                                                                               : impossible(r);
    (void)fill(r, whole, limit - peak_of(&p, whole, 0), true, &used);
    r->peak_planned = peak_of(&p, whole, used);
    return fsdp_error();
}

/* ---- saying it --------------------------------------------------------------------------------
 */

static bool same_ops(const fsdp__block_plan *a, const fsdp__block_plan *b)
{
    bool same = a->on == b->on && a->n_ops == b->n_ops;
    for (int64_t k = 0; same && k < a->n_ops; k++)
        same = a->ops[k].keep == b->ops[k].keep && !strcmp(a->ops[k].label, b->ops[k].label);
    return same;
}

/* Kept outputs of ops that would run again; what stands behind is let go. */
static bool kept(const fsdp__block_plan *b, const fsdp__block_op *o)
{
    return o->keep && counts(b, o);
}

static void add_kept(const fsdp__block_plan *b, fsdp__str *s)
{
    if (!b->on) {
        fsdp__str_add(s, "not recomputed");
        return;
    }
    int64_t bytes = b->report.input_bytes;
    int n = 0;
    for (int64_t k = 0; k < b->n_ops; k++)
        if (kept(b, &b->ops[k])) bytes += b->ops[k].bytes;
    fsdp__str_add(s, "kept ");
    fsdp__str_add_bytes(s, (double)bytes);
    fsdp__str_add(s, ": its input");
    for (int64_t k = 0; k < b->n_ops; k++)
        if (kept(b, &b->ops[k]))
            fsdp__str_addf(s, "%s%s", n++ ? ", " : " and the outputs of ", b->ops[k].label);
}

static void describe(const fsdp__train_recompute *r, fsdp__str *s)
{
    for (int64_t i = 0; i < r->n_blocks;) {
        int64_t end = i + 1;
        while (end < r->n_blocks && same_ops(&r->blocks[i], &r->blocks[end]))
            end++;
        if (end == i + 1)
            fsdp__str_addf(s, "  block %lld: ", (long long)i);
        else
            fsdp__str_addf(s, "  blocks %lld to %lld: ", (long long)i, (long long)end - 1);
        add_kept(&r->blocks[i], s);
        fsdp__str_add(s, "\n");
        i = end;
    }
}

double fsdp__train_recompute_flops(const fsdp__train_recompute *r)
{
    double flops = 0.0;
    for (int64_t i = 0; i < r->n_blocks; i++) {
        const fsdp__block_plan *b = &r->blocks[i];
        for (int64_t k = 0; k < b->n_ops && b->on; k++)
            if (counts(b, &b->ops[k]) && !b->ops[k].keep) flops += b->ops[k].flops;
    }
    return flops;
}

static void add_budget(const fsdp__train_recompute *r, fsdp__str *s)
{
    fsdp__str none = {0}, full = {0}, planned = {0};
    fsdp__str_add_bytes(&none, (double)r->peak_none);
    fsdp__str_add_bytes(&full, (double)r->peak_full);
    fsdp__str_add_bytes(&planned, (double)r->peak_planned);
    fsdp__str_addf(s,
                   " of %g: activations peak at %s without, at %s (%.0f %%) with all blocks "
                   "recomputed, and at most at %s (%.0f %%) so",
                   r->budget, fsdp__str_get(&none), fsdp__str_get(&full),
                   100.0 * (double)r->peak_full / (double)r->peak_none, fsdp__str_get(&planned),
                   100.0 * (double)r->peak_planned / (double)r->peak_none);
    fsdp__str_free(&none);
    fsdp__str_free(&full);
    fsdp__str_free(&planned);
}

static void say(const fsdp__train_recompute *r, double flops, fsdp__metrics *m)
{
    static const char *const modes[] = {"none", "full", "selective", "memory_budget"};
    int64_t on = 0;
    for (int64_t i = 0; i < r->n_blocks; i++)
        on += r->blocks[i].on;
    fsdp__str s = {0};
    fsdp__str_addf(&s, "activation_checkpoint %s", modes[r->mode]);
    if (r->mode == FSDP__RECOMPUTE_BUDGET) add_budget(r, &s);
    double again = fsdp__train_recompute_flops(r);
    fsdp__str_addf(&s,
                   "; %lld of %lld blocks recomputed in backward, %.3g FLOPs a microbatch, %.1f %% "
                   "of the model's\n",
                   (long long)on, (long long)r->n_blocks, again,
                   flops > 0.0 ? 100.0 * again / flops : 0.0);
    if (on == 0 && r->every > r->n_blocks)
        fsdp__str_addf(&s,
                       "no effect: activation_checkpoint.mode: selective_ac_option %lld is more "
                       "than the model's %lld block%s, so none is recomputed\n",
                       (long long)r->every, (long long)r->n_blocks, r->n_blocks == 1 ? "" : "s");
    describe(r, &s);
    fsdp__say(m, "%s", fsdp__str_get(&s));
    fsdp__str_free(&s);
}

fsdp_status fsdp__train_recompute_settle(fsdp__train_recompute *r, double flops, fsdp__metrics *m)
{
    if (r->mode == FSDP__RECOMPUTE_NONE || r->measured) return FSDP_OK;
    r->measured = true;
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    if (r->mode == FSDP__RECOMPUTE_BUDGET) FSDP_TRY(plan(r, s.peak[FSDP_ACTIVATIONS]));
    say(r, flops, m);
    return FSDP_OK;
}
