/*
 * parity.c - the comparisons: one batch, twenty steps, a run of another program.
 *
 * Bounds are about ten times the noise of f32 itself in models of some hundred thousand parameters.
 * Shapes: tokens and targets (B,T), logits (B,T,V); training tokens (steps, B, T+1); a run's
 * (steps, microbatches, B, T+1). The loss of a step is the mean over all its targets.
 */
#include "train/parity.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "format/file.h"
#include "format/json.h"
#include "fsdp/comm.h"
#include "fsdp/models.h"
#include "train/parity_internal.h"

enum { IGNORE_INDEX = -100 };

static const double bound_logits = 3e-6, bound_loss = 1e-6, bound_gradient = 1e-5;
static const double bound_step_loss = 2e-6, bound_step_norm = 5e-5, bound_weights = 5e-4;
static const double bound_bf16_loss = 1e-3, bound_bf16_norm = 2e-2;

/* Opens dir/name; *st stays NULL where it is not there. */
static fsdp_status open_if_there(const char *dir, const char *name, fsdp__st **st)
{
    char *path = fsdp__path_join(dir, name);
    if (!path) return fsdp_error();
    fsdp_status s = FSDP_OK;
    if (fsdp__file_exists(path) && !(*st = fsdp__st_open(path))) s = fsdp_error();
    free(path);
    return s;
}

static json_t *json_if_there(const char *dir, const char *name)
{
    char *path = fsdp__path_join(dir, name);
    json_t *j = path && fsdp__file_exists(path) ? fsdp__json_load(path) : NULL;
    free(path);
    return j;
}

static double relative(double a, double b)
{
    return a == b ? 0.0 : fabs(a - b) / fabs(b);
}

/* ---- one batch ----------------------------------------------------------------------- */

typedef struct batch {
    int64_t *ids, *labels, B, T, valid;
} batch;

static fsdp_status read_batch(fsdp__st *st, batch *b)
{
    int64_t sizes[2], again[2];
    b->ids = fsdp__parity_read(st, "input_ids", FSDP_I64, 2, sizes);
    b->labels = b->ids ? fsdp__parity_read(st, "labels", FSDP_I64, 2, again) : NULL;
    if (!b->labels) return fsdp_error();
    b->B = sizes[0];
    b->T = sizes[1];
    if (memcmp(sizes, again, sizeof sizes))
        return fsdp__fail(FSDP_INVALID_DATA, "%s: input_ids and labels differ in shape",
                          fsdp__st_path(st));
    for (int64_t i = 0; i < b->B * b->T; i++)
        b->valid += b->labels[i] != IGNORE_INDEX;
    return FSDP_OK;
}

/* The largest difference between this rank's rows of the logits and the file's; largest value. */
static fsdp_status logits_pair(fsdp__parity_run *r, const batch *b, const double *expected,
                               int64_t V, double *pair)
{
    fsdp__parity_batch mine;
    FSDP_TRY(fsdp__parity_deal(b->ids, b->labels, b->T, b->B, b->T, &mine));
    fsdp_no_grad_begin();
    fsdp_tensor *y = fsdp_model_forward(r->model, mine.tokens, NULL, NULL);
    fsdp_no_grad_end();
    if (!y) return fsdp_error();
    if (fsdp_size(y, 2) != V)
        return fsdp__fail(FSDP_INVALID_DATA, "the logits have %lld columns, expected %lld",
                          (long long)V, (long long)fsdp_size(y, 2));
    int64_t n = mine.rows * b->T * V;
    double *x = fsdp__calloc((size_t)fsdp_numel(y), sizeof *x, "logits");
    fsdp_status s = x ? fsdp_to_doubles(y, x) : fsdp_error();
    const double *e = expected + mine.row0 * b->T * V;
    for (int64_t i = 0; i < n && s == FSDP_OK; i++) {
        double d = fabs(x[i] - e[i]);
        if (!(d <= pair[0])) pair[0] = isnan(d) ? INFINITY : d;
        if (fabs(e[i]) > pair[1]) pair[1] = fabs(e[i]);
    }
    free(x);
    return s;
}

static fsdp_status check_logits(fsdp__parity_run *r, fsdp__st *st, const batch *b)
{
    int64_t sizes[3];
    double pair[2] = {0, 0};
    double *expected = fsdp__parity_read(st, "logits", FSDP_F64, 3, sizes);
    if (!expected) return fsdp_error();
    fsdp_status s = FSDP_OK;
    if (sizes[0] != b->B || sizes[1] != b->T)
        s = fsdp__fail(FSDP_INVALID_DATA, "%s: logits and input_ids differ in shape",
                       fsdp__st_path(st));
    fsdp_scope *scope = fsdp_scope_begin();
    if (s == FSDP_OK) s = logits_pair(r, b, expected, sizes[2], pair);
    fsdp_scope_end(scope);
    free(expected);
    if (s == FSDP_OK)
        s = fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, pair, 2, FSDP_F64, FSDP_MAX,
                            NULL);
    fsdp__parity_check *c =
        fsdp__parity_add(r, "logits", "largest difference / largest value", bound_logits);
    fsdp__parity_note(c, pair[0] == 0.0 ? 0.0 : pair[0] / pair[1], "%s", "");
    return s;
}

static fsdp_status check_batch(fsdp__parity_run *r, fsdp__st *st, const batch *b)
{
    fsdp__parity_batch mine;
    double loss = 0.0, expected;
    FSDP_TRY(check_logits(r, st, b));
    FSDP_TRY(fsdp__parity_deal(b->ids, b->labels, b->T, b->B, b->T, &mine));
    FSDP_TRY(fsdp__parity_backward(r, &mine, 1.0 / (double)b->valid, true, &loss));
    FSDP_TRY(fsdp__parity_sum(&loss, 1));
    FSDP_TRY(fsdp__parity_read_scalar(st, "loss", &expected));
    fsdp__parity_note(fsdp__parity_add(r, "loss", "relative", bound_loss),
                      relative(loss / (double)b->valid, expected), "%s", "");
    fsdp__parity_check *c =
        fsdp__parity_add(r, "gradients", "largest difference / largest value", bound_gradient);
    FSDP_TRY(fsdp__parity_params(r, st, "grad.", true, false, c));
    return fsdp_zero_grad(r->model);
}

static fsdp_status check_expected(fsdp__parity_run *r, fsdp__st *st)
{
    batch b = {0};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_status s = scope ? read_batch(st, &b) : fsdp_error();
    if (s == FSDP_OK) s = check_batch(r, st, &b);
    fsdp_scope_end(scope);
    free(b.ids);
    free(b.labels);
    return s;
}

/* ---- steps ------------------------------------------------------------------------------ */

/* What training.json and run.json share. */
typedef struct steps {
    json_t *json;
    const char *file;
    fsdp__json_at at;
    const json_t *list; /* "steps" */
    double lr, max_norm;
    fsdp_adamw_options adamw;
    int64_t *tokens; /* (S, M, B, T+1) */
    int64_t S, M, B, T;
} steps;

static fsdp_status read_options(steps *s)
{
    const char *optimizer = "AdamW";
    s->adamw = fsdp_adamw_defaults();
    FSDP_TRY(fsdp__json_root(s->json, s->file, &s->at));
    FSDP_TRY(fsdp__json_string(&s->at, "optimizer", &optimizer));
    if (strcmp(optimizer, "AdamW"))
        return fsdp__json_fail(FSDP_UNSUPPORTED, &s->at, "optimizer", "\"AdamW\"");
    FSDP_TRY(fsdp__json_number(&s->at, "beta1", &s->adamw.beta1));
    FSDP_TRY(fsdp__json_number(&s->at, "beta2", &s->adamw.beta2));
    FSDP_TRY(fsdp__json_number(&s->at, "eps", &s->adamw.eps));
    FSDP_TRY(fsdp__json_number(&s->at, "weight_decay", &s->adamw.weight_decay));
    FSDP_TRY(fsdp__json_need(&s->at, "max_norm"));
    FSDP_TRY(fsdp__json_number(&s->at, "max_norm", &s->max_norm));
    FSDP_TRY(fsdp__json_number(&s->at, "lr", &s->lr));
    s->list = json_object_get(s->json, "steps");
    if (!json_is_array(s->list))
        return fsdp__json_fail(FSDP_INVALID_DATA, &s->at, "steps", "a list of steps");
    if ((int64_t)json_array_size(s->list) != s->S)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: found %zu steps, expected %lld, as the tokens have", s->file,
                          json_array_size(s->list), (long long)s->S);
    return FSDP_OK;
}

/* Gradients of one step over all its microbatches; *loss is the step's. */
static fsdp_status step_backward(fsdp__parity_run *r, const steps *s, int64_t step, double *loss)
{
    double valid = (double)(s->M * s->B * s->T);
    *loss = 0.0;
    for (int64_t m = 0; m < s->M; m++) {
        const int64_t *from = s->tokens + (step * s->M + m) * s->B * (s->T + 1);
        fsdp__parity_batch b;
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status e = fsdp__parity_deal(from, from + 1, s->T + 1, s->B, s->T, &b);
        if (e == FSDP_OK) e = fsdp__parity_backward(r, &b, 1.0 / valid, m == s->M - 1, loss);
        fsdp_scope_end(scope);
        FSDP_TRY(e);
    }
    FSDP_TRY(fsdp__parity_sum(loss, 1));
    *loss /= valid;
    return FSDP_OK;
}

static fsdp_status run_step(fsdp__parity_run *r, const steps *s, fsdp_optimizer *opt, int64_t i,
                            fsdp__parity_check *losses, fsdp__parity_check *norms)
{
    fsdp__json_at at;
    double loss, norm, lr = s->lr, expected_loss, expected_norm;
    FSDP_TRY(fsdp__json_root(json_array_get(s->list, (size_t)i), s->file, &at));
    snprintf(at.path, sizeof at.path, "steps[%lld]", (long long)i);
    FSDP_TRY(fsdp__json_need(&at, "loss"));
    FSDP_TRY(fsdp__json_need(&at, "grad_norm"));
    FSDP_TRY(fsdp__json_number(&at, "loss", &expected_loss));
    FSDP_TRY(fsdp__json_number(&at, "grad_norm", &expected_norm));
    FSDP_TRY(fsdp__json_number(&at, "lr", &lr));
    FSDP_TRY(step_backward(r, s, i, &loss));
    FSDP_TRY(fsdp_clip_grad_norm(r->model, s->max_norm, &norm));
    fsdp_optimizer_set_lr(opt, lr);
    FSDP_TRY(fsdp_optimizer_step(opt));
    FSDP_TRY(fsdp_zero_grad(r->model));
    fsdp__parity_note(losses, relative(loss, expected_loss), "step %lld", (long long)i + 1);
    fsdp__parity_note(norms, relative(norm, expected_norm), "step %lld", (long long)i + 1);
    return FSDP_OK;
}

/* All steps, and the weights after them against <prefix><name> of st, NULL: not compared. */
static fsdp_status check_steps(fsdp__parity_run *r, steps *s, bool bf16, fsdp__st *st,
                               const char *prefix)
{
    FSDP_TRY(read_options(s));
    fsdp_optimizer *opt = fsdp_adamw(r->model, &s->adamw);
    if (!opt) return fsdp_error();
    fsdp__parity_check *losses = fsdp__parity_add(r, "loss of each step", "relative",
                                                  bf16 ? bound_bf16_loss : bound_step_loss);
    fsdp__parity_check *norms = fsdp__parity_add(r, "gradient norm of each step", "relative",
                                                 bf16 ? bound_bf16_norm : bound_step_norm);
    fsdp_status e = FSDP_OK;
    for (int64_t i = 0; i < s->S && e == FSDP_OK; i++)
        e = run_step(r, s, opt, i, losses, norms);
    fsdp_optimizer_free(opt);
    /* In bf16 the noise of Adam's first steps is as large as the weights' change. */
    if (e != FSDP_OK || !st || bf16) return e;
    fsdp__parity_check *c =
        fsdp__parity_add(r, "weights after them", "norm of the difference / norm", bound_weights);
    return fsdp__parity_params(r, st, prefix, false, true, c);
}

/* Tokens of a file: (S, B, T+1), or with `micro` (S, M, B, T+1). */
static fsdp_status read_tokens(fsdp__st *st, bool micro, steps *s)
{
    int64_t n[4];
    s->tokens = fsdp__parity_read(st, "tokens", FSDP_I64, micro ? 4 : 3, n);
    if (!s->tokens) return fsdp_error();
    s->S = n[0];
    s->M = micro ? n[1] : 1;
    s->B = n[micro + 1];
    s->T = n[micro + 2] - 1;
    if (s->T > 0) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA, "%s: rows of %lld tokens, expected 2 or more",
                      fsdp__st_path(st), (long long)n[micro + 2]);
}

/* ---- the two kinds of folder ---------------------------------------------------------------- */

static const char *const strategies[] = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"};

static void set_title(fsdp__parity_run *r, int64_t replicas, const char *rest)
{
    char copies[48] = "";
    if (replicas > 1) snprintf(copies, sizeof copies, " in %lld replicas", (long long)replicas);
    snprintf(r->report->title, sizeof r->report->title, "%s, %lld parameters, %d rank%s, %s%s%s",
             fsdp__model_architecture(r->config.family), (long long)fsdp_module_numel(r->model),
             fsdp_world_size(), fsdp_world_size() == 1 ? "" : "s", strategies[r->o->strategy],
             copies, rest);
}

static fsdp_status check_model(fsdp__parity_run *r, const char *dir)
{
    fsdp__st *expected = NULL, *tokens = NULL, *after = NULL;
    steps t = {.file = "training.json", .json = json_if_there(dir, "training.json")};
    fsdp_status s = fsdp_error();
    if (s == FSDP_OK) s = open_if_there(dir, "expected.safetensors", &expected);
    if (s == FSDP_OK) s = open_if_there(dir, "train_tokens.safetensors", &tokens);
    if (s == FSDP_OK) s = open_if_there(dir, "after20.safetensors", &after);
    if (s == FSDP_OK && !expected && !(t.json && tokens))
        s = fsdp__fail(FSDP_NOT_FOUND,
                       "%s: found neither expected.safetensors nor training.json with "
                       "train_tokens.safetensors; there is nothing to compare with (a folder with "
                       "run.json wants --model FOLDER)",
                       dir);
    if (s == FSDP_OK) s = fsdp__parity_make_model(r, dir, 1, false);
    if (s == FSDP_OK) set_title(r, 1, "");
    if (s == FSDP_OK && expected) s = check_expected(r, expected);
    if (s == FSDP_OK && t.json && tokens) {
        s = read_tokens(tokens, false, &t);
        if (s == FSDP_OK) s = check_steps(r, &t, false, after, "");
    }
    free(t.tokens);
    json_decref(t.json);
    fsdp__st_close(after);
    fsdp__st_close(tokens);
    fsdp__st_close(expected);
    return s;
}

static fsdp_status check_run(fsdp__parity_run *r, const char *dir)
{
    fsdp__st *tokens = NULL, *full = NULL;
    steps t = {.file = "run.json", .json = json_if_there(dir, "run.json")};
    const char *dtype = "f32";
    int64_t replicas = 1;
    fsdp_status s = fsdp_error();
    if (s == FSDP_OK) s = open_if_there(dir, "tokens.safetensors", &tokens);
    if (s == FSDP_OK) s = open_if_there(dir, "full.safetensors", &full);
    if (s == FSDP_OK && !(t.json && tokens))
        s = fsdp__fail(FSDP_NOT_FOUND,
                       "%s: found no run.json with tokens.safetensors, expected a run of the model "
                       "in %s; leave out --model for a folder that holds its own model",
                       dir, r->o->model);
    if (s == FSDP_OK) s = fsdp__json_root(t.json, t.file, &t.at);
    if (s == FSDP_OK) s = fsdp__json_string(&t.at, "dtype", &dtype);
    if (s == FSDP_OK) s = fsdp__json_int(&t.at, "replicas", &replicas);
    bool bf16 = strcmp(dtype, "f32") != 0;
    if (s == FSDP_OK && bf16 && strcmp(dtype, "bf16"))
        s = fsdp__json_fail(FSDP_UNSUPPORTED, &t.at, "dtype", "\"f32\" or \"bf16\"");
    if (s == FSDP_OK) s = read_tokens(tokens, true, &t);
    /* The run's replicas where they divide these ranks; the numbers are the same without. */
    if (r->o->strategy == FSDP__PARITY_NONE || replicas < 1 || fsdp_world_size() % replicas != 0)
        replicas = 1;
    if (s == FSDP_OK) s = fsdp__parity_make_model(r, r->o->model, replicas, bf16);
    if (s == FSDP_OK) set_title(r, replicas, bf16 ? ", bf16 with f32 reduction" : "");
    if (s == FSDP_OK) s = check_steps(r, &t, bf16, full, "model.");
    free(t.tokens);
    json_decref(t.json);
    fsdp__st_close(full);
    fsdp__st_close(tokens);
    return s;
}

fsdp_status fsdp__parity(const char *dir, const fsdp__parity_options *o, fsdp__parity_report *out)
{
    *out = (fsdp__parity_report){0};
    if (fsdp_error()) return fsdp_error();
    fsdp__parity_run r = {.o = o, .report = out};
    fsdp_status s = o->model ? check_run(&r, dir) : check_model(&r, dir);
    fsdp_module_free(r.model);
    return s;
}

bool fsdp__parity_passed(const fsdp__parity_report *r)
{
    for (int i = 0; i < r->count; i++)
        if (!(r->check[i].error <= r->check[i].bound)) return false;
    return true;
}
