/*
 * print.c - a module as text.
 */
#include <string.h>

#include "base/error.h"
#include "nn/module.h"

static void print_param(const char *name, const fsdp_param *p, int depth, fsdp__str *out)
{
    fsdp__str_addf(out, "%*s%s: ", 2 * depth, "", name);
    fsdp__shape_text(p->ndim, p->size, out);
    fsdp__str_addf(out, " %s", fsdp_dtype_name(p->t->dtype));
    if (p->t->dist) {
        fsdp__str_add(out, ", local ");
        fsdp__shape_text(p->t->ndim, p->t->size, out);
        fsdp__str_add(out, ", ");
        p->t->dist->ops->describe(p->t->dist, out);
    }
    if (p->unit) fsdp__str_addf(out, ", unit \"%s\"", p->unit);
    if (p->t->st->device == FSDP_META) fsdp__str_add(out, ", on meta");
    if (!p->requires_grad) fsdp__str_add(out, ", frozen");
    fsdp__str_add(out, "\n");
}

/* A parameter that stands in several modules is told whole where it stands first. */
static void print_params(const fsdp_module *m, int depth, const fsdp_param_list *all,
                         fsdp__str *out)
{
    for (int64_t i = 0; i < m->in->n_params; i++) {
        const fsdp_param *p = m->in->params[i].param;
        const char *name = m->in->params[i].name;
        const fsdp_named_param *first = &all->items[p->listed_at];
        const char *dot = strrchr(first->name, '.');
        if (first->owner == m && !strcmp(dot ? dot + 1 : first->name, name))
            print_param(name, p, depth, out);
        else
            fsdp__str_addf(out, "%*s%s: %s\n", 2 * depth, "", name, first->name);
    }
}

static void print(const fsdp_module *m, int depth, const fsdp_param_list *all, fsdp__str *out)
{
    char text[128] = "";
    if (m->describe) m->describe(m, text, sizeof text);
    const char *name = fsdp_module_name(m);
    fsdp__str_addf(out, "%*s%s%s%s(%s)\n", 2 * depth, "", name, *name ? ": " : "", m->type, text);
    print_params(m, depth + 1, all, out);
    for (int64_t i = 0; i < m->in->n_buffers; i++) {
        fsdp__str_addf(out, "%*s%s: buffer ", 2 * depth + 2, "", m->in->buffers[i].name);
        fsdp__describe(m->in->buffers[i].t, out);
        fsdp__str_add(out, "\n");
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        print(m->in->children[i], depth + 1, all, out);
}

char *fsdp_module_print(fsdp_module *m)
{
    fsdp_param_list all;
    if (!m || fsdp_module_params(m, &all) != FSDP_OK) return NULL;
    fsdp__str s = {0};
    print(m, 0, &all, &s);
    fsdp_param_list_free(&all);
    return fsdp__str_take(&s);
}
