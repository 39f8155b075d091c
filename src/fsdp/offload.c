/*
 * offload.c - a unit whose shards and gradients lie in a file.
 *
 * Shards are held in memory while a gather reads them; with one rank, whose whole parameters are
 * the shards' own bytes, while the unit is whole. Gradients are held from the start of their
 * reduction to its end. What is neither held nor read ahead may be written back and dropped at any
 * time, which changes no value (device/file.h), so nothing here can change a result.
 *
 * Peers cannot read a file: a gather into private copies reads copies of the shards in memory of
 * the group, which are given back when all peers have read them.
 */
#include <string.h>

#include "base/error.h"
#include "device/file.h"
#include "fsdp/unit.h"

fsdp_status fsdp__offload_open(fsdp__unit *u)
{
    FSDP_TRY(fsdp__offload_allocator(&u->opt.offload, "parameters and gradients", &u->file));
    u->opt.offload.folder = NULL; /* the caller's */
    return FSDP_OK;
}

void fsdp__offload_close(fsdp__unit *u)
{
    if (u->file && u->promised) (void)fsdp__file_reserve(u->file, -u->promised);
    u->promised = 0;
}

fsdp_status fsdp__offload_promise(fsdp__unit *u, const fsdp__fparam *p)
{
    if (!u->file) return FSDP_OK;
    int64_t rows = fsdp__cut_rows(&p->cut, fsdp_group_rank(u->shard), NULL);
    int64_t bytes = fsdp__file_round(p->cut.outer * rows * p->cut.inner *
                                     (int64_t)fsdp_dtype_size(p->param->dtype));
    if (p->param->requires_grad) bytes *= 2;
    FSDP_TRY(fsdp__file_reserve(u->file, bytes));
    u->promised += bytes;
    return FSDP_OK;
}

/* ---- shards ------------------------------------------------------------------------ */

fsdp_status fsdp__offload_hold(fsdp__unit *u)
{
    if (!u->file || u->shards_held || u->parted) return FSDP_OK;
    for (int i = 0; i < u->n_params; i++) {
        if (fsdp__storage_use(u->params[i].sharded->st) == FSDP_OK) continue;
        while (i-- > 0)
            fsdp__storage_done(u->params[i].sharded->st, false);
        return fsdp_error();
    }
    u->shards_held = true;
    return FSDP_OK;
}

void fsdp__offload_let(fsdp__unit *u)
{
    if (!u->shards_held) return;
    for (int i = 0; i < u->n_params; i++)
        fsdp__storage_done(u->params[i].sharded->st, false);
    u->shards_held = false;
}

enum { UNITS_AHEAD = 2 };

void fsdp__offload_ahead(fsdp__tree *t)
{
    const fsdp__order *o = t->order;
    int n = 0;
    if (!o || !o->known) return;
    for (int64_t at = o->at + t->ahead; at < o->count && n < UNITS_AHEAD; at++, n++) {
        const fsdp__unit *u = t->units[o->items[at]];
        if (!u->file || u->shards_held) continue;
        for (int i = 0; i < u->n_params; i++)
            if (!fsdp__storage_ahead(u->params[i].sharded->st)) return;
    }
}

/* ---- private gathers ------------------------------------------------------------------ */

fsdp_status fsdp__offload_show(const fsdp__unit *u, fsdp__fparam *p, fsdp_list_entry *e)
{
    const fsdp__storage *shard = p->sharded->st;
    if (u->parted || !fsdp__storage_in_file(shard)) return FSDP_OK; /* parts lie in memory */
    p->shown = fsdp__storage_create(FSDP_CPU, shard->bytes, FSDP_COMMUNICATION);
    if (!p->shown) return fsdp_error();
    FSDP_TRY(fsdp__storage_fill(p->shown, fsdp__comm_allocator(u->shard), p->param->name));
    memcpy(p->shown->data, shard->data, (size_t)shard->bytes);
    e->shard = p->shown->data;
    return FSDP_OK;
}

void fsdp__offload_unshow(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__storage_release(u->params[i].shown);
        u->params[i].shown = NULL;
    }
}

/* ---- gradients -------------------------------------------------------------------------- */

fsdp_status fsdp__offload_hold_grad(fsdp__fparam *p)
{
    const fsdp_tensor *g = fsdp_grad(p->sharded);
    if (p->grad_held || !g || !fsdp__storage_in_file(g->st)) return FSDP_OK;
    FSDP_TRY(fsdp__storage_use(g->st));
    p->grad_held = true;
    return FSDP_OK;
}

void fsdp__offload_let_grad(fsdp__fparam *p)
{
    const fsdp_tensor *g = fsdp_grad(p->sharded);
    if (p->grad_held && g) fsdp__storage_done(g->st, true);
    p->grad_held = false;
}
