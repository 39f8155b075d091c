/*
 * test_optim_schedule.c - learning rates by step, against torchtitan's formula written out plainly;
 * and what optimizers say of themselves.
 */
#include "tensor_check.h"

/* Warm-up, stable part and decay of lr_scheduler, step by step. */
static double plain(const fsdp_schedule *s, int64_t step)
{
    int64_t total = s->total_steps, warm = s->warmup_steps < total ? s->warmup_steps : total;
    int64_t decay =
        s->decay_ratio < 0 ? total - warm : (int64_t)rint((double)total * s->decay_ratio);
    if (warm + decay > total) decay = total - warm;
    int64_t stable = total + 1 - warm - decay;
    if (step < warm) return (double)(step + 1) / (double)warm;
    if (step < warm + stable) return 1.0;
    double x = (double)(step + 1 - warm - stable) / (double)decay, y = 1.0 - x;
    if (s->decay == FSDP_DECAY_SQRT) y = 1.0 - sqrt(x);
    if (s->decay == FSDP_DECAY_COSINE) y = 0.5 * (1.0 + cos(3.14159265358979323846 * x));
    return s->min_lr_factor + (1.0 - s->min_lr_factor) * y;
}

static void follows_the_formula(void **state)
{
    (void)state;
    static const int64_t warm[] = {0, 1, 3, 10, 25}, total[] = {1, 5, 10, 21};
    static const double ratio[] = {-1, 0, 0.1, 0.5, 1}, least[] = {0, 0.1, 1};
    for (int i = 0; i < 5 * 4 * 5 * 3 * 3; i++) {
        fsdp_schedule s = {warm[i % 5], total[i / 5 % 4], ratio[i / 20 % 5],
                           (fsdp_decay)(i / 100 % 3), least[i / 300]};
        for (int64_t step = 0; step < s.total_steps; step++) {
            double f = fsdp_schedule_factor(&s, step), g = plain(&s, step);
            if (!(fabs(f - g) <= 1e-12))
                fail_msg("warm-up %lld of %lld, decay %g: step %lld is %.17g; expected %.17g",
                         (long long)s.warmup_steps, (long long)s.total_steps, s.decay_ratio,
                         (long long)step, f, g);
            assert_true(f >= 0 && f <= 1);
        }
    }
}

static void known_values(void **state)
{
    (void)state;
    fsdp_schedule s = {2, 10, -1, FSDP_DECAY_LINEAR, 0};
    assert_true(fsdp_schedule_factor(&s, 0) == 0.5 && fsdp_schedule_factor(&s, 1) == 1);
    assert_true(fsdp_schedule_factor(&s, 2) == 1 && fsdp_schedule_factor(&s, 6) == 0.5);
    assert_true(fsdp_schedule_factor(&s, 10) == 0 && fsdp_schedule_factor(&s, 99) == 0);
    s.decay = FSDP_DECAY_COSINE;
    s.min_lr_factor = 0.1;
    assert_true(fabs(fsdp_schedule_factor(&s, 6) - 0.55) < 1e-12);
    s.decay_ratio = 0.2; /* stable, then the last two steps */
    for (int64_t i = 2; i <= 8; i++)
        assert_true(fsdp_schedule_factor(&s, i) == 1);
    assert_true(fsdp_schedule_factor(&s, 9) < 1);
}

static void optimizers_say_what_they_are(void **state)
{
    (void)state;
    fsdp_sgd_options d = fsdp_sgd_defaults();
    assert_true(d.lr == 1e-3 && d.momentum == 0 && d.weight_decay == 0 && !d.nesterov);
    fsdp_module *m = fsdp_linear_in_out_create(3, 2, 1); /* w (3, 2) */
    check_ok(fsdp_reset_parameters(m, 1));
    fsdp_param *w = fsdp_module_param(m, "weight");
    assert_true(fsdp_param_sizes(w)[0] == 3 && fsdp_param_sizes(w)[1] == 2);
    fsdp_optimizer *o = fsdp_sgd(m, &d), *a = fsdp_adamw(m, NULL);
    assert_int_equal(fsdp_optimizer_state_count(o), 0);
    assert_string_equal(fsdp_optimizer_state_name(o, 0), "");
    assert_string_equal(fsdp_optimizer_state_name(a, 0), "exp_avg");
    assert_string_equal(fsdp_optimizer_state_name(a, 1), "exp_avg_sq");
    assert_string_equal(fsdp_optimizer_state_name(a, 2), "");
    fsdp_scope *scope = fsdp_scope_begin();
    double before = fsdp_at(fsdp_param_tensor(w), SIZES(2, 1));
    check_ok(fsdp_backward(fsdp_sum(fsdp_call(m, fsdp_full(FSDP_F32, 2, SIZES(1, 3), 1)))));
    fsdp_optimizer_set_lr(o, 0.5);
    assert_true(fsdp_optimizer_lr(o) == 0.5);
    check_ok(fsdp_optimizer_step(o));
    assert_true(fabs(fsdp_at(fsdp_param_tensor(w), SIZES(2, 1)) - (before - 0.5)) < 1e-6);
    assert_int_equal(fsdp_optimizer_step_count(o), 1);
    fsdp_scope_end(scope);
    fsdp_optimizer_free(o);
    fsdp_optimizer_free(a);
    fsdp_param *alone = fsdp_param_create(FSDP_F32, 1, SIZES(4), (fsdp_init_rule){0});
    assert_ptr_equal(fsdp_param_retain(alone), alone);
    fsdp_param_release(alone);
    fsdp_param_release(alone);
    fsdp_module_free(m);
    assert_int_equal(check_live(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(follows_the_formula),
        cmocka_unit_test(known_values),
        cmocka_unit_test(optimizers_say_what_they_are),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
