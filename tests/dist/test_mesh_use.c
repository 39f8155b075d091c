/*
 * test_mesh_use.c - meshes, their slices and what is sharded over them, asked from outside; norms
 * where a part of the model is sharded; memory that peers read; calls that are given NULL.
 */
#include "sharded_net.h"

static void on(int ranks, fsdp_status (*fn)(void *arg))
{
    check_ok(fsdp_run_threads(ranks, fn, NULL));
}

/* ---- meshes ------------------------------------------------------------------ */

static fsdp_status slices(void *arg)
{
    (void)arg;
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {2, 3};
    fsdp_mesh *m = fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
    EXPECT(m && !fsdp_mesh_parent(m) && fsdp_mesh_axis(m, "shard") == 1);
    EXPECT(fsdp_mesh_coordinate(m, 0) == fsdp_rank() / 3);
    EXPECT(fsdp_mesh_coordinate(m, 1) == fsdp_rank() % 3);
    for (int a = 0; a < 2; a++) {
        fsdp_mesh *s = fsdp_mesh_slice(m, names[a]);
        EXPECT(s && fsdp_mesh_parent(s) == m && fsdp_mesh_ndim(s) == 1);
        EXPECT(fsdp_mesh_size(s, 0) == sizes[a] && !strcmp(fsdp_mesh_axis_name(s, 0), names[a]));
        EXPECT(fsdp_mesh_coordinate(s, 0) == fsdp_mesh_coordinate(m, a));
        EXPECT(fsdp_mesh_group(s, 0) == fsdp_mesh_group(m, a));
        char *text = fsdp_mesh_print(s);
        EXPECT(text);
        int right = strstr(text, a ? "rank 4: shard 1," : "rank 4: replicate 1,") != NULL;
        free(text);
        EXPECT(right);
    }
    EXPECT(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL) == FSDP_OK);
    if (fsdp_mesh_slice(m, "tp")) return fsdp__fail(FSDP_INTERNAL, "there is no axis tp");
    return check_failed(FSDP_NOT_FOUND, "there are: replicate, shard");
}

/* Along an axis that a slice leaves out nobody would sum: replicas would drift apart. */
static fsdp_status slice_alone(void *arg)
{
    (void)arg;
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {2, 2};
    fsdp_mesh *m = fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
    EXPECT(m);
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_slice(m, "shard"));
    fsdp_module *l = fsdp_linear_create(3, 3, 0);
    EXPECT(l && fsdp_fully_shard(l, &o) == FSDP_OK && fsdp_reset_parameters(l, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(l, fsdp_zeros(FSDP_F32, 2, SIZES(2, 3)));
    fsdp_scope_end(scope);
    fsdp_module_free(l);
    return y ? FSDP_OK : fsdp_error();
}

static fsdp_status slice_of_one(void *arg)
{
    (void)arg;
    const char *names[] = {"replicate", "shard", "tp"};
    const int sizes[] = {1, 2, 2};
    fsdp_mesh *m = fsdp_mesh_create(FSDP_CPU, 3, sizes, names);
    EXPECT(m);
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_slice(m, "shard"));
    fsdp_module *l = fsdp_linear_create(3, 5, 0);
    EXPECT(l && fsdp_fully_shard(l, &o) == FSDP_OK);
    fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(l, "weight"));
    EXPECT(fsdp_is_dtensor(w) && fsdp_dtensor_mesh(w) == o.mesh && fsdp_dtensor_ndim(w) == 2);
    EXPECT(fsdp_dtensor_sizes(w)[0] == 5 && fsdp_size(w, 0) == (fsdp_rank() / 2 ? 2 : 3));
    EXPECT(fsdp_dtensor_placement(w, 0).kind == FSDP_SHARD);
    fsdp_module_free(l);
    return FSDP_OK;
}

static void test_slices(void **state)
{
    (void)state;
    on(6, slices);
    on(4, slice_of_one);
    assert_int_equal(fsdp_run_threads(4, slice_alone, NULL), FSDP_UNSUPPORTED);
    check_error(FSDP_UNSUPPORTED, "\"replicate\" 2");
}

/* ---- norms --------------------------------------------------------------------- */

/* Whole parameters, before and behind those that are cut, count once. */
static fsdp_status partly_sharded(void *arg)
{
    (void)arg;
    const char *names[] = {"a", "b", "c"};
    fsdp_module *m = fsdp_sequential_create();
    for (int i = 0; i < 3; i++)
        fsdp_module_add(m, names[i], fsdp_linear_create(2, 2, 0));
    EXPECT(m && fsdp_reset_parameters(m, 1) == FSDP_OK);
    EXPECT(fsdp_fully_shard(fsdp_module_child(m, 1), NULL) == FSDP_OK);
    fsdp_param_list l;
    EXPECT(fsdp_module_params(m, &l) == FSDP_OK);
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *t = fsdp_param_tensor(l.items[i].param);
        fsdp_tensor *g = fsdp_full(FSDP_F32, fsdp_ndim(t), fsdp_sizes(t), 1.0);
        fsdp_set_grad(t, g);
        fsdp_release(g);
    }
    fsdp_param_list_free(&l);
    double two = 0, most = 0;
    EXPECT(fsdp_grad_norm(m, 2.0, &two) == FSDP_OK);
    EXPECT(fsdp_grad_norm(m, INFINITY, &most) == FSDP_OK);
    fsdp_module_free(m);
    EXPECT(two == sqrt(12.0) && most == 1.0);
    return FSDP_OK;
}

static void test_partly_sharded(void **state)
{
    (void)state;
    for (int n = 1; n <= 4; n++)
        on(n, partly_sharded);
}

/* ---- steering -------------------------------------------------------------------- */

static fsdp_status kept_or_freed(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(3, 5, 0);
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_param *w = fsdp_module_param(m, "weight");
    EXPECT(fsdp_param_requires_grad(w));
    EXPECT(fsdp_param_requires_grad_(w, 0) == FSDP_OK && !fsdp_param_requires_grad(w));
    for (int k = 0; k < 4; k++) {
        fsdp_scope *scope = fsdp_scope_begin();
        /* The first call makes the root, which is kept by default. */
        if (k) EXPECT(fsdp_set_reshard_after_forward(m, k % 2, 1) == FSDP_OK);
        EXPECT(fsdp_call(m, fsdp_zeros(FSDP_F32, 2, SIZES(2, 3))));
        EXPECT(fsdp_is_dtensor(fsdp_param_tensor(w)) == (k % 2 == 1));
        EXPECT(fsdp_reshard(m) == FSDP_OK && fsdp_is_dtensor(fsdp_param_tensor(w)));
        fsdp_scope_end(scope);
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_kept_or_freed(void **state)
{
    (void)state;
    on(1, kept_or_freed);
    on(3, kept_or_freed);
}

/* ---- a unit that runs twice --------------------------------------------------------- */

typedef struct twice {
    fsdp_module base;
    fsdp_module *in, *inner, *out;
} twice;

static fsdp_tensor *twice_forward(fsdp_module *self, fsdp_tensor *x)
{
    twice *t = (twice *)self;
    fsdp_tensor *h = fsdp_call(t->in, x);
    for (int i = 0; i < 3; i++)
        h = fsdp_tanh(fsdp_call(t->inner, h));
    return fsdp_call(t->out, h);
}

static twice *twice_create(void)
{
    twice *t = (twice *)fsdp_module_create(sizeof *t, "Twice");
    if (!t) return NULL;
    t->base.forward1 = twice_forward;
    t->in = fsdp_module_add(&t->base, "in", fsdp_linear_create(5, 7, 1));
    t->inner = fsdp_module_add(&t->base, "inner", fsdp_linear_create(7, 7, 1));
    t->out = fsdp_module_add(&t->base, "out", fsdp_linear_create(7, 1, 0));
    return t;
}

/* The gradient of the module that runs thrice: whole, and as the ranks' mean. All ranks compute the
 * same rows, so the two are one number up to rounding. */
static fsdp_status runs_thrice(void *arg)
{
    double g[2][49];
    for (int sharded = 0; sharded < 2; sharded++) {
        fsdp_scope *scope = fsdp_scope_begin();
        twice *t = twice_create();
        EXPECT(t);
        fsdp_shard_options o = fsdp_shard_defaults(NULL);
        o.reshard_after_forward = *(fsdp_reshard_policy *)arg;
        if (sharded) {
            EXPECT(fsdp_fully_shard(t->inner, &o) == FSDP_OK);
            EXPECT(fsdp_fully_shard(&t->base, &o) == FSDP_OK);
        }
        EXPECT(fsdp_reset_parameters(&t->base, 3) == FSDP_OK);
        fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(6, 5), 1, "x");
        for (int step = 0; step < 3; step++) {
            EXPECT(fsdp_zero_grad(&t->base) == FSDP_OK);
            EXPECT(fsdp_backward(fsdp_sum(fsdp_call(&t->base, x))) == FSDP_OK);
        }
        fsdp_tensor *w = fsdp_grad(fsdp_param_tensor(fsdp_module_param(t->inner, "weight")));
        EXPECT(w && fsdp_to_doubles(fsdp_dtensor_full(w), g[sharded]) == FSDP_OK);
        fsdp_scope_end(scope);
        fsdp_module_free(&t->base);
    }
    double d = net_distance(g[1], g[0], 49);
    if (!(d < 1e-5)) return fsdp__fail(FSDP_INTERNAL, "gradients differ by %g", d);
    return FSDP_OK;
}

/* A parameter that is used by hand has its gradient reduced at the end of the backward; before the
 * first forward nobody knows the tree. */
static fsdp_status by_hand(void *arg)
{
    (void)arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = fsdp_linear_create(3, 2, 0);
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1);
    for (int k = 0; k < 2; k++) {
        if (k) EXPECT(fsdp_call(m, x));
        EXPECT(fsdp_unshard(m) == FSDP_OK);
        fsdp_tensor *w = fsdp_param_tensor(fsdp_module_param(m, "weight"));
        fsdp_status s = fsdp_backward(fsdp_scale(fsdp_sum(w), 1.0 + fsdp_rank()));
        if (k) {
            FSDP_TRY(s);
            continue;
        }
        if (s == FSDP_OK) return fsdp__fail(FSDP_INTERNAL, "a gradient without a tree");
        /* A peer's words may have come first. */
        if (!strstr(fsdp_error_text(), "no forward")) return fsdp_error();
        FSDP_TRY(fsdp_reset_iteration(m));
    }
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "weight")));
    EXPECT(fsdp_world_size() > 2 || g);
    for (int64_t i = 0; i < fsdp_numel(g); i++)
        EXPECT(((const float *)fsdp_data(g))[i] == 0.5f * (1 + fsdp_world_size()));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A backward that is not the last may leave its reduction for the next one to end. */
static fsdp_status not_the_last(void *arg)
{
    (void)arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = fsdp_linear_create(3, 2, 0);
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_tensor *x = fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1.0 + fsdp_rank());
    for (int k = 0; k < 3; k++) {
        EXPECT(fsdp_set_is_last_backward(m, k == 2) == FSDP_OK);
        EXPECT(fsdp_backward(fsdp_sum(fsdp_call(m, x))) == FSDP_OK);
    }
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(fsdp_module_param(m, "weight")));
    EXPECT(g || fsdp_rank() == 2);
    for (int64_t i = 0; i < fsdp_numel(g); i++)
        EXPECT(((const float *)fsdp_data(g))[i] == 1.5f * (float)(1 + fsdp_world_size()));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void test_runs_thrice(void **state)
{
    (void)state;
    for (int n = 1; n <= 3; n++)
        on(n, by_hand);
    for (int n = 1; n <= 3; n++)
        on(n, not_the_last);
    for (fsdp_reshard_policy p = FSDP_RESHARD_AUTO; p <= FSDP_RESHARD_NEVER; p++)
        for (int n = 1; n <= 4; n++)
            check_ok(fsdp_run_threads(n, runs_thrice, &p));
}

/* ---- memory that peers read --------------------------------------------------------- */

static fsdp_status public_memory(void *arg)
{
    (void)arg;
    enum { N = 7 };
    fsdp_group *g = fsdp_group_world();
    int n = fsdp_group_size(g), chunk = (N + n - 1) / n;
    fsdp_memory_stats before, after;
    fsdp_memory_get(&before);
    float *full = fsdp_comm_alloc(g, N * sizeof *full), shard[N] = {0};
    EXPECT(full);
    fsdp_memory_get(&after);
    EXPECT(after.live_total == before.live_total + N * (int64_t)sizeof *full);
    for (int i = 0; i < N; i++)
        full[i] = (float)(i + fsdp_rank());
    fsdp_list_entry e = {1, N, 1, chunk, shard, FSDP_F32, full, FSDP_F32, 1};
    fsdp_work *w = NULL;
    EXPECT(fsdp_reduce_scatter_list(g, FSDP_LANE_REDUCE, "x", &e, 1, 1.0f, 0, &w) == FSDP_OK);
    EXPECT(fsdp_work_wait_buffers(w) == FSDP_OK && fsdp_work_wait(w) == FSDP_OK);
    for (int i = 0; i < chunk && fsdp_rank() * chunk + i < N; i++)
        EXPECT(shard[i] == (float)(n * (fsdp_rank() * chunk + i) + n * (n - 1) / 2));
    fsdp_comm_free(g, full, N * sizeof *full);
    void *none = fsdp_comm_alloc(g, 0);
    EXPECT(none);
    fsdp_comm_free(g, none, 0);
    fsdp_comm_free(g, NULL, 4);
    EXPECT(fsdp_barrier(g, FSDP_LANE_CONTROL) == FSDP_OK);
    if (fsdp_comm_alloc(g, -1)) return fsdp__fail(FSDP_INTERNAL, "-1 bytes");
    return check_failed(FSDP_INVALID_ARGUMENT, "-1 bytes");
}

static void test_public_memory(void **state)
{
    (void)state;
    on(1, public_memory);
    on(3, public_memory);
}

/* ---- NULL ----------------------------------------------------------------------------- */

/* A call that needs something keeps an error; behind another error it adds nothing. */
#define NULL_IS_KEPT(call)                             \
    do {                                               \
        assert_int_equal(call, FSDP_INVALID_ARGUMENT); \
        check_error(FSDP_INVALID_ARGUMENT, "NULL");    \
        fsdp__fail(FSDP_NOT_FOUND, "the cause");       \
        assert_int_equal(call, FSDP_NOT_FOUND);        \
        check_error(FSDP_NOT_FOUND, "the cause");      \
    } while (0)

static void test_null(void **state)
{
    (void)state;
    double x;
    fsdp_param_list l;
    NULL_IS_KEPT(fsdp_fill_(NULL, 0));
    NULL_IS_KEPT(fsdp_copy_(NULL, NULL));
    NULL_IS_KEPT(fsdp_accumulate_(NULL, NULL));
    NULL_IS_KEPT(fsdp_to_doubles(NULL, &x));
    NULL_IS_KEPT(fsdp_requires_grad_(NULL, 1));
    NULL_IS_KEPT(fsdp_set_grad(NULL, NULL));
    NULL_IS_KEPT(fsdp_register_hook(NULL, NULL, NULL));
    NULL_IS_KEPT(fsdp_register_post_accumulate_hook(NULL, NULL, NULL));
    NULL_IS_KEPT(fsdp_param_requires_grad_(NULL, 1));
    NULL_IS_KEPT(fsdp_module_params(NULL, &l));
    NULL_IS_KEPT(fsdp_module_add_buffer(NULL, "x", NULL));
    NULL_IS_KEPT(fsdp_set_requires_gradient_sync(NULL, 1, 1));
    NULL_IS_KEPT(fsdp_set_gradient_divide_factor(NULL, 1, 1));
    NULL_IS_KEPT(fsdp_set_reshard_after_forward(NULL, 1, 1));
    NULL_IS_KEPT(fsdp_mark_changed(NULL));
    assert_null(fsdp_module_add(NULL, "x", fsdp_linear_create(2, 2, 0)));
    check_error(FSDP_INVALID_ARGUMENT, "the module is NULL");
    assert_null(fsdp_module_add_param(NULL, "x", NULL));
    check_error(FSDP_INVALID_ARGUMENT, "the module is NULL");
    assert_int_equal(fsdp_register_forward_hook(NULL, NULL, NULL, 0), -1);
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    assert_int_equal(fsdp_register_forward_pre_hook(NULL, NULL, NULL, 0), -1);
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    assert_int_equal(fsdp_module_numel(NULL), 0);
    assert_int_equal(fsdp_error(), FSDP_OK);
    assert_int_equal(fsdp_mesh_axis(NULL, "x"), -1);
    check_error(FSDP_INVALID_ARGUMENT, "the mesh is NULL");
    assert_null(fsdp_mesh_slice(NULL, "x"));
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
    assert_null(fsdp_mesh_print(NULL));
    check_error(FSDP_INVALID_ARGUMENT, "NULL");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slices),        cmocka_unit_test(test_partly_sharded),
        cmocka_unit_test(test_kept_or_freed), cmocka_unit_test(test_runs_thrice),
        cmocka_unit_test(test_public_memory), cmocka_unit_test(test_null),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
