/*
 * stream.c - queues of polled work, and events that mark a point in one.
 *
 * A stream counts the items that were submitted and those that are done; an event remembers the
 * first number and is reached when the second has come to it. The counts live in a timeline that
 * stream and events share, so an event stays good when its stream is freed (which runs the queue
 * to its end). An item that fails is over; those behind it still run, see the kept error and
 * refuse by themselves.
 */
#include <sched.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "fsdp/device.h"

typedef struct timeline {
    int64_t submitted, done;
    int64_t users;       /* the stream and the events that point here */
    fsdp_stream *stream; /* NULL once it is freed */
} timeline;

typedef struct item {
    fsdp_stream_fn fn;
    void *arg;
    fsdp_event *event; /* owned: set for a wait on another stream's point */
} item;

struct fsdp_stream {
    char *name;
    timeline *time;
    item *items; /* (cap), a ring */
    int64_t first, count, cap;
    int running; /* a poll is on: an item that polls its own stream must not start again */
};

struct fsdp_event {
    timeline *time; /* NULL: never recorded */
    int64_t mark;
};

static void timeline_leave(timeline *t)
{
    if (t && --t->users == 0) free(t);
}

fsdp_stream *fsdp_stream_create(const char *name)
{
    fsdp_stream *s = fsdp__calloc(1, sizeof *s, "a stream");
    if (!s) return NULL;
    s->name = fsdp__strdup(name ? name : "stream");
    s->time = fsdp__calloc(1, sizeof *s->time, "a stream");
    if (!s->name || !s->time) {
        free(s->name);
        free(s->time);
        free(s);
        return NULL;
    }
    s->time->users = 1;
    s->time->stream = s;
    return s;
}

void fsdp_stream_free(fsdp_stream *s)
{
    if (!s) return;
    (void)fsdp_stream_sync(s); /* an error is kept by the context */
    s->time->stream = NULL;
    timeline_leave(s->time);
    free(s->items);
    free(s->name);
    free(s);
}

static fsdp_status push(fsdp_stream *s, item it)
{
    if (s->count == s->cap) {
        int64_t cap = s->cap ? s->cap * 2 : 8;
        item *items = fsdp__calloc((size_t)cap, sizeof *items, "a stream's queue");
        if (!items) return fsdp_error();
        for (int64_t i = 0; i < s->count; i++)
            items[i] = s->items[(s->first + i) % s->cap];
        free(s->items);
        s->items = items;
        s->cap = cap;
        s->first = 0;
    }
    s->items[(s->first + s->count++) % s->cap] = it;
    s->time->submitted++;
    return FSDP_OK;
}

fsdp_status fsdp_stream_submit(fsdp_stream *s, fsdp_stream_fn fn, void *arg)
{
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    if (!s || !fn)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_stream_submit: %s is NULL",
                          s ? "the function" : "the stream");
    FSDP_TRY(push(s, (item){fn, arg, NULL}));
    return fsdp_stream_poll(s, NULL);
}

fsdp_status fsdp_stream_poll(fsdp_stream *s, int *idle)
{
    if (!s) return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_stream_poll: the stream is NULL");
    while (!s->running && s->count > 0) {
        item it = s->items[s->first];
        s->running = 1;
        int r = it.event ? fsdp_event_query(it.event) : it.fn(it.arg);
        s->running = 0;
        if (r == 0) break;
        if (r < 0 && fsdp_error() == FSDP_OK)
            fsdp__fail(FSDP_INTERNAL, "stream %s: an item failed and kept no error", s->name);
        fsdp_event_free(it.event);
        s->first = (s->first + 1) % s->cap;
        s->count--;
        s->time->done++;
    }
    if (idle) *idle = s->count == 0;
    return fsdp_error();
}

/* Between polls: gives the processor away, and sleeps once that has not helped for a while. */
static void relax(int *tries)
{
    if (++*tries < 100)
        sched_yield();
    else
        fsdp__sleep(50e-6);
}

fsdp_status fsdp_stream_sync(fsdp_stream *s)
{
    int idle = 0, tries = 0;
    if (s && s->running)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_stream_sync: called by an item of stream %s, which would wait for "
                          "itself; return 0 from the item instead",
                          s->name);
    for (;;) {
        fsdp_status st = fsdp_stream_poll(s, &idle);
        if (!s || idle) return st;
        relax(&tries);
    }
}

fsdp_event *fsdp_event_create(void)
{
    return fsdp__calloc(1, sizeof(fsdp_event), "an event");
}

void fsdp_event_free(fsdp_event *e)
{
    if (!e) return;
    timeline_leave(e->time);
    free(e);
}

fsdp_status fsdp_event_record(fsdp_event *e, fsdp_stream *s)
{
    if (!e) return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_event_record: the event is NULL");
    timeline_leave(e->time);
    e->time = s ? s->time : NULL;
    e->mark = s ? s->time->submitted : 0;
    if (s) s->time->users++;
    return FSDP_OK;
}

int fsdp_event_query(fsdp_event *e)
{
    if (!e || !e->time) return 1;
    if (e->time->done < e->mark && e->time->stream) {
        fsdp_status before = fsdp_error();
        fsdp_status now = fsdp_stream_poll(e->time->stream, NULL);
        if (before == FSDP_OK && now != FSDP_OK) return -1;
    }
    return e->time->done >= e->mark;
}

fsdp_status fsdp_event_wait(fsdp_event *e, fsdp_stream *s)
{
    if (!e) return fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_event_wait: the event is NULL");
    if (!e->time || e->time->done >= e->mark) return FSDP_OK;
    if (!s) {
        int tries = 0;
        for (;;) {
            int r = fsdp_event_query(e);
            if (r != 0) return fsdp_error();
            relax(&tries);
        }
    }
    if (fsdp_error() != FSDP_OK) return fsdp_error();
    /* Points of one stream are in order anyway. */
    if (e->time == s->time) return FSDP_OK;
    /* The item keeps a copy: the caller may record or free its event at once. */
    fsdp_event *copy = fsdp_event_create();
    if (!copy) return fsdp_error();
    *copy = *e;
    copy->time->users++;
    fsdp_status st = push(s, (item){NULL, NULL, copy});
    if (st != FSDP_OK) fsdp_event_free(copy);
    return st;
}
