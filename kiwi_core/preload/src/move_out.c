/* The way out.
 *
 * Of both ways: which bytes count is at all times one thing: a chunk that is KP_IN counts in the GPU, any other in
 * its host copy.  Out: a chunk changes sides when its copy is complete, just before it is unmapped.
 * In: all chunks change sides together, when every copy is complete.
 *
 * Of a part: what goes out is chosen by what it costs, and the state is as after a way out that was cut
 * short. */
#include <stdio.h>

#include "hints.h"
#include "kiwi_preload.h"
#include "log.h"
#include "pass.h"
#include "real.h"

#define BRING_BACK_NS (60 * KP_SECOND_NS)

static uint64_t host_need(const struct kp_pass *p) {
    uint64_t without = 0, with = 0; /* host memory of their own already */
    for (size_t i = 0; i < p->block_count; i++) {
        for (unsigned k = 0; k < p->blocks[i]->chunk_count; k++) {
            const struct kp_chunk *c = &p->blocks[i]->chunks[k];
            if (c->where == KP_IN && !c->copy.count && !kp_blank_all(c)) without += c->bytes;
            else if (c->where == KP_IN) with += c->bytes;
        }
    }
    uint64_t more = p->want > with ? p->want - with : 0;
    if (more && more < UINT64_MAX - kp_gpu.chunk_bytes) more += kp_gpu.chunk_bytes; /* whole chunks */
    return more < without ? more : without;
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
    if (f.chunk->where == KP_IN) kp_keep_left(f.block->ctx, f.chunk);
    kp_bytes_moved(f.chunk, KP_OUT);
    p->bytes += f.chunk->bytes;
    return rc;
}

static CUresult land_out(struct kp_pass *p, struct kp_lane *lane) {
    struct kp_flight f;
    CUresult rc = kp_lane_land(lane, p->until_ns, &f);
    return rc == CUDA_SUCCESS ? leave(p, f) : rc;
}

/* First all hashes that decide what is copied: the copies behind them need not wait for an answer. */
static CUresult hash_kept(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    kp_keep_begin(f.chunk);
    if (f.chunk->where == KP_IN && f.chunk->kept) kp_keep_hash(lane->ctx, f, &p->next_leaf);
    return CUDA_SUCCESS;
}

static bool late(const struct kp_pass *p) { return kp_now_ns() >= p->until_ns; }
static bool enough(const struct kp_pass *p) { return p->chosen >= p->want; }

/* First all whose copy is right, or that need none: their room is there at once, and it may be all that
 * is wanted. */
static CUresult leave_clean(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    CUresult rc = CUDA_SUCCESS;
    if (c->where == KP_OUT || enough(p)) return rc;
    if (c->where == KP_IN) {
        if (!c->kept && !kp_blank_all(c)) return rc;
        if (late(p)) return CUDA_ERROR_NOT_READY;
        rc = kp_keep_verify(lane, f, p->until_ns);
        if (rc != CUDA_SUCCESS || kp_keep_any_changed(lane->ctx, c)) return rc;
        kp_move_count(0, c->bytes);
    }
    p->chosen += c->bytes;
    return leave(p, f);
}

static CUresult send_out(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    if (late(p)) return CUDA_ERROR_NOT_READY;
    CUresult rc = kp_lane_full(lane) ? land_out(p, lane) : CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS) return rc;
    p->chosen += f.chunk->bytes;
    f.chunk->sent = true;
    return kp_lane_out(lane, f, f.chunk->kept ? kp_keep_changed : NULL);
}

/* Then those that have a copy, of which a part is right. */
static CUresult send_changed(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    bool is = f.chunk->where == KP_IN && f.chunk->kept && !enough(p);
    return is ? send_out(p, lane, f) : CUDA_SUCCESS;
}

static CUresult send_new(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    if (c->where != KP_IN || c->kept || enough(p)) return CUDA_SUCCESS;
    if (!c->copy.count && !kp_arena_take(&c->copy, c->bytes)) {
        p->host_full = true;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    kp_keep_hash(lane->ctx, f, &p->next_leaf);
    return send_out(p, lane, f);
}

/* Copies that were begun and are not whole are of no use; while they may still be written to, their
 * memory is not for others. */
static void forget_unfinished(struct kp_pass *p, struct kp_ctx *ctx, bool quiet) {
    for (size_t i = 0; i < p->block_count; i++) {
        struct kp_block *b = p->blocks[i];
        for (unsigned k = 0; b->ctx == ctx && k < b->chunk_count; k++) {
            struct kp_chunk *c = &b->chunks[k];
            if (c->where == KP_IN && (c->sent || !c->kept)) kp_keep_drop(c, quiet);
        }
    }
}

static CUresult context_out(struct kp_pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns); /* what an earlier pass may have left under way */
    p->next_leaf = 0;
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, hash_kept);
    if (rc == CUDA_SUCCESS && p->next_leaf) rc = kp_lane_drain(&lane, p->until_ns);
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, leave_clean);
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, send_changed);
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, send_new);
    while (rc == CUDA_SUCCESS && lane.count) rc = land_out(p, &lane);
    if (rc != CUDA_SUCCESS) {
        bool quiet = kp_lane_drain(&lane, kp_now_ns() + KP_GRACE_NS) == CUDA_SUCCESS;
        forget_unfinished(p, ctx, quiet);
    }
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
    kp_keep_drop(c, true);
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

static uint64_t unused_so_far(void) {
    struct kp_move_books books;
    kp_move_books(&books);
    return books.unused;
}

void kp_move_out(uint64_t least_bytes, int64_t until_ns, struct kp_outcome *o) {
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
    uint64_t unused = unused_so_far();
    if (least_bytes) p.want = least_bytes;
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
    unused = unused_so_far() - unused;
    if (unused) kp_note("of what went out, %llu MiB were free and not copied", (unsigned long long)unused >> 20);
    kp_pass_end(&p);
}

