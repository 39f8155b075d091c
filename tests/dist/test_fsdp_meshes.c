/*
 * test_fsdp_meshes.c - parameters of one module on several meshes: the numbers of a run without
 * sharding, whose norm is the norm, and the errors.
 */
#include "sharded_net.h"

#include "ckpt/checkpoint.h"
#include "format/file.h"
#include "fsdp/unit.h"

enum { RANKS = 4, STEPS = 5, ROWS = 24 };

/* Which parameters are on which mesh besides the world's. */
typedef enum split {
    MLP,   /* up and down on (2, 2) */
    THREE, /* up on (2, 2), down on (4, 1) */
    ALL,   /* everything on (2, 2) but the biases of up, on (4, 1): nothing on the options' mesh */
    WIDE   /* up and down on (1, 4) */
} split;

typedef struct meshes {
    split split;
    fsdp_mesh *two, *four; /* of a rank: its own copy */
} meshes;

typedef struct job {
    split split;
    double factor;  /* by which gradients are divided; 0: default */
    double largest; /* of the gradients before the clipping of step 0 */
    int shared;     /* block 1 has block 0's weight of up */
    int twice;      /* each block runs twice */
    int ahead[2];   /* of block 1 on rank 0: of its own mesh, and of others */
    int reductions[RANKS], gathers[RANKS]; /* of block 0 in a step, on a rank */
} job;

static fsdp_mesh *mesh_of(void *arg, const char *name, const fsdp_param *p)
{
    const meshes *m = arg;
    (void)p;
    if (m->split == ALL) return strstr(name, "up.bias") ? m->four : m->two;
    if (m->split == WIDE) return strstr(name, ".up.") || strstr(name, ".down.") ? m->four : NULL;
    if (strstr(name, ".up.")) return m->two;
    if (strstr(name, ".down.")) return m->split == THREE ? m->four : m->two;
    return NULL;
}

static fsdp_mesh *grid(int replicate, int shard)
{
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {replicate, shard};
    return fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
}

static fsdp__fparam *part_of(fsdp_module *m, const char *name)
{
    return fsdp_module_param(m, name)->shard;
}

/* What became of block 0. */
static fsdp_status check_units(const net *n, const meshes *m)
{
    const net_block *b = (const net_block *)n->block[0];
    const fsdp__unit *host = fsdp__unit_of(n->block[0]);
    const fsdp__fparam *up = part_of(b->up, "weight"), *down = part_of(b->down, "weight"),
                       *bias = part_of(b->up, "bias"), *norm = part_of(b->norm, "weight");
    if (m->split == WIDE) {
        EXPECT(up->unit->host == host && up->unit->S == RANKS && up->unit->replicate);
        EXPECT(!host->part_mesh == !up->unit->part_mesh);
        return FSDP_OK;
    }
    EXPECT(fsdp_dtensor_mesh(up->sharded) == m->two && up->unit->S == 2 && up->unit->R == 2);
    int64_t rows = up->param->size[up->cut.outer > 1], half = (rows + 1) / 2;
    EXPECT(fsdp_size(up->sharded, up->cut.outer > 1) == (fsdp_rank() % 2 ? rows - half : half));
    if (m->split == ALL) {
        EXPECT(host->n_tied == 1 && up->unit == host && norm->unit == host);
        EXPECT(bias->unit->host == host && fsdp_dtensor_mesh(bias->sharded) == m->four);
        return FSDP_OK;
    }
    EXPECT(host->n_tied == (m->split == THREE ? 2 : 1) && norm->unit == host && host->S == RANKS);
    EXPECT(up->unit->host == host && bias->unit == up->unit);
    EXPECT((down->unit == up->unit) == (m->split == MLP));
    EXPECT(fsdp_dtensor_mesh(down->sharded) == (m->split == MLP ? m->two : m->four));
    return FSDP_OK;
}

static fsdp_status shard(net_run *r, net *n, fsdp_shard_options *o)
{
    const job *j = r->arg;
    meshes m = {.split = j->split, .two = grid(2, 2), .four = grid(4, 1)};
    if (m.split == WIDE) m.four = grid(1, 4);
    EXPECT(m.two && m.four);
    o->mesh_fn = mesh_of;
    o->mesh_arg = &m;
    for (int i = 0; i < n->n_blocks; i++)
        FSDP_TRY(fsdp_fully_shard(n->block[i], o));
    FSDP_TRY(fsdp_fully_shard(&n->base, o));
    return j->shared ? FSDP_OK : check_units(n, &m);
}

/* norm, up beside block 0's up, gelu, down, and a residual. */
static fsdp_tensor *shared_forward(fsdp_module *self, fsdp_tensor *x)
{
    net_block *b = (net_block *)self;
    fsdp_tensor *h = fsdp_call(b->norm, x);
    fsdp_tensor *other = fsdp_linear(h, fsdp_param_tensor(fsdp_module_param(self, "other")));
    return fsdp_add(x, fsdp_call(b->down, fsdp_gelu(fsdp_add(fsdp_call(b->up, h), other))));
}

/* in, each block twice, norm, head. */
static fsdp_tensor *twice_forward(fsdp_module *self, fsdp_tensor *x, fsdp_tensor *y)
{
    net *n = (net *)self;
    fsdp_tensor *h = fsdp_call(n->in, x);
    for (int i = 0; i < 2 * n->n_blocks; i++)
        h = fsdp_call(n->block[i / 2], h);
    h = fsdp_call(n->head, fsdp_call(n->norm, h));
    return fsdp_mse_loss(h, y, FSDP_REDUCE_MEAN);
}

/* Block 1 has the weight of block 0 too. */
static fsdp_status share(net_run *r, net *n)
{
    const job *j = r->arg;
    if (j->twice) n->base.forward2 = twice_forward;
    if (!j->shared) return FSDP_OK;
    fsdp_param *w = fsdp_module_param(((net_block *)n->block[0])->up, "weight");
    n->block[1]->forward1 = shared_forward;
    return fsdp_module_add_param(n->block[1], "other", fsdp_param_retain(w)) ? FSDP_OK
                                                                             : fsdp_error();
}

static void note(void *arg, fsdp_event_kind k, const char *unit)
{
    job *j = arg;
    if (fsdp_rank() == 0 && k == FSDP_EVENT_PREFETCH && !strncmp(unit, "layers.1", 8))
        j->ahead[strlen(unit) > 8]++;
    if (strncmp(unit, "layers.0", 8)) return;
    j->reductions[fsdp_rank()] += k == FSDP_EVENT_REDUCE;
    j->gathers[fsdp_rank()] += k == FSDP_EVENT_UNSHARD;
}

static fsdp_status prepare(net_run *r, net *n)
{
    job *j = r->arg;
    if (r->mesh == NET_PLAIN) return FSDP_OK;
    if (j->factor != 0) FSDP_TRY(fsdp_set_gradient_divide_factor(&n->base, j->factor, 1));
    return fsdp_set_event_hook(&n->base, note, j);
}

static fsdp_status look(net_run *r, net *n, int step)
{
    job *j = r->arg;
    double largest;
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    EXPECT(s.live[FSDP_UNSHARDED] == 0); /* the others' too */
    if (step > 0 || r->micro) return FSDP_OK;
    FSDP_TRY(fsdp_grad_norm(&n->base, INFINITY, &largest));
    if (fsdp_rank() == 0) j->largest = largest;
    return FSDP_OK;
}

static net_run run_of(job *j)
{
    return (net_run){.ranks = RANKS,
                     .blocks = 3,
                     .rows = ROWS,
                     .steps = STEPS,
                     .build = share,
                     .prepare = prepare,
                     .look = look,
                     .shard = shard,
                     .prefetch = 1,
                     .arg = j};
}

/* Without sharding, on one rank. */
static net_run plain(net_run r, job *j)
{
    r.mesh = NET_PLAIN;
    r.ranks = 1;
    r.arg = j;
    r.prefetch = r.private_gather = r.dim1 = r.sync = r.group_only = r.reshard_ranks = 0;
    net_go(&r);
    return r;
}

static void compare(net_run r, const net_run *one, const char *what)
{
    const job *j = r.arg, *of = one->arg;
    net_go(&r);
    net_close(&r, one, 2e-6, what);
    for (int s = 0; s < STEPS && !r.no_clip; s++)
        if (!(fabs(r.norm[s] - one->norm[s]) <= 1e-5 * one->norm[s]))
            fail_msg("%s: step %d: norm %.9g and %.9g", what, s, r.norm[s], one->norm[s]);
    if (!r.micro && !(fabs(j->largest - of->largest) <= 1e-5 * of->largest))
        fail_msg("%s: largest gradient %.9g and %.9g", what, j->largest, of->largest);
    net_free(&r);
}

static void test_parity(void **state)
{
    (void)state;
    job base = {0};
    net_run one = plain(run_of(&base), &base);
    for (int k = 0, left = 0; k < 4 * 4 * 2 * 4; k++) {
        job j = {.split = (split)(k % 4)};
        net_run r = run_of(&j);
        int policy = k / 4 % 4;
        r.policy = policy < 3 ? (fsdp_reshard_policy)policy : FSDP_RESHARD_AUTO;
        r.private_gather = k / 16 % 2;
        r.prefetch = k / 32 - 1;
        r.dim1 = k % 5 == 1;
        /* Of two shards 1/2 of the whole is the shard, as by ALWAYS. */
        if (policy == 3 && (j.split == MLP || j.split == WIDE)) r.reshard_ranks = 2;
        if (left++ % NET_STRIDE) continue;
        char what[64];
        snprintf(what, sizeof what, "case %d", k);
        compare(r, &one, what);
    }
    net_free(&one);
}

/* Frozen parameters, the optimizer in backward, shards in a file, a weight of two blocks. */
static void test_parity_of_others(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        job base = {0}, j = {.split = (split)(k % 3)};
        net_run r = run_of(&j);
        r.frozen = k == 0;
        r.in_backward = r.no_clip = k == 1;
        if (k == 1) r.look = NULL;
        if (k == 2) r.offload.kind = FSDP_OFFLOAD_FILE;
        if (k == 2) r.offload.folder = ".";
        j.shared = k == 3;
        base.shared = k == 3;
        net_run bare = r;
        bare.offload = (fsdp_offload_policy){0};
        net_run one = plain(bare, &base);
        if (k == 1) base.largest = j.largest = 0;
        compare(r, &one, "others");
        net_free(&one);
    }
}

static void test_microbatches(void **state)
{
    (void)state;
    for (int sync = 0; sync < 3; sync++) {
        job base = {0};
        net_run some = run_of(&base);
        some.micro = 3;
        net_run one = plain(some, &base);
        for (int k = 0; k < 6; k++) {
            job j = {.split = (split)(k % 3)};
            net_run r = run_of(&j);
            r.micro = 3;
            r.sync = sync > 0;
            r.group_only = sync == 2;
            r.private_gather = k / 3;
            compare(r, &one, "microbatches");
            /* block 0 has two or three units, each reduced once a step, or a microbatch */
            int units = j.split == THREE ? 3 : 2, all = units * (sync ? 3 : 1);
            /* without shards nothing is reduced inside their group */
            if (sync == 2 && j.split != MLP) all -= 2;
            for (int rank = 0; rank < RANKS; rank++)
                assert_int_equal(j.reductions[rank], STEPS * all);
            assert_true(j.gathers[0] > 0 && j.gathers[0] % units == 0);
        }
        net_free(&one);
    }
}

/* What is on other meshes is reduced when the module's others are: after each pass. */
static void test_passes(void **state)
{
    (void)state;
    job base = {.twice = 1}, j = {.split = MLP, .twice = 1};
    net_run one = plain(run_of(&base), &base);
    compare(run_of(&j), &one, "two passes");
    for (int rank = 0; rank < RANKS; rank++)
        assert_int_equal(j.reductions[rank], STEPS * 2 * 2);
    net_free(&one);
}

/* Between forward and backward all meshes of a module keep 1/k, where they are cut over more. */
static fsdp_status parts(void *arg)
{
    (void)arg;
    net *n = net_create(2);
    job j = {.split = WIDE};
    net_run r = run_of(&j);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_ranks = 2;
    EXPECT(n && shard(&r, n, &o) == FSDP_OK && fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = fsdp_call2(&n->base, fsdp_zeros(FSDP_F32, 2, SIZES(2, NET_IN)),
                                   fsdp_zeros(FSDP_F32, 2, SIZES(2, 1)));
    const fsdp__unit *host = fsdp__unit_of(n->block[0]), *other = host->tied[0];
    EXPECT(loss && host->state == FSDP__PART && other->state == FSDP__PART);
    EXPECT(fsdp_reshard(n->block[0]) == FSDP_OK);
    EXPECT(host->state == FSDP__SHARDED && other->state == FSDP__SHARDED);
    fsdp_scope_end(scope);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_parts(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(RANKS, parts, NULL));
}

/* A module that is gathered ahead is so on all its meshes, with one place of the limit. */
static void test_ahead(void **state)
{
    (void)state;
    job j = {.split = MLP};
    net_run r = run_of(&j);
    r.policy = FSDP_RESHARD_ALWAYS;
    net_go(&r);
    /* forward and backward of each step but the first */
    assert_int_equal(j.ahead[0], 2 * (STEPS - 1));
    assert_int_equal(j.ahead[1], j.ahead[0]);
    net_free(&r);
}

/* Each mesh divides by its ranks, or all by the factor that was set. */
static void test_factor(void **state)
{
    (void)state;
    job base = {0}, j = {.split = THREE, .factor = 2 * RANKS};
    net_run r = run_of(&base);
    r.no_clip = r.sgd = 1;
    r.steps = 1;
    net_run one = plain(r, &base);
    r.arg = &j;
    net_go(&r);
    for (int64_t i = 0; i < r.numel; i++)
        r.grads[i] *= 2;
    double d = net_distance(r.grads, one.grads, one.numel);
    if (!(d <= 2e-6)) fail_msg("gradients differ by %g", d);
    net_free(&r);
    net_free(&one);
}

/* ---- errors ------------------------------------------------------------------------------ */

static fsdp_mesh *up_on(void *mesh, const char *name, const fsdp_param *p)
{
    (void)p;
    return strstr(name, "up.") ? mesh : NULL;
}

static fsdp_mesh *fails(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    (void)p;
    fsdp_mesh_axis(arg, "none");
    return NULL;
}

static fsdp_status custom(void *arg, fsdp_tensor *out, fsdp_tensor *in, fsdp_group *g,
                          fsdp_work **work)
{
    (void)arg;
    (void)out;
    (void)in;
    (void)g;
    (void)work;
    return FSDP_OK;
}

static fsdp_status hook(void *arg, fsdp_tensor *sums)
{
    (void)arg;
    (void)sums;
    return FSDP_OK;
}

/* The error that is kept, on every rank; then all go on. */
static fsdp_status failed(net *n, fsdp_status code, const char *words)
{
    FSDP_TRY(check_failed(code, words));
    return fsdp_reset_iteration(&n->base);
}

/* Block 0 is not sharded with these options, and is as it was. */
static fsdp_status refuse(net *n, const fsdp_shard_options *o, fsdp_status code, const char *words)
{
    fsdp_fully_shard(n->block[0], o);
    FSDP_TRY(failed(n, code, words));
    EXPECT(!fsdp_is_sharded_module(n->block[0]));
    EXPECT(!fsdp_module_param(((net_block *)n->block[0])->up, "weight")->shard);
    return FSDP_OK;
}

static fsdp_status errors_of_meshes(net *n)
{
    const char *names[] = {"shard", "a", "b"};
    const int one[] = {RANKS}, three[] = {1, 1, RANKS};
    fsdp_mesh *world = fsdp_mesh_create(FSDP_CPU, 1, one, names);
    fsdp_shard_options o = fsdp_shard_defaults(world);
    o.mesh_fn = up_on;
    o.mesh_arg = fsdp_mesh_slice(world, "shard"); /* the same groups */
    EXPECT(refuse(n, &o, FSDP_INVALID_ARGUMENT,
                  "layers.0.norm.weight and layers.0.up.weight are on two meshes") == FSDP_OK);
    o.mesh_arg = fsdp_mesh_create(FSDP_CPU, 1, one, names); /* the same ranks */
    EXPECT(refuse(n, &o, FSDP_INVALID_ARGUMENT, "give both the same mesh object") == FSDP_OK);
    o.mesh_arg = fsdp_mesh_create(FSDP_CPU, 3, three, names);
    EXPECT(refuse(n, &o, FSDP_INVALID_ARGUMENT, "puts layers.0.up.weight on a mesh of 3 axes") ==
           FSDP_OK);
    o.mesh_arg = grid(2, 2);
    o.reshard_ranks = 4; /* divides four shards, not two */
    EXPECT(refuse(n, &o, FSDP_INVALID_ARGUMENT, "reshard_ranks 4 with 2 shards") == FSDP_OK);
    o.reshard_ranks = 0;
    o.mesh_fn = fails;
    return refuse(n, &o, FSDP_NOT_FOUND, "no mesh axis \"none\"");
}

static fsdp_status errors_of_setters(net *n)
{
    fsdp_module *b = n->block[0];
    fsdp_custom_all_gather gather = {.call = custom};
    fsdp_custom_reduce_scatter reduce = {.call = custom};
    fsdp_set_custom_all_gather(b, &gather);
    FSDP_TRY(failed(n, FSDP_INVALID_ARGUMENT, "parameters on 2 meshes"));
    fsdp_set_custom_reduce_scatter(b, &reduce);
    FSDP_TRY(failed(n, FSDP_INVALID_ARGUMENT, "parameters on 2 meshes"));
    fsdp_set_all_reduce_hook(b, hook, NULL, NULL);
    FSDP_TRY(failed(n, FSDP_INVALID_ARGUMENT, "parameters on 2 meshes"));
    EXPECT(fsdp_set_all_reduce_hook(n->block[1], hook, NULL, NULL) == FSDP_OK);
    EXPECT(fsdp_set_all_reduce_hook(n->block[1], NULL, NULL, NULL) == FSDP_OK);
    return FSDP_OK;
}

static fsdp_status errors(void *arg)
{
    (void)arg;
    net *n = net_create(2);
    EXPECT(n);
    FSDP_TRY(errors_of_meshes(n));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    EXPECT(fsdp_fully_shard(n->block[1], &o) == FSDP_OK);
    o.mesh_fn = up_on;
    o.mesh_arg = fsdp_mesh_slice(grid(2, 2), "shard"); /* nobody sums over the replicas */
    EXPECT(fsdp_fully_shard(n->block[0], &o) == FSDP_OK);
    EXPECT(errors_of_setters(n) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_call2(&n->base, fsdp_zeros(FSDP_F32, 2, SIZES(2, NET_IN)),
               fsdp_zeros(FSDP_F32, 2, SIZES(2, 1)));
    fsdp_scope_end(scope);
    FSDP_TRY(failed(n, FSDP_UNSUPPORTED, "axis \"shard\" of a mesh that also has \"replicate\""));
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_errors(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(RANKS, errors, NULL));
}

/* ---- by hand ------------------------------------------------------------------------------ */

/* Gathers, frees and whole copies by hand reach all meshes of a module. */
static fsdp_status by_hand(void *arg)
{
    (void)arg;
    net *n = net_create(2);
    meshes m = {.split = MLP, .two = grid(2, 2), .four = grid(4, 1)};
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mesh_fn = mesh_of;
    o.mesh_arg = &m;
    o.private_gather = 1;
    EXPECT(n && fsdp_fully_shard(n->block[0], &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    net_block *b = (net_block *)n->block[0];
    fsdp_param *up = fsdp_module_param(b->up, "weight"),
               *norm = fsdp_module_param(b->norm, "weight");
    EXPECT(fsdp_unshard(&b->base) == FSDP_OK);
    EXPECT(!fsdp_is_dtensor(fsdp_param_tensor(up)) && !fsdp_is_dtensor(fsdp_param_tensor(norm)));
    EXPECT(fsdp_reshard(&b->base) == FSDP_OK);
    EXPECT(fsdp_is_dtensor(fsdp_param_tensor(up)) && fsdp_is_dtensor(fsdp_param_tensor(norm)));
    fsdp_summon *s;
    EXPECT(fsdp_summon_full_params_begin(&n->base, NULL, &s) == FSDP_OK);
    EXPECT(!fsdp_is_dtensor(fsdp_param_tensor(up)));
    fsdp_no_grad_begin();
    EXPECT(fsdp_fill_(fsdp_param_tensor(up), 3) == FSDP_OK);
    fsdp_no_grad_end();
    EXPECT(fsdp_summon_full_params_end(s) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(up));
    double v[NET_H * NET_C];
    EXPECT(full && fsdp_to_doubles(full, v) == FSDP_OK && v[0] == 3 && v[NET_H * NET_C - 1] == 3);
    fsdp_scope_end(scope);
    EXPECT(fsdp_sync_module_states(&n->base, 2) == FSDP_OK);
    EXPECT(fsdp_check_replicas(&n->base) == FSDP_OK);
    EXPECT(fsdp_set_reproducible(&n->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_is_last_backward(&n->base, 1) == FSDP_OK); /* names are whole now */
    EXPECT(up->unit && !strcmp(up->unit, "layers.0 over replicate 2 x shard 2"));
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_by_hand(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(RANKS, by_hand, NULL));
}

/* ---- checkpoints --------------------------------------------------------------------------- */

typedef struct saved {
    char folder[64];
    bool load, plain;
    double *values; /* of all weights, by rank 0 */
} saved;

static fsdp_status ckpt_rank(void *arg)
{
    saved *c = arg;
    job j = {.split = THREE};
    net_run r = run_of(&j);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    fsdp__ckpt_state s = {.step = 3};
    net *n = net_create(2);
    int64_t numel;
    EXPECT(n && (c->plain || shard(&r, n, &o) == FSDP_OK));
    EXPECT(fsdp_reset_parameters(&n->base, c->load ? 8 : 7) == FSDP_OK);
    fsdp_optimizer *adamw = fsdp_adamw(&n->base, NULL);
    EXPECT(adamw);
    if (c->load)
        EXPECT(fsdp__ckpt_load(&n->base, adamw, c->folder, 3, &s) == FSDP_OK);
    else
        EXPECT(fsdp__ckpt_save(&n->base, adamw, c->folder, &s) == FSDP_OK);
    double *v = net_collect(n, 0, &numel);
    EXPECT(v);
    if (c->load) EXPECT(!memcmp(v, c->values, (size_t)numel * sizeof *v));
    if (!c->load && fsdp_rank() == 0)
        c->values = v;
    else
        free(v);
    fsdp_optimizer_free(adamw);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

/* What was saved from several meshes is loaded without any, and the other way round. */
static void test_checkpoint(void **state)
{
    (void)state;
    for (int back = 0; back < 2; back++) {
        saved c = {.folder = "/tmp/fsdp_meshes_XXXXXX", .plain = back};
        assert_non_null(mkdtemp(c.folder));
        check_ok(fsdp_run_threads(back ? 1 : RANKS, ckpt_rank, &c));
        c.load = true;
        c.plain = !back;
        check_ok(fsdp_run_threads(back ? RANKS : 1, ckpt_rank, &c));
        free(c.values);
        check_ok(fsdp__dir_remove(c.folder));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parity),       cmocka_unit_test(test_parity_of_others),
        cmocka_unit_test(test_microbatches), cmocka_unit_test(test_factor),
        cmocka_unit_test(test_errors),       cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_passes),       cmocka_unit_test(test_parts),
        cmocka_unit_test(test_ahead),        cmocka_unit_test(test_checkpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
