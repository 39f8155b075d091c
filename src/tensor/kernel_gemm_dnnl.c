/*
 * kernel_gemm_dnnl.c - matrix products by oneDNN: f32 by its sgemm where the
 * machine has AVX-512, bf16 by its matmul where the machine has bf16
 * instructions.
 *
 * Everywhere else the packed product is used: with AVX2 it is as fast as
 * oneDNN's sgemm or faster (the commit that brought it has the table), and
 * oneDNN's bf16 without such instructions is a slow reference, which the test
 * of an implementation's name below refuses.
 *
 * Invariants: oneDNN runs on the calling thread alone, whatever OpenMP would
 * give it, so that a panel's bits depend on its shape only. Its limit of
 * instruction sets is set once, before its first use.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <oneapi/dnnl/dnnl.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "base/cpu.h"
#include "tensor/kernel_gemm_internal.h"

/* ---- one thread, one limit ------------------------------------------------- */

static pthread_once_t dnnl_once = PTHREAD_ONCE_INIT;

static void dnnl_limit(void)
{
    dnnl_cpu_isa_t isa = dnnl_cpu_isa_sse41;
    switch (fsdp__cpu_isa()) {
    case FSDP__ISA_PLAIN:
        break;
    case FSDP__ISA_AVX2:
        isa = dnnl_cpu_isa_avx2;
        break;
    case FSDP__ISA_AVX512:
        isa = dnnl_cpu_isa_avx512_core;
        break;
    case FSDP__ISA_AVX512_BF16:
        isa = dnnl_cpu_isa_avx512_core_bf16;
        break;
    case FSDP__ISA_AMX:
        isa = dnnl_cpu_isa_avx512_core_amx;
        break;
    }
    /* Refused when the application used oneDNN first: then its choice stands,
     * and the name of the implementation still keeps the reference out. */
    (void)dnnl_set_max_cpu_isa(isa);
}

/* OpenMP threads that a call from here could start; sets them to one. */
static int threads_hold(void)
{
#if defined(_OPENMP)
    int n = omp_get_max_threads();
    if (n != 1) omp_set_num_threads(1);
    return n;
#else
    return 1;
#endif
}

static void threads_release(int n)
{
#if defined(_OPENMP)
    if (n != 1) omp_set_num_threads(n);
#else
    (void)n;
#endif
}

bool fsdp__product_dnnl_wanted(const fsdp__product *p)
{
    fsdp__isa isa = fsdp__cpu_isa();
    if (p->ta != p->tb) return false;
    /* What they write: f32 from f32, bf16 or f32 from bf16. */
    if (p->ta == FSDP_F32) return p->tc == FSDP_F32 && isa >= FSDP__ISA_AVX512;
    return p->ta == FSDP_BF16 && (p->tc == FSDP_BF16 || p->tc == FSDP_F32) &&
           isa >= FSDP__ISA_AVX512_BF16;
}

static bool multiply_f32(const fsdp__product *p)
{
    return dnnl_sgemm(p->trans_a ? 'T' : 'N', p->trans_b ? 'T' : 'N', p->M, p->N, p->K, 1.0f, p->a,
                      p->lda, p->b, p->ldb, p->add ? 1.0f : 0.0f, p->c, p->ldc) == dnnl_success;
}

/* ---- bf16: a cache of matmul primitives, by thread -------------------------------- */

enum { CACHE_SIZE = 256 };

/* What a primitive is made for. No padding: compared as bytes. */
typedef struct cache_key {
    int64_t M, N, K, lda, ldb, ldc;
    int32_t trans_a, trans_b, wide, add;
} cache_key;

typedef struct cache_entry {
    cache_key key;
    int known;                  /* the key is set */
    dnnl_primitive_t primitive; /* NULL: oneDNN has no fast way */
    dnnl_memory_t a, b, c;      /* without data until a call sets it */
} cache_entry;

typedef struct cache {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    cache_entry entries[CACHE_SIZE];
} cache;

static pthread_once_t cache_once = PTHREAD_ONCE_INIT;
static pthread_key_t cache_pthread_key;
static int cache_error;
static _Thread_local cache *cache_mine;

static void entry_clear(cache_entry *e)
{
    if (e->primitive) dnnl_primitive_destroy(e->primitive);
    if (e->a) dnnl_memory_destroy(e->a);
    if (e->b) dnnl_memory_destroy(e->b);
    if (e->c) dnnl_memory_destroy(e->c);
    memset(e, 0, sizeof *e);
}

static void cache_free(void *arg)
{
    cache *c = arg;
    for (int i = 0; i < CACHE_SIZE; i++)
        entry_clear(&c->entries[i]);
    if (c->stream) dnnl_stream_destroy(c->stream);
    if (c->engine) dnnl_engine_destroy(c->engine);
    free(c);
    cache_mine = NULL;
}

static void cache_make_key(void)
{
    cache_error = pthread_key_create(&cache_pthread_key, cache_free);
}

static cache *cache_get(void)
{
    if (cache_mine) return cache_mine;
    pthread_once(&cache_once, cache_make_key);
    if (cache_error) return NULL;
    cache *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    if (dnnl_engine_create(&c->engine, dnnl_cpu, 0) != dnnl_success ||
        dnnl_stream_create(&c->stream, c->engine, dnnl_stream_default_flags) != dnnl_success ||
        pthread_setspecific(cache_pthread_key, c)) {
        cache_free(c);
        return NULL;
    }
    cache_mine = c;
    return c;
}

/* Descriptors of one matrix (rows,cols), whose transpose is what is stored
 * when trans is set. In 2.x a value, in 3.x an object. */
#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t matrix_desc;
static bool desc_create(matrix_desc *d, int64_t rows, int64_t cols, int64_t ld, int trans,
                        dnnl_data_type_t t)
{
    dnnl_dims_t dims = {rows, cols}, strides = {trans ? 1 : ld, trans ? ld : 1};
    return dnnl_memory_desc_create_with_strides(d, 2, dims, t, strides) == dnnl_success;
}
static void desc_destroy(matrix_desc *d)
{
    if (*d) dnnl_memory_desc_destroy(*d);
}
static bool memory_create(dnnl_memory_t *m, const matrix_desc *d, dnnl_engine_t engine)
{
    return dnnl_memory_create(m, *d, engine, DNNL_MEMORY_NONE) == dnnl_success;
}
static dnnl_status_t matmul_desc(dnnl_primitive_desc_t *pd, dnnl_engine_t engine,
                                 const matrix_desc d[3], dnnl_primitive_attr_t attr)
{
    return dnnl_matmul_primitive_desc_create(pd, engine, d[0], d[1], NULL, d[2], attr);
}
static dnnl_status_t append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f, 0, dnnl_data_type_undef);
}
#else
typedef dnnl_memory_desc_t matrix_desc;
static bool desc_create(matrix_desc *d, int64_t rows, int64_t cols, int64_t ld, int trans,
                        dnnl_data_type_t t)
{
    dnnl_dims_t dims = {rows, cols}, strides = {trans ? 1 : ld, trans ? ld : 1};
    return dnnl_memory_desc_init_by_strides(d, 2, dims, t, strides) == dnnl_success;
}
static void desc_destroy(matrix_desc *d)
{
    (void)d;
}
static bool memory_create(dnnl_memory_t *m, const matrix_desc *d, dnnl_engine_t engine)
{
    return dnnl_memory_create(m, d, engine, DNNL_MEMORY_NONE) == dnnl_success;
}
static dnnl_status_t matmul_desc(dnnl_primitive_desc_t *pd, dnnl_engine_t engine,
                                 const matrix_desc d[3], dnnl_primitive_attr_t attr)
{
    dnnl_matmul_desc_t op;
    dnnl_status_t s = dnnl_matmul_desc_init(&op, &d[0], &d[1], NULL, &d[2]);
    return s == dnnl_success ? dnnl_primitive_desc_create(pd, &op, attr, engine, NULL) : s;
}
static dnnl_status_t append_sum(dnnl_post_ops_t ops)
{
    return dnnl_post_ops_append_sum(ops, 1.0f);
}
#endif

/* Attributes that add to C; *attr stays NULL when nothing is added. */
static bool attr_create(dnnl_primitive_attr_t *attr, int add)
{
    dnnl_post_ops_t ops = NULL;
    bool ok = true;
    *attr = NULL;
    if (!add) return true;
    ok = dnnl_primitive_attr_create(attr) == dnnl_success &&
         dnnl_post_ops_create(&ops) == dnnl_success && append_sum(ops) == dnnl_success &&
         dnnl_primitive_attr_set_post_ops(*attr, ops) == dnnl_success;
    if (ops) dnnl_post_ops_destroy(ops);
    return ok;
}

/* The reference implementations are named "ref:any", "gemm:ref" and the like. */
static bool desc_is_fast(dnnl_primitive_desc_t pd)
{
    const char *name = NULL;
    if (dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name) != dnnl_success)
        return false;
    return name && !strstr(name, "ref");
}

static void entry_make(cache *c, cache_entry *e, const cache_key *key)
{
    matrix_desc d[3];
    dnnl_primitive_attr_t attr = NULL;
    dnnl_primitive_desc_t pd = NULL;
    entry_clear(e);
    memset(d, 0, sizeof d);
    e->key = *key;
    e->known = 1;
    bool ok = desc_create(&d[0], key->M, key->K, key->lda, key->trans_a, dnnl_bf16) &&
              desc_create(&d[1], key->K, key->N, key->ldb, key->trans_b, dnnl_bf16) &&
              desc_create(&d[2], key->M, key->N, key->ldc, 0, key->wide ? dnnl_f32 : dnnl_bf16) &&
              attr_create(&attr, key->add) &&
              matmul_desc(&pd, c->engine, d, attr) == dnnl_success && desc_is_fast(pd) &&
              memory_create(&e->a, &d[0], c->engine) && memory_create(&e->b, &d[1], c->engine) &&
              memory_create(&e->c, &d[2], c->engine);
    if (!ok || dnnl_primitive_create(&e->primitive, pd) != dnnl_success) e->primitive = NULL;
    if (pd) dnnl_primitive_desc_destroy(pd);
    if (attr) dnnl_primitive_attr_destroy(attr);
    for (int i = 0; i < 3; i++)
        desc_destroy(&d[i]);
}

/* The entry of that shape, made when new; an older one of its place goes. */
static cache_entry *entry_get(cache *c, const cache_key *key)
{
    uint64_t h = 0;
    uint64_t words[sizeof *key / 8];
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; i++)
        h = (h ^ words[i]) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    cache_entry *e = &c->entries[h % CACHE_SIZE];
    if (!e->known || memcmp(&e->key, key, sizeof *key) != 0) entry_make(c, e, key);
    return e;
}

static bool multiply_bf16(const fsdp__product *p)
{
    cache *c = cache_get();
    if (!c) return false;
    cache_key key = {
        p->M,       p->N, p->K, p->lda, p->ldb, p->ldc, p->trans_a, p->trans_b, p->tc == FSDP_F32,
        p->add != 0};
    cache_entry *e = entry_get(c, &key);
    if (!e->primitive) return false;
    /* oneDNN's handles are not const; it only reads A and B. */
    if (dnnl_memory_set_data_handle(e->a, (void *)(uintptr_t)p->a) != dnnl_success ||
        dnnl_memory_set_data_handle(e->b, (void *)(uintptr_t)p->b) != dnnl_success ||
        dnnl_memory_set_data_handle(e->c, p->c) != dnnl_success)
        return false;
    dnnl_exec_arg_t args[] = {{DNNL_ARG_SRC, e->a}, {DNNL_ARG_WEIGHTS, e->b}, {DNNL_ARG_DST, e->c}};
    return dnnl_primitive_execute(e->primitive, c->stream, 3, args) == dnnl_success &&
           dnnl_stream_wait(c->stream) == dnnl_success;
}

bool fsdp__product_dnnl(const fsdp__product *p)
{
    pthread_once(&dnnl_once, dnnl_limit);
    int n = threads_hold();
    bool ok = p->ta == FSDP_F32 ? multiply_f32(p) : multiply_bf16(p);
    threads_release(n);
    return ok;
}
