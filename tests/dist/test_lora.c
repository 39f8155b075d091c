/*
 * test_lora.c - adapters on ranks: the base keeps its bytes, every adapter learns, strategies and
 * cuts change no bit, merging is the same on any number of ranks, the mistakes of an order.
 */
#include "sharded_net.h"

#include "lora/lora.h"
#include "nn/module.h"

typedef struct job {
    net_run r;
    int merge; /* B's begin with numbers, and at the end r.params are merged weights */
    /* results */
    double *before; /* all parameters before the first step; freed by the test */
    int silent;     /* adapters without a gradient in the second step */
} job;

static job *running; /* the look hook's; set by one thread before ranks start */

static fsdp_status look(net_run *r, net *n, int step)
{
    job *j = running;
    fsdp_param_list l;
    if (step != 1) return FSDP_OK;
    FSDP_TRY(fsdp_module_params(&n->base, &l));
    int silent = 0;
    for (int64_t i = 0; i < l.count; i++) {
        const fsdp_param *p = l.items[i].param;
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(p));
        EXPECT(fsdp_param_requires_grad(p) || !g);
        fsdp_tensor *full = g ? fsdp_dtensor_full(g) : NULL;
        if (fsdp_param_requires_grad(p))
            silent += !full || fsdp_item(fsdp_sum(fsdp_mul(full, full))) == 0.0;
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    if (fsdp_rank() == 0) j->silent = silent;
    (void)r;
    return FSDP_OK;
}

/* Before the first step: all parameters as they are. */
static fsdp_status prepare(net_run *r, net *n)
{
    int64_t numel;
    double *all = net_collect(n, 0, &numel);
    EXPECT(all);
    if (fsdp_rank() == 0)
        running->before = all;
    else
        free(all);
    (void)r;
    return FSDP_OK;
}

static fsdp_status run_rank(void *arg)
{
    job *j = arg;
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    net *n = net_create(j->r.blocks);
    fsdp_device_pop();
    EXPECT(n);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.rank = 3;
    EXPECT(fsdp_lora_apply(&n->base, &o) == FSDP_OK);
    fsdp__lora_list l;
    EXPECT(fsdp__lora_list_of(&n->base, &l) == FSDP_OK);
    for (int64_t i = 0; i < l.count && j->merge; i++)
        fsdp_module_set_init(l.items[i]->b, (fsdp_init_rule){FSDP_INIT_NORMAL, 0, 1});
    free(l.items);
    fsdp_status s = net_train(&j->r, n);
    int64_t numel;
    if (s == FSDP_OK && j->merge && (s = fsdp_lora_merge(&n->base)) == FSDP_OK) {
        double *merged = net_collect(n, 0, &numel);
        EXPECT(merged);
        if (fsdp_rank() == 0) {
            free(j->r.params);
            j->r.params = merged;
        } else {
            free(merged);
        }
    }
    fsdp_module_free(&n->base);
    if (s == FSDP_OK) EXPECT(check_live() == 0);
    return s;
}

static job base_job(int ranks)
{
    return (job){.r = {.ranks = ranks,
                       .blocks = 3,
                       .rows = 24,
                       .steps = 5,
                       .policy = FSDP_RESHARD_ALWAYS,
                       .prefetch = 1,
                       .prepare = prepare,
                       .look = look}};
}

static void go(job *j)
{
    running = j;
    check_ok(fsdp_run_threads(j->r.ranks, run_rank, j));
}

static void job_free(job *j)
{
    net_free(&j->r);
    free(j->before);
}

/* Parameters in the order of the tree: frozen ones keep every bit, adapters change. */
static void check_frozen(const job *j)
{
    net *n = net_create(j->r.blocks);
    fsdp_lora_options o = fsdp_lora_defaults();
    o.rank = 3;
    fsdp_param_list l;
    check_ok(fsdp_lora_apply(&n->base, &o));
    check_ok(fsdp_module_params(&n->base, &l));
    int64_t at = 0;
    for (int64_t i = 0; i < l.count; i++) {
        int64_t m = fsdp_numel(fsdp_param_tensor(l.items[i].param));
        bool same = !memcmp(j->before + at, j->r.params + at, (size_t)m * sizeof *j->before);
        if (same == (fsdp_param_requires_grad(l.items[i].param) != 0))
            fail_msg("%s: %s", l.items[i].name, same ? "did not change" : "changed");
        at += m;
    }
    assert_int_equal(at, j->r.numel);
    fsdp_param_list_free(&l);
    fsdp_module_free(&n->base);
}

/* RC-27 */
static void test_the_base_stays(void **state)
{
    (void)state;
    job one = base_job(1);
    go(&one);
    check_frozen(&one);
    assert_int_equal(one.silent, 0);
    assert_true(one.r.loss[4] < one.r.loss[0]);
    static const int ranks[] = {2, 3, 4, 8};
    for (int i = 0; i < 4; i++) {
        job j = base_job(ranks[i]);
        go(&j);
        check_frozen(&j);
        assert_int_equal(j.silent, 0);
        net_close(&j.r, &one.r, 2e-5, "adapters over ranks");
        job_free(&j);
    }
    job_free(&one);
}

static void test_no_bit(void **state)
{
    (void)state;
    job full = base_job(4);
    go(&full);
    for (int way = 0; way < 6; way++) {
        job j = base_job(4);
        if (way == 0) j.r.policy = FSDP_RESHARD_NEVER;
        if (way == 1) j.r.mesh = NET_REPLICATE;
        if (way == 2) j.r.prefetch = 3;
        if (way == 3) j.r.private_gather = 1;
        if (way == 4) j.r.whole = 1;
        if (way == 5) j.r.mesh = NET_HYBRID, j.r.replicas = 2;
        char what[32];
        snprintf(what, sizeof what, "way %d", way);
        go(&j);
        net_same(&j.r, &full.r, what);
        job_free(&j);
    }
    job_free(&full);
}

static void test_accumulation(void **state)
{
    (void)state;
    job once = base_job(2), often = base_job(2);
    often.r.micro = 3;
    go(&once);
    go(&often);
    check_frozen(&often);
    net_close(&often.r, &once.r, 2e-5, "three microbatches");
    job_free(&once);
    job_free(&often);
}

/* Merged weights are equal to the bit on any number of ranks and along any cut. */
static void test_merge(void **state)
{
    (void)state;
    double *first = NULL;
    for (int ranks = 1; ranks <= 8; ranks += ranks == 4 ? 4 : 1)
        for (int dim1 = 0; dim1 < 2; dim1++) {
            job j = base_job(ranks);
            j.merge = 1;
            j.r.steps = 0;
            j.r.dim1 = dim1;
            j.r.look = NULL;
            go(&j);
            assert_true(net_distance(j.r.params, j.before, j.r.numel) > 0.1);
            if (first)
                assert_memory_equal(first, j.r.params, (size_t)j.r.numel * sizeof *first);
            else
                first = memcpy(malloc((size_t)j.r.numel * sizeof *first), j.r.params,
                               (size_t)j.r.numel * sizeof *first);
            job_free(&j);
        }
    free(first);
}

static fsdp_status after_sharding(void *arg)
{
    (void)arg;
    net *n = net_create(1);
    EXPECT(fsdp_fully_shard(n->block[0], NULL) == FSDP_OK);
    fsdp_status s = fsdp_lora_apply(&n->base, NULL);
    fsdp_module_free(&n->base);
    return s;
}

static void test_order(void **state)
{
    (void)state;
    assert_int_equal(fsdp_run_threads(2, after_sharding, NULL), FSDP_INVALID_STATE);
    check_error(FSDP_INVALID_STATE,
                "\"0\" (Block) is sharded already; apply adapters before fsdp_fully_shard");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_base_stays), cmocka_unit_test(test_no_bit),
        cmocka_unit_test(test_accumulation),   cmocka_unit_test(test_merge),
        cmocka_unit_test(test_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
