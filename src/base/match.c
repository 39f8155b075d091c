/*
 * match.c - patterns of names. See match.h.
 */
#include "base/match.h"

#include <stddef.h>
#include <string.h>

/* Of the part of a pattern in front of a bar. */
typedef struct span {
    const char *at, *end;
} span;

/* The end of the set that begins at p ('['), or NULL if it is none. A ] in the first place is one
 * of its characters. */
static const char *set_end(const char *p, const char *end)
{
    const char *q = p + 1;
    if (q < end && *q == '!') q++;
    if (q < end) q++;
    while (q < end && *q != ']')
        q++;
    return q < end ? q : NULL;
}

static bool in_set(const char *p, const char *close, unsigned char c)
{
    bool inverse = p[1] == '!', found = false;
    for (const char *q = p + 1 + inverse; q < close; q++) {
        unsigned char low = (unsigned char)*q, high = low;
        if (q + 2 < close && q[1] == '-') {
            high = (unsigned char)q[2];
            q += 2;
        }
        found = found || (c >= low && c <= high);
    }
    return found != inverse;
}

/* One element of the pattern against one character; the next element in *next. */
static bool match_one(span s, char c, const char **next)
{
    const char *close = *s.at == '[' ? set_end(s.at, s.end) : NULL;
    *next = close ? close + 1 : s.at + 1;
    if (close) return in_set(s.at, close, (unsigned char)c);
    return *s.at == '?' || *s.at == c;
}

/* After a mismatch only the last star can take one character more, so no step is tried twice as
 * often as the name is long. */
static bool match_span(span s, const char *name)
{
    const char *star = NULL, *resume = NULL, *next;
    while (*name) {
        if (s.at < s.end && *s.at == '*') {
            star = ++s.at;
            resume = name;
        } else if (s.at < s.end && match_one(s, *name, &next)) {
            s.at = next;
            name++;
        } else if (star) {
            s.at = star;
            name = ++resume;
        } else {
            return false;
        }
    }
    while (s.at < s.end && *s.at == '*')
        s.at++;
    return s.at == s.end;
}

/* The bar that ends the first alternative, or the end of the pattern. */
static const char *alternative_end(const char *p)
{
    const char *end = p + strlen(p);
    for (; p < end && *p != '|'; p++) {
        const char *close = *p == '[' ? set_end(p, end) : NULL;
        if (close) p = close;
    }
    return p;
}

bool fsdp__match(const char *pattern, const char *name)
{
    for (const char *p = pattern;; p++) {
        const char *end = alternative_end(p);
        if (match_span((span){p, end}, name)) return true;
        if (!*end) return false;
        p = end;
    }
}
