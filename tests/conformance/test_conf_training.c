/*
 * test_conf_training.c - upstream's test_fully_shard_training.py: training one model sharded and
 * one not, on what happens in one iteration after the other.
 */
#include "nets.h"

#include "base/thread.h"
#include "comm/comm.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

static const fsdp_reshard_policy policies[] = {FSDP_RESHARD_AUTO, FSDP_RESHARD_ALWAYS,
                                               FSDP_RESHARD_NEVER};

/* ---- delays ------------------------------------------------------------------------- */

/* Each rank is late at other places: before gathers, before reductions, at steps of the protocol.
 */
static void be_late(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    (void)c;
    (void)label;
    int *n = arg, r = fsdp_rank();
    ++*n;
    if (lane == FSDP_LANE_GATHER && (*n + r) % 5 == 0) usleep(700);
    if (lane != FSDP_LANE_GATHER && (*n + 2 * r) % 7 == 0) usleep(900);
}

static void be_late_within(void *arg)
{
    int *n = arg;
    if (++*n % 61 == fsdp_rank() % 61) usleep(100);
}

/* Turns the delays of this rank on; the counters must live until they are off. */
static void late(int on, int *counters)
{
    fsdp__comm_set_disturb(on ? be_late : NULL, counters);
    fsdp__comm_set_schedule(on ? be_late_within : NULL, counters + 1);
}

/* ---- ForwardInputs ------------------------------------------------------------------ */

typedef struct no_input {
    fsdp_module base;
    fsdp_module *inner;
    int step;
} no_input;

static fsdp_status no_input_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    no_input *m = (no_input *)self;
    if (in->n != 0) return fsdp__fail(FSDP_INTERNAL, "%d inputs", in->n);
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(self, "weight"));
    fsdp_tensor *h = fsdp_add(fsdp_call(m->inner, conf_input(3, 6, m->step)), w);
    out->n = 1;
    out->t[0] = fsdp_mul(h, h);
    return fsdp_error();
}

static fsdp_module *no_input_create(const conf_parity *p)
{
    (void)p;
    no_input *m = (no_input *)fsdp_module_create(sizeof *m, "NoInput");
    if (!m) return NULL;
    m->base.forward = no_input_forward;
    m->inner = fsdp_module_add(&m->base, "inner", conf_mlp_create(6, 2));
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    fsdp_module_add_param(&m->base, "weight", fsdp_param_create(FSDP_F32, 1, SIZES(6), one));
    return &m->base;
}

static fsdp_tensor *no_input_loss(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    ((no_input *)m)->step = step;
    fsdp_values in = {0}, out;
    return fsdp_module_call(m, &in, &out) == FSDP_OK ? fsdp_mean(out.t[0]) : NULL;
}

/* A root whose forward takes no input has no input node: its gradients are reduced when backward
 * ends, and it trains. */
static void test_root_no_forward_inputs(void)
{
    for (int w = 0; w < WORLDS; w++)
        for (int k = 0; k < 2; k++) {
            conf_parity p = {.make = no_input_create,
                             .shard = k ? conf_shard_children : conf_shard_whole,
                             .loss = no_input_loss,
                             .options = fsdp_shard_defaults(NULL)};
            conf_processes(worlds[w], conf_parity_rank, &p);
        }
}

/* ---- 1DTrainingCore ----------------------------------------------------------------- */

typedef struct two_linears {
    fsdp_module base;
    fsdp_module *a, *b;
} two_linears;

static fsdp_tensor *two_linears_forward(fsdp_module *self, fsdp_tensor *x)
{
    two_linears *m = (two_linears *)self;
    return fsdp_call(m->b, fsdp_relu(fsdp_call(m->a, x)));
}

/* arg: three sizes, in, middle, out */
static fsdp_module *two_linears_create(const conf_parity *p)
{
    const int *size = p->arg;
    two_linears *m = (two_linears *)fsdp_module_create(sizeof *m, "TwoLinears");
    if (!m) return NULL;
    m->base.forward1 = two_linears_forward;
    m->a = fsdp_module_add(&m->base, "0", fsdp_linear_create(size[0], size[1], 1));
    m->b = fsdp_module_add(&m->base, "2", fsdp_linear_create(size[1], size[2], 1));
    return &m->base;
}

/* One unit trains as the plain module on even and uneven rows, with ranks that hold none. */
static void test_train_parity_single_group_shard_dim0(void)
{
    static const int sizes[][3] = {{16, 15, 8}, {7, 15, 3}, {16, 17, 8}};
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = two_linears_create,
                             .shard = conf_shard_whole,
                             .arg = sizes[k],
                             .dim = sizes[k][0],
                             .options = fsdp_shard_defaults(NULL)};
            if (ranks[i] == 4)
                conf_processes(ranks[i], conf_parity_rank, &p);
            else
                conf_ranks(ranks[i], conf_parity_rank, &p);
        }
}

/* The same with each parameter cut along its largest dim. */
static void test_train_parity_single_group_shard_largest_dim(void)
{
    static const int sizes[][3] = {{32, 16, 17}, {64, 17, 64}};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            conf_parity p = {.make = two_linears_create,
                             .shard = conf_shard_whole,
                             .arg = sizes[k],
                             .dim = sizes[k][0],
                             .options = fsdp_shard_defaults(NULL)};
            p.options.placement_fn = conf_largest_dim;
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

static fsdp_module *lm_create(const conf_parity *p)
{
    (void)p;
    conf_lm *m = conf_lm_create(3, 0);
    return m ? &m->base : NULL;
}

static fsdp_module *mlps_create(const conf_parity *p)
{
    return conf_mlps_create(3, p->dim);
}

static fsdp_status late_step(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    if (fsdp_is_sharded_module(m) && (step + fsdp_rank()) % 2) usleep(500);
    return FSDP_OK;
}

static fsdp_status late_rank(void *arg)
{
    int counters[2] = {0, 0};
    late(1, counters);
    fsdp_status s = conf_parity_rank(arg);
    late(0, counters);
    if (s == FSDP_OK && fsdp_world_size() > 1) CHECK(counters[0] > 50 && counters[1] > 50);
    return s;
}

/* A unit a block: equal to the bit, also when each rank is late at other places before gathers,
 * before reductions, inside collectives and before the optimizer step. */
static void test_train_parity_multi_group(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = lm_create,
                             .shard = conf_shard_blocks,
                             .options = fsdp_shard_defaults(NULL)};
            p.options = conf_policy(p.options, k, worlds[i]);
            conf_ranks(worlds[i], conf_parity_rank, &p);
            p.make = mlps_create;
            p.dim = 7;
            p.shard = conf_shard_children;
            conf_ranks(worlds[i], conf_parity_rank, &p);
            p.before_step = late_step;
            p.steps = 5;
            if (i > 0 && k == 0)
                conf_processes(worlds[i], late_rank, &p);
            else if (i > 0)
                conf_ranks(worlds[i], late_rank, &p);
        }
}

/* A whole backward through the root, then one through the first child alone. */
static fsdp_tensor *non_root_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_tensor *all = conf_default_loss(p, m, step);
    if (fsdp_backward(all) != FSDP_OK) return NULL;
    return conf_loss(fsdp_call(fsdp_module_child(m, 0), conf_input(4, p->dim, step)));
}

/* A child that runs alone after its root does the once-a-forward work, and its backward ends as the
 * root's does: what both give is summed. */
static void test_non_root_forward_backward(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = mlps_create,
                             .shard = conf_shard_children,
                             .loss = non_root_loss,
                             .dim = 8,
                             .bound =
                                 1e-6, /* the averages of two backwards are added, not the sums */
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

typedef struct twice {
    fsdp_module base;
    fsdp_module *inner, *outer;
} twice;

static fsdp_tensor *twice_forward(fsdp_module *self, fsdp_tensor *x)
{
    twice *m = (twice *)self;
    fsdp_tensor *i = fsdp_call(m->inner, x), *j = fsdp_call(m->inner, x);
    return fsdp_call(m->outer, fsdp_add(fsdp_call(m->inner, i), j));
}

static fsdp_module *twice_create(const conf_parity *p)
{
    twice *m = (twice *)fsdp_module_create(sizeof *m, "Twice");
    if (!m) return NULL;
    m->base.forward1 = twice_forward;
    m->inner = fsdp_module_add(&m->base, "inner", conf_mlp_create(p->dim, 2));
    m->outer = fsdp_module_add(&m->base, "outer", conf_mlp_create(p->dim, 3));
    return &m->base;
}

/* One unit runs three times in a forward: each use's gradients count. */
static void test_multi_forward_module(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = twice_create,
                             .shard = conf_shard_children,
                             .dim = 8,
                             .bound = 1e-6, /* each use is reduced, then added */
                             .options = fsdp_shard_defaults(NULL)};
            p.options = conf_policy(p.options, k, worlds[i]);
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- after an error ----------------------------------------------------------------- */

/* In step 3 rank 0's (and with more ranks the last one's) forward fails in the second MLP. */
static fsdp_tensor *failing_loss(const conf_parity *p, fsdp_module *m, int step)
{
    if (step == 3 && fsdp_is_sharded_module(m)) {
        int mine = fsdp_rank() == 0 || fsdp_rank() == fsdp_world_size() - 1;
        fsdp_tensor *y = fsdp_call(fsdp_module_child(m, 0), conf_input(4, p->dim, step));
        fsdp_call(fsdp_module_child(m, 1), mine ? fsdp_slice(y, 1, 0, 3) : y);
        if (mine && fsdp_error() == FSDP_OK) return NULL;
        if (fsdp_reset_iteration(m) != FSDP_OK) return NULL;
    }
    return conf_default_loss(p, m, step);
}

/* After an error in the middle of a forward and fsdp_reset_iteration training goes on as if nothing
 * had been. */
static void test_reset_iter_state_after_exception(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = mlps_create,
                             .shard = conf_shard_children,
                             .loss = failing_loss,
                             .dim = 8,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- ShardPlacementFn --------------------------------------------------------------- */

/* Each parameter along its largest dim, uneven as it comes: 5 steps of AdamW are those of the plain
 * model, to the bit, and so are the weights. */
static void test_train_parity_shard_placement_fn_shard_largest_dim(void)
{
    for (int i = 0; i < WORLDS; i++) {
        conf_parity p = {.make = lm_create,
                         .shard = conf_shard_blocks,
                         .steps = 5,
                         .decay = 0.1,
                         .options = fsdp_shard_defaults(NULL)};
        p.options.placement_fn = conf_largest_dim;
        conf_processes(worlds[i], conf_parity_rank, &p);
    }
}

static int dim_one(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    return fsdp_param_ndim(p) > 1 ? 1 : 0;
}

static fsdp_status contiguous_one(fsdp_named_param *p, void *arg)
{
    (void)arg;
    fsdp_tensor *t = fsdp_param_tensor(p->param), *g = fsdp_grad(t);
    CHECK(fsdp_is_dtensor(t) && g && fsdp_is_dtensor(g));
    CHECK(fsdp_is_contiguous(t) && fsdp_is_contiguous(g));
    CHECK(fsdp_is_contiguous(fsdp_dtensor_local(t)) && fsdp_is_contiguous(fsdp_dtensor_local(g)));
    CHECK(fsdp_is_contiguous(fsdp_dtensor_full(t)) && fsdp_is_contiguous(fsdp_dtensor_full(g)));
    return FSDP_OK;
}

static fsdp_status contiguous_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 4);
    CHECK(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.placement_fn = dim_one;
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
    CHECK_OK(conf_each_param(m, contiguous_one, NULL));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Cut along dim 1, shards and gradients, local and whole, are contiguous. */
static void test_shard_placement_fn_contiguous_params_grads(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], contiguous_rank, NULL);
}

/* ---- SharedParams ------------------------------------------------------------------- */

static fsdp_status layer_by_layer_rank(void *arg)
{
    (void)arg;
    conf_lm *m = conf_lm_create(0, 0);
    CHECK(m);
    fsdp_module *keep[6];
    for (int i = 0; i < 6; i++) {
        /* Memory of what is freed here comes back under the parameters of the next. */
        fsdp_module *gone = conf_block_create();
        CHECK(gone);
        CHECK_OK(fsdp_fully_shard(gone, NULL));
        fsdp_module_free(gone);
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        keep[i] = m->block[i] = fsdp_module_add(m->layers, name, conf_block_create());
        CHECK(keep[i]);
        CHECK_OK(fsdp_fully_shard(keep[i], NULL));
    }
    m->n_blocks = 6;
    CHECK_OK(fsdp_fully_shard(&m->base, NULL));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(&m->base, conf_tokens(2, 0)))));
    fsdp_scope_end(scope);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* Blocks made, sharded, and some freed, one by one: none is taken for sharing weights with another,
 * though addresses come back. */
static void test_layer_by_layer_shard_no_false_positive(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], layer_by_layer_rank, NULL);
}

/* ---- WorldSize1 --------------------------------------------------------------------- */

static fsdp_status no_collective(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    (void)step;
    for (int l = 0; l < FSDP_LANE_COUNT && fsdp_is_sharded_module(m); l++)
        for (int c = 0; c < FSDP_COLLECTIVE_COUNT; c++)
            CHECK(conf_calls((fsdp_lane)l, (fsdp_collective)c) == 0);
    return FSDP_OK;
}

static fsdp_status count_then_shard(const conf_parity *p, fsdp_module *m)
{
    fsdp_comm_count_reset();
    return conf_shard_blocks(p, m);
}

/* On one rank: the plain model's bits, and no collective from fully_shard on. */
static void test_train_parity_single_worldsize1(void)
{
    for (int k = 0; k < 3; k++) {
        conf_parity p = {.make = lm_create,
                         .shard = count_then_shard,
                         .before_step = no_collective,
                         .options = fsdp_shard_defaults(NULL)};
        p.options.reshard_after_forward = policies[k];
        conf_processes(1, conf_parity_rank, &p);
    }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_root_no_forward_inputs),
        CONF_TEST(test_train_parity_single_group_shard_dim0),
        CONF_TEST(test_train_parity_single_group_shard_largest_dim),
        CONF_TEST(test_train_parity_multi_group),
        CONF_TEST(test_non_root_forward_backward),
        CONF_TEST(test_multi_forward_module),
        CONF_TEST(test_reset_iter_state_after_exception),
        CONF_TEST(test_train_parity_shard_placement_fn_shard_largest_dim),
        CONF_TEST(test_shard_placement_fn_contiguous_params_grads),
        CONF_TEST(test_layer_by_layer_shard_no_false_positive),
        CONF_TEST(test_train_parity_single_worldsize1),
    };
    return conf_main("training", tests, sizeof tests / sizeof *tests, argc, argv);
}
