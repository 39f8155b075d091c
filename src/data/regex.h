/*
 * regex.h - the regular expressions of tokenizer.json, by PCRE2.
 *
 * They are written for Oniguruma. What both spell alike but mean differently
 * (\s, \w, lines) is translated; what has no counterpart is an error.
 */
#ifndef FSDP_DATA_REGEX_H
#define FSDP_DATA_REGEX_H

#include <stddef.h>

#include "fsdp/status.h"

typedef struct fsdp__regex fsdp__regex;

/* where names the place in the file for the error. NULL on failure. */
fsdp__regex *fsdp__regex_create(const char *pattern, size_t len, const char *where);
void fsdp__regex_free(fsdp__regex *re);

/* First match at or after byte `from` of text (len bytes of UTF-8): 1 with its bytes
 * [*start, *end), 0 if there is none, -1 with the error kept. One thread at a time. */
int fsdp__regex_find(fsdp__regex *re, const char *text, size_t len, size_t from, size_t *start,
                     size_t *end);

#endif
