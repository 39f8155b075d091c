/*
 * utf8.c - UTF-8 by the table of well-formed sequences in the Unicode
 * standard (3.9, table 3-7), and the byte-level alphabet.
 */
#include "data/utf8.h"

#include <string.h>
#include <utf8proc.h>

/* Bytes of the well-formed character at s (n > 0), or 0 with the length of the longest wrong part
 * in *bad: the bytes that could have begun a character, at least one. */
static size_t step(const unsigned char *s, size_t n, size_t *bad)
{
    *bad = 1;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xc2 || s[0] > 0xf4) return 0;
    size_t want = s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : 4;
    /* The second byte's range shuts out overlong forms, surrogates and what is past U+10FFFF. */
    unsigned lo = s[0] == 0xe0 ? 0xa0 : s[0] == 0xf0 ? 0x90 : 0x80;
    unsigned hi = s[0] == 0xed ? 0x9f : s[0] == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < want; i++) {
        if (i >= n || s[i] < lo || s[i] > hi) return 0;
        lo = 0x80;
        hi = 0xbf;
        *bad = i + 1;
    }
    return want;
}

size_t fsdp__utf8_valid(const char *s, size_t n)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t i = 0, bad;
    while (i < n) {
        uint64_t word;
        /* Eight plain bytes at once: most text is. */
        if (i + 8 <= n) {
            memcpy(&word, s + i, 8);
            if (!(word & 0x8080808080808080u)) {
                i += 8;
                continue;
            }
        }
        size_t k = step(u + i, n - i, &bad);
        if (k == 0) return i;
        i += k;
    }
    return n;
}

void fsdp__utf8_add_lossy(fsdp__str *out, const char *s, size_t n)
{
    while (n > 0) {
        size_t good = fsdp__utf8_valid(s, n), bad = 0;
        fsdp__str_add_n(out, s, good);
        if (good == n) return;
        step((const unsigned char *)s + good, n - good, &bad);
        fsdp__str_add(out, "\xef\xbf\xbd");
        s += good + bad;
        n -= good + bad;
    }
}

void fsdp__utf8_add(fsdp__str *out, uint32_t c)
{
    utf8proc_uint8_t bytes[4];
    utf8proc_ssize_t n = utf8proc_encode_char((utf8proc_int32_t)c, bytes);
    fsdp__str_add_n(out, bytes, (size_t)n);
}

bool fsdp__char_is_space(uint32_t c)
{
    if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r');
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 ||
           c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool fsdp__char_is_numeric(uint32_t c)
{
    if (c < 0x80) return c >= '0' && c <= '9';
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
    return k == UTF8PROC_CATEGORY_ND || k == UTF8PROC_CATEGORY_NL || k == UTF8PROC_CATEGORY_NO;
}

bool fsdp__char_is_punctuation(uint32_t c)
{
    if (c < 0x80)
        return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') ||
               (c >= '{' && c <= '~');
    utf8proc_category_t k = utf8proc_category((utf8proc_int32_t)c);
    return k >= UTF8PROC_CATEGORY_PC && k <= UTF8PROC_CATEGORY_PO;
}

static bool prints(unsigned b)
{
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
}

uint32_t fsdp__byte_char(unsigned char b)
{
    if (prints(b)) return b;
    /* 0-32, 127-160 and 173 in turn. */
    return 256u + (b <= 32 ? b : b <= 160 ? b - 127u + 33u : 67u);
}

int fsdp__char_byte(uint32_t c)
{
    if (c < 256) return prints(c) ? (int)c : -1;
    if (c <= 256 + 32) return (int)c - 256;
    if (c <= 256 + 66) return (int)c - 256 - 33 + 127;
    return c == 256 + 67 ? 173 : -1;
}
