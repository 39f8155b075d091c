/*
 * added.c - finding added tokens in a text: leftmost, then longest, never
 * overlapping.
 *
 * Tokens are chained by their first byte, the longest first, so a text
 * without that byte costs one look-up a byte.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"

fsdp_status fsdp__pieces_add(fsdp__pieces *p, size_t start, size_t len, int32_t id, bool first)
{
    if (len == 0 && id < 0) return FSDP_OK;
    if (p->count == p->cap) FSDP_TRY(FSDP__GROW(p->items, p->cap, p->count + 1, "pieces of text"));
    p->items[p->count++] = (fsdp__piece){start, len, id, first};
    return FSDP_OK;
}

void fsdp__pieces_free(fsdp__pieces *p)
{
    fsdp__str_free(&p->text);
    free(p->items);
    *p = (fsdp__pieces){0};
}

/* What is looked for: the content as written, or as the normalizer makes it. */
static fsdp_status match_text(const fsdp_tokenizer *t, fsdp__added *a)
{
    fsdp__str s = {0};
    if (a->normalized) {
        fsdp_status status = fsdp__normalize(&t->normalizer, a->text, a->text_len, &s, NULL);
        if (status != FSDP_OK) {
            fsdp__str_free(&s);
            return status;
        }
    } else {
        fsdp__str_add_n(&s, a->text, a->text_len);
    }
    a->match_len = s.len;
    a->match = fsdp__str_take(&s);
    return a->match ? FSDP_OK : fsdp_error();
}

/* Puts token i into the chain of its first byte, before the first shorter one. */
static void chain_in(fsdp_tokenizer *t, int32_t i)
{
    const fsdp__added *a = &t->added[i];
    int kind = a->normalized;
    if (a->match_len == 0) return;
    int32_t *link = &t->first[kind][(unsigned char)a->match[0]];
    while (*link >= 0 && t->added[*link].match_len >= a->match_len)
        link = &t->next[kind][*link];
    t->next[kind][i] = *link;
    *link = i;
}

fsdp_status fsdp__added_index(fsdp_tokenizer *t)
{
    for (int k = 0; k < 2; k++) {
        for (int b = 0; b < 256; b++)
            t->first[k][b] = -1;
        t->next[k] = fsdp__calloc((size_t)t->added_count, sizeof **t->next, "added tokens");
        if (!t->next[k]) return fsdp_error();
    }
    bool word = false;
    for (int64_t i = 0; i < t->added_count; i++) {
        FSDP_TRY(match_text(t, &t->added[i]));
        chain_in(t, (int32_t)i);
        word = word || t->added[i].single_word;
    }
    if (!word) return FSDP_OK;
    static const char letters[] = "[\\w\\p{Join_Control}]";
    t->word = fsdp__regex_create(letters, sizeof letters - 1, "single_word");
    return t->word ? FSDP_OK : fsdp_error();
}

/* The longest token at s (n), or NULL. */
static const fsdp__added *token_at(const fsdp_tokenizer *t, bool normalized, const char *s,
                                   size_t n)
{
    int32_t i = t->first[normalized][(unsigned char)*s];
    for (; i >= 0; i = t->next[normalized][i]) {
        const fsdp__added *a = &t->added[i];
        if (a->match_len <= n && memcmp(a->match, s, a->match_len) == 0) return a;
    }
    return NULL;
}

/* Start of the character that ends at byte `end` > 0 of s. */
static size_t char_before(const char *s, size_t end)
{
    do
        end--;
    while (end > 0 && ((unsigned char)s[end] & 0xc0) == 0x80);
    return end;
}

/* 1 if the character at s is one of a word, 0 if not, -1 with the error kept. */
static int is_word(const fsdp_tokenizer *t, const char *s)
{
    size_t start, end;
    return fsdp__regex_find(t->word, s, fsdp__utf8_len(*s), 0, &start, &end);
}

/* 1 if the token at [start, end) of s (n) stands alone, as single_word asks. */
static int stands_alone(const fsdp_tokenizer *t, const char *s, size_t n, size_t start, size_t end)
{
    int before = start > 0 ? is_word(t, s + char_before(s, start)) : 0;
    int after = end < n ? is_word(t, s + end) : 0;
    if (before < 0 || after < 0) return -1;
    return !before && !after;
}

static size_t spaces_before(const char *s, size_t start)
{
    size_t len;
    while (start > 0) {
        size_t at = char_before(s, start);
        if (!fsdp__char_is_space(fsdp__utf8_get(s + at, &len))) break;
        start = at;
    }
    return start;
}

static size_t spaces_after(const char *s, size_t n, size_t end)
{
    size_t len;
    while (end < n && fsdp__char_is_space(fsdp__utf8_get(s + end, &len)))
        end += len;
    return end;
}

fsdp_status fsdp__added_split(const fsdp_tokenizer *t, bool normalized, const char *text, size_t n,
                              size_t base, bool first, fsdp__pieces *out)
{
    size_t done = 0; /* what the pieces cover so far */
    for (size_t i = 0; i < n;) {
        const fsdp__added *a = token_at(t, normalized, text + i, n - i);
        if (!a) {
            i++;
            continue;
        }
        size_t start = i, end = i + a->match_len;
        i = end;
        if (a->single_word) {
            int alone = stands_alone(t, text, n, start, end);
            if (alone < 0) return fsdp_error();
            if (!alone) continue;
        }
        if (a->lstrip) start = spaces_before(text, start);
        if (start < done) start = done; /* blanks that the token before took */
        if (a->rstrip) end = spaces_after(text, n, end);
        FSDP_TRY(fsdp__pieces_add(out, base + done, start - done, -1, first && done == 0));
        FSDP_TRY(fsdp__pieces_add(out, base + start, end - start, a->id, false));
        done = end;
    }
    return fsdp__pieces_add(out, base + done, n - done, -1, first && done == 0);
}
