/*
 * test_conf_mixed_precision.c - upstream's test_fully_shard_mixed_precision.py: in which dtype
 * parameters are gathered, modules compute, and gradients accumulate and travel.
 */
#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- a reference in low precision, with a step in fp32 ------------------------------ */

typedef struct low {
    fsdp_dtype param, reduce; /* NONE: as fsdp_mixed_precision_policy has it */
    int micro;                /* microbatches of a step; the last one reduces */
    int policy;               /* fsdp_reshard_policy */
} low;

enum { DIM = 6, STEPS = 6 };

static fsdp_dtype compute_dtype(const low *w)
{
    return w->param ? w->param : FSDP_F32;
}

static fsdp_dtype grad_dtype(const low *w)
{
    return w->reduce ? w->reduce : compute_dtype(w);
}

typedef struct pair {
    fsdp_module *low, *master;
    const low *how;
} pair;

static fsdp_param *by_name(fsdp_module *m, const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "%s", name);
    char *dot = strrchr(path, '.');
    *dot = 0;
    return fsdp_module_param(fsdp_module_find(m, path), dot + 1);
}

/* The low copy of a master weight, with an empty gradient in the dtype that gradients accumulate
 * in. */
static fsdp_status refresh_one(fsdp_named_param *p, void *arg)
{
    const pair *q = arg;
    fsdp_tensor *t = fsdp_param_tensor(by_name(q->low, p->name));
    CHECK_OK(fsdp_copy_(t, fsdp_param_tensor(p->param)));
    fsdp_dtype g = grad_dtype(q->how);
    if (fsdp_dtype_size(g) <= fsdp_dtype_size(fsdp_tensor_dtype(t))) g = fsdp_tensor_dtype(t);
    return fsdp_set_grad(t, fsdp_zeros(g, fsdp_ndim(t), fsdp_sizes(t)));
}

/* Gradients as they travel, averaged in fp32, to the master. */
static fsdp_status hand_over_one(fsdp_named_param *p, void *arg)
{
    const pair *q = arg;
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(by_name(q->low, p->name)));
    g = fsdp_clone(fsdp_cast(fsdp_cast(g, grad_dtype(q->how)), FSDP_F32));
    CHECK(g);
    CHECK_OK(fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, fsdp_data(g), fsdp_numel(g),
                             FSDP_F32, FSDP_SUM, NULL));
    g = fsdp_scale(g, (double)(float)(1.0 / fsdp_world_size()));
    return fsdp_set_grad(fsdp_param_tensor(p->param), g);
}

static fsdp_tensor *micro_loss(fsdp_module *m, const low *w, int step, int k)
{
    fsdp_tensor *x = fsdp_cast(conf_input(4, DIM, step * 16 + k), compute_dtype(w));
    return fsdp_scale(conf_loss(fsdp_call(m, x)), 1.0 / w->micro);
}

static fsdp_status low_reference(const low *w, double *loss, conf_numbers *weights)
{
    pair q = {conf_mlps_create(2, DIM), conf_mlps_create(2, DIM), w};
    CHECK(q.low && q.master);
    CHECK_OK(fsdp_module_to_dtype(q.low, compute_dtype(w)));
    CHECK_OK(fsdp_reset_parameters(q.master, 42));
    CHECK_OK(fsdp_reset_parameters(q.low, 42));
    fsdp_adamw_options a = {1e-2, 0.9, 0.999, 1e-8, 0};
    fsdp_optimizer *o = fsdp_adamw(q.master, &a);
    for (int step = 0; step < STEPS; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        CHECK_OK(conf_each_param(q.master, refresh_one, &q));
        loss[step] = 0;
        for (int k = 0; k < w->micro; k++) {
            fsdp_tensor *l = micro_loss(q.low, w, step, k);
            CHECK_OK(fsdp_backward(l));
            loss[step] += fsdp_item(l);
        }
        CHECK_OK(conf_each_param(q.master, hand_over_one, &q));
        CHECK_OK(fsdp_optimizer_step(o));
        fsdp_scope_end(scope);
    }
    CHECK_OK(conf_collect(q.master, 0, weights));
    fsdp_optimizer_free(o);
    fsdp_module_free(q.low);
    fsdp_module_free(q.master);
    return FSDP_OK;
}

static fsdp_status dtypes_are(fsdp_module *m, const low *w)
{
    for (int i = 0; i < fsdp_module_child_count(m); i++) {
        const fsdp__unit *u = fsdp__unit_of(fsdp_module_child(m, i));
        for (int k = 0; k < u->n_params; k++) {
            const fsdp__fparam *p = &u->params[k];
            CHECK(p->sharded->dtype == FSDP_F32);
            CHECK(p->whole->dtype == compute_dtype(w) && p->grad->dtype == grad_dtype(w));
            fsdp_tensor *g = fsdp_grad(p->sharded);
            CHECK(g && fsdp_tensor_dtype(g) == FSDP_F32);
        }
    }
    return FSDP_OK;
}

static fsdp_status low_sharded(const low *w, double *loss, conf_numbers *weights)
{
    fsdp_module *m = conf_mlps_create(2, DIM);
    CHECK(m);
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    p.options.mp_policy.param_dtype = w->param ? w->param : FSDP_DTYPE_NONE;
    p.options.mp_policy.reduce_dtype = w->reduce ? w->reduce : FSDP_DTYPE_NONE;
    p.options.reshard_after_forward = (fsdp_reshard_policy)w->policy;
    CHECK_OK(conf_shard_children(&p, m));
    CHECK_OK(fsdp_reset_parameters(m, 42));
    fsdp_adamw_options a = {1e-2, 0.9, 0.999, 1e-8, 0};
    fsdp_optimizer *o = fsdp_adamw(m, &a);
    for (int step = 0; step < STEPS; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        loss[step] = 0;
        for (int k = 0; k < w->micro; k++) {
            CHECK_OK(fsdp_set_requires_gradient_sync(m, k == w->micro - 1, 1));
            fsdp_tensor *l = micro_loss(m, w, step, k);
            CHECK_OK(fsdp_backward(l));
            loss[step] += fsdp_item(l);
        }
        CHECK_OK(dtypes_are(m, w));
        CHECK_OK(fsdp_optimizer_step(o));
        CHECK_OK(fsdp_zero_grad(m));
        fsdp_scope_end(scope);
    }
    CHECK_OK(conf_collect(m, 0, weights));
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status low_rank(void *arg)
{
    const low *w = arg;
    double a[STEPS], b[STEPS];
    conf_numbers v = {0}, x = {0};
    CHECK_OK(low_reference(w, a, &v));
    CHECK_OK(low_sharded(w, b, &x));
    for (int k = 0; k < STEPS; k++) {
        conf_checks++;
        if (a[k] != b[k])
            return fsdp__fail(FSDP_INTERNAL, "step %d: loss %.9g, reference %.9g", k, b[k], a[k]);
    }
    CHECK(conf_distance(&x, &v) == 0);
    free(v.v);
    free(x.v);
    return FSDP_OK;
}

static void low_all(const low *w, int n, int processes)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < n; k++)
            for (int policy = 0; policy < 3; policy++) {
                low one = w[k];
                one.policy = policy;
                if (processes && policy == 0)
                    conf_processes(worlds[i], low_rank, &one);
                else
                    conf_ranks(worlds[i], low_rank, &one);
            }
}

/* param_dtype alone: gathers, compute and gradients are in it; losses and weights are, to the bit,
 * those of a low-precision module whose gradients are averaged and stepped in fp32. */
static void test_compute_dtype(void)
{
    static const low cases[] = {{FSDP_BF16, 0, 1, 0}, {FSDP_F16, 0, 1, 0}};
    low_all(cases, 2, 1);
}

/* bf16 compute whose gradients are born and travel in fp32, and fp32 compute with bf16 and fp16
 * gradients. */
static void test_reduce_dtype(void)
{
    static const low cases[] = {{FSDP_BF16, FSDP_F32, 1, 0},
                                {0, FSDP_BF16, 1, 0},
                                {0, FSDP_F16, 1, 0},
                                {FSDP_F16, FSDP_F32, 1, 0}};
    low_all(cases, 4, 0);
}

/* Microbatches that are not reduced accumulate whole gradients in the reduce dtype. */
static void test_grad_acc_with_reduce_dtype(void)
{
    static const low cases[] = {{FSDP_BF16, FSDP_F32, 4, 0}, {FSDP_BF16, 0, 2, 0}};
    low_all(cases, 1, 1);
}

/* ---- frozen at first ---------------------------------------------------------------- */

static fsdp_status train_one(fsdp_named_param *p, void *arg)
{
    if (!fsdp_dtype_is_floating(fsdp_tensor_dtype(fsdp_param_tensor(p->param)))) return FSDP_OK;
    return fsdp_param_requires_grad_(p->param, *(int *)arg);
}

static fsdp_status frozen_first_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(DIM, 2);
    CHECK(m);
    int off = 0, on = 1;
    fsdp_init_rule zeros = {FSDP_INIT_ZEROS, 0, 0};
    fsdp_module_add_param(m, "table", fsdp_param_create(FSDP_I64, 1, SIZES(5), zeros));
    CHECK_OK(conf_each_param(m, train_one, &off));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = FSDP_BF16;
    o.mp_policy.reduce_dtype = FSDP_F32;
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, conf_input(3, DIM, 0));
    CHECK(y && !fsdp_requires_grad(y) && fsdp_tensor_dtype(y) == FSDP_BF16);
    CHECK_OK(conf_each_param(m, train_one, &on));
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(3, DIM, 1)))));
    const fsdp__unit *u = fsdp__unit_of(m);
    for (int k = 0; k < u->n_params; k++) {
        int table = u->params[k].sharded->dtype == FSDP_I64; /* gathered, and no more */
        CHECK(table || u->params[k].grad->dtype == FSDP_F32);
        CHECK((fsdp_grad(u->params[k].sharded) != NULL) == !table);
    }
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A first forward with everything frozen, then all trainable: gradients travel in the reduce dtype.
 */
static void test_reduce_dtype_after_frozen_first_forward(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], frozen_first_rank, NULL);
}

/* ---- which dtypes modules see ------------------------------------------------------- */

enum { SEEN = 16 };

/* A linear layer that notes the dtypes of its inputs and casts what it is not given in its
 * weight's. */
typedef struct noting {
    fsdp_module base;
    fsdp_dtype in[SEEN][2], out[SEEN];
    int calls;
} noting;

static fsdp_status noting_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    noting *n = (noting *)self;
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(self, "weight"));
    fsdp_tensor *x = fsdp_linear(fsdp_cast(in->t[0], fsdp_tensor_dtype(w)), w);
    int at = n->calls < SEEN ? n->calls++ : SEEN - 1;
    n->in[at][0] = fsdp_tensor_dtype(in->t[0]);
    n->in[at][1] = in->n > 1 && in->t[1] ? fsdp_tensor_dtype(in->t[1]) : FSDP_DTYPE_NONE;
    for (int k = 1; k < in->n; k++)
        if (in->t[k] && fsdp_dtype_is_floating(fsdp_tensor_dtype(in->t[k])))
            x = fsdp_add(x, fsdp_cast(in->t[k], fsdp_tensor_dtype(x)));
    out->n = 1;
    out->t[0] = x;
    return fsdp_error();
}

static noting *noting_create(void)
{
    noting *n = (noting *)fsdp_module_create(sizeof *n, "Noting");
    if (!n) return NULL;
    n->base.forward = noting_forward;
    fsdp_init_rule rule = {FSDP_INIT_NORMAL, 0, 0.3};
    fsdp_module_add_param(&n->base, "weight",
                          fsdp_param_create(FSDP_F32, 2, SIZES(DIM, DIM), rule));
    return n;
}

typedef struct two {
    fsdp_module base;
    noting *c1, *c2;
    int external; /* c2 is also given a tensor that the root makes */
    fsdp_dtype between, last;
} two;

static fsdp_tensor *two_forward(fsdp_module *self, fsdp_tensor *x)
{
    two *m = (two *)self;
    fsdp_tensor *h = fsdp_call(&m->c1->base, x);
    m->between = fsdp_tensor_dtype(h);
    fsdp_values in = {1, {h}}, out;
    if (m->external) {
        in.n = 2;
        in.t[1] = fsdp_full(FSDP_F32, 2, SIZES(fsdp_size(x, 0), DIM), 0.5);
    }
    if (fsdp_module_call(&m->c2->base, &in, &out) != FSDP_OK) return NULL;
    m->last = fsdp_tensor_dtype(out.t[0]);
    return out.t[0];
}

static two *two_create(void)
{
    two *m = (two *)fsdp_module_create(sizeof *m, "Two");
    if (!m) return NULL;
    m->base.forward1 = two_forward;
    m->c1 = noting_create();
    m->c2 = noting_create();
    if (!m->c1 || !m->c2) return NULL;
    fsdp_module_add(&m->base, "c1", &m->c1->base);
    fsdp_module_add(&m->base, "c2", &m->c2->base);
    return m;
}

typedef struct casts {
    fsdp_mixed_precision_policy c2, root;
    int shard_c2, external;
    fsdp_dtype x1, x2, y2; /* inputs of c1 and c2, output of c2 */
    fsdp_dtype other;      /* c2's external input */
    fsdp_dtype out;        /* what the root returns */
} casts;

static fsdp_status casts_rank(void *arg)
{
    const casts *c = arg;
    two *m = two_create();
    CHECK(m);
    m->external = c->external;
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy = c->c2;
    if (c->shard_c2) CHECK_OK(fsdp_fully_shard(&m->c2->base, &o));
    o.mp_policy = c->root;
    CHECK_OK(fsdp_fully_shard(&m->base, &o));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(&m->base, conf_input(3, DIM, 0));
    CHECK(y);
    CHECK_OK(fsdp_backward(conf_loss(y)));
    CHECK(m->c1->in[0][0] == c->x1);
    CHECK(m->c2->in[0][0] == c->x2);
    CHECK(m->last == c->y2);
    CHECK(fsdp_tensor_dtype(y) == c->out);
    if (c->external) CHECK(m->c2->in[0][1] == c->other);
    fsdp_scope_end(scope);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

#define NONE FSDP_DTYPE_NONE
#define F32 FSDP_F32
#define F16 FSDP_F16

/* fp16 for one submodule: its inputs are cast unless told not to, its output is fp16 unless told
 * otherwise, and nothing else changes. */
static void test_float16_on_one_submodule(void)
{
    static const casts cases[] = {
        {{F16, NONE, NONE, 1}, {NONE, NONE, NONE, 1}, 1, 0, F32, F16, F16, NONE, F16},
        {{F16, NONE, NONE, 0}, {NONE, NONE, NONE, 1}, 1, 0, F32, F32, F16, NONE, F16},
        {{F16, NONE, F32, 1}, {NONE, NONE, NONE, 1}, 1, 0, F32, F16, F32, NONE, F32},
        {{NONE, NONE, NONE, 1}, {F16, NONE, F32, 1}, 0, 0, F16, F16, F16, NONE, F32},
        {{F32, NONE, NONE, 1}, {F16, NONE, NONE, 1}, 1, 0, F16, F32, F32, NONE, F32},
        {{F32, NONE, F16, 1}, {F16, NONE, F32, 1}, 1, 0, F16, F32, F16, NONE, F32},
    };
    for (int i = 0; i < WORLDS; i++)
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            casts c = cases[k];
            conf_ranks(worlds[i], casts_rank, &c);
        }
}

/* A tensor that comes from elsewhere is cast as the others, if inputs are cast. */
static void test_submodules_with_external_inputs(void)
{
    static const casts cases[] = {
        {{F16, NONE, NONE, 1}, {F16, NONE, NONE, 1}, 1, 1, F16, F16, F16, F16, F16},
        {{F16, NONE, NONE, 0}, {F16, NONE, NONE, 1}, 1, 1, F16, F16, F16, F32, F16},
    };
    for (int i = 0; i < WORLDS; i++)
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            casts c = cases[k];
            conf_ranks(worlds[i], casts_rank, &c);
        }
}

/* ---- several values ----------------------------------------------------------------- */

typedef struct many {
    fsdp_module base;
    fsdp_module *lin;
    fsdp_dtype seen[4];
} many;

/* (x, ids, nothing, y) -> (ids, lin(x), lin(y)) */
static fsdp_status many_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    many *m = (many *)self;
    for (int k = 0; k < 4; k++)
        m->seen[k] = in->t[k] ? fsdp_tensor_dtype(in->t[k]) : FSDP_DTYPE_NONE;
    out->n = 3;
    out->t[0] = in->t[1];
    out->t[1] = fsdp_call(m->lin, in->t[0]);
    out->t[2] = fsdp_call(m->lin, in->t[3]);
    return fsdp_error();
}

static fsdp_status many_rank(void *arg)
{
    int which = *(const int *)arg; /* the output that is used, or both */
    many *m = (many *)fsdp_module_create(sizeof *m, "Many");
    CHECK(m);
    m->base.forward = many_forward;
    m->lin = fsdp_module_add(&m->base, "lin", fsdp_linear_create(DIM, DIM, 1));
    conf_events e = {.ahead = 1};
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = FSDP_BF16;
    o.mp_policy.output_dtype = FSDP_F32;
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    CHECK_OK(fsdp_fully_shard(&m->base, &o));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    CHECK_OK(fsdp_set_event_hook(&m->base, conf_note, &e));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = conf_input(3, DIM, 0), *y = conf_input(3, DIM, 1), *ids = conf_tokens(1, 0);
    CHECK_OK(fsdp_requires_grad_(x, 1));
    CHECK_OK(fsdp_requires_grad_(y, 1));
    fsdp_values in = {4, {x, ids, NULL, y}}, out;
    CHECK_OK(fsdp_module_call(&m->base, &in, &out));
    CHECK(m->seen[0] == FSDP_BF16 && m->seen[1] == FSDP_I64 && m->seen[2] == FSDP_DTYPE_NONE &&
          m->seen[3] == FSDP_BF16);
    CHECK(out.n == 3 && check_same_bits(out.t[0], ids));
    CHECK(fsdp_tensor_dtype(out.t[1]) == FSDP_F32 && fsdp_tensor_dtype(out.t[2]) == FSDP_F32);
    CHECK_OK(conf_events_are(&e, "Uroot Rroot"));
    fsdp_tensor *loss = which == 2 ? fsdp_add(conf_loss(out.t[1]), conf_loss(out.t[2]))
                                   : conf_loss(out.t[1 + which]);
    CHECK_OK(fsdp_backward(loss));
    CHECK_OK(conf_events_are(&e, "Uroot Rroot Proot"));
    CHECK((fsdp_grad(x) != NULL) == (which != 1) && (fsdp_grad(y) != NULL) == (which != 0));
    CHECK(fsdp_grad(fsdp_param_tensor(fsdp_module_param(m->lin, "weight"))));
    fsdp_scope_end(scope);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* Floating values are cast and come with hooks, whichever of several they are; others pass. */
static void test_structured_input_output(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int which = 0; which < 3; which++)
            conf_ranks(worlds[i], many_rank, &which);
}

/* ---- recompute ---------------------------------------------------------------------- */

static fsdp_status recompute_rank(void *arg)
{
    (void)arg;
    two *m = two_create();
    CHECK(m);
    CHECK_OK(fsdp_checkpoint_module(&m->c2->base, NULL));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy = (fsdp_mixed_precision_policy){F16, F32, F32, 1};
    CHECK_OK(fsdp_fully_shard(&m->c2->base, &o));
    o.mp_policy = fsdp_shard_defaults(NULL).mp_policy;
    CHECK_OK(fsdp_fully_shard(&m->base, &o));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(&m->base, conf_input(3, DIM, 0)))));
    CHECK(m->c2->calls == 2); /* forward, and again in backward */
    CHECK(m->c2->in[0][0] == FSDP_F16 && m->c2->in[1][0] == FSDP_F16);
    CHECK(m->last == FSDP_F32);
    fsdp_scope_end(scope);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* A unit inside a checkpoint: its hooks run again in backward, and must cast as they did. */
static fsdp_status recompute_around_rank(void *arg)
{
    (void)arg;
    two *m = two_create();
    CHECK(m);
    m->external = 1;
    fsdp_module *outer = fsdp_sequential_create();
    CHECK(outer);
    fsdp_module_add(outer, "two", &m->base);
    CHECK_OK(fsdp_checkpoint_module(&m->base, NULL));
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy = (fsdp_mixed_precision_policy){F16, F32, F32, 1};
    CHECK_OK(fsdp_fully_shard(&m->c1->base, &o));
    CHECK_OK(fsdp_fully_shard(&m->c2->base, &o));
    o.mp_policy = fsdp_shard_defaults(NULL).mp_policy;
    CHECK_OK(fsdp_fully_shard(outer, &o));
    CHECK_OK(fsdp_reset_parameters(outer, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(outer, conf_input(3, DIM, 0)))));
    CHECK(m->c1->calls == 2 && m->c2->calls == 2);
    for (int k = 0; k < 2; k++)
        CHECK(m->c1->in[k][0] == F16 && m->c2->in[k][0] == F16 && m->c2->in[k][1] == F16);
    CHECK(m->between == F32);
    CHECK(fsdp_grad(fsdp_param_tensor(fsdp_module_param(&m->c1->base, "weight"))));
    fsdp_scope_end(scope);
    fsdp_module_free(outer);
    return FSDP_OK;
}

/* Recompute casts inputs as the first forward did: inside a unit, and of units inside. */
static void test_checkpoint_recompute_casts_forward_inputs(void)
{
    for (int i = 0; i < WORLDS; i++) {
        conf_ranks(worlds[i], recompute_rank, NULL);
        conf_ranks(worlds[i], recompute_around_rank, NULL);
    }
}

/* And outputs: what c1 gives is fp32 both times. */
static void test_checkpoint_recompute_casts_outputs(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], recompute_around_rank, NULL);
}

/* ---- norms -------------------------------------------------------------------------- */

static fsdp_status norms_rank(void *arg)
{
    const fsdp_dtype t = *(const fsdp_dtype *)arg;
    fsdp_module *m = fsdp_sequential_create();
    CHECK(m);
    fsdp_module_add(m, "a", fsdp_linear_create(DIM, DIM, 1));
    fsdp_module_add(m, "layer", fsdp_layer_norm_create(DIM, 1e-5));
    fsdp_module_add(m, "b", fsdp_linear_create(DIM, DIM, 1));
    fsdp_module_add(m, "rms", fsdp_rms_norm_create(DIM, 1e-5));
    fsdp_module *bn = fsdp_module_add(m, "batch", fsdp_batch_norm_create(DIM, 1e-5, 0.1));
    CHECK(bn);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.mp_policy.param_dtype = t;
    for (int i = 0; i < fsdp_module_child_count(m); i++)
        CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, i), &o));
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_tensor *mean = fsdp_module_buffer(bn, "running_mean");
    CHECK(mean && fsdp_tensor_dtype(mean) == FSDP_F32);
    double before = fsdp_at(mean, SIZES(0));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, conf_input(8, DIM, 0));
    CHECK(y && fsdp_tensor_dtype(y) == t);
    CHECK_OK(fsdp_backward(conf_loss(y)));
    CHECK(fsdp_module_buffer(bn, "running_mean") == mean && fsdp_tensor_dtype(mean) == FSDP_F32);
    CHECK(fsdp_at(mean, SIZES(0)) != before);
    fsdp_param_list l;
    CHECK_OK(fsdp_module_params(m, &l));
    for (int64_t i = 0; i < l.count; i++)
        CHECK(fsdp_grad(fsdp_param_tensor(l.items[i].param)));
    fsdp_param_list_free(&l);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void norms(fsdp_dtype t)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], norms_rank, &t);
}

/* Layer, root-mean-square and batch norm with bf16 parameters; running statistics stay fp32. */
static void test_norm_modules_bf16(void)
{
    norms(FSDP_BF16);
}

/* The same with fp16. */
static void test_norm_modules_fp16(void)
{
    norms(FSDP_F16);
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_compute_dtype),
        CONF_TEST(test_reduce_dtype),
        CONF_TEST(test_reduce_dtype_after_frozen_first_forward),
        CONF_TEST(test_grad_acc_with_reduce_dtype),
        CONF_TEST(test_structured_input_output),
        CONF_TEST(test_float16_on_one_submodule),
        CONF_TEST(test_submodules_with_external_inputs),
        CONF_TEST(test_checkpoint_recompute_casts_forward_inputs),
        CONF_TEST(test_checkpoint_recompute_casts_outputs),
        CONF_TEST(test_norm_modules_bf16),
        CONF_TEST(test_norm_modules_fp16),
    };
    return conf_main("mixed_precision", tests, sizeof tests / sizeof *tests, argc, argv);
}
