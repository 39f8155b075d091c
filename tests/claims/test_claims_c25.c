/*
 * test_claims_c25.c - C25: with prefetch limit 0 the orders of gathers, frees
 * and post-backwards are those of FSDP2's tests (the list of
 * fsdp2-semantics 2.12), on 1, 2 and 4 ranks, in the first step and later.
 *
 * U: a real gather, R: a free, P: a post-backward; "-" stands between forward
 * and backward. Ours part on purpose where the last rows say so: a gather
 * whose target backward does not come to is made in the first step only.
 */
#include "sharded_net.h"

enum { LOG = 2048, STEPS = 3 };

static void note(void *arg, fsdp_event_kind k, const char *unit)
{
    char *text = arg;
    size_t n = strlen(text);
    const char *letter = k == FSDP_EVENT_UNSHARD         ? "U"
                         : k == FSDP_EVENT_RESHARD       ? "R"
                         : k == FSDP_EVENT_POST_BACKWARD ? "P"
                                                         : NULL;
    const char *dot = strrchr(unit, '.');
    if (letter)
        snprintf(text + n, LOG - n, "%s%s%s", n ? " " : "", letter,
                 *unit ? dot ? dot + 1 : unit : "root");
}

/* ---- a root with layers, called as the tests of FSDP2 do -------------------------------- */

typedef struct row {
    int layers, forwards;
    fsdp_reshard_policy policy, root;
    int forward_list, backward_list; /* depth of the explicit lists */
    const char *forward, *backward;
} row;

/* Layer i prefetches the next (forward) or the ones before (backward), depth of them. */
static fsdp_status set_lists(net *n, const row *r)
{
    for (int i = 0; i < r->layers; i++) {
        fsdp_module *list[4];
        int k = 0;
        for (int d = 1; d <= r->forward_list && i + d < r->layers; d++)
            list[k++] = n->block[i + d];
        EXPECT(fsdp_set_modules_to_forward_prefetch(n->block[i], list, k) == FSDP_OK);
        k = 0;
        for (int d = 1; d <= r->backward_list && i - d >= 0 && i >= r->backward_list; d++)
            list[k++] = n->block[i - d];
        EXPECT(fsdp_set_modules_to_backward_prefetch(n->block[i], list, k) == FSDP_OK);
    }
    return FSDP_OK;
}

static fsdp_status one_step(net *n, const row *r, char *log)
{
    net_run batch = {.ranks = fsdp_world_size(), .rows = 8};
    fsdp_tensor *x, *y, *loss = NULL;
    EXPECT(net_batch(&batch, 0, 0, 4, &x, &y) == FSDP_OK);
    *log = 0;
    for (int k = 0; k < r->forwards; k++) {
        fsdp_tensor *l = fsdp_call2(&n->base, x, y);
        EXPECT(l);
        loss = loss ? fsdp_add(loss, l) : l;
    }
    if (strcmp(log, r->forward))
        return fsdp__fail(FSDP_INTERNAL, "forward \"%s\"; expected \"%s\"", log, r->forward);
    *log = 0;
    EXPECT(fsdp_backward(loss) == FSDP_OK);
    if (strcmp(log, r->backward))
        return fsdp__fail(FSDP_INTERNAL, "backward \"%s\"; expected \"%s\"", log, r->backward);
    return fsdp_zero_grad(&n->base);
}

static fsdp_status run_row(void *arg)
{
    const row *r = arg;
    char log[LOG] = "";
    net *n = net_create(r->layers);
    EXPECT(n);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = 0;
    o.reshard_after_forward = r->policy;
    for (int i = 0; i < r->layers; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    o.reshard_after_forward = r->root;
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    EXPECT(set_lists(n, r) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_event_hook(&n->base, note, log) == FSDP_OK);
    for (int step = 0; step < STEPS; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status s = one_step(n, r, log);
        fsdp_scope_end(scope);
        FSDP_TRY(s);
    }
    fsdp_module_free(&n->base);
    return FSDP_OK;
}

#define AUTO FSDP_RESHARD_AUTO
#define ALWAYS FSDP_RESHARD_ALWAYS
#define NEVER FSDP_RESHARD_NEVER

static void test_rows(void **state)
{
    (void)state;
    static const char forward[] = "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot";
    static const char backward[] = "Uroot U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot";
    const row rows[] = {
        {4, 1, ALWAYS, ALWAYS, 0, 0, forward, backward},
        {4, 1, ALWAYS, ALWAYS, 1, 0, "Uroot U0 U1 R0 U2 R1 U3 R2 R3 Rroot", backward},
        {4, 1, ALWAYS, ALWAYS, 2, 0, "Uroot U0 U1 U2 R0 U3 R1 R2 R3 Rroot", backward},
        {4, 1, ALWAYS, ALWAYS, 0, 1, forward, backward},
        {4, 1, ALWAYS, ALWAYS, 0, 2, forward,
         "Uroot U3 U2 U1 R3 P3 U0 R2 P2 R1 P1 R0 P0 Rroot Proot"},
        {4, 1, AUTO, AUTO, 0, 0, "Uroot U0 R0 U1 R1 U2 R2 U3 R3",
         "U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot"},
        {4, 1, NEVER, NEVER, 0, 0, "Uroot U0 U1 U2 U3", "R3 P3 R2 P2 R1 P1 R0 P0 Rroot Proot"},
        {3, 2, ALWAYS, ALWAYS, 0, 0, "Uroot U0 R0 U1 R1 U2 R2 Rroot Uroot U0 R0 U1 R1 U2 R2 Rroot",
         "Uroot U2 U1 R2 P2 U0 R1 P1 R0 P0 U2 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot"},
        {3, 2, NEVER, NEVER, 0, 0, "Uroot U0 U1 U2",
         "R2 P2 R1 P1 R0 P0 U2 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot"},
    };
    const int ranks[] = {1, 2, 4};
    for (int k = 0; k < 3; k++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            row r = rows[i];
            fsdp_status s = fsdp_run_threads(ranks[k], run_row, &r);
            if (s == FSDP_OK) continue;
            char text[2048];
            snprintf(text, sizeof text, "%s", fsdp_error_text());
            fsdp_error_clear();
            fail_msg("row %d, %d ranks: %s", (int)i, ranks[k], text);
        }
}

/* ---- a target that backward does not come to --------------------------------------------- */

/* lin0 feeds lin1 and lin2; the root has no parameters and returns both. */
typedef struct fork {
    fsdp_module base;
    fsdp_module *lin[3];
} fork_net;

static fsdp_status fork_forward(fsdp_module *self, const fsdp_values *in, fsdp_values *out)
{
    fork_net *f = (fork_net *)self;
    fsdp_tensor *h = fsdp_call(f->lin[0], in->t[0]);
    out->n = 2;
    out->t[0] = fsdp_call(f->lin[1], h);
    out->t[1] = fsdp_call(f->lin[2], h);
    return fsdp_error();
}

static fsdp_status expect(char *log, const char *text)
{
    if (strcmp(log, text)) return fsdp__fail(FSDP_INTERNAL, "\"%s\"; expected \"%s\"", log, text);
    *log = 0;
    return FSDP_OK;
}

static void note_short(void *arg, fsdp_event_kind k, const char *unit)
{
    if (k != FSDP_EVENT_RESHARD) note(arg, k, unit + (*unit ? 3 : 0)); /* "lin0" -> "0" */
}

static fsdp_status fork_rank(void *arg)
{
    (void)arg;
    char log[LOG] = "";
    fork_net *f = (fork_net *)fsdp_module_create(sizeof *f, "Fork");
    EXPECT(f);
    f->base.forward = fork_forward;
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = 0;
    o.reshard_after_forward = FSDP_RESHARD_ALWAYS;
    for (int i = 0; i < 3; i++) {
        char name[16];
        snprintf(name, sizeof name, "lin%d", i);
        f->lin[i] = fsdp_module_add(&f->base, name, fsdp_linear_create(5, 5, 1));
        EXPECT(f->lin[i] && fsdp_fully_shard(f->lin[i], &o) == FSDP_OK);
    }
    EXPECT(fsdp_fully_shard(&f->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&f->base, 1) == FSDP_OK);
    EXPECT(fsdp_set_event_hook(&f->base, note_short, log) == FSDP_OK);
    for (int step = 0; step < STEPS; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(4, 5), 1, "x");
        EXPECT(fsdp_requires_grad_(x, 1) == FSDP_OK);
        fsdp_values in = {1, {x}}, out;
        EXPECT(fsdp_module_call(&f->base, &in, &out) == FSDP_OK);
        FSDP_TRY(expect(log, "U0 U1 U2"));
        EXPECT(fsdp_set_is_last_backward(&f->base, 0) == FSDP_OK);
        fsdp_tensor *one = fsdp_full(FSDP_F32, 2, SIZES(4, 5), 1.0);
        EXPECT(fsdp_backward_from(out.t[1], one, 1) == FSDP_OK);
        FSDP_TRY(expect(log, "U2 U1 P2 U0 P0 P1")); /* U1: wrong for this backward */
        EXPECT(fsdp_set_is_last_backward(&f->base, 1) == FSDP_OK);
        EXPECT(fsdp_backward_from(out.t[0], one, 0) == FSDP_OK);
        FSDP_TRY(expect(log, "U0 P1 P0 P2"));
        EXPECT(fsdp_zero_grad(&f->base) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    /* Never used: the first step goes by the record of those before, the second is recorded anew;
     * from then on the gather that backward would not use is not made. */
    static const char *const backward[] = {"U2 U1 P2 U0 P0 P1", "U2 U1 P2 U0 P0 P1",
                                           "U2 P2 U0 P0 P1"};
    for (int step = 0; step < STEPS; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(4, 5), 1, "x");
        EXPECT(fsdp_requires_grad_(x, 1) == FSDP_OK);
        fsdp_values in = {1, {x}}, out;
        EXPECT(fsdp_module_call(&f->base, &in, &out) == FSDP_OK);
        FSDP_TRY(expect(log, "U0 U1 U2"));
        EXPECT(fsdp_backward(fsdp_sum(out.t[1])) == FSDP_OK);
        FSDP_TRY(expect(log, backward[step]));
        EXPECT(fsdp_zero_grad(&f->base) == FSDP_OK);
        fsdp_scope_end(scope);
    }
    fsdp_module_free(&f->base);
    return FSDP_OK;
}

static void test_wrong_target(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        check_ok(fsdp_run_threads(ranks, fork_rank, NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_wrong_target),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
