/*
 * list.c - what the collectives on lists have in common: who owns which rows, and what is refused.
 */
#include "base/error.h"
#include "comm/comm_internal.h"

/* First row of rank r; the number of rows of the tensor when it has none. */
int64_t fsdp__rows_begin(const fsdp_list_entry *e, int r)
{
    int64_t begin = r * e->chunk;
    return begin < e->dim ? begin : e->dim;
}

int64_t fsdp__rows_count(const fsdp_list_entry *e, int r)
{
    return fsdp__rows_begin(e, r + 1) - fsdp__rows_begin(e, r);
}

fsdp_status fsdp__list_check(const char *what, const fsdp_group *g, const fsdp_list_entry *e, int n)
{
    if (n < 0 || (n > 0 && !e))
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: a list of %d entries at %p", what, n,
                          (const void *)e);
    for (int i = 0; i < n; i++) {
        if (e[i].outer < 0 || e[i].dim < 0 || e[i].inner < 0 || e[i].chunk < 0)
            return fsdp__fail(FSDP_INVALID_SHAPE,
                              "%s: entry %d is (%lld, %lld, %lld) in chunks of %lld; expected no "
                              "negative size",
                              what, i, (long long)e[i].outer, (long long)e[i].dim,
                              (long long)e[i].inner, (long long)e[i].chunk);
        if (e[i].dim > 0 && (e[i].dim - 1) / g->size >= e[i].chunk)
            return fsdp__fail(
                FSDP_INVALID_SHAPE,
                "%s: entry %d has %lld rows, more than %d ranks own in chunks of %lld", what, i,
                (long long)e[i].dim, g->size, (long long)e[i].chunk);
        if (fsdp_dtype_size(e[i].full_dtype) == 0 || fsdp_dtype_size(e[i].shard_dtype) == 0)
            return fsdp__fail(FSDP_INVALID_DTYPE,
                              "%s: entry %d goes from %s to %s; set both dtypes", what, i,
                              fsdp_dtype_name(e[i].shard_dtype), fsdp_dtype_name(e[i].full_dtype));
    }
    return FSDP_OK;
}
