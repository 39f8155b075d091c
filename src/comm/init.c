/*
 * init.c - joining a world of ranks, as a process or as one of several threads, and leaving it.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/memory.h"
#include "comm/comm_internal.h"

static void post_error(void *arg, fsdp_status code, const char *text)
{
    (void)arg;
    fsdp_comm_abort(code, text);
}

static void world_free_kept(void *w)
{
    fsdp__world_free(w);
}

/* Makes the current context rank of a world over seg, which it takes over. */
static fsdp_status join_segment(fsdp__segment *seg, int rank)
{
    fsdp__comm_state *s = fsdp__comm_state_get();
    fsdp__world *w = s ? fsdp__world_join(seg, rank) : NULL;
    int *ranks = w ? fsdp__calloc((size_t)w->size, sizeof *ranks, "a world of ranks") : NULL;
    if (!ranks || fsdp__allocator_keep(w, world_free_kept) != FSDP_OK) {
        free(ranks);
        if (w) {
            fsdp__world_leave(w);
            fsdp__world_free(w);
        } else if (!seg->threads) {
            fsdp__segment_unmap(seg);
        }
        return fsdp_error();
    }
    for (int r = 0; r < w->size; r++)
        ranks[r] = r;
    fsdp__comm_state_clear(s);
    fsdp_group *g = fsdp__group_new(s, "world", ranks, w->size, rank, w, w->number);
    free(ranks);
    if (!g) {
        fsdp__world_leave(w);
        return fsdp_error();
    }
    g->part_bytes = w->gather_next = w->seg.layout.part;
    s->world = w;
    s->joined = true;
    fsdp__context_set_rank(fsdp_context_current(), rank, w->size);
    fsdp__error_set_hook(post_error, NULL);
    return FSDP_OK;
}

/* A number of the environment; *set tells whether it is there. */
static fsdp_status read_number(const char *name, int *value, bool *set)
{
    const char *text = getenv(name);
    *set = text && *text;
    if (!*set) return FSDP_OK;
    char *end;
    long x = strtol(text, &end, 10);
    if (*end || x < 0 || x > 1 << 20)
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s=%s: expected a number from 0 to %d", name, text,
                          1 << 20);
    *value = (int)x;
    return FSDP_OK;
}

fsdp_status fsdp_init(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    FSDP_TRY(fsdp__cpu_check());
    fsdp__comm_state *s = fsdp__comm_state_get();
    if (!s) return fsdp_error();
    if (s->joined)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_init: this context is rank %d of %d already; call "
                          "fsdp_finalize first",
                          fsdp_rank(), fsdp_world_size());
    int rank = 0, size = 1, local = 0, local_size = 0, fd = -1;
    bool has_rank, has_size, has_local, has_local_size, has_fd;
    FSDP_TRY(read_number("RANK", &rank, &has_rank));
    FSDP_TRY(read_number("WORLD_SIZE", &size, &has_size));
    FSDP_TRY(read_number("LOCAL_RANK", &local, &has_local));
    FSDP_TRY(read_number("LOCAL_WORLD_SIZE", &local_size, &has_local_size));
    FSDP_TRY(read_number("FSDP_SHM_FD", &fd, &has_fd));
    if (has_rank != has_size)
        return fsdp__fail(FSDP_INVALID_CONFIG, "%s is set and %s is not; a launcher sets both",
                          has_rank ? "RANK" : "WORLD_SIZE", has_rank ? "WORLD_SIZE" : "RANK");
    if (size < 1 || rank >= size)
        return fsdp__fail(FSDP_INVALID_CONFIG,
                          "RANK=%d with WORLD_SIZE=%d: expected a rank below the "
                          "size of the world",
                          rank, size);
    if (size == 1) {
        s->joined = true;
        fsdp__context_set_rank(fsdp_context_current(), 0, 1);
        return FSDP_OK;
    }
    if ((has_local && local != rank) || (has_local_size && local_size != size))
        return fsdp__fail(
            FSDP_UNSUPPORTED,
            "RANK=%d of WORLD_SIZE=%d has LOCAL_RANK=%d of LOCAL_WORLD_SIZE=%d: ranks on "
            "several hosts are not available; start all ranks on one host",
            rank, size, has_local ? local : rank, has_local_size ? local_size : size);
    if (!has_fd)
        return fsdp__fail(
            FSDP_INVALID_CONFIG,
            "WORLD_SIZE=%d and no FSDP_SHM_FD: the launcher gave these ranks no shared "
            "memory; start the program with `fsdp run -n %d PROGRAM`",
            size, size);
    fsdp__segment seg;
    FSDP_TRY(fsdp__segment_map_fd(fd, rank, size, &seg));
    return join_segment(&seg, rank);
}

int fsdp_finalize(void)
{
    fsdp__comm_state *s = fsdp__comm_state_peek();
    if (s && s->world && s->joined) {
        /* Peers may still read this rank's memory: leave when all have come as far. */
        for (int64_t i = 0; i < s->n_groups && fsdp_error() == FSDP_OK; i++)
            (void)fsdp__group_drain(s->groups[i]);
        fsdp__comm_state_clear(s);
        fsdp__context_set_rank(fsdp_context_current(), 0, 1);
    } else if (s) {
        s->joined = false;
    }
    return fsdp_error() != FSDP_OK;
}

/* ---- ranks as threads ------------------------------------------------------------------ */

typedef struct crew {
    fsdp__segment segment;
    int n;
    fsdp_status (*fn)(void *arg);
    void *arg;
    pthread_mutex_t lock;
    pthread_cond_t turn;
    int go; /* 0 wait, 1 run, -1 go home: not all threads could be started */
} crew;

typedef struct sailor {
    crew *crew;
    fsdp_context *context;
    pthread_t thread;
    int rank;
    fsdp_status status;
    char *text;
} sailor;

static fsdp_status run_rank(sailor *m)
{
    crew *c = m->crew;
    if (c->n > 1) {
        fsdp__segment view;
        fsdp__segment_view(&c->segment, m->rank, &view);
        FSDP_TRY(join_segment(&view, m->rank));
    }
    fsdp_status st = c->fn(c->arg);
    /* A failure that kept no error must reach the peers as well. */
    if (st != FSDP_OK && fsdp_error() == FSDP_OK)
        fsdp__fail(st, "rank %d returned \"%s\" and kept no error", m->rank, fsdp_status_name(st));
    return fsdp_error();
}

static void *sail(void *p)
{
    sailor *m = p;
    crew *c = m->crew;
    pthread_mutex_lock(&c->lock);
    while (c->go == 0)
        pthread_cond_wait(&c->turn, &c->lock);
    int go = c->go;
    pthread_mutex_unlock(&c->lock);
    if (go < 0) return NULL;
    fsdp_context *before = fsdp_context_set(m->context);
    m->status = run_rank(m);
    if (m->status != FSDP_OK) m->text = strdup(fsdp_error_text());
    fsdp__comm_state *s = fsdp__comm_state_peek();
    if (s) fsdp__comm_state_clear(s);
    fsdp_context_set(before);
    return NULL;
}

static fsdp_status run_crew(crew *c, sailor *m)
{
    int started = 0, refused = 0;
    for (int r = 0; r < c->n; r++) {
        m[r].crew = c;
        m[r].rank = r;
        m[r].context = fsdp_context_create(r, c->n);
        if (!m[r].context) return fsdp__fail_memory("the context of a rank", 0);
    }
    for (; started < c->n && !refused; started += !refused)
        refused = pthread_create(&m[started].thread, NULL, sail, &m[started]);
    pthread_mutex_lock(&c->lock);
    c->go = refused ? -1 : 1;
    pthread_cond_broadcast(&c->turn);
    pthread_mutex_unlock(&c->lock);
    for (int r = 0; r < started; r++)
        pthread_join(m[r].thread, NULL);
    if (refused)
        return fsdp__fail(FSDP_NO_MEMORY,
                          "fsdp_run_threads: the system started %d of %d threads; "
                          "raise the limit on processes (ulimit -u)",
                          started, c->n);
    for (int r = 0; r < c->n; r++)
        if (m[r].status != FSDP_OK)
            return fsdp__fail(m[r].status, "%s", m[r].text ? m[r].text : "");
    return FSDP_OK;
}

fsdp_status fsdp_run_threads(int n, fsdp_status (*fn)(void *arg), void *arg)
{
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    if (n < 1 || n > FSDP__MAX_RANKS || !fn)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_run_threads: %d ranks; expected 1 to %d, and a "
                          "function",
                          n, (int)FSDP__MAX_RANKS);
    crew c = {.n = n, .fn = fn, .arg = arg};
    if (n > 1) FSDP_TRY(fsdp__segment_map_threads(n, &c.segment));
    sailor *m = fsdp__calloc((size_t)n, sizeof *m, "ranks as threads");
    if (m) {
        pthread_mutex_init(&c.lock, NULL);
        pthread_cond_init(&c.turn, NULL);
        (void)run_crew(&c, m);
        pthread_cond_destroy(&c.turn);
        pthread_mutex_destroy(&c.lock);
    }
    /* Contexts go when no rank runs any more: ranks read each other's memory. */
    for (int r = 0; m && r < n; r++) {
        fsdp_context_free(m[r].context);
        free(m[r].text);
    }
    free(m);
    fsdp__segment_unmap(&c.segment);
    return fsdp_error();
}
