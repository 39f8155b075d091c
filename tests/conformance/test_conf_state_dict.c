/*
 * test_conf_state_dict.c - upstream's test_fully_shard_state_dict.py.
 *
 * A state dict is the list of named parameters with the shard of each (fsdp_module_params and
 * fsdp_param_shard): nothing is copied or sent. It is loaded by writing into those shards and
 * saying so (fsdp_mark_changed); a whole dict is their gathered values.
 */
#include <ftw.h>

#include "nets.h"

#include "ckpt/checkpoint.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

typedef struct dict {
    int64_t dim;
    int replicas, largest, policy, offload; /* offload: 1 + conf_offload's number */
    const char *folder;
} dict;

static fsdp_shard_options dict_options(const dict *d)
{
    fsdp_shard_options o = fsdp_shard_defaults(d->replicas ? conf_hybrid_mesh(d->replicas) : NULL);
    if (d->largest) o.placement_fn = conf_largest_dim;
    if (d->offload) o.offload = conf_offload(d->offload - 1);
    return conf_policy(o, d->policy, fsdp_world_size());
}

/* Three MLPs, two of them units, of values by the seed. */
static fsdp_status dict_model(const dict *d, uint64_t seed, fsdp_module **out)
{
    fsdp_module *m = *out = conf_mlps_create(3, d->dim);
    CHECK(m);
    fsdp_shard_options o = dict_options(d);
    for (int i = 0; i < 2; i++)
        CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, i), &o));
    CHECK_OK(fsdp_fully_shard(m, &o));
    return fsdp_reset_parameters(m, seed);
}

/* The names are those of the module before sharding, each shard is a DTensor of the whole's sizes.
 */
static fsdp_status names_stay(const dict *d, fsdp_module *m)
{
    fsdp_module *plain = conf_mlps_create(3, d->dim);
    CHECK(plain);
    fsdp_param_list a, b;
    CHECK_OK(fsdp_module_params(plain, &a));
    CHECK_OK(fsdp_module_params(m, &b));
    CHECK(a.count == b.count && a.count == 12);
    for (int64_t i = 0; i < a.count; i++) {
        CHECK(!strcmp(a.items[i].name, b.items[i].name));
        CHECK(fsdp_param_shard(a.items[i].param) == fsdp_param_tensor(a.items[i].param));
        fsdp_tensor *t = fsdp_param_shard(b.items[i].param);
        CHECK(t && fsdp_is_dtensor(t));
        for (int k = 0; k < fsdp_dtensor_ndim(t); k++)
            CHECK(fsdp_dtensor_sizes(t)[k] == fsdp_param_sizes(a.items[i].param)[k]);
    }
    fsdp_param_list_free(&a);
    fsdp_param_list_free(&b);
    fsdp_module_free(plain);
    return FSDP_OK;
}

/* m's shards take over those of `from`, in place. */
static fsdp_status load(fsdp_module *m, fsdp_module *from)
{
    fsdp_param_list a, b;
    CHECK_OK(fsdp_module_params(m, &a));
    CHECK_OK(fsdp_module_params(from, &b));
    for (int64_t i = 0; i < a.count; i++) {
        fsdp_tensor *t = fsdp_param_shard(a.items[i].param);
        void *data = fsdp_data(t);
        CHECK_OK(fsdp_copy_(t, fsdp_param_shard(b.items[i].param)));
        CHECK(fsdp_param_shard(a.items[i].param) == t && fsdp_data(t) == data);
    }
    fsdp_param_list_free(&a);
    fsdp_param_list_free(&b);
    return fsdp_mark_changed(m);
}

static fsdp_status value(fsdp_module *m, int64_t dim, double *out)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    *out = fsdp_item(conf_loss(fsdp_call(m, conf_input(3, dim, 0))));
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    return fsdp_error();
}

static int remove_one(const char *path, const struct stat *s, int flag, struct FTW *f)
{
    (void)s;
    (void)flag;
    (void)f;
    return remove(path);
}

static fsdp_status save_load_rank(void *arg)
{
    const dict *d = arg;
    fsdp_module *a, *b;
    double x, y, z;
    CHECK_OK(dict_model(d, 1, &a));
    CHECK_OK(dict_model(d, 2, &b));
    CHECK_OK(names_stay(d, a));
    CHECK_OK(value(a, d->dim, &x));
    CHECK_OK(value(b, d->dim, &y));
    CHECK(x != y);
    CHECK_OK(load(b, a));
    CHECK_OK(value(b, d->dim, &z));
    CHECK(x == z);
    /* Between a forward that keeps parameters whole and its backward the dict holds shards. */
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = conf_loss(fsdp_call(a, conf_input(3, d->dim, 1)));
    fsdp_param *w = fsdp_module_param(fsdp_module_find(a, "0.in_proj"), "weight");
    CHECK(fsdp_is_dtensor(fsdp_param_tensor(w)) == (d->policy != 2));
    CHECK_OK(names_stay(d, a));
    CHECK_OK(fsdp_backward(loss));
    CHECK(fsdp_grad(fsdp_param_shard(w)) && fsdp_is_dtensor(fsdp_grad(fsdp_param_shard(w))));
    fsdp_scope_end(scope);
    CHECK_OK(fsdp_zero_grad(a));
    /* Through a file, into a model of other values. */
    fsdp_optimizer *o = fsdp_adamw(a, NULL), *p = fsdp_adamw(b, NULL);
    fsdp__ckpt_state s = {0}, t = {0};
    CHECK_OK(fsdp_reset_parameters(b, 3));
    CHECK_OK(value(b, d->dim, &z));
    CHECK(x != z);
    CHECK_OK(fsdp__ckpt_save(a, o, d->folder, &s));
    CHECK_OK(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL));
    CHECK_OK(fsdp__ckpt_load(b, p, d->folder, 0, &t));
    CHECK_OK(value(b, d->dim, &z));
    CHECK(x == z);
    fsdp_optimizer_free(o);
    fsdp_optimizer_free(p);
    fsdp_module_free(a);
    fsdp_module_free(b);
    return FSDP_OK;
}

/* Names are those before sharding, values the live shards, also while parameters are whole; a load
 * writes in place, from another model's shards and from a file. Flat and hybrid, even and uneven.
 */
static void test_dp_state_dict_save_load(void)
{
    static const int64_t dims[] = {2, 3, 4, 5, 16};
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 10; k++) {
            char folder[] = "/tmp/fsdp_conf_XXXXXX";
            assert_non_null(mkdtemp(folder));
            dict d = {.dim = dims[k % 5],
                      .largest = k % 5 == 4,
                      .replicas = k >= 5 ? 2 : 0,
                      .policy = k % CONF_POLICIES,
                      .folder = folder};
            if (d.replicas && (worlds[i] == 1 || d.policy == 3)) d.replicas = 0;
            conf_ranks(worlds[i], save_load_rank, &d);
            nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
        }
}

/* ---- a dict that was taken once ----------------------------------------------------- */

static fsdp_status cached_rank(void *arg)
{
    const dict *d = arg;
    fsdp_module *m;
    CHECK_OK(dict_model(d, 1, &m));
    fsdp_param_list l;
    CHECK_OK(fsdp_module_params(m, &l));
    fsdp_tensor *shard[12];
    void *data[12];
    for (int i = 0; i < 12; i++) {
        shard[i] = fsdp_retain(fsdp_param_shard(l.items[i].param));
        data[i] = fsdp_data(shard[i]);
    }
    fsdp_optimizer *o = fsdp_adamw(m, NULL);
    CHECK(o);
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        double before = fsdp_numel(shard[0]) ? fsdp_at(shard[0], SIZES(0, 0)) : 0;
        CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(3, d->dim, step)))));
        CHECK_OK(fsdp_optimizer_step(o));
        CHECK_OK(fsdp_zero_grad(m));
        for (int i = 0; i < 12; i++) {
            CHECK(fsdp_param_shard(l.items[i].param) == shard[i]);
            CHECK(fsdp_data(shard[i]) == data[i]);
        }
        if (fsdp_numel(shard[0])) CHECK(fsdp_at(shard[0], SIZES(0, 0)) != before);
        CHECK_OK(fsdp_unshard(fsdp_module_child(m, 0)));
        for (int i = 0; i < 12; i++)
            CHECK(fsdp_param_shard(l.items[i].param) == shard[i]);
        CHECK_OK(fsdp_reshard(fsdp_module_child(m, 0)));
        fsdp_scope_end(scope);
    }
    for (int i = 0; i < 12; i++)
        fsdp_release(shard[i]);
    fsdp_param_list_free(&l);
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Shards are the same tensors, in the same memory, through forwards, backwards and steps. */
static void test_cached_state_dict(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < CONF_POLICIES; k++) {
            dict d = {.dim = k % 2 ? 5 : 8, .policy = k};
            conf_processes(worlds[i], cached_rank, &d);
        }
}

/* ---- loads that are not whole ------------------------------------------------------- */

/* The next parameter of a source takes its place. */
typedef struct source {
    fsdp_param_list list;
    int64_t at;
} source;

static fsdp_status take_one(fsdp_named_param *p, void *arg)
{
    source *s = arg;
    const fsdp_named_param *q = &s->list.items[s->at++];
    CHECK(strstr(q->name, strrchr(p->name, '.')));
    return fsdp_copy_(fsdp_param_shard(p->param), fsdp_param_shard(q->param));
}

static fsdp_status parts_rank(void *arg)
{
    const dict *d = arg;
    fsdp_module *from, *m;
    double x, y;
    CHECK_OK(dict_model(d, 1, &from));
    CHECK_OK(value(from, d->dim, &x));
    source given = {.at = 0};
    CHECK_OK(fsdp_module_params(from, &given.list));
    CHECK_OK(fsdp_device_push(FSDP_META));
    m = conf_mlps_create(3, d->dim);
    fsdp_device_pop();
    CHECK(m);
    fsdp_shard_options o = dict_options(d);
    for (int i = 0; i < 2; i++)
        CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, i), &o));
    CHECK_OK(fsdp_fully_shard(m, &o));
    for (int i = 0; i < 3; i++) { /* module by module; the others are on meta still */
        fsdp_module *child = fsdp_module_child(m, i);
        fsdp_param *w = fsdp_module_param(fsdp_module_child(child, 0), "weight");
        CHECK(fsdp_tensor_device(fsdp_param_shard(w)) == FSDP_META);
        if (fsdp_world_size() == 1) { /* peers would be told of the error */
            fsdp_tensor *in = conf_input(3, d->dim, 0);
            CHECK(!fsdp_call(m, in));
            char name[32];
            snprintf(name, sizeof name, "%d.in_proj.weight", i);
            CHECK_OK(conf_error(FSDP_INVALID_STATE, name));
            fsdp_release(in);
        }
        CHECK_OK(fsdp_to_empty(child, FSDP_CPU));
        CHECK_OK(conf_each_param(child, take_one, &given));
    }
    CHECK_OK(fsdp_mark_changed(m));
    CHECK_OK(value(m, d->dim, &y));
    CHECK(x == y);
    fsdp_param_list_free(&given.list);
    fsdp_module_free(from);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Parameters, offloaded or not, can be given memory and values module by module; a forward before
 * the last is refused and names one that is left. */
static void test_dp_state_dict_cpu_offload(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k <= CONF_OFFLOADS; k++) {
            dict d = {.dim = 5, .offload = k};
            conf_ranks(worlds[i], parts_rank, &d);
        }
}

/* ---- the whole dict ----------------------------------------------------------------- */

static fsdp_status whole_rank(void *arg)
{
    const dict *d = arg;
    fsdp_module *m, *plain = conf_mlps_create(3, d->dim);
    CHECK(plain);
    CHECK_OK(fsdp_reset_parameters(plain, 1));
    CHECK_OK(dict_model(d, 1, &m));
    fsdp_param_list a, b;
    CHECK_OK(fsdp_module_params(m, &a));
    CHECK_OK(fsdp_module_params(plain, &b));
    fsdp_tensor *kept[12] = {NULL};
    for (int i = 0; i < 12; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_shard(a.items[i].param));
        CHECK(full);
        if (fsdp_rank() == 0) kept[i] = fsdp_retain(full);
        fsdp_scope_end(scope);
    }
    for (int i = 0; i < 12; i++) {
        CHECK((kept[i] != NULL) == (fsdp_rank() == 0));
        if (kept[i]) CHECK(check_same_bits(kept[i], fsdp_param_tensor(b.items[i].param)));
        if (kept[i]) CHECK(!fsdp_is_dtensor(kept[i]));
        fsdp_release(kept[i]);
    }
    fsdp_param_list_free(&a);
    fsdp_param_list_free(&b);
    fsdp_module_free(plain);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Each entry gathered, and kept on rank 0 alone, is the whole dict of the module before sharding.
 */
static void test_rank0_offload_full_state_dict(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 3; k++) {
            dict d = {.dim = k ? 5 : 8, .largest = k == 2};
            conf_processes(worlds[i], whole_rank, &d);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_dp_state_dict_save_load),
        CONF_TEST(test_cached_state_dict),
        CONF_TEST(test_dp_state_dict_cpu_offload),
        CONF_TEST(test_rank0_offload_full_state_dict),
    };
    return conf_main("state_dict", tests, sizeof tests / sizeof *tests, argc, argv);
}
