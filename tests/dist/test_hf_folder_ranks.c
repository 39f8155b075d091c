/*
 * test_hf_folder_ranks.c - folders and sharded models, ranks as threads: each rank reads its slices
 * alone, a save from any cut is the same file, and rank 0's errors reach all.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "format/file.h"
#include "fsdp/comm.h"
#include "fsdp/models.h"
#include "fsdp/shard.h"
#include "hf/config.h"
#include "hf/folder.h"

static char folder[64];
static int last_dim; /* cut along the last dim instead of the first */

static int start(void **state)
{
    (void)state;
    fsdp_error_clear();
    strcpy(folder, "/tmp/fsdp-test-ranks-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int end(void **state)
{
    (void)state;
    fsdp_error_clear();
    return fsdp__dir_remove(folder) == FSDP_OK ? 0 : -1;
}

/* Sizes that no number of ranks here divides. */
static fsdp_model_config config(void)
{
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.vocab_size = 101;
    c.hidden_size = 66;
    c.intermediate_size = 130;
    c.num_layers = 3;
    c.num_heads = c.num_kv_heads = 3;
    c.head_dim = 22;
    return c;
}

static int place(void *arg, const char *name, const fsdp_param *p)
{
    (void)arg;
    (void)name;
    return last_dim ? fsdp_param_ndim(p) - 1 : 0;
}

/* Meta, sharded, then memory without values. */
static fsdp_module *sharded(const fsdp_model_config *c)
{
    fsdp_device_push(FSDP_META);
    fsdp_module *m = fsdp_model_create(c);
    fsdp_device_pop();
    fsdp_shard_options o = fsdp_shard_defaults(NULL);
    o.placement_fn = place;
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        fsdp_fully_shard(fsdp_model_block(m, i), &o);
    fsdp_fully_shard(m, &o);
    if (fsdp_to_empty(m, FSDP_CPU) == FSDP_OK) return m;
    fsdp_module_free(m);
    return NULL;
}

static void path_of(char *out, size_t n, const char *name)
{
    snprintf(out, n, "%s/%s", folder, name);
}

/* Loads "whole", counts bytes, saves as "again". */
static fsdp_status there_and_back(void *arg)
{
    int64_t bytes = 0, *sum = arg;
    char whole[96], again[96];
    path_of(whole, sizeof whole, "whole");
    path_of(again, sizeof again, "again");
    fsdp_model_config c = config();
    fsdp_module *m = sharded(&c);
    fsdp_memory_stats mem;
    fsdp_memory_reset_peak();
    fsdp_memory_get(&mem);
    int64_t before = mem.live_total;
    fsdp_status s = m ? fsdp__hf_load_weights_counted(m, whole, &bytes) : fsdp_error();
    fsdp_memory_get(&mem);
    if (s == FSDP_OK && mem.peak_total - before > 64 << 20)
        s = fsdp__fail(FSDP_INTERNAL, "the load took %lld bytes",
                       (long long)(mem.peak_total - before));
    if (s == FSDP_OK)
        s = fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, &bytes, 1, FSDP_I64, FSDP_SUM,
                            NULL);
    if (s == FSDP_OK && fsdp_rank() == 0) *sum = bytes;
    if (s == FSDP_OK) s = fsdp__hf_save_folder(m, &c, again, NULL);
    fsdp_module_free(m);
    return s;
}

static void expect_same_files(void)
{
    char a[96], b[96], *x, *y;
    size_t n, k;
    path_of(a, sizeof a, "whole/model.safetensors");
    path_of(b, sizeof b, "again/model.safetensors");
    assert_int_equal(fsdp__file_read(a, &x, &n), FSDP_OK);
    assert_int_equal(fsdp__file_read(b, &y, &k), FSDP_OK);
    assert_int_equal(n, k);
    assert_memory_equal(x, y, n);
    free(x);
    free(y);
}

static void save_whole(void)
{
    char whole[96];
    path_of(whole, sizeof whole, "whole");
    fsdp_model_config c = config();
    fsdp_module *m = fsdp_model_create(&c);
    assert_int_equal(fsdp_reset_parameters(m, 3), FSDP_OK);
    assert_int_equal(fsdp__hf_save_folder(m, &c, whole, NULL), FSDP_OK);
    fsdp_module_free(m);
}

static void slices_on_any_number_of_ranks(void **state)
{
    (void)state;
    char path[96];
    int64_t size, read;
    save_whole();
    path_of(path, sizeof path, "whole/model.safetensors");
    assert_int_equal(fsdp__file_size(path, &size), FSDP_OK);
    static const int ranks[] = {1, 2, 3, 4, 8};
    for (int cut = 0; cut < 2; cut++)
        for (int i = 0; i < 5; i++) {
            last_dim = cut;
            assert_int_equal(fsdp_run_threads(ranks[i], there_and_back, &read), FSDP_OK);
            assert_true(read >= size && (double)read <= 1.05 * (double)size);
            expect_same_files();
        }
    last_dim = 0;
}

/* Rank 0 cannot write: no rank is left waiting, and all know why. */
static fsdp_status save_badly(void *arg)
{
    char whole[96];
    path_of(whole, sizeof whole, "whole");
    fsdp_model_config c = config();
    fsdp_module *m = sharded(&c);
    fsdp_status s = m ? fsdp__hf_load_weights(m, whole) : fsdp_error();
    if (s == FSDP_OK) s = fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
    if (s == FSDP_OK) {
        s = fsdp__hf_save_folder(m, &c, arg, NULL);
        bool told = s == (fsdp_rank() == 0 ? FSDP_INVALID_ARGUMENT : FSDP_PEER_FAILED) &&
                    strstr(fsdp_error_text(), "foreign.txt");
        if (!told) {
            fsdp_error_clear();
            s = fsdp__fail(FSDP_INTERNAL, "rank %d saw %s", fsdp_rank(), fsdp_status_name(s));
        }
    }
    fsdp_module_free(m);
    return s;
}

static void errors_of_rank_0_reach_all(void **state)
{
    (void)state;
    char path[96], bad[96];
    save_whole();
    path_of(bad, sizeof bad, "bad");
    path_of(path, sizeof path, "bad/foreign.txt");
    assert_int_equal(fsdp__dir_make(bad), FSDP_OK);
    assert_int_equal(fsdp__file_write(path, "x", 1), FSDP_OK);
    assert_int_equal(fsdp_run_threads(3, save_badly, bad), FSDP_INVALID_ARGUMENT);
    assert_non_null(strstr(fsdp_error_text(), "foreign.txt"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(slices_on_any_number_of_ranks, start, end),
        cmocka_unit_test_setup_teardown(errors_of_rank_0_reach_all, start, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
