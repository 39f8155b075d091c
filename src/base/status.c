/*
 * status.c - names of statuses, dtypes and purposes, each from its one list.
 */
#include <string.h>

#include "fsdp/context.h"
#include "fsdp/dtype.h"
#include "fsdp/status.h"

const char *fsdp_status_name(fsdp_status s)
{
    switch (s) {
#define FSDP__X(e, name, text) \
    case e:                    \
        return name;
        FSDP_STATUS_LIST(FSDP__X)
#undef FSDP__X
    }
    return "unknown status";
}

const char *fsdp_purpose_name(fsdp_purpose p)
{
    static const char *const names[] = {
#define FSDP__X(e, name) name,
        FSDP_PURPOSE_LIST(FSDP__X)
#undef FSDP__X
    };
    return p >= 0 && p < FSDP_PURPOSE_COUNT ? names[p] : "unknown purpose";
}

typedef struct dtype_row {
    const char *name, *safetensors;
    size_t bytes;
    int floating;
} dtype_row;

static const dtype_row dtypes[] = {
#define FSDP__X(e, name, st, bytes, fp) {name, st, bytes, fp},
    FSDP_DTYPE_LIST(FSDP__X)
#undef FSDP__X
};

static const dtype_row *dtype_of(fsdp_dtype t)
{
    return t >= 0 && t < FSDP_DTYPE_COUNT ? &dtypes[t] : NULL;
}

size_t fsdp_dtype_size(fsdp_dtype t)
{
    const dtype_row *row = dtype_of(t);
    return row ? row->bytes : 0;
}

const char *fsdp_dtype_name(fsdp_dtype t)
{
    const dtype_row *row = dtype_of(t);
    return row ? row->name : "none";
}

int fsdp_dtype_is_floating(fsdp_dtype t)
{
    const dtype_row *row = dtype_of(t);
    return row ? row->floating : 0;
}

fsdp_dtype fsdp_dtype_parse(const char *name)
{
    /* PyTorch's long names, and the two that it has twice. */
    static const struct {
        const char *name;
        fsdp_dtype t;
    } torch[] = {
        {"float32", FSDP_F32}, {"float", FSDP_F32}, {"float64", FSDP_F64},   {"double", FSDP_F64},
        {"float16", FSDP_F16}, {"half", FSDP_F16},  {"bfloat16", FSDP_BF16}, {"int64", FSDP_I64},
        {"long", FSDP_I64},    {"int32", FSDP_I32}, {"int", FSDP_I32},       {"int16", FSDP_I16},
        {"short", FSDP_I16},   {"int8", FSDP_I8},   {"uint64", FSDP_U64},    {"uint32", FSDP_U32},
        {"uint16", FSDP_U16},  {"uint8", FSDP_U8},
    };
    if (!name) return FSDP_DTYPE_NONE;
    if (strncmp(name, "torch.", 6) == 0) name += 6;
    for (int t = 0; t < FSDP_DTYPE_COUNT; t++)
        if (strcmp(name, dtypes[t].name) == 0 || strcmp(name, dtypes[t].safetensors) == 0)
            return (fsdp_dtype)t;
    for (size_t i = 0; i < sizeof torch / sizeof *torch; i++)
        if (strcmp(name, torch[i].name) == 0) return torch[i].t;
    return FSDP_DTYPE_NONE;
}
