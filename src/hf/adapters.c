/*
 * adapters.c - adapters from and to folders of peft: adapter_config.json and
 * adapter_model.safetensors.
 *
 * A tensor is called "base_model.model." + the parameter's name; peft leaves its own name of an
 * adapter ("default") out of files. A config that asks for more than plain LoRA is refused: the
 * same tensors would mean something else.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "fsdp/comm.h"
#include "fsdp/dtensor.h"
#include "fsdp/hf.h"
#include "format/file.h"
#include "format/json.h"
#include "hf/folder.h"
#include "hf/folder_internal.h"
#include "lora/lora.h"

static const char config_name[] = "adapter_config.json";
static const char weights_name[] = "adapter_model.safetensors";
static const char prefix[] = "base_model.model.";
static const char base_key[] = "fsdp.base"; /* in __metadata__: the fingerprint of the base */

/* ---- reading the config ---------------------------------------------------------------- */

/* Keys that say nothing about what the tensors mean. */
static const char *const told_only[] = {"auto_mapping",
                                        "base_model_name_or_path",
                                        "ensure_weight_tying",
                                        "fan_in_fan_out",
                                        "inference_mode",
                                        "layers_pattern",
                                        "megatron_core",
                                        "peft_version",
                                        "qalora_group_size",
                                        "revision",
                                        "task_type"};
/* Keys that are read below. */
static const char *const read_keys[] = {
    "peft_type",  "r",    "lora_alpha",     "lora_dropout",
    "use_rslora", "bias", "target_modules", "init_lora_weights"};

static bool among(const char *key, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(key, list[i])) return true;
    return false;
}

static bool is_empty(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) || (json_is_object(v) && !json_object_size(v)) ||
           (json_is_array(v) && !json_array_size(v));
}

/* All other keys must be off. */
static fsdp_status check_keys(const fsdp__json_at *at)
{
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)at->json, key, v)
    {
        if (among(key, told_only, sizeof told_only / sizeof *told_only) ||
            among(key, read_keys, sizeof read_keys / sizeof *read_keys) || is_empty(v))
            continue;
        return fsdp__json_fail(FSDP_UNSUPPORTED, at, key,
                               "null, false or empty: of peft's adapters plain LoRA is done here");
    }
    return FSDP_OK;
}

/* Initialisations that change the base are undone by peft with the base at hand. */
static fsdp_status check_init(const fsdp__json_at *at)
{
    static const char *const fine[] = {"gaussian", "orthogonal", "eva"};
    const json_t *v = json_object_get(at->json, "init_lora_weights");
    if (!v || json_is_null(v) || json_is_boolean(v)) return FSDP_OK;
    if (json_is_string(v) && among(json_string_value(v), fine, sizeof fine / sizeof *fine))
        return FSDP_OK;
    return fsdp__json_fail(FSDP_UNSUPPORTED, at, "init_lora_weights",
                           "true, false, gaussian, orthogonal or eva: others change the base");
}

/* What a config says; texts belong to the document, the list of words is the caller's. */
typedef struct settings {
    json_t *json;
    const char **words;
    fsdp_lora_options o;
} settings;

static fsdp_status read_targets(const fsdp__json_at *at, settings *s)
{
    const json_t *v = json_object_get(at->json, "target_modules");
    if (json_is_string(v)) {
        if (strcasecmp(json_string_value(v), "all-linear"))
            s->o.target_pattern = json_string_value(v);
        return FSDP_OK;
    }
    size_t n = json_array_size(v); /* 0 if it is no list */
    bool good = n > 0;
    s->words = fsdp__calloc(n, sizeof *s->words, "names of layers");
    if (!s->words) return fsdp_error();
    for (size_t i = 0; i < n && good; i++)
        good = (s->words[i] = json_string_value(json_array_get(v, i))) != NULL;
    s->o.target_modules = s->words;
    s->o.n_target_modules = (int)n;
    return good ? FSDP_OK
                : fsdp__json_fail(FSDP_INVALID_DATA, at, "target_modules",
                                  "a list of names, or a text");
}

static fsdp_status read_values(const fsdp__json_at *at, settings *s)
{
    const char *type = "", *bias = "none";
    bool rslora = false;
    FSDP_TRY(fsdp__json_string(at, "peft_type", &type));
    if (strcasecmp(type, "lora"))
        return fsdp__json_fail(FSDP_UNSUPPORTED, at, "peft_type", "\"LORA\"");
    FSDP_TRY(fsdp__json_string(at, "bias", &bias));
    if (strcmp(bias, "none")) return fsdp__json_fail(FSDP_UNSUPPORTED, at, "bias", "\"none\"");
    FSDP_TRY(check_init(at));
    FSDP_TRY(check_keys(at));
    s->o.rank = 8; /* peft's defaults */
    s->o.alpha = 8.0;
    FSDP_TRY(fsdp__json_int(at, "r", &s->o.rank));
    FSDP_TRY(fsdp__json_number(at, "lora_alpha", &s->o.alpha));
    FSDP_TRY(fsdp__json_number(at, "lora_dropout", &s->o.dropout));
    FSDP_TRY(fsdp__json_bool(at, "use_rslora", &rslora));
    s->o.rslora = rslora;
    return read_targets(at, s);
}

static void settings_free(settings *s)
{
    free(s->words);
    json_decref(s->json);
}

static fsdp_status read_config(const char *folder, settings *out)
{
    fsdp__json_at at;
    *out = (settings){0};
    char *path = fsdp__path_join(folder, config_name);
    if (!path) return fsdp_error();
    fsdp_status s = FSDP_OK;
    if (!(out->json = fsdp__json_load(path))) s = fsdp_error();
    if (s == FSDP_OK) s = fsdp__json_root(out->json, path, &at);
    if (s == FSDP_OK) s = read_values(&at, out);
    if (s == FSDP_OK && (out->o.rank < 1 || out->o.rank > INT32_MAX))
        s = fsdp__json_fail(FSDP_INVALID_DATA, &at, "r", "1 or more");
    free(path);
    return s;
}

fsdp_status fsdp_lora_apply_folder(fsdp_module *model, const char *folder)
{
    if (fsdp_error()) return fsdp_error();
    if (!model || !folder)
        return fsdp__fail_null("fsdp_lora_apply_folder", model ? "the folder" : "the model");
    settings c;
    fsdp_status s = read_config(folder, &c);
    if (s == FSDP_OK) s = fsdp_lora_apply(model, &c.o);
    settings_free(&c);
    return s;
}

/* ---- reading the tensors -------------------------------------------------------------------- */

typedef struct loading {
    fsdp_param_list params;
    fsdp__st *st;
    const fsdp__st_tensor **t; /* (params.count) NULL: not an adapter's */
    char *buffer;              /* (FSDP__HF_BUFFER) */
    fsdp__str missing, misshaped, extra;
    int64_t n_missing, n_misshaped, n_extra;
} loading;

static void note(fsdp__str *list, int64_t *n, const char *name)
{
    enum { SHOWN = 8 };
    if (++*n <= SHOWN) fsdp__str_addf(list, "%s%s", *n > 1 ? ", " : "", name);
    if (*n == SHOWN + 1) fsdp__str_add(list, ", ...");
}

static void note_misshaped(loading *l, const fsdp__st_tensor *t, const fsdp_param *p)
{
    fsdp__str s = {0};
    fsdp__str_addf(&s, "'%s' is %s ", t->name, t->dtype_name);
    fsdp__shape_text(t->ndim, t->shape, &s);
    fsdp__str_add(&s, " and the model wants ");
    fsdp__shape_text(p->ndim, p->size, &s);
    note(&l->misshaped, &l->n_misshaped, fsdp__str_get(&s));
    fsdp__str_free(&s);
}

static bool fits(const fsdp__st_tensor *t, const fsdp_param *p)
{
    return t->ndim == p->ndim && fsdp_dtype_is_floating(t->dtype) &&
           !memcmp(t->shape, p->size, sizeof *t->shape * (size_t)t->ndim);
}

static fsdp_status match(loading *l, const char *folder)
{
    int64_t found = 0;
    for (int64_t i = 0; i < l->params.count; i++) {
        const fsdp_named_param *n = &l->params.items[i];
        if (!fsdp__lora_is_adapter(n->owner)) continue;
        fsdp__str name = {0};
        fsdp__str_addf(&name, "%s%s", prefix, n->name);
        l->t[i] = fsdp__st_find(l->st, fsdp__str_get(&name));
        if (!l->t[i])
            note(&l->missing, &l->n_missing, fsdp__str_get(&name));
        else if (!fits(l->t[i], n->param))
            note_misshaped(l, l->t[i], n->param);
        found += l->t[i] != NULL;
        fsdp__str_free(&name);
    }
    for (int64_t k = 0; k < fsdp__st_count(l->st) && found < fsdp__st_count(l->st); k++) {
        const fsdp__st_tensor *t = fsdp__st_at(l->st, k);
        bool known = false;
        for (int64_t i = 0; i < l->params.count && !known; i++)
            known = l->t[i] == t;
        if (!known) note(&l->extra, &l->n_extra, t->name);
    }
    if (l->n_missing + l->n_misshaped + l->n_extra == 0) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: the adapters are not those of the model: %lld missing (%s), %lld extra "
                      "(%s), %lld misshaped (%s); apply adapters by this folder's "
                      "adapter_config.json, to the model that they were trained on",
                      folder, (long long)l->n_missing, fsdp__str_get(&l->missing),
                      (long long)l->n_extra, fsdp__str_get(&l->extra), (long long)l->n_misshaped,
                      fsdp__str_get(&l->misshaped));
}

/* Same shapes with another scale would be another model. */
static fsdp_status check_scale(fsdp_module *model, const char *folder)
{
    settings c;
    fsdp__lora_list l = {0};
    fsdp_status s = read_config(folder, &c);
    if (s == FSDP_OK) s = fsdp__lora_list_of(model, &l);
    if (s == FSDP_OK && l.count == 0)
        s = fsdp__fail(FSDP_INVALID_STATE,
                       "fsdp_lora_load: the model has no adapters; call fsdp_lora_apply_folder "
                       "before fsdp_fully_shard");
    const fsdp__lora *first = l.count ? l.items[0] : NULL;
    if (s == FSDP_OK && first->merged)
        s = fsdp__fail(FSDP_INVALID_STATE, "fsdp_lora_load: the adapters are merged already");
    if (s == FSDP_OK && (c.o.rank != first->rank || c.o.alpha != first->alpha ||
                         (c.o.rslora != 0) != first->rslora))
        s = fsdp__fail(FSDP_INVALID_DATA,
                       "%s: rank %lld, alpha %g, rslora %s; the model's adapters have rank %lld, "
                       "alpha %g, rslora %s: apply them with the folder's",
                       folder, (long long)c.o.rank, c.o.alpha, c.o.rslora ? "true" : "false",
                       (long long)first->rank, first->alpha, first->rslora ? "true" : "false");
    free(l.items);
    settings_free(&c);
    return s;
}

static fsdp_status open_tensors(const char *folder, fsdp__st **out)
{
    char *path = fsdp__path_join(folder, weights_name);
    char *bin = path ? fsdp__path_join(folder, "adapter_model.bin") : NULL;
    if (bin && !fsdp__file_exists(path) && fsdp__file_exists(bin))
        fsdp__fail(FSDP_UNSUPPORTED,
                   "%s: found adapter_model.bin alone, which is pickled; save the adapters as "
                   "safetensors",
                   folder);
    *out = bin && !fsdp_error() ? fsdp__st_open(path) : NULL;
    free(bin);
    free(path);
    return *out ? FSDP_OK : fsdp_error();
}

/* Beside another base the adapters mean little; beside one that was changed a bit, something. */
static fsdp_status compare_base(const fsdp__st *st, const char *folder, uint64_t print)
{
    const char *text = fsdp__st_meta(st, base_key);
    if (!text || !print || strtoull(text, NULL, 16) == print) return FSDP_OK;
    fsdp__log(FSDP__LOG_WARNING,
              "%s: these adapters were trained beside another base (fingerprint %s) than the "
              "model's (%016" PRIx64 ")",
              folder, text, print);
    return FSDP_OK;
}

fsdp_status fsdp_lora_load(fsdp_module *model, const char *folder)
{
    if (fsdp_error()) return fsdp_error();
    if (!model || !folder)
        return fsdp__fail_null("fsdp_lora_load", model ? "the folder" : "the model");
    loading l = {0};
    uint64_t print;
    fsdp_status s;
    FSDP_TRY(check_scale(model, folder));
    FSDP_TRY(fsdp_module_params(model, &l.params));
    l.t = fsdp__calloc((size_t)l.params.count, sizeof(*l.t), "adapters");
    l.buffer = fsdp__calloc(1, FSDP__HF_BUFFER, "a buffer of weights");
    if (!l.t || !l.buffer) FSDP_GO(fsdp_error());
    FSDP_GO(open_tensors(folder, &l.st));
    FSDP_GO(match(&l, folder));
    FSDP_GO(fsdp__hf_fingerprint(model, &print));
    if (fsdp_rank() == 0) FSDP_GO(compare_base(l.st, folder, print));
    for (int64_t i = 0; i < l.params.count; i++)
        if (l.t[i])
            FSDP_GO(fsdp__hf_read_param(l.st, l.t[i], l.params.items[i].name,
                                        l.params.items[i].param, l.buffer));
done:
    fsdp__st_close(l.st);
    free(l.t);
    free(l.buffer);
    fsdp__str_free(&l.missing);
    fsdp__str_free(&l.misshaped);
    fsdp__str_free(&l.extra);
    fsdp_param_list_free(&l.params);
    return s;
}

/* ---- writing -----------------------------------------------------------------------------------
 */

static bool is_ours(const char *name)
{
    return !strcmp(name, config_name) || !strcmp(name, weights_name);
}

fsdp_status fsdp__hf_check_adapter_replaceable(const char *folder)
{
    return fsdp__hf_check_files(folder, is_ours);
}

/* The last parts of the layers' names, where they mean these layers and no others; else the names.
 */
static json_t *target_list(fsdp_module *model, const fsdp__lora_list *l)
{
    json_t *ends = json_array(), *names = json_array();
    const char **words = fsdp__calloc((size_t)l->count, sizeof *words, "names of layers");
    int n = 0;
    for (int64_t i = 0; i < l->count && words; i++) {
        const char *end = fsdp_module_name(l->items[i]->linear);
        fsdp__str name = {0};
        fsdp__module_path(l->items[i]->linear, &name);
        json_array_append_new(names, json_string(fsdp__str_get(&name)));
        fsdp__str_free(&name);
        bool known = false;
        for (int k = 0; k < n && !known; k++)
            known = !strcmp(words[k], end);
        if (known) continue;
        words[n++] = end;
        json_array_append_new(ends, json_string(end));
    }
    fsdp_lora_options o = {.target_modules = words, .n_target_modules = n};
    bool same = words && fsdp__lora_hits(model, &o) == l->count;
    free(words);
    json_decref(same ? names : ends);
    return same ? ends : names;
}

static fsdp_status write_config(fsdp_module *model, const fsdp__lora_list *l, const char *base,
                                const char *path)
{
    const fsdp__lora *f = l->items[0];
    json_t *j = json_object();
    bool bad = false;
#define SET(key, value) bad |= json_object_set_new(j, key, value) != 0
    SET("base_model_name_or_path", base ? json_string(base) : json_null());
    SET("bias", json_string("none"));
    SET("fan_in_fan_out", json_boolean(f->info.in_out));
    SET("inference_mode", json_true());
    SET("init_lora_weights", json_true());
    SET("lora_alpha", f->alpha == (double)(int64_t)f->alpha ? json_integer((json_int_t)f->alpha)
                                                            : json_real(f->alpha));
    SET("lora_dropout", json_real(f->dropout));
    SET("modules_to_save", json_null());
    SET("peft_type", json_string("LORA"));
    SET("r", json_integer((json_int_t)f->rank));
    SET("target_modules", target_list(model, l));
    SET("task_type", json_string("CAUSAL_LM"));
    SET("use_rslora", json_boolean(f->rslora));
#undef SET
    fsdp_status s = bad            ? fsdp__fail_memory(config_name, 0)
                    : fsdp_error() ? fsdp_error()
                                   : fsdp__json_dump(j, 2, path);
    json_decref(j);
    return s;
}

typedef struct saving {
    fsdp_module *model;
    fsdp_param_list params;
    fsdp__lora_list adapted;
    fsdp__st_writer *writer; /* rank 0 */
    uint64_t print;          /* of the base; 0: it is not that of the adapters any more */
} saving;

static char *tensor_name(const fsdp_named_param *n)
{
    fsdp__str name = {0};
    fsdp__str_addf(&name, "%s%s", prefix, n->name);
    return fsdp__str_take(&name);
}

/* Rank 0: the folder, its config, and the place of each tensor in the file. */
static fsdp_status begin(saving *v, const char *folder, const char *tmp, const char *base)
{
    FSDP_TRY(fsdp__hf_check_files(folder, is_ours));
    FSDP_TRY(fsdp__dir_remove(tmp));
    FSDP_TRY(fsdp__dir_make(tmp));
    char *config = fsdp__path_join(tmp, config_name), *file = fsdp__path_join(tmp, weights_name);
    fsdp_status s =
        config && file ? write_config(v->model, &v->adapted, base, config) : fsdp_error();
    if (s == FSDP_OK && !(v->writer = fsdp__st_writer_create(file))) s = fsdp_error();
    if (s == FSDP_OK && v->print) {
        char text[20];
        snprintf(text, sizeof text, "%016" PRIx64, v->print);
        s = fsdp__st_writer_meta(v->writer, base_key, text);
    }
    for (int64_t i = 0; i < v->params.count && s == FSDP_OK; i++) {
        const fsdp_named_param *n = &v->params.items[i];
        if (!fsdp__lora_is_adapter(n->owner)) continue;
        char *name = tensor_name(n);
        s = name ? fsdp__st_writer_add(v->writer, name, n->param->dtype, n->param->ndim,
                                       n->param->size)
                 : fsdp_error();
        free(name);
    }
    free(config);
    free(file);
    return s == FSDP_OK ? fsdp__st_writer_begin(v->writer) : s;
}

/* Adapters are small: each is gathered whole. */
static fsdp_status save_param(saving *v, const fsdp_named_param *n)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = scope ? fsdp_dtensor_full(fsdp__param_kept(n->param)) : NULL;
    fsdp_status s = t ? FSDP_OK : fsdp_error();
    if (t && v->writer) {
        char *name = tensor_name(n);
        s = name ? fsdp__st_writer_write(v->writer, name, 0,
                                         fsdp_numel(t) * (int64_t)fsdp_dtype_size(t->dtype),
                                         fsdp_data(t))
                 : fsdp_error();
        free(name);
    }
    fsdp_scope_end(scope);
    return s;
}

fsdp_status fsdp_lora_save(fsdp_module *model, const char *folder, const char *base)
{
    if (fsdp_error()) return fsdp_error();
    if (!model || !folder)
        return fsdp__fail_null("fsdp_lora_save", model ? "the folder" : "the model");
    saving v = {.model = model};
    char *tmp = fsdp__hf_beside(folder, ".tmp"), *old = fsdp__hf_beside(folder, ".old");
    bool first = fsdp_rank() == 0;
    fsdp_status s;
    if (!tmp || !old) FSDP_GO(fsdp_error());
    FSDP_GO(fsdp__lora_list_of(model, &v.adapted));
    if (v.adapted.count == 0)
        FSDP_GO(fsdp__fail(FSDP_INVALID_STATE, "fsdp_lora_save: the model has no adapters"));
    FSDP_GO(fsdp_module_params(model, &v.params));
    if (!v.adapted.items[0]->merged) FSDP_GO(fsdp__hf_fingerprint(model, &v.print));
    if (first) FSDP_GO(begin(&v, folder, tmp, base));
    for (int64_t i = 0; i < v.params.count; i++)
        if (fsdp__lora_is_adapter(v.params.items[i].owner))
            FSDP_GO(save_param(&v, &v.params.items[i]));
    if (first) FSDP_GO(fsdp__st_writer_finish(v.writer));
    if (first) FSDP_GO(fsdp__dir_replace(tmp, folder, old));
    s = fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
done:
    fsdp__st_writer_free(v.writer);
    if (s != FSDP_OK && first && tmp) (void)fsdp__dir_remove(tmp);
    fsdp_param_list_free(&v.params);
    free(v.adapted.items);
    free(old);
    free(tmp);
    return s;
}
