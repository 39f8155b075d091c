/*
 * ckpt_internal.h - names that saving and loading share.
 */
#ifndef FSDP_CKPT_CKPT_INTERNAL_H
#define FSDP_CKPT_CKPT_INTERNAL_H

#include "ckpt/block.h"
#include "fsdp/optim.h"

/* folder/step-N<suffix>; NULL if out of memory. */
char *fsdp__ckpt_path(const char *folder, int64_t step, const char *suffix);
/* "rank-00000-of-00004.safetensors" */
void fsdp__ckpt_file_name(int rank, int ranks, char *out, size_t n);
/* "optimizer.<state k>.<param>"; NULL if out of memory. */
char *fsdp__ckpt_state_name(const fsdp_optimizer *opt, int k, const char *param);
/* "ema.<param>"; NULL if out of memory. */
char *fsdp__ckpt_ema_name(const char *param);

#endif
