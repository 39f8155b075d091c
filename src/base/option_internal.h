/*
 * option_internal.h - shared by option.c (values in) and option_text.c (texts
 * out).
 */
#ifndef FSDP_BASE_OPTION_INTERNAL_H
#define FSDP_BASE_OPTION_INTERNAL_H

#include <locale.h>

#include "base/option.h"

void *fsdp__option_field(const fsdp__section *s, const fsdp__option *row);

/* What the option takes, as a phrase: "a whole number from 1 to 8". */
void fsdp__option_takes(const fsdp__option *row, fsdp__str *out);

/* The value as YAML. */
void fsdp__option_value(const fsdp__section *s, const fsdp__option *row, fsdp__str *out);

/* The C locale; NULL if the system has no memory for it. */
locale_t fsdp__option_locale(void);

#endif
