/*
 * cli.h - what the sub-commands share: ranks on this machine, exit codes,
 * reports of errors.
 */
#ifndef FSDP_CLI_CLI_H
#define FSDP_CLI_CLI_H

#include <stdbool.h>

#include "fsdp/status.h"

/* ---- ranks on this machine ------------------------------------------------ */

typedef struct fsdp__cli_ranks {
    int n;         /* -n N; 0: not given */
    int threads;   /* --threads T; 0: dealt */
    char *log_dir; /* --log-dir D; NULL: none. Points into argv */
    double grace;  /* --grace S */
} fsdp__cli_ranks;

/* Lines of --help for the options below, to be printed by each command that takes them. */
extern const char fsdp__cli_ranks_help[];

/* Takes -n N, -nN, --threads, --log-dir and --grace (also as --name=value) out of argv[1..] and
 * shortens *argc. With stop, it ends at the first word that is no option, or behind "--", for a
 * command whose other words are another program's. 0, or 2 when a value is wrong; that is printed,
 * with argv[0] as the command's name. */
int fsdp__cli_take_ranks(int *argc, char **argv, bool stop, fsdp__cli_ranks *out);

/* True: this process is not a rank yet and r->n > 1 ranks of this program with these arguments
 * (from which fsdp__cli_take_ranks has removed its own) were started, and have ended with
 * *exit_code; or -n contradicts WORLD_SIZE of the job that this is a rank of: printed, 2. False: go
 * on here, as the only rank or as one of those that a launcher started.
 * Rank 0's output carries no prefix and goes straight to a terminal. Call it before anything that
 * may start a thread. */
bool fsdp__cli_relaunch(int argc, char **argv, const fsdp__cli_ranks *r, int *exit_code);

/* Threads for a process that goes on as the only rank, as the launcher would have dealt them:
 * --threads, else 0 when OMP_NUM_THREADS decides, else the cores that it may use. 0 when this is a
 * rank of a launcher: that has set them. */
int fsdp__cli_threads(const fsdp__cli_ranks *r);

/* ---- errors --------------------------------------------------------------- */

/* Exit code of a status: 0, 75 for a peer's failure, 130 when asked to stop, else 1. */
int fsdp__cli_exit_code(fsdp_status s);

/* Prints the kept error to stderr as "fsdp <command>: text" and gives its exit code; 0 and nothing
 * printed when there is none. */
int fsdp__cli_report(const char *command);

/* Shows the library's warnings on stderr, as "fsdp: warning: text", by rank 0 alone; or stops it.
 */
void fsdp__cli_show_warnings(bool show);

/* Prints "fsdp <command>: ..." and where help is found to stderr; 2. */
int fsdp__cli_usage(const char *command, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* True if the words hold -h or --help before a "--". */
bool fsdp__cli_wants_help(int argc, char **argv);

#endif
