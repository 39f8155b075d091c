/*
 * test_conf_overlap.c - upstream's test_fully_shard_overlap.py, _logging and _ignore_params.
 *
 * Overlap is shown without a clock: inside one unit's computation a rank goes on only when the work
 * of another unit is over. If gathers or reductions were done where they are waited for, this would
 * never end; a bound of tries makes that a failure.
 */
#include <sched.h>

#include "nets.h"

#include "fsdp/unit.h"

static const int worlds[] = {1, 2, 4};
enum { WORLDS = sizeof worlds / sizeof *worlds };

/* ---- overlap ------------------------------------------------------------------------ */

enum { LAYERS = 4, TRIES = 20000000 };

typedef struct watch {
    fsdp_module *root, *layer[LAYERS];
    int gathers, reductions; /* seen to end inside another unit's computation */
    int failed;
} watch;

/* Lets work go on until w is done. */
static int ends(fsdp_work *w)
{
    for (int i = 0; i < TRIES; i++) {
        if (fsdp_work_test(w) != 0) return fsdp_error() == FSDP_OK;
        sched_yield();
    }
    return 0;
}

static int index_of(const watch *w, const fsdp_module *m)
{
    for (int i = 0; i < LAYERS; i++)
        if (w->layer[i] == m) return i;
    return -1;
}

/* In forward, after layer i's own gather: the next layer's is under way, and ends here. */
static fsdp_status watch_forward(void *arg, fsdp_module *m, fsdp_values *in)
{
    (void)in;
    watch *w = arg;
    int i = index_of(w, m);
    fsdp__unit *next = i + 1 < LAYERS ? fsdp__unit_of(w->layer[i + 1]) : NULL;
    if (!next || next->state != FSDP__GATHERING || !next->gather) return FSDP_OK;
    if (!ends(next->gather)) w->failed++;
    w->gathers++;
    return FSDP_OK;
}

/* In the middle of a layer's backward: the reduction of the layer behind it is under way. */
static fsdp_tensor *watch_backward(void *arg, fsdp_tensor *g)
{
    (void)g;
    watch *w = arg;
    fsdp__unit *r = fsdp__unit_of(w->root)->tree->queue->first;
    if (!r || !r->reduce) return NULL;
    if (!ends(r->reduce)) w->failed++;
    w->reductions++;
    return NULL;
}

static _Thread_local watch *watching;

/* An MLP whose inner activation tells when its backward runs. */
static fsdp_tensor *watched_forward(fsdp_module *self, fsdp_tensor *x)
{
    conf_mlp *m = (conf_mlp *)self;
    fsdp_tensor *h = fsdp_relu(fsdp_call(m->in, x));
    if (fsdp_register_hook(h, watch_backward, watching) != FSDP_OK) return NULL;
    return fsdp_relu(fsdp_call(m->out, h));
}

static fsdp_status overlap_rank(void *arg)
{
    int prefetch = *(const int *)arg;
    fsdp_module *m = conf_mlps_create(LAYERS, 6);
    CHECK(m);
    watch w = {.root = m};
    watching = &w;
    conf_parity p = {.options = fsdp_shard_defaults(NULL)};
    p.options.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    p.options.prefetch_limit = prefetch;
    for (int i = 0; i < LAYERS; i++) {
        w.layer[i] = fsdp_module_child(m, i);
        w.layer[i]->forward1 = watched_forward;
    }
    CHECK_OK(conf_shard_children(&p, m));
    for (int i = 0; i < LAYERS; i++)
        CHECK(fsdp_register_forward_pre_hook(w.layer[i], watch_forward, &w, 0) >= 0);
    CHECK_OK(fsdp_reset_parameters(m, 1));
    for (int step = 0; step < 3; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        w.gathers = w.reductions = 0;
        CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(3, 6, step)))));
        CHECK(w.failed == 0);
        CHECK(w.gathers == (prefetch > 0 && step > 0 ? LAYERS - 1 : 0));
        CHECK(w.reductions == LAYERS - 1);
        fsdp_scope_end(scope);
        CHECK_OK(fsdp_zero_grad(m));
    }
    fsdp_module_free(m);
    return FSDP_OK;
}

/* From the second step on the next unit's gather ends while this one computes forward, and in
 * backward the reduction of the unit before ends while the next one computes. */
static void test_fully_shard_training_overlap(void)
{
    for (int i = 1; i < WORLDS; i++)
        for (int prefetch = 0; prefetch < 2; prefetch++)
            conf_processes(worlds[i], overlap_rank, &prefetch);
}

/* ---- logging ------------------------------------------------------------------------ */

typedef struct lines {
    char text[4096];
} lines;

static void keep_line(void *arg, int level, const char *line)
{
    lines *l = arg;
    size_t n = strlen(l->text);
    (void)level;
    if (strstr(line, "FSDP::")) snprintf(l->text + n, sizeof l->text - n, "%s\n", line);
}

static fsdp_status logging_rank(void *arg)
{
    (void)arg;
    lines l = {""};
    fsdp_module *m = fsdp_sequential_create();
    CHECK(m);
    CHECK(fsdp_module_add(m, "0", fsdp_linear_create(4, 4, 1)));
    CHECK(fsdp_module_add(m, "1", fsdp_linear_create(4, 4, 1)));
    CHECK_OK(conf_shard_children(&(conf_parity){.options = fsdp_shard_defaults(NULL)}, m));
    CHECK_OK(fsdp_reset_parameters(m, 1));
    fsdp_log_set(keep_line, &l, 3);
    fsdp_scope *scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
    fsdp_scope_end(scope);
    static const char *const expected[] = {"FSDP::root_pre_forward",  "FSDP::pre_forward (0)",
                                           "FSDP::post_forward (0)",  "FSDP::pre_forward (1)",
                                           "FSDP::post_forward (1)",  "FSDP::pre_backward (1)",
                                           "FSDP::post_backward (1)", "FSDP::pre_backward (0)",
                                           "FSDP::post_backward (0)", "FSDP::root_post_backward"};
    const char *at = l.text;
    for (int i = 0; i < 10; i++) { /* all of them, in this order */
        const char *found = strstr(at, expected[i]);
        conf_checks++;
        if (!found) return fsdp__fail(FSDP_INTERNAL, "no %s in\n%s", expected[i], l.text);
        at = found + strlen(expected[i]);
        CHECK(*at == '\n');
    }
    CHECK(at[0] == '\n' && at[1] == 0); /* and no other */
    l.text[0] = 0;
    fsdp_log_set(keep_line, &l, 2); /* a lower level says nothing of it */
    scope = fsdp_scope_begin();
    CHECK_OK(fsdp_backward(conf_loss(fsdp_call(m, conf_input(2, 4, 0)))));
    fsdp_scope_end(scope);
    CHECK(!*l.text);
    fsdp_log_set(NULL, NULL, 0);
    fsdp_module_free(m);
    return FSDP_OK;
}

/* The debug log has upstream's ten lines for a root of two units, in order, and at no other level.
 */
static void test_fsdp_logging(void)
{
    for (int i = 0; i < WORLDS; i++)
        conf_processes(worlds[i], logging_rank, NULL);
}

/* ---- ignored parameters ------------------------------------------------------------- */

enum { IGNORED = 8 };

static fsdp_module *abc_create(const conf_parity *p)
{
    return conf_mlps_create(3, p->dim);
}

/* The parameters of A and C. */
static fsdp_status ignored_of(fsdp_module *m, fsdp_param **out)
{
    int n = 0;
    for (int k = 0; k < 3; k += 2) {
        fsdp_param_list l;
        CHECK_OK(fsdp_module_params(fsdp_module_child(m, k), &l));
        for (int64_t i = 0; i < l.count; i++)
            out[n++] = l.items[i].param;
        fsdp_param_list_free(&l);
    }
    CHECK(n == IGNORED);
    return FSDP_OK;
}

static fsdp_status abc_shard(const conf_parity *p, fsdp_module *m)
{
    fsdp_param *ignored[IGNORED];
    conf_parity q = *p;
    CHECK_OK(ignored_of(m, ignored));
    q.options.ignored_params = ignored;
    q.options.n_ignored = IGNORED;
    if (p->arg) CHECK_OK(fsdp_fully_shard(fsdp_module_child(m, 1), &q.options));
    CHECK_OK(fsdp_fully_shard(m, &q.options));
    for (int i = 0; i < IGNORED; i++)
        CHECK(!fsdp_is_dtensor(fsdp_param_tensor(ignored[i])));
    CHECK(fsdp_is_dtensor(
        fsdp_param_tensor(fsdp_module_param(fsdp_module_find(m, "1.in_proj"), "weight"))));
    return FSDP_OK;
}

/* A's and C's gradients are this rank's own: the user averages them, as DDP does. */
static fsdp_status average_ignored(const conf_parity *p, fsdp_module *m, int step)
{
    (void)p;
    (void)step;
    if (!fsdp_is_sharded_module(m)) return FSDP_OK;
    CHECK_OK(conf_average_grads(fsdp_module_child(m, 0)));
    return conf_average_grads(fsdp_module_child(m, 2));
}

/* A and C are replicated by the user around B, which is sharded: ignored parameters stay plain. */
static void test_ddp_A_fsdp_B_ddp_C(void)
{
    static const int own_unit = 1;
    for (int i = 0; i < WORLDS; i++)
        for (int k = 0; k < 2 * CONF_POLICIES; k++) {
            conf_parity p = {.make = abc_create,
                             .shard = abc_shard,
                             .before_step = average_ignored,
                             .arg = k & 1 ? &own_unit : NULL,
                             .dim = 5,
                             .options = conf_policy(fsdp_shard_defaults(NULL), k / 2, worlds[i])};
            conf_ranks(worlds[i], conf_parity_rank, &p);
        }
}

int main(int argc, char **argv)
{
    conf_test tests[] = {
        CONF_TEST(test_fully_shard_training_overlap),
        CONF_TEST_OF(logging, test_fsdp_logging),
        CONF_TEST_OF(ignore_params, test_ddp_A_fsdp_B_ddp_C),
    };
    return conf_main("overlap", tests, sizeof tests / sizeof *tests, argc, argv);
}
