/*
 * cmd_parity.c - `fsdp parity`: numbers of another program, computed again and compared.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/commands.h"
#include "fsdp/comm.h"
#include "train/parity.h"

static const char help_head[] =
    "usage: fsdp parity DIR [-n N] [--model FOLDER] [options]\n"
    "\n"
    "Computes the numbers of DIR again on N ranks and prints each largest error beside\n"
    "its bound. DIR holds config.json, model.safetensors, and of these what there is:\n"
    "  expected.safetensors   input_ids, labels, logits, loss, grad.<name>\n"
    "  training.json, train_tokens.safetensors, after20.safetensors\n"
    "With --model, DIR is a run of the model in FOLDER: run.json, tokens.safetensors,\n"
    "full.safetensors. The rows of a batch are dealt to the ranks in blocks.\n"
    "\n"
    "options:\n"
    "  --model FOLDER  the model of the run in DIR\n"
    "  --tolerance K   multiplies all bounds (default 1: those of models of some hundred\n"
    "                  thousand parameters)\n"
    "  --strategy S    full (default), grad_op or none: FULL_SHARD, SHARD_GRAD_OP or\n"
    "                  replicas\n";

static const char help_tail[] =
    "  -h, --help      this text\n"
    "\n"
    "exit code: 0; 1 for an error beyond its bound, or files that cannot be compared;\n"
    "2 for a wrong command line.\n";

typedef struct words {
    const char *dir;
    fsdp__parity_options o;
} words;

static int set(words *w, const char *name, const char *value)
{
    if (!strcmp(name, "--model")) {
        w->o.model = value;
        return 0;
    }
    if (!strcmp(name, "--tolerance")) {
        char *end;
        w->o.tolerance = strtod(value, &end);
        if (end != value && !*end && w->o.tolerance > 0.0) return 0;
        return fsdp__cli_usage("parity", "--tolerance %s: expected a number above 0", value);
    }
    static const char *const names[] = {"full", "grad_op", "none"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(value, names[i])) {
            w->o.strategy = (fsdp__parity_strategy)i;
            return 0;
        }
    return fsdp__cli_usage("parity", "--strategy %s: expected full, grad_op or none", value);
}

static int parse(int argc, char **argv, words *w)
{
    static const char *const names[] = {"--model", "--tolerance", "--strategy"};
    *w = (words){.o.tolerance = 1.0};
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        int k = 0;
        size_t n = 0;
        for (; k < 3; k++) {
            n = strlen(names[k]);
            if (!strncmp(word, names[k], n) && (!word[n] || word[n] == '=')) break;
        }
        if (k == 3) {
            if (word[0] == '-') return fsdp__cli_usage("parity", "unknown option %s", word);
            if (w->dir) return fsdp__cli_usage("parity", "a second folder, %s; expected one", word);
            w->dir = word;
            continue;
        }
        const char *value = word[n] ? word + n + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value) return fsdp__cli_usage("parity", "%s wants a value behind it", names[k]);
        int code = set(w, names[k], value);
        if (code) return code;
    }
    return w->dir ? 0 : fsdp__cli_usage("parity", "no folder was given");
}

static void print(const fsdp__parity_report *r)
{
    printf("%s\n  %-28s %-12s %-10s %s\n", r->title, "", "error", "bound", "at");
    for (int i = 0; i < r->count; i++) {
        const fsdp__parity_check *c = &r->check[i];
        bool beyond = !(c->error <= c->bound);
        printf("  %-28s %-12.2g %-10.2g %s%s\n", c->what, c->error, c->bound, c->at,
               beyond ? "  BEYOND ITS BOUND" : "");
    }
    printf("%s\n", fsdp__parity_passed(r) ? "all within their bounds" : "not within the bounds");
}

int fsdp__cmd_parity(int argc, char **argv)
{
    fsdp__cli_ranks ranks;
    words w;
    int code = fsdp__cli_take_ranks(&argc, argv, false, &ranks);
    if (code) return code;
    if (fsdp__cli_wants_help(argc, argv)) {
        printf("%s%s%s", help_head, fsdp__cli_ranks_help, help_tail);
        return 0;
    }
    code = parse(argc, argv, &w);
    if (code || fsdp__cli_relaunch(argc, argv, &ranks, &code)) return code;
    fsdp__parity_report report = {0};
    fsdp_status s = fsdp_init(&argc, &argv);
    int threads = fsdp__cli_threads(&ranks);
    if (s == FSDP_OK && threads > 0) s = fsdp_set_threads(threads);
    if (s == FSDP_OK) s = fsdp__parity(w.dir, &w.o, &report);
    if (s == FSDP_OK && fsdp_rank() == 0) print(&report);
    /* The report is the same on all ranks: one of them says that it is bad. */
    code = s != FSDP_OK ? fsdp__cli_report("parity")
                        : fsdp_rank() == 0 && !fsdp__parity_passed(&report);
    fsdp_finalize();
    return code;
}
