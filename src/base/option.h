/*
 * option.h - option tables: one row an option, from which come the parser,
 * the checks of type and range, --help, the documented default file and the
 * reference page.
 *
 * A section ("training") is a table of rows over one struct. Rows point at a
 * field by offset. Strings and lists in the struct are owned by it and freed
 * by fsdp__options_free.
 */
#ifndef FSDP_BASE_OPTION_H
#define FSDP_BASE_OPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/str.h"
#include "fsdp/status.h"

typedef enum fsdp__option_type {
    FSDP__OPT_BOOL,    /* bool */
    FSDP__OPT_INT,     /* int64_t */
    FSDP__OPT_FLOAT,   /* double */
    FSDP__OPT_STRING,  /* char *, NULL when unset */
    FSDP__OPT_ENUM,    /* int: index into the words of `choices` */
    FSDP__OPT_BYTES,   /* int64_t, accepts 512MiB, 2GB, 0 */
    FSDP__OPT_STRINGS, /* fsdp__strings */
    FSDP__OPT_MAPS     /* fsdp__strings, each a flow map of YAML: "{name: value, ...}" */
} fsdp__option_type;

typedef struct fsdp__strings {
    char **items;
    int64_t count;
} fsdp__strings;

typedef struct fsdp__option {
    const char *name; /* "seq_len" */
    fsdp__option_type type;
    size_t offset;       /* in the section's struct */
    const char *initial; /* default as text; NULL: unset */
    double min, max;     /* for numbers; min > max: no range */
    const char *choices; /* for enums: "a|b|c"; for maps: the names that one may have */
    const char *help;    /* one or two sentences, units included */
} fsdp__option;

typedef struct fsdp__section {
    const char *name; /* "training" */
    const char *help;
    const fsdp__option *rows; /* ends with name == NULL */
    void *target;             /* the struct that the offsets are of */
} fsdp__section;

/* Fields that this program knows from elsewhere and does not offer yet:
 * refused as "known and not available", with the reason. */
typedef struct fsdp__unavailable {
    const char *name; /* "parallelism.tensor_parallel_degree" or "compile.*" */
    const char *why;
} fsdp__unavailable;

typedef struct fsdp__options {
    const fsdp__section *sections;        /* ends with name == NULL */
    const fsdp__unavailable *unavailable; /* ends with name == NULL; may be NULL */
} fsdp__options;

/* Sets every field; what the structs held before is not freed. Returns with all fields valid for
 * fsdp__options_free even when a default is refused. */
fsdp_status fsdp__options_defaults(const fsdp__options *o);
void fsdp__options_free(const fsdp__options *o);
/* Sets "section.name" from text. place is "file.yaml:12:5" or "--training.steps". An unknown name
 * is an error with the nearest one; so are a wrong type and a value out of range. */
fsdp_status fsdp__options_set(const fsdp__options *o, const char *name, const char *value,
                              const char *place);
/* A list value ("[a, b]" given as items). */
fsdp_status fsdp__options_set_list(const fsdp__options *o, const char *name,
                                   const char *const *items, int64_t n, const char *place);
/* A list of maps, each given as "{name: value, ...}". What they hold is checked by who uses them.
 */
fsdp_status fsdp__options_set_maps(const fsdp__options *o, const char *name,
                                   const char *const *items, int64_t n, const char *place);
/* The resolved values as YAML, every section, in table order; help != 0 adds each option's help,
 * type, range and default as comments. */
void fsdp__options_yaml(const fsdp__options *o, fsdp__str *out, bool help);
void fsdp__options_markdown(const fsdp__options *o, fsdp__str *out);
void fsdp__options_help(const fsdp__options *o, fsdp__str *out);
/* Value of one option as text (as in the YAML). */
fsdp_status fsdp__options_get(const fsdp__options *o, const char *name, fsdp__str *out);

#endif
