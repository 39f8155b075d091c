/*
 * st_header.c - the JSON header of a safetensors file, read strictly.
 *
 * A general JSON library takes things here that the format forbids (2.0 as a size, a name twice)
 * and makes an object of every value, where headers of large models have tens of megabytes. So the
 * text is walked once. Invariants:
 *   1. p never passes end; text[end] is a NUL that no rule of JSON accepts, so one character may
 *      always be looked at.
 *   2. Strings are unescaped in place: the result is never longer than its escaped form, and the
 *      closing quote gives room for its NUL.
 *   3. The text was checked to be UTF-8 before, so escapes are the only way to a bad character.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "format/safetensors_internal.h"
#include "format/utf8.h"

enum { NESTING_LIMIT = 128 };

typedef struct scan {
    char *begin, *p, *end;
    const char *path;
    fsdp__shown entry; /* the tensor that is being read; "" outside of one */
    int depth;
} scan;

typedef struct text {
    char *p;
    size_t len;
} text;

/* ---- errors ---------------------------------------------------------------------- */

fsdp__shown fsdp__show(const char *name, size_t len)
{
    fsdp__shown out;
    size_t n = 0;
    bool cut = false;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)name[i];
        if (n + 8 > sizeof out.text) {
            cut = true;
            break;
        }
        if (c < 0x20 || c == 0x7f) {
            static const char hex[] = "0123456789abcdef";
            memcpy(out.text + n, "\\x", 2);
            out.text[n + 2] = hex[c >> 4];
            out.text[n + 3] = hex[c & 15];
            n += 4;
        } else {
            out.text[n++] = (char)c;
        }
    }
    if (cut) {
        /* Never end within a character. */
        while (n && ((unsigned char)out.text[n - 1] & 0xc0) == 0x80)
            n--;
        if (n && (unsigned char)out.text[n - 1] >= 0xc0) n--;
        memcpy(out.text + n, "...", 3);
        n += 3;
    }
    out.text[n] = 0;
    return out;
}

/* "FILE: header byte 12, tensor 'a': found <what stands there>, expected <expected>". */
static fsdp_status bad_json(const scan *s, const char *at, const char *expected)
{
    char found[64] = "the end of the header";
    if (at < s->end) {
        size_t n = (size_t)(s->end - at);
        fsdp__shown w = fsdp__show(at, n < 24 ? n : 24);
        /* The window may end within a character: only whole ones are shown. */
        w.text[40] = 0;
        w.text[fsdp__utf8_check(w.text, strlen(w.text))] = 0;
        strcpy(found, "'");
        strcat(found, w.text);
        strcat(found, "'");
    }
    return fsdp__fail(FSDP_INVALID_DATA, "%s: header byte %zu%s%s%s: found %s, expected %s",
                      s->path, 8 + (size_t)(at - s->begin), s->entry.text[0] ? ", tensor '" : "",
                      s->entry.text, s->entry.text[0] ? "'" : "", found, expected);
}

/* A rule that is not about the next character. */
static fsdp_status bad_entry(const scan *s, const char *what)
{
    return fsdp__fail(FSDP_INVALID_DATA, "%s: header byte %zu, tensor '%s': %s", s->path,
                      8 + (size_t)(s->p - s->begin), s->entry.text, what);
}

/* ---- characters -------------------------------------------------------------------- */

/* The four blanks of JSON, no others: NUL padding is an error. */
static void skip_blanks(scan *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\t' || *s->p == '\n' || *s->p == '\r'))
        s->p++;
}

/* The next character that is no blank; a NUL at the end. */
static char peek(scan *s)
{
    skip_blanks(s);
    return s->p < s->end ? *s->p : 0;
}

/* Blanks, then exactly this character. */
static fsdp_status take(scan *s, char c, const char *expected)
{
    if (peek(s) != c || s->p >= s->end) return bad_json(s, s->p, expected);
    s->p++;
    return FSDP_OK;
}

/* ---- strings ------------------------------------------------------------------------ */

/* Four hex digits at p; -1 if there are none. */
static int32_t hex4(const scan *s, const char *p)
{
    int32_t v = 0;
    if (s->end - p < 4) return -1;
    for (int i = 0; i < 4; i++) {
        char c = p[i];
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

static char *put_utf8(char *out, int32_t c)
{
    if (c < 0x80) {
        *out++ = (char)c;
    } else if (c < 0x800) {
        *out++ = (char)(0xc0 | c >> 6);
        *out++ = (char)(0x80 | (c & 63));
    } else if (c < 0x10000) {
        *out++ = (char)(0xe0 | c >> 12);
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    } else {
        *out++ = (char)(0xf0 | c >> 18);
        *out++ = (char)(0x80 | (c >> 12 & 63));
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    }
    return out;
}

/* One escape; s->p stands on the backslash and ends behind it. */
static fsdp_status unescape(scan *s, char **out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char *at = s->p;
    char c = at + 1 < s->end ? at[1] : 0;
    const char *simple = c ? strchr(from, c) : NULL;
    if (simple) {
        *(*out)++ = to[simple - from];
        s->p += 2;
        return FSDP_OK;
    }
    if (c != 'u')
        return bad_json(s, at, "an escape of JSON (\\\" \\\\ \\/ \\b \\f \\n \\r \\t \\u)");
    int32_t v = hex4(s, at + 2);
    if (v < 0) return bad_json(s, at, "four hex digits behind \\u");
    s->p += 6;
    if (v >= 0xdc00 && v < 0xe000)
        return bad_json(s, at, "a first half of a surrogate pair before its second");
    if (v >= 0xd800 && v < 0xdc00) {
        bool more = s->end - s->p >= 2 && s->p[0] == '\\' && s->p[1] == 'u';
        int32_t low = more ? hex4(s, s->p + 2) : -1;
        if (low < 0xdc00 || low > 0xdfff) return bad_json(s, at, "both halves of a surrogate pair");
        s->p += 6;
        v = 0x10000 + ((v - 0xd800) << 10) + (low - 0xdc00);
    }
    *out = put_utf8(*out, v);
    return FSDP_OK;
}

/* Into the same memory: `to` never overtakes s->p, since an escape is longer than what it means. */
static fsdp_status string(scan *s, text *out, const char *expected)
{
    FSDP_TRY(take(s, '"', expected));
    char *to = s->p;
    out->p = s->p;
    for (;;) {
        if (s->p >= s->end) return bad_json(s, s->p, "the closing quote of a string");
        char c = *s->p;
        if (c == '"') break;
        if ((unsigned char)c < 0x20)
            return bad_json(s, s->p, "no raw control character in a string (write \\u00..)");
        if (c == '\\') {
            FSDP_TRY(unescape(s, &to));
        } else {
            *to++ = c;
            s->p++;
        }
    }
    s->p++;
    out->len = (size_t)(to - out->p);
    *to = 0;
    return FSDP_OK;
}

/* ---- numbers and values that nobody asked for ------------------------------------------ */

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* A whole number that fits 64 bits; the format knows no other ones. */
static fsdp_status whole(scan *s, uint64_t *out, const char *expected)
{
    uint64_t v = 0;
    char c = peek(s), *at = s->p;
    if (!is_digit(c)) return bad_json(s, at, expected);
    if (c == '0' && is_digit(at[1])) return bad_json(s, at, "a number without leading zeros");
    while (s->p < s->end && is_digit(*s->p)) {
        uint64_t d = (uint64_t)(*s->p - '0');
        if (v > (UINT64_MAX - d) / 10) return bad_json(s, at, "a number of at most 64 bits");
        v = v * 10 + d;
        s->p++;
    }
    if (s->p < s->end && (*s->p == '.' || *s->p == 'e' || *s->p == 'E'))
        return bad_json(s, at, "a whole number, without fraction or exponent");
    *out = v;
    return FSDP_OK;
}

/* A number of a field that is not ours: only its grammar is checked. The NUL behind the text
 * stops every loop. */
static fsdp_status skip_number(scan *s)
{
    char *at = s->p;
    if (*s->p == '-') s->p++;
    if (!is_digit(*s->p)) return bad_json(s, at, "a number");
    if (*s->p == '0' && is_digit(s->p[1])) return bad_json(s, at, "a number without leading zeros");
    while (is_digit(*s->p))
        s->p++;
    if (*s->p == '.') {
        if (!is_digit(*++s->p)) return bad_json(s, at, "digits behind the point of a number");
        while (is_digit(*s->p))
            s->p++;
    }
    if (*s->p == 'e' || *s->p == 'E') {
        s->p++;
        if (*s->p == '+' || *s->p == '-') s->p++;
        if (!is_digit(*s->p)) return bad_json(s, at, "digits in the exponent of a number");
        while (is_digit(*s->p))
            s->p++;
    }
    return FSDP_OK;
}

static fsdp_status skip_word(scan *s, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(s->end - s->p) < n || memcmp(s->p, word, n))
        return bad_json(s, s->p, "a JSON value");
    s->p += n;
    return FSDP_OK;
}

static fsdp_status enter(scan *s)
{
    if (++s->depth > NESTING_LIMIT)
        return bad_json(s, s->p, "at most 128 levels of lists and objects");
    return FSDP_OK;
}

static fsdp_status skip_value(scan *s);

/* Behind the opening bracket of a list or object, up to its closing one. */
static fsdp_status skip_items(scan *s, bool object)
{
    char close = object ? '}' : ']';
    text key;
    FSDP_TRY(enter(s));
    if (peek(s) == close) {
        s->p++;
        s->depth--;
        return FSDP_OK;
    }
    for (;;) {
        if (object) {
            FSDP_TRY(string(s, &key, "a name in quotes"));
            FSDP_TRY(take(s, ':', "':'"));
        }
        FSDP_TRY(skip_value(s));
        if (peek(s) == close) break;
        FSDP_TRY(take(s, ',', object ? "',' or '}'" : "',' or ']'"));
    }
    s->p++;
    s->depth--;
    return FSDP_OK;
}

/* Any value of a field that this version of the format does not know. */
static fsdp_status skip_value(scan *s)
{
    text t;
    char c = peek(s);
    switch (c) {
    case '{':
    case '[':
        s->p++;
        return skip_items(s, c == '{');
    case '"':
        return string(s, &t, "a string");
    case 't':
        return skip_word(s, "true");
    case 'f':
        return skip_word(s, "false");
    case 'n':
        return skip_word(s, "null");
    default:
        break;
    }
    if (c == '-' || is_digit(c)) return skip_number(s);
    return bad_json(s, s->p, "a JSON value");
}

/* ---- one tensor ---------------------------------------------------------------------------- */

/* dtypes that are not computed with here are known too, so that a file that also holds them
 * opens. */
static fsdp_status parse_dtype(scan *s, fsdp__st_item *it)
{
    text t;
    FSDP_TRY(string(s, &t, "the name of a dtype in quotes"));
    it->dtype = strlen(t.p) == t.len ? fsdp__st_dtype_find(t.p) : NULL;
    if (!it->dtype)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: tensor '%s': found the dtype '%s', expected one of the format's "
                          "(F32, BF16, F16, F64, I64, ...)",
                          s->path, s->entry.text, fsdp__show(t.p, t.len).text);
    return FSDP_OK;
}

/* Sizes go to one pool for all tensors: a header of 100,000 tensors makes few allocations. */
static fsdp_status parse_shape(scan *s, fsdp__st_header *h, fsdp__st_item *it)
{
    FSDP_TRY(take(s, '[', "a list of sizes"));
    it->shape_at = h->n_shapes;
    if (peek(s) == ']') {
        s->p++;
        return FSDP_OK;
    }
    for (;;) {
        uint64_t v = 0;
        char *at = s->p;
        FSDP_TRY(whole(s, &v, "a size (a whole number, not negative)"));
        if (v > INT64_MAX) return bad_json(s, at, "a size below 2^63");
        FSDP_TRY(FSDP__GROW(h->shapes, h->cap_shapes, h->n_shapes + 1, "shapes of a header"));
        h->shapes[h->n_shapes++] = (int64_t)v;
        if (peek(s) == ']') break;
        FSDP_TRY(take(s, ',', "',' or ']' in a shape"));
        peek(s);
    }
    s->p++;
    it->t.ndim = (int)(h->n_shapes - it->shape_at);
    return FSDP_OK;
}

static fsdp_status parse_offsets(scan *s, fsdp__st_item *it)
{
    static const char expected[] = "two byte offsets, as data_offsets [begin, end]";
    FSDP_TRY(take(s, '[', expected));
    FSDP_TRY(whole(s, &it->begin, expected));
    FSDP_TRY(take(s, ',', expected));
    FSDP_TRY(whole(s, &it->end, expected));
    return take(s, ']', expected);
}

enum { SEEN_DTYPE = 1, SEEN_SHAPE = 2, SEEN_OFFSETS = 4 };

/* Fields come in any order. Of those that are not ours nothing is kept. */
static fsdp_status parse_field(scan *s, fsdp__st_header *h, fsdp__st_item *it, int *seen)
{
    text key;
    FSDP_TRY(string(s, &key, "the name of a field in quotes"));
    FSDP_TRY(take(s, ':', "':'"));
    int which = !strcmp(key.p, "dtype")          ? SEEN_DTYPE
                : !strcmp(key.p, "shape")        ? SEEN_SHAPE
                : !strcmp(key.p, "data_offsets") ? SEEN_OFFSETS
                                                 : 0;
    if (strlen(key.p) != key.len) which = 0;
    if (!which) return skip_value(s); /* fields of later versions */
    if (*seen & which)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: tensor '%s': found the field '%s' twice, expected it once", s->path,
                          s->entry.text, key.p);
    *seen |= which;
    if (which == SEEN_DTYPE) return parse_dtype(s, it);
    if (which == SEEN_SHAPE) return parse_shape(s, h, it);
    return parse_offsets(s, it);
}

/* One tensor behind its name and colon. It joins the list only when it is complete. */
static fsdp_status parse_entry(scan *s, fsdp__st_header *h, text name)
{
    fsdp__st_item it = {.t = {.name = name.p, .name_len = name.len}};
    int seen = 0;
    s->entry = fsdp__show(name.p, name.len);
    FSDP_TRY(take(s, '{', "an object with dtype, shape and data_offsets"));
    FSDP_TRY(enter(s));
    if (peek(s) != '}') {
        for (;;) {
            FSDP_TRY(parse_field(s, h, &it, &seen));
            if (peek(s) == '}') break;
            FSDP_TRY(take(s, ',', "',' or '}'"));
        }
    }
    if (!(seen & SEEN_DTYPE)) return bad_entry(s, "found no dtype, expected one");
    if (!(seen & SEEN_SHAPE)) return bad_entry(s, "found no shape, expected one");
    if (!(seen & SEEN_OFFSETS)) return bad_entry(s, "found no data_offsets, expected them");
    s->p++;
    s->depth--;
    if (fsdp__map_get(h->by_name, name.p, name.len))
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: found the tensor name '%s' twice, expected each name once", s->path,
                          s->entry.text);
    FSDP_TRY(fsdp__map_set(h->by_name, name.p, name.len, (fsdp__value){.i = h->n}));
    FSDP_TRY(FSDP__GROW(h->items, h->cap, h->n + 1, "tensors of a header"));
    it.t.dtype_name = it.dtype->name;
    it.t.dtype = it.dtype->dtype;
    h->items[h->n++] = it;
    s->entry.text[0] = 0;
    return FSDP_OK;
}

/* ---- __metadata__ ------------------------------------------------------------------------- */

/* The reference takes the last of two equal keys; here it is an error, since one of them is lost
 * otherwise. */
static fsdp_status parse_metadata(scan *s, fsdp__st_header *h)
{
    fsdp__map *seen = NULL;
    text key, value;
    fsdp_status e = FSDP_OK;
    if (peek(s) == 'n') return skip_word(s, "null");
    FSDP_TRY(take(s, '{', "__metadata__ to be an object of strings"));
    if (peek(s) == '}') {
        s->p++;
        return FSDP_OK;
    }
    seen = fsdp__map_create();
    if (!seen) return FSDP_NO_MEMORY;
    for (;;) {
        e = string(s, &key, "a name in quotes");
        if (e == FSDP_OK) e = take(s, ':', "':'");
        if (e == FSDP_OK) e = string(s, &value, "a string (values of __metadata__ are strings)");
        if (e != FSDP_OK) break;
        if (fsdp__map_get(seen, key.p, key.len)) {
            e = fsdp__fail(FSDP_INVALID_DATA,
                           "%s: found the key '%s' twice in __metadata__, expected each key once",
                           s->path, fsdp__show(key.p, key.len).text);
            break;
        }
        e = fsdp__map_set(seen, key.p, key.len, (fsdp__value){.i = 0});
        if (e == FSDP_OK) e = FSDP__GROW(h->meta, h->cap_meta, h->n_meta + 1, "metadata");
        if (e != FSDP_OK) break;
        h->meta[h->n_meta++] = (fsdp__st_meta_item){key.p, value.p};
        if (peek(s) == '}') {
            s->p++;
            break;
        }
        e = take(s, ',', "',' or '}'");
        if (e != FSDP_OK) break;
    }
    fsdp__map_free(seen);
    return e;
}

/* ---- the whole header ----------------------------------------------------------------------- */

static fsdp_status parse_all(scan *s, fsdp__st_header *h)
{
    bool metadata = false;
    text name;
    FSDP_TRY(take(s, '{', "'{', the start of a JSON object"));
    FSDP_TRY(enter(s));
    if (peek(s) == '}') {
        s->p++;
    } else {
        for (;;) {
            FSDP_TRY(string(s, &name, "the name of a tensor in quotes"));
            FSDP_TRY(take(s, ':', "':'"));
            if (name.len == 12 && !memcmp(name.p, "__metadata__", 12)) {
                if (metadata)
                    return fsdp__fail(FSDP_INVALID_DATA,
                                      "%s: found __metadata__ twice, expected it at most once",
                                      s->path);
                metadata = true;
                FSDP_TRY(parse_metadata(s, h));
            } else {
                FSDP_TRY(parse_entry(s, h, name));
            }
            if (peek(s) == '}') break;
            FSDP_TRY(take(s, ',', "',' or '}'"));
        }
        s->p++;
    }
    peek(s);
    if (s->p < s->end)
        return bad_json(s, s->p, "only blanks (space, tab, line feed) behind the JSON object");
    return FSDP_OK;
}

/* Pointers to shapes are set at the end, when the pool does not move any more. */
fsdp_status fsdp__st_header_parse(fsdp__st_header *h, size_t n, const char *path)
{
    size_t good = fsdp__utf8_check(h->text, n);
    if (good != n)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: header byte %zu: found the byte 0x%02x, expected UTF-8 text", path,
                          8 + good, (unsigned)(unsigned char)h->text[good]);
    scan s = {.begin = h->text, .p = h->text, .end = h->text + n, .path = path};
    h->by_name = fsdp__map_create();
    if (!h->by_name) return FSDP_NO_MEMORY;
    FSDP_TRY(parse_all(&s, h));
    h->sorted = fsdp__calloc((size_t)h->n, sizeof *h->sorted, "tensors of a header");
    if (!h->sorted) return FSDP_NO_MEMORY;
    for (int64_t i = 0; i < h->n; i++) {
        h->items[i].t.shape = h->shapes + h->items[i].shape_at;
        h->sorted[i] = &h->items[i];
    }
    return FSDP_OK;
}

static int by_range(const void *a, const void *b)
{
    const fsdp__st_item *x = *(fsdp__st_item *const *)a, *y = *(fsdp__st_item *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    if (x->end != y->end) return x->end < y->end ? -1 : 1;
    return x < y ? -1 : x > y; /* order of the header, so the result is always the same */
}

/* Product of sizes, element and byte counts of one tensor against its range. */
static fsdp_status check_size(fsdp__st_item *it, const char *path, const char *name)
{
    uint64_t numel = 1, bits;
    for (int d = 0; d < it->t.ndim; d++)
        if (__builtin_mul_overflow(numel, (uint64_t)it->t.shape[d], &numel))
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: tensor '%s': found a shape whose product does not fit 64 bits "
                              "(at dim %d), expected a smaller one",
                              path, name, d);
    if (__builtin_mul_overflow(numel, (uint64_t)it->dtype->bits, &bits))
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: tensor '%s': found %llu elements of %d bits, expected a size that "
                          "fits 64 bits",
                          path, name, (unsigned long long)numel, it->dtype->bits);
    if (bits % 8)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: tensor '%s': found %llu elements of %s (%d bits), expected a number "
                          "that fills whole bytes",
                          path, name, (unsigned long long)numel, it->dtype->name, it->dtype->bits);
    if (it->end - it->begin != bits / 8)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: tensor '%s': found %llu bytes (data_offsets %llu to %llu), expected "
                          "%llu for %llu elements of %s",
                          path, name, (unsigned long long)(it->end - it->begin),
                          (unsigned long long)it->begin, (unsigned long long)it->end,
                          (unsigned long long)(bits / 8), (unsigned long long)numel,
                          it->dtype->name);
    it->t.numel = (int64_t)numel; /* at most 2 * 2^63 / 8: a byte has at most two elements */
    return FSDP_OK;
}

/* Sorted by their begin, the ranges must follow each other without gap from 0 to the end of the
 * file: this one walk finds holes, overlaps, aliases and a wrong file size. Zero-size tensors
 * may share an offset. */
fsdp_status fsdp__st_header_check(fsdp__st_header *h, size_t n, int64_t file_size, const char *path)
{
    uint64_t room = (uint64_t)file_size - 8 - n, at = 0;
    if (h->n) qsort(h->sorted, (size_t)h->n, sizeof *h->sorted, by_range);
    for (int64_t i = 0; i < h->n; i++) {
        fsdp__st_item *it = h->sorted[i];
        fsdp__shown name = fsdp__show(it->t.name, it->t.name_len);
        if (it->begin != at) {
            const char *gap = it->begin > at ? "a hole" : "an overlap";
            if (!i)
                return fsdp__fail(FSDP_INVALID_DATA,
                                  "%s: tensor '%s': found data from byte %llu on, expected 0, the "
                                  "first byte behind the header: %s",
                                  path, name.text, (unsigned long long)it->begin, gap);
            const fsdp__st_tensor *t = &h->sorted[i - 1]->t;
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: tensor '%s': found data from byte %llu on, expected %llu, the "
                              "end of the tensor before it, '%s': %s",
                              path, name.text, (unsigned long long)it->begin,
                              (unsigned long long)at, fsdp__show(t->name, t->name_len).text, gap);
        }
        if (it->end < it->begin)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: tensor '%s': found data_offsets %llu to %llu, expected an end "
                              "that is not before the begin",
                              path, name.text, (unsigned long long)it->begin,
                              (unsigned long long)it->end);
        FSDP_TRY(check_size(it, path, name.text));
        at = it->end;
    }
    if (at != room)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: found %lld bytes, expected %llu (8 + header %zu + data %llu): the "
                          "file is %s; get it again",
                          path, (long long)file_size, (unsigned long long)(at + 8 + n), n,
                          (unsigned long long)at,
                          at > room ? "truncated" : "longer than its header says");
    for (int64_t i = 0; i < h->n; i++) {
        h->items[i].t.offset = (int64_t)(8 + n + h->items[i].begin);
        h->items[i].t.bytes = (int64_t)(h->items[i].end - h->items[i].begin);
    }
    return FSDP_OK;
}

void fsdp__st_header_free(fsdp__st_header *h)
{
    free(h->sorted);
    fsdp__map_free(h->by_name);
    free(h->meta);
    free(h->shapes);
    free(h->items);
    free(h->text);
    *h = (fsdp__st_header){0};
}
