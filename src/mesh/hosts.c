/*
 * hosts.c - how the axes of a mesh lie over hosts. See hosts.h.
 */
#include "mesh/hosts.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

/* Ranks that differ by one along the axis are this far apart. */
static int stride_of(const fsdp__host_table *t, int axis)
{
    int stride = 1;
    for (int a = axis + 1; a < t->ndim; a++)
        stride *= t->size[a];
    return stride;
}

/* Whether r is the first rank of its group along the axis. */
static bool is_first(const fsdp__host_table *t, int axis, int r)
{
    return r / stride_of(t, axis) % t->size[axis] == 0;
}

bool fsdp__axis_crosses(const fsdp__host_table *t, int axis)
{
    int stride = stride_of(t, axis);
    for (int r = 0; r < t->world; r++) {
        if (!is_first(t, axis, r)) continue;
        for (int i = 1; i < t->size[axis]; i++)
            if (strcmp(t->host[r + i * stride], t->host[r])) return true;
    }
    return false;
}

/* ---- text ------------------------------------------------------------------------------- */

/* "0 2 (a, b)": the ranks of the group that begins with r, and its hosts. */
static void add_group(const fsdp__host_table *t, int axis, int r, fsdp__str *out)
{
    int stride = stride_of(t, axis);
    for (int i = 0; i < t->size[axis]; i++)
        fsdp__str_addf(out, "%s%d", i ? " " : "", r + i * stride);
    fsdp__str_add(out, " (");
    for (int i = 0; i < t->size[axis]; i++) {
        const char *host = t->host[r + i * stride];
        bool known = false;
        for (int k = 0; k < i && !known; k++)
            known = !strcmp(t->host[r + k * stride], host);
        if (!known) fsdp__str_addf(out, "%s%s", i ? ", " : "", host);
    }
    fsdp__str_add(out, ")");
}

void fsdp__axes_text(const fsdp__host_table *t, fsdp__str *out)
{
    enum { SHOWN = 8 };
    for (int a = 0; a < t->ndim; a++) {
        int n = 0;
        fsdp__str_addf(out, "  %s groups: ", t->name[a]);
        for (int r = 0; r < t->world; r++) {
            if (!is_first(t, a, r)) continue;
            if (n++ == SHOWN) fsdp__str_add(out, ", ...");
            if (n > SHOWN) continue;
            if (n > 1) fsdp__str_add(out, ", ");
            add_group(t, a, r, out);
        }
        fsdp__str_addf(out, "; %s\n",
                       t->size[a] == 1            ? "of one rank each"
                       : fsdp__axis_crosses(t, a) ? "they cross hosts"
                                                  : "inside a host each");
    }
}

/* ---- advice ------------------------------------------------------------------------------- */

static int gcd(int a, int b)
{
    while (b) {
        int r = a % b;
        a = b;
        b = r;
    }
    return a;
}

/* Ranks host by host, hosts in the order in which they come first; the largest number of ranks that
 * divides what each host has. */
static int by_host(const fsdp__host_table *t, int *order)
{
    int n = 0, common = 0;
    for (int r = 0; r < t->world; r++) {
        bool seen = false;
        for (int k = 0; k < r && !seen; k++)
            seen = !strcmp(t->host[k], t->host[r]);
        if (seen) continue;
        int before = n;
        for (int k = r; k < t->world; k++)
            if (!strcmp(t->host[k], t->host[r])) order[n++] = k;
        common = gcd(common, n - before);
    }
    return common;
}

bool fsdp__mesh_advice(const fsdp__host_table *t, fsdp__str *out)
{
    int shard = t->ndim - 1, replicate = shard - 1;
    if (t->ndim < 2 || t->size[shard] == 1 || t->size[replicate] == 1) return false;
    if (!fsdp__axis_crosses(t, shard) || fsdp__axis_crosses(t, replicate)) return false;
    int *order = fsdp__calloc((size_t)t->world, sizeof *order, "ranks by host");
    if (!order) return false;
    int common = by_host(t, order);
    int size = common % t->size[shard] == 0 ? t->size[shard] : common;
    int others = t->world / t->size[shard] / t->size[replicate]; /* axes before the two */
    fsdp__str_addf(out,
                   "the %s axis crosses hosts and the %s axis does not, so parameters are gathered "
                   "over the network and only the smaller sums stay inside a host. Right would be "
                   "%s %d x %s %d over the ranks in the order ",
                   t->name[shard], t->name[replicate], t->name[replicate], t->world / others / size,
                   t->name[shard], size);
    for (int i = 0; i < t->world; i++)
        fsdp__str_addf(out, "%s%d", i ? " " : "", order[i]);
    fsdp__str_add(out, ": number the ranks host by host (mpirun --map-by slot)\n");
    free(order);
    return true;
}
