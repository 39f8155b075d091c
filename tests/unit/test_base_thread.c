/*
 * test_base_thread.c - parallel loops, the clock, the instruction set.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/error.h"
#include "base/thread.h"
#include "fsdp/context.h"

typedef struct loop {
    fsdp_context *ctx;
    atomic_int hits[64];
    atomic_int strangers, nested;
} loop;

static void inner(void *arg, int64_t part)
{
    (void)part;
    atomic_fetch_add(&((loop *)arg)->nested, 1);
}

static void body(void *arg, int64_t part)
{
    loop *l = arg;
    atomic_fetch_add(&l->hits[part], 1);
    if (fsdp_context_current() != l->ctx || fsdp_rank() != 3) atomic_fetch_add(&l->strangers, 1);
    /* A loop inside a loop runs on this thread. */
    fsdp__parallel(3, inner, l);
}

static void every_part_runs_once_in_the_context(void **state)
{
    (void)state;
    fsdp_context *ctx = fsdp_context_create(3, 8);
    fsdp_context *before = fsdp_context_set(ctx);
    for (int threads = 1; threads <= 4; threads++) {
        assert_int_equal(fsdp_set_threads(threads), FSDP_OK);
        for (int parts = 0; parts <= 64; parts += parts < 5 ? 1 : 59) {
            loop l = {.ctx = ctx};
            fsdp__parallel(parts, body, &l);
            for (int i = 0; i < 64; i++)
                assert_int_equal(l.hits[i], i < parts);
            assert_int_equal(l.strangers, 0);
            assert_int_equal(l.nested, 3 * parts);
            assert_ptr_equal(fsdp_context_current(), ctx);
        }
    }
    fsdp_context_set(before);
    fsdp_context_free(ctx);
}

static void failing(void *arg, int64_t part)
{
    (void)arg;
    fsdp__fail(FSDP_NON_FINITE, "part %d", (int)part);
}

static void workers_keep_the_callers_error(void **state)
{
    (void)state;
    fsdp_set_threads(4);
    fsdp__parallel(16, failing, NULL);
    assert_int_equal(fsdp_error(), FSDP_NON_FINITE);
    assert_memory_equal(fsdp_error_text(), "part ", 5);
    fsdp_error_clear();
}

static void clock_goes_forward(void **state)
{
    (void)state;
    double t = fsdp__now();
    fsdp__sleep(0.002);
    assert_true(fsdp__now() - t >= 0.002);
    fsdp__sleep(0);
    fsdp__sleep(-1);
}

/* Runs check in a child, where FSDP_ISA can be set before the first look. */
static int with_isa(const char *isa, int (*check)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        if (isa)
            setenv("FSDP_ISA", isa, 1);
        else
            unsetenv("FSDP_ISA");
        _exit(check());
    }
    int status = -1;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int is_machine(void)
{
    return fsdp__cpu_isa() == fsdp__cpu_isa_machine() && fsdp__cpu_check() == FSDP_OK ? 0 : 1;
}

static int is_plain(void)
{
    return fsdp__cpu_isa() == FSDP__ISA_PLAIN && fsdp__cpu_check() == FSDP_OK ? 0 : 1;
}

static int is_refused_name(void)
{
    return fsdp__cpu_check() == FSDP_INVALID_CONFIG && strstr(fsdp_error_text(), "sse9") ? 0 : 1;
}

static int is_refused_or_there(void)
{
    if (fsdp__cpu_isa_machine() == FSDP__ISA_AMX) return is_machine();
    return fsdp__cpu_check() == FSDP_UNSUPPORTED && fsdp__cpu_isa() == fsdp__cpu_isa_machine() ? 0
                                                                                               : 1;
}

static void isa_follows_the_environment(void **state)
{
    (void)state;
    assert_int_equal(with_isa(NULL, is_machine), 0);
    assert_int_equal(with_isa("", is_machine), 0);
    assert_int_equal(with_isa("plain", is_plain), 0);
    assert_int_equal(with_isa("sse9", is_refused_name), 0);
    assert_int_equal(with_isa("amx", is_refused_or_there), 0);
    assert_string_equal(fsdp__cpu_isa_name(FSDP__ISA_AVX512_BF16), "avx512_bf16");
    assert_string_equal(fsdp__cpu_isa_name((fsdp__isa)77), "unknown");
    assert_true(strlen(fsdp__cpu_model()) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        /* First: it forks, which must come before any worker thread. */
        cmocka_unit_test(isa_follows_the_environment),
        cmocka_unit_test(every_part_runs_once_in_the_context),
        cmocka_unit_test(workers_keep_the_callers_error),
        cmocka_unit_test(clock_goes_forward),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
