/*
 * test_claims_c14.c - C14: with replicas of shards, gathers and reduce-scatters stay inside the
 * shard group; only the all-reduce of 1/S of the gradients crosses, once for each unit.
 *
 * Counted by group. P elements in all; an all-reduce among R replicas of P/S elements brings a rank
 * 2 (R-1)/R P/S. The bytes that cross groups are printed beside those of flat sharding over all
 * ranks, where a rank gathers from and reduces with everybody.
 */
#include "sharded_net.h"

typedef struct counts {
    int64_t inside, crossing;        /* elements of gathers and scatters, by mesh axis */
    int64_t replicate, calls, stray; /* all-reduces of the outer axis; of the inner one */
    int64_t numel;
} counts;

static int64_t parameters(const fsdp_group *g)
{
    return fsdp_comm_count_get(g, FSDP_LANE_GATHER, FSDP_ALL_GATHER).elements +
           fsdp_comm_count_get(g, FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).elements;
}

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)step;
    counts *c = (counts *)r->arg + fsdp_rank();
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(n->head, "weight"));
    fsdp_mesh *mesh = fsdp_dtensor_mesh(t);
    fsdp_group *outer = fsdp_mesh_group(mesh, 0);
    fsdp_group *inner = fsdp_mesh_group(mesh, 1);
    c->inside = parameters(inner);
    c->crossing = parameters(outer);
    fsdp_comm_count a = fsdp_comm_count_get(outer, FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE);
    c->replicate = a.elements;
    c->calls = a.calls;
    c->stray = fsdp_comm_count_get(inner, FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).calls;
    c->numel = fsdp_module_numel(&n->base);
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static void measure(int replicas, int shards)
{
    counts c[8] = {{0, 0, 0, 0, 0, 0}}, sum = {0, 0, 0, 0, 0, 0};
    net_run r = {.ranks = replicas * shards,
                 .blocks = 3,
                 .rows = 8,
                 .steps = 3,
                 .mesh = NET_HYBRID,
                 .replicas = replicas,
                 .policy = FSDP_RESHARD_ALWAYS,
                 .prefetch = 1,
                 .look = look,
                 .arg = c};
    net_go(&r);
    net_free(&r);
    for (int k = 0; k < r.ranks; k++) {
        sum.inside += c[k].inside;
        sum.replicate += c[k].replicate;
        assert_int_equal(c[k].crossing, 0);
        assert_int_equal(c[k].stray, 0);
        assert_int_equal(c[k].calls, r.blocks + 1);
    }
    /* Two gathers and a reduce-scatter in each of the groups; one all-reduce of all rows. */
    int64_t P = c[0].numel;
    assert_int_equal(sum.inside, 3 * P * (shards - 1) * replicas);
    assert_int_equal(sum.replicate, 2 * P * (replicas - 1));
    /* Flat: of the ranks that a gather brings rows to, those of other groups. */
    int64_t flat = 3 * P * (int64_t)(r.ranks - shards);
    print_message("%d x %d: %lld bytes cross groups, flat sharding %lld: ratio %.3f\n", replicas,
                  shards, (long long)(4 * sum.replicate), (long long)(4 * flat),
                  (double)sum.replicate / (double)flat);
    assert_true(sum.replicate < flat);
}

static void test_c14(void **state)
{
    (void)state;
    measure(2, 2);
    measure(2, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c14)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
