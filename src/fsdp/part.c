/*
 * part.c - what is kept after forward when reshard_after_forward is an integer k: 1/k of the whole.
 *
 * The shards' ranks are taken in groups of k consecutive ones. When a unit's forward ends, each
 * rank keeps the rows of the whole parameter, in the compute dtype, that it owns when the parameter
 * is cut over such a group, and backward gathers within the group. So memory between forward and
 * backward is 1/k instead of 1/N or all, and backward's gathers stay among near ranks.
 *
 * The rows are cut anew, over k: rank j of a group has rows [j * c, (j + 1) * c) with c = ceil(d /
 * k), so they are right rows on uneven shapes too (FSDP2 keeps 1/k of a padded buffer there, whose
 * rows are others than its DTensor says). What stands on the module meanwhile is a DTensor over the
 * mesh (N / k, k); optimizers and gradients stay with the shard.
 */
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/str.h"
#include "fsdp/unit.h"
#include "mesh/mesh.h"

static fsdp_status refuse(const fsdp__unit *u)
{
    fsdp__str s = {0};
    for (int k = 1; k <= u->S; k++)
        if (u->S % k == 0) fsdp__str_addf(&s, "%s%d", k > 1 ? ", " : "", k);
    fsdp_status st =
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "fsdp_fully_shard: reshard_ranks %d with %d shards; expected a divisor of them "
                   "(%s), or 0 for none",
                   u->opt.reshard_ranks, u->S, fsdp__str_get(&s));
    fsdp__str_free(&s);
    return st;
}

fsdp_status fsdp__parts_prepare(fsdp__unit *u)
{
    int k = u->opt.reshard_ranks;
    if (k == 0) return FSDP_OK;
    if (k < 1 || k > u->S || u->S % k != 0) return refuse(u);
    if (u->opt.reshard_after_forward != FSDP_RESHARD_AUTO)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "fsdp_fully_shard: reshard_ranks %d and reshard_after_forward %s at once; "
            "leave one of them at its default",
            k, u->opt.reshard_after_forward == FSDP_RESHARD_NEVER ? "NEVER" : "ALWAYS");
    if (k == 1 && u->S > 1)
        fsdp__log(FSDP__LOG_WARNING,
                  "fsdp_fully_shard of \"%s\": reshard_ranks 1 keeps the gathered parameters whole "
                  "after forward; %d would free them to 1/%d, as ALWAYS does",
                  u->name, u->S, u->S);
    u->opt.reshard_after_forward = k == 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    if (k == 1 || k == u->S) return FSDP_OK;
    u->part_mesh = fsdp__mesh_regroup(u->opt.mesh, k);
    if (!u->part_mesh) return fsdp_error();
    u->part_group = fsdp_mesh_group(u->part_mesh, 1);
    return FSDP_OK;
}

/* The dim along which p is cut. */
static int cut_dim(const fsdp__fparam *p)
{
    const fsdp__layout *l = fsdp__layout_of(p->sharded);
    return l->place[fsdp__layout_shard_axis(l)].dim;
}

/* This rank's rows of the whole, as a DTensor over the small mesh. */
static fsdp_status take(fsdp__unit *u, fsdp__fparam *p)
{
    int dim = cut_dim(p);
    int64_t sizes[FSDP_MAX_DIMS], row0;
    fsdp_placement place[2] = {{FSDP_REPLICATE, 0}, {FSDP_SHARD, dim}};
    p->part_cut = fsdp__cut_of(p->param->ndim, p->param->size, dim, fsdp_group_size(u->part_group));
    const fsdp__cut *c = &p->part_cut;
    int64_t rows = fsdp__cut_rows(c, fsdp_group_rank(u->part_group), &row0);
    memcpy(sizes, p->param->size, sizeof sizes);
    sizes[dim] = rows;
    fsdp__allocator *home = u->opt.private_gather ? fsdp__comm_allocator(u->part_group) : NULL;
    p->part = fsdp__tensor_alloc(p->whole->dtype, p->param->ndim, sizes, FSDP_UNSHARDED, home,
                                 p->param->name);
    if (!p->part) return fsdp_error();
    fsdp__tensor_own(p->part);
    p->part->st->owner = p->param->name;
    size_t width = fsdp_dtype_size(p->whole->dtype), run = (size_t)(rows * c->inner) * width;
    const char *from = fsdp_data(p->whole);
    for (int64_t o = 0; o < c->outer && run > 0; o++)
        memcpy((char *)fsdp_data(p->part) + (size_t)o * run,
               from + (size_t)((o * c->dim + row0) * c->inner) * width, run);
    fsdp__layout *l = fsdp__layout_create(u->part_mesh, place, p->param->ndim, p->param->size);
    if (!l) return fsdp_error();
    fsdp__layout_attach(p->part, l);
    return fsdp_requires_grad_(p->part, p->param->requires_grad);
}

fsdp_status fsdp__parts_take(fsdp__unit *u)
{
    fsdp_status s = FSDP_OK;
    for (int i = 0; i < u->n_params && s == FSDP_OK; i++)
        s = take(u, &u->params[i]);
    u->parted = true;
    if (s != FSDP_OK) fsdp__parts_drop(u);
    return s;
}

void fsdp__parts_drop(fsdp__unit *u)
{
    for (int i = 0; i < u->n_params && u->parted; i++) {
        fsdp__fparam *p = &u->params[i];
        if (!p->part) continue;
        if (p->param->t == p->part) fsdp__param_set(p->param, p->sharded);
        p->part->st->owner = NULL;
        fsdp_release(p->part);
        p->part = NULL;
    }
    u->parted = false;
}
