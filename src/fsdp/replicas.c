/*
 * replicas.c - sums inside the shard group, on their way over the replicas.
 *
 * A hybrid reduces inside the shard group first: each rank gets the sum of its own rows, 1/S of a
 * unit, in fp32 (fp64 for f64), and only that goes over the replicas. With the all-reduce off
 * (fsdp_set_requires_all_reduce) the sums stay, and the next reduction inside the group adds to
 * them; the first backward with it on takes all of it over the replicas, once. Each parameter has
 * a place of its own in the sums, so the set of parameters that get gradients may change between:
 * a parameter that a backward leaves out keeps what it has.
 *
 * Sums are used as well where something has to happen between the sum and the shards' gradients:
 * an all-reduce hook, a division of its own (force sum, f16), a collective of the user's.
 *
 * Invariants: `summed` says which places hold something; places of parameters that are not summed
 * are undefined; the sums exist from the first list that needs them to the settling.
 */
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "fsdp/unit.h"

/* Elements between the places of two parameters: they begin at cache lines. */
enum { ALIGN = 16 };

bool fsdp__unit_uses_sums(const fsdp__unit *u)
{
    if (u->sums) return true;
    if (u->S > 1 && u->R > 1) return true;
    if (u->hook || fsdp__custom_reduces(u)) return true;
    return u->S * u->R > 1 && (u->force_sum || (u->S > 1 && fsdp__unit_division(u).after != 1.0));
}

static fsdp_dtype sum_dtype(const fsdp__unit *u)
{
    for (int i = 0; i < u->n_params; i++)
        if (u->params[i].grad->dtype == FSDP_F64) return FSDP_F64;
    return FSDP_F32;
}

void *fsdp__sums_at(const fsdp__unit *u, const fsdp__fparam *p)
{
    return (char *)fsdp_data(u->sums) + (size_t)p->sum_at * fsdp_dtype_size(u->sums->dtype);
}

static int64_t place_numel(const fsdp__fparam *p)
{
    bool wanted = p->has_sum || p->param->requires_grad;
    return wanted ? (fsdp_numel(p->sharded) + ALIGN - 1) / ALIGN * ALIGN : 0;
}

fsdp_status fsdp__sums_make(fsdp__unit *u)
{
    int64_t total = 0;
    bool missing = !u->sums;
    for (int i = 0; i < u->n_params; i++) {
        missing = missing || (u->params[i].param->requires_grad && !u->params[i].has_sum);
        total += place_numel(&u->params[i]);
    }
    if (!missing) return FSDP_OK;
    fsdp_tensor *sums =
        fsdp__tensor_alloc(sum_dtype(u), 1, &total, FSDP_GRADIENTS,
                           fsdp__comm_allocator(u->R > 1 ? u->replicate : u->shard), u->name);
    if (!sums) return fsdp_error();
    sums = fsdp__tensor_own(sums);
    size_t width = fsdp_dtype_size(sums->dtype);
    int64_t at = 0;
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        int64_t numel = place_numel(p);
        if (p->summed)
            memcpy((char *)fsdp_data(sums) + (size_t)at * width, fsdp__sums_at(u, p),
                   (size_t)fsdp_numel(p->sharded) * width);
        p->has_sum = numel > 0 || p->param->requires_grad;
        p->sum_at = at;
        at += numel;
    }
    fsdp_release(u->sums);
    u->sums = sums;
    return FSDP_OK;
}

void fsdp__sums_drop(fsdp__unit *u)
{
    fsdp_release(u->sums);
    u->sums = NULL;
    u->sums_due = false;
    for (int i = 0; i < u->n_params; i++)
        u->params[i].has_sum = u->params[i].summed = false;
}

fsdp_status fsdp__sums_begin(fsdp__unit *u, fsdp_work **work)
{
    *work = NULL;
    u->sums_due = false;
    int n = 0;
    for (int i = 0; i < u->n_params; i++) {
        const fsdp__fparam *p = &u->params[i];
        if (!p->has_sum) continue;
        fsdp_list_entry *e = &u->reduce_entries[n];
        *e = (fsdp_list_entry){.outer = 1,
                               .dim = fsdp_numel(p->sharded),
                               .inner = 1,
                               .full = fsdp__sums_at(u, p),
                               .full_dtype = u->sums->dtype,
                               .shard_dtype = u->sums->dtype,
                               .present = p->summed};
        e->chunk = (e->dim + u->R - 1) / u->R;
        u->reduce_params[n++] = i;
    }
    u->n_reduce = n;
    if (u->R == 1) return FSDP_OK;
    float scale = (float)(1.0 / fsdp__unit_division(u).inside);
    return fsdp_all_reduce_list(u->replicate, FSDP_LANE_REPLICATE, u->name, u->reduce_entries, n,
                                scale, work);
}

fsdp_status fsdp__sums_settle(fsdp__unit *u)
{
    fsdp__division d = fsdp__unit_division(u);
    /* The sum inside a group of the user's is plain. */
    bool plain = u->R == 1 && fsdp__custom_reduces(u);
    float scale = (float)(1.0 / (plain ? d.inside * d.after : d.after));
    for (int k = 0; k < u->n_reduce; k++) {
        fsdp__fparam *p = &u->params[u->reduce_params[k]];
        if (!u->reduce_entries[k].present) continue; /* absent on all ranks: no gradient */
        fsdp_tensor *g = fsdp__shard_grad(p);
        if (!g) return fsdp_error();
        const void *source = fsdp__sums_at(u, p);
        if (fsdp_numel(p->sharded) > 0)
            fsdp__sum_tree(fsdp_data(g), g->dtype, &source, u->sums->dtype, 1,
                           (size_t)fsdp_numel(p->sharded), scale, !p->fresh_shard_grad);
        fsdp_touch(g);
        p->fresh_shard_grad = false;
        fsdp__offload_let_grad(p);
        FSDP_TRY(fsdp__run_accumulate_hooks(p->sharded));
    }
    fsdp__sums_drop(u);
    return FSDP_OK;
}
