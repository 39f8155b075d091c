/*
 * recompute.c - checkpoints: what a forward saves is not kept, and made again in backward.
 *
 * A frame is one call of what is checkpointed. In its forward, saved-tensor hooks give each tensor
 * that an op saves a number (a slot) and let it go; the frame holds the inputs. The first unpack in
 * a backward runs the function again under hooks that fill the slots, and stops as soon as the last
 * one that is still wanted is filled. The graph which that run builds is dropped; the first one
 * goes on with the tensors.
 *
 *     RECORDS ---- end of the forward ----> IDLE ---- first unpack ----> REPLAYS
 *                                            ^                              |
 *                                            +------------------------------+
 *
 * Invariants
 *  1. Slot k of both runs is the same tensor: op, sizes, dtype and versions are compared.
 *  2. A recomputed tensor leaves its slot with its use, so the recomputed tensors of one frame are
 *     alive at a time; what was not used goes at the end of the backward (fsdp__recompute_settle).
 *  3. The inputs are saved by way of the hooks outside the frame, so a frame around this one lets
 *     them go and makes them again.
 *  4. A run in backward draws the same random numbers: seed, step, samples, the path in force and
 *     the paths of all modules called are those of the first (tensor.h: tapes).
 *  5. Kept ops are known by their number in the frame; their outputs live as long as the frame,
 *     which ends with its last slot.
 */
#include <stdlib.h>
#include <string.h>

#include "autograd/node.h"
#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"

typedef enum frame_mode { RECORDS, IDLE, REPLAYS } frame_mode;

/* A saved tensor. */
typedef struct slot {
    const char *op;
    fsdp__meta meta;
    uint32_t version;
    uint64_t shard_version;
    int64_t after;  /* ops that had run when it was saved */
    bool wanted;    /* its node has not dropped it */
    fsdp_tensor *t; /* recomputed and not used yet; own reference */
} slot;

/* An op whose outputs are kept. */
typedef struct kept_op {
    int64_t index; /* ops before it */
    fsdp__op op;
    fsdp_tensor *out[FSDP__OP_MAX_OUT]; /* own references, without history */
    uint32_t version;                   /* of out[0] */
} kept_op;

struct fsdp__frame {
    int refs; /* the forward, and each wanted slot */
    frame_mode mode;
    fsdp_checkpoint_fn fn;
    void *arg;
    void (*drop)(void *arg);
    fsdp_checkpoint_options o;
    fsdp__saved in[FSDP_CUSTOM_MAX];
    bool in_given[FSDP_CUSTOM_MAX], in_grad[FSDP_CUSTOM_MAX];
    int n_in, n_out;
    slot *slots;
    int64_t n_slots, cap_slots, filled; /* filled: in this run */
    int64_t last;                       /* slot that a recomputation stops at */
    kept_op *kept;
    int64_t n_kept, cap_kept, kept_at;
    int64_t ops; /* in this run */
    int64_t call[FSDP__OP_COUNT];
    fsdp__random random; /* before the first run; ids are own */
    fsdp__random_tape tape;
    uint64_t mark; /* the backward that recomputed it */
    fsdp__frame *next_replayed;
    /* while it is open */
    fsdp__frame *outer;
    int hooks_before;
};

/* What an op's node holds in place of a tensor. */
typedef struct holder {
    fsdp__frame *frame; /* counted */
    int64_t slot;
} holder;

static void drop_kept(kept_op *k)
{
    for (int i = 0; i < FSDP__OP_MAX_OUT; i++)
        fsdp_release(k->out[i]);
}

static void release(fsdp__frame *f)
{
    if (!f || --f->refs > 0) return;
    for (int k = 0; k < f->n_in; k++)
        fsdp__saved_drop(&f->in[k]);
    for (int64_t i = 0; i < f->n_slots; i++)
        fsdp_release(f->slots[i].t);
    for (int64_t i = 0; i < f->n_kept; i++)
        drop_kept(&f->kept[i]);
    if (f->drop) f->drop(f->arg);
    free(f->slots);
    free(f->kept);
    free(f->random.ids);
    free(f->tape.keys);
    free(f);
}

/* ---- the first run ------------------------------------------------------------ */

static void *pack(void *arg, fsdp_tensor *t)
{
    fsdp__frame *f = arg;
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (FSDP__GROW(f->slots, f->cap_slots, f->n_slots + 1, "a checkpoint") != FSDP_OK) return NULL;
    holder *h = fsdp__calloc(1, sizeof *h, "a checkpoint");
    if (!h) return NULL;
    h->frame = f;
    h->slot = f->n_slots;
    f->refs++;
    slot *s = &f->slots[f->n_slots++];
    *s = (slot){.op = g->saving,
                .meta = {t->dtype, t->ndim, {0}},
                .version = t->st->version,
                .shard_version = t->st->shard_version,
                .after = f->ops,
                .wanted = true};
    memcpy(s->meta.size, t->size, sizeof s->meta.size);
    return h;
}

static void drop(void *arg, void *packed)
{
    (void)arg;
    holder *h = packed;
    slot *s = &h->frame->slots[h->slot];
    fsdp_release(s->t);
    s->t = NULL;
    s->wanted = false;
    release(h->frame);
    free(h);
}

static fsdp_tensor *unpack(void *arg, void *packed);

static fsdp_status note_random(fsdp__frame *f)
{
    fsdp__random *r = fsdp__random_get();
    if (!r) return fsdp_error();
    f->random = *r;
    f->random.ids = NULL;
    f->tape.outer = r->tape;
    if (r->n_ids == 0) return FSDP_OK;
    f->random.ids = fsdp__calloc((size_t)r->n_ids, sizeof *r->ids, "the samples of a checkpoint");
    if (!f->random.ids) return fsdp_error();
    memcpy(f->random.ids, r->ids, (size_t)r->n_ids * sizeof *r->ids);
    return FSDP_OK;
}

fsdp__frame *fsdp__recompute_begin(fsdp_checkpoint_fn fn, void *arg, void (*drop_arg)(void *arg),
                                   fsdp_tensor *const *in, int n_in,
                                   const fsdp_checkpoint_options *o)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    fsdp__frame *f = g ? fsdp__calloc(1, sizeof *f, "a checkpoint") : NULL;
    if (!f) {
        if (drop_arg) drop_arg(arg);
        return NULL;
    }
    f->refs = 1;
    f->fn = fn;
    f->arg = arg;
    f->drop = drop_arg;
    if (o) f->o = *o;
    f->outer = g->frame;
    f->hooks_before = g->n_saved_hooks;
    fsdp_status s = note_random(f);
    for (int k = 0; k < n_in && s == FSDP_OK; k++) {
        f->n_in = k + 1;
        f->in_given[k] = in[k] != NULL;
        f->in_grad[k] = fsdp_requires_grad(in[k]) != 0;
        s = fsdp__save(&f->in[k], "a checkpoint", in[k]);
    }
    const fsdp_saved_hooks hooks = {pack, unpack, drop, f};
    if (s == FSDP_OK) s = fsdp_saved_hooks_push(&hooks);
    if (s != FSDP_OK) {
        release(f);
        return NULL;
    }
    if (f->o.report) f->o.report->forwards += !fsdp_recomputing();
    fsdp__random_get()->tape = &f->tape;
    g->frame = f;
    return f;
}

/* What is kept of ops behind the last that is needed would never be read. */
static void trim_kept(fsdp__frame *f)
{
    int64_t last = 0, bytes = 0;
    for (int64_t i = 0; i < f->n_slots; i++)
        if (f->slots[i].after > last) last = f->slots[i].after;
    while (f->n_kept > 0 && f->kept[f->n_kept - 1].index >= last)
        drop_kept(&f->kept[--f->n_kept]);
    for (int64_t i = 0; i < f->n_kept; i++)
        for (int k = 0; k < FSDP__OP_MAX_OUT; k++)
            bytes += f->kept[i].out[k] ? f->kept[i].out[k]->st->bytes : 0;
    if (f->o.report && !fsdp_recomputing()) f->o.report->kept_bytes = bytes;
}

fsdp_status fsdp__recompute_end(fsdp__frame *f, fsdp_status s)
{
    fsdp__grad_state *g = fsdp__grad_state_get();
    g->n_saved_hooks = f->hooks_before;
    g->frame = f->outer;
    fsdp__random_get()->tape = f->tape.outer;
    f->tape.outer = NULL;
    f->outer = NULL;
    f->mode = IDLE;
    trim_kept(f);
    release(f); /* without a slot nothing of it is needed */
    return s;
}

/* ---- ops in a frame -------------------------------------------------------------- */

fsdp_status fsdp__recompute_before(fsdp__frame *f, fsdp__opcall *c)
{
    if (f->mode != REPLAYS || f->kept_at == f->n_kept) return FSDP_OK;
    kept_op *k = &f->kept[f->kept_at];
    if (k->index != f->ops) return FSDP_OK;
    if (k->op != c->op)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "a recomputation in backward runs %s as op number %lld and the forward "
                          "%s; what is checkpointed must do the same both times",
                          fsdp__op_name(c->op), (long long)f->ops, fsdp__op_name(k->op));
    if (k->out[0]->st->version != k->version)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "the kept output of %s was changed in place since the forward (version "
                          "%u, now %u); write to a copy",
                          fsdp__op_name(k->op), k->version, k->out[0]->st->version);
    c->kept = k->out;
    f->kept_at++;
    return FSDP_OK;
}

static bool keeps(const fsdp__frame *f, const fsdp__opcall *c, double flops)
{
    fsdp_checkpoint_op op = {
        .name = fsdp__op_name(c->op), .index = f->ops, .call = f->call[c->op], .flops = flops};
    for (int k = 0; k < FSDP__OP_MAX_OUT; k++)
        op.bytes += c->out[k] ? c->out[k]->st->bytes : 0;
    for (int k = c->n_in - 1; k >= 0; k--)
        if (c->in[k] && c->in[k]->st->owner) op.weight = c->in[k]->st->owner;
    return f->o.policy(f->o.policy_arg, &op) != 0;
}

static fsdp_status keep(fsdp__frame *f, const fsdp__opcall *c)
{
    FSDP_TRY(FSDP__GROW(f->kept, f->cap_kept, f->n_kept + 1, "a checkpoint"));
    kept_op *k = &f->kept[f->n_kept];
    *k = (kept_op){.index = f->ops, .op = c->op, .version = c->out[0]->st->version};
    f->n_kept++;
    for (int i = 0; i < FSDP__OP_MAX_OUT; i++)
        if (c->out[i] && !(k->out[i] = fsdp__tensor_own(fsdp_detach(c->out[i]))))
            return fsdp_error();
    return FSDP_OK;
}

fsdp_status fsdp__recompute_after(fsdp__frame *f, fsdp__opcall *c)
{
    fsdp_status s = FSDP_OK;
    bool again = fsdp_recomputing() != 0;
    double flops = f->o.report || f->o.policy ? fsdp__op_flops(c) : 0.0;
    if (f->o.report && !again) f->o.report->flops += flops;
    if (f->o.report && again && !c->kept) f->o.report->recomputed_flops += flops;
    if (f->o.policy && !again && !c->is_view && keeps(f, c, flops)) s = keep(f, c);
    f->call[c->op]++;
    f->ops++;
    return s;
}

/* ---- the run in backward ------------------------------------------------------------ */

static void meta_text(const fsdp__meta *m, fsdp__str *out)
{
    fsdp__str_addf(out, "%s ", fsdp_dtype_name(m->dtype));
    fsdp__shape_text(m->ndim, m->size, out);
}

static fsdp_status differs(const slot *s, int64_t number, const char *op, const fsdp_tensor *t)
{
    fsdp__str was = {0}, is = {0};
    fsdp__meta m = {t->dtype, t->ndim, {0}};
    memcpy(m.size, t->size, sizeof m.size);
    meta_text(&s->meta, &was);
    meta_text(&m, &is);
    fsdp__fail(FSDP_INVALID_STATE,
               "a recomputation in backward saves other tensors than its forward: number %lld is "
               "%s of %s, and was %s of %s; what is checkpointed must do the same both times",
               (long long)number, fsdp__str_get(&is), op, fsdp__str_get(&was), s->op);
    fsdp__str_free(&was);
    fsdp__str_free(&is);
    return fsdp_error();
}

static fsdp_status changed(const slot *s, const fsdp_tensor *t)
{
    return fsdp__fail(
        FSDP_INVALID_STATE,
        "backward of %s: %s was %s since the forward that used it (version %llu, now "
        "%llu), so it cannot be recomputed; %s",
        s->op, t->st->owner ? t->st->owner : "a tensor",
        t->st->shard_version != s->shard_version ? "updated" : "changed in place",
        (unsigned long long)(t->st->shard_version != s->shard_version ? s->shard_version
                                                                      : s->version),
        (unsigned long long)(t->st->shard_version != s->shard_version ? t->st->shard_version
                                                                      : t->st->version),
        t->st->shard_version != s->shard_version ? "run backward before the optimizer's step"
                                                 : "write to a copy");
}

static fsdp_status compare(const slot *s, int64_t number, const char *op, const fsdp_tensor *t)
{
    bool same = strcmp(s->op, op) == 0 && s->meta.dtype == t->dtype && s->meta.ndim == t->ndim;
    for (int i = 0; same && i < t->ndim; i++)
        same = s->meta.size[i] == t->size[i];
    if (!same) return differs(s, number, op, t);
    if (s->version != t->st->version || s->shard_version != t->st->shard_version)
        return changed(s, t);
    return FSDP_OK;
}

static int64_t last_wanted(const fsdp__frame *f)
{
    int64_t last = f->n_slots - 1;
    while (last >= 0 && !f->slots[last].wanted)
        last--;
    return last;
}

static void *pack_again(void *arg, fsdp_tensor *t)
{
    fsdp__frame *f = arg;
    fsdp__grad_state *g = fsdp__grad_state_get();
    int64_t k = f->filled++;
    if (k < f->n_slots) {
        slot *s = &f->slots[k];
        if (compare(s, k, g->saving, t) != FSDP_OK) return NULL;
        if (s->wanted) s->t = fsdp_retain(t);
        if (k == f->last && !f->o.no_early_stop) {
            fsdp__error_stop();
            return NULL;
        }
    }
    return f; /* the graph of this run is dropped: nobody unpacks it */
}

static fsdp_tensor *unpack_again(void *arg, void *packed)
{
    (void)arg;
    (void)packed;
    fsdp__fail(FSDP_INVALID_STATE,
               "a backward inside what is recomputed: it cannot be checkpointed");
    return NULL;
}

static fsdp_status take_inputs(fsdp__frame *f, fsdp_tensor **in)
{
    for (int k = 0; k < f->n_in; k++) {
        if (!f->in_given[k]) continue;
        fsdp_tensor *t = fsdp__saved_get(&f->in[k], "a checkpoint");
        if (!t || !(in[k] = fsdp_detach(t))) return fsdp_error();
        if (f->in_grad[k]) FSDP_TRY(fsdp_requires_grad_(in[k], 1));
    }
    return FSDP_OK;
}

/* Bytes of the activations among t, each storage once. */
static int64_t distinct_bytes(fsdp_tensor *const *t, int64_t n)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        bool counts = t[i] && t[i]->st->purpose == FSDP_ACTIVATIONS && t[i]->st->charged;
        for (int64_t k = 0; k < i && counts; k++)
            counts = !t[k] || t[k]->st != t[i]->st;
        if (counts) bytes += t[i]->st->bytes;
    }
    return bytes;
}

static fsdp_status report(fsdp__frame *f, fsdp_tensor *const *in)
{
    fsdp_tensor **t = fsdp__calloc((size_t)f->n_slots + 1, sizeof *t, "a checkpoint's report");
    if (!t) return fsdp_error();
    for (int64_t i = 0; i < f->n_slots; i++)
        t[i] = f->slots[i].t;
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    f->o.report->peak_after = m.peak[FSDP_ACTIVATIONS];
    f->o.report->recomputations++;
    f->o.report->ops = f->ops;
    f->o.report->saved_bytes = distinct_bytes(t, f->n_slots);
    f->o.report->input_bytes = distinct_bytes(in, f->n_in);
    free(t);
    return FSDP_OK;
}

/* Runs the function with all that the first run saw around it. */
static fsdp_status call_again(fsdp__frame *f, fsdp__grad_state *g, fsdp_tensor **in)
{
    fsdp_tensor *out[FSDP_CUSTOM_MAX] = {NULL};
    const fsdp_saved_hooks hooks = {pack_again, unpack_again, NULL, f};
    fsdp__random *r = fsdp__random_get(), before = *r;
    int no_grad = g->no_grad, n_hooks = g->n_saved_hooks;
    fsdp__frame *outer = g->frame;
    FSDP_TRY(fsdp_saved_hooks_push(&hooks));
    f->mode = REPLAYS;
    f->filled = f->ops = f->kept_at = 0;
    f->last = last_wanted(f);
    f->tape.plays = true;
    f->tape.at = 0;
    f->tape.outer = before.tape;
    *r = f->random;
    r->round = before.round;
    r->tape = &f->tape;
    g->frame = f;
    g->no_grad = 0;
    fsdp_status s = f->fn(f->arg, in, f->n_in, out, f->n_out);
    g->no_grad = no_grad;
    g->frame = outer;
    g->n_saved_hooks = n_hooks;
    f->random.ids = r->ids; /* another one if the function set the samples anew */
    f->random.n_ids = r->n_ids;
    uint64_t round = r->round;
    *r = before;
    r->round = round;
    f->tape.outer = NULL;
    f->mode = IDLE;
    if (fsdp__error_stop_end()) return FSDP_OK;
    if (s != FSDP_OK && !fsdp_error()) fsdp__fail(s, "its forward failed: %s", fsdp_status_name(s));
    if (fsdp_error()) return fsdp__error_place("recomputation in backward");
    if (f->filled != f->n_slots)
        return fsdp__fail(
            FSDP_INVALID_STATE,
            "a recomputation in backward saved %lld tensors and its forward %lld; the "
            "first that is missing or new is number %lld%s%s; what is checkpointed "
            "must do the same both times",
            (long long)f->filled, (long long)f->n_slots,
            (long long)(f->filled < f->n_slots ? f->filled : f->n_slots),
            f->filled < f->n_slots ? ", of " : "",
            f->filled < f->n_slots ? f->slots[f->filled].op : "");
    return FSDP_OK;
}

static fsdp_status replay(fsdp__frame *f, fsdp__grad_state *g)
{
    if (f->mode != IDLE)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "backward through a checkpoint whose forward is still running");
    fsdp_scope *scope = fsdp_scope_begin();
    if (!scope) return fsdp_error();
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    if (f->o.report) f->o.report->peak_before = m.peak[FSDP_ACTIVATIONS];
    fsdp_tensor *in[FSDP_CUSTOM_MAX] = {NULL};
    fsdp_status s = take_inputs(f, in);
    if (s == FSDP_OK) s = call_again(f, g, in);
    if (s == FSDP_OK && f->o.report) s = report(f, in);
    fsdp_scope_end(scope);
    for (int k = 0; k < f->n_in; k++)
        fsdp__saved_rest(&f->in[k]);
    f->mark = g->mark;
    f->refs++;
    f->next_replayed = g->replayed;
    g->replayed = f;
    return s;
}

/* The tensor leaves its slot: a twin of it belongs to the node that asked. */
static fsdp_tensor *unpack(void *arg, void *packed)
{
    (void)arg;
    const holder *h = packed;
    fsdp__frame *f = h->frame;
    fsdp__grad_state *g = fsdp__grad_state_get();
    if (f->mark != g->mark && replay(f, g) != FSDP_OK) return NULL;
    slot *s = &f->slots[h->slot];
    if (!s->t) return NULL;
    if (fsdp__tensor_readable(s->t, s->op) != FSDP_OK) return NULL;
    if (s->version != s->t->st->version || s->shard_version != s->t->st->shard_version) {
        changed(s, s->t);
        return NULL;
    }
    fsdp_tensor *twin = fsdp_detach(s->t);
    fsdp_release(s->t);
    s->t = NULL;
    return twin;
}

void fsdp__recompute_settle(fsdp__grad_state *g)
{
    while (g->replayed) {
        fsdp__frame *f = g->replayed;
        g->replayed = f->next_replayed;
        f->next_replayed = NULL;
        for (int64_t i = 0; i < f->n_slots; i++) {
            fsdp_release(f->slots[i].t);
            f->slots[i].t = NULL;
        }
        release(f);
    }
}

/* ---- public ---------------------------------------------------------------------------- */

int fsdp_recomputing(void)
{
    const fsdp__random *r = fsdp__random_get();
    const fsdp__random_tape *t = r ? r->tape : NULL;
    while (t && !t->plays)
        t = t->outer;
    return t != NULL;
}

fsdp_status fsdp_checkpoint(fsdp_checkpoint_fn fn, void *arg, void (*drop_arg)(void *arg),
                            fsdp_tensor **in, int n_in, fsdp_tensor **out, int n_out,
                            const fsdp_checkpoint_options *o)
{
    for (int k = 0; out && n_out <= FSDP_CUSTOM_MAX && k < n_out; k++)
        out[k] = NULL;
    fsdp_status s = fsdp_error();
    if (s == FSDP_OK && ((n_in > 0 && !in) || (n_out > 0 && !out)))
        s = fsdp__fail_null("fsdp_checkpoint", n_in > 0 && !in ? "in" : "out");
    if (s == FSDP_OK && !fn) s = fsdp__fail_null("fsdp_checkpoint", "the function");
    if (s == FSDP_OK &&
        (n_in < 0 || n_out < 0 || n_in > FSDP_CUSTOM_MAX || n_out > FSDP_CUSTOM_MAX))
        s = fsdp__fail(FSDP_INVALID_ARGUMENT,
                       "fsdp_checkpoint: %d inputs and %d outputs; at most %d each", n_in, n_out,
                       FSDP_CUSTOM_MAX);
    fsdp__frame *f = NULL;
    if (s == FSDP_OK && fsdp_grad_enabled()) {
        f = fsdp__recompute_begin(fn, arg, drop_arg, in, n_in, o);
        if (!f) return fsdp_error();
        f->n_out = n_out;
    }
    if (s == FSDP_OK) s = fn(arg, in, n_in, out, n_out);
    if (s != FSDP_OK && !fsdp_error())
        fsdp__fail(s, "what is checkpointed failed: %s", fsdp_status_name(s));
    s = fsdp_error();
    if (f)
        fsdp__recompute_end(f, s);
    else if (drop_arg)
        drop_arg(arg);
    for (int k = 0; out && n_out <= FSDP_CUSTOM_MAX && k < n_out && s != FSDP_OK; k++)
        out[k] = NULL;
    return s;
}
