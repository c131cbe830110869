/* A stream of the pager's own with a few copies in flight: one context's way out or in. */
#ifndef KP_LANE_H
#define KP_LANE_H

#include "blocks.h"

#define KP_LANE_DEPTH 4

struct kp_flight { /* one chunk on its way */
    struct kp_block *block;
    struct kp_chunk *chunk;
    CUdeviceptr at;
};
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
/* Waits for the oldest.  NOT_READY: not by until_ns, and it is still the oldest. */
CUresult kp_lane_land(struct kp_lane *lane, int64_t until_ns, struct kp_flight *flight);
/* Waits until nothing submitted here is under way; nothing is to be landed any more. */
CUresult kp_lane_drain(struct kp_lane *lane, int64_t until_ns);

#endif
