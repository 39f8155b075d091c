/*
 * tree.c - the units below one root, put together at the root's first forward,
 * when names are known; and the check that all ranks have the same ones.
 */
#include "fsdp/unit.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"

fsdp__unit *fsdp__unit_of(const fsdp_module *m)
{
    return m ? m->in->shard : NULL;
}

/* ---- collecting ----------------------------------------------------------------- */

static bool collected(const fsdp__tree *t, const fsdp__unit *u)
{
    for (int i = 0; i < t->n_units; i++)
        if (t->units[i] == u) return true;
    return false;
}

static fsdp_status append(fsdp__tree *t, fsdp__unit *u, int64_t *cap)
{
    FSDP_TRY(FSDP__GROW(t->units, *cap, t->n_units + 1, "units"));
    u->index = t->n_units;
    t->units[t->n_units++] = u;
    return FSDP_OK;
}

/* m comes next among the modules of its unit: they stand in the tree's order. */
static void take_place(fsdp__unit *u, fsdp_module *m, int at)
{
    for (int k = at; k < u->n_modules; k++)
        if (u->modules[k] == m) {
            u->modules[k] = u->modules[at];
            u->modules[at] = m;
        }
}

/* m was the root of a tree of its own, and is called "" there. */
static fsdp_status ran_before(const fsdp_module *m)
{
    fsdp__str path = {0};
    fsdp__module_path(m, &path);
    fsdp_status s = fsdp__fail(FSDP_INVALID_STATE,
                               "module \"%s\" ran its own first forward before the root that holds "
                               "it; run the root first",
                               fsdp__str_get(&path));
    fsdp__str_free(&path);
    return s;
}

static fsdp_status collect(fsdp__tree *t, fsdp_module *m, int64_t *cap)
{
    fsdp__unit *u = fsdp__unit_of(m);
    if (u && u->tree) return ran_before(m);
    if (u && !collected(t, u)) {
        FSDP_TRY(append(t, u, cap));
        u->n_seen = 0;
        for (int k = 0; k < u->n_tied; k++)
            if (!collected(t, u->tied[k])) FSDP_TRY(append(t, u->tied[k], cap));
    }
    if (u) take_place(u, m, u->n_seen++);
    for (int64_t i = 0; i < m->in->n_children; i++)
        FSDP_TRY(collect(t, m->in->children[i], cap));
    return FSDP_OK;
}

/* The paths of u's modules below the root (whose own is `prefix` long), joined by ", ". */
static char *name_of(const fsdp__unit *u, size_t prefix)
{
    fsdp__str all = {0};
    const fsdp__unit *of = u->host ? u->host : u;
    if (of->n_users > 0) return fsdp__strdup(u->params[0].param->name);
    for (int k = 0; k < of->n_modules; k++) {
        fsdp__str s = {0};
        fsdp__module_path(of->modules[k], &s);
        const char *text = fsdp__str_get(&s) + (s.len >= prefix ? prefix : 0);
        fsdp__str_addf(&all, "%s%s", k ? ", " : "", *text == '.' ? text + 1 : text);
        fsdp__str_free(&s);
    }
    if (u->host) {
        fsdp__str_add(&all, all.len ? " over " : "over ");
        fsdp__mesh_text(u->opt.mesh, &all);
    }
    char *name = fsdp__strdup(fsdp__str_get(&all));
    fsdp__str_free(&all);
    return name;
}

static fsdp_status name_units(fsdp__tree *t)
{
    FSDP_TRY(fsdp__module_name_params(t->root));
    fsdp__str prefix = {0};
    fsdp__module_path(t->root, &prefix);
    for (int i = 0; i < t->n_units; i++) {
        fsdp__unit *u = t->units[i];
        char *name = name_of(u, prefix.len);
        if (!name) break;
        free(u->name);
        u->name = name;
        for (int k = 0; k < u->n_params; k++)
            u->params[k].param->unit = u->name;
        fsdp__unit_name_storages(u);
    }
    fsdp__str_free(&prefix);
    return fsdp_error();
}

/* ---- the same on every rank? --------------------------------------------------------- */

enum { LINE = 512 };

static const char *policy_name(fsdp_reshard_policy p)
{
    return p == FSDP_RESHARD_AUTO ? "automatically" : p == FSDP_RESHARD_ALWAYS ? "always" : "never";
}

/* Everything in which ranks must agree, in words: what differs can be read from two of them. */
static void describe(const fsdp__unit *u, const fsdp__fparam *p, char *line)
{
    fsdp__str s = {0};
    const fsdp_mixed_precision_policy *mp = &u->opt.mp_policy;
    fsdp__str_addf(&s, "%s ", p->param->name);
    fsdp__shape_text(p->param->ndim, p->param->size, &s);
    fsdp__str_addf(&s, " %s%s, gathered as %s, reduced as %s", fsdp_dtype_name(p->param->dtype),
                   p->param->requires_grad ? "" : " frozen", fsdp_dtype_name(p->whole->dtype),
                   fsdp_dtype_name(p->grad->dtype));
    if (p->sharded->dist) {
        fsdp__str_add(&s, ", ");
        p->sharded->dist->ops->describe(p->sharded->dist, &s);
    }
    fsdp__str_addf(
        &s, ", unit \"%s\" (freed after forward %s, outputs %s, inputs %s, prefetch %d%s)", u->name,
        policy_name(u->opt.reshard_after_forward),
        mp->output_dtype == FSDP_DTYPE_NONE ? "as they are" : fsdp_dtype_name(mp->output_dtype),
        mp->cast_forward_inputs ? "cast" : "as they are", u->opt.prefetch_limit,
        u->opt.private_gather ? ", private copies" : "");
    snprintf(line, LINE, "%s", fsdp__str_get(&s));
    fsdp__str_free(&s);
}

typedef struct table {
    uint64_t *hash;
    char (*line)[LINE];
    int64_t n;
} table;

static fsdp_status make_table(const fsdp__tree *t, table *tab)
{
    tab->n = t->n_buffers;
    for (int i = 0; i < t->n_units; i++)
        tab->n += t->units[i]->n_params;
    tab->hash = fsdp__calloc((size_t)tab->n + 1, sizeof *tab->hash, "a table of parameters");
    tab->line = fsdp__calloc((size_t)tab->n + 1, LINE, "a table of parameters");
    if (!tab->hash || !tab->line) return fsdp_error();
    int64_t k = 0;
    for (int i = 0; i < t->n_units; i++)
        for (int j = 0; j < t->units[i]->n_params; j++)
            describe(t->units[i], &t->units[i]->params[j], tab->line[k++]);
    for (int64_t i = 0; i < t->n_buffers; i++)
        FSDP_TRY(fsdp__buffer_line(t, i, tab->line[k++], LINE));
    for (int64_t i = 0; i < k; i++)
        tab->hash[i] = fsdp__rng_mix_str(fsdp__rng_key(7), tab->line[i]);
    snprintf(tab->line[k], LINE, "no parameter number %lld", (long long)k);
    return FSDP_OK;
}

/* Finds the first row that differs and says it with both ranks' words. */
static fsdp_status say_difference(const table *tab, fsdp_group *g, int64_t common)
{
    int n = fsdp_group_size(g);
    uint64_t *rows = fsdp__calloc((size_t)n * (size_t)(common + 1), sizeof *rows, "hashes");
    char(*lines)[LINE] = fsdp__calloc((size_t)n, LINE, "lines");
    fsdp_status s = rows && lines ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK && common > 0)
        s = fsdp_all_gather(g, FSDP_LANE_CONTROL, tab->hash, rows, common * 8, NULL);
    int64_t at = common;
    for (int64_t k = common - 1; k >= 0 && s == FSDP_OK; k--)
        for (int r = 1; r < n; r++)
            if (rows[r * common + k] != rows[k]) at = k;
    if (s == FSDP_OK) s = fsdp_all_gather(g, FSDP_LANE_CONTROL, tab->line[at], lines, LINE, NULL);
    for (int r = 1; r < n && s == FSDP_OK; r++)
        if (strcmp(lines[r], lines[0]))
            s = fsdp__fail(
                FSDP_MISMATCH,
                "ranks hold different parameters or cut them differently: rank %d has "
                "%s; rank %d has %s; build and shard the same model on all ranks (values "
                "are made equal by fsdp_sync_module_states)",
                fsdp_group_world_rank(g, 0), lines[0], fsdp_group_world_rank(g, r), lines[r]);
    free(rows);
    free(lines);
    return s;
}

static fsdp_status compare(const fsdp__tree *t, fsdp_group *g)
{
    int n = g ? fsdp_group_size(g) : 1;
    if (n == 1) return FSDP_OK;
    table tab = {0};
    uint64_t mine[2], *all = fsdp__calloc((size_t)n, sizeof mine, "hashes of parameters");
    fsdp_status s = make_table(t, &tab);
    if (s == FSDP_OK && !all) s = fsdp_error();
    mine[0] = (uint64_t)tab.n;
    mine[1] = fsdp__rng_key(3);
    for (int64_t k = 0; k < tab.n && s == FSDP_OK; k++)
        mine[1] = fsdp__rng_mix(mine[1], tab.hash[k]);
    if (s == FSDP_OK) s = fsdp_all_gather(g, FSDP_LANE_CONTROL, mine, all, sizeof mine, NULL);
    bool differ = false;
    int64_t common = tab.n;
    for (int r = 0; r < n && s == FSDP_OK; r++) {
        differ = differ || all[2 * r] != all[0] || all[2 * r + 1] != all[1];
        if ((int64_t)all[2 * r] < common) common = (int64_t)all[2 * r];
    }
    if (differ && s == FSDP_OK) s = say_difference(&tab, g, common);
    free(tab.hash);
    free(tab.line);
    free(all);
    return s;
}

/* ---- the tree --------------------------------------------------------------------------- */

/* Names of the parameters that are on the meta device, and how many. */
static int64_t on_meta(const fsdp__tree *t, fsdp__str *names)
{
    enum { SAID = 8 };
    int64_t n = 0;
    for (int i = 0; i < t->n_units; i++)
        for (int k = 0; k < t->units[i]->n_params; k++) {
            const fsdp__fparam *p = &t->units[i]->params[k];
            if (p->sharded->st->device != FSDP_META) continue;
            if (n++ < SAID) fsdp__str_addf(names, "%s%s", n > 1 ? ", " : "", p->param->name);
        }
    if (n > SAID) fsdp__str_addf(names, " and %lld more", (long long)(n - SAID));
    return n;
}

static fsdp_status settle(fsdp__tree *t)
{
    fsdp__str names = {0};
    int64_t n = on_meta(t, &names);
    if (n > 0)
        fsdp__fail(FSDP_INVALID_STATE,
                   "%s: still on the meta device; call fsdp_to_empty and fsdp_reset_parameters (or "
                   "load) before the first forward",
                   fsdp__str_get(&names));
    fsdp__str_free(&names);
    for (int i = 0; i < t->n_units; i++) {
        fsdp__unit *u = t->units[i];
        fsdp_reshard_policy r = u->opt.reshard_after_forward;
        u->keep = r == FSDP_RESHARD_NEVER || (r == FSDP_RESHARD_AUTO && u->module == t->root);
        for (int k = 0; k < 2; k++)
            t->explicit_lists = t->explicit_lists || u->n_lists[k] > 0;
    }
    return fsdp_error();
}

/* A slice leaves axes of its mesh out. Where these carry other data, nobody would sum the gradients
 * along them and the replicas would drift apart; axes of one rank, and those along which ranks see
 * the same rows, are no matter. */
static fsdp_status check_slice(const fsdp_mesh *m)
{
    static const char *const same_data[] = {"tp", "cp", "pp", "ep"};
    const fsdp_mesh *parent = fsdp_mesh_parent(m);
    for (int a = 0; a < fsdp_mesh_ndim(parent); a++) {
        const char *name = fsdp_mesh_axis_name(parent, a);
        bool fine = fsdp_mesh_size(parent, a) == 1;
        for (int b = 0; b < fsdp_mesh_ndim(m); b++)
            fine = fine || !strcmp(name, fsdp_mesh_axis_name(m, b));
        for (size_t k = 0; k < sizeof same_data / sizeof *same_data; k++)
            fine = fine || !strcmp(name, same_data[k]);
        if (!fine)
            return fsdp__fail(FSDP_UNSUPPORTED,
                              "fsdp_fully_shard over axis \"%s\" of a mesh that also has \"%s\" "
                              "%d: gradients would not be summed along it; give the whole mesh, or "
                              "sum them in a hook (fsdp_set_all_reduce_hook)",
                              fsdp_mesh_axis_name(m, 0), name, fsdp_mesh_size(parent, a));
    }
    return FSDP_OK;
}

void fsdp__queue_release(fsdp__queue *q)
{
    if (q && --q->refs == 0) free(q);
}

static void disband(fsdp__tree *t)
{
    for (int i = 0; i < t->n_units; i++)
        t->units[i]->tree = NULL;
    fsdp__buffers_free(t);
    fsdp__queue_release(t->queue);
    free(t->units);
    free(t);
}

static fsdp_status check_root(const fsdp_module *root)
{
    const fsdp__unit *u = fsdp__unit_of(root);
    if (!u || u->n_modules == 1) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_STATE,
                      "unit \"%s\" is a list of modules and cannot be the root; call "
                      "fsdp_fully_shard on the module that holds them too, and run that first",
                      u->name);
}

fsdp_status fsdp__tree_init(fsdp_module *root)
{
    FSDP_TRY(check_root(root));
    fsdp__tree *t = fsdp__calloc(1, sizeof *t, "the tree of units");
    if (!t) return fsdp_error();
    t->root = root;
    t->last_backward = true;
    int64_t cap = 0;
    t->queue = fsdp__calloc(1, sizeof *t->queue, "a queue of reductions");
    if (t->queue) t->queue->refs = 1;
    fsdp_status s = t->queue ? collect(t, root, &cap) : fsdp_error();
    if (s == FSDP_OK) s = name_units(t);
    if (s == FSDP_OK) s = settle(t);
    if (s == FSDP_OK) s = fsdp__buffers_collect(t);
    for (int i = 0; i < t->n_units && s == FSDP_OK; i++) {
        /* A hook may sum along the axes that the mesh leaves out. */
        if (!t->units[i]->hook) s = check_slice(t->units[i]->opt.mesh);
        bool seen = false; /* each mesh's groups are asked once */
        for (int k = 0; k < i && !seen; k++)
            seen = t->units[k]->opt.mesh == t->units[i]->opt.mesh;
        if (seen) continue;
        if (s == FSDP_OK) s = compare(t, t->units[i]->shard);
        if (s == FSDP_OK) s = compare(t, t->units[i]->replicate);
    }
    if (s != FSDP_OK) {
        disband(t);
        return s;
    }
    for (int i = 0; i < t->n_units; i++)
        t->units[i]->tree = t;
    return FSDP_OK;
}
