/*
 * test_lora_apply.c - which layers get adapters, what they compute, and what each mistake says.
 */
#include "sharded_net.h"

#include "base/context.h"
#include "lora/lora.h"

/* in, layers.K.up, layers.K.down, head: linear layers; layers.K.norm is none. */
static net *make(int blocks)
{
    net *n = net_create(blocks);
    check_tensor(n);
    return n;
}

static int64_t count(const char *const *words, int n_words, const char *pattern)
{
    net *n = make(3);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.target_modules = words;
    o.n_target_modules = n_words;
    o.target_pattern = pattern;
    check_ok(fsdp_lora_apply(&n->base, &o));
    int64_t found = fsdp_lora_count(&n->base);
    fsdp_module_free(&n->base);
    return found;
}

static void test_names(void **state)
{
    (void)state;
    assert_int_equal(count(NULL, 0, NULL), 8); /* all linear */
    assert_int_equal(count((const char *[]){"up"}, 1, NULL), 3);
    assert_int_equal(count((const char *[]){"up", "head"}, 2, NULL), 4);
    assert_int_equal(count((const char *[]){"1.up"}, 1, NULL), 1);
    assert_int_equal(count((const char *[]){"layers.1.up", "up"}, 2, NULL), 3);
    assert_int_equal(count(NULL, 0, ".*\\.(up|down)"), 6);
    assert_int_equal(count(NULL, 0, "layers\\.\\d+\\.(?:up)"), 3);
    assert_int_equal(count(NULL, 0, "layers\\.[01]\\.up"), 2);
    assert_int_equal(count(NULL, 0, "in"), 1); /* the whole name, not a part of it */
    assert_true(fsdp__lora_word_fits("b.c", "a.b.c"));
    assert_false(fsdp__lora_word_fits("c", "a.bc"));
    assert_false(fsdp__lora_word_fits("", "a"));
    assert_false(fsdp__lora_word_fits("a.b", "b"));
}

/* After a refusal nothing is changed. */
static void refuse(fsdp_module *m, const fsdp_lora_options *o, fsdp_status code, const char *text)
{
    int64_t before = fsdp_module_numel(m);
    assert_int_equal(fsdp_lora_apply(m, o), code);
    check_error(code, text);
    assert_int_equal(fsdp_module_numel(m), before);
    fsdp_param_list l;
    check_ok(fsdp_module_params(m, &l));
    for (int64_t i = 0; i < l.count; i++)
        assert_true(fsdp_param_requires_grad(l.items[i].param));
    fsdp_param_list_free(&l);
}

static void refuse_words(const char *const *words, int n, fsdp_status code, const char *text)
{
    net *m = make(2);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.target_modules = words;
    o.n_target_modules = n;
    refuse(&m->base, &o, code, text);
    fsdp_module_free(&m->base);
}

static void refuse_pattern(const char *pattern, fsdp_status code, const char *text)
{
    net *m = make(2);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.target_pattern = pattern;
    refuse(&m->base, &o, code, text);
    fsdp_module_free(&m->base);
}

static void test_mistakes(void **state)
{
    (void)state;
    refuse_words((const char *[]){"up", "q_proj"}, 2, FSDP_NOT_FOUND,
                 "no module is named 'q_proj'; linear layers here: in, up, down, head");
    refuse_words((const char *[]){"up", "norm"}, 2, FSDP_UNSUPPORTED,
                 "layers.0.norm too, a RMSNorm; expected linear layers: in, up, down, head.");
    refuse_pattern("nothing", FSDP_NOT_FOUND, "the pattern 'nothing' fits no module");
    refuse_pattern("(up", FSDP_INVALID_ARGUMENT, "the pattern '(up': ");
    refuse_pattern("(?!x)up", FSDP_UNSUPPORTED, "has '(?' at 1");
    refuse_pattern(".*?up", FSDP_UNSUPPORTED, "has '*?' at 2");
    refuse_pattern(".*", FSDP_UNSUPPORTED, "layers too, a ModuleList");
    net *m = make(1);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.rank = 0;
    refuse(&m->base, &o, FSDP_INVALID_ARGUMENT, "rank 0; expected 1 or more");
    o = fsdp_lora_defaults();
    o.dropout = 1.0;
    refuse(&m->base, &o, FSDP_INVALID_ARGUMENT, "dropout 1; expected 0 <= p < 1");
    o = fsdp_lora_defaults();
    o.alpha = NAN;
    refuse(&m->base, &o, FSDP_INVALID_ARGUMENT, "alpha nan");
    o = fsdp_lora_defaults();
    o.target_pattern = "x";
    o.target_modules = (const char *[]){"up"};
    o.n_target_modules = 1;
    refuse(&m->base, &o, FSDP_INVALID_ARGUMENT, "are both set");
    assert_int_equal(fsdp_lora_merge(&m->base), FSDP_INVALID_STATE);
    check_error(FSDP_INVALID_STATE, "has no adapters");
    assert_int_equal(fsdp_lora_reset(&m->base, 1), FSDP_INVALID_STATE);
    check_error(FSDP_INVALID_STATE, "call fsdp_lora_apply first");
    check_ok(fsdp_lora_apply(&m->base, NULL));
    assert_int_equal(fsdp_lora_apply(&m->base, NULL), FSDP_INVALID_STATE);
    check_error(FSDP_INVALID_STATE, "has an adapter already");
    fsdp_module_free(&m->base);
    assert_int_equal(fsdp_lora_apply(NULL, NULL), FSDP_INVALID_ARGUMENT);
    check_error(FSDP_INVALID_ARGUMENT, "the module");
}

/* Each allocation in turn fails: the layers are as before. */
static void test_no_memory(void **state)
{
    (void)state;
    net *m = make(2);
    int64_t before = fsdp_module_numel(&m->base), live = check_live();
    int failures = 0;
    for (int64_t k = 1;; k++, failures++) {
        fsdp__account_fail_nth(k);
        fsdp_status s = fsdp_lora_apply(&m->base, NULL);
        fsdp__account_fail_nth(0);
        if (s == FSDP_OK) break;
        fsdp_error_clear();
        assert_int_equal(fsdp_module_numel(&m->base), before);
        assert_int_equal(check_live(), live);
        assert_true(fsdp_param_requires_grad(fsdp_module_param(m->in, "weight")));
    }
    assert_int_equal(failures, 12); /* A and B beside six layers */
    fsdp_module_free(&m->base);
}

static fsdp_tensor *weight(fsdp_module *m, const char *child)
{
    fsdp_module *at = *child ? fsdp_module_find(m, child) : m;
    return fsdp_param_tensor(fsdp_module_param(at, "weight"));
}

static fsdp_module *linear(int in_out, fsdp_dtype t)
{
    fsdp_module *m = in_out ? fsdp_linear_in_out_create(9, 5, 1) : fsdp_linear_create(9, 5, 1);
    check_tensor(m);
    check_ok(fsdp_module_to_dtype(m, t));
    return m;
}

/* A layer that stands in a tree, so that its adapters have names. */
static fsdp_module *around(fsdp_module *layer)
{
    fsdp_module *s = fsdp_sequential_create();
    check_tensor(fsdp_module_add(s, "up", layer));
    return s;
}

static fsdp_lora_options small(int rslora)
{
    fsdp_lora_options o = fsdp_lora_defaults();
    o.rank = 4;
    o.alpha = 6.0;
    o.rslora = rslora;
    return o;
}

/* out = base + scale * B(A x); merged the same; gradients only for A and B. */
static void one_layer(int in_out, int rslora, fsdp_dtype t, double bound)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *layer = linear(in_out, t), *m = around(layer);
    fsdp_lora_options o = small(rslora);
    check_ok(fsdp_reset_parameters(m, 3));
    fsdp_tensor *x = fsdp_cast(fsdp_randn(FSDP_F32, 2, SIZES(6, 9), 1, "x"), t);
    fsdp_tensor *base = fsdp_call(m, x);
    check_ok(fsdp_lora_apply(m, &o));
    check_ok(fsdp_lora_reset(m, 3));
    fsdp_tensor *first = fsdp_call(m, x);
    check_tensor(first);
    assert_true(check_distance(first, base) == 0.0); /* B is zero */
    fsdp_tensor *a = weight(layer, "lora_A"), *b = weight(layer, "lora_B");
    check_ok(fsdp_copy_(b, fsdp_randn(FSDP_F32, 2, SIZES(5, 4), 7, "b")));
    double scale = rslora ? 6.0 / 2.0 : 6.0 / 4.0;
    fsdp_tensor *update = fsdp_linear(fsdp_linear(fsdp_cast(x, FSDP_F32), a), b);
    fsdp_tensor *expected = fsdp_add(fsdp_cast(base, FSDP_F32), fsdp_scale(update, scale));
    fsdp_tensor *y = fsdp_call(m, x);
    check_tensor(y);
    assert_int_equal(fsdp_tensor_dtype(y), t);
    assert_true(check_distance(fsdp_cast(y, FSDP_F32), expected) < bound);
    check_ok(fsdp_backward(fsdp_sum(fsdp_cast(y, FSDP_F32))));
    assert_null(fsdp_grad(weight(layer, "")));
    assert_null(fsdp_grad(fsdp_param_tensor(fsdp_module_param(layer, "bias"))));
    assert_non_null(fsdp_grad(a));
    assert_non_null(fsdp_grad(b));
    check_ok(fsdp_lora_merge(m));
    assert_true(fsdp_lora_merged(m));
    assert_true(check_distance(fsdp_cast(fsdp_call(m, x), FSDP_F32), expected) < bound);
    assert_int_equal(fsdp_lora_merge(m), FSDP_INVALID_STATE);
    check_error(FSDP_INVALID_STATE, "merged already");
    fsdp_module_free(m);
    fsdp_scope_end(scope);
}

static void test_one_layer(void **state)
{
    (void)state;
    for (int in_out = 0; in_out < 2; in_out++)
        for (int rslora = 0; rslora < 2; rslora++) {
            one_layer(in_out, rslora, FSDP_F32, 1e-6);
            one_layer(in_out, rslora, FSDP_BF16, 2e-2); /* adapters f32 beside a bf16 base */
        }
}

/* A is given dropped-out inputs in training, the same ones for the same step; not in evaluation. */
static void test_dropout(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *layer = linear(0, FSDP_F32), *m = around(layer);
    fsdp_lora_options o = small(0);
    o.dropout = 0.5;
    check_ok(fsdp_lora_apply(m, &o));
    check_ok(fsdp_reset_parameters(m, 3));
    check_ok(fsdp_fill_(weight(layer, "lora_B"), 1.0));
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(6, 9), 1, "x"), *y[3];
    for (int i = 0; i < 3; i++) {
        check_ok(fsdp_random_set(1, i == 2 ? 1 : 0, NULL, 0));
        y[i] = fsdp_call(m, x);
        check_tensor(y[i]);
    }
    assert_true(check_distance(y[0], y[1]) == 0.0);
    assert_true(check_distance(y[0], y[2]) > 1e-2);
    fsdp_module_train(m, 0);
    fsdp_tensor *z = fsdp_call(m, x);
    assert_true(check_distance(z, y[0]) > 1e-2);
    check_ok(fsdp_lora_merge(m));
    assert_true(check_distance(fsdp_call(m, x), z) < 1e-6);
    fsdp_module_free(m);
    fsdp_scope_end(scope);
}

/* Names of the base stay; on meta no byte is taken; values are a function of seed and name. */
static void test_parameters(void **state)
{
    (void)state;
    check_ok(fsdp_device_push(FSDP_META));
    net *n = make(2);
    check_ok(fsdp_device_pop());
    int64_t live = check_live(), numel = fsdp_module_numel(&n->base);
    fsdp_lora_options o = small(0);
    check_ok(fsdp_lora_apply(&n->base, &o));
    assert_int_equal(check_live(), live);
    int64_t in = NET_IN + NET_C, up = NET_C + NET_H, head = NET_C + 1;
    assert_int_equal(fsdp_module_numel(&n->base) - numel, 4 * (in + 4 * up + head));
    fsdp_module *layer = fsdp_module_find(&n->base, "layers.1.up");
    assert_non_null(fsdp_module_param(layer, "weight"));
    check_ok(fsdp_to_empty(&n->base, FSDP_CPU));
    check_ok(fsdp_reset_parameters(&n->base, 5));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *a = weight(layer, "lora_A"), *b = weight(layer, "lora_B");
    fsdp_tensor *w = fsdp_clone(weight(layer, "")), *once = fsdp_clone(a);
    double *v = check_values(a), most = 0;
    for (int64_t i = 0; i < fsdp_numel(a); i++)
        most = fmax(most, fabs(v[i]));
    free(v);
    assert_true(most <= 1 / sqrt(NET_C) && most > 0.9 / sqrt(NET_C));
    assert_true(fsdp_item(fsdp_sum(fsdp_mul(b, b))) == 0.0);
    check_ok(fsdp_fill_(b, 2.0));
    check_ok(fsdp_lora_reset(&n->base, 5));
    assert_true(check_distance(a, once) == 0.0 && check_distance(weight(layer, ""), w) == 0.0);
    assert_true(fsdp_item(fsdp_sum(fsdp_mul(b, b))) == 0.0);
    check_ok(fsdp_lora_reset(&n->base, 6));
    assert_true(check_distance(a, once) > 0.1);
    fsdp_scope_end(scope);
    char *text = fsdp_module_print(&n->base);
    assert_non_null(strstr(text, "lora_A: LoraA(17 -> 4, scale 1.5)"));
    assert_non_null(strstr(text, "frozen"));
    free(text);
    fsdp_module_free(&n->base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),     cmocka_unit_test(test_mistakes),
        cmocka_unit_test(test_no_memory), cmocka_unit_test(test_one_layer),
        cmocka_unit_test(test_dropout),   cmocka_unit_test(test_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
