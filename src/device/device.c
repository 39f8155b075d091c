/*
 * device.c - the device in force, and the room's state of a context.
 */
#include <stdlib.h>

#include "base/context.h"
#include "base/error.h"
#include "base/memory.h"
#include "device/device_internal.h"

static void state_free(void *p)
{
    fsdp__device_state *s = p;
    for (int64_t i = s->n_kept - 1; i >= 0; i--)
        s->kept[i].free_fn(s->kept[i].p);
    free(s->kept);
    fsdp__file_memory_free(s->files);
    fsdp__cpu_memory_free(s->cpu);
    free(s->stack);
    free(s);
}

fsdp__device_state *fsdp__device_state_get(void)
{
    fsdp__device_state *s = fsdp__slot_get(FSDP__SLOT_DEVICE);
    if (s) return s;
    s = fsdp__calloc(1, sizeof *s, "the devices of a context");
    if (s) fsdp__slot_set(FSDP__SLOT_DEVICE, s, state_free);
    return s;
}

fsdp_status fsdp__allocator_keep(void *p, void (*free_fn)(void *))
{
    fsdp__device_state *s = fsdp__device_state_get();
    if (!s) return fsdp_error();
    FSDP_TRY(FSDP__GROW(s->kept, s->kept_cap, s->n_kept + 1, "the memory of a context"));
    s->kept[s->n_kept++] = (fsdp__kept){p, free_fn};
    return FSDP_OK;
}

const char *fsdp_device_name(fsdp_device d)
{
    switch (d) {
    case FSDP_CPU:
        return "cpu";
    case FSDP_META:
        return "meta";
    }
    return "unknown device";
}

fsdp_status fsdp_device_push(fsdp_device d)
{
    if (d != FSDP_CPU && d != FSDP_META)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "fsdp_device_push: %d is no device; expected FSDP_CPU or FSDP_META",
                          (int)d);
    fsdp__device_state *s = fsdp__device_state_get();
    if (!s) return fsdp_error();
    FSDP_TRY(FSDP__GROW(s->stack, s->cap, s->depth + 1, "the stack of devices"));
    s->stack[s->depth++] = d;
    return FSDP_OK;
}

/* Works while an error is kept, so that a caller's cleanup keeps pushes and pops paired. */
fsdp_status fsdp_device_pop(void)
{
    fsdp__device_state *s = fsdp__slot_get(FSDP__SLOT_DEVICE);
    if (!s || s->depth == 0)
        return fsdp__fail(FSDP_INVALID_STATE,
                          "fsdp_device_pop: no device was pushed; each pop needs a push before it");
    s->depth--;
    return FSDP_OK;
}

fsdp_device fsdp_device_current(void)
{
    const fsdp__device_state *s = fsdp__slot_get(FSDP__SLOT_DEVICE);
    return s && s->depth > 0 ? s->stack[s->depth - 1] : FSDP_CPU;
}
