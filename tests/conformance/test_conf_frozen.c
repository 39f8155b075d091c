/*
 * test_conf_frozen.c - upstream's test_fully_shard_frozen.py: parameters that need no gradient.
 */
#include "nets.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

static const fsdp_reshard_policy policies[] = {FSDP_RESHARD_AUTO, FSDP_RESHARD_ALWAYS,
                                               FSDP_RESHARD_NEVER};

static fsdp_status freeze_all(fsdp_named_param *p, void *arg)
{
    return fsdp_param_requires_grad_(p->param, !*(int *)arg);
}

static fsdp_status freeze_biases(fsdp_named_param *p, void *arg)
{
    return strstr(p->name, "bias") ? freeze_all(p, arg) : FSDP_OK;
}

static fsdp_status freeze(fsdp_module *m, int on)
{
    return conf_each_param(m, freeze_all, &on);
}

/* ---- per unit ----------------------------------------------------------------------- */

enum { LAYERS = 4, WIDTH = 5 };

typedef struct per_unit {
    int after;  /* frozen after fully_shard */
    int policy; /* fsdp_reshard_policy */
} per_unit;

static fsdp_module *mlps_create(const conf_parity *p)
{
    const per_unit *w = p->arg;
    fsdp_module *m = conf_mlps_create(LAYERS, p->dim);
    int on = 1;
    if (m && !w->after && conf_each_param(m, freeze_biases, &on) != FSDP_OK) return NULL;
    return m;
}

static fsdp_status count_one(fsdp_named_param *p, void *arg)
{
    /* What a rank receives from others: its own rows, from each of the others. */
    fsdp_tensor *t = fsdp_param_tensor(p->param);
    if (fsdp_param_requires_grad(p->param))
        *(int64_t *)arg += fsdp_numel(t) * (fsdp_world_size() - 1);
    return FSDP_OK;
}

static fsdp_status shard_and_freeze(const conf_parity *p, fsdp_module *m)
{
    const per_unit *w = p->arg;
    int on = 1;
    CHECK_OK(conf_shard_children(p, m));
    return w->after ? conf_each_param(m, freeze_biases, &on) : FSDP_OK;
}

static fsdp_tensor *freezing_loss(const conf_parity *p, fsdp_module *m, int step)
{
    const per_unit *w = p->arg;
    int on = 1;
    if (w->after && step == 0 && !fsdp_is_sharded_module(m))
        if (conf_each_param(m, freeze_biases, &on) != FSDP_OK) return NULL;
    fsdp_tensor *l = conf_default_loss(p, m, step);
    fsdp_comm_count_reset();
    return l;
}

static fsdp_status only_trainable(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    (void)step;
    if (!fsdp_is_sharded_module(m) || fsdp_world_size() == 1) return FSDP_OK;
    int64_t expected = 0;
    CHECK_OK(conf_each_param(m, count_one, &expected));
    fsdp_comm_count c = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER);
    CHECK(c.calls == LAYERS && c.elements == expected);
    return FSDP_OK;
}

typedef struct trace {
    char text[CONF_LOG];
} trace;

/* P of a unit, E at the end of backward. */
static void note_posts(void *arg, fsdp_event_kind k, const char *unit)
{
    trace *t = arg;
    size_t n = strlen(t->text);
    if (k == FSDP_EVENT_POST_BACKWARD) snprintf(t->text + n, CONF_LOG - n, "P%s ", unit);
    if (k == FSDP_EVENT_ROOT_POST_BACKWARD) snprintf(t->text + n, CONF_LOG - n, "E ");
}

static fsdp_status posts_rank(void *arg)
{
    const per_unit *w = arg;
    conf_parity p = {.dim = WIDTH, .arg = w, .options = fsdp_shard_defaults(NULL)};
    p.options.reshard_after_forward = (fsdp_reshard_policy)w->policy;
    fsdp_module *m = mlps_create(&p);
    CHECK(m);
    CHECK_OK(shard_and_freeze(&p, m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    trace t = {""};
    CHECK_OK(fsdp_set_event_hook(m, note_posts, &t));
    for (int step = 0; step < 2; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        t.text[0] = 0;
        CHECK_OK(fsdp_backward(conf_default_loss(&p, m, step)));
        /* All but the first layer, whose input needs no gradient, as soon as they are done. */
        CHECK(!strncmp(t.text, "P3 P2 P1 ", 9));
        fsdp_scope_end(scope);
        CHECK_OK(fsdp_zero_grad(m));
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Of a unit with frozen biases only the weights are reduced (by the count of elements), whether
 * they were frozen before fully_shard or after; units are done as backward leaves them, not at its
 * end. */
static void test_train_mixed_requires_grad_per_group(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++)
            for (int after = 0; after < 2; after++) {
                per_unit w = {.after = after, .policy = policies[k]};
                conf_parity p = {.make = mlps_create,
                                 .shard = shard_and_freeze,
                                 .loss = freezing_loss,
                                 .before_step = only_trainable,
                                 .arg = &w,
                                 .dim = WIDTH,
                                 .options = fsdp_shard_defaults(NULL)};
                p.options.reshard_after_forward = policies[k];
                if (k == 0)
                    conf_processes(worlds[i], conf_parity_rank, &p);
                else
                    conf_ranks(worlds[i], conf_parity_rank, &p);
                conf_ranks(worlds[i], posts_rank, &w);
            }
}

/* ---- across units ------------------------------------------------------------------- */

static fsdp_module *many_create(const conf_parity *p)
{
    return conf_mlps_create(6, p->dim);
}

/* Layers 1, 3, 5 are frozen; a forward without gradients before step 2; all train from step 4 on.
 */
static fsdp_tensor *across_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_status s = FSDP_OK;
    for (int i = 1; i < 6 && s == FSDP_OK && (step == 0 || step == 4); i += 2)
        s = freeze(fsdp_module_child(m, i), step == 0);
    if (s != FSDP_OK) return NULL;
    if (step == 2) {
        fsdp_no_grad_begin();
        fsdp_tensor *y = fsdp_call(m, conf_input(4, p->dim, 99));
        fsdp_no_grad_end();
        if (!y || fsdp_requires_grad(y)) return NULL;
    }
    return conf_default_loss(p, m, step);
}

/* Frozen and trainable units in turn, an iteration without gradients, and unfreezing on the way. */
static void test_train_mixed_requires_grad_across_groups(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = many_create,
                             .shard = conf_shard_children,
                             .loss = across_loss,
                             .dim = WIDTH,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- again and again ---------------------------------------------------------------- */

typedef struct again {
    fsdp_module base;
    fsdp_module *layer[4]; /* 1 and 3 frozen */
} again;

/* Layers run in turn, then without gradients, then in turn again. */
static fsdp_tensor *again_forward(fsdp_module *self, fsdp_tensor *x)
{
    again *m = (again *)self;
    for (int i = 0; i < 4; i++)
        x = fsdp_call(m->layer[i], x);
    fsdp_no_grad_begin();
    fsdp_tensor *y = x;
    for (int i = 0; i < 4; i++)
        y = fsdp_call(m->layer[i], y);
    fsdp_no_grad_end();
    for (int i = 3; i >= 0; i--)
        x = fsdp_call(m->layer[i], x);
    return fsdp_add(x, y);
}

static fsdp_module *again_create(const conf_parity *p)
{
    again *m = (again *)fsdp_module_create(sizeof *m, "Again");
    if (!m) return NULL;
    m->base.forward1 = again_forward;
    for (int i = 0; i < 4; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        m->layer[i] = fsdp_module_add(&m->base, name, conf_mlp_create(p->dim, 2));
        if (!m->layer[i] || (i % 2 && freeze(m->layer[i], 1) != FSDP_OK)) return NULL;
    }
    return &m->base;
}

/* Trainable and frozen units run several times in a forward, some of it without gradients. */
static void test_multi_forward_mixed_requires_grad(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            conf_parity p = {.make = again_create,
                             .shard = conf_shard_children,
                             .dim = WIDTH,
                             .bound = 1e-6, /* each use is reduced, then added */
                             .options = fsdp_shard_defaults(NULL)};
            p.options.reshard_after_forward = policies[k];
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_train_mixed_requires_grad_per_group),
        CONF_TEST(test_train_mixed_requires_grad_across_groups),
        CONF_TEST(test_multi_forward_mixed_requires_grad),
    };
    return conf_main("frozen", tests, sizeof tests / sizeof *tests, argc, argv);
}
