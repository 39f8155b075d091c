/*
 * kernel_batch.c - batch normalisation: statistics of each channel over all
 * samples and positions.
 *
 * x is (N,C,L): N samples, C channels, L positions (1 for (N,C)). A part takes
 * some channels whole, so nothing is added up across parts. Sums run in f64,
 * sample by sample in order, the positions of one in FSDP__LANES lanes.
 */
#include "tensor/kernel_set.h"

#include <math.h>

#include "base/thread.h"

enum { CHANNELS = 64 }; /* of one part; their sums stand on the stack */

typedef struct batch_args {
    const fsdp__batch_norm *o;
    fsdp_dtype stat;
    const void *x, *w, *b, *dy;
    void *y;           /* also dx */
    void *mean, *rstd; /* (C) stat */
    void *dw, *db;
    fsdp_dtype dt, dt_w, dt_b;
    int add, add_w, add_b;
} batch_args;

/* What is summed over a channel. */
typedef enum sum_kind { SUM_X, SUM_SQUARES, SUM_DY, SUM_DY_X } sum_kind;

static inline double term(const batch_args *u, sum_kind kind, int64_t i, double mean)
{
    fsdp_dtype t = u->o->t;
    switch (kind) {
    case SUM_X:
        return fsdp__get_f64(u->x, t, i);
    case SUM_SQUARES: {
        double v = fsdp__get_f64(u->x, t, i) - mean;
        return v * v;
    }
    case SUM_DY:
        return fsdp__get_f64(u->dy, t, i);
    case SUM_DY_X:
        return fsdp__get_f64(u->dy, t, i) * (fsdp__get_f64(u->x, t, i) - mean);
    }
    return 0;
}

/* sum (n) of channels c..c+n; mean (n) is what some kinds subtract from x. */
static void sum_channels(const batch_args *u, sum_kind kind, int64_t c, int64_t n,
                         const double *mean, double *sum)
{
    int64_t L = u->o->L;
    for (int64_t k = 0; k < n; k++)
        sum[k] = 0;
    for (int64_t s = 0; s < u->o->N; s++)
        for (int64_t k = 0; k < n; k++) {
            int64_t first = (s * u->o->C + c + k) * L;
            if (L == 1) {
                sum[k] += term(u, kind, first, mean[k]);
                continue;
            }
            double lane[FSDP__LANES] = {0};
            for (int64_t l = 0; l < L; l++)
                lane[l % FSDP__LANES] += term(u, kind, first + l, mean[k]);
            for (int half = FSDP__LANES / 2; half > 0; half /= 2)
                for (int i = 0; i < half; i++)
                    lane[i] += lane[i + half];
            sum[k] += lane[0];
        }
}

/* running = (1 - momentum) * running + momentum * v; NULL: not kept. */
static void update_running(const fsdp__batch_norm *o, void *running, fsdp_dtype t, int64_t c,
                           double v)
{
    if (!running) return;
    double old = fsdp__get_f64(running, t, c);
    fsdp__put_f64(running, t, c, (1 - o->momentum) * old + o->momentum * v, 0);
}

/* Mean and biased variance of channels c..c+n, of the batch or as they were kept. */
static void channel_stats(const batch_args *u, int64_t c, int64_t n, double *mean, double *var)
{
    const fsdp__batch_norm *o = u->o;
    double count = (double)(o->N * o->L);
    if (!o->training) {
        for (int64_t k = 0; k < n; k++) {
            mean[k] = fsdp__get_f64(o->running_mean, o->mean_t, c + k);
            var[k] = fsdp__get_f64(o->running_var, o->var_t, c + k);
        }
        return;
    }
    double none[CHANNELS] = {0};
    sum_channels(u, SUM_X, c, n, none, mean);
    for (int64_t k = 0; k < n; k++)
        mean[k] /= count;
    sum_channels(u, SUM_SQUARES, c, n, mean, var);
    for (int64_t k = 0; k < n; k++) {
        update_running(o, o->running_mean, o->mean_t, c + k, mean[k]);
        update_running(o, o->running_var, o->var_t, c + k, var[k] / (count - 1));
        var[k] /= count;
    }
}

static void forward_part(void *arg, int64_t part)
{
    const batch_args *u = arg;
    const fsdp__batch_norm *o = u->o;
    int64_t c = part * CHANNELS, n = o->C - c < CHANNELS ? o->C - c : CHANNELS;
    double mean[CHANNELS], var[CHANNELS], factor[CHANNELS], shift[CHANNELS];
    channel_stats(u, c, n, mean, var);
    for (int64_t k = 0; k < n; k++) {
        double rstd = 1 / sqrt(var[k] + o->eps);
        fsdp__put_f64(u->mean, u->stat, c + k, mean[k], 0);
        fsdp__put_f64(u->rstd, u->stat, c + k, rstd, 0);
        factor[k] = u->w ? rstd * fsdp__get_f64(u->w, o->t, c + k) : rstd;
        shift[k] = u->b ? fsdp__get_f64(u->b, o->t, c + k) : 0;
    }
    for (int64_t s = 0; s < o->N; s++)
        for (int64_t k = 0; k < n; k++) {
            int64_t first = (s * o->C + c + k) * o->L;
            for (int64_t i = first; i < first + o->L; i++)
                fsdp__put_f64(u->y, o->t, i,
                              (fsdp__get_f64(u->x, o->t, i) - mean[k]) * factor[k] + shift[k], 0);
        }
}

static int64_t parts_of(const fsdp__batch_norm *o)
{
    return (o->C + CHANNELS - 1) / CHANNELS;
}

void fsdp__k_batch_norm(const fsdp__batch_norm *o, const void *x, const void *w, const void *b,
                        void *y, void *mean, void *rstd)
{
    batch_args u = {.o = o,
                    .stat = fsdp__stat_dtype(o->t),
                    .x = x,
                    .w = w,
                    .b = b,
                    .y = y,
                    .mean = mean,
                    .rstd = rstd};
    fsdp__parallel(parts_of(o), forward_part, &u);
}

static void backward_part(void *arg, int64_t part)
{
    const batch_args *u = arg;
    const fsdp__batch_norm *o = u->o;
    int64_t c = part * CHANNELS, n = o->C - c < CHANNELS ? o->C - c : CHANNELS;
    double mean[CHANNELS] = {0}, rstd[CHANNELS], sum_d[CHANNELS], sum_dx[CHANNELS];
    for (int64_t k = 0; k < n; k++) {
        mean[k] = fsdp__get_f64(u->mean, u->stat, c + k);
        rstd[k] = fsdp__get_f64(u->rstd, u->stat, c + k);
    }
    sum_channels(u, SUM_DY, c, n, mean, sum_d);
    sum_channels(u, SUM_DY_X, c, n, mean, sum_dx);
    for (int64_t k = 0; k < n; k++) {
        if (u->dw) fsdp__put_f64(u->dw, u->dt_w, c + k, sum_dx[k] * rstd[k], u->add_w);
        if (u->db) fsdp__put_f64(u->db, u->dt_b, c + k, sum_d[k], u->add_b);
    }
    if (!u->y) return;
    double count = (double)(o->N * o->L);
    for (int64_t k = 0; k < n; k++) { /* kept statistics are constants */
        sum_d[k] = o->training ? sum_d[k] / count : 0;
        sum_dx[k] = o->training ? sum_dx[k] / count * rstd[k] * rstd[k] : 0;
    }
    for (int64_t s = 0; s < o->N; s++)
        for (int64_t k = 0; k < n; k++) {
            int64_t first = (s * o->C + c + k) * o->L;
            double factor = u->w ? rstd[k] * fsdp__get_f64(u->w, o->t, c + k) : rstd[k];
            for (int64_t i = first; i < first + o->L; i++) {
                double v = fsdp__get_f64(u->x, o->t, i) - mean[k];
                double d = fsdp__get_f64(u->dy, o->t, i) - sum_d[k] - v * sum_dx[k];
                fsdp__put_f64(u->y, u->dt, i, d * factor, u->add);
            }
        }
}

void fsdp__k_batch_norm_backward(const fsdp__batch_norm *o, const void *x, const void *w,
                                 const void *mean, const void *rstd, const void *dy, void *dx,
                                 fsdp_dtype dt_x, int add_x, void *dw, fsdp_dtype dt_w, int add_w,
                                 void *db, fsdp_dtype dt_b, int add_b)
{
    batch_args u = {.o = o,
                    .stat = fsdp__stat_dtype(o->t),
                    .x = x,
                    .w = w,
                    .dy = dy,
                    .y = dx,
                    .mean = (void *)(uintptr_t)mean,
                    .rstd = (void *)(uintptr_t)rstd,
                    .dw = dw,
                    .db = db,
                    .dt = dt_x,
                    .dt_w = dt_w,
                    .dt_b = dt_b,
                    .add = add_x,
                    .add_w = add_w,
                    .add_b = add_b};
    fsdp__parallel(parts_of(o), backward_part, &u);
}
