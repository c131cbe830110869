#include "lane.h"

#include <string.h>
#include <time.h>

#include "fault.h"
#include "hints.h"
#include "kiwi_preload.h"
#include "move.h"
#include "real.h"

#define POLL_NS 30000 /* a chunk takes milliseconds */

CUresult kp_lane_open(struct kp_lane *lane, struct kp_ctx *ctx) {
    *lane = (struct kp_lane){.ctx = ctx};
    CUresult rc = kp_ctx_prepare(ctx);
    if (rc == CUDA_SUCCESS) rc = kp_ctx_push(ctx);
    if (rc != CUDA_SUCCESS) return rc;
    for (int i = 0; i < KP_LANE_DEPTH && rc == CUDA_SUCCESS; i++)
        rc = kp_real.cuEventCreate(&lane->events[i], CU_EVENT_DISABLE_TIMING);
    if (rc != CUDA_SUCCESS) kp_lane_close(lane);
    return rc;
}

void kp_lane_close(struct kp_lane *lane) {
    for (int i = 0; i < KP_LANE_DEPTH; i++) {
        if (lane->events[i]) kp_real.cuEventDestroy_v2(lane->events[i]);
    }
    kp_ctx_pop(lane->ctx);
    *lane = (struct kp_lane){0};
}

bool kp_lane_full(const struct kp_lane *lane) { return lane->count == KP_LANE_DEPTH; }

static CUresult submitted(struct kp_lane *lane, struct kp_flight flight) {
    unsigned slot = (lane->first + lane->count) % KP_LANE_DEPTH;
    CUresult rc = kp_real.cuEventRecord(lane->events[slot], lane->ctx->stream);
    if (rc != CUDA_SUCCESS) return rc;
    lane->flights[slot] = flight;
    lane->count++;
    return rc;
}

static bool wanted(const struct kp_lane *lane, const struct kp_chunk *c, size_t leaf, kp_changed_fn changed) {
    return !kp_blank(c, leaf) && (!changed || changed(lane->ctx, c, leaf));
}

/* The end of the run of leaves from `leaf` on that are all to be copied, or all not. */
static size_t run_end(const struct kp_lane *lane, const struct kp_chunk *c, size_t leaf, size_t end, bool is,
                      kp_changed_fn changed) {
    while (leaf < end && wanted(lane, c, leaf, changed) == is) leaf++;
    return leaf;
}

static CUresult extent_out(struct kp_lane *lane, struct kp_flight f, struct kp_extent e, size_t offset,
                           kp_changed_fn changed) {
    CUresult rc = CUDA_SUCCESS;
    size_t bytes = f.chunk->bytes - offset < e.bytes ? f.chunk->bytes - offset : e.bytes;
    if (!changed && !kp_blank_bytes(f.chunk)) {
        kp_move_count(bytes, 0);
        return kp_real.cuMemcpyDtoHAsync_v2(e.at, f.at + offset, bytes, lane->ctx->stream);
    }
    size_t first = offset / KP_LEAF_BYTES, end = first + bytes / KP_LEAF_BYTES;
    for (size_t leaf = first, to; leaf < end && rc == CUDA_SUCCESS; leaf = to) {
        bool copy = wanted(lane, f.chunk, leaf, changed);
        to = run_end(lane, f.chunk, leaf, end, copy, changed);
        size_t n = (to - leaf) * KP_LEAF_BYTES;
        kp_move_count(copy ? n : 0, copy ? 0 : n);
        if (copy)
            rc = kp_real.cuMemcpyDtoHAsync_v2(e.at + (leaf - first) * KP_LEAF_BYTES, f.at + leaf * KP_LEAF_BYTES,
                                              n, lane->ctx->stream);
    }
    return rc;
}

CUresult kp_lane_out(struct kp_lane *lane, struct kp_flight f, kp_changed_fn changed) {
    CUresult rc = kp_fault(KP_FAULT_COPY_OUT) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    size_t offset = 0;
    for (unsigned i = 0; i < f.chunk->copy.count && rc == CUDA_SUCCESS; i++) {
        rc = extent_out(lane, f, f.chunk->copy.extents[i], offset, changed);
        offset += f.chunk->copy.extents[i].bytes;
    }
    return rc == CUDA_SUCCESS ? submitted(lane, f) : rc;
}

static CUresult extent_in(struct kp_lane *lane, struct kp_flight f, struct kp_extent e, size_t offset, size_t bytes) {
    if (!kp_blank_bytes(f.chunk)) return kp_real.cuMemcpyHtoDAsync_v2(f.at + offset, e.at, bytes, lane->ctx->stream);
    CUresult rc = CUDA_SUCCESS;
    size_t first = offset / KP_LEAF_BYTES, end = first + bytes / KP_LEAF_BYTES;
    for (size_t leaf = first, to; leaf < end && rc == CUDA_SUCCESS; leaf = to) {
        to = kp_blank_run(f.chunk, leaf, end);
        if (kp_blank(f.chunk, leaf)) continue;
        rc = kp_real.cuMemcpyHtoDAsync_v2(f.at + leaf * KP_LEAF_BYTES, e.at + (leaf - first) * KP_LEAF_BYTES,
                                          (to - leaf) * KP_LEAF_BYTES, lane->ctx->stream);
    }
    return rc;
}

CUresult kp_lane_in(struct kp_lane *lane, struct kp_flight f) {
    CUresult rc = kp_fault(KP_FAULT_COPY_IN) ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    size_t offset = 0;
    for (unsigned i = 0; i < f.chunk->copy.count && rc == CUDA_SUCCESS; i++) {
        struct kp_extent e = f.chunk->copy.extents[i];
        size_t n = f.chunk->bytes - offset < e.bytes ? f.chunk->bytes - offset : e.bytes;
        rc = extent_in(lane, f, e, offset, n);
        offset += n;
    }
    return rc == CUDA_SUCCESS ? submitted(lane, f) : rc;
}

static bool wait_a_little(int64_t until_ns) {
    if (kp_now_ns() >= until_ns) return false;
    nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    return true;
}

CUresult kp_lane_land(struct kp_lane *lane, int64_t until_ns, struct kp_flight *flight) {
    CUresult rc;
    do {
        rc = kp_fault(KP_FAULT_STALL) ? CUDA_ERROR_NOT_READY
                                      : kp_real.cuEventQuery(lane->events[lane->first]);
    } while (rc == CUDA_ERROR_NOT_READY && wait_a_little(until_ns));
    *flight = lane->flights[lane->first];
    if (rc != CUDA_SUCCESS) return rc;
    lane->first = (lane->first + 1) % KP_LANE_DEPTH;
    lane->count--;
    return rc;
}

CUresult kp_lane_wait(struct kp_lane *lane, int64_t until_ns) {
    CUresult rc;
    do {
        rc = kp_fault(KP_FAULT_STALL) ? CUDA_ERROR_NOT_READY : kp_real.cuStreamQuery(lane->ctx->stream);
    } while (rc == CUDA_ERROR_NOT_READY && wait_a_little(until_ns));
    return rc;
}

CUresult kp_lane_drain(struct kp_lane *lane, int64_t until_ns) {
    CUresult rc = kp_lane_wait(lane, until_ns);
    if (rc == CUDA_SUCCESS) lane->count = 0;
    return rc;
}
