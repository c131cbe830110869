/* The way out.
 *
 * Of both ways: which bytes count is at all times one thing: a chunk that is KP_IN counts in the GPU, any other in
 * its host copy.  Out: a chunk changes sides when its copy is complete, just before it is unmapped.
 * In: all chunks change sides together, when every copy is complete.
 */
#include <stdio.h>

#include "kiwi_preload.h"
#include "log.h"
#include "pass.h"
#include "real.h"

#define BRING_BACK_NS (60 * KP_SECOND_NS)

static uint64_t host_need(const struct kp_pass *p) {
    uint64_t need = 0;
    for (size_t i = 0; i < p->block_count; i++) {
        const struct kp_block *b = p->blocks[i];
        for (unsigned k = 0; k < b->chunk_count; k++)
            if (b->chunks[k].where != KP_OUT && !b->chunks[k].copy.count) need += b->chunks[k].bytes;
    }
    return need;
}

static bool all_in(const struct kp_pass *p) {
    for (size_t i = 0; i < p->block_count; i++) {
        for (unsigned k = 0; k < p->blocks[i]->chunk_count; k++)
            if (p->blocks[i]->chunks[k].where != KP_IN) return false;
    }
    return true;
}

static CUresult leave(struct kp_pass *p, struct kp_flight f) { /* its copy is complete */
    CUresult rc = kp_physical_unmap(f.at, f.chunk->bytes);
    if (rc != CUDA_SUCCESS) return rc;
    kp_bytes_moved(f.chunk, KP_OUT);
    p->bytes += f.chunk->bytes;
    return rc;
}

static CUresult land_out(struct kp_pass *p, struct kp_lane *lane) {
    struct kp_flight f;
    CUresult rc = kp_lane_land(lane, p->until_ns, &f);
    return rc == CUDA_SUCCESS ? leave(p, f) : rc;
}

static CUresult send_out(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    if (c->where == KP_OUT) return CUDA_SUCCESS;
    if (c->where == KP_ARRIVING) return leave(p, f); /* a way in that was broken off: the copy is what counts */
    if (kp_now_ns() >= p->until_ns) return CUDA_ERROR_NOT_READY;
    CUresult rc = kp_lane_full(lane) ? land_out(p, lane) : CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS) return rc;
    if (!c->copy.count && !kp_arena_take(&c->copy, c->bytes)) {
        p->host_full = true;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return kp_lane_out(lane, f);
}

/* Copies that were begun and are not whole are of no use; while they may still be written to, their
 * memory is not for others. */
static void forget_unfinished(struct kp_pass *p, struct kp_ctx *ctx) {
    for (size_t i = 0; i < p->block_count; i++) {
        struct kp_block *b = p->blocks[i];
        for (unsigned k = 0; b->ctx == ctx && k < b->chunk_count; k++)
            if (b->chunks[k].where == KP_IN) kp_arena_give(&b->chunks[k].copy);
    }
}

static CUresult context_out(struct kp_pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns); /* what an earlier pass may have left under way */
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, send_out);
    while (rc == CUDA_SUCCESS && lane.count) rc = land_out(p, &lane);
    if (rc != CUDA_SUCCESS && kp_lane_drain(&lane, kp_now_ns() + KP_GRACE_NS) == CUDA_SUCCESS) forget_unfinished(p, ctx);
    kp_lane_close(&lane);
    return rc;
}

/* A context with a sticky error can read nothing any more: room for others is all that its memory is good for. */
static CUresult release(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    (void)lane;
    if (c->where != KP_OUT) {
        if (kp_physical_unmap(f.at, c->bytes) != CUDA_SUCCESS) return CUDA_SUCCESS; /* the others all the same */
        p->bytes += c->bytes;
    }
    kp_arena_give(&c->copy);
    kp_bytes_moved(c, KP_OUT);
    return CUDA_SUCCESS;
}

/* Whether a context is broken: then its memory is gone, and the outcome says why. */
static bool release_broken(struct kp_pass *p) {
    CUresult error = CUDA_SUCCESS;
    for (size_t i = 0; i < p->context_count; i++) {
        CUresult rc = kp_ctx_synchronize(p->contexts[i]); /* all has settled: this only asks */
        if (!kp_move_sticky(rc)) continue;
        error = rc;
        kp_pass_each(p, NULL, p->contexts[i], release);
    }
    if (error == CUDA_SUCCESS) return false;
    char words[160];
    snprintf(words, sizeof words, "the program's own GPU code failed with CUDA error %d, after which no call works", (int)error);
    kp_pass_refuse(p->outcome, "driver", words, error);
    p->outcome->what = KP_LOST;
    return true;
}

void kp_move_out(int64_t until_ns, struct kp_outcome *o) {
    struct kp_pass p;
    if (!kp_pass_begin(&p, until_ns, o)) {
        kp_pass_refuse(o, "no-host-memory", "no memory to work with", CUDA_SUCCESS);
        kp_pass_end(&p);
        return;
    }
    if (release_broken(&p)) {
        kp_pass_end(&p);
        return;
    }
    CUresult rc = CUDA_SUCCESS;
    bool all_was_in = all_in(&p);
    if (host_need(&p) > kp_arena_room()) {
        kp_pass_refuse(o, "no-host-memory", "system memory cannot hold what is in the GPU", CUDA_SUCCESS);
        kp_pass_end(&p);
        return;
    }
    for (size_t i = 0; i < p.context_count && rc == CUDA_SUCCESS; i++) rc = context_out(&p, p.contexts[i]);
    if (rc != CUDA_SUCCESS) {
        bool host = p.host_full;
        kp_pass_refuse(o, host ? "no-host-memory" : "driver",
               host                         ? "system memory ran out on the way"
               : rc == CUDA_ERROR_NOT_READY ? "the time limit was over before everything was copied"
                                            : "copying out failed",
               host || rc == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : rc);
        p.until_ns = kp_now_ns() + BRING_BACK_NS;
        p.bytes = 0;
        if (all_was_in && kp_pass_all_in(&p) != CUDA_SUCCESS) kp_note("page-out broken off; part of it stays out for now");
    }
    kp_pass_end(&p);
}

