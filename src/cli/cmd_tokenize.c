/*
 * cmd_tokenize.c - `fsdp tokenize`: text on standard input to token ids, and
 * back.
 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "cli/cli.h"
#include "cli/commands.h"
#include "data/tokenizer.h"

static const char help[] =
    "usage: fsdp tokenize FOLDER [--no-special]\n"
    "       fsdp tokenize FOLDER --decode [--no-special]\n"
    "\n"
    "Reads a text from standard input and prints its token ids, separated by blanks.\n"
    "FOLDER holds a tokenizer.json (its path may be given as well). The text is taken\n"
    "byte for byte: a newline at its end is part of it. Special tokens in the text\n"
    "are found; what is not UTF-8 counts as U+FFFD.\n"
    "\n"
    "options:\n"
    "  --decode        reads ids, separated by blanks or newlines, and prints their\n"
    "                  text, without a newline of its own\n"
    "  --no-special    does not add the tokens that the tokenizer's template puts\n"
    "                  around a text; with --decode, leaves special tokens out\n"
    "  -h, --help      this text\n"
    "\n"
    "example: printf 'Hello, world!' | fsdp tokenize runs/demo/hf\n";

static fsdp_status read_input(fsdp__str *out)
{
    char buffer[1 << 16];
    size_t n;
    while ((n = fread(buffer, 1, sizeof buffer, stdin)) > 0)
        fsdp__str_add_n(out, buffer, n);
    if (ferror(stdin)) return fsdp__fail_errno(FSDP_IO_ERROR, "cannot read standard input");
    return out->failed ? fsdp__fail_memory("standard input", out->len) : FSDP_OK;
}

static fsdp_status print_ids(fsdp_tokenizer *t, const fsdp__str *text, bool special)
{
    fsdp__ids ids = {0};
    fsdp_status s = fsdp__tokenizer_encode(t, fsdp__str_get(text), text->len, special, &ids);
    for (int64_t i = 0; i < ids.count && s == FSDP_OK; i++)
        printf("%s%d", i ? " " : "", ids.items[i]);
    if (s == FSDP_OK) putchar('\n');
    free(ids.items);
    return s;
}

static fsdp_status parse_ids(const fsdp__str *text, fsdp__ids *out)
{
    static const char blanks[] = " \t\r\n";
    const char *p = fsdp__str_get(text), *end = p + text->len;
    for (int64_t k = 1;; k++) {
        p += strspn(p, blanks);
        if (p == end) return FSDP_OK;
        size_t n = strcspn(p, blanks);
        char *stop;
        errno = 0;
        long id = strtol(p, &stop, 10);
        if (stop != p + n || n == 0 || errno || id < 0 || id > INT32_MAX)
            return fsdp__fail(
                FSDP_INVALID_DATA,
                "word %lld of standard input is \"%.*s\"; expected token ids, numbers "
                "from 0 to 2147483647 with blanks between",
                (long long)k, n < 40 ? (int)n : 40, p);
        FSDP_TRY(fsdp__ids_add(out, &(int32_t){(int32_t)id}, 1));
        p += n;
    }
}

/* Decoding skips an id without a token, as other libraries do; a user is told. */
static fsdp_status check_ids(const fsdp_tokenizer *t, const fsdp__ids *ids)
{
    int64_t size = fsdp_tokenizer_vocab_size(t);
    for (int64_t i = 0; i < ids->count; i++)
        if (ids->items[i] >= size)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "word %lld of standard input is %d, which is outside the vocabulary "
                              "of %lld (ids 0 to %lld); decode with the tokenizer that made it",
                              (long long)i + 1, (int)ids->items[i], (long long)size,
                              (long long)size - 1);
    return FSDP_OK;
}

static fsdp_status print_text(fsdp_tokenizer *t, const fsdp__str *input, bool special)
{
    fsdp__ids ids = {0};
    size_t n = 0;
    char *text = NULL;
    fsdp_status s = parse_ids(input, &ids);
    if (s == FSDP_OK) s = check_ids(t, &ids);
    if (s == FSDP_OK) {
        text = fsdp_tokenizer_decode(t, ids.items, ids.count, !special, &n);
        s = text ? FSDP_OK : fsdp_error();
    }
    /* A failed write is seen by the program's end. */
    if (text) fwrite(text, 1, n, stdout);
    free(text);
    free(ids.items);
    return s;
}

int fsdp__cmd_tokenize(int argc, char **argv)
{
    const char *folder = NULL;
    bool decode = false, special = true;
    if (fsdp__cli_wants_help(argc, argv)) {
        fputs(help, stdout);
        return 0;
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--decode") == 0)
            decode = true;
        else if (strcmp(argv[i], "--no-special") == 0)
            special = false;
        else if (argv[i][0] == '-')
            return fsdp__cli_usage("tokenize", "unknown option %s", argv[i]);
        else if (folder)
            return fsdp__cli_usage("tokenize", "%s: one folder is expected, %s was given before",
                                   argv[i], folder);
        else
            folder = argv[i];
    }
    if (!folder) return fsdp__cli_usage("tokenize", "no folder with a tokenizer.json was given");

    fsdp__str input = {0};
    fsdp_tokenizer *t = fsdp_tokenizer_load(folder);
    if (t && read_input(&input) == FSDP_OK) {
        if (decode)
            print_text(t, &input, special);
        else
            print_ids(t, &input, special);
    }
    fsdp__str_free(&input);
    fsdp_tokenizer_free(t);
    return fsdp__cli_report("tokenize");
}
