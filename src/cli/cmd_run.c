/*
 * cmd_run.c - `fsdp run`: the ranks of any program, as torchrun starts them.
 */
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/commands.h"
#include "launch/launch.h"

static const char help_head[] =
    "usage: fsdp run -n N [options] [--] PROGRAM [ARGUMENTS]\n"
    "\n"
    "Starts N ranks of PROGRAM on this machine and watches them. Each finds RANK,\n"
    "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its\n"
    "environment, as under torchrun. When one fails the others are stopped; the one\n"
    "that failed first is named, with its last lines, and its exit code is given on.\n"
    "\n"
    "options:\n";

static const char help_tail[] =
    "  -h, --help      this text\n"
    "\n"
    "exit code: 0; that of the rank that failed first (128 + signal if it was\n"
    "killed); 130 after Ctrl-C, 143 after SIGTERM; 2 for a wrong command line; 127\n"
    "when PROGRAM is not there.\n"
    "\n"
    "example: fsdp run -n 4 ./my_program --steps 100\n";

int fsdp__cmd_run(int argc, char **argv)
{
    fsdp__cli_ranks ranks;
    int code = fsdp__cli_take_ranks(&argc, argv, true, &ranks);
    if (code) return code;
    /* What is left is an option that is not ours, or the program. */
    const char *word = argc > 1 ? argv[1] : "";
    if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) {
        printf("%s%s%s", help_head, fsdp__cli_ranks_help, help_tail);
        return 0;
    }
    if (word[0] == '-') return fsdp__cli_usage("run", "unknown option %s", word);
    if (argc < 2) return fsdp__cli_usage("run", "no program to run was given");
    if (ranks.n == 0)
        return fsdp__cli_usage("run", "the number of ranks is missing: fsdp run -n N %s ...", word);

    fsdp__launch_options o = fsdp__launch_defaults();
    o.ranks = ranks.n;
    o.threads = ranks.threads;
    o.log_dir = ranks.log_dir;
    o.grace = ranks.grace;
    o.argv = argv + 1;
    fsdp_status s = fsdp__launch(&o, &code);
    if (s == FSDP_OK) return code;
    code = fsdp__cli_report("run");
    return s == FSDP_NOT_FOUND ? 127 : code;
}
