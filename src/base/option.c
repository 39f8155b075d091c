/*
 * option.c - option tables: values in.
 *
 * Everything that is wrong with a value is said in one sentence: where it
 * stands, what was found, what the option takes. Numbers are read in the C
 * locale, whatever the application set.
 */
#include "base/option.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/option_internal.h"

void *fsdp__option_field(const fsdp__section *s, const fsdp__option *row)
{
    return (char *)s->target + row->offset;
}

/* ---- finding ---------------------------------------------------------------- */

/* The row of "section.name"; NULL if there is none. */
static const fsdp__option *find(const fsdp__options *o, const char *name,
                                const fsdp__section **section)
{
    for (const fsdp__section *s = o->sections; s->name; s++) {
        size_t n = strlen(s->name);
        if (strncmp(name, s->name, n) != 0 || name[n] != '.') continue;
        for (const fsdp__option *row = s->rows; row->name; row++) {
            if (strcmp(name + n + 1, row->name) != 0) continue;
            *section = s;
            return row;
        }
    }
    return NULL;
}

/* "compile.*" matches all that begins with "compile.". */
static bool pattern_matches(const char *pattern, const char *name)
{
    size_t n = strlen(pattern);
    if (n > 0 && pattern[n - 1] == '*') return strncmp(pattern, name, n - 1) == 0;
    return strcmp(pattern, name) == 0;
}

/* How far a name is from "section.row": an option that only stands in another
 * section is nearer than any misspelling of two letters. */
static int distance(const char *name, const fsdp__section *s, const fsdp__option *row)
{
    fsdp__str full = {0};
    fsdp__str_addf(&full, "%s.%s", s->name, row->name);
    int d = fsdp__edit_distance(name, fsdp__str_get(&full));
    fsdp__str_free(&full);
    const char *dot = strrchr(name, '.');
    const char *leaf = dot ? dot + 1 : name;
    if (d > 1 && strcmp(leaf, row->name) == 0) d = 1;
    return d;
}

/* "unknown option x" with the nearest name, or with what there is. */
static fsdp_status unknown(const fsdp__options *o, const char *name, const char *place)
{
    for (const fsdp__unavailable *u = o->unavailable; u && u->name; u++)
        if (pattern_matches(u->name, name))
            return fsdp__fail(FSDP_UNSUPPORTED, "%s: %s is known and not available: %s", place,
                              name, u->why);

    const fsdp__section *near_section = NULL, *own = NULL;
    const fsdp__option *near = NULL;
    int best = 0;
    for (const fsdp__section *s = o->sections; s->name; s++) {
        size_t n = strlen(s->name);
        if (strncmp(name, s->name, n) == 0 && name[n] == '.') own = s;
        for (const fsdp__option *row = s->rows; row->name; row++) {
            int d = distance(name, s, row);
            if (near && d >= best) continue;
            best = d;
            near = row;
            near_section = s;
        }
    }
    int far = (int)strlen(name) / 3;
    if (near && best <= (far > 2 ? far : 2))
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s: unknown option %s; did you mean %s.%s?", place,
                          name, near_section->name, near->name);

    fsdp__str list = {0};
    if (own)
        for (const fsdp__option *row = own->rows; row->name; row++)
            fsdp__str_addf(&list, "%s%s", list.len ? ", " : "", row->name);
    else
        for (const fsdp__section *s = o->sections; s->name; s++)
            fsdp__str_addf(&list, "%s%s", list.len ? ", " : "", s->name);
    fsdp_status s =
        own ? fsdp__fail(FSDP_INVALID_CONFIG, "%s: unknown option %s; section %s has %s", place,
                         name, own->name, fsdp__str_get(&list))
            : fsdp__fail(FSDP_INVALID_CONFIG, "%s: unknown option %s; the sections are %s", place,
                         name, fsdp__str_get(&list));
    fsdp__str_free(&list);
    return s;
}

/* ---- reading values ------------------------------------------------------------ */

typedef struct target {
    const fsdp__section *section;
    const fsdp__option *row;
    const char *value, *place;
} target;

/* "place: section.name is 'x'; expected <what the option takes>". */
static fsdp_status refuse(const target *t)
{
    fsdp__str takes = {0};
    fsdp__option_takes(t->row, &takes);
    fsdp_status s = fsdp__fail(FSDP_INVALID_CONFIG, "%s: %s.%s is '%s'; expected %s", t->place,
                               t->section->name, t->row->name, t->value ? t->value : "null",
                               fsdp__str_get(&takes));
    fsdp__str_free(&takes);
    return s;
}

static bool in_range(const fsdp__option *row, double v)
{
    return row->min > row->max || (v >= row->min && v <= row->max);
}

static bool parse_bool(const char *text, bool *out)
{
    static const char *const yes[] = {"true", "yes", "on", "1"};
    static const char *const no[] = {"false", "no", "off", "0"};
    for (int i = 0; i < 4; i++) {
        if (strcasecmp(text, yes[i]) == 0) {
            *out = true;
            return true;
        }
        if (strcasecmp(text, no[i]) == 0) {
            *out = false;
            return true;
        }
    }
    return false;
}

static bool parse_int(const char *text, int64_t *out)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (end == text || *end || errno) return false;
    *out = v;
    return true;
}

/* A number, or "inf"; *end is behind it. NaN is none. */
static bool parse_double(const char *text, double *out, const char **end)
{
    locale_t c = fsdp__option_locale();
    if (!c) return false;
    char *stop;
    errno = 0;
    /* YAML writes infinity with a point in front. */
    bool infinite = strcmp(text, ".inf") == 0;
    double v = strtod_l(text + infinite, &stop, c);
    if (stop == text || v != v) return false;
    /* An underflow is near enough to what was meant; an overflow is not. */
    if (errno == ERANGE && (v > 1 || v < -1)) return false;
    *out = v;
    *end = stop;
    return true;
}

/* "512MiB", "2GB", "1.5 GiB", "0": to whole bytes. */
static bool parse_bytes(const char *text, int64_t *out)
{
    static const struct {
        const char *name;
        double factor;
    } units[] = {
        {"", 1},       {"B", 1},        {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},
        {"TB", 1e12},  {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
        {"K", 0x1p10}, {"M", 0x1p20},   {"G", 0x1p30},   {"T", 0x1p40},
    };
    if (parse_int(text, out)) return *out >= 0;
    double v;
    const char *unit;
    if (!parse_double(text, &v, &unit)) return false;
    unit += strspn(unit, " ");
    for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
        if (strcasecmp(unit, units[i].name) != 0) continue;
        v *= units[i].factor;
        if (!(v >= 0 && v < 0x1p63)) return false;
        *out = (int64_t)v;
        return true;
    }
    return false;
}

/* The index of text among the words of "a|b|c"; -1 if it is none. */
static int find_choice(const char *choices, const char *text)
{
    size_t n = strlen(text);
    int index = 0;
    for (const char *p = choices;; index++) {
        size_t word = strcspn(p, "|");
        if (word == n && memcmp(p, text, n) == 0) return index;
        if (!p[word]) return -1;
        p += word + 1;
    }
}

static void free_strings(fsdp__strings *list)
{
    for (int64_t i = 0; i < list->count; i++)
        free(list->items[i]);
    free(list->items);
    *list = (fsdp__strings){0};
}

static fsdp_status set_strings(fsdp__strings *field, const char *const *items, int64_t n)
{
    fsdp__strings made = {0};
    made.items = fsdp__calloc((size_t)n, sizeof *made.items, "a list option");
    if (!made.items) return fsdp_error();
    for (; made.count < n; made.count++) {
        made.items[made.count] = fsdp__strdup(items[made.count]);
        if (!made.items[made.count]) {
            free_strings(&made);
            return fsdp_error();
        }
    }
    free_strings(field);
    *field = made;
    return FSDP_OK;
}

/* A list as text: "a, b" or "[a, b]"; items lose the blanks around them. */
static fsdp_status set_strings_text(fsdp__strings *field, const char *text)
{
    char *copy = fsdp__strdup(text);
    if (!copy) return fsdp_error();
    fsdp_status s = FSDP_OK;
    const char **items = NULL;
    int64_t n = 0, cap = 0;
    char *p = copy + strspn(copy, " ");
    size_t len = strlen(p);
    while (len > 0 && p[len - 1] == ' ')
        p[--len] = 0;
    if (len >= 2 && p[0] == '[' && p[len - 1] == ']') {
        p[--len] = 0;
        p++;
        p += strspn(p, " ");
    }
    while (*p) {
        char *comma = strchr(p, ',');
        char *end = comma ? comma : p + strlen(p);
        char *next = comma ? comma + 1 : end;
        while (end > p && end[-1] == ' ')
            end--;
        *end = 0;
        FSDP_GO(FSDP__GROW(items, cap, n + 1, "a list option"));
        items[n++] = p;
        p = next + strspn(next, " ");
    }
    s = set_strings(field, items, n);
done:
    free(items);
    free(copy);
    return s;
}

/* The end of the flow map that begins at p, behind its brace; NULL if it has none. Braces inside
 * quotes are text; maps do not nest. */
static const char *map_end(const char *p)
{
    char quote = 0;
    for (p++; *p; p++) {
        if (quote && *p == '\\' && quote == '"' && p[1])
            p++;
        else if (quote)
            quote = *p == quote ? 0 : quote;
        else if (*p == '"' || *p == '\'')
            quote = *p;
        else if (*p == '{')
            return NULL;
        else if (*p == '}')
            return p + 1;
    }
    return NULL;
}

/* A list of maps as text: "{a: 1}, {a: 2}", with or without brackets around it. *good says whether
 * it is one. */
static fsdp_status set_maps_text(fsdp__strings *field, const char *text, bool *good)
{
    fsdp_status s = FSDP_OK;
    char **items = NULL;
    int64_t n = 0, cap = 0;
    const char *p = text + strspn(text, " ");
    bool bracket = *p == '[', more = true;
    if (bracket) p += 1 + strspn(p + 1, " ");
    *good = false;
    if ((!bracket && !*p) || (bracket && *p == ']')) more = false;
    while (more) {
        const char *end = *p == '{' ? map_end(p) : NULL;
        if (!end) goto done;
        FSDP_GO(FSDP__GROW(items, cap, n + 1, "a list option"));
        if (!(items[n] = fsdp__strndup(p, (size_t)(end - p)))) FSDP_GO(fsdp_error());
        n++;
        p = end + strspn(end, " ");
        more = *p == ',';
        if (more) p += 1 + strspn(p + 1, " ");
    }
    if (bracket && *p++ != ']') goto done;
    if (p[strspn(p, " ")]) goto done;
    *good = true;
    s = set_strings(field, (const char *const *)items, n);
done:
    for (int64_t i = 0; i < n; i++)
        free(items[i]);
    free(items);
    return s;
}

static fsdp_status set_value(const target *t)
{
    void *field = fsdp__option_field(t->section, t->row);
    const char *text = t->value, *end;
    int64_t whole;
    double real;
    bool truth;
    int choice;

    /* null means "unset", which strings and lists alone can be. */
    if (!text) {
        if (t->row->type == FSDP__OPT_STRING) {
            free(*(char **)field);
            *(char **)field = NULL;
            return FSDP_OK;
        }
        if (t->row->type == FSDP__OPT_STRINGS || t->row->type == FSDP__OPT_MAPS) {
            free_strings(field);
            return FSDP_OK;
        }
        return refuse(t);
    }
    switch (t->row->type) {
    case FSDP__OPT_BOOL:
        if (!parse_bool(text, &truth)) return refuse(t);
        *(bool *)field = truth;
        return FSDP_OK;
    case FSDP__OPT_INT:
        if (!parse_int(text, &whole) || !in_range(t->row, (double)whole)) return refuse(t);
        *(int64_t *)field = whole;
        return FSDP_OK;
    case FSDP__OPT_FLOAT:
        if (!parse_double(text, &real, &end) || *end || !in_range(t->row, real)) return refuse(t);
        *(double *)field = real;
        return FSDP_OK;
    case FSDP__OPT_BYTES:
        if (!parse_bytes(text, &whole) || !in_range(t->row, (double)whole)) return refuse(t);
        *(int64_t *)field = whole;
        return FSDP_OK;
    case FSDP__OPT_ENUM:
        choice = find_choice(t->row->choices, text);
        if (choice < 0) return refuse(t);
        *(int *)field = choice;
        return FSDP_OK;
    case FSDP__OPT_STRING: {
        char *copy = fsdp__strdup(text);
        if (!copy) return fsdp_error();
        free(*(char **)field);
        *(char **)field = copy;
        return FSDP_OK;
    }
    case FSDP__OPT_STRINGS:
        return set_strings_text(field, text);
    case FSDP__OPT_MAPS:
        FSDP_TRY(set_maps_text(field, text, &truth));
        return truth ? FSDP_OK : refuse(t);
    }
    return fsdp__fail(FSDP_INTERNAL, "option %s has type %d", t->row->name, (int)t->row->type);
}

/* ---- interface ----------------------------------------------------------------------- */

fsdp_status fsdp__options_set(const fsdp__options *o, const char *name, const char *value,
                              const char *place)
{
    target t = {.value = value, .place = place};
    t.row = find(o, name, &t.section);
    return t.row ? set_value(&t) : unknown(o, name, place);
}

fsdp_status fsdp__options_set_list(const fsdp__options *o, const char *name,
                                   const char *const *items, int64_t n, const char *place)
{
    target t = {.value = "a list", .place = place};
    t.row = find(o, name, &t.section);
    if (!t.row) return unknown(o, name, place);
    if (t.row->type != FSDP__OPT_STRINGS && (t.row->type != FSDP__OPT_MAPS || n > 0))
        return refuse(&t);
    return set_strings(fsdp__option_field(t.section, t.row), items, n);
}

fsdp_status fsdp__options_set_maps(const fsdp__options *o, const char *name,
                                   const char *const *items, int64_t n, const char *place)
{
    target t = {.value = "a list of maps", .place = place};
    t.row = find(o, name, &t.section);
    if (!t.row) return unknown(o, name, place);
    if (t.row->type != FSDP__OPT_MAPS) return refuse(&t);
    return set_strings(fsdp__option_field(t.section, t.row), items, n);
}

/* An option without an initial value: zero, unset, the first choice. */
static void clear(const fsdp__section *s, const fsdp__option *row)
{
    void *field = fsdp__option_field(s, row);
    switch (row->type) {
    case FSDP__OPT_BOOL:
        *(bool *)field = false;
        break;
    case FSDP__OPT_INT:
    case FSDP__OPT_BYTES:
        *(int64_t *)field = 0;
        break;
    case FSDP__OPT_FLOAT:
        *(double *)field = 0;
        break;
    case FSDP__OPT_ENUM:
        *(int *)field = 0;
        break;
    case FSDP__OPT_STRING:
        *(char **)field = NULL;
        break;
    case FSDP__OPT_STRINGS:
    case FSDP__OPT_MAPS:
        *(fsdp__strings *)field = (fsdp__strings){0};
        break;
    }
}

fsdp_status fsdp__options_defaults(const fsdp__options *o)
{
    /* All first: after a failure everything can still be freed. */
    for (const fsdp__section *s = o->sections; s->name; s++)
        for (const fsdp__option *row = s->rows; row->name; row++)
            clear(s, row);
    for (const fsdp__section *s = o->sections; s->name; s++) {
        for (const fsdp__option *row = s->rows; row->name; row++) {
            target t = {s, row, row->initial, "default"};
            if (row->initial) FSDP_TRY(set_value(&t));
        }
    }
    return FSDP_OK;
}

void fsdp__options_free(const fsdp__options *o)
{
    for (const fsdp__section *s = o->sections; s->name; s++) {
        for (const fsdp__option *row = s->rows; row->name; row++) {
            void *field = fsdp__option_field(s, row);
            if (row->type == FSDP__OPT_STRING) {
                free(*(char **)field);
                *(char **)field = NULL;
            } else if (row->type == FSDP__OPT_STRINGS || row->type == FSDP__OPT_MAPS) {
                free_strings(field);
            }
        }
    }
}

fsdp_status fsdp__options_get(const fsdp__options *o, const char *name, fsdp__str *out)
{
    const fsdp__section *s;
    const fsdp__option *row = find(o, name, &s);
    if (!row) return unknown(o, name, "options");
    fsdp__option_value(s, row, out);
    return FSDP_OK;
}
