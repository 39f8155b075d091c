/*
 * test_fsdp_extension.c - what travels in a gather, said by the user: the same bits when it loses
 * nothing, on every layout and uneven part; what it is told; what is refused; and int8 gathers.
 */
#include <stdatomic.h>

#include "sharded_net.h"

static const net_run base = {
    .blocks = 2, .rows = 24, .steps = 3, .policy = FSDP_RESHARD_ALWAYS, .prefetch = 1};

/* ---- two tensors that together are the shard: its bf16 and what that leaves -------------------
 */

typedef struct told {
    atomic_int calls, wrong;
    int ranks; /* of the shard axis */
} told;

static fsdp_status split(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    told *t = arg;
    fsdp_tensor *high = fsdp_cast(shard, FSDP_BF16);
    fsdp_tensor *low = fsdp_sub(shard, fsdp_cast(high, FSDP_F32));
    *out = (fsdp_values){.n = 2, .t = {high, low}};
    i->meta = t;
    atomic_fetch_add(&t->calls, 1);
    bool right = fsdp_mesh_ndim(i->mesh) == 1 && fsdp_mesh_size(i->mesh, 0) == t->ranks &&
                 i->name && i->module && i->mp_policy && i->ndim == fsdp_ndim(shard) &&
                 i->compute == FSDP_F32 && i->dim < i->ndim;
    int64_t c = (i->sizes[i->dim] + t->ranks - 1) / t->ranks;
    right = right && fsdp_size(shard, 0) <= c;
    if (!right) atomic_fetch_add(&t->wrong, 1);
    return FSDP_OK;
}

static fsdp_status join(void *arg, fsdp_gather_info *i, const fsdp_values *got, fsdp_tensor *out)
{
    told *t = arg;
    bool right = got->n == 2 && i->meta == t && fsdp_size(out, 0) == i->sizes[i->dim] &&
                 fsdp_size(got->t[0], 0) == i->sizes[i->dim];
    if (!right) atomic_fetch_add(&t->wrong, 1);
    return fsdp_copy_(out, fsdp_add(fsdp_cast(got->t[0], FSDP_F32), got->t[1]));
}

static told seen;

static fsdp_status extend(net_run *r, net *n)
{
    static const fsdp_gather_extension e = {split, join, &seen};
    return fsdp_set_all_gather_extension(&n->base, r->arg ? r->arg : "*", &e);
}

static void test_bits(void **state)
{
    (void)state;
    /* Ranks, replicas (0: one axis), k of an integer reshard. */
    static const int layouts[][3] = {{1, 0, 0}, {2, 0, 0}, {3, 0, 0}, {4, 2, 0},
                                     {4, 0, 2}, {8, 0, 0}, {8, 2, 2}};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        for (int way = (int)i % NET_STRIDE; way < 6; way += NET_STRIDE) {
            net_run r = base, other;
            char what[64], some[] = "*.up.*|head.weight";
            r.ranks = layouts[i][0];
            r.replicas = layouts[i][1];
            r.mesh = r.replicas ? NET_HYBRID : NET_SHARD;
            r.private_gather = way % 2;
            r.dim1 = way / 2 == 1;
            net_go(&r);
            other = r;
            other.reshard_ranks = layouts[i][2];
            other.prepare = extend;
            if (way / 2 == 2) other.arg = some;
            seen.ranks = r.ranks / (r.replicas ? r.replicas : 1);
            atomic_store(&seen.calls, 0);
            net_go(&other);
            snprintf(what, sizeof what, "layout %zu, way %d", i, way);
            net_same(&other, &r, what);
            net_free(&r);
            net_free(&other);
            assert_int_equal(atomic_load(&seen.wrong), 0);
            /* 13 parameters; gathered twice a step, or once and again from parts. */
            int each = layouts[i][2] ? 1 : 2, params = way / 2 == 2 ? 5 : 4 * 2 + 5;
            assert_int_equal(atomic_load(&seen.calls), params * each * r.steps * r.ranks);
        }
}

/* Shards travel in bf16 although parameters are gathered in fp32. */
static fsdp_status narrow(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    (void)arg;
    (void)i;
    *out = (fsdp_values){.n = 1, .t = {fsdp_cast(shard, FSDP_BF16)}};
    return FSDP_OK;
}

static fsdp_status widen(void *arg, fsdp_gather_info *i, const fsdp_values *got, fsdp_tensor *out)
{
    (void)arg;
    (void)i;
    return fsdp_copy_(out, got->t[0]);
}

static fsdp_status narrow_all(net_run *r, net *n)
{
    (void)r;
    static const fsdp_gather_extension e = {narrow, widen, NULL};
    return fsdp_set_all_gather_extension(&n->base, "*", &e);
}

static void test_narrow(void **state)
{
    (void)state;
    net_run one = base, wide;
    one.ranks = 1;
    one.prepare = narrow_all;
    net_go(&one);
    for (int n = 2; n <= 4; n++) {
        net_run r = one;
        r.ranks = n;
        net_go(&r);
        net_close(&r, &one, 2e-5, "bf16 on the way");
        net_free(&r);
    }
    wide = base;
    wide.ranks = 1;
    net_go(&wide);
    double d = net_distance(one.grads, wide.grads, wide.numel);
    assert_true(d > 1e-5 && d < 0.05);
    net_free(&wide);
    net_free(&one);
}

/* ---- int8 -------------------------------------------------------------------------------------
 */

typedef struct bytes {
    int64_t gather[8];
    int int8, recurse;
} bytes;

static fsdp_status set_int8(net_run *r, net *n)
{
    const bytes *b = r->arg;
    return b->int8 ? fsdp_set_int8_gather(&n->base, 1, b->recurse) : FSDP_OK;
}

static fsdp_status count(net_run *r, net *n, int step)
{
    (void)n;
    (void)step;
    ((bytes *)r->arg)->gather[fsdp_rank()] =
        fsdp_comm_count_total(FSDP_LANE_GATHER, FSDP_ALL_GATHER).bytes_copied;
    fsdp_comm_count_reset();
    return FSDP_OK;
}

/* The same numbers with shared and private copies and with parts; near those of bf16; on other
 * numbers of ranks too. */
static void test_int8(void **state)
{
    (void)state;
    bytes b = {{0}, 1, 1}, none = {{0}, 0, 1};
    net_run one = base, plain = base;
    plain.ranks = one.ranks = 1;
    one.prepare = set_int8;
    one.look = count;
    one.arg = &b;
    one.param_dtype = plain.param_dtype = FSDP_BF16;
    plain.steps = one.steps = 6;
    net_go(&one);
    net_go(&plain);
    double d = net_distance(one.grads, plain.grads, plain.numel);
    assert_true(d > 1e-4 && d < 0.1);
    for (int s = 0; s < one.steps; s++)
        assert_true(fabs(one.loss[s] / plain.loss[s] - 1) < 0.05);
    for (int n = 2; n <= 8; n *= 2)
        for (int way = 0; way < 4; way++) {
            net_run r = one;
            r.ranks = n;
            r.private_gather = way % 2;
            r.reshard_ranks = way / 2 && n > 2 ? 2 : 0;
            net_go(&r);
            for (int s = 0; s < r.steps; s++) /* bf16 computes with batches of other sizes */
                assert_true(fabs(r.loss[s] / one.loss[s] - 1) < 0.01);
            net_free(&r);
        }
    /* Bytes: 1 an element and 4 a row instead of 2 an element; vectors travel as they are. */
    for (int private = 0; private < 2; private ++) {
        net_run r = one;
        r.ranks = 2;
        r.private_gather = private;
        r.steps = 1;
        net_go(&r);
        net_free(&r);
        r.arg = &none;
        net_go(&r);
        net_free(&r);
        int64_t rows = 17 + 2 * (7 + 17) + 1, matrix = 17 * 5 + 2 * (2 * 17 * 7) + 17;
        int64_t saved = 2 * (private ? 2 : 1) * (matrix - 4 * rows);
        assert_int_equal(none.gather[0] + none.gather[1] - b.gather[0] - b.gather[1], saved);
    }
    /* Taken away, and the root's own unit alone. */
    b.recurse = 0;
    net_run root = one;
    root.ranks = 2;
    net_go(&root);
    assert_true(b.gather[0] > 0);
    net_free(&root);
    net_free(&one);
    net_free(&plain);
}

/* Rows of zeros, of one large element, not finite, and of none. */
static fsdp_status rows_rank(void *arg)
{
    (void)arg;
    fsdp_module *m = fsdp_linear_create(300, 5, 0);
    EXPECT(m && fsdp_fully_shard(m, NULL) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(m, 3) == FSDP_OK);
    EXPECT(fsdp_set_int8_gather(m, 1, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_param_tensor(fsdp_module_param(m, "weight"));
    double want[1500], got[1500];
    int first = fsdp_rank() * ((5 + fsdp_world_size() - 1) / fsdp_world_size());
    for (int64_t r = 0; r < fsdp_size(t, 0); r++) {
        float *x = (float *)fsdp_data(t) + r * 300;
        for (int k = 0; k < 300; k++)
            if (first + r == 0) x[k] = 0;
        if (first + r == 1) x[299] = 1000;
        if (first + r == 2) x[7] = INFINITY;
        if (first + r == 3) x[0] = NAN;
    }
    EXPECT(fsdp_to_doubles(fsdp_dtensor_full(t), want) == FSDP_OK);
    EXPECT(fsdp_mark_changed(m) == FSDP_OK);
    EXPECT(fsdp_unshard(m) == FSDP_OK);
    EXPECT(fsdp_to_doubles(fsdp_param_tensor(fsdp_module_param(m, "weight")), got) == FSDP_OK);
    for (int k = 0; k < 1500; k++) {
        int r = k / 300;
        double most = 0;
        for (int i = r * 300; i < r * 300 + 300; i++)
            most = fmax(most, fabs(want[i]));
        if (r == 2 || r == 3)
            EXPECT(isnan(got[k]));
        else
            EXPECT(fabs(got[k] - want[k]) <= most / 254 * 1.0001);
    }
    EXPECT(got[300 + 299] == 1000);
    EXPECT(fsdp_reshard(m) == FSDP_OK);
    EXPECT(fsdp_set_int8_gather(m, 0, 1) == FSDP_OK);
    EXPECT(fsdp_unshard(m) == FSDP_OK);
    EXPECT(fsdp_to_doubles(fsdp_param_tensor(fsdp_module_param(m, "weight")), got) == FSDP_OK);
    EXPECT(got[1499] == want[1499] && got[600] == want[600]);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    EXPECT(check_live() == 0);
    return FSDP_OK;
}

static void test_rows(void **state)
{
    (void)state;
    for (int n = 1; n <= 8; n++)
        check_ok(fsdp_run_threads(n, rows_rank, NULL));
}

/* ---- what is refused
 * ------------------------------------------------------------------------------- */

static fsdp_status too_few(void *arg, fsdp_gather_info *i, fsdp_tensor *shard, fsdp_values *out)
{
    (void)i;
    int kind = *(int *)arg;
    fsdp_tensor *t = kind == 0 ? fsdp_slice(shard, 0, 0, fsdp_size(shard, 0) - 1) : NULL;
    *out = (fsdp_values){.n = kind == 2 ? 0 : 1, .t = {t}};
    return FSDP_OK;
}

static fsdp_status nothing(void *arg, fsdp_gather_info *i, const fsdp_values *got, fsdp_tensor *out)
{
    (void)arg;
    (void)i;
    (void)got;
    (void)out;
    return FSDP_OK;
}

static void test_refused(void **state)
{
    (void)state;
    fsdp_module *m = fsdp_linear_create(3, 4, 0);
    assert_non_null(m);
    int kind = 0;
    fsdp_gather_extension e = {too_few, nothing, &kind};
    fsdp_set_all_gather_extension(m, "*", &e);
    check_error(FSDP_NOT_FOUND, "call fsdp_fully_shard before");
    check_ok(fsdp_fully_shard(m, NULL));
    check_ok(fsdp_reset_parameters(m, 1));
    e.post = NULL;
    fsdp_set_all_gather_extension(m, "*", &e);
    check_error(FSDP_INVALID_ARGUMENT, "post is NULL");
    e = (fsdp_gather_extension){NULL, nothing, &kind};
    fsdp_set_all_gather_extension(m, "*", &e);
    check_error(FSDP_INVALID_ARGUMENT, "pre is NULL");
    e = (fsdp_gather_extension){too_few, nothing, &kind};
    fsdp_set_all_gather_extension(m, "bias", &e);
    check_error(FSDP_NOT_FOUND, "matches 'bias'");
    check_ok(fsdp_set_all_gather_extension(m, "weight", &e));
    static const char *const words[] = {"dim 0 is the 4 rows", "NULL as tensor 0",
                                        "gives 0 tensors"};
    for (kind = 0; kind < 3; kind++) {
        fsdp_unshard(m);
        assert_non_null(strstr(fsdp_error_text(), words[kind]));
        check_ok(fsdp_reset_iteration(m));
    }
    check_ok(fsdp_set_all_gather_extension(m, "weight", NULL));
    check_ok(fsdp_unshard(m));
    fsdp_set_all_gather_extension(m, "weight", &e);
    check_error(FSDP_INVALID_STATE, "call fsdp_reshard first");
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits), cmocka_unit_test(test_narrow),  cmocka_unit_test(test_int8),
        cmocka_unit_test(test_rows), cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
