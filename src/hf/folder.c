/*
 * folder.c - weights of a folder into the parameters of a model.
 *
 * Names first: every parameter finds its weight and every weight its parameter, or the load ends
 * with three lists and has changed nothing. Then a rank reads, parameter by parameter, the runs of
 * bytes that are its rows: with a cut along dim d the whole is (outer, dim, inner) and a run is
 * rows * inner elements of one outer index. A weight of another dtype passes through a buffer of
 * BUFFER bytes, so the peak is the shards and that buffer.
 */
#include "hf/folder.h"

#include <stdlib.h>
#include <string.h>

#include "base/convert.h"
#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"
#include "hf/folder_internal.h"
#include "hf/weights.h"
#include "lora/lora.h"

enum { BUFFER = FSDP__HF_BUFFER, SHOWN = 8 };

/* ---- names of a model ---------------------------------------------------------------- */

static fsdp_status walk(fsdp_module *m, fsdp__str *prefix, fsdp__hf_names *l)
{
    size_t base = prefix->len;
    for (int64_t i = 0; i < m->in->n_params; i++) {
        FSDP_TRY(FSDP__GROW(l->items, l->cap, l->count + 1, "names of parameters"));
        fsdp__str s = {0};
        fsdp__str_add(&s, fsdp__str_get(prefix));
        fsdp__str_add(&s, m->in->params[i].name);
        char *name = fsdp__str_take(&s);
        if (!name) return fsdp_error();
        fsdp__hf_name *n = &l->items[l->count++];
        *n = (fsdp__hf_name){.name = name, .param = m->in->params[i].param, .first = -1};
        for (int64_t k = 0; k < l->count - 1 && n->first < 0; k++)
            if (l->items[k].param == n->param) n->first = k;
    }
    for (int64_t i = 0; i < m->in->n_children; i++) {
        if (fsdp__lora_is_adapter(m->in->children[i])) continue; /* not of the model's files */
        fsdp__str_addf(prefix, "%s.", m->in->children[i]->in->name);
        FSDP_TRY(walk(m->in->children[i], prefix, l));
        prefix->len = base;
        if (prefix->p) prefix->p[base] = '\0';
    }
    return FSDP_OK;
}

fsdp_status fsdp__hf_names_of(fsdp_module *m, fsdp__hf_names *out)
{
    fsdp__str prefix = {0};
    *out = (fsdp__hf_names){0};
    fsdp_status s = walk(m, &prefix, out);
    fsdp__str_free(&prefix);
    if (s != FSDP_OK) fsdp__hf_names_free(out);
    return s;
}

void fsdp__hf_names_free(fsdp__hf_names *l)
{
    for (int64_t i = 0; i < l->count; i++)
        free(l->items[i].name);
    free(l->items);
    *l = (fsdp__hf_names){0};
}

/* ---- names of a file ------------------------------------------------------------------- */

/* Buffers that older files hold and that are computed here: rotary frequencies, GPT-2's masks. */
static bool is_computed(const char *name)
{
    return fsdp__ends_with(name, ".rotary_emb.inv_freq") || fsdp__ends_with(name, ".attn.bias") ||
           fsdp__ends_with(name, ".attn.masked_bias");
}

/* Files of a body alone ("h.0.ln_1.weight", as GPT-2 is published) have no "transformer.": what
 * their names lack, or "". */
static const char *lacking(const fsdp__hf_names *names, const fsdp__hf_weights *w)
{
    const char *dot = names->count ? strchr(names->items[0].name, '.') : NULL;
    if (!dot) return "";
    size_t n = (size_t)(dot - names->items[0].name) + 1;
    for (int64_t i = 0; i < fsdp__hf_weights_count(w); i++)
        if (!strncmp(fsdp__hf_weights_at(w, i, NULL)->name, names->items[0].name, n)) return "";
    return names->items[0].name; /* as far as its first dot */
}

static const fsdp__st_tensor *find(const fsdp__hf_weights *w, const char *name, const char *prefix,
                                   fsdp__st **st)
{
    const char *dot = strchr(prefix, '.');
    size_t n = dot ? (size_t)(dot - prefix) + 1 : 0;
    return fsdp__hf_weights_find(w, n && !strncmp(name, prefix, n) ? name + n : name, st);
}

/* ---- three lists ------------------------------------------------------------------------ */

typedef struct list {
    int64_t count;
    fsdp__str text;
} list;

static void note(list *l, const char *text)
{
    if (l->count < SHOWN)
        fsdp__str_addf(&l->text, "%s%s", l->count ? ", " : "", text);
    else if (l->count == SHOWN)
        fsdp__str_add(&l->text, ", ...");
    l->count++;
}

typedef struct matching {
    fsdp__hf_names names;
    fsdp__hf_weights *weights;
    const fsdp__st_tensor **t; /* (names.count) NULL: a tied name */
    fsdp__st **st;             /* (names.count) */
    list missing, extra, misshaped;
} matching;

static bool same_shape(const fsdp__st_tensor *t, const fsdp_param *p)
{
    return t->ndim == p->ndim && fsdp_dtype_is_floating(t->dtype) &&
           !memcmp(t->shape, p->size, sizeof *t->shape * (size_t)t->ndim);
}

static void note_misshaped(matching *m, const fsdp__st_tensor *t, const fsdp_param *p)
{
    fsdp__str s = {0};
    fsdp__str_addf(&s, "'%s' is %s ", t->name, t->dtype_name);
    fsdp__shape_text(t->ndim, t->shape, &s);
    fsdp__str_add(&s, " and the model wants ");
    fsdp__shape_text(p->ndim, p->size, &s);
    if (!fsdp_dtype_is_floating(t->dtype)) fsdp__str_add(&s, " in a floating dtype");
    note(&m->misshaped, fsdp__str_get(&s));
    fsdp__str_free(&s);
}

/* A weight under a second name of a tied parameter is taken if it stands under that name alone. */
static void match_params(matching *m, const char *prefix)
{
    for (int64_t i = 0; i < m->names.count; i++) {
        fsdp__hf_name *n = &m->names.items[i];
        int64_t at = n->first < 0 ? i : n->first;
        fsdp__st *st = NULL;
        const fsdp__st_tensor *t = find(m->weights, n->name, prefix, &st);
        if (!t) continue;
        if (!same_shape(t, n->param)) note_misshaped(m, t, n->param);
        if (!m->t[at]) {
            m->t[at] = t;
            m->st[at] = st;
        }
    }
    for (int64_t i = 0; i < m->names.count; i++)
        if (m->names.items[i].first < 0 && !m->t[i]) note(&m->missing, m->names.items[i].name);
}

/* Weights for which there is no name in the model. */
static fsdp_status match_weights(matching *m, const char *prefix)
{
    fsdp__map *known = fsdp__map_create();
    const char *dot = strchr(prefix, '.');
    size_t n = dot ? (size_t)(dot - prefix) + 1 : 0;
    fsdp_status s = known ? FSDP_OK : fsdp_error();
    for (int64_t i = 0; i < m->names.count && s == FSDP_OK; i++) {
        const char *name = m->names.items[i].name;
        if (n && !strncmp(name, prefix, n)) name += n;
        s = fsdp__map_sets(known, name, (fsdp__value){.i = i});
    }
    for (int64_t i = 0; i < fsdp__hf_weights_count(m->weights) && s == FSDP_OK; i++) {
        const char *name = fsdp__hf_weights_at(m->weights, i, NULL)->name;
        if (!fsdp__map_gets(known, name) && !is_computed(name)) note(&m->extra, name);
    }
    fsdp__map_free(known);
    return s;
}

static void add_list(fsdp__str *out, const char *what, const list *l)
{
    if (l->count)
        fsdp__str_addf(out, "; %lld %s: %s", (long long)l->count, what, fsdp__str_get(&l->text));
}

static fsdp_status match(matching *m, const char *folder)
{
    size_t n = (size_t)m->names.count + 1;
    m->t = fsdp__calloc(n, sizeof(*m->t), "weights of a model");
    m->st = fsdp__calloc(n, sizeof(*m->st), "weights of a model");
    if (!m->t || !m->st) return fsdp_error();
    const char *prefix = lacking(&m->names, m->weights);
    match_params(m, prefix);
    FSDP_TRY(match_weights(m, prefix));
    if (!m->missing.count && !m->extra.count && !m->misshaped.count) return FSDP_OK;
    fsdp__str s = {0};
    add_list(&s, "missing", &m->missing);
    add_list(&s, "extra", &m->extra);
    add_list(&s, "misshaped", &m->misshaped);
    fsdp__fail(FSDP_INVALID_DATA,
               "%s: the weights are not those of the model that config.json describes%s; take "
               "config.json and weights from one place",
               folder, fsdp__str_get(&s));
    fsdp__str_free(&s);
    return fsdp_error();
}

/* ---- reading ------------------------------------------------------------------------------ */

/* n elements of t from element `first` into dst of dtype dt. */
static fsdp_status read_run(fsdp__st *st, const fsdp__st_tensor *t, int64_t first, int64_t n,
                            char *dst, fsdp_dtype dt, char *buffer)
{
    int64_t width = (int64_t)fsdp_dtype_size(t->dtype);
    if (t->dtype == dt) return fsdp__st_read(st, t, first * width, n * width, dst);
    int64_t most = BUFFER / width;
    for (int64_t i = 0; i < n; i += most) {
        int64_t m = n - i < most ? n - i : most;
        FSDP_TRY(fsdp__st_read(st, t, (first + i) * width, m * width, buffer));
        fsdp__convert(dst + (size_t)i * fsdp_dtype_size(dt), dt, buffer, t->dtype, (size_t)m);
    }
    return FSDP_OK;
}

fsdp_status fsdp__hf_read_param(fsdp__st *st, const fsdp__st_tensor *w, const char *name,
                                fsdp_param *p, char *buffer)
{
    fsdp_tensor *t = fsdp__param_kept(p);
    if (t->st->device == FSDP_META)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "loading %s: it is on the meta device; call fsdp_to_empty first", name);
    FSDP_TRY(fsdp__tensor_writable(t, "loading weights"));
    int64_t outer = 1, dim = fsdp_numel(t), inner = 1, row0 = 0, rows = dim;
    if (t->dist) t->dist->ops->block(t->dist, &outer, &dim, &inner, &row0, &rows);
    char *dst = fsdp_data(t);
    int64_t run = rows * inner;
    if (rows == dim) { /* all of it: one run */
        run *= outer;
        outer = 1;
    }
    for (int64_t o = 0; o < outer && run; o++)
        FSDP_TRY(read_run(st, w, (o * dim + row0) * inner, run,
                          dst + (size_t)(o * run) * fsdp_dtype_size(t->dtype), t->dtype, buffer));
    fsdp_touch(t); /* gathered copies are stale */
    t->st->shard_version++;
    return FSDP_OK;
}

static void matching_free(matching *m)
{
    fsdp__str_free(&m->missing.text);
    fsdp__str_free(&m->extra.text);
    fsdp__str_free(&m->misshaped.text);
    free(m->t);
    free(m->st);
    fsdp__hf_names_free(&m->names);
    fsdp__hf_weights_close(m->weights);
}

fsdp_status fsdp__hf_load_weights(fsdp_module *model, const char *folder)
{
    int64_t bytes;
    return fsdp__hf_load_weights_counted(model, folder, &bytes);
}

fsdp_status fsdp__hf_load_weights_counted(fsdp_module *model, const char *folder, int64_t *bytes)
{
    *bytes = 0;
    if (fsdp_error()) return fsdp_error();
    if (!model) return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: no model to load into", folder);
    matching m = {0};
    char *buffer = NULL;
    fsdp_status s = FSDP_OK;
    if (!(m.weights = fsdp__hf_weights_open(folder))) FSDP_GO(fsdp_error());
    FSDP_GO(fsdp__hf_names_of(model, &m.names));
    FSDP_GO(match(&m, folder));
    if (!(buffer = fsdp__calloc(1, BUFFER, "a buffer of weights"))) FSDP_GO(fsdp_error());
    for (int64_t i = 0; i < m.names.count; i++)
        if (m.names.items[i].first < 0)
            FSDP_GO(fsdp__hf_read_param(m.st[i], m.t[i], m.names.items[i].name,
                                        m.names.items[i].param, buffer));
    *bytes = fsdp__hf_weights_bytes_read(m.weights);
done:
    free(buffer);
    matching_free(&m);
    return s;
}
