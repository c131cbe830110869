#include "owner/pass.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/kiwi_preload.h"
#include "base/real.h"
#include "base/tested.h"

/* Returns whether the pass holds the context. A context that is being destroyed is not held, and its blocks may
 * vanish at any time. */
static bool held(const struct kp_pass *p, const struct kp_ctx *ctx) {
    for (size_t i = 0; i < p->context_count; i++)
        if (p->contexts[i] == ctx) return true;
    return false;
}

struct kp_ctx *kp_pass_context(const struct kp_pass *p, const struct kp_block *b) {
    return b->object ? p->mover : b->ctx;
}

static void remember(struct kp_block *b, void *arg) {
    struct kp_pass *p = arg;
    if (!b->stays && held(p, kp_pass_context(p, b))) p->blocks[p->block_count++] = b;
}

static void count_object(struct kp_block *b, void *arg) { *(size_t *)arg += !b->stays; }

static bool any_object(void) {
    size_t count = 0;
    pthread_mutex_lock(&kp_table_mu);
    kp_vmm_each(count_object, &count);
    pthread_mutex_unlock(&kp_table_mu);
    return count;
}

/* Objects may outlive all contexts that own memory, or all contexts: then one is lent for the pass, and added to those
 * that the pass holds. */
static void find_mover(struct kp_pass *p) {
    if (!any_object()) return;
    if (!p->context_count) {
        struct kp_ctx *lent = kp_ctx_lend(&p->lent);
        free(p->contexts);
        p->contexts = lent ? malloc(sizeof *p->contexts) : NULL;
        if (p->contexts) p->contexts[p->context_count++] = lent;
        else if (lent) kp_ctx_take_back(lent, p->lent);
    }
    p->mover = p->context_count ? p->contexts[0] : NULL;
    p->stranded = !p->mover;
}

bool kp_pass_begin(struct kp_pass *p, int64_t until_ns, struct kp_outcome *o) {
    *o = (struct kp_outcome){.what = KP_MOVED, .reason = ""};
    *p = (struct kp_pass){.began_ns = kp_now_ns(), .until_ns = until_ns, .outcome = o};
    kp_own_end_dead_blocks(NULL);
    p->context_count = kp_ctx_hold_all(&p->contexts, true);
    find_mover(p);
    pthread_mutex_lock(&kp_table_mu);
    kp_vmm_await_changes();
    p->blocks = calloc(kp_table_count() + kp_vmm_count() + 1, sizeof *p->blocks);
    if (p->blocks) {
        kp_table_each(remember, p);
        kp_vmm_each(remember, p);
        kp_moving = true;
    }
    pthread_mutex_unlock(&kp_table_mu);
    return p->blocks != NULL;
}

void kp_pass_end(struct kp_pass *p) {
    pthread_mutex_lock(&kp_table_mu);
    kp_moving = false;
    kp_vmm_pass_over();
    pthread_mutex_unlock(&kp_table_mu);
    for (size_t i = 0; i < p->context_count; i++) kp_ctx_take_back(p->contexts[i], p->lent);
    free(p->contexts);
    free(p->blocks);
    kp_own_end_dead_blocks(NULL);
    kp_arena_wake();
    p->outcome->bytes = p->bytes;
    p->outcome->elapsed_ns = kp_now_ns() - p->began_ns;
}

void kp_pass_refuse(struct kp_outcome *o, const char *reason, const char *what, CUresult rc) {
    const char *words = NULL;
    if (rc != CUDA_SUCCESS) kp_real.cuGetErrorString(rc, &words);
    o->what = KP_REFUSED;
    o->reason = reason;
    snprintf(o->detail, sizeof o->detail, "%s%s%s", what, words ? ": " : "", words ? words : "");
}

static bool dead(const struct kp_block *b) { return __atomic_load_n(&b->dead, __ATOMIC_ACQUIRE); }

CUresult kp_pass_each(struct kp_pass *p, struct kp_lane *lane, struct kp_ctx *ctx, kp_chunk_fn fn) {
    CUresult rc = CUDA_SUCCESS;
    for (size_t i = 0; i < p->block_count && rc == CUDA_SUCCESS; i++) {
        struct kp_block *b = p->blocks[i];
        CUdeviceptr at = b->addr;
        if (kp_pass_context(p, b) != ctx || b->stays || dead(b)) continue;
        for (unsigned k = 0; k < b->chunk_count && rc == CUDA_SUCCESS; at += b->chunks[k++].bytes)
            rc = fn(p, lane, (struct kp_flight){b, &b->chunks[k], at});
    }
    return rc;
}

/* ---- the memory behind a chunk: mapped once by us, or anywhere by the program ---- */

CUresult kp_flight_reach(struct kp_flight *f) {
    if (!f->block->object) return CUDA_SUCCESS;
    CUresult rc = kp_object_open_for_out(f->block->object);
    f->at = f->block->addr;
    return rc;
}

CUresult kp_flight_away(struct kp_flight f) {
    return f.block->object ? kp_object_out(f.block->object) : kp_physical_unmap(f.at, f.chunk->bytes);
}

CUresult kp_flight_back(struct kp_flight *f) {
    CUresult rc = f->block->object ? kp_object_in(f->block->object) : kp_physical_map(f->at, f->chunk->bytes);
    if (f->block->object) f->at = f->block->addr;
    if (rc != CUDA_SUCCESS || f->block->object) return rc;
    rc = kp_physical_access(f->at, f->chunk->bytes);
    if (rc != CUDA_SUCCESS) kp_real.cuMemUnmap(f->at, f->chunk->bytes);
    return rc;
}

void kp_flight_over(struct kp_flight f) {
    if (f.block->object) kp_object_close(f.block->object);
}

/* ---- copies in flight ---- */

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
