/*
 * json.c - JSON files over jansson.
 *
 * jansson parses; the text is written here, because jansson prints 1e-05 with all 17 digits, which
 * nobody wants to read in a config.json.
 */
#include "format/json.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "format/file.h"

/* ---- reading --------------------------------------------------------------------- */

/* NUL in strings is allowed because tokenizers have it as a token. */
json_t *fsdp__json_parse(const char *text, size_t n, const char *name)
{
    json_error_t e;
    json_t *v = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
    if (v) return v;
    if (json_error_code(&e) == json_error_out_of_memory)
        fsdp__fail_memory(name, n);
    else
        fsdp__fail(FSDP_INVALID_DATA, "%s:%d:%d: found invalid JSON: %s", name,
                   e.line < 1 ? 1 : e.line, e.column < 1 ? 1 : e.column, e.text);
    return NULL;
}

json_t *fsdp__json_load(const char *path)
{
    char *text;
    size_t n;
    if (fsdp__file_read(path, &text, &n) != FSDP_OK) return NULL;
    json_t *v = fsdp__json_parse(text, n, path);
    free(text);
    return v;
}

/* ---- writing --------------------------------------------------------------------- */

/* Runs of plain text are appended at once: names make up most of a header. */
void fsdp__json_quote(fsdp__str *out, const char *text, size_t n)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    size_t start = 0;
    fsdp__str_add(out, "\"");
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        const char *special = c ? strchr(from, c) : NULL;
        if (!special && c >= 0x20) continue;
        fsdp__str_add_n(out, text + start, i - start);
        start = i + 1;
        if (special)
            fsdp__str_addf(out, "\\%c", to[special - from]);
        else
            fsdp__str_addf(out, "\\u%04x", c);
    }
    fsdp__str_add_n(out, text + start, n - start);
    fsdp__str_add(out, "\"");
}

/* Digits are tried one more at a time until they read back as the same number. */
void fsdp__json_real(fsdp__str *out, double v)
{
    char e[40], digits[24];
    int n = 0, p = 0;
    if (!isfinite(v)) { /* JSON has no such number; this is how Python writes it */
        fsdp__str_add(out, isnan(v) ? "NaN" : v < 0 ? "-Infinity" : "Infinity");
        return;
    }
    do {
        snprintf(e, sizeof e, "%.*e", p, v);
    } while (strtod(e, NULL) != v && ++p < DBL_DECIMAL_DIG);
    /* The point is the locale's, so only digits are taken from the text. */
    const char *c = e;
    if (*c == '-') {
        fsdp__str_add(out, "-");
        c++;
    }
    for (; *c != 'e'; c++)
        if (*c >= '0' && *c <= '9') digits[n++] = *c;
    int exponent = atoi(c + 1);
    while (n > 1 && digits[n - 1] == '0')
        n--;
    digits[n] = 0;
    if (exponent < -4 || exponent >= 16) {
        fsdp__str_add_n(out, digits, 1);
        if (n > 1) fsdp__str_addf(out, ".%s", digits + 1);
        fsdp__str_addf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    if (exponent < 0) {
        fsdp__str_add(out, "0.");
        for (int i = -1; i > exponent; i--)
            fsdp__str_add(out, "0");
        fsdp__str_add(out, digits);
        return;
    }
    for (int i = 0; i <= exponent; i++)
        fsdp__str_add_n(out, i < n ? digits + i : "0", 1);
    fsdp__str_addf(out, ".%s", n > exponent + 1 ? digits + exponent + 1 : "0");
}

static void new_line(fsdp__str *out, int indent, int level)
{
    if (!indent) return;
    fsdp__str_add(out, "\n");
    for (int i = 0; i < indent * level; i++)
        fsdp__str_add(out, " ");
}

/* Recursion is bounded: jansson parses no deeper than 2048 levels. */
static void format(const json_t *v, int indent, int level, fsdp__str *out)
{
    const char *comma = indent ? "," : ", ";
    switch (json_typeof(v)) {
    case JSON_OBJECT: {
        bool first = true;
        const char *key;
        json_t *item, *object = (json_t *)v; /* jansson's iterator takes no const; nothing is set */
        if (!json_object_size(v)) {
            fsdp__str_add(out, "{}");
            return;
        }
        fsdp__str_add(out, "{");
        json_object_foreach(object, key, item)
        {
            if (!first) fsdp__str_add(out, comma);
            first = false;
            new_line(out, indent, level + 1);
            fsdp__json_quote(out, key, strlen(key));
            fsdp__str_add(out, ": ");
            format(item, indent, level + 1, out);
        }
        new_line(out, indent, level);
        fsdp__str_add(out, "}");
        return;
    }
    case JSON_ARRAY:
        if (!json_array_size(v)) {
            fsdp__str_add(out, "[]");
            return;
        }
        fsdp__str_add(out, "[");
        for (size_t i = 0; i < json_array_size(v); i++) {
            if (i) fsdp__str_add(out, comma);
            new_line(out, indent, level + 1);
            format(json_array_get(v, i), indent, level + 1, out);
        }
        new_line(out, indent, level);
        fsdp__str_add(out, "]");
        return;
    case JSON_STRING:
        fsdp__json_quote(out, json_string_value(v), json_string_length(v));
        return;
    case JSON_INTEGER:
        fsdp__str_addf(out, "%lld", (long long)json_integer_value(v));
        return;
    case JSON_REAL:
        fsdp__json_real(out, json_real_value(v));
        return;
    case JSON_TRUE:
        fsdp__str_add(out, "true");
        return;
    case JSON_FALSE:
        fsdp__str_add(out, "false");
        return;
    case JSON_NULL:
        fsdp__str_add(out, "null");
        return;
    }
}

fsdp_status fsdp__json_format(const json_t *v, int indent, fsdp__str *out)
{
    if (!v) return fsdp__fail_memory("JSON text", 0); /* a constructor of jansson failed */
    format(v, indent, 0, out);
    return out->failed ? fsdp__fail_memory("JSON text", out->len) : FSDP_OK;
}

fsdp_status fsdp__json_dump(const json_t *v, int indent, const char *path)
{
    fsdp__str s = {0};
    fsdp_status e = fsdp__json_format(v, indent, &s);
    fsdp__str_add(&s, "\n");
    if (e == FSDP_OK && s.failed) e = fsdp__fail_memory("JSON text", s.len);
    if (e == FSDP_OK) e = fsdp__file_write(path, fsdp__str_get(&s), s.len);
    fsdp__str_free(&s);
    return e;
}

/* ---- fields ------------------------------------------------------------------------ */

/* The value as it stands in a message, cut where it is long. */
static void show(const json_t *v, char out[96])
{
    enum { ROOM = 80 };
    fsdp__str s = {0};
    if (!v) {
        strcpy(out, "nothing");
        return;
    }
    if (json_is_object(v) || json_is_array(v)) {
        snprintf(out, 96, json_is_object(v) ? "an object of %zu names" : "a list of %zu values",
                 json_is_object(v) ? json_object_size(v) : json_array_size(v));
        return;
    }
    format(v, 0, 0, &s);
    size_t n = s.len < ROOM ? s.len : ROOM;
    while (n < s.len && n && ((unsigned char)s.p[n] & 0xc0) == 0x80)
        n--; /* whole characters */
    snprintf(out, 96, "%.*s%s", (int)n, fsdp__str_get(&s), n < s.len ? "..." : "");
    fsdp__str_free(&s);
}

fsdp_status fsdp__json_fail(fsdp_status code, const fsdp__json_at *at, const char *key,
                            const char *expected)
{
    char found[96];
    show(json_object_get(at->json, key), found);
    return fsdp__fail(code, "%s: %s%s%s: found %s, expected %s", at->file, at->path,
                      at->path[0] ? "." : "", key, found, expected);
}

fsdp_status fsdp__json_root(const json_t *json, const char *file, fsdp__json_at *out)
{
    *out = (fsdp__json_at){.json = json, .file = file};
    if (json_is_object(json)) return FSDP_OK;
    char found[96];
    show(json, found);
    return fsdp__fail(FSDP_INVALID_DATA, "%s: found %s, expected an object {...}", file, found);
}

fsdp_status fsdp__json_object(const fsdp__json_at *at, const char *key, fsdp__json_at *out)
{
    const json_t *v = json_object_get(at->json, key);
    if (!json_is_object(v)) return fsdp__json_fail(FSDP_INVALID_DATA, at, key, "an object {...}");
    fsdp__json_at sub = {.json = v, .file = at->file};
    snprintf(sub.path, sizeof sub.path, "%.*s%s%.*s", 100, at->path, at->path[0] ? "." : "", 50,
             key);
    *out = sub;
    return FSDP_OK;
}

/* NULL for an absent or null key. */
static const json_t *field(const fsdp__json_at *at, const char *key)
{
    const json_t *v = json_object_get(at->json, key);
    return json_is_null(v) ? NULL : v;
}

bool fsdp__json_has(const fsdp__json_at *at, const char *key)
{
    return field(at, key) != NULL;
}

fsdp_status fsdp__json_need(const fsdp__json_at *at, const char *key)
{
    return field(at, key) ? FSDP_OK : fsdp__json_fail(FSDP_INVALID_DATA, at, key, "a value");
}

fsdp_status fsdp__json_int(const fsdp__json_at *at, const char *key, int64_t *out)
{
    const json_t *v = field(at, key);
    if (v && !json_is_integer(v))
        return fsdp__json_fail(FSDP_INVALID_DATA, at, key, "a whole number");
    if (v) *out = (int64_t)json_integer_value(v);
    return FSDP_OK;
}

fsdp_status fsdp__json_number(const fsdp__json_at *at, const char *key, double *out)
{
    const json_t *v = field(at, key);
    if (v && !json_is_number(v)) return fsdp__json_fail(FSDP_INVALID_DATA, at, key, "a number");
    if (v) *out = json_number_value(v);
    return FSDP_OK;
}

fsdp_status fsdp__json_bool(const fsdp__json_at *at, const char *key, bool *out)
{
    const json_t *v = field(at, key);
    if (v && !json_is_boolean(v))
        return fsdp__json_fail(FSDP_INVALID_DATA, at, key, "true or false");
    if (v) *out = json_is_true(v);
    return FSDP_OK;
}

fsdp_status fsdp__json_string(const fsdp__json_at *at, const char *key, const char **out)
{
    const json_t *v = field(at, key);
    if (v && !json_is_string(v))
        return fsdp__json_fail(FSDP_INVALID_DATA, at, key, "text in quotes");
    if (v) *out = json_string_value(v);
    return FSDP_OK;
}
