/*
 * utf8.h - UTF-8: validity, characters, classes of characters.
 */
#ifndef FSDP_DATA_UTF8_H
#define FSDP_DATA_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/str.h"

/* Length of the longest prefix of s (n) that is valid UTF-8. */
size_t fsdp__utf8_valid(const char *s, size_t n);
/* Appends s (n) with each longest wrong part replaced by U+FFFD. */
void fsdp__utf8_add_lossy(fsdp__str *out, const char *s, size_t n);
void fsdp__utf8_add(fsdp__str *out, uint32_t c);

/* Bytes of the character that begins with byte b of valid UTF-8. */
static inline size_t fsdp__utf8_len(char b)
{
    unsigned char u = (unsigned char)b;
    return u < 0x80 ? 1 : u < 0xe0 ? 2 : u < 0xf0 ? 3 : 4;
}

/* The character at s, which is valid UTF-8; its bytes in *len. */
static inline uint32_t fsdp__utf8_get(const char *s, size_t *len)
{
    const unsigned char *u = (const unsigned char *)s;
    *len = fsdp__utf8_len(*s);
    switch (*len) {
    case 1:
        return u[0];
    case 2:
        return (u[0] & 0x1fu) << 6 | (u[1] & 0x3fu);
    case 3:
        return (u[0] & 0x0fu) << 12 | (u[1] & 0x3fu) << 6 | (u[2] & 0x3fu);
    default:
        return (u[0] & 0x07u) << 18 | (u[1] & 0x3fu) << 12 | (u[2] & 0x3fu) << 6 | (u[3] & 0x3fu);
    }
}

bool fsdp__char_is_space(uint32_t c);       /* White_Space */
bool fsdp__char_is_numeric(uint32_t c);     /* Nd, Nl, No */
bool fsdp__char_is_punctuation(uint32_t c); /* P*, and ASCII's symbols */

/* Byte-level alphabet of GPT-2: each byte stands as one printable character, itself where it
 * prints and U+0100 + k for the k-th that does not. */
uint32_t fsdp__byte_char(unsigned char b);
/* The byte of character c, -1 if c stands for none. */
int fsdp__char_byte(uint32_t c);

#endif
