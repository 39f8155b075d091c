/*
 * test_conf_training_compose.c - upstream's test_fully_shard_training.py, classes 1DTrainingCompose
 * and SharedParams: recompute, units of several modules, and weights that modules share.
 *
 * ctest: slow timeout=180
 */
#include "nets.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- recompute ---------------------------------------------------------------------- */

typedef enum style { WRAPPED, SELECTIVE, FUNCTION, STYLES } style;
typedef enum grouping { BLOCKS, MEMORY, TIED, GROUPINGS } grouping;

typedef struct compose {
    style style;
    grouping grouping;
} compose;

static int keep_attention(void *arg, const fsdp_checkpoint_op *op)
{
    (void)arg;
    return !strcmp(op->name, "attention");
}

static fsdp_status run_block(void *arg, fsdp_tensor **in, int n_in, fsdp_tensor **out, int n_out)
{
    if (n_in != 1 || n_out != 1) return FSDP_INTERNAL;
    out[0] = fsdp_call(arg, in[0]);
    return fsdp_error();
}

/* A transformer whose forward runs each block in a checkpoint, around the block's hooks. */
static fsdp_tensor *around_forward(fsdp_module *self, fsdp_tensor *tokens)
{
    conf_lm *m = (conf_lm *)self;
    fsdp_tensor *h = conf_lm_embed(m, tokens);
    for (int i = 0; i < m->n_blocks; i++) {
        fsdp_tensor *next;
        if (fsdp_checkpoint(run_block, m->block[i], NULL, &h, 1, &next, 1, NULL) != FSDP_OK)
            return NULL;
        h = next;
    }
    return fsdp_call(m->output, fsdp_call(m->norm, h));
}

static fsdp_module *compose_create(const conf_parity *p)
{
    const compose *c = p->arg;
    conf_lm *m = conf_lm_create(3, c->grouping == TIED);
    return m ? &m->base : NULL;
}

static fsdp_status compose_shard(const conf_parity *p, fsdp_module *root)
{
    const compose *c = p->arg;
    conf_lm *m = (conf_lm *)root;
    fsdp_checkpoint_options keep = {.policy = keep_attention};
    for (int i = 0; i < m->n_blocks && c->style != FUNCTION; i++)
        CHECK_OK(fsdp_checkpoint_module(m->block[i], c->style == SELECTIVE ? &keep : NULL));
    if (c->style == FUNCTION) m->base.forward1 = around_forward;
    for (int i = 0; i < m->n_blocks; i++)
        CHECK_OK(fsdp_fully_shard(m->block[i], &p->options));
    fsdp_module *embeddings[] = {m->tok, m->pos}, *end[] = {m->norm, m->output};
    fsdp_module *all[] = {m->tok, m->norm, m->output};
    if (c->grouping == MEMORY) {
        CHECK_OK(fsdp_fully_shard_list(embeddings, 2, &p->options));
        CHECK_OK(fsdp_set_unshard_in_backward(m->tok, 0));
        CHECK_OK(fsdp_fully_shard_list(end, 2, &p->options));
    } else if (c->grouping == TIED) {
        CHECK_OK(fsdp_fully_shard_list(all, 3, &p->options));
    }
    return fsdp_fully_shard(root, &p->options);
}

/* Three styles of recompute, of blocks as units, of lists of modules whose embeddings are not
 * gathered for backward, and of a list that holds tied weights: no bit of training changes. */
static void test_train_parity_with_activation_checkpointing(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < STYLES * GROUPINGS * CONF_POLICIES; k++) {
            compose c = {(style)(k % STYLES), (grouping)(k / STYLES % GROUPINGS)};
            int policy = k / STYLES / GROUPINGS;
            conf_parity p = {.make = compose_create,
                             .shard = compose_shard,
                             .arg = &c,
                             .steps = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), policy, worlds[i])};
            if (k % 11 == 0)
                conf_processes(worlds[i], conf_parity_rank, &p);
            else
                conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- a part of a list runs later, alone --------------------------------------------- */

enum { CHUNKS = 3 };

typedef struct partial {
    int grouped; /* norm and output are one unit */
    int micro;   /* microbatches; the last one reduces */
    int hold;    /* resharding of the pair is off while chunks run */
} partial;

/* A transformer without its head. */
static fsdp_tensor *headless_forward(fsdp_module *self, fsdp_tensor *tokens)
{
    conf_lm *m = (conf_lm *)self;
    fsdp_tensor *h = conf_lm_embed(m, tokens);
    for (int i = 0; i < m->n_blocks; i++)
        h = fsdp_call(m->block[i], h);
    return fsdp_call(m->norm, h);
}

static fsdp_module *headless_create(const conf_parity *p)
{
    (void)p;
    conf_lm *m = conf_lm_create(2, 0);
    if (!m) return NULL;
    m->base.forward1 = headless_forward;
    return &m->base;
}

static fsdp_status partial_shard(const conf_parity *p, fsdp_module *root)
{
    const partial *c = p->arg;
    conf_lm *m = (conf_lm *)root;
    fsdp_module *pair[] = {m->norm, m->output};
    for (int i = 0; i < m->n_blocks; i++)
        CHECK_OK(fsdp_fully_shard(m->block[i], &p->options));
    if (c->grouped) {
        CHECK_OK(fsdp_fully_shard_list(pair, 2, &p->options));
    } else {
        CHECK_OK(fsdp_fully_shard(m->norm, &p->options));
        CHECK_OK(fsdp_fully_shard(m->output, &p->options));
    }
    return fsdp_fully_shard(root, &p->options);
}

static int is_whole(fsdp_module *m)
{
    return !fsdp_is_dtensor(fsdp_param_tensor(fsdp_module_param(m, "weight")));
}

/* The head and its loss on one chunk of h after the other; their gradients with respect to h. */
static fsdp_status run_chunks(const partial *c, conf_lm *m, fsdp_tensor *h)
{
    int64_t each = CONF_SEQ / CHUNKS;
    int sharded = fsdp_is_sharded_module(&m->base);
    for (int k = 0; k < CHUNKS; k++) {
        fsdp_tensor *part = fsdp_contiguous(fsdp_slice(h, 1, k * each, (k + 1) * each));
        fsdp_tensor *y = fsdp_call(m->output, part);
        CHECK(y);
        if (sharded && c->hold) CHECK(is_whole(m->output));
        CHECK_OK(fsdp_backward(fsdp_scale(conf_loss(y), 1.0 / (CHUNKS * c->micro))));
        if (sharded && c->hold) CHECK(is_whole(m->output));
    }
    return FSDP_OK;
}

static fsdp_status hold(conf_lm *m, int on)
{
    CHECK_OK(fsdp_set_reshard_after_forward(m->output, !on, 0));
    return fsdp_set_reshard_after_backward(m->output, !on, 0);
}

/* One microbatch: forward without the head, chunks of the head, then backward through the rest:
 * what is returned has the rest's gradients in it. */
static fsdp_tensor *micro_partial(const conf_parity *p, conf_lm *m, int step, int k)
{
    const partial *c = p->arg;
    int sharded = fsdp_is_sharded_module(&m->base), last = k == c->micro - 1;
    if (sharded && fsdp_set_is_last_backward(&m->base, 0) != FSDP_OK) return NULL;
    if (sharded && fsdp_set_requires_gradient_sync(&m->base, last, 1) != FSDP_OK) return NULL;
    if (sharded && c->hold && hold(m, 1) != FSDP_OK) return NULL;
    fsdp_tensor *h = fsdp_call(&m->base, conf_tokens(2, c->micro * step + k));
    fsdp_tensor *cut = fsdp_clone(fsdp_detach(h));
    if (fsdp_requires_grad_(cut, 1) != FSDP_OK || run_chunks(c, m, cut) != FSDP_OK) return NULL;
    if (sharded && c->hold && hold(m, 0) != FSDP_OK) return NULL;
    if (sharded && c->hold && fsdp_reshard(m->output) != FSDP_OK) return NULL;
    if (sharded && c->hold && is_whole(m->output)) return NULL;
    if (sharded && fsdp_set_is_last_backward(&m->base, last) != FSDP_OK) return NULL;
    fsdp_tensor *g = fsdp_detach(fsdp_grad(cut));
    return fsdp_sum(fsdp_mul(h, fsdp_cast(g, FSDP_F32)));
}

static fsdp_tensor *partial_loss(const conf_parity *p, fsdp_module *root, int step)
{
    const partial *c = p->arg;
    for (int k = 0;; k++) {
        fsdp_tensor *l = micro_partial(p, (conf_lm *)root, step, k);
        if (k == c->micro - 1) return l;
        if (fsdp_backward(l) != FSDP_OK) return NULL;
    }
}

static void partial_cases(int micro, int holds)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2 * CONF_POLICIES; k++) {
            partial c = {.grouped = !(k & 1), .micro = micro, .hold = holds};
            if (holds && !c.grouped) continue;
            conf_parity p = {.make = headless_create,
                             .shard = partial_shard,
                             .loss = partial_loss,
                             .arg = &c,
                             .steps = 4,
                             .bound = 2e-6, /* chunks are reduced one by one */
                             .options = conf_policy(fsdp_shard_defaults(NULL), k / 2, worlds[i])};
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* The head is in one unit with the norm and runs later, alone, chunk by chunk: the gradients of all
 * chunks count, in a unit of two modules as in two units. */
static void test_partial_group_forward_then_standalone(void)
{
    partial_cases(1, 0);
}

/* The same over microbatches of which the last one reduces. */
static void test_partial_group_forward_grad_accum_chunked(void)
{
    partial_cases(2, 0);
}

/* While resharding is off the pair stays whole through chunks' forwards and backwards; reshard
 * frees it. */
static void test_partial_group_reshard_toggle(void)
{
    partial_cases(1, 1);
}

/* ---- input casts of a list ---------------------------------------------------------- */

typedef struct seeing {
    fsdp_module base;
    fsdp_dtype saw;
} seeing;

static fsdp_tensor *seeing_forward(fsdp_module *self, fsdp_tensor *x)
{
    ((seeing *)self)->saw = fsdp_tensor_dtype(x);
    fsdp_tensor *y = fsdp_linear(x, fsdp_param_tensor(fsdp_module_param(self, "weight")));
    return fsdp_cast(y, FSDP_F32); /* so that the next one has something to cast */
}

static fsdp_status cast_rank(void *arg)
{
    int cast = *(const int *)arg;
    fsdp_module *m = fsdp_sequential_create(), *list[3];
    CHECK(m);
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        list[i] = fsdp_module_add(m, name, fsdp_module_create(sizeof(seeing), "Seeing"));
        CHECK(list[i]);
        list[i]->forward1 = seeing_forward;
        fsdp_init_rule rule = {FSDP_INIT_NORMAL, 0, 0.3};
        fsdp_module_add_param(list[i], "weight", fsdp_param_create(FSDP_F32, 2, SIZES(6, 6), rule));
    }
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = cast ? FSDP_BF16 : FSDP_DTYPE_NONE;
    CHECK_OK(fsdp_fully_shard_list(list, 3, &o));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(3, 6, 0)))));
    for (int i = 0; i < 3; i++)
        CHECK(((seeing *)list[i])->saw == (cast ? FSDP_BF16 : FSDP_F32));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Every module of a list has its inputs cast, not the first alone. */
static void test_grouped_module_cast_forward_inputs(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int cast = 0; cast < 2; cast++)
            conf_ranks(worlds[i], cast_rank, &cast);
}

/* ---- two forwards ------------------------------------------------------------------- */

typedef struct pairs {
    fsdp_module base;
    fsdp_module *layer[2];
    int skip; /* the second layer */
} pairs;

static fsdp_tensor *pairs_forward(fsdp_module *self, fsdp_tensor *x)
{
    pairs *m = (pairs *)self;
    x = fsdp_call(m->layer[0], x);
    return m->skip ? x : fsdp_call(m->layer[1], x);
}

static fsdp_module *pairs_create(const conf_parity *p)
{
    pairs *m = (pairs *)fsdp_module_create(sizeof *m, "Pairs");
    if (!m) return NULL;
    m->base.forward1 = pairs_forward;
    m->skip = p->arg != NULL;
    for (int i = 0; i < 2; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        m->layer[i] = fsdp_module_add(&m->base, name, conf_mlp_create(p->dim, 2));
    }
    return &m->base;
}

/* Units in units, and a checkpoint around each layer. */
static fsdp_status nested_shard(const conf_parity *p, fsdp_module *m)
{
    for (int i = 0; i < 2; i++) {
        fsdp_module *layer = fsdp_module_child(m, i);
        CHECK_OK(fsdp_checkpoint_module(layer, NULL));
        for (int k = 0; k < 2; k++)
            CHECK_OK(fsdp_fully_shard(fsdp_module_child(layer, k), &p->options));
        CHECK_OK(fsdp_fully_shard(layer, &p->options));
    }
    return fsdp_fully_shard(m, &p->options);
}

static fsdp_tensor *two_forwards(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_tensor *a = conf_loss(fsdp_call(m, conf_input(3, p->dim, 2 * step)));
    return fsdp_add(a, conf_loss(fsdp_call(m, conf_input(3, p->dim, 2 * step + 1))));
}

static fsdp_status has_grad(fsdp_named_param *p, void *arg)
{
    const int *skip = arg;
    int unused = *skip && !strncmp(p->name, "1.", 2);
    CHECK((fsdp_grad(fsdp_param_tensor(p->param)) != NULL) == !unused);
    return FSDP_OK;
}

static fsdp_status check_grads(const conf_parity *p, fsdp_module *m, int step)
{
    int skip = p->arg != NULL;
    return step % 2 == 1 ? conf_each_param(m, has_grad, &skip) : FSDP_OK;
}

/* Two forwards and one backward of nested units under recompute: what an earlier post-backward
 * freed is gathered again, and every parameter has a gradient. */
static void test_double_forward_with_nested_fsdp_and_checkpoint(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = pairs_create,
                             .shard = nested_shard,
                             .loss = two_forwards,
                             .before_step = check_grads,
                             .dim = 6,
                             .bound = 2e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

static fsdp_status pair_shard(const conf_parity *p, fsdp_module *m)
{
    CHECK_OK(fsdp_fully_shard_list(((pairs *)m)->layer, 2, &p->options));
    return fsdp_fully_shard(m, &p->options);
}

/* Two forwards that leave a module of the unit out, then backward: it ends, and the module that did
 * not run has no gradient. */
static void test_double_partial_forward_then_backward(void)
{
    static const int skip = 1;
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = pairs_create,
                             .shard = pair_shard,
                             .loss = two_forwards,
                             .before_step = check_grads,
                             .arg = &skip,
                             .dim = 6,
                             .bound = 2e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- shared weights ----------------------------------------------------------------- */

typedef struct shared {
    int units; /* 0: all in the root's unit, 1: a list of embedding and head, 2: two units */
    int recompute;
} shared;

static fsdp_module *tied_create(const conf_parity *p)
{
    (void)p;
    conf_lm *m = conf_lm_create(2, 1);
    return m ? &m->base : NULL;
}

static fsdp_status tied_shard(const conf_parity *p, fsdp_module *root)
{
    const shared *s = p->arg;
    conf_lm *m = (conf_lm *)root;
    for (int i = 0; i < m->n_blocks; i++) {
        if (s->recompute) CHECK_OK(fsdp_checkpoint_module(m->block[i], NULL));
        CHECK_OK(fsdp_fully_shard(m->block[i], &p->options));
    }
    fsdp_module *both[] = {m->tok, m->output};
    if (s->units == 1) CHECK_OK(fsdp_fully_shard_list(both, 2, &p->options));
    if (s->units == 2) {
        CHECK_OK(fsdp_fully_shard(m->tok, &p->options));
        CHECK_OK(fsdp_fully_shard(m->output, &p->options));
    }
    return fsdp_fully_shard(root, &p->options);
}

static void tied_cases(int units, const int *ranks, int n)
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2 * CONF_POLICIES; k++) {
            shared s = {units, k & 1};
            conf_parity p = {.make = tied_create,
                             .shard = tied_shard,
                             .arg = &s,
                             .bound = units == 2 ? 2e-6 : 0,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k / 2, ranks[i])};
            if (k == 5)
                conf_processes(ranks[i], conf_parity_rank, &p);
            else
                conf_ranks(ranks[i], conf_parity_rank, &p);
        }
}

/* Embedding and head share a weight of the root's unit, with and without recompute. */
static void test_train_parity_with_shared_params(void)
{
    tied_cases(0, worlds, WORLDS);
}

/* They share it in a unit of their own, whose rows no number of ranks divides: every row trains
 * (the weights are compared whole), also those of ranks with few or none. */
static void test_train_shared_params_uneven_shard(void)
{
    static const int ranks[] = {3, 5, 7}; /* 16 rows */
    tied_cases(1, ranks, 3);
}

static fsdp_status tied_once(const conf_parity *p, fsdp_module *root)
{
    CHECK_OK(tied_shard(p, root));
    conf_lm *m = (conf_lm *)root;
    CHECK(fsdp_is_sharded_module(m->tok) && fsdp_is_sharded_module(m->output));
    CHECK(fsdp_module_param(m->tok, "weight") == fsdp_module_param(m->output, "weight"));
    return FSDP_OK;
}

static fsdp_status reductions_once(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    (void)step;
    if (!fsdp_is_sharded_module(m) || fsdp_world_size() == 1) return FSDP_OK;
    /* Two blocks, the root's rest, and the weight once though two units use it. */
    CHECK(conf_calls(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER) == 4);
    fsdp_comm_count_reset();
    return FSDP_OK;
}

static fsdp_tensor *counted_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_comm_count_reset();
    return conf_default_loss(p, m, step);
}

/* Embedding and head are two units over one weight: it is gathered while either runs, its gradients
 * are summed, and it is reduced once. */
static void test_shared_params_separate_fsdp_groups_error(void)
{
    tied_cases(2, worlds, WORLDS);
    for (int i = 0; i < WORLDS; i++) {
        shared s = {2, 0};
        conf_parity p = {.make = tied_create,
                         .shard = tied_once,
                         .loss = counted_loss,
                         .before_step = reductions_once,
                         .arg = &s,
                         .steps = 4,
                         .bound = 2e-6,
                         .options = fsdp_shard_defaults(NULL)};
        conf_ranks(worlds[i], conf_parity_rank, &p);
    }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_train_parity_with_activation_checkpointing),
        CONF_TEST(test_partial_group_forward_then_standalone),
        CONF_TEST(test_partial_group_forward_grad_accum_chunked),
        CONF_TEST(test_partial_group_reshard_toggle),
        CONF_TEST(test_grouped_module_cast_forward_inputs),
        CONF_TEST(test_double_forward_with_nested_fsdp_and_checkpoint),
        CONF_TEST(test_double_partial_forward_then_backward),
        CONF_TEST(test_train_parity_with_shared_params),
        CONF_TEST(test_train_shared_params_uneven_shard),
        CONF_TEST(test_shared_params_separate_fsdp_groups_error),
    };
    return conf_main("training", tests, sizeof tests / sizeof *tests, argc, argv);
}
