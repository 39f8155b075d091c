/*
 * test_base_rng.c - Philox against its published answers; streams are
 * functions of key and index; permutations.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "fsdp/context.h"

/* The definition, with all four counter words. */
static void philox_4(uint32_t c[4], uint32_t k[2])
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b,
                            (uint32_t)(a >> 32) ^ c[3] ^ k[1], (uint32_t)a};
        memcpy(c, next, sizeof next);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
}

static void philox_has_the_published_answers(void **state)
{
    (void)state;
    /* Counter, key, answer: the known answers that Random123 ships. */
    static const uint32_t known[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
         0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t c[4], k[2];
        memcpy(c, known[i], sizeof c);
        memcpy(k, known[i] + 4, sizeof k);
        philox_4(c, k);
        assert_memory_equal(c, known[i] + 6, sizeof c);
    }
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t key = fsdp__rng_mix(1, i), block = fsdp__rng_mix(2, i);
        uint32_t out[4];
        fsdp__philox(key, block, out);
        uint32_t c[4] = {(uint32_t)block, (uint32_t)(block >> 32), 0, 0};
        uint32_t k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
        philox_4(c, k);
        assert_memory_equal(out, c, sizeof c);
    }
}

static void keys_depend_on_everything(void **state)
{
    (void)state;
    uint64_t k = fsdp__rng_key(1);
    assert_true(k != fsdp__rng_key(2));
    assert_true(fsdp__rng_mix(fsdp__rng_mix(k, 1), 2) != fsdp__rng_mix(fsdp__rng_mix(k, 2), 1));
    assert_true(fsdp__rng_mix(k, 0) != k);
    const char *names[] = {"",         "a",        "b", "ab", "ba", "layers.0.wq", "layers.1.wq",
                           "12345678", "123456789"};
    for (int i = 0; i < 9; i++)
        for (int j = 0; j < i; j++)
            assert_true(fsdp__rng_mix_str(k, names[i]) != fsdp__rng_mix_str(k, names[j]));
    assert_true(fsdp__rng_mix_str(k, "x") == fsdp__rng_mix_str(k, "x"));
}

static void fills_equal_single_elements(void **state)
{
    (void)state;
    enum { N = 131 };
    static const size_t lengths[] = {0, 1, 3, 4, 5, 64, N};
    float u[N + 1], g[N + 1];
    for (uint64_t first = 0; first < 9; first++) {
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            size_t n = lengths[l];
            u[n] = g[n] = 77;
            fsdp__rng_uniform_fill(42, first, u, n);
            fsdp__rng_normal_fill(42, first, g, n);
            assert_true(u[n] == 77 && g[n] == 77);
            for (size_t i = 0; i < n; i++) {
                assert_true(u[i] == fsdp__rng_uniform(42, first + i));
                assert_true(g[i] == fsdp__rng_normal(42, first + i));
            }
        }
    }
}

static void long_fills_do_not_depend_on_threads(void **state)
{
    (void)state;
    size_t n = 200003;
    float *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b);
    fsdp_set_threads(1);
    fsdp__rng_normal_fill(7, 1, a, n);
    fsdp_set_threads(3);
    fsdp__rng_normal_fill(7, 1, b, n);
    assert_memory_equal(a, b, n * sizeof *a);
    assert_true(b[n - 1] == fsdp__rng_normal(7, n));
    free(a);
    free(b);
}

static void moments_are_right(void **state)
{
    (void)state;
    enum { N = 100000 };
    float *x = malloc(N * sizeof *x);
    double s1 = 0, s2 = 0, s4 = 0, cross = 0;
    fsdp__rng_normal_fill(fsdp__rng_key(3), 0, x, N);
    for (int i = 0; i < N; i++) {
        assert_true(isfinite(x[i]));
        s1 += x[i];
        s2 += (double)x[i] * x[i];
        s4 += pow(x[i], 4);
        if (i) cross += (double)x[i] * x[i - 1];
    }
    /* Five standard errors each. */
    assert_true(fabs(s1 / N) < 5 / sqrt(N));
    assert_true(fabs(s2 / N - 1) < 5 * sqrt(2.0 / N));
    assert_true(fabs(s4 / N - 3) < 5 * sqrt(96.0 / N));
    assert_true(fabs(cross / N) < 5 / sqrt(N));
    s1 = 0;
    fsdp__rng_uniform_fill(fsdp__rng_key(4), 0, x, N);
    for (int i = 0; i < N; i++) {
        assert_true(x[i] >= 0 && x[i] < 1);
        s1 += x[i];
    }
    assert_true(fabs(s1 / N - 0.5) < 5 * sqrt(1.0 / 12 / N));
    free(x);
}

static void permutations_are_bijections(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 100, 1023, 1024, 1025, 4099};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint64_t n = sizes[s], fixed = 0;
        char *hit = calloc(n, 1);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t p = fsdp__rng_permute(99, i, n);
            assert_true(p < n);
            assert_int_equal(hit[p], 0);
            hit[p] = 1;
            fixed += p == i;
        }
        /* A random permutation has one fixed point on average. */
        if (n > 100) assert_true(fixed < 10);
        free(hit);
    }
    /* Another key, another order; huge domains work. */
    int same = 0;
    for (uint64_t i = 0; i < 1000; i++)
        same += fsdp__rng_permute(1, i, 1000) == fsdp__rng_permute(2, i, 1000);
    assert_true(same < 15);
    uint64_t n = UINT64_MAX;
    assert_true(fsdp__rng_permute(1, n - 1, n) < n);
    assert_true(fsdp__rng_permute(1, 5, n) != fsdp__rng_permute(1, 6, n));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_has_the_published_answers),
        cmocka_unit_test(keys_depend_on_everything),
        cmocka_unit_test(fills_equal_single_elements),
        cmocka_unit_test(long_fills_do_not_depend_on_threads),
        cmocka_unit_test(moments_are_right),
        cmocka_unit_test(permutations_are_bijections),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
