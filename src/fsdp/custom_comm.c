/*
 * custom_comm.c - collectives of the user's, and its hook on reduced gradients.
 *
 * Such a collective knows flat arrays, so here, and only here, is what FSDP2 does always: rows are
 * packed into an array of equal parts and unpacked from one. Part r of it holds, entry by entry,
 * the rows of rank r, padded to the chunk with zeros.
 *
 *     gather   input (n) -> output (N, n)     own rows -> all rows, of the dtype of compute
 *     reduce   input (N, n) -> output (n)     the whole gradients -> the sum of the own rows
 *
 * A reduction's ranks first agree which parameters have a gradient, since zeros do not tell.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "fsdp/unit.h"
#include "tensor/kernels.h"

typedef struct fsdp__custom {
    fsdp_custom_all_gather gather; /* call NULL: not set */
    fsdp_custom_reduce_scatter reduce;
    fsdp_tensor *input, *output; /* of what runs; own references */
    fsdp_work *work;             /* the user's */
    int n;                       /* entries */
    fsdp_group *group;
} fsdp__custom;

bool fsdp__custom_gathers(const fsdp__unit *u)
{
    return u->custom && u->custom->gather.call && u->S > 1;
}

bool fsdp__custom_reduces(const fsdp__unit *u)
{
    return u->custom && u->custom->reduce.call && u->S > 1;
}

void fsdp__custom_drop(fsdp__unit *u)
{
    fsdp__custom *c = u->custom;
    if (!c) return;
    if (c->work) fsdp_work_wait(c->work);
    c->work = NULL;
    fsdp_release(c->input);
    fsdp_release(c->output);
    c->input = c->output = NULL;
}

void fsdp__custom_free(fsdp__unit *u)
{
    fsdp__custom_drop(u);
    free(u->custom);
    u->custom = NULL;
}

fsdp_status fsdp__users_status(fsdp_status s, const char *what, const char *name)
{
    if (s != FSDP_OK && !fsdp_error())
        fsdp__fail(s, "the %s of %s returned %s", what, name, fsdp_status_name(s));
    return s != FSDP_OK ? s : fsdp_error();
}

static fsdp_status units_status(fsdp_status s, const char *what, const fsdp__unit *u)
{
    fsdp__str name = {0};
    fsdp__str_addf(&name, "unit \"%s\"", u->name);
    s = fsdp__users_status(s, what, fsdp__str_get(&name));
    fsdp__str_free(&name);
    return s;
}

/* ---- flat arrays --------------------------------------------------------------------- */

static fsdp_status allocate(fsdp_tensor **out, const fsdp__unit *u, fsdp_comm_allocate_fn fn,
                            void *arg, int64_t n, fsdp_dtype t)
{
    fsdp_tensor *x = fn ? fn(arg, n, t)
                        : fsdp__tensor_alloc(t, 1, &n, FSDP_COMMUNICATION,
                                             fsdp__comm_allocator(u->shard), u->name);
    FSDP_TRY(fsdp_error());
    if (!x || x->dtype != t || fsdp_numel(x) != n || !fsdp__tensor_dense(x) || !x->st->data)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "unit \"%s\": the allocate of its collective gives %s; expected %lld "
                          "contiguous elements of %s with memory",
                          u->name, x ? "another tensor" : "NULL", (long long)n, fsdp_dtype_name(t));
    *out = fsdp_retain(x);
    return FSDP_OK;
}

/* Elements of an entry in one part. */
static int64_t part_numel(const fsdp_list_entry *e)
{
    return e->outer * e->chunk * e->inner;
}

static int64_t rows_of(const fsdp_list_entry *e, int r, int64_t *first)
{
    *first = r * e->chunk < e->dim ? r * e->chunk : e->dim;
    int64_t end = (r + 1) * e->chunk < e->dim ? (r + 1) * e->chunk : e->dim;
    return end - *first;
}

/* The whole of an entry, at rank r's rows, to or from that rank's part. */
static void move_rows(const fsdp_list_entry *e, int r, char *part, char *whole, size_t width,
                      bool pack)
{
    int64_t first, rows = rows_of(e, r, &first);
    size_t run = (size_t)(rows * e->inner) * width, padded = (size_t)(e->chunk * e->inner) * width;
    for (int64_t o = 0; o < e->outer; o++, part += padded) {
        char *at = whole ? whole + (size_t)((o * e->dim + first) * e->inner) * width : NULL;
        if (pack && at && run > 0) memcpy(part, at, run);
        if (pack) memset(part + (at ? run : 0), 0, padded - (at ? run : 0));
        if (!pack && run > 0) memcpy(at, part, run);
    }
}

/* ---- gather ---------------------------------------------------------------------------- */

/* One dtype for all entries, or bytes. */
static fsdp_dtype common_dtype(const fsdp_list_entry *e, int n)
{
    for (int i = 1; i < n; i++)
        if (e[i].full_dtype != e[0].full_dtype) return FSDP_U8;
    return e[0].full_dtype;
}

static void pack_own(const fsdp_list_entry *e, int rank, char *part)
{
    int64_t first, rows = rows_of(e, rank, &first);
    size_t width = fsdp_dtype_size(e->full_dtype), from = fsdp_dtype_size(e->shard_dtype);
    memset(part, 0, (size_t)part_numel(e) * width);
    for (int64_t o = 0; o < e->outer && rows * e->inner > 0; o++)
        fsdp__convert(part + (size_t)(o * e->chunk * e->inner) * width, e->full_dtype,
                      (const char *)e->shard + (size_t)(o * rows * e->inner) * from, e->shard_dtype,
                      (size_t)(rows * e->inner));
}

fsdp_status fsdp__custom_gather_begin(fsdp__unit *u, fsdp_group *g, int n)
{
    fsdp__custom *c = u->custom;
    const fsdp_list_entry *e = u->gather_entries;
    fsdp_dtype t = common_dtype(e, n);
    int64_t numel = 0;
    for (int i = 0; i < n; i++)
        numel +=
            part_numel(&e[i]) * (int64_t)(fsdp_dtype_size(e[i].full_dtype) / fsdp_dtype_size(t));
    fsdp__custom_drop(u);
    FSDP_TRY(
        allocate(&c->output, u, c->gather.allocate, c->gather.arg, numel * fsdp_group_size(g), t));
    FSDP_TRY(allocate(&c->input, u, c->gather.allocate, c->gather.arg, numel, t));
    char *part = fsdp_data(c->input);
    for (int i = 0; i < n; i++) {
        pack_own(&e[i], fsdp_group_rank(g), part);
        part += (size_t)part_numel(&e[i]) * fsdp_dtype_size(e[i].full_dtype);
    }
    c->n = n;
    c->group = g;
    return units_status(c->gather.call(c->gather.arg, c->output, c->input, g, &c->work),
                        "custom all-gather", u);
}

fsdp_status fsdp__custom_gather_end(fsdp__unit *u)
{
    fsdp__custom *c = u->custom;
    if (!c->output) return FSDP_OK;
    fsdp_work *w = c->work;
    c->work = NULL;
    fsdp_status s = fsdp_work_wait(w);
    char *part = fsdp_data(c->output);
    for (int r = 0; r < fsdp_group_size(c->group) && s == FSDP_OK; r++)
        for (int i = 0; i < c->n; i++) {
            const fsdp_list_entry *e = &u->gather_entries[i];
            size_t width = fsdp_dtype_size(e->full_dtype);
            move_rows(e, r, part, e->full, width, false);
            part += (size_t)part_numel(e) * width;
        }
    fsdp__custom_drop(u);
    return s;
}

/* ---- reduce ------------------------------------------------------------------------------ */

/* Which entries some rank of the group has. */
static fsdp_status agree_presence(fsdp__unit *u)
{
    size_t n = (size_t)u->n_reduce;
    uint8_t *mask = fsdp__calloc(n + 1, 1, "a mask of gradients");
    if (!mask) return fsdp_error();
    for (size_t k = 0; k < n; k++)
        mask[k] = u->reduce_entries[k].present != 0;
    fsdp_status s =
        fsdp_all_reduce(u->shard, FSDP_LANE_REDUCE, mask, (int64_t)n, FSDP_U8, FSDP_MAX, NULL);
    for (size_t k = 0; k < n && s == FSDP_OK; k++)
        u->reduce_entries[k].present = mask[k];
    free(mask);
    return s;
}

static fsdp_status check_dtypes(const fsdp__unit *u)
{
    const fsdp_list_entry *e = u->reduce_entries;
    for (int k = 1; k < u->n_reduce; k++)
        if (e[k].full_dtype != e[0].full_dtype)
            return fsdp__fail(
                FSDP_INVALID_DTYPE,
                "unit \"%s\" reduces by a collective of the user's, and has gradients "
                "in %s and %s; set mp_policy.reduce_dtype",
                u->name, fsdp_dtype_name(e[0].full_dtype), fsdp_dtype_name(e[k].full_dtype));
    return FSDP_OK;
}

fsdp_status fsdp__custom_reduce_begin(fsdp__unit *u)
{
    fsdp__custom *c = u->custom;
    const fsdp_list_entry *e = u->reduce_entries;
    fsdp_dtype t = e[0].full_dtype;
    int64_t numel = 0;
    int ranks = fsdp_group_size(u->shard);
    FSDP_TRY(check_dtypes(u));
    for (int k = 0; k < u->n_reduce; k++)
        numel += part_numel(&e[k]);
    fsdp__custom_drop(u);
    FSDP_TRY(allocate(&c->input, u, c->reduce.allocate, c->reduce.arg, numel * ranks, t));
    FSDP_TRY(allocate(&c->output, u, c->reduce.allocate, c->reduce.arg, numel, t));
    char *part = fsdp_data(c->input);
    size_t width = fsdp_dtype_size(t);
    for (int r = 0; r < ranks; r++)
        for (int k = 0; k < u->n_reduce; k++) {
            move_rows(&e[k], r, part, e[k].present ? e[k].full : NULL, width, true);
            part += (size_t)part_numel(&e[k]) * width;
        }
    double before = fsdp__unit_division(u).before;
    if (before != 1.0)
        fsdp__k_unary(FSDP__UNARY_scale, fsdp_data(c->input), t, numel * ranks, 1.0 / before,
                      fsdp_data(c->input));
    FSDP_TRY(agree_presence(u));
    c->n = u->n_reduce;
    return units_status(c->reduce.call(c->reduce.arg, c->output, c->input, u->shard, &c->work),
                        "custom reduce-scatter", u);
}

fsdp_status fsdp__custom_reduce_end(fsdp__unit *u)
{
    fsdp__custom *c = u->custom;
    fsdp_work *w = c->work;
    c->work = NULL;
    FSDP_TRY(fsdp_work_wait(w));
    const char *part = fsdp_data(c->output);
    for (int k = 0; k < c->n; k++) {
        const fsdp_list_entry *e = &u->reduce_entries[k];
        const fsdp__fparam *p = &u->params[u->reduce_params[k]];
        size_t width = fsdp_dtype_size(e->full_dtype), to = fsdp_dtype_size(u->sums->dtype);
        int64_t first, rows = rows_of(e, fsdp_group_rank(u->shard), &first), run = rows * e->inner;
        for (int64_t o = 0; o < e->outer && run > 0 && e->present; o++) {
            const void *source = part + (size_t)(o * e->chunk * e->inner) * width;
            fsdp__sum_tree((char *)fsdp__sums_at(u, p) + (size_t)(o * run) * to, u->sums->dtype,
                           &source, e->full_dtype, 1, (size_t)run, 1.0f, p->summed);
        }
        part += (size_t)part_numel(e) * width;
    }
    fsdp__custom_drop(u);
    return FSDP_OK;
}

/* ---- the hook ----------------------------------------------------------------------------- */

static fsdp_status call_hook(fsdp__unit *u)
{
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_no_grad_begin();
    fsdp_status s =
        scope ? units_status(u->hook(u->hook_arg, u->sums), "all-reduce hook", u) : fsdp_error();
    fsdp_no_grad_end();
    fsdp_scope_end(scope);
    return s != FSDP_OK ? s : fsdp_error();
}

static int run_on_stream(void *arg)
{
    return call_hook(arg) == FSDP_OK ? 1 : -1;
}

fsdp_status fsdp__hook_begin(fsdp__unit *u)
{
    if (!u->hook) return FSDP_OK;
    if (u->hook_stream) return fsdp_stream_submit(u->hook_stream, run_on_stream, u);
    return call_hook(u);
}

fsdp_status fsdp__hook_end(fsdp__unit *u)
{
    return u->hook && u->hook_stream ? fsdp_stream_sync(u->hook_stream) : FSDP_OK;
}

/* ---- setting ------------------------------------------------------------------------------- */

static fsdp_status custom_of(fsdp_module *m, const char *what, fsdp__unit **u)
{
    FSDP_TRY(fsdp__unit_need(m, what, u));
    FSDP_TRY(fsdp__unit_one_mesh(*u, what));
    if (!fsdp__unit_resting(*u) || (*u)->stage != FSDP__REDUCE_NONE)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: unit \"%s\" is gathered or reduced now; call fsdp_reshard, and set "
                          "it between steps",
                          what, (*u)->name);
    if (!(*u)->custom) (*u)->custom = fsdp__calloc(1, sizeof(fsdp__custom), "a collective");
    return (*u)->custom ? FSDP_OK : fsdp_error();
}

fsdp_status fsdp_set_custom_all_gather(fsdp_module *m, const fsdp_custom_all_gather *c)
{
    fsdp__unit *u;
    FSDP_TRY(custom_of(m, "fsdp_set_custom_all_gather", &u));
    if (c && !c->call)
        return fsdp__fail_null("fsdp_set_custom_all_gather", "the function that is to be called");
    u->custom->gather = c ? *c : (fsdp_custom_all_gather){0};
    return FSDP_OK;
}

fsdp_status fsdp_set_custom_reduce_scatter(fsdp_module *m, const fsdp_custom_reduce_scatter *c)
{
    fsdp__unit *u;
    FSDP_TRY(custom_of(m, "fsdp_set_custom_reduce_scatter", &u));
    if (c && !c->call)
        return fsdp__fail_null("fsdp_set_custom_reduce_scatter",
                               "the function that is to be called");
    u->custom->reduce = c ? *c : (fsdp_custom_reduce_scatter){0};
    return FSDP_OK;
}

fsdp_status fsdp_set_allocate_memory_from_process_group_for_comm(fsdp_module *m, int on)
{
    static const char what[] = "fsdp_set_allocate_memory_from_process_group_for_comm";
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, what, &u));
    if (on && u->custom && (u->custom->gather.call || u->custom->reduce.call))
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: unit \"%s\" has a collective of the user's, which allocates by "
                          "itself; take it away first, or leave this off",
                          what, u->name);
    return FSDP_OK;
}

fsdp_status fsdp_set_separate_reduce_scatter_group(fsdp_module *m, int on, int recurse)
{
    (void)on;
    (void)recurse;
    fsdp__unit *u;
    return fsdp__unit_need(m, "fsdp_set_separate_reduce_scatter_group", &u);
}

fsdp_status fsdp_set_all_reduce_hook(fsdp_module *m, fsdp_all_reduce_hook hook, void *arg,
                                     fsdp_stream *stream)
{
    static const char what[] = "fsdp_set_all_reduce_hook";
    fsdp__unit *u;
    FSDP_TRY(fsdp__unit_need(m, what, &u));
    FSDP_TRY(fsdp__unit_one_mesh(u, what));
    if (stream && !hook)
        return fsdp__fail(FSDP_INVALID_ARGUMENT, "%s: a stream without a hook to run on it", what);
    if (stream && u->replicate)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "%s: unit \"%s\" has replicas of its own, whose reduction has its lane; a "
            "stream is for hooks of a mesh with one axis",
            what, u->name);
    if (u->stage != FSDP__REDUCE_NONE || u->sums)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: unit \"%s\" has gradients under way; set it between steps", what,
                          u->name);
    for (int i = -1; i < u->n_tied; i++) { /* weights that it shares are reduced apart */
        fsdp__unit *each = i < 0 ? u : u->tied[i];
        each->hook = hook;
        each->hook_arg = arg;
        each->hook_stream = stream;
    }
    return FSDP_OK;
}
