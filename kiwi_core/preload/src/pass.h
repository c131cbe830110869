/* One pass over all that is owned: what the way out and the way in have in common. */
#ifndef KP_PASS_H
#define KP_PASS_H

#include "lane.h"
#include "move.h"

#define KP_SECOND_NS 1000000000ll
#define KP_GRACE_NS (2 * KP_SECOND_NS) /* past the time limit, for copies that are already under way */

struct kp_pass {
    int64_t began_ns, until_ns;
    struct kp_outcome *outcome;
    struct kp_ctx **contexts;
    size_t context_count;
    struct kp_block **blocks; /* all there were when it began; none is ended before it is over */
    size_t block_count;
    uint64_t bytes;
    uint64_t want, chosen; /* no more chunks than make up `want`, of those `chosen` so far */
    bool host_full; /* system memory ran out, not the GPU's */
};

bool kp_pass_begin(struct kp_pass *p, int64_t until_ns, struct kp_outcome *o); /* false: no memory */
void kp_pass_end(struct kp_pass *p);
void kp_pass_refuse(struct kp_outcome *o, const char *reason, const char *what, CUresult rc);

/* Calls for each chunk of a context's live blocks until one says no. */
typedef CUresult (*kp_chunk_fn)(struct kp_pass *p, struct kp_lane *lane, struct kp_flight flight);
CUresult kp_pass_each(struct kp_pass *p, struct kp_lane *lane, struct kp_ctx *ctx, kp_chunk_fn fn);

CUresult kp_pass_all_in(struct kp_pass *p); /* move_in.c; also when the way out is broken off */

#endif
