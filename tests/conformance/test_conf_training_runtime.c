/*
 * test_conf_training_runtime.c - upstream's test_fully_shard_training.py: what is registered when,
 * gathers by lists and events, and accumulation over microbatches.
 *
 * ctest: slow timeout=180
 */
#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- RegisteredParams --------------------------------------------------------------- */

typedef struct reg {
    int policy, nested;
} reg;

/* What stands on the module now: whole (1), the shard (0), or the part of an integer (2). */
static fsdp_status stands(fsdp_param *p, int what)
{
    fsdp_tensor *t = fsdp_param_tensor(p);
    CHECK(fsdp_is_dtensor(t) == (what != 1));
    if (what == 1) {
        for (int d = 0; d < fsdp_param_ndim(p); d++)
            CHECK(fsdp_size(t, d) == fsdp_param_sizes(p)[d]);
        return FSDP_OK;
    }
    int axes = fsdp_mesh_ndim(fsdp_dtensor_mesh(t));
    CHECK(axes == (what == 2 ? 2 : 1));
    CHECK(fsdp_dtensor_placement(t, axes - 1).kind == FSDP_SHARD);
    if (what == 2) {
        CHECK(fsdp_dtensor_placement(t, 0).kind == FSDP_REPLICATE);
        CHECK(fsdp_mesh_size(fsdp_dtensor_mesh(t), 1) == 2);
    }
    return FSDP_OK;
}

typedef struct where {
    fsdp_module *plain;
    int root, others; /* what stands */
    int values;       /* compare them: the gathers are collective */
} where;

static fsdp_status stands_one(fsdp_named_param *p, void *arg)
{
    const where *w = arg;
    CHECK_OK(stands(p->param, strncmp(p->name, "layers.", 7) ? w->root : w->others));
    if (!w->values) return FSDP_OK;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_param_list l;
    CHECK_OK(fsdp_module_params(w->plain, &l));
    for (int64_t i = 0; i < l.count; i++)
        if (!strcmp(l.items[i].name, p->name))
            CHECK(check_same_bits(fsdp_dtensor_full(fsdp_param_tensor(p->param)),
                                  fsdp_param_tensor(l.items[i].param)));
    fsdp_param_list_free(&l);
    fsdp_scope_end(scope);
    return FSDP_OK;
}

/* Expected after forward: by value of reshard_after_forward and whether it is the root. */
static int after_forward(int policy, int root, int ranks)
{
    if (policy == 0) return root ? 1 : 0;
    if (policy == 1) return 0;
    if (policy == 2) return 1;
    return ranks > 2 ? 2 : ranks == 2 ? 0 : root ? 1 : 0; /* 2 of 2 is true, of 1 is not given */
}

static fsdp_status registered_rank(void *arg)
{
    const reg *r = arg;
    int n = fsdp_world_size();
    conf_lm *plain = conf_lm_create(2, 0), *m = conf_lm_create(2, 0);
    CHECK(plain && m);
    CHECK_OK(fsdp_reset_parameters(&plain->base, 1));
    conf_parity p = {.options = conf_policy(fsdp_shard_defaults(NULL), r->policy, n)};
    CHECK_OK(r->nested ? conf_shard_blocks(&p, &m->base) : conf_shard_whole(&p, &m->base));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    int root = after_forward(r->policy, 1, n);
    int others = r->nested ? after_forward(r->policy, 0, n) : root;
    where sharded = {&plain->base, 0, 0, 1}, after = {&plain->base, root, others, 1};
    CHECK_OK(conf_each_param(&m->base, stands_one, &sharded));
    for (int step = 0; step < 2; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *loss = conf_loss(fsdp_call(&m->base, conf_tokens(2, step)));
        CHECK(loss);
        CHECK_OK(conf_each_param(&m->base, stands_one, &after));
        for (int i = 0; i < 2 && step && r->nested; i++)
            CHECK_OK(fsdp_reshard(m->block[i]));
        if (step) {
            CHECK_OK(fsdp_reshard(&m->base));
            CHECK_OK(conf_each_param(&m->base, stands_one, &sharded));
        }
        CHECK_OK(fsdp_backward(loss));
        CHECK_OK(conf_each_param(&m->base, stands_one, &sharded));
        CHECK_OK(fsdp_zero_grad(&m->base));
        fsdp_scope_end(scope);
    }
    fsdp_module_free(&plain->base);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* After forward the shard (true), the whole parameter (false), or its part over a group of two (2)
 * is registered; automatically the root is whole and the others are not. reshard brings the shards
 * back; what one sees always has the original values. */
static void test_param_registration_after_forward(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2 * CONF_POLICIES; k++) {
            reg r = {k % CONF_POLICIES, k / CONF_POLICIES};
            if (k == 7)
                conf_processes(worlds[i], registered_rank, &r);
            else
                conf_ranks(worlds[i], registered_rank, &r);
        }
}

/* After backward every parameter is the shard, of one unit and of nested ones. */
static void test_param_registration_after_backward(void)
{
    for (int k = 0; k < 2 * CONF_POLICIES; k++) {
        reg r = {k % CONF_POLICIES, k / CONF_POLICIES};
        conf_ranks(8, registered_rank, &r);
    }
}

/* F of a unit at its forward's begin, f at its end, C where it was completed by force. */
static void note_passes(void *arg, fsdp_event_kind k, const char *unit)
{
    char *text = arg;
    size_t n = strlen(text);
    const char *what = k == FSDP_EVENT_PRE_FORWARD      ? "F"
                       : k == FSDP_EVENT_POST_FORWARD   ? "f"
                       : k == FSDP_EVENT_FORCE_COMPLETE ? "C"
                                                        : NULL;
    if (what) snprintf(text + n, CONF_LOG - n, "%s%s ", what, unit);
}

static fsdp_status passes_rank(void *arg)
{
    (void)arg;
    char text[CONF_LOG] = "";
    fsdp_module *m = conf_mlps_create(3, 4);
    CHECK(m);
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    CHECK_OK(fsdp_fully_shard(fsdp_module_find(m, "1.out_proj"), NULL));
    CHECK_OK(conf_shard_children(&p, m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    CHECK_OK(fsdp_set_event_hook(m, note_passes, text));
    for (int k = 0; k < 2; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        text[0] = 0;
        CHECK(fsdp_call(m, conf_input(2, 4, 0)));
        conf_checks++;
        if (strcmp(text, "F0 f0 F1 F1.out_proj f1.out_proj f1 F2 f2 "))
            return fsdp__fail(FSDP_INTERNAL, "passes %s", text);
        fsdp_scope_end(scope);
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A unit of one module ends its pass with that module: it waits for no other. */
static void test_modules_to_run_forward_empty_for_single_module(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], passes_rank, NULL);
}

/* ---- gathers by lists, by event, and before the peers ------------------------------- */

static fsdp_module *mlps8_create(const conf_parity *p)
{
    return conf_mlps_create(8, p->dim);
}

static fsdp_status shard_with_lists(const conf_parity *p, fsdp_module *m)
{
    CHECK_OK(conf_shard_children(p, m));
    for (int i = 0; i < 8; i++) {
        fsdp_module *list[2];
        int n = 0;
        for (int k = i + 1; k < 8 && n < 2; k++)
            list[n++] = fsdp_module_child(m, k);
        CHECK_OK(fsdp_set_modules_to_forward_prefetch(fsdp_module_child(m, i), list, n));
        n = 0;
        for (int k = i - 1; k >= 0 && n < 2; k--)
            list[n++] = fsdp_module_child(m, k);
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(fsdp_module_child(m, i), list, n));
    }
    return FSDP_OK;
}

/* Lists of two modules ahead in both directions, over eight layers, change no bit. */
static void test_explicit_prefetching(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = mlps8_create,
                             .shard = shard_with_lists,
                             .dim = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* A step that goes on after fsdp_optimizer_step has returned: it shrinks the weights. */
typedef struct later {
    fsdp_module *m;
    int polls;
} later;

static fsdp_status shrink_one(fsdp_named_param *p, void *arg)
{
    (void)arg;
    fsdp_tensor *t = fsdp_param_tensor(p->param);
    float *v = fsdp_data(t);
    for (int64_t i = 0; i < fsdp_numel(t); i++)
        v[i] *= 0.875f;
    fsdp_touch(t);
    return FSDP_OK;
}

static int shrink_later(void *arg)
{
    later *l = arg;
    if (l->polls-- > 0) return 0;
    return conf_each_param(l->m, shrink_one, NULL) == FSDP_OK ? 1 : -1;
}

static fsdp_tensor *event_loss(const conf_parity *p, fsdp_module *m, int step)
{
    if (!fsdp_is_sharded_module(m)) {
        if (conf_each_param(m, shrink_one, NULL) != FSDP_OK) return NULL;
        return conf_default_loss(p, m, step);
    }
    later l = {m, 5 + 3 * fsdp_rank()};
    fsdp_stream *s = fsdp_stream_create("step");
    fsdp_event *e = fsdp_event_create();
    fsdp_tensor *loss = NULL;
    if (s && e && fsdp_stream_submit(s, shrink_later, &l) == FSDP_OK &&
        fsdp_event_record(e, s) == FSDP_OK && fsdp_event_query(e) == 0 &&
        fsdp_set_post_optim_event(m, e) == FSDP_OK)
        loss = conf_default_loss(p, m, step);
    if (loss && l.polls >= 0) loss = NULL; /* the forward did not wait */
    fsdp_event_free(e);
    fsdp_stream_free(s);
    return loss;
}

/* The first gather of a forward waits for the event of a step that is still under way. */
static void test_post_optim_event(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            conf_parity p = {.make = mlps8_create,
                             .shard = conf_shard_children,
                             .loss = event_loss,
                             .dim = 4,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.private_gather = k;
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

/* Rank 0 issues its gather and only then tells the others to issue theirs. */
static fsdp_tensor *one_by_one_loss(const conf_parity *p, fsdp_module *m, int step)
{
    int n = fsdp_world_size(), r = fsdp_rank(), token = 0;
    if (!fsdp_is_sharded_module(m)) return conf_default_loss(p, m, step);
    fsdp_unshard_handle *h = NULL;
    fsdp_group *g = fsdp_group_world();
    if (r > 0 && fsdp_recv(g, &token, sizeof token, r - 1, NULL) != FSDP_OK) return NULL;
    if (fsdp_unshard_async(fsdp_module_child(m, 0), &h) != FSDP_OK) return NULL;
    if (r < n - 1 && fsdp_send(g, &token, sizeof token, r + 1, NULL) != FSDP_OK) return NULL;
    if (fsdp_unshard_wait(h) != FSDP_OK) return NULL;
    return conf_default_loss(p, m, step);
}

/* Gathers are asynchronous, as upstream's are when asked to be: one returns before the peers have
 * issued theirs, and training is the same. */
static void test_train_parity_multi_group_unshard_async_op(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = mlps8_create,
                             .shard = conf_shard_children,
                             .loss = one_by_one_loss,
                             .dim = 4,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            if (k == 3)
                conf_processes(worlds[i], conf_parity_rank, &p);
            else
                conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- GradientAccumulation ----------------------------------------------------------- */

enum { MICRO = 3, ACC_BLOCKS = 2, ACC_UNITS = ACC_BLOCKS + 1 };

typedef enum scope_of { ALL, ROOT_ONLY, SOME } scope_of;

typedef struct acc {
    int replicas; /* 0: flat */
    int policy;
    scope_of scope;
    int keep;                   /* units stay whole after backward, but for the last */
    int scatter_only;           /* hybrid: all-reduces are put off instead of reductions */
    int checkpoint, micro_sync; /* of HSDPTraining: recompute; reduce every microbatch */
} acc;

static fsdp_module *acc_create(const conf_parity *p)
{
    (void)p;
    conf_lm *m = conf_lm_create(ACC_BLOCKS, 0);
    return m ? &m->base : NULL;
}

static fsdp_status acc_shard(const conf_parity *p, fsdp_module *m)
{
    const acc *a = p->arg;
    conf_parity q = *p;
    if (a->replicas) q.options.mesh = conf_hybrid_mesh(a->replicas);
    return conf_shard_blocks(&q, m);
}

static fsdp_status set_flags(const acc *a, fsdp_module *m, int last)
{
    fsdp_module *top = a->scope == SOME ? ((conf_lm *)m)->block[0] : m;
    int recurse = a->scope == ALL;
    CHECK_OK(fsdp_set_is_last_backward(m, last));
    if (a->keep) CHECK_OK(fsdp_set_reshard_after_backward(m, last, 1));
    if (a->scatter_only) return fsdp_set_requires_all_reduce(top, last, recurse);
    return fsdp_set_requires_gradient_sync(top, last, recurse);
}

/* Counts of a step of MICRO microbatches. */
static fsdp_status counts_are(const acc *a)
{
    int n = fsdp_world_size(), shards = n / (a->replicas ? a->replicas : 1);
    int put_off = a->scope == ALL ? ACC_UNITS : 1; /* units whose reductions wait for the last */
    int each = (ACC_UNITS - put_off) * MICRO + put_off;
    int rs = a->scatter_only ? ACC_UNITS * MICRO : each;
    int freed = a->policy == 0 ? ACC_BLOCKS : a->policy == 2 ? 0 : ACC_UNITS;
    if (a->policy == 3 && shards % 2) freed = ACC_BLOCKS;
    int ag = ACC_UNITS * (a->keep ? 1 : MICRO) + freed * MICRO;
    if (shards > 1) {
        CHECK(conf_calls(FSDP_LANE_GATHER, FSDP_ALL_GATHER) == ag);
        CHECK(conf_calls(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER) == rs);
    }
    if (a->replicas > 1) CHECK(conf_calls(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE) == each);
    return FSDP_OK;
}

static fsdp_tensor *acc_loss(const conf_parity *p, fsdp_module *m, int step)
{
    const acc *a = p->arg;
    int sharded = fsdp_is_sharded_module(m);
    fsdp_comm_count_reset();
    for (int k = 0;; k++) {
        int last = k == MICRO - 1;
        if (sharded && set_flags(a, m, last) != FSDP_OK) return NULL;
        fsdp_tensor *l = conf_loss(fsdp_call(m, conf_tokens(2, MICRO * step + k)));
        if (last) return l;
        if (fsdp_backward(l) != FSDP_OK) return NULL;
    }
}

static fsdp_status acc_counts(const conf_parity *p, fsdp_module *m, int step)
{
    (void)step;
    return fsdp_is_sharded_module(m) ? counts_are(p->arg) : FSDP_OK;
}

/* Microbatches whose reductions, or all-reduces, are put off for all units, for the root's or for
 * one: exactly as many gathers, reductions and all-reduces as that says, and the reference's
 * training. */
static void test_gradient_accumulation(void)
{
    for (int i = 1; i < WORLDS; i++)
        for (int c = 0; c < CONF_POLICIES * 18; c++) {
            acc a = {.policy = c % CONF_POLICIES, .keep = c / CONF_POLICIES % 2};
            a.scope = (scope_of)(c / CONF_POLICIES / 2 % 3);
            int mesh = c / CONF_POLICIES / 6; /* flat, hybrid, hybrid and all-reduces alone */
            a.replicas = mesh ? 2 : 0;
            a.scatter_only = mesh == 2;
            int shards = worlds[i] / (mesh ? 2 : 1);
            if (shards == 1 && (a.scatter_only || a.policy == 3)) continue;
            conf_parity p = {.make = acc_create,
                             .shard = acc_shard,
                             .loss = acc_loss,
                             .before_step = acc_counts,
                             .arg = &a,
                             .steps = 3,
                             .bound = 2e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), a.policy, shards)};
            if (c % 29 == 0)
                conf_processes(worlds[i], conf_parity_rank, &p);
            else
                conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* Forwards and backwards of three microbatches in a pipeline's order. */
static fsdp_tensor *pipeline_loss(const conf_parity *p, fsdp_module *m, int step)
{
    fsdp_tensor *loss[MICRO];
    int sharded = fsdp_is_sharded_module(m);
    fsdp_unshard_handle *h[8] = {NULL};
    int units = 0;
    for (int i = 0; sharded && i < fsdp_module_child_count(m); i++)
        if (fsdp_unshard_async(fsdp_module_child(m, i), &h[units++]) != FSDP_OK) return NULL;
    for (int i = 0; i < units; i++)
        if (fsdp_unshard_wait(h[i]) != FSDP_OK) return NULL;
    for (int k = 0; k <= MICRO; k++) {
        if (k < MICRO) loss[k] = conf_loss(fsdp_call(m, conf_input(4, p->dim, MICRO * step + k)));
        if (k == 0) continue;
        int last = k == MICRO;
        if (sharded && (fsdp_set_is_last_backward(m, last) != FSDP_OK ||
                        fsdp_set_requires_gradient_sync(m, last, 1) != FSDP_OK ||
                        fsdp_set_reshard_after_backward(m, last, 1) != FSDP_OK))
            return NULL;
        if (last) break;
        if (fsdp_backward(loss[k - 1]) != FSDP_OK) return NULL;
    }
    return loss[MICRO - 1];
}

static fsdp_module *mlps_create(const conf_parity *p)
{
    return conf_mlps_create(3, p->dim);
}

/* All units gathered up front, forwards and backwards interleaved, one reduction at the end. */
static void test_1f1b_microbatching(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            conf_parity p = {.make = mlps_create,
                             .shard = conf_shard_children,
                             .loss = pipeline_loss,
                             .dim = 6,
                             .bound = 1e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k, worlds[i])};
            if (k == 3)
                conf_processes(worlds[i], conf_parity_rank, &p);
            else
                conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- HSDPTraining ------------------------------------------------------------------- */

static fsdp_status hsdp_shard(const conf_parity *p, fsdp_module *m)
{
    const acc *a = p->arg;
    conf_parity q = *p;
    q.options.mesh = conf_hybrid_mesh(a->replicas);
    for (int i = 0; a->checkpoint && i < fsdp_module_child_count(m); i++)
        CHECK_OK(fsdp_checkpoint_module(fsdp_module_child(m, i), NULL));
    return conf_shard_children(&q, m);
}

static fsdp_tensor *hsdp_loss(const conf_parity *p, fsdp_module *m, int step)
{
    const acc *a = p->arg;
    for (int k = 0;; k++) {
        int last = k == MICRO - 1;
        if (fsdp_is_sharded_module(m) &&
            fsdp_set_requires_gradient_sync(m, last || a->micro_sync, 1) != FSDP_OK)
            return NULL;
        fsdp_tensor *l = conf_loss(fsdp_call(m, conf_input(2, p->dim, MICRO * step + k)));
        if (last) return l;
        if (fsdp_backward(l) != FSDP_OK) return NULL;
    }
}

/* Hybrids of even and uneven widths, with and without recompute, reduced each microbatch or once.
 */
static void test_train_parity_hsdp(void)
{
    static const int dims[] = {3, 16, 17};
    static const int meshes[][2] = {{2, 2}, {4, 2}, {8, 2}, {8, 4}};
    for (int k = 0; k < 4; k++)
        for (int c = 0; c < 12; c++) {
            acc a = {.replicas = meshes[k][1], .checkpoint = c & 1, .micro_sync = c >> 1 & 1};
            conf_parity p = {.make = mlps_create,
                             .shard = hsdp_shard,
                             .loss = hsdp_loss,
                             .arg = &a,
                             .dim = dims[c >> 2],
                             .steps = 5,
                             .bound = 1e-6,
                             .options = conf_policy(fsdp_shard_defaults(NULL), c & 3 ? 0 : 2, 4)};
            if (k == 1 && c == 11)
                conf_processes(meshes[k][0], conf_parity_rank, &p);
            else
                conf_ranks(meshes[k][0], conf_parity_rank, &p);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_param_registration_after_forward),
        CONF_TEST(test_param_registration_after_backward),
        CONF_TEST(test_modules_to_run_forward_empty_for_single_module),
        CONF_TEST(test_explicit_prefetching),
        CONF_TEST(test_post_optim_event),
        CONF_TEST(test_train_parity_multi_group_unshard_async_op),
        CONF_TEST(test_gradient_accumulation),
        CONF_TEST(test_1f1b_microbatching),
        CONF_TEST(test_train_parity_hsdp),
    };
    return conf_main("training", tests, sizeof tests / sizeof *tests, argc, argv);
}
