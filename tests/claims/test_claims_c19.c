/*
 * test_claims_c19.c - C19: summoned parameters are whole for the scope and
 * sharded after it; what was written into them is kept or dropped, as asked;
 * an evaluation inside runs no collective.
 */
#include "sharded_net.h"

#include "nn/module.h"

typedef struct how {
    int replicas, dim1, private_gather, bf16, rank0;
} how;

static int64_t calls(void)
{
    int64_t n = 0;
    for (int l = 0; l < FSDP_LANE_COUNT; l++)
        for (int c = 0; c < FSDP_COLLECTIVE_COUNT; c++)
            n += fsdp_comm_count_total((fsdp_lane)l, (fsdp_collective)c).calls;
    return n;
}

static int64_t live(fsdp_purpose p)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    return s.live[p];
}

static fsdp_status loss_of(net *n, double *loss)
{
    net_run r = {.ranks = 1, .rows = 8};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x, *y, *l = NULL;
    fsdp_no_grad_begin();
    if (net_batch(&r, 0, 0, 8, &x, &y) == FSDP_OK) l = fsdp_call2(&n->base, x, y);
    *loss = l ? fsdp_item(l) : NAN;
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    return fsdp_error();
}

/* All parameters as modules see them are whole and those of `expected`, times f. */
static fsdp_status check_whole(net *n, const double *expected, double f)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(&n->base, &l));
    int64_t at = 0;
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *t = fsdp_param_tensor(l.items[i].param);
        EXPECT(!fsdp_is_dtensor(t) && fsdp_tensor_dtype(t) == FSDP_F32);
        double *v = check_values(t);
        for (int64_t k = 0; k < fsdp_numel(t); k++)
            if (v[k] != expected[at + k] * f)
                fsdp__fail(FSDP_INTERNAL, "%s: %g and %g", l.items[i].name, v[k],
                           expected[at + k] * f);
        at += fsdp_numel(t);
        free(v);
    }
    fsdp_param_list_free(&l);
    return fsdp_error();
}

static fsdp_status check_sharded(net *n, double *expected, double f)
{
    int64_t numel;
    double *now = net_collect(n, 0, &numel);
    EXPECT(now && live(FSDP_UNSHARDED) == 0);
    for (int64_t i = 0; i < numel; i++)
        if (now[i] != expected[i] * f) fsdp__fail(FSDP_INTERNAL, "element %d", (int)i);
    free(now);
    EXPECT(fsdp_is_dtensor(fsdp_param_tensor(fsdp_module_param(n->in, "weight"))));
    EXPECT(fsdp_is_dtensor(
        fsdp_param_tensor(fsdp_module_param(fsdp_module_child(n->block[1], 1), "bias"))));
    return fsdp_error();
}

/* Doubles what this rank sees. */
static fsdp_status write_all(net *n)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(&n->base, &l));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_tensor *t = fsdp_param_tensor(l.items[i].param);
        fsdp_copy_(t, fsdp_scale(t, 2.0));
    }
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    fsdp_param_list_free(&l);
    return fsdp_error();
}

static fsdp_status shard(net *n, const how *h)
{
    const char *names[] = {"replicate", "shard"};
    const int sizes[] = {h->replicas, h->replicas ? fsdp_world_size() / h->replicas : 1};
    fsdp_shard_options o =
        fsdp_shard_defaults(h->replicas ? fsdp_mesh_create(FSDP_CPU, 2, sizes, names) : NULL);
    o.private_gather = h->private_gather;
    if (h->dim1) o.placement_fn = net_dim1;
    if (h->bf16) o.mp_policy.param_dtype = FSDP_BF16;
    for (int i = 0; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    return fsdp_reset_parameters(&n->base, 1);
}

static fsdp_status scopes(net *n, const how *h)
{
    int64_t numel, whole = 4 * fsdp_module_numel(&n->base);
    double *before = net_collect(n, 0, &numel), outside, inside;
    EXPECT(before && loss_of(n, &outside) == FSDP_OK); /* the first forward, and the root kept */
    for (int writeback = 0; writeback < 2; writeback++)
        for (int offload = 0; offload < 2; offload++) {
            fsdp_summon_options o = {1, writeback, 0, offload};
            fsdp_summon *s;
            int64_t other = live(FSDP_OTHER);
            EXPECT(fsdp_summon_full_params_begin(&n->base, &o, &s) == FSDP_OK);
            EXPECT(live(FSDP_UNSHARDED) == (offload ? 0 : whole));
            EXPECT(live(FSDP_OTHER) - other == (offload ? whole : 0));
            EXPECT(check_whole(n, before, 1.0) == FSDP_OK);
            int64_t c = calls();
            EXPECT(loss_of(n, &inside) == FSDP_OK && calls() == c);
            EXPECT(h->bf16 ? fabs(inside - outside) < 0.05 * fabs(outside) : inside == outside);
            EXPECT(write_all(n) == FSDP_OK);
            EXPECT(fsdp_summon_full_params_end(s) == FSDP_OK);
            EXPECT(live(FSDP_OTHER) == other);
            EXPECT(check_sharded(n, before, writeback ? 2.0 : 1.0) == FSDP_OK);
            for (int64_t i = 0; i < numel && writeback; i++)
                before[i] *= 2;
            EXPECT(loss_of(n, &outside) == FSDP_OK); /* a forward sees what was written back */
            EXPECT(writeback ? outside != inside : h->bf16 || outside == inside);
        }
    free(before);
    return FSDP_OK;
}

/* One unit alone; rank 0 alone. */
static fsdp_status parts(net *n)
{
    fsdp_summon_options o = {0, 0, 0, 0};
    fsdp_summon *s;
    int64_t block = 4 * fsdp_module_numel(n->block[0]), all = 4 * fsdp_module_numel(&n->base);
    EXPECT(fsdp_summon_full_params_begin(n->block[0], &o, &s) == FSDP_OK);
    EXPECT(live(FSDP_UNSHARDED) == block);
    EXPECT(fsdp_summon_full_params_end(s) == FSDP_OK);
    EXPECT(fsdp_summon_full_params_begin(&n->base, &o, &s) ==
           FSDP_OK); /* its own, not the blocks' */
    EXPECT(live(FSDP_UNSHARDED) == all - n->n_blocks * block);
    EXPECT(fsdp_summon_full_params_end(s) == FSDP_OK);
    o = (fsdp_summon_options){1, 0, 1, 0};
    double outside, inside;
    EXPECT(loss_of(n, &outside) == FSDP_OK);
    EXPECT(fsdp_summon_full_params_begin(&n->base, &o, &s) == FSDP_OK);
    EXPECT(live(FSDP_UNSHARDED) == (fsdp_rank() == 0 ? all : 0));
    if (fsdp_rank() == 0) EXPECT(loss_of(n, &inside) == FSDP_OK && inside == outside);
    return fsdp_summon_full_params_end(s);
}

static fsdp_status rank_main(void *arg)
{
    const how *h = arg;
    net *n = net_create(3);
    EXPECT(n && shard(n, h) == FSDP_OK && scopes(n, h) == FSDP_OK);
    if (!h->bf16) EXPECT(parts(n) == FSDP_OK);
    fsdp_module_free(&n->base);
    int64_t left = check_live();
    return left ? fsdp__fail(FSDP_INTERNAL, "%lld bytes are left", (long long)left) : FSDP_OK;
}

static void test_c19(void **state)
{
    (void)state;
    const how rows[] = {{0}, {.dim1 = 1}, {.private_gather = 1}, {.bf16 = 1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int ranks = 1; ranks <= 8; ranks = ranks < 4 ? ranks + 1 : ranks * 2) {
            how h = rows[i];
            check_ok(fsdp_run_threads(ranks, rank_main, &h));
        }
    how hybrid = {.replicas = 2};
    check_ok(fsdp_run_threads(4, rank_main, &hybrid));
}

static fsdp_status refused(void *arg)
{
    (void)arg;
    net *n = net_create(2);
    how h = {0};
    fsdp_summon *s, *again;
    fsdp_summon_options o = {1, 1, 1, 0};
    EXPECT(n && fsdp_summon_full_params_begin(&n->base, NULL, &s) != FSDP_OK);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "is sharded"));
    EXPECT(shard(n, &h) == FSDP_OK);
    fsdp_summon_full_params_begin(&n->base, &o, &s);
    FSDP_TRY(check_failed(FSDP_INVALID_ARGUMENT, "set writeback to 0"));
    fsdp_optimizer *opt = fsdp_adamw(&n->base, NULL);
    net_run r = {.ranks = 1, .rows = 4};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x, *y;
    EXPECT(net_batch(&r, 0, 0, 4, &x, &y) == FSDP_OK);
    EXPECT(fsdp_backward(fsdp_call2(&n->base, x, y)) == FSDP_OK);
    EXPECT(fsdp_summon_full_params_begin(&n->base, NULL, &s) == FSDP_OK);
    fsdp_summon_full_params_begin(n->block[0], NULL, &again);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "summoned already"));
    EXPECT(!fsdp_call2(&n->base, x, y));
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "fsdp_no_grad_begin"));
    fsdp_unshard(n->block[0]);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "inside fsdp_summon_full_params"));
    EXPECT(fsdp_optimizer_step(opt) == FSDP_OK);
    fsdp_summon_full_params_end(s);
    FSDP_TRY(check_failed(FSDP_INVALID_STATE, "nothing was written back"));
    EXPECT(fsdp_call2(&n->base, x, y)); /* and goes on */
    fsdp_scope_end(scope);
    fsdp_optimizer_free(opt);
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

static void test_refused(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, refused, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c19), cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
