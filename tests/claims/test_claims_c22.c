/*
 * test_claims_c22.c - C22: shards that are filled from one whole safetensors file read only their
 * slices: over all ranks at most 1.05 times the file, and no rank grows by more than its shard and
 * 64 MiB.
 *
 * ctest: slow serial timeout=300
 *
 * The test starts itself as four ranks under `fsdp run`. Bytes are those that the kernel counts as
 * read, where it counts them, and the peak is the kernel's as well: the file is so large that a
 * rank which held the whole of it would be seen.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/error.h"
#include "format/file.h"
#include "fsdp/fsdp.h"
#include "fsdp/models.h"
#include "hf/config.h"
#include "hf/folder.h"

enum { RANKS = 4, SLACK = 64 << 20 };

static fsdp_model_config config(void)
{
    fsdp_model_config c = fsdp__model_config_default(FSDP_LLAMA);
    c.hidden_size = 512, c.num_layers = 4, c.num_heads = 8, c.num_kv_heads = 8, c.head_dim = 64;
    c.intermediate_size = 1537, c.vocab_size = 16001; /* 4 ranks do not divide them */
    return c;
}

/* The number behind `key` in a file of /proc/self; -1: there is none. */
static int64_t number(const char *file, const char *key)
{
    char line[256];
    long long n = -1;
    FILE *f = fopen(file, "r");
    while (f && n < 0 && fgets(line, sizeof line, f))
        if (!strncmp(line, key, strlen(key))) n = atoll(line + strlen(key));
    if (f) fclose(f);
    return n;
}

/* ---- a rank ---------------------------------------------------------------------------- */

static fsdp_status sharded(fsdp_module **out)
{
    fsdp_model_config c = config();
    FSDP_TRY(fsdp_device_push(FSDP_META));
    fsdp_module *m = *out = fsdp_model_create(&c);
    fsdp_device_pop();
    if (!m) return fsdp_error();
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), NULL));
    return fsdp_fully_shard(m, NULL);
}

static fsdp_status load(fsdp_module *m, const char *folder)
{
    char path[512];
    int64_t read[2] = {0}, size; /* by the program's count, and by the kernel's */
    fsdp_memory_stats mem;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FSDP_TRY(fsdp__file_size(path, &size));
    FSDP_TRY(fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL));
    FILE *f = fopen("/proc/self/clear_refs", "w"); /* the peak starts here */
    bool reset = f && fputs("5", f) >= 0 && fclose(f) == 0;
    int64_t rss = 1024 * number("/proc/self/status", "VmRSS:");
    int64_t before = number("/proc/self/io", "rchar:");
    FSDP_TRY(fsdp_to_empty(m, FSDP_CPU));
    FSDP_TRY(fsdp__hf_load_weights_counted(m, folder, &read[0]));
    int64_t peak = 1024 * number("/proc/self/status", "VmHWM:") - rss;
    if (before >= 0) read[1] = number("/proc/self/io", "rchar:") - before;
    fsdp_memory_get(&mem);
    int64_t shard = mem.live[FSDP_PARAMETERS], grown = reset ? peak : 0;
#ifdef __SANITIZE_ADDRESS__
    grown = 0; /* its own memory is counted too */
#endif
    if (grown > shard + SLACK)
        return fsdp__fail(FSDP_INTERNAL, "rank %d grew by %lld bytes; its shard has %lld",
                          fsdp_rank(), (long long)grown, (long long)shard);
    FSDP_TRY(
        fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, read, 2, FSDP_I64, FSDP_SUM, NULL));
    if (fsdp_rank() == 0)
        printf("file %lld bytes; read %lld, by the kernel's count %lld; rank 0: shard %lld, grown "
               "by %lld\n",
               (long long)size, (long long)read[0], (long long)read[1], (long long)shard,
               (long long)grown);
    for (int i = 0; i < 2; i++)
        if ((double)read[i] > 1.05 * (double)size)
            return fsdp__fail(FSDP_INTERNAL, "%lld bytes were read of a file of %lld",
                              (long long)read[i], (long long)size);
    return read[0] >= size - (1 << 20) && shard * RANKS >= size - (1 << 20)
               ? FSDP_OK
               : fsdp__fail(FSDP_INTERNAL, "%lld bytes were read, shard %lld, of a file of %lld",
                            (long long)read[0], (long long)shard, (long long)size);
}

static int rank_main(const char *folder)
{
    fsdp_module *m = NULL;
    fsdp_status s = fsdp_init(NULL, NULL);
    if (s == FSDP_OK) s = sharded(&m);
    if (s == FSDP_OK) s = load(m, folder);
    if (s != FSDP_OK) fprintf(stderr, "%s\n", fsdp_error_text());
    fsdp_module_free(m);
    return fsdp_finalize() || s != FSDP_OK;
}

/* ---- the test ---------------------------------------------------------------------------- */

static const char *self;

static void test_c22(void **state)
{
    (void)state;
    char folder[64] = "/tmp/fsdp-test-c22-XXXXXX", whole[80], command[4096];
    assert_non_null(mkdtemp(folder));
    snprintf(whole, sizeof whole, "%s/whole", folder);
    fsdp_model_config c = config();
    fsdp_module *m = fsdp_model_create(&c);
    assert_int_equal(fsdp_reset_parameters(m, 3), FSDP_OK);
    fsdp_status s = fsdp__hf_save_folder(m, &c, whole, NULL);
    fsdp_module_free(m);
    snprintf(command, sizeof command, "'%s' run -n %d '%s' '%s'", FSDP_PROGRAM, RANKS, self, whole);
    int status = s == FSDP_OK ? system(command) : -1;
    assert_int_equal(fsdp__dir_remove(folder), FSDP_OK);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(int argc, char **argv)
{
    if (argc > 1) return rank_main(argv[1]);
    self = argv[0];
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_c22)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
