/*
 * test_train_effect.c - every option of the table is reported when its switch is off and somebody
 * set it, and only then.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "train/effect.h"

static fsdp__train_config c;

static int open_config(void **state)
{
    (void)state;
    return fsdp__train_config_init(&c);
}

static int close_config(void **state)
{
    (void)state;
    fsdp__train_config_free(&c);
    fsdp_error_clear();
    return 0;
}

static void set(const char *words)
{
    char copy[1024], *list[64], *save = NULL;
    int n = 0;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *w = strtok_r(copy, " ", &save); w; w = strtok_r(NULL, " ", &save))
        list[n++] = w;
    if (fsdp__train_config_words(&c, n, list) != FSDP_OK) fail_msg("%s", fsdp_error_text());
}

/* What is said about these words on so many ranks; the caller frees it. */
static char *told(int ranks, const char *words)
{
    fsdp__str s = {0};
    fsdp__train_config_free(&c);
    assert_int_equal(fsdp__train_config_init(&c), FSDP_OK);
    set("--data.dir d");
    set(words);
    if (!strstr(words, "hf_assets_path")) set("--model.flavor tiny");
    if (fsdp__train_config_resolve(&c, ranks) != FSDP_OK ||
        fsdp__train_no_effect(&c, &s) != FSDP_OK)
        fail_msg("%s: %s", words, fsdp_error_text());
    char *text = strdup(fsdp__str_get(&s));
    fsdp__str_free(&s);
    return text;
}

static void expect(int ranks, const char *words, const char *text)
{
    char *found = told(ranks, words);
    if (strcmp(found, text)) fail_msg("%s: found '%s', expected '%s'", words, found, text);
    free(found);
}

static void nothing_is_said_without_reason(void **state)
{
    (void)state;
    expect(1, "--training.steps 5", "");
    expect(4, "--prefetch.limit 2 --memory.shared_gather false --optimizer.beta1 0.8", "");
    expect(4, "--checkpoint.enable --checkpoint.interval 3 --validation.enable --validation.freq 3",
           "");
    expect(4, "--lora.enable --lora.rank 4", "");
    expect(2, "--training.global_batch_size 32 --training.sync_each_microbatch", "");
    expect(2, "--lr_scheduler.min_lr_factor 0.1 --lr_scheduler.decay_type cosine", "");
    expect(1, "--parallelism.fsdp_units linear", ""); /* it casts */
    /* Rounding is seen where nothing travels, too. */
    expect(1, "--parallelism.gather_dtype int8", "");
    expect(4, "--parallelism.data_parallel_replicate_degree 4 --parallelism.gather_dtype int8", "");
    expect(1,
           "--training.mixed_precision_param float32 --parallelism.gather_dtype int8 "
           "--parallelism.fsdp_units linear",
           "");
}

static void one_line_each(void **state)
{
    (void)state;
    expect(1, "--prefetch.limit 2",
           "no effect: prefetch.limit: nothing is gathered: "
           "parallelism.data_parallel_shard_degree is 1\n");
    expect(4, "--lora.rank 8 --lora.dropout 0.1",
           "no effect: lora.rank: lora.enable is off\n"
           "no effect: lora.dropout: lora.enable is off\n");
    expect(4, "--optimizer.name SGD --optimizer.beta1 0.9 --optimizer.beta1 0.8",
           "no effect: optimizer.beta1: optimizer.name is SGD\n"); /* once */
    expect(4, "--optimizer.momentum 0.9",
           "no effect: optimizer.momentum: optimizer.name is AdamW\n");
    expect(
        4, "--lr_scheduler.decay_ratio 0 --lr_scheduler.min_lr_factor 0.1",
        "no effect: lr_scheduler.min_lr_factor: the schedule does not decay: decay_ratio is 0, or "
        "the warm-up takes all of it\n");
    expect(4, "--prefetch.limit 2 --parallelism.fsdp_units model",
           "no effect: prefetch.limit: parallelism.fsdp_units is model: there is no next unit\n");
    expect(4, "--parallelism.data_parallel_replicate_degree 4 --prefetch.limit 1",
           "no effect: prefetch.limit: nothing is gathered: "
           "parallelism.data_parallel_shard_degree is 1\n");
    expect(4, "--model.hf_assets_path x --model.init_std 0.1",
           "no effect: model.init_std: the config.json of model.hf_assets_path decides\n");
    expect(4, "--lora.enable --lora.adapter_path x --lora.rank 4",
           "no effect: lora.rank: the adapter_config.json of lora.adapter_path decides\n");
}

/* Each option of each rule can be brought to be reported, and is an option. */
static void every_rule(void **state)
{
    (void)state;
    static const struct {
        int ranks;
        const char *words; /* with the value of the option itself behind */
    } tries[] = {{1, ""},
                 {4, ""},
                 {4, "--optimizer.name SGD"},
                 {4, "--lr_scheduler.decay_ratio 0"},
                 {4, "--parallelism.fsdp_units model"},
                 {1, "--training.mixed_precision_param float32"},
                 {4, "--model.hf_assets_path x"},
                 {4, "--model.name gpt2"},
                 {4, "--lora.enable --lora.adapter_path x"}};
    for (int i = 0; fsdp__train_effect_rule(i); i++) {
        char copy[512], *save = NULL;
        snprintf(copy, sizeof copy, "%s", fsdp__train_effect_rule(i));
        for (char *name = strtok_r(copy, "|", &save); name; name = strtok_r(NULL, "|", &save)) {
            fsdp__str value = {0};
            assert_int_equal(fsdp__options_get(&c.options, name, &value), FSDP_OK);
            bool seen = false;
            for (size_t k = 0; k < sizeof tries / sizeof *tries && !seen; k++) {
                char words[256], line[128];
                const char *v = fsdp__str_get(&value);
                if (!strcmp(name, "lora.target_modules") || strstr(tries[k].words, name)) v = "x";
                if (strstr(tries[k].words, name)) continue;
                if (!strcmp(name, "validation.ema") || !strcmp(name, "lora.merge")) v = "false";
                if (strstr(name, "selective_ac_option")) v = "op";
                if (!strcmp(name, "memory.offload") || !strcmp(name, "optimizer.offload"))
                    v = "cpu";
                if (!strcmp(name, "training.enable_cpu_offload")) v = "true";
                if (!strcmp(v, "null") || !*v || !strcmp(v, "[]")) v = "x";
                snprintf(words, sizeof words, "%s --%s %s", tries[k].words, name,
                         *v == '"' ? "x" : v);
                char *found = told(tries[k].ranks, words);
                snprintf(line, sizeof line, "no effect: %s: ", name);
                seen = strstr(found, line) != NULL;
                free(found);
            }
            fsdp__str_free(&value);
            if (!seen) fail_msg("%s is never reported", name);
        }
    }
}

/* The file that a run writes names every option: its defaults say nothing. */
static void a_written_file_says_nothing(void **state)
{
    (void)state;
    char path[] = "/tmp/fsdp-effect-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    set("--data.dir d --model.flavor tiny --lora.rank 5");
    assert_int_equal(fsdp__train_config_resolve(&c, 4), FSDP_OK);
    fsdp__str text = {0}, said = {0};
    fsdp__train_config_text(&c, &text);
    FILE *f = fdopen(fd, "w");
    fputs(fsdp__str_get(&text), f);
    fclose(f);
    fsdp__str_free(&text);
    fsdp__train_config_free(&c);
    assert_int_equal(fsdp__train_config_init(&c), FSDP_OK);
    if (fsdp__train_config_load(&c, path) != FSDP_OK) fail_msg("%s", fsdp_error_text());
    remove(path);
    assert_int_equal(fsdp__train_config_resolve(&c, 4), FSDP_OK);
    assert_int_equal(fsdp__train_no_effect(&c, &said), FSDP_OK);
    assert_string_equal(fsdp__str_get(&said), "no effect: lora.rank: lora.enable is off\n");
    fsdp__str_free(&said);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(nothing_is_said_without_reason, open_config, close_config),
        cmocka_unit_test_setup_teardown(one_line_each, open_config, close_config),
        cmocka_unit_test_setup_teardown(every_rule, open_config, close_config),
        cmocka_unit_test_setup_teardown(a_written_file_says_nothing, open_config, close_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
