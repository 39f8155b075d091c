/*
 * config_internal.h - the tables that reading and writing config.json share.
 */
#ifndef FSDP_HF_CONFIG_INTERNAL_H
#define FSDP_HF_CONFIG_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>

#include "models/config.h"

/* Sets of families. */
enum {
    LLAMA = 1 << FSDP_LLAMA,
    MISTRAL = 1 << FSDP_MISTRAL,
    QWEN2 = 1 << FSDP_QWEN2,
    QWEN3 = 1 << FSDP_QWEN3,
    GPT2 = 1 << FSDP_GPT2,
    QWEN = QWEN2 | QWEN3,
    ROTARY = LLAMA | MISTRAL | QWEN,
    EVERY = ROTARY | GPT2
};

typedef enum fsdp__config_kind { INT, REAL, FLAG } fsdp__config_kind;

/* A key that holds one field. */
typedef struct fsdp__config_row {
    const char *key;
    int families;
    fsdp__config_kind kind;
    size_t offset;
    bool read_only; /* another name of a field that is written under its own */
} fsdp__config_row;

typedef struct fsdp__config_act {
    const char *name;
    fsdp_activation act;
    bool read_only;
} fsdp__config_act;

enum { FSDP__CONFIG_ROWS = 28, FSDP__CONFIG_ACTS = 7 };
extern const fsdp__config_row fsdp__config_rows[FSDP__CONFIG_ROWS];
extern const fsdp__config_act fsdp__config_acts[FSDP__CONFIG_ACTS];

#endif
