/*
 * test_generate_sample.c - which token is drawn, from logits that are known.
 */
#include <math.h>
#include <stdarg.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "generate/generate.h"

/* Probabilities at temperature 1: 0.1, 0.4, 0.2, 0.3. */
static const float logits[4] = {-2.302585f, -0.916291f, -1.609438f, -1.203973f};

static int64_t draw(double temperature, int64_t top_k, double top_p, double u)
{
    fsdp__generate_options o = fsdp__generate_defaults();
    o.temperature = temperature;
    o.top_k = top_k;
    o.top_p = top_p;
    return fsdp__sample(logits, 4, &o, u);
}

static void greedy_takes_the_likeliest(void **state)
{
    (void)state;
    const float ties[5] = {1, 3, NAN, 3, -INFINITY};
    fsdp__generate_options o = fsdp__generate_defaults();
    assert_int_equal(draw(0, 0, 1, 0.99), 1);
    assert_int_equal(fsdp__sample(ties, 5, &o, 0.5), 1);
    assert_int_equal(draw(1, 1, 1, 0.99), 1);
    assert_int_equal(draw(1e-4, 0, 1, 0.99), 1);
}

/* Sorted: 1 (0.4), 3 (0.3), 2 (0.2), 0 (0.1). */
static void draws_follow_probabilities(void **state)
{
    (void)state;
    assert_int_equal(draw(1, 0, 1, 0.0), 1);
    assert_int_equal(draw(1, 0, 1, 0.39), 1);
    assert_int_equal(draw(1, 0, 1, 0.41), 3);
    assert_int_equal(draw(1, 0, 1, 0.69), 3);
    assert_int_equal(draw(1, 0, 1, 0.71), 2);
    assert_int_equal(draw(1, 0, 1, 0.89), 2);
    assert_int_equal(draw(1, 0, 1, 0.91), 0);
    assert_int_equal(draw(1, 0, 1, 0.999999999), 0);
    /* Temperature 2: square roots, of sum 1.9436; the likeliest has 0.3254. */
    assert_int_equal(draw(2, 0, 1, 0.32), 1);
    assert_int_equal(draw(2, 0, 1, 0.33), 3);
}

static void cuts_leave_the_likeliest(void **state)
{
    (void)state;
    /* k = 2: 4/7 and 3/7. */
    assert_int_equal(draw(1, 2, 1, 0.57), 1);
    assert_int_equal(draw(1, 2, 1, 0.58), 3);
    assert_int_equal(draw(1, 2, 1, 0.9999), 3);
    /* p = 0.6 needs two of them, p = 0.3 one, p = 0.75 three. */
    assert_int_equal(draw(1, 0, 0.6, 0.9999), 3);
    assert_int_equal(draw(1, 0, 0.3, 0.9999), 1);
    assert_int_equal(draw(1, 0, 0.75, 0.9999), 2);
    /* top_p counts within what top_k has left. */
    assert_int_equal(draw(1, 2, 0.5, 0.9999), 1);
}

static void no_finite_logit_is_an_error(void **state)
{
    (void)state;
    const float bad[2] = {NAN, -INFINITY};
    fsdp__generate_options o = fsdp__generate_defaults();
    assert_int_equal(fsdp__sample(bad, 2, &o, 0.5), -1);
    assert_int_equal(fsdp_error(), FSDP_NON_FINITE);
    fsdp_error_clear();
}

/* ---- the loop, on a small model with random weights ------------------------------------------ */

typedef struct heard {
    int64_t ids[32];
    int n, stop_at;
} heard;

static int hear(void *arg, int64_t token)
{
    heard *h = arg;
    h->ids[h->n++] = token;
    return h->n == h->stop_at;
}

static fsdp_model_config small(void)
{
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.vocab_size = 19;
    c.hidden_size = 16;
    c.intermediate_size = 24;
    c.num_layers = 2;
    c.num_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 4;
    c.max_position_embeddings = 16;
    c.initializer_range = 0.5;
    c.num_eos = 0;
    return c;
}

/* With the cache, token by token, and without it, whole: the same. */
static void a_cache_changes_nothing(void **state)
{
    (void)state;
    fsdp_model_config c = small();
    fsdp_module *m = fsdp_model_create(&c);
    assert_int_equal(fsdp_reset_parameters(m, 5), FSDP_OK);
    const int32_t prompt[3] = {1, 7, 4};
    fsdp__generate_options o = fsdp__generate_defaults();
    o.tokens = 8;
    heard h = {0};
    assert_int_equal(fsdp__generate(m, &c, prompt, 3, &o, hear, &h), FSDP_OK);
    assert_int_equal(h.n, 8);
    int64_t ids[11] = {1, 7, 4};
    fsdp_no_grad_begin();
    for (int64_t i = 0; i < 8; i++) {
        const int64_t sizes[2] = {1, 3 + i};
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *t = fsdp_tensor_from_memory(ids, FSDP_I64, 2, sizes, NULL, NULL, NULL);
        fsdp_tensor *y = fsdp_model_forward(m, t, NULL, NULL);
        int64_t best = 0;
        for (int64_t v = 1; v < 19; v++)
            if (fsdp_at(y, (int64_t[]){0, 2 + i, v}) > fsdp_at(y, (int64_t[]){0, 2 + i, best}))
                best = v;
        fsdp_scope_end(scope);
        assert_int_equal(h.ids[i], best);
        ids[3 + i] = best;
    }
    fsdp_no_grad_end();
    assert_int_equal(fsdp_error(), FSDP_OK);
    fsdp_module_free(m);
}

static void it_ends_where_it_should(void **state)
{
    (void)state;
    fsdp_model_config c = small();
    fsdp_module *m = fsdp_model_create(&c);
    assert_int_equal(fsdp_reset_parameters(m, 5), FSDP_OK);
    const int32_t prompt[3] = {1, 7, 4}, outside[1] = {19};
    fsdp__generate_options o = fsdp__generate_defaults();
    o.tokens = 8;
    heard all = {0}, some = {.stop_at = 3}, ended = {0}, none = {0};
    assert_int_equal(fsdp__generate(m, &c, prompt, 3, &o, hear, &all), FSDP_OK);
    assert_int_equal(fsdp__generate(m, &c, prompt, 3, &o, hear, &some), FSDP_OK);
    assert_int_equal(some.n, 3);
    /* The first token that comes for the first time ends it. */
    c.num_eos = 1;
    c.eos_token_ids[0] = all.ids[0];
    assert_int_equal(fsdp__generate(m, &c, prompt, 3, &o, hear, &ended), FSDP_OK);
    assert_int_equal(ended.n, 0);
    o.tokens = 0;
    assert_int_equal(fsdp__generate(m, &c, prompt, 3, &o, hear, &none), FSDP_OK);
    assert_int_equal(none.n, 0);
    o.tokens = 14;
    assert_int_equal(fsdp__generate(m, &c, prompt, 3, &o, hear, &none), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    o.tokens = 1;
    assert_int_equal(fsdp__generate(m, &c, outside, 1, &o, hear, &none), FSDP_INVALID_DATA);
    fsdp_error_clear();
    assert_int_equal(fsdp__generate(m, &c, prompt, 0, &o, hear, &none), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    fsdp_module_free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_likeliest), cmocka_unit_test(draws_follow_probabilities),
        cmocka_unit_test(cuts_leave_the_likeliest),   cmocka_unit_test(no_finite_logit_is_an_error),
        cmocka_unit_test(a_cache_changes_nothing),    cmocka_unit_test(it_ends_where_it_should),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
