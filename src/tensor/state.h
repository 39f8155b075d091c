/*
 * state.h - what the tensor room hangs off a context (this room only).
 */
#ifndef FSDP_TENSOR_STATE_H
#define FSDP_TENSOR_STATE_H

#include "tensor/tensor.h"

struct fsdp_scope {
    fsdp_scope *outer;
    fsdp_tensor **items; /* each holds one reference */
    int64_t count, cap;
};

typedef struct fsdp__tensor_state {
    fsdp_scope *scope;  /* innermost open */
    fsdp_scope *spare;  /* closed scopes, kept with their arrays */
    fsdp_purpose purpose;
    fsdp__random random;
} fsdp__tensor_state;

fsdp__tensor_state *fsdp__tensor_state_get(void); /* NULL: error kept */

/* Puts a fresh tensor (refs 1) into the innermost scope, if there is one.
 * On failure t is released and NULL returned. */
fsdp_tensor *fsdp__scope_adopt(fsdp_tensor *t);
void fsdp__scope_forget(fsdp_tensor *t);

#endif
