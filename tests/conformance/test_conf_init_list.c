/*
 * test_conf_init_list.c - upstream's test_fully_shard_init.py, what it says of lists of modules and
 * of parameters that come late.
 */
#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- lists -------------------------------------------------------------------------- */

static fsdp_status list_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(4, 4);
    CHECK(m);
    fsdp_module *first = fsdp_module_find(m, "0.in_proj");
    /* 1 is named together with a module below it, which is dropped; 0's first half is taken
     * already. */
    fsdp_module *list[] = {fsdp_module_child(m, 0), fsdp_module_child(m, 1),
                           fsdp_module_find(m, "1.out_proj"), fsdp_module_child(m, 3)};
    CHECK_OK(fsdp_fully_shard(first, NULL));
    CHECK_OK(fsdp_fully_shard_list(list, 4, NULL));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    fsdp__unit *u = fsdp__unit_of(list[0]);
    CHECK(u && u == fsdp__unit_of(list[1]) && u == fsdp__unit_of(list[3]));
    CHECK(!fsdp__unit_of(list[2]) && fsdp__unit_of(first) != u);
    CHECK(u->n_modules == 3);
    static const char *const names[] = {
        "0.out_proj.weight", "0.out_proj.bias", "1.in_proj.weight", "1.in_proj.bias",
        "1.out_proj.weight", "1.out_proj.bias", "3.in_proj.weight", "3.in_proj.bias",
        "3.out_proj.weight", "3.out_proj.bias"};
    CHECK(u->n_params == 10);
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
    fsdp_scope_end(scope);
    for (int i = 0; i < 10; i++) {
        CHECK(!strcmp(u->params[i].param->name, names[i]));
        CHECK(fsdp_grad(u->params[i].sharded));
    }
    CHECK(!strcmp(u->name, "0, 1, 3"));
    CHECK(fsdp__unit_of(m)->n_params == 4); /* module 2 */
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A list manages all that its modules hold, but what is taken already; modules below others count
 * with them. */
static void test_managed_modules_list_of_mlps(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], list_rank, NULL);
}

static fsdp_status shared_list_rank(void *arg)
{
    (void)arg;
    conf_lm *m = conf_lm_create(1, 1);
    CHECK(m);
    fsdp_module *list[] = {m->norm, m->output, m->tok};
    CHECK_OK(fsdp_fully_shard_list(list, 3, NULL));
    fsdp__unit *u = fsdp__unit_of(m->tok);
    CHECK(u && u->n_params == 3); /* norm's two, and the tied weight once */
    CHECK_OK(fsdp_fully_shard(&m->base, NULL));
    for (int i = 0; i < fsdp__unit_of(&m->base)->n_params; i++)
        CHECK(fsdp__unit_of(&m->base)->params[i].param != fsdp_module_param(m->tok, "weight"));
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* The states of a list are those of all its modules, shared ones once. */
static void test_managed_states_list_of_mlps(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], shared_list_rank, NULL);
}

/* Parameters of a list have their paths from the root; the unit has its modules' paths. */
static void test_get_param_module_infos_list_of_mlps(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_processes(worlds[i], list_rank, NULL);
}

static fsdp_status list_root_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(2, 4);
    CHECK(m);
    fsdp_module *list[] = {fsdp_module_child(m, 0), fsdp_module_child(m, 1)};
    CHECK_OK(fsdp_fully_shard_list(list, 2, NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK(!fsdp_call(m, conf_input(2, 4, 0)));
    CHECK_OK(conf_error(FSDP_INVALID_STATE, "cannot be the root"));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A list cannot be the root: its first forward without one says so. */
static void test_fully_shard_multi_module_root(void)
{
    conf_ranks(1, list_root_rank, NULL);
}

/* ---- on meta ------------------------------------------------------------------------ */

static fsdp_status meta_rank(void *arg)
{
    (void)arg;
    CHECK_OK(fsdp_device_push(FSDP_META));
    fsdp_module *m = conf_mlps_create(2, 4);
    fsdp_device_pop();
    CHECK(m);
    CHECK_OK(conf_shard_children(&(conf_parity){.options = fsdp_shard_defaults(NULL)}, m));
    fsdp_tensor *x = conf_input(2, 4, 0);
    CHECK(!fsdp_call(m, x));
    CHECK_OK(conf_error(FSDP_INVALID_STATE, "0.in_proj.weight, 0.in_proj.bias, 0.out_proj.weight"));
    CHECK_OK(fsdp_to_empty(fsdp_module_child(m, 0), FSDP_CPU));
    CHECK(!fsdp_call(m, x));
    CHECK_OK(conf_error(FSDP_INVALID_STATE, "1.in_proj.weight, 1.in_proj.bias, 1.out_proj.weight"));
    CHECK_OK(fsdp_to_empty(m, FSDP_CPU)); /* memory without values: said by the first read */
    CHECK(!fsdp_call(m, x));
    CHECK_OK(conf_error(FSDP_INVALID_STATE, "0.in_proj.weight"));
    CHECK_OK(fsdp_reset_iteration(m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK(fsdp_call(m, x));
    fsdp_scope_end(scope);
    fsdp_release(x);
    fsdp_module_free(m);
    return FSDP_OK;
}

static fsdp_status meta_all_rank(void *arg)
{
    (void)arg;
    CHECK_OK(fsdp_device_push(FSDP_META));
    fsdp_module *m = conf_mlps_create(2, 4);
    fsdp_device_pop();
    CHECK(m);
    CHECK_OK(conf_shard_children(&(conf_parity){.options = fsdp_shard_defaults(NULL)}, m));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_call(m, conf_input(2, 4, 0));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return fsdp_error();
}

/* A forward on meta lists what is there still, on every rank; memory without values is told apart.
 */
static void test_invalid_meta_device_init(void)
{
    conf_ranks(1, meta_rank, NULL);
    for (int i = 0; i < WORLDS; i++)
        conf_refused(worlds[i], meta_all_rank, NULL, FSDP_INVALID_STATE,
                     "1.out_proj.weight, 1.out_proj.bias");
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_managed_modules_list_of_mlps),
        CONF_TEST(test_managed_states_list_of_mlps),
        CONF_TEST(test_get_param_module_infos_list_of_mlps),
        CONF_TEST(test_fully_shard_multi_module_root),
        CONF_TEST(test_invalid_meta_device_init),
    };
    return conf_main("init", tests, sizeof tests / sizeof *tests, argc, argv);
}
