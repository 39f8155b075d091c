/*
 * test_data_sampler.c - every row once an epoch, on any number of ranks, and
 * the same rows in the same step whatever their number.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/sampler.h"
#include "format/file.h"

static char dir[] = "/tmp/fsdp_test_sampler_XXXXXX";
static char path[64];

static int setup(void **state)
{
    (void)state;
    if (!mkdtemp(dir)) return -1;
    snprintf(path, sizeof path, "%s/x.tokens", dir);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    return fsdp__dir_remove(dir) == FSDP_OK ? 0 : -1;
}

/* A file in which token i is i, so a token tells its place. */
static fsdp__tokens *counting_file(int64_t n)
{
    fsdp__tokens_writer *w = fsdp__tokens_create(path, n + 1);
    assert_non_null(w);
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(fsdp__tokens_add(w, &(int32_t){(int32_t)i}, 1), FSDP_OK);
    assert_int_equal(fsdp__tokens_commit(w), FSDP_OK);
    fsdp__tokens *t = fsdp__tokens_open(path);
    assert_non_null(t);
    return t;
}

enum { MOST_ROWS = 64 };

/* Runs one epoch on `ranks` ranks from *cursor on; order[i] is the file's row of the epoch's
 * i-th sample. Checks what each microbatch holds. */
static void run_epoch(const fsdp__sampler *s, int64_t *cursor, int ranks, int64_t micro,
                      int64_t order[MOST_ROWS])
{
    int seen[MOST_ROWS] = {0};
    int64_t start = *cursor, T = s->seq_len, steps = 0;
    fsdp__microbatch mb = {0};
    assert_int_equal(start % s->rows, 0);
    while (*cursor < start + s->rows) {
        fsdp__sampler_step step;
        int64_t calls = 0, rows = 0, valid = 0, index = 0;
        for (int r = 0; r < ranks; r++) {
            assert_int_equal(fsdp__sampler_plan(s, *cursor, r, ranks, micro, &step), FSDP_OK);
            if (r == 0) calls = step.calls;
            assert_int_equal(step.calls, calls); /* equally many forward calls */
            assert_int_equal(step.epoch, start / s->rows);
            for (int64_t c = 0; c < step.calls; c++) {
                assert_int_equal(fsdp__sampler_fill(s, &step, c, &mb), FSDP_OK);
                assert_true(mb.rows >= 1 && mb.rows <= micro);
                valid += mb.valid_tokens;
                if (mb.masked) {
                    assert_int_equal(mb.rows, 1);
                    assert_int_equal(mb.index, -1);
                    assert_true(mb.samples[0] == FSDP__NO_SAMPLE);
                    for (int64_t t = 0; t < T; t++)
                        assert_int_equal(mb.targets[t], FSDP__IGNORED);
                    continue;
                }
                assert_int_equal(mb.index, index++);
                for (int64_t i = 0; i < mb.rows; i++) {
                    /* Samples come in order over the ranks. */
                    assert_true(mb.samples[i] == (uint64_t)(*cursor + rows));
                    int64_t row = mb.inputs[i * T] / T;
                    assert_int_equal(row, fsdp__sampler_row(s, *cursor + rows));
                    for (int64_t t = 0; t < T; t++) {
                        assert_int_equal(mb.inputs[i * T + t], row * T + t);
                        assert_int_equal(mb.targets[i * T + t], row * T + t + 1);
                    }
                    order[*cursor + rows - start] = row;
                    assert_int_equal(seen[row]++, 0); /* nothing twice */
                    rows++;
                }
            }
        }
        assert_int_equal(rows, step.rows);
        assert_int_equal(valid, step.valid_tokens);
        *cursor = step.first + step.rows;
        steps++;
    }
    assert_int_equal(*cursor, start + s->rows); /* an epoch ends with a step */
    assert_int_equal(steps, fsdp__sampler_steps_per_epoch(s));
    for (int64_t i = 0; i < s->rows; i++)
        assert_int_equal(seen[i], 1);
    fsdp__microbatch_free(&mb);
}

/* RC-31: 10 rows, microbatch 2, 3 ranks, 3 epochs. */
static void test_ten_rows(void **state)
{
    int64_t order[3][MOST_ROWS], cursor = 0;
    fsdp__sampler s;
    (void)state;
    fsdp__tokens *t = counting_file(10 * 4 + 1);
    assert_int_equal(fsdp__sampler_init(&s, t, t->vocab_size, 4, 6, 7, true), FSDP_OK);
    assert_int_equal(s.rows, 10);
    for (int e = 0; e < 3; e++)
        run_epoch(&s, &cursor, 3, 2, order[e]);
    assert_int_equal(cursor, 30);
    assert_memory_not_equal(order[0], order[1], 10 * sizeof(int64_t));
    assert_memory_not_equal(order[1], order[2], 10 * sizeof(int64_t));
    assert_memory_not_equal(order[0], order[2], 10 * sizeof(int64_t));

    /* The last step has 4 rows: 2 for ranks 0 and 1, none for rank 2, one call each. */
    fsdp__sampler_step step;
    for (int r = 0; r < 3; r++) {
        assert_int_equal(fsdp__sampler_plan(&s, 6, r, 3, 2, &step), FSDP_OK);
        assert_int_equal(step.rows, 4);
        assert_int_equal(step.own_rows, r < 2 ? 2 : 0);
        assert_int_equal(step.calls, 1);
        assert_int_equal(step.valid_tokens, 16);
    }
    fsdp__tokens_close(t);
}

/* Aligned: microbatch i of a step has the same rows on any number of ranks, and a rank's are those
 * of a subtree. */
static void test_aligned(void **state)
{
    fsdp__sampler s;
    (void)state;
    fsdp__tokens *t = counting_file(64 * 2 + 1);
    for (int64_t rows = 1; rows <= 40; rows++)
        for (int ranks = 1; ranks <= 8; ranks *= 2) {
            assert_int_equal(fsdp__sampler_init(&s, t, t->vocab_size, 2, rows, 7, true), FSDP_OK);
            s.aligned = true;
            int64_t next = 0, calls = 0;
            for (int r = 0; r < ranks; r++) {
                fsdp__sampler_step step;
                assert_int_equal(fsdp__sampler_plan(&s, 0, r, ranks, 3, &step), FSDP_OK);
                int64_t share = step.block / 3;
                assert_true(step.block % 3 == 0 && (share & (share - 1)) == 0);
                assert_int_equal(step.own_first, next);
                next += step.own_rows;
                if (r == 0) calls = step.calls;
                assert_int_equal(step.calls, calls);
                assert_true(step.own_rows <= 3 * calls);
                assert_true(r > 0 || step.own_rows > 3 * (calls - 1));
            }
            assert_int_equal(next, rows);
        }
    fsdp__tokens_close(t);
}

/* The order depends on neither ranks nor microbatch, and changes with the seed. */
static void test_any_ranks(void **state)
{
    static const int64_t files[] = {1, 2, 7, 10, 33, 64};
    (void)state;
    for (size_t f = 0; f < sizeof files / sizeof *files; f++) {
        int64_t base[MOST_ROWS], order[MOST_ROWS], rows = files[f];
        fsdp__tokens *t = counting_file(rows * 3 + 1 + (int64_t)f % 3);
        for (int64_t batch = 1; batch <= 9; batch += 4) {
            fsdp__sampler s;
            assert_int_equal(fsdp__sampler_init(&s, t, t->vocab_size, 3, batch, 11, true), FSDP_OK);
            assert_int_equal(s.rows, rows);
            for (int ranks = 1; ranks <= 8; ranks++)
                for (int64_t micro = 1; micro <= 3; micro++) {
                    int64_t cursor = 5 * rows;
                    run_epoch(&s, &cursor, ranks, micro, order);
                    if (ranks == 1 && micro == 1 && batch == 1) memcpy(base, order, sizeof base);
                    assert_memory_equal(order, base, (size_t)rows * sizeof *order);
                }
            fsdp__sampler other;
            int differ = 0;
            assert_int_equal(fsdp__sampler_init(&other, t, t->vocab_size, 3, batch, 12, true),
                             FSDP_OK);
            for (int64_t i = 0; i < rows; i++)
                differ += fsdp__sampler_row(&other, 5 * rows + i) != base[i];
            if (rows >= 33) assert_true(differ > rows / 2);
        }
        fsdp__tokens_close(t);
    }
}

static void test_in_order(void **state)
{
    int64_t order[MOST_ROWS], cursor = 0;
    fsdp__sampler s;
    (void)state;
    fsdp__tokens *t = counting_file(21);
    assert_int_equal(fsdp__sampler_init(&s, t, t->vocab_size, 4, 2, 0, false), FSDP_OK);
    run_epoch(&s, &cursor, 2, 1, order);
    for (int64_t i = 0; i < 5; i++)
        assert_int_equal(order[i], i);
    fsdp__tokens_close(t);
}

static void test_errors(void **state)
{
    fsdp__sampler s;
    fsdp__sampler_step step;
    fsdp__microbatch mb = {0};
    (void)state;
    fsdp__tokens *t = counting_file(9);
    assert_int_equal(fsdp__sampler_init(&s, t, 100, 9, 1, 0, true), FSDP_INVALID_DATA);
    assert_non_null(strstr(fsdp_error_text(), path));
    assert_non_null(strstr(fsdp_error_text(), "9 tokens"));
    fsdp_error_clear();
    assert_int_equal(fsdp__sampler_init(&s, t, 100, 0, 1, 0, true), FSDP_INVALID_CONFIG);
    fsdp_error_clear();
    assert_int_equal(fsdp__sampler_init(&s, t, 100, 8, 0, 0, true), FSDP_INVALID_CONFIG);
    fsdp_error_clear();
    assert_int_equal(fsdp__sampler_init(&s, t, 7, 8, 4, 0, true), FSDP_OK);
    assert_int_equal(s.rows, 1);
    assert_int_equal(fsdp__sampler_plan(&s, -1, 0, 1, 1, &step), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__sampler_plan(&s, 0, 2, 2, 1, &step), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    assert_int_equal(fsdp__sampler_plan(&s, 0, 0, 1, 1, &step), FSDP_OK);
    assert_int_equal(fsdp__sampler_fill(&s, &step, 1, &mb), FSDP_INVALID_ARGUMENT);
    fsdp_error_clear();
    /* The model's vocabulary is 7, token 7 stands at offset 7. */
    assert_int_equal(fsdp__sampler_fill(&s, &step, 0, &mb), FSDP_INVALID_DATA);
    assert_non_null(strstr(fsdp_error_text(), "token 7 at offset 7"));
    fsdp_error_clear();
    fsdp__microbatch_free(&mb);
    fsdp__tokens_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ten_rows),  cmocka_unit_test(test_aligned),
        cmocka_unit_test(test_any_ranks), cmocka_unit_test(test_in_order),
        cmocka_unit_test(test_errors),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
