/*
 * match.c - which layers a name, a list of names or a pattern means. The rules are peft's
 * (tuners/tuners_utils.py, check_target_module_exists): a text must match the whole dotted name, a
 * word of a list is the name or its end behind a dot.
 */
#include <regex.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "lora/lora.h"

bool fsdp__lora_word_fits(const char *word, const char *name)
{
    size_t n = strlen(name), w = strlen(word);
    if (w == 0 || w > n || strcmp(name + n - w, word) != 0) return false;
    return w == n || name[n - w - 1] == '.';
}

/* ---- patterns ---------------------------------------------------------------------- */

/* Python's \d and (?: in the words of POSIX, and ends at both sides; other forms of Python's that
 * POSIX does not have are refused, since they would mean something else here. */
static fsdp_status translate(const char *pattern, fsdp__str *out)
{
    fsdp__str_add(out, "^(");
    for (const char *p = pattern; *p; p++) {
        bool lazy = strchr("*+?}", *p) && (p[1] == '?' || p[1] == '+');
        if ((p[0] == '(' && p[1] == '?' && p[2] != ':') || lazy)
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "lora: the pattern '%s' has '%.2s' at %d, which is not done here; "
                              "expected an extended regular expression",
                              pattern, p, (int)(p - pattern) + 1);
        if (p[0] == '(' && p[1] == '?') {
            fsdp__str_add(out, "(");
            p += 2;
        } else if (p[0] == '\\' && p[1] == 'd') {
            fsdp__str_add(out, "[0-9]");
            p++;
        } else if (p[0] == '\\' && p[1]) {
            fsdp__str_add_n(out, p, 2);
            p++;
        } else {
            fsdp__str_add_n(out, p, 1);
        }
    }
    fsdp__str_add(out, ")$");
    return out->failed ? fsdp__fail_memory("a pattern", out->len) : FSDP_OK;
}

static fsdp_status compile(const char *pattern, regex_t *out)
{
    fsdp__str text = {0};
    char why[160];
    fsdp_status s = translate(pattern, &text);
    int code = s == FSDP_OK ? regcomp(out, fsdp__str_get(&text), REG_EXTENDED | REG_NOSUB) : 0;
    fsdp__str_free(&text);
    if (code == 0) return s;
    regerror(code, out, why, sizeof why);
    return fsdp__fail(FSDP_INVALID_ARGUMENT, "lora: the pattern '%s': %s", pattern, why);
}

/* ---- the tree --------------------------------------------------------------------------- */

typedef struct finder {
    const fsdp_lora_options *o;
    regex_t pattern;
    int64_t *hits; /* (n_target_modules) */
    fsdp__lora_targets *out;
    fsdp__str linears; /* ends of names of linear layers, for messages */
} finder;

static bool wanted(finder *f, const char *name, bool linear)
{
    const fsdp_lora_options *o = f->o;
    bool any = false;
    if (o->target_pattern) return regexec(&f->pattern, name, 0, NULL, 0) == 0;
    if (o->n_target_modules == 0) return linear;
    for (int i = 0; i < o->n_target_modules; i++) {
        if (!fsdp__lora_word_fits(o->target_modules[i], name)) continue;
        f->hits[i]++;
        any = true;
    }
    return any;
}

/* Notes the last part of a linear layer's name, once. */
static void note_linear(finder *f, const char *last)
{
    size_t n = strlen(last);
    for (const char *p = fsdp__str_get(&f->linears); (p = strstr(p, last)); p += n)
        if (p[n] == ',' || !p[n]) return;
    fsdp__str_addf(&f->linears, "%s%s", f->linears.len ? ", " : "", last);
}

static void note_linears(finder *f, const fsdp_module *m)
{
    fsdp__linear_info info;
    if (fsdp__linear_info_of(m, &info)) note_linear(f, fsdp_module_name(m));
    for (int64_t i = 0; i < m->in->n_children; i++)
        note_linears(f, m->in->children[i]);
}

static fsdp_status visit(finder *f, fsdp_module *m, fsdp__str *name)
{
    fsdp__linear_info info;
    bool linear = fsdp__linear_info_of(m, &info);
    const char *text = fsdp__str_get(name);
    if (*text && wanted(f, text, linear)) {
        if (!linear)
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "lora: the names mean %s too, a %s; expected linear layers: %s. An "
                              "output head is computed with its loss and takes no adapter",
                              text, m->type, fsdp__str_get(&f->linears));
        FSDP_TRY(FSDP__GROW(f->out->items, f->out->cap, f->out->count + 1, "layers to adapt"));
        f->out->items[f->out->count++] = m;
    }
    size_t base = name->len;
    for (int64_t i = 0; i < m->in->n_children; i++) {
        fsdp__str_addf(name, "%s%s", base ? "." : "", m->in->children[i]->in->name);
        FSDP_TRY(visit(f, m->in->children[i], name));
        name->len = base;
        if (name->p) name->p[base] = '\0';
    }
    return name->failed ? fsdp__fail_memory("names of layers", base) : FSDP_OK;
}

/* Each word must mean something. */
static fsdp_status check_hits(const finder *f)
{
    const fsdp_lora_options *o = f->o;
    for (int i = 0; i < o->n_target_modules; i++)
        if (f->hits[i] == 0)
            return fsdp__fail(FSDP_NOT_FOUND,
                              "lora: target_modules: no module is named '%s'; linear layers here: "
                              "%s",
                              o->target_modules[i], fsdp__str_get(&f->linears));
    if (f->out->count) return FSDP_OK;
    return fsdp__fail(FSDP_NOT_FOUND, "lora: %s%s%s fits no module; linear layers here: %s",
                      o->target_pattern ? "the pattern '" : "all-linear",
                      o->target_pattern ? o->target_pattern : "", o->target_pattern ? "'" : "",
                      f->linears.len ? fsdp__str_get(&f->linears) : "none");
}

fsdp_status fsdp__lora_find(fsdp_module *m, const fsdp_lora_options *o, fsdp__lora_targets *out)
{
    finder f = {.o = o, .out = out};
    fsdp__str name = {0};
    fsdp_status s = FSDP_OK;
    *out = (fsdp__lora_targets){0};
    if (o->target_pattern) FSDP_TRY(compile(o->target_pattern, &f.pattern));
    f.hits = fsdp__calloc((size_t)o->n_target_modules, sizeof *f.hits, "layers to adapt");
    if (!f.hits) FSDP_GO(fsdp_error());
    note_linears(&f, m);
    FSDP_GO(visit(&f, m, &name));
    s = check_hits(&f);
done:
    if (o->target_pattern) regfree(&f.pattern);
    fsdp__str_free(&name);
    fsdp__str_free(&f.linears);
    free(f.hits);
    if (s != FSDP_OK) {
        free(out->items);
        *out = (fsdp__lora_targets){0};
    }
    return s;
}

static int64_t count_hits(const fsdp_module *m, const fsdp_lora_options *o, fsdp__str *name)
{
    int64_t n = 0;
    size_t base = name->len;
    for (int i = 0; i < o->n_target_modules && n == 0; i++)
        n = fsdp__lora_word_fits(o->target_modules[i], fsdp__str_get(name));
    for (int64_t i = 0; i < m->in->n_children; i++) {
        fsdp__str_addf(name, "%s%s", base ? "." : "", m->in->children[i]->in->name);
        n += count_hits(m->in->children[i], o, name);
        name->len = base;
        if (name->p) name->p[base] = '\0';
    }
    return n;
}

int64_t fsdp__lora_hits(fsdp_module *m, const fsdp_lora_options *o)
{
    fsdp__str name = {0};
    int64_t n = count_hits(m, o, &name);
    fsdp__str_free(&name);
    return n;
}
