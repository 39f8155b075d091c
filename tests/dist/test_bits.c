/*
 * test_bits.c - what must not change a bit of losses, gradient norms and weights: a second run,
 * the number of compute threads, prefetch, whose memory a gather fills, and the strategy.
 *
 * The model is large enough that every kernel of a step is cut into parts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/error.h"
#include "base/rng.h"
#include "fsdp/fsdp.h"
#include "fsdp/models.h"
#include "models/config.h"

/* A sanitizer makes each step a hundred times slower: there the sizes are small. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { RANKS = 2, STEPS = 2, B = 2, T = 16, VOCAB = 200, WIDTH = 32, FFN = 48 };
#else
enum { RANKS = 2, STEPS = 3, B = 2, T = 160, VOCAB = 3000, WIDTH = 256, FFN = 640 };
#endif

typedef struct setting {
    const char *name;
    int threads, prefetch, private_gather, replicas;
    fsdp_reshard_policy reshard;
} setting;

static const setting settings[] = {
    {"first run", 1, 1, 0, 0, FSDP_RESHARD_AUTO},
    {"second run", 1, 1, 0, 0, FSDP_RESHARD_AUTO},
    {"2 threads", 2, 1, 0, 0, FSDP_RESHARD_AUTO},
    {"no prefetch", 1, 0, 0, 0, FSDP_RESHARD_AUTO},
    {"prefetch 2", 1, 2, 0, 0, FSDP_RESHARD_AUTO},
    {"own copies", 1, 1, 1, 0, FSDP_RESHARD_AUTO},
    {"always", 1, 1, 0, 0, FSDP_RESHARD_ALWAYS},
    {"SHARD_GRAD_OP", 2, 1, 0, 0, FSDP_RESHARD_NEVER},
    {"NO_SHARD", 2, 1, 0, 1, FSDP_RESHARD_AUTO},
};

typedef struct run {
    const setting *s;
    fsdp_dtype dtype;
    double loss[RANKS][STEPS], norm[STEPS];
    double weights; /* a sum that any changed bit would change: of squares of the last weights */
} run;

static fsdp_status make(const run *r, fsdp_module **out)
{
    int sizes[2] = {r->s->replicas ? RANKS : 1, r->s->replicas ? 1 : RANKS};
    const char *axes[2] = {"replicate", "shard"};
    fsdp_mesh *mesh = fsdp_mesh_create(FSDP_CPU, 2, sizes, axes);
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.hidden_size = WIDTH, c.num_layers = 2, c.num_heads = 4, c.num_kv_heads = 2;
    c.head_dim = WIDTH / 4;
    c.intermediate_size = FFN, c.vocab_size = VOCAB;
    FSDP_TRY(fsdp_device_push(FSDP_META));
    fsdp_module *m = *out = fsdp_model_create(&c);
    FSDP_TRY(fsdp_device_pop());
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = r->s->reshard;
    o.prefetch_limit = r->s->prefetch;
    o.private_gather = r->s->private_gather;
    o.mp_policy.param_dtype = r->dtype;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), &o));
    FSDP_TRY(fsdp_fully_shard(m, &o));
    FSDP_TRY(fsdp_to_empty(m, FSDP_CPU));
    return fsdp_reset_parameters(m, 7);
}

static fsdp_status step(run *r, fsdp_module *m, fsdp_optimizer *adamw, int n)
{
    int64_t tokens[B * (T + 1)];
    uint64_t key = fsdp__rng_mix(fsdp__rng_key((uint64_t)n), (uint64_t)fsdp_rank());
    for (int i = 0; i < B * (T + 1); i++)
        tokens[i] = (int64_t)(fsdp__rng_u32(key, (uint64_t)i) % VOCAB);
    const int64_t sizes[2] = {B, T}, strides[2] = {T + 1, 1};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x =
        fsdp_contiguous(fsdp_tensor_from_memory(tokens, FSDP_I64, 2, sizes, strides, NULL, NULL));
    fsdp_tensor *y = fsdp_contiguous(
        fsdp_tensor_from_memory(tokens + 1, FSDP_I64, 2, sizes, strides, NULL, NULL));
    fsdp_tensor *loss = fsdp_scale(fsdp_model_forward(m, x, NULL, y), 1.0 / (B * T));
    r->loss[fsdp_rank()][n] = loss ? fsdp_item(loss) : 0.0;
    fsdp_status s = fsdp_backward(loss);
    double norm = 0.0;
    if (s == FSDP_OK) s = fsdp_clip_grad_norm(m, 1.0, &norm);
    if (fsdp_rank() == 0) r->norm[n] = norm;
    if (s == FSDP_OK) s = fsdp_optimizer_step(adamw);
    if (s == FSDP_OK) s = fsdp_zero_grad(m);
    fsdp_scope_end(scope);
    return s;
}

/* Rank 0 adds up the whole weights, parameter by parameter. */
static fsdp_status weigh(run *r, fsdp_module *m)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *full = fsdp_dtensor_full(fsdp_param_tensor(l.items[i].param));
        fsdp_tensor *sum = full ? fsdp_sum(fsdp_mul(full, full)) : NULL;
        if (sum && fsdp_rank() == 0) r->weights += fsdp_item(sum) * (double)(i + 1);
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    return fsdp_error();
}

static fsdp_status train(void *arg)
{
    run *r = arg;
    fsdp_module *m = NULL;
    FSDP_TRY(fsdp_set_threads(r->s->threads));
    fsdp_status s = make(r, &m);
    fsdp_optimizer *adamw = s == FSDP_OK ? fsdp_adamw(m, NULL) : NULL;
    if (s == FSDP_OK && !adamw) s = fsdp_error();
    for (int n = 0; n < STEPS && s == FSDP_OK; n++)
        s = step(r, m, adamw, n);
    if (s == FSDP_OK) s = weigh(r, m);
    fsdp_optimizer_free(adamw);
    fsdp_module_free(m);
    return s;
}

static void same_bits(fsdp_dtype dtype)
{
    run first = {.s = &settings[0], .dtype = dtype};
    assert_int_equal(fsdp_run_threads(RANKS, train, &first), FSDP_OK);
    assert_true(first.loss[0][0] > 1.0 && first.loss[0][0] != first.loss[1][0]);
    assert_true(first.norm[0] > 0.0 && first.weights > 0.0);
    for (size_t i = 1; i < sizeof settings / sizeof settings[0]; i++) {
        run other = {.s = &settings[i], .dtype = dtype};
        assert_int_equal(fsdp_run_threads(RANKS, train, &other), FSDP_OK);
        bool same = !memcmp(first.loss, other.loss, sizeof first.loss) &&
                    !memcmp(first.norm, other.norm, sizeof first.norm) &&
                    first.weights == other.weights;
        if (!same)
            print_error("%s: losses %.17g %.17g %.17g, first run %.17g %.17g %.17g\n",
                        settings[i].name, other.loss[0][0], other.loss[0][1], other.loss[0][2],
                        first.loss[0][0], first.loss[0][1], first.loss[0][2]);
        assert_true(same);
    }
}

static void test_f32(void **state)
{
    (void)state;
    same_bits(FSDP_F32);
}

static void test_bf16(void **state)
{
    (void)state;
    same_bits(FSDP_BF16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_f32), cmocka_unit_test(test_bf16)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
