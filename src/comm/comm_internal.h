/*
 * comm_internal.h - what the files of the room share.
 *
 * Two halves meet here. The *published* structs lie in the segment, are made of atomics, and every
 * word of them has a single writer: the rank that owns it. The *local* structs are a rank's own.
 *
 * Works of a lane are numbered 1, 2, ... on each rank; equal numbers are the same call. A rank
 * publishes, for each of its lanes, the number up to which it has done four things:
 *
 *     posted    the description of the call can be read
 *     stage     the call's first half is done (rows written, slices summed, arrived)
 *     read      it reads no peer's memory for this call any more
 *     finished  the call is over for this rank; it does not look at descriptions any more
 *
 * Plain collectives move data in rounds through a window of two slots; rounds are numbered through
 * the life of a lane: `staged` of them lie ready, `consumed` of them are read.
 */
#ifndef FSDP_COMM_COMM_INTERNAL_H
#define FSDP_COMM_COMM_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "comm/comm.h"
#include "device/heap.h"

enum {
    FSDP__POSTS = 32,                    /* descriptions that a lane holds */
    FSDP__LABEL = 64,                    /* bytes of a label that peers see, a multiple of 8 */
    FSDP__MAX_WORLDS = 64,               /* times that a process may init */
    FSDP__MAX_SLOTS = 1024,              /* of which the first MAX_WORLDS are the worlds' */
    FSDP__WINDOW = 64 * 1024,            /* bytes of one slot of a window */
    FSDP__PAIR_SLOT = FSDP__WINDOW + 64, /* of a pair's window: the message's size comes first */
    FSDP__ABORT_TEXT = 2048,
    FSDP__MAX_RANKS = 1024
};

/* ---- published ---------------------------------------------------------------- */

/* Text that may be read while it is written: words, so that a reader sees old or new ones. */
typedef struct fsdp__text {
    _Atomic uint64_t words[FSDP__LABEL / 8];
} fsdp__text;

/* One entry of a list as its peers see it. */
typedef struct fsdp__post_entry {
    int64_t outer, dim, inner, chunk;
    int64_t offset; /* of the shard or the full in the segment; -1: not to be read */
    int32_t shard_dtype, full_dtype;
    int32_t present, unused;
} fsdp__post_entry;

/* The description of a call; read by peers between posted and finished. */
typedef struct fsdp__post {
    int64_t entries; /* offset of fsdp__post_entry[n] in the segment */
    int64_t n;
    int64_t amount; /* elements or bytes of a plain collective */
    int32_t collective, dtype, op, root;
    int32_t shared, scale_bits, add, unused;
    char label[FSDP__LABEL];
} fsdp__post;

typedef struct fsdp__lane_page {
    _Alignas(64) _Atomic uint64_t posted;
    _Atomic uint64_t stage, read, finished;
    _Atomic uint64_t staged, consumed;
    _Atomic int64_t window; /* offset of two slots in the segment; 0: none yet */
    uint64_t unused;
    fsdp__post posts[FSDP__POSTS];
} fsdp__lane_page;

/* One direction each of the talk with one peer. */
typedef struct fsdp__pair_page {
    _Atomic uint64_t sent;     /* rounds that lie ready for the peer */
    _Atomic uint64_t received; /* rounds from the peer that are read */
    _Atomic int64_t window;    /* two slots of FSDP__PAIR_SLOT */
    uint64_t unused;
} fsdp__pair_page;

/* Of a member in a group; followed by fsdp__pair_page[world size]. */
typedef struct fsdp__member_page {
    _Alignas(64) _Atomic uint64_t released; /* shared copies given back */
    fsdp__lane_page lanes[FSDP_LANE_COUNT];
} fsdp__member_page;

enum { FSDP__JOINED = 1, FSDP__LEFT = 2 };

/* Of a rank in the world. */
typedef struct fsdp__rank_page {
    _Alignas(64) _Atomic uint32_t bell; /* futex: counts rings */
    _Atomic uint32_t sleeping;
    _Atomic uint64_t state; /* world number * 4 + FSDP__JOINED or FSDP__LEFT */
    _Atomic uint64_t pid, start;
    _Atomic uint64_t next_slot;
    _Atomic uint64_t resets; /* rendezvous of resets that this rank has come to */
    _Atomic uint64_t last;   /* of the last call: number * 256 + lane * 16 + collective */
    fsdp__text last_label, last_group;
} fsdp__rank_page;

/* The first abort of a world. */
typedef struct fsdp__abort_page {
    _Alignas(64) _Atomic uint32_t state; /* 0 none, 1 being written, 2 posted */
    _Atomic uint32_t code, rank;
    char text[FSDP__ABORT_TEXT];
} fsdp__abort_page;

typedef struct fsdp__segment_head {
    _Alignas(64) _Atomic uint64_t magic, world_size, total;
    fsdp__abort_page aborts[FSDP__MAX_WORLDS];
} fsdp__segment_head;

/* Offsets in the segment: [control | heap of rank 0 | ... | gather area]. */
typedef struct fsdp__layout {
    int64_t control, heap, gather; /* bytes of the control area, of each heap, of the area */
    int64_t part;                  /* bytes of the gather area for a group of the whole world */
    int64_t member;                /* bytes of a member page with its pairs */
    int64_t total;
} fsdp__layout;

/* ---- local ------------------------------------------------------------------------ */

typedef struct fsdp__segment {
    fsdp__layout layout;
    int world_size;
    bool threads;
    const char *ro; /* the whole, for reading */
    char *control;  /* for writing; the control area, the own heap, the gather area */
    char *heap, *gather;
} fsdp__segment;

typedef struct fsdp__world {
    fsdp__segment seg;
    int rank, size;
    int number;                 /* of this world among those of the process, from 0 */
    fsdp__allocator *allocator; /* over the own heap */
    uint64_t next_slot, resets;
    int64_t gather_next; /* bytes of the gather area that groups have */
} fsdp__world;

typedef struct fsdp__work_kind fsdp__work_kind;

struct fsdp_work {
    fsdp_group *group;
    fsdp_work *next;                  /* in its queue */
    fsdp_work *live_prev, *live_next; /* all works of the group */
    const fsdp__work_kind *kind;
    fsdp_lane lane;
    fsdp_collective collective;
    uint64_t seq;
    bool posted, first_done, all_checked, done, queued;
    bool cancelled;         /* by a reset */
    bool despite_abort;     /* a posted abort does not end a wait for it */
    int checked;            /* peers up to here described the same call */
    int blocked_on;         /* a rank of the group that has not come */
    const char *blocked_by; /* what it has not done */
    char label[FSDP__LABEL];
    fsdp__post post;
    /* lists */
    fsdp_list_entry *e; /* (n), a copy */
    fsdp_list_entry *user;
    int n;
    uint64_t clock;
    char *union_present; /* (n) */
    /* plain: data goes through windows in rounds */
    const char *send;
    char *recv;
    int64_t amount, each; /* elements or bytes in all, and in one round */
    fsdp_dtype dtype;
    fsdp_reduce_op op;
    int root;
    uint64_t base, rounds, in, out; /* first round, how many, staged, consumed */
    int peer;
};

/* What a collective does when polled. Neither blocks; 1 done, 0 not yet, -1 error kept. */
struct fsdp__work_kind {
    int (*first)(fsdp_work *w); /* may run ahead of unfinished works of its kind; may be NULL */
    int (*step)(fsdp_work *w);
};

typedef struct fsdp__lane_state {
    fsdp_work *head, *tail;
    uint64_t issued; /* number of the last call */
    uint64_t rounds; /* of plain collectives, issued */
    char *window;    /* two slots, own heap */
    struct {
        fsdp__post_entry *p;
        int64_t n;
    } descriptions[FSDP__POSTS];
    fsdp_comm_count counts[FSDP_COLLECTIVE_COUNT];
} fsdp__lane_state;

typedef struct fsdp__pair_state {
    fsdp_work *send_head, *send_tail, *recv_head, *recv_tail;
    uint64_t sent, received; /* rounds issued */
    char *window;
} fsdp__pair_state;

struct fsdp_group {
    char *name;
    int rank, size;
    int *ranks;         /* (size), world ranks */
    fsdp__world *world; /* NULL: one rank alone */
    int64_t slot;
    fsdp__member_page **members;     /* (size), peers' read-only views, own writable */
    int64_t part_offset, part_bytes; /* of the gather area */
    fsdp__heap *shared;              /* of the part; NULL until first used */
    uint64_t released;
    double timeout;
    fsdp__lane_state lanes[FSDP_LANE_COUNT];
    fsdp__pair_state *pairs; /* (size) */
    fsdp_work *live;
};

typedef struct fsdp__comm_state {
    fsdp__world *world;  /* NULL: one rank */
    fsdp_group **groups; /* [0] is the world's */
    int64_t n_groups, cap;
    bool joined;
    fsdp__comm_disturb disturb;
    void *disturb_arg;
    fsdp__comm_schedule schedule;
    void *schedule_arg;
} fsdp__comm_state;

/* The current context's, made on first use. NULL: error kept. */
fsdp__comm_state *fsdp__comm_state_get(void);
/* Forgets the world and all groups. */
void fsdp__comm_state_clear(fsdp__comm_state *s);
/* The same if it is there, else NULL. */
fsdp__comm_state *fsdp__comm_state_peek(void);

const char *fsdp__lane_name(fsdp_lane l);
const char *fsdp__collective_name(fsdp_collective c);

/* segment.c */
fsdp_status fsdp__layout_make(int world_size, fsdp__layout *out);
fsdp_status fsdp__segment_map_threads(int world_size, fsdp__segment *out);
fsdp_status fsdp__segment_map_fd(int fd, int rank, int world_size, fsdp__segment *out);
void fsdp__segment_unmap(fsdp__segment *s);
void fsdp__segment_view(const fsdp__segment *whole, int rank, fsdp__segment *out);
fsdp__world *fsdp__world_join(const fsdp__segment *s, int rank);
void fsdp__world_leave(fsdp__world *w);
void fsdp__world_free(fsdp__world *w);
fsdp__segment_head *fsdp__head(const fsdp__world *w);
fsdp__rank_page *fsdp__rank_page_of(const fsdp__world *w, int rank);
fsdp__member_page *fsdp__member_page_of(const fsdp__world *w, int64_t slot, int rank);
fsdp__pair_page *fsdp__pair_page_of(const fsdp_group *g, int owner, int peer);
static inline const void *fsdp__at(const fsdp__world *w, int64_t offset)
{
    return w->seg.ro + offset;
}
/* Offset in the segment of own memory at p, -1 if p lies elsewhere. */
int64_t fsdp__offset_of(const fsdp__world *w, const void *p, int64_t bytes);
bool fsdp__process_dead(uint64_t pid, uint64_t start);
void fsdp__text_set(fsdp__text *t, const char *s);
void fsdp__text_get(const fsdp__text *t, char out[FSDP__LABEL]);

/* wait.c */
void fsdp__publish(fsdp_group *g, _Atomic uint64_t *word, uint64_t value);
void fsdp__ring(const fsdp__world *w, int rank);
fsdp_status fsdp__abort_check(const fsdp__world *w, const char *where);
void fsdp__abort_clear(fsdp__world *w);
/* Polls done(arg) (1, 0, -1) until it is not 0, a peer is found dead, or time is up. */
fsdp_status fsdp__wait(fsdp_group *g, int (*done)(void *arg), void *arg, const fsdp_work *w);
void fsdp__work_where(const fsdp_work *w, char *out, size_t size);

/* group.c */
fsdp_group *fsdp__group_new(fsdp__comm_state *s, const char *name, const int *ranks, int n,
                            int my_rank, fsdp__world *w, int64_t slot);
void fsdp__group_free(fsdp_group *g);

/* work.c */
fsdp_work *fsdp__work_new(fsdp_group *g, fsdp_lane lane, fsdp_collective c, const char *label,
                          const fsdp__work_kind *kind);
/* Refuses while an error is kept, calls the disturber. */
fsdp_status fsdp__issue_check(fsdp_group *g, fsdp_lane lane, fsdp_collective c, const char *label);
/* Queues w and lets it begin. out NULL: waits. On failure w is gone. */
fsdp_status fsdp__work_issue(fsdp_work *w, fsdp_work **out);
void fsdp__work_free(fsdp_work *w);
fsdp_status fsdp__group_progress(fsdp_group *g);
/* True when every peer's counter (offset in fsdp__lane_page) has reached value. */
bool fsdp__peers_reached(fsdp_work *w, size_t counter, uint64_t value, const char *what);
bool fsdp__all_before_finished(fsdp_work *w);
fsdp__lane_page *fsdp__own_lane(const fsdp_group *g, fsdp_lane l);
/* Waits until every peer is done with all that this rank called. */
fsdp_status fsdp__group_drain(fsdp_group *g);

/* list.c */
int64_t fsdp__rows_begin(const fsdp_list_entry *e, int r);
int64_t fsdp__rows_count(const fsdp_list_entry *e, int r);
fsdp_status fsdp__list_check(const char *what, const fsdp_group *g, const fsdp_list_entry *e,
                             int n);

/* p2p.c */
fsdp_status fsdp__p2p_progress(fsdp_group *g);

/* count.c */
void fsdp__count(fsdp_group *g, fsdp_lane l, fsdp_collective c, int64_t elements, int64_t bytes);

/* self.c: one rank alone; nothing is moved and nothing counted */
fsdp_status fsdp__self_gather(const fsdp_list_entry *e, int n);
fsdp_status fsdp__self_reduce(fsdp_list_entry *e, int n, float scale, int add);
fsdp_status fsdp__self_all_reduce(fsdp_list_entry *e, int n, float scale);
fsdp_status fsdp__self_copy(const void *send, void *recv, int64_t bytes);
fsdp_status fsdp__self_shared_take(int64_t bytes, const char *what, fsdp_shared *out);
void fsdp__self_shared_give(const fsdp_shared *s);

#endif
