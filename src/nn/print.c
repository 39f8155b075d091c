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

static void print(const fsdp_module *m, int depth, fsdp__str *out)
{
    char text[128] = "";
    if (m->describe) m->describe(m, text, sizeof text);
    const char *name = fsdp_module_name(m);
    fsdp__str_addf(out, "%*s%s%s%s(%s)\n", 2 * depth, "", name, *name ? ": " : "", m->type, text);
    for (int64_t i = 0; i < m->in->n_params; i++)
        print_param(m->in->params[i].name, m->in->params[i].param, depth + 1, out);
    for (int64_t i = 0; i < m->in->n_buffers; i++) {
        fsdp__str_addf(out, "%*s%s: buffer ", 2 * depth + 2, "", m->in->buffers[i].name);
        fsdp__describe(m->in->buffers[i].t, out);
        fsdp__str_add(out, "\n");
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        print(m->in->children[i], depth + 1, out);
}

char *fsdp_module_print(fsdp_module *m)
{
    if (!m) return NULL;
    fsdp__str s = {0};
    print(m, 0, &s);
    return fsdp__str_take(&s);
}
