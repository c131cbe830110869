/* The way out and the way in.
 *
 * Which bytes count is at all times one thing: a chunk that is KP_IN counts in the GPU, any other in
 * its host copy.  Out: a chunk changes sides when its copy is complete, just before it is unmapped.
 * In: all chunks change sides together, when every copy is complete. */
#include "move.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kiwi_preload.h"
#include "keep.h"
#include "log.h"
#include "real.h"

#define SECOND_NS 1000000000ll
#define GRACE_NS (2 * SECOND_NS) /* past the time limit, for copies that are already under way */
#define BRING_BACK_NS (60 * SECOND_NS)
#define SCRUB_WAIT_NS 200000000ll /* the driver scrubs freed memory before it can be had again */
#define SCRUB_STEP_NS 5000000ll

struct pass {
    int64_t began_ns, until_ns;
    struct kp_outcome *outcome;
    struct kp_ctx **contexts;
    size_t context_count;
    struct kp_block **blocks; /* all there were when it began; none is ended before it is over */
    size_t block_count;
    uint64_t bytes;
    size_t next_leaf;
};

static struct kp_move_books done;

/* ---- beginning and ending a pass ------------------------------------------------------------------ */

static void remember(struct kp_block *b, void *arg) {
    struct pass *p = arg;
    if (b->ctx) p->blocks[p->block_count++] = b;
}

static bool begin(struct pass *p, int64_t until_ns, struct kp_outcome *o) {
    *o = (struct kp_outcome){.what = KP_MOVED, .reason = ""};
    *p = (struct pass){.began_ns = kp_now_ns(), .until_ns = until_ns, .outcome = o};
    kp_own_bury(NULL);
    p->context_count = kp_ctx_hold_all(&p->contexts);
    pthread_mutex_lock(&kp_table_mu);
    p->blocks = calloc(kp_table_count() + 1, sizeof *p->blocks);
    if (p->blocks) {
        kp_table_each(remember, p);
        kp_moving = true;
    }
    pthread_mutex_unlock(&kp_table_mu);
    return p->blocks != NULL;
}

static void end(struct pass *p) {
    pthread_mutex_lock(&kp_table_mu);
    kp_moving = false;
    pthread_mutex_unlock(&kp_table_mu);
    for (size_t i = 0; i < p->context_count; i++) kp_ctx_let_go(p->contexts[i]);
    free(p->contexts);
    free(p->blocks);
    kp_own_bury(NULL);
    p->outcome->bytes = p->bytes;
    p->outcome->elapsed_ns = kp_now_ns() - p->began_ns;
}

static void refuse(struct kp_outcome *o, const char *reason, const char *what, CUresult rc) {
    const char *words = NULL;
    if (rc != CUDA_SUCCESS) kp_real.cuGetErrorString(rc, &words);
    o->what = KP_REFUSED;
    o->reason = reason;
    snprintf(o->detail, sizeof o->detail, "%s%s%s", what, words ? ": " : "", words ? words : "");
}

static bool dead(const struct kp_block *b) { return __atomic_load_n(&b->dead, __ATOMIC_ACQUIRE); }

/* Calls for each chunk of a context's live blocks until one says no. */
typedef CUresult (*chunk_fn)(struct pass *p, struct kp_lane *lane, struct kp_flight flight);

static CUresult each_chunk(struct pass *p, struct kp_lane *lane, struct kp_ctx *ctx, chunk_fn fn) {
    CUresult rc = CUDA_SUCCESS;
    for (size_t i = 0; i < p->block_count && rc == CUDA_SUCCESS; i++) {
        struct kp_block *b = p->blocks[i];
        CUdeviceptr at = b->addr;
        if (b->ctx != ctx || dead(b)) continue;
        for (unsigned k = 0; k < b->chunk_count && rc == CUDA_SUCCESS; at += b->chunks[k++].bytes)
            rc = fn(p, lane, (struct kp_flight){b, &b->chunks[k], at});
    }
    return rc;
}

/* ---- out -------------------------------------------------------------------------------------------- */

static uint64_t to_copy(const struct pass *p) {
    uint64_t sum = 0;
    for (size_t i = 0; i < p->block_count; i++) {
        for (unsigned k = 0; k < p->blocks[i]->chunk_count; k++) {
            const struct kp_chunk *c = &p->blocks[i]->chunks[k];
            if (c->where == KP_IN && !c->copy.count) sum += c->bytes;
        }
    }
    return sum;
}

static CUresult leave(struct pass *p, struct kp_flight f) { /* its copy is complete */
    CUresult rc = kp_physical_unmap(f.at, f.chunk->bytes);
    if (rc != CUDA_SUCCESS) return rc;
    if (f.chunk->where == KP_IN) kp_keep_left(f.block->ctx, f.chunk);
    kp_bytes_moved(f.chunk, KP_OUT);
    p->bytes += f.chunk->bytes;
    return rc;
}

static CUresult land_out(struct pass *p, struct kp_lane *lane) {
    struct kp_flight f;
    CUresult rc = kp_lane_land(lane, p->until_ns, &f);
    return rc == CUDA_SUCCESS ? leave(p, f) : rc;
}

/* First all hashes that decide what is copied: the copies behind them need not wait for an answer. */
static CUresult hash_kept(struct pass *p, struct kp_lane *lane, struct kp_flight f) {
    kp_keep_begin(f.chunk);
    if (f.chunk->where == KP_IN && f.chunk->kept) kp_keep_hash(lane->ctx, f, &p->next_leaf);
    return CUDA_SUCCESS;
}

static CUresult send_out(struct pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_chunk *c = f.chunk;
    if (c->where == KP_OUT) return CUDA_SUCCESS;
    if (c->where == KP_ARRIVING) return leave(p, f);
    if (kp_now_ns() >= p->until_ns) return CUDA_ERROR_NOT_READY;
    CUresult rc = kp_lane_full(lane) ? land_out(p, lane) : CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS) rc = kp_keep_verify(lane, f, p->until_ns);
    if (rc != CUDA_SUCCESS) return rc;
    if (!c->copy.count && !kp_arena_take(&c->copy, c->bytes))
        return CUDA_ERROR_OUT_OF_MEMORY; /* of the host: nothing on this way asks the GPU for any */
    if (!c->kept) kp_keep_hash(lane->ctx, f, &p->next_leaf);
    else if (!kp_keep_any_changed(lane->ctx, c)) {
        kp_move_count(0, c->bytes);
        return leave(p, f);
    }
    c->sent = true;
    return kp_lane_out(lane, f, c->kept ? kp_keep_changed : NULL);
}

/* Copies that were begun and are not whole are of no use; while they may still be written to, their
 * memory is not for others. */
static void forget_unfinished(struct pass *p, struct kp_ctx *ctx, bool quiet) {
    for (size_t i = 0; i < p->block_count; i++) {
        struct kp_block *b = p->blocks[i];
        for (unsigned k = 0; b->ctx == ctx && k < b->chunk_count; k++) {
            struct kp_chunk *c = &b->chunks[k];
            if (c->where == KP_IN && (c->sent || !c->kept)) kp_keep_drop(c, quiet);
        }
    }
}

static CUresult context_out(struct pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns); /* what an earlier pass may have left under way */
    p->next_leaf = 0;
    if (rc == CUDA_SUCCESS) rc = each_chunk(p, &lane, ctx, hash_kept);
    if (rc == CUDA_SUCCESS && p->next_leaf) rc = kp_lane_drain(&lane, p->until_ns);
    if (rc == CUDA_SUCCESS) rc = each_chunk(p, &lane, ctx, send_out);
    while (rc == CUDA_SUCCESS && lane.count) rc = land_out(p, &lane);
    if (rc != CUDA_SUCCESS) {
        bool quiet = kp_lane_drain(&lane, kp_now_ns() + GRACE_NS) == CUDA_SUCCESS;
        forget_unfinished(p, ctx, quiet);
    }
    kp_lane_close(&lane);
    return rc;
}

static CUresult all_in(struct pass *p);

void kp_move_out(int64_t until_ns, struct kp_outcome *o) {
    struct pass p;
    if (!begin(&p, until_ns, o)) {
        refuse(o, "no-host-memory", "no memory to work with", CUDA_SUCCESS);
        end(&p);
        return;
    }
    CUresult rc = CUDA_SUCCESS;
    uint64_t need = to_copy(&p);
    if (need > kp_arena_room()) {
        refuse(o, "no-host-memory", "system memory cannot hold what is in the GPU", CUDA_SUCCESS);
        end(&p);
        return;
    }
    for (size_t i = 0; i < p.context_count && rc == CUDA_SUCCESS; i++) rc = context_out(&p, p.contexts[i]);
    if (rc != CUDA_SUCCESS) {
        bool host = rc == CUDA_ERROR_OUT_OF_MEMORY;
        refuse(o, host ? "no-host-memory" : "driver",
               host                         ? "system memory ran out on the way"
               : rc == CUDA_ERROR_NOT_READY ? "the time limit was over before everything was copied"
                                            : "copying out failed",
               host || rc == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : rc);
        p.until_ns = kp_now_ns() + BRING_BACK_NS;
        p.bytes = 0;
        if (all_in(&p) != CUDA_SUCCESS) kp_note("page-out broken off; part of it stays out for now");
    }
    end(&p);
}

/* ---- in --------------------------------------------------------------------------------------------- */

static CUresult map_again(struct pass *p, struct kp_flight f) {
    int64_t limit = kp_now_ns() + SCRUB_WAIT_NS;
    if (limit > p->until_ns) limit = p->until_ns;
    CUresult rc = kp_physical_map(f.at, f.chunk->bytes);
    while (rc == CUDA_ERROR_OUT_OF_MEMORY && kp_now_ns() < limit) {
        nanosleep(&(struct timespec){.tv_nsec = SCRUB_STEP_NS}, NULL);
        rc = kp_physical_map(f.at, f.chunk->bytes);
    }
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_physical_access(f.at, f.chunk->bytes);
    if (rc == CUDA_SUCCESS) kp_bytes_moved(f.chunk, KP_ARRIVING);
    else kp_real.cuMemUnmap(f.at, f.chunk->bytes);
    return rc;
}

static CUresult send_in(struct pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_flight landed;
    CUresult rc = CUDA_SUCCESS;
    if (f.chunk->where == KP_IN) return rc;
    if (f.chunk->where == KP_OUT) rc = map_again(p, f); /* while earlier copies run */
    if (rc == CUDA_SUCCESS && kp_lane_full(lane)) rc = kp_lane_land(lane, p->until_ns, &landed);
    if (rc == CUDA_SUCCESS) rc = kp_lane_in(lane, f);
    if (rc == CUDA_SUCCESS) p->bytes += f.chunk->bytes;
    return rc;
}

static CUresult back_out(struct pass *p, struct kp_lane *lane, struct kp_flight f) {
    (void)p, (void)lane;
    if (f.chunk->where != KP_ARRIVING) return CUDA_SUCCESS;
    if (kp_physical_unmap(f.at, f.chunk->bytes) == CUDA_SUCCESS) kp_bytes_moved(f.chunk, KP_OUT);
    return CUDA_SUCCESS; /* one that stays mapped is copied into again, next time */
}

static CUresult arrive(struct pass *p, struct kp_lane *lane, struct kp_flight f) {
    (void)p, (void)lane;
    if (f.chunk->where != KP_ARRIVING) return CUDA_SUCCESS;
    kp_bytes_moved(f.chunk, KP_IN);
    kp_keep_arrived(f.chunk);
    return CUDA_SUCCESS;
}

static CUresult context_in(struct pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns);
    if (rc == CUDA_SUCCESS) rc = each_chunk(p, &lane, ctx, send_in);
    if (rc == CUDA_SUCCESS) rc = kp_lane_drain(&lane, p->until_ns + GRACE_NS);
    bool quiet = rc == CUDA_SUCCESS || kp_lane_drain(&lane, kp_now_ns() + GRACE_NS) == CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS && quiet) each_chunk(p, NULL, ctx, back_out);
    kp_lane_close(&lane);
    return rc;
}

static CUresult all_in(struct pass *p) {
    CUresult rc = CUDA_SUCCESS;
    size_t n = 0;
    while (n < p->context_count && (rc = context_in(p, p->contexts[n])) == CUDA_SUCCESS) n++;
    for (size_t i = 0; i < n; i++) /* the one that failed has put back its own */
        each_chunk(p, NULL, p->contexts[i], rc == CUDA_SUCCESS ? arrive : back_out);
    return rc;
}

/* The context failed for good: no later try can succeed, and the program had better see why. */
static bool broken(struct pass *p) {
    bool is = false;
    for (size_t i = 0; i < p->context_count && !is; i++) {
        if (!p->contexts[i]->stream || kp_ctx_push(p->contexts[i]) != CUDA_SUCCESS) continue;
        CUresult rc = kp_real.cuStreamQuery(p->contexts[i]->stream);
        kp_ctx_pop(p->contexts[i]);
        is = rc != CUDA_SUCCESS && rc != CUDA_ERROR_NOT_READY;
    }
    return is;
}

void kp_move_in(int64_t until_ns, struct kp_outcome *o) {
    struct pass p;
    CUresult rc = begin(&p, until_ns, o) ? all_in(&p) : CUDA_ERROR_UNKNOWN;
    if (rc == CUDA_ERROR_OUT_OF_MEMORY) {
        refuse(o, "no-room", "the GPU has not enough free memory", CUDA_SUCCESS);
    } else if (rc != CUDA_SUCCESS) {
        refuse(o, "driver", "copying in failed", rc);
        if (broken(&p)) o->what = KP_LOST;
    }
    if (rc != CUDA_SUCCESS) p.bytes = 0;
    end(&p);
}

bool kp_move_all_in(void) {
    struct kp_books books;
    kp_own_books(&books);
    return books.out == 0;
}

/* ---- books ------------------------------------------------------------------------------------------ */

void kp_move_count(uint64_t copied, uint64_t skipped) {
    kp_books_add(&done.copied, (int64_t)copied);
    kp_books_add(&done.skipped, (int64_t)skipped);
}

void kp_move_verified(bool same) {
    kp_books_add(&done.verified, 1);
    kp_books_add(&done.differed, !same);
}

void kp_move_books(struct kp_move_books *out) {
    out->copied = __atomic_load_n(&done.copied, __ATOMIC_RELAXED);
    out->skipped = __atomic_load_n(&done.skipped, __ATOMIC_RELAXED);
    out->verified = __atomic_load_n(&done.verified, __ATOMIC_RELAXED);
    out->differed = __atomic_load_n(&done.differed, __ATOMIC_RELAXED);
}
