/*
 * sharded_net.h - a small network of uneven sizes, and a run of it over ranks
 * as threads: what tests of sharding share.
 *
 * Net: in (5 -> C, bias), blocks of norm, up (C -> 7, bias), gelu, down
 * (7 -> C) and a residual, norm, head (C -> 1); C = 17. Given targets it
 * returns the mean squared error of its rows. One unit a block, one for the
 * rest. Each rank takes `rows` rows of the global batch, so with as many rows
 * altogether every number of ranks computes the same mean.
 */
#ifndef FSDP_TESTS_SHARDED_NET_H
#define FSDP_TESTS_SHARDED_NET_H

#include "nn/module.h"
#include "tensor_check.h"

enum { NET_IN = 5, NET_C = 17, NET_H = 7, NET_BLOCKS = 16, NET_STEPS = 50 };

/* Tests with many settings take every third under a sanitizer, another one on each layout. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { NET_STRIDE = 3 };
#else
enum { NET_STRIDE = 1 };
#endif

typedef struct net_block {
    fsdp_module base;
    fsdp_module *norm, *up, *down;
} net_block;

typedef struct net {
    fsdp_module base;
    fsdp_module *in, *layers, *norm, *head;
    fsdp_module *block[NET_BLOCKS];
    int n_blocks;
    int fail_rank, fail_block; /* fail_rank >= 0: that rank's forward fails in that block */
} net;

static inline fsdp_tensor *net_block_forward(fsdp_module *self, fsdp_tensor *x)
{
    net_block *b = (net_block *)self;
    fsdp_tensor *h = fsdp_gelu(fsdp_call(b->up, fsdp_call(b->norm, x)));
    return fsdp_add(x, fsdp_call(b->down, h));
}

static inline fsdp_module *net_block_create(void)
{
    net_block *b = (net_block *)fsdp_module_create(sizeof *b, "Block");
    if (!b) return NULL;
    b->base.forward1 = net_block_forward;
    b->norm = fsdp_module_add(&b->base, "norm", fsdp_rms_norm_create(NET_C, 1e-5));
    b->up = fsdp_module_add(&b->base, "up", fsdp_linear_create(NET_C, NET_H, 1));
    b->down = fsdp_module_add(&b->base, "down", fsdp_linear_create(NET_H, NET_C, 0));
    return &b->base;
}

/* x (rows, 5), y (rows, 1) -> the loss. */
static inline fsdp_tensor *net_forward(fsdp_module *self, fsdp_tensor *x, fsdp_tensor *y)
{
    net *n = (net *)self;
    fsdp_tensor *h = fsdp_call(n->in, x);
    for (int i = 0; i < n->n_blocks; i++) {
        if (n->fail_rank == fsdp_rank() && n->fail_block == i)
            return fsdp_reshape(h, 1, SIZES(3));
        fsdp_tensor *next = fsdp_call(n->block[i], h);
        if (i > 0)
            fsdp_set(&h, next);
        else
            h = next;
    }
    h = fsdp_call(n->head, fsdp_call(n->norm, h));
    return fsdp_mse_loss(fsdp_cast(h, FSDP_F32), fsdp_cast(y, FSDP_F32), FSDP_REDUCE_MEAN);
}

static inline net *net_create(int blocks)
{
    net *n = (net *)fsdp_module_create(sizeof *n, "Net");
    if (!n) return NULL;
    n->base.forward2 = net_forward;
    n->fail_rank = -1;
    n->n_blocks = blocks;
    n->in = fsdp_module_add(&n->base, "in", fsdp_linear_create(NET_IN, NET_C, 1));
    n->layers = fsdp_module_add(&n->base, "layers", fsdp_module_list_create());
    for (int i = 0; i < blocks; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        n->block[i] = fsdp_module_add(n->layers, name, net_block_create());
    }
    n->norm = fsdp_module_add(&n->base, "norm", fsdp_rms_norm_create(NET_C, 1e-5));
    n->head = fsdp_module_add(&n->base, "head", fsdp_linear_create(NET_C, 1, 1));
    return n;
}

/* ---- a run ------------------------------------------------------------------ */

typedef enum net_mesh { NET_SHARD, NET_REPLICATE, NET_HYBRID, NET_PLAIN } net_mesh;

typedef struct net_run {
    int ranks, blocks, rows, steps; /* rows of the global batch, dealt evenly */
    net_mesh mesh;                  /* PLAIN: no fully_shard */
    int replicas;                   /* HYBRID */
    fsdp_reshard_policy policy;
    int reshard_ranks; /* not 0: instead of policy */
    int prefetch, private_gather, dim1;
    fsdp_dtype param_dtype, reduce_dtype; /* 0 (f32) stands for none */
    int micro, sync;                      /* microbatches a step (0: 1); reduce each of them */
    int group_only;                       /* all but the last inside the shard group only */
    int frozen;                           /* blocks[0] and the head's bias need no gradient */
    int whole;                            /* one unit for all */
    int sgd;
    int no_clip;
    fsdp_offload_policy offload, state_offload;
    int in_backward; /* the optimizer steps in backward */
    /* Called on every rank: with the model made, before it is sharded; before the first step; after
     * each backward. */
    fsdp_status (*build)(struct net_run *r, net *n);
    fsdp_status (*prepare)(struct net_run *r, net *n);
    fsdp_status (*look)(struct net_run *r, net *n, int step);
    /* Instead of one unit a block: calls fully_shard itself, with the options of the run. */
    fsdp_status (*shard)(struct net_run *r, net *n, fsdp_shard_options *o);
    void *arg;
    /* results, by rank 0 */
    double loss[NET_STEPS], norm[NET_STEPS]; /* loss: mean over ranks */
    double *params, *grads;                  /* whole: after the last step; of step 0, after clip */
    int64_t numel;
} net_run;

static inline int net_dim1(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    return fsdp_param_ndim(p) > 1 ? 1 : 0;
}

static inline fsdp_mesh *net_make_mesh(const net_run *r)
{
    const char *names[] = {"replicate", "shard"};
    int sizes[] = {r->ranks, 1};
    if (r->mesh == NET_REPLICATE) return fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
    if (r->mesh == NET_HYBRID) {
        sizes[0] = r->replicas;
        sizes[1] = r->ranks / r->replicas;
        return fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
    }
    return fsdp_mesh_create(FSDP_CPU, 1, sizes, names + 1);
}

static inline fsdp_status net_shard(net_run *r, net *n)
{
    if (r->mesh == NET_PLAIN) return FSDP_OK;
    fsdp_mesh *mesh = net_make_mesh(r);
    if (!mesh) return fsdp_error();
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = r->reshard_ranks ? FSDP_RESHARD_AUTO : r->policy;
    o.reshard_ranks = r->reshard_ranks;
    o.prefetch_limit = r->prefetch;
    o.private_gather = r->private_gather;
    o.offload = r->offload;
    if (r->dim1) o.placement_fn = net_dim1;
    if (r->param_dtype) o.mp_policy.param_dtype = r->param_dtype;
    if (r->reduce_dtype || r->param_dtype) o.mp_policy.reduce_dtype = r->reduce_dtype;
    if (r->shard) return r->shard(r, n, &o);
    for (int i = 0; i < n->n_blocks && !r->whole; i++)
        FSDP_TRY(fsdp_fully_shard(n->block[i], &o));
    return fsdp_fully_shard(&n->base, &o);
}

static inline fsdp_status net_freeze(net *n)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(n->block[0], &l));
    for (int64_t i = 0; i < l.count; i++)
        fsdp_param_requires_grad_(l.items[i].param, 0);
    fsdp_param_list_free(&l);
    return fsdp_param_requires_grad_(fsdp_module_param(n->head, "bias"), 0);
}

/* All parameters, or their gradients (zeros where there is none), as one array. Collective. */
static inline double *net_collect(net *n, int grads, int64_t *numel)
{
    fsdp_param_list l;
    if (fsdp_module_params(&n->base, &l) != FSDP_OK) return NULL;
    *numel = fsdp_module_numel(&n->base);
    double *all = calloc((size_t)*numel + 1, sizeof *all);
    int64_t at = 0;
    for (int64_t i = 0; i < l.count && all; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *t = fsdp__param_kept(l.items[i].param); /* also where a unit stays whole */
        const int64_t *s = fsdp_param_sizes(l.items[i].param);
        int64_t m = 1;
        for (int d = 0; d < fsdp_param_ndim(l.items[i].param); d++)
            m *= s[d];
        if (grads) t = fsdp_grad(t);
        fsdp_tensor *full = t ? fsdp_dtensor_full(t) : NULL;
        if (full && (fsdp_numel(full) != m || fsdp_to_doubles(full, all + at) != FSDP_OK))
            fsdp__fail(FSDP_INTERNAL, "%s: %lld elements whole; expected %lld", l.items[i].name,
                       (long long)fsdp_numel(full), (long long)m);
        fsdp_scope_end(scope);
        at += m;
    }
    fsdp_param_list_free(&l);
    if (!fsdp_error()) return all;
    free(all);
    return NULL;
}

/* Rows [first, first + n) of the batch of a step. */
static inline fsdp_status net_batch(const net_run *r, int step, int first, int n, fsdp_tensor **x,
                                    fsdp_tensor **y)
{
    char name[32];
    snprintf(name, sizeof name, "step %d", step);
    fsdp_tensor *all = fsdp_randn(FSDP_F32, 2, SIZES(r->rows, NET_IN), 5, name);
    fsdp_tensor *part = fsdp_slice(all, 0, first, first + n);
    *x = fsdp_contiguous(part);
    *y = fsdp_sum_dim(fsdp_sigmoid(part), 1, 1);
    return *y ? FSDP_OK : fsdp_error();
}

static inline fsdp_status net_step(net_run *r, net *n, fsdp_optimizer *o, int step)
{
    int mine = r->rows / r->ranks, micro = r->micro ? r->micro : 1, each = mine / micro;
    double loss = 0, norm = 0;
    for (int k = 0; k < micro; k++) {
        fsdp_tensor *x, *y;
        FSDP_TRY(net_batch(r, step, fsdp_rank() * mine + k * each, each, &x, &y));
        if (r->mesh != NET_PLAIN)
            FSDP_TRY(fsdp_set_requires_gradient_sync(&n->base, r->sync || k == micro - 1, 1));
        if (r->group_only)
            FSDP_TRY(fsdp_set_requires_all_reduce(&n->base, k == micro - 1, 1));
        fsdp_tensor *l = fsdp_scale(fsdp_call2(&n->base, x, y), 1.0 / micro);
        FSDP_TRY(fsdp_backward(l));
        loss += fsdp_item(l);
        if (r->look) FSDP_TRY(r->look(r, n, step));
    }
    if (!r->no_clip) FSDP_TRY(fsdp_clip_grad_norm(&n->base, 0.5, &norm));
    if (step == 0) {
        int64_t numel;
        double *g = net_collect(n, 1, &numel);
        if (!g) return fsdp_error();
        if (fsdp_rank() == 0)
            r->grads = g;
        else
            free(g);
    }
    FSDP_TRY(fsdp_optimizer_step(o));
    FSDP_TRY(fsdp_zero_grad(&n->base));
    /* The mean over ranks, summed in rank order on each of them. */
    double all[16] = {0}, mean = 0;
    FSDP_TRY(fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, &loss, all, sizeof loss, NULL));
    for (int k = 0; k < r->ranks; k++)
        mean += all[k] / r->ranks;
    if (fsdp_rank() == 0) {
        r->loss[step] = mean;
        r->norm[step] = norm;
    }
    return FSDP_OK;
}

static inline fsdp_status net_train(net_run *r, net *n)
{
    if (r->build) EXPECT(r->build(r, n) == FSDP_OK);
    EXPECT(net_shard(r, n) == FSDP_OK);
    EXPECT(fsdp_to_empty(&n->base, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 42) == FSDP_OK);
    if (r->frozen) EXPECT(net_freeze(n) == FSDP_OK);
    fsdp_adamw_options a = {1e-2, 0.9, 0.95, 1e-8, 0.1};
    fsdp_sgd_options s = {1e-1, 0.9, 0, 0};
    fsdp_optimizer *o = r->sgd ? fsdp_sgd(&n->base, &s) : fsdp_adamw(&n->base, &a);
    fsdp_status st = o ? fsdp_optimizer_set_offload(o, &r->state_offload) : fsdp_error();
    if (st == FSDP_OK && r->in_backward) st = fsdp_optimizer_in_backward(o, 1);
    if (st == FSDP_OK && r->prepare) st = r->prepare(r, n);
    for (int step = 0; step < r->steps && st == FSDP_OK; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        st = net_step(r, n, o, step);
        fsdp_scope_end(scope);
    }
    fsdp_optimizer_free(o);
    if (st != FSDP_OK) return st;
    int64_t numel;
    double *p = net_collect(n, 0, &numel);
    EXPECT(p);
    if (fsdp_rank() == 0) {
        r->params = p;
        r->numel = numel;
    } else {
        free(p);
    }
    return FSDP_OK;
}

static inline fsdp_status net_rank(void *arg)
{
    net_run *r = arg;
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    net *n = net_create(r->blocks);
    fsdp_device_pop();
    EXPECT(n);
    fsdp_status s = net_train(r, n);
    fsdp_module_free(&n->base);
    if (s != FSDP_OK) return s;
    int64_t live = check_live();
    if (live != 0) return fsdp__fail(FSDP_INTERNAL, "%lld bytes are left", (long long)live);
    return FSDP_OK;
}

static inline void net_free(net_run *r)
{
    free(r->params);
    free(r->grads);
    r->params = r->grads = NULL;
}

/* Runs it and shows what went wrong. */
static inline void net_go(net_run *r)
{
    fsdp_status s = fsdp_run_threads(r->ranks, net_rank, r);
    if (s == FSDP_OK) return;
    char text[2048];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    fail_msg("%d ranks, mesh %d, policy %d: %s", r->ranks, (int)r->mesh, (int)r->policy, text);
}

static inline double net_distance(const double *a, const double *b, int64_t n)
{
    double most = 0, scale = 0;
    for (int64_t i = 0; i < n; i++) {
        if (isnan(a[i]) || isnan(b[i])) return INFINITY;
        most = fmax(most, fabs(a[i] - b[i]));
        scale = fmax(scale, fabs(b[i]));
    }
    return most == 0 ? 0 : most / scale;
}

/* Losses, norms, first gradients and last weights equal to the bit. */
static inline void net_same(const net_run *a, const net_run *b, const char *what)
{
    for (int s = 0; s < a->steps; s++)
        if (a->loss[s] != b->loss[s] || a->norm[s] != b->norm[s])
            fail_msg("%s: step %d: loss %.17g and %.17g, norm %.17g and %.17g", what, s, a->loss[s],
                     b->loss[s], a->norm[s], b->norm[s]);
    assert_int_equal(a->numel, b->numel);
    if (memcmp(a->grads, b->grads, (size_t)a->numel * sizeof *a->grads))
        fail_msg("%s: gradients differ by %g", what, net_distance(a->grads, b->grads, a->numel));
    if (memcmp(a->params, b->params, (size_t)a->numel * sizeof *a->params))
        fail_msg("%s: weights differ by %g", what, net_distance(a->params, b->params, a->numel));
}

/* The same within bounds relative to the largest value. */
static inline void net_close(const net_run *a, const net_run *b, double bound, const char *what)
{
    for (int s = 0; s < a->steps; s++)
        if (!(fabs(a->loss[s] - b->loss[s]) <= bound * fabs(b->loss[s])))
            fail_msg("%s: step %d: loss %.9g and %.9g", what, s, a->loss[s], b->loss[s]);
    assert_int_equal(a->numel, b->numel);
    double d = net_distance(a->grads, b->grads, a->numel);
    if (!(d <= bound)) fail_msg("%s: gradients differ by %g", what, d);
    d = net_distance(a->params, b->params, a->numel);
    if (!(d <= 20 * bound)) fail_msg("%s: weights differ by %g", what, d);
}

#endif
