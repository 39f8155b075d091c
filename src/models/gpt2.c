/*
 * gpt2.c - GPT-2: learned positions, layer norms, one product for q, k and v, and weights stored
 * (in, out). Names of modules are Hugging Face's; embedding and head are tied by default.
 *
 * Shapes: x (B,T,D); q, k, v (B,T,H,h), views of one (B,T,3D).
 */
#include <math.h>
#include <stdio.h>

#include "base/error.h"
#include "models/models_internal.h"

/* ---- attention ------------------------------------------------------------------ */

typedef struct attention {
    fsdp_module base;
    fsdp__model *model;
    int64_t layer;
    fsdp_module *qkv, *proj, *drop;
} attention;

static fsdp_tensor *part(const attention *a, fsdp_tensor *qkv, int64_t i)
{
    int64_t n = fsdp_size(qkv, 2) / 3;
    return fsdp__model_split_heads(a->model, fsdp_slice(qkv, 2, i * n, (i + 1) * n));
}

static fsdp_tensor *attention_forward(fsdp_module *self, fsdp_tensor *x)
{
    attention *a = (attention *)self;
    fsdp_tensor *qkv = fsdp_call(a->qkv, x);
    fsdp_tensor *y = fsdp__model_attend(a->model, self, a->layer, part(a, qkv, 0), part(a, qkv, 1),
                                        part(a, qkv, 2));
    return fsdp_call(a->drop, fsdp_call(a->proj, y));
}

static fsdp_module *attention_create(fsdp__model *m, int64_t layer)
{
    const fsdp_model_config *c = &m->c;
    attention *a = (attention *)fsdp_module_create(sizeof *a, "GPT2Attention");
    if (!a) return NULL;
    fsdp_module *self = &a->base;
    int64_t D = c->hidden_size, q = c->num_heads * c->head_dim;
    a->model = m;
    a->layer = layer;
    self->forward1 = attention_forward;
    a->qkv =
        fsdp_module_add(self, "c_attn", fsdp_linear_in_out_create(D, 3 * q, c->attention_bias));
    a->proj =
        fsdp_module_add(self, "c_proj", fsdp_linear_in_out_create(q, D, c->attention_out_bias));
    a->drop = fsdp_module_add(self, "resid_dropout", fsdp_dropout_create(c->resid_dropout));
    if (!fsdp_error()) return self;
    fsdp_module_free(self);
    return NULL;
}

/* ---- feed-forward ------------------------------------------------------------------- */

typedef struct mlp {
    fsdp_module base;
    fsdp_activation act;
    fsdp_module *fc, *proj, *drop;
} mlp;

static fsdp_tensor *mlp_forward(fsdp_module *self, fsdp_tensor *x)
{
    mlp *f = (mlp *)self;
    fsdp_tensor *h = fsdp_call(f->fc, x);
    fsdp_set(&h, fsdp__model_activation(f->act, h));
    return fsdp_call(f->drop, fsdp_call(f->proj, h));
}

static fsdp_module *mlp_create(const fsdp_model_config *c)
{
    mlp *f = (mlp *)fsdp_module_create(sizeof *f, "GPT2MLP");
    if (!f) return NULL;
    fsdp_module *self = &f->base;
    int64_t D = c->hidden_size, F = c->intermediate_size;
    f->act = c->hidden_act;
    self->forward1 = mlp_forward;
    f->fc = fsdp_module_add(self, "c_fc", fsdp_linear_in_out_create(D, F, c->mlp_bias));
    f->proj = fsdp_module_add(self, "c_proj", fsdp_linear_in_out_create(F, D, c->mlp_bias));
    f->drop = fsdp_module_add(self, "dropout", fsdp_dropout_create(c->resid_dropout));
    if (!fsdp_error()) return self;
    fsdp_module_free(self);
    return NULL;
}

/* ---- block ------------------------------------------------------------------------------ */

typedef struct block {
    fsdp_module base;
    fsdp_module *ln_1, *attention, *ln_2, *mlp;
} block;

/* in: x, and positions or nothing: they act in the embedding alone. */
static fsdp_status block_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    block *b = (block *)self;
    fsdp_tensor *y = fsdp_call(b->ln_1, in->t[0]);
    fsdp_set(&y, fsdp_call(b->attention, y));
    fsdp_set(&y, fsdp_add(in->t[0], y));
    fsdp_tensor *z = fsdp_call(b->ln_2, y);
    fsdp_set(&z, fsdp_call(b->mlp, z));
    out->n = 1;
    out->t[0] = fsdp_add(y, z);
    return fsdp_error();
}

static fsdp_module *block_create(fsdp__model *m, int64_t layer)
{
    const fsdp_model_config *c = &m->c;
    block *b = (block *)fsdp_module_create(sizeof *b, "GPT2Block");
    if (!b) return NULL;
    fsdp_module *self = &b->base;
    self->forward = block_forward;
    b->ln_1 = fsdp_module_add(self, "ln_1", fsdp_layer_norm_create(c->hidden_size, c->norm_eps));
    b->attention = fsdp_module_add(self, "attn", attention_create(m, layer));
    b->ln_2 = fsdp_module_add(self, "ln_2", fsdp_layer_norm_create(c->hidden_size, c->norm_eps));
    b->mlp = fsdp_module_add(self, "mlp", mlp_create(c));
    if (!fsdp_error()) return self;
    fsdp_module_free(self);
    return NULL;
}

/* ---- body ---------------------------------------------------------------------------------- */

typedef struct body {
    fsdp_module base;
    fsdp__model *model;
    fsdp_module *wte, *wpe, *drop, *ln_f;
} body;

/* (T): start, start + 1, ... on the device of like. */
static fsdp_tensor *count_up(const fsdp_tensor *like, int64_t start, int64_t n)
{
    fsdp_tensor *t = fsdp__tensor_create(FSDP_I64, 1, &n, like->st->device);
    int64_t *p = fsdp_data(t);
    for (int64_t i = 0; i < n && p; i++)
        p[i] = start + i;
    return t;
}

/* wpe has max_position_embeddings rows: told in words of the model, not of the table. */
static fsdp_status check_length(const body *b, int64_t past, int64_t n)
{
    int64_t rows = b->model->c.max_position_embeddings;
    if (past + n <= rows) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_ARGUMENT,
                      "a sequence of %lld tokens; the model has %lld positions (n_positions)",
                      (long long)(past + n), (long long)rows);
}

/* in: tokens, positions or NULL. */
static fsdp_status body_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    body *b = (body *)self;
    fsdp_tensor *tokens = in->t[0], *positions = in->n > 1 ? in->t[1] : NULL;
    int64_t past = fsdp__model_past(b->model), n = fsdp_size(tokens, 1);
    if (!positions) FSDP_TRY(check_length(b, past, n));
    fsdp_tensor *x = fsdp_call(b->wte, tokens);
    fsdp_tensor *at = fsdp_call(b->wpe, positions ? positions : count_up(tokens, past, n));
    fsdp_set(&x, fsdp_add(x, at));
    fsdp_set(&x, fsdp_call(b->drop, x));
    x = fsdp__model_run_blocks(b->model, x, positions);
    out->n = 1;
    out->t[0] = fsdp_call(b->ln_f, x);
    return fsdp_error();
}

/* Projections into the residual stream start smaller, by the number of them (Radford et al. 2019,
 * section 2.3). */
static void scale_projections(fsdp__model *m)
{
    double deviation = m->c.initializer_range / sqrt(2.0 * (double)m->c.num_layers);
    for (int i = 0; i < fsdp_module_child_count(m->blocks); i++) {
        const block *b = (const block *)fsdp_module_child(m->blocks, i);
        fsdp__model_set_init(((const attention *)b->attention)->proj, deviation);
        fsdp__model_set_init(((const mlp *)b->mlp)->proj, deviation);
    }
}

bool fsdp__gpt2_build(fsdp__model *m)
{
    const fsdp_model_config *c = &m->c;
    body *b = (body *)fsdp_module_create(sizeof *b, "GPT2");
    m->body = fsdp_module_add(&m->base, "transformer", b ? &b->base : NULL);
    if (!m->body) return false;
    b->base.forward = body_forward;
    b->model = m;
    b->wte = fsdp_module_add(m->body, "wte", fsdp_embedding_create(c->vocab_size, c->hidden_size));
    b->wpe = fsdp_module_add(m->body, "wpe",
                             fsdp_embedding_create(c->max_position_embeddings, c->hidden_size));
    b->drop = fsdp_module_add(m->body, "drop", fsdp_dropout_create(c->embd_dropout));
    m->blocks = fsdp_module_add(m->body, "h", fsdp_module_list_create());
    for (int64_t i = 0; i < c->num_layers && m->blocks; i++) {
        char name[24];
        snprintf(name, sizeof name, "%lld", (long long)i);
        if (!fsdp_module_add(m->blocks, name, block_create(m, i))) return false;
    }
    b->ln_f = fsdp_module_add(m->body, "ln_f", fsdp_layer_norm_create(c->hidden_size, c->norm_eps));
    if (fsdp_error()) return false;
    fsdp__model_set_init(m->body, c->initializer_range);
    scale_projections(m);
    return true;
}

fsdp_param *fsdp__gpt2_embedding(const fsdp__model *m)
{
    return fsdp_module_param(((const body *)m->body)->wte, "weight");
}
