/*
 * test_accumulation.c - RC-06, RC-07: the gradient of a step is that of its rows, however they are
 * dealt over ranks and microbatches, whether each microbatch is summed over the ranks or the last
 * one alone, and whatever is cut. The rows have targets in part, two rows of a microbatch and four
 * rows of a rank have none, and the last rank may have fewer rows.
 */
#include "tensor_check.h"

#include "models/config.h"
#include "models/models_internal.h"

enum { ROWS = 16, T = 12, VOCAB = 257 };

typedef struct step {
    int rows;            /* of all ranks: ROWS, or one less */
    int ranks, replicas; /* replicas 0: no fully_shard */
    int microbatch;      /* rows of a call */
    int sync;            /* sum over the ranks after each call */
    fsdp_reshard_policy policy;
    /* results of rank 0 */
    double loss, norm;
    double *grads;
    int64_t n;
} step;

/* Targets of a row that count: 0 .. T. */
static int valid(int row)
{
    return row == 4 || row == 5 || row >= 12 ? 0 : (row * 5 + 3) % (T + 1);
}

static void fill(int row, int64_t *in, int64_t *to)
{
    for (int t = 0; t < T; t++) {
        in[t] = (row * 31 + t * t * 7 + t) % VOCAB;
        to[t] = t < valid(row) ? (row * 17 + t * 11 + 256) % VOCAB : -100;
    }
}

/* Call `call` of this rank; a rank without rows for it has one that does not count. */
static fsdp_status one_call(const step *s, fsdp_module *m, int call, int tokens, double *sum)
{
    int block = (s->rows + s->ranks - 1) / s->ranks, n = 0;
    int first = fsdp_rank() * block + call * s->microbatch, end = (fsdp_rank() + 1) * block;
    int64_t in[ROWS * T] = {0}, to[ROWS * T];
    for (int i = 0; i < ROWS * T; i++)
        to[i] = -100;
    for (int r = first; r < end && r < s->rows && n < s->microbatch; r++, n++)
        fill(r, in + n * T, to + n * T);
    int64_t rows = n ? n : 1;
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x = fsdp_tensor_from_memory(in, FSDP_I64, 2, SIZES(rows, T), NULL, NULL, NULL);
    fsdp_tensor *y = fsdp_tensor_from_memory(to, FSDP_I64, 2, SIZES(rows, T), NULL, NULL, NULL);
    fsdp_tensor *loss = fsdp_model_forward(m, x, NULL, y);
    *sum += loss ? fsdp_item(loss) : 0;
    fsdp_status st = fsdp_backward(fsdp_scale(loss, 1.0 / tokens));
    fsdp_scope_end(scope);
    return st;
}

static fsdp_status collect(step *s, fsdp_module *m)
{
    fsdp_param_list l;
    FSDP_TRY(fsdp_module_params(m, &l));
    for (int64_t i = 0; i < l.count; i++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *g = fsdp_dtensor_full(fsdp_grad(fsdp_param_tensor(l.items[i].param)));
        if (g && fsdp_rank() == 0) {
            s->grads = realloc(s->grads, (size_t)(s->n + fsdp_numel(g)) * sizeof *s->grads);
            fsdp_to_doubles(g, s->grads + s->n);
            s->n += fsdp_numel(g);
        }
        fsdp_scope_end(scope);
    }
    fsdp_param_list_free(&l);
    return fsdp_error();
}

static fsdp_module *make_model(const step *s)
{
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.vocab_size = VOCAB;
    c.hidden_size = 16;
    c.intermediate_size = 20;
    c.num_layers = 2;
    c.num_heads = 2;
    c.num_kv_heads = 1;
    c.head_dim = 8;
    c.max_position_embeddings = T;
    c.initializer_range = 0.2;
    fsdp_module *m = fsdp_model_create(&c);
    const char *names[] = {"replicate", "shard"};
    int sizes[] = {s->replicas, s->replicas ? s->ranks / s->replicas : 0};
    fsdp_mesh *mesh = s->replicas ? fsdp_mesh_create(FSDP_CPU, 2, sizes, names) : NULL;
    if (!m || (s->replicas && !mesh)) return NULL;
    fsdp_shard_options o = fsdp_shard_defaults(mesh);
    o.reshard_after_forward = s->policy;
    for (int64_t i = 0; s->replicas && i < fsdp_model_block_count(m); i++)
        fsdp_fully_shard(fsdp_model_block(m, i), &o);
    if (s->replicas) fsdp_fully_shard(m, &o);
    if (s->replicas) fsdp_set_gradient_divide_factor(m, 1.0, 1);
    fsdp_reset_parameters(m, 3);
    return fsdp_error() ? NULL : m;
}

static fsdp_status rank_main(void *arg)
{
    step *s = arg;
    int tokens = 0, block = (s->rows + s->ranks - 1) / s->ranks;
    int calls = (block + s->microbatch - 1) / s->microbatch;
    for (int r = 0; r < s->rows; r++)
        tokens += valid(r); /* known before the first backward */
    EXPECT(fsdp_set_threads(1) == FSDP_OK);
    fsdp_module *m = make_model(s);
    EXPECT(m);
    double sum = 0, all[8];
    for (int call = 0; call < calls; call++) {
        bool last = call == calls - 1;
        if (s->replicas) {
            EXPECT(fsdp_set_requires_gradient_sync(m, last || s->sync, 1) == FSDP_OK);
            EXPECT(fsdp_set_is_last_backward(m, last) == FSDP_OK);
        }
        EXPECT(one_call(s, m, call, tokens, &sum) == FSDP_OK);
    }
    double norm = 0;
    EXPECT(fsdp_grad_norm(m, 2, &norm) == FSDP_OK && isfinite(norm));
    EXPECT(fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, &sum, all, sizeof sum, NULL) ==
           FSDP_OK);
    if (fsdp_rank() == 0) {
        s->norm = norm;
        s->loss = 0;
        for (int r = 0; r < s->ranks; r++)
            s->loss += all[r] / tokens;
    }
    EXPECT(collect(s, m) == FSDP_OK);
    fsdp_module_free(m);
    return FSDP_OK;
}

static void go(step *s)
{
    if (fsdp_run_threads(s->ranks, rank_main, s) == FSDP_OK) return;
    char text[1024];
    snprintf(text, sizeof text, "%s", fsdp_error_text());
    fsdp_error_clear();
    fail_msg("%d ranks, %d replicas, microbatches of %d: %s", s->ranks, s->replicas, s->microbatch,
             text);
}

static void same(const step *a, const step *b)
{
    double most = 0, scale = 0;
    assert_int_equal(a->n, b->n);
    for (int64_t i = 0; i < a->n; i++) {
        most = fmax(most, fabs(a->grads[i] - b->grads[i]));
        scale = fmax(scale, fabs(b->grads[i]));
        if (isnan(a->grads[i])) most = INFINITY;
    }
    if (most <= 1e-6 * scale && fabs(a->norm / b->norm - 1) <= 1e-6 &&
        fabs(a->loss / b->loss - 1) <= 1e-6)
        return;
    fail_msg("%d rows, %d ranks, %d replicas, microbatches of %d, sync %d, policy %d: gradients "
             "differ by %g, norm %.9g and %.9g, loss %.9g and %.9g",
             a->rows, a->ranks, a->replicas, a->microbatch, a->sync, (int)a->policy, most / scale,
             a->norm, b->norm, a->loss, b->loss);
}

static void matrix(int rows)
{
    step plain = {.rows = rows, .ranks = 1, .microbatch = rows};
    go(&plain);
    static const int ways[][2] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}, {8, 1}};
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
        for (int micro = 1; micro <= 4; micro *= 2)
            for (int sync = 0; sync < 2; sync++) {
                step s = {.rows = rows,
                          .ranks = ways[w][0],
                          .replicas = ways[w][1],
                          .microbatch = micro,
                          .sync = sync,
                          .policy = micro == 2 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_AUTO};
                go(&s);
                same(&s, &plain);
                free(s.grads);
            }
    free(plain.grads);
}

static void test_all_rows(void **state)
{
    (void)state;
    matrix(ROWS);
}

static void test_partial_last(void **state)
{
    (void)state;
    matrix(ROWS - 1);
    matrix(9); /* blocks of 3 on 4 ranks: the last has none; of 2 on 8: three have none */
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all_rows),
                                       cmocka_unit_test(test_partial_last)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
