/*
 * launch.c - one job from its options to its exit code.
 *
 * What can be wrong is found before the first rank starts: the number of
 * ranks, the program, the folder of logs. Everything of the process that the
 * job changes (signal mask, SIGPIPE, SIGCHLD) is put back at its end.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "launch/launch_internal.h"

extern char **environ;

fsdp__launch_options fsdp__launch_defaults(void)
{
    return (fsdp__launch_options){.ranks = 1, .grace = 5, .out_fd = 1, .err_fd = 2};
}

/* ---- checks -------------------------------------------------------------- */

static bool is_program(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) && access(path, X_OK) == 0;
}

/* Looks for name as a shell would. *path is the caller's to free. */
static fsdp_status find_program(const char *name, char **path)
{
    struct stat st;
    if (strchr(name, '/')) {
        if (stat(name, &st) != 0)
            return fsdp__fail_errno(FSDP_NOT_FOUND, "launch: cannot run the program %s", name);
        if (S_ISDIR(st.st_mode))
            return fsdp__fail(FSDP_NOT_FOUND, "launch: %s is a folder, expected a program", name);
        if (!is_program(name))
            return fsdp__fail(FSDP_NOT_FOUND,
                              "launch: %s is not executable; make it so: chmod +x %s", name, name);
        *path = strdup(name);
        return *path ? FSDP_OK : fsdp__fail_memory("launch: path", strlen(name));
    }
    const char *dirs = getenv("PATH");
    if (!dirs) dirs = "/usr/local/bin:/usr/bin:/bin";
    for (const char *p = dirs; *name; p++) {
        size_t n = strcspn(p, ":");
        char *candidate = NULL;
        if (asprintf(&candidate, "%.*s%s%s", (int)n, p, n ? "/" : "./", name) < 0)
            return fsdp__fail_memory("launch: path", n);
        if (is_program(candidate)) {
            *path = candidate;
            return FSDP_OK;
        }
        free(candidate);
        p += n;
        if (!*p) break;
    }
    const char *hint = stat(name, &st) == 0 ? "; for the file in this folder write ./" : "";
    return fsdp__fail(FSDP_NOT_FOUND, "launch: no program '%s' in the folders of PATH (%s)%s%s",
                      name, dirs, hint, *hint ? name : "");
}

static fsdp_status check(const fsdp__launch_options *o)
{
    if (o->ranks < 1 || o->ranks > FSDP__LAUNCH_MAX_RANKS)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "launch: %d ranks asked for, expected 1 to %d",
                          o->ranks, FSDP__LAUNCH_MAX_RANKS);
    if (o->threads < 0)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "launch: %d threads a rank asked for, expected 1 or more (0: dealt)",
                          o->threads);
    if (!(o->grace >= 0 && o->grace <= 86400))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "launch: a grace time of %g s, expected 0 to 86400", o->grace);
    if (!o->argv || !o->argv[0])
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "launch: no program to run");
    return FSDP_OK;
}

/* Makes the folder of logs, its parents included. */
static fsdp_status make_folder(const char *dir)
{
    char path[PATH_MAX];
    size_t n = strlen(dir);
    struct stat st;
    if (n == 0 || n >= sizeof path)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "launch: the name of the log folder has %zu bytes",
                          n);
    memcpy(path, dir, n + 1);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        char kept = path[i];
        path[i] = 0;
        if (mkdir(path, 0777) != 0 && errno != EEXIST)
            return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot make the log folder %s", path);
        path[i] = kept;
    }
    if (stat(dir, &st) != 0 || !S_ISDIR(st.st_mode))
        return fsdp__fail(FSDP_IO_ERROR,
                          "launch: %s is there and is not a folder; choose another "
                          "for the logs",
                          dir);
    return FSDP_OK;
}

/* ---- cores --------------------------------------------------------------- */

static const char *plural(int n)
{
    return n == 1 ? "" : "s";
}

/* Threads of each rank, and whether the environment has decided. The same for all, as the slowest
 * rank sets the pace: cores that do not divide are left over. */
static int deal(const fsdp__launch_options *o, int cores, bool *from_user)
{
    const char *user = getenv("OMP_NUM_THREADS");
    int given = user ? atoi(user) : 0; /* "4,2" means 4 at the outer level */
    *from_user = o->threads == 0 && given > 0;
    if (o->threads > 0) return o->threads;
    if (given > 0) return given;
    return cores / o->ranks > 0 ? cores / o->ranks : 1;
}

static void say_cores(fsdp__job *job, int threads, int cores, bool from_user)
{
    int ranks = job->o->ranks;
    int64_t all = (int64_t)ranks * threads;
    fsdp__sink_addf(&job->err, "fsdp: %d rank%s x %d thread%s%s on %d core%s", ranks, plural(ranks),
                    threads, plural(threads), from_user ? " (OMP_NUM_THREADS)" : "", cores,
                    plural(cores));
    if (all > cores)
        fsdp__sink_addf(&job->err, ": more %s than cores, so they take turns and run slower",
                        ranks > cores ? "ranks" : "threads");
    else if (all < cores && !from_user && job->o->threads == 0)
        fsdp__sink_addf(&job->err, " (%d left over)", (int)(cores - all));
    fsdp__sink_addf(&job->err, "\n");
}

/* ---- environment --------------------------------------------------------- */

enum { MOST_OWN = 20 };

typedef struct environment {
    char *own[MOST_OWN]; /* "NAME=value", owned */
    int count;
    char **all; /* own, then what is inherited; ends with NULL */
} environment;

static void FSDP_PRINTF(2, 3) own_add(environment *e, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    if (e->count < MOST_OWN && vasprintf(&e->own[e->count], fmt, args) >= 0) e->count++;
    va_end(args);
}

static bool is_own(const environment *e, const char *entry)
{
    size_t n = strcspn(entry, "=");
    for (int i = 0; i < e->count; i++)
        if (strncmp(e->own[i], entry, n) == 0 && e->own[i][n] == '=') return true;
    return false;
}

static void environment_free(environment *e)
{
    for (int i = 0; i < e->count; i++)
        free(e->own[i]);
    free(e->all);
    *e = (environment){0};
}

/* What torchrun sets on one machine, the segment, and the threads. */
static fsdp_status environment_make(environment *e, const fsdp__job *job, int r, int port,
                                    int threads, bool from_user)
{
    int n = job->o->ranks;
    own_add(e, "RANK=%d", r);
    own_add(e, "LOCAL_RANK=%d", r);
    own_add(e, "WORLD_SIZE=%d", n);
    own_add(e, "LOCAL_WORLD_SIZE=%d", n);
    own_add(e, "GROUP_RANK=0");
    own_add(e, "GROUP_WORLD_SIZE=1");
    own_add(e, "ROLE_NAME=default");
    own_add(e, "ROLE_RANK=%d", r);
    own_add(e, "ROLE_WORLD_SIZE=%d", n);
    own_add(e, "MASTER_ADDR=127.0.0.1");
    own_add(e, "MASTER_PORT=%d", port);
    own_add(e, "FSDP_SHM_FD=%d", job->shm);
    int expected = 12;
    if (!from_user) {
        own_add(e, "OMP_NUM_THREADS=%d", threads);
        expected++;
    }
    /* Idle OpenMP threads that spin take the core of a rank that computes. */
    if (!getenv("OMP_WAIT_POLICY")) {
        own_add(e, "OMP_WAIT_POLICY=PASSIVE");
        expected++;
    }
    size_t inherited = 0;
    while (environ && environ[inherited])
        inherited++;
    e->all = calloc(inherited + MOST_OWN + 1, sizeof *e->all);
    if (!e->all || e->count != expected) return fsdp__fail_memory("launch: environment", 0);
    size_t k = 0;
    for (int i = 0; i < e->count; i++)
        e->all[k++] = e->own[i];
    for (size_t i = 0; i < inherited; i++)
        if (!is_own(e, environ[i])) e->all[k++] = environ[i];
    return FSDP_OK;
}

/* A port that nobody listens on now. For programs that want one; fsdp's own ranks do not. */
static int free_port(void)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    int port = 29500; /* torchrun's, where there is no network at all */
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return port;
    if (bind(fd, (struct sockaddr *)&a, size) == 0 &&
        getsockname(fd, (struct sockaddr *)&a, &size) == 0)
        port = ntohs(a.sin_port);
    close(fd);
    return port;
}

/* ---- the job ------------------------------------------------------------- */

typedef struct old_signals {
    struct sigaction pipe, child;
} old_signals;

/* Signals come through a descriptor from here on. */
static fsdp_status take_signals(fsdp__job *job, old_signals *old)
{
    sigset_t set;
    struct sigaction ignore = {.sa_handler = SIG_IGN}, plain = {.sa_handler = SIG_DFL}, hup;
    sigemptyset(&set);
    const int wanted[] = {SIGINT, SIGTERM, SIGCHLD, SIGTSTP};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        sigaddset(&set, wanted[i]);
    /* Under nohup the job is to live on. */
    if (sigaction(SIGHUP, NULL, &hup) == 0 && hup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);
    sigset_t blocked = set;
    sigaddset(&blocked, SIGTTOU); /* a launcher that takes the terminal back is no intruder */
    sigprocmask(SIG_BLOCK, &blocked, &job->old_mask);
    sigaction(SIGPIPE, &ignore, &old->pipe);
    /* Were it ignored, the kernel would reap the ranks and forget how they ended. */
    sigaction(SIGCHLD, &plain, &old->child);
    job->signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (job->signals < 0) return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot watch signals");
    return FSDP_OK;
}

static void give_signals_back(fsdp__job *job, const old_signals *old)
{
    struct signalfd_siginfo info;
    /* A second Ctrl-C that still waits has had its effect. */
    while (job->signals >= 0 && read(job->signals, &info, sizeof info) > 0)
        continue;
    sigaction(SIGPIPE, &old->pipe, NULL);
    sigaction(SIGCHLD, &old->child, NULL);
    sigprocmask(SIG_SETMASK, &job->old_mask, NULL);
}

static fsdp_status prepare_ranks(fsdp__job *job)
{
    const fsdp__launch_options *o = job->o;
    job->ranks = calloc((size_t)o->ranks, sizeof *job->ranks);
    if (!job->ranks)
        return fsdp__fail_memory("launch: ranks", (size_t)o->ranks * sizeof *job->ranks);
    for (int r = 0; r < o->ranks; r++) {
        fsdp__process *p = &job->ranks[r];
        p->pidfd = -1;
        for (int i = 0; i < 2; i++) {
            fsdp__stream *s = &p->streams[i];
            s->fd = -1;
            s->tail = &p->tail;
            s->sink = i == 0 ? &job->out : &job->err;
            if (r > 0 || !o->rank0_plain) snprintf(s->prefix, sizeof s->prefix, "[%d] ", r);
        }
        if (o->log_dir && asprintf(&p->log_path, "%s/rank-%d.log", o->log_dir, r) < 0) {
            p->log_path = NULL;
            return fsdp__fail_memory("launch: log path", strlen(o->log_dir));
        }
    }
    return FSDP_OK;
}

static fsdp_status prepare(fsdp__job *job)
{
    FSDP_TRY(prepare_ranks(job));
    if (job->o->log_dir) FSDP_TRY(make_folder(job->o->log_dir));
    job->deaths = epoll_create1(EPOLL_CLOEXEC);
    if (job->deaths < 0) return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot watch processes");
    /* Of this job alone: it has no name under which another could find it, and it goes with the
     * last rank. Ranks inherit it: each clears close-on-exec for itself. */
    job->shm = memfd_create("fsdp", MFD_CLOEXEC);
    if (job->shm < 0)
        return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot make the ranks' common segment");
    job->oom_before = fsdp__oom_kills("");
    job->tty = isatty(0) ? 0 : -1;
    return fsdp__keeper_start(job);
}

static fsdp_status start_ranks(fsdp__job *job, const char *path)
{
    const fsdp__launch_options *o = job->o;
    bool from_user;
    int cores = fsdp__launch_cores(), port = free_port();
    int threads = deal(o, cores, &from_user);
    fsdp_status s = FSDP_OK;
    if (!o->quiet) say_cores(job, threads, cores, from_user);
    if (o->log_dir && !o->quiet)
        fsdp__sink_addf(&job->err, "fsdp: output goes to %s/rank-R.log\n", o->log_dir);
    for (int r = 0; r < o->ranks && s == FSDP_OK; r++) {
        environment e = {0};
        s = environment_make(&e, job, r, port, threads, from_user);
        if (s == FSDP_OK) s = fsdp__start_rank(job, r, path, e.all);
        environment_free(&e);
    }
    return s;
}

static void free_job(fsdp__job *job)
{
    for (int r = 0; job->ranks && r < job->o->ranks; r++) {
        for (int i = 0; i < 2; i++)
            if (job->ranks[r].streams[i].fd >= 0) fsdp__stream_finish(&job->ranks[r].streams[i]);
        free(job->ranks[r].log_path);
    }
    free(job->ranks);
    fsdp__keeper_end(job);
    if (job->shm >= 0) close(job->shm);
    if (job->deaths >= 0) close(job->deaths);
    if (job->signals >= 0) close(job->signals);
    fsdp__sink_free(&job->out);
    fsdp__sink_free(&job->err);
}

fsdp_status fsdp__launch(const fsdp__launch_options *options, int *exit_code)
{
    fsdp__job job = {.o = options,
                     .out = {.fd = options->out_fd},
                     .err = {.fd = options->err_fd},
                     .deaths = -1,
                     .signals = -1,
                     .keeper = -1,
                     .shm = -1,
                     .tty = -1,
                     .foreground = -1,
                     .peer_first = -1};
    char *path = NULL;
    old_signals old;
    FSDP_TRY(check(options));
    FSDP_TRY(find_program(options->program ? options->program : options->argv[0], &path));

    fsdp_status s = take_signals(&job, &old);
    if (s == FSDP_OK) s = prepare(&job);
    if (s == FSDP_OK) s = start_ranks(&job, path);
    if (s == FSDP_OK)
        fsdp__watch(&job);
    else if (job.running > 0)
        fsdp__watch_abandon(&job);
    if (s == FSDP_OK) *exit_code = job.exit_code;
    give_signals_back(&job, &old);
    free_job(&job);
    free(path);
    return s;
}
