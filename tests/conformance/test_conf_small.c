/*
 * test_conf_small.c - upstream's small files: test_fully_shard_clip_grad_norm_, _autograd, _state
 * and _unsharded_views.
 */
#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

static const fsdp_reshard_policy policies[] = {FSDP_RESHARD_AUTO, FSDP_RESHARD_ALWAYS,
                                               FSDP_RESHARD_NEVER};

/* ---- clip_grad_norm_ ---------------------------------------------------------------- */

typedef struct clip {
    double p, bound; /* of the norm, beside the plain one */
    int replicas;
} clip;

static fsdp_status clip_rank(void *arg)
{
    const clip *c = arg;
    fsdp_scope *scope = fsdp_scope_begin();
    conf_lm *plain = conf_lm_create(2, 0), *m = conf_lm_create(2, 0);
    CHECK(plain && m);
    conf_parity p = {.options =
                         fsdp_shard_defaults(c->replicas ? conf_hybrid_mesh(c->replicas) : NULL)};
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(fsdp_reset_parameters(&plain->base, 1));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(&plain->base, conf_tokens(2, 0)))));
    CHECK_OK(conf_average_grads(&plain->base));
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(&m->base, conf_tokens(2, 0)))));
    double a, b;
    CHECK_OK(fsdp_grad_norm(&plain->base, c->p, &a));
    fsdp_comm_count_reset();
    CHECK_OK(fsdp_grad_norm(&m->base, c->p, &b));
    int64_t calls = 0;
    for (int k = 0; k < FSDP_COLLECTIVE_COUNT; k++)
        calls += conf_calls(FSDP_LANE_CONTROL, (fsdp_collective)k);
    /* Its row sums meet in one collective over the shard group; replicas hold the same. */
    int shards = fsdp_world_size() / (c->replicas ? c->replicas : 1);
    CHECK(shards == 1 ? calls == 0 : calls >= 1 && calls <= 2);
    CHECK(fabs(a - b) <= c->bound * a && a > 0);
    if (c->p != 2) goto done;
    double before;
    CHECK_OK(fsdp_clip_grad_norm(&m->base, a / 3, &before));
    CHECK(before == b);
    CHECK_OK(fsdp_grad_norm(&m->base, 2, &b));
    CHECK(fabs(b - a / 3) < 1e-5 * a);
    CHECK_OK(fsdp_clip_grad_norm(&m->base, a, &before)); /* below: nothing changes */
    CHECK_OK(fsdp_grad_norm(&m->base, 2, &before));
    CHECK(before == b);
done:
    fsdp_module_free(&plain->base);
    fsdp_module_free(&m->base);
    fsdp_scope_end(scope);
    return FSDP_OK;
}

/* The norm over shards is that of the whole gradient, for p = 1, 2 and infinity; clipping scales to
 * it and leaves what is below alone. */
static void test_clip_grad_norm_1d(void)
{
    static const clip cases[] = {
        {2, 0, 0}, {1, 1e-6, 0}, {INFINITY, 0, 0}, {2, 1e-6, 2}, {3, 1e-6, 0}};
    for (int i = 0; i < WORLDS; i++)
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            clip c = cases[k];
            if (c.replicas && worlds[i] == 1) continue;
            conf_processes(worlds[i], clip_rank, &c);
        }
}

/* ---- autograd ----------------------------------------------------------------------- */

typedef struct outputs {
    fsdp_module base;
    fsdp_module *layer[3];
    int unused; /* 0: an output, 1: a module */
} outputs;

/* Three layers, each fed by the one before, each an output. */
static fsdp_status outputs_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    outputs *m = (outputs *)self;
    out->n = 3;
    fsdp_tensor *x = in->t[0];
    for (int k = 0; k < 3; k++)
        out->t[k] = fsdp_call(m->layer[k], m->unused && k == 2 ? out->t[0] : x), x = out->t[k];
    return fsdp_error();
}

static fsdp_module *outputs_create(const conf_parity *p)
{
    outputs *m = (outputs *)fsdp_module_create(sizeof *m, "Outputs");
    if (!m) return NULL;
    m->base.forward = outputs_forward;
    m->unused = p->arg != NULL;
    for (int k = 0; k < 3; k++) {
        char name[16];
        snprintf(name, sizeof name, "%d", k);
        m->layer[k] = fsdp_module_add(&m->base, name, conf_mlp_create(p->dim, 2));
    }
    return &m->base;
}

/* In even steps all outputs are used, in odd ones the last alone. */
static fsdp_tensor *outputs_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_values in = {1, {conf_input(4, p->dim, step)}}, out;
    if (fsdp_module_call(m, &in, &out) != FSDP_OK) return NULL;
    fsdp_tensor *l = conf_loss(out.t[2]);
    for (int k = 0; k < 2 && step % 2 == 0; k++)
        l = fsdp_add(l, conf_loss(out.t[k]));
    return l;
}

static void unused_cases(const void *arg)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = outputs_create,
                             .shard = conf_shard_children,
                             .loss = outputs_loss,
                             .arg = arg,
                             .dim = 6,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* Outputs of units and of the root that the loss does not use hold no gradient back. */
static void test_unused_forward_output(void)
{
    unused_cases(NULL);
}

/* Nor does a unit whose output no loss uses: layer 1 in odd steps. */
static void test_unused_forward_module(void)
{
    static const int yes = 1;
    unused_cases(&yes);
}

/* ---- values of every kind ----------------------------------------------------------- */

typedef struct bundle {
    fsdp_module base;
    fsdp_module *lin;
} bundle;

/* Takes and returns the most values there may be; every second one is NULL. */
static fsdp_status bundle_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    bundle *b = (bundle *)self;
    out->n = in->n;
    for (int k = 0; k < in->n; k++)
        out->t[k] = in->t[k] ? fsdp_call(b->lin, in->t[k]) : NULL;
    return fsdp_error();
}

static fsdp_module *bundle_create(const conf_parity *p)
{
    bundle *outer = (bundle *)fsdp_module_create(sizeof *outer, "Outer");
    bundle *inner = (bundle *)fsdp_module_create(sizeof *inner, "Inner");
    if (!outer || !inner) return NULL;
    outer->base.forward = bundle_forward;
    inner->base.forward = bundle_forward;
    outer->lin = fsdp_module_add(&outer->base, "lin", conf_mlp_create(p->dim, 2));
    inner->lin = fsdp_module_add(&inner->base, "lin", conf_mlp_create(p->dim, 3));
    return fsdp_module_add(&outer->base, "inner", &inner->base) ? &outer->base : NULL;
}

static fsdp_tensor *bundle_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_values in = {FSDP_VALUES_MAX, {NULL}}, mid, out;
    for (int k = 0; k < FSDP_VALUES_MAX; k += 2)
        in.t[k] = conf_input(2, p->dim, 100 * step + k);
    if (fsdp_module_call(fsdp_module_child(m, 1), &in, &mid) != FSDP_OK) return NULL;
    if (fsdp_module_call(m, &mid, &out) != FSDP_OK) return NULL;
    fsdp_tensor *l = conf_loss(out.t[step % 2 ? 0 : FSDP_VALUES_MAX - 2]);
    for (int k = 2; k < FSDP_VALUES_MAX - 2; k += 2)
        l = fsdp_add(l, conf_loss(out.t[k]));
    return l;
}

/* The root is called with what its child gave, which ran before it. */
static fsdp_status bundle_shard(const conf_parity *p, fsdp_module *m)
{
    CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, 0), &p->options));
    CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, 1), &p->options));
    CHECK_OK(fsdp_fully_shard(m, &p->options));
    return fsdp_set_is_last_backward(m, 1); /* makes m the root before its child runs */
}

/* Hooks reach each of a module's values, and those that are not there. */
static void test_nontensor_activations(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = bundle_create,
                             .shard = bundle_shard,
                             .loss = bundle_loss,
                             .dim = 5,
                             .bound = 1e-6,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- state -------------------------------------------------------------------------- */

static fsdp_status state_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(3, 4);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, 0), NULL));
    CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, 1), NULL));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    fsdp__unit *u[] = {fsdp__unit_of(m), fsdp__unit_of(fsdp_module_child(m, 0)),
                       fsdp__unit_of(fsdp_module_child(m, 1))};
    CHECK(u[0] && u[1] && u[2] && u[0] != u[1] && u[1] != u[2] && u[0] != u[2]);
    CHECK(!fsdp_is_sharded_module(fsdp_module_child(m, 2)));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Each call makes a state of its own, on the module that it was given alone. */
static void test_fully_shard_state(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], state_rank, NULL);
}

static fsdp_status reapply_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 2);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK(fsdp_fully_shard(m, NULL) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "once"));
    CHECK_OK(fsdp_reset_parameters(m, 1)); /* and it works on */
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A second call on a module is refused and changes nothing. */
static void test_fully_shard_reapply(void)
{
    conf_ranks(1, reapply_rank, NULL);
}

static fsdp_status container_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_module_list_create();
    CHECK(m);
    fsdp_module_add(m, "0", conf_mlp_create(4, 2));
    CHECK(fsdp_fully_shard(m, NULL) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "ModuleList"));
    CHECK(!fsdp_is_sharded_module(m));
    fsdp_module *own = fsdp_module_create(sizeof *own, "Plain"); /* without forward */
    CHECK(own);
    CHECK(fsdp_fully_shard(own, NULL) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "no forward"));
    fsdp_module_free(own);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A container without forward is refused by type. */
static void test_fully_shard_unsupported_module_cls(void)
{
    conf_ranks(1, container_rank, NULL);
}

static fsdp_status copy_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 2), *n = fsdp_sequential_create();
    CHECK(m && n);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    /* The ways to have a module twice: a second parent, and its parameters in another module. */
    fsdp_module *holder = fsdp_module_create(sizeof *holder, "Head");
    CHECK(holder);
    holder->forward1 = conf_head_forward;
    fsdp_param *w = fsdp_module_param(fsdp_module_child(m, 0), "weight");
    fsdp_module_add_param(holder, "weight", fsdp_param_retain(w));
    CHECK(fsdp_module_add(n, "first", m) == m);
    CHECK(!fsdp_module_add(n, "second", m));
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "already a child"));
    CHECK(fsdp_module_param(holder, "weight") == w); /* one parameter, not a copy */
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_clone(fsdp_param_tensor(w)); /* nor of its shard */
    CHECK_OK(conf_error(FSDP_UNSUPPORTED, "unshard"));
    fsdp_scope_end(scope);
    fsdp_module_free(holder);
    fsdp_module_free(n);
    return FSDP_OK;
}

/* There is no copy of a module: a second place for it, and an op on its shard, are refused. */
static void test_fully_shard_deepcopy(void)
{
    conf_ranks(1, copy_rank, NULL);
}

/* ---- one rank: the shard's own memory ----------------------------------------------- */

static fsdp_status lent_rank(void *arg)
{
    int trainable = *(const int *)arg;
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    CHECK(m);
    fsdp_param *w = fsdp_module_param(m, "weight");
    CHECK_OK(fsdp_param_requires_grad_(w, trainable));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_tensor *shard = fsdp_param_tensor(w);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_memory_stats before, during;
    fsdp_memory_get(&before);
    CHECK_OK(fsdp_unshard(m));
    fsdp_memory_get(&during);
    CHECK(fsdp_data(fsdp_param_tensor(w)) == fsdp_data(shard)); /* nothing was copied */
    CHECK(during.live[FSDP_UNSHARDED] == before.live[FSDP_UNSHARDED]);
    CHECK_OK(fsdp_reshard(m));
    /* A load writes into the shard, and the next forward reads it. */
    CHECK_OK(fsdp_fill_(shard, 2.0));
    CHECK_OK(fsdp_mark_changed(m));
    fsdp_tensor *y = fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1));
    CHECK(y && fsdp_at(y, SIZES(0, 0)) == 6.0);
    CHECK(fsdp_requires_grad(y) == trainable);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* One rank and no cast: a frozen parameter is used in its shard's memory, keeps no second copy, and
 * sees a load. */
static void test_views_survive_reshard_and_weight_loading(void)
{
    int trainable = 0;
    conf_ranks(1, lent_rank, &trainable);
}

static fsdp_status cast_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    CHECK(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = FSDP_BF16;
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_tensor *shard = fsdp_param_tensor(fsdp_module_param(m, "weight"));
    CHECK_OK(fsdp_unshard(m));
    fsdp_tensor *whole = fsdp_param_tensor(fsdp_module_param(m, "weight"));
    CHECK(fsdp_data(whole) != fsdp_data(shard) && fsdp_tensor_dtype(whole) == FSDP_BF16);
    CHECK_OK(fsdp_reshard(m));
    CHECK(!fsdp_data(whole));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A trainable one too; one that is cast has memory of its own, while it is whole. */
static void test_training_and_casts_keep_independent_storage(void)
{
    int trainable = 1;
    conf_ranks(1, lent_rank, &trainable);
    conf_ranks(1, cast_rank, NULL);
    conf_ranks(2, cast_rank, NULL);
}

static fsdp_status replaced_rank(void *arg)
{
    (void)arg;
    if (fsdp_device_push(FSDP_META) != FSDP_OK) return fsdp_error();
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    fsdp_device_pop();
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1);
    for (int k = 0; k < 2; k++) { /* memory comes, and comes anew, under the parameter */
        CHECK_OK(fsdp_to_empty(m, FSDP_CPU));
        CHECK_OK(fsdp_fill_(fsdp_param_tensor(fsdp_module_param(m, "weight")), 1.0 + k));
        CHECK_OK(fsdp_mark_changed(m));
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_no_grad_begin();
        fsdp_tensor *y = fsdp_call(m, x);
        fsdp_no_grad_end();
        CHECK(y && fsdp_at(y, SIZES(0, 0)) == 3.0 * (1 + k));
        fsdp_scope_end(scope);
    }
    fsdp_release(x);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Memory that is put under a shard is what the next forward reads. */
static void test_replaced_storage_recreates_view(void)
{
    conf_ranks(1, replaced_rank, NULL);
    conf_ranks(2, replaced_rank, NULL);
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST_OF(clip_grad_norm_, test_clip_grad_norm_1d),
        CONF_TEST_OF(autograd, test_unused_forward_output),
        CONF_TEST_OF(autograd, test_unused_forward_module),
        CONF_TEST_OF(autograd, test_nontensor_activations),
        CONF_TEST_OF(state, test_fully_shard_state),
        CONF_TEST_OF(state, test_fully_shard_reapply),
        CONF_TEST_OF(state, test_fully_shard_unsupported_module_cls),
        CONF_TEST_OF(state, test_fully_shard_deepcopy),
        CONF_TEST_OF(unsharded_views, test_views_survive_reshard_and_weight_loading),
        CONF_TEST_OF(unsharded_views, test_training_and_casts_keep_independent_storage),
        CONF_TEST_OF(unsharded_views, test_replaced_storage_recreates_view),
    };
    return conf_main("small", tests, sizeof tests / sizeof *tests, argc, argv);
}
