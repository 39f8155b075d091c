/*
 * model.c - the root of every family: body, head, loss; and what blocks share.
 *
 * With targets the root never makes logits: head and loss are one op over slices of rows. Shapes:
 * tokens, positions, targets (B,T); x (B,T,D); logits (B,T,V).
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "models/models_internal.h"

enum { IGNORE_INDEX = -100 };

static fsdp_status model_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out);

static fsdp__model *model_of(const fsdp_module *m, const char *what)
{
    if (m && m->forward == model_forward) return (fsdp__model *)(uintptr_t)m;
    fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: %s is no model; expected what fsdp_model_create made",
               what, m ? m->type : "NULL");
    return NULL;
}

/* ---- the head: a linear layer whose weight may be the embedding's ------------------- */

typedef struct head {
    fsdp_module base;
    fsdp_param *weight;
} head;

static fsdp_tensor *head_forward(fsdp_module *self, fsdp_tensor *x)
{
    return fsdp_linear(x, fsdp_param_tensor(((head *)self)->weight));
}

static void head_describe(const fsdp_module *self, char *text, size_t n)
{
    const int64_t *size = fsdp_param_sizes(((const head *)self)->weight);
    snprintf(text, n, "%lld -> %lld", (long long)size[1], (long long)size[0]);
}

/* shared NULL: a weight of its own. */
static fsdp_module *head_create(const fsdp_model_config *c, fsdp_param *shared)
{
    head *h = (head *)fsdp_module_create(sizeof *h, "Linear");
    if (!h) return NULL;
    int64_t sizes[2] = {c->vocab_size, c->hidden_size};
    fsdp_init_rule rule = {FSDP_INIT_NORMAL, 0.0, c->initializer_range};
    fsdp_param *p =
        shared ? fsdp_param_retain(shared) : fsdp_param_create(FSDP_F32, 2, sizes, rule);
    h->base.forward1 = head_forward;
    h->base.describe = head_describe;
    h->weight = fsdp_module_add_param(&h->base, "weight", p);
    if (h->weight) return &h->base;
    fsdp_module_free(&h->base);
    return NULL;
}

/* ---- making --------------------------------------------------------------------------- */

static void model_destroy(fsdp_module *self)
{
    fsdp__rope_free(&((fsdp__model *)self)->rope);
}

void fsdp__model_set_init(fsdp_module *m, double deviation)
{
    for (int64_t i = 0; i < m->in->n_params; i++) {
        fsdp_param *p = m->in->params[i].param;
        if (p->ndim >= 2) p->init = (fsdp_init_rule){FSDP_INIT_NORMAL, 0.0, deviation};
        if (!strcmp(m->in->params[i].name, "bias"))
            p->init = (fsdp_init_rule){FSDP_INIT_ZEROS, 0.0, 0.0};
    }
    for (int64_t i = 0; i < m->in->n_children; i++)
        fsdp__model_set_init(m->in->children[i], deviation);
}

fsdp_module *fsdp_model_create(const fsdp_model_config *c)
{
    if (!c) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_model_create: no config");
        return NULL;
    }
    if (fsdp_error() || fsdp__model_config_check(c, "fsdp_model_create") != FSDP_OK) return NULL;
    fsdp__model *m =
        (fsdp__model *)fsdp_module_create(sizeof *m, fsdp__model_architecture(c->family));
    if (!m) return NULL;
    m->c = *c;
    m->rope.c = c->rope;
    m->rope.head_dim = c->head_dim;
    m->base.forward = model_forward;
    m->base.destroy = model_destroy;
    bool gpt2 = c->family == FSDP_GPT2;
    bool ok = gpt2 ? fsdp__gpt2_build(m) : fsdp__decoder_build(m);
    fsdp_param *shared = NULL;
    if (ok && c->tie_word_embeddings)
        shared = gpt2 ? fsdp__gpt2_embedding(m) : fsdp__decoder_embedding(m);
    fsdp_module *h = ok ? fsdp_module_add(&m->base, "lm_head", head_create(c, shared)) : NULL;
    if (!h) {
        fsdp_module_free(&m->base);
        return NULL;
    }
    m->head = ((head *)h)->weight;
    return &m->base;
}

/* ---- forward ----------------------------------------------------------------------------- */

static fsdp_status check_tokens(const fsdp_values *in)
{
    const fsdp_tensor *t = in->n > 0 ? in->t[0] : NULL;
    if (!t || t->dtype != FSDP_I64 || t->ndim != 2) {
        fsdp__str s = {0};
        if (t) fsdp__describe(t, &s);
        fsdp__fail(FSDP_INVALID_SHAPE, "tokens are %s; expected i64 (batch, length)",
                   t ? fsdp__str_get(&s) : "NULL");
        fsdp__str_free(&s);
        return fsdp_error();
    }
    for (int k = 1; k < in->n && k < 3; k++) {
        if (!in->t[k] || (in->t[k]->dtype == FSDP_I64 && fsdp__same_sizes(in->t[k], t))) continue;
        fsdp__str s = {0};
        fsdp__describe(in->t[k], &s);
        fsdp__fail(FSDP_INVALID_SHAPE, "%s are %s; expected i64 (%lld, %lld), as tokens",
                   k == 1 ? "positions" : "targets", fsdp__str_get(&s), (long long)t->size[0],
                   (long long)t->size[1]);
        fsdp__str_free(&s);
        return fsdp_error();
    }
    return FSDP_OK;
}

static fsdp_status model_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    fsdp__model *m = (fsdp__model *)self;
    FSDP_TRY(check_tokens(in));
    fsdp_tensor *targets = in->n > 2 ? in->t[2] : NULL;
    fsdp_values body_in = {2, {in->t[0], in->n > 1 ? in->t[1] : NULL}}, body_out;
    FSDP_TRY(fsdp_module_call(m->body, &body_in, &body_out));
    fsdp_tensor *x = body_out.t[0], *w = fsdp_param_tensor(m->head);
    out->n = 1;
    out->t[0] = targets
                    ? fsdp_head_cross_entropy(x, w, NULL, targets, IGNORE_INDEX, FSDP_REDUCE_SUM)
                    : fsdp_linear(x, w);
    if (out->t[0] && m->cache) m->cache->length += in->t[0]->size[1];
    return fsdp_error();
}

fsdp_tensor *fsdp_model_forward(fsdp_module *model, fsdp_tensor *tokens, fsdp_tensor *positions,
                                fsdp_tensor *targets)
{
    if (!model_of(model, "fsdp_model_forward")) return NULL;
    fsdp_values in = {3, {tokens, positions, targets}}, out;
    return fsdp_module_call(model, &in, &out) == FSDP_OK ? out.t[0] : NULL;
}

/* ---- what blocks share ------------------------------------------------------------------- */

int64_t fsdp__model_past(const fsdp__model *m)
{
    return m->cache ? m->cache->length : 0;
}

fsdp_tensor *fsdp__model_run_blocks(fsdp__model *m, fsdp_tensor *x, fsdp_tensor *positions)
{
    for (int i = 0; i < fsdp_module_child_count(m->blocks) && x; i++) {
        fsdp_values in = {positions ? 2 : 1, {x, positions}}, out;
        if (fsdp_module_call(fsdp_module_child(m->blocks, i), &in, &out) != FSDP_OK) return NULL;
        fsdp_set(&x, out.t[0]);
    }
    return x;
}

fsdp_tensor *fsdp__model_split_heads(const fsdp__model *m, fsdp_tensor *x)
{
    int64_t h = m->c.head_dim;
    int64_t sizes[4] = {fsdp_size(x, 0), fsdp_size(x, 1), fsdp_size(x, 2) / h, h};
    return fsdp_reshape(x, 4, sizes);
}

fsdp_tensor *fsdp__model_attend(fsdp__model *m, fsdp_module *self, int64_t layer, fsdp_tensor *q,
                                fsdp_tensor *k, fsdp_tensor *v)
{
    if (m->cache && fsdp__kv_cache_put(m->cache, layer, &k, &v) != FSDP_OK) return NULL;
    fsdp_attention_options o = {
        .scale = fsdp__model_attention_scale(&m->c, layer),
        .window = fsdp__model_window(&m->c, layer),
        .dropout_p = fsdp_module_training(self) ? m->c.attention_dropout : 0.0,
    };
    fsdp_tensor *y = fsdp_attention(q, k, v, &o);
    int64_t sizes[3] = {fsdp_size(y, 0), fsdp_size(y, 1), fsdp_size(y, 2) * fsdp_size(y, 3)};
    return fsdp_reshape(y, 3, sizes);
}

fsdp_tensor *fsdp__model_activation(fsdp_activation a, fsdp_tensor *x)
{
    switch (a) {
    case FSDP_ACT_SILU:
        return fsdp_silu(x);
    case FSDP_ACT_GELU:
        return fsdp_gelu(x);
    case FSDP_ACT_GELU_TANH:
        return fsdp_gelu_tanh(x);
    case FSDP_ACT_RELU:
        return fsdp_relu(x);
    default:
        return fsdp_tanh(x);
    }
}

/* ---- looking ------------------------------------------------------------------------------- */

int64_t fsdp_model_block_count(const fsdp_module *model)
{
    const fsdp__model *m = model_of(model, "fsdp_model_block_count");
    return m ? fsdp_module_child_count(m->blocks) : 0;
}

fsdp_module *fsdp_model_block(fsdp_module *model, int64_t i)
{
    fsdp__model *m = model_of(model, "fsdp_model_block");
    if (!m) return NULL;
    fsdp_module *b = fsdp_module_child(m->blocks, (int)i);
    if (!b)
        fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_model_block: block %lld of a model of %d",
                   (long long)i, fsdp_module_child_count(m->blocks));
    return b;
}

fsdp_status fsdp_model_set_cache(fsdp_module *model, fsdp_kv_cache *kv)
{
    fsdp__model *m = model_of(model, "fsdp_model_set_cache");
    if (!m) return fsdp_error();
    if (kv && kv->layers != fsdp_module_child_count(m->blocks))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "a key-value cache of %lld layers for a model of %d; create it from the "
                          "model's config",
                          (long long)kv->layers, fsdp_module_child_count(m->blocks));
    m->cache = kv;
    return FSDP_OK;
}

/* ---- operations --------------------------------------------------------------------------------
 */

double fsdp_model_flops_per_token(const fsdp_model_config *c, int64_t seq_len)
{
    if (!c) {
        fsdp__fail_null("fsdp_model_flops_per_token", "the config");
        return NAN;
    }
    double D = (double)c->hidden_size, F = (double)c->intermediate_size, T = (double)seq_len;
    double q = (double)(c->num_heads * c->head_dim), kv = (double)(c->num_kv_heads * c->head_dim);
    double mlp = (c->family == FSDP_GPT2 ? 2.0 : 3.0) * D * F;
    double weights =
        (double)c->num_layers * (D * (q + 2.0 * kv) + q * D + mlp) + D * (double)c->vocab_size;
    double scores = 0.0; /* keys that a token sees, on average, summed over layers */
    for (int64_t i = 0; i < c->num_layers; i++) {
        double w = (double)fsdp__model_window(c, i);
        scores += w > 0.0 && w < T ? w - w * w / (2.0 * T) : T / 2.0;
    }
    return 6.0 * weights + 12.0 * q * scores;
}
