/*
 * golden.h - tensors out of the files under tests/data.
 */
#ifndef FSDP_TESTS_GOLDEN_H
#define FSDP_TESTS_GOLDEN_H

#include "tensor_check.h"

#include "format/safetensors.h"

static inline fsdp__st *golden_open(const char *folder, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, FSDP_TEST_DATA "/%s/%s.safetensors", folder, name);
    fsdp__st *st = fsdp__st_open(path);
    check_tensor(st);
    return st;
}

/* NULL when the file has no tensor of that name. */
static inline fsdp_tensor *golden_get(fsdp__st *st, const char *name)
{
    const fsdp__st_tensor *t = fsdp__st_find(st, name);
    if (!t) return NULL;
    fsdp_tensor *x = fsdp_empty(t->dtype, t->ndim, t->shape);
    check_tensor(x);
    check_ok(fsdp__st_read(st, t, 0, t->bytes, fsdp_data(x)));
    return x;
}

static inline fsdp_tensor *golden_need(fsdp__st *st, const char *name)
{
    fsdp_tensor *t = golden_get(st, name);
    if (!t) fail_msg("%s has no tensor %s", fsdp__st_path(st), name);
    return t;
}

#endif
