/*
 * test_format_yaml.c - YAML of two levels: values in order with their places, and every other form
 * an error with file, line and column, nothing printed.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/str.h"
#include "format/file.h"
#include "format/yaml.h"

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    return 0;
}

static fsdp_status note(void *arg, const fsdp__yaml_value *v)
{
    fsdp__str *s = arg;
    fsdp__str_addf(s, "%s.%s=", v->section, v->name);
    if (v->text) {
        fsdp__str_add(s, v->text);
    } else {
        fsdp__str_add(s, "[");
        for (int64_t i = 0; i < v->n; i++)
            fsdp__str_addf(s, "%s%s", i ? "|" : "", v->items[i]);
        fsdp__str_add(s, "]");
    }
    fsdp__str_addf(s, " @%s\n", v->place);
    return FSDP_OK;
}

static void expect(const char *text, const char *expected)
{
    fsdp__str s = {0};
    fsdp_status e = fsdp__yaml_parse(text, strlen(text), "c.yaml", note, &s);
    if (e != FSDP_OK) fail_msg("%s", fsdp_error_text());
    assert_string_equal(fsdp__str_get(&s), expected);
    fsdp__str_free(&s);
}

static void test_values(void **state)
{
    (void)state;
    expect("# a comment\n"
           "training:\n"
           "  steps: 1000   # so many\n"
           "  lr: 3e-4\n"
           "  on: true\n"
           "  nothing: null\n"
           "  none:\n"
           "  empty: ''\n"
           "  text: \"a: b # c\\n\"\n"
           "  names: [a, 'b c', 3]\n"
           "  block:\n"
           "    - x\n"
           "    - y\n"
           "  l: []\n"
           "comm: {kind: shm, n: -1}\n"
           "empty:\n",
           "training.steps=1000 @c.yaml:3:10\n"
           "training.lr=3e-4 @c.yaml:4:7\n"
           "training.on=true @c.yaml:5:7\n"
           "training.nothing=null @c.yaml:6:12\n"
           "training.none=null @c.yaml:7:3\n"
           "training.empty= @c.yaml:8:10\n"
           "training.text=a: b # c\n @c.yaml:9:9\n"
           "training.names=[a|b c|3] @c.yaml:10:11\n"
           "training.block=[x|y] @c.yaml:12:7\n"
           "training.l=[] @c.yaml:14:3\n"
           "comm.kind=shm @c.yaml:15:14\n"
           "comm.n=-1 @c.yaml:15:22\n");
}

static void test_maps(void **state)
{
    (void)state;
    expect("a:\n"
           "  b:\n"
           "    - pattern: '*norm*'\n"
           "      decay: 0\n"
           "    - {pattern: x.y, lr: 1e-3, 'odd: name': \"a\\\"b\"}\n"
           "  c: [{}]\n",
           "a.b=[{pattern: \"*norm*\", decay: 0}|"
           "{pattern: x.y, lr: 1e-3, \"odd: name\": \"a\\\"b\"}] @c.yaml:3:7\n"
           "a.c=[{}] @c.yaml:6:3\n");
}

static void test_empty(void **state)
{
    (void)state;
    expect("", "");
    expect("\n\n", "");
    expect("# only a comment\n", "");
    expect("---\n...\n", "");
    expect("a:\nb:\n", "");
    expect("---\na: {b: 1}\n", "a.b=1 @c.yaml:2:8\n");
    expect("a: {}\n", "");
    expect("a:\r\n  b: 1\r\n", "a.b=1 @c.yaml:2:6\n");
    expect("\xef\xbb\xbf"
           "a:\n  b: \xc3\xa9\n",
           "a.b=\xc3\xa9 @c.yaml:2:6\n");
}

typedef struct bad {
    const char *text, *place, *word;
} bad;

static const bad table[] = {
    {"a: 1\n", "c.yaml:1:4: a", "found a single value, expected a section"},
    {"a: [1]\n", "c.yaml:1:5: a", "found a list, expected a section"},
    {"- a\n", "c.yaml:1:3", "found a list, expected sections"},
    {"hello\n", "c.yaml:1:1", "found a single value, expected sections"},
    {"a:\n  b:\n    c: 1\n", "c.yaml:3:5: a.b", "found a map of names to values"},
    {"a:\n  b: [1, [2]]\n", "c.yaml:2:11: a.b", "found a list, expected single values"},
    {"a:\n  b:\n  - x\n  - c: 1\n", "c.yaml:4:5: a.b", "found a map"},
    {"a:\n  b:\n  - c: 1\n  - x\n", "c.yaml:4:5: a.b", "found a single value, expected maps"},
    {"a:\n  b:\n  - c: [1]\n", "c.yaml:3:9: a.b", "found a list, expected a single value"},
    {"a:\n  b:\n  - c: 1\n    c: 2\n", "c.yaml:4:5: a.b", "'c' a second time"},
    {"a:\n  b: 1\n  c: 2\n  b: 3\n", "c.yaml:4:3: a", "'b' a second time, first in line 2"},
    {"a:\n  b: 1\nc:\n  d: 1\na:\n  e: 1\n", "c.yaml:5:1", "'a' a second time, first in line 1"},
    {"a:\n  b: &x 1\n  c: *x\n", "c.yaml:3:6: a.c", "found an alias"},
    {"a:\n  [1]: 2\n", "c.yaml:2:", "expected a name"},
    {"a:\n  b: [1, 2\n", "c.yaml:", "invalid YAML"},
    {"a:\n  b: \"x\n", "c.yaml:", "invalid YAML"},
    {"a:\n  b: 1\n c: 2\n", "c.yaml:3:", "invalid YAML"},
    {"a:\n\tb: 1\n", "c.yaml:2:", "invalid YAML"},
    {"a: b: c\n", "c.yaml:1:", "invalid YAML"},
    {"a:\n  b: \xff\n", "c.yaml:2:6", "0xff"},
    {"a: {b: 1}\n---\nc: {d: 1}\n", "c.yaml", "second YAML document"},
    {"a:\n  b: \"x\\0y\"\n", "c.yaml:2:6: a.b", "NUL"},
};

static void test_bad(void **state)
{
    (void)state;
    /* libfyaml must not write to the program's standard error. */
    FILE *catch = tmpfile();
    int old = dup(2);
    fflush(stderr);
    dup2(fileno(catch), 2);
    char problems[4096] = "";
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        fsdp__str s = {0};
        fsdp_status e = fsdp__yaml_parse(table[i].text, strlen(table[i].text), "c.yaml", note, &s);
        fsdp__str_free(&s);
        if (e != FSDP_INVALID_CONFIG || !strstr(fsdp_error_text(), table[i].place) ||
            !strstr(fsdp_error_text(), table[i].word)) {
            size_t n = strlen(problems);
            snprintf(problems + n, sizeof problems - n, "%zu: %d %s\n", i, (int)e,
                     fsdp_error_text());
        }
        fsdp_error_clear();
    }
    fflush(stderr);
    dup2(old, 2);
    close(old);
    assert_int_equal(lseek(fileno(catch), 0, SEEK_END), 0);
    fclose(catch);
    if (problems[0]) fail_msg("%s", problems);
}

static fsdp_status refuse(void *arg, const fsdp__yaml_value *v)
{
    (void)v;
    ++*(int *)arg;
    return FSDP_INTERRUPTED;
}

static void test_callback_ends(void **state)
{
    (void)state;
    static const char text[] = "a:\n  b: 1\n  c: [1]\nd:\n  e: 1\n";
    int calls = 0;
    assert_int_equal(fsdp__yaml_parse(text, strlen(text), "c.yaml", refuse, &calls),
                     FSDP_INTERRUPTED);
    assert_int_equal(calls, 1);
}

static void test_load(void **state)
{
    (void)state;
    fsdp__str s = {0};
    char path[] = "/tmp/fsdp-test-yaml-XXXXXX";
    close(mkstemp(path));
    assert_int_equal(fsdp__file_write(path, "a:\n  b: 1\n", 10), FSDP_OK);
    assert_int_equal(fsdp__yaml_load(path, note, &s), FSDP_OK);
    assert_non_null(strstr(fsdp__str_get(&s), path));
    fsdp__str_free(&s);
    unlink(path);
    assert_int_equal(fsdp__yaml_load("/nowhere/c.yaml", note, &s), FSDP_NOT_FOUND);
    assert_non_null(strstr(fsdp_error_text(), "/nowhere/c.yaml"));
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup(f, start)
    const struct CMUnitTest tests[] = {TEST(test_values),        TEST(test_maps),
                                       TEST(test_empty),         TEST(test_bad),
                                       TEST(test_callback_ends), TEST(test_load)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
