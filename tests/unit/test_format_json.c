/*
 * test_format_json.c - JSON: errors with their place, fields of the right kind, and text as Python
 * writes it.
 */
#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/file.h"
#include "format/json.h"

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    return 0;
}

static void expect_error(fsdp_status code, const char *text)
{
    assert_int_equal(fsdp_error(), code);
    if (!strstr(fsdp_error_text(), text)) fail_msg("no '%s' in: %s", text, fsdp_error_text());
    fsdp_error_clear();
}

static json_t *parse(const char *text)
{
    return fsdp__json_parse(text, strlen(text), "c.json");
}

static void test_bad_syntax(void **state)
{
    (void)state;
    static const char *const table[][2] = {
        {"{\n  \"a\": 1,\n  \"b\" 2\n}", "c.json:3:"},
        {"", "c.json:1:"},
        {"{\"a\": 1, \"a\": 2}", "duplicate"},
        {"{\"a\": NaN}", "c.json:1:"},
        {"{\"a\": \"\xff\"}", "c.json:1:"},
        {"{} x", "c.json:1:"},
        {"{\"a\": 99999999999999999999}", "too big"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        assert_null(parse(table[i][0]));
        expect_error(FSDP_INVALID_DATA, table[i][1]);
    }
    assert_null(fsdp__json_load("/nowhere/c.json"));
    expect_error(FSDP_NOT_FOUND, "/nowhere/c.json");
}

static void test_fields(void **state)
{
    (void)state;
    json_t *j =
        parse("{\"i\": 7, \"r\": 2.5, \"t\": true, \"s\": \"x\", \"n\": null, \"l\": [1, 2],"
              " \"o\": {\"f\": 8, \"g\": \"8\", \"in\": {\"k\": false}}}");
    fsdp__json_at at, o, in;
    int64_t i = -1;
    double d = -1;
    bool b = false;
    const char *s = "-";
    assert_non_null(j);
    assert_int_equal(fsdp__json_root(j, "c.json", &at), FSDP_OK);
    assert_int_equal(fsdp__json_int(&at, "i", &i), FSDP_OK);
    assert_int_equal(i, 7);
    assert_int_equal(fsdp__json_number(&at, "i", &d), FSDP_OK);
    assert_true(d == 7);
    assert_int_equal(fsdp__json_number(&at, "r", &d), FSDP_OK);
    assert_true(d == 2.5);
    assert_int_equal(fsdp__json_bool(&at, "t", &b), FSDP_OK);
    assert_true(b);
    assert_int_equal(fsdp__json_string(&at, "s", &s), FSDP_OK);
    assert_string_equal(s, "x");
    /* absent and null leave what was there */
    assert_int_equal(fsdp__json_int(&at, "none", &i), FSDP_OK);
    assert_int_equal(fsdp__json_int(&at, "n", &i), FSDP_OK);
    assert_int_equal(i, 7);
    assert_false(fsdp__json_has(&at, "n"));
    assert_true(fsdp__json_has(&at, "o"));
    assert_int_equal(fsdp__json_need(&at, "i"), FSDP_OK);
    fsdp__json_need(&at, "n");
    expect_error(FSDP_INVALID_DATA, "c.json: n: found null, expected a value");
    fsdp__json_need(&at, "none");
    expect_error(FSDP_INVALID_DATA, "c.json: none: found nothing");
    fsdp__json_int(&at, "r", &i);
    expect_error(FSDP_INVALID_DATA, "c.json: r: found 2.5, expected a whole number");
    fsdp__json_int(&at, "t", &i);
    expect_error(FSDP_INVALID_DATA, "found true");
    fsdp__json_number(&at, "s", &d);
    expect_error(FSDP_INVALID_DATA, "found \"x\", expected a number");
    fsdp__json_bool(&at, "i", &b);
    expect_error(FSDP_INVALID_DATA, "found 7, expected true or false");
    fsdp__json_string(&at, "l", &s);
    expect_error(FSDP_INVALID_DATA, "found a list of 2 values");
    assert_int_equal(fsdp__json_object(&at, "o", &o), FSDP_OK);
    fsdp__json_number(&o, "g", &d);
    expect_error(FSDP_INVALID_DATA, "c.json: o.g: found \"8\"");
    assert_int_equal(fsdp__json_object(&o, "in", &in), FSDP_OK);
    fsdp__json_int(&in, "k", &i);
    expect_error(FSDP_INVALID_DATA, "c.json: o.in.k: found false");
    fsdp__json_object(&at, "l", &o);
    expect_error(FSDP_INVALID_DATA, "expected an object");
    fsdp__json_object(&at, "none", &o);
    expect_error(FSDP_INVALID_DATA, "found nothing");
    json_decref(j);
    j = parse("[1]");
    fsdp__json_root(j, "c.json", &at);
    expect_error(FSDP_INVALID_DATA, "found a list of 1 values");
    json_decref(j);
    /* a long value is cut at a whole character */
    fsdp__str text = {0};
    fsdp__str_add(&text, "{\"s\": \"");
    for (int k = 0; k < 100; k++)
        fsdp__str_add(&text, "\xe2\x82\xac");
    fsdp__str_add(&text, "\"}");
    j = parse(fsdp__str_get(&text));
    fsdp__json_root(j, "c.json", &at);
    fsdp__json_int(&at, "s", &i);
    expect_error(FSDP_INVALID_DATA, "\xe2\x82\xac..., expected");
    json_decref(j);
    fsdp__str_free(&text);
}

static void test_text(void **state)
{
    (void)state;
    static const char text[] = "{\n  \"z\": 1,\n  \"a\": [\n    true,\n    null,\n    "
                               "\"\xc3\xa9\\\"\\\\\\n\\u0001\"\n  ],\n"
                               "  \"e\": {},\n  \"l\": [],\n  \"r\": 1e-05\n}";
    json_t *j = parse(text);
    fsdp__str s = {0};
    assert_non_null(j);
    assert_int_equal(fsdp__json_format(j, 2, &s), FSDP_OK);
    assert_string_equal(fsdp__str_get(&s), text);
    fsdp__str_free(&s);
    assert_int_equal(fsdp__json_format(j, 0, &s), FSDP_OK);
    assert_string_equal(fsdp__str_get(&s),
                        "{\"z\": 1, \"a\": [true, null, \"\xc3\xa9\\\"\\\\\\n\\u0001\"], \"e\": "
                        "{}, \"l\": [], \"r\": 1e-05}");
    fsdp__str_free(&s);
    char path[] = "/tmp/fsdp-test-json-XXXXXX", *back;
    size_t n;
    close(mkstemp(path));
    assert_int_equal(fsdp__json_dump(j, 2, path), FSDP_OK);
    assert_int_equal(fsdp__file_read(path, &back, &n), FSDP_OK);
    assert_int_equal(n, sizeof text);
    assert_memory_equal(back, text, sizeof text - 1);
    assert_int_equal(back[n - 1], '\n');
    free(back);
    json_t *again = fsdp__json_load(path);
    assert_true(json_equal(j, again));
    json_decref(again);
    json_decref(j);
    unlink(path);
}

static void test_reals(void **state)
{
    (void)state;
    static const struct {
        double v;
        const char *text;
    } table[] = {
        {0, "0.0"},
        {-0.0, "-0.0"},
        {1, "1.0"},
        {-2.5, "-2.5"},
        {10000, "10000.0"},
        {1e-5, "1e-05"},
        {0.0001, "0.0001"},
        {0.02, "0.02"},
        {1e15, "1000000000000000.0"},
        {1e16, "1e+16"},
        {1.5e300, "1.5e+300"},
        {0.1, "0.1"},
        {1.0 / 3, "0.3333333333333333"},
        {123456.789, "123456.789"},
        {500000, "500000.0"},
        {DBL_MIN, "2.2250738585072014e-308"},
        {5e-324, "5e-324"},
        {DBL_MAX, "1.7976931348623157e+308"},
        {9007199254740993.0, "9007199254740992.0"},
        {100, "100.0"},
        {0.5, "0.5"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        fsdp__str s = {0};
        fsdp__json_real(&s, table[i].v);
        assert_string_equal(fsdp__str_get(&s), table[i].text);
        assert_true(strtod(fsdp__str_get(&s), NULL) == table[i].v);
        fsdp__str_free(&s);
    }
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup(f, start)
    const struct CMUnitTest tests[] = {TEST(test_bad_syntax), TEST(test_fields), TEST(test_text),
                                       TEST(test_reals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
