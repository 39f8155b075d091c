/* The quota and the out-of-memory count, read from made-up machines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/launch_internal.h"

static char root[] = "/tmp/fsdp-cores-XXXXXX";

/* Writes root/path, making its folders. */
static void put(const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *p = full + strlen(root) + 1; *p; p++) {
        if (*p != '/') continue;
        *p = 0;
        mkdir(full, 0777);
        *p = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static int fresh(void **state)
{
    (void)state;
    strcpy(root, "/tmp/fsdp-cores-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int clean(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

#define V2_MOUNT "30 29 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

static void test_nothing_there(void **state)
{
    (void)state;
    assert_true(fsdp__cores_quota(root) == 0);
    assert_int_equal(fsdp__oom_kills(root), -1);
    put("proc/self/cgroup", "0::/\nnonsense\n");
    put("proc/self/mountinfo", "nonsense\n1 2 3 - x\n");
    assert_true(fsdp__cores_quota(root) == 0);
}

static void test_version_2(void **state)
{
    (void)state;
    put("proc/self/cgroup", "0::/user.slice/job\n");
    put("proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" V2_MOUNT);
    put("sys/fs/cgroup/user.slice/job/cpu.max", "max 100000\n");
    put("sys/fs/cgroup/user.slice/job/memory.events", "low 0\noom 3\noom_kill 2\n");
    assert_true(fsdp__cores_quota(root) == 0);
    assert_int_equal(fsdp__oom_kills(root), 2);
    /* A group above binds, too. */
    put("sys/fs/cgroup/user.slice/cpu.max", "350000 100000\n");
    assert_true(fsdp__cores_quota(root) == 3.5);
    put("sys/fs/cgroup/user.slice/job/cpu.max", "50000 100000\n");
    assert_true(fsdp__cores_quota(root) == 0.5);
    put("sys/fs/cgroup/cpu.max", "20000 100000\n");
    assert_true(fsdp__cores_quota(root) == 0.2);
}

static void test_version_1(void **state)
{
    (void)state;
    put("proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/docker/abc\n");
    /* In a container the group itself is what is mounted. */
    put("proc/self/mountinfo",
        "40 30 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
        "41 30 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    put("sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n");
    assert_true(fsdp__cores_quota(root) == 0);
    assert_int_equal(fsdp__oom_kills(root), 7);
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n");
    assert_true(fsdp__cores_quota(root) == 2.5);
}

static void test_both_versions(void **state)
{
    (void)state;
    put("proc/self/cgroup", "1:cpu:/a\n0::/b\n");
    put("proc/self/mountinfo", "40 30 0:30 / /c1 ro - cgroup cpu rw,cpu\n"
                               "41 30 0:31 / /c2 ro - cgroup2 none rw\n");
    put("c1/a/cpu.cfs_quota_us", "300000\n");
    put("c1/a/cpu.cfs_period_us", "100000\n");
    assert_true(fsdp__cores_quota(root) == 3);
    put("c2/b/cpu.max", "200000 100000\n");
    assert_true(fsdp__cores_quota(root) == 2);
    put("proc/vmstat", "nr_free_pages 5\noom_kill 11\n");
    assert_int_equal(fsdp__oom_kills(root), 11);
}

static void test_affinity(void **state)
{
    (void)state;
    cpu_set_t old, one;
    assert_int_equal(sched_getaffinity(0, sizeof old, &old), 0);
    assert_true(fsdp__launch_cores() >= 1 && fsdp__launch_cores() <= CPU_COUNT(&old));
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &old)) CPU_SET(i, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(fsdp__launch_cores(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof old, &old), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_nothing_there, fresh, clean),
        cmocka_unit_test_setup_teardown(test_version_2, fresh, clean),
        cmocka_unit_test_setup_teardown(test_version_1, fresh, clean),
        cmocka_unit_test_setup_teardown(test_both_versions, fresh, clean),
        cmocka_unit_test(test_affinity),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
