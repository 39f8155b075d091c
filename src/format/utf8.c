/*
 * utf8.c - the check of RFC 3629, table 3-7 of the Unicode standard: no overlong forms, no
 * surrogates, nothing beyond U+10FFFF.
 */
#include "format/utf8.h"

size_t fsdp__utf8_check(const char *bytes, size_t n)
{
    const unsigned char *p = (const unsigned char *)bytes;
    size_t i = 0;
    while (i < n) {
        unsigned char c = p[i];
        if (c < 0x80) {
            i++;
            continue;
        }
        /* Ranges of the second byte shut out overlong forms, surrogates and beyond U+10FFFF. */
        size_t more = c >= 0xf0 ? 3 : c >= 0xe0 ? 2 : 1;
        unsigned char lo = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
        unsigned char hi = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        if (c < 0xc2 || c > 0xf4 || n - i <= more) return i;
        if (p[i + 1] < lo || p[i + 1] > hi) return i;
        for (size_t k = 2; k <= more; k++)
            if ((p[i + k] & 0xc0) != 0x80) return i;
        i += more + 1;
    }
    return n;
}
