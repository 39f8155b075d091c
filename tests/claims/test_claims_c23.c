/*
 * test_claims_c23.c - C23: with prefetch.limit L no more units are gathered at
 * any moment than the running one, those around it and L, however slow a unit
 * computes; and L of them are gathered ahead.
 *
 * The root encloses the blocks, so the bound is 2 + L, also while the root
 * itself computes.
 */
#include <unistd.h>

#include "sharded_net.h"

#include "fsdp/unit.h"

enum { BLOCKS = 8 };

typedef struct watch {
    fsdp__tree *tree;
    int most; /* units that are gathered or being gathered */
    int64_t most_bytes;
} watch;

static void look_at(void *arg, fsdp_event_kind k, const char *unit)
{
    (void)k;
    (void)unit;
    watch *w = arg;
    int n = 0;
    for (int i = 0; i < w->tree->n_units; i++)
        n += w->tree->units[i]->state != FSDP__SHARDED;
    if (n > w->most) w->most = n;
}

/* Computing takes its time: what is under way meanwhile gets on. */
static fsdp_status slowly(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)arg;
    (void)m;
    (void)in;
    usleep(300);
    return fsdp_comm_progress();
}

typedef struct run {
    int limit, expected;
} run;

static fsdp_status rank_main(void *arg)
{
    const run *c = arg;
    net *n = net_create(BLOCKS);
    EXPECT(n);
    net_run r = {.ranks = fsdp_world_size(), .policy = FSDP_RESHARD_ALWAYS, .prefetch = c->limit};
    EXPECT(net_shard(&r, n) == FSDP_OK && fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    for (int i = 0; i < BLOCKS; i++)
        EXPECT(fsdp_register_forward_pre_hook(n->block[i], slowly, NULL, 0) >= 0);
    watch w = {0};
    EXPECT(fsdp_set_event_hook(&n->base, look_at, &w) == FSDP_OK);
    w.tree = fsdp__unit_of(&n->base)->tree;
    for (int step = 0; step < 4; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        net_run b = {.ranks = 1, .rows = 4};
        fsdp_tensor *x, *y;
        EXPECT(net_batch(&b, step, 0, 4, &x, &y) == FSDP_OK);
        w.most = 0;
        EXPECT(fsdp_backward(fsdp_call2(&n->base, x, y)) == FSDP_OK);
        int bound = step == 0 && c->limit > 0 ? 2 : c->expected;
        if (w.most != bound)
            return fsdp__fail(FSDP_INTERNAL, "limit %d, step %d: %d units at once; expected %d",
                              c->limit, step, w.most, bound);
        EXPECT(fsdp_zero_grad(&n->base) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_c23(void **state)
{
    (void)state;
    /* The event of a gather comes before its unit counts, so the last one ahead is seen with the
     * next event: the bound is met exactly. 0 is FSDP2's own order, one ahead in backward. */
    const run rows[] = {{-1, 2}, {0, 3}, {1, 3}, {2, 4}, {4, 6}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int ranks = 2; ranks <= 4; ranks += 2) {
            run r = rows[i];
            check_ok(fsdp_run_threads(ranks, rank_main, &r));
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c23)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
