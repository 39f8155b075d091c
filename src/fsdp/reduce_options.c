/*
 * reduce_options.c - the public calls that steer how gradients are reduced.
 */
#include <math.h>

#include "base/error.h"
#include "fsdp/unit.h"

static void set_all_reduce(fsdp__unit *u, double v)
{
    u->all_reduce = v != 0.0;
}

static void set_divide(fsdp__unit *u, double v)
{
    u->divide = v;
}

static void set_unused(fsdp__unit *u, double v)
{
    u->reduce_unused = v != 0.0;
}

static void set_max_reductions(fsdp__unit *u, double v)
{
    u->max_reductions = (int)v;
}

fsdp_status fsdp_set_requires_all_reduce(fsdp_module *m, int on, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_requires_all_reduce", "the module");
    fsdp__unit_each(m, recurse, set_all_reduce, on);
    return FSDP_OK;
}

fsdp_status fsdp_set_gradient_divide_factor(fsdp_module *m, double f, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_gradient_divide_factor", "the module");
    if (!(f >= 0.0) || isinf(f))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "gradient divide factor %g; expected above 0, or 0 for the default", f);
    fsdp__unit_each(m, recurse, set_divide, f);
    return FSDP_OK;
}

fsdp_status fsdp_set_force_sum_reduction_for_comms(fsdp_module *m, int on)
{
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, "fsdp_set_force_sum_reduction_for_comms", &u));
    u->force_sum = on != 0;
    return FSDP_OK;
}

fsdp_status fsdp_set_reduce_scatter_unused_params(fsdp_module *m, int on, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_reduce_scatter_unused_params", "the module");
    fsdp__unit_each(m, recurse, set_unused, on);
    return FSDP_OK;
}

fsdp_status fsdp_set_reduce_scatter_max_input_buffers(fsdp_module *m, int n, int recurse)
{
    if (!m) return fsdp__fail_null("fsdp_set_reduce_scatter_max_input_buffers", "the module");
    if (n < 1)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_set_reduce_scatter_max_input_buffers: %d buffers; expected 1 or "
                          "more, since a reduction reads one",
                          n);
    fsdp__unit_each(m, recurse, set_max_reductions, n);
    return FSDP_OK;
}
