/*
 * prepare.h - from files of text to token files: what `fsdp prepare` does.
 *
 * Folders are walked in order of names; names that begin with a dot inside
 * them are passed over. Links are followed, but no file is taken twice: of
 * several names of one file the one that is no link counts. Files that hold a
 * NUL byte are no text and are left out, as are empty ones. Each text becomes
 * one document, closed by the end token.
 *
 * Files whose path or name fits a validation pattern (also by a link's name)
 * are the validation set as wholes; the tokenizer is never trained on them.
 */
#ifndef FSDP_DATA_PREPARE_H
#define FSDP_DATA_PREPARE_H

#include <stdint.h>

#include "fsdp/status.h"

typedef struct fsdp__prepare_options {
    const char *const *paths; /* (path_count) files and folders */
    const char *const
        *validation; /* (validation_count) patterns as fnmatch(3) knows; may be none */
    int64_t path_count, validation_count;
    const char *tokenizer;   /* folder or tokenizer.json to use; NULL: */
    int64_t train_tokenizer; /* train one with so many tokens */
    const char *end_token;   /* NULL: <|endoftext|> where one is trained, else what the tokenizer
                                ends texts with */
    const char *out;         /* folder: gets tokenizer.json, tokenizer_config.json, train.tokens,
                                validation.tokens if there is any, prepare.json (the files) */
} fsdp__prepare_options;

typedef struct fsdp__prepare_set {
    int64_t files, bytes, tokens;
} fsdp__prepare_set;

typedef struct fsdp__prepare_report {
    fsdp__prepare_set train, validation;
    int64_t repeated; /* other names of files that were taken */
    int64_t no_text;  /* files left out: empty, or with a NUL byte */
    int64_t vocab_size;
} fsdp__prepare_report;

/* A pattern that fits no file is an error, and so is an empty training set. */
fsdp_status fsdp__prepare(const fsdp__prepare_options *o, fsdp__prepare_report *report);

#endif
