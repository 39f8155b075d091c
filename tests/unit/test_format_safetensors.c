/*
 * test_format_safetensors.c - every way in which a safetensors file is invalid, the edges that are
 * valid, and the writer: its bytes, ranges in any order, and what is left when the disk is full.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <signal.h>
#include <unistd.h>

#include <cmocka.h>

#include "format/file.h"
#include "format/safetensors.h"

static char folder[] = "/tmp/fsdp-test-st-XXXXXX";
static char path[64];

static int set_up(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/a.safetensors", folder);
    return 0;
}

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fsdp_error_clear();
    return fsdp__dir_remove(folder) == FSDP_OK ? 0 : -1;
}

/* The file (n: length as written in front; header of h bytes; data zero bytes). */
static void put(uint64_t n, const char *header, size_t h, size_t data)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < 8; i++)
        fputc((int)(n >> 8 * i & 255), f);
    assert_int_equal(fwrite(header, 1, h, f), h);
    for (size_t i = 0; i < data; i++)
        fputc((int)(i & 255), f);
    fclose(f);
}

static void expect_bad(const char *const *words)
{
    fsdp__st *st = fsdp__st_open(path);
    assert_null(st);
    assert_int_equal(fsdp_error(), FSDP_INVALID_DATA);
    const char *text = fsdp_error_text();
    assert_non_null(strstr(text, path));
    for (int i = 0; i < 3 && words[i]; i++)
        if (!strstr(text, words[i])) fail_msg("no '%s' in: %s", words[i], text);
    fsdp_error_clear();
}

/* ---- bad files -------------------------------------------------------------------------- */

typedef struct bad {
    const char *header;
    int data;             /* bytes behind the header */
    const char *words[3]; /* that the message must hold */
} bad;

#define T4 "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}"

static const bad table[] = {
    /* 5: JSON */
    {"", 0, {"end of the header", "start of a JSON object"}},
    {"[]", 0, {"'[]'", "start of a JSON object"}},
    {"{\"w\":" T4 "} x", 4, {"'x'", "only blanks"}},
    {"{\"w\":" T4 "}{}", 4, {"'{}'", "only blanks"}},
    {"{\"w\":" T4, 4, {"end of the header", "',' or '}'"}},
    {"{\"w\":" T4 ",}", 4, {"'}'", "name of a tensor in quotes"}},
    {"{\"w\" " T4 "}", 4, {"expected ':'"}},
    {"{'w':" T4 "}", 4, {"name of a tensor"}},
    {"{\"w\":3}", 0, {"tensor 'w'", "'3}'", "an object with dtype"}},
    {"{\"w\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, {"tensor 'w'", "no dtype"}},
    {"{\"w\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, {"tensor 'w'", "no shape"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, {"tensor 'w'", "no data_offsets"}},
    {"{\"w\":{}}", 4, {"tensor 'w'", "no dtype"}},
    {"{\"w\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, {"'w'", "'f32'"}},
    {"{\"w\":{\"dtype\":\"F33\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, {"'w'", "'F33'"}},
    {"{\"w\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, {"'w'", "dtype in quotes"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, {"'w'", "'-1]"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "whole number"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1e0],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "whole number"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[01],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "leading zeros"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[\"1\"],\"data_offsets\":[0,4]}}", 4, {"'w'", "a size"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, {"'w'", "list of sizes"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1,],\"data_offsets\":[0,4]}}", 4, {"'w'", "a size"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[18446744073709551616],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "at most 64 bits"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]}}",
     4,
     {"'w'", "whole number"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-0,4]}}", 4, {"'w'", "'-0,4]"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}",
     4,
     {"'w'", "two byte offsets"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,4]}}",
     4,
     {"'w'", "two byte offsets"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,18446744073709551616]}}",
     4,
     {"'w'", "at most 64 bits"}},
    {"{\"w\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "'dtype' twice"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "'shape' twice"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "'data_offsets' twice"}},
    {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, {"__metadata__ twice"}},
    {"{\"__metadata__\":null,\"__metadata__\":{}}", 0, {"__metadata__ twice"}},
    {"{\"__metadata__\":[]}", 0, {"object of strings"}},
    {"{\"__metadata__\":{\"a\":1}}", 0, {"'1}}'", "values of __metadata__ are strings"}},
    {"{\"__metadata__\":{\"a\":null}}", 0, {"values of __metadata__ are strings"}},
    {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, {"key 'a' twice"}},
    {"{\"w\\x\":" T4 "}", 4, {"escape"}},
    {"{\"w\\u12g4\":" T4 "}", 4, {"four hex digits"}},
    {"{\"\\ud800\":" T4 "}", 4, {"surrogate pair"}},
    {"{\"\\ud800\\u0041\":" T4 "}", 4, {"surrogate pair"}},
    {"{\"\\udc00\":" T4 "}", 4, {"surrogate pair"}},
    {"{\"w\n\":" T4 "}", 4, {"control character"}},
    {"{\"w", 0, {"closing quote"}},
    {"{\"w\\", 0, {"escape"}},
    {"{\"w\":{\"dtype\":\"F32\",\"x\":nul,\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     {"a JSON value"}},
    {"{\"w\":{\"dtype\":\"F32\",\"x\":[1.],\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     {"behind the point"}},
    {"{\"w\":{\"dtype\":\"F32\",\"x\":{\"a\"},\"shape\":[1],\"data_offsets\":[0,4]}}",
     4,
     {"expected ':'"}},
    {"{\"w\":{\"dtype\":\"F32\",\"x\":-,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, {"a number"}},
    {"{\"w\":{\"dtype\":\"F32\",\"x\":1e,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, {"exponent"}},
    /* names twice */
    {"{\"w\":" T4 ",\"w\":" T4 "}", 4, {"'w' twice"}},
    {"{\"w\":" T4 ",\"\\u0077\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
     8,
     {"'w' twice"}},
    /* 6: ranges */
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
     8,
     {"'w'", "from byte 4 on, expected 0", "a hole"}},
    {"{\"a\":" T4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
     12,
     {"'b'", "from byte 8 on, expected 4, the end of the tensor before it, 'a'", "a hole"}},
    {"{\"a\":" T4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
     6,
     {"'b'", "from byte 2 on, expected 4", "an overlap"}},
    {"{\"a\":" T4 ",\"b\":" T4 "}", 4, {"'b'", "from byte 0 on, expected 4", "an overlap"}},
    {"{\"a\":" T4 ",\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,2]}}",
     8,
     {"'b'", "data_offsets 4 to 2", "not before the begin"}},
    /* 7: overflow */
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "product does not fit 64 bits"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "fits 64 bits"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[18446744073709551615],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "below 2^63"}},
    /* 8: not whole bytes */
    {"{\"w\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}",
     2,
     {"'w'", "3 elements of F4", "whole bytes"}},
    {"{\"w\":{\"dtype\":\"F6_E2M3\",\"shape\":[2],\"data_offsets\":[0,2]}}",
     2,
     {"'w'", "whole bytes"}},
    /* 9: size and shape differ */
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "found 4 bytes", "expected 8"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,0]}}",
     0,
     {"'w'", "found 0 bytes", "expected 4"}},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[3,0],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "found 4 bytes", "expected 0"}},
    {"{\"w\":{\"dtype\":\"F4\",\"shape\":[4],\"data_offsets\":[0,4]}}",
     4,
     {"'w'", "found 4 bytes", "expected 2"}},
    /* 10: size of the file */
    {"{\"w\":" T4 "}", 3, {"truncated", "found 65 bytes, expected 66"}},
    {"{\"w\":" T4 "}", 0, {"truncated"}},
    {"{\"w\":" T4 "}", 5, {"longer than its header says", "found 67 bytes, expected 66"}},
    {"{}", 1, {"found 11 bytes, expected 10", "longer"}},
};

static void test_bad_headers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const bad *b = &table[i];
        put(strlen(b->header), b->header, strlen(b->header), (size_t)b->data);
        expect_bad(b->words);
    }
}

static void test_bad_lengths(void **state)
{
    (void)state;
    /* 1: too short for the length */
    for (int n = 0; n < 8; n++) {
        FILE *f = fopen(path, "wb");
        for (int i = 0; i < n; i++)
            fputc(0, f);
        fclose(f);
        char size[32];
        snprintf(size, sizeof size, "file of %d bytes", n);
        expect_bad((const char *[]){size, "at least 8", NULL});
    }
    /* 2: too long for any reader, also where it does not fit a signed number */
    put(100000001, "{}", 2, 0);
    expect_bad((const char *[]){"100000001", "at most 100000000", NULL});
    put(UINT64_MAX, "{}", 2, 0);
    expect_bad((const char *[]){"18446744073709551615", "at most 100000000", NULL});
    put(UINT64_MAX - 7, "{}", 2, 0);
    expect_bad((const char *[]){"at most 100000000", NULL});
    /* 3: longer than the file */
    put(100000000, "{}", 2, 0);
    expect_bad((const char *[]){"100000000", "file of 10 bytes", "truncated"});
    put(3, "{}", 2, 0);
    expect_bad((const char *[]){"header of 3 bytes", "at most 2", "truncated"});
}

static void test_bad_bytes(void **state)
{
    (void)state;
    /* 4: not UTF-8: a lone continuation, a cut sequence, an overlong form, a surrogate, too large
     */
    static const char *const names[] = {"\x80",         "\xc3",         "\xc0\xaf",
                                        "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                                        "\xff",         "\xe2\x82"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char header[128];
        int n = snprintf(header, sizeof header, "{\"%s\":" T4 "}", names[i]);
        put((uint64_t)n, header, (size_t)n, 4);
        char byte[16];
        snprintf(byte, sizeof byte, "0x%02x", (unsigned)(unsigned char)names[i][0]);
        expect_bad((const char *[]){"header byte 10", byte, "UTF-8"});
    }
    /* NUL padding, and a NUL inside */
    put(8, "{}\0\0\0\0\0\0", 8, 0);
    expect_bad((const char *[]){"\\x00", "only blanks", NULL});
    put(3, "{\0}", 3, 0);
    expect_bad((const char *[]){"\\x00", "name of a tensor", NULL});
}

static void test_nesting(void **state)
{
    (void)state;
    for (int levels = 126; levels <= 127; levels++) {
        char header[1024] = "{\"w\":{\"x\":";
        for (int i = 0; i < levels; i++)
            strcat(header, "[");
        for (int i = 0; i < levels; i++)
            strcat(header, "]");
        strcat(header, ",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}");
        put(strlen(header), header, strlen(header), 4);
        if (levels == 127) {
            expect_bad((const char *[]){"tensor 'w'", "128 levels", NULL});
        } else {
            fsdp__st *st = fsdp__st_open(path);
            assert_non_null(st);
            fsdp__st_close(st);
        }
    }
    /* Deep garbage must not exhaust the stack. */
    size_t n = 1 << 20;
    char *deep = malloc(n);
    memset(deep, '[', n);
    memcpy(deep, "{\"w\":{\"x\":", 10);
    put(n, deep, n, 0);
    free(deep);
    expect_bad((const char *[]){"128 levels", NULL});
}

static void test_missing_file(void **state)
{
    (void)state;
    assert_null(fsdp__st_open("/nowhere/x.safetensors"));
    assert_int_equal(fsdp_error(), FSDP_NOT_FOUND);
    assert_non_null(strstr(fsdp_error_text(), "/nowhere/x.safetensors"));
    fsdp_error_clear();
    assert_null(fsdp__st_open(folder));
    assert_non_null(strstr(fsdp_error_text(), "a folder"));
    fsdp_error_clear();
}

/* Every prefix of a valid file is an error, and none of them crashes or passes. */
static void test_every_prefix(void **state)
{
    (void)state;
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\"},\"w\\n\":" T4 "}";
    char *whole;
    size_t n;
    put(strlen(header), header, strlen(header), 4);
    assert_int_equal(fsdp__file_read(path, &whole, &n), FSDP_OK);
    for (size_t k = 0; k < n; k++) {
        FILE *f = fopen(path, "wb");
        fwrite(whole, 1, k, f);
        fclose(f);
        expect_bad((const char *[]){NULL});
    }
    /* And no cut of the header alone passes either. */
    for (size_t k = 0; k + 1 < sizeof header; k++) {
        put(k, header, k, 4);
        expect_bad((const char *[]){NULL});
    }
    free(whole);
}

/* ---- good edges ---------------------------------------------------------------------------- */

static fsdp__st *open_good(const char *header, size_t data)
{
    put(strlen(header), header, strlen(header), data);
    fsdp__st *st = fsdp__st_open(path);
    if (!st) fail_msg("%s", fsdp_error_text());
    assert_int_equal(fsdp_error(), FSDP_OK);
    return st;
}

static void test_good_empty(void **state)
{
    (void)state;
    fsdp__st *st = open_good("{}      ", 0);
    assert_int_equal(fsdp__st_count(st), 0);
    assert_int_equal(fsdp__st_meta_count(st), 0);
    assert_null(fsdp__st_find(st, "w"));
    fsdp__st_close(st);
    st = open_good(
        "{\"__metadata__\":{\"format\":\"pt\",\"a\\u0041\":\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"}}", 0);
    assert_int_equal(fsdp__st_count(st), 0);
    assert_int_equal(fsdp__st_meta_count(st), 2);
    assert_string_equal(fsdp__st_meta_key(st, 1), "aA");
    assert_string_equal(fsdp__st_meta_value(st, 1), "\"\\/\b\f\n\r\t");
    assert_string_equal(fsdp__st_meta(st, "format"), "pt");
    assert_null(fsdp__st_meta(st, "b"));
    fsdp__st_close(st);
    st = open_good("{\"__metadata__\":null}", 0);
    assert_int_equal(fsdp__st_meta_count(st), 0);
    fsdp__st_close(st);
    st = open_good("{\"__metadata__\":{}}", 0);
    fsdp__st_close(st);
}

static void test_good_shapes(void **state)
{
    (void)state;
    fsdp__st *st = open_good(
        "\n\t {\"s\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]},"
        "\"z1\":{\"data_offsets\":[1,1],\"shape\":[0,3],\"dtype\":\"F32\"},"
        "\"z2\":{\"dtype\":\"F64\",\"shape\":[0,9223372036854775807],\"data_offsets\":[1,1]},"
        "\"f4\":{\"dtype\":\"F4\",\"shape\":[2,2],\"data_offsets\":[5,7]},"
        "\"u\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5],"
        "\"later\":[1.5e+3,-0,\"x\",{\"a\":true,\"b\":[false,null]},{},[]]}}  \r\n",
        7);
    assert_int_equal(fsdp__st_count(st), 5);
    const fsdp__st_tensor *t = fsdp__st_find(st, "s");
    assert_int_equal(t->ndim, 0);
    assert_int_equal(t->numel, 1);
    assert_int_equal(t->dtype, FSDP_U8);
    t = fsdp__st_find(st, "z1");
    assert_int_equal(t->ndim, 2);
    assert_int_equal(t->shape[0], 0);
    assert_int_equal(t->shape[1], 3);
    assert_int_equal(t->numel, 0);
    assert_int_equal(t->bytes, 0);
    char none;
    assert_int_equal(fsdp__st_read(st, t, 0, 0, &none), FSDP_OK);
    /* data is 0, 1, 2 ...: the float has no alignment and is read right */
    t = fsdp__st_find(st, "u");
    unsigned char u[4];
    assert_int_equal(fsdp__st_read(st, t, 0, 4, u), FSDP_OK);
    assert_memory_equal(u, "\1\2\3\4", 4);
    assert_int_equal(fsdp__st_read(st, t, 3, 1, u), FSDP_OK);
    assert_int_equal(u[0], 4);
    /* in the order of the data */
    assert_string_equal(fsdp__st_at(st, 0)->name, "s");
    assert_string_equal(fsdp__st_at(st, 1)->name, "z1");
    assert_string_equal(fsdp__st_at(st, 2)->name, "z2");
    assert_string_equal(fsdp__st_at(st, 3)->name, "u");
    /* a dtype of the format that is not computed with: the file opens, reading it is refused */
    t = fsdp__st_at(st, 4);
    assert_string_equal(t->dtype_name, "F4");
    assert_int_equal(t->dtype, FSDP_DTYPE_NONE);
    assert_int_equal(t->numel, 4);
    assert_int_equal(t->bytes, 2);
    assert_int_equal(fsdp__st_read(st, t, 0, 2, u), FSDP_UNSUPPORTED);
    assert_non_null(strstr(fsdp_error_text(), "'f4'"));
    assert_non_null(strstr(fsdp_error_text(), "F4"));
    fsdp_error_clear();
    /* ranges outside */
    t = fsdp__st_find(st, "u");
    const int64_t ranges[][2] = {{-1, 1}, {0, 5}, {4, 1}, {0, -1}, {INT64_MAX, 1}, {1, INT64_MAX}};
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++) {
        assert_int_equal(fsdp__st_read(st, t, ranges[i][0], ranges[i][1], u),
                         FSDP_INVALID_ARGUMENT);
        fsdp_error_clear();
    }
    fsdp__st_close(st);
}

static void test_good_names(void **state)
{
    (void)state;
    fsdp__st *st = open_good(
        "{\"\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]},"
        "\"gr\\u00fc\\u20ac\\ud83d\\ude00\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[1,2]}"
        ","
        "\"a\\u0000b\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[2,3]},"
        "\"dir/\\u0001\xc3\xa9\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[3,4]}}",
        4);
    assert_non_null(fsdp__st_find(st, ""));
    assert_non_null(fsdp__st_find(st, "gr\xc3\xbc\xe2\x82\xac\xf0\x9f\x98\x80"));
    assert_non_null(fsdp__st_find(st, "dir/\1\xc3\xa9"));
    assert_null(fsdp__st_find(st, "a"));
    assert_int_equal(fsdp__st_at(st, 2)->name_len, 3);
    assert_memory_equal(fsdp__st_at(st, 2)->name, "a\0b", 4);
    fsdp__st_close(st);
}

static void test_every_dtype(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int bits;
        fsdp_dtype dtype;
    } all[] = {
        {"BOOL", 8, FSDP_BOOL}, {"F4", 4, -1},          {"F6_E2M3", 6, -1},
        {"F6_E3M2", 6, -1},     {"U8", 8, FSDP_U8},     {"I8", 8, FSDP_I8},
        {"F8_E5M2", 8, -1},     {"F8_E4M3", 8, -1},     {"F8_E8M0", 8, -1},
        {"F8_E4M3FNUZ", 8, -1}, {"F8_E5M2FNUZ", 8, -1}, {"I16", 16, FSDP_I16},
        {"U16", 16, FSDP_U16},  {"F16", 16, FSDP_F16},  {"BF16", 16, FSDP_BF16},
        {"I32", 32, FSDP_I32},  {"U32", 32, FSDP_U32},  {"F32", 32, FSDP_F32},
        {"C64", 64, -1},        {"F64", 64, FSDP_F64},  {"I64", 64, FSDP_I64},
        {"U64", 64, FSDP_U64},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        char header[128];
        int bytes = all[i].bits * 12 / 8;
        snprintf(header, sizeof header,
                 "{\"w\":{\"dtype\":\"%s\",\"shape\":[3,4],\"data_offsets\":[0,%d]}}", all[i].name,
                 bytes);
        fsdp__st *st = open_good(header, (size_t)bytes);
        assert_int_equal(fsdp__st_at(st, 0)->dtype, all[i].dtype);
        assert_string_equal(fsdp__st_at(st, 0)->dtype_name, all[i].name);
        fsdp__st_close(st);
    }
}

static void test_bytes_read(void **state)
{
    (void)state;
    fsdp__st *st =
        open_good("{\"w\":{\"dtype\":\"U8\",\"shape\":[100],\"data_offsets\":[0,100]}}", 100);
    int64_t start = fsdp__st_bytes_read(st);
    assert_int_equal(
        start, 8 + strlen("{\"w\":{\"dtype\":\"U8\",\"shape\":[100],\"data_offsets\":[0,100]}}"));
    char buf[100];
    assert_int_equal(fsdp__st_read(st, fsdp__st_at(st, 0), 10, 33, buf), FSDP_OK);
    assert_int_equal(buf[0], 10);
    assert_int_equal(fsdp__st_bytes_read(st), start + 33);
    /* the file shrinks under the reader: an error that says so */
    assert_int_equal(truncate(path, (off_t)start + 50), 0);
    assert_int_equal(fsdp__st_read(st, fsdp__st_at(st, 0), 0, 100, buf), FSDP_INVALID_DATA);
    assert_non_null(strstr(fsdp_error_text(), "found 50 bytes"));
    fsdp_error_clear();
    fsdp__st_close(st);
}

/* ---- writing --------------------------------------------------------------------------------- */

static void expect_only(const char *name)
{
    char **names;
    int64_t n;
    assert_int_equal(fsdp__dir_list(folder, &names, &n), FSDP_OK);
    for (int64_t i = 0; i < n; i++)
        if (!name || strcmp(names[i], name)) fail_msg("left behind: %s", names[i]);
    assert_int_equal(n, name ? 1 : 0);
    fsdp__dir_list_free(names, n);
}

static void test_write_bytes(void **state)
{
    (void)state;
    const float f[3] = {1, 2, 3};
    const int64_t i64[1] = {-7};
    const unsigned char u8[2] = {5, 6};
    const fsdp__st_entry entries[] = {
        {"b.weight", FSDP_F32, 1, (int64_t[]){3}, f},
        {"flag\"\n\1", FSDP_U8, 2, (int64_t[]){2, 1}, u8},
        {"step", FSDP_I64, 0, NULL, i64},
        {"a.weight", FSDP_F32, 2, (int64_t[]){0, 4}, NULL},
    };
    const fsdp__st_pair meta[] = {{"format", "pt"}};
    assert_int_equal(fsdp__st_write(path, entries, 4, meta, 1, NULL, NULL), FSDP_OK);
    expect_only("a.safetensors");
    static const char expected[] =
        "{\"__metadata__\":{\"format\":\"pt\"},"
        "\"step\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[0,8]},"
        "\"a.weight\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[8,8]},"
        "\"b.weight\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[8,20]},"
        "\"flag\\\"\\n\\u0001\":{\"dtype\":\"U8\",\"shape\":[2,1],\"data_offsets\":[20,22]}}";
    char *text;
    size_t n, h = (strlen(expected) + 7) / 8 * 8;
    assert_int_equal(fsdp__file_read(path, &text, &n), FSDP_OK);
    assert_int_equal(n, 8 + h + 22);
    assert_int_equal((unsigned char)text[0] | (unsigned char)text[1] << 8, h);
    assert_memory_equal(text + 8, expected, strlen(expected));
    for (size_t i = strlen(expected); i < h; i++)
        assert_int_equal(text[8 + i], ' ');
    assert_memory_equal(text + 8 + h, i64, 8);
    assert_memory_equal(text + 8 + h + 8, f, 12);
    assert_memory_equal(text + 8 + h + 20, u8, 2);
    free(text);
    /* the usual mode of a new file, not that of a temporary one */
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_mode & S_IRUSR);
    fsdp__st *r = fsdp__st_open(path);
    assert_non_null(r);
    assert_int_equal(fsdp__st_count(r), 4);
    float back[3];
    assert_int_equal(fsdp__st_read(r, fsdp__st_find(r, "b.weight"), 4, 8, back), FSDP_OK);
    assert_true(back[0] == 2 && back[1] == 3);
    fsdp__st_close(r);
}

static void test_write_format_is_added(void **state)
{
    (void)state;
    const fsdp__st_pair meta[] = {{"lm_head.weight", "model.embed_tokens.weight"},
                                  {"gr\xc3\xbc", ""}};
    assert_int_equal(fsdp__st_write(path, NULL, 0, meta, 2, NULL, NULL), FSDP_OK);
    fsdp__st *r = fsdp__st_open(path);
    assert_non_null(r);
    assert_int_equal(fsdp__st_count(r), 0);
    assert_int_equal(fsdp__st_meta_count(r), 3);
    assert_string_equal(fsdp__st_meta(r, "format"), "pt");
    assert_string_equal(fsdp__st_meta(r, "lm_head.weight"), "model.embed_tokens.weight");
    assert_string_equal(fsdp__st_meta(r, "gr\xc3\xbc"), "");
    fsdp__st_close(r);
}

static fsdp_status fill(void *arg, int64_t index, int64_t offset, int64_t bytes, void *buf)
{
    int64_t *calls = arg;
    for (int64_t i = 0; i < bytes; i++)
        ((unsigned char *)buf)[i] = (unsigned char)((offset + i) * 7 + index);
    calls[index]++;
    return FSDP_OK;
}

static void test_write_fill(void **state)
{
    (void)state;
    /* more than one piece, and an odd size */
    const int64_t big = (4 << 20) * 2 + 13;
    const fsdp__st_entry entries[] = {
        {"x", FSDP_U8, 1, &big, NULL},
        {"y", FSDP_F16, 1, (int64_t[]){5}, NULL},
    };
    int64_t calls[2] = {0, 0};
    assert_int_equal(fsdp__st_write(path, entries, 2, NULL, 0, fill, calls), FSDP_OK);
    assert_int_equal(calls[0], 3);
    assert_int_equal(calls[1], 1);
    fsdp__st *r = fsdp__st_open(path);
    assert_non_null(r);
    unsigned char *x = malloc((size_t)big);
    assert_int_equal(fsdp__st_read(r, fsdp__st_find(r, "x"), 0, big, x), FSDP_OK);
    for (int64_t i = 0; i < big; i++)
        if (x[i] != (unsigned char)(i * 7)) fail_msg("byte %lld", (long long)i);
    free(x);
    fsdp__st_close(r);
    /* without a function there is nothing to write */
    fsdp__file_remove(path);
    assert_int_equal(fsdp__st_write(path, entries, 2, NULL, 0, NULL, NULL), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    expect_only(NULL);
}

static void test_write_ranges(void **state)
{
    (void)state;
    fsdp__st_writer *w = fsdp__st_writer_create(path);
    assert_non_null(w);
    assert_int_equal(fsdp__st_writer_add(w, "w", FSDP_F32, 2, (int64_t[]){3, 2}), FSDP_OK);
    assert_int_equal(fsdp__st_writer_add(w, "w", FSDP_F32, 0, NULL), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_add(w, "__metadata__", FSDP_F32, 0, NULL),
                     FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_add(w, "\xff", FSDP_F32, 0, NULL), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_add(w, "n", FSDP_DTYPE_NONE, 0, NULL), FSDP_INVALID_DTYPE);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_add(w, "n", FSDP_F32, 1, (int64_t[]){-1}), FSDP_INVALID_SHAPE);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_add(w, "n", FSDP_F32, 2, (int64_t[]){INT64_MAX, 2}),
                     FSDP_INVALID_SHAPE);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_meta(w, "k", "v"), FSDP_OK);
    assert_int_equal(fsdp__st_writer_meta(w, "k", "v"), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    const float f[6] = {0, 1, 2, 3, 4, 5};
    assert_int_equal(fsdp__st_writer_write(w, "w", 0, 4, f), FSDP_INVALID_STATE); /* before begin */
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_begin(w), FSDP_OK);
    assert_int_equal(fsdp__st_writer_begin(w), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_add(w, "late", FSDP_F32, 0, NULL), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_write(w, "w", 8, 16, f + 2), FSDP_OK);
    assert_false(fsdp__file_exists(path)); /* not before it is complete */
    assert_int_equal(fsdp__st_writer_write(w, "v", 0, 8, f), FSDP_NOT_FOUND);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_write(w, "w", 20, 8, f), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_write(w, "w", 0, 16, f), FSDP_INVALID_STATE); /* twice */
    fsdp_error_clear();
    assert_int_equal(fsdp__st_writer_write(w, "w", 0, 8, f), FSDP_OK);
    assert_int_equal(fsdp__st_writer_finish(w), FSDP_OK);
    fsdp__st_writer_free(w);
    expect_only("a.safetensors");
    fsdp__st *r = fsdp__st_open(path);
    assert_non_null(r);
    float back[6];
    assert_int_equal(fsdp__st_read(r, fsdp__st_find(r, "w"), 0, 24, back), FSDP_OK);
    assert_memory_equal(back, f, 24);
    fsdp__st_close(r);
}

static void test_write_incomplete(void **state)
{
    (void)state;
    fsdp__file_remove(path);
    fsdp__st_writer *w = fsdp__st_writer_create(path);
    assert_int_equal(fsdp__st_writer_add(w, "w", FSDP_U8, 1, (int64_t[]){3}), FSDP_OK);
    assert_int_equal(fsdp__st_writer_begin(w), FSDP_OK);
    assert_int_equal(fsdp__st_writer_write(w, "w", 0, 2, "ab"), FSDP_OK);
    assert_int_equal(fsdp__st_writer_finish(w), FSDP_INVALID_STATE);
    assert_non_null(strstr(fsdp_error_text(), "found 2 bytes written, expected 3"));
    fsdp_error_clear();
    fsdp__st_writer_free(w);
    expect_only(NULL);
    /* dropped in the middle: nothing is left either */
    w = fsdp__st_writer_create(path);
    assert_int_equal(fsdp__st_writer_begin(w), FSDP_OK);
    fsdp__st_writer_free(w);
    expect_only(NULL);
}

static fsdp_status fill_fails(void *arg, int64_t index, int64_t offset, int64_t bytes, void *buf)
{
    (void)arg, (void)index, (void)offset;
    memset(buf, 0, (size_t)bytes);
    return FSDP_INTERRUPTED;
}

/* A file that transformers wrote, read and written again, is the same file. */
static void test_round_trip(void **state)
{
    (void)state;
    static const char theirs[] = FSDP_TEST_DATA "/models/llama-tied/model.safetensors";
    fsdp__st *r = fsdp__st_open(theirs);
    if (!r) fail_msg("%s", fsdp_error_text());
    assert_true(fsdp__st_count(r) > 20);
    fsdp__st_writer *w = fsdp__st_writer_create(path);
    /* declared in the opposite order, written tensor by tensor in two halves, the second first */
    for (int64_t i = fsdp__st_count(r) - 1; i >= 0; i--) {
        const fsdp__st_tensor *t = fsdp__st_at(r, i);
        assert_int_equal(fsdp__st_writer_add(w, t->name, t->dtype, t->ndim, t->shape), FSDP_OK);
    }
    assert_int_equal(fsdp__st_writer_begin(w), FSDP_OK);
    for (int64_t i = fsdp__st_count(r) - 1; i >= 0; i--) {
        const fsdp__st_tensor *t = fsdp__st_at(r, i);
        int64_t half = t->bytes / 2;
        char *data = malloc((size_t)t->bytes);
        assert_int_equal(fsdp__st_read(r, t, 0, t->bytes, data), FSDP_OK);
        assert_int_equal(fsdp__st_writer_write(w, t->name, half, t->bytes - half, data + half),
                         FSDP_OK);
        assert_int_equal(fsdp__st_writer_write(w, t->name, 0, half, data), FSDP_OK);
        free(data);
    }
    assert_int_equal(fsdp__st_writer_finish(w), FSDP_OK);
    fsdp__st_writer_free(w);
    char *a, *b;
    size_t na, nb;
    assert_int_equal(fsdp__file_read(theirs, &a, &na), FSDP_OK);
    assert_int_equal(fsdp__file_read(path, &b, &nb), FSDP_OK);
    assert_int_equal(na, nb);
    assert_memory_equal(a, b, na);
    assert_int_equal(fsdp__st_bytes_read(r), (int64_t)na); /* each byte once */
    free(a);
    free(b);
    fsdp__st_close(r);
    fsdp__file_remove(path);
}

/* A full disk, as a limit of the file size shows it: text, and the old file is untouched. */
static void test_write_no_space(void **state)
{
    (void)state;
    struct rlimit old, small;
    const int64_t n = 1 << 20;
    const fsdp__st_entry entry = {"x", FSDP_U8, 1, &n, NULL};
    int64_t calls[1] = {0};
    assert_int_equal(fsdp__file_write(path, "old", 3), FSDP_OK);
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small = (struct rlimit){100000, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    fsdp_status s = fsdp__st_write(path, &entry, 1, NULL, 0, fill, calls);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(s, FSDP_IO_ERROR);
    assert_non_null(strstr(fsdp_error_text(), path));
    assert_non_null(strstr(fsdp_error_text(), "File too large"));
    fsdp_error_clear();
    assert_int_equal(calls[0], 0); /* found before any data was made */
    expect_only("a.safetensors");
    char *text;
    size_t len;
    assert_int_equal(fsdp__file_read(path, &text, &len), FSDP_OK);
    assert_string_equal(text, "old");
    free(text);
    /* the same in the middle of the data */
    fsdp__st_writer *w = fsdp__st_writer_create(path);
    assert_int_equal(fsdp__st_writer_add(w, "x", FSDP_U8, 1, &n), FSDP_OK);
    assert_int_equal(fsdp__st_writer_begin(w), FSDP_OK);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    char *data = calloc(1, (size_t)n);
    s = fsdp__st_writer_write(w, "x", 0, n, data);
    setrlimit(RLIMIT_FSIZE, &old);
    free(data);
    assert_int_equal(s, FSDP_IO_ERROR);
    fsdp_error_clear();
    expect_only("a.safetensors"); /* at once, before free */
    assert_int_equal(fsdp__st_writer_finish(w), FSDP_INVALID_STATE);
    fsdp_error_clear();
    fsdp__st_writer_free(w);
    /* and where the caller's function gives up */
    assert_int_equal(fsdp__st_write(path, &entry, 1, NULL, 0, fill_fails, NULL), FSDP_INTERRUPTED);
    expect_only("a.safetensors");
    fsdp__file_remove(path);
    assert_int_equal(fsdp__st_write("/nowhere/x", &entry, 1, NULL, 0, fill, calls), FSDP_NOT_FOUND);
    assert_non_null(strstr(fsdp_error_text(), "/nowhere/x"));
    fsdp_error_clear();
}

static void test_write_header_limit(void **state)
{
    (void)state;
    size_t n = FSDP__ST_HEADER_LIMIT;
    char *value = malloc(n + 1);
    memset(value, 'a', n);
    value[n] = 0;
    const fsdp__st_pair meta[] = {{"k", value}};
    assert_int_equal(fsdp__st_write(path, NULL, 0, meta, 1, NULL, NULL), FSDP_INVALID_ARGUMENT);
    assert_non_null(strstr(fsdp_error_text(), "100000000"));
    fsdp_error_clear();
    expect_only(NULL);
    free(value);
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup(f, start)
    const struct CMUnitTest tests[] = {
        TEST(test_bad_headers),
        TEST(test_bad_lengths),
        TEST(test_bad_bytes),
        TEST(test_nesting),
        TEST(test_missing_file),
        TEST(test_every_prefix),
        TEST(test_good_empty),
        TEST(test_good_shapes),
        TEST(test_good_names),
        TEST(test_every_dtype),
        TEST(test_bytes_read),
        TEST(test_write_bytes),
        TEST(test_write_format_is_added),
        TEST(test_write_fill),
        TEST(test_write_ranges),
        TEST(test_write_incomplete),
        TEST(test_round_trip),
        TEST(test_write_no_space),
        TEST(test_write_header_limit),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
