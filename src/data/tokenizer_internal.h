/*
 * tokenizer_internal.h - the parts of a tokenizer, for this folder alone.
 *
 * Encoding goes through five stages, each over a list of pieces of one text:
 * added tokens are cut out; each rest is normalized; added tokens that are
 * marked `normalized` are cut out; the pre-tokenizers cut and rewrite; the
 * model turns each piece into ids. The template then adds its tokens.
 *
 * Texts inside are valid UTF-8 always: it is checked (and repaired) once.
 */
#ifndef FSDP_DATA_TOKENIZER_INTERNAL_H
#define FSDP_DATA_TOKENIZER_INTERNAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/map.h"
#include "base/str.h"
#include "data/pairs.h"
#include "data/regex.h"
#include "data/tokenizer.h"

/* ---- steps of normalizer, pre-tokenizer and decoder ------------------------ */

/* X(enumerator, "type" in the file). Which list a step may stand in is decided by the reader. */
#define FSDP__TOK_LIST(X)                  \
    X(NFC, "NFC")                          \
    X(NFD, "NFD")                          \
    X(NFKC, "NFKC")                        \
    X(NFKD, "NFKD")                        \
    X(LOWERCASE, "Lowercase")              \
    X(PREPEND, "Prepend")                  \
    X(REPLACE, "Replace")                  \
    X(STRIP, "Strip")                      \
    X(BYTE_LEVEL, "ByteLevel")             \
    X(SPLIT, "Split")                      \
    X(DIGITS, "Digits")                    \
    X(PUNCTUATION, "Punctuation")          \
    X(WHITESPACE_SPLIT, "WhitespaceSplit") \
    X(METASPACE, "Metaspace")              \
    X(BYTE_FALLBACK, "ByteFallback")       \
    X(FUSE, "Fuse")

typedef enum fsdp__tok_kind {
#define FSDP__X(e, name) FSDP__TOK_##e,
    FSDP__TOK_LIST(FSDP__X)
#undef FSDP__X
} fsdp__tok_kind;

/* What becomes of the matches when a text is cut at them. */
typedef enum fsdp__tok_cut {
    FSDP__CUT_REMOVED,
    FSDP__CUT_ISOLATED,
    FSDP__CUT_MERGED_WITH_PREVIOUS,
    FSDP__CUT_MERGED_WITH_NEXT,
    FSDP__CUT_CONTIGUOUS
} fsdp__tok_cut;

typedef enum fsdp__tok_prepend {
    FSDP__PREPEND_NEVER,
    FSDP__PREPEND_FIRST,
    FSDP__PREPEND_ALWAYS
} fsdp__tok_prepend;

typedef struct fsdp__tok_step {
    fsdp__tok_kind kind;
    char *literal;      /* what Split and Replace look for, or NULL: */
    fsdp__regex *regex; /* then this; also ByteLevel's own */
    char *text;         /* Prepend's, Replace's content, Strip's character, Metaspace's mark */
    size_t literal_len, text_len;
    fsdp__tok_cut cut;
    bool invert;               /* Split: the matches are what is between */
    bool individual;           /* Digits: each alone */
    bool split;                /* Metaspace */
    bool prefix_space;         /* ByteLevel */
    fsdp__tok_prepend prepend; /* Metaspace */
    bool left, right;          /* Strip as a normalizer */
    int64_t start, stop;       /* Strip as a decoder: characters at most */
} fsdp__tok_step;

typedef struct fsdp__tok_steps {
    fsdp__tok_step *items;
    int64_t count, cap;
} fsdp__tok_steps;

/* ---- the model ---------------------------------------------------------------- */

typedef struct fsdp__bpe_symbol {
    int32_t id, prev, next; /* neighbours by index, -1 at the ends */
    uint32_t len;           /* bytes; 0 once merged into the one before */
} fsdp__bpe_symbol;

typedef struct fsdp__bpe_merge {
    uint32_t rank;
    int32_t pos, id;
} fsdp__bpe_merge;

typedef struct fsdp__token {
    char *p; /* n bytes, which may hold NULs, and a NUL */
    size_t n;
} fsdp__token;

typedef struct fsdp__bpe {
    fsdp__map *vocab;    /* token -> id */
    fsdp__token *tokens; /* id -> token; p is NULL where an id has none */
    int64_t id_count;    /* largest id + 1 */
    fsdp__pairs merges;  /* pair of ids -> rank << 32 | new id */
    int32_t unk;         /* -1: none */
    bool fuse_unk, byte_fallback, ignore_merges;
    char *prefix, *suffix;     /* continuing_subword_prefix, end_of_word_suffix, or NULL */
    int32_t bytes[256];        /* ids of <0x00>..<0xFF>, -1 */
    fsdp__map *cache;          /* word -> place in cached << 8 | number of ids */
    fsdp__ids cached;          /* the ids of all cached words */
    fsdp__bpe_symbol *symbols; /* scratch of the word at hand */
    int64_t symbol_cap;
    fsdp__bpe_merge *heap;
    int64_t heap_count, heap_cap;
} fsdp__bpe;

/* mark: see fsdp__json_load_nul. */
fsdp_status fsdp__bpe_read(fsdp__bpe *m, const json_t *model, const char *mark);
void fsdp__bpe_free(fsdp__bpe *m);
/* Appends the ids of one word (n bytes of UTF-8). */
fsdp_status fsdp__bpe_encode(fsdp__bpe *m, const char *word, size_t n, fsdp__ids *out);

/* ---- the whole ------------------------------------------------------------------ */

typedef struct fsdp__added {
    char *text;  /* as in the file */
    char *match; /* what is looked for: text, normalized if so marked */
    size_t text_len, match_len;
    int32_t id;
    bool special, normalized, lstrip, rstrip, single_word;
} fsdp__added;

struct fsdp_tokenizer {
    char *path;
    fsdp__bpe bpe;
    fsdp__added *added;
    int64_t added_count;
    int32_t first[2][256]; /* [normalized]: first added token that begins with the byte, or -1 */
    int32_t *next[2];      /* chains, longest match first */
    fsdp__map *added_ids;  /* text -> index in added */
    fsdp__pairs added_by_id;
    fsdp__regex *word; /* a character of a word, for single_word; NULL if none is */
    fsdp__tok_steps normalizer, pre, decoder;
    fsdp__ids template_before, template_after;
    int32_t bos, eos;
};

/* A piece of the text of a fsdp__pieces: still text (id < 0), or an added token. */
typedef struct fsdp__piece {
    size_t start, len;
    int32_t id;
    bool first; /* begins where the whole text does */
} fsdp__piece;

typedef struct fsdp__pieces {
    fsdp__str text;
    fsdp__piece *items;
    int64_t count, cap;
} fsdp__pieces;

fsdp_status fsdp__pieces_add(fsdp__pieces *p, size_t start, size_t len, int32_t id, bool first);
void fsdp__pieces_free(fsdp__pieces *p);

/* The expression by which ByteLevel cuts words. */
extern const char fsdp__gpt2_pattern[];

/* json_nul.c: a JSON file in whose object keys NUL stands as `mark` ("" if none does). NULL with
 * the error kept. */
json_t *fsdp__json_load_nul(const char *path, char mark[4]);
/* Puts NULs back in s (n), in place; returns the new length. */
size_t fsdp__unmark(char *s, size_t n, const char *mark);

/* tokenizer_json.c: fills t from the root of a tokenizer.json. */
fsdp_status fsdp__tokenizer_read(fsdp_tokenizer *t, const json_t *root, const char *mark);
void fsdp__tok_steps_free(fsdp__tok_steps *steps);
const char *fsdp__tok_kind_name(fsdp__tok_kind kind);

/* normalize.c: text (n) through all normalizers, appended to out. *dropped (may be NULL) becomes
 * true where characters were removed from its start. */
fsdp_status fsdp__normalize(const fsdp__tok_steps *steps, const char *text, size_t n,
                            fsdp__str *out, bool *dropped);
/* Next match of a step's literal or regex, as fsdp__regex_find. */
int fsdp__tok_find(const fsdp__tok_step *s, const char *text, size_t n, size_t from, size_t *start,
                   size_t *end);
/* Appends text with all matches replaced by the step's text. */
fsdp_status fsdp__tok_replace(const fsdp__tok_step *s, const char *text, size_t n, fsdp__str *out);

/* pretokenize.c: all pre-tokenizers over the pieces, in place. */
fsdp_status fsdp__pretokenize(const fsdp__tok_steps *steps, fsdp__pieces *pieces);

/* decode.c: the decoders over tokens (n), joined into out. */
fsdp_status fsdp__decode(const fsdp__tok_steps *steps, const fsdp__token *tokens, int64_t n,
                         bool raw, fsdp__str *out);

/* added.c: cuts text (n), which is also at place `base` of out's text, at the added tokens whose
 * mark `normalized` is the one given, appending pieces. */
fsdp_status fsdp__added_split(const fsdp_tokenizer *t, bool normalized, const char *text, size_t n,
                              size_t base, bool first, fsdp__pieces *out);
/* Builds the chains; to be called once all of t->added is there and the normalizer is read. */
fsdp_status fsdp__added_index(fsdp_tokenizer *t);

#endif
