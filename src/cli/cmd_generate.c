/*
 * cmd_generate.c - `fsdp generate`: a Hugging Face folder continues a prompt.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "cli/cli.h"
#include "cli/commands.h"
#include "cli/signals.h"
#include "format/file.h"
#include "fsdp/data.h"
#include "fsdp/hf.h"
#include "generate/generate.h"
#include "hf/config.h"
#include "hf/folder.h"

static const char help[] =
    "usage: fsdp generate FOLDER --prompt TEXT [options]\n"
    "\n"
    "Prints how the model of a Hugging Face folder continues a text.\n"
    "\n"
    "options:\n"
    "  --prompt TEXT       the text to continue\n"
    "  --adapter DIR       adapters of the model, as peft and `fsdp train` (lora) save them\n"
    "  -n, --tokens N      new tokens at most (default: 100, or what the model's longest\n"
    "                      sequence leaves)\n"
    "  --temperature X     above 0: draws tokens, with logits divided by X; 0 (default):\n"
    "                      always the likeliest token\n"
    "  --top-k K           draws from the K likeliest tokens only; 0 (default): all\n"
    "  --top-p P           draws from the likeliest tokens that have probability P\n"
    "                      together; 1 (default): all\n"
    "  --seed S            of the draws; 0 by default. The same seed gives the same text\n"
    "  --threads T         compute threads (default: OMP_NUM_THREADS, else all cores)\n"
    "  -h, --help          this text\n"
    "\n"
    "example: fsdp generate outputs/hf --prompt 'This License' --tokens 40\n";

typedef struct request {
    const char *folder, *prompt, *adapter;
    fsdp__generate_options o;
    int tokens_given, threads;
} request;

/* ---- the command line -------------------------------------------------------------------- */

static int whole(const char *name, const char *text, double max, int64_t *out)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    *out = v;
    if (*text && !*end && !errno && v >= 0 && (double)v <= max) return 0;
    return fsdp__cli_usage("generate", "%s %s: expected a whole number of at least 0", name, text);
}

static int real(const char *name, const char *text, double max, double *out)
{
    char *end;
    *out = strtod(text, &end);
    if (*text && !*end && *out >= 0 && *out <= max) return 0;
    return fsdp__cli_usage("generate", "%s %s: expected a number from 0 to %g", name, text, max);
}

static int set(request *r, const char *name, const char *v)
{
    int64_t n = 0;
    int code = 0;
    if (strcmp(name, "--prompt") == 0) {
        r->prompt = v;
    } else if (strcmp(name, "--adapter") == 0) {
        r->adapter = v;
    } else if (strcmp(name, "-n") == 0 || strcmp(name, "--tokens") == 0) {
        r->tokens_given = 1;
        code = whole(name, v, 1e9, &r->o.tokens);
    } else if (strcmp(name, "--temperature") == 0) {
        code = real(name, v, 1e6, &r->o.temperature);
    } else if (strcmp(name, "--top-k") == 0) {
        code = whole(name, v, 1e9, &r->o.top_k);
    } else if (strcmp(name, "--top-p") == 0) {
        code = real(name, v, 1, &r->o.top_p);
        if (code == 0 && r->o.top_p == 0)
            code =
                fsdp__cli_usage("generate", "--top-p 0 leaves no token; expected above 0 up to 1");
    } else if (strcmp(name, "--seed") == 0) {
        code = whole(name, v, 9e18, &n);
        r->o.seed = (uint64_t)n;
    } else if (strcmp(name, "--threads") == 0) {
        code = whole(name, v, 4096, &n);
        r->threads = (int)n;
    } else {
        code = fsdp__cli_usage("generate", "unknown option %s", name);
    }
    return code;
}

static int parse(int argc, char **argv, request *r)
{
    for (int i = 1; i < argc; i++) {
        char *word = argv[i];
        if (word[0] != '-') {
            if (r->folder)
                return fsdp__cli_usage("generate", "two folders: %s and %s", r->folder, word);
            r->folder = word;
            continue;
        }
        char *equals = strncmp(word, "--", 2) == 0 ? strchr(word, '=') : NULL;
        char *name = fsdp__strndup(word, equals ? (size_t)(equals - word) : strlen(word));
        if (!name) return fsdp__cli_report("generate");
        int code = 0;
        if (!equals && i + 1 >= argc)
            code = fsdp__cli_usage("generate", "%s wants a value behind it", name);
        else
            code = set(r, name, equals ? equals + 1 : argv[++i]);
        free(name);
        if (code) return code;
    }
    if (!r->folder) return fsdp__cli_usage("generate", "no folder of a model was given");
    if (!r->prompt) return fsdp__cli_usage("generate", "--prompt is missing");
    return 0;
}

/* ---- printing while it grows ---------------------------------------------------------------- */

/* Decoding one token alone would lose blanks and halves of characters, so all are decoded each time
 * and what is new is printed. */
typedef struct printer {
    fsdp_tokenizer *tokenizer;
    int32_t *ids;
    int64_t n, cap;
    size_t printed; /* bytes of the text of ids */
} printer;

/* Bytes of text without an unfinished character at its end, which decodes to U+FFFD. */
static size_t settled(const char *text, size_t len)
{
    while (len >= 3 && memcmp(text + len - 3, "\xEF\xBF\xBD", 3) == 0)
        len -= 3;
    return len;
}

static fsdp_status print_new(printer *p, int all)
{
    size_t len;
    char *text = fsdp_tokenizer_decode(p->tokenizer, p->ids, p->n, 1, &len);
    if (!text) return fsdp_error();
    if (!all) len = settled(text, len);
    if (len > p->printed) {
        fwrite(text + p->printed, 1, len - p->printed, stdout);
        fflush(stdout);
        p->printed = len;
    }
    free(text);
    return FSDP_OK;
}

static int take(void *arg, int64_t token)
{
    printer *p = arg;
    if (FSDP__GROW(p->ids, p->cap, p->n + 1, "a generated text") != FSDP_OK) return 1;
    p->ids[p->n++] = (int32_t)token;
    return print_new(p, 0) != FSDP_OK || fsdp__signals_stop() != 0;
}

/* ---- the work ---------------------------------------------------------------------------------
 */

static fsdp_status load(const request *r, fsdp_model_config *c, fsdp_module **model,
                        fsdp_tokenizer **tokenizer)
{
    if (!fsdp__dir_exists(r->folder))
        return fsdp__fail(FSDP_NOT_FOUND, "there is no folder '%s'", r->folder);
    FSDP_TRY(fsdp__hf_folder_config(r->folder, c));
    if (!(*tokenizer = fsdp_tokenizer_load(r->folder))) return fsdp_error();
    if (!(*model = fsdp_model_create(c))) return fsdp_error();
    if (r->adapter) FSDP_TRY(fsdp_lora_apply_folder(*model, r->adapter));
    FSDP_TRY(fsdp__hf_load_weights(*model, r->folder));
    if (!r->adapter) return FSDP_OK;
    FSDP_TRY(fsdp_lora_load(*model, r->adapter));
    return fsdp_lora_merge(*model); /* once, instead of beside each token */
}

static fsdp_status run(request *r)
{
    fsdp_model_config c;
    fsdp_module *model = NULL;
    printer p = {0};
    int64_t prompt;
    fsdp_status s;
    FSDP_GO(load(r, &c, &model, &p.tokenizer));
    FSDP_GO(fsdp_tokenizer_encode(p.tokenizer, r->prompt, strlen(r->prompt), 1, &p.ids, &p.n));
    prompt = p.cap = p.n;
    if (prompt == 0)
        FSDP_GO(fsdp__fail(FSDP_INVALID_ARGUMENT,
                           "the prompt has no tokens; give some text with --prompt"));
    if (!r->tokens_given && prompt + r->o.tokens > c.max_position_embeddings)
        r->o.tokens = prompt < c.max_position_embeddings ? c.max_position_embeddings - prompt : 1;
    size_t len;
    char *text = fsdp_tokenizer_decode(p.tokenizer, p.ids, p.n, 1, &len);
    if (!text) FSDP_GO(fsdp_error());
    free(text);
    p.printed = len;
    int32_t *ids = fsdp__calloc((size_t)prompt, sizeof *ids, "a prompt"); /* p.ids moves */
    if (!ids) FSDP_GO(fsdp_error());
    memcpy(ids, p.ids, (size_t)prompt * sizeof *ids);
    s = fsdp__generate(model, &c, ids, prompt, &r->o, take, &p);
    free(ids);
    if (s == FSDP_OK) s = print_new(&p, 1);
    putchar('\n');
done:
    free(p.ids);
    fsdp_tokenizer_free(p.tokenizer);
    fsdp_module_free(model);
    return s;
}

int fsdp__cmd_generate(int argc, char **argv)
{
    if (fsdp__cli_wants_help(argc, argv)) {
        fputs(help, stdout);
        return 0;
    }
    request r = {.o = fsdp__generate_defaults()};
    int code = parse(argc, argv, &r);
    if (code) return code;
    fsdp__cli_ranks ranks = {.threads = r.threads};
    int threads = fsdp__cli_threads(&ranks);
    if (threads > 0) (void)fsdp_set_threads(threads);
    fsdp__signals_install();
    fsdp_status s = run(&r);
    if (s != FSDP_OK) return fsdp__cli_report("generate");
    return fsdp__signals_stop() ? 128 + fsdp__signals_stop() : 0;
}
