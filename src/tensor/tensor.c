/*
 * tensor.c - making, owning and looking at tensors.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/context.h"
#include "base/convert.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/rng.h"
#include "device/file.h"
#include "tensor/kernels.h"
#include "tensor/state.h"

/* ---- shapes --------------------------------------------------------------- */

void fsdp__contiguous_strides(int ndim, const int64_t *sizes, int64_t *strides)
{
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        strides[i] = step;
        step *= sizes[i] > 1 ? sizes[i] : 1;
    }
}

int64_t fsdp__numel_of(int ndim, const int64_t *sizes)
{
    int64_t n = 1;
    for (int i = 0; i < ndim; i++)
        n *= sizes[i];
    return n;
}

bool fsdp__same_sizes(const fsdp_tensor *a, const fsdp_tensor *b)
{
    if (a->ndim != b->ndim) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->size[i] != b->size[i]) return false;
    return true;
}

int fsdp__dim(const fsdp_tensor *t, int dim)
{
    if (dim < 0) dim += t->ndim;
    return dim >= 0 && dim < t->ndim ? dim : -1;
}

bool fsdp__tensor_dense(const fsdp_tensor *t)
{
    int64_t step = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->size[i] != 1 && t->stride[i] != step) return fsdp_numel(t) == 0;
        step *= t->size[i];
    }
    return true;
}

void fsdp__shape_text(int ndim, const int64_t *sizes, fsdp__str *out)
{
    fsdp__str_add(out, "(");
    for (int i = 0; i < ndim; i++)
        fsdp__str_addf(out, i ? ", %lld" : "%lld", (long long)sizes[i]);
    fsdp__str_add(out, ")");
}

void fsdp__describe(const fsdp_tensor *t, fsdp__str *out)
{
    fsdp__str_addf(out, "%s ", fsdp_dtype_name(t->dtype));
    fsdp__shape_text(t->ndim, t->size, out);
    fsdp__str_addf(out, " %s", fsdp_device_name(t->st->device));
    if (t->dist) {
        fsdp__str_add(out, ", ");
        t->dist->ops->describe(t->dist, out);
    }
}

char *fsdp_tensor_describe(const fsdp_tensor *t)
{
    fsdp__str s = {0};
    if (t)
        fsdp__describe(t, &s);
    else
        fsdp__str_add(&s, "no tensor");
    return fsdp__str_take(&s);
}

static fsdp_status check_shape(fsdp_dtype t, int ndim, const int64_t *sizes)
{
    if (t < 0 || t >= FSDP_DTYPE_COUNT)
        return fsdp__fail(FSDP_INVALID_DTYPE, "a tensor of dtype %d; expected one of fsdp_dtype",
                          (int)t);
    if (ndim < 0 || ndim > FSDP_MAX_DIMS)
        return fsdp__fail(FSDP_INVALID_SHAPE, "a tensor of %d dims; expected 0 to %d", ndim,
                          FSDP_MAX_DIMS);
    if (ndim > 0 && !sizes) return fsdp__fail_null("a tensor", "the list of sizes");
    int64_t n = (int64_t)fsdp_dtype_size(t);
    for (int i = 0; i < ndim; i++) {
        if (sizes[i] < 0)
            return fsdp__fail(FSDP_INVALID_SHAPE, "size %lld of dim %d is negative",
                              (long long)sizes[i], i);
        if (__builtin_mul_overflow(n, sizes[i], &n))
            return fsdp__fail(FSDP_INVALID_SHAPE, "a tensor of more than 2^63 bytes");
    }
    return FSDP_OK;
}

/* ---- making ----------------------------------------------------------------- */

/* Takes over one reference to st. */
static fsdp_tensor *wrap(fsdp__storage *st, fsdp_dtype t, int ndim, const int64_t *sizes,
                         const int64_t *strides, int64_t offset)
{
    fsdp_tensor *x = fsdp__calloc(1, sizeof *x, "a tensor");
    if (!x) {
        fsdp__storage_release(st);
        return NULL;
    }
    x->refs = 1;
    x->dtype = t;
    x->ndim = ndim;
    x->st = st;
    x->offset = offset;
    for (int i = 0; i < ndim; i++)
        x->size[i] = sizes[i];
    if (strides)
        memcpy(x->stride, strides, sizeof(int64_t) * (size_t)ndim);
    else
        fsdp__contiguous_strides(ndim, sizes, x->stride);
    return fsdp__scope_adopt(x);
}

fsdp_tensor *fsdp__tensor_view(fsdp__storage *st, fsdp_dtype t, int ndim, const int64_t *sizes,
                               const int64_t *strides, int64_t offset)
{
    fsdp__storage_retain(st);
    return wrap(st, t, ndim, sizes, strides, offset);
}

static fsdp_tensor *make(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_device d,
                         fsdp_purpose p, fsdp__allocator *alloc, const char *what)
{
    if (check_shape(t, ndim, sizes) != FSDP_OK) return NULL;
    int64_t bytes = fsdp__numel_of(ndim, sizes) * (int64_t)fsdp_dtype_size(t);
    fsdp__storage *st = fsdp__storage_create(d, bytes, p);
    if (!st) return NULL;
    if (fsdp__storage_fill(st, alloc, what) != FSDP_OK) {
        fsdp__storage_release(st);
        return NULL;
    }
    return wrap(st, t, ndim, sizes, NULL, 0);
}

fsdp_tensor *fsdp__tensor_create(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_device d)
{
    fsdp__tensor_state *s = fsdp__tensor_state_get();
    return s ? make(t, ndim, sizes, d, s->purpose, NULL, "a tensor") : NULL;
}

fsdp_tensor *fsdp__tensor_alloc(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_purpose p,
                                fsdp__allocator *alloc, const char *what)
{
    return make(t, ndim, sizes, FSDP_CPU, p, alloc, what);
}

fsdp_tensor *fsdp_empty(fsdp_dtype t, int ndim, const int64_t *sizes)
{
    return fsdp__tensor_create(t, ndim, sizes, fsdp_device_current());
}

fsdp_tensor *fsdp_full(fsdp_dtype t, int ndim, const int64_t *sizes, double value)
{
    fsdp_tensor *x = fsdp_empty(t, ndim, sizes);
    if (x && x->st->data) fsdp__k_fill(fsdp_data(x), t, fsdp_numel(x), value);
    return x;
}

fsdp_tensor *fsdp_zeros(fsdp_dtype t, int ndim, const int64_t *sizes)
{
    return fsdp_full(t, ndim, sizes, 0.0);
}

fsdp_tensor *fsdp_scalar(fsdp_dtype t, double value)
{
    return fsdp_full(t, 0, NULL, value);
}

fsdp_tensor *fsdp_tensor_from_memory(void *data, fsdp_dtype t, int ndim, const int64_t *sizes,
                                     const int64_t *strides, void (*free_fn)(void *, void *),
                                     void *arg)
{
    if (check_shape(t, ndim, sizes) != FSDP_OK) return NULL;
    if (!data) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "fsdp_tensor_from_memory: data is NULL");
        return NULL;
    }
    int64_t last = 0; /* element at the far end, which bounds the storage */
    for (int i = 0; strides && i < ndim; i++) {
        if (strides[i] < 0) {
            fsdp__fail(FSDP_INVALID_SHAPE, "stride %lld of dim %d is negative",
                       (long long)strides[i], i);
            return NULL;
        }
        last += sizes[i] > 0 ? (sizes[i] - 1) * strides[i] : 0;
    }
    int64_t n = strides ? last + 1 : fsdp__numel_of(ndim, sizes);
    fsdp__storage *st = fsdp__storage_create(FSDP_CPU, n * (int64_t)fsdp_dtype_size(t), FSDP_OTHER);
    if (!st) return NULL;
    st->data = data;
    st->free_fn = free_fn;
    st->free_arg = arg;
    return wrap(st, t, ndim, sizes, strides, 0);
}

static fsdp_tensor *random_tensor(fsdp_dtype t, int ndim, const int64_t *sizes, uint64_t seed,
                                  const char *name,
                                  void (*fill)(uint64_t, uint64_t, float *, size_t))
{
    if (!name) {
        fsdp__fail_null("random numbers", "the name that they are a function of");
        return NULL;
    }
    fsdp_tensor *x = fsdp_empty(t, ndim, sizes);
    if (!x || !x->st->data) return x;
    uint64_t key = fsdp__rng_mix_str(fsdp__rng_key(seed), name);
    size_t width = fsdp_dtype_size(t);
    int64_t n = fsdp_numel(x);
    float part[256];
    for (int64_t i = 0; i < n; i += 256) {
        size_t m = (size_t)(n - i < 256 ? n - i : 256);
        fill(key, (uint64_t)i, part, m);
        fsdp__convert((char *)fsdp_data(x) + (size_t)i * width, t, part, FSDP_F32, m);
    }
    return x;
}

fsdp_tensor *fsdp_randn(fsdp_dtype t, int ndim, const int64_t *sizes, uint64_t seed,
                        const char *name)
{
    return random_tensor(t, ndim, sizes, seed, name, fsdp__rng_normal_fill);
}

fsdp_tensor *fsdp_rand(fsdp_dtype t, int ndim, const int64_t *sizes, uint64_t seed,
                       const char *name)
{
    return random_tensor(t, ndim, sizes, seed, name, fsdp__rng_uniform_fill);
}

fsdp_tensor *fsdp_detach(fsdp_tensor *t)
{
    return t ? fsdp__tensor_view(t->st, t->dtype, t->ndim, t->size, t->stride, t->offset) : NULL;
}

/* ---- owning ------------------------------------------------------------------- */

fsdp_tensor *fsdp_retain(fsdp_tensor *t)
{
    if (t) t->refs++;
    return t;
}

void fsdp_release(fsdp_tensor *t)
{
    if (!t || --t->refs > 0) return;
    fsdp__scope_forget(t); /* released by hand although a scope owned it */
    if (t->ag) t->ag_free(t->ag);
    if (t->dist && --t->dist->refs == 0) t->dist->ops->free(t->dist);
    fsdp__storage_release(t->st);
    free(t);
}

/* ---- looking -------------------------------------------------------------------- */

int fsdp_ndim(const fsdp_tensor *t)
{
    return t ? t->ndim : 0;
}

int64_t fsdp_size(const fsdp_tensor *t, int i)
{
    int d = t ? fsdp__dim(t, i) : -1;
    return d < 0 ? 0 : t->size[d];
}

int64_t fsdp_stride(const fsdp_tensor *t, int i)
{
    int d = t ? fsdp__dim(t, i) : -1;
    return d < 0 ? 0 : t->stride[d];
}

const int64_t *fsdp_sizes(const fsdp_tensor *t)
{
    return t ? t->size : NULL;
}

int64_t fsdp_numel(const fsdp_tensor *t)
{
    return t ? fsdp__numel_of(t->ndim, t->size) : 0;
}

fsdp_dtype fsdp_tensor_dtype(const fsdp_tensor *t)
{
    return t ? t->dtype : FSDP_DTYPE_NONE;
}

fsdp_device fsdp_tensor_device(const fsdp_tensor *t)
{
    return t ? t->st->device : FSDP_CPU;
}

int fsdp_is_contiguous(const fsdp_tensor *t)
{
    return t && fsdp__tensor_dense(t);
}

void *fsdp_data(const fsdp_tensor *t)
{
    if (!t || !t->st->data) return NULL;
    return (char *)t->st->data + (size_t)t->offset * fsdp_dtype_size(t->dtype);
}

void fsdp_touch(fsdp_tensor *t)
{
    if (!t) return;
    t->st->version++;
    t->st->poisoned = false;
    if (fsdp__storage_in_file(t->st)) fsdp__file_note(t->st->alloc, t->st->data, true);
}

fsdp_status fsdp__tensor_has_values(const fsdp_tensor *t, const char *what)
{
    const fsdp__storage *st = t->st;
    const char *owner = st->owner ? st->owner : "a tensor";
    if (st->device == FSDP_META)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: %s is on the meta device and has no values; give it memory with "
                          "fsdp_to_empty and values with fsdp_reset_parameters or a load first",
                          what, owner);
    if (!st->data)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: the storage of %s is freed; it is sharded now: unshard its module "
                          "first, or use it inside the module's forward",
                          what, owner);
    if (st->poisoned)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: %s was made by fsdp_to_empty and nothing was written to it; call "
                          "fsdp_reset_parameters or load it first",
                          what, owner);
    return FSDP_OK;
}

fsdp_status fsdp__tensor_readable(const fsdp_tensor *t, const char *what)
{
    FSDP_TRY(fsdp__tensor_has_values(t, what));
    if (!fsdp__storage_in_file(t->st)) return FSDP_OK;
    fsdp__file_note(t->st->alloc, t->st->data, false);
    return fsdp_error();
}

fsdp_status fsdp__tensor_writable(const fsdp_tensor *t, const char *what)
{
    const fsdp__storage *st = t->st;
    const char *owner = st->owner ? st->owner : "this tensor";
    if (st->device != FSDP_META && !st->data)
        return fsdp__fail(FSDP_INVALID_STATE, "%s: the storage of %s is freed", what, owner);
    if (st->read_only)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "%s: %s is a gathered copy that all ranks of this host share and cannot "
                          "be written; write its shard instead",
                          what, owner);
    return FSDP_OK;
}

double fsdp_at(const fsdp_tensor *t, const int64_t *index)
{
    if (!t || fsdp__tensor_readable(t, "fsdp_at") != FSDP_OK) return NAN;
    if (!index && t->ndim > 0) {
        fsdp__fail_null("fsdp_at", "the index");
        return NAN;
    }
    int64_t at = t->offset;
    for (int i = 0; i < t->ndim; i++) {
        if (index[i] < 0 || index[i] >= t->size[i]) {
            fsdp__fail(FSDP_INVALID_ARGUMENT, "index %lld of dim %d; the size is %lld",
                       (long long)index[i], i, (long long)t->size[i]);
            return NAN;
        }
        at += index[i] * t->stride[i];
    }
    double v;
    fsdp__convert(&v, FSDP_F64, (char *)t->st->data + (size_t)at * fsdp_dtype_size(t->dtype),
                  t->dtype, 1);
    return v;
}

double fsdp_item(const fsdp_tensor *t)
{
    if (!t) return NAN;
    if (fsdp_numel(t) != 1) {
        fsdp__str s = {0};
        fsdp__describe(t, &s);
        fsdp__fail(FSDP_INVALID_SHAPE, "fsdp_item of %s; expected one element", fsdp__str_get(&s));
        fsdp__str_free(&s);
        return NAN;
    }
    int64_t zero[FSDP_MAX_DIMS] = {0};
    return fsdp_at(t, zero);
}

fsdp_status fsdp_to_doubles(const fsdp_tensor *t, double *out)
{
    if (!t || !out) return fsdp__fail_null("fsdp_to_doubles", t ? "the place" : "the tensor");
    FSDP_TRY(fsdp__tensor_readable(t, "fsdp_to_doubles"));
    int64_t strides[FSDP_MAX_DIMS];
    fsdp__contiguous_strides(t->ndim, t->size, strides);
    fsdp__k_copy(t->ndim, t->size, fsdp_data(t), t->dtype, t->stride, out, FSDP_F64, strides, 0);
    return FSDP_OK;
}

/* ---- writing ---------------------------------------------------------------------- */

static fsdp_status write_from(fsdp_tensor *dst, const fsdp_tensor *src, int add, const char *what)
{
    if (!dst || !src) return fsdp__fail_null(what, "a tensor");
    if (!fsdp__same_sizes(dst, src)) {
        fsdp__str a = {0}, b = {0};
        fsdp__describe(dst, &a);
        fsdp__describe(src, &b);
        fsdp__fail(FSDP_INVALID_SHAPE, "%s: from %s into %s; sizes must be equal", what,
                   fsdp__str_get(&b), fsdp__str_get(&a));
        fsdp__str_free(&a);
        fsdp__str_free(&b);
        return fsdp_error();
    }
    FSDP_TRY(fsdp__tensor_writable(dst, what));
    if (dst->st->device == FSDP_META) return FSDP_OK;
    FSDP_TRY(fsdp__tensor_readable(src, what));
    if (add) FSDP_TRY(fsdp__tensor_readable(dst, what));
    fsdp__k_copy(dst->ndim, dst->size, fsdp_data(src), src->dtype, src->stride, fsdp_data(dst),
                 dst->dtype, dst->stride, add);
    fsdp_touch(dst);
    return FSDP_OK;
}

fsdp_status fsdp_copy_(fsdp_tensor *dst, const fsdp_tensor *src)
{
    return write_from(dst, src, 0, "fsdp_copy_");
}

fsdp_status fsdp_accumulate_(fsdp_tensor *dst, const fsdp_tensor *src)
{
    return write_from(dst, src, 1, "fsdp_accumulate_");
}

fsdp_status fsdp_fill_(fsdp_tensor *t, double value)
{
    if (!t) return fsdp__fail_null("fsdp_fill_", "the tensor");
    FSDP_TRY(fsdp__tensor_writable(t, "fsdp_fill_"));
    if (t->st->device == FSDP_META) return FSDP_OK;
    if (fsdp__tensor_dense(t)) {
        fsdp__k_fill(fsdp_data(t), t->dtype, fsdp_numel(t), value);
    } else {
        int64_t none[FSDP_MAX_DIMS] = {0};
        fsdp__k_copy(t->ndim, t->size, &value, FSDP_F64, none, fsdp_data(t), t->dtype, t->stride,
                     0);
    }
    fsdp_touch(t);
    return FSDP_OK;
}
