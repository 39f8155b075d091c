/*
 * str.c - text that grows. Invariant: p is NULL, or p[len] is 0 and len < cap.
 */
#include "base/str.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* Room for n more bytes and the NUL; false marks the string. */
static bool reserve(fsdp__str *s, size_t n)
{
    if (s->failed) return false;
    size_t need;
    if (__builtin_add_overflow(s->len, n + 1, &need) || n == SIZE_MAX) {
        s->failed = true;
        return false;
    }
    if (need <= s->cap) return true;
    size_t cap = s->cap < 32 ? 64 : s->cap * 2;
    if (cap < need) cap = need;
    char *p = realloc(s->p, cap);
    if (!p) {
        s->failed = true;
        return false;
    }
    s->p = p;
    s->cap = cap;
    return true;
}

void fsdp__str_add_n(fsdp__str *s, const void *bytes, size_t n)
{
    if (!reserve(s, n)) return;
    if (n) memcpy(s->p + s->len, bytes, n);
    s->len += n;
    s->p[s->len] = 0;
}

void fsdp__str_add(fsdp__str *s, const char *text)
{
    fsdp__str_add_n(s, text, strlen(text));
}

void fsdp__str_addf(fsdp__str *s, const char *fmt, ...)
{
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (n < 0) {
        s->failed = true;
    } else if (reserve(s, (size_t)n)) {
        vsnprintf(s->p + s->len, (size_t)n + 1, fmt, again);
        s->len += (size_t)n;
    }
    va_end(again);
}

void fsdp__str_add_bytes(fsdp__str *s, double bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double size = bytes < 0 ? -bytes : bytes;
    int u = 0;
    while (size >= 1024 && u < 5) {
        size /= 1024;
        bytes /= 1024;
        u++;
    }
    fsdp__str_addf(s, u == 0 ? "%.0f %s" : "%.2f %s", bytes, units[u]);
}

const char *fsdp__str_get(const fsdp__str *s)
{
    return s->p ? s->p : "";
}

char *fsdp__str_take(fsdp__str *s)
{
    /* An empty string still has to be something that free() takes. */
    reserve(s, 0);
    if (s->failed) {
        size_t bytes = s->len;
        fsdp__str_free(s);
        fsdp__fail_memory("a text", bytes);
        return NULL;
    }
    s->p[s->len] = 0;
    char *p = s->p;
    *s = (fsdp__str){0};
    return p;
}

void fsdp__str_free(fsdp__str *s)
{
    free(s->p);
    *s = (fsdp__str){0};
}

bool fsdp__starts_with(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

bool fsdp__ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);
    return n >= m && memcmp(s + n - m, suffix, m) == 0;
}

int fsdp__edit_distance(const char *a, const char *b)
{
    /* Three rows of the usual table. Names are short; what stands beyond 127
     * bytes counts by its length alone. */
    enum { MOST = 127 };
    int rows[3][MOST + 1];
    int n = (int)strnlen(a, MOST), m = (int)strnlen(b, MOST);
    size_t rest_a = strlen(a) - (size_t)n, rest_b = strlen(b) - (size_t)m;
    int rest = (int)(rest_a > rest_b ? rest_a - rest_b : rest_b - rest_a);

    for (int j = 0; j <= m; j++)
        rows[0][j] = j;
    for (int i = 1; i <= n; i++) {
        int *now = rows[i % 3], *up = rows[(i + 2) % 3], *up2 = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            int best = up[j - 1] + (a[i - 1] != b[j - 1]);
            if (up[j] + 1 < best) best = up[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped && up2[j - 2] + 1 < best) best = up2[j - 2] + 1;
            now[j] = best;
        }
    }
    return rows[n % 3][m] + rest;
}
