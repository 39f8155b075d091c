/*
 * test_conf_scaler.c - the row of upstream's test_fully_shard_grad_scaler.py.
 */
#include "nets.h"

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
        CONF_TEST(test_gradient_scaler),
    };
    return conf_main("grad_scaler", tests, sizeof tests / sizeof *tests, argc, argv);
}
