/*
 * context.c - what a rank is, and which one a thread works for.
 *
 * Invariants:
 * 1. A thread's current context is its thread-local pointer; NULL there means
 *    "the thread's own default", which is made on first use and lives in a
 *    pthread key, whose destructor frees it when the thread ends.
 * 2. Freeing a context makes it current while its slots go, highest first, so
 *    that what a slot gives back is given back to the right accounts.
 */
#include "base/context.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/context_internal.h"

static _Thread_local fsdp_context *current;
static pthread_key_t default_key;
static pthread_once_t default_once = PTHREAD_ONCE_INIT;
static int default_key_error;

/* ---- life -------------------------------------------------------------- */

fsdp_context *fsdp_context_create(int rank, int world_size)
{
    fsdp_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return NULL;
    if (pthread_mutex_init(&ctx->error_lock, NULL)) {
        free(ctx);
        return NULL;
    }
    ctx->rank = rank;
    ctx->world_size = world_size;
    return ctx;
}

void fsdp_context_free(fsdp_context *ctx)
{
    if (!ctx) return;
    fsdp_context *before = fsdp_context_set(ctx);
    for (int i = FSDP__SLOT_COUNT - 1; i >= 0; i--) {
        fsdp__slot_entry e = ctx->slots[i];
        ctx->slots[i] = (fsdp__slot_entry){0};
        if (e.p && e.free_fn) e.free_fn(e.p);
    }
    fsdp_context_set(before == ctx ? NULL : before);
    /* A default freed by hand must not be freed again when the thread ends. */
    if (!default_key_error && pthread_getspecific(default_key) == ctx)
        pthread_setspecific(default_key, NULL);
    fsdp__error_drop(ctx);
    pthread_mutex_destroy(&ctx->error_lock);
    free(ctx);
}

static void default_free(void *p)
{
    fsdp_context_free(p);
}

static void default_init(void)
{
    default_key_error = pthread_key_create(&default_key, default_free);
}

fsdp_context *fsdp_context_current(void)
{
    if (current) return current;
    pthread_once(&default_once, default_init);
    if (default_key_error) return NULL;
    fsdp_context *ctx = pthread_getspecific(default_key);
    if (!ctx) {
        ctx = fsdp_context_create(0, 1);
        if (!ctx) return NULL;
        if (pthread_setspecific(default_key, ctx)) {
            pthread_mutex_destroy(&ctx->error_lock);
            free(ctx);
            return NULL;
        }
    }
    current = ctx;
    return ctx;
}

fsdp_context *fsdp_context_set(fsdp_context *ctx)
{
    /* The key must exist before a context can be freed (see above). */
    pthread_once(&default_once, default_init);
    fsdp_context *before = current;
    current = ctx;
    return before;
}

/* ---- who it is ----------------------------------------------------------- */

int fsdp_rank(void)
{
    fsdp_context *ctx = fsdp_context_current();
    return ctx ? ctx->rank : 0;
}

int fsdp_world_size(void)
{
    fsdp_context *ctx = fsdp_context_current();
    return ctx ? ctx->world_size : 1;
}

void fsdp__context_set_rank(fsdp_context *ctx, int rank, int world_size)
{
    ctx->rank = rank;
    ctx->world_size = world_size;
}

void *fsdp__slot_get(fsdp__slot slot)
{
    fsdp_context *ctx = fsdp_context_current();
    return ctx ? ctx->slots[slot].p : NULL;
}

void fsdp__slot_set(fsdp__slot slot, void *p, void (*free_fn)(void *))
{
    fsdp_context *ctx = fsdp_context_current();
    if (ctx) ctx->slots[slot] = (fsdp__slot_entry){p, free_fn};
}

/* ---- threads --------------------------------------------------------------- */

/* Cores that the control group at dir (below /sys/fs/cgroup) grants; 0: no bound. */
static int quota_of(const char *dir)
{
    char path[4200];
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", dir);
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    long long quota = 0, period = 0;
    /* "max 100000" does not match the first number: no bound. */
    int got = fscanf(f, "%lld %lld", &quota, &period);
    fclose(f);
    if (got != 2 || quota <= 0 || period <= 0) return 0;
    return (int)((quota + period - 1) / period);
}

/* The smallest bound of this process's control group and those around it. */
static int cgroup_cores(void)
{
    char line[4096], dir[4096] = "";
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::", 3) != 0) continue;
        line[strcspn(line, "\n")] = 0;
        snprintf(dir, sizeof dir, "%s", line + 3);
    }
    fclose(f);
    int least = 0;
    for (;;) {
        if (strcmp(dir, "/") == 0) dir[0] = 0;
        int cores = quota_of(dir);
        if (cores > 0 && (least == 0 || cores < least)) least = cores;
        char *slash = strrchr(dir, '/');
        if (!slash) return least;
        *slash = 0;
    }
}

static int default_threads(void)
{
    const char *omp = getenv("OMP_NUM_THREADS");
    if (omp) {
        /* May be a list, one number a nesting level: the first counts. */
        long n = strtol(omp, NULL, 10);
        if (n >= 1 && n <= 4096) return (int)n;
    }
    cpu_set_t set;
    int cores = 1;
    if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
    int quota = cgroup_cores();
    if (quota > 0 && quota < cores) cores = quota;
    return cores > 0 ? cores : 1;
}

int fsdp_threads(void)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return 1;
    if (ctx->threads == 0) ctx->threads = default_threads();
    return ctx->threads;
}

fsdp_status fsdp_set_threads(int n)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return FSDP_NO_MEMORY;
    FSDP_TRY(fsdp_error());
    if (n < 1 || n > 4096)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_set_threads: %d threads; expected 1 to 4096",
                          n);
    ctx->threads = n;
    return FSDP_OK;
}

/* ---- log ---------------------------------------------------------------------- */

void fsdp_log_set(fsdp_log_fn fn, void *arg, int max_level)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    ctx->log = fn;
    ctx->log_arg = arg;
    ctx->log_level = max_level;
}

bool fsdp__log_enabled(int level)
{
    fsdp_context *ctx = fsdp_context_current();
    return ctx && ctx->log && level <= ctx->log_level;
}

void fsdp__log(int level, const char *fmt, ...)
{
    if (!fsdp__log_enabled(level)) return;
    fsdp_context *ctx = fsdp_context_current();
    char *line = NULL;
    va_list args;
    va_start(args, fmt);
    int n = vasprintf(&line, fmt, args);
    va_end(args);
    /* Without memory the unformatted text is better than silence. */
    ctx->log(ctx->log_arg, level, n < 0 ? fmt : line);
    if (n >= 0) free(line);
}
