/*
 * test_conf_optim.c - rows of upstream's files test_fully_shard_clip_grad_norm_.py and
 * test_fully_shard_grad_scaler.py.
 */
#include "nets.h"

/* ---- clip_grad_norm_ ---------------------------------------------------------------------- */

static const double norms[] = {2, 1, INFINITY};
static const int64_t most = 1; /* max_norm */

static fsdp_status backward(fsdp_module *m)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = fsdp_backward(fsdp_scale(conf_loss(fsdp_call(m, conf_tokens(2, 0))), 50.0));
    fsdp_scope_end(scope);
    return s;
}

static double norm_of(const conf_numbers *g, double p)
{
    double s = 0;
    for (int64_t i = 0; i < g->n; i++)
        s = isinf(p) ? fmax(s, fabs(g->v[i])) : s + pow(fabs(g->v[i]), p);
    return isinf(p) ? s : pow(s, 1 / p);
}

/* One norm on one way of cutting; the reference is an unsharded model with averaged gradients. */
static fsdp_status clip_once(double p, fsdp_mesh *mesh)
{
    conf_lm *plain = conf_lm_create(3, 1), *m = conf_lm_create(3, 1);
    CHECK(plain && m);
    conf_parity how = {.options = fsdp_shard_defaults(mesh)};
    how.options.placement_fn = conf_largest_dim;
    CHECK_OK(fsdp_reset_parameters(&plain->base, 42));
    CHECK_OK(conf_shard_blocks(&how, &m->base));
    CHECK_OK(fsdp_reset_parameters(&m->base, 42));
    CHECK_OK(backward(&plain->base));
    CHECK_OK(conf_average_grads(&plain->base));
    CHECK_OK(backward(&m->base));
    conf_numbers whole, clipped;
    CHECK_OK(conf_collect(&plain->base, 1, &whole));
    double reference = norm_of(&whole, p), norm = 0, all[8];
    CHECK(reference > (double)most);
    fsdp_comm_count_reset();
    CHECK_OK(fsdp_grad_norm(&m->base, p, &norm));
    /* One all-reduce a mesh axis over which something is cut, and one axis is. */
    CHECK(conf_calls(FSDP_LANE_CONTROL, FSDP_ALL_REDUCE) == 1);
    CHECK_OK(fsdp_clip_grads_with_norm(&m->base, (double)most, norm));
    CHECK(fabs(norm / reference - 1) < 1e-6);
    CHECK_OK(fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, &norm, all, sizeof norm, NULL));
    for (int r = 0; r < fsdp_world_size(); r++)
        CHECK(all[r] == norm);
    CHECK_OK(conf_collect(&m->base, 1, &clipped));
    CHECK(fabs(norm_of(&clipped, p) / ((double)most * norm / (norm + 1e-6)) - 1) < 1e-6);
    free(whole.v);
    free(clipped.v);
    fsdp_module_free(&plain->base);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

static fsdp_status clip_rank(void *arg)
{
    (void)arg;
    for (int k = 0; k < 3; k++) {
        CHECK_OK(clip_once(norms[k], NULL));
        if (fsdp_world_size() == 4) CHECK_OK(clip_once(norms[k], conf_hybrid_mesh(2)));
    }
    return FSDP_OK;
}

static void test_clip_grad_norm_1d(void)
{
    conf_processes(2, clip_rank, NULL);
    conf_processes(4, clip_rank, NULL);
}

/* ---- grad_scaler ----------------------------------------------------------------------------- */

/* The gradient of the weight that rank `bad` holds a part of gets an infinity there. */
static fsdp_status spoil(fsdp_module *m, int bad)
{
    fsdp_tensor *g =
        fsdp_grad(fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "0.in_proj"), "weight")));
    CHECK(g);
    if (fsdp_rank() != bad) return FSDP_OK;
    CHECK(fsdp_numel(g) > 0);
    ((float *)fsdp_data(g))[fsdp_numel(g) - 1] = INFINITY;
    fsdp_touch(g);
    return FSDP_OK;
}

static fsdp_status step_once(fsdp_module *m, fsdp_grad_scaler *s)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *l = conf_loss(fsdp_call(m, conf_input(4, 6, 0)));
    fsdp_status st = fsdp_backward(fsdp_grad_scaler_scale(s, l));
    fsdp_scope_end(scope);
    return st;
}

static fsdp_status scaler_on(fsdp_mesh *mesh)
{
    fsdp_module *m = conf_mlps_create(3, 6);
    CHECK(m);
    conf_parity how = {.options = fsdp_shard_defaults(mesh)};
    CHECK_OK(conf_shard_children(&how, m));
    CHECK_OK(fsdp_reset_parameters(m, 42));
    fsdp_scaler_options so = {4.0, 2.0, 0.25, 1};
    fsdp_grad_scaler *s = fsdp_grad_scaler_create(&so);
    fsdp_adamw_options ao = {1e-2, 0.9, 0.999, 1e-8, 0};
    fsdp_optimizer *o = fsdp_adamw(m, &ao);
    CHECK(s && o);
    conf_numbers before, scaled, plain, after;
    /* Unscaling takes the scale out of the gradients: exactly, since it is a power of two. */
    CHECK_OK(step_once(m, s));
    CHECK_OK(conf_collect(m, 1, &scaled));
    int found = -1;
    fsdp_comm_count_reset();
    CHECK_OK(fsdp_grad_scaler_unscale(s, o, &found));
    int axes = mesh ? fsdp_mesh_ndim(mesh) : 1;
    CHECK(conf_calls(FSDP_LANE_CONTROL, FSDP_ALL_REDUCE) == axes);
    CHECK_OK(conf_collect(m, 1, &plain));
    for (int64_t i = 0; i < plain.n; i++)
        CHECK(plain.v[i] == scaled.v[i] / 4);
    CHECK(found == 0);
    /* An infinity on one rank: nobody steps, and all take the scale back. */
    CHECK_OK(conf_collect(m, 0, &before));
    CHECK_OK(fsdp_grad_scaler_update(s));
    CHECK(fsdp_grad_scaler_get_scale(s) == 8); /* it grew: interval 1 */
    CHECK_OK(spoil(m, fsdp_world_size() - 1));
    int stepped = -1;
    CHECK_OK(fsdp_grad_scaler_step(s, o, &stepped));
    CHECK(stepped == 0 && fsdp_optimizer_step_count(o) == 0);
    CHECK_OK(conf_collect(m, 0, &after));
    CHECK(conf_distance(&after, &before) == 0);
    CHECK_OK(fsdp_grad_scaler_update(s));
    CHECK(fsdp_grad_scaler_get_scale(s) == 2);
    /* The next step is a good one. */
    CHECK_OK(fsdp_zero_grad(m));
    CHECK_OK(step_once(m, s));
    CHECK_OK(fsdp_grad_scaler_step(s, o, &stepped));
    CHECK_OK(fsdp_grad_scaler_update(s));
    CHECK(stepped == 1 && fsdp_optimizer_step_count(o) == 1 && fsdp_grad_scaler_get_scale(s) == 4);
    free(before.v);
    free(after.v);
    free(scaled.v);
    free(plain.v);
    fsdp_optimizer_free(o);
    fsdp_grad_scaler_free(s);
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status scaler_rank(void *arg)
{
    (void)arg;
    CHECK_OK(scaler_on(NULL));
    return fsdp_world_size() == 4 ? scaler_on(conf_hybrid_mesh(2)) : FSDP_OK;
}

static void test_gradient_scaler(void)
{
    conf_processes(2, scaler_rank, NULL);
    conf_processes(4, scaler_rank, NULL);
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_clip_grad_norm_1d),
        CONF_TEST_OF(grad_scaler, test_gradient_scaler),
    };
    return conf_main("clip_grad_norm_", tests, sizeof tests / sizeof *tests, argc, argv);
}
