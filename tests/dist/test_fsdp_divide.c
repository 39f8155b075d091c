/*
 * test_fsdp_divide.c - by what gradients are divided, who takes part in a reduction, and how many
 * reductions are unfinished.
 */
#include "fsdp/unit.h"
#include "sharded_net.h"

/* ---- the rule ----------------------------------------------------------------------------------
 */

static void rule(fsdp_dtype t, int ranks, double factor, int force, double before, double inside,
                 double after)
{
    fsdp__division d = fsdp__divide_rule(t, ranks, factor, force != 0);
    if (d.before != before || d.inside != inside || d.after != after)
        fail_msg("%s, %d ranks, factor %g, force %d: %g, %g, %g; expected %g, %g, %g",
                 fsdp_dtype_name(t), ranks, factor, force, d.before, d.inside, d.after, before,
                 inside, after);
}

static void test_rule(void **state)
{
    (void)state;
    rule(FSDP_F32, 4, 0, 0, 1, 4, 1);
    rule(FSDP_BF16, 4, 0, 0, 1, 4, 1);
    rule(FSDP_F32, 4, 3, 0, 1, 3, 1);
    rule(FSDP_F32, 4, 0, 1, 1, 1, 4);
    rule(FSDP_BF16, 8, 3, 1, 1, 1, 3);
    static const double half[][3] = {{1, 1, 1},   {2, 2, 1}, {3, 2, 1.5}, {4, 2, 2},
                                     {6, 4, 1.5}, {8, 4, 2}, {16, 4, 4}};
    for (int force = 0; force < 2; force++)
        for (size_t i = 0; i < sizeof half / sizeof *half; i++) {
            rule(FSDP_F16, (int)half[i][0], 0, force, half[i][1], 1, half[i][2]);
            rule(FSDP_F16, 5, half[i][0], force, half[i][1], 1, half[i][2]);
        }
}

/* ---- a model whose gradients are known
 * ------------------------------------------------------------ */

typedef struct probe {
    fsdp_module base;
    fsdp_module *a, *b, *c; /* c is the root's own */
    int use_a, use_b, use_c;
} probe;

static fsdp_tensor *probe_forward(fsdp_module *self, fsdp_tensor *x)
{
    probe *p = (probe *)self;
    fsdp_module *part[3] = {p->a, p->b, p->c};
    int use[3] = {p->use_a, p->use_b, p->use_c};
    fsdp_tensor *y = NULL;
    for (int k = 0; k < 3; k++) {
        if (!use[k]) continue;
        fsdp_tensor *z = fsdp_sum(fsdp_cast(fsdp_call(part[k], x), FSDP_F32));
        y = y ? fsdp_add(y, z) : z;
    }
    return y;
}

typedef struct setting {
    int ranks, replicas; /* replicas 0: a mesh of one axis */
    double factor;
    int factor_on_root_only, force, unused, buffers, halves;
    int skip_b, skip_c;            /* bits: ranks that do not use it */
    int twice;                     /* two backwards before one looks */
    double want_a, want_b, want_c; /* gradients; NAN: none */
    int scaled;                    /* whether a collective scales */
} setting;

static fsdp_status check_grad(fsdp_module *m, double want, int halves)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "weight")));
    if (isnan(want)) {
        EXPECT(g == NULL);
    } else {
        double v[64];
        fsdp_tensor *full = g ? fsdp_dtensor_full(g) : NULL;
        EXPECT(full && fsdp_to_doubles(full, v) == FSDP_OK);
        for (int64_t i = 0; i < fsdp_numel(full); i++)
            /* Replicas without shards sum in place, so their result is a half. */
            if (fabs(v[i] - want) > (halves ? 1e-3 : 1e-6) * fabs(want))
                return fsdp__fail(FSDP_INTERNAL, "%s: gradient %.9g; expected %.9g",
                                  fsdp_module_name(m), v[i], want);
    }
    fsdp_scope_end(scope);
    return FSDP_OK;
}

static fsdp_status shard_probe(const setting *s, probe *p)
{
    const char *axes[] = {"replicate", "shard"};
    int sizes[] = {s->replicas, s->replicas ? s->ranks / s->replicas : s->ranks};
    int skip = s->replicas == 0;
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, 2 - skip, sizes + skip, axes + skip);
    EXPECT(mesh);
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    if (s->halves) {
        o.mp_policy.param_dtype = FSDP_F16;
        o.mp_policy.reduce_dtype = FSDP_F16;
    }
    EXPECT(fsdp_fully_shard(p->a, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(p->b, &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&p->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&p->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_gradient_divide_factor(&p->base, s->factor, !s->factor_on_root_only) ==
           FSDP_OK);
    fsdp_module *units[] = {p->a, p->b, &p->base};
    for (int k = 0; k < 3; k++)
        EXPECT(fsdp_set_force_sum_reduction_for_comms(units[k], s->force) == FSDP_OK);
    EXPECT(fsdp_set_reduce_scatter_unused_params(&p->base, s->unused, 1) == FSDP_OK);
    if (s->buffers)
        EXPECT(fsdp_set_reduce_scatter_max_input_buffers(p->b, s->buffers, 1) == FSDP_OK);
    return FSDP_OK;
}

/* Rank r's gradient is r + 1 everywhere. */
static fsdp_status probe_rank(void *arg)
{
    const setting *s = arg;
    probe *p = (probe *)fsdp_module_create(sizeof *p, "Probe");
    EXPECT(p);
    p->base.forward1 = probe_forward;
    p->a = fsdp_module_add(&p->base, "a", fsdp_linear_create(3, 5, 0));
    p->b = fsdp_module_add(&p->base, "b", fsdp_linear_create(3, 7, 0));
    p->c = fsdp_module_add(&p->base, "c", fsdp_linear_create(3, 2, 0));
    EXPECT(shard_probe(s, p) == FSDP_OK);
    int me = fsdp_rank();
    float v = (float)me + 1.0f, x[3] = {v, v, v};
    p->use_a = 1;
    p->use_b = !(s->skip_b >> me & 1);
    p->use_c = !(s->skip_c >> me & 1);
    for (int k = 0; k <= s->twice; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        EXPECT(fsdp_backward(
                   fsdp_call(&p->base, fsdp_tensor_from_memory(x, FSDP_F32, 2, SIZES(1, 3), NULL,
                                                               NULL, NULL))) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    EXPECT(check_grad(p->a, s->want_a, s->halves) == FSDP_OK);
    EXPECT(check_grad(p->b, s->want_b, s->halves) == FSDP_OK);
    EXPECT(check_grad(p->c, s->want_c, s->halves) == FSDP_OK);
    int64_t scaled = fsdp_comm_count_total(FSDP_LANE_REDUCE, FSDP_REDUCE_SCATTER).scaled +
                     fsdp_comm_count_total(FSDP_LANE_REPLICATE, FSDP_ALL_REDUCE).scaled;
    EXPECT((scaled > 0) == s->scaled);
    fsdp_module_free(&p->base);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void go(setting s)
{
    fsdp_status st = fsdp_run_threads(s.ranks, probe_rank, &s);
    if (st == FSDP_OK) return;
    char text[2048];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    fail_msg("%d ranks, %d replicas, factor %g, force %d, f16 %d: %s", s.ranks, s.replicas,
             s.factor, s.force, s.halves, text);
}

/* The default, a factor, and the root's alone; summed by force or not, on every mesh. */
static void test_factor(void **state)
{
    (void)state;
    static const int meshes[][2] = {{2, 0}, {3, 0}, {4, 0}, {4, 2}, {4, 4}, {8, 2}, {3, 3}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++)
        for (int k = 0; k < 12; k++) {
            int n = meshes[i][0];
            double sum = n * (n + 1) / 2.0, factor = k % 3 ? 5.0 : 0.0;
            setting s = {.ranks = n, .replicas = meshes[i][1], .factor = factor};
            s.factor_on_root_only = k % 3 == 2;
            s.force = k / 3 % 2;
            s.halves = k / 6;
            s.want_c = sum / (factor ? factor : n);
            s.want_a = s.want_b = sum / (factor && !s.factor_on_root_only ? factor : n);
            s.scaled = !s.force;
            s.twice = k % 2;
            if (s.twice) s.want_a *= 2, s.want_b *= 2, s.want_c *= 2;
            go(s);
        }
}

/* One rank divides once, by the factor, whatever else is set. */
static void test_one_rank(void **state)
{
    (void)state;
    for (int k = 0; k < 8; k++) {
        setting s = {.ranks = 1, .factor = k % 2 ? 4.0 : 0.0, .force = k / 2 % 2, .halves = k / 4};
        s.want_a = s.want_b = s.want_c = k % 2 ? 0.25 : 1.0;
        go(s);
    }
}

/* Absent on some ranks: zeros there. Absent on all: none, or zeros where that is asked for. */
static void test_presence(void **state)
{
    (void)state;
    for (int replicas = 0; replicas <= 4; replicas = replicas ? 2 * replicas : 2) {
        setting s = {.ranks = 4, .replicas = replicas, .scaled = 1};
        s.want_a = s.want_b = 2.5;
        s.skip_c = 1 << 1 | 1 << 2;
        s.want_c = (1 + 4) / 4.0;
        go(s);
        s.skip_c = 15;
        s.want_c = NAN;
        go(s);
        s.unused = 1;
        s.want_c = 0.0;
        go(s);
        s.twice = 1; /* and once more beside what is there */
        s.want_a = s.want_b = 5.0;
        s.skip_b = 15;
        s.want_b = 0.0;
        go(s);
        s.unused = 0;
        s.want_b = s.want_c = NAN;
        go(s);
    }
    setting one = {.ranks = 1, .unused = 1, .skip_c = 1, .want_a = 1, .want_b = 1, .want_c = 0};
    go(one);
}

/* ---- how many at once
 * ------------------------------------------------------------------------------ */

static fsdp_status set_buffers(net_run *r, net *n)
{
    const int64_t *peak = r->arg;
    EXPECT(fsdp_set_reduce_scatter_max_input_buffers(n->block[1], (int)peak[8], 1) == FSDP_OK);
    return FSDP_OK;
}

static fsdp_status peak_of(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    ((int64_t *)r->arg)[fsdp_rank()] = s.peak[FSDP_GRADIENTS];
    fsdp_memory_reset_peak();
    return FSDP_OK;
}

/* The largest of the tree counts; each more holds a block's whole gradients more, and no bit of the
 * result changes. */
static void test_buffers(void **state)
{
    (void)state;
    net_run first = {0};
    int64_t before = 0;
    for (int n = 1; n <= 4; n++)
        for (int hybrid = 0; hybrid < 2; hybrid++) {
            int64_t peak[9] = {0};
            peak[8] = n;
            net_run r = {.ranks = 4,
                         .blocks = 8,
                         .rows = 8,
                         .steps = 2,
                         .prepare = set_buffers,
                         .look = peak_of,
                         .arg = peak,
                         .policy = FSDP_RESHARD_ALWAYS};
            r.mesh = hybrid ? NET_HYBRID : NET_SHARD;
            r.replicas = 2;
            net_go(&r);
            if (n == 1 && !hybrid)
                first = r;
            else
                net_same(&r, &first, "buffers");
            if (!hybrid && n > 1) assert_int_equal(peak[0] - before, 4 * (17 + 17 * 7 * 2 + 7));
            if (!hybrid) before = peak[0];
            if (n > 1 || hybrid) net_free(&r);
        }
    net_free(&first);
}

static void test_refused(void **state)
{
    (void)state;
    net *n = net_create(1);
    assert_non_null(n);
    check_ok(fsdp_fully_shard(&n->base, NULL));
    for (int k = 0; k < 7; k++) {
        fsdp_status s = k == 0   ? fsdp_set_reduce_scatter_max_input_buffers(&n->base, 0, 1)
                        : k == 1 ? fsdp_set_gradient_divide_factor(&n->base, -1.0, 1)
                        : k == 2 ? fsdp_set_gradient_divide_factor(&n->base, NAN, 1)
                        : k == 3 ? fsdp_set_gradient_divide_factor(&n->base, INFINITY, 1)
                        : k == 4 ? fsdp_set_requires_all_reduce(NULL, 0, 1)
                        : k == 5 ? fsdp_set_reduce_scatter_unused_params(NULL, 0, 1)
                                 : fsdp_set_force_sum_reduction_for_comms(n->block[0], 1);
        assert_int_equal(s, FSDP_INVALID_ARGUMENT);
        fsdp_error_clear();
    }
    fsdp_module_free(&n->base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rule),     cmocka_unit_test(test_factor),
        cmocka_unit_test(test_one_rank), cmocka_unit_test(test_presence),
        cmocka_unit_test(test_buffers),  cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
