/* The arena: taking and giving back host memory. */
#include "owner/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "base/tested.h"
#include "owner/blocks.h"

#define PIECE_MAX_BYTES ((size_t)1 << 30) /* one registration of everything fails on big machines */
#define PIECES_PER_GPU 8                  /* a small GPU needs small pieces */
#define HOST_RESERVE_BYTES ((uint64_t)256 << 20) /* of the machine's memory, never taken */

pthread_mutex_t kp_arena_mu = PTHREAD_MUTEX_INITIALIZER;
struct kp_piece *kp_pieces;
struct kp_arena_books kp_arena_totals;
int kp_arena_node = -1;
static uint64_t expected; /* bytes that the pass under way has still to take */

size_t kp_piece_bytes(void) {
    size_t want = kp_gpu.total_bytes / PIECES_PER_GPU / KP_ARENA_UNIT * KP_ARENA_UNIT;
    return want < KP_ARENA_UNIT ? KP_ARENA_UNIT : want > PIECE_MAX_BYTES ? PIECE_MAX_BYTES : want;
}

uint64_t kp_arena_total_bytes(void) { return kp_arena_totals.pinned + kp_arena_totals.pageable; }

/* ---- pieces (kp_arena_mu held, except in the slow parts) ------------------------------------------------------ */

static struct kp_piece *new_piece(size_t bytes) {
    size_t units = bytes / KP_ARENA_UNIT;
    struct kp_piece *p = calloc(1, sizeof *p + units);
    if (p) p->base = kp_host_map(bytes, kp_arena_node);
    if (!p || !p->base) {
        free(p);
        return NULL;
    }
    p->units = p->free_units = units;
    return p;
}

uint64_t kp_arena_growth(void) {
    uint64_t host = kp_host_available();
    /* The machine does not count pages of pageable pieces that were never touched: there are few, because
     * pieces are added one at a time, and only when the others are full. */
    return host > HOST_RESERVE_BYTES ? (host - HOST_RESERVE_BYTES) / KP_ARENA_UNIT * KP_ARENA_UNIT : 0;
}

struct kp_piece *kp_piece_grow(size_t need) {
    size_t bytes = need > kp_piece_bytes() ? need : kp_piece_bytes();
    uint64_t may = kp_arena_growth();
    if (may < bytes) bytes = need;
    if (bytes > PIECE_MAX_BYTES) bytes = PIECE_MAX_BYTES;
    if (bytes > may) bytes = (size_t)may;
    return kp_piece_of_size(bytes);
}

struct kp_piece *kp_piece_of_size(size_t bytes) {
    if (kp_fault(KP_FAULT_HOST)) return NULL;
    struct kp_piece *p = bytes ? new_piece(bytes) : NULL;
    if (!p) return NULL;
    p->next = kp_pieces;
    kp_pieces = p;
    kp_arena_totals.pageable += bytes;
    return p;
}

/* Returns the length of the first run of `want` free units, or else of the longest run. */
static size_t find_run(const struct kp_piece *p, size_t want, size_t *start) {
    size_t best = 0;
    for (size_t i = 0; i < p->units && best < want;) {
        size_t n = 0;
        while (i + n < p->units && n < want && !p->taken[i + n]) n++;
        if (n > best) best = n, *start = i;
        i += n + 1;
    }
    return best;
}

static bool add_extent(struct kp_copy *copy, struct kp_piece *p, size_t start, size_t n) {
    struct kp_extent *more = realloc(copy->extents, (copy->count + 1) * sizeof *more);
    if (!more) return false;
    copy->extents = more;
    more[copy->count++] = (struct kp_extent){p->base + start * KP_ARENA_UNIT, n * KP_ARENA_UNIT,
                                             p->pinned ? 0 : n * KP_ARENA_UNIT};
    expected -= expected < n * KP_ARENA_UNIT ? expected : n * KP_ARENA_UNIT;
    memset(&p->taken[start], 1, n);
    p->free_units -= n;
    kp_arena_totals.used += n * KP_ARENA_UNIT;
    return true;
}

static size_t take_from(struct kp_copy *copy, struct kp_piece *only, bool pinned, size_t want) {
    struct kp_piece *best = NULL;
    size_t longest = 0, at = 0;
    for (struct kp_piece *p = only ? only : kp_pieces; p && longest < want; p = only ? NULL : p->next) {
        size_t start = 0;
        if (p->busy || p->pinned != pinned || p->free_units == 0) continue;
        size_t n = find_run(p, want, &start);
        if (n > longest) longest = n, best = p, at = start;
    }
    return longest && add_extent(copy, best, at, longest) ? longest : 0;
}

static void give(struct kp_copy *copy) {
    for (unsigned i = 0; i < copy->count; i++) {
        struct kp_extent e = copy->extents[i];
        struct kp_piece *p = kp_pieces;
        while (e.at < p->base || e.at >= p->base + p->units * KP_ARENA_UNIT) p = p->next;
        size_t n = e.bytes / KP_ARENA_UNIT;
        memset(&p->taken[(size_t)(e.at - p->base) / KP_ARENA_UNIT], 0, n);
        p->free_units += n;
        kp_arena_totals.used -= e.bytes;
    }
    free(copy->extents);
    *copy = (struct kp_copy){0};
}

/* Takes from a piece that was just added, and from which the pass will go on to take. */
static size_t take_from_new(struct kp_copy *copy, struct kp_piece *p, size_t want) {
    size_t got = p ? take_from(copy, p, false, want) : 0;
    if (!got) return 0;
    uint64_t used = got * KP_ARENA_UNIT + expected, all = p->units * KP_ARENA_UNIT;
    copy->extents[copy->count - 1].ahead = (size_t)(used < all ? used : all);
    return got;
}

static bool take(struct kp_copy *copy, size_t bytes, bool only_pinned) {
    size_t left = (bytes + KP_ARENA_UNIT - 1) / KP_ARENA_UNIT;
    *copy = (struct kp_copy){0};
    pthread_mutex_lock(&kp_arena_mu);
    while (left) {
        size_t got = take_from(copy, NULL, true, left);
        if (!got && !only_pinned) got = take_from(copy, NULL, false, left);
        if (!got && !only_pinned) got = take_from_new(copy, kp_piece_grow(left * KP_ARENA_UNIT), left);
        if (!got) break;
        left -= got;
    }
    if (left) give(copy);
    pthread_mutex_unlock(&kp_arena_mu);
    return left == 0;
}

bool kp_arena_take(struct kp_copy *copy, size_t bytes) {
    bool good = take(copy, bytes, false);
    for (unsigned i = 0; good && i < copy->count; i++) {
        struct kp_extent e = copy->extents[i];
        /* Not only in new pieces: of an older one some pages may never have been touched, or could not be had. */
        good = !e.ahead || kp_pages_need(e.at, e.bytes, e.ahead);
    }
    if (good) return true;
    kp_pages_end();
    kp_arena_give(copy);
    return false;
}

bool kp_arena_take_pinned(struct kp_copy *copy, size_t bytes) { return take(copy, bytes, true); }

void kp_arena_expect(uint64_t bytes) {
    if (!bytes) kp_pages_end();
    pthread_mutex_lock(&kp_arena_mu);
    expected = (bytes + KP_ARENA_UNIT - 1) / KP_ARENA_UNIT * KP_ARENA_UNIT;
    pthread_mutex_unlock(&kp_arena_mu);
}

void kp_arena_give(struct kp_copy *copy) {
    if (copy->count == 0) return;
    pthread_mutex_lock(&kp_arena_mu);
    give(copy);
    if (kp_arena_total_bytes() > kp_arena_advance_bytes()) kp_pinning_wake();
    pthread_mutex_unlock(&kp_arena_mu);
}

uint64_t kp_arena_room(void) {
    pthread_mutex_lock(&kp_arena_mu);
    uint64_t room = kp_arena_growth();
    for (struct kp_piece *p = kp_pieces; p; p = p->next) room += p->busy ? 0 : p->free_units * KP_ARENA_UNIT;
    pthread_mutex_unlock(&kp_arena_mu);
    return room;
}

void kp_arena_books(struct kp_arena_books *out) {
    pthread_mutex_lock(&kp_arena_mu);
    *out = kp_arena_totals;
    pthread_mutex_unlock(&kp_arena_mu);
}

void kp_piece_count(struct kp_piece *p, bool pinned) {
    uint64_t bytes = p->units * KP_ARENA_UNIT;
    p->pinned = pinned;
    *(pinned ? &kp_arena_totals.pageable : &kp_arena_totals.pinned) -= bytes;
    *(pinned ? &kp_arena_totals.pinned : &kp_arena_totals.pageable) += bytes;
}

void kp_arena_context_gone(CUcontext ctx) {
    pthread_mutex_lock(&kp_arena_mu);
    for (struct kp_piece *p = kp_pieces; p; p = p->next) {
        if (p->ctx != ctx) continue;
        if (p->pinned) kp_piece_count(p, false); /* the registration ended with the context */
        p->ctx = NULL;
        p->stuck = false; /* the piece need not be unregistered any more */
    }
    pthread_mutex_unlock(&kp_arena_mu);
}
