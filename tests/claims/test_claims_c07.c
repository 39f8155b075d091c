/*
 * test_claims_c07.c - C07: outside computation parameters, gradients and
 * AdamW's state are each 1/N a rank, up to the padding of uneven shapes.
 *
 * A rank's rows are ceil(d0 / N) at most, so the exact bytes of each rank are
 * those of its rows; that is what is expected here.
 */
#include "sharded_net.h"

typedef struct bytes {
    int64_t parameters, gradients, optimizer, unsharded, expected, total;
} bytes;

static int64_t own_bytes(net *n, int64_t *total)
{
    fsdp_param_list l;
    int64_t sum = 0;
    *total = 0;
    if (fsdp_module_params(&n->base, &l) != FSDP_OK) return -1;
    for (int64_t i = 0; i < l.count; i++) {
        const int64_t *s = fsdp_param_sizes(l.items[i].param);
        int64_t N = fsdp_world_size(), r = fsdp_rank(), chunk = (s[0] + N - 1) / N;
        int64_t rows = s[0] - r * chunk, inner = 1;
        rows = rows < 0 ? 0 : rows > chunk ? chunk : rows;
        for (int d = 1; d < fsdp_param_ndim(l.items[i].param); d++)
            inner *= s[d];
        sum += 4 * rows * inner;
        *total += 4 * s[0] * inner;
    }
    fsdp_param_list_free(&l);
    return sum;
}

static void put(bytes *b)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    b->parameters = m.live[FSDP_PARAMETERS];
    b->gradients = m.live[FSDP_GRADIENTS];
    b->optimizer = m.live[FSDP_OPTIMIZER];
    b->unsharded = m.live[FSDP_UNSHARDED];
}

static fsdp_status look(net_run *r, net *n, int step)
{
    (void)step;
    bytes *b = (bytes *)r->arg + fsdp_rank();
    put(b); /* after backward; the optimizer's state is there from step 1 on */
    b->expected = own_bytes(n, &b->total);
    return FSDP_OK;
}

static void test_c07(void **state)
{
    (void)state;
    for (int n = 1; n <= 8; n *= 2)
        for (int policy = 0; policy < 2; policy++) {
            bytes b[8] = {{0, 0, 0, 0, 0, 0}};
            net_run r = {.ranks = n,
                         .blocks = 4,
                         .rows = 8,
                         .steps = 3,
                         .prefetch = 2,
                         .policy = policy ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER,
                         .look = look,
                         .arg = b};
            net_go(&r);
            net_free(&r);
            int64_t sum = 0;
            for (int k = 0; k < n; k++) {
                assert_int_equal(b[k].parameters, b[k].expected);
                assert_int_equal(b[k].gradients, b[k].expected);
                assert_int_equal(b[k].optimizer, 2 * b[k].expected);
                assert_int_equal(b[k].unsharded, 0);
                sum += b[k].expected;
            }
            assert_int_equal(sum, b[0].total);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c07)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
