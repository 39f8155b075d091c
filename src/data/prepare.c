/*
 * prepare.c - walk, train a tokenizer if asked to, encode, write.
 *
 * A file is read whole, once for training and once for encoding; nothing else
 * is kept. Every result appears complete or not at all.
 */
#include "data/prepare.h"

#include <fnmatch.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "data/bpe_train.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "data/walk.h"
#include "format/file.h"
#include "format/json.h"

static const char END_OF_TEXT[] = "<|endoftext|>";

typedef struct source {
    const char *path;
    bool validation, text;
    int64_t bytes, tokens;
} source;

typedef struct job {
    const fsdp__prepare_options *o;
    fsdp__walk walk;
    source *sources; /* (walk.count) */
    fsdp_tokenizer *tokenizer;
    int32_t end; /* id of the end token */
    fsdp__prepare_report report;
} job;

/* ---- which files ------------------------------------------------------------------ */

static bool fits(const char *pattern, const char *path)
{
    return fnmatch(pattern, path, 0) == 0 || fnmatch(pattern, fsdp__path_name(path), 0) == 0;
}

static bool file_fits(const char *pattern, const fsdp__walk_file *f)
{
    for (int64_t k = 0; k < f->alias_count; k++)
        if (fits(pattern, f->aliases[k])) return true;
    return fits(pattern, f->path);
}

static fsdp_status choose_files(job *j)
{
    const fsdp__prepare_options *o = j->o;
    FSDP_TRY(fsdp__walk_paths(o->paths, o->path_count, o->out, &j->walk));
    j->sources = fsdp__calloc((size_t)j->walk.count, sizeof *j->sources, "list of files");
    if (!j->sources) return fsdp_error();
    for (int64_t i = 0; i < j->walk.count; i++) {
        j->sources[i].path = j->walk.files[i].path;
        j->report.repeated += j->walk.files[i].alias_count;
    }
    for (int64_t p = 0; p < o->validation_count; p++) {
        bool any = false;
        for (int64_t i = 0; i < j->walk.count; i++) {
            if (!file_fits(o->validation[p], &j->walk.files[i])) continue;
            j->sources[i].validation = any = true;
        }
        if (!any)
            return fsdp__fail(FSDP_NOT_FOUND,
                              "prepare: the validation pattern \"%s\" fits none of the %lld files; "
                              "patterns are compared with a file's path and with its name",
                              o->validation[p], (long long)j->walk.count);
    }
    return FSDP_OK;
}

/* The text of source i, or *text NULL if it is none. */
static fsdp_status read_text(job *j, int64_t i, char **text, size_t *n)
{
    FSDP_TRY(fsdp__file_read(j->sources[i].path, text, n));
    j->sources[i].bytes = (int64_t)*n;
    j->sources[i].text = *n > 0 && !memchr(*text, 0, *n);
    if (j->sources[i].text) return FSDP_OK;
    free(*text);
    *text = NULL;
    return FSDP_OK;
}

/* ---- the tokenizer ---------------------------------------------------------------- */

static fsdp_status train_tokenizer(job *j)
{
    const char *end = j->o->end_token ? j->o->end_token : END_OF_TEXT;
    int64_t texts = 0;
    fsdp_status s = FSDP_OK;
    fsdp__bpe_trainer *t = fsdp__bpe_trainer_create();
    if (!t) return fsdp_error();
    for (int64_t i = 0; i < j->walk.count && s == FSDP_OK; i++) {
        char *text = NULL;
        size_t n;
        if (j->sources[i].validation) continue;
        s = read_text(j, i, &text, &n);
        if (text) s = fsdp__bpe_trainer_add(t, text, n);
        texts += text != NULL;
        free(text);
    }
    if (s == FSDP_OK && !texts)
        s = fsdp__fail(FSDP_NOT_FOUND,
                       "prepare: none of the %lld files is a text to train on (empty files and "
                       "files with NUL bytes are none, nor are those of the validation set); give "
                       "files of text",
                       (long long)j->walk.count);
    if (s == FSDP_OK) s = fsdp__bpe_trainer_write(t, j->o->train_tokenizer, &end, 1, j->o->out);
    fsdp__bpe_trainer_free(t);
    return s;
}

/* Copies dir/name beside the token files; one that is not there is no error. */
static fsdp_status copy_beside(const job *j, const char *dir, const char *from, const char *to)
{
    char *a = fsdp__path_join(dir, from), *b = fsdp__path_join(j->o->out, to);
    fsdp_status s = a && b ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK && strcmp(a, b) != 0 && fsdp__file_exists(a)) s = fsdp__file_copy(a, b);
    free(a);
    free(b);
    return s;
}

static fsdp_status copy_tokenizer(job *j)
{
    const char *path = fsdp__tokenizer_path(j->tokenizer);
    char *dir = fsdp__path_dir(path);
    fsdp_status s = dir ? fsdp__dir_make(j->o->out) : fsdp_error();
    if (s == FSDP_OK) s = copy_beside(j, dir, fsdp__path_name(path), "tokenizer.json");
    if (s == FSDP_OK) s = copy_beside(j, dir, "tokenizer_config.json", "tokenizer_config.json");
    free(dir);
    return s;
}

/* Loads or trains, and finds the end token. */
static fsdp_status get_tokenizer(job *j)
{
    const fsdp__prepare_options *o = j->o;
    if (!o->tokenizer) FSDP_TRY(train_tokenizer(j));
    j->tokenizer = fsdp_tokenizer_load(o->tokenizer ? o->tokenizer : o->out);
    if (!j->tokenizer) return fsdp_error();
    j->report.vocab_size = fsdp_tokenizer_vocab_size(j->tokenizer);
    if (o->end_token) {
        j->end = fsdp_tokenizer_token_id(j->tokenizer, o->end_token);
    } else {
        j->end = fsdp_tokenizer_eos(j->tokenizer);
        if (j->end < 0) j->end = fsdp_tokenizer_token_id(j->tokenizer, END_OF_TEXT);
    }
    if (j->end < 0)
        return fsdp__fail(FSDP_NOT_FOUND,
                          "prepare: %s has no token \"%s\" to end documents with; name one of its "
                          "tokens as the end token",
                          fsdp__tokenizer_path(j->tokenizer),
                          o->end_token ? o->end_token : END_OF_TEXT);
    return o->tokenizer ? copy_tokenizer(j) : FSDP_OK;
}

/* ---- encoding --------------------------------------------------------------------- */

static fsdp_status encode_file(job *j, int64_t i, fsdp__tokens_writer *w, fsdp__prepare_set *set)
{
    char *text = NULL;
    size_t n;
    fsdp__ids ids = {0};
    fsdp_status s;
    FSDP_TRY(read_text(j, i, &text, &n));
    if (!text) {
        j->report.no_text++;
        return FSDP_OK;
    }
    s = fsdp__tokenizer_encode(j->tokenizer, text, n, true, &ids);
    if (s != FSDP_OK) {
        fsdp__error_place("%s", j->sources[i].path);
        goto done;
    }
    FSDP_GO(fsdp__ids_add(&ids, &j->end, 1));
    FSDP_GO(fsdp__tokens_document(w));
    FSDP_GO(fsdp__tokens_add(w, ids.items, ids.count));
    j->sources[i].tokens = ids.count;
    set->files++;
    set->bytes += (int64_t)n;
    set->tokens += ids.count;
done:
    free(text);
    free(ids.items);
    return s;
}

static fsdp_status encode_set(job *j, bool validation, const char *name, fsdp__prepare_set *set)
{
    fsdp__tokens_writer *w = NULL;
    char *path = fsdp__path_join(j->o->out, name);
    fsdp_status s = path ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK && !(w = fsdp__tokens_create(path, j->report.vocab_size))) s = fsdp_error();
    for (int64_t i = 0; i < j->walk.count && s == FSDP_OK; i++)
        if (j->sources[i].validation == validation) s = encode_file(j, i, w, set);
    free(path);
    if (s == FSDP_OK) return fsdp__tokens_commit(w);
    fsdp__tokens_abort(w);
    return s;
}

/* A set of an earlier run must not stay beside the new one. */
static fsdp_status remove_old_validation(const job *j)
{
    char *path = fsdp__path_join(j->o->out, "validation.tokens");
    fsdp_status s = path ? fsdp__file_remove(path) : fsdp_error();
    free(path);
    return s;
}

/* prepare.json: which files went where. */
static fsdp_status write_list(const job *j)
{
    fsdp__str out = {0}, name = {0};
    fsdp__str_addf(&out, "{\n  \"vocab_size\": %lld,\n  \"end_token\": %d,\n  \"files\": [",
                   (long long)j->report.vocab_size, j->end);
    for (int64_t i = 0; i < j->walk.count; i++) {
        const source *f = &j->sources[i];
        fsdp__str_addf(&out, "%s\n    {\"path\": ", i ? "," : "");
        name.len = 0; /* names of files need not be UTF-8, JSON must be */
        fsdp__utf8_add_lossy(&name, f->path, strlen(f->path));
        fsdp__json_quote(&out, fsdp__str_get(&name), name.len);
        fsdp__str_addf(&out, ", \"set\": \"%s\", \"bytes\": %lld, \"tokens\": %lld}",
                       !f->text        ? "none"
                       : f->validation ? "validation"
                                       : "train",
                       (long long)f->bytes, (long long)f->tokens);
    }
    fsdp__str_add(&out, "\n  ]\n}\n");
    char *path = fsdp__path_join(j->o->out, "prepare.json");
    fsdp_status s = path ? FSDP_OK : fsdp_error();
    if (s == FSDP_OK)
        s = out.failed ? fsdp__fail_memory("list of files", out.len)
                       : fsdp__file_write(path, out.p, out.len);
    free(path);
    fsdp__str_free(&name);
    fsdp__str_free(&out);
    return s;
}

static fsdp_status check_options(const fsdp__prepare_options *o)
{
    if (!o->out || o->path_count < 1)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "prepare: %s; give an output folder and at least one file or folder",
                          o->out ? "no paths were given" : "no output folder was given");
    if ((o->tokenizer != NULL) == (o->train_tokenizer > 0))
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "prepare: give either a tokenizer or the size of one to train%s",
                          o->tokenizer ? ", not both" : "");
    return FSDP_OK;
}

fsdp_status fsdp__prepare(const fsdp__prepare_options *o, fsdp__prepare_report *report)
{
    job j = {.o = o};
    fsdp_status s = check_options(o);
    if (s != FSDP_OK) return s;
    FSDP_GO(choose_files(&j));
    FSDP_GO(get_tokenizer(&j));
    FSDP_GO(encode_set(&j, false, "train.tokens", &j.report.train));
    if (o->validation_count > 0)
        FSDP_GO(encode_set(&j, true, "validation.tokens", &j.report.validation));
    else
        FSDP_GO(remove_old_validation(&j));
    s = write_list(&j);
    if (s == FSDP_OK && report) *report = j.report;
done:
    fsdp_tokenizer_free(j.tokenizer);
    free(j.sources);
    fsdp__walk_free(&j.walk);
    return s;
}
