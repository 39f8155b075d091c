/*
 * test_device_file.c - memory in a file: it holds what was written, of which only a window is in
 * memory; and it fails before anything is written where the disk would not take it.
 *
 * The numbers in brackets are the invariants of device/file.h.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/context.h"
#include "device/file.h"
#include "disk_folder.h"

enum { PAGE = 4096, N = 24 };
#define BLOCK ((size_t)1 << 20)
#define WINDOW ((int64_t)4 << 20)

static int entries(void)
{
    int n = 0;
    DIR *d = opendir(folder);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));)
        n += e->d_name[0] != '.';
    closedir(d);
    return n;
}

/* Size of the nameless file of the folder that this process has open. */
static int64_t file_size(void)
{
    DIR *d = opendir("/proc/self/fd");
    int64_t size = -1;
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        char link[64], target[512];
        struct stat st;
        snprintf(link, sizeof link, "/proc/self/fd/%.20s", e->d_name);
        ssize_t n = readlink(link, target, sizeof target - 1);
        if (n < 0) continue;
        target[n] = 0;
        if (strstr(target, folder) && strstr(target, "(deleted)") && stat(link, &st) == 0)
            size = st.st_size;
    }
    closedir(d);
    return size;
}

static int64_t resident(const char *p, size_t bytes)
{
    static unsigned char in[65536];
    int64_t n = 0;
    assert_true(bytes / PAGE <= sizeof in);
    assert_int_equal(mincore((void *)(uintptr_t)p, bytes, in), 0);
    for (size_t i = 0; i < bytes / PAGE; i++)
        n += in[i] & 1 ? PAGE : 0;
    return n;
}

static fsdp_memory_stats memory(void)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    return m;
}

static void expect_error(fsdp_status code, const char *words)
{
    assert_int_equal(fsdp_error(), code);
    if (!strstr(fsdp_error_text(), words)) fail_msg("%s", fsdp_error_text());
    fsdp_error_clear();
}

static char *take(fsdp__allocator *a)
{
    char *p = a->alloc(a, BLOCK, "a block");
    assert_non_null(p);
    return p;
}

/* Blocks of six times the window are written and read again, in order. */
static void test_window(void **state)
{
    (void)state;
    fsdp__allocator *a = fsdp__allocator_file(folder, WINDOW);
    char *p[N], *low = NULL;
    assert_non_null(a);
    assert_true(a->in_file);
    for (int i = 0; i < N; i++) {
        p[i] = take(a);
        low = !low || p[i] < low ? p[i] : low;
        assert_int_equal((uintptr_t)p[i] % PAGE, 0);
        for (size_t k = 0; k < BLOCK; k += 997)
            assert_int_equal(p[i][k], 0); /* [4] */
    }
    fsdp_memory_reset_peak();
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            for (int k = i + 1; k < N && fsdp__file_ahead(a, p[k]); k++)
                continue;
            assert_int_equal(fsdp__file_use(a, p[i]), FSDP_OK);
            for (size_t k = 0; round > 0 && k < BLOCK; k += 997)
                assert_int_equal((unsigned char)p[i][k], (unsigned char)(i * 7 + round - 1));
            memset(p[i], i * 7 + round, BLOCK);
            fsdp__file_done(a, p[i], true);
            assert_true(memory().window <= WINDOW);
        }
    }
    assert_int_equal(memory().window_peak, WINDOW); /* [1] [2] */
    if (on_disk) assert_true(resident(low, N * BLOCK) <= WINDOW);
    fsdp_offload_stats io;
    fsdp_offload_get(&io);
    if (on_disk) assert_true(io.read_bytes >= (int64_t)(2 * (N - 4) * BLOCK));
    assert_true(io.written_bytes >= (int64_t)((3 * N - 4) * BLOCK));
    assert_true(io.read_wait >= 0 && io.write_wait > 0);
    assert_int_equal(entries(), 0);
    assert_int_equal(file_size(), N * BLOCK); /* [3] */
    for (int i = 0; i < N; i++)
        a->free(a, p[i], BLOCK);
    assert_int_equal(memory().window, 0);
    assert_int_equal(file_size(), 0); /* the disk has its room back */
}

/* What is used is held, whatever the window's limit; reading ahead keeps to it. */
static void test_in_use(void **state)
{
    (void)state;
    fsdp__allocator *a = fsdp__allocator_file(folder, WINDOW);
    char *p[8];
    for (int i = 0; i < 8; i++) {
        p[i] = take(a);
        memset(p[i], i, BLOCK);
        fsdp__file_note(a, p[i], true); /* as an op that writes would say it */
    }
    assert_int_equal(memory().window, WINDOW);
    for (int i = 0; i < 6; i++)
        assert_int_equal(fsdp__file_use(a, p[i]), FSDP_OK);
    assert_int_equal(memory().window, 6 * BLOCK); /* [2] */
    if (on_disk) assert_int_equal(resident(p[0], BLOCK), BLOCK);
    assert_false(fsdp__file_ahead(a, p[7]));
    for (int i = 0; i < 6; i++)
        fsdp__file_done(a, p[i], false);
    assert_int_equal(memory().window, WINDOW);
    assert_true(fsdp__file_ahead(a, p[7]));
    assert_true(fsdp__file_ahead(a, p[6]));
    /* What was read ahead stays until it is used, unless nothing else can go. */
    for (int i = 0; i < 4; i++) {
        assert_int_equal(fsdp__file_use(a, p[i]), FSDP_OK);
        fsdp__file_done(a, p[i], false);
    }
    if (on_disk) assert_int_equal(resident(p[7], BLOCK), BLOCK);
    assert_int_equal(p[7][BLOCK - 1], 7);
    for (int i = 0; i < 8; i++)
        a->free(a, p[i], BLOCK);
    assert_int_equal(memory().window, 0);
}

/* Small blocks have pages of their own, and used ranges are zeros when they are taken again. */
static void test_again(void **state)
{
    (void)state;
    fsdp__allocator *a = fsdp__allocator_file(folder, WINDOW);
    char *keep = take(a);
    for (int round = 0; round < 3; round++) {
        char *p[5];
        for (int i = 0; i < 5; i++) {
            size_t bytes = (size_t)100 + (size_t)i * 5000;
            p[i] = a->alloc(a, bytes, "a small block");
            assert_non_null(p[i]);
            assert_int_equal((uintptr_t)p[i] % PAGE, 0);
            for (size_t k = 0; k < bytes; k++)
                assert_int_equal(p[i][k], 0); /* [4] */
            memset(p[i], 1 + round, bytes);   /* nobody is told */
        }
        for (int i = 0; i < 5; i++)
            a->free(a, p[i], (size_t)100 + (size_t)i * 5000);
    }
    a->free(a, keep, BLOCK);
    assert_int_equal(file_size(), 0);
}

static void test_reserve(void **state)
{
    (void)state;
    fsdp__allocator *a = fsdp__allocator_file(folder, WINDOW);
    assert_int_equal(fsdp__file_round(1), PAGE);
    assert_int_equal(fsdp__file_reserve(a, 5 * (int64_t)BLOCK), FSDP_OK);
    assert_int_equal(file_size(), 5 * BLOCK);
    char *p = take(a);
    assert_int_equal(file_size(), 5 * BLOCK); /* out of what was asked for */
    assert_int_equal(fsdp__file_reserve(a, (int64_t)1 << 50), FSDP_NO_MEMORY);
    expect_error(FSDP_NO_MEMORY, "address space");
    assert_int_equal(file_size(), 5 * BLOCK);
    a->free(a, p, BLOCK);
    assert_int_equal(file_size(), 5 * BLOCK); /* still promised */
    assert_int_equal(fsdp__file_reserve(a, -5 * (int64_t)BLOCK), FSDP_OK);
    assert_int_equal(file_size(), 0);
}

/* The system would kill who goes over this limit. */
static void test_limit(void **state)
{
    (void)state;
    struct rlimit before, small;
    getrlimit(RLIMIT_FSIZE, &before);
    small = before;
    small.rlim_cur = 2 * BLOCK;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    fsdp__allocator *a = fsdp__allocator_file(folder, WINDOW);
    char *p = take(a), *q = take(a), *r = a->alloc(a, BLOCK, "too much");
    setrlimit(RLIMIT_FSIZE, &before);
    assert_null(r);
    expect_error(FSDP_IO_ERROR, "limit of file size");
    memset(p, 1, BLOCK);
    memset(q, 2, BLOCK);
    a->free(a, p, BLOCK);
    a->free(a, q, BLOCK);
}

/* A disk of 3 MiB: what it does not take is refused, what was taken can be written. */
static void test_full_disk(void **state)
{
    (void)state;
    const char *small = getenv("FSDP_TEST_SMALL_DISK");
    if (!small) {
        printf("skip: no small disk is given in FSDP_TEST_SMALL_DISK (tests/cli/offload.sh mounts "
               "one)\n");
        skip();
    }
    fsdp__allocator *a = fsdp__allocator_file(small, WINDOW);
    assert_non_null(a);
    char *p = take(a), *q = take(a), *r = a->alloc(a, 4 * BLOCK, "too much");
    assert_null(r);
    expect_error(FSDP_IO_ERROR, "has no room for");
    memset(p, 1, BLOCK);
    memset(q, 2, BLOCK);
    assert_int_equal(fsdp__file_reserve(a, 4 * (int64_t)BLOCK), FSDP_IO_ERROR);
    expect_error(FSDP_IO_ERROR, "are free");
    a->free(a, p, BLOCK);
    a->free(a, q, BLOCK);
}

static void test_folders(void **state)
{
    (void)state;
    assert_null(fsdp__allocator_file("no/such/folder", 0));
    expect_error(FSDP_IO_ERROR, "there is no folder 'no/such/folder'");
    assert_null(fsdp__allocator_file(NULL, 0));
    expect_error(FSDP_IO_ERROR, "there is no folder ''");
    assert_null(fsdp__allocator_file("/proc/self", 0));
    expect_error(FSDP_IO_ERROR, "cannot make a file in the folder /proc/self");
    char dotted[64];
    snprintf(dotted, sizeof dotted, "./%s/.", folder);
    assert_ptr_equal(fsdp__allocator_file(folder, 0), fsdp__allocator_file(dotted, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_window),  cmocka_unit_test(test_in_use),
        cmocka_unit_test(test_again),   cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_limit),   cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_folders),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
