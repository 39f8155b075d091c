/*
 * launch.h - starts the ranks of a program on this machine and watches them.
 *
 * Ranks are started by exec, each in a process group of its own, with the
 * environment that torchrun sets. The launcher knows nothing of what they
 * compute: it deals cores, hands every rank one private segment of memory by
 * which they find each other, carries their output, and sees to it that they
 * end together. docs/launching.md says in full what a rank finds and what
 * happens when one fails.
 *
 * The caller must have one thread only: ranks begin as a fork of it.
 */
#ifndef FSDP_LAUNCH_LAUNCH_H
#define FSDP_LAUNCH_LAUNCH_H

#include <stdbool.h>

#include "fsdp/status.h"

enum {
    FSDP__LAUNCH_MAX_RANKS = 256,
    /* A rank ends with this code when its own work was fine and a peer's failure ended it. The
     * launcher does not take such a rank for the cause. (EX_TEMPFAIL of sysexits.h.) */
    FSDP__EXIT_PEER = 75
};

typedef struct fsdp__launch_options {
    int ranks;           /* 1..FSDP__LAUNCH_MAX_RANKS */
    int threads;         /* OMP_NUM_THREADS of each rank; 0: the user's, else cores are dealt */
    char *const *argv;   /* program and its arguments, ends with NULL; not changed */
    const char *program; /* file to run; NULL: argv[0], looked for in PATH */
    const char *log_dir; /* each rank's output to log_dir/rank-R.log; NULL: to out and err */
    double grace;        /* seconds that ranks get to end after SIGINT or SIGTERM */
    bool rank0_plain;    /* rank 0 without a prefix, and straight to a terminal */
    bool quiet;          /* does not print how cores are dealt */
    int out_fd, err_fd;  /* where lines go: 1 and 2 */
} fsdp__launch_options;

/* One rank, five seconds of grace, output to 1 and 2. */
fsdp__launch_options fsdp__launch_defaults(void);

/* Runs the job to its end. FSDP_OK: it was started, and *exit_code is 0, the code of the rank that
 * failed first (128 + signal when it was killed), or 128 + signal when the launcher itself was
 * asked to stop. Any other status: nothing was left running; the error says why. */
fsdp_status fsdp__launch(const fsdp__launch_options *options, int *exit_code);

/* Cores that this process may use: its affinity mask, bounded by the quota of its control group.
 * At least 1. */
int fsdp__launch_cores(void);

#endif
