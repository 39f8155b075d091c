/*
 * work.c - the queue of a lane, and handles.
 *
 * A work is a state machine that is polled (fsdp__work_kind) and never blocks. It is posted as soon
 * as the ring of descriptions has room; its `first` part may run ahead of the unfinished works
 * before it as long as all of those have one too (gathers into shared copies, which read no peer's
 * memory); its `step` runs when it is the head of its queue. So each published counter only grows,
 * and when a work is finished here, all its peers have come as far as its steps asked for.
 *
 * What two ranks call under the same number is compared before any of the peer's memory is read.
 * After an error the queues stand still: the kept error makes every call return it.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

fsdp__lane_page *fsdp__own_lane(const fsdp_group *g, fsdp_lane l)
{
    return &g->members[g->rank]->lanes[l];
}

static _Atomic uint64_t *counter_of(const fsdp_work *w, int r, size_t counter)
{
    return (_Atomic uint64_t *)((char *)&w->group->members[r]->lanes[w->lane] + counter);
}

bool fsdp__peers_reached(fsdp_work *w, size_t counter, uint64_t value, const char *what)
{
    const fsdp_group *g = w->group;
    for (int i = 1; i < g->size; i++) {
        int r = (g->rank + i) % g->size;
        if (atomic_load_explicit(counter_of(w, r, counter), memory_order_acquire) >= value)
            continue;
        w->blocked_on = r;
        w->blocked_by = what;
        return false;
    }
    return true;
}

/* For works that need no more of their peers than a description, which is posted early: publishes
 * that this rank has read what it reads, and is true once all peers have finished the call before,
 * so that waiting for any call means that all calls before it are over everywhere. */
bool fsdp__all_before_finished(fsdp_work *w)
{
    fsdp__lane_page *page = fsdp__own_lane(w->group, w->lane);
    if (atomic_load_explicit(&page->read, memory_order_relaxed) < w->seq)
        fsdp__publish(w->group, &page->read, w->seq);
    return fsdp__peers_reached(w, offsetof(fsdp__lane_page, finished), w->seq - 1,
                               "finished the call before it");
}

/* ---- life ------------------------------------------------------------------------- */

fsdp_work *fsdp__work_new(fsdp_group *g, fsdp_lane lane, fsdp_collective c, const char *label,
                          const fsdp__work_kind *kind)
{
    fsdp_work *w = fsdp__calloc(1, sizeof *w, "a collective");
    if (!w) return NULL;
    w->group = g;
    w->kind = kind;
    w->lane = lane;
    w->collective = c;
    w->blocked_on = g->rank;
    size_t n = strlen(label);
    memcpy(w->label, label, n < FSDP__LABEL - 1 ? n : FSDP__LABEL - 1);
    memcpy(w->post.label, w->label, FSDP__LABEL);
    w->post.collective = (int32_t)c;
    w->live_next = g->live;
    if (g->live) g->live->live_prev = w;
    g->live = w;
    return w;
}

static void unqueue(fsdp_work **head, fsdp_work **tail, fsdp_work *w)
{
    fsdp_work *before = NULL;
    for (fsdp_work *x = *head; x; before = x, x = x->next) {
        if (x != w) continue;
        *(before ? &before->next : head) = w->next;
        if (*tail == w) *tail = before;
        return;
    }
}

void fsdp__work_free(fsdp_work *w)
{
    if (!w) return;
    fsdp_group *g = w->group;
    if (w->queued) {
        fsdp__lane_state *lane = &g->lanes[w->lane];
        fsdp__pair_state *pair = g->pairs ? &g->pairs[w->peer] : NULL;
        if (w->collective == FSDP_SEND && pair)
            unqueue(&pair->send_head, &pair->send_tail, w);
        else if (w->collective == FSDP_RECV && pair)
            unqueue(&pair->recv_head, &pair->recv_tail, w);
        else
            unqueue(&lane->head, &lane->tail, w);
    }
    *(w->live_prev ? &w->live_prev->live_next : &g->live) = w->live_next;
    if (w->live_next) w->live_next->live_prev = w->live_prev;
    free(w->e);
    free(w->union_present);
    free(w);
}

/* ---- describing and comparing -------------------------------------------------------- */

/* A list's entries, where peers can read them. The buffer of a place in the ring is kept and grows
 * with the longest list that came through it. */
static fsdp_status describe_list(fsdp_work *w, fsdp__lane_state *lane)
{
    fsdp_group *g = w->group;
    int place = (int)(w->seq % FSDP__POSTS);
    if (w->n > lane->descriptions[place].n) {
        fsdp__allocator *a = g->world->allocator;
        int64_t old = lane->descriptions[place].n * (int64_t)sizeof(fsdp__post_entry);
        int64_t bytes = w->n * (int64_t)sizeof(fsdp__post_entry);
        FSDP_TRY(
            fsdp__account_take(FSDP_COMMUNICATION, bytes - old, "descriptions of collectives"));
        a->free(a, lane->descriptions[place].p, (size_t)old);
        lane->descriptions[place].n = 0;
        lane->descriptions[place].p = a->alloc(a, (size_t)bytes, "descriptions of collectives");
        if (!lane->descriptions[place].p) {
            fsdp__account_give(FSDP_COMMUNICATION, bytes);
            return fsdp_error();
        }
        lane->descriptions[place].n = w->n;
    }
    fsdp__post_entry *p = lane->descriptions[place].p;
    bool reduces = w->collective != FSDP_ALL_GATHER;
    for (int i = 0; i < w->n; i++) {
        const fsdp_list_entry *e = &w->e[i];
        const void *source = reduces ? e->full : e->shard;
        p[i] = (fsdp__post_entry){e->outer,       e->dim,        e->inner,   e->chunk, -1,
                                  e->shard_dtype, e->full_dtype, e->present, 0};
        if (source) p[i].offset = fsdp__offset_of(g->world, source, 0);
    }
    w->post.entries = fsdp__offset_of(g->world, p, 0);
    return FSDP_OK;
}

/* 1 posted, 0 no room yet, -1 error. */
static int post(fsdp_work *w, fsdp__lane_state *lane)
{
    if (w->posted) return 1;
    if (w->seq > FSDP__POSTS &&
        !fsdp__peers_reached(w, offsetof(fsdp__lane_page, finished), w->seq - FSDP__POSTS,
                             "finished the calls before it"))
        return 0;
    if (w->n > 0 && describe_list(w, lane) != FSDP_OK) return -1;
    w->post.n = w->n;
    fsdp__lane_page *page = fsdp__own_lane(w->group, w->lane);
    page->posts[w->seq % FSDP__POSTS] = w->post;
    fsdp__publish(w->group, &page->posted, w->seq);
    w->posted = true;
    return 1;
}

static int differ(const fsdp_work *w, int r, const char *what, long long mine, long long theirs)
{
    char where[256];
    fsdp__work_where(w, where, sizeof where);
    fsdp__fail(
        FSDP_MISMATCH,
        "%s: rank %d has %s %lld, rank %d has %lld; all ranks must make the same calls in the "
        "same order",
        where, w->group->world->rank, what, mine, w->group->ranks[r], theirs);
    return -1;
}

static int compare_entries(const fsdp_work *w, int r, const fsdp__post *peer)
{
    const fsdp__post_entry *p = fsdp__at(w->group->world, peer->entries);
    for (int i = 0; i < w->n; i++) {
        const fsdp_list_entry *e = &w->e[i];
        if (e->outer == p[i].outer && e->dim == p[i].dim && e->inner == p[i].inner &&
            e->chunk == p[i].chunk && (int32_t)e->shard_dtype == p[i].shard_dtype &&
            (int32_t)e->full_dtype == p[i].full_dtype)
            continue;
        char where[256];
        fsdp__work_where(w, where, sizeof where);
        fsdp__fail(
            FSDP_MISMATCH,
            "%s: entry %d is (%lld, %lld, %lld) in chunks of %lld, %s to %s, on rank %d, and "
            "(%lld, %lld, %lld) in chunks of %lld, %s to %s, on rank %d; all ranks must have "
            "the same parameters",
            where, i, (long long)e->outer, (long long)e->dim, (long long)e->inner,
            (long long)e->chunk, fsdp_dtype_name(e->shard_dtype), fsdp_dtype_name(e->full_dtype),
            w->group->world->rank, (long long)p[i].outer, (long long)p[i].dim,
            (long long)p[i].inner, (long long)p[i].chunk,
            fsdp_dtype_name((fsdp_dtype)p[i].shard_dtype),
            fsdp_dtype_name((fsdp_dtype)p[i].full_dtype), w->group->ranks[r]);
        return -1;
    }
    return 0;
}

/* 0 if rank r of the group called the same, else -1 with the difference kept. */
static int compare(const fsdp_work *w, int r)
{
    const fsdp__post *a = &w->post;
    const fsdp__post *b = &w->group->members[r]->lanes[w->lane].posts[w->seq % FSDP__POSTS];
    if (a->collective != b->collective || memcmp(a->label, b->label, FSDP__LABEL) != 0) {
        char where[256];
        fsdp__work_where(w, where, sizeof where);
        fsdp__fail(FSDP_MISMATCH,
                   "%s on rank %d is %s '%s' on rank %d; all ranks must make the same calls in the "
                   "same order",
                   where, w->group->world->rank,
                   fsdp__collective_name((fsdp_collective)b->collective), b->label,
                   w->group->ranks[r]);
        return -1;
    }
    if (a->n != b->n) return differ(w, r, "a list length of", a->n, b->n);
    if (a->dtype != b->dtype) {
        char where[256];
        fsdp__work_where(w, where, sizeof where);
        fsdp__fail(FSDP_MISMATCH,
                   "%s: rank %d has dtype %s, rank %d has %s; all ranks must "
                   "make the same calls in the same order",
                   where, w->group->world->rank, fsdp_dtype_name((fsdp_dtype)a->dtype),
                   w->group->ranks[r], fsdp_dtype_name((fsdp_dtype)b->dtype));
        return -1;
    }
    if (a->amount != b->amount) return differ(w, r, "a size of", a->amount, b->amount);
    if (a->op != b->op) return differ(w, r, "reduce operation", a->op, b->op);
    if (a->root != b->root) return differ(w, r, "root", a->root, b->root);
    if (a->shared != b->shared) return differ(w, r, "shared copies", a->shared, b->shared);
    if (a->add != b->add) return differ(w, r, "add", a->add, b->add);
    if (a->scale_bits != b->scale_bits) {
        float mine, theirs;
        memcpy(&mine, &a->scale_bits, sizeof mine);
        memcpy(&theirs, &b->scale_bits, sizeof theirs);
        char where[256];
        fsdp__work_where(w, where, sizeof where);
        fsdp__fail(FSDP_MISMATCH, "%s: rank %d has scale %.9g, rank %d has %.9g", where,
                   w->group->world->rank, (double)mine, w->group->ranks[r], (double)theirs);
        return -1;
    }
    return a->n > 0 ? compare_entries(w, r, b) : 0;
}

static int check_posts(fsdp_work *w)
{
    const fsdp_group *g = w->group;
    for (; w->checked < g->size; w->checked++) {
        int r = w->checked;
        if (r == g->rank) continue;
        if (atomic_load_explicit(counter_of(w, r, offsetof(fsdp__lane_page, posted)),
                                 memory_order_acquire) < w->seq) {
            w->blocked_on = r;
            w->blocked_by = "called it";
            return 0;
        }
        if (compare(w, r)) return -1;
    }
    w->all_checked = true;
    return 0;
}

/* ---- progress --------------------------------------------------------------------- */

/* Posts what can be posted and runs the first parts that may run ahead. */
static int run_ahead(fsdp__lane_state *lane)
{
    bool ahead = true;
    for (fsdp_work *w = lane->head; w; w = w->next) {
        int r = post(w, lane);
        if (r <= 0) return r;
        if (!ahead || !w->kind->first) {
            ahead = false;
            continue;
        }
        if (w->first_done) continue;
        r = w->kind->first(w);
        if (r < 0) return -1;
        if (r == 0) ahead = false;
        w->first_done = r == 1;
    }
    return 0;
}

static int lane_progress(fsdp_group *g, fsdp_lane l)
{
    fsdp__lane_state *lane = &g->lanes[l];
    while (lane->head) {
        fsdp_work *w = lane->head;
        if (run_ahead(lane) < 0) return -1;
        if (!w->posted) return 0;
        if (!w->all_checked && check_posts(w) < 0) return -1;
        int r = w->kind->step(w);
        if (r <= 0) return r;
        fsdp__lane_page *page = fsdp__own_lane(g, l);
        atomic_store(&page->read, w->seq);
        fsdp__publish(g, &page->finished, w->seq);
        lane->head = w->next;
        if (!lane->head) lane->tail = NULL;
        w->queued = false;
        w->done = true;
    }
    return 0;
}

fsdp_status fsdp__group_progress(fsdp_group *g)
{
    if (!g->world) return fsdp_error();
    for (int l = 0; l < FSDP_LANE_COUNT && fsdp_error() == FSDP_OK; l++)
        (void)lane_progress(g, (fsdp_lane)l);
    if (fsdp_error() == FSDP_OK && g->pairs) (void)fsdp__p2p_progress(g);
    return fsdp_error();
}

fsdp_status fsdp_comm_progress(void)
{
    fsdp__comm_state *s = fsdp__comm_state_peek();
    for (int64_t i = 0; s && i < s->n_groups; i++)
        FSDP_TRY(fsdp__group_progress(s->groups[i]));
    return fsdp_error();
}

/* ---- issue and wait ---------------------------------------------------------------- */

fsdp_status fsdp__issue_check(fsdp_group *g, fsdp_lane lane, fsdp_collective c, const char *label)
{
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    if (!g)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s '%s': the group is NULL",
                          fsdp__collective_name(c), label);
    if (lane < 0 || lane >= FSDP_LANE_COUNT)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s '%s': %d is no lane; expected 0 to %d",
                          fsdp__collective_name(c), label, (int)lane, FSDP_LANE_COUNT - 1);
    if (!g->world) return FSDP_OK;
    fsdp__comm_state *s = fsdp__comm_state_peek();
    if (s && s->disturb) s->disturb(s->disturb_arg, lane, c, label);
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    char where[160];
    strcpy(where, fsdp__collective_name(c));
    strcat(where, " '");
    strncat(where, label, FSDP__LABEL);
    strcat(where, "'");
    return fsdp__abort_check(g->world, where);
}

fsdp_status fsdp__work_issue(fsdp_work *w, fsdp_work **out)
{
    fsdp_group *g = w->group;
    fsdp__lane_state *lane = &g->lanes[w->lane];
    w->seq = ++lane->issued;
    w->base = lane->rounds;
    lane->rounds += w->rounds;
    *(lane->tail ? &lane->tail->next : &lane->head) = w;
    lane->tail = w;
    w->queued = true;
    fsdp__rank_page *me = fsdp__rank_page_of(g->world, g->world->rank);
    fsdp__text_set(&me->last_label, w->label);
    fsdp__text_set(&me->last_group, g->name);
    atomic_store(&me->last, w->seq * 256 + (uint64_t)w->lane * 16 + (uint64_t)w->collective);
    if (fsdp__group_progress(g) != FSDP_OK) {
        fsdp__work_free(w);
        return fsdp_error();
    }
    if (!out) return fsdp_work_wait(w);
    *out = w;
    return FSDP_OK;
}

static int is_done(void *arg)
{
    fsdp_work *w = arg;
    if (w->done) return 1;
    if (fsdp__group_progress(w->group) != FSDP_OK) return w->done ? 1 : -1;
    if (w->done) return 1;
    (void)fsdp_comm_progress();
    return w->done ? 1 : fsdp_error() != FSDP_OK ? -1 : 0;
}

fsdp_status fsdp_work_wait(fsdp_work *w)
{
    if (!w) return FSDP_OK;
    fsdp_status s = fsdp_error();
    if (w->cancelled) s = FSDP_INTERRUPTED;
    if (s == FSDP_OK) s = fsdp__wait(w->group, is_done, w, w);
    fsdp__work_free(w);
    return s;
}

int fsdp_work_test(fsdp_work *w)
{
    if (!w) return 1;
    if (fsdp_error() != FSDP_OK || w->cancelled) return -1;
    int r = is_done(w);
    if (r == 0) {
        char where[256];
        fsdp__work_where(w, where, sizeof where);
        if (fsdp__abort_check(w->group->world, where) != FSDP_OK) return -1;
    }
    return r;
}

static int buffers_free(void *arg)
{
    fsdp_work *w = arg;
    if (w->collective == FSDP_SEND || w->collective == FSDP_RECV) return is_done(w);
    if (!w->done) (void)is_done(w);
    if (fsdp_error() != FSDP_OK) return -1;
    return fsdp__peers_reached(w, offsetof(fsdp__lane_page, read), w->seq, "read its part of it");
}

fsdp_status fsdp_work_wait_buffers(fsdp_work *w)
{
    if (!w) return FSDP_OK;
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    if (w->cancelled) return FSDP_INTERRUPTED;
    return fsdp__wait(w->group, buffers_free, w, w);
}

static int drained(void *arg)
{
    fsdp_work *w = arg;
    if (fsdp_comm_progress() != FSDP_OK) return -1;
    return !w->group->lanes[w->lane].head &&
           fsdp__peers_reached(w, offsetof(fsdp__lane_page, finished), w->seq, "finished it");
}

fsdp_status fsdp__group_drain(fsdp_group *g)
{
    for (int l = 0; g->world && l < FSDP_LANE_COUNT; l++) {
        if (g->lanes[l].issued == 0) continue;
        /* Stands for the lane's last call; it is in no queue. */
        fsdp_work last = {.group = g,
                          .lane = (fsdp_lane)l,
                          .seq = g->lanes[l].issued,
                          .collective = FSDP_BARRIER,
                          .label = "fsdp_finalize",
                          .blocked_on = g->rank};
        FSDP_TRY(fsdp__wait(g, drained, &last, &last));
    }
    return FSDP_OK;
}
