/*
 * cmd_prepare.c - `fsdp prepare`: files of text to token files.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cli/cli.h"
#include "cli/commands.h"
#include "data/prepare.h"

static const char help[] =
    "usage: fsdp prepare --out DIR (--train-tokenizer N | --tokenizer FOLDER)\n"
    "                    [--validation PATTERN]... [--end-token TOKEN] PATH...\n"
    "\n"
    "Makes token files from all text files that the paths are or hold: DIR gets\n"
    "train.tokens, validation.tokens, tokenizer.json, tokenizer_config.json and\n"
    "prepare.json, the list of files. Links are followed and no file is taken twice;\n"
    "names that begin with a dot, empty files and files with NUL bytes are left out.\n"
    "Each file becomes one document, closed by the end token.\n"
    "\n"
    "options:\n"
    "  --out DIR               where the results go; made if it is not there\n"
    "  --train-tokenizer N     trains a byte-level BPE of N tokens on the training\n"
    "                          files (at least 257)\n"
    "  --tokenizer FOLDER      uses the tokenizer.json there\n"
    "  --validation PATTERN    files whose path or name fits (* ? [..]; also the name\n"
    "                          of a link to it) are for validation and not trained on;\n"
    "                          may be given several times\n"
    "  --end-token TOKEN       closes documents; <|endoftext|> by default, or what a\n"
    "                          given tokenizer ends texts with\n"
    "  -h, --help              this text\n"
    "\n"
    "example: fsdp prepare --out data --train-tokenizer 4096 --validation 'GFDL*' \\\n"
    "             /usr/share/common-licenses\n";

/* The value of option `name` at argv[*i], as the next word or behind "="; NULL if argv[*i] is
 * another word. A missing value gives "". */
static const char *option_value(int argc, char **argv, int *i, const char *name)
{
    size_t n = strlen(name);
    if (strncmp(argv[*i], name, n) != 0) return NULL;
    if (argv[*i][n] == '=') return argv[*i] + n + 1;
    if (argv[*i][n] != 0) return NULL;
    return *i + 1 < argc ? argv[++*i] : "";
}

typedef struct words {
    const char **paths, **validation; /* (argc) each */
} words;

/* One option with its value, or a path; 0, or 2 after it was printed. */
static int take_word(int argc, char **argv, int *i, words *w, fsdp__prepare_options *o)
{
    const char *word = argv[*i], *v;
    if ((v = option_value(argc, argv, i, "--out"))) {
        o->out = v;
    } else if ((v = option_value(argc, argv, i, "--tokenizer"))) {
        o->tokenizer = v;
    } else if ((v = option_value(argc, argv, i, "--end-token"))) {
        o->end_token = v;
    } else if ((v = option_value(argc, argv, i, "--validation"))) {
        w->validation[o->validation_count++] = v;
    } else if ((v = option_value(argc, argv, i, "--train-tokenizer"))) {
        char *stop;
        errno = 0;
        o->train_tokenizer = strtoll(v, &stop, 10);
        if (*v == 0 || *stop || errno || o->train_tokenizer < 257)
            return fsdp__cli_usage(
                "prepare",
                "--train-tokenizer %s: expected a number of tokens, at least 257 "
                "(256 bytes and the end token)",
                v);
    } else if (word[0] == '-') {
        return fsdp__cli_usage("prepare", "unknown option %s", word);
    } else {
        w->paths[o->path_count++] = word;
        return 0;
    }
    return *v ? 0 : fsdp__cli_usage("prepare", "%s wants a value behind it", word);
}

static void print_set(const char *name, const fsdp__prepare_set *s, const char *out)
{
    printf("%-10s  %lld files, %lld bytes, %lld tokens: %s/%s.tokens\n", name, (long long)s->files,
           (long long)s->bytes, (long long)s->tokens, out, name);
}

static int run(const fsdp__prepare_options *o)
{
    fsdp__prepare_report r;
    if (fsdp__prepare(o, &r) != FSDP_OK) return fsdp__cli_report("prepare");
    printf("tokenizer   %lld tokens, %s: %s/tokenizer.json\n", (long long)r.vocab_size,
           o->tokenizer ? "given" : "trained", o->out);
    print_set("train", &r.train, o->out);
    if (r.validation.files > 0) print_set("validation", &r.validation, o->out);
    if (r.repeated > 0)
        printf("%lld names lead to files that were taken already\n", (long long)r.repeated);
    if (r.no_text > 0)
        printf("%lld files are empty or no text and were left out\n", (long long)r.no_text);
    return 0;
}

int fsdp__cmd_prepare(int argc, char **argv)
{
    fsdp__prepare_options o = {0};
    int code = 0;
    if (fsdp__cli_wants_help(argc, argv)) {
        fputs(help, stdout);
        return 0;
    }
    words w = {fsdp__calloc((size_t)argc, sizeof *w.paths, "arguments"),
               fsdp__calloc((size_t)argc, sizeof *w.validation, "arguments")};
    if (!w.paths || !w.validation) code = fsdp__cli_report("prepare");
    for (int i = 1; i < argc && code == 0; i++)
        code = take_word(argc, argv, &i, &w, &o);
    o.paths = w.paths;
    o.validation = w.validation;
    if (code == 0 && !o.out)
        code = fsdp__cli_usage("prepare", "the folder for the results is missing: --out DIR");
    if (code == 0 && (o.tokenizer != NULL) == (o.train_tokenizer > 0))
        code = fsdp__cli_usage("prepare", "give either --train-tokenizer N or --tokenizer FOLDER");
    if (code == 0 && o.path_count == 0)
        code = fsdp__cli_usage("prepare", "no files or folders with text were given");
    if (code == 0) code = run(&o);
    free(w.paths);
    free(w.validation);
    return code;
}
