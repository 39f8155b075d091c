/*
 * test_comm_abort.c - what ends a wait that would be in vain, ranks as threads.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/context.h"
#include "base/error.h"
#include "base/thread.h"
#include "comm/comm.h"

enum { MOST = 4 };

typedef struct seen {
    int which;
    fsdp_status status[MOST];
    char text[MOST][2048];
} seen;

static fsdp_status all_reduce(int64_t n, fsdp_dtype t)
{
    double x[16] = {0};
    return fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, x, n, t, FSDP_SUM, NULL);
}

static fsdp_status gather(const char *label, int64_t dim, fsdp_dtype t, int n)
{
    fsdp_group *g = fsdp_group_world();
    fsdp__allocator *a = fsdp__comm_allocator(g);
    fsdp_list_entry e[2];
    for (int i = 0; i < 2; i++) {
        void *shard = a->alloc(a, 1024, "shard"), *full = a->alloc(a, 4096, "full");
        if (!shard || !full) return fsdp_error();
        memset(shard, 0, 1024);
        e[i] = (fsdp_list_entry){1, dim, 1, (dim + 3) / 4, shard, t, full, FSDP_F32, 1};
    }
    return fsdp_all_gather_list(g, FSDP_LANE_GATHER, label, e, n, NULL, NULL);
}

static fsdp_status do_case(int which)
{
    fsdp_group *g = fsdp_group_world();
    int odd = fsdp_rank() == 2;
    FSDP_TRY(fsdp_barrier(g, FSDP_LANE_CONTROL));
    switch (which) {
    case 0: /* an error of one rank's own */
        if (odd) return fsdp__fail(FSDP_INVALID_SHAPE, "x has 3 features, weight expects 4");
        return fsdp_barrier(g, FSDP_LANE_CONTROL);
    case 1: /* a failure that kept no error */
        if (odd) return FSDP_IO_ERROR;
        return fsdp_barrier(g, FSDP_LANE_CONTROL);
    case 2: /* a rank that has gone home */
        if (odd) return FSDP_OK;
        return fsdp_barrier(g, FSDP_LANE_CONTROL);
    case 3: /* another collective */
        return odd ? fsdp_barrier(g, FSDP_LANE_CONTROL) : all_reduce(2, FSDP_F32);
    case 4: /* another size */
        return all_reduce(odd ? 3 : 2, FSDP_F32);
    case 5: /* another dtype */
        return all_reduce(2, odd ? FSDP_F64 : FSDP_F32);
    case 6: /* another label */
        return gather(odd ? "layers.2" : "layers.1", 16, FSDP_F32, 2);
    case 7: /* another shape */
        return gather("layers.1", odd ? 12 : 16, FSDP_F32, 2);
    case 8: /* another dtype of a shard */
        return gather("layers.1", 16, odd ? FSDP_BF16 : FSDP_F32, 2);
    case 9: /* another number of parameters */
        return gather("layers.1", 16, FSDP_F32, odd ? 1 : 2);
    case 10: /* a rank that does not come in time */
        fsdp_group_set_timeout(g, odd ? 100 : 0.2);
        return odd ? fsdp_barrier(g, FSDP_LANE_REPLICATE) : gather("layers.7", 16, FSDP_F32, 1);
    default: /* errors are refused where they are, not only where one waits */
        if (odd) {
            fsdp__fail(FSDP_INVALID_STATE, "first");
            fsdp__fail(FSDP_INVALID_STATE, "second");
            return all_reduce(1, FSDP_F32);
        }
        while (all_reduce(1, FSDP_F32) == FSDP_OK)
            ;
        return all_reduce(1, FSDP_F32);
    }
}

static fsdp_status rank_main(void *arg)
{
    seen *s = arg;
    int r = fsdp_rank();
    s->status[r] = do_case(s->which);
    strncpy(s->text[r], fsdp_error_text(), sizeof s->text[r] - 1);
    return s->status[r];
}

static void expect(int which, fsdp_status odd, fsdp_status others, const char *words)
{
    seen s = {.which = which};
    fsdp_status st = fsdp_run_threads(MOST, rank_main, &s);
    /* The status and text of rank 0, the first that fails. */
    if (st != others || !strstr(fsdp_error_text(), words))
        fail_msg("case %d: %d: %s", which, (int)st, fsdp_error_text());
    fsdp_error_clear();
    for (int r = 0; r < MOST; r++) {
        if (s.status[r] != (r == 2 ? odd : others) || (r != 2 && !strstr(s.text[r], words)))
            fail_msg("case %d, rank %d: %d: %s", which, r, (int)s.status[r], s.text[r]);
    }
}

static void test_errors(void **state)
{
    (void)state;
    expect(0, FSDP_INVALID_SHAPE, FSDP_PEER_FAILED, "rank 2 reported: x has 3 features");
    expect(1, FSDP_IO_ERROR, FSDP_PEER_FAILED, "rank 2");
    expect(2, FSDP_OK, FSDP_PEER_FAILED, "has left the world");
    expect(11, FSDP_INVALID_STATE, FSDP_PEER_FAILED, "rank 2 reported: first");
}

static void test_mismatch(void **state)
{
    (void)state;
    expect(3, FSDP_MISMATCH, FSDP_MISMATCH, "barrier");
    expect(4, FSDP_MISMATCH, FSDP_MISMATCH, "a size of");
    expect(5, FSDP_MISMATCH, FSDP_MISMATCH, "f64");
    expect(6, FSDP_MISMATCH, FSDP_MISMATCH, "'layers.2'");
    expect(7, FSDP_MISMATCH, FSDP_MISMATCH, "(1, 12, 1)");
    expect(8, FSDP_MISMATCH, FSDP_MISMATCH, "bf16");
    expect(9, FSDP_MISMATCH, FSDP_MISMATCH, "a list length of");
}

static void test_timeout(void **state)
{
    (void)state;
    expect(10, FSDP_TIMEOUT, FSDP_TIMEOUT, "all_gather 'layers.7'");
}

/* After an error in the middle of everything, a reset, and all works as before. */
static fsdp_status reset_rank(void *arg)
{
    (void)arg;
    fsdp_group *g = fsdp_group_world();
    for (int round = 0; round < 5; round++) {
        fsdp_work *w = NULL;
        double x = fsdp_rank(), y = 1;
        fsdp_shared copy;
        FSDP_TRY(fsdp_shared_take(g, 1000, "copy", &copy));
        FSDP_TRY(fsdp_all_reduce(g, FSDP_LANE_CONTROL, &x, 1, FSDP_F64, FSDP_SUM, NULL));
        if (x != 6) return fsdp__fail(FSDP_INTERNAL, "round %d: a sum of %g", round, x);
        if (fsdp_rank() == round % MOST) {
            fsdp__fail(FSDP_NON_FINITE, "round %d", round);
        } else {
            (void)fsdp_all_reduce(g, FSDP_LANE_REDUCE, &y, 1, FSDP_F64, FSDP_SUM, &w);
            while (fsdp_barrier(g, FSDP_LANE_CONTROL) == FSDP_OK)
                ;
        }
        fsdp_shared_give(g, &copy);
        FSDP_TRY(fsdp__comm_reset());
        fsdp_status s = fsdp_work_wait(w);
        if ((w && s != FSDP_INTERRUPTED) || fsdp_error() != FSDP_OK)
            return fsdp__fail(FSDP_INTERNAL, "round %d: status %d", round, (int)s);
    }
    return fsdp_barrier(g, FSDP_LANE_CONTROL);
}

static void test_reset(void **state)
{
    (void)state;
    if (fsdp_run_threads(MOST, reset_rank, NULL) != FSDP_OK) fail_msg("%s", fsdp_error_text());
}

/* An error of an earlier world is no matter of a later one. */
static void test_afterwards(void **state)
{
    (void)state;
    seen s = {.which = 0};
    assert_int_not_equal(fsdp_run_threads(2, rank_main, &s), FSDP_INVALID_SHAPE);
    fsdp_error_clear();
    assert_int_equal(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL), FSDP_OK);
    assert_int_equal(fsdp_init(NULL, NULL), FSDP_OK);
    assert_int_equal(fsdp_init(NULL, NULL), FSDP_INVALID_STATE);
    fsdp_error_clear();
    assert_int_equal(fsdp_finalize(), 0);
    assert_int_equal(fsdp_init(NULL, NULL), FSDP_OK);
    assert_int_equal(fsdp_finalize(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors),     cmocka_unit_test(test_mismatch),
        cmocka_unit_test(test_timeout),    cmocka_unit_test(test_reset),
        cmocka_unit_test(test_afterwards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
