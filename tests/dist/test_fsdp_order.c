/*
 * test_fsdp_order.c - the order of gathers, reshards and reductions, and how
 * many there are.
 *
 * The orders are those of FSDP2's tests for a model whose root always reshards:
 * with its own default prefetch (limit 0), with none (-1), and by the recorded
 * order.
 */
#include "sharded_net.h"

enum { LOG = 4096 };

typedef struct events {
    char text[LOG];
    int reductions; /* whether reductions are noted */
} events;

/* "U0 R0 ...": the unit's number, or "root". */
static void note(void *arg, fsdp_event_kind k, const char *unit)
{
    events *e = arg;
    const char letter[] = {'U', 'R', 'P', 'S', 'A'};
    size_t n = strlen(e->text);
    if (k > FSDP_EVENT_PREFETCH || (k == FSDP_EVENT_REDUCE && !e->reductions)) return;
    const char *dot = strrchr(unit, '.');
    snprintf(e->text + n, LOG - n, "%s%c%s", n ? " " : "", letter[k], dot ? dot + 1 : "root");
}

typedef struct logs {
    events rank[8];
    char forward[LOG], backward[LOG]; /* of rank 0, of the last step */
    int steps, eval, forwards;
    int keep_all, prefetch, reductions, no_root;
} logs;

static fsdp_status one_step(net *n, events *e, logs *l)
{
    net_run r = {.ranks = fsdp_world_size(), .rows = 8};
    fsdp_tensor *x, *y, *loss[3] = {NULL, NULL, NULL};
    EXPECT(net_batch(&r, 0, 0, 4, &x, &y) == FSDP_OK);
    e->text[0] = 0;
    for (int k = 0; k < l->forwards; k++)
        EXPECT((loss[k] = fsdp_call2(&n->base, x, y)));
    if (fsdp_rank() == 0) strcpy(l->forward, e->text);
    e->text[0] = 0;
    for (int k = 1; k < l->forwards; k++)
        loss[0] = fsdp_add(loss[0], loss[k]);
    EXPECT(fsdp_backward(loss[0]) == FSDP_OK);
    if (fsdp_rank() == 0) strcpy(l->backward, e->text);
    return fsdp_zero_grad(&n->base);
}

static fsdp_status run(net *n, logs *l, events *e)
{
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.prefetch_limit = l->prefetch;
    o.reshard_after_forward = l->keep_all ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    for (int i = 0; i < n->n_blocks; i++)
        EXPECT(fsdp_fully_shard(n->block[i], &o) == FSDP_OK);
    if (l->no_root) o.reshard_after_forward = FSDP_RESHARD_AUTO;
    EXPECT(fsdp_fully_shard(&n->base, &o) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(&n->base, 1) == FSDP_OK);
    e->reductions = l->reductions;
    EXPECT(fsdp_set_event_hook(&n->base, note, e) == FSDP_OK);
    for (int step = 0; step < l->steps; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_status s = one_step(n, e, l);
        fsdp_scope_end(scope);
        FSDP_TRY(s);
    }
    if (!l->eval) return FSDP_OK;
    net_run r = {.ranks = fsdp_world_size(), .rows = 8};
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *x, *y;
    e->text[0] = 0;
    fsdp_no_grad_begin();
    fsdp_status s = net_batch(&r, 0, 0, 4, &x, &y);
    for (int k = 0; k < l->eval && s == FSDP_OK; k++)
        if (!fsdp_call2(&n->base, x, y)) s = fsdp_error();
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    return s;
}

static fsdp_status rank_main(void *arg)
{
    logs *l = arg;
    net *n = net_create(4);
    EXPECT(n);
    fsdp_status s = run(n, l, &l->rank[fsdp_rank()]);
    fsdp_module_free(&n->base);
    return s;
}

static void go(logs *l, int ranks)
{
    if (!l->forwards) l->forwards = 1;
    if (!l->steps) l->steps = 1;
    check_ok(fsdp_run_threads(ranks, rank_main, l));
    for (int r = 1; r < ranks; r++)
        if (strcmp(l->rank[r].text, l->rank[0].text))
            fail_msg("rank %d: %s\nrank 0: %s", r, l->rank[r].text, l->rank[0].text);
}

static void test_default(void **state)
{
    (void)state;
    const int ranks[] = {1, 2, 3};
    for (int i = 0; i < 3; i++)
        for (int steps = 1; steps < 4; steps++) {
            logs l = {.steps = steps};
            go(&l, ranks[i]);
            assert_string_equal(l.forward, "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot");
            assert_string_equal(l.backward,
                                "Uroot U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot");
            l = (logs){.steps = steps, .prefetch = -1};
            go(&l, ranks[i]);
            assert_string_equal(l.backward,
                                "Uroot U3 R3 P3 U2 R2 P2 U1 R1 P1 U0 R0 P0 Rroot Proot");
        }
}

/* The root's default keeps it; nothing is freed with "never". */
static void test_kept(void **state)
{
    (void)state;
    logs l = {.no_root = 1};
    go(&l, 2);
    assert_string_equal(l.forward, "Uroot U0 R0 U1 R1 U2 R2 U3 R3");
    assert_string_equal(l.backward, "U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot");
    logs k = {.keep_all = 1, .steps = 2};
    go(&k, 2);
    assert_string_equal(k.forward, "Uroot U0 U1 U2 U3");
    assert_string_equal(k.backward, "R3 P3 R2 P2 R1 P1 R0 P0 Rroot Proot");
}

/* From the second step on the recorded order is gathered ahead (A), one unit at a time. */
static void test_prefetch(void **state)
{
    (void)state;
    logs l = {.steps = 1, .prefetch = 1};
    go(&l, 2);
    assert_string_equal(l.forward, "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot");
    l = (logs){.steps = 3, .prefetch = 1};
    go(&l, 2);
    assert_string_equal(l.forward, "Uroot A0 U0 A1 R0 U1 A2 R1 U2 A3 R2 U3 R3 Rroot");
    assert_string_equal(l.backward, "Uroot A3 U3 A2 R3 P3 U2 A1 R2 P2 U1 A0 R1 P1 U0 R0 P0 Rroot "
                                    "Proot");
    l = (logs){.steps = 2, .prefetch = 2};
    go(&l, 2);
    assert_string_equal(l.forward, "Uroot A0 A1 U0 A2 R0 U1 A3 R1 U2 R2 U3 R3 Rroot");
}

/* A reduction is issued after its unit was freed and before its backward is called done. */
static void test_reductions(void **state)
{
    (void)state;
    logs l = {.reductions = 1};
    go(&l, 3);
    assert_string_equal(l.backward, "Uroot U3 U2 R3 S3 P3 U1 R2 S2 P2 U0 R1 S1 P1 R0 S0 P0 Rroot "
                                    "Sroot Proot");
}

/* Two forwards, one backward: each use is gathered and reduced; the root at the end. */
static void test_two_forwards(void **state)
{
    (void)state;
    logs l = {.forwards = 2, .steps = 2};
    go(&l, 2);
    assert_string_equal(l.forward, "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot "
                                   "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot");
    assert_string_equal(l.backward, "Uroot U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 "
                                    "U3 U2 R3 P3 U1 R2 P2 U0 R1 P1 R0 P0 Rroot Proot");
}

/* Without a backward to come even a root that is kept by default is freed. */
static void test_eval(void **state)
{
    (void)state;
    logs l = {.no_root = 1, .eval = 2};
    go(&l, 2);
    assert_string_equal(l.rank[0].text, "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot "
                                        "Uroot U0 R0 U1 R1 U2 R2 U3 R3 Rroot");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_default),      cmocka_unit_test(test_kept),
        cmocka_unit_test(test_prefetch),     cmocka_unit_test(test_reductions),
        cmocka_unit_test(test_two_forwards), cmocka_unit_test(test_eval),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
