/*
 * test_ckpt.c - checkpoints: what N ranks saved, M ranks load, to the bit, whatever the cut; and
 * what a checkpoint that does not fit says.
 */
#include <signal.h>
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/error.h"
#include "ckpt/checkpoint.h"
#include "format/file.h"
#include "fsdp/comm.h"
#include "fsdp/shard.h"

/* What the ranks of one run do. */
typedef struct job {
    const char *folder;
    int replicas;
    int dim;         /* that weights are cut along */
    int64_t width;   /* of the inner layer */
    uint64_t seed;   /* of the values before */
    bool momentum;   /* SGD with momentum instead of AdamW */
    bool save, load; /* load: the values must be those of seed 7 afterwards */
} job;

static int cut_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)name;
    int dim = *(const int *)arg;
    return dim < fsdp_param_ndim(p) ? dim : 0;
}

/* Odd sizes: 5 and 7 rows over up to four ranks leave some with less, or none. */
static fsdp_module *make_model(const job *j, int *dim)
{
    int64_t w = j->width ? j->width : 7;
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module_add(m, "up", fsdp_linear_create(3, w, 1));
    fsdp_module_add(m, "down", fsdp_linear_create(w, 5, 0));
    fsdp_module_add(m, "one", fsdp_linear_create(5, 1, 1));
    fsdp_module_set_init(m, (fsdp_init_rule){FSDP_INIT_NORMAL, 0.0, 1.0});
    int sizes[2] = {j->replicas, fsdp_world_size() / j->replicas};
    const char *names[2] = {"replicate", "shard"};
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 2, sizes, names));
    o.placement_fn = cut_dim;
    o.placement_arg = dim;
    fsdp_fully_shard(fsdp_module_find(m, "up"), &o);
    fsdp_fully_shard(m, &o);
    fsdp_reset_parameters(m, j->seed);
    return fsdp_error() ? (fsdp_module_free(m), NULL) : m;
}

/* The optimizer's states are made to hold the parameters' own values, scaled. */
static fsdp_status set_states(fsdp_module *m, fsdp_optimizer *o, double scale)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_no_grad_begin();
    for (int64_t i = 0; i < l.count; i++)
        for (int k = 0; k < fsdp_optimizer_state_count(o); k++) {
            fsdp_scope *scope = fsdp_scope_begin();
            fsdp_tensor *p = fsdp_param_tensor(l.items[i].param);
            fsdp_copy_(fsdp_optimizer_state(o, l.items[i].param, k),
                       fsdp_scale(fsdp_dtensor_local(p), scale + k));
            fsdp_scope_end(scope);
        }
    fsdp_no_grad_end();
    fsdp_param_list_free(&l);
    return fsdp_error();
}

static fsdp_status same_bytes(const fsdp_tensor *a, const fsdp_tensor *b, const char *what)
{
    size_t n = (size_t)fsdp_numel(a) * fsdp_dtype_size(fsdp_tensor_dtype(a));
    if (fsdp_numel(a) == fsdp_numel(b) && (n == 0 || !memcmp(fsdp_data(a), fsdp_data(b), n)))
        return FSDP_OK;
    return fsdp__fail(FSDP_INTERNAL, "%s is not as it was saved", what);
}

/* Compares m and o with a model that has the values of seed 7. */
static fsdp_status compare(const job *j, fsdp_module *m, fsdp_optimizer *o)
{
    job like = *j;
    like.seed = 7;
    int dim = j->dim;
    fsdp_module *n = make_model(&like, &dim);
    fsdp_optimizer *p = fsdp_adamw(n, NULL);
    fsdp_param_list a = {0}, b = {0};
    fsdp_status s = p ? set_states(n, p, 3.0) : fsdp_error();
    if (s == FSDP_OK) s = fsdp_module_params(m, &a);
    if (s == FSDP_OK) s = fsdp_module_params(n, &b);
    for (int64_t i = 0; s == FSDP_OK && i < a.count; i++) {
        s = same_bytes(fsdp_param_tensor(a.items[i].param), fsdp_param_tensor(b.items[i].param),
                       a.items[i].name);
        for (int k = 0; s == FSDP_OK && k < 2; k++)
            s = same_bytes(fsdp_optimizer_state(o, a.items[i].param, k),
                           fsdp_optimizer_state(p, b.items[i].param, k), a.items[i].name);
    }
    fsdp_param_list_free(&a);
    fsdp_param_list_free(&b);
    fsdp_optimizer_free(p);
    fsdp_module_free(n);
    return s;
}

static fsdp_status work(void *arg)
{
    const job *j = arg;
    int dim = j->dim;
    fsdp_sgd_options sgd = {0.1, 0.9, 0.0, 0};
    fsdp_module *m = make_model(j, &dim);
    fsdp_optimizer *o = j->momentum ? fsdp_sgd(m, &sgd) : fsdp_adamw(m, NULL);
    fsdp__ckpt_state s = {.step = 12, .samples = 345};
    fsdp_status st = o ? set_states(m, o, 3.0) : fsdp_error();
    fsdp_optimizer_set_step_count(o, 11);
    if (st == FSDP_OK && j->save) st = fsdp__ckpt_save(m, o, j->folder, &s);
    if (st == FSDP_OK && j->load) {
        s = (fsdp__ckpt_state){0};
        fsdp_optimizer_set_step_count(o, 0);
        st = fsdp__ckpt_load(m, o, j->folder, 12, &s);
        if (st == FSDP_OK &&
            (s.step != 12 || s.samples != 345 || fsdp_optimizer_step_count(o) != 11))
            st = fsdp__fail(FSDP_INTERNAL, "step %lld, samples %lld, optimizer step %lld",
                            (long long)s.step, (long long)s.samples,
                            (long long)fsdp_optimizer_step_count(o));
        if (st == FSDP_OK) st = compare(j, m, o);
    }
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    return st;
}

static void run(int ranks, const job *j)
{
    job copy = *j;
    if (fsdp_run_threads(ranks, work, &copy) != FSDP_OK) fail_msg("%s", fsdp_error_text());
}

/* A failure with this in its text, on some rank. */
static void run_fails(int ranks, const job *j, const char *text)
{
    job copy = *j;
    assert_int_not_equal(fsdp_run_threads(ranks, work, &copy), FSDP_OK);
    if (!strstr(fsdp_error_text(), text)) fail_msg("'%s' lacks '%s'", fsdp_error_text(), text);
    fsdp_error_clear();
}

static char folder[64];

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/fsdp_ckpt_XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    fsdp_error_clear();
    return fsdp__dir_remove(folder) == FSDP_OK ? 0 : -1;
}

static void any_ranks_load_what_any_saved(void **state)
{
    (void)state;
    const int saved[] = {1, 2, 4}, loaded[] = {1, 2, 3, 4};
    for (int a = 0; a < 3; a++) {
        run(saved[a], &(job){.folder = folder, .replicas = 1, .seed = 7, .save = true});
        for (int b = 0; b < 4; b++)
            run(loaded[b], &(job){.folder = folder, .replicas = 1, .seed = 8, .load = true});
    }
}

static void cuts_and_replicas_do_not_matter(void **state)
{
    (void)state;
    run(4, &(job){.folder = folder, .replicas = 2, .dim = 1, .seed = 7, .save = true});
    run(3, &(job){.folder = folder, .replicas = 1, .dim = 0, .seed = 8, .load = true});
    run(2, &(job){.folder = folder, .replicas = 2, .dim = 0, .seed = 8, .load = true});
    run(3, &(job){.folder = folder, .replicas = 3, .dim = 0, .seed = 7, .save = true});
    run(3, &(job){.folder = folder, .replicas = 1, .dim = 1, .seed = 8, .load = true});
    /* The second save took the place of the first: nothing else is left. */
    char **names;
    int64_t n;
    assert_int_equal(fsdp__dir_list(folder, &names, &n), FSDP_OK);
    assert_int_equal(n, 1);
    assert_string_equal(names[0], "step-12");
    fsdp__dir_list_free(names, n);
}

static void what_does_not_fit_is_listed(void **state)
{
    (void)state;
    run(2, &(job){.folder = folder, .replicas = 1, .seed = 7, .save = true});
    run_fails(2, &(job){.folder = folder, .replicas = 1, .width = 6, .load = true},
              "of another shape (up.weight");
    run_fails(1, &(job){.folder = folder, .replicas = 1, .momentum = true, .load = true},
              "the state of another optimizer");
    /* A file of the two is gone. */
    char path[128];
    snprintf(path, sizeof path, "%s/step-12/rank-00001-of-00002.safetensors", folder);
    assert_int_equal(unlink(path), 0);
    run_fails(1, &(job){.folder = folder, .replicas = 1, .load = true},
              "rank-00001-of-00002.safetensors");
    snprintf(path, sizeof path, "%s/step-12/checkpoint.json", folder);
    assert_int_equal(unlink(path), 0);
    run_fails(1, &(job){.folder = folder, .replicas = 1, .load = true}, "checkpoint.json");
}

static void only_whole_ones_count(void **state)
{
    (void)state;
    int64_t step = 0;
    char path[128];
    assert_int_equal(fsdp__ckpt_newest(folder, &step), FSDP_OK);
    assert_int_equal(step, -1);
    const char *const names[] = {"step-3",       "step-20", "step-100",
                                 "step-200.tmp", "step-x",  "step-"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        assert_int_equal(fsdp__dir_make(path), FSDP_OK);
    }
    assert_int_equal(fsdp__ckpt_newest(folder, &step), FSDP_OK);
    assert_int_equal(step, 100);
    assert_int_equal(fsdp__ckpt_prune(folder, 2), FSDP_OK);
    snprintf(path, sizeof path, "%s/step-3", folder);
    assert_false(fsdp__dir_exists(path));
    snprintf(path, sizeof path, "%s/step-200.tmp", folder);
    assert_false(fsdp__dir_exists(path));
    snprintf(path, sizeof path, "%s/step-20", folder);
    assert_true(fsdp__dir_exists(path));
    snprintf(path, sizeof path, "%s/not-there", folder);
    assert_int_equal(fsdp__ckpt_newest(path, &step), FSDP_OK);
    assert_int_equal(step, -1);
}

static void a_save_that_fails_leaves_nothing(void **state)
{
    (void)state;
    char path[128];
    snprintf(path, sizeof path, "%s/file", folder);
    assert_int_equal(fsdp__file_write(path, "x", 1), FSDP_OK);
    run_fails(2, &(job){.folder = path, .replicas = 1, .seed = 7, .save = true}, "file");
    char **names;
    int64_t n;
    assert_int_equal(fsdp__dir_list(folder, &names, &n), FSDP_OK);
    assert_int_equal(n, 1);
    fsdp__dir_list_free(names, n);
}

/* Files may not grow: every rank says so, and none that it finds no folder, which another that
 * failed before it has taken away. */
static fsdp_status save_and_tell(void *arg)
{
    job j = {.folder = folder, .replicas = 1, .seed = 7, .save = true};
    char(*told)[256] = arg;
    fsdp_status s = work(&j);
    snprintf(told[fsdp_rank()], sizeof told[0], "%s", fsdp_error_text());
    return s;
}

static void a_full_disk_is_all_that_is_said(void **state)
{
    (void)state;
    struct rlimit old, small;
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 100;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    for (int k = 0; k < 20; k++) {
        char told[8][256] = {{0}};
        setrlimit(RLIMIT_FSIZE, &small);
        fsdp_status s = fsdp_run_threads(8, save_and_tell, told);
        setrlimit(RLIMIT_FSIZE, &old);
        fsdp_error_clear();
        assert_int_not_equal(s, FSDP_OK);
        for (int r = 0; r < 8; r++)
            if (strstr(told[r], "No such file") || !strstr(told[r], "safetensors"))
                fail_msg("rank %d: %s", r, told[r]);
        char **names;
        int64_t n;
        assert_int_equal(fsdp__dir_list(folder, &names, &n), FSDP_OK);
        fsdp__dir_list_free(names, n);
        assert_int_equal(n, 0);
    }
    signal(SIGXFSZ, handler);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(any_ranks_load_what_any_saved),    TEST(cuts_and_replicas_do_not_matter),
        TEST(what_does_not_fit_is_listed),      TEST(only_whole_ones_count),
        TEST(a_save_that_fails_leaves_nothing), TEST(a_full_disk_is_all_that_is_said),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
