/*
 * test_base_str.c - growing text, edit distance, maps and small memory.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"

static void text_grows(void **state)
{
    (void)state;
    fsdp__str s = {0};
    assert_string_equal(fsdp__str_get(&s), "");
    for (int i = 0; i < 1000; i++)
        fsdp__str_addf(&s, "%d,", i);
    assert_int_equal(s.len, 10 * 2 + 90 * 3 + 900 * 4);
    assert_memory_equal(s.p, "0,1,2,3,", 8);
    assert_string_equal(s.p + s.len - 8, "998,999,");
    char *p = fsdp__str_take(&s);
    assert_int_equal(strlen(p), 3890);
    free(p);
    /* Empty after the take; taking nothing gives an empty text. */
    assert_int_equal(s.len, 0);
    p = fsdp__str_take(&s);
    assert_string_equal(p, "");
    free(p);
    fsdp__str_add_n(&s, "a\0b", 3);
    fsdp__str_add(&s, "c");
    fsdp__str_add_n(&s, "", 0);
    assert_int_equal(s.len, 4);
    assert_memory_equal(s.p, "a\0bc", 5);
    fsdp__str_free(&s);
    fsdp__str_free(&s);
}

static void failed_text_says_so(void **state)
{
    (void)state;
    fsdp__str s = {0};
    fsdp__str_add(&s, "x");
    s.failed = true; /* as a refused realloc leaves it */
    fsdp__str_add(&s, "y");
    assert_null(fsdp__str_take(&s));
    assert_int_equal(fsdp_error(), FSDP_NO_MEMORY);
    fsdp_error_clear();
    fsdp__str_add_n(&s, "abc", SIZE_MAX);
    assert_true(s.failed);
    fsdp__str_free(&s);
}

static void check_bytes(double bytes, const char *expected)
{
    fsdp__str s = {0};
    fsdp__str_add_bytes(&s, bytes);
    assert_string_equal(fsdp__str_get(&s), expected);
    fsdp__str_free(&s);
}

static void bytes_have_units(void **state)
{
    (void)state;
    check_bytes(0, "0 B");
    check_bytes(1023, "1023 B");
    check_bytes(1024, "1.00 KiB");
    check_bytes(1310720, "1.25 MiB");
    check_bytes(-2048, "-2.00 KiB");
    check_bytes(3.5 * 0x1p30, "3.50 GiB");
    check_bytes(0x1p63, "8192.00 PiB");
}

static void ends_are_compared(void **state)
{
    (void)state;
    assert_true(fsdp__starts_with("abc", ""));
    assert_true(fsdp__starts_with("abc", "ab"));
    assert_false(fsdp__starts_with("ab", "abc"));
    assert_true(fsdp__ends_with("abc", "bc"));
    assert_true(fsdp__ends_with("abc", ""));
    assert_false(fsdp__ends_with("bc", "abc"));
}

static void distances(void **state)
{
    (void)state;
    assert_int_equal(fsdp__edit_distance("", ""), 0);
    assert_int_equal(fsdp__edit_distance("", "abc"), 3);
    assert_int_equal(fsdp__edit_distance("abc", ""), 3);
    assert_int_equal(fsdp__edit_distance("kitten", "sitting"), 3);
    assert_int_equal(fsdp__edit_distance("steps", "setps"), 1);
    assert_int_equal(fsdp__edit_distance("ca", "abc"), 3);
    char a[301], b[291];
    memset(a, 'x', 300);
    memset(b, 'x', 290);
    a[300] = b[290] = 0;
    assert_int_equal(fsdp__edit_distance(a, b), 10);
}

static void map_keeps_order(void **state)
{
    (void)state;
    fsdp__map *m = fsdp__map_create();
    char key[32];
    assert_null(fsdp__map_gets(m, "absent"));
    for (int64_t i = 0; i < 5000; i++) {
        snprintf(key, sizeof key, "layer.%lld", (long long)i);
        assert_int_equal(fsdp__map_sets(m, key, (fsdp__value){.i = i}), FSDP_OK);
    }
    assert_int_equal(fsdp__map_count(m), 5000);
    for (int64_t i = 0; i < 5000; i++) {
        size_t len;
        snprintf(key, sizeof key, "layer.%lld", (long long)i);
        assert_string_equal(fsdp__map_key(m, i, &len), key);
        assert_int_equal(len, strlen(key));
        assert_int_equal(fsdp__map_gets(m, key)->i, i);
        assert_int_equal(fsdp__map_at(m, i)->i, i);
    }
    /* Replacing keeps the place. */
    assert_int_equal(fsdp__map_sets(m, "layer.7", (fsdp__value){.i = -1}), FSDP_OK);
    assert_int_equal(fsdp__map_count(m), 5000);
    assert_int_equal(fsdp__map_at(m, 7)->i, -1);
    /* Keys are bytes: an embedded NUL and the empty key are keys too. */
    assert_int_equal(fsdp__map_set(m, "a\0b", 3, (fsdp__value){.i = 1}), FSDP_OK);
    assert_int_equal(fsdp__map_set(m, "a\0c", 3, (fsdp__value){.i = 2}), FSDP_OK);
    assert_int_equal(fsdp__map_set(m, "", 0, (fsdp__value){.i = 3}), FSDP_OK);
    assert_int_equal(fsdp__map_get(m, "a\0b", 3)->i, 1);
    assert_int_equal(fsdp__map_get(m, "a\0c", 3)->i, 2);
    assert_int_equal(fsdp__map_get(m, "", 0)->i, 3);
    assert_null(fsdp__map_get(m, "a", 1));
    assert_string_equal(fsdp__map_key(m, 5000, NULL), "a");
    fsdp__map_free(m);
    fsdp__map_free(NULL);
}

static void memory_failures_are_kept(void **state)
{
    (void)state;
    void *p = fsdp__calloc(0, 8, "nothing");
    assert_non_null(p);
    free(p);
    assert_null(fsdp__calloc(SIZE_MAX / 2, 4, "too much"));
    assert_int_equal(fsdp_error(), FSDP_NO_MEMORY);
    assert_non_null(strstr(fsdp_error_text(), "too much"));
    fsdp_error_clear();
    char *s = fsdp__strndup("abcdef", 3);
    assert_string_equal(s, "abc");
    s = fsdp__realloc(s, 100, "a text");
    assert_string_equal(s, "abc");
    free(s);
}

static void arrays_grow(void **state)
{
    (void)state;
    int *items = NULL;
    int64_t cap = 0;
    assert_int_equal(FSDP__GROW(items, cap, 0, "ints"), FSDP_OK);
    assert_null(items);
    for (int i = 0; i < 1000; i++) {
        assert_int_equal(FSDP__GROW(items, cap, i + 1, "ints"), FSDP_OK);
        items[i] = i;
    }
    assert_true(cap >= 1000 && cap <= 2000);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(items[i], i);
    int64_t before = cap;
    assert_int_equal(FSDP__GROW(items, cap, INT64_MAX, "ints"), FSDP_NO_MEMORY);
    assert_int_equal(cap, before);
    fsdp_error_clear();
    free(items);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_grows),
        cmocka_unit_test(failed_text_says_so),
        cmocka_unit_test(bytes_have_units),
        cmocka_unit_test(ends_are_compared),
        cmocka_unit_test(distances),
        cmocka_unit_test(map_keeps_order),
        cmocka_unit_test(memory_failures_are_kept),
        cmocka_unit_test(arrays_grow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
