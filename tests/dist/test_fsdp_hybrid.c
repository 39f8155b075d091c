/*
 * test_fsdp_hybrid.c - replicas of shards: the same training as one rank's, on any layout; what is
 * reduced where, how often, and in which order.
 */
#include "comm/comm.h"
#include "sharded_net.h"

static const net_run base = {.ranks = 4,
                             .blocks = 3,
                             .rows = 24,
                             .steps = 6,
                             .mesh = NET_HYBRID,
                             .replicas = 2,
                             .policy = FSDP_RESHARD_ALWAYS,
                             .prefetch = 1};

static net_run plain;

static int make_plain(void **state)
{
    (void)state;
    plain = base;
    plain.ranks = 1;
    plain.mesh = NET_PLAIN;
    net_go(&plain);
    return 0;
}

static int free_plain(void **state)
{
    (void)state;
    net_free(&plain);
    return 0;
}

/* Layouts: 2 x 2, 2 x 4, 4 x 2, 3 x 1, 1 x 3, 2 x 3; reduced each time, inside the group, or once.
 */
static void test_parity(void **state)
{
    (void)state;
    static const int layouts[][2] = {{2, 2}, {2, 4}, {4, 2}, {3, 1}, {1, 3}, {2, 3}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int way = (int)i % NET_STRIDE; way < 4; way += NET_STRIDE) {
            net_run r = base;
            char what[64];
            r.replicas = layouts[i][0];
            r.ranks = layouts[i][0] * layouts[i][1];
            r.micro = way ? r.ranks == 8 ? 3 : 2 : 1;
            r.sync = way < 3;
            r.group_only = way == 2;
            r.policy = way == 1 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
            snprintf(what, sizeof what, "%d x %d, way %d", r.replicas, layouts[i][1], way);
            net_go(&r);
            net_close(&r, &plain, 2e-5, what);
            net_free(&r);
        }
}

/* ---- how often ----------------------------------------------------------------------------- */

typedef struct counts {
    int64_t scatter, replicate; /* calls of one step */
} counts;

static fsdp_status count(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    counts *c = (counts *)r->arg + fsdp_rank();
    c->scatter = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).calls;
    c->replicate = fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).calls;
    return FSDP_OK;
}

/* m microbatches, g units: synced g m and g m; inside the group g m and g; once g and g. */
static void test_counts(void **state)
{
    (void)state;
    const int m = 3, g = base.blocks + 1;
    for (int way = 0; way < 3; way++) {
        counts c[4] = {{0, 0}};
        net_run r = base;
        r.steps = 1;
        r.micro = m;
        r.sync = way < 2;
        r.group_only = way == 1;
        r.look = count;
        r.arg = c;
        net_go(&r);
        net_free(&r);
        for (int k = 0; k < 4; k++) {
            assert_int_equal(c[k].scatter, way < 2 ? g * m : g);
            assert_int_equal(c[k].replicate, way < 1 ? g * m : g);
        }
    }
}

/* ---- in which order -----------------------------------------------------------------------------
 */

enum { LOG = 1024 };

typedef struct call_log {
    char text[LOG]; /* of rank 0: "s2 r2 ...": a call inside the group or across, and its unit */
} call_log;

static void note(void *arg, fsdp_lane lane, fsdp_collective c, const char *label)
{
    call_log *l = arg;
    (void)c;
    if (lane != FSDP_LANE_REDUCE && lane != FSDP_LANE_REPLICATE) return;
    const char *dot = strrchr(label, '.');
    size_t n = strlen(l->text);
    snprintf(l->text + n, LOG - n, "%s%c%s", n ? " " : "", lane == FSDP_LANE_REDUCE ? 's' : 'r',
             dot ? dot + 1 : "root");
}

static fsdp_status listen(net_run *r, net *n)
{
    (void)n;
    if (fsdp_rank() == 0) fsdp__comm_set_disturb(note, r->arg);
    return FSDP_OK;
}

/* A hybrid reduces inside the shard group first; the all-reduce of a unit is issued while the next
 * one's sum inside the group is still to come. (Some texts have it the other way round.) */
static void test_order(void **state)
{
    (void)state;
    call_log l = {""};
    net_run r = base;
    r.steps = 1;
    r.prepare = listen;
    r.arg = &l;
    net_go(&r);
    net_free(&r);
    assert_string_equal(l.text, "s2 r2 s1 r1 s0 r0 sroot rroot");
}

/* ---- memory
 * ---------------------------------------------------------------------------------------- */

static fsdp_status weigh(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    int64_t *live = (int64_t *)r->arg + fsdp_rank();
    if (s.live[FSDP_GRADIENTS] > *live) *live = s.live[FSDP_GRADIENTS];
    return FSDP_OK;
}

/* What accumulates inside the group is 1/S of the model in fp32, even where gradients travel in
 * bf16; without sync it is all of it. */
static void test_partial_bytes(void **state)
{
    (void)state;
    int64_t sums[4] = {0}, whole[4] = {0};
    net_run r = base;
    r.steps = 1;
    r.micro = 3;
    r.sync = 1;
    r.group_only = 1;
    r.look = weigh;
    r.arg = sums;
    net_go(&r);
    net_free(&r);
    r.sync = r.group_only = 0;
    r.arg = whole;
    net_go(&r);
    int64_t numel = r.numel;
    net_free(&r);
    for (int k = 0; k < 4; k++) {
        int64_t places = 15 * 4 * (3 * 4 + 5); /* a place is padded to 64 bytes */
        assert_true(sums[k] >= 4 * numel / 2 - 4 * 32 * 17);
        assert_true(sums[k] <= 4 * numel / 2 + 4 * 32 * 17 + places);
        assert_int_equal(whole[k], 4 * numel);
    }
}

/* ---- parameters that change between
 * ------------------------------------------------------------------ */

typedef struct pieces {
    fsdp_module base;
    fsdp_module *a, *b;
    int use_a, use_b;
} pieces;

static fsdp_tensor *pieces_forward(fsdp_module *self, fsdp_tensor *x)
{
    pieces *p = (pieces *)self;
    fsdp_tensor *y = NULL;
    if (p->use_a) y = fsdp_sum(fsdp_call(p->a, x));
    if (p->use_b) {
        fsdp_tensor *z = fsdp_sum(fsdp_call(p->b, x));
        y = y ? fsdp_add(y, z) : z;
    }
    return y;
}

static pieces *pieces_create(void)
{
    pieces *p = (pieces *)fsdp_module_create(sizeof *p, "Pieces");
    if (!p) return NULL;
    p->base.forward1 = pieces_forward;
    p->a = fsdp_module_add(&p->base, "a", fsdp_linear_create(3, 5, 0));
    p->b = fsdp_module_add(&p->base, "b", fsdp_linear_create(3, 7, 0));
    return p;
}

/* The gradient of element 0 of a weight is the sum of x's first column over rows. */
static fsdp_status run_once(pieces *p, float value, int a, int b, int all_reduce)
{
    float x[3] = {value, value, value};
    fsdp_scope *scope = fsdp_scope_begin();
    p->use_a = a;
    p->use_b = b;
    fsdp_status s = fsdp_set_requires_all_reduce(&p->base, all_reduce, 1);
    if (s == FSDP_OK)
        s = fsdp_backward(fsdp_call(
            &p->base, fsdp_tensor_from_memory(x, FSDP_F32, 2, SIZES(1, 3), NULL, NULL, NULL)));
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status check_grad(fsdp_module *m, double want)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "weight")));
    EXPECT(g);
    double v[21];
    fsdp_tensor *full = fsdp_dtensor_full(g);
    EXPECT(full && fsdp_to_doubles(full, v) == FSDP_OK);
    for (int64_t i = 0; i < fsdp_numel(full); i++)
        if (v[i] != want)
            return fsdp__fail(FSDP_INTERNAL, "%s: gradient %g; expected %g", fsdp_module_name(m),
                              v[i], want);
    fsdp_scope_end(scope);
    return FSDP_OK;
}

/* One unit, or a unit each; a gets gradients in the first two backwards, b in the second and the
 * last, whose own is the only one that goes over the replicas. Rank r gives (r + 1) times more. */
static fsdp_status changing(void *arg)
{
    int apart = *(int *)arg;
    const char *axes[] = {"replicate", "shard"};
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, 2, (int[]){2, 2}, axes);
    pieces *p = pieces_create();
    EXPECT(mesh && p);
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    if (apart) {
        EXPECT(fsdp_fully_shard(p->a, &o) == FSDP_OK);
        EXPECT(fsdp_fully_shard(p->b, &o) == FSDP_OK);
    }
    EXPECT(fsdp_fully_shard(&p->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&p->base, 1) == FSDP_OK);
    float r = (float)fsdp_rank() + 1.0f; /* mean over ranks: 2.5 */
    EXPECT(run_once(p, r, 1, 0, 0) == FSDP_OK);
    EXPECT(fsdp_grad(fsdp_param_tensor(fsdp_module_param(p->a, "weight"))) == NULL);
    EXPECT(run_once(p, 10 * r, 1, 1, 0) == FSDP_OK);
    EXPECT(run_once(p, 100 * r, 0, 1, 1) == FSDP_OK);
    EXPECT(check_grad(p->a, 2.5 * 11) == FSDP_OK);
    EXPECT(check_grad(p->b, 2.5 * 110) == FSDP_OK);
    /* Reduced at once, beside what is there already. */
    EXPECT(run_once(p, r, 1, 1, 1) == FSDP_OK);
    EXPECT(check_grad(p->a, 2.5 * 12) == FSDP_OK);
    EXPECT(check_grad(p->b, 2.5 * 111) == FSDP_OK);
    fsdp_module_free(&p->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_changing(void **state)
{
    (void)state;
    for (int apart = 0; apart < 2; apart++)
        check_ok(fsdp_run_threads(4, changing, &apart));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parity),   cmocka_unit_test(test_counts),
        cmocka_unit_test(test_order),    cmocka_unit_test(test_partial_bytes),
        cmocka_unit_test(test_changing),
    };
    return cmocka_run_group_tests(tests, make_plain, free_plain);
}
