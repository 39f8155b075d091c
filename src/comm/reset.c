/*
 * reset.c - all ranks together forget an error and begin anew.
 *
 * After an error the ranks have stopped at different calls, so their numbers no longer agree. Two
 * rendezvous repair that: after the first no rank is inside a collective any more, so each puts its
 * own published words back to zero, as they were when its groups were made, and rank 0 takes the
 * abort away; after the second all know that all have done so. Gathered copies must have been given
 * back before: then the heaps of all ranks begin anew as well, and agree.
 */
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

typedef struct meeting {
    fsdp_work work; /* stands for the rendezvous in messages */
    uint64_t number;
} meeting;

static int all_here(void *arg)
{
    meeting *m = arg;
    const fsdp__world *w = m->work.group->world;
    for (int r = 0; r < w->size; r++) {
        if (atomic_load(&fsdp__rank_page_of(w, r)->resets) >= m->number) continue;
        m->work.blocked_on = r;
        m->work.blocked_by = "come to the reset";
        return 0;
    }
    return 1;
}

static fsdp_status meet(fsdp_group *world)
{
    fsdp__world *w = world->world;
    meeting m = {.number = ++w->resets};
    m.work = (fsdp_work){.group = world,
                         .lane = FSDP_LANE_CONTROL,
                         .collective = FSDP_BARRIER,
                         .seq = m.number,
                         .label = "reset",
                         .blocked_on = world->rank,
                         .despite_abort = true};
    fsdp__publish(world, &fsdp__rank_page_of(w, w->rank)->resets, m.number);
    return fsdp__wait(world, all_here, &m, &m.work);
}

/* Works that are under way are over: waiting for one frees it and gives FSDP_INTERRUPTED. */
static void cancel(fsdp_group *g)
{
    for (fsdp_work *w = g->live; w; w = w->live_next) {
        if (!w->done) w->cancelled = true;
        w->queued = false;
        w->next = NULL;
    }
}

static void lanes_to_zero(fsdp_group *g)
{
    for (int l = 0; l < FSDP_LANE_COUNT; l++) {
        fsdp__lane_state *lane = &g->lanes[l];
        fsdp__lane_page *page = fsdp__own_lane(g, (fsdp_lane)l);
        lane->head = lane->tail = NULL;
        lane->issued = lane->rounds = 0;
        atomic_store(&page->posted, 0);
        atomic_store(&page->stage, 0);
        atomic_store(&page->read, 0);
        atomic_store(&page->finished, 0);
        atomic_store(&page->staged, 0);
        atomic_store(&page->consumed, 0);
    }
    for (int r = 0; g->pairs && r < g->size; r++) {
        fsdp__pair_page *page = fsdp__pair_page_of(g, g->rank, r);
        char *window = g->pairs[r].window;
        memset(&g->pairs[r], 0, sizeof g->pairs[r]);
        g->pairs[r].window = window;
        atomic_store(&page->sent, 0);
        atomic_store(&page->received, 0);
    }
}

static fsdp_status group_to_zero(fsdp_group *g)
{
    if (g->shared && fsdp__heap_live(g->shared) > 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "reset: group %s still has %lld bytes of gathered copies; reshard every "
                          "unit before the reset",
                          g->name, (long long)fsdp__heap_live(g->shared));
    cancel(g);
    lanes_to_zero(g);
    fsdp__heap_free(g->shared);
    g->shared = NULL;
    g->released = 0;
    atomic_store(&g->members[g->rank]->released, 0);
    return FSDP_OK;
}

fsdp_status fsdp__comm_reset(void)
{
    fsdp__comm_state *s = fsdp__comm_state_peek();
    fsdp_error_clear();
    if (!s || !s->world) return FSDP_OK;
    fsdp_group *world = s->groups[0];
    FSDP_TRY(meet(world));
    for (int64_t i = 0; i < s->n_groups; i++)
        if (s->groups[i]->world) FSDP_TRY(group_to_zero(s->groups[i]));
    if (s->world->rank == 0) fsdp__abort_clear(s->world);
    return meet(world);
}
