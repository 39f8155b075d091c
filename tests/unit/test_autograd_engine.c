/*
 * test_autograd_engine.c - the graph: accumulation, hooks, callbacks, how long
 * it lives, what is refused, and how much memory a loop keeps.
 */
#include "tensor_check.h"

static fsdp_tensor *leaf(double value, int64_t n)
{
    fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(n), value);
    check_ok(fsdp_requires_grad_(x, 1));
    return x;
}

static double grad_at(const fsdp_tensor *t, int64_t i)
{
    assert_non_null(fsdp_grad(t));
    return fsdp_at(fsdp_grad(t), SIZES(i));
}

static fsdp_scope *scope;

static int open_scope(void **state)
{
    (void)state;
    fsdp_error_clear();
    scope = fsdp_scope_begin();
    return scope ? 0 : -1;
}

static int close_scope(void **state)
{
    (void)state;
    fsdp_scope_end(scope);
    return check_live() == 0 && !fsdp_error() ? 0 : -1;
}

/* ---- accumulation ------------------------------------------------------------ */

static void test_accumulate(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(3, 2);
    assert_true(fsdp_is_leaf(x) && fsdp_requires_grad(x) && !fsdp_grad(x));
    for (int k = 1; k <= 3; k++) {
        check_ok(fsdp_backward(fsdp_sum(fsdp_mul(x, x))));
        assert_true(grad_at(x, 1) == 6.0 * k);
    }
    /* Used four times in one graph: by different ops, and by way of an inner tensor. */
    check_ok(fsdp_set_grad(x, NULL));
    fsdp_tensor *h = fsdp_scale(x, 2);
    fsdp_tensor *y = fsdp_add(fsdp_add(x, h), fsdp_add(fsdp_mul(h, x), h));
    check_ok(fsdp_backward(fsdp_sum(y))); /* x + 2x + 2x^2 + 2x: 5 + 4x */
    assert_true(grad_at(x, 0) == 17);
    /* A gradient of one's own, of a wider dtype, is added to. */
    fsdp_tensor *b = fsdp_full(FSDP_BF16, 1, SIZES(2), 1.0);
    check_ok(fsdp_requires_grad_(b, 1));
    check_ok(fsdp_set_grad(b, fsdp_full(FSDP_F32, 1, SIZES(2), 0.0009765625)));
    check_ok(fsdp_backward(fsdp_sum(fsdp_scale(b, 2))));
    assert_int_equal(fsdp_tensor_dtype(fsdp_grad(b)), FSDP_F32);
    assert_true(grad_at(b, 1) == 2.0009765625);
    assert_int_equal(fsdp_set_grad(x, fsdp_zeros(FSDP_F32, 1, SIZES(3))), FSDP_INVALID_SHAPE);
    check_error(FSDP_INVALID_SHAPE, "(3)");
    assert_int_not_equal(fsdp_set_grad(y, fsdp_zeros(FSDP_F32, 1, SIZES(2))), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "leaves");
    /* Straight from a leaf. */
    check_ok(fsdp_set_grad(x, NULL));
    check_ok(fsdp_backward_from(x, fsdp_full(FSDP_F32, 1, SIZES(2), 5), 0));
    assert_true(grad_at(x, 0) == 5);
}

/* A gradient that is handed on without a copy is not written to behind anyone's back. */
static void test_shared_gradients(void **state)
{
    (void)state;
    fsdp_tensor *a = leaf(1, 3), *b = leaf(2, 3);
    fsdp_tensor *s = fsdp_add(a, b);                         /* the same gradient to both */
    fsdp_tensor *h = fsdp_add(fsdp_clone(s), fsdp_clone(s)); /* and to two clones */
    fsdp_tensor *g = fsdp_full(FSDP_F32, 1, SIZES(3), 4);
    check_ok(fsdp_backward_from(fsdp_add(h, fsdp_scale(h, 1)), g, 0));
    assert_true(grad_at(a, 0) == 16 && grad_at(b, 2) == 16);
    assert_true(fsdp_at(g, SIZES(1)) == 4);
    check_ok(fsdp_fill_(fsdp_grad(a), 0));
    assert_true(grad_at(b, 0) == 16);
}

/* ---- hooks ----------------------------------------------------------------------- */

typedef struct note {
    char text[256];
    double seen;
} note;

static fsdp_tensor *twice(void *arg, fsdp_tensor *g)
{
    note *n = arg;
    n->seen = fsdp_at(g, SIZES(0));
    strcat(n->text, "t");
    return fsdp_scale(g, 2);
}

static fsdp_tensor *watch(void *arg, fsdp_tensor *g)
{
    note *n = arg;
    n->seen = fsdp_at(g, SIZES(0));
    strcat(n->text, "w");
    assert_true(fsdp_in_backward());
    return NULL;
}

static fsdp_tensor *other_shape(void *arg, fsdp_tensor *g)
{
    (void)arg;
    (void)g;
    return fsdp_zeros(FSDP_F32, 1, SIZES(7));
}

static fsdp_tensor *other_dtype(void *arg, fsdp_tensor *g)
{
    (void)arg;
    return fsdp_cast(g, FSDP_F64);
}

static fsdp_tensor *fail_hook(void *arg, fsdp_tensor *g)
{
    (void)arg;
    (void)g;
    fsdp__fail(FSDP_INVALID_DATA, "the hook gave up");
    return NULL;
}

static fsdp_status accumulated(void *arg, fsdp_tensor *t)
{
    note *n = arg;
    n->seen = grad_at(t, 0);
    strcat(n->text, "a");
    return FSDP_OK;
}

static void test_hooks(void **state)
{
    (void)state;
    note n = {"", 0}, in_order = {"", 0};
    fsdp_tensor *x = leaf(3, 2), *h = fsdp_scale(x, 5);
    check_ok(fsdp_register_hook(h, twice, &n));
    check_ok(fsdp_register_hook(h, watch, &n));
    check_ok(fsdp_register_post_accumulate_hook(x, accumulated, &n));
    check_ok(fsdp_backward(fsdp_sum(fsdp_mul(h, h)))); /* 2h = 30, doubled, times 5 */
    assert_string_equal(n.text, "twa");
    assert_true(grad_at(x, 0) == 300 && n.seen == 300);
    /* On a leaf: with the whole gradient of this backward, before it is added. */
    check_ok(fsdp_register_hook(x, twice, &in_order));
    check_ok(fsdp_backward(fsdp_sum(fsdp_add(fsdp_scale(x, 1), fsdp_mul(x, x)))));
    assert_string_equal(in_order.text, "t");
    assert_true(in_order.seen == 7);
    assert_true(grad_at(x, 0) == 314);
    assert_true(n.seen == 314);
    /* A post-accumulate hook is called once a backward, and not when nothing came. */
    fsdp_tensor *z = leaf(1, 1);
    check_ok(fsdp_register_post_accumulate_hook(z, accumulated, &in_order));
    check_ok(fsdp_backward(fsdp_sum(fsdp_mul(fsdp_add(z, z), z))));
    assert_string_equal(in_order.text, "ta");
    check_ok(fsdp_backward(fsdp_sum(x)));
    assert_string_equal(in_order.text, "tat");
    /* From a leaf with a hook. */
    check_ok(fsdp_set_grad(x, NULL));
    check_ok(fsdp_backward_from(x, fsdp_full(FSDP_F32, 1, SIZES(2), 1), 0));
    assert_true(grad_at(x, 0) == 2);
    /* Refused. */
    fsdp_tensor *plain = fsdp_zeros(FSDP_F32, 1, SIZES(2));
    assert_int_not_equal(fsdp_register_hook(plain, watch, &n), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "requires no gradient");
    assert_int_not_equal(fsdp_register_post_accumulate_hook(h, accumulated, &n), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "leaves");
    fsdp_tensor *bad = fsdp_scale(x, 1);
    check_ok(fsdp_register_hook(bad, other_shape, NULL));
    assert_int_not_equal(fsdp_backward(fsdp_sum(bad)), FSDP_OK);
    check_error(FSDP_INVALID_SHAPE, "(7)");
    bad = fsdp_scale(x, 1);
    check_ok(fsdp_register_hook(bad, other_dtype, NULL));
    assert_int_not_equal(fsdp_backward(fsdp_sum(bad)), FSDP_OK);
    check_error(FSDP_INVALID_DTYPE, "f64");
    /* Kernels read gradient and saved inputs as one dtype. */
    fsdp_backward_from(fsdp_exp(x), fsdp_full(FSDP_F64, 1, SIZES(2), 1), 0);
    check_error(FSDP_INVALID_DTYPE, "f64 (2)");
    check_ok(fsdp_device_push(FSDP_META));
    fsdp_tensor *shape = fsdp_zeros(FSDP_F32, 1, SIZES(2));
    check_ok(fsdp_device_pop());
    fsdp_backward_from(fsdp_exp(x), shape, 0);
    check_error(FSDP_INVALID_STATE, "meta");
    fsdp_set_grad(x, shape);
    check_error(FSDP_INVALID_ARGUMENT, "on meta");
    bad = fsdp_scale(x, 1);
    check_ok(fsdp_register_hook(bad, fail_hook, NULL));
    assert_int_equal(fsdp_backward(fsdp_sum(bad)), FSDP_INVALID_DATA);
    check_error(FSDP_INVALID_DATA, "gave up");
    assert_true(!fsdp_in_backward() && fsdp_grad_enabled());
    check_ok(fsdp_backward(fsdp_sum(z))); /* and the engine works on */
}

static note callbacks;

static fsdp_status second(void *arg)
{
    strcat(callbacks.text, arg);
    return FSDP_OK;
}

static fsdp_status first(void *arg)
{
    strcat(callbacks.text, arg);
    return fsdp_queue_callback(second, "c"); /* one may queue another */
}

static fsdp_tensor *queue(void *arg, fsdp_tensor *g)
{
    (void)arg;
    (void)g;
    fsdp_queue_callback(first, "a");
    fsdp_queue_callback(second, "b");
    return NULL;
}

static void test_callbacks(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(1, 1), *y = fsdp_scale(x, 2);
    check_ok(fsdp_register_hook(y, queue, NULL));
    check_ok(fsdp_register_post_accumulate_hook(x, accumulated, &callbacks));
    check_ok(fsdp_backward(fsdp_sum(y)));
    assert_string_equal(callbacks.text, "aabc"); /* the leaf first */
    assert_int_not_equal(fsdp_queue_callback(second, "d"), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "outside a backward");
}

/* ---- how long a graph lives --------------------------------------------------------- */

static void test_retain_graph(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(3, 1), *y = fsdp_sum(fsdp_mul(x, x)), *one = fsdp_scalar(FSDP_F32, 1);
    check_ok(fsdp_backward_from(y, one, 1));
    check_ok(fsdp_backward_from(y, one, 1));
    check_ok(fsdp_backward_from(y, one, 0));
    assert_true(grad_at(x, 0) == 18);
    assert_int_not_equal(fsdp_backward_from(y, one, 0), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "freed by an earlier backward");
    assert_true(grad_at(x, 0) == 18);
    /* Part of a graph that is gone. */
    fsdp_tensor *h = fsdp_exp(x), *a = fsdp_sum(h), *b = fsdp_sum(fsdp_mul(h, h));
    check_ok(fsdp_backward(a));
    assert_int_not_equal(fsdp_backward(b), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "exp");
}

static void test_in_place(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(3, 4), *h = fsdp_scale(x, 1), *y = fsdp_sum(fsdp_mul(h, h));
    check_ok(fsdp_fill_(h, 1));
    assert_int_not_equal(fsdp_backward(y), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "changed in place");
    /* By way of a view, too; what backward does not look at may change. */
    h = fsdp_scale(x, 1);
    y = fsdp_sum(fsdp_exp(h));
    check_ok(fsdp_fill_(fsdp_slice(fsdp_detach(h), 0, 1, 2), 1));
    fsdp_error_clear();
    h = fsdp_scale(x, 1);
    y = fsdp_sum(fsdp_add(h, h));
    check_ok(fsdp_fill_(h, 1));
    check_ok(fsdp_backward(y));
    h = fsdp_scale(x, 1);
    y = fsdp_sum(fsdp_silu(h));
    fsdp_touch(fsdp_slice(h, 0, 0, 1));
    assert_int_not_equal(fsdp_backward(y), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "silu");
}

static void test_deep(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(1, 1);
    for (int ways = 0; ways < 3; ways++) {
        fsdp_tensor *h = fsdp_scale(x, 1);
        for (int i = 0; i < 100000; i++)
            fsdp_set(&h, i % 2 ? fsdp_mul(h, x) : fsdp_shift(h, 0));
        check_tensor(h);
        check_ok(fsdp_set_grad(x, NULL));
        if (ways == 0) check_ok(fsdp_backward(fsdp_sum(h)));
        if (ways == 0) assert_true(grad_at(x, 0) == 50001);
        if (ways == 1) fsdp_set(&h, NULL); /* freed unused */
        if (ways == 2) { /* or with its scope, the last first or the first first */
            fsdp_scope *inner = fsdp_scope_begin();
            fsdp_tensor *k = x;
            for (int i = 0; i < 100000; i++)
                k = fsdp_shift(k, 0);
            check_tensor(k);
            fsdp_scope_end(inner);
        }
    }
}

/* ---- memory ----------------------------------------------------------------------------- */

static void test_flat(void **state)
{
    (void)state;
    fsdp_tensor *w = leaf(0.5, 1000);
    int64_t live = 0;
    for (int step = 0; step < 1000; step++) {
        fsdp_scope *inner = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(1000), step);
        fsdp_tensor *h = fsdp_tanh(fsdp_mul(x, w));
        fsdp_tensor *kept = fsdp_mul(h, fsdp_sigmoid(h));
        if (step % 3 == 0) { /* a graph that no backward walks */
            check_tensor(kept);
        } else {
            check_ok(fsdp_backward(fsdp_mean(kept)));
        }
        fsdp_scope_end(inner);
        if (step == 1) live = check_live();
        if (step > 1) assert_int_equal(check_live(), live);
    }
    assert_int_equal(live, 8000); /* the leaf and its gradient */
}

/* Backward gives activations back as it goes: what it needs beside is constant. */
static void test_peak(void **state)
{
    (void)state;
    int64_t peak[2];
    for (int k = 0; k < 2; k++) {
        fsdp_tensor *w = leaf(0.5, 1000), *h = fsdp_scale(w, 1);
        for (int i = 0; i < 10 * (k + 1); i++)
            fsdp_set(&h, fsdp_silu(h));
        fsdp_memory_stats before, after;
        fsdp_memory_reset_peak();
        fsdp_memory_get(&before);
        check_ok(fsdp_backward(fsdp_sum(h)));
        fsdp_memory_get(&after);
        peak[k] = after.peak_total - before.live_total;
    }
    assert_int_equal(peak[0], peak[1]);
    assert_true(peak[0] <= 4 * 4000 + 64);
}

/* ---- modes and errors ---------------------------------------------------------------------- */

static void test_no_grad(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(1, 1);
    fsdp_no_grad_begin();
    fsdp_no_grad_begin();
    fsdp_no_grad_end();
    fsdp_tensor *y = fsdp_scale(x, 2);
    assert_true(!fsdp_grad_enabled() && !fsdp_requires_grad(y) && fsdp_is_leaf(y));
    fsdp_no_grad_end();
    assert_true(fsdp_grad_enabled());
    assert_int_not_equal(fsdp_backward(y), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "requires a gradient");
    /* A detached tensor shares the numbers and no history. */
    fsdp_tensor *z = fsdp_scale(x, 2), *d = fsdp_detach(z);
    assert_true(fsdp_data(d) == fsdp_data(z) && !fsdp_requires_grad(d));
    assert_int_not_equal(fsdp_requires_grad_(z, 0), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "scale");
    assert_int_not_equal(fsdp_requires_grad_(fsdp_zeros(FSDP_I64, 1, SIZES(1)), 1), FSDP_OK);
    check_error(FSDP_INVALID_DTYPE, "i64");
    fsdp_no_grad_end(); /* one too many does no harm */
    assert_true(fsdp_grad_enabled());
}

static void test_errors(void **state)
{
    (void)state;
    fsdp_tensor *a = fsdp_zeros(FSDP_F32, 2, SIZES(2, 3)),
                *b = fsdp_zeros(FSDP_F32, 2, SIZES(4, 5));
    fsdp_tensor *x = leaf(1, 1);
    /* The first error wins, and an expression is checked once, at its end. */
    fsdp_tensor *y = fsdp_sum(fsdp_matmul(fsdp_add(a, b), b));
    assert_null(y);
    assert_int_equal(fsdp_backward(y), FSDP_INVALID_SHAPE);
    assert_null(fsdp_scale(x, 2)); /* nothing runs while an error is kept */
    check_error(FSDP_INVALID_SHAPE, "add: shapes (2, 3) and (4, 5)");
#define REFUSED(code, expression, words) \
    do {                                 \
        assert_null(expression);         \
        check_error(code, words);        \
    } while (0)
    fsdp_tensor *h = fsdp_zeros(FSDP_BF16, 2, SIZES(2, 3)), *i = fsdp_zeros(FSDP_I64, 1, SIZES(2));
    REFUSED(FSDP_INVALID_SHAPE, fsdp_linear(a, b), "f32 (2, 3) cpu and f32 (4, 5) cpu");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_matmul(a, b), "(4, 5)");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_reshape(a, 1, SIZES(5)), "(2, 3) has 6 elements");
    REFUSED(FSDP_INVALID_DTYPE, fsdp_add(a, h), "bf16");
    REFUSED(FSDP_INVALID_DTYPE, fsdp_exp(i), "i64");
    REFUSED(FSDP_INVALID_ARGUMENT, fsdp_transpose(a, 0, 2), "dim 2");
    REFUSED(FSDP_INVALID_ARGUMENT, fsdp_slice(a, 0, 1, 3), "[1, 3)");
    REFUSED(FSDP_INVALID_ARGUMENT, fsdp_sum_dim(a, 2, 0), "2 dims");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_swiglu(a, b), "(4, 5)");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_mse_loss(a, b, FSDP_REDUCE_SUM), "(4, 5)");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_rms_norm(a, x, 1e-5), "(2, 3)");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_cross_entropy(b, i, -100, FSDP_REDUCE_SUM), "(4, 5)");
    REFUSED(FSDP_INVALID_ARGUMENT, fsdp_dropout(a, 1.0), "probability 1");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_cat((fsdp_tensor *[]){a, b}, 2, 0), "(4, 5)");
    REFUSED(FSDP_INVALID_ARGUMENT, fsdp_cat(NULL, 0, 0), "0 tensors");
    REFUSED(FSDP_INVALID_DTYPE, fsdp_cast(a, (fsdp_dtype)99), "99");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_attention(a, a, a, NULL), "(B,T,H,D)");
    REFUSED(FSDP_INVALID_SHAPE, fsdp_rotary(a, a, a), "(B, T, H, D)");
    REFUSED(FSDP_INVALID_ARGUMENT, fsdp_add(a, NULL), "input 1 is NULL");
    assert_null(fsdp_reshape(NULL, 1, SIZES(3)));
    fsdp_error_clear();
    assert_int_not_equal(fsdp_backward(a), FSDP_OK);
    check_error(FSDP_INVALID_SHAPE, "6 elements");
    assert_int_not_equal(fsdp_backward(NULL), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    assert_int_not_equal(fsdp_backward_from(fsdp_scale(x, 1), a, 0), FSDP_OK);
    check_error(FSDP_INVALID_SHAPE, "(2, 3)");
}

/* Over the limit of memory an op says what asked; everything is given back. */
static void test_no_memory(void **state)
{
    (void)state;
    fsdp_tensor *x = leaf(1, 1000);
    for (int64_t limit = 4000; limit < 40000; limit += 1000) {
        fsdp_scope *inner = fsdp_scope_begin();
        check_ok(fsdp_memory_set_limit(limit));
        fsdp_status s = fsdp_backward(fsdp_sum(fsdp_mul(fsdp_silu(x), fsdp_exp(x))));
        if (s != FSDP_OK) check_error(FSDP_NO_MEMORY, "activations");
        check_ok(fsdp_memory_set_limit(0));
        fsdp_scope_end(inner);
        check_ok(fsdp_set_grad(x, NULL));
        assert_int_equal(check_live(), 4000);
    }
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, open_scope, close_scope)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(test_accumulate),   CASE(test_shared_gradients),
        CASE(test_hooks),        CASE(test_callbacks),
        CASE(test_retain_graph), CASE(test_in_place),
        CASE(test_deep),         CASE(test_flat),
        CASE(test_peak),         CASE(test_no_grad),
        CASE(test_errors),       CASE(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
