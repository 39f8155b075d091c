/*
 * count.c - names, and counters of what a rank sent: by group, lane and collective.
 *
 * Counted when a collective is issued, from its arguments alone, so the numbers do not depend on
 * how the bytes travel. A group of one rank counts nothing.
 */
#include <string.h>

#include "comm/comm_internal.h"

const char *fsdp__lane_name(fsdp_lane l)
{
    static const char *const names[] = {
#define FSDP__X(e, name) name,
        FSDP_LANE_LIST(FSDP__X)
#undef FSDP__X
    };
    return l >= 0 && l < FSDP_LANE_COUNT ? names[l] : "unknown lane";
}

const char *fsdp__collective_name(fsdp_collective c)
{
    static const char *const names[] = {
#define FSDP__X(e, name) name,
        FSDP_COLLECTIVE_LIST(FSDP__X)
#undef FSDP__X
    };
    return c >= 0 && c < FSDP_COLLECTIVE_COUNT ? names[c] : "unknown collective";
}

void fsdp__count(fsdp_group *g, fsdp_lane l, fsdp_collective c, int64_t elements, int64_t bytes)
{
    fsdp_comm_count *n = &g->lanes[l].counts[c];
    n->calls++;
    n->elements += elements;
    n->bytes_copied += bytes;
}

fsdp_comm_count fsdp_comm_count_get(const fsdp_group *g, fsdp_lane l, fsdp_collective c)
{
    if (!g || l < 0 || l >= FSDP_LANE_COUNT || c < 0 || c >= FSDP_COLLECTIVE_COUNT)
        return (fsdp_comm_count){0};
    return g->lanes[l].counts[c];
}

fsdp_comm_count fsdp_comm_count_total(fsdp_lane l, fsdp_collective c)
{
    const fsdp__comm_state *s = fsdp__comm_state_peek();
    fsdp_comm_count sum = {0};
    for (int64_t i = 0; s && i < s->n_groups; i++) {
        fsdp_comm_count n = fsdp_comm_count_get(s->groups[i], l, c);
        sum.calls += n.calls;
        sum.elements += n.elements;
        sum.bytes_copied += n.bytes_copied;
        sum.bytes_wire += n.bytes_wire;
        sum.scaled += n.scaled;
    }
    return sum;
}

void fsdp_comm_count_reset(void)
{
    fsdp__comm_state *s = fsdp__comm_state_peek();
    for (int64_t i = 0; s && i < s->n_groups; i++)
        for (int l = 0; l < FSDP_LANE_COUNT; l++)
            memset(s->groups[i]->lanes[l].counts, 0, sizeof s->groups[i]->lanes[l].counts);
}
