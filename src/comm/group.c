/*
 * group.c - groups of ranks, and the gathered copies that a group shares.
 *
 * A group has a slot (its pages in the control area) and a part of the gather area. Both are agreed
 * on when it is made, by one exchange over the parent: the largest next slot and next free byte of
 * all members, so two groups that share a rank never share either. Groups without a common rank may
 * have the same slot (pages are by rank), never the same part: parts of one exchange are dealt in
 * the order of the groups' first ranks.
 *
 * Gathered copies: all ranks of a group take and give in the same program order on heaps of their
 * own, so they get the same offsets without talking. Giving counts this rank's releases; the count
 * stays with the freed bytes, and whoever writes there next waits until all ranks have come to it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

/* ---- the state of a context --------------------------------------------------------- */

static void state_free(void *p)
{
    fsdp__comm_state *s = p;
    fsdp__comm_state_clear(s);
    free(s);
}

static void group_free_kept(void *g)
{
    fsdp__group_free(g);
}

/* Windows and descriptions are no longer in the accounts. Their bytes stay as they are: a peer that
 * is late with an error may still look at them. */
static void uncharge(const fsdp_group *g)
{
    int64_t bytes = 0;
    for (int l = 0; l < FSDP_LANE_COUNT; l++) {
        bytes += g->lanes[l].window ? 2 * FSDP__WINDOW : 0;
        for (int i = 0; i < FSDP__POSTS; i++)
            bytes += g->lanes[l].descriptions[i].n * (int64_t)sizeof(fsdp__post_entry);
    }
    for (int r = 0; g->pairs && r < g->size; r++)
        bytes += g->pairs[r].window ? 2 * FSDP__PAIR_SLOT : 0;
    if (bytes > 0) fsdp__account_give(FSDP_COMMUNICATION, bytes);
}

/* Forgets world and groups. They live on until the context goes: tensors may still lie in their
 * memory, and give it back through them. */
void fsdp__comm_state_clear(fsdp__comm_state *s)
{
    for (int64_t i = 0; i < s->n_groups; i++)
        uncharge(s->groups[i]);
    if (s->world) {
        fsdp__error_set_hook(NULL, NULL);
        fsdp__world_leave(s->world);
    }
    s->world = NULL;
    free(s->groups);
    s->groups = NULL;
    s->n_groups = s->cap = 0;
    s->joined = false;
    fsdp__slot_set(FSDP__SLOT_FSDP, NULL, NULL); /* the default mesh is one of these groups */
}

fsdp__comm_state *fsdp__comm_state_peek(void)
{
    return fsdp__slot_get(FSDP__SLOT_COMM);
}

fsdp__comm_state *fsdp__comm_state_get(void)
{
    fsdp__comm_state *s = fsdp__slot_get(FSDP__SLOT_COMM);
    if (!s) {
        s = fsdp__calloc(1, sizeof *s, "the groups of a context");
        if (!s) return NULL;
        fsdp__slot_set(FSDP__SLOT_COMM, s, state_free);
    }
    int alone = 0;
    if (s->n_groups == 0 && !fsdp__group_new(s, "world", &alone, 1, 0, NULL, 0)) return NULL;
    return s;
}

/* ---- making and freeing ---------------------------------------------------------------- */

fsdp_group *fsdp__group_new(fsdp__comm_state *s, const char *name, const int *ranks, int n,
                            int my_rank, fsdp__world *w, int64_t slot)
{
    fsdp_group *g = fsdp__calloc(1, sizeof *g, "a group of ranks");
    if (!g) return NULL;
    g->name = fsdp__strdup(name);
    g->ranks = fsdp__calloc((size_t)n, sizeof *g->ranks, "a group of ranks");
    g->members = fsdp__calloc((size_t)n, sizeof(void *), "a group of ranks");
    g->rank = my_rank;
    g->size = n;
    g->world = n > 1 ? w : NULL;
    g->slot = slot;
    if (!g->name || !g->ranks || !g->members ||
        FSDP__GROW(s->groups, s->cap, s->n_groups + 1, "the groups of a context") != FSDP_OK ||
        fsdp__allocator_keep(g, group_free_kept) != FSDP_OK) {
        fsdp__group_free(g);
        return NULL;
    }
    memcpy(g->ranks, ranks, (size_t)n * sizeof *ranks);
    for (int r = 0; g->world && r < n; r++)
        g->members[r] = fsdp__member_page_of(w, slot, ranks[r]);
    s->groups[s->n_groups++] = g;
    return g;
}

void fsdp__group_free(fsdp_group *g)
{
    if (!g) return;
    while (g->live)
        fsdp__work_free(g->live);
    fsdp__heap_free(g->shared);
    free(g->pairs);
    free(g->members);
    free(g->ranks);
    free(g->name);
    free(g);
}

/* What each rank of the parent says when a group is made. */
typedef struct proposal {
    uint64_t next_slot, list_hash;
    int64_t gather_next, part;
    int32_t leader, n; /* first rank of the list in the parent; its length */
} proposal;

static fsdp_status check_list(const fsdp_group *parent, const int *ranks, int n, const char *name,
                              int *mine)
{
    *mine = -1;
    if (!ranks || n < 1 || n > parent->size)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_group_create '%s': a list of %d ranks; expected 1 to %d", name, n,
                          parent->size);
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= parent->size || (i > 0 && ranks[i] <= ranks[i - 1]))
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "fsdp_group_create '%s': entry %d of the list is rank %d; expected "
                              "ascending ranks of group %s of %d",
                              name, i, ranks[i], parent->name, parent->size);
        if (ranks[i] == parent->rank) *mine = i;
    }
    if (*mine < 0)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "fsdp_group_create '%s': rank %d is not in its own list; every rank of the "
            "parent gives the list that it is in",
            name, parent->rank);
    return FSDP_OK;
}

/* FNV-1a over the list. */
static uint64_t hash_list(const int *ranks, int n)
{
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (int i = 0; i < n; i++)
        h = (h ^ (uint64_t)(uint32_t)ranks[i]) * UINT64_C(0x100000001b3);
    return h;
}

/* Compares the lists, and deals slot and part: the same on every rank. */
static fsdp_status settle(const fsdp_group *parent, const proposal *all, const int *ranks, int n,
                          const char *name, uint64_t *slot, int64_t *part_offset)
{
    const proposal *me = &all[parent->rank];
    fsdp__world *w = parent->world;
    uint64_t next = 0;
    int64_t gather = 0;
    for (int i = 0; i < n; i++)
        if (all[ranks[i]].list_hash != me->list_hash || all[ranks[i]].n != n)
            return fsdp__fail(
                FSDP_MISMATCH,
                "fsdp_group_create '%s': rank %d and rank %d of group %s give different "
                "lists; all ranks of a list must give the same one",
                name, parent->rank, ranks[i], parent->name);
    for (int r = 0; r < parent->size; r++) {
        if (all[r].next_slot > next) next = all[r].next_slot;
        if (all[r].gather_next > gather) gather = all[r].gather_next;
    }
    *slot = next;
    for (int r = 0; r < parent->size; r++) {
        if (r == me->leader) *part_offset = gather;
        if (r == all[r].leader) gather += all[r].part;
    }
    if (next >= FSDP__MAX_SLOTS || gather > w->seg.layout.gather)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "fsdp_group_create '%s': too many groups; %d can be made in one run, of "
                          "%lld bytes of address space for gathered copies",
                          name, (int)FSDP__MAX_SLOTS - (int)FSDP__MAX_WORLDS,
                          (long long)w->seg.layout.gather);
    w->next_slot = next + 1;
    w->gather_next = gather;
    return FSDP_OK;
}

fsdp_status fsdp_group_create(fsdp_group *parent, const int *ranks, int n, const char *name,
                              fsdp_group **out)
{
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    if (!parent || !out)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_group_create: %s is NULL",
                          parent ? "out" : "the parent");
    if (!name) name = "group";
    *out = NULL;
    int mine;
    FSDP_TRY(check_list(parent, ranks, n, name, &mine));
    fsdp__comm_state *s = fsdp__comm_state_get();
    if (!s) return fsdp_error();

    fsdp__world *w = parent->world;
    uint64_t slot = 0;
    int64_t part_offset = 0, part = 0;
    if (w) {
        int64_t page = 4096, share = w->seg.layout.part / w->size * n;
        /* Two parents without a common rank know nothing of each other's groups. */
        bool dealt = n > 1 && parent->size == w->size;
        part = dealt ? (share + page - 1) / page * page : 0;
        proposal me = {w->next_slot, hash_list(ranks, n), w->gather_next, part, ranks[0], n};
        proposal *all = fsdp__calloc((size_t)parent->size, sizeof *all, "a group of ranks");
        if (!all) return fsdp_error();
        fsdp_status st = fsdp_all_gather(parent, FSDP_LANE_CONTROL, &me, all, sizeof me, NULL);
        if (st == FSDP_OK) st = settle(parent, all, ranks, n, name, &slot, &part_offset);
        free(all);
        if (st != FSDP_OK) return st;
    }
    int *world_ranks = fsdp__calloc((size_t)n, sizeof *world_ranks, "a group of ranks");
    if (!world_ranks) return fsdp_error();
    for (int i = 0; i < n; i++)
        world_ranks[i] = parent->ranks[ranks[i]];
    fsdp_group *g = fsdp__group_new(s, name, world_ranks, n, mine, w, (int64_t)slot);
    free(world_ranks);
    if (!g) return fsdp_error();
    g->part_offset = part_offset;
    g->part_bytes = part;
    g->timeout = parent->timeout;
    *out = g;
    return FSDP_OK;
}

/* ---- asking -------------------------------------------------------------------------- */

fsdp_group *fsdp_group_world(void)
{
    fsdp__comm_state *s = fsdp__comm_state_get();
    return s ? s->groups[0] : NULL;
}

int fsdp_group_rank(const fsdp_group *g)
{
    return g ? g->rank : 0;
}

int fsdp_group_size(const fsdp_group *g)
{
    return g ? g->size : 1;
}

const char *fsdp_group_name(const fsdp_group *g)
{
    return g ? g->name : "";
}

int fsdp_group_world_rank(const fsdp_group *g, int r)
{
    return g && r >= 0 && r < g->size ? g->ranks[r] : -1;
}

const char *fsdp_group_backend(const fsdp_group *g)
{
    return g && g->world ? "shm" : "self";
}

void fsdp_group_set_timeout(fsdp_group *g, double seconds)
{
    if (g) g->timeout = seconds;
}

fsdp__allocator *fsdp__comm_allocator(fsdp_group *g)
{
    if (g && g->world) return g->world->allocator;
    /* A group of one in a larger world: its memory may be read through the rank's other groups. */
    const fsdp__comm_state *s = fsdp__comm_state_peek();
    return s && s->world ? s->world->allocator : fsdp__allocator_cpu();
}

void *fsdp_comm_alloc(fsdp_group *g, int64_t bytes)
{
    if (fsdp_error() != FSDP_OK) return NULL;
    if (!g || bytes < 0) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_comm_alloc: %lld bytes of %s; expected 0 or more",
                   (long long)bytes, g ? g->name : "no group");
        return NULL;
    }
    static const char what[] = "memory that peers read";
    if (fsdp__account_take(FSDP_COMMUNICATION, bytes, what) != FSDP_OK) return NULL;
    fsdp__allocator *a = fsdp__comm_allocator(g);
    void *p = a ? a->alloc(a, bytes > 0 ? (size_t)bytes : 1, what) : NULL;
    if (!p) fsdp__account_give(FSDP_COMMUNICATION, bytes);
    return p;
}

void fsdp_comm_free(fsdp_group *g, void *p, int64_t bytes)
{
    fsdp__allocator *a = p ? fsdp__comm_allocator(g) : NULL;
    if (!a) return;
    a->free(a, p, bytes > 0 ? (size_t)bytes : 1);
    fsdp__account_give(FSDP_COMMUNICATION, bytes);
}

void fsdp__comm_set_disturb(fsdp__comm_disturb fn, void *arg)
{
    fsdp__comm_state *s = fsdp__comm_state_get();
    if (!s) return;
    s->disturb = fn;
    s->disturb_arg = arg;
}

void fsdp__comm_set_schedule(fsdp__comm_schedule fn, void *arg)
{
    fsdp__comm_state *s = fsdp__comm_state_get();
    if (!s) return;
    s->schedule = fn;
    s->schedule_arg = arg;
}

/* ---- gathered copies ----------------------------------------------------------------- */

fsdp_status fsdp_shared_take(fsdp_group *g, int64_t bytes, const char *what, fsdp_shared *out)
{
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    if (!g || !out || bytes < 0)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_shared_take: %s",
                          !g     ? "the group is NULL"
                          : !out ? "out is NULL"
                                 : "a negative size");
    if (!what) what = "a gathered copy";
    if (!g->world) return fsdp__self_shared_take(bytes, what, out);
    if (g->part_bytes == 0)
        return fsdp__fail(
            FSDP_UNSUPPORTED,
            "fsdp_shared_take: group %s was made from a part of the world; groups that "
            "share gathered copies are made from fsdp_group_world()",
            g->name);
    if (!g->shared) g->shared = fsdp__heap_create(g->part_bytes);
    if (!g->shared) return fsdp_error();
    fsdp_shared s = {.bytes = bytes};
    int64_t at = fsdp__heap_take(g->shared, bytes, &s.clock, what);
    if (at < 0) return fsdp_error();
    const fsdp__segment *seg = &g->world->seg;
    s.rw = seg->gather + g->part_offset + at;
    s.offset = seg->layout.control + seg->layout.heap * g->world->size + g->part_offset + at;
    s.ro = fsdp__at(g->world, s.offset);
    *out = s;
    return FSDP_OK;
}

/* Works while an error is kept: what was taken is given back all the same. */
void fsdp_shared_give(fsdp_group *g, const fsdp_shared *s)
{
    if (!g || !s || !s->rw) return;
    if (!g->world) {
        fsdp__self_shared_give(s);
        return;
    }
    fsdp__publish(g, &g->members[g->rank]->released, ++g->released);
    fsdp__heap_give(g->shared, (const char *)s->rw - g->world->seg.gather - g->part_offset,
                    g->released);
}

void fsdp__shared_bytes(const fsdp_group *g, int64_t *live, int64_t *touched)
{
    *live = g && g->shared ? fsdp__heap_live(g->shared) : 0;
    *touched = g && g->shared ? fsdp__heap_touched(g->shared) : 0;
}
