/*
 * regex.c - Oniguruma patterns over PCRE2.
 *
 * Differences that are bridged here:
 *   \s \S   Oniguruma: Unicode's White_Space. PCRE2's also has U+180E.
 *   [:alpha:] and its like: by Unicode's properties of the same names.
 *   \w \W   Oniguruma: Alphabetic, marks, decimal digits, connectors.
 *   ^ $     match at every line, lines end with \n only.
 * Class intersections (&&), nested classes, \h and the (?m) option mean
 * something else in PCRE2 and are refused.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/regex.h"

#include <pcre2.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"
#include "base/str.h"

struct fsdp__regex {
    pcre2_code *code;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    bool jit;
    char *pattern; /* as written, for messages */
};

#define WORD "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"

static fsdp_status refuse(const char *where, const char *pattern, const char *what)
{
    return fsdp__fail(FSDP_UNSUPPORTED,
                      "%s: the regular expression \"%s\" uses %s, which is not available here; "
                      "write it without",
                      where, pattern, what);
}

/* The escape c (after a backslash), inside or outside of a class. */
static fsdp_status translate_escape(fsdp__str *out, char c, bool in_class, const char *where,
                                    const char *pattern)
{
    switch (c) {
    case 's':
        fsdp__str_add(out, "\\p{White_Space}");
        return FSDP_OK;
    case 'S':
        fsdp__str_add(out, "\\P{White_Space}");
        return FSDP_OK;
    case 'w':
        fsdp__str_add(out, in_class ? WORD : "[" WORD "]");
        return FSDP_OK;
    case 'W':
        if (in_class) return refuse(where, pattern, "\\W inside a class");
        fsdp__str_add(out, "[^" WORD "]");
        return FSDP_OK;
    case 'h':
    case 'H':
        return refuse(where, pattern, "\\h (a hexadecimal digit)");
    default:
        fsdp__str_add_n(out, (char[]){'\\', c}, 2);
        return FSDP_OK;
    }
}

/* A class like [:alpha:] at s (n) inside of another; *i moves to its last character. */
static fsdp_status translate_posix(fsdp__str *out, const char *s, size_t n, size_t *i,
                                   const char *where, const char *pattern)
{
    static const char *const classes[][2] = {
        {"[:alpha:]", "\\p{Alphabetic}"},
        {"[:alnum:]", "\\p{Alphabetic}\\p{Nd}"},
        {"[:digit:]", "\\p{Nd}"},
        {"[:space:]", "\\p{White_Space}"},
        {"[:upper:]", "\\p{Uppercase}"},
        {"[:lower:]", "\\p{Lowercase}"},
        {"[:word:]", WORD},
        {"[:xdigit:]", "0-9A-Fa-f"},
    };
    for (size_t k = 0; k < sizeof classes / sizeof *classes; k++) {
        size_t len = strlen(classes[k][0]);
        if (len > n || memcmp(s, classes[k][0], len) != 0) continue;
        fsdp__str_add(out, classes[k][1]);
        *i += len - 1;
        return FSDP_OK;
    }
    return refuse(where, pattern,
                  "a class in brackets and colons other than alpha, alnum, digit, "
                  "space, upper, lower, word and xdigit");
}

static fsdp_status translate(fsdp__str *out, const char *p, size_t n, const char *where)
{
    bool in_class = false;
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\\' && i + 1 < n) {
            FSDP_TRY(translate_escape(out, p[++i], in_class, where, p));
            continue;
        }
        if (in_class) {
            if (p[i] == '[' && !(i + 1 < n && p[i + 1] == ':'))
                return refuse(where, p, "a class inside a class");
            if (p[i] == '[') {
                FSDP_TRY(translate_posix(out, p + i, n - i, &i, where, p));
                continue;
            }
            if (p[i] == '&' && i + 1 < n && p[i + 1] == '&') {
                return refuse(where, p, "an intersection of classes (&&)");
            } else if (p[i] == ']') {
                in_class = false;
            }
        } else if (p[i] == '[') {
            in_class = true;
            fsdp__str_add_n(out, p + i, 1);
            /* A bracket right behind the opening is a member, not the end. */
            if (i + 1 < n && p[i + 1] == '^') fsdp__str_add_n(out, p + ++i, 1);
            if (i + 1 < n && p[i + 1] == ']') {
                fsdp__str_add(out, "\\]");
                i++;
            }
            continue;
        } else if (p[i] == '(' && i + 2 < n && p[i + 1] == '?') {
            for (size_t j = i + 2; j < n && p[j] >= 'a' && p[j] <= 'z'; j++)
                if (p[j] == 'm') return refuse(where, p, "the option (?m)");
        }
        fsdp__str_add_n(out, p + i, 1);
    }
    return FSDP_OK;
}

static fsdp_status compile(fsdp__regex *re, const fsdp__str *text, const char *where)
{
    pcre2_compile_context *cc = pcre2_compile_context_create(NULL);
    if (!cc) return fsdp__fail_memory("regular expression", text->len);
    pcre2_set_newline(cc, PCRE2_NEWLINE_LF);
    int code = 0;
    PCRE2_SIZE at = 0;
    re->code = pcre2_compile((PCRE2_SPTR)fsdp__str_get(text), text->len,
                             PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE, &code, &at, cc);
    pcre2_compile_context_free(cc);
    if (!re->code) {
        PCRE2_UCHAR message[160];
        pcre2_get_error_message(code, message, sizeof message);
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: the regular expression \"%s\" is not valid: %s (at byte %zu of its "
                          "translation \"%s\"); correct it",
                          where, re->pattern, (char *)message, (size_t)at, fsdp__str_get(text));
    }
    re->jit = pcre2_jit_compile(re->code, PCRE2_JIT_COMPLETE) == 0;
    re->match = pcre2_match_data_create_from_pattern(re->code, NULL);
    re->context = pcre2_match_context_create(NULL);
    if (!re->match || !re->context) return fsdp__fail_memory("regular expression", text->len);
    if (re->jit) {
        /* Long runs of one class need more than the 32 KiB that are there without asking. */
        re->stack = pcre2_jit_stack_create(32 * 1024, 8 * 1024 * 1024, NULL);
        if (re->stack) pcre2_jit_stack_assign(re->context, NULL, re->stack);
    }
    return FSDP_OK;
}

fsdp__regex *fsdp__regex_create(const char *pattern, size_t len, const char *where)
{
    fsdp__str text = {0};
    fsdp_status s = FSDP_NO_MEMORY;
    fsdp__regex *re = fsdp__calloc(1, sizeof *re, "regular expression");
    if (!re || !(re->pattern = fsdp__strndup(pattern, len))) goto done;
    FSDP_GO(translate(&text, re->pattern, len, where));
    if (text.failed) {
        s = fsdp__fail_memory("regular expression", len);
        goto done;
    }
    s = compile(re, &text, where);
done:
    fsdp__str_free(&text);
    if (s == FSDP_OK) return re;
    fsdp__regex_free(re);
    return NULL;
}

void fsdp__regex_free(fsdp__regex *re)
{
    if (!re) return;
    pcre2_jit_stack_free(re->stack);
    pcre2_match_context_free(re->context);
    pcre2_match_data_free(re->match);
    pcre2_code_free(re->code);
    free(re->pattern);
    free(re);
}

int fsdp__regex_find(fsdp__regex *re, const char *text, size_t len, size_t from, size_t *start,
                     size_t *end)
{
    /* The text was checked once for the whole document. */
    int rc = re->jit
                 ? pcre2_jit_match(re->code, (PCRE2_SPTR)text, len, from, 0, re->match, re->context)
                 : pcre2_match(re->code, (PCRE2_SPTR)text, len, from, PCRE2_NO_UTF_CHECK, re->match,
                               re->context);
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) {
        PCRE2_UCHAR message[160];
        pcre2_get_error_message(rc, message, sizeof message);
        fsdp__fail(FSDP_INVALID_DATA,
                   "tokenizer: matching \"%s\" failed at byte %zu of a text of %zu bytes: %s; "
                   "cut the text into smaller documents",
                   re->pattern, from, len, (char *)message);
        return -1;
    }
    const PCRE2_SIZE *o = pcre2_get_ovector_pointer(re->match);
    *start = o[0];
    *end = o[1];
    return 1;
}
