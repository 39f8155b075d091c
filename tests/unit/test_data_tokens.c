/*
 * test_data_tokens.c - token files: what is written is read, and what is
 * wrong in a file is named.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/token_file.h"
#include "format/file.h"

static char dir[] = "/tmp/fsdp_test_tokens_XXXXXX";
static char path[64];

static int setup(void **state)
{
    (void)state;
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/x.tokens", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return fsdp__dir_remove(dir) == FSDP_OK ? 0 : -1;
}

/* n ids, id i being (7 i + 3) % vocab, a document each `every` ids. */
static void write_file(int64_t n, int64_t vocab, int64_t every)
{
    fsdp__tokens_writer *w = fsdp__tokens_create(path, vocab);
    assert_non_null(w);
    for (int64_t i = 0; i < n; i++) {
        if (every && i % every == 0) assert_int_equal(fsdp__tokens_document(w), FSDP_OK);
        assert_int_equal(fsdp__tokens_add(w, &(int32_t){(int32_t)((7 * i + 3) % vocab)}, 1),
                         FSDP_OK);
    }
    assert_int_equal(fsdp__tokens_document(w), FSDP_OK); /* an empty last one is dropped */
    assert_int_equal(fsdp__tokens_commit(w), FSDP_OK);
}

static void test_round_trip(void **state)
{
    static const struct {
        int64_t n, vocab, every;
    } cases[] = {{1, 1, 1}, {5, 257, 2}, {1000, 65536, 7}, {999, 65537, 100}, {70001, 300, 5000}};
    (void)state;
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int64_t n = cases[k].n, vocab = cases[k].vocab, every = cases[k].every;
        write_file(n, vocab, every);
        fsdp__tokens *t = fsdp__tokens_open(path);
        assert_non_null(t);
        assert_int_equal(t->count, n);
        assert_int_equal(t->vocab_size, vocab);
        assert_true((t->ids16 != NULL) == (vocab <= 65536));
        for (int64_t i = 0; i < n; i++)
            assert_int_equal(fsdp__tokens_get(t, i), (7 * i + 3) % vocab);
        assert_int_equal(t->document_count, (n + every - 1) / every);
        for (int64_t i = 0; i < t->document_count; i++)
            assert_int_equal(t->documents[i], i * every);
        assert_int_equal(fsdp__tokens_verify(t), FSDP_OK);
        assert_int_equal(fsdp__tokens_check(t, vocab), FSDP_OK);
        int64_t out[3];
        assert_int_equal(fsdp__tokens_read(t, n - 1, 1, vocab, out), FSDP_OK);
        assert_int_equal(out[0], (7 * (n - 1) + 3) % vocab);
        assert_int_equal(fsdp__tokens_read(t, n, 0, vocab, out), FSDP_OK);
        assert_int_equal(fsdp__tokens_read(t, n - 1, 2, vocab, out), FSDP_INVALID_ARGUMENT);
        fsdp_error_clear();
        fsdp__tokens_close(t);
    }
    fsdp__tokens_close(NULL);
}

static void expect_error(fsdp_status s, const char *const *words)
{
    assert_int_equal(fsdp_error(), s);
    for (; *words; words++)
        if (!strstr(fsdp_error_text(), *words))
            fail_msg("no \"%s\" in: %s", *words, fsdp_error_text());
    fsdp_error_clear();
}
#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* RC-33: a token 300 at a known offset, read by a model whose vocabulary is 257. */
static void test_outside_vocabulary(void **state)
{
    (void)state;
    int32_t ids[100] = {0};
    int64_t out[100];
    ids[41] = 300;
    fsdp__tokens_writer *w = fsdp__tokens_create(path, 301);
    assert_int_equal(fsdp__tokens_add(w, ids, 100), FSDP_OK);
    assert_int_equal(fsdp__tokens_commit(w), FSDP_OK);
    fsdp__tokens *t = fsdp__tokens_open(path);
    assert_int_equal(fsdp__tokens_check(t, 301), FSDP_OK);
    assert_int_equal(fsdp__tokens_check(t, 257), FSDP_INVALID_DATA);
    expect_error(FSDP_INVALID_DATA, WORDS(path, "token 300", "offset 41", "257"));
    assert_int_equal(fsdp__tokens_read(t, 0, 41, 257, out), FSDP_OK);
    assert_int_equal(fsdp__tokens_read(t, 40, 10, 257, out), FSDP_INVALID_DATA);
    expect_error(FSDP_INVALID_DATA, WORDS(path, "token 300", "offset 41", "257"));
    fsdp__tokens_close(t);

    w = fsdp__tokens_create(path, 257);
    assert_int_equal(fsdp__tokens_add(w, ids, 100), FSDP_INVALID_DATA);
    expect_error(FSDP_INVALID_DATA, WORDS("token 300", "offset 41"));
    fsdp__tokens_abort(w);
}

/* Changes one byte of the file, or cuts it (at < 0: -at bytes from the end). */
static void damage(long at)
{
    char *bytes;
    size_t n;
    assert_int_equal(fsdp__file_read(path, &bytes, &n), FSDP_OK);
    if (at >= 0)
        bytes[at] ^= 0x55;
    else
        n -= (size_t)-at;
    assert_int_equal(fsdp__file_write(path, bytes, n), FSDP_OK);
    free(bytes);
}

static void test_damaged(void **state)
{
    static const struct {
        long at;
        const char *word;
    } cases[] = {
        {0, "FSDPTOKS"},   {8, "version"},       {12, "hash"},          {16, "hash"},
        {24, "hash"},      {48, "hash"},         {56, "hash"},          {-1, "cut short"},
        {-8, "cut short"}, {-9000, "cut short"}, {-10056, "cut short"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_file(5000, 500, 5000); /* 64 + 10000 + 8 bytes */
        damage(cases[i].at);
        assert_null(fsdp__tokens_open(path));
        expect_error(cases[i].at == 8 ? FSDP_UNSUPPORTED : FSDP_INVALID_DATA,
                     WORDS(path, cases[i].word));
    }
    write_file(5000, 500, 100);
    damage(1000); /* among the ids: seen by the full check only */
    fsdp__tokens *t = fsdp__tokens_open(path);
    assert_non_null(t);
    assert_int_equal(fsdp__tokens_verify(t), FSDP_INVALID_DATA);
    expect_error(FSDP_INVALID_DATA, WORDS(path, "damaged"));
    fsdp__tokens_close(t);
}

static void test_missing_and_empty(void **state)
{
    (void)state;
    assert_int_equal(fsdp__file_remove(path), FSDP_OK);
    assert_null(fsdp__tokens_open(path));
    expect_error(FSDP_NOT_FOUND, WORDS(path, "fsdp prepare"));
    assert_null(fsdp__tokens_open(dir));
    expect_error(FSDP_INVALID_DATA, WORDS(dir, "regular"));
    fsdp__tokens_writer *w = fsdp__tokens_create(path, 10);
    assert_int_equal(fsdp__tokens_commit(w), FSDP_INVALID_DATA);
    expect_error(FSDP_INVALID_DATA, WORDS(path, "empty"));
    assert_false(fsdp__file_exists(path));
    /* Nothing is left behind by a writer that gives up. */
    w = fsdp__tokens_create(path, 10);
    assert_int_equal(fsdp__tokens_add(w, (int32_t[]){1, 2}, 2), FSDP_OK);
    fsdp__tokens_abort(w);
    fsdp__tokens_abort(NULL);
    char **names;
    int64_t count;
    assert_int_equal(fsdp__dir_list(dir, &names, &count), FSDP_OK);
    assert_int_equal(count, 0);
    fsdp__dir_list_free(names, count);
    assert_null(fsdp__tokens_create(path, 0));
    fsdp_error_clear();
    assert_null(fsdp__tokens_create("/proc/no/such/folder/x", 10));
    assert_true(fsdp_error() != FSDP_OK);
    fsdp_error_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_outside_vocabulary),
        cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_missing_and_empty),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
