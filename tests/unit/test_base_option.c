/*
 * test_base_option.c - option tables: types, ranges, nearest names, lists, and
 * the texts made of them.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/option.h"

typedef struct training {
    int64_t steps, seq_len;
    double lr;
    bool compile;
    char *name, *path;
    int mode;
    int64_t limit;
    fsdp__strings fqns, groups;
} training;

typedef struct metrics {
    int64_t log_freq;
} metrics;

static training train;
static metrics met;

#define AT(field) offsetof(training, field)
static const fsdp__option training_rows[] = {
    {"steps", FSDP__OPT_INT, AT(steps), "1000", 1, 1e18, NULL, "Optimizer steps."},
    {"seq_len", FSDP__OPT_INT, AT(seq_len), "2048", 1, 65536, NULL, "Tokens of a row."},
    {"lr", FSDP__OPT_FLOAT, AT(lr), "3e-4", 0, 10, NULL, "Learning rate."},
    {"compile", FSDP__OPT_BOOL, AT(compile), "false", 1, 0, NULL, "Compile | or not."},
    {"name", FSDP__OPT_STRING, AT(name), "demo", 1, 0, NULL, "A name."},
    {"path", FSDP__OPT_STRING, AT(path), NULL, 1, 0, NULL, "A path."},
    {"mode", FSDP__OPT_ENUM, AT(mode), "full", 1, 0, "none|full|selective", "Recompute."},
    {"limit", FSDP__OPT_BYTES, AT(limit), "512MiB", 0, 1e18, NULL, "Bytes of a rank."},
    {"fqns", FSDP__OPT_STRINGS, AT(fqns), "a, b", 1, 0, NULL, "Modules."},
    {"groups", FSDP__OPT_MAPS, AT(groups), "[]", 1, 0, "pattern|lr", "Groups."},
    {0},
};
static const fsdp__option metrics_rows[] = {
    {"log_freq", FSDP__OPT_INT, offsetof(metrics, log_freq), "10", 1, 0, NULL, "Steps."},
    {0},
};
static const fsdp__section sections[] = {
    {"training", "How long and how fast.", training_rows, &train},
    {"metrics", "What is written.", metrics_rows, &met},
    {0},
};
static const fsdp__unavailable unavailable[] = {
    {"parallelism.tensor_parallel_degree", "tensor parallelism is not built yet"},
    {"experimental.*", "there is nothing experimental"},
    {0},
};
static const fsdp__options all = {sections, unavailable};

static int enter(void **state)
{
    (void)state;
    memset(&train, 0xff, sizeof train);
    return fsdp__options_defaults(&all) == FSDP_OK ? 0 : -1;
}

static int leave(void **state)
{
    (void)state;
    fsdp_error_clear();
    fsdp__options_free(&all);
    return 0;
}

static void set(const char *name, const char *value)
{
    if (fsdp__options_set(&all, name, value, "test") != FSDP_OK)
        fail_msg("%s: %s", name, fsdp_error_text());
}

/* The value is refused with a text that holds part, and the place. */
static void refused(const char *name, const char *value, const char *part)
{
    assert_int_equal(fsdp__options_set(&all, name, value, "a.yaml:3:5"), FSDP_INVALID_CONFIG);
    const char *text = fsdp_error_text();
    if (strncmp(text, "a.yaml:3:5: ", 12) != 0 || !strstr(text, part)) fail_msg("%s", text);
    fsdp_error_clear();
}

static void defaults_are_set(void **state)
{
    (void)state;
    assert_int_equal(train.steps, 1000);
    assert_int_equal(train.seq_len, 2048);
    assert_true(train.lr == 3e-4);
    assert_false(train.compile);
    assert_string_equal(train.name, "demo");
    assert_null(train.path);
    assert_int_equal(train.mode, 1);
    assert_int_equal(train.limit, 512 << 20);
    assert_int_equal(train.fqns.count, 2);
    assert_string_equal(train.fqns.items[1], "b");
    assert_int_equal(met.log_freq, 10);
}

static void values_are_read(void **state)
{
    (void)state;
    set("training.steps", "7");
    assert_int_equal(train.steps, 7);
    set("training.lr", "1");
    assert_true(train.lr == 1.0);
    set("training.lr", "1e-5");
    assert_true(train.lr == 1e-5);
    static const char *const yes[] = {"true", "True", "on", "yes", "1"};
    static const char *const no[] = {"false", "FALSE", "off", "no", "0"};
    for (int i = 0; i < 5; i++) {
        set("training.compile", yes[i]);
        assert_true(train.compile);
        set("training.compile", no[i]);
        assert_false(train.compile);
    }
    set("training.path", "/tmp/x");
    assert_string_equal(train.path, "/tmp/x");
    set("training.path", NULL);
    assert_null(train.path);
    set("training.name", "");
    assert_string_equal(train.name, "");
    set("training.mode", "selective");
    assert_int_equal(train.mode, 2);
    set("metrics.log_freq", "-3");
    assert_int_equal(met.log_freq, -3);
}

static void sizes_have_units(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int64_t bytes;
    } cases[] = {
        {"0", 0},
        {"123", 123},
        {"2GB", 2000000000},
        {"1.5 GiB", 3LL << 29},
        {"64kib", 65536},
        {"1M", 1 << 20},
        {"1TiB", 1LL << 40},
        {"1e3", 1000},
        {"12B", 12},
        {"9007199254740993", 9007199254740993LL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        set("training.limit", cases[i].text);
        assert_true(train.limit == cases[i].bytes);
    }
    refused("training.limit", "5 apples", "512MiB or 2GB");
    refused("training.limit", "-1", "'-1'");
    refused("training.limit", "-1MiB", "at least 0");
    refused("training.limit", "1e30TiB", "1e30TiB");
    refused("training.limit", "", "''");
}

static void wrong_values_are_refused(void **state)
{
    (void)state;
    refused("training.steps", "ten",
            "training.steps is 'ten'; expected a whole number of at least 1");
    refused("training.steps", "1.5", "whole number");
    refused("training.steps", "99999999999999999999", "whole number");
    refused("training.steps", "", "''");
    refused("training.steps", "0", "of at least 1");
    refused("training.seq_len", "65537", "from 1 to 65536");
    refused("training.lr", "fast", "a number from 0.0 to 10.0");
    refused("training.lr", "nan", "a number");
    refused("training.lr", "1x", "a number");
    refused("training.lr", "inf", "a number");
    refused("training.compile", "maybe", "true or false");
    refused("training.mode", "ful", "none, full or selective");
    refused("training.mode", "none|full", "none, full or selective");
    refused("training.steps", NULL, "'null'");
    assert_int_equal(train.steps, 1000);
    assert_int_equal(train.mode, 1);
}

static void unknown_names_get_the_nearest(void **state)
{
    (void)state;
    refused("training.step", "1", "unknown option training.step; did you mean training.steps?");
    refused("trainig.steps", "1", "did you mean training.steps?");
    refused("training.log_freq", "1", "did you mean metrics.log_freq?");
    refused("training.zzzzzzzzzz", "1", "section training has steps, seq_len");
    refused("qqqqqqqqqqqqqqqqqqqqqqqqqqqq", "1", "the sections are training, metrics");
    refused("", "1", "unknown option");
    assert_int_equal(fsdp__options_set(&all, "parallelism.tensor_parallel_degree", "2", "--x"),
                     FSDP_UNSUPPORTED);
    assert_string_equal(
        fsdp_error_text(),
        "--x: parallelism.tensor_parallel_degree is known and not available: tensor "
        "parallelism is not built yet");
    fsdp_error_clear();
    assert_int_equal(fsdp__options_set(&all, "experimental.a.b", "2", "--x"), FSDP_UNSUPPORTED);
    fsdp_error_clear();
}

static void lists(void **state)
{
    (void)state;
    const char *const items[] = {"x", "y z", ""};
    assert_int_equal(fsdp__options_set_list(&all, "training.fqns", items, 3, "f"), FSDP_OK);
    assert_int_equal(train.fqns.count, 3);
    assert_string_equal(train.fqns.items[1], "y z");
    set("training.fqns", "[ a ,b.c , d]");
    assert_int_equal(train.fqns.count, 3);
    assert_string_equal(train.fqns.items[0], "a");
    assert_string_equal(train.fqns.items[1], "b.c");
    assert_string_equal(train.fqns.items[2], "d");
    set("training.fqns", "one");
    assert_int_equal(train.fqns.count, 1);
    set("training.fqns", "[]");
    assert_int_equal(train.fqns.count, 0);
    set("training.fqns", "");
    assert_int_equal(train.fqns.count, 0);
    set("training.fqns", "a");
    set("training.fqns", NULL);
    assert_int_equal(train.fqns.count, 0);
    assert_int_equal(fsdp__options_set_list(&all, "training.fqns", NULL, 0, "f"), FSDP_OK);
    assert_int_equal(fsdp__options_set_list(&all, "training.steps", items, 1, "f:1:2"),
                     FSDP_INVALID_CONFIG);
    assert_non_null(strstr(fsdp_error_text(), "f:1:2: training.steps is 'a list'"));
    fsdp_error_clear();
}

static void maps(void **state)
{
    (void)state;
    const char *const items[] = {"{pattern: a}", "{pattern: \"b}\", lr: 1}"};
    assert_int_equal(fsdp__options_set_maps(&all, "training.groups", items, 2, "f"), FSDP_OK);
    assert_int_equal(train.groups.count, 2);
    set("training.groups", "[{pattern: \"a}\\\"{\"}, {pattern: 'b}'}]");
    assert_int_equal(train.groups.count, 2);
    assert_string_equal(train.groups.items[0], "{pattern: \"a}\\\"{\"}");
    assert_string_equal(train.groups.items[1], "{pattern: 'b}'}");
    set("training.groups", "{pattern: a, lr: 1}");
    assert_int_equal(train.groups.count, 1);
    fsdp__str s = {0};
    assert_int_equal(fsdp__options_get(&all, "training.groups", &s), FSDP_OK);
    assert_string_equal(fsdp__str_get(&s), "[{pattern: a, lr: 1}]");
    fsdp__str_free(&s);
    static const char *const bad[] = {"a",           "{a: 1",    "[{a: 1}",
                                      "{a: {b: 1}}", "{a: 1} x", "{a: 1},"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(fsdp__options_set(&all, "training.groups", bad[i], "f"),
                         FSDP_INVALID_CONFIG);
        assert_non_null(
            strstr(fsdp_error_text(), "a list of maps such as {pattern: ..., lr: ...}"));
        fsdp_error_clear();
    }
    assert_int_equal(train.groups.count, 1); /* as it was */
    set("training.groups", "[]");
    assert_int_equal(train.groups.count, 0);
    set("training.groups", "{}");
    set("training.groups", NULL);
    assert_int_equal(train.groups.count, 0);
    assert_int_equal(fsdp__options_set_maps(&all, "training.fqns", items, 1, "f"),
                     FSDP_INVALID_CONFIG);
    fsdp_error_clear();
    assert_int_equal(fsdp__options_set_list(&all, "training.groups", items, 1, "f"),
                     FSDP_INVALID_CONFIG);
    fsdp_error_clear();
    assert_int_equal(fsdp__options_set_list(&all, "training.groups", NULL, 0, "f"), FSDP_OK);
}

static void get_is(const char *name, const char *expected)
{
    fsdp__str s = {0};
    assert_int_equal(fsdp__options_get(&all, name, &s), FSDP_OK);
    assert_string_equal(fsdp__str_get(&s), expected);
    fsdp__str_free(&s);
}

static void values_are_written_as_yaml(void **state)
{
    (void)state;
    get_is("training.lr", "0.0003");
    set("training.lr", "0.1");
    get_is("training.lr", "0.1");
    set("training.lr", "1");
    get_is("training.lr", "1.0");
    train.lr = 1.0 / 3;
    get_is("training.lr", "0.3333333333333333");
    train.lr = 0.1 + 0.2;
    get_is("training.lr", "0.30000000000000004");
    train.lr = INFINITY;
    get_is("training.lr", ".inf");
    get_is("training.limit", "512MiB");
    set("training.limit", "1000");
    get_is("training.limit", "1000");
    set("training.limit", "0");
    get_is("training.limit", "0");
    get_is("training.path", "null");
    set("training.path", "./data/a-1.bin");
    get_is("training.path", "./data/a-1.bin");
    set("training.path", "a: \"b\"\n");
    get_is("training.path", "\"a: \\\"b\\\"\\n\"");
    set("training.name", "null");
    get_is("training.name", "\"null\"");
    set("training.name", "12");
    get_is("training.name", "\"12\"");
    set("training.name", "");
    get_is("training.name", "\"\"");
    get_is("training.fqns", "[a, b]");
    fsdp__str s = {0};
    assert_int_equal(fsdp__options_get(&all, "training.nope", &s), FSDP_INVALID_CONFIG);
    fsdp_error_clear();
    fsdp__str_free(&s);
}

static void numbers_do_not_follow_the_locale(void **state)
{
    (void)state;
    /* Where the machine has a locale with a comma: nothing changes. */
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8")) setlocale(LC_NUMERIC, "C.UTF-8");
    set("training.lr", "0.25");
    assert_true(train.lr == 0.25);
    get_is("training.lr", "0.25");
    setlocale(LC_NUMERIC, "C");
}

static void texts_name_every_option(void **state)
{
    (void)state;
    fsdp__str yaml = {0}, help = {0}, markdown = {0}, bare = {0};
    fsdp__options_yaml(&all, &yaml, true);
    fsdp__options_yaml(&all, &bare, false);
    fsdp__options_help(&all, &help);
    fsdp__options_markdown(&all, &markdown);
    assert_string_equal(fsdp__str_get(&bare), "training:\n"
                                              "  steps: 1000\n"
                                              "  seq_len: 2048\n"
                                              "  lr: 0.0003\n"
                                              "  compile: false\n"
                                              "  name: demo\n"
                                              "  path: null\n"
                                              "  mode: full\n"
                                              "  limit: 512MiB\n"
                                              "  fqns: [a, b]\n"
                                              "  groups: []\n"
                                              "metrics:\n"
                                              "  log_freq: 10\n");
    assert_non_null(strstr(yaml.p, "# How long and how fast.\ntraining:\n"));
    assert_non_null(strstr(yaml.p, "  # Tokens of a row. (a whole number from 1 to 65536; default "
                                   "2048)\n  seq_len: 2048\n"));
    assert_non_null(strstr(help.p, "  --training.mode\n      Recompute. (none, full or selective; "
                                   "default full)\n"));
    assert_non_null(strstr(markdown.p, "| `training.path` | a text | `unset` | A path. |\n"));
    assert_non_null(strstr(markdown.p, "Compile \\| or not."));
    /* Each line fits. */
    for (const char *p = yaml.p; *p; p += strcspn(p, "\n") + 1)
        assert_true(strcspn(p, "\n") <= 100);
    fsdp__str_free(&yaml);
    fsdp__str_free(&bare);
    fsdp__str_free(&help);
    fsdp__str_free(&markdown);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, enter, leave)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(defaults_are_set),
        TEST(values_are_read),
        TEST(sizes_have_units),
        TEST(wrong_values_are_refused),
        TEST(unknown_names_get_the_nearest),
        TEST(lists),
        TEST(maps),
        TEST(values_are_written_as_yaml),
        TEST(numbers_do_not_follow_the_locale),
        TEST(texts_name_every_option),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
