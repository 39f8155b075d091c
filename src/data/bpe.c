/*
 * bpe.c - byte-pair encoding of one word (Sennrich et al., "Neural machine
 * translation of rare words with subword units", ACL 2016).
 *
 * The pair with the lowest rank is merged first, the leftmost of equals, by a
 * heap over a list of symbols, so a whole document without blanks (Llama 2
 * has no pre-tokenizer) costs n log n. Entries of the heap are not removed
 * when their pair goes: they are seen to be stale when they come up, by the
 * same test as in Hugging Face's tokenizers, since that test decides ids
 * where two merges give the same token.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"

/* Longer words are rarely met twice. */
enum { CACHED_WORD = 96, CACHED_WORDS = 1 << 17 };

fsdp_status fsdp__ids_add(fsdp__ids *ids, const int32_t *items, int64_t n)
{
    if (ids->count + n > ids->cap)
        FSDP_TRY(FSDP__GROW(ids->items, ids->cap, ids->count + n, "token ids"));
    if (n > 0) memcpy(ids->items + ids->count, items, (size_t)n * sizeof *items);
    ids->count += n;
    return FSDP_OK;
}

/* ---- reading ---------------------------------------------------------------------- */

static int32_t vocab_id(const fsdp__bpe *m, const char *s, size_t n)
{
    const fsdp__value *v = fsdp__map_get(m->vocab, s, n);
    return v ? (int32_t)v->i : -1;
}

/* One entry of model.vocab; key is owned. */
static fsdp_status add_token(fsdp__bpe *m, char *key, size_t n, int64_t id)
{
    int64_t have = fsdp__map_count(m->vocab);
    if (m->tokens[id].p)
        fsdp__fail(FSDP_INVALID_DATA, "model.vocab: \"%s\" and \"%s\" have the same id %lld",
                   m->tokens[id].p, key, (long long)id);
    else if (fsdp__map_set(m->vocab, key, n, (fsdp__value){.i = id}) == FSDP_OK &&
             fsdp__map_count(m->vocab) == have)
        fsdp__fail(FSDP_INVALID_DATA, "model.vocab: \"%s\" stands there twice", key);
    if (fsdp_error() != FSDP_OK) {
        free(key);
        return fsdp_error();
    }
    m->tokens[id] = (fsdp__token){key, n};
    return FSDP_OK;
}

static fsdp_status read_vocab(fsdp__bpe *m, json_t *vocab, const char *mark)
{
    const char *token;
    json_t *value;
    if (!json_is_object(vocab))
        return fsdp__fail(FSDP_INVALID_DATA, "model.vocab is missing or no object; expected "
                                             "tokens with their ids");
    m->vocab = fsdp__map_create();
    if (!m->vocab) return fsdp_error();
    json_object_foreach(vocab, token, value)
    {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= INT32_MAX)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "model.vocab: the id of \"%s\" is no integer from 0 to 2147483646",
                              token);
        if (id >= m->id_count) m->id_count = id + 1;
    }
    /* A table of ids, so ids may not be spread much wider than there are tokens. */
    int64_t count = (int64_t)json_object_size(vocab);
    if (m->id_count > 16 * count + 4096)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "model.vocab: the largest id is %lld for %lld tokens; expected ids "
                          "that follow one another",
                          (long long)m->id_count - 1, (long long)count);
    m->tokens = fsdp__calloc((size_t)m->id_count, sizeof *m->tokens, "tokens");
    if (!m->tokens) return fsdp_error();
    json_object_foreach(vocab, token, value)
    {
        char *key = fsdp__strdup(token);
        if (!key) return fsdp_error();
        FSDP_TRY(
            add_token(m, key, fsdp__unmark(key, strlen(key), mark), json_integer_value(value)));
    }
    return FSDP_OK;
}

/* The two halves of merge i, which is "a b" or ["a", "b"]; lengths in na and nb. */
static fsdp_status merge_halves(json_t *merge, size_t i, const char **a, size_t *na, const char **b,
                                size_t *nb)
{
    if (json_is_array(merge) && json_array_size(merge) == 2 &&
        json_is_string(json_array_get(merge, 0)) && json_is_string(json_array_get(merge, 1))) {
        *a = json_string_value(json_array_get(merge, 0));
        *na = json_string_length(json_array_get(merge, 0));
        *b = json_string_value(json_array_get(merge, 1));
        *nb = json_string_length(json_array_get(merge, 1));
        return FSDP_OK;
    }
    if (json_is_string(merge)) {
        const char *s = json_string_value(merge), *end = s + json_string_length(merge);
        const char *blank = memchr(s, ' ', (size_t)(end - s));
        if (blank && !memchr(blank + 1, ' ', (size_t)(end - blank - 1))) {
            *a = s;
            *na = (size_t)(blank - s);
            *b = blank + 1;
            *nb = (size_t)(end - *b);
            return FSDP_OK;
        }
    }
    return fsdp__fail(FSDP_INVALID_DATA,
                      "model.merges[%zu] is neither two tokens with one blank between nor a list "
                      "of two tokens",
                      i);
}

static fsdp_status merge_unknown(size_t i, const char *token, size_t n)
{
    return fsdp__fail(FSDP_INVALID_DATA,
                      "model.merges[%zu]: the token \"%.*s\" is not in model.vocab", i, (int)n,
                      token);
}

static fsdp_status read_merges(fsdp__bpe *m, json_t *merges)
{
    if (!json_is_array(merges))
        return fsdp__fail(FSDP_INVALID_DATA, "model.merges is missing or no list");
    size_t n = json_array_size(merges), prefix = m->prefix ? strlen(m->prefix) : 0;
    uint32_t rank = 0;
    fsdp__str whole = {0};
    fsdp_status s = FSDP_OK;
    FSDP_GO(fsdp__pairs_reserve(&m->merges, n));
    for (size_t i = 0; i < n; i++) {
        const char *a = "", *b = "";
        size_t na = 0, nb = 0;
        json_t *merge = json_array_get(merges, i);
        /* The head of a merges.txt, kept by old files. */
        if (json_is_string(merge) && fsdp__starts_with(json_string_value(merge), "#version"))
            continue;
        FSDP_GO(merge_halves(merge, i, &a, &na, &b, &nb));
        int32_t ia = vocab_id(m, a, na), ib = vocab_id(m, b, nb);
        if (ia < 0 || ib < 0) {
            s = ia < 0 ? merge_unknown(i, a, na) : merge_unknown(i, b, nb);
            goto done;
        }
        whole.len = 0;
        fsdp__str_add_n(&whole, a, na);
        size_t skip = prefix < nb ? prefix : nb;
        fsdp__str_add_n(&whole, b + skip, nb - skip);
        int32_t id = vocab_id(m, fsdp__str_get(&whole), whole.len);
        if (id < 0) {
            s = merge_unknown(i, fsdp__str_get(&whole), whole.len);
            goto done;
        }
        int64_t *v = fsdp__pairs_add(&m->merges, fsdp__pair_key((uint32_t)ia, (uint32_t)ib));
        if (!v) {
            s = fsdp_error();
            goto done;
        }
        *v = (int64_t)rank++ << 32 | id;
    }
    if (whole.failed) s = fsdp__fail_memory("merges", whole.len);
done:
    fsdp__str_free(&whole);
    return s;
}

/* A string or null; out owns the copy, NULL for null and "". */
static fsdp_status read_text(const json_t *model, const char *key, char **out)
{
    json_t *v = json_object_get(model, key);
    if (!v || json_is_null(v)) return FSDP_OK;
    if (!json_is_string(v))
        return fsdp__fail(FSDP_INVALID_DATA, "model.%s is neither a string nor null", key);
    if (json_string_length(v) == 0) return FSDP_OK;
    *out = fsdp__strdup(json_string_value(v));
    return *out ? FSDP_OK : fsdp_error();
}

fsdp_status fsdp__bpe_read(fsdp__bpe *m, const json_t *model, const char *mark)
{
    char *unk = NULL;
    m->unk = -1;
    json_t *dropout = json_object_get(model, "dropout");
    if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0.0)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "model.dropout is %g, which is not available here; set it to null",
                          json_number_value(dropout));
    m->fuse_unk = json_is_true(json_object_get(model, "fuse_unk"));
    m->byte_fallback = json_is_true(json_object_get(model, "byte_fallback"));
    m->ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    FSDP_TRY(read_text(model, "continuing_subword_prefix", &m->prefix));
    FSDP_TRY(read_text(model, "end_of_word_suffix", &m->suffix));
    FSDP_TRY(read_vocab(m, json_object_get(model, "vocab"), mark));
    FSDP_TRY(read_merges(m, json_object_get(model, "merges")));
    FSDP_TRY(read_text(model, "unk_token", &unk));
    if (unk) {
        m->unk = vocab_id(m, unk, strlen(unk));
        if (m->unk < 0)
            fsdp__fail(FSDP_INVALID_DATA, "model.unk_token \"%s\" is not in model.vocab", unk);
        free(unk);
        if (m->unk < 0) return fsdp_error();
    }
    for (int b = 0; b < 256; b++) {
        char code[8];
        snprintf(code, sizeof code, "<0x%02X>", (unsigned)b);
        m->bytes[b] = vocab_id(m, code, 6);
    }
    m->cache = fsdp__map_create();
    return m->cache ? FSDP_OK : fsdp_error();
}

void fsdp__bpe_free(fsdp__bpe *m)
{
    if (m->tokens)
        for (int64_t i = 0; i < m->id_count; i++)
            free(m->tokens[i].p);
    free(m->tokens);
    fsdp__map_free(m->vocab);
    fsdp__map_free(m->cache);
    fsdp__pairs_free(&m->merges);
    free(m->cached.items);
    free(m->symbols);
    free(m->heap);
    free(m->prefix);
    free(m->suffix);
}

/* ---- encoding --------------------------------------------------------------------- */

static bool before(fsdp__bpe_merge a, fsdp__bpe_merge b)
{
    return a.rank != b.rank ? a.rank < b.rank : a.pos < b.pos;
}

static fsdp_status heap_push(fsdp__bpe *m, fsdp__bpe_merge x)
{
    FSDP_TRY(FSDP__GROW(m->heap, m->heap_cap, m->heap_count + 1, "merges of a word"));
    int64_t i = m->heap_count++;
    for (; i > 0 && before(x, m->heap[(i - 1) / 2]); i = (i - 1) / 2)
        m->heap[i] = m->heap[(i - 1) / 2];
    m->heap[i] = x;
    return FSDP_OK;
}

static fsdp__bpe_merge heap_pop(fsdp__bpe *m)
{
    fsdp__bpe_merge top = m->heap[0], x = m->heap[--m->heap_count];
    int64_t i = 0, n = m->heap_count;
    for (int64_t child = 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && before(m->heap[child + 1], m->heap[child])) child++;
        if (!before(m->heap[child], x)) break;
        m->heap[i] = m->heap[child];
        i = child;
    }
    if (n > 0) m->heap[i] = x;
    return top;
}

/* Queues the pair (pos, its right neighbour) if it has a merge. */
static fsdp_status queue_pair(fsdp__bpe *m, int32_t pos)
{
    if (pos < 0 || m->symbols[pos].next < 0) return FSDP_OK;
    const int64_t *v =
        fsdp__pairs_get(&m->merges, fsdp__pair_key((uint32_t)m->symbols[pos].id,
                                                   (uint32_t)m->symbols[m->symbols[pos].next].id));
    if (!v) return FSDP_OK;
    return heap_push(m, (fsdp__bpe_merge){(uint32_t)(*v >> 32), pos, (int32_t)(*v & INT32_MAX)});
}

static fsdp_status merge_all(fsdp__bpe *m, int64_t count)
{
    fsdp__bpe_symbol *s = m->symbols;
    m->heap_count = 0;
    for (int64_t i = 0; i + 1 < count; i++)
        FSDP_TRY(queue_pair(m, (int32_t)i));
    while (m->heap_count > 0) {
        fsdp__bpe_merge top = heap_pop(m);
        fsdp__bpe_symbol *left = &s[top.pos];
        if (left->len == 0 || left->next < 0) continue;
        fsdp__bpe_symbol *right = &s[left->next];
        const int64_t *v =
            fsdp__pairs_get(&m->merges, fsdp__pair_key((uint32_t)left->id, (uint32_t)right->id));
        if (!v || (int32_t)(*v & INT32_MAX) != top.id) continue;
        left->id = top.id;
        left->len += right->len;
        right->len = 0;
        left->next = right->next;
        if (right->next >= 0) s[right->next].prev = top.pos;
        FSDP_TRY(queue_pair(m, left->prev));
        FSDP_TRY(queue_pair(m, top.pos));
    }
    return FSDP_OK;
}

static void add_symbol(fsdp__bpe *m, int64_t *count, int32_t id, uint32_t len)
{
    int32_t i = (int32_t)(*count)++;
    m->symbols[i] = (fsdp__bpe_symbol){id, i - 1, -1, len};
    if (i > 0) m->symbols[i - 1].next = i;
}

/* Byte fallback of one character (with what is put around it): false if a byte has no token. */
static bool add_bytes(fsdp__bpe *m, int64_t *count, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (m->bytes[(unsigned char)s[i]] < 0) return false;
    for (size_t i = 0; i < n; i++)
        add_symbol(m, count, m->bytes[(unsigned char)s[i]], 1);
    return true;
}

/* Cuts the word into the symbols of its characters. */
static fsdp_status split_word(fsdp__bpe *m, const char *word, size_t n, int64_t *count)
{
    size_t around = (m->prefix ? strlen(m->prefix) : 0) + (m->suffix ? strlen(m->suffix) : 0);
    size_t most = n * (1 + around) + 1, len;
    fsdp__str shown = {0};
    uint32_t unk_len = 0; /* of an unknown token that waits to be fused with the next */
    if (most >= INT32_MAX)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "tokenizer: a word of %zu bytes is too long; cut the text into smaller "
                          "documents",
                          n);
    FSDP_TRY(FSDP__GROW(m->symbols, m->symbol_cap, (int64_t)most, "symbols of a word"));
    *count = 0;
    for (size_t i = 0; i < n; i += len) {
        len = fsdp__utf8_len(word[i]);
        const char *s = word + i;
        size_t size = len;
        if ((i > 0 && m->prefix) || (i + len == n && m->suffix)) {
            shown.len = 0;
            if (i > 0 && m->prefix) fsdp__str_add(&shown, m->prefix);
            fsdp__str_add_n(&shown, s, len);
            if (i + len == n && m->suffix) fsdp__str_add(&shown, m->suffix);
            s = fsdp__str_get(&shown);
            size = shown.len;
        }
        int32_t id = vocab_id(m, s, size);
        if (id >= 0) {
            if (unk_len) add_symbol(m, count, m->unk, unk_len);
            unk_len = 0;
            add_symbol(m, count, id, (uint32_t)len);
        } else if (m->byte_fallback && add_bytes(m, count, s, size)) {
            continue; /* a waiting unknown token comes after the bytes, as upstream */
        } else if (m->unk >= 0) {
            if (unk_len && !m->fuse_unk) {
                add_symbol(m, count, m->unk, unk_len);
                unk_len = 0;
            }
            unk_len += (uint32_t)size;
        }
    }
    if (unk_len) add_symbol(m, count, m->unk, unk_len);
    bool failed = shown.failed;
    fsdp__str_free(&shown);
    return failed ? fsdp__fail_memory("symbols of a word", n) : FSDP_OK;
}

fsdp_status fsdp__bpe_encode(fsdp__bpe *m, const char *word, size_t n, fsdp__ids *out)
{
    if (n == 0) return FSDP_OK;
    if (m->ignore_merges) {
        int32_t id = vocab_id(m, word, n);
        if (id >= 0) return fsdp__ids_add(out, &id, 1);
    }
    if (n <= CACHED_WORD) {
        const fsdp__value *v = fsdp__map_get(m->cache, word, n);
        if (v) return fsdp__ids_add(out, m->cached.items + (v->i >> 8), v->i & 255);
    }
    int64_t count = 0, start = out->count;
    FSDP_TRY(split_word(m, word, n, &count));
    FSDP_TRY(merge_all(m, count));
    for (int64_t i = count > 0 ? 0 : -1; i >= 0; i = m->symbols[i].next)
        FSDP_TRY(fsdp__ids_add(out, &m->symbols[i].id, 1));
    int64_t made = out->count - start;
    if (n <= CACHED_WORD && made <= 255 && fsdp__map_count(m->cache) < CACHED_WORDS) {
        fsdp__value v = {.i = m->cached.count << 8 | made};
        FSDP_TRY(fsdp__ids_add(&m->cached, out->items + start, made));
        FSDP_TRY(fsdp__map_set(m->cache, word, n, v));
    }
    return FSDP_OK;
}
