/*
 * poison.h - tells the address sanitizer which bytes of our own ranges may be used.
 *
 * Without the sanitizer both do nothing. Only whole groups of eight bytes can be poisoned, so the
 * range is given as taken: allocators hand out multiples of 64.
 */
#ifndef FSDP_DEVICE_POISON_H
#define FSDP_DEVICE_POISON_H

#include <stddef.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
static inline void fsdp__poison(void *p, size_t bytes)
{
    __asan_poison_memory_region(p, bytes);
}
static inline void fsdp__unpoison(void *p, size_t bytes)
{
    __asan_unpoison_memory_region(p, bytes);
}
#else
static inline void fsdp__poison(void *p, size_t bytes)
{
    (void)p;
    (void)bytes;
}
static inline void fsdp__unpoison(void *p, size_t bytes)
{
    (void)p;
    (void)bytes;
}
#endif

#endif
