/*
 * start.c - makes the processes: the ranks and their keeper.
 *
 * Between fork and exec a rank runs only calls that are safe after fork; all
 * it needs is prepared before. Every descriptor of the launcher is
 * close-on-exec but the ranks' common segment, which a rank opens to itself.
 *
 * How no rank survives the launcher:
 * - asked to end, the launcher ends the ranks' groups (watch.c);
 * - killed, the kernel sends SIGKILL to each rank (parent-death signal), and
 *   the keeper, who sees its pipe close, sends SIGKILL to each rank's group,
 *   for what the rank itself has started.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "launch/launch_internal.h"

/* ---- the keeper ---------------------------------------------------------- */

/* Messages: a group's number when it begins, the same negated when it has ended. */
static _Noreturn void keep(int pipe_fd)
{
    enum { MOST = FSDP__LAUNCH_MAX_RANKS };
    pid_t groups[MOST], message;
    int count = 0;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    setpgid(0, 0);
    prctl(PR_SET_NAME, "fsdp-keeper");
    /* Holding the launcher's output open would keep whoever reads it from seeing the end. */
    for (int fd = 0; fd < 1024; fd++)
        if (fd != pipe_fd) close(fd);
    for (;;) {
        ssize_t n = read(pipe_fd, &message, sizeof message);
        if (n < 0 && errno == EINTR) continue;
        if (n != (ssize_t)sizeof message) break;
        if (message > 0 && count < MOST) groups[count++] = message;
        for (int i = 0; message < 0 && i < count; i++)
            if (groups[i] == -message) groups[i--] = groups[--count];
    }
    for (int i = 0; i < count; i++)
        kill(-groups[i], SIGKILL);
    _exit(0);
}

fsdp_status fsdp__keeper_start(fsdp__job *job)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC) != 0)
        return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot make a pipe");
    pid_t pid = fork();
    if (pid == 0) {
        close(p[1]);
        keep(p[0]);
    }
    int error = errno;
    close(p[0]);
    if (pid < 0) {
        close(p[1]);
        errno = error;
        return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot start a process");
    }
    job->keeper = p[1];
    job->keeper_pid = pid;
    return FSDP_OK;
}

void fsdp__keeper_tell(fsdp__job *job, pid_t pid, bool runs)
{
    pid_t message = runs ? pid : -pid;
    /* A keeper that was killed is no reason to stop: the parent-death signal is still there. */
    ssize_t n;
    do {
        n = write(job->keeper, &message, sizeof message);
    } while (n < 0 && errno == EINTR);
}

void fsdp__keeper_end(fsdp__job *job)
{
    if (job->keeper < 0) return;
    close(job->keeper);
    job->keeper = -1;
    while (waitpid(job->keeper_pid, NULL, 0) < 0 && errno == EINTR)
        continue;
}

/* ---- a rank -------------------------------------------------------------- */

/* What a rank finds behind its descriptors 0 to 2, and where it reports a failed exec. */
typedef struct child_files {
    int in, out, err;
    int report;
} child_files;

static _Noreturn void become(const fsdp__job *job, const child_files *f, pid_t launcher,
                             const char *path, char *const *envp, char **shell_argv)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* The launcher may have died before the line above took effect. */
    if (getppid() != launcher) _exit(FSDP__EXIT_PEER);
    /* A shell that started the launcher in the background had it ignore SIGINT; a rank must hear
     * what is forwarded. SIGHUP stays as it is, for nohup. */
    const int reset[] = {SIGINT, SIGTERM, SIGPIPE, SIGTSTP, SIGTTIN, SIGTTOU};
    for (size_t i = 0; i < sizeof reset / sizeof *reset; i++)
        signal(reset[i], SIG_DFL);
    if (dup2(f->in, 0) < 0 || dup2(f->out, 1) < 0 || dup2(f->err, 2) < 0) goto failed;
    if (fcntl(job->shm, F_SETFD, 0) < 0) goto failed;
    sigprocmask(SIG_SETMASK, &job->old_mask, NULL);
    execve(path, job->o->argv, envp);
    /* A script without "#!": the shell runs it, as execvp would have it. */
    if (errno == ENOEXEC) execve("/bin/sh", shell_argv, envp);
failed:;
    int error = errno;
    ssize_t n = write(f->report, &error, sizeof error);
    _exit(n < 0 ? 126 : 127);
}

/* {"/bin/sh", path, arguments of argv...}, for a script without "#!". */
static char **shell_arguments(const char *path, char *const *argv)
{
    size_t n = 0;
    while (argv[n])
        n++;
    char **out = calloc(n + 3, sizeof *out);
    if (!out) return NULL;
    out[0] = (char *)(uintptr_t) "/bin/sh";
    out[1] = (char *)(uintptr_t)path;
    for (size_t i = 1; i < n; i++)
        out[1 + i] = argv[i];
    return out;
}

/* Opens a pipe from the rank; the launcher's end does not block. */
static fsdp_status open_stream(fsdp__stream *s, int *child_end)
{
    int p[2];
    if (pipe2(p, O_CLOEXEC) != 0)
        return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot make a pipe for a rank's output");
    fcntl(p[0], F_SETFL, O_NONBLOCK);
    s->fd = p[0];
    *child_end = p[1];
    return FSDP_OK;
}

/* The rank's end of standard output and error. */
static fsdp_status open_output(fsdp__job *job, int r, child_files *f)
{
    const fsdp__launch_options *o = job->o;
    fsdp__process *p = &job->ranks[r];
    if (p->log_path) {
        f->out = open(p->log_path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
        if (f->out < 0)
            return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot write the log of rank %d, %s", r,
                                    p->log_path);
        f->err = fcntl(f->out, F_DUPFD_CLOEXEC, 3);
        if (f->err < 0)
            return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot open %s", p->log_path);
        return FSDP_OK;
    }
    if (r == 0 && o->rank0_plain && isatty(o->out_fd)) {
        /* Straight to the terminal, so that the rank sees one and draws its bar. */
        f->out = fcntl(o->out_fd, F_DUPFD_CLOEXEC, 3);
        if (f->out < 0) return fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot share the terminal");
    } else {
        FSDP_TRY(open_stream(&p->streams[0], &f->out));
    }
    return open_stream(&p->streams[1], &f->err);
}

/* Waits until the exec has happened or failed: the pipe closes, or brings an errno. */
static int exec_error(int report)
{
    int error = 0;
    ssize_t n;
    do {
        n = read(report, &error, sizeof error);
    } while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof error ? error : 0;
}

/* Takes a child whose exec failed, or that cannot be watched, out of the world. */
static void discard(pid_t pid)
{
    kill(pid, SIGKILL);
    while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
        continue;
}

/* Begins to watch the process that became rank r. */
static fsdp_status adopt(fsdp__job *job, int r, pid_t pid)
{
    fsdp__process *p = &job->ranks[r];
    p->pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    struct epoll_event e = {.events = EPOLLIN, .data.u32 = (uint32_t)r};
    if (p->pidfd < 0 || epoll_ctl(job->deaths, EPOLL_CTL_ADD, p->pidfd, &e) != 0) {
        fsdp_status s = fsdp__fail_errno(
            FSDP_UNSUPPORTED, "launch: cannot watch rank %d (pidfd_open, in Linux since 5.3)", r);
        discard(pid);
        return s;
    }
    p->pid = pid;
    job->running++;
    fsdp__keeper_tell(job, pid, true);
    return FSDP_OK;
}

fsdp_status fsdp__start_rank(fsdp__job *job, int r, const char *path, char *const *envp)
{
    child_files f = {-1, -1, -1, -1};
    int report[2] = {-1, -1};
    fsdp_status s = FSDP_OK;
    char **shell_argv = shell_arguments(path, job->o->argv);
    if (!shell_argv) FSDP_GO(fsdp__fail_memory("launch: arguments", 0));
    f.in = r == 0 ? fcntl(0, F_DUPFD_CLOEXEC, 3) : open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (f.in < 0 || pipe2(report, O_CLOEXEC) != 0)
        FSDP_GO(fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot open the input of rank %d", r));
    f.report = report[1];
    FSDP_GO(open_output(job, r, &f));

    pid_t launcher = getpid(), pid = fork();
    if (pid == 0) become(job, &f, launcher, path, envp, shell_argv);
    if (pid < 0) FSDP_GO(fsdp__fail_errno(FSDP_IO_ERROR, "launch: cannot start rank %d", r));
    close(report[1]);
    report[1] = -1;
    int error = exec_error(report[0]);
    if (error) {
        discard(pid);
        errno = error;
        FSDP_GO(fsdp__fail_errno(FSDP_NOT_FOUND, "launch: cannot run %s", path));
    }
    FSDP_GO(adopt(job, r, pid));

done:
    for (int i = 0; i < 2; i++)
        if (report[i] >= 0) close(report[i]);
    if (f.in >= 0) close(f.in);
    if (f.out >= 0) close(f.out);
    if (f.err >= 0) close(f.err);
    free(shell_argv);
    return s;
}
