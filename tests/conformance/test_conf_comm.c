/*
 * test_conf_comm.c - upstream's test_fully_shard_comm.py: what is gathered and reduced, how often,
 * in which order and divided by what.
 */
#include "nets.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- a module of bare parameters ---------------------------------------------------- */

static const int64_t bag_sizes[][2] = {{17, 257}, {17, 0}, {64, 32}, {64, 0},
                                       {64, 64},  {51, 8}, {25, 0},  {1, 297}};
enum { BAG = sizeof bag_sizes / sizeof *bag_sizes };

/* A number that each rank gives its gradients of parameter i. */
static fsdp_tensor *bag_factor(int i, int rank, fsdp_dtype t, double scale)
{
    char name[48];
    snprintf(name, sizeof name, "factor %d of rank %d", i, rank);
    int nd = bag_sizes[i][1] ? 2 : 1;
    return fsdp_cast(fsdp_scale(fsdp_rand(FSDP_F32, nd, bag_sizes[i], 3, name), scale), t);
}

typedef struct bag {
    fsdp_module base;
    double scale;
} bag;

static fsdp_tensor *bag_forward(fsdp_module *self, fsdp_tensor *x)
{
    x = fsdp_cast(x, FSDP_F32);
    for (int i = 0; i < BAG; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        fsdp_tensor *p = fsdp_param_tensor(fsdp_module_param(self, name));
        fsdp_tensor *c = bag_factor(i, fsdp_rank(), fsdp_tensor_dtype(p), ((bag *)self)->scale);
        x = fsdp_add(x, fsdp_cast(fsdp_sum(fsdp_mul(p, c)), FSDP_F32));
    }
    return x;
}

static fsdp_module *bag_create(double scale)
{
    bag *b = (bag *)fsdp_module_create(sizeof *b, "Bag");
    if (!b) return NULL;
    b->base.forward1 = bag_forward;
    b->scale = scale;
    fsdp_init_rule rule = {FSDP_INIT_NORMAL, 0, 1};
    for (int i = 0; i < BAG; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        fsdp_module_add_param(
            &b->base, name,
            fsdp_param_create(FSDP_F32, bag_sizes[i][1] ? 2 : 1, bag_sizes[i], rule));
    }
    return &b->base;
}

static fsdp_param *bag_param(fsdp_module *m, int i)
{
    char name[16];
    snprintf(name, sizeof name, "p%d", i);
    return fsdp_module_param(m, name);
}

/* ---- CollectiveOps ------------------------------------------------------------------ */

typedef struct way {
    int private_gather, largest, replicas, parts; /* parts: reshard_ranks 2, where it divides */
    fsdp_dtype param, reduce;
} way;

static fsdp_shard_options way_options(const way *w)
{
    fsdp_shard_options o = fsdp_shard_defaults(w->replicas ? conf_hybrid_mesh(w->replicas) : NULL);
    o.private_gather = w->private_gather;
    if (w->parts && fsdp_group_size(fsdp_group_world()) % (2 * (w->replicas ? 2 : 1)) == 0)
        o.reshard_ranks = 2;
    if (w->largest) o.placement_fn = conf_largest_dim;
    if (w->param) o.mp_policy.param_dtype = w->param;
    if (w->reduce) o.mp_policy.reduce_dtype = w->reduce;
    return o;
}

static fsdp_status gather_rank(void *arg)
{
    const way *w = arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *plain = bag_create(1), *m = bag_create(1);
    CHECK(plain && m);
    CHECK_OK(fsdp_reset_parameters(plain, 7));
    CHECK_OK(fsdp_reset_parameters(m, 7));
    fsdp_shard_options o = way_options(w);
    CHECK_OK(fsdp_fully_shard(m, &o));
    for (int round = 0; round < 2; round++) {
        /* The second time from the parts that a forward left, if there are any. */
        if (round) CHECK(fsdp_call(m, fsdp_scalar(FSDP_F32, 0)));
        CHECK_OK(fsdp_unshard(m));
        for (int i = 0; i < BAG; i++) {
            fsdp_tensor *whole = fsdp_param_tensor(bag_param(m, i));
            fsdp_tensor *was = fsdp_param_tensor(bag_param(plain, i));
            CHECK(!fsdp_is_dtensor(whole));
            CHECK(check_same_bits(whole, w->param ? fsdp_cast(was, w->param) : was));
        }
        CHECK_OK(fsdp_reshard(m));
        CHECK(fsdp_is_dtensor(fsdp_param_tensor(bag_param(m, 0))));
    }
    fsdp_scope_end(scope);
    fsdp_module_free(plain);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A gather gives back the parameters as they were before fully_shard: even and uneven rows, shared
 * and private copies, in the parameters' dtype and in bf16, along dim 0 and others, from flat and
 * hybrid meshes, from shards and from the parts that an integer reshard_after_forward leaves. */
static void test_all_gather_fp32(void)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 20; k++) {
            way w = {.private_gather = k & 1,
                     .parts = k >= 10,
                     .largest = (k % 10) >> 1 & 1,
                     .param = k % 10 & 4 ? FSDP_BF16 : 0,
                     .replicas = k % 10 & 8 ? 2 : 0};
            if (w.replicas && ranks[i] % 2) continue;
            if (ranks[i] == 4)
                conf_processes(ranks[i], gather_rank, &w);
            else
                conf_ranks(ranks[i], gather_rank, &w);
        }
}

/* The gradient of parameter i averaged over all ranks, as (own rows): what should have come. */
static fsdp_status expected_grad(int i, const way *w, double scale, fsdp_tensor **out)
{
    fsdp_dtype t = w->param ? w->param : FSDP_F32;
    fsdp_tensor *mine = fsdp_cast(bag_factor(i, fsdp_rank(), t, scale), FSDP_F32);
    fsdp_tensor *sum = fsdp_clone(mine);
    CHECK(sum);
    CHECK_OK(fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, fsdp_data(sum), fsdp_numel(sum),
                             FSDP_F32, FSDP_SUM, NULL));
    *out = fsdp_scale(sum, (double)(float)(1.0 / fsdp_world_size()));
    return FSDP_OK;
}

static fsdp_status reduce_rank_scaled(const way *w, double scale, double bound)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = bag_create(scale);
    CHECK(m);
    fsdp_shard_options o = way_options(w);
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 7));
    fsdp_tensor *loss = fsdp_call(m, fsdp_scalar(FSDP_F32, 0));
    CHECK_OK(fsdp_backward(loss));
    for (int i = 0; i < BAG; i++) {
        fsdp_tensor *p = fsdp_param_tensor(bag_param(m, i)), *g = fsdp_grad(p), *want = NULL;
        CHECK(g && fsdp_is_dtensor(g) && fsdp_tensor_dtype(g) == FSDP_F32);
        CHECK(fsdp_size(g, 0) == fsdp_size(p, 0) && fsdp_numel(g) == fsdp_numel(p));
        CHECK_OK(expected_grad(i, w, scale, &want));
        double d = check_distance(fsdp_dtensor_full(g), want);
        CHECK(d <= bound);
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status reduce_rank(void *arg)
{
    return reduce_rank_scaled(arg, 1, 0);
}

/* A reduction leaves on each rank its rows of the all-reduced gradient divided by the ranks, to the
 * bit: flat and hybrid, along dim 0 and others. */
static void test_reduce_scatter_fp32(void)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 4; k++) {
            way w = {.largest = k & 1, .replicas = k & 2 ? 2 : 0};
            if (w.replicas && ranks[i] % 2) continue;
            if (ranks[i] == 4)
                conf_processes(ranks[i], reduce_rank, &w);
            else
                conf_ranks(ranks[i], reduce_rank, &w);
        }
}

static fsdp_status reduce_fp16_rank(void *arg)
{
    /* Up to 60000 on each rank: the sum of two would be no fp16 number, their mean is one. */
    CHECK_OK(reduce_rank_scaled(arg, 60000, 0));
    return reduce_rank_scaled(arg, 1, 0);
}

/* The same with gradients that travel in fp16: divided so that nothing overflows on the way. */
static void test_reduce_scatter_fp16(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 4; k++) {
            way w = {.largest = k & 1, .param = FSDP_F16, .reduce = k & 2 ? FSDP_F32 : FSDP_F16};
            conf_processes(worlds[i], reduce_fp16_rank, &w);
        }
}

/* ---- ChunkCatMixedDtype ------------------------------------------------------------- */

enum { PIECES = 6 };

/* Sizes (outer, dim, inner) and dtype of the gradients of one reduction. */
static const struct {
    int64_t outer, dim, inner;
    fsdp_dtype dtype;
} pieces[PIECES] = {{1, 10, 7, FSDP_BF16}, {1, 3, 33, FSDP_F16}, {4, 9, 5, FSDP_F32},
                    {3, 8, 2, FSDP_BF16},  {1, 1, 19, FSDP_F32}, {2, 6, 1, FSDP_F16}};

/* Reduces the pieces, as they are or as fp32 copies; shards in fp32. */
static fsdp_status reduce_pieces(int upcast, float *shards[PIECES])
{
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g);
    fsdp_list_entry e[PIECES];
    for (int i = 0; i < PIECES; i++) {
        int64_t numel = pieces[i].outer * pieces[i].dim * pieces[i].inner;
        fsdp_dtype t = upcast ? FSDP_F32 : pieces[i].dtype;
        char name[48];
        snprintf(name, sizeof name, "piece %d of rank %d", i, fsdp_rank());
        fsdp_tensor *x = fsdp_cast(fsdp_randn(FSDP_F32, 1, &numel, 1, name), pieces[i].dtype);
        if (upcast) x = fsdp_cast(x, FSDP_F32);
        size_t bytes = (size_t)numel * fsdp_dtype_size(t);
        e[i] = (fsdp_list_entry){.outer = pieces[i].outer,
                                 .dim = pieces[i].dim,
                                 .inner = pieces[i].inner,
                                 .chunk = (pieces[i].dim + n - 1) / n,
                                 .shard = shards[i],
                                 .shard_dtype = FSDP_F32,
                                 .full = fsdp_comm_alloc(g, (int64_t)bytes),
                                 .full_dtype = t,
                                 .present = 1};
        CHECK(x && e[i].full);
        memcpy(e[i].full, fsdp_data(x), bytes);
    }
    fsdp_work *w;
    CHECK_OK(fsdp_reduce_scatter_list(g, FSDP_LANE_REDUCE, "pieces", e, PIECES, 0.25f, 0, &w));
    CHECK_OK(fsdp_work_wait_buffers(w));
    CHECK_OK(fsdp_work_wait(w));
    for (int i = 0; i < PIECES; i++) {
        int64_t numel = pieces[i].outer * pieces[i].dim * pieces[i].inner;
        fsdp_comm_free(g, e[i].full, numel * (int64_t)fsdp_dtype_size(e[i].full_dtype));
    }
    return FSDP_OK;
}

static fsdp_status pieces_rank(void *arg)
{
    (void)arg;
    enum { ROOM = 256 };
    static const size_t bytes = ROOM * sizeof(float);
    float *one[PIECES], *two[PIECES];
    for (int i = 0; i < PIECES; i++) {
        one[i] = calloc(1, bytes);
        two[i] = calloc(1, bytes);
    }
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(reduce_pieces(0, one));
    CHECK_OK(reduce_pieces(1, two));
    for (int i = 0; i < PIECES; i++) {
        CHECK(!memcmp(one[i], two[i], bytes));
        CHECK(fsdp_rank() != 0 || one[i][0] != 0);
        free(one[i]);
        free(two[i]);
    }
    fsdp_scope_end(scope);
    return FSDP_OK;
}

/* Gradients in bf16, fp16 and fp32, with rows that are missing on some ranks and with strides,
 * reduce into fp32 shards as if they had been fp32 before. */
static void test_numerics(void)
{
    static const int ranks[] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++)
        conf_processes(ranks[i], pieces_rank, NULL);
}

/* ---- Communication ------------------------------------------------------------------ */

enum { BLOCKS = 3 };

typedef struct counts {
    fsdp_reshard_policy policy;
    int prefetch;
    int ranks;   /* reshard_ranks, where it divides */
    int by_hand; /* reshard all between forward and backward */
    int setter;  /* 1: set_reshard_after_forward(recurse), 2: of the root alone */
    int on;      /* its argument */
    int gathers; /* expected in backward */
} counts;

static fsdp_status counts_rank(void *arg)
{
    const counts *c = arg;
    conf_lm *m = conf_lm_create(BLOCKS, 0);
    CHECK(m);
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    p.options.reshard_after_forward = c->policy;
    p.options.prefetch_limit = c->prefetch;
    if (c->ranks && fsdp_world_size() % c->ranks == 0) p.options.reshard_ranks = c->ranks;
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    if (c->setter) CHECK_OK(fsdp_set_reshard_after_forward(&m->base, c->on, c->setter == 1));
    int many = fsdp_world_size() > 1;
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_comm_count_reset();
        fsdp_tensor *loss = conf_loss(fsdp_call(&m->base, conf_tokens(2, step)));
        CHECK(loss);
        CHECK(conf_calls(FSDP_LANE_GATHER, FSDP_ALL_GATHER) == many * (BLOCKS + 1));
        CHECK(conf_calls(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER) == 0);
        for (int i = 0; i < BLOCKS && c->by_hand; i++)
            CHECK_OK(fsdp_reshard(m->block[i]));
        if (c->by_hand) CHECK_OK(fsdp_reshard(&m->base));
        fsdp_comm_count_reset();
        CHECK_OK(fsdp_backward(loss));
        CHECK(conf_calls(FSDP_LANE_GATHER, FSDP_ALL_GATHER) == many * c->gathers);
        CHECK(conf_calls(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER) == many * (BLOCKS + 1));
        CHECK(conf_calls(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE) == 0);
        CHECK_OK(fsdp_zero_grad(&m->base));
        fsdp_scope_end(scope);
    }
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* Forward gathers each unit once; backward reduces each once and gathers those that were freed, in
 * the first step and in those that gather ahead. */
static void test_fully_shard_communication_count(void)
{
    static const counts cases[] = {
        {FSDP_RESHARD_ALWAYS, .gathers = BLOCKS + 1},
        {FSDP_RESHARD_NEVER, .gathers = 0},
        {FSDP_RESHARD_AUTO, .gathers = BLOCKS},
        {FSDP_RESHARD_AUTO, .ranks = 2, .gathers = BLOCKS + 1},
    };
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 4; k++)
            for (int prefetch = 0; prefetch < 3; prefetch++) {
                counts c = cases[k];
                c.prefetch = prefetch;
                conf_processes(worlds[i], counts_rank, &c);
            }
}

/* With parameters kept for backward, a reshard by hand costs one gather a unit. */
static void test_manual_reshard_with_reshard_after_forward_false(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int prefetch = 0; prefetch < 2; prefetch++) {
            counts c = {FSDP_RESHARD_NEVER, prefetch, .by_hand = 1, .gathers = BLOCKS + 1};
            conf_ranks(worlds[i], counts_rank, &c);
        }
}

/* The setter, recursive or of the root alone, gives the counts of the option. */
static void test_set_reshard_after_forward(void)
{
    static const counts cases[] = {
        {FSDP_RESHARD_NEVER, .setter = 1, .on = 1, .gathers = BLOCKS + 1},
        {FSDP_RESHARD_ALWAYS, .setter = 1, .on = 0, .gathers = 0},
        {FSDP_RESHARD_NEVER, .setter = 2, .on = 1, .gathers = 1},
        {FSDP_RESHARD_ALWAYS, .setter = 2, .on = 0, .gathers = BLOCKS},
        {FSDP_RESHARD_AUTO, .setter = 2, .on = 1, .gathers = BLOCKS + 1},
    };
    for (int i = 0; i < WORLDS; i++)
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            counts c = cases[k];
            conf_ranks(worlds[i], counts_rank, &c);
        }
}

/* ---- divide factor ------------------------------------------------------------------ */

typedef struct divide {
    int replicas; /* 0: a flat mesh */
    int low;      /* bf16 gradients */
    int recurse;
    double factor;
} divide;

/* The gradients below m, whole. */
static fsdp_status grads_of(const divide *d, double factor, int recurse, conf_numbers *out,
                            fsdp_module **made)
{
    conf_lm *m = conf_lm_create(2, 0);
    CHECK(m);
    conf_parity p = {.options =
                         fsdp_shard_defaults(d->replicas ? conf_hybrid_mesh(d->replicas) : NULL)};
    if (d->low) {
        p.options.mp_policy.param_dtype = FSDP_BF16;
        p.options.mp_policy.reduce_dtype = FSDP_F32;
    }
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    if (factor != 0) CHECK_OK(fsdp_set_gradient_divide_factor(&m->base, factor, recurse));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(&m->base, conf_tokens(2, 0)))));
    CHECK_OK(conf_collect(&m->base, 1, out));
    fsdp_scope_end(scope);
    *made = &m->base;
    return FSDP_OK;
}

typedef struct ratio {
    const conf_numbers *a, *b;
    int64_t at;
    double blocks, rest; /* expected of b / a */
} ratio;

static fsdp_status ratio_one(fsdp_named_param *p, void *arg)
{
    ratio *r = arg;
    double want = strncmp(p->name, "layers.", 7) ? r->rest : r->blocks;
    int64_t n = 1;
    for (int d = 0; d < fsdp_param_ndim(p->param); d++)
        n *= fsdp_param_sizes(p->param)[d];
    for (int64_t i = r->at; i < r->at + n; i++)
        CHECK(fabs(r->b->v[i] - want * r->a->v[i]) <= 1e-6 * fabs(want * r->a->v[i]));
    r->at += n;
    return FSDP_OK;
}

static fsdp_status divide_rank(void *arg)
{
    const divide *d = arg;
    conf_numbers a = {0}, b = {0};
    fsdp_module *m;
    CHECK_OK(grads_of(d, 0, 0, &a, &m));
    fsdp_module_free(m);
    CHECK_OK(grads_of(d, d->factor, d->recurse, &b, &m));
    double by = fsdp_world_size() / d->factor;
    ratio r = {&a, &b, 0, d->recurse ? by : 1, by};
    CHECK_OK(conf_each_param(m, ratio_one, &r));
    CHECK(r.at == a.n && a.n == b.n);
    fsdp_module_free(m);
    free(a.v);
    free(b.v);
    return FSDP_OK;
}

/* Gradients are divided by the factor instead of by all ranks, on flat and hybrid meshes and on one
 * of (ranks, 1). Set on the root it reaches the blocks as well, and stays with the root if so told.
 */
static void test_set_reduce_scatter_divide_factor(void)
{
    static const double factors[] = {1, 3, 4};
    for (int i = 1; i < WORLDS; i++)
        for (int k = 0; k < 3; k++)
            for (int c = 0; c < 12; c++) {
                divide d = {.low = c & 1, .recurse = c >> 1 & 1, .factor = factors[k]};
                d.replicas = c >> 2 == 0 ? 0 : c >> 2 == 1 ? 2 : worlds[i];
                conf_ranks(worlds[i], divide_rank, &d);
            }
}

/* ---- order of events ---------------------------------------------------------------- */

typedef struct order {
    int prefetch, forwards, ahead;
    const char *forward, *backward; /* of the last of 3 steps */
} order;

static fsdp_status order_step(conf_lm *m, conf_events *e, const order *o, int last)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = NULL;
    for (int k = 0; k < o->forwards; k++) {
        fsdp_tensor *l = conf_loss(fsdp_call(&m->base, conf_tokens(2, k)));
        loss = loss ? fsdp_add(loss, l) : l;
    }
    if (last)
        CHECK_OK(conf_events_are(e, o->forward));
    else
        e->text[0] = 0;
    CHECK_OK(fsdp_backward(loss));
    if (last)
        CHECK_OK(conf_events_are(e, o->backward));
    else
        e->text[0] = 0;
    fsdp_scope_end(scope);
    return fsdp_zero_grad(&m->base);
}

static fsdp_status order_rank(void *arg)
{
    const order *o = arg;
    conf_events log = {.ahead = o->ahead}, *e = &log;
    conf_lm *m = conf_lm_create(o->forwards > 1 ? 3 : 4, 0);
    CHECK(m);
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    p.options.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    p.options.prefetch_limit = o->prefetch;
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    CHECK_OK(fsdp_set_event_hook(&m->base, conf_note, e));
    for (int step = 0; step < 3; step++)
        CHECK_OK(order_step(m, e, o, step == 2));
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

typedef struct fork {
    fsdp_module base;
    fsdp_module *lin[3];
    conf_events *events;
} fork_net;

/* lin0 -> (lin1, lin2): two outputs. */
static fsdp_status fork_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    fork_net *m = (fork_net *)self;
    fsdp_tensor *h = fsdp_relu(fsdp_call(m->lin[0], in->t[0]));
    out->n = 2;
    out->t[0] = fsdp_call(m->lin[1], h);
    out->t[1] = fsdp_call(m->lin[2], h);
    return fsdp_error();
}

static fork_net *fork_create(void)
{
    fork_net *m = (fork_net *)fsdp_module_create(sizeof *m, "Fork");
    if (!m) return NULL;
    m->base.forward = fork_forward;
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "lin%d", i);
        m->lin[i] = fsdp_module_add(&m->base, name, fsdp_linear_create(5, 5, 1));
    }
    return m;
}

static int how_often(const char *text, const char *word)
{
    int n = 0;
    while ((text = strstr(text, word))) {
        n++;
        text += strlen(word);
    }
    return n;
}

/* Steps whose backward uses lin2 alone and then lin1 alone, over one forward. */
static fsdp_status fork_rank(void *arg)
{
    int prefetch = *(int *)arg;
    conf_events e = {.ahead = 1};
    fork_net *m = fork_create();
    CHECK(m);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    o.prefetch_limit = prefetch;
    for (int i = 0; i < 3; i++)
        CHECK_OK(fsdp_fully_shard(m->lin[i], &o));
    CHECK_OK(fsdp_fully_shard(&m->base, &o));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    CHECK_OK(fsdp_set_event_hook(&m->base, conf_note, &e));
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_values in = {1, {conf_input(3, 5, step)}}, out;
        CHECK_OK(fsdp_module_call(&m->base, &in, &out));
        e.text[0] = 0;
        CHECK_OK(fsdp_set_is_last_backward(&m->base, 0));
        CHECK_OK(fsdp_backward_from(conf_loss(out.t[1]), fsdp_scalar(FSDP_F32, 1), 1));
        /* Upstream's order with its default prefetch, whose first target is wrong. */
        if (prefetch == 0)
            CHECK_OK(conf_events_are(&e, "Ulin2 Ulin1 Rlin2 Plin2 Ulin0 Rlin0 Plin0 Plin1"));
        if (prefetch < 0)
            CHECK_OK(conf_events_are(&e, "Ulin2 Rlin2 Plin2 Ulin0 Rlin0 Plin0 Plin1"));
        CHECK_OK(fsdp_set_is_last_backward(&m->base, 1));
        CHECK_OK(fsdp_backward(conf_loss(out.t[0])));
        if (prefetch == 0) CHECK_OK(conf_events_are(&e, "Ulin0 Rlin1 Plin1 Rlin0 Plin0 Plin2"));
        if (prefetch < 0)
            CHECK_OK(conf_events_are(&e, "Ulin1 Rlin1 Plin1 Ulin0 Rlin0 Plin0 Plin2"));
        if (prefetch > 0) CHECK(how_often(e.text, "Ulin2") == 1 && how_often(e.text, "Ulin1") == 1);
        if (prefetch > 0) CHECK(how_often(e.text, "Ulin0") == 2);
        fsdp_scope_end(scope);
        CHECK_OK(fsdp_zero_grad(&m->base));
    }
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* Upstream's order of gathers, frees and reductions with prefetch limit 0; what is not gathered
 * ahead with -1; with limit 1, from the second step on, one unit ahead in forward too. Of a module
 * that backward does not use nothing is gathered once a step has been seen. */
static void test_fully_shard_backward_prefetch(void)
{
    static const char *const once = "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot";
    static const char *const twice = "Uroot U0 R0 U1 R1 U2 R2 Rroot Uroot U0 R0 U1 R1 U2 R2 Rroot";
    static const char *const back = "Uroot U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot";
    const order cases[] = {
        {0, 1, 1, once, back},
        {-1, 1, 1, once, "Uroot U3 R3 P3 U2 R2 P2 U1 R1 P1 U0 R0 P0 Rroot Proot"},
        {1, 1, 1, "Uroot U0 U1 R0 U2 R1 U3 R2 R3 Rroot", back},
        {0, 2, 1, twice, "Uroot U2 U1 R2 P2 U0 R1 P1 R0 P0 U2 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot"},
    };
    for (int i = 0; i < WORLDS; i++)
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            order o = cases[k];
            conf_processes(worlds[i], order_rank, &o);
        }
    for (int i = 0; i < WORLDS; i++)
        for (int prefetch = -1; prefetch < 2; prefetch++)
            conf_ranks(worlds[i], fork_rank, &prefetch);
}

/* ---- Unshard ------------------------------------------------------------------------ */

/* Before any forward unshard gives the original values; reshard the shards. */
static void test_unshard_without_lazy_init(void)
{
    for (int i = 0; i < WORLDS; i++) {
        way w = {0};
        conf_ranks(worlds[i], gather_rank, &w);
    }
}

/* ---- ReduceOpWorldSize1 ------------------------------------------------------------- */

typedef struct alone {
    double factor;
    int low;
} alone;

static fsdp_status alone_rank(void *arg)
{
    const alone *a = arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *plain = conf_mlp_create(6, 2), *m = conf_mlp_create(6, 2);
    CHECK(plain && m);
    CHECK_OK(fsdp_reset_parameters(plain, 1));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    if (a->low) o.mp_policy.reduce_dtype = FSDP_F16;
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    if (a->factor != 0) CHECK_OK(fsdp_set_gradient_divide_factor(m, a->factor, 1));
    fsdp_comm_count_reset();
    fsdp_tensor *x = conf_input(4, 6, 0);
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(plain, x))));
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, x))));
    conf_numbers p = {0}, q = {0};
    CHECK_OK(conf_collect(plain, 1, &p));
    CHECK_OK(conf_collect(m, 1, &q));
    for (int64_t i = 0; i < p.n; i++) {
        double want = p.v[i] / (a->factor != 0 ? a->factor : 1);
        CHECK(fabs(q.v[i] - want) <= (a->low ? 2e-3 : 0) * fabs(want) + (a->low ? 1e-6 : 0));
    }
    for (int l = 0; l < FSDP_LANE_COUNT; l++)
        CHECK(conf_calls((fsdp_lane)l, FSDP_REDUCE_SCATTER) == 0 &&
              conf_calls((fsdp_lane)l, FSDP_ALL_REDUCE) == 0);
    free(p.v);
    free(q.v);
    fsdp_scope_end(scope);
    fsdp_module_free(plain);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* One rank: a factor of 2 or 4 divides once, whatever the reduce dtype; 1 and none not at all. */
static void test_singleton_copy_division(void)
{
    static const double factors[] = {0, 1, 2, 4};
    for (int k = 0; k < 8; k++) {
        alone a = {factors[k & 3], k >> 2};
        conf_ranks(1, alone_rank, &a);
    }
}

/* One rank: nothing is reduced, and gradients are the plain module's. */
static void test_size1_reduceop(void)
{
    alone a = {0, 0};
    conf_processes(1, alone_rank, &a);
}

/* ---- ForceSumReduction -------------------------------------------------------------- */

typedef struct force {
    int on, replicas;
    fsdp_dtype reduce;
} force;

static fsdp_status force_rank(void *arg)
{
    const force *f = arg;
    conf_numbers g[2] = {{0}, {0}};
    for (int k = 0; k < 2; k++) { /* without, with */
        conf_lm *m = conf_lm_create(2, 0);
        CHECK(m);
        conf_parity p = {
            .options = fsdp_shard_defaults(f->replicas ? conf_hybrid_mesh(f->replicas) : NULL)};
        if (f->reduce) p.options.mp_policy.reduce_dtype = f->reduce;
        CHECK_OK(conf_shard_blocks(&p, &m->base));
        CHECK_OK(fsdp_reset_parameters(&m->base, 1));
        for (int i = 0; i < 2; i++)
            CHECK_OK(fsdp_set_force_sum_reduction_for_comms(m->block[i], k));
        CHECK_OK(fsdp_set_force_sum_reduction_for_comms(&m->base, k));
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_comm_count_reset();
        CHECK_OK(fsdp_backward(conf_loss(fsdp_call(&m->base, conf_tokens(2, 0)))));
        fsdp_comm_count s = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER);
        fsdp_comm_count a = fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE);
        int shards = fsdp_world_size() / (f->replicas ? f->replicas : 1);
        CHECK(s.calls == (shards > 1 ? 3 : 0) && a.calls == (f->replicas > 1 ? 3 : 0));
        CHECK(k ? s.scaled == 0 && a.scaled == 0 : s.scaled + a.scaled >= 3);
        CHECK_OK(conf_collect(&m->base, 1, &g[k]));
        fsdp_scope_end(scope);
        fsdp_module_free(&m->base);
    }
    CHECK(conf_distance(&g[1], &g[0]) <= (f->reduce ? 2e-3 : 1e-6));
    free(g[0].v);
    free(g[1].v);
    return FSDP_OK;
}

/* With the flag the group is asked for sums only, and the gradients are the same. */
static void test_fully_shard_force_sum_reduce_scatter(void)
{
    static const fsdp_dtype dtypes[] = {0, FSDP_BF16, FSDP_F16};
    for (int i = 1; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            force f = {.reduce = dtypes[k]};
            conf_processes(worlds[i], force_rank, &f);
        }
}

/* The same for the two reductions of a hybrid. */
static void test_fully_shard_force_sum_both_reductions(void)
{
    for (int k = 0; k < 3; k++) {
        force f = {.replicas = k == 2 ? 4 : 2};
        conf_processes(k == 0 ? 2 : 4, force_rank, &f);
    }
}

/* ---- how many reductions may be unfinished ------------------------------------------ */

static fsdp_status shard_buffers(const conf_parity *p, fsdp_module *m)
{
    const int *n = p->arg;
    CHECK_OK(conf_shard_blocks(p, m));
    if (n[0]) CHECK_OK(fsdp_set_reduce_scatter_max_input_buffers(m, n[0], 1));
    /* One block asks for more than the others. */
    if (n[1])
        CHECK_OK(fsdp_set_reduce_scatter_max_input_buffers(((conf_lm *)m)->block[1], n[1], 0));
    return FSDP_OK;
}

static fsdp_module *lm_create(const conf_parity *p)
{
    (void)p;
    conf_lm *m = conf_lm_create(BLOCKS, 0);
    return m ? &m->base : NULL;
}

/* Two, three or more unfinished reductions change no bit of what is trained. */
static void test_set_reduce_scatter_max_input_buffers(void)
{
    static const int n[][2] = {{1, 0}, {2, 0}, {3, 0}, {100, 0}, {1, 2}};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 5; k++) {
            conf_parity p = {.make = lm_create,
                             .shard = shard_buffers,
                             .arg = n[k],
                             .options = fsdp_shard_defaults(NULL)};
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* Peak bytes of gradients of a backward: more unfinished reductions hold more whole gradients. */
static fsdp_status peak_of(const int *n, int64_t *peak)
{
    conf_parity p = {.arg = n, .options = fsdp_shard_defaults(NULL)};
    fsdp_module *m = lm_create(&p);
    CHECK(m);
    CHECK_OK(shard_buffers(&p, m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = conf_loss(fsdp_call(m, conf_tokens(2, 0)));
    fsdp_memory_reset_peak();
    CHECK_OK(fsdp_backward(loss));
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    *peak = s.peak[FSDP_GRADIENTS];
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status max_rank(void *arg)
{
    (void)arg;
    static const int one[] = {1, 0}, mixed[] = {1, 3}, all[] = {3, 0};
    int64_t a, b, c;
    CHECK_OK(peak_of(one, &a));
    CHECK_OK(peak_of(mixed, &b));
    CHECK_OK(peak_of(all, &c));
    CHECK(a < b && b == c);
    return FSDP_OK;
}

/* The largest bound of a tree is the tree's: it shows in the bytes of gradients. */
static void test_reduce_scatter_max_input_buffers_resolves_to_max(void)
{
    for (int i = 1; i < WORLDS; i++)
        conf_ranks(worlds[i], max_rank, NULL);
}

static fsdp_status bound_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 2);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    for (int n = -1; n < 1; n++) {
        CHECK(fsdp_set_reduce_scatter_max_input_buffers(m, n, 1) != FSDP_OK);
        CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, n ? "-1" : "0"));
    }
    CHECK_OK(fsdp_set_reduce_scatter_max_input_buffers(m, 1, 1));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Fewer than one is refused, with the number; what is no int does not compile. */
static void test_set_reduce_scatter_max_input_buffers_validation(void)
{
    conf_ranks(1, bound_rank, NULL);
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_all_gather_fp32),
        CONF_TEST(test_reduce_scatter_fp32),
        CONF_TEST(test_reduce_scatter_fp16),
        CONF_TEST(test_numerics),
        CONF_TEST(test_fully_shard_communication_count),
        CONF_TEST(test_manual_reshard_with_reshard_after_forward_false),
        CONF_TEST(test_set_reshard_after_forward),
        CONF_TEST(test_set_reduce_scatter_divide_factor),
        CONF_TEST(test_fully_shard_backward_prefetch),
        CONF_TEST(test_unshard_without_lazy_init),
        CONF_TEST(test_fully_shard_force_sum_reduce_scatter),
        CONF_TEST(test_fully_shard_force_sum_both_reductions),
        CONF_TEST(test_set_reduce_scatter_max_input_buffers),
        CONF_TEST(test_reduce_scatter_max_input_buffers_resolves_to_max),
        CONF_TEST(test_set_reduce_scatter_max_input_buffers_validation),
        CONF_TEST(test_singleton_copy_division),
        CONF_TEST(test_size1_reduceop),
    };
    return conf_main("comm", tests, sizeof tests / sizeof *tests, argc, argv);
}
