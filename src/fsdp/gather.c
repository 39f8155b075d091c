/*
 * gather.c - how a unit's parameters become whole, once unit.c has decided that they shall.
 *
 *     one rank                the shard is the whole
 *     shared copy (default)   each rank writes its rows into a slot that all of them see
 *     private copies          each rank reads the peers' rows
 *     from parts              the same among the k ranks that kept 1/k each after forward (part.c)
 */
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "fsdp/unit.h"

static fsdp_group *source_group(const fsdp__unit *u)
{
    return u->parted ? u->part_group : u->shard;
}

static bool shares_copy(const fsdp__unit *u)
{
    return u->S > 1 && !u->opt.private_gather;
}

fsdp_status fsdp__gather_check(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++)
        FSDP_TRY(fsdp__tensor_readable(u->params[i].sharded, "unshard"));
    return FSDP_OK;
}

/* One rank: the shard is the whole. */
static fsdp_status fill_alone(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__storage *st = p->whole->st;
        if (p->whole->dtype == p->sharded->dtype) {
            st->data = p->sharded->st->data; /* lent, not charged: invariant 5 */
            continue;
        }
        FSDP_TRY(fsdp__storage_fill(st, NULL, p->param->name));
        fsdp__convert(st->data, p->whole->dtype, fsdp_data(p->sharded), p->sharded->dtype,
                      (size_t)fsdp_numel(p->sharded));
    }
    return FSDP_OK;
}

/* ---- through the group ------------------------------------------------------------- */

static void entry_of(const fsdp__unit *u, fsdp__fparam *p, void *full, fsdp_list_entry *e)
{
    const fsdp__cut *c = u->parted ? &p->part_cut : &p->cut;
    fsdp_tensor *rows = u->parted ? p->part : p->sharded;
    *e = (fsdp_list_entry){.outer = c->outer,
                           .dim = c->dim,
                           .inner = c->inner,
                           .chunk = c->chunk,
                           .shard = fsdp_data(rows),
                           .shard_dtype = rows->dtype,
                           .full = full,
                           .full_dtype = p->whole->dtype,
                           .present = 1};
}

static int64_t slot_size(const fsdp__fparam *p)
{
    return (p->whole->st->bytes + 63) / 64 * 64;
}

static fsdp_status take_slot(fsdp__unit *u, int64_t bytes)
{
    u->slot_group = source_group(u);
    FSDP_TRY(fsdp_shared_take(u->slot_group, bytes, u->name, &u->slot));
    u->has_slot = true;
    return FSDP_OK;
}

static fsdp_status fill_shared(fsdp__unit *u)
{
    int64_t bytes = 0, at = 0;
    for (int i = 0; i < u->n_params; i++)
        bytes += slot_size(&u->params[i]);
    FSDP_TRY(take_slot(u, bytes));
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(
            fsdp__storage_attach(p->whole->st, (char *)(uintptr_t)u->slot.ro + at, p->param->name));
        p->whole->st->read_only = true;
        entry_of(u, p, (char *)u->slot.rw + at, &u->gather_entries[i]);
        at += slot_size(p);
    }
    return fsdp_all_gather_list(u->slot_group, FSDP_LANE_GATHER, u->name, u->gather_entries,
                                u->n_params, &u->slot, &u->gather);
}

static fsdp_status fill_private(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(fsdp__storage_fill(p->whole->st, NULL, p->param->name));
        entry_of(u, p, p->whole->st->data, &u->gather_entries[i]);
    }
    return fsdp_all_gather_list(source_group(u), FSDP_LANE_GATHER, u->name, u->gather_entries,
                                u->n_params, NULL, &u->gather);
}

/* ---- begin and end -------------------------------------------------------------------- */

fsdp_status fsdp__gather_begin(fsdp__unit *u)
{
    if (u->S == 1) return fill_alone(u);
    return shares_copy(u) ? fill_shared(u) : fill_private(u);
}

fsdp_status fsdp__gather_end(fsdp__unit *u)
{
    fsdp_work *w = u->gather;
    u->gather = NULL;
    /* Peers read the parts where they lie, and these are dropped now. */
    fsdp_status s = u->parted && !shares_copy(u) ? fsdp_work_wait_buffers(w) : FSDP_OK;
    fsdp_status done = fsdp_work_wait(w);
    fsdp__parts_drop(u);
    return s != FSDP_OK ? s : done;
}

void fsdp__gather_drop(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        u->params[i].whole->st->read_only = false;
        fsdp__storage_empty(u->params[i].whole->st);
    }
    if (u->has_slot) fsdp_shared_give(u->slot_group, &u->slot);
    u->has_slot = false;
}
