/*
 * test_golden_greedy.c - greedy decoding, with the key-value cache, gives the ids that transformers
 * gives, for every model and prompt.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "base/error.h"
#include "format/json.h"
#include "fsdp/hf.h"
#include "generate/generate.h"

enum { MOST = 64 };

typedef struct heard {
    int64_t ids[MOST];
    int n;
} heard;

static int hear(void *arg, int64_t token)
{
    heard *h = arg;
    assert_true(h->n < MOST);
    h->ids[h->n++] = token;
    return 0;
}

static void continue_prompt(const char *name, fsdp_module *m, const fsdp_model_config *c,
                            const json_t *row)
{
    const json_t *prompt = json_object_get(row, "prompt_ids");
    const json_t *expected = json_object_get(row, "continuation_ids");
    int32_t ids[MOST];
    size_t n = json_array_size(prompt), count = json_array_size(expected);
    assert_true(n > 0 && n <= MOST && count == 32);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(prompt, i));
    fsdp__generate_options o = fsdp__generate_defaults();
    o.tokens = (int64_t)count;
    heard h = {.n = 0};
    if (fsdp__generate(m, c, ids, (int64_t)n, &o, hear, &h) != FSDP_OK)
        fail_msg("%s: %s", name, fsdp_error_text());
    assert_int_equal(h.n, (int)count);
    for (size_t i = 0; i < count; i++) {
        int64_t id = json_integer_value(json_array_get(expected, i));
        if (h.ids[i] != id)
            fail_msg("%s: token %zu is %lld; expected %lld", name, i, (long long)h.ids[i],
                     (long long)id);
    }
}

static void one_model(const char *name)
{
    char folder[512], path[600];
    snprintf(folder, sizeof folder, "%s/models/%s", FSDP_TEST_DATA, name);
    snprintf(path, sizeof path, "%s/greedy.json", folder);
    json_t *rows = fsdp__json_load(path);
    assert_true(json_array_size(rows) > 0);
    fsdp_model_config *c = fsdp_model_config_load(folder);
    assert_non_null(c);
    c->num_eos = 0; /* what was recorded does not stop there */
    fsdp_module *m = fsdp_model_create(c);
    assert_int_equal(fsdp_model_load_weights(m, folder), FSDP_OK);
    fsdp_module_train(m, 0);
    for (size_t i = 0; i < json_array_size(rows); i++)
        continue_prompt(name, m, c, json_array_get(rows, i));
    fsdp_module_free(m);
    fsdp_model_config_free(c);
    json_decref(rows);
}

static void transformers_ids(void **state)
{
    static const char *const models[] = {
        "llama",   "llama-tied",     "llama3-rope", "llama-headdim", "llama-defaults",
        "mistral", "mistral-window", "qwen2",       "qwen3",         "gpt2"};
    (void)state;
    assert_int_equal(fsdp_set_threads(1), FSDP_OK); /* too small a model for more */
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        one_model(models[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(transformers_ids)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
