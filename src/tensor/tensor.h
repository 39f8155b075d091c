/*
 * tensor.h - storages, tensors, scopes: the inside.
 *
 * A storage is bytes with an owner; it can be emptied and filled again in
 * place, which is how a gathered parameter comes and goes under the views that
 * autograd saved. A tensor is a shape over a storage.
 *
 * Invariants: st != NULL; offset and strides stay inside the storage; bytes of
 * a filled CPU storage that we allocated are charged to its purpose, once.
 * Filling is not a mutation: `version` counts writes through fsdp_touch and
 * the in-place functions, `shard_version` says which values a gathered
 * parameter was filled from.
 */
#ifndef FSDP_TENSOR_TENSOR_H
#define FSDP_TENSOR_TENSOR_H

#include <stdbool.h>

#include "base/str.h"
#include "device/allocator.h"
#include "fsdp/tensor.h"

typedef struct fsdp__storage {
    int refs;
    fsdp_device device;
    fsdp_purpose purpose;
    int64_t bytes;
    void *data;             /* NULL: meta, or empty */
    fsdp__allocator *alloc; /* who filled it; NULL: attached or foreign memory */
    fsdp__allocator *home;  /* who fills it when the caller names none; NULL: the CPU's */
    bool charged;           /* bytes are in the accounts */
    bool read_only;         /* peers see these bytes: in-place ops are refused */
    bool poisoned;          /* to_empty: nothing was written yet */
    void (*free_fn)(void *data, void *arg);
    void *free_arg;
    uint32_t version;
    uint64_t shard_version;
    const char *owner; /* name for messages, owned by the parameter; may be NULL */
} fsdp__storage;

/* Distributed tensors: the vtable that dtensor fills (see dtensor.h). */
typedef struct fsdp__dist fsdp__dist;
typedef struct fsdp__dist_ops {
    void (*free)(fsdp__dist *d);
    void (*describe)(const fsdp__dist *d, fsdp__str *out); /* "Shard(0) of (8, 8) on shard" */
    /* The cut: the whole is (outer, dim, inner), this rank holds rows
     * [row0, row0 + rows) of dim. Replicated: row0 0, rows dim. */
    void (*block)(const fsdp__dist *d, int64_t *outer, int64_t *dim, int64_t *inner, int64_t *row0,
                  int64_t *rows);
    void (*global_shape)(const fsdp__dist *d, int *ndim, const int64_t **sizes);
    /* The whole tensor on every rank, a collective; NULL with the error kept. */
    fsdp_tensor *(*full)(fsdp_tensor *t);
} fsdp__dist_ops;
struct fsdp__dist {
    const fsdp__dist_ops *ops;
    int refs;
};

struct fsdp__autograd; /* autograd/node.h */

struct fsdp_tensor {
    int refs;
    fsdp_dtype dtype;
    int ndim;
    int64_t size[FSDP_MAX_DIMS];
    int64_t stride[FSDP_MAX_DIMS]; /* elements */
    int64_t offset;                /* elements */
    fsdp__storage *st;
    fsdp_scope *scope; /* NULL: none owns it */
    int64_t scope_index;
    struct fsdp__autograd *ag; /* NULL: no gradient */
    void (*ag_free)(struct fsdp__autograd *ag);
    fsdp__dist *dist; /* set: a DTensor, and this is its local part */
};

/* ---- storages ------------------------------------------------------------- */

/* refs 1; empty until filled. */
fsdp__storage *fsdp__storage_create(fsdp_device d, int64_t bytes, fsdp_purpose p);
void fsdp__storage_retain(fsdp__storage *s);
void fsdp__storage_release(fsdp__storage *s);
/* Allocates and charges; alloc NULL: the CPU's. Filled already: nothing. */
fsdp_status fsdp__storage_fill(fsdp__storage *s, fsdp__allocator *alloc, const char *what);
/* Lends bytes that someone else holds (a shared copy), charged as if own. */
fsdp_status fsdp__storage_attach(fsdp__storage *s, void *data, const char *what);
/* Gives the bytes back; the storage object lives on. */
void fsdp__storage_empty(fsdp__storage *s);
void fsdp__storage_set_purpose(fsdp__storage *s, fsdp_purpose p);
bool fsdp__storage_filled(const fsdp__storage *s);
/* Storages whose bytes lie in a file (device/file.h); for others the next three do nothing and are
 * true or FSDP_OK. A use brings the bytes in and holds them until the matching done; without one
 * the bytes can be touched all the same. */
bool fsdp__storage_in_file(const fsdp__storage *s);
bool fsdp__storage_ahead(const fsdp__storage *s); /* false: no room for it now */
fsdp_status fsdp__storage_use(const fsdp__storage *s);
void fsdp__storage_done(const fsdp__storage *s, bool written);

/* ---- tensors -------------------------------------------------------------- */

/* Purpose of storages made from here on; returns the one before. */
fsdp_purpose fsdp__purpose_set(fsdp_purpose p);
/* Owned by the innermost scope, as every tensor. */
fsdp_tensor *fsdp__tensor_create(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_device d);
/* Filled by a given allocator and purpose. */
fsdp_tensor *fsdp__tensor_alloc(fsdp_dtype t, int ndim, const int64_t *sizes, fsdp_purpose p,
                                fsdp__allocator *alloc, const char *what);
/* A view; no gradient history. strides NULL: contiguous. */
fsdp_tensor *fsdp__tensor_view(fsdp__storage *st, fsdp_dtype t, int ndim, const int64_t *sizes,
                               const int64_t *strides, int64_t offset);
/* Takes t out of its scope and leaves the reference with the caller. */
fsdp_tensor *fsdp__tensor_own(fsdp_tensor *t);
void fsdp__contiguous_strides(int ndim, const int64_t *sizes, int64_t *strides);
int64_t fsdp__numel_of(int ndim, const int64_t *sizes);
bool fsdp__same_sizes(const fsdp_tensor *a, const fsdp_tensor *b);
int fsdp__dim(const fsdp_tensor *t, int dim); /* negative normalised; -1: out of range */
void fsdp__describe(const fsdp_tensor *t, fsdp__str *out);
void fsdp__shape_text(int ndim, const int64_t *sizes, fsdp__str *out);
/* Refuses tensors that hold nothing to read: freed or poisoned storages. */
fsdp_status fsdp__tensor_readable(const fsdp_tensor *t, const char *what);
/* The same, and it is not going to be read now. */
fsdp_status fsdp__tensor_has_values(const fsdp_tensor *t, const char *what);
fsdp_status fsdp__tensor_writable(const fsdp_tensor *t, const char *what);
bool fsdp__tensor_dense(const fsdp_tensor *t); /* contiguous */

/* ---- random numbers of ops --------------------------------------------------- */

/* The keys of the modules that were called, in order: what a forward that runs again draws by. Tapes
 * nest; the innermost that plays gives the keys, those inside it record. */
typedef struct fsdp__random_tape {
    uint64_t *keys;
    int64_t count, cap;
    int64_t at; /* next to play */
    bool plays;
    struct fsdp__random_tape *outer;
} fsdp__random_tape;

typedef struct fsdp__random {
    uint64_t seed, step;
    uint64_t *ids; /* (n_ids) */
    int64_t n_ids;
    uint64_t path;  /* key of the running module */
    uint64_t calls; /* ops that drew in it */
    uint64_t round; /* calls of fsdp_random_set: modules count their calls anew in each */
    fsdp__random_tape *tape; /* innermost; not owned */
} fsdp__random;
fsdp__random *fsdp__random_get(void);
/* Of a module that is called with key `path`: by the tapes in force, *path is replaced or noted. */
fsdp_status fsdp__random_enter(fsdp__random *r, uint64_t *path);
/* One key a row of a tensor with `rows` rows, as U64 (rows). */
fsdp_tensor *fsdp__random_keys(int64_t rows, const char *what);

#endif
