/*
 * effect.h - options that were set and do nothing in this run: a switch that governs them is off.
 */
#ifndef FSDP_TRAIN_EFFECT_H
#define FSDP_TRAIN_EFFECT_H

#include "train/config.h"

/* Appends "no effect: <option>: <why>", a line each, for those that a file or a command line of c
 * named. c is resolved. A file that names every option, as one that a run has written does, says
 * nothing by a default: of its options those with another value are looked at. */
fsdp_status fsdp__train_no_effect(const fsdp__train_config *c, fsdp__str *out);

/* The table, for tests: rule i's options ("a.b|a.c"), NULL at the end. */
const char *fsdp__train_effect_rule(int i);

#endif
