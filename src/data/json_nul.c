/*
 * json_nul.c - JSON whose object keys hold NUL characters.
 *
 * Vocabularies have the key "\u0000", which jansson refuses. So the escape is
 * rewritten before parsing to that of a noncharacter which the file does not
 * use (same length: places in messages stay true), and put back afterwards:
 * in values here, in keys by whoever reads them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"
#include "format/file.h"
#include "format/json.h"

/* Next escape \uXXXX of text (n) from *at on whose digits are `code`; moves *at behind it. */
static char *next_escape(char *text, size_t n, size_t *at, unsigned code)
{
    while (*at < n) {
        char *p = memchr(text + *at, '\\', n - *at);
        size_t left = p ? n - (size_t)(p - text) : 0;
        if (left < 6) return NULL;
        *at = (size_t)(p - text) + 2;
        if (p[1] != 'u') continue;
        char digits[5] = {p[2], p[3], p[4], p[5], 0}, *end;
        if (strtoul(digits, &end, 16) == code && end == digits + 4) return p;
    }
    return NULL;
}

/* A noncharacter U+FDD0..U+FDEF that the text does not use; 0 if it uses all. */
static unsigned free_mark(char *text, size_t n)
{
    for (unsigned c = 0xfdd0; c <= 0xfdef; c++) {
        fsdp__str bytes = {0};
        size_t at = 0;
        fsdp__utf8_add(&bytes, c);
        bool used =
            bytes.failed || memmem(text, n, bytes.p, bytes.len) || next_escape(text, n, &at, c);
        fsdp__str_free(&bytes);
        if (!used) return c;
    }
    return 0;
}

size_t fsdp__unmark(char *s, size_t n, const char *mark)
{
    size_t k = strlen(mark), from = 0, to = 0;
    if (k == 0) return n;
    while (from < n) {
        bool hit = n - from >= k && memcmp(s + from, mark, k) == 0;
        s[to++] = hit ? 0 : s[from];
        from += hit ? k : 1;
    }
    s[to] = 0;
    return to;
}

static fsdp_status unmark_values(json_t *v, const char *mark)
{
    json_t *child;
    const char *key;
    size_t i;
    if (json_is_string(v) && memmem(json_string_value(v), json_string_length(v), mark, 3)) {
        size_t n = json_string_length(v);
        fsdp__str s = {0};
        fsdp__str_add_n(&s, json_string_value(v), n);
        bool failed = s.failed || json_string_setn_nocheck(v, s.p, fsdp__unmark(s.p, n, mark)) != 0;
        fsdp__str_free(&s);
        return failed ? fsdp__fail_memory("text of a JSON file", n) : FSDP_OK;
    }
    if (json_is_array(v))
        json_array_foreach(v, i, child) FSDP_TRY(unmark_values(child, mark));
    else if (json_is_object(v))
        json_object_foreach(v, key, child) FSDP_TRY(unmark_values(child, mark));
    return FSDP_OK;
}

json_t *fsdp__json_load_nul(const char *path, char mark[4])
{
    char *text = NULL, *p;
    size_t n, at = 0;
    json_t *root = NULL;
    mark[0] = 0;
    if (fsdp__file_read(path, &text, &n) != FSDP_OK) return NULL;
    if (next_escape(text, n, &at, 0)) {
        unsigned c = free_mark(text, n);
        for (at = 0; c && (p = next_escape(text, n, &at, 0));) {
            char digits[5];
            snprintf(digits, sizeof digits, "%04x", c & 0xffffu);
            memcpy(p + 2, digits, 4);
        }
        mark[0] = (char)(c ? 0xef : 0);
        mark[1] = (char)(0x80 | (c >> 6 & 0x3f));
        mark[2] = (char)(0x80 | (c & 0x3f));
        mark[3] = 0;
    }
    root = fsdp__json_parse(text, n, path);
    free(text);
    if (root && mark[0] && unmark_values(root, mark) != FSDP_OK) {
        json_decref(root);
        root = NULL;
    }
    return root;
}
