/*
 * cmd_train.c - `fsdp train`: a configuration file and options to ranks that train.
 *
 * The configuration and the files that it names are looked at once before any rank is started, so
 * that a mistake is said once and leaves nothing running.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/commands.h"
#include "cli/signals.h"
#include "fsdp/comm.h"
#include "train/effect.h"
#include "train/inputs.h"
#include "train/trainer.h"

static const char help_head[] =
    "usage: fsdp train [-n N] [FILE.yaml] [--section.option VALUE]...\n"
    "       fsdp train --print-defaults\n"
    "\n"
    "Trains a language model whose parameters, gradients and optimizer state are cut\n"
    "over N ranks. FILE has sections of options; each can be given, or overridden, on\n"
    "the command line. Under `fsdp run` leave out -n.\n"
    "\n"
    "  --print-defaults   a configuration file with every option, its meaning and its\n"
    "                     default\n"
    "  --print-options    the same as a page of Markdown\n"
    "  --check            looks at the configuration and the files that it names,\n"
    "                     prints what they come to, and trains nothing\n";

static const char help_tail[] =
    "  -h, --help      this text\n"
    "\n"
    "exit code: 0 done, or the run was finished already; 1 failed; 2 wrong command\n"
    "line; 130 after Ctrl-C, 143 after SIGTERM, with a checkpoint if they are enabled.\n"
    "\n"
    "example: fsdp train -n 4 configs/demo.yaml --training.steps 100\n"
    "\n"
    "options:\n"
    "\n";

/* What was asked for beside training. */
typedef enum request { TRAIN, CHECK, DEFAULTS, MARKDOWN, HELP } request;

/* Takes the words that are no option of a section; *argc shrinks to what is left. */
static request take_request(int *argc, char **argv)
{
    static const struct {
        const char *word;
        request r;
    } words[] = {{"--check", CHECK},
                 {"--print-defaults", DEFAULTS},
                 {"--print-options", MARKDOWN},
                 {"--help", HELP},
                 {"-h", HELP}};
    request r = TRAIN;
    int kept = 1;
    for (int i = 1; i < *argc; i++) {
        size_t k = 0;
        while (k < sizeof words / sizeof *words && strcmp(argv[i], words[k].word) != 0)
            k++;
        if (k < sizeof words / sizeof *words)
            r = words[k].r;
        else
            argv[kept++] = argv[i];
    }
    argv[kept] = NULL;
    *argc = kept;
    return r;
}

/* The file is the one word that is neither an option nor an option's value; it may stand first or
 * last. Its index, 0 if there is none. */
static int find_file(int argc, char **argv)
{
    if (argc > 1 && argv[1][0] != '-') return 1;
    int last = argc - 1;
    if (last < 2 || argv[last][0] == '-') return 0;
    /* Behind an option without "=" it is that option's value. */
    const char *before = argv[last - 1];
    return strncmp(before, "--", 2) != 0 || strchr(before, '=') ? last : 0;
}

static fsdp_status read_config(fsdp__train_config *c, int argc, char **argv)
{
    int file = find_file(argc, argv);
    FSDP_TRY(fsdp__train_config_init(c));
    if (file) FSDP_TRY(fsdp__train_config_load(c, argv[file]));
    int before = file ? file - 1 : argc - 1;
    FSDP_TRY(fsdp__train_config_words(c, before, argv + 1));
    return file ? fsdp__train_config_words(c, argc - 1 - file, argv + file + 1) : FSDP_OK;
}

static int print(const fsdp__train_config *c, request r)
{
    fsdp__str text = {0};
    if (r == DEFAULTS) {
        fsdp__options_yaml(&c->options, &text, true);
    } else if (r == MARKDOWN) {
        fsdp__options_markdown(&c->options, &text);
    } else {
        fsdp__str_add(&text, help_head);
        fsdp__str_add(&text, fsdp__cli_ranks_help);
        fsdp__str_add(&text, help_tail);
        fsdp__options_help(&c->options, &text);
    }
    fputs(fsdp__str_get(&text), stdout);
    fsdp__str_free(&text);
    return 0;
}

/* Configuration and files as `ranks` ranks would find them. */
static fsdp_status check(int argc, char **argv, int ranks, bool say)
{
    fsdp__train_config c;
    fsdp__train_inputs in = {0};
    fsdp__cli_show_warnings(say); /* training says them again */
    fsdp_status s = read_config(&c, argc, argv);
    if (s == FSDP_OK) s = fsdp__train_config_resolve(&c, ranks);
    if (s == FSDP_OK) s = fsdp__train_inputs_open(&c, true, &in);
    if (s == FSDP_OK && say) {
        fsdp__str text = {0};
        fsdp__train_config_text(&c, &text);
        fputs(fsdp__str_get(&text), stdout);
        fsdp__str_free(&text);
        s = fsdp__train_no_effect(&c, &text);
        fputs(fsdp__str_get(&text), stdout);
        fsdp__str_free(&text);
        printf("# %d ranks, %lld training tokens, vocabulary %lld: nothing is wrong with it\n",
               ranks, (long long)in.train->count, (long long)in.model.vocab_size);
    }
    fsdp__train_inputs_close(&in);
    fsdp__train_config_free(&c);
    fsdp__cli_show_warnings(true);
    return s;
}

static fsdp_status train(int argc, char **argv)
{
    fsdp__train_config c;
    fsdp_status s = fsdp_init(NULL, NULL);
    if (s != FSDP_OK) return s;
    s = read_config(&c, argc, argv);
    if (s == FSDP_OK) s = fsdp__train_config_resolve(&c, fsdp_world_size());
    if (s == FSDP_OK) s = fsdp__train(&c, fsdp__signals_stop);
    fsdp__train_config_free(&c);
    return s;
}

int fsdp__cmd_train(int argc, char **argv)
{
    fsdp__cli_ranks ranks;
    int code = fsdp__cli_take_ranks(&argc, argv, false, &ranks);
    if (code) return code;
    request r = take_request(&argc, argv);
    if (r == HELP || r == DEFAULTS || r == MARKDOWN) {
        fsdp__train_config c;
        code = fsdp__train_config_init(&c) == FSDP_OK ? print(&c, r) : fsdp__cli_report("train");
        fsdp__train_config_free(&c);
        return code;
    }
    if (argc < 2) return fsdp__cli_usage("train", "no configuration file was given");
    if (!getenv("RANK")) {
        int n = ranks.n > 0 ? ranks.n : 1;
        if (check(argc, argv, n, r == CHECK) != FSDP_OK) return fsdp__cli_report("train");
    }
    if (r == CHECK) return 0;
    if (fsdp__cli_relaunch(argc, argv, &ranks, &code)) return code;

    int threads = fsdp__cli_threads(&ranks);
    if (threads > 0) (void)fsdp_set_threads(threads);
    fsdp__signals_install();
    fsdp_status s = train(argc, argv);
    if (s == FSDP_INTERRUPTED && fsdp_error() == FSDP_OK) {
        (void)fsdp_finalize();
        return 128 + (fsdp__signals_stop() ? fsdp__signals_stop() : 2);
    }
    /* A peer has said already what went wrong. */
    code = s == FSDP_PEER_FAILED ? fsdp__cli_exit_code(s) : fsdp__cli_report("train");
    (void)fsdp_finalize();
    return code;
}
