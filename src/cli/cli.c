/*
 * cli.c - what the sub-commands share. See cli.h.
 */
#include "cli/cli.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fsdp/context.h"
#include "launch/launch.h"

/* ---- errors --------------------------------------------------------------- */

int fsdp__cli_exit_code(fsdp_status s)
{
    switch (s) {
    case FSDP_OK:
        return 0;
    case FSDP_PEER_FAILED:
    case FSDP_PEER_DIED:
        return FSDP__EXIT_PEER;
    case FSDP_INTERRUPTED:
        return 130;
    default:
        return 1;
    }
}

int fsdp__cli_report(const char *command)
{
    fsdp_status s = fsdp_error();
    if (s != FSDP_OK) {
        fflush(stdout);
        fprintf(stderr, "fsdp %s: %s\n", command, fsdp_error_text());
    }
    return fsdp__cli_exit_code(s);
}

static void print_warning(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    if (fsdp_rank() == 0) fprintf(stderr, "fsdp: warning: %s\n", line);
}

void fsdp__cli_show_warnings(bool show)
{
    fsdp_log_set(show ? print_warning : NULL, NULL, 1);
}

int fsdp__cli_usage(const char *command, const char *fmt, ...)
{
    va_list args;
    fflush(stdout);
    fprintf(stderr, "fsdp %s: ", command);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "\nfsdp %s --help says what it takes\n", command);
    return 2;
}

bool fsdp__cli_wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) return true;
    return false;
}

/* ---- options of ranks ----------------------------------------------------- */

const char fsdp__cli_ranks_help[] =
    "  -n N            number of ranks on this machine, 1 to 256\n"
    "  --threads T     threads of each rank (default: OMP_NUM_THREADS, else the cores\n"
    "                  that the process may use, divided by N, at least 1)\n"
    "  --log-dir DIR   each rank's output to DIR/rank-R.log, not to the screen\n"
    "  --grace S       seconds that ranks get to end after Ctrl-C or SIGTERM (default\n"
    "                  5)\n";

/* A whole number in [min, max]. */
static bool parse_int(const char *text, int min, int max, int *out)
{
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (errno || end == text || *end || v < min || v > max) return false;
    *out = (int)v;
    return true;
}

static bool parse_seconds(const char *text, double *out)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v >= 0 && v <= 86400)) return false;
    *out = v;
    return true;
}

enum { OPT_N, OPT_THREADS, OPT_LOG_DIR, OPT_GRACE, OPT_COUNT };
static const char *const option_names[OPT_COUNT] = {"-n", "--threads", "--log-dir", "--grace"};

/* Which option the word is. *value is the text that follows in the same word ("-n4",
 * "--threads=2"), or NULL when the value is the next word. OPT_COUNT: none of ours. */
static int which(const char *word, char **value)
{
    for (int k = 0; k < OPT_COUNT; k++) {
        size_t n = strlen(option_names[k]);
        if (strncmp(word, option_names[k], n) != 0) continue;
        const char *rest = word + n;
        *value = NULL;
        if (*rest == 0) return k;
        if (*rest == '=')
            rest++;
        else if (k != OPT_N || *rest < '0' || *rest > '9')
            continue;
        *value = (char *)(size_t)rest;
        return k;
    }
    return OPT_COUNT;
}

static int set_option(const char *command, int k, char *value, fsdp__cli_ranks *out)
{
    switch (k) {
    case OPT_N:
        if (parse_int(value, 1, FSDP__LAUNCH_MAX_RANKS, &out->n)) return 0;
        return fsdp__cli_usage(command, "-n %s: expected a number of ranks from 1 to %d", value,
                               FSDP__LAUNCH_MAX_RANKS);
    case OPT_THREADS:
        if (parse_int(value, 1, 4096, &out->threads)) return 0;
        return fsdp__cli_usage(command, "--threads %s: expected a number of threads from 1 to 4096",
                               value);
    case OPT_GRACE:
        if (parse_seconds(value, &out->grace)) return 0;
        return fsdp__cli_usage(command, "--grace %s: expected seconds from 0 to 86400", value);
    default:
        if (*value) {
            out->log_dir = value;
            return 0;
        }
        return fsdp__cli_usage(command, "--log-dir: expected the name of a folder, found nothing");
    }
}

int fsdp__cli_take_ranks(int *argc, char **argv, bool stop, fsdp__cli_ranks *out)
{
    int kept = 1, i = 1, n = *argc;
    *out = (fsdp__cli_ranks){.grace = fsdp__launch_defaults().grace};
    while (i < n) {
        char *value = NULL;
        int k = which(argv[i], &value);
        bool end = strcmp(argv[i], "--") == 0;
        if (end || (stop && k == OPT_COUNT && argv[i][0] != '-')) {
            if (end && stop) i++;
            break;
        }
        if (k == OPT_COUNT) {
            argv[kept++] = argv[i++];
            continue;
        }
        if (!value && i + 1 >= n)
            return fsdp__cli_usage(argv[0], "%s wants a value behind it", option_names[k]);
        if (!value) value = argv[++i];
        i++;
        int code = set_option(argv[0], k, value, out);
        if (code) return code;
    }
    while (i < n)
        argv[kept++] = argv[i++];
    argv[kept] = NULL;
    *argc = kept;
    return 0;
}

/* ---- this program as ranks ------------------------------------------------ */

/* The file of this program; its name if that still leads to the same file, so that ps shows it. */
static const char *own_path(char *buffer, size_t size)
{
    struct stat a, b;
    ssize_t n = readlink("/proc/self/exe", buffer, size - 1);
    if (n > 0) {
        buffer[n] = 0;
        if (stat(buffer, &a) == 0 && stat("/proc/self/exe", &b) == 0 && a.st_ino == b.st_ino &&
            a.st_dev == b.st_dev)
            return buffer;
    }
    return "/proc/self/exe";
}

bool fsdp__cli_relaunch(int argc, char **argv, const fsdp__cli_ranks *r, int *exit_code)
{
    char buffer[PATH_MAX];
    char program[] = "fsdp";
    if (getenv("RANK")) {
        /* Already a rank, of a job of which -n must not say anything else. */
        const char *world = getenv("WORLD_SIZE");
        if (r->n == 0 || (world && atoi(world) == r->n)) return false;
        *exit_code = fsdp__cli_usage(argv[0],
                                     "-n %d, but RANK=%s and WORLD_SIZE=%s are set: this is a rank "
                                     "of a job already; leave out -n, or unset RANK to start one",
                                     r->n, getenv("RANK"), world ? world : "");
        return true;
    }
    if (r->n <= 1) return false;
    char **words = calloc((size_t)argc + 2, sizeof *words);
    if (!words) {
        fprintf(stderr, "fsdp %s: out of memory\n", argv[0]);
        *exit_code = 1;
        return true;
    }
    words[0] = program;
    for (int i = 0; i < argc; i++)
        words[1 + i] = argv[i];

    fsdp__launch_options o = fsdp__launch_defaults();
    o.ranks = r->n;
    o.threads = r->threads;
    o.log_dir = r->log_dir;
    o.grace = r->grace;
    o.argv = words;
    o.program = own_path(buffer, sizeof buffer);
    o.rank0_plain = true;
    fflush(NULL);
    if (fsdp__launch(&o, exit_code) != FSDP_OK) *exit_code = fsdp__cli_report(argv[0]);
    free(words);
    return true;
}

int fsdp__cli_threads(const fsdp__cli_ranks *r)
{
    const char *user = getenv("OMP_NUM_THREADS");
    if (r->threads > 0) return r->threads;
    if (getenv("RANK") || (user && atoi(user) > 0)) return 0;
    return fsdp__launch_cores();
}
