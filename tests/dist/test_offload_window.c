/*
 * test_offload_window.c - a model whose states are several times as large as what of them may be in
 * memory: by the accounts, exactly, and by what the kernel says it holds.
 *
 * ctest: timeout=300
 *
 * Net: blocks of two linear layers of width W in units of one block. A rank's shard of a block is
 * 2 * W * W * 4 / ranks bytes; gradients are as large, and the state twice.
 */
#include <sys/mman.h>

#include "disk_folder.h"
#include "tensor_check.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { W = 64, BLOCKS = 8 };
#else
enum { W = 256, BLOCKS = 8 };
#endif
enum { STEPS = 3, PAGE = 4096, ROWS = 4 };
#define LAYER ((int64_t)W * W * 4)

/* ---- the net ---------------------------------------------------------------------------- */

typedef struct block {
    fsdp_module base;
    fsdp_module *a, *b;
} block;

static fsdp_tensor *block_forward(fsdp_module *self, fsdp_tensor *x /* (ROWS,W) */)
{
    block *m = (block *)self;
    return fsdp_add(x, fsdp_call(m->b, fsdp_gelu(fsdp_call(m->a, x))));
}

static fsdp_module *block_create(void)
{
    block *m = (block *)fsdp_module_create(sizeof *m, "Block");
    if (!m) return NULL;
    m->base.forward1 = block_forward;
    m->a = fsdp_module_add(&m->base, "a", fsdp_linear_create(W, W, 0));
    m->b = fsdp_module_add(&m->base, "b", fsdp_linear_create(W, W, 0));
    return &m->base;
}

/* ---- a run ------------------------------------------------------------------------------- */

typedef struct run {
    int ranks, file, in_backward, private_gather, clip;
    int64_t window,
        limit;          /* limit: memory.limit beyond what is live before the first step; 0: none */
    double loss[STEPS]; /* of rank 0 */
    int64_t live;       /* of rank 0, before the first step */
    fsdp_memory_stats most; /* of rank 0: peaks of the last step */
    int64_t resident;       /* of rank 0's file, the largest seen after a step */
    fsdp_offload_stats io;
} run;

/* Pages of this context's file that are in the page cache: its mapping is found by the file's
 * folder. Ranks are threads here, so there are as many as ranks; the sum is given. */
static int64_t resident(void)
{
    char line[1024];
    static unsigned char in[1 << 16];
    int64_t n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f)) {
        unsigned long from, to;
        if (!strstr(line, folder) || sscanf(line, "%lx-%lx", &from, &to) != 2) continue;
        if ((to - from) / PAGE > sizeof in || mincore((void *)from, to - from, in) != 0) return -1;
        for (size_t i = 0; i < (to - from) / PAGE; i++)
            n += in[i] & 1 ? PAGE : 0;
    }
    if (f) fclose(f);
    return n;
}

static fsdp_status one_step(run *r, fsdp_module *net, fsdp_optimizer *o, int step)
{
    char name[32];
    snprintf(name, sizeof name, "rows %d %d", step, fsdp_rank());
    fsdp_tensor *x = fsdp_randn(FSDP_F32, 2, SIZES(ROWS, W), 3, name);
    fsdp_tensor *loss = fsdp_mse_loss(fsdp_call(net, x), fsdp_sigmoid(x), FSDP_REDUCE_MEAN);
    FSDP_TRY(fsdp_backward(loss));
    if (fsdp_rank() == 0) r->loss[step] = fsdp_item(loss);
    if (r->clip) FSDP_TRY(fsdp_clip_grad_norm(net, 0.1, NULL));
    FSDP_TRY(fsdp_optimizer_step(o));
    return fsdp_zero_grad(net);
}

static fsdp_status train(run *r, fsdp_module *net)
{
    fsdp_shard_options opt = fsdp_shard_defaults(NULL);
    fsdp_offload_policy file = {FSDP_OFFLOAD_FILE, 0, folder, r->window};
    fsdp_memory_stats m;
    if (r->file) opt.offload = file;
    opt.private_gather = r->private_gather;
    for (int i = 0; i < BLOCKS; i++)
        EXPECT(fsdp_fully_shard(fsdp_module_child(net, i), &opt) == FSDP_OK);
    EXPECT(fsdp_fully_shard(net, &opt) == FSDP_OK);
    EXPECT(fsdp_to_empty(net, FSDP_CPU) == FSDP_OK);
    EXPECT(fsdp_reset_parameters(net, 1) == FSDP_OK);
    fsdp_optimizer *o = fsdp_adamw(net, NULL);
    fsdp_status s = o && r->file ? fsdp_optimizer_set_offload(o, &file) : fsdp_error();
    if (s == FSDP_OK && r->in_backward) s = fsdp_optimizer_in_backward(o, 1);
    fsdp_memory_get(&m);
    if (fsdp_rank() == 0) r->live = m.live_total;
    if (s == FSDP_OK && r->limit) s = fsdp_memory_set_limit(m.live_total + r->limit);
    for (int step = 0; step < STEPS && s == FSDP_OK; step++) {
        fsdp_scope *scope = fsdp_scope_begin();
        fsdp_memory_reset_peak();
        s = one_step(r, net, o, step);
        fsdp_scope_end(scope);
        if (s == FSDP_OK) s = fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
        int64_t in = fsdp_rank() == 0 && r->file ? resident() : 0;
        if (in > r->resident) r->resident = in;
        if (s == FSDP_OK) s = fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
    }
    if (fsdp_rank() == 0) {
        fsdp_memory_get(&r->most);
        fsdp_offload_get(&r->io);
    }
    fsdp_optimizer_free(o);
    return s;
}

static fsdp_status rank(void *arg)
{
    run *r = arg;
    EXPECT(fsdp_device_push(FSDP_META) == FSDP_OK);
    fsdp_module *net = fsdp_sequential_create();
    for (int i = 0; i < BLOCKS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        fsdp_module_add(net, name, block_create());
    }
    fsdp_device_pop();
    EXPECT(net);
    fsdp_status s = train(r, net);
    fsdp_module_free(net);
    if (s != FSDP_OK) return s;
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    EXPECT(check_live() == 0);
    EXPECT(m.offloaded_total == 0 && m.window == 0);
    return FSDP_OK;
}

static void go(run *r)
{
    check_ok(fsdp_run_threads(r->ranks, rank, r));
}

/* States of eight times the window. In use at one time are two layers' parameter, gradient and two
 * states (one that is updated, one whose shards are read ahead); the window holds that. */
static void test_window(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        int64_t all = 4 * 2 * BLOCKS * LAYER / ranks;
        run r = {.ranks = ranks, .file = 1, .window = all / 8, .clip = ranks == 2}, plain = r;
        plain.file = 0;
        go(&plain);
        go(&r);
        assert_memory_equal(r.loss, plain.loss, sizeof r.loss);
        assert_int_equal(r.most.offloaded_peak, all);
        assert_int_equal(r.most.peak[FSDP_PARAMETERS], 0);
        assert_int_equal(r.most.peak[FSDP_OPTIMIZER], 0);
        if (r.most.window_peak > r.window)
            fail_msg("%lld bytes of the file at a time; the window is %lld",
                     (long long)r.most.window_peak, (long long)r.window);
        if (on_disk && r.resident > r.window * ranks)
            fail_msg("%lld bytes in memory; the windows are %lld", (long long)r.resident,
                     (long long)r.window * ranks);
        /* Each step reads what does not stay in the window. */
        if (on_disk) assert_true(r.io.read_bytes >= (STEPS - 1) * (all / 2));
        assert_true(r.io.written_bytes >= (STEPS - 1) * (all / 2));
        assert_true(r.io.read_wait >= 0 && r.io.write_wait > 0);
    }
}

/* Updated in backward, one unit's gradients at a time exist beside those that are being reduced. */
static void test_in_backward(void **state)
{
    (void)state;
    const int64_t unit = 2 * LAYER; /* whole */
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int file = 0; file < 2; file++) {
            run late = {.ranks = ranks}, r = {.ranks = ranks, .in_backward = 1, .file = file};
            r.window = 4 * LAYER;
            go(&late);
            go(&r);
            assert_memory_equal(r.loss, late.loss, sizeof r.loss);
            /* One rank: whole gradients of one unit, the shard's own or copied into the file. Two:
             * those of another beside it, which is being reduced into its shards' gradients. */
            int64_t most = ranks == 1 ? unit : 2 * unit + (file ? 0 : unit / 2);
            assert_int_equal(r.most.peak[FSDP_GRADIENTS], most);
            assert_true(late.most.peak[FSDP_GRADIENTS] >= BLOCKS * unit / ranks);
            assert_true(most < BLOCKS * unit / ranks);
            assert_int_equal(r.most.live[FSDP_GRADIENTS], 0);
        }
}

/* Peers read copies of the shards, which exist until all have read them. */
static void test_own_copies(void **state)
{
    (void)state;
    run r = {.ranks = 2, .file = 1, .private_gather = 1, .window = LAYER * 2}, plain = r;
    plain.file = 0;
    go(&plain);
    go(&r);
    assert_memory_equal(r.loss, plain.loss, sizeof r.loss);
    int64_t more = r.most.peak[FSDP_COMMUNICATION] - plain.most.peak[FSDP_COMMUNICATION];
    /* A unit has two layers and a rank half of each; one is gathered ahead. What else is staged has
     * its peak at another moment. */
    if (more < LAYER - PAGE || more > 2 * LAYER)
        fail_msg("%lld bytes of copies; a unit's shard is %lld", (long long)more, (long long)LAYER);
}

/* A window that holds everything reads nothing, and one that is too small for what is used at one
 * time does not stand in the way. */
static void test_sizes(void **state)
{
    (void)state;
    run plain = {.ranks = 2}, wide = {.ranks = 2, .file = 1}, narrow = {.ranks = 2, .file = 1};
    wide.window = (int64_t)1 << 30;
    narrow.window = 1;
    go(&plain);
    go(&wide);
    go(&narrow);
    assert_memory_equal(wide.loss, plain.loss, sizeof wide.loss);
    assert_memory_equal(narrow.loss, plain.loss, sizeof narrow.loss);
    assert_int_equal(wide.io.read_bytes, 0);
    assert_int_equal(wide.io.written_bytes, 0);
    /* A parameter with its gradient and state, or the shards of two units. */
    assert_int_equal(narrow.most.window_peak, 2 * LAYER);
}

/* memory.limit bounds memory, not what lies in files: the state alone is over what is enough with
 * all states in files. */
static void test_limit(void **state)
{
    (void)state;
    run plain = {.ranks = 2}, r = {.ranks = 2, .file = 1, .window = LAYER * 4};
    go(&plain);
    go(&r);
    plain.limit = r.limit = r.most.peak_total - r.live + LAYER;
    assert_true(plain.most.peak_total - plain.live > plain.limit);
    go(&r);
    assert_int_not_equal(fsdp_run_threads(2, rank, &plain), FSDP_OK);
    check_error(FSDP_NO_MEMORY, "memory.limit is");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_window),     cmocka_unit_test(test_in_backward),
        cmocka_unit_test(test_own_copies), cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_limit),
    };
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
