/*
 * test_conf_training_change.c - what changes after fully_shard: dtypes (upstream's CastAfterInit
 * and Casts), parameters (LazyInit), and methods other than forward (CustomForwardMethod).
 */
#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- dtypes ------------------------------------------------------------------------- */

static fsdp_module *wide_create(const conf_parity *p)
{
    fsdp_module *m = conf_mlps_create(3, p->dim);
    return m && fsdp_module_to_dtype(m, FSDP_F64) == FSDP_OK ? m : NULL;
}

static fsdp_module *mlps_create(const conf_parity *p)
{
    return conf_mlps_create(3, p->dim);
}

static fsdp_tensor *wide_loss(const conf_parity *p, fsdp_module *m, int step)
{
    return conf_loss(fsdp_call(m, fsdp_cast(conf_input(4, p->dim, step), FSDP_F64)));
}

/* Sharded in fp32 with values, then cast: the values stay, in the wider dtype. */
static fsdp_status cast_after(const conf_parity *p, fsdp_module *m)
{
    CHECK_OK(conf_shard_children(p, m));
    CHECK_OK(fsdp_reset_parameters(m, 5));
    conf_numbers before = {0}, after = {0};
    CHECK_OK(conf_collect(m, 0, &before));
    fsdp_tensor *shard =
        fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "1.in_proj"), "weight"));
    CHECK_OK(fsdp_module_to_dtype(m, FSDP_F64));
    CHECK_OK(conf_collect(m, 0, &after));
    CHECK(conf_distance(&after, &before) == 0 && after.n > 0);
    CHECK(shard ==
          fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "1.in_proj"), "weight")));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK(fsdp_is_dtensor(shard) && fsdp_tensor_dtype(shard) == FSDP_F64);
    CHECK(fsdp_tensor_dtype(fsdp_dtensor_local(shard)) == FSDP_F64);
    CHECK(fsdp_tensor_dtype(fsdp_dtensor_full(shard)) == FSDP_F64);
    fsdp_scope_end(scope);
    free(before.v);
    free(after.v);
    return FSDP_OK;
}

static fsdp_status wide_grad(fsdp_named_param *p, void *arg)
{
    (void)arg;
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(p->param));
    CHECK(g && fsdp_is_dtensor(g) && fsdp_tensor_dtype(g) == FSDP_F64);
    return FSDP_OK;
}

static fsdp_status wide_grads(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    (void)step;
    return fsdp_is_sharded_module(m) ? conf_each_param(m, wide_grad, NULL) : FSDP_OK;
}

static fsdp_status wide_rank(void *arg)
{
    conf_parity p = *(const conf_parity *)arg, q = p;
    double a[CONF_STEPS], b[CONF_STEPS];
    conf_numbers v = {0}, w = {0};
    q.make = wide_create;
    CHECK_OK(conf_train(&q, 0, a, &v));
    CHECK_OK(conf_train(&p, 1, b, &w));
    CHECK(!memcmp(a, b, sizeof a) && a[0] != a[CONF_STEPS - 1]);
    CHECK(conf_distance(&v, &w) == 0 && v.n > 0);
    free(v.v);
    free(w.v);
    return FSDP_OK;
}

/* A module that is cast to fp64 after fully_shard has shards, gradients and training in fp64. */
static void test_to_float64_after_init(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = mlps_create,
                             .shard = cast_after,
                             .loss = wide_loss,
                             .before_step = wide_grads,
                             .dim = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            conf_ranks(worlds[i], wide_rank, &p);
        }
}

static fsdp_status clamp_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(6, 2);
    CHECK(m);
    CHECK_OK(fsdp_module_to_dtype(m, FSDP_BF16));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = o.mp_policy.reduce_dtype = FSDP_BF16;
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_module_to_dtype(m, FSDP_F32));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, conf_input(3, 6, 0));
    CHECK(y && fsdp_tensor_dtype(y) == FSDP_BF16);
    CHECK_OK(fsdp_backward(conf_loss(y)));
    const fsdp__unit *u = fsdp__unit_of(m);
    for (int k = 0; k < u->n_params; k++) {
        const fsdp__fparam *p = &u->params[k];
        CHECK(p->sharded->dtype == FSDP_F32 &&
              fsdp_tensor_dtype(fsdp_grad(p->sharded)) == FSDP_F32);
        CHECK(p->whole->dtype == FSDP_BF16 && p->grad->dtype == FSDP_BF16);
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Made and sharded in bf16 by a policy of bf16, then cast to fp32: shards and their gradients are
 * fp32, parameters are gathered and gradients reduced in bf16 still. */
static void test_clamp_reduce_dtype(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], clamp_rank, NULL);
}

/* ---- parameters --------------------------------------------------------------------- */

static fsdp_status replaced_rank(void *arg)
{
    int on_meta = *(const int *)arg;
    if (on_meta) CHECK_OK(fsdp_device_push(FSDP_META));
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module *lin = fsdp_module_add(m, "lin", fsdp_linear_create(3, 5, 0));
    if (on_meta) fsdp_device_pop();
    CHECK(lin);
    CHECK_OK(fsdp_fully_shard(lin, NULL));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    if (!on_meta) CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_init_rule rule = {FSDP_INIT_ZEROS, 0, 0};
    fsdp_param *by = fsdp_param_create(FSDP_F32, 2, SIZES(5, 3), rule);
    CHECK(by);
    CHECK_OK(fsdp_fill_(fsdp_param_tensor(by), 2.0));
    CHECK_OK(fsdp_module_set_param(lin, "weight", by));
    fsdp_tensor *shard = fsdp_param_tensor(fsdp_module_param(lin, "weight"));
    CHECK(fsdp_is_dtensor(shard) && fsdp_dtensor_sizes(shard)[0] == 5);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1));
    CHECK(y && fsdp_size(y, 1) == 5);
    for (int k = 0; k < 5; k++)
        CHECK(fsdp_at(y, SIZES(0, k)) == 6.0);
    CHECK_OK(fsdp_backward(conf_loss(y)));
    CHECK(fsdp_grad(fsdp_param_tensor(fsdp_module_param(lin, "weight"))));
    fsdp_scope_end(scope);
    if (fsdp_world_size() == 1) { /* too late afterwards, which says what to do */
        fsdp_param *late = fsdp_param_create(FSDP_F32, 2, SIZES(5, 3), rule);
        CHECK(fsdp_module_set_param(lin, "weight", late) != FSDP_OK);
        CHECK_OK(conf_error(FSDP_INVALID_STATE, "fsdp_mark_changed"));
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A parameter that is replaced between fully_shard and the first forward, on meta or not, is cut as
 * the one before was, and is what the forward computes with. */
static void test_reset_sharded_param_in_lazy_init(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int on_meta = 0; on_meta < 2; on_meta++)
            conf_ranks(worlds[i], replaced_rank, &on_meta);
}

/* ---- methods ------------------------------------------------------------------------ */

typedef struct tower {
    fsdp_module base;
    fsdp_module *in, *out;
} tower;

static fsdp_tensor *tower_forward(fsdp_module *self, fsdp_tensor *x)
{
    tower *t = (tower *)self;
    return fsdp_call(t->out, fsdp_relu(fsdp_call(t->in, x)));
}

/* All but the last layer. */
static fsdp_status tower_features(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    tower *t = (tower *)self;
    out->n = 1;
    out->t[0] = fsdp_relu(fsdp_call(t->in, in->t[0]));
    return fsdp_error();
}

typedef struct joint {
    fsdp_module base;
    fsdp_module *tower, *head;
} joint;

static fsdp_tensor *joint_forward(fsdp_module *self, fsdp_tensor *x)
{
    joint *j = (joint *)self;
    fsdp_values in = {1, {x}}, out;
    if (fsdp_module_call_method(j->tower, "features", &in, &out) != FSDP_OK) return NULL;
    return fsdp_call(j->head, out.t[0]);
}

static fsdp_module *joint_create(const conf_parity *p)
{
    joint *j = (joint *)fsdp_module_create(sizeof *j, "Joint");
    tower *t = (tower *)fsdp_module_create(sizeof *t, "Tower");
    if (!j || !t) return NULL;
    j->base.forward1 = joint_forward;
    t->base.forward1 = tower_forward;
    t->in = fsdp_module_add(&t->base, "in", fsdp_linear_create(p->dim, 2 * p->dim, 1));
    t->out = fsdp_module_add(&t->base, "out", fsdp_linear_create(2 * p->dim, p->dim, 1));
    if (fsdp_module_add_method(&t->base, "features", tower_features) != FSDP_OK) return NULL;
    j->tower = fsdp_module_add(&j->base, "tower", &t->base);
    j->head = fsdp_module_add(&j->base, "head", conf_mlp_create(2 * p->dim, 1));
    return &j->base;
}

static fsdp_status joint_shard(const conf_parity *p, fsdp_module *m)
{
    joint *j = (joint *)m;
    CHECK_OK(conf_shard_children(p, m));
    CHECK_OK(fsdp_register_fsdp_forward_method(j->tower, "features"));
    /* Of a module that is not sharded: nothing. */
    return fsdp_register_fsdp_forward_method(fsdp_module_child(j->tower, 0), "features");
}

static fsdp_status no_method_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 2);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK(fsdp_register_fsdp_forward_method(m, "encode") != FSDP_OK);
    CHECK_OK(conf_error(FSDP_NOT_FOUND, "encode"));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A method that is called instead of forward gathers and reduces as forward does. */
static void test_register_fsdp_forward_method(void)
{
    conf_ranks(1, no_method_rank, NULL);
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = joint_create,
                             .shard = joint_shard,
                             .dim = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- several roots ------------------------------------------------------------------ */

enum { STAGES = 3 };

static fsdp_module *stages_create(const conf_parity *p)
{
    return conf_mlps_create(STAGES, p->dim);
}

/* Each stage is a root of its own, of two units and one around them; the sequence is no unit. */
static fsdp_status stages_shard(const conf_parity *p, fsdp_module *m)
{
    fsdp_module *list[STAGES];
    for (int i = 0; i < STAGES; i++) {
        list[i] = fsdp_module_child(m, i);
        CHECK_OK(conf_shard_children(p, list[i]));
    }
    CHECK_OK(fsdp_to_empty(m, FSDP_CPU));
    CHECK_OK(fsdp_share_comm_ctx(list, 0));
    CHECK_OK(fsdp_share_comm_ctx(list, STAGES));
    for (int i = 0; i < STAGES; i++) {
        const fsdp__unit *u = fsdp__unit_of(list[i]);
        CHECK(u->tree && u->tree->root == list[i]);
        CHECK(u->tree->queue == fsdp__unit_of(list[0])->tree->queue);
    }
    return FSDP_OK;
}

static fsdp_tensor *stages_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_tensor *x = conf_input(4, p->dim, step);
    for (int i = 0; i < STAGES; i++)
        x = fsdp_call(fsdp_module_child(m, i), x);
    fsdp_memory_reset_peak();
    return conf_loss(x);
}

static fsdp_status whole_and_shards(fsdp_named_param *p, void *arg)
{
    int64_t *n = arg, m = 4;
    for (int d = 0; d < fsdp_param_ndim(p->param); d++)
        m *= fsdp_param_sizes(p->param)[d];
    if (m > n[0]) n[0] = m;
    n[1] += 4 * fsdp_numel(fsdp_param_shard(p->param));
    return FSDP_OK;
}

/* The whole gradients at one time are those of two units, as in one tree. */
static fsdp_status stages_peak(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    int64_t n[2] = {0, 0}; /* the largest weight, this rank's shards */
    fsdp_memory_stats s;
    if (!fsdp_is_sharded_module(fsdp_module_child(m, 0)) || fsdp_world_size() == 1) return FSDP_OK;
    CHECK_OK(conf_each_param(m, whole_and_shards, n));
    fsdp_memory_get(&s);
    CHECK(step % 2 == 0 || s.peak[FSDP_GRADIENTS] <= n[1] + 2 * (n[0] + n[0] / 2));
    return FSDP_OK;
}

static fsdp_status no_unit_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(2, 4);
    CHECK(m);
    fsdp_module *list[] = {fsdp_module_child(m, 0), fsdp_module_child(m, 1)};
    CHECK_OK(fsdp_fully_shard(list[0], NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    CHECK(fsdp_share_comm_ctx(list, 2) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "fsdp_fully_shard"));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Roots that share, as stages of a pipeline do, train as the plain sequence, and hold no more than
 * one root would; a module that is no unit is refused. */
static void test_share_comm_context(void)
{
    conf_ranks(1, no_unit_rank, NULL);
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = stages_create,
                             .shard = stages_shard,
                             .loss = stages_loss,
                             .before_step = stages_peak,
                             .dim = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_to_float64_after_init),
        CONF_TEST_OF(mixed_precision, test_clamp_reduce_dtype),
        CONF_TEST_OF(init, test_reset_sharded_param_in_lazy_init),
        CONF_TEST(test_register_fsdp_forward_method),
        CONF_TEST(test_share_comm_context),
    };
    return conf_main("training", tests, sizeof tests / sizeof *tests, argc, argv);
}
