/*
 * test_hf_public.c - fsdp/hf.h as a program uses it, ranks as threads: a folder's model is loaded
 * sharded, saved, and loaded again to the same bits by any number of ranks.
 */
#include "tensor_check.h"

#include <unistd.h>

#include "format/file.h"

typedef struct job {
    const char *from, *to; /* to NULL: nothing is saved */
    double loss;           /* by rank 0 */
} job;

static fsdp_module *load_sharded(const char *folder, fsdp_model_config **c)
{
    *c = fsdp_model_config_load(folder);
    fsdp_device_push(FSDP_META);
    fsdp_module *m = *c ? fsdp_model_create(*c) : NULL;
    fsdp_device_pop();
    for (int64_t i = 0; m && i < fsdp_model_block_count(m); i++)
        fsdp_fully_shard(fsdp_model_block(m, i), NULL);
    fsdp_fully_shard(m, NULL);
    if (!fsdp_error()) fsdp_to_empty(m, FSDP_CPU);
    fsdp_model_load_weights(m, folder);
    return m;
}

static fsdp_status work(void *arg)
{
    job *j = arg;
    fsdp_model_config *c;
    fsdp_module *m = load_sharded(j->from, &c);
    static int64_t tokens[] = {1, 5, 9, 2, 7, 3}, targets[] = {5, 9, 2, 7, 3, 4};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    fsdp_tensor *x = fsdp_tensor_from_memory(tokens, FSDP_I64, 2, SIZES(1, 6), NULL, NULL, NULL);
    fsdp_tensor *y = fsdp_tensor_from_memory(targets, FSDP_I64, 2, SIZES(1, 6), NULL, NULL, NULL);
    fsdp_tensor *loss = fsdp_error() ? NULL : fsdp_model_forward(m, x, NULL, y);
    if (loss && fsdp_rank() == 0) j->loss = fsdp_item(loss);
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    if (!fsdp_error() && j->to) fsdp_model_save(m, c, j->to, FSDP_DTYPE_NONE, NULL);
    fsdp_module_free(m);
    fsdp_model_config_free(c);
    return fsdp_error();
}

static void test_there_and_back(void **state)
{
    (void)state;
    static const char *const models[] = {"llama-tied", "gpt2", "qwen3"};
    char folder[] = "/tmp/fsdp-test-hf-XXXXXX", saved[64], from[512];
    assert_non_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        snprintf(from, sizeof from, "%s/models/%s", FSDP_TEST_DATA, models[i]);
        snprintf(saved, sizeof saved, "%s/%s", folder, models[i]);
        job first = {.from = from, .to = saved}, again = {.from = saved};
        check_ok(fsdp_run_threads(3, work, &first));
        check_ok(fsdp_run_threads(2, work, &again));
        assert_true(first.loss > 0 && first.loss == again.loss);
    }
    check_ok(fsdp__dir_remove(folder));
}

static void test_refusals(void **state)
{
    (void)state;
    assert_null(fsdp_model_config_load(NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the folder is NULL");
    assert_null(fsdp_model_config_load("/nowhere"));
    check_error(FSDP_NOT_FOUND, "/nowhere/config.json");
    assert_int_equal(fsdp_model_load_weights(NULL, "x"), FSDP_INVALID_ARGUMENT);
    check_error(FSDP_INVALID_ARGUMENT, "the model is NULL");
    assert_int_equal(fsdp_model_save(NULL, NULL, "x", FSDP_F32, NULL), FSDP_INVALID_ARGUMENT);
    check_error(FSDP_INVALID_ARGUMENT, "the model is NULL");
    fsdp_model_config_free(NULL);
    job j = {.from = "/nowhere"};
    assert_int_equal(fsdp_run_threads(2, work, &j), FSDP_NOT_FOUND);
    check_error(FSDP_NOT_FOUND, "/nowhere/config.json");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
