/*
 * test_fsdp_delays.c - ranks that are late: delays before gathers, reductions and the optimizer's
 * step, other ones on each rank, change no bit, on any layout.
 */
#include <time.h>

#include "base/rng.h"
#include "comm/comm.h"
#include "sharded_net.h"

static const net_run base = {.blocks = 3,
                             .rows = 24,
                             .steps = 5,
                             .policy = FSDP_RESHARD_ALWAYS,
                             .prefetch = 1,
                             .micro = 2,
                             .sync = 1};

typedef struct late {
    uint64_t key;
    uint64_t n;
} late;

static late lates[8];

static void nap(late *l)
{
    uint32_t us = fsdp__rng_u32(l->key, l->n++) % 800;
    if (us > 400) return; /* not all of them */
    struct timespec t = {0, (long)us * 1000};
    nanosleep(&t, NULL);
}

static void before_collective(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    (void)lane;
    (void)c;
    (void)label;
    nap(arg);
}

static void at_each_step(void *arg)
{
    late *l = arg;
    if (fsdp__rng_u32(l->key, l->n++) % 16 == 0) nap(l);
}

static fsdp_status prepare(net_run *r, net *n)
{
    (void)n;
    late *l = &lates[fsdp_rank()];
    *l = (late){fsdp__rng_mix(fsdp__rng_key(11), (uint64_t)fsdp_rank()), 0};
    fsdp__comm_set_disturb(before_collective, l);
    if (r->frozen == 0 && r->arg) fsdp__comm_set_schedule(at_each_step, l);
    return FSDP_OK;
}

static fsdp_status before_step(net_run *r, net *n, int step)
{
    (void)r;
    (void)n;
    (void)step;
    nap(&lates[fsdp_rank()]);
    return FSDP_OK;
}

static void test_delays(void **state)
{
    (void)state;
    /* Ranks, replicas (0: one axis), k of an integer reshard, a reduction more in flight. */
    static const int layouts[][3] = {{2, 0, 0}, {3, 0, 0}, {4, 2, 0}, {4, 0, 2}, {8, 2, 2}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int way = (int)i % NET_STRIDE; way < 4; way += NET_STRIDE) {
            net_run r = base, other;
            char what[64];
            r.ranks = layouts[i][0];
            r.replicas = layouts[i][1];
            r.mesh = r.replicas ? NET_HYBRID : NET_SHARD;
            r.reshard_ranks = layouts[i][2];
            r.private_gather = way % 2;
            r.group_only = way == 2 && r.replicas > 0;
            if (way == 3) r.policy = FSDP_RESHARD_NEVER;
            net_go(&r);
            other = r;
            other.prepare = prepare;
            other.look = before_step;
            other.arg = way / 2 ? &other : NULL; /* within the collectives too */
            net_go(&other);
            snprintf(what, sizeof what, "layout %zu, way %d", i, way);
            net_same(&other, &r, what);
            net_free(&r);
            net_free(&other);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_delays)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
