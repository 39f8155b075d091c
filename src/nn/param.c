/*
 * param.c - parameters: making, memory, values.
 *
 * A parameter's values are a function of (seed, dotted name, element of the
 * whole tensor), so a rank fills its own part and no rank needs the rest.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "nn/module.h"
#include "tensor/kernels.h"

static fsdp_tensor *make_tensor(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_device d)
{
    fsdp_purpose before = fsdp__purpose_set(FSDP_PARAMETERS);
    fsdp_tensor *x = fsdp__tensor_own(fsdp__tensor_create(t, ndim, sizes, d));
    fsdp__purpose_set(before);
    if (x) x->st->poisoned = d != FSDP_META;
    return x;
}

static fsdp_status check_rule(const char *what, fsdp_init_rule r)
{
    if ((int)r.kind >= FSDP_INIT_ZEROS && r.kind <= FSDP_INIT_UNIFORM) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: rule of kind %d; expected one of fsdp_init_kind",
                      what, (int)r.kind);
}

fsdp_param *fsdp_param_create(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_init_rule init)
{
    if (check_rule("fsdp_param_create", init) != FSDP_OK) return NULL;
    fsdp_param *p = fsdp__calloc(1, sizeof *p, "a parameter");
    if (!p) return NULL;
    p->refs = 1;
    p->init = init;
    p->t = make_tensor(t, ndim, sizes, fsdp_device_current());
    if (!p->t) {
        free(p);
        return NULL;
    }
    p->dtype = t;
    p->ndim = ndim;
    memcpy(p->size, p->t->size, sizeof p->size);
    if (fsdp_param_requires_grad_(p, fsdp_dtype_is_floating(t)) != FSDP_OK) {
        fsdp_param_release(p);
        return NULL;
    }
    return p;
}

fsdp_param *fsdp_param_retain(fsdp_param *p)
{
    if (p) p->refs++;
    return p;
}

void fsdp_param_release(fsdp_param *p)
{
    if (!p || --p->refs > 0) return;
    if (p->t) p->t->st->owner = NULL;
    fsdp_release(p->t);
    for (int64_t i = 0; i < p->n_old; i++)
        free(p->old_names[i]);
    free(p->old_names);
    free(p->name);
    free(p);
}

fsdp_tensor *fsdp_param_tensor(const fsdp_param *p)
{
    return p ? p->t : NULL;
}

int fsdp_param_ndim(const fsdp_param *p)
{
    return p ? p->ndim : 0;
}

const int64_t *fsdp_param_sizes(const fsdp_param *p)
{
    return p ? p->size : NULL;
}

fsdp_status fsdp_param_requires_grad_(fsdp_param *p, int on)
{
    if (!p) return fsdp__fail_null("fsdp_param_requires_grad_", "the parameter");
    FSDP_TRY(fsdp_requires_grad_(p->t, on));
    p->requires_grad = on != 0;
    return FSDP_OK;
}

int fsdp_param_requires_grad(const fsdp_param *p)
{
    return p && p->requires_grad;
}

void fsdp__param_set(fsdp_param *p, fsdp_tensor *t)
{
    fsdp_retain(t);
    fsdp_release(p->t);
    p->t = t;
}

fsdp_tensor *fsdp__param_kept(const fsdp_param *p)
{
    return p->kept ? p->kept : p->t;
}

fsdp_tensor *fsdp_param_shard(const fsdp_param *p)
{
    return p ? fsdp__param_kept(p) : NULL;
}

/* ---- a loss that is scaled ------------------------------------------------------------- */

fsdp_status fsdp__loss_scaled_set(bool on)
{
    bool *flag = fsdp__slot_get(FSDP__SLOT_NN);
    if (!flag && !on) return FSDP_OK;
    if (!flag) {
        if (!(flag = fsdp__calloc(1, sizeof *flag, "a flag"))) return fsdp_error();
        fsdp__slot_set(FSDP__SLOT_NN, flag, free);
    }
    *flag = on;
    return FSDP_OK;
}

bool fsdp__loss_scaled(void)
{
    const bool *flag = fsdp__slot_get(FSDP__SLOT_NN);
    return flag && *flag;
}

/* ---- memory and values -------------------------------------------------------------- */

/* Meta bytes become real ones on device d. */
static fsdp_status make_real(fsdp__storage *st, fsdp_device d, const char *name)
{
    if (st->device == d) return FSDP_OK;
    if (d != FSDP_CPU)
        return fsdp__fail(FSDP_UNSUPPORTED, "fsdp_to_empty to %s; expected cpu",
                          fsdp_device_name(d));
    st->device = d;
    fsdp_status s = fsdp__storage_fill(st, NULL, name);
    if (s != FSDP_OK) st->device = FSDP_META; /* as it was: it may be tried again */
    st->poisoned = s == FSDP_OK;
    return s;
}

static fsdp_status buffers_to_empty(fsdp_module *m, fsdp_device d)
{
    for (int64_t i = 0; i < m->in->n_buffers; i++)
        FSDP_TRY(make_real(m->in->buffers[i].t->st, d, m->in->buffers[i].name));
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(buffers_to_empty(m->in->children[i], d));
    return FSDP_OK;
}

fsdp_status fsdp_to_empty(fsdp_module *m, fsdp_device d)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp__module_name_params(m));
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp__storage *st = fsdp__param_kept(l.items[i].param)->st;
        if (st->device != d) {
            st->purpose = FSDP_PARAMETERS;
            st->owner = l.items[i].param->name;
        }
        bool meta = st->device == FSDP_META;
        s = make_real(st, d, l.items[i].param->name);
        if (s == FSDP_OK && meta && !l.items[i].param->shard) l.items[i].param->emptied = true;
    }
    fsdp_param_list_free(&l);
    return s == FSDP_OK ? buffers_to_empty(m, d) : s;
}

/* Elements [first, first + n) of the whole tensor into dst. */
static void fill_run(const fsdp_init_rule *rule, uint64_t key, int64_t first, int64_t n, char *dst,
                     fsdp_dtype t)
{
    size_t width = fsdp_dtype_size(t);
    float part[512];
    for (int64_t i = 0; i < n; i += 512) {
        size_t m = (size_t)(n - i < 512 ? n - i : 512);
        if (rule->kind == FSDP_INIT_NORMAL) {
            fsdp__rng_normal_fill(key, (uint64_t)(first + i), part, m);
            for (size_t k = 0; k < m; k++)
                part[k] = (float)(rule->a + rule->b * (double)part[k]);
        } else {
            fsdp__rng_uniform_fill(key, (uint64_t)(first + i), part, m);
            for (size_t k = 0; k < m; k++)
                part[k] = (float)(rule->a + (rule->b - rule->a) * (double)part[k]);
        }
        fsdp__convert(dst + (size_t)i * width, t, part, FSDP_F32, m);
    }
}

fsdp_status fsdp__param_reset(fsdp_param *p, uint64_t seed)
{
    fsdp_tensor *t = fsdp__param_kept(p);
    if (t->st->device == FSDP_META)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_reset_parameters: %s is on the meta device; call fsdp_to_empty "
                          "first",
                          p->name);
    FSDP_TRY(fsdp__tensor_writable(t, "fsdp_reset_parameters"));
    int64_t outer = 1, dim = fsdp_numel(t), inner = 1, row0 = 0, rows = dim;
    if (t->dist) t->dist->ops->block(t->dist, &outer, &dim, &inner, &row0, &rows);
    if (p->init.kind == FSDP_INIT_ZEROS || p->init.kind == FSDP_INIT_ONES) {
        fsdp__k_fill(fsdp_data(t), t->dtype, fsdp_numel(t),
                     p->init.kind == FSDP_INIT_ONES ? 1.0 : 0.0);
    } else {
        uint64_t key = fsdp__rng_mix_str(fsdp__rng_key(seed), p->name);
        size_t width = fsdp_dtype_size(t->dtype);
        for (int64_t o = 0; o < outer; o++)
            fill_run(&p->init, key, (o * dim + row0) * inner, rows * inner,
                     (char *)fsdp_data(t) + (size_t)(o * rows * inner) * width, t->dtype);
    }
    fsdp_touch(t);
    t->st->shard_version++;
    return FSDP_OK;
}

static fsdp_status reset_buffers(fsdp_module *m)
{
    if (m->in->reset) FSDP_TRY(m->in->reset(m));
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(reset_buffers(m->in->children[i]));
    return FSDP_OK;
}

fsdp_status fsdp_reset_parameters(fsdp_module *m, uint64_t seed)
{
    if (fsdp_error()) return fsdp_error();
    fsdp_param_list l;
    FSDP_TRY(fsdp__module_name_params(m));
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++)
        s = fsdp__param_reset(l.items[i].param, seed);
    fsdp_param_list_free(&l);
    return s == FSDP_OK ? reset_buffers(m) : s;
}

fsdp_status fsdp_zero_grad(fsdp_module *m)
{
    if (fsdp_error()) return fsdp_error();
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++)
        s = fsdp_set_grad(fsdp__param_kept(l.items[i].param), NULL);
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp_param *p = l.items[i].param;
        if (p->shard) p->shard_ops->drop_unreduced(p->shard);
    }
    fsdp_param_list_free(&l);
    return s;
}

bool fsdp__param_unreduced(const fsdp_param *p)
{
    return p->shard && p->shard_ops->unreduced(p->shard);
}

void fsdp_module_set_init(fsdp_module *m, fsdp_init_rule rule)
{
    if (!m || check_rule("fsdp_module_set_init", rule) != FSDP_OK) return;
    for (int64_t i = 0; i < m->in->n_params; i++)
        if (m->in->params[i].param->ndim >= 2 && !strcmp(m->in->params[i].name, "weight"))
            m->in->params[i].param->init = rule;
    for (int64_t i = 0; i < m->in->n_children; i++)
        fsdp_module_set_init(m->in->children[i], rule);
}

fsdp_status fsdp_module_to_dtype(fsdp_module *m, fsdp_dtype t)
{
    if (!fsdp_dtype_is_floating(t))
        return fsdp__fail(FSDP_INVALID_DTYPE, "fsdp_module_to_dtype: %s; expected a floating dtype",
                          fsdp_dtype_name(t));
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = fsdp__module_name_params(m);
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) /* all or none */
        if (l.items[i].param->shard)
            s = l.items[i].param->shard_ops->to_dtype(l.items[i].param->shard, t, true);
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp_param *p = l.items[i].param;
        if (p->dtype == t || !fsdp_dtype_is_floating(p->dtype)) continue;
        if (p->shard) {
            if ((s = p->shard_ops->to_dtype(p->shard, t, false)) != FSDP_OK) break;
            continue;
        }
        fsdp_tensor *old = p->t, *x = make_tensor(t, p->ndim, p->size, old->st->device);
        if (!x) {
            s = fsdp_error();
            break;
        }
        if (old->st->data && !old->st->poisoned) s = fsdp_copy_(x, old);
        x->st->owner = old->st->owner;
        old->st->owner = NULL;
        p->t = x;
        p->dtype = t;
        fsdp_release(old);
        if (s == FSDP_OK) s = fsdp_param_requires_grad_(p, p->requires_grad);
    }
    fsdp_param_list_free(&l);
    return s;
}
