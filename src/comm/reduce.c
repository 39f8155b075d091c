/*
 * reduce.c - sums over ranks of lists of gradients.
 *
 * reduce_scatter: when all ranks have posted where their gradients lie, each sums its own rows
 * straight out of them into its shard: one pass, no staging. all_reduce: each sums its own rows in
 * place, then copies the others' rows out of their owners' memory. Both sum in one tree over all
 * ranks in rank order, so they give the same bits.
 *
 * Presence travels with the description: a rank without a gradient is summed as zeros in its place
 * of the tree; an entry that no rank has is left alone and told so.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

enum { ZERO_BYTES = 16 * 1024 };

/* Stands for the gradient of a rank that has none. */
static const _Alignas(64) char zeros[ZERO_BYTES];

/* The sum over all ranks of n elements that begin at `first` of entry k. */
static void sum_ranks(const fsdp_work *w, int k, const fsdp__post_entry *const *peers,
                      const void **sources, int64_t first, int64_t n, void *to, fsdp_dtype to_dtype,
                      float scale, int add)
{
    const fsdp_group *g = w->group;
    const fsdp_list_entry *e = &w->e[k];
    size_t from_size = fsdp_dtype_size(e->full_dtype), to_size = fsdp_dtype_size(to_dtype);
    bool holes = false;
    for (int r = 0; r < g->size; r++)
        holes |= !peers[r][k].present;
    /* Zeros are as long as their buffer: with a rank missing the sum goes block by block. */
    int64_t block = holes ? (int64_t)(ZERO_BYTES / from_size) : n;
    for (int64_t at = 0; at < n; at += block) {
        int64_t m = n - at < block ? n - at : block;
        for (int r = 0; r < g->size; r++) {
            const char *full = peers[r][k].present ? fsdp__at(g->world, peers[r][k].offset) : NULL;
            sources[r] = full ? full + (size_t)(first + at) * from_size : zeros;
            /* The own part through the own mapping: it may be written in place. */
            if (full && r == g->rank)
                sources[r] = (const char *)e->full + (size_t)(first + at) * from_size;
        }
        fsdp__sum_tree((char *)to + (size_t)at * to_size, to_dtype, sources, e->full_dtype, g->size,
                       (size_t)m, scale, add);
    }
}

/* Tables of the peers' descriptions and of sources, for one step; NULL: error kept. */
static const fsdp__post_entry **peer_tables(const fsdp_work *w)
{
    const fsdp_group *g = w->group;
    const fsdp__post_entry **peers =
        fsdp__calloc((size_t)g->size * 2, sizeof *peers, "a reduction's table of ranks");
    for (int r = 0; peers && r < g->size; r++) {
        const fsdp__post *post = &g->members[r]->lanes[w->lane].posts[w->seq % FSDP__POSTS];
        peers[r] = fsdp__at(g->world, post->entries);
    }
    return peers;
}

/* Sums the own rows of every entry that some rank has. */
static int sum_own_rows(fsdp_work *w, bool in_place)
{
    const fsdp_group *g = w->group;
    if (w->n == 0) return 1;
    const fsdp__post_entry **peers = peer_tables(w);
    if (!peers) return -1;
    const void **sources = (const void **)(peers + g->size);
    float scale;
    memcpy(&scale, &w->post.scale_bits, sizeof scale);
    for (int k = 0; k < w->n; k++) {
        fsdp_list_entry *e = &w->e[k];
        for (int r = 0; r < g->size; r++)
            w->union_present[k] |= peers[r][k].present != 0;
        int64_t begin = fsdp__rows_begin(e, g->rank), n = fsdp__rows_count(e, g->rank) * e->inner;
        if (!w->union_present[k] || n == 0) continue;
        size_t shard = fsdp_dtype_size(e->shard_dtype), full = fsdp_dtype_size(e->full_dtype);
        for (int64_t o = 0; o < e->outer; o++) {
            int64_t first = (o * e->dim + begin) * e->inner;
            void *to = in_place ? (char *)e->full + (size_t)first * full
                                : (char *)e->shard + (size_t)(o * n) * shard;
            sum_ranks(w, k, peers, sources, first, n, to, in_place ? e->full_dtype : e->shard_dtype,
                      scale, w->post.add);
        }
    }
    free((void *)peers);
    return 1;
}

static void tell_presence(fsdp_work *w)
{
    for (int k = 0; k < w->n; k++)
        w->user[k].present = w->union_present[k];
}

static int scatter_step(fsdp_work *w)
{
    if (!w->all_checked) return 0;
    if (w->in == 0 && sum_own_rows(w, false) < 0) return -1;
    w->in = 1;
    if (!fsdp__all_before_finished(w)) return 0;
    tell_presence(w);
    return 1;
}

/* The rows that the other ranks summed, out of their fulls. */
static void copy_rows(const fsdp_work *w)
{
    const fsdp_group *g = w->group;
    for (int i = 1; i < g->size; i++) {
        int r = (g->rank + i) % g->size;
        const fsdp__post *post = &g->members[r]->lanes[w->lane].posts[w->seq % FSDP__POSTS];
        const fsdp__post_entry *p = w->n ? fsdp__at(g->world, post->entries) : NULL;
        for (int k = 0; k < w->n; k++) {
            const fsdp_list_entry *e = &w->e[k];
            int64_t begin = fsdp__rows_begin(e, r), n = fsdp__rows_count(e, r) * e->inner;
            if (!w->union_present[k] || n == 0) continue;
            size_t size = fsdp_dtype_size(e->full_dtype);
            const char *full = fsdp__at(g->world, p[k].offset);
            for (int64_t o = 0; o < e->outer; o++) {
                size_t at = (size_t)((o * e->dim + begin) * e->inner) * size;
                fsdp__convert((char *)e->full + at, e->full_dtype, full + at, e->full_dtype,
                              (size_t)n);
            }
        }
    }
}

/* Three halves: own rows summed, all rows copied, and everybody has copied (so that the caller may
 * change its result at once). */
static int all_reduce_step(fsdp_work *w)
{
    fsdp__lane_page *own = fsdp__own_lane(w->group, w->lane);
    if (!w->all_checked) return 0;
    if (w->in == 0) {
        if (sum_own_rows(w, true) < 0) return -1;
        fsdp__publish(w->group, &own->stage, w->seq);
        w->in = 1;
    }
    if (w->in == 1) {
        if (!fsdp__peers_reached(w, offsetof(fsdp__lane_page, stage), w->seq, "summed its rows"))
            return 0;
        copy_rows(w);
        fsdp__publish(w->group, &own->read, w->seq);
        w->in = 2;
    }
    if (!fsdp__peers_reached(w, offsetof(fsdp__lane_page, read), w->seq, "read the summed rows"))
        return 0;
    tell_presence(w);
    return 1;
}

static const fsdp__work_kind scatter_kind = {NULL, scatter_step};
static const fsdp__work_kind all_reduce_kind = {NULL, all_reduce_step};

/* ---- issue -------------------------------------------------------------------------- */

static fsdp_status check_entry(const fsdp_group *g, fsdp_collective c, const char *label,
                               const fsdp_list_entry *e, int i)
{
    bool scatter = c == FSDP_REDUCE_SCATTER;
    const char *what = fsdp__collective_name(c);
    int64_t own = e->outer * fsdp__rows_count(e, g->rank) * e->inner;
    int64_t all = e->outer * e->dim * e->inner;
    if (!fsdp_dtype_is_floating(e->full_dtype))
        return fsdp__fail(FSDP_INVALID_DTYPE,
                          "%s '%s': entry %d is %s; lists of gradients are floating", what, label,
                          i, fsdp_dtype_name(e->full_dtype));
    if (scatter && own > 0 && !e->shard)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s '%s': entry %d has no shard", what, label, i);
    if (all == 0 || (scatter && !e->present)) return FSDP_OK;
    if (!e->full)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s '%s': entry %d is present and has no full",
                          what, label, i);
    if (g->world &&
        fsdp__offset_of(g->world, e->full, all * (int64_t)fsdp_dtype_size(e->full_dtype)) < 0)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "%s '%s': the full of entry %d does not lie in memory that peers can read; "
            "allocate it with fsdp_comm_alloc",
            what, label, i);
    return FSDP_OK;
}

static fsdp_status issue(fsdp_group *g, fsdp_lane lane, fsdp_collective c, const char *label,
                         fsdp_list_entry *e, int n, float scale, int add, fsdp_work **out)
{
    fsdp_work *w =
        fsdp__work_new(g, lane, c, label, c == FSDP_ALL_REDUCE ? &all_reduce_kind : &scatter_kind);
    if (!w) return fsdp_error();
    w->e = fsdp__calloc((size_t)n, sizeof *e, "a list of gradients");
    w->union_present = w->e ? fsdp__calloc((size_t)n, 1, "a list of gradients") : NULL;
    if (!w->union_present) {
        fsdp__work_free(w);
        return fsdp_error();
    }
    if (n > 0) memcpy(w->e, e, (size_t)n * sizeof *e);
    w->user = e;
    w->n = n;
    w->post.add = add != 0;
    memcpy(&w->post.scale_bits, &scale, sizeof scale);
    int64_t elements = 0, bytes = 0;
    for (int i = 0; i < n; i++) {
        int64_t own = e[i].outer * fsdp__rows_count(&e[i], g->rank) * e[i].inner;
        int64_t all = e[i].outer * e[i].dim * e[i].inner;
        int64_t moved = own * (g->size - 1) + (c == FSDP_ALL_REDUCE ? all - own : 0);
        elements += moved;
        bytes += moved * (int64_t)fsdp_dtype_size(e[i].full_dtype);
    }
    fsdp__count(g, lane, c, elements, bytes);
    g->lanes[lane].counts[c].scaled += scale != 1.0f;
    return fsdp__work_issue(w, out);
}

fsdp_status fsdp_reduce_scatter_list(fsdp_group *g, fsdp_lane lane, const char *label,
                                     fsdp_list_entry *e, int n, float scale, int add,
                                     fsdp_work **out)
{
    if (!label) label = "";
    if (out) *out = NULL;
    FSDP_TRY(fsdp__issue_check(g, lane, FSDP_REDUCE_SCATTER, label));
    FSDP_TRY(fsdp__list_check("reduce_scatter", g, e, n));
    for (int i = 0; i < n; i++)
        FSDP_TRY(check_entry(g, FSDP_REDUCE_SCATTER, label, &e[i], i));
    if (!g->world) return fsdp__self_reduce(e, n, scale, add);
    return issue(g, lane, FSDP_REDUCE_SCATTER, label, e, n, scale, add, out);
}

fsdp_status fsdp_all_reduce_list(fsdp_group *g, fsdp_lane lane, const char *label,
                                 fsdp_list_entry *e, int n, float scale, fsdp_work **out)
{
    if (!label) label = "";
    if (out) *out = NULL;
    FSDP_TRY(fsdp__issue_check(g, lane, FSDP_ALL_REDUCE, label));
    FSDP_TRY(fsdp__list_check("all_reduce", g, e, n));
    for (int i = 0; i < n; i++)
        FSDP_TRY(check_entry(g, FSDP_ALL_REDUCE, label, &e[i], i));
    if (!g->world) return fsdp__self_all_reduce(e, n, scale);
    return issue(g, lane, FSDP_ALL_REDUCE, label, e, n, scale, 0, out);
}
