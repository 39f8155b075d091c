/*
 * walk.h - the files below some paths, each once.
 */
#ifndef FSDP_DATA_WALK_H
#define FSDP_DATA_WALK_H

#include <stdbool.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__walk_file {
    char *path;
    char **aliases; /* (alias_count) other paths of the same file that were met */
    int64_t alias_count, alias_cap;
    bool link; /* the path leads through a link */
} fsdp__walk_file;

typedef struct fsdp__walk {
    fsdp__walk_file *files; /* in order of paths */
    int64_t count, cap;
} fsdp__walk;

/* All regular files that the paths (n) are or hold, but for what is in the folder `except` (NULL,
 * or one that need not exist). A path that does not exist is an error. */
fsdp_status fsdp__walk_paths(const char *const *paths, int64_t n, const char *except,
                             fsdp__walk *out);
void fsdp__walk_free(fsdp__walk *w);

#endif
