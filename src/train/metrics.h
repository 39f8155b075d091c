/*
 * metrics.h - what a run says: lines for people, the same numbers as JSON lines, a progress bar on
 * a terminal. Rank 0 speaks; the others' calls do nothing but keep their own numbers.
 */
#ifndef FSDP_TRAIN_METRICS_H
#define FSDP_TRAIN_METRICS_H

#include <stdbool.h>
#include <stdio.h>

#include "fsdp/context.h"

typedef struct fsdp__metrics {
    FILE *json;   /* NULL on ranks other than 0 */
    bool speaks;  /* rank 0 */
    bool bar;     /* standard output is a terminal */
    bool bar_drawn;
    int ranks;
    double flops_per_token;
    int64_t steps;                     /* of the whole run */
    double started;                    /* clock of the first step of this start */
    int64_t first_step;                /* steps done before it */
    double since;                      /* clock of the last line */
    int64_t tokens;                    /* of all ranks since then */
    int64_t peak[FSDP_PURPOSE_COUNT];  /* of this rank since the start */
    int64_t peak_total;
    int64_t window;                    /* peak of all since the last line */
} fsdp__metrics;

void fsdp__metrics_init(fsdp__metrics *m, int rank, int ranks);
/* path: the file of JSON lines; lines of steps beyond first_step, of an earlier start, are taken out
 * of it. */
fsdp_status fsdp__metrics_open(fsdp__metrics *m, const char *path, int64_t first_step,
                               int64_t steps, double flops_per_token);
void fsdp__metrics_close(fsdp__metrics *m);

/* Prints on rank 0, above the progress bar. */
void fsdp__say(fsdp__metrics *m, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* A step is done: counts its tokens (of all ranks) and draws the bar. */
void fsdp__metrics_step(fsdp__metrics *m, int64_t step, int64_t tokens);
/* Takes the peaks since the last call into account and starts new ones; bytes of the total peak. */
int64_t fsdp__metrics_peak(fsdp__metrics *m);
/* The line of a step, of which the tokens were counted. grad_norm below 0: not known. */
fsdp_status fsdp__metrics_line(fsdp__metrics *m, int64_t step, double loss, double grad_norm,
                               double lr);
fsdp_status fsdp__metrics_validation(fsdp__metrics *m, int64_t step, double loss, int64_t tokens,
                                     double seconds);
/* Starts the window of tokens a second anew, after something that is no training. */
void fsdp__metrics_resume(fsdp__metrics *m);

#endif
