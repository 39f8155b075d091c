/*
 * test_conf_memory.c - upstream's test_fully_shard_memory.py: bytes by purpose, exact, of one rank.
 *
 * Letters: U the whole bytes of the largest unit, B those of the root's own parameters, M the
 * model's, S this rank's shards. Bounds are those of the design and lie below upstream's: a
 * gathered unit exists once, so what is unsharded at one time is the running unit, those around it
 * and those gathered ahead; at most two units hold whole gradients besides the root.
 */
#include "nets.h"

#include "comm/comm.h"

static const int worlds[] = {1, 2, 4, 8};
enum { WORLDS = sizeof worlds / sizeof *worlds, BLOCKS = 4 };

typedef struct memory {
    int policy; /* conf_policy's number */
    int prefetch;
    int offload;     /* shards in a file */
    int in_backward; /* the optimizer steps there */
    int meshes;      /* feed-forwards are on a mesh of two replicas, beside the others */
} memory;

typedef struct sizes {
    int64_t U, B, M, S;
    int64_t sums; /* of one block's reductions, on their way over the replicas */
} sizes;

static fsdp_status add_bytes(fsdp_named_param *p, void *arg)
{
    sizes *z = arg;
    int64_t n = 4;
    for (int d = 0; d < fsdp_param_ndim(p->param); d++)
        n *= fsdp_param_sizes(p->param)[d];
    z->M += n;
    if (strncmp(p->name, "layers.", 7)) z->B += n;
    if (!strncmp(p->name, "layers.0.", 9)) z->U += n;
    z->S += 4 * fsdp_numel(fsdp_param_shard(p->param));
    return FSDP_OK;
}

static fsdp_memory_stats bytes(void)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    return s;
}

static fsdp_mesh *by_name(void *mesh, const char *name, const fsdp_param *p)
{
    (void)p;
    return strstr(name, ".w1.") || strstr(name, ".w2.") ? mesh : NULL;
}

/* Two replicas, where there are two ranks. */
static fsdp_mesh *two_replicas(void)
{
    const char *names[] = {"replicate", "shard"};
    int n = fsdp_world_size(), grid[] = {n > 1 ? 2 : 1, n > 1 ? n / 2 : 1};
    return fsdp_mesh_create(FSDP_CPU, 2, grid, names);
}

static fsdp_status build(const memory *c, conf_lm **out, sizes *z)
{
    CHECK_OK(fsdp_device_push(FSDP_META));
    conf_lm *m = *out = conf_lm_create(BLOCKS, 0);
    fsdp_device_pop();
    CHECK(m);
    conf_parity p = {.options =
                         conf_policy(fsdp_shard_defaults(NULL), c->policy, fsdp_world_size())};
    p.options.prefetch_limit = c->prefetch;
    if (c->offload) p.options.offload = conf_offload(2);
    if (c->meshes) {
        p.options.mesh_fn = by_name;
        CHECK(p.options.mesh_arg = two_replicas());
    }
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(fsdp_to_empty(&m->base, FSDP_CPU));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    *z = (sizes){0};
    CHECK_OK(conf_each_param(&m->base, add_bytes, z));
    /* Of two units at a time at most, cache lines between parameters. */
    if (c->meshes) z->sums = 2 * (z->U / fsdp_mesh_size(p.options.mesh_arg, 1) + 4 * 64);
    return FSDP_OK;
}

/* One step with the peaks of its phases checked; the second and later ones gather ahead. */
static fsdp_status step_within(const memory *c, conf_lm *m, fsdp_optimizer *o, const sizes *z,
                               int step)
{
    int alone = fsdp_world_size() == 1;
    int ahead = c->prefetch > 0 && step > 0 ? c->prefetch : c->prefetch == 0 ? 1 : 0;
    int64_t whole = c->policy == 2 ? z->M : (1 + ahead) * z->U + z->B;
    if (whole > z->M) whole = z->M;
    /* Beside it what an integer keeps after forward, rows rounded up. */
    if (c->policy == 3 && fsdp_world_size() > 2) whole += z->M / 2 + z->M / 16;
    if (alone) whole = 0; /* the shards' own memory */
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_memory_reset_peak();
    fsdp_tensor *loss = conf_loss(fsdp_call(&m->base, conf_tokens(2, step)));
    CHECK(loss);
    CHECK(bytes().peak[FSDP_UNSHARDED] <= whole);
    CHECK(bytes().peak[FSDP_GRADIENTS] == 0);
    fsdp_memory_reset_peak();
    CHECK_OK(fsdp_backward(loss));
    fsdp_memory_stats s = bytes();
    CHECK(s.peak[FSDP_UNSHARDED] <= whole && s.live[FSDP_UNSHARDED] == 0);
    int64_t shards = c->in_backward ? (alone ? 2 * z->U + z->B : z->U) : z->S;
    if (c->offload) shards = alone ? z->S : z->U;
    int64_t grads = alone ? shards + z->U : shards + 2 * z->U + z->B + z->sums;
    CHECK(s.peak[FSDP_GRADIENTS] <= grads);
    if (!c->offload && !c->in_backward) CHECK(s.live[FSDP_GRADIENTS] == z->S);
    if (c->in_backward) CHECK(s.live[FSDP_GRADIENTS] == 0);
    CHECK_OK(fsdp_optimizer_step(o));
    fsdp_scope_end(scope);
    s = bytes();
    int64_t kept = c->offload ? 0 : z->S;
    CHECK(s.live[FSDP_PARAMETERS] == kept && s.offloaded[FSDP_PARAMETERS] == z->S - kept);
    CHECK(s.live[FSDP_OPTIMIZER] == 2 * z->S);
    CHECK(s.live[FSDP_ACTIVATIONS] == 0);
    CHECK_OK(fsdp_zero_grad(&m->base));
    s = bytes();
    CHECK(s.live[FSDP_GRADIENTS] == 0 && s.offloaded[FSDP_GRADIENTS] == 0);
    CHECK(s.live[FSDP_PARAMETERS] + s.live[FSDP_OPTIMIZER] == kept + 2 * z->S);
    return FSDP_OK;
}

static fsdp_status memory_rank(void *arg)
{
    const memory *c = arg;
    conf_lm *m;
    sizes z;
    fsdp_memory_reset_peak();
    int64_t before = bytes().peak[FSDP_PARAMETERS];
    CHECK_OK(build(c, &m, &z));
    /* Made on meta: never more than the shards. */
    CHECK(bytes().live[FSDP_PARAMETERS] == (c->offload ? 0 : z.S));
    CHECK(bytes().peak[FSDP_PARAMETERS] - before <= z.S);
    fsdp_optimizer *o = fsdp_adamw(&m->base, NULL);
    CHECK(o);
    if (c->in_backward) CHECK_OK(fsdp_optimizer_in_backward(o, 1));
    for (int step = 0; step < 4; step++)
        CHECK_OK(step_within(c, m, o, &z, step));
    fsdp_optimizer_free(o);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* At most: S at init, what runs, stands around or comes next in forward and backward, S and two
 * units of gradients in backward, 4 S at the step and 3 S after zero_grad; with shards in a file
 * none of the parameters' S, with the step in backward none of the gradients'. */
static void test_fully_shard_training_memory(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES * 4; k++) {
            memory c = {.policy = k % CONF_POLICIES,
                        .prefetch = k % 3 - 1,
                        .offload = k / CONF_POLICIES == 1,
                        .in_backward = k / CONF_POLICIES == 2};
            if (k / CONF_POLICIES == 3) c.prefetch = 2;
            if (k % 5 == 2 && worlds[i] == 4)
                conf_processes(worlds[i], memory_rank, &c);
            else
                conf_ranks(worlds[i], memory_rank, &c);
        }
}

/* ---- no growth ---------------------------------------------------------------------- */

enum { SETTLES = 16 }; /* 64 places, 5 gathers or reductions a step */

static fsdp_status growth_rank(void *arg)
{
    const memory *c = arg;
    conf_lm *m;
    sizes z;
    CHECK_OK(build(c, &m, &z));
    fsdp_optimizer *o = fsdp_adamw(&m->base, NULL);
    CHECK(o);
    fsdp_memory_stats first = {0}, settled = {0};
    for (int step = 0; step < SETTLES + 10; step++) {
        CHECK_OK(step_within(c, m, o, &z, step));
        fsdp_memory_stats s = bytes();
        if (step == 2) first = s;
        if (step == SETTLES) settled = s;
        for (int k = 0; k < FSDP_PURPOSE_COUNT && step > 2; k++)
            CHECK(k == FSDP_COMMUNICATION || s.live[k] == first.live[k]);
        if (step <= SETTLES) continue;
        CHECK(s.live_total == settled.live_total && s.reserved == settled.reserved);
    }
    fsdp_optimizer_free(o);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* Live bytes after each step are those after the third; those of communication and reserved ones no
 * longer move when each place of a lane's ring has described its largest collective. */
static void test_fully_shard_training_memory_no_gc(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            memory c = {.policy = k, .prefetch = 1};
            conf_ranks(worlds[i], growth_rank, &c);
        }
}

/* Two units a block, over a mesh each: the same bounds, since what runs, stands around or is
 * gathered ahead is the same, and the sums that go over replicas beside the gradients. */
static void test_per_param_mesh_training_memory_no_gc(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            memory c = {.policy = k, .prefetch = 1, .meshes = 1};
            if (k == 3 && worlds[i] == 2) continue; /* parts of one shard: test_fsdp_meshes */
            conf_ranks(worlds[i], growth_rank, &c);
        }
}

/* ---- all of it goes ----------------------------------------------------------------- */

static fsdp_status freed_rank(void *arg)
{
    const memory *c = arg;
    int64_t before = check_live(), live, touched;
    conf_lm *m;
    sizes z;
    CHECK_OK(build(c, &m, &z));
    CHECK(check_live() > before || c->offload);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = conf_loss(fsdp_call(&m->base, conf_tokens(2, 0)));
    CHECK_OK(fsdp_backward(loss));
    /* In the middle of things too: whole parameters, gradients, handles that nobody waits for. */
    CHECK(fsdp_call(&m->base, conf_tokens(2, 1)));
    fsdp_scope_end(scope);
    fsdp_module_free(&m->base);
    CHECK(check_live() == before);
    CHECK(bytes().offloaded_total == 0);
    fsdp__shared_bytes(fsdp_group_world(), &live, &touched);
    CHECK(live == 0);
    return FSDP_OK;
}

/* Freeing the model frees shards, gathered copies, gradients and what lies in files. */
static void test_fully_shard_del_memory(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2 * CONF_POLICIES; k++) {
            memory c = {.policy = k / 2,
                        .prefetch = 1,
                        .offload = k & 1,
                        .meshes = worlds[i] == 4 && k % 3};
            conf_ranks(worlds[i], freed_rank, &c);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_fully_shard_training_memory),
        CONF_TEST(test_fully_shard_training_memory_no_gc),
        CONF_TEST(test_per_param_mesh_training_memory_no_gc),
        CONF_TEST(test_fully_shard_del_memory),
    };
    return conf_main("memory", tests, sizeof tests / sizeof *tests, argc, argv);
}
