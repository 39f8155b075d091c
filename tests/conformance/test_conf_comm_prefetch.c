/*
 * test_conf_comm_prefetch.c - upstream's test_fully_shard_comm.py, classes Prefetch and Unshard:
 * what is gathered ahead, by lists and by hand.
 *
 * Orders of events are written as in nets.h: U gathered, R freed, P backward done.
 */
#include "nets.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

static const fsdp_reshard_policy policies[] = {FSDP_RESHARD_AUTO, FSDP_RESHARD_ALWAYS,
                                               FSDP_RESHARD_NEVER};

/* ---- lists -------------------------------------------------------------------------- */

typedef struct lists {
    int forward, backward; /* modules in each layer's list; backward: from layer 1 or 2 up only */
    const char *in_forward, *in_backward;
} lists;

/* Layer i gathers the next `deep` ahead. */
static fsdp_status set_forward_lists(conf_lm *m, int deep)
{
    for (int i = 0; i < m->n_blocks && deep; i++) {
        int n = m->n_blocks - 1 - i < deep ? m->n_blocks - 1 - i : deep;
        CHECK_OK(fsdp_set_modules_to_forward_prefetch(m->block[i], m->block + i + 1, n));
    }
    return FSDP_OK;
}

/* Layer i gathers the `deep` before it ahead, where there are as many. */
static fsdp_status set_backward_lists(conf_lm *m, int deep)
{
    for (int i = deep; i < m->n_blocks && deep; i++) {
        fsdp_module *list[2];
        for (int k = 0; k < deep; k++)
            list[k] = m->block[i - 1 - k];
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(m->block[i], list, deep));
    }
    return FSDP_OK;
}

/* Three steps of m have these events; frees it. */
static fsdp_status steps_are(conf_lm *m, const lists *l)
{
    conf_events e = {.ahead = 1};
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    CHECK_OK(fsdp_set_event_hook(&m->base, conf_note, &e));
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *loss = conf_loss(fsdp_call(&m->base, conf_tokens(2, step)));
        CHECK(loss);
        CHECK_OK(conf_events_are(&e, l->in_forward));
        CHECK_OK(fsdp_backward(loss));
        CHECK_OK(conf_events_are(&e, l->in_backward));
        fsdp_scope_end(scope);
        CHECK_OK(fsdp_zero_grad(&m->base));
    }
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

static fsdp_status lists_rank(void *arg)
{
    const lists *l = arg;
    conf_lm *m = conf_lm_create(4, 0);
    CHECK(m);
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    p.options.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    p.options.prefetch_limit = 0;
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(set_forward_lists(m, l->forward));
    CHECK_OK(set_backward_lists(m, l->backward));
    return steps_are(m, l);
}

static const char *const plain_forward = "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot";
static const char *const plain_backward = "Uroot U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot";

/* Lists of one and of two modules are gathered when their module has been; backward keeps its
 * order. */
static void test_set_modules_to_forward_prefetch(void)
{
    const lists cases[] = {
        {1, 0, "Uroot U0 U1 R0 U2 R1 U3 R2 R3 Rroot", plain_backward},
        {2, 0, "Uroot U0 U1 U2 R0 U3 R1 R2 R3 Rroot", plain_backward},
    };
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            lists l = cases[k];
            conf_processes(worlds[i], lists_rank, &l);
        }
}

/* The same in backward; the root, without a list, gathers the last layer ahead as by default. */
static void test_set_modules_to_backward_prefetch(void)
{
    const lists cases[] = {
        {0, 1, plain_forward, plain_backward},
        {0, 2, plain_forward, "Uroot U3 U2 U1 R3 P3 U0 R2 P2 R1 P1 R0 P0 Rroot Proot"},
    };
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            lists l = cases[k];
            conf_processes(worlds[i], lists_rank, &l);
        }
}

/* ---- inside recompute --------------------------------------------------------------- */

typedef struct nest {
    fsdp_module base;
    fsdp_module *norm, *ff;
} nest;

static fsdp_tensor *nest_forward(fsdp_module *self, fsdp_tensor *x)
{
    nest *m = (nest *)self;
    return fsdp_add(x, fsdp_call(m->ff, fsdp_call(m->norm, x)));
}

static fsdp_module *nest_create(int i)
{
    nest *m = (nest *)fsdp_module_create(sizeof *m, "Nest");
    if (!m) return NULL;
    char name[16];
    snprintf(name, sizeof name, "ff%d", i);
    m->base.forward1 = nest_forward;
    m->norm = fsdp_module_add(&m->base, "norm", fsdp_rms_norm_create(6, 1e-5));
    m->ff = fsdp_module_add(&m->base, name, conf_mlp_create(6, 2));
    return &m->base;
}

typedef struct inside {
    int way; /* 0: no lists; 1: with the units inside; 2: the layer before alone */
    const char *backward;
} inside;

/* Two checkpointed layers, each a unit that holds a unit. */
static fsdp_status inside_rank(void *arg)
{
    const inside *c = arg;
    conf_events e = {.ahead = 1};
    fsdp_module *m = fsdp_sequential_create();
    CHECK(m);
    fsdp_module *in = fsdp_module_add(m, "in", fsdp_linear_create(6, 6, 1));
    nest *layer[2];
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    o.prefetch_limit = 0;
    CHECK_OK(in ? FSDP_OK : fsdp_error());
    for (int i = 0; i < 2; i++) {
        char name[32];
        snprintf(name, sizeof name, "layer%d", i);
        layer[i] = (nest *)fsdp_module_add(m, name, nest_create(i));
        CHECK(layer[i]);
        CHECK_OK(fsdp_checkpoint_module(&layer[i]->base, NULL));
        CHECK_OK(fsdp_fully_shard(layer[i]->ff, &o));
        CHECK_OK(fsdp_fully_shard(&layer[i]->base, &o));
    }
    CHECK(fsdp_module_add(m, "out", fsdp_linear_create(6, 6, 1)));
    CHECK_OK(fsdp_fully_shard(m, &o));
    fsdp_module *inner[] = {layer[1]->ff, layer[0]->ff}, *before[] = {&layer[0]->base};
    if (c->way == 1) {
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(&layer[1]->base, inner, 2));
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(&layer[0]->base, inner + 1, 1));
    } else if (c->way == 2) {
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(&layer[1]->base, before, 1));
    }
    CHECK_OK(fsdp_reset_parameters(m, 1));
    CHECK_OK(fsdp_set_event_hook(m, conf_note, &e));
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *loss = conf_loss(fsdp_call(m, conf_input(3, 6, step)));
        CHECK(loss);
        CHECK_OK(
            conf_events_are(&e, "Uroot Ulayer0 Uff0 Rff0 Rlayer0 Ulayer1 Uff1 Rff1 Rlayer1 Rroot"));
        CHECK_OK(fsdp_backward(loss));
        CHECK_OK(conf_events_are(&e, c->backward));
        fsdp_scope_end(scope);
        CHECK_OK(fsdp_zero_grad(m));
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A forward that runs again gathers what it needs, frees nothing and records no order: each unit
 * comes once, by default and by lists. */
static void test_set_modules_to_backward_prefetch_inside_ac(void)
{
    static const inside cases[] = {
        {0, "Uroot Ulayer1 Uff1 Ulayer0 Rff1 Pff1 Rlayer1 Player1 Uff0 Rff0 Pff0 Rlayer0 Player0 "
            "Rroot Proot"},
        {1, "Uroot Ulayer1 Uff1 Uff0 Ulayer0 Rff1 Pff1 Rlayer1 Player1 Rff0 Pff0 Rlayer0 Player0 "
            "Rroot Proot"},
        {2, "Uroot Ulayer1 Ulayer0 Uff1 Rff1 Pff1 Rlayer1 Player1 Uff0 Rff0 Pff0 Rlayer0 Player0 "
            "Rroot Proot"},
    };
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            inside c = cases[k];
            conf_ranks(worlds[i], inside_rank, &c);
        }
}

/* ---- units of several modules ------------------------------------------------------- */

static fsdp_status groups_rank(void *arg)
{
    const lists *l = arg;
    conf_lm *m = conf_lm_create(2, 0);
    CHECK(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    o.prefetch_limit = 0;
    fsdp_module *first[] = {m->tok, m->pos}, *last[] = {m->norm, m->output};
    CHECK_OK(fsdp_fully_shard_list(first, 2, &o));
    for (int i = 0; i < 2; i++)
        CHECK_OK(fsdp_fully_shard(m->block[i], &o));
    CHECK_OK(fsdp_fully_shard_list(last, 2, &o));
    CHECK_OK(fsdp_fully_shard(&m->base, &o));
    if (l->backward) {
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(m->norm, m->block + 1, 1));
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(m->block[1], m->block, 1));
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(m->block[0], &m->tok, 1));
    }
    return steps_are(m, l);
}

/* Lists of modules come and go as one unit, by default and by lists. */
static void test_fully_shard_multi_module_backward_prefetch(void)
{
    static const char *const forward =
        "Utok_embeddings, pos_embeddings Rtok_embeddings, pos_embeddings U0 R0 U1 R1 Unorm, output "
        "Rnorm, output";
    static const char *const backward =
        "Unorm, output U1 Rnorm, output Pnorm, output U0 R1 P1 Utok_embeddings, pos_embeddings R0 "
        "P0 "
        "Rtok_embeddings, pos_embeddings Ptok_embeddings, pos_embeddings";
    const lists cases[] = {{0, 0, forward, backward}, {0, 1, forward, backward}};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            lists l = cases[k];
            conf_ranks(worlds[i], groups_rank, &l);
        }
}

/* A sequence of MLPs; `skip` never runs. */
typedef struct some {
    fsdp_module base;
    fsdp_module *layer[4];
    int skip;
} some;

static fsdp_tensor *some_forward(fsdp_module *self, fsdp_tensor *x)
{
    some *m = (some *)self;
    for (int i = 0; i < 4; i++)
        if (i != m->skip) x = fsdp_call(m->layer[i], x);
    return x;
}

static fsdp_module *some_create(const conf_parity *p)
{
    some *m = (some *)fsdp_module_create(sizeof *m, "Some");
    if (!m) return NULL;
    m->base.forward1 = some_forward;
    m->skip = *(const int *)p->arg;
    for (int i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        m->layer[i] = fsdp_module_add(&m->base, name, conf_mlp_create(p->dim, 2));
    }
    return &m->base;
}

/* 1 and 2 are one unit. */
static fsdp_status some_shard(const conf_parity *p, fsdp_module *m)
{
    some *s = (some *)m;
    CHECK_OK(fsdp_fully_shard(s->layer[0], &p->options));
    CHECK_OK(fsdp_fully_shard_list(s->layer + 1, 2, &p->options));
    return fsdp_fully_shard(m, &p->options);
}

/* After a whole step nothing is left gathered, and what did not run has no gradient. */
static fsdp_status some_left(const conf_parity *p, fsdp_module *m, int step)
{
    some *s = (some *)m;
    if (!fsdp_is_sharded_module(m) || step % 2 == 0) return FSDP_OK;
    fsdp_memory_stats bytes;
    fsdp_memory_get(&bytes);
    CHECK(bytes.live[FSDP_UNSHARDED] == 0);
    for (int i = 0; i < 4; i++) {
        fsdp_param *w = fsdp_module_param(fsdp_module_child(s->layer[i], 0), "weight");
        CHECK(fsdp_is_dtensor(fsdp_param_tensor(w)));
        CHECK((fsdp_grad(fsdp_param_tensor(w)) != NULL) == (i != *(const int *)p->arg));
    }
    return FSDP_OK;
}

/* One module of a unit of two never runs, the first or the second: the unit ends with the root's
 * forward, and trains. */
static void test_fully_shard_multi_module_unused_module(void)
{
    static const int skip[] = {1, 2};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 6; k++) {
            conf_parity p = {.make = some_create,
                             .shard = some_shard,
                             .before_step = some_left,
                             .arg = &skip[k & 1],
                             .dim = 6,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k / 2];
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- gathered in vain --------------------------------------------------------------- */

static fsdp_module *mlps_create(const conf_parity *p)
{
    return conf_mlps_create(4, p->dim);
}

/* The first layer's backward, which is the last, gathers the others ahead once more. */
static fsdp_status misled_shard(const conf_parity *p, fsdp_module *m)
{
    CHECK_OK(conf_shard_children(p, m));
    fsdp_module *list[] = {fsdp_module_child(m, 3), fsdp_module_child(m, 1)};
    CHECK_OK(fsdp_set_modules_to_backward_prefetch(fsdp_module_child(m, 0), list, 2));
    return fsdp_set_modules_to_backward_prefetch(fsdp_module_child(m, 1), list, 1);
}

static fsdp_status nothing_left(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    (void)step;
    if (!fsdp_is_sharded_module(m)) return FSDP_OK;
    fsdp_memory_stats bytes;
    fsdp_memory_get(&bytes);
    CHECK(bytes.live[FSDP_UNSHARDED] == 0);
    return FSDP_OK;
}

/* What is gathered ahead and not used is given back when backward ends; nothing is computed with
 * stale weights. */
static void test_backward_misprefetch(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 6; k++) {
            conf_parity p = {.make = mlps_create,
                             .shard = misled_shard,
                             .before_step = nothing_left,
                             .dim = 6,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k / 2];
            p.options.private_gather = k & 1;
            if (k == 1)
                conf_processes(worlds[i], conf_parity_rank, &p);
            else
                conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- unshard by hand ---------------------------------------------------------------- */

typedef struct busy {
    fsdp_module base;
    fsdp_module *layer[3];
} busy;

static fsdp_status mean_over_ranks(fsdp_tensor *x)
{
    FSDP_TRY(fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, fsdp_data(x), fsdp_numel(x),
                             FSDP_F32, FSDP_SUM, NULL));
    fsdp_no_grad_begin();
    fsdp_status s = fsdp_copy_(x, fsdp_scale(x, 1.0 / fsdp_world_size()));
    fsdp_no_grad_end();
    return s;
}

/* Gathers the next layer while all-reduces of the program's own go on. */
static fsdp_tensor *busy_forward(fsdp_module *self, fsdp_tensor *x)
{
    busy *m = (busy *)self;
    fsdp_unshard_handle *h[3] = {NULL};
    int sharded = fsdp_is_sharded_module(self);
    if (sharded && fsdp_unshard_async(m->layer[0], &h[0]) != FSDP_OK) return NULL;
    for (int i = 0; i < 3; i++) {
        if (sharded && i < 2 && fsdp_unshard_async(m->layer[i + 1], &h[i + 1]) != FSDP_OK)
            return NULL;
        fsdp_tensor *shared = fsdp_clone(fsdp_detach(x));
        if (mean_over_ranks(shared) != FSDP_OK) return NULL;
        /* The second one is left to the forward, which waits by itself. */
        if (i != 1 && sharded && fsdp_unshard_wait(h[i]) != FSDP_OK) return NULL;
        x = fsdp_call(m->layer[i], fsdp_add(x, fsdp_scale(shared, 0.5)));
        if (i == 1 && sharded && fsdp_unshard_wait(h[i]) != FSDP_OK) return NULL;
    }
    return x;
}

static fsdp_module *busy_create(const conf_parity *p)
{
    busy *m = (busy *)fsdp_module_create(sizeof *m, "Busy");
    if (!m) return NULL;
    m->base.forward1 = busy_forward;
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        m->layer[i] = fsdp_module_add(&m->base, name, conf_mlp_create(p->dim, 2));
    }
    return &m->base;
}

/* Gathers that a forward issues itself, waited for by it or by the module's own forward. */
static void test_unshard_async(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = busy_create,
                             .shard = conf_shard_children,
                             .dim = 6,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

static fsdp_status no_param_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(2, 4);
    CHECK(m);
    CHECK_OK(conf_shard_children(&(conf_parity){.options = fsdp_shard_defaults(NULL)}, m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    for (int k = 0; k < 2; k++) {
        fsdp_unshard_handle *h = NULL;
        CHECK_OK(fsdp_unshard_async(m, &h));
        CHECK_OK(fsdp_unshard_wait(h));
        CHECK_OK(fsdp_unshard(m));
        CHECK_OK(fsdp_reshard(m));
        fsdp_scope *scope = fsdp_scope_begin();
        CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
        fsdp_scope_end(scope);
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A unit without parameters can be gathered, waited for and freed, before and after a forward. */
static void test_unshard_no_param_group(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], no_param_rank, NULL);
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_set_modules_to_forward_prefetch),
        CONF_TEST(test_set_modules_to_backward_prefetch),
        CONF_TEST(test_set_modules_to_backward_prefetch_inside_ac),
        CONF_TEST(test_fully_shard_multi_module_backward_prefetch),
        CONF_TEST(test_fully_shard_multi_module_unused_module),
        CONF_TEST(test_backward_misprefetch),
        CONF_TEST(test_unshard_async),
        CONF_TEST(test_unshard_no_param_group),
    };
    return conf_main("comm", tests, sizeof tests / sizeof *tests, argc, argv);
}
