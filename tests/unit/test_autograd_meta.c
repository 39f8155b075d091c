/*
 * test_autograd_meta.c - every op on the meta device gives the shape, dtype and
 * graph that it gives on the CPU, and takes no memory.
 */
#include "tensor_check.h"

#include "tensor/op.h"

static fsdp_tensor *f(int ndim, const int64_t *sizes)
{
    fsdp_tensor *t = fsdp_full(FSDP_BF16, ndim, sizes, 0.5);
    fsdp_requires_grad_(t, 1);
    return t;
}

static fsdp_tensor *ids(int ndim, const int64_t *sizes)
{
    return fsdp_full(FSDP_I64, ndim, sizes, 1);
}

/* The compiler names an op that is missing. */
static fsdp_tensor *run(fsdp__op op)
{
    fsdp_tensor *x = f(2, SIZES(3, 8)), *y = f(1, SIZES(8)), *v = f(4, SIZES(2, 5, 4, 6));
    switch (op) {
    case FSDP__OP_reshape:
        return fsdp_reshape(x, 3, SIZES(2, -1, 4));
    case FSDP__OP_transpose:
        return fsdp_transpose(x, 0, 1);
    case FSDP__OP_slice:
        return fsdp_slice(x, 1, 2, -1);
    case FSDP__OP_cat:
        return fsdp_cat((fsdp_tensor *[]){x, x}, 2, 1);
    case FSDP__OP_cast:
        return fsdp_cast(x, FSDP_F32);
    case FSDP__OP_clone:
        return fsdp_contiguous(fsdp_transpose(fsdp_clone(x), 0, 1));
    case FSDP__OP_add:
        return fsdp_add(x, y);
    case FSDP__OP_sub:
        return fsdp_sub(y, x);
    case FSDP__OP_mul:
        return fsdp_mul(x, x);
    case FSDP__OP_div:
        return fsdp_div(x, f(3, SIZES(2, 1, 1)));
    case FSDP__OP_scale:
        return fsdp_scale(x, 2);
    case FSDP__OP_shift:
        return fsdp_shift(x, 2);
    case FSDP__OP_exp:
        return fsdp_exp(x);
    case FSDP__OP_log:
        return fsdp_log(x);
    case FSDP__OP_sqrt:
        return fsdp_sqrt(x);
    case FSDP__OP_pow:
        return fsdp_pow(x, 3);
    case FSDP__OP_silu:
        return fsdp_silu(x);
    case FSDP__OP_gelu:
        return fsdp_gelu(x);
    case FSDP__OP_gelu_tanh:
        return fsdp_gelu_tanh(x);
    case FSDP__OP_relu:
        return fsdp_relu(x);
    case FSDP__OP_tanh:
        return fsdp_tanh(x);
    case FSDP__OP_sigmoid:
        return fsdp_sigmoid(x);
    case FSDP__OP_swiglu:
        return fsdp_swiglu(x, x);
    case FSDP__OP_softmax:
        return fsdp_softmax(x);
    case FSDP__OP_dropout:
        return fsdp_dropout(x, 0.5);
    case FSDP__OP_sum:
        return fsdp_add(fsdp_mean(x), fsdp_sum_dim(x, 0, 1));
    case FSDP__OP_linear:
        return fsdp_linear_bias(x, f(2, SIZES(7, 8)), f(1, SIZES(7)));
    case FSDP__OP_matmul:
        return fsdp_matmul(x, f(2, SIZES(8, 5)));
    case FSDP__OP_embedding:
        return fsdp_embedding(x, ids(2, SIZES(4, 2)));
    case FSDP__OP_rms_norm:
        return fsdp_rms_norm(x, y, 1e-5);
    case FSDP__OP_layer_norm:
        return fsdp_layer_norm(x, y, y, 1e-5);
    case FSDP__OP_batch_norm:
        return fsdp_batch_norm(x, y, y, fsdp_zeros(FSDP_F32, 1, SIZES(8)),
                               fsdp_zeros(FSDP_F32, 1, SIZES(8)), 1, 0.1, 1e-5);
    case FSDP__OP_rotary: {
        fsdp_tensor *t = fsdp_zeros(FSDP_F32, 2, SIZES(5, 3));
        return fsdp_rotary(v, t, t);
    }
    case FSDP__OP_attention: {
        fsdp_attention_options o = {0, 0, 3, 0.5};
        fsdp_tensor *k = f(4, SIZES(2, 5, 2, 6));
        return fsdp_attention(v, k, k, &o);
    }
    case FSDP__OP_cross_entropy:
        return fsdp_cross_entropy(x, ids(1, SIZES(3)), -100, FSDP_REDUCE_MEAN);
    case FSDP__OP_head_cross_entropy:
        return fsdp_head_cross_entropy(x, f(2, SIZES(9, 8)), f(1, SIZES(9)), ids(1, SIZES(3)), -100,
                                       FSDP_REDUCE_SUM);
    case FSDP__OP_mse_loss:
        return fsdp_mse_loss(x, x, FSDP_REDUCE_MEAN);
    case FSDP__OP_COUNT:
        break;
    }
    return NULL;
}

static void test_meta(void **state)
{
    (void)state;
    for (int op = 0; op < FSDP__OP_COUNT; op++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *cpu = run((fsdp__op)op);
        check_tensor(cpu);
        int64_t live = check_live();
        fsdp_memory_reset_peak();
        check_ok(fsdp_device_push(FSDP_META));
        fsdp_tensor *meta = run((fsdp__op)op);
        check_ok(fsdp_device_pop());
        check_tensor(meta);
        assert_int_equal(fsdp_tensor_device(meta), FSDP_META);
        assert_null(fsdp_data(meta));
        assert_int_equal(fsdp_ndim(meta), fsdp_ndim(cpu));
        for (int i = 0; i < fsdp_ndim(cpu); i++) {
            assert_int_equal(fsdp_size(meta, i), fsdp_size(cpu, i));
            assert_int_equal(fsdp_stride(meta, i), fsdp_stride(cpu, i));
        }
        assert_int_equal(fsdp_tensor_dtype(meta), fsdp_tensor_dtype(cpu));
        assert_int_equal(fsdp_requires_grad(meta), fsdp_requires_grad(cpu));
        /* Keys of dropout apart, which are of the CPU: 8 bytes a row. */
        assert_true(check_live() - live <= 64);
        fsdp_scope_end(scope);
        assert_int_equal(check_live(), 0);
    }
}

static void test_refused(void **state)
{
    (void)state;
    fsdp_scope *scope = fsdp_scope_begin();
    check_ok(fsdp_device_push(FSDP_META));
    fsdp_tensor *x = f(2, SIZES(2, 3)), *loss = fsdp_sum(x);
    check_ok(fsdp_device_pop());
    assert_int_not_equal(fsdp_backward(loss), FSDP_OK);
    check_error(FSDP_UNSUPPORTED, "meta");
    assert_null(fsdp_add(x, f(2, SIZES(2, 3))));
    check_error(FSDP_INVALID_ARGUMENT, "meta");
    assert_true(isnan(fsdp_item(loss)));
    check_error(FSDP_INVALID_STATE, "meta");
    double v[6];
    assert_int_not_equal(fsdp_to_doubles(x, v), FSDP_OK);
    check_error(FSDP_INVALID_STATE, "meta");
    check_ok(fsdp_fill_(x, 1)); /* nothing to do */
    fsdp_scope_end(scope);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_meta),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
