/*
 * main.c - the program: a table of sub-commands, and what is said when none
 * of them is meant.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cpu.h"
#include "base/str.h"
#include "cli/cli.h"
#include "cli/commands.h"

typedef struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *help; /* one line */
} command;

static const command commands[] = {
    {"train", fsdp__cmd_train, "train a language model cut over the ranks"},
    {"generate", fsdp__cmd_generate, "continue a text with a model"},
    {"run", fsdp__cmd_run, "start N ranks of any program on this machine"},
    {"prepare", fsdp__cmd_prepare, "make token files and a tokenizer from files of text"},
    {"tokenize", fsdp__cmd_tokenize, "text on standard input to token ids, and back"},
    {"parity", fsdp__cmd_parity, "compute the numbers of another program again and compare"},
    {"bench", fsdp__cmd_bench, "measure steps, kernels and collectives beside their floors"},
};

enum { COMMAND_COUNT = sizeof commands / sizeof *commands };

static const command *find(const char *name)
{
    for (int i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(commands[i].name, name) == 0) return &commands[i];
    return NULL;
}

static int print_help(void)
{
    printf("fsdp %s trains language models that do not fit one device: parameters, gradients\n"
           "and optimizer state are cut over the ranks.\n"
           "\n"
           "usage: fsdp COMMAND [arguments]\n"
           "\n",
           FSDP_VERSION);
    for (int i = 0; i < COMMAND_COUNT; i++)
        printf("  %-10s %s\n", commands[i].name, commands[i].help);
    printf("  %-10s %s\n", "help", "this text; `fsdp help COMMAND` is `fsdp COMMAND --help`");
    printf("  %-10s %s\n", "version", "the version");
    return 0;
}

static int unknown(const char *name)
{
    const char *nearest = NULL;
    int least = 0;
    for (int i = 0; i < COMMAND_COUNT; i++) {
        int d = fsdp__edit_distance(name, commands[i].name);
        if (!nearest || d < least) {
            nearest = commands[i].name;
            least = d;
        }
    }
    fprintf(stderr, "fsdp: unknown command '%s'", name);
    /* A name that shares next to nothing with it would only confuse. */
    if (nearest && least <= (int)strlen(nearest) / 2)
        fprintf(stderr, "; did you mean '%s'?", nearest);
    fprintf(stderr, "\nfsdp --help lists the commands\n");
    return 2;
}

/* Descriptors 0 to 2 must be taken: a file opened as number 1 would receive what is printed. */
static void open_standard_files(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY) < 0)
            _exit(1);
}

/* Output that could not be written (a full disk) is a failure, even when all else went well. */
static int finish(int code)
{
    if (fflush(stdout) != 0 || ferror(stdout)) {
        perror("fsdp: cannot write the output");
        return code ? code : 1;
    }
    return code;
}

/* The compute threads of OpenMP's pool spin while they wait, unless told otherwise before the
 * library is loaded: on a machine that does anything else, each loop then waits for a tick of the
 * scheduler. A user's own setting stands. Where starting again fails, spinning is merely slow. */
static void wait_without_spinning(char **argv)
{
    if (getenv("OMP_WAIT_POLICY") || setenv("OMP_WAIT_POLICY", "PASSIVE", 1) != 0) return;
    execv("/proc/self/exe", argv);
}

int main(int argc, char **argv)
{
    wait_without_spinning(argv);
    open_standard_files();
    if (argc < 2) {
        fprintf(stderr, "fsdp: no command given\nfsdp --help lists the commands\n");
        return 2;
    }
    const char *name = argv[1];
    /* A limit of file size is then an error of the write, with its text; programs that `fsdp run`
     * starts keep their own ways. */
    if (strcmp(name, "run") != 0) signal(SIGXFSZ, SIG_IGN);
    if (strcmp(name, "-h") == 0 || strcmp(name, "--help") == 0) return finish(print_help());
    if (strcmp(name, "-V") == 0 || strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) {
        printf("fsdp %s\n", FSDP_VERSION);
        return finish(0);
    }
    if (strcmp(name, "help") == 0) {
        if (argc < 3) return finish(print_help());
        const command *c = find(argv[2]);
        char flag[] = "--help";
        char *words[] = {argv[2], flag, NULL};
        return c ? finish(c->run(2, words)) : unknown(argv[2]);
    }
    const command *c = find(name);
    if (!c) return unknown(name);
    if (fsdp__cpu_check() != FSDP_OK) return fsdp__cli_report(name);
    fsdp__cli_show_warnings(true);
    return finish(c->run(argc - 1, argv + 1));
}
