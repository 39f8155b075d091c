/*
 * file.h - files and folders, with errors that name the path and what to do.
 *
 * Whatever others may read is written under another name in the same folder,
 * synced, then renamed: a reader sees the old content or the new, never half,
 * also after a crash. Nothing here touches umask, signals or stdio. A missing
 * path is FSDP_NOT_FOUND, everything else the system refuses FSDP_IO_ERROR.
 */
#ifndef FSDP_FORMAT_FILE_H
#define FSDP_FORMAT_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

/* ---- whole files ---------------------------------------------------------- */

/* The whole file in new memory with one NUL behind it that *len does not count. The caller frees
 * *bytes. Works for files whose size is not known beforehand (/proc, pipes). */
fsdp_status fsdp__file_read(const char *path, char **bytes, size_t *len);
/* Replaces path by n bytes, all or nothing. */
fsdp_status fsdp__file_write(const char *path, const void *bytes, size_t n);
/* Copies the content of from to to, all or nothing. */
fsdp_status fsdp__file_copy(const char *from, const char *to);
bool fsdp__file_exists(const char *path); /* a regular file (links followed) */
fsdp_status fsdp__file_size(const char *path, int64_t *bytes);
/* Removes one file; one that is not there is no error. */
fsdp_status fsdp__file_remove(const char *path);
/* Moves within one file system and syncs the folder of `to`. Replaces a file, or an empty folder by
 * a folder. */
fsdp_status fsdp__file_rename(const char *from, const char *to);

/* ---- bytes of open files: all of them, or an error ------------------------- */

/* name is for messages. Short counts and interruptions are continued; the end of the file before n
 * bytes is an error with both sizes. */
fsdp_status fsdp__file_pread(int fd, void *dst, size_t n, int64_t offset, const char *name);
fsdp_status fsdp__file_pwrite(int fd, const void *src, size_t n, int64_t offset, const char *name);

/* ---- a file that appears when it is complete ------------------------------- */

typedef struct fsdp__temp_file {
    int fd;     /* -1: none; open for reading and writing */
    char *path; /* what it will be called */
    char *temp; /* what it is called until then, in the same folder */
} fsdp__temp_file;

/* An empty file of its own name beside path. On failure *t holds nothing. */
fsdp_status fsdp__temp_open(fsdp__temp_file *t, const char *path);
/* Sync, close, rename, sync the folder. On failure the temporary file is removed. */
fsdp_status fsdp__temp_commit(fsdp__temp_file *t);
/* Closes and removes it; nothing after a commit, or on a zeroed struct with fd -1. */
void fsdp__temp_abort(fsdp__temp_file *t);

/* ---- folders ---------------------------------------------------------------- */

bool fsdp__dir_exists(const char *path);
/* Makes path and the folders above it; one that is there is no error. */
fsdp_status fsdp__dir_make(const char *path);
/* Whether fsdp__dir_make, and files in it, would be allowed, as far as that shows without a try:
 * what is in the way or not writable is an error. Makes nothing. */
fsdp_status fsdp__dir_can_make(const char *path);
/* Claims the folder until close(*lock) or the end of the process; an error if another process still
 * holds it after `seconds`. It is an advice between processes that ask, and leaves nothing. */
fsdp_status fsdp__dir_lock(const char *path, double seconds, int *lock);
/* Names in the folder without "." and "..", sorted by bytes. Freed by fsdp__dir_list_free. */
fsdp_status fsdp__dir_list(const char *path, char ***names, int64_t *count);
void fsdp__dir_list_free(char **names, int64_t count);
/* Removes a file, or a folder with all in it; links are removed, not followed. One that is not
 * there is no error. */
fsdp_status fsdp__dir_remove(const char *path);
/* temp, a folder, takes the place of path in one step, and what was at path is removed. So path is
 * whole at any moment, the old or the new; where a kill comes in between, temp is what is left over.
 * On a file system that cannot exchange two names there is a moment without path, in which the old
 * one stands at `aside`; it comes back if the second rename fails. */
fsdp_status fsdp__dir_replace(const char *temp, const char *path, const char *aside);
/* Makes earlier renames and removals in the folder durable. */
fsdp_status fsdp__dir_sync(const char *path);
/* Bytes that this user may still write on the file system of path (a file or folder that exists).
 */
fsdp_status fsdp__dir_available(const char *path, int64_t *bytes);

/* ---- paths ------------------------------------------------------------------- */

/* dir/name; name alone where dir is "" or name is absolute. The caller frees it. NULL if out of
 * memory. */
char *fsdp__path_join(const char *dir, const char *name);
/* The folder of path ("." if it names none). The caller frees it. NULL if out of memory. */
char *fsdp__path_dir(const char *path);
/* The last part of path, inside path. */
const char *fsdp__path_name(const char *path);

#endif
