/*
 * test_fsdp_drift.c - RC-09: replicas stay equal to the bit; one that does not is found and named.
 */
#include "sharded_net.h"

typedef struct job {
    int ranks, replicas;
    int bad; /* the rank that goes wrong */
    int way; /* 0 nothing, 1 a bit flips, 2 each replica steps by itself, 3 a bit of another
                parameter */
    int steps;
} job;

static fsdp_status step(net *n, fsdp_optimizer *o, int k)
{
    char name[32];
    snprintf(name, sizeof name, "rank %d, step %d", fsdp_rank(), k); /* each sees other rows */
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(3, NET_IN), 5, name);
    fsdp_tensor *y = fsdp_sum_dim(fsdp_sigmoid(x), 1, 1);
    fsdp_backward(fsdp_call2(&n->base, x, y));
    fsdp_clip_grad_norm(&n->base, 0.5, NULL);
    fsdp_optimizer_step(o);
    fsdp_zero_grad(&n->base);
    fsdp_scope_end(scope);
    return fsdp_error();
}

static void flip(fsdp_module *m, const char *name)
{
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(m, name));
    ((unsigned char *)fsdp_data(t))[1] ^= 4;
    fsdp_touch(t);
}

static fsdp_status run(const job *j, net *n)
{
    net_run how = {.ranks = j->ranks, .mesh = NET_HYBRID, .replicas = j->replicas, .prefetch = 1};
    EXPECT(net_shard(&how, n) == FSDP_OK && fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 42) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *o = fsdp_adamw(&n->base, &a);
    EXPECT(o && fsdp_check_replicas(&n->base) == FSDP_OK);
    fsdp_status s = FSDP_OK;
    for (int k = 0; k < 5 && s == FSDP_OK; k++) {
        s = step(n, o, k);
        if (j->way == 2 && k == 3) { /* as without the sum over replicas */
            fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(n->in, "weight"));
            float *x = fsdp_data(t);
            for (int64_t i = 0; i < fsdp_numel(t); i++)
                x[i] += 1e-3f * (float)fsdp_mesh_coordinate(fsdp_dtensor_mesh(t), 0);
            fsdp_touch(t);
        }
        if (k == 3 && j->way == 1 && fsdp_rank() == j->bad)
            flip(n->block[1]->in->children[1], "weight");
        if (k == 3 && j->way == 3 && fsdp_rank() == j->bad) flip(n->in, "bias");
        if (s == FSDP_OK) s = fsdp_check_replicas(&n->base);
    }
    fsdp_optimizer_free(o);
    return s;
}

static fsdp_status rank_main(void *arg)
{
    const job *j = arg;
    EXPECT(fsdp_set_threads(1) == FSDP_OK);
    net *n = net_create(2);
    EXPECT(n);
    fsdp_status s = run(j, n);
    fsdp_module_free(&n->base);
    return s;
}

static void test_equal(void **state)
{
    (void)state;
    static const int ways[][2] = {{4, 2}, {8, 2}, {4, 4}, {3, 3}, {4, 1}, {2, 2}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        job j = {.ranks = ways[i][0], .replicas = ways[i][1]};
        check_ok(fsdp_run_threads(j.ranks, rank_main, &j));
    }
}

static void expect(job j, const char *words)
{
    fsdp_run_threads(j.ranks, rank_main, &j);
    check_error(FSDP_MISMATCH, words);
}

static void test_found(void **state)
{
    (void)state;
    /* Of three or more replicas most are right, and the odd one is named. */
    expect((job){.ranks = 8, .replicas = 4, .bad = 5, .way = 1},
           "the shard of layers.1.up.weight of rank 5 is not as the others'");
    expect((job){.ranks = 3, .replicas = 3, .bad = 0, .way = 3},
           "the shard of in.bias of rank 0 is not as the others'");
    /* Of two nobody knows which. */
    expect((job){.ranks = 4, .replicas = 2, .bad = 2, .way = 3},
           "the shard of in.bias of rank 0, 2, and it does not show which is right");
    expect((job){.ranks = 4, .replicas = 2, .way = 2},
           "replicas have drifted apart: the shard of ");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_equal), cmocka_unit_test(test_found)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
