/*
 * disk_folder.h - a folder of a test's own, and whether what lies in it can leave memory.
 */
#ifndef FSDP_TESTS_DISK_FOLDER_H
#define FSDP_TESTS_DISK_FOLDER_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/vfs.h>
#include <unistd.h>

static char folder[] = "folder-XXXXXX";
static int on_disk; /* it is on no RAM disk, whose pages never leave memory */

/* Group setup and teardown. */
static inline int make_folder(void **state)
{
    struct statfs v;
    (void)state;
    if (!mkdtemp(folder) || statfs(folder, &v) != 0) return -1;
    on_disk = v.f_type != 0x01021994;
    if (!on_disk)
        printf("%s is on a RAM disk: what is in memory is not asked of the kernel\n", folder);
    return 0;
}

static inline int remove_folder(void **state)
{
    (void)state;
    return rmdir(folder); /* fails if anything is left in it */
}

#endif
