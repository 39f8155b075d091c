/*
 * map.h - hash map from byte strings to pointers or integers; keeps the order
 * of insertion for iteration. Keys are copied.
 */
#ifndef FSDP_BASE_MAP_H
#define FSDP_BASE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fsdp/status.h"

typedef union fsdp__value {
    void *p;
    int64_t i;
} fsdp__value;

typedef struct fsdp__map fsdp__map;

fsdp__map *fsdp__map_create(void);
void fsdp__map_free(fsdp__map *m); /* the keys, not what values point to */
/* Sets or replaces. */
fsdp_status fsdp__map_set(fsdp__map *m, const void *key, size_t len, fsdp__value v);
/* NULL if absent; valid until the next set. */
fsdp__value *fsdp__map_get(const fsdp__map *m, const void *key, size_t len);
int64_t fsdp__map_count(const fsdp__map *m);
/* i-th in order of insertion; key_len may be NULL. */
const char *fsdp__map_key(const fsdp__map *m, int64_t i, size_t *key_len);
fsdp__value *fsdp__map_at(const fsdp__map *m, int64_t i);

#define fsdp__map_gets(m, s) fsdp__map_get((m), (s), strlen(s))
#define fsdp__map_sets(m, s, v) fsdp__map_set((m), (s), strlen(s), (v))

#endif
