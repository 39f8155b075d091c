/*
 * test_train_losses.c - RC-05: losses (sum, tokens) of (2, 1) and (90, 9) are 92 / 10 = 9.2 a
 * token, never the 6.0 of a mean of means: as microbatches of one rank, on two ranks, and as steps
 * of a validation; and so is the gradient.
 */
#include "tensor_check.h"

#include "train/losses.h"

/* Row k has `tokens[k]` values x[k], with w = 1: the loss sum is w * x * tokens. */
static const int tokens[] = {1, 9};
static const double value[] = {2, 10};

typedef struct weight {
    fsdp_module base;
    fsdp_param *w;
} weight;

/* x (T) -> the sum of w * x: a sum over tokens, as the models' losses are. */
static fsdp_tensor *weight_forward(fsdp_module *self, fsdp_tensor *x)
{
    fsdp_tensor *w = fsdp_param_tensor(((weight *)self)->w);
    return fsdp_sum(fsdp_mul(x, w));
}

static weight *weight_create(void)
{
    weight *m = (weight *)fsdp_module_create(sizeof *m, "Weight");
    if (!m) return NULL;
    m->base.forward1 = weight_forward;
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    m->w = fsdp_module_add_param(&m->base, "w", fsdp_param_create(FSDP_F32, 1, SIZES(1), one));
    return m;
}

/* A step of two rows, of which this rank has `own`, in microbatches of one. */
static fsdp__sampler_step plan_of(int ranks)
{
    return (fsdp__sampler_step){
        .rows = 2, .block = 2 / ranks, .valid_tokens = 10, .microbatch = 1, .calls = 2 / ranks};
}

static fsdp_status training(void *arg)
{
    (void)arg;
    int ranks = fsdp_world_size();
    fsdp__sampler_step plan = plan_of(ranks);
    weight *m = weight_create();
    EXPECT(m && fsdp_fully_shard(&m->base, NULL) == FSDP_OK);
    EXPECT(fsdp_set_gradient_divide_factor(&m->base, 1.0, 1) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&m->base, 1) == FSDP_OK);
    fsdp__losses losses = {0};
    EXPECT(fsdp__losses_reserve(&losses, ranks, plan.calls) == FSDP_OK);
    for (int64_t call = 0; call < plan.calls; call++) {
        int64_t row = ranks == 1 ? call : fsdp_rank();
        fsdp_scope *scope = fsdp_scope_begin();
        EXPECT(fsdp_set_requires_gradient_sync(&m->base, call == plan.calls - 1, 1) == FSDP_OK);
        fsdp_tensor *loss =
            fsdp_call(&m->base, fsdp_full(FSDP_F32, 1, SIZES(tokens[row]), value[row]));
        losses.mine[call] = fsdp_item(loss);
        EXPECT(fsdp_backward(fsdp_scale(loss, 1.0 / (double)plan.valid_tokens)) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp__loss_sum sum;
    EXPECT(fsdp__losses_sum(&losses, fsdp_group_world(), &plan, false, &sum) == FSDP_OK);
    EXPECT(sum.sum / (double)plan.valid_tokens == 9.2 && sum.bad_rank < 0 && !sum.flag);
    double norm = 0;
    EXPECT(fsdp_grad_norm(&m->base, 2, &norm) == FSDP_OK); /* of one number: its magnitude */
    EXPECT(fabs(norm - 9.2) < 1e-6);
    fsdp__losses_free(&losses);
    fsdp_module_free(&m->base);
    return FSDP_OK;
}

/* As the trainer validates: a step at a time, sums of losses and of tokens. */
static fsdp_status validation(void *arg)
{
    (void)arg;
    double total = 0;
    int64_t n = 0;
    fsdp__losses losses = {0};
    for (int step = 0; step < 2; step++) {
        fsdp__sampler_step plan = {
            .rows = 1, .block = 1, .valid_tokens = tokens[step], .microbatch = 1, .calls = 1};
        fsdp__loss_sum sum;
        EXPECT(fsdp__losses_reserve(&losses, fsdp_world_size(), 1) == FSDP_OK);
        /* The second rank has no row: its number, whatever it is, does not count. */
        losses.mine[0] = fsdp_rank() == 0 ? tokens[step] * value[step] : 1e9;
        EXPECT(fsdp__losses_sum(&losses, fsdp_group_world(), &plan, false, &sum) == FSDP_OK);
        total += sum.sum;
        n += plan.valid_tokens;
    }
    EXPECT(total / (double)n == 9.2);
    fsdp__losses_free(&losses);
    return FSDP_OK;
}

static void test_rc05(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(1, training, NULL));
    check_ok(fsdp_run_threads(2, training, NULL));
    check_ok(fsdp_run_threads(1, validation, NULL));
    check_ok(fsdp_run_threads(2, validation, NULL));
}

/* A NaN of one rank, and a flag of another, are known to all. */
static fsdp_status one_is_bad(void *arg)
{
    (void)arg;
    fsdp__sampler_step plan = {
        .rows = 8, .block = 2, .valid_tokens = 8, .microbatch = 1, .calls = 2};
    fsdp__losses losses = {0};
    fsdp__loss_sum sum;
    EXPECT(fsdp__losses_reserve(&losses, 4, 2) == FSDP_OK);
    losses.mine[0] = 1;
    losses.mine[1] = fsdp_rank() == 2 ? NAN : fsdp_rank() == 3 ? INFINITY : 1;
    EXPECT(fsdp__losses_sum(&losses, fsdp_group_world(), &plan, fsdp_rank() == 1, &sum) == FSDP_OK);
    EXPECT(sum.bad_rank == 2 && sum.bad_call == 1 && sum.flag && isnan(sum.sum));
    fsdp__losses_free(&losses);
    return FSDP_OK;
}

static void test_bad_rank(void **state)
{
    (void)state;
    check_ok(fsdp_run_threads(4, one_is_bad, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rc05),
                                       cmocka_unit_test(test_bad_rank)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
