/*
 * test_data_prepare.c - from folders with links to token files.
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

#include "data/prepare.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "data/walk.h"
#include "format/file.h"
#include "format/json.h"

static char dir[] = "/tmp/fsdp_test_prepare_XXXXXX";

static const char *at(const char *name)
{
    static char paths[256][160]; /* long enough that none is used again */
    static int next;
    char *p = paths[next++ % 256];
    snprintf(p, sizeof paths[0], "%s/%s", dir, name);
    return p;
}

static void put(const char *name, const char *text, size_t n)
{
    assert_int_equal(fsdp__file_write(at(name), text, n), FSDP_OK);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

static const char A[] = "the cat and the dog and the bird\n", B[] = "a second text, the second\n",
                  V[] = "held out: the owl\n";

/* in/a, in/b, in/sub/v, names for them, a loop of folders, and what is no text. */
static int setup(void **state)
{
    (void)state;
    if (!mkdtemp(dir)) return -1;
    assert_int_equal(fsdp__dir_make(at("in/sub")), FSDP_OK);
    put_text("in/a", A);
    put_text("in/zb", B);
    put_text("in/sub/v-1.0", V);
    put_text("in/.hidden", "not me");
    put("in/binary", "a\0b", 3);
    put("in/empty", "", 0);
    assert_int_equal(symlink("zb", at("in/b")), 0); /* sorts before its target */
    assert_int_equal(symlink("sub/v-1.0", at("in/family")), 0);
    assert_int_equal(symlink("..", at("in/sub/loop")), 0);
    assert_int_equal(symlink("nowhere", at("in/dangling")), 0);
    assert_int_equal(link(at("in/a"), at("in/hard")), 0);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return fsdp__dir_remove(dir) == FSDP_OK ? 0 : -1;
}

static void test_walk(void **state)
{
    static const char *const expected[] = {"in/a", "in/binary", "in/empty", "in/sub/v-1.0",
                                           "in/zb"};
    fsdp__walk w = {0};
    (void)state;
    assert_int_equal(fsdp__walk_paths((const char *const[]){at("in"), at("in/a")}, 2, NULL, &w),
                     FSDP_OK);
    assert_int_equal(w.count, 5);
    for (int i = 0; i < 5; i++)
        assert_string_equal(w.files[i].path, at(expected[i]));
    assert_int_equal(w.files[0].alias_count, 2); /* the hard link, and the second path */
    assert_int_equal(w.files[4].alias_count, 1);
    assert_string_equal(w.files[4].aliases[0], at("in/b"));
    fsdp__walk_free(&w);

    /* Only links lead to the file: it is taken by one of them. */
    assert_int_equal(
        fsdp__walk_paths((const char *const[]){at("in/sub/loop")}, 1, at("in/sub"), &w), FSDP_OK);
    assert_int_equal(w.count, 5);
    assert_string_equal(w.files[3].path, at("in/sub/loop/family"));
    fsdp__walk_free(&w);

    assert_int_equal(fsdp__walk_paths((const char *const[]){at("none")}, 1, NULL, &w),
                     FSDP_NOT_FOUND);
    assert_non_null(strstr(fsdp_error_text(), "none"));
    fsdp_error_clear();
    fsdp__walk_free(&w);
}

/* The text of the documents of a token file, each with its end token shown. */
static void check_documents(fsdp_tokenizer *t, const char *name, const char *const *texts,
                            int64_t n)
{
    fsdp__tokens *f = fsdp__tokens_open(at(name));
    assert_non_null(f);
    assert_int_equal(f->document_count, n);
    assert_int_equal(f->vocab_size, fsdp_tokenizer_vocab_size(t));
    assert_int_equal(fsdp__tokens_verify(f), FSDP_OK);
    for (int64_t d = 0; d < n; d++) {
        int32_t ids[200];
        int64_t start = (int64_t)f->documents[d], count;
        int64_t end = d + 1 < n ? (int64_t)f->documents[d + 1] : f->count;
        for (count = 0; start + count < end; count++)
            ids[count] = (int32_t)fsdp__tokens_get(f, start + count);
        assert_int_equal(ids[count - 1], fsdp_tokenizer_token_id(t, "<|endoftext|>"));
        char *text = fsdp_tokenizer_decode(t, ids, count, 1, NULL);
        assert_string_equal(text, texts[d]);
        free(text);
    }
    fsdp__tokens_close(f);
}

static void test_prepare(void **state)
{
    fsdp__prepare_report r;
    const char *const paths[] = {at("in")}, *const validation[] = {"fam*"};
    fsdp__prepare_options o = {.paths = paths,
                               .path_count = 1,
                               .validation = validation,
                               .validation_count = 1,
                               .train_tokenizer = 265,
                               .out = at("in/out")};
    (void)state;
    /* Twice: the results of the first run are not taken for text. */
    for (int run = 0; run < 2; run++) {
        assert_int_equal(fsdp__prepare(&o, &r), FSDP_OK);
        assert_int_equal(r.train.files, 2);
        assert_int_equal(r.train.bytes, strlen(A) + strlen(B));
        assert_int_equal(r.validation.files, 1);
        assert_int_equal(r.validation.bytes, strlen(V));
        assert_int_equal(r.no_text, 2);
        assert_int_equal(r.repeated, 3);
        assert_int_equal(r.vocab_size, 265);
        fsdp_tokenizer *t = fsdp_tokenizer_load(at("in/out"));
        assert_non_null(t);
        check_documents(t, "in/out/train.tokens", (const char *const[]){A, B}, 2);
        check_documents(t, "in/out/validation.tokens", (const char *const[]){V}, 1);
        fsdp_tokenizer_free(t);
        json_t *list = fsdp__json_load(at("in/out/prepare.json"));
        assert_int_equal(json_array_size(json_object_get(list, "files")), 5);
        json_decref(list);
    }
    /* With that tokenizer, into another folder, without a validation set. */
    fsdp__prepare_options again = {
        .paths = paths, .path_count = 1, .tokenizer = at("in/out"), .out = at("other")};
    assert_int_equal(fsdp__prepare(&again, &r), FSDP_OK);
    assert_int_equal(r.vocab_size, 265);
    assert_true(fsdp__file_exists(at("other/tokenizer.json")));
    assert_true(fsdp__file_exists(at("other/tokenizer_config.json")));
    assert_true(fsdp__file_exists(at("other/train.tokens")));
    assert_false(fsdp__file_exists(at("other/validation.tokens")));
}

static void check_refused(const fsdp__prepare_options *o, const char *word)
{
    assert_true(fsdp__prepare(o, NULL) != FSDP_OK);
    if (!strstr(fsdp_error_text(), word)) fail_msg("no \"%s\" in: %s", word, fsdp_error_text());
    fsdp_error_clear();
    assert_false(fsdp__file_exists(at("bad/train.tokens")));
    assert_false(fsdp__file_exists(at("bad/validation.tokens")));
}

static void test_refused(void **state)
{
    const char *const paths[] = {at("in/a")}, *const odd[] = {"odd*"}, *const all[] = {"*"};
    const char *const empty[] = {at("in/empty")};
    fsdp__prepare_options o = {.paths = paths, .path_count = 1, .out = at("bad")};
    (void)state;
    check_refused(&o, "either a tokenizer");
    o.train_tokenizer = 260;
    o.tokenizer = at("in");
    check_refused(&o, "not both");
    o.train_tokenizer = 0;
    check_refused(&o, "tokenizer.json");
    o.tokenizer = NULL;
    o.train_tokenizer = 260;
    o.validation = odd;
    o.validation_count = 1;
    check_refused(&o, "odd*");
    o.validation = all; /* nothing is left to train on */
    check_refused(&o, "none of the 1 files is a text to train on");
    o.train_tokenizer = 257;
    check_refused(&o, "none of the 1 files is a text to train on");
    o.validation_count = 0;
    o.paths = empty;
    check_refused(&o, "none of the 1 files is a text to train on");
    o.paths = paths;
    o.tokenizer = FSDP_TEST_DATA "/tokenizers/gpt2";
    o.train_tokenizer = 0;
    check_refused(&o, "<|endoftext|>");
    o.end_token = "<|nothing|>";
    check_refused(&o, "<|nothing|>");
    o.path_count = 0;
    check_refused(&o, "no paths");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_prepare),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
