/* Copies ahead of a page-out.
 *
 * Behind an armed gate no call of the program can write to GPU memory: the knowledge on which every page-out rests.
 * So memory that is copied there while the GPU is idle stays right for as long as the gate stays armed. A chunk notes
 * the gate's epoch, which changes before a gated call may pass again; a page-out in the same epoch copies nothing.
 * Only pinned memory that the arena has anyway is used, and one chunk at a time is under way: an order of the daemon
 * does not wait longer than for that. */
#include "gate/gate.h"
#include "base/kiwi_preload.h"
#include "base/real.h"
#include "owner/pass.h"

#define SETTLED_NS 50000000ll /* for the GPU to be idle; if it is not, there is another try */

static struct kp_ctx *in_flight; /* its last copy did not end in time, and may still be written */

bool kp_copied_ahead(const struct kp_chunk *c) {
    return c->where == KP_IN && c->copy.count && c->epoch == kp_gate_epoch();
}

static CUresult copy_ahead(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    if (c->where != KP_IN || kp_copied_ahead(c)) return CUDA_SUCCESS;
    if (kp_gate_epoch() != p->epoch || p->stop()) return CUDA_ERROR_NOT_READY;
    if (!c->copy.count && !kp_arena_take_pinned(&c->copy, c->bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    c->epoch = 0;
    CUresult rc = kp_flight_reach(&f);
    if (rc == CUDA_SUCCESS) rc = kp_lane_out(lane, f);
    if (rc == CUDA_SUCCESS) rc = kp_lane_land(lane, kp_now_ns() + KP_GRACE_NS, &f);
    if (rc != CUDA_SUCCESS && kp_lane_drain(lane, kp_now_ns() + KP_GRACE_NS) != CUDA_SUCCESS) in_flight = lane->ctx;
    else kp_flight_over(f);
    if (rc == CUDA_SUCCESS) c->epoch = p->epoch;
    return rc;
}

static CUresult context_ahead(struct kp_pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns); /* an earlier pass may have left copies under way */
    if (rc == CUDA_SUCCESS && in_flight == ctx) in_flight = NULL;
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, copy_ahead);
    kp_lane_close(&lane);
    return rc;
}

bool kp_move_ahead(bool (*stop)(void)) {
    struct kp_outcome o;
    struct kp_pass p;
    uint64_t epoch;
    if (!kp_gate_is_still(&epoch)) return false;
    kp_move_settle(kp_now_ns() + SETTLED_NS, &o);
    if (o.what != KP_MOVED) return false;
    CUresult rc = kp_pass_begin(&p, kp_now_ns() + SETTLED_NS, &o) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    p.epoch = epoch;
    p.stop = stop;
    for (size_t i = 0; i < p.context_count && rc == CUDA_SUCCESS; i++) rc = context_ahead(&p, p.contexts[i]);
    kp_pass_end(&p);
    return rc == CUDA_SUCCESS;
}

static void forget(struct kp_block *b, void *arg) {
    (void)arg;
    for (unsigned i = 0; i < b->chunk_count; i++)
        if (b->chunks[i].where == KP_IN) kp_arena_give(&b->chunks[i].copy);
}

void kp_move_forget_ahead(void) {
    if (in_flight) return; /* the next pass uses that host memory, or gives it back */
    pthread_mutex_lock(&kp_table_mu);
    kp_table_each(forget, NULL);
    kp_vmm_each(forget, NULL);
    pthread_mutex_unlock(&kp_table_mu);
}
