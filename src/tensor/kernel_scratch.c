/*
 * kernel_scratch.c - workspace of the kernels, by thread.
 *
 * The blocks hang off one thread-specific key, whose destructor frees them
 * when the thread ends; the main thread's live until the process does.
 */
#include "tensor/kernel_scratch.h"

#include <pthread.h>
#include <stdlib.h>

enum { SCRATCH_ALIGN = 64 };

typedef struct scratch {
    void *p[FSDP__SCRATCH_COUNT];
    size_t bytes[FSDP__SCRATCH_COUNT];
} scratch;

static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static pthread_key_t scratch_key;
static int scratch_key_error;
/* The key's value again: reading it is one load instead of a call. */
static _Thread_local scratch *scratch_mine;

static void scratch_free(void *arg)
{
    scratch *s = arg;
    for (int i = 0; i < FSDP__SCRATCH_COUNT; i++)
        free(s->p[i]);
    free(s);
    scratch_mine = NULL;
}

static void scratch_make_key(void)
{
    scratch_key_error = pthread_key_create(&scratch_key, scratch_free);
}

static scratch *scratch_get(void)
{
    if (scratch_mine) return scratch_mine;
    pthread_once(&scratch_once, scratch_make_key);
    if (scratch_key_error) return NULL;
    scratch *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    if (pthread_setspecific(scratch_key, s)) {
        free(s);
        return NULL;
    }
    scratch_mine = s;
    return s;
}

void *fsdp__scratch(fsdp__scratch_use use, size_t bytes)
{
    scratch *s = scratch_get();
    if (!s || bytes > (size_t)-1 - SCRATCH_ALIGN) return NULL;
    if (bytes <= s->bytes[use] && s->p[use]) return s->p[use];
    bytes = (bytes + SCRATCH_ALIGN) / SCRATCH_ALIGN * SCRATCH_ALIGN;
    /* The old content is not wanted: free first, so that both never exist. */
    free(s->p[use]);
    s->bytes[use] = 0;
    s->p[use] = aligned_alloc(SCRATCH_ALIGN, bytes);
    if (s->p[use]) s->bytes[use] = bytes;
    return s->p[use];
}
