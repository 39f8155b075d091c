/*
 * test_hf_folder.c - weights of a folder into a model and back, on one rank: names of older files,
 * tied weights, three lists, dtypes, several files, what a save replaces and what it does not.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "format/file.h"
#include "fsdp/models.h"
#include "hf/config.h"
#include "hf/folder.h"
#include "hf/weights.h"

static char folder[64];

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    strcpy(folder, "/tmp/fsdp-test-folder-XXXXXX");
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
    static char paths[4][256];
    static int next;
    char *p = paths[next++ % 4];
    snprintf(p, sizeof paths[0], "%s/%s", folder, name);
    return p;
}

static fsdp_model_config small(fsdp_model_family f)
{
    fsdp_model_config c = fsdp__model_config_default(f);
    c.vocab_size = 19;
    c.hidden_size = 12;
    c.intermediate_size = 16;
    c.num_layers = 2;
    c.num_heads = c.num_kv_heads = 2;
    c.head_dim = 6;
    c.max_position_embeddings = 8;
    return c;
}

static fsdp_module *make(const fsdp_model_config *c, uint64_t seed)
{
    fsdp_module *m = fsdp_model_create(c);
    assert_non_null(m);
    assert_int_equal(fsdp_reset_parameters(m, seed), FSDP_OK);
    return m;
}

/* The largest difference between the parameters of two models of one config. */
static double difference(fsdp_module *a, fsdp_module *b)
{
    fsdp_param_list l, k;
    double worst = 0.0;
    assert_int_equal(fsdp_module_params(a, &l), FSDP_OK);
    assert_int_equal(fsdp_module_params(b, &k), FSDP_OK);
    assert_int_equal(l.count, k.count);
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *x = fsdp_param_tensor(l.items[i].param);
        fsdp_tensor *y = fsdp_param_tensor(k.items[i].param);
        size_t n = (size_t)fsdp_numel(x);
        double *u = malloc(n * sizeof *u), *v = malloc(n * sizeof *v);
        assert_int_equal(fsdp_to_doubles(x, u), FSDP_OK);
        assert_int_equal(fsdp_to_doubles(y, v), FSDP_OK);
        for (size_t j = 0; j < n; j++)
            if (!(fabs(u[j] - v[j]) <= worst)) worst = fabs(u[j] - v[j]);
        free(u);
        free(v);
    }
    fsdp_param_list_free(&l);
    fsdp_param_list_free(&k);
    return worst;
}

static bool there(const char *dir, const char *name)
{
    char path[320];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return fsdp__file_exists(path);
}

/* ---- there and back ------------------------------------------------------------------ */

static void what_is_saved_is_loaded(void **state)
{
    (void)state;
    static const fsdp_model_family families[] = {FSDP_LLAMA, FSDP_QWEN3, FSDP_GPT2};
    for (size_t f = 0; f < 3; f++) {
        fsdp_model_config c = small(families[f]), d;
        fsdp_module *a = make(&c, 1), *b = make(&c, 2);
        assert_true(difference(a, b) > 0.0);
        assert_int_equal(fsdp__hf_save_folder(a, &c, in("saved"), NULL), FSDP_OK);
        assert_false(fsdp__dir_exists(in("saved.tmp")));
        assert_int_equal(fsdp__hf_load_weights(b, in("saved")), FSDP_OK);
        assert_true(difference(a, b) == 0.0);
        assert_int_equal(fsdp__hf_config_load(in("saved/config.json"), &d), FSDP_OK);
        assert_int_equal(d.family, families[f]);
        assert_int_equal(d.dtype, FSDP_F32);
        assert_int_equal(d.hidden_size, 12);
        assert_true(there(in("saved"), "generation_config.json"));
        assert_false(there(in("saved"), "tokenizer.json"));
        fsdp_module_free(a);
        fsdp_module_free(b);
    }
}

static void narrow_and_in_several_files(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    fsdp_module *a = make(&c, 1), *b = make(&c, 2);
    assert_int_equal(fsdp__file_write(in("t.json"), "{}", 2), FSDP_OK);
    fsdp__hf_save_options o = {.dtype = FSDP_BF16, .tokenizer = in("t.json"), .shard_limit = 1000};
    assert_int_equal(fsdp__hf_save_folder(a, &c, in("saved/"), &o), FSDP_OK);
    assert_true(there(in("saved"), "model.safetensors.index.json"));
    assert_true(there(in("saved"), "tokenizer.json"));
    assert_int_equal(fsdp__hf_load_weights(b, in("saved")), FSDP_OK);
    double d = difference(a, b);
    assert_true(d > 0.0 && d < 1.0 / 256.0);
    /* One file over several: the others go. */
    assert_int_equal(fsdp__hf_save_folder(a, &c, in("saved"), NULL), FSDP_OK);
    assert_false(there(in("saved"), "model.safetensors.index.json"));
    assert_false(there(in("saved"), "tokenizer.json"));
    assert_false(fsdp__dir_exists(in("saved.old")));
    assert_int_equal(fsdp__hf_load_weights(b, in("saved")), FSDP_OK);
    assert_true(difference(a, b) == 0.0);
    fsdp_module_free(a);
    fsdp_module_free(b);
}

static void a_folder_with_other_files_is_left_alone(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    fsdp_module *a = make(&c, 1);
    assert_int_equal(fsdp__dir_make(in("mine")), FSDP_OK);
    assert_int_equal(fsdp__file_write(in("mine/thesis.tex"), "x", 1), FSDP_OK);
    assert_int_equal(fsdp__hf_save_folder(a, &c, in("mine"), NULL), FSDP_INVALID_ARGUMENT);
    assert_non_null(strstr(fsdp_error_text(), "thesis.tex"));
    fsdp_error_clear();
    assert_true(there(in("mine"), "thesis.tex"));
    assert_false(fsdp__dir_exists(in("mine.tmp")));
    fsdp__hf_save_options o = {.tokenizer = in("nowhere.json")};
    assert_int_equal(fsdp__hf_save_folder(a, &c, in("new"), &o), FSDP_NOT_FOUND);
    fsdp_error_clear();
    assert_false(fsdp__dir_exists(in("new")));
    assert_false(fsdp__dir_exists(in("new.tmp")));
    fsdp_module_free(a);
}

/* ---- names of files ---------------------------------------------------------------------- */

typedef struct entry {
    const char *name;
    int ndim;
    int64_t shape[2];
    fsdp_dtype dtype;
} entry;

/* Writes model.safetensors with the given entries; element i of each is i. */
static void write_entries(const entry *e, int64_t n)
{
    fsdp__st_entry items[64];
    static float ones[4096];
    for (int64_t i = 0; i < 4096; i++)
        ones[i] = 1.0F;
    for (int64_t i = 0; i < n; i++)
        items[i] =
            (fsdp__st_entry){e[i].name, e[i].dtype == FSDP_DTYPE_NONE ? FSDP_F32 : e[i].dtype,
                             e[i].ndim, e[i].shape, ones};
    assert_int_equal(fsdp__st_write(in("model.safetensors"), items, n, NULL, 0, NULL, NULL),
                     FSDP_OK);
}

/* The entries of a model, with the first `cut` bytes of names left out where they stand. */
static int64_t entries_of(fsdp_module *m, entry *e, const char *cut, fsdp_param_list *l)
{
    assert_int_equal(fsdp_module_params(m, l), FSDP_OK);
    for (int64_t i = 0; i < l->count; i++) {
        const char *name = l->items[i].name;
        size_t n = strlen(cut);
        e[i] = (entry){.name = !strncmp(name, cut, n) ? name + n : name, .dtype = FSDP_F32};
        e[i].ndim = fsdp_param_ndim(l->items[i].param);
        memcpy(e[i].shape, fsdp_param_sizes(l->items[i].param),
               sizeof *e[i].shape * (size_t)e[i].ndim);
    }
    return l->count;
}

static void names_of_gpt2_as_published(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_GPT2);
    fsdp_module *m = make(&c, 1);
    fsdp_param_list l;
    entry e[64];
    int64_t n = entries_of(m, e, "transformer.", &l);
    assert_string_equal(e[0].name, "wte.weight");
    e[n++] = (entry){"h.0.attn.bias", 2, {8, 8}, FSDP_F32};
    e[n++] = (entry){"h.1.attn.masked_bias", 1, {1, 0}, FSDP_F32};
    write_entries(e, n);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_OK);
    for (int64_t i = 0; i < l.count; i++) {
        int64_t at[2] = {0, 0};
        assert_true(fsdp_at(fsdp_param_tensor(l.items[i].param), at) == 1.0);
    }
    fsdp_param_list_free(&l);
    fsdp_module_free(m);
}

static void tied_weights_by_either_name(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    c.tie_word_embeddings = true;
    fsdp_module *m = make(&c, 1);
    fsdp_param_list l;
    entry e[64];
    int64_t n = entries_of(m, e, "", &l);
    assert_string_equal(e[0].name, "model.embed_tokens.weight");
    e[n] = (entry){"model.layers.0.self_attn.rotary_emb.inv_freq", 1, {3, 0}, FSDP_F32};
    write_entries(e, n + 1);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_OK);
    e[n] = (entry){"lm_head.weight", 2, {19, 12}, FSDP_F32};
    write_entries(e, n + 1);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_OK);
    e[0] = e[n];
    write_entries(e, n);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_OK);
    e[0].shape[0] = 18;
    write_entries(e, n);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_INVALID_DATA);
    fsdp_param_list_free(&l);
    fsdp_module_free(m);
}

static void three_lists_and_nothing_changed(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    fsdp_module *m = make(&c, 1), *same = make(&c, 1);
    fsdp_param_list l;
    entry e[64];
    int64_t n = entries_of(m, e, "", &l);
    e[1].name = "model.layers.7.other";
    e[2].shape[0] = 11;
    e[n - 1].dtype = FSDP_I32;
    write_entries(e, n);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_INVALID_DATA);
    const char *text = fsdp_error_text();
    assert_non_null(strstr(text, "1 missing: model.layers.0.input_layernorm.weight"));
    assert_non_null(strstr(text, "1 extra: model.layers.7.other"));
    assert_non_null(strstr(text,
                           "2 misshaped: 'model.layers.0.self_attn.q_proj.weight' is F32 (11, "
                           "12) and the model wants (12, 12)"));
    assert_non_null(strstr(text, "I32"));
    fsdp_error_clear();
    assert_true(difference(m, same) == 0.0);
    fsdp_param_list_free(&l);
    fsdp_module_free(m);
    fsdp_module_free(same);
}

static void long_lists_are_cut(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    fsdp_module *m = make(&c, 1);
    const entry e = {"model.norm.weight", 1, {12, 0}, FSDP_F32};
    write_entries(&e, 1);
    assert_int_equal(fsdp__hf_load_weights(m, folder), FSDP_INVALID_DATA);
    assert_non_null(strstr(fsdp_error_text(), "20 missing: "));
    assert_non_null(strstr(fsdp_error_text(), ", ...;"));
    fsdp_module_free(m);
}

static void a_model_on_meta_is_refused(void **state)
{
    (void)state;
    fsdp_model_config c = small(FSDP_LLAMA);
    fsdp_module *m = make(&c, 1);
    assert_int_equal(fsdp__hf_save_folder(m, &c, in("saved"), NULL), FSDP_OK);
    fsdp_module_free(m);
    fsdp_device_push(FSDP_META);
    m = fsdp_model_create(&c);
    fsdp_device_pop();
    assert_int_equal(fsdp__hf_load_weights(m, in("saved")), FSDP_INVALID_STATE);
    assert_non_null(strstr(fsdp_error_text(), "fsdp_to_empty"));
    fsdp_error_clear();
    assert_int_equal(fsdp_to_empty(m, FSDP_CPU), FSDP_OK);
    assert_int_equal(fsdp__hf_save_folder(m, &c, in("empty"), NULL), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_false(fsdp__dir_exists(in("empty")));
    int64_t bytes, size;
    assert_int_equal(fsdp__hf_load_weights_counted(m, in("saved"), &bytes), FSDP_OK);
    assert_int_equal(fsdp__file_size(in("saved/model.safetensors"), &size), FSDP_OK);
    assert_int_equal(bytes, size);
    fsdp_module_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#define T(f) cmocka_unit_test_setup_teardown(f, start, end)
        T(what_is_saved_is_loaded),
        T(narrow_and_in_several_files),
        T(a_folder_with_other_files_is_left_alone),
        T(names_of_gpt2_as_published),
        T(tied_weights_by_either_name),
        T(three_lists_and_nothing_changed),
        T(long_lists_are_cut),
        T(a_model_on_meta_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
