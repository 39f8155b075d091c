/*
 * map.c - hash map that keeps the order of insertion.
 *
 * entries[] holds keys and values in order; table[] is open addressing with
 * linear probing over it and holds entry index + 1, 0 for empty. Nothing is
 * ever removed, so a probe ends at the first empty place. The table is at most
 * half full.
 */
#include "base/map.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

typedef struct entry {
    char *key; /* len bytes and a NUL */
    size_t len;
    uint64_t hash;
    fsdp__value value;
} entry;

struct fsdp__map {
    entry *entries;
    int64_t count, cap;
    int64_t *table;
    uint64_t slots; /* a power of two, or 0 */
};

/* FNV-1a, with a finish that spreads it into the low bits. */
static uint64_t hash_of(const void *key, size_t len)
{
    const unsigned char *p = key;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ p[i]) * 0x100000001b3u;
    h ^= h >> 32;
    h *= 0x9e3779b97f4a7c15u;
    return h ^ h >> 29;
}

fsdp__map *fsdp__map_create(void)
{
    return fsdp__calloc(1, sizeof(fsdp__map), "a map");
}

void fsdp__map_free(fsdp__map *m)
{
    if (!m) return;
    for (int64_t i = 0; i < m->count; i++)
        free(m->entries[i].key);
    free(m->entries);
    free(m->table);
    free(m);
}

static bool is_key(const entry *e, uint64_t hash, const void *key, size_t len)
{
    return e->hash == hash && e->len == len && (len == 0 || memcmp(e->key, key, len) == 0);
}

/* Where the key stands, or the empty place where it belongs. slots > 0. */
static uint64_t probe(const fsdp__map *m, uint64_t hash, const void *key, size_t len)
{
    uint64_t at = hash & (m->slots - 1);
    while (m->table[at] && !is_key(&m->entries[m->table[at] - 1], hash, key, len))
        at = (at + 1) & (m->slots - 1);
    return at;
}

static fsdp_status rehash(fsdp__map *m, uint64_t slots)
{
    int64_t *table = fsdp__calloc(slots, sizeof *table, "a map's table");
    if (!table) return fsdp_error();
    for (int64_t i = 0; i < m->count; i++) {
        uint64_t at = m->entries[i].hash & (slots - 1);
        while (table[at])
            at = (at + 1) & (slots - 1);
        table[at] = i + 1;
    }
    free(m->table);
    m->table = table;
    m->slots = slots;
    return FSDP_OK;
}

fsdp__value *fsdp__map_get(const fsdp__map *m, const void *key, size_t len)
{
    if (!m->slots) return NULL;
    int64_t i = m->table[probe(m, hash_of(key, len), key, len)];
    return i ? &m->entries[i - 1].value : NULL;
}

fsdp_status fsdp__map_set(fsdp__map *m, const void *key, size_t len, fsdp__value v)
{
    fsdp__value *old = fsdp__map_get(m, key, len);
    if (old) {
        *old = v;
        return FSDP_OK;
    }
    if (((uint64_t)m->count + 1) * 2 > m->slots) FSDP_TRY(rehash(m, m->slots ? m->slots * 2 : 16));
    FSDP_TRY(FSDP__GROW(m->entries, m->cap, m->count + 1, "a map's entries"));
    char *copy = fsdp__calloc(len + 1, 1, "a map's key");
    if (!copy) return fsdp_error();
    if (len) memcpy(copy, key, len);
    uint64_t hash = hash_of(key, len);
    m->table[probe(m, hash, key, len)] = m->count + 1;
    m->entries[m->count++] = (entry){copy, len, hash, v};
    return FSDP_OK;
}

int64_t fsdp__map_count(const fsdp__map *m)
{
    return m->count;
}

const char *fsdp__map_key(const fsdp__map *m, int64_t i, size_t *key_len)
{
    if (key_len) *key_len = m->entries[i].len;
    return m->entries[i].key;
}

fsdp__value *fsdp__map_at(const fsdp__map *m, int64_t i)
{
    return &m->entries[i].value;
}
