/*
 * batch_norm.c - the layer with buffers: running statistics that forwards in
 * training move. They are whole on every rank, nobody's gradient reaches them,
 * and they keep f32 whatever dtype the parameters compute in.
 */
#include <stdio.h>

#include "base/error.h"
#include "nn/module.h"

typedef struct batch_norm {
    fsdp_module base;
    fsdp_param *weight, *bias;
    double eps, momentum;
} batch_norm;

static fsdp_status reset(fsdp_module *m)
{
    FSDP_TRY(fsdp_fill_(fsdp_module_buffer(m, "running_mean"), 0));
    FSDP_TRY(fsdp_fill_(fsdp_module_buffer(m, "running_var"), 1));
    return fsdp_fill_(fsdp_module_buffer(m, "num_batches_tracked"), 0);
}

static fsdp_tensor *forward(fsdp_module *self, fsdp_tensor *x)
{
    batch_norm *b = (batch_norm *)self;
    int training = fsdp_module_training(self);
    fsdp_tensor *y =
        fsdp_batch_norm(x, fsdp_param_tensor(b->weight), fsdp_param_tensor(b->bias),
                        fsdp_module_buffer(self, "running_mean"),
                        fsdp_module_buffer(self, "running_var"), training, b->momentum, b->eps);
    fsdp_tensor *seen = fsdp_module_buffer(self, "num_batches_tracked");
    if (!y || !training || fsdp_recomputing() || fsdp_tensor_device(seen) == FSDP_META) return y;
    if (fsdp__tensor_writable(seen, "batch_norm") != FSDP_OK) return NULL;
    ++*(int64_t *)fsdp_data(seen);
    fsdp_touch(seen);
    return y;
}

static void describe(const fsdp_module *self, char *text, size_t n)
{
    const batch_norm *b = (const batch_norm *)self;
    snprintf(text, n, "%g, momentum %g", b->eps, b->momentum);
}

static fsdp_status add_buffer(fsdp_module *m, const char *name, fsdp_dtype t, int ndim, int64_t dim)
{
    fsdp_purpose before = fsdp__purpose_set(FSDP_OTHER);
    fsdp_tensor *x = fsdp__tensor_own(fsdp__tensor_create(t, ndim, &dim, fsdp_device_current()));
    fsdp__purpose_set(before);
    if (!x) return fsdp_error();
    fsdp_status s = fsdp_module_add_buffer(m, name, x);
    fsdp_release(x);
    return s;
}

static fsdp_status fill(batch_norm *b, int64_t dim)
{
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0}, zero = {FSDP_INIT_ZEROS, 0, 0};
    fsdp_module *m = &b->base;
    b->weight = fsdp_module_add_param(m, "weight", fsdp_param_create(FSDP_F32, 1, &dim, one));
    b->bias = fsdp_module_add_param(m, "bias", fsdp_param_create(FSDP_F32, 1, &dim, zero));
    if (!b->weight || !b->bias) return fsdp_error();
    FSDP_TRY(add_buffer(m, "running_mean", FSDP_F32, 1, dim));
    FSDP_TRY(add_buffer(m, "running_var", FSDP_F32, 1, dim));
    FSDP_TRY(add_buffer(m, "num_batches_tracked", FSDP_I64, 0, 0));
    FSDP_TRY(fsdp_module_set_buffer_rule(m, "running_mean", FSDP_BUFFER_MEAN));
    FSDP_TRY(fsdp_module_set_buffer_rule(m, "running_var", FSDP_BUFFER_MEAN));
    FSDP_TRY(fsdp_module_set_buffer_rule(m, "num_batches_tracked", FSDP_BUFFER_BROADCAST));
    return fsdp_device_current() == FSDP_META ? FSDP_OK : reset(m);
}

fsdp_module *fsdp_batch_norm_create(int64_t dim, double eps, double momentum)
{
    if (!(momentum >= 0 && momentum <= 1) || !(eps >= 0)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "batch norm: momentum %g, eps %g; expected 0 <= momentum <= 1 and eps >= 0",
                   momentum, eps);
        return NULL;
    }
    batch_norm *b = (batch_norm *)fsdp_module_create(sizeof *b, "BatchNorm");
    if (!b) return NULL;
    b->eps = eps;
    b->momentum = momentum;
    b->base.forward1 = forward;
    b->base.describe = describe;
    b->base.in->reset = reset;
    if (fill(b, dim) == FSDP_OK) return &b->base;
    fsdp_module_free(&b->base);
    return NULL;
}
