/*
 * test_conf_extensions.c - upstream's test_fully_shard_extensions.py, and the rows of other files
 * that put something of the user's into a unit's communication.
 *
 * ctest: slow
 */
#include "nets.h"

#include "comm/comm.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- what travels ------------------------------------------------------------------- */

/* Two inputs a parameter: the weight rounded to bf16, and what that left over. Exact. */
static fsdp_status split(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    (void)i;
    ++*(int *)arg;
    out->n = 2;
    out->t[0] = fsdp_cast(shard, FSDP_BF16);
    out->t[1] = fsdp_sub(fsdp_cast(shard, FSDP_F32), fsdp_cast(out->t[0], FSDP_F32));
    return fsdp_error();
}

static fsdp_status join(void *arg, fsdp_gather_info *i, const fsdp_values *gathered,
                        fsdp_tensor *out)
{
    (void)arg;
    (void)i;
    fsdp_tensor *whole = fsdp_add(fsdp_cast(gathered->t[0], FSDP_F32), gathered->t[1]);
    return fsdp_copy_(out, whole);
}

typedef struct ext {
    int replicas, meta, offload;
} ext;

static fsdp_module *mlps_create(const conf_parity *p)
{
    const ext *e = p->arg;
    if (e->meta && fsdp_device_push(FSDP_META) != FSDP_OK) return NULL;
    fsdp_module *m = conf_mlps_create(3, p->dim);
    if (e->meta) fsdp_device_pop();
    return m;
}

static fsdp_status split_shard(const conf_parity *p, fsdp_module *m)
{
    static _Thread_local int calls;
    const ext *e = p->arg;
    conf_parity q = *p;
    fsdp_gather_extension x = {split, join, &calls};
    if (e->replicas) q.options.mesh = conf_hybrid_mesh(e->replicas);
    CHECK_OK(conf_shard_children(&q, m));
    return fsdp_set_all_gather_extension(m, "*", &x);
}

/* Each parameter travels as two tensors that callbacks make and join: the plain module's training.
 */
static void test_all_gather_extensions_train_parity(void)
{
    static const ext none = {0};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++)
            for (int dim = 4; dim < 6; dim++) {
                conf_parity p = {.make = mlps_create,
                                 .shard = split_shard,
                                 .arg = &none,
                                 .dim = dim,
                                 .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
                if (k == 0)
                    conf_processes(worlds[i], conf_parity_rank, &p);
                else
                    conf_ranks(worlds[i], conf_parity_rank, &p);
            }
}

/* With callbacks and without: the same losses and weights of two sharded trainings. */
static fsdp_status beside_rank(void *arg)
{
    conf_parity p = *(const conf_parity *)arg;
    double a[CONF_STEPS], b[CONF_STEPS];
    conf_numbers v = {0}, w = {0};
    CHECK_OK(conf_train(&p, 1, a, &v));
    p.shard = conf_shard_children;
    CHECK_OK(conf_train(&p, 1, b, &w));
    CHECK(!memcmp(a, b, sizeof a) && a[0] != a[CONF_STEPS - 1]);
    CHECK(conf_distance(&v, &w) == 0 && v.n > 0);
    free(v.v);
    free(w.v);
    return FSDP_OK;
}

/* From meta, computing in bf16: what callbacks hand over is what would have been gathered. */
static void test_all_gather_extensions_end_to_end(void)
{
    static const ext meta = {.meta = 1};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = mlps_create,
                             .shard = split_shard,
                             .arg = &meta,
                             .dim = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            p.options.mp_policy.param_dtype = FSDP_BF16;
            conf_ranks(worlds[i], beside_rank, &p);
        }
}

/* ---- set late ----------------------------------------------------------------------- */

static fsdp_status to_low(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    (void)i;
    ++*(int *)arg;
    out->n = 1;
    out->t[0] = fsdp_cast(shard, FSDP_BF16);
    return fsdp_error();
}

static fsdp_status from_low(void *arg, fsdp_gather_info *i, const fsdp_values *gathered,
                            fsdp_tensor *out)
{
    ++((int *)arg)[1];
    CHECK(i->compute == FSDP_F32 && fsdp_tensor_dtype(out) == FSDP_F32);
    return fsdp_copy_(out, gathered->t[0]);
}

static fsdp_status late_rank(void *arg)
{
    (void)arg;
    int calls[2] = {0, 0};
    if (fsdp_device_push(FSDP_META) != FSDP_OK) return fsdp_error();
    fsdp_module *m = conf_mlp_create(6, 2);
    fsdp_device_pop();
    fsdp_module *plain = conf_mlp_create(6, 2);
    CHECK(m && plain);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK_OK(fsdp_to_empty(m, FSDP_CPU));
    fsdp_gather_extension x = {to_low, from_low, calls};
    CHECK_OK(fsdp_set_all_gather_extension(m, "*", &x));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    CHECK_OK(fsdp_reset_parameters(plain, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, conf_input(3, 6, 0));
    CHECK(y && fsdp_tensor_dtype(y) == FSDP_F32);
    CHECK(calls[0] == 4 && calls[1] == 4);
    CHECK_OK(fsdp_unshard(m));
    fsdp_param *a = fsdp_module_param(fsdp_module_child(m, 0), "weight");
    fsdp_param *b = fsdp_module_param(fsdp_module_child(plain, 0), "weight");
    fsdp_tensor *rounded = fsdp_cast(fsdp_cast(fsdp_param_tensor(b), FSDP_BF16), FSDP_F32);
    CHECK(check_same_bits(fsdp_param_tensor(a), rounded));
    CHECK_OK(fsdp_backward(conf_loss(y)));
    CHECK(check_same_bits(fsdp_dtensor_full(fsdp_param_tensor(a)), fsdp_param_tensor(b)));
    CHECK(fsdp_tensor_dtype(fsdp_grad(fsdp_param_tensor(a))) == FSDP_F32);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    fsdp_module_free(plain);
    return FSDP_OK;
}

/* Callbacks that are set after to_empty count from the first forward: fp32 parameters travel in
 * bf16, and the shards stay fp32. */
static void test_all_gather_extensions_monkey_patch(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_processes(worlds[i], late_rank, NULL);
}

/* ---- what callbacks are told -------------------------------------------------------- */

typedef struct told {
    int64_t rows; /* of the parameter, along the dim that is cut */
    int shards, calls;
} told;

static fsdp_status told_pre(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    told *t = arg;
    int64_t chunk = (t->rows + t->shards - 1) / t->shards;
    int64_t first = fsdp_mesh_coordinate(i->mesh, 0) * chunk;
    int64_t mine = t->rows - first < 0 ? 0 : t->rows - first < chunk ? t->rows - first : chunk;
    CHECK(fsdp_mesh_ndim(i->mesh) == 1 && fsdp_mesh_size(i->mesh, 0) == t->shards);
    CHECK(i->ndim == 2 && i->dim == 0 && i->sizes[0] == t->rows && i->sizes[1] == 3);
    CHECK(fsdp_size(shard, 0) == mine && fsdp_size(shard, 1) == 3);
    CHECK(!strcmp(i->name, "weight") && i->mp_policy);
    t->calls++;
    out->n = 1;
    out->t[0] = fsdp_clone(shard);
    return fsdp_error();
}

static fsdp_status told_post(void *arg, fsdp_gather_info *i, const fsdp_values *gathered,
                             fsdp_tensor *out)
{
    const told *t = arg;
    CHECK(fsdp_size(gathered->t[0], 0) == t->rows && i->sizes[0] == t->rows);
    return fsdp_copy_(out, gathered->t[0]);
}

static fsdp_status told_rank(void *arg)
{
    int replicas = *(const int *)arg;
    static const int64_t rows[] = {8, 5, 3, 1};
    for (int k = 0; k < 4; k++) {
        fsdp_module *m = fsdp_linear_create(3, rows[k], 0);
        CHECK(m);
        fsdp_shard_options o = fsdp_shard_defaults(replicas ? conf_hybrid_mesh(replicas) : NULL);
        o.reshard_after_forward = FSDP_RESHARD_NEVER;
        CHECK_OK(fsdp_fully_shard(m, &o));
        told t = {rows[k], fsdp_world_size() / (replicas ? replicas : 1), 0};
        fsdp_gather_extension x = {told_pre, told_post, &t};
        CHECK_OK(fsdp_set_all_gather_extension(m, "weight", &x));
        CHECK_OK(fsdp_reset_parameters(m, 1));
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *y = fsdp_call(m, conf_input(2, 3, 0));
        CHECK(y && fsdp_size(y, 1) == rows[k] && t.calls == 1);
        CHECK_OK(fsdp_backward(conf_loss(y)));
        fsdp_scope_end(scope);
        fsdp_module_free(m);
    }
    return FSDP_OK;
}

/* Callbacks are told the whole's sizes and get this rank's rows, few or none; nothing is padded. */
static void test_all_gather_extension_outer_size_stride(void)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    int none = 0;
    for (int i = 0; i < 5; i++)
        conf_ranks(ranks[i], told_rank, &none);
}

/* Those of a hybrid see the mesh of the shards alone. */
static void test_all_gather_extension_hsdp_mesh(void)
{
    int replicas = 2;
    conf_processes(2, told_rank, &replicas);
    conf_processes(4, told_rank, &replicas);
    conf_ranks(8, told_rank, &replicas);
}

/* One rank: what would be used in its shard's memory is filled by callbacks instead. */
static fsdp_status declined_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    CHECK(m);
    fsdp_param *w = fsdp_module_param(m, "weight");
    CHECK_OK(fsdp_param_requires_grad_(w, 0));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    told t = {4, 1, 0};
    fsdp_gather_extension x = {told_pre, told_post, &t};
    CHECK_OK(fsdp_set_all_gather_extension(m, "weight", &x));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_tensor *shard = fsdp_param_tensor(w);
    CHECK_OK(fsdp_unshard(m));
    CHECK(t.calls == 1 && fsdp_data(fsdp_param_tensor(w)) != fsdp_data(shard));
    CHECK(fsdp_ndim(fsdp_param_tensor(w)) == 2 && fsdp_size(fsdp_param_tensor(w), 0) == 4);
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK(check_same_bits(fsdp_param_tensor(w), fsdp_dtensor_local(shard)));
    fsdp_scope_end(scope);
    CHECK_OK(fsdp_reshard(m));
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_extension_can_decline_and_must_preserve_metadata(void)
{
    conf_ranks(1, declined_rank, NULL);
}

/* ---- hybrids ------------------------------------------------------------------------ */

static void be_late(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    (void)c;
    (void)label;
    int *n = arg;
    if ((++*n + fsdp_rank() * (lane == FSDP_LANE_GATHER ? 1 : 2)) % 6 == 0) usleep(700);
}

static fsdp_status late_parity_rank(void *arg)
{
    int n = 0;
    fsdp__comm_set_disturb(be_late, &n);
    fsdp_status s = conf_parity_rank(arg);
    fsdp__comm_set_disturb(NULL, NULL);
    if (s == FSDP_OK) CHECK(n > 50);
    return s;
}

static fsdp_status hybrid_shard(const conf_parity *p, fsdp_module *m)
{
    const ext *e = p->arg;
    conf_parity q = *p;
    q.options.mesh = conf_hybrid_mesh(e->replicas);
    return conf_shard_children(&q, m);
}

static fsdp_tensor *handles_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_unshard_handle *h[3] = {NULL};
    int sharded = fsdp_is_sharded_module(m);
    for (int i = 0; i < 3 && sharded; i++)
        if (fsdp_unshard_async(fsdp_module_child(m, i), &h[i]) != FSDP_OK) return NULL;
    fsdp_tensor *l = conf_default_loss(p, m, step); /* waits for each by itself */
    for (int i = 0; i < 3 && sharded; i++)
        if (fsdp_unshard_wait(h[i]) != FSDP_OK) return NULL;
    return l;
}

static void hybrids(conf_rank_fn fn, fsdp_tensor *(*loss)(const conf_parity *, fsdp_module *, int))
{
    static const int meshes[][2] = {{2, 2}, {4, 2}, {8, 2}};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            ext e = {.replicas = meshes[i][1]};
            int shards = meshes[i][0] / meshes[i][1];
            conf_parity p = {.make = mlps_create,
                             .shard = hybrid_shard,
                             .loss = loss,
                             .arg = &e,
                             .dim = 5,
                             .steps = 5,
                             .bound = 1e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, shards)};
            if (i == 1 && k == 0)
                conf_processes(meshes[i][0], fn, &p);
            else
                conf_ranks(meshes[i][0], fn, &p);
        }
}

/* Hybrids whose ranks are late at other places train as the plain module. */
static void test_hsdp_train_parity_multi_group(void)
{
    hybrids(late_parity_rank, NULL);
}

/* And with every unit gathered up front, asynchronously. */
static void test_hsdp_train_parity_multi_group_unshard_async_op(void)
{
    hybrids(conf_parity_rank, handles_loss);
}

static fsdp_status offload_shard(const conf_parity *p, fsdp_module *m)
{
    const ext *e = p->arg;
    conf_parity q = *p;
    if (e->replicas) q.options.mesh = conf_hybrid_mesh(e->replicas);
    q.options.offload = conf_offload(e->offload);
    return conf_shard_children(&q, m);
}

/* Hybrids whose shards lie in host memory or in a file. */
static void test_hsdp_train_parity_cpu_offload_eager(void)
{
    for (int k = 0; k < 2 * CONF_OFFLOADS; k++) {
        ext e = {.replicas = 2, .offload = k / 2};
        conf_parity p = {.make = mlps_create,
                         .shard = offload_shard,
                         .arg = &e,
                         .dim = 5,
                         .bound = 1e-6,
                         .options = conf_policy(fsdp_shard_defaults(NULL), k % 2, 2)};
        conf_processes(k % 2 ? 4 : 2, conf_parity_rank, &p);
    }
}

/* The same without replicas, to the bit. */
static void test_train_parity_multi_group_cpu_offload_eager(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES * CONF_OFFLOADS; k++) {
            ext e = {.offload = k / CONF_POLICIES};
            conf_parity p = {
                .make = mlps_create,
                .shard = offload_shard,
                .arg = &e,
                .dim = 5,
                .options = conf_policy(fsdp_shard_defaults(NULL), k % CONF_POLICIES, worlds[i])};
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- hooks on reduced gradients ----------------------------------------------------- */

typedef struct over {
    fsdp_group *g;
    int calls;
} over;

static fsdp_status mean_over(void *arg, fsdp_tensor *sums)
{
    over *o = arg;
    o->calls++;
    FSDP_TRY(fsdp_all_reduce(o->g, FSDP_LANE_REPLICATE, fsdp_data(sums), fsdp_numel(sums),
                             fsdp_tensor_dtype(sums), FSDP_SUM, NULL));
    float *v = fsdp_data(sums);
    for (int64_t i = 0; i < fsdp_numel(sums); i++)
        v[i] /= (float)fsdp_group_size(o->g);
    return FSDP_OK;
}

typedef struct hooked {
    int stream; /* hooks run on one */
} hooked;

static fsdp_stream *hook_stream(void)
{
    static _Thread_local fsdp_stream *s;
    if (!s) s = fsdp_stream_create("hooks");
    return s;
}

/* Shards over one axis of a mesh, and hooks that average over the other. */
static fsdp_status hook_shard(const conf_parity *p, fsdp_module *m)
{
    static _Thread_local over o;
    const hooked *h = p->arg;
    fsdp_mesh *mesh = conf_hybrid_mesh(2);
    conf_parity q = *p;
    q.options.mesh = fsdp_mesh_slice(mesh, "shard");
    o = (over){fsdp_mesh_group(mesh, 0), 0};
    CHECK_OK(conf_shard_children(&q, m));
    for (int i = 0; i < fsdp_module_child_count(m); i++)
        CHECK_OK(fsdp_set_all_reduce_hook(fsdp_module_child(m, i), mean_over, &o,
                                          h->stream ? hook_stream() : NULL));
    return fsdp_set_all_reduce_hook(m, mean_over, &o, NULL);
}

static fsdp_module *hook_create(const conf_parity *p)
{
    return conf_mlps_create(3, p->dim);
}

static fsdp_status hook_rank(void *arg)
{
    const conf_parity *p = arg;
    fsdp_status s = conf_parity_rank(arg);
    if (((const hooked *)p->arg)->stream) fsdp_stream_free(hook_stream());
    return s;
}

/* A hook of the user's that averages over a second group makes a hybrid of a flat unit. */
static void test_custom_hsdp_all_reduce_hook(void)
{
    static const hooked plain = {0};
    static const int ranks[] = {2, 4, 8};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = hook_create,
                             .shard = hook_shard,
                             .arg = &plain,
                             .dim = 5,
                             .bound = 1e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, ranks[i] / 2)};
            if (ranks[i] == 4)
                conf_processes(ranks[i], conf_parity_rank, &p);
            else
                conf_ranks(ranks[i], conf_parity_rank, &p);
        }
}

static fsdp_status nothing_hook(void *arg, fsdp_tensor *sums)
{
    (void)sums;
    ++*(int *)arg;
    return FSDP_OK;
}

static fsdp_status stream_rank(void *arg)
{
    (void)arg;
    int calls = 0;
    fsdp_stream *s = fsdp_stream_create("hook");
    fsdp_module *m = conf_mlp_create(4, 2), *n = conf_mlp_create(4, 2);
    CHECK(s && m && n);
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {1, 1};
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 2, sizes, names));
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK(fsdp_set_all_reduce_hook(m, nothing_hook, &calls, s) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "stream"));
    CHECK_OK(fsdp_fully_shard(n, NULL));
    CHECK(fsdp_set_all_reduce_hook(n, NULL, NULL, s) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "stream"));
    CHECK_OK(fsdp_set_all_reduce_hook(n, nothing_hook, &calls, s));
    CHECK_OK(fsdp_reset_parameters(n, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(n, conf_input(2, 4, 0)))));
    CHECK(calls == 1);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    fsdp_module_free(n);
    fsdp_stream_free(s);
    return FSDP_OK;
}

/* A stream for the hook is refused for a hybrid and without a hook; with one axis hooks run there.
 */
static void test_custom_hook_custom_stream(void)
{
    static const hooked stream = {1};
    conf_ranks(1, stream_rank, NULL);
    for (int k = 0; k < 2; k++) {
        conf_parity p = {.make = hook_create,
                         .shard = hook_shard,
                         .arg = &stream,
                         .dim = 5,
                         .bound = 1e-6,
                         .options = fsdp_shard_defaults(NULL)};
        conf_ranks(k ? 4 : 2, hook_rank, &p);
    }
}

/* ---- memory of the group, and collectives of the user's ----------------------------- */

static fsdp_status plain_gather(void *arg, fsdp_tensor *output, fsdp_tensor *input, fsdp_group *g,
                                fsdp_work **work)
{
    (void)work;
    ++*(int *)arg;
    return fsdp_all_gather(g, FSDP_LANE_GATHER, fsdp_data(input), fsdp_data(output),
                           fsdp_numel(input) * (int64_t)fsdp_dtype_size(fsdp_tensor_dtype(input)),
                           NULL);
}

static fsdp_status alloc_rank(void *arg)
{
    (void)arg;
    int calls = 0;
    fsdp_module *m = conf_mlp_create(4, 2);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_custom_all_gather c = {NULL, plain_gather, &calls};
    CHECK_OK(fsdp_set_allocate_memory_from_process_group_for_comm(m, 1));
    CHECK_OK(fsdp_set_custom_all_gather(m, &c));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
    CHECK(calls == (fsdp_world_size() > 1));
    fsdp_scope_end(scope);
    if (fsdp_world_size() == 1) {
        CHECK(fsdp_set_allocate_memory_from_process_group_for_comm(m, 1) != FSDP_OK);
        CHECK_OK(conf_error(FSDP_INVALID_STATE, "a collective of the user's"));
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Memory of the group first and a gather of the user's afterwards is fine; not the other way round.
 */
static void test_exception_when_used_together_with_comm_hooks(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], alloc_rank, NULL);
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_all_gather_extensions_train_parity),
        CONF_TEST(test_all_gather_extensions_end_to_end),
        CONF_TEST(test_all_gather_extensions_monkey_patch),
        CONF_TEST(test_all_gather_extension_outer_size_stride),
        CONF_TEST(test_all_gather_extension_hsdp_mesh),
        CONF_TEST(test_hsdp_train_parity_multi_group),
        CONF_TEST(test_hsdp_train_parity_multi_group_unshard_async_op),
        CONF_TEST(test_hsdp_train_parity_cpu_offload_eager),
        CONF_TEST_OF(training, test_train_parity_multi_group_cpu_offload_eager),
        CONF_TEST_OF(unsharded_views, test_extension_can_decline_and_must_preserve_metadata),
        CONF_TEST_OF(init, test_custom_hsdp_all_reduce_hook),
        CONF_TEST_OF(init, test_custom_hook_custom_stream),
        CONF_TEST_OF(comm, test_exception_when_used_together_with_comm_hooks),
    };
    return conf_main("extensions", tests, sizeof tests / sizeof *tests, argc, argv);
}
