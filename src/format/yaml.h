/*
 * yaml.h - configuration files: sections of values, in YAML over libfyaml.
 *
 *     training:
 *       steps: 1000            -> ("training", "steps", "1000")
 *       names: [a, b]          -> ("training", "names", items "a", "b")
 *       groups:
 *         - pattern: "*norm*"
 *           decay: 0           -> ("training", "groups", items "{pattern: \"*norm*\", decay: 0}")
 *
 * A document has these levels and no other; what does not fit them, a name twice in one map,
 * and bad syntax are errors with file, line and column. Values are handed over as text, whatever
 * YAML would take them for (true, 1e-3, null), since the reader's option table knows the type.
 */
#ifndef FSDP_FORMAT_YAML_H
#define FSDP_FORMAT_YAML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__yaml_value {
    const char *section;      /* "training" */
    const char *name;         /* "steps" */
    const char *text;         /* a scalar; "null" where nothing is written; NULL for a list */
    const char *const *items; /* a list: (n) texts, or maps, each on one line as YAML */
    bool maps;                /* the items are maps of names to single values */
    int64_t n;
    const char *place; /* "file.yaml:12:5", of the value */
} fsdp__yaml_value;

/* Called in the order of the file; all text is valid during the call. Another status than FSDP_OK
 * ends the walk and is returned; the callback has kept the error. */
typedef fsdp_status (*fsdp__yaml_fn)(void *arg, const fsdp__yaml_value *v);

fsdp_status fsdp__yaml_load(const char *path, fsdp__yaml_fn fn, void *arg);
/* The same from memory; name stands for the path in messages. */
fsdp_status fsdp__yaml_parse(const char *text, size_t n, const char *name, fsdp__yaml_fn fn,
                             void *arg);

#endif
