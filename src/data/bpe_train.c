/*
 * bpe_train.c - training byte-pair encoding by counting pairs incrementally.
 *
 * Each distinct word is a list of symbols with its number of occurrences.
 * Each pair of neighbours has its count and the words in which it once stood.
 * A merge rewrites those words only: it takes their old pairs off the counts
 * and puts the new ones on. The heap of pairs is lazy: counts only fall while
 * an entry waits, so an entry whose count is out of date goes back with the
 * present one, and the top that is up to date is the most frequent pair.
 */
#include "data/bpe_train.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/map.h"
#include "base/memory.h"
#include "base/str.h"
#include "data/pairs.h"
#include "data/regex.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"
#include "format/file.h"
#include "format/json.h"

typedef struct pair {
    uint64_t key;
    int64_t count;
    int32_t *words; /* where it stands or stood, maybe twice */
    int64_t word_count, word_cap;
    int64_t touched; /* the number of the merge that last gave it occurrences; -1 at first */
} pair;

typedef struct entry {
    int64_t count;
    int64_t pair;
} entry;

typedef struct token {
    char *bytes;
    size_t n;
} token;

struct fsdp__bpe_trainer {
    fsdp__regex *regex;
    fsdp__map *words; /* word -> occurrences */
    int32_t *symbols; /* of all words; word w has lengths[w] from starts[w] on */
    int64_t *starts, *counts;
    int32_t *lengths;
    fsdp__pairs index; /* key -> place in pairs, plus 1 */
    pair *pairs;
    int64_t pair_count, pair_cap;
    int64_t *touched; /* places of pairs */
    int64_t touched_count, touched_cap;
    entry *heap;
    int64_t heap_count, heap_cap;
    token *tokens;
    int64_t token_count;
    fsdp__map *ids;   /* bytes of a token -> id; without the special ones */
    uint64_t *merges; /* pairs in order of merging */
    int64_t merge_count, merge_cap;
};

fsdp__bpe_trainer *fsdp__bpe_trainer_create(void)
{
    fsdp__bpe_trainer *t = fsdp__calloc(1, sizeof *t, "tokenizer trainer");
    if (!t) return NULL;
    t->regex = fsdp__regex_create(fsdp__gpt2_pattern, strlen(fsdp__gpt2_pattern), "ByteLevel");
    t->words = fsdp__map_create();
    t->ids = fsdp__map_create();
    if (t->regex && t->words && t->ids) return t;
    fsdp__bpe_trainer_free(t);
    return NULL;
}

void fsdp__bpe_trainer_free(fsdp__bpe_trainer *t)
{
    if (!t) return;
    for (int64_t i = 0; i < t->pair_count; i++)
        free(t->pairs[i].words);
    for (int64_t i = 0; i < t->token_count; i++)
        free(t->tokens[i].bytes);
    free(t->symbols);
    free(t->starts);
    free(t->counts);
    free(t->lengths);
    free(t->touched);
    free(t->pairs);
    free(t->heap);
    free(t->tokens);
    free(t->merges);
    fsdp__pairs_free(&t->index);
    fsdp__map_free(t->words);
    fsdp__map_free(t->ids);
    fsdp__regex_free(t->regex);
    free(t);
}

/* ---- words -------------------------------------------------------------------------- */

static fsdp_status count_word(fsdp__bpe_trainer *t, const char *s, size_t n)
{
    if (n == 0) return FSDP_OK;
    fsdp__value *v = fsdp__map_get(t->words, s, n);
    if (!v) return fsdp__map_set(t->words, s, n, (fsdp__value){.i = 1});
    v->i++;
    return FSDP_OK;
}

fsdp_status fsdp__bpe_trainer_add(fsdp__bpe_trainer *t, const char *text, size_t n)
{
    fsdp__str repaired = {0};
    fsdp_status s = FSDP_OK;
    size_t done = 0, start = 0, end = 0;
    int found = 1;
    if (n > 0 && fsdp__utf8_valid(text, n) != n) {
        fsdp__utf8_add_lossy(&repaired, text, n);
        if (repaired.failed) {
            s = fsdp__fail_memory("text", n);
            goto done;
        }
        text = repaired.p;
        n = repaired.len;
    }
    /* The expression matches at least one character wherever it is tried. */
    while (done < n && (found = fsdp__regex_find(t->regex, text, n, done, &start, &end)) == 1) {
        FSDP_GO(count_word(t, text + done, start - done));
        FSDP_GO(count_word(t, text + start, end - start));
        done = end;
    }
    s = found < 0 ? fsdp_error() : count_word(t, text + done, n - done);
done:
    fsdp__str_free(&repaired);
    return s;
}

/* The id of each byte: bytes take their ids in the order of the characters they stand as, as
 * Hugging Face's trainer orders its alphabet. */
static void byte_ids(int64_t first, int32_t ids[256])
{
    int32_t next = (int32_t)first;
    for (uint32_t c = 0; c < 512; c++)
        if (fsdp__char_byte(c) >= 0) ids[fsdp__char_byte(c)] = next++;
}

static fsdp_status load_words(fsdp__bpe_trainer *t, const int32_t ids[256])
{
    int64_t count = fsdp__map_count(t->words), total = 0;
    size_t n;
    for (int64_t w = 0; w < count; w++) {
        fsdp__map_key(t->words, w, &n);
        total += (int64_t)n;
    }
    t->symbols = fsdp__calloc((size_t)total, sizeof *t->symbols, "words");
    t->starts = fsdp__calloc((size_t)count, sizeof *t->starts, "words");
    t->counts = fsdp__calloc((size_t)count, sizeof *t->counts, "words");
    t->lengths = fsdp__calloc((size_t)count, sizeof *t->lengths, "words");
    if (!t->symbols || !t->starts || !t->counts || !t->lengths) return fsdp_error();
    if (count >= INT32_MAX || total >= INT32_MAX)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "training a tokenizer: %lld distinct words of %lld bytes are too many; "
                          "give a sample of the text",
                          (long long)count, (long long)total);
    total = 0;
    for (int64_t w = 0; w < count; w++) {
        const char *s = fsdp__map_key(t->words, w, &n);
        t->starts[w] = total;
        t->counts[w] = fsdp__map_at(t->words, w)->i;
        t->lengths[w] = (int32_t)n;
        for (size_t i = 0; i < n; i++)
            t->symbols[total++] = ids[(unsigned char)s[i]];
    }
    return FSDP_OK;
}

/* ---- pairs and their heap ------------------------------------------------------------- */

/* The place of a pair, new ones included; -1 with the error kept. */
static int64_t pair_at(fsdp__bpe_trainer *t, uint64_t key)
{
    int64_t *i = fsdp__pairs_add(&t->index, key);
    if (!i) return -1;
    if (*i == 0) {
        if (FSDP__GROW(t->pairs, t->pair_cap, t->pair_count + 1, "pairs") != FSDP_OK) return -1;
        t->pairs[t->pair_count++] = (pair){.key = key, .touched = -1};
        *i = t->pair_count;
    }
    return *i - 1;
}

static bool above(const fsdp__bpe_trainer *t, entry a, entry b)
{
    if (a.count != b.count) return a.count > b.count;
    return t->pairs[a.pair].key < t->pairs[b.pair].key;
}

static fsdp_status push(fsdp__bpe_trainer *t, int64_t p)
{
    FSDP_TRY(FSDP__GROW(t->heap, t->heap_cap, t->heap_count + 1, "heap of pairs"));
    entry x = {t->pairs[p].count, p};
    int64_t i = t->heap_count++;
    for (; i > 0 && above(t, x, t->heap[(i - 1) / 2]); i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = x;
    return FSDP_OK;
}

static entry pop(fsdp__bpe_trainer *t)
{
    entry top = t->heap[0], x = t->heap[--t->heap_count];
    int64_t i = 0, n = t->heap_count;
    for (int64_t child = 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && above(t, t->heap[child + 1], t->heap[child])) child++;
        if (!above(t, t->heap[child], x)) break;
        t->heap[i] = t->heap[child];
        i = child;
    }
    if (n > 0) t->heap[i] = x;
    return top;
}

/* Remembers that the pair at place `at` got new occurrences in this merge, to be queued when its
 * count is complete. */
static fsdp_status touch(fsdp__bpe_trainer *t, int64_t at)
{
    if (t->pairs[at].touched == t->merge_count) return FSDP_OK;
    t->pairs[at].touched = t->merge_count;
    FSDP_TRY(FSDP__GROW(t->touched, t->touched_cap, t->touched_count + 1, "pairs of a merge"));
    t->touched[t->touched_count++] = at;
    return FSDP_OK;
}

static fsdp_status queue_touched(fsdp__bpe_trainer *t)
{
    for (int64_t i = 0; i < t->touched_count; i++)
        FSDP_TRY(push(t, t->touched[i]));
    t->touched_count = 0;
    return FSDP_OK;
}

/* Puts word w on the counts (sign 1) or takes it off (-1). Pairs with the symbol `fresh` remember
 * the word (-1: all pairs do); the others remember it from before. */
static fsdp_status count_pairs(fsdp__bpe_trainer *t, int64_t w, int sign, int32_t fresh)
{
    const int32_t *s = t->symbols + t->starts[w];
    for (int32_t i = 0; i + 1 < t->lengths[w]; i++) {
        int64_t at = pair_at(t, fsdp__pair_key((uint32_t)s[i], (uint32_t)s[i + 1]));
        if (at < 0) return fsdp_error();
        pair *p = &t->pairs[at];
        p->count += sign * t->counts[w];
        if (sign < 0 || (fresh >= 0 && s[i] != fresh && s[i + 1] != fresh)) continue;
        FSDP_TRY(touch(t, at));
        if (p->word_count > 0 && p->words[p->word_count - 1] == w) continue;
        FSDP_TRY(FSDP__GROW(p->words, p->word_cap, p->word_count + 1, "words of a pair"));
        p->words[p->word_count++] = (int32_t)w;
    }
    return FSDP_OK;
}

/* ---- merging ---------------------------------------------------------------------------- */

static bool holds(const fsdp__bpe_trainer *t, int64_t w, int32_t left, int32_t right)
{
    const int32_t *s = t->symbols + t->starts[w];
    for (int32_t i = 0; i + 1 < t->lengths[w]; i++)
        if (s[i] == left && s[i + 1] == right) return true;
    return false;
}

/* Replaces left right by id in word w, from the left. */
static void rewrite(fsdp__bpe_trainer *t, int64_t w, int32_t left, int32_t right, int32_t id)
{
    int32_t *s = t->symbols + t->starts[w], made = 0, n = t->lengths[w];
    for (int32_t i = 0; i < n; made++) {
        bool hit = i + 1 < n && s[i] == left && s[i + 1] == right;
        s[made] = hit ? id : s[i];
        i += hit ? 2 : 1;
    }
    t->lengths[w] = made;
}

/* The id of left right: a new token unless two other tokens made the same bytes before. */
static int32_t merged_token(fsdp__bpe_trainer *t, int32_t left, int32_t right)
{
    const token *a = &t->tokens[left], *b = &t->tokens[right];
    size_t n = a->n + b->n;
    char *bytes = fsdp__calloc(n + 1, 1, "a token");
    if (!bytes) return -1;
    memcpy(bytes, a->bytes, a->n);
    memcpy(bytes + a->n, b->bytes, b->n);
    const fsdp__value *old = fsdp__map_get(t->ids, bytes, n);
    if (old) {
        free(bytes);
        return (int32_t)old->i;
    }
    int32_t id = (int32_t)t->token_count;
    t->tokens[t->token_count++] = (token){bytes, n};
    return fsdp__map_set(t->ids, bytes, n, (fsdp__value){.i = id}) == FSDP_OK ? id : -1;
}

/* Merges the pair at place `at` everywhere. */
static fsdp_status merge(fsdp__bpe_trainer *t, int64_t at)
{
    uint64_t key = t->pairs[at].key;
    int32_t left = (int32_t)(key >> 32), right = (int32_t)(key & UINT32_MAX);
    int32_t id = merged_token(t, left, right), *words = t->pairs[at].words;
    int64_t n = t->pairs[at].word_count;
    fsdp_status s = id < 0 ? fsdp_error() : FSDP_OK;
    t->pairs[at].words = NULL;
    t->pairs[at].word_count = t->pairs[at].word_cap = 0;
    if (s != FSDP_OK) goto done;
    FSDP_GO(FSDP__GROW(t->merges, t->merge_cap, t->merge_count + 1, "merges"));
    t->merges[t->merge_count++] = key;
    for (int64_t i = 0; i < n; i++) {
        if (!holds(t, words[i], left, right)) continue;
        FSDP_GO(count_pairs(t, words[i], -1, -1));
        rewrite(t, words[i], left, right, id);
        FSDP_GO(count_pairs(t, words[i], 1, id));
    }
    s = queue_touched(t);
done:
    free(words);
    return s;
}

static fsdp_status run_merges(fsdp__bpe_trainer *t, int64_t vocab_size)
{
    t->merge_count = 0;
    for (int64_t w = 0; w < fsdp__map_count(t->words); w++)
        FSDP_TRY(count_pairs(t, w, 1, -1));
    FSDP_TRY(queue_touched(t));
    while (t->token_count < vocab_size && t->heap_count > 0) {
        entry top = pop(t);
        int64_t now = t->pairs[top.pair].count;
        if (now <= 0) continue;
        if (now == top.count)
            FSDP_TRY(merge(t, top.pair));
        else
            FSDP_TRY(push(t, top.pair));
    }
    if (t->token_count == vocab_size) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "training a tokenizer: the text gives %lld tokens at most, %lld were asked "
                      "for; give more text or ask for fewer",
                      (long long)t->token_count, (long long)vocab_size);
}

/* ---- writing ------------------------------------------------------------------------------ */

/* The token as tokenizer.json writes it: a character a byte, quoted. */
static void add_quoted(fsdp__str *out, const token *k, bool special)
{
    fsdp__str s = {0};
    if (special)
        fsdp__str_add_n(&s, k->bytes, k->n);
    else
        for (size_t i = 0; i < k->n; i++)
            fsdp__utf8_add(&s, fsdp__byte_char((unsigned char)k->bytes[i]));
    fsdp__json_quote(out, fsdp__str_get(&s), s.len);
    out->failed = out->failed || s.failed;
    fsdp__str_free(&s);
}

static void format_tokenizer(const fsdp__bpe_trainer *t, int64_t special, fsdp__str *out)
{
    static const char byte_level[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                                     "\"trim_offsets\": true, \"use_regex\": true}";
    fsdp__str_add(out, "{\n  \"version\": \"1.0\",\n  \"truncation\": null,\n  \"padding\": null,\n"
                       "  \"added_tokens\": [");
    for (int64_t i = 0; i < special; i++) {
        fsdp__str_addf(out, "%s\n    {\"id\": %lld, \"content\": ", i ? "," : "", (long long)i);
        add_quoted(out, &t->tokens[i], true);
        fsdp__str_add(out, ", \"single_word\": false, \"lstrip\": false, \"rstrip\": false, "
                           "\"normalized\": false, \"special\": true}");
    }
    fsdp__str_addf(out,
                   "%s],\n  \"normalizer\": null,\n  \"pre_tokenizer\": %s,\n"
                   "  \"post_processor\": %s,\n  \"decoder\": %s,\n",
                   special ? "\n  " : "", byte_level, byte_level, byte_level);
    fsdp__str_add(out, "  \"model\": {\n    \"type\": \"BPE\",\n    \"dropout\": null,\n"
                       "    \"unk_token\": null,\n    \"continuing_subword_prefix\": null,\n"
                       "    \"end_of_word_suffix\": null,\n    \"fuse_unk\": false,\n"
                       "    \"byte_fallback\": false,\n    \"ignore_merges\": false,\n"
                       "    \"vocab\": {");
    for (int64_t i = 0; i < t->token_count; i++) {
        fsdp__str_add(out, i ? ",\n      " : "\n      ");
        add_quoted(out, &t->tokens[i], i < special);
        fsdp__str_addf(out, ": %lld", (long long)i);
    }
    fsdp__str_add(out, "\n    },\n    \"merges\": [");
    for (int64_t i = 0; i < t->merge_count; i++) {
        fsdp__str_add(out, i ? ",\n      [" : "\n      [");
        add_quoted(out, &t->tokens[t->merges[i] >> 32], false);
        fsdp__str_add(out, ", ");
        add_quoted(out, &t->tokens[t->merges[i] & UINT32_MAX], false);
        fsdp__str_add(out, "]");
    }
    fsdp__str_add(out, t->merge_count ? "\n    ]\n  }\n}\n" : "]\n  }\n}\n");
}

static void format_config(const char *end, fsdp__str *out)
{
    fsdp__str_add(out, "{\n  \"tokenizer_class\": \"PreTrainedTokenizerFast\",\n"
                       "  \"clean_up_tokenization_spaces\": false");
    if (end) {
        fsdp__str_add(out, ",\n  \"bos_token\": ");
        fsdp__json_quote(out, end, strlen(end));
        fsdp__str_add(out, ",\n  \"eos_token\": ");
        fsdp__json_quote(out, end, strlen(end));
    }
    fsdp__str_add(out, "\n}\n");
}

static fsdp_status write_text(const char *dir, const char *name, const fsdp__str *text)
{
    char *path = fsdp__path_join(dir, name);
    if (!path) return fsdp_error();
    fsdp_status s = text->failed ? fsdp__fail_memory(name, text->len)
                                 : fsdp__file_write(path, text->p, text->len);
    free(path);
    return s;
}

/* Special tokens and bytes, in the order of their ids. */
static fsdp_status first_tokens(fsdp__bpe_trainer *t, int64_t vocab_size,
                                const char *const *special, int64_t count, int32_t ids[256])
{
    t->tokens = fsdp__calloc((size_t)vocab_size, sizeof *t->tokens, "tokens");
    if (!t->tokens) return fsdp_error();
    for (int64_t i = 0; i < count; i++) {
        char *copy = fsdp__strdup(special[i]);
        if (!copy) return fsdp_error();
        t->tokens[t->token_count++] = (token){copy, strlen(copy)};
    }
    byte_ids(count, ids);
    for (int b = 0; b < 256; b++) {
        token *k = &t->tokens[ids[b]];
        k->bytes = fsdp__calloc(2, 1, "a token");
        if (!k->bytes) return fsdp_error();
        k->bytes[0] = (char)b;
        k->n = 1;
        FSDP_TRY(fsdp__map_set(t->ids, k->bytes, 1, (fsdp__value){.i = ids[b]}));
    }
    t->token_count += 256;
    return FSDP_OK;
}

fsdp_status fsdp__bpe_trainer_write(fsdp__bpe_trainer *t, int64_t vocab_size,
                                    const char *const *special, int64_t count, const char *dir)
{
    int32_t ids[256];
    fsdp__str text = {0}, config = {0};
    fsdp_status s = FSDP_OK;
    if (vocab_size < 256 + count || vocab_size > 1 << 24)
        return fsdp__fail(
            FSDP_INVALID_ARGUMENT,
            "training a tokenizer: a vocabulary of %lld; expected %lld (256 bytes and "
            "%lld special tokens) to 16777216",
            (long long)vocab_size, (long long)(256 + count), (long long)count);
    if (t->tokens)
        return fsdp__fail(FSDP_INVALID_STATE, "training a tokenizer: this trainer has written one");
    FSDP_GO(first_tokens(t, vocab_size, special, count, ids));
    FSDP_GO(load_words(t, ids));
    FSDP_GO(run_merges(t, vocab_size));
    format_tokenizer(t, count, &text);
    format_config(count ? special[count - 1] : NULL, &config);
    FSDP_GO(fsdp__dir_make(dir));
    FSDP_GO(write_text(dir, "tokenizer.json", &text));
    s = write_text(dir, "tokenizer_config.json", &config);
done:
    fsdp__str_free(&text);
    fsdp__str_free(&config);
    return s;
}
