/*
 * self.c - a group of one rank: every collective is a conversion from what the rank has to what it
 * asked for. Nothing is moved between ranks, so nothing is counted, posted or waited for.
 *
 * Read this first: it is what each collective means, for N = 1.
 */
#include <string.h>

#include "base/convert.h"
#include "comm/comm_internal.h"

static size_t numel(const fsdp_list_entry *e)
{
    return (size_t)(e->outer * e->dim * e->inner);
}

/* The one shard is the whole parameter. */
fsdp_status fsdp__self_gather(const fsdp_list_entry *e, int n)
{
    for (int i = 0; i < n; i++) {
        if (e[i].full == e[i].shard && e[i].full_dtype == e[i].shard_dtype) continue;
        if (numel(&e[i]) > 0)
            fsdp__convert(e[i].full, e[i].full_dtype, e[i].shard, e[i].shard_dtype, numel(&e[i]));
    }
    return FSDP_OK;
}

/* The sum over ranks is the rank's own gradient. */
fsdp_status fsdp__self_reduce(fsdp_list_entry *e, int n, float scale, int add)
{
    for (int i = 0; i < n; i++) {
        const void *source = e[i].full;
        if (e[i].present && numel(&e[i]) > 0)
            fsdp__sum_tree(e[i].shard, e[i].shard_dtype, &source, e[i].full_dtype, 1, numel(&e[i]),
                           scale, add);
    }
    return FSDP_OK;
}

fsdp_status fsdp__self_all_reduce(fsdp_list_entry *e, int n, float scale)
{
    for (int i = 0; i < n; i++) {
        const void *source = e[i].full;
        if (e[i].present && numel(&e[i]) > 0 && scale != 1.0f)
            fsdp__sum_tree(e[i].full, e[i].full_dtype, &source, e[i].full_dtype, 1, numel(&e[i]),
                           scale, 0);
    }
    return FSDP_OK;
}

fsdp_status fsdp__self_copy(const void *send, void *recv, int64_t bytes)
{
    if (bytes > 0 && send != recv) memmove(recv, send, (size_t)bytes);
    return FSDP_OK;
}

/* The copy that all ranks share is the rank's own memory. */
fsdp_status fsdp__self_shared_take(int64_t bytes, const char *what, fsdp_shared *out)
{
    fsdp__allocator *a = fsdp__allocator_cpu();
    void *p = a ? a->alloc(a, (size_t)(bytes > 0 ? bytes : 1), what) : NULL;
    if (!p) return fsdp_error();
    *out = (fsdp_shared){.ro = p, .rw = p, .bytes = bytes};
    return FSDP_OK;
}

void fsdp__self_shared_give(const fsdp_shared *s)
{
    fsdp__allocator *a = fsdp__allocator_cpu();
    if (a) a->free(a, s->rw, (size_t)(s->bytes > 0 ? s->bytes : 1));
}
