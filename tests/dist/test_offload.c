/*
 * test_offload.c - parameters, gradients and optimizer state in a file: the same bits as in memory,
 * the same collectives, and the bytes where they are said to be.
 *
 * ctest: timeout=300
 *
 * The window is 64 KiB, 16 pages, and the net's states take 84, one a tensor, so blocks come and go
 * all the time. (test_offload_window.c has states of more bytes.)
 */
#include "disk_folder.h"
#include "sharded_net.h"

enum { WINDOW = 64 * 1024 };

static fsdp_offload_policy in_file(void)
{
    return (fsdp_offload_policy){FSDP_OFFLOAD_FILE, 0, folder, WINDOW};
}

static net_run base_run(int ranks)
{
    return (net_run){.ranks = ranks, .blocks = 4, .rows = 24, .steps = 3, .prefetch = 1};
}

/* ---- the same bits --------------------------------------------------------------------- */

static void same_bits(net_run r, const char *what)
{
    net_run plain = r;
    net_go(&plain);
    r.offload = r.state_offload = in_file();
    net_go(&r);
    net_same(&r, &plain, what);
    net_free(&plain);
    net_free(&r);
}

static void test_kinds(void **state)
{
    (void)state;
    net_run plain = base_run(2), r = plain;
    net_go(&plain);
    r.state_offload = in_file();
    net_go(&r);
    net_same(&r, &plain, "state alone");
    net_free(&r);
    r = base_run(2);
    r.offload = in_file();
    net_go(&r);
    net_same(&r, &plain, "parameters and gradients alone");
    net_free(&r);
    r = base_run(2);
    r.offload = r.state_offload = (fsdp_offload_policy){.kind = FSDP_OFFLOAD_CPU, .pin_memory = 1};
    net_go(&r);
    net_same(&r, &plain, "the CPU");
    net_free(&r);
    net_free(&plain);
}

static void test_ranks(void **state)
{
    (void)state;
    const int ranks[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        same_bits(base_run(ranks[i]), "ranks");
}

static void test_strategies(void **state)
{
    (void)state;
    for (int policy = FSDP_RESHARD_AUTO; policy <= FSDP_RESHARD_NEVER; policy++) {
        net_run r = base_run(2);
        r.policy = (fsdp_reshard_policy)policy;
        same_bits(r, "policy");
        r.private_gather = 1;
        same_bits(r, "policy, own copies");
    }
    net_run r = base_run(2);
    r.mesh = NET_REPLICATE;
    same_bits(r, "NO_SHARD");
    r = base_run(4);
    r.reshard_ranks = 2;
    same_bits(r, "halves kept");
    r.private_gather = 1;
    same_bits(r, "halves kept, own copies");
    r = base_run(4);
    r.mesh = NET_HYBRID;
    r.replicas = 2;
    same_bits(r, "hybrid");
    r.micro = 3;
    r.sync = 1;
    same_bits(r, "hybrid, reduced each microbatch");
    r.private_gather = 1;
    same_bits(r, "hybrid, own copies");
}

static void test_options(void **state)
{
    (void)state;
    net_run r = base_run(3);
    r.dim1 = 1;
    same_bits(r, "cut along dim 1");
    r = base_run(2);
    r.micro = 3;
    same_bits(r, "microbatches");
    r.sync = 1;
    same_bits(r, "microbatches, each reduced");
    r = base_run(2);
    r.frozen = 1;
    same_bits(r, "frozen");
    r.private_gather = 1;
    r.prefetch = 2;
    same_bits(r, "frozen, own copies");
    r = base_run(2);
    r.sgd = 1;
    same_bits(r, "SGD");
    r = base_run(2);
    r.whole = 1;
    r.prefetch = 0;
    same_bits(r, "one unit");
    for (int ranks = 1; ranks <= 2; ranks++) {
        r = base_run(ranks);
        r.param_dtype = FSDP_BF16;
        r.reduce_dtype = FSDP_F32;
        same_bits(r, "bf16");
        r.reduce_dtype = FSDP_BF16;
        same_bits(r, "bf16, reduced in bf16");
    }
}

/* ---- the bytes -------------------------------------------------------------------------- */

/* This rank's parts of all parameters. */
static int64_t shard_bytes(net *n)
{
    fsdp_param_list l;
    int64_t bytes = 0;
    if (fsdp_module_params(&n->base, &l) != FSDP_OK) return -1;
    for (int64_t i = 0; i < l.count; i++)
        bytes += 4 * fsdp_numel(fsdp_param_tensor(l.items[i].param));
    fsdp_param_list_free(&l);
    return bytes;
}

static fsdp_status check_place(net_run *r, net *n, int step)
{
    fsdp_memory_stats m;
    int64_t S = shard_bytes(n);
    fsdp_memory_get(&m);
    bool file = r->offload.kind == FSDP_OFFLOAD_FILE;
    EXPECT(m.live[FSDP_PARAMETERS] == (file ? 0 : S));
    EXPECT(m.offloaded[FSDP_PARAMETERS] == (file ? S : 0));
    /* After backward, before the step: */
    EXPECT(m.live[FSDP_GRADIENTS] == (file ? 0 : S));
    EXPECT(m.offloaded[FSDP_GRADIENTS] == (file ? S : 0));
    bool state = r->state_offload.kind == FSDP_OFFLOAD_FILE;
    int64_t states = step > 0 ? 2 * S : 0;
    EXPECT(m.live[FSDP_OPTIMIZER] == (state ? 0 : states));
    EXPECT(m.offloaded[FSDP_OPTIMIZER] == (state ? states : 0));
    EXPECT(m.offloaded_total == m.offloaded[FSDP_PARAMETERS] + m.offloaded[FSDP_GRADIENTS] +
                                    m.offloaded[FSDP_OPTIMIZER]);
    /* No use lasts: nothing is held between backward and step. */
    EXPECT(m.window <= WINDOW);
    return FSDP_OK;
}

static void test_places(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int k = 0; k < 4; k++) {
            net_run r = base_run(ranks);
            r.look = check_place;
            if (k & 1) r.offload = in_file();
            if (k & 2) r.state_offload = in_file();
            net_go(&r);
            net_free(&r);
        }
}

/* ---- refused ------------------------------------------------------------------------------ */

static fsdp_status shard_with(fsdp_offload_policy p)
{
    net *n = net_create(1);
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.offload = p;
    fsdp_status s = fsdp_fully_shard(&n->base, &o);
    fsdp_module_free(&n->base);
    return s;
}

static fsdp_status state_with(fsdp_offload_policy p)
{
    net *n = net_create(1);
    fsdp_reset_parameters(&n->base, 1);
    fsdp_optimizer *o = fsdp_adamw(&n->base, NULL);
    fsdp_status s = fsdp_optimizer_set_offload(o, &p);
    fsdp_optimizer_free(o);
    fsdp_module_free(&n->base);
    return s;
}

static void test_refused(void **state)
{
    (void)state;
    const struct {
        fsdp_offload_policy p;
        fsdp_status code;
        const char *words;
    } cases[] = {
        {{(fsdp_offload_kind)7, 0, NULL, 0}, FSDP_INVALID_ARGUMENT, "kind 7"},
        {{FSDP_OFFLOAD_NONE, 0, folder, 0}, FSDP_INVALID_ARGUMENT, "go with FSDP_OFFLOAD_FILE"},
        {{FSDP_OFFLOAD_CPU, 0, NULL, 5}, FSDP_INVALID_ARGUMENT, "go with FSDP_OFFLOAD_FILE"},
        {{FSDP_OFFLOAD_FILE, 1, folder, 0}, FSDP_INVALID_ARGUMENT, "pin_memory goes with"},
        {{FSDP_OFFLOAD_FILE, 0, folder, -1}, FSDP_INVALID_ARGUMENT, "a window of -1 bytes"},
        {{FSDP_OFFLOAD_FILE, 0, "no/folder", 0}, FSDP_IO_ERROR, "there is no folder 'no/folder'"},
        {{FSDP_OFFLOAD_FILE, 0, NULL, 0}, FSDP_IO_ERROR, "there is no folder ''"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(shard_with(cases[i].p), cases[i].code);
        check_error(cases[i].code, cases[i].words);
        assert_int_equal(state_with(cases[i].p), cases[i].code);
        check_error(cases[i].code, cases[i].words);
    }
    /* State that is there already stays where it is. */
    net *n = net_create(1);
    check_ok(fsdp_reset_parameters(&n->base, 1));
    fsdp_optimizer *o = fsdp_adamw(&n->base, NULL);
    fsdp_offload_policy p = in_file();
    check_tensor(fsdp_optimizer_state(o, fsdp_module_param(n->head, "bias"), 0));
    assert_int_equal(fsdp_optimizer_set_offload(o, &p), FSDP_INVALID_STATE);
    check_error(FSDP_INVALID_STATE, "there is state of head.bias already");
    fsdp_optimizer_free(o);
    fsdp_module_free(&n->base);
}

/* What is said about offload to the CPU, which is the device. */
static int said;
static void listen(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    said += strstr(line, "the device is the CPU, so they stay where they are") != NULL;
}

static void test_said(void **state)
{
    (void)state;
    fsdp_context *before = fsdp_context_current(), *ctx = fsdp_context_create(0, 1);
    fsdp_context_set(ctx);
    fsdp_log_set(listen, NULL, 2);
    check_ok(shard_with((fsdp_offload_policy){.kind = FSDP_OFFLOAD_CPU}));
    check_ok(state_with((fsdp_offload_policy){.kind = FSDP_OFFLOAD_CPU}));
    assert_int_equal(said, 1);
    fsdp_context_set(before);
    fsdp_context_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),      cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_strategies), cmocka_unit_test(test_options),
        cmocka_unit_test(test_places),     cmocka_unit_test(test_refused),
        cmocka_unit_test(test_said),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
