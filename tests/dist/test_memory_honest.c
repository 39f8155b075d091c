/*
 * test_memory_honest.c - the accounts against the kernel: what a host's processes grew by in
 * proportional set size, near the peak of a step, is what their accounts say they hold.
 *
 * ctest: slow serial timeout=600
 *
 * The test starts itself as ranks under `fsdp run`. The first step finds, among the events of the
 * units, the one at which this rank holds most; in the third step all ranks stop there and compare.
 * Held by the host: live and reserved bytes of all ranks, with a gathered copy (which each rank is
 * charged for) counted once, by the memory behind it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "base/context.h"
#include "base/error.h"
#include "comm/comm.h"
#include "fsdp/fsdp.h"
#include "fsdp/models.h"
#include "fsdp/unit.h"
#include "models/config.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

/* ---- a rank ------------------------------------------------------------------------ */

typedef struct watch {
    fsdp_mesh *mesh;
    int step, event, peak_event;
    int64_t most;
    double pss0, held0; /* before the model */
    double pss, held;   /* growth at the peak, of the host */
} watch;

static double pss_bytes(void)
{
    char line[256];
    double kib = 0;
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "Pss:", 4)) kib = atof(line + 4);
    if (f) fclose(f);
    return kib * 1024;
}

/* Live and reserved bytes of this rank, without its share of gathered copies. */
static double held_bytes(const watch *w, double *copies)
{
    fsdp_memory_stats m;
    int64_t live = 0, touched = 0;
    fsdp_group *g = fsdp_mesh_group(w->mesh, fsdp_mesh_ndim(w->mesh) - 1);
    if (fsdp_group_size(g) > 1) fsdp__shared_bytes(g, &live, &touched);
    fsdp_memory_get(&m);
    *copies = (double)touched;
    double own = (double)(m.live_total + m.reserved);
    return fsdp_group_size(g) > 1 ? own - (double)m.live[FSDP_UNSHARDED] : own;
}

static fsdp_status sum_of_host(double *x)
{
    return fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, x, 1, FSDP_F64, FSDP_SUM, NULL);
}

/* The host's sums now; all ranks stand still while they are read. */
static fsdp_status look(const watch *w, double *pss, double *held)
{
    double copies;
    FSDP_TRY(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL));
    *pss = pss_bytes();
    *held = held_bytes(w, &copies);
    FSDP_TRY(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL));
    FSDP_TRY(sum_of_host(pss));
    FSDP_TRY(sum_of_host(held));
    *held += copies;
    return FSDP_OK;
}

static void on_event(void *arg, fsdp_event_kind k, const char *unit)
{
    watch *w = arg;
    (void)k;
    (void)unit;
    int event = w->event++;
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    if (w->step == 1 && m.live_total > w->most) {
        w->most = m.live_total;
        w->peak_event = event;
    }
    if (w->step == 3 && event == w->peak_event) look(w, &w->pss, &w->held);
}

static fsdp_status make(fsdp_module **out, watch *w, const char *strategy)
{
    bool none = !strcmp(strategy, "none");
    int n = fsdp_world_size(), sizes[2] = {none ? n : 1, none ? 1 : n};
    const char *axes[2] = {"replicate", "shard"};
    w->mesh = fsdp_mesh_create(FSDP_CPU, none ? 2 : 1, sizes + !none, axes + !none);
    if (!w->mesh) return fsdp_error();
    FSDP_TRY(look(w, &w->pss0, &w->held0));
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.hidden_size = 512, c.num_layers = 8, c.num_heads = 8, c.num_kv_heads = 4, c.head_dim = 64;
    c.intermediate_size = 1536, c.vocab_size = 8192;
    FSDP_TRY(fsdp_device_push(FSDP_META));
    fsdp_module *m = *out = fsdp_model_create(&c);
    fsdp_device_pop();
    if (!m) return fsdp_error();
    fsdp_shard_options o = fsdp_shard_defaults(w->mesh);
    if (!strcmp(strategy, "grad_op")) o.reshard_after_forward = FSDP_RESHARD_NEVER;
    if (!strcmp(strategy, "bf16")) o.mp_policy.param_dtype = FSDP_BF16;
    o.mp_policy.reduce_dtype = FSDP_F32;
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), &o));
    FSDP_TRY(fsdp_fully_shard(m, &o));
    FSDP_TRY(fsdp_to_empty(m, FSDP_CPU));
    FSDP_TRY(fsdp_reset_parameters(m, 1));
    return fsdp_set_event_hook(m, on_event, w);
}

static fsdp_status train(const char *strategy, watch *w)
{
    fsdp_module *m = NULL;
    fsdp_optimizer *adamw = NULL;
    fsdp_status s = make(&m, w, strategy);
    if (s == FSDP_OK && !(adamw = fsdp_adamw(m, NULL))) s = fsdp_error();
    for (w->step = 0; w->step < 4 && s == FSDP_OK; w->step++) {
        static int64_t tokens[2 * 129];
        const int64_t sizes[2] = {2, 128}, strides[2] = {129, 1};
        for (int i = 0; i < 2 * 129; i++)
            tokens[i] = (i * 7919 + w->step) % 8192;
        w->event = 0;
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_contiguous(
            fsdp_tensor_from_memory(tokens, FSDP_I64, 2, sizes, strides, NULL, NULL));
        fsdp_tensor *y = fsdp_contiguous(
            fsdp_tensor_from_memory(tokens + 1, FSDP_I64, 2, sizes, strides, NULL, NULL));
        s = fsdp_backward(fsdp_model_forward(m, x, NULL, y));
        if (s == FSDP_OK) s = fsdp_optimizer_step(adamw);
        if (s == FSDP_OK) s = fsdp_zero_grad(m);
        fsdp_scope_end(scope);
    }
    fsdp_optimizer_free(adamw);
    fsdp_module_free(m);
    return s;
}

static int rank_main(const char *strategy)
{
    watch w = {0};
    fsdp_status s = fsdp_init(NULL, NULL);
    if (s == FSDP_OK) s = train(strategy, &w);
    if (s != FSDP_OK) fprintf(stderr, "%s\n", fsdp_error_text());
    double pss = w.pss - w.pss0, held = w.held - w.held0;
    double room = 0.05 * held + 16.0 * 1048576 * fsdp_world_size();
    if (fsdp_rank() == 0)
        printf("%s: grown by %.1f MiB, accounts say %.1f MiB, allowed difference %.1f MiB\n",
               strategy, pss / 1048576, held / 1048576, room / 1048576);
    bool good = s == FSDP_OK && held > 0 && pss > held - room && pss < held + room;
    return fsdp_finalize() || !good;
}

/* ---- the test ---------------------------------------------------------------------------- */

static const char *self;

static void honest(const char *strategy, int ranks)
{
    char command[4096];
    snprintf(command, sizeof command, "'%s' run -n %d '%s' %s", FSDP_PROGRAM, ranks, self,
             strategy);
    int status = system(command);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_full(void **state)
{
    (void)state;
    honest("full", 2);
    honest("full", 4);
}

static void test_grad_op(void **state)
{
    (void)state;
    honest("grad_op", 2);
}

static void test_none(void **state)
{
    (void)state;
    honest("none", 2);
}

static void test_bf16(void **state)
{
    (void)state;
    honest("bf16", 2);
}

int main(int argc, char **argv)
{
    if (argc > 1) return rank_main(argv[1]);
    if (SANITIZED) {
        puts("skipped: a sanitizer's own memory is in the proportional set size");
        return 77;
    }
    self = argv[0];
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_full), cmocka_unit_test(test_grad_op),
                                       cmocka_unit_test(test_none), cmocka_unit_test(test_bf16)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
