/*
 * test_autograd_scope.c - who owns a tensor: scopes, keeping, setting, releasing.
 */
#include "tensor_check.h"

static fsdp_tensor *four(void)
{
    return fsdp_zeros(FSDP_F32, 1, SIZES(1)); /* four bytes */
}

static void test_ownership(void **state)
{
    (void)state;
    fsdp_tensor *mine = four(); /* no scope: the caller's */
    fsdp_scope *outer = fsdp_scope_begin();
    fsdp_tensor *a = four(), *kept = NULL, *retained = NULL;
    fsdp_scope *inner = fsdp_scope_begin();
    four();
    kept = four();
    retained = fsdp_retain(four());
    assert_int_equal(check_live(), 20);
    fsdp_scope_keep(kept);
    fsdp_scope_end(inner);
    assert_int_equal(check_live(), 16);
    fsdp_scope_end(inner); /* ended already: nothing */
    check_tensor(a);
    fsdp_scope_end(outer);
    assert_int_equal(check_live(), 8); /* mine and the retained one */
    fsdp_release(retained);
    fsdp_release(mine);
    assert_int_equal(check_live(), 0);
    /* Kept out of the outermost: the caller's. */
    outer = fsdp_scope_begin();
    kept = four();
    fsdp_scope_keep(kept);
    fsdp_scope_end(outer);
    assert_int_equal(check_live(), 4);
    fsdp_scope_keep(kept);
    fsdp_release(kept);
    /* An outer scope takes the inner ones along. */
    outer = fsdp_scope_begin();
    inner = fsdp_scope_begin();
    fsdp_scope_begin();
    four();
    fsdp_scope_end(outer);
    assert_int_equal(check_live(), 0);
    fsdp_scope_end(inner);
    fsdp_scope_end(NULL);
    fsdp_scope_keep(NULL);
}

/* A forward that replaces its argument does not take it from the caller. */
static void test_set_of_others(void **state)
{
    (void)state;
    fsdp_tensor *mine = four();
    fsdp_scope *outer = fsdp_scope_begin();
    fsdp_tensor *theirs = four();
    fsdp_scope *inner = fsdp_scope_begin();
    fsdp_tensor *x = theirs;
    for (int i = 0; i < 3; i++)
        fsdp_set(&x, fsdp_shift(x, 1));
    assert_int_equal(check_live(), 12); /* mine, theirs and the last x */
    fsdp_set(&x, mine);
    assert_int_equal(check_live(), 8);
    fsdp_set(&x, NULL);
    assert_int_equal(check_live(), 8);
    fsdp_scope_end(inner);
    assert_true(fsdp_at(theirs, SIZES(0)) == 0);
    fsdp_scope_end(outer);
    fsdp_set(&mine, NULL); /* no scope is open: it is the caller's to drop */
    assert_int_equal(check_live(), 0);
}

static void test_set(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *h = fsdp_zeros(FSDP_F32, 1, SIZES(10));
    for (int i = 0; i < 100; i++) {
        fsdp_set(&h, fsdp_shift(h, 1));
        assert_int_equal(check_live(), 40); /* one activation, not all */
    }
    fsdp_set(&h, h);
    assert_true(fsdp_at(h, SIZES(9)) == 100);
    fsdp_tensor *also = fsdp_retain(h);
    fsdp_set(&h, NULL);
    assert_int_equal(check_live(), 40);
    fsdp_release(also);
    assert_int_equal(check_live(), 0);
    /* Out of the middle of a scope. */
    fsdp_tensor *t[5];
    for (int i = 0; i < 5; i++)
        t[i] = four();
    fsdp_set(&t[1], t[2]);
    fsdp_set(&t[0], NULL);
    assert_int_equal(check_live(), 12);
    /* Releasing by hand what a scope owns drops it early and leaves no trace. */
    fsdp_release(t[3]);
    assert_int_equal(check_live(), 8);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

/* Scopes of one context know nothing of another's; one left open ends with its context. */
static void test_contexts(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    four();
    fsdp_context *other = fsdp_context_create(0, 1), *before = fsdp_context_set(other);
    assert_int_equal(check_live(), 0);
    fsdp_scope_begin();
    four();
    fsdp_scope_begin();
    four();
    assert_int_equal(check_live(), 8);
    fsdp_context_set(before);
    fsdp_context_free(other);
    assert_int_equal(check_live(), 4);
    fsdp_scope_end(scope);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ownership),
        cmocka_unit_test(test_set),
        cmocka_unit_test(test_set_of_others),
        cmocka_unit_test(test_contexts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
