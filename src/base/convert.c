/*
 * convert.c - converting and summing arrays of dtypes.
 *
 * An array is cut into parts of PART elements (threads) and blocks of
 * FSDP__BLOCK (the first-level cache). A block is widened into a buffer,
 * worked on there and narrowed into its place, so that every pair of dtypes is
 * two loops, and a destination that should not pass through the caches is
 * written by one function. Widened means: f32 when all dtypes are f32, f16 or
 * bf16; else f64 for floats, and 64-bit integers.
 */
#include "base/convert.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/convert_internal.h"
#include "base/thread.h"

enum {
    BLOCK = FSDP__BLOCK,
    PART = 1 << 16,
    LEVELS = 31,          /* of a tree of sums: any int's worth of leaves */
    STREAM_FROM = 4 << 20 /* bytes */
};

static bool is_small_float(fsdp_dtype t)
{
    return t == FSDP_F32 || t == FSDP_F16 || t == FSDP_BF16;
}

static int64_t parts_of(size_t n)
{
    return (int64_t)(n / PART + (n % PART != 0));
}

/* ---- writing past the caches ---------------------------------------------- */

/* Copies n bytes of a block to dst; stream: without reading dst's lines. The
 * writer of a part ends it with stream_end. */
static void put(void *dst, const void *src, size_t n, bool stream)
{
#if defined(__x86_64__)
    if (stream) {
        char *d = dst;
        const char *s = src;
        size_t head = (16 - ((uintptr_t)d & 15)) & 15;
        if (head > n) head = n;
        memcpy(d, s, head);
        size_t i = head;
        for (; i + 16 <= n; i += 16)
            _mm_stream_si128((__m128i *)(void *)(d + i),
                             _mm_loadu_si128((const __m128i *)(const void *)(s + i)));
        memcpy(d + i, s + i, n - i);
        return;
    }
#else
    (void)stream;
#endif
    memcpy(dst, src, n);
}

static void stream_end(bool stream)
{
#if defined(__x86_64__)
    /* Streamed stores are not ordered with later ones otherwise. */
    if (stream) _mm_sfence();
#else
    (void)stream;
#endif
}

/* ---- f32 blocks -------------------------------------------------------------- */

/* The block x as f32, in buffer: always a copy, since x may not be aligned. */
static const float *load_f32(const fsdp__block_kernels *k, float *buffer, const void *x,
                             fsdp_dtype t, size_t n)
{
    if (t == FSDP_BF16)
        k->bf16_to_f32(buffer, x, n);
    else if (t == FSDP_F16)
        k->f16_to_f32(buffer, x, n);
    else
        memcpy(buffer, x, 4 * n);
    return buffer;
}

/* x may lie anywhere. */
static void store_f32(const fsdp__block_kernels *k, void *dst, fsdp_dtype t, const fsdp__f32u *x,
                      size_t n, bool stream)
{
    uint16_t half[BLOCK];
    if (t == FSDP_F32) {
        put(dst, x, 4 * n, stream);
        return;
    }
    if (t == FSDP_BF16)
        k->f32_to_bf16(half, x, n);
    else
        k->f32_to_f16(half, x, n);
    put(dst, half, 2 * n, stream);
}

/* ---- wide blocks ---------------------------------------------------------------- */

typedef enum wide { WIDE_F64, WIDE_I64, WIDE_U64 } wide;

typedef union wide_block {
    double f[BLOCK];
    int64_t i[BLOCK];
    uint64_t u[BLOCK];
} wide_block;

static wide wide_of(fsdp_dtype t)
{
    if (fsdp_dtype_is_floating(t)) return WIDE_F64;
    return t >= FSDP_I64 && t <= FSDP_I8 ? WIDE_I64 : WIDE_U64;
}

/* Reads n elements of a type that may not be aligned. */
#define LOAD(type, field, expr)                               \
    for (size_t e = 0; e < n; e++) {                          \
        type v;                                               \
        memcpy(&v, (const char *)x + e * sizeof v, sizeof v); \
        b->field[e] = (expr);                                 \
    }                                                         \
    break

static void load_wide(wide_block *b, const void *x, fsdp_dtype t, size_t n)
{
    switch (t) {
    case FSDP_F32:
        LOAD(float, f, (double)v);
    case FSDP_F64:
        LOAD(double, f, v);
    case FSDP_F16:
        LOAD(uint16_t, f, (double)fsdp__f16_to_f32(v));
    case FSDP_BF16:
        LOAD(uint16_t, f, (double)fsdp__bf16_to_f32(v));
    case FSDP_I64:
        LOAD(int64_t, i, v);
    case FSDP_I32:
        LOAD(int32_t, i, v);
    case FSDP_I16:
        LOAD(int16_t, i, v);
    case FSDP_I8:
        LOAD(int8_t, i, v);
    case FSDP_U64:
        LOAD(uint64_t, u, v);
    case FSDP_U32:
        LOAD(uint32_t, u, v);
    case FSDP_U16:
        LOAD(uint16_t, u, v);
    case FSDP_U8:
        LOAD(uint8_t, u, v);
    case FSDP_BOOL:
        LOAD(uint8_t, u, v != 0);
    case FSDP_DTYPE_NONE:
    case FSDP_DTYPE_COUNT:
        break;
    }
}

/* Truncation with the ends held and NaN as 0: what C leaves undefined. */
static int64_t f64_to_i64(double d)
{
    if (d != d) return 0;
    if (d >= 0x1p63) return INT64_MAX;
    if (d < -0x1p63) return INT64_MIN;
    return (int64_t)d;
}

static uint64_t f64_to_u64(double d)
{
    if (d != d) return 0;
    if (d >= 0x1p64) return UINT64_MAX;
    if (d <= 0) return 0;
    return (uint64_t)d;
}

static int64_t clamp_i64(int64_t v, int64_t low, int64_t high)
{
    return v < low ? low : v > high ? high : v;
}

static uint64_t clamp_u64(uint64_t v, uint64_t high)
{
    return v > high ? high : v;
}

/* An integer as a double that rounds to f32, f16 and bf16 as the integer does:
 * bits that a double has no place for are gathered into its last one. */
static double sticky_u64(uint64_t v)
{
    if (v >> 53) v = (v & ~(uint64_t)0x7ff) | ((v & 0x7ff) ? 0x800 : 0);
    return (double)v;
}

static double sticky_i64(int64_t v)
{
    return v < 0 ? -sticky_u64(-(uint64_t)v) : sticky_u64((uint64_t)v);
}

#define STORE(type, field, expr)                        \
    for (size_t e = 0; e < n; e++) {                    \
        type v = (type)(expr(b->field[e]));             \
        memcpy((char *)y + e * sizeof v, &v, sizeof v); \
    }                                                   \
    break
#define AS_IS(v) (v)
#define NOT_ZERO(v) ((v) != 0)
#define INT_AS_F32(v) (is_signed ? (float)(int64_t)(v) : (float)(v))
#define INT_AS_F64(v) (is_signed ? (double)(int64_t)(v) : (double)(v))
#define TO_I32(v) clamp_i64(f64_to_i64(v), INT32_MIN, INT32_MAX)
#define TO_I16(v) clamp_i64(f64_to_i64(v), INT16_MIN, INT16_MAX)
#define TO_I8(v) clamp_i64(f64_to_i64(v), INT8_MIN, INT8_MAX)
#define TO_U32(v) clamp_u64(f64_to_u64(v), UINT32_MAX)
#define TO_U16(v) clamp_u64(f64_to_u64(v), UINT16_MAX)
#define TO_U8(v) clamp_u64(f64_to_u64(v), UINT8_MAX)

static void store_from_f64(void *y, fsdp_dtype t, const wide_block *b, size_t n)
{
    switch (t) {
    case FSDP_F32:
        STORE(float, f, AS_IS);
    case FSDP_F64:
        STORE(double, f, AS_IS);
    case FSDP_F16:
        STORE(uint16_t, f, fsdp__f64_to_f16);
    case FSDP_BF16:
        STORE(uint16_t, f, fsdp__f64_to_bf16);
    case FSDP_I64:
        STORE(int64_t, f, f64_to_i64);
    case FSDP_I32:
        STORE(int32_t, f, TO_I32);
    case FSDP_I16:
        STORE(int16_t, f, TO_I16);
    case FSDP_I8:
        STORE(int8_t, f, TO_I8);
    case FSDP_U64:
        STORE(uint64_t, f, f64_to_u64);
    case FSDP_U32:
        STORE(uint32_t, f, TO_U32);
    case FSDP_U16:
        STORE(uint16_t, f, TO_U16);
    case FSDP_U8:
        STORE(uint8_t, f, TO_U8);
    case FSDP_BOOL:
        STORE(uint8_t, f, NOT_ZERO);
    case FSDP_DTYPE_NONE:
    case FSDP_DTYPE_COUNT:
        break;
    }
}

/* To integers: the low bits, as C's casts; signed and unsigned alike. */
static void store_from_int(void *y, fsdp_dtype t, const wide_block *b, bool is_signed, size_t n)
{
    wide_block sticky;
    if (t == FSDP_F16 || t == FSDP_BF16) {
        for (size_t e = 0; e < n; e++)
            sticky.f[e] = is_signed ? sticky_i64(b->i[e]) : sticky_u64(b->u[e]);
        store_from_f64(y, t, &sticky, n);
        return;
    }
    switch (t) {
    case FSDP_F32:
        STORE(float, u, INT_AS_F32);
    case FSDP_F64:
        STORE(double, u, INT_AS_F64);
    case FSDP_I64:
    case FSDP_U64:
        STORE(uint64_t, u, AS_IS);
    case FSDP_I32:
    case FSDP_U32:
        STORE(uint32_t, u, AS_IS);
    case FSDP_I16:
    case FSDP_U16:
        STORE(uint16_t, u, AS_IS);
    case FSDP_I8:
    case FSDP_U8:
        STORE(uint8_t, u, AS_IS);
    case FSDP_BOOL:
        STORE(uint8_t, u, NOT_ZERO);
    default:
        break;
    }
}

static void store_wide(void *dst, fsdp_dtype t, const wide_block *b, wide w, size_t n, bool stream)
{
    wide_block narrow;
    void *y = stream ? (void *)&narrow : dst;
    if (w == WIDE_F64)
        store_from_f64(y, t, b, n);
    else
        store_from_int(y, t, b, w == WIDE_I64, n);
    if (stream) put(dst, y, n * fsdp_dtype_size(t), true);
}

/* ---- convert -------------------------------------------------------------------- */

typedef struct convert_job {
    const fsdp__block_kernels *k;
    char *dst;
    const char *src;
    fsdp_dtype dst_t, src_t;
    size_t n;
    bool stream;
} convert_job;

static void convert_part(void *arg, int64_t part)
{
    const convert_job *c = arg;
    size_t ds = fsdp_dtype_size(c->dst_t), ss = fsdp_dtype_size(c->src_t);
    size_t begin = (size_t)part * PART;
    size_t end = c->n - begin < PART ? c->n : begin + PART;
    bool small = is_small_float(c->dst_t) && is_small_float(c->src_t);
    wide_block b;
    for (size_t i = begin; i < end; i += BLOCK) {
        size_t n = end - i < BLOCK ? end - i : BLOCK;
        char *d = c->dst + i * ds;
        const char *s = c->src + i * ss;
        if (c->dst_t == c->src_t) {
            put(d, s, n * ds, c->stream);
        } else if (small) {
            float f[BLOCK];
            const fsdp__f32u *x = (const void *)s;
            if (c->src_t != FSDP_F32) x = load_f32(c->k, f, s, c->src_t, n);
            store_f32(c->k, d, c->dst_t, x, n, c->stream);
        } else {
            load_wide(&b, s, c->src_t, n);
            store_wide(d, c->dst_t, &b, wide_of(c->src_t), n, c->stream);
        }
    }
    stream_end(c->stream);
}

void fsdp__convert(void *dst, fsdp_dtype dst_t, const void *src, fsdp_dtype src_t, size_t n)
{
    if (n == 0 || (dst == src && dst_t == src_t)) return;
    convert_job c = {fsdp__block_kernels_of(fsdp__cpu_isa()), dst, src, dst_t, src_t, n, false};
    c.stream = n * fsdp_dtype_size(dst_t) >= STREAM_FROM;
    fsdp__parallel(parts_of(n), convert_part, &c);
}

/* ---- sums over sources -------------------------------------------------------------- */

typedef struct sum_job {
    const fsdp__block_kernels *k;
    char *dst;
    const void *const *src;
    fsdp_dtype dst_t, src_t;
    int count;
    size_t n;
    float scale;
    bool add, stream;
} sum_job;

/* The two leaves j and j + 1 of a block, summed into y. */
static void sum_pair_f32(const sum_job *c, float *y, int j, size_t at, size_t n)
{
    size_t ss = fsdp_dtype_size(c->src_t);
    const char *p = (const char *)c->src[j] + at * ss, *q = (const char *)c->src[j + 1] + at * ss;
    if (c->src_t == FSDP_BF16) {
        /* The kernels load without assuming alignment. */
        c->k->add_bf16(y, (const void *)p, (const void *)q, n);
    } else if (c->src_t == FSDP_F32) {
        c->k->add_f32(y, (const void *)p, (const void *)q, n);
    } else {
        float f[BLOCK];
        load_f32(c->k, y, p, c->src_t, n);
        load_f32(c->k, f, q, c->src_t, n);
        c->k->add_f32(y, y, f, n);
    }
}

/*
 * The tree as a binary counter: stack[] holds sums of 2^level[] leaves, largest
 * first. Two of a size merge at once; at the end the rest merges from the
 * right, which is the split at the largest power of two.
 */
static void sum_block_f32(const sum_job *c, float *stack, size_t at, size_t n)
{
    int level[LEVELS], top = 0;
    for (int j = 0; j < c->count; j += 2) {
        float *y = stack + (size_t)top * BLOCK;
        if (j + 1 < c->count) {
            sum_pair_f32(c, y, j, at, n);
            level[top++] = 1;
        } else {
            const char *x = (const char *)c->src[j] + at * fsdp_dtype_size(c->src_t);
            load_f32(c->k, y, x, c->src_t, n);
            level[top++] = 0;
        }
        for (; top > 1 && level[top - 1] == level[top - 2]; top--) {
            float *a = stack + (size_t)(top - 2) * BLOCK;
            c->k->add_f32(a, a, a + BLOCK, n);
            level[top - 2]++;
        }
    }
    for (; top > 1; top--) {
        float *a = stack + (size_t)(top - 2) * BLOCK;
        c->k->add_f32(a, a, a + BLOCK, n);
    }
    if (c->scale != 1.0f) c->k->scale_f32(stack, c->scale, n);
    char *d = c->dst + at * fsdp_dtype_size(c->dst_t);
    if (c->add) {
        float old[BLOCK];
        load_f32(c->k, old, d, c->dst_t, n);
        c->k->add_f32(stack, old, stack, n);
    }
    store_f32(c->k, d, c->dst_t, stack, n, c->stream);
}

/* a += b; integers wrap. */
static void add_wide(wide_block *a, const wide_block *b, wide w, size_t n)
{
    if (w == WIDE_F64)
        for (size_t e = 0; e < n; e++)
            a->f[e] += b->f[e];
    else
        for (size_t e = 0; e < n; e++)
            a->u[e] += b->u[e];
}

static double wide_value(const wide_block *b, wide w, size_t e)
{
    return w == WIDE_F64 ? b->f[e] : w == WIDE_I64 ? (double)b->i[e] : (double)b->u[e];
}

/* Integer sums times a scale that is not 1 become floats. */
static wide scale_wide(wide_block *b, wide w, double scale, size_t n)
{
    for (size_t e = 0; e < n; e++)
        b->f[e] = wide_value(b, w, e) * scale;
    return WIDE_F64;
}

/* The same for f64 and integers: the sum of leaves [first, first + count). */
static void sum_tree_wide(const sum_job *c, wide_block *y, int first, int count, size_t at,
                          size_t n)
{
    if (count == 1) {
        load_wide(y, (const char *)c->src[first] + at * fsdp_dtype_size(c->src_t), c->src_t, n);
        return;
    }
    int left = 1;
    while (left * 2 < count)
        left *= 2;
    wide_block right;
    sum_tree_wide(c, y, first, left, at, n);
    sum_tree_wide(c, &right, first + left, count - left, at, n);
    add_wide(y, &right, wide_of(c->src_t), n);
}

static void sum_block_wide(const sum_job *c, size_t at, size_t n)
{
    wide_block sum, old;
    wide w = wide_of(c->src_t), dw = wide_of(c->dst_t);
    sum_tree_wide(c, &sum, 0, c->count, at, n);
    if (c->scale != 1.0f) w = scale_wide(&sum, w, (double)c->scale, n);
    char *d = c->dst + at * fsdp_dtype_size(c->dst_t);
    if (c->add) {
        load_wide(&old, d, c->dst_t, n);
        if (w != WIDE_F64 && dw != WIDE_F64) {
            add_wide(&sum, &old, w, n);
        } else {
            for (size_t e = 0; e < n; e++)
                sum.f[e] = wide_value(&old, dw, e) + wide_value(&sum, w, e);
            w = WIDE_F64;
        }
    }
    store_wide(d, c->dst_t, &sum, w, n, c->stream);
}

static void sum_part(void *arg, int64_t part)
{
    const sum_job *c = arg;
    size_t begin = (size_t)part * PART;
    size_t end = c->n - begin < PART ? c->n : begin + PART;
    bool small = is_small_float(c->dst_t) && is_small_float(c->src_t);
    float stack[LEVELS * BLOCK];
    for (size_t i = begin; i < end; i += BLOCK) {
        size_t n = end - i < BLOCK ? end - i : BLOCK;
        if (small)
            sum_block_f32(c, stack, i, n);
        else
            sum_block_wide(c, i, n);
    }
    stream_end(c->stream);
}

void fsdp__sum_tree(void *dst, fsdp_dtype dst_t, const void *const *src, fsdp_dtype src_t, int k,
                    size_t n, float scale, int add)
{
    if (n == 0 || k < 1) return;
    sum_job c = {fsdp__block_kernels_of(fsdp__cpu_isa()),
                 dst,
                 src,
                 dst_t,
                 src_t,
                 k,
                 n,
                 scale,
                 add != 0,
                 false};
    /* Adding reads the destination, so it is in the cache anyhow. */
    c.stream = !add && n * fsdp_dtype_size(dst_t) >= STREAM_FROM;
    fsdp__parallel(parts_of(n), sum_part, &c);
}

/* ---- squares --------------------------------------------------------------------------- */

enum { SQUARE_PARTS = 1024 };

typedef struct square_job {
    const fsdp__block_kernels *k;
    const char *x;
    fsdp_dtype t;
    size_t n, part; /* elements of a part: a multiple of BLOCK fixed by n */
    double sums[SQUARE_PARTS];
} square_job;

/* ((0+1)+(2+3)) + ((4+5)+(6+7)), and so on: any count. */
static double tree_of(const double *x, size_t n)
{
    if (n == 1) return x[0];
    size_t left = 1;
    while (left * 2 < n)
        left *= 2;
    return tree_of(x, left) + tree_of(x + left, n - left);
}

static void square_part(void *arg, int64_t part)
{
    square_job *c = arg;
    size_t size = fsdp_dtype_size(c->t);
    size_t begin = (size_t)part * c->part;
    size_t end = c->n - begin < c->part ? c->n : begin + c->part;
    double lane[8] = {0};
    float f[BLOCK];
    wide_block b;
    for (size_t i = begin; i < end; i += BLOCK) {
        size_t n = end - i < BLOCK ? end - i : BLOCK;
        if (is_small_float(c->t)) {
            c->k->squares_f32(lane, load_f32(c->k, f, c->x + i * size, c->t, n), n);
            continue;
        }
        load_wide(&b, c->x + i * size, c->t, n);
        for (size_t e = 0; e < n; e++) {
            double v = wide_value(&b, wide_of(c->t), e);
            lane[e % 8] += v * v;
        }
    }
    c->sums[part] = tree_of(lane, 8);
}

double fsdp__sum_squares(const void *x, fsdp_dtype t, size_t n)
{
    if (n == 0) return 0.0;
    square_job c = {.k = fsdp__block_kernels_of(fsdp__cpu_isa()), .x = x, .t = t, .n = n};
    /* At most SQUARE_PARTS parts, whose sums then fit the stack. */
    size_t part = n / SQUARE_PARTS + 1;
    if (part < PART) part = PART;
    c.part = (part + BLOCK - 1) / BLOCK * BLOCK;
    size_t parts = (n - 1) / c.part + 1;
    fsdp__parallel((int64_t)parts, square_part, &c);
    return tree_of(c.sums, parts);
}
