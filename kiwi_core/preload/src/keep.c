#include "keep.h"

#include <stdlib.h>
#include <string.h>

#include "allowed.h"
#include "fault.h"
#include "hash.h"
#include "hints.h"
#include "log.h"
#include "move.h"
#include "real.h"

static size_t leaves(const struct kp_chunk *c) { return c->bytes / KP_LEAF_BYTES; }

void kp_keep_begin(struct kp_chunk *c) {
    c->first_leaf = KP_NO_LEAF;
    c->sent = false;
}

void kp_keep_hash(struct kp_ctx *ctx, struct kp_flight f, size_t *next_leaf) {
    size_t n = leaves(f.chunk);
    if (kp_blank_all(f.chunk) || !kp_hash_ready(ctx) || !kp_hash_room(ctx, *next_leaf, n)) return;
    for (size_t i = 0, to; i < n; i = to) {
        to = kp_blank_run(f.chunk, i, n);
        if (kp_blank(f.chunk, i)) continue;
        if (kp_hash_submit(ctx, f.at + i * KP_LEAF_BYTES, *next_leaf + i, to - i) != CUDA_SUCCESS) return;
    }
    f.chunk->first_leaf = *next_leaf;
    *next_leaf += n;
}

bool kp_keep_changed(const struct kp_ctx *ctx, const struct kp_chunk *c, size_t leaf) {
    if (kp_blank(c, leaf)) return false;
    if (!c->kept || c->first_leaf == KP_NO_LEAF) return true;
    const struct kp_digest *now = kp_hash_result(ctx, c->first_leaf + leaf);
    return memcmp(now, &c->digests[leaf], sizeof *now) != 0 && !kp_fault(KP_FAULT_HASH);
}

bool kp_keep_any_changed(const struct kp_ctx *ctx, const struct kp_chunk *c) {
    for (size_t i = 0; i < leaves(c); i++) {
        if (kp_keep_changed(ctx, c, i)) return true;
    }
    return false;
}

static const char *host_leaf(const struct kp_copy *copy, size_t leaf) {
    size_t offset = leaf * KP_LEAF_BYTES;
    const struct kp_extent *e = copy->extents;
    while (offset >= e->bytes) offset -= e++->bytes;
    return e->at + offset;
}

static bool verifying, hashing = true;

void kp_keep_prepare(void) {
    const char *verify = getenv("KIWI_VERIFY"), *keep = getenv("KIWI_PRELOAD_KEEP");
    verifying = verify && strcmp(verify, "1") == 0;
    hashing = !keep || strcmp(keep, "0") != 0;
}

bool kp_keep_wanted(void) { return hashing; }

static void unknown(struct kp_digest *d) { memset(d, 0xff, sizeof *d); } /* no hash is that */

CUresult kp_keep_verify(struct kp_lane *lane, struct kp_flight f, int64_t until_ns) {
    CUresult rc = CUDA_SUCCESS;
    char *scratch = f.chunk->kept && verifying ? malloc(KP_LEAF_BYTES) : NULL;
    for (size_t i = 0; scratch && i < leaves(f.chunk) && rc == CUDA_SUCCESS; i++) {
        if (kp_blank(f.chunk, i) || kp_keep_changed(lane->ctx, f.chunk, i)) continue;
        rc = kp_real.cuMemcpyDtoHAsync_v2(scratch, f.at + i * KP_LEAF_BYTES, KP_LEAF_BYTES, lane->ctx->stream);
        if (rc == CUDA_SUCCESS) rc = kp_lane_wait(lane, until_ns);
        bool same = rc != CUDA_SUCCESS || memcmp(scratch, host_leaf(&f.chunk->copy, i), KP_LEAF_BYTES) == 0;
        kp_move_verified(same);
        if (same) continue;
        kp_warn("2 MiB of GPU memory changed though its hash did not: please report this");
        unknown(&f.chunk->digests[i]); /* so it is copied */
    }
    free(scratch);
    return rc;
}

/* ---- whose copy is worth what ---------------------------------------------------------------------- */

static void not_kept(struct kp_chunk *c) {
    if (c->kept) kp_books_add(&kp_totals.kept, -(int64_t)c->bytes);
    c->kept = false;
}

void kp_keep_drop(struct kp_chunk *c, bool give) {
    not_kept(c);
    free(c->digests);
    c->digests = NULL;
    if (give) kp_arena_give(&c->copy);
}

/* `copy` is what was hashed in this pass. */
static void remember(const struct kp_ctx *ctx, struct kp_chunk *c) {
    not_kept(c);
    c->sent = false;
    if (c->first_leaf == KP_NO_LEAF) {
        kp_keep_drop(c, false);
        return;
    }
    if (!c->digests) c->digests = malloc(leaves(c) * sizeof *c->digests);
    if (c->digests) memcpy(c->digests, kp_hash_result(ctx, c->first_leaf), leaves(c) * sizeof *c->digests);
    for (size_t i = 0; c->digests && i < leaves(c); i++) {
        if (kp_blank(c, i)) unknown(&c->digests[i]);
    }
}

void kp_keep_left(const struct kp_ctx *ctx, struct kp_chunk *c) {
    remember(ctx, c);
    kp_move_unused(kp_blank_bytes(c));
    if (kp_blank_all(c)) kp_keep_drop(c, true); /* nothing of it is worth host memory */
}

void kp_keep_cleaned(const struct kp_ctx *ctx, struct kp_chunk *c) {
    remember(ctx, c);
    kp_keep_arrived(c, true);
}

bool kp_keep_room(size_t bytes) {
    uint64_t kept = __atomic_load_n(&kp_totals.kept, __ATOMIC_RELAXED), most = kp_limits_keep();
    return kept <= most && bytes <= most - kept;
}

void kp_keep_arrived(struct kp_chunk *c, bool keep) {
    if (!c->digests || !keep || !kp_keep_room(c->bytes)) {
        kp_keep_drop(c, true);
        return;
    }
    c->kept = true;
    kp_books_add(&kp_totals.kept, (int64_t)c->bytes);
}

static void forget(struct kp_block *b, void *arg) {
    const uint64_t *most = arg;
    for (unsigned i = 0; i < b->chunk_count; i++) {
        if (__atomic_load_n(&kp_totals.kept, __ATOMIC_RELAXED) <= *most) return;
        if (b->chunks[i].kept) kp_keep_drop(&b->chunks[i], true);
    }
}

void kp_move_forget(uint64_t most_bytes) {
    pthread_mutex_lock(&kp_table_mu);
    kp_table_each(forget, &most_bytes);
    pthread_mutex_unlock(&kp_table_mu);
}
