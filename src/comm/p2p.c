/*
 * p2p.c - messages between two ranks of a group.
 *
 * Each ordered pair has a window of two slots in the sender's heap and numbers its rounds as lanes
 * do. A slot begins with the size of its message, so a receiver that expects another size says so
 * instead of taking a piece of it. A pair's messages keep their order; they know no lanes.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

enum { HEAD = FSDP__PAIR_SLOT - FSDP__WINDOW, SLOT = FSDP__PAIR_SLOT };

static int64_t part(const fsdp_work *w, uint64_t i)
{
    int64_t left = w->amount - (int64_t)i * FSDP__WINDOW;
    return left < 0 ? 0 : left < FSDP__WINDOW ? left : FSDP__WINDOW;
}

static int blocked(fsdp_work *w, const char *what)
{
    w->blocked_on = w->peer;
    w->blocked_by = what;
    return 0;
}

static int send_step(fsdp_work *w)
{
    fsdp_group *g = w->group;
    fsdp__pair_page *own = fsdp__pair_page_of(g, g->rank, w->peer);
    const fsdp__pair_page *peer = fsdp__pair_page_of(g, w->peer, g->rank);
    for (; w->in < w->rounds; w->in++) {
        uint64_t round = w->base + w->in;
        if (round >= 2 && atomic_load(&peer->received) < round - 1)
            return blocked(w, "received what was sent before");
        char *slot = g->pairs[w->peer].window + (size_t)(round % 2) * SLOT;
        memcpy(slot, &w->amount, sizeof w->amount);
        int64_t bytes = part(w, w->in);
        if (bytes > 0) memcpy(slot + HEAD, w->send + w->in * FSDP__WINDOW, (size_t)bytes);
        fsdp__publish(g, &own->sent, round + 1);
    }
    return 1;
}

static int recv_step(fsdp_work *w)
{
    fsdp_group *g = w->group;
    fsdp__pair_page *own = fsdp__pair_page_of(g, g->rank, w->peer);
    const fsdp__pair_page *peer = fsdp__pair_page_of(g, w->peer, g->rank);
    for (; w->in < w->rounds; w->in++) {
        uint64_t round = w->base + w->in;
        if (atomic_load(&peer->sent) < round + 1) return blocked(w, "sent it");
        const char *slot = (const char *)fsdp__at(g->world, atomic_load(&peer->window)) +
                           (size_t)(round % 2) * SLOT;
        int64_t amount, bytes = part(w, w->in);
        memcpy(&amount, slot, sizeof amount);
        if (amount != w->amount) {
            fsdp__fail(
                FSDP_MISMATCH,
                "recv in group %s: rank %d expects a message of %lld bytes, rank %d sent one "
                "of %lld",
                g->name, g->world->rank, (long long)w->amount, g->ranks[w->peer],
                (long long)amount);
            return -1;
        }
        if (bytes > 0) memcpy(w->recv + w->in * FSDP__WINDOW, slot + HEAD, (size_t)bytes);
        fsdp__publish(g, &own->received, round + 1);
    }
    return 1;
}

static const fsdp__work_kind send_kind = {NULL, send_step};
static const fsdp__work_kind recv_kind = {NULL, recv_step};

/* Runs the queue's head while it is done at once. */
static int queue_progress(fsdp_work **head, fsdp_work **tail)
{
    while (*head) {
        fsdp_work *w = *head;
        int r = w->kind->step(w);
        if (r <= 0) return r;
        *head = w->next;
        if (!*head) *tail = NULL;
        w->queued = false;
        w->done = true;
    }
    return 0;
}

fsdp_status fsdp__p2p_progress(fsdp_group *g)
{
    for (int r = 0; r < g->size; r++) {
        fsdp__pair_state *p = &g->pairs[r];
        if (queue_progress(&p->send_head, &p->send_tail) < 0) return fsdp_error();
        if (queue_progress(&p->recv_head, &p->recv_tail) < 0) return fsdp_error();
    }
    return FSDP_OK;
}

/* ---- issue -------------------------------------------------------------------------- */

static fsdp_status pair_make(fsdp_group *g, int peer, bool sends)
{
    if (!g->pairs)
        g->pairs = fsdp__calloc((size_t)g->size, sizeof *g->pairs, "a group's pairs of ranks");
    if (!g->pairs) return fsdp_error();
    if (!sends || g->pairs[peer].window) return FSDP_OK;
    fsdp__allocator *a = g->world->allocator;
    FSDP_TRY(fsdp__account_take(FSDP_COMMUNICATION, 2 * SLOT, "a window of messages"));
    char *p = a->alloc(a, 2 * SLOT, "a window of messages");
    if (!p) {
        fsdp__account_give(FSDP_COMMUNICATION, 2 * SLOT);
        return fsdp_error();
    }
    g->pairs[peer].window = p;
    atomic_store(&fsdp__pair_page_of(g, g->rank, peer)->window, fsdp__offset_of(g->world, p, 0));
    return FSDP_OK;
}

static fsdp_status issue(fsdp_group *g, fsdp_collective c, const void *send, void *recv,
                         int64_t bytes, int peer, fsdp_work **out)
{
    const char *what = fsdp__collective_name(c);
    bool sends = c == FSDP_SEND;
    FSDP_TRY(fsdp__issue_check(g, FSDP_LANE_CONTROL, c, what));
    if (bytes < 0 || (bytes > 0 && !(sends ? send : recv)))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: %lld bytes at %p", what, (long long)bytes,
                          sends ? send : (const void *)recv);
    if (peer < 0 || peer >= g->size || peer == g->rank)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s: rank %d is not another rank of group %s of %d", what, peer, g->name,
                          g->size);
    FSDP_TRY(pair_make(g, peer, sends));
    fsdp_work *w = fsdp__work_new(g, FSDP_LANE_CONTROL, c, what, sends ? &send_kind : &recv_kind);
    if (!w) return fsdp_error();
    fsdp__pair_state *p = &g->pairs[peer];
    w->send = send;
    w->recv = recv;
    w->amount = bytes;
    w->peer = peer;
    w->rounds = bytes ? (uint64_t)((bytes - 1) / FSDP__WINDOW + 1) : 1;
    uint64_t *rounds = sends ? &p->sent : &p->received;
    w->seq = w->base = *rounds;
    *rounds += w->rounds;
    fsdp_work **head = sends ? &p->send_head : &p->recv_head;
    fsdp_work **tail = sends ? &p->send_tail : &p->recv_tail;
    *(*tail ? &(*tail)->next : head) = w;
    *tail = w;
    w->queued = true;
    fsdp__count(g, FSDP_LANE_CONTROL, c, sends ? 0 : bytes, bytes);
    if (fsdp__group_progress(g) != FSDP_OK) {
        fsdp__work_free(w);
        return fsdp_error();
    }
    if (!out) return fsdp_work_wait(w);
    *out = w;
    return FSDP_OK;
}

fsdp_status fsdp_send(fsdp_group *g, const void *data, int64_t bytes, int to, fsdp_work **work)
{
    if (work) *work = NULL;
    return issue(g, FSDP_SEND, data, NULL, bytes, to, work);
}

fsdp_status fsdp_recv(fsdp_group *g, void *data, int64_t bytes, int from, fsdp_work **work)
{
    if (work) *work = NULL;
    return issue(g, FSDP_RECV, NULL, data, bytes, from, work);
}
