/*
 * gather.c - how a unit's parameters become whole, once unit.c has decided that they shall.
 *
 *     one rank                the shard is the whole
 *     shared copy (default)   each rank writes its rows into a slot that all of them see
 *     private copies          each rank reads the peers' rows, or what a collective of the user's
 *                             brought (custom_comm.c)
 *     from parts              the same among the k ranks that kept 1/k each after forward (part.c)
 *
 * Where a parameter has an extension (extension.c), what travels is what the extension made of the
 * shard, and the whole is what it makes of that again. The wholes of such a unit are private: its
 * slot is copied out of, and given back at once.
 */
#include <string.h>

#include "base/context.h"
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
    return u->S > 1 && !u->opt.private_gather && !fsdp__custom_gathers(u);
}

/* Parts are of what post filled, and travel as they are. */
static fsdp__extension *extension_of(const fsdp__unit *u, const fsdp__fparam *p)
{
    return u->parted ? NULL : p->ext;
}

static bool is_extended(const fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++)
        if (extension_of(u, &u->params[i])) return true;
    return false;
}

fsdp_status fsdp__gather_check(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++)
        FSDP_TRY(fsdp__tensor_has_values(u->params[i].sharded, "unshard"));
    return FSDP_OK;
}

/* One rank: the shard is the whole. */
static fsdp_status fill_alone(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__storage *st = p->whole->st;
        if (p->ext) {
            FSDP_TRY(fsdp__extension_pre(u, p));
            for (int k = 0; k < p->ext->n; k++)
                p->ext->got[k] = fsdp_retain(p->ext->wire[k]);
            continue;
        }
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

/* ---- entries ------------------------------------------------------------------------ */

static fsdp_list_entry entry_of(const fsdp__unit *u, const fsdp__fparam *p, void *full)
{
    const fsdp__cut *c = u->parted ? &p->part_cut : &p->cut;
    fsdp_tensor *rows = u->parted ? p->part : p->sharded;
    return (fsdp_list_entry){.outer = c->outer,
                             .dim = c->dim,
                             .inner = c->inner,
                             .chunk = c->chunk,
                             .shard = fsdp_data(rows),
                             .shard_dtype = rows->dtype,
                             .full = full,
                             .full_dtype = p->whole->dtype,
                             .present = 1};
}

/* Elements of a row of what an extension made. */
static int64_t row_numel(const fsdp_tensor *wire)
{
    return fsdp__numel_of(wire->ndim - 1, wire->size + 1);
}

static fsdp_list_entry entry_of_wire(const fsdp__fparam *p, int k, void *full)
{
    fsdp_tensor *wire = p->ext->wire[k];
    return (fsdp_list_entry){.outer = 1,
                             .dim = p->cut.dim,
                             .inner = row_numel(wire),
                             .chunk = p->cut.chunk,
                             .shard = fsdp_data(wire),
                             .shard_dtype = wire->dtype,
                             .full = full,
                             .full_dtype = wire->dtype,
                             .present = 1};
}

static fsdp_status add_entry(fsdp__unit *u, int *n, fsdp_list_entry e)
{
    if (*n >= u->n_params + 1)
        FSDP_TRY(FSDP__GROW(u->gather_entries, u->gather_cap, *n + 1, "a unit"));
    u->gather_entries[(*n)++] = e;
    return FSDP_OK;
}

static int64_t round_up(int64_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int64_t wire_bytes(const fsdp__fparam *p, int k)
{
    const fsdp_tensor *wire = p->ext->wire[k];
    return p->cut.dim * row_numel(wire) * (int64_t)fsdp_dtype_size(wire->dtype);
}

/* ---- into a slot --------------------------------------------------------------------- */

static fsdp_status take_slot(fsdp__unit *u, int64_t bytes)
{
    u->slot_group = source_group(u);
    FSDP_TRY(fsdp_shared_take(u->slot_group, bytes, u->name, &u->slot));
    u->has_slot = true;
    return FSDP_OK;
}

/* Where everything lies in the slot; its size. */
static int64_t lay_out(fsdp__unit *u)
{
    int64_t bytes = 0;
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__extension *x = extension_of(u, p);
        p->slot_at = bytes;
        if (!x) bytes += round_up(p->whole->st->bytes);
        for (int k = 0; x && k < x->n; k++) {
            x->at[k] = bytes;
            bytes += round_up(wire_bytes(p, k));
        }
    }
    return bytes;
}

static fsdp_status fill_shared(fsdp__unit *u)
{
    bool staged = is_extended(u);
    int64_t bytes = lay_out(u);
    int n = 0;
    if (staged) {
        FSDP_TRY(fsdp__account_take(FSDP_COMMUNICATION, bytes, u->name));
        u->staged = bytes;
    }
    FSDP_TRY(take_slot(u, bytes));
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__extension *x = extension_of(u, p);
        for (int k = 0; x && k < x->n; k++)
            FSDP_TRY(add_entry(u, &n, entry_of_wire(p, k, (char *)u->slot.rw + x->at[k])));
        if (x) continue;
        if (!staged) {
            FSDP_TRY(fsdp__storage_attach(p->whole->st, (char *)(uintptr_t)u->slot.ro + p->slot_at,
                                          p->param->name));
            p->whole->st->read_only = true;
        }
        FSDP_TRY(add_entry(u, &n, entry_of(u, p, (char *)u->slot.rw + p->slot_at)));
    }
    return fsdp_all_gather_list(u->slot_group, FSDP_LANE_GATHER, u->name, u->gather_entries, n,
                                &u->slot, &u->gather);
}

/* A tensor over bytes of the slot. */
static fsdp_tensor *view_slot(const fsdp__unit *u, const fsdp__fparam *p, int k)
{
    const fsdp_tensor *wire = p->ext->wire[k];
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, wire->size, sizeof sizes);
    sizes[0] = p->cut.dim;
    void *data = (char *)(uintptr_t)u->slot.ro + p->ext->at[k];
    fsdp_tensor *t =
        fsdp_tensor_from_memory(data, wire->dtype, wire->ndim, sizes, NULL, NULL, NULL);
    return t ? fsdp__tensor_own(t) : NULL;
}

static void give_slot(fsdp__unit *u)
{
    if (u->has_slot) fsdp_shared_give(u->slot_group, &u->slot);
    if (u->staged) fsdp__account_give(FSDP_COMMUNICATION, u->staged);
    u->has_slot = false;
    u->staged = 0;
}

static fsdp_status copy_out(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        if (!p->ext) {
            FSDP_TRY(fsdp__storage_fill(p->whole->st, NULL, p->param->name));
            memcpy(p->whole->st->data, (const char *)u->slot.ro + p->slot_at,
                   (size_t)p->whole->st->bytes);
            continue;
        }
        for (int k = 0; k < p->ext->n; k++)
            if (!(p->ext->got[k] = view_slot(u, p, k))) return fsdp_error();
    }
    return FSDP_OK;
}

/* ---- into private memory ----------------------------------------------------------------- */

/* Peers read what an extension made where it lies. */
static fsdp_status show_wire(fsdp__unit *u, fsdp__fparam *p, int k)
{
    fsdp_tensor *wire = p->ext->wire[k];
    fsdp_tensor *shown = fsdp__tensor_alloc(wire->dtype, wire->ndim, wire->size, FSDP_COMMUNICATION,
                                            fsdp__comm_allocator(source_group(u)), p->param->name);
    if (!shown) return fsdp_error();
    memcpy(fsdp_data(shown), fsdp_data(wire),
           (size_t)fsdp_numel(wire) * fsdp_dtype_size(wire->dtype));
    p->ext->wire[k] = fsdp__tensor_own(shown);
    fsdp_release(wire);
    return FSDP_OK;
}

static fsdp_status room_for_wire(fsdp__fparam *p, int k)
{
    const fsdp_tensor *wire = p->ext->wire[k];
    int64_t sizes[FSDP_MAX_DIMS];
    memcpy(sizes, wire->size, sizeof sizes);
    sizes[0] = p->cut.dim;
    fsdp_tensor *t = fsdp__tensor_alloc(wire->dtype, wire->ndim, sizes, FSDP_COMMUNICATION, NULL,
                                        p->param->name);
    p->ext->got[k] = t ? fsdp__tensor_own(t) : NULL;
    return t ? FSDP_OK : fsdp_error();
}

static fsdp_status fill_private(fsdp__unit *u)
{
    int n = 0;
    bool custom = fsdp__custom_gathers(u);
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        fsdp__extension *x = extension_of(u, p);
        for (int k = 0; x && k < x->n; k++) {
            if (!custom) FSDP_TRY(show_wire(u, p, k));
            FSDP_TRY(room_for_wire(p, k));
            FSDP_TRY(add_entry(u, &n, entry_of_wire(p, k, fsdp_data(x->got[k]))));
        }
        if (x) continue;
        FSDP_TRY(fsdp__storage_fill(p->whole->st, NULL, p->param->name));
        fsdp_list_entry e = entry_of(u, p, p->whole->st->data);
        if (!custom) FSDP_TRY(fsdp__offload_show(u, p, &e));
        FSDP_TRY(add_entry(u, &n, e));
    }
    if (custom) return fsdp__custom_gather_begin(u, source_group(u), n);
    return fsdp_all_gather_list(source_group(u), FSDP_LANE_GATHER, u->name, u->gather_entries, n,
                                NULL, &u->gather);
}

/* ---- begin and end -------------------------------------------------------------------- */

fsdp_status fsdp__gather_begin(fsdp__unit *u)
{
    FSDP_TRY(fsdp__offload_hold(u));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = scope ? FSDP_OK : fsdp_error();
    if (u->S == 1) {
        if (s == FSDP_OK) s = fill_alone(u);
    } else {
        for (int i = 0; i < u->n_params && s == FSDP_OK; i++)
            if (extension_of(u, &u->params[i])) s = fsdp__extension_pre(u, &u->params[i]);
        if (s == FSDP_OK) s = shares_copy(u) ? fill_shared(u) : fill_private(u);
    }
    fsdp_scope_end(scope);
    return s;
}

/* What was gathered becomes the wholes, where it is not there already. */
static fsdp_status unpack(fsdp__unit *u)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = scope ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK && u->staged) s = copy_out(u);
    for (int i = 0; i < u->n_params && s == FSDP_OK; i++)
        if (extension_of(u, &u->params[i])) s = fsdp__extension_post(u, &u->params[i]);
    fsdp_scope_end(scope);
    if (u->staged) give_slot(u);
    return s;
}

fsdp_status fsdp__gather_end(fsdp__unit *u)
{
    fsdp_work *w = u->gather;
    u->gather = NULL;
    /* Peers read parts, what extensions made and copies of shards that lie in a file where these
     * are, and they are dropped now. */
    bool read = w && !shares_copy(u) && (u->parted || is_extended(u) || u->file);
    fsdp_status s = read ? fsdp_work_wait_buffers(w) : FSDP_OK, done = fsdp_work_wait(w);
    if (s == FSDP_OK) s = done;
    if (s == FSDP_OK) s = fsdp_error(); /* it may not have begun whole */
    if (s == FSDP_OK && fsdp__custom_gathers(u)) s = fsdp__custom_gather_end(u);
    if (s == FSDP_OK) s = unpack(u);
    fsdp__offload_unshow(u);
    if (u->S > 1) fsdp__offload_let(u); /* alone, the shards may be what was lent */
    fsdp__parts_drop(u);
    return s;
}

void fsdp__gather_drop(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++) {
        u->params[i].whole->st->read_only = false;
        fsdp__storage_empty(u->params[i].whole->st);
        if (u->params[i].ext) fsdp__extension_drop(u->params[i].ext);
    }
    fsdp__offload_unshow(u);
    fsdp__offload_let(u);
    give_slot(u);
}
