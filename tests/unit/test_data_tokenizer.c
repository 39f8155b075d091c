/*
 * test_data_tokenizer.c - ids and texts are those of Hugging Face's
 * tokenizers, for each form of tokenizer.json that is read.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/tokenizer.h"
#include "format/file.h"
#include "format/json.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

static fsdp_tokenizer *load(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, FSDP_TEST_DATA "/tokenizers/%s", name);
    fsdp_tokenizer *t = fsdp_tokenizer_load(path);
    if (!t) fail_msg("%s: %s", name, fsdp_error_text());
    return t;
}

static void check_ids(fsdp_tokenizer *t, const json_t *text, const json_t *expected, int special)
{
    int32_t *ids;
    int64_t n;
    assert_int_equal(fsdp_tokenizer_encode(t, json_string_value(text), json_string_length(text),
                                           special, &ids, &n),
                     FSDP_OK);
    assert_int_equal(n, json_array_size(expected));
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(ids[i], json_integer_value(json_array_get(expected, (size_t)i)));
    free(ids);
}

static void check_text(fsdp_tokenizer *t, const json_t *ids, const json_t *expected)
{
    int32_t list[512];
    size_t n = json_array_size(ids), len;
    assert_true(n < COUNT(list));
    for (size_t i = 0; i < n; i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    char *text = fsdp_tokenizer_decode(t, list, (int64_t)n, 0, &len);
    assert_non_null(text);
    assert_int_equal(len, json_string_length(expected));
    assert_memory_equal(text, json_string_value(expected), len + 1);
    free(text);
}

static void test_golden(void **state)
{
    static const char *const names[] = {"gpt2",   "llama3", "qwen",
                                        "smollm", "llama2", "llama2-metaspace"};
    (void)state;
    for (size_t k = 0; k < COUNT(names); k++) {
        char path[512];
        snprintf(path, sizeof path, FSDP_TEST_DATA "/tokenizers/%s/expected.json", names[k]);
        fsdp_tokenizer *t = load(names[k]);
        json_t *cases = fsdp__json_load(path);
        assert_non_null(cases);
        assert_true(json_array_size(cases) >= 17);
        /* Twice: the second time words come from the cache. */
        for (size_t i = 0; i < 2 * json_array_size(cases); i++) {
            const json_t *c = json_array_get(cases, i % json_array_size(cases));
            check_ids(t, json_object_get(c, "text"), json_object_get(c, "ids"), 1);
            check_ids(t, json_object_get(c, "text"), json_object_get(c, "ids_no_special"), 0);
            check_text(t, json_object_get(c, "ids"), json_object_get(c, "decoded"));
        }
        json_decref(cases);
        fsdp_tokenizer_free(t);
    }
}

/* The ids of text must decode to `expected`. */
static void check_round_trip(fsdp_tokenizer *t, const char *text, size_t n, const char *expected,
                             size_t m)
{
    int32_t *ids;
    int64_t count;
    size_t len;
    assert_int_equal(fsdp_tokenizer_encode(t, text, n, 0, &ids, &count), FSDP_OK);
    char *back = fsdp_tokenizer_decode(t, ids, count, 0, &len);
    assert_non_null(back);
    assert_int_equal(len, m);
    assert_memory_equal(back, expected, m);
    free(back);
    free(ids);
}

/* Wrong bytes become U+FFFD, one for each longest wrong part; nothing is lost around them. */
static void test_invalid_utf8(void **state)
{
    static const struct {
        const char *in, *out;
    } cases[] = {
        {"a\xff"
         "b",
         "a\xef\xbf\xbd"
         "b"},
        {"\xe2\x82", "\xef\xbf\xbd"},                             /* cut short */
        {"\xe2\x28\xa1", "\xef\xbf\xbd(\xef\xbf\xbd"},            /* broken off */
        {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"}, /* a surrogate */
        {"\xc0\xaf", "\xef\xbf\xbd\xef\xbf\xbd"},                 /* overlong */
        {"\xf0\x9f\x8e\x89\xf0\x9f\x8e", "\xf0\x9f\x8e\x89\xef\xbf\xbd"},
        {"\xf4\x90\x80\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
    };
    (void)state;
    fsdp_tokenizer *t = load("gpt2");
    for (size_t i = 0; i < COUNT(cases); i++)
        check_round_trip(t, cases[i].in, strlen(cases[i].in), cases[i].out, strlen(cases[i].out));
    /* Every single byte and every pair with 0xe2 survives in the sense above. */
    for (int b = 0; b < 256; b++) {
        char text[3] = {(char)b, 'x', (char)b};
        if (b < 0x80)
            check_round_trip(t, text, 3, text, 3);
        else
            check_round_trip(t, text, 3, "\xef\xbf\xbdx\xef\xbf\xbd", 7);
    }
    fsdp_tokenizer_free(t);
}

/* A stream of tokens: raw texts of parts put together are the text of the whole. */
static void test_raw_parts(void **state)
{
    static const char text[] = "\xe6\xbc\xa2 \xf0\x9f\x8e\x89\xc3\xa9!";
    (void)state;
    static const char *const names[] = {"gpt2", "llama2"};
    for (size_t k = 0; k < 2; k++) {
        fsdp_tokenizer *t = load(names[k]);
        fsdp__ids ids = {0};
        fsdp__str parts = {0}, whole = {0};
        assert_int_equal(fsdp__tokenizer_encode(t, text, sizeof text - 1, false, &ids), FSDP_OK);
        for (int64_t i = 0; i < ids.count; i++)
            assert_int_equal(fsdp__tokenizer_decode(t, ids.items + i, 1, false, true, &parts),
                             FSDP_OK);
        assert_int_equal(fsdp__tokenizer_decode(t, ids.items, ids.count, false, false, &whole),
                         FSDP_OK);
        assert_string_equal(whole.p, text);
        /* Llama 2's decoder drops a leading blank of each text, so only GPT-2's parts join. */
        if (k == 0) assert_string_equal(parts.p, text);
        fsdp__str_free(&parts);
        fsdp__str_free(&whole);
        free(ids.items);
        fsdp_tokenizer_free(t);
    }
}

static void test_look_up(void **state)
{
    (void)state;
    fsdp_tokenizer *t = load("llama3");
    assert_int_equal(fsdp_tokenizer_vocab_size(t), 1500);
    assert_int_equal(fsdp_tokenizer_token_id(t, "<|begin|>"), 0);
    assert_int_equal(fsdp_tokenizer_token_id(t, "!"), 3);
    assert_int_equal(fsdp_tokenizer_token_id(t, "no such token"), -1);
    assert_string_equal(fsdp_tokenizer_token(t, 0, NULL), "<|begin|>");
    assert_string_equal(fsdp_tokenizer_token(t, 3, NULL), "!");
    assert_null(fsdp_tokenizer_token(t, -1, NULL));
    assert_null(fsdp_tokenizer_token(t, 1500, NULL));
    assert_true(fsdp_tokenizer_is_special(t, 1));
    assert_false(fsdp_tokenizer_is_special(t, 3));
    assert_int_equal(fsdp_tokenizer_bos(t), -1);
    /* Special tokens are left out on request, ids that name nothing always. */
    size_t len;
    char *text = fsdp_tokenizer_decode(t, (int32_t[]){0, 3, 9999, -7, 1}, 5, 1, &len);
    assert_string_equal(text, "!");
    free(text);
    text = fsdp_tokenizer_decode(t, NULL, 0, 0, &len);
    assert_string_equal(text, "");
    free(text);
    fsdp_tokenizer_free(t);
    fsdp_tokenizer_free(NULL);
}

/* ---- small tokenizers written here -------------------------------------------------- */

static const char *scratch(void)
{
    static char path[64];
    if (!path[0]) {
        strcpy(path, "/tmp/fsdp_test_tokenizer_XXXXXX");
        assert_non_null(mkdtemp(path));
    }
    return path;
}

/* Loads a tokenizer whose model is a character-level BPE and whose other parts are `parts`. */
static fsdp_tokenizer *small(const char *parts)
{
    char path[128];
    fsdp__str s = {0};
    snprintf(path, sizeof path, "%s/tokenizer.json", scratch());
    fsdp__str_addf(&s,
                   "{%s\"model\":{\"type\":\"BPE\",\"unk_token\":\"?\",\"vocab\":{\"?\":0,\"a\":1,"
                   "\"b\":2,\"c\":3,\" \":4,\"1\":5,\"2\":6,\".\":7,\"ab\":8,\"abc\":9,\"_\":10,"
                   "\"_a\":11,\"A\":12},\"merges\":[\"a b\",[\"ab\",\"c\"],\"_ a\"]}}",
                   parts);
    assert_int_equal(fsdp__file_write(path, s.p, s.len), FSDP_OK);
    fsdp__str_free(&s);
    return fsdp_tokenizer_load(path);
}

/* The tokens of text, joined by '|'. */
static void check_tokens(const char *parts, const char *text, const char *expected)
{
    fsdp_tokenizer *t = small(parts);
    if (!t) fail_msg("%s: %s", parts, fsdp_error_text());
    int32_t *ids;
    int64_t n;
    fsdp__str got = {0};
    assert_int_equal(fsdp_tokenizer_encode(t, text, strlen(text), 1, &ids, &n), FSDP_OK);
    for (int64_t i = 0; i < n; i++)
        fsdp__str_addf(&got, "%s%s", i ? "|" : "", fsdp_tokenizer_token(t, ids[i], NULL));
    assert_string_equal(fsdp__str_get(&got), expected);
    fsdp__str_free(&got);
    free(ids);
    fsdp_tokenizer_free(t);
}

static void test_parts(void **state)
{
#define PRE(s) "\"pre_tokenizer\":" s ","
#define NORM(s) "\"normalizer\":" s ","
#define SPLIT(behavior, invert)                                                       \
    PRE("{\"type\":\"Split\",\"pattern\":{\"String\":\"1\"},\"behavior\":\"" behavior \
        "\",\"invert\":" invert "}")
    (void)state;
    check_tokens("", "abcab", "abc|ab");
    check_tokens("", "", "");
    check_tokens("", "axyb", "a|?|?|b"); /* one for each unless fuse_unk */
    check_tokens(SPLIT("Removed", "false"), "ab1c11ab", "ab|c|ab");
    check_tokens(SPLIT("Isolated", "false"), "ab1c", "ab|1|c");
    check_tokens(SPLIT("Removed", "true"), "ab1c11ab", "1|1|1");
    check_tokens(SPLIT("MergedWithNext", "false"), "a1b11c", "a|1|b|1|1|c");
    check_tokens(PRE("{\"type\":\"Split\",\"pattern\":{\"String\":\"b\"},\"behavior\":"
                     "\"MergedWithPrevious\"}"),
                 "abcabbab", "ab|c|ab|b|ab");
    check_tokens(PRE("{\"type\":\"Split\",\"pattern\":{\"String\":\"b\"},\"behavior\":"
                     "\"MergedWithNext\"}"),
                 "abcab", "a|b|c|a|b");
    check_tokens(PRE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[ab]\"},\"behavior\":"
                     "\"Contiguous\"}"),
                 "ababc", "ab|ab|c");
    check_tokens(PRE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(?=c)\"},\"behavior\":"
                     "\"Isolated\"}"),
                 "abcabc", "ab|c|ab|c");
    check_tokens(PRE("{\"type\":\"WhitespaceSplit\"}"), " ab  c ", "ab|c");
    check_tokens(PRE("{\"type\":\"Punctuation\"}"), "ab.c", "ab|.|c");
    check_tokens(PRE("{\"type\":\"Digits\"}"), "ab12c", "ab|1|2|c");
    check_tokens(PRE("{\"type\":\"Metaspace\",\"replacement\":\"_\",\"split\":true}"), "a ab",
                 "_a|_|ab");
    check_tokens(PRE("{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"never\"}"),
                 "a b", "a|_|b");
    check_tokens(NORM("{\"type\":\"Lowercase\"}"), "ABC", "abc");
    check_tokens(NORM("{\"type\":\"Strip\"}"), "  ab ", "ab");
    check_tokens(NORM("{\"type\":\"Strip\",\"strip_left\":false}"), " ab ", " |ab");
    check_tokens(
        NORM("{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"\\\\s+\"},\"content\":\"_\"}"),
        "b \t a", "b|_a");
    /* What begins with the document is marked, but not where the normalizer cut its start off. */
#define FIRST PRE("{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"first\"}")
    check_tokens(NORM("{\"type\":\"Strip\"}") FIRST, "a", "_a");
    check_tokens(NORM("{\"type\":\"Strip\"}") FIRST, "\ta", "a");
    check_tokens(NORM("{\"type\":\"Replace\",\"pattern\":{\"String\":\"b\"},\"content\":\"\"}")
                     FIRST,
                 "ba", "a");
    check_tokens(PRE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[[:alpha:].]+\"},\"behavior\":"
                     "\"Removed\"}"),
                 "a1b.2", "1|2");
    check_tokens(NORM("{\"type\":\"NFKC\"}"), "\xef\xbd\x81\xef\xbd\x82", "ab"); /* wide letters */
    check_tokens(
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
        "{\"id\":\"b\"}},{\"Sequence\":{\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"c\"}}],"
        "\"special_tokens\":{\"b\":{\"ids\":[2]},\"c\":{\"ids\":[3,3]}}},",
        "ab", "b|ab|c|c");
}

#define ADDED(flags)                                                               \
    "\"added_tokens\":[{\"id\":13,\"content\":\"<x>\",\"special\":true" flags "}," \
    "{\"id\":14,\"content\":\"<x>y\",\"normalized\":false}],"

static void test_added_tokens(void **state)
{
    (void)state;
    check_tokens(ADDED(""), "ab<x>ab<x>y", "ab|<x>|ab|<x>y"); /* the longest */
    check_tokens(ADDED(",\"lstrip\":true"), "ab  <x> b", "ab|<x>| |b");
    check_tokens(ADDED(",\"rstrip\":true"), "ab  <x> b", "ab| | |<x>|b");
    check_tokens(ADDED(",\"lstrip\":true,\"rstrip\":true"), "<x>  <x>b", "<x>|<x>|b");
    check_tokens(ADDED(",\"single_word\":true"), "a<x> <x>.", "a|?|?|?| |<x>|.");
    /* Found in the normalized text only where it is marked so. */
    check_tokens(NORM("{\"type\":\"Lowercase\"}") "\"added_tokens\":[{\"id\":13,\"content\":\"<X>"
                                                  "\",\"normalized\":true}],",
                 "a<x>b<X>", "a|<x>|b|<x>");
    check_tokens(NORM("{\"type\":\"Lowercase\"}") "\"added_tokens\":[{\"id\":13,\"content\":\"<X>"
                                                  "\",\"normalized\":false}],",
                 "a<x>b<X>", "a|?|?|?|b|<X>");
}

/* A normalized token decodes as text does: the decoder undoes what the normalizer did to it. */
static void test_added_normalized(void **state)
{
    static const char parts[] = NORM("{\"type\":\"Replace\",\"pattern\":{\"String\":\" "
                                     "\"},\"content\":\"_\"}") "\"added_tokens\":[{\"id\":13,"
                                                               "\"content\":\"b "
                                                               "c\",\"normalized\":true}],"
                                                               "\"decoder\":{\"type\":\"Replace\","
                                                               "\"pattern\":{\"String\":\"_\"},"
                                                               "\"content\":\" \"},";
    (void)state;
    fsdp_tokenizer *t = small(parts);
    assert_non_null(t);
    assert_int_equal(fsdp_tokenizer_token_id(t, "b c"), 13);
    assert_string_equal(fsdp_tokenizer_token(t, 13, NULL), "b_c");
    check_round_trip(t, "a b c a", 7, "a b c a", 7);
    fsdp_tokenizer_free(t);
}

static void check_refused(const char *parts, const char *word)
{
    assert_null(small(parts));
    if (!strstr(fsdp_error_text(), word)) fail_msg("no \"%s\" in: %s", word, fsdp_error_text());
    assert_non_null(strstr(fsdp_error_text(), "tokenizer.json"));
    fsdp_error_clear();
}

static void test_refused(void **state)
{
    (void)state;
    check_refused(PRE("{\"type\":\"BertPreTokenizer\"}"), "BertPreTokenizer");
    check_refused(NORM("{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Nmt\"}]}"),
                  "normalizer.normalizers[0].type is \"Nmt\"");
    check_refused("\"decoder\":{\"type\":\"WordPiece\"},", "WordPiece");
    check_refused("\"decoder\":{},", "decoder.type");
    check_refused("\"post_processor\":{\"type\":\"Odd\"},", "Odd");
    check_refused(SPLIT("Sideways", "false"), "Sideways");
    check_refused(
        PRE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Removed\"}"),
        "not valid");
    check_refused(PRE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"},\"behavior\":"
                      "\"Removed\"}"),
                  "&&");
    check_refused("\"added_tokens\":[{\"id\":5,\"content\":\"a\"}],", "added_tokens[0]");
    check_refused("\"added_tokens\":[{\"content\":\"a\"}],", "added_tokens[0].id");
}

static void test_bad_files(void **state)
{
    static const struct {
        const char *text, *word;
    } cases[] = {
        {"{", "tokenizer.json"},
        {"[]", "no JSON object"},
        {"{}", "model"},
        {"{\"model\":{\"type\":\"Unigram\"}}", "Unigram"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", "\"a\""},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", "same id"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":900000},\"merges\":[]}}", "900000"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a a\"]}}", "\"aa\""},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"aa\"]}}", "merges[0]"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1}}",
         "dropout"},
        {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"u\"}}",
         "unk_token"},
    };
    char path[128];
    (void)state;
    snprintf(path, sizeof path, "%s/tokenizer.json", scratch());
    for (size_t i = 0; i < COUNT(cases); i++) {
        assert_int_equal(fsdp__file_write(path, cases[i].text, strlen(cases[i].text)), FSDP_OK);
        assert_null(fsdp_tokenizer_load(path));
        if (!strstr(fsdp_error_text(), cases[i].word))
            fail_msg("case %zu: no \"%s\" in: %s", i, cases[i].word, fsdp_error_text());
        fsdp_error_clear();
    }
    assert_int_equal(fsdp__file_remove(path), FSDP_OK);
    assert_null(fsdp_tokenizer_load(path));
    assert_int_equal(fsdp_error(), FSDP_NOT_FOUND);
    fsdp_error_clear();
    assert_null(fsdp_tokenizer_load(NULL));
    fsdp_error_clear();
}

/* Begin and end come from tokenizer_config.json, as text or as an object. */
static void test_config(void **state)
{
    static const char config[] = "{\"bos_token\":\"a\",\"eos_token\":{\"content\":\"ab\"}}";
    char path[128];
    (void)state;
    snprintf(path, sizeof path, "%s/tokenizer_config.json", scratch());
    assert_int_equal(fsdp__file_write(path, config, sizeof config - 1), FSDP_OK);
    fsdp_tokenizer *t = small("");
    assert_non_null(t);
    assert_int_equal(fsdp_tokenizer_bos(t), 1);
    assert_int_equal(fsdp_tokenizer_eos(t), 8);
    fsdp_tokenizer_free(t);
    assert_int_equal(fsdp__dir_remove(scratch()), FSDP_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_raw_parts),
        cmocka_unit_test(test_look_up),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_added_normalized),
        cmocka_unit_test(test_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
