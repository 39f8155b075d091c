/*
 * decode.c - the decoders: from tokens back to text.
 *
 * A list of strings goes through the steps; ByteFallback and Fuse make it
 * shorter. What is left is joined.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"

/* Strings one after another in one text; string i ends at ends[i]. */
typedef struct list {
    fsdp__str text;
    size_t *ends;
    int64_t count, cap;
} list;

static void list_clear(list *l)
{
    l->text.len = 0;
    l->count = 0;
}

static void list_free(list *l)
{
    fsdp__str_free(&l->text);
    free(l->ends);
}

/* Ends the string whose bytes were appended to the text. */
static fsdp_status list_end(list *l)
{
    if (l->count == l->cap) FSDP_TRY(FSDP__GROW(l->ends, l->cap, l->count + 1, "decoded tokens"));
    l->ends[l->count++] = l->text.len;
    return FSDP_OK;
}

static const char *list_get(const list *l, int64_t i, size_t *n)
{
    size_t start = i > 0 ? l->ends[i - 1] : 0;
    *n = l->ends[i] - start;
    return fsdp__str_get(&l->text) + start;
}

/* A token whose characters all stand for bytes gives those; any other its own text. */
static void add_token_bytes(fsdp__str *out, const char *s, size_t n)
{
    size_t len, start = out->len;
    for (size_t i = 0; i < n; i += len) {
        int b = fsdp__char_byte(fsdp__utf8_get(s + i, &len));
        if (b < 0) {
            out->len = start;
            fsdp__str_add_n(out, s, n);
            return;
        }
        fsdp__str_add_n(out, (char[]){(char)b}, 1);
    }
}

static fsdp_status byte_level(const list *in, bool raw, list *out)
{
    fsdp__str bytes = {0};
    for (int64_t i = 0; i < in->count; i++) {
        size_t n;
        const char *s = list_get(in, i, &n);
        add_token_bytes(&bytes, s, n);
    }
    if (raw)
        fsdp__str_add_n(&out->text, bytes.p, bytes.len);
    else
        fsdp__utf8_add_lossy(&out->text, fsdp__str_get(&bytes), bytes.len);
    bool failed = bytes.failed;
    fsdp__str_free(&bytes);
    return failed ? fsdp__fail_memory("decoded text", 0) : list_end(out);
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    return -1;
}

/* The byte of a token <0xNN>, or -1. */
static int fallback_byte(const char *s, size_t n)
{
    if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>') return -1;
    int high = hex_digit(s[3]), low = hex_digit(s[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

/* Ends a run of byte tokens: the text they spell, or one U+FFFD for each byte. */
static fsdp_status end_bytes(fsdp__str *bytes, bool raw, list *out)
{
    if (bytes->len == 0) return FSDP_OK;
    if (raw || fsdp__utf8_valid(bytes->p, bytes->len) == bytes->len)
        fsdp__str_add_n(&out->text, bytes->p, bytes->len);
    else
        for (size_t i = 0; i < bytes->len; i++)
            fsdp__str_add(&out->text, "\xef\xbf\xbd");
    bytes->len = 0;
    return list_end(out);
}

static fsdp_status byte_fallback(const list *in, bool raw, list *out)
{
    fsdp__str bytes = {0};
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < in->count; i++) {
        size_t n;
        const char *token = list_get(in, i, &n);
        int b = fallback_byte(token, n);
        if (b >= 0) {
            fsdp__str_add_n(&bytes, (char[]){(char)b}, 1);
            continue;
        }
        FSDP_GO(end_bytes(&bytes, raw, out));
        fsdp__str_add_n(&out->text, token, n);
        FSDP_GO(list_end(out));
    }
    s = end_bytes(&bytes, raw, out);
    if (bytes.failed) s = fsdp__fail_memory("decoded text", 0);
done:
    fsdp__str_free(&bytes);
    return s;
}

/* Without up to `start` of the step's character in front and `stop` behind. */
static void strip(const fsdp__tok_step *step, const char *s, size_t n, fsdp__str *out)
{
    size_t k = step->text_len, from = 0, to = n;
    for (int64_t i = 0; i < step->start && to - from >= k; i++) {
        if (memcmp(s + from, step->text, k) != 0) break;
        from += k;
    }
    for (int64_t i = 0; i < step->stop && to - from >= k; i++) {
        if (memcmp(s + to - k, step->text, k) != 0) break;
        to -= k;
    }
    fsdp__str_add_n(out, s + from, to - from);
}

/* The mark becomes a blank, and nothing in the first token unless none was put there. */
static void metaspace(const fsdp__tok_step *step, const char *s, size_t n, bool first,
                      fsdp__str *out)
{
    size_t k = step->text_len;
    for (size_t i = 0; i < n;) {
        if (n - i >= k && memcmp(s + i, step->text, k) == 0) {
            if (!first || step->prepend == FSDP__PREPEND_NEVER) fsdp__str_add(out, " ");
            i += k;
        } else {
            fsdp__str_add_n(out, s + i++, 1);
        }
    }
}

static fsdp_status one_step(const fsdp__tok_step *step, const list *in, bool raw, list *out)
{
    if (step->kind == FSDP__TOK_BYTE_LEVEL) return byte_level(in, raw, out);
    if (step->kind == FSDP__TOK_BYTE_FALLBACK) return byte_fallback(in, raw, out);
    if (step->kind == FSDP__TOK_FUSE) {
        fsdp__str_add_n(&out->text, in->text.p, in->text.len);
        return list_end(out);
    }
    for (int64_t i = 0; i < in->count; i++) {
        size_t n;
        const char *s = list_get(in, i, &n);
        /* PCRE2 must not see bytes that form no character, which raw texts may hold. */
        if (step->kind == FSDP__TOK_REPLACE && step->regex && raw && fsdp__utf8_valid(s, n) != n)
            fsdp__str_add_n(&out->text, s, n);
        else if (step->kind == FSDP__TOK_REPLACE)
            FSDP_TRY(fsdp__tok_replace(step, s, n, &out->text));
        else if (step->kind == FSDP__TOK_STRIP)
            strip(step, s, n, &out->text);
        else if (step->kind == FSDP__TOK_METASPACE)
            metaspace(step, s, n, i == 0, &out->text);
        else
            return fsdp__fail(FSDP_INTERNAL, "tokenizer: %s is no decoder",
                              fsdp__tok_kind_name(step->kind));
        FSDP_TRY(list_end(out));
    }
    return FSDP_OK;
}

fsdp_status fsdp__decode(const fsdp__tok_steps *steps, const fsdp__token *tokens, int64_t n,
                         bool raw, fsdp__str *out)
{
    list now = {0}, next = {0};
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < n; i++) {
        /* Without any decoder the tokens are joined by blanks. */
        if (steps->count == 0 && i > 0) fsdp__str_add(&now.text, " ");
        fsdp__str_add_n(&now.text, tokens[i].p, tokens[i].n);
        FSDP_GO(list_end(&now));
    }
    for (int64_t i = 0; i < steps->count; i++) {
        list_clear(&next);
        FSDP_GO(one_step(&steps->items[i], &now, raw, &next));
        list old = now;
        now = next;
        next = old;
    }
    fsdp__str_add_n(out, now.text.p, now.text.len);
    if (now.text.failed || next.text.failed || out->failed)
        s = fsdp__fail_memory("decoded text", now.text.len);
done:
    list_free(&now);
    list_free(&next);
    return s;
}
