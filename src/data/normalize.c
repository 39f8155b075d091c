/*
 * normalize.c - the normalizers: Unicode forms, prefixes, replacements.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/error.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"

static bool is_ascii(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] >= 0x80) return false;
    return true;
}

static fsdp_status unicode_form(fsdp__tok_kind kind, const char *s, size_t n, fsdp__str *out)
{
    /* ASCII is what it is in each of the four forms. */
    if (is_ascii(s, n)) {
        fsdp__str_add_n(out, s, n);
        return FSDP_OK;
    }
    bool compose = kind == FSDP__TOK_NFC || kind == FSDP__TOK_NFKC;
    bool compatible = kind == FSDP__TOK_NFKC || kind == FSDP__TOK_NFKD;
    int options = UTF8PROC_STABLE | (compose ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                  (compatible ? UTF8PROC_COMPAT : 0);
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t len = utf8proc_map((const utf8proc_uint8_t *)s, (utf8proc_ssize_t)n, &made,
                                        (utf8proc_option_t)options);
    if (len < 0)
        return fsdp__fail(len == UTF8PROC_ERROR_NOMEM ? FSDP_NO_MEMORY : FSDP_INVALID_DATA,
                          "tokenizer: normalizing %zu bytes to %s failed: %s", n,
                          fsdp__tok_kind_name(kind), utf8proc_errmsg(len));
    fsdp__str_add_n(out, made, (size_t)len);
    free(made);
    return FSDP_OK;
}

static void lowercase(const char *s, size_t n, fsdp__str *out)
{
    size_t len;
    for (size_t i = 0; i < n; i += len) {
        uint32_t c = fsdp__utf8_get(s + i, &len);
        if (c == 0x130) /* the one letter whose lower case is two characters */
            fsdp__str_add(out, "i\xcc\x87");
        else
            fsdp__utf8_add(out, (uint32_t)utf8proc_tolower((utf8proc_int32_t)c));
    }
}

static void strip(const fsdp__tok_step *step, const char *s, size_t n, fsdp__str *out)
{
    size_t len, start = 0, end = 0;
    while (step->left && start < n && fsdp__char_is_space(fsdp__utf8_get(s + start, &len)))
        start += len;
    /* The end of the last character that stays. */
    for (size_t i = start; i < n; i += len)
        if (!fsdp__char_is_space(fsdp__utf8_get(s + i, &len)) || !step->right) end = i + len;
    if (end > start) fsdp__str_add_n(out, s + start, end - start);
}

int fsdp__tok_find(const fsdp__tok_step *s, const char *text, size_t n, size_t from, size_t *start,
                   size_t *end)
{
    if (s->regex) return fsdp__regex_find(s->regex, text, n, from, start, end);
    const char *p = from < n ? memmem(text + from, n - from, s->literal, s->literal_len) : NULL;
    if (!p) return 0;
    *start = (size_t)(p - text);
    *end = *start + s->literal_len;
    return 1;
}

fsdp_status fsdp__tok_replace(const fsdp__tok_step *s, const char *text, size_t n, fsdp__str *out)
{
    size_t done = 0, from = 0, start, end;
    int found = 0;
    while (from <= n && (found = fsdp__tok_find(s, text, n, from, &start, &end)) == 1) {
        if (start == end && start == done && done > 0) { /* no empty match right after a match */
            if (from >= n) break;
            from += fsdp__utf8_len(text[from]);
            continue;
        }
        fsdp__str_add_n(out, text + done, start - done);
        fsdp__str_add_n(out, s->text, s->text_len);
        done = from = end;
        if (start == end) {
            if (end >= n) break;
            from += fsdp__utf8_len(text[end]);
        }
    }
    if (found < 0) return fsdp_error();
    fsdp__str_add_n(out, text + done, n - done);
    return FSDP_OK;
}

static fsdp_status one_step(const fsdp__tok_step *step, const char *s, size_t n, fsdp__str *out)
{
    switch (step->kind) {
    case FSDP__TOK_NFC:
    case FSDP__TOK_NFD:
    case FSDP__TOK_NFKC:
    case FSDP__TOK_NFKD:
        return unicode_form(step->kind, s, n, out);
    case FSDP__TOK_LOWERCASE:
        lowercase(s, n, out);
        return FSDP_OK;
    case FSDP__TOK_PREPEND:
        if (n > 0) fsdp__str_add_n(out, step->text, step->text_len);
        fsdp__str_add_n(out, s, n);
        return FSDP_OK;
    case FSDP__TOK_REPLACE:
        return fsdp__tok_replace(step, s, n, out);
    case FSDP__TOK_STRIP:
        strip(step, s, n, out);
        return FSDP_OK;
    default:
        return fsdp__fail(FSDP_INTERNAL, "tokenizer: %s is no normalizer",
                          fsdp__tok_kind_name(step->kind));
    }
}

/* True if the step takes characters off the start of s (n). */
static bool drops_start(const fsdp__tok_step *step, const char *s, size_t n)
{
    size_t start, end, len;
    if (n == 0) return false;
    if (step->kind == FSDP__TOK_STRIP)
        return step->left && fsdp__char_is_space(fsdp__utf8_get(s, &len));
    return step->kind == FSDP__TOK_REPLACE && step->text_len == 0 &&
           fsdp__tok_find(step, s, n, 0, &start, &end) == 1 && start == 0 && end > 0;
}

fsdp_status fsdp__normalize(const fsdp__tok_steps *steps, const char *text, size_t n,
                            fsdp__str *out, bool *dropped)
{
    fsdp__str now = {0}, next = {0};
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < steps->count; i++) {
        bool last = i == steps->count - 1;
        fsdp__str *to = last ? out : &next;
        const char *from = i ? fsdp__str_get(&now) : text;
        size_t len = i ? now.len : n;
        if (dropped && drops_start(&steps->items[i], from, len)) *dropped = true;
        FSDP_GO(one_step(&steps->items[i], from, len, to));
        if (to->failed) {
            s = fsdp__fail_memory("normalized text", n);
            goto done;
        }
        fsdp__str old = now;
        now = next;
        next = old;
        next.len = 0;
    }
    if (steps->count == 0) fsdp__str_add_n(out, text, n);
    if (out->failed) s = fsdp__fail_memory("normalized text", n);
done:
    fsdp__str_free(&now);
    fsdp__str_free(&next);
    return s;
}
