/*
 * output.c - carries the ranks' lines.
 *
 * Invariants:
 * - only whole lines reach a sink, so those of two ranks never mix; a line
 *   that a rank leaves open is ended when its stream ends, and one of more
 *   than 64 KiB is passed on in pieces;
 * - the launcher never waits for whoever reads its output: a pager that is
 *   paused must not keep it from seeing a rank die. What cannot be written
 *   yet is kept, and when much is kept the ranks' pipes are left full, so
 *   that the ranks wait instead.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch/launch_internal.h"

enum { LONGEST_LINE = 64 << 10, MOST_PENDING = 1 << 20 };

bool fsdp__sink_busy(const fsdp__sink *s)
{
    return !s->error && s->pending.len > s->done;
}

bool fsdp__sink_full(const fsdp__sink *s)
{
    return !s->error && s->pending.len - s->done > MOST_PENDING;
}

/* Moves what is left to the front once enough is written to be worth it. */
static void drop_written(fsdp__sink *s)
{
    if (s->done < MOST_PENDING / 4) return;
    s->pending.len -= s->done;
    memmove(s->pending.p, s->pending.p + s->done, s->pending.len);
    s->done = 0;
}

void fsdp__sink_write(fsdp__sink *s)
{
    while (fsdp__sink_busy(s)) {
        /* POLLOUT on a pipe promises room for PIPE_BUF bytes, so writing no more than that does
         * not block. The descriptor is shared with other programs: making it non-blocking would
         * change it for them. */
        struct pollfd p = {s->fd, POLLOUT, 0};
        if (poll(&p, 1, 0) <= 0) {
            drop_written(s);
            return;
        }
        size_t n = s->pending.len - s->done;
        ssize_t w = write(s->fd, s->pending.p + s->done, n < PIPE_BUF ? n : PIPE_BUF);
        if (w > 0)
            s->done += (size_t)w;
        else if (w < 0 && errno == EAGAIN)
            return;
        else if (w < 0 && errno != EINTR)
            s->error = errno;
    }
    s->pending.len = 0;
    s->done = 0;
}

void fsdp__sink_addf(fsdp__sink *s, const char *fmt, ...)
{
    char *text = NULL;
    va_list args;
    va_start(args, fmt);
    int n = vasprintf(&text, fmt, args);
    va_end(args);
    if (n >= 0) {
        fsdp__str_add_n(&s->pending, text, (size_t)n);
        free(text);
    }
    fsdp__sink_write(s);
}

void fsdp__sink_free(fsdp__sink *s)
{
    fsdp__str_free(&s->pending);
}

/* ---- last lines ---------------------------------------------------------- */

static void tail_add(fsdp__tail *t, const char *line, size_t n)
{
    /* Of a bar that redraws itself only what is seen last counts. */
    while (n > 0 && line[n - 1] == '\r')
        n--;
    const char *cr = memrchr(line, '\r', n);
    if (cr) {
        n -= (size_t)(cr + 1 - line);
        line = cr + 1;
    }
    if (n == 0) return;
    if (n > FSDP__TAIL_WIDTH - 1) n = FSDP__TAIL_WIDTH - 1;
    char *to = t->lines[t->count++ % FSDP__TAIL_LINES];
    memcpy(to, line, n);
    to[n] = 0;
}

void fsdp__tail_read(fsdp__tail *t, const char *path)
{
    enum { BYTES = FSDP__TAIL_LINES * FSDP__TAIL_WIDTH };
    char text[BYTES];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    off_t size = lseek(fd, 0, SEEK_END);
    off_t from = size > BYTES ? size - BYTES : 0;
    ssize_t n = pread(fd, text, BYTES, from);
    close(fd);
    t->count = 0;
    const char *p = text, *end = text + (n > 0 ? n : 0);
    /* The first piece is the end of a line whose beginning was not read. */
    if (from > 0) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        if (nl) p = nl + 1;
    }
    while (p < end) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        if (!nl) nl = end;
        tail_add(t, p, (size_t)(nl - p));
        p = nl + 1;
    }
}

void fsdp__tail_print(const fsdp__tail *t, fsdp__sink *s, const char *before)
{
    int64_t first = t->count > FSDP__TAIL_LINES ? t->count - FSDP__TAIL_LINES : 0;
    if (t->count == 0) fsdp__sink_addf(s, "fsdp: it had written nothing\n");
    if (t->count > 0) fsdp__sink_addf(s, "fsdp: its last lines:\n");
    for (int64_t i = first; i < t->count; i++)
        fsdp__sink_addf(s, "%s%s\n", before, t->lines[i % FSDP__TAIL_LINES]);
}

/* ---- streams ------------------------------------------------------------- */

/* Passes n bytes on as one line; end says whether a newline is added. */
static void emit(fsdp__stream *s, const char *line, size_t n, bool end)
{
    if (!s->sink->error) {
        fsdp__str_add(&s->sink->pending, s->prefix);
        fsdp__str_add_n(&s->sink->pending, line, n);
        if (end) fsdp__str_add(&s->sink->pending, "\n");
    }
    tail_add(s->tail, line, n);
}

static void take(fsdp__stream *s, const char *p, size_t n)
{
    while (n > 0) {
        const char *nl = memchr(p, '\n', n);
        size_t part = nl ? (size_t)(nl - p) : n;
        fsdp__str_add_n(&s->line, p, part);
        if (nl || s->line.len >= LONGEST_LINE) {
            /* A piece of a plain stream stays as it is; one with a prefix must be a line, or the
             * next rank's prefix would stand in its middle. */
            emit(s, fsdp__str_get(&s->line), s->line.len, nl || s->prefix[0]);
            s->line.len = 0;
        }
        p += part + (nl ? 1 : 0);
        n -= part + (nl ? 1 : 0);
    }
}

static void close_stream(fsdp__stream *s)
{
    if (s->line.len > 0) emit(s, s->line.p, s->line.len, true);
    fsdp__str_free(&s->line);
    close(s->fd);
    s->fd = -1;
}

/* One read. False when there is nothing more now, or ever. */
static bool read_some(fsdp__stream *s)
{
    char text[16 << 10];
    ssize_t n = read(s->fd, text, sizeof text);
    if (n > 0) take(s, text, (size_t)n);
    if (n < 0 && errno == EINTR) return true;
    if (n == 0 || (n < 0 && errno != EAGAIN)) close_stream(s);
    return n > 0;
}

void fsdp__stream_read(fsdp__stream *s)
{
    if (s->fd >= 0) (void)read_some(s);
    fsdp__sink_write(s->sink);
}

void fsdp__stream_finish(fsdp__stream *s)
{
    /* Bounded by what a pipe holds: a process that escaped the group may hold the other end and
     * write for ever. */
    for (int i = 0; i < 128 && s->fd >= 0 && read_some(s); i++)
        continue;
    if (s->fd >= 0) close_stream(s);
    if (s->sink) fsdp__sink_write(s->sink);
}
