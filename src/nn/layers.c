/*
 * layers.c - the layers that models are made of. Initial rules are PyTorch's:
 * linear weights and biases uniform in +-1/sqrt(in), embeddings normal, norms
 * ones and zeros; models set their own by fsdp_module_set_init.
 */
#include <math.h>
#include <stdio.h>

#include "base/error.h"
#include "nn/module.h"

typedef struct layer {
    fsdp_module base;
    fsdp_param *weight, *bias;
    int64_t in, out;
    double value; /* eps, or the probability of dropout */
} layer;

static layer *create(const char *type, int64_t in, int64_t out, double value)
{
    layer *l = (layer *)fsdp_module_create(sizeof *l, type);
    if (!l) return NULL;
    l->in = in;
    l->out = out;
    l->value = value;
    return l;
}

/* Adds weight and, if asked, bias; frees the layer on failure. */
static fsdp_module *with_params(layer *l, int ndim, const int64_t *sizes, fsdp_init_rule w,
                                int64_t bias, fsdp_init_rule b)
{
    if (!l) return NULL;
    l->weight =
        fsdp_module_add_param(&l->base, "weight", fsdp_param_create(FSDP_F32, ndim, sizes, w));
    if (l->weight && bias)
        l->bias = fsdp_module_add_param(&l->base, "bias", fsdp_param_create(FSDP_F32, 1, &bias, b));
    if (l->weight && (!bias || l->bias)) return &l->base;
    fsdp_module_free(&l->base);
    return NULL;
}

static void describe_sizes(const fsdp_module *self, char *text, size_t n)
{
    const layer *l = (const layer *)self;
    snprintf(text, n, "%lld -> %lld%s", (long long)l->in, (long long)l->out,
             l->bias ? ", bias" : "");
}

static void describe_value(const fsdp_module *self, char *text, size_t n)
{
    snprintf(text, n, "%g", ((const layer *)self)->value);
}

/* ---- linear ------------------------------------------------------------------ */

static fsdp_tensor *linear_forward(fsdp_module *self, fsdp_tensor *x)
{
    layer *l = (layer *)self;
    fsdp_tensor *w = fsdp_param_tensor(l->weight);
    return l->bias ? fsdp_linear_bias(x, w, fsdp_param_tensor(l->bias)) : fsdp_linear(x, w);
}

static fsdp_tensor *in_out_forward(fsdp_module *self, fsdp_tensor *x)
{
    layer *l = (layer *)self;
    return fsdp_linear_in_out(x, fsdp_param_tensor(l->weight), fsdp_param_tensor(l->bias));
}

static fsdp_module *make_linear(int64_t in, int64_t out, int bias, bool in_out)
{
    double a = in > 0 ? 1.0 / sqrt((double)in) : 0.0;
    fsdp_init_rule rule = {FSDP_INIT_UNIFORM, -a, a};
    layer *l = create(in_out ? "LinearInOut" : "Linear", in, out, 0.0);
    if (!l) return NULL;
    l->base.forward1 = in_out ? in_out_forward : linear_forward;
    l->base.describe = describe_sizes;
    int64_t sizes[2] = {in_out ? in : out, in_out ? out : in};
    return with_params(l, 2, sizes, rule, bias ? out : 0, rule);
}

fsdp_module *fsdp_linear_create(int64_t in, int64_t out, int bias)
{
    return make_linear(in, out, bias, false);
}

fsdp_module *fsdp_linear_in_out_create(int64_t in, int64_t out, int bias)
{
    return make_linear(in, out, bias, true);
}

bool fsdp__linear_info_of(const fsdp_module *m, fsdp__linear_info *out)
{
    if (m->forward1 != linear_forward && m->forward1 != in_out_forward) return false;
    const layer *l = (const layer *)m;
    *out = (fsdp__linear_info){l->in, l->out, m->forward1 == in_out_forward, l->weight};
    return true;
}

/* ---- embedding ------------------------------------------------------------------ */

static fsdp_tensor *embedding_forward(fsdp_module *self, fsdp_tensor *ids)
{
    return fsdp_embedding(fsdp_param_tensor(((layer *)self)->weight), ids);
}

fsdp_module *fsdp_embedding_create(int64_t rows, int64_t dim)
{
    layer *l = create("Embedding", rows, dim, 0.0);
    if (!l) return NULL;
    l->base.forward1 = embedding_forward;
    l->base.describe = describe_sizes;
    int64_t sizes[2] = {rows, dim};
    fsdp_init_rule rule = {FSDP_INIT_NORMAL, 0.0, 1.0};
    return with_params(l, 2, sizes, rule, 0, rule);
}

/* ---- norms -------------------------------------------------------------------------- */

static fsdp_tensor *rms_norm_forward(fsdp_module *self, fsdp_tensor *x)
{
    layer *l = (layer *)self;
    return fsdp_rms_norm(x, fsdp_param_tensor(l->weight), l->value);
}

static fsdp_tensor *layer_norm_forward(fsdp_module *self, fsdp_tensor *x)
{
    layer *l = (layer *)self;
    return fsdp_layer_norm(x, fsdp_param_tensor(l->weight), fsdp_param_tensor(l->bias), l->value);
}

static bool eps_fits(const char *what, double eps)
{
    if (eps >= 0 && isfinite(eps)) return true;
    fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: eps %g; expected a finite number from 0", what, eps);
    return false;
}

fsdp_module *fsdp_rms_norm_create(int64_t dim, double eps)
{
    if (!eps_fits("fsdp_rms_norm_create", eps)) return NULL;
    layer *l = create("RMSNorm", dim, dim, eps);
    if (!l) return NULL;
    l->base.forward1 = rms_norm_forward;
    l->base.describe = describe_value;
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0};
    return with_params(l, 1, &dim, one, 0, one);
}

fsdp_module *fsdp_layer_norm_create(int64_t dim, double eps)
{
    if (!eps_fits("fsdp_layer_norm_create", eps)) return NULL;
    layer *l = create("LayerNorm", dim, dim, eps);
    if (!l) return NULL;
    l->base.forward1 = layer_norm_forward;
    l->base.describe = describe_value;
    fsdp_init_rule one = {FSDP_INIT_ONES, 0, 0}, zero = {FSDP_INIT_ZEROS, 0, 0};
    return with_params(l, 1, &dim, one, dim, zero);
}

/* ---- the rest --------------------------------------------------------------------------- */

static fsdp_tensor *dropout_forward(fsdp_module *self, fsdp_tensor *x)
{
    return self->in->training ? fsdp_dropout(x, ((layer *)self)->value) : x;
}

fsdp_module *fsdp_dropout_create(double p)
{
    if (!(p >= 0.0 && p < 1.0)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "dropout: probability %g; expected 0 <= p < 1", p);
        return NULL;
    }
    layer *l = create("Dropout", 0, 0, p);
    if (!l) return NULL;
    l->base.forward1 = dropout_forward;
    l->base.describe = describe_value;
    return &l->base;
}

static fsdp_tensor *sequential_forward(fsdp_module *self, fsdp_tensor *x)
{
    /* Of the activations in between one lives at a time. */
    for (int i = 0; i < fsdp_module_child_count(self); i++)
        fsdp_set(&x, fsdp_call(fsdp_module_child(self, i), x));
    return x;
}

fsdp_module *fsdp_sequential_create(void)
{
    layer *l = create("Sequential", 0, 0, 0.0);
    if (!l) return NULL;
    l->base.forward1 = sequential_forward;
    return &l->base;
}

fsdp_module *fsdp_module_list_create(void)
{
    layer *l = create("ModuleList", 0, 0, 0.0);
    return l ? &l->base : NULL;
}
