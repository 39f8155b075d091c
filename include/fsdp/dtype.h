/*
 * dtype.h - element types.
 */
#ifndef FSDP_DTYPE_H
#define FSDP_DTYPE_H

#include <stddef.h>
#include <stdint.h>

#include "status.h"

FSDP_EXTERN_C_BEGIN

/* X(enumerator, name, safetensors name, bytes, is floating) */
#define FSDP_DTYPE_LIST(X)                                                     \
    X(FSDP_F32, "f32", "F32", 4, 1)                                            \
    X(FSDP_F64, "f64", "F64", 8, 1)                                            \
    X(FSDP_F16, "f16", "F16", 2, 1)                                            \
    X(FSDP_BF16, "bf16", "BF16", 2, 1)                                         \
    X(FSDP_I64, "i64", "I64", 8, 0)                                            \
    X(FSDP_I32, "i32", "I32", 4, 0)                                            \
    X(FSDP_I16, "i16", "I16", 2, 0)                                            \
    X(FSDP_I8, "i8", "I8", 1, 0)                                               \
    X(FSDP_U64, "u64", "U64", 8, 0)                                            \
    X(FSDP_U32, "u32", "U32", 4, 0)                                            \
    X(FSDP_U16, "u16", "U16", 2, 0)                                            \
    X(FSDP_U8, "u8", "U8", 1, 0)                                               \
    X(FSDP_BOOL, "bool", "BOOL", 1, 0)

/* FSDP_DTYPE_NONE is "not set", for policies. */
typedef enum fsdp_dtype {
    FSDP_DTYPE_NONE = -1,
#define FSDP__X(e, name, st, bytes, fp) e,
    FSDP_DTYPE_LIST(FSDP__X)
#undef FSDP__X
        FSDP_DTYPE_COUNT
} fsdp_dtype;

FSDP_API size_t fsdp_dtype_size(fsdp_dtype t);      /* 0 for NONE */
FSDP_API const char *fsdp_dtype_name(fsdp_dtype t); /* "none" for NONE */
FSDP_API int fsdp_dtype_is_floating(fsdp_dtype t);
/* Accepts the short name, the safetensors name, and PyTorch's ("float32",
 * "bfloat16", "torch.float16"). FSDP_DTYPE_NONE if unknown. */
FSDP_API fsdp_dtype fsdp_dtype_parse(const char *name);

FSDP_EXTERN_C_END
#endif
