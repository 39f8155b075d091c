/*
 * ema.c - an exponential moving average of the weights, each rank's of what it holds.
 *
 * The average is kept in f32 beside the shards and is elementwise, so neither the cut nor the
 * number of ranks changes a bit. It takes the place of the weights, for validation or for an
 * export, by an exchange: f32 weights and averages change places without further memory; narrower
 * weights are put aside, since the average would lose digits in their place.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "dtensor/dtensor.h"
#include "fsdp/optim.h"
#include "nn/module.h"

typedef struct entry {
    fsdp_param *param;    /* own reference */
    fsdp_tensor *average; /* f32, of the local part's shape; own reference */
    fsdp_tensor *aside;   /* weights narrower than f32, while they are exchanged */
} entry;

struct fsdp_ema {
    double decay;
    int64_t updates;
    bool swapped;
    entry *entries;
    int64_t n;
};

static fsdp_tensor *like(const entry *e, fsdp_dtype t)
{
    fsdp_tensor *p = fsdp__param_kept(e->param);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x =
        scope ? fsdp__tensor_alloc(t, p->ndim, p->size, FSDP_OPTIMIZER, NULL, e->param->name)
              : NULL;
    if (x) fsdp__layout_share(x, p);
    if (x && fsdp_data(x)) memset(fsdp_data(x), 0, (size_t)fsdp_numel(x) * fsdp_dtype_size(t));
    fsdp_retain(x);
    fsdp_scope_end(scope);
    return x;
}

fsdp_ema *fsdp_ema_create(fsdp_module *m, double decay)
{
    if (fsdp_error()) return NULL;
    if (!m || !(decay >= 0.0 && decay < 1.0)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "a moving average of decay %g%s; expected a module and at least 0 and below 1",
                   decay, m ? "" : " of no module");
        return NULL;
    }
    fsdp_param_list l = {0};
    fsdp_ema *e = fsdp__calloc(1, sizeof *e, "a moving average");
    fsdp_status s = e ? fsdp__module_name_params(m) : fsdp_error();
    if (s == FSDP_OK) s = fsdp_module_params(m, &l);
    if (s == FSDP_OK) e->entries = fsdp__calloc((size_t)l.count + 1, sizeof *e->entries, "an EMA");
    if (s == FSDP_OK && !e->entries) s = fsdp_error();
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp_param *p = l.items[i].param;
        if (!p->requires_grad) continue;
        if (fsdp_tensor_device(fsdp__param_kept(p)) == FSDP_META) {
            s = fsdp__fail(FSDP_INVALID_STATE,
                           "a moving average of %s, which is on the meta device; call "
                           "fsdp_to_empty first",
                           p->name);
            break;
        }
        entry *x = &e->entries[e->n++];
        x->param = fsdp_param_retain(p);
        if (!(x->average = like(x, FSDP_F32))) s = fsdp_error();
    }
    fsdp_param_list_free(&l);
    if (s == FSDP_OK) {
        e->decay = decay;
        return e;
    }
    fsdp_ema_free(e);
    return NULL;
}

void fsdp_ema_free(fsdp_ema *e)
{
    if (!e) return;
    for (int64_t i = 0; i < e->n && e->swapped; i++) /* the averages stay where they are */
        e->entries[i].param->averaged = false;
    for (int64_t i = 0; i < e->n; i++) {
        fsdp_release(e->entries[i].average);
        fsdp_release(e->entries[i].aside);
        fsdp_param_release(e->entries[i].param);
    }
    free(e->entries);
    free(e);
}

/* ---- updating ------------------------------------------------------------------------ */

enum { PART = 32768, PIECE = 1024 };

typedef struct update_args {
    float *average;
    const void *p;
    fsdp_dtype t;
    int64_t n;
    float weight; /* of the new value */
    bool first;
} update_args;

/* As torch.lerp: from the end that is nearer. */
static void lerp(float *a, const float *p, int64_t n, float w)
{
    if (w < 0.5f)
        for (int64_t i = 0; i < n; i++)
            a[i] = a[i] + w * (p[i] - a[i]);
    else
        for (int64_t i = 0; i < n; i++)
            a[i] = p[i] - (p[i] - a[i]) * (1.0f - w);
}

static void update_part(void *arg, int64_t part)
{
    const update_args *u = arg;
    int64_t end = (part + 1) * PART < u->n ? (part + 1) * PART : u->n;
    float piece[PIECE];
    for (int64_t i = part * PART; i < end; i += PIECE) {
        int64_t n = end - i < PIECE ? end - i : PIECE;
        const char *p = (const char *)u->p + (size_t)i * fsdp_dtype_size(u->t);
        if (u->first)
            fsdp__convert(u->average + i, FSDP_F32, p, u->t, (size_t)n);
        else if (u->t == FSDP_F32)
            lerp(u->average + i, (const float *)(const void *)p, n, u->weight);
        else {
            fsdp__convert(piece, FSDP_F32, p, u->t, (size_t)n);
            lerp(u->average + i, piece, n, u->weight);
        }
    }
}

static fsdp_status check(const fsdp_ema *e, const char *what, bool swapped)
{
    if (fsdp_error()) return fsdp_error();
    if (!e) return fsdp__fail_null(what, "the moving average");
    if (e->swapped != swapped)
        return fsdp__fail(FSDP_INVALID_STATE, "%s while the average %s the weights' place", what,
                          e->swapped ? "has" : "does not have");
    for (int64_t i = 0; i < e->n; i++) {
        const entry *x = &e->entries[i];
        FSDP_TRY(fsdp__tensor_has_values(fsdp__param_kept(x->param), what));
        if (!fsdp__same_sizes(x->average, fsdp__param_kept(x->param)))
            return fsdp__fail(FSDP_INVALID_STATE,
                              "the moving average was made before %s was sharded; make it after "
                              "fsdp_fully_shard",
                              x->param->name);
    }
    return FSDP_OK;
}

fsdp_status fsdp_ema_update(fsdp_ema *e)
{
    FSDP_TRY(check(e, "fsdp_ema_update", false));
    for (int64_t i = 0; i < e->n; i++) {
        entry *x = &e->entries[i];
        fsdp_tensor *p = fsdp__param_kept(x->param);
        FSDP_TRY(fsdp__storage_use(p->st)); /* it may lie in a file */
        update_args u = {fsdp_data(x->average),   fsdp_data(p),   p->dtype, fsdp_numel(p),
                         (float)(1.0 - e->decay), e->updates == 0};
        fsdp__parallel((u.n + PART - 1) / PART, update_part, &u);
        fsdp__storage_done(p->st, false);
    }
    e->updates++;
    return FSDP_OK;
}

/* ---- exchanging ------------------------------------------------------------------------ */

static void exchange(float *a, float *b, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = a[i];
        a[i] = b[i];
        b[i] = x;
    }
}

/* Weights of another dtype: out into `aside`, and the average, rounded, in; or back. */
static void put_aside(entry *x, bool in)
{
    fsdp_tensor *p = fsdp__param_kept(x->param);
    size_t n = (size_t)fsdp_numel(p);
    if (n == 0) return;
    if (in) {
        memcpy(fsdp_data(x->aside), fsdp_data(p), n * fsdp_dtype_size(p->dtype));
        fsdp__convert(fsdp_data(p), p->dtype, fsdp_data(x->average), FSDP_F32, n);
    } else {
        memcpy(fsdp_data(p), fsdp_data(x->aside), n * fsdp_dtype_size(p->dtype));
    }
}

static void swap(fsdp_ema *e, bool in)
{
    for (int64_t i = 0; i < e->n; i++) {
        entry *x = &e->entries[i];
        fsdp_tensor *p = fsdp__param_kept(x->param);
        if (e->updates > 0 && p->dtype == FSDP_F32)
            exchange(fsdp_data(p), fsdp_data(x->average), fsdp_numel(p));
        else if (e->updates > 0)
            put_aside(x, in);
        if (!in) {
            fsdp_release(x->aside);
            x->aside = NULL;
        }
        x->param->averaged = in;
        fsdp_touch(p);
    }
    e->swapped = in;
}

fsdp_status fsdp_ema_swap_in(fsdp_ema *e)
{
    FSDP_TRY(check(e, "fsdp_ema_swap_in", false));
    for (int64_t i = 0; i < e->n; i++)
        if (e->entries[i].param->averaged)
            return fsdp__fail(FSDP_INVALID_STATE,
                              "fsdp_ema_swap_in: another moving average has the place of %s; call "
                              "fsdp_ema_swap_out on that one first",
                              e->entries[i].param->name);
    /* All memory first: without it nothing is exchanged. */
    for (int64_t i = 0; i < e->n; i++) {
        entry *x = &e->entries[i];
        fsdp_dtype t = fsdp__param_kept(x->param)->dtype;
        if (t == FSDP_F32 || (x->aside = like(x, t))) continue;
        for (int64_t k = 0; k < i; k++) {
            fsdp_release(e->entries[k].aside);
            e->entries[k].aside = NULL;
        }
        return fsdp_error();
    }
    swap(e, true);
    return FSDP_OK;
}

fsdp_status fsdp_ema_swap_out(fsdp_ema *e)
{
    FSDP_TRY(check(e, "fsdp_ema_swap_out", true));
    swap(e, false);
    return FSDP_OK;
}

/* ---- state ------------------------------------------------------------------------------ */

int fsdp_ema_swapped(const fsdp_ema *e)
{
    return e && e->swapped;
}

int64_t fsdp_ema_updates(const fsdp_ema *e)
{
    return e ? e->updates : 0;
}

void fsdp_ema_set_updates(fsdp_ema *e, int64_t n)
{
    if (e) e->updates = n;
}

fsdp_tensor *fsdp_ema_average(fsdp_ema *e, const fsdp_param *p)
{
    for (int64_t i = 0; e && i < e->n; i++)
        if (e->entries[i].param == p) return e->entries[i].average;
    return NULL;
}
