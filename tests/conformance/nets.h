/*
 * nets.h - the networks of the conformance tests, and training one beside an unsharded reference.
 *
 * MLP: (B, D) -> relu(out(relu(in(x)))), in D -> M*D, out M*D -> D, with biases. MLPs: a sequential
 * of those. Transformer: tokens (B,T) -> logits (B,T,V), pre-norm blocks of causal attention and a
 * feed-forward of gelu, learnt positions, head maybe tied to the embedding.
 *
 * Parity: on each rank and in each step the loss of a sharded model equals that of an unsharded one
 * whose gradients are averaged over the ranks; in the end the weights are equal. 10 steps of Adam at
 * 1e-2, gradients dropped and set to zero in turn.
 */
#ifndef FSDP_TESTS_CONFORMANCE_NETS_H
#define FSDP_TESTS_CONFORMANCE_NETS_H

#include "conform.h"

/* ---- MLP ---------------------------------------------------------------------------- */

typedef struct conf_mlp {
    fsdp_module base;
    fsdp_module *in, *out;
} conf_mlp;

static inline fsdp_tensor *conf_mlp_forward(fsdp_module *self, fsdp_tensor *x)
{
    conf_mlp *m = (conf_mlp *)self;
    return fsdp_relu(fsdp_call(m->out, fsdp_relu(fsdp_call(m->in, x))));
}

static inline fsdp_module *conf_mlp_create(int64_t dim, int64_t mult)
{
    conf_mlp *m = (conf_mlp *)fsdp_module_create(sizeof *m, "MLP");
    if (!m) return NULL;
    m->base.forward1 = conf_mlp_forward;
    m->in = fsdp_module_add(&m->base, "in_proj", fsdp_linear_create(dim, mult * dim, 1));
    m->out = fsdp_module_add(&m->base, "out_proj", fsdp_linear_create(mult * dim, dim, 1));
    return &m->base;
}

/* n MLPs of width dim, one after the other: children "0", "1", ... */
static inline fsdp_module *conf_mlps_create(int n, int64_t dim)
{
    fsdp_module *s = fsdp_sequential_create();
    for (int i = 0; i < n && s; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        if (!fsdp_module_add(s, name, conf_mlp_create(dim, 2 + i % 3))) return NULL;
    }
    return s;
}

/* ---- transformer -------------------------------------------------------------------- */

enum { CONF_VOCAB = 16, CONF_DIM = 8, CONF_HEADS = 2, CONF_SEQ = 6, CONF_LAYERS_MAX = 8 };

typedef struct conf_block {
    fsdp_module base;
    fsdp_module *n1, *wq, *wk, *wv, *wo, *n2, *w1, *w2;
} conf_block;

typedef struct conf_lm {
    fsdp_module base;
    fsdp_module *tok, *pos, *layers, *norm, *output;
    fsdp_module *block[CONF_LAYERS_MAX];
    int n_blocks;
} conf_lm;

static inline fsdp_tensor *conf_heads(fsdp_tensor *x, int64_t B, int64_t T)
{
    return fsdp_reshape(x, 4, SIZES(B, T, CONF_HEADS, CONF_DIM / CONF_HEADS));
}

/* x (B,T,C) -> (B,T,C) */
static inline fsdp_tensor *conf_block_forward(fsdp_module *self, fsdp_tensor *x)
{
    conf_block *b = (conf_block *)self;
    int64_t B = fsdp_size(x, 0), T = fsdp_size(x, 1);
    fsdp_tensor *h = fsdp_call(b->n1, x);
    fsdp_attention_options o = {0};
    fsdp_tensor *a =
        fsdp_attention(conf_heads(fsdp_call(b->wq, h), B, T), conf_heads(fsdp_call(b->wk, h), B, T),
                       conf_heads(fsdp_call(b->wv, h), B, T), &o);
    x = fsdp_add(x, fsdp_call(b->wo, fsdp_reshape(a, 3, SIZES(B, T, CONF_DIM))));
    return fsdp_add(x, fsdp_call(b->w2, fsdp_gelu(fsdp_call(b->w1, fsdp_call(b->n2, x)))));
}

static inline fsdp_module *conf_block_create(void)
{
    conf_block *b = (conf_block *)fsdp_module_create(sizeof *b, "Block");
    if (!b) return NULL;
    fsdp_module *m = &b->base;
    m->forward1 = conf_block_forward;
    b->n1 = fsdp_module_add(m, "attention_norm", fsdp_layer_norm_create(CONF_DIM, 1e-5));
    b->wq = fsdp_module_add(m, "wq", fsdp_linear_create(CONF_DIM, CONF_DIM, 0));
    b->wk = fsdp_module_add(m, "wk", fsdp_linear_create(CONF_DIM, CONF_DIM, 0));
    b->wv = fsdp_module_add(m, "wv", fsdp_linear_create(CONF_DIM, CONF_DIM, 0));
    b->wo = fsdp_module_add(m, "wo", fsdp_linear_create(CONF_DIM, CONF_DIM, 0));
    b->n2 = fsdp_module_add(m, "ffn_norm", fsdp_layer_norm_create(CONF_DIM, 1e-5));
    b->w1 = fsdp_module_add(m, "w1", fsdp_linear_create(CONF_DIM, 4 * CONF_DIM, 1));
    b->w2 = fsdp_module_add(m, "w2", fsdp_linear_create(4 * CONF_DIM, CONF_DIM, 1));
    return m;
}

/* Embeddings of tokens i64 (B,T) and of their places -> (B,T,C) */
static inline fsdp_tensor *conf_lm_embed(conf_lm *m, fsdp_tensor *tokens)
{
    int64_t T = fsdp_size(tokens, 1), place[64];
    for (int64_t i = 0; i < fsdp_numel(tokens) && i < 64; i++)
        place[i] = i % T;
    fsdp_tensor *p = fsdp_clone(
        fsdp_tensor_from_memory(place, FSDP_I64, 2, fsdp_sizes(tokens), NULL, NULL, NULL));
    return fsdp_add(fsdp_call(m->tok, tokens), fsdp_call(m->pos, p));
}

/* tokens i64 (B,T) -> logits (B,T,V) */
static inline fsdp_tensor *conf_lm_forward(fsdp_module *self, fsdp_tensor *tokens)
{
    conf_lm *m = (conf_lm *)self;
    fsdp_tensor *h = conf_lm_embed(m, tokens);
    for (int i = 0; i < m->n_blocks; i++)
        h = fsdp_call(m->block[i], h);
    return fsdp_call(m->output, fsdp_call(m->norm, h));
}

static inline fsdp_tensor *conf_head_forward(fsdp_module *self, fsdp_tensor *x)
{
    return fsdp_linear(x, fsdp_param_tensor(fsdp_module_param(self, "weight")));
}

static inline conf_lm *conf_lm_create(int blocks, int tied)
{
    conf_lm *m = (conf_lm *)fsdp_module_create(sizeof *m, "Transformer");
    if (!m) return NULL;
    m->base.forward1 = conf_lm_forward;
    m->n_blocks = blocks;
    m->tok = fsdp_module_add(&m->base, "tok_embeddings",
                             fsdp_embedding_create(CONF_VOCAB, CONF_DIM));
    m->pos = fsdp_module_add(&m->base, "pos_embeddings", fsdp_embedding_create(CONF_SEQ, CONF_DIM));
    m->layers = fsdp_module_add(&m->base, "layers", fsdp_module_list_create());
    for (int i = 0; i < blocks; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        m->block[i] = fsdp_module_add(m->layers, name, conf_block_create());
    }
    m->norm = fsdp_module_add(&m->base, "norm", fsdp_layer_norm_create(CONF_DIM, 1e-5));
    if (!tied) {
        m->output = fsdp_module_add(&m->base, "output",
                                    fsdp_linear_create(CONF_DIM, CONF_VOCAB, 0));
        return m;
    }
    fsdp_module *head = fsdp_module_create(sizeof *head, "Head");
    if (!head) return NULL;
    head->forward1 = conf_head_forward;
    m->output = fsdp_module_add(&m->base, "output", head);
    fsdp_module_add_param(head, "weight", fsdp_param_retain(fsdp_module_param(m->tok, "weight")));
    return m;
}

/* ---- inputs ------------------------------------------------------------------------- */

/* (rows, dim) of this rank and step. */
static inline fsdp_tensor *conf_input(int64_t rows, int64_t dim, int step)
{
    char name[48];
    snprintf(name, sizeof name, "input of rank %d, step %d", fsdp_rank(), step);
    return fsdp_randn(FSDP_F32, 2, SIZES(rows, dim), 5, name);
}

/* Tokens (rows, T) of this rank and step. */
static inline fsdp_tensor *conf_tokens(int64_t rows, int step)
{
    int64_t id[64];
    for (int64_t i = 0; i < rows * CONF_SEQ && i < 64; i++)
        id[i] = (7 * i + 5 * fsdp_rank() + 3 * step + i * i) % CONF_VOCAB;
    return fsdp_clone(
        fsdp_tensor_from_memory(id, FSDP_I64, 2, SIZES(rows, CONF_SEQ), NULL, NULL, NULL));
}

/* Mean of (y - 1) squared: a loss that every output moves. */
static inline fsdp_tensor *conf_loss(fsdp_tensor *y)
{
    y = fsdp_shift(fsdp_cast(y, FSDP_F32), -1);
    return fsdp_mean(fsdp_mul(y, y));
}

/* ---- gradients and weights by hand -------------------------------------------------- */

/* Calls fn for each parameter below m; stops at the first that fails. */
static inline fsdp_status conf_each_param(fsdp_module *m,
                                          fsdp_status (*fn)(fsdp_named_param *p, void *arg),
                                          void *arg)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < l.count && s == FSDP_OK; i++)
        s = fn(&l.items[i], arg);
    fsdp_param_list_free(&l);
    return s;
}

static inline fsdp_status conf_average_one(fsdp_named_param *p, void *arg)
{
    (void)arg;
    fsdp_tensor *t = fsdp_param_tensor(p->param), *g = fsdp_grad(t);
    int n = fsdp_world_size();
    int64_t have = g != NULL;
    FSDP_TRY(fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, &have, 1, FSDP_I64, FSDP_SUM,
                             NULL));
    if (!have || n == 1) return FSDP_OK;
    fsdp_scope *scope = fsdp_scope_begin();
    if (!g) {
        FSDP_TRY(fsdp_set_grad(t, fsdp_zeros(fsdp_tensor_dtype(t), fsdp_ndim(t), fsdp_sizes(t))));
        g = fsdp_grad(t);
    }
    FSDP_TRY(fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, fsdp_data(g), fsdp_numel(g),
                             fsdp_tensor_dtype(g), FSDP_SUM, NULL));
    fsdp_no_grad_begin();
    fsdp_status s = fsdp_copy_(g, fsdp_scale(g, (double)(float)(1.0 / n)));
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    return s;
}

/* The gradients of an unsharded module become their averages over the ranks. */
static inline fsdp_status conf_average_grads(fsdp_module *m)
{
    return conf_each_param(m, conf_average_one, NULL);
}

static inline fsdp_status conf_zero_one(fsdp_named_param *p, void *arg)
{
    (void)arg;
    fsdp_tensor *g = fsdp_grad(fsdp_param_tensor(p->param));
    return g ? fsdp_fill_(g, 0) : FSDP_OK;
}

/* As zero_grad(set_to_none=False): the gradients stay, as zeros. */
static inline fsdp_status conf_zero_fill(fsdp_module *m)
{
    return conf_each_param(m, conf_zero_one, NULL);
}

typedef struct conf_numbers {
    double *v;
    int64_t n;
    int grads;
} conf_numbers;

static inline fsdp_status conf_collect_one(fsdp_named_param *p, void *arg)
{
    conf_numbers *all = arg;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *t = fsdp_param_tensor(p->param);
    if (all->grads) t = fsdp_grad(t);
    fsdp_tensor *full = t ? fsdp_dtensor_full(t) : NULL;
    int64_t n = 1;
    for (int d = 0; d < fsdp_param_ndim(p->param); d++)
        n *= fsdp_param_sizes(p->param)[d];
    double *v = realloc(all->v, (size_t)(all->n + n + 1) * sizeof *v);
    fsdp_status s = v ? FSDP_OK : fsdp__fail(FSDP_NO_MEMORY, "numbers");
    if (v) all->v = v;
    if (v && !full) memset(v + all->n, 0, (size_t)n * sizeof *v);
    if (full && v) s = fsdp_to_doubles(full, v + all->n);
    if (s == FSDP_OK && full && fsdp_numel(full) != n)
        s = fsdp__fail(FSDP_INTERNAL, "%s: %lld elements whole; expected %lld", p->name,
                       (long long)fsdp_numel(full), (long long)n);
    all->n += n;
    fsdp_scope_end(scope);
    return s == FSDP_OK ? fsdp_error() : s;
}

/* All weights below m (or gradients, zeros where there is none), whole. Collective. Free .v. */
static inline fsdp_status conf_collect(fsdp_module *m, int grads, conf_numbers *out)
{
    *out = (conf_numbers){.grads = grads};
    fsdp_status s = conf_each_param(m, conf_collect_one, out);
    if (s == FSDP_OK) return s;
    free(out->v);
    out->v = NULL;
    return s;
}

/* Largest difference over largest value; infinite where there is a NaN or another count. */
static inline double conf_distance(const conf_numbers *a, const conf_numbers *b)
{
    double most = 0, scale = 0;
    if (a->n != b->n) return INFINITY;
    for (int64_t i = 0; i < a->n; i++) {
        if (isnan(a->v[i]) || isnan(b->v[i])) return INFINITY;
        most = fmax(most, fabs(a->v[i] - b->v[i]));
        scale = fmax(scale, fabs(b->v[i]));
    }
    return most == 0 ? 0 : most / scale;
}

/* ---- parity ------------------------------------------------------------------------- */

enum { CONF_STEPS = 10 };

typedef struct conf_parity conf_parity;
struct conf_parity {
    fsdp_module *(*make)(const conf_parity *p);
    fsdp_status (*shard)(const conf_parity *p, fsdp_module *m);
    /* Forward and loss on this rank's input of a step, and any backward but the last. NULL: mean of
     * squares of the model's output on (4, dim) numbers. */
    fsdp_tensor *(*loss)(const conf_parity *p, fsdp_module *m, int step);
    fsdp_status (*before_step)(const conf_parity *p, fsdp_module *m, int step); /* or NULL */
    const void *arg;
    int64_t dim;       /* what the model is called with: (4, dim); 0: tokens (2, T) */
    int steps;         /* 0: CONF_STEPS */
    double lr, decay;  /* 0: 1e-2, none */
    double bound;      /* on losses, beside the first, and weights; 0: equal to the bit */
    fsdp_shard_options options; /* for shard, of the caller's choosing */
};

static inline fsdp_tensor *conf_default_loss(const conf_parity *p, fsdp_module *m, int step)
{
    return conf_loss(fsdp_call(m, p->dim ? conf_input(4, p->dim, step) : conf_tokens(2, step)));
}

static inline fsdp_status conf_train_step(const conf_parity *p, fsdp_module *m, fsdp_optimizer *o,
                                          int sharded, int step, double *loss)
{
    fsdp_tensor *l = p->loss ? p->loss(p, m, step) : conf_default_loss(p, m, step);
    FSDP_TRY(fsdp_backward(l));
    *loss = fsdp_item(l);
    if (!sharded) FSDP_TRY(conf_average_grads(m));
    if (p->before_step) FSDP_TRY(p->before_step(p, m, step));
    FSDP_TRY(fsdp_optimizer_step(o));
    return step % 2 ? conf_zero_fill(m) : fsdp_zero_grad(m);
}

/* Trains one of the two; losses (steps), weights whole. */
static inline fsdp_status conf_train(const conf_parity *p, int sharded, double *loss,
                                     conf_numbers *weights)
{
    fsdp_module *m = p->make(p);
    if (!m) return fsdp_error();
    if (sharded) CHECK_OK(p->shard(p, m));
    CHECK_OK(fsdp_to_empty(m, FSDP_CPU));
    CHECK_OK(fsdp_reset_parameters(m, 42));
    fsdp_adamw_options a = {p->lr != 0 ? p->lr : 1e-2, 0.9, 0.999, 1e-8, p->decay};
    fsdp_optimizer *o = fsdp_adamw(m, &a);
    fsdp_status s = o ? FSDP_OK : fsdp_error();
    int steps = p->steps ? p->steps : CONF_STEPS;
    for (int step = 0; step < steps && s == FSDP_OK; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        s = conf_train_step(p, m, o, sharded, step, &loss[step]);
        fsdp_scope_end(scope);
    }
    if (s == FSDP_OK) s = conf_collect(m, 0, weights);
    fsdp_optimizer_free(o);
    fsdp_module_free(m);
    return s;
}

/* A rank's part: both trainings, compared. */
static inline fsdp_status conf_parity_rank(void *arg)
{
    const conf_parity *p = arg;
    double plain[64], sharded[64];
    conf_numbers a = {0}, b = {0};
    CHECK_OK(conf_train(p, 0, plain, &a));
    CHECK_OK(conf_train(p, 1, sharded, &b));
    int steps = p->steps ? p->steps : CONF_STEPS;
    for (int k = 0; k < steps; k++) {
        conf_checks++;
        if (!(fabs(plain[k] - sharded[k]) <= p->bound * fabs(plain[0])))
            return fsdp__fail(FSDP_INTERNAL, "rank %d of %d, step %d: loss %.17g, unsharded %.17g",
                              fsdp_rank(), fsdp_world_size(), k, sharded[k], plain[k]);
    }
    CHECK(plain[0] != plain[steps - 1]); /* it learnt something */
    double d = conf_distance(&b, &a);
    conf_checks++;
    free(a.v);
    free(b.v);
    if (!(d <= 20 * p->bound))
        return fsdp__fail(FSDP_INTERNAL, "rank %d of %d: weights differ by %g", fsdp_rank(),
                          fsdp_world_size(), d);
    return FSDP_OK;
}

/* ---- values of reshard_after_forward ------------------------------------------------ */

enum { CONF_POLICIES = 4 };

/* Automatic (which 0), true (1), false (2), or the integer 2 (3; where it divides the ranks). */
static inline fsdp_shard_options conf_policy(fsdp_shard_options o, int which, int ranks)
{
    static const fsdp_reshard_policy p[] = {FSDP_RESHARD_AUTO, FSDP_RESHARD_ALWAYS,
                                            FSDP_RESHARD_NEVER, FSDP_RESHARD_AUTO};
    o.reshard_after_forward = p[which];
    o.reshard_ranks = which == 3 && ranks % 2 == 0 ? 2 : 0;
    return o;
}

/* Host memory, not pinned and pinned, and a file of the working folder. */
enum { CONF_OFFLOADS = 3 };

static inline fsdp_offload_policy conf_offload(int which)
{
    fsdp_offload_policy o = {.kind = which == 2 ? FSDP_OFFLOAD_FILE : FSDP_OFFLOAD_CPU,
                             .pin_memory = which == 1};
    if (which == 2) o.folder = ".";
    return o;
}

/* ---- ways to shard ------------------------------------------------------------------ */

/* One unit. */
static inline fsdp_status conf_shard_whole(const conf_parity *p, fsdp_module *m)
{
    return fsdp_fully_shard(m, &p->options);
}

/* A unit for each child, and one for the rest. */
static inline fsdp_status conf_shard_children(const conf_parity *p, fsdp_module *m)
{
    for (int i = 0; i < fsdp_module_child_count(m); i++)
        CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, i), &p->options));
    return fsdp_fully_shard(m, &p->options);
}

/* A unit a block of a transformer, and one for the rest. */
static inline fsdp_status conf_shard_blocks(const conf_parity *p, fsdp_module *m)
{
    conf_lm *lm = (conf_lm *)m;
    for (int i = 0; i < lm->n_blocks; i++)
        CHECK_OK(fsdp_fully_shard(lm->block[i], &p->options));
    return fsdp_fully_shard(m, &p->options);
}

/* The largest dim of a parameter. */
static inline int conf_largest_dim(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    const int64_t *s = fsdp_param_sizes(p);
    int best = 0;
    for (int d = 1; d < fsdp_param_ndim(p); d++)
        if (s[d] > s[best]) best = d;
    return best;
}

/* (replicas, ranks / replicas), replicate outside. */
static inline fsdp_mesh *conf_hybrid_mesh(int replicas)
{
    const char *names[] = {"replicate", "shard"};
    int sizes[] = {replicas, fsdp_world_size() / replicas};
    return fsdp_mesh_create(FSDP_CPU, 2, sizes, names);
}

/* Calls of a collective since the counters were reset, over all groups. */
static inline int64_t conf_calls(fsdp_lane lane, fsdp_collective c)
{
    return fsdp_comm_count_total(lane, c).calls;
}

/* ---- events ------------------------------------------------------------------------- */

enum { CONF_LOG = 4096 };

typedef struct conf_events {
    char text[CONF_LOG];
    int reductions; /* whether they are noted, as S */
    int ahead;      /* whether gathers ahead are noted where they are issued, as upstream does */
    char pending[64][32];
} conf_events;

/* "U0 R0 ...": what happened to which unit, by the last part of its name; the root is "root". With
 * `ahead` a gather ahead is U where it is issued and its use is no event, as in upstream's tests;
 * else it is no event and its use is. */
static inline void conf_note(void *arg, fsdp_event_kind k, const char *unit)
{
    conf_events *e = arg;
    if (k > FSDP_EVENT_PREFETCH) return;
    const char *dot = strrchr(unit, '.'), *name = dot ? dot + 1 : *unit ? unit : "root";
    if (k == FSDP_EVENT_REDUCE && !e->reductions) return;
    if (k == FSDP_EVENT_PREFETCH && !e->ahead) return;
    if (k == FSDP_EVENT_PREFETCH) {
        for (int i = 0; i < 64; i++)
            if (!*e->pending[i]) {
                snprintf(e->pending[i], sizeof e->pending[i], "%s", name);
                break;
            }
    } else if (k == FSDP_EVENT_UNSHARD && e->ahead) {
        for (int i = 0; i < 64; i++)
            if (!strcmp(e->pending[i], name)) {
                *e->pending[i] = 0;
                return;
            }
    }
    static const char letter[] = {'U', 'R', 'P', 'S', 'U'};
    size_t n = strlen(e->text);
    snprintf(e->text + n, CONF_LOG - n, "%s%c%s", n ? " " : "", letter[k], name);
}

/* The text so far against what is expected; starts anew. */
static inline fsdp_status conf_events_are(conf_events *e, const char *expected)
{
    conf_checks++;
    int same = !strcmp(e->text, expected);
    fsdp_status s =
        same ? FSDP_OK
             : fsdp__fail(FSDP_INTERNAL, "events\n%s\nexpected\n%s", e->text, expected);
    e->text[0] = 0;
    return s;
}

#endif
