/*
 * cmd_bench.c - `fsdp bench`: speed of the whole step and of its pieces, each
 * beside what the machine could do at best.
 */
#include <stdio.h>
#include <string.h>

#include "cli/bench.h"
#include "cli/cli.h"
#include "cli/commands.h"
#include "fsdp/context.h"

static const char help_head[] =
    "usage: fsdp bench WHAT [-n N] [options]\n"
    "\n"
    "  step      whole training steps of a Llama on random tokens, one JSON line:\n"
    "              --model tiny|small|135m|1b   --strategy full|grad_op|none\n"
    "              --dtype f32|bf16   --batch B (rows a rank)   --seq T   --steps S\n"
    "              --floor 0|1 (measure what a step cannot do without; 1)\n"
    "  gemm      the matrix products of such a step, a line a shape (same options)\n"
    "  kernels   the other kernels of a step, each with its floor\n"
    "  recompute such steps in the modes of activation_checkpoint, in turn (same options)\n"
    "  comm      collectives against memcpy of the same bytes\n"
    "\n"
    "options:\n";

int fsdp__cmd_bench(int argc, char **argv)
{
    fsdp__cli_ranks ranks;
    int code = fsdp__cli_take_ranks(&argc, argv, false, &ranks);
    if (code) return code;
    if (fsdp__cli_wants_help(argc, argv)) {
        printf("%s%s  -h, --help      this text\n", help_head, fsdp__cli_ranks_help);
        return 0;
    }
    if (argc < 2) return fsdp__cli_usage("bench", "what to measure is missing");
    if (fsdp__cli_relaunch(argc, argv, &ranks, &code)) return code;
    int threads = fsdp__cli_threads(&ranks);
    if (threads) fsdp_set_threads(threads);
    const char *what = argv[1];
    if (!strcmp(what, "step")) return fsdp__bench_step(argc - 1, argv + 1);
    if (!strcmp(what, "gemm")) return fsdp__bench_gemms(argc - 1, argv + 1);
    if (!strcmp(what, "kernels")) return fsdp__bench_kernels(argc - 1, argv + 1);
    if (!strcmp(what, "recompute")) return fsdp__bench_recompute(argc - 1, argv + 1);
    if (!strcmp(what, "comm")) return fsdp__bench_comm(argc - 1, argv + 1);
    return fsdp__cli_usage("bench", "unknown: %s; expected step, gemm, kernels, recompute or comm",
                           what);
}
