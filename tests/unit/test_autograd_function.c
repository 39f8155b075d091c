/*
 * test_autograd_function.c - functions of one's own, and saved-tensor hooks.
 */
#include "tensor_check.h"

/* ---- functions ------------------------------------------------------------------ */

typedef struct log {
    int forward, backward, dropped, fail;
    unsigned wanted;
} log_t;

static int dropped;

/* out0 = a * b, out1 = a + 3; saves a and b. */
static fsdp_status forward(fsdp_function_context *c, fsdp_tensor **in, int n_in, fsdp_tensor **out,
                           int n_out)
{
    log_t *l = fsdp_function_arg(c);
    l->forward++;
    assert_int_equal(n_in, 2);
    assert_int_equal(n_out, 2);
    assert_false(fsdp_grad_enabled());
    if (l->fail == 1) return FSDP_INVALID_DATA;
    FSDP_TRY(fsdp_function_save(c, in[0]));
    FSDP_TRY(fsdp_function_save(c, in[1]));
    out[0] = fsdp_mul(in[0], in[1]);
    out[1] = fsdp_shift(in[0], 3);
    return FSDP_OK;
}

static fsdp_status backward(fsdp_function_context *c, fsdp_tensor **gout, int n_out,
                            fsdp_tensor **gin, int n_in)
{
    log_t *l = fsdp_function_arg(c);
    l->backward++;
    assert_int_equal(n_in, 2);
    assert_int_equal(n_out, 2);
    if (l->fail == 2) return FSDP_INVALID_DATA;
    fsdp_tensor *a = fsdp_function_saved(c, 0), *b = fsdp_function_saved(c, 1);
    l->wanted = (unsigned)fsdp_function_wants(c, 0) | (unsigned)fsdp_function_wants(c, 1) << 1;
    if (gout[0]) gin[0] = fsdp_mul(gout[0], b);
    if (gout[0]) gin[1] = fsdp_mul(gout[0], a);
    if (gout[1]) gin[0] = gin[0] ? fsdp_add(gin[0], gout[1]) : gout[1];
    if (l->fail == 3) gin[1] = fsdp_zeros(FSDP_F32, 1, SIZES(9));
    return FSDP_OK;
}

static void drop(void *arg)
{
    ((log_t *)arg)->dropped++;
    dropped++;
}

static const fsdp_function product = {"product", forward, backward, drop};

static void test_function(void **state)
{
    (void)state;
    for (int way = 0; way < 5; way++) {
        log_t l = {0, 0, 0, 0, 0};
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *a = fsdp_full(FSDP_F32, 1, SIZES(2), 3),
                    *b = fsdp_full(FSDP_F32, 1, SIZES(2), 5);
        if (way != 3) check_ok(fsdp_requires_grad_(a, 1));
        if (way != 2 && way != 3) check_ok(fsdp_requires_grad_(b, 1));
        fsdp_tensor *in[] = {a, b}, *out[2];
        fsdp_function copy = product;
        check_ok(fsdp_function_apply(&copy, &l, in, 2, out, 2));
        memset(&copy, 0, sizeof copy); /* may be gone by the backward */
        assert_true(fsdp_at(out[0], SIZES(1)) == 15 && fsdp_at(out[1], SIZES(1)) == 6);
        if (way == 0) check_ok(fsdp_backward(fsdp_sum(fsdp_add(out[0], out[1]))));
        if (way == 1) check_ok(fsdp_backward(fsdp_sum(out[1]))); /* no gradient of out[0] */
        if (way == 2) check_ok(fsdp_backward(fsdp_sum(out[0])));
        if (way == 0)
            assert_true(fsdp_at(fsdp_grad(a), SIZES(0)) == 6 &&
                        fsdp_at(fsdp_grad(b), SIZES(0)) == 3);
        if (way == 1) assert_true(fsdp_at(fsdp_grad(a), SIZES(0)) == 1 && !fsdp_grad(b));
        if (way == 2) assert_true(fsdp_at(fsdp_grad(a), SIZES(0)) == 5 && !fsdp_grad(b));
        if (way == 3) assert_false(fsdp_requires_grad(out[0]));
        if (way < 3) assert_int_equal(l.wanted, way == 2 ? 1 : 3);
        assert_int_equal(l.dropped, way == 3); /* no graph: dropped at once */
        fsdp_scope_end(scope);
        assert_int_equal(l.forward, 1);
        assert_int_equal(l.backward, way < 3);
        assert_int_equal(l.dropped, 1);
        assert_int_equal(check_live(), 0);
    }
}

static void test_function_errors(void **state)
{
    (void)state;
    for (int fail = 1; fail <= 3; fail++) {
        log_t l = {0, 0, 0, fail, 0};
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *a = fsdp_full(FSDP_F32, 1, SIZES(2), 3);
        check_ok(fsdp_requires_grad_(a, 1));
        fsdp_tensor *in[] = {a, a}, *out[2];
        fsdp_status s = fsdp_function_apply(&product, &l, in, 2, out, 2);
        if (fail == 1) {
            assert_int_equal(s, FSDP_INVALID_DATA);
            assert_true(!out[0] && !out[1]);
        } else {
            check_ok(s);
            assert_int_not_equal(fsdp_backward(fsdp_sum(out[0])), FSDP_OK);
        }
        check_error(fail == 3 ? FSDP_INVALID_SHAPE : FSDP_INVALID_DATA, "product");
        fsdp_scope_end(scope);
        assert_int_equal(l.dropped, 1);
        assert_true(fsdp_grad_enabled());
        assert_int_equal(check_live(), 0);
    }
    log_t l = {0, 0, 0, 0, 0};
    fsdp_tensor *in[9] = {NULL}, *out[9];
    assert_int_not_equal(fsdp_function_apply(&product, &l, in, 9, out, 1), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "at most 8");
    assert_int_equal(l.dropped, 1);
}

/* Hands its inputs through: the outputs are other tensors, the inputs stay leaves. */
static fsdp_status same(fsdp_function_context *c, fsdp_tensor **in, int n_in, fsdp_tensor **out,
                        int n_out)
{
    (void)c;
    (void)n_in;
    for (int k = 0; k < n_out; k++)
        out[k] = in[k];
    return FSDP_OK;
}

static fsdp_status same_back(fsdp_function_context *c, fsdp_tensor **gout, int n_out,
                             fsdp_tensor **gin, int n_in)
{
    (void)c;
    (void)n_in;
    for (int k = 0; k < n_out; k++)
        gin[k] = gout[k];
    return FSDP_OK;
}

static void test_identity(void **state)
{
    (void)state;
    const fsdp_function identity = {"identity", same, same_back, NULL};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *a = fsdp_full(FSDP_F32, 1, SIZES(2), 3), *b = fsdp_zeros(FSDP_F32, 1, SIZES(2));
    check_ok(fsdp_requires_grad_(a, 1));
    check_ok(fsdp_requires_grad_(b, 1));
    check_ok(fsdp_requires_grad_(b, 0));
    fsdp_tensor *in[] = {a, b, NULL}, *out[3];
    check_ok(fsdp_function_apply(&identity, NULL, in, 3, out, 2));
    assert_true(fsdp_is_leaf(a) && fsdp_is_leaf(b) && !fsdp_requires_grad(b));
    assert_true(out[0] != a && out[1] != b && fsdp_data(out[0]) == fsdp_data(a));
    check_ok(fsdp_backward(fsdp_sum(fsdp_add(out[0], out[1]))));
    assert_true(fsdp_at(fsdp_grad(a), SIZES(0)) == 1 && !fsdp_grad(b));
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* ---- saved tensors ------------------------------------------------------------------ */

typedef struct store {
    int packed, unpacked, dropped, alive;
    int refuse;
} store;

typedef struct parcel {
    store *s;
    fsdp_tensor *t;
} parcel;

/* Keeps a bf16 copy: a saved tensor may be stored in any form. */
static void *pack(void *arg, fsdp_tensor *t)
{
    store *s = arg;
    if (s->refuse == 1) return NULL;
    parcel *p = calloc(1, sizeof *p);
    assert_non_null(p);
    assert_false(fsdp_requires_grad(t));
    s->packed++;
    s->alive++;
    p->s = s;
    p->t = fsdp_retain(t);
    return p;
}

static fsdp_tensor *unpack(void *arg, void *packed)
{
    store *s = arg;
    s->unpacked++;
    return s->refuse == 2 ? NULL : fsdp_clone(((parcel *)packed)->t);
}

static void drop_parcel(void *arg, void *packed)
{
    store *s = arg;
    parcel *p = packed;
    assert_ptr_equal(p->s, s);
    s->dropped++;
    s->alive--;
    fsdp_release(p->t);
    free(p);
}

static void test_saved_hooks(void **state)
{
    (void)state;
    for (int way = 0; way < 4; way++) {
        store s = {0, 0, 0, 0, 0};
        const fsdp_saved_hooks h = {pack, unpack, drop_parcel, &s};
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(3), 2), *y;
        check_ok(fsdp_requires_grad_(x, 1));
        check_ok(fsdp_saved_hooks_push(&h));
        fsdp_tensor *g = fsdp_sigmoid(x);        /* saves its output: no cycle */
        y = fsdp_sum(fsdp_mul(g, fsdp_silu(x))); /* saves two and one */
        check_ok(fsdp_saved_hooks_pop());
        fsdp_tensor *z = fsdp_sum(fsdp_mul(x, x)); /* not while pushed */
        assert_true(s.packed == 4 && s.unpacked == 0 && s.dropped == 0);
        if (way == 1) check_ok(fsdp_backward(y));
        if (way == 2) {
            check_ok(fsdp_backward_from(y, fsdp_scalar(FSDP_F32, 1), 1));
            assert_true(s.unpacked == 4 && s.dropped == 0); /* kept with the graph */
            check_ok(fsdp_backward(y));
            assert_int_equal(s.unpacked, 8);
        }
        if (way == 3) {
            s.refuse = 2;
            assert_int_not_equal(fsdp_backward(y), FSDP_OK);
            check_error(FSDP_INVALID_STATE, "unpacked nothing");
        }
        if (way == 1) {
            assert_int_equal(s.unpacked, 4);
            assert_int_equal(s.dropped, 4);
            double e = 1 / (1 + exp(-2)),
                   expected = e * (1 - e) * 2 * e + e * (e + 2 * e * (1 - e));
            assert_true(fabs(fsdp_at(fsdp_grad(x), SIZES(1)) - expected) < 1e-6);
        }
        check_tensor(z);
        fsdp_scope_end(scope);
        assert_true(s.packed == 4 && s.dropped == 4 && s.alive == 0);
        assert_int_equal(check_live(), 0);
    }
    /* A hook that packs nothing ends the op. */
    store s = {0, 0, 0, 0, 1};
    const fsdp_saved_hooks h = {pack, unpack, drop_parcel, &s};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(3), 2);
    check_ok(fsdp_requires_grad_(x, 1));
    check_ok(fsdp_saved_hooks_push(&h));
    assert_null(fsdp_silu(x));
    check_error(FSDP_INVALID_STATE, "packed nothing");
    check_ok(fsdp_saved_hooks_pop());
    assert_int_not_equal(fsdp_saved_hooks_pop(), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "without a push");
    assert_int_not_equal(fsdp_saved_hooks_push(NULL), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "pack");
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* A chain of packed tensors is freed without recursion. */
static void test_deep_packed(void **state)
{
    (void)state;
    store s = {0, 0, 0, 0, 0};
    const fsdp_saved_hooks h = {pack, unpack, drop_parcel, &s};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_full(FSDP_F32, 1, SIZES(1), 1), *y;
    check_ok(fsdp_requires_grad_(x, 1));
    check_ok(fsdp_saved_hooks_push(&h));
    y = fsdp_scale(x, 1);
    for (int i = 0; i < 100000; i++)
        fsdp_set(&y, fsdp_silu(y));
    check_ok(fsdp_saved_hooks_pop());
    check_tensor(y);
    fsdp_set(&y, NULL);
    assert_int_equal(s.alive, 0);
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_function),    cmocka_unit_test(test_function_errors),
        cmocka_unit_test(test_identity),    cmocka_unit_test(test_saved_hooks),
        cmocka_unit_test(test_deep_packed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
