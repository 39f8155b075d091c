/*
 * watch.c - watches the ranks until all have ended.
 *
 * One poll over signals, ends and output; no threads. The rules:
 * - The first rank that ends badly is the cause, it is named at once, with
 *   its last lines, and the others are stopped: SIGTERM, a second later
 *   SIGKILL. Ends come from an epoll of pidfds, whose ready list is in the
 *   order in which processes ended; wait alone gives no order.
 * - A rank that ends with FSDP__EXIT_PEER blames another. The other gets half
 *   a second to be seen; if it is not, the first that blamed is named.
 * - SIGINT, SIGTERM and SIGHUP to the launcher go on to the ranks, who get
 *   the grace time; a second one kills.
 * - What a rank has started ends with it: its process group is killed before
 *   it is reaped, as its number cannot have been given away until then.
 * - Ranks stand in groups of their own, so the terminal's job control is
 *   passed on: Ctrl-Z pauses all, and a rank that reads the terminal gets it.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "launch/launch_internal.h"

/* After a failure: the time to see the origin, the time from SIGTERM to SIGKILL. Together under
 * the two seconds in which a failed job must be gone. */
static const double settle_seconds = 0.5, term_seconds = 1.0;

static void signal_groups(const fsdp__job *job, int sig)
{
    for (int r = 0; r < job->o->ranks; r++)
        if (job->ranks[r].pid > 0) kill(-job->ranks[r].pid, sig);
}

/* ---- the phases ---------------------------------------------------------- */

static void begin_stop(fsdp__job *job, int sig, double seconds)
{
    signal_groups(job, sig);
    /* A stopped process would hear the signal only when it goes on. */
    signal_groups(job, SIGCONT);
    job->phase = FSDP__PHASE_STOP;
    job->stop_seconds = seconds;
    job->deadline = fsdp__now() + seconds;
}

static void begin_kill(fsdp__job *job)
{
    for (int r = 0; r < job->o->ranks; r++)
        if (job->ranks[r].pid > 0) job->ranks[r].forced = true;
    signal_groups(job, SIGKILL);
    job->phase = FSDP__PHASE_KILL;
}

/* "killed by signal 11 (SIGSEGV, Segmentation fault)" */
static void say_end(fsdp__job *job, const fsdp__process *p)
{
    if (!p->by_signal) {
        fsdp__sink_addf(&job->err, "ended with exit code %d", p->code);
        if (p->code == FSDP__EXIT_PEER)
            fsdp__sink_addf(&job->err, " (a peer failed, and no rank was seen to fail before it)");
        return;
    }
    const char *name = sigabbrev_np(p->code), *text = sigdescr_np(p->code);
    fsdp__sink_addf(&job->err, "killed by signal %d (SIG%s, %s)", p->code, name ? name : "?",
                    text ? text : "unknown");
    if (p->code == SIGKILL && job->oom_before >= 0 && fsdp__oom_kills("") > job->oom_before)
        fsdp__sink_addf(&job->err, ": out of memory, the kernel ended it to free some; "
                                   "use more ranks, smaller batches or a larger memory limit");
}

/* Names rank r as the cause and stops the others. */
static void fail(fsdp__job *job, int r)
{
    fsdp__process *p = &job->ranks[r];
    job->exit_code = p->by_signal ? 128 + p->code : p->code;
    fsdp__sink_addf(&job->err, "fsdp: rank %d failed first: ", r);
    say_end(job, p);
    fsdp__sink_addf(&job->err, "\n");
    if (p->log_path) {
        fsdp__tail_read(&p->tail, p->log_path);
        fsdp__sink_addf(&job->err, "fsdp: its output is in %s\n", p->log_path);
    }
    fsdp__tail_print(&p->tail, &job->err, "fsdp:   | ");
    if (job->running > 0)
        fsdp__sink_addf(&job->err, "fsdp: stopping the other %d rank%s\n", job->running,
                        job->running == 1 ? "" : "s");
    begin_stop(job, SIGTERM, term_seconds);
}

static void on_deadline(fsdp__job *job)
{
    if (job->phase == FSDP__PHASE_SETTLE) {
        fail(job, job->peer_first);
    } else if (job->phase == FSDP__PHASE_STOP) {
        fsdp__sink_addf(&job->err,
                        "fsdp: killing %d rank%s that did not end within %g s:", job->running,
                        job->running == 1 ? "" : "s", job->stop_seconds);
        for (int r = 0; r < job->o->ranks; r++)
            if (job->ranks[r].pid > 0) fsdp__sink_addf(&job->err, " %d", r);
        fsdp__sink_addf(&job->err, "\n");
        begin_kill(job);
    }
}

/* ---- ends of ranks ------------------------------------------------------- */

static void give_terminal_back(fsdp__job *job)
{
    if (job->foreground < 0) return;
    tcsetpgrp(job->tty, getpgrp());
    job->foreground = -1;
}

/* Reaps rank r, which has ended, with all that it started. */
static void reap(fsdp__job *job, int r)
{
    fsdp__process *p = &job->ranks[r];
    siginfo_t info;
    memset(&info, 0, sizeof info);
    while (waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOWAIT) < 0 && errno == EINTR)
        continue;
    p->by_signal = info.si_code != CLD_EXITED;
    p->code = info.si_status;
    kill(-p->pid, SIGKILL);
    fsdp__keeper_tell(job, p->pid, false);
    while (waitpid(p->pid, NULL, 0) < 0 && errno == EINTR)
        continue;
    close(p->pidfd); /* leaves the epoll by that */
    p->pidfd = -1;
    p->pid = 0;
    job->running--;
    fsdp__stream_finish(&p->streams[0]);
    fsdp__stream_finish(&p->streams[1]);
}

static void on_end(fsdp__job *job, int r)
{
    fsdp__process *p = &job->ranks[r];
    bool had_terminal = job->foreground == r;
    reap(job, r);
    if (had_terminal) give_terminal_back(job);
    if (!p->by_signal && p->code == 0) return;

    bool calm = job->phase == FSDP__PHASE_RUN || job->phase == FSDP__PHASE_SETTLE;
    /* Ctrl-C went to the rank that has the terminal, and not to the launcher. */
    bool typed = had_terminal && (p->by_signal ? p->code == SIGINT : p->code == 128 + SIGINT);
    if (calm && typed) {
        job->interrupted = true;
        job->exit_code = 128 + SIGINT;
        begin_stop(job, SIGINT, job->o->grace);
    } else if (calm && !p->by_signal && p->code == FSDP__EXIT_PEER) {
        if (job->phase == FSDP__PHASE_RUN) {
            job->phase = FSDP__PHASE_SETTLE;
            job->deadline = fsdp__now() + settle_seconds;
            job->peer_first = r;
        }
    } else if (calm) {
        fail(job, r);
    } else if (job->interrupted && p->by_signal && !p->forced && p->code != SIGINT &&
               p->code != SIGTERM && p->code != SIGHUP) {
        /* Not the cause of the end, but a person will want to know of a crash. */
        fsdp__sink_addf(&job->err, "fsdp: rank %d, asked to end, was ", r);
        say_end(job, p);
        fsdp__sink_addf(&job->err, "\n");
    }
}

static void take_ends(fsdp__job *job)
{
    struct epoll_event e;
    /* One at a time: the order is what counts. */
    while (job->running > 0 && epoll_wait(job->deaths, &e, 1, 0) == 1)
        on_end(job, (int)e.data.u32);
    if (job->running == 0 && job->phase == FSDP__PHASE_SETTLE) fail(job, job->peer_first);
}

/* ---- signals to the launcher --------------------------------------------- */

static void on_stop_signal(fsdp__job *job, int sig)
{
    if (job->phase == FSDP__PHASE_STOP) {
        begin_kill(job);
    } else if (job->phase != FSDP__PHASE_KILL) {
        job->interrupted = true;
        job->exit_code = 128 + sig;
        if (job->running > 0)
            fsdp__sink_addf(&job->err,
                            "fsdp: SIG%s: %d rank%s get%s %g s to end (once more kills)\n",
                            sigabbrev_np(sig), job->running, job->running == 1 ? "" : "s",
                            job->running == 1 ? "s" : "", job->o->grace);
        begin_stop(job, sig, job->o->grace);
    }
}

/* Stops all ranks and the launcher itself, until the shell lets it go on. */
static void pause_job(fsdp__job *job)
{
    int had = job->foreground;
    give_terminal_back(job);
    signal_groups(job, SIGSTOP);
    kill(getpid(), SIGSTOP);
    /* Here it goes on. Where a rank had the terminal and the launcher has it again: as before. */
    if (had >= 0 && job->ranks[had].pid > 0 && tcgetpgrp(job->tty) == getpgrp() &&
        tcsetpgrp(job->tty, job->ranks[had].pid) == 0)
        job->foreground = had;
    signal_groups(job, SIGCONT);
}

/* Rank 0, which alone has the terminal as its input, may have been stopped by its wish to use it,
 * or by Ctrl-Z while it had it. */
static void take_stops(fsdp__job *job)
{
    siginfo_t info;
    fsdp__process *p = &job->ranks[0];
    memset(&info, 0, sizeof info);
    if (job->tty < 0 || p->pid == 0) return;
    if (waitid(P_PID, (id_t)p->pid, &info, WSTOPPED | WNOHANG) != 0 || info.si_pid == 0) return;
    if (info.si_status == SIGTSTP && job->foreground == 0) {
        pause_job(job);
    } else if (info.si_status == SIGTTIN || info.si_status == SIGTTOU) {
        /* In the background the whole job waits for the terminal, as any program would. */
        pid_t has;
        while ((has = tcgetpgrp(job->tty)) >= 0 && has != getpgrp())
            kill(getpid(), SIGSTOP);
        if (tcsetpgrp(job->tty, p->pid) == 0) job->foreground = 0;
        kill(-p->pid, SIGCONT);
    }
}

static void take_signals(fsdp__job *job)
{
    struct signalfd_siginfo info;
    while (read(job->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        switch (info.ssi_signo) {
        case SIGCHLD:
            take_stops(job);
            break;
        case SIGTSTP:
            pause_job(job);
            break;
        case SIGINT:
        case SIGTERM:
        case SIGHUP:
            on_stop_signal(job, (int)info.ssi_signo);
            break;
        default:
            break;
        }
    }
}

/* ---- the loop ------------------------------------------------------------ */

/* Fills fds for poll and gives their number: signals, ends, sinks that wait, then the ranks'
 * streams. The order of the streams is that of the ranks, so results are read in the same way. */
static nfds_t gather_fds(const fsdp__job *job, struct pollfd *fds)
{
    nfds_t n = 0;
    fds[n++] = (struct pollfd){job->signals, POLLIN, 0};
    fds[n++] = (struct pollfd){job->deaths, POLLIN, 0};
    fds[n++] = (struct pollfd){fsdp__sink_busy(&job->out) ? job->out.fd : -1, POLLOUT, 0};
    fds[n++] = (struct pollfd){fsdp__sink_busy(&job->err) ? job->err.fd : -1, POLLOUT, 0};
    for (int r = 0; r < job->o->ranks; r++)
        for (int i = 0; i < 2; i++) {
            const fsdp__stream *s = &job->ranks[r].streams[i];
            bool ready = s->fd >= 0 && !fsdp__sink_full(s->sink);
            fds[n++] = (struct pollfd){ready ? s->fd : -1, POLLIN, 0}; /* -1 is passed over */
        }
    return n;
}

/* Milliseconds until the phase ends, rounded up; -1: it does not end by itself. */
static int time_left(const fsdp__job *job)
{
    if (job->phase != FSDP__PHASE_SETTLE && job->phase != FSDP__PHASE_STOP) return -1;
    double left = job->deadline - fsdp__now();
    return left <= 0 ? 0 : (int)(left * 1000) + 1;
}

/* Whoever read the job's output is gone: the job ends, as a program that writes to it would. */
static void check_sinks(fsdp__job *job)
{
    if (!job->out.error || job->phase != FSDP__PHASE_RUN) return;
    bool pipe_closed = job->out.error == EPIPE;
    fsdp__sink_addf(&job->err, "fsdp: cannot write the ranks' output: %s; stopping\n",
                    strerror(job->out.error));
    job->exit_code = pipe_closed ? 128 + SIGPIPE : 1;
    job->interrupted = true;
    begin_stop(job, SIGTERM, job->o->grace);
}

/* Writes what still waits; a signal ends the patience with a reader that does not read. */
static void flush_sinks(fsdp__job *job)
{
    double end = fsdp__now() + 1;
    for (;;) {
        fsdp__sink_write(&job->out);
        fsdp__sink_write(&job->err);
        struct pollfd fds[] = {
            {fsdp__sink_busy(&job->out) ? job->out.fd : -1, POLLOUT, 0},
            {fsdp__sink_busy(&job->err) ? job->err.fd : -1, POLLOUT, 0},
            {job->signals, POLLIN, 0},
        };
        if (fds[0].fd < 0 && fds[1].fd < 0) return;
        if (job->interrupted && fsdp__now() > end) return;
        struct signalfd_siginfo info;
        if (poll(fds, 3, 100) > 0 && fds[2].revents &&
            read(job->signals, &info, sizeof info) == (ssize_t)sizeof info &&
            info.ssi_signo != SIGCHLD && info.ssi_signo != SIGTSTP) {
            job->interrupted = true;
            if (job->exit_code == 0) job->exit_code = 128 + (int)info.ssi_signo;
        }
    }
}

void fsdp__watch(fsdp__job *job)
{
    struct pollfd fds[4 + 2 * FSDP__LAUNCH_MAX_RANKS];
    while (job->running > 0) {
        nfds_t n = gather_fds(job, fds);
        if (poll(fds, n, time_left(job)) < 0) continue;
        fsdp__sink_write(&job->out);
        fsdp__sink_write(&job->err);
        for (nfds_t i = 4; i < n; i++)
            if (fds[i].revents) fsdp__stream_read(&job->ranks[(i - 4) / 2].streams[(i - 4) % 2]);
        /* Signals before ends: Ctrl-C may reach ranks on another way as well, and their ends are
         * then its consequence. */
        if (fds[0].revents) take_signals(job);
        if (fds[1].revents) take_ends(job);
        check_sinks(job);
        if (time_left(job) == 0) on_deadline(job);
    }
    flush_sinks(job);
}

void fsdp__watch_abandon(fsdp__job *job)
{
    begin_kill(job);
    for (int r = 0; r < job->o->ranks; r++)
        if (job->ranks[r].pid > 0) reap(job, r);
}
