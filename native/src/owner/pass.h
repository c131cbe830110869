/* A pass over all owned memory: what paging out and paging in have in common. */
#ifndef KP_PASS_H
#define KP_PASS_H

#include "owner/blocks.h"
#include "owner/move.h"

#define KP_SECOND_NS 1000000000ll
#define KP_GRACE_NS (2 * KP_SECOND_NS) /* past the time limit, for copies that are already under way */

/* A lane moves one context's memory, on a stream of the pager's own with a few copies in flight. */
#define KP_LANE_DEPTH 4

struct kp_flight { /* a chunk that is being copied */
    struct kp_block *block;
    struct kp_chunk *chunk;
    CUdeviceptr at;
};
CUresult kp_flight_reach(struct kp_flight *f); /* sets `at` for a copy out */
CUresult kp_flight_away(struct kp_flight f);   /* takes the memory away from its addresses */
CUresult kp_flight_back(struct kp_flight *f);  /* puts new memory there, and sets `at` */
void kp_flight_over(struct kp_flight f);       /* no copy is under way any more */

struct kp_lane {
    struct kp_ctx *ctx;
    CUevent events[KP_LANE_DEPTH];
    struct kp_flight flights[KP_LANE_DEPTH];
    unsigned first, count;
};

CUresult kp_lane_open(struct kp_lane *lane, struct kp_ctx *ctx); /* makes its context current */
void kp_lane_close(struct kp_lane *lane);
bool kp_lane_full(const struct kp_lane *lane);
/* Each submits the copy of a chunk. An error may leave part of it submitted. */
CUresult kp_lane_out(struct kp_lane *lane, struct kp_flight flight);
CUresult kp_lane_in(struct kp_lane *lane, struct kp_flight flight);
/* Waits for the oldest copy. NOT_READY: it was not complete by until_ns, and is still the oldest. */
CUresult kp_lane_land(struct kp_lane *lane, int64_t until_ns, struct kp_flight *flight);
/* Waits until no copy of the lane is under way; no copy is left to land then. */
CUresult kp_lane_drain(struct kp_lane *lane, int64_t until_ns);

struct kp_pass {
    int64_t began_ns, until_ns;
    struct kp_outcome *outcome;
    struct kp_ctx **contexts;
    size_t context_count;
    struct kp_ctx *mover; /* copies the objects of cuMemCreate, which belong to no context; NULL: there are none */
    bool lent;            /* the mover is there only for this pass */
    bool stranded;        /* there are objects, and no mover can be had */
    struct kp_block **blocks; /* the blocks when the pass began; none is destroyed before it is over */
    size_t block_count;
    uint64_t bytes;
    bool host_full; /* system memory ran out, not GPU memory */
    uint64_t epoch; /* copies ahead: the gate's epoch when they began, and whether something else is to do */
    bool (*stop)(void);
};

bool kp_pass_begin(struct kp_pass *p, int64_t until_ns, struct kp_outcome *o); /* false: no memory */
void kp_pass_end(struct kp_pass *p);
void kp_pass_refuse(struct kp_outcome *o, const char *reason, const char *what, CUresult rc);

/* Calls fn for each chunk of a context's live blocks, until a call returns an error. */
typedef CUresult (*kp_chunk_fn)(struct kp_pass *p, struct kp_lane *lane, struct kp_flight flight);
CUresult kp_pass_each(struct kp_pass *p, struct kp_lane *lane, struct kp_ctx *ctx, kp_chunk_fn fn);

bool kp_copied_ahead(const struct kp_chunk *c); /* ahead.c; true: its copy is as good as its memory */
/* Returns the context that moves the block. */
struct kp_ctx *kp_pass_context(const struct kp_pass *p, const struct kp_block *b);

CUresult kp_pass_all_in(struct kp_pass *p); /* move_in.c; also when a page-out is broken off */

#endif
