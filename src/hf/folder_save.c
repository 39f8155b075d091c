/*
 * folder_save.c - a model, sharded or not, as a Hugging Face folder.
 *
 * Rank 0 writes; the ranks that hold a parameter's rows send them in pieces of PIECE bytes, in the
 * dtype of the file, parameter by parameter and rank by rank, so that no rank holds more than its
 * shards and one piece. Everything is written into <folder>.tmp, which is renamed when complete. An
 * error of rank 0 reaches the others by its abort: they wait for rank 0 in every step and at the
 * end.
 */
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "dtensor/dtensor.h"
#include "format/file.h"
#include "fsdp/comm.h"
#include "hf/config.h"
#include "hf/folder.h"
#include "hf/folder_internal.h"
#include "hf/weights.h"
#include "lora/lora.h"

enum { PIECE = 4 << 20 };

typedef struct saving {
    const fsdp__hf_save_options *o;
    fsdp_dtype dtype;
    fsdp__hf_names names;
    fsdp__hf_writer *writer; /* rank 0 */
    char *piece;             /* (PIECE) */
} saving;

/* ---- one parameter ------------------------------------------------------------------- */

/* Which part of a parameter one rank of its group holds. */
typedef struct part {
    fsdp__cut cut;
    int64_t row0, run; /* elements of one outer index: rows * inner */
} part;

static part part_of(const fsdp__layout *l, const fsdp_param *p, int r)
{
    int a = l ? fsdp__layout_shard_axis(l) : -1;
    part x = {.cut = fsdp__cut_of(p->ndim, p->size, a < 0 ? 0 : l->place[a].dim,
                                  a < 0 ? 1 : fsdp_mesh_size(l->mesh, a))};
    x.run = fsdp__cut_rows(&x.cut, r, &x.row0) * x.cut.inner;
    if (x.run == x.cut.dim * x.cut.inner) { /* all of it is one run */
        x.run *= x.cut.outer;
        x.cut.outer = 1;
    }
    return x;
}

/* Rank 0: elements [at, at + n) of the part's own order go to their places in the file. */
static fsdp_status write_piece(saving *s, const char *name, const part *x, int64_t at, int64_t n)
{
    int64_t width = (int64_t)fsdp_dtype_size(s->dtype), done = 0;
    while (done < n) {
        int64_t o = (at + done) / x->run, in_run = (at + done) % x->run;
        int64_t m = x->run - in_run < n - done ? x->run - in_run : n - done;
        int64_t place = (o * x->cut.dim + x->row0) * x->cut.inner + in_run;
        FSDP_TRY(fsdp__hf_writer_write(s->writer, name, place * width, m * width,
                                       s->piece + done * width));
        done += m;
    }
    return FSDP_OK;
}

/* The part of the group's rank r; g NULL: this rank has it all. */
static fsdp_status save_part(saving *s, const char *name, const fsdp_param *p, const part *x,
                             fsdp_group *g, int r)
{
    const fsdp_tensor *t = fsdp__param_kept(p);
    int64_t width = (int64_t)fsdp_dtype_size(s->dtype), n = x->run * x->cut.outer;
    int64_t most = PIECE / width;
    int me = g ? fsdp_group_rank(g) : 0;
    for (int64_t at = 0; at < n; at += most) {
        int64_t m = n - at < most ? n - at : most;
        if (me == r)
            fsdp__convert(s->piece, s->dtype,
                          (const char *)fsdp_data(t) + (size_t)at * fsdp_dtype_size(t->dtype),
                          t->dtype, (size_t)m);
        if (me == r && r != 0) FSDP_TRY(fsdp_send(g, s->piece, m * width, 0, NULL));
        if (me == 0 && r != 0) FSDP_TRY(fsdp_recv(g, s->piece, m * width, r, NULL));
        if (me == 0) FSDP_TRY(write_piece(s, name, x, at, m));
    }
    return FSDP_OK;
}

static fsdp_status save_param(saving *s, const char *name, const fsdp_param *p)
{
    const fsdp_tensor *t = fsdp__param_kept(p);
    FSDP_TRY(fsdp__tensor_readable(t, "saving weights"));
    const fsdp__layout *l = fsdp__layout_of(t);
    int a = l ? fsdp__layout_shard_axis(l) : -1;
    if (a < 0) {
        part x = part_of(NULL, p, 0);
        return fsdp_rank() == 0 ? save_part(s, name, p, &x, NULL, 0) : FSDP_OK;
    }
    /* Copies of what rank 0's shard group holds have nothing to do. */
    for (int k = 0; k < fsdp_mesh_ndim(l->mesh); k++)
        if (k != a && fsdp_mesh_coordinate(l->mesh, k) != 0) return FSDP_OK;
    fsdp_group *g = fsdp_mesh_group(l->mesh, a);
    int me = fsdp_group_rank(g);
    for (int r = 0; r < fsdp_group_size(g); r++) {
        part x = part_of(l, p, r);
        if (me == 0 || me == r) FSDP_TRY(save_part(s, name, p, &x, g, r));
    }
    return FSDP_OK;
}

static fsdp_status save_weights(saving *s, const char *tmp)
{
    if (fsdp_rank() == 0) {
        s->writer = fsdp__hf_writer_create(tmp, s->o->shard_limit);
        if (!s->writer) return fsdp_error();
        for (int64_t i = 0; i < s->names.count; i++) {
            const fsdp__hf_name *n = &s->names.items[i];
            if (n->first < 0)
                FSDP_TRY(fsdp__hf_writer_add(s->writer, n->name, s->dtype, n->param->ndim,
                                             n->param->size));
        }
        FSDP_TRY(fsdp__hf_writer_begin(s->writer));
    }
    for (int64_t i = 0; i < s->names.count; i++)
        if (s->names.items[i].first < 0)
            FSDP_TRY(save_param(s, s->names.items[i].name, s->names.items[i].param));
    return fsdp_rank() == 0 ? fsdp__hf_writer_finish(s->writer) : FSDP_OK;
}

/* ---- the folder ---------------------------------------------------------------------------- */

static const char *const own_files[] = {"config.json", "generation_config.json", "tokenizer.json"};

/* What an earlier save has written, and so may be replaced. */
static bool is_ours(const char *name)
{
    for (size_t i = 0; i < sizeof own_files / sizeof *own_files; i++)
        if (!strcmp(name, own_files[i])) return true;
    return fsdp__starts_with(name, "model") && (fsdp__ends_with(name, ".safetensors") ||
                                                fsdp__ends_with(name, ".safetensors.index.json"));
}

fsdp_status fsdp__hf_check_replaceable(const char *folder)
{
    return fsdp__hf_check_files(folder, is_ours);
}

fsdp_status fsdp__hf_check_files(const char *folder, bool (*ours)(const char *name))
{
    char **names;
    int64_t n;
    FSDP_TRY(fsdp__dir_can_make(folder));
    if (!fsdp__dir_exists(folder)) return FSDP_OK;
    FSDP_TRY(fsdp__dir_list(folder, &names, &n));
    fsdp_status s = FSDP_OK;
    for (int64_t i = 0; i < n && s == FSDP_OK; i++)
        if (!ours(names[i]))
            s = fsdp__fail(FSDP_INVALID_ARGUMENT,
                           "%s: found '%s' there, expected a new folder or one of an earlier save; "
                           "name another folder",
                           folder, names[i]);
    fsdp__dir_list_free(names, n);
    return s;
}

char *fsdp__hf_beside(const char *folder, const char *ending)
{
    size_t n = strlen(folder); /* without the end of the name, where a slash stands */
    while (n > 1 && folder[n - 1] == '/')
        n--;
    fsdp__str s = {0};
    fsdp__str_add_n(&s, folder, n);
    fsdp__str_add(&s, ending);
    return fsdp__str_take(&s);
}

static fsdp_status write_file(const char *dir, const char *name, const fsdp_model_config *c,
                              const char *tokenizer)
{
    char *path = fsdp__path_join(dir, name);
    if (!path) return FSDP_NO_MEMORY;
    fsdp_status s = !strcmp(name, own_files[0])   ? fsdp__hf_config_save(c, path)
                    : !strcmp(name, own_files[1]) ? fsdp__hf_generation_save(c, path)
                    : tokenizer                   ? fsdp__file_copy(tokenizer, path)
                                                  : FSDP_OK;
    free(path);
    return s;
}

static fsdp_status begin_folder(const saving *s, const fsdp_model_config *c, const char *folder,
                                const char *tmp)
{
    fsdp_model_config stored = *c;
    stored.dtype = s->dtype;
    FSDP_TRY(fsdp__hf_check_replaceable(folder));
    FSDP_TRY(fsdp__dir_remove(tmp));
    FSDP_TRY(fsdp__dir_make(tmp));
    for (size_t i = 0; i < sizeof own_files / sizeof *own_files; i++)
        FSDP_TRY(write_file(tmp, own_files[i], &stored, s->o->tokenizer));
    return FSDP_OK;
}

fsdp_status fsdp__hf_save_folder(fsdp_module *model, const fsdp_model_config *c, const char *folder,
                                 const fsdp__hf_save_options *o)
{
    if (fsdp_error()) return fsdp_error();
    const fsdp__hf_save_options none = {.dtype = FSDP_DTYPE_NONE};
    saving v = {.o = o ? o : &none};
    v.dtype = v.o->dtype == FSDP_DTYPE_NONE ? FSDP_F32 : v.o->dtype;
    char *tmp = fsdp__hf_beside(folder, ".tmp"), *old = fsdp__hf_beside(folder, ".old");
    fsdp_status s = FSDP_OK;
    bool first = fsdp_rank() == 0;
    if (!tmp || !old) FSDP_GO(fsdp_error());
    if (fsdp_lora_count(model) && !fsdp_lora_merged(model))
        FSDP_GO(fsdp__fail(FSDP_INVALID_STATE,
                           "%s: the model has adapters, which a folder of a model does not hold: "
                           "call fsdp_lora_merge first, or save the adapters alone "
                           "(fsdp_lora_save)",
                           folder));
    FSDP_GO(fsdp__hf_names_of(model, &v.names));
    if (!(v.piece = fsdp__calloc(1, PIECE, "a piece of weights"))) FSDP_GO(fsdp_error());
    if (first) FSDP_GO(begin_folder(&v, c, folder, tmp));
    FSDP_GO(save_weights(&v, tmp));
    if (first) FSDP_GO(fsdp__dir_replace(tmp, folder, old));
    s = fsdp_barrier(fsdp_group_world(), FSDP_LANE_CONTROL);
done:
    fsdp__hf_writer_free(v.writer);
    if (s != FSDP_OK && first && tmp) fsdp__dir_remove(tmp);
    fsdp__hf_names_free(&v.names);
    free(v.piece);
    free(old);
    free(tmp);
    return s;
}
