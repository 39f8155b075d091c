/*
 * test_data_bpe_train.c - a trained tokenizer is the one that counting all
 * pairs anew at each merge gives, and it loads and round-trips.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/bpe_train.h"
#include "fsdp/data.h"
#include "format/file.h"
#include "format/json.h"

static char dir[] = "/tmp/fsdp_test_bpe_XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fsdp__dir_remove(dir) == FSDP_OK ? 0 : -1;
}

static const char *const special[] = {"<|pad|>", "<|endoftext|>"};

static fsdp_status train(const char *const *texts, int n, int64_t vocab, const char *out)
{
    fsdp__bpe_trainer *t = fsdp__bpe_trainer_create();
    assert_non_null(t);
    for (int i = 0; i < n; i++)
        assert_int_equal(fsdp__bpe_trainer_add(t, texts[i], strlen(texts[i])), FSDP_OK);
    fsdp_status s = fsdp__bpe_trainer_write(t, vocab, special, 2, out);
    fsdp__bpe_trainer_free(t);
    return s;
}

static void check_merges(const char *const *expected, size_t n)
{
    char path[128];
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    json_t *root = fsdp__json_load(path);
    const json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    assert_int_equal(json_array_size(merges), n);
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(merges, i);
        char text[64];
        snprintf(text, sizeof text, "%s %s", json_string_value(json_array_get(m, 0)),
                 json_string_value(json_array_get(m, 1)));
        assert_string_equal(text, expected[i]);
    }
    json_decref(root);
}

/* Small enough to count by hand. */
static void test_by_hand(void **state)
{
    /* Words: "low" 1, " low" 4, " lower" 2, "aaaa" 1. Pairs: lo 7, ow 7, Gl 6; ids order o < w and
     * l < o, so "l o" first; then "lo w" 7; "G low" 6; aa 3 against er 2, we 2. */
    static const char *const texts[] = {"low low low lower", "aaaa low low lower"};
    static const char *const merges[] = {"l o", "lo w", "\xc4\xa0 low",
                                         "a a", "e r",  "\xc4\xa0low er"};
    (void)state;
    assert_int_equal(train(texts, 2, 258 + 6, dir), FSDP_OK);
    check_merges(merges, 6);
    fsdp_tokenizer *t = fsdp_tokenizer_load(dir);
    assert_non_null(t);
    assert_int_equal(fsdp_tokenizer_vocab_size(t), 264);
    assert_int_equal(fsdp_tokenizer_token_id(t, "<|pad|>"), 0);
    assert_int_equal(fsdp_tokenizer_token_id(t, "!"), 2);
    assert_int_equal(fsdp_tokenizer_eos(t), 1);
    assert_int_equal(fsdp_tokenizer_bos(t), 1);
    assert_true(fsdp_tokenizer_is_special(t, 1));
    fsdp_tokenizer_free(t);
}

static void test_too_few(void **state)
{
    static const char *const texts[] = {"ab"};
    (void)state;
    assert_int_equal(train(texts, 1, 258 + 1, dir), FSDP_OK);
    assert_int_equal(train(texts, 1, 258 + 2, dir), FSDP_INVALID_DATA);
    assert_non_null(strstr(fsdp_error_text(), "259 tokens at most"));
    fsdp_error_clear();
    assert_int_equal(train(texts, 0, 258, dir), FSDP_OK); /* bytes alone need no text */
    check_merges(NULL, 0);
    assert_int_equal(train(texts, 1, 257, dir), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
}

/* A text of words drawn from few letters, so that pairs overlap and tie a lot. */
static char *make_text(size_t n, uint32_t seed)
{
    static const char letters[] = "aabbbcd e  f\n.1\xc3\xa9";
    char *s = malloc(n + 1);
    assert_non_null(s);
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        s[i] = letters[(seed >> 16) % (sizeof letters - 1)];
    }
    s[n] = 0;
    return s;
}

/* ---- the slow way: all pairs counted anew for each merge ----------------------------- */

enum { WORD = 12, WORDS = 400, MERGES = 150 };

/* Letters are 'a'..'h' with ids in that order after the bytes before them; a word is " xyz". */
typedef struct naive {
    char symbols[WORDS][WORD][WORD + 1]; /* words as lists of strings */
    int lengths[WORDS];
    char ids[300 + MERGES][WORD + 1]; /* token of an id */
    int id_count;
    char merges[MERGES][2][WORD + 1];
} naive;

static int naive_id(const naive *m, const char *s)
{
    for (int i = 0; i < m->id_count; i++)
        if (strcmp(m->ids[i], s) == 0) return i;
    fail_msg("no token %s", s);
    return -1;
}

/* The most frequent pair into merge k, the one of lower ids among equals; then merges it. */
static void naive_merge(naive *m, int k)
{
    static int counts[300 + MERGES][300 + MERGES];
    int best = 0, left = 0, right = 0;
    memset(counts, 0, sizeof counts);
    for (int w = 0; w < WORDS; w++)
        for (int i = 0; i + 1 < m->lengths[w]; i++)
            counts[naive_id(m, m->symbols[w][i])][naive_id(m, m->symbols[w][i + 1])]++;
    for (int a = 0; a < m->id_count; a++)
        for (int b = 0; b < m->id_count; b++)
            if (counts[a][b] > best) {
                best = counts[a][b];
                left = a;
                right = b;
            }
    strcpy(m->merges[k][0], m->ids[left]);
    strcpy(m->merges[k][1], m->ids[right]);
    char whole[2 * WORD + 2];
    snprintf(whole, sizeof whole, "%s%s", m->ids[left], m->ids[right]);
    for (int w = 0; w < WORDS; w++) {
        int made = 0;
        for (int i = 0; i < m->lengths[w]; made++) {
            bool hit = i + 1 < m->lengths[w] && strcmp(m->symbols[w][i], m->ids[left]) == 0 &&
                       strcmp(m->symbols[w][i + 1], m->ids[right]) == 0;
            if (hit) snprintf(m->symbols[w][i], WORD + 1, "%.*s", WORD, whole);
            memmove(m->symbols[w][made], m->symbols[w][i], WORD + 1);
            i += hit ? 2 : 1;
        }
        m->lengths[w] = made;
    }
    for (int i = 0; i < m->id_count; i++)
        if (strcmp(m->ids[i], whole) == 0) return; /* made before of other halves */
    snprintf(m->ids[m->id_count++], WORD + 1, "%.*s", WORD, whole);
}

static void test_against_naive(void **state)
{
    static naive m;
    static char text[WORDS * WORD + 1];
    char path[128];
    uint32_t seed = 77;
    size_t at = 0;
    (void)state;
    for (int c = 'A'; c <= 'h'; c++)
        m.ids[m.id_count++][0] = (char)c;
    strcpy(m.ids[m.id_count++], "~"); /* the blank's character comes after all letters */
    for (int w = 0; w < WORDS; w++) {
        strcpy(m.symbols[w][m.lengths[w]++], "~");
        text[at++] = ' ';
        seed = seed * 1664525u + 1013904223u;
        for (int n = 1 + (int)(seed >> 20) % (WORD - 2); n > 0; n--) {
            seed = seed * 1664525u + 1013904223u;
            char c = (char)('a' + (seed >> 16) % 8 * (seed >> 28) / 16);
            m.symbols[w][m.lengths[w]++][0] = c;
            text[at++] = c;
        }
    }
    for (int k = 0; k < MERGES; k++)
        naive_merge(&m, k);
    int64_t made = m.id_count - ('h' - 'A' + 1) - 1;
    assert_int_equal(train((const char *const[]){text}, 1, 258 + made, dir), FSDP_OK);
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    json_t *root = fsdp__json_load(path);
    const json_t *merges = json_object_get(json_object_get(root, "model"), "merges");
    assert_true(json_array_size(merges) > 100 && json_array_size(merges) <= MERGES);
    for (size_t i = 0; i < json_array_size(merges); i++)
        for (size_t h = 0; h < 2; h++) {
            const char *got = json_string_value(json_array_get(json_array_get(merges, i), h));
            const char *want = m.merges[i][h];
            if (want[0] == '~') { /* the blank is U+0120 there */
                assert_memory_equal(got, "\xc4\xa0", 2);
                got += 2;
                want++;
            }
            assert_string_equal(got, want);
        }
    json_decref(root);
}

/* Any bytes come back: first as valid text, so the generator's broken letters are U+FFFD. */
static void test_round_trip(void **state)
{
    (void)state;
    char *a = make_text(60000, 1), *b = make_text(3000, 2);
    const char *const texts[] = {a, b};
    assert_int_equal(train(texts, 2, 1500, dir), FSDP_OK);
    fsdp_tokenizer *t = fsdp_tokenizer_load(dir);
    assert_non_null(t);
    int32_t *ids, *again;
    int64_t n, m;
    size_t len, len2;
    char *c = make_text(5000, 3);
    assert_int_equal(fsdp_tokenizer_encode(t, c, 5000, 0, &ids, &n), FSDP_OK);
    char *text = fsdp_tokenizer_decode(t, ids, n, 0, &len);
    assert_int_equal(fsdp_tokenizer_encode(t, text, len, 0, &again, &m), FSDP_OK);
    char *text2 = fsdp_tokenizer_decode(t, again, m, 0, &len2);
    assert_int_equal(n, m);
    assert_memory_equal(ids, again, (size_t)n * sizeof *ids);
    assert_int_equal(len, len2);
    assert_memory_equal(text, text2, len);
    assert_true(n < 4000); /* it compresses */
    free(text);
    free(text2);
    free(ids);
    free(again);
    fsdp_tokenizer_free(t);
    free(a);
    free(b);
    free(c);
}

/* The same file whatever the order of the texts. */
static void test_deterministic(void **state)
{
    char path[128], *first, *second;
    size_t n1, n2;
    (void)state;
    char *a = make_text(20000, 5), *b = make_text(20000, 6);
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    assert_int_equal(train((const char *const[]){a, b}, 2, 1000, dir), FSDP_OK);
    assert_int_equal(fsdp__file_read(path, &first, &n1), FSDP_OK);
    assert_int_equal(train((const char *const[]){b, a}, 2, 1000, dir), FSDP_OK);
    assert_int_equal(fsdp__file_read(path, &second, &n2), FSDP_OK);
    assert_int_equal(n1, n2);
    assert_memory_equal(first, second, n1);
    free(first);
    free(second);
    free(a);
    free(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),       cmocka_unit_test(test_too_few),
        cmocka_unit_test(test_against_naive), cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_deterministic),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
