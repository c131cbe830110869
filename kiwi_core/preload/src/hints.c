#include "hints.h"

#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "kiwi_preload.h"

#define RANGES_MAX ((size_t)1 << 20) /* a framework has thousands of blocks */

struct range {
    CUdeviceptr from, to;
};
struct hint {
    uint64_t passed; /* calls when it began to be true */
    size_t count;
    struct range ranges[]; /* in order, apart, each of a leaf at least */
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER; /* taken inside kp_table_mu, never around it */
static struct hint *current;

static struct hint *swap_in(struct hint *fresh) { /* mu held */
    struct hint *old = current;
    __atomic_store_n(&current, fresh, __ATOMIC_RELEASE);
    return old;
}

static void replace(struct hint *fresh) {
    pthread_mutex_lock(&mu);
    struct hint *old = swap_in(fresh);
    pthread_mutex_unlock(&mu);
    free(old);
}

void kp_hints_forget(void) { replace(NULL); }

/* The first range that ends behind p. */
static const struct range *reaching(const struct hint *h, CUdeviceptr p) {
    size_t low = 0, high = h->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (h->ranges[middle].to > p) high = middle;
        else low = middle + 1;
    }
    return low < h->count ? &h->ranges[low] : NULL;
}

void kp_hints_freed(CUdeviceptr at, size_t bytes) {
    if (!__atomic_load_n(&current, __ATOMIC_ACQUIRE)) return;
    pthread_mutex_lock(&mu);
    const struct range *r = current ? reaching(current, at) : NULL;
    struct hint *over = r && r->from < at + bytes ? swap_in(NULL) : NULL;
    pthread_mutex_unlock(&mu);
    free(over);
}

/* ---- what the program says ------------------------------------------------------------------------- */

static int by_address(const void *a, const void *b) {
    const struct range *x = a, *y = b;
    return (x->from > y->from) - (x->from < y->from);
}

/* Puts ranges together that touch, and leaves out what no leaf fits into. */
static void merge(struct hint *h) {
    size_t kept = 0, given = h->count;
    qsort(h->ranges, given, sizeof h->ranges[0], by_address);
    for (size_t i = 0, next; i < given; i = next) {
        struct range r = h->ranges[i];
        for (next = i + 1; next < given && h->ranges[next].from <= r.to; next++) {
            if (h->ranges[next].to > r.to) r.to = h->ranges[next].to;
        }
        if (r.to - r.from >= KP_LEAF_BYTES) h->ranges[kept++] = r;
    }
    h->count = kept;
}

/* Calls that have passed the gate so far.  0: there is nothing to be said now, because nothing is owned
 * here or because the gate is shut. */
KP_API __attribute__((used)) uint64_t kiwi_preload_passed(void) {
    if (!kp_owning() || kp_gate_is_closed() || kp_gate_is_armed()) return 0;
    return kp_gate_passed();
}

/* Nobody will read what is in these ranges, provided that no call has passed since kiwi_preload_passed
 * said `passed_before`.  The caller asks for that number first, and then looks at what is free.  Takes
 * the place of what was said before.  1: good to know; 0: too late, or of no use.  May be called with
 * the GIL held: it waits for nobody. */
KP_API __attribute__((used)) int kiwi_preload_free_ranges(uint64_t passed_before, size_t n, const uint64_t *addr,
                                                          const uint64_t *bytes) {
    if (!passed_before || kiwi_preload_passed() != passed_before || n > RANGES_MAX) return 0;
    struct hint *h = malloc(sizeof *h + n * sizeof h->ranges[0]);
    if (!h) return 0;
    *h = (struct hint){.passed = passed_before};
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] && addr[i] <= UINT64_MAX - bytes[i])
            h->ranges[h->count++] = (struct range){addr[i], addr[i] + bytes[i]};
    }
    merge(h);
    replace(h);
    return 1;
}

/* ---- what the pager makes of it -------------------------------------------------------------------- */

static void mark(const struct hint *h, struct kp_chunk *c, CUdeviceptr at) {
    size_t leaves = c->bytes / KP_LEAF_BYTES;
    memset(c->blank, 0, sizeof c->blank);
    if (!h || c->bytes % KP_LEAF_BYTES || leaves > KP_BLANK_LEAVES) return;
    for (size_t i = 0; i < leaves; i++, at += KP_LEAF_BYTES) {
        const struct range *r = reaching(h, at);
        if (!r) return;
        if (r->from <= at && r->to >= at + KP_LEAF_BYTES) c->blank[i / 64] |= 1ull << i % 64;
    }
}

void kp_hints_mark(struct kp_block *const *blocks, size_t count) {
    pthread_mutex_lock(&mu);
    const struct hint *h = current && current->passed == kp_gate_passed() ? current : NULL;
    struct hint *over = current && !h ? swap_in(NULL) : NULL;
    for (size_t i = 0; i < count; i++) {
        struct kp_block *b = blocks[i];
        CUdeviceptr at = b->addr;
        for (unsigned k = 0; k < b->chunk_count; at += b->chunks[k++].bytes) {
            if (b->chunks[k].where == KP_IN) mark(h, &b->chunks[k], at);
        }
    }
    pthread_mutex_unlock(&mu);
    free(over);
}

size_t kp_blank_bytes(const struct kp_chunk *c) {
    size_t leaves = 0;
    for (size_t i = 0; i < KP_BLANK_LEAVES / 64; i++) leaves += (size_t)__builtin_popcountll(c->blank[i]);
    return leaves * KP_LEAF_BYTES;
}

size_t kp_blank_run(const struct kp_chunk *c, size_t leaf, size_t end) {
    bool is = kp_blank(c, leaf);
    while (leaf < end && kp_blank(c, leaf) == is) leaf++;
    return leaf;
}
