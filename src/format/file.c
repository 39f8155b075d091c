/*
 * file.c - files and folders over POSIX calls, with errors by path.
 *
 * Invariants: a descriptor that is opened here is closed on every way out; a temporary file that is
 * not committed is removed; the first error survives the clean-up, because base keeps the first.
 */
#include "format/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "base/thread.h"

/* ---- errors ------------------------------------------------------------------- */

/* The status of an errno of a path. */
static fsdp_status code_of(int err)
{
    return err == ENOENT || err == ENOTDIR ? FSDP_NOT_FOUND : FSDP_IO_ERROR;
}

/* What a person can do about it; errno's own text follows it in the message. */
static const char *advice(int err)
{
    switch (err) {
    case ENOENT:
        return "; check the spelling of the path";
    case ENOTDIR:
        return "; a part of the path is no folder";
    case EEXIST:
        return "; something else of that name is in the way";
    case EACCES:
    case EPERM:
        return "; check the owner and mode of the file and its folder";
    case EROFS:
        return "; choose a folder that can be written";
    case ENOSPC:
        return "; free space or choose another folder";
    case EDQUOT:
        return "; the quota of this user is used up";
    case EFBIG:
        return "; a limit of the file's size (ulimit -f, or the file system's)";
    default:
        return "";
    }
}

/* "cannot <what> <path><advice>: <errno's text>". */
static fsdp_status fail(const char *what, const char *path)
{
    int err = errno;
    const char *tip = advice(err);
    errno = err;
    return fsdp__fail_errno(code_of(err), "cannot %s %s%s", what, path, tip);
}

/* Every descriptor is closed in a program that is started from here: ranks start programs. */
static int open_file(const char *path, int flags, mode_t mode)
{
    int fd;
    do {
        fd = open(path, flags | O_CLOEXEC, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

/* ---- bytes of open files -------------------------------------------------------- */

fsdp_status fsdp__file_pread(int fd, void *dst, size_t n, int64_t offset, const char *name)
{
    size_t done = 0;
    while (done < n) {
        /* The system moves at most about 2 GiB a call, so large reads come short as a rule. */
        ssize_t got = pread(fd, (char *)dst + done, n - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return fsdp__fail_errno(FSDP_IO_ERROR, "cannot read %zu bytes at byte %lld of %s", n,
                                    (long long)offset, name);
        if (got == 0)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: found %zu bytes from byte %lld on, expected %zu: the file is "
                              "truncated or was changed while in use",
                              name, done, (long long)offset, n);
        done += (size_t)got;
    }
    return FSDP_OK;
}

/* pwrite and not write: ranges of one file may come in any order, and no position is shared. */
fsdp_status fsdp__file_pwrite(int fd, const void *src, size_t n, int64_t offset, const char *name)
{
    size_t done = 0;
    while (done < n) {
        ssize_t put =
            pwrite(fd, (const char *)src + done, n - done, (off_t)(offset + (int64_t)done));
        if (put < 0 && errno == EINTR) continue;
        if (put == 0) errno = ENOSPC; /* no progress and no reason: the device takes no more */
        if (put <= 0) {
            int err = errno;
            const char *tip = advice(err);
            errno = err;
            return fsdp__fail_errno(FSDP_IO_ERROR, "cannot write %zu bytes at byte %lld of %s%s", n,
                                    (long long)offset, name, tip);
        }
        done += (size_t)put;
    }
    return FSDP_OK;
}

/* ---- whole files ------------------------------------------------------------------ */

/* Reads from the current position to the end; the size given by the system is only a first guess.
 */
static fsdp_status read_to_end(int fd, const char *path, int64_t guess, char **bytes, size_t *len)
{
    size_t cap = (guess > 0 ? (size_t)guess : 4096) + 1, n = 0;
    char *p = fsdp__realloc(NULL, cap, path);
    if (!p) return FSDP_NO_MEMORY;
    for (;;) {
        if (n + 1 == cap) {
            char *q = fsdp__realloc(p, cap + cap / 2 + 4096, path);
            if (!q) {
                free(p);
                return FSDP_NO_MEMORY;
            }
            p = q;
            cap += cap / 2 + 4096;
        }
        ssize_t got = read(fd, p + n, cap - 1 - n);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            fsdp_status s = fail("read", path);
            free(p);
            return s;
        }
        if (got == 0) break;
        n += (size_t)got;
    }
    p[n] = 0;
    *bytes = p;
    *len = n;
    return FSDP_OK;
}

fsdp_status fsdp__file_read(const char *path, char **bytes, size_t *len)
{
    *bytes = NULL;
    *len = 0;
    int fd = open_file(path, O_RDONLY, 0);
    if (fd < 0) return fail("open", path);
    struct stat st;
    fsdp_status s = fstat(fd, &st) ? fail("stat", path)
                                   : read_to_end(fd, path, (int64_t)st.st_size, bytes, len);
    close(fd);
    return s;
}

/* abort after commit does nothing, so both ways out may call it. */
fsdp_status fsdp__file_write(const char *path, const void *bytes, size_t n)
{
    fsdp__temp_file t;
    FSDP_TRY(fsdp__temp_open(&t, path));
    fsdp_status s = fsdp__file_pwrite(t.fd, bytes, n, 0, path);
    if (s == FSDP_OK) s = fsdp__temp_commit(&t);
    fsdp__temp_abort(&t);
    return s;
}

/* Piece by piece: a weight file may be larger than memory. */
fsdp_status fsdp__file_copy(const char *from, const char *to)
{
    enum { PIECE = 1 << 20 };
    fsdp__temp_file t = {-1, NULL, NULL};
    char *buf = NULL;
    fsdp_status s;
    int fd = open_file(from, O_RDONLY, 0);
    if (fd < 0) return fail("open", from);
    FSDP_GO(fsdp__temp_open(&t, to));
    buf = fsdp__realloc(NULL, PIECE, "copy of a file");
    if (!buf) {
        s = FSDP_NO_MEMORY;
        goto done;
    }
    for (int64_t at = 0;;) {
        ssize_t got = read(fd, buf, PIECE);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            s = fail("read", from);
            goto done;
        }
        if (got == 0) break;
        FSDP_GO(fsdp__file_pwrite(t.fd, buf, (size_t)got, at, to));
        at += got;
    }
    s = fsdp__temp_commit(&t);
done:
    fsdp__temp_abort(&t);
    free(buf);
    close(fd);
    return s;
}

bool fsdp__file_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

fsdp_status fsdp__file_size(const char *path, int64_t *bytes)
{
    struct stat st;
    if (stat(path, &st)) return fail("stat", path);
    *bytes = (int64_t)st.st_size;
    return FSDP_OK;
}

fsdp_status fsdp__file_remove(const char *path)
{
    return unlink(path) && errno != ENOENT ? fail("remove", path) : FSDP_OK;
}

fsdp_status fsdp__file_rename(const char *from, const char *to)
{
    if (rename(from, to)) {
        int err = errno;
        const char *tip = advice(err);
        errno = err;
        return fsdp__fail_errno(code_of(err), "cannot rename %s to %s%s", from, to, tip);
    }
    char *dir = fsdp__path_dir(to);
    if (!dir) return FSDP_NO_MEMORY;
    fsdp_status s = fsdp__dir_sync(dir);
    free(dir);
    return s;
}

/* ---- a file that appears when it is complete --------------------------------------- */

fsdp_status fsdp__temp_open(fsdp__temp_file *t, const char *path)
{
    *t = (fsdp__temp_file){-1, NULL, NULL};
    t->path = fsdp__strdup(path);
    if (!t->path) return FSDP_NO_MEMORY;
    /* Ranks may be threads of one process and hosts may share a folder, so neither the process nor
     * the thread makes a name unique: exclusive creation does. */
    for (int k = 0;; k++) {
        fsdp__str name = {0};
        fsdp__str_addf(&name, "%s.tmp-%ld-%d", path, (long)getpid(), k);
        t->temp = fsdp__str_take(&name);
        if (!t->temp) break;
        t->fd = open_file(t->temp, O_RDWR | O_CREAT | O_EXCL, 0666);
        if (t->fd >= 0) return FSDP_OK;
        if (errno != EEXIST || k == 10000) {
            fail("create", t->temp);
            break;
        }
        free(t->temp);
    }
    fsdp_status s = fsdp_error();
    free(t->temp);
    free(t->path);
    *t = (fsdp__temp_file){-1, NULL, NULL};
    return s;
}

fsdp_status fsdp__temp_commit(fsdp__temp_file *t)
{
    fsdp_status s = FSDP_OK;
    if (fsync(t->fd)) s = fail("sync", t->temp);
    /* Network file systems report a full disk only at the close. */
    if (close(t->fd) && s == FSDP_OK) s = fail("close", t->temp);
    t->fd = -1;
    if (s == FSDP_OK) s = fsdp__file_rename(t->temp, t->path);
    if (s == FSDP_OK) {
        free(t->temp);
        t->temp = NULL;
    }
    fsdp__temp_abort(t);
    return s;
}

/* Errors of close and unlink say nothing new here: the file is thrown away. */
void fsdp__temp_abort(fsdp__temp_file *t)
{
    if (t->fd >= 0) close(t->fd);
    if (t->temp) unlink(t->temp);
    free(t->temp);
    free(t->path);
    *t = (fsdp__temp_file){-1, NULL, NULL};
}

/* ---- folders -------------------------------------------------------------------------- */

bool fsdp__dir_exists(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

/* Walks the path from the left and makes what is missing; mode is left to the user's umask. */
fsdp_status fsdp__dir_make(const char *path)
{
    fsdp_status s = FSDP_OK;
    char *p = fsdp__strdup(path);
    if (!p) return FSDP_NO_MEMORY;
    size_t n = strlen(p);
    for (size_t i = 1; i <= n && s == FSDP_OK; i++) {
        if (p[i] != '/' && p[i] != 0) continue;
        char c = p[i];
        p[i] = 0;
        /* Another rank may be making the same folders: what counts is that they are there. */
        if (mkdir(p, 0777)) {
            int err = errno;
            if (!fsdp__dir_exists(p)) {
                errno = err;
                s = fail("create the folder", p);
            }
        }
        p[i] = c;
    }
    free(p);
    return s;
}

/* By bytes and not by locale: every rank and every machine sees the same order. */
static int by_bytes(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* errno is the only way to tell the end of a folder from an error, so it is cleared each time. */
fsdp_status fsdp__dir_list(const char *path, char ***names, int64_t *count)
{
    char **list = NULL;
    int64_t n = 0, cap = 0;
    fsdp_status s = FSDP_OK;
    *names = NULL;
    *count = 0;
    DIR *d = opendir(path);
    if (!d) return fail("list the folder", path);
    for (;;) {
        errno = 0;
        struct dirent *e = readdir(d);
        if (!e) {
            if (errno) s = fail("list the folder", path);
            break;
        }
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        s = FSDP__GROW(list, cap, n + 1, "names in a folder");
        if (s != FSDP_OK) break;
        list[n] = fsdp__strdup(e->d_name);
        if (!list[n]) {
            s = FSDP_NO_MEMORY;
            break;
        }
        n++;
    }
    closedir(d);
    if (s != FSDP_OK) {
        fsdp__dir_list_free(list, n);
        return s;
    }
    if (n) qsort(list, (size_t)n, sizeof *list, by_bytes);
    *names = list;
    *count = n;
    return FSDP_OK;
}

void fsdp__dir_list_free(char **names, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        free(names[i]);
    free(names);
}

/* lstat: a link to a folder elsewhere is itself removed, never what it points to. */
fsdp_status fsdp__dir_remove(const char *path)
{
    struct stat st;
    if (lstat(path, &st)) return errno == ENOENT ? FSDP_OK : fail("stat", path);
    if (!S_ISDIR(st.st_mode)) return fsdp__file_remove(path);
    char **names;
    int64_t n;
    FSDP_TRY(fsdp__dir_list(path, &names, &n));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < n && s == FSDP_OK; i++) {
        char *p = fsdp__path_join(path, names[i]);
        s = p ? fsdp__dir_remove(p) : FSDP_NO_MEMORY;
        free(p);
    }
    fsdp__dir_list_free(names, n);
    if (s == FSDP_OK && rmdir(path) && errno != ENOENT) s = fail("remove the folder", path);
    return s;
}

fsdp_status fsdp__dir_can_make(const char *path)
{
    fsdp_status s = FSDP_OK;
    struct stat st;
    char *p = fsdp__strdup(path);
    while (p && stat(p, &st) && (errno == ENOENT || errno == ENOTDIR) && strcmp(p, ".") &&
           strcmp(p, "/")) {
        while (strlen(p) > 1 && fsdp__ends_with(p, "/"))
            p[strlen(p) - 1] = '\0';
        char *up = fsdp__path_dir(p);
        free(p);
        p = up;
    }
    if (!p) return FSDP_NO_MEMORY;
    if (!stat(p, &st) && !S_ISDIR(st.st_mode)) {
        errno = EEXIST;
        s = fail("create the folder", p);
    } else if (faccessat(AT_FDCWD, p, W_OK | X_OK, AT_EACCESS)) {
        s = fail(strcmp(p, path) ? "create a folder in" : "write into the folder", p);
    }
    free(p);
    return s;
}

fsdp_status fsdp__dir_lock(const char *path, double seconds, int *lock)
{
    *lock = open_file(path, O_RDONLY | O_DIRECTORY, 0);
    if (*lock < 0) return fail("open the folder", path);
    double end = fsdp__now() + seconds;
    while (flock(*lock, LOCK_EX | LOCK_NB)) {
        if (errno == EWOULDBLOCK && fsdp__now() < end) {
            nanosleep(&(struct timespec){0, 20000000}, NULL);
            continue;
        }
        if (errno == EINTR) continue;
        bool held = errno == EWOULDBLOCK;
        /* A file system without locks: as before there were any. */
        if (!held && (errno == ENOLCK || errno == ENOTSUP || errno == EINVAL || errno == ENOSYS))
            return FSDP_OK;
        fsdp_status s = held ? fsdp__fail(FSDP_INVALID_STATE,
                                          "%s: another process works in this folder; wait for its "
                                          "end, or choose another folder",
                                          path)
                             : fail("lock the folder", path);
        close(*lock);
        *lock = -1;
        return s;
    }
    return FSDP_OK;
}

fsdp_status fsdp__dir_sync(const char *path)
{
    fsdp_status s = FSDP_OK;
    int fd = open_file(path, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0) return fail("open the folder", path);
    /* Some file systems have no sync of folders and say so: nothing more can be done there. */
    if (fsync(fd) && errno != EINVAL && errno != ENOTSUP) s = fail("sync the folder", path);
    close(fd);
    return s;
}

fsdp_status fsdp__dir_available(const char *path, int64_t *bytes)
{
    struct statvfs v;
    if (statvfs(path, &v)) return fail("ask for the free space of", path);
    unsigned long long b = (unsigned long long)v.f_bavail * v.f_frsize;
    *bytes = b > INT64_MAX ? INT64_MAX : (int64_t)b;
    return FSDP_OK;
}

/* Two renames, for file systems that have no exchange. */
static fsdp_status replace_in_two(const char *temp, const char *path, const char *aside)
{
    FSDP_TRY(fsdp__dir_remove(aside));
    FSDP_TRY(fsdp__file_rename(path, aside));
    fsdp_status s = fsdp__file_rename(temp, path);
    if (s != FSDP_OK) { /* the first error is kept */
        (void)rename(aside, path);
        return s;
    }
    return fsdp__dir_remove(aside);
}

fsdp_status fsdp__dir_replace(const char *temp, const char *path, const char *aside)
{
    if (!fsdp__dir_exists(path)) return fsdp__file_rename(temp, path);
    if (renameat2(AT_FDCWD, temp, AT_FDCWD, path, RENAME_EXCHANGE))
        return replace_in_two(temp, path, aside);
    char *dir = fsdp__path_dir(path);
    if (!dir) return FSDP_NO_MEMORY;
    fsdp_status s = fsdp__dir_sync(dir);
    free(dir);
    return s == FSDP_OK ? fsdp__dir_remove(temp) : s;
}

/* ---- paths -------------------------------------------------------------------------------- */

char *fsdp__path_join(const char *dir, const char *name)
{
    fsdp__str s = {0};
    if (!dir[0] || name[0] == '/') return fsdp__strdup(name);
    fsdp__str_add(&s, dir);
    if (!fsdp__ends_with(dir, "/")) fsdp__str_add(&s, "/");
    fsdp__str_add(&s, name);
    return fsdp__str_take(&s);
}

char *fsdp__path_dir(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash) return fsdp__strdup(".");
    return fsdp__strndup(path, slash == path ? 1 : (size_t)(slash - path));
}

const char *fsdp__path_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
