/*
 * lora.c - adapters beside linear layers.
 *
 * An adapted layer stays the object that it was, so whoever holds a pointer to it needs not know:
 * it gets two children, lora_A and lora_B, and a forward hook that adds their product. No copy of a
 * weight is made. What the layer is told stands in its A.
 *
 * Shapes: x (..., in), A (rank, in), B (out, rank).
 */
#include "lora/lora.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

typedef struct down {
    fsdp_module base;
    fsdp_param *weight;
    fsdp__lora l;
    int hook;
} down;

fsdp_lora_options fsdp_lora_defaults(void)
{
    return (fsdp_lora_options){.rank = 8, .alpha = 16.0};
}

/* ---- forward ------------------------------------------------------------------------- */

static fsdp_tensor *as_dtype(fsdp_tensor *x, const fsdp_tensor *like)
{
    return fsdp_tensor_dtype(x) == fsdp_tensor_dtype(like) ? x
                                                           : fsdp_cast(x, fsdp_tensor_dtype(like));
}

static fsdp_tensor *down_forward(fsdp_module *self, fsdp_tensor *x)
{
    const down *d = (const down *)self;
    fsdp_tensor *w = fsdp_param_tensor(d->weight);
    x = as_dtype(x, w);
    if (self->in->training) x = fsdp_dropout(x, d->l.dropout);
    return fsdp_linear(x, w);
}

/* Behind the layer's own forward: out + scale * B(A(x)). */
static fsdp_status add_update(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)m;
    const down *d = arg;
    if (d->l.merged) return FSDP_OK;
    fsdp_tensor *y = fsdp_call(d->l.a, in->t[0]);
    fsdp_set(&y, fsdp_call(d->l.b, y));
    fsdp_set(&y, fsdp_scale(y, d->l.scale));
    fsdp_set(&y, as_dtype(y, out->t[0]));
    fsdp_set(&out->t[0], fsdp_add(out->t[0], y));
    fsdp_set(&y, NULL);
    return fsdp_error();
}

static void down_describe(const fsdp_module *self, char *text, size_t n)
{
    const fsdp__lora *l = &((const down *)self)->l;
    snprintf(text, n, "%lld -> %lld, scale %g%s", (long long)l->info.in, (long long)l->rank,
             l->scale, l->merged ? ", merged" : "");
}

/* ---- looking --------------------------------------------------------------------------- */

static fsdp_module *child_named(const fsdp_module *m, const char *name)
{
    for (int64_t i = 0; i < m->in->n_children; i++)
        if (!strcmp(m->in->children[i]->in->name, name)) return m->in->children[i];
    return NULL;
}

fsdp__lora *fsdp__lora_of(const fsdp_module *m)
{
    fsdp_module *a = child_named(m, "lora_A");
    return a && a->forward1 == down_forward ? &((down *)a)->l : NULL;
}

bool fsdp__lora_is_adapter(const fsdp_module *m)
{
    const fsdp__lora *l = m->in->parent ? fsdp__lora_of(m->in->parent) : NULL;
    return l && (l->a == m || l->b == m);
}

static fsdp_status walk(fsdp_module *m, fsdp__lora_list *out)
{
    fsdp__lora *l = fsdp__lora_of(m);
    if (l) {
        FSDP_TRY(FSDP__GROW(out->items, out->cap, out->count + 1, "adapted layers"));
        out->items[out->count++] = l;
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(walk(m->in->children[i], out));
    return FSDP_OK;
}

fsdp_status fsdp__lora_list_of(fsdp_module *m, fsdp__lora_list *out)
{
    *out = (fsdp__lora_list){0};
    fsdp_status s = walk(m, out);
    if (s == FSDP_OK) return s;
    free(out->items);
    *out = (fsdp__lora_list){0};
    return s;
}

int64_t fsdp_lora_count(fsdp_module *m)
{
    fsdp__lora_list l;
    if (!m || fsdp__lora_list_of(m, &l) != FSDP_OK) return 0;
    free(l.items);
    return l.count;
}

int fsdp_lora_merged(fsdp_module *m)
{
    fsdp__lora_list l;
    if (!m || fsdp__lora_list_of(m, &l) != FSDP_OK) return 0;
    int merged = l.count > 0 && l.items[0]->merged;
    free(l.items);
    return merged;
}

/* ---- making ------------------------------------------------------------------------------ */

static fsdp_module *make_down(const fsdp__linear_info *info, const fsdp_lora_options *o)
{
    down *d = (down *)fsdp_module_create(sizeof *d, "LoraA");
    if (!d) return NULL;
    double bound = info->in > 0 ? 1.0 / sqrt((double)info->in) : 0.0;
    fsdp_init_rule rule = {FSDP_INIT_UNIFORM, -bound, bound};
    int64_t sizes[2] = {o->rank, info->in};
    d->base.forward1 = down_forward;
    d->base.describe = down_describe;
    d->weight =
        fsdp_module_add_param(&d->base, "weight", fsdp_param_create(FSDP_F32, 2, sizes, rule));
    if (d->weight) return &d->base;
    fsdp_module_free(&d->base);
    return NULL;
}

static fsdp_module *make_up(const fsdp__linear_info *info, const fsdp_lora_options *o)
{
    fsdp_module *b = fsdp_linear_create(o->rank, info->out, 0);
    if (b) fsdp_module_set_init(b, (fsdp_init_rule){FSDP_INIT_ZEROS, 0, 0});
    return b;
}

/* The last child of m, which nobody has seen yet, goes again. */
static void drop_last_child(fsdp_module *m)
{
    fsdp_module *child = m->in->children[--m->in->n_children];
    child->in->parent = NULL;
    fsdp_module_free(child);
}

static void detach(fsdp_module *linear)
{
    const fsdp__lora *l = fsdp__lora_of(linear);
    (void)fsdp_remove_hook(linear, ((const down *)l->a)->hook);
    drop_last_child(linear);
    drop_last_child(linear);
}

static fsdp_status attach(fsdp_module *linear, const fsdp_lora_options *o)
{
    fsdp__linear_info info;
    if (!fsdp__linear_info_of(linear, &info))
        return fsdp__fail(FSDP_INTERNAL, "an adapter for a %s", linear->type);
    FSDP_TRY(fsdp_device_push(fsdp_tensor_device(fsdp_param_tensor(info.weight))));
    fsdp_module *a = make_down(&info, o), *b = a ? make_up(&info, o) : NULL;
    (void)fsdp_device_pop();
    if (!b) {
        fsdp_module_free(a);
        return fsdp_error();
    }
    if (!fsdp_module_add(linear, "lora_A", a)) {
        fsdp_module_free(b);
        return fsdp_error();
    }
    if (!fsdp_module_add(linear, "lora_B", b)) {
        drop_last_child(linear);
        return fsdp_error();
    }
    down *d = (down *)a;
    double root = o->rslora ? sqrt((double)o->rank) : (double)o->rank;
    d->l = (fsdp__lora){.linear = linear,
                        .a = a,
                        .b = b,
                        .info = info,
                        .rank = o->rank,
                        .alpha = o->alpha,
                        .dropout = o->dropout,
                        .scale = o->alpha / root,
                        .rslora = o->rslora != 0};
    d->hook = fsdp_register_forward_hook(linear, add_update, d, 0);
    if (d->hook >= 0) return FSDP_OK;
    drop_last_child(linear);
    drop_last_child(linear);
    return fsdp_error();
}

/* ---- applying ---------------------------------------------------------------------------- */

static fsdp_status check_options(const fsdp_lora_options *o)
{
    if (o->rank < 1)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "lora: rank %lld; expected 1 or more",
                          (long long)o->rank);
    if (!(o->dropout >= 0.0 && o->dropout < 1.0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "lora: dropout %g; expected 0 <= p < 1",
                          o->dropout);
    if (!isfinite(o->alpha))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "lora: alpha %g; expected a number", o->alpha);
    if (o->n_target_modules < 0 || (o->n_target_modules > 0 && !o->target_modules))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "lora: %d target_modules at NULL",
                          o->n_target_modules);
    for (int i = 0; i < o->n_target_modules; i++)
        if (!o->target_modules[i])
            return fsdp__fail(FSDP_INVALID_ARGUMENT, "lora: target_modules[%d] is NULL", i);
    if (o->n_target_modules && o->target_pattern)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "lora: target_modules and target_pattern are both set; expected one");
    return FSDP_OK;
}

/* Adapters after sharding would belong to no unit. */
static fsdp_status check_module(fsdp_module *m)
{
    if (m->in->shard)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_lora_apply: \"%s\" (%s) is sharded already; apply adapters before "
                          "fsdp_fully_shard",
                          fsdp_module_name(m), m->type);
    if (fsdp__lora_of(m))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_lora_apply: \"%s\" has an adapter already; apply once a model",
                          fsdp_module_name(m));
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(check_module(m->in->children[i]));
    return FSDP_OK;
}

static fsdp_status freeze_base(fsdp_module *m)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++)
        if (!fsdp__lora_is_adapter(l.items[i].owner))
            s = fsdp_param_requires_grad_(l.items[i].param, 0);
    fsdp_param_list_free(&l);
    return s;
}

fsdp_status fsdp_lora_apply(fsdp_module *m, const fsdp_lora_options *o)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_lora_apply", "the module");
    const fsdp_lora_options defaults = fsdp_lora_defaults();
    if (!o) o = &defaults;
    FSDP_TRY(check_options(o));
    FSDP_TRY(check_module(m));
    fsdp__lora_targets t;
    FSDP_TRY(fsdp__lora_find(m, o, &t));
    fsdp_status s = FSDP_OK;
    int64_t done = 0;
    for (; done < t.count && s == FSDP_OK; done++)
        s = attach(t.items[done], o);
    if (s == FSDP_OK)
        s = freeze_base(m);
    else
        done--;
    for (; s != FSDP_OK && done > 0; done--)
        detach(t.items[done - 1]);
    free(t.items);
    return s;
}

fsdp_status fsdp_lora_reset(fsdp_module *m, uint64_t seed)
{
    if (fsdp_error()) return fsdp_error();
    if (!m) return fsdp__fail_null("fsdp_lora_reset", "the module");
    fsdp_param_list l;
    FSDP_TRY(fsdp__module_name_params(m));
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    int64_t n = 0;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        if (!fsdp__lora_is_adapter(l.items[i].owner)) continue;
        s = fsdp__param_reset(l.items[i].param, seed);
        n++;
    }
    fsdp_param_list_free(&l);
    if (s == FSDP_OK && n == 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_lora_reset: the model has no adapters; call fsdp_lora_apply first");
    return s;
}
