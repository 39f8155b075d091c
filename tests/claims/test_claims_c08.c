/*
 * test_claims_c08.c - C08: the peak of unsharded bytes is that of units, not
 * of the model.
 *
 * U: bytes of a block. In forward at most the running block, one gathered
 * ahead and the root are whole; in backward two blocks' gradients and the
 * root's come to that. Whatever the number of blocks; as one unit the peak is
 * the whole model.
 */
#include "sharded_net.h"

enum { LIMIT = 1 };

typedef struct peaks {
    int64_t forward, backward, gradients; /* of the last step */
    int64_t block, root, own;             /* bytes: a block, the root's own, this rank's shards */
} peaks;

static fsdp_status after_forward(void *arg, fsdp_module *m, const fsdp_values *in, fsdp_values *out)
{
    (void)m;
    (void)in;
    (void)out;
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    ((peaks *)arg)->forward = s.peak[FSDP_UNSHARDED];
    fsdp_memory_reset_peak();
    return FSDP_OK;
}

static fsdp_status prepare(net_run *r, net *n)
{
    peaks *p = (peaks *)r->arg + fsdp_rank();
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    p->own = s.live[FSDP_PARAMETERS];
    p->block = 4 * fsdp_module_numel(n->block[0]);
    p->root = 4 * fsdp_module_numel(&n->base) - n->n_blocks * p->block;
    fsdp_memory_reset_peak();
    return fsdp_register_forward_hook(&n->base, after_forward, p, 0) < 0 ? fsdp_error() : FSDP_OK;
}

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    peaks *p = (peaks *)r->arg + fsdp_rank();
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    p->backward = s.peak[FSDP_UNSHARDED];
    p->gradients = s.peak[FSDP_GRADIENTS];
    fsdp_memory_reset_peak();
    return FSDP_OK;
}

static void test_c08(void **state)
{
    (void)state;
    for (int private = 0; private < 2; private ++)
        for (int blocks = 4; blocks <= 16; blocks *= 2) {
            peaks p[2] = {{0, 0, 0, 0, 0, 0}};
            net_run r = {.ranks = 2,
                         .blocks = blocks,
                         .rows = 4,
                         .steps = 4,
                         .policy = FSDP_RESHARD_ALWAYS,
                         .prefetch = LIMIT,
                         .private_gather = private,
                         .prepare = prepare,
                         .look = look,
                         .arg = p};
            net_go(&r);
            net_free(&r);
            for (int k = 0; k < 2; k++) {
                int64_t U = p[k].block, root = p[k].root;
                if (p[k].forward > 2 * U + root || p[k].forward < U + root)
                    fail_msg("%d blocks: forward %lld; a block has %lld, the root %lld", blocks,
                             (long long)p[k].forward, (long long)U, (long long)root);
                if (p[k].backward > 2 * U + root)
                    fail_msg("%d blocks: backward %lld", blocks, (long long)p[k].backward);
                /* Whole gradients of two blocks and the root, and the shards' own. */
                if (p[k].gradients > 2 * U + root + p[k].own)
                    fail_msg("%d blocks: gradients %lld; a block has %lld, the root %lld, shards "
                             "%lld",
                             blocks, (long long)p[k].gradients, (long long)U, (long long)root,
                             (long long)p[k].own);
            }
            r.whole = 1;
            net_go(&r);
            net_free(&r);
            for (int k = 0; k < 2; k++)
                assert_int_equal(p[k].forward, p[k].root + blocks * p[k].block);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c08)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
