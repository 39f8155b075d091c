/*
 * thread.c - the compute threads of a rank, and its clock.
 */
#include "base/thread.h"

#include <errno.h>
#include <time.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "fsdp/context.h"

void fsdp__parallel(int64_t parts, void (*fn)(void *arg, int64_t part), void *arg)
{
#ifdef _OPENMP
    int threads = fsdp_threads();
    if (parts < threads) threads = (int)parts;
    if (threads > 1 && !omp_in_parallel()) {
        /* Workers work for the caller's rank: its log, its kept error. */
        fsdp_context *ctx = fsdp_context_current();
#pragma omp parallel num_threads(threads)
        {
            fsdp_context *before = fsdp_context_set(ctx);
#pragma omp for schedule(dynamic, 1)
            for (int64_t part = 0; part < parts; part++)
                fn(arg, part);
            fsdp_context_set(before);
        }
        return;
    }
#endif
    for (int64_t part = 0; part < parts; part++)
        fn(arg, part);
}

double fsdp__now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void fsdp__sleep(double seconds)
{
    if (!(seconds > 0)) return;
    struct timespec t = {.tv_sec = (time_t)seconds};
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, &t) == EINTR)
        continue;
}
