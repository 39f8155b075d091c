/*
 * tokenizer_json.c - from tokenizer.json to the lists of steps.
 *
 * Sequences are flattened: running their parts in turn is what they mean. A
 * type that is not known, or a value that is not done, is an error that names
 * the component; keys that only concern offsets (trim_offsets) are not read.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"

const char fsdp__gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

const char *fsdp__tok_kind_name(fsdp__tok_kind kind)
{
    switch (kind) {
#define FSDP__X(e, name) \
    case FSDP__TOK_##e:  \
        return name;
        FSDP__TOK_LIST(FSDP__X)
#undef FSDP__X
    }
    return "?";
}

void fsdp__tok_steps_free(fsdp__tok_steps *steps)
{
    for (int64_t i = 0; i < steps->count; i++) {
        free(steps->items[i].literal);
        free(steps->items[i].text);
        fsdp__regex_free(steps->items[i].regex);
    }
    free(steps->items);
    *steps = (fsdp__tok_steps){0};
}

/* ---- values ---------------------------------------------------------------------- */

static fsdp_status wrong(const char *where, const char *key, const char *expected)
{
    return fsdp__fail(FSDP_INVALID_DATA, "%s.%s is missing or of the wrong type; expected %s",
                      where, key, expected);
}

static fsdp_status read_bool(const json_t *o, const char *key, bool initial, const char *where,
                             bool *out)
{
    const json_t *v = json_object_get(o, key);
    *out = initial;
    if (!v || json_is_null(v)) return FSDP_OK;
    if (!json_is_boolean(v)) return wrong(where, key, "true or false");
    *out = json_is_true(v);
    return FSDP_OK;
}

static fsdp_status read_count(const json_t *o, const char *key, const char *where, int64_t *out)
{
    const json_t *v = json_object_get(o, key);
    if (!json_is_integer(v) || json_integer_value(v) < 0)
        return wrong(where, key, "an integer of at least 0");
    *out = json_integer_value(v);
    return FSDP_OK;
}

/* A string of at least `least` bytes; *out is owned by the caller. */
static fsdp_status read_string(const json_t *o, const char *key, const char *where, size_t least,
                               char **out, size_t *len)
{
    const json_t *v = json_object_get(o, key);
    if (!json_is_string(v) || json_string_length(v) < least)
        return wrong(where, key, least ? "a string that is not empty" : "a string");
    *len = json_string_length(v);
    *out = fsdp__calloc(*len + 1, 1, key); /* it may hold NULs */
    if (!*out) return fsdp_error();
    memcpy(*out, json_string_value(v), *len);
    return FSDP_OK;
}

/* The index of key's word among the words, which end with NULL. */
static fsdp_status read_choice(const json_t *o, const char *key, const char *where,
                               const char *const *words, int initial, int *out)
{
    const json_t *v = json_object_get(o, key);
    *out = initial;
    if ((!v || json_is_null(v)) && initial >= 0) return FSDP_OK;
    if (!json_is_string(v)) return wrong(where, key, "a word");
    for (int i = 0; words[i]; i++) {
        *out = i;
        if (strcmp(words[i], json_string_value(v)) == 0) return FSDP_OK;
    }
    return fsdp__fail(FSDP_UNSUPPORTED, "%s.%s is \"%s\", which is not available here", where, key,
                      json_string_value(v));
}

/* "pattern": {"String": ..} or {"Regex": ..}. */
static fsdp_status read_pattern(const json_t *o, const char *where, fsdp__tok_step *step)
{
    const json_t *p = json_object_get(o, "pattern");
    const json_t *regex = json_object_get(p, "Regex");
    if (json_is_string(regex)) {
        step->regex =
            fsdp__regex_create(json_string_value(regex), json_string_length(regex), where);
        return step->regex ? FSDP_OK : fsdp_error();
    }
    if (!json_is_object(p) || !json_object_get(p, "String"))
        return wrong(where, "pattern", "an object with String or Regex");
    return read_string(p, "String", where, 1, &step->literal, &step->literal_len);
}

/* ---- one step ---------------------------------------------------------------------- */

static fsdp_status read_byte_level(const json_t *o, const char *where, fsdp__tok_step *step)
{
    bool regex = true;
    FSDP_TRY(read_bool(o, "add_prefix_space", true, where, &step->prefix_space));
    FSDP_TRY(read_bool(o, "use_regex", true, where, &regex));
    if (!regex) return FSDP_OK;
    step->regex = fsdp__regex_create(fsdp__gpt2_pattern, sizeof fsdp__gpt2_pattern - 1, where);
    return step->regex ? FSDP_OK : fsdp_error();
}

static fsdp_status read_metaspace(const json_t *o, const char *where, fsdp__tok_step *step)
{
    static const char *const schemes[] = {"never", "first", "always", NULL};
    int scheme = FSDP__PREPEND_NEVER;
    bool old = true;
    if (json_object_get(o, "replacement")) {
        FSDP_TRY(read_string(o, "replacement", where, 1, &step->text, &step->text_len));
        if (fsdp__utf8_len(step->text[0]) != step->text_len)
            return wrong(where, "replacement", "one character");
    } else {
        step->text = fsdp__strdup("\xe2\x96\x81");
        if (!step->text) return fsdp_error();
        step->text_len = 3;
    }
    /* Files from before prepend_scheme say add_prefix_space. */
    FSDP_TRY(read_bool(o, "add_prefix_space", true, where, &old));
    FSDP_TRY(read_choice(o, "prepend_scheme", where, schemes,
                         old ? FSDP__PREPEND_ALWAYS : FSDP__PREPEND_NEVER, &scheme));
    step->prepend = (fsdp__tok_prepend)scheme;
    return read_bool(o, "split", true, where, &step->split);
}

static fsdp_status read_step(const json_t *o, const char *where, bool decoder, fsdp__tok_step *step)
{
    static const char *const cuts[] = {"Removed",        "Isolated",   "MergedWithPrevious",
                                       "MergedWithNext", "Contiguous", NULL};
    int cut = FSDP__CUT_ISOLATED;
    switch (step->kind) {
    case FSDP__TOK_PREPEND:
        return read_string(o, "prepend", where, 0, &step->text, &step->text_len);
    case FSDP__TOK_REPLACE:
        FSDP_TRY(read_pattern(o, where, step));
        return read_string(o, "content", where, 0, &step->text, &step->text_len);
    case FSDP__TOK_STRIP:
        if (!decoder) {
            FSDP_TRY(read_bool(o, "strip_left", true, where, &step->left));
            return read_bool(o, "strip_right", true, where, &step->right);
        }
        FSDP_TRY(read_string(o, "content", where, 1, &step->text, &step->text_len));
        FSDP_TRY(read_count(o, "start", where, &step->start));
        return read_count(o, "stop", where, &step->stop);
    case FSDP__TOK_BYTE_LEVEL:
        return decoder ? FSDP_OK : read_byte_level(o, where, step);
    case FSDP__TOK_SPLIT:
        FSDP_TRY(read_pattern(o, where, step));
        FSDP_TRY(read_bool(o, "invert", false, where, &step->invert));
        FSDP_TRY(read_choice(o, "behavior", where, cuts, -1, &cut));
        step->cut = (fsdp__tok_cut)cut;
        return FSDP_OK;
    case FSDP__TOK_PUNCTUATION:
        FSDP_TRY(read_choice(o, "behavior", where, cuts, cut, &cut));
        step->cut = (fsdp__tok_cut)cut;
        return FSDP_OK;
    case FSDP__TOK_DIGITS:
        return read_bool(o, "individual_digits", false, where, &step->individual);
    case FSDP__TOK_METASPACE:
        return read_metaspace(o, where, step);
    default:
        return FSDP_OK;
    }
}

/* ---- lists of steps ------------------------------------------------------------------ */

/* One of the three lists: its key in the file, the key of a Sequence's parts, the steps in it. */
typedef struct list_kind {
    const char *key, *parts;
    bool decoder;
    const fsdp__tok_kind *kinds;
    int count;
} list_kind;

static const fsdp__tok_kind normalizers[] = {
    FSDP__TOK_NFC,       FSDP__TOK_NFD,     FSDP__TOK_NFKC,    FSDP__TOK_NFKD,
    FSDP__TOK_LOWERCASE, FSDP__TOK_PREPEND, FSDP__TOK_REPLACE, FSDP__TOK_STRIP};
static const fsdp__tok_kind pre_tokenizers[] = {FSDP__TOK_BYTE_LEVEL,       FSDP__TOK_SPLIT,
                                                FSDP__TOK_DIGITS,           FSDP__TOK_PUNCTUATION,
                                                FSDP__TOK_WHITESPACE_SPLIT, FSDP__TOK_METASPACE};
static const fsdp__tok_kind decoders[] = {FSDP__TOK_BYTE_LEVEL,    FSDP__TOK_REPLACE,
                                          FSDP__TOK_BYTE_FALLBACK, FSDP__TOK_FUSE,
                                          FSDP__TOK_STRIP,         FSDP__TOK_METASPACE};

#define KINDS(a) (a), (int)(sizeof(a) / sizeof *(a))
static const list_kind list_normalizer = {"normalizer", "normalizers", false, KINDS(normalizers)};
static const list_kind list_pre = {"pre_tokenizer", "pretokenizers", false, KINDS(pre_tokenizers)};
static const list_kind list_decoder = {"decoder", "decoders", true, KINDS(decoders)};

static fsdp_status unknown_type(const list_kind *list, const char *where, const char *type)
{
    fsdp__str known = {0};
    for (int i = 0; i < list->count; i++)
        fsdp__str_addf(&known, "%s, ", fsdp__tok_kind_name(list->kinds[i]));
    fsdp_status s = fsdp__fail(FSDP_UNSUPPORTED,
                               "%s.type is \"%s\", which is not available here; there are %sand "
                               "Sequence",
                               where, type, fsdp__str_get(&known));
    fsdp__str_free(&known);
    return s;
}

static fsdp_status read_steps(const list_kind *list, const json_t *o, const char *where, int depth,
                              fsdp__tok_steps *out)
{
    if (!o || json_is_null(o)) return FSDP_OK;
    const char *type = json_string_value(json_object_get(o, "type"));
    if (!type) return wrong(where, "type", "a name");
    if (strcmp(type, "Sequence") == 0) {
        const json_t *parts = json_object_get(o, list->parts);
        if (!json_is_array(parts) || depth > 16) return wrong(where, list->parts, "a list");
        for (size_t i = 0; i < json_array_size(parts); i++) {
            fsdp__str place = {0};
            fsdp__str_addf(&place, "%s.%s[%zu]", where, list->parts, i);
            fsdp_status s =
                read_steps(list, json_array_get(parts, i), fsdp__str_get(&place), depth + 1, out);
            fsdp__str_free(&place);
            FSDP_TRY(s);
        }
        return FSDP_OK;
    }
    int k = 0;
    while (k < list->count && strcmp(fsdp__tok_kind_name(list->kinds[k]), type) != 0)
        k++;
    if (k == list->count) return unknown_type(list, where, type);
    FSDP_TRY(FSDP__GROW(out->items, out->cap, out->count + 1, "steps of a tokenizer"));
    fsdp__tok_step *step = &out->items[out->count++];
    *step = (fsdp__tok_step){.kind = list->kinds[k]};
    return read_step(o, where, list->decoder, step);
}

/* ---- post-processor ------------------------------------------------------------------ */

/* The ids of a template's special token, appended. */
static fsdp_status template_token(const json_t *o, const char *name, const char *where,
                                  fsdp__ids *out)
{
    const json_t *ids =
        json_object_get(json_object_get(json_object_get(o, "special_tokens"), name), "ids");
    if (!json_is_array(ids))
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s.single uses \"%s\", which is not in %s.special_tokens with its ids",
                          where, name, where);
    for (size_t i = 0; i < json_array_size(ids); i++) {
        json_int_t v = json_integer_value(json_array_get(ids, i));
        if (!json_is_integer(json_array_get(ids, i)) || v < 0 || v >= INT32_MAX)
            return wrong(where, "special_tokens", "ids of at least 0");
        FSDP_TRY(fsdp__ids_add(out, &(int32_t){(int32_t)v}, 1));
    }
    return FSDP_OK;
}

/* Puts before and after around what earlier post-processors add. */
static fsdp_status template_wrap(fsdp_tokenizer *t, fsdp__ids *before, const fsdp__ids *after)
{
    FSDP_TRY(fsdp__ids_add(before, t->template_before.items, t->template_before.count));
    fsdp__ids old = t->template_before;
    t->template_before = *before;
    *before = old;
    return fsdp__ids_add(&t->template_after, after->items, after->count);
}

static fsdp_status read_template(fsdp_tokenizer *t, const json_t *o, const char *where)
{
    fsdp__ids before = {0}, after = {0};
    fsdp_status s = FSDP_OK;
    const json_t *single = json_object_get(o, "single");
    bool text = false;
    if (!json_is_array(single)) return wrong(where, "single", "a list");
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *part = json_array_get(single, i);
        const char *sequence =
            json_string_value(json_object_get(json_object_get(part, "Sequence"), "id"));
        const char *special =
            json_string_value(json_object_get(json_object_get(part, "SpecialToken"), "id"));
        if (sequence && strcmp(sequence, "A") == 0 && !text) {
            text = true;
        } else if (special) {
            FSDP_GO(template_token(o, special, where, text ? &after : &before));
        } else {
            s = fsdp__fail(FSDP_UNSUPPORTED,
                           "%s.single[%zu] is neither a SpecialToken nor the only Sequence A",
                           where, i);
            goto done;
        }
    }
    if (!text)
        s = wrong(where, "single", "one Sequence A");
    else
        s = template_wrap(t, &before, &after);
done:
    free(before.items);
    free(after.items);
    return s;
}

/* RobertaProcessing and BertProcessing: "cls" before and "sep" after, each ["token", id]. */
static fsdp_status read_cls_sep(fsdp_tokenizer *t, const json_t *o, const char *where)
{
    static const char *const keys[2] = {"cls", "sep"};
    fsdp__ids parts[2] = {{0}, {0}};
    fsdp_status s = FSDP_OK;
    for (int k = 0; k < 2; k++) {
        const json_t *id = json_array_get(json_object_get(o, keys[k]), 1);
        json_int_t v = json_integer_value(id);
        if (!json_is_integer(id) || v < 0 || v >= INT32_MAX) {
            s = wrong(where, keys[k], "a token and its id");
            goto done;
        }
        FSDP_GO(fsdp__ids_add(&parts[k], &(int32_t){(int32_t)v}, 1));
    }
    s = template_wrap(t, &parts[0], &parts[1]);
done:
    free(parts[0].items);
    free(parts[1].items);
    return s;
}

static fsdp_status read_post(fsdp_tokenizer *t, const json_t *o, const char *where, int depth)
{
    if (!o || json_is_null(o)) return FSDP_OK;
    const char *type = json_string_value(json_object_get(o, "type"));
    if (!type) return wrong(where, "type", "a name");
    if (strcmp(type, "ByteLevel") == 0) return FSDP_OK; /* trims offsets, which we have not */
    if (strcmp(type, "TemplateProcessing") == 0) return read_template(t, o, where);
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0)
        return read_cls_sep(t, o, where);
    if (strcmp(type, "Sequence") != 0)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "%s.type is \"%s\", which is not available here; there are "
                          "TemplateProcessing, ByteLevel, RobertaProcessing, BertProcessing and "
                          "Sequence",
                          where, type);
    const json_t *parts = json_object_get(o, "processors");
    if (!json_is_array(parts) || depth > 16) return wrong(where, "processors", "a list");
    for (size_t i = 0; i < json_array_size(parts); i++)
        FSDP_TRY(read_post(t, json_array_get(parts, i), "post_processor.processors[]", depth + 1));
    return FSDP_OK;
}

/* ---- added tokens ------------------------------------------------------------------------ */

static fsdp_status read_added_token(fsdp_tokenizer *t, const json_t *o, size_t i)
{
    char where[40];
    int64_t id = 0;
    size_t len = 0;
    fsdp__added *a = &t->added[t->added_count];
    snprintf(where, sizeof where, "added_tokens[%zu]", i);
    FSDP_TRY(read_count(o, "id", where, &id));
    if (id >= INT32_MAX) return wrong(where, "id", "an id below 2147483647");
    FSDP_TRY(read_string(o, "content", where, 0, &a->text, &len));
    a->text_len = len;
    t->added_count++;
    a->id = (int32_t)id;
    FSDP_TRY(read_bool(o, "special", false, where, &a->special));
    FSDP_TRY(read_bool(o, "normalized", !a->special, where, &a->normalized));
    FSDP_TRY(read_bool(o, "lstrip", false, where, &a->lstrip));
    FSDP_TRY(read_bool(o, "rstrip", false, where, &a->rstrip));
    FSDP_TRY(read_bool(o, "single_word", false, where, &a->single_word));
    const fsdp__value *model = fsdp__map_get(t->bpe.vocab, a->text, len);
    if (model && model->i != id)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: \"%s\" has the id %lld, but %lld in model.vocab; expected the same",
                          where, a->text, (long long)id, (long long)model->i);
    FSDP_TRY(fsdp__map_set(t->added_ids, a->text, len, (fsdp__value){.i = t->added_count - 1}));
    int64_t *by_id = fsdp__pairs_add(&t->added_by_id, (uint64_t)id);
    if (!by_id) return fsdp_error();
    *by_id = t->added_count - 1;
    return FSDP_OK;
}

static fsdp_status read_added(fsdp_tokenizer *t, const json_t *list)
{
    if (!list || json_is_null(list)) return FSDP_OK;
    if (!json_is_array(list))
        return fsdp__fail(FSDP_INVALID_DATA, "added_tokens is no list; expected objects with id "
                                             "and content");
    size_t n = json_array_size(list);
    t->added = fsdp__calloc(n, sizeof *t->added, "added tokens");
    if (!t->added) return fsdp_error();
    for (size_t i = 0; i < n; i++)
        FSDP_TRY(read_added_token(t, json_array_get(list, i), i));
    return FSDP_OK;
}

fsdp_status fsdp__tokenizer_read(fsdp_tokenizer *t, const json_t *root, const char *mark)
{
    if (!json_is_object(root))
        return fsdp__fail(FSDP_INVALID_DATA, "the file is no JSON object; expected a tokenizer");
    const json_t *model = json_object_get(root, "model");
    if (!json_is_object(model)) return wrong("tokenizer", "model", "an object");
    /* The oldest files name no type; merges tell that it is BPE. */
    const char *type = json_string_value(json_object_get(model, "type"));
    if (type ? strcmp(type, "BPE") != 0 : !json_object_get(model, "merges"))
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "model.type is \"%s\", which is not available here; there is BPE",
                          type ? type : "(missing)");
    FSDP_TRY(fsdp__bpe_read(&t->bpe, model, mark));
    FSDP_TRY(read_steps(&list_normalizer, json_object_get(root, "normalizer"), "normalizer", 0,
                        &t->normalizer));
    FSDP_TRY(
        read_steps(&list_pre, json_object_get(root, "pre_tokenizer"), "pre_tokenizer", 0, &t->pre));
    FSDP_TRY(
        read_steps(&list_decoder, json_object_get(root, "decoder"), "decoder", 0, &t->decoder));
    FSDP_TRY(read_post(t, json_object_get(root, "post_processor"), "post_processor", 0));
    FSDP_TRY(read_added(t, json_object_get(root, "added_tokens")));
    return fsdp__added_index(t);
}
