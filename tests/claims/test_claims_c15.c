/*
 * test_claims_c15.c - C15: with LoRA the frozen base is gathered (in bf16), has
 * no gradient traffic, no gradient memory and no optimizer state; adapters have
 * what any parameter has.
 *
 * FULL_SHARD gathers everything twice a step and sums the adapters' gradients
 * alone; NO_SHARD moves the adapters' gradients and nothing else.
 */
#include "sharded_net.h"

typedef struct numbers {
    int64_t gathered, gather_bytes, gathers, reduced, reductions, replicated; /* of one step */
    int64_t gradients, optimizer, peak_gradients;                             /* bytes */
    int64_t own, own_adapters; /* bytes in f32 of the rows that this rank holds */
    int64_t largest;           /* whole gradients of one unit's adapters, f32 */
} numbers;

typedef struct totals {
    int64_t all, adapters; /* elements */
} totals;

static fsdp_status count_own(net *n, numbers *c, totals *t)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(&n->base, &l));
    *t = (totals){0, 0};
    c->own = c->own_adapters = 0;
    for (int64_t i = 0; i < l.count; i++) {
        const fsdp_param *p = l.items[i].param;
        int64_t bytes = 4 * fsdp_numel(fsdp_param_tensor(p)), whole = 1;
        for (int d = 0; d < fsdp_param_ndim(p); d++)
            whole *= fsdp_param_sizes(p)[d];
        int adapter = strstr(l.items[i].name, ".lora_") != NULL;
        EXPECT(adapter == (fsdp_param_requires_grad(p) != 0));
        c->own += bytes;
        t->all += whole;
        if (!adapter) continue;
        c->own_adapters += bytes;
        t->adapters += whole;
    }
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static totals whole;

static fsdp_status look(net_run *r, net *n, int step)
{
    numbers *c = (numbers *)r->arg + fsdp_rank();
    totals t;
    fsdp_memory_stats m;
    fsdp_comm_count g = fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER);
    fsdp_comm_count s = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER);
    c->gathered = g.elements;
    c->gather_bytes = g.bytes_copied;
    c->gathers = g.calls;
    c->reduced = s.elements;
    c->reductions = s.calls;
    c->replicated = fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).elements;
    fsdp_memory_get(&m);
    c->gradients = m.live[FSDP_GRADIENTS];
    c->peak_gradients = m.peak[FSDP_GRADIENTS];
    if (step > 0) c->optimizer = m.live[FSDP_OPTIMIZER];
    FSDP_TRY(count_own(n, c, &t));
    if (fsdp_rank() == 0) whole = t;
    fsdp_comm_count_reset();
    fsdp_memory_reset_peak();
    return FSDP_OK;
}

enum { BLOCKS = 3, RANK = 2 };

static fsdp_status run_rank(void *arg)
{
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    net *n = net_create(BLOCKS);
    fsdp_device_pop();
    EXPECT(n);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.rank = RANK;
    EXPECT(fsdp_lora_apply(&n->base, &o) == FSDP_OK);
    fsdp_status s = net_train(arg, n);
    fsdp_module_free(&n->base);
    return s;
}

static void measure(int ranks, net_mesh mesh, numbers *sum)
{
    numbers c[8] = {{0}};
    net_run r = {.ranks = ranks,
                 .blocks = BLOCKS,
                 .rows = 8,
                 .steps = 3,
                 .mesh = mesh,
                 .policy = FSDP_RESHARD_ALWAYS,
                 .prefetch = 1,
                 .param_dtype = FSDP_BF16,
                 .reduce_dtype = FSDP_F32,
                 .no_clip = 1,
                 .look = look,
                 .arg = c};
    check_ok(fsdp_run_threads(ranks, run_rank, &r));
    assert_true(r.loss[2] < r.loss[0]); /* it learns */
    net_free(&r);
    memset(sum, 0, sizeof *sum);
    for (int k = 0; k < ranks; k++) {
        assert_int_equal(c[k].gradients, c[k].own_adapters);
        assert_int_equal(c[k].optimizer, 2 * c[k].own_adapters);
        /* Whole gradients of the unit that runs and of the one that is reduced, and the shards. */
        int64_t unit = 4 * 2 * RANK * (NET_C + NET_H); /* up and down: A and B each */
        int64_t root = 4 * RANK * (NET_IN + NET_C + NET_C + 1);
        assert_true(c[k].peak_gradients <= c[k].own_adapters + root + 2 * unit);
        sum->gathered += c[k].gathered;
        sum->gather_bytes += c[k].gather_bytes;
        sum->gathers += c[k].gathers;
        sum->reduced += c[k].reduced;
        sum->reductions += c[k].reductions;
        sum->replicated += c[k].replicated;
    }
}

static void test_c15(void **state)
{
    (void)state;
    for (int n = 2; n <= 4; n += 2) {
        numbers c;
        measure(n, NET_SHARD, &c);
        assert_true(whole.adapters > 0 && whole.adapters < whole.all);
        assert_int_equal(c.gathered, 2 * whole.all * (n - 1));
        assert_int_equal(c.gathers, 2 * (BLOCKS + 1) * n);
        assert_int_equal(c.gather_bytes, 2 * 2 * whole.all); /* bf16: 2 bytes, written once */
        assert_int_equal(c.reduced, whole.adapters * (n - 1));
        assert_int_equal(c.reductions, (BLOCKS + 1) * n);
        assert_int_equal(c.replicated, 0);
        measure(n, NET_REPLICATE, &c);
        assert_int_equal(c.gathered, 0);
        assert_int_equal(c.reduced, 0);
        assert_int_equal(c.replicated, 2 * whole.adapters * (n - 1));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c15)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
