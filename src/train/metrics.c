/*
 * metrics.c - lines, JSON lines, progress bar. See metrics.h.
 *
 * The form of the lines is torchtitan's, so that what reads those reads these. Numbers in JSON have
 * as many digits as it takes to read them back to the same bits.
 */
#include "train/metrics.h"

#include <math.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/str.h"
#include "base/thread.h"
#include "format/file.h"
#include "format/json.h"

/* ---- the file ----------------------------------------------------------------------- */

/* The lines of an earlier start up to step `last`; a run that goes on writes the later ones again.
 */
static fsdp_status keep_lines(const char *path, int64_t last)
{
    char *text;
    size_t len;
    FSDP_TRY(fsdp__file_read(path, &text, &len));
    fsdp__str kept = {0};
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, "\n");
        const char *at = strstr(p, "\"step\": ");
        bool whole = p[n] == '\n' && at && at < p + n;
        if (whole && strtoll(at + 8, NULL, 10) <= last) fsdp__str_add_n(&kept, p, n + 1);
        p += n + (p[n] != 0);
    }
    free(text);
    fsdp_status s = kept.failed ? fsdp__fail_memory("metrics", len)
                                : fsdp__file_write(path, fsdp__str_get(&kept), kept.len);
    fsdp__str_free(&kept);
    return s;
}

void fsdp__metrics_init(fsdp__metrics *m, int rank, int ranks)
{
    *m = (fsdp__metrics){.speaks = rank == 0, .bar = rank == 0 && isatty(1), .ranks = ranks};
}

fsdp_status fsdp__metrics_open(fsdp__metrics *m, const char *path, int64_t first_step,
                               int64_t steps, double flops_per_token)
{
    m->first_step = first_step;
    m->steps = steps;
    m->flops_per_token = flops_per_token;
    if (!m->speaks) return FSDP_OK;
    if (fsdp__file_exists(path)) FSDP_TRY(keep_lines(path, first_step > 0 ? first_step : -1));
    m->json = fopen(path, "a");
    if (!m->json) return fsdp__fail_errno(FSDP_IO_ERROR, "cannot write %s", path);
    return FSDP_OK;
}

static void clear_bar(fsdp__metrics *m)
{
    if (m->bar_drawn) fputs("\r\033[K", stdout);
    m->bar_drawn = false;
}

void fsdp__metrics_close(fsdp__metrics *m)
{
    clear_bar(m);
    if (m->json) fclose(m->json);
    m->json = NULL;
}

static fsdp_status write_json(fsdp__metrics *m, fsdp__str *line)
{
    fsdp__str_add(line, "}\n");
    fsdp_status s = FSDP_OK;
    if (line->failed)
        s = fsdp__fail_memory("metrics", line->len);
    else if (fputs(line->p, m->json) < 0 || fflush(m->json) != 0)
        s = fsdp__fail_errno(FSDP_IO_ERROR, "cannot write metrics.jsonl");
    fsdp__str_free(line);
    return s;
}

static void add_number(fsdp__str *line, const char *name, double v)
{
    fsdp__str_addf(line, ", \"%s\": ", name);
    if (isfinite(v))
        fsdp__json_real(line, v);
    else /* of a step that was left out; JSON has no such numbers */
        fsdp__str_add(line, "null");
}

/* ---- the screen -------------------------------------------------------------------------- */

void fsdp__say(fsdp__metrics *m, const char *fmt, ...)
{
    if (!m->speaks) return;
    clear_bar(m);
    va_list args;
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    fflush(stdout);
}

static void draw_bar(fsdp__metrics *m, int64_t step)
{
    enum { WIDTH = 30 };
    int64_t done = step - m->first_step;
    if (!m->speaks || !m->bar || m->steps <= 0 || done <= 0) return;
    int filled = (int)((double)step / (double)m->steps * WIDTH);
    double left = (fsdp__now() - m->started) / (double)done * (double)(m->steps - step);
    int64_t seconds = (int64_t)(left + 0.5);
    printf("\r\033[K[");
    for (int i = 0; i < WIDTH; i++)
        putchar(i < filled ? '=' : i == filled ? '>' : ' ');
    printf("] %lld/%lld  ", (long long)step, (long long)m->steps);
    if (seconds >= 3600) printf("%lld:", (long long)(seconds / 3600));
    printf("%02lld:%02lld left", (long long)(seconds / 60 % 60), (long long)(seconds % 60));
    fflush(stdout);
    m->bar_drawn = true;
}

/* 1234567 as "1,234,567". */
static void add_thousands(fsdp__str *out, double v)
{
    char digits[40];
    int n = snprintf(digits, sizeof digits, "%.0f", v);
    for (int i = 0; i < n; i++) {
        if (i > 0 && (n - i) % 3 == 0 && digits[i - 1] != '-') fsdp__str_add(out, ",");
        fsdp__str_add_n(out, digits + i, 1);
    }
}

/* ---- numbers ------------------------------------------------------------------------------- */

void fsdp__metrics_resume(fsdp__metrics *m)
{
    m->since = fsdp__now();
    m->tokens = 0;
}

void fsdp__metrics_step(fsdp__metrics *m, int64_t step, int64_t tokens)
{
    m->tokens += tokens;
    draw_bar(m, step);
}

int64_t fsdp__metrics_peak(fsdp__metrics *m)
{
    fsdp_memory_stats s;
    fsdp_memory_get(&s);
    fsdp_memory_reset_peak();
    for (int p = 0; p < FSDP_PURPOSE_COUNT; p++)
        if (s.peak[p] > m->peak[p]) m->peak[p] = s.peak[p];
    if (s.peak_total > m->peak_total) m->peak_total = s.peak_total;
    if (s.peak_total > m->window) m->window = s.peak_total;
    return s.peak_total;
}

fsdp_status fsdp__metrics_line(fsdp__metrics *m, int64_t step, double loss, double grad_norm,
                               double lr)
{
    (void)fsdp__metrics_peak(m);
    int64_t bytes = m->window;
    double seconds = fsdp__now() - m->since;
    double tps = seconds > 0 ? (double)m->tokens / seconds / m->ranks : 0;
    double tflops = tps * m->flops_per_token / 1e12;
    int64_t tokens = m->tokens;
    m->window = 0;
    fsdp__metrics_resume(m);
    if (!m->speaks) return FSDP_OK;

    fsdp__str rate = {0};
    add_thousands(&rate, tps);
    char norm[32] = "    N/A";
    if (!(grad_norm < 0)) snprintf(norm, sizeof norm, "%7.4f", grad_norm);
    fsdp__say(m,
              "step: %2lld  loss: %8.5f  grad_norm: %s  memory: %.2fGiB  tps: %s  tflops: %.2f  "
              "mfu: N/A\n",
              (long long)step, loss, norm, (double)bytes / 0x1p30, fsdp__str_get(&rate), tflops);
    fsdp__str_free(&rate);
    draw_bar(m, step);

    fsdp__str line = {0};
    fsdp__str_addf(&line, "{\"step\": %lld", (long long)step);
    add_number(&line, "loss", loss);
    add_number(&line, "grad_norm", grad_norm < 0 ? NAN : grad_norm);
    add_number(&line, "lr", lr);
    fsdp__str_addf(&line, ", \"memory\": %lld, \"tokens\": %lld", (long long)bytes,
                   (long long)tokens);
    add_number(&line, "seconds", seconds);
    add_number(&line, "tps", tps);
    add_number(&line, "tflops", tflops);
    return write_json(m, &line);
}

fsdp_status fsdp__metrics_validation(fsdp__metrics *m, int64_t step, double loss, int64_t tokens,
                                     double seconds)
{
    int64_t bytes = fsdp__metrics_peak(m);
    double tps = seconds > 0 ? (double)tokens / seconds / m->ranks : 0;
    if (!m->speaks) return FSDP_OK;
    fsdp__str rate = {0};
    add_thousands(&rate, tps);
    fsdp__say(m, "validate step: %2lld  loss: %7.4f  memory: %.2fGiB  tps: %s\n", (long long)step,
              loss, (double)bytes / 0x1p30, fsdp__str_get(&rate));
    fsdp__str_free(&rate);
    fsdp__str line = {0};
    fsdp__str_addf(&line, "{\"step\": %lld", (long long)step);
    add_number(&line, "validation_loss", loss);
    fsdp__str_addf(&line, ", \"validation_tokens\": %lld, \"memory\": %lld", (long long)tokens,
                   (long long)bytes);
    add_number(&line, "tps", tps);
    return write_json(m, &line);
}
