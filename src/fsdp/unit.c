/*
 * unit.c - one unit: how its parameters come and go.
 *
 *                 unshard                    wait
 *     SHARDED ---------------> GATHERING ---------------> WHOLE
 *        ^                         |                        |
 *        |        reshard          |        reshard         |
 *        +-------------------------+------------------------+
 *
 *     state       registered on the module   memory held
 *     SHARDED     the shard                  shard
 *     GATHERING   the shard                  shard + whole, being filled
 *     WHOLE       the whole parameter        shard + whole
 *
 * Invariants (tests cite the numbers)
 *  1. A parameter's whole tensor and storage are one object for life; gather
 *     fills the storage, reshard empties it.
 *  2. In WHOLE, every whole storage was filled from the shard at `version`.
 *  3. Filling is no mutation; shard_version of a whole storage is the version
 *     of the shard that it was filled from.
 *  4. With a shared copy a rank writes its own rows only, and reads through a
 *     read-only mapping; the slot is given back by reshard, in program order.
 *  5. One rank and no cast: the whole storage is the shard's own bytes, and
 *     nothing is copied.
 *  6. The bytes of a whole parameter are charged as unsharded while they exist;
 *     those that are lent (5) are the shard's and charged once.
 */
#include "fsdp/unit.h"

#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"

void fsdp__event(fsdp__unit *u, fsdp_event_kind k)
{
    if (u->tree && u->tree->event) u->tree->event(u->tree->event_arg, k, u->name);
}

void fsdp__unit_name_storages(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        p->sharded->st->owner = p->whole->st->owner = p->grad->st->owner = p->param->name;
    }
}

bool fsdp__unit_stale(const fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++)
        if (u->params[i].version != u->params[i].sharded->st->version) return true;
    return false;
}

/* ---- filling ------------------------------------------------------------------ */

static fsdp_status check_shards(fsdp__unit *u)
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

static void entry_of(fsdp__fparam *p, void *full, fsdp_list_entry *e)
{
    *e = (fsdp_list_entry){.outer = p->cut.outer,
                           .dim = p->cut.dim,
                           .inner = p->cut.inner,
                           .chunk = p->cut.chunk,
                           .shard = fsdp_data(p->sharded),
                           .shard_dtype = p->sharded->dtype,
                           .full = full,
                           .full_dtype = p->whole->dtype,
                           .present = 1};
}

static fsdp_status fill_shared(fsdp__unit *u)
{
    FSDP_TRY(fsdp_shared_take(u->shard, u->slot_bytes, u->name, &u->slot));
    u->has_slot = true;
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(fsdp__storage_attach(p->whole->st, (char *)(uintptr_t)u->slot.ro + p->slot_offset,
                                      p->param->name));
        p->whole->st->read_only = true;
        entry_of(p, (char *)u->slot.rw + p->slot_offset, &u->gather_entries[i]);
    }
    return fsdp_all_gather_list(u->shard, FSDP_LANE_GATHER, u->name, u->gather_entries, u->n_params,
                                &u->slot, &u->gather);
}

static fsdp_status fill_private(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(fsdp__storage_fill(p->whole->st, NULL, p->param->name));
        entry_of(p, p->whole->st->data, &u->gather_entries[i]);
    }
    return fsdp_all_gather_list(u->shard, FSDP_LANE_GATHER, u->name, u->gather_entries, u->n_params,
                                NULL, &u->gather);
}

/* ---- transitions ------------------------------------------------------------------ */

fsdp_status fsdp__unit_unshard(fsdp__unit *u, bool ahead)
{
    if (u->state == FSDP__WHOLE && fsdp__unit_stale(u)) FSDP_TRY(fsdp__unit_reshard(u));
    if (u->state != FSDP__SHARDED || u->n_params == 0) return FSDP_OK;
    FSDP_TRY(check_shards(u));
    fsdp__event(u, ahead ? FSDP_EVENT_PREFETCH : FSDP_EVENT_UNSHARD);
    fsdp_status s = u->S == 1           ? fill_alone(u)
                    : u->slot_bytes > 0 ? fill_shared(u)
                                        : fill_private(u);
    u->state = FSDP__GATHERING;
    for (int i = 0; i < u->n_params && s == FSDP_OK; i++) {
        fsdp__fparam *p = &u->params[i];
        p->version = p->sharded->st->version;
        p->whole->st->shard_version = p->version;
    }
    if (s != FSDP_OK) fsdp__unit_reshard(u);
    return s;
}

fsdp_status fsdp__unit_wait(fsdp__unit *u)
{
    if (u->state != FSDP__GATHERING) return FSDP_OK;
    fsdp_work *w = u->gather;
    u->gather = NULL;
    FSDP_TRY(fsdp_work_wait(w));
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(fsdp_requires_grad_(p->whole, p->param->requires_grad));
        fsdp__param_set(p->param, p->whole);
    }
    u->state = FSDP__WHOLE;
    return FSDP_OK;
}

fsdp_status fsdp__unit_reshard(fsdp__unit *u)
{
    if (u->state == FSDP__SHARDED) return FSDP_OK;
    fsdp_status s = FSDP_OK;
    if (u->gather) { /* prefetched and not needed after all */
        s = fsdp_work_wait(u->gather);
        u->gather = NULL;
    }
    if (u->state == FSDP__WHOLE) fsdp__event(u, FSDP_EVENT_RESHARD);
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__param_set(p->param, p->sharded);
        p->whole->st->read_only = false;
        fsdp__storage_empty(p->whole->st);
    }
    if (u->has_slot) fsdp_shared_give(u->shard, &u->slot);
    u->has_slot = false;
    u->state = FSDP__SHARDED;
    if (u->prefetched) {
        u->prefetched = false;
        u->tree->ahead--;
    }
    return s;
}

void fsdp__unit_free(void *arg)
{
    fsdp__unit *u = arg;
    if (u->tree) u->tree->event = NULL; /* who listens may be gone */
    fsdp__unit_drop_grads(u);
    fsdp__unit_reshard(u);
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (p->whole) p->whole->st->owner = NULL;
        if (p->grad) p->grad->st->owner = NULL;
        fsdp_release(p->whole);
        fsdp_release(p->grad);
        if (p->param) {
            p->param->shard = NULL;
            p->param->kept = NULL;
            p->param->unit = NULL;
        }
        fsdp_release(p->sharded);
        fsdp_param_release(p->param);
    }
    fsdp__tree *t = u->tree;
    if (t) { /* the last unit of a tree takes it along */
        for (int i = 0; i < t->n_units; i++)
            if (t->units[i] == u) t->units[i] = t->units[--t->n_units];
        if (t->n_units == 0) {
            fsdp__order_free(&t->train);
            fsdp__order_free(&t->eval);
            free(t->units);
            free(t);
        }
    }
    free(u->params);
    free(u->gather_entries);
    free(u->reduce_entries);
    free(u->reduce_params);
    free(u->name);
    free(u);
}
