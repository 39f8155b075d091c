/*
 * plain.c - collectives over any memory, for small things: scalars, agreement, tables.
 *
 * Data goes through a window of two slots that each rank has in each lane it uses: a round is
 * written into a slot (staged), read by all (consumed), and the slot is used again two rounds
 * later. The first round is written at once, without waiting for anybody. Every rank reads and
 * reduces all it needs by itself, in the tree order of sums over ranks, so all get the same bits.
 */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

/* ---- reducing ----------------------------------------------------------------------- */

#define REDUCE_LOOP(type, expression)              \
    for (int64_t i = 0; i < n; i++) {              \
        type a = ((const type *)source[0])[i];     \
        for (int r = 1; r < k; r++) {              \
            type b = ((const type *)source[r])[i]; \
            a = (type)(expression);                \
        }                                          \
        ((type *)to)[i] = a;                       \
    }                                              \
    break

/* Sums of integers are exact and wrap as unsigned ones do. A NaN wins a minimum or maximum. */
#define REDUCE_INTEGER(type, unsigned_type) \
    if (op == FSDP_SUM) {                   \
        REDUCE_LOOP(unsigned_type, a + b);  \
    } else if (op == FSDP_MIN) {            \
        REDUCE_LOOP(type, b < a ? b : a);   \
    } else {                                \
        REDUCE_LOOP(type, b > a ? b : a);   \
    }
#define REDUCE_FLOAT(type)                            \
    if (op == FSDP_MIN) {                             \
        REDUCE_LOOP(type, isnan(a) || a < b ? a : b); \
    } else {                                          \
        REDUCE_LOOP(type, isnan(a) || a > b ? a : b); \
    }

/* Minimum and maximum of half-width floats: compared as f32, which holds them exactly. */
static void reduce_half(void *to, const void *const *source, int k, int64_t n, fsdp_dtype t,
                        fsdp_reduce_op op)
{
    float (*widen)(uint16_t) = t == FSDP_BF16 ? fsdp__bf16_to_f32 : fsdp__f16_to_f32;
    for (int64_t i = 0; i < n; i++) {
        uint16_t best = ((const uint16_t *)source[0])[i];
        for (int r = 1; r < k; r++) {
            uint16_t other = ((const uint16_t *)source[r])[i];
            float a = widen(best), b = widen(other);
            if (!isnan(a) && (isnan(b) || (op == FSDP_MIN ? b < a : b > a))) best = other;
        }
        ((uint16_t *)to)[i] = best;
    }
}

/* to[i] = op over source[0..k-1][i]. */
static void reduce(void *to, const void *const *source, int k, int64_t n, fsdp_dtype t,
                   fsdp_reduce_op op)
{
    if (op == FSDP_SUM && fsdp_dtype_is_floating(t)) {
        fsdp__sum_tree(to, t, source, t, k, (size_t)n, 1.0f, 0);
        return;
    }
    switch (t) {
    case FSDP_F32:
        REDUCE_FLOAT(float);
        break;
    case FSDP_F64:
        REDUCE_FLOAT(double);
        break;
    case FSDP_F16:
    case FSDP_BF16:
        reduce_half(to, source, k, n, t, op);
        break;
    case FSDP_I64:
        REDUCE_INTEGER(int64_t, uint64_t);
        break;
    case FSDP_I32:
        REDUCE_INTEGER(int32_t, uint32_t);
        break;
    case FSDP_I16:
        REDUCE_INTEGER(int16_t, uint16_t);
        break;
    case FSDP_I8:
        REDUCE_INTEGER(int8_t, uint8_t);
        break;
    case FSDP_U64:
        REDUCE_INTEGER(uint64_t, uint64_t);
        break;
    case FSDP_U32:
        REDUCE_INTEGER(uint32_t, uint32_t);
        break;
    case FSDP_U16:
        REDUCE_INTEGER(uint16_t, uint16_t);
        break;
    case FSDP_U8:
    case FSDP_BOOL: /* its sum is refused */
        REDUCE_INTEGER(uint8_t, uint8_t);
        break;
    case FSDP_DTYPE_NONE:
    case FSDP_DTYPE_COUNT:
        break;
    }
}

/* ---- rounds ------------------------------------------------------------------------- */

static size_t unit_size(const fsdp_work *w)
{
    return w->dtype == FSDP_DTYPE_NONE ? 1 : fsdp_dtype_size(w->dtype);
}

/* Units of round i. */
static int64_t part(const fsdp_work *w, uint64_t i)
{
    int64_t left = w->amount - (int64_t)i * w->each;
    return left < 0 ? 0 : left < w->each ? left : w->each;
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0) memcpy(to, from, bytes);
}

static void stage(const fsdp_work *w, uint64_t i, char *slot)
{
    size_t unit = unit_size(w), at = (size_t)((int64_t)i * w->each) * unit;
    size_t bytes = (size_t)part(w, i) * unit;
    switch (w->collective) {
    case FSDP_ALL_GATHER:
    case FSDP_ALL_REDUCE:
        copy(slot, w->send + at, bytes);
        break;
    case FSDP_BROADCAST:
        if (w->group->rank == w->root) copy(slot, w->send + at, bytes);
        break;
    case FSDP_REDUCE_SCATTER:
    case FSDP_ALL_TO_ALL:
        for (int r = 0; r < w->group->size; r++)
            copy(slot + (size_t)(r * w->each) * unit, w->send + (size_t)(r * w->amount) * unit + at,
                 bytes);
        break;
    default:
        break;
    }
}

/* sources: the slots of all ranks, (size). */
static void consume(const fsdp_work *w, uint64_t i, const void **sources)
{
    const fsdp_group *g = w->group;
    size_t unit = unit_size(w), at = (size_t)((int64_t)i * w->each) * unit;
    int64_t n = part(w, i);
    size_t bytes = (size_t)n * unit, mine = (size_t)(g->rank * w->each) * unit;
    switch (w->collective) {
    case FSDP_ALL_GATHER:
        for (int r = 0; r < g->size; r++)
            copy(w->recv + (size_t)(r * w->amount) + at, sources[r], bytes);
        break;
    case FSDP_BROADCAST:
        if (g->rank != w->root) copy(w->recv + at, sources[w->root], bytes);
        break;
    case FSDP_REDUCE_SCATTER:
        for (int r = 0; r < g->size; r++)
            sources[r] = (const char *)sources[r] + mine;
        /* fall through */
    case FSDP_ALL_REDUCE:
        if (n > 0) reduce(w->recv + at, sources, g->size, n, w->dtype, w->op);
        break;
    case FSDP_ALL_TO_ALL:
        for (int r = 0; r < g->size; r++)
            copy(w->recv + (size_t)(r * w->amount) + at, (const char *)sources[r] + mine, bytes);
        break;
    default:
        break;
    }
}

static int consume_round(fsdp_work *w, const void **sources)
{
    const fsdp_group *g = w->group;
    uint64_t round = w->base + w->out;
    size_t slot = (size_t)(round % 2) * FSDP__WINDOW;
    for (int r = 0; r < g->size; r++) {
        int64_t window = atomic_load(&g->members[r]->lanes[w->lane].window);
        sources[r] = (const char *)fsdp__at(g->world, window) + slot;
    }
    consume(w, w->out, sources);
    w->out++;
    fsdp__publish(w->group, &fsdp__own_lane(g, w->lane)->consumed, round + 1);
    return 1;
}

static int rounds_step(fsdp_work *w)
{
    fsdp_group *g = w->group;
    fsdp__lane_page *own = fsdp__own_lane(g, w->lane);
    const void *few[16];
    const void **sources = few;
    if (g->size > 16) {
        sources = fsdp__calloc((size_t)g->size, sizeof *sources, "a collective's table of ranks");
        if (!sources) return -1;
    }
    for (bool moved = true; moved && w->out < w->rounds;) {
        moved = false;
        uint64_t round = w->base + w->in;
        /* Slot round % 2 was read two rounds ago. */
        if (w->in < w->rounds && w->in - w->out < 2 &&
            (round < 2 || fsdp__peers_reached(w, offsetof(fsdp__lane_page, consumed), round - 1,
                                              "read its part of it"))) {
            stage(w, w->in, g->lanes[w->lane].window + (round % 2) * FSDP__WINDOW);
            w->in++;
            fsdp__publish(g, &own->staged, round + 1);
            moved = true;
        }
        if (w->all_checked && w->out < w->in &&
            fsdp__peers_reached(w, offsetof(fsdp__lane_page, staged), w->base + w->out + 1,
                                "sent its part of it"))
            moved = consume_round(w, sources);
    }
    if (sources != few) free((void *)sources);
    return w->out == w->rounds;
}

static const fsdp__work_kind rounds_kind = {NULL, rounds_step};

static int barrier_step(fsdp_work *w)
{
    if (w->in == 0) {
        fsdp__publish(w->group, &fsdp__own_lane(w->group, w->lane)->stage, w->seq);
        w->in = 1;
    }
    if (!w->all_checked) return 0;
    return fsdp__peers_reached(w, offsetof(fsdp__lane_page, stage), w->seq, "come to it");
}

static const fsdp__work_kind barrier_kind = {NULL, barrier_step};

/* ---- issue -------------------------------------------------------------------------- */

/* The lane's window, made by its first plain collective and kept. */
static fsdp_status window_make(fsdp_group *g, fsdp_lane lane)
{
    if (g->lanes[lane].window) return FSDP_OK;
    fsdp__allocator *a = g->world->allocator;
    size_t bytes = 2 * FSDP__WINDOW;
    FSDP_TRY(fsdp__account_take(FSDP_COMMUNICATION, (int64_t)bytes, "a window of collectives"));
    char *p = a->alloc(a, bytes, "a window of collectives");
    if (!p) {
        fsdp__account_give(FSDP_COMMUNICATION, (int64_t)bytes);
        return fsdp_error();
    }
    g->lanes[lane].window = p;
    atomic_store(&fsdp__own_lane(g, lane)->window, fsdp__offset_of(g->world, p, 0));
    return FSDP_OK;
}

typedef struct call {
    fsdp_collective collective;
    const void *send;
    void *recv;
    int64_t amount;   /* units of one rank */
    fsdp_dtype dtype; /* NONE: bytes */
    fsdp_reduce_op op;
    int root;
    bool cut;         /* a slot holds a part for each rank */
    int64_t elements; /* for the counters */
} call;

static fsdp_status check(fsdp_group *g, fsdp_lane lane, const call *c)
{
    const char *what = fsdp__collective_name(c->collective);
    FSDP_TRY(fsdp__issue_check(g, lane, c->collective, what));
    if (c->amount < 0)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: a size of %lld; expected 0 or more", what,
                          (long long)c->amount);
    if (c->amount > 0 && (!c->send || !c->recv))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: the buffer is NULL", what);
    if (c->root < 0 || c->root >= g->size)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: root %d is no rank of group %s of %d", what,
                          c->root, g->name, g->size);
    return FSDP_OK;
}

static fsdp_status check_reduction(fsdp_collective c, fsdp_dtype t, fsdp_reduce_op op)
{
    if (fsdp_dtype_size(t) == 0 || (t == FSDP_BOOL && op == FSDP_SUM))
        return fsdp__fail(FSDP_INVALID_DTYPE, "%s: cannot reduce %s%s", fsdp__collective_name(c),
                          fsdp_dtype_name(t), t == FSDP_BOOL ? " by a sum; use FSDP_MAX" : "");
    if (op != FSDP_SUM && op != FSDP_MIN && op != FSDP_MAX)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: %d is no reduce operation",
                          fsdp__collective_name(c), (int)op);
    return FSDP_OK;
}

static fsdp_status issue(fsdp_group *g, fsdp_lane lane, const call *c, fsdp_work **out)
{
    FSDP_TRY(window_make(g, lane));
    fsdp_work *w =
        fsdp__work_new(g, lane, c->collective, fsdp__collective_name(c->collective), &rounds_kind);
    if (!w) return fsdp_error();
    w->send = c->send;
    w->recv = c->recv;
    w->amount = c->amount;
    w->dtype = c->dtype;
    w->op = c->op;
    w->root = c->root;
    w->each = FSDP__WINDOW / (int64_t)unit_size(w) / (c->cut ? g->size : 1);
    w->rounds = c->amount ? (uint64_t)((c->amount - 1) / w->each + 1) : 1;
    w->post.amount = c->amount;
    w->post.dtype = (int32_t)c->dtype;
    w->post.op = (int32_t)c->op;
    w->post.root = c->root;
    fsdp__count(g, lane, c->collective, c->elements, c->elements * (int64_t)unit_size(w));
    return fsdp__work_issue(w, out);
}

fsdp_status fsdp_all_reduce(fsdp_group *g, fsdp_lane lane, void *data, int64_t n, fsdp_dtype t,
                            fsdp_reduce_op op, fsdp_work **work)
{
    if (work) *work = NULL;
    call c = {FSDP_ALL_REDUCE, data, data, n, t, op, 0, false, 0};
    FSDP_TRY(check(g, lane, &c));
    FSDP_TRY(check_reduction(c.collective, t, op));
    if (!g->world) return FSDP_OK;
    /* As if dealt over the ranks: own part from all others, the rest from its owners. */
    fsdp_list_entry e = {1, n, 1, (n + g->size - 1) / g->size, NULL, t, NULL, t, 0};
    int64_t own = fsdp__rows_count(&e, g->rank);
    c.elements = own * (g->size - 1) + n - own;
    return issue(g, lane, &c, work);
}

fsdp_status fsdp_all_gather(fsdp_group *g, fsdp_lane lane, const void *send, void *recv,
                            int64_t bytes, fsdp_work **work)
{
    if (work) *work = NULL;
    call c = {FSDP_ALL_GATHER, send, recv, bytes, FSDP_DTYPE_NONE, FSDP_SUM, 0, false, 0};
    FSDP_TRY(check(g, lane, &c));
    if (!g->world) return fsdp__self_copy(send, recv, bytes);
    c.elements = bytes * (g->size - 1);
    return issue(g, lane, &c, work);
}

fsdp_status fsdp_reduce_scatter(fsdp_group *g, fsdp_lane lane, const void *send, void *recv,
                                int64_t n, fsdp_dtype t, fsdp_work **work)
{
    if (work) *work = NULL;
    call c = {FSDP_REDUCE_SCATTER, send, recv, n, t, FSDP_SUM, 0, true, 0};
    FSDP_TRY(check(g, lane, &c));
    FSDP_TRY(check_reduction(c.collective, t, FSDP_SUM));
    if (!g->world) return fsdp__self_copy(send, recv, n * (int64_t)fsdp_dtype_size(t));
    c.elements = n * (g->size - 1);
    return issue(g, lane, &c, work);
}

fsdp_status fsdp_broadcast(fsdp_group *g, fsdp_lane lane, void *data, int64_t bytes, int root,
                           fsdp_work **work)
{
    if (work) *work = NULL;
    call c = {FSDP_BROADCAST, data, data, bytes, FSDP_DTYPE_NONE, FSDP_SUM, root, false, 0};
    FSDP_TRY(check(g, lane, &c));
    if (!g->world) return FSDP_OK;
    c.elements = g->rank == root ? 0 : bytes;
    return issue(g, lane, &c, work);
}

fsdp_status fsdp_all_to_all(fsdp_group *g, fsdp_lane lane, const void *send, void *recv,
                            int64_t bytes, fsdp_work **work)
{
    if (work) *work = NULL;
    call c = {FSDP_ALL_TO_ALL, send, recv, bytes, FSDP_DTYPE_NONE, FSDP_SUM, 0, true, 0};
    FSDP_TRY(check(g, lane, &c));
    if (!g->world) return fsdp__self_copy(send, recv, bytes);
    c.elements = bytes * (g->size - 1);
    return issue(g, lane, &c, work);
}

fsdp_status fsdp_barrier(fsdp_group *g, fsdp_lane lane)
{
    FSDP_TRY(fsdp__issue_check(g, lane, FSDP_BARRIER, "barrier"));
    if (!g->world) return FSDP_OK;
    fsdp_work *w = fsdp__work_new(g, lane, FSDP_BARRIER, "barrier", &barrier_kind);
    if (!w) return fsdp_error();
    fsdp__count(g, lane, FSDP_BARRIER, 0, 0);
    return fsdp__work_issue(w, NULL);
}
