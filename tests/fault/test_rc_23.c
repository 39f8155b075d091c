/*
 * test_rc_23.c - RC-23: memory that was never written is seen. Freed blocks
 * hold 0xFF (a NaN in every floating dtype) when a model is made on the meta
 * device, sharded and given memory: its rotary tables, up to position 100000,
 * have their closed form in f32 on every rank, a forward there is free of NaN
 * and that of one rank, and a buffer that nobody filled is refused by name.
 */
#include "sharded_net.h"

#include "models/config.h"
#include "models/models_internal.h"

enum { HALF = 4, FAR = 100001 };

/* Blocks that allocators hand out again are full of 0xFF. */
static fsdp_status poison(void)
{
    for (int64_t bytes = 64; bytes <= 8 << 20; bytes *= 2) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *t[4];
        for (int k = 0; k < 4; k++) {
            t[k] = fsdp_empty(FSDP_F32, 1, SIZES(bytes / 4));
            EXPECT(t[k]);
            memset(fsdp_data(t[k]), 0xFF, (size_t)bytes);
        }
        fsdp_scope_end(scope);
    }
    return FSDP_OK;
}

/* Positions 0 to 100000 in one table, and by their numbers. */
static fsdp_status tables(void)
{
    fsdp__rope r = {.c = {.theta = 10000.0}, .head_dim = 2 * HALF};
    float inv[HALF];
    fsdp__rope_frequencies(&r.c, 2 * HALF, inv);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_zeros(FSDP_BF16, 3, SIZES(1, FAR, 2 * HALF)), *cs, *sn;
    EXPECT(x);
    EXPECT(fsdp__rope_get(&r, x, NULL, 0, &cs, &sn) == FSDP_OK);
    EXPECT(fsdp_tensor_dtype(cs) == FSDP_F32 && fsdp_tensor_dtype(sn) == FSDP_F32);
    const float *c = fsdp_data(cs), *s = fsdp_data(sn);
    for (int64_t t = 0; t < FAR; t++)
        for (int i = 0; i < HALF; i++) {
            double angle = (double)((float)t * inv[i]);
            /* Not "!(a > b)": a NaN fails. */
            if (fabs(c[t * HALF + i] - cos(angle)) < 1e-6 &&
                fabs(s[t * HALF + i] - sin(angle)) < 1e-6)
                continue;
            fsdp__fail(FSDP_INTERNAL, "position %lld, pair %d: %g %g", (long long)t, i,
                       (double)c[t * HALF + i], (double)s[t * HALF + i]);
            break;
        }
    fsdp__rope_free(&r);
    fsdp_scope_end(scope);
    return fsdp_error();
}

static fsdp_model_config small(void)
{
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.hidden_size = 32;
    c.num_layers = 2;
    c.num_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 2 * HALF;
    c.intermediate_size = 48;
    c.vocab_size = 64;
    c.max_position_embeddings = 1 << 17;
    return c;
}

static fsdp_status logits(void *arg)
{
    enum { T = 6 };
    double *out = arg;
    EXPECT(poison() == FSDP_OK && tables() == FSDP_OK);
    fsdp_model_config c = small();
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    fsdp_module *m = fsdp_model_create(&c);
    fsdp_device_pop();
    EXPECT(m);
    for (int i = 0; i < fsdp_model_block_count(m); i++)
        EXPECT(fsdp_fully_shard(fsdp_model_block(m, i), NULL) == FSDP_OK);
    EXPECT(fsdp_fully_shard(m, NULL) == FSDP_OK);
    EXPECT(fsdp_to_empty(m, FSDP_CPU) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *tokens = fsdp_empty(FSDP_I64, 2, SIZES(1, T));
    fsdp_tensor *where = fsdp_empty(FSDP_I64, 2, SIZES(1, T));
    EXPECT(tokens && where);
    for (int t = 0; t < T; t++) {
        ((int64_t *)fsdp_data(tokens))[t] = 7 * t % 64;
        ((int64_t *)fsdp_data(where))[t] = FAR - T + t;
    }
    fsdp_touch(tokens);
    fsdp_touch(where);
    fsdp_no_grad_begin();
    fsdp_tensor *y = fsdp_call2(m, tokens, where);
    fsdp_no_grad_end();
    double *v = y ? check_values(y) : NULL;
    EXPECT(v);
    for (int64_t i = 0; i < fsdp_numel(y); i++)
        if (!isfinite(v[i])) fsdp__fail(FSDP_INTERNAL, "logit %d is %g", (int)i, v[i]);
    if (fsdp_rank() == 0) memcpy(out, v, (size_t)fsdp_numel(y) * sizeof *v);
    free(v);
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    return fsdp_error();
}

static void test_tables(void **state)
{
    (void)state;
    double one[6 * 64] = {0}, more[6 * 64] = {0};
    check_ok(fsdp_run_threads(1, logits, one));
    for (int ranks = 2; ranks <= 4; ranks++) {
        check_ok(fsdp_run_threads(ranks, logits, more));
        assert_memory_equal(one, more, sizeof one);
    }
}

/* ---- buffers that are in no checkpoint --------------------------------------------------- */

static fsdp_status buffers(void *arg)
{
    int fill = *(int *)arg;
    EXPECT(poison() == FSDP_OK);
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    fsdp_module *m = fsdp_sequential_create();
    fsdp_module *bn = fsdp_module_add(m, "bn", fsdp_batch_norm_create(3, 1e-5, 0.1));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_empty(FSDP_F32, 1, SIZES(3));
    EXPECT(bn && t && fsdp_module_add_buffer(m, "table", t) == FSDP_OK);
    fsdp_scope_end(scope);
    fsdp_device_pop();
    EXPECT(fsdp_fully_shard(m, NULL) == FSDP_OK);
    EXPECT(fsdp_to_empty(m, FSDP_CPU) == FSDP_OK && fsdp_reset_parameters(m, 1) == FSDP_OK);
    if (fill) EXPECT(fsdp_fill_(fsdp_module_buffer(m, "table"), 2.0) == FSDP_OK);
    scope = fsdp_scope_begin();
    fsdp_tensor *y = fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(4, 3), 1.0));
    double v = y ? fsdp_at(y, SIZES(0, 0)) : NAN;
    fsdp_scope_end(scope);
    fsdp_module_free(m);
    if (!y) return fsdp_error();
    return isfinite(v) ? FSDP_OK : fsdp__fail(FSDP_INTERNAL, "%g", v);
}

static void test_buffers(void **state)
{
    (void)state;
    int fill = 1;
    check_ok(fsdp_run_threads(2, buffers, &fill));
    fill = 0;
    assert_int_not_equal(fsdp_run_threads(2, buffers, &fill), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "buffer table has no values");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_buffers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
