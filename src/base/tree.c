/*
 * tree.c - sums whose order is one, whoever made the summands.
 */
#include "base/convert.h"

double fsdp__tree_sum(const double *x, int64_t n)
{
    if (n <= 1) return n == 1 ? x[0] : 0.0;
    int64_t half = 1;
    while (half * 2 < n)
        half *= 2;
    return fsdp__tree_sum(x, half) + fsdp__tree_sum(x + half, n - half);
}
