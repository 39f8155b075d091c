/*
 * test_claims_c05.c - C05 and C06: gradient accumulation over k microbatches.
 *
 * C05: without synchronising there is one reduction of each unit instead of k, and gradients are
 * held whole, once and not k times. C06: with it they stay cut, 1/N a rank. Exact, for k = 1,
 * 4, 16.
 */
#include "sharded_net.h"

typedef struct counts {
    int64_t calls, between, after, peak; /* bytes of gradients: between microbatches, at the end */
    int64_t own, numel;                  /* bytes of this rank's shards; elements of the model */
    int seen, micro;
} counts;

static fsdp_status prepare(net_run *r, net *n)
{
    counts *c = (counts *)r->arg + fsdp_rank();
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    *c = (counts){
        .own = s.live[FSDP_PARAMETERS], .micro = r->micro, .numel = fsdp_module_numel(&n->base)};
    fsdp_memory_reset_peak();
    return FSDP_OK;
}

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    counts *c = (counts *)r->arg + fsdp_rank();
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    c->seen++;
    if (c->seen < c->micro) c->between = s.live[FSDP_GRADIENTS];
    c->after = s.live[FSDP_GRADIENTS];
    c->peak = s.peak[FSDP_GRADIENTS];
    c->calls = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).calls;
    return FSDP_OK;
}

static counts measure(int ranks, int k, int sync, counts *all)
{
    net_run r = {.ranks = ranks,
                 .blocks = 3,
                 .rows = 64,
                 .steps = 1,
                 .micro = k,
                 .sync = sync,
                 .policy = FSDP_RESHARD_ALWAYS,
                 .prepare = prepare,
                 .look = look,
                 .arg = all};
    net_go(&r);
    net_free(&r);
    return all[0];
}

static const int ranks[] = {2, 4};
static const int micro[] = {1, 4, 16};
enum { UNITS = 4 };

static void test_c05(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        int64_t peak[3];
        for (int k = 0; k < 3; k++) {
            counts all[4], c = measure(ranks[i], micro[k], 0, all);
            peak[k] = c.peak;
            assert_int_equal(c.calls, UNITS);
            for (int r = 0; r < ranks[i]; r++) {
                if (micro[k] > 1) assert_int_equal(all[r].between, 4 * all[r].numel);
                assert_int_equal(all[r].after, all[r].own);
            }
        }
        assert_int_equal(peak[1], peak[2]);
    }
}

static void test_c06(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        for (int k = 0; k < 3; k++) {
            counts all[4], c = measure(ranks[i], micro[k], 1, all);
            assert_int_equal(c.calls, UNITS * micro[k]);
            for (int r = 0; r < ranks[i]; r++) {
                if (micro[k] > 1) assert_int_equal(all[r].between, all[r].own);
                assert_int_equal(all[r].after, all[r].own);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c05), cmocka_unit_test(test_c06)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
