/*
 * kernel_copy.c - strided copies with conversion.
 *
 * The dims are ordered so that the destination's nearest one is last and are
 * then joined. What is left is one of three shapes: runs contiguous on both
 * sides (convert them); a destination run whose source is contiguous along
 * another dim (a transpose, done in tiles that fit the first cache); or runs
 * with strides, gathered a block at a time. The destination must not hold an
 * element twice (no stride 0 in it).
 */
#include "tensor/kernel_set.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/thread.h"
#include "tensor/kernel_walk.h"

enum {
    TILE = FSDP__TILE,
    TILE_16 = FSDP__TILE_16,
    BLOCK = 256,            /* elements of a gathered block */
    STREAM_LEAST = 4 << 20, /* bytes */
    STREAMS = 64,           /* places written in turn, at most */
};

typedef struct copy_args {
    const fsdp__kernel_set *set;   /* NULL when a side is not floating */
    int fast;                      /* the table has a fast form of this pair */
    const fsdp__kernel_set *tiles; /* the table in force: moves bytes of any dtype */
    const char *src;
    char *dst;
    fsdp_dtype src_t, dst_t;
    size_t src_size, dst_size;
    int add;
    int stream;      /* a destination so large that it is written past the caches */
    fsdp__walk walk; /* arrays: dst, src */
    int64_t pieces;  /* of a run */
    int64_t piece;   /* elements of one */
    int64_t units, units_of_part;
    int64_t side, side_step[2]; /* transposes: the dim along which the source is contiguous */
    int64_t tile;               /* side of a tile, in elements */
    int64_t bands;              /* of the side: tile each; 1 where there is none */
} copy_args;

/* ---- one run ------------------------------------------------------------------- */

/* near[i] = far[i * step] of `size` bytes each. */
static void gather(void *near_p, const void *far_p, int64_t step, size_t size, int64_t n)
{
    switch (size) {
    case 4:
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)near_p + 4 * i, (const char *)far_p + 4 * i * step, 4);
        break;
    case 2:
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)near_p + 2 * i, (const char *)far_p + 2 * i * step, 2);
        break;
    case 8:
        for (int64_t i = 0; i < n; i++)
            memcpy((char *)near_p + 8 * i, (const char *)far_p + 8 * i * step, 8);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            ((char *)near_p)[i] = ((const char *)far_p)[i * step];
        break;
    }
}

/* far[i * step] = near[i]. */
static void scatter(void *far_p, int64_t step, const void *near_p, size_t size, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)far_p + (int64_t)size * i * step, (const char *)near_p + (int64_t)size * i,
               size);
}

/* dst += src where a side is an integer: through int64 when both are, else through double. */
static void add_mixed(void *dst, fsdp_dtype dst_t, const void *src, fsdp_dtype src_t, int64_t n)
{
    int whole = !fsdp_dtype_is_floating(dst_t) && !fsdp_dtype_is_floating(src_t);
    fsdp_dtype wide = whole ? FSDP_I64 : FSDP_F64;
    for (int64_t i = 0; i < n; i++) {
        char *d = (char *)dst + i * (int64_t)fsdp_dtype_size(dst_t);
        const char *s = (const char *)src + i * (int64_t)fsdp_dtype_size(src_t);
        if (whole) {
            uint64_t a, b; /* unsigned, so that it wraps */
            fsdp__convert(&a, wide, d, dst_t, 1);
            fsdp__convert(&b, wide, s, src_t, 1);
            a += b;
            fsdp__convert(d, dst_t, &a, wide, 1);
        } else {
            double a, b;
            fsdp__convert(&a, wide, d, dst_t, 1);
            fsdp__convert(&b, wide, s, src_t, 1);
            a += b;
            fsdp__convert(d, dst_t, &a, wide, 1);
        }
    }
}

/* Bytes as they are. Short runs are many, and a call each would cost more than they do. */
static void copy_bytes(const copy_args *u, char *dst, const char *src, size_t bytes)
{
    size_t i = 0;
#if defined(__x86_64__)
    if (u->stream && (uintptr_t)dst % 64 == 0)
        for (; i + 16 <= bytes / 64 * 64; i += 16)
            _mm_stream_si128((__m128i *)(dst + i), _mm_loadu_si128((const __m128i *)(src + i)));
#endif
    if (bytes - i > 512) {
        memcpy(dst + i, src + i, bytes - i);
        return;
    }
    for (; i + 32 <= bytes; i += 32)
        memcpy(dst + i, src + i, 32);
    for (; i + 4 <= bytes; i += 4)
        memcpy(dst + i, src + i, 4);
    for (; i < bytes; i++)
        dst[i] = src[i];
}

/* Both sides contiguous. */
static void near_run(const copy_args *u, void *dst, const void *src, int64_t n)
{
    if (u->add && u->set)
        u->set->copy(n, src, u->src_t, dst, u->dst_t, 1);
    else if (u->add)
        add_mixed(dst, u->dst_t, src, u->src_t, n);
    else if (u->src_t == u->dst_t)
        copy_bytes(u, dst, src, (size_t)n * u->src_size);
    else if (u->fast)
        u->set->copy(n, src, u->src_t, dst, u->dst_t, 0);
    else
        fsdp__convert(dst, u->dst_t, src, u->src_t, (size_t)n);
}

static void far_run(const copy_args *u, char *dst, int64_t dst_step, const char *src,
                    int64_t src_step, int64_t n)
{
    double near_src[BLOCK], near_dst[BLOCK]; /* room for the widest dtype */
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t m = n - i < BLOCK ? n - i : BLOCK;
        const char *s = src + i * src_step * (int64_t)u->src_size;
        char *d = dst + i * dst_step * (int64_t)u->dst_size;
        if (src_step != 1) {
            gather(near_src, s, src_step, u->src_size, m);
            s = (const char *)near_src;
        }
        if (dst_step == 1) {
            near_run(u, d, s, m);
            continue;
        }
        if (u->add) gather(near_dst, d, dst_step, u->dst_size, m);
        near_run(u, near_dst, s, m);
        scatter(d, dst_step, near_dst, u->dst_size, m);
    }
}

/* ---- tiles ---------------------------------------------------------------------- */

#define TRANSPOSE(bits)                                                                      \
    static void transpose_##bits(void *to, const void *from, int64_t src_step, int64_t rows, \
                                 int64_t cols, int64_t side)                                 \
    {                                                                                        \
        uint##bits##_t *restrict tile = to;                                                  \
        const uint##bits##_t *src = from;                                                    \
        for (int64_t i = 0; i < cols; i++)                                                   \
            for (int64_t j = 0; j < rows; j++)                                               \
                tile[j * side + i] = src[i * src_step + j];                                  \
    }
TRANSPOSE(64)
TRANSPOSE(32)
TRANSPOSE(16)
TRANSPOSE(8)

/* dst[j, i] = src[j, i] for j < rows, i < cols, where src is contiguous along j and dst along i. */
static void copy_tile(const copy_args *u, char *dst, const char *src, int64_t rows, int64_t cols)
{
    _Alignas(64) uint64_t tile[TILE * TILE]; /* 32 KiB, and as many for two bytes an element */
    const int64_t step = u->walk.step[1], side = u->tile;
    int full = rows == side && cols == side;
    if (full && u->src_size == 4 && u->tiles->transpose_32)
        u->tiles->transpose_32(tile, src, step);
    else if (full && u->src_size == 2 && u->tiles->transpose_16)
        u->tiles->transpose_16(tile, src, step);
    else if (u->src_size == 8)
        transpose_64(tile, src, step, rows, cols, side);
    else if (u->src_size == 4)
        transpose_32(tile, src, step, rows, cols, side);
    else if (u->src_size == 2)
        transpose_16(tile, src, step, rows, cols, side);
    else
        transpose_8(tile, src, step, rows, cols, side);
    for (int64_t j = 0; j < rows; j++)
        near_run(u, dst + j * u->side_step[0] * (int64_t)u->dst_size,
                 (const char *)tile + (size_t)(j * side) * u->src_size, cols);
}

/* One unit of a transpose: a tile's width of the side, a piece of the run. */
static void copy_band(const copy_args *u, char *dst, const char *src, int64_t j, int64_t n)
{
    int64_t side = u->tile, rows = u->side - j < side ? u->side - j : side;
    for (int64_t i = 0; i < n; i += side)
        copy_tile(u, dst + (j * u->side_step[0] + i) * (int64_t)u->dst_size,
                  src + (j + i * u->walk.step[1]) * (int64_t)u->src_size, rows,
                  n - i < side ? n - i : side);
}

/* ---- the whole -------------------------------------------------------------------- */

static void copy_part(void *arg, int64_t part)
{
    const copy_args *u = arg;
    const fsdp__walk *w = &u->walk;
    int64_t first = part * u->units_of_part, last = first + u->units_of_part;
    if (last > u->units) last = u->units;
    fsdp__walk_at at;
    fsdp__walk_seek(w, &at, first / u->pieces / u->bands);
    int64_t i = first % u->pieces * u->piece;           /* where in the run */
    int64_t j = first / u->pieces % u->bands * u->tile; /* and in the side */
    for (int64_t unit = first; unit < last; unit++) {
        int64_t n = w->run - i < u->piece ? w->run - i : u->piece;
        char *dst = u->dst + (at.offset[0] + i * w->step[0]) * (int64_t)u->dst_size;
        const char *src = u->src + (at.offset[1] + i * w->step[1]) * (int64_t)u->src_size;
        if (u->side > 0)
            copy_band(u, dst, src, j, n);
        else if (w->step[0] == 1 && w->step[1] == 1)
            near_run(u, dst, src, n);
        else
            far_run(u, dst, w->step[0], src, w->step[1], n);
        i += u->piece;
        if (i < w->run) continue;
        i = 0;
        j += u->tile;
        if (j < u->side) continue;
        j = 0;
        fsdp__walk_next(w, &at);
    }
#if defined(__x86_64__)
    if (u->stream) _mm_sfence();
#endif
}

/* Dims in order of the destination's strides, the nearest last; equal ones keep their order. */
static void order_dims(int ndim, const int64_t *sizes, const int64_t *dst_stride,
                       const int64_t *src_stride, int64_t out[3][FSDP__WALK_DIMS])
{
    for (int d = 0; d < ndim; d++) {
        int k = d;
        for (; k > 0 && out[1][k - 1] < dst_stride[d]; k--)
            for (int j = 0; j < 3; j++)
                out[j][k] = out[j][k - 1];
        out[0][k] = sizes[d];
        out[1][k] = dst_stride[d];
        out[2][k] = src_stride[d];
    }
}

/* The last dim of the rows is the one stepped over fastest. Where the source's own last one is
 * short, it comes there: the source is then read in its order, into so many streams of the
 * destination, instead of by a piece of each of its pages. */
static void order_rows(fsdp__walk *w)
{
    int best = w->ndim - 1;
    for (int d = 0; d < w->ndim; d++)
        if (w->stride[1][d] != 0 && w->stride[1][d] < w->stride[1][best]) best = d;
    if (best < 0 || w->size[best] > STREAMS) return;
    for (; best < w->ndim - 1; best++) {
        int64_t size = w->size[best];
        w->size[best] = w->size[best + 1];
        w->size[best + 1] = size;
        for (int k = 0; k < 2; k++) {
            int64_t stride = w->stride[k][best];
            w->stride[k][best] = w->stride[k][best + 1];
            w->stride[k][best + 1] = stride;
        }
    }
}

/* Takes the dim along which the source is contiguous out of the walk, if the run is not it. */
static void find_side(copy_args *u)
{
    fsdp__walk *w = &u->walk;
    if (w->step[0] != 1 || w->step[1] == 1 || w->step[1] == 0 || w->run < 4) return;
    for (int d = 0; d < w->ndim; d++) {
        if (w->stride[1][d] != 1 || w->size[d] < 4) continue;
        u->side = w->size[d];
        u->side_step[0] = w->stride[0][d];
        u->side_step[1] = 1;
        w->rows /= w->size[d];
        w->ndim--;
        for (int e = d; e < w->ndim; e++) {
            w->size[e] = w->size[e + 1];
            for (int k = 0; k < 2; k++)
                w->stride[k][e] = w->stride[k][e + 1];
        }
        return;
    }
}

void fsdp__k_copy(int ndim, const int64_t *sizes, const void *src, fsdp_dtype src_t,
                  const int64_t *src_stride, void *dst, fsdp_dtype dst_t, const int64_t *dst_stride,
                  int add)
{
    copy_args u = {.src = src,
                   .dst = dst,
                   .src_t = src_t,
                   .dst_t = dst_t,
                   .src_size = fsdp_dtype_size(src_t),
                   .dst_size = fsdp_dtype_size(dst_t),
                   .add = add,
                   .tiles = fsdp__kernel_set_for(FSDP_F32, FSDP_F32)};
    if (fsdp_dtype_is_floating(src_t) && fsdp_dtype_is_floating(dst_t))
        u.set = fsdp__kernel_set_for(src_t, dst_t);
    u.fast = u.set && u.set != fsdp__kernel_set_plain(src_t);
    int64_t dims[3][FSDP__WALK_DIMS];
    order_dims(ndim, sizes, dst_stride, src_stride, dims);
    const int64_t *strides[] = {dims[1], dims[2]};
    fsdp__walk_init(&u.walk, ndim, dims[0], 2, strides);
    if (u.walk.rows == 0) return;
    u.stream = !add && u.walk.rows * u.walk.run * (int64_t)u.dst_size >= STREAM_LEAST;
    find_side(&u);
    order_rows(&u.walk);
    u.tile = u.src_size == 2 ? TILE_16 : TILE;
    u.bands = u.side > 0 ? (u.side + u.tile - 1) / u.tile : 1;
    u.piece = u.side > 0 ? FSDP__PART / TILE : FSDP__PART;
    u.pieces = (u.walk.run + u.piece - 1) / u.piece;
    u.units = u.walk.rows * u.bands * u.pieces;
    int64_t unit = u.walk.run < u.piece ? u.walk.run : u.piece;
    if (u.side > 0) unit *= u.side < u.tile ? u.side : u.tile;
    u.units_of_part = unit < FSDP__PART ? FSDP__PART / unit : 1;
    fsdp__parallel((u.units + u.units_of_part - 1) / u.units_of_part, copy_part, &u);
}
