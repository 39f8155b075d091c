/*
 * tokenizer.c - text to ids and ids to text, top to bottom.
 */
#include "data/tokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/tokenizer_internal.h"
#include "data/utf8.h"
#include "format/file.h"
#include "format/json.h"

/* ---- loading ---------------------------------------------------------------------- */

/* The token that tokenizer_config.json gives as key: a string or an object with content. */
static int32_t config_token(const fsdp_tokenizer *t, const json_t *config, const char *key)
{
    const json_t *v = json_object_get(config, key);
    if (json_is_object(v)) v = json_object_get(v, "content");
    return json_is_string(v) ? fsdp_tokenizer_token_id(t, json_string_value(v)) : -1;
}

static fsdp_status read_config(fsdp_tokenizer *t)
{
    json_t *config = NULL;
    char *dir = fsdp__path_dir(t->path);
    char *path = dir ? fsdp__path_join(dir, "tokenizer_config.json") : NULL;
    fsdp_status s = path ? FSDP_OK : fsdp_error();
    t->bos = t->eos = -1;
    if (path && fsdp__file_exists(path)) {
        config = fsdp__json_load(path);
        if (!config) s = fsdp_error();
        t->bos = config_token(t, config, "bos_token");
        t->eos = config_token(t, config, "eos_token");
    }
    json_decref(config);
    free(path);
    free(dir);
    return s;
}

fsdp_tokenizer *fsdp_tokenizer_load(const char *path)
{
    json_t *root = NULL;
    char mark[4];
    fsdp_status s = FSDP_NO_MEMORY;
    if (!path) {
        fsdp__fail(FSDP_INVALID_ARGUMENT, "tokenizer: the path is NULL; give a folder or a file");
        return NULL;
    }
    fsdp_tokenizer *t = fsdp__calloc(1, sizeof *t, "tokenizer");
    if (!t) return NULL;
    t->path = fsdp__dir_exists(path) ? fsdp__path_join(path, "tokenizer.json") : fsdp__strdup(path);
    t->added_ids = fsdp__map_create();
    if (!t->path || !t->added_ids) goto done;
    root = fsdp__json_load_nul(t->path, mark);
    if (!root) goto done;
    s = fsdp__tokenizer_read(t, root, mark);
    if (s != FSDP_OK) {
        s = fsdp__error_place("%s", t->path);
        goto done;
    }
    s = read_config(t);
done:
    json_decref(root);
    if (s == FSDP_OK) return t;
    fsdp_tokenizer_free(t);
    return NULL;
}

void fsdp_tokenizer_free(fsdp_tokenizer *t)
{
    if (!t) return;
    fsdp__bpe_free(&t->bpe);
    for (int64_t i = 0; i < t->added_count; i++) {
        free(t->added[i].text);
        free(t->added[i].match);
    }
    free(t->added);
    free(t->next[0]);
    free(t->next[1]);
    fsdp__map_free(t->added_ids);
    fsdp__pairs_free(&t->added_by_id);
    fsdp__regex_free(t->word);
    fsdp__tok_steps_free(&t->normalizer);
    fsdp__tok_steps_free(&t->pre);
    fsdp__tok_steps_free(&t->decoder);
    free(t->template_before.items);
    free(t->template_after.items);
    free(t->path);
    free(t);
}

/* ---- encoding --------------------------------------------------------------------- */

/* Cuts out the added tokens and normalizes what is between, into `out`. */
static fsdp_status prepare_pieces(const fsdp_tokenizer *t, const char *text, size_t len,
                                  fsdp__pieces *out)
{
    fsdp__pieces raw = {0};
    fsdp_status s = FSDP_OK;
    FSDP_GO(fsdp__added_split(t, false, text, len, 0, true, &raw));
    for (int64_t i = 0; i < raw.count; i++) {
        const fsdp__piece *p = &raw.items[i];
        if (p->id >= 0) {
            FSDP_GO(fsdp__pieces_add(out, 0, 0, p->id, false));
            continue;
        }
        size_t base = out->text.len;
        bool dropped = false; /* then the piece no longer begins where the text does */
        FSDP_GO(fsdp__normalize(&t->normalizer, text + p->start, p->len, &out->text, &dropped));
        FSDP_GO(fsdp__added_split(t, true, fsdp__str_get(&out->text) + base, out->text.len - base,
                                  base, p->first && !dropped, out));
    }
done:
    fsdp__pieces_free(&raw);
    return s;
}

fsdp_status fsdp__tokenizer_encode(fsdp_tokenizer *t, const char *text, size_t len,
                                   bool add_special, fsdp__ids *out)
{
    fsdp__pieces pieces = {0};
    fsdp__str repaired = {0};
    fsdp_status s = FSDP_OK;
    if (len > 0 && fsdp__utf8_valid(text, len) != len) {
        fsdp__utf8_add_lossy(&repaired, text, len);
        if (repaired.failed) {
            s = fsdp__fail_memory("text", len);
            goto done;
        }
        text = repaired.p;
        len = repaired.len;
    }
    if (add_special)
        FSDP_GO(fsdp__ids_add(out, t->template_before.items, t->template_before.count));
    FSDP_GO(prepare_pieces(t, text, len, &pieces));
    FSDP_GO(fsdp__pretokenize(&t->pre, &pieces));
    const char *base = fsdp__str_get(&pieces.text);
    for (int64_t i = 0; i < pieces.count; i++) {
        const fsdp__piece *p = &pieces.items[i];
        if (p->id >= 0)
            FSDP_GO(fsdp__ids_add(out, &p->id, 1));
        else
            FSDP_GO(fsdp__bpe_encode(&t->bpe, base + p->start, p->len, out));
    }
    if (add_special) FSDP_GO(fsdp__ids_add(out, t->template_after.items, t->template_after.count));
done:
    fsdp__pieces_free(&pieces);
    fsdp__str_free(&repaired);
    return s;
}

fsdp_status fsdp_tokenizer_encode(fsdp_tokenizer *t, const char *text, size_t len, int add_special,
                                  int32_t **ids, int64_t *n)
{
    fsdp__ids out = {0};
    if (!t || !ids || !n || (!text && len > 0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "tokenizer: encode was given NULL; expected a tokenizer, a text and "
                          "places for the ids and their number");
    fsdp_status s = fsdp__tokenizer_encode(t, text, len, add_special != 0, &out);
    if (s == FSDP_OK && !out.items &&
        !(out.items = fsdp__calloc(1, sizeof *out.items, "token ids")))
        s = fsdp_error();
    if (s != FSDP_OK) {
        free(out.items);
        return s;
    }
    *ids = out.items;
    *n = out.count;
    return FSDP_OK;
}

/* ---- decoding --------------------------------------------------------------------- */

static const fsdp__added *added_by_id(const fsdp_tokenizer *t, int32_t id)
{
    const int64_t *i = id >= 0 ? fsdp__pairs_get(&t->added_by_id, (uint64_t)id) : NULL;
    return i ? &t->added[*i] : NULL;
}

fsdp_status fsdp__tokenizer_decode(fsdp_tokenizer *t, const int32_t *ids, int64_t n,
                                   bool skip_special, bool raw, fsdp__str *out)
{
    fsdp__token *tokens = fsdp__calloc((size_t)n, sizeof *tokens, "tokens to decode");
    if (!tokens) return fsdp_error();
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        const fsdp__added *a = added_by_id(t, ids[i]);
        if (a && a->special && skip_special) continue;
        tokens[count].p = (char *)fsdp_tokenizer_token(t, ids[i], &tokens[count].n);
        if (tokens[count].p) count++;
    }
    fsdp_status s = fsdp__decode(&t->decoder, tokens, count, raw, out);
    free(tokens);
    return s;
}

char *fsdp_tokenizer_decode(fsdp_tokenizer *t, const int32_t *ids, int64_t n, int skip_special,
                            size_t *len)
{
    fsdp__str out = {0};
    if (!t || n < 0 || (!ids && n > 0)) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "tokenizer: decode was given NULL or %lld ids; expected a tokenizer and ids",
                   (long long)n);
        return NULL;
    }
    if (fsdp__tokenizer_decode(t, ids, n, skip_special != 0, false, &out) != FSDP_OK) {
        fsdp__str_free(&out);
        return NULL;
    }
    if (len) *len = out.len;
    return fsdp__str_take(&out);
}

/* ---- looking up ------------------------------------------------------------------- */

int64_t fsdp_tokenizer_vocab_size(const fsdp_tokenizer *t)
{
    if (!t) return 0;
    int64_t n = t->bpe.id_count;
    for (int64_t i = 0; i < t->added_count; i++)
        if (t->added[i].id >= n) n = (int64_t)t->added[i].id + 1;
    return n;
}

int32_t fsdp_tokenizer_token_id(const fsdp_tokenizer *t, const char *token)
{
    if (!t || !token) return -1;
    const fsdp__value *v = fsdp__map_gets(t->added_ids, token);
    if (v) return t->added[v->i].id;
    v = fsdp__map_gets(t->bpe.vocab, token);
    return v ? (int32_t)v->i : -1;
}

const char *fsdp_tokenizer_token(const fsdp_tokenizer *t, int32_t id, size_t *len)
{
    if (!t || id < 0) return NULL;
    const fsdp__added *a = added_by_id(t, id);
    fsdp__token token = {0};
    if (a) /* as it stands in normalized text, so that decoders undo the normalizer */
        token = (fsdp__token){a->match, a->match_len};
    else if (id < t->bpe.id_count)
        token = t->bpe.tokens[id];
    if (len) *len = token.n;
    return token.p;
}

int fsdp_tokenizer_is_special(const fsdp_tokenizer *t, int32_t id)
{
    const fsdp__added *a = t ? added_by_id(t, id) : NULL;
    return a && a->special;
}

int32_t fsdp_tokenizer_bos(const fsdp_tokenizer *t)
{
    return t ? t->bos : -1;
}

int32_t fsdp_tokenizer_eos(const fsdp_tokenizer *t)
{
    return t ? t->eos : -1;
}

const char *fsdp__tokenizer_path(const fsdp_tokenizer *t)
{
    return t->path;
}
