/*
 * test_golden_models.c - every model and every FSDP2 run within its bounds, ranks as threads; and
 * that the comparison would notice. Numbers of ranks and strategies are in tests/cli/parity.sh.
 * ctest: slow timeout=240
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "fsdp/comm.h"
#include "train/parity.h"

typedef struct job {
    char dir[512], model[512];
    fsdp__parity_options o;
    fsdp__parity_report report; /* rank 0's */
} job;

static fsdp_status compare(void *arg)
{
    job *j = arg;
    fsdp__parity_report r;
    FSDP_TRY(fsdp_set_threads(1)); /* as many ranks as cores, and more */
    FSDP_TRY(fsdp__parity(j->dir, &j->o, &r));
    if (fsdp_rank() == 0) j->report = r;
    return FSDP_OK;
}

static void expect_within(const fsdp__parity_report *r, const char *name)
{
    for (int i = 0; i < r->count; i++) {
        const fsdp__parity_check *c = &r->check[i];
        if (!(c->error <= c->bound))
            fail_msg("%s, %s: %g is above %g at %s", name, c->what, c->error, c->bound, c->at);
        assert_true(c->count > 0);
    }
}

static job model_job(const char *name)
{
    job j = {.o.tolerance = 1.0};
    snprintf(j.dir, sizeof j.dir, "%s/models/%s", FSDP_TEST_DATA, name);
    return j;
}

/* A sanitizer makes this slow, and three families are enough for it. */
#if defined(__SANITIZE_ADDRESS__)
static const char *const models[] = {"llama-tied", "qwen3", "gpt2"};
enum { FIRST_RANKS = 3 };
#else
static const char *const models[] = {"llama",          "llama-tied",    "llama3-rope", "mistral",
                                     "mistral-window", "llama-headdim", "qwen2",       "qwen3",
                                     "llama-defaults", "gpt2"};
enum { FIRST_RANKS = 1 };
#endif

static void models_on_one_and_three_ranks(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int n = FIRST_RANKS; n <= 3; n += 2) {
            job j = model_job(models[i]);
            if (fsdp_run_threads(n, compare, &j) != FSDP_OK)
                fail_msg("%s on %d: %s", models[i], n, fsdp_error_text());
            assert_int_equal(j.report.count, 6);
            expect_within(&j.report, models[i]);
        }
}

static void runs_of_fsdp2(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"fs2-nested", "llama"}, {"fs2-flat", "llama-tied"},
                                           {"fs2-acc4", "llama"},   {"fs2-bf16", "llama"},
                                           {"fs4", "llama"},        {"hs2x2", "llama"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        job j = {.o.tolerance = 1.0};
        snprintf(j.dir, sizeof j.dir, "%s/fsdp2/%s", FSDP_TEST_DATA, names[i][0]);
        snprintf(j.model, sizeof j.model, "%s/models/%s", FSDP_TEST_DATA, names[i][1]);
        j.o.model = j.model;
        if (fsdp_run_threads(i < 4 ? 2 : 4, compare, &j) != FSDP_OK)
            fail_msg("%s: %s", names[i][0], fsdp_error_text());
        bool bf16 = i == 3;
        assert_int_equal(j.report.count, bf16 ? 2 : 3);
        expect_within(&j.report, names[i][0]);
        /* In bf16 the losses are not those of f32. */
        assert_true((j.report.check[0].error > 2e-6) == bf16);
    }
}

/* Another model's weights, and bounds below the noise, are seen. */
static void a_difference_is_noticed(void **state)
{
    (void)state;
    job j = model_job("llama");
    j.o.tolerance = 1e-6;
    assert_int_equal(fsdp_run_threads(2, compare, &j), FSDP_OK);
    assert_false(fsdp__parity_passed(&j.report));
    j = (job){.o.tolerance = 1.0};
    snprintf(j.dir, sizeof j.dir, "%s/fsdp2/fs2-nested", FSDP_TEST_DATA);
    snprintf(j.model, sizeof j.model, "%s/models/mistral", FSDP_TEST_DATA);
    j.o.model = j.model;
    assert_int_equal(fsdp_run_threads(2, compare, &j), FSDP_OK);
    assert_false(fsdp__parity_passed(&j.report));
}

static void nothing_to_compare_is_an_error(void **state)
{
    (void)state;
    job j = {.o.tolerance = 1.0};
    snprintf(j.dir, sizeof j.dir, "%s/models-v4/llama", FSDP_TEST_DATA);
    assert_int_equal(fsdp_run_threads(1, compare, &j), FSDP_NOT_FOUND);
    assert_non_null(strstr(fsdp_error_text(), "nothing to compare"));
    fsdp_error_clear();
    j.o.model = j.dir;
    assert_int_equal(fsdp_run_threads(1, compare, &j), FSDP_NOT_FOUND);
    fsdp_error_clear();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(models_on_one_and_three_ranks),
        cmocka_unit_test(runs_of_fsdp2),
        cmocka_unit_test(a_difference_is_noticed),
        cmocka_unit_test(nothing_to_compare_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
