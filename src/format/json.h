/*
 * json.h - JSON files over jansson, with errors that name file and place.
 *
 * A syntax error reads "file:line:col: ...", a wrong value "file: outer.inner: found ..., expected
 * ...". A name twice in one object is an error. Objects are those of jansson: json_decref frees.
 */
#ifndef FSDP_FORMAT_JSON_H
#define FSDP_FORMAT_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/str.h"
#include "fsdp/status.h"

/* ---- whole documents -------------------------------------------------------- */

/* Any JSON value; NULL with the error kept. The caller calls json_decref. */
json_t *fsdp__json_load(const char *path);
/* The same from memory; name stands for the path in messages. */
json_t *fsdp__json_parse(const char *text, size_t n, const char *name);
/* Text as Python's json module writes it: indent blanks a level (0: one line), names in the order
 * they were set, text in UTF-8, numbers in the shortest form that reads back the same. */
fsdp_status fsdp__json_format(const json_t *v, int indent, fsdp__str *out);
/* Replaces path by that text and a newline, all or nothing. */
fsdp_status fsdp__json_dump(const json_t *v, int indent, const char *path);

/* ---- text --------------------------------------------------------------------- */

/* Appends "..." with escapes where JSON needs them and nowhere else. */
void fsdp__json_quote(fsdp__str *out, const char *text, size_t n);
/* Appends a number in the shortest form that reads back the same, with a point or exponent:
 * 10000.0, 1e-05. */
void fsdp__json_real(fsdp__str *out, double v);

/* ---- fields ------------------------------------------------------------------- */

/* An object and where it stands. path is "" at the root, else "rope_scaling" or "a.b". */
typedef struct fsdp__json_at {
    const json_t *json;
    const char *file;
    char path[160];
} fsdp__json_at;

/* The root; an error if it is no object. */
fsdp_status fsdp__json_root(const json_t *json, const char *file, fsdp__json_at *out);
/* The object under key; an error if it is absent or no object. */
fsdp_status fsdp__json_object(const fsdp__json_at *at, const char *key, fsdp__json_at *out);

/* True if the key is there and not null. */
bool fsdp__json_has(const fsdp__json_at *at, const char *key);

/* An absent or null key leaves *out as it is; a value of another kind is an error. */
fsdp_status fsdp__json_int(const fsdp__json_at *at, const char *key, int64_t *out);
fsdp_status fsdp__json_number(const fsdp__json_at *at, const char *key, double *out);
fsdp_status fsdp__json_bool(const fsdp__json_at *at, const char *key, bool *out);
/* Owned by the document. */
fsdp_status fsdp__json_string(const fsdp__json_at *at, const char *key, const char **out);

/* An error if the key is absent or null. */
fsdp_status fsdp__json_need(const fsdp__json_at *at, const char *key);
/* "file: path.key: found <value>, expected <expected>". code says what kind of error it is. */
fsdp_status fsdp__json_fail(fsdp_status code, const fsdp__json_at *at, const char *key,
                            const char *expected);

#endif
