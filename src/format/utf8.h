/*
 * utf8.h - whether bytes are text.
 */
#ifndef FSDP_FORMAT_UTF8_H
#define FSDP_FORMAT_UTF8_H

#include <stddef.h>

/* The first byte of p[0..n) that does not belong to valid UTF-8 (RFC 3629), or n. */
size_t fsdp__utf8_check(const char *p, size_t n);

#endif
