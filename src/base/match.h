/*
 * match.h - patterns of names: what options that choose parameters or modules take.
 *
 *     *        any run of characters, dots included, also none
 *     ?        one character
 *     [abc]    one of them; [a-f] a range; [!abc] none of them
 *     a|b      either of two patterns (not inside brackets)
 *
 * The whole name must match: "*norm*" takes what contains norm. A bracket that is not closed stands
 * for itself.
 */
#ifndef FSDP_BASE_MATCH_H
#define FSDP_BASE_MATCH_H

#include <stdbool.h>

bool fsdp__match(const char *pattern, const char *name);

#endif
