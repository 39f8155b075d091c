/*
 * units.h - parallelism.fsdp_units: which modules of a model become units, and whether that grain
 * fits.
 */
#ifndef FSDP_TRAIN_UNITS_H
#define FSDP_TRAIN_UNITS_H

#include "fsdp/nn.h"
#include "train/bytes.h"
#include "train/config.h"
#include "train/metrics.h"

/* The modules that `text` (block, linear, model, or a pattern of names) means, inner ones first,
 * without the root; borrowed. A pattern that takes nothing is an error. */
typedef struct fsdp__unit_modules {
    fsdp_module **items;
    int64_t count, cap;
} fsdp__unit_modules;
fsdp_status fsdp__units_find(const char *text, fsdp_module *model, fsdp__unit_modules *out);
void fsdp__units_free(fsdp__unit_modules *u);

/* Says, where parameters are cut, that another grain would hold much less at a time (too coarse), or
 * that a gather moves so few bytes that it mostly waits (too fine): by the bytes of this model.
 * The lines are appended to out. */
fsdp_status fsdp__units_report(const fsdp__train_config *c, fsdp_module *model, fsdp__str *out);

#endif
