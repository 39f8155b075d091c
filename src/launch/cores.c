/*
 * cores.c - what the kernel lets this process use: cores, and the count of
 * processes that were killed for want of memory.
 *
 * A control group (cgroup) bounds both. Version 2 has one tree, version 1 a
 * tree for each controller, and a container often sees its own group as the
 * root of what is mounted: so the mount's own root, from mountinfo, is taken
 * off the process's path. A quota on any group above binds as well, so the
 * walk goes up to the mount point and takes the smallest.
 */
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launch/launch_internal.h"

/* A group of this process: where its tree is mounted and the folder of the group in it. */
typedef struct group_path {
    char mount[PATH_MAX];
    char dir[PATH_MAX]; /* begins with mount */
} group_path;

/* True if the comma-separated list holds the word. */
static bool list_has(const char *list, const char *word)
{
    size_t n = strlen(word);
    while (list && *list) {
        if (strncmp(list, word, n) == 0 && (list[n] == ',' || list[n] == 0)) return true;
        list = strchr(list, ',');
        if (list) list++;
    }
    return false;
}

/* The process's path in the tree of a controller; controller NULL means version 2, whose line has
 * an empty list: "0::/path". */
static bool process_path(const char *root, const char *controller, char *path, size_t size)
{
    char name[PATH_MAX], line[PATH_MAX];
    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    FILE *f = fopen(name, "re");
    if (!f) return false;
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        char *list = strchr(line, ':');
        char *rest = list ? strchr(list + 1, ':') : NULL;
        if (!rest) continue;
        *rest++ = 0;
        list++;
        found = controller ? list_has(list, controller) : *list == 0;
        if (found) snprintf(path, size, "%s", rest);
    }
    fclose(f);
    return found;
}

/* Finds the mount of the controller's tree. A line of mountinfo reads
 *   36 35 98:0 /root /mount/point opts [tags] - fstype source superopts     */
static bool find_group(const char *root, const char *controller, group_path *out)
{
    char name[PATH_MAX], line[3 * PATH_MAX], path[PATH_MAX];
    if (!process_path(root, controller, path, sizeof path)) return false;
    snprintf(name, sizeof name, "%s/proc/self/mountinfo", root);
    FILE *f = fopen(name, "re");
    if (!f) return false;
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        char inner[PATH_MAX], point[PATH_MAX], type[64], super[PATH_MAX];
        char *dash = strstr(line, " - ");
        if (!dash || sscanf(line, "%*s %*s %*s %4095s %4095s", inner, point) != 2) continue;
        if (sscanf(dash, " - %63s %*s %4095s", type, super) != 2) continue;
        if (controller ? strcmp(type, "cgroup") != 0 || !list_has(super, controller)
                       : strcmp(type, "cgroup2") != 0)
            continue;
        size_t n = strcmp(inner, "/") == 0 ? 0 : strlen(inner);
        /* A path outside of what is mounted cannot be followed: the mount itself is the nearest. */
        const char *below = strncmp(path, inner, n) == 0 ? path + n : "";
        if (strcmp(below, "/") == 0) below = "";
        int mount_len = snprintf(out->mount, sizeof out->mount, "%s%s", root, point);
        int dir_len = snprintf(out->dir, sizeof out->dir, "%s%s%s", root, point, below);
        found = mount_len < PATH_MAX && dir_len < PATH_MAX;
    }
    fclose(f);
    return found;
}

/* First line of dir/name. */
static bool read_line(const char *dir, const char *name, char *text, size_t size)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= PATH_MAX) return false;
    FILE *f = fopen(path, "re");
    if (!f) return false;
    bool ok = fgets(text, (int)size, f) != NULL;
    fclose(f);
    return ok;
}

/* The number behind a word at the start of a line of the file; -1 if it is not there. */
static int64_t read_count(const char *dir, const char *name, const char *word)
{
    char path[PATH_MAX], line[256];
    int64_t value = -1;
    size_t n = strlen(word);
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= PATH_MAX) return -1;
    FILE *f = fopen(path, "re");
    if (!f) return -1;
    while (value < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, word, n) == 0 && line[n] == ' ') value = atoll(line + n);
    fclose(f);
    return value;
}

/* Quota of one group in cores, 0 for none. */
static double quota_of(const char *dir, bool v2)
{
    char text[128];
    double quota = 0, period = 0;
    if (v2) {
        /* "max 100000" or "150000 100000" */
        if (!read_line(dir, "cpu.max", text, sizeof text)) return 0;
        if (sscanf(text, "%lf %lf", &quota, &period) != 2) return 0;
    } else {
        if (!read_line(dir, "cpu.cfs_quota_us", text, sizeof text)) return 0;
        quota = atof(text); /* -1: none */
        if (!read_line(dir, "cpu.cfs_period_us", text, sizeof text)) return 0;
        period = atof(text);
    }
    return quota > 0 && period > 0 ? quota / period : 0;
}

/* The smallest quota from the group up to the mount point. */
static double quota_up(group_path *g, bool v2)
{
    double least = 0;
    size_t end = strlen(g->mount);
    for (;;) {
        double q = quota_of(g->dir, v2);
        if (q > 0 && (least <= 0 || q < least)) least = q;
        char *slash = strrchr(g->dir, '/');
        if (strlen(g->dir) <= end || !slash || slash < g->dir + end) return least;
        *slash = 0;
    }
}

double fsdp__cores_quota(const char *root)
{
    group_path g;
    double v1 = 0, v2 = 0;
    if (find_group(root, "cpu", &g)) v1 = quota_up(&g, false);
    if (find_group(root, NULL, &g)) v2 = quota_up(&g, true);
    if (v1 > 0 && v2 > 0) return v1 < v2 ? v1 : v2;
    return v1 > 0 ? v1 : v2;
}

int64_t fsdp__oom_kills(const char *root)
{
    group_path g;
    int64_t n = -1;
    if (find_group(root, NULL, &g)) n = read_count(g.dir, "memory.events", "oom_kill");
    if (n < 0 && find_group(root, "memory", &g))
        n = read_count(g.dir, "memory.oom_control", "oom_kill");
    if (n < 0) {
        char proc[PATH_MAX];
        snprintf(proc, sizeof proc, "%s/proc", root);
        n = read_count(proc, "vmstat", "oom_kill");
    }
    return n;
}

/* Cores of the affinity mask; the mask's size is not known beforehand on large machines. */
static int mask_cores(void)
{
    for (int most = 1024; most <= 1 << 20; most *= 2) {
        cpu_set_t *set = CPU_ALLOC(most);
        if (!set) return 1;
        size_t size = CPU_ALLOC_SIZE(most);
        int count = sched_getaffinity(0, size, set) == 0 ? CPU_COUNT_S(size, set) : 0;
        CPU_FREE(set);
        if (count > 0) return count;
    }
    return 1;
}

int fsdp__launch_cores(void)
{
    int cores = mask_cores();
    double quota = fsdp__cores_quota("");
    /* Rounded down: a thread over the quota makes the kernel halt all of them for the rest of each
     * period, and the slowest rank sets the pace of the others. */
    if (quota > 0 && quota < cores) cores = (int)(quota + 1e-6);
    return cores < 1 ? 1 : cores;
}
