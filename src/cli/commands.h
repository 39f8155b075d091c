/*
 * commands.h - the sub-commands of the program.
 *
 * Each stands in its own file, cmd_<name>.c, and is reached through the table
 * in main.c. argv[0] is the command's name ("train"), so its arguments begin
 * at 1; argv ends with NULL. The result is the program's exit code:
 *
 *     0    done
 *     1    failed; the error was printed
 *     2    the command line was wrong
 *     75   a peer rank failed (FSDP__EXIT_PEER), this one did not
 *     126, 127  the program to launch cannot be run, is not there
 *     130, 143  ended by Ctrl-C, by SIGTERM
 */
#ifndef FSDP_CLI_COMMANDS_H
#define FSDP_CLI_COMMANDS_H

int fsdp__cmd_run(int argc, char **argv);
int fsdp__cmd_train(int argc, char **argv);
int fsdp__cmd_generate(int argc, char **argv);
int fsdp__cmd_tokenize(int argc, char **argv);
int fsdp__cmd_prepare(int argc, char **argv);
int fsdp__cmd_parity(int argc, char **argv);
int fsdp__cmd_bench(int argc, char **argv);

#endif
