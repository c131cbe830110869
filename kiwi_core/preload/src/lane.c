#include "lane.h"

#include <string.h>
#include <time.h>

#include "fault.h"
#include "kiwi_preload.h"
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

static CUresult copy(struct kp_lane *lane, struct kp_flight f, bool out) {
    CUresult rc = CUDA_SUCCESS;
    size_t offset = 0;
    for (unsigned i = 0; i < f.chunk->copy.count && rc == CUDA_SUCCESS; i++) {
        struct kp_extent e = f.chunk->copy.extents[i];
        size_t left = f.chunk->bytes - offset, n = left < e.bytes ? left : e.bytes;
        rc = out ? kp_real.cuMemcpyDtoHAsync_v2(e.at, f.at + offset, n, lane->ctx->stream)
                 : kp_real.cuMemcpyHtoDAsync_v2(f.at + offset, e.at, n, lane->ctx->stream);
        offset += n;
    }
    return rc == CUDA_SUCCESS ? submitted(lane, f) : rc;
}

CUresult kp_lane_out(struct kp_lane *lane, struct kp_flight f) {
    return kp_fault(KP_FAULT_COPY_OUT) ? CUDA_ERROR_UNKNOWN : copy(lane, f, true);
}

CUresult kp_lane_in(struct kp_lane *lane, struct kp_flight f) {
    return kp_fault(KP_FAULT_COPY_IN) ? CUDA_ERROR_UNKNOWN : copy(lane, f, false);
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

CUresult kp_lane_drain(struct kp_lane *lane, int64_t until_ns) {
    CUresult rc;
    do {
        rc = kp_fault(KP_FAULT_STALL) ? CUDA_ERROR_NOT_READY : kp_real.cuStreamQuery(lane->ctx->stream);
    } while (rc == CUDA_ERROR_NOT_READY && wait_a_little(until_ns));
    if (rc == CUDA_SUCCESS) lane->count = 0;
    return rc;
}
