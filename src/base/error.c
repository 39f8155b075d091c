/*
 * error.c - keeping the first error of a context.
 *
 * The first error wins: once one is kept, fsdp__fail changes nothing and
 * returns the kept status, so that a cleanup which fails as well does not hide
 * the cause. Keeping an error must work when memory is gone: the text then
 * falls back to a small buffer of the context and is cut.
 */
#include "base/error.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/context_internal.h"
#include "base/str.h"

fsdp_status fsdp_error(void)
{
    fsdp_context *ctx = fsdp_context_current();
    return ctx ? (fsdp_status)atomic_load(&ctx->error) : FSDP_NO_MEMORY;
}

const char *fsdp_error_text(void)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return "no memory for a context";
    return ctx->error_text ? ctx->error_text : "";
}

void fsdp__error_drop(fsdp_context *ctx)
{
    if (ctx->error_text != ctx->error_small) free(ctx->error_text);
    ctx->error_text = NULL;
    ctx->stopped = false;
    atomic_store(&ctx->error, FSDP_OK);
}

void fsdp_error_clear(void)
{
    fsdp_context *ctx = fsdp_context_current();
    if (ctx) fsdp__error_drop(ctx);
}

/* Keeps (code, text); text is malloc'd and becomes the context's, or NULL when
 * memory ran out, in which case fmt's beginning is kept. */
static fsdp_status keep(fsdp_status code, char *text, const char *fmt)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) {
        free(text);
        return code;
    }
    pthread_mutex_lock(&ctx->error_lock);
    fsdp_status kept = (fsdp_status)atomic_load(&ctx->error);
    if (kept == FSDP_OK) {
        if (!text) {
            snprintf(ctx->error_small, sizeof ctx->error_small, "%s", fmt);
            ctx->error_text = ctx->error_small;
        } else {
            ctx->error_text = text;
        }
        atomic_store(&ctx->error, (int)code);
    }
    pthread_mutex_unlock(&ctx->error_lock);
    if (kept != FSDP_OK) {
        free(text);
        return kept;
    }
    /* Outside the lock: the hook may come back here. */
    if (ctx->hook) ctx->hook(ctx->hook_arg, code, ctx->error_text);
    return code;
}

void fsdp__error_stop(void)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    pthread_mutex_lock(&ctx->error_lock);
    if (atomic_load(&ctx->error) == FSDP_OK) {
        snprintf(ctx->error_small, sizeof ctx->error_small, "the recomputation has all it needs");
        ctx->error_text = ctx->error_small;
        ctx->stopped = true;
        atomic_store(&ctx->error, FSDP_INTERRUPTED);
    }
    pthread_mutex_unlock(&ctx->error_lock);
}

bool fsdp__error_stop_end(void)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx || !ctx->stopped) return false;
    fsdp__error_drop(ctx);
    return true;
}

/* vsprintf into memory of its own; NULL when there is none. */
static char *format(const char *fmt, va_list args)
{
    char *text = NULL;
    return vasprintf(&text, fmt, args) < 0 ? NULL : text;
}

fsdp_status fsdp__fail(fsdp_status code, const char *fmt, ...)
{
    /* Failing with "ok" would let callers go on after an error. */
    if (code == FSDP_OK) code = FSDP_INTERNAL;
    va_list args;
    va_start(args, fmt);
    char *text = format(fmt, args);
    va_end(args);
    return keep(code, text, fmt);
}

fsdp_status fsdp__fail_errno(fsdp_status code, const char *fmt, ...)
{
    int number = errno;
    if (code == FSDP_OK) code = FSDP_INTERNAL;
    va_list args;
    va_start(args, fmt);
    char *front = format(fmt, args);
    va_end(args);
    char buffer[128];
    const char *why = strerror_r(number, buffer, sizeof buffer);
    char *text = NULL;
    if (front && asprintf(&text, "%s: %s", front, why) < 0) text = NULL;
    free(front);
    fsdp_status s = keep(code, text, fmt);
    errno = number;
    return s;
}

fsdp_status fsdp__fail_null(const char *function, const char *what)
{
    return fsdp_error() ? fsdp_error()
                        : fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: %s is NULL", function, what);
}

fsdp_status fsdp__fail_memory(const char *what, size_t bytes)
{
    return fsdp__fail(FSDP_NO_MEMORY,
                      "%s: the system refused %zu bytes; end other programs, or use a smaller "
                      "model, batch or sequence",
                      what, bytes);
}

fsdp_status fsdp__error_place(const char *fmt, ...)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return FSDP_NO_MEMORY;
    fsdp_status kept = (fsdp_status)atomic_load(&ctx->error);
    if (kept == FSDP_OK) return kept;
    va_list args;
    va_start(args, fmt);
    char *place = format(fmt, args);
    va_end(args);
    char *text = NULL;
    if (place && asprintf(&text, "%s: %s", place, ctx->error_text) < 0) text = NULL;
    free(place);
    /* Without memory the message stays as it was: less, but true. */
    if (text) {
        if (ctx->error_text != ctx->error_small) free(ctx->error_text);
        ctx->error_text = text;
    }
    return kept;
}

void fsdp__error_set_hook(fsdp__error_hook fn, void *arg)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    ctx->hook = fn;
    ctx->hook_arg = arg;
}
