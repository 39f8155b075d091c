/*
 * mesh.c - a grid of ranks with named axes, and its groups.
 *
 * A mesh belongs to its context: it lives in a list that hangs off it.
 */
#include "mesh/mesh.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "mesh/hosts.h"

struct fsdp_mesh {
    fsdp_mesh *next; /* in the context's list */
    fsdp_mesh *parent;
    const fsdp_mesh *regroups; /* whose last axis this one cuts up */
    fsdp_device device;
    int ndim;
    int size[FSDP_MESH_MAX_DIMS], coord[FSDP_MESH_MAX_DIMS];
    char *name[FSDP_MESH_MAX_DIMS];
    fsdp_group *group[FSDP_MESH_MAX_DIMS];
};

static void free_meshes(void *p)
{
    for (fsdp_mesh *m = p; m;) {
        fsdp_mesh *next = m->next;
        for (int a = 0; a < m->ndim; a++)
            free(m->name[a]);
        free(m);
        m = next;
    }
}

static void own_by_context(fsdp_mesh *m)
{
    m->next = fsdp__slot_get(FSDP__SLOT_MESH);
    fsdp__slot_set(FSDP__SLOT_MESH, m, free_meshes);
}

/* "2 x 4, 4 x 2, ...": what two degrees could be. */
static void list_choices(int world, int ndim, fsdp__str *out)
{
    if (ndim == 1) {
        fsdp__str_addf(out, "%d", world);
        return;
    }
    for (int a = 1; a <= world; a++)
        if (world % a == 0) fsdp__str_addf(out, "%s%d x %d", a > 1 ? ", " : "", a, world / a);
}

static fsdp_status check(int ndim, const int *sizes, const char *const *names)
{
    if (!sizes || !names)
        return fsdp__fail_null("fsdp_mesh_create",
                               sizes ? "the list of names" : "the list of sizes");
    if (ndim < 1 || ndim > FSDP_MESH_MAX_DIMS)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "a mesh of %d axes; expected 1 to %d", ndim,
                          FSDP_MESH_MAX_DIMS);
    int64_t product = 1;
    for (int a = 0; a < ndim; a++) {
        if (sizes[a] < 1 || !names[a] || !*names[a])
            return fsdp__fail(FSDP_INVALID_ARGUMENT,
                              "mesh axis %d: size %d, name \"%s\"; expected a size of 1 or more "
                              "and a name",
                              a, sizes[a], names[a] ? names[a] : "");
        for (int b = 0; b < a; b++)
            if (!strcmp(names[a], names[b]))
                return fsdp__fail(FSDP_INVALID_ARGUMENT, "two mesh axes are named \"%s\"",
                                  names[a]);
        product *= sizes[a];
    }
    if (product == fsdp_world_size()) return FSDP_OK;
    fsdp__str s = {0}, c = {0};
    for (int a = 0; a < ndim; a++)
        fsdp__str_addf(&s, "%s%s %d", a ? " x " : "", names[a], sizes[a]);
    list_choices(fsdp_world_size(), ndim, &c);
    fsdp__fail(FSDP_INVALID_CONFIG, "mesh %s is %lld ranks and there are %d; valid: %s",
               fsdp__str_get(&s), (long long)product, fsdp_world_size(), fsdp__str_get(&c));
    fsdp__str_free(&s);
    fsdp__str_free(&c);
    return fsdp_error();
}

/* The ranks that differ from ours along axis a only, ascending. */
static void axis_ranks(const fsdp_mesh *m, int a, int *ranks)
{
    int stride = 1, base = 0;
    for (int b = m->ndim - 1; b >= 0; b--) {
        if (b != a) base += m->coord[b] * stride;
        if (b > a) {
            stride *= m->size[b];
            continue;
        }
        if (b == a) {
            for (int i = 0; i < m->size[a]; i++)
                ranks[i] = i * stride;
        }
        stride *= m->size[b];
    }
    for (int i = 0; i < m->size[a]; i++)
        ranks[i] += base;
}

fsdp_mesh *fsdp_mesh_create(fsdp_device d, int ndim, const int *sizes, const char *const *names)
{
    if (fsdp_error() || check(ndim, sizes, names) != FSDP_OK) return NULL;
    if (d != FSDP_CPU) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "fsdp_mesh_create: device %d; expected FSDP_CPU, where the ranks compute",
                   (int)d);
        return NULL;
    }
    fsdp_mesh *m = fsdp__calloc(1, sizeof *m, "a mesh");
    int *ranks = fsdp__calloc((size_t)fsdp_world_size(), sizeof *ranks, "a mesh");
    if (!m || !ranks) goto fail;
    m->device = d;
    int rest = fsdp_rank();
    for (int a = ndim - 1; a >= 0; a--) {
        m->size[a] = sizes[a];
        m->coord[a] = rest % sizes[a];
        rest /= sizes[a];
    }
    m->ndim = ndim;
    for (int a = 0; a < ndim; a++) {
        if (!(m->name[a] = fsdp__strdup(names[a]))) goto fail;
        axis_ranks(m, a, ranks);
        if (fsdp_group_create(fsdp_group_world(), ranks, sizes[a], names[a], &m->group[a]) !=
            FSDP_OK)
            goto fail;
    }
    free(ranks);
    own_by_context(m);
    return m;
fail:
    if (m)
        for (int a = 0; a < FSDP_MESH_MAX_DIMS; a++)
            free(m->name[a]);
    free(m);
    free(ranks);
    return NULL;
}

int fsdp_mesh_ndim(const fsdp_mesh *m)
{
    return m ? m->ndim : 0;
}

int fsdp_mesh_size(const fsdp_mesh *m, int axis)
{
    return m && axis >= 0 && axis < m->ndim ? m->size[axis] : 0;
}

const char *fsdp_mesh_axis_name(const fsdp_mesh *m, int axis)
{
    return m && axis >= 0 && axis < m->ndim ? m->name[axis] : "";
}

int fsdp_mesh_axis(const fsdp_mesh *m, const char *name)
{
    if (!m || !name) {
        fsdp__fail_null("fsdp_mesh_axis", m ? "the name" : "the mesh");
        return -1;
    }
    for (int a = 0; a < m->ndim; a++)
        if (!strcmp(m->name[a], name)) return a;
    fsdp__str s = {0};
    for (int a = 0; a < m->ndim; a++)
        fsdp__str_addf(&s, "%s%s", a ? ", " : "", m->name[a]);
    fsdp__fail(FSDP_NOT_FOUND, "no mesh axis \"%s\"; there are: %s", name, fsdp__str_get(&s));
    fsdp__str_free(&s);
    return -1;
}

int fsdp_mesh_coordinate(const fsdp_mesh *m, int axis)
{
    return m && axis >= 0 && axis < m->ndim ? m->coord[axis] : 0;
}

fsdp_group *fsdp_mesh_group(const fsdp_mesh *m, int axis)
{
    return m && axis >= 0 && axis < m->ndim ? m->group[axis] : NULL;
}

fsdp_mesh *fsdp_mesh_slice(fsdp_mesh *m, const char *name)
{
    int a = fsdp_mesh_axis(m, name);
    if (a < 0) return NULL;
    fsdp_mesh *s = fsdp__calloc(1, sizeof *s, "a mesh");
    if (!s || !(s->name[0] = fsdp__strdup(name))) {
        free(s);
        return NULL;
    }
    s->parent = m;
    s->device = m->device;
    s->ndim = 1;
    s->size[0] = m->size[a];
    s->coord[0] = m->coord[a];
    s->group[0] = m->group[a];
    own_by_context(s);
    return s;
}

/* One axis of the regrouped mesh `to`: the ranks of m's last axis that follow each other, or every
 * k-th of them. */
static fsdp_status regroup_axis(const fsdp_mesh *m, fsdp_mesh *to, int axis, int k)
{
    fsdp_group *whole = m->group[m->ndim - 1];
    int n = fsdp_group_size(whole), me = fsdp_group_rank(whole);
    int size = axis ? k : n / k;
    int *ranks = fsdp__calloc((size_t)size, sizeof *ranks, "a mesh");
    if (!ranks) return fsdp_error();
    for (int i = 0; i < size; i++)
        ranks[i] = fsdp_group_world_rank(whole, axis ? me / k * k + i : me % k + i * k);
    fsdp_status s =
        fsdp_group_create(fsdp_group_world(), ranks, size, to->name[axis], &to->group[axis]);
    free(ranks);
    to->size[axis] = size;
    to->coord[axis] = axis ? me % k : me / k;
    return s;
}

fsdp_mesh *fsdp__mesh_regroup(fsdp_mesh *m, int k)
{
    static const char *const names[] = {"replicate", "shard"};
    for (fsdp_mesh *old = fsdp__slot_get(FSDP__SLOT_MESH); old; old = old->next)
        if (old->regroups == m && old->size[1] == k) return old;
    fsdp_mesh *r = fsdp__calloc(1, sizeof *r, "a mesh");
    if (!r) return NULL;
    r->regroups = m;
    r->device = m->device;
    r->ndim = 2;
    fsdp_status s = FSDP_OK;
    for (int a = 0; a < 2 && s == FSDP_OK; a++) {
        r->name[a] = fsdp__strdup(names[a]);
        s = r->name[a] ? regroup_axis(m, r, a, k) : fsdp_error();
    }
    if (s == FSDP_OK) {
        own_by_context(r);
        return r;
    }
    free(r->name[0]);
    free(r->name[1]);
    free(r);
    return NULL;
}

fsdp_mesh *fsdp_mesh_parent(const fsdp_mesh *m)
{
    return m ? m->parent : NULL;
}

/* Place of a rank of the world along axis a: in the mesh that m was sliced from, if it was. */
static int place_of(const fsdp_mesh *m, int a, int rank)
{
    const char *name = m->name[a];
    while (m->parent)
        m = m->parent;
    int stride = 1;
    for (int b = m->ndim - 1; b >= 0; b--) {
        if (!strcmp(m->name[b], name)) return rank / stride % m->size[b];
        stride *= m->size[b];
    }
    return 0;
}

/* A line a rank, and, of a mesh that was not sliced from another, what its axes are on hosts. */
static void add_hosts(const fsdp_mesh *m, const char *const *host, fsdp__str *s)
{
    int world = fsdp_world_size();
    for (int r = 0; r < world; r++) {
        fsdp__str_addf(s, "  rank %d:", r);
        for (int a = 0; a < m->ndim; a++)
            fsdp__str_addf(s, " %s %d,", m->name[a], place_of(m, a, r));
        fsdp__str_addf(s, " host %s\n", host[r]);
    }
    fsdp__host_table t = {m->ndim, m->size, (const char *const *)m->name, world, host};
    if (m->parent) return;
    fsdp__axes_text(&t, s);
    (void)fsdp__mesh_advice(&t, s);
}

char *fsdp_mesh_print(fsdp_mesh *m)
{
    if (!m) {
        fsdp__fail_null("fsdp_mesh_print", "the mesh");
        return NULL;
    }
    enum { HOST = 64 };
    int world = fsdp_world_size();
    char mine[HOST] = "";
    const char *given = getenv("FSDP_HOST_ID");
    if (given)
        strncpy(mine, given, HOST - 1);
    else
        gethostname(mine, HOST - 1);
    char *all = fsdp__calloc((size_t)world, HOST, "host names");
    const char **host = all ? fsdp__calloc((size_t)world, sizeof *host, "host names") : NULL;
    fsdp__str s = {0};
    if (host &&
        fsdp_all_gather(fsdp_group_world(), FSDP_LANE_CONTROL, mine, all, HOST, NULL) == FSDP_OK) {
        for (int r = 0; r < world; r++)
            host[r] = all + (size_t)r * HOST;
        for (int a = 0; a < m->ndim; a++)
            fsdp__str_addf(&s, "%s%s %d", a ? " x " : "", m->name[a], m->size[a]);
        fsdp__str_add(&s, "\n");
        add_hosts(m, host, &s);
    }
    free(host);
    free(all);
    return fsdp_error() ? (fsdp__str_free(&s), NULL) : fsdp__str_take(&s);
}
