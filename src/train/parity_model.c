/*
 * parity_model.c - the model that is compared, and its steps over dealt batches.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"
#include "format/file.h"
#include "fsdp/models.h"
#include "fsdp/shard.h"
#include "hf/config.h"
#include "hf/folder.h"
#include "train/parity_internal.h"

enum { IGNORE_INDEX = -100 };

/* ---- making --------------------------------------------------------------------- */

static fsdp_status load_config(const char *folder, fsdp_model_config *c)
{
    char *path = fsdp__path_join(folder, "config.json");
    if (!path) return fsdp_error();
    fsdp_status s = fsdp__hf_config_load(path, c);
    free(path);
    return s;
}

static fsdp_status make_mesh(const fsdp__parity_options *o, int64_t replicas, fsdp_mesh **out)
{
    static const char *const names[] = {"replicate", "shard"};
    int world = fsdp_world_size(), sizes[2] = {1, world};
    if (o->strategy == FSDP__PARITY_NONE)
        sizes[0] = world, sizes[1] = 1;
    else
        sizes[0] = (int)replicas, sizes[1] = world / (int)replicas;
    int from = sizes[0] == 1;
    *out = fsdp_mesh_create(FSDP_CPU, 2 - from, sizes + from, names + from);
    return *out ? FSDP_OK : fsdp_error();
}

static fsdp_status shard(fsdp_module *m, const fsdp__parity_options *o, int64_t replicas, bool bf16)
{
    fsdp_mesh *mesh;
    FSDP_TRY(make_mesh(o, replicas, &mesh));
    fsdp_shard_options opt = fsdp_shard_defaults(mesh);
    if (o->strategy != FSDP__PARITY_FULL) opt.reshard_after_forward = FSDP_RESHARD_NEVER;
    if (bf16) {
        opt.mp_policy.param_dtype = FSDP_BF16;
        opt.mp_policy.reduce_dtype = FSDP_F32;
    }
    for (int64_t i = 0; i < fsdp_model_block_count(m); i++)
        FSDP_TRY(fsdp_fully_shard(fsdp_model_block(m, i), &opt));
    FSDP_TRY(fsdp_fully_shard(m, &opt));
    /* The loss is a sum; it is scaled by hand. */
    return fsdp_set_gradient_divide_factor(m, 1.0, 1);
}

fsdp_status fsdp__parity_make_model(fsdp__parity_run *r, const char *folder, int64_t replicas,
                                    bool bf16)
{
    FSDP_TRY(load_config(folder, &r->config));
    fsdp_device_push(FSDP_META);
    r->model = fsdp_model_create(&r->config);
    fsdp_device_pop();
    if (!r->model) return fsdp_error();
    FSDP_TRY(shard(r->model, r->o, replicas, bf16));
    FSDP_TRY(fsdp_to_empty(r->model, FSDP_CPU));
    return fsdp__hf_load_weights(r->model, folder);
}

/* ---- batches ---------------------------------------------------------------------- */

static void copy_rows(fsdp_tensor *t, const int64_t *from, int64_t stride, int64_t rows, int64_t T)
{
    int64_t *p = fsdp_data(t);
    for (int64_t i = 0; i < rows; i++)
        memcpy(p + i * T, from + i * stride, (size_t)T * sizeof *p);
    fsdp_touch(t);
}

fsdp_status fsdp__parity_deal(const int64_t *tokens, const int64_t *targets, int64_t stride,
                              int64_t rows, int64_t T, fsdp__parity_batch *out)
{
    int64_t n = fsdp_world_size(), each = (rows + n - 1) / n, first = fsdp_rank() * each;
    *out = (fsdp__parity_batch){.row0 = first};
    if (first < rows) out->rows = rows - first < each ? rows - first : each;
    int64_t have = out->rows ? out->rows : 1, sizes[2] = {have, T};
    if (!out->rows) out->row0 = first = 0;
    out->tokens = fsdp_empty(FSDP_I64, 2, sizes);
    out->targets = fsdp_empty(FSDP_I64, 2, sizes);
    if (!out->targets) return fsdp_error();
    copy_rows(out->tokens, tokens + first * stride, stride, have, T);
    if (out->rows) {
        copy_rows(out->targets, targets + first * stride, stride, have, T);
        return FSDP_OK;
    }
    return fsdp_fill_(out->targets, IGNORE_INDEX);
}

fsdp_status fsdp__parity_backward(fsdp__parity_run *r, const fsdp__parity_batch *b, double scale,
                                  bool last, double *sum)
{
    FSDP_TRY(fsdp_set_requires_gradient_sync(r->model, last, 1));
    FSDP_TRY(fsdp_set_is_last_backward(r->model, last));
    fsdp_scope *scope = fsdp_scope_begin();
    fsdp_tensor *loss = fsdp_model_forward(r->model, b->tokens, NULL, b->targets);
    if (loss) *sum += fsdp_item(loss);
    fsdp_status s = fsdp_backward(fsdp_scale(loss, scale));
    fsdp_scope_end(scope);
    return s;
}

fsdp_status fsdp__parity_sum(double *x, int64_t n)
{
    return fsdp_all_reduce(fsdp_group_world(), FSDP_LANE_CONTROL, x, n, FSDP_F64, FSDP_SUM, NULL);
}
