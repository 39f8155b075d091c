/*
 * decoder.c - Llama, Mistral, Qwen2 and Qwen3: norm, attention with rotary positions and grouped
 * heads, norm, gated feed-forward. They differ by biases, windows and norms of q and k, all of
 * which the config says. Names of modules are Hugging Face's.
 *
 * Shapes: x (B,T,D); q (B,T,H,h), k and v (B,T,K,h); feed-forward (B,T,F). H and K are read from
 * what the projections give, so a model whose weights were cut by heads is the same code.
 */
#include <stdio.h>

#include "base/error.h"
#include "models/models_internal.h"

/* ---- attention ------------------------------------------------------------------ */

typedef struct attention {
    fsdp_module base;
    fsdp__model *model;
    int64_t layer;
    fsdp_module *q, *k, *v, *o;
    fsdp_module *q_norm, *k_norm; /* Qwen3; else NULL */
} attention;

/* One of q and k: projected, split into heads, normed, turned by position. */
static fsdp_tensor *project(attention *a, fsdp_tensor *x, fsdp_module *linear, fsdp_module *norm,
                            fsdp_tensor *cos, fsdp_tensor *sin)
{
    fsdp_tensor *y = fsdp_call(linear, x);
    fsdp_set(&y, fsdp__model_split_heads(a->model, y));
    if (norm) fsdp_set(&y, fsdp_call(norm, y));
    fsdp_set(&y, fsdp_rotary(y, cos, sin));
    return y;
}

static fsdp_status attention_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    attention *a = (attention *)self;
    fsdp_tensor *x = in->t[0], *cos, *sin;
    FSDP_TRY(fsdp__rope_get(&a->model->rope, x, in->n > 1 ? in->t[1] : NULL,
                            fsdp__model_past(a->model), &cos, &sin));
    fsdp_tensor *q = project(a, x, a->q, a->q_norm, cos, sin);
    fsdp_tensor *k = project(a, x, a->k, a->k_norm, cos, sin);
    fsdp_tensor *v = fsdp_call(a->v, x);
    fsdp_set(&v, fsdp__model_split_heads(a->model, v));
    fsdp_tensor *y = fsdp__model_attend(a->model, self, a->layer, q, k, v);
    /* Without a graph nobody needs them any more. */
    fsdp_set(&q, NULL);
    fsdp_set(&k, NULL);
    fsdp_set(&v, NULL);
    out->n = 1;
    out->t[0] = fsdp_call(a->o, y);
    return fsdp_error();
}

static void attention_describe(const fsdp_module *self, char *text, size_t n)
{
    const attention *a = (const attention *)self;
    const fsdp_model_config *c = &a->model->c;
    int64_t window = fsdp__model_window(c, a->layer);
    int len = snprintf(text, n, "%lld heads, %lld of keys, of %lld", (long long)c->num_heads,
                       (long long)c->num_kv_heads, (long long)c->head_dim);
    if (window && len > 0 && (size_t)len < n)
        snprintf(text + len, n - (size_t)len, ", window %lld", (long long)window);
}

static fsdp_module *attention_create(fsdp__model *m, int64_t layer)
{
    const fsdp_model_config *c = &m->c;
    attention *a = (attention *)fsdp_module_create(sizeof *a, "Attention");
    if (!a) return NULL;
    fsdp_module *self = &a->base;
    int64_t D = c->hidden_size, q = c->num_heads * c->head_dim, kv = c->num_kv_heads * c->head_dim;
    a->model = m;
    a->layer = layer;
    self->forward = attention_forward;
    self->describe = attention_describe;
    a->q = fsdp_module_add(self, "q_proj", fsdp_linear_create(D, q, c->attention_bias));
    a->k = fsdp_module_add(self, "k_proj", fsdp_linear_create(D, kv, c->attention_bias));
    a->v = fsdp_module_add(self, "v_proj", fsdp_linear_create(D, kv, c->attention_bias));
    a->o = fsdp_module_add(self, "o_proj", fsdp_linear_create(q, D, c->attention_out_bias));
    if (c->qk_norm) {
        a->q_norm = fsdp_module_add(self, "q_norm", fsdp_rms_norm_create(c->head_dim, c->norm_eps));
        a->k_norm = fsdp_module_add(self, "k_norm", fsdp_rms_norm_create(c->head_dim, c->norm_eps));
    }
    if (!fsdp_error()) return self;
    fsdp_module_free(self);
    return NULL;
}

/* ---- feed-forward ------------------------------------------------------------------- */

typedef struct mlp {
    fsdp_module base;
    fsdp_module *gate, *up, *down;
} mlp;

static fsdp_tensor *mlp_forward(fsdp_module *self, fsdp_tensor *x)
{
    mlp *f = (mlp *)self;
    fsdp_tensor *gate = fsdp_call(f->gate, x), *up = fsdp_call(f->up, x);
    fsdp_set(&gate, fsdp_swiglu(gate, up));
    fsdp_set(&up, NULL);
    return fsdp_call(f->down, gate);
}

static fsdp_module *mlp_create(const fsdp_model_config *c)
{
    mlp *f = (mlp *)fsdp_module_create(sizeof *f, "MLP");
    if (!f) return NULL;
    fsdp_module *self = &f->base;
    int64_t D = c->hidden_size, F = c->intermediate_size;
    self->forward1 = mlp_forward;
    f->gate = fsdp_module_add(self, "gate_proj", fsdp_linear_create(D, F, c->mlp_bias));
    f->up = fsdp_module_add(self, "up_proj", fsdp_linear_create(D, F, c->mlp_bias));
    f->down = fsdp_module_add(self, "down_proj", fsdp_linear_create(F, D, c->mlp_bias));
    if (!fsdp_error()) return self;
    fsdp_module_free(self);
    return NULL;
}

/* ---- block ------------------------------------------------------------------------------ */

typedef struct block {
    fsdp_module base;
    fsdp_module *norm1, *attention, *norm2, *mlp;
} block;

/* in: x, and positions or nothing. x itself belongs to the caller. */
static fsdp_status block_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    block *b = (block *)self;
    fsdp_values given = *in, attended;
    fsdp_tensor *y = fsdp_call(b->norm1, in->t[0]);
    given.t[0] = y;
    FSDP_TRY(fsdp_module_call(b->attention, &given, &attended));
    fsdp_set(&y, attended.t[0]);
    fsdp_set(&y, fsdp_add(in->t[0], y));
    fsdp_tensor *z = fsdp_call(b->norm2, y);
    fsdp_set(&z, fsdp_call(b->mlp, z));
    out->n = 1;
    out->t[0] = fsdp_add(y, z);
    return fsdp_error();
}

static fsdp_module *block_create(fsdp__model *m, int64_t layer)
{
    const fsdp_model_config *c = &m->c;
    block *b = (block *)fsdp_module_create(sizeof *b, "DecoderLayer");
    if (!b) return NULL;
    fsdp_module *self = &b->base;
    self->forward = block_forward;
    b->norm1 =
        fsdp_module_add(self, "input_layernorm", fsdp_rms_norm_create(c->hidden_size, c->norm_eps));
    b->attention = fsdp_module_add(self, "self_attn", attention_create(m, layer));
    b->norm2 = fsdp_module_add(self, "post_attention_layernorm",
                               fsdp_rms_norm_create(c->hidden_size, c->norm_eps));
    b->mlp = fsdp_module_add(self, "mlp", mlp_create(c));
    if (!fsdp_error()) return self;
    fsdp_module_free(self);
    return NULL;
}

/* ---- body ---------------------------------------------------------------------------------- */

typedef struct body {
    fsdp_module base;
    fsdp__model *model;
    fsdp_module *embed, *norm;
} body;

/* in: tokens, positions or NULL. */
static fsdp_status body_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    body *b = (body *)self;
    fsdp_tensor *x = fsdp_call(b->embed, in->t[0]);
    x = fsdp__model_run_blocks(b->model, x, in->n > 1 ? in->t[1] : NULL);
    out->n = 1;
    out->t[0] = fsdp_call(b->norm, x);
    return fsdp_error();
}

bool fsdp__decoder_build(fsdp__model *m)
{
    const fsdp_model_config *c = &m->c;
    body *b = (body *)fsdp_module_create(sizeof *b, "Decoder");
    m->body = fsdp_module_add(&m->base, "model", b ? &b->base : NULL);
    if (!m->body) return false;
    b->base.forward = body_forward;
    b->model = m;
    b->embed = fsdp_module_add(m->body, "embed_tokens",
                               fsdp_embedding_create(c->vocab_size, c->hidden_size));
    m->blocks = fsdp_module_add(m->body, "layers", fsdp_module_list_create());
    for (int64_t i = 0; i < c->num_layers && m->blocks; i++) {
        char name[24];
        snprintf(name, sizeof name, "%lld", (long long)i);
        if (!fsdp_module_add(m->blocks, name, block_create(m, i))) return false;
    }
    b->norm = fsdp_module_add(m->body, "norm", fsdp_rms_norm_create(c->hidden_size, c->norm_eps));
    if (fsdp_error()) return false;
    fsdp__model_set_init(m->body, c->initializer_range);
    return true;
}

fsdp_param *fsdp__decoder_embedding(const fsdp__model *m)
{
    return fsdp_module_param(((const body *)m->body)->embed, "weight");
}
