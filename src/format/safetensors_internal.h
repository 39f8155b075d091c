/*
 * safetensors_internal.h - what the header parser, the reader and the writer share.
 */
#ifndef FSDP_FORMAT_SAFETENSORS_INTERNAL_H
#define FSDP_FORMAT_SAFETENSORS_INTERNAL_H

#include <stdbool.h>

#include "base/map.h"
#include "format/safetensors.h"

/* A row of the format's dtypes. Their order is the format's rank: writers put higher ranks first.
 */
typedef struct fsdp__st_dtype {
    const char *name;
    int bits;
    fsdp_dtype dtype; /* FSDP_DTYPE_NONE: not computed with here */
} fsdp__st_dtype;

/* NULL if the format has no such name. */
const fsdp__st_dtype *fsdp__st_dtype_find(const char *name);
/* The rank of a dtype of this library. */
int fsdp__st_dtype_rank(fsdp_dtype t);

/* One tensor while the header is read; the public view stands inside. begin and end are relative to
 * the data, as in the file. */
typedef struct fsdp__st_item {
    fsdp__st_tensor t;
    const fsdp__st_dtype *dtype;
    uint64_t begin, end;
    int64_t shape_at; /* index of its shape in the pool, which moves while it grows */
} fsdp__st_item;

typedef struct fsdp__st_meta_item {
    const char *key, *value;
} fsdp__st_meta_item;

/* A parsed header. All text points into `text`, where strings were unescaped in place. */
typedef struct fsdp__st_header {
    char *text;           /* N bytes and a NUL */
    fsdp__st_item *items; /* in the order of the header */
    int64_t n, cap;
    int64_t *shapes; /* pool */
    int64_t n_shapes, cap_shapes;
    fsdp__st_meta_item *meta;
    int64_t n_meta, cap_meta;
    fsdp__map *by_name;     /* to an index of items */
    fsdp__st_item **sorted; /* by (begin, end) */
} fsdp__st_header;

/* Parses h->text (n bytes, changed on the way) and fills the rest. path is for messages. */
fsdp_status fsdp__st_header_parse(fsdp__st_header *h, size_t n, const char *path);
/* Ranges, sizes and the file's length; sets offset, bytes and numel. */
fsdp_status fsdp__st_header_check(fsdp__st_header *h, size_t n, int64_t file_size,
                                  const char *path);
void fsdp__st_header_free(fsdp__st_header *h);

/* A name as it stands in messages: control characters escaped, long ones cut. */
typedef struct fsdp__shown {
    char text[160];
} fsdp__shown;
fsdp__shown fsdp__show(const char *name, size_t len);

#endif
