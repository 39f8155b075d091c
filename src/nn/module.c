/*
 * module.c - the tree: making, naming, walking, freeing.
 */
#include "nn/module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

fsdp_module *fsdp_module_create(size_t size, const char *type)
{
    if (size < sizeof(fsdp_module)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "fsdp_module_create(%zu, \"%s\"): a module is at least %zu bytes: embed "
                   "fsdp_module as the first member",
                   size, type ? type : "", sizeof(fsdp_module));
        return NULL;
    }
    fsdp_module *m = fsdp__calloc(1, size, "a module");
    struct fsdp__module *in = m ? fsdp__calloc(1, sizeof *in, "a module") : NULL;
    if (!in) {
        free(m);
        return NULL;
    }
    m->type = type ? type : "Module";
    m->in = in;
    in->training = true;
    return m;
}

static void free_tree(fsdp_module *m)
{
    struct fsdp__module *in = m->in;
    if (m->destroy) m->destroy(m);
    for (int64_t i = 0; i < in->n_children; i++)
        free_tree(in->children[i]);
    if (in->shard && in->shard_free) in->shard_free(in->shard);
    for (int64_t i = 0; i < in->n_params; i++) {
        free(in->params[i].name);
        fsdp_param_release(in->params[i].param);
    }
    for (int64_t i = 0; i < in->n_buffers; i++) {
        free(in->buffers[i].name);
        fsdp_release(in->buffers[i].t);
    }
    fsdp__life_end(in->life);
    free(in->children);
    free(in->params);
    free(in->buffers);
    for (int64_t i = 0; i < in->n_methods; i++)
        free(in->methods[i].name);
    free(in->methods);
    free(in->hooks);
    free(in->name);
    free(in);
    free(m);
}

void fsdp_module_free(fsdp_module *m)
{
    if (!m) return;
    if (!m->in->parent) {
        free_tree(m);
        return;
    }
    fsdp__fail(FSDP_INVALID_ARGUMENT,
               "fsdp_module_free of \"%s\", which belongs to a %s: free that, and it goes along",
               m->in->name, m->in->parent->type);
}

static bool bad_name(const fsdp_module *m, const char *name)
{
    if (name && *name && !strchr(name, '.')) return false;
    fsdp__fail(FSDP_INVALID_ARGUMENT,
               "a child or parameter of %s named %s%s%s; expected a name "
               "without dots",
               m->type, name ? "\"" : "", name ? name : "NULL", name ? "\"" : "");
    return true;
}

static bool taken(const struct fsdp__module *in, const char *name)
{
    for (int64_t i = 0; i < in->n_children; i++)
        if (!strcmp(in->children[i]->in->name, name)) return true;
    for (int64_t i = 0; i < in->n_params; i++)
        if (!strcmp(in->params[i].name, name)) return true;
    for (int64_t i = 0; i < in->n_buffers; i++)
        if (!strcmp(in->buffers[i].name, name)) return true;
    return false;
}

static fsdp_module *root_of(fsdp_module *m)
{
    while (m && m->in->parent)
        m = m->in->parent;
    return m;
}

/* Something was added below m's root: its parameters may need names. */
static void forget_names(fsdp_module *m)
{
    root_of(m)->in->named = false;
}

/* A unit manages what its module held when it was sharded. What comes later would be trained by
 * each rank for itself. p is to become `name` of m. */
static fsdp_status late_param(const fsdp_module *m, const char *name, const fsdp_param *p)
{
    const fsdp_module *up = m;
    while (up && !up->in->shard)
        up = up->in->parent;
    if (!up || p->shard || p->ignored) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_STATE,
                      "%s is added below a %s that is sharded already, so its gradients would not "
                      "be summed over the ranks; add it before fsdp_fully_shard, or name it in "
                      "ignored_params then",
                      name, up->type);
}

static fsdp_status late(const fsdp_module *m, const char *name, const fsdp_module *child)
{
    for (int64_t i = 0; i < child->in->n_params; i++) {
        char text[256];
        snprintf(text, sizeof text, "%s.%s", name, child->in->params[i].name);
        FSDP_TRY(late_param(m, text, child->in->params[i].param));
    }
    for (int64_t i = 0; i < child->in->n_children; i++)
        FSDP_TRY(late(m, name, child->in->children[i]));
    return FSDP_OK;
}

fsdp_module *fsdp_module_add(fsdp_module *m, const char *name, fsdp_module *child)
{
    if (!m || !child) {
        fsdp__fail_null("fsdp_module_add", m ? "the child" : "the module");
        fsdp_module_free(child);
        return NULL;
    }
    if (child == root_of(m)) { /* which stays: m is a part of it */
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "fsdp_module_add: the child is %s; a module cannot hold itself",
                   child == m ? "the module" : "above the module");
        return NULL;
    }
    struct fsdp__module *in = m->in;
    fsdp_status s = FSDP_OK;
    if (bad_name(m, name) || late(m, name, child) != FSDP_OK)
        s = fsdp_error();
    else if (child->in->parent)
        s = fsdp__fail(FSDP_INVALID_ARGUMENT, "\"%s\" is already a child of a %s", name,
                       child->in->parent->type);
    else if (taken(in, name))
        s = fsdp__fail(FSDP_INVALID_ARGUMENT, "%s has a \"%s\" already", m->type, name);
    if (s == FSDP_OK)
        s = FSDP__GROW(in->children, in->cap_children, in->n_children + 1, "a module's children");
    if (s == FSDP_OK && !(child->in->name = fsdp__strdup(name))) s = fsdp_error();
    if (s != FSDP_OK) {
        if (!child->in->parent) fsdp_module_free(child);
        return NULL;
    }
    child->in->parent = m;
    forget_names(m);
    in->children[in->n_children++] = child;
    return child;
}

int fsdp_module_child_count(const fsdp_module *m)
{
    return m ? (int)m->in->n_children : 0;
}

fsdp_module *fsdp_module_child(const fsdp_module *m, int i)
{
    return m && i >= 0 && i < m->in->n_children ? m->in->children[i] : NULL;
}

const char *fsdp_module_name(const fsdp_module *m)
{
    return m && m->in->name ? m->in->name : "";
}

fsdp_module *fsdp_module_find(fsdp_module *m, const char *name)
{
    const char *at = name;
    if (m && !name) {
        fsdp__fail_null("fsdp_module_find", "the name");
        return NULL;
    }
    while (m && *at) {
        size_t n = strcspn(at, ".");
        fsdp_module *next = NULL;
        for (int64_t i = 0; i < m->in->n_children && !next; i++) {
            const char *child = m->in->children[i]->in->name;
            if (strlen(child) == n && !memcmp(child, at, n)) next = m->in->children[i];
        }
        if (!next) {
            fsdp__fail(FSDP_NOT_FOUND, "no module \"%s\": %s has no child \"%.*s\"", name, m->type,
                       (int)n, at);
            return NULL;
        }
        m = next;
        at += n + (at[n] == '.');
    }
    return m;
}

bool fsdp__module_has_forward(const fsdp_module *m)
{
    return m->forward || m->forward1 || m->forward2;
}

void fsdp__module_path(const fsdp_module *m, fsdp__str *out)
{
    if (!m->in->parent) return;
    fsdp__module_path(m->in->parent, out);
    if (out->len) fsdp__str_add(out, ".");
    fsdp__str_add(out, m->in->name);
}

void fsdp_module_train(fsdp_module *m, int on)
{
    if (!m) return;
    m->in->training = on != 0;
    for (int64_t i = 0; i < m->in->n_children; i++)
        fsdp_module_train(m->in->children[i], on);
}

int fsdp_module_training(const fsdp_module *m)
{
    return m && m->in->training;
}

/* ---- parameters and buffers by name ------------------------------------------- */

fsdp_param *fsdp_module_add_param(fsdp_module *m, const char *name, fsdp_param *p)
{
    if (!m || !p) {
        fsdp__fail_null("fsdp_module_add_param", m ? "the parameter" : "the module");
        fsdp_param_release(p);
        return NULL;
    }
    struct fsdp__module *in = m->in;
    char *copy = NULL;
    bool ok = !bad_name(m, name) && late_param(m, name, p) == FSDP_OK &&
              FSDP__GROW(in->params, in->cap_params, in->n_params + 1, "parameters") == FSDP_OK;
    if (ok && taken(in, name)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "%s has a \"%s\" already", m->type, name);
        ok = false;
    }
    if (!ok || !(copy = fsdp__strdup(name))) {
        fsdp_param_release(p);
        return NULL;
    }
    in->params[in->n_params].name = copy;
    in->params[in->n_params++].param = p;
    forget_names(m);
    return p;
}

fsdp_param *fsdp_module_param(const fsdp_module *m, const char *name)
{
    for (int64_t i = 0; m && i < m->in->n_params; i++)
        if (!strcmp(m->in->params[i].name, name)) return m->in->params[i].param;
    return NULL;
}

fsdp_status fsdp_module_add_buffer(fsdp_module *m, const char *name, fsdp_tensor *t)
{
    if (!m || !t) return fsdp__fail_null("fsdp_module_add_buffer", "module or tensor");
    struct fsdp__module *in = m->in;
    if (bad_name(m, name)) return fsdp_error();
    if (taken(in, name))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s has a \"%s\" already", m->type, name);
    FSDP_TRY(FSDP__GROW(in->buffers, in->cap_buffers, in->n_buffers + 1, "buffers"));
    char *copy = fsdp__strdup(name);
    if (!copy) return fsdp_error();
    in->buffers[in->n_buffers++] =
        (struct fsdp__buffer_entry){.name = copy, .t = fsdp_retain(t), .version = t->st->version};
    return FSDP_OK;
}

fsdp_tensor *fsdp_module_buffer(const fsdp_module *m, const char *name)
{
    for (int64_t i = 0; m && i < m->in->n_buffers; i++)
        if (!strcmp(m->in->buffers[i].name, name)) return m->in->buffers[i].t;
    return NULL;
}

fsdp_status fsdp_module_set_buffer_rule(fsdp_module *m, const char *name, fsdp_buffer_rule rule)
{
    if (!m) return fsdp__fail_null("fsdp_module_set_buffer_rule", "the module");
    if (rule < FSDP_BUFFER_EQUAL || rule > FSDP_BUFFER_LOCAL)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "buffer rule %d; expected one of fsdp_buffer_rule",
                          (int)rule);
    bool any = !name;
    for (int64_t i = 0; i < m->in->n_buffers; i++)
        if (!name || !strcmp(m->in->buffers[i].name, name)) {
            m->in->buffers[i].rule = rule;
            any = true;
        }
    if (!any) return fsdp__fail(FSDP_NOT_FOUND, "%s has no buffer \"%s\"", m->type, name);
    for (int64_t i = 0; i < m->in->n_children && !name; i++)
        FSDP_TRY(fsdp_module_set_buffer_rule(m->in->children[i], NULL, rule));
    return FSDP_OK;
}

static fsdp_status set_param(fsdp_module *m, const char *name, fsdp_param *p)
{
    fsdp_param *old = fsdp_module_param(m, name);
    if (!old) return fsdp__fail(FSDP_NOT_FOUND, "%s has no parameter \"%s\"", m->type, name);
    if (p->ndim != old->ndim || memcmp(p->size, old->size, sizeof *p->size * (size_t)p->ndim)) {
        fsdp__str a = {0}, b = {0};
        fsdp__shape_text(p->ndim, p->size, &a);
        fsdp__shape_text(old->ndim, old->size, &b);
        fsdp__fail(FSDP_INVALID_SHAPE, "%s.%s is %s; its replacement is %s", m->type, name,
                   fsdp__str_get(&b), fsdp__str_get(&a));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    if (p->shard)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "the replacement of %s.%s is sharded already",
                          m->type, name);
    if (old->optimizers > 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s.%s: an optimizer holds it; replace it before the optimizer is made",
                          m->type, name);
    FSDP_TRY(fsdp__module_name_params(m));
    if (old->shard) FSDP_TRY(old->shard_ops->replace(old->shard, p));
    if (!old->shard) {
        p->t->st->owner = old->t->st->owner;
        old->t->st->owner = NULL;
        fsdp_tensor *t = old->t; /* p takes it along */
        fsdp_dtype d = old->dtype;
        old->t = p->t;
        old->dtype = p->dtype;
        p->t = t;
        p->dtype = d;
    }
    old->init = p->init;
    return fsdp_param_requires_grad_(old, p->requires_grad);
}

fsdp_status fsdp_module_set_param(fsdp_module *m, const char *name, fsdp_param *p)
{
    fsdp_status s = fsdp_error();
    if (!m || !name || !p)
        s = fsdp__fail_null("fsdp_module_set_param", "module, name or parameter");
    if (s == FSDP_OK && p != fsdp_module_param(m, name)) s = set_param(m, name, p);
    fsdp_param_release(p);
    return s;
}

/* ---- methods ---------------------------------------------------------------------- */

fsdp__method_entry *fsdp__module_method(const fsdp_module *m, const char *name)
{
    for (int64_t i = 0; i < m->in->n_methods; i++)
        if (!strcmp(m->in->methods[i].name, name)) return &m->in->methods[i];
    return NULL;
}

fsdp_status fsdp_module_add_method(fsdp_module *m, const char *name, fsdp_method fn)
{
    if (!m || !name || !fn)
        return fsdp__fail_null("fsdp_module_add_method", "module, name or function");
    struct fsdp__module *in = m->in;
    fsdp__method_entry *e = fsdp__module_method(m, name);
    if (e) {
        e->fn = fn;
        return FSDP_OK;
    }
    FSDP_TRY(FSDP__GROW(in->methods, in->cap_methods, in->n_methods + 1, "methods"));
    char *copy = fsdp__strdup(name);
    if (!copy) return fsdp_error();
    in->methods[in->n_methods++] = (fsdp__method_entry){.name = copy, .fn = fn};
    return FSDP_OK;
}

/* ---- walking ---------------------------------------------------------------------- */

/* Each parameter keeps where it stood in the last list, right or not for this one: looking there
 * keeps a walk linear, and sharding block by block walks once a block. */
static bool listed(const fsdp_param_list *l, const fsdp_param *p)
{
    return p->listed_at < l->count && l->items[p->listed_at].param == p;
}

static fsdp_status walk(fsdp_module *m, fsdp__str *prefix, fsdp_param_list *l, int64_t *cap)
{
    size_t base = prefix->len;
    for (int64_t i = 0; i < m->in->n_params; i++) {
        fsdp_param *p = m->in->params[i].param;
        if (listed(l, p)) continue;
        FSDP_TRY(FSDP__GROW(l->items, *cap, l->count + 1, "a list of parameters"));
        fsdp__str name = {0};
        fsdp__str_add(&name, fsdp__str_get(prefix));
        fsdp__str_add(&name, m->in->params[i].name);
        char *text = fsdp__str_take(&name);
        if (!text) return fsdp_error();
        p->listed_at = l->count;
        l->items[l->count++] = (fsdp_named_param){text, p, m};
    }
    for (int64_t i = 0; i < m->in->n_children; i++) {
        fsdp__str_addf(prefix, "%s.", m->in->children[i]->in->name);
        FSDP_TRY(walk(m->in->children[i], prefix, l, cap));
        prefix->len = base;
        if (prefix->p) prefix->p[base] = '\0';
    }
    return FSDP_OK;
}

fsdp_status fsdp_module_params(fsdp_module *m, fsdp_param_list *out)
{
    if (!out) return fsdp__fail_null("fsdp_module_params", "the place for the list");
    *out = (fsdp_param_list){0};
    if (!m) return fsdp__fail_null("fsdp_module_params", "the module");
    fsdp__str prefix = {0};
    int64_t cap = 0;
    fsdp_status s = walk(m, &prefix, out, &cap);
    fsdp__str_free(&prefix);
    if (s != FSDP_OK) fsdp_param_list_free(out);
    return s;
}

void fsdp_param_list_free(fsdp_param_list *l)
{
    if (!l) return;
    for (int64_t i = 0; i < l->count; i++)
        free(l->items[i].name);
    free(l->items);
    *l = (fsdp_param_list){0};
}

fsdp_status fsdp__module_name_params(fsdp_module *m)
{
    fsdp_param_list l;
    m = root_of(m);
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++) {
        fsdp_param *p = l.items[i].param;
        if (p->name && !strcmp(p->name, l.items[i].name)) continue;
        char *name = fsdp__strdup(l.items[i].name);
        if (!name || FSDP__GROW(p->old_names, p->cap_old, p->n_old + 1, "parameters") != FSDP_OK) {
            free(name);
            s = fsdp_error();
            break;
        }
        if (p->t->st->owner == p->name) p->t->st->owner = name;
        if (p->name) p->old_names[p->n_old++] = p->name;
        p->name = name;
    }
    fsdp_param_list_free(&l);
    m->in->named = s == FSDP_OK;
    return s;
}

fsdp_status fsdp__module_name_new(fsdp_module *m)
{
    const fsdp_module *root = root_of(m);
    return root && root->in->named ? FSDP_OK : fsdp__module_name_params(m);
}

int64_t fsdp_module_numel(fsdp_module *m)
{
    fsdp_param_list l;
    int64_t n = 0;
    if (!m || fsdp_module_params(m, &l) != FSDP_OK) return 0;
    for (int64_t i = 0; i < l.count; i++)
        n += fsdp__numel_of(l.items[i].param->ndim, l.items[i].param->size);
    fsdp_param_list_free(&l);
    return n;
}
