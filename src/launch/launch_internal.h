/*
 * launch_internal.h - what the files of this room share.
 *
 * launch.c checks and prepares, start.c makes processes, output.c carries
 * lines, watch.c decides. Everything runs on one thread, driven by one poll.
 */
#ifndef FSDP_LAUNCH_INTERNAL_H
#define FSDP_LAUNCH_INTERNAL_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/str.h"
#include "launch/launch.h"

/* ---- cores.c ------------------------------------------------------------- */

/* Cores that the control groups' quota allows, 0 if there is none. root is put before every path
 * that is read ("" for the machine itself), so that tests can show another one. */
double fsdp__cores_quota(const char *root);

/* Processes that the kernel killed for want of memory: in this control group where it counts them,
 * else on the whole machine; -1 if neither is known. */
int64_t fsdp__oom_kills(const char *root);

/* ---- output.c ------------------------------------------------------------ */

/* Where lines go. Writing never blocks: what does not fit waits in `pending`. */
typedef struct fsdp__sink {
    int fd;
    int error;         /* errno of the write that failed: nothing is written after it */
    size_t done;       /* bytes of pending that are written */
    fsdp__str pending;
} fsdp__sink;

enum { FSDP__TAIL_LINES = 10, FSDP__TAIL_WIDTH = 320 };

/* A rank's last lines, a ring; line i of all stands in lines[i % FSDP__TAIL_LINES]. */
typedef struct fsdp__tail {
    char lines[FSDP__TAIL_LINES][FSDP__TAIL_WIDTH];
    int64_t count;
} fsdp__tail;

/* One of a rank's two outputs. */
typedef struct fsdp__stream {
    int fd;           /* the pipe's end for reading; -1 when it is closed or there is none */
    char prefix[16];  /* "[3] ", or "" */
    fsdp__sink *sink;
    fsdp__tail *tail;
    fsdp__str line;   /* begun, not ended */
} fsdp__stream;

void fsdp__sink_addf(fsdp__sink *s, const char *fmt, ...) FSDP_PRINTF(2, 3);
bool fsdp__sink_busy(const fsdp__sink *s);  /* something waits to be written */
bool fsdp__sink_full(const fsdp__sink *s);  /* so much that ranks must wait */
void fsdp__sink_write(fsdp__sink *s);       /* what can be written now */
void fsdp__sink_free(fsdp__sink *s);

/* Reads what is there. At the end of the stream, ends the last line and closes it. */
void fsdp__stream_read(fsdp__stream *s);
/* Reads what is left, ends the last line, closes. */
void fsdp__stream_finish(fsdp__stream *s);
/* Keeps the last lines of a file. */
void fsdp__tail_read(fsdp__tail *t, const char *path);
/* Adds them to s, each behind `before`; says so when there are none. */
void fsdp__tail_print(const fsdp__tail *t, fsdp__sink *s, const char *before);

/* ---- the job ------------------------------------------------------------- */

typedef struct fsdp__process {
    pid_t pid;      /* also its process group; 0: not running */
    int pidfd;      /* readable when the process has ended; -1: none */
    bool by_signal; /* how it ended, and with which number */
    int code;
    bool forced;    /* it had to be killed by SIGKILL */
    char *log_path; /* NULL: output is piped */
    fsdp__stream streams[2];
    fsdp__tail tail;
} fsdp__process;

typedef enum fsdp__phase {
    FSDP__PHASE_RUN,    /* all is well */
    FSDP__PHASE_SETTLE, /* a rank says that a peer failed; the peer has not been seen to end */
    FSDP__PHASE_STOP,   /* ranks were asked to end */
    FSDP__PHASE_KILL    /* ranks were sent SIGKILL */
} fsdp__phase;

typedef struct fsdp__job {
    const fsdp__launch_options *o;
    fsdp__process *ranks; /* (o->ranks) */
    int running;
    fsdp__sink out, err;
    int deaths;           /* epoll of pidfds: gives ends in the order in time */
    int signals;          /* signalfd */
    int keeper;           /* pipe to the keeper; -1: none */
    pid_t keeper_pid;
    int shm;              /* the ranks' common segment */
    int tty;              /* terminal that is the ranks' standard input; -1: it is none */
    int foreground;       /* rank that was given the terminal; -1: the launcher has it */
    sigset_t old_mask;    /* ranks get it back */
    fsdp__phase phase;
    double deadline;      /* of the phase, on fsdp__now's clock */
    double stop_seconds;  /* how long the phase STOP lasts */
    int peer_first;       /* first rank that blamed a peer; -1: none */
    int64_t oom_before;
    int exit_code;
    bool interrupted;     /* ended by a signal to the launcher */
} fsdp__job;

/* ---- start.c ------------------------------------------------------------- */

/* A process that outlives the launcher by a moment and kills the groups of the ranks then: the
 * parent-death signal reaches a rank only, not what the rank itself has started. */
fsdp_status fsdp__keeper_start(fsdp__job *job);
void fsdp__keeper_tell(fsdp__job *job, pid_t pid, bool runs);
void fsdp__keeper_end(fsdp__job *job);

/* Starts rank r of the file `path` with the environment envp. */
fsdp_status fsdp__start_rank(fsdp__job *job, int r, const char *path, char *const *envp);

/* ---- watch.c ------------------------------------------------------------- */

/* Until all ranks have ended and their output is written. */
void fsdp__watch(fsdp__job *job);
/* SIGKILL to all ranks, and waits for them: the way out when the start fails. */
void fsdp__watch_abandon(fsdp__job *job);

#endif
