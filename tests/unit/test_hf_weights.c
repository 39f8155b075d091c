/*
 * test_hf_weights.c - weight files of a folder: one file, shards with an index, indexes that lie,
 * and a save over an earlier one.
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

#include "format/file.h"
#include "format/json.h"
#include "fsdp/context.h"
#include "hf/weights.h"

static char folder[64], warnings[4096];

static void listen(void *arg, int level, const char *line)
{
    (void)arg;
    size_t n = strlen(warnings);
    if (level <= 1) snprintf(warnings + n, sizeof warnings - n, "%s\n", line);
}

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    warnings[0] = 0;
    fsdp_log_set(listen, NULL, 1);
    strcpy(folder, "/tmp/fsdp-test-weights-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int end(void **state)
{
    (void)state;
    fsdp_error_clear();
    return fsdp__dir_remove(folder) == FSDP_OK ? 0 : -1;
}

static const char *in(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* The names in the folder, joined by blanks. */
static void expect_files(const char *expected)
{
    char **names, all[1024] = "";
    int64_t n;
    assert_int_equal(fsdp__dir_list(folder, &names, &n), FSDP_OK);
    for (int64_t i = 0; i < n; i++) {
        strcat(all, i ? " " : "");
        strcat(all, names[i]);
    }
    fsdp__dir_list_free(names, n);
    assert_string_equal(all, expected);
}

/* Tensors a, b, ... of these many bytes (U8), each filled with its letter, declared in order. */
static void save(const int64_t *sizes, int n, int64_t limit)
{
    fsdp__hf_writer *w = fsdp__hf_writer_create(folder, limit);
    assert_non_null(w);
    for (int i = 0; i < n; i++) {
        char name[2] = {(char)('a' + i), 0};
        assert_int_equal(fsdp__hf_writer_add(w, name, FSDP_U8, 1, &sizes[i]), FSDP_OK);
    }
    assert_int_equal(fsdp__hf_writer_begin(w), FSDP_OK);
    for (int i = n - 1; i >= 0; i--) {
        char name[2] = {(char)('a' + i), 0}, data[256];
        memset(data, 'a' + i, sizeof data);
        assert_int_equal(fsdp__hf_writer_write(w, name, 0, sizes[i], data), FSDP_OK);
    }
    assert_int_equal(fsdp__hf_writer_finish(w), FSDP_OK);
    fsdp__hf_writer_free(w);
}

static void expect_tensors(const int64_t *sizes, int n)
{
    fsdp__hf_weights *w = fsdp__hf_weights_open(folder);
    if (!w) fail_msg("%s", fsdp_error_text());
    assert_int_equal(fsdp__hf_weights_count(w), n);
    int64_t before = fsdp__hf_weights_bytes_read(w), sum = 0;
    for (int i = 0; i < n; i++) {
        char name[2] = {(char)('a' + i), 0}, data[256];
        fsdp__st *st = NULL;
        const fsdp__st_tensor *t = fsdp__hf_weights_find(w, name, &st);
        assert_non_null(t);
        assert_int_equal(t->bytes, sizes[i]);
        assert_int_equal(fsdp__st_read(st, t, 0, t->bytes, data), FSDP_OK);
        for (int64_t k = 0; k < t->bytes; k++)
            assert_int_equal(data[k], 'a' + i);
        sum += t->bytes;
    }
    assert_int_equal(fsdp__hf_weights_bytes_read(w), before + sum);
    assert_null(fsdp__hf_weights_find(w, "none", NULL));
    for (int64_t i = 0; i < n; i++)
        assert_non_null(fsdp__hf_weights_at(w, i, NULL));
    fsdp__hf_weights_close(w);
    assert_string_equal(warnings, "");
}

static void refuse(fsdp_status code, const char *words)
{
    assert_null(fsdp__hf_weights_open(folder));
    if (fsdp_error() != code || !strstr(fsdp_error_text(), words))
        fail_msg("found %d %s, expected %d '%s'", (int)fsdp_error(), fsdp_error_text(), (int)code,
                 words);
    fsdp_error_clear();
}

static void test_single(void **state)
{
    (void)state;
    const int64_t sizes[] = {10, 0, 7};
    save(sizes, 3, 0);
    expect_files("model.safetensors");
    expect_tensors(sizes, 3);
    fsdp__st *st = fsdp__st_open(in("model.safetensors"));
    assert_string_equal(fsdp__st_meta(st, "format"), "pt");
    fsdp__st_close(st);
    /* no tensors at all */
    save(NULL, 0, 0);
    expect_tensors(NULL, 0);
}

/* The cut of huggingface_hub: b is above the limit and closes before the file that a and c share.
 */
static void test_shards(void **state)
{
    (void)state;
    const int64_t sizes[] = {40, 101, 60, 1, 100};
    static const char *const where[] = {"2", "1", "2", "3", "4"};
    save(sizes, 5, 100);
    expect_files("model-00001-of-00004.safetensors model-00002-of-00004.safetensors "
                 "model-00003-of-00004.safetensors model-00004-of-00004.safetensors "
                 "model.safetensors.index.json");
    expect_tensors(sizes, 5);
    json_t *json = fsdp__json_load(in("model.safetensors.index.json"));
    const json_t *meta = json_object_get(json, "metadata"),
                 *map = json_object_get(json, "weight_map");
    assert_int_equal(json_integer_value(json_object_get(meta, "total_size")), 302);
    for (int i = 0; i < 5; i++) {
        char name[2] = {(char)('a' + i), 0}, file[64];
        snprintf(file, sizeof file, "model-0000%s-of-00004.safetensors", where[i]);
        assert_string_equal(json_string_value(json_object_get(map, name)), file);
    }
    json_decref(json);
}

/* A save over an earlier one leaves no file of it, and nothing else is touched. */
static void test_save_again(void **state)
{
    (void)state;
    const int64_t sizes[] = {60, 60, 60};
    assert_int_equal(fsdp__file_write(in("config.json"), "{}", 2), FSDP_OK);
    assert_int_equal(fsdp__file_write(in("model-0001-of-0002.safetensors"), "", 0), FSDP_OK);
    assert_int_equal(fsdp__file_write(in("my-model.safetensors"), "", 0), FSDP_OK);
    save(sizes, 3, 100);
    save(sizes, 2, 100);
    expect_tensors(sizes, 2);
    save(sizes, 3, 0);
    expect_tensors(sizes, 3);
    expect_files(
        "config.json model-0001-of-0002.safetensors model.safetensors my-model.safetensors");
}

/* What is not complete does not touch the earlier save. */
static void test_incomplete(void **state)
{
    (void)state;
    const int64_t sizes[] = {60, 60};
    save(sizes, 2, 100);
    fsdp__hf_writer *w = fsdp__hf_writer_create(folder, 0);
    assert_int_equal(fsdp__hf_writer_add(w, "x", FSDP_F32, 1, (int64_t[]){2}), FSDP_OK);
    assert_int_equal(fsdp__hf_writer_add(w, "x", FSDP_F32, 0, NULL), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__hf_writer_add(w, "y", FSDP_F32, 1, (int64_t[]){-2}), FSDP_INVALID_SHAPE);
    fsdp_error_clear();
    assert_int_equal(fsdp__hf_writer_finish(w), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp__hf_writer_write(w, "x", 0, 4, "abc"), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp__hf_writer_begin(w), FSDP_OK);
    assert_int_equal(fsdp__hf_writer_add(w, "y", FSDP_F32, 0, NULL), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp__hf_writer_write(w, "x", 0, 4, "abc"), FSDP_OK);
    assert_int_equal(fsdp__hf_writer_finish(w), FSDP_INVALID_STATE);
    assert_non_null(strstr(fsdp_error_text(), "found 4 bytes written, expected 8"));
    fsdp_error_clear();
    fsdp__hf_writer_free(w);
    expect_tensors(sizes, 2);
    expect_files("model-00001-of-00002.safetensors model-00002-of-00002.safetensors "
                 "model.safetensors.index.json");
}

static void put_index(const char *text)
{
    assert_int_equal(fsdp__file_write(in("model.safetensors.index.json"), text, strlen(text)),
                     FSDP_OK);
}

static void test_bad_folders(void **state)
{
    (void)state;
    const int64_t sizes[] = {5, 5};
    refuse(FSDP_NOT_FOUND, "found neither model.safetensors.index.json nor model.safetensors");
    assert_int_equal(fsdp__file_write(in("pytorch_model.bin"), "", 0), FSDP_OK);
    refuse(FSDP_NOT_FOUND, "convert it");
    save(sizes, 2, 0);
    put_index("{");
    refuse(FSDP_INVALID_DATA, "index.json:1:");
    put_index("{\"metadata\": {}}");
    refuse(FSDP_INVALID_DATA, "weight_map: found nothing");
    static const char *const names[] = {"\"../model.safetensors\"",
                                        "\"/model.safetensors\"",
                                        "\"\"",
                                        "7",
                                        "\"model.bin\"",
                                        "\"a\\\\b.safetensors\"",
                                        "\".safetensors\"",
                                        "\"c:model.safetensors\""};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char text[128];
        snprintf(text, sizeof text, "{\"weight_map\": {\"a\": %s}}", names[i]);
        put_index(text);
        refuse(FSDP_INVALID_DATA, "weight_map.a: found");
    }
    put_index("{\"weight_map\": {\"a\": \"other.safetensors\"}}");
    refuse(FSDP_NOT_FOUND, "other.safetensors");
    put_index("{\"weight_map\": {\"a\": \"model.safetensors\", \"z\": \"model.safetensors\"}}");
    refuse(FSDP_INVALID_DATA, "found 1 tensors that are not in the file named for them: 'z'");
    assert_non_null(
        strstr(warnings, "holds 1 tensors that the index does not give to it ('b' first)"));
    warnings[0] = 0;
    put_index("{\"weight_map\": {\"a\": \"model.safetensors\"}}");
    fsdp__hf_weights *w = fsdp__hf_weights_open(folder);
    assert_non_null(w);
    assert_int_equal(fsdp__hf_weights_count(w), 1);
    assert_null(fsdp__hf_weights_find(w, "b", NULL));
    fsdp__hf_weights_close(w);
    assert_int_equal(fsdp__dir_remove(folder), FSDP_OK);
    refuse(FSDP_NOT_FOUND, "no folder of that name");
}

int main(void)
{
#define TEST(f) cmocka_unit_test_setup_teardown(f, start, end)
    const struct CMUnitTest tests[] = {
        TEST(test_single),     TEST(test_shards),      TEST(test_save_again),
        TEST(test_incomplete), TEST(test_bad_folders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
