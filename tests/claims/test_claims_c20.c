/*
 * test_claims_c20.c - C20: under a memory.limit between the two needs NO_SHARD fails with the table
 * of purposes, and FULL_SHARD trains, to the same bits as without a limit.
 */
#include "sharded_net.h"

enum { RANKS = 4 };

typedef struct limited {
    net_run run;
    int64_t limit, peak[RANKS];
    fsdp_status code[RANKS];
    char text[RANKS][2048];
} limited;

static fsdp_status rank_main(void *arg)
{
    limited *l = arg;
    int me = fsdp_rank();
    FSDP_TRY(fsdp_memory_set_limit(l->limit));
    fsdp_memory_reset_peak();
    l->code[me] = net_rank(&l->run);
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    l->peak[me] = m.peak_total;
    snprintf(l->text[me], sizeof l->text[me], "%s", fsdp_error_text());
    return l->code[me];
}

/* The status of the run; its largest peak of a rank in *peak. */
static fsdp_status go(limited *l, net_mesh mesh, int64_t limit, int64_t *peak)
{
    *l = (limited){.run = {.ranks = RANKS,
                           .blocks = NET_BLOCKS,
                           .rows = 8,
                           .steps = 3,
                           .prefetch = 1,
                           .mesh = mesh},
                   .limit = limit};
    fsdp_status s = fsdp_run_threads(RANKS, rank_main, l);
    *peak = 0;
    for (int r = 0; r < RANKS; r++)
        if (l->peak[r] > *peak) *peak = l->peak[r];
    return s;
}

static void test_c20(void **state)
{
    (void)state;
    static limited full, none, both;
    int64_t need_full, need_none, peak;
    check_ok(go(&full, NET_SHARD, 0, &need_full));
    check_ok(go(&none, NET_REPLICATE, 0, &need_none));
    assert_true(need_none > need_full);
    int64_t limit = (need_full + need_none) / 2;

    check_ok(go(&both, NET_SHARD, limit, &peak));
    assert_int_equal(peak, need_full);
    net_same(&full.run, &both.run, "with a limit");
    net_free(&both.run);

    assert_int_not_equal(go(&both, NET_REPLICATE, limit, &peak), FSDP_OK);
    assert_true(peak <= limit);
    fsdp_error_clear();
    int found = 0;
    for (int r = 0; r < RANKS; r++) {
        if (both.code[r] == FSDP_PEER_FAILED) continue; /* another rank was first */
        assert_int_equal(both.code[r], FSDP_NO_MEMORY);
        found++;
        static const char *const words[] = {"parameters", "gradients", "unsharded", "limit",
                                            "memory.limit is"};
        for (int k = 0; k < 5; k++)
            if (!strstr(both.text[r], words[k])) fail_msg("no %s in: %s", words[k], both.text[r]);
    }
    assert_true(found > 0);
    net_free(&full.run);
    net_free(&none.run);
    net_free(&both.run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c20)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
