/*
 * signals.c - SIGINT and SIGTERM as a flag. See signals.h.
 */
#include "cli/signals.h"

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t stop_signal;

static void on_signal(int sig)
{
    if (stop_signal) {
        /* Asked twice: die of it, so that whoever waits sees the signal. It is blocked while this
         * handler runs and takes effect at its return. */
        signal(sig, SIG_DFL);
        raise(sig);
        return;
    }
    stop_signal = sig;
}

void fsdp__signals_install(void)
{
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = on_signal;
    /* Reads and writes of files go on: only the trainer looks at the flag. */
    a.sa_flags = SA_RESTART;
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
}

int fsdp__signals_stop(void)
{
    return (int)stop_signal;
}
