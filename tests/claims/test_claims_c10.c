/*
 * test_claims_c10.c - C10: the gradient norm is the whole gradient's, whatever the cut, by one
 * small all-reduce a mesh axis, and clipping brings it to max_norm * n / (n + 1e-6).
 *
 * Gradients are small integers set by hand, so the norm has a closed form. The parameters: uneven
 * ones, one of which some ranks hold nothing, a frozen one, one that two modules share, one without
 * a gradient, one that is not cut. (RC-08.)
 */
#include "sharded_net.h"

typedef struct holder {
    fsdp_module base;
} holder;

static fsdp_tensor *holder_forward(fsdp_module *self, fsdp_tensor *x)
{
    (void)self;
    return x;
}

static fsdp_module *holder_create(void)
{
    holder *h = (holder *)fsdp_module_create(sizeof *h, "Holder");
    if (h) h->base.forward1 = holder_forward;
    return h ? &h->base : NULL;
}

static fsdp_param *add(fsdp_module *m, const char *name, int ndim, const int64_t *sizes)
{
    fsdp_init_rule zero = {FSDP_INIT_ZEROS, 0, 0};
    return fsdp_module_add_param(m, name, fsdp_param_create(FSDP_F32, ndim, sizes, zero));
}

/* up: matrix (7,5), vector (257), one (1), frozen (6,3); down: shared (3,4), also up's, absent (9).
 */
static fsdp_module *make_model(void)
{
    fsdp_module *m = holder_create();
    fsdp_module *up = fsdp_module_add(m, "up", holder_create());
    fsdp_module *down = fsdp_module_add(m, "down", holder_create());
    add(up, "matrix", 2, SIZES(7, 5));
    add(up, "vector", 1, SIZES(257));
    add(up, "one", 1, SIZES(1));
    fsdp_param_requires_grad_(add(up, "frozen", 2, SIZES(6, 3)), 0);
    fsdp_param *shared = add(down, "shared", 2, SIZES(3, 4));
    fsdp_module_add_param(up, "shared", fsdp_param_retain(shared));
    add(down, "absent", 1, SIZES(9));
    add(down, "ignored", 1, SIZES(5));
    return fsdp_error() ? NULL : m;
}

/* Of element i of the whole of a parameter of n elements. */
static double value(int64_t n, int64_t i)
{
    return (double)((i * 7 + n) % 11) - 5.0;
}

/* What every element counts to, by the definition. */
static double closed_form(double p)
{
    static const int64_t numel[] = {35, 257, 1, 12, 5};
    double s = 0;
    for (int k = 0; k < 5; k++)
        for (int64_t i = 0; i < numel[k]; i++) {
            double a = fabs(value(numel[k], i));
            s = isinf(p) ? fmax(s, a) : s + pow(a, p);
        }
    return isinf(p) ? s : pow(s, 1 / p);
}

/* The whole gradient, of which this rank keeps its part. */
static fsdp_status set_grad(fsdp_param *q)
{
    fsdp_tensor *t = fsdp_param_tensor(q);
    const int64_t *size = fsdp_param_sizes(q);
    int ndim = fsdp_param_ndim(q), dim = 0;
    int64_t numel = size[0] * (ndim > 1 ? size[1] : 1), row0 = 0;
    fsdp_mesh *mesh = fsdp_is_dtensor(t) ? fsdp_dtensor_mesh(t) : NULL;
    int axis = mesh ? fsdp_mesh_ndim(mesh) - 1 : 0;
    if (mesh) {
        dim = fsdp_dtensor_placement(t, axis).dim;
        int n = fsdp_mesh_size(mesh, axis);
        row0 = (int64_t)fsdp_mesh_coordinate(mesh, axis) * ((size[dim] + n - 1) / n);
    }
    fsdp_tensor *g = fsdp_zeros(FSDP_F32, ndim, fsdp_sizes(t));
    EXPECT(g);
    float *x = fsdp_data(g);
    int64_t cols = ndim > 1 ? fsdp_size(g, 1) : 1, whole_cols = ndim > 1 ? size[1] : 1;
    for (int64_t i = 0; i < fsdp_numel(g); i++) {
        int64_t r = i / cols + (dim == 0 ? row0 : 0), c = i % cols + (dim == 1 ? row0 : 0);
        x[i] = (float)value(numel, r * whole_cols + c);
    }
    return fsdp_set_grad(t, g);
}

typedef struct way {
    int ranks, replicas, dim1;
} way;

static int second_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    return fsdp_param_ndim(p) > 1 ? 1 : 0;
}

static fsdp_status set_grads(fsdp_module *m)
{
    fsdp_module *up = fsdp_module_find(m, "up"), *down = fsdp_module_find(m, "down");
    FSDP_TRY(set_grad(fsdp_module_param(up, "matrix")));
    FSDP_TRY(set_grad(fsdp_module_param(up, "vector")));
    FSDP_TRY(set_grad(fsdp_module_param(up, "one")));
    FSDP_TRY(set_grad(fsdp_module_param(down, "shared")));
    return set_grad(fsdp_module_param(down, "ignored"));
}

static fsdp_status rank_main(void *arg)
{
    const way *w = arg;
    static const double p[] = {1, 2, 3, INFINITY};
    const char *names[] = {"replicate", "shard"};
    int sizes[] = {w->replicas, w->ranks / w->replicas};
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
    fsdp_module *m = make_model();
    EXPECT(mesh && m);
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    if (w->dim1) o.placement_fn = second_dim;
    fsdp_param *ignored = fsdp_module_param(fsdp_module_find(m, "down"), "ignored");
    o.ignored_params = &ignored;
    o.n_ignored = 1;
    EXPECT(fsdp_fully_shard(m, &o) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    for (int k = 0; k < 4; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        double n = 0, again = 0, expected = closed_form(p[k]);
        EXPECT(set_grads(m) == FSDP_OK);
        fsdp_memory_stats before, after;
        fsdp_memory_get(&before);
        fsdp_comm_count_reset();
        EXPECT(fsdp_grad_norm(m, p[k], &n) == FSDP_OK);
        fsdp_comm_count c = fsdp_comm_count_total(FSDP_LANE_CONTROL, FSDP_ALL_REDUCE);
        fsdp_memory_get(&after);
        EXPECT(fabs(n / expected - 1) < 1e-6);
        /* One all-reduce over the axis that cuts, of a number a row; none where nothing is cut. */
        EXPECT(c.calls == (sizes[1] > 1) && c.elements <= 2 * (7 + 257 + 1 + 6 + 3 + 9 + 5));
        EXPECT(after.allocations - before.allocations <= 1); /* what the message is staged in */
        EXPECT(fsdp_clip_grads_with_norm(m, 2.5, n) == FSDP_OK);
        EXPECT(fsdp_grad_norm(m, p[k], &again) == FSDP_OK);
        EXPECT(fabs(again / (2.5 * n / (n + 1e-6)) - 1) < 1e-6);
        /* The same number on all ranks, to the bit. */
        double all[8];
        EXPECT(fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, &n, all, sizeof n, NULL) ==
               FSDP_OK);
        for (int r = 0; r < w->ranks; r++)
            EXPECT(all[r] == n);
        /* A bound above the norm changes nothing. */
        EXPECT(set_grads(m) == FSDP_OK);
        EXPECT(fsdp_clip_grad_norm(m, 1e6, NULL) == FSDP_OK);
        EXPECT(fsdp_grad_norm(m, p[k], &again) == FSDP_OK && again == n);
        fsdp_scope_end(scope);
    }
    EXPECT(!fsdp_grad(fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "up"), "frozen"))));
    EXPECT(!fsdp_grad(fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "down"), "absent"))));
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_c10(void **state)
{
    (void)state;
    static const way ways[] = {{1, 1, 0}, {2, 1, 0}, {3, 1, 0}, {4, 1, 0}, {8, 1, 0},
                               {4, 2, 0}, {8, 2, 0}, {4, 4, 0}, {4, 1, 1}, {4, 2, 1}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        way w = ways[i];
        fsdp_status s = fsdp_run_threads(w.ranks, rank_main, &w);
        char text[1024];
        snprintf(text, sizeof text, "%s", fsdp_error_text());
        fsdp_error_clear();
        if (s != FSDP_OK) fail_msg("%d ranks, %d replicas: %s", w.ranks, w.replicas, text);
    }
}

/* An infinity on one rank: the same verdict on all, and nothing is modified. */
static fsdp_status bad_rank(void *arg)
{
    const int *bad = arg;
    fsdp_module *m = make_model();
    fsdp_scope *scope = fsdp_scope_begin();
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    EXPECT(set_grads(m) == FSDP_OK);
    fsdp_tensor *g =
        fsdp_grad(fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "up"), "vector")));
    float *x = fsdp_data(g), first = x[0];
    if (fsdp_rank() == *bad) x[fsdp_numel(g) - 1] = NAN;
    double n = 0;
    EXPECT(fsdp_grad_norm(m, 2, &n) == FSDP_OK && isnan(n));
    EXPECT(fsdp_grad_norm(m, INFINITY, &n) == FSDP_OK && isnan(n));
    EXPECT(x[0] == first);
    fsdp_status s = fsdp_clip_grad_norm(m, 1, &n);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return s;
}

static void test_non_finite(void **state)
{
    (void)state;
    for (int bad = 0; bad < 4; bad += 3) {
        assert_int_equal(fsdp_run_threads(4, bad_rank, &bad), FSDP_NON_FINITE);
        check_error(FSDP_NON_FINITE, "no gradient was scaled and no weight changed");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c10),
                                       cmocka_unit_test(test_non_finite)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
