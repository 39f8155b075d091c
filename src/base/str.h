/*
 * str.h - text that grows. A failed append marks the string; fsdp__str_take
 * then returns NULL with FSDP_NO_MEMORY kept, so appends need no checks.
 */
#ifndef FSDP_BASE_STR_H
#define FSDP_BASE_STR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__str {
    char *p; /* NUL-terminated, or NULL when empty */
    size_t len, cap;
    bool failed;
} fsdp__str;

void fsdp__str_add(fsdp__str *s, const char *text);
void fsdp__str_add_n(fsdp__str *s, const void *bytes, size_t n);
void fsdp__str_addf(fsdp__str *s, const char *fmt, ...) FSDP_PRINTF(2, 3);
void fsdp__str_add_bytes(fsdp__str *s, double bytes); /* "1.25 MiB" */
const char *fsdp__str_get(const fsdp__str *s);        /* "" when empty */
char *fsdp__str_take(fsdp__str *s);                   /* caller frees; s is empty after */
void fsdp__str_free(fsdp__str *s);

bool fsdp__starts_with(const char *s, const char *prefix);
bool fsdp__ends_with(const char *s, const char *suffix);
/* Edit distance (insert, delete, replace, swap of neighbours), for "did you mean". */
int fsdp__edit_distance(const char *a, const char *b);

#endif
