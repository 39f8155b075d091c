/*
 * test_autograd_recompute.c - checkpoints change no bit, hold only what they say, run again once
 * and no further than needed, and say what differs.
 */
#include "base/context.h"
#include "tensor_check.h"

enum { ROWS = 6, C = 5, H = 9, N_WEIGHTS = 3 };

/* Two layers with dropout: x (ROWS,C) -> y (ROWS,C), z (ROWS,H). */
typedef struct layer {
    fsdp_tensor *w1, *w2, *w3;
    int calls, finished, dropped;
    int shape_at, dtype_at, less_at, more_at, fail_at,
        other_at; /* in that call something is wrong */
    const fsdp_checkpoint_options *o;
    int inside; /* a checkpoint around the second half as well */
} layer;

static fsdp_status second(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out, int n_out)
{
    layer *l = arg;
    (void)n_in;
    (void)n_out;
    out[0] = fsdp_linear(fsdp_dropout(fsdp_gelu(in[0]), 0.3), l->w2);
    return fsdp_error();
}

static fsdp_status first(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out, int n_out)
{
    layer *l = arg;
    (void)n_in;
    int call = ++l->calls;
    fsdp_tensor *x = in[0];
    if (call == l->fail_at) return fsdp__fail(FSDP_INVALID_DATA, "not today");
    if (call == l->shape_at) x = fsdp_slice(x, 0, 0, ROWS - 2);
    if (call == l->dtype_at) x = fsdp_cast(fsdp_cast(x, FSDP_F64), FSDP_F32);
    if (call == l->more_at) x = fsdp_mul(x, x);
    fsdp_tensor *h = fsdp_linear(fsdp_dropout(x, 0.25), l->w1); /* (ROWS,H) */
    fsdp_tensor *a = call == l->less_at ? h : call == l->other_at ? fsdp_silu(h) : fsdp_gelu(h);
    fsdp_tensor *y = NULL;
    if (l->inside) {
        if (fsdp_checkpoint(second, l, NULL, &a, 1, &y, 1, l->o) != FSDP_OK) return fsdp_error();
    } else if (second(l, &a, 1, &y, 1) != FSDP_OK) {
        return fsdp_error();
    }
    out[0] = fsdp_add(fsdp_linear(fsdp_tanh(y), l->w3), in[0]);
    if (n_out > 1) out[1] = fsdp_mul(a, a);
    if (fsdp_error()) return fsdp_error();
    l->finished++;
    return FSDP_OK;
}

static void dropped(void *arg)
{
    ((layer *)arg)->dropped++;
}

static void make(layer *l)
{
    *l = (layer){.w1 = fsdp_randn(FSDP_F32, 2, SIZES(H, C), 1, "w1"),
                 .w2 = fsdp_randn(FSDP_F32, 2, SIZES(C, H), 1, "w2"),
                 .w3 = fsdp_randn(FSDP_F32, 2, SIZES(C, C), 1, "w3")};
    check_ok(fsdp_requires_grad_(l->w1, 1));
    check_ok(fsdp_requires_grad_(l->w2, 1));
    check_ok(fsdp_requires_grad_(l->w3, 1));
    check_ok(fsdp_random_set(7, 3, NULL, 0));
}

static fsdp_tensor *input(int grad, const char *name)
{
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(ROWS, C), 2, name);
    check_ok(fsdp_requires_grad_(x, grad));
    return x;
}

static fsdp_tensor *loss_of(fsdp_tensor **out)
{
    return fsdp_add(fsdp_sum(fsdp_mul(out[0], out[0])), fsdp_sum(out[1]));
}

static void same_grads(const layer *a, const layer *b, int count)
{
    fsdp_tensor *const x[] = {a->w1, a->w2, a->w3}, *const y[] = {b->w1, b->w2, b->w3};
    for (int k = 0; k < count; k++)
        if (!check_same_bits(fsdp_grad(x[k]), fsdp_grad(y[k])))
            fail_msg("gradient of weight %d differs by %g", k,
                     check_distance(fsdp_grad(x[k]), fsdp_grad(y[k])));
}

/* ---- the same bits ------------------------------------------------------------ */

static int keep_linears(void *arg, const fsdp_checkpoint_op *op)
{
    int *asked = arg;
    if (asked) ++*asked;
    assert_true(op->bytes > 0 && (op->flops > 0) == !strcmp(op->name, "linear"));
    return !strcmp(op->name, "linear") && op->call % 2 == 0;
}

static int keep_all(void *arg, const fsdp_checkpoint_op *op)
{
    (void)arg;
    (void)op;
    return 1;
}

static void test_same_bits(void **state)
{
    (void)state;
    const fsdp_checkpoint_options ways[] = {{NULL, NULL, 0, NULL},
                                            {NULL, NULL, 1, NULL},
                                            {keep_linears, NULL, 0, NULL},
                                            {keep_linears, NULL, 1, NULL},
                                            {keep_all, NULL, 0, NULL}};
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
        for (int inside = 0; inside < 2; inside++)
            for (int grad = 0; grad < 2; grad++) {
                fsdp_scope *scope = fsdp_scope_begin();
                layer a, b;
                make(&b);
                fsdp_tensor *xb = input(grad, "x"), *out[2];
                check_ok(first(&b, &xb, 1, out, 2));
                check_ok(fsdp_backward(loss_of(out)));
                make(&a);
                a.o = &ways[w];
                a.inside = inside;
                fsdp_tensor *xa = input(grad, "x"), *again[2];
                check_ok(fsdp_checkpoint(first, &a, dropped, &xa, 1, again, 2, a.o));
                assert_true(check_same_bits(out[0], again[0]) && check_same_bits(out[1], again[1]));
                assert_true(a.calls == 1 && a.dropped == 0);
                check_ok(fsdp_backward(loss_of(again)));
                assert_int_equal(a.calls, 2);
                assert_int_equal(a.finished, ways[w].no_early_stop ? 2 : 1);
                same_grads(&a, &b, N_WEIGHTS);
                if (grad) assert_true(check_same_bits(fsdp_grad(xa), fsdp_grad(xb)));
                assert_int_equal(a.dropped, 1); /* with the last saved tensor, not with the scope */
                fsdp_scope_end(scope);
                assert_int_equal(a.dropped, 1);
                assert_int_equal(check_live(), 0);
            }
}

/* ---- without a graph ------------------------------------------------------------- */

static void test_no_grad(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    layer l;
    make(&l);
    fsdp_tensor *x = input(0, "x"), *out[2];
    fsdp_no_grad_begin();
    check_ok(fsdp_checkpoint(first, &l, dropped, &x, 1, out, 2, NULL));
    fsdp_no_grad_end();
    assert_true(l.calls == 1 && l.dropped == 1 && !fsdp_requires_grad(out[0]));
    /* With gradients on and nothing that needs one the frame goes at once. */
    check_ok(fsdp_requires_grad_(l.w1, 0));
    check_ok(fsdp_requires_grad_(l.w2, 0));
    check_ok(fsdp_requires_grad_(l.w3, 0));
    check_ok(fsdp_checkpoint(first, &l, dropped, &x, 1, out, 2, NULL));
    assert_true(l.calls == 2 && l.dropped == 2 && !fsdp_requires_grad(out[0]));
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* ---- several backwards, several forwards -------------------------------------------- */

static void test_retain_graph(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    layer a, b;
    make(&b);
    fsdp_tensor *xb = input(1, "x"), *xa = input(1, "x"), *out[2];
    check_ok(first(&b, &xb, 1, out, 2));
    fsdp_tensor *loss = loss_of(out), *one = fsdp_full(FSDP_F32, 0, NULL, 1);
    check_ok(fsdp_backward_from(loss, one, 1));
    check_ok(fsdp_backward_from(loss, one, 0));
    make(&a);
    check_ok(fsdp_checkpoint(first, &a, dropped, &xa, 1, out, 2, NULL));
    loss = loss_of(out);
    check_ok(fsdp_backward_from(loss, one, 1));
    assert_true(a.calls == 2 && a.dropped == 0);
    check_ok(fsdp_backward_from(loss, one, 0));
    assert_true(a.calls == 3 && a.dropped == 1);
    same_grads(&a, &b, N_WEIGHTS);
    assert_true(check_same_bits(fsdp_grad(xa), fsdp_grad(xb)));
    assert_int_not_equal(fsdp_backward_from(loss, one, 0), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "retain_graph");
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* Two outputs, a backward from each: the second recomputes what it needs by itself. */
static void test_two_backwards(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    layer a, b;
    fsdp_tensor *x[2], *out[2];
    for (int k = 0; k < 2; k++) {
        layer *l = k ? &b : &a;
        make(l);
        x[k] = input(1, "x");
        check_ok(k ? first(l, &x[k], 1, out, 2)
                   : fsdp_checkpoint(first, l, dropped, &x[k], 1, out, 2, NULL));
        fsdp_tensor *one = fsdp_full(FSDP_F32, 0, NULL, 1);
        check_ok(fsdp_backward_from(fsdp_sum(out[1]), one, 1));
        check_ok(fsdp_backward_from(fsdp_sum(out[0]), one, 0));
    }
    assert_int_equal(a.calls, 3);
    same_grads(&a, &b, N_WEIGHTS);
    assert_true(check_same_bits(fsdp_grad(x[0]), fsdp_grad(x[1])));
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* Two forwards under other samples and steps, then one backward: each draws its own masks again. */
static void test_two_forwards(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    layer l[2];
    const uint64_t ids[2][ROWS] = {{4, 8, 15, 16, 23, 42}, {3, 1, 4, 15, 9, 2}};
    for (int k = 0; k < 2; k++) {
        make(&l[k]);
        fsdp_tensor *total = NULL;
        for (int f = 0; f < 2; f++) {
            fsdp_tensor *x = input(0, f ? "x" : "y"), *out[2];
            check_ok(fsdp_random_set(9, (uint64_t)f, ids[f], ROWS));
            check_ok(k ? first(&l[k], &x, 1, out, 2)
                       : fsdp_checkpoint(first, &l[k], NULL, &x, 1, out, 2, NULL));
            total = total ? fsdp_add(total, loss_of(out)) : loss_of(out);
        }
        check_ok(fsdp_random_set(1, 1, NULL, 0));
        check_ok(fsdp_backward(total));
        assert_int_equal(l[k].calls, k ? 2 : 4);
    }
    same_grads(&l[0], &l[1], N_WEIGHTS);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* ---- memory ------------------------------------------------------------------------------ */

enum { BLOCKS = 8 };

/* A stack of `blocks`, each a checkpoint if `on`; peak and live bytes of activations. */
static void stack(int blocks, int on, const fsdp_checkpoint_options *o, int64_t *live,
                  int64_t *peak)
{
    fsdp_scope *scope = fsdp_scope_begin();
    layer l;
    make(&l);
    int64_t before = check_live();
    fsdp_tensor *x = input(1, "x");
    fsdp_memory_stats m;
    fsdp_memory_reset_peak();
    for (int k = 0; k < blocks; k++) {
        fsdp_scope *inner = fsdp_scope_begin();
        fsdp_tensor *out[1];
        check_ok(on ? fsdp_checkpoint(first, &l, NULL, &x, 1, out, 1, o)
                    : first(&l, &x, 1, out, 1));
        fsdp_scope_keep(out[0]);
        fsdp_scope_end(inner);
        if (k > 0)
            fsdp_set(&x, out[0]);
        else
            x = out[0];
    }
    *live = check_live() - before;
    check_ok(fsdp_backward(fsdp_sum(x)));
    fsdp_memory_get(&m);
    *peak = m.peak[FSDP_ACTIVATIONS];
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

static void test_memory(void **state)
{
    (void)state;
    int64_t x = ROWS * C * 4, live[2], none[2], peak[2];
    fsdp_checkpoint_report report = {0};
    const fsdp_checkpoint_options o = {.report = &report}, kept = {keep_linears, NULL, 0, &report};
    stack(BLOCKS, 0, NULL, &none[0], &peak[0]);
    stack(BLOCKS, 1, &o, &live[0], &peak[0]);
    stack(2 * BLOCKS, 1, &o, &live[1], &peak[1]);
    assert_int_equal(live[0], (BLOCKS + 1) * x); /* the inputs of blocks, and the output */
    assert_true(none[0] > 3 * live[0]);
    /* One block's recomputed tensors at a time: the peak grows by inputs alone. */
    assert_int_equal(peak[1] - peak[0], BLOCKS * x);
    assert_int_equal(report.forwards, 3 * BLOCKS);
    assert_int_equal(report.recomputations, 3 * BLOCKS);
    /* What a graph without checkpoint holds is what is recomputed. Weights are activations in this
     * test; x itself, which no block saves, and the output are held either way. */
    int64_t weights = (2 * H * C + C * C) * 4;
    assert_int_equal(none[0], BLOCKS * (report.saved_bytes - weights) + 2 * x);
    assert_int_equal(report.input_bytes, x);
    double full = report.recomputed_flops / (3 * BLOCKS), all = report.flops / (3 * BLOCKS);
    assert_true(full > 0 && full < all); /* the last linear's output is not needed: not run */
    assert_true(all - full == 2.0 * ROWS * C * C);
    report = (fsdp_checkpoint_report){0};
    stack(BLOCKS, 1, &kept, &live[1], &peak[1]);
    /* Of three linears the first and the third were named; what is behind the last that backward
     * needs is let go. */
    assert_int_equal(report.kept_bytes, ROWS * H * 4);
    assert_int_equal(live[1], live[0] + BLOCKS * report.kept_bytes);
    assert_true(report.recomputed_flops / BLOCKS == full - 2.0 * ROWS * C * H);
}

/* Bits are the first run's with retain_graph as well, and then too one block is alive at a time. */
static void test_memory_retained(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    layer l;
    make(&l);
    fsdp_tensor *x = input(1, "x"), *one = fsdp_full(FSDP_F32, 0, NULL, 1);
    fsdp_tensor *out[1] = {x};
    for (int k = 0; k < BLOCKS; k++) {
        fsdp_tensor *in = out[0];
        check_ok(fsdp_checkpoint(first, &l, NULL, &in, 1, out, 1, NULL));
    }
    fsdp_tensor *loss = fsdp_sum(out[0]);
    check_ok(fsdp_backward_from(loss, one, 1)); /* makes the gradients */
    int64_t live = check_live();
    fsdp_memory_reset_peak();
    check_ok(fsdp_backward_from(loss, one, 1));
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    assert_int_equal(check_live(), live);
    assert_true(m.peak[FSDP_ACTIVATIONS] - m.live[FSDP_ACTIVATIONS] < 16 * ROWS * H * 4);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* ---- what is wrong ---------------------------------------------------------------------- */

static void test_errors(void **state)
{
    (void)state;
    const fsdp_checkpoint_options whole = {.no_early_stop = 1};
    const struct {
        layer l;
        int whole;
        fsdp_status code;
        const char *words;
    } cases[] = {
        {{.shape_at = 2},
         0,
         FSDP_INVALID_STATE,
         "number 0 is u64 (4) of dropout, and was u64 (6) of"},
        {{.other_at = 2}, 0, FSDP_INVALID_STATE, "of silu, and was f32 (6, 9) of gelu"},
        {{.more_at = 2}, 0, FSDP_INVALID_STATE, "of mul"},
        {{.less_at = 2}, 0, FSDP_INVALID_STATE, "of gelu"},
        {{.less_at = 2}, 1, FSDP_INVALID_STATE, "must do the same both times"},
        {{.fail_at = 2}, 0, FSDP_INVALID_DATA, "recomputation in backward: not today"},
        {{.fail_at = 1}, 0, FSDP_INVALID_DATA, "not today"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        layer l, right = {0};
        make(&l);
        make(&right);
        l.shape_at = cases[k].l.shape_at;
        l.other_at = cases[k].l.other_at;
        l.more_at = cases[k].l.more_at;
        l.less_at = cases[k].l.less_at;
        l.fail_at = cases[k].l.fail_at;
        fsdp_tensor *x = input(1, "x"), *out[1];
        fsdp_status s =
            fsdp_checkpoint(first, &l, dropped, &x, 1, out, 1, cases[k].whole ? &whole : NULL);
        if (l.fail_at == 1)
            assert_true(s == FSDP_INVALID_DATA && !out[0]);
        else
            assert_int_not_equal(fsdp_backward(fsdp_sum(out[0])), FSDP_OK);
        check_error(cases[k].code, cases[k].words);
        /* Nothing is left half done: the next one works, and gives the bits that it should. */
        check_ok(fsdp_random_set(7, 3, NULL, 0));
        layer again;
        make(&again);
        check_ok(fsdp_checkpoint(first, &again, NULL, &x, 1, out, 1, NULL));
        check_ok(fsdp_backward(fsdp_sum(out[0])));
        check_ok(fsdp_random_set(7, 3, NULL, 0));
        check_ok(first(&right, &x, 1, out, 1));
        check_ok(fsdp_backward(fsdp_sum(out[0])));
        same_grads(&again, &right, N_WEIGHTS);
        fsdp_scope_end(scope);
        assert_int_equal(l.dropped, 1);
        assert_int_equal(check_live(), 0);
    }
}

static void test_changed(void **state)
{
    (void)state;
    for (int way = 0; way < 2; way++) {
        fsdp_scope *scope = fsdp_scope_begin();
        layer l;
        make(&l);
        fsdp_tensor *x = fsdp_clone(input(1, "x")), *out[1];
        check_ok(fsdp_checkpoint(first, &l, NULL, &x, 1, out, 1, NULL));
        fsdp_tensor *loss = fsdp_sum(out[0]);
        check_ok(fsdp_fill_(way ? l.w2 : x, 1));
        assert_int_not_equal(fsdp_backward(loss), FSDP_OK);
        check_error(FSDP_INVALID_STATE, "was changed in place since the forward");
        fsdp_scope_end(scope);
        assert_int_equal(check_live(), 0);
    }
    fsdp_tensor *none[FSDP_CUSTOM_MAX + 1] = {NULL}, *out[1];
    layer l = {0};
    assert_int_not_equal(
        fsdp_checkpoint(first, &l, dropped, none, FSDP_CUSTOM_MAX + 1, out, 1, NULL), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "9 inputs");
    assert_int_not_equal(fsdp_checkpoint(NULL, &l, dropped, none, 1, out, 1, NULL), FSDP_OK);
    check_error(FSDP_INVALID_ARGUMENT, "function is NULL");
    assert_int_equal(l.dropped, 2);
}

/* A backward in a function that runs again is refused with words, and at the first run it is not.
 */
static fsdp_status trains_inside(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out,
                                 int n_out)
{
    layer *l = arg;
    (void)n_in;
    (void)n_out;
    out[0] = fsdp_gelu(fsdp_linear(in[0], l->w1));
    return fsdp_backward(fsdp_sum(fsdp_gelu(out[0])));
}

static void test_backward_inside(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    layer l;
    make(&l);
    fsdp_tensor *x = input(0, "x"), *out[1];
    assert_int_not_equal(fsdp_checkpoint(trains_inside, &l, NULL, &x, 1, out, 1, NULL), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "whose forward is still running");
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* Whichever allocation fails, first run or second: one error, nothing left, and the next run works.
 */
static void test_no_memory(void **state)
{
    (void)state;
    const fsdp_checkpoint_options o = {.policy = keep_linears};
    int failed = 0;
    for (int n = 1, done = 0; !done; n++) {
        fsdp_scope *scope = fsdp_scope_begin();
        layer l;
        make(&l);
        l.inside = 1;
        l.o = &o;
        fsdp_tensor *x = input(1, "x"), *out[2];
        fsdp__account_fail_nth(n);
        fsdp_status s = fsdp_checkpoint(first, &l, dropped, &x, 1, out, 2, &o);
        if (s == FSDP_OK) s = fsdp_backward(loss_of(out));
        fsdp__account_fail_nth(0);
        done = s == FSDP_OK;
        failed += !done;
        if (!done) check_error(FSDP_NO_MEMORY, "test switch");
        assert_false(fsdp_recomputing());
        assert_true(fsdp_grad_enabled());
        fsdp_scope_end(scope);
        assert_int_equal(l.dropped, 1);
        assert_int_equal(check_live(), 0);
    }
    assert_true(failed > 30);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),       cmocka_unit_test(test_no_grad),
        cmocka_unit_test(test_retain_graph),    cmocka_unit_test(test_two_backwards),
        cmocka_unit_test(test_two_forwards),    cmocka_unit_test(test_memory),
        cmocka_unit_test(test_memory_retained), cmocka_unit_test(test_errors),
        cmocka_unit_test(test_changed),         cmocka_unit_test(test_backward_inside),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
