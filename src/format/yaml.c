/*
 * yaml.c - two levels of YAML over libfyaml.
 *
 * The whole document is parsed before the first call, so a syntax error at the end of a file is
 * found before any value of it was used. libfyaml's messages are collected, never printed.
 */
#include "format/yaml.h"

#include <libfyaml.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"
#include "format/file.h"
#include "format/utf8.h"

typedef struct walk {
    const char *name; /* of the file, for messages */
    fsdp__yaml_fn fn;
    void *arg;
} walk;

/* ---- places and errors ------------------------------------------------------------- */

typedef struct mark {
    int line, column; /* from 1; 0: unknown */
} mark;

static mark mark_of_token(struct fy_token *t)
{
    const struct fy_mark *m = t ? fy_token_start_mark(t) : NULL;
    return m ? (mark){m->line + 1, m->column + 1} : (mark){0, 0};
}

/* Where a node begins: its own start, or that of its first part (block maps have no token). */
static mark mark_of(struct fy_node *n)
{
    void *it = NULL;
    if (!n) return (mark){0, 0};
    switch (fy_node_get_type(n)) {
    case FYNT_SCALAR: {
        struct fy_token *t = fy_node_get_scalar_token(n);
        mark m = mark_of_token(t);
        enum fy_scalar_style style = t ? fy_token_scalar_style(t) : FYSS_PLAIN;
        /* The token begins behind its quote or star; a person looks for that. */
        bool quoted = style == FYSS_SINGLE_QUOTED || style == FYSS_DOUBLE_QUOTED;
        if ((quoted || fy_node_is_alias(n)) && m.column > 1) m.column--;
        return m;
    }
    case FYNT_SEQUENCE:
        return mark_of(fy_node_sequence_iterate(n, &it));
    case FYNT_MAPPING: {
        struct fy_node_pair *p = fy_node_mapping_iterate(n, &it);
        return p ? mark_of(fy_node_pair_key(p)) : (mark){0, 0};
    }
    }
    return (mark){0, 0};
}

static fsdp_status bad(const walk *w, mark m, const char *what, const char *found,
                       const char *expected)
{
    return fsdp__fail(FSDP_INVALID_CONFIG, "%s:%d:%d: %s%sfound %s, expected %s", w->name,
                      m.line ? m.line : 1, m.column ? m.column : 1, what, what[0] ? ": " : "",
                      found, expected);
}

static const char *kind(struct fy_node *n)
{
    if (!n) return "nothing";
    if (fy_node_is_alias(n)) return "an alias (*name)";
    switch (fy_node_get_type(n)) {
    case FYNT_SCALAR:
        return "a single value";
    case FYNT_SEQUENCE:
        return "a list";
    case FYNT_MAPPING:
        return "a map of names to values";
    }
    return "nothing";
}

/* The first message that the parser collected. */
static fsdp_status syntax_error(const walk *w, struct fy_diag *diag)
{
    void *it = NULL;
    struct fy_diag_error *e = diag ? fy_diag_errors_iterate(diag, &it) : NULL;
    if (!e) return fsdp__fail(FSDP_INVALID_CONFIG, "%s: found invalid YAML", w->name);
    return fsdp__fail(FSDP_INVALID_CONFIG, "%s:%d:%d: found invalid YAML: %s", w->name,
                      e->line > 0 ? e->line : 1, e->column > 0 ? e->column : 1, e->msg);
}

/* ---- nodes ---------------------------------------------------------------------------- */

/* A scalar's text in new memory; "null" for a plain one that is empty. NULL: error kept. */
static char *text_of(const walk *w, struct fy_node *n, const char *what)
{
    if (!n) return fsdp__strdup("null");
    size_t len = 0;
    const char *p = fy_node_get_scalar(n, &len);
    struct fy_token *t = fy_node_get_scalar_token(n);
    if (!len && (!t || fy_token_scalar_style(t) == FYSS_PLAIN)) return fsdp__strdup("null");
    if (len && memchr(p, 0, len)) {
        bad(w, mark_of(n), what, "a NUL character", "text without one");
        return NULL;
    }
    return fsdp__strndup(len ? p : "", len);
}

/* NULL is a value too: libfyaml has no node for `name:` with nothing behind it. */
static bool is_value(struct fy_node *n)
{
    return !n || (fy_node_is_scalar(n) && !fy_node_is_alias(n));
}

/* The name of a pair in new memory, entered in seen: each once in its map. NULL: error kept. */
static char *name_of(const walk *w, struct fy_node_pair *p, fsdp__map *seen, const char *outer)
{
    struct fy_node *key = fy_node_pair_key(p);
    mark m = mark_of(key);
    if (!key || !is_value(key)) {
        bad(w, m, outer, kind(key), "a name");
        return NULL;
    }
    char *name = text_of(w, key, outer);
    if (!name) return NULL;
    const fsdp__value *before = fsdp__map_gets(seen, name);
    if (before) {
        fsdp__fail(
            FSDP_INVALID_CONFIG,
            "%s:%d:%d: %s%sfound the name '%s' a second time, first in line %lld: remove one "
            "of them",
            w->name, m.line, m.column, outer, outer[0] ? ": " : "", name, (long long)before->i);
        free(name);
        return NULL;
    }
    if (fsdp__map_sets(seen, name, (fsdp__value){.i = m.line}) != FSDP_OK) {
        free(name);
        return NULL;
    }
    return name;
}

/* A value inside a flow map: as it stands where it was written plain and needs no quotes there. */
static void add_flow(fsdp__str *out, const char *text, bool plain)
{
    if (plain && text[0] && text[strcspn(text, ",{}[]:#\"'&*!|>%@`\\ \t\n")] == 0) {
        fsdp__str_add(out, text);
        return;
    }
    fsdp__str_add(out, "\"");
    for (const char *p = text; *p; p++) {
        if (*p == '\n' || *p == '\t')
            fsdp__str_add(out, *p == '\n' ? "\\n" : "\\t");
        else if (*p == '"' || *p == '\\')
            fsdp__str_addf(out, "\\%c", *p);
        else
            fsdp__str_add_n(out, p, 1);
    }
    fsdp__str_add(out, "\"");
}

static bool is_plain(struct fy_node *n)
{
    struct fy_token *t = n ? fy_node_get_scalar_token(n) : NULL;
    return !t || fy_token_scalar_style(t) == FYSS_PLAIN;
}

/* A map of names to single values, on one line. NULL: error kept. */
static char *map_text(const walk *w, struct fy_node *n, const char *what)
{
    void *it = NULL;
    struct fy_node_pair *p;
    fsdp__str out = {0};
    fsdp__map *seen = fsdp__map_create();
    fsdp_status s = seen ? FSDP_OK : FSDP_NO_MEMORY;
    fsdp__str_add(&out, "{");
    while (s == FSDP_OK && (p = fy_node_mapping_iterate(n, &it))) {
        struct fy_node *value = fy_node_pair_value(p);
        char *name = name_of(w, p, seen, what), *text = NULL;
        if (name && !is_value(value))
            bad(w, mark_of(value), what, kind(value), "a single value");
        else if (name)
            text = text_of(w, value, what);
        if (text) {
            fsdp__str_add(&out, out.len > 1 ? ", " : "");
            add_flow(&out, name, is_plain(fy_node_pair_key(p)));
            fsdp__str_add(&out, ": ");
            add_flow(&out, text, is_plain(value));
        } else {
            s = fsdp_error();
        }
        free(text);
        free(name);
    }
    fsdp__str_add(&out, "}");
    fsdp__map_free(seen);
    if (s == FSDP_OK) return fsdp__str_take(&out);
    fsdp__str_free(&out);
    return NULL;
}

/* One value or list of values; what is "section.name". */
static fsdp_status walk_value(const walk *w, struct fy_node *n, mark m, const char *what,
                              fsdp__yaml_value *v)
{
    char **items = NULL;
    int64_t cap = 0, count = 0;
    fsdp__str place = {0};
    fsdp_status s = FSDP_OK;
    fsdp__str_addf(&place, "%s:%d:%d", w->name, m.line, m.column);
    if (place.failed) s = FSDP_NO_MEMORY;
    v->place = fsdp__str_get(&place);
    if (is_value(n)) {
        char *text = s == FSDP_OK ? text_of(w, n, what) : NULL;
        v->text = text;
        s = text ? w->fn(w->arg, v) : s == FSDP_OK ? fsdp_error() : s;
        free(text);
    } else if (!fy_node_is_alias(n) && fy_node_is_sequence(n)) {
        void *it = NULL;
        struct fy_node *e;
        while (s == FSDP_OK && (e = fy_node_sequence_iterate(n, &it))) {
            bool map = e && !fy_node_is_alias(e) && fy_node_is_mapping(e);
            if (count == 0) v->maps = map;
            if ((!map && !is_value(e)) || map != v->maps) {
                s = bad(w, mark_of(e), what, kind(e),
                        v->maps ? "maps alone in a list that begins with one"
                                : "single values in a list");
                break;
            }
            s = FSDP__GROW(items, cap, count + 1, "items of a list");
            if (s != FSDP_OK) break;
            items[count] = map ? map_text(w, e, what) : text_of(w, e, what);
            if (items[count])
                count++;
            else
                s = fsdp_error();
        }
        v->items = (const char *const *)items;
        v->n = count;
        if (s == FSDP_OK) s = w->fn(w->arg, v);
    } else {
        s = bad(w, mark_of(n).line ? mark_of(n) : m, what, kind(n), "a single value or a list");
    }
    for (int64_t i = 0; i < count; i++)
        free(items[i]);
    free(items);
    fsdp__str_free(&place);
    return s;
}

/* The values of one section. */
static fsdp_status walk_section(const walk *w, const char *section, struct fy_node *n)
{
    void *it = NULL;
    struct fy_node_pair *p;
    fsdp_status s = FSDP_OK;
    fsdp__map *seen = fsdp__map_create();
    if (!seen) return FSDP_NO_MEMORY;
    while (s == FSDP_OK && (p = fy_node_mapping_iterate(n, &it))) {
        char *name = name_of(w, p, seen, section);
        if (!name) {
            s = fsdp_error();
            break;
        }
        fsdp__str what = {0};
        struct fy_node *value = fy_node_pair_value(p);
        mark m = mark_of(value);
        if (!m.line) m = mark_of(fy_node_pair_key(p));
        fsdp__yaml_value v = {.section = section, .name = name};
        fsdp__str_addf(&what, "%s.%s", section, name);
        s = walk_value(w, value, m, fsdp__str_get(&what), &v);
        fsdp__str_free(&what);
        free(name);
    }
    fsdp__map_free(seen);
    return s;
}

/* An empty document, or a section with only comments below it. */
static bool is_empty(struct fy_node *n)
{
    size_t len = 0;
    if (!n) return true;
    return fy_node_is_scalar(n) && !fy_node_is_alias(n) && fy_node_get_scalar(n, &len) && !len;
}

/* Sections with nothing below are allowed: people comment out their last line. */
static fsdp_status walk_document(const walk *w, struct fy_node *root)
{
    void *it = NULL;
    struct fy_node_pair *p;
    fsdp_status s = FSDP_OK;
    if (is_empty(root)) return FSDP_OK;
    if (fy_node_is_alias(root) || !fy_node_is_mapping(root))
        return bad(w, mark_of(root), "", kind(root), "sections ('training:') with values below");
    fsdp__map *seen = fsdp__map_create();
    if (!seen) return FSDP_NO_MEMORY;
    while (s == FSDP_OK && (p = fy_node_mapping_iterate(root, &it))) {
        char *section = name_of(w, p, seen, "");
        struct fy_node *n = fy_node_pair_value(p);
        if (!section)
            s = fsdp_error();
        else if (is_empty(n))
            s = FSDP_OK; /* "training:" with nothing below changes nothing */
        else if (fy_node_is_alias(n) || !fy_node_is_mapping(n))
            s = bad(w, mark_of(n), section, kind(n),
                    "a section, that is 'name: value' lines below it");
        else
            s = walk_section(w, section, n);
        free(section);
    }
    fsdp__map_free(seen);
    return s;
}

/* ---- documents --------------------------------------------------------------------------- */

/* libfyaml writes to standard error unless it has a function that takes its text. */
static void swallow(struct fy_diag *diag, void *user, const char *buf, size_t len)
{
    (void)diag, (void)user, (void)buf, (void)len;
}

/* libfyaml takes some bytes that are no text. */
static fsdp_status check_utf8(const walk *w, const char *text, size_t n)
{
    size_t good = fsdp__utf8_check(text, n);
    int line = 1, column = 1;
    if (good == n) return FSDP_OK;
    for (size_t i = 0; i < good; i++) {
        column = text[i] == '\n' ? 1 : column + 1;
        line += text[i] == '\n';
    }
    return fsdp__fail(FSDP_INVALID_CONFIG,
                      "%s:%d:%d: found invalid YAML: the byte 0x%02x, expected UTF-8 text", w->name,
                      line, column, (unsigned)(unsigned char)text[good]);
}

fsdp_status fsdp__yaml_parse(const char *text, size_t n, const char *name, fsdp__yaml_fn fn,
                             void *arg)
{
    walk w = {.name = name, .fn = fn, .arg = arg};
    struct fy_parser *parser = NULL;
    struct fy_document *doc = NULL, *more = NULL;
    fsdp_status s;
    FSDP_TRY(check_utf8(&w, text, n));
    struct fy_diag_cfg dc;
    fy_diag_cfg_default(&dc);
    dc.fp = NULL;
    dc.output_fn = swallow;
    dc.colorize = false;
    struct fy_diag *diag = fy_diag_create(&dc);
    if (!diag) return fsdp__fail_memory("YAML messages", 0);
    fy_diag_set_collect_errors(diag, true);
    /* Names twice are allowed here because name_of says where the first one stands. */
    struct fy_parse_cfg cfg = {
        .flags = FYPCF_QUIET | FYPCF_COLLECT_DIAG | FYPCF_ALLOW_DUPLICATE_KEYS, .diag = diag};
    parser = fy_parser_create(&cfg);
    if (!parser || fy_parser_set_string(parser, text, n)) {
        s = fsdp__fail_memory("YAML parser", n);
        goto done;
    }
    doc = fy_parse_load_document(parser);
    if (fy_diag_got_error(diag)) {
        s = syntax_error(&w, diag);
        goto done;
    }
    if (doc) more = fy_parse_load_document(parser);
    if (fy_diag_got_error(diag)) {
        s = syntax_error(&w, diag);
        goto done;
    }
    if (more) {
        s = fsdp__fail(FSDP_INVALID_CONFIG,
                       "%s: found a second YAML document ('---'), expected one a file", name);
        goto done;
    }
    s = doc ? walk_document(&w, fy_document_root(doc)) : FSDP_OK;
done:
    if (more) fy_parse_document_destroy(parser, more);
    if (doc) fy_parse_document_destroy(parser, doc);
    if (parser) fy_parser_destroy(parser);
    fy_diag_destroy(diag);
    return s;
}

fsdp_status fsdp__yaml_load(const char *path, fsdp__yaml_fn fn, void *arg)
{
    char *text;
    size_t n;
    FSDP_TRY(fsdp__file_read(path, &text, &n));
    fsdp_status s = fsdp__yaml_parse(text, n, path, fn, arg);
    free(text);
    return s;
}
