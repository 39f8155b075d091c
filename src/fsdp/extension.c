/*
 * extension.c - what travels in a gather, said by the user: pre makes it of the shard, post makes
 * the whole parameter of what all ranks made.
 *
 * Both see the cut dim first, so a row is a row whichever dim is cut; where that is another dim
 * than 0 the shard is copied before pre, and the whole after post. Filling is no mutation: the
 * whole's version is as before.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/match.h"
#include "base/memory.h"
#include "fsdp/unit.h"

/* Sizes with the cut dim first. */
static void front(const fsdp_gather_info *i, const int64_t *sizes, int64_t *out)
{
    out[0] = sizes[i->dim];
    for (int d = 0, k = 1; d < i->ndim; d++)
        if (d != i->dim) out[k++] = sizes[d];
}

/* t with dim `from` put at place `to`: a view. */
static fsdp_tensor *moved(fsdp_tensor *t, int from, int to)
{
    int step = from < to ? 1 : -1;
    for (int d = from; t && d != to; d += step)
        t = fsdp_transpose(t, d, d + step);
    return t;
}

/* The shard without what makes it distributed, cut dim first. */
static fsdp_tensor *plain_shard(const fsdp__fparam *p)
{
    const fsdp_tensor *s = p->sharded;
    fsdp_tensor *t = fsdp__tensor_view(s->st, s->dtype, s->ndim, s->size, s->stride, s->offset);
    return t && p->ext->info.dim ? fsdp_contiguous(moved(t, p->ext->info.dim, 0)) : t;
}

/* ---- pre -------------------------------------------------------------------------- */

static fsdp_status check_wires(const fsdp__fparam *p, const fsdp_values *out, int64_t rows)
{
    const char *name = p->param->name;
    if (out->n < 1 || out->n > FSDP_GATHER_MAX)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "the gather extension of %s gives %d tensors; expected 1 to %d", name,
                          out->n, FSDP_GATHER_MAX);
    for (int k = 0; k < out->n; k++) {
        const fsdp_tensor *t = out->t[k];
        if (t && t->ndim >= 1 && t->size[0] == rows && t->st->data) continue;
        fsdp__str s = {0};
        if (t) fsdp__describe(t, &s);
        fsdp_status st = fsdp__fail(
            FSDP_INVALID_SHAPE,
            "the gather extension of %s gives %s as tensor %d; expected one with values whose dim "
            "0 is the %lld rows of this rank's part (uneven parts are not to be padded)",
            name, t ? fsdp__str_get(&s) : "NULL", k, (long long)rows);
        fsdp__str_free(&s);
        return st;
    }
    return FSDP_OK;
}

static fsdp_status call_pre(fsdp__unit *u, fsdp__fparam *p)
{
    fsdp__extension *x = p->ext;
    fsdp_values out = {0};
    x->info.name = p->param->name;
    x->info.module = u->module;
    x->info.mp_policy = &u->opt.mp_policy;
    x->info.compute = p->whole->dtype;
    x->info.meta = NULL;
    fsdp_tensor *shard = plain_shard(p);
    if (!shard) return fsdp_error();
    FSDP_TRY(fsdp__users_status(x->fn.pre(x->fn.arg, &x->info, shard, &out),
                                "gather extension's pre", p->param->name));
    FSDP_TRY(check_wires(p, &out, shard->size[0]));
    for (int k = 0; k < out.n; k++) {
        fsdp_tensor *t = fsdp_contiguous(out.t[k]);
        if (!t) return fsdp_error();
        x->wire[k] = fsdp_retain(t);
        x->n = k + 1;
    }
    return FSDP_OK;
}

fsdp_status fsdp__extension_pre(fsdp__unit *u, fsdp__fparam *p)
{
    fsdp__extension_drop(p->ext);
    fsdp_no_grad_begin();
    fsdp_status s = call_pre(u, p);
    fsdp_no_grad_end();
    return s;
}

/* ---- post --------------------------------------------------------------------------- */

static fsdp_status call_post(fsdp__fparam *p)
{
    fsdp__extension *x = p->ext;
    fsdp_values got = {.n = x->n};
    int64_t sizes[FSDP_MAX_DIMS];
    for (int k = 0; k < x->n; k++)
        got.t[k] = x->got[k];
    const fsdp_tensor *w = p->whole;
    fsdp_tensor *twin = fsdp__tensor_view(w->st, w->dtype, w->ndim, w->size, NULL, 0), *out = twin;
    front(&x->info, w->size, sizes);
    if (x->info.dim) out = fsdp__tensor_create(w->dtype, w->ndim, sizes, FSDP_CPU);
    if (!twin || !out) return fsdp_error();
    FSDP_TRY(fsdp__users_status(x->fn.post(x->fn.arg, &x->info, &got, out),
                                "gather extension's post", p->param->name));
    return out == twin ? FSDP_OK : fsdp_copy_(twin, moved(out, 0, x->info.dim));
}

fsdp_status fsdp__extension_post(fsdp__unit *u, fsdp__fparam *p)
{
    (void)u;
    FSDP_TRY(fsdp__storage_fill(p->whole->st, NULL, p->param->name));
    uint32_t version = p->whole->st->version;
    fsdp_no_grad_begin();
    fsdp_status s = call_post(p);
    fsdp_no_grad_end();
    p->whole->st->version = version;
    fsdp__extension_drop(p->ext);
    return s;
}

void fsdp__extension_drop(fsdp__extension *x)
{
    for (int k = 0; k < FSDP_GATHER_MAX; k++) {
        fsdp_release(x->wire[k]);
        fsdp_release(x->got[k]);
        x->wire[k] = x->got[k] = NULL;
    }
    x->n = 0;
}

/* ---- setting -------------------------------------------------------------------------- */

static fsdp_mesh *shard_mesh(const fsdp__unit *u)
{
    fsdp_mesh *m = u->opt.mesh;
    int n = fsdp_mesh_ndim(m);
    return n == 1 ? m : fsdp_mesh_slice(m, fsdp_mesh_axis_name(m, n - 1));
}

static fsdp_status set_one(fsdp__unit *u, fsdp__fparam *p, const fsdp_gather_extension *e,
                           const char *what)
{
    if (!fsdp__unit_resting(u))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: unit \"%s\", which holds %s, is whole now; call fsdp_reshard first",
                          what, u->name, p->param->name);
    if (!e) {
        free(p->ext);
        p->ext = NULL;
        return FSDP_OK;
    }
    const fsdp__layout *l = fsdp__layout_of(p->sharded);
    fsdp__extension *x = p->ext ? p->ext : fsdp__calloc(1, sizeof *x, "a gather extension");
    if (!x) return fsdp_error();
    p->ext = x;
    x->fn = *e;
    x->info.ndim = p->param->ndim;
    x->info.sizes = p->param->size;
    x->info.dim = l->place[fsdp__layout_shard_axis(l)].dim;
    if (!x->info.mesh) x->info.mesh = shard_mesh(u);
    return x->info.mesh ? FSDP_OK : fsdp_error();
}

static fsdp_status set_unit(fsdp__unit *u, const char *pattern, bool (*fit)(const fsdp__fparam *p),
                            const fsdp_gather_extension *e, const char *what, int *n)
{
    for (int i = 0; i < u->n_params; i++) {
        fsdp__fparam *p = &u->params[i];
        const char *name = p->param->name ? p->param->name : "";
        if (!fsdp__match(pattern, name) || (fit && !fit(p))) continue;
        FSDP_TRY(set_one(u, p, e, what));
        ++*n;
    }
    return FSDP_OK;
}

fsdp_status fsdp__extension_set(fsdp_module *m, int recurse, const char *pattern,
                                bool (*fit)(const fsdp__fparam *p), const fsdp_gather_extension *e,
                                const char *what, int *n)
{
    fsdp__unit *u = fsdp__unit_of(m);
    if (u) FSDP_TRY(set_unit(u, pattern, fit, e, what, n));
    for (int k = 0; u && k < u->n_tied; k++)
        FSDP_TRY(set_unit(u->tied[k], pattern, fit, e, what, n));
    for (int64_t i = 0; recurse && i < m->in->n_children; i++)
        FSDP_TRY(fsdp__extension_set(m->in->children[i], recurse, pattern, fit, e, what, n));
    return FSDP_OK;
}

fsdp_status fsdp_set_all_gather_extension(fsdp_module *m, const char *pattern,
                                          const fsdp_gather_extension *e)
{
    static const char what[] = "fsdp_set_all_gather_extension";
    if (fsdp_error()) return fsdp_error();
    if (!m || !pattern) return fsdp__fail_null(what, m ? "the pattern" : "the module");
    if (e && (!e->pre || !e->post))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s: %s is set and %s is NULL; expected both, since the one undoes the "
                          "other",
                          what, e->pre ? "pre" : "post", e->pre ? "post" : "pre");
    FSDP_TRY(fsdp__module_name_params(m));
    int n = 0;
    FSDP_TRY(fsdp__extension_set(m, 1, pattern, NULL, e, what, &n));
    if (n > 0) return FSDP_OK;
    return fsdp__fail(FSDP_NOT_FOUND,
                      "%s: no sharded parameter below \"%s\" matches '%s'; call fsdp_fully_shard "
                      "before, and see fsdp_module_print for the names",
                      what, fsdp_module_name(m), pattern);
}
