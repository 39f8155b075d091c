/*
 * gather.c - every rank's shards into the whole parameters.
 *
 * Into a shared copy: each rank writes its own rows, once, and everybody reads them where they lie.
 * A rank may write as soon as all ranks have released what lay there before; it need not wait until
 * they call. Into private copies: each rank reads all shards out of their owners' memory.
 *
 * e.g. entry (outer O, dim D, inner I), rank r owns rows [b, b + m): for each o of O, m * I
 * elements at full + (o * D + b) * I come from shard + o * m * I.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

/* Rows of rank r from its shard into the whole. */
static void place_rows(const fsdp_list_entry *e, int r, const void *shard)
{
    int64_t begin = fsdp__rows_begin(e, r), rows = fsdp__rows_count(e, r);
    int64_t n = rows * e->inner;
    size_t from = fsdp_dtype_size(e->shard_dtype), to = fsdp_dtype_size(e->full_dtype);
    if (n == 0) return;
    for (int64_t o = 0; o < e->outer; o++)
        fsdp__convert((char *)e->full + (size_t)((o * e->dim + begin) * e->inner) * to,
                      e->full_dtype, (const char *)shard + (size_t)(o * n) * from, e->shard_dtype,
                      (size_t)n);
}

/* ---- shared ------------------------------------------------------------------------- */

/* Waits until what lies beneath is released by all, then writes the own rows. */
static int shared_first(fsdp_work *w)
{
    const fsdp_group *g = w->group;
    for (int r = 0; r < g->size; r++) {
        if (atomic_load_explicit(&g->members[r]->released, memory_order_acquire) >= w->clock)
            continue;
        w->blocked_on = r;
        w->blocked_by = "released the gathered copy before this one";
        return 0;
    }
    for (int i = 0; i < w->n; i++)
        place_rows(&w->e[i], g->rank, w->e[i].shard);
    fsdp__publish(w->group, &fsdp__own_lane(g, w->lane)->stage, w->seq);
    return 1;
}

static int shared_step(fsdp_work *w)
{
    if (!w->first_done || !w->all_checked) return 0;
    return fsdp__peers_reached(w, offsetof(fsdp__lane_page, stage), w->seq, "written its rows");
}

static const fsdp__work_kind shared_gather = {shared_first, shared_step};

/* ---- private ------------------------------------------------------------------------ */

static int private_step(fsdp_work *w)
{
    const fsdp_group *g = w->group;
    if (!w->all_checked) return 0;
    for (int i = 0; w->in == 0 && i < g->size; i++) {
        int r = (g->rank + i) % g->size; /* all begin at different owners */
        const fsdp__post *post = &g->members[r]->lanes[w->lane].posts[w->seq % FSDP__POSTS];
        const fsdp__post_entry *p = w->n ? fsdp__at(g->world, post->entries) : NULL;
        for (int k = 0; k < w->n; k++)
            if (fsdp__rows_count(&w->e[k], r) > 0 && w->e[k].outer * w->e[k].inner > 0)
                place_rows(&w->e[k], r, fsdp__at(g->world, p[k].offset));
    }
    w->in = 1;
    return fsdp__all_before_finished(w);
}

static const fsdp__work_kind private_gather = {NULL, private_step};

/* ---- issue -------------------------------------------------------------------------- */

static fsdp_status check_entry(const fsdp_group *g, const char *label, const fsdp_list_entry *e,
                               int i, const fsdp_shared *shared)
{
    int64_t own = e->outer * fsdp__rows_count(e, g->rank) * e->inner;
    int64_t all = e->outer * e->dim * e->inner * (int64_t)fsdp_dtype_size(e->full_dtype);
    if ((own > 0 && !e->shard) || (all > 0 && !e->full))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "all_gather '%s': entry %d has no %s", label, i,
                          own > 0 && !e->shard ? "shard" : "full");
    if (shared && all > 0) {
        uintptr_t at = (uintptr_t)e->full, base = (uintptr_t)shared->rw;
        if (at < base || at - base > (uintptr_t)shared->bytes ||
            all > shared->bytes - (int64_t)(at - base))
            return fsdp__fail(
                FSDP_INVALID_ARGUMENT,
                "all_gather '%s': the full of entry %d (%lld bytes) does not lie inside "
                "the shared copy of %lld bytes; give pointers based on its rw",
                label, i, (long long)all, (long long)shared->bytes);
    } else if (!shared && own > 0 && g->world) {
        int64_t bytes = own * (int64_t)fsdp_dtype_size(e->shard_dtype);
        if (fsdp__offset_of(g->world, e->shard, bytes) < 0)
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "all_gather '%s': the shard of entry %d does not lie in memory that "
                              "peers can read; allocate it with fsdp_comm_alloc",
                              label, i);
    }
    return FSDP_OK;
}

fsdp_status fsdp_all_gather_list(fsdp_group *g, fsdp_lane lane, const char *label,
                                 const fsdp_list_entry *e, int n, const fsdp_shared *shared,
                                 fsdp_work **out)
{
    if (!label) label = "";
    if (out) *out = NULL;
    FSDP_TRY(fsdp__issue_check(g, lane, FSDP_ALL_GATHER, label));
    FSDP_TRY(fsdp__list_check("all_gather", g, e, n));
    for (int i = 0; i < n; i++)
        FSDP_TRY(check_entry(g, label, &e[i], i, shared));
    if (!g->world) return fsdp__self_gather(e, n);

    fsdp_work *w =
        fsdp__work_new(g, lane, FSDP_ALL_GATHER, label, shared ? &shared_gather : &private_gather);
    if (!w) return fsdp_error();
    w->e = fsdp__calloc((size_t)n, sizeof *e, "a list of parameters");
    if (!w->e) {
        fsdp__work_free(w);
        return fsdp_error();
    }
    if (n > 0) memcpy(w->e, e, (size_t)n * sizeof *e);
    w->n = n;
    w->clock = shared ? shared->clock : 0;
    w->post.shared = shared != NULL;
    int64_t elements = 0, bytes = 0;
    for (int i = 0; i < n; i++) {
        int64_t own = e[i].outer * fsdp__rows_count(&e[i], g->rank) * e[i].inner;
        int64_t all = e[i].outer * e[i].dim * e[i].inner;
        elements += all - own;
        bytes += (shared ? own : all) * (int64_t)fsdp_dtype_size(e[i].full_dtype);
    }
    fsdp__count(g, lane, FSDP_ALL_GATHER, elements, bytes);
    return fsdp__work_issue(w, out);
}
