/*
 * walk.c - walking folders with links followed once.
 *
 * Files and folders are known by device and inode. Folders behind links wait
 * until everything that is reached without one has been walked, so a file
 * gets its real path where it has one among those asked for.
 */
#include "data/walk.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "format/file.h"

typedef struct walker {
    fsdp__walk *out;
    fsdp__map *seen; /* identity -> index of the file, -1 for a folder */
    char **waiting;  /* folders behind links, from `next` on still to be walked */
    int64_t waiting_count, waiting_cap, next;
} walker;

typedef struct identity {
    uint64_t device, inode;
} identity;

static fsdp_status add_alias(fsdp__walk_file *f, char *path)
{
    fsdp_status s = FSDP__GROW(f->aliases, f->alias_cap, f->alias_count + 1, "names of a file");
    if (s == FSDP_OK)
        f->aliases[f->alias_count++] = path;
    else
        free(path);
    return s;
}

/* Takes ownership of path. */
static fsdp_status add_file(walker *w, char *path, identity id, bool link)
{
    const fsdp__value *v = fsdp__map_get(w->seen, &id, sizeof id);
    if (v) {
        fsdp__walk_file *f = &w->out->files[v->i];
        if (f->link && !link) { /* the real name wins */
            char *other = f->path;
            f->path = path;
            f->link = false;
            path = other;
        }
        return add_alias(f, path);
    }
    fsdp_status s = FSDP__GROW(w->out->files, w->out->cap, w->out->count + 1, "list of files");
    if (s == FSDP_OK) s = fsdp__map_set(w->seen, &id, sizeof id, (fsdp__value){.i = w->out->count});
    if (s != FSDP_OK) {
        free(path);
        return s;
    }
    w->out->files[w->out->count++] = (fsdp__walk_file){.path = path, .link = link};
    return FSDP_OK;
}

static fsdp_status add_waiting(walker *w, char *path)
{
    fsdp_status s = FSDP__GROW(w->waiting, w->waiting_cap, w->waiting_count + 1, "list of folders");
    if (s == FSDP_OK)
        w->waiting[w->waiting_count++] = path;
    else
        free(path);
    return s;
}

static fsdp_status visit(walker *w, char *path, bool through_link, int depth);

static fsdp_status visit_folder(walker *w, const char *path, identity id, bool link, int depth)
{
    char **names = NULL;
    int64_t count = 0;
    if (fsdp__map_get(w->seen, &id, sizeof id)) return FSDP_OK;
    if (depth > 200)
        return fsdp__fail(FSDP_INVALID_DATA, "%s: folders are nested more than 200 deep", path);
    FSDP_TRY(fsdp__map_set(w->seen, &id, sizeof id, (fsdp__value){.i = -1}));
    FSDP_TRY(fsdp__dir_list(path, &names, &count));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < count && s == FSDP_OK; i++) {
        if (names[i][0] == '.') continue;
        char *child = fsdp__path_join(path, names[i]);
        s = child ? visit(w, child, link, depth + 1) : fsdp_error();
    }
    fsdp__dir_list_free(names, count);
    return s;
}

/* Takes ownership of path. */
static fsdp_status visit(walker *w, char *path, bool through_link, int depth)
{
    struct stat own, target;
    fsdp_status s = FSDP_OK;
    if (lstat(path, &own) != 0 || stat(path, &target) != 0) {
        /* A link to nowhere inside a folder is nobody's fault; a path that was asked for must be.
         */
        if (depth == 0 || errno != ENOENT)
            s = fsdp__fail_errno(errno == ENOENT ? FSDP_NOT_FOUND : FSDP_IO_ERROR,
                                 "cannot look at %s", path);
        free(path);
        return s;
    }
    bool link = through_link || (S_ISLNK(own.st_mode) && depth > 0);
    identity id = {(uint64_t)target.st_dev, (uint64_t)target.st_ino};
    if (S_ISREG(target.st_mode)) return add_file(w, path, id, link);
    if (S_ISDIR(target.st_mode)) {
        if (link && !through_link) return add_waiting(w, path);
        s = visit_folder(w, path, id, link, depth);
    }
    free(path);
    return s;
}

static int by_path(const void *a, const void *b)
{
    return strcmp(((const fsdp__walk_file *)a)->path, ((const fsdp__walk_file *)b)->path);
}

fsdp_status fsdp__walk_paths(const char *const *paths, int64_t n, const char *except,
                             fsdp__walk *out)
{
    walker w = {.out = out, .seen = fsdp__map_create()};
    fsdp_status s = w.seen ? FSDP_OK : fsdp_error();
    struct stat away;
    if (s == FSDP_OK && except && stat(except, &away) == 0) {
        identity id = {(uint64_t)away.st_dev, (uint64_t)away.st_ino};
        s = fsdp__map_set(w.seen, &id, sizeof id, (fsdp__value){.i = -1});
    }
    for (int64_t i = 0; i < n && s == FSDP_OK; i++) {
        char *path = fsdp__strdup(paths[i]);
        s = path ? visit(&w, path, false, 0) : fsdp_error();
    }
    /* The list grows while it is walked: linked folders hold links too. */
    while (s == FSDP_OK && w.next < w.waiting_count) {
        char *path = w.waiting[w.next++];
        struct stat st;
        if (stat(path, &st) == 0)
            s = visit_folder(&w, path, (identity){(uint64_t)st.st_dev, (uint64_t)st.st_ino}, true,
                             1);
        free(path);
    }
    for (int64_t i = w.next; i < w.waiting_count; i++)
        free(w.waiting[i]);
    free(w.waiting);
    fsdp__map_free(w.seen);
    if (out->count > 0) qsort(out->files, (size_t)out->count, sizeof *out->files, by_path);
    return s;
}

void fsdp__walk_free(fsdp__walk *w)
{
    for (int64_t i = 0; i < w->count; i++) {
        for (int64_t k = 0; k < w->files[i].alias_count; k++)
            free(w->files[i].aliases[k]);
        free(w->files[i].aliases);
        free(w->files[i].path);
    }
    free(w->files);
    *w = (fsdp__walk){0};
}
