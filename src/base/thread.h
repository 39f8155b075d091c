/*
 * thread.h - the compute threads of a rank.
 *
 * One pool a rank: OpenMP's, which oneDNN uses as well; without OpenMP (thread
 * sanitizer build) loops run on the calling thread. Work is cut by the caller
 * into a number of parts that the problem fixes, never the thread count, so
 * results do not depend on it.
 */
#ifndef FSDP_BASE_THREAD_H
#define FSDP_BASE_THREAD_H

#include <stdint.h>

/* Calls fn(arg, part) for part 0..parts-1 on up to fsdp_threads() threads;
 * returns when all are done. The parts may run in any order. */
void fsdp__parallel(int64_t parts, void (*fn)(void *arg, int64_t part), void *arg);

/* Seconds on a monotonic clock. */
double fsdp__now(void);
void fsdp__sleep(double seconds);

#endif
