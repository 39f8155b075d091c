/*
 * rows.h - the list of rows.def as a table.
 */
#ifndef FSDP_TESTS_CONFORMANCE_ROWS_H
#define FSDP_TESTS_CONFORMANCE_ROWS_H

#include <string.h>

/* X(enumerator, text) */
#define CONF_VERDICTS(X)                                                                           \
    X(YES, "yes")                                                                                  \
    X(STAR, "yes*")                                                                                \
    X(GPU, "GPU")                                                                                  \
    X(PYTHON, "Python")

/* X(enumerator, whether a test must run, text) */
#define CONF_OURS(X)                                                                               \
    X(RUN, 1, "tested")                                                                            \
    X(PARTED, 1, "parted on purpose")                                                              \
    X(NO_GPU, 0, "needs an accelerator")                                                           \
    X(NO_PYTHON, 0, "needs Python")                                                                \
    X(NO_TP, 0, "needs tensor parallelism")                                                        \
    X(NO_MESH, 0, "needs a mesh of all parallelisms")                                              \
    X(NO_ADOPT, 0, "a proposal that is not adopted")

typedef enum conf_verdict {
#define X(e, text) CONF_##e,
    CONF_VERDICTS(X)
#undef X
} conf_verdict;

typedef enum conf_ours {
#define X(e, runs, text) CONF_##e,
    CONF_OURS(X)
#undef X
} conf_ours;

typedef struct conf_row {
    const char *file, *group, *test; /* upstream's file, class and test */
    conf_verdict verdict;
    conf_ours ours;
    const char *text;
} conf_row;

static const conf_row conf_rows[] = {
#define ROW(file, group, test, verdict, ours, text)                                                \
    {#file, #group, #test, CONF_##verdict, CONF_##ours, text},
#include "rows.def"
#undef ROW
};

enum { CONF_ROWS = sizeof conf_rows / sizeof *conf_rows };

static inline const char *conf_verdict_text(conf_verdict v)
{
    static const char *const text[] = {
#define X(e, text) text,
        CONF_VERDICTS(X)
#undef X
    };
    return text[v];
}

static inline const char *conf_ours_text(conf_ours o)
{
    static const char *const text[] = {
#define X(e, runs, text) text,
        CONF_OURS(X)
#undef X
    };
    return text[o];
}

static inline int conf_must_run(conf_ours o)
{
    static const int runs[] = {
#define X(e, runs, text) runs,
        CONF_OURS(X)
#undef X
    };
    return runs[o];
}

/* Index of a row, -1 if rows.def has none of that name. */
static inline int conf_find(const char *file, const char *test)
{
    for (int i = 0; i < CONF_ROWS; i++)
        if (!strcmp(conf_rows[i].file, file) && !strcmp(conf_rows[i].test, test)) return i;
    return -1;
}

#endif
