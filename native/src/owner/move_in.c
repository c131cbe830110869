/* Paging in: see move_out.c. */
#include <time.h>

#include "base/kiwi_preload.h"
#include "base/real.h"
#include "gate/gate.h"
#include "owner/pass.h"

#define SCRUB_WAIT_NS 200000000ll /* the driver scrubs freed memory before it can be allocated again */
#define SCRUB_STEP_NS 5000000ll
#define ENDING_STEP_NS 1000000ll

static CUresult map_again(struct kp_pass *p, struct kp_flight *f) {
    int64_t limit = kp_now_ns() + SCRUB_WAIT_NS;
    if (limit > p->until_ns) limit = p->until_ns;
    CUresult rc = kp_flight_back(f);
    while (rc == CUDA_ERROR_OUT_OF_MEMORY && kp_now_ns() < limit) {
        nanosleep(&(struct timespec){.tv_nsec = SCRUB_STEP_NS}, NULL);
        rc = kp_flight_back(f);
    }
    if (rc == CUDA_SUCCESS) kp_bytes_moved(f->chunk, KP_ARRIVING);
    return rc;
}

static CUresult send_in(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    struct kp_flight landed;
    CUresult rc = CUDA_SUCCESS;
    if (f.chunk->where == KP_IN) return rc;
    /* Earlier copies run meanwhile. Of an object that is arriving, some mappings may be missing. */
    if (f.chunk->where == KP_OUT || f.block->object) rc = map_again(p, &f);
    if (rc == CUDA_SUCCESS && kp_lane_full(lane)) rc = kp_lane_land(lane, p->until_ns, &landed);
    if (rc == CUDA_SUCCESS) rc = kp_lane_in(lane, f);
    if (rc == CUDA_SUCCESS) p->bytes += f.chunk->bytes;
    return rc;
}

static CUresult back_out(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    (void)p, (void)lane;
    if (f.chunk->where != KP_ARRIVING) return CUDA_SUCCESS;
    if (kp_flight_away(f) == CUDA_SUCCESS) kp_bytes_moved(f.chunk, KP_OUT);
    return CUDA_SUCCESS; /* the next page-in copies again into a chunk that stays mapped */
}

static CUresult arrive(struct kp_pass *p, struct kp_lane *lane, struct kp_flight f) {
    (void)p, (void)lane;
    if (f.chunk->where == KP_IN || f.chunk->where == KP_OUT) return CUDA_SUCCESS;
    kp_bytes_moved(f.chunk, KP_IN);
    kp_flight_over(f);
    uint64_t epoch;
    if (kp_gate_is_still(&epoch)) f.chunk->epoch = epoch; /* nothing can change it yet: the copy stays right */
    else kp_arena_give(&f.chunk->copy);
    return CUDA_SUCCESS;
}

static CUresult context_in(struct kp_pass *p, struct kp_ctx *ctx) {
    struct kp_lane lane;
    CUresult rc = kp_lane_open(&lane, ctx);
    if (rc != CUDA_SUCCESS) return rc;
    rc = kp_lane_drain(&lane, p->until_ns);
    if (rc == CUDA_SUCCESS) rc = kp_pass_each(p, &lane, ctx, send_in);
    if (rc == CUDA_SUCCESS) rc = kp_lane_drain(&lane, p->until_ns + KP_GRACE_NS);
    bool quiet = rc == CUDA_SUCCESS || kp_lane_drain(&lane, kp_now_ns() + KP_GRACE_NS) == CUDA_SUCCESS;
    if (rc != CUDA_SUCCESS && quiet) kp_pass_each(p, NULL, ctx, back_out);
    kp_lane_close(&lane);
    return rc;
}

CUresult kp_pass_all_in(struct kp_pass *p) {
    CUresult rc = CUDA_SUCCESS;
    size_t n = 0;
    while (n < p->context_count && (rc = context_in(p, p->contexts[n])) == CUDA_SUCCESS) n++;
    for (size_t i = 0; i < n; i++) /* the context that failed has undone its own part */
        kp_pass_each(p, NULL, p->contexts[i], rc == CUDA_SUCCESS ? arrive : back_out);
    return rc;
}

/* Returns whether a context has failed for good: no later try can succeed, and the program should see why. */
static bool broken(struct kp_pass *p) {
    bool is = false;
    for (size_t i = 0; i < p->context_count && !is; i++) {
        if (!p->contexts[i]->stream || kp_ctx_push(p->contexts[i]) != CUDA_SUCCESS) continue;
        CUresult rc = kp_real.cuStreamQuery(p->contexts[i]->stream);
        kp_ctx_pop(p->contexts[i]);
        is = rc != CUDA_SUCCESS && rc != CUDA_ERROR_NOT_READY;
    }
    return is;
}

static void move_in_once(int64_t until_ns, struct kp_outcome *o) {
    struct kp_pass p;
    bool good = kp_pass_begin(&p, until_ns, o);
    CUresult rc = !good        ? CUDA_ERROR_UNKNOWN
                  : p.stranded ? CUDA_ERROR_OUT_OF_MEMORY /* for a context to copy with */
                               : kp_pass_all_in(&p);
    if (rc == CUDA_ERROR_OUT_OF_MEMORY) {
        kp_pass_refuse(o, "no-room", "the GPU has not enough free memory", CUDA_SUCCESS);
    } else if (rc != CUDA_SUCCESS) {
        kp_pass_refuse(o, "driver", "copying in failed", rc);
        if (broken(&p)) o->what = KP_LOST;
    }
    if (rc != CUDA_SUCCESS) p.bytes = 0;
    kp_pass_end(&p);
}

static void look(struct kp_block *b, void *arg) {
    bool *left = arg;
    for (unsigned i = 0; (b->ctx || b->object) && i < b->chunk_count; i++) *left = *left || b->chunks[i].where != KP_IN;
}

static bool left_out(void) {
    bool left = false;
    pthread_mutex_lock(&kp_table_mu);
    kp_table_each(look, &left);
    kp_vmm_each(look, &left);
    pthread_mutex_unlock(&kp_table_mu);
    return left;
}

/* Repeats the pass until nothing is left out. A pass omits a context that is being destroyed. If the context stays
 * after all, because it is the primary one and others use it, its memory must be back before the gate opens. */
void kp_move_in(int64_t until_ns, struct kp_outcome *o) {
    uint64_t bytes = 0;
    for (;;) {
        move_in_once(until_ns, o);
        o->bytes += bytes;
        if (o->what != KP_MOVED || !left_out()) return;
        bytes = o->bytes;
        if (kp_now_ns() >= until_ns) break;
        nanosleep(&(struct timespec){.tv_nsec = ENDING_STEP_NS}, NULL);
    }
    kp_pass_refuse(o, "driver", "a context that has memory outside the GPU is just being destroyed", CUDA_SUCCESS);
}

bool kp_move_all_in(void) {
    struct kp_books books;
    kp_own_books(&books);
    return books.out == 0;
}

