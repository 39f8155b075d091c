/*
 * test_golden_peft.c - adapters of peft give peft's logits, and six steps of training give its
 * losses, norms and adapters, on any number of ranks; saved, loaded and merged they stay the same.
 * ctest: timeout=240
 */
#include "golden.h"

#include <unistd.h>

#include "format/file.h"
#include "format/json.h"

enum { B = 4, T = 32, STEPS = 6, IGNORE_INDEX = -100 };

typedef struct job {
    const char *name; /* of the model and of the adapters */
    fsdp_reshard_policy policy;
    char saved[256]; /* a folder for what is written, "": none */
    /* results, of rank 0 */
    double logits, merged, loss, norm, weights;
} job;

static double worse(double a, double b)
{
    return b > a || isnan(b) ? b : a;
}

static void path_of(char *out, size_t n, const char *folder, const char *name)
{
    snprintf(out, n, "%s/%s/%s", FSDP_TEST_DATA, folder, name);
}

/* The model of j with the adapters of a folder, cut over the ranks. */
static fsdp_module *make(const job *j, const char *adapters)
{
    char folder[512];
    path_of(folder, sizeof folder, "models", j->name);
    fsdp_model_config *c = fsdp_model_config_load(folder);
    fsdp_device_push(FSDP_META);
    fsdp_module *m = fsdp_model_create(c);
    fsdp_device_pop();
    fsdp_model_config_free(c);
    fsdp_lora_apply_folder(m, adapters);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = j->policy;
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        fsdp_fully_shard(fsdp_model_block(m, i), &o);
    fsdp_fully_shard(m, &o);
    fsdp_set_gradient_divide_factor(m, 1.0, 1);
    fsdp_to_empty(m, FSDP_CPU);
    fsdp_model_load_weights(m, folder);
    if (fsdp_lora_load(m, adapters) == FSDP_OK) return m;
    fsdp_module_free(m);
    return NULL;
}

/* Largest difference of the logits to those of the file / largest value. */
static fsdp_status compare_logits(fsdp_module *m, fsdp__st *st, double *out)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *ids = golden_get(st, "input_ids"), *expected = golden_get(st, "logits");
    fsdp_no_grad_begin();
    fsdp_tensor *y = fsdp_model_forward(m, ids, NULL, NULL);
    fsdp_no_grad_end();
    EXPECT(y && expected);
    *out = check_distance(y, expected);
    fsdp_scope_end(scope);
    return FSDP_OK;
}

/* This rank's rows of a step; a rank without rows has one in which nothing counts. */
static fsdp_tensor *rows_loss(fsdp_module *m, const int64_t *tokens)
{
    int n = fsdp_world_size(), each = (B + n - 1) / n, first = fsdp_rank() * each;
    int have = first < B ? (B - first < each ? B - first : each) : 0, rows = have ? have : 1;
    fsdp_tensor *x = fsdp_empty(FSDP_I64, 2, SIZES(rows, T));
    fsdp_tensor *y = fsdp_empty(FSDP_I64, 2, SIZES(rows, T));
    int64_t *px = fsdp_data(x), *py = fsdp_data(y);
    for (int i = 0; i < rows * T; i++) {
        const int64_t *at = tokens + ((have ? first : 0) + i / T) * (T + 1) + i % T;
        px[i] = at[0];
        py[i] = have ? at[1] : IGNORE_INDEX;
    }
    return fsdp_model_forward(m, x, NULL, y);
}

static fsdp_status step(job *j, fsdp_module *m, fsdp_optimizer *o, const int64_t *tokens,
                        const json_t *expected)
{
    fsdp_tensor *loss = rows_loss(m, tokens);
    EXPECT(loss);
    double sum = fsdp_item(loss), norm;
    FSDP_TRY(fsdp_backward(fsdp_scale(loss, 1.0 / (B * T))));
    FSDP_TRY(
        fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, &sum, 1, FSDP_F64, FSDP_SUM, NULL));
    FSDP_TRY(fsdp_clip_grad_norm(m, 1.0, &norm));
    FSDP_TRY(fsdp_optimizer_step(o));
    FSDP_TRY(fsdp_zero_grad(m));
    double want = json_real_value(json_object_get(expected, "loss"));
    double want_norm = json_real_value(json_object_get(expected, "grad_norm"));
    if (fsdp_rank() == 0) {
        j->loss = worse(j->loss, fabs(sum / (B * T) / want - 1.0));
        j->norm = worse(j->norm, fabs(norm / want_norm - 1.0));
    }
    return FSDP_OK;
}

/* Each adapter against after6: norm of the difference / norm. */
static fsdp_status compare_adapters(job *j, fsdp_module *m, fsdp__st *st, int64_t *found)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    for (int64_t i = 0; i < l.count; i++) {
        char name[256];
        const char *dot = strrchr(l.items[i].name, '.');
        if (!strstr(l.items[i].name, ".lora_")) continue;
        snprintf(name, sizeof name, "after6.base_model.model.%.*s.default%s",
                 (int)(dot - l.items[i].name), l.items[i].name, dot);
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *w = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        fsdp_tensor *e = golden_get(st, name);
        EXPECT(w && e);
        double *a = check_values(w), *b = check_values(e), d = 0, s = 0;
        for (int64_t k = 0; k < fsdp_numel(e); k++) {
            d += (a[k] - b[k]) * (a[k] - b[k]);
            s += b[k] * b[k];
        }
        if (fsdp_rank() == 0) j->weights = worse(j->weights, sqrt(d / s));
        free(a);
        free(b);
        fsdp_scope_end(scope);
        ++*found;
    }
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static fsdp_status train(job *j, fsdp_module *m, fsdp__st *st, const char *adapters)
{
    char path[600];
    snprintf(path, sizeof path, "%s/training.json", adapters);
    json_t *json = fsdp__json_load(path), *steps = json_object_get(json, "steps");
    EXPECT(json_array_size(steps) == STEPS);
    fsdp_adamw_options a = {1e-3, 0.9, 0.95, 1e-8, 0.0};
    fsdp_optimizer *o = fsdp_adamw(m, &a);
    fsdp_scope *outer = fsdp_scope_begin();
    const int64_t *tokens = fsdp_data(golden_get(st, "tokens"));
    fsdp_status s = tokens && o ? FSDP_OK : fsdp_error();
    for (int i = 0; i < STEPS && s == FSDP_OK; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        s = step(j, m, o, tokens + i * B * (T + 1), json_array_get(steps, (size_t)i));
        fsdp_scope_end(scope);
    }
    fsdp_scope_end(outer);
    fsdp_optimizer_free(o);
    json_decref(json);
    int64_t found = 0;
    if (s == FSDP_OK) s = compare_adapters(j, m, st, &found);
    if (s == FSDP_OK) EXPECT(found == 2 * fsdp_lora_count(m));
    return s;
}

static fsdp_status compare(void *arg)
{
    job *j = arg;
    char adapters[512];
    double distance, merged;
    path_of(adapters, sizeof adapters, "peft", j->name);
    FSDP_TRY(fsdp_set_threads(1));
    char file[64];
    snprintf(file, sizeof file, "peft/%s", j->name);
    fsdp__st *st = golden_open(file, "expected");
    fsdp_module *m = make(j, adapters);
    EXPECT(m);
    FSDP_TRY(compare_logits(m, st, &distance));
    FSDP_TRY(train(j, m, st, adapters));
    fsdp_module_free(m);
    m = make(j, adapters);
    FSDP_TRY(fsdp_lora_merge(m));
    FSDP_TRY(compare_logits(m, st, &merged));
    EXPECT(fsdp_lora_merged(m));
    fsdp_module_free(m);
    fsdp__st_close(st);
    if (fsdp_rank() == 0) j->logits = distance, j->merged = merged;
    return FSDP_OK;
}

static const char *const names[] = {"llama", "qwen2"};

static void test_numbers_of_peft(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int n = 1; n <= 4; n++) {
            job j = {.name = names[i], .policy = n % 2 ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_AUTO};
            check_ok(fsdp_run_threads(n, compare, &j));
            if (!(j.logits < 3e-6 && j.merged < 3e-6 && j.loss < 2e-6 && j.norm < 5e-5 &&
                  j.weights < 5e-4))
                fail_msg("%s on %d: logits %g, merged %g, loss %g, norm %g, adapters %g", j.name, n,
                         j.logits, j.merged, j.loss, j.norm, j.weights);
            assert_true(j.weights > 0 && j.logits > 0); /* something was compared */
        }
}

/* Saved by some ranks, read by others: the same bytes as peft's file. */
static fsdp_status save(void *arg)
{
    const job *j = arg;
    char adapters[512];
    path_of(adapters, sizeof adapters, "peft", j->name);
    fsdp_module *m = make(j, adapters);
    EXPECT(m);
    FSDP_TRY(fsdp_lora_save(m, j->saved, j->name));
    FSDP_TRY(fsdp_lora_save(m, j->saved, j->name)); /* over its own */
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status load(void *arg)
{
    job *j = arg;
    char file[64];
    double d;
    snprintf(file, sizeof file, "peft/%s", j->name);
    fsdp_module *m = make(j, j->saved);
    EXPECT(m);
    fsdp__st *st = golden_open(file, "expected");
    FSDP_TRY(compare_logits(m, st, &d));
    fsdp__st_close(st);
    fsdp_module_free(m);
    if (fsdp_rank() == 0) j->logits = d;
    return FSDP_OK;
}

/* Which warnings were told, on rank 0. */
static void note_warning(void *arg, int level, const char *line)
{
    (void)level;
    if (strstr(line, "were trained beside another base")) ++*(int *)arg;
}

/* The fingerprint in the file is the base's on any number of ranks. */
static fsdp_status another_base(void *arg)
{
    job *j = arg;
    int warned = 0;
    fsdp_log_set(note_warning, &warned, 1);
    fsdp_module *m = make(j, j->saved);
    EXPECT(m && warned == 0);
    fsdp_param *p = fsdp_module_param(fsdp_module_find(m, "model.norm"), "weight");
    fsdp_tensor *t = fsdp_param_tensor(p);
    FSDP_TRY(fsdp_fill_(t, 7.0));
    FSDP_TRY(fsdp_lora_load(m, j->saved));
    EXPECT(warned == (fsdp_rank() == 0));
    fsdp_log_set(NULL, NULL, 0);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void same_tensors(const char *a, const char *b)
{
    fsdp__st *x = fsdp__st_open(a), *y = fsdp__st_open(b);
    check_tensor(x);
    check_tensor(y);
    assert_int_equal(fsdp__st_count(x), fsdp__st_count(y));
    for (int64_t i = 0; i < fsdp__st_count(x); i++) {
        const fsdp__st_tensor *t = fsdp__st_at(x, i), *u = fsdp__st_find(y, t->name);
        assert_non_null(u);
        assert_int_equal(t->bytes, u->bytes);
        assert_int_equal(t->dtype, u->dtype);
        char *p = malloc((size_t)t->bytes), *q = malloc((size_t)t->bytes);
        check_ok(fsdp__st_read(x, t, 0, t->bytes, p));
        check_ok(fsdp__st_read(y, u, 0, t->bytes, q));
        assert_memory_equal(p, q, (size_t)t->bytes);
        free(p);
        free(q);
    }
    fsdp__st_close(x);
    fsdp__st_close(y);
}

static void test_save_and_load(void **state)
{
    (void)state;
    char dir[] = "/tmp/fsdp-peft-XXXXXX", a[600], b[600];
    assert_non_null(mkdtemp(dir));
    for (int i = 0; i < 2; i++)
        for (int n = 1; n <= 3; n += 2) {
            job j = {.name = names[i]};
            snprintf(j.saved, sizeof j.saved, "%s/%s", dir, names[i]);
            check_ok(fsdp_run_threads(n, save, &j));
            snprintf(a, sizeof a, "%s/adapter_model.safetensors", j.saved);
            path_of(b, sizeof b, "peft", names[i]);
            snprintf(b + strlen(b), sizeof b - strlen(b), "/adapter_model.safetensors");
            same_tensors(a, b);
            check_ok(fsdp_run_threads(n == 1 ? 4 : 1, load, &j));
            assert_true(j.logits < 3e-6);
            check_ok(fsdp_run_threads(n == 1 ? 2 : 4, another_base, &j));
        }
    check_ok(fsdp__dir_remove(dir));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_numbers_of_peft),
                                       cmocka_unit_test(test_save_and_load)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
