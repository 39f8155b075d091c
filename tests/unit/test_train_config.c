/*
 * test_train_config.c - options of a run: tables, words, what follows from what, and texts.
 */
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "train/config.h"

static fsdp__train_config c;

static int open_config(void **state)
{
    (void)state;
    return fsdp__train_config_init(&c) == FSDP_OK ? 0 : -1;
}

static int close_config(void **state)
{
    (void)state;
    fsdp__train_config_free(&c);
    fsdp_error_clear();
    return 0;
}

static fsdp_status words(const char *a, const char *b)
{
    char x[64], y[64];
    strcpy(x, a);
    strcpy(y, b ? b : "");
    char *const list[] = {x, y};
    return fsdp__train_config_words(&c, b ? 2 : 1, list);
}

static void refused(fsdp_status s, const char *text)
{
    assert_int_not_equal(s, FSDP_OK);
    if (!strstr(fsdp_error_text(), text)) fail_msg("'%s' lacks '%s'", fsdp_error_text(), text);
    fsdp_error_clear();
}

/* Enough for a run that can be resolved. */
static void basic(void)
{
    assert_int_equal(words("--data.dir", "d"), FSDP_OK);
    assert_int_equal(words("--model.flavor", "tiny"), FSDP_OK);
}

static void defaults_are_torchtitans(void **state)
{
    (void)state;
    assert_true(c.optimizer.lr == 8e-4 && c.optimizer.beta2 == 0.95);
    assert_int_equal(c.training.seq_len, 2048);
    assert_int_equal(c.training.steps, 10000);
    assert_int_equal(c.lr_scheduler.warmup_steps, 200);
    assert_int_equal(c.parallelism.data_parallel_shard_degree, -1);
    assert_int_equal(c.training.dtype, FSDP__TRAIN_F32); /* weights and state keep their digits */
    assert_int_equal(c.training.mixed_precision_param, FSDP__TRAIN_BF16);
    assert_int_equal(c.training.mixed_precision_reduce, FSDP__TRAIN_F32);
    assert_int_equal(c.checkpoint.keep_latest_k, 10);
    assert_int_equal(c.metrics.log_freq, 10);
}

static void group_is(const char *maps, const char *text)
{
    fsdp_status s = fsdp__options_set(&c.options, "optimizer.param_groups", maps, "--x");
    if (s == FSDP_OK) s = fsdp__train_config_resolve(&c, 1);
    if (!text && s != FSDP_OK) fail_msg("%s: %s", maps, fsdp_error_text());
    if (text) refused(s, text);
}

static void param_groups_are_checked(void **state)
{
    (void)state;
    basic();
    group_is("[{pattern: \"*norm*\", weight_decay: 0}, {pattern: \"*.bias\", lr: 1e-3}]", NULL);
    group_is("{weight_decay: 0}", "optimizer.param_groups[0]: no pattern");
    group_is(
        "{patern: x}",
        "optimizer.param_groups[0]: 'patern' is nothing that a group sets; expected pattern, lr");
    group_is("{pattern: x, wd: 1}", "'wd' is nothing that a group sets; expected pattern, lr");
    group_is("{pattern: x}, {pattern: y, beta1: 1.5}",
             "optimizer.param_groups[1]: group.beta1 is '1.5'; expected a number from 0.0 to");
    group_is("{pattern: x, lr: 1, lr_factor: 1}", "both lr and lr_factor");
    group_is("{pattern: [x]}", "is a list; expected a single value");
    group_is("{pattern: x, lr: fast}", "group.lr is 'fast'");
    assert_int_equal(words("--optimizer.lr", "0"), FSDP_OK);
    group_is("{pattern: x, lr: 1}", "expected optimizer.lr above 0");
}

static void averages_need_a_decay(void **state)
{
    (void)state;
    basic();
    c.validation.ema = true;
    refused(fsdp__train_config_resolve(&c, 1), "validation.ema is set and training.ema_decay is 0");
    c.training.ema_decay = 0.9;
    assert_int_equal(fsdp__train_config_resolve(&c, 1), FSDP_OK);
    c.checkpoint.export_ema = true;
    refused(fsdp__train_config_resolve(&c, 1), "without checkpoint.last_save_in_hf");
    c.checkpoint.last_save_in_hf = c.lora.enable = c.lora.merge = true;
    refused(fsdp__train_config_resolve(&c, 1), "checkpoint.export_ema with lora.enable");
}

static void words_set_options(void **state)
{
    (void)state;
    assert_int_equal(words("--training.steps", "7"), FSDP_OK);
    assert_int_equal(c.training.steps, 7);
    assert_int_equal(words("--training.steps=8", NULL), FSDP_OK);
    assert_int_equal(c.training.steps, 8);
    assert_int_equal(words("--parallelism.data_parallel_shard_degree", "-1"), FSDP_OK);
    assert_int_equal(words("--checkpoint.enable", NULL), FSDP_OK);
    assert_true(c.checkpoint.enable);
    assert_int_equal(words("--checkpoint.enable", "--training.steps=9"), FSDP_OK);
    assert_int_equal(c.training.steps, 9);
    assert_int_equal(words("--memory.limit", "1.5MiB"), FSDP_OK);
    assert_int_equal(c.memory.limit, 3 << 19);
    assert_int_equal(words("--data.dir", "null"), FSDP_OK);
    assert_null(c.data.dir);
    assert_int_equal(words("--job.description=a=b", NULL), FSDP_OK);
    assert_string_equal(c.job.description, "a=b");
}

static void wrong_words_are_named(void **state)
{
    (void)state;
    refused(words("--training.stepz", "7"), "did you mean training.steps?");
    refused(words("--training.stepz", NULL), "did you mean training.steps?");
    refused(words("--training.steps", NULL), "--training.steps wants a value");
    refused(words("steps", NULL), "unexpected 'steps'");
    refused(words("--training.steps", "1.5"), "a whole number");
    refused(words("--parallelism.tensor_parallel_degree", "2"), "known and not available");
    refused(words("--compile.enable", NULL), "known and not available");
    refused(words("--training.dtype", "float8"), "float32 or bfloat16");
}

static void degrees_multiply_to_the_ranks(void **state)
{
    (void)state;
    basic();
    assert_int_equal(fsdp__train_config_resolve(&c, 6), FSDP_OK);
    assert_int_equal(c.parallelism.data_parallel_shard_degree, 6);
    assert_int_equal(c.training.global_batch_size, 48);
    refused(fsdp__train_config_resolve(&c, 4), "1 x 4, 2 x 2, 4 x 1");
    c.parallelism.data_parallel_replicate_degree = 2;
    c.parallelism.data_parallel_shard_degree = 3;
    assert_int_equal(fsdp__train_config_resolve(&c, 6), FSDP_OK);
    c.parallelism.data_parallel_shard_degree = 0;
    refused(fsdp__train_config_resolve(&c, 2), "1 x 2, 2 x 1");
}

static void what_follows_is_filled_in(void **state)
{
    (void)state;
    basic();
    c.training.steps = 77;
    c.validation.enable = true;
    assert_int_equal(fsdp__train_config_resolve(&c, 1), FSDP_OK);
    assert_int_equal(c.lr_scheduler.total_steps, 77);
    assert_int_equal(c.validation.seq_len, 2048);
    assert_int_equal(c.validation.local_batch_size, 8);
    /* Once more changes nothing. */
    fsdp__str a = {0}, b = {0};
    fsdp__train_config_text(&c, &a);
    assert_int_equal(fsdp__train_config_resolve(&c, 1), FSDP_OK);
    fsdp__train_config_text(&c, &b);
    assert_string_equal(fsdp__str_get(&a), fsdp__str_get(&b));
    assert_true(fsdp__train_config_hash(a.p) == fsdp__train_config_hash(b.p));
    fsdp__str_free(&a);
    fsdp__str_free(&b);
}

static void differences_name_the_options(void **state)
{
    (void)state;
    fsdp__str a = {0}, b = {0}, d = {0};
    fsdp__train_config_text(&c, &a);
    assert_int_equal(words("--debug.seed", "5"), FSDP_OK);
    assert_int_equal(words("--job.dump_folder", "elsewhere"), FSDP_OK);
    fsdp__train_config_text(&c, &b);
    fsdp__train_config_differences(a.p, b.p, &d);
    assert_string_equal(fsdp__str_get(&d), "  job.dump_folder: ./outputs and elsewhere\n"
                                           "  debug.seed: 0 and 5\n");
    assert_true(fsdp__train_config_hash(a.p) != fsdp__train_config_hash(b.p));
    fsdp__str_free(&d);
    fsdp__train_config_differences(a.p, a.p, &d);
    assert_string_equal(fsdp__str_get(&d), "");
    fsdp__train_config_differences(a.p, "x", &d);
    assert_true(strstr(fsdp__str_get(&d), "different options") != NULL);
    fsdp__str_free(&a);
    fsdp__str_free(&b);
    fsdp__str_free(&d);
}

static void flavors_have_their_sizes(void **state)
{
    (void)state;
    fsdp_model_config m;
    basic();
    c.training.seq_len = 64;
    assert_int_equal(fsdp__train_config_resolve(&c, 1), FSDP_OK);
    assert_int_equal(fsdp__train_model_config(&c, 1000, &m), FSDP_OK);
    assert_int_equal(m.hidden_size, 128);
    assert_int_equal(m.num_kv_heads, 2);
    assert_int_equal(m.head_dim, 32);
    assert_int_equal(m.vocab_size, 1000);
    assert_int_equal(m.max_position_embeddings, 64);
    assert_false(m.tie_word_embeddings);
    c.model.ffn_dim = 100;
    c.model.vocab_size = 1024;
    c.model.tied = 1;
    assert_int_equal(fsdp__train_model_config(&c, 1000, &m), FSDP_OK);
    assert_int_equal(m.intermediate_size, 100);
    assert_int_equal(m.vocab_size, 1024);
    assert_true(m.tie_word_embeddings);
    refused(fsdp__train_model_config(&c, 1025, &m), "ids without a row");
    c.model.max_seq_len = 63;
    refused(fsdp__train_model_config(&c, 1000, &m), "sequences of at most 63 tokens");
}

static void a_model_must_be_chosen(void **state)
{
    (void)state;
    assert_int_equal(words("--data.dir", "d"), FSDP_OK);
    refused(fsdp__train_config_resolve(&c, 1), "no model is chosen");
    assert_int_equal(words("--model.hf_assets_path", "h"), FSDP_OK);
    assert_int_equal(fsdp__train_config_resolve(&c, 1), FSDP_OK);
    c.model.dim = 8;
    refused(fsdp__train_config_resolve(&c, 1), "the sizes are those of its config.json");
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, open_config, close_config)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(defaults_are_torchtitans),  TEST(param_groups_are_checked),
        TEST(averages_need_a_decay),     TEST(words_set_options),
        TEST(wrong_words_are_named),     TEST(degrees_multiply_to_the_ranks),
        TEST(what_follows_is_filled_in), TEST(differences_name_the_options),
        TEST(flavors_have_their_sizes),  TEST(a_model_must_be_chosen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
