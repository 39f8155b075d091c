/*
 * test_format_file.c - files and folders: all or nothing, sorted, and errors that name the path.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdatomic.h>

#include "format/file.h"

static char folder[] = "/tmp/fsdp-test-file-XXXXXX";

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    fsdp_error_clear();
    return fsdp__dir_remove(folder) == FSDP_OK && !fsdp__dir_exists(folder) ? 0 : -1;
}

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    return 0;
}

static const char *in(const char *name)
{
    static char paths[4][256];
    static int k;
    char *p = paths[k++ % 4];
    snprintf(p, sizeof paths[0], "%s/%s", folder, name);
    return p;
}

static char in_folder[300];

static void expect_error(fsdp_status got, fsdp_status code, const char *word)
{
    assert_int_equal(got, code);
    if (!strstr(fsdp_error_text(), word)) fail_msg("no '%s' in: %s", word, fsdp_error_text());
    fsdp_error_clear();
}

static void test_read_and_write(void **state)
{
    (void)state;
    char *p;
    size_t n;
    int64_t size = -1;
    assert_int_equal(fsdp__file_write(in("a"), "x\0y", 3), FSDP_OK);
    assert_int_equal(fsdp__file_read(in("a"), &p, &n), FSDP_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(p, "x\0y\0", 4);
    free(p);
    assert_int_equal(fsdp__file_size(in("a"), &size), FSDP_OK);
    assert_int_equal(size, 3);
    /* replaced as a whole, also by nothing */
    assert_int_equal(fsdp__file_write(in("a"), NULL, 0), FSDP_OK);
    assert_int_equal(fsdp__file_read(in("a"), &p, &n), FSDP_OK);
    assert_int_equal(n, 0);
    assert_string_equal(p, "");
    free(p);
    /* a file without a size of its own */
    assert_int_equal(fsdp__file_read("/proc/self/status", &p, &n), FSDP_OK);
    assert_non_null(strstr(p, "Pid:"));
    free(p);
    expect_error(fsdp__file_read(in("none"), &p, &n), FSDP_NOT_FOUND, in("none"));
    assert_null(p);
    expect_error(fsdp__file_read(in("a/b"), &p, &n), FSDP_NOT_FOUND, "Not a directory");
    expect_error(fsdp__file_read(folder, &p, &n), FSDP_IO_ERROR, folder);
    expect_error(fsdp__file_write(in("none/a"), "x", 1), FSDP_NOT_FOUND, "none/a");
    expect_error(fsdp__file_size(in("none"), &size), FSDP_NOT_FOUND, "none");
    assert_true(fsdp__file_exists(in("a")));
    assert_false(fsdp__file_exists(folder));
    assert_int_equal(fsdp__file_remove(in("a")), FSDP_OK);
    assert_int_equal(fsdp__file_remove(in("a")), FSDP_OK);
    assert_false(fsdp__file_exists(in("a")));
}

/* Looks at a file all the while; *arg becomes how often it was not there. */
static atomic_int watching;
static void *watch(void *arg)
{
    int *missing = arg, looks = 0;
    while (atomic_load(&watching)) {
        if (access(in_folder, R_OK)) ++*missing;
        looks++;
    }
    return looks > 0 ? missing : NULL;
}

static void make_dir(const char *name, const char *text)
{
    char path[300];
    assert_int_equal(fsdp__dir_make(in(name)), FSDP_OK);
    snprintf(path, sizeof path, "%s/x", in(name));
    assert_int_equal(fsdp__file_write(path, text, strlen(text)), FSDP_OK);
}

/* At any moment the old folder or the new one stands there, so a kill leaves one of them. */
static void test_replace_folder(void **state)
{
    (void)state;
    pthread_t thread;
    int missing = 0;
    char text[32], *p;
    size_t n;
    make_dir("d", "first");
    snprintf(in_folder, sizeof in_folder, "%s/x", in("d"));
    atomic_store(&watching, 1);
    assert_int_equal(pthread_create(&thread, NULL, watch, &missing), 0);
    for (int k = 0; k < 200; k++) {
        snprintf(text, sizeof text, "number %d", k);
        make_dir("d.tmp", text);
        assert_int_equal(fsdp__dir_replace(in("d.tmp"), in("d"), in("d.old")), FSDP_OK);
        assert_false(fsdp__dir_exists(in("d.tmp")));
        assert_int_equal(fsdp__file_read(in_folder, &p, &n), FSDP_OK);
        assert_string_equal(p, text);
        free(p);
    }
    atomic_store(&watching, 0);
    void *looked;
    pthread_join(thread, &looked);
    assert_ptr_equal(looked, &missing);
    assert_int_equal(missing, 0);
    assert_false(fsdp__dir_exists(in("d.old")));
    /* What cannot come leaves what is there. */
    expect_error(fsdp__dir_replace(in("none"), in("d"), in("d.old")), FSDP_NOT_FOUND, "none");
    assert_true(fsdp__file_exists(in_folder));
    assert_false(fsdp__dir_exists(in("d.old")));
    make_dir("d.tmp", "new");
    assert_int_equal(fsdp__dir_remove(in("d")), FSDP_OK);
    assert_int_equal(fsdp__dir_replace(in("d.tmp"), in("d"), in("d.old")), FSDP_OK);
    assert_true(fsdp__file_exists(in_folder));
    assert_int_equal(fsdp__dir_remove(in("d")), FSDP_OK);
}

static void test_copy(void **state)
{
    (void)state;
    size_t n = (1 << 20) + 17, len;
    char *data = malloc(n), *back;
    for (size_t i = 0; i < n; i++)
        data[i] = (char)(i * 31);
    assert_int_equal(fsdp__file_write(in("from"), data, n), FSDP_OK);
    assert_int_equal(fsdp__file_copy(in("from"), in("to")), FSDP_OK);
    assert_int_equal(fsdp__file_read(in("to"), &back, &len), FSDP_OK);
    assert_int_equal(len, n);
    assert_memory_equal(back, data, n);
    free(back);
    free(data);
    expect_error(fsdp__file_copy(in("none"), in("to")), FSDP_NOT_FOUND, "none");
    assert_true(fsdp__file_exists(in("to")));
    fsdp__file_remove(in("from"));
    fsdp__file_remove(in("to"));
}

/* A write that does not fit keeps the old content and leaves no second file. */
static void test_all_or_nothing(void **state)
{
    (void)state;
    struct rlimit old, small;
    char *data = calloc(1, 100000), *p, **names;
    size_t n;
    int64_t count;
    assert_int_equal(fsdp__dir_make(in("d")), FSDP_OK);
    assert_int_equal(fsdp__file_write(in("d/a"), "old", 3), FSDP_OK);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){50000, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    fsdp_status s = fsdp__file_write(in("d/a"), data, 100000);
    setrlimit(RLIMIT_FSIZE, &old);
    free(data);
    expect_error(s, FSDP_IO_ERROR, "d/a");
    assert_int_equal(fsdp__file_read(in("d/a"), &p, &n), FSDP_OK);
    assert_string_equal(p, "old");
    free(p);
    assert_int_equal(fsdp__dir_list(in("d"), &names, &count), FSDP_OK);
    assert_int_equal(count, 1);
    fsdp__dir_list_free(names, count);
    assert_int_equal(fsdp__dir_remove(in("d")), FSDP_OK);
}

static void test_temp(void **state)
{
    (void)state;
    fsdp__temp_file a, b;
    char *p;
    size_t n;
    /* two writers of one path at a time do not meet */
    assert_int_equal(fsdp__temp_open(&a, in("t")), FSDP_OK);
    assert_int_equal(fsdp__temp_open(&b, in("t")), FSDP_OK);
    assert_string_not_equal(a.temp, b.temp);
    assert_int_equal(fsdp__file_pwrite(a.fd, "aaa", 3, 0, "t"), FSDP_OK);
    assert_int_equal(fsdp__file_pwrite(b.fd, "b", 1, 2, "t"), FSDP_OK);
    assert_false(fsdp__file_exists(in("t")));
    assert_int_equal(fsdp__temp_commit(&a), FSDP_OK);
    assert_int_equal(fsdp__temp_commit(&b), FSDP_OK);
    fsdp__temp_abort(&b);
    assert_int_equal(fsdp__file_read(in("t"), &p, &n), FSDP_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(p, "\0\0b", 3);
    free(p);
    /* a commit that cannot rename: an error and nothing left */
    assert_int_equal(fsdp__dir_make(in("full/x")), FSDP_OK);
    assert_int_equal(fsdp__temp_open(&a, in("full")), FSDP_OK);
    char temp[256];
    snprintf(temp, sizeof temp, "%s", a.temp);
    expect_error(fsdp__temp_commit(&a), FSDP_IO_ERROR, "full");
    assert_false(fsdp__file_exists(temp));
    assert_int_equal(fsdp__dir_remove(in("full")), FSDP_OK);
    fsdp__file_remove(in("t"));
}

static void test_ranges(void **state)
{
    (void)state;
    char buf[4] = "....";
    fsdp__temp_file t;
    assert_int_equal(fsdp__temp_open(&t, in("r")), FSDP_OK);
    assert_int_equal(fsdp__file_pwrite(t.fd, "abcdef", 6, 0, "r"), FSDP_OK);
    assert_int_equal(fsdp__file_pread(t.fd, buf, 4, 2, "r"), FSDP_OK);
    assert_memory_equal(buf, "cdef", 4);
    assert_int_equal(fsdp__file_pread(t.fd, buf, 0, 99, "r"), FSDP_OK);
    expect_error(fsdp__file_pread(t.fd, buf, 4, 3, "r"), FSDP_INVALID_DATA, "found 3 bytes");
    expect_error(fsdp__file_pread(-1, buf, 4, 3, "r"), FSDP_IO_ERROR, "r");
    fsdp__temp_abort(&t);
}

static void test_folders(void **state)
{
    (void)state;
    char **names;
    int64_t n = -1;
    assert_int_equal(fsdp__dir_make(in("a/b//c/")), FSDP_OK);
    assert_int_equal(fsdp__dir_make(in("a/b/c")), FSDP_OK);
    assert_true(fsdp__dir_exists(in("a/b/c")));
    assert_int_equal(fsdp__dir_list(in("a/b/c"), &names, &n), FSDP_OK);
    assert_int_equal(n, 0);
    fsdp__dir_list_free(names, n);
    const char *const made[] = {"z", "B", "\xc3\xa9", "a10", "a9"};
    for (int i = 0; i < 5; i++) {
        char name[32];
        snprintf(name, sizeof name, "a/%s", made[i]);
        assert_int_equal(fsdp__file_write(in(name), "1", 1), FSDP_OK);
    }
    assert_int_equal(symlink("/usr", in("a/link")), 0);
    assert_int_equal(fsdp__dir_list(in("a"), &names, &n), FSDP_OK);
    const char *const sorted[] = {"B", "a10", "a9", "b", "link", "z", "\xc3\xa9"};
    assert_int_equal(n, 7);
    for (int i = 0; i < 7; i++)
        assert_string_equal(names[i], sorted[i]);
    fsdp__dir_list_free(names, n);
    expect_error(fsdp__dir_list(in("none"), &names, &n), FSDP_NOT_FOUND, "none");
    expect_error(fsdp__dir_make(in("a/z/x")), FSDP_IO_ERROR, "a/z;");
    expect_error(fsdp__dir_make(in("a/z")), FSDP_IO_ERROR, "a/z");
    assert_int_equal(fsdp__dir_sync(in("a")), FSDP_OK);
    expect_error(fsdp__dir_sync(in("none")), FSDP_NOT_FOUND, "none");
    /* the link goes, what it points to stays */
    assert_int_equal(fsdp__dir_remove(in("a")), FSDP_OK);
    assert_false(fsdp__dir_exists(in("a")));
    assert_true(fsdp__dir_exists("/usr"));
    assert_int_equal(fsdp__dir_remove(in("a")), FSDP_OK);
    int64_t room = -1;
    assert_int_equal(fsdp__dir_available(folder, &room), FSDP_OK);
    assert_true(room >= 0);
    expect_error(fsdp__dir_available(in("none"), &room), FSDP_NOT_FOUND, "none");
}

static void test_claims(void **state)
{
    (void)state;
    int a, b;
    /* What could be made is made by nobody. */
    assert_int_equal(fsdp__dir_can_make(in("claim/x//y/")), FSDP_OK);
    assert_false(fsdp__dir_exists(in("claim")));
    assert_int_equal(fsdp__dir_make(in("claim")), FSDP_OK);
    assert_int_equal(fsdp__dir_can_make(in("claim")), FSDP_OK);
    assert_int_equal(fsdp__file_write(in("claim/file"), "x", 1), FSDP_OK);
    expect_error(fsdp__dir_can_make(in("claim/file/x")), FSDP_IO_ERROR, "claim/file; something");
    expect_error(fsdp__dir_can_make(in("claim/file")), FSDP_IO_ERROR, "claim/file; something");

    assert_int_equal(fsdp__dir_lock(in("claim"), 0.0, &a), FSDP_OK);
    expect_error(fsdp__dir_lock(in("claim"), 0.05, &b), FSDP_INVALID_STATE, "another process");
    assert_int_equal(b, -1);
    close(a);
    assert_int_equal(fsdp__dir_lock(in("claim"), 0.0, &b), FSDP_OK);
    close(b);
    expect_error(fsdp__dir_lock(in("nowhere"), 0.0, &a), FSDP_NOT_FOUND, "nowhere");
}

static void test_rename(void **state)
{
    (void)state;
    assert_int_equal(fsdp__dir_make(in("s.tmp")), FSDP_OK);
    assert_int_equal(fsdp__file_write(in("s.tmp/x"), "1", 1), FSDP_OK);
    assert_int_equal(fsdp__file_rename(in("s.tmp"), in("s")), FSDP_OK);
    assert_true(fsdp__file_exists(in("s/x")));
    expect_error(fsdp__file_rename(in("none"), in("s")), FSDP_NOT_FOUND, "none");
    assert_int_equal(fsdp__dir_remove(in("s")), FSDP_OK);
}

static void expect_path(char *got, const char *expected)
{
    assert_non_null(got);
    assert_string_equal(got, expected);
    free(got);
}

static void test_paths(void **state)
{
    (void)state;
    expect_path(fsdp__path_join("a", "b"), "a/b");
    expect_path(fsdp__path_join("a/", "b"), "a/b");
    expect_path(fsdp__path_join("", "b"), "b");
    expect_path(fsdp__path_join("a", "/b"), "/b");
    expect_path(fsdp__path_join("", ""), "");
    expect_path(fsdp__path_dir("a/b/c"), "a/b");
    expect_path(fsdp__path_dir("c"), ".");
    expect_path(fsdp__path_dir("/c"), "/");
    assert_string_equal(fsdp__path_name("a/b"), "b");
    assert_string_equal(fsdp__path_name("b"), "b");
    assert_string_equal(fsdp__path_name("a/"), "");
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup(f, start)
    const struct CMUnitTest tests[] = {
        TEST(test_read_and_write), TEST(test_replace_folder), TEST(test_copy),
        TEST(test_all_or_nothing), TEST(test_temp),           TEST(test_ranges),
        TEST(test_folders),        TEST(test_claims),         TEST(test_rename),
        TEST(test_paths),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
