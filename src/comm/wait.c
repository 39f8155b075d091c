/*
 * wait.c - how a rank waits, is woken, and learns that waiting is in vain.
 *
 * A waiter polls: first for about a microsecond, then giving the processor away for some tens, then
 * it sleeps on its own bell (a futex) in slices of 50 ms. Between slices it looks whether an abort
 * was posted, a rank died or left, or the time is up; so no wait lasts for ever, and none of these
 * looks is on the fast path. Whoever publishes something rings only for those that sleep.
 *
 * No ring is lost: the sleeper sets `sleeping`, then polls once more; the publisher stores its
 * word, then loads `sleeping`. All four are sequentially consistent, so one sees the other.
 */
#include <errno.h>
#include <linux/futex.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/context.h"
#include "base/error.h"
#include "base/thread.h"
#include "comm/comm_internal.h"

#define SPIN_SECONDS 1e-6
#define YIELD_SECONDS 40e-6
#define SLICE_NANOSECONDS 50000000L

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* ---- bells ------------------------------------------------------------------------ */

static void ring_page(fsdp__rank_page *p)
{
    if (!atomic_load(&p->sleeping)) return;
    atomic_fetch_add(&p->bell, 1);
    syscall(SYS_futex, &p->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void fsdp__ring(const fsdp__world *w, int rank)
{
    ring_page(fsdp__rank_page_of(w, rank));
}

void fsdp__publish(fsdp_group *g, _Atomic uint64_t *word, uint64_t value)
{
    const fsdp__comm_state *s = fsdp__comm_state_peek();
    bool scheduled = s && s->schedule;
    if (scheduled) s->schedule(s->schedule_arg);
    atomic_store(word, value);
    for (int r = 0; r < g->size; r++)
        if (r != g->rank) fsdp__ring(g->world, g->ranks[r]);
    if (scheduled) s->schedule(s->schedule_arg);
}

/* ---- aborts ----------------------------------------------------------------------- */

static fsdp__abort_page *abort_page(const fsdp__world *w)
{
    return &fsdp__head(w)->aborts[w->number];
}

void fsdp_comm_abort(fsdp_status code, const char *text)
{
    fsdp__comm_state *s = fsdp__comm_state_peek();
    if (!s || !s->world) return;
    fsdp__abort_page *a = abort_page(s->world);
    uint32_t none = 0;
    /* The first abort of the world stays: it is the cause of those that follow. */
    if (!atomic_compare_exchange_strong(&a->state, &none, 1)) return;
    snprintf(a->text, sizeof a->text, "%s", text ? text : "");
    atomic_store(&a->code, (uint32_t)code);
    atomic_store(&a->rank, (uint32_t)s->world->rank);
    atomic_store(&a->state, 2);
    for (int r = 0; r < s->world->size; r++)
        if (r != s->world->rank) fsdp__ring(s->world, r);
}

/* Fails if another rank posted an abort. A code that tells about the world and not about the rank
 * that found it out keeps its meaning. */
fsdp_status fsdp__abort_check(const fsdp__world *w, const char *where)
{
    const fsdp__abort_page *a = abort_page(w);
    if (atomic_load_explicit(&a->state, memory_order_acquire) != 2) return FSDP_OK;
    int rank = (int)atomic_load(&a->rank);
    fsdp_status code = (fsdp_status)atomic_load(&a->code);
    if (rank == w->rank)
        return fsdp__fail(
            FSDP_INVALID_STATE,
            "%s: this rank posted an error to its peers before, and they have stopped: "
            "%s; call fsdp_reset_iteration on all ranks, or fsdp_finalize and start again",
            where, a->text);
    if (code != FSDP_PEER_DIED && code != FSDP_MISMATCH && code != FSDP_TIMEOUT)
        code = FSDP_PEER_FAILED;
    return fsdp__fail(code, "%s: rank %d reported: %s", where, rank, a->text);
}

/* Only while no rank can post one or look for one (reset.c). */
void fsdp__abort_clear(fsdp__world *w)
{
    atomic_store(&abort_page(w)->state, 0);
}

/* ---- what a waiter looks for -------------------------------------------------------- */

void fsdp__work_where(const fsdp_work *w, char *out, size_t size)
{
    const fsdp_group *g = w->group;
    snprintf(out, size, "%s '%s' (call %llu of lane %s, group %s of %d)",
             fsdp__collective_name(w->collective), w->label, (unsigned long long)w->seq,
             fsdp__lane_name(w->lane), g->name, g->size);
}

/* "rank 2 (host h, process 71), whose last call was all_gather 'x' in lane gather". */
static void describe(const fsdp__world *w, int rank, char *out, size_t size)
{
    const fsdp__rank_page *p = fsdp__rank_page_of(w, rank);
    char host[128] = "?", label[FSDP__LABEL], group[FSDP__LABEL];
    (void)gethostname(host, sizeof host - 1);
    uint64_t state = atomic_load(&p->state), last = atomic_load(&p->last);
    if (state == 0) {
        snprintf(out, size, "rank %d (host %s), which has never called fsdp_init,", rank, host);
        return;
    }
    fsdp__text_get(&p->last_label, label);
    fsdp__text_get(&p->last_group, group);
    int n = snprintf(out, size, "rank %d (host %s, process %llu), ", rank, host,
                     (unsigned long long)atomic_load(&p->pid));
    if (n < 0 || (size_t)n >= size) return;
    if (last == 0)
        snprintf(out + n, size - (size_t)n, "which has called no collective yet,");
    else
        snprintf(out + n, size - (size_t)n,
                 "whose last call was %s '%s' (call %llu of lane %s, "
                 "group %s),",
                 fsdp__collective_name((fsdp_collective)(last % 16)), label,
                 (unsigned long long)(last / 256), fsdp__lane_name((fsdp_lane)(last / 16 % 16)),
                 group);
}

/* Whether a rank of the group has left this world. */
static bool has_left(const fsdp_group *g, int rank)
{
    if (rank < 0 || rank >= g->size || rank == g->rank) return false;
    uint64_t here = (uint64_t)g->world->number * 4 + FSDP__JOINED;
    return atomic_load(&fsdp__rank_page_of(g->world, g->ranks[rank])->state) > here;
}

/* Dead ranks of the group, and `left` (-1: none) if it is still the awaited one. A rank that goes
 * home after its last call has published all of it before: so `left` was seen to have gone before
 * the poll that still waits for it. */
static fsdp_status check_peers(const fsdp_group *g, const fsdp_work *w, const char *where, int left)
{
    const fsdp__world *world = g->world;
    char who[512];
    for (int r = 0; r < g->size; r++) {
        if (r == g->rank) continue;
        const fsdp__rank_page *p = fsdp__rank_page_of(world, g->ranks[r]);
        uint64_t state = atomic_load(&p->state);
        uint64_t here = (uint64_t)world->number * 4 + FSDP__JOINED;
        bool gone = r == left && r == w->blocked_on;
        bool dead = !gone && state == here && !world->seg.threads &&
                    fsdp__process_dead(atomic_load(&p->pid), atomic_load(&p->start));
        if (!gone && !dead) continue;
        /* It may have posted why since the last look, and gone by that. */
        if (!w->despite_abort) FSDP_TRY(fsdp__abort_check(world, where));
        if (gone) {
            describe(world, g->ranks[r], who, sizeof who);
            return fsdp__fail(FSDP_PEER_FAILED,
                              "%s: %s has left the world (fsdp_finalize, or the end of its thread) "
                              "and will not come; all ranks must make the same calls",
                              where, who);
        }
        describe(world, g->ranks[r], who, sizeof who);
        return fsdp__fail(FSDP_PEER_DIED,
                          "%s: %s died; its own output or the launcher's report says why", where,
                          who);
    }
    return FSDP_OK;
}

static fsdp_status check_time(const fsdp_group *g, const fsdp_work *w, const char *where,
                              double since)
{
    double limit = g->timeout > 0 ? g->timeout : 300;
    if (fsdp__now() - since < limit) return FSDP_OK;
    char who[512];
    describe(g->world, g->ranks[w->blocked_on], who, sizeof who);
    return fsdp__fail(FSDP_TIMEOUT,
                      "%s: after %.3g s %s has not %s; see what it is doing, or raise the timeout "
                      "(fsdp_group_set_timeout) if it is only slow",
                      where, limit, who, w->blocked_by ? w->blocked_by : "come");
}

static void sleep_on(fsdp__rank_page *me, uint32_t bell)
{
    struct timespec slice = {0, SLICE_NANOSECONDS};
    syscall(SYS_futex, &me->bell, FUTEX_WAIT, bell, &slice, NULL, 0);
}

fsdp_status fsdp__wait(fsdp_group *g, int (*done)(void *arg), void *arg, const fsdp_work *w)
{
    int r = done(arg);
    if (r == 0) {
        double start = fsdp__now(), now = start;
        fsdp__rank_page *me = fsdp__rank_page_of(g->world, g->world->rank);
        char where[256];
        fsdp__work_where(w, where, sizeof where);
        while ((r = done(arg)) == 0) {
            if (now - start < SPIN_SECONDS) {
                for (int i = 0; i < 16; i++)
                    pause_cpu();
            } else if (now - start < YIELD_SECONDS) {
                sched_yield();
            } else {
                uint32_t bell = atomic_load(&me->bell);
                atomic_store(&me->sleeping, 1);
                r = done(arg);
                if (r == 0) sleep_on(me, bell);
                atomic_store(&me->sleeping, 0);
                int left = has_left(g, w->blocked_on) ? w->blocked_on : -1;
                if (r != 0 || (r = done(arg)) != 0) break;
                if (!w->despite_abort) FSDP_TRY(fsdp__abort_check(g->world, where));
                FSDP_TRY(check_peers(g, w, where, left));
                FSDP_TRY(check_time(g, w, where, start));
            }
            now = fsdp__now();
        }
    }
    return r > 0 ? FSDP_OK : fsdp_error();
}
