/*
 * test_conf_init.c - upstream's test_fully_shard_init.py: what a call of fully_shard takes, refuses
 * and leaves behind, and how values come to parameters that were made without any.
 */
#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* The unit of m holds exactly these parameters, by name. */
static fsdp_status holds(fsdp_module *m, const char *const *names, int n)
{
    const fsdp__unit *u = fsdp__unit_of(m);
    CHECK(u);
    CHECK(u->n_params == n);
    for (int i = 0; i < n; i++) {
        int found = 0;
        for (int k = 0; k < n; k++)
            found += !strcmp(u->params[k].param->name, names[i]);
        CHECK(found == 1);
    }
    return FSDP_OK;
}

/* ---- MeshArg ------------------------------------------------------------------------ */

static fsdp_status three_axes_rank(void *arg)
{
    (void)arg;
    const char *names[] = {"a", "b", "c"};
    const int sizes[] = {1, 1, 1};
    fsdp_module *m = conf_mlp_create(4, 2);
    fsdp_shard_options o = fsdp_shard_defaults(fsdp_mesh_create(FSDP_CPU, 3, sizes, names));
    CHECK(m && o.mesh);
    CHECK(fsdp_fully_shard(m, &o) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "3 axes"));
    CHECK(!fsdp_is_sharded_module(m));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A mesh of three axes is refused, and the module is left as it was. */
static void test_invalid_mesh_ndim(void)
{
    conf_ranks(1, three_axes_rank, NULL);
}

static fsdp_status nameless_rank(void *arg)
{
    (void)arg;
    const char *none[] = {NULL, NULL}, *same[] = {"shard", "shard"};
    const int sizes[] = {1, 1};
    CHECK(!fsdp_mesh_create(FSDP_CPU, 2, sizes, none));
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "name"));
    CHECK(!fsdp_mesh_create(FSDP_CPU, 2, sizes, same));
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "shard"));
    return FSDP_OK;
}

/* A mesh of two axes has two names, or it is not made. */
static void test_2d_mesh_without_mesh_dim_names(void)
{
    conf_ranks(1, nameless_rank, NULL);
}

/* ---- ManagedModulesAndStates -------------------------------------------------------- */

#define MLP_NAMES(p) p "in_proj.weight", p "in_proj.bias", p "out_proj.weight", p "out_proj.bias"

static fsdp_status single_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(2, 4);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    const char *all[] = {MLP_NAMES("0."), MLP_NAMES("1.")};
    CHECK_OK(holds(m, all, 8));
    CHECK(!fsdp_is_sharded_module(fsdp_module_child(m, 0)));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* One call manages every module below. */
static void test_managed_modules_single(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], single_rank, NULL);
}

static fsdp_status nested_rank(void *arg)
{
    const int replicate = *(const int *)arg;
    fsdp_module *m = conf_mlps_create(3, 4);
    CHECK(m);
    fsdp_module *inner = fsdp_module_find(m, "1.in_proj");
    fsdp_shard_options o =
        fsdp_shard_defaults(replicate ? conf_hybrid_mesh(fsdp_world_size()) : NULL);
    CHECK_OK(fsdp_fully_shard(inner, &o));
    CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, 0), NULL));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    const char *low[] = {"1.in_proj.weight", "1.in_proj.bias"}, *mid[] = {MLP_NAMES("0.")};
    const char *rest[] = {"1.out_proj.weight", "1.out_proj.bias", MLP_NAMES("2.")};
    CHECK_OK(holds(inner, low, 2));
    CHECK_OK(holds(fsdp_module_child(m, 0), mid, 4));
    CHECK_OK(holds(m, rest, 6));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* What an earlier call manages is left out of a later one. */
static void test_managed_modules_nested(void)
{
    static const int no = 0;
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], nested_rank, (void *)(uintptr_t)&no);
}

/* So is a module that is replicated: a unit over a mesh of replicas. */
static void test_managed_modules_nested_fully_shard_and_replicate(void)
{
    static const int yes = 1;
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], nested_rank, (void *)(uintptr_t)&yes);
}

/* Only what earlier calls left over is taken, buffers are not. */
static void test_managed_states_nested_fully_shard(void)
{
    test_managed_modules_nested();
}

/* b is a second way to a's weight; m also has it under two names of its own. */
static fsdp_module *shared_create(void)
{
    fsdp_module *m = fsdp_sequential_create();
    if (!m) return NULL;
    fsdp_module *a = fsdp_module_add(m, "a", fsdp_linear_create(4, 4, 1));
    fsdp_module *b = fsdp_module_add(m, "b", fsdp_module_create(sizeof *b, "Head"));
    if (!a || !b) return NULL;
    b->forward1 = conf_head_forward;
    fsdp_param *w = fsdp_module_param(a, "weight");
    fsdp_module_add_param(b, "weight", fsdp_param_retain(w));
    fsdp_module_add_param(b, "again", fsdp_param_retain(w));
    return m;
}

static fsdp_status shared_rank(void *arg)
{
    (void)arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_module *m = shared_create();
    CHECK(m);
    fsdp_tensor *t = fsdp_zeros(FSDP_F32, 1, SIZES(3));
    CHECK_OK(fsdp_module_add_buffer(m, "one", t));
    CHECK_OK(fsdp_module_add_buffer(m, "two", t));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    const char *names[] = {"a.weight", "a.bias"}; /* the first way names it */
    CHECK_OK(holds(m, names, 2));
    fsdp_param *w = fsdp_module_param(fsdp_module_child(m, 0), "weight");
    CHECK(fsdp_module_param(fsdp_module_child(m, 1), "weight") == w);
    CHECK(fsdp_module_param(fsdp_module_child(m, 1), "again") == w);
    CHECK(fsdp_module_buffer(m, "one") == t && fsdp_module_buffer(m, "two") == t);
    CHECK(fsdp_module_numel(m) == 20);
    /* Every way sees the same tensor, whole and sharded. */
    CHECK_OK(fsdp_reset_parameters(m, 1));
    CHECK_OK(fsdp_unshard(m));
    CHECK(fsdp_param_tensor(fsdp_module_param(fsdp_module_child(m, 1), "again")) ==
          fsdp_param_tensor(w));
    CHECK(!fsdp_is_dtensor(fsdp_param_tensor(w)));
    CHECK_OK(fsdp_reshard(m));
    fsdp_param_list l;
    CHECK_OK(fsdp_module_params(m, &l));
    CHECK(l.count == 2);
    CHECK(!strcmp(l.items[0].name, "a.weight") && l.items[0].owner == fsdp_module_child(m, 0));
    fsdp_param_list_free(&l);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Parameters and buffers that are shared count once. */
static void test_managed_states_shared_params_and_buffers(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], shared_rank, NULL);
}

/* The first module that holds a shared parameter is its owner and names it. */
static void test_get_param_module_infos_shared_params(void)
{
    test_managed_states_shared_params_and_buffers();
}

/* One module may hold a parameter under two names: it is one parameter, under the first. */
static void test_get_param_module_infos_duplicates(void)
{
    test_managed_states_shared_params_and_buffers();
}

static fsdp_status twice_added_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_sequential_create();
    CHECK(m);
    fsdp_module *a = fsdp_module_add(m, "a", fsdp_linear_create(4, 4, 1));
    CHECK(a);
    CHECK(!fsdp_module_add(m, "b", a));
    CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "already a child"));
    CHECK(fsdp_module_child_count(m) == 1);
    CHECK_OK(fsdp_fully_shard(m, NULL));
    const char *names[] = {"a.weight", "a.bias"};
    CHECK_OK(holds(m, names, 2));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A module has one parent: a second place in the tree is refused, and it counts once. */
static void test_managed_modules_duplicate(void)
{
    conf_ranks(1, twice_added_rank, NULL);
}

/* ---- ShardedParameterTensor --------------------------------------------------------- */

/* How a parameter lies on this rank when dim is cut. */
static fsdp_status lies(fsdp_param *p, int dim)
{
    int n = fsdp_world_size(), r = fsdp_rank();
    fsdp_tensor *t = fsdp_param_tensor(p);
    const int64_t *size = fsdp_param_sizes(p);
    int64_t chunk = (size[dim] + n - 1) / n, rows = size[dim] - r * chunk;
    rows = rows < 0 ? 0 : rows > chunk ? chunk : rows;
    CHECK(fsdp_is_dtensor(t) && fsdp_dtensor_ndim(t) == fsdp_param_ndim(p));
    CHECK(fsdp_dtensor_placement(t, 0).kind == FSDP_SHARD &&
          fsdp_dtensor_placement(t, 0).dim == dim);
    for (int d = 0; d < fsdp_param_ndim(p); d++) {
        CHECK(fsdp_dtensor_sizes(t)[d] == size[d]);
        CHECK(fsdp_size(t, d) == (d == dim ? rows : size[d]));
    }
    CHECK(fsdp_is_contiguous(t));
    return FSDP_OK;
}

static fsdp_status lies_one(fsdp_named_param *p, void *arg)
{
    (void)arg;
    return lies(p->param, 0);
}

typedef struct values {
    fsdp_module *plain;
    int dim; /* -2: by conf_largest_dim */
} values;

/* The shard holds the plain module's rows. */
static fsdp_status same_rows(fsdp_named_param *p, void *arg)
{
    const values *v = arg;
    fsdp_param_list l;
    CHECK_OK(fsdp_module_params(v->plain, &l));
    fsdp_scope *scope = fsdp_scope_begin();
    for (int64_t i = 0; i < l.count; i++) {
        if (strcmp(l.items[i].name, p->name)) continue;
        fsdp_tensor *whole = fsdp_param_tensor(l.items[i].param), *t = fsdp_param_tensor(p->param);
        int dim = fsdp_dtensor_placement(t, 0).dim, n = fsdp_world_size();
        int64_t chunk = (fsdp_size(whole, dim) + n - 1) / n, first = fsdp_rank() * chunk;
        if (first > fsdp_size(whole, dim)) first = fsdp_size(whole, dim);
        fsdp_tensor *mine =
            fsdp_contiguous(fsdp_slice(fsdp_detach(whole), dim, first, first + fsdp_size(t, dim)));
        CHECK(check_same_bits(mine, fsdp_dtensor_local(t)));
        CHECK(check_same_bits(fsdp_dtensor_full(t), whole));
    }
    fsdp_scope_end(scope);
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static fsdp_status shards_rank(void *arg)
{
    (void)arg;
    static const int64_t dims[] = {8, 5, 3};
    for (int k = 0; k < 3; k++) {
        fsdp_module *plain = conf_mlp_create(dims[k], 3), *m = conf_mlp_create(dims[k], 3);
        CHECK(plain && m);
        CHECK_OK(fsdp_reset_parameters(plain, 9));
        CHECK_OK(fsdp_reset_parameters(m, 9));
        CHECK_OK(fsdp_fully_shard(m, NULL));
        CHECK_OK(conf_each_param(m, lies_one, NULL));
        values v = {plain, 0};
        CHECK_OK(conf_each_param(m, same_rows, &v));
        fsdp_module_free(plain);
        fsdp_module_free(m);
    }
    return FSDP_OK;
}

/* Each rank holds exactly its chunk of dim 0, contiguous; sizes and placement tell the whole. */
static void test_shard_tensor_parameters(void)
{
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (int i = 0; i < 5; i++)
        conf_ranks(ranks[i], shards_rank, NULL);
    conf_processes(4, shards_rank, NULL);
}

static fsdp_status scalar_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 2);
    CHECK(m);
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    fsdp_module_add_param(m, "temperature", fsdp_param_create(FSDP_F32, 0, NULL, one));
    CHECK(fsdp_fully_shard(m, NULL) != FSDP_OK);
    CHECK_OK(conf_error(FSDP_INVALID_SHAPE, "temperature"));
    CHECK(!fsdp_is_sharded_module(m));
    CHECK(
        !fsdp_is_dtensor(fsdp_param_tensor(fsdp_module_param(fsdp_module_child(m, 0), "weight"))));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A parameter without dims is refused by name, with nothing changed. */
static void test_raise_scalar_parameter(void)
{
    conf_ranks(1, scalar_rank, NULL);
}

static fsdp_status strides_one(fsdp_named_param *p, void *arg)
{
    (void)arg;
    CHECK(fsdp_is_contiguous(fsdp_param_tensor(p->param)));
    return FSDP_OK;
}

static fsdp_status strides_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(4, 2);
    CHECK(m);
    CHECK_OK(conf_each_param(m, strides_one, NULL));
    CHECK_OK(fsdp_module_to_dtype(m, FSDP_BF16));
    CHECK_OK(conf_each_param(m, strides_one, NULL));
    CHECK_OK(fsdp_fully_shard(m, NULL));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    CHECK_OK(fsdp_unshard(m));
    CHECK_OK(conf_each_param(m, strides_one, NULL));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* No parameter has strides of its own: not as made, not cast, not whole. */
static void test_raise_noncontiguous_parameter(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], strides_rank, NULL);
}

/* ---- LazyInit ----------------------------------------------------------------------- */

static fsdp_status names_rank(void *arg)
{
    (void)arg;
    conf_lm *m = conf_lm_create(2, 0);
    CHECK(m);
    CHECK_OK(fsdp_fully_shard(m->block[0]->in->children[1], NULL)); /* layers.0.wq */
    CHECK_OK(fsdp_fully_shard(m->block[0], NULL));
    CHECK_OK(fsdp_fully_shard(m->block[1], NULL));
    CHECK_OK(fsdp_fully_shard(&m->base, NULL));
    CHECK_OK(fsdp_reset_parameters(&m->base, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK(fsdp_call(&m->base, conf_tokens(2, 0)));
    fsdp_scope_end(scope);
    const fsdp__tree *t = fsdp__unit_of(&m->base)->tree;
    CHECK(t && t->root == &m->base && t->n_units == 4);
    static const char *const names[] = {"", "layers.0", "layers.0.wq", "layers.1"};
    for (int i = 0; i < 4; i++) {
        CHECK(!strcmp(t->units[i]->name, names[i]));
        CHECK(t->units[i]->tree == t);
    }
    const fsdp__unit *u = t->units[2];
    CHECK(u->n_params == 1 && !strcmp(u->params[0].param->name, "layers.0.wq.weight"));
    CHECK(!strcmp(t->units[3]->params[0].param->name, "layers.1.attention_norm.weight"));
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* One root; its units in pre-order, itself first. */
static void test_fully_shard_is_root(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], names_rank, NULL);
}

/* The root's name is empty; children and parameters have dotted paths. */
static void test_fully_shard_module_and_param_fqns(void)
{
    test_fully_shard_is_root();
}

static fsdp_status child_first_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlps_create(2, 4);
    CHECK(m);
    CHECK_OK(conf_shard_children(&(conf_parity){.options = fsdp_shard_defaults(NULL)}, m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK(fsdp_call(fsdp_module_child(m, 1), conf_input(2, 4, 0)));
    CHECK(!fsdp_call(m, conf_input(2, 4, 0)));
    CHECK_OK(conf_error(FSDP_INVALID_STATE, "\"1\""));
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* A child that ran its first forward before the root: an error that names the child. */
static void test_fully_shard_double_lazy_init(void)
{
    conf_ranks(1, child_first_rank, NULL);
}

/* ---- MetaDeviceInit ----------------------------------------------------------------- */

static fsdp_module *on_meta_create(const conf_parity *p)
{
    if (fsdp_device_push(FSDP_META) != FSDP_OK) return NULL;
    fsdp_module *m = conf_mlps_create(3, p->dim);
    fsdp_device_pop();
    return m;
}

/* Losses of a sharded model that was made on meta and one that was not, to the bit. */
static fsdp_status meta_rank(void *arg)
{
    conf_parity p = *(const conf_parity *)arg;
    double a[CONF_STEPS], b[CONF_STEPS];
    conf_numbers v = {0}, w = {0};
    CHECK_OK(conf_train(&p, 1, a, &v));
    fsdp_module *(*const with_values)(const conf_parity *) = p.make;
    p.make = on_meta_create;
    CHECK_OK(conf_train(&p, 1, b, &w));
    CHECK(with_values != on_meta_create);
    CHECK(!memcmp(a, b, sizeof a));
    CHECK(conf_distance(&v, &w) == 0 && v.n > 0);
    free(v.v);
    free(w.v);
    return FSDP_OK;
}

static fsdp_module *mlps_create(const conf_parity *p)
{
    return conf_mlps_create(3, p->dim);
}

/* Made on meta, sharded, given memory and values: trains as the plain model, on even, uneven and
 * empty shards; with bf16 parameters as the sharded model that had values from the start. */
static void test_meta_device_1d_init(void)
{
    static const int ranks[] = {1, 2, 4, 8};
    static const int64_t dims[] = {8, 5, 3};
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 3; k++)
            for (int low = 0; low < 2; low++) {
                conf_parity p = {.make = low ? mlps_create : on_meta_create,
                                 .shard = conf_shard_children,
                                 .dim = dims[k],
                                 .options = fsdp_shard_defaults(NULL)};
                if (low) p.options.mp_policy.param_dtype = FSDP_BF16;
                conf_ranks(ranks[i], low ? meta_rank : conf_parity_rank, &p);
            }
}

static fsdp_status broadcast_one(fsdp_named_param *p, void *arg)
{
    fsdp_param_list l;
    CHECK_OK(fsdp_module_params(arg, &l));
    fsdp_scope *scope = fsdp_scope_begin();
    for (int64_t i = 0; i < l.count; i++) {
        if (strcmp(l.items[i].name, p->name)) continue;
        fsdp_tensor *whole = fsdp_clone(fsdp_detach(fsdp_param_tensor(l.items[i].param)));
        CHECK_OK(fsdp_broadcast(fsdp_group_world(), FSDP_LANE_CONTROL, fsdp_data(whole),
                                fsdp_numel(whole) * 4, 0, NULL));
        fsdp_tensor *t = fsdp_param_tensor(p->param);
        int dim = fsdp_dtensor_placement(t, 0).dim;
        int64_t chunk = (fsdp_size(whole, dim) + fsdp_world_size() - 1) / fsdp_world_size();
        int64_t first = fsdp_rank() * chunk;
        if (first > fsdp_size(whole, dim)) first = fsdp_size(whole, dim);
        CHECK_OK(fsdp_copy_(fsdp_dtensor_local(t),
                            fsdp_slice(whole, dim, first, first + fsdp_size(t, dim))));
    }
    fsdp_scope_end(scope);
    fsdp_param_list_free(&l);
    return FSDP_OK;
}

static fsdp_status load_from_rank0(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    if (step > 0) return FSDP_OK;
    fsdp_module *source = conf_mlps_create(3, p->dim);
    CHECK(source);
    CHECK_OK(fsdp_reset_parameters(source, fsdp_rank() == 0 ? 77 : 1000 + (uint64_t)fsdp_rank()));
    if (fsdp_is_sharded_module(m)) {
        CHECK_OK(conf_each_param(m, broadcast_one, source));
        CHECK_OK(fsdp_mark_changed(m));
    } else {
        CHECK_OK(fsdp_reset_parameters(m, 77));
    }
    fsdp_module_free(source);
    return FSDP_OK;
}

static fsdp_tensor *loss_after_load(const conf_parity *p, fsdp_module *m, int step)
{
    return load_from_rank0(p, m, step) == FSDP_OK ? conf_default_loss(p, m, step) : NULL;
}

/* Rank 0's whole weights, broadcast and cut by each rank into its shards, are what is trained. */
static void test_rank0_broadcast_meta_device_init(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            conf_parity p = {.make = on_meta_create,
                             .shard = conf_shard_children,
                             .loss = loss_after_load,
                             .dim = 5,
                             .options = fsdp_shard_defaults(NULL)};
            if (k) p.options.placement_fn = conf_largest_dim;
            conf_processes(worlds[i], conf_parity_rank, &p);
        }
}

/* ---- ProcessGroupInit --------------------------------------------------------------- */

static fsdp_status shard_on_slice(const conf_parity *p, fsdp_module *m)
{
    const char *names[] = {"dp", "tp"};
    const int sizes[] = {fsdp_world_size(), 1};
    conf_parity q = *p;
    q.options.mesh = fsdp_mesh_slice(fsdp_mesh_create(FSDP_CPU, 2, sizes, names), "dp");
    CHECK(q.options.mesh && fsdp_mesh_parent(q.options.mesh));
    return conf_shard_children(&q, m);
}

/* One axis of a mesh that is there, with its group, trains as a mesh of one's own. */
static void test_1d_process_group_init(void)
{
    for (int i = 0; i < WORLDS; i++) {
        conf_parity p = {.make = mlps_create,
                         .shard = shard_on_slice,
                         .dim = 7,
                         .options = fsdp_shard_defaults(NULL)};
        conf_processes(worlds[i], conf_parity_rank, &p);
    }
}

/* Each unit over a mesh object of its own: the same ranks, other groups. */
static fsdp_status shard_on_meshes(const conf_parity *p, fsdp_module *m)
{
    conf_parity q = *p;
    for (int i = 0; i < fsdp_module_child_count(m); i++) {
        q.options.mesh = conf_hybrid_mesh(fsdp_world_size() > 1 ? 2 : 1);
        CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, i), &q.options));
    }
    q.options.mesh = conf_hybrid_mesh(fsdp_world_size() > 1 ? 2 : 1);
    return fsdp_fully_shard(m, &q.options);
}

/* Hybrid meshes over groups of their own train as one does. */
static void test_2d_process_group_init(void)
{
    for (int i = 0; i < WORLDS; i++) {
        conf_parity p = {.make = mlps_create,
                         .shard = shard_on_meshes,
                         .dim = 7,
                         .bound = 1e-6,
                         .options = fsdp_shard_defaults(NULL)};
        conf_processes(worlds[i], conf_parity_rank, &p);
    }
}

/* ---- HSDPBroadcast ------------------------------------------------------------------ */

static fsdp_status replica_one(fsdp_named_param *p, void *arg)
{
    fsdp_mesh *mesh = arg;
    fsdp_group *g = fsdp_mesh_group(mesh, 0);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_dtensor_local(fsdp_param_tensor(p->param));
    int64_t bytes = fsdp_numel(t) * 4;
    char *both = calloc((size_t)(2 * bytes + 1), 1);
    CHECK(both);
    CHECK_OK(fsdp_all_gather(g, FSDP_LANE_CONTROL, fsdp_data(t), both, bytes, NULL));
    if (strstr(p->name, "weight") && bytes) CHECK(memcmp(both, both + bytes, (size_t)bytes));
    CHECK_OK(fsdp_broadcast(g, FSDP_LANE_CONTROL, fsdp_data(t), bytes, 0, NULL));
    fsdp_touch(t);
    CHECK_OK(fsdp_all_gather(g, FSDP_LANE_CONTROL, fsdp_data(t), both, bytes, NULL));
    CHECK(!memcmp(both, both + bytes, (size_t)bytes));
    free(both);
    fsdp_scope_end(scope);
    return FSDP_OK;
}

static fsdp_status replicas_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = conf_mlp_create(6, 2);
    CHECK(m);
    fsdp_shard_options o = fsdp_shard_defaults(conf_hybrid_mesh(2));
    CHECK_OK(fsdp_fully_shard(m, &o));
    CHECK_OK(fsdp_reset_parameters(m, 1 + (uint64_t)fsdp_mesh_coordinate(o.mesh, 0)));
    CHECK_OK(conf_each_param(m, replica_one, o.mesh));
    fsdp_module_free(m);
    return FSDP_OK;
}

/* Replicas that were given other values keep them until the user broadcasts; then they are equal.
 */
static void test_hsdp_broadcast_across_replicas(void)
{
    conf_processes(2, replicas_rank, NULL);
    conf_processes(4, replicas_rank, NULL);
    conf_ranks(8, replicas_rank, NULL);
}

/* ---- ShardPlacementFn --------------------------------------------------------------- */

static int last_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    (void)p;
    return -1;
}

static int no_such_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)name;
    return fsdp_param_ndim(p) * *(const int *)arg + (*(const int *)arg < 0 ? -1 : 0);
}

static fsdp_status placed_one(fsdp_named_param *p, void *arg)
{
    const fsdp_shard_placement_fn fn = *(const fsdp_shard_placement_fn *)arg;
    int dim = fn(NULL, p->name, p->param);
    return lies(p->param, dim < 0 ? dim + fsdp_param_ndim(p->param) : dim);
}

static fsdp_status placed_rank(void *arg)
{
    conf_lm *plain = conf_lm_create(2, 0), *m = conf_lm_create(2, 0);
    CHECK(plain && m);
    CHECK_OK(fsdp_reset_parameters(&plain->base, 4));
    CHECK_OK(fsdp_reset_parameters(&m->base, 4));
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    p.options.placement_fn = *(const fsdp_shard_placement_fn *)arg;
    CHECK_OK(conf_shard_blocks(&p, &m->base));
    CHECK_OK(conf_each_param(&m->base, placed_one, arg));
    values v = {&plain->base, 0};
    CHECK_OK(conf_each_param(&m->base, same_rows, &v));
    fsdp_module_free(&plain->base);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* Each parameter is cut where the function says, and its values stay. */
static void test_init_1d_transformer_shard_largest_dim(void)
{
    static fsdp_shard_placement_fn fn = conf_largest_dim;
    for (int i = 0; i < WORLDS; i++)
        conf_processes(worlds[i], placed_rank, &fn);
}

/* Dim -1 is the last. */
static void test_init_1d_transformer_shard_dim_neg1(void)
{
    static fsdp_shard_placement_fn fn = last_dim;
    for (int i = 0; i < WORLDS; i++)
        conf_ranks(worlds[i], placed_rank, &fn);
}

/* Sizes along dims other than 0 that no number of ranks divides train as the plain model. */
static void test_init_1d_uneven_shard_largest_dim(void)
{
    static const int ranks[] = {2, 3, 4, 8};
    static fsdp_shard_placement_fn fn = conf_largest_dim;
    for (int i = 0; i < 4; i++) {
        conf_ranks(ranks[i], placed_rank, &fn);
        conf_parity p = {.make = mlps_create,
                         .shard = conf_shard_children,
                         .dim = 5, /* (10, 5), (5, 10), (15, 5) ... */
                         .options = fsdp_shard_defaults(NULL)};
        p.options.placement_fn = last_dim;
        conf_ranks(ranks[i], conf_parity_rank, &p);
    }
}

static fsdp_status no_dim_rank(void *arg)
{
    static int which[] = {1, -1};
    (void)arg;
    for (int k = 0; k < 2; k++) {
        fsdp_module *m = conf_mlp_create(4, 2);
        CHECK(m);
        fsdp_shard_options o = fsdp_shard_defaults(NULL);
        o.placement_fn = no_such_dim;
        o.placement_arg = &which[k];
        CHECK(fsdp_fully_shard(m, &o) != FSDP_OK);
        CHECK_OK(conf_error(FSDP_INVALID_ARGUMENT, "in_proj.weight"));
        CHECK(!fsdp_is_sharded_module(m));
        fsdp_module_free(m);
    }
    return FSDP_OK;
}

/* A dim that a parameter lacks is refused, naming it. */
static void test_invalid_shard_dim(void)
{
    conf_ranks(1, no_dim_rank, NULL);
}

/* ---- MixedDtypeParam ---------------------------------------------------------------- */

static fsdp_tensor *scaled_mlp_forward(fsdp_module *self, fsdp_tensor *x)
{
    fsdp_tensor *s = fsdp_param_tensor(fsdp_module_param(self, "scale"));
    return conf_mlp_forward(self, fsdp_mul(x, fsdp_cast(s, fsdp_tensor_dtype(x))));
}

/* An MLP with a frozen scale in bf16. */
static fsdp_module *scaled_mlp_create(const conf_parity *p)
{
    fsdp_module *m = conf_mlp_create(p->dim, 2);
    if (!m) return NULL;
    m->forward1 = scaled_mlp_forward;
    fsdp_init_rule rule = {FSDP_INIT_UNIFORM, 0.5, 1.5};
    fsdp_param *s = fsdp_param_create(FSDP_BF16, 1, SIZES(p->dim), rule);
    fsdp_module_add_param(m, "scale", s);
    fsdp_param_requires_grad_(s, 0);
    return m;
}

/* A frozen parameter of another dtype lives in the unit of trainable ones and is left alone. */
static void test_mixed_dtypes_no_grad_param(void)
{
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2; k++) {
            conf_parity p = {.make = scaled_mlp_create,
                             .shard = conf_shard_whole,
                             .dim = 7,
                             .options = fsdp_shard_defaults(NULL)};
            p.options.private_gather = k;
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_invalid_mesh_ndim),
        CONF_TEST(test_2d_mesh_without_mesh_dim_names),
        CONF_TEST(test_managed_modules_single),
        CONF_TEST(test_managed_modules_nested),
        CONF_TEST(test_managed_modules_nested_fully_shard_and_replicate),
        CONF_TEST(test_managed_modules_duplicate),
        CONF_TEST(test_managed_states_shared_params_and_buffers),
        CONF_TEST(test_managed_states_nested_fully_shard),
        CONF_TEST(test_get_param_module_infos_shared_params),
        CONF_TEST(test_get_param_module_infos_duplicates),
        CONF_TEST(test_shard_tensor_parameters),
        CONF_TEST(test_raise_scalar_parameter),
        CONF_TEST(test_raise_noncontiguous_parameter),
        CONF_TEST(test_fully_shard_is_root),
        CONF_TEST(test_fully_shard_module_and_param_fqns),
        CONF_TEST(test_fully_shard_double_lazy_init),
        CONF_TEST(test_meta_device_1d_init),
        CONF_TEST(test_rank0_broadcast_meta_device_init),
        CONF_TEST(test_1d_process_group_init),
        CONF_TEST(test_2d_process_group_init),
        CONF_TEST(test_hsdp_broadcast_across_replicas),
        CONF_TEST(test_init_1d_transformer_shard_largest_dim),
        CONF_TEST(test_init_1d_transformer_shard_dim_neg1),
        CONF_TEST(test_init_1d_uneven_shard_largest_dim),
        CONF_TEST(test_invalid_shard_dim),
        CONF_TEST(test_mixed_dtypes_no_grad_param),
    };
    return conf_main("init", tests, sizeof tests / sizeof *tests, argc, argv);
}
