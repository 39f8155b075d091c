/*
 * token_file.c - reading and writing files of token ids (token_file.h has the
 * format).
 *
 * Ids are stored as the machine has them, so the machine must be
 * little-endian, as all that this project runs on are.
 */
#include "data/token_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/error.h"
#include "base/memory.h"
#include "format/file.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token files are little-endian");

typedef struct header {
    char magic[8];
    uint32_t version, id_bytes;
    uint64_t vocab, count, documents, hash, header_hash, zero;
} header;

_Static_assert(sizeof(header) == 64, "the header has no holes");

static const char MAGIC[8] = {'F', 'S', 'D', 'P', 'T', 'O', 'K', 'S'};
enum { VERSION = 1, HASHED = offsetof(header, header_hash), CHUNK = 1 << 16 };

static uint64_t padded(uint64_t bytes)
{
    return (bytes + 7) & ~(uint64_t)7;
}

/* ---- reading ---------------------------------------------------------------------- */

static fsdp_status bad(const char *path, const char *found, const char *fix)
{
    return fsdp__fail(FSDP_INVALID_DATA, "%s: %s; %s", path, found, fix);
}

/* Header against itself and against the file's size. */
static fsdp_status check_header(const char *path, const header *h, uint64_t bytes)
{
    static const char again[] = "expected a token file; make one with `fsdp prepare`";
    if (bytes < sizeof *h || memcmp(h->magic, MAGIC, sizeof MAGIC) != 0)
        return bad(path, "the file does not begin with FSDPTOKS", again);
    if (h->version != VERSION)
        return fsdp__fail(FSDP_UNSUPPORTED,
                          "%s: token file of version %u, expected %d; make it again with `fsdp "
                          "prepare`",
                          path, h->version, VERSION);
    if (h->header_hash != XXH64(h, HASHED, 0) || h->zero != 0)
        return bad(path, "the header's hash does not fit the header",
                   "the file is damaged: make "
                   "it again");
    if ((h->id_bytes != 2 && h->id_bytes != 4) || h->vocab == 0 || h->vocab > INT32_MAX ||
        h->count > (uint64_t)INT64_MAX / 16 || h->documents > h->count)
        return bad(path, "the header holds impossible numbers", again);
    if (h->count == 0)
        return bad(path, "the dataset is empty (0 tokens)", "give `fsdp prepare` some text");
    uint64_t expected = sizeof *h + padded(h->count * h->id_bytes) + 8 * h->documents;
    if (bytes != expected)
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: the file has %llu bytes, its header asks for %llu (%llu tokens); it "
                          "was cut short or added to: make or copy it again",
                          path, (unsigned long long)bytes, (unsigned long long)expected,
                          (unsigned long long)h->count);
    return FSDP_OK;
}

static fsdp_status map_file(fsdp__tokens *t, int fd)
{
    struct stat st;
    if (fstat(fd, &st) != 0) return fsdp__fail_errno(FSDP_IO_ERROR, "cannot look at %s", t->path);
    if (!S_ISREG(st.st_mode))
        return bad(t->path, "not a regular file", "expected a token file as `fsdp prepare` makes");
    if ((size_t)st.st_size < sizeof(header))
        return fsdp__fail(FSDP_INVALID_DATA,
                          "%s: the file has %lld bytes, a token file has at least %zu; it was cut "
                          "short or is none: make it with `fsdp prepare`",
                          t->path, (long long)st.st_size, sizeof(header));
    t->map_bytes = (size_t)st.st_size;
    void *map = mmap(NULL, t->map_bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        return fsdp__fail_errno(FSDP_IO_ERROR, "cannot map %s (%zu bytes)", t->path, t->map_bytes);
    t->map = map;
    return FSDP_OK;
}

static fsdp_status check_documents(const fsdp__tokens *t)
{
    for (int64_t i = 0; i < t->document_count; i++)
        if (t->documents[i] >= (uint64_t)t->count ||
            (i > 0 && t->documents[i] < t->documents[i - 1]))
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: document %lld begins at token %llu, which is out of order or "
                              "past the %lld tokens; make the file again",
                              t->path, (long long)i, (unsigned long long)t->documents[i],
                              (long long)t->count);
    return FSDP_OK;
}

fsdp__tokens *fsdp__tokens_open(const char *path)
{
    fsdp_status s = FSDP_NO_MEMORY;
    int fd = -1;
    fsdp__tokens *t = fsdp__calloc(1, sizeof *t, "token file");
    if (!t || !(t->path = fsdp__strdup(path))) goto done;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        s = fsdp__fail_errno(errno == ENOENT ? FSDP_NOT_FOUND : FSDP_IO_ERROR,
                             "cannot open the token file %s (`fsdp prepare` makes one)", path);
        goto done;
    }
    FSDP_GO(map_file(t, fd));
    const header *h = t->map;
    FSDP_GO(check_header(path, h, t->map_bytes));
    const char *ids = (const char *)t->map + sizeof *h;
    if (h->id_bytes == 2)
        t->ids16 = (const uint16_t *)(const void *)ids;
    else
        t->ids32 = (const uint32_t *)(const void *)ids;
    t->count = (int64_t)h->count;
    t->vocab_size = (int64_t)h->vocab;
    t->hash = h->hash;
    t->document_count = (int64_t)h->documents;
    t->documents = (const uint64_t *)(const void *)(ids + padded(h->count * h->id_bytes));
    s = check_documents(t);
done:
    if (fd >= 0) close(fd);
    if (s == FSDP_OK) return t;
    fsdp__tokens_close(t);
    return NULL;
}

void fsdp__tokens_close(fsdp__tokens *t)
{
    if (!t) return;
    if (t->map) munmap(t->map, t->map_bytes);
    free(t->path);
    free(t);
}

static fsdp_status outside(const fsdp__tokens *t, int64_t i, int64_t vocab_size)
{
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: token %lld at offset %lld is outside the vocabulary of %lld (ids 0 to "
                      "%lld); the file was made with another tokenizer: prepare the data with the "
                      "model's",
                      t->path, (long long)fsdp__tokens_get(t, i), (long long)i,
                      (long long)vocab_size, (long long)vocab_size - 1);
}

fsdp_status fsdp__tokens_read(const fsdp__tokens *t, int64_t start, int64_t n, int64_t vocab_size,
                              int64_t *out)
{
    if (start < 0 || n < 0 || n > t->count - start)
        return fsdp__fail(FSDP_INVALID_ARGUMENT,
                          "%s: tokens %lld to %lld were asked for, the file has %lld", t->path,
                          (long long)start, (long long)(start + n), (long long)t->count);
    for (int64_t i = 0; i < n; i++) {
        out[i] = fsdp__tokens_get(t, start + i);
        if (out[i] >= vocab_size) return outside(t, start + i, vocab_size);
    }
    return FSDP_OK;
}

fsdp_status fsdp__tokens_check(const fsdp__tokens *t, int64_t vocab_size)
{
    for (int64_t start = 0; start < t->count; start += CHUNK) {
        int64_t end = start + CHUNK < t->count ? start + CHUNK : t->count, most = 0;
        /* The maximum of a chunk vectorizes; the place is looked for only when it is too large. */
        if (t->ids16) {
            uint16_t max = 0;
            for (int64_t i = start; i < end; i++)
                max = t->ids16[i] > max ? t->ids16[i] : max;
            most = max;
        } else {
            uint32_t max = 0;
            for (int64_t i = start; i < end; i++)
                max = t->ids32[i] > max ? t->ids32[i] : max;
            most = max;
        }
        for (int64_t i = start; most >= vocab_size && i < end; i++)
            if (fsdp__tokens_get(t, i) >= vocab_size) return outside(t, i, vocab_size);
    }
    return FSDP_OK;
}

fsdp_status fsdp__tokens_verify(const fsdp__tokens *t)
{
    const void *ids = t->ids16 ? (const void *)t->ids16 : (const void *)t->ids32;
    uint64_t found = XXH64(ids, (size_t)t->count * (t->ids16 ? 2 : 4), 0);
    if (found == t->hash) return FSDP_OK;
    return fsdp__fail(FSDP_INVALID_DATA,
                      "%s: the hash of the tokens is %016llx, the header says %016llx; the file is "
                      "damaged: make or copy it again",
                      t->path, (unsigned long long)found, (unsigned long long)t->hash);
}

/* ---- writing ---------------------------------------------------------------------- */

struct fsdp__tokens_writer {
    fsdp__temp_file file;
    header head;
    XXH64_state_t *hash;
    uint64_t *documents;
    int64_t document_count, document_cap;
    int64_t written; /* bytes behind the header */
    size_t used;     /* bytes in buffer */
    char buffer[CHUNK];
};

fsdp__tokens_writer *fsdp__tokens_create(const char *path, int64_t vocab_size)
{
    if (vocab_size < 1 || vocab_size > INT32_MAX) {
        fsdp__fail(FSDP_INVALID_ARGUMENT,
                   "%s: a vocabulary of %lld tokens; expected 1 to 2147483647", path,
                   (long long)vocab_size);
        return NULL;
    }
    fsdp__tokens_writer *w = fsdp__calloc(1, sizeof *w, "token file writer");
    if (!w) return NULL;
    w->file.fd = -1;
    w->hash = XXH64_createState();
    if (!w->hash) {
        fsdp__fail_memory("hash of a token file", 0);
        goto fail;
    }
    XXH64_reset(w->hash, 0);
    if (fsdp__temp_open(&w->file, path) != FSDP_OK) goto fail;
    memcpy(w->head.magic, MAGIC, sizeof MAGIC);
    w->head.version = VERSION;
    w->head.id_bytes = vocab_size <= 65536 ? 2 : 4;
    w->head.vocab = (uint64_t)vocab_size;
    return w;
fail:
    fsdp__tokens_abort(w);
    return NULL;
}

static fsdp_status flush(fsdp__tokens_writer *w)
{
    XXH64_update(w->hash, w->buffer, w->used);
    FSDP_TRY(fsdp__file_pwrite(w->file.fd, w->buffer, w->used, (int64_t)sizeof w->head + w->written,
                               w->file.path));
    w->written += (int64_t)w->used;
    w->used = 0;
    return FSDP_OK;
}

fsdp_status fsdp__tokens_document(fsdp__tokens_writer *w)
{
    uint64_t at = w->head.count;
    /* A document without tokens is none. */
    if (w->document_count > 0 && w->documents[w->document_count - 1] == at) return FSDP_OK;
    FSDP_TRY(FSDP__GROW(w->documents, w->document_cap, w->document_count + 1, "documents"));
    w->documents[w->document_count++] = at;
    return FSDP_OK;
}

fsdp_status fsdp__tokens_add(fsdp__tokens_writer *w, const int32_t *ids, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || (uint64_t)ids[i] >= w->head.vocab)
            return fsdp__fail(FSDP_INVALID_DATA,
                              "%s: token %d at offset %llu is outside the vocabulary of %llu",
                              w->file.path, ids[i], (unsigned long long)w->head.count,
                              (unsigned long long)w->head.vocab);
        if (w->used + 4 > sizeof w->buffer) FSDP_TRY(flush(w));
        if (w->head.id_bytes == 2)
            memcpy(w->buffer + w->used, &(uint16_t){(uint16_t)ids[i]}, 2);
        else
            memcpy(w->buffer + w->used, &ids[i], 4);
        w->used += w->head.id_bytes;
        w->head.count++;
    }
    return FSDP_OK;
}

fsdp_status fsdp__tokens_commit(fsdp__tokens_writer *w)
{
    static const char zeros[8];
    fsdp_status s = FSDP_OK;
    if (w->head.count == 0) {
        s = fsdp__fail(
            FSDP_INVALID_DATA,
            "%s: the dataset is empty (0 tokens), so no file is written; give files with "
            "text",
            w->file.path);
        goto done;
    }
    FSDP_GO(flush(w));
    /* A document that was begun last and got no tokens is dropped. */
    if (w->document_count > 0 && w->documents[w->document_count - 1] == w->head.count)
        w->document_count--;
    w->head.documents = (uint64_t)w->document_count;
    w->head.hash = XXH64_digest(w->hash);
    w->head.header_hash = XXH64(&w->head, HASHED, 0);
    int64_t end = (int64_t)sizeof w->head + w->written;
    size_t pad = (size_t)(padded((uint64_t)w->written) - (uint64_t)w->written);
    FSDP_GO(fsdp__file_pwrite(w->file.fd, zeros, pad, end, w->file.path));
    FSDP_GO(fsdp__file_pwrite(w->file.fd, w->documents, (size_t)w->document_count * 8,
                              end + (int64_t)pad, w->file.path));
    FSDP_GO(fsdp__file_pwrite(w->file.fd, &w->head, sizeof w->head, 0, w->file.path));
    s = fsdp__temp_commit(&w->file);
done:
    fsdp__tokens_abort(w);
    return s;
}

void fsdp__tokens_abort(fsdp__tokens_writer *w)
{
    if (!w) return;
    fsdp__temp_abort(&w->file);
    XXH64_freeState(w->hash);
    free(w->documents);
    free(w);
}
