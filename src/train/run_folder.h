/*
 * run_folder.h - the folder of a run, and agreement of its ranks.
 *
 *     config.yaml     resolved configuration of the newest start
 *     run.json        state: running or finished; steps; last losses
 *     metrics.jsonl   a JSON object a line
 *     checkpoint/     step-N folders
 *     hf/             the model at the end
 *     adapter/        the adapters, of the last checkpoint or the end
 */
#ifndef FSDP_TRAIN_RUN_FOLDER_H
#define FSDP_TRAIN_RUN_FOLDER_H

#include "train/config.h"
#include "train/metrics.h"

typedef struct fsdp__run_folder {
    char *checkpoints, *hf, *hf_ema, *adapter, *metrics; /* paths */
    bool finished;                    /* nothing is left to do */
    int64_t load_step; /* of the checkpoint to go on from; -1: start from the beginning */
    int lock;          /* rank 0's claim on the folder; -1: none */
} fsdp__run_folder;

/* Compares text, the resolved configuration, over the ranks: an error on each rank whose text is
 * another than rank 0's, naming the options. Collective. */
fsdp_status fsdp__config_agree(const char *text);

/* An error that all ranks have found alike: rank 0 says it, and the others end with its text. */
fsdp_status fsdp__fail_alike(fsdp_status code, const char *fmt, ...) FSDP_PRINTF(2, 3);

/* Looks at the folder of c and decides where to begin; changes nothing. An error if another run
 * works in it, or if it could not be made or written. Rank 0 does that and tells the others.
 * Collective. */
fsdp_status fsdp__run_folder_open(const fsdp__train_config *c, const char *text, fsdp__metrics *m,
                                  fsdp__run_folder *out);
/* Makes the folder, writes config.yaml and marks the run as running; on failure a folder that was
 * made is gone again. Called when the model is there, so that a run that cannot start leaves
 * nothing. Collective. */
fsdp_status fsdp__run_folder_begin(const fsdp__train_config *c, const char *text,
                                   fsdp__run_folder *f);
void fsdp__run_folder_free(fsdp__run_folder *f);
/* Marks it finished after `steps`; validation and bigram NAN where they are not known. Rank 0
 * alone; other ranks' calls do nothing. */
fsdp_status fsdp__run_folder_finish(const fsdp__train_config *c, int64_t steps, double loss,
                                    double validation, double bigram);

#endif
