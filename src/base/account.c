/*
 * account.c - bytes by purpose, live and at their peaks.
 *
 * Numbers are of requested bytes and exact, since claims about memory are
 * tested with them. live_total is the sum of live[]; peak_by is the split at
 * the moment of peak_total, so that its sum is peak_total. What lies in files
 * is counted beside them: offloaded_total is the sum of offloaded[].
 */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/context_internal.h"
#include "base/str.h"

/* Lifts the peaks to what is live now. */
static void note_peak(fsdp_memory_stats *m, fsdp_purpose p)
{
    if (m->live[p] > m->peak[p]) m->peak[p] = m->live[p];
    if (m->live_total > m->peak_total) {
        m->peak_total = m->live_total;
        m->reserved_at_peak = m->reserved;
        memcpy(m->peak_by, m->live, sizeof m->peak_by);
    }
}

static void add_row(fsdp__str *s, const char *name, int columns, const int64_t *bytes)
{
    fsdp__str_addf(s, "  %-14s", name);
    for (int i = 0; i < columns; i++) {
        fsdp__str cell = {0};
        fsdp__str_add_bytes(&cell, (double)bytes[i]);
        fsdp__str_addf(s, " %12s", fsdp__str_get(&cell));
        fsdp__str_free(&cell);
    }
    fsdp__str_add(s, "\n");
}

static void add_table(fsdp__str *s, const fsdp_memory_stats *m)
{
    fsdp__str_addf(s, "  %-14s %12s %12s %12s\n", "purpose", "live", "own peak", "at peak");
    for (int p = 0; p < FSDP_PURPOSE_COUNT; p++) {
        int64_t row[] = {m->live[p], m->peak[p], m->peak_by[p]};
        add_row(s, fsdp_purpose_name((fsdp_purpose)p), 3, row);
    }
    int64_t total[] = {m->live_total, m->peak_total, m->peak_total};
    add_row(s, "total", 3, total);
    int64_t reserved[] = {m->reserved};
    add_row(s, "reserved", 1, reserved);
    if (m->limit > 0) add_row(s, "limit", 1, &m->limit);
    if (m->offloaded_peak == 0) return;
    int64_t files[] = {m->offloaded_total, m->offloaded_peak};
    add_row(s, "in files", 2, files);
    int64_t window[] = {m->window, m->window_peak};
    add_row(s, "of that read", 2, window);
}

/* The refusal of `bytes` for `what`, with the table. */
static fsdp_status refuse(const fsdp_memory_stats *m, fsdp_purpose p, int64_t bytes,
                          const char *what, bool by_test)
{
    fsdp__str s = {0};
    fsdp__str_addf(&s, "%s: ", what ? what : "an allocation");
    fsdp__str_add_bytes(&s, (double)bytes);
    fsdp__str_addf(&s, " (%lld bytes) for %s refused: ", (long long)bytes, fsdp_purpose_name(p));
    if (by_test) {
        fsdp__str_add(&s, "the test switch asked for it");
    } else {
        fsdp__str_add_bytes(&s, (double)m->live_total);
        fsdp__str_add(&s, " are live and memory.limit is ");
        fsdp__str_add_bytes(&s, (double)m->limit);
        fsdp__str_add(&s, "; raise memory.limit, use more ranks, a smaller batch or sequence, or "
                          "recompute activations");
    }
    fsdp__str_add(&s, "\n");
    add_table(&s, m);
    if (s.len > 0 && s.p[s.len - 1] == '\n') s.p[--s.len] = 0;
    fsdp_status code = fsdp__fail(FSDP_NO_MEMORY, "%s", fsdp__str_get(&s));
    fsdp__str_free(&s);
    return code;
}

fsdp_status fsdp__account_take(fsdp_purpose p, int64_t bytes, const char *what)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return FSDP_NO_MEMORY;
    if (p < 0 || p >= FSDP_PURPOSE_COUNT || bytes < 0)
        return fsdp__fail(FSDP_INTERNAL, "%s: %lld bytes charged to purpose %d",
                          what ? what : "an allocation", (long long)bytes, (int)p);
    fsdp_memory_stats *m = &ctx->memory;
    if (ctx->fail_nth > 0 && --ctx->fail_nth == 0) return refuse(m, p, bytes, what, true);
    if (m->limit > 0 && bytes > m->limit - m->live_total) return refuse(m, p, bytes, what, false);
    m->live[p] += bytes;
    m->live_total += bytes;
    m->allocations++;
    note_peak(m, p);
    return FSDP_OK;
}

void fsdp__account_give(fsdp_purpose p, int64_t bytes)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    assert(bytes >= 0 && ctx->memory.live[p] >= bytes && "more given back than was taken");
    ctx->memory.live[p] -= bytes;
    ctx->memory.live_total -= bytes;
}

void fsdp__account_move(fsdp_purpose from, fsdp_purpose to, int64_t bytes)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    assert(bytes >= 0 && ctx->memory.live[from] >= bytes && "more moved than was taken");
    ctx->memory.live[from] -= bytes;
    ctx->memory.live[to] += bytes;
    note_peak(&ctx->memory, to);
}

fsdp_status fsdp__account_offload_take(fsdp_purpose p, int64_t bytes, const char *what)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return FSDP_NO_MEMORY;
    fsdp_memory_stats *m = &ctx->memory;
    if (ctx->fail_nth > 0 && --ctx->fail_nth == 0) return refuse(m, p, bytes, what, true);
    m->offloaded[p] += bytes;
    m->offloaded_total += bytes;
    m->allocations++;
    if (m->offloaded_total > m->offloaded_peak) m->offloaded_peak = m->offloaded_total;
    return FSDP_OK;
}

void fsdp__account_offload_give(fsdp_purpose p, int64_t bytes)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    assert(ctx->memory.offloaded[p] >= bytes && "more given back than was taken");
    ctx->memory.offloaded[p] -= bytes;
    ctx->memory.offloaded_total -= bytes;
}

void fsdp__account_offload_move(fsdp_purpose from, fsdp_purpose to, int64_t bytes)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    assert(ctx->memory.offloaded[from] >= bytes && "more moved than was taken");
    ctx->memory.offloaded[from] -= bytes;
    ctx->memory.offloaded[to] += bytes;
}

void fsdp__account_window(int64_t delta)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    fsdp_memory_stats *m = &ctx->memory;
    assert(m->window + delta >= 0 && "more of a file given back than was read");
    m->window += delta;
    if (m->window > m->window_peak) m->window_peak = m->window;
}

void fsdp__account_reserve(int64_t delta)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    assert(ctx->memory.reserved + delta >= 0 && "more reserved bytes given back than taken");
    ctx->memory.reserved += delta;
}

void fsdp__account_fail_nth(int64_t n)
{
    fsdp_context *ctx = fsdp_context_current();
    if (ctx) ctx->fail_nth = n;
}

void fsdp_memory_get(fsdp_memory_stats *out)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!out) return;
    if (ctx)
        *out = ctx->memory;
    else
        memset(out, 0, sizeof *out);
}

void fsdp_memory_reset_peak(void)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return;
    fsdp_memory_stats *m = &ctx->memory;
    memcpy(m->peak, m->live, sizeof m->peak);
    memcpy(m->peak_by, m->live, sizeof m->peak_by);
    m->peak_total = m->live_total;
    m->reserved_at_peak = m->reserved;
    m->offloaded_peak = m->offloaded_total;
    m->window_peak = m->window;
}

fsdp_status fsdp_memory_set_limit(int64_t limit)
{
    fsdp_context *ctx = fsdp_context_current();
    if (!ctx) return FSDP_NO_MEMORY;
    FSDP_TRY(fsdp_error());
    if (limit < 0)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_memory_set_limit: %lld bytes; expected 0 (no limit) or more",
                          (long long)limit);
    ctx->memory.limit = limit;
    return FSDP_OK;
}

char *fsdp_memory_table(void)
{
    fsdp_memory_stats m;
    fsdp_memory_get(&m);
    fsdp__str s = {0};
    add_table(&s, &m);
    return fsdp__str_take(&s);
}
