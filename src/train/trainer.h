/*
 * trainer.h - `fsdp train` from the first collective to the last.
 */
#ifndef FSDP_TRAIN_TRAINER_H
#define FSDP_TRAIN_TRAINER_H

#include "train/config.h"

/* Trains by c, resolved for the ranks of the current world; rank 0 prints. stop (may be NULL) is
 * asked after each step; when it says other than 0 on any rank, the step is finished, a checkpoint
 * written if they are enabled, and FSDP_INTERRUPTED returned, without an error kept. */
fsdp_status fsdp__train(const fsdp__train_config *c, int (*stop)(void));

#endif
