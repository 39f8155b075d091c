/*
 * test_device_heap.c - the best-fit heap against a table of who owns which bytes, and the CPU
 * allocator's accounts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/context.h"
#include "base/rng.h"
#include "device/allocator.h"
#include "device/heap.h"

enum { BLOCKS = 300, STEPS = 20000 };

typedef struct owned {
    int64_t offset, size;
} owned;

static int64_t size_of_step(uint64_t key, uint64_t step)
{
    uint32_t x = fsdp__rng_u32(key, step);
    switch (x % 5) {
    case 0:
        return x / 5 % 64; /* zero included */
    case 1:
        return 65536 + x / 5 % 300000;
    case 2:
        return 4096;
    default:
        return 1 + x / 5 % 9000;
    }
}

/* Random takes and gives: blocks never overlap, the invariants hold, equal calls give equal
 * offsets on two heaps. */
static void test_random(void **state)
{
    (void)state;
    fsdp__heap *h = fsdp__heap_create((int64_t)1 << 30),
               *twin = fsdp__heap_create((int64_t)1 << 30);
    owned table[BLOCKS] = {{0, 0}};
    uint64_t key = fsdp__rng_key(11);
    for (uint64_t step = 0; step < STEPS; step++) {
        owned *o = &table[fsdp__rng_u32(key, step) / 7 % BLOCKS];
        if (o->size) {
            fsdp__heap_give(h, o->offset, step);
            fsdp__heap_give(twin, o->offset, step);
            o->size = 0;
        } else {
            int64_t bytes = size_of_step(fsdp__rng_mix(key, 1), step);
            o->offset = fsdp__heap_take(h, bytes, NULL, "test");
            assert_true(o->offset >= 0);
            assert_int_equal(o->offset, fsdp__heap_take(twin, bytes, NULL, "test"));
            o->size = bytes > 0 ? bytes : 1;
            for (int i = 0; i < BLOCKS; i++)
                if (&table[i] != o && table[i].size)
                    assert_true(table[i].offset >= o->offset + o->size ||
                                o->offset >= table[i].offset + table[i].size);
        }
        if (step % 50 == 0) assert_int_equal(fsdp__heap_check(h), 0);
    }
    for (int i = 0; i < BLOCKS; i++)
        if (table[i].size) fsdp__heap_give(h, table[i].offset, 0);
    assert_int_equal(fsdp__heap_check(h), 0);
    assert_int_equal(fsdp__heap_live(h), 0);
    assert_true(fsdp__heap_touched(h) > 0);
    fsdp__heap_free(h);
    fsdp__heap_free(twin);
}

static void test_best_fit(void **state)
{
    (void)state;
    fsdp__heap *h = fsdp__heap_create(1 << 20);
    int64_t a = fsdp__heap_take(h, 640, NULL, "a"), wall1 = fsdp__heap_take(h, 1, NULL, "w");
    int64_t b = fsdp__heap_take(h, 320, NULL, "b"), wall2 = fsdp__heap_take(h, 1, NULL, "w");
    int64_t c = fsdp__heap_take(h, 320, NULL, "c"), wall3 = fsdp__heap_take(h, 1, NULL, "w");
    assert_true(a == 0 && wall1 == 640 && b == 704 && wall2 == 1024 && c == 1088 && wall3 == 1408);
    fsdp__heap_give(h, a, 0);
    fsdp__heap_give(h, c, 0);
    fsdp__heap_give(h, b, 0);
    /* The smallest hole that fits, the lowest of two equal ones. */
    assert_int_equal(fsdp__heap_take(h, 300, NULL, "x"), b);
    assert_int_equal(fsdp__heap_take(h, 300, NULL, "x"), c);
    assert_int_equal(fsdp__heap_take(h, 300, NULL, "x"), a);
    /* A big block begins at a page; the hole before it stays usable. */
    int64_t big = fsdp__heap_take(h, 70000, NULL, "big");
    assert_int_equal(big, 4096);
    assert_int_equal(fsdp__heap_take(h, 2000, NULL, "small"), 1472);
    assert_int_equal(fsdp__heap_check(h), 0);
    fsdp__heap_free(h);
}

static void test_clock(void **state)
{
    (void)state;
    fsdp__heap *h = fsdp__heap_create(1 << 20);
    uint64_t clock = 99;
    int64_t a = fsdp__heap_take(h, 64, &clock, "a");
    assert_int_equal(clock, 0);
    int64_t b = fsdp__heap_take(h, 64, NULL, "b"), c = fsdp__heap_take(h, 64, NULL, "c");
    fsdp__heap_give(h, b, 5);
    fsdp__heap_give(h, a, 3);
    /* Joined: whoever takes any of it waits for the later of both. */
    a = fsdp__heap_take(h, 64, &clock, "a");
    assert_int_equal(a, 0);
    assert_int_equal(clock, 5);
    fsdp__heap_give(h, c, 2);
    b = fsdp__heap_take(h, 1000, &clock, "b");
    assert_int_equal(b, 64);
    assert_int_equal(clock, 5);
    fsdp__heap_give(h, a, 1);
    fsdp__heap_give(h, b, 9);
    (void)fsdp__heap_take(h, 2000, &clock, "c");
    assert_int_equal(clock, 9);
    fsdp__heap_free(h);
}

static void test_full(void **state)
{
    (void)state;
    fsdp__heap *h = fsdp__heap_create(1 << 20);
    assert_int_equal(fsdp__heap_take(h, (1 << 20) + 1, NULL, "too much"), -1);
    assert_int_equal(fsdp_error(), FSDP_NO_MEMORY);
    assert_non_null(strstr(fsdp_error_text(), "too much"));
    fsdp_error_clear();
    assert_int_equal(fsdp__heap_take(h, INT64_MAX, NULL, "too much"), -1);
    fsdp_error_clear();
    int64_t all = fsdp__heap_take(h, 1 << 20, NULL, "all");
    assert_int_equal(all, 0);
    assert_int_equal(fsdp__heap_take(h, 1, NULL, "one"), -1);
    fsdp_error_clear();
    fsdp__heap_give(h, all, 0);
    assert_int_equal(fsdp__heap_take(h, 1, NULL, "one"), 0);
    fsdp__heap_free(h);
}

static void unmap(void *arg, int64_t offset, int64_t bytes)
{
    assert_int_equal(offset % 4096, 0);
    assert_int_equal(bytes % 4096, 0);
    *(int64_t *)arg += bytes;
}

static void test_trim(void **state)
{
    (void)state;
    fsdp__heap *h = fsdp__heap_create(1 << 24);
    int64_t a = fsdp__heap_take(h, 1 << 20, NULL, "a"), b = fsdp__heap_take(h, 100, NULL, "b");
    int64_t c = fsdp__heap_take(h, 1 << 20, NULL, "c"), given = 0;
    int64_t touched = fsdp__heap_touched(h);
    assert_int_equal(touched, (2 << 20) + 4096);
    fsdp__heap_give(h, a, 0);
    fsdp__heap_give(h, c, 0);
    assert_int_equal(fsdp__heap_touched(h), touched);
    fsdp__heap_trim(h, unmap, &given);
    assert_int_equal(fsdp__heap_touched(h), 4096);
    assert_int_equal(given, 2 << 20);
    fsdp__heap_trim(h, unmap, &given);
    assert_int_equal(given, 2 << 20);
    assert_int_equal(fsdp__heap_check(h), 0);
    /* Taken again, it counts again. */
    a = fsdp__heap_take(h, 8192, NULL, "a");
    assert_int_equal(a, 0);
    assert_int_equal(fsdp__heap_touched(h), 4096 + 8192);
    fsdp__heap_give(h, a, 0);
    fsdp__heap_give(h, b, 0);
    fsdp__heap_trim(h, unmap, &given);
    assert_int_equal(fsdp__heap_touched(h), 0);
    assert_int_equal(fsdp__heap_check(h), 0);
    fsdp__heap_free(h);
}

static void test_allocator(void **state)
{
    (void)state;
    fsdp_context *ctx = fsdp_context_create(0, 1), *before = fsdp_context_set(ctx);
    fsdp__allocator *cpu = fsdp__allocator_cpu();
    assert_non_null(cpu);
    fsdp_memory_stats m;
    char *p = cpu->alloc(cpu, 100, "p");
    assert_int_equal((uintptr_t)p % 64, 0);
    memset(p, 1, 100);
    fsdp_memory_get(&m);
    assert_int_equal(m.reserved, 4096 - 100); /* a page holds it */
    char *q = cpu->alloc(cpu, 1 << 20, "q");
    memset(q, 2, 1 << 20);
    fsdp_memory_get(&m);
    assert_int_equal(m.reserved, 4096 - 100);
    cpu->free(cpu, q, 1 << 20);
    fsdp_memory_get(&m);
    assert_int_equal(m.reserved, 4096 - 100 + (1 << 20));
    /* A steady state touches no new page. */
    q = cpu->alloc(cpu, 1 << 20, "q");
    fsdp_memory_get(&m);
    assert_int_equal(m.reserved, 4096 - 100);
    cpu->free(cpu, q, 1 << 20);
    /* Pages without live bytes go back to the system, and come anew. */
    fsdp_memory_trim();
    fsdp_memory_get(&m);
    assert_int_equal(m.reserved, 4096 - 100);
    assert_int_equal(p[99], 1);
    q = cpu->alloc(cpu, 1 << 20, "q");
    for (int i = 0; i < 1 << 20; i++)
        assert_int_equal(q[i], 0);
    cpu->free(cpu, q, 1 << 20);
    cpu->free(cpu, p, 100);
    cpu->free(cpu, NULL, 0);
    fsdp_memory_trim();
    fsdp_memory_get(&m);
    assert_int_equal(m.reserved, 0);
    assert_null(cpu->alloc(cpu, SIZE_MAX, "everything"));
    assert_int_equal(fsdp_error(), FSDP_NO_MEMORY);
    fsdp_context_set(before);
    fsdp_context_free(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random), cmocka_unit_test(test_best_fit),
        cmocka_unit_test(test_clock),  cmocka_unit_test(test_full),
        cmocka_unit_test(test_trim),   cmocka_unit_test(test_allocator),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
