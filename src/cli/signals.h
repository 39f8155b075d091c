/*
 * signals.h - Ctrl-C in a rank.
 *
 * The library installs no signal handler; the program does, and hands the
 * trainer a function that says whether it was asked to stop. The first SIGINT
 * or SIGTERM sets a flag, so that the step can end and the checkpoint be
 * written; the second one kills.
 */
#ifndef FSDP_CLI_SIGNALS_H
#define FSDP_CLI_SIGNALS_H

void fsdp__signals_install(void);

/* The signal that asked to stop, 0 if none did. May be called from any thread. */
int fsdp__signals_stop(void);

#endif
