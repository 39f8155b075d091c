/*
 * test_autograd_memory.c - what is never stored: the T x T matrix of attention and the (rows,
 * vocabulary) logits of head and cross entropy, forward or backward, in bytes of the accounts.
 */
#include "tensor_check.h"

/* Peak beyond what is live at the start. */
static int64_t begin(void)
{
    fsdp_memory_stats m;
    fsdp_memory_reset_peak();
    fsdp_memory_get(&m);
    return m.live_total;
}

static int64_t grown(int64_t before)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    return m.peak_total - before + m.reserved_at_peak;
}

static fsdp_tensor *leaf(fsdp_dtype t, int ndim, const int64_t *sizes, const char *name)
{
    fsdp_tensor *x = fsdp_randn(t, ndim, sizes, 3, name);
    check_ok(fsdp_requires_grad_(x, 1));
    return x;
}

/* Queries, keys and values of one head: with T twice as large all bytes double, none are four
 * times as many. */
static int64_t attention_bytes(fsdp_dtype dt, int64_t t, double dropout)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *q = leaf(dt, 4, SIZES(1, t, 2, 8), "q");
    fsdp_tensor *k = leaf(dt, 4, SIZES(1, t, 1, 8), "k");
    fsdp_tensor *v = leaf(dt, 4, SIZES(1, t, 1, 8), "v");
    fsdp_attention_options o = {.dropout_p = dropout};
    int64_t before = begin();
    fsdp_tensor *y = fsdp_attention(q, k, v, &o);
    check_tensor(y);
    check_ok(fsdp_backward(fsdp_sum(y)));
    check_tensor(fsdp_grad(q));
    int64_t most = grown(before);
    fsdp_scope_end(scope);
    return most;
}

static void test_attention(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++)
        for (int d = 0; d < 2; d++) {
            fsdp_dtype dt = k ? FSDP_BF16 : FSDP_F32;
            int64_t size = (int64_t)fsdp_dtype_size(dt), t = 1024;
            int64_t bytes = attention_bytes(dt, t, d ? 0.1 : 0), twice;
            twice = attention_bytes(dt, 2 * t, d ? 0.1 : 0);
            if (bytes >= t * t * size || twice > 2 * bytes + 65536)
                fail_msg("%s, dropout %d: %lld bytes for T = %lld, %lld for twice that",
                         fsdp_dtype_name(dt), d, (long long)bytes, (long long)t, (long long)twice);
        }
}

static void test_head(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        fsdp_dtype dt = k ? FSDP_BF16 : FSDP_F32;
        const int64_t rows = 300, c = 8, vocab = 20000;
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = leaf(dt, 2, SIZES(rows, c), "x"), *w = leaf(dt, 2, SIZES(vocab, c), "w");
        fsdp_tensor *target = fsdp_zeros(FSDP_I64, 1, SIZES(rows));
        int64_t before = begin();
        fsdp_tensor *loss = fsdp_head_cross_entropy(x, w, NULL, target, -100, FSDP_REDUCE_MEAN);
        check_tensor(loss);
        check_ok(fsdp_backward(loss));
        check_tensor(fsdp_grad(w));
        int64_t most = grown(before), whole = rows * vocab * (int64_t)fsdp_dtype_size(dt);
        if (most > whole / 2)
            fail_msg("%s: %lld bytes; whole logits have %lld", fsdp_dtype_name(dt), (long long)most,
                     (long long)whole);
        fsdp_scope_end(scope);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_attention),
                                       cmocka_unit_test(test_head)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
