/* Copies out, while nobody needs the GPU, what the next way out would have to copy: it stays in the GPU,
 * and the hash tells later whether the copy is still right. */
#include "hints.h"
#include "kiwi_preload.h"
#include "pass.h"

/* Hashing a chunk takes about as long as copying this part of it. */
#define HASH_PART 16

static CUdeviceptr cursor; /* where the next slice goes on */
static uint64_t most;      /* of this slice, in bytes copied */
static uint64_t spent;
static CUdeviceptr from, to;

static CUresult copy(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    c->sent = true; /* until it is whole, the copy is not what the digests say */
    CUresult rc = kp_lane_out(lane, f, c->kept ? kp_keep_changed : NULL);
    if (rc == CUDA_SUCCESS) rc = kp_lane_drain(lane, p->until_ns);
    if (rc == CUDA_SUCCESS) {
        kp_keep_cleaned(lane->ctx, c);
        p->bytes += c->bytes;
        spent += c->bytes;
        return rc;
    }
    bool quiet = kp_lane_drain(lane, kp_now_ns() + KP_GRACE_NS) == CUDA_SUCCESS;
    kp_keep_drop(c, quiet);
    return rc;
}

static CUresult clean_one(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    if (f.at < from || f.at >= to || c->where != KP_IN || kp_blank_all(c)) return CUDA_SUCCESS;
    if (spent >= most || kp_now_ns() >= p->until_ns) {
        cursor = f.at;
        return CUDA_ERROR_NOT_READY;
    }
    kp_keep_begin(c);
    p->next_leaf = 0;
    kp_keep_hash(lane->ctx, f, &p->next_leaf);
    if (c->first_leaf == KP_NO_LEAF) return CUDA_SUCCESS; /* nobody could tell later what it is worth */
    spent += c->bytes / HASH_PART;
    if (c->kept) {
        CUresult rc = kp_lane_drain(lane, p->until_ns);
        if (rc != CUDA_SUCCESS || !kp_keep_any_changed(lane->ctx, c)) return rc;
    }
    bool may = p->keep && kp_keep_room(c->kept ? 0 : c->bytes);
    if (!c->copy.count && (!may || !kp_arena_take(&c->copy, c->bytes))) return CUDA_ERROR_OUT_OF_MEMORY;
    return copy(p, lane, f);
}

static CUresult stretch(struct kp_pass *p, CUdeviceptr begin, CUdeviceptr end) {
    CUresult rc = CUDA_SUCCESS;
    from = begin, to = end;
    for (size_t i = 0; i < p->context_count && rc == CUDA_SUCCESS; i++) {
        struct kp_lane lane;
        rc = kp_lane_open(&lane, p->contexts[i]);
        if (rc != CUDA_SUCCESS) return rc;
        rc = kp_lane_drain(&lane, p->until_ns);
        if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, p->contexts[i], clean_one);
        if (kp_lane_drain(&lane, kp_now_ns() + KP_GRACE_NS) != CUDA_SUCCESS && rc == CUDA_SUCCESS)
            rc = CUDA_ERROR_NOT_READY;
        kp_lane_close(&lane);
    }
    return rc;
}

bool kp_move_clean(uint64_t most_bytes, int64_t until_ns, struct kp_outcome *o) {
    struct kp_pass p;
    CUresult rc = kp_pass_begin(&p, until_ns, o) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr start = cursor;
    most = most_bytes, spent = 0;
    p.keep = rc == CUDA_SUCCESS && kp_host_to_spare(0);
    if (rc == CUDA_SUCCESS) rc = stretch(&p, start, UINT64_MAX);
    if (rc == CUDA_SUCCESS) rc = stretch(&p, 0, start);
    if (rc == CUDA_SUCCESS) cursor = 0;
    if (rc == CUDA_ERROR_OUT_OF_MEMORY)
        kp_pass_refuse(o, "no-host-memory", "no system memory to spare", CUDA_SUCCESS);
    else if (rc != CUDA_SUCCESS && rc != CUDA_ERROR_NOT_READY)
        kp_pass_refuse(o, "driver", "copying failed", rc);
    kp_pass_end(&p);
    return rc == CUDA_ERROR_NOT_READY;
}
