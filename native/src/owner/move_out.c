/* Paging out.
 *
 * In both directions exactly one copy of a chunk counts at any time: the GPU's if the chunk is KP_IN, else the host
 * copy. On the way out, a chunk changes sides when its copy is complete, just after it is unmapped. On the
 * way in, all chunks change sides together, when every copy is complete.
 */
#include <stdio.h>

#include "base/kiwi_preload.h"
#include "base/log.h"
#include "base/real.h"
#include "owner/pass.h"

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

static CUresult leave(struct kp_pass *p, struct kp_flight f) { /* the chunk's copy is complete */
    CUresult rc = kp_flight_away(f);
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
    if (c->where == KP_ARRIVING) return leave(p, f); /* a page-in was broken off: the host copy counts */
    if (kp_copied_ahead(c)) return leave(p, f);
    if (kp_now_ns() >= p->until_ns) return CUDA_ERROR_NOT_READY;
    CUresult rc = kp_lane_full(lane) ? land_out(p, lane) : CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS) return rc;
    if (!c->copy.count && !kp_arena_take(&c->copy, c->bytes)) {
        p->host_full = true;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    rc = kp_flight_reach(&f);
    return rc == CUDA_SUCCESS ? kp_lane_out(lane, f) : rc;
}

/* Gives back the host memory of incomplete copies, which are of no use. Call this only when nothing can still
 * write to them. */
static void forget_unfinished(struct kp_pass *p, struct kp_ctx *ctx) {
    for (size_t i = 0; i < p->block_count; i++) {
        struct kp_block *b = p->blocks[i];
        for (unsigned k = 0; kp_pass_context(p, b) == ctx && k < b->chunk_count; k++) {
            if (b->chunks[k].where != KP_IN) continue;
            kp_flight_over((struct kp_flight){.block = b});
            kp_arena_give(&b->chunks[k].copy);
        }
    }
}

static CUresult context_out(struct kp_pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns); /* an earlier pass may have left copies under way */
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, send_out);
    while (rc == CUDA_SUCCESS && lane.count) rc = land_out(p, &lane);
    if (rc != CUDA_SUCCESS) kp_arena_expect(0);
    if (rc != CUDA_SUCCESS && kp_lane_drain(&lane, kp_now_ns() + KP_GRACE_NS) == CUDA_SUCCESS) forget_unfinished(p, ctx);
    kp_lane_close(&lane);
    return rc;
}

/* Gives back the memory of a context with a sticky error: no call can read it any more, but others need the room. */
static CUresult release(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    (void)lane;
    if (c->where != KP_OUT) {
        if (kp_flight_away(f) != CUDA_SUCCESS) return CUDA_SUCCESS; /* go on with the other chunks */
        p->bytes += c->bytes;
    }
    kp_arena_give(&c->copy);
    kp_bytes_moved(c, KP_OUT);
    return CUDA_SUCCESS;
}

/* Returns whether a context is broken; if so, its memory is given back, and the outcome says why. Objects belong to no
 * context: they are lost only with the last one that could read them. */
static bool release_broken(struct kp_pass *p) {
    CUresult error = CUDA_SUCCESS, errors[p->context_count + 1];
    struct kp_ctx *healthy = NULL;
    for (size_t i = 0; i < p->context_count; i++) {
        errors[i] = kp_ctx_synchronize(p->contexts[i]); /* all work has ended: this only gets the error */
        if (!kp_move_sticky(errors[i])) healthy = p->contexts[i];
    }
    if (healthy && p->mover) p->mover = healthy;
    for (size_t i = 0; i < p->context_count; i++) {
        if (!kp_move_sticky(errors[i])) continue;
        error = errors[i];
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
    if (p.stranded) {
        kp_pass_refuse(o, "driver", "the program has no context left, and none can be made to copy with", CUDA_SUCCESS);
        kp_pass_end(&p);
        return;
    }
    if (host_need(&p) > kp_arena_room()) {
        kp_pass_refuse(o, "no-host-memory", "system memory cannot hold what is in the GPU", CUDA_SUCCESS);
        kp_pass_end(&p);
        return;
    }
    kp_arena_expect(host_need(&p));
    for (size_t i = 0; i < p.context_count && rc == CUDA_SUCCESS; i++) rc = context_out(&p, p.contexts[i]);
    kp_arena_expect(0);
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

