/*
 * pretokenize.c - the pre-tokenizers: they cut pieces, and rewrite some.
 *
 * Each step reads the list of pieces and makes a new one. Steps that only cut
 * keep the text; Metaspace and ByteLevel write a new text. A piece's `first`
 * says that it begins where the document does, which Metaspace asks.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"

/* ---- matches of one piece ----------------------------------------------------- */

typedef struct span {
    size_t start, end;
    bool match; /* after the cut is applied: to be removed */
} span;

typedef struct spans {
    span *items;
    int64_t count, cap;
} spans;

static fsdp_status add_span(spans *v, size_t start, size_t end, bool match)
{
    if (v->count == v->cap) FSDP_TRY(FSDP__GROW(v->items, v->cap, v->count + 1, "spans of text"));
    v->items[v->count++] = (span){start, end, match};
    return FSDP_OK;
}

/* Matches and what lies between them, in order, covering the piece. */
static fsdp_status find_pattern(const fsdp__tok_step *step, const char *s, size_t n, spans *out)
{
    size_t done = 0, from = 0, start, end;
    int found = 0;
    while (from <= n && (found = fsdp__tok_find(step, s, n, from, &start, &end)) == 1) {
        /* An empty match cuts, but not right behind a match: the search would stand still. */
        bool stuck = start == end && start == done && from > 0;
        if (!stuck) {
            if (done != start) FSDP_TRY(add_span(out, done, start, step->invert));
            FSDP_TRY(add_span(out, start, end, !step->invert));
            done = end;
        }
        from = end;
        if (start == end) {
            if (end >= n) break;
            from += fsdp__utf8_len(s[end]);
        }
    }
    if (found < 0) return fsdp_error();
    return done != n ? add_span(out, done, n, step->invert) : FSDP_OK;
}

static fsdp_status find_chars(const char *s, size_t n, bool (*is)(uint32_t), spans *out)
{
    size_t done = 0, len;
    for (size_t i = 0; i < n; i += len) {
        if (!is(fsdp__utf8_get(s + i, &len))) continue;
        if (done < i) FSDP_TRY(add_span(out, done, i, false));
        FSDP_TRY(add_span(out, i, i + len, true));
        done = i + len;
    }
    return done < n ? add_span(out, done, n, false) : FSDP_OK;
}

/* Joins spans as the cut says; what stays marked is removed. */
static void apply_cut(spans *v, fsdp__tok_cut cut)
{
    if (cut == FSDP__CUT_REMOVED) return;
    int64_t n = v->count, made = 0;
    bool before = false; /* was the neighbour looked at last a match? */
    if (cut == FSDP__CUT_MERGED_WITH_NEXT) {
        /* From the end: a match joins what follows it, unless that is a match too. */
        made = n;
        for (int64_t i = n - 1; i >= 0; i--) {
            span x = v->items[i];
            if (x.match && !before && made < n)
                v->items[made].start = x.start;
            else
                v->items[--made] = (span){x.start, x.end, false};
            before = x.match;
        }
        memmove(v->items, v->items + made, (size_t)(n - made) * sizeof *v->items);
        v->count = n - made;
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        span x = v->items[i];
        bool join = (cut == FSDP__CUT_MERGED_WITH_PREVIOUS && x.match && !before) ||
                    (cut == FSDP__CUT_CONTIGUOUS && x.match == before);
        if (join && made > 0)
            v->items[made - 1].end = x.end;
        else
            v->items[made++] = (span){x.start, x.end, false};
        before = x.match;
    }
    v->count = made;
}

static fsdp_status add_spans(const spans *v, const fsdp__piece *p, size_t base, fsdp__pieces *out)
{
    for (int64_t i = 0; i < v->count; i++) {
        span x = v->items[i];
        if (x.match) continue;
        FSDP_TRY(
            fsdp__pieces_add(out, base + x.start, x.end - x.start, -1, p->first && x.start == 0));
    }
    return FSDP_OK;
}

/* ---- steps that only cut --------------------------------------------------------- */

static fsdp_status cut_piece(const fsdp__tok_step *step, const char *s, const fsdp__piece *p,
                             spans *v, fsdp__pieces *out)
{
    fsdp__tok_cut cut = step->cut;
    v->count = 0;
    switch (step->kind) {
    case FSDP__TOK_SPLIT:
        FSDP_TRY(find_pattern(step, s + p->start, p->len, v));
        break;
    case FSDP__TOK_DIGITS:
        FSDP_TRY(find_chars(s + p->start, p->len, fsdp__char_is_numeric, v));
        cut = step->individual ? FSDP__CUT_ISOLATED : FSDP__CUT_CONTIGUOUS;
        break;
    case FSDP__TOK_PUNCTUATION:
        FSDP_TRY(find_chars(s + p->start, p->len, fsdp__char_is_punctuation, v));
        break;
    case FSDP__TOK_WHITESPACE_SPLIT:
        FSDP_TRY(find_chars(s + p->start, p->len, fsdp__char_is_space, v));
        cut = FSDP__CUT_REMOVED;
        break;
    default:
        return fsdp__fail(FSDP_INTERNAL, "tokenizer: %s is no pre-tokenizer",
                          fsdp__tok_kind_name(step->kind));
    }
    apply_cut(v, cut);
    return add_spans(v, p, p->start, out);
}

/* ---- Metaspace --------------------------------------------------------------------- */

/* Each blank becomes the mark; one more is put in front as `prepend` says. With split, each mark
 * begins a piece. */
static fsdp_status metaspace(const fsdp__tok_step *step, const char *s, const fsdp__piece *p,
                             spans *v, fsdp__pieces *out)
{
    fsdp__str *to = &out->text;
    size_t base = to->len;
    bool asked =
        step->prepend == FSDP__PREPEND_ALWAYS || (step->prepend == FSDP__PREPEND_FIRST && p->first);
    bool marked = s[p->start] == ' ' || (p->len >= step->text_len &&
                                         memcmp(s + p->start, step->text, step->text_len) == 0);
    if (asked && !marked) fsdp__str_add_n(to, step->text, step->text_len);
    for (size_t i = p->start, end = p->start + p->len; i < end;) {
        const char *blank = memchr(s + i, ' ', end - i);
        size_t stop = blank ? (size_t)(blank - s) : end;
        fsdp__str_add_n(to, s + i, stop - i);
        if (blank) fsdp__str_add_n(to, step->text, step->text_len);
        i = stop + (blank != NULL);
    }
    if (to->failed) return FSDP_OK;
    if (!step->split) return fsdp__pieces_add(out, base, to->len - base, -1, p->first);
    fsdp__tok_step mark = {
        .kind = FSDP__TOK_SPLIT, .literal = step->text, .literal_len = step->text_len};
    v->count = 0;
    FSDP_TRY(find_pattern(&mark, to->p + base, to->len - base, v));
    apply_cut(v, FSDP__CUT_MERGED_WITH_NEXT);
    return add_spans(v, p, base, out);
}

/* ---- ByteLevel --------------------------------------------------------------------- */

static void add_byte_chars(fsdp__str *to, const char *s, size_t n)
{
    /* At most two bytes a byte: written in runs through a small buffer. */
    char run[512];
    size_t k = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t c = fsdp__byte_char((unsigned char)s[i]);
        if (c < 0x80) {
            run[k++] = (char)c;
        } else {
            run[k++] = (char)(0xc0 | c >> 6);
            run[k++] = (char)(0x80 | (c & 0x3f));
        }
        if (k > sizeof run - 2) {
            fsdp__str_add_n(to, run, k);
            k = 0;
        }
    }
    fsdp__str_add_n(to, run, k);
}

/* Cuts by GPT-2's expression, then writes each byte as its printable character. */
static fsdp_status byte_level(const fsdp__tok_step *step, const char *s, const fsdp__piece *p,
                              spans *v, fsdp__str *spaced, fsdp__pieces *out)
{
    const char *text = s + p->start;
    size_t n = p->len;
    if (step->prefix_space && text[0] != ' ') {
        spaced->len = 0;
        fsdp__str_add(spaced, " ");
        fsdp__str_add_n(spaced, text, n);
        if (spaced->failed) return fsdp__fail_memory("text", n);
        text = spaced->p;
        n = spaced->len;
    }
    v->count = 0;
    if (step->regex)
        FSDP_TRY(find_pattern(step, text, n, v));
    else
        FSDP_TRY(add_span(v, 0, n, false));
    for (int64_t i = 0; i < v->count; i++) {
        span x = v->items[i];
        size_t base = out->text.len;
        add_byte_chars(&out->text, text + x.start, x.end - x.start);
        FSDP_TRY(fsdp__pieces_add(out, base, out->text.len - base, -1, p->first && x.start == 0));
    }
    return FSDP_OK;
}

/* ---- all ----------------------------------------------------------------------------- */

static fsdp_status one_step(const fsdp__tok_step *step, fsdp__pieces *now, spans *v,
                            fsdp__str *spaced, fsdp__pieces *next)
{
    bool rewrites = step->kind == FSDP__TOK_METASPACE || step->kind == FSDP__TOK_BYTE_LEVEL;
    const char *s = fsdp__str_get(&now->text);
    next->count = 0;
    next->text.len = 0;
    for (int64_t i = 0; i < now->count; i++) {
        const fsdp__piece *p = &now->items[i];
        if (p->id >= 0)
            FSDP_TRY(fsdp__pieces_add(next, 0, 0, p->id, false));
        else if (step->kind == FSDP__TOK_METASPACE)
            FSDP_TRY(metaspace(step, s, p, v, next));
        else if (step->kind == FSDP__TOK_BYTE_LEVEL)
            FSDP_TRY(byte_level(step, s, p, v, spaced, next));
        else
            FSDP_TRY(cut_piece(step, s, p, v, next));
    }
    if (next->text.failed) return fsdp__fail_memory("text", now->text.len);
    if (!rewrites) { /* the pieces still lie in the old text */
        fsdp__str old = next->text;
        next->text = now->text;
        now->text = old;
    }
    return FSDP_OK;
}

fsdp_status fsdp__pretokenize(const fsdp__tok_steps *steps, fsdp__pieces *pieces)
{
    fsdp__pieces next = {0};
    spans v = {0};
    fsdp__str spaced = {0};
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < steps->count; i++) {
        FSDP_GO(one_step(&steps->items[i], pieces, &v, &spaced, &next));
        fsdp__pieces old = *pieces;
        *pieces = next;
        next = old;
    }
done:
    fsdp__pieces_free(&next);
    fsdp__str_free(&spaced);
    free(v.items);
    return s;
}
