/*
 * test_base_match.c - patterns of names.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/match.h"

static void yes(const char *pattern, const char *name)
{
    if (!fsdp__match(pattern, name)) fail_msg("'%s' does not match '%s'", pattern, name);
}

static void no(const char *pattern, const char *name)
{
    if (fsdp__match(pattern, name)) fail_msg("'%s' matches '%s'", pattern, name);
}

static void test_globs(void **state)
{
    (void)state;
    yes("a.b", "a.b");
    no("a.b", "a.bc");
    no("a.b", "a.");
    yes("*", "");
    yes("*", "anything.at.all");
    yes("*norm*", "model.layers.3.input_layernorm.weight");
    no("*norm*", "model.layers.3.mlp.up_proj.weight");
    yes("*.bias", "a.b.bias");
    no("*.bias", "a.bias.b");
    yes("a*b*c", "a-b-b-c");
    no("a*b*c", "a-b-b-");
    yes("layers.?.w", "layers.7.w");
    no("layers.?.w", "layers.17.w");
    no("?", "");
    yes("", "");
    no("", "a");
    /* Many stars do not take for ever. */
    no("*a*a*a*a*a*a*a*a*a*a*b", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
}

static void test_sets(void **state)
{
    (void)state;
    yes("layers.[0-3].w", "layers.2.w");
    no("layers.[0-3].w", "layers.4.w");
    yes("layers.[!0-3].w", "layers.4.w");
    no("layers.[!0-3].w", "layers.1.w");
    yes("[qk]_proj", "k_proj");
    no("[qk]_proj", "v_proj");
    yes("[]x]", "]");
    yes("[abc", "[abc"); /* not closed: itself */
    yes("[|]", "|");
}

static void test_alternatives(void **state)
{
    (void)state;
    yes("*norm*|*.bias", "a.norm.weight");
    yes("*norm*|*.bias", "a.bias");
    no("*norm*|*.bias", "a.weight");
    yes("a|b|c", "c");
    no("a|b|c", "a|b");
    yes("a|", "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_globs),
        cmocka_unit_test(test_sets),
        cmocka_unit_test(test_alternatives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
