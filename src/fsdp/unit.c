/*
 * unit.c - one unit: how its parameters come and go.
 *
 *                 unshard                    wait
 *     SHARDED ---------------> GATHERING ---------------> WHOLE
 *        ^ ^                     ^   |                    |   |
 *        | |        reshard      |   |      reshard       |   |
 *        | +---------------------|---+--------------------+   |
 *        |  reshard              | unshard                    |
 *        +--------------------- PART <------------------------+
 *                                      reshard_to_parts
 *
 *     state       registered on the module   memory held
 *     SHARDED     the shard                  shard
 *     GATHERING   the shard, or the part     shard (and part) + whole, being filled
 *     WHOLE       the whole parameter        shard + whole
 *     PART        the part (part.c)          shard + 1/k of the whole
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

/* What FSDP2's debug log has: the others are ours. */
static void log_event(const fsdp__unit *u, fsdp_event_kind k, bool root)
{
    static const char *const names[] = {
#define FSDP__X(e, text) [e] = text,
        FSDP_EVENT_LIST(FSDP__X)
#undef FSDP__X
    };
    if (k != FSDP_EVENT_POST_BACKWARD && k <= FSDP_EVENT_PREFETCH) return;
    if (root || !*u->name)
        fsdp__log(FSDP__LOG_DEBUG, "FSDP::%s", names[k]);
    else
        fsdp__log(FSDP__LOG_DEBUG, "FSDP::%s (%s)", names[k], u->name);
}

void fsdp__event(fsdp__unit *u, fsdp_event_kind k)
{
    bool root = k == FSDP_EVENT_ROOT_PRE_FORWARD || k == FSDP_EVENT_ROOT_POST_BACKWARD ||
                k == FSDP_EVENT_FORCE_COMPLETE;
    if (u->n_params == 0 && !root) return; /* nothing of its own happens */
    if (u->tree && u->tree->event) u->tree->event(u->tree->event_arg, k, u->name);
    if (fsdp__log_enabled(FSDP__LOG_DEBUG)) log_event(u, k, root);
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

/* ---- transitions ------------------------------------------------------------------ */

fsdp_status fsdp__unit_unshard(fsdp__unit *u, bool ahead)
{
    if (u->summoned)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "unit \"%s\" is to be gathered inside fsdp_summon_full_params; end that "
                          "scope first",
                          u->name);
    if (u->state == FSDP__WHOLE && fsdp__unit_stale(u)) FSDP_TRY(fsdp__unit_reshard(u));
    if (u->state == FSDP__PART && fsdp__unit_stale(u)) FSDP_TRY(fsdp__unit_reshard(u));
    if (!fsdp__unit_resting(u) || u->n_params == 0) return FSDP_OK;
    FSDP_TRY(fsdp__gather_check(u));
    fsdp__event(u, ahead ? FSDP_EVENT_PREFETCH : FSDP_EVENT_UNSHARD);
    fsdp_status s = fsdp__gather_begin(u);
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
    FSDP_TRY(fsdp__gather_end(u));
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        FSDP_TRY(fsdp_requires_grad_(p->whole, p->param->requires_grad));
        fsdp__param_set(p->param, p->whole);
    }
    u->state = FSDP__WHOLE;
    return FSDP_OK;
}

/* What unsharding took is given back; the shards, or the parts, stand in the module. */
static void give_back(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__param_set(p->param, p->part ? p->part : p->sharded);
    }
    fsdp__gather_drop(u);
    u->state = u->parted ? FSDP__PART : FSDP__SHARDED;
}

/* Weights that it shares are freed whole, with the last of their users. */
static fsdp_status release_tied(fsdp__unit *u, bool to_parts)
{
    fsdp_status s = FSDP_OK;
    for (int i = 0; i < u->n_tied && s == FSDP_OK; i++)
        s = fsdp__tied_release(u->tied[i], to_parts);
    return s;
}

static fsdp_status reshard(fsdp__unit *u, bool to_parts)
{
    if (u->state == FSDP__SHARDED) return FSDP_OK;
    fsdp_status s = FSDP_OK;
    if (u->state == FSDP__GATHERING) s = fsdp__gather_end(u); /* prefetched, and not needed */
    if (u->state == FSDP__WHOLE) fsdp__event(u, FSDP_EVENT_RESHARD);
    fsdp__parts_drop(u);
    give_back(u);
    if (u->prefetched) {
        u->prefetched = u->told = false;
        u->tree->ahead--;
    }
    fsdp_status r = release_tied(u, to_parts);
    return s != FSDP_OK ? s : r;
}

fsdp_status fsdp__unit_reshard(fsdp__unit *u)
{
    return reshard(u, false);
}

fsdp_status fsdp__unit_reshard_to_parts(fsdp__unit *u)
{
    if (u->state != FSDP__WHOLE || !u->part_mesh) return reshard(u, true);
    FSDP_TRY(fsdp__parts_take(u));
    fsdp__event(u, FSDP_EVENT_RESHARD);
    give_back(u);
    return release_tied(u, true);
}

fsdp_status fsdp__unit_after_backward(fsdp__unit *u)
{
    if (u->n_users > 0) return fsdp__tied_release(u, false);
    /* Gathered ahead and not used in this backward: its end says whether another one follows. */
    if (u->prefetched && !u->pre_backward) return FSDP_OK;
    return u->reshard_backward ? fsdp__unit_reshard(u) : FSDP_OK;
}

/* ---- making and freeing ----------------------------------------------------------- */

fsdp__unit *fsdp__unit_new(const fsdp_shard_options *o, int n)
{
    fsdp__unit *u = fsdp__calloc(1, sizeof *u, "a unit");
    if (!u) return NULL;
    u->refs = n;
    u->opt = *o;
    u->opt.ignored_params = NULL; /* the caller's, during the call */
    u->opt.n_ignored = 0;
    u->sync = u->all_reduce = u->reshard_backward = u->unshard_backward = true;
    u->max_reductions = 1;
    u->modules = fsdp__calloc((size_t)n, sizeof *u->modules, "a unit");
    u->ran = fsdp__calloc((size_t)n, sizeof *u->ran, "a unit");
    u->life = fsdp__life_create(u);
    if (u->modules && u->ran && u->life) return u;
    u->refs = 1;
    fsdp__unit_free(u);
    return NULL;
}

void fsdp__lives_free(fsdp__life **list, int n)
{
    for (int i = 0; i < n; i++)
        fsdp__life_release(list[i]);
    free(list);
}

void fsdp__unit_free(void *arg)
{
    fsdp__unit *u = arg;
    if (!u || --u->refs > 0) return;
    fsdp__life_end(u->life);
    if (u->tree) u->tree->event = NULL; /* who listens may be gone */
    fsdp__unit_drop_grads(u);
    fsdp__unit_reshard(u);
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (p->whole) p->whole->st->owner = NULL;
        if (p->grad) p->grad->st->owner = NULL;
        if (p->whole && p->whole->ag) p->whole->ag->provide = NULL; /* others may hold it */
        fsdp_release(p->whole);
        fsdp_release(p->grad);
        free(p->ext);
        if (p->param) {
            p->param->shard = NULL;
            p->param->kept = NULL;
            p->param->unit = NULL;
        }
        fsdp_release(p->sharded);
        fsdp_param_release(p->param);
    }
    fsdp__offload_close(u);
    fsdp__tree *t = u->tree;
    if (t) { /* the last unit of a tree takes it along */
        for (int i = 0; i < t->n_units; i++)
            if (t->units[i] == u) t->units[i] = t->units[--t->n_units];
        if (t->n_units == 0) {
            fsdp__order_free(&t->train);
            fsdp__order_free(&t->eval);
            fsdp__buffers_free(t);
            fsdp__queue_release(t->queue);
            free(t->post);
            free(t->units);
            free(t);
        }
    }
    fsdp__tied_leave(u);
    fsdp__use_release(u->use);
    for (int k = 0; k < 2; k++)
        fsdp__lives_free(u->lists[k], u->n_lists[k]);
    free(u->posts);
    free(u->modules);
    free(u->ran);
    free(u->params);
    fsdp__custom_free(u);
    free(u->gather_entries);
    free(u->reduce_entries);
    free(u->reduce_params);
    free(u->name);
    free(u);
}
