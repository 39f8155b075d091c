/*
 * test_data_bigram.c - the bigram model against values counted by hand and
 * against a dense table.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "data/bigram.h"
#include "format/file.h"

static char dir[] = "/tmp/fsdp_test_bigram_XXXXXX";

static int setup(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    return fsdp__dir_remove(dir) == FSDP_OK ? 0 : -1;
}

static fsdp__tokens *file(const char *name, const int32_t *ids, int64_t n, int64_t vocab)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    fsdp__tokens_writer *w = fsdp__tokens_create(path, vocab);
    assert_non_null(w);
    assert_int_equal(fsdp__tokens_add(w, ids, n), FSDP_OK);
    assert_int_equal(fsdp__tokens_commit(w), FSDP_OK);
    fsdp__tokens *t = fsdp__tokens_open(path);
    assert_non_null(t);
    return t;
}

static void test_by_hand(void **state)
{
    (void)state;
    fsdp__tokens *train = file("a", (int32_t[]){0, 1, 0, 1, 2}, 5, 4);
    fsdp__tokens *valid = file("b", (int32_t[]){0, 1, 2, 3}, 4, 4);
    double nats;
    assert_int_equal(fsdp__bigram_loss(train, valid, 4, &nats), FSDP_OK);
    /* n(0 1) = 2 of n(0) = 2; n(1 2) = 1 of n(1) = 2; nothing begins with 2. */
    double expected = -(log(3.0 / 6.0) + log(2.0 / 6.0) + log(1.0 / 4.0)) / 3.0;
    assert_true(fabs(nats - expected) < 1e-12);
    assert_int_equal(fsdp__bigram_loss(train, valid, 3, &nats), FSDP_INVALID_DATA);
    assert_non_null(strstr(fsdp_error_text(), "token 3 at offset 3"));
    fsdp_error_clear();
    fsdp__tokens *one = file("c", (int32_t[]){1}, 1, 4);
    assert_int_equal(fsdp__bigram_loss(train, one, 4, &nats), FSDP_INVALID_DATA);
    fsdp_error_clear();
    fsdp__tokens_close(one);
    fsdp__tokens_close(train);
    fsdp__tokens_close(valid);
}

static void test_dense(void **state)
{
    enum { V = 37, N = 5000, M = 900 };
    static int32_t a[N], b[M];
    static int64_t pairs[V][V], firsts[V];
    uint32_t seed = 9;
    (void)state;
    for (int i = 0; i < N + M; i++) {
        seed = seed * 1664525u + 1013904223u;
        int32_t id = (int32_t)((seed >> 16) % V * (seed >> 24) / 256);
        if (i < N)
            a[i] = id;
        else
            b[i - N] = id;
    }
    for (int i = 0; i + 1 < N; i++) {
        pairs[a[i]][a[i + 1]]++;
        firsts[a[i]]++;
    }
    double sum = 0, nats;
    for (int i = 0; i + 1 < M; i++)
        sum -= log((double)(pairs[b[i]][b[i + 1]] + 1) / (double)(firsts[b[i]] + V));
    fsdp__tokens *train = file("a", a, N, V), *valid = file("b", b, M, V);
    assert_int_equal(fsdp__bigram_loss(train, valid, V, &nats), FSDP_OK);
    assert_true(fabs(nats - sum / (M - 1)) < 1e-9);
    fsdp__tokens_close(train);
    fsdp__tokens_close(valid);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_hand),
        cmocka_unit_test(test_dense),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
