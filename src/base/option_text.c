/*
 * option_text.c - option tables: values and descriptions out, as YAML,
 * Markdown and --help.
 *
 * What is written as YAML reads back to the same values: numbers have as many
 * digits as that takes, and a text that YAML would take for something else is
 * quoted.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/option_internal.h"

/* Bounds beyond this are no bounds: the way to say "at least" in a row. */
#define UNBOUNDED 1e18

static pthread_once_t locale_once = PTHREAD_ONCE_INIT;
static locale_t c_locale;

static void locale_init(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

locale_t fsdp__option_locale(void)
{
    pthread_once(&locale_once, locale_init);
    return c_locale;
}

/* ---- values ----------------------------------------------------------------- */

/* The shortest of 6, 15, 16 and 17 digits that reads back as v. */
static void add_double(fsdp__str *out, double v)
{
    if (isinf(v)) {
        fsdp__str_add(out, v > 0 ? ".inf" : "-.inf");
        return;
    }
    locale_t c = fsdp__option_locale();
    locale_t before = c ? uselocale(c) : (locale_t)0;
    char text[40];
    static const int digits[] = {6, 15, 16, 17};
    for (size_t i = 0; i < 4; i++) {
        snprintf(text, sizeof text, "%.*g", digits[i], v);
        if (strtod(text, NULL) == v) break;
    }
    if (c) uselocale(before);
    fsdp__str_add(out, text);
    /* A float stays one for whoever reads the file. */
    if (!strpbrk(text, ".en")) fsdp__str_add(out, ".0");
}

static void add_size(fsdp__str *out, int64_t bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    int u = -1;
    while (bytes != 0 && bytes % 1024 == 0 && u < 3) {
        bytes /= 1024;
        u++;
    }
    fsdp__str_addf(out, "%lld%s", (long long)bytes, u < 0 ? "" : units[u]);
}

static void add_bound(fsdp__str *out, const fsdp__option *row, double v)
{
    if (row->type == FSDP__OPT_BYTES)
        add_size(out, (int64_t)v);
    else if (row->type == FSDP__OPT_INT)
        fsdp__str_addf(out, "%lld", (long long)v);
    else
        add_double(out, v);
}

/* Whether YAML reads the text as that same string without quotes. */
static bool is_plain(const char *text)
{
    static const char *const words[] = {"true", "false", "yes", "no", "on",
                                        "off",  "null",  "y",   "n"};
    const char *safe = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-";
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcasecmp(text, words[i]) == 0) return false;
    bool starts = (*text >= 'a' && *text <= 'z') || (*text >= 'A' && *text <= 'Z') ||
                  *text == '_' || *text == '/' || (*text == '.' && text[1] == '/');
    return starts && text[strspn(text, safe)] == 0;
}

static void add_text(fsdp__str *out, const char *text)
{
    if (is_plain(text)) {
        fsdp__str_add(out, text);
        return;
    }
    fsdp__str_add(out, "\"");
    for (const unsigned char *p = (const unsigned char *)text; *p; p++) {
        if (*p == '"' || *p == '\\')
            fsdp__str_addf(out, "\\%c", *p);
        else if (*p == '\n')
            fsdp__str_add(out, "\\n");
        else if (*p == '\t')
            fsdp__str_add(out, "\\t");
        else if (*p < 32 || *p == 127)
            fsdp__str_addf(out, "\\x%02x", *p);
        else
            fsdp__str_add_n(out, p, 1);
    }
    fsdp__str_add(out, "\"");
}

static void add_choice(fsdp__str *out, const char *choices, int index)
{
    const char *p = choices;
    for (; index > 0 && *p; index--) {
        p += strcspn(p, "|");
        if (*p) p++;
    }
    char word[64];
    snprintf(word, sizeof word, "%.*s", (int)strcspn(p, "|"), p);
    add_text(out, word);
}

void fsdp__option_value(const fsdp__section *s, const fsdp__option *row, fsdp__str *out)
{
    const void *field = fsdp__option_field(s, row);
    switch (row->type) {
    case FSDP__OPT_BOOL:
        fsdp__str_add(out, *(const bool *)field ? "true" : "false");
        break;
    case FSDP__OPT_INT:
        fsdp__str_addf(out, "%lld", (long long)*(const int64_t *)field);
        break;
    case FSDP__OPT_BYTES:
        add_size(out, *(const int64_t *)field);
        break;
    case FSDP__OPT_FLOAT:
        add_double(out, *(const double *)field);
        break;
    case FSDP__OPT_ENUM:
        add_choice(out, row->choices, *(const int *)field);
        break;
    case FSDP__OPT_STRING: {
        const char *text = *(char *const *)field;
        if (text)
            add_text(out, text);
        else
            fsdp__str_add(out, "null");
        break;
    }
    case FSDP__OPT_STRINGS:
    case FSDP__OPT_MAPS: {
        const fsdp__strings *list = field;
        fsdp__str_add(out, "[");
        for (int64_t i = 0; i < list->count; i++) {
            if (i) fsdp__str_add(out, ", ");
            if (row->type == FSDP__OPT_MAPS)
                fsdp__str_add(out, list->items[i]); /* is YAML already */
            else
                add_text(out, list->items[i]);
        }
        fsdp__str_add(out, "]");
        break;
    }
    }
}

/* ---- descriptions ------------------------------------------------------------- */

/* " from 1 to 8", " of at least 1", or nothing. */
static void add_range(fsdp__str *out, const fsdp__option *row)
{
    bool number =
        row->type == FSDP__OPT_INT || row->type == FSDP__OPT_FLOAT || row->type == FSDP__OPT_BYTES;
    if (!number || row->min > row->max) return;
    bool low = row->min > -UNBOUNDED, high = row->max < UNBOUNDED;
    if (low && high) {
        fsdp__str_add(out, " from ");
        add_bound(out, row, row->min);
        fsdp__str_add(out, " to ");
        add_bound(out, row, row->max);
    } else if (low || high) {
        fsdp__str_add(out, low ? " of at least " : " of at most ");
        add_bound(out, row, low ? row->min : row->max);
    }
}

/* "a, b or c". */
static void add_choices(fsdp__str *out, const char *choices)
{
    for (const char *p = choices; *p;) {
        size_t n = strcspn(p, "|");
        bool last = !p[n], only = p == choices;
        if (!only) fsdp__str_add(out, last ? " or " : ", ");
        fsdp__str_add_n(out, p, n);
        p += n + !last;
    }
}

void fsdp__option_takes(const fsdp__option *row, fsdp__str *out)
{
    switch (row->type) {
    case FSDP__OPT_BOOL:
        fsdp__str_add(out, "true or false");
        break;
    case FSDP__OPT_INT:
        fsdp__str_add(out, "a whole number");
        break;
    case FSDP__OPT_FLOAT:
        fsdp__str_add(out, "a number");
        break;
    case FSDP__OPT_BYTES:
        fsdp__str_add(out, "a size such as 512MiB or 2GB");
        break;
    case FSDP__OPT_ENUM:
        add_choices(out, row->choices);
        break;
    case FSDP__OPT_STRING:
        fsdp__str_add(out, "a text");
        break;
    case FSDP__OPT_STRINGS:
        fsdp__str_add(out, "a list of texts");
        break;
    case FSDP__OPT_MAPS:
        fsdp__str_add(out, "a list of maps such as {");
        for (const char *p = row->choices ? row->choices : ""; *p;) {
            size_t n = strcspn(p, "|");
            fsdp__str_addf(out, "%s%.*s: ...", p == row->choices ? "" : ", ", (int)n, p);
            p += n + (p[n] != 0);
        }
        fsdp__str_add(out, "}");
        break;
    }
    add_range(out, row);
}

/* The default as YAML would show it. */
static void add_initial(fsdp__str *out, const fsdp__option *row)
{
    if (row->initial)
        fsdp__str_add(out, *row->initial ? row->initial : "\"\"");
    else
        fsdp__str_add(out, "unset");
}

/* Text broken at blanks so that lines have at most `width` columns; each line
 * after the first begins with `indent`. `column` is where the first starts. */
static void add_wrapped(fsdp__str *out, const char *text, const char *indent, int column, int width)
{
    bool first = true;
    while (*text) {
        int n = (int)strcspn(text, " ");
        if (n > 0) {
            if (!first && column + 1 + n > width) {
                fsdp__str_addf(out, "\n%s", indent);
                column = (int)strlen(indent);
            } else if (!first) {
                fsdp__str_add(out, " ");
                column++;
            }
            fsdp__str_add_n(out, text, (size_t)n);
            column += n;
            first = false;
        }
        text += n;
        while (*text == ' ')
            text++;
    }
}

/* "help (takes; default x)". */
static void describe(fsdp__str *out, const fsdp__option *row)
{
    fsdp__str_add(out, row->help ? row->help : "");
    fsdp__str_add(out, " (");
    fsdp__option_takes(row, out);
    fsdp__str_add(out, "; default ");
    add_initial(out, row);
    fsdp__str_add(out, ")");
}

void fsdp__options_yaml(const fsdp__options *o, fsdp__str *out, bool help)
{
    for (const fsdp__section *s = o->sections; s->name; s++) {
        if (help && s != o->sections) fsdp__str_add(out, "\n");
        if (help && s->help) {
            fsdp__str_add(out, "# ");
            add_wrapped(out, s->help, "# ", 2, 100);
            fsdp__str_add(out, "\n");
        }
        /* A section without options must still be a mapping. */
        fsdp__str_addf(out, s->rows->name ? "%s:\n" : "%s: {}\n", s->name);
        for (const fsdp__option *row = s->rows; row->name; row++) {
            if (help) {
                fsdp__str text = {0};
                describe(&text, row);
                fsdp__str_add(out, "  # ");
                add_wrapped(out, fsdp__str_get(&text), "  # ", 4, 100);
                fsdp__str_add(out, "\n");
                fsdp__str_free(&text);
            }
            fsdp__str_addf(out, "  %s: ", row->name);
            fsdp__option_value(s, row, out);
            fsdp__str_add(out, "\n");
        }
    }
}

/* One cell of a Markdown table: a bar would end it. */
static void add_cell(fsdp__str *out, const char *text)
{
    for (; *text; text++) {
        if (*text == '|') fsdp__str_add(out, "\\");
        fsdp__str_add_n(out, text, 1);
    }
}

void fsdp__options_markdown(const fsdp__options *o, fsdp__str *out)
{
    for (const fsdp__section *s = o->sections; s->name; s++) {
        fsdp__str_addf(out, "%s## %s\n\n", s == o->sections ? "" : "\n", s->name);
        if (s->help) fsdp__str_addf(out, "%s\n\n", s->help);
        if (!s->rows->name) continue;
        fsdp__str_add(out, "| option | takes | default | meaning |\n| --- | --- | --- | --- |\n");
        for (const fsdp__option *row = s->rows; row->name; row++) {
            fsdp__str cell = {0};
            fsdp__str_addf(out, "| `%s.%s` | ", s->name, row->name);
            fsdp__option_takes(row, &cell);
            add_cell(out, fsdp__str_get(&cell));
            fsdp__str_free(&cell);
            add_initial(&cell, row);
            fsdp__str_add(out, " | `");
            add_cell(out, fsdp__str_get(&cell));
            fsdp__str_add(out, "` | ");
            add_cell(out, row->help ? row->help : "");
            fsdp__str_add(out, " |\n");
            fsdp__str_free(&cell);
        }
    }
}

void fsdp__options_help(const fsdp__options *o, fsdp__str *out)
{
    for (const fsdp__section *s = o->sections; s->name; s++) {
        fsdp__str_addf(out, "%s%s", s == o->sections ? "" : "\n", s->name);
        if (s->help) {
            fsdp__str_add(out, ": ");
            add_wrapped(out, s->help, "  ", (int)strlen(s->name) + 2, 100);
        }
        fsdp__str_add(out, "\n");
        for (const fsdp__option *row = s->rows; row->name; row++) {
            fsdp__str text = {0};
            describe(&text, row);
            fsdp__str_addf(out, "  --%s.%s\n      ", s->name, row->name);
            add_wrapped(out, fsdp__str_get(&text), "      ", 6, 100);
            fsdp__str_add(out, "\n");
            fsdp__str_free(&text);
        }
    }
}
