/*
 * schedule.c - learning rates as pure functions of the step: linear warm-up,
 * a stable part, decay to a floor. There is no state to save or to lose.
 */
#include <math.h>

#include "base/error.h"
#include "fsdp/optim.h"

#ifndef M_PI
#define M_PI 3.14159265358979323846
#endif

double fsdp_schedule_factor(const fsdp_schedule *s, int64_t step)
{
    if (!s) {
        fsdp__fail_null("fsdp_schedule_factor", "the schedule");
        return NAN;
    }
    int64_t total = s->total_steps, warm = s->warmup_steps < total ? s->warmup_steps : total;
    if (step < warm) return (double)(step + 1) / (double)warm;
    int64_t decay = total - warm;
    if (s->decay_ratio >= 0.0) {
        int64_t part = (int64_t)llrint((double)total * s->decay_ratio); /* halves to even */
        decay = part < decay ? part : decay;
    }
    int64_t start = total - decay; /* first step of the decay */
    if (decay <= 0 || step < start) return 1.0;
    double x = (double)(step - start) / (double)decay;
    if (x > 1.0) x = 1.0;
    double y = 1.0 - x;
    if (s->decay == FSDP_DECAY_SQRT) y = 1.0 - sqrt(x);
    if (s->decay == FSDP_DECAY_COSINE) y = 0.5 * (1.0 + cos(M_PI * x));
    return s->min_lr_factor + (1.0 - s->min_lr_factor) * y;
}
