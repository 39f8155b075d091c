/*
 * test_rc_delays.c - RC-40: prefetch on and off, each message of each rank delayed by a random
 * time, ten steps with a save in the middle: losses, norms, weights and the bytes of the checkpoint
 * are the same to the bit.
 */
#include "sharded_net.h"

#include <time.h>
#include <unistd.h>

#include "base/rng.h"
#include "ckpt/checkpoint.h"
#include "comm/comm.h"
#include "format/file.h"

enum { STEPS = 10, SAVED = 5 };

typedef struct job {
    net_run r;
    uint64_t seed; /* of the delays; 0: none */
    char folder[128];
} job;

typedef struct delays {
    uint64_t key, calls;
} delays;

/* Up to 400 us, and nothing for every second message. */
static void disturb(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    (void)lane;
    (void)c;
    (void)label;
    delays *d = arg;
    uint32_t x = fsdp__rng_u32(d->key, d->calls++);
    if (x & 1) return;
    struct timespec t = {0, (long)(x % 400000)};
    nanosleep(&t, NULL);
}

static fsdp_status train(job *j, net *n, fsdp_optimizer *o)
{
    for (int i = 0; i < STEPS; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status s = net_step(&j->r, n, o, i);
        fsdp_scope_end(scope);
        FSDP_TRY(s);
        if (i + 1 != SAVED) continue;
        fsdp__ckpt_state state = {.step = SAVED, .samples = SAVED};
        FSDP_TRY(fsdp__ckpt_save(&n->base, o, j->folder, &state));
    }
    int64_t numel;
    double *p = net_collect(n, 0, &numel);
    EXPECT(p);
    if (fsdp_rank() == 0)
        j->r.params = p, j->r.numel = numel;
    else
        free(p);
    return FSDP_OK;
}

static fsdp_status run_rank(void *arg)
{
    job *j = arg;
    delays d = {fsdp__rng_mix(fsdp__rng_key(j->seed), (uint64_t)fsdp_rank()), 0};
    if (j->seed) fsdp__comm_set_disturb(disturb, &d);
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    net *n = net_create(j->r.blocks);
    fsdp_device_pop();
    EXPECT(n);
    EXPECT(net_shard(&j->r, n) == FSDP_OK);
    EXPECT(fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 42) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_optimizer *o = fsdp_adamw(&n->base, &a);
    fsdp_status s = o ? train(j, n, o) : fsdp_error();
    fsdp_optimizer_free(o);
    fsdp_module_free(&n->base);
    fsdp__comm_set_disturb(NULL, NULL);
    if (j->seed && s == FSDP_OK) EXPECT(d.calls > 100);
    return s;
}

static void same_checkpoints(const char *a, const char *b, int ranks)
{
    for (int r = 0; r < ranks; r++) {
        char path[2][256], *bytes[2];
        size_t len[2];
        for (int k = 0; k < 2; k++) {
            snprintf(path[k], sizeof path[k], "%s/step-%d/rank-%05d-of-%05d.safetensors", k ? b : a,
                     SAVED, r, ranks);
            check_ok(fsdp__file_read(path[k], &bytes[k], &len[k]));
        }
        assert_int_equal(len[0], len[1]);
        assert_memory_equal(bytes[0], bytes[1], len[0]);
        free(bytes[0]);
        free(bytes[1]);
    }
}

static void go(job *j, const char *dir, const char *name)
{
    snprintf(j->folder, sizeof j->folder, "%s/%s", dir, name);
    check_ok(fsdp_run_threads(j->r.ranks, run_rank, j));
}

static void test_rc40(void **state)
{
    (void)state;
    char dir[] = "/tmp/fsdp-rc40-XXXXXX";
    assert_non_null(mkdtemp(dir));
    for (int ranks = 2; ranks <= 4; ranks++) {
        job still = {.r = {.ranks = ranks,
                           .blocks = 4,
                           .rows = 24,
                           .steps = STEPS,
                           .policy = FSDP_RESHARD_ALWAYS,
                           .prefetch = -1}};
        char name[32];
        snprintf(name, sizeof name, "still-%d", ranks);
        go(&still, dir, name);
        for (int way = 0; way < 5; way++) {
            static const int ahead[] = {-1, 0, 1, 3, 2};
            job j = still;
            j.r.params = j.r.grads = NULL;
            j.r.prefetch = ahead[way];
            j.r.private_gather = way == 4;
            j.seed = (uint64_t)(10 * ranks + way);
            snprintf(name, sizeof name, "way-%d-%d", ranks, way);
            go(&j, dir, name);
            net_same(&j.r, &still.r, name);
            same_checkpoints(j.folder, still.folder, ranks);
            net_free(&j.r);
        }
        net_free(&still.r);
    }
    check_ok(fsdp__dir_remove(dir));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rc40)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
