/*
 * test_mesh_hosts.c - axes over hosts: what crosses, what is printed, what is advised. The hosts
 * are made up.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "mesh/hosts.h"

static const char *const names[] = {"replicate", "shard"};

/* hosts: one letter a rank. */
static fsdp__host_table table(const int *size, const char *hosts, const char **host)
{
    static const char *const letters[] = {"a", "b", "c", "d"};
    fsdp__host_table t = {2, size, names, size[0] * size[1], host};
    for (int r = 0; r < t.world; r++)
        host[r] = letters[hosts[r] - 'a'];
    return t;
}

static void expect(int replicate, int shard, const char *hosts, bool crosses_r, bool crosses_s,
                   const char *advice)
{
    int size[] = {replicate, shard};
    const char *host[64];
    fsdp__host_table t = table(size, hosts, host);
    fsdp__str s = {0};
    assert_int_equal(fsdp__axis_crosses(&t, 0), crosses_r);
    assert_int_equal(fsdp__axis_crosses(&t, 1), crosses_s);
    assert_int_equal(fsdp__mesh_advice(&t, &s), advice != NULL);
    if (advice && !strstr(fsdp__str_get(&s), advice))
        fail_msg("%s: found '%s', expected '%s'", hosts, fsdp__str_get(&s), advice);
    if (!advice) assert_int_equal(s.len, 0);
    fsdp__str_free(&s);
}

static void test_advice(void **state)
{
    (void)state;
    expect(2, 2, "aaaa", false, false, NULL); /* one host */
    expect(2, 2, "aabb", true, false, NULL);  /* as it should be */
    expect(2, 4, "aaaabbbb", true, false, NULL);
    expect(1, 4, "aabb", false, true, NULL); /* flat: nothing else could be */
    expect(4, 1, "aabb", true, false, NULL);
    expect(2, 4, "aabbccdd", true, true, NULL); /* a shard group larger than a host */
    /* Ranks dealt to hosts in turns. */
    expect(2, 2, "abab", false, true, "replicate 2 x shard 2 over the ranks in the order 0 2 1 3:");
    expect(4, 2, "abababab", false, true,
           "replicate 4 x shard 2 over the ranks in the order 0 2 4 6 1 3 5 7:");
    expect(2, 4, "abcdabcd", false, true,
           "replicate 4 x shard 2 over the ranks in the order 0 4 1 5 2 6 3 7:");
    expect(3, 2, "ababab", false, true,
           "replicate 2 x shard 3 over the ranks in the order 0 2 4 1");
}

static void test_text(void **state)
{
    (void)state;
    int size[] = {2, 2};
    const char *host[4];
    fsdp__host_table t = table(size, "aabb", host);
    fsdp__str s = {0};
    fsdp__axes_text(&t, &s);
    assert_string_equal(fsdp__str_get(&s),
                        "  replicate groups: 0 2 (a, b), 1 3 (a, b); they cross hosts\n"
                        "  shard groups: 0 1 (a), 2 3 (b); inside a host each\n");
    fsdp__str_free(&s);
    int wide[] = {10, 1};
    const char *many[10];
    t = table(wide, "aaaaaaaaaa", many);
    fsdp__axes_text(&t, &s);
    assert_string_equal(fsdp__str_get(&s),
                        "  replicate groups: 0 1 2 3 4 5 6 7 8 9 (a); inside a host each\n"
                        "  shard groups: 0 (a), 1 (a), 2 (a), 3 (a), 4 (a), 5 (a), 6 (a), 7 (a), "
                        "...; of one rank each\n");
    fsdp__str_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_advice), cmocka_unit_test(test_text)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
