/*
 * offload.c - optimizer state in a file, and passes over it.
 *
 * A step goes through the parameters in one fixed order, so what comes next is known: it is read
 * while the present one is updated, and written back after it.
 */
#include "base/error.h"
#include "device/file.h"
#include "nn/module.h"
#include "optim/optim_internal.h"

/* The storages that a step of slot s uses: at most 2 + FSDP__MAX_STATES; those of s that are
 * there. */
static int storages(const fsdp__opt_slot *s, fsdp__storage **out)
{
    fsdp_tensor *p = fsdp__param_kept(s->param), *g = fsdp_grad(p);
    int n = 0;
    out[n++] = p->st;
    for (int k = 0; k < FSDP__MAX_STATES; k++)
        if (s->state[k]) out[n++] = s->state[k]->st;
    if (g) out[n++] = g->st;
    return n;
}

fsdp_status fsdp__opt_hold(const fsdp__opt_slot *s)
{
    fsdp__storage *st[2 + FSDP__MAX_STATES];
    int n = storages(s, st);
    for (int i = 0; i < n; i++) {
        if (fsdp__storage_use(st[i]) == FSDP_OK) continue;
        while (i-- > 0)
            fsdp__storage_done(st[i], false);
        return fsdp_error();
    }
    return FSDP_OK;
}

void fsdp__opt_let(const fsdp__opt_slot *s, bool written)
{
    fsdp__storage *st[2 + FSDP__MAX_STATES];
    const fsdp_tensor *g = fsdp_grad(fsdp__param_kept(s->param));
    int n = storages(s, st);
    for (int i = 0; i < n; i++)
        fsdp__storage_done(st[i], written && !(g && st[i] == g->st));
}

void fsdp__opt_ahead(const fsdp_optimizer *o, int64_t i)
{
    enum { FEW = 8 };
    for (int64_t k = i + 1; k < o->n && k <= i + FEW; k++) {
        fsdp__storage *st[2 + FSDP__MAX_STATES];
        if (!fsdp_grad(fsdp__param_kept(o->slots[k].param))) continue;
        int n = storages(&o->slots[k], st);
        for (int j = 0; j < n; j++)
            if (!fsdp__storage_ahead(st[j])) return;
    }
}

/* ---- where state lies ------------------------------------------------------------------ */

void fsdp__opt_offload_close(fsdp_optimizer *o)
{
    if (o->promised) (void)fsdp__file_reserve(o->file, -o->promised);
    o->promised = 0;
    o->file = NULL;
}

fsdp_status fsdp_optimizer_set_offload(fsdp_optimizer *o, const fsdp_offload_policy *p)
{
    if (fsdp_error()) return fsdp_error();
    if (!o) return fsdp__fail_null("fsdp_optimizer_set_offload", "the optimizer");
    int64_t bytes = 0;
    for (int64_t i = 0; i < o->n; i++) {
        for (int k = 0; k < FSDP__MAX_STATES; k++)
            if (o->slots[i].state[k])
                return fsdp__fail(FSDP_INVALID_STATE,
                                  "fsdp_optimizer_set_offload: there is state of %s already; call "
                                  "it before the first step and before a load",
                                  o->slots[i].param->name);
        bytes += fsdp__file_round(fsdp__param_kept(o->slots[i].param)->st->bytes);
    }
    bytes *= fsdp_optimizer_state_count(o);
    fsdp__allocator *file = NULL;
    if (p) FSDP_TRY(fsdp__offload_allocator(p, "optimizer state", &file));
    if (file) FSDP_TRY(fsdp__file_reserve(file, bytes));
    fsdp__opt_offload_close(o);
    o->file = file;
    o->promised = file ? bytes : 0;
    return FSDP_OK;
}
