/*
 * order.c - what is gathered next, learnt from the step before.
 *
 * The first step records the order in which units were needed while not
 * whole; from then on the next ones are gathered ahead, at most prefetch_limit
 * of them. Nothing is gathered that the recorded step did not use. When a step
 * departs from the record, prefetching stops for the rest of it and the next
 * step records anew. All of this is a function of the program's own order, so
 * every rank does the same.
 */
#include "fsdp/unit.h"

#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"

/* Gives back what was gathered ahead and not used; whether there was any. */
static bool drop_ahead(fsdp__tree *t)
{
    bool any = t->ahead > 0;
    for (int i = 0; i < t->n_units && t->ahead > 0; i++)
        if (t->units[i]->prefetched) fsdp__unit_reshard(t->units[i]);
    t->ahead = 0;
    return any;
}

fsdp_status fsdp__unit_let_go(fsdp__unit *u)
{
    if (u->S == 1 || !u->opt.private_gather) return FSDP_OK;
    return fsdp_barrier(u->shard, FSDP_LANE_GATHER);
}

/* Once for each group of ranks that gathers private copies. */
static fsdp_status let_go(fsdp__tree *t)
{
    for (int i = 0; i < t->n_units; i++) {
        bool seen = false;
        for (int k = 0; k < i && !seen; k++)
            seen = t->units[k]->shard == t->units[i]->shard && t->units[k]->opt.private_gather;
        if (!seen) FSDP_TRY(fsdp__unit_let_go(t->units[i]));
    }
    return FSDP_OK;
}

void fsdp__order_begin(fsdp__tree *t, bool train)
{
    drop_ahead(t);
    if (t->order == &t->train && t->train.recording) t->train.recording = false;
    t->order = train ? &t->train : &t->eval;
    t->order->at = 0;
    t->order->recording = !t->order->known;
    if (t->order->recording) t->order->count = 0;
}

fsdp_status fsdp__order_need(fsdp__tree *t, fsdp__unit *u)
{
    fsdp__order *o = t->order;
    if (!o) return FSDP_OK;
    if (o->recording) {
        FSDP_TRY(FSDP__GROW(o->items, o->cap, o->count + 1, "the order of units"));
        o->items[o->count++] = u->index;
        return FSDP_OK;
    }
    if (!o->known) return FSDP_OK;
    if (o->at < o->count && o->items[o->at] == u->index)
        o->at++;
    else
        o->known = false;
    return FSDP_OK;
}

/* ---- gathering ahead -------------------------------------------------------------- */

static fsdp_status gather_ahead(fsdp__unit *u, bool told)
{
    if (!fsdp__unit_resting(u) || u->n_params == 0) return FSDP_OK;
    FSDP_TRY(fsdp__unit_unshard(u, !told));
    u->prefetched = true;
    u->told = told;
    u->tree->ahead++;
    return FSDP_OK;
}

/* With all that u is the host of. */
static fsdp_status gather_all_ahead(fsdp__unit *u, bool told)
{
    FSDP_TRY(gather_ahead(u, told));
    for (int k = 0; k < u->n_tied; k++)
        if (u->tied[k]->host == u) FSDP_TRY(gather_ahead(u->tied[k], told));
    return FSDP_OK;
}

/* The next of the record. Units with a host come with it and do not count. */
static fsdp_status by_record(fsdp__tree *t, fsdp__unit *u)
{
    fsdp__order *o = t->order;
    if (!o || !o->known) return FSDP_OK;
    /* What is ahead already are the next `ahead` of the order. */
    int64_t at = o->at;
    int n = 0;
    for (; at < o->at + t->ahead && at < o->count; at++)
        n += !t->units[o->items[at]]->host;
    for (; at < o->count; at++) {
        fsdp__unit *next = t->units[o->items[at]];
        if (!next->host && n >= u->opt.prefetch_limit) break;
        if (!fsdp__unit_resting(next)) break; /* running now: it comes back later */
        FSDP_TRY(gather_ahead(next, false));
        n += !next->host;
    }
    return FSDP_OK;
}

static fsdp_status by_list(const fsdp__unit *u, int direction)
{
    for (int i = 0; i < u->n_lists[direction]; i++) {
        fsdp__unit *next = u->lists[direction][i]->of;
        if (!next) continue; /* it was freed */
        if (next->tree != u->tree)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "unit \"%s\" is in the %s prefetch list of \"%s\" and does not run "
                              "below the same root; list modules of one tree",
                              next->name, direction == FSDP__FORWARD ? "forward" : "backward",
                              u->name);
        if (direction == FSDP__BACKWARD && !next->unshard_backward) continue;
        FSDP_TRY(gather_all_ahead(next, true));
    }
    return FSDP_OK;
}

/* Whether backward will come to unit i: unknown in the first step, which passes for yes. */
static bool will_come(const fsdp__order *o, int i)
{
    if (!o || o->recording) return true;
    for (int64_t at = o->at; o->known && at < o->count; at++)
        if (o->items[at] == i) return true;
    return false;
}

/* FSDP2's default backward prefetch. */
static fsdp_status by_post_order(fsdp__tree *t, fsdp__unit *u)
{
    if (u->n_posts == 0) return FSDP_OK;
    int64_t at = u->posts[--u->n_posts];
    if (at == 0) return FSDP_OK;
    fsdp__unit *next = t->units[t->post[at - 1]];
    if (!next->unshard_backward || !will_come(t->order, next->index)) return FSDP_OK;
    return gather_all_ahead(next, true);
}

static fsdp_status gather_next(fsdp__tree *t, fsdp__unit *u, int direction)
{
    if (u->n_lists[direction] > 0) return by_list(u, direction);
    if (u->opt.prefetch_limit < 0) return FSDP_OK;
    if (u->opt.prefetch_limit > 0 && !t->explicit_lists) return by_record(t, u);
    return direction == FSDP__BACKWARD ? by_post_order(t, u) : FSDP_OK;
}

fsdp_status fsdp__order_prefetch(fsdp__tree *t, fsdp__unit *u, int direction)
{
    FSDP_TRY(gather_next(t, u, direction));
    fsdp__offload_ahead(t);
    return FSDP_OK;
}

fsdp_status fsdp__order_post(fsdp__tree *t, fsdp__unit *u)
{
    if (u->n_params == 0) return FSDP_OK;
    /* Forwards whose backward never comes must not add up. */
    if (t->n_post > 4096 + 16 * (int64_t)t->n_units) fsdp__order_forget_posts(t);
    FSDP_TRY(FSDP__GROW(t->post, t->cap_post, t->n_post + 1, "the order of units"));
    FSDP_TRY(FSDP__GROW(u->posts, u->cap_posts, u->n_posts + 1, "the order of units"));
    u->posts[u->n_posts++] = t->n_post;
    t->post[t->n_post++] = u->index;
    return FSDP_OK;
}

void fsdp__order_forget_posts(fsdp__tree *t)
{
    t->n_post = 0;
    for (int i = 0; i < t->n_units; i++)
        t->units[i]->n_posts = 0;
}

fsdp_status fsdp__order_end(fsdp__tree *t)
{
    fsdp__order *o = t->order;
    if (o && o->recording) {
        o->recording = false;
        o->known = true;
    } else if (o && o->at != o->count) {
        o->known = false;
    }
    t->order = NULL;
    /* Also of a second backward, whose order has ended with the first. */
    /* After a backward whose gathers were all used its reductions have told that peers are done. */
    bool dropped = drop_ahead(t);
    return dropped || (o && o == &t->eval) ? let_go(t) : FSDP_OK;
}

void fsdp__order_free(fsdp__order *o)
{
    free(o->items);
    *o = (fsdp__order){0};
}
