/*
 * trainer.c - the training loop, top to bottom.
 *
 * Every rank runs this file with the same configuration. Where ranks do different things (rank 0
 * prints and owns the run's folder) the others learn of it by a broadcast. Errors need no such
 * care: the first one that a rank keeps ends the collectives of all others, with its text.
 *
 * Shapes: B rows of a microbatch, T tokens of a row.
 */
#include "train/trainer.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "ckpt/checkpoint.h"
#include "data/bigram.h"
#include "data/sampler.h"
#include "fsdp/comm.h"
#include "fsdp/models.h"
#include "fsdp/optim.h"
#include "fsdp/shard.h"
#include "hf/folder.h"
#include "train/adapters.h"
#include "train/bytes.h"
#include "train/effect.h"
#include "train/groups.h"
#include "train/inputs.h"
#include "train/losses.h"
#include "train/metrics.h"
#include "train/nonfinite.h"
#include "train/offload.h"
#include "train/recompute.h"
#include "train/run_folder.h"
#include "train/strategy.h"
#include "train/units.h"
#include "train/update.h"

typedef struct trainer {
    const fsdp__train_config *c;
    int (*stop)(void);
    int rank, ranks;
    fsdp_group *world;
    fsdp__str text; /* of the resolved configuration */
    fsdp__run_folder folder;
    fsdp__metrics metrics;
    fsdp__train_inputs in;
    fsdp_mesh *mesh;
    fsdp_module *model;
    fsdp__train_recompute recompute;
    fsdp_optimizer *opt;
    fsdp__early_param *early; /* NULL: steps are taken after backward */
    fsdp__update update;
    fsdp__injection injection;
    fsdp__byte_plan plan;
    fsdp__sampler sampler, validator;
    fsdp__microbatch mb;
    fsdp_schedule schedule;
    int64_t step;    /* optimizer steps that are done */
    int64_t samples; /* rows that were consumed */
    char *adapters;  /* what their numbers mean; NULL: there are none */
    uint64_t base;   /* of frozen weights that checkpoints leave out; 0: none are left out */
    int learning;    /* steps that were looked at for adapters without a gradient */
    bool asked;      /* a rank was asked to stop */
    fsdp__losses losses;
    double loss, validation, bigram;
} trainer;

/* ---- before anything is allocated ------------------------------------------------------- */

static fsdp_status start(trainer *t)
{
    const fsdp__train_config *c = t->c;
    fsdp_group_set_timeout(t->world, c->comm.init_timeout_seconds);
    fsdp__train_config_text(c, &t->text);
    if (t->text.failed) return fsdp__fail_memory("the configuration's text", t->text.len);
    FSDP_TRY(fsdp__config_agree(t->text.p));
    fsdp__say(&t->metrics, "%s\n", c->job.description ? c->job.description : "");
    if (!c->checkpoint.enable && !c->checkpoint.last_save_in_hf)
        fsdp__say(&t->metrics, "checkpoint.enable and checkpoint.last_save_in_hf are off: the "
                               "weights end with the run\n");
    if (c->job.print_config) fsdp__say(&t->metrics, "%s", t->text.p);
    fsdp__str idle = {0};
    FSDP_TRY(fsdp__train_no_effect(c, &idle));
    fsdp__say(&t->metrics, "%s", fsdp__str_get(&idle));
    fsdp__str_free(&idle);
    fsdp__say(&t->metrics, "configuration hash %016" PRIx64 "\n",
              fsdp__train_config_hash(t->text.p));
    return fsdp__run_folder_open(c, t->text.p, &t->metrics, &t->folder);
}

static fsdp_status make_mesh(trainer *t)
{
    FSDP_TRY(fsdp__strategy_mesh(t->c, &t->metrics, &t->mesh));
    fsdp__say(&t->metrics, "kernels for %s (%s), %d thread%s a rank\n",
              fsdp__cpu_isa_name(fsdp__cpu_isa()), fsdp__cpu_model(), fsdp_threads(),
              fsdp_threads() == 1 ? "" : "s");
    return FSDP_OK;
}

static fsdp_status make_samplers(trainer *t)
{
    const fsdp__train_config *c = t->c;
    FSDP_TRY(fsdp__sampler_init(&t->sampler, t->in.train, t->in.model.vocab_size,
                                c->training.seq_len, c->training.global_batch_size,
                                (uint64_t)c->debug.seed, c->data.shuffle));
    t->sampler.aligned = c->training.reproducible;
    fsdp__sampler_step plan;
    FSDP_TRY(
        fsdp__sampler_plan(&t->sampler, 0, t->rank, t->ranks, c->training.local_batch_size, &plan));
    fsdp__say(&t->metrics,
              "%lld sequences a step: %d ranks x %lld microbatches of at most %lld; the loss is "
              "divided by the valid tokens of the step, %lld\n",
              (long long)plan.rows, t->ranks, (long long)plan.calls, (long long)plan.microbatch,
              (long long)plan.valid_tokens);
    if (c->debug.inject_nonfinite)
        FSDP_TRY(fsdp__injection_check(c->debug.inject_nonfinite, t->ranks, c->training.steps,
                                       plan.calls));
    if (!t->in.validation) return FSDP_OK;
    /* Validation takes the rows in order, once; all ranks together have one batch a step. */
    return fsdp__sampler_init(&t->validator, t->in.validation, t->in.model.vocab_size,
                              c->validation.seq_len, c->validation.local_batch_size * t->ranks, 0,
                              false);
}

/* ---- the model --------------------------------------------------------------------------- */

static int64_t microbatches(const trainer *t)
{
    fsdp__sampler_step plan;
    if (fsdp__sampler_plan(&t->sampler, 0, 0, t->ranks, t->c->training.local_batch_size, &plan) !=
        FSDP_OK)
        return 1;
    return plan.calls;
}

/* What does not fit is said before it is tried. */
static fsdp_status check_limit(trainer *t)
{
    int64_t limit = t->c->memory.limit;
    fsdp__str text = {0}, need = {0}, bound = {0};
    FSDP_TRY(fsdp__byte_plan_make(t->c, t->model, microbatches(t), &t->plan));
    fsdp__byte_plan_text(&t->plan, NULL, 0, &text);
    fsdp__say(&t->metrics, "%lld parameters, memory planned:\n%s",
              (long long)fsdp_module_numel(t->model), fsdp__str_get(&text));
    fsdp__str_free(&text);
    FSDP_TRY(fsdp__units_report(t->c, t->model, &text));
    fsdp__say(&t->metrics, "%s", fsdp__str_get(&text));
    fsdp__str_free(&text);
    FSDP_TRY(fsdp_memory_set_limit(limit));
    if (limit == 0 || t->plan.rank_total <= limit) return FSDP_OK;
    fsdp__str_add_bytes(&need, (double)t->plan.rank_total);
    fsdp__str_add_bytes(&bound, (double)limit);
    fsdp_status s = fsdp__fail_alike(
        FSDP_NO_MEMORY,
        "memory.limit is %s a rank, and this layout needs %s before any activation (table above); "
        "cut the model over more ranks (parallelism.data_parallel_shard_degree is %lld, "
        "data_parallel_replicate_degree %lld) or raise the limit",
        fsdp__str_get(&bound), fsdp__str_get(&need),
        (long long)t->c->parallelism.data_parallel_shard_degree,
        (long long)t->c->parallelism.data_parallel_replicate_degree);
    fsdp__str_free(&need);
    fsdp__str_free(&bound);
    return s;
}

static fsdp_status make_optimizer(trainer *t)
{
    const fsdp__train_config *c = t->c;
    if (c->optimizer.name == 0) {
        fsdp_adamw_options o = {c->optimizer.lr, c->optimizer.beta1, c->optimizer.beta2,
                                c->optimizer.eps, c->optimizer.weight_decay};
        t->opt = fsdp_adamw(t->model, &o);
    } else {
        fsdp_sgd_options o = {c->optimizer.lr, c->optimizer.momentum, c->optimizer.weight_decay, 0};
        t->opt = fsdp_sgd(t->model, &o);
    }
    if (!t->opt) return fsdp_error();
    FSDP_TRY(fsdp__train_groups_add(c, t->opt, &t->metrics));
    FSDP_TRY(fsdp__train_offload_optimizer(c, t->opt, &t->metrics));
    FSDP_TRY(fsdp__train_early_begin(c, t->model, t->opt, &t->step, &t->early, &t->metrics));
    if (c->lr_scheduler.warmup_steps > c->lr_scheduler.total_steps)
        fsdp__say(&t->metrics,
                  "lr_scheduler.warmup_steps %lld is longer than the schedule of %lld "
                  "steps: shortened to it\n",
                  (long long)c->lr_scheduler.warmup_steps, (long long)c->lr_scheduler.total_steps);
    t->schedule = (fsdp_schedule){
        c->lr_scheduler.warmup_steps, c->lr_scheduler.total_steps, c->lr_scheduler.decay_ratio,
        (fsdp_decay)c->lr_scheduler.decay_type, c->lr_scheduler.min_lr_factor};
    return FSDP_OK;
}

static fsdp_status load_folder(trainer *t)
{
    const char *from = t->c->model.hf_assets_path;
    double begin = fsdp__now();
    FSDP_TRY(fsdp__hf_load_weights(t->model, from));
    fsdp__say(&t->metrics, "weights of %s loaded in %.1f s\n", from, fsdp__now() - begin);
    return fsdp__adapters_base(t->c, t->model, &t->base);
}

/* Weights: of a checkpoint, of a folder, or new ones. */
static fsdp_status fill(trainer *t)
{
    const fsdp__train_config *c = t->c;
    bool folder = c->model.hf_assets_path && c->checkpoint.initial_load_in_hf;
    if (t->folder.load_step >= 0) {
        if (folder && c->lora.enable) FSDP_TRY(load_folder(t));
        fsdp__ckpt_state s = {.ema = t->update.ema,
                              .scaler = t->update.scaler,
                              .base = t->base,
                              .adapters = t->adapters};
        FSDP_TRY(fsdp__ckpt_load(t->model, t->opt, t->folder.checkpoints, t->folder.load_step, &s));
        t->step = s.step;
        t->samples = s.samples;
        t->update.skipped = s.skipped;
        t->update.skipped_in_row = s.skipped_in_row;
        FSDP_TRY(fsdp__update_schedule(c, &s, &t->schedule, &t->metrics));
        return fsdp_mark_changed(t->model);
    }
    if (!folder) {
        FSDP_TRY(fsdp_reset_parameters(t->model, (uint64_t)c->debug.seed));
        return fsdp__adapters_fill(c, t->model);
    }
    FSDP_TRY(load_folder(t));
    FSDP_TRY(fsdp__adapters_fill(c, t->model));
    return fsdp_mark_changed(t->model);
}

/* On the meta device first: no rank ever holds the whole model. */
static fsdp_status make_model(trainer *t)
{
    FSDP_TRY(fsdp_device_push(FSDP_META));
    t->model = fsdp_model_create(&t->in.model);
    FSDP_TRY(fsdp_device_pop());
    if (!t->model) return fsdp_error();
    if (t->c->training.dtype == FSDP__TRAIN_BF16)
        FSDP_TRY(fsdp_module_to_dtype(t->model, FSDP_BF16));
    FSDP_TRY(fsdp__adapters_apply(t->c, t->model, &t->metrics));
    FSDP_TRY(fsdp__adapters_text(t->c, t->model, &t->adapters));
    FSDP_TRY(fsdp__train_recompute_apply(t->c, t->model, &t->recompute));
    if (t->c->debug.inject_nonfinite) {
        FSDP_TRY(fsdp__injection_parse(t->c->debug.inject_nonfinite, &t->injection));
        FSDP_TRY(fsdp__injection_install(&t->injection, t->model));
    }
    FSDP_TRY(fsdp__strategy_shard(t->c, t->mesh, t->model));
    if (t->c->model.print_after_conversion) {
        char *text = fsdp_module_print(t->model);
        if (!text) return fsdp_error();
        fsdp__say(&t->metrics, "%s", text);
        free(text);
    }
    FSDP_TRY(check_limit(t));
    FSDP_TRY(fsdp_to_empty(t->model, FSDP_CPU));
    FSDP_TRY(make_optimizer(t));
    FSDP_TRY(fsdp__update_make(&t->update, t->c, t->model, t->opt, &t->metrics));
    FSDP_TRY(fill(t));
    fsdp_memory_trim(); /* what reading took: steps take other sizes */
    return fsdp__run_folder_begin(t->c, t->text.p, &t->folder);
}

/* ---- losses --------------------------------------------------------------------------------- */

/* The sum of all ranks' losses of a step; notes whether one was asked to stop. */
static fsdp_status sum_losses(trainer *t, const fsdp__sampler_step *plan, fsdp__loss_sum *sum)
{
    FSDP_TRY(fsdp__losses_sum(&t->losses, t->world, plan, t->stop && t->stop(), sum));
    t->asked = t->asked || sum->flag;
    return FSDP_OK;
}

/* Forward of the microbatch t->mb; the sum of its losses, in the innermost scope. */
static fsdp_tensor *forward(trainer *t)
{
    const fsdp__microbatch *mb = &t->mb;
    const int64_t sizes[2] = {mb->rows, mb->seq_len};
    fsdp_tensor *tokens =
        fsdp_tensor_from_memory(mb->inputs, FSDP_I64, 2, sizes, NULL, NULL, NULL); /* (B,T) */
    fsdp_tensor *targets =
        fsdp_tensor_from_memory(mb->targets, FSDP_I64, 2, sizes, NULL, NULL, NULL); /* (B,T) */
    return fsdp_model_forward(t->model, tokens, NULL, targets);
}

/* ---- a step --------------------------------------------------------------------------------- */

/* Forward of call `call` of the step: the sum of its losses. */
static fsdp_tensor *forward_call(trainer *t, const fsdp__sampler_step *plan, int64_t call)
{
    t->injection.now_step = t->step + 1;
    t->injection.now_call = call;
    if (fsdp__sampler_fill(&t->sampler, plan, call, &t->mb) != FSDP_OK ||
        fsdp_random_set((uint64_t)t->c->debug.seed, (uint64_t)t->step, t->mb.samples, t->mb.rows) !=
            FSDP_OK)
        return NULL;
    return forward(t);
}

/* One microbatch: its loss into t->losses, its gradients, scaled by the step's tokens, into the
 * parameters'. The ranks' gradients are summed in the last call of a step, or in each. early (else
 * NULL): that backward changes weights, so all losses of the step are summed into it before, and
 * nothing goes backward if one is not finite. */
static fsdp_status forward_backward(trainer *t, const fsdp__sampler_step *plan, int64_t call,
                                    fsdp__loss_sum *early)
{
    bool last = call == plan->calls - 1;
    bool sync = last || t->c->training.sync_each_microbatch;
    FSDP_TRY(fsdp_set_requires_gradient_sync(t->model, sync, 1));
    /* Between microbatches a hybrid's sums, 1/S a rank, need not go over the replicas yet. */
    if (sync && !last && t->c->parallelism.data_parallel_shard_degree > 1)
        FSDP_TRY(fsdp_set_requires_all_reduce(t->model, 0, 1));
    FSDP_TRY(fsdp_set_is_last_backward(t->model, last));
    fsdp__train_recompute_begin(&t->recompute, &t->metrics);
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = forward_call(t, plan, call);
    t->losses.mine[call] = loss ? fsdp_item(loss) : 0.0;
    fsdp__train_recompute_turn(&t->recompute, &t->metrics);
    fsdp_status s = early && last ? sum_losses(t, plan, early) : FSDP_OK;
    bool goes = !(early && last) || (s == FSDP_OK && early->bad_rank < 0);
    if (goes)
        s = fsdp_backward(
            fsdp_scale(loss, fsdp__update_loss_factor(&t->update, plan->valid_tokens)));
    fsdp_scope_end(scope);
    if (s == FSDP_OK) s = fsdp_error();
    if (s != FSDP_OK || !goes) return s;
    double tokens = (double)(t->mb.rows * t->mb.seq_len);
    return fsdp__train_recompute_settle(&t->recompute, tokens * t->metrics.flops_per_token,
                                        &t->metrics);
}

/* ---- a step that is not finite -------------------------------------------------------------- */

typedef struct replay {
    trainer *t;
    const fsdp__sampler_step *plan;
} replay;

static fsdp_tensor *replay_loss(void *arg, int64_t call)
{
    const replay *r = arg;
    return fsdp_scale(forward_call(r->t, r->plan, call),
                      fsdp__update_loss_factor(&r->t->update, r->plan->valid_tokens));
}

/* All ranks are here alike. Reports where it came from; then the run ends, or the step is left out.
 */
static fsdp_status not_finite(trainer *t, const fsdp__sampler_step *plan, const fsdp__loss_sum *sum)
{
    replay r = {t, plan};
    fsdp__probe p = {t->model, &t->sampler, plan, replay_loss, &r};
    fsdp__str text = {0};
    fsdp_status s = sum->bad_rank >= 0
                        ? fsdp__nonfinite_loss(&p, sum->bad_rank, sum->bad_call, t->loss, &text)
                        : fsdp__nonfinite_gradient(&p, t->update.grad_norm, &text);
    if (s == FSDP_OK && t->c->training.nonfinite == 0)
        s = fsdp__fail_alike(
            FSDP_NON_FINITE,
            "step %lld: %s; no weight was changed. Lower optimizer.lr, raise "
            "lr_scheduler.warmup_steps, look at those samples, or set training.nonfinite "
            "skip%s",
            (long long)t->step + 1, fsdp__str_get(&text),
            t->early ? " and optimizer.early_step_in_backward false" : "");
    else if (s == FSDP_OK)
        s = fsdp__update_skip(&t->update, t->step + 1, false, fsdp__str_get(&text), &t->metrics);
    fsdp__str_free(&text);
    return s;
}

static fsdp_status train_step(trainer *t, fsdp__sampler_step *plan)
{
    fsdp__loss_sum sum;
    fsdp__verdict verdict = FSDP__GRADIENTS_BAD;
    FSDP_TRY(fsdp__sampler_plan(&t->sampler, t->samples, t->rank, t->ranks,
                                t->c->training.local_batch_size, plan));
    FSDP_TRY(fsdp__losses_reserve(&t->losses, t->ranks, plan->calls));
    fsdp_optimizer_set_lr(t->opt, t->c->optimizer.lr * fsdp_schedule_factor(&t->schedule, t->step));
    bool early = t->c->optimizer.early_step_in_backward;
    for (int64_t call = 0; call < plan->calls; call++)
        FSDP_TRY(forward_backward(t, plan, call, early ? &sum : NULL));
    FSDP_TRY(fsdp__injection_settle(&t->injection));
    if (!early) FSDP_TRY(sum_losses(t, plan, &sum));
    t->loss = sum.sum / (double)plan->valid_tokens;
    if (sum.bad_rank < 0) FSDP_TRY(fsdp__update_look(&t->update, &verdict));
    if (verdict == FSDP__GRADIENTS_FINE) {
        if (!early) FSDP_TRY(fsdp__adapters_report(t->c, t->model, &t->learning, &t->metrics));
        FSDP_TRY(fsdp__update_apply(&t->update));
    } else if (verdict == FSDP__GRADIENTS_OVERFLOW) {
        FSDP_TRY(fsdp__update_skip(&t->update, t->step + 1, true, NULL, &t->metrics));
    } else {
        FSDP_TRY(not_finite(t, plan, &sum));
    }
    FSDP_TRY(fsdp_zero_grad(t->model));
    t->step++;
    t->samples = plan->first + plan->rows;
    return FSDP_OK;
}

/* ---- validation ------------------------------------------------------------------------------ */

static fsdp_status validate_batches(trainer *t, int64_t *tokens, double *loss)
{
    int64_t steps = t->c->validation.steps;
    double total = 0.0;
    fsdp__loss_sum sum;
    *tokens = 0;
    for (int64_t i = 0, at = 0; at < t->validator.rows && (steps < 0 || i < steps); i++) {
        fsdp__sampler_step plan;
        FSDP_TRY(fsdp__sampler_plan(&t->validator, at, t->rank, t->ranks,
                                    t->c->validation.local_batch_size, &plan));
        FSDP_TRY(fsdp__losses_reserve(&t->losses, t->ranks, plan.calls));
        for (int64_t call = 0; call < plan.calls; call++) {
            FSDP_TRY(fsdp__sampler_fill(&t->validator, &plan, call, &t->mb));
            fsdp_scope *scope = fsdp_scope_begin();
            fsdp_tensor *one = forward(t);
            t->losses.mine[call] = one ? fsdp_item(one) : 0.0;
            fsdp_scope_end(scope);
            FSDP_TRY(fsdp_error());
        }
        FSDP_TRY(sum_losses(t, &plan, &sum));
        total += sum.sum;
        *tokens += plan.valid_tokens;
        at = plan.first + plan.rows;
    }
    *loss = *tokens > 0 ? total / (double)*tokens : NAN;
    return FSDP_OK;
}

static fsdp_status validate(trainer *t)
{
    int64_t tokens;
    double begin = fsdp__now();
    (void)fsdp__metrics_peak(&t->metrics);
    fsdp_module_train(t->model, 0);
    fsdp_no_grad_begin();
    fsdp_status s = t->c->validation.ema ? fsdp_ema_swap_in(t->update.ema) : FSDP_OK;
    if (s == FSDP_OK) s = validate_batches(t, &tokens, &t->validation);
    fsdp_no_grad_end();
    fsdp_module_train(t->model, 1);
    if (t->c->validation.ema && s == FSDP_OK) s = fsdp_ema_swap_out(t->update.ema);
    FSDP_TRY(s);
    FSDP_TRY(
        fsdp__metrics_validation(&t->metrics, t->step, t->validation, tokens, fsdp__now() - begin));
    fsdp__metrics_resume(&t->metrics);
    return FSDP_OK;
}

/* ---- saving -----------------------------------------------------------------------------------
 */

static fsdp_status save(trainer *t)
{
    double begin = fsdp__now();
    fsdp__ckpt_state s = {.step = t->step,
                          .samples = t->samples,
                          .skipped = t->update.skipped,
                          .skipped_in_row = t->update.skipped_in_row,
                          .schedule = t->schedule,
                          .has_schedule = true,
                          .base = t->base,
                          .adapters = t->adapters,
                          .ema = t->update.ema,
                          .scaler = t->update.scaler};
    FSDP_TRY(fsdp__ckpt_save(t->model, t->opt, t->folder.checkpoints, &s));
    if (t->rank == 0)
        FSDP_TRY(fsdp__ckpt_prune(t->folder.checkpoints, t->c->checkpoint.keep_latest_k));
    fsdp__say(&t->metrics, "checkpoint %s/step-%lld saved in %.2f s\n", t->folder.checkpoints,
              (long long)t->step, fsdp__now() - begin);
    FSDP_TRY(fsdp__adapters_save(t->c, t->model, t->folder.adapter, &t->metrics));
    fsdp__metrics_resume(&t->metrics);
    return FSDP_OK;
}

static fsdp_status export(trainer *t)
{
    static const fsdp_dtype dtypes[] = {FSDP_F32, FSDP_BF16, FSDP_F16};
    fsdp__hf_save_options o = {dtypes[t->c->checkpoint.export_dtype], t->in.tokenizer, 0};
    FSDP_TRY(fsdp__hf_save_folder(t->model, &t->in.model, t->folder.hf, &o));
    fsdp__say(&t->metrics, "model saved as Hugging Face folder %s\n", t->folder.hf);
    if (!t->c->checkpoint.export_ema) return FSDP_OK;
    FSDP_TRY(fsdp_ema_swap_in(t->update.ema));
    FSDP_TRY(fsdp__hf_save_folder(t->model, &t->in.model, t->folder.hf_ema, &o));
    fsdp__say(&t->metrics, "moving average of the weights saved as Hugging Face folder %s\n",
              t->folder.hf_ema);
    return fsdp_ema_swap_out(t->update.ema);
}

/* ---- the run ------------------------------------------------------------------------------------
 */

/* The table again, with what was measured. The first step gathers nothing ahead, since it records
 * the order; the second is as all others. */
static fsdp_status print_bytes(trainer *t)
{
    enum { N = FSDP_PURPOSE_COUNT + 1 };
    int64_t mine[N], largest[N] = {0};
    (void)fsdp__metrics_peak(&t->metrics);
    memcpy(mine, t->metrics.peak, sizeof t->metrics.peak);
    mine[N - 1] = t->metrics.peak_total;
    int64_t *all = fsdp__calloc((size_t)t->ranks * N, sizeof *all, "the ranks' bytes");
    if (!all) return fsdp_error();
    fsdp_status s = fsdp_all_gather(t->world, FSDP_LANE_CONTROL, mine, all, sizeof mine, NULL);
    for (int i = 0; s == FSDP_OK && i < t->ranks * N; i++)
        if (all[i] > largest[i % N]) largest[i % N] = all[i];
    free(all);
    FSDP_TRY(s);
    fsdp__str text = {0};
    fsdp__byte_plan_text(&t->plan, largest, largest[N - 1], &text);
    fsdp__say(&t->metrics, "memory of the first steps, of the rank with most:\n%s",
              fsdp__str_get(&text));
    fsdp__str_free(&text);
    return FSDP_OK;
}

static void tighten_timeouts(trainer *t)
{
    double seconds = t->c->comm.train_timeout_seconds;
    fsdp_group_set_timeout(t->world, seconds);
    for (int a = 0; a < fsdp_mesh_ndim(t->mesh); a++)
        fsdp_group_set_timeout(fsdp_mesh_group(t->mesh, a), seconds);
}

static fsdp_status loop(trainer *t)
{
    const fsdp__train_config *c = t->c;
    int64_t first = t->step, saved = t->folder.load_step, validated = -1;
    t->metrics.started = fsdp__now();
    fsdp__metrics_resume(&t->metrics);
    if (t->injection.module && t->injection.step <= t->step)
        fsdp__say(&t->metrics,
                  "no effect: debug.inject_nonfinite: the run goes on behind step %lld\n",
                  (long long)t->step);
    while (t->step < c->training.steps && !t->asked) {
        fsdp__sampler_step plan;
        FSDP_TRY(train_step(t, &plan));
        if (c->debug.check_replicas > 0 && t->step % c->debug.check_replicas == 0)
            FSDP_TRY(fsdp_check_replicas(t->model));
        fsdp__metrics_step(&t->metrics, t->step, plan.valid_tokens);
        if (t->step == first + 1) tighten_timeouts(t);
        if (t->step == first + 2 || (t->step == first + 1 && t->step == c->training.steps))
            FSDP_TRY(print_bytes(t));
        if (t->step == first + 1 || t->step % c->metrics.log_freq == 0 ||
            t->step == c->training.steps)
            FSDP_TRY(fsdp__metrics_line(&t->metrics, t->step, t->loss, t->update.grad_norm,
                                        fsdp_optimizer_lr(t->opt)));
        if (c->validation.enable && t->step % c->validation.freq == 0) {
            FSDP_TRY(validate(t));
            validated = t->step;
        }
        if (c->checkpoint.enable && t->step % c->checkpoint.interval == 0) {
            FSDP_TRY(save(t));
            saved = t->step;
        }
    }
    bool done = t->step >= c->training.steps;
    if (done && c->validation.enable && validated != t->step) FSDP_TRY(validate(t));
    if (c->checkpoint.enable && saved != t->step) FSDP_TRY(save(t));
    return FSDP_OK;
}

/* Beside the validation loss, that of the model that only knows which token follows which. */
static fsdp_status compare(trainer *t)
{
    if (!t->in.validation || t->rank != 0) return FSDP_OK;
    FSDP_TRY(fsdp__bigram_loss(t->in.train, t->in.validation, t->in.train->vocab_size, &t->bigram));
    fsdp__say(&t->metrics,
              "validation loss %.4f nats a token; add-one-smoothed bigram model of the training "
              "text: %.4f\n",
              t->validation, t->bigram);
    return FSDP_OK;
}

static fsdp_status finish(trainer *t)
{
    const fsdp__train_config *c = t->c;
    if (t->step < c->training.steps) {
        fsdp__say(&t->metrics, "stopped after step %lld as asked; %s\n", (long long)t->step,
                  c->checkpoint.enable ? "start it again to go on from there"
                                       : "checkpoint.enable is off, so nothing was saved");
        return FSDP_INTERRUPTED;
    }
    FSDP_TRY(compare(t));
    if (!c->checkpoint.enable) /* else the last checkpoint's */
        FSDP_TRY(fsdp__adapters_save(c, t->model, t->folder.adapter, &t->metrics));
    FSDP_TRY(fsdp__adapters_merge(c, t->model, &t->metrics));
    if (c->checkpoint.last_save_in_hf) FSDP_TRY(export(t));
    FSDP_TRY(fsdp__run_folder_finish(c, t->step, t->loss, t->validation, t->bigram));
    fsdp__say(&t->metrics, "finished: %lld steps; the run is in %s\n", (long long)t->step,
              c->job.dump_folder);
    return FSDP_OK;
}

static fsdp_status run(trainer *t)
{
    FSDP_TRY(start(t));
    if (t->folder.finished) return FSDP_OK;
    FSDP_TRY(make_mesh(t));
    FSDP_TRY(fsdp__train_inputs_open(t->c, t->rank == 0, &t->in));
    FSDP_TRY(make_samplers(t));
    FSDP_TRY(make_model(t));
    double flops = fsdp_model_flops_per_token(&t->in.model, t->c->training.seq_len);
    flops =
        fsdp__adapters_flops(t->c, t->model, flops, fsdp_model_flops_per_token(&t->in.model, 0));
    FSDP_TRY(
        fsdp__metrics_open(&t->metrics, t->folder.metrics, t->step, t->c->training.steps, flops));
    FSDP_TRY(loop(t));
    FSDP_TRY(fsdp__train_offload_report(t->c, &t->metrics));
    return finish(t);
}

fsdp_status fsdp__train(const fsdp__train_config *c, int (*stop)(void))
{
    if (fsdp_error()) return fsdp_error();
    trainer t = {.c = c,
                 .stop = stop,
                 .rank = fsdp_rank(),
                 .ranks = fsdp_world_size(),
                 .world = fsdp_group_world(),
                 .folder = {.load_step = -1, .lock = -1},
                 .loss = NAN,
                 .update = {.grad_norm = NAN},
                 .validation = NAN,
                 .bigram = NAN};
    fsdp__metrics_init(&t.metrics, t.rank, t.ranks);
    fsdp_status s = run(&t);
    fsdp__metrics_close(&t.metrics);
    fsdp__update_free(&t.update);
    fsdp_optimizer_free(t.opt);
    fsdp_module_free(t.model);
    free(t.early);
    free(t.adapters);
    fsdp__train_recompute_free(&t.recompute);
    fsdp__microbatch_free(&t.mb);
    fsdp__train_inputs_close(&t.in);
    fsdp__run_folder_free(&t.folder);
    fsdp__str_free(&t.text);
    fsdp__losses_free(&t.losses);
    return s;
}
